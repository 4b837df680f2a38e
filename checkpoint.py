"""
Checkpoints: a run saves its state, and another run, at any world size, loads it.

    out_dir/ckpt.pt      full: one file in nanoGPT's layout, which nanoGPT can read
    out_dir/last.pt      full, with always_save_checkpoint=False, where ckpt.pt is the best
    out_dir/step-<n>.pt  full, a milestone (keep_every) that is never removed
    out_dir/step-<n>/    sharded: each rank writes its rows
    out_dir/best         a link to the best sharded one, with always_save_checkpoint=False

    python checkpoint.py full out-x    # out-x's newest checkpoint, sharded, as out-x/ckpt.pt

Any strategy at any world size reads both kinds. In memory a state is flat,
{"model.<name>": tensor, "exp_avg.<name>": tensor, ...}, with a header of plain values.

Full: rank 0 gathers the state into its host memory, tensor by tensor, and writes one file.
Sharded: all ranks write and sync their rows. Then rank 0 writes header.json, with the
checksums of all files; only now is the directory a checkpoint.
To read either kind, every rank maps the files and takes the rows that it keeps now.
So a kill at any moment leaves the last complete checkpoint. Loading one never runs code from it.
"""

import fcntl
import json
import math
import os
import pickle
import re
import shutil
import sys
import time
import warnings
import zipfile
import zlib
from concurrent import futures
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorProperties
from torch.distributed.tensor import DTensor

from configurator import as_dict, model_args
from data.files import sync, write_files
from data.loader import SafeUnpickler, data_dir, read_meta
from fsdp import gather_full, tied_names, write_full
from optimizer import allocate_state
from ranks import (
    PATIENCE,
    World,
    all_reduce_mean_,
    first_line,
    from_rank0,
    patient_group,
    print0,
    run,
)

HEADER = "header.json"  # of a sharded checkpoint, written last
# Buffers in other programs' files, which we skip: attention masks, rotary frequencies.
BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
warnings.filterwarnings("ignore", "torch.distributed is disabled")  # DCP, in one process


# ---------- a state in memory -------------------------------------------------


def flat_state(model, optimizer=None, left_out=()):
    """{"model.<name>": parameter, "<key>.<name>": its optimizer state}, sharded as they are
    now; tied parameters have their first name. left_out: names of parameters."""
    tensors = {}
    for name, p in model.named_parameters():
        if name in left_out:
            continue
        tensors[f"model.{name}"] = without_float8_wrapper(p.detach())
        if optimizer:
            for key, t in optimizer.state.get(p, {}).items():
                tensors[f"{key}.{name}"] = t
    return tensors


def without_float8_wrapper(t):
    """t without the wrapper that torchao puts around a float8 parameter's rows, so that
    FSDP2 gathers them in float8. Files hold plain fp32."""
    rows = getattr(t, "_local_tensor", None)
    if not hasattr(rows, "fsdp_pre_all_gather"):
        return t
    return DTensor.from_local(
        rows._tensor, t.device_mesh, t.placements, shape=t.shape, stride=t.stride())


def require_finite_state(tensors, world, step):
    """SystemExit on all ranks if any rank has a NaN or an infinity (collective)."""
    norms = []
    for t in tensors.values():
        rows = t.to_local() if isinstance(t, DTensor) else t
        norms.append(rows.float().norm(1).to(world.device))
    # One copy to the host, since it waits for the GPU. A mean keeps NaN and infinity.
    norms = all_reduce_mean_(torch.stack(norms).cpu(), world)
    for key, norm in zip(tensors, norms):
        if not norm.isfinite():
            raise SystemExit(
                f"{key} is not finite (NaN or infinity) after step {step} and is not saved: "
                "try a lower learning_rate, or grad_clip=1.0")


def load(source, model, optimizer, world):
    """Set the weights and the optimizer's state from the source (all ranks).
    optimizer: None to load only the weights."""
    params = dict(model.named_parameters(remove_duplicate=False))
    if optimizer:
        allocate_state(optimizer)
    ours = flat_state(model, optimizer)
    state = optimizer.state if optimizer else {}  # of the parameters that train

    # 1) Is there a place for every key of the source?
    for key in source.shapes:
        kind, _, name = key.partition(".")
        if name not in params:
            raise SystemExit(f"{source.path} is of another model: this one has no {key}")
        if kind != "model" and params[name] in state and key not in ours:
            raise SystemExit(
                f"{source.path} has {key}, but the optimizer makes no such state in its first "
                "step: it must make all its state there (see optimizer.py)")

    # 2) Whose state does the source lack? Parameters that were frozen until now, or all if it has
    # only weights. The optimizer makes theirs in its first step, as in a new run.
    missing = [key for key in ours if key not in source.shapes and not key.startswith("model.")]
    anew = {key.partition(".")[2] for key in missing}
    for name in anew:
        del state[params[name]]
    if anew and source.header["iter_num"]:
        print0(world, f"{source.path} lacks optimizer state of {len(anew)} parameters that "
                      "train now; theirs starts anew")

    # 3) Read the rest.
    wanted = flat_state(model, optimizer)
    if source.only_base:  # initial_value sets the new matrices
        wanted = {f"model.{name}": wanted[f"model.{name}"] for name in model.base_names}
    source.read(wanted, model.config)
    if world.size > 1:
        # Another rank's disk may be slow. Wait here, since a collective would time out.
        dist.barrier(patient_group())


def require_shape(source, key, ours, config):
    """SystemExit if the model's shape, `ours`, is not the checkpoint's. Only a table of
    positions may be longer in the checkpoint than this run's context."""
    theirs = source.shapes.get(key)
    if theirs == ours:
        return
    if theirs and theirs[1:] == ours[1:]:
        lengths = (source.header["model_args"].get("block_size"), config.block_size)
        if (theirs[0], ours[0]) == lengths and theirs[0] > ours[0]:
            return
    raise SystemExit(
        f"{source.path} is of another model: {key} is {theirs or 'missing'}, not {ours}")


# ---------- full: one file ----------------------------------------------------


def write_ckpt_pt(directory, names, flat, header):
    """Write nanoGPT's layout: weights by name, optimizer state by number, and the
    header's values next to them. names: those of the file and its copies."""
    weights = {}
    state = {}
    for key, tensor in flat.items():
        kind, _, name = key.partition(".")
        if kind == "model":
            weights[name] = tensor
        else:
            number = header["param_names"].index(name)
            state.setdefault(number, {})[kind] = tensor
    for first, *others in header["ties"]:
        for name in others:
            weights[name] = weights[first]  # one storage, so stored once
    ckpt = {key: value for key, value in header.items() if key not in ("ties", "param_groups")}
    ckpt["model"] = weights
    ckpt["optimizer"] = {"state": state, "param_groups": header["param_groups"]}

    def save(f):
        try:
            torch.save(ckpt, f)
        except RuntimeError as e:
            raise root_cause(e)

    write_files(directory, dict.fromkeys(names, save))


def open_full(path):
    """The Source of a ckpt.pt, ours or nanoGPT's. Raises almost anything if it is
    damaged. torch.load checks no checksums. This checks the pickle's, so the header is
    right; `is_intact` checks the tensors'."""
    if not zipfile.is_zipfile(path):
        raise ValueError(
            "it is damaged, or PyTorch wrote it before 1.6: torch.load and torch.save convert it")
    with zipfile.ZipFile(path) as records:
        [pickled] = [name for name in records.namelist() if name.endswith("/data.pkl")]
        records.read(pickled)  # raises if its checksum is wrong
    try:
        # mmap: a tensor's bytes are read when it is used, so memory holds one at a time.
        ckpt = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError:  # its text would suggest running the file's code
        raise ValueError("it has more in it than tensors and plain values, or is damaged")
    missing = {"model", "model_args", "config", "iter_num", "best_val_loss"}.difference(ckpt)
    if missing:
        raise ValueError(f"it has no {', '.join(sorted(missing))}, as nanoGPT's and ours have")
    weights = {}
    for name, tensor in ckpt.pop("model").items():
        name = re.sub(r"^((module|_orig_mod)\.)+", "", name)  # DDP's and the compiler's
        if not name.endswith(BUFFERS):
            weights[name] = tensor
    flat = {f"model.{name}": tensor for name, tensor in weights.items()}
    names = ckpt.get("param_names")
    if not names:
        # nanoGPT stores no names. It numbers the matrices first, then the vectors.
        untied = [name for name in weights if name != "lm_head.weight"]
        names = sorted(untied, key=lambda name: weights[name].dim() < 2)
    optimizer = ckpt.pop("optimizer", {"state": {}})
    for number, state in optimizer["state"].items():
        for key, tensor in state.items():
            flat[f"{key}.{names[number]}"] = tensor
    ckpt["iter_num"] = int(ckpt["iter_num"])
    ckpt["best_val_loss"] = float(ckpt["best_val_loss"])  # nanoGPT's is a tensor
    shapes = {key: tuple(tensor.shape) for key, tensor in flat.items()}
    return Source(path, ckpt, shapes, flat.__getitem__)


# ---------- sharded: a directory ----------------------------------------------


def sealed(header):
    """The text of header.json: the header and its checksum."""
    crc = zlib.crc32(json.dumps(header).encode())
    return json.dumps({"crc": crc, "header": header}, indent=1)


def read_header(path):
    with open(os.path.join(path, HEADER)) as f:
        text = f.read()
    header = json.loads(text)["header"]
    if text != sealed(header):
        raise ValueError(f"its {HEADER} is damaged")
    return header


class Writer(dcp.FileSystemWriter):
    """PyTorch's writer, but it also completes the checkpoint. DCP passes each rank's write_data
    results to finish on rank 0; an error in either is a CheckpointException on all ranks."""

    def __init__(self, path, header):
        # copy_ahead is for tensors that are still on a GPU. PyTorch 2.13 syncs a file
        # before Python's buffer is flushed, so we sync it ourselves.
        super().__init__(path, per_thread_copy_ahead=0, sync_files=False)
        self.header = header

    def write_data(self, plan, planner):
        """This rank's rows. Returns a Future of (DCP's own results, {file: checksum})."""
        try:
            results = super().write_data(plan, planner).value()
        except RuntimeError as e:
            raise root_cause(e)
        prefix = plan.storage_data.prefix  # "__<rank>_"
        files = [name for name in os.listdir(self.path) if name.startswith(prefix)]
        written = torch.futures.Future()
        written.set_result((results, {name: self.checksum_on_disk(name) for name in files}))
        return written

    def finish(self, metadata, results):
        """On rank 0: write .metadata, then the header, which completes the checkpoint."""
        super().finish(metadata, [of_rank for of_rank, _ in results])
        files = {".metadata": self.checksum_on_disk(".metadata")}
        for _, checksums in results:
            files.update(checksums)
        missing = files.keys() - set(os.listdir(self.path))
        if missing:
            raise SystemExit(
                f"out_dir={self.header['config']['out_dir']} is not the same on all nodes, "
                f"{self.path} lacks {min(missing)}: use a shared disk, or --checkpoint=full, and "
                "copy ckpt.pt to each node before you resume")
        header = {**self.header, "files": files}
        write_files(self.path, {HEADER: [sealed(header).encode()]})
        sync(self.path.parent)  # the name of the directory itself

    def checksum_on_disk(self, name):
        sync(self.path / name)
        return checksum(self.path / name)


def remove_sharded(path):
    """Remove the header first, so that a kill leaves no checkpoint, not a damaged one."""
    with suppress(OSError):
        os.remove(os.path.join(path, HEADER))
    shutil.rmtree(path, ignore_errors=True)


def open_sharded(path):
    """The Source of a directory. `is_intact` checks its rows against their checksums."""
    header = read_header(path)
    if checksum(os.path.join(path, ".metadata")) != header["files"][".metadata"]:
        raise ValueError("its .metadata is damaged")
    entries = MetadataReader(path).read_metadata().state_dict_metadata
    shapes = {key: tuple(entry.size) for key, entry in entries.items()}

    def get(key):
        tensor = torch.empty(shapes[key], dtype=entries[key].properties.dtype)
        read_sharded(path, {key: tensor})
        return tensor

    return Source(path, header, shapes, get, sharded=True)


def read_sharded(path, tensors):
    """Fill tensors, each with this rank's rows. Ranks don't wait for each other."""
    dcp.load(tensors, storage_reader=MetadataReader(path), no_dist=True)


class MetadataReader(dcp.FileSystemReader):
    """PyTorch's own reader uses pickle.load for .metadata, which can run code."""

    def read_metadata(self, *args, **kwargs):
        with open(os.path.join(self.path, ".metadata"), "rb") as f:
            return MetadataUnpickler(f, DESCRIBES_TENSORS).load()


class MetadataUnpickler(SafeUnpickler):
    def find_class(self, module, name):
        if (module, name) == ("builtins", "getattr"):
            return lambda *args: None  # Python 3.11.2 writes an enum so: the layout, not needed
        found = super().find_class(module, name)
        return AnyProperties if found is TensorProperties else found


class AnyProperties(TensorProperties):
    """A tensor's properties, as written by any version of PyTorch. 2.13 writes 5 of them;
    2.15 writes one more, which 2.13's class refuses. We only need the first, the dtype."""

    def __setstate__(self, state):
        self.dtype = state[0]


# Without BytesStorageMetadata: PyTorch would unpickle the bytes of such an entry.
DESCRIBES_TENSORS = {
    "torch": "Size bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64",
    "torch.serialization": "_get_layout",
    "pathlib": "PosixPath",
    "pathlib._local": "PosixPath",  # Python 3.13
    "torch.distributed.checkpoint.filesystem": "_StorageInfo",
    "torch.distributed.checkpoint.metadata": (
        "ChunkStorageMetadata Metadata MetadataIndex StorageMeta TensorProperties "
        "TensorStorageMetadata _MEM_FORMAT_ENCODING"),
}


def checksum(path):
    crc = 0
    with open(path, "rb") as f:
        while piece := f.read(1 << 24):
            crc = zlib.crc32(piece, crc)
    return crc


# ---------- which one a run starts from ---------------------------------------


@dataclass
class Source:
    """An opened checkpoint, or a directory in Hugging Face format. Every rank opens its own."""
    path: str
    header: dict
    shapes: dict  # {flat key: shape}
    get: object = None  # function: flat key -> the whole tensor on the CPU
    sharded: bool = False
    base: object = None  # the Source of the model that its LoRA matrices adapt
    only_base: bool = False  # a new LoRA run's: it has the base alone, and no matrices yet

    def has(self, name):
        """True if it, or its base, has values for this parameter."""
        in_base = self.base is not None and self.base.has(name)
        return in_base or f"model.{name}" in self.shapes

    def read(self, tensors, config):
        """Set tensors, {flat key: tensor}, on this rank: each takes the rows that it keeps now,
        no matter which ranks wrote them. Keys that this source lacks come from its base."""
        if self.base:
            of_base = {key: tensors[key] for key in tensors if key in self.base.shapes}
            self.base.read(of_base, config)
            tensors = {key: tensors[key] for key in tensors if key not in of_base}
        as_saved = {}
        for key, t in tensors.items():
            require_shape(self, key, tuple(t.shape), config)
            if self.sharded and t.shape == self.shapes[key]:
                as_saved[key] = t
            else:
                rows = tuple(slice(n) for n in t.shape)  # a shorter context: fewer positions
                write_full(t, self.get(key)[rows])
        if as_saved:
            read_sharded(self.path, as_saved)  # DCP reads only this rank's rows


def weights_only(source):
    """The source at step 0 and without optimizer state, to start another run from."""
    header = {**source.header, "iter_num": 0, "best_val_loss": 1e9, "scaler": None}
    run_id = source.header.get("run", "?")  # nanoGPT's checkpoints have none
    header["origin"] = f"step {source.header['iter_num']} of run {run_id}"
    shapes = {key: shape for key, shape in source.shapes.items() if key.startswith("model.")}
    return replace(source, header=header, shapes=shapes)


def on_base(base, init_from):
    """The Source of a new LoRA run: it has no values of its own, only those of `base`.
    init_from: the base's name, for the headers of the run's checkpoints."""
    where = init_from
    if os.path.exists(where):
        where = os.path.abspath(where)  # a later run may start in another directory
    origin = base.header.get("origin")  # Hugging Face's models have none
    header = {**base.header, "base": where, "base_origin": origin}
    return Source(base.path, header, shapes={}, base=base, only_base=True)


def require_base_outside(out_dir, base):
    """SystemExit if LoRA's base is in the new run's out_dir, which would then be renamed."""
    own = os.path.realpath(out_dir)
    if os.path.exists(base) and os.path.commonpath([own, os.path.realpath(base)]) == own:
        raise SystemExit(
            f"out_dir={out_dir} has LoRA's base, {base}, which must stay there; pass another "
            "--out_dir")


def find(out_dir, world):
    """The newest intact checkpoint in out_dir as a Source, None if there is none (all
    ranks). out_dir may also be a checkpoint itself.
    Damaged ones are named and skipped; SystemExit if all of them are damaged."""
    newest_first, problems = from_rank0(world, lambda: list_all(out_dir))
    found = None
    for path, step in newest_first:
        source = open_intact(path, step, world)
        good = torch.tensor(float(source is not None))
        if all_reduce_mean_(good, world, patient=True) == 1:
            found = source
            break
        problems.append(f"{path}: damaged, replaced just now, or not visible to every rank")
    remedy = "move it away, or pass another out_dir"
    if problems and not found:
        raise SystemExit(f"{problems[0]}; {remedy}")
    for problem in problems:
        print0(world, f"skipping {problem}; {remedy}", file=sys.stderr)
    return found


def list_all(out_dir):
    """([(path, step)] of all checkpoints, newest first, and a full one before a sharded one of
    the same step; a line for each unreadable one). It reads their headers."""
    found = []
    problems = []
    for name in ("", "ckpt.pt", "last.pt", *complete_steps(out_dir)):
        path = os.path.join(out_dir, name) if name else out_dir
        if not os.path.isfile(path) and not os.path.isfile(os.path.join(path, HEADER)):
            continue
        try:
            found.append((path, open_one(path).header["iter_num"]))
        except Exception as e:  # a damaged zip or pickle raises almost anything
            problems.append(f"{path}: not readable ({type(e).__name__}: {first_line(e)})")
    found.sort(key=lambda pair: pair[1], reverse=True)
    return found, problems


def open_one(path):
    return open_full(path) if os.path.isfile(path) else open_sharded(path)


def open_intact(path, step, world):
    """The Source at path. None if this rank finds damage, or another step: a run that is still
    going may have replaced the file since rank 0 listed it."""
    try:
        source = open_one(path)
        is_good = source.header["iter_num"] == step and is_intact(source, world)
    except Exception:  # damage raises almost anything
        return None
    return source if is_good else None


def is_intact(source, world):
    """True if this rank's share of the bytes matches its checksums; a zip may also raise. The
    ranks divide up a sharded checkpoint's files, and the records of a full one's zip."""
    mine = slice(world.rank, None, world.size)
    if source.sharded:
        files = sorted(source.header["files"].items())[mine]
        return all(checksum(os.path.join(source.path, name)) == crc for name, crc in files)
    with zipfile.ZipFile(source.path) as records:
        for name in records.namelist()[mine]:
            with records.open(name) as f:
                while f.read(1 << 24):
                    pass  # at the end zipfile checks the checksum
    return True


def complete_steps(out_dir):
    """Names of the sharded checkpoints that have a header, oldest first."""
    if not os.path.isdir(out_dir):
        return []
    names = filter(is_step, sorted(os.listdir(out_dir)))
    return [name for name in names if os.path.exists(os.path.join(out_dir, name, HEADER))]


def is_step(name):
    return re.fullmatch(r"step-\d{9}", name)


# ---------- who may write in a directory --------------------------------------


class RunDirectory:
    """out_dir, where one run at a time may write. A run locks it before it chooses a
    checkpoint, and claims it once every check has passed, so a refused run changes
    nothing. Only rank 0 calls the methods."""

    def __init__(self, out_dir):
        # Absolute, since the directory may be a link, or the current one.
        self.path = os.path.realpath(out_dir)
        self.lock_file = None  # the lock is held while this file is open

    def lock(self):
        """If the directory exists, keep other runs out until this process ends. The lock
        is on a file next to it, because the directory may be renamed."""
        if self.lock_file or not os.path.isdir(self.path):
            return
        path = self.path + ".lock"
        try:
            self.lock_file = open(path, "a+")
        except OSError as e:
            raise SystemExit(cannot_write(path, e))
        try:
            fcntl.flock(self.lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.lock_file.seek(0)
            raise SystemExit(
                f"out_dir={self.path} is in use by {self.lock_file.read()}; wait until that "
                "run ends, or pass another --out_dir")
        except OSError as e:
            print(f"{path}: no locks here ({e.strerror}), so never start two runs there")
        self.lock_file.truncate(0)
        me = f"process {os.getpid()} on {os.uname().nodename}"
        print(me, end="", file=self.lock_file, flush=True)

    def claim(self, source, resumed=False):
        """Make the directory if there is none, and return the run's id. A resumed run
        keeps its source's id. A new run renames the whole directory of an earlier one."""
        run_id = time.strftime(f"%Y%m%d-%H%M%S-{os.getpid()}")
        try:
            os.makedirs(self.path, exist_ok=True)
            self.lock()
            if resumed:
                return source.header.get("run") or run_id  # nanoGPT's have none
            names = os.listdir(self.path)
            of_a_run = {"ckpt.pt", "last.pt", "metrics.jsonl"}
            steps = [name for name in names if is_step(name.removesuffix(".pt"))]
            if steps or of_a_run.intersection(names):
                aside = f"{self.path}.{run_id}"
                os.rename(self.path, aside)
                os.makedirs(self.path)
                print(f"{self.path} had an earlier run; moved it to {aside}", flush=True)
        except OSError as e:
            raise SystemExit(cannot_write(self.path, e))
        return run_id


# ---------- when one is due, and which ones stay ------------------------------


def is_due(cfg, step, evaluated, improved):
    """True if the run saves at this step: every save_interval steps, else at evaluations.
    Milestones, and the best one if it is kept, are always saved."""
    if cfg.save_interval:
        due = step % cfg.save_interval == 0 or step >= cfg.max_iters
    else:
        due = evaluated and cfg.always_save_checkpoint
    is_best = improved and not cfg.always_save_checkpoint
    return due or is_best or is_milestone(step, cfg)


def is_milestone(step, cfg):
    """True if this step's checkpoint is never removed."""
    return cfg.keep_every > 0 and step % cfg.keep_every == 0


def remove_older(path, best, cfg):
    """Remove sharded checkpoints older than `path`, including any that a kill left
    half-written. Keep the newest cfg.keep_checkpoints, milestones, and the best one, and
    point the link out_dir/best at it."""
    out_dir, this = os.path.split(path)
    # Leave higher numbers alone: they are damaged, or the run would have resumed them.
    complete = [name for name in complete_steps(out_dir) if name <= this]
    stay = complete[-cfg.keep_checkpoints:]
    stay += [name for name in complete if is_milestone(int(name[5:]), cfg)]
    if best in complete:
        stay.append(best)
        tmp = os.path.join(out_dir, "best.tmp")
        with suppress(FileNotFoundError):
            os.remove(tmp)
        os.symlink(best, tmp)
        os.replace(tmp, os.path.join(out_dir, "best"))
        sync(out_dir)
    for name in filter(is_step, os.listdir(out_dir)):
        if name < this and name not in stay:
            remove_sharded(os.path.join(out_dir, name))


# ---------- a run's saves -----------------------------------------------------


class Saver:
    """Writes a run's checkpoints in the background. All ranks call its methods: `save` when
    one is due, `poll` in each step, `finish` at the end.
    report: function of (step, seconds, seconds in which training was blocked), called
    after a successful save."""

    def __init__(self, out_dir, run_id, cfg, world, source, resumed, report):
        self.out_dir = out_dir
        self.run_id = run_id
        self.cfg = cfg
        self.world = world
        self.report = report
        # Hugging Face's files, for an export, and LoRA's base.
        before = source.header if source else {}
        self.inherited = {key: before.get(key) for key in ("kept", "base", "base_origin")}
        self.meta = from_rank0(world, lambda: read_meta(data_dir(cfg.dataset)))
        self.best = None  # name of the best sharded checkpoint
        self.newest = None  # step of the newest one, full or sharded
        if resumed:
            self.best = source.header.get("best")
            self.newest = source.header["iter_num"]
        self.failed = False  # True if the last completed save failed
        self.background = futures.ThreadPoolExecutor(1)
        self.saving = None  # the future of a save in the background, until it is reported
        self.times = None  # that save's step, start, and seconds in which it blocked training
        self.group = None
        if dist.is_initialized():
            # Background collectives must not mix with training's, and may wait long for
            # the slowest disk.
            self.group = dist.new_group(backend="gloo", timeout=PATIENCE)

    def require_finite(self, loss, what, step):
        """SystemExit if the loss is NaN or infinite. All ranks have the same loss, so
        all of them stop without saving."""
        if math.isfinite(loss):
            return
        self.wait()  # the save in the background is of an earlier, good step
        rate = self.cfg.learning_rate
        line = f"{what} is {loss} at step {step}: lower learning_rate (now {rate})"
        if self.cfg.dtype != "float32":
            line += f", or try dtype=float32 (now {self.cfg.dtype})"
        if self.newest is not None:
            line += f"; the checkpoint of step {self.newest} in {self.cfg.out_dir} is untouched"
        raise SystemExit(line)

    def save(self, model, optimizer, scaler, step, best_val_loss, improved=False):
        """Save the state after this many steps. Returns once it is copied to host memory: all to
        rank 0's for a full checkpoint, each rank's rows to its own for a sharded one.
        improved: the validation loss is the best so far."""
        if self.cfg.checkpoint == "none":
            return
        print0(self.world, f"saving checkpoint to {self.cfg.out_dir}")
        self.wait()  # for the previous save: if this state is not finite, the run ends below
        start = time.perf_counter()
        tensors = flat_state(model, optimizer, getattr(model, "base_names", ()))
        require_finite_state(tensors, self.world, step)
        name = f"step-{step:09d}"
        is_best = improved and not self.cfg.always_save_checkpoint
        header = self.new_header(model, optimizer, tensors)
        header["scaler"] = scaler.state_dict() or None
        header["iter_num"] = step
        header["best_val_loss"] = best_val_loss
        header["best"] = name if is_best else self.best
        # Here, not in the background: a new thread's device is GPU 0, and its collectives would
        # mix with training's. (dcp.async_save copies twice, and blocks three times as long.)
        if self.cfg.checkpoint == "full":
            copies = {key: gather_full(t) for key, t in tensors.items()}
            # With always_save_checkpoint=False only the best one is called ckpt.pt.
            name = "ckpt.pt" if improved or self.cfg.always_save_checkpoint else "last.pt"
        else:
            copies = {key: t.to("cpu", copy=True) for key, t in tensors.items()}
            # A killed run may have left a partial one there.
            from_rank0(self.world, lambda: remove_sharded(os.path.join(self.out_dir, name)))
        self.saving = self.background.submit(self.write, name, header, copies)
        self.times = step, start, time.perf_counter() - start

    def new_header(self, model, optimizer, tensors):
        """A checkpoint's description of its run and its parameters."""
        names = {p: name for name, p in model.named_parameters()}
        params = [p for group in optimizer.param_groups for p in group["params"]]
        return dict(
            model_args=model_args(self.cfg),
            config=as_dict(self.cfg),
            param_names=[names[p] for p in params],
            param_groups=optimizer.state_dict()["param_groups"],
            ties=[tied for tied in tied_names(model) if f"model.{tied[0]}" in tensors],
            meta=self.meta,
            torch=str(torch.__version__),
            run=self.run_id,
            **self.inherited,
        )

    def write(self, name, header, tensors):
        """In the background (all ranks): write the checkpoint. Returns the finish time, and
        rank 0's line on why it failed, or None."""
        path = os.path.join(self.out_dir, name)
        line = None
        try:
            if self.cfg.checkpoint == "sharded":
                self.write_sharded(path, header, tensors)
            elif self.world.rank == 0:
                names = [name]
                if is_milestone(header["iter_num"], self.cfg):
                    names.insert(0, f"step-{header['iter_num']:09d}.pt")
                write_ckpt_pt(self.out_dir, names, tensors, header)
        except OSError as e:
            line = cannot_write(path, e)
        line = from_rank0(self.world, lambda: line, self.group)
        return time.perf_counter(), line

    def write_sharded(self, path, header, rows):
        """All ranks write their rows, and then rank 0 removes older checkpoints."""
        cause = None
        # From the second save on ranks only tell rank 0 that their plans are the same.
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
        try:
            dcp.save(
                rows, storage_writer=Writer(path, header), planner=planner,
                process_group=self.group)
        except dcp.CheckpointException as e:  # on all ranks, whichever failed
            cause, _ = next(iter(e.failures.values()))
        if cause:
            if self.world.rank == 0:
                remove_sharded(path)  # the next save may need the room
            raise cause  # unless it is an OSError, the run ends: the disk is not shared, or a bug
        if self.world.rank == 0:
            self.best = header["best"]
            remove_older(path, self.best, self.cfg)

    def poll(self):
        """Report the save in the background if it is done."""
        if self.saving and self.saving.done():
            self.wait()

    def wait(self):
        """Wait for the save in the background, if there is one, and report it. If it failed,
        print why and go on: the next save tries again."""
        if not self.saving:
            return
        saving = self.saving
        self.saving = None
        end, line = saving.result()
        self.failed = line is not None
        if self.failed:
            print0(self.world, line, file=sys.stderr)
            return
        step, start, blocked = self.times
        self.newest = step
        self.report(step, end - start, blocked)

    def finish(self):
        """Wait for the run's last save. SystemExit if it failed."""
        self.wait()
        if not self.failed:
            return
        remedy = "start again"
        if self.newest is not None:
            remedy = f"continue from step {self.newest} with --init_from=auto"
        raise SystemExit(
            f"the last save in {self.cfg.out_dir} failed, as its line says: mend that, and "
            f"{remedy}")


# ---------- a write that fails ------------------------------------------------


def cannot_write(path, e):
    """The error line for a failed write."""
    return (
        f"cannot write {path}: {first_line(e)}; what was there before is untouched. See that "
        "the directory exists and has room, or pass another one")


def root_cause(e):
    """The OSError that led to e, or else e. On a full disk torch.save fails again as it closes
    its file, and its message is only "unexpected pos"."""
    cause = e
    while cause and not isinstance(cause, OSError):
        cause = cause.__context__
    return cause or e


# ---------- the command -------------------------------------------------------


def main(argv):
    if "--help" in argv or "-h" in argv:
        print(__doc__.strip())
        return
    if len(argv) != 2 or argv[0] != "full":
        raise SystemExit("usage: python checkpoint.py full OUT_DIR")
    out_dir = argv[1]
    directory = RunDirectory(out_dir)
    directory.lock()  # a run there might remove what we read
    source = find(out_dir, World())
    if source is None:
        raise SystemExit(f"{out_dir}: no checkpoint there")
    if not source.sharded:
        print(f"{source.path} is a full checkpoint already")
        return
    path = os.path.join(directory.path, "ckpt.pt")
    del source.header["files"]
    flat = {key: source.get(key) for key in source.shapes}
    try:
        write_ckpt_pt(directory.path, ["ckpt.pt"], flat, source.header)
    except OSError as e:
        raise SystemExit(cannot_write(path, e))
    print(f"{source.path} -> {path}")


if __name__ == "__main__":
    run(main, sys.argv[1:])

"""
Checkpoints: what a run leaves on disk, and how another run picks it up.

    out_dir/ckpt.pt     full: nanoGPT's layout; any strategy and world size, and nanoGPT
    out_dir/last.pt     the same, after a stop signal, where ckpt.pt holds the best
    out_dir/step-<n>/   sharded: every rank wrote its rows; any strategy and world size

    python checkpoint.py full out-x    # the newest checkpoint of out-x, sharded, as out-x/ckpt.pt

A state is flat, {"model.<name>": tensor, "exp_avg.<name>": tensor, ...}, with a header of plain
values. Rank 0 gathers a full one in its host memory, 12 bytes a parameter, and maps it to read it.
A file gets a temporary name, is synced, then renamed; a directory is complete once it has its
header.json, which lists its files' checksums. They are compared before a checkpoint is used, and
nothing in it can run code.
"""

import fcntl
import json
import os
import pickle
import re
import shutil
import sys
import time
import warnings
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

import float8
from configurator import Config, model_config
from data.loader import data_dir, read_meta
from fsdp import broadcast_full, gather_full, reshard, tied_names
from optimizer import local, make_state
from ranks import PATIENCE, World, from_rank0, mean, patient_group, peer_left, print0, run

HEADER = "header.json"  # of a sharded checkpoint, written last
# other programs' masks and angles, which are no parameters
BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
warnings.filterwarnings("ignore", "torch.distributed is disabled")  # DCP says so in one process

# ---------- saving: one run a directory ---------------------------------------


class Saver:
    """
    The one run that writes in out_dir. All ranks call its methods.

        saver = Saver(cfg.out_dir, world)    # locks it, before a checkpoint is chosen
        saver.claim(cfg, source)             # a new run moves what an older one left aside
        saver.save(model, optimizer, scaler, step, best_val_loss)

    A sharded save copies this rank's rows to host memory and returns; they are written while
    training goes on, and finish() completes the directory once all ranks' files are there.
    """

    def __init__(self, out_dir, world):
        self.out_dir, self.world = out_dir, world
        self.saving = None  # a sharded save under way: the future of complete()
        self.background = ThreadPoolExecutor(1)
        # its collectives must not mix with training's, and ranks wait there for the slowest disk
        distributed = dist.is_initialized()
        self.group = dist.new_group(backend="gloo", timeout=PATIENCE) if distributed else None
        from_rank0(world, self.lock)

    def lock(self):
        """Make out_dir, and lock a file in it until this process ends. SystemExit if it is held."""
        out_dir, flags = self.out_dir, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        with writing(out_dir):
            os.makedirs(out_dir, exist_ok=True)
            self.file = open(os.open(os.path.join(out_dir, "lock"), flags, 0o644), "r+")
        for left in reversed(range(50)):
            try:
                fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not left:
                    raise SystemExit(f"out_dir={out_dir} is in use by {self.file.read()}; wait "
                                     "until that run ends, or pass another --out_dir")
                time.sleep(0.2)  # 10 s: ranks that lost their torchrun finish a step first
            except OSError:
                return print(f"{out_dir}: no file locks there, so never start two runs in it")
        self.check_lock()  # the run that we waited for may have moved it
        self.file.truncate(0)
        self.file.write(f"process {os.getpid()} on {os.uname().nodename}")
        self.file.flush()

    def check_lock(self):
        """SystemExit if out_dir is another directory than the one that this run has locked."""
        path = os.path.join(self.out_dir, "lock")
        ours = os.fstat(self.file.fileno())
        if not os.path.exists(path) or not os.path.samestat(os.stat(path), ours):
            raise SystemExit(f"out_dir={self.out_dir} was moved or removed meanwhile, and this run "
                             "writes no more there; resume it where its checkpoints are now")

    def from_rank0(self, action, *args):
        """action(*args) on rank 0, if out_dir is still this run's (collective)."""
        def checked():
            self.check_lock()
            action(*args)

        from_rank0(self.world, checked)

    def claim(self, cfg, source, resumed=False):
        """A resumed run has the id of source's. Another gets a new one, and if a run was there
        before, renames its directory, whole, and begins a new one."""
        def on_rank0():
            run_id = source.header.get("run") if resumed else None
            run_id = run_id or time.strftime(f"%Y%m%d-%H%M%S-{os.getpid()}")
            here = os.path.realpath(self.out_dir)  # itself, not a link to it
            written = r"(ckpt|last)\.pt|metrics\.jsonl|step-\d+|events\.out\..*"
            if resumed or not any(re.fullmatch(written, name) for name in os.listdir(here)):
                return run_id
            if os.path.commonpath([here, os.getcwd()]) == here:
                raise SystemExit(f"out_dir={self.out_dir} has an earlier run, and cannot be "
                                 "moved aside while you are in it; pass another --out_dir")
            with writing(here):
                os.rename(here, f"{here}.{run_id}")
                os.mkdir(here)
            print(f"{self.out_dir} had an earlier run; moved it to {here}.{run_id}", flush=True)
            self.lock()
            return run_id

        self.cfg, self.run_id = cfg, from_rank0(self.world, on_rank0)
        # of a Hugging Face model that training began with, for an export
        self.kept = source.header.get("kept") if source else None

    def save(self, model, optimizer, scaler, iter_num, best_val_loss, name="ckpt.pt"):
        """Full: out_dir/<name>. Sharded: a directory, and this returns before it is complete."""
        print0(self.world, f"saving checkpoint to {self.out_dir}")
        self.finish(wait=True)
        reshard(model)  # so that its parameters are the shards
        header = make_header(model, optimizer, scaler, self.cfg)
        header.update(run=self.run_id, iter_num=iter_num, best_val_loss=best_val_loss,
                      kept=self.kept)
        tensors = flat_state(model, optimizer)
        require_portable(model, optimizer, self.world)
        if not finite(tensors, self.world):
            raise SystemExit(f"weights or optimizer state are not finite after step {iter_num} and "
                             "are not saved: try a lower learning_rate, or grad_clip=1.0; the last "
                             f"checkpoint in {self.out_dir} is untouched")
        if self.cfg.checkpoint == "full":
            flat = {key: gather_full(t, self.world) for key, t in tensors.items()}
            path = os.path.join(self.out_dir, name)
            return self.from_rank0(write_ckpt, path, flat, header)
        path = os.path.join(self.out_dir, f"step-{iter_num:09d}")
        self.from_rank0(remove, path)
        written = None
        with writing(path):
            if self.group:
                # given a writer, its thread touches no GPU; PyTorch's own would all use number 0
                written = dcp.async_save(tensors, storage_writer=dcp.FileSystemWriter(path),
                                         process_group=self.group)
            else:  # without a process group PyTorch saves in the foreground only
                dcp.save(tensors, checkpoint_id=path, no_dist=True)
        self.saving = self.background.submit(self.complete, path, header, written)

    def complete(self, path, header, written):
        """In the background: wait until all ranks have written, add the header, remove old ones
        (collective)."""
        own = f"__{self.world.rank}_"  # as DCP begins the names of a rank's files
        with writing(path):
            if written:
                written.result()
            files = {file: checksum(os.path.join(path, file)) for file in os.listdir(path)
                     if file.startswith(own) or file == ".metadata" and self.world.rank == 0}
        every = [files] * self.world.size if self.world.rank == 0 else None
        if self.group:
            dist.gather_object(files, every, group=self.group)
        if self.world.rank > 0:
            return
        self.check_lock()
        header["files"] = {file: crc for files in every for file, crc in files.items()}
        missing = header["files"].keys() - set(os.listdir(path))
        if missing:
            raise SystemExit(f"out_dir={self.out_dir} is not the same directory on all nodes: "
                             f"{path} lacks {min(missing)}, and sharded checkpoints need all; use "
                             "a shared disk, or --checkpoint=full")
        with atomic(os.path.join(path, HEADER)) as f:
            f.write(sealed(header).encode())
        for name in steps(self.out_dir, HEADER)[:-self.cfg.keep_checkpoints]:
            old = os.path.join(self.out_dir, name)
            if old != path:
                shutil.rmtree(old, ignore_errors=True)

    def finish(self, wait=False):
        """Raise what went wrong in the background. wait: until the save under way is complete, on
        all ranks."""
        if self.saving and (wait or self.saving.done()):
            saving, self.saving = self.saving, None
            saving.result()
        if wait:
            from_rank0(self.world, lambda: None)  # nobody goes on before it is there


def flat_state(model, optimizer=None):
    """{"model.<name>": parameter, "<key>.<name>": its optimizer state}, as sharded; ties once."""
    tensors = {}
    for name, p in model.named_parameters():
        tensors[f"model.{name}"] = float8.plain(p.detach())
        state = optimizer.state.get(p, {}) if optimizer else {}
        tensors.update({f"{key}.{name}": value for key, value in state.items()})
    return tensors


def require_portable(model, optimizer, world):
    """SystemExit for optimizer state that another world size could not go on with (collective)."""
    wrong, whole = [], {}
    for name, p in model.named_parameters():
        for kind, t in optimizer.state.get(p, {}).items():
            key = f"{kind} of {name}"
            if isinstance(t, DTensor):
                wrong += [key] * (t.placements != p.placements)
            elif isinstance(t, torch.Tensor):
                whole[key] = t
            else:
                wrong.append(key)
    if world.size > 1:  # what every rank has whole must be the same, but for GPUs' last digits
        most = torch.tensor([t.double().norm(1) for t in whole.values()], dtype=torch.float64)
        least = -most
        dist.all_reduce(most, dist.ReduceOp.MAX)
        dist.all_reduce(least, dist.ReduceOp.MAX)
        differ = most > -1.001 * least  # not where it is infinite: finite() says that
        wrong += [key for key, bad in zip(whole, differ) if bad]
    if wrong:
        raise SystemExit(f"optimizer state {wrong[0]} cannot be saved: it is neither a DTensor "
                         "placed as the parameter nor a plain tensor that is the same on all ranks "
                         "(see the header of optimizer.py)")


def finite(tensors, world):
    """Is no number NaN or infinite? (collective: each rank looks at its rows)"""
    rows = [local(t) for t in tensors.values() if t.is_floating_point()]
    # aminmax passes NaN on, and needs no memory; a rank may have no rows
    good = all(end.isfinite() for t in rows if t.numel() for end in t.aminmax())
    return mean(torch.tensor(float(good)), world, patient=True) == 1


def make_header(model, optimizer, scaler, cfg):
    """What is not a tensor, as plain values."""
    names = {p: name for name, p in model.named_parameters()}
    ordered = [names[p] for group in optimizer.param_groups for p in group["params"]]
    return dict(model_args=asdict(model_config(cfg)), config=asdict(cfg), param_names=ordered,
                param_groups=optimizer.state_dict()["param_groups"], ties=tied_names(model),
                scaler=scaler.state_dict() or None, meta=read_meta(data_dir(cfg.dataset)))


def write_ckpt(path, flat, header):
    """nanoGPT's layout: 'model' by name, 'optimizer' by number, the header's values beside them."""
    weights, state = {}, {}
    for key, tensor in flat.items():
        kind, _, name = key.partition(".")
        if kind == "model":
            weights[name] = tensor
        else:
            state.setdefault(header["param_names"].index(name), {})[kind] = tensor
    for first, *others in header["ties"]:
        weights.update(dict.fromkeys(others, weights[first]))  # one storage, so stored once
    optimizer = {"state": state, "param_groups": header["param_groups"]}
    elsewhere = ("param_groups", "ties", "files")
    rest = {key: value for key, value in header.items() if key not in elsewhere}
    with atomic(path) as f:
        torch.save({**rest, "model": weights, "optimizer": optimizer}, f)


@contextmanager
def atomic(path):
    """A file for bytes, which becomes `path` if the block ends well, and else disappears."""
    tmp = path + ".tmp"
    with writing(path):
        remove(tmp)
        try:
            with open(tmp, "xb") as f:
                yield f
            sync(tmp)
            os.replace(tmp, path)
            sync(os.path.dirname(path) or ".")  # the rename itself
        finally:
            remove(tmp)


def remove(path):
    """What a run that died left at path, or a link there, but not what that names."""
    with writing(path):
        if os.path.exists(os.path.join(path, "header.pt")):  # an older version's is kept
            os.rename(path, path + ".old")
        elif os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        elif os.path.lexists(path):
            os.remove(path)


def sync(path):
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


@contextmanager
def writing(path):
    """A failure to write inside is one line."""
    try:
        yield
    # torch.save raises RuntimeError on a full disk; CheckpointException is no Exception
    except (OSError, RuntimeError, CheckpointException) as e:
        if isinstance(e, CheckpointException):
            e, _ = next(iter(e.failures.values()))  # the first rank's
        if isinstance(e, torch.OutOfMemoryError) or peer_left(e):
            raise e  # RuntimeErrors too; ranks.run knows what to say
        raise SystemExit(f"cannot write {path}: {first_line(e)}; the previous checkpoint is "
                         "untouched. Make room, or pass another directory (out_dir)")


def first_line(e):
    return (str(e).strip() or type(e).__name__).splitlines()[0]


# ---------- finding and opening -----------------------------------------------


@dataclass
class Source:
    """An opened checkpoint; its header's "shapes" has the flat keys."""
    path: str
    header: dict
    get: object = None  # function: flat key -> whole tensor on the CPU; only on rank 0
    sharded: bool = False

    def __reduce__(self):  # for the other ranks
        return Source, (self.path, self.header, None, self.sharded)


def find(out_dir, world):
    """
    The newest intact checkpoint as a Source, None if there is none (all ranks). Damaged ones are
    named and passed over; SystemExit if there are no others.
    """
    sources, problems = from_rank0(world, lambda: open_all(out_dir))
    while sources and not intact(sources[0], world):
        problems.append(f"{sources.pop(0).path}: damaged, or not visible to every rank")
    remedy = "remove it, or pass another out_dir"
    if problems and not sources:
        raise SystemExit(f"{problems[0]}; {remedy}")
    if world.rank == 0:
        for problem in problems:
            print(f"skipping {problem}; {remedy}", file=sys.stderr)
    return sources[0] if sources else None


def open_all(out_dir):
    """([Source], newest first, [what is wrong with those that cannot be opened])."""
    sources, problems = [], []
    for name in ("ckpt.pt", "last.pt", *steps(out_dir, HEADER)):
        path = os.path.join(out_dir, name)
        try:
            if os.path.isdir(path):
                sources.append(open_sharded(path))
            elif os.path.exists(path):
                sources.append(open_full(path))
        except Exception as e:  # a damaged zip or pickle raises almost anything
            problems.append(f"{path}: not a complete checkpoint ({type(e).__name__}: "
                            f"{first_line(e)})")
    for name in steps(out_dir, "header.pt"):
        problems.append(f"{os.path.join(out_dir, name)}: of an older version; to keep it, run that "
                        f"version's python checkpoint.py full {out_dir}, which makes it a ckpt.pt")
    return sorted(sources, key=lambda source: -source.header["iter_num"]), problems


def steps(out_dir, last):
    """Names of the sharded checkpoints that have the file that is written last, oldest first."""
    names = os.listdir(out_dir) if os.path.isdir(out_dir) else []
    return sorted(name for name in names if re.fullmatch(r"step-\d+", name)
                  and os.path.exists(os.path.join(out_dir, name, last)))


def open_full(path):
    """A ckpt.pt of ours or of nanoGPT."""
    try:  # mmap: a tensor's bytes are read when it is used, so memory holds one at a time
        ckpt = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError:  # its text says how to load the file and run what is in it
        raise ValueError("it has more in it than tensors and plain values, or is damaged")
    weights = {}
    for name, tensor in ckpt["model"].items():
        name = name.removeprefix("module.").removeprefix("_orig_mod.")  # DDP, compile in nanoGPT
        if not name.endswith(BUFFERS):
            weights[name] = tensor
    # nanoGPT stores no names: it numbers first the matrices, then the vectors, in model order
    untied = [name for name in weights if name != "lm_head.weight"]
    names = ckpt.get("param_names") or sorted(untied, key=lambda name: weights[name].dim() < 2)
    flat = {f"model.{name}": tensor for name, tensor in weights.items()}
    for i, state in ckpt.get("optimizer", {"state": {}})["state"].items():
        flat.update({f"{key}.{names[i]}": tensor for key, tensor in state.items()})
    for key, t in flat.items():
        odd = key.startswith("model.") and not t.is_floating_point()
        if odd or t.layout != torch.strided:
            raise ValueError(f"{key} is no dense tensor of floats, but {t.dtype}, {t.layout}")
    header = {key: value for key, value in ckpt.items() if key not in ("model", "optimizer")}
    return make_source(path, header, {key: t.shape for key, t in flat.items()}, flat.__getitem__)


def open_sharded(path):
    """A directory with its header.json."""
    with open(os.path.join(path, HEADER)) as f:
        text = f.read()
    header = json.loads(text)
    header.pop("checksum", None)
    if text != sealed(header):
        raise ValueError(f"its {HEADER} is damaged")
    metadata = MetadataReader(path).read_metadata()
    strange = {s.relative_path for s in metadata.storage_data.values()} - header["files"].keys()
    if strange or any(map(os.path.dirname, header["files"])):
        raise ValueError(f"its .metadata names a file that is not beside it, or not in {HEADER}")
    entries = metadata.state_dict_metadata

    def get(key):
        box = {key: torch.empty(entries[key].size, dtype=entries[key].properties.dtype)}
        read_sharded(path, box)
        return box[key]

    shapes = {key: entry.size for key, entry in entries.items()}
    return make_source(path, header, shapes, get, sharded=True)


def sealed(header):
    """The header as JSON; its last field is the checksum of the rest."""
    crc = zlib.crc32(json.dumps(header).encode())
    return json.dumps({**header, "checksum": crc}, indent=1)


def make_source(path, header, shapes, get, sharded=False):
    header.setdefault("meta", {})  # of a checkpoint of nanoGPT
    kinds = dict(iter_num=int, model_args=dict, config=dict, meta=dict)
    for key, kind in kinds.items():
        if type(header[key]) is not kind:
            raise ValueError(f"its {key} is {header[key]!r}")
    for key in ("model", "dataset"):
        if type(header["config"].get(key, "")) is not str:
            raise ValueError(f"its {key} is {header['config'][key]!r}")
    scaler = header.get("scaler")
    if scaler is not None:
        float(scaler["scale"])
    header.update(best_val_loss=float(header["best_val_loss"]), scaler=scaler,
                  shapes={key: tuple(shape) for key, shape in shapes.items()})
    return Source(path, header, get, sharded)


def read_sharded(path, tensors, group=None):
    """Fill tensors (collective in group)."""
    reader = MetadataReader(path)
    try:
        dcp.load(tensors, storage_reader=reader, process_group=group, no_dist=group is None)
    except (OSError, CheckpointException):  # which is no Exception
        raise SystemExit(f"{path} was removed or damaged while it was read, maybe by the run that "
                         "saves there; start again")


class MetadataReader(dcp.FileSystemReader):
    """PyTorch's own unpickles .metadata, and so would run what somebody put there."""

    def read_metadata(self, *args, **kwargs):
        with open(os.path.join(self.path, ".metadata"), "rb") as f:
            metadata = MetadataUnpickler(f).load()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class MetadataUnpickler(pickle.Unpickler):
    """What describes tensors. Not BytesStorageMetadata: PyTorch unpickles such entries as well."""
    ADMITTED = {
        "torch": ("Size",), "torch.serialization": ("_get_layout",),
        "pathlib": ("PosixPath",), "pathlib._local": ("PosixPath",),  # of Python 3.13
        "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
        "torch.distributed.checkpoint.metadata": (
            "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
            "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    }

    def find_class(self, module, name):
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not dtype and name not in self.ADMITTED.get(module, ()):
            raise pickle.UnpicklingError(f"it wants to run {module}.{name}")
        return super().find_class(module, name)


def intact(source, world):
    """Do its checksums match? torch.load does not look. Every rank reads its part of a sharded
    one's files, rank 0 a full one (all ranks)."""
    good = True
    try:
        if source.sharded:
            files = sorted(source.header["files"].items())[world.rank::world.size]
            good = all(checksum(os.path.join(source.path, file)) == crc for file, crc in files)
        elif world.rank == 0:  # alone it may see it
            good = zipfile.ZipFile(source.path).testzip() is None
            torch.load(source.path, map_location="meta", weights_only=True)  # the zip's directory
    except Exception:  # no such file, or not a zip any more
        good = False
    return mean(torch.tensor(float(good)), world, patient=True) == 1


def checksum(path):
    """The CRC-32 of a file."""
    crc = 0
    with open(path, "rb") as f:
        while piece := f.read(1 << 24):
            crc = zlib.crc32(piece, crc)
    return crc


# ---------- loading -----------------------------------------------------------


def compare(source, cfg, resumed=True):
    """SystemExit if this run's model is not the checkpoint's; one that starts from its weights has
    its sizes, where it names none. Else lines that say what differs, maybe on purpose."""
    before = {"model": "gpt2", "optimizer": "adamw", **source.header["config"]}  # nanoGPT's
    before.update(source.header["model_args"])
    ours, keys = asdict(cfg), [f.name for f in fields(Config)]
    for key in ("model", "optimizer", *asdict(model_config(cfg))):
        if not resumed and (key not in cfg.given or key == "optimizer"):
            continue
        cropped = key == "block_size" and ours[key] < before.get(key, 0) and not source.sharded
        if ours[key] != before.get(key, ours[key]) and key != "dropout" and not cropped:
            remedy = f"pass --{key}={before[key]}, or another out_dir or init_from"
            if key == "vocab_size" and resumed:
                remedy = "use the data set that it was trained on, or another out_dir"
            raise SystemExit(f"{key}={ours[key]} in this run, but {source.path} has {key}="
                             f"{before[key]}; {remedy}")
    keys = keys[keys.index("dataset"):keys.index("device")] + ["block_size", "dropout"]
    differ = [f"{key}={ours[key]!r} (was {before[key]!r})" for key in keys
              if key in ours.keys() & before and key != "max_iters" and ours[key] != before[key]]
    lines = [f"this run differs from that of {source.path}: {', '.join(differ)}"] if differ else []
    if cfg.decay_lr and cfg.max_iters > cfg.lr_decay_iters:
        lines.append(f"from step lr_decay_iters={cfg.lr_decay_iters} to max_iters={cfg.max_iters} "
                     f"the learning rate is min_lr={cfg.min_lr}")
    return lines if resumed else []


def load(source, model, optimizer, world):
    """Weights, and the optimizer's state of what trains, as they are sharded now (collective)."""
    shapes, params = source.header["shapes"], dict(model.named_parameters())
    known = {name for group in tied_names(model) for name in group} | params.keys()
    for key in shapes:
        if key.partition(".")[2] not in known:
            raise SystemExit(f"{source.path}: {key} is none of this model's parameters; it belongs "
                             "to another model")
    anew = take_state(optimizer, params, shapes) if optimizer else 0
    if anew and source.header["iter_num"]:
        print0(world, f"{source.path} lacks optimizer state of {anew} parameters that train now; "
                      "theirs starts anew")
    tensors = flat_state(model, optimizer)
    for key, t in tensors.items():
        shape, ours = shapes.get(key), tuple(t.shape)
        # a position table may have more rows than this run's shorter context uses
        longer = shape and ours and shape[1:] == ours[1:] and shape[0] > ours[0]
        if shape != ours and not longer:
            raise SystemExit(f"{source.path}: {key} is missing or has shape {shape}, not {ours}; "
                             "it belongs to another model")
    if source.sharded:
        read_sharded(source.path, tensors, patient_group() if dist.is_initialized() else None)
    else:
        for key, t in tensors.items():
            full = source.get(key) if world.rank == 0 else None
            if full is not None and t.dim():
                full = full[:len(t)]
            broadcast_full(t, full, world)
    if not finite(tensors, world):
        raise SystemExit(f"{source.path} has numbers that are not finite (NaN or infinity); use "
                         "another one")


def take_state(optimizer, params, shapes):
    """Let the optimizer make its state, in its shapes, of the parameters whose state `shapes` has
    whole. Returns how many of those that train it lacks."""
    make_state(optimizer)
    anew = [p for name, p in params.items() if p.requires_grad
            and not shapes.keys() >= {f"{kind}.{name}" for kind in optimizer.state[p]}]
    for p in anew:
        del optimizer.state[p]
    return len(anew)


# ---------- the command -------------------------------------------------------


def main(argv):
    if "--help" in argv or "-h" in argv:
        return print(__doc__.strip())
    if len(argv) != 2 or argv[0] != "full":
        raise SystemExit("usage: python checkpoint.py full OUT_DIR")
    source = open_newest(argv[1])
    if not source.sharded:
        return print(f"{source.path} is a full checkpoint already")
    saver = Saver(argv[1], World())  # a run there would write, or move the directory away
    path = os.path.join(argv[1], "ckpt.pt")
    flat = {key: source.get(key) for key in source.header.pop("shapes")}
    saver.from_rank0(write_ckpt, path, flat, source.header)
    print(f"{source.path} -> {path}")


def open_newest(out_dir):
    source = find(out_dir, World())
    if source is None:
        raise SystemExit(f"{out_dir}: no checkpoint there")
    return source


if __name__ == "__main__":
    run(main, sys.argv[1:])

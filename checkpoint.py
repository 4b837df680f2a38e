"""
What a checkpoint is: written from a run's state, opened and checked at any world size.

    source = find("out-x", world)            # the newest intact one, a Source; or None
    load(source, model, optimizer, world)    # each rank reads the rows that it keeps

    out_dir/ckpt.pt      full: one file in nanoGPT's layout, which nanoGPT can read
    out_dir/last.pt      full, with always_save_checkpoint=False, where ckpt.pt is the best
    out_dir/step-<n>.pt  full, a milestone (keep_every) that is never removed
    out_dir/step-<n>/    sharded: each rank writes its rows
    out_dir/best         a link to the best sharded one, with always_save_checkpoint=False

Any strategy at any world size reads both kinds. In memory a state is flat,
{"model.<name>": tensor, "exp_avg.<name>": tensor, ...}, with a header of plain values.

Full: rank 0 gathers the state into its host memory, tensor by tensor, and writes one file.
Sharded: all ranks write and sync their rows. Then rank 0 writes header.json, with the
checksums of all files; only now is the directory a checkpoint. So a kill at any moment leaves
the last complete one. To read either kind, every rank maps or opens the files and takes the rows
that it keeps now. Loading never runs code from a file.
saves.py says when a run saves, and which checkpoints stay.
"""

import io
import json
import os
import pickle
import re
import shutil
import sys
import zipfile
import zlib
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
from torch.distributed.tensor import DTensor

from data.files import sync, write_files
from data.loader import SafeUnpickler
from fsdp import write_full
from optimizer import allocate_state
from ranks import all_reduce_mean_, first_line, from_rank0, print0

HEADER = "header.json"  # of a sharded checkpoint, written last
# Buffers in other programs' files, which we skip: attention masks, rotary frequencies.
BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
# {module: classes} that .metadata may name. Not BytesStorageMetadata: PyTorch would unpickle the
# bytes of such an entry.
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


@dataclass
class Source:
    """An opened checkpoint, or a directory in Hugging Face format. Every rank opens its own."""
    path: str
    header: dict
    shapes: dict  # {flat key: shape}
    get: object = None  # function: flat key -> value, of which value[a:b] reads these rows
    sharded: bool = False

    def value(self, key, shape, config):
        """The value for a parameter of this shape, to pass to write_full. SystemExit if the source
        has another shape; only its table of positions may be longer than this run's context."""
        theirs = self.shapes.get(key)
        if theirs is None:
            raise SystemExit(f"{self.path} is of another model: {key} is missing")
        if theirs == shape:
            return self.get(key)
        lengths = (self.header["model_args"].get("block_size"), config.block_size)
        is_table = theirs[1:] == shape[1:] and theirs[:1] + shape[:1] == lengths
        if not is_table or theirs < shape:
            raise SystemExit(f"{self.path} is of another model: {key} is {theirs}, not {shape}")
        return self.get(key)[:config.block_size]

    def whole(self, key):
        """The value as a tensor on the CPU."""
        value = self.get(key)
        return value[:] if self.shapes[key] else value  # a scalar cannot be sliced


# ---------- a state in memory -------------------------------------------------


def not_saved(model):
    """Names of the parameters that no checkpoint holds: a run takes their values from
    `initial_value` whenever it starts."""
    return getattr(model, "not_saved", ())


def flat_state(model, optimizer=None):
    """{"model.<name>": parameter, "<key>.<name>": its optimizer state}, sharded as they are
    now; tied parameters have their first name."""
    tensors = {}
    for name, p in model.named_parameters():
        if name in not_saved(model):
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

    # 3) Read the rest: of each tensor the rows that this rank keeps.
    for key, t in flat_state(model, optimizer).items():
        write_full(t, source.value(key, tuple(t.shape), model.config))


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
    with zipfile.ZipFile(path) as records:
        [pickled] = [name for name in records.namelist() if name.endswith("/data.pkl")]
        records.read(pickled)  # raises if its checksum is wrong
    try:
        # mmap: a tensor's bytes are read when it is used, so memory holds one at a time.
        ckpt = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError:  # its text would suggest running the file's code
        raise ValueError("it has more in it than tensors and plain values, or is damaged")
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
    ckpt["config"].setdefault("model", "gpt2")  # nanoGPT's have no such key
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
        # In the order of ranks.
        files = {name: crc for _, checksums in results for name, crc in checksums.items()}
        files[".metadata"] = self.checksum_on_disk(".metadata")
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
    with open(os.path.join(path, ".metadata"), "rb") as f:
        metadata = MetadataUnpickler(f, DESCRIBES_TENSORS).load()
    entries = metadata.state_dict_metadata
    shapes = {key: tuple(entry.size) for key, entry in entries.items()}

    @lru_cache(16)  # a file that falls out is closed
    def opened(name):
        return open(os.path.join(path, name), "rb")

    def read(key, chunk):
        """The rows that one rank has written."""
        place = metadata.storage_data[MetadataIndex(key, chunk.offsets)]
        file = opened(place.relative_path)
        file.seek(place.offset)
        return torch.load(io.BytesIO(file.read(place.length)), weights_only=True)

    def get(key):
        entry = entries[key]
        if not shapes[key]:  # a scalar has no rows
            return read(key, entry.chunks[0])
        return Rows(shapes[key], entry.properties.dtype, entry.chunks, partial(read, key))

    return Source(path, header, shapes, get, sharded=True)


class Rows:
    """A tensor of a sharded checkpoint. value[a:b] reads only what those ranks have written that
    had one of the rows a to b. (dcp.load wants a tensor of the whole's shape and placement.)"""

    def __init__(self, shape, dtype, chunks, read):
        self.shape = shape
        self.dtype = dtype
        self.chunks = chunks  # where each rank's rows begin, and how many they are
        self.read = read  # function: chunk -> tensor

    def __getitem__(self, rows):
        n, *row = self.shape
        first, last, _ = rows.indices(n)
        value = torch.empty(last - first, *row, dtype=self.dtype)
        for chunk in self.chunks:
            start = chunk.offsets[0]
            a = max(first, start)
            b = min(last, start + chunk.sizes[0])
            if a < b:
                value[a - first:b - first] = self.read(chunk)[a - start:b - start]
        return value


class MetadataUnpickler(SafeUnpickler):
    """For .metadata. PyTorch's own reader uses pickle.load, which can run code."""

    def find_class(self, module, name):
        if (module, name) == ("builtins", "getattr"):
            return lambda *args: None  # how Python 3.11.2 pickles an enum; only the layout is one
        found = super().find_class(module, name)
        return AnyProperties if found is TensorProperties else found


class AnyProperties(TensorProperties):
    """A tensor's properties, as written by any version of PyTorch. 2.13 writes 5 of them;
    2.15 writes one more, which 2.13's class refuses. We only need the first, the dtype."""

    def __setstate__(self, state):
        self.dtype = state[0]


def checksum(path):
    crc = 0
    with open(path, "rb") as f:
        while piece := f.read(1 << 24):
            crc = zlib.crc32(piece, crc)
    return crc


# ---------- which one a run starts from ---------------------------------------


def for_new_run(source):
    """The source at step 0 and without optimizer state, to start another run from."""
    header = {**source.header, "iter_num": 0, "best_val_loss": 1e9, "scaler": None, "tokens": {}}
    run_id = source.header.get("run", "?")  # nanoGPT's checkpoints have none
    header["origin"] = f"step {source.header['iter_num']} of run {run_id}"
    shapes = {key: shape for key, shape in source.shapes.items() if key.startswith("model.")}
    return replace(source, header=header, shapes=shapes)


def find(out_dir, world):
    """The newest intact checkpoint in out_dir as a Source, None if there is none (all
    ranks). out_dir may also be a checkpoint itself.
    Damaged ones are named and skipped; SystemExit if all of them are damaged."""
    newest_first, problems = from_rank0(world, lambda: list_all(out_dir))
    found = None
    for path, step in newest_first:
        source, problem = open_intact(path, step, world)
        good = torch.tensor(float(source is not None))
        if all_reduce_mean_(good, world, patient=True) == 1:
            found = source
            break
        problems.append(f"{path}: {problem or 'another rank finds it damaged, or not there'}")
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
    milestones = [f"{name}.pt" for name in steps(out_dir, ".pt")]
    for name in ("", "ckpt.pt", "last.pt", *milestones, *complete_steps(out_dir)):
        path = os.path.join(out_dir, name) if name else out_dir
        if not os.path.isfile(path) and not os.path.isfile(os.path.join(path, HEADER)):
            continue
        try:
            header = open_full(path).header if os.path.isfile(path) else read_header(path)
            found.append((path, header["iter_num"]))
        except Exception as e:  # a damaged zip or pickle raises almost anything
            problems.append(f"{path}: {unreadable(e)}")
    found.sort(key=lambda pair: pair[1], reverse=True)
    return found, problems


def open_one(path):
    return open_full(path) if os.path.isfile(path) else open_sharded(path)


def open_intact(path, step, world):
    """(the Source at path, None); or (None, what this rank finds wrong)."""
    try:
        source = open_one(path)
        if source.header["iter_num"] != step:  # by a run that is still going
            return None, "replaced meanwhile by a run that goes on (try again)"
        return (source, None) if is_intact(source, world) else (None, "damaged: wrong checksums")
    except Exception as e:  # damage raises almost anything
        return None, unreadable(e)


def unreadable(e):
    return f"not readable ({type(e).__name__}: {first_line(e)})"


def is_intact(source, world):
    """True if this rank's share of the bytes matches its checksums; a zip may also raise. The
    ranks divide up a sharded checkpoint's files, and the records of a full one's zip."""
    mine = slice(world.rank, None, world.size)
    if source.sharded:
        # In the order of ranks: at the same world size each checks the file that it will read.
        files = list(source.header["files"].items())[mine]
        return all(checksum(os.path.join(source.path, name)) == crc for name, crc in files)
    with zipfile.ZipFile(source.path) as records:
        for name in records.namelist()[mine]:
            with records.open(name) as f:
                while f.read(1 << 24):
                    pass  # at the end zipfile checks the checksum
    return True


def complete_steps(out_dir):
    """Names of the sharded checkpoints that have a header, oldest first."""
    names = steps(out_dir)
    return [name for name in names if os.path.exists(os.path.join(out_dir, name, HEADER))]


def steps(out_dir, suffix=""):
    """Names of the form step-<n> that something here with this suffix has, oldest first."""
    found = os.listdir(out_dir) if os.path.isdir(out_dir) else []
    names = [name.removesuffix(suffix) for name in sorted(found) if name.endswith(suffix)]
    return [name for name in names if re.fullmatch(r"step-\d{9}", name)]


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


if __name__ == "__main__":
    raise SystemExit("usage: python saves.py full OUT_DIR")

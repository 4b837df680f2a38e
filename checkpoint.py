"""
Checkpoints: what a run leaves on disk, and how another run picks it up.

    out_dir/ckpt.pt     full, in nanoGPT's layout, for nanoGPT too
    out_dir/last.pt     the same, after a stop signal, where ckpt.pt holds the best
    out_dir/step-<n>/   sharded: every rank wrote its rows

    python checkpoint.py full out-x    # the newest checkpoint of out-x, sharded, as out-x/ckpt.pt

Any strategy and world size reads both. A state is flat, {"model.<name>": tensor, "exp_avg.<name>":
tensor, ...}, with a header of plain values. Rank 0 gathers a full one in its host memory, 12 bytes
a parameter, and maps it to read it. A file is synced, then gets its name; a directory is complete
with its header.json, which lists its files' checksums. Nothing in a checkpoint can run code.
"""

import fcntl
import glob
import json
import os
import pickle
import shutil
import sys
import time
import warnings
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor

import float8
from configurator import Config, model_config
from data.loader import SafeUnpickler, data_dir, read_meta
from fsdp import broadcast_full, gather_full, reshard, tied_names
from optimizer import local, make_state
from ranks import PATIENCE, World, from_rank0, mean, patient_group, peer_left, print0, run

HEADER = "header.json"  # of a sharded checkpoint, written last
# other programs' masks and angles, which are no parameters
BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
warnings.filterwarnings("ignore", "torch.distributed is disabled")  # DCP says so in one process


class Saver:
    """The one run that writes in out_dir, which it locks before a checkpoint is chosen. All ranks
    call its methods. A sharded save copies this rank's rows to host memory and returns; they are
    written while training goes on, and the directory is complete after the slowest rank."""

    def __init__(self, out_dir, world):
        self.out_dir, self.world = out_dir, world
        self.saving = None  # the last sharded save: the future of complete()
        # its collectives must not mix with training's, and ranks wait there for the slowest disk
        distributed = dist.is_initialized()
        self.group = dist.new_group(backend="gloo", timeout=PATIENCE) if distributed else None
        from_rank0(world, self.lock)

    def lock(self):
        """Make out_dir, and lock a file in it until this process ends. SystemExit if it is held."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        with writing(self.out_dir):
            os.makedirs(os.path.realpath(self.out_dir), exist_ok=True)
            self.file = open(os.open(os.path.join(self.out_dir, "lock"), flags, 0o644), "r+")
        for _ in range(50):
            try:
                fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.2)  # 10 s in all: the ranks of the last run may still be ending
            except OSError:
                return print(f"{self.out_dir}: no file locks there, so never start two runs in it")
        else:
            raise SystemExit(f"out_dir={self.out_dir} is in use by {self.file.read()}; wait until "
                             "that run ends, or pass another --out_dir")
        self.still_ours(self.out_dir)  # the run that we waited for may have moved it
        self.file.truncate(0)
        print(f"process {os.getpid()} on {os.uname().nodename}", end="", file=self.file, flush=True)

    def still_ours(self, path):
        """path, if out_dir is still the directory that this run locked; else SystemExit."""
        lock = os.path.join(self.out_dir, "lock")
        if not os.path.exists(lock) or not os.path.samefile(lock, self.file.fileno()):
            raise SystemExit(f"out_dir={self.out_dir} was moved or removed meanwhile, so this run "
                             "ends; resume it where its checkpoints are now")
        return path

    def claim(self, cfg, source, resumed=False):
        """A resumed run has the id of source's. Another gets a new one, and if a run was there
        before, renames its directory, whole, and begins a new one."""
        def on_rank0():
            run_id = time.strftime(f"%Y%m%d-%H%M%S-{os.getpid()}")
            if resumed:
                return source.header.get("run") or run_id
            here = os.path.realpath(self.out_dir)  # itself, not a link to it
            written = ("ckpt.pt", "last.pt", "metrics.jsonl", "step-[0-9]*", "events.out.*")
            if any(glob.glob(name, root_dir=here) for name in written):
                if os.path.commonpath([here, os.getcwd()]) == here:
                    raise SystemExit(f"out_dir={self.out_dir} has an earlier run, and cannot be "
                                     "moved aside while you are in it; pass another --out_dir")
                with writing(here):
                    os.rename(here, f"{here}.{run_id}")
                print(f"{self.out_dir} had an earlier run; moved it to {here}.{run_id}", flush=True)
                self.lock()
            return run_id

        self.cfg, self.run_id = cfg, from_rank0(self.world, on_rank0)
        self.kept = source.header.get("kept") if source else None  # Hugging Face's, for an export

    def save(self, model, optimizer, scaler, iter_num, best_val_loss, name="ckpt.pt"):
        """Full: out_dir/<name>. Sharded: a directory, and this returns before it is complete."""
        print0(self.world, f"saving checkpoint to {self.out_dir}")
        self.finish(wait=True)
        reshard(model)  # so that its parameters are the shards
        names = {p: name for name, p in model.named_parameters()}
        ordered = [names[p] for group in optimizer.param_groups for p in group["params"]]
        header = dict(
            model_args=asdict(model_config(self.cfg)), config=asdict(self.cfg), param_names=ordered,
            param_groups=optimizer.state_dict()["param_groups"], ties=tied_names(model),
            scaler=scaler.state_dict() or None, meta=read_meta(data_dir(self.cfg.dataset)),
            run=self.run_id, iter_num=iter_num, best_val_loss=best_val_loss, kept=self.kept)
        tensors = flat_state(model, optimizer)
        require_sound(tensors, self.world, f"after step {iter_num} and is not saved: try a lower "
                      "learning_rate, or grad_clip=1.0")
        if self.cfg.checkpoint == "full":
            flat = {key: gather_full(t, self.world) for key, t in tensors.items()}
            path = os.path.join(self.out_dir, name)
            return from_rank0(self.world, lambda: write_ckpt(self.still_ours(path), flat, header))
        path = os.path.join(self.out_dir, f"step-{iter_num:09d}")
        from_rank0(self.world, lambda: remove(self.still_ours(path)))
        # given a writer, its thread touches no GPU; PyTorch's own would all use number 0
        writer = dcp.FileSystemWriter(path)
        written = dcp.async_save(tensors, storage_writer=writer, process_group=self.group)
        self.saving = ThreadPoolExecutor(1).submit(self.complete, path, header, written)

    def complete(self, path, header, written):
        """In the background: when all ranks have written, add the header, remove old ones."""
        own = f"__{self.world.rank}_"  # as DCP begins the names of a rank's files
        with writing(path):
            written.result()
            files = {file: checksum(os.path.join(path, file)) for file in os.listdir(path)
                     if file.startswith(own) or file == ".metadata" and self.world.rank == 0}
        every = [files] * self.world.size if self.world.rank == 0 else None
        if self.group:
            dist.gather_object(files, every, group=self.group)
        if self.world.rank > 0:
            return
        header["files"] = {file: crc for files in every for file, crc in files.items()}
        missing = header["files"].keys() - set(os.listdir(self.still_ours(path)))
        if missing:
            raise SystemExit(f"out_dir={self.out_dir} is not the same on all nodes, {path} lacks "
                             f"{min(missing)}: use a shared disk, or --checkpoint=full")
        atomic(os.path.join(path, HEADER), lambda f: f.write(sealed(header).encode()))
        for old in steps(self.out_dir)[:-self.cfg.keep_checkpoints]:
            if old != path:
                shutil.rmtree(old, ignore_errors=True)

    def finish(self, wait=False):
        """Raise what went wrong in the background. wait: until all ranks have ended there."""
        if self.saving and (wait or self.saving.done()):
            self.saving.result()
        if wait:
            from_rank0(self.world, lambda: None)  # nobody goes on before it is there


def flat_state(model, optimizer=None):
    """{"model.<name>": parameter, "<key>.<name>": its optimizer state}, as sharded; ties once."""
    tensors = {}
    for name, p in model.named_parameters():
        tensors[f"model.{name}"] = float8.plain(p.detach())
        placed = getattr(p, "placements", None)
        for kind, t in optimizer.state.get(p, {}).items() if optimizer else ():
            if not isinstance(t, torch.Tensor) or getattr(t, "placements", placed) != placed:
                raise SystemExit(f"{kind}.{name} is no tensor placed as {name}: see optimizer.py")
            tensors[f"{kind}.{name}"] = t
    return tensors


def require_sound(tensors, world, where):
    """SystemExit unless all is finite, and plain tensors the same on all ranks (collective)."""
    norms = torch.tensor([local(t).float().norm(1) for t in tensors.values()])
    norms[norms.isnan()] = torch.inf
    ends = torch.stack((norms, -norms))
    if world.size > 1:  # patient: ranks may have read as long as their disks take
        dist.all_reduce(ends, dist.ReduceOp.MAX, group=patient_group())
    for (key, t), most, least in zip(tensors.items(), ends[0].tolist(), (-ends[1]).tolist()):
        if most == torch.inf:
            raise SystemExit(f"{key} is not finite (NaN or infinity) {where}")
        if not isinstance(t, DTensor) and most > 1.001 * least:  # but for GPUs' last digits
            raise SystemExit(f"{key} is no DTensor, and differs between ranks: see optimizer.py")


def write_ckpt(path, flat, header):
    """nanoGPT's layout: 'model' by name, 'optimizer' by number, the header's values beside them."""
    weights, state = {}, {}
    for key, tensor in flat.items():
        kind, _, name = key.partition(".")
        if kind == "model":
            weights[name] = tensor
        else:
            state.setdefault(header["param_names"].index(name), {})[kind] = tensor
    for first, *others in header.pop("ties"):
        weights.update(dict.fromkeys(others, weights[first]))  # one storage, so stored once
    optimizer = {"state": state, "param_groups": header.pop("param_groups")}
    atomic(path, lambda f: torch.save({**header, "model": weights, "optimizer": optimizer}, f))


def atomic(path, write):
    """Write path by write(file), all or nothing: after a failure it is what it was."""
    tmp = path + ".tmp"
    with writing(path):
        remove(tmp)
        try:
            with open(tmp, "xb") as f:
                write(f)
                f.flush()
                os.fsync(f.fileno())
            os.replace(tmp, path)
            directory = os.open(os.path.dirname(path) or ".", os.O_RDONLY)
            os.fsync(directory)  # the rename itself
            os.close(directory)
        finally:
            remove(tmp)


def remove(path):
    """Remove what a dead run left at path; of a link, the link only."""
    with writing(path):
        if os.path.exists(os.path.join(path, "header.pt")):  # an older version's is kept
            os.rename(path, path + ".old")
        elif os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        elif os.path.lexists(path):
            os.remove(path)


@contextmanager
def writing(path):
    """A failure to write inside is one line."""
    try:
        yield
    # torch.save raises RuntimeError on a full disk; CheckpointException is no Exception
    except (OSError, RuntimeError, dcp.CheckpointException) as e:
        if isinstance(e, dcp.CheckpointException):
            e, _ = next(iter(e.failures.values()))  # the first rank's
        if isinstance(e, torch.OutOfMemoryError) or peer_left(e):
            raise e  # RuntimeErrors too; ranks.run knows what to say
        raise SystemExit(f"cannot write {path}: {first_line(e)}; the previous checkpoint is "
                         "untouched. Make room, or pass another directory")


def first_line(e):
    return (str(e).strip() or type(e).__name__).splitlines()[0]


@dataclass
class Source:
    """An opened checkpoint; its header's "shapes" has the flat keys."""
    path: str
    header: dict
    get: object = None  # function: flat key -> whole tensor on the CPU; only on rank 0
    sharded: bool = False

    def __post_init__(self):
        header = self.header
        header["best_val_loss"] = float(header["best_val_loss"])  # nanoGPT's is a tensor
        kinds = dict(iter_num=int, model_args=dict, config=dict, meta=dict, scaler=dict | None,
                     model=str, dataset=str)
        found = dict(model="", dataset="", meta={}, scaler=None) | header["config"] | header
        for key, kind in kinds.items():
            if not isinstance(found[key], kind):
                raise ValueError(f"its {key} is {found[key]!r}")

    def __reduce__(self):  # for the other ranks
        return Source, (self.path, self.header, None, self.sharded)


def find(out_dir, world):
    """The newest intact checkpoint as a Source, None if there is none (all ranks). Damaged ones are
    named and passed over; SystemExit if there are no others."""
    sources, problems = from_rank0(world, lambda: open_all(out_dir))
    while sources and not intact(sources[0], world):
        problems.append(f"{sources.pop(0).path}: damaged, or not visible to every rank")
    remedy = "remove it, or pass another out_dir"
    if problems and not sources:
        raise SystemExit(f"{problems[0]}; {remedy}")
    for problem in problems if world.rank == 0 else ():
        print(f"skipping {problem}; {remedy}", file=sys.stderr)
    return sources[0] if sources else None


def open_all(out_dir):
    """([Source], newest first, [what is wrong with those that cannot be opened])."""
    sources, problems = [], []
    full = [os.path.join(out_dir, name) for name in ("ckpt.pt", "last.pt")]
    for path in full + steps(out_dir):
        try:
            if os.path.exists(path):
                sources.append(open_sharded(path) if os.path.isdir(path) else open_full(path))
        except Exception as e:  # a damaged zip or pickle raises almost anything
            problems.append(f"{path}: not readable ({type(e).__name__}: {first_line(e)})")
    for path in steps(out_dir, "header.pt"):
        problems.append(f"{path}: of an older version; to keep it, run that version's python "
                        f"checkpoint.py full {out_dir}, which makes it a ckpt.pt")
    return sorted(sources, key=lambda source: -source.header["iter_num"]), problems


def steps(out_dir, last=HEADER):
    """The sharded checkpoints that have the file that is written last, oldest first."""
    found = glob.glob(f"step-{9 * '[0-9]'}/{last}", root_dir=out_dir)
    return sorted(os.path.join(out_dir, os.path.dirname(file)) for file in found)


def open_full(path):
    """A ckpt.pt of ours or of nanoGPT."""
    if zipfile.ZipFile(path).testzip():  # torch.load compares no checksums
        raise ValueError("damaged")
    try:  # mmap: a tensor's bytes are read when it is used, so memory holds one at a time
        ckpt = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError:  # its text says how to load the file and run what is in it
        raise ValueError("it has more in it than tensors and plain values, or is damaged")
    weights = {}
    for name, tensor in ckpt.pop("model").items():
        name = name.removeprefix("module.").removeprefix("_orig_mod.")  # DDP, compile in nanoGPT
        if not name.endswith(BUFFERS):
            weights[name] = tensor
    # nanoGPT stores no names: it numbers first the matrices, then the vectors, in model order
    untied = [name for name in weights if name != "lm_head.weight"]
    names = ckpt.get("param_names") or sorted(untied, key=lambda name: weights[name].dim() < 2)
    flat = {f"model.{name}": tensor for name, tensor in weights.items()}
    for i, state in ckpt.pop("optimizer", {"state": {}})["state"].items():
        flat.update({f"{key}.{names[i]}": tensor for key, tensor in state.items()})
    for key, t in flat.items():
        odd = key.startswith("model.") and not t.is_floating_point()
        if odd or t.layout != torch.strided:
            raise ValueError(f"{key} is no dense tensor of floats, but {t.dtype}, {t.layout}")
    ckpt["shapes"] = {key: tuple(t.shape) for key, t in flat.items()}
    return Source(path, ckpt, flat.__getitem__)


def open_sharded(path):
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

    header["shapes"] = {key: tuple(entry.size) for key, entry in entries.items()}
    return Source(path, header, get, sharded=True)


def sealed(header):
    """The header as JSON; its last field is the checksum of the rest."""
    crc = zlib.crc32(json.dumps(header).encode())
    return json.dumps({**header, "checksum": crc}, indent=1)


def read_sharded(path, tensors, group=None):
    """Fill tensors (collective in group)."""
    try:
        dcp.load(tensors, storage_reader=MetadataReader(path), process_group=group,
                 no_dist=group is None)
    except (OSError, dcp.CheckpointException):  # which is no Exception
        raise SystemExit(f"{path} was removed or damaged while it was read; start again")


class MetadataReader(dcp.FileSystemReader):
    """PyTorch's own unpickles .metadata, and so would run what somebody put there."""

    def read_metadata(self, *args, **kwargs):
        with open(os.path.join(self.path, ".metadata"), "rb") as f:
            return MetadataUnpickler(f).load()


class MetadataUnpickler(SafeUnpickler):
    """What describes tensors. Not BytesStorageMetadata: PyTorch unpickles such entries as well."""
    ADMITTED = {
        "torch": "Size bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64",
        "torch.serialization": "_get_layout",
        "pathlib": "PosixPath", "pathlib._local": "PosixPath",  # of Python 3.13
        "torch.distributed.checkpoint.filesystem": "_StorageInfo",
        "torch.distributed.checkpoint.metadata": "ChunkStorageMetadata Metadata MetadataIndex "
        "StorageMeta TensorProperties TensorStorageMetadata _MEM_FORMAT_ENCODING"}


def intact(source, world):
    """Do a sharded one's files match their checksums? Each rank reads some (all ranks)."""
    files = sorted(source.header.get("files", {}).items())[world.rank::world.size]
    good = False
    with suppress(OSError):
        good = all(checksum(os.path.join(source.path, file)) == crc for file, crc in files)
    return mean(torch.tensor(float(good)), world, patient=True) == 1


def checksum(path):
    crc = 0
    with open(path, "rb") as f:
        while piece := f.read(1 << 24):
            crc = zlib.crc32(piece, crc)
    return crc


def compare(source, cfg, resumed=True):
    """SystemExit if this run's model is not the checkpoint's; one that starts from its weights has
    its sizes, where it names none. Else lines that say what differs, maybe on purpose."""
    before = {"model": "gpt2", "optimizer": "adamw",  # nanoGPT's have neither
              **source.header["config"], **source.header["model_args"]}
    ours, sizes, names = asdict(cfg), asdict(model_config(cfg)), list(Config.__dataclass_fields__)
    fixed = {"model", *sizes} - {"dropout"}
    fixed = fixed | {"optimizer"} if resumed else fixed & set(cfg.given)
    differ, between = [], names[names.index("dataset"):names.index("device")]  # data to optimizer
    for key in ("model", *between, *sizes):
        theirs = before.get(key, ours[key])
        cropped = key == "block_size" and ours[key] < theirs and not source.sharded
        if ours[key] == theirs or key == "max_iters":
            continue
        if key in fixed and not cropped:
            wanted = "its data set" if key == "vocab_size" and resumed else f"--{key}={theirs}"
            raise SystemExit(f"{key}={ours[key]} in this run, but {source.path} has {key}="
                             f"{theirs}; pass {wanted}, or another out_dir or init_from")
        differ.append(f"{key}={ours[key]!r} (was {theirs!r})")
    lines = [f"this run differs from that of {source.path}: {', '.join(differ)}"] if differ else []
    if cfg.decay_lr and cfg.max_iters > cfg.lr_decay_iters:
        lines.append(f"from step lr_decay_iters={cfg.lr_decay_iters} to max_iters={cfg.max_iters} "
                     f"the learning rate is min_lr={cfg.min_lr}")
    return lines if resumed else []


def load(source, model, optimizer, world):
    """Weights, and the optimizer's state of what trains, as they are sharded now (collective)."""
    shapes, params = source.header["shapes"], dict(model.named_parameters(remove_duplicate=False))
    for key in shapes:
        if key.partition(".")[2] not in params:
            raise SystemExit(f"{source.path} is of another model: this one has no {key}")
    if optimizer:
        make_state(optimizer)
    lacking = flat_state(model, optimizer).keys() - shapes.keys()
    anew = {key.partition(".")[2] for key in lacking if not key.startswith("model.")}
    for name in anew:
        del optimizer.state[params[name]]
    if anew and source.header["iter_num"]:
        print0(world, f"{source.path} lacks optimizer state of {len(anew)} parameters that train "
                      "now; theirs starts anew")
    tensors = flat_state(model, optimizer)
    for key, t in tensors.items():
        shape, ours = shapes.get(key), tuple(t.shape)
        # a position table may have more rows than this run's shorter context uses
        longer = shape and ours and shape[1:] == ours[1:] and shape[0] > ours[0]
        if shape != ours and not longer:
            raise SystemExit(f"{source.path} is of another model: {key} is {shape or 'missing'}, "
                             f"not {ours}")
    if source.sharded:
        read_sharded(source.path, tensors, patient_group() if dist.is_initialized() else None)
    else:
        for key, t in tensors.items():
            rows = tuple(map(slice, t.shape))
            broadcast_full(t, source.get(key)[rows] if world.rank == 0 else None, world)
    require_sound(tensors, world, f"in {source.path}; use another one")


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
    del source.header["files"]
    write_ckpt(saver.still_ours(path), flat, source.header)
    print(f"{source.path} -> {path}")


def open_newest(out_dir):
    source = find(out_dir, World())
    if source is None:
        raise SystemExit(f"{out_dir}: no checkpoint there")
    return source


if __name__ == "__main__":
    run(main, sys.argv[1:])

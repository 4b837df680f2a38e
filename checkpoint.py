"""
Checkpoints: what a run leaves on disk, and how another run picks it up.

    out_dir/ckpt.pt                 full: nanoGPT's layout; any strategy and world size, and nanoGPT
    out_dir/last.pt                 the same, after a stop signal, where ckpt.pt holds the best
    out_dir/step-<n>/ and latest    sharded: every rank wrote its rows; any strategy and world size

    python checkpoint.py full out-x      # the newest checkpoint of out-x, sharded, as out-x/ckpt.pt

Inside, a state is flat, {"model.<name>": tensor, "exp_avg.<name>": tensor, ...}, with a header of
plain values. Rank 0 gathers a full state one tensor at a time into its host memory (12 bytes a
parameter), and reads it one tensor at a time. A file gets a
temporary name, is synced, then renamed: what carries its final name is complete, whenever the
process died; a directory is complete once it has its header. Checksums are compared before a
checkpoint is used, and nothing in it can run code.
"""

import glob
import io
import os
import pickle
import shutil
import sys
import warnings
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import float8
from configurator import Config, model_config
from fsdp import gather_full, reshard, scatter_full, tied_names
from outdir import atomic, first_line, writing
from ranks import PATIENCE, World, from_rank0, mean, patient_group, run

warnings.filterwarnings("ignore", "torch.distributed is disabled")  # DCP says so in one process

# ---------- saving ------------------------------------------------------------


def flat_state(model, optimizer=None):
    """{"model.<name>": parameter, "<key>.<name>": its optimizer state}, as sharded; ties once."""
    tensors = {}
    for name, p in model.named_parameters():
        tensors[f"model.{name}"] = float8.plain(p.detach())
        state = optimizer.state.get(p, {}) if optimizer else {}
        tensors.update({f"{key}.{name}": value for key, value in state.items()})
    return tensors


def make_header(model, optimizer, cfg, run, iter_num, best_val_loss, scaler):
    """All that is not a tensor, as plain values."""
    names = {p: name for name, p in model.named_parameters()}
    ordered = [names[p] for group in optimizer.param_groups for p in group["params"]]
    number = {name: i for i, name in enumerate(ordered)}
    groups = [{**group, "params": [number[names[p]] for p in group["params"]]}
              for group in optimizer.param_groups]  # as Optimizer.state_dict numbers them
    return dict(model_args=asdict(model_config(cfg)), config=asdict(cfg), run=run,
                iter_num=iter_num, best_val_loss=best_val_loss, scaler=scaler.state_dict() or None,
                param_names=ordered, param_groups=groups, ties=tied_names(model))


def save_full(path, model, optimizer, header, world):
    """One portable file (all ranks: it gathers)."""
    reshard(model)  # so that its parameters are the shards
    flat = {key: gather_full(t, world) for key, t in flat_state(model, optimizer).items()}
    from_rank0(world, lambda: write_full_file(path, flat, header))


def write_full_file(path, flat, header):
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
    rest = {key: value for key, value in header.items() if key not in ("param_groups", "ties")}
    with writing(path), atomic(path) as tmp:
        torch.save({**rest, "model": weights, "optimizer": optimizer}, tmp)


class ShardedSaver:
    """
    Sharded checkpoints, written in the background while training goes on.

    save() copies this rank's rows to host memory and returns. finish() completes the directory with
    its header once all ranks' files are there, moves out_dir/latest, and removes old ones. All
    ranks call both.
    """

    def __init__(self, out_dir, keep, world):
        self.out_dir, self.keep, self.world = out_dir, keep, world
        self.path, self.header, self.future = None, None, None  # of the save under way
        # its own group: the background thread's collectives must not mix with the training loop's
        # and patient: ranks wait there for the slowest disk
        distributed = dist.is_initialized()
        self.group = dist.new_group(backend="gloo", timeout=PATIENCE) if distributed else None

    def save(self, model, optimizer, header):
        self.finish(wait=True)
        reshard(model)
        path = os.path.join(self.out_dir, f"step-{header['iter_num']:09d}")
        # half-written, by a run that died here
        from_rank0(self.world, lambda: shutil.rmtree(path, ignore_errors=True))
        tensors = flat_state(model, optimizer)
        self.path, self.header = path, header
        with writing(path):
            if self.group:
                self.future = dcp.async_save(tensors, checkpoint_id=path, process_group=self.group)
            else:  # without a process group PyTorch saves in the foreground only
                dcp.save(tensors, checkpoint_id=path, no_dist=True)
        self.finish()

    def finish(self, wait=False):
        """Publish the save under way if it is complete; wait: block until it is (all ranks)."""
        if self.path and (wait or self.future is None or self.future.done()):
            with writing(self.path):
                if self.future:
                    self.future.result()
                if self.world.rank == 0:
                    self.publish()
            self.path = self.header = self.future = None
        if wait:
            from_rank0(self.world, lambda: None)  # nobody goes on before `latest` has moved

    def publish(self):
        with open(os.path.join(self.path, ".metadata"), "rb") as f:
            self.header["metadata_crc32"] = zlib.crc32(f.read())
        with atomic(os.path.join(self.path, "header.pt")) as tmp:
            torch.save(self.header, tmp)
        with atomic(os.path.join(self.out_dir, "latest")) as tmp, open(tmp, "w") as f:
            f.write(os.path.basename(self.path) + "\n")
        for old in sorted(glob.glob(os.path.join(self.out_dir, "step-*")))[:-self.keep]:
            if old != self.path:
                shutil.rmtree(old, ignore_errors=True)


# ---------- finding and opening -----------------------------------------------


ALONE = World()


@dataclass
class Source:
    """An opened checkpoint; its header's "shapes" has the flat keys."""
    path: str
    header: dict
    get: Callable = None  # flat key -> whole tensor on the CPU; only on rank 0
    sharded: bool = False

    def __reduce__(self):  # for the other ranks
        return Source, (self.path, self.header, None, self.sharded)


def find(out_dir, world=ALONE):
    """
    The newest intact checkpoint as a Source, None if there is none (all ranks). Damaged ones are
    named and passed over; SystemExit if there are no others.
    """
    sources, problems = from_rank0(world, lambda: open_all(out_dir))
    for source in sources:
        if intact(source, world):
            break
        problems.append(f"{source.path}: damaged, or not visible to every rank")
    else:
        source = None
    remedy = "remove it, or pass another out_dir"
    if problems and source is None:
        raise SystemExit(f"{problems[0]}; {remedy}")
    if world.rank == 0:
        for problem in problems:
            print(f"skipping {problem}; {remedy}", file=sys.stderr)
    return source


def open_all(out_dir):
    """([Source], newest first, [what is wrong with those that cannot be opened])."""
    sources, problems = [], []
    for pattern, opener in (("ckpt.pt", open_full), ("last.pt", open_full),
                            ("step-*/header.pt", open_sharded)):
        for path in glob.glob(os.path.join(glob.escape(out_dir), pattern)):
            try:
                sources.append(opener(path))
            except Exception as e:  # a damaged zip or pickle raises almost anything
                problems.append(f"{path}: not a complete checkpoint ({type(e).__name__}: "
                                f"{first_line(e)})")
    return sorted(sources, key=lambda source: -source.header["iter_num"]), problems


def open_full(path):
    """A ckpt.pt of ours or of nanoGPT."""
    # mmap: a tensor's bytes are read when it is used, so memory holds one at a time
    ckpt = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    weights = {}
    for name, tensor in ckpt["model"].items():
        name = name.removeprefix("module.").removeprefix("_orig_mod.")  # DDP, compile in nanoGPT
        if not name.endswith(".attn.bias"):  # nanoGPT's causal mask, a buffer
            weights[name] = tensor
    # nanoGPT stores no names: it numbers first the matrices, then the vectors, in model order
    untied = [name for name in weights if name != "lm_head.weight"]
    names = ckpt.get("param_names") or sorted(untied, key=lambda name: weights[name].dim() < 2)
    flat = {f"model.{name}": tensor for name, tensor in weights.items()}
    for i, state in ckpt.get("optimizer", {"state": {}})["state"].items():
        flat.update({f"{key}.{names[i]}": tensor for key, tensor in state.items()})
    header = {key: value for key, value in ckpt.items() if key not in ("model", "optimizer")}
    return make_source(path, header, {key: t.shape for key, t in flat.items()}, flat.__getitem__)


def open_sharded(path):
    """A directory, by the path of its header.pt."""
    header, path = torch.load(path, weights_only=True), os.path.dirname(path)
    if "metadata_crc32" not in header:
        raise ValueError("an older version wrote it; make it a full one there")
    with open(os.path.join(path, ".metadata"), "rb") as f:
        if zlib.crc32(f.read()) != header.pop("metadata_crc32"):
            raise ValueError("its .metadata is damaged")
    entries = MetadataReader(path).read_metadata().state_dict_metadata

    def get(key):
        box = {key: torch.empty(entries[key].size, dtype=entries[key].properties.dtype)}
        dcp.load(box, storage_reader=MetadataReader(path), no_dist=True)
        return box[key]

    shapes = {key: entry.size for key, entry in entries.items()}
    return make_source(path, header, shapes, get, sharded=True)


def make_source(path, header, shapes, get, sharded=False):
    for key, kind in (("iter_num", int), ("model_args", dict), ("config", dict)):
        if type(header[key]) is not kind:
            raise ValueError(f"its {key} is {header[key]!r}")
    scaler = header.get("scaler")
    if scaler is not None:
        float(scaler["scale"])
    header.update(best_val_loss=float(header["best_val_loss"]), scaler=scaler,
                  shapes={key: tuple(shape) for key, shape in shapes.items()})
    return Source(path, header, get, sharded)


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
    """
    Do its checksums match? torch.load does not look. 0.5 s a GB; every rank reads its part of a
    sharded one (all ranks).
    """
    pieces = [(source.path, 0, None)][world.rank:]  # a whole file; rank 0 alone may see it
    try:
        if source.sharded:  # every rank's rows of a tensor are a zip of their own
            stored = MetadataReader(source.path).read_metadata().storage_data.values()
            pieces = [(os.path.join(source.path, s.relative_path), s.offset, s.length)
                      for s in stored][world.rank::world.size]
        bad = any(broken(*piece) for piece in pieces)
    except Exception:  # no such file, or not a zip any more
        bad = True
    return mean(torch.tensor(float(bad)), world, patient=True) == 0


def broken(path, offset, length):
    with open(path, "rb") as f:
        f.seek(offset)
        file = io.BytesIO(f.read(length)) if length else f
        bad = zipfile.ZipFile(file).testzip()
        file.seek(0)
        torch.load(file, map_location="meta", weights_only=True)  # the zip's directory has no sums
        return bad


# ---------- loading -----------------------------------------------------------


def check(source, cfg):
    """Does the checkpoint match this run? SystemExit with key, both values and the remedy."""
    before = {"model": "gpt2", "optimizer": "adamw", **source.header["config"]}  # nanoGPT's
    ours = {"model": cfg.model, "optimizer": cfg.optimizer, **asdict(model_config(cfg))}
    theirs = {**source.header["model_args"], **{k: before[k] for k in ("model", "optimizer")}}
    for key in ours.keys() & theirs.keys() - {"dropout"}:
        cropped = key == "block_size" and ours[key] < theirs[key] and not source.sharded
        if ours[key] != theirs[key] and not cropped:
            remedy = f"pass --{key}={theirs[key]}, or another out_dir"
            if key == "vocab_size":
                remedy = "use the data set that it was trained on, or another out_dir"
            raise SystemExit(f"{key}={ours[key]} in this run, but {source.path} has {key}="
                             f"{theirs[key]}; {remedy}")


def changed(source, cfg):
    """One line, or none: the settings that differ from the checkpoint's, maybe on purpose."""
    keys = [f.name for f in fields(Config)]
    keys = keys[keys.index("dataset"):keys.index("device")]  # data, model, optimizer
    keys.remove("max_iters")
    keys += ["block_size", "dropout"]  # the model's, which check() lets pass
    ours, theirs = asdict(cfg), source.header["config"]
    differ = [f"{key}={ours[key]!r} (was {theirs[key]!r})" for key in keys
              if key in theirs and theirs[key] != ours.get(key, theirs[key])]
    return [f"this run differs from that of {source.path}: {', '.join(differ)}"] if differ else []


def load(source, model, optimizer, world):
    """Weights, and the optimizer's state of what trains, as they are sharded now (collective)."""
    shapes, params = source.header["shapes"], dict(model.named_parameters())
    for key in {f"model.{name}": None for name in params} | shapes:
        kind, _, name = key.partition(".")
        p, shape = params.get(name), shapes.get(key)
        if p is None:
            continue
        # a position table may have more rows than this run's shorter context uses
        fits = shape and shape[1:] == p.shape[1:] and shape[0] >= p.shape[0]
        if not fits and (kind == "model" or shape != ()):
            raise SystemExit(f"{source.path}: {key} is missing or has shape {shape}, not "
                             f"{tuple(p.shape)}; it belongs to another model")
        if kind != "model" and optimizer and p.requires_grad:
            # a number, such as Adam's step, stands where a fused optimizer keeps it
            empty = torch.zeros_like(p) if shape else torch.zeros((), device=p.device)
            optimizer.state[p][kind] = empty
    tensors = flat_state(model, optimizer)
    if source.sharded:
        reader, alone = MetadataReader(source.path), not dist.is_initialized()
        group = None if alone else patient_group()
        return dcp.load(tensors, storage_reader=reader, process_group=group, no_dist=alone)
    for key, t in tensors.items():
        full = source.get(key) if world.rank == 0 else None
        if full is not None and t.dim():
            full = full[:len(t)]
        scatter_full(t, full, world)


# ---------- the command -------------------------------------------------------


def main(argv):
    if "--help" in argv or "-h" in argv:
        return print(__doc__.strip())
    if len(argv) != 2 or argv[0] != "full":
        raise SystemExit("usage: python checkpoint.py full OUT_DIR")
    source = open_newest(argv[1])
    if not source.sharded:
        return print(f"{source.path} is a full checkpoint already")
    path = os.path.join(argv[1], "ckpt.pt")
    flat = {key: source.get(key) for key in source.header.pop("shapes")}
    write_full_file(path, flat, source.header)
    print(f"{source.path} -> {path}")


def open_newest(out_dir):
    source = find(out_dir)
    if source is None:
        raise SystemExit(f"{out_dir}: no checkpoint there")
    return source


if __name__ == "__main__":
    run(main, sys.argv[1:])

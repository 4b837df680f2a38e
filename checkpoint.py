"""
Checkpoints: what a run leaves on disk, and how another run picks it up.

    out_dir/ckpt.pt                 full: nanoGPT's layout; any strategy and world size, and nanoGPT
    out_dir/last.pt                 the same, after a stop signal, where ckpt.pt holds the best
    out_dir/step-<n>/ and latest    sharded: every rank wrote its rows; any strategy and world size

    python checkpoint.py full out-x      # the newest checkpoint of out-x, sharded, as out-x/ckpt.pt

Inside, a state is flat, {"model.<name>": tensor, "exp_avg.<name>": tensor, ...}, with a header of
plain values. A full state passes through rank 0's host memory one tensor at a time. A file gets a
temporary name, is synced, then renamed: what carries its final name is complete, whenever the
process died. Files are read with weights_only=True.
"""

import glob
import os
import shutil
import sys
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from configurator import model_config
from fsdp import gather_full, reshard, scatter_full, tied_names
from ranks import agree, run

warnings.filterwarnings("ignore", "torch.distributed is disabled")  # DCP says so in one process

# ---------- writing files -----------------------------------------------------

# torch.save raises RuntimeError on a full disk; CheckpointException is no Exception
WRITE_ERRORS = (OSError, RuntimeError, CheckpointException)


@contextmanager
def atomic(path):
    """A temporary name to write to; becomes `path` if the block ends well, else disappears."""
    tmp = path + ".tmp"
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    try:
        yield tmp
        sync(tmp)
        os.replace(tmp, path)
        sync(os.path.dirname(path) or ".")  # the rename itself
    except BaseException:
        if os.path.exists(tmp):
            os.remove(tmp)
        raise


def sync(path):
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def on_rank0(world, action, path):
    """Do action on rank 0; if it fails, every rank ends with one line (collective)."""
    problem = None
    if world.rank == 0:
        try:
            action()
        except WRITE_ERRORS as e:
            problem = cannot_write(path, e)
    problem = agree(world, problem)
    if problem:
        raise SystemExit(problem)


def cannot_write(path, e):
    return (f"cannot write {path}: {first_line(e)}; the previous checkpoint is untouched. Make "
            "room, or pass another --out_dir")


def first_line(e):
    return (str(e).strip() or type(e).__name__).splitlines()[0]


# ---------- saving ------------------------------------------------------------


def flat_state(model, optimizer=None):
    """{"model.<name>": parameter, "<key>.<name>": its optimizer state}, as sharded; ties once."""
    tensors = {}
    for name, p in model.named_parameters():
        tensors[f"model.{name}"] = p.detach()
        state = optimizer.state.get(p, {}) if optimizer else {}
        tensors.update({f"{key}.{name}": value for key, value in state.items()})
    return tensors


def make_header(model, optimizer, cfg, iter_num, best_val_loss, scaler):
    """All that is not a tensor, as plain values."""
    names = {p: name for name, p in model.named_parameters()}
    ordered = [names[p] for group in optimizer.param_groups for p in group["params"]]
    number = {name: i for i, name in enumerate(ordered)}
    groups = [{**group, "params": [number[names[p]] for p in group["params"]]}
              for group in optimizer.param_groups]  # as Optimizer.state_dict numbers them
    return dict(model_args=asdict(model_config(cfg)), config=asdict(cfg), iter_num=iter_num,
                best_val_loss=best_val_loss, scaler=scaler.state_dict() or None,
                param_names=ordered, param_groups=groups, ties=tied_names(model))


def save_full(path, model, optimizer, header, world):
    """One portable file (all ranks: it gathers)."""
    reshard(model)  # so that its parameters are the shards
    flat = {key: gather_full(t, world) for key, t in flat_state(model, optimizer).items()}
    on_rank0(world, lambda: write_full_file(path, flat, header), path)


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
    with atomic(path) as tmp:
        torch.save({**rest, "model": weights, "optimizer": optimizer}, tmp)


class ShardedSaver:
    """
    Sharded checkpoints, written in the background while training goes on.

    save() copies this rank's rows to host memory and returns. finish() moves out_dir/latest once
    all ranks' files are complete, and removes old ones. All ranks call both.
    """

    def __init__(self, out_dir, keep, world):
        self.out_dir, self.keep, self.world = out_dir, keep, world
        self.path, self.future = None, None  # of the save under way
        # its own group: the background thread's collectives must not mix with the training loop's
        self.group = dist.new_group(backend="gloo") if dist.is_initialized() else None

    def save(self, model, optimizer, header):
        self.finish(wait=True)
        reshard(model)
        path = os.path.join(self.out_dir, f"step-{header['iter_num']:09d}")

        def prepare():
            shutil.rmtree(path, ignore_errors=True)  # half-written, by a run that died here
            with atomic(os.path.join(path, "header.pt")) as tmp:
                torch.save(header, tmp)

        on_rank0(self.world, prepare, path)
        tensors = flat_state(model, optimizer)
        self.path = path
        try:
            if self.group:
                self.future = dcp.async_save(tensors, checkpoint_id=path, process_group=self.group)
            else:  # without a process group PyTorch saves in the foreground only
                dcp.save(tensors, checkpoint_id=path, no_dist=True)
        except WRITE_ERRORS as e:
            raise SystemExit(cannot_write(path, e))
        self.finish()

    def finish(self, wait=False):
        """Publish the save under way if it is complete; wait: block until it is (all ranks)."""
        if self.path and (wait or self.future is None or self.future.done()):
            try:
                if self.future:
                    self.future.result()
                if self.world.rank == 0:
                    self.publish()
            except WRITE_ERRORS as e:
                raise SystemExit(cannot_write(self.path, e))
            self.path = self.future = None
        if wait:
            agree(self.world, None)  # nobody goes on before `latest` has moved

    def publish(self):
        sync(self.path)
        with atomic(os.path.join(self.out_dir, "latest")) as tmp, open(tmp, "w") as f:
            f.write(os.path.basename(self.path) + "\n")
        for old in sorted(glob.glob(os.path.join(self.out_dir, "step-*")))[:-self.keep]:
            if old != self.path:
                shutil.rmtree(old, ignore_errors=True)


# ---------- finding and opening -----------------------------------------------


@dataclass
class Source:
    """An opened checkpoint; its header's "shapes" has the flat keys."""
    path: str
    header: dict
    get: Callable = None  # flat key -> whole tensor on the CPU; only on rank 0
    sharded: bool = False


def find(out_dir):
    """The newest complete checkpoint as a Source, or None. SystemExit if all are damaged."""
    paths = [os.path.join(out_dir, name) for name in ("ckpt.pt", "last.pt")]
    for path in sorted(glob.glob(os.path.join(out_dir, "step-*"))):
        if path == latest(out_dir) or os.path.exists(os.path.join(path, ".metadata")):
            paths.append(path)
    found, problems = [], []
    for path in filter(os.path.exists, paths):
        try:
            found.append(open_sharded(path) if os.path.isdir(path) else open_full(path))
        except Exception as e:  # a damaged zip or pickle raises almost anything
            problems.append(f"{path}: not a complete checkpoint ({type(e).__name__}: "
                            f"{first_line(e)}); remove it, or pass another out_dir")
    if problems and not found:
        raise SystemExit(problems[0])
    for problem in problems:
        print(f"skipping {problem}", file=sys.stderr)
    return max(found, key=lambda source: source.header["iter_num"], default=None)


def latest(out_dir):
    """The directory of the last complete sharded checkpoint, or None."""
    try:
        with open(os.path.join(out_dir, "latest")) as f:
            return os.path.join(out_dir, f.read().strip())
    except FileNotFoundError:
        return None


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
    header = {key: ckpt[key] for key in ("iter_num", "model_args", "config")}
    header.update(best_val_loss=float(ckpt["best_val_loss"]), scaler=ckpt.get("scaler"),
                  shapes={key: tuple(t.shape) for key, t in flat.items()})
    return Source(path, header, flat.__getitem__)


def open_sharded(path):
    header = torch.load(os.path.join(path, "header.pt"), weights_only=True)
    if "ties" not in header:
        raise ValueError("an older version wrote it; make it a full one there")
    entries = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    header["shapes"] = {key: tuple(entry.size) for key, entry in entries.items()}

    def get(key):
        box = {key: torch.empty(entries[key].size, dtype=entries[key].properties.dtype)}
        dcp.load(box, checkpoint_id=path, no_dist=True)
        return box[key]

    return Source(path, header, get, sharded=True)


def open_source(opener, world):
    """opener() on rank 0, its Source's header on every rank; or its SystemExit, on every rank."""
    source, problem = None, None
    if world.rank == 0:
        try:
            source = opener()
        except SystemExit as e:
            problem = str(e)
    problem, seen = agree(world, (problem, source and replace(source, get=None)))
    if problem:
        raise SystemExit(problem)
    return source or seen


# ---------- loading -----------------------------------------------------------


def check(source, cfg):
    """Does the checkpoint match this model? SystemExit with key, both values and the remedy."""
    ours = {"model": cfg.model, **asdict(model_config(cfg))}
    theirs = {"model": source.header["config"].get("model", "gpt2"), **source.header["model_args"]}
    for key in ours.keys() & theirs.keys() - {"dropout"}:
        cropped = key == "block_size" and ours[key] < theirs[key] and not source.sharded
        if ours[key] != theirs[key] and not cropped:
            raise SystemExit(f"{key}={ours[key]} in the config, but {source.path} has {key}="
                             f"{theirs[key]}; pass --{key}={theirs[key]}, or another out_dir")


def load(source, model, optimizer, world):
    """Weights, and the optimizer's state of what trains, as they are sharded now (collective)."""
    shapes, params = source.header["shapes"], dict(model.named_parameters())
    for name, p in params.items():
        theirs = shapes.get(f"model.{name}", ())
        # a position table may have more rows than this run's shorter context uses
        if theirs[1:] != tuple(p.shape[1:]) or not theirs or theirs[0] < p.shape[0]:
            raise SystemExit(f"{source.path}: {name} is missing or has shape {theirs}, not "
                             f"{tuple(p.shape)}; it belongs to another model")
    for key, shape in shapes.items() if optimizer else ():
        kind, _, name = key.partition(".")
        p = params.get(name)
        if kind != "model" and p is not None and p.requires_grad:
            # a number, such as Adam's step, stands where a fused optimizer keeps it
            empty = torch.zeros_like(p) if shape else torch.zeros((), device=p.device)
            optimizer.state[p][kind] = empty
    tensors = flat_state(model, optimizer)
    if source.sharded:
        dcp.load(tensors, checkpoint_id=source.path, no_dist=not dist.is_initialized())
        return
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
    try:
        write_full_file(path, flat, source.header)
    except WRITE_ERRORS as e:
        raise SystemExit(cannot_write(path, e))
    print(f"{source.path} -> {path}")


def open_newest(out_dir):
    source = find(out_dir)
    if source is None:
        raise SystemExit(f"{out_dir}: no checkpoint there")
    return source


if __name__ == "__main__":
    run(main, sys.argv[1:])

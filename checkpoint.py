"""
What a checkpoint is: written from a run's state, opened and checked at any world size.

    source = find("out-x", world)            # the newest intact one, a Source; or None
    load(source, model, optimizer, world)    # each rank reads the rows that it keeps

    out_dir/ckpt.pt      full: one file in nanoGPT's layout, which nanoGPT can read
    out_dir/step-<n>/    sharded: each rank writes its rows

Any strategy at any world size reads both kinds. In memory a state is flat,
{"model.<name>": tensor, "exp_avg.<name>": tensor, ...}, with a header of plain values.

Full: rank 0 gathers the state into its host memory, tensor by tensor, and writes one file.
Sharded: all ranks write their rows, by DCP. Then rank 0 writes header.json, which also says
where each tensor's rows are; only now is the directory a checkpoint. So a kill at any moment
leaves the last complete one. To read either kind, every rank opens the files and takes the rows
that it keeps now. Loading never runs code from a file. DCP's own .metadata, a pickle, is there
for other programs, and never read here.
saves.py says when a run saves, and which checkpoints stay.
"""

import io
import json
import math
import os
import pickle
import re
import shutil
import sys
import zipfile
import zlib
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from data.files import sync, write_files
from fsdp import write_full
from optimizer import allocate_state
from ranks import all_reduce_mean_, from_rank0, print0

HEADER = "header.json"  # of a sharded checkpoint, written last
STEP = "step-" + 9 * "[0-9]"  # a sharded checkpoint's name


@dataclass
class Source:
    """An opened checkpoint, or a directory in Hugging Face format. Every rank opens its own."""
    path: str
    header: dict
    shapes: dict  # {flat key: shape}
    get: object = None  # function: flat key -> value, of which value[a:b] reads these rows
    files: dict | None = None  # of a sharded one: {file: its CRC}

    def value(self, key, shape, config):
        """The value for a parameter of this shape, to pass to write_full. SystemExit if the source
        has another shape; only its table of positions may be longer than this run's context."""
        theirs = self.shapes.get(key)
        if theirs == shape:
            return self.get(key)
        length = self.header["model_args"].get("block_size", 0)
        if theirs == (length, *shape[1:]) and length > shape[0] == config.block_size:
            return self.get(key)[:config.block_size]
        raise SystemExit(
            f"{self.path} is of another model, or trained other parameters: {key} is "
            f"{theirs or 'missing'}, not {shape}")


# ---------- a state in memory -------------------------------------------------


def not_saved(model):
    """Names of the parameters that no checkpoint of this run holds: whenever it starts, their
    values come from the model's `initial_value`, as LoRA's base does."""
    return getattr(model, "not_saved", ())


def flat_state(model, optimizer=None):
    """{"model.<name>": parameter, "<key>.<name>": its optimizer state}, sharded as they are
    now; tied parameters have their first name."""
    tensors = {}
    for name, p in model.named_parameters():
        if name in not_saved(model):
            continue
        tensors[f"model.{name}"] = p.detach()
        if optimizer:
            for key, t in optimizer.state.get(p, {}).items():
                tensors[f"{key}.{name}"] = t
    return tensors


def load(source, model, optimizer, world):
    """Set the weights, and the optimizer's state if the source has one, from the source (all
    ranks). optimizer: None to load only the weights."""
    has_state = any(not key.startswith("model.") for key in source.shapes)
    if optimizer and not has_state:
        optimizer = None  # it makes its state in its first step, as in a new run
        if source.header["iter_num"]:
            print0(world, f"{source.path} has no optimizer state: it starts anew")
    if optimizer:
        allocate_state(optimizer)
    ours = flat_state(model, optimizer)
    # A tied parameter has several names, and what is frozen now has no optimizer state.
    params = dict(model.named_parameters(remove_duplicate=False))
    without_state = {name for name, p in params.items() if not (optimizer and p in optimizer.state)}
    for key in source.shapes:
        kind, _, name = key.partition(".")
        may_differ = params if kind == "model" else without_state
        if key not in ours and name not in may_differ:
            raise SystemExit(f"{source.path} is of another model or optimizer: no {key} here")
    for key, t in ours.items():
        write_full(t, source.value(key, tuple(t.shape), model.config))
    if not optimizer:
        return
    # The numbers that the optimizer itself had changed in its groups since it was made, such as
    # Prodigy's d or a count. What the code or a key has set is today's.
    for group, saved in zip(optimizer.param_groups, source.header.get("param_groups", [])):
        for key, made in saved.get("made", {}).items():
            if saved[key] != made:
                group[key] = saved[key]


# ---------- full: one file ----------------------------------------------------


def write_ckpt_pt(path, flat, header):
    """Write nanoGPT's layout: weights by name, optimizer state by number, and the
    header's values next to them."""
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
    optimizer = {"state": state, "param_groups": header["param_groups"]}
    ckpt = {**header, "model": weights, "optimizer": optimizer}
    write_files(path.parent, {path.name: lambda f: torch.save(ckpt, f)})


def open_full(path):
    """The Source of a ckpt.pt, ours or nanoGPT's. Raises almost anything if it is damaged, though
    torch.load checks no checksums: `check` does."""
    try:
        # mmap: a tensor's bytes are read when it is used, so memory holds one at a time.
        ckpt = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError:  # its text would suggest running the file's code
        raise ValueError("it has more in it than tensors and plain values, or is damaged")
    names = ckpt.get("param_names")  # nanoGPT stores none
    flat = {}
    for name, tensor in ckpt.pop("model").items():
        if not names:
            name = re.sub(r"^((module|_orig_mod)\.)+", "", name)  # DDP's and the compiler's
            if name.endswith(".attn.bias") and tensor.dim() == 4:  # its causal mask
                continue
        flat[f"model.{name}"] = tensor
    if not names:
        # nanoGPT numbers the matrices first, then the vectors.
        untied = [key for key in flat if key != "model.lm_head.weight"]
        untied.sort(key=lambda key: flat[key].dim() < 2)
        names = [key.removeprefix("model.") for key in untied]
    optimizer = ckpt.pop("optimizer", {"state": {}})
    for number, state in optimizer["state"].items():
        for key, tensor in state.items():
            flat[f"{key}.{names[number]}"] = tensor
    ckpt["config"].setdefault("model", "gpt2")  # nanoGPT's have no such key
    ckpt["best_val_loss"] = float(ckpt["best_val_loss"])  # nanoGPT's is a tensor
    shapes = {key: tuple(tensor.shape) for key, tensor in flat.items()}
    return Source(path, ckpt, shapes, flat.__getitem__)


# ---------- sharded: a directory ----------------------------------------------


def write_sharded(path, rows, header, group):
    """Write each rank's rows, and then the header, which completes the checkpoint (all ranks).
    An error of any rank is a CheckpointException on all of them. group: a gloo group."""
    # From the second save on, ranks only tell rank 0 that their plans are the same.
    planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
    dcp.save(rows, storage_writer=Writer(path, header), planner=planner, process_group=group)


class Writer(dcp.FileSystemWriter):
    """PyTorch's writer, but it also completes the checkpoint. DCP passes each rank's write_data
    results to finish on rank 0."""

    def __init__(self, path, header):
        # copy_ahead is for tensors that are still on a GPU. PyTorch 2.13 syncs a file before
        # Python's buffer is flushed, so we sync it ourselves.
        super().__init__(path, per_thread_copy_ahead=0, sync_files=False)
        self.header = header

    def write_data(self, plan, planner):
        """This rank's rows. Returns a Future of (DCP's own results, {file: its CRC})."""
        results = super().write_data(plan, planner).value()
        files = {}
        for name in sorted({result.storage_data.relative_path for result in results}):
            sync(self.path / name)
            files[name] = checksum(self.path / name)
        written = torch.futures.Future()
        written.set_result((results, files))
        return written

    def finish(self, metadata, results):
        """On rank 0: write .metadata, and then the header."""
        super().finish(metadata, [of_rank for of_rank, _ in results])
        files = {}
        for _, of_rank in results:  # in the order of ranks
            files.update(of_rank)
        written = [result for of_rank, _ in results for result in of_rank]
        for name in files:
            if not (self.path / name).exists():
                raise SystemExit(
                    f"out_dir={self.header['config']['out_dir']} is not the same on all nodes, "
                    f"{self.path} lacks {name}: use a shared disk, or --checkpoint=full")
        sync(self.path / ".metadata")
        entries = metadata.state_dict_metadata
        shapes = {key: list(entry.size) for key, entry in entries.items()}
        header = dict(self.header, shapes=shapes, pieces=places_of(written), files=files)
        write_files(self.path, {HEADER: [sealed(header).encode()]})
        sync(self.path.parent)  # the name of the directory itself


def places_of(written):
    """{flat key: [[first row, file, its first byte, number of bytes], ...]} of DCP's results: where
    it has put what each rank has written of a tensor."""
    pieces = defaultdict(list)
    for result in written:
        place = result.storage_data
        first = result.index.offset[0] if result.index.offset else 0
        pieces[result.index.fqn].append([first, place.relative_path, place.offset, place.length])
    return {key: sorted(places) for key, places in pieces.items()}


def sealed(header):
    """The text of header.json: the header and its checksum."""
    crc = zlib.crc32(json.dumps(header).encode())
    return json.dumps({"crc": crc, "header": header})


def open_sharded(path):
    """The Source of a directory. This reads its header; `check` looks at its files."""
    text = Path(path, HEADER).read_text()
    header = json.loads(text)["header"]
    if text != sealed(header):
        raise ValueError(f"its {HEADER} is damaged")
    shapes = {key: tuple(shape) for key, shape in header.pop("shapes").items()}
    pieces = header.pop("pieces")
    files = header.pop("files")

    def get(key):
        rows = Rows(path, shapes[key], pieces[key])
        return rows if shapes[key] else rows.piece(0)  # a scalar has no rows

    return Source(path, header, shapes, get, files)


class Rows:
    """A tensor of a sharded checkpoint. value[a:b] reads only what those ranks have written that
    had one of the rows a to b. (dcp.load wants a tensor of the whole's shape and placement, and
    runs what .metadata says.)"""

    def __init__(self, path, shape, places):
        self.path = path
        self.shape = shape
        self.places = places  # of its pieces: see places_of

    def __getitem__(self, rows):
        first, last, _ = rows.indices(self.shape[0])
        starts = [place[0] for place in self.places]
        ends = [*starts[1:], self.shape[0]]
        found = []
        for i, start in enumerate(starts):
            if start < last and first < ends[i]:
                found.append(self.piece(i)[max(0, first - start):last - start])
        return torch.cat(found or [self.piece(0)[:0]])  # the last ranks may have no rows

    def piece(self, i):
        """The rows that one rank has written."""
        _, name, offset, length = self.places[i]
        with open(os.path.join(self.path, name), "rb") as f:
            f.seek(offset)
            return torch.load(io.BytesIO(f.read(length)), weights_only=True)


def checksum(path):
    crc = 0
    with open(path, "rb") as f:
        while piece := f.read(1 << 24):
            crc = zlib.crc32(piece, crc)
    return crc


def remove_sharded(path):
    """Remove the header first, so that a kill leaves no checkpoint, not a damaged one."""
    with suppress(OSError):
        os.remove(os.path.join(path, HEADER))
    shutil.rmtree(path, ignore_errors=True)


def complete_steps(out_dir):
    """Paths of the sharded checkpoints that have a header, oldest first."""
    return sorted(header.parent for header in Path(out_dir).glob(f"{STEP}/{HEADER}"))


# ---------- which one a run starts from ---------------------------------------


def for_new_run(source):
    """The source at step 0 and without optimizer state, to start another run from."""
    header = dict(source.header, iter_num=0, best_val_loss=1e9, scaler=None)
    run_id = source.header.get("run", "?")  # nanoGPT's checkpoints have none
    header["origin"] = f"step {source.header['iter_num']} of run {run_id}"
    shapes = {key: shape for key, shape in source.shapes.items() if key.startswith("model.")}
    return replace(source, header=header, shapes=shapes)


def find(out_dir, world):
    """The newest intact checkpoint in out_dir as a Source, None if there is none (all
    ranks). out_dir may also be a checkpoint itself.
    Damaged ones are named and skipped; SystemExit if all of them are damaged."""
    problems = []
    for step, path in from_rank0(world, lambda: list_all(out_dir)):
        # What another rank has found, if this one finds nothing wrong.
        problem = "damaged, or replaced by a run that goes on"
        is_good = False
        try:
            source = open_one(path)
            check(source, world)
            is_good = source.header["iter_num"] == step
        except Exception as e:  # damage raises almost anything
            problem = f"not readable ({type(e).__name__}: {e})"
        if all_reduce_mean_(torch.tensor(float(is_good)), world) == 1:
            for line in problems:
                print0(world, f"skipping {line}", file=sys.stderr)
            return source
        problems.append(f"{path}: {problem}; move it away, or pass another out_dir")
    if problems:
        raise SystemExit(problems[0])


def list_all(out_dir):
    """[(step, path)] of all checkpoints, newest first. It reads their headers."""
    found = []
    for path in (Path(out_dir), Path(out_dir, "ckpt.pt"), *complete_steps(out_dir)):
        if path.is_file() or Path(path, HEADER).exists():
            try:
                step = open_one(path).header["iter_num"]
            except Exception:  # `find` will try it first, and say what is wrong
                step = math.inf
            found.append((step, str(path)))
    return sorted(found, reverse=True)


def open_one(path):
    return open_full(path) if os.path.isfile(path) else open_sharded(path)


def check(source, world):
    """Raise an error if this rank's share of the bytes does not match its checksums: those of
    files in a sharded one's header, or of records in a full one's zip."""
    mine = slice(world.rank, None, world.size)
    if source.files:
        # In the order of ranks: at the same world size each checks the file that it will read.
        for name, crc in list(source.files.items())[mine]:
            if checksum(os.path.join(source.path, name)) != crc:
                raise ValueError(f"{name} is damaged, or of another step")
        return
    with zipfile.ZipFile(source.path) as records:
        for name in records.namelist()[mine]:
            with records.open(name) as f:
                while f.read(1 << 24):
                    pass  # at the end zipfile checks the checksum

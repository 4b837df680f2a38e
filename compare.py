"""
Is it the same run? Compare a run with another that must have the same numbers: sharded with one
process, resumed with never stopped, a changed step with the old one, recorded with ordinary. This
file imports only torch: copy it along with fsdp.py.

    compare = Compare("steps.json", model, outputs=dict(model.blocks.named_children()))
    for step in range(10):
        ...                                  # forward, backward
        compare.step(step, optimizer, loss)  # after the step's last backward, before clipping
        ...                                  # clip, update
    print(compare)

The first run writes the file. Each later one compares itself with it, and raises a ValueError on
all ranks at the first step that differs. To compare two files, of two machines or two commits:

    python compare.py a.json b.json

A step must have the same samples in both runs, whichever rank has them. Turn off dropout and noise.
Compute in fp32, or pass tolerance=0.05 for bf16. Rounding grows with the learning rate: at a full
rate without warm-up two right runs may go apart within ten steps. So take a run's warm-up, or a
tenth of its rate. Rounding also turns a ReLU or a maximum near its edge, and the gradients jump.
Then compute in float64 (model.double()). Two models, as in a GAN, have a Compare and a file each.

Are the ranks at the same place? FSDP2 does not ask: if one rank skips a unit, the ranks mix rows of
different units without an error.

    with check_units(model):  # for a few steps of a new model: it is slow
        ...                   # train
"""

import json
import math
import sys
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard

# ---------- is it the same run? -----------------------------------------------


class Compare:
    """path: the file of steps to compare with; the first run makes it.
    model: what was sharded, or what DDP's module is around.
    outputs: {name: module}, whose outputs (..., features) are compared too, so that a message
        names the first unit that differs. If a module returns several tensors, the first that is
        no scalar. All but the features add up, over micro-batches and ranks too.
    tolerance: how far numbers may be off, relative to a tensor's norm. Weights and optimizer state
        may be off by ten times as much, since their errors add up.
    worst: the largest difference so far, of weights and state a tenth; NaN if no step was compared.
    """

    def __init__(self, path, model, outputs=None, tolerance=1e-4):
        self.path = Path(path)
        self.model = model
        self.tolerance = tolerance
        self.worst = math.nan
        self.before = []  # the largest difference of each step that was compared
        self.last = {}, {}  # the numbers of the step before, ours and theirs
        self.outputs = {}  # of this step so far: {name: fingerprint}
        for name, module in (outputs or {}).items():
            module.register_forward_hook(partial(self.add_output, name))
        text = self.path.read_text() if self.path.exists() else ""
        self.steps = json.loads(from_ranks(text)[0] or "{}")  # rank 0's: {step: {key: numbers}}
        self.is_first = not self.steps

    def __str__(self):
        if self.before:
            return f"{len(self.before)} steps are the same as in {self.path}, to {self.worst:.0e}"
        said = "run again to compare" if self.is_first else "no step was compared"
        first = next(iter(self.steps), None)
        return f"{said}: {self.path} has {len(self.steps)} steps, from {first} on"

    @torch.compiler.disable
    def add_output(self, name, module, args, output):
        output = next(t for t in leaves(output) if torch.is_tensor(t) and t.dim())
        # Not in an evaluation, nor in a backward that computes a forward again (PyTorch's own
        # checkpoint asks in this way; there is no public one), nor while a graph is recorded.
        in_backward = torch._C._current_graph_task_id() >= 0
        is_recorded = output.is_cuda and torch.cuda.is_current_stream_capturing()
        if torch.is_grad_enabled() and not in_backward and not is_recorded:
            rows = plain(output).reshape(-1, output.shape[-1])
            part = fingerprint(rows.sum(dim=0))
            part[0] = rows.double().square().sum()
            self.outputs[name] = self.outputs.get(name, 0) + part

    def step(self, step, optimizer, loss, scale=1.0):
        """Write a step's numbers, or compare them (all ranks).
        loss: this rank's; the step's is its mean over ranks.
        scale: float16's, by which gradients are too large."""
        ours = add_up(parts_of(self.model, optimizer, loss, scale, self.outputs))
        self.outputs.clear()
        if not self.is_first:
            self.check(str(step), ours)
            return
        if str(step) in self.steps:
            raise ValueError(f"step {step} came twice: count on from epoch to epoch")
        self.steps[str(step)] = ours
        if not dist.is_initialized() or dist.get_rank() == 0:
            new = Path(f"{self.path}.tmp")
            new.write_text(json.dumps(self.steps))
            new.replace(self.path)

    def check(self, step, ours):
        """ValueError if a step's numbers are not those of the file, where it has the step."""
        theirs = self.steps.get(step)
        if not theirs:
            return
        norms = defaultdict(float)  # {kind: the norm of all its tensors}
        for key, b in theirs.items():
            if key.startswith(("weight", "gradient", "state")) and math.isfinite(b[0]):
                norms[kind_of(key)] = math.hypot(norms[kind_of(key)], b[0])
        differences = {key: self.difference(key, ours, theirs, norms) for key in theirs | ours}
        found = defaultdict(list)  # {(kind, how it is wrong): lines}
        for key, (_, wrong) in differences.items():
            if wrong:
                found[kind_of(key), wrong.split(" by ")[0]].append(f"{key} is {wrong}")
        if found:
            raise ValueError(self.message(step, found, ours | theirs))
        self.before.append(max(off for off, _ in differences.values()))
        self.worst = max(self.before)
        self.last = ours, theirs

    def difference(self, key, ours, theirs, norms):
        """(How far a tensor is off, in the tolerance's measure; what is wrong with it, or "".)"""
        kind, _, name = key.rpartition(" ")
        if key not in ours or key not in theirs:
            run = "this run" if key in ours else "the other run"
            # A step that is replayed calls no hooks, so it has no outputs.
            return 0.0, "" if kind.startswith("output") else f"only in {run}"
        a, b = ours[key], theirs[key]
        # A small weight is measured by all weights, and so on; and a loss, which may be 0, by 0.01.
        least = 0.01 if key == "loss" else 1e-3 * norms[kind]
        # All of b, since the sum of an output's rows may be much larger than their norm. NaN must
        # not come first: max would keep it.
        off = distance(a, b) / max(least, 1e-30, *map(abs, b))
        # Nothing rounds a rate, a count or bytes, so the tolerance of bf16 is not theirs.
        if kind.startswith("group") or kind in ("state step", "bytes"):
            return off, "" if off <= 1e-4 else f"{a[0]:g} instead of {b[0]:g}"
        wrong = f"off by {off:.1e}"
        if kind.startswith(("weight", "state")):
            off /= 10
            # The gradient of attention's key biases is zero but for rounding, of which Adam makes
            # whole steps.
            size = max(run.get(f"gradient {name}", [math.inf])[0] for run in (ours, theirs))
            if 0 < size < 0.01 * self.tolerance * norms["gradient"]:
                return 0.0, ""
        last_a, last_b = (numbers.get(key) for numbers in self.last)
        if kind == "weight" and a == last_a and distance(b, last_b) > 1e-6 * b[0]:
            return off, "unmoved since the step before, unlike the other's"
        if off <= self.tolerance:
            return off, ""
        ratio = a[0] / max(b[0], 1e-30)
        if off < math.inf and distance(a, [ratio * x for x in b]) < 0.01 * distance(a, b):
            exact = float(f"{ratio:.5g}")  # tensors that share it differ by rounding
            wrong = f"{exact:.4f} times the other's" if ratio else "zero, unlike the other's"
        return off, wrong

    def message(self, step, found, numbers):
        shown = [f"step {step} differs from {self.path}:"]
        for (kind, wrong), lines in found.items():
            sizes = [n[0] for key, n in numbers.items() if kind_of(key) == kind]
            more_than_rounding = sum(size > 1e-6 * max(sizes) for size in sizes)
            if len(lines) >= max(2, more_than_rounding) and wrong != "off":
                lines = [f"all {len(lines)} {kind}s are {wrong}"]
                if kind == "gradient" and "times" in wrong:
                    lines[0] += ": a sum where DDP and FSDP2 average?"
            elif len(lines) > 1:
                lines[0] += f", and {len(lines) - 1} more of {len(sizes)} {kind}s"
            shown.append(lines[0])
        if shown[7:]:
            shown[7:] = [f"and {len(shown) - 7} more"]
        before = self.before[-3:]
        if before:
            shown.append("the steps before were off by " + ", ".join(f"{x:.0e}" for x in before))
        if before and before[-1] > max(10 * before[0], 0.02 * self.tolerance):
            shown.append("this grew step by step, as rounding does if the learning rate is high")
        elif before and {kind for kind, _ in found} == {"gradient"}:
            shown.append("only gradients: rounding may turn a ReLU or a maximum. Try float64")
        return "\n  ".join(shown)


def kind_of(key):
    """"state exp_avg" of "state exp_avg head.weight". A group's numbers are of a kind each."""
    return key if key.startswith("group") else key.rpartition(" ")[0]


def distance(a, b):
    """0 if neither is finite, as float16's first gradients may be; infinite if one is not."""
    if math.isfinite(a[0] - b[0]):
        return max(abs(x - y) for x, y in zip(a, b))
    return math.inf if math.isfinite(a[0]) or math.isfinite(b[0]) else 0.0


# ---------- the numbers of a step ---------------------------------------------

WAVES = (0.7, 1.9, 2.9)  # radians from one element to the next


def parts_of(model, optimizer, loss, scale, outputs):
    """{key: (numbers of this rank's part, the ranks whose parts add up)}, in a step's order."""
    everyone = range(dist.get_world_size() if dist.is_initialized() else 1)
    named = dict(model.named_parameters())
    parts = {}
    for i, group in enumerate(optimizer.param_groups):
        parts |= {f"group {i} {name}": ([x], None) for name, x in numbers_of(group)}
    for name, p in named.items():
        # Apart, since the norm of bytes, as of a base in 4 bits, would outweigh all weights.
        kind = "weight" if p.is_floating_point() else "bytes"
        parts[f"{kind} {name}"] = part_of(p, name)
    parts |= {f"buffer {name}": part_of(b, name) for name, b in model.named_buffers()}
    parts |= {f"output {name}": (part.tolist(), everyone) for name, part in outputs.items()}
    parts["loss"] = [torch.as_tensor(loss).item() / len(everyone)], everyone
    for name, p in named.items():
        if p.requires_grad:
            grad = torch.zeros_like(p) if p.grad is None else p.grad
            parts[f"gradient {name}"] = part_of(grad if scale == 1 else grad / scale, name)
    for name, p in named.items():
        for key, value in optimizer.state.get(p, {}).items():
            if isinstance(value, (torch.Tensor, int, float)):
                parts[f"state {key} {name}"] = part_of(torch.as_tensor(value), name)
    # torch.compile's wrapper does not belong to a name.
    return {key.replace("_orig_mod.", ""): part for key, part in parts.items()}


def numbers_of(group):
    """(name, number) of an optimizer's group: how many elements it trains, its rate, each of its
    betas, what else it keeps."""
    yield "numel", float(sum(p.numel() for p in group["params"]))
    for key, value in group.items():
        values = value if isinstance(value, (tuple, list)) else [value]
        for i, number in enumerate(values):
            is_switch = isinstance(number, bool)  # such as foreach: another way to the same step
            is_number = isinstance(number, (int, float, torch.Tensor)) and not is_switch
            if key != "params" and is_number:
                yield f"{key}[{i}]" if values[1:] else key, float(number)


def part_of(t, name):
    """(The fingerprint of this rank's rows of t, the ranks that have all its rows; None if each
    has.)"""
    if not isinstance(t, DTensor):
        return fingerprint(t).tolist(), None
    mesh = t.device_mesh
    by_rows = (*[Replicate()] * (mesh.ndim - 1), Shard(0))
    if str(t.placements) != str(by_rows):  # in torch 2.9 Shard(0) equals _StridedShard(0)
        raise ValueError(f"{name} is not cut by rows alone, but as {t.placements}")
    first_row = math.ceil(len(t) / mesh.size(-1)) * mesh.get_local_rank(-1)
    ranks = dist.get_process_group_ranks(mesh.get_group(-1))
    return fingerprint(t.to_local(), first_row).tolist(), ranks


def fingerprint(t, first_row=0):
    """(4,) float64: the sum of squares of a tensor's rows (dim 0), and their products with three
    waves over the tensor's flat index. Those of parts add up.
    first_row: where these rows begin in the whole tensor."""
    rows = torch.atleast_1d(plain(t))[..., None].flatten(1)
    n, width = rows.shape
    angles = torch.tensor(WAVES, dtype=torch.float64, device=rows.device)
    starts = torch.outer((torch.arange(n, device=rows.device) + first_row) * width, angles) + 1
    columns = torch.outer(torch.arange(width, device=rows.device), angles)
    # cos(start + column) from two small tables: much faster than a cosine an element.
    table = torch.cat([columns.cos(), columns.sin()], dim=1).to(rows.dtype)
    products = (rows @ table).double()  # (n, 6)
    waves = products[:, :3] * starts.cos() - products[:, 3:] * starts.sin()
    squares = torch.linalg.vector_norm(rows, dim=1).double().square()
    return torch.cat([squares.sum()[None], waves.sum(dim=0)])


def plain(t):
    """t dense and real, in fp32 or float64."""
    t = t.detach().cpu() if t.device.type == "mps" else t.detach()  # MPS has no float64
    if t.layout != torch.strided:
        t = t.to_sparse().coalesce()
        t = torch.cat([t.values().flatten(), t.indices().flatten()])
    t = torch.view_as_real(t) if t.is_complex() else t
    # On GPUs in float64: TF32 would round fp32's products. On CPUs fp32 takes half the time.
    is_narrow = t.is_floating_point() and t.itemsize <= 4 and not t.is_cuda
    return t.to(torch.float32 if is_narrow else torch.float64)


def add_up(parts):
    """{key: numbers} of whole tensors (collective). Only numbers travel. ValueError on all ranks if
    they do not have the same."""
    of_ranks = from_ranks(parts)
    for rank, others in enumerate(of_ranks):
        for a, b in zip([*of_ranks[0], "nothing"], [*others, "nothing"]):
            if a != b:
                raise ValueError(f"ranks differ: rank 0 has {a}, where rank {rank} has {b}")
    wholes = {}
    for key in parts:
        found = []  # the whole tensor, of each group of ranks that has it
        for rank, others in enumerate(of_ranks):
            group = others[key][1] or [rank]
            if rank == group[0]:
                square, *rest = map(sum, zip(*(of_ranks[r][key][0] for r in group)))
                found.append([math.sqrt(square), *rest] if rest else [square])
        wholes[key] = found[0]
        off = max(distance(x, found[0]) for x in found)
        if off and not off <= 1e-5 * abs(found[0][0]):
            norms = ", ".join(f"{x[0]:.6g}" for x in found[:8])
            raise ValueError(f"{key} differs between ranks, whose norms are {norms}")
    return wholes


def from_ranks(x):
    """[x of rank 0, x of rank 1, ...] (collective)."""
    of_ranks = [x]
    if dist.is_initialized():
        of_ranks = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, x)
    return of_ranks


# ---------- are the ranks at the same place? ----------------------------------


@contextmanager
def check_units(model):
    """Inside, the ranks compare every unit's forward and backward, and all raise if they differ.
    They also raise if a unit changes a list or dict that it was given, which its caller may not
    see: with a policy FSDP2 passes a copy, and without one too if a tensor in it needs a gradient
    (torch 2.9: if any argument does). Each comparison waits for all ranks, so use it for a few
    steps."""
    units = {name: m for name, m in model.named_modules() if isinstance(m, FSDPModule)}
    hooks = [hook for name, unit in units.items() for hook in watch_unit(unit, name or "the root")]
    try:
        yield
        compare_ranks("the end of check_units")  # another rank may run forward once more
    finally:
        for hook in hooks:
            hook.remove()


def compare_ranks(event):
    """Raise ValueError on all ranks if their events differ (collective)."""
    events = from_ranks(event)
    if len(set(events)) > 1:
        raise ValueError(f"ranks 0, 1, ... are not at the same place: {events}")


def watch_unit(unit, name):
    """The hooks of `check_units` on a unit. Those that compare run before FSDP2's."""
    given = []

    def before_gather(*_):
        compare_ranks(f"forward of {name}")

    def before_forward(unit, args, kwargs):
        given[:] = [*leaves(args), *leaves(kwargs)]

    def after_forward(unit, args, kwargs, output):
        now = [*leaves(args), *leaves(kwargs)]
        if [*map(id, now)] != [*map(id, given)]:  # not the same objects
            mistake = (f"{name} changed a list or dict that it was given. FSDP2 may pass a copy, "
                       "and then its caller does not see that: return the new object instead")
            compare_ranks(mistake)  # so that all ranks raise
            raise ValueError(mistake)
        compare_ranks(f"end of forward of {name}")
        tensors = [t for t in leaves(output) if torch.is_tensor(t) and t.requires_grad]
        torch.autograd.graph.register_multi_grad_hook(tensors, before_backward, mode="any")

    def before_backward(grad):
        compare_ranks(f"backward of {name}")
        # When backward ends, FSDP2 reduces the remaining gradients. It queues its own callback in
        # the same way; PyTorch has no public one.
        at_end = partial(compare_ranks, "end of backward")
        torch.autograd.Variable._execution_engine.queue_callback(at_end)

    return [
        unit.register_forward_pre_hook(before_gather, prepend=True),
        unit.register_forward_pre_hook(before_forward, with_kwargs=True),
        unit.register_forward_hook(after_forward, prepend=True, with_kwargs=True),
    ]


def leaves(x):
    """x and everything in it, as deep as FSDP2 looks."""
    yield x
    if is_dataclass(x):
        x = [getattr(x, field.name) for field in fields(x)]
    elif isinstance(x, dict):
        x = [*x.keys(), *x.values()]
    if isinstance(x, (list, tuple)):
        for item in x:
            yield from leaves(item)


if __name__ == "__main__":
    try:
        first, _ = (json.loads(Path(path).read_text()) for path in sys.argv[1:])
        compare = Compare(sys.argv[2], torch.nn.Module())
        for step, numbers in first.items():
            compare.check(step, numbers)
    except (OSError, ValueError) as e:
        sys.exit(str(e))
    print(compare)

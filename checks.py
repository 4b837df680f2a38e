"""
Detect mistakes that FSDP2 does not report. Call each function at the point shown; it raises a
ValueError that names the mistake. This file imports only torch: copy it along with fsdp.py.

    checks.before_sharding(model)
    shard(model, ...)
    optimizer = ...
    checks.after_building(model, optimizer)
    optimizer.step()  # the first one
    checks.after_first_step(model, optimizer)
    with checks.check_units(model):  # for a few steps of a new model: it is slow
        ...                          # train
"""

import math
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import partial
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


def before_sharding(model):
    """Raise if a buffer has no values, if a trained parameter's updates would be rounded, or if the
    ranks' models differ: in names, shapes, types, what trains, or values (collective, where a
    process group is open)."""
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise ValueError(
                f"the buffer {name} is on the meta device and has no values: compute it in "
                "forward, or on the CPU, by device='cpu'")
    refuse_rounding(model)
    # FSDP2 broadcasts nothing: each rank keeps rows of its own model.
    named = [*model.named_parameters(), *model.named_buffers()]
    refuse_differences(named, "build the model with one seed on all ranks, in one order")


def refuse_rounding(model):
    for name, p in model.named_parameters():
        if p.requires_grad and p.dtype in (torch.bfloat16, torch.float16):
            raise ValueError(
                f"{name} trains in {p.dtype}, which would round small updates away: train in "
                "float32, and let mp_policy say what to compute in")


def refuse_differences(named, remedy):
    """Raise on all ranks if they have other tensors in [(name, tensor)] (collective)."""
    if not dist.is_initialized():
        return
    own = [((name, *t.shape, t.dtype, t.requires_grad), weighted_sum(t)) for name, t in named]
    of_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, own)
    for entries in zip_longest(*of_ranks, fillvalue=("nothing", math.nan)):
        kinds, sums = zip(*entries)
        if len(set(kinds)) > 1:
            raise ValueError(f"ranks 0, 1, ... have {kinds[:8]}: {remedy}")
        # allclose: machines of two kinds may round differently.
        if not torch.allclose(torch.tensor(sums), torch.tensor(sums[0]), equal_nan=True):
            raise ValueError(
                f"{kinds[0][0]} differs between ranks (weighted sums of its values are "
                f"{sums[:8]}): {remedy}")


def weighted_sum(t):
    """A number that depends on the order of the values too; NaN on the meta device."""
    if t.is_meta:
        return math.nan
    t = t.detach().flatten().double()
    return torch.linspace(1, 2, len(t), dtype=t.dtype, device=t.device).dot(t).item()


def after_building(model, optimizer):
    """Raise if the optimizer trains a parameter that the model does not have, or a gathered copy;
    or if a trained parameter's updates would be rounded, as after model.to(torch.bfloat16)."""
    refuse_rounding(model)
    is_sharded = any(isinstance(module, FSDPModule) for module in model.modules())
    # If it is sharded, a forward has gathered those that are no DTensors.
    owned = {p for p in model.parameters() if isinstance(p, DTensor) or not is_sharded}
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.requires_grad and p not in owned:
                raise ValueError(
                    f"the optimizer trains a parameter of shape {tuple(p.shape)} that is not the "
                    "model's, or is not sharded. For example it is among ignored_params; or make "
                    "the optimizer right after `shard`, which replaces them, as a forward does")


def after_first_step(model, optimizer):
    """Raise if checkpoint.py would lose or misread optimizer state: a value that is not a tensor,
    or of a sharded parameter a plain tensor that is another one on each rank, such as this rank's
    rows (collective). PyTorch's own checkpoints misread those too."""
    plain = []
    for name, p in model.named_parameters():
        for key, t in optimizer.state.get(p, {}).items():
            if not isinstance(t, torch.Tensor):
                raise ValueError(f"the optimizer's state {key!r} of {name} is no tensor: {t!r}")
            if isinstance(p, DTensor) and not isinstance(t, DTensor):
                plain.append((f"the optimizer's state {key!r} of {name}", t))
    refuse_differences(plain, "make this rank's rows a DTensor, such as torch.zeros_like(p)")


# ---------- do all ranks do the same? -----------------------------------------


@contextmanager
def check_units(model):
    """Inside, the ranks compare every unit's forward and backward, and all raise if they differ.
    They also raise if a unit changes a list or dict that FSDP2 has copied for it, as it does where
    a policy casts. Each comparison waits for all ranks, so use it for a few steps."""
    hooks = []
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            hooks += watch_unit(module, name or "the root")
    try:
        yield
        compare_ranks("the end of check_units")  # another rank may run forward once more
    finally:
        for hook in hooks:
            hook.remove()


def compare_ranks(event, is_mistake=False):
    """Raise ValueError on all ranks if their events differ, or are a mistake (collective)."""
    events = [None] * dist.get_world_size()
    dist.all_gather_object(events, event)
    if len(set(events)) > 1:
        raise ValueError(f"ranks 0, 1, ... are not at the same place: {events}")
    if is_mistake:
        raise ValueError(event)


def watch_unit(unit, name):
    """The hooks of `check_units` on a unit. Those that compare run before FSDP2's."""
    passed, given = [], []

    def before_gather(unit, args, kwargs):
        passed[:] = contents(args, kwargs)
        compare_ranks(f"forward of {name}")

    def before_forward(unit, args, kwargs):
        given[:] = contents(args, kwargs)  # copies, if FSDP2 has made some just now

    def after_forward(unit, args, kwargs, output):
        # The same objects?
        is_copy = list(map(id, passed)) != list(map(id, given))
        if is_copy and list(map(id, contents(args, kwargs))) != list(map(id, given)):
            compare_ranks(
                f"{name} changed a list or dict that it was given. That is FSDP2's copy, "
                "so its caller does not see it: return the new object instead",
                is_mistake=True)
        compare_ranks(f"end of forward of {name}")
        tensors = [t for t in leaves(output) if isinstance(t, torch.Tensor)]
        tensors = [t for t in tensors if t.requires_grad]
        torch.autograd.graph.register_multi_grad_hook(tensors, before_backward, mode="any")

    def before_backward(grad):
        compare_ranks(f"backward of {name}")
        # When backward ends, FSDP2 reduces the remaining gradients. It queues its own callback in
        # the same way; PyTorch has no public one.
        at_end = partial(compare_ranks, "end of backward")
        torch.autograd.Variable._execution_engine.queue_callback(at_end)

    return [
        unit.register_forward_pre_hook(before_gather, prepend=True, with_kwargs=True),
        unit.register_forward_pre_hook(before_forward, with_kwargs=True),
        unit.register_forward_hook(after_forward, prepend=True, with_kwargs=True),
    ]


def contents(args, kwargs):
    return [x for arg in (*args, *kwargs.values()) for x in leaves(arg)]


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

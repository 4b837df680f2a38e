"""
Are the ranks at the same place? FSDP2 does not ask: if one rank skips a unit, the ranks mix rows of
different units without an error. This file imports only torch: copy it along with fsdp.py.

    with compare.check_units(model):  # for a few steps of a new model: it is slow
        ...                           # train
"""

from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule


@contextmanager
def check_units(model):
    """Inside, the ranks compare every unit's forward and backward, and all raise if they differ.
    They also raise if a unit changes a list or dict that FSDP2 has copied for it, as it does for
    most units. Each comparison waits for all ranks, so use it for a few steps."""
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

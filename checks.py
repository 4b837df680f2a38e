"""
Detect mistakes that FSDP2 does not report. Call each function at the point shown; it raises a
ValueError that names the mistake. This file imports only torch and compare.py: copy both along with
fsdp.py.

    checks.before_sharding(model)
    shard(model, ...)
    optimizer = ...
    checks.after_building(model, optimizer)
    optimizer.step()  # the first one
    checks.after_first_step(model, optimizer)

compare.py finds ranks that do not run the same units.
"""

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from compare import add_up, fingerprint


def before_sharding(model):
    """Raise if the ranks' models differ: in names, shapes, types, what trains, or values
    (collective, where a process group is open)."""
    # FSDP2 broadcasts nothing: each rank keeps rows of its own model.
    named = [*model.named_parameters(), *model.named_buffers()]
    refuse_differences(named, "build the model with one seed on all ranks, in one order")


def refuse_differences(named, remedy):
    """Raise on all ranks if they have other tensors in [(name, tensor)] (collective)."""
    parts = {}
    for name, t in named:
        key = f"{name} {tuple(t.shape)}, {t.dtype}, requires_grad={t.requires_grad}"
        parts[key] = [0.0] if t.is_meta else fingerprint(t).tolist(), None
    try:
        add_up(parts)
    except ValueError as e:
        raise ValueError(f"{e}: {remedy}") from None


def after_building(model, optimizer):
    """Raise if the optimizer trains a parameter that the model does not have, or a gathered copy;
    or if a trained parameter's updates would be rounded, as after model.to(torch.bfloat16)."""
    for name, p in model.named_parameters():
        if p.requires_grad and p.dtype in (torch.bfloat16, torch.float16):
            raise ValueError(
                f"{name} trains in {p.dtype}, which would round small updates away: train in "
                "float32, and let mp_policy say what to compute in")
    is_sharded = any(isinstance(module, FSDPModule) for module in model.modules())
    # If it is sharded, a forward has gathered those that aren't DTensors.
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
                raise ValueError(f"the optimizer's state {key!r} of {name} isn't a tensor: {t!r}")
            if isinstance(p, DTensor) and not isinstance(t, DTensor):
                plain.append((f"the optimizer's state {key!r} of {name}", t))
    refuse_differences(plain, "make this rank's rows a DTensor, such as torch.zeros_like(p)")

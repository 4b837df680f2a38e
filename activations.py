"""
What autograd keeps for backward, and where: activation checkpointing, offload, the loss in chunks.

    keep_less(model, cfg, device)      # before the blocks are compiled and sharded

Sharding does nothing for activations. The blocks keep most of them; then the logits do.
"""

from contextlib import nullcontext
from functools import partial

import torch
from torch import nn
from torch.utils import checkpoint as recompute  # PyTorch's; ours writes files


def keep_less(model, cfg, device):
    """
    Replace every block.forward by one that keeps fewer activations on the device until backward:
    full, only the block's input; selective, the outputs of matrix products and attention too. With
    activation_offload they wait in host memory. (Wrapping the modules would change their names.)
    """
    options = dict(use_reentrant=False)
    if cfg.activation_checkpointing == "selective":
        # FSDP's hooks leave marks for the profiler, one more when a unit inside a block runs again
        marks = (("_record_function_enter_new", "default"),
                 ("_record_function_exit", "_RecordFunction"))
        ops = [getattr(getattr(torch.ops.profiler, op, None), name, None) for op, name in marks]
        ignored = getattr(recompute, "SAC_IGNORED_OPS", set())  # private names, so maybe gone
        ignored.update(filter(None, ops))
        contexts = partial(recompute.create_selective_checkpoint_contexts, keep_products)
        options["context_fn"] = contexts
    offload = Offload(device) if cfg.activation_offload else None
    for block in model.blocks:
        if cfg.activation_checkpointing != "none":
            block.forward = partial(recompute.checkpoint, block.forward, **options)
        if offload:
            block.forward = partial(offload, block.forward)
    if cfg.loss_chunks:
        if not hasattr(model, "head_loss"):
            raise SystemExit(f"loss_chunks={cfg.loss_chunks}: model={cfg.model} has no head_loss "
                             "(see the header of model.py); use --loss_chunks=0")
        model.head_loss = partial(model.head_loss, chunks=cfg.loss_chunks)


def keep_products(ctx, op, *args, **kwargs):
    # not baddbmm: the T x T scores of attention that is written out
    products = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm)
    expensive = op.overloadpacket in products or "_scaled_" in str(op)  # attention, float8
    policy = recompute.CheckpointPolicy
    return policy.MUST_SAVE if expensive else policy.PREFER_RECOMPUTE


class Offload:
    """
    offload(forward, ...) is forward(...), but what autograd saves for backward goes to host memory.

    On CUDA the copies run on a stream of their own, beside the computation. What is copied away
    must not be overwritten before: it is held until the computation has waited for its copy, one
    block later: in forward the device never holds more than two blocks' activations. (In backward
    nothing holds the CPU back, which queues copies ahead of the computation.)
    """

    def __init__(self, device):
        self.device, self.stream = device, None
        self.leaving, self.left = [], None  # this block's tensors; the last block's, and the event
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)

    def __call__(self, forward, *args, **kwargs):
        with torch.autograd.graph.saved_tensors_hooks(self.to_host, self.to_device):
            out = forward(*args, **kwargs)
        if self.left:
            torch.cuda.current_stream(self.device).wait_event(self.left[0])
        if self.stream:
            self.left = self.stream.record_event(), self.leaving
            self.leaving = []
        return out

    def to_host(self, t):
        if t.device.type != self.device.type or is_weight(t):  # attention's seed may be on the CPU
            return t
        if self.stream:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))  # t is computed by then
            self.leaving.append(t)
        with self.beside():
            host = torch.empty(t.size(), dtype=t.dtype, layout=t.layout, device="cpu",
                               pin_memory=self.stream is not None)  # else copies would block
            return (host.copy_(t, non_blocking=True),)

    def to_device(self, packed):
        if isinstance(packed, torch.Tensor):
            return packed
        # ahead of the computation: the CPU queues this long before its turn comes
        with self.beside():
            t = packed[0].to(self.device, non_blocking=True)
        if self.stream:
            now = torch.cuda.current_stream(self.device)
            now.wait_stream(self.stream)
            t.record_stream(now)  # allocated on one stream, used on the other
            self.leaving, self.left = [], None  # that wait covered the copies out too
        return t

    def beside(self):
        return torch.cuda.stream(self.stream) if self.stream else nullcontext()


def is_weight(t):
    """A parameter, which FSDP frees and gathers itself; or autocast's copy of one, which autocast
    keeps until the forward ends, so that moving it would spare nothing."""
    t = t if t._base is None else t._base  # of a view, such as a transposed one
    if isinstance(t, nn.Parameter):
        return True
    cast = t.grad_fn is not None and t.grad_fn.name() == "ToCopyBackward0"
    return cast and hasattr(t.grad_fn.next_functions[0][0], "variable")  # of a leaf

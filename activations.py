"""
Activation checkpointing and compiling, block by block. Both replace `block.forward`. FSDP2's hooks
run outside it, so a block is gathered before any of it is computed. It imports only torch.

    checkpoint_activations(model.blocks, "selective")  # 1) recompute in backward
    compile_blocks(model.blocks)  # 2) the compiled graph includes the recomputation
    shard(model, find_units(model, model.blocks), mesh)  # fsdp.py, before or after these two
"""

from functools import partial

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)


def checkpoint_activations(
    blocks, mode: str, offload_to_host: bool = False, pin_memory: bool = False
):
    """Save fewer activations; backward recomputes the rest while the block is gathered.

    blocks: leave out any that update buffers in forward, like BatchNorm: forward runs twice.
    mode: "full" keeps each block's input; "selective" the outputs of its matrix products,
        convolutions and attention too; "none" changes nothing.
    offload_to_host: keep the inputs in host memory (with "full"). pin_memory: True for a GPU.
    """
    if offload_to_host and mode != "full":
        raise ValueError(f"offload_to_host=True needs mode='full', not {mode!r}")
    if mode == "none":
        return
    options = dict(use_reentrant=False)
    if mode == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, keep_products)
    for block in dict.fromkeys(blocks):  # one that is used twice may be listed twice
        # Replace forward: a wrapper module would change the parameters' names.
        block.forward = partial(checkpointed, block, block.forward, options)
        if offload_to_host:
            block.forward = partial(offload_saved, block.forward, pin_memory)


def checkpointed(block, forward, options, *args, **kwargs):
    """Run forward, checkpointed if backward will reach it. Backward never reaches frozen blocks
    before the first trained one, and torch 2.13 could not compile their checkpoints."""
    tensors = (*args, *kwargs.values(), *block.parameters())
    if not any(isinstance(t, torch.Tensor) and t.requires_grad for t in tensors):
        return forward(*args, **kwargs)
    # `partial`, since checkpoint() would keep a keyword like debug= or early_stop= for itself.
    return checkpoint(partial(forward, **kwargs), *args, **options)


# "selective" keeps the results of these, but not of baddbmm: in attention that is written out,
# those are the T x T scores.
PRODUCTS = {
    torch.ops.aten.mm,
    torch.ops.aten.addmm,
    torch.ops.aten.bmm,
    torch.ops.aten.convolution,
    torch.ops.aten._scaled_mm,  # float8
    torch.ops.aten._scaled_dot_product_flash_attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
    torch.ops.aten._scaled_dot_product_efficient_attention,
    torch.ops.aten._scaled_dot_product_cudnn_attention,
}


def keep_products(ctx, op, *args, **kwargs):
    if getattr(op, "overloadpacket", op) in PRODUCTS:  # FlexAttention is an op that has none
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def offload_saved(forward, pin_memory, *args, **kwargs):
    # Use only around a checkpointed forward, which saves just its input, or weights move too.
    with torch.autograd.graph.save_on_cpu(pin_memory=pin_memory):
        return forward(*args, **kwargs)


def compile_blocks(blocks):
    """Compile block.forward. So parameters keep their names, FSDP2's hooks stay outside of the
    graph, and `shard` may come before or after.

    dynamic=False: shapes don't change during a run. Otherwise a second model in the same process,
    with other sizes, would be compiled with dynamic shapes."""
    blocks = dict.fromkeys(blocks)
    # All blocks of a class share one code object, and so its limit of 8 graphs. Let it grow with
    # them, or the ninth different block would not be compiled.
    limits = torch._dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, 8 * len(blocks))
    for block in blocks:
        block.forward = torch.compile(block.forward, dynamic=False)

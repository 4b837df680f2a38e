"""
FSDP2 in one file. A model on the meta device becomes single, DDP or sharded:

    freeze(model, cfg.freeze)                   # before: FSDP2 groups parameters by requires_grad
    wrapped = parallelize(model, cfg, world)    # checkpoint blocks, compile, shard, materialize
    set_grad_sync(wrapped, cfg, is_last_micro_batch)   # before each forward: will backward reduce?
    norm = clip_grad_norm(wrapped, 1.0, world)  # after the last backward: all-reduces one number
    with inference(wrapped): ...                # evaluate or sample, and leave nothing gathered
    gather_full, write_full, broadcast_full     # whole tensors out and in, for checkpoints

A *unit* is a module that `fully_shard` was called on: its parameters are gathered, and their
gradients reduced, in one collective. docs/fsdp.md walks through a step.
"""

import re
from collections import defaultdict
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import takewhile

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils import checkpoint as recompute  # PyTorch's; ours writes files

import float8
from configurator import DTYPES, SHARDED
from ranks import patient_group

ROOT = ""  # the root unit's name, as in named_modules


def parallelize(model, cfg, world):
    """Apply cfg.strategy to `model`, which is on the meta device; allocate parameters, no values
    yet. Returns the module to call: `model` itself, or DDP around it. All ranks."""
    for name, _ in model.named_buffers():
        raise SystemExit(f"the model has a buffer, {name}: nobody would shard or fill it; compute "
                         "it in forward, or make it a parameter that does not train")
    float8.convert(model, cfg, world)
    # a) checkpoint activations inside what is compiled and sharded: recomputation then runs
    #    between FSDP's backward hooks, with the unit's parameters gathered
    checkpoint_activations(model, cfg, world.device)
    return shard(model, cfg, world) if cfg.strategy in SHARDED else replicate(model, cfg, world)


def shard(model, cfg, world):
    """FSDP2: every rank keeps its rows of every parameter, gradient and optimizer state."""
    # b) compile block by block, then head and loss: FSDP's hooks would break a graph of the whole
    #    model. Each forward, not each module: dynamo leaves the call of a module with hooks alone
    if cfg.compile:
        for block in model.blocks:
            block.forward = torch.compile(block.forward)
        if hasattr(model, "head_loss"):
            model.head_loss = torch.compile(model.head_loss)

    # c) shard the units, inner before outer, then the root, which takes all the rest
    units = find_units(model, cfg.wrap_min_params)
    host = CPUOffloadPolicy(pin_memory=world.device.type == "cuda")
    offload = {name: dict(offload_policy=host) for name in offloaded_units(units, cfg.cpu_offload)}
    precision = MixedPrecisionPolicy(  # parameters stay fp32
        param_dtype=None if cfg.dtype == "float32" else DTYPES[cfg.dtype],  # gather and compute
        reduce_dtype=DTYPES[cfg.reduce_dtype])  # if omitted, FSDP2 sums gradients in param_dtype
    common = dict(mesh=make_mesh(cfg, world), mp_policy=precision)
    for name, unit in units:
        fully_shard(unit, reshard_after_forward=cfg.strategy != "shard_grad_op", **common,
                    **offload.get(name, {}))
    # the root stays gathered: backward begins with it
    fully_shard(model, reshard_after_forward=False, **common, **offload.get(ROOT, {}))
    if hasattr(model, "set_reduce_scatter_unused_params"):  # from torch 2.13 on: zeros for what a
        model.set_reduce_scatter_unused_params(True)  # later batch leaves without a gradient

    # d) materialize, only this rank's rows; to_empty swaps DTensors in place, so ties survive
    for name, unit in units + [(ROOT, model)]:
        for module in unit.modules():
            if any(p.is_meta for p in module.parameters(recurse=False)):
                device = "cpu" if name in offload else world.device
                module.to_empty(device=device, recurse=False)

    # e) in backward FSDP2 gathers one unit ahead: not the frozen ones that it never reaches
    for _, unit in frozen_prefix(model, units):
        unit.set_unshard_in_backward(False)
    if cfg.prefetch_blocks:
        prefetch(model, units, cfg.prefetch_blocks)
    return model


def replicate(model, cfg, world):
    """One process, or DDP: every rank keeps everything."""
    ties = tied_names(model)
    model.to_empty(device=world.device)  # gives a tied parameter two tensors ...
    for first, *others in ties:
        for name in others:  # ... so tie them again
            module, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(module), leaf, model.get_parameter(first))
    if cfg.strategy == "ddp":
        for p in model.parameters():  # else gradients would lie beside DDP's buckets until reduced
            p.grad = torch.zeros_like(p) if p.requires_grad else None
        device_ids = [world.device.index] if world.device.type == "cuda" else None
        model = DistributedDataParallel(model, device_ids=device_ids, gradient_as_bucket_view=True)
        hook = dict(bfloat16=default_hooks.bf16_compress_hook,
                    float16=default_hooks.fp16_compress_hook).get(cfg.reduce_dtype)
        if hook:  # in a lambda: DDP refuses a hook named bf16_compress_hook without NCCL
            model.register_comm_hook(None, lambda state, bucket: hook(state, bucket))
    if cfg.compile:
        model.compile()  # in place, so names stay; after DDP, which splits the graph at its buckets
    return model


# ---------- units: what is gathered together, and among whom ------------------


def find_units(model, min_params=0):
    """[(name, module)] of FSDP's units but the root, inner before outer: the blocks; or, FSDP1's
    size-based policy, any module that has at least min_params parameters which no unit has yet.
    Tied parameters stay in the root: PyTorch refuses them in two units."""
    if not min_params:
        blocks = set(model.blocks)
        return [(name, module) for name, module in model.named_modules() if module in blocks]
    tied = {model.get_parameter(names[0]) for names in tied_names(model)}
    units = []

    def visit(name, module):
        """Make units below `module`, maybe itself; return the parameters that none of them took."""
        left = list(module.parameters(recurse=False))
        for child, submodule in module.named_children():
            left += visit(f"{name}.{child}".lstrip("."), submodule)
        container = isinstance(module, (torch.nn.ModuleList, torch.nn.ModuleDict))  # no hooks
        too_small = sum(p.numel() for p in left) < min_params
        if module is model or container or too_small or tied.intersection(left):
            return left
        units.append((name, module))
        return []

    visit(ROOT, model)
    return units


def tied_names(model):
    """[[name, name, ...]] of parameters that are one tensor under several names (wte, lm_head)."""
    names = defaultdict(list)
    for name, p in model.named_parameters(remove_duplicate=False):
        names[p].append(name)
    return [group for group in names.values() if len(group) > 1]


def offloaded_units(units, fraction):
    """Names of the units in host memory: `fraction` of them, spread evenly so that copies overlap
    with the other units' compute. At 1 the root too."""
    due = [int(i * fraction + 1e-9) for i in range(len(units) + 1)]  # of the first i
    names = {name for i, (name, _) in enumerate(units) if due[i + 1] > due[i]}
    return names | {ROOT} if fraction == 1 else names


def frozen_prefix(model, units):
    """The units that come before the first trainable parameter: backward never reaches them."""
    prefix = set(takewhile(lambda p: not p.requires_grad, model.parameters()))  # in forward order
    return [(name, unit) for name, unit in units if prefix.issuperset(unit.parameters())]


def make_mesh(cfg, world):
    """The ranks as a DeviceMesh: (shard), or (replicate, shard) where neighbours form a group."""
    shape, names = (world.size,), ("shard",)
    if cfg.strategy == "hybrid_shard":
        shape = (world.size // cfg.shard_group_size, cfg.shard_group_size)
        names = ("replicate", "shard")
    return dist.init_device_mesh(world.device.type, shape, mesh_dim_names=names)


def prefetch(model, units, n):
    """Before a unit's forward gather the next n too, before its backward the n before it."""
    order = [m for m in model.modules() if m in {unit for _, unit in units}]  # as in forward
    for i, unit in enumerate(order):
        unit.set_modules_to_forward_prefetch(order[i + 1:i + 1 + n])
        unit.set_modules_to_backward_prefetch(order[max(0, i - n):i][::-1])


# ---------- before sharding: what trains, and what is kept for backward --------


def freeze(model, pattern):
    """Parameters in whose name the pattern is found: no gradient and no optimizer state."""
    named = dict(model.named_parameters())
    try:
        hits = [name for name in named if pattern and re.search(pattern, name)]
    except re.error as e:
        raise SystemExit(f"freeze={pattern!r} is not a regular expression: {e}")
    if pattern and len(hits) in (0, len(named)):
        raise SystemExit(f"freeze={pattern!r} matches {len(hits)} of {len(named)} parameters; "
                         f"names look like {list(named)[len(named) // 2]}")
    for name in hits:
        named[name].requires_grad_(False)


def checkpoint_activations(model, cfg, device):
    """Keep fewer activations until backward, which computes the rest again. full: each block's
    input, with activation_offload in host memory; selective: the outputs of matrix products and
    attention too. (Wrapping the modules would change their names.) And the loss in chunks."""
    options = dict(use_reentrant=False)
    if cfg.activation_checkpointing == "selective":
        options["context_fn"] = partial(recompute.create_selective_checkpoint_contexts,
                                        keep_products)
    for block in model.blocks:
        if cfg.activation_checkpointing != "none":
            block.forward = partial(recompute.checkpoint, block.forward, **options)
        if cfg.activation_offload:
            block.forward = partial(offload_saved, block.forward, device)
    model.loss_chunks = cfg.loss_chunks


def keep_products(ctx, op, *args, **kwargs):
    # not baddbmm: the T x T scores of attention that is written out
    products = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm)
    expensive = op.overloadpacket in products or "_scaled_" in str(op)  # attention, float8
    policy = recompute.CheckpointPolicy
    return policy.MUST_SAVE if expensive else policy.PREFER_RECOMPUTE


def offload_saved(forward, device, *args, **kwargs):
    """forward(...), keeping in host memory what it saves: if checkpointed, only its input."""
    with torch.autograd.graph.save_on_cpu(pin_memory=device.type == "cuda"):
        return forward(*args, **kwargs)


# ---------- in the step -------------------------------------------------------


def autocast(cfg, device):
    """The compute type of single and DDP; FSDP2's MixedPrecisionPolicy casts by itself."""
    if cfg.dtype == "float32" or cfg.strategy in SHARDED:
        return nullcontext()
    return torch.autocast(device.type, DTYPES[cfg.dtype])


def set_grad_sync(model, cfg, is_last_micro_batch):
    """Before each micro-batch's forward. grad_sync=every: reduce after each, so that a rank holds
    only its share of the gradients. last: add up locally and reduce once, less traffic but a whole
    gradient in memory; shard_grad_op then keeps parameters gathered too (ZeRO-1's traffic)."""
    sync = is_last_micro_batch or cfg.grad_sync == "every"
    if cfg.strategy == "ddp":
        model.require_backward_grad_sync = sync  # what DDP's no_sync() sets
    elif isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(sync)
        if cfg.strategy == "hybrid_shard":
            model.set_requires_all_reduce(is_last_micro_batch)  # between groups: once a step
        if cfg.strategy == "shard_grad_op" and cfg.grad_sync == "last":
            model.set_reshard_after_backward(is_last_micro_batch)


def clip_grad_norm(model, max_norm, world):
    """Scale the gradients to a global 2-norm of at most max_norm (0: leave them). Returns the norm
    before that, a 0-d tensor on world.device (collective)."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    # local shards: clip_grad_norm_ takes DTensors, but not some of them in host memory
    local = [g.to_local() if isinstance(g, DTensor) else g for g in grads]
    norm = torch.nn.utils.get_total_norm(local).to(world.device)
    if isinstance(model, FSDPModule):
        square = norm ** 2
        # only over the shard group: replicas hold equal gradients, to be counted once
        dist.all_reduce(square, group=grads[0].device_mesh.get_group("shard"))
        norm = square.sqrt()
    if max_norm:
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for device in {g.device for g in local}:
            torch._foreach_mul_([g for g in local if g.device == device], scale.to(device))
    return norm


@contextmanager
def inference(model):
    """Evaluate or generate inside: eval mode, no gradients; nothing stays gathered (all ranks)."""
    model.eval()
    with torch.no_grad():
        yield
    model.train()
    reshard(model)


def reshard(model):
    """Free what a forward without backward left gathered. Until then its parameters are copies."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


# ---------- whole tensors, out and in, one at a time --------------------------


def gather_full(t, world):
    """The whole of t in rank 0's host memory, None on other ranks (collective)."""
    t = t.detach()
    if isinstance(t, DTensor):
        t = t.to(t.device_mesh.device_type).full_tensor()  # offloaded shards go through the device
    return t.cpu() if world.rank == 0 else None


def write_full(t, full):
    """Set t from its whole value; a sharded t takes its rows. No communication, no second copy."""
    t = t.detach()
    if isinstance(t, DTensor):
        rows = -(-len(t) // t.device_mesh.size(-1))  # as FSDP2 cuts: the last ranks have fewer
        start = t.device_mesh.get_local_rank("shard") * rows
        t = t.to_local()
        full = full[start:start + len(t)]
    t.copy_(full)


def broadcast_full(t, full, world):
    """Rank 0's whole value `full` into t on every rank (collective)."""
    if world.size > 1:
        if world.rank > 0:
            full = torch.empty(t.shape, dtype=t.dtype, device=world.device)
        full = full.to(world.device, t.dtype).contiguous()  # rank 0 may read its disk for long
        dist.barrier(patient_group())  # wait for it here: the broadcast times out
        dist.broadcast(full, src=0)
    write_full(t, full)

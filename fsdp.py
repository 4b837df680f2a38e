"""
FSDP2 in one file. It imports only torch, so you can copy it into your own project:

    dist.init_process_group("cpu:gloo,cuda:nccl")  # gloo too: see cpu_offload
    mesh = make_mesh("cuda")  # the ranks that share the model
    with torch.device("meta"):
        model = MyModel()  # names and shapes, no memory
    checkpoint_activations(model.layers, "selective")
    shard(model, model.layers, mesh, param_dtype=torch.bfloat16, cpu_offload=0.25)
    for name, p in model.named_parameters():  # each rank draws all, and keeps its rows
        write_full(p, my_initial_value(name, p.shape))
    optimizer = torch.optim.AdamW(model.parameters())  # of this rank's rows
    for batches in steps:  # each rank has its own
        for i, (x, y) in enumerate(batches):
            set_grad_sync(model, is_last_micro_batch=i + 1 == len(batches))
            loss = my_loss(model(x), y) / len(batches)
            loss.backward()  # gathers unit by unit, reduces gradients to their rows
        norm = clip_grad_norm(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    with inference(model):
        logits = model(x)  # on every rank, since it gathers
    state = {name: gather_full(p) for name, p in model.named_parameters()}  # on rank 0

A *unit* is a module that `fully_shard` was called on: its parameters are gathered, and
their gradients reduced, in one collective. docs/fsdp.md walks through a step.
"""

import math
from collections import defaultdict
from contextlib import contextmanager
from functools import partial
from itertools import takewhile

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils import checkpoint


def make_mesh(device_type: str, shard_group_size: int = 0):
    """The ranks as a DeviceMesh (collective).

    Its dimension is "shard": all ranks share one copy of the model. With a shard_group_size
    there are two, "replicate" and "shard": so many neighbours share a copy, and each group
    has one (hybrid sharding).
    """
    world_size = dist.get_world_size()
    shape, names = (world_size,), ("shard",)
    if shard_group_size:
        shape = (world_size // shard_group_size, shard_group_size)
        names = ("replicate", "shard")
    return dist.init_device_mesh(device_type, shape, mesh_dim_names=names)


def shard(
    model,
    units,
    mesh,
    *,
    param_dtype: torch.dtype = torch.float32,
    reduce_dtype: torch.dtype = torch.float32,
    reshard_after_forward: bool = True,
    cpu_offload: float = 0.0,
    prefetch_units: int = 0,
):
    """FSDP2: every rank keeps its rows of every parameter, gradient and optimizer state.
    In place (all ranks). It allocates the rows, without values yet.

    model: on the meta device, in fp32, without buffers. Freeze it, checkpoint its
        activations and compile its blocks before: FSDP2 groups parameters by requires_grad,
        and its hooks must be outermost.
    units: modules, inner before outer, in the order of forward. What none of them has is
        the root's. Tied parameters must be in one unit, or in the root.
    param_dtype: to gather and compute in. Rows and optimizer state stay fp32.
    reduce_dtype: to add gradients up in, over the ranks.
    reshard_after_forward: free a unit after its forward and gather it again for backward
        (ZeRO-3), or keep it until then (ZeRO-2).
    cpu_offload: a fraction of the units lives in host memory, where the CPU updates them;
        at 1.0 the root too. Their gradients are clipped there: GPUs need gloo beside NCCL.
    prefetch_units: gather so many ahead. 0 leaves it to FSDP2, which gathers one ahead in
        backward only; 2 or more cost memory.
    """
    units = list(units)
    offloaded = spread(units, cpu_offload)
    if cpu_offload == 1:
        offloaded.append(model)
    on_host = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    on_device = OffloadPolicy()
    precision = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    common = dict(mesh=mesh, mp_policy=precision)

    # 1) Shard the units, and then the root, which takes all the rest.
    for unit in units:
        fully_shard(
            unit,
            reshard_after_forward=reshard_after_forward,
            offload_policy=on_host if unit in offloaded else on_device,
            **common,
        )
    fully_shard(
        model,
        reshard_after_forward=False,  # backward begins with the root
        offload_policy=on_host if model in offloaded else on_device,
        **common,
    )
    # All ranks must reduce the same gradients. If a micro-batch leaves a parameter without
    # one on some rank (an expert that got no token), that rank contributes zeros.
    model.set_reduce_scatter_unused_params(True)

    # 2) Materialize: only now is there memory, for this rank's rows alone. to_empty works on
    # DTensors in place, so tied parameters stay tied. On a plain model it would untie them.
    for unit in [*units, model]:
        device = "cpu" if unit in offloaded else mesh.device_type
        for module in unit.modules():
            # The rows of an inner unit are there already, and stay where they are.
            if any(p.is_meta for p in module.parameters(recurse=False)):
                module.to_empty(device=device, recurse=False)

    # 3) Say what to gather when. In backward FSDP2 gathers the unit before the current one,
    # even if it is frozen and backward never reaches it.
    for unit in frozen_prefix(model, units):
        unit.set_unshard_in_backward(False)
    # In forward it gathers a unit when its turn comes, and overlaps that with compute already
    # launched on the GPU.
    if prefetch_units:
        prefetch(model, units, prefetch_units)


def allocate(model, device):
    """Memory for the whole of a model on the meta device, without values yet: for one
    process, or before `replicate`."""
    ties = tied_names(model)
    model.to_empty(device=device)  # this gives a tied parameter two tensors ...
    for first, *others in ties:
        for name in others:  # ... so tie them again
            module, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(module), leaf, model.get_parameter(first))


def replicate(model, reduce_dtype: torch.dtype = torch.float32):
    """PyTorch's DDP: every rank keeps everything. Returns the module to call (all ranks).
    reduce_dtype: to average gradients in; bfloat16 and float16 halve that traffic."""
    for p in model.parameters():
        if p.requires_grad:
            # DDP makes it a view of its bucket. If it came later, from a micro-batch that
            # reduces nothing, it would have memory of its own beside the bucket.
            p.grad = torch.zeros_like(p)
    device = next(model.parameters()).device
    device_ids = [device.index] if device.type == "cuda" else None
    wrapped = DistributedDataParallel(
        model, device_ids=device_ids, gradient_as_bucket_view=True)
    if reduce_dtype == torch.float32:
        return wrapped

    def compress(state, bucket):
        # A function of our own: given PyTorch's hook for bf16, DDP insists on NCCL.
        if reduce_dtype == torch.bfloat16:
            return default_hooks.bf16_compress_hook(state, bucket)
        return default_hooks.fp16_compress_hook(state, bucket)

    wrapped.register_comm_hook(None, compress)
    return wrapped


# ---------- units: what is gathered together ----------------------------------


def find_units(model, blocks, min_params: int = 0):
    """The units, inner before outer: the blocks. With min_params, by FSDP1's size-based
    policy: any module with at least so many parameters that are in no unit yet. There tied
    parameters stay in the root, since PyTorch refuses them in two units."""
    if not min_params:
        return list(blocks)
    tied = {model.get_parameter(names[0]) for names in tied_names(model)}
    units = []

    def visit(module):
        """Make units of what is in module, maybe of itself; return the parameters left."""
        left = list(module.parameters(recurse=False))
        for child in module.children():
            left += visit(child)
        # A container is never called, so FSDP's hooks on it would not run.
        is_container = type(module).forward is torch.nn.Module.forward
        too_small = sum(p.numel() for p in left) < min_params
        if module is model or is_container or too_small or tied.intersection(left):
            return left
        units.append(module)
        return []

    visit(model)
    return units


def tied_names(model):
    """[[name, name, ...]] of parameters that are one tensor under several names."""
    names = defaultdict(list)
    for name, p in model.named_parameters(remove_duplicate=False):
        names[p].append(name)
    return [group for group in names.values() if len(group) > 1]


def spread(units, fraction):
    """A fraction of the units, evenly spread, so that their copies overlap with the compute
    of the others: unit i is chosen if the running total of `fraction` passes an integer."""
    # 1e-9: a total that should be an integer may lie below it by a rounding error.
    totals = [math.floor(i * fraction + 1e-9) for i in range(len(units) + 1)]
    return [unit for i, unit in enumerate(units) if totals[i + 1] > totals[i]]


def frozen_prefix(model, units):
    """The units before the first parameter that trains: backward never reaches them. This
    takes parameters to be registered in the order in which forward uses them."""
    frozen = set(takewhile(lambda p: not p.requires_grad, model.parameters()))
    return [unit for unit in units if frozen.issuperset(unit.parameters())]


def prefetch(model, units, n):
    """Before a unit's forward gather the next n as well; before its backward the n before."""
    chosen = set(units)
    ordered = [module for module in model.modules() if module in chosen]  # as in forward
    for i, unit in enumerate(ordered):
        unit.set_modules_to_forward_prefetch(ordered[i + 1:i + 1 + n])
        unit.set_modules_to_backward_prefetch(ordered[max(0, i - n):i][::-1])


# ---------- before sharding: activations, compiling ---------------------------


def checkpoint_activations(
    blocks, mode: str, offload_to_host: bool = False, pin_memory: bool = False
):
    """Keep less until backward, which computes the rest again while the block is gathered.

    mode: "full" keeps each block's input; "selective" the outputs of its matrix products
        and attention too.
    offload_to_host: keep the inputs there (with "full"). pin_memory: do that for a GPU.
    """
    options = dict(use_reentrant=False)
    if mode == "selective":
        options["context_fn"] = partial(
            checkpoint.create_selective_checkpoint_contexts, keep_products)
    for block in blocks:
        # Replace forward: a wrapper module would change the parameters' names.
        block.forward = partial(checkpoint.checkpoint, block.forward, **options)
        if offload_to_host:
            block.forward = partial(offload_saved, block.forward, pin_memory)


# What "selective" keeps. Not baddbmm: the T x T scores of attention that is written out.
PRODUCTS = {
    torch.ops.aten.mm,
    torch.ops.aten.addmm,
    torch.ops.aten.bmm,
    torch.ops.aten._scaled_mm,  # float8
    torch.ops.aten._scaled_dot_product_flash_attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
    torch.ops.aten._scaled_dot_product_efficient_attention,
    torch.ops.aten._scaled_dot_product_cudnn_attention,
}


def keep_products(ctx, op, *args, **kwargs):
    policy = checkpoint.CheckpointPolicy
    if op.overloadpacket in PRODUCTS:
        return policy.MUST_SAVE
    return policy.PREFER_RECOMPUTE


def offload_saved(forward, pin_memory, *args, **kwargs):
    # Around a checkpointed forward, which saves its input only. Else weights would move too.
    with torch.autograd.graph.save_on_cpu(pin_memory=pin_memory):
        return forward(*args, **kwargs)


def compile_blocks(blocks):
    """Compile block.forward, before `shard`. Compiling the module would do nothing: dynamo
    does not enter the call of a module that has hooks."""
    for block in blocks:
        block.forward = torch.compile(block.forward)


# ---------- in the step -------------------------------------------------------


def autocast(wrapped, device_type: str, dtype: torch.dtype):
    """The compute type of a model that is whole. A sharded one's MixedPrecisionPolicy casts
    by itself, and under autocast as well its norms would run in fp32 again."""
    on = dtype != torch.float32 and not isinstance(wrapped, FSDPModule)
    return torch.autocast(device_type, dtype, enabled=on)


def set_grad_sync(
    wrapped, is_last_micro_batch: bool, *, every: bool = True, keep_gathered: bool = False
):
    """What the next backward will reduce; call it before each micro-batch's forward.

    every: reduce after each micro-batch: a rank holds only its share of the gradients.
        If False, each rank adds up whole gradients and they are reduced once, with the last.
    keep_gathered: with every=False and reshard_after_forward=False, keep parameters
        gathered from one micro-batch to the next as well (ZeRO-1's traffic).
    """
    sync = is_last_micro_batch or every
    if isinstance(wrapped, DistributedDataParallel):
        wrapped.require_backward_grad_sync = sync  # what DDP's no_sync() sets
    elif isinstance(wrapped, FSDPModule):
        wrapped.set_requires_gradient_sync(sync)
        # Between the groups of hybrid sharding: once a step, however many micro-batches.
        wrapped.set_requires_all_reduce(is_last_micro_batch)
        if keep_gathered:
            wrapped.set_reshard_after_backward(is_last_micro_batch)


def clip_grad_norm(wrapped, max_norm: float):
    """Scale the gradients to a global 2-norm of at most max_norm (0: leave them). Returns
    the norm before that, a 0-d tensor on the device (collective when sharded)."""
    # By hand: clip_grad_norm_ refuses gradients on two devices, as cpu_offload has them.
    grads = [p.grad for p in wrapped.parameters() if p.grad is not None]
    if isinstance(wrapped, FSDPModule):
        mesh = grads[0].device_mesh
        grads = [grad.to_local() for grad in grads]
        square = torch.nn.utils.get_total_norm(grads).to(mesh.device_type) ** 2
        # Over the shard group only: the groups hold equal gradients, to be counted once.
        dist.all_reduce(square, group=mesh.get_group("shard"))
        norm = square.sqrt()
    else:
        norm = torch.nn.utils.get_total_norm(grads)
    if max_norm:
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for device in {grad.device for grad in grads}:
            here = [grad for grad in grads if grad.device == device]
            torch._foreach_mul_(here, scale.to(device))
    return norm


@contextmanager
def inference(wrapped):
    """Evaluate or generate inside: eval mode, no gradients; at the end nothing is gathered.
    All ranks must run the same forwards, since each one gathers."""
    wrapped.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        wrapped.train()
        reshard(wrapped)


def reshard(wrapped):
    """Free what a forward without backward has left gathered. Until then the module's
    parameters are those copies, and the optimizer's step would not show in them."""
    for module in wrapped.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


# ---------- whole tensors, out and in, one at a time --------------------------


def gather_full(t):
    """The whole of t in rank 0's host memory, None on the other ranks (collective)."""
    t = t.detach()
    is_rank0 = not dist.is_initialized() or dist.get_rank() == 0
    if not isinstance(t, DTensor):
        return t.cpu() if is_rank0 else None
    # Not DTensor.full_tensor: every rank would hold the whole, and it takes twice as long.
    group = t.device_mesh.get_group("shard")
    ranks = dist.get_process_group_ranks(group)
    if ranks[0] > 0:
        return None  # these share another copy
    most = math.ceil(len(t) / len(ranks))
    # Each rank sends as many rows, so some of them padding. They go through the device: rows in
    # host memory have no NCCL.
    own = t.to_local()
    rows = own.new_zeros(most, *t.shape[1:], device=t.device_mesh.device_type)
    rows[:len(own)] = own
    if not is_rank0:
        dist.gather(rows, dst=0, group=group)
        return None
    whole = rows.new_empty(len(ranks) * most, *t.shape[1:])
    dist.gather(rows, list(whole.split(most)), dst=0, group=group)
    return whole[:len(t)].cpu()


def write_full(t, full):
    """Set t from its whole value `full`, which every rank has. A DTensor takes its rows."""
    if isinstance(t, DTensor):
        # src_data_rank=None: nothing is sent, since every rank has the whole.
        full = distribute_tensor(full, t.device_mesh, t.placements, src_data_rank=None)
    t.detach().copy_(full)


def broadcast_full(t, full):
    """Set t on every rank from the whole value `full` that rank 0 has (collective)."""
    if dist.is_initialized():
        device = t.device_mesh.device_type if isinstance(t, DTensor) else t.device
        if dist.get_rank() > 0:
            full = torch.empty(t.shape, dtype=t.dtype, device=device)
        full = full.to(device, t.dtype).contiguous()
        dist.broadcast(full, src=0)
    write_full(t, full)

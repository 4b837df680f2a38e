"""
FSDP2 in one file: the same steps as minimal.py, as functions with options; and DDP, to compare
with. It imports only torch (2.13 or later), so you can copy it into your own project:

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # else all ranks begin on GPU 0
    dist.init_process_group("nccl")
    mesh = make_mesh("cuda")  # the ranks that share the model
    with torch.device("meta"):
        model = MyModel()  # names and shapes, no memory
    checkpoint_activations(model.layers, "selective")
    shard(model, model.layers, mesh, param_dtype=torch.bfloat16)
    for name, p in model.named_parameters():  # each rank draws all, and keeps its rows
        write_full(p, my_initial_value(name, p.shape))
    # Before any forward: after one, parameters of the root are gathered copies.
    optimizer = torch.optim.AdamW(model.parameters())  # of this rank's rows
    for batches in steps:  # each rank has its own: see PyTorch's DistributedSampler
        for i, (x, y) in enumerate(batches):
            # By default each backward reduces. With every=False only the last one does.
            set_grad_sync(model, is_last_micro_batch=i + 1 == len(batches))
            loss = my_loss(model(x), y) / len(batches)
            loss.backward()  # gathers unit by unit, averages gradients, keeps its rows of them
        norm = clip_grad_norm(model, 1.0)
        optimizer.step()
        zero_grad(model, optimizer)
    with inference(model):
        logits = model(x)  # on every rank, since it gathers
    # All ranks call it. Rank 0 gets tensors, the others None; state_dict() itself has only this
    # rank's rows. (named_parameters() has no buffers, and a tied parameter under one of its
    # names only.)
    state = {name: gather_full(t) for name, t in model.state_dict().items()}
    for name, t in model.state_dict().items():  # and back, from rank 0
        broadcast_full(t, state[name])

A *unit* is a module that `fully_shard` was called on: its parameters are gathered, and
their gradients reduced, in one collective. Hooks do it, so no line here shows it:

                          ZeRO-3: reshard_after_forward=True     ZeRO-2: =False
    forward of unit i     gather i, compute, free i              gather i, compute
    backward of unit i    gather i - 1 meanwhile;                compute, free i, reduce its
                          compute, free i, reduce its gradients  gradients

The root unit holds every parameter outside the other units. It stays gathered from its
forward to the end of backward.

So every rank must call the same units in the same order, and backward must reach the same.
If one skips a block at random, the ranks gather rows of different blocks as one, and train
wrongly without a word: see `check_units`.

docs/fsdp.md walks through a step, says what FSDP2 asks of your model, and shows how to
save, resume and average the weights.
"""

import math
import re
from collections import Counter, defaultdict
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from functools import partial
from unittest.mock import patch

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
from torch.distributed.tensor import DeviceMesh, DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

# Since torch 2.15 some parameters of a unit may be in another type.
HAS_FP32_NAMES = hasattr(MixedPrecisionPolicy(), "param_dtype_override_fn")


def make_mesh(device_type: str, shard_group_size: int = 0):
    """The ranks as a DeviceMesh (collective).

    Its dimension is "shard": all ranks share one copy of the model. With shard_group_size=n
    there are two (hybrid sharding). n neighbouring ranks share a copy: "shard". The groups
    have equal copies: "replicate".
    """
    world_size = dist.get_world_size()
    shape, names = (world_size,), ("shard",)
    if shard_group_size:
        if world_size % shard_group_size:
            raise ValueError(
                f"{world_size} ranks do not divide into groups of {shard_group_size}")
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
    fp32_names: str = "",
    reshard_after_forward: bool | DeviceMesh = True,
    cpu_offload: float = 0.0,
    prefetch_units: int = 0,
):
    """FSDP2: every rank keeps its rows of every parameter, gradient and optimizer state.
    In place (all ranks).

    model: in fp32, else it is a ValueError; frozen parameters may be in bf16. Freeze before,
        since FSDP2 groups parameters by requires_grad.
        Parameters on the meta device get memory for this rank's rows, without values yet.
        Parameters that have values, in MyModel() or from_pretrained(), keep them. Every rank
        must hold the same ones, since it takes its own rows of them. So each process needs
        host memory for the whole model, and each GPU holds one whole unit of it at a time.
        Buffers are not sharded. They keep their values and move to the device; one on the
        meta device is a ValueError.
    units: modules, inner before outer. The root unit holds every other parameter. Tied parameters
        must be in one unit, or in the root. A module that several units share is one itself, or
        it is a ValueError: find_units(model, blocks) lists it.
    param_dtype: to gather and compute in. Rows and optimizer state stay fp32.
    reduce_dtype: to add gradients up in, over the ranks. bfloat16 is then also the type in
        which micro-batches add up, with hybrid sharding, or with every=False in set_grad_sync.
        After 64 of them the gradient was 1% off.
    fp32_names: a pattern. The parameters in whose name it is found are gathered in fp32, such as
        a router's. Inputs are still in param_dtype. A ValueError before torch 2.15.
    reshard_after_forward: free a unit after its forward and gather it again for backward
        (ZeRO-3), or keep it until then (ZeRO-2). With make_mesh(kind, n) each group of n
        neighbours keeps it, in param_dtype, and backward gathers in that group (ZeRO++'s hpZ).
    cpu_offload: a fraction of the units lives in host memory, where the CPU updates them;
        at 1.0 the root too.
    prefetch_units: gather this many units ahead. 0 leaves it to FSDP2, which gathers one ahead
        in backward only; 2 or more cost memory.
    """
    refuse_meta_buffers(model)
    refuse_rounded_parameters(model)
    units = list(units)
    refuse_shared_modules(model, units)
    offloaded = evenly(units, cpu_offload)
    if cpu_offload == 1:
        offloaded.append(model)
    on_host = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    on_device = OffloadPolicy()
    precision = precision_policy(model, param_dtype, reduce_dtype, fp32_names)

    # 1) Shard the units, and then the root, which takes all the rest.
    with mesh_after_forward(reshard_after_forward) as reshard_units:
        for unit in units:
            fully_shard(
                unit,
                mesh=mesh,
                mp_policy=precision,
                reshard_after_forward=reshard_units,
                offload_policy=on_host if unit in offloaded else on_device,
            )
    fully_shard(
        model,
        mesh=mesh,
        mp_policy=precision,
        reshard_after_forward=False,  # backward begins with the root
        offload_policy=on_host if model in offloaded else on_device,
    )
    model.keeps_gathered = reshard_after_forward is False  # for set_grad_sync
    # All ranks must reduce the same gradients. If a micro-batch leaves a parameter
    # without one on some rank (an expert that got no token), that rank contributes zeros.
    model.set_reduce_scatter_unused_params(True)

    # 2) Materialize: only now is there memory, for this rank's rows alone.
    for unit in [*units, model]:
        # The rows of an inner unit are there already, and stay where they are.
        materialize(unit, "cpu" if unit in offloaded else mesh.device_type)

    # 3) Say what to gather when. In backward FSDP2 gathers the unit before the current
    # one. But the backward of an embedding does not read its table, and backward may never
    # reach a frozen unit: then do not gather it.
    for unit in units:
        is_frozen = not any(p.requires_grad for p in unit.parameters())
        if is_frozen or is_embedding(unit):
            unit.set_unshard_in_backward(False)
        if is_frozen:
            unit.register_forward_hook(gather_if_backward_comes)
    # In forward FSDP2 gathers a unit when the CPU reaches it; the GPU is usually still computing
    # the one before. prefetch_units gathers earlier.
    if prefetch_units:
        prefetch(model, units, prefetch_units)


def precision_policy(model, param_dtype, reduce_dtype, fp32_names):
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    if not fp32_names:
        return policy
    if not HAS_FP32_NAMES:
        raise ValueError(
            f"fp32_names={fp32_names!r} needs torch 2.15; this is {torch.__version__}")
    names = {p: name for name, p in model.named_parameters()}

    def in_fp32(p):
        return torch.float32 if re.search(fp32_names, names[p]) else None

    return replace(policy, param_dtype_override_fn=in_fp32)


@contextmanager
def mesh_after_forward(reshard_after_forward):
    """Gives FSDP2's own argument: for a mesh the number of its neighbours."""
    if isinstance(reshard_after_forward, bool):
        yield reshard_after_forward
        return
    # For a number FSDP2 makes a mesh per unit, each with its own two groups of ranks, and NCCL
    # would connect one per unit. So here it is given ours instead, the same one each time.
    from torch.distributed.fsdp._fully_shard import _fsdp_init

    with patch.object(_fsdp_init, "DeviceMesh", lambda *args: reshard_after_forward):
        yield reshard_after_forward["shard"].size()


def is_embedding(unit):
    return type(unit).forward is torch.nn.Embedding.forward


def allocate(model, device):
    """For one process, or before `replicate`: parameters on the meta device get memory for
    all of them, without values yet. Parameters that have values move to the device."""
    refuse_meta_buffers(model)
    materialize(model, device)
    for t in (*model.parameters(), *model.buffers()):
        t.data = t.to(device)


def materialize(module, device):
    """Memory for the parameters that are on the meta device. (to_empty, as in minimal.py, would
    overwrite buffers, and untie parameters that are not sharded.)"""
    made = {}  # {parameter on meta: its replacement}
    for inner in module.modules():
        for name, p in list(inner.named_parameters(recurse=False)):
            if p.is_meta:
                if p not in made:  # else it is tied
                    empty = torch.empty_like(p, device=device)
                    made[p] = torch.nn.Parameter(empty, p.requires_grad)
                setattr(inner, name, made[p])  # FSDP2 looks for it there at the first forward


def refuse_meta_buffers(model):
    """ValueError if a buffer has no values: nobody here could know them."""
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise ValueError(
                f"the buffer {name} is on the meta device and has no values: build the model "
                "on the CPU, or set this buffer to a tensor with values first")


def refuse_rounded_parameters(model):
    """ValueError if a trained parameter is not in fp32: its rows would be rounded too."""
    for name, p in model.named_parameters():
        if p.requires_grad and p.dtype != torch.float32:
            raise ValueError(
                f"{name} trains in {p.dtype}, which would round small updates away: call "
                "model.float() before `shard`. It computes in param_dtype")


def refuse_shared_modules(model, units):
    """ValueError if units share a module that is no unit: its parameters cannot be in both."""
    names = {module: name for name, module in model.named_modules()}
    for module in shared_modules(units):
        if module not in units:
            raise ValueError(
                f"several units share {names[module]}: list it before them, or pass "
                "find_units(model, blocks), which does")


def replicate(model, reduce_dtype: torch.dtype = torch.float32):
    """PyTorch's DDP: every rank keeps everything. Returns the module to call (all ranks).
    reduce_dtype: to average gradients in; bfloat16 and float16 halve that traffic."""
    for p in model.parameters():
        if p.requires_grad:
            # DDP makes this gradient a view of its bucket. One that came later, from a
            # micro-batch that reduces nothing, would have memory of its own beside that.
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


# ---------- units: modules gathered together ----------------------------------


def find_units(model, blocks, min_params: int = 0):
    """The units, inner before outer: modules that several blocks share, an embedding larger than a
    block (in the root it would be gathered for the whole step), and the blocks.

    With min_params, by FSDP1's size-based policy: any module with at least that
    many parameters that are in no unit yet. Tied parameters stay in the root, since PyTorch
    refuses them in two units."""
    tied = {model.get_parameter(names[0]) for names in tied_names(model)}
    if not min_params:
        blocks = list(dict.fromkeys(blocks))  # one that is used twice may be listed twice
        block_params = sum(p.numel() for p in blocks[0].parameters())
        embeddings = [m for m in model.modules() if isinstance(m, torch.nn.Embedding)]
        large = [m for m in embeddings if m.weight.numel() > block_params and m.weight not in tied]
        return shared_modules(blocks) + large + blocks
    units = []

    def visit(module):
        """Make units of the modules inside, maybe of module itself; return the parameters left."""
        left = list(module.parameters(recurse=False))
        for child in module.children():
            left += visit(child)
        too_small = sum(p.numel() for p in left) < min_params
        if module is model or is_container(module) or too_small or tied.intersection(left):
            return left
        units.append(module)
        return []

    visit(model)
    return units


def shared_modules(blocks):
    """The modules with parameters that several blocks have, without the modules inside them."""
    times = Counter(module for block in blocks for module in block.modules())
    shared = []
    inner = set()
    for module, n in times.items():  # outer before inner
        has_params = any(True for p in module.parameters())
        if n > 1 and has_params and not is_container(module) and module not in inner:
            shared.append(module)
            inner.update(module.modules())
    return shared


def is_container(module):
    """A container, such as ModuleList, is never called, so FSDP2's hooks on it never run."""
    return type(module).forward is torch.nn.Module.forward


def tied_names(model):
    """[[name, name, ...]] of parameters that are one tensor under several names."""
    names = defaultdict(list)
    for name, p in model.named_parameters(remove_duplicate=False):
        names[p].append(name)
    return [group for group in names.values() if len(group) > 1]


def evenly(units, fraction):
    """A fraction of the units, evenly spread, so that their copies overlap with the compute
    of the others: unit i is chosen if the running total of `fraction` passes an integer."""
    # 1e-9: a total that should be an integer may lie below it by a rounding error.
    totals = [math.floor(i * fraction + 1e-9) for i in range(len(units) + 1)]
    return [unit for i, unit in enumerate(units) if totals[i + 1] > totals[i]]


def gather_if_backward_comes(unit, args, output):
    """A forward hook for a frozen unit: it is gathered for backward once its output needs a
    gradient. None is needed if all before it is frozen too."""
    # Another call in the same step may need none, so nothing takes it back.
    if any(isinstance(t, torch.Tensor) and t.requires_grad for t in inside(output)):
        unit.set_unshard_in_backward(True)


def inside(x):
    """x and all that it holds, as far as FSDP2 looks."""
    yield x
    if is_dataclass(x):
        x = [getattr(x, field.name) for field in fields(x)]
    elif isinstance(x, dict):
        x = [*x.keys(), *x.values()]
    if isinstance(x, (list, tuple)):
        for item in x:
            yield from inside(item)


def prefetch(model, units, n):
    """Before a unit's forward gather the next n as well; before its backward the n before."""
    chosen = set(units)
    ordered = [module for module in model.modules() if module in chosen]
    # That is the order of registration, and taken to be that of forward.
    for i, unit in enumerate(ordered):
        unit.set_modules_to_forward_prefetch(ordered[i + 1:i + 1 + n])
        unit.set_modules_to_backward_prefetch(ordered[max(0, i - n):i][::-1])


# ---------- do all ranks do the same? -----------------------------------------


@contextmanager
def check_units(model):
    """Inside, the ranks compare their next event: which unit's forward or backward. If
    they differ, all raise a ValueError. So they do if a unit changes a list or dict that it
    is given, since FSDP2 gives it a copy. Each comparison waits for all ranks, so use it for
    a few steps."""
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
    """ValueError on all ranks if their events differ, or are a mistake (collective)."""
    events = [None] * dist.get_world_size()
    dist.all_gather_object(events, event)
    if len(set(events)) > 1:
        raise ValueError(f"ranks 0, 1, ... are not at the same place: {events}")
    if is_mistake:
        raise ValueError(event)


def watch_unit(unit, name):
    """The hooks of `check_units` on a unit. Those that compare run before FSDP2's."""
    given = []

    def before_gather(unit, args):
        compare_ranks(f"forward of {name}")

    def before_forward(unit, args, kwargs):
        given[:] = [*inside(args), *inside(kwargs)]  # FSDP2 has just made these copies

    def after_forward(unit, args, kwargs, output):
        left = [*inside(args), *inside(kwargs)]
        if list(map(id, left)) != list(map(id, given)):
            compare_ranks(
                f"{name} changed a list or dict that it was given. That is FSDP2's copy, "
                "so its caller does not see it: return the new object instead",
                is_mistake=True)
        compare_ranks(f"end of forward of {name}")
        tensors = [t for t in inside(output) if isinstance(t, torch.Tensor)]
        tensors = [t for t in tensors if t.requires_grad]
        torch.autograd.graph.register_multi_grad_hook(tensors, before_backward, mode="any")

    def before_backward(grad):
        compare_ranks(f"backward of {name}")
        # When backward ends, FSDP2 reduces the remaining gradients.
        at_end = partial(compare_ranks, "end of backward")
        torch.autograd.Variable._execution_engine.queue_callback(at_end)

    return [
        unit.register_forward_pre_hook(before_gather, prepend=True),
        unit.register_forward_pre_hook(before_forward, with_kwargs=True),
        unit.register_forward_hook(after_forward, prepend=True, with_kwargs=True),
    ]


# ---------- activation checkpointing, compiling -------------------------------


def checkpoint_activations(
    blocks, mode: str, offload_to_host: bool = False, pin_memory: bool = False
):
    """Keep less until backward, which computes the rest again while the block is gathered. It
    replaces block.forward, which FSDP2's hooks run around, so call it before or after `shard`.

    blocks: without those whose forward changes buffers, as BatchNorm's does: it would run
        twice. The first one that backward will come to is a ValueError.
    mode: "full" keeps each block's input; "selective" the outputs of its matrix products
        and attention too; "none" changes nothing.
    offload_to_host: keep the inputs there (with "full"). pin_memory: do that for a GPU.
    """
    if mode not in ("none", "selective", "full"):
        raise ValueError(f"mode={mode!r} must be none, selective or full")
    if offload_to_host and mode != "full":
        raise ValueError(f"offload_to_host=True needs mode='full', not {mode!r}")
    if mode == "none":
        return
    options = dict(use_reentrant=False)
    if mode == "selective":
        options["context_fn"] = partial(
            create_selective_checkpoint_contexts, keep_products)
    for block in dict.fromkeys(blocks):  # one that is used twice may be listed twice
        # Replace forward: a wrapper module would change the parameters' names.
        block.forward = partial(checkpointed, block, block.forward, options)
        if offload_to_host:
            block.forward = partial(offload_saved, block.forward, pin_memory)


def checkpointed(block, forward, options, *args, **kwargs):
    """forward, checkpointed if backward will come to it. It does not come to frozen blocks
    before the first one that trains; torch 2.13 could not compile their checkpoints."""
    tensors = (*args, *kwargs.values(), *block.parameters())
    if not any(isinstance(t, torch.Tensor) and t.requires_grad for t in tensors):
        return forward(*args, **kwargs)
    versions = [buffer._version for buffer in block.buffers()]
    output = checkpoint(forward, *args, **options, **kwargs)
    if [buffer._version for buffer in block.buffers()] != versions:
        raise ValueError(
            f"forward of a {type(block).__name__} changes its buffers. Backward would run "
            "it again: leave this block out of checkpoint_activations")
    return output


# "selective" keeps the results of these. Not of baddbmm: the T x T scores of written-out
# attention.
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
    if op.overloadpacket in PRODUCTS:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def offload_saved(forward, pin_memory, *args, **kwargs):
    # Around a checkpointed forward, which saves its input only: else weights would move.
    with torch.autograd.graph.save_on_cpu(pin_memory=pin_memory):
        return forward(*args, **kwargs)


def compile_blocks(blocks):
    """Compile block.forward, after `checkpoint_activations`, so that the graph recomputes. To
    compile the module would do nothing: dynamo does not enter the call of one with hooks.

    dynamic=False: a run's shapes stay. Else a second model of other sizes in the same process
    would be compiled for any size."""
    for block in dict.fromkeys(blocks):
        block.forward = torch.compile(block.forward, dynamic=False)


# ---------- in the step -------------------------------------------------------


def autocast(wrapped, device_type: str, dtype: torch.dtype):
    """The compute type of a model that is whole. A sharded one's MixedPrecisionPolicy casts
    by itself, and autocast on top would put its norms back to fp32."""
    on = dtype != torch.float32 and not isinstance(wrapped, FSDPModule)
    return torch.autocast(device_type, dtype, enabled=on)


def set_grad_sync(wrapped, is_last_micro_batch: bool, *, every: bool = True):
    """Choose the gradients that the next backward reduces; call it before each micro-batch's
    forward.

                        every=True                       every=False
    DDP                 all-reduce in each backward      all-reduce in the last
    FSDP2               reduce-scatter in each           in the last; until then this rank
                                                         adds up whole gradients
    between the groups  all-reduce in the last           all-reduce in the last
    of hybrid sharding

    With every=False and reshard_after_forward=False parameters also stay gathered from one
    micro-batch to the next (ZeRO-1's traffic).
    """
    sync = is_last_micro_batch or every
    if isinstance(wrapped, DistributedDataParallel):
        wrapped.require_backward_grad_sync = sync  # what DDP's no_sync() sets
    elif isinstance(wrapped, FSDPModule):
        wrapped.set_requires_gradient_sync(sync)
        # Between the groups of hybrid sharding: once per step, however many micro-batches.
        wrapped.set_requires_all_reduce(is_last_micro_batch)
        if getattr(wrapped, "keeps_gathered", False) and not every:
            wrapped.set_reshard_after_backward(is_last_micro_batch)


def zero_grad(wrapped, optimizer):
    """Forget the gradients. DDP's are views of its buckets and must stay there (see replicate).
    ValueError if the optimizer has no parameter of the model, so that nothing has trained."""
    held = [p for group in optimizer.param_groups for p in group["params"]]
    if not set(held).intersection(wrapped.parameters()):
        raise ValueError(
            "the optimizer holds none of the model's parameters, and trains nothing: make it "
            "after `shard`, which replaces them")
    optimizer.zero_grad(set_to_none=not isinstance(wrapped, DistributedDataParallel))


def clip_grad_norm(wrapped, max_norm: float, loss_scale: float = 1.0):
    """Scale the gradients to a global 2-norm of at most max_norm (0: leave them). Returns
    the norm before that, a 0-d tensor on the device (collective when sharded).

    loss_scale: what the loss was multiplied by. The gradients are divided by it first. If one of
    them has overflowed on any rank, the norm is not finite on all of them."""
    # By hand: clip_grad_norm_ refuses gradients on two devices, as cpu_offload has them.
    params = list(wrapped.parameters())
    is_sharded = isinstance(wrapped, FSDPModule)
    if is_sharded and not all(isinstance(p, DTensor) for p in params):
        raise ValueError(
            "parameters are gathered, and their gradients out of sight: between backward and "
            "step nothing may run forward, not even an evaluation. Evaluate after the step, "
            "inside `inference`")
    grads = defaultdict(list)  # {device: this rank's gradients there}
    for p in params:
        if p.grad is not None:
            grad = p.grad.to_local() if is_sharded else p.grad
            grads[grad.device].append(grad)

    mesh = params[0].device_mesh if is_sharded else None
    square = torch.zeros((), device=mesh.device_type if mesh else params[0].device)
    for here in grads.values():
        square += torch.nn.utils.get_total_norm(here).to(square.device) ** 2
    if is_sharded:
        # Over the shard group only: the groups hold equal gradients, to be counted once.
        dist.all_reduce(square, group=mesh.get_group("shard"))
    norm = square.sqrt() / loss_scale
    if max_norm or loss_scale != 1:
        limit = max_norm or math.inf
        factor = (limit / (norm + 1e-6)).clamp(max=1.0) / loss_scale
        for device, here in grads.items():
            torch._foreach_mul_(here, factor.to(device))
    return norm


@contextmanager
def inference(wrapped):
    """Evaluate or generate inside: eval mode, no gradients. At the end nothing is gathered,
    and each module is in the mode that it was in. All ranks must run the same forwards,
    since each one gathers."""
    modes = {module: module.training for module in wrapped.modules()}
    wrapped.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes.items():
            module.training = training
        reshard(wrapped)


def reshard(wrapped):
    """Free the units that a forward without backward has left gathered. Until then the module's
    parameters are those copies, and the optimizer's step would not show in them."""
    for module in wrapped.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


# ---------- whole tensors, out and in, one at a time --------------------------


def gather_full(t):
    """The whole of t in rank 0's host memory, None on the other ranks (collective). Instead of
    t.full_tensor(): there every rank holds the whole, and it takes twice as long."""
    t = t.detach()
    is_rank0 = not dist.is_initialized() or dist.get_rank() == 0
    if not isinstance(t, DTensor):
        return t.to("cpu", copy=True) if is_rank0 else None
    group = t.device_mesh.get_group("shard")
    ranks = dist.get_process_group_ranks(group)
    if ranks[0] > 0:
        return None  # the first group gathers; the others hold equal copies
    per_rank = math.ceil(len(t) / len(ranks))
    # All ranks must send equally many rows, so the last ones pad. They are sent from the
    # device: NCCL sends no host memory.
    own = t.to_local()
    rows = own.new_zeros(per_rank, *t.shape[1:], device=t.device_mesh.device_type)
    rows[:len(own)] = own
    if not is_rank0:
        dist.gather(rows, dst=0, group=group)
        return None
    whole = rows.new_empty(len(ranks) * per_rank, *t.shape[1:])
    dist.gather(rows, list(whole.split(per_rank)), dst=0, group=group)
    return whole[:len(t)].cpu()


def write_full(t, full):
    """Set t from its whole value `full`, which every rank has. A DTensor takes its rows. Instead
    of distribute_tensor, which needs all of them: full may be anything that returns rows a to
    b as full[a:b]."""
    t = t.detach()
    if not isinstance(t, DTensor):
        t.copy_(full[:] if t.dim() else full)
        return
    ranks = t.device_mesh["shard"].size()
    per_rank = math.ceil(len(t) / ranks)  # rows of a rank; the last ones may have fewer
    first = per_rank * t.device_mesh.get_local_rank("shard")
    t.to_local().copy_(full[first:first + per_rank])


def broadcast_full(t, full):
    """Set t on every rank from the whole value `full` that rank 0 has (collective)."""
    if dist.is_initialized():
        device = t.device_mesh.device_type if isinstance(t, DTensor) else t.device
        if dist.get_rank() > 0:
            full = torch.empty(t.shape, dtype=t.dtype, device=device)
        full = full.to(device, t.dtype).contiguous()
        dist.broadcast(full, src=0)
    write_full(t, full)

"""
FSDP2 in one file: the steps of minimal.py as functions with options, plus DDP for comparison. It
imports only torch (2.9 or later), so you can copy it into your own project:

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # each process takes its own GPU
    dist.init_process_group("nccl")
    mesh = make_mesh("cuda")  # the ranks that share the model
    with torch.device("meta"):
        model = MyModel()  # names and shapes, no memory
    checks.before_sharding(model)  # checks.py: copy it too
    shard(model, model.layers, mesh, mp_policy=mixed_precision(torch.bfloat16))
    for name, p in model.named_parameters():  # each rank draws all, and keeps its rows
        write_full(p, my_initial_value(name, p.shape))
    # Make it before any forward: afterwards the root's parameters are gathered copies, and the
    # optimizer would update those instead of this rank's rows.
    optimizer = torch.optim.AdamW(model.parameters())
    torch.manual_seed(seed + dist.get_rank())  # only now: each rank's own dropout and noise
    # Each rank has its own batches, of data that was split before seeding by rank: see PyTorch's
    # DistributedSampler, its set_epoch and drop_last.
    for batches in steps:
        for i, (x, y) in enumerate(batches):
            # With several micro-batches: in the last one hybrid sharding's groups reduce, and the
            # root is freed.
            set_grad_sync(model, is_last_micro_batch=i + 1 == len(batches))
            # In bf16 the model returns bf16, which is too coarse for a loss.
            loss = my_loss(model(x).float(), y) / len(batches)
            loss.backward()  # gathers unit by unit, averages gradients, keeps its rows of them
        norm = clip_grad_norm(model, 1.0)
        optimizer.step()
        zero_grad(model, optimizer)
    with inference(model):
        logits = model(x)  # on every rank, since a forward gathers
    # Outside of it, where the root isn't gathered in param_dtype. On every rank too: rank 0 gets
    # tensors, the others None. A tied parameter comes under all its
    # names, and buffers that are not persistent are here too. (state_dict() is not used: a model
    # may have one of its own, which adds or leaves out.)
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    state = {name: gather_full(t) for name, t in tensors}
    dist.destroy_process_group()  # gloo may abort here: rather dist.barrier(), then os._exit(0)

A *unit* is a module that `fully_shard` was called on: its parameters are gathered, and
their gradients reduced, in one collective. PyTorch's hooks do this, not code in this file:

                          ZeRO-3: reshard_after_forward=True     ZeRO-2: =False
    forward of unit i     gather i, compute, free i              gather i, compute
    backward of unit i    compute while i - 1 is gathered        compute
    after that            free i, reduce its gradients           free i, reduce its gradients

The root unit holds every other parameter. It stays gathered from its forward to the end of
backward, or with set_grad_sync to the end of the step's last backward. All ranks must run the same
units in the same order. If one skips a block, they mix rows of different blocks without an error;
compare.check_units finds that.

docs/fsdp.md walks through a step; docs/your_model.md lists what FSDP2 requires of your model. If
the GPU waits for the host, extras/recorded.py records such a step.
"""

import math
from collections import defaultdict
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel


def make_mesh(device_type: str, shard_group_size: int = 0):
    """The ranks as a DeviceMesh (collective). They share one copy of the model, split along the
    dimension "shard". With shard_group_size=n (hybrid sharding) each group of n neighbours shares
    its own copy; the groups form the dimension "replicate", if there are several."""
    world_size = dist.get_world_size()
    if shard_group_size in (0, world_size):
        return dist.init_device_mesh(device_type, (world_size,), mesh_dim_names=("shard",))
    if world_size % shard_group_size:
        raise ValueError(f"{world_size} ranks do not divide into groups of {shard_group_size}")
    shape = (world_size // shard_group_size, shard_group_size)
    return dist.init_device_mesh(device_type, shape, mesh_dim_names=("replicate", "shard"))


def mixed_precision(param_dtype: torch.dtype, reduce_dtype: torch.dtype = torch.float32):
    """Gather and compute in param_dtype; sum gradients over ranks in reduce_dtype (before torch
    2.15 FSDP2's own default is param_dtype). Rows and optimizer state stay fp32.

    With hybrid sharding, or every=False in set_grad_sync, micro-batches also accumulate in
    reduce_dtype. In bfloat16 the gradient was 1% off after 64 of them."""
    return MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)


def shard(
    model,
    units,
    mesh,
    *,
    mp_policy: MixedPrecisionPolicy | None = None,
    reshard_after_forward: bool | int = True,
    cpu_offload: float = 0.0,
    prefetch_units: int = 0,
):
    """FSDP2: every rank keeps its rows of every parameter, gradient and optimizer state.
    In place (all ranks).

    model: in fp32 or float64; frozen parameters may be in bf16, or integers (from torch 2.12 on).
        For parameters on the meta device, this allocates this rank's rows, as NaN (integers as 0).
        Others keep their values, which must be the same on every rank; each rank keeps its rows.
        Buffers are not sharded. They keep their values and move to the device; one on the meta
        device stays there.
    units: modules, inner before outer, or lists of modules that are one unit, such as
        [norm, head]; the root unit holds every other parameter. Tied parameters must be in one
        unit, or in the root. A module that several units use must be a unit itself.
    mesh: from make_mesh, or your own; its last dimension shards. One for all units, and no tensor
        parallelism: clip_grad_norm and gather_full know no other.
    mp_policy: from mixed_precision, or your own. With None nothing is cast: each parameter
        computes in its own type.
    reshard_after_forward: free a unit after its forward and gather it again for backward
        (ZeRO-3), or keep it until backward (ZeRO-2). With an int n, each group of n neighbours
        keeps one copy in param_dtype, split among them, for backward (ZeRO++'s hpZ).
    cpu_offload: the fraction of units that keep their rows in host memory, where the CPU
        updates them; 1.0 includes the root.
    prefetch_units: gather this many units ahead; 2 or more cost memory. With 0 FSDP2 gathers one
        ahead in backward, and in forward as soon as the CPU gets there, usually ahead of the GPU.
    """
    units = list(units)
    for unit in units:
        parts = {unit} if isinstance(unit, torch.nn.Module) else {*unit}
        if not parts <= {*model.modules()}:
            raise ValueError(f"a unit that is not inside the model: {unit}")
    # An embedding's backward does not read its table. (A subclass's, a parametrization's or that
    # of a hook might.)
    plain = [unit for unit in units if type(unit) is torch.nn.Embedding]
    tables = [unit for unit in plain if not (unit._forward_hooks or unit._forward_pre_hooks)]
    offloaded = evenly(units, cpu_offload)
    if cpu_offload == 1:
        offloaded.append(model)
    on_host = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    common = dict(mesh=mesh, mp_policy=mp_policy or MixedPrecisionPolicy())
    marks = {n: marks_of(p) for n, p in model.named_parameters(remove_duplicate=False)}

    # 1) Shard the units, then the root, which takes everything else.
    for unit in units:
        # Backward does not gather a table, so keeping 1/n of it would waste memory.
        reshard = bool(reshard_after_forward) if unit in tables else reshard_after_forward
        fully_shard(
            unit,
            **common,
            reshard_after_forward=reshard,
            offload_policy=on_host if unit in offloaded else OffloadPolicy(),
        )
    fully_shard(
        model,
        **common,
        reshard_after_forward=False,  # backward begins with the root
        offload_policy=on_host if model in offloaded else OffloadPolicy(),
    )
    # All ranks must reduce the same gradients. If a micro-batch leaves a parameter of a unit
    # without one on some rank (one of its experts got no token), that rank contributes zeros.
    if hasattr(model, "set_reduce_scatter_unused_params"):  # from torch 2.13 on
        model.set_reduce_scatter_unused_params(True)

    # 2) Materialize: allocate memory, only now and only for this rank's rows.
    for unit in [*units, model]:
        # Inner units come first. Outer ones then skip them: they are no longer on meta.
        module = unit if isinstance(unit, torch.nn.Module) else torch.nn.ModuleList(unit)
        materialize(module, "cpu" if unit in offloaded else mesh.device_type)
    for name, p in model.named_parameters():
        vars(p).update(marks[name])  # FSDP2 and materialize made new parameters

    # 3) Set when to gather.
    for table in tables:
        table.set_unshard_in_backward(False)
    if prefetch_units:
        prefetch(model, units, prefetch_units)


def find_units(model, blocks, min_params: int = 0):
    """The units, inner before outer: any embedding larger than a block (in the root it would be
    gathered for the whole step), and the blocks. With min_params, as in FSDP1's size-based policy:
    every module with at least that many parameters not yet in a unit. Embeddings and modules with
    tied parameters stay in the root, since PyTorch refuses them in two units."""
    tied = {model.get_parameter(names[0]) for names in tied_names(model)}
    if not min_params:
        blocks = list(dict.fromkeys(blocks))  # one that is used twice may be listed twice
        block_params = sum(p.numel() for p in blocks[0].parameters())
        embeddings = [m for m in model.modules() if isinstance(m, torch.nn.Embedding)]
        large = [m for m in embeddings if m.weight.numel() > block_params and m.weight not in tied]
        return large + blocks
    units = []

    def visit(module):
        """Make units of inner modules, and maybe of this one; return the parameters left over."""
        left = list(module.parameters(recurse=False))
        for child in module.children():
            left += visit(child)
        too_small = sum(p.numel() for p in left) < min_params
        # A container, such as ModuleList, is never called, so FSDP2's hooks on it never run.
        is_container = type(module).forward is torch.nn.Module.forward
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


def evenly(units, fraction):
    """A fraction of the units, evenly spread, so that host-device copies overlap with the compute
    of the others. With 0.5 it takes units 1, 3, 5, ...: those at which the running total of
    `fraction` reaches an integer."""
    # 1e-9: rounding may leave a total just below an integer.
    totals = [math.floor(i * fraction + 1e-9) for i in range(len(units) + 1)]
    return [unit for i, unit in enumerate(units) if totals[i + 1] > totals[i]]


def prefetch(model, units, n):
    """Before a unit's forward, gather the next n too; before its backward, the previous n."""
    first = [unit if isinstance(unit, torch.nn.Module) else unit[0] for unit in units]
    # Registration order, which we assume is forward order. Nearest first.
    ordered = [module for module in model.modules() if module in first]
    for i, unit in enumerate(ordered):
        unit.is_prefetched = True  # for `inference`
        unit.set_modules_to_forward_prefetch(ordered[i + 1:i + 1 + n])
        unit.set_modules_to_backward_prefetch(ordered[max(0, i - n):i][::-1])


def marks_of(p):
    """Attributes that somebody set on a parameter, such as Mamba's _no_weight_decay."""
    return dict(vars(p)) if type(p) is torch.nn.Parameter else {}


def materialize(module, device):
    """Allocate the parameters that are on the meta device, as NaN: one that never gets a value
    shows. (to_empty, as in minimal.py, would overwrite buffers, and untie parameters that are not
    sharded.)"""
    made = {}  # {parameter on meta: its replacement}
    for inner in module.modules():
        for name, p in list(inner.named_parameters(recurse=False)):
            if p.is_meta:
                if p not in made:  # else it is tied
                    empty = torch.empty_like(p, device=device)
                    empty.fill_(math.nan if p.is_floating_point() else 0)
                    made[p] = torch.nn.Parameter(empty, p.requires_grad)
                    vars(made[p]).update(marks_of(p))
                setattr(inner, name, made[p])  # FSDP2 reads the attribute at the first forward


# ---------- without sharding: one process, DDP --------------------------------


def allocate(model, device):
    """For one process, or before `replicate`: allocate parameters on the meta device in full,
    as NaN (integers as 0), and move everything else to the device."""
    materialize(model, device)
    for t in (*model.parameters(), *model.buffers()):
        t.data = t.to(device)  # unlike model.to, on the plan's fake tensors too


def replicate(model):
    """PyTorch's DDP: every rank keeps everything. Returns the module to call (all ranks)."""
    for p in model.parameters():
        if p.requires_grad:
            # Gradients that exist now become views of DDP's buckets. Created later, in a
            # micro-batch that reduces nothing, they would be extra copies.
            p.grad = torch.zeros_like(p)
    device = next(model.parameters()).device
    device_ids = [device.index] if device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=device_ids, gradient_as_bucket_view=True)


# ---------- in the step -------------------------------------------------------


def fsdp_root(wrapped):
    """The module that `shard` was called on, even inside a wrapper such as torch.compile's, or
    None."""
    return next((m for m in wrapped.modules() if isinstance(m, FSDPModule)), None)


def autocast(wrapped, device_type: str, dtype: torch.dtype):
    """A context: autocast for a model that is not sharded, for one forward, since it keeps the
    copies that it has cast. In a sharded one the MixedPrecisionPolicy casts, and autocast on top
    would put its norms back in fp32."""
    on = dtype != torch.float32 and fsdp_root(wrapped) is None
    return torch.autocast(device_type, dtype, enabled=on)


def set_grad_sync(
    wrapped, is_last_micro_batch: bool, *, every: bool = True, keep_gathered: bool = False
):
    """Choose the gradients that the next backward reduces, and what it frees; call it before each
    micro-batch's forward.

                        every=True                       every=False
    DDP                 all-reduce in each backward      all-reduce in the last
    FSDP2               reduce-scatter in each           in the last; until then this rank
                                                         adds up whole gradients
    between the groups  all-reduce in the last           all-reduce in the last
    of hybrid sharding

    every=False in bf16 or fp16: before torch 2.15 the first micro-batch must use all parameters of
    a unit, on every rank, or the last backward stops with `expects uniform gradient dtype`,
    perhaps on one rank while the others wait.

    The root stays gathered from one micro-batch to the next, and with keep_gathered the other
    units too (ZeRO-1's traffic, if every and reshard_after_forward are False). The step's last
    backward frees them, so that the optimizer updates this rank's rows: pass
    is_last_micro_batch=True for it, and the same keep_gathered for all micro-batches.
    """
    sync = is_last_micro_batch or every
    root = fsdp_root(wrapped)
    if isinstance(wrapped, DistributedDataParallel):
        wrapped.require_backward_grad_sync = sync  # what DDP's no_sync() sets
    elif root is not None:
        root.set_requires_gradient_sync(sync)
        # After the line above, which sets it too. The groups of hybrid sharding all-reduce once
        # per step, however many micro-batches.
        root.set_requires_all_reduce(is_last_micro_batch)
        root.set_reshard_after_backward(is_last_micro_batch, recurse=keep_gathered)


def zero_grad(wrapped, optimizer, in_place: bool = False):
    """Clear the gradients. in_place: keep their memory. A recorded step needs that, and so does
    DDP, whose gradients are views of its buckets."""
    in_place = in_place or isinstance(wrapped, DistributedDataParallel)
    optimizer.zero_grad(set_to_none=not in_place)


@torch.no_grad()
def clip_grad_norm(wrapped, max_norm: float, loss_scale: float = 1.0):
    """Scale the gradients to a global 2-norm of at most max_norm (0: do not clip). Returns the
    norm before clipping, a 0-d tensor on the device (collective when sharded).

    wrapped: the model, or a part of it. Between micro-batches the root is gathered: its parameters
    are then copies without gradients, which model.parameters() has, so a part without units has a
    norm of 0. optimizer.param_groups have this rank's rows, and their gradients.
    loss_scale: the factor on the loss; gradients are divided by it first. If one overflowed on
    any rank, every rank gets a norm that is not finite."""
    # PyTorch's clip_grad_norm_ refuses gradients on two devices, as with cpu_offload.
    # A part may have no unit in it, so look at its parameters too.
    is_sharded = any(isinstance(p, DTensor) for p in wrapped.parameters())
    is_sharded = is_sharded or fsdp_root(wrapped) is not None
    grads = defaultdict(list)  # {device: this rank's gradients there}
    for name, p in wrapped.named_parameters():
        if is_sharded and not isinstance(p, DTensor):
            raise ValueError(
                f"{name} is not sharded, so its gradient is out of sight: for example a forward "
                "ran between backward and step (evaluate after the step), set_grad_sync was not "
                "told of the last micro-batch, the parameter was added after `shard` or is among "
                "ignored_params, or its unit was called in a backward, as use_reentrant=True does")
        if p.grad is not None:
            grad = p.grad.to_local() if is_sharded else p.grad
            grads[grad.device].append(grad)

    first = next(wrapped.parameters())
    mesh = first.device_mesh if is_sharded else None
    square = torch.zeros((), device=mesh.device_type if is_sharded else first.device)
    for on_device in grads.values():
        square += torch.nn.utils.get_total_norm(on_device).to(square.device) ** 2
    if is_sharded:
        # Only over the shard group: all groups hold equal gradients, so count them once.
        dist.all_reduce(square, group=mesh.get_group(-1))
    norm = square.sqrt() / loss_scale
    if max_norm or loss_scale != 1:
        limit = max_norm or math.inf
        factor = (limit / (norm + 1e-6)).clamp(max=1.0) / loss_scale
        for device, on_device in grads.items():
            torch._foreach_mul_(on_device, factor.to(device))
    return norm


@contextmanager
def inference(wrapped, training: bool = False):
    """Evaluate or generate inside: eval mode (or training mode), no gradients. On exit no unit
    stays gathered, after an exception neither, and each module's train() is called with its
    previous mode. All ranks must run the same forwards, since a forward gathers; with
    prefetch_units the exit does too. (With reshard_after_forward=n each rank keeps its 1/n of
    every unit, in param_dtype, until the next backward.)"""
    modes = {module: module.training for module in wrapped.modules()}
    units = [module for module in modes if isinstance(module, FSDPModule)][::-1]  # inner first
    wrapped.train(training)
    failed = True
    try:
        # Leave any inference_mode: the next backward couldn't use copies gathered in it.
        with torch.inference_mode(False), torch.no_grad():
            yield
        failed = False
    finally:
        for module, mode in modes.items():
            module.train(mode)  # a model may have its own, and do more; outer modules come first
        for unit in units:
            # A forward without backward leaves the root gathered (with ZeRO-2, every unit), and
            # the next optimizer step would not update that copy. One that was prefetched and did
            # not run would use its copy later: take it now.
            if hasattr(unit, "is_prefetched"):
                unit.unshard()
            unit.reshard()
            if failed and not all(isinstance(p, DTensor) for p in unit.parameters()):
                # It failed in this unit's forward. Then reshard obeys reshard_after_forward.
                unit.set_reshard_after_forward(True, recurse=False)
                unit.reshard()
                unit.set_reshard_after_forward(False, recurse=False)


# ---------- whole tensors, out and in, one at a time --------------------------


def gather_full(t):
    """All of t in rank 0's host memory, None on the other ranks (collective). Unlike with
    t.full_tensor(), only rank 0 ends up with all of it, and it takes half the time.
    t: cut by rows in the mesh's last dimension, as `shard` does it; or a plain tensor. (So call it
    before forward or after backward: a gathered root has plain copies, in param_dtype.)
    ValueError if it is cut in another way."""
    t = cut_by_rows(t.detach())
    is_rank0 = not dist.is_initialized() or dist.get_rank() == 0
    if not isinstance(t, DTensor):
        return t.to("cpu", copy=True) if is_rank0 else None
    group = t.device_mesh.get_group(-1)
    ranks = dist.get_process_group_ranks(group)
    if ranks[0] > 0:
        return None  # the first group gathers; the others hold equal copies
    per_rank = math.ceil(len(t) / len(ranks))  # rows per rank; the last may have fewer
    # All ranks must send the same number of rows, so the last ones pad. Send them from the
    # device: NCCL can't send host memory.
    own = t.to_local()
    rows = torch.zeros(per_rank, *t.shape[1:], dtype=t.dtype, device=t.device_mesh.device_type)
    rows[:len(own)] = own
    if not is_rank0:
        dist.gather(rows, dst=0, group=group)
        return None
    whole = rows.new_empty(len(ranks) * per_rank, *t.shape[1:])
    dist.gather(rows, list(whole.split(per_rank)), dst=0, group=group)
    return whole[:len(t)].cpu()


def cut_by_rows(t):
    """t; ValueError if it is a DTensor that is cut in another way."""
    if isinstance(t, DTensor):
        by_rows = (*[Replicate()] * (t.device_mesh.ndim - 1), Shard(0))
        if str(t.placements) != str(by_rows):  # in torch 2.9 Shard(0) equals _StridedShard(0)
            raise ValueError(f"not cut by rows alone, but as {t.placements}: use t.full_tensor()")
    return t


def write_full(t, full):
    """Set t from its full value, which every rank has; a DTensor takes its rows. Unlike
    distribute_tensor it doesn't need all rows: `full` may be anything that returns rows a to b as
    full[a:b]. On the last ranks b, or both, may be past the end.
    t: cut as for gather_full. ValueError if it isn't, or if full has another shape."""
    t = cut_by_rows(t.detach())
    shape = full.get_shape() if hasattr(full, "get_shape") else getattr(full, "shape", t.shape)
    if tuple(shape) != tuple(t.shape):  # get_shape: safetensors' slices have it
        raise ValueError(f"a value of shape {tuple(shape)}, for one of {tuple(t.shape)}")
    if not isinstance(t, DTensor):
        t.copy_(full[:] if t.dim() else full[...])  # a scalar cannot be sliced
        return
    mesh = t.device_mesh
    per_rank = math.ceil(len(t) / mesh.size(-1))
    first = per_rank * mesh.get_local_rank(-1)
    t.to_local().copy_(full[first:first + per_rank])

"""
Everything distributed. A GPT from model.py, still on the meta device, becomes what the config asks for:

    dist, cfg = setup(cfg)                  # rank, world size, device; the process group under torchrun
    model = parallelize(gpt, cfg, dist)     # single, DDP or FSDP2, in place, with its memory allocated
    set_grad_sync(model, cfg, last)         # before each micro-batch's forward
    clip_grad_norm(model, max_norm, dist)   # after the last backward

and, whole parameter by whole parameter, `gather_full` and `write_full` carry values out and in (checkpoints).
The rest of the project does not know which strategy runs. Terms: P = parameters, W = ranks, g = shard_group_size
(W for every strategy but hybrid_shard), A = micro-batches a rank and step, L = blocks. A *unit* is what
`fully_shard` is called on: its parameters are gathered, and their gradients reduced, in one collective.

What a rank keeps, in fp32 (4 bytes), and what it sends and receives in a step. The all-gather carries `dtype`,
the reduce-scatter `reduce_dtype`, DDP's all-reduce reduce_dtype; all-reduce of n = 2 n on a ring. b = P of the
blocks, P - b = P of the root unit (wte, wpe, ln_f), which is never resharded between forward and backward.

| strategy              | params | grads | Adam | all-gather     | reduce-scatter | all-reduce | A = 1 |
|-----------------------|--------|-------|------|----------------|----------------|------------|-------|
| single                | P      | P     | 2P   | -              | -              | -          | 0     |
| ddp           last    | P      | P     | 2P   | -              | -              | P          | 2P    |
|               every   | P      | P     | 2P   | -              | -              | A P        | 2P    |
| shard_grad_op every   | P/W    | P/W   | 2P/W | A P            | A P            | -          | 2P    |
|   (ZeRO-2)    last    | P/W    | P     | 2P/W | P    (ZeRO-1)  | P              | -          | 2P    |
| full_shard    every   | P/W    | P/W   | 2P/W | A (P + b)      | A P            | -          | 3P    |
|   (ZeRO-3)    last    | P/W    | P     | 2P/W | A (P + b)      | P              | -          | 3P    |
| hybrid_shard  every   | P/g    | P/g   | 2P/g | A (P + b) in g | A P in g       | P/g        |       |
|               last    | P/g    | P     | 2P/g | A (P + b) in g | P in g         | P/g        |       |

Collectives a step, full_shard, A = 1: 2 L + 1 all-gathers and L + 1 reduce-scatters. The formulas with padding,
frozen parameters and bytes are in plan.py; test_fsdp.py counts the collectives and compares.
Sources: Rajbhandari et al. 2020 (ZeRO); Zhao et al. 2023 (FSDP); PyTorch's torch.distributed.fsdp.fully_shard.
"""

import ctypes
import os
import re
import shutil
import signal
import sys
import time
import traceback
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as td
import torch.nn as nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

SHARDED = ("shard_grad_op", "full_shard", "hybrid_shard")
STRATEGIES = ("single", "ddp") + SHARDED
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# -----------------------------------------------------------------------------
# ranks: who am I, and how a process starts and leaves


@dataclass(frozen=True)
class Dist:
    """This process among the others; made once by `setup` and passed on."""
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    device: torch.device = torch.device("cpu")
    local_world_size: int = 1  # ranks on this node


def setup(cfg):
    """(Dist, cfg resolved for it); under torchrun (which sets RANK) also opens the process group. SystemExit if cfg asks for what is not there."""
    env = os.environ
    dist = Dist(int(env.get("RANK", 0)), int(env.get("LOCAL_RANK", 0)), int(env.get("WORLD_SIZE", 1)),
                pick_device(cfg.device, int(env.get("LOCAL_RANK", 0)), "RANK" in env), int(env.get("LOCAL_WORLD_SIZE", 1)))
    if "RANK" not in env and cfg.strategy not in ("", "single"):
        raise SystemExit(f"strategy={cfg.strategy} needs torchrun: torchrun --standalone --nproc_per_node=2 {' '.join(sys.argv)}")
    cfg = resolve(cfg, dist, "RANK" in env)
    if dist.device.type == "cpu":
        tune_malloc(cfg.strategy in SHARDED)
    if "RANK" not in env:
        return dist, cfg
    if dist.device.type == "cuda":
        torch.cuda.set_device(dist.device)  # before anything else touches CUDA, or every rank opens a context on GPU 0
    # NCCL never alone: offloaded gradients, stop flags and checkpoints are reduced on the CPU
    backend = "cpu:gloo,cuda:nccl" if dist.device.type == "cuda" and cfg.backend != "gloo" else "gloo"
    if not td.is_initialized():
        store = None
        if env.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and env.get("GROUP_WORLD_SIZE") == "1":
            # torchrun's store outlives a restart of the ranks (pytorch issue 135712): without a name of its own for each start, a
            # rank can read the address that its dead peer left there. Across nodes the counts differ: there it takes the
            # variable that the README's command for many nodes exports
            store = td.PrefixStore("start " + env["TORCHELASTIC_RESTART_COUNT"], td.TCPStore(env["MASTER_ADDR"], int(env["MASTER_PORT"]), is_master=False))
        td.init_process_group(backend, store=store, rank=dist.rank, world_size=dist.world_size, timeout=timedelta(minutes=10))
    return dist, cfg


def tune_malloc(sharded):
    """
    What glibc does with freed memory (CPU training on Linux; elsewhere nothing happens): keep it. By default activations go
    back to the kernel after every step and each page is faulted in anew, an eighth of the step of a 10M model.

    Sharded, blocks from 16 MiB on are the exception: kept, gathered units of a large model fragment the heap until nothing
    is saved (85M parameters on 2 ranks: 2.6 GB a rank instead of 1.6; DDP 2.0). A threshold of 1 MiB saves another
    0.4 GB and costs a third of the step.
    """
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-1, -1)  # M_TRIM_THRESHOLD: never shrink the heap
        if sharded:
            libc.mallopt(-3, 16 << 20)  # M_MMAP_THRESHOLD: larger blocks are mappings of their own, gone when freed
        else:
            libc.mallopt(-4, 0)  # M_MMAP_MAX: no such mappings
    except (OSError, AttributeError):
        pass


def pick_device(name, local_rank=0, distributed=False):
    """'auto', 'cpu', 'mps', 'cuda' or 'cuda:1' -> torch.device; under torchrun every local rank has its own GPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() and not distributed else "cpu"
    kind = name.partition(":")[0]
    available = {"cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available()), "cpu": sys.maxsize}
    index = local_rank if distributed else int(name.partition(":")[2] or 0)
    if index >= available[kind]:
        raise SystemExit(f"device={name}: this machine has {available[kind]} {kind} devices, number {index} was asked for; "
                         "use --device=cpu" + (", or fewer processes per node" if distributed else ""))
    return torch.device(kind, index) if kind == "cuda" else torch.device(kind)


def resolve(cfg, dist, distributed=True):
    """cfg with strategy, dtype and grad_sync spelled out for this run; SystemExit for a combination that makes no sense."""

    def error(key, remedy):
        raise SystemExit(f"{key}={getattr(cfg, key)!r} with strategy={strategy} on {dist.device.type}, {dist.world_size} processes: {remedy}")

    W, strategy = dist.world_size, cfg.strategy or ("full_shard" if distributed else "single")
    if strategy == "single" and W > 1:
        error("strategy", "use ddp or a sharded strategy under torchrun, or start one process with python train.py")
    if cfg.backend == "nccl" and strategy != "single" and dist.device.type != "cuda":
        error("backend", "NCCL needs CUDA; use backend=auto")
    if cfg.backend == "shm" and (strategy not in SHARDED or dist.device.type != "cpu"):
        error("backend", "it replaces gloo's collectives in sharded strategies on CPUs; use backend=auto")
    if cfg.gradient_accumulation_steps % W:
        near = sorted({max(1, cfg.gradient_accumulation_steps // W) * W, -(-cfg.gradient_accumulation_steps // W) * W})
        error("gradient_accumulation_steps", f"it counts micro-batches over all processes and must be a multiple of {W}; try {' or '.join(map(str, near))}")
    if strategy not in SHARDED:
        for key, off in (("cpu_offload", 0.0), ("wrap_min_params", 0), ("prefetch_blocks", 0)):
            if getattr(cfg, key) != off:
                error(key, f"only a sharded strategy has it; use strategy=full_shard or {key}={off}")
    if strategy == "single" and cfg.reduce_dtype != "float32":
        error("reduce_dtype", "one process reduces nothing; use reduce_dtype=float32")
    if strategy == "single" and cfg.grad_sync != "auto":
        error("grad_sync", "one process synchronizes nothing; use grad_sync=auto")
    if strategy != "hybrid_shard" and cfg.shard_group_size:
        error("shard_group_size", "only hybrid_shard has groups; use strategy=hybrid_shard or shard_group_size=0")
    group = cfg.shard_group_size or dist.local_world_size
    if strategy == "hybrid_shard" and W % group:
        error("shard_group_size", f"{W} processes do not divide into groups of {group}; use a divisor of {W}")
    if cfg.backend == "shm" and not hasattr(os, "memfd_create"):
        error("backend", "sharing memory needs Linux; use backend=auto")
    if cfg.backend == "shm" and dist.local_world_size % (group if strategy == "hybrid_shard" else W):
        error("backend", f"ranks that share memory must be on one node, which has {dist.local_world_size}; use backend=auto, or hybrid_shard inside the nodes")
    if cfg.activation_offload and cfg.activation_checkpointing == "selective":
        error("activation_offload", "selective checkpointing keeps its products in a cache of PyTorch's, out of reach; use activation_checkpointing=full or none")
    if cfg.activation_offload and cfg.compile and cfg.activation_checkpointing == "none":
        error("activation_offload", "compiled code keeps its activations out of reach; use activation_checkpointing=full, or compile=False")
    if cfg.compile and dist.device.type == "cpu" and not any(shutil.which(c) for c in (os.environ.get("CXX", "g++"), "clang++")):
        error("compile", "compiling for a CPU needs a C++ compiler; install g++ or use compile=False")
    return replace(cfg, strategy=strategy, dtype=best_dtype(dist.device) if cfg.dtype == "auto" else cfg.dtype,
                   shard_group_size=group if strategy == "hybrid_shard" else 0,
                   grad_sync=("last" if strategy == "ddp" else "every") if cfg.grad_sync == "auto" else cfg.grad_sync)


def best_dtype(device):
    """The compute type that this device is fast at; bf16 needs no loss scaling, so it wins where it exists."""
    if device.type == "cuda":
        return "bfloat16" if torch.cuda.get_device_capability(device) >= (8, 0) else "float16"
    if device.type == "cpu":  # private probes: there is no public one; where they are gone, fp32 is always right
        probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
        return "bfloat16" if any(getattr(torch.cpu, p, lambda: False)() for p in probes) else "float32"
    return "float32"


def run(main, *args):
    """
    Call main(*args) and leave the process: SystemExit's text on one line and exit code 1, anything else with its traceback.

    Under torchrun the processes leave through os._exit once their output is flushed: with gloo's threads alive,
    about one interpreter in ten aborts in its own clean-up ("terminate called without an active exception",
    exit code -6) after all work is done, and torchrun then calls the whole job failed.
    """
    code, local_rank = 0, int(os.environ.get("LOCAL_RANK", 0))
    try:
        main(*args)
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else 1 if e.code else 0
        if code and local_rank:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # train.StopSignal would only note it
            time.sleep(5)  # what all ranks see, local rank 0 says; torchrun ends the others while they wait here
        if isinstance(e.code, str):
            print(e.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush(), sys.stderr.flush()
    if td.is_initialized():
        if code == 0:
            barrier()  # nobody tears down connections that another rank still uses
        os._exit(code)
    sys.exit(code)


def print0(dist, *args):
    if dist.rank == 0:
        print(*args, flush=True)


def barrier():
    """All ranks wait for each other, on the CPU."""
    if td.is_initialized():
        td.all_reduce(torch.zeros(1))


def mean(x, dist):
    """The mean of tensor x over all ranks, in place (collective)."""
    if dist.world_size > 1:
        td.all_reduce(x)
        x /= dist.world_size
    return x


def agree(dist, value):
    """Rank 0's value on every rank (collective); for decisions that only rank 0 can take, such as what is on its disk."""
    if dist.world_size == 1:
        return value
    box = [value]
    td.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    return box[0]


# -----------------------------------------------------------------------------
# units and meshes


def find_units(model, min_params=0):
    """
    [(name, module)] of the modules that become FSDP units, inner before outer; what is left belongs to the root.

    One per transformer block; or, with min_params, FSDP1's size-based policy: bottom-up, any module whose
    parameters not yet in a unit number at least min_params. A tied parameter stays in the root: wte and lm_head
    in two units would be gathered and updated separately, which PyTorch refuses (older versions: silently).
    """
    if not min_params:
        blocks = set(model.transformer.h)
        return [(name, m) for name, m in model.named_modules() if m in blocks]
    owners = [id(p) for m in model.modules() for p in m.parameters(recurse=False)]
    tied, units = {i for i in owners if owners.count(i) > 1}, []

    def visit(name, module):  # returns the parameters below `module` that no unit has taken
        left = list(module.parameters(recurse=False))
        for child_name, child in module.named_children():
            left += visit(f"{name}.{child_name}" if name else child_name, child)
        container = isinstance(module, (nn.ModuleList, nn.ModuleDict))  # has no forward, so no hook would ever run
        if module is model or container or any(id(p) in tied for p in left) or sum(p.numel() for p in left) < min_params:
            return left
        units.append((name, module))
        return []

    visit("", model)
    return units


def unit_parameters(model, units):
    """[(name, {parameter name: parameter})] for each unit and, last, the root (name ''); each parameter once."""
    names, taken, out = {id(p): n for n, p in model.named_parameters()}, set(), []
    for name, module in units + [("", model)]:
        out.append((name, {names[id(p)]: p for p in module.parameters() if id(p) not in taken}))
        taken |= {id(p) for p in module.parameters()}
    return out


def describe_units(model, cfg, dist):
    """Lines that show the units: parameters, MiB a rank keeps of them (fp32, padded) and MiB once gathered (dtype); equal neighbours on one line."""
    units = find_units(model, cfg.wrap_min_params)
    offloaded = offloaded_units(units, cfg.cpu_offload)
    g, width, groups = cfg.shard_group_size or dist.world_size, DTYPES[cfg.dtype].itemsize, []
    for name, params in unit_parameters(model, units):
        shapes = [p.shape for p in params.values()]
        padded = sum(-(-s[0] // g) * g * s[1:].numel() for s in shapes)
        key = (sum(s.numel() for s in shapes), padded, sum(p.numel() for p in params.values() if p.requires_grad), name in offloaded)
        if not groups or groups[-1][0] != key:
            groups.append((key, []))
        groups[-1][1].append(name or "root")
    yield f"{'unit':44s} {'parameters':>13s} {'trained':>13s} {'kept, MiB':>10s} {'gathered, MiB':>14s}  in"
    for (n, padded, trained, host), names in groups:
        label = names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]} ({len(names)} units, each)"
        yield f"{label:44s} {n:13,d} {trained:13,d} {padded * 4 / g / 2**20:10.2f} {padded * width / 2**20:14.2f}  {'host' if host else dist.device.type} memory"


def offloaded_units(units, fraction):
    """
    The names of the units that live in host memory: `fraction` of them, spread evenly so that copies overlap with
    the others' compute; at 1 the root (name '') too.
    """
    spread = {name for i, (name, _) in enumerate(units) if int((i + 1) * fraction + 1e-9) > int(i * fraction + 1e-9)}
    return spread | ({""} if fraction == 1 else set())


def without_backward(model, units):
    """The first units, as many as are frozen from the input up to their end: backward never reaches them."""
    before, out = [p for module in (model.transformer.wte, model.transformer.wpe) for p in module.parameters()], []
    for name, unit in units:
        before += unit.parameters()
        if any(p.requires_grad for p in before):
            break
        out.append((name, unit))
    return out


def make_mesh(cfg, dist):
    """The ranks as a DeviceMesh: 1-D (shard), or for hybrid_shard 2-D (replicate, shard), neighbours in one shard group."""
    if cfg.strategy == "hybrid_shard":
        shape, names = (dist.world_size // cfg.shard_group_size, cfg.shard_group_size), ("replicate", "shard")
    else:
        shape, names = (dist.world_size,), ("shard",)
    return td.init_device_mesh(dist.device.type, shape, mesh_dim_names=names)


# -----------------------------------------------------------------------------
# parallelize: the order matters, see the numbers


def parallelize(model, cfg, dist, mesh=None):
    """
    Make `model` (a GPT on the meta device) what cfg.strategy says, with memory but without values; returns what to call.

    The GPT itself keeps its names and stays usable for everything but calling it: fully_shard works in place, DDP wraps.
    All ranks; values come next, from `GPT.init_weights(seed, write_full)` or a checkpoint. mesh: make_mesh's, where it
    must exist before (plan.py's simulation).
    """
    # 1) freeze first: FSDP2 reads requires_grad when it groups parameters, DDP when it builds buckets
    freeze(model, cfg.freeze)

    # 2) activation checkpointing and offload, inside what gets compiled and sharded: recomputation then runs
    #    between FSDP's pre- and post-backward hooks, with the unit's parameters already gathered
    for block in model.transformer.h:
        checkpoint_activations(block, cfg.activation_checkpointing, cfg.activation_offload, dist.device)

    if cfg.strategy not in SHARDED:
        # 3) memory, then one graph for the whole model
        model.to_empty(device=dist.device)
        model.lm_head.weight = model.transformer.wte.weight  # to_empty on a plain module unties
        if cfg.strategy == "ddp":
            from torch.nn.parallel import DistributedDataParallel
            device_ids = [dist.device.index] if dist.device.type == "cuda" else None
            model = DistributedDataParallel(model, device_ids=device_ids, gradient_as_bucket_view=True)
            if cfg.reduce_dtype != "float32":
                from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
                model.register_comm_hook(None, getattr(default_hooks, {"bfloat16": "bf16", "float16": "fp16"}[cfg.reduce_dtype] + "_compress_hook"))
        if cfg.compile:
            model.compile()  # in place: the parameters keep their names. DDP after wrapping: dynamo splits at its buckets
        return model

    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
    # 3) compile block by block: FSDP's hooks would break a graph of the whole model
    if cfg.compile:
        for block in model.transformer.h:
            block.compile()

    # 4) shard the units, inner before outer, then the root, which takes what is left (wte and lm_head stay tied there)
    units = find_units(model, cfg.wrap_min_params)
    offloaded = offloaded_units(units, cfg.cpu_offload)
    on_host = {id(p) for name, params in unit_parameters(model, units) if name in offloaded for p in params.values()}
    host_names = {name for name, p in model.named_parameters() if id(p) in on_host}
    shard = partial(fully_shard, mesh=mesh or make_mesh(cfg, dist), mp_policy=MixedPrecisionPolicy(
        param_dtype=DTYPES[cfg.dtype] if cfg.dtype != "float32" else None,  # compute and all-gather; masters stay fp32
        reduce_dtype=DTYPES[cfg.reduce_dtype]))  # left out, gradients would be summed in param_dtype
    for name, module in units + [("", model)]:
        shard(module,
              reshard_after_forward=cfg.strategy != "shard_grad_op" and module is not model,  # the root is needed again at once
              offload_policy=CPUOffloadPolicy(pin_memory=dist.device.type == "cuda") if name in offloaded else OffloadPolicy())

    if cfg.backend == "shm":
        comm = SharedMemory()
        for module in model.modules():
            if is_sharded(module):
                module.set_custom_all_gather(comm)
                module.set_custom_reduce_scatter(comm)

    # 5) materialize: only now does memory exist, and only for this rank's rows. Through the root: this keeps the tie.
    on_host = {id(p) for name, p in model.named_parameters() if name in host_names}
    # Module._apply is what to_empty calls; directly, because a model that is part offloaded needs two devices
    model._apply(lambda t: torch.empty_like(t, device="cpu" if id(t) in on_host else dist.device))

    # frozen from the input up to here: no backward runs through these units, but FSDP2's prefetch would gather them for it
    for _, unit in without_backward(model, units):
        unit.set_unshard_in_backward(False)

    # 6) prefetch: unit i asks for the next n (forward) or the previous n (backward) before it computes
    order = [m for m in model.modules() if m in {u for _, u in units}]  # forward order
    if cfg.prefetch_blocks:
        for i, unit in enumerate(order):
            unit.set_modules_to_forward_prefetch(order[i + 1:i + 1 + cfg.prefetch_blocks])
            unit.set_modules_to_backward_prefetch(order[max(0, i - cfg.prefetch_blocks):i][::-1])
    return model


class SharedMemory:
    """
    backend=shm: FSDP2's all-gathers and reduce-scatters through memory that all ranks of a machine map. A piece is copied in by who
    has it and read by who needs it, with a barrier between; gloo sends it through a socket, copies gathered units once more and
    reduce-scatters by an all-reduce: 7 MB on 2 ranks take it 6.6 and 10 ms, this 2.0 and 2.2.
    """

    def __init__(self):
        self.regions = {}  # process group -> two regions that take turns: no rank writes to one before all have passed the other's barrier

    def allocate(self, size, *, dtype, device):
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op=None, async_op=False):
        """An all-gather (op None): input (n,), output (W n,), whose piece of this rank is the input; or a reduce-scatter: (W n,), (n,)."""
        W, rank = group.size(), group.rank()
        pieces = input_tensor.view(1 if op is None else W, -1)  # (1, n): one for all; (W, n): one for each rank
        nbytes = W * pieces.nbytes
        last, region = self.regions.get(group, [torch.empty(0)] * 2)
        if region.nbytes < nbytes:
            region = shared_region(nbytes, group)
        self.regions[group] = [region, last]
        shared = region[:nbytes].view(input_tensor.dtype).view(W, *pieces.shape)  # [from, to] for a reduce-scatter, [from, 0] for a gather
        for r in range(len(pieces)):
            if op is None or r != rank:
                shared[rank, r] = pieces[r]
        td.barrier(group)
        if op is None:
            for r, piece in enumerate(output_tensor.view(W, -1)):
                if r != rank:
                    piece.copy_(shared[r, 0])
            return
        mine = [pieces[r] if r == rank else shared[r, rank] for r in range(W)]
        torch.add(mine[0], mine[1], out=output_tensor)
        for piece in mine[2:]:
            output_tensor += piece
        if op == td.ReduceOp.AVG:
            output_tensor /= W


def shared_region(nbytes, group):
    """nbytes (uint8) that all ranks of `group`, on one machine, see (collective). It has no name in any file system: nothing is left when they die."""
    fd = os.memfd_create("fsdp") if group.rank() == 0 else None
    if fd is not None:
        os.ftruncate(fd, nbytes)
    box = [f"/proc/{os.getpid()}/fd/{fd}"]
    td.broadcast_object_list(box, group=group, group_src=0, device=torch.device("cpu"))
    region = torch.from_file(box[0], shared=True, size=nbytes, dtype=torch.uint8)
    td.barrier(group)
    if fd is not None:
        os.close(fd)
    return region


def freeze(model, pattern):
    """Parameters whose name matches the regular expression stop training: no gradient, no moments, no reduction."""
    if not pattern:
        return
    try:
        hits = [p for name, p in model.named_parameters() if re.search(pattern, name)]
    except re.error as e:
        raise SystemExit(f"freeze={pattern!r} is not a regular expression: {e}")
    total = len(list(model.parameters()))
    if len(hits) in (0, total):
        raise SystemExit(f"freeze={pattern!r} matches {'every' if hits else 'no'} parameter of {total}; names look like transformer.h.0.attn.c_attn.weight")
    for p in hits:
        p.requires_grad_(False)


def checkpoint_activations(block, mode, offload, device):
    """
    Replace block.forward by one that keeps fewer activations on the device.

    full: keep the block's input, recompute the rest in backward (a third more compute). selective: keep the outputs
    of matrix products and attention too, recompute only what is cheap (norms, GELU, dropout, additions).
    offload: what is kept goes to host memory after forward and comes back for backward.
    The method is patched instead of the module wrapped, so that parameter names do not change.
    """
    if mode != "none":
        kept = partial(create_selective_checkpoint_contexts, selective_policy) if mode == "selective" else None
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, **({"context_fn": kept} if kept else {}))
    if offload:
        inner = block.forward

        def forward(*args, **kwargs):
            with torch.autograd.graph.saved_tensors_hooks(partial(to_host, device), partial(from_host, device)):
                return inner(*args, **kwargs)
        block.forward = forward


def selective_policy(ctx, op, *args, **kwargs):
    """Keep what is expensive to compute again: products and attention."""
    expensive = op.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm) or "_scaled_dot_product" in str(op)
    return CheckpointPolicy.MUST_SAVE if expensive else CheckpointPolicy.PREFER_RECOMPUTE


def to_host(device, t):
    """What autograd saves for backward -> host memory, except parameters: FSDP frees and regathers those itself."""
    if isinstance(t, nn.Parameter) or isinstance(t._base, nn.Parameter):
        return t
    host = torch.empty(t.size(), dtype=t.dtype, layout=t.layout, pin_memory=device.type == "cuda")
    return host.copy_(t)


def from_host(device, t):
    return t if isinstance(t, nn.Parameter) or isinstance(t._base, nn.Parameter) else t.to(device, non_blocking=True)


# -----------------------------------------------------------------------------
# in the step: these act on what the model is


def is_sharded(model):
    return hasattr(model, "set_requires_gradient_sync")  # an FSDPModule; asked without importing FSDP in a single-device run


def autocast(cfg, device):
    """The compute type for single and DDP; FSDP2's MixedPrecisionPolicy already casts, and float32 needs nothing."""
    on = cfg.dtype != "float32" and cfg.strategy not in SHARDED
    return torch.autocast(device.type, DTYPES[cfg.dtype] if on else torch.bfloat16, enabled=on)


def set_grad_sync(model, cfg, last):
    """
    Before each micro-batch's forward: shall its backward communicate?

    'every': reduce-scatter each micro-batch, so that only 1/W of the gradients is ever held. 'last': add up locally,
    communicate once; costs a whole unsharded gradient. shard_grad_op with 'last' also keeps the parameters gathered
    between micro-batches. hybrid_shard all-reduces between its groups only once either way.
    """
    sync = last or cfg.grad_sync == "every"
    if is_sharded(model):
        model.set_requires_gradient_sync(sync)
        if cfg.strategy == "hybrid_shard":
            model.set_requires_all_reduce(last)
        if cfg.strategy == "shard_grad_op" and cfg.grad_sync == "last":
            model.set_reshard_after_backward(last)
    elif cfg.strategy == "ddp":
        model.require_backward_grad_sync = sync  # what DDP's no_sync() context sets


def clip_grad_norm(model, max_norm, dist):
    """
    Scale all gradients so that their global 2-norm is at most max_norm (0: leave them); returns the norm, a 0-d tensor on dist.device.

    Collective: one all-reduce of one number. On local shards: torch.nn.utils.clip_grad_norm_ would do on DTensors,
    but not on gradients of which some live on the GPU and some in host memory, and its dispatch costs more than the sum.
    """
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    local = [g.to_local() if hasattr(g, "to_local") else g for g in grads]  # local shard: (ceil(dim0 / W), ...)
    norm = torch.nn.utils.get_total_norm(local).to(dist.device)
    if is_sharded(model):
        square = norm ** 2
        mesh = grads[0].device_mesh
        td.all_reduce(square, group=mesh.get_group("shard"))  # replicas hold equal gradients: do not count them twice
        norm = square.sqrt()
    if max_norm:
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for device in {g.device for g in local}:
            torch._foreach_mul_([g for g in local if g.device == device], scale.to(device))
    return norm


@contextmanager
def inference(model):
    """Evaluate or generate inside: eval mode, no gradients, and afterwards no gathered weights left (all ranks)."""
    model.eval()
    with torch.no_grad():
        yield
    model.train()
    reshard(model)


def reshard(model):
    """Free gathered parameters. FSDP2 frees none that no backward has used: the root, and with shard_grad_op everything, would go stale."""
    if is_sharded(model):
        for module in model.modules():
            if is_sharded(module):
                module.reshard()


# -----------------------------------------------------------------------------
# whole values, out and in, one tensor at a time


def gather_full(t, dist):
    """The whole of parameter or moment t in rank 0's host memory, None on the others (collective, all ranks)."""
    if hasattr(t, "full_tensor"):
        t = t.detach().to(t.device_mesh.device_type).full_tensor()  # an offloaded shard takes part through the device
    return t.detach().cpu() if dist.rank == 0 else None


def write_full(t, full):
    """Store the whole value `full` into t, of which this rank may hold a few rows; no communication."""
    t = t.detach()
    if hasattr(t, "to_local"):
        from torch.distributed.tensor import distribute_tensor
        full = distribute_tensor(full.to(t.dtype), t.device_mesh, t.placements, src_data_rank=None).to_local()
        t = t.to_local()
    t.copy_(full)


def scatter_full(t, full, dist):
    """Rank 0's whole value `full` into t on every rank (collective); ranks hold one whole tensor at a time, and only on the device."""
    if dist.world_size > 1:
        device = dist.device
        full = full.to(device, t.dtype).contiguous() if dist.rank == 0 else torch.empty(t.shape, dtype=t.dtype, device=device)
        td.broadcast(full, src=0)
    write_full(t, full)

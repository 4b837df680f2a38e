"""
Will it fit, and what will it cost? Memory, communication and time of a config at any world size, before renting it.

    python plan.py config/train_gpt2_xl.py --world_size=64 --gpu_memory=80
    python plan.py config/gpt3_13b.py --gpu_memory=139 --host_memory=128            # one GPU: how much to offload
    python plan.py config/gpt3_175b.py --world_size=1024 --gpu=H100 --bandwidth=450 --network=50
    python plan.py config/train_gpt2_xl.py --world_size=8 --simulate                # check the formulas
    python plan.py --accounting=zero --params=7.5e9 --world_size=64                 # the ZeRO paper's own numbers

Own flags (any --key=value of train.py applies too):
  --world_size=1       GPUs
  --gpu_memory=80      GiB of each; without the flag this machine's GPU, or 80. Up to 90% of it counts as fitting
  --gpus_per_node=8    share host memory and the fast links; hybrid_shard's default group
  --host_memory=0      GiB of a node, for cpu_offload and activation_offload; 0: no limit
  --gpu=NAME           takes the listed bf16 rate of that GPU for the step time
  --flops=RATE         FLOP/s of a GPU instead, as bench.py measures it
  --bandwidth=GB/s     that a GPU sends to others of its node, for the step time; GB = 1e9 bytes
  --network=GB/s       that a GPU sends to other nodes; without it, bandwidth
  --simulate           also run parallelize and one training step on fake tensors at that world size, and compare
  --accounting=zero    2 + 2 + 12 bytes a parameter, as in the ZeRO paper's figure 1; --params=N instead of a config

The formulas below are for rank 0, which holds the most rows. A step is a sequence of moments; the peak is the largest of
them (`timeline`), not the sum of all columns: gradients come as activations go. Not counted: the CUDA context, NCCL's and
cuBLAS's buffers, fragmentation. Counted as without compile, which is not modelled.

Sizes: B sequences of T tokens, C = n_embd, V = vocabulary, L blocks, W ranks, g ranks that share one copy (shard_group_size or
W), A micro-batches a rank and step, d bytes of dtype. Sources: Rajbhandari et al. 2020 (ZeRO); Korthikanti et al. 2022 (activations).
"""

import math
import sys
import time
from dataclasses import replace

import torch

import fsdp
from model import GPT, GPTConfig, explicit_attention

GIB = 2**30
FULL = 0.9  # of a GPU's memory, from which on a plan does not count as fitting: what is not counted needs room too


def build(cfg, vocab_size):
    """The config's GPT on the meta device, frozen as it says: shapes and names, no memory."""
    with torch.device("meta"):
        gpt = GPT(GPTConfig(n_layer=cfg.n_layer, n_head=cfg.n_head, n_embd=cfg.n_embd, block_size=cfg.block_size, bias=cfg.bias, vocab_size=vocab_size))
    fsdp.freeze(gpt, cfg.freeze)
    return gpt


# -----------------------------------------------------------------------------
# memory


class Unit:
    """Element counts of one FSDP unit: n whole, trained of those, `padded` / `padded_trained` to a multiple of g rows, `own` trained of this rank."""

    def __init__(self, name, params, host, g, rank=0):
        self.name, self.host = name, host
        self.n = self.trained = self.padded = self.padded_trained = self.own = 0
        for p in params.values():
            rows, rest = p.shape[0], math.prod(p.shape[1:])
            share = -(-rows // g)  # rows of a rank; the last ranks have fewer, and padding instead
            self.n += rows * rest
            self.padded += share * g * rest
            if p.requires_grad:
                self.trained += rows * rest
                self.padded_trained += share * g * rest
                self.own += max(0, min(rows - rank % g * share, share)) * rest


def find_units(gpt, cfg, dist):
    """[Unit], the root last. single and ddp are one unit that nobody shares."""
    if cfg.strategy not in fsdp.SHARDED:
        return [Unit("", dict(gpt.named_parameters()), False, 1)]
    modules = fsdp.find_units(gpt, cfg.wrap_min_params)
    host = fsdp.offloaded_units(modules, cfg.cpu_offload)
    return [Unit(name, params, name in host, cfg.shard_group_size or dist.world_size, dist.rank) for name, params in fsdp.unit_parameters(gpt, modules)]


def kept(units, g):
    """({'parameters', 'gradients', 'Adam': bytes} on the device, the same in host memory): what a rank keeps, 4 + 4 + 8 bytes an element in fp32."""
    return tuple({"parameters": sum(4 * u.padded // g for u in units if u.host == host),
                  "gradients": sum(4 * u.own for u in units if u.host == host),
                  "Adam": sum(8 * u.own for u in units if u.host == host)} for host in (False, True))


def block_activations(cfg, device, frozen=()):
    """
    (bytes that one block saves from forward to backward, bytes that its backward adds to those).

    A block keeps for backward, in multiples of B T C elements: its input and the sum after attention (r bytes each: the
    compute type under FSDP's policy, fp32 under autocast), the two norms' outputs 1 + 1, q k v 3, attention's output 1,
    c_fc's output 4, GELU's 4 (d bytes each); and attention's log-sum-exp and the norms' statistics in fp32. full keeps the
    input only. selective keeps the input and the products: 3 + 1 (attention) + 1 + 4 + 1. Backward computes the missing
    ones again and needs at most, at the GELU, one gradient of the block's output and one of c_fc's. A frozen matrix
    (frozen: its name ends with one of them) needs no gradient, so nobody keeps its input. Attention that is spelled out
    (model.attend: some CPUs) keeps its T x T probabilities too.
    """
    B, T, C = cfg.batch_size, cfg.block_size, cfg.n_embd
    d = fsdp.DTYPES[cfg.dtype].itemsize
    r = d if cfg.strategy in fsdp.SHARDED else 4
    x, sums = B * T * C, B * cfg.n_head * T * 4
    spared = sum(n for name, n in (("attn.c_attn.weight", 1), ("mlp.c_fc.weight", 1), ("mlp.c_proj.weight", 4)) if any(f.endswith(name) for f in frozen))
    probabilities = B * cfg.n_head * T * T * d if explicit_attention(device.type, fsdp.DTYPES[cfg.dtype], T) else 0
    everything = (2 * r + (14 - spared) * d) * x + sums + 16 * B * T + probabilities
    saved = {"none": everything, "selective": (r + 10 * d) * x + sums, "full": r * x}[cfg.activation_checkpointing]
    again = everything - saved + (2 * d * x if cfg.activation_checkpointing == "selective" else 0)  # the two residual branches' ends
    return saved, again + (r + 4 * d) * x


def timeline(gpt, cfg, dist):
    """
    ([(when, {category: bytes on the device})] for the moments at which memory can peak, bytes of this rank in host memory).

    `loss`: all activations, and the logits three times in fp32 (log-probabilities, their gradient, the logits' gradient).
    `block i`: blocks before it still have their activations, blocks after it gradients already; either inside it, or when
    its gradients are copied for their reduction. `root`: the same for wte, whose gradients from head and embedding are
    added. `step`: all gradients and nothing else (fused AdamW needs no temporaries).
    """
    B, T, C, V, L = cfg.batch_size, cfg.block_size, cfg.n_embd, gpt.config.vocab_size, cfg.n_layer
    d, reduced = fsdp.DTYPES[cfg.dtype].itemsize, fsdp.DTYPES[cfg.reduce_dtype].itemsize
    sharded = cfg.strategy in fsdp.SHARDED
    g = (cfg.shard_group_size or dist.world_size) if sharded else 1
    units = find_units(gpt, cfg, dist)
    here, host = kept(units, g)
    root, blocks = units[-1], units[:-1]
    outside = 2 * B * T * C * d  # the final norm's input and output
    logits = 3 * 4 * B * T * V

    saved, extra = [], 0  # of each block
    trains = any(p.requires_grad for m in (gpt.transformer.wte, gpt.transformer.wpe) for p in m.parameters())
    for block in gpt.transformer.h:
        trains = trains or any(p.requires_grad for p in block.parameters())
        own, added = block_activations(cfg, dist.device, [name for name, p in block.named_parameters() if not p.requires_grad])
        saved.append(own if trains else 0)  # where nothing before or in it trains, backward never comes
        extra = max(extra, added)
    on_host = sum(host.values())
    if cfg.activation_offload:  # what would be kept goes to host memory and comes back block by block
        on_host, extra, saved = on_host + sum(saved), extra + max(saved), [0] * L

    micro_batches = cfg.gradient_accumulation_steps // dist.world_size
    whole = 4 * sum(u.trained for u in units)  # unsharded gradients
    keeps_whole = sharded and micro_batches > 1 and cfg.grad_sync == "last"
    # gradients that are there when a micro-batch begins; DDP's buckets stay from the first backward on
    held = whole if cfg.strategy == "ddp" or keeps_whole or not sharded and micro_batches > 1 else here["gradients"] if micro_batches > 1 else 0
    moments = []

    def moment(when, gradients, gathered, activations):
        moments.append((when, {"parameters": here["parameters"], "gradients": int(gradients), "Adam": here["Adam"], "gathered": int(gathered), "activations": int(activations)}))

    if not sharded:
        block = (root.n - V * C - T * C) // L  # parameters of a block
        copies = d if d < 4 else 0  # autocast's copies of the matrices live as long as the graph does
        moment("loss", held, (root.n - T * C) * copies, sum(saved) + outside + logits)
        for i in reversed(range(L)):
            gradients = max(held, root.trained / root.n * 4 * (V * C + (L - i) * block))
            moment(f"block {i}", gradients, (V * C + (i + 1) * block) * copies, sum(saved[:i + 1]) + extra)
        moment("root", (held + 12 * V * C) if held else here["gradients"] + 8 * V * C, 0, 8 * B * T * C)
        moment("step", max(held, here["gradients"]), 0, 0)
        return moments, on_host

    unit = max(blocks, key=lambda u: u.padded, default=root)  # where units differ: the largest
    zero2, all_blocks, root_whole = cfg.strategy == "shard_grad_op", sum(u.padded for u in blocks) * d, root.n * d
    ahead = max(1, cfg.prefetch_blocks) if g > 1 else 0  # units gathered before they are needed
    moment("loss", held, root_whole + (all_blocks if zero2 else ahead * unit.padded * d), sum(saved) + outside + logits)
    shards = sum(4 * u.own for u in blocks if not u.host)
    for i in reversed(range(L)):
        after = (L - 1 - i) / L  # share of the blocks that have been reduced
        if keeps_whole:
            done = 4 * (root.trained + sum(u.trained for u in blocks) * (1 - after)) + shards * after
        else:
            done = max(held, shards * after)
        done += root.trained * d  # the tied matrix has its gradient of the head by now
        gathered = all_blocks * (1 if keeps_whole else 1 - after) if zero2 else min(1 + ahead, i + 1) * unit.padded * d
        copied = unit.padded_trained * reduced  # the whole unit's gradients, padded, on their way; until the next unit's
        before = copied if i < L - 1 else 0
        # at its GELU only c_proj, a third of the block, has a gradient; at its end all have, and few activations are left
        moment(f"block {i}", done + before + unit.trained * d // 3, root_whole + gathered, sum(saved[:i + 1]) + extra)
        moment(f"block {i}", done + before + unit.trained * d, root_whole + gathered, sum(saved[:i + 1]) + outside)
        moment(f"block {i}", done + (0 if keeps_whole else unit.trained * d) + copied + unit.own * reduced,
               root_whole + gathered - (0 if zero2 and keeps_whole else unit.padded * d), sum(saved[:i]) + outside)
    done = max(held if not keeps_whole else 4 * root.trained, shards)
    moment("root", done + 3 * root.trained * d + unit.padded_trained * reduced, root_whole, outside)
    moment("root", done + root.trained * d + (root.padded_trained + root.own) * reduced, 0, 0)
    moment("step", here["gradients"], root_whole, 0)
    return moments, on_host


# -----------------------------------------------------------------------------
# communication and time


def traffic(gpt, cfg, dist):
    """{collective: bytes of the whole buffers of a step}: the table of fsdp.py in bytes, padding and frozen parameters counted."""
    units, A, strategy = find_units(gpt, cfg, dist), cfg.gradient_accumulation_steps // dist.world_size, cfg.strategy
    d, reduced = fsdp.DTYPES[cfg.dtype].itemsize, fsdp.DTYPES[cfg.reduce_dtype].itemsize
    reductions = A if cfg.grad_sync == "every" else 1
    if strategy == "single":
        return {}
    if strategy == "ddp":
        return {"all_reduce": units[0].trained * reduced * reductions}
    once = {name for name, _ in fsdp.without_backward(gpt, fsdp.find_units(gpt, cfg.wrap_min_params))} | {""}
    forward, scattered = sum(u.padded for u in units) * d, sum(u.padded_trained for u in units) * reduced
    again = sum(u.padded for u in units if u.name not in once) * d
    out = {"all_gather": forward * reductions if strategy == "shard_grad_op" else (forward + again) * A, "reduce_scatter": scattered * reductions}
    if strategy == "hybrid_shard":
        out["all_reduce"] = scattered // cfg.shard_group_size
    return out


def sent(traffic, cfg, dist, per_node):
    """(bytes that this rank sends in a step to ranks of its node, to other nodes): n (g - 1) / g a gather or scatter, twice that an all-reduce, on a ring."""
    W, g = dist.world_size, cfg.shard_group_size or dist.world_size
    inside = outside = 0
    for kind, n in traffic.items():
        ranks, spread = (g, g) if kind != "all_reduce" else (W, W) if cfg.strategy == "ddp" else (W // g, W)
        amount = n * (ranks - 1) / ranks * (2 if kind == "all_reduce" else 1)
        if spread > per_node:  # a ring over nodes is as slow as its slowest link
            outside += amount
        else:
            inside += amount
    return inside, outside


def flops(gpt, cfg, dist):
    """FLOPs of a step and rank: GPT.flops_per_token, less what frozen parameters spare, plus what activation checkpointing computes again."""
    tokens = cfg.gradient_accumulation_steps * cfg.batch_size * cfg.block_size / dist.world_size
    per_token = gpt.flops_per_token() - 2 * sum(p.numel() for p in gpt.parameters() if not p.requires_grad)
    if cfg.activation_checkpointing == "full":  # the blocks' forward once more: a third of all but the head
        per_token += (gpt.flops_per_token() - 6 * gpt.config.vocab_size * cfg.n_embd) / 3
    return per_token * tokens


def step_seconds(work, moved, rate, bandwidth, network):
    """An estimate: computing and communicating overlap, so the longer of the two. None without a rate."""
    if not rate:
        return None
    inside, outside = moved
    communication = inside / (bandwidth * 1e9) + outside / ((network or bandwidth) * 1e9) if bandwidth else 0
    return max(work / rate, communication)


# -----------------------------------------------------------------------------
# the plan


def plan(gpt, cfg, dist, machine=None):
    """One row: what `cfg`, resolved for `dist`, keeps, peaks at and sends. Bytes and seconds of a rank; `host` of a node."""
    m = {**dict(gpu_memory=math.inf, host_memory=math.inf, gpus_per_node=dist.local_world_size, flops=None, bandwidth=None, network=None), **(machine or {})}
    here, _ = kept(find_units(gpt, cfg, dist), (cfg.shard_group_size or dist.world_size) if cfg.strategy in fsdp.SHARDED else 1)
    moments, on_host = timeline(gpt, cfg, dist)
    when, peak = max(moments, key=lambda moment: sum(moment[1].values()))
    moved = sent(traffic(gpt, cfg, dist), cfg, dist, m["gpus_per_node"])
    host, total = on_host * min(dist.world_size, m["gpus_per_node"]), sum(peak.values())
    return dict(strategy=cfg.strategy, **here, gathered=peak["gathered"], activations=peak["activations"], peak=total, when=when, host=host,
                sent=sum(moved), seconds=step_seconds(flops(gpt, cfg, dist), moved, m["flops"], m["bandwidth"], m["network"]),
                fits=total <= FULL * m["gpu_memory"] and host <= m["host_memory"])


def resolve(cfg, world_size, machine, vocab_size, gpt=None):
    """(gpt, resolved cfg, Dist) for rank 0 of world_size GPUs that need not exist. SystemExit for what training would refuse too."""
    dist = fsdp.Dist(world_size=world_size, device=torch.device("cpu" if cfg.device == "cpu" else "cuda"), local_world_size=min(world_size, machine["gpus_per_node"]))
    if cfg.gradient_accumulation_steps % world_size:
        cfg = replace(cfg, gradient_accumulation_steps=-(-cfg.gradient_accumulation_steps // world_size) * world_size)
    # neither needs what it names: planning compiles and sends nothing. auto: what a GPU of today does best
    cfg = fsdp.resolve(replace(cfg, compile=False, backend="auto", dtype="bfloat16" if cfg.dtype == "auto" else cfg.dtype), dist)
    return gpt or build(cfg, vocab_size), cfg, dist


def rows_of(cfg, world_size, machine, vocab_size):
    """A row for each strategy that makes sense at this world size; options that a strategy does not have are left off for it."""
    out, gpt = [], build(cfg, vocab_size)  # the same for all
    for strategy in fsdp.STRATEGIES if world_size > 1 else ("single", "full_shard"):
        own = replace(cfg, strategy=strategy, shard_group_size=cfg.shard_group_size if strategy == "hybrid_shard" else 0)
        if strategy not in fsdp.SHARDED:
            own = replace(own, cpu_offload=0.0, wrap_min_params=0, prefetch_blocks=0)
        if strategy == "single":
            own = replace(own, reduce_dtype="float32", grad_sync="auto")
        if strategy == "hybrid_shard" and (cfg.shard_group_size or machine["gpus_per_node"]) >= world_size and cfg.strategy != strategy:
            continue  # one group: that is full_shard
        out.append(plan(*resolve(own, 1 if strategy == "single" else world_size, machine, vocab_size, gpt), machine))
    return out


def advise(rows, cfg, world_size, machine, vocab_size):
    """One line: the fastest strategy that fits, or the first change that makes one fit."""
    fitting = [r for r in rows if r["fits"] and (r["strategy"] != "single" or world_size == 1)]
    if fitting:
        best = min(fitting, key=lambda r: (r["seconds"] or 0, r["sent"], r["peak"]))
        return f"take --strategy={best['strategy']}: the fastest that fits" + ("" if best["seconds"] else ", by the bytes it sends; for a time pass --gpu or --flops, and --bandwidth")

    def tries():
        sharded = dict(strategy=cfg.strategy if cfg.strategy in fsdp.SHARDED else "full_shard")
        for mode in ("selective", "full"):
            if cfg.activation_checkpointing == "none" and not cfg.activation_offload or mode == "full":  # selective cannot offload
                yield dict(sharded, activation_checkpointing=mode), world_size
        sharded["activation_checkpointing"] = "full"
        for shift in range(1, cfg.batch_size.bit_length()):
            yield dict(sharded, batch_size=cfg.batch_size >> shift, gradient_accumulation_steps=cfg.gradient_accumulation_steps << shift), world_size
        for batch_size in sorted({cfg.batch_size, 1}, reverse=True):
            more = dict(sharded, batch_size=batch_size, gradient_accumulation_steps=cfg.gradient_accumulation_steps * (cfg.batch_size // batch_size))
            for i in range(1, cfg.n_layer + 1):
                yield dict(more, cpu_offload=math.ceil(i / cfg.n_layer * 1000) / 1000), world_size  # rounded up: just i blocks
        for doublings in range(1, 14):
            yield dict(sharded, shard_group_size=0, strategy="full_shard"), world_size << doublings

    for change, world in tries():
        row = plan(*resolve(replace(cfg, **change), world, machine, vocab_size), machine)
        if row["fits"]:
            changed = " ".join(f"--{k}={v}" for k, v in change.items() if v != getattr(cfg, k))
            where = f"{world} GPUs and " if world != world_size else ""
            host = f", {row['host'] / GIB:.0f} GiB of host memory a node" if row["host"] else ""
            return f"nothing fits as it is; {where}{changed} does: {row['peak'] / GIB:.1f} GiB a GPU{host}"
    return "nothing fits, and neither checkpointing, one sequence a GPU, cpu_offload nor more GPUs would change it: a smaller model or block_size is needed"


def size(n):
    """Bytes as people read them."""
    return f"{n / GIB:.2f} GiB" if n >= GIB else f"{n / 2**20:.1f} MiB"


def summary(row):
    """The plan of a training run in one line."""
    parts = ", ".join(f"{key} {size(row[key])}" for key in ("parameters", "gradients", "Adam"))
    return (f"plan: a rank keeps {parts}" + (f" and its node {size(row['host'])} in host memory" if row["host"] else "")
            + f"; peak {size(row['peak'])} at {row['when']}, {size(row['activations'])} of it activations; sends {size(row['sent'])} a step")


def table(rows):
    """Lines of the strategies' rows."""
    timed = any(r["seconds"] for r in rows)
    unit, name = (GIB, "GiB") if max(r["peak"] for r in rows) >= GIB else (2**20, "MiB")
    columns = {"parameters": 11, "gradients": 11, "Adam": 10, "gathered": 10, "activations": 13, "peak": 10, "host": 10, "sent": 11}
    yield (f"{name + ' a GPU':14s}" + "".join(f"{'host/node' if key == 'host' else key:>{width}s}" for key, width in columns.items())
           + (f"{'step, s':>9s}" if timed else "") + "  fits  peak at")
    for r in rows:
        yield (f"{r['strategy']:14s}" + "".join(f"{r[key] / unit:{width},.2f}" for key, width in columns.items())
               + (f"{r['seconds']:9.3f}" if timed else "") + f"  {'yes' if r['fits'] else 'no':4s}  {r['when']}")


def zero_paper(params, world_size):
    """[(stage, bytes a GPU)] by the ZeRO paper's figure 1: fp16 parameters 2 and gradients 2, K = 12 for fp32 parameters and Adam."""
    n = world_size
    return [("baseline (DDP)", 16 * params), ("stage 1", (4 + 12 / n) * params), ("stage 2", (2 + 14 / n) * params), ("stage 3", 16 / n * params)]


# -----------------------------------------------------------------------------
# the simulation


def simulate(cfg, dist, vocab_size):
    """
    ({category: bytes} at the peak of one real training step on fake tensors, its total, the same by formula); nothing is allocated.

    parallelize, the model and train_step are the ones that train; the process group is PyTorch's fake one, which has any world
    size. Device and host memory are one here. DDP's reducer is C++ and needs real memory; its buckets, which hold all gradients
    all the time, are what `single` has with two micro-batches, so that is run instead.
    The trackers are private API of PyTorch, used nowhere else: SystemExit with a clear line where they are gone.
    """
    from unittest.mock import patch

    import torch.distributed as td
    try:
        from torch._subclasses import FakeTensorMode
        from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
        from torch.distributed._tools.mem_tracker import MemTracker
        from torch.testing._internal.distributed.fake_pg import FakeStore
    except ImportError as e:
        raise SystemExit(f"--simulate uses private parts of PyTorch that {torch.__version__} has no more ({e}); the formulas above stand without it")
    import train
    if cfg.strategy == "ddp":
        cfg, dist = replace(cfg, strategy="single", gradient_accumulation_steps=2), replace(dist, world_size=1)
    # two micro-batches need what any number does; with dropout the CPU's attention takes another path than a GPU's
    cfg = replace(cfg, dropout=0.0, gradient_accumulation_steps=min(cfg.gradient_accumulation_steps, 2 * dist.world_size))
    dist = replace(dist, device=torch.device("cpu"))
    moments, on_host = timeline(build(cfg, vocab_size), cfg, dist)
    gpt = build(replace(cfg, freeze=""), vocab_size)  # parallelize freezes
    td.init_process_group("fake", rank=0, world_size=dist.world_size, store=FakeStore())
    try:
        mesh = fsdp.make_mesh(cfg, dist) if cfg.strategy in fsdp.SHARDED else None  # outside the fake mode: it holds real numbers
        # in place, it allocates nothing; but for fake DTensors PyTorch runs it on copies of all whole tensors
        with FakeTensorMode(allow_non_fake_inputs=True), patch.object(torch, "_fused_adamw_", lambda *args, **kwargs: None):
            model = fsdp.parallelize(gpt, cfg, dist, mesh)
            optimizer = train.make_optimizer(gpt, cfg)
            scaler = torch.amp.GradScaler("cpu", enabled=False)

            class Tokens:
                def train(self, step, micro):
                    return tuple(torch.empty(cfg.batch_size, cfg.block_size, dtype=torch.int64) for _ in range(2))
            if mesh:
                tracker = FSDPMemTracker(model, optimizer)
            else:
                tracker = MemTracker()
                tracker.track_external(model, optimizer)
            batch = Tokens().train(0, 0)
            # the trackers ask for this between forwards; as the first global hook it runs before theirs
            hook = torch.nn.modules.module.register_module_forward_pre_hook(lambda module, _: tracker.reset_mod_stats() if module is model else None)
            with tracker:
                # the first one makes Adam's state; one micro-batch is enough for that
                for step, now in enumerate((replace(cfg, gradient_accumulation_steps=dist.world_size), cfg)):
                    *_, batch = train.train_step(model, optimizer, scaler, Tokens(), batch, step, now, dist)
            peak = {getattr(key, "value", key): n for key, n in tracker.get_tracker_snapshot("peak")[dist.device].items()}
            hook.remove()
    finally:
        td.destroy_process_group()
    total = peak.pop("Total")
    return {key: n for key, n in peak.items() if n}, total, on_host + max(sum(m.values()) for _, m in moments)


# -----------------------------------------------------------------------------
# the command


OWN = dict(world_size="1", gpu_memory="", gpus_per_node="8", host_memory="0", gpu="", flops="", bandwidth="", network="", simulate="", accounting="", params="")


def number(own, key, least=0.0):
    try:
        value = float(own[key])
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= least):
        raise SystemExit(f"--{key}={own[key]} must be a number of at least {least:g}")
    return value


def whole(own, key):
    value = number(own, key, 1)
    if value != int(value):
        raise SystemExit(f"--{key}={own[key]} must be a whole number of at least 1")
    return int(value)


def main(argv):
    from train import PEAK_FLOPS, data_dir, load_config, read_meta, split_flags
    if "--help" in argv or "-h" in argv:
        return print(__doc__.strip())
    own, rest = split_flags(argv, OWN)
    W = whole(own, "world_size")
    if own["accounting"]:
        if own["accounting"] != "zero" or not own["params"]:
            raise SystemExit(f"--accounting={own['accounting']} --params={own['params']}: write --accounting=zero --params=7.5e9")
        for stage, n in zero_paper(number(own, "params", 1), W):
            print(f"{stage:15s} {n / 1e9:8.1f} GB a GPU")
        return
    cuda = torch.cuda.is_available()
    if own["gpu"] and own["gpu"] not in PEAK_FLOPS:
        raise SystemExit(f"--gpu={own['gpu']} is not listed; use one of {', '.join(PEAK_FLOPS)}, or --flops with a measured rate")
    machine = dict(
        gpu_memory=number(own, "gpu_memory", 1e-3) * GIB if own["gpu_memory"] else torch.cuda.get_device_properties(0).total_memory if cuda else 80 * GIB,
        host_memory=number(own, "host_memory") * GIB or math.inf, gpus_per_node=whole(own, "gpus_per_node"),
        flops=number(own, "flops", 1) if own["flops"] else PEAK_FLOPS.get(own["gpu"]),
        bandwidth=number(own, "bandwidth", 1e-9) if own["bandwidth"] else None, network=number(own, "network", 1e-9) if own["network"] else None)
    cfg = load_config(rest)
    vocab_size = read_meta(data_dir(cfg.dataset)).get("vocab_size", 50304)
    gpt, resolved, dist = resolve(cfg, W, machine, vocab_size) if cfg.strategy != "single" or W == 1 else resolve(replace(cfg, strategy=""), W, machine, vocab_size)
    n = sum(p.numel() for p in gpt.parameters())
    print(f"{n / 1e6:,.1f}M parameters, {W} GPUs of {machine['gpu_memory'] / GIB:.0f} GiB, {dist.local_world_size} a node; {resolved.dtype}, batch_size {cfg.batch_size} x "
          f"{cfg.block_size:,} tokens, {resolved.gradient_accumulation_steps // W} micro-batch(es) a GPU and step, activation_checkpointing={cfg.activation_checkpointing}, cpu_offload={cfg.cpu_offload:g}")
    if resolved.gradient_accumulation_steps != cfg.gradient_accumulation_steps:
        print(f"gradient_accumulation_steps={cfg.gradient_accumulation_steps} is no multiple of {W}, as training wants: planned with {resolved.gradient_accumulation_steps}")
    rows = rows_of(cfg, W, machine, vocab_size)
    print("\n".join(table(rows)))
    if machine["flops"]:
        print(f"step: an estimate, the longer of computing at {machine['flops'] / 1e12:.0f} TFLOP/s and "
              + (f"sending at {machine['bandwidth']:g} GB/s ({machine['network'] or machine['bandwidth']:g} between nodes)" if machine["bandwidth"] else "no communication (pass --bandwidth)"))
    print(advise(rows, cfg, W, machine, vocab_size))
    if own["simulate"]:
        t0 = time.time()
        peak, total, planned = simulate(resolved, dist, vocab_size)
        print(f"simulated {resolved.strategy}, rank 0 of {W}, in {time.time() - t0:.0f} s: peak {size(total)} (" + ", ".join(f"{k} {size(v)}" for k, v in peak.items())
              + f"); by formula {size(planned)}: {planned / total - 1:+.1%}" + (" (device and host memory together)" if resolved.cpu_offload or resolved.activation_offload else ""))


if __name__ == "__main__":
    fsdp.run(main, sys.argv[1:])

"""
What will a config cost? Memory, traffic and seconds a step, on GPUs that you need not have.

    python plan.py config/train_gpt2_xl.py --world_size=8 --gpu_memory=80
    python plan.py config/gpt3_175b.py --world_size=1024 --gpu=H100 --bandwidth=450 --network=50
    python plan.py config/gpt3_13b.py --gpu_memory=139 --host_memory=128     # how much to offload
    python plan.py config/train_gpt2_xl.py --world_size=8 --gpu_memory=48 --plot=memory.png
    python plan.py --accounting=zero --params=7.5e9 --world_size=64          # the ZeRO paper's sums

The peak is rehearsed (rehearse.py): the real step, on fake tensors, as rank 0 of that many GPUs.
What a rank keeps and sends are closed formulas; the tests compare them with what real ranks did.
Not counted: the CUDA context, NCCL's and cuBLAS's buffers, fragmentation (so a plan fits if it
takes at most 90% of a GPU), and what compiling saves.
"""

import math
import os
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import torch

import float8
import fsdp
from activations import keep_less
from configurator import DTYPES, SHARDED, STRATEGIES, load_config, model_config, resolve
from metrics import PEAK_FLOPS, flops_per_token, optional
from optimizer import MUON_DTYPES, hidden_matrices
from ranks import World, run
from rehearse import KINDS, rehearse, unit_parameters
from train import meta_model, with_vocabulary

GIB = 2**30
FULL = 0.9  # of a GPU's memory: what is not counted needs room too
COUNTED = {}  # FLOPs of a token


def plan(cfg, size, machine):
    """
    cfg.strategy on `size` ranks, a row of the table: bytes and seconds of rank 0, which holds the
    most; `host` is a node's. SystemExit for what training would refuse too.

    machine: gpu_memory, host_memory (bytes), gpus_per_node; flops (FLOP/s), bandwidth, network
    (GB/s), each None where unknown.
    """
    cfg, world = place(cfg, size, machine)
    model = meta_model(cfg)
    timeline, marks = rehearse(cfg, world)
    total = timeline[:, 1:].sum(axis=1)  # on the device
    top = int(total.argmax())
    peak = dict(zip(KINDS, timeline[top]))
    host = timeline[:, 0].max() * min(size, machine.gpus_per_node)
    moved = sent(traffic(model, cfg, world), cfg, world, machine.gpus_per_node)
    return dict(
        kept(model, cfg, world)[0], optimizer=peak["optimizer"], gathered=peak["gathered"],
        activations=peak["activations"], peak=total[top], host=host, sent=sum(moved),
        seconds=step_seconds(flops(cfg, world) if machine.flops else 0, moved, machine),
        fits=total[top] <= FULL * machine.gpu_memory and host <= machine.host_memory,
        when=[where for start, where in marks if start < top][-1],
        strategy=cfg.strategy, timeline=timeline, marks=marks)


def place(cfg, size, machine):
    """(cfg resolved for size GPUs, their World); a plan neither compiles nor sends."""
    device = torch.device("cpu" if cfg.device == "cpu" else "cuda")
    world = World(size=size, device=device, local_size=min(size, machine.gpus_per_node))
    multiple = math.ceil(cfg.gradient_accumulation_steps / size) * size  # as training wants it
    cfg = replace(cfg, gradient_accumulation_steps=multiple, compile=False, backend="auto")
    if cfg.dtype == "auto" and device.type == "cuda":
        cfg = replace(cfg, dtype="bfloat16")  # the best of today's GPUs; none is here to ask
    return resolve(cfg, world, distributed=cfg.strategy != "single"), world


# ---------- closed formulas: what a rank keeps and sends, and how long a step takes at best 


def units_of(model, cfg, world):
    """[unit], the root last: elements that a rank keeps, padded (n), those that train (trained),
    its own of these (own), Muon's, padded (muon); bytes of optimizer state (state), of all ranks'
    parameters as gathered (gathered). single and ddp have one unit, of which a rank keeps all."""
    hidden = hidden_matrices(model, cfg)
    in_8_bits = {m.weight for m in float8.linears(model) if cfg.dtype == "float8"}
    modules, g = [], 1
    if cfg.strategy in SHARDED:
        modules, g = fsdp.find_units(model, cfg.wrap_min_params), cfg.shard_group_size or world.size
    on_host, units = fsdp.offloaded_units(modules, cfg.cpu_offload), []
    for name, params in unit_parameters(model, modules):
        u = SimpleNamespace(name=name, on_host=name in on_host, g=g, n=0, trained=0, own=0,
                            muon=0, state=0, gathered=0)
        for p in params.values():
            rows, width = math.ceil(p.shape[0] / g), math.prod(p.shape[1:])
            own_rows = max(0, min(rows, p.shape[0] - world.rank % g * rows))  # the last have fewer
            u.n += rows * width
            u.gathered += rows * width * g * (1 if p in in_8_bits else DTYPES[cfg.dtype].itemsize)
            u.trained += rows * width * p.requires_grad
            u.own += own_rows * width * p.requires_grad
            u.muon += rows * width * (p in hidden)
            u.state += own_rows * width * p.requires_grad * (4 if p in hidden else 8)
        units.append(u)
    return units


def describe_units(cfg, size, machine):
    """Lines to print: FSDP's units, equal ones together."""
    cfg, world = place(cfg, size, machine)
    model, alike = meta_model(cfg), {}
    for u in units_of(model, cfg, world):
        alike.setdefault((u.n, u.on_host), []).append(u)
    for u, *others in alike.values():
        names = f"{len(others) + 1} units like {u.name}" if others else u.name or "the root unit"
        yield (f"{names}: {4 * u.n / 2**20:,.1f} MiB of parameters a rank"
               f"{', in host memory' * u.on_host}; {u.gathered / 2**20:,.1f} MiB gathered")


def kept(model, cfg, world):
    """({kind: bytes on the device}, {kind: bytes in host memory}) of a rank: fp32 parameters,
    gradients, and optimizer state: AdamW's two moments, Muon's one."""
    none = dict(parameters=0, gradients=0, optimizer=0)
    device_and_host = Counter(none), Counter(none)
    for u in units_of(model, cfg, world):
        state = dict(parameters=4 * u.n, gradients=4 * u.own, optimizer=u.state)
        device_and_host[u.on_host].update(state)
    return device_and_host


def traffic(model, cfg, world):
    """{collective: bytes of its whole buffers in a step}; docs/fsdp.md has the table."""
    if cfg.strategy == "single":
        return {}
    units, A = units_of(model, cfg, world), cfg.gradient_accumulation_steps // world.size
    syncs = A if cfg.grad_sync == "every" else 1
    gradients = sum(u.trained for u in units) * DTYPES[cfg.reduce_dtype].itemsize  # a shard's
    back = sum(u.muon for u in units) * MUON_DTYPES[cfg.dtype].itemsize  # to every copy's ranks
    there = back * units[0].g / world.size if cfg.strategy in SHARDED else 0  # inside a copy
    muon = {"all_to_all": there + back} if back else {}  # a mean over the ranks
    if cfg.strategy == "ddp":
        return {"all_reduce": gradients * syncs, **muon}
    if cfg.strategy == "shard_grad_op":
        gathered = sum(u.gathered for u in units) * syncs
    else:  # gathered again for backward, but for the root, which is still there
        modules = fsdp.find_units(model, cfg.wrap_min_params)
        once = {name for name, _ in fsdp.without_backward(model, modules)} | {fsdp.ROOT}
        gathered = sum(u.gathered * (1 if u.name in once else 2) for u in units) * A
    out = dict(all_gather=gathered, reduce_scatter=gradients * units[0].g * syncs, **muon)
    if cfg.strategy == "hybrid_shard":
        out["all_reduce"] = gradients  # once a step
    return out


def sent(traffic, cfg, world, per_node):
    """(bytes a rank sends inside its node, to other nodes): on a ring of n, (n - 1) / n of the
    buffer, twice for an all-reduce. A ring across nodes is as slow as its slowest link."""
    g, amounts = cfg.shard_group_size or world.size, [0, 0]
    for kind, size in traffic.items():
        n, span = g, g
        if kind == "all_reduce" and cfg.strategy == "hybrid_shard":  # one rank of each group
            n, span = world.size // g, world.size
        elif kind == "all_to_all":
            n = span = world.size
        times = 2 if kind == "all_reduce" else 1
        amounts[span > per_node] += times * size * (n - 1) / n
    return tuple(amounts)


def flops(cfg, world):
    """FLOPs of a rank in a step, with those of what is computed again for backward."""
    keys = model_config(cfg), cfg.freeze, cfg.activation_checkpointing, cfg.loss_chunks
    if repr(keys) not in COUNTED:  # counting takes seconds, and strategies do not change it
        model = meta_model(cfg)
        keep_less(model, replace(cfg, activation_offload=False), torch.device("meta"))
        COUNTED[repr(keys)] = flops_per_token(model)
    tokens = cfg.gradient_accumulation_steps * cfg.batch_size * cfg.block_size / world.size
    return COUNTED[repr(keys)] * tokens


def step_seconds(work, moved, machine):
    """The longer of computing and communicating, which overlap; None if machine has no rate."""
    if not machine.flops:
        return None
    bandwidth = machine.bandwidth or math.inf
    network = machine.network or bandwidth
    return max(work / machine.flops, (moved[0] / bandwidth + moved[1] / network) / 1e9)


def zero_paper(params, n):
    """{stage: bytes a GPU} in Rajbhandari et al. 2020, figure 1: fp16 parameters and gradients,
    2 + 2 bytes, and 12 of fp32 parameters and Adam."""
    return {"baseline (DDP)": 16 * params, "stage 1": (4 + 12 / n) * params,
            "stage 2": (2 + 14 / n) * params, "stage 3": 16 / n * params}


# ---------- which strategy, and what to change where none fits ----------------


def variants(cfg, size, machine):
    """[(cfg, ranks)] for each strategy that differs, without the options that it lacks."""
    group, out = cfg.shard_group_size or machine.gpus_per_node, []
    for strategy in STRATEGIES if size > 1 else ("single", "full_shard"):
        own = replace(cfg, strategy=strategy)
        if strategy == "ddp" and cfg.dtype == "float8":
            continue
        if strategy != "hybrid_shard":
            own = replace(own, shard_group_size=0)
        elif cfg.strategy != strategy and (group >= size or size % group):
            continue  # one group is full_shard
        if strategy not in SHARDED:
            own = replace(own, cpu_offload=0.0, wrap_min_params=0, prefetch_blocks=0)
        if strategy == "single":
            own = replace(own, reduce_dtype="float32", grad_sync="auto")
        out.append((own, 1 if strategy == "single" else size))
    return out


def advise(rows, cfg, size, machine):
    """One line: the fastest strategy that fits, or the first change of the ladder that does. Its
    rehearsals are printed."""
    fitting = [r for r in rows if r["fits"] and (r["strategy"] != "single" or size == 1)]
    if fitting:
        simple = STRATEGIES.index
        best = min(fitting, key=lambda r: (r["seconds"] or 0, r["sent"], simple(r["strategy"])))
        by = "" if best["seconds"] else ", by the bytes it sends (--gpu and --bandwidth tell times)"
        return f"take --strategy={best['strategy']}: the fastest that fits{by}"
    print("nothing fits as it is; rehearsing changes:", flush=True)
    for change in ladder(cfg):
        new = replace(cfg, **change)
        wanted = cfg.strategy if cfg.strategy in SHARDED and size > 1 else "full_shard"
        if size == 1 and not new.cpu_offload:
            wanted = "single"
        new, ranks = [v for v in variants(new, size, machine) if v[0].strategy == wanted][0]
        new, world = place(new, ranks, machine)
        if kept(meta_model(new), new, world)[0].total() > FULL * machine.gpu_memory:
            continue  # no need to rehearse
        row = plan(new, ranks, machine)
        words = " ".join(f"--{key}={getattr(new, key)}" for key in ["strategy", *change])
        host = f", {row['host'] / GIB:.0f} GiB of host memory a node" if row["host"] else ""
        print(f"  {words}: {row['peak'] / GIB:.1f} GiB a GPU{host}", flush=True)
        if row["fits"]:
            hint = " (with few micro-batches and a large batch_size)" if new.cpu_offload else ""
            return f"nothing fits as it is; {words} does{hint}"
    return "nothing fits, whatever is changed: take more GPUs, or a smaller model or block_size"


def ladder(cfg):
    """
    Changes to try, the cheapest first: the loss in chunks, checkpointing, smaller batches (and so
    more micro-batches), host memory. The last two are tried apart first: what is offloaded wants
    few micro-batches and a large batch.
    """
    chunks = {} if cfg.loss_chunks else dict(loss_chunks=8)
    change = dict(chunks, activation_checkpointing="full")
    if chunks:
        yield chunks
    if cfg.activation_checkpointing == "none" and not cfg.activation_offload:
        yield dict(chunks, activation_checkpointing="selective")
    if cfg.activation_checkpointing != "full":
        yield change
    batch, smaller = cfg.batch_size, {}
    while batch > 1:
        batch //= 2
        as_many_tokens = cfg.gradient_accumulation_steps * cfg.batch_size // batch
        smaller = dict(batch_size=batch, gradient_accumulation_steps=as_many_tokens)
        yield {**change, **smaller}
    for tenths in range(1, 11):
        yield dict(change, cpu_offload=tenths / 10)
    yield dict(change, cpu_offload=1.0, **smaller)


# ---------- what is shown: the table and the picture --------------------------

COLUMNS = dict(parameters=11, gradients=10, optimizer=10, gathered=9, activations=12, peak=9,
               host=10, sent=10)


def table(todo, machine):
    """Plan each (cfg, ranks) and print its row as soon as it is there; returns the rows."""
    small = 16 * sum(p.numel() for p in meta_model(todo[0][0]).parameters()) < GIB
    unit, name = (2**20, "MiB") if small else (GIB, "GiB")
    heads = "".join(f"{'host/node' if key == 'host' else key:>{w}s}" for key, w in COLUMNS.items())
    print(f"{name + ' a GPU':13s}{heads}{'step, s':>12s}  fits  peak at", flush=True)
    rows = []
    for cfg, size in todo:
        row = plan(cfg, size, machine)
        cells = "".join(f"{row[key] / unit:{w},.2f}" for key, w in COLUMNS.items())
        seconds = f"{row['seconds']:.3f}" if row["seconds"] else "-"
        fits = "yes" if row["fits"] else "no"
        print(f"{cfg.strategy:13s}{cells}{seconds:>12s}  {fits:4s}  {row['when']}", flush=True)
        rows.append(row)
    return rows


def draw(rows, machine, title, path):
    """A panel for each strategy: what a GPU holds during a step's last micro-batch, stacked."""
    optional("matplotlib", "--plot")
    from matplotlib.figure import Figure
    colors = ("#2f4b7c", "#665191", "#d45087", "#ff7c43", "#ffc971")
    figure = Figure(figsize=(3 * len(rows) + 1.5, 4.2), layout="constrained")
    panels = figure.subplots(1, len(rows), sharey=True, squeeze=False)[0]
    limit = machine.gpu_memory / GIB
    for panel, row in zip(panels, rows):
        x, stack = progress(row)
        panel.stackplot(x, stack.T / GIB, labels=KINDS[1:], colors=colors, lw=0)
        panel.axhline(limit, color="black", lw=1.2, ls="--")
        panel.text(3.55, limit, f"GPU: {limit:.0f} GiB", fontsize=8, ha="right", va="bottom")
        panel.set_title(f"{row['strategy']}\npeak {row['peak'] / GIB:.1f} GiB", fontsize=11)
        panel.set_xticks((0, 1, 1.4, 3.2, 3.6), minor=True)
        panel.set_xticks((0.5, 1.2, 2.3, 3.4), ("forward", "loss", "backward", "step"), fontsize=9)
        panel.tick_params("x", which="major", length=0)
        panel.grid(which="minor", axis="x", color="black", alpha=0.15)
        panel.spines[["top", "right"]].set_visible(False)
        panel.set_xlim(0, 3.6)
    panels[0].set_ylabel("GiB on a GPU")
    figure.suptitle(title)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right center", frameon=False)
    figure.savefig(path, dpi=150)
    return figure


def progress(row):
    """(x, bytes of each kind on the device) of the last micro-batch: its forward, loss, backward
    and the optimizer's step begin at x = 0, 1, 1.4 and 3.2, which is about how long they take."""
    start = {where: n for n, where in row["marks"]}  # the last micro-batch's overwrite the others
    after_loss = min(n for n in start.values() if n > start["backward, head"])
    phases = (start["forward"], start["forward, head"], after_loss, start["optimizer"],
              len(row["timeline"]))
    stack = row["timeline"][phases[0]:, 1:]
    return np.interp(np.arange(phases[0], phases[-1]), phases, (0, 1, 1.4, 3.2, 3.6)), stack


# ---------- the command -------------------------------------------------------


def parse(argv):
    """(the machine that plan takes, with all own flags; the other arguments)."""
    parser = ArgumentParser(
        description=__doc__, formatter_class=RawDescriptionHelpFormatter, allow_abbrev=False,
        usage="python plan.py [config files] [flags below] [--key=value of train.py]")
    parser.error = lambda message: sys.exit(message.removeprefix("argument "))  # in one line
    for flag, kind, default, text in (
        ("world_size", int, 1, "GPUs"),
        ("gpu_memory", float, None, "GiB of each; without it this machine's GPU's, or 80"),
        ("gpus_per_node", int, 8, "GPUs that share host memory and the fast links"),
        ("host_memory", float, None, "GiB of a node, for cpu_offload and activation_offload"),
        ("gpu", str, None, "for the step's time, one of: " + ", ".join(PEAK_FLOPS)),
        ("mfu", float, 0.45, "fraction of the data sheet's FLOP/s to expect of that GPU"),
        ("flops", float, None, "FLOP/s of a GPU instead, as bench.py measures it"),
        ("bandwidth", float, None, "GB/s (1e9 bytes) that a GPU sends inside its node"),
        ("network", float, None, "GB/s that a GPU sends to other nodes; else as inside"),
        ("plot", str, None, "FILE.png for a picture of a step's memory; .svg and .pdf too"),
        ("accounting", str, None, "zero: 2 + 2 + 12 bytes a parameter, as in the ZeRO paper"),
        ("params", float, None, "parameters, for --accounting"),
    ):
        parser.add_argument("--" + flag, type=kind, default=default, help=text, metavar="...")
    own, rest = parser.parse_known_args(argv)
    for key, value in vars(own).items():
        if isinstance(value, (int, float)) and not 0 < value < math.inf:
            raise SystemExit(f"--{key}={value}: pass a finite number above 0")
    if own.gpu and own.gpu not in PEAK_FLOPS:
        raise SystemExit(f"--gpu={own.gpu} is not listed; use one of {', '.join(PEAK_FLOPS)}, or "
                         "--flops with a measured rate")
    if own.plot:  # now, not after the rehearsals
        optional("matplotlib.figure", "--plot")
        folder, kind = os.path.dirname(own.plot) or ".", os.path.splitext(own.plot)[1]
        if not os.path.isdir(folder) or kind not in (".png", ".svg", ".pdf"):
            raise SystemExit(f"--plot={own.plot}: pass a .png, .svg or .pdf file in a folder that "
                             "exists")
    if own.accounting and (own.accounting != "zero" or not own.params):
        raise SystemExit(f"--accounting={own.accounting}: write --accounting=zero --params=7.5e9")
    own.given_flops = own.flops
    own.host_memory = (own.host_memory or math.inf) * GIB  # from here on in bytes
    if torch.cuda.is_available() and not own.gpu_memory:
        own.gpu_memory = torch.cuda.get_device_properties(0).total_memory / GIB
    own.gpu_memory = (own.gpu_memory or 80) * GIB
    if own.gpu and not own.flops:
        own.flops = own.mfu * PEAK_FLOPS[own.gpu]
    return own, rest


def main(argv):
    machine, rest = parse(argv)
    size = machine.world_size
    if machine.accounting:
        for stage, n in zero_paper(machine.params, size).items():
            print(f"{stage:15s} {n / 1e9:8.1f} GB a GPU")
        return
    cfg = with_vocabulary(load_config(rest))
    todo = variants(cfg, size, machine)
    for one in todo:
        placed, _ = place(*one, machine)  # is every one allowed? asked before the first rehearsal
    n = sum(p.numel() for p in meta_model(cfg).parameters()) / 1e6
    micro_batches = placed.gradient_accumulation_steps // size
    print(f"{n:,.1f}M parameters, {size} GPUs of {machine.gpu_memory / GIB:.0f} GiB, "
          f"{placed.dtype}; {micro_batches} x batch_size {cfg.batch_size} x {cfg.block_size:,} "
          "tokens a GPU and step")
    if micro_batches * size != cfg.gradient_accumulation_steps:
        print(f"gradient_accumulation_steps={cfg.gradient_accumulation_steps} is no multiple of "
              f"{size}, as training wants it: planned with {micro_batches * size}")
    for line in describe_units(*todo[-1], machine):
        print(line)
    rows = table(todo, machine)
    if machine.flops:
        rate = f"{machine.flops / 1e12:.0f} TFLOP/s"
        if not machine.given_flops:
            rate += f" ({machine.mfu:.0%} of {machine.gpu}'s data sheet, see --mfu)"
        links = "no communication (pass --bandwidth)"
        if machine.bandwidth:
            network = machine.network or machine.bandwidth
            links = f"sending {machine.bandwidth:g} GB/s, {network:g} between nodes"
        print(f"step: an estimate, the longer of computing at {rate} and {links}")
    if machine.plot:
        shown = [r for r in rows if r["strategy"] != "single" or size == 1]  # else it is ddp's twin
        title = f"{n:,.0f}M parameters on {size} GPUs: what a GPU holds during a training step"
        draw(shown, machine, title, machine.plot)
        print(f"wrote {machine.plot}")
    print(advise(rows, cfg, size, machine))


if __name__ == "__main__":
    run(main, sys.argv[1:])

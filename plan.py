"""
What will a config cost? Memory and traffic of a step, on GPUs that you need not have.

    python plan.py config/train_gpt2_xl.py --world_size=8 --gpu_memory=80
    python plan.py config/gpt3_13b.py --gpu_memory=139 --host_memory=128 --cpu_offload=0.4
    python plan.py config/train_gpt2_xl.py --world_size=8 --gpu_memory=48 --plot=memory.png

Every number is rehearsed (rehearse.py): the real step, on fake tensors, as rank 0 of that many
GPUs. Not counted: the CUDA context, NCCL's and cuBLAS's buffers, fragmentation (so a plan fits if
it takes at most 90% of a GPU), and what compiling saves.
"""

import math
import os
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from contextlib import nullcontext, suppress
from dataclasses import replace

import numpy as np
import torch

import fsdp
from configurator import STRATEGIES, load_config, resolve
from metrics import optional
from ranks import World, run
from rehearse import KINDS, rehearse
from train import meta_model, with_vocabulary

LARGEST = 16384  # GPUs: a rehearsal cuts each parameter into as many pieces
COLUMNS = (*KINDS[1:], "peak", "host", "sent")


def plan(cfg, world, machine):
    """A row of the table: bytes that rank 0 holds at its peak, by kind, and where that is; bytes of
    its node's host memory; bytes that it sends in a step."""
    timeline, marks, collectives = rehearse(cfg, world)
    total = timeline[:, 1:].sum(axis=1)  # on the device
    top = int(total.argmax())
    host = timeline[:, 0].max() * world.local_size
    sent = 0
    for (kind, n), size in collectives.items():  # on a ring, where an all-reduce goes round twice
        sent += size * (n - 1) / n * (2 if kind == "all_reduce" else 1)
    fits = total[top] <= 0.9 * machine.gpu_memory and host <= machine.host_memory
    return dict(zip(KINDS[1:], timeline[top, 1:]), peak=total[top], host=host, sent=sent, fits=fits,
                where=[where for start, where in marks if start < top][-1],
                strategy=cfg.strategy, timeline=timeline, marks=marks)


def place(cfg, size, machine):
    """(cfg resolved for `size` GPUs, their World); SystemExit for what cannot be combined."""
    device = torch.device("cpu" if cfg.device == "cpu" else "cuda")
    world = World(size=size, device=device, local_size=min(size, machine.gpus_per_node))
    multiple = math.ceil(cfg.gradient_accumulation_steps / size) * size  # as training wants it
    group = cfg.shard_group_size if cfg.strategy == "hybrid_shard" else 0
    cfg = replace(cfg, gradient_accumulation_steps=multiple, shard_group_size=group, compile=False)
    if cfg.dtype == "auto" and device.type == "cuda":
        cfg = replace(cfg, dtype="bfloat16")  # the best of today's GPUs; none is here to ask
    return resolve(cfg, world, distributed=cfg.strategy != "single"), world


def variants(cfg, size, machine):
    """[(cfg, World)] of --strategy, or of all that the keys allow; they must allow the config's."""
    if machine.strategy:
        return [place(replace(cfg, strategy=machine.strategy), size, machine)]
    own, out = cfg.strategy or "full_shard", []
    for strategy in STRATEGIES if size > 1 else ("single", "full_shard"):
        ranks = 1 if strategy == "single" else size
        with nullcontext() if strategy == own else suppress(SystemExit):
            one, world = place(replace(cfg, strategy=strategy), ranks, machine)
            if strategy == own or one.shard_group_size < size:  # one group is full_shard
                out.append((one, world))
    return out


def draw(rows, machine, unit, name, title, path):
    """A panel for each strategy: what a GPU holds during a step's last micro-batch, stacked."""
    figure = optional("matplotlib.figure", "--plot").Figure(
        figsize=(3 * len(rows) + 1.5, 4.2), layout="constrained")
    panels = figure.subplots(1, len(rows), sharey=True, squeeze=False)[0]
    highest = max(row["peak"] for row in rows)
    for panel, row in zip(panels, rows):
        start = {where: n for n, where in row["marks"]}  # the last micro-batch's overwrite others
        marks = ("forward", "forward, head", "backward, head", "optimizer")
        phases = [*map(start.get, marks), len(row["timeline"]) - 1]
        # widths as the phases' durations, roughly
        x = np.interp(range(phases[0], phases[-1] + 1), phases, (0, 1, 1.4, 3.2, 3.6))
        panel.stackplot(x, row["timeline"][phases[0]:, 1:].T / unit, labels=KINDS[1:], lw=0,
                        colors=("#2f4b7c", "#665191", "#d45087", "#ff7c43", "#ffc971"))
        if machine.gpu_memory < 3 * highest:  # else it would press the rest flat
            limit = machine.gpu_memory / unit
            panel.axhline(limit, color="black", ls="--", label=f"GPU: {limit:.0f} {name}")
        panel.set_xticks((0.5, 1.2, 2.3, 3.4), ("forward", "loss", "backward", "step"), fontsize=9)
        panel.vlines((1, 1.4, 3.2), 0, highest / unit, color="black", alpha=0.15, lw=0.8)
        panel.set(xlim=(0, 3.6), ylim=(0, None),
                  title=f"{row['strategy']}\npeak {row['peak'] / unit:,.1f} {name}")
    panels[0].set_ylabel(f"{name} on a GPU")
    figure.suptitle(f"{title}: what a GPU holds during a training step")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right center", frameon=False)
    figure.savefig(path, dpi=150)
    return figure


def parse(argv):
    """(the machine, which is all own flags; the other arguments)."""
    parser = ArgumentParser(
        description=__doc__, formatter_class=RawDescriptionHelpFormatter, allow_abbrev=False,
        usage="python plan.py [config files] [flags below] [--key=value of train.py]")
    parser.error = lambda message: sys.exit(message.removeprefix("argument "))  # in one line
    gpu = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else 0
    add = parser.add_argument
    add("--world_size", type=int, default=1, help=f"GPUs, at most {LARGEST:,}")
    add("--strategy", choices=STRATEGIES, help="only this one; else all that the keys allow")
    add("--gpus_per_node", type=int, default=8, help="GPUs that share host memory")
    add("--gpu_memory", type=float, default=gpu / 2**30 or 80, help="GiB (this machine's, or 80)")
    add("--host_memory", type=float, default=math.inf, help="GiB of a node")
    add("--plot", metavar="FILE.png", help="draw a step's memory; .svg, .pdf too")
    own, rest = parser.parse_known_args(argv)
    for key, value in vars(own).items():
        if key not in ("plot", "strategy") and not value > 0:
            raise SystemExit(f"--{key}={value}: pass a number above 0")
    if own.world_size > LARGEST:
        raise SystemExit(f"--world_size={own.world_size}: pass at most {LARGEST}")
    if own.plot:  # now, not after the rehearsals
        optional("matplotlib.figure", "--plot")
        a_picture = own.plot.endswith((".png", ".svg", ".pdf"))
        if not a_picture or not os.path.isdir(os.path.dirname(own.plot) or "."):
            raise SystemExit(f"--plot={own.plot}: pass a .png, .svg or .pdf in a folder you have")
    own.gpu_memory *= 2**30  # from here on in bytes
    own.host_memory *= 2**30
    return own, rest


def main(argv):
    machine, rest = parse(argv)
    size, cfg = machine.world_size, with_vocabulary(load_config(rest, vars(machine)))
    todo, model = variants(cfg, size, machine), meta_model(cfg)
    units = [*fsdp.find_units(model, cfg.wrap_min_params), ("the root", model)]
    n, first = (sum(p.numel() for p in module.parameters()) for module in (model, units[0][1]))
    title = f"{n / 1e6:,.1f}M parameters on {size} GPUs"
    print(f"{title} of {machine.gpu_memory / 2**30:.0f} GiB, {todo[-1][0].dtype}; {len(units) - 1} "
          f"units and the root; {units[0][0]} has {first / 1e6:,.2f}M parameters")
    steps = todo[-1][0].gradient_accumulation_steps  # single's may differ
    print(f"planned with gradient_accumulation_steps={steps}, a multiple of {size}: {steps // size}"
          f" x batch_size {cfg.batch_size} x {cfg.block_size:,} tokens a GPU and step")

    unit, name = (2**30, "GiB") if n >= 2**26 else (2**20, "MiB")  # 16 bytes a parameter
    heads = "".join(f"{'host/node' if key == 'host' else key:>12s}" for key in COLUMNS)
    print(f"{name + ' a GPU':13s}{heads}  fits  peak at", flush=True)
    rows = []
    for placed in todo:
        row = plan(*placed, machine)
        cells = "".join(f"{row[key] / unit:12,.2f}" for key in COLUMNS)
        fits = "yes" if row["fits"] else "no"
        print(f"{row['strategy']:13s}{cells}  {fits:4s}  {row['where']}", flush=True)
        if row["strategy"] != "single" or size == 1:  # else it is ddp's twin
            rows.append(row)

    if machine.plot:
        draw(rows, machine, unit, name, title, machine.plot)
        print(f"wrote {machine.plot}")
    fitting = [row["strategy"] for row in rows if row["fits"]]  # simplest first
    print(f"take --strategy={fitting[0]}, the simplest that fits" if fitting else
          "nothing fits: try --loss_chunks=8, --activation_checkpointing=selective, then full, a "
          "smaller --batch_size, --cpu_offload=0.25 and up; or more GPUs")


if __name__ == "__main__":
    run(main, sys.argv[1:])

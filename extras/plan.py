"""
What will a config cost? Memory and traffic of a step, on GPUs that you need not have.

    python -m extras.plan config/train_gpt2_xl.py --world_size=8 --gpu_memory=80
    python -m extras.plan config/gpt3_13b.py --gpu_memory=139 --host_memory=256 --cpu_offload=0.4
    python -m extras.plan config/llama2_7b.py --world_size=8 --plot=memory.png
    python -m extras.plan config/quickstart.py --world_size=2 --strategy=full_shard --events

Every number is rehearsed (rehearse.py): the real step, on fake tensors, as rank 0 of that
many GPUs. Not counted: the CUDA context, NCCL's and cuBLAS's buffers, fragmentation (so a
plan fits if it takes at most 90% of a GPU), and what compiling saves.
"""

import math
import os
import re
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from dataclasses import replace
from itertools import groupby

import numpy as np
import torch

from configurator import STRATEGIES, load_config, package, resolve
from extras.rehearse import KINDS, rehearse
from fsdp import find_units
from ranks import World, run
from train import meta_model, with_vocabulary

LARGEST = 16384  # GPUs: a rehearsal cuts each parameter into as many pieces
GIB = 2**30
MIB = 2**20
ON_DEVICE = KINDS[1:]  # KINDS[0] is host memory
COLUMNS = (*ON_DEVICE, "peak", "host", "sent")


# ---------- a row of the table ------------------------------------------------


def plan(cfg, world, machine):
    """A row: the bytes that rank 0 holds at its peak, by kind, and where in the step that is;
    bytes of its node's host memory; bytes that it sends in a step."""
    timeline, marks, events = rehearse(cfg, world)
    on_device = timeline[:, 1:].sum(axis=1)
    top = int(on_device.argmax())
    peak = on_device[top]
    host = timeline[:, 0].max()
    if cfg.checkpoint == "sharded":
        # A save copies this rank's rows of parameters and moments: what there is at rest.
        rest = dict(zip(KINDS, timeline[0]))
        host += rest["host"] + rest["parameters"] + rest["optimizer"]
    host *= world.local_size  # its neighbours hold as much
    marks_before = [where for start, where in marks if start < top]

    row = dict(zip(ON_DEVICE, timeline[top, 1:]))
    row["strategy"] = cfg.strategy
    row["peak"] = peak
    row["where"] = marks_before[-1]
    row["host"] = host
    row["sent"] = sum(event.times * event.sent() for event in events)
    # A tenth is left for what is not counted.
    fits_device = peak <= 0.9 * machine.gpu_memory
    row["fits"] = fits_device and host <= machine.host_memory
    row["timeline"] = timeline
    row["marks"] = marks
    row["events"] = events
    return row


# ---------- what happens in a step --------------------------------------------


def print_events(row, micro_batches, unit, name, fold=True):
    """Gathers, frees, reductions and the update, in order: bytes sent, and what the device
    holds after each. fold: where a block does as the one before, one line says so."""
    title = f"{row['strategy']}, a step of rank 0, in {name}"
    print(f"\n{title:54s}{'sent':>8s}{'held':>14s}")
    if row["strategy"] == "ddp":
        print("(DDP reduces its gradients in buckets of 25 MiB, as they fill; here by block)")
    events = [e for e in row["events"] if e.where not in ("clip", "optimizer")]
    update = [e for e in row["events"] if e not in events]
    rehearsed = update[-1].micro_batch
    first = 1
    for n in range(1, rehearsed + 1):
        # The last but one stands for those that were left out.
        last = first + micro_batches - rehearsed if n == rehearsed - 1 else first
        many = f"micro-batches {first} to {last} of {micro_batches}, each"
        print(many if last > first else f"micro-batch {first} of {micro_batches}")
        here = [e for e in events if e.micro_batch == n]
        print_steps(here, row, unit, fold)
        if not here:
            print("  nothing is gathered, freed or reduced")
        first = last + 1
    print("update")
    print_steps(update, row, unit, fold)


def print_steps(events, row, unit, fold):
    """The events of a micro-batch, block by block."""
    same = []  # places where the same happens as in the one before
    before = None
    for where, group in groupby(events, key=lambda e: e.where):
        here = list(group)
        pattern = [(e.what, relative(e.unit, where), e.size) for e in here]
        if fold and pattern == before and "block" in where:
            same.append(where)
            continue
        print_same(same)
        same = []
        before = pattern
        for e in here:
            what = e.what.replace("_", "-")
            sent = f"{e.sent() / unit:,.2f}" if e.size else ""
            held = row["timeline"][e.row, 1:].sum() / unit
            print(f"  {where:20s}{what:16s}{e.unit:16s}{sent:>8s}{held:14,.2f}")
            where = ""
    print_same(same)


def print_same(places):
    if places:
        numbers = [place.partition(" block ")[2] for place in places]
        phase, _, _ = places[0].partition(",")
        some = f"blocks {numbers[0]} to {numbers[-1]}" if numbers[1:] else f"block {numbers[0]}"
        print(f"  {phase}, {some}: the same")


def relative(unit, where):
    """Of a unit of block 5 in "backward, block 6": -1 and the rest of its name."""
    found = re.match(r"block (\d+)(.*)", unit)
    here = re.search(r"block (\d+)", where)
    if not found or not here:
        return unit
    return int(found[1]) - int(here[1]), found[2]


# ---------- which strategies --------------------------------------------------


def place(cfg, size, machine):
    """(cfg resolved for `size` GPUs, their World); SystemExit for what cannot be combined."""
    device = torch.device("cpu" if cfg.device == "cpu" else "cuda")
    world = World(size=size, device=device, local_size=min(size, machine.gpus_per_node))
    # Training wants a multiple of the ranks, and says so; a plan takes the next one.
    micro_batches = math.ceil(cfg.gradient_accumulation_steps / size)
    cfg = replace(cfg, gradient_accumulation_steps=micro_batches * size)
    cfg = replace(cfg, compile=False)  # fake tensors run eagerly
    if cfg.strategy != "hybrid_shard":
        cfg = replace(cfg, shard_group_size=0)  # another row may need it
    if cfg.dtype == "auto" and device.type == "cuda":
        cfg = replace(cfg, dtype="bfloat16")  # the best of today's GPUs; none is here to ask
    return resolve(cfg, world, distributed=cfg.strategy != "single"), world


def variants(cfg, size, machine):
    """[(cfg, World)] of --strategy, or of every strategy that the keys allow. SystemExit if
    they do not allow the config's own."""
    if machine.strategy == "single" and size > 1:
        raise SystemExit("--strategy=single is one process: pass --world_size=1, or leave it out")
    if machine.strategy:
        return [place(replace(cfg, strategy=machine.strategy), size, machine)]
    own = cfg.strategy or "full_shard"
    strategies = STRATEGIES if size > 1 else ("single", "full_shard")
    allowed = []
    for strategy in strategies:
        ranks = 1 if strategy == "single" else size
        try:
            placed, world = place(replace(cfg, strategy=strategy), ranks, machine)
        except SystemExit:
            if strategy == own:
                raise
            continue
        one_group = placed.shard_group_size >= size  # hybrid_shard is full_shard then
        if strategy == own or not one_group:
            allowed.append((placed, world))
    return allowed


# ---------- the picture -------------------------------------------------------

# Of ON_DEVICE, from dark to light: the colours differ in grey too, and for colour-blind readers
# (viridis). With ddp nothing is gathered, but autocast keeps copies in bf16: they count as that.
COLORS = ("#440154", "#3b528b", "#21918c", "#5ec962", "#fde725")
LABELS = ("parameters", "optimizer", "gradients", "gathered or cast", "activations")
# The marks at which phases begin, and where on the x axis that is: they are as wide as they
# last, roughly. The last one ends at END.
PHASES = {
    "forward": 0,
    "forward, head": 1,
    "backward, head": 1.4,
    "optimizer": 3.2,
}
END = 3.6
TICKS = {"forward": 0.5, "loss": 1.2, "backward": 2.3, "step": 3.4}


def draw(rows, machine, unit, name, title, path):
    """For each strategy what a GPU holds during a step's last micro-batch, stacked, and under
    it which units are whole. unit, name: of the y axis, in bytes, and what it is called."""
    Figure = package("matplotlib.figure", "--plot").Figure
    # A Figure of its own, not pyplot's: that would look for a screen.
    figure = Figure(figsize=(3.2 * len(rows) + 1, 6.4), layout="constrained")
    panels, below = figure.subplots(
        2, len(rows), sharex=True, sharey="row", squeeze=False, height_ratios=(5, 2))
    highest = max(row["peak"] for row in rows)
    limit = machine.gpu_memory / unit
    names = unit_names(rows)
    for row, panel, panel_below in zip(rows, panels, below):
        x = x_of_rows(row)
        draw_memory(panel, row, x, unit)
        draw_units(panel_below, row, x, names)
        peak = row["peak"] / unit
        panel.set_title(f"{row['strategy']}: peak {peak:,.1f} {name}", fontsize=14)
        if machine.gpu_memory < 3 * highest:  # a higher line would press the rest flat
            panel.axhline(
                limit,
                color="black",
                ls="--",
                label=f"a GPU: {limit:.0f} {name}",
            )
        for each in (panel, panel_below):
            for between in list(PHASES.values())[1:]:
                each.axvline(between, color="black", alpha=0.2, lw=0.8)
    panels[0].set_ylabel(f"{name} on a GPU", fontsize=12)
    panels[0].tick_params(labelsize=12)
    below[0].set_ylabel("units that are whole", fontsize=12)
    figure.suptitle(title, fontsize=16)
    # All panels have the same kinds, so one legend serves them all.
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(
        handles[::-1],  # from the top down, as they are stacked
        labels[::-1],
        loc="outside lower center",
        ncols=len(handles),
        fontsize=12,
        handlelength=1.2,
        columnspacing=1.2,
        frameon=False,
    )
    figure.savefig(path, dpi=150)
    return figure


def x_of_rows(row):
    """Where on the x axis each row of the timeline is. A step has many micro-batches: only
    the last is drawn, and what comes before lies left of 0."""
    start = {}
    for n, where in row["marks"]:
        start[where] = n  # the last of each
    last = len(row["timeline"]) - 1
    bounds = [start[where] for where in PHASES]
    return np.interp(range(last + 1), [*bounds, last], [*PHASES.values(), END], left=-1)


def draw_memory(panel, row, x, unit):
    drawn = x >= 0
    panel.stackplot(
        x[drawn],
        row["timeline"][drawn, 1:].T / unit,
        labels=LABELS,
        colors=COLORS,
        lw=0,
    )
    panel.set_xlim(0, END)
    panel.set_ylim(0, None)


def unit_names(rows):
    """The units in the order of their first gather, the root first; none if all rows are of
    strategies that gather nothing."""
    names = {}
    for row in rows:
        names.update(dict.fromkeys(e.unit for e in row["events"] if e.what == "all_gather"))
    return list(names) or ["the model"]


def draw_units(panel, row, x, names):
    """A bar from each gather of a unit to its free."""
    gathers = {}  # {unit: where its gather is on the x axis}
    bars = {name: [] for name in names}
    for e in row["events"]:
        if e.what == "all_gather":
            gathers[e.unit] = max(0, x[e.row])
        elif e.what == "free":
            begin = gathers.pop(e.unit)
            if x[e.row] > begin:  # else it is of an earlier micro-batch
                bars[e.unit].append((begin, x[e.row] - begin))
    gathers_nothing = not any(bars.values())
    for y, name in enumerate(names):
        spans = [(0, END)] if gathers_nothing else bars[name]
        panel.broken_barh(spans, (y - 0.5, 1), color=COLORS[3], lw=0)
    panel.set_ylim(-0.5, len(names) - 0.5)
    panel.set_yticks([0, len(names) - 1], [names[0], names[-1]], fontsize=12)
    panel.set_xticks(list(TICKS.values()), TICKS, fontsize=12)


# ---------- the command -------------------------------------------------------


def parse(argv):
    """(the machine and all other flags of plan, the arguments that are left)."""
    parser = ArgumentParser(
        usage="python -m extras.plan [config files] [flags below] [--key=value of train.py]",
        description=__doc__,
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.error = sys.exit  # one line and exit code 1, as everywhere here
    this_gpu = 80
    if torch.cuda.is_available():
        this_gpu = torch.cuda.get_device_properties(0).total_memory / GIB
    add = parser.add_argument
    add("--world_size", type=int, default=1,
        help=f"GPUs, at most {LARGEST:,}")
    add("--strategy", choices=STRATEGIES,
        help="only this one; else all that the keys allow")
    add("--gpus_per_node", type=int, default=8,
        help="GPUs that share host memory")
    add("--gpu_memory", type=float, default=this_gpu,
        help="GiB (this machine's, or 80)")
    add("--host_memory", type=float, default=math.inf,
        help="GiB of a node")
    add("--plot", metavar="FILE.png",
        help="draw a step's memory; .svg, .pdf too")
    add("--events", choices=("folded", "all"),
        help="what happens in the step, in order; =all: of every block")
    # A config file may follow: --events alone must not take it as its value.
    argv = ["--events=folded" if arg == "--events" else arg for arg in argv]
    own, rest = parser.parse_known_args(argv)

    for key in ("world_size", "gpus_per_node", "gpu_memory", "host_memory"):
        value = getattr(own, key)
        if not value > 0:  # NaN is not
            raise SystemExit(f"--{key}={value}: pass a number above 0")
    if own.world_size > LARGEST:
        raise SystemExit(f"--world_size={own.world_size}: pass at most {LARGEST}")
    if own.plot:
        check_plot(own.plot)
    own.gpu_memory *= GIB  # from here on in bytes
    own.host_memory *= GIB
    return own, rest


def check_plot(path):
    """SystemExit now, not after the rehearsals."""
    package("matplotlib.figure", "--plot")
    is_picture = path.endswith((".png", ".svg", ".pdf"))
    if not is_picture or not os.path.isdir(os.path.dirname(path) or "."):
        raise SystemExit(f"--plot={path}: pass a .png, .svg or .pdf in a folder you have")


def main(argv):
    machine, rest = parse(argv)
    size = machine.world_size
    cfg = with_vocabulary(load_config(rest, vars(machine)))
    todo = variants(cfg, size, machine)

    # What is planned.
    model = meta_model(cfg)
    n = count(model)
    memory = machine.gpu_memory / GIB
    title = f"{n / 1e6:,.1f}M parameters on {size} GPUs"
    placed, _ = todo[-1]  # `single` may have fewer micro-batches
    steps = placed.gradient_accumulation_steps
    print(
        f"{title} of {memory:.0f} GiB, {placed.dtype}; {describe_units(model, cfg)}\n"
        f"planned with gradient_accumulation_steps={steps}, a multiple of {size}: "
        f"{steps // size} x batch_size {cfg.batch_size} x {cfg.block_size:,} tokens a GPU "
        "and step")

    # The table, a line as soon as it is known.
    unit, name = MIB, "MiB"
    if 16 * n >= GIB:  # 16 bytes a parameter
        unit, name = GIB, "GiB"
    heads = [key.replace("host", "host/node") for key in COLUMNS]
    print_line(f"{name} a GPU", heads, "fits", "peak at")
    rows = []
    for placed, world in todo:
        row = plan(placed, world, machine)
        cells = [f"{row[key] / unit:,.2f}" for key in COLUMNS]
        fits = "yes" if row["fits"] else "no"
        print_line(row["strategy"], cells, fits, row["where"])
        # Beside others, `single` is there to compare with: its memory is ddp's.
        if placed.strategy != "single" or size == 1:
            rows.append(row)

    if machine.events:
        for row in rows:
            print_events(row, steps // size, unit, name, fold=machine.events == "folded")
        print()
    if machine.plot:
        files = [arg for arg in rest if not arg.startswith("--")]
        title = os.path.basename(files[-1]).removesuffix(".py") if files else cfg.model
        title += f" on {size} GPUs of {memory:.0f} GiB: what each holds during a training step"
        draw(rows, machine, unit, name, title, machine.plot)
        print(f"wrote {machine.plot}")
    fitting = [row["strategy"] for row in rows if row["fits"]]  # the simplest first
    if fitting:
        print(f"take --strategy={fitting[0]}, the simplest that fits")
    else:
        print(
            "nothing fits: try --loss_chunks=8, --activation_checkpointing=selective, then "
            "full, a smaller --batch_size, --cpu_offload=0.25 and up; or more GPUs")


def describe_units(model, cfg):
    """How many units there are, and the size of the first."""
    units = find_units(model, model.blocks, cfg.wrap_min_params)
    # wrap_min_params may be more than any module has: then all is the root's.
    names = {module: name for name, module in model.named_modules()}
    first, name = model, "the root"
    if units:
        first, name = units[0], names[units[0]]
    millions = count(first) / 1e6
    return f"{len(units)} units and the root; {name} has {millions:,.2f}M parameters"


def count(module):
    return sum(p.numel() for p in module.parameters())


def print_line(head, cells, fits, where):
    columns = "".join(f"{cell:>12s}" for cell in cells)
    print(f"{head:13s}{columns}  {fits:4s}  {where}", flush=True)


if __name__ == "__main__":
    run(main, sys.argv[1:])

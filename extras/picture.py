"""
What happens in a step that plan.py planned: as text (its --events), and drawn (its --plot).
"""

import math
import os
import re
from itertools import groupby

from configurator import package
from extras.timing import KERNEL

# ---------- what happens in a step --------------------------------------------


def print_events(row, micro_batches, unit, name, fold=True):
    """Gathers, frees, reductions and the update, in order: bytes sent, and what the device
    holds after each; with a GPU's name, when in its micro-batch or the update, and how long.
    fold: where a block does as the one before, one line says so."""
    title = f"{row['strategy']}, a step of rank 0, in {name}"
    clock = f"{'start, ms':>11s}{'takes, ms':>11s}" if "step" in row else ""
    print(f"\n{title:54s}{'sent':>8s}{clock}{'held':>14s}")
    if row["strategy"] == "ddp":
        print("(DDP reduces its gradients in buckets of 25 MiB, as they fill; here by block)")
    rehearsed = row["events"][-1].micro_batch
    first = 1
    for n in range(1, rehearsed + 1):
        last = first
        if n == rehearsed - 1:  # it stands for those that were left out
            last += micro_batches - rehearsed
        if last > first:
            print(f"micro-batches {first} to {last} of {micro_batches}, each")
        else:
            print(f"micro-batch {first} of {micro_batches}")
        print_part(row, n, unit, fold)
        first = last + 1
    print("update")
    print_part(row, rehearsed + 1, unit, fold)


def print_part(row, part, unit, fold):
    """The events of a micro-batch or of the update, block by block."""
    events = [e for e in row["events"] if e.part() == part]
    if not events:
        print("  nothing is gathered, freed or reduced")
    same = []  # places where the same happens as in the one before
    before = None
    for where, group in groupby(events, key=lambda e: e.where):
        here = list(group)
        pattern = [(e.what, relative(e.unit, where), e.size, is_exposed(e, row)) for e in here]
        if fold and pattern == before and "block" in where:
            same.append(where)
            continue
        print_same(same)
        same = []
        before = pattern
        for e in here:
            print_event(e, where, row, unit)
            where = ""
    print_same(same)


def print_event(e, where, row, unit):
    what = e.what.replace("_", "-")
    sent = f"{e.sent() / unit:,.2f}" if e.size else ""
    held = row["timeline"][e.row, 1:].sum() / unit
    clock = ""
    if "step" in row:
        start, end = row["step"].span(e)
        since = start - row["step"].begin(e.part())
        takes = f"{1e3 * (end - start):,.2f}" if e.size else ""
        clock = f"{1e3 * since:11,.2f}{takes:>11s}"
    exposed = "  exposed" if is_exposed(e, row) else ""
    print(f"  {where:20s}{what:16s}{e.unit:16s}{sent:>8s}{clock}{held:14,.2f}{exposed}")


def is_exposed(event, row):
    """Does compute wait while this collective runs, for longer than a kernel takes?"""
    return "step" in row and row["step"].waited(*row["step"].span(event)) > KERNEL


def print_same(places):
    if places:
        phase, _, first = places[0].partition(" block ")
        _, _, last = places[-1].partition(" block ")
        some = f"blocks {first} to {last}" if last != first else f"block {first}"
        print(f"  {phase} {some}: the same")


def relative(unit, where):
    """Of a unit of block 5 in "backward, block 6": -1 and the rest of its name."""
    found = re.match(r"block (\d+)(.*)", unit)
    here = re.search(r"block (\d+)", where)
    if not found or not here:
        return unit
    return int(found[1]) - int(here[1]), found[2]


# ---------- the picture -------------------------------------------------------

# Of ON_DEVICE, from dark to light: the colours differ in grey too, and for colour-blind readers
# (viridis). With ddp nothing is gathered, but autocast keeps copies in bf16: they count as that.
COLORS = ("#440154", "#3b528b", "#21918c", "#5ec962", "#fde725")
LABELS = ("parameters", "optimizer", "gradients", "gathered or cast", "activations")

def draw(rows, machine, unit, name, title, path):
    """For each strategy the last micro-batch of a step and the update: what a GPU holds,
    stacked; which units are whole; what its streams do. unit, name: of the first's y axis, in
    bytes, and what it is called."""
    Figure = package("matplotlib.figure", "--plot").Figure
    # A Figure of its own, not pyplot's: that would look for a screen.
    figure = Figure(figsize=(3.2 * len(rows) + 1, 7), layout="constrained")
    panels, below, bars = figure.subplots(
        3, len(rows), sharex=True, sharey="row", squeeze=False, height_ratios=(5, 2, 0.8))
    highest = max(row["peak"] for row in rows)
    limit = machine.gpu_memory / unit
    names = unit_names(rows)
    for row, panel, panel_below, bar in zip(rows, panels, below, bars):
        draw_memory(panel, row, unit)
        draw_units(panel_below, row, names)
        draw_streams(bar, row)
        peak = row["peak"] / unit
        panel.set_title(f"{row['strategy']}: peak {peak:,.1f} {name}", fontsize=14)
        if machine.gpu_memory < 3 * highest:  # a higher line would press the rest flat
            panel.axhline(
                limit,
                color="black",
                ls="--",
                label=f"a GPU: {limit:.0f} {name}",
            )
        for each in (panel, panel_below, bar):
            for phase in ("forward, head", "optimizer"):
                each.axvline(begin_of(phase, row), color="black", alpha=0.2, lw=0.8)
    panels[0].set_ylabel(f"{name} on a GPU", fontsize=12)
    panels[0].tick_params(labelsize=12)
    below[0].set_ylabel("whole units", fontsize=12)
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


def ms(seconds, row):
    """On the x axis: since the last micro-batch began."""
    last = row["events"][-1].micro_batch
    return 1e3 * (seconds - row["step"].begin(last))


def moments(rows, row):
    """Where these rows of the timeline are on the x axis."""
    return ms(row["step"].moments(rows), row)


def begin_of(phase, row):
    start = dict((where, n) for n, where in row["marks"])[phase]  # the last of each
    return moments(start, row)


def draw_memory(panel, row, unit):
    x = moments(range(len(row["timeline"])), row)
    drawn = x >= 0
    panel.stackplot(
        x[drawn],
        row["timeline"][drawn, 1:].T / unit,
        labels=LABELS,
        colors=COLORS,
        lw=0,
    )
    panel.set_xlim(0, None)
    panel.set_ylim(0, None)


def unit_names(rows):
    """The units in the order of their first gather, the root first; none if all rows are of
    strategies that gather nothing."""
    names = {}
    for row in rows:
        names.update(dict.fromkeys(e.unit for e in row["events"] if e.what == "all_gather"))
    return list(names) or ["the model"]


def draw_units(panel, row, names):
    """A bar from each gather of a unit to its free."""
    end = moments(len(row["timeline"]), row)
    gathers = {}  # {unit: where its gather begins on the x axis}
    bars = {name: [] for name in names}
    for e in row["events"]:
        start, _ = row["step"].span(e)
        x = max(0, ms(start, row))
        if e.what == "all_gather":
            gathers[e.unit] = x
        elif e.what == "free":
            begin = gathers.pop(e.unit)
            if x > begin:  # else it is of an earlier micro-batch
                bars[e.unit].append((begin, x - begin))
    gathers_nothing = not any(bars.values())
    for y, name in enumerate(names):
        spans = [(0, end)] if gathers_nothing else bars[name]
        panel.broken_barh(spans, (y - 0.5, 1), color=COLORS[3], lw=0)
    panel.set_ylim(-0.5, len(names) - 0.5)
    panel.set_yticks([0, len(names) - 1], [names[0], names[-1]], fontsize=12)


def draw_streams(panel, row):
    """What computes, and what gathers or reduces, as a profiler would draw it."""
    step = row["step"]
    works = 0.0  # from then on
    for wait, until in [*step.waits, (step.compute[-1].end, math.inf)]:
        end = ms(wait, row)
        if end >= 0:
            panel.broken_barh([(works, end - works)], (0.6, 0.8), color=COLORS[0], lw=0)
            works = ms(until, row)
    for span in step.collectives:
        start = ms(span.start, row)
        takes = 1e3 * (span.end - span.start)
        color = COLORS[2]
        if span.op.event.what == "all_gather":
            color = COLORS[3]
        if start >= 0:
            panel.broken_barh([(start, takes)], (-0.4, 0.8), color=color, lw=0.6)  # a line at least
    panel.set_ylim(-0.5, 1.5)
    panel.set_yticks([0, 1], ["communication", "compute"], fontsize=12)
    panel.set_xlabel("ms", fontsize=12)


def check_plot(path):
    """SystemExit now, not after the rehearsals."""
    package("matplotlib.figure", "--plot")
    is_picture = path.endswith((".png", ".svg", ".pdf"))
    if not is_picture or not os.path.isdir(os.path.dirname(path) or "."):
        raise SystemExit(f"--plot={path}: pass a .png, .svg or .pdf in a folder you have")

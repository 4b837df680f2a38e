"""
A planned step, as a list of events (--events) and as a picture (--plot).
"""

import math
import os
import re
from itertools import groupby

from configurator import package
from extras.plan.timing import KERNEL

# ---------- the events --------------------------------------------------------


def print_events(row, micro_batches, unit, name, fold=True):
    """Print gathers, frees, reductions and the update, in order: bytes sent, and bytes that the
    device holds after each; for a known GPU also its start, in its micro-batch or the update, and
    its duration. fold: one line for blocks that repeat the one before."""
    title = f"{row['strategy']}, a step of rank 0, in {name}"
    clock = f"{'start, ms':>11s}{'takes, ms':>11s}" if "step" in row else ""
    print(f"\n{title:54s}{'sent':>8s}{clock}{'held':>14s}")
    if row["strategy"] == "ddp":
        print("(DDP reduces its gradients in buckets of 25 MiB, as they fill; here by block)")
    rehearsed = row["events"][-1].micro_batch
    first = 1
    for n in range(1, rehearsed + 1):
        last = first
        if n == rehearsed - 1:  # it stands for those left out, too
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
    same = []  # places with the same events as the one before
    before = None
    for where, group in groupby(events, key=lambda e: e.where):
        here = list(group)
        pattern = []
        for e in here:
            unit_here = relative(e.unit, where)
            pattern.append((e.what, unit_here, e.size, is_exposed(e, row)))
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
    held = row["timeline"][e.row, 1:].sum() / unit
    sent = takes = clock = exposed = ""
    if e.size:
        sent = f"{e.sent() / unit:,.2f}"
    if is_exposed(e, row):
        exposed = "  exposed"
    if "step" in row:
        step = row["step"]
        start, end = step.span(e)
        since = start - step.begin(e.part())
        if e.size:
            takes = f"{1e3 * (end - start):,.2f}"
        clock = f"{1e3 * since:11,.2f}{takes:>11s}"
    print(f"  {where:20s}{what:16s}{e.unit:15s} {sent:>8s}{clock}{held:14,.2f}{exposed}")


def is_exposed(event, row):
    """True if compute waits while this collective runs, for longer than a kernel takes."""
    if "step" not in row:
        return False
    step = row["step"]
    start, end = step.span(event)
    return step.waited(start, end) > KERNEL


def print_same(places):
    if places:
        phase, _, first = places[0].partition(" block ")
        _, _, last = places[-1].partition(" block ")
        if last == first:
            print(f"  {phase} block {first}: the same")
        else:
            print(f"  {phase} blocks {first} to {last}: the same")


def relative(unit, where):
    """How far a unit's block is from the current one, and the rest of its name: -1 for a unit
    of block 5 in "backward, block 6". A unit outside the blocks is returned as it is."""
    found = re.match(r"block (\d+)(.*)", unit)
    here = re.search(r"block (\d+)", where)
    if not found or not here:
        return unit
    distance = int(found[1]) - int(here[1])
    return distance, found[2]


# ---------- the picture -------------------------------------------------------

# Of ON_DEVICE, from dark to light: the colours differ in grey too, and for colour-blind readers
# (viridis). With ddp nothing is gathered, but autocast's copies in bf16 count as gathered.
COLORS = ("#440154", "#3b528b", "#21918c", "#5ec962", "#fde725")
LABELS = ("parameters", "optimizer", "gradients", "gathered or cast", "activations")

def draw(rows, machine, unit, name, title, path):
    """Draw each strategy's last micro-batch and update: memory by kind, stacked; the units that
    are whole; and the streams. unit, name: the memory axis's unit, in bytes, and its name."""
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
            for phase, label in (("forward, head", "head and update begin"), ("optimizer", None)):
                each.axvline(begin_of(phase, row), color="black", alpha=0.2, lw=0.8, label=label)
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
        ncols=2 * len(rows),
        fontsize=12,
        handlelength=1.2,
        columnspacing=1.2,
        frameon=False,
    )
    figure.savefig(path, dpi=150)
    return figure


def ms(seconds, row):
    """Milliseconds on the x axis, which begins with the last micro-batch."""
    last = row["events"][-1].micro_batch
    begin = row["step"].begin(last)
    return 1e3 * (seconds - begin)


def times_at(rows, row):
    """Milliseconds of these rows of the timeline, on the x axis."""
    return ms(row["step"].times_at(rows), row)


def begin_of(phase, row):
    start = dict((where, n) for n, where in row["marks"])[phase]  # the last of each
    return times_at(start, row)


def draw_memory(panel, row, unit):
    x = times_at(range(len(row["timeline"])), row)
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
    names = []
    for row in rows:
        for e in row["events"]:
            if e.what == "all_gather" and e.unit not in names:
                names.append(e.unit)
    return names or ["the model"]


def draw_units(panel, row, names):
    """A bar from each gather of a unit to its free."""
    end = times_at(len(row["timeline"]), row)
    gathers = {}  # {unit: where its gather begins on the x axis}
    bars = {name: [] for name in names}
    for e in row["events"]:
        start, _ = row["step"].span(e)
        x = ms(start, row)
        x = max(0, x)
        if e.what == "all_gather":
            gathers[e.unit] = x
        elif e.what == "free":
            begin = gathers.pop(e.unit)
            if x > begin:  # else it belongs to an earlier micro-batch
                bars[e.unit].append((begin, x - begin))
    if not any(bars.values()):  # nothing is gathered: everything is whole all the time
        bars = {name: [(0, end)] for name in names}
    for y, name in enumerate(names):
        panel.broken_barh(bars[name], (y - 0.5, 1), color=COLORS[3], lw=0)
    top = len(names) - 1
    panel.set_ylim(-0.5, top + 0.5)
    panel.set_yticks([0, top], [names[0], names[top]], fontsize=12)


def draw_streams(panel, row):
    """Draw compute and communication as a profiler would."""
    step = row["step"]
    works = 0.0  # the start of the current bar
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
            panel.broken_barh([(start, takes)], (-0.4, 0.8), color=color, lw=0.6)  # at least a line
    panel.set_ylim(-0.5, 1.5)
    panel.set_yticks([0, 1], ["communication", "compute"], fontsize=12)
    panel.set_xlabel("ms", fontsize=12)


def check_plot(path):
    """SystemExit if --plot cannot be written: now, not after the rehearsals."""
    package("matplotlib.figure", "--plot")
    is_picture = path.endswith((".png", ".svg", ".pdf"))
    folder = os.path.dirname(path) or "."
    if not is_picture or not os.path.isdir(folder):
        raise SystemExit(f"--plot={path}: pass a .png, .svg or .pdf in a folder you have")

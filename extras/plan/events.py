"""
A planned step, as a list of events: --events.
"""

import re
from itertools import groupby


def print_events(row, micro_batches, unit, name, fold=True):
    """Print gathers, frees, reductions and the update, in order: bytes sent, and bytes that the
    device holds after each. fold: one line for blocks that repeat the one before."""
    title = f"{row['strategy']}, a step of rank 0, in {name}"
    print(f"\n{title:54s}{'sent':>8s}{'held':>14s}")
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
        pattern = [(e.what, relative(e.unit, where), e.size) for e in here]
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
    sent = f"{e.sent() / unit:,.2f}" if e.size else ""
    print(f"  {where:20s}{what:16s}{e.unit:15s} {sent:>8s}{held:14,.2f}")


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

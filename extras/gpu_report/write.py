"""
The report as files: NAME.json has every number, NAME.md a table that reads by itself.
"""

import json
import os

GIB = 2**30
MIB = 2**20
HEAD = (
    "| row | GPUs | ms per step | planned | ratio | tok/s per GPU | MFU | peak | planned | ratio "
    "| at rest | planned | gathers hidden |\n|" + "---|" * 13)


def write(report, table, out):
    """Both files, each whole or not at all."""
    texts = {".json": json.dumps(report, indent=1), ".md": page(report, table)}
    for ending, text in texts.items():
        path = out + ending
        with open(path + ".tmp", "w") as f:
            f.write(text + "\n")
        os.replace(path + ".tmp", path)


def names(gpus):
    kinds = sorted({gpu["name"] for gpu in gpus})
    return f"{len(gpus)} x {', '.join(kinds)}"


def page(report, table):
    machine = report["machine"]
    gpus = machine["gpus"]
    kept = report["rows"]
    rows = [(row, kept[row.name]) for row in table.values() if row.name in kept]
    simulated = ", simulated" if machine["simulated"] else ""
    versions = [f"{name} {value}" for name, value in machine["versions"].items() if value]
    unit = MIB if report["tiny"] else GIB
    lines = [
        f"# A report of {names(gpus)}{simulated}",
        "",
        f"{gpus[0]['memory'] / GIB:.0f} GiB per GPU, {machine['cores']} cores, "
        f"{machine['host_memory'] / GIB:.0f} GiB of host memory; {', '.join(versions)}.",
        f"Memory is in {'MiB' if unit is MIB else 'GiB'}; ratios are measured / planned. Compiling "
        "saves memory that the plan does not know of, and a recording keeps some (its peak is what "
        "is reserved), so compiled and recorded rows have no ratio of peaks.",
        "",
    ]
    if report["tiny"]:
        lines += ["Made with `--tiny`: the sizes say nothing about a GPU.", ""]
    planned = [one["predicted"] for one in kept.values() if isinstance(one.get("predicted"), dict)]
    if not any("seconds" in one for one in planned):
        lines += ["The plan has no rates of this GPU, so no times are predicted.", ""]
    if machine["links"]:
        lines += ["```text", *(" ".join(row) for row in machine["links"]), "```", ""]
    first = [pair for pair in rows if pair[0].matters]
    rest = [pair for pair in rows if not pair[0].matters]
    lines += ["## What matters most", "", *both_tables(first, unit), ""]
    lines += ["## The other rows", "", *both_tables(rest, unit), ""]
    lines += [*outside(rows, unit), rates(report.get("rates") or {})]
    return "\n".join(lines)


def both_tables(rows, unit):
    steps = [step_line(row, kept, unit) for row, kept in rows if not row.program]
    others = [other_line(row, kept) for row, kept in rows if row.program]
    lines = [HEAD, *steps, ""] if steps else []
    if others:
        lines += ["| row | GPUs | measured | expected | what it proves |", "|" + "---|" * 5]
    return lines + others


def step_line(row, kept, unit):
    measured = kept.get("measured")
    predicted = kept.get("predicted") or {}
    if not measured:
        return f"| {row.name} | {row.gpus} | {why(kept)} " + "| " * 10 + "|"
    speed = measured.get("tok/s")
    mfu = measured.get("MFU")
    hidden = measured.get("gathers_hidden")
    peaks = beside(measured["peak"], predicted.get("peak"), unit)
    if not row.has_planned_peak:
        peaks[2] = ""
    cells = [
        row.name,
        row.gpus,
        *beside(measured["seconds"], predicted.get("seconds"), 1e-3),
        f"{speed:,.0f}" if speed else "",
        f"{mfu:.1%}" if mfu else "",
        *peaks,
        *beside(measured["valley"], predicted.get("valley"), unit)[:2],
        share(hidden) if row.trace else "",
    ]
    return "| " + " | ".join(map(str, cells)) + " |"


def share(hidden):
    return "n/a" if hidden is None else f"{hidden:.0%}"


def beside(measured, predicted, unit):
    """[the one, the other, their ratio] as text."""
    ratio = f"{measured / predicted:.2f}" if measured and predicted else ""
    return [f"{n / unit:,.2f}" if n is not None else "n/a" for n in (measured, predicted)] + [ratio]


def other_line(row, kept):
    if "measured" not in kept:
        return f"| {row.name} | {row.gpus} | {why(kept)} | | {row.proves} |"
    expected = numbers(kept["predicted"])
    return f"| {row.name} | {row.gpus} | {numbers(kept['measured'])} | {expected} | {row.proves} |"


def why(kept):
    return f"{kept['status']}: {kept['reason']}".replace("|", "/")


def numbers(found):
    """{name: number} as text; a text as it is."""
    if isinstance(found, str):
        return found
    said = []
    for name, value in found.items():
        if isinstance(value, float):
            value = f"{value:.3g}"
        said.append(f"{name} {value}")
    return ", ".join(said)


def outside(rows, unit):
    """What NCCL and the context take, which PyTorch's peak does not have."""
    said = []
    for row, kept in rows:
        found = kept.get("measured") or {}
        if row.name.endswith((" uncompiled", " Muon")) and "outside_after" in found:
            phases = [
                f"{found[f'outside_{when}'] / unit:,.2f}" for when in ("before", "built", "after")]
            said.append(f"{row.name} {' / '.join(phases)}")
    if not said:
        return []
    return [
        "Memory outside PyTorch's allocator, before the model, when it is built, and after its "
        f"steps: {'; '.join(said)}.", ""]


def rates(found):
    """The last line."""
    if not found:
        return "No row has told the plan's rates yet."
    return f"The plan's rates would be, by this machine's own rows: {numbers(found)}."


def line(row, kept):
    """For the terminal."""
    if "measured" not in kept:
        return f"{row.name}: {why(kept)}"
    measured = kept["measured"]
    if row.program:
        return f"{row.name}: {numbers(measured)}"
    planned = (kept["predicted"] or {}).get("seconds")
    beside_it = f" (planned {planned * 1e3:.2f})" if planned else ""
    return (
        f"{row.name}: {measured['seconds'] * 1e3:.2f} ms per step{beside_it}, "
        f"peak {measured['peak'] / MIB:,.1f} MiB")

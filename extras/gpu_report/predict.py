"""
What the plan says of a row before it is measured, and which of its rates this machine would have.
"""

import io
import re
import signal
from contextlib import redirect_stdout

import numpy as np

from extras.gpu_report.work import end_with_parent

GIB = 2**30


def make_data(path, vocab_size):
    """Random tokens: they cost the same time and memory as a text."""
    path.mkdir(parents=True, exist_ok=True)
    for split in ("train", "val"):
        numbers = np.random.default_rng(1337).integers(0, vocab_size, 2_000_000)
        numbers.astype(np.uint16).tofile(path / f"{split}.bin")


def begin():
    """In a process that plans: Ctrl-C is its parent's, and it ends with that."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()


def rates(gpu):
    """The plan's rates of a GPU; a text if it has none."""
    from extras.plan import timing

    known = timing.known_gpu(gpu["name"])
    if known is None:
        return "the plan has no rates of this GPU"
    return dict(
        products=known.peak * known.products,
        memory=known.memory * timing.MEMORY_SHARE,
        pcie=known.pcie,
        host=timing.HOST,
        network=known.nvlink,
    )


def step(keys, ranks, gpu, gpus_per_node, folder, more=()):
    """The plan's numbers of a config's step on so many GPUs, or in one line why it refuses.
    (In a process of its own.) gpu: a row of machine.py."""
    try:
        _, [row] = planned(keys, ranks, gpu, gpus_per_node, folder, *more)
    except SystemExit as e:
        return str(e)
    names = {"seconds": "s/step", "tok/s": "tok/s", "MFU": "MFU", "exposed": "exposed"}
    found = {name: float(row[key]) for name, key in names.items() if key in row}
    return {**found, "peak": float(row["peak"]), "valley": float(row["valley"])}


def planned(keys, ranks, gpu, gpus_per_node, folder, *more):
    """(what the plan prints, its rows)."""
    from extras import plan
    from extras.plan import timing

    flags = [
        f"--world_size={ranks}", f"--gpus_per_node={gpus_per_node}",
        f"--gpu_memory={gpu['memory'] / GIB:.3f}", f"--dataset={folder / 'data'}"]
    if timing.known_gpu(gpu["name"]):
        flags.append(f"--gpu={gpu['name']}")
    said = io.StringIO()
    with redirect_stdout(said):
        rows = plan.main([*keys, *flags, *more])
    return said.getvalue(), rows


def fitted(report, table, setting):
    """The rates that the plan would have to take for this machine; None for what no row tells."""
    rows = report["rows"]
    found = {}
    for name in ("124M compiled", "124M"):
        kept = rows.get(name, {})
        speed = (kept.get("measured") or {}).get("tok/s")
        if speed and isinstance(setting.rates, dict):
            gpus = report["machine"]["gpus"]
            found["--measured"] = speed
            found["of"] = name
            try:
                said, _ = planned(
                    table[name].keys, 1, gpus[0], len(gpus), setting.folder,
                    f"--measured={speed}")
            except (Exception, SystemExit):  # no share of the peak makes the plan so fast
                found["products reach of the peak"] = "out of the plan's range"
                break
            share = re.search(r"reach ([\d.]+)%", said)[1]
            found["products reach of the peak"] = f"{share}%"
            break
    rates = rows.get("rates", {})
    if rates.get("status") == "measured":
        for key, value in rates["measured"].items():
            if key != "products":  # one large product is faster than the plan's mean
                found[f"{key} in B/s"] = value
    return found

"""
This machine's own rates, as JSON: matrix products, memory, copies from and to the host, the host's
memory, and a gather between its GPUs. The units are those of extras/plan/timing.py.

    torchrun --nproc_per_node=2 extras/gpu_report/rates.py --result=FILE
"""

import json
import sys
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).absolute().parents[2]))
from ranks import run, setup  # noqa: E402

LARGE = 2**28  # bytes


def seconds(work, times=10):
    """The median time between events; the first calls do not count."""
    spans = []
    for _ in range(times + 3):
        begin, end = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        begin.record()
        work()
        end.record()
        spans.append((begin, end))
    torch.cuda.synchronize()
    return median(begin.elapsed_time(end) / 1e3 for begin, end in spans[3:])


def rate(size, spent):
    return size / spent if spent else None


def measured(world, small):
    size = LARGE >> 12 if small else LARGE
    n = 256 if small else 8192
    a = torch.randn(n, n, device=world.device, dtype=torch.bfloat16)
    found = dict(products=rate(2 * n**3, seconds(lambda: a @ a)))

    x = torch.zeros(size // 4, device=world.device)
    y = torch.empty_like(x)
    found["memory"] = rate(2 * x.nbytes, seconds(lambda: torch.add(x, 1.0, out=y)))

    pinned = torch.empty(size // 4, pin_memory=True)
    found["pcie"] = rate(x.nbytes, seconds(lambda: x.copy_(pinned, non_blocking=True)))

    spans = []
    for _ in range(5):
        begin = perf_counter()
        pinned.add_(1.0)
        spans.append(perf_counter() - begin)
    found["host"] = 2 * pinned.nbytes / median(spans)
    if world.size > 1:
        whole = torch.empty(size // 4, device=world.device)
        own = torch.zeros(size // 4 // world.size, device=world.device)
        whole = whole[:own.numel() * world.size]
        spent = seconds(lambda: dist.all_gather_single(whole, own))
        found["network"] = rate(whole.nbytes * (world.size - 1) / world.size, spent)
    return found


def main(argv):
    [result] = [arg.partition("=")[2] for arg in argv if arg.startswith("--result=")]
    world = setup("auto", "auto", cpu_offload=1.0)  # its share of the cores, as for an update
    if "simgpu" in sys.modules:
        from extras.plan.simulated import give_prices
        give_prices()
    found = measured(world, small="--tiny" in argv)
    if world.rank == 0:
        Path(result).write_text(json.dumps(found))
    if dist.is_initialized():
        dist.barrier()


if __name__ == "__main__":
    run(main, sys.argv[1:])

"""
How long a step takes, by one plain formula: its FLOPs at a share of the GPU's peak (--mfu), or the
bytes that it sends at the speed of a link (--link), whichever takes longer, and what nothing hides.

The host, memory's bandwidth, the optimizer and copies of offloaded rows are not in it. Measure a
step of your own (extras/bench.py), and pass the MFU that it prints.
"""

from dataclasses import dataclass

import torch

from extras.plan.rehearse import UPDATE
from metrics import PEAK_FLOPS


@dataclass(frozen=True)
class GPU:
    name: str  # as PyTorch calls it: a key of metrics.PEAK_FLOPS
    gib: float
    mfu: float  # the share of the peak that a step's FLOPs reach
    link: float  # GB/s that a ring reaches in a node
    network: float  # GB/s per GPU to other nodes
    half: str = "bfloat16"  # the type that dtype=auto takes
    flash: bool = True  # PyTorch has a fused attention for it


# Steps of 124M to 13B that were measured or published reached 17 to 65% (extras/docs/plan.md).
# link: NCCL's all-reduce on 8 A100s reached 235 of 300 GB/s; the others are estimates after it.
GPUS = {
    "V100": GPU("V100-SXM2-32GB", 31.7, 0.3, 117, 6.25, half="float16", flash=False),
    "A100": GPU("A100-SXM4-80GB", 80, 0.5, 235, 25),
    "A100-40": GPU("A100-SXM4-40GB", 40, 0.5, 235, 25),
    "H100": GPU("H100 80GB HBM3", 80, 0.4, 360, 50),
    "H200": GPU("H200", 140, 0.4, 360, 50),
    "B200": GPU("B200", 178, 0.4, 700, 50),
}


# Seconds that the host took for a unit's forward and backward where the GPU waited for it: 3.5 to
# 7.9 ms (docs/measurements.md).
HOST = 8e-3


def find_gpu(name):
    """A GPU by its name here or in PyTorch; SystemExit if it is unknown."""
    gpu = known_gpu(name)
    if gpu:
        return gpu
    raise SystemExit(
        f"--gpu={name}: known are {', '.join(GPUS)}; for another take the nearest, with its own "
        "--gpu_memory, --mfu and --link")


def known_gpu(name):
    own = name.removeprefix("NVIDIA ").removeprefix("Tesla ").lower()
    for key, gpu in GPUS.items():
        if own in (key.lower(), gpu.name.lower()):
            return gpu
    return None


def this_gpu():
    """This machine's GPU; None if it has none, or an unknown one."""
    if torch.cuda.is_available():
        return known_gpu(torch.cuda.get_device_name(0))
    return None


def seconds(events, flops, machine):
    """A step's seconds on a GPU that does so many FLOPs and has these events."""
    compute = flops / (PEAK_FLOPS[machine.gpu.name] * machine.mfu)
    sending = alone = 0
    sends = [event for event in events if event.size]
    passes = [event for event in sends if event.where not in UPDATE]  # forward and backward
    for event in sends:
        one = event.sent() / rate(event, machine)
        sending += event.times * one
        # Nothing runs beside the first gather, the last reduction, and what the update sends.
        if event.where in UPDATE or event is passes[0] or event is passes[-1]:
            alone += one
    return max(compute, sending - alone) + alone


def rate(event, machine):
    """bytes/s per rank of a collective's ring."""
    in_node = min(event.ranks, max(1, machine.gpus_per_node // event.stride))
    link = machine.link or machine.gpu.link
    if event.ranks > in_node and not machine.link:
        # The ring leaves a node over the lines of all its GPUs there.
        link = min(link, in_node * machine.gpu.network)
    return link * 1e9

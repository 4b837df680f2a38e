"""
The time of a step. The rehearsal records the work of each of a GPU's streams; here it gets prices,
and the streams run side by side, as FSDP2 lets them.

    timeline, marks, events, program = rehearse(cfg, world)
    cluster = Cluster(GPUS["H100"], gpus_per_node=8, network=50e9)
    step = run(program, cluster, micro_batches)
    step.seconds, step.busy_host, step.exposed

An operation is a matrix product, attention, or bound by memory; a collective goes round a ring. A
step takes as long as the GPU does, or the host, which has to start all that work. The constants are
published ones, with their sources; only the share of the peak that products reach was fitted, and
the host's are one machine's. extras/docs/measurements.md compares the results with other runs.
"""

import math
from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
import torch

from extras.plan.program import COMPUTE, UPDATE, Operation, Record, Wait
from metrics import PEAK_FLOPS

# ---------- the machine -------------------------------------------------------

# The share of memory's peak bandwidth that kernels reach: a judgement. From 0.7 to 1.0 the
# mean error changes by less than a point.
MEMORY_SHARE = 0.85
KERNEL = 4e-6  # seconds that a kernel takes at least, with its launch
# While a collective runs it takes cores and memory from compute, which loses this share of the
# collective's time.
TAKEN = 1 / 6
# NCCL's model of a ring (its tuning.cc): seconds per call, per hop in a node, per hop to another.
CALL = 8.4e-6
HOP = 3.4e-6
HOP_ACROSS = 14e-6
# bytes/s of host memory, for each of the ranks that share it: an estimate. LambdaLabs' update of
# 405B in bf16 on 64 GPUs, 14 bytes per parameter in 4 s, ran at 22e9.
HOST = 25e9
# Seconds of the host of one H100 (extras/docs/gpu.md; two others took 1.4 to 2 times as long): for
# a call of PyTorch's dispatcher, which starts the GPU's work, and for forward and backward of one
# of FSDP2's units. In a compiled step only the units count.
DISPATCH = 12e-6
UNIT = 1.6e-3
COMPILED_UNIT = 3.4e-3


@dataclass(frozen=True)
class GPU:
    name: str  # as PyTorch calls it
    peak: float  # FLOP/s, dense, in half precision
    products: float  # the share of the peak that matrix products reach
    memory: float  # bytes/s
    nvlink: float  # bytes/s that a ring reaches
    network: float  # bytes/s per GPU to other nodes
    pcie: float  # bytes/s of a copy from or to pinned memory: 0.78 of the data sheet's, a judgement
    gib: float  # of memory
    attention: dict  # FLOP/s of its kernels, forward and backward, with heads of (128, 64)
    kernel: str  # of attention: the one that PyTorch takes
    half: str = "bfloat16"  # the type that dtype=auto takes
    fp32: float = 2.0  # times as slow in fp32 as in half precision, by TF32


# A V100 has neither bf16, nor TF32, nor a kernel of flash attention in PyTorch.
V100 = GPU(
    name="V100-SXM2-32GB",
    peak=PEAK_FLOPS["V100-SXM2-32GB"],
    products=0.444,  # fitted on the validation pass of fairseq's 13B on one GPU
    memory=0.9e12,  # data sheet
    nvlink=117e9,  # a DGX-1's 150 by its data sheet, times the share that the A100 reaches of 300
    network=6.25e9,  # a DGX-1's 400 Gb/s per node
    pcie=12.5e9,  # PCIe 3.0 x16 has 16
    gib=31.7,
    attention={},
    kernel="written_out",
    half="float16",
    fp32=8.0,
)
A100 = GPU(
    name="A100-SXM4-80GB",
    peak=PEAK_FLOPS["A100-SXM4-80GB"],
    products=0.71,  # fitted; 0.869 by Bekman's table of maximum achievable matmul FLOPS
    memory=2.039e12,  # data sheet
    nvlink=235e9,  # Bekman's all-reduce of 4 GB on 8
    network=25e9,  # 1,600 Gb/s per node
    pcie=25e9,  # PCIe 4.0 x16 has 32
    gib=80,
    attention=dict(  # flash-attention's charts
        flash2=(203e12, 176e12),
        triton=(95e12, 100e12),
    ),
    kernel="flash2",
)
H100 = GPU(
    name="H100 80GB HBM3",
    peak=PEAK_FLOPS["H100 80GB HBM3"],
    products=0.63,  # fitted; 0.803 by Bekman
    memory=3.35e12,
    nvlink=360e9,  # an estimate
    network=50e9,  # 3,200 Gb/s per node
    pcie=50e9,  # PCIe 5.0 x16 has 64
    gib=80,
    attention=dict(  # flash-attention's charts; cudnn's an estimate
        flash2=(338e12, 296e12),
        triton=(139e12, 168e12),
        cudnn=(500e12, 400e12),
    ),
    kernel="cudnn",  # if cuDNN is 9.15 or later
)
GPUS = {
    "V100": V100,
    "A100": A100,
    "A100-40": replace(A100, name="A100-SXM4-40GB", memory=1.555e12, gib=40),
    "H100": H100,
    "H200": replace(H100, name="H200", memory=4.8e12, gib=140),
    # By its data sheet; shares as the H100's, attention an estimate. No published run to try.
    "B200": replace(
        H100,
        name="B200",
        peak=PEAK_FLOPS["B200"],
        memory=7.7e12,
        nvlink=700e9,
        gib=178,
        attention=dict(flash2=(400e12, 350e12), cudnn=(1000e12, 800e12)),
    ),
}


ATTENTION = ("flash2", "triton", "cudnn", "written_out")


@dataclass(frozen=True)
class Cluster:
    gpu: GPU
    gpus_per_node: int
    network: float  # bytes/s per GPU to other nodes
    attention: str
    compiled: bool = False
    host: float = 1.0  # its host takes so many times the seconds above


def find_gpu(name):
    """A GPU by its name here or in PyTorch, or by PEAK_TFLOPS:MEMORY_TB/s:NVLINK_GB/s."""
    gpu = known_gpu(name)
    if gpu:
        return gpu
    try:
        peak, memory, nvlink = [float(n) for n in name.split(":")]
    except ValueError:
        peak = memory = nvlink = 0
    if not 0 < min(peak, memory, nvlink) < math.inf:
        raise SystemExit(
            f"--gpu={name}: known are {', '.join(GPUS)}; or pass PEAK_TFLOPS:MEMORY_TB/s:"
            "NVLINK_GB/s, as 989:3.35:360")
    # Products and attention reach the same shares of its peak as of the H100's.
    rates = {}
    for kernel, (large, small) in H100.attention.items():
        rates[kernel] = (large / H100.peak * peak * 1e12, small / H100.peak * peak * 1e12)
    return replace(
        H100,
        name=name,
        peak=peak * 1e12,
        memory=memory * 1e12,
        nvlink=nvlink * 1e9,
        attention=rates,
        kernel="flash2",  # PyTorch prefers cuDNN's only on the GPUs above
    )


def known_gpu(name):
    for key, gpu in GPUS.items():
        own = name.removeprefix("NVIDIA ").removeprefix("Tesla ")
        if own.lower() in (key.lower(), gpu.name.lower()):
            return gpu
    return None


def this_gpu():
    """This machine's GPU; None if it has none, or an unknown one."""
    if torch.cuda.is_available():
        return known_gpu(torch.cuda.get_device_name(0))
    return None


# ---------- prices, in seconds ------------------------------------------------


def price(op, cluster):
    """Seconds of an Operation by itself."""
    if op.event:
        return price_collective(op, cluster)
    gpu = cluster.gpu
    moved = op.moved()
    if op.name == "copy":
        return moved / 2 / gpu.pcie  # it reads here and writes there
    if op.name == "update on the host":
        return moved / HOST
    # float8 has twice the rate.
    flops = op.flops * (gpu.fp32 if op.width == 4 else op.width / 2)
    if op.head:
        large, small = gpu.attention[cluster.attention]
        rate = large if op.head > 64 else small
        return flops / rate * (1 + 600 / op.length)
    in_memory = moved / (gpu.memory * MEMORY_SHARE)
    return max(KERNEL, in_memory, flops / (gpu.peak * gpu.products))


def of_host(op, cluster):
    """Seconds that the host needs from the step's begin until it has started the Operation."""
    calls, units = op.issued
    if cluster.compiled:
        return cluster.host * units * COMPILED_UNIT
    return cluster.host * (calls * DISPATCH + units * UNIT)


def price_collective(op, cluster):
    event = op.event
    if event.ranks == 1:
        return 0.0
    in_node = min(event.ranks, max(1, cluster.gpus_per_node // event.stride))
    nodes = math.ceil(event.ranks / in_node)
    rounds = 2 if event.what == "all_reduce" else 1  # it reduces, and then gathers
    hops = rounds * (event.ranks - 1)
    across = rounds * (nodes - 1)
    latency = CALL + across * HOP_ACROSS + (hops - across) * HOP
    rate = cluster.gpu.nvlink
    if nodes > 1:
        # A ring leaves a node over the lines of all its GPUs in that node.
        rate = min(rate, in_node * cluster.network)
    sent = hops * op.size / event.ranks
    return op.calls * latency + sent / rate


# ---------- compiled: neighbours become one kernel ----------------------------


def fuse(program):
    """The program, with each run of neighbours that are no products fused into one operation. It
    reads only storages from outside, and writes only storages that are read outside."""
    last_read = {}
    for i, op in enumerate(program):
        if isinstance(op, Operation):
            last_read.update((storage, i) for storage, _ in op.reads)

    fused = []
    for where, group in groupby(enumerate(program), lambda pair: fuses(pair[1])):
        numbers, ops = zip(*group)
        if where:
            fused.append(one_kernel(ops, last_read, end=numbers[-1]))
        else:
            fused += ops
    return fused


def fuses(op):
    """The place in the step, if op is one of the model's own operations; None for products and
    for the work of FSDP2 and the optimizer."""
    if not isinstance(op, Operation) or op.flops or op.event:
        return None
    in_model = op.where.startswith(("forward", "backward"))
    mine = in_model and op.stream is COMPUTE and op.name.startswith("aten.")
    return op.where if mine else None


def one_kernel(group, last_read, end):
    reads = {}
    writes = {}
    for op in group:
        for storage, size in op.reads:
            if storage not in writes:
                reads[storage] = max(size, reads.get(storage, 0))
        for storage, size in op.writes:
            writes[storage] = max(size, writes.get(storage, 0))
    kept = [(storage, size) for storage, size in writes.items() if last_read.get(storage, 0) > end]
    return replace(group[-1], name="fused", reads=list(reads.items()), writes=kept)


# ---------- the streams -------------------------------------------------------


@dataclass(eq=False)
class Span:
    op: Operation
    start: float
    end: float


def run(program, cluster, micro_batches):
    """A Step of `micro_batches`. An operation begins when its stream has finished all before it,
    and the events it waits for have come."""
    if cluster.compiled:
        program = fuse(program)
    now = defaultdict(float)  # {stream, or group of ranks: when it is free}
    reached = {}  # {event: when it comes}
    spans = []
    waits = []  # [(from, to)] in which compute waits for communication
    lost = 0.0  # seconds that collectives take from compute, beyond those it waits anyway
    for op in program:
        start = now[op.stream]
        if isinstance(op, Record):
            reached[op.event] = start
            continue
        if isinstance(op, Wait):
            end = max(start, reached.get(op.event, 0.0))
        elif op.event:
            # The collectives of a group queue, on whatever stream.
            group = op.event.ranks, op.event.stride
            begin = max(start, now[group])
            end = begin + price(op, cluster)
            now[group] = end
            lost += TAKEN * (end - begin)
            spans.append(Span(op, begin, end))
        else:
            end = start + price(op, cluster)
            if op.stream is COMPUTE:
                end += lost
                lost = 0.0
            spans.append(Span(op, start, end))
        now[op.stream] = end

        is_wait = isinstance(op, Wait) or op.event
        if op.stream is COMPUTE and is_wait and end > start:
            waits.append((start, end))
            lost = max(0.0, lost - (end - start))
    return Step(spans, waits, micro_batches, cluster)


class Step:
    """seconds: of the GPU or of the host, whichever takes longer. busy_host: the share of them in
    which the host works; exposed: in which compute waits for communication. spans, waits: of the
    one to three micro-batches that were rehearsed, and of the update."""

    def __init__(self, spans, waits, micro_batches, cluster):
        self.waits = waits
        self.collectives = [span for span in spans if span.op.event]
        self.compute = [span for span in spans if span.op.stream is COMPUTE]
        self.clock = [0], [0.0]  # rows of the timeline, and when compute comes there
        self.ends = {0: 0.0}  # of each micro-batch, and of the update
        started = {0: 0.0}  # when the host has started all of each
        for span in self.compute:
            self.clock[0].append(span.op.row)
            self.clock[1].append(span.end)
            self.ends[span.op.part()] = span.end
            started[span.op.part()] = of_host(span.op, cluster)

        # The last micro-batch but one stands for those left out, or in excess.
        last = self.compute[-1]
        rehearsed = last.op.part() - 1
        more = micro_batches - rehearsed
        one, following = max(1, rehearsed - 1), max(2, rehearsed)
        begin, end = self.begin(one), self.begin(following)
        self.on_gpu = last.end + more * (end - begin)
        self.on_host = of_host(last.op, cluster)
        self.on_host += more * (started[following - 1] - started[one - 1])
        self.seconds = max(self.on_gpu, self.on_host)
        self.busy_host = self.on_host / self.seconds
        waited = self.waited(0.0, last.end) + more * self.waited(begin, end)
        self.exposed = waited / self.seconds

    def begin(self, part):
        """When a micro-batch begins, or the update."""
        return self.ends[part - 1]

    def waited(self, start, end):
        """Seconds from start to end in which compute waits."""
        return sum(max(0.0, min(end, b) - max(start, a)) for a, b in self.waits)

    def times_at(self, rows):
        """Seconds at which compute comes to these rows of the timeline."""
        return np.interp(rows, *self.clock)

    def span(self, event):
        """(start, end) of a collective, (now, now) of another event."""
        found = [span for span in self.collectives if span.op.event is event]
        if found:
            return found[0].start, found[-1].end
        now = self.times_at(event.row)
        return now, now


# ---------- the same on other machines ----------------------------------------


def grown(program, times, fixed=(), rows=True):
    """The program on `times` as many ranks. fixed: sizes of groups of neighbours that stay, such as
    hybrid_shard's ranks per copy. rows: True if a rank then has fewer of them."""
    bigger = []
    for op in program:
        if isinstance(op, Operation):
            stays = op.event and op.event.stride == 1 and op.event.ranks in fixed
            if op.event and not stays:
                ranks = round(op.event.ranks * times)
                op = replace(op, event=replace(op.event, ranks=ranks))
            elif rows and (op.stream is not COMPUTE or op.where in UPDATE):
                # FSDP2's copies beside compute, clipping and the update.
                op = replace(op, reads=fewer(op.reads, times), writes=fewer(op.writes, times))
        bigger.append(op)
    return bigger


def fewer(sizes, times):
    return [(storage, size / times) for storage, size in sizes]


def calibrated(program, cluster, micro_batches, seconds):
    """The cluster with the share of the peak at which a step takes `seconds`. SystemExit if there
    is none."""
    def at(share):
        return replace(cluster, gpu=replace(cluster.gpu, products=share))

    own = run(program, cluster, micro_batches)
    if own.busy_host == 1:
        raise SystemExit(
            "--measured: the host is the limit of this step, so it does not tell what products "
            f"reach; pass --host={cluster.host * seconds / own.on_host:.2f} instead")
    low, high = 0.01, 1.0
    longest, shortest = [run(program, at(share), micro_batches).seconds for share in (low, high)]
    if not shortest <= seconds <= longest:
        raise SystemExit(
            f"--measured: that is {seconds:.3g} s per step, and the plan's range is {shortest:.3g} "
            f"to {longest:.3g}, whatever products reach; pass the run's own --gpu and keys")
    while high - low > 1e-5 * high:
        middle = (low + high) / 2
        if run(program, at(middle), micro_batches).seconds > seconds:
            low = middle
        else:
            high = middle
    return at(high)

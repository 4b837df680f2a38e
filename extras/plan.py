"""
Predict a config's memory and traffic per step, and about how long it takes, on GPUs that you need
not have.

    python -m extras.plan config/train_gpt2_xl.py --world_size=8 --gpu=A100
    python -m extras.plan extras/config/llama2_7b.py --world_size=8,16,32 --gpu=H100 --tokens=1e11

Memory and traffic are rehearsed (rehearse.py). Not counted: the CUDA context, NCCL's and cuBLAS's
buffers, fragmentation, and the savings of compiling. So a plan fits if it takes at most 68% of a
GPU, and maybe up to 90%. The valley is what a GPU holds at rest, between two steps. tok/s and MFU
are per GPU, by one plain formula (extras/docs/plan.md).
"""

import math
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from dataclasses import dataclass, replace

import torch

from configurator import STRATEGIES, load_config, resolve
from extras.rehearse import KINDS, rehearse
from metrics import PEAK_FLOPS, flops_per_token
from ranks import World, run
from start import with_vocabulary
from train import meta_model

GIB = 2**30
# Shares of a GPU that a plan may take: what is not counted fitted in beside it in every run that
# docs/measurements.md has, or in most.
FITS = {"yes": 0.68, "maybe": 0.9}
COLUMNS = (*KINDS[2:], "peak", "valley", "host", "sent")
TIMES = {"s/step": "{:.3f}", "tok/s": "{:,.0f}", "MFU": "{:.1%}"}  # per GPU


@dataclass
class GPU:
    name: str  # as PyTorch calls it: a key of metrics.PEAK_FLOPS
    gib: float
    mfu: float  # the share of the peak that a step's FLOPs reach
    link: float  # GB/s that a ring reaches in a node
    network: float  # GB/s per GPU to other nodes
    half: str = "bfloat16"  # the type that dtype=auto takes


# Steps of 124M to 13B that were measured or published reached 17 to 65% (extras/docs/plan.md).
# link: NCCL's all-reduce on 8 A100s reached 235 of 300 GB/s; the others are estimates after it.
GPUS = {
    "V100": GPU("Tesla V100-SXM2-32GB", 31.7, 0.3, 117, 6.25, half="float16"),
    "A100": GPU("A100-SXM4-80GB", 80, 0.5, 235, 25),
    "A100-40": GPU("A100-SXM4-40GB", 40, 0.5, 235, 25),
    "H100": GPU("H100 80GB HBM3", 80, 0.4, 360, 50),
    "H200": GPU("H200", 140, 0.4, 360, 50),
    "B200": GPU("B200", 178, 0.4, 700, 50),
}


def plan(cfg, world, machine, flops_per_token=0):
    """A row: the bytes that rank 0 holds at its peak, by kind; those that it holds at rest, between
    two steps; bytes of its node's host memory; bytes that it sends per step. With flops_per_token
    also TIMES, for which the machine's GPU must be known."""
    timeline, events = rehearse(cfg, world)
    on_host = timeline[:, :2].sum(axis=1)
    held = timeline[:, 2:].sum(axis=1)  # on the device
    top = held.argmax()
    host = on_host.max()
    if cfg.checkpoint == "sharded":
        # A save copies this rank's rows of parameters and moments, as they are at rest.
        rest = dict(zip(KINDS, timeline[0]))
        host += on_host[0] + rest["parameters"] + rest["optimizer"]

    row = dict(zip(KINDS, timeline[top]))
    row["strategy"] = cfg.strategy
    row["peak"] = held[top]
    row["valley"] = held[-1]
    row["host"] = host * world.local_size  # its neighbours hold as much
    row["sent"] = sum(event.times * event.sent() for event in events)
    row["fits"] = "no"
    for answer, share in reversed(FITS.items()):
        if row["peak"] <= share * machine.gpu_memory and row["host"] <= machine.host_memory:
            row["fits"] = answer
    # Recorded, GPT-2 XL's step of 24.6 GiB had 46.8 reserved on an H200.
    if cfg.cuda_graph and 2 * row["peak"] > FITS["yes"] * machine.gpu_memory:
        row["fits"] = row["fits"].replace("yes", "maybe")

    if flops_per_token:
        micro_batches = cfg.gradient_accumulation_steps // world.size
        tokens = micro_batches * cfg.batch_size * cfg.sizes.block_size
        flops = tokens * flops_per_token
        again = 4 / 3 if cfg.activation_checkpointing == "full" else 1  # backward runs forward
        row["s/step"] = seconds(events, again * flops, machine)
        row["tok/s"] = tokens / row["s/step"]
        row["MFU"] = flops / row["s/step"] / PEAK_FLOPS[machine.gpu.name]
    return row


def seconds(events, flops, machine):
    """A step's seconds on a GPU that does these FLOPs and has these events: the larger of two
    times, and what nothing hides."""
    compute = flops / (PEAK_FLOPS[machine.gpu.name] * machine.mfu)
    sending = alone = 0
    passes = [event for event in events if "::" in event.label]  # FSDP2's and DDP's
    for event in events:
        one = event.sent() / rate(event, machine)
        sending += event.times * one
        # Nothing runs beside the first gather, the last reduction, and what the update sends.
        if "::" not in event.label or event is passes[0] or event is passes[-1]:
            alone += one
    return max(compute, sending - alone) + alone


def rate(event, machine):
    """bytes/s per rank of a collective's ring."""
    if machine.link:
        return machine.link * 1e9
    # The ring leaves a node over the lines of all its GPUs there.
    in_node = min(event.ranks, max(1, machine.gpus_per_node // event.stride))
    network = in_node * machine.gpu.network if event.ranks > in_node else math.inf
    return min(machine.gpu.link, network) * 1e9


def place(cfg, size, machine):
    """(cfg resolved for `size` GPUs, their World); SystemExit if keys exclude each other."""
    device = torch.device("cpu" if cfg.device == "cpu" else "cuda")
    world = World(size=size, device=device, local_size=min(size, machine.gpus_per_node))
    # Training refuses all but multiples of the ranks; a plan takes the next one.
    steps = math.ceil(cfg.gradient_accumulation_steps / size) * size
    keys = dict(gradient_accumulation_steps=steps, compile=False)  # fake tensors run eagerly
    if cfg.dtype == "auto" and device.type == "cuda":  # this machine may have no GPU
        keys["dtype"] = machine.gpu.half if machine.gpu else "bfloat16"
    return resolve(replace(cfg, **keys), world, distributed=cfg.strategy != "single"), world


def variants(cfg, size, machine):
    """[(cfg, World)] for --strategy, or for every strategy that the keys allow. SystemExit if
    they do not allow the config's own."""
    if machine.strategy:
        return [place(replace(cfg, strategy=machine.strategy), size, machine)]
    own = cfg.strategy or "full_shard"
    strategies = ["single", "full_shard"]
    if size > 1:
        strategies = [name for name in STRATEGIES if name != "single"]
    allowed = []
    for strategy in strategies:
        try:
            placed, world = place(replace(cfg, strategy=strategy), size, machine)
        except SystemExit:
            if strategy == own:
                raise
            continue
        # hybrid_shard is full_shard in one group, and does not work in uneven ones.
        group = placed.shard_group_size
        if strategy == own or not group or (group < size and size % group == 0):
            allowed.append((placed, world))
    return allowed


def parse(argv):
    """(plan's own flags, which describe the machine; the remaining arguments)."""
    parser = ArgumentParser(
        usage="python -m extras.plan [config files] [flags below] [--key=value of train.py]",
        description=__doc__, formatter_class=RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.error = sys.exit  # one line and exit code 1, as everywhere here
    add = parser.add_argument
    add("--world_size", default="1", help="GPUs; for several numbers, 8,16, a table each")
    add("--strategy", choices=STRATEGIES, help="only this one; else all that the keys allow")
    add("--gpus_per_node", type=int, default=8, help="GPUs that share host memory and NVLink")
    add("--gpu_memory", type=float, help="GiB per GPU (--gpu's, else 80)")
    add("--host_memory", type=float, default=math.inf, help="GiB per node")
    add("--gpu", choices=GPUS,
        help="adds times; for another take the nearest, with its own --gpu_memory, --mfu, --link")
    add("--mfu", type=float, help="the share of its peak that a step's FLOPs reach (0.3 to 0.5)")
    add("--link", type=float, help="GB/s per GPU that a collective reaches")
    add("--tokens", type=float, help="of the whole run: prints its hours")
    own, rest = parser.parse_known_args(argv)
    own.gpu = GPUS.get(own.gpu)
    if own.gpu:
        own.mfu = own.mfu or own.gpu.mfu
        own.gpu_memory = own.gpu_memory or own.gpu.gib
    # From here on in bytes.
    own.gpu_memory = GIB * (own.gpu_memory or 80)
    own.host_memory *= GIB
    return own, rest


def main(argv):
    machine, rest = parse(argv)
    cfg = with_vocabulary(load_config(rest))
    for size in machine.world_size.split(","):
        print_table(cfg, int(size), machine)


def print_table(cfg, size, machine):
    """The plan for `size` GPUs."""
    todo = variants(cfg, size, machine)
    model = meta_model(cfg)
    n = sum(p.numel() for p in model.parameters())
    placed, _ = todo[0]
    steps = placed.gradient_accumulation_steps
    print(
        f"{n / 1e6:,.1f}M parameters on {size} GPUs of {machine.gpu_memory / GIB:.0f} GiB, "
        f"{placed.dtype}\n"
        f"planned with gradient_accumulation_steps={steps}, a multiple of {size}: {steps // size} "
        f"x batch_size {cfg.batch_size} x {cfg.sizes.block_size:,} tokens per GPU and step\n"
        f"fits: at most {FITS['yes']:.0%} of a GPU in tensors; maybe: {FITS['maybe']:.0%}; the "
        "rest is headroom")

    # The table, each line as soon as it is known.
    unit, name = GIB, "GiB"
    if 16 * n < GIB:  # 16 bytes per parameter
        unit, name = 2**20, "MiB"
    flops = flops_per_token(model, World()) if machine.gpu else 0  # 0: no times
    timed = TIMES if flops else {}
    heads = [key.replace("host", "host/node") for key in COLUMNS]
    print_line(f"{name} per GPU", [*heads, *timed], "fits")
    rows = []
    for placed, world in todo:
        row = plan(placed, world, machine, flops)
        cells = [f"{row[key] / unit:,.2f}" for key in COLUMNS]
        cells += [form.format(row[key]) for key, form in timed.items()]
        print_line(row["strategy"], cells, row["fits"])
        rows.append(row)

    # The simplest is first.
    fitting = [row for answer in FITS for row in rows if row["fits"] == answer]
    picked = fitting[0] if fitting else rows[-1]
    if flops:
        print_times(picked, size, machine)
    print({
        "yes": f"take --strategy={picked['strategy']}, the simplest that fits",
        "maybe": f"try --strategy={picked['strategy']}, the simplest that may fit",
        "no": "nothing fits: try --loss_chunks=8, --activation_checkpointing=selective, then "
              "full, a smaller --batch_size, --cpu_offload=0.25 and up; or more GPUs",
    }[picked["fits"]])


def print_line(head, cells, fits):
    columns = "".join(f" {cell:>11s}" for cell in cells)
    print(f"{head:13s}{columns}  {fits}", flush=True)


def print_times(row, size, machine):
    """What the times assume, and the hours of the whole run."""
    print(
        f"times: at {machine.mfu:.0%} of the peak (--mfu). Small units that wait for the host take "
        "1.6 to 3.5 times\nas long; offloading, evaluation and saves come on top")
    if machine.tokens:
        hours = machine.tokens / row["tok/s"] / size / 3600
        print(f"{machine.tokens:,.0f} tokens with {row['strategy']} on {size} GPUs: "
              f"{hours:,.1f} hours")


if __name__ == "__main__":
    run(main, sys.argv[1:])

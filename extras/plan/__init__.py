"""
Predict a config's memory and traffic per step, and about how long it takes, on GPUs that you need
not have.

    python -m extras.plan config/train_gpt2_xl.py --world_size=8 --gpu=A100
    python -m extras.plan extras/config/gpt3_13b.py --gpu_memory=139 --host_memory=256 \\
        --cpu_offload=0.4
    python -m extras.plan extras/config/llama2_7b.py --world_size=8,16,32,64 --gpu=H100 \\
        --tokens=1e11
    python -m extras.plan config/quickstart.py --world_size=2 --strategy=full_shard --events
    python -m extras.plan extras/config/llama2_7b.py --world_size=8 --units

Memory and traffic are rehearsed (rehearse.py): the real step, on fake tensors, as
rank 0 of that many GPUs. Not counted: the CUDA context, NCCL's and cuBLAS's buffers,
fragmentation, and the savings of compiling. So a plan fits if it takes at most 68% of a GPU, and
maybe up to 90%. Times are by one plain formula (timing.py). The valley is what a GPU holds at rest,
between two steps. tok/s and MFU are per GPU. Batches are the micro-batches per GPU and step.
"""

import math
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from dataclasses import replace

import torch

from configurator import STRATEGIES, load_config, resolve
from extras.plan import timing
from extras.plan.events import print_events
from extras.plan.rehearse import KINDS, rehearse, wrapped_text
from fsdp import find_units
from metrics import PEAK_FLOPS, flops_per_token
from ranks import World
from start import with_vocabulary
from train import meta_model

GIB = 2**30
MIB = 2**20
ON_DEVICE = KINDS[1:]  # KINDS[0] is host memory
# Shares of a GPU that a plan may take: what is not counted fitted in beside it in every run that
# docs/measurements.md has, or in most.
FITS = {"yes": 0.68, "maybe": 0.9}
COLUMNS = (*ON_DEVICE, "peak", "valley", "host", "sent")
TIMES = {"s/step": "{:.3f}", "tok/s": "{:,.0f}", "MFU": "{:.1%}"}  # per GPU


# ---------- a row of the table ------------------------------------------------


def plan(cfg, world, machine, flops_per_token=0):
    """A row: the bytes that rank 0 holds at its peak, by kind, and where in the step the peak is;
    those that it holds at rest, between two steps; bytes of its node's host memory; bytes that it
    sends per step. With flops_per_token also TIMES, for which the machine's GPU must be known."""
    flash = not machine.gpu or machine.gpu.flash
    timeline, marks, events = rehearse(cfg, world, flash)
    on_device = timeline[:, 1:].sum(axis=1)
    top = int(on_device.argmax())
    peak = on_device[top]
    host = timeline[:, 0].max()
    if cfg.checkpoint == "sharded":
        # A save copies this rank's rows of parameters and moments, as they are at rest.
        rest = dict(zip(KINDS, timeline[0]))
        host += rest["host"] + rest["parameters"] + rest["optimizer"]
    host *= world.local_size  # its neighbours hold as much
    marks_before = [where for start, where in marks if start < top]

    row = dict(zip(ON_DEVICE, timeline[top, 1:]))
    row["strategy"] = cfg.strategy
    row["peak"] = peak
    row["valley"] = on_device[-1]
    row["where"] = marks_before[-1]
    row["host"] = host
    row["sent"] = sum(event.times * event.sent() for event in events)
    row["fits"] = "no"
    for answer, share in reversed(FITS.items()):
        if peak <= share * machine.gpu_memory and host <= machine.host_memory:
            row["fits"] = answer
    # Recorded, GPT-2 XL's step of 24.6 GiB had 46.8 reserved on an H200.
    if cfg.cuda_graph and row["fits"] == "yes" and 2 * peak > FITS["yes"] * machine.gpu_memory:
        row["fits"] = "maybe"
    row["timeline"] = timeline
    row["marks"] = marks
    row["events"] = events
    if flops_per_token:
        row.update(times(events, cfg, world.size, machine, flops_per_token))
    return row


def times(events, cfg, size, machine, flops_per_token):
    """A row's TIMES, per GPU."""
    tokens = cfg.gradient_accumulation_steps // size * cfg.batch_size * cfg.sizes.block_size
    flops = tokens * flops_per_token
    again = 4 / 3 if cfg.activation_checkpointing == "full" else 1  # backward runs forward again
    seconds = timing.seconds(events, again * flops, machine)
    return {
        "s/step": seconds,
        "tok/s": tokens / seconds,
        "MFU": flops / seconds / PEAK_FLOPS[machine.gpu.name],
    }


# ---------- which strategies --------------------------------------------------


def place(cfg, size, machine):
    """(cfg resolved for `size` GPUs, their World); SystemExit if keys exclude each other."""
    device = torch.device("cpu" if cfg.device == "cpu" else "cuda")
    world = World(size=size, device=device, local_size=min(size, machine.gpus_per_node))
    # Training refuses all but multiples of the ranks; a plan takes the next one.
    micro_batches = math.ceil(cfg.gradient_accumulation_steps / size)
    keys = dict(
        gradient_accumulation_steps=micro_batches * size,
        compile=False,  # fake tensors run eagerly
    )
    row = STRATEGIES[cfg.strategy]
    if not row.in_groups:
        keys["shard_group_size"] = 0  # another row may need it
    if not row.sharded or not row.reshard_after_forward:
        keys["reshard_group_size"] = 0  # the same
    if cfg.dtype == "auto" and device.type == "cuda":
        # Resolved here, since this machine may have no GPU.
        keys["dtype"] = machine.gpu.half if machine.gpu else "bfloat16"
    cfg = replace(cfg, **keys)
    return resolve(cfg, world, distributed=cfg.strategy != "single"), world


def variants(cfg, size, machine):
    """[(cfg, World)] for --strategy, or for every strategy that the keys allow. SystemExit if
    they do not allow the config's own."""
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
        # hybrid_shard is full_shard in one group, and does not work in uneven ones.
        group = placed.shard_group_size
        if strategy == own or not group or (group < size and size % group == 0):
            allowed.append((placed, world))
    return allowed


# ---------- the command -------------------------------------------------------


def parse(argv):
    """(plan's own flags, which describe the machine; the remaining arguments)."""
    parser = ArgumentParser(
        usage="python -m extras.plan [config files] [flags below] [--key=value of train.py]",
        description=__doc__,
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.error = sys.exit  # one line and exit code 1, as everywhere here
    add = parser.add_argument
    add("--world_size", type=numbers, default=[1], metavar="N,N",
        help="GPUs; several numbers have a table each")
    add("--strategy", choices=STRATEGIES,
        help="plan only this one; else all that the keys allow")
    add("--gpus_per_node", type=int, default=8,
        help="GPUs that share host memory and NVLink")
    add("--gpu_memory", type=float,
        help="GiB per GPU (--gpu's, else 80)")
    add("--host_memory", type=float, default=math.inf,
        help="GiB per node")
    add("--events", choices=("folded", "all"),
        help="print the step's events, in order; =all: every block's")
    add("--units", action="store_true", default=None,
        help="print the model as FSDP2 wraps it, instead of a plan: each class FSDP... is a unit")
    times = parser.add_argument_group("how long it takes")
    add = times.add_argument
    add("--gpu", type=timing.find_gpu, default=timing.this_gpu(), metavar="NAME",
        help=f"{', '.join(timing.GPUS)} (this machine's, if known)")
    add("--mfu", type=float, metavar="SHARE",
        help="of the peak that a step's FLOPs reach (A100 0.5, V100 0.3, others 0.4)")
    add("--link", type=float, metavar="GB/S",
        help="per GPU, that a collective reaches (V100 117, A100 235, H100 and H200 360, B200 700; "
             "between nodes at most 8 times 6.25, 25 or 50)")
    add("--tokens", type=float,
        help="of the whole run: prints its hours")
    # A config file may follow: --events alone must not take it as its value.
    argv = ["--events=folded" if arg == "--events" else arg for arg in argv]
    own, rest = parser.parse_known_args(argv)

    for key in ("mfu", "link", "tokens"):
        if getattr(own, key) and not own.gpu:
            raise SystemExit(f"--{key} needs a GPU's name: add --gpu=H100, or see --help")
    if own.gpu and not own.mfu:
        own.mfu = own.gpu.mfu
    # From here on in bytes.
    own.gpu_memory = GIB * (own.gpu_memory or (own.gpu.gib if own.gpu else 80))
    own.host_memory *= GIB
    return own, rest


def numbers(text):
    return sorted({int(n) for n in text.split(",")})


def main(argv):
    machine, rest = parse(argv)
    cfg = with_vocabulary(load_config(rest))
    tables = [plan_table(cfg, size, machine) for size in machine.world_size]
    return tables[0]


def plan_table(cfg, size, machine):
    """Print the plan for `size` GPUs; returns its rows."""
    todo = variants(cfg, size, machine)

    # The title: model, GPUs and batch.
    model = meta_model(cfg)
    n = count(model)
    memory = machine.gpu_memory / GIB
    title = f"{n / 1e6:,.1f}M parameters on {size} GPUs"
    placed, _ = todo[-1]  # `single` may have fewer micro-batches
    steps = placed.gradient_accumulation_steps
    configured = cfg.gradient_accumulation_steps
    instead = "" if steps == configured else f" instead of {configured}"
    print(
        f"{title} of {memory:.0f} GiB, {placed.dtype}; {describe_units(model, cfg)}\n"
        f"planned with gradient_accumulation_steps={steps}{instead}, a multiple of {size}: "
        f"{steps // size} x batch_size {cfg.batch_size} x {cfg.sizes.block_size:,} tokens per GPU "
        "and step")
    if machine.units:
        print(wrapped_text(*todo[-1]))
        return []
    print(
        f"fits: at most {FITS['yes']:.0%} of a GPU in tensors; maybe: {FITS['maybe']:.0%}; the "
        "rest is headroom")
    flops = flops_per_token(model, World()) if machine.gpu else 0  # 0: no times

    # The table, each line as soon as it is known.
    unit, name = MIB, "MiB"
    if 16 * n >= GIB:  # 16 bytes per parameter
        unit, name = GIB, "GiB"
    heads = [key.replace("host", "host/node") for key in COLUMNS]
    timed = TIMES if flops else {}
    print_line(f"{name} per GPU", heads, timed, "fits", "peak at")
    rows = []
    for placed, world in todo:
        row = plan(placed, world, machine, flops)
        cells = [f"{row[key] / unit:,.2f}" for key in COLUMNS]
        clock = [form.format(row[key]) for key, form in timed.items()]
        print_line(row["strategy"], cells, clock, row["fits"], row["where"])
        # Beside others, `single` is only for comparison: its memory is ddp's.
        if placed.strategy != "single" or size == 1:
            rows.append(row)

    if machine.events:
        for row in rows:
            print_events(row, steps // size, unit, name, fold=machine.events == "folded")
        print()
    # The simplest is first.
    fitting = [row for answer in FITS for row in rows if row["fits"] == answer]
    picked = fitting[0] if fitting else rows[-1]
    if not machine.gpu:
        print(f"for times, add --gpu={', '.join(timing.GPUS)}")
    elif flops:
        units = max(1, len(find_units(model, model.blocks, cfg.wrap_min_params)))
        a_unit = picked["s/step"] / (steps // size) / units
        print_what_times_assume(a_unit, cfg, machine)
        if machine.tokens:
            print_hours(machine.tokens, picked, size)
    if picked["fits"] == "yes":
        print(f"take --strategy={picked['strategy']}, the simplest that fits")
    elif picked["fits"] == "maybe":
        print(f"try --strategy={picked['strategy']}, the simplest that may fit")
    else:
        print(
            "nothing fits: try --loss_chunks=8, --activation_checkpointing=selective, then "
            "full, a smaller --batch_size, --cpu_offload=0.25 and up; or more GPUs")
    return rows


def print_what_times_assume(a_unit, cfg, machine):
    """a_unit: seconds of a unit's forward and backward, by the formula."""
    gpu = machine.gpu
    link = f"{gpu.link:g} GB/s in a node of {machine.gpus_per_node}, {gpu.network:g} between"
    if machine.link:
        link = f"{machine.link:g} GB/s"
    print(
        f"times: at {machine.mfu:.0%} of the peak (--mfu), links of {link} per GPU (--link); "
        "evaluation and saves come on top")
    if a_unit < timing.HOST and not cfg.cuda_graph:
        print(
            f"a unit takes {1e3 * a_unit:.1f} ms: sharded or not compiled, the GPU may wait for "
            "the host, and a step take 1.6 to 3.5 times as long as here (--cuda_graph)")
    if cfg.cpu_offload or cfg.activation_offload:
        print("copies between host and GPU come on top")


def print_hours(tokens, row, size):
    hours = tokens / row["tok/s"] / size / 3600
    long = f"{hours / 24:,.2f} days" if hours >= 24 else f"{hours:.1f} hours"
    print(f"{tokens:,.0f} tokens with {row['strategy']} on {size} GPUs: {long}")


def describe_units(model, cfg):
    """The number of units and the size of the first, as text."""
    units = find_units(model, model.blocks, cfg.wrap_min_params)
    # wrap_min_params may be more than any module has: then everything is the root's.
    names = {module: name for name, module in model.named_modules()}
    first, name = model, "the root"
    if units:
        first, name = units[0], names[units[0]]
    millions = count(first) / 1e6
    return f"{len(units)} units and the root; {name} has {millions:,.2f}M parameters"


def count(module):
    return sum(p.numel() for p in module.parameters())


def print_line(head, cells, times, fits="", where=""):
    columns = "".join(f" {cell:>11s}" for cell in cells)
    columns += "".join(f" {cell:>9s}" for cell in times)
    print(f"{head:13s}{columns}  {fits:5s} {where}".rstrip(), flush=True)

"""
Predict a config's memory, traffic and time per step, on GPUs that you need not have.

    python -m extras.plan config/train_gpt2_xl.py --world_size=8 --gpu=A100
    python -m extras.plan extras/config/gpt3_13b.py --gpu_memory=139 --host_memory=256 \\
        --cpu_offload=0.4
    python -m extras.plan extras/config/llama2_7b.py --world_size=8,16,32,64 --gpu=H100 \\
        --tokens=1e11
    python -m extras.plan extras/config/llama2_7b.py --world_size=8 --gpu=H100 --plot=memory.png
    python -m extras.plan config/quickstart.py --world_size=2 --strategy=full_shard --events
    python -m extras.plan extras/config/llama2_7b.py --world_size=8 --units

Memory and traffic are rehearsed (rehearse.py): the real step, on fake tensors, as
rank 0 of that many GPUs. Not counted: the CUDA context, NCCL's and cuBLAS's buffers,
fragmentation, and the savings of compiling. So a plan fits if it takes at most 68% of a GPU, and
maybe up to 90%. Times are estimates (timing.py); extras/docs/measurements.md says how far they were
from runs that others published. The valley is what a GPU holds at rest, between two steps. tok/s
and MFU are per GPU. Exposed is the share of a step in which a GPU waits for others, and CPU the
share in which the host is busy: at 100% the step takes as long as the host does. Batches are the
micro-batches per GPU and step.
"""

import math
import os
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from dataclasses import replace

import torch

from configurator import STRATEGIES, load_config, resolve
from extras.plan import timing
from extras.plan.picture import check_plot, draw, print_events
from extras.plan.rehearse import KINDS, rehearse, wrapped_text
from fsdp import find_units
from metrics import flops_per_token
from ranks import World
from start import with_vocabulary
from train import meta_model

LARGEST = 16384  # GPUs: a rehearsal cuts each parameter into that many pieces
GIB = 2**30
MIB = 2**20
ON_DEVICE = KINDS[1:]  # KINDS[0] is host memory
# Shares of a GPU that a plan may take: what is not counted fitted in beside it in every run that
# extras/docs/measurements.md has, or in most.
FITS = {"yes": 0.68, "maybe": 0.9}
COLUMNS = (*ON_DEVICE, "peak", "valley", "host", "sent")
TIMES = {  # per GPU
    "s/step": "{:.3f}", "tok/s": "{:,.0f}", "MFU": "{:.1%}", "exposed": "{:.1%}", "CPU": "{:.0%}"}


# ---------- a row of the table ------------------------------------------------


def plan(cfg, world, machine):
    """A row: the bytes that rank 0 holds at its peak, by kind, and where in the step the peak is;
    those that it holds at rest, between two steps; bytes of its node's host memory; bytes that it
    sends per step."""
    timeline, marks, events, program = rehearse(cfg, world, machine.attention)
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
    row["program"] = program
    if machine.cluster:
        row.update(times(program, cfg, world.size, machine))
    return row


def times(program, cfg, size, machine):
    """The columns of a row that need a GPU's name, per GPU."""
    micro_batches, tokens = of_a_step(cfg, size)
    cluster = machine.cluster
    if cfg.cuda_graph:
        cluster = replace(cluster, host=0.0)  # a replay is one call
    step = timing.run(program, cluster, micro_batches)
    rate = tokens / step.seconds
    flops = rate * machine.flops_per_token
    return {
        "step": step,
        "s/step": step.seconds,
        "tok/s": rate,
        "MFU": flops / machine.cluster.gpu.peak,
        "exposed": step.exposed,
        "CPU": step.busy_host,
    }


def of_a_step(cfg, size):
    """(micro-batches, tokens) per GPU, if there are `size` GPUs."""
    micro_batches = cfg.gradient_accumulation_steps // size
    tokens = micro_batches * cfg.batch_size * cfg.sizes.block_size
    return micro_batches, tokens


def calibrate(todo, machine, strategy):
    """Set the rate of products so that the config's own strategy reaches --measured."""
    placed, world = todo[-1]
    for one in todo:
        if one[0].strategy == strategy:
            placed, world = one
    *_, program = rehearse(placed, world, machine.attention)
    micro_batches, tokens = of_a_step(placed, world.size)
    seconds = tokens / machine.measured
    machine.cluster = timing.calibrated(program, machine.cluster, micro_batches, seconds)
    share = machine.cluster.gpu.products
    print(
        f"{machine.measured:,.0f} tokens/s per GPU were measured ({placed.strategy}): products "
        f"reach {share:.1%} of the peak")


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
        keys["dtype"] = machine.cluster.gpu.half if machine.cluster else "bfloat16"
    cfg = replace(cfg, **keys)
    return resolve(cfg, world, distributed=cfg.strategy != "single"), world


def variants(cfg, size, machine):
    """[(cfg, World)] for --strategy, or for every strategy that the keys allow. SystemExit if
    they do not allow the config's own."""
    if machine.strategy == "single" and size > 1:
        raise SystemExit("--strategy=single is one process: pass --world_size=1, or leave it out")
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
        one_group = placed.shard_group_size >= size  # hybrid_shard is full_shard then
        if strategy == own or not one_group:
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
        help=f"GPUs, at most {LARGEST:,}; after the first, only times (with --gpu)")
    add("--strategy", choices=STRATEGIES,
        help="plan only this one; else all that the keys allow")
    add("--gpus_per_node", type=int, default=8,
        help="GPUs that share host memory and NVLink")
    add("--gpu_memory", type=float,
        help="GiB per GPU (--gpu's or this machine's, else 80)")
    add("--host_memory", type=float, default=math.inf,
        help="GiB per node")
    add("--plot", metavar="FILE.png", type=os.path.expanduser,
        help="draw a step's memory and streams (with --gpu); .svg, .pdf too")
    add("--events", choices=("folded", "all"),
        help="print the step's events, in order; =all: every block's")
    add("--units", action="store_true", default=None,
        help="print the model as FSDP2 wraps it, instead of a plan: each class FSDP... is a unit")
    times = parser.add_argument_group("how long it takes")
    add = times.add_argument
    add("--gpu", type=timing.find_gpu, default=timing.this_gpu(), metavar="NAME",
        help=f"{', '.join(timing.GPUS)}, or PEAK_TFLOPS:MEMORY_TB/s:NVLINK_GB/s by its data "
             "sheet (this machine's, if known)")
    add("--network", type=float, metavar="GBIT/S",
        help="gigabits/s per GPU to other nodes (V100 50, A100 200, others 400)")
    add("--attention", choices=timing.ATTENTION,
        help="the attention kernel (H100, H200 and B200 cudnn, V100 written_out, else flash2)")
    add("--measured", type=float, metavar="TOK/S",
        help="per GPU, in a short run of this config: products then run as fast as there")
    add("--host", type=float, default=1.0, metavar="TIMES",
        help="how long your CPU takes for its part, beside that of one H100 (two others: 1.4 to 2)")
    add("--tokens", type=float,
        help="of the whole run: prints its days and GPU-hours on each number of GPUs")
    add("--price", type=float,
        help="per GPU-hour: prints the cost of --tokens")
    # A config file may follow: --events alone must not take it as its value.
    argv = ["--events=folded" if arg == "--events" else arg for arg in argv]
    own, rest = parser.parse_known_args(argv)

    for key, value in vars(own).items():
        values = value if isinstance(value, list) else [value]
        if any(isinstance(n, (int, float)) and not n > 0 for n in values):  # NaN is not
            raise SystemExit(f"--{key}={values[0]}: pass a number above 0")
    if max(own.world_size) > LARGEST:
        raise SystemExit(f"--world_size={max(own.world_size)}: pass at most {LARGEST}")
    check_times(own)
    if own.plot:
        check_plot(own.plot)
    memory = own.gpu_memory
    if not memory:
        memory = own.gpu.gib if own.gpu else this_memory()
    own.gpu_memory = memory * GIB  # from here on in bytes
    own.host_memory *= GIB
    own.cluster = None
    if not own.attention:
        own.attention = own.gpu.kernel if own.gpu else "flash2"
    if own.gpu:
        network = own.gpu.network
        if own.network:
            network = own.network * 1e9 / 8
        own.cluster = timing.Cluster(
            own.gpu,
            own.gpus_per_node,
            network,
            own.attention,
            host=own.host,
        )
    return own, rest


def numbers(text):
    try:
        return sorted({int(n) for n in text.split(",")})
    except ValueError:
        raise SystemExit(f"--world_size={text}: pass a whole number, or several as 8,16,32")


def this_memory():
    """GiB of this machine's GPU, or 80."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_properties(0).total_memory / GIB
    return 80


def check_times(own):
    """SystemExit if a flag lacks another that it needs, or the GPU has no such kernel."""
    asked = dict(
        network=own.network,
        measured=own.measured,
        tokens=own.tokens,
        plot=own.plot,
        world_size=own.world_size[1:],
    )
    for key, value in asked.items():
        if value and not own.gpu:
            raise SystemExit(f"--{key} needs a GPU's times: add --gpu=H100, or see --help")
    if own.price and not own.tokens:
        raise SystemExit(f"--price={own.price:g} needs the whole run's --tokens")
    if own.world_size[1:] and own.world_size[0] == 1:
        raise SystemExit(
            "--world_size=1 has nothing to send: begin the list with 2, or ask for 1 alone")
    if not own.gpu:
        return
    kernels = [*own.gpu.attention, "written_out"]
    if own.attention and own.attention not in kernels:
        known = ", ".join(kernels)
        raise SystemExit(f"--attention={own.attention} on this GPU: known are {known}")


def main(argv):
    machine, rest = parse(argv)
    size = machine.world_size[0]
    cfg = with_vocabulary(load_config(rest))
    todo = variants(cfg, size, machine)
    if machine.world_size[1:] and cfg.reshard_group_size >= size:
        raise SystemExit(
            f"--world_size={size}: with reshard_group_size={cfg.reshard_group_size} begin the list "
            "with more GPUs than that")

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
        if not STRATEGIES[placed.strategy].sharded:
            raise SystemExit(f"--units: strategy={placed.strategy} has none; pass full_shard")
        print(wrapped_text(*todo[-1]))
        return []
    print(
        f"fits: at most {FITS['yes']:.0%} of a GPU in tensors; maybe: {FITS['maybe']:.0%}; the "
        "rest is headroom")
    if machine.cluster:
        nvlink = machine.cluster.gpu.nvlink / 1e9
        network = machine.cluster.network * 8 / 1e9
        print(
            f"assumed: {nvlink:.0f} GB/s per GPU in a node of {machine.gpus_per_node}, "
            f"{network:.0f} Gb/s per GPU between nodes (--network)")
        machine.flops_per_token = flops_per_token(model, World())
        machine.cluster = replace(machine.cluster, compiled=cfg.compile)
        if machine.measured:
            calibrate(todo, machine, strategy=cfg.strategy or "full_shard")

    # The table, each line as soon as it is known.
    unit, name = MIB, "MiB"
    if 16 * n >= GIB:  # 16 bytes per parameter
        unit, name = GIB, "GiB"
    heads = [key.replace("host", "host/node") for key in COLUMNS]
    timed = TIMES if machine.cluster else ()
    print_line(f"{name} per GPU", heads, timed, "fits", "peak at")
    rows = []
    for placed, world in todo:
        row = plan(placed, world, machine)
        cells = [f"{row[key] / unit:,.2f}" for key in COLUMNS]
        timed = clock(row) if machine.cluster else ()
        print_line(row["strategy"], cells, timed, row["fits"], row["where"])
        # Beside others, `single` is only for comparison: its memory is ddp's.
        if placed.strategy != "single" or size == 1:
            rows.append(row)

    if machine.events:
        for row in rows:
            print_events(row, steps // size, unit, name, fold=machine.events == "folded")
        print()
    if machine.plot:
        files = [arg for arg in rest if not arg.startswith("--")]
        title = os.path.basename(files[-1]).removesuffix(".py") if files else cfg.model
        title += f" on {size} GPUs of {memory:.0f} GiB: the last micro-batch of a step, predicted"
        draw(rows, machine, unit, name, title, machine.plot)
        print(f"wrote {machine.plot}")
    if machine.world_size[1:]:
        print_more_gpus(rows, cfg, machine)
    # The simplest is first.
    fitting = [row["strategy"] for answer in FITS for row in rows if row["fits"] == answer]
    picked = fitting[0] if fitting else rows[-1]["strategy"]
    print_times(rows, picked, size, cfg, machine)
    if any(row["fits"] == "yes" for row in rows):
        print(f"take --strategy={picked}, the simplest that fits")
    elif fitting:
        print(f"try --strategy={picked}, the simplest that may fit")
    else:
        print(
            "nothing fits: try --loss_chunks=8, --activation_checkpointing=selective, then "
            "full, a smaller --batch_size, --cpu_offload=0.25 and up; or more GPUs")
    return rows


def print_more_gpus(rows, cfg, machine):
    """Print the rehearsals' times on more GPUs, and the number beyond which one more helps less."""
    print()
    names = [*TIMES, *whole_run(1.0, 1, machine)]
    print_line("", ["GPUs", "batches", "all tok/s"], names)
    first = machine.world_size[0]
    changed = {}  # {GPUs: all their micro-batches, if not the config's}
    for row in rows:
        rates = {}  # {GPUs: all their tokens/s}
        for size in machine.world_size:
            try:
                placed, _ = place(replace(cfg, strategy=row["strategy"]), size, machine)
            except SystemExit:
                continue  # the groups of hybrid_shard do not divide them
            fixed = placed.shard_group_size, placed.reshard_group_size
            has_fewer_rows = STRATEGIES[placed.strategy].sharded and not placed.shard_group_size
            program = timing.grown(row["program"], size / first, fixed, has_fewer_rows)
            more = times(program, placed, size, machine)
            rates[size] = size * more["tok/s"]
            batches = placed.gradient_accumulation_steps
            if batches != cfg.gradient_accumulation_steps:
                changed[size] = batches
            cells = [f"{size:,}", f"{batches // size:,}", f"{rates[size]:,.0f}"]
            run = whole_run(more["tok/s"], size, machine)
            print_line(row["strategy"], cells, [*clock(more), *run.values()])
        print_limit(row["strategy"], rates)
    if changed:
        them = ", ".join(f"{batches} on {size}" for size, batches in changed.items())
        print(
            f"planned with gradient_accumulation_steps={them} GPUs instead of "
            f"{cfg.gradient_accumulation_steps}: train.py takes only multiples of the GPUs")


def print_limit(strategy, rates):
    first = min(rates)
    for size, more in zip(rates, list(rates)[1:]):
        gain = (rates[more] - rates[size]) / (more - size)
        if gain < 0.8 * rates[first] / first:
            print(
                f"{strategy}: beyond {size} GPUs each one more adds less than 80% of the tok/s of "
                f"one of the first {first}")
            return


def print_times(rows, picked, size, cfg, machine):
    """Print what the times cover, and the whole run's time with the picked strategy."""
    if not machine.cluster:
        print(f"for times, add --gpu={', '.join(timing.GPUS)} or your GPU's numbers (--help)")
        return
    kind = "compiled" if machine.cluster.compiled else "not compiled"
    print(
        f"times are for the steps alone, {kind}, at full power (at 500 W an H100 took 32% longer); "
        "evaluation, saves and stragglers come on top")
    if cfg.cpu_offload or cfg.activation_offload:
        rate = machine.cluster.gpu.pcie / 1e9
        print(f"copies between host and GPU are assumed to run at {rate:g} GB/s (PCIe)")
    if cfg.cuda_graph:
        print("cuda_graph: gradients stay; what else a recording keeps is not known, so only what "
              "fits twice is sure to fit")
    if not machine.tokens:
        return
    row = {row["strategy"]: row for row in rows}[picked]
    run = whole_run(row["tok/s"], size, machine)
    hours = machine.tokens / row["tok/s"] / size / 3600
    long = f"{run['days']} days" if hours >= 24 else f"{hours:.1f} hours"
    print(f"{machine.tokens:,.0f} tokens with {picked} on {size} GPUs: {long}")
    print(f"{run['GPU-hours']} GPU-hours")
    if machine.price:
        print(f"{run['dollars']} dollars, at {machine.price:g} per GPU-hour")


def whole_run(rate, size, machine):
    """{name: text}: the days, GPU-hours and dollars of --tokens, at `rate` tokens/s per GPU."""
    if not machine.tokens:
        return {}
    hours = machine.tokens / rate / 3600
    run = {"days": f"{hours / size / 24:,.2f}", "GPU-hours": f"{hours:,.0f}"}
    if machine.price:
        run["dollars"] = f"{hours * machine.price:,.0f}"
    return run


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


def clock(row):
    """A row's TIMES as text."""
    return [form.format(row[key]) for key, form in TIMES.items()]


def print_line(head, cells, times, fits="", where=""):
    columns = "".join(f" {cell:>11s}" for cell in cells)
    columns += "".join(f" {cell:>9s}" for cell in times)
    print(f"{head:13s}{columns}  {fits:5s} {where}".rstrip(), flush=True)

r"""
Measure time, memory and the slowest operations of train.py's model, optimizer and step.

    python -m extras.bench config/quickstart.py --steps=3 --profile  # the slowest operations
    python -m extras.bench config/quickstart.py \
        --variants='batch_size=8;batch_size=32,block_size=64'
    torchrun --standalone --nproc_per_node=2 -m extras.bench config/quickstart.py \
        --variants='strategy=ddp;strategy=shard_grad_op;strategy=full_shard'

All of train.py's config files and --key=value flags work. Variants take turns, step by step:
machines are noisy, so compare ratios within a run. Each is compiled for its own sizes, as in
training. Memory is the whole process's: to measure one variant's, run it alone.
"""

import os
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from itertools import count, islice
from pathlib import Path
from statistics import median
from time import perf_counter

import torch

# Started by its path, this file does not see the repository.
sys.path.insert(0, str(Path(__file__).absolute().parents[1]))
from configurator import load_config, resolve
from data.loader import open_batches
from metrics import flops_per_token, peak_flops, peak_memory
from optimizer import LossScaler
from ranks import print0, run, setup
from start import with_vocabulary
from train import build, maybe_recorded, meta_model, train_step


def main(argv):
    own, rest = parse(argv)
    names, configs = [], []
    for settings in own.variants.split(";"):
        flags = [f"--{key.strip()}" for key in settings.split(",") if key]
        names.append(settings.strip() or "config")
        configs.append(load_config(rest + flags))

    # All ranks. Resolve all variants first: a mistake in the last one then shows at once.
    world = setup(configs[0].device, configs[0].backend)
    configs = [resolve(with_vocabulary(cfg), world) for cfg in configs]
    torch.set_float32_matmul_precision("high")  # as train.py
    # Dynamo compiles a function 8 times at most, and variants share their functions.
    torch._dynamo.config.recompile_limit *= len(configs)
    runs = [training(cfg, world) for cfg in configs]
    # These build, compile and connect the ranks; a step that is recorded warms up twelve times.
    for _ in range(15 if any(cfg.cuda_graph for cfg in configs) else 3):
        take_turns(runs)
    turns = [take_turns(runs) for _ in range(own.steps)]
    times = list(zip(*turns))  # of each variant
    report(names, configs, times, world)
    if own.profile:
        for name, steps in zip(names, runs):
            profile(name, steps, own.profile, world)


def parse(argv):
    """(bench's own flags; the remaining arguments, which are train.py's)."""
    parser = ArgumentParser(
        description=__doc__,
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.error = sys.exit  # one line and exit code 1, as everywhere here
    add = parser.add_argument
    add("--steps", type=int, default=20,
        help="measured steps per variant (%(default)s)")
    add("--variants", default="", metavar="K=V,K=V;K=V", help="settings to compare")
    add("--profile", nargs="?", const="profile", metavar="DIR", type=os.path.expanduser,
        help="at the end, trace 3 steps of each variant on every rank into DIR (%(const)s), "
             "and print the slowest operations")
    own, rest = parser.parse_known_args(argv)
    if own.profile:
        os.makedirs(own.profile, exist_ok=True)  # now, not after the measuring
    return own, rest


# ---------- measuring ---------------------------------------------------------


def training(cfg, world):
    """A run that yields each step's milliseconds (all ranks). It is a generator, so that
    several runs can take turns."""
    batches = open_batches(cfg, world)
    model = meta_model(cfg)
    wrapped, optimizer = build(model, cfg, world)
    scaler = LossScaler(cfg)
    forward_backward = maybe_recorded(wrapped, cfg, world)
    for step in count():
        start = perf_counter()
        numbers = train_step(
            model, wrapped, optimizer, scaler, batches, step, cfg, world, forward_backward)
        numbers["loss"].item()  # synchronization point: all that was queued is done
        yield 1e3 * (perf_counter() - start)


def take_turns(runs):
    """Run a step of each run; returns their milliseconds."""
    return [next(steps) for steps in runs]


# ---------- the report --------------------------------------------------------


def report(names, configs, times, world):
    """Print a line for each variant (all ranks). MFU is per device, memory is rank 0's."""
    memory = peak_memory(world.device) >> 20  # MiB
    host = peak_memory(torch.device("cpu")) >> 20
    valley = "n/a"
    if world.device.type == "cuda":
        valley = f"{torch.cuda.memory_allocated(world.device) >> 20:,}"
    peak = peak_flops(world.device)
    width = max(map(len, names))
    first = median(times[0])
    print0(
        world,
        " " * width,
        " step, ms (fastest - slowest)   tokens/s    MFU  MiB peak    valley  MiB host"
        "  ratio to the first",
    )
    for name, cfg, ms in zip(names, configs, times):
        middle = median(ms)
        tokens = cfg.gradient_accumulation_steps * cfg.batch_size * cfg.sizes.block_size
        tokens_per_s = tokens / middle * 1e3
        model = meta_model(cfg)
        # Per device. There is no MFU if its peak is unknown, or the model cannot be counted.
        flops = flops_per_token(model, world) * tokens_per_s / world.size
        mfu = "n/a"
        if flops and peak:
            mfu = f"{flops / peak:.1%}"
        print0(
            world,
            f"{name:{width}} {middle:9.1f} ({min(ms):7.1f} - {max(ms):7.1f}) "
            f"{tokens_per_s:10,.0f} {mfu:>6} {memory:9,} {valley:>9} {host:9,} "
            f"{middle / first:9.3f} x its time",
        )


def profile(name, steps, directory, world):
    """Trace 3 steps on every rank, and print rank 0's slowest operations (all ranks)."""
    file_name = f"trace-{name}-{world.rank}".replace(" ", "_").replace("/", "_")
    path = os.path.join(directory, file_name)
    with torch.profiler.profile() as profiler:
        for _ in islice(steps, 3):
            pass
    profiler.export_chrome_trace(f"{path}.json")
    on_gpu = world.device.type == "cuda"
    sort_by = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    averages = profiler.key_averages()
    slowest = averages.table(sort_by, row_limit=15, max_name_column_width=40)
    print0(world, f"\n{name}: 3 steps on rank 0\n{slowest}")


if __name__ == "__main__":
    run(main, sys.argv[1:])

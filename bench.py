r"""
How fast, how large, and where the time goes: the model, optimizer, batches and step of train.py.

    python bench.py config/quickstart.py --steps=3 --profile    # which operations take the time
    python bench.py config/quickstart.py --variants='batch_size=8;batch_size=32,block_size=64'
    torchrun --standalone --nproc_per_node=2 bench.py config/quickstart.py \
        --strategies=ddp,shard_grad_op,full_shard

Any file and --key=value of train.py applies. Variants take turns, step by step: machines are noisy,
so compare the ratios of one run. Memory is the process's: for that of one variant, run it alone.
"""

import os
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from itertools import count, islice, product
from statistics import median
from time import perf_counter

import torch
from torch.utils.benchmark import Timer

from configurator import DTYPES, load_config, resolve
from data.loader import Batches
from metrics import flops_per_token, peak_flops, peak_memory
from ranks import print0, run, setup
from train import build, meta_model, train_step, with_vocabulary


def training(cfg, world):
    """A run that yields each step's milliseconds; a generator, so that runs can take turns."""
    batches = Batches(cfg, world)
    wrapped, _, optimizer = build(cfg, world)
    scaler = torch.amp.GradScaler(world.device.type, enabled=cfg.dtype == "float16")
    batch = batches.train(0, 0)
    for step in count():
        start = perf_counter()
        loss, _, batch = train_step(wrapped, optimizer, scaler, batches, batch, step, cfg, world)
        loss.item()  # synchronization point: all that was queued is done
        yield 1e3 * (perf_counter() - start)


def matmul_rate(device, dtype):
    """FLOP/s of a large matrix product: what this machine reaches in practice."""
    n = 2048 if device.type == "cpu" else 8192
    timer = Timer("(a @ a)[0, 0].item()", num_threads=torch.get_num_threads(),
                  globals={"a": torch.randn(n, n, device=device, dtype=dtype)})
    return 2 * n**3 / timer.blocked_autorange(min_run_time=1).median


def report(names, configs, times, world):
    """Print a line for each variant; MFU and share of the matmul rate are one device's."""
    memory, host = (peak_memory(device) >> 20 for device in (world.device, torch.device("cpu")))
    peak = peak_flops(world.device)
    rates = {c.dtype: matmul_rate(world.device, DTYPES[c.dtype]) for c in configs}
    width, first = max(map(len, names)), median(times[0])
    print0(world, " " * width, " step, ms (fastest - slowest)   tokens/s    MFU  of matmul rate"
                               "  MiB peak  MiB host  ratio to the first")
    for name, cfg, ms in zip(names, configs, times):
        tokens = cfg.gradient_accumulation_steps * cfg.batch_size * cfg.block_size
        tokens_per_s = tokens / median(ms) * 1e3
        flops = flops_per_token(meta_model(cfg), world) * tokens_per_s / world.size
        mfu = f"{flops / peak:.1%}" if flops and peak else "n/a"
        print0(world, f"{name:{width}} {median(ms):9.1f} ({min(ms):7.1f} - {max(ms):7.1f}) "
                      f"{tokens_per_s:10,.0f} {mfu:>6} {flops / rates[cfg.dtype]:15.1%} "
                      f"{memory:9,} {host:9,} {median(ms) / first:9.3f} x its time")


def profile(name, steps, directory, world):
    """Trace 3 steps on every rank, and print rank 0's slowest operations (all ranks)."""
    cuda, key = world.device.type == "cuda", "self_cpu_time_total"
    file = os.path.join(directory, f"trace-{name}-{world.rank}".replace(" ", "_").replace("/", "_"))
    if cuda:  # private, but nothing public writes what https://pytorch.org/memory_viz reads
        torch.cuda.memory._record_memory_history(clear_history=True)
    with torch.profiler.profile() as profiler:
        list(islice(steps, 3))
    profiler.export_chrome_trace(f"{file}.json")
    if cuda:
        torch.cuda.memory._dump_snapshot(f"{file}.pickle")
        key = "self_device_time_total"
    slowest = profiler.key_averages().table(key, row_limit=15, max_name_column_width=40)
    print0(world, f"\n{name}: 3 steps on rank 0\n{slowest}")


def main(argv):
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter,
                            allow_abbrev=False)
    parser.error = sys.exit  # one line and exit code 1, as everywhere here
    add = parser.add_argument
    add("--steps", type=int, default=20, help="measured steps of each variant (%(default)s)")
    add("--variants", default="", metavar="K=V,K=V;K=V", help="settings to compare")
    add("--strategies", default="", metavar="A,B", help="each variant with each of these")
    add("--profile", nargs="?", const="profile", metavar="DIR", help="at the end, trace 3 steps "
        "of each variant on every rank into DIR (%(const)s), and print the slowest operations")
    own, rest = parser.parse_known_args(argv)
    if own.steps < 1:
        parser.error(f"--steps={own.steps}: it must be at least 1")
    try:  # now, not after the measuring
        os.makedirs(own.profile or ".", exist_ok=True)
    except OSError as e:
        parser.error(f"--profile={own.profile}: {e.strerror}; pass another path")

    names, configs = [], []
    for settings, strategy in product(own.variants.split(";"), own.strategies.split(",")):
        extra = [s.strip() for s in settings.split(",") if s]
        extra += [f"strategy={strategy}"] if strategy else []
        names.append(" ".join(extra) or "config")
        configs.append(load_config(rest + [f"--{s}" for s in extra], vars(own)))
    world = setup(configs[0].device, configs[0].backend)
    configs = [resolve(with_vocabulary(cfg), world) for cfg in configs]
    torch.set_float32_matmul_precision("high")  # as train.py
    runs = [training(cfg, world) for cfg in configs]
    list(map(next, runs * 3))  # build, compile, connect the ranks
    turns = [list(map(next, runs)) for _ in range(own.steps)]
    report(names, configs, list(zip(*turns)), world)
    if own.profile:
        for name, steps in zip(names, runs):
            profile(name, steps, own.profile, world)


if __name__ == "__main__":
    run(main, sys.argv[1:])

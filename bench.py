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


def arguments(argv):
    """(bench's own options, the rest for load_config)."""
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
        parser.error(f"cannot write {own.profile}: {e.strerror}; pass another path")
    return own, rest


def training(cfg, world):
    """A run that yields the seconds of each step; a generator, so that runs can take turns."""
    batches = Batches(cfg, world)
    wrapped, _, optimizer = build(cfg, world)
    scaler = torch.amp.GradScaler(world.device.type, enabled=cfg.dtype == "float16")
    batch = batches.train(0, 0)
    for step in count():
        start = perf_counter()
        loss, _, batch = train_step(wrapped, optimizer, scaler, batches, batch, step, cfg, world)
        loss.item()  # synchronization point: all that was queued is done
        yield perf_counter() - start


def matmul_rate(device, dtype):
    """FLOP/s of a large matrix product: what this machine reaches in practice."""
    n = 2048 if device.type == "cpu" else 8192
    timer = Timer("(a @ a)[0, 0].item()", num_threads=torch.get_num_threads(),
                  globals={"a": torch.randn(n, n, device=device, dtype=dtype)})
    return 2 * n**3 / timer.blocked_autorange(min_run_time=1).median


def report(names, configs, times, world):
    """Print the table and return its rows; flops, mfu and of_matmul are those of one device."""
    memory, host = peak_memory(world.device), peak_memory(torch.device("cpu"))
    peak = peak_flops(world.device)
    rates = {c.dtype: matmul_rate(world.device, DTYPES[c.dtype]) for c in configs}
    width, rows = max(map(len, names)), []
    print0(world, " " * width, " step, ms (fastest - slowest)   tokens/s    MFU  of matmul rate"
                               "  MiB peak  MiB host  ratio to the first")
    for name, cfg, seconds in zip(names, configs, times):
        ms, low, high = (1e3 * f(seconds) for f in (median, min, max))
        tokens_per_s = cfg.gradient_accumulation_steps * cfg.batch_size * cfg.block_size / ms * 1e3
        flops = flops_per_token(meta_model(cfg), world) * tokens_per_s / world.size
        mfu, of_matmul = flops / peak if peak else None, flops / rates[cfg.dtype]
        rows.append(dict(name=name, step_ms=ms, fastest_ms=low, slowest_ms=high, flops=flops,
                         tokens_per_s=tokens_per_s, mfu=mfu, of_matmul=of_matmul,
                         peak_memory=memory, host_memory=host))
        print0(world, f"{name:{width}} {ms:9.1f} ({low:7.1f} - {high:7.1f}) {tokens_per_s:10,.0f} "
                      f"{f'{mfu:.1%}' if mfu else 'n/a':>6} {of_matmul:15.1%} {memory >> 20:9,} "
                      f"{host >> 20:9,} {ms / rows[0]['step_ms']:9.3f} x its time")
    return rows


def profile(name, steps, directory, world):
    """Trace 3 steps on every rank, and print rank 0's slowest operations (all ranks)."""
    cuda = world.device.type == "cuda"
    file = f"{name}-{world.rank}".replace(" ", "_").replace("/", "_")
    if cuda:  # private, but nothing public writes what https://pytorch.org/memory_viz reads
        torch.cuda.memory._record_memory_history(clear_history=True)
    with torch.profiler.profile() as profiler:
        list(islice(steps, 3))
    if cuda:
        torch.cuda.memory._dump_snapshot(f"{directory}/memory-{file}.pickle")
    profiler.export_chrome_trace(f"{directory}/trace-{file}.json")
    key = "self_device_time_total" if cuda else "self_cpu_time_total"
    slowest = profiler.key_averages().table(key, row_limit=15, max_name_column_width=40)
    print0(world, f"\n{name}: 3 steps on rank 0\n{slowest}")


def main(argv):
    own, rest = arguments(argv)
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

"""
The plan's times against real steps: two ranks on this machine's CPU.

    torchrun --standalone --nproc_per_node=2 -m extras.plan.here

It measures the rates that --gpu takes: products, memory and gloo while both ranks work. Then it
trains four configs, in turns, and rank 0 plans the same ones.
"""

import io
import tempfile
from contextlib import redirect_stdout
from statistics import median
from time import perf_counter

import numpy as np
import torch
import torch.distributed as dist

from configurator import load_config, resolve
from extras import bench, plan
from extras.plan import timing
from ranks import run, setup

MODEL = [
    "--device=cpu", "--dtype=float32", "--compile=False", "--vocab_size=4096", "--n_layer=6",
    "--n_head=6", "--n_embd=384", "--block_size=256", "--gradient_accumulation_steps=2"]
CONFIGS = [
    ["--strategy=ddp", "--batch_size=8"],
    ["--strategy=shard_grad_op", "--batch_size=8"],
    ["--strategy=full_shard", "--batch_size=8"],
    ["--strategy=full_shard", "--batch_size=16", "--activation_checkpointing=full"],
]
STEPS = 9


def seconds(work):
    """The median time of work() while both ranks do it."""
    times = []
    for _ in range(STEPS):
        dist.barrier()
        start = perf_counter()
        work()
        times.append(perf_counter() - start)
    return median(times)


def measured_gpu():
    """(--gpu's PEAK_TFLOPS:MEMORY_TB/s:NVLINK_GB/s, the measured rates as text)."""
    a = torch.randn(2048, 384)  # a product of the MLP
    b = torch.randn(384, 1536)
    products = 2 * len(a) * b.numel() / seconds(lambda: a @ b)
    x = torch.randn(2048, 1536)  # and its activations
    out = torch.empty_like(x)
    memory = 2 * x.nbytes / seconds(lambda: torch.add(x, 1.0, out=out))
    whole = torch.empty(12 * 384**2)  # a block
    half = torch.randn(len(whole) // 2)
    gloo = half.nbytes / seconds(lambda: dist.all_gather_into_tensor(whole, half))
    # The plan takes fp32 at half the rate, and its own shares of both peaks.
    peak = 2 * products / timing.H100.products
    gpu = f"{peak / 1e12:.4f}:{memory / timing.MEMORY_SHARE / 1e12:.5f}:{gloo / 1e9:.3f}"
    return gpu, f"{products / 1e9:.0f} GFLOP/s, {memory / 1e9:.1f} GB/s, gloo {gloo / 1e9:.2f} GB/s"


def train(directory, world):
    """Milliseconds per step of each config."""
    runs = []
    for keys in CONFIGS:
        cfg = load_config([*MODEL, *keys, f"--dataset={directory}"])
        runs.append(bench.training(resolve(cfg, world), world))
    for _ in range(2):
        bench.take_turns(runs)
    turns = [bench.take_turns(runs) for _ in range(STEPS)]
    return [median(times) for times in zip(*turns)]


def planned(keys, gpu):
    with redirect_stdout(io.StringIO()):
        [row] = plan.main([*MODEL, *keys, "--world_size=2", f"--gpu={gpu}"])
    return row


def main():
    world = setup("cpu", "gloo")
    with tempfile.TemporaryDirectory() as directory:
        for split in ("train", "val"):
            tokens = np.random.randint(0, 4096, 100_000).astype(np.uint16)
            tokens.tofile(f"{directory}/{split}.bin")
        gpu, rates = measured_gpu()
        measured = train(directory, world)
    dist.destroy_process_group()
    if world.rank > 0:
        return
    print(f"{rates}: --gpu={gpu}\n")
    print("| config | measured, ms | planned | planned / measured | exposed |")
    print("|---|---|---|---|---|")
    for keys, ms in zip(CONFIGS, measured):
        row = planned(keys, gpu)
        ours = 1e3 * row["s/step"]
        name = " ".join(key.removeprefix("--") for key in keys)
        print(f"| `{name}` | {ms:.0f} | {ours:.0f} | {ours / ms:.2f} | {row['exposed']:.0%} |")


if __name__ == "__main__":
    run(main)

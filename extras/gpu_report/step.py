"""
A config's step: its time, and its memory, as JSON. One process of a row of the report.

    torchrun --nproc_per_node=2 extras/gpu_report/step.py --result=FILE [--steps=N] [--trace] KEYS

Times are between CUDA's events, so on a simulated GPU they are by its own clock. --trace: of two
more steps, the share of the gathers' time in which the GPU computes.
"""

import json
import math
import sys
from argparse import ArgumentParser
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).absolute().parents[2]))
from configurator import load_config, resolve  # noqa: E402
from data.loader import open_batches  # noqa: E402
from metrics import flops_per_token, peak_flops  # noqa: E402
from optimizer import LossScaler  # noqa: E402
from ranks import run, setup  # noqa: E402
from start import with_vocabulary  # noqa: E402
from train import build, meta_model, micro_batch, train_step  # noqa: E402

WARM_UP = 3  # steps that build, compile and connect


def measured(cfg, world, steps, trace):
    torch.set_float32_matmul_precision("high")  # as train.py
    batches = open_batches(cfg, world)
    before = outside_pytorch(world)
    model = meta_model(cfg)
    take_made_values(model)
    wrapped, optimizer = build(model, cfg, world)
    built = outside_pytorch(world)
    scaler = LossScaler(cfg)
    forward_backward = micro_batch(wrapped, cfg, world)

    def take(step):
        return train_step(
            wrapped, optimizer, scaler, batches, step, cfg, world, forward_backward)

    warm_up = WARM_UP
    if cfg.cuda_graph:
        warm_up += forward_backward.warm_up  # it is recorded then, and compared once
    for step in range(warm_up):
        loss, _ = take(step)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    events = []
    for step in range(warm_up, warm_up + steps):
        begin, end = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        begin.record()
        loss, _ = take(step)
        end.record()
        events.append((begin, end))
    torch.cuda.synchronize()
    seconds = [begin.elapsed_time(end) / 1e3 for begin, end in events]

    tokens = cfg.gradient_accumulation_steps * cfg.batch_size * cfg.sizes.block_size / world.size
    found = dict(seconds=median(seconds), fastest=min(seconds), slowest=max(seconds), steps=steps)
    peak = peak_flops(world.device)
    if found["seconds"]:
        found["tok/s"] = tokens / found["seconds"]  # per GPU
        if peak:
            found["MFU"] = flops_per_token(meta_model(cfg), world) * found["tok/s"] / peak
    stats = torch.cuda.memory_stats()
    # A recording keeps what it takes: it is reserved, and in no tensor.
    memory = dict(
        peak=stats[f"{'reserved' if cfg.cuda_graph else 'allocated'}_bytes.all.peak"],
        valley=stats["allocated_bytes.all.current"],
        reserved=stats["reserved_bytes.all.peak"],
        outside_before=before,
        outside_built=built,
        outside_after=outside_pytorch(world),
        retries=stats["num_alloc_retries"],
    )
    # Of the rank that has the most.
    most = torch.tensor(list(memory.values()), dtype=torch.float64, device=world.device)
    if world.size > 1:
        dist.all_reduce(most, dist.ReduceOp.MAX)
    found.update(zip(memory, map(int, most.tolist())))
    found["loss"] = loss.item()
    if trace:
        with torch.profiler.profile() as profiler:
            for step in (0, 1):
                take(warm_up + steps + step)
            torch.cuda.synchronize()
        found["gathers_hidden"] = hidden_share(profiler.events())
    return found


def take_made_values(model):
    """Matrices begin as a million random numbers, again and again: to draw those of 8B would take
    a core minutes. It costs the same time and memory in the step."""
    initial_value = model.initial_value
    tile = 0.02 * torch.randn(2**20)

    class Tiled:
        def __init__(self, shape):
            self.shape = shape

        def __getitem__(self, rows):
            first, last, _ = rows.indices(self.shape[0])
            shape = last - first, *self.shape[1:]
            n = math.prod(shape)
            return tile.repeat(n // len(tile) + 1)[:n].view(shape)

    def made(name, shape, seed):
        return Tiled(shape) if len(shape) > 1 else initial_value(name, shape, seed)

    model.initial_value = made


def outside_pytorch(world):
    """Bytes of the device that PyTorch's allocator does not have: the context, NCCL, others."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info(world.device)
    return total - free - torch.cuda.memory_reserved(world.device)


def hidden_share(events):
    """The share of the all-gathers' time in which another kernel than NCCL's runs; None if there
    was none. events: a profiler's; FSDP2's annotations of a gather are no kernels."""
    on_gpu = torch.autograd.DeviceType.CUDA
    kernels = [e for e in events if e.device_type == on_gpu and not e.is_user_annotation]
    changes = []  # (time, +1 or -1 gather, +1 or -1 other kernel)
    for e in kernels:
        is_gather = "AllGather" in e.name
        is_other = "nccl" not in e.name and not e.name.startswith("Mem")  # copies and sets
        if is_gather or is_other:
            changes.append((e.time_range.start, is_gather, is_other))
            changes.append((e.time_range.end, -is_gather, -is_other))
    changes.sort()
    gathers = others = 0
    gathered = hidden = 0.0
    last = 0
    for now, gather, other in changes:
        if gathers:
            gathered += now - last
            hidden += (now - last) * (others > 0)
        gathers += gather
        others += other
        last = now
    return hidden / gathered if gathered else None


def main(argv):
    parser = ArgumentParser()
    parser.add_argument("--result")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--trace", action="store_true")
    own, rest = parser.parse_known_args(argv)
    cfg = load_config(rest)
    world = setup(cfg.device, cfg.backend, cfg.cpu_offload)
    if "simgpu" in sys.modules:
        from extras.plan.simulated import give_prices
        give_prices()
    cfg = resolve(with_vocabulary(cfg), world)
    found = measured(cfg, world, own.steps, own.trace)
    if world.rank == 0:
        Path(own.result).write_text(json.dumps(found))
    if dist.is_initialized():
        dist.barrier()


if __name__ == "__main__":
    run(main, sys.argv[1:])

"""
Rank 0's reports: log lines, a row of out_dir/metrics.jsonl for each, and the same rows in
wandb if you ask for them.

    ideal_s = ideal_seconds(model, cfg, world)             # for MFU
    log = Log(cfg, world, out_dir, run_id, step, ideal_s)  # no run_id: only print
    log.step(step, numbers, optimizer, scaler)             # every log_interval steps
    with log.paused(): ...                  # exclude an evaluation from the step times

A resumed run appends to metrics.jsonl: of its step and those after it, later rows count.
"""

import copy
import json
import math
import os
import re
import resource
import sys
import time
from contextlib import contextmanager, suppress

import torch
from torch.utils.flop_counter import FlopCounterMode

from configurator import as_dict
from ranks import print0

# Dense bf16 FLOP/s by NVIDIA's data sheets (V100: fp16).
PEAK_FLOPS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 80GB HBM3": 989e12,
    "H100 PCIe": 756e12,
    "A100-SXM4-40GB": 312e12,
    "A100-SXM4-80GB": 312e12,
    "L40S": 362e12,
    "GeForce RTX 4090": 165e12,
    "Tesla V100-SXM2-32GB": 125e12,
}


def peak_flops(device):
    """Peak bf16 FLOP/s; None if unknown. It matches whole names, since H100 PCIe contains H100."""
    if device.type != "cuda":
        return None
    return PEAK_FLOPS.get(torch.cuda.get_device_name(device).removeprefix("NVIDIA "))


def ideal_seconds(model, cfg, world):
    """How long a step would take if each rank's GPU reached its peak. MFU is this divided by what
    it takes; 0 if the peak is unknown. Counting takes as long as several steps of a small model.
    model: on the meta device."""
    peak = peak_flops(world.device)
    if not peak:
        return 0
    return flops_per_token(model, world) * tokens_per_step(cfg) / (peak * world.size)


def tokens_per_step(cfg):
    return cfg.gradient_accumulation_steps * cfg.batch_size * cfg.sizes.block_size


def flops_per_token(model, world):
    """FLOPs per token of forward and backward, as PyTorch counts them on the meta device: 6
    for each weight in a product, 12 T C per layer for attention (PaLM, appendix B), fewer if
    parameters are frozen. 0 if they cannot be counted."""
    model = copy.deepcopy(model).to("meta")  # buffers may be on the CPU
    idx = torch.zeros(1, model.config.block_size, dtype=torch.long, device="meta")
    try:
        with FlopCounterMode(display=False) as counter:
            _, loss = model(idx, idx)
            loss.sum().backward()
    except Exception as e:  # a shape or a branch depends on values, which meta lacks
        print0(world, f"mfu n/a: the model does not run on the meta device ({e})")
        return 0
    return counter.get_total_flops() / idx.numel()


def peak_memory(device):
    """Bytes: the allocator's peak on CUDA, elsewhere the process's peak resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def describe(cfg, model, optimizer, batches, source, world):
    """The first lines of a run's output."""
    numel = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    tokens = tokens_per_step(cfg)
    parameters = f"{numel / 1e6:.2f}M parameters, {trained / numel:.0%} of them train"
    ranks = f"strategy {cfg.strategy}, {world.size} x {world.device.type}, {cfg.dtype}"
    yield f"{parameters}, {ranks}, vocabulary {cfg.sizes.vocab_size:,}"
    own = f"{cfg.gradient_accumulation_steps // world.size} x {cfg.batch_size} sequences"
    yield f"{tokens:,} tokens per step: {own} of {cfg.sizes.block_size:,} on each rank"
    names = {p: name for name, p in model.named_parameters()}
    for group in optimizer.param_groups:
        kinds = dict.fromkeys(re.sub(r"\.\d+\.", ".*.", names[p]) for p in group["params"])
        yield f"weight_decay={group.get('weight_decay')}: {', '.join(kinds)}"
    yield from getattr(model, "describe", list)()  # a model file may have lines of its own
    if cfg.freeze:
        # Names up to a block's number.
        parts = [re.sub(r"(\.\d+)\..*", r"\1", names[p]) for p in names if not p.requires_grad]
        yield f"frozen, at least in part: {', '.join(dict.fromkeys(parts))}"
    in_all = batches.files["train"].tokens_in_all
    yield f"{cfg.dataset}: {in_all:,} tokens of train, epoch = {in_all / tokens:,.0f} steps"
    if source:
        yield f"starting from {source.path} at step {source.header['iter_num']}"


class Log:
    def __init__(self, cfg, world, out_dir, run_id, step, ideal_s=0):
        self.cfg = cfg
        self.world = world
        self.run_id = run_id
        self.next_step = step
        self.started = self.since = time.time()
        self.ideal_s = ideal_s
        self.file = self.wandb = None
        if world.rank > 0 or run_id is None:  # eval_only leaves nothing behind
            return
        self.file = open(os.path.join(out_dir, "metrics.jsonl"), "a+")
        self.file.seek(0)
        # A full disk may have left half a row at its end.
        self.file.truncate(self.file.read().rfind("\n") + 1)
        self.write(dict(iter=step, config=as_dict(cfg)))
        if cfg.wandb_log:
            import wandb
            self.wandb = wandb.init(
                project=cfg.wandb_project, name=cfg.wandb_run_name, config=as_dict(cfg),
                dir=out_dir, id=run_id, resume="allow")

    @contextmanager
    def paused(self):
        if self.world.device.type == "cuda":
            # Steps that were not logged may still be queued. They don't belong to the pause.
            torch.cuda.synchronize(self.world.device)
        start = time.time()
        yield
        self.since += time.time() - start

    def step(self, step, numbers, optimizer, scaler):
        """Log this step's numbers, and the mean time of a step since the last call.
        numbers: {name: its mean over ranks}, the loss first."""
        now = time.time()
        steps = step + 1 - self.next_step
        seconds = (now - self.since) / steps
        row = dict(
            iter=step,
            time=now,  # Unix seconds
            **numbers,
            lr=optimizer.param_groups[0]["lr"],  # the first group's
            loss_scale=scaler.scale,
            time_ms=seconds * 1000,
            tokens_per_s=tokens_per_step(self.cfg) / seconds,
            mfu=self.ideal_s / seconds or None,
            peak_memory=peak_memory(self.world.device),
        )
        loss, *others = [f"{name} {number:.4f}" for name, number in numbers.items()]
        if scaler.enabled:
            others.append(f"loss_scale {scaler.scale:g}")
        mfu = f"{row['mfu']:.2%}" if self.ideal_s else "n/a"
        minutes_left = (self.cfg.max_iters - step - 1) * seconds / 60
        print0(self.world, (
            f"iter {step}: {loss}, time {row['time_ms']:.2f}ms, mfu {mfu}, "
            f"{row['tokens_per_s']:,.0f} tok/s, {', '.join(others)}, "
            f"mem {row['peak_memory'] / 2**30:.2f}GiB, {minutes_left:.1f}m left"))
        self.write(row)
        self.since = now
        self.next_step = step + 1

    def evaluation(self, step, losses):
        """losses: as train.evaluate returns them."""
        said = ", ".join(f"{name} loss {loss:.4f}" for name, loss in losses.items())
        print0(self.world, f"step {step}: {said}")
        self.write({"iter": step, **{f"{split}_loss": loss for split, loss in losses.items()}})

    def write(self, row):
        # JSON has no infinity and no NaN.
        bad = [key for key, n in row.items() if isinstance(n, float) and not math.isfinite(n)]
        row = {**row, **dict.fromkeys(bad)}
        if self.file:
            with suppress(OSError):  # a full disk: the next save says so
                print(json.dumps({"run": self.run_id, **row}), file=self.file, flush=True)
        if self.wandb:
            self.wandb.log(row, step=row["iter"])

    def close(self):
        print0(self.world, f"done in {time.time() - self.started:.0f} s")

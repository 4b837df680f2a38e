"""
What rank 0 reports: log lines, a row of out_dir/metrics.jsonl for each, and the same rows to wandb
and TensorBoard if asked for. A resumed run appends: earlier rows from its step on are void.

    log = Log(cfg, world, run_id, step, model)  # which is on the meta device
    log.step(step, loss, norm, lr, scale)      # every log_interval steps
    with log.paused(): ...                     # an evaluation is no part of the steps' time
"""

import importlib
import json
import math
import os
import resource
import sys
import time
from contextlib import contextmanager
from dataclasses import asdict

import torch
from torch.utils.flop_counter import FlopCounterMode

from checkpoint import first_line, writing
from ranks import print0

# dense bf16 FLOP/s by NVIDIA's data sheets (fp16 for V100 and T4, which lack bf16)
PEAK_FLOPS = {
    "B200": 2250e12, "H200": 989e12, "H200 NVL": 835e12, "GH200 480GB": 989e12,
    "GH200 144G HBM3e": 989e12, "H100 80GB HBM3": 989e12, "H100 NVL": 835e12, "H100 PCIe": 756e12,
    "A100-SXM4-40GB": 312e12, "A100-SXM4-80GB": 312e12, "A100-PCIE-40GB": 312e12,
    "A100 80GB PCIe": 312e12, "A10": 125e12, "L40S": 362e12, "L40": 181e12, "L4": 121e12,
    "V100-SXM2-16GB": 125e12, "V100-SXM2-32GB": 125e12, "T4": 65e12,
    "GeForce RTX 4090": 165e12, "GeForce RTX 3090": 71e12}


def peak_flops(device):
    """Peak bf16 FLOP/s, or None; matched by the whole name, since L40 contains L4."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return PEAK_FLOPS.get(name.removeprefix("NVIDIA ").removeprefix("Tesla "))


def flops_per_token(model, world):
    """FLOPs of forward and backward for a token, as PyTorch counts them on meta: 6 for each weight
    in a product, 12 T C a layer for attention (PaLM, appendix B), less what frozen parameters
    spare. 0 if they cannot be counted."""
    idx = torch.zeros(1, model.config.block_size, dtype=torch.long, device="meta")
    try:
        with FlopCounterMode(display=False) as counter:
            model(idx, idx)[1].backward()
    except Exception as e:  # a shape or a branch depends on values, which meta has not
        print0(world, f"mfu n/a: the model does not run on the meta device ({first_line(e)})")
        return 0
    return counter.get_total_flops() / idx.numel()


def peak_memory(device):
    """Bytes: the allocator's peak on CUDA, elsewhere the process's peak resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def describe(cfg, model, batches, source, world):
    """The lines that head a run's output."""
    n = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    samples = cfg.gradient_accumulation_steps * cfg.batch_size
    yield (f"{n / 1e6:.2f}M parameters, strategy {cfg.strategy}, {world.size} x "
           f"{world.device.type}, {cfg.dtype}, {samples * cfg.block_size:,} tokens a step, "
           f"epoch = {len(batches.files['train']) / samples:,.0f} steps")
    if trained < n:
        yield f"{n - trained:,} parameters are frozen: no gradients, no optimizer state"
    if source:
        step = source.header["iter_num"]
        yield f"starting from {source.path} at step {step}"
        if step >= cfg.max_iters:
            yield f"nothing left to train: max_iters={cfg.max_iters}; raise --max_iters to continue"


class Log:
    def __init__(self, cfg, world, run_id, step, model):
        self.max_iters, self.world, self.next_step = cfg.max_iters, world, step
        self.started = self.since = time.time()
        self.tokens = cfg.gradient_accumulation_steps * cfg.batch_size * cfg.block_size
        self.peak_flops = peak_flops(world.device)
        # only for MFU: counting takes as long as several steps of a small model
        self.flops = flops_per_token(model, world) * self.tokens if self.peak_flops else 0
        self.run_id, self.file, self.wandb, self.tensorboard = run_id, None, None, None
        if not run_id or world.rank > 0:  # eval_only leaves nothing behind
            return
        self.path = os.path.join(cfg.out_dir, "metrics.jsonl")
        with writing(self.path):
            self.file = open(self.path, "a+", errors="replace")
            self.file.seek(0)
            if self.file.read().rpartition("\n")[2]:  # half a row, where a disk was full
                self.file.write("\n")
        if cfg.wandb_log:
            self.wandb = optional("wandb", "wandb_log=True").init(
                project=cfg.wandb_project, name=cfg.wandb_run_name, dir=cfg.out_dir,
                config=asdict(cfg), id=run_id, resume="allow" if step else None)
        if cfg.tensorboard:
            module = optional("torch.utils.tensorboard", "tensorboard=True")
            self.tensorboard = module.SummaryWriter(cfg.out_dir, purge_step=step or None)

    @contextmanager
    def paused(self):
        start = time.time()
        yield
        self.since += time.time() - start

    def step(self, step, loss, norm, lr, scale):
        """Log this step's numbers, and the time of a step since the last call."""
        now, memory = time.time(), peak_memory(self.world.device)
        seconds = (now - self.since) / (step + 1 - self.next_step)
        self.since, self.next_step = now, step + 1
        rate = self.tokens / seconds
        mfu = self.flops / seconds / self.peak_flops / self.world.size if self.flops else None
        print0(self.world, f"iter {step}: loss {loss:.4f}, time {seconds * 1000:.2f}ms, "
                           f"mfu {f'{mfu:.2%}' if mfu else 'n/a'}, {rate:,.0f} tok/s, "
                           f"norm {norm:.2f}, mem {memory / 2**30:.2f}GiB, "
                           f"{seconds * (self.max_iters - step - 1) / 60:.1f}m left")
        self.write(dict(iter=step, loss=loss, grad_norm=norm, lr=lr, time_ms=seconds * 1000,
                        tokens_per_s=rate, mfu=mfu, loss_scale=scale, peak_memory=memory,
                        wall_s=now - self.started))

    def evaluation(self, step, losses):
        train, val = losses["train"], losses["val"]
        print0(self.world, f"step {step}: train loss {train:.4f}, val loss {val:.4f}")
        self.write(dict(iter=step, train_loss=train, val_loss=val,
                        val_perplexity=math.exp(min(val, 700))))  # exp overflows from 710 on

    def write(self, row):
        if self.file:
            with writing(self.path):
                print(json.dumps({"run": self.run_id, **row}), file=self.file, flush=True)
        if self.wandb:
            self.wandb.log(row, step=row["iter"])
        if self.tensorboard:
            for key, value in row.items():
                if value is not None:
                    self.tensorboard.add_scalar(key, value, row["iter"])
            self.tensorboard.flush()

    def close(self):
        if self.wandb:
            self.wandb.finish()


def optional(module, wanted_by):
    """Import what is not in requirements.txt; SystemExit with what to install."""
    try:
        return importlib.import_module(module)
    except ImportError as e:
        raise SystemExit(f"{wanted_by}: {e}; pip install {e.name or module}")

"""
What a run reports: out_dir/metrics.jsonl (one object a line), wandb and TensorBoard if asked for,
and the device's peaks.

    metrics = Metrics(cfg, world, run_id, step)   # rank 0 writes; on the others nothing happens
    metrics.write(dict(iter=step, loss=2.3))
"""

import importlib
import json
import math
import os
import re
import resource
import sys
from dataclasses import asdict

import torch
from torch.utils.flop_counter import FlopCounterMode

from outdir import atomic, writing

PEAK_FLOPS = {  # dense bf16 FLOP/s by NVIDIA's data sheets (fp16 for V100 and T4, which lack bf16)
    "B200": 2250e12, "GH200": 989e12, "H200": 989e12, "H200 NVL": 835e12, "H100": 989e12,
    "H100 NVL": 835e12, "H100 PCIe": 756e12, "A100": 312e12, "A10": 125e12, "L40S": 362e12,
    "L40": 181e12, "L4": 121e12, "V100": 125e12, "T4": 65e12, "RTX 4090": 165e12, "RTX 3090": 71e12,
}
SOLD_AS = {  # these names as drivers spell them, where they add something
    "GH200 480GB": "GH200", "GH200 144G HBM3e": "GH200", "H100 80GB HBM3": "H100",
    "A100-SXM4-40GB": "A100", "A100-SXM4-80GB": "A100", "A100-PCIE-40GB": "A100",
    "A100 80GB PCIe": "A100", "V100-SXM2-16GB": "V100", "V100-SXM2-32GB": "V100",
    "GeForce RTX 4090": "RTX 4090", "GeForce RTX 3090": "RTX 3090",
}


def peak_flops(device):
    """
    The FLOP/s that MFU is relative to, None if the device's name is not exactly known: a part of it
    says too little, as L40 has L4 in it. It is the bf16 peak whatever the run's dtype: in float32 a
    GPU cannot come near it.
    """
    if device.type != "cuda":
        return None
    name = re.sub("^(NVIDIA|Tesla) ", "", torch.cuda.get_device_name(device))
    return PEAK_FLOPS.get(SOLD_AS.get(name, name))


def flops_per_token(model):
    """
    FLOPs of forward and backward for a token, as PyTorch counts those of a model on meta: 6 for
    each weight in a product, 12 T C a layer for attention (PaLM, appendix B), less what frozen
    parameters spare: their gradients, and all of backward before the first that trains.
    """
    idx = torch.zeros(1, model.config.block_size, dtype=torch.long, device="meta")
    with FlopCounterMode(display=False) as counter:
        model(idx, idx)[1].backward()
    return counter.get_total_flops() / idx.numel()


def peak_memory(device):
    """Bytes: the allocator's peak on CUDA, elsewhere the process's peak resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return peak_host_memory()


def peak_host_memory():
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def duration(seconds):
    if seconds < 90:
        return f"{seconds:.0f}s"
    return f"{seconds / 60:.1f}m" if seconds < 5400 else f"{seconds / 3600:.1f}h"


def describe(cfg, model, batches, tokens_per_step, source, world):
    """The lines that head a run's output."""
    n = sum(p.numel() for p in model.parameters())
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    epoch = len(batches.files["train"]) * cfg.block_size / tokens_per_step
    yield (f"{n / 1e6:.2f}M parameters, strategy {cfg.strategy}, {world.size} x "
           f"{world.device.type}, {cfg.dtype}, {tokens_per_step:,} tokens a step, "
           f"epoch = {epoch:,.0f} steps")
    if frozen:
        yield f"{frozen:,} parameters are frozen: no gradients, no optimizer state"
    if cfg.dtype == "float8" and world.device.type == "cpu":
        yield "float8 is emulated on a CPU: the same rounding, but slow"
    if source:
        step = source.header["iter_num"]
        yield f"starting from {source.path} at step {step}"
        if step >= cfg.max_iters:
            yield f"nothing left to train: max_iters={cfg.max_iters}; raise --max_iters to continue"


class Metrics:
    def __init__(self, cfg, world, run_id, step):
        """run_id: None for a run that leaves nothing behind."""
        wanted = {jsonl: True, wandb: cfg.wandb_log, tensorboard: cfg.tensorboard}
        names = [log for log in wanted if wanted[log] and run_id and world.rank == 0]
        self.logs = [log(cfg, run_id, step) for log in names]

    def write(self, row):
        """Log a row, with the perplexities of its losses."""
        for loss, name in (("loss", "perplexity"), ("val_loss", "val_perplexity")):
            if loss in row:
                row = {**row, name: math.exp(min(row[loss], 700.0))}  # exp overflows from 710 on
        for write, _ in self.logs:
            write(row)

    def close(self):
        for _, close in self.logs:
            close()


def jsonl(cfg, run_id, step):
    path = os.path.join(cfg.out_dir, "metrics.jsonl")
    with writing(path):
        if step and os.path.exists(path):  # what followed the checkpoint will be logged again
            kept = [row for row in read_rows(cfg.out_dir)
                    if row["iter"] < step and row.get("run", run_id) == run_id]
            with atomic(path) as tmp, open(tmp, "w") as f:
                f.writelines(json.dumps(row) + "\n" for row in kept)
        file = open(path, "ab" if step else "wb", buffering=0)  # no line waits in a buffer

    def write(row):
        with writing(path):
            file.write((json.dumps({"run": run_id, **row}) + "\n").encode())

    return write, file.close


def wandb(cfg, run_id, step):
    run = optional("wandb", "wandb_log=True").init(
        project=cfg.wandb_project, name=cfg.wandb_run_name, dir=cfg.out_dir, config=asdict(cfg),
        id=run_id, resume="allow" if step else None)
    return lambda row: run.log(row, step=row["iter"]), run.finish


def tensorboard(cfg, run_id, step):
    optional("tensorboard", "tensorboard=True")
    from torch.utils.tensorboard import SummaryWriter
    writer = SummaryWriter(cfg.out_dir, purge_step=step or None)

    def write(row):
        for key, value in row.items():
            if value is not None:
                writer.add_scalar(key, value, row["iter"])

    return write, writer.close


def read_rows(out_dir):
    """The objects in metrics.jsonl; lines that are damaged are left out, and counted on stderr."""
    path, rows, bad = os.path.join(out_dir, "metrics.jsonl"), [], 0
    try:
        with open(path, errors="replace") as f:
            lines = f.read().splitlines(keepends=True)
    except OSError as e:
        raise SystemExit(f"{path}: {e.strerror}")
    for line in lines:
        try:
            row = json.loads(line)
            row["iter"] + 0
            rows.append(row)
        except (ValueError, TypeError, KeyError):
            bad += line.endswith("\n")  # a killed run leaves half a line at the end
    if bad:
        print(f"{path}: {bad} damaged lines left out", file=sys.stderr)
    return rows


def optional(module, wanted_by):
    """Import what is not in requirements.txt; SystemExit with what to install."""
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise SystemExit(f"{wanted_by} needs a package that is not here: pip install {package}")

"""
What a run reports: out_dir/metrics.jsonl (one object a line), wandb and TensorBoard if asked for,
and the device's peaks.

    metrics = Metrics(cfg, world, run_id, step)   # rank 0 writes; on the others nothing happens
    metrics.write(dict(iter=step, loss=2.3))
"""

import importlib
import json
import os
import resource
import sys
from dataclasses import asdict

import torch

from outdir import atomic, writing

PEAK_FLOPS = {  # dense bf16 FLOP/s from the vendors' data sheets; the most specific name first
    "B200": 2250e12, "H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "GH200": 989e12,
    "A100": 312e12, "L40S": 362e12, "L4": 121e12, "A10": 125e12, "V100": 125e12, "T4": 65e12,
    "RTX 4090": 165e12, "RTX 3090": 71e12,
}


def peak_flops(device):
    """FLOP/s, None where unknown."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((peak for key, peak in PEAK_FLOPS.items() if key in name), None)


def peak_memory(device):
    """Bytes: the allocator's peak on CUDA, elsewhere the process's peak resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return peak_host_memory()


def peak_host_memory():
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class Metrics:
    def __init__(self, cfg, world, run_id, step):
        """run_id: None for a run that leaves nothing behind."""
        wanted = {jsonl: True, wandb: cfg.wandb_log, tensorboard: cfg.tensorboard}
        names = [log for log in wanted if wanted[log] and run_id and world.rank == 0]
        self.logs = [log(cfg, run_id, step) for log in names]

    def write(self, row):
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

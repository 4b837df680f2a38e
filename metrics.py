"""
Rank 0's reports: log lines, a row of out_dir/metrics.jsonl for each, and the same rows in
wandb and TensorBoard if you ask for them.

    ideal_s = ideal_seconds(model, cfg, world)             # for MFU
    log = Log(cfg, world, out_dir, run_id, step, ideal_s)  # no run_id: only print
    log.step(step, loss, norm, waited, optimizer, scaler, batches)  # every log_interval steps
    with log.paused(): ...                  # exclude an evaluation from the step times

A resumed run appends to metrics.jsonl: earlier rows from its step on are void.
"""

import copy
import json
import math
import os
import resource
import sys
import time
from contextlib import contextmanager

import torch
from torch.utils.flop_counter import FlopCounterMode

from configurator import as_dict, package
from ranks import first_line, print0

# Dense bf16 FLOP/s by NVIDIA's data sheets (fp16 for V100, which lacks bf16).
PEAK_FLOPS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 80GB HBM3": 989e12,
    "H100 PCIe": 756e12,
    "A100-SXM4-40GB": 312e12,
    "A100-SXM4-80GB": 312e12,
    "A10G": 70e12,
    "L40S": 362e12,
    "V100-SXM2-32GB": 125e12,
    "GeForce RTX 4090": 165e12,
}


def peak_flops(device):
    """Peak bf16 FLOP/s; None if unknown. It matches whole names, since H100 PCIe contains H100."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device).removeprefix("NVIDIA ").removeprefix("Tesla ")
    return PEAK_FLOPS.get(name)


def ideal_seconds(model, cfg, world):
    """How long a step would take if each rank's GPU reached its peak. MFU is this divided by what
    it takes; 0 if the peak is unknown. Counting takes as long as several steps of a small model.
    model: on the meta device."""
    peak = peak_flops(world.device)
    if not peak:
        return 0
    # A copy, since its forward and backward run.
    flops = flops_per_token(copy.deepcopy(model), world) * tokens_per_step(cfg)
    return flops / (peak * world.size)


def tokens_per_step(cfg):
    return cfg.gradient_accumulation_steps * cfg.batch_size * cfg.sizes.block_size


def flops_per_token(model, world):
    """FLOPs per token of forward and backward, as PyTorch counts them on the meta device: 6
    for each weight in a product, 12 T C per layer for attention (PaLM, appendix B), fewer if
    parameters are frozen. 0 if they cannot be counted."""
    idx = torch.zeros(1, model.config.block_size, dtype=torch.long, device="meta")
    try:
        with FlopCounterMode(display=False) as counter:
            _, loss = model(idx, idx)
            loss.backward()
    except Exception as e:  # a shape or a branch depends on values, which meta lacks
        print0(world, f"mfu n/a: the model does not run on the meta device ({first_line(e)})")
        return 0
    return counter.get_total_flops() / idx.numel()


def peak_memory(device):
    """Bytes: the allocator's peak on CUDA, elsewhere the process's peak resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def gpu_memory(device):
    """Bytes on a GPU: in tensors now, between two steps (the valley to the peak); the allocator's
    peak; free on the device. Also how often the allocator ran out of memory, freed its cache and
    tried again. On other devices all are None."""
    if device.type != "cuda":
        return dict.fromkeys(("valley_memory", "peak_reserved", "free_memory", "alloc_retries"))
    stats = torch.cuda.memory_stats(device)
    free, _ = torch.cuda.mem_get_info(device)
    return dict(
        valley_memory=stats["allocated_bytes.all.current"],
        peak_reserved=stats["reserved_bytes.all.peak"],
        free_memory=free,
        alloc_retries=stats["num_alloc_retries"],
    )


def require_packages(cfg):
    """SystemExit if a package is missing, before the run changes anything on disk."""
    if cfg.eval_only:
        return  # it logs nowhere
    if cfg.wandb_log:
        package("wandb", "wandb_log=True")
    if cfg.tensorboard:
        package("torch.utils.tensorboard", "tensorboard=True")


def describe(cfg, model, batches, source, world):
    """The first lines of a run's output."""
    n = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    samples = cfg.gradient_accumulation_steps * cfg.batch_size
    yield (
        f"{n / 1e6:.2f}M parameters, strategy {cfg.strategy}, {world.size} x "
        f"{world.device.type}, {cfg.dtype}, {samples * cfg.sizes.block_size:,} tokens per step, "
        f"{samples // cfg.batch_size // world.size} x {cfg.batch_size} sequences of a rank")
    name = cfg.dataset
    train, val = batches.files.values()
    yield (
        f"{name}: {train.tokens_in_all:,} tokens of train and {val.tokens_in_all:,} of val, "
        f"epoch = {len(train) / samples:,.0f} steps; 100 windows have ids up to "
        f"{train.largest:,}, vocab_size={cfg.sizes.vocab_size:,}")
    before = source and source.header.get("tokens", {}).get(name)
    if before not in (None, train.tokens_in_all):
        yield (
            f"{name}: {before:,} tokens when the checkpoint was written, and now "
            f"{train.tokens_in_all:,} in another order: some come again, and others never")
    if train.masks:
        yield f"{name}: {train.counts.mean() / cfg.sizes.block_size:.1%} of the targets count"
    if trained < n:
        yield f"{n - trained:,} parameters are frozen: no gradients, no optimizer state"
    elif cfg.frozen_dtype != "float32":
        yield f"frozen_dtype={cfg.frozen_dtype} does nothing here: no parameter is frozen"
    start = source or getattr(cfg.sizes, "opened", None)  # a model file may have opened one
    if start:
        step = start.header["iter_num"]
        yield f"starting from {start.path} at step {step}"
        longest = start.header["model_args"]["block_size"]
        if cfg.sizes.block_size < longest and "block_size" not in cfg.given:
            yield (
                f"context {cfg.sizes.block_size:,} of {longest:,}, which takes less memory: "
                f"--block_size={longest} for all of it")
        if step >= cfg.max_iters:
            yield f"nothing left to train: max_iters={cfg.max_iters}; raise it to continue"
    end = cfg.lr_decay_iters if cfg.decays else cfg.max_iters
    if cfg.decay_lr and cfg.warmup_iters >= min(end, cfg.max_iters) > 0:
        yield (
            f"learning_rate={cfg.learning_rate} is never reached: warmup_iters={cfg.warmup_iters}, "
            f"lr_decay_iters={cfg.lr_decay_iters}, max_iters={cfg.max_iters}")
    elif cfg.decays and cfg.max_iters > cfg.lr_decay_iters:
        yield (
            f"from step lr_decay_iters={cfg.lr_decay_iters} to max_iters={cfg.max_iters} the "
            f"learning rate is min_lr={cfg.min_lr}")


def perplexity(loss):
    return math.exp(min(loss, 700))  # exp overflows from 710 on


def gib(n):
    return f"{n / 2**30:.2f}GiB"


class Log:
    def __init__(self, cfg, world, out_dir, run_id, step, ideal_s=0):
        self.cfg = cfg
        self.world = world
        self.run_id = run_id
        self.next_step = step
        self.save_times = dict.fromkeys(("save_s", "save_blocked_s"))  # since the last line
        self.started = self.since = time.time()
        self.paused_s = 0.0  # in evaluations and saves
        self.ideal_s = ideal_s
        self.reset_peak()  # exclude the peak of building the model
        self.file = self.wandb = self.tensorboard = None
        if world.rank > 0 or run_id is None:  # eval_only leaves nothing behind
            return
        path = os.path.join(out_dir, "metrics.jsonl")
        with open(path, "ab+") as f:  # a full disk may have left half a row at its end
            f.seek(0)
            f.truncate(f.read().rfind(b"\n") + 1)
        self.file = open(path, "a")
        self.write_line(dict(iter=step, time=self.started, config=as_dict(cfg)))
        if cfg.wandb_log:
            self.wandb = package("wandb", "wandb_log=True").init(
                project=cfg.wandb_project,
                name=cfg.wandb_run_name,
                dir=out_dir,
                config=as_dict(cfg),
                id=run_id,
                resume="allow" if step else None,
            )
        if cfg.tensorboard:
            module = package("torch.utils.tensorboard", "tensorboard=True")
            self.tensorboard = module.SummaryWriter(out_dir, purge_step=step or None)

    @contextmanager
    def paused(self):
        if self.world.device.type == "cuda":
            # Steps that were not logged may still be queued. They don't belong to the pause.
            torch.cuda.synchronize(self.world.device)
        start = time.time()
        yield
        self.since += time.time() - start
        self.paused_s += time.time() - start
        self.reset_peak()

    def reset_peak(self):
        """Measure the peak from here on."""
        if self.world.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.world.device)

    def step(self, step, loss, norm, waited, optimizer, scaler, batches):
        """Log this step's numbers, and the mean time of a step since the last call.
        loss, norm: over all ranks. waited: seconds for batches since then, on the slowest rank."""
        if scaler.skipped:
            print0(self.world, f"iter {step}: gradients overflowed in float16, "
                               f"steps skipped: {scaler.skipped}, loss scale now {scaler.scale:g}")
            scaler.skipped = 0
        row = self.row(step, loss, norm, waited, optimizer, scaler, batches)
        print0(self.world, self.line(row, norm))
        self.write(row)
        self.since = row["time"]
        self.next_step = step + 1
        self.save_times = dict.fromkeys(self.save_times)
        self.reset_peak()

    def row(self, step, loss, norm, waited, optimizer, scaler, batches):
        """A step's numbers, as metrics.jsonl has them."""
        now = time.time()
        steps = step + 1 - self.next_step
        seconds = (now - self.since) / steps
        tokens = tokens_per_step(self.cfg)
        samples = tokens // self.cfg.sizes.block_size
        windows = len(batches.files["train"])
        return dict(
            iter=step,
            time=now,  # Unix seconds
            loss=loss,
            perplexity=perplexity(loss),
            grad_norm=norm if math.isfinite(norm) else None,  # JSON has no NaN
            epoch=(step + 1) * samples / windows,
            sequences_per_step=samples,
            tokens_per_step=tokens,
            lr=optimizer.param_groups[0]["lr"],
            time_ms=seconds * 1000,
            data_ms=waited / steps * 1000,
            tokens_per_s=tokens / seconds,
            mfu=self.ideal_s / seconds if self.ideal_s else None,
            loss_scale=scaler.scale if scaler.enabled else None,
            peak_memory=peak_memory(self.world.device),
            **gpu_memory(self.world.device),
            wall_s=now - self.started,
            train_s=now - self.started - self.paused_s,
            **self.save_times,
        )

    def line(self, row, norm):
        """A row as it is printed."""
        mfu = f"{row['mfu']:.2%}" if row["mfu"] else "n/a"
        on_gpu = ""
        if self.world.device.type == "cuda":
            on_gpu = (
                f" ({gib(row['valley_memory'])} at rest, {gib(row['peak_reserved'])} reserved, "
                f"{gib(row['free_memory'])} free, {row['alloc_retries']} retries)")
        minutes_left = (self.cfg.max_iters - row["iter"] - 1) * row["time_ms"] / 60_000
        return (
            f"iter {row['iter']}: loss {row['loss']:.4f}, time {row['time_ms']:.2f}ms, mfu {mfu}, "
            f"{row['tokens_per_s']:,.0f} tok/s, norm {norm:.2f}, "
            f"data {row['data_ms']:.2f}ms, mem {gib(row['peak_memory'])}{on_gpu}, "
            f"{minutes_left:.1f}m left")

    def evaluation(self, step, losses):
        """losses: as train.evaluate returns them."""
        val = losses["val"]
        line = f"step {step}: train loss {losses['train']:.4f}, val loss {val:.4f}"
        now = time.time()
        tokens = step * tokens_per_step(self.cfg)
        row = dict(iter=step, time=now, wall_s=now - self.started, tokens=tokens)
        row |= {f"{split}_loss": loss for split, loss in losses.items()}
        row["val_perplexity"] = perplexity(val)
        print0(self.world, line)
        self.write(row)

    def saved(self, step, seconds, blocked_s):
        """A save is done. blocked_s: seconds in which training was blocked. Both go into the next
        step's row: the save ran in the background, so a row of its own would be out of order."""
        print0(self.world, f"saved step {step} in {seconds:.2f}s, of which training was blocked "
                           f"for {blocked_s:.2f}s")
        self.save_times = dict(save_s=seconds, save_blocked_s=blocked_s)

    def write(self, row):
        if self.file:
            self.write_line(row)
        if self.wandb:
            self.wandb.log(row, step=row["iter"])
        if self.tensorboard:
            for key, value in row.items():
                if value is not None:
                    self.tensorboard.add_scalar(key, value, row["iter"])
            self.tensorboard.flush()

    def write_line(self, row):
        try:
            print(json.dumps({"run": self.run_id, **row}), file=self.file, flush=True)
        except OSError as e:  # the row stays in the file's buffer until there is room
            print(f"cannot write {self.file.name}: {e.strerror}", file=sys.stderr)

    def close(self):
        end = f": max_iters={self.cfg.max_iters}" if self.next_step >= self.cfg.max_iters else ""
        print0(self.world, f"done in {time.time() - self.started:.0f} s{end}")
        if self.wandb:
            self.wandb.finish()

"""
How fast, how large, and where the time goes: the real model, optimizer, loader and step of train.py.

    python bench.py config/quickstart.py --steps=20                                       # one process
    python bench.py config/quickstart.py --variants='dtype=float32;dtype=bfloat16'        # two settings, side by side
    torchrun --standalone --nproc_per_node=2 bench.py config/quickstart.py --strategies=ddp,shard_grad_op,full_shard
    python bench.py config/quickstart.py --breakdown                                      # where a step goes
    python bench.py config/quickstart.py --nanogpt=../nanoGPT                             # against nanoGPT's own train.py
    python bench.py config/quickstart.py --checkpoint_io=500                              # save and load of a 500 MB state
    python bench.py --plot out-quickstart out-other                                       # a picture of finished runs
    ... --json=FILE writes the rows; any --key=value of train.py applies

All variants are built first and then take turns, a few steps each, because machines are noisy: compare the ratios of one
run, not numbers of two. Memory is the process's while all variants live; for the memory of one, run it alone.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace

import torch

import checkpoint
import fsdp
import train
from fsdp import print0

T_START = time.time()


def arguments(argv):
    """(bench's own options, the rest for train.load_config)."""
    own, rest = train.split_flags(argv, dict(strategies="", variants="", steps="20", breakdown="", nanogpt="", checkpoint_io="", json=""))
    if not own["steps"].isdigit() or int(own["steps"]) < 1 or own["checkpoint_io"] and not own["checkpoint_io"].isdigit():
        raise SystemExit(f"--steps={own['steps']} and --checkpoint_io={own['checkpoint_io']} must be whole numbers, at least 1")
    return own, rest


def matmul_rate(dist, dtype, n=2048):
    """FLOP/s of an n^3 product in dtype, the median of 20; the practical peak of this machine."""
    n = n if dist.device.type == "cpu" else 8192
    a, b = (torch.randn(n, n, device=dist.device, dtype=dtype) for _ in range(2))
    times = []
    for _ in range(23):
        synchronize(dist)
        t0 = time.perf_counter()
        a @ b
        synchronize(dist)
        times.append(time.perf_counter() - t0)
    return 2 * n**3 / statistics.median(times[3:])


def synchronize(dist):
    if dist.device.type == "cuda":
        torch.cuda.synchronize(dist.device)


class Variant:
    """One configuration, ready to take steps."""

    def __init__(self, name, cfg, dist):
        t0 = time.time()
        self.name, self.dist = name, dist
        self.cfg = fsdp.resolve(cfg, dist, torch.distributed.is_initialized())
        vocab = train.read_meta(train.data_dir(cfg.dataset)).get("vocab_size", 50304)
        self.batches = train.Batches(self.cfg, dist, vocab)
        self.model, self.gpt, self.optimizer = train.build(self.cfg, dist, None, vocab)
        self.scaler = torch.amp.GradScaler(dist.device.type, enabled=self.cfg.dtype == "float16")
        self.step, self.batch, self.times = 0, self.batches.train(0, 0), []
        self.run(3)  # compile, allocate, set up the communication
        self.startup, self.times = time.time() - t0, []

    def run(self, n):
        for _ in range(n):
            synchronize(self.dist)
            t0 = time.perf_counter()
            _, _, self.batch = train.train_step(self.model, self.optimizer, self.scaler, self.batches, self.batch, self.step, self.cfg, self.dist)
            synchronize(self.dist)
            self.times.append(time.perf_counter() - t0)
            self.step += 1

    def row(self, rate):
        cfg, median = self.cfg, statistics.median(self.times)
        tokens = cfg.gradient_accumulation_steps * cfg.batch_size * cfg.block_size
        flops = self.gpt.flops_per_token() * tokens / median / self.dist.world_size
        peak = train.peak_flops(self.dist)
        return dict(name=self.name, step_ms=median * 1e3, fastest_ms=min(self.times) * 1e3, slowest_ms=max(self.times) * 1e3, tokens_per_s=tokens / median,
                    flops=flops, mfu=flops / peak if peak else None, of_matmul=flops / rate, startup_s=self.startup,
                    peak_memory=train.peak_memory(self.dist), host_memory=train.peak_host_memory())


def breakdown(variant):
    """Seconds of a step by phase: everything timed on the host, with a synchronization after each phase."""
    v, cfg, dist = variant, variant.cfg, variant.dist
    phases = dict.fromkeys(("data", "forward", "backward", "clip", "optimizer", "logging"), 0.0)
    with tempfile.TemporaryDirectory() as out:  # gone again at once; writing to the open file costs the same
        metrics = train.Metrics(replace(cfg, out_dir=out, wandb_log=False, tensorboard=False), dist, 0)
    for _ in range(5):
        for micro in range(cfg.gradient_accumulation_steps // dist.world_size):
            t = [time.perf_counter()]
            batch = v.batches.train(v.step, micro)
            t.append(time.perf_counter())
            with fsdp.autocast(cfg, dist.device):
                loss = v.model(*batch)[1]
            synchronize(dist), t.append(time.perf_counter())
            loss.backward()
            synchronize(dist), t.append(time.perf_counter())
            for key, a, b in zip(phases, t, t[1:]):
                phases[key] += (b - a) / 5
        t = [time.perf_counter()]
        fsdp.clip_grad_norm(v.model, cfg.grad_clip, dist)
        synchronize(dist), t.append(time.perf_counter())
        v.optimizer.step()
        v.optimizer.zero_grad(set_to_none=True)
        synchronize(dist), t.append(time.perf_counter())
        metrics.write(dict(iter=v.step, loss=fsdp.mean(loss.detach(), dist).item(), peak_memory=train.peak_memory(dist)))
        t.append(time.perf_counter())
        for key, a, b in zip(("clip", "optimizer", "logging"), t, t[1:]):
            phases[key] += (b - a) / 5
    # communication runs inside forward and backward: its share by the profiler (waiting for other ranks included)
    with torch.profiler.profile() as prof:
        v.run(3)
    events = prof.key_averages()
    attribute = "self_device_time_total" if dist.device.type == "cuda" else "self_cpu_time_total"
    comm = sum(getattr(e, attribute) for e in events if any(w in e.key for w in ("nccl", "gloo:", "c10d::")))
    phases["communication, in the above"] = comm / 3e6
    total = sum(getattr(e, attribute) for e in events)
    top = sorted(events, key=lambda e: -getattr(e, attribute))[:12]
    return phases, [(e.key, getattr(e, attribute) / total) for e in top]


def against_nanogpt(directory, argv, cfg, steps):
    """Median ms a step of nanoGPT's train.py (its CPU defaults: fp32, eager) and of ours, run in turns, each as a user runs it."""
    directory = os.path.abspath(directory)
    shared = {k: getattr(cfg, k) for k in ("n_layer", "n_head", "n_embd", "block_size", "batch_size", "dropout", "bias", "learning_rate", "gradient_accumulation_steps")}
    data = {**shared, "max_iters": steps, "eval_iters": 1, "eval_interval": 10**6, "log_interval": 1}
    theirs = [sys.executable, "train.py", *(f"--{k}={v}" for k, v in {**data, "dataset": os.path.basename(cfg.dataset), "device": "cpu", "compile": False}.items())]
    ours = [sys.executable, os.path.join(train.HERE, "train.py"), *argv, *(f"--{k}={v}" for k, v in data.items()), "--out_dir=" + tempfile.mkdtemp()]
    times = {"nanoGPT": [], "nanoFSDP2": []}
    for _ in range(3):
        for name, command, cwd in (("nanoGPT", theirs, directory), ("nanoFSDP2", ours, train.HERE)):
            p = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
            found = [float(line.split("time ")[1].split("ms")[0]) for line in p.stdout.splitlines() if line.startswith("iter ")]
            if not found:
                raise SystemExit(f"{name} failed: {(p.stderr.strip() or p.stdout.strip()).splitlines()[-1]}")
            times[name] += found[3:]
    return {name: statistics.median(t) for name, t in times.items()}


def checkpoint_io(megabytes, cfg, dist):
    """Seconds to save and load a full state of about so many MB, ours (atomic, synced, mapped) and plain torch.save / torch.load."""
    width = max(12, int((megabytes * 1e6 / 12 / 12 / 4) ** 0.5) // 12 * 12)  # 4 blocks of 12 n^2 parameters, 12 bytes each
    v = Variant("io", replace(cfg, n_layer=4, n_embd=width, n_head=12, block_size=16, batch_size=1, gradient_accumulation_steps=dist.world_size), dist)
    times = {}

    def timed(name, action):
        fsdp.barrier()
        t0 = time.perf_counter()
        out = action()
        fsdp.barrier()
        times[name] = time.perf_counter() - t0
        return out
    with tempfile.TemporaryDirectory() as out:
        path = fsdp.agree(dist, os.path.join(out, "ckpt.pt"))
        header = dict(iter_num=1, best_val_loss=1.0, model_args=dict(v.gpt.config.__dict__), config={}, scaler=None)
        timed("save", lambda: checkpoint.save_full(path, v.gpt, v.optimizer, header, dist))
        times["megabytes"] = os.path.getsize(path) / 1e6 if dist.rank == 0 else 0

        def load():
            checkpoint.load(checkpoint.open_source("resume", os.path.dirname(path), dist), v.gpt, v.optimizer, dist)
        timed("load", load)
        if dist.rank == 0:
            t0 = time.perf_counter()
            state = torch.load(path, weights_only=True)
            times["plain torch.load"] = time.perf_counter() - t0
            t0 = time.perf_counter()
            torch.save(state, path + ".plain")
            times["plain torch.save"] = time.perf_counter() - t0
        fsdp.barrier()
    return times


def plot(directories, target="training.png"):
    """Loss, validation loss, tokens/s and memory of finished runs over their steps, one picture."""
    train.optional("matplotlib", "plot")
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    figure, axes = plt.subplots(1, 3, figsize=(13, 3.6))
    for i, directory in enumerate(directories):
        try:
            with open(os.path.join(directory, "metrics.jsonl")) as f:
                rows = [json.loads(line) for line in f]
        except FileNotFoundError:
            raise SystemExit(f"{directory}/metrics.jsonl: no such file; --plot takes the out_dir of finished runs")
        color, name = f"C{i}", os.path.basename(directory.rstrip("/"))
        steps, evals = [r for r in rows if "loss" in r], [r for r in rows if "val_loss" in r]
        axes[0].plot([r["iter"] for r in steps], [r["loss"] for r in steps], color=color, alpha=0.4, label=f"{name}: training")
        axes[0].plot([r["iter"] for r in evals], [r["val_loss"] for r in evals], color=color, marker="o", label=f"{name}: validation")
        axes[1].plot([r["iter"] for r in steps[1:]], [r["tokens_per_s"] for r in steps[1:]], color=color)
        axes[2].plot([r["iter"] for r in steps], [r["peak_memory"] / 2**20 for r in steps], color=color)
    for axis, title in zip(axes, ("loss", "tokens/s", "peak memory, MiB")):
        axis.set(title=title, xlabel="step")
        axis.grid(alpha=0.3)
    axes[1].set_ylim(bottom=0), axes[2].set_ylim(bottom=0)
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(target, dpi=110)
    print(f"written: {target}")


def main(argv):
    if "--help" in argv:
        return print(__doc__.strip())
    if "--plot" in argv:
        return plot([a for a in argv if a != "--plot"])
    own, rest = arguments(argv)
    base = train.load_config(rest)
    dist, _ = fsdp.setup(base)
    torch.set_float32_matmul_precision("high")
    out = dict(torch=torch.__version__, device=torch.cuda.get_device_name() if dist.device.type == "cuda" else "cpu", threads=torch.get_num_threads(),
               world_size=dist.world_size, command=" ".join(argv))
    rates = {d: matmul_rate(dist, fsdp.DTYPES[d]) for d in ("float32", "bfloat16")}
    out["matmul_flops"] = rates
    print0(dist, f"torch {out['torch']}, {dist.world_size} x {out['device']}, {out['threads']} threads; matrix product: "
                 + ", ".join(f"{d} {r / 1e9:,.0f} GFLOP/s" for d, r in rates.items()))
    if own["nanogpt"]:
        out["nanogpt_ms"] = against_nanogpt(own["nanogpt"], rest, base, int(own["steps"]))
        theirs, ours = out["nanogpt_ms"].values()
        print0(dist, f"nanoGPT {theirs:.1f} ms a step, nanoFSDP2 {ours:.1f} ms: {theirs / ours:.2f} x its tokens/s")
    elif own["checkpoint_io"]:
        out["checkpoint_io_s"] = times = checkpoint_io(int(own["checkpoint_io"]), base, dist)
        print0(dist, f"{times.pop('megabytes'):.0f} MB: " + ", ".join(f"{k} {v:.2f} s" for k, v in times.items()))
    else:
        variants = []
        for overrides in own["variants"].split(";"):
            for strategy in own["strategies"].split(","):
                extra = [f"--{o.strip()}" for o in overrides.split(",") if o] + ([f"--strategy={strategy}"] if strategy else [])
                name = " ".join(e[2:] for e in extra) or "config"
                variants.append(Variant(name, train.load_config(extra, base), dist))
                print0(dist, f"{name}: ready {time.time() - T_START:.1f} s after launch")
        for _ in range(int(own["steps"])):
            for v in variants:  # in turns
                v.run(1)
        out["rows"] = rows = [v.row(rates["float32" if v.cfg.dtype == "float32" else "bfloat16"]) for v in variants]
        print0(dist, f"{'':42s} step, ms (fastest - slowest)   tokens/s     MFU  of matmul rate  memory    host  ratio to the first")
        for r in rows:
            mfu = f"{r['mfu']:.1%}" if r["mfu"] else "n/a"
            print0(dist, f"{r['name'][:40]:42s} {r['step_ms']:8.1f} ({r['fastest_ms']:7.1f} - {r['slowest_ms']:7.1f}) {r['tokens_per_s']:10,.0f}  "
                         f"{mfu:>6s}  {r['of_matmul']:13.1%}  {r['peak_memory'] / 2**30:5.2f}G  {r['host_memory'] / 2**30:5.2f}G  {r['step_ms'] / rows[0]['step_ms']:8.3f} x its time")
        if own["breakdown"]:
            for v in variants:
                phases, top = breakdown(v)
                print0(dist, f"\n{v.name}, ms a step: " + ", ".join(f"{k} {s * 1e3:.1f}" for k, s in phases.items()))
                print0(dist, "  " + ", ".join(f"{k} {share:.0%}" for k, share in top))
                out.setdefault("breakdown", {})[v.name] = phases
    if own["json"] and dist.rank == 0:
        with checkpoint.atomic(own["json"]) as tmp, open(tmp, "w") as f:
            json.dump(out, f, indent=1)


if __name__ == "__main__":
    fsdp.run(main, sys.argv[1:])

"""
The rows that are not a config's step. Each function takes the Work of a row, and returns (measured,
predicted): two dicts of numbers, or a text in place of what was not predicted.
"""

import json
import os
import re
import signal
import time
from importlib.util import find_spec
from statistics import median

from extras.gpu_report.work import NotHere, children


def minimal(work):
    """On as many ranks as it allows: a divisor of its 12 samples."""
    ranks = max(n for n in (1, 2, 3, 4, 6, 12) if n <= work.row.gpus)
    on_gpus = losses(work.call("minimal.py", ranks=ranks))
    on_cpu = losses(work.call("minimal.py", ranks=ranks, gpus=0))
    return dict(loss=on_gpus[-1], ranks=ranks), dict(loss=on_cpu[-1])


def losses(log):
    return [float(loss) for loss in re.findall(r"\bloss (\d+\.\d+)", log)]


def tests(work):
    if not find_spec("pytest"):
        raise NotHere("it takes pytest, and the packages of the README's tests")
    select = "cuda_is and not faults" if work.tiny else "cuda"
    log = work.call("-m", "pytest", "-q", "-rsfE", "-k", select, may_fail=True)
    found = {kind: int(n) for n, kind in re.findall(r"(\d+) (passed|failed|skipped|error)", log)}
    if not found:
        raise RuntimeError(work.first_error(log))
    names = re.findall(r"^(?:FAILED|ERROR) \S+::(\S+)", log, re.M)
    if names:
        found["names"] = " ".join(names)
    return found, dict(failed=0)


def nanogpt(work):
    """Its bench.py and ours take turns."""
    theirs, ours = [], []
    for _ in range(1 if work.tiny else 3):
        log = work.call("bench.py", "--real_data=False", "--bias=False", cwd=work.nanogpt)
        theirs.append(float(re.search(r"time per iteration: ([\d.]+)ms", log)[1]))
        keys = [*work.keys_of("124M compiled"), "--grad_clip=0"]  # theirs does not clip
        ours.append(work.step(keys, steps=10)["seconds"] * 1e3)
    ratio = median(theirs) / median(ours)
    return dict(ratio=ratio, ours_ms=median(ours), theirs_ms=median(theirs)), dict(ratio=1.03)


# Of nanoGPT's config/train_shakespeare_char.py, by our keys.
CHARACTERS = [
    "--n_layer=6", "--n_head=6", "--n_embd=384", "--block_size=256", "--vocab_size=65",
    "--bias=False", "--dropout=0.2", "--batch_size=64", "--gradient_accumulation_steps=1",
    "--weight_decay=0.1", "--learning_rate=1e-3", "--min_lr=1e-4", "--beta1=0.9", "--beta2=0.99",
    "--warmup_iters=100", "--max_iters=5000", "--lr_decay_iters=5000", "--eval_interval=250",
    "--eval_iters=200", "--log_interval=10", "--always_save_checkpoint=False",
    "--dtype=bfloat16", "--compile=True"]
FEW = ["--max_iters=4", "--eval_interval=9", "--eval_iters=1", "--n_layer=1", "--compile=False"]


def to_the_end(work):
    """nanoGPT's own train.py and ours train its character model: an outcome, not a step."""
    data = os.path.join(work.nanogpt, "data", "shakespeare_char")
    if not os.path.exists(os.path.join(data, "train.bin")):
        raise NotHere("it takes nanoGPT's data: run its data/shakespeare_char/prepare.py")
    few = FEW if work.tiny else []
    out = work.directory("out-theirs")
    begin = time.time()
    log = work.call(
        "train.py", "config/train_shakespeare_char.py", f"--out_dir={out}", *few, cwd=work.nanogpt)
    theirs = dict(
        val_loss=min(float(loss) for loss in re.findall(r"val loss ([\d.]+)", log)),
        seconds=time.time() - begin)
    out = work.directory("out-ours")
    begin = time.time()
    work.call("train.py", f"--dataset={data}", f"--out_dir={out}", *CHARACTERS, *few)
    rows = [json.loads(line) for line in open(out / "metrics.jsonl")]
    ours = dict(
        val_loss=min(row["val_loss"] for row in rows if "val_loss" in row),
        seconds=time.time() - begin)
    return ours, theirs


def short_run(work, name, *more, iters=20, ranks=None):
    """A short run of train.py, with the keys of a row: its flags."""
    ranks = ranks or work.row.gpus
    keys = [key for key in work.keys_of(name) if not key.startswith("--strategy")]
    strategy = "full_shard" if ranks > 1 else "single"
    accumulation = f"--gradient_accumulation_steps={ranks}"
    return [
        "train.py", *keys, accumulation, f"--strategy={strategy}", f"--max_iters={iters}",
        f"--lr_decay_iters={iters}", "--warmup_iters=2", "--log_interval=1", "--eval_iters=1",
        f"--eval_interval={iters}", *more]


def save(work, kind):
    if not work.tiny:
        work.require_disk(45e9)  # three of 14 GB
    out = work.directory("out-save")
    argv = short_run(
        work, work.row.trains, f"--checkpoint={kind}", "--save_interval=8", f"--out_dir={out}")
    work.call(*argv, ranks=work.row.gpus)
    rows = [json.loads(line) for line in open(out / "metrics.jsonl")]
    saves = [row for row in rows if row.get("save_s")]
    if not saves:
        raise RuntimeError("no save was logged")
    newest = max([*out.glob("step-*"), *out.glob("ckpt.pt")])
    files = [newest, *newest.rglob("*")]
    size = sum(f.stat().st_size for f in files if f.is_file())
    found = dict(
        save_s=median(row["save_s"] for row in saves),
        blocked_s=median(row["save_blocked_s"] for row in saves),
        bytes_on_disk=size,
    )
    return found, "the plan knows no disks"


def full_save(work):
    return save(work, "full")


def sharded_save(work):
    return save(work, "sharded")


def killed(work):
    """A rank of two is killed with -9 after a checkpoint, and torchrun starts all again."""
    argv = short_run(
        work, "124M", "--save_interval=5", "--init_from=auto", "--checkpoint=sharded", iters=40,
        ranks=2)
    if work.row.gpus < 2:
        argv = ["tests/own_node.py", *argv, "--device=cuda"]
    whole, out = work.directory("out-whole"), work.directory("out-killed")
    work.call(*argv, f"--out_dir={whole}", ranks=2)
    p = work.start(*argv, f"--out_dir={out}", ranks=2, restarts=1)
    while p.poll() is None and not any(out.glob("step-*/header.json")):
        work.require_time()
        time.sleep(0.1)
    for rank in children(p.pid)[-1:]:
        os.kill(rank, signal.SIGKILL)
    starts = work.wait(p).count(" parameters, strategy ")
    return (
        dict(loss=last_loss(out), restarts=starts - 1),
        dict(loss=last_loss(whole), restarts=1))


def last_loss(out):
    return [json.loads(line) for line in open(out / "metrics.jsonl")][-1].get("val_loss")


def rates(work):
    found = work.child("rates.py", ranks=work.row.gpus)
    return found, work.setting.rates

"""
Random faults on the way of random runs. What comes out must be an undisturbed run's, bit for bit.

    python tests/faults.py 200              # until 200 faults have happened
    python tests/faults.py 1 --seed=17      # the run that had this seed, again

A run is one of KINDS: a training with full or sharded checkpoints, or data/prepare.py. One to
three faults happen to it: a signal to a rank or to all; a full disk; damage to a checkpoint. After
each it starts again with the same command. At last it ends well, and what it wrote is compared. No
fault but damage may cost a checkpoint that was whole, and nothing trains on half a data set. A seed
gives the same run and faults, as far as the clock allows. Exit code 1 at the first that differs.
"""

import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from contextlib import suppress
from functools import cache
from pathlib import Path

from harness import HERE, Ranks, flags
from training import WAYS, arguments, losses, make_data, tensor_of, trained

import checkpoint
import train
from data import prepare
from ranks import World

RUN = dict(max_iters=16, eval_interval=2, init_from="auto", gradient_accumulation_steps=4,
           n_embd=120)
KINDS = {"single": (1, {}), **WAYS, "prepare": (1, {})}  # ranks, and a training's keys
KINDS["offloaded"] = 2, dict(strategy="full_shard", cpu_offload=0.5)
if os.path.exists(os.path.join(HERE, "extras")):  # a fork may have deleted it
    KINDS["muon"] = 2, dict(strategy="full_shard", optimizer="muon")
    KINDS["lora"] = 2, dict(strategy="full_shard", model="gpt2+lora")


def newest(out):
    """Step of the newest intact checkpoint, -1 without one."""
    with suppress(SystemExit):
        if source := checkpoint.find(out, World()):
            return source.header["iter_num"]
    return -1


def signal_to_ranks(rng, out, seconds, world, *work):
    """To one rank or to all, at any moment: while it imports, trains, saves or leaves."""
    number = rng.choice([signal.SIGTERM, signal.SIGINT, signal.SIGHUP, *[signal.SIGKILL] * 3])
    hit = rng.choice([[*range(world)], [rng.randrange(world)]])
    p = Ranks(world, *work)
    time.sleep(seconds)
    p.send(number, *hit)
    p.finish()
    return f"{number.name} to ranks {hit} after {seconds:.2f} s"


def full_disk(rng, out, seconds, world, *work):
    """A file of `limit` bytes is too large."""
    limit = rng.choice([200, 5000, 100_000, 1_000_000, 5_000_000])
    Ranks(world, limited, limit, *work).finish()
    return f"disk full at {limit:,} bytes"


def limited(limit, function, *args):
    """A function on a disk that is full as soon as a file has so many bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    function(*args)


def damage(rng, out, seconds, world, *work):
    """A signal; then a file of a checkpoint is cut, removed, or changed in a bit or a block."""
    said = signal_to_ranks(rng, out, seconds, world, *work)
    paths = sorted([*Path(out).glob("*.pt"), *Path(out).glob("step-*/*")])
    if not paths:
        return said
    path, what = rng.choice(paths), rng.choice(["cut", "flip", "zero", "remove"])
    data = bytearray(path.read_bytes())
    at = int(rng.random() * len(data))
    if what == "cut":
        data = data[:at]
    elif what == "flip" and data:
        data[at] ^= 1 << rng.randrange(8)
    elif what == "zero":
        data[at:at + 4096] = bytes(len(data[at:at + 4096]))
    path.write_bytes(data)
    if what == "remove":
        path.unlink()
    return f"{said}, {what} {path.relative_to(out)}"


FAULTS = [signal_to_ranks, full_disk, damage]  # each starts the run, and says what happened to it


def work_of(tmp, kind, out, **keys):
    """The run that writes to `out`, as Ranks takes it."""
    world, own = KINDS[kind]
    if kind == "prepare":
        return world, slow_prepare, out
    if kind == "lora":
        keys["base"], _ = undisturbed(tmp, "single")
    return world, train.main, arguments(tmp, out, **own, **RUN, **keys)


def slow_prepare(out):
    """data/prepare.py on a disk so slow that most signals come while it writes."""
    os.fsync = lambda fd: time.sleep(0.1)
    texts = sorted(map(str, Path(os.__file__).parent.glob("*.py")))
    sys.argv = ["prepare.py", "x", *texts, *flags(out=out, tokenizer="bytes", shard_tokens=10**6)]
    prepare.main()


@cache
def undisturbed(tmp, kind):
    """Where a run without faults has written, and how many seconds it took."""
    out = os.path.join(tmp, kind)
    p = Ranks(*work_of(tmp, kind, out))
    start = time.time()
    p = p.finish()
    seconds = time.time() - start
    assert p.returncode == 0, p.stderr
    return out, seconds


def one_run(tmp, seed):
    """A run with its faults; returns how many, and says what happened to it."""
    rng = random.Random(seed)
    kind, saved = rng.choice([*KINDS]), rng.choice(["full", "sharded"])
    whole, seconds = undisturbed(tmp, kind)
    out = os.path.join(tmp, f"run-{seed}", "out")
    work = work_of(tmp, kind, out, checkpoint=saved)
    faults = rng.choices(FAULTS, [2, 1, kind != "prepare"], k=rng.choice([1, 2, 3]))
    print(f"seed {seed}: {kind}, {saved}", end="", flush=True)
    for fault in faults:
        before = newest(out)
        print(f"; {fault(rng, out, rng.random() * seconds, *work)}", end="", flush=True)
        assert fault is damage or newest(out) >= before, f"step {before} is gone: {newest(out)}"
        if kind == "prepare":  # a training is refused, or has all of it
            p = trained(1, arguments(tmp, f"{out}-run", dataset=out, max_iters=1))
            assert p.stderr.count("\n") == 1 or result(kind, out) == result(kind, whole), p.stderr
    p = Ranks(*work).finish()
    if p.returncode:  # all that was there is damaged: it says which
        assert "move it away, or pass another out_dir" in p.stderr, p.stderr
        assert damage in faults and "Traceback" not in p.stderr, p.stderr
        shutil.rmtree(out)
        Ranks(*work).finish()
    ours, theirs = result(kind, out), result(kind, whole)
    assert ours == theirs, [key for key in theirs if theirs[key] != ours.get(key)]
    shutil.rmtree(os.path.dirname(out))
    return len(faults)


def result(kind, out):
    """What the run has made, by name: weights, optimizer state and losses, or files."""
    if kind == "prepare":
        return {path.name: path.read_bytes() for path in Path(out).glob("*")}
    source = checkpoint.find(out, World())
    values = {key: tensor_of(source, key).numpy().tobytes() for key in source.shapes}
    values.pop("model.lm_head.weight", None)  # tied: a full checkpoint names it too
    return dict(values, losses=losses(out))


def main(n, seed):
    done = runs = 0
    with tempfile.TemporaryDirectory() as tmp:
        make_data(os.path.join(tmp, "toy"))
        while done < n:
            done += one_run(tmp, seed + runs)
            runs += 1
            print(f": equal bit for bit ({done} of {n})", flush=True)
    print(f"{done} faults in {runs} runs: each ended as an undisturbed run does")


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("n", type=int, help="faults")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the first run")
    import faults  # ranks import a function from its file

    faults.main(**vars(parser.parse_args()))

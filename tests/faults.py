"""
Random faults on the way of random runs. What comes out must be an undisturbed run's, bit for bit.

    python tests/faults.py 200              # until 200 faults have happened
    python tests/faults.py 1 --seed=17      # the run that had this seed, again

A run is single, ddp or full_shard, with full or sharded checkpoints. One to three faults happen to
it: a signal to a rank or to all; a full disk; damage to a checkpoint. After each it
is started again, with the same command. At last it ends well, and its losses, weights and optimizer
state are compared. No fault but damage may cost a checkpoint that was whole. A seed gives the same
run, faults and moments, as far as the clock allows. Exit code 1 at the first that differs.
"""

import glob
import os
import random
import resource
import shutil
import signal
import tempfile
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from contextlib import suppress
from pathlib import Path

import torch
from harness import Ranks
from training import arguments, launch, losses, make_data, tensor_of, trained

import checkpoint
import train
from ranks import World

RUN = dict(max_iters=24, eval_interval=2, init_from="auto", gradient_accumulation_steps=2,
           n_embd=120)
STRATEGIES = {"single": 1, "ddp": 2, "full_shard": 2}  # and ranks


def newest(out):
    """Step of the newest intact checkpoint, -1 without one."""
    with suppress(SystemExit):
        if source := checkpoint.find(out, World()):
            return source.header["iter_num"]
    return -1


# -----------------------------------------------------------------------------
# faults: each starts the run, lets something happen to it, and says what


def signal_to_ranks(rng, world, out, args):
    """To one rank or to all, at any moment: while it imports, trains, saves or leaves."""
    number = rng.choice([signal.SIGTERM, signal.SIGINT, signal.SIGHUP, *[signal.SIGKILL] * 3])
    all_of_them, seconds, one = rng.random() < 0.5, rng.random() * 4, rng.randrange(world)
    p = Ranks(world, train.main, args)
    time.sleep(seconds)
    hit = range(world) if all_of_them else [one]
    p.send(number, *hit)
    p.finish()
    return f"{number.name} to {'all' if all_of_them else f'rank {one}'} after {seconds:.2f} s"


def full_disk(rng, world, out, args):
    """Any file of so many bytes is too large."""
    limit = rng.choice([200, 5000, 100_000, 1_000_000, 5_000_000])
    Ranks(world, limited, limit, args).finish()
    return f"disk full at {limit:,} bytes"


def limited(limit, argv):
    """train.py on a disk that is full as soon as a file has so many bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    train.main(argv)


def damage(rng, world, out, args):
    """A run is killed, and a file of a checkpoint cut, removed, or changed in a bit or a block."""
    seconds, what = rng.random() * 4, rng.choice(["cut", "flip", "zero", "remove"])
    which, where, bit = rng.random(), rng.random(), rng.randrange(8)
    p = Ranks(world, train.main, args)
    time.sleep(seconds)
    p.kill()
    names = glob.glob("*.pt", root_dir=out)
    names += glob.glob("step-*/*", root_dir=out, include_hidden=True)
    if not names:
        return "SIGKILL before its first checkpoint"
    name = sorted(names)[int(which * len(names))]
    path = Path(out, name)
    data = bytearray(path.read_bytes())
    at = int(where * len(data))
    if what == "cut":
        data = data[:at]
    elif what == "flip" and data:
        data[at] ^= 1 << bit
    elif what == "zero":
        data[at:at + 4096] = bytes(len(data[at:at + 4096]))
    path.write_bytes(data)
    if what == "remove":
        path.unlink()
    return f"{what} {name}"


FAULTS = [signal_to_ranks, damage, full_disk]


# -----------------------------------------------------------------------------
# a run and its comparison


def one_run(tmp, seed):
    """A run with its faults; returns how many, and says what happened to it."""
    rng = random.Random(seed)
    strategy, world = rng.choice([*STRATEGIES.items()])
    kind = rng.choice(["full", "sharded"])
    whole = os.path.join(tmp, f"undisturbed-{strategy}")
    if not os.path.exists(whole):
        launch(world, arguments(tmp, whole, strategy=strategy, **RUN))
    out = os.path.join(tmp, f"run-{seed}", "out")
    os.makedirs(os.path.dirname(out))
    args = arguments(tmp, out, strategy=strategy, checkpoint=kind, **RUN)
    faults = rng.choices(FAULTS, weights=[2, 1, 1], k=rng.choice([1, 2, 3]))
    print(f"seed {seed}: {strategy}, {kind}", end="", flush=True)
    for fault in faults:
        before = newest(out)
        print(f"; {fault(rng, world, out, args)}", end="", flush=True)
        assert fault is damage or newest(out) >= before, f"step {before} is gone: {newest(out)}"
    p = trained(world, args)
    if p.returncode:  # all that was there is damaged: it says which
        assert "move it away, or pass another out_dir" in p.stderr, p.stderr
        assert damage in faults and "Traceback" not in p.stderr, p.stderr
        shutil.rmtree(out)
        launch(world, args)
    assert_same_result(out, whole)
    shutil.rmtree(os.path.dirname(out))
    return len(faults)


def assert_same_result(out, whole):
    ours, theirs = (checkpoint.find(path, World()) for path in (out, whole))
    assert ours.header["iter_num"] == theirs.header["iter_num"] == RUN["max_iters"]
    head = "model.lm_head.weight"  # tied: a full checkpoint names it too
    assert ours.shapes.keys() | {head} == theirs.shapes.keys() | {head}
    for key in ours.shapes:
        assert torch.equal(tensor_of(ours, key), tensor_of(theirs, key)), f"{key} differs"
    assert losses(out) == losses(whole), "losses differ"


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

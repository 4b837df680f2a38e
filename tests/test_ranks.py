"""
ranks.py: what ranks agree on, how they wait, stop and leave. Restarts are in test_faults.py.

    python -m pytest -q tests/test_ranks.py
"""

import os
import signal
import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from harness import Ranks, on_ranks, refused, values
from torch.distributed.distributed_c10d import _set_pg_timeout

import ranks


def case_from_rank0():
    """What an action of rank 0 returns, how often it ran here, and what its SystemExit says."""
    world, calls = ranks.setup("cpu", "auto"), []
    value = ranks.from_rank0(world, lambda: calls.append(1) or {"n": 3})
    return value, len(calls), refused(ranks.from_rank0, world, lambda: sys.exit("no disk"))


def case_signal_to_one_rank():
    world = ranks.setup("cpu", "auto")
    stop, requested = ranks.StopSignal(world), []
    for step in range(2):
        if step == 1 and world.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        requested.append(stop.requested())
    return requested


def test_ranks_learn_what_rank_0_did_and_that_one_of_them_got_a_signal():
    results = on_ranks(2, {"rank0": (case_from_rank0, {}), "stop": (case_signal_to_one_rank, {})})
    assert values(results, "rank0") == [[{"n": 3}, 1, "no disk"], [{"n": 3}, 0, "no disk"]]
    assert values(results, "stop") == [[False, True], [False, True]]


def slow_rank0(seconds, patiently):
    """Rank 0 is busy for longer than a collective of the training loop may take."""
    world = ranks.setup("cpu", "gloo")
    _set_pg_timeout(timedelta(seconds=2))  # the ordinary group's, now that all are connected
    if patiently:
        ranks.from_rank0(world, lambda: time.sleep(seconds))
    if world.rank == 0:
        time.sleep(seconds)
    ranks.all_reduce_mean_(torch.ones(1), world, patient=patiently)
    print(f"rank {world.rank} is still here")


def test_ranks_wait_for_rank_0_longer_than_for_each_other():
    patient, others = (Ranks(2, slow_rank0, 3, patiently) for patiently in (True, False))
    p = patient.finish()
    assert p.returncode == 0 and p.stdout.count("still here") == 2, p.stderr
    p = others.finish()  # in training a rank that is gone is noticed
    assert p.returncode == 1 and "Timed out" in p.stderr


def opens_group():
    def look(*args, store, **kwargs):
        assert not store.check(["address"]), "it would call a dead rank"
        store.set("address", os.environ["RANK"])

    dist.init_process_group = look  # gloo leaves such keys, and waits for them
    ranks.open_group(0, 1, torch.device("cpu"), "auto")


def test_ranks_that_restart_do_not_call_a_dead_peer():
    first = Ranks(1, opens_group, alone=False)
    assert first.finish().returncode == 0
    p = Ranks(1, opens_group, alone=False, restarts=first).finish()
    assert p.returncode == 0, p.stderr


def raises(error):
    if "RANK" in os.environ:
        ranks.setup("cpu", "auto")
    raise error


LARGE = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 1 GB\nand more")


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("error, code, line", [
    (SystemExit("a line"), 1, "a line"), (SystemExit(3), 3, ""), (SystemExit(), 0, ""),
    (LARGE, 1, "can't allocate memory: 1 GB; lower batch_size"), (MemoryError(), 1, "batch_size")])
def test_ranks_leave_with_one_line(world, error, code, line):
    p = Ranks(world, raises, error).finish()
    assert p.returncode == code and line in p.stderr, p.stderr
    assert p.stderr.count("\n") == bool(line), p.stderr


def test_ranks_leave_with_a_traceback_after_a_bug_and_silently_after_ctrl_c():
    p = Ranks(1, raises, ValueError("a bug")).finish()
    assert p.returncode == 1 and "in raises\n" in p.stderr and "ValueError: a bug\n" in p.stderr
    p = Ranks(1, signal.raise_signal, signal.SIGINT).finish()  # where nobody handles it
    assert (p.returncode, p.stderr) == (signal.SIGINT, "")

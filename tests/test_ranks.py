"""
ranks.py: waits for one rank's disk or network outlast the timeout of training's collectives.

    python -m pytest -q tests/test_ranks.py

Signals, restarts and leaving are in test_faults.py.
"""

import time
from datetime import timedelta

import torch
import torch.distributed as dist
from harness import Ranks
from torch.distributed.distributed_c10d import _set_pg_timeout

import ranks


def slow_rank0(seconds, patiently):
    """Rank 0 is busy for longer than a collective of the training loop may take."""
    world = ranks.setup("cpu", "gloo")
    _set_pg_timeout(timedelta(seconds=2))  # the ordinary group's, now that all are connected
    if patiently:
        ranks.from_rank0(world, lambda: time.sleep(seconds))
    elif world.rank == 0:
        time.sleep(seconds)
    dist.all_reduce(torch.ones(1))
    print(f"rank {world.rank} is still here")


def test_ranks_wait_for_rank_0_longer_than_for_each_other():
    p = Ranks(2, slow_rank0, 4, True).finish()
    assert p.returncode == 0 and p.stdout.count("still here") == 2, p.stderr
    p = Ranks(2, slow_rank0, 4, False).finish()  # a rank that is gone is noticed as before
    assert p.returncode == 1 and "Timed out" in p.stderr

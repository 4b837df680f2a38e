"""
ranks.py: waits for one rank's disk or network outlast the timeout of training's collectives.

    python -m pytest -q tests/test_ranks.py

Signals, restarts and leaving are in test_faults.py.
"""

import os
import socket
import time
from datetime import timedelta
from unittest.mock import patch

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


def orphaned_early():
    """torchrun was killed while this rank imported: nothing listens where its store was."""
    rendezvous = dist.rendezvous
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ["MASTER_PORT"] = str(free.getsockname()[1])
    with patch.object(dist, "rendezvous",
                      lambda url, timeout: rendezvous(url, timeout=timedelta(seconds=1))):
        ranks.setup("cpu", "gloo")


def test_ranks_whose_torchrun_is_gone_say_so_in_one_line():
    p = Ranks(1, orphaned_early, alone=False).finish()
    assert p.returncode == 1
    line = [line for line in p.stderr.splitlines() if "does not answer" in line]
    assert line == ["torchrun at 127.0.0.1 does not answer; start it again"], p.stderr
    assert "Traceback" not in p.stderr

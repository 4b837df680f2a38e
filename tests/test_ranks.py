"""
ranks.py: waits for one rank's disk or network outlast the timeout of training's collectives.

    python -m pytest -q tests/test_ranks.py

Signals, restarts and leaving are in test_faults.py.
"""

import os
import signal
import socket
import time
import traceback
from datetime import timedelta

import pytest
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
    patient, others = Ranks(2, slow_rank0, 4, True), Ranks(2, slow_rank0, 4, False)
    p = patient.finish()
    assert p.returncode == 0 and p.stdout.count("still here") == 2, p.stderr
    p = others.finish()  # a rank that is gone is noticed as before
    assert p.returncode == 1 and "Timed out" in p.stderr


def orphaned_early():
    """torchrun was killed while this rank imported: nothing listens where its store was."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ["MASTER_PORT"] = str(free.getsockname()[1])
    ranks.setup("cpu", "gloo")


def test_ranks_whose_torchrun_is_gone_say_so_in_one_line():
    p = Ranks(1, orphaned_early, alone=False).finish(30)
    line = "torchrun at 127.0.0.1 does not answer; start it again\n"
    assert (p.returncode, p.stderr) == (1, line)


def loses_its_peer(ended, error):
    ranks.StopSignal(ranks.setup("cpu", "gloo"))
    format_exc = traceback.format_exc

    def late():
        if ended:
            os.kill(os.getpid(), signal.SIGTERM)  # torchrun's, after the error and before the wait
        return format_exc()

    traceback.format_exc = late
    time.sleep = lambda seconds: None
    raise RuntimeError(error)


@pytest.mark.parametrize("ended, error, said", [
    (True, "Connection closed by peer", ""),
    (False, "connectFullMesh failed: Connection refused\nand more",
     "another rank ended, or the network failed: connectFullMesh failed: Connection refused\n")])
def test_ranks_that_lose_a_peer_say_one_line_unless_torchrun_ends_them(ended, error, said):
    """On another node torchrun may know of no failure yet."""
    p = Ranks(1, loses_its_peer, ended, error, alone=False).finish()
    assert (p.returncode, p.stderr) == (1, said)


def interrupted():
    raise KeyboardInterrupt


def test_ranks_ctrl_c_without_a_handler_is_exit_code_130():
    """sample.py, plan.py and the others; their clean-up runs."""
    p = Ranks(1, interrupted).finish()
    assert (p.returncode, p.stderr) == (130, "")

"""
ranks.py: what ranks agree on, how they stop and leave. Restarts are in test_faults.py.

    python -m pytest -q tests/test_ranks.py
"""

import os
import re
import signal
import sys
from unittest.mock import MagicMock, call, patch

import pytest
import torch
import torch.distributed as dist
from harness import on_ranks, refused, values

import ranks


def case_from_rank0():
    """What an action of rank 0 returns, how often it ran here, and what its SystemExits say."""
    world, calls = ranks.setup("cpu", "auto"), []
    value = ranks.from_rank0(world, lambda: calls.append(1) or {"n": 3})
    with pytest.raises(SystemExit) as e:
        ranks.from_rank0(world, lambda: sys.exit(3))
    said = refused(ranks.from_rank0, world, lambda: sys.exit("no disk"))
    return value, len(calls), said, e.value.code


def case_other_values():
    world = ranks.setup("cpu", "auto")
    ranks.require_same(dict(a=1, b="x"), world)
    return [refused(ranks.require_same, values, world) for values in (
        dict(a=1, b="xy"[world.rank], c=world.rank), [dict(a=1), dict(a=1, own=2)][world.rank])]


def case_signal_to_one_rank():
    """The answers before each of four steps; rank 1 gets a signal during the second, and the same
    again, as torchrun passes Ctrl-C on."""
    world = ranks.setup("cpu", "auto")
    stop, requested = ranks.StopSignal(world), []
    for step in range(4):
        requested.append(stop.requested())
        if step == 1:
            for number in (signal.SIGINT, signal.SIGINT) * world.rank:
                os.kill(os.getpid(), number)
    return requested


def test_ranks_learn_what_rank_0_did_and_that_one_of_them_got_a_signal():
    cases = dict(rank0=case_from_rank0, stop=case_signal_to_one_rank, other=case_other_values)
    results = on_ranks(2, {name: (case, {}) for name, case in cases.items()})
    assert values(results, "rank0") == [[{"n": 3}, n, "no disk", 3] for n in (1, 0)]
    assert values(results, "stop") == [[False, False, True, True]] * 2
    assert [[line.partition(";")[0] for line in said] for said in values(results, "other")] == [[
        "ranks differ: b is 'x' on rank 0, and 'y' on rank 1",
        "ranks differ: own is None on rank 0, and 2 on rank 1"]] * 2


@pytest.mark.parametrize("size, local_size, gpus, mps, device", [
    (2, 2, 1, False, "cpu"), (2, 2, 2, False, "cuda"), (1, 1, 1, False, "cuda"),
    (2, 2, 0, False, "cpu"), (4, 2, 1, False, "cpu"),
    (0, 1, 0, True, "mps"), (2, 2, 0, True, "cpu")])  # 0: without torchrun
def test_ranks_of_one_node_share_a_cpu_where_gpus_are_too_few(
        monkeypatch, capsys, size, local_size, gpus, mps, device):
    """With device=auto: README's two processes on a machine with one GPU. All ranks alike."""
    monkeypatch.setattr(ranks, "open_group", lambda *args: None)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    with_gpus(monkeypatch, gpus)
    seen = set()
    for rank in range(local_size):
        env = dict(RANK=rank, WORLD_SIZE=size, LOCAL_RANK=rank, LOCAL_WORLD_SIZE=local_size)
        for key, value in env.items():
            if size:
                monkeypatch.setenv(key, str(value))
        seen.add(ranks.setup("auto", "auto").device.type)
    assert seen == {device}
    line = "device=auto: fewer GPUs (1) than processes here (2): all take the CPU\n"
    assert capsys.readouterr().out == (line if gpus and device == "cpu" else "")


def with_gpus(monkeypatch, n):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: n)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: n > 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)


def test_ranks_that_name_a_gpu_have_one_each_or_are_refused(monkeypatch):
    with_gpus(monkeypatch, 0)
    assert "--device=cpu" in refused(ranks.setup, "cuda", "auto")
    with_gpus(monkeypatch, 2)
    assert [ranks.pick_device("cuda:1", rank, 2).index for rank in (0, 1)] == [0, 1]
    assert ranks.pick_device("cuda:1").index == 1  # alone


# ---------- the log, and leaving --------------------------------------------------


@pytest.mark.parametrize("main, args, code, said", [
    (sys.exit, [], 0, "^$"), (sys.exit, [0], 0, "^$"),  # as --help
    (sys.exit, ["a line"], 1, "^a line\n$"),
    (int, ["a bug"], 1, r"Traceback(.|\n)*ValueError: .*'a bug'\n$")])
def test_ranks_leave_with_a_code_and_a_line(monkeypatch, capsys, main, args, code, said):
    """The first rank of each node: torchrun shows what its own node has printed. W&B's log is
    finished before torchrun may end this rank."""
    monkeypatch.setenv("RANK", "8")
    monkeypatch.setenv("LOCAL_RANK", "0")
    calls = MagicMock()
    monkeypatch.setitem(sys.modules, "wandb", calls)
    monkeypatch.setattr(ranks, "let_others_speak", calls.let_others_speak)
    with patch.object(os, "_exit") as leave:
        ranks.run(main, *args)
    leave.assert_called_with(code)
    assert calls.mock_calls[0] == call.finish(exit_code=code)
    printed = capsys.readouterr()
    assert printed.out == "" and re.search(said, printed.err)


@pytest.mark.parametrize("line, done", [("", ["waits", 0]), ("a line", [1])])
def test_ranks_leave_together_after_a_run_that_ended_well(monkeypatch, line, done):
    """Peers may still use the connections of a rank."""
    seen = []
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "all_reduce", lambda t: seen.append("waits"))
    monkeypatch.setattr(os, "_exit", seen.append)
    ranks.run(lambda: sys.exit(line) if line else None)
    assert seen == done

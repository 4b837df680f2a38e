"""
Faults: signals, dead ranks and nodes, full disks, two runs in one place. What must hold: no hang,
no checkpoint lost, and after a restart the numbers of an undisturbed run.

    python -m pytest -q tests/test_faults.py
    python tests/faults.py 200             # random ones

What a user may do wrong is in test_mistakes.py.
"""

import glob
import os
import re
import shutil
import signal
import socket
import sys
import time

import faults
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import (
    HERE,
    Ranks,
    arguments,
    children,
    command,
    finish,
    launch,
    losses,
    python,
    read_ckpt,
    start,
    trained,
    wait_for,
)

import checkpoint
import ranks
import saves
import train
from ranks import StopSignal

ENDLESS = dict(max_iters=10**5, eval_interval=10**5, gradient_accumulation_steps=2)


def contents(path):
    with open(path, "rb") as f:
        return f.read()


def endless(tmp, world, out, **overrides):
    """Ranks that train until they get a signal, and have begun."""
    p = Ranks(world, train.main, arguments(tmp, out, **{**ENDLESS, **overrides}))
    wait_for(os.path.join(out, "metrics.jsonl"), '"iter": 5,')
    return p


def kill(*pids):
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


# -----------------------------------------------------------------------------
# a save that takes long


def slow_saver(argv):
    """train.py, whose save takes longer than the 30 s that torchrun gives its ranks by itself."""
    whole = checkpoint.write_ckpt_pt

    def write(*args):
        time.sleep(33)
        whole(*args)

    checkpoint.write_ckpt_pt = write
    train.main(argv)


SCRIPT = """
import sys
sys.path[:0] = [{here!r}, {here!r} + "/tests"]
import test_faults, ranks
ranks.run(test_faults.{function}, sys.argv[1:])
"""


def script_of(function, tmp):
    """A file that runs this function of this file on its arguments, for torchrun."""
    path = os.path.join(tmp, function.__name__ + ".py")
    with open(path, "w") as f:
        f.write(SCRIPT.format(here=HERE, function=function.__name__))
    return path


@pytest.mark.slow
def test_fault_a_save_longer_than_torchruns_patience(tmp):
    """
    SIGTERM to torchrun reaches its ranks, and as docs/clusters.md's variable asks, it waits for
    them; it ends with 1, whatever its ranks end with.
    """
    out = os.path.join(tmp, "slow-save")
    p = start(2, [script_of(slow_saver, tmp), *arguments(tmp, out, **ENDLESS)], tmp,
              TORCH_ELASTIC_SHUTDOWN_TIMEOUT="120")
    wait_for(os.path.join(out, "metrics.jsonl"), '"iter": 5,', p)
    p.terminate()
    text = finish(p, 150)
    assert "stopped by a signal" in text and 'ranks.py", line' not in text, text
    assert p.returncode == 1 and "SignalException" in text, text
    assert read_ckpt(out)["iter_num"] == len(losses(out)), text


# -----------------------------------------------------------------------------
# signals and NaN


@pytest.mark.parametrize("world, number", [(1, signal.SIGINT), (2, signal.SIGTERM)])
def test_fault_a_signal_saves_beside_the_best_checkpoint_and_leaves(tmp, world, number):
    out = os.path.join(tmp, f"signal-{world}")
    run = dict(gradient_accumulation_steps=2, always_save_checkpoint=False)
    launch(world, arguments(tmp, out, max_iters=2, **run))
    best = contents(os.path.join(out, "ckpt.pt"))
    p = endless(tmp, world, out, init_from="resume", **run)
    for rank in p.ranks:  # as a scheduler does
        os.kill(rank.pid, number)
    p = p.finish()
    assert p.returncode == 0, p.stderr
    assert "stopped by a signal" in p.stdout and "--init_from=auto" in p.stdout
    assert contents(os.path.join(out, "ckpt.pt")) == best
    done = len(losses(out))
    assert read_ckpt(out, "last.pt")["iter_num"] == done > 2
    p = launch(world, arguments(tmp, out, max_iters=done + 2, init_from="auto", **run))
    assert f"at step {done}" in p.stdout and len(losses(out)) == done + 2


TWO_SIGNALS = """
import os, ranks, signal
stop = ranks.StopSignal(ranks.World())
os.kill(os.getpid(), signal.SIGTERM)
assert stop.requested()
print("the first is noted")
os.kill(os.getpid(), signal.SIGTERM)
print("alive")
"""


def test_fault_a_second_signal_stops_at_once():
    p = python("-u", "-c", TWO_SIGNALS)
    assert (p.returncode, p.stdout) == (-signal.SIGTERM, "the first is noted\n"), p.stderr


def test_fault_nan_stops_all_ranks_and_keeps_the_checkpoint(tmp):
    out = os.path.join(tmp, "nan")
    launch(2, arguments(tmp, out, max_iters=2))
    before = contents(os.path.join(out, "ckpt.pt"))
    run = dict(max_iters=50, init_from="resume", learning_rate=1e18, min_lr=1e18, grad_clip=0.0)
    p = trained(2, arguments(tmp, out, **run))
    assert p.returncode == 1
    # the training loss, before an evaluation could see it
    line = r"^loss is (?:nan|inf).* at step [34]\b.*learning_rate"
    assert len(re.findall(line, p.stderr, re.M)) == 1, p.stderr
    assert contents(os.path.join(out, "ckpt.pt")) == before


# -----------------------------------------------------------------------------
# what dies, and comes back


@pytest.mark.slow
def test_fault_random_ones(capsys):
    """A short run of the script."""
    faults.main(4, seed=141)
    assert capsys.readouterr().out.count("equal bit for bit") >= 2


ENDS = {
    "bug": "ValueError: a bug",
    "mistake": "SystemExit: a line",
    "memory": "MemoryError",
    "killed": "Signal 9 (SIGKILL) received by PID",
}


def rank_1_ends(argv):
    """In the given way, while rank 0 waits for it."""
    world = ranks.setup("cpu", "auto")
    StopSignal(world)  # so torchrun's SIGTERM does not end rank 0
    if world.rank == 1:
        if argv == ["killed"]:
            kill(os.getpid())
        try:
            raise MemoryError if argv == ["memory"] else ValueError("a bug")
        except ValueError:
            if argv == ["mistake"]:
                sys.exit("a line")
            raise
    dist.all_reduce(torch.ones(1))


@pytest.mark.slow
def test_fault_torchruns_report_has_the_error_of_the_rank_that_failed_first(tmp):
    """Not rank 0's, whose connection breaks right after."""
    script = script_of(rank_1_ends, tmp)
    runs = {way: start(2, [script, way], tmp) for way in ENDS}
    for way, p in runs.items():
        text = finish(p, 120)
        others, first = text[text.index("Failures:"):].split("Root Cause (first observed failure)")
        assert "rank      : 1 " in first and ENDS[way] in first, text
        assert "rank      : 0 " in others and "RuntimeError: " in others, text
        assert ("error_file: <N/A>" in first) == (way == "killed"), text
        assert p.returncode == 1 and ('rank_1_ends' in first) == (way == "bug"), text


@pytest.mark.parametrize("device", [
    "cpu", pytest.param("cuda", marks=pytest.mark.slow)])
def test_fault_a_dead_rank_is_restarted_and_the_result_is_exact(tmp, device):
    out, whole = (os.path.join(tmp, f"dead-{part}-{device}") for part in ("half", "whole"))
    run = dict(max_iters=60, eval_interval=20, init_from="auto", gradient_accumulation_steps=2,
               device=device)
    # 3 restarts, not 1: once, on CI, PyTorch's C++ aborted a restarted rank too (exit code -6)
    p = start(2, command(tmp, out, **run), tmp, "--max-restarts=3")
    wait_for(os.path.join(out, "metrics.jsonl"), '"iter": 25,', p)
    kill(children(p.pid)[-1])
    launch(2, arguments(tmp, whole, **run))
    text = finish(p, 120)
    assert p.returncode == 0 and "starting from" in text, text[-6000:]  # where the error is
    assert losses(out) == losses(whole)


@pytest.mark.slow
def test_fault_a_dead_node_comes_back(tmp):
    """
    Two nodes (two torchrun agents) under hybrid_shard; one is killed with its ranks and started
    again: the losses of an undisturbed run.
    """
    out, whole = os.path.join(tmp, "node"), os.path.join(tmp, "node-whole")
    run = dict(strategy="hybrid_shard", max_iters=36, eval_interval=12, init_from="auto",
               gradient_accumulation_steps=4)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]  # free now, and asked for again at once

    def agent(host):
        options = ["--nnodes=2", "--max-restarts=3", "--rdzv_backend=c10d", "--rdzv_id=x",
                   f"--rdzv_endpoint=127.0.0.1:{port}", "--local_addr=127.0.0.1",
                   f"--rdzv_conf=is_host={host},keep_alive_interval=1"]
        share = dict(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")  # docs/clusters.md says why
        return start(2, command(tmp, out, **run), tmp, *options, **share)

    # on several nodes this group is the default
    launch(4, arguments(tmp, whole, shard_group_size=2, **run))
    first, second = agents = [agent(1), agent(0)]
    try:
        wait_for(os.path.join(out, "metrics.jsonl"), '"iter": 15,')
        kill(*children(second.pid), second.pid)  # the machine goes dark
        agents.append(agent(0))
        text = finish(first, 120) + finish(agents[2], 60)
    finally:
        for p in agents:
            if p.poll() is None:
                kill(*children(p.pid), p.pid)
    assert first.returncode == agents[2].returncode == 0, text
    assert "starting from" in text, text
    assert losses(out) == losses(whole)


def dies_while_saving(argv):
    def write_data(*args):
        kill(os.getpid())

    if os.environ["RANK"] == "1":
        dcp.FileSystemWriter.write_data = write_data
    train.main(argv)


def test_fault_a_rank_that_dies_in_a_sharded_save_is_no_full_disk(tmp):
    out = os.path.join(tmp, "dies-while-saving")
    run = dict(checkpoint="sharded", gradient_accumulation_steps=2, keep_checkpoints=1)
    launch(2, arguments(tmp, out, max_iters=1, **run))
    p = Ranks(2, dies_while_saving, arguments(tmp, out, max_iters=2, init_from="auto", **run))
    p = p.finish()
    assert p.returncode and "cannot write" not in p.stderr, p.stderr
    assert faults.newest(out) == 1


# -----------------------------------------------------------------------------
# disks


@pytest.mark.parametrize("world, kind, ranks, room", [
    (1, "full", [0], 15_000), (2, "full", [0], 30_000),
    (2, "sharded", [1], 15_000), (2, "sharded", [0, 1], 30_000)])
def test_fault_no_space_keeps_the_old_checkpoint(tmp, tmp_path, world, kind, ranks, room):
    """One line says so, whichever rank's disk is full; another, that the run ends without it. With
    room for 15,000 bytes PyTorch only says "unexpected pos" in the end."""
    out = str(tmp_path / "out")
    run = dict(checkpoint=kind, gradient_accumulation_steps=2, keep_checkpoints=1, n_embd=120)
    launch(world, arguments(tmp, out, max_iters=2, **run))
    args = arguments(tmp, out, max_iters=4, init_from="resume", **run)
    p = Ranks(world, faults.limited, ranks, room, train.main, args).finish()
    assert p.returncode == 1
    assert p.stderr.startswith(f"cannot write {out}/") and p.stderr.count("\n") == 2, p.stderr
    assert "File too large" in p.stderr and "has room" in p.stderr  # what the system has said
    assert f"\nthe last save in {out} failed" in p.stderr and "--init_from=auto" in p.stderr
    assert faults.newest(out) == 2 and not glob.glob(f"{out}/*.tmp")
    launch(world, args)  # with room it goes on
    assert faults.newest(out) == 4


def fails_once(argv):
    """train.py, where rank 1 cannot write its first save."""
    write = dcp.FileSystemWriter.write_data

    def fails(*args):
        dcp.FileSystemWriter.write_data = write
        raise OSError("no room")

    if os.environ["RANK"] == "1":
        dcp.FileSystemWriter.write_data = fails
    train.main(argv)


def test_fault_a_failed_save_is_said_and_the_run_goes_on(tmp):
    """Ranks keep the plans of their first save, and use them in the next."""
    out = os.path.join(tmp, "fails-once")
    run = dict(checkpoint="sharded", gradient_accumulation_steps=2, eval_interval=2, max_iters=4)
    p = Ranks(2, fails_once, arguments(tmp, out, **run)).finish()
    assert p.returncode == 0 and p.stderr.count("\n") == 1, p.stderr
    assert p.stderr.startswith(f"cannot write {out}/step-000000002: no room; ")
    assert faults.newest(out) == 4


def test_fault_no_space_for_a_checkpoint_made_full(tmp, tmp_path):
    out = str(tmp_path / "out")
    launch(1, arguments(tmp, out, max_iters=2, checkpoint="sharded"))
    p = Ranks(1, faults.limited, [0], 20_000, saves.main, ["full", out]).finish()
    assert p.returncode == 1
    assert p.stderr.startswith(f"cannot write {out}/ckpt.pt") and p.stderr.count("\n") == 1
    assert faults.newest(out) == 2 and not glob.glob(f"{out}/*.tmp")


# -----------------------------------------------------------------------------
# whose directory it is


@pytest.mark.slow
def test_fault_orphans_of_torchrun_have_the_directory_until_they_end(tmp):
    """They train on. A stop signal to them saves, and the next run goes on from there."""
    out = os.path.join(tmp, "orphans")
    first = start(2, command(tmp, out, **ENDLESS), tmp)
    try:
        wait_for(os.path.join(out, "metrics.jsonl"), '"iter": 5,')
        orphans = children(first.pid)
        kill(first.pid)
        p = trained(1, arguments(tmp, out, **ENDLESS, init_from="auto"))
        assert p.returncode == 1 and p.stderr.count("\n") == 1, p.stderr
        assert any(f"process {pid} on" in p.stderr for pid in orphans), p.stderr
    finally:
        os.kill(orphans[0], signal.SIGTERM)
        text = finish(first)  # ends when they do, who have its output
    assert "stopped by a signal" in text, text
    done = len(losses(out))
    p = launch(2, arguments(tmp, out, **{**ENDLESS, "max_iters": done + 1}, init_from="auto"))
    assert f"at step {done}" in p.stdout


def train_apart(out, argv):
    """train.py; each rank's relative out_dir is another directory."""
    here = os.path.join(out, "node-" + os.environ["RANK"])
    os.makedirs(here, exist_ok=True)
    os.chdir(here)
    train.main(argv)


@pytest.mark.slow
def test_fault_directory_that_nodes_do_not_share(tmp, tmp_path):
    run = dict(checkpoint="sharded", eval_interval=1, gradient_accumulation_steps=2)
    endless = arguments(tmp, "out", max_iters=10**5, **run)
    p = Ranks(2, train_apart, str(tmp_path / "sharded"), endless).finish()
    # rank 1 may print that it has lost its peer
    [line] = [line for line in p.stderr.splitlines() if line.startswith("out_dir=out ")]
    assert p.returncode == 1 and "__1_0.distcp" in line and "--checkpoint=full" in line
    for node in ("node-0", "node-1"):
        assert os.path.exists(tmp_path / "sharded" / node / "out")
    assert not glob.glob(f"{tmp_path}/sharded/*/out/*/header.json")
    # full ones need no shared disk until a run resumes
    run.update(checkpoint="full", max_iters=1)
    p = Ranks(2, train_apart, str(tmp_path / "full"), arguments(tmp, "out", **run)).finish()
    assert p.returncode == 0, p.stderr
    ckpt = tmp_path / "full/node-0/out/ckpt.pt"
    assert read_ckpt(ckpt.parent)["iter_num"] == 1
    # and then as the line says: a copy on each node
    shutil.copytree(ckpt.parent, tmp_path / "again/node-0/out")
    shutil.copytree(ckpt.parent, tmp_path / "again/node-1/out")
    run.update(max_iters=2, init_from="resume")
    p = Ranks(2, train_apart, str(tmp_path / "again"), arguments(tmp, "out", **run)).finish()
    assert p.returncode == 0 and "at step 1" in p.stdout, p.stderr

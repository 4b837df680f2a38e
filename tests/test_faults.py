"""
Faults: signals, dead ranks and nodes, full disks. What must hold: no hang, no checkpoint lost, and
after a restart the numbers of an undisturbed run.

    python -m pytest -q tests/test_faults.py
    python tests/faults.py 200             # random ones
"""

import glob
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import faults
import pytest
import torch.distributed.checkpoint as dcp
from harness import HERE, Ranks, children
from training import arguments, launch, losses

import train
from ranks import StopSignal, World


def wait_for(path, text, seconds=60):
    """Until a file has the text."""
    end = time.time() + seconds
    while time.time() < end:
        if os.path.exists(path) and text in open(path, errors="replace").read():
            return
        time.sleep(0.05)
    pytest.fail(f"{text!r} never came in {path}")


def kill(*pids):
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


# -----------------------------------------------------------------------------
# signals and NaN


@pytest.mark.parametrize("world, number, always", [
    (1, signal.SIGINT, False), (2, signal.SIGTERM, True)])
def test_fault_a_signal_saves_and_leaves(tmp, world, number, always):
    """Where only the best one is kept, that stays."""
    out = Path(tmp, f"signal-{world}")
    run = dict(gradient_accumulation_steps=2, always_save_checkpoint=always)
    launch(world, arguments(tmp, out, max_iters=2, **run))
    best = (out / "ckpt.pt").read_bytes()
    run.update(init_from="auto")
    p = Ranks(world, train.main, arguments(tmp, out, max_iters=10**5, eval_interval=10**5, **run))
    wait_for(out / "metrics.jsonl", '"iter": 5,')
    p.send(number)  # to all, as a scheduler does
    p = p.finish()
    assert p.returncode == 0 and "stopped by a signal" in p.stdout, p.stderr
    done = len(losses(out))
    assert done > 2
    if not always:
        assert (out / "ckpt.pt").read_bytes() == best
        done = 2
    p = launch(world, arguments(tmp, out, max_iters=done + 2, **run))
    assert f"at step {done}" in p.stdout and len(losses(out)) == done + 2


def two_signals():
    stop = StopSignal(World())
    os.kill(os.getpid(), signal.SIGTERM)
    print(stop.requested(), flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    print("alive", flush=True)


def test_fault_a_second_signal_stops_at_once():
    p = Ranks(1, two_signals).finish()
    assert (p.returncode, p.stdout) == (signal.SIGTERM, "True\n"), p.stderr


def test_fault_nan_stops_all_ranks_and_keeps_the_checkpoint(tmp):
    out = Path(tmp, "nan")
    launch(2, arguments(tmp, out, max_iters=2))
    before = (out / "ckpt.pt").read_bytes()
    run = dict(max_iters=50, init_from="resume", learning_rate=1e18, min_lr=1e18, grad_clip=0.0)
    p = Ranks(2, train.main, arguments(tmp, out, **run)).finish()
    assert p.returncode == 1
    # the training loss, before an evaluation could see it
    line = r"^loss is (?:nan|inf).* at step [34]\b.*learning_rate"
    assert len(re.findall(line, p.stderr, re.M)) == 1, p.stderr
    assert (out / "ckpt.pt").read_bytes() == before


# -----------------------------------------------------------------------------
# what dies, and comes back


@pytest.mark.slow
def test_fault_random_ones(capsys):
    """A short run of the script."""
    faults.main(3, seed=218)
    assert capsys.readouterr().out.count("equal bit for bit") >= 2


@pytest.mark.parametrize("device", [
    "cpu", pytest.param("cuda", marks=pytest.mark.slow)])
def test_fault_a_dead_rank_is_restarted_and_the_result_is_exact(tmp, device):
    out, whole = (os.path.join(tmp, f"dead-{part}-{device}") for part in ("half", "whole"))
    run = dict(max_iters=60, eval_interval=20, init_from="auto", gradient_accumulation_steps=2,
               device=device)
    args = arguments(tmp, out, **run)
    dead = Ranks(2, train.main, args)
    wait_for(os.path.join(out, "metrics.jsonl"), '"iter": 25,')
    dead.send(signal.SIGKILL, 1)
    assert dead.finish().returncode
    p = Ranks(2, train.main, args, restarts=dead).finish()
    assert p.returncode == 0 and "starting from" in p.stdout, p.stderr
    launch(2, arguments(tmp, whole, **run))
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
        launcher = [
            sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--nnodes=2",
            "--max-restarts=3", "--rdzv_backend=c10d", "--rdzv_id=x", "--local_addr=127.0.0.1",
            f"--rdzv_endpoint=127.0.0.1:{port}",
            f"--rdzv_conf=is_host={host},keep_alive_interval=1"]
        command = [*launcher, os.path.join(HERE, "train.py"), *arguments(tmp, out, **run)]
        # docs/clusters.md says why
        env = {**os.environ, "PYTHONPATH": HERE, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        return subprocess.Popen(command, cwd=tmp, env=env, text=True, start_new_session=True,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    # on several nodes this group is the default
    launch(4, arguments(tmp, whole, shard_group_size=2, **run))
    first, second = agents = [agent(1), agent(0)]
    try:
        wait_for(os.path.join(out, "metrics.jsonl"), '"iter": 15,')
        kill(*children(second.pid), second.pid)  # the machine goes dark
        agents.append(agent(0))
        text = first.communicate(timeout=120)[0] + agents[2].communicate(timeout=60)[0]
    finally:
        for p in agents:
            if p.poll() is None:
                kill(*children(p.pid), p.pid)
    assert first.returncode == agents[2].returncode == 0, text
    assert "starting from" in text, text
    assert losses(out) == losses(whole)


# -----------------------------------------------------------------------------
# disks


def test_fault_no_space_keeps_the_old_checkpoint(tmp, tmp_path):
    """A line says so, and another, that the run ends without it. With room for 15,000 bytes PyTorch
    only says "unexpected pos" in the end."""
    out = str(tmp_path / "out")
    run = dict(n_embd=120, gradient_accumulation_steps=2)
    launch(1, arguments(tmp, out, max_iters=2, **run))
    args = arguments(tmp, out, max_iters=4, init_from="resume", **run)
    p = Ranks(1, faults.limited, 15_000, train.main, args).finish()
    assert p.returncode == 1
    assert p.stderr.startswith(f"cannot write {out}/") and p.stderr.count("\n") == 2, p.stderr
    assert "File too large" in p.stderr and "--init_from=auto" in p.stderr
    assert faults.newest(out) == 2 and not glob.glob(f"{out}/*.tmp")
    launch(1, args)  # with room it goes on
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

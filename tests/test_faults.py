"""
Faults: signals, dead ranks and nodes, a full disk, bad input. What must hold: one clear line, no
hang, no checkpoint lost, and after a restart the numbers of an undisturbed run.

    python -m pytest -q tests/test_faults.py
    python tests/test_faults.py kill 50         # 50 runs killed at random moments (6 minutes)
    python tests/test_faults.py launches 200    # 200 two-rank launches, all must exit with 0 (20)
"""

import os
import random
import re
import signal
import socket
import sys
import tempfile
import time

import pytest
import torch
from harness import (
    HERE,
    Ranks,
    arguments,
    children,
    command,
    finish,
    launch,
    losses,
    make_data,
    on_ranks,
    python,
    read_ckpt,
    shell,
    start,
    torchrun,
    trained,
    values,
    wait_for,
)

import train
from ranks import StopSignal, setup


def contents(path):
    with open(path, "rb") as f:
        return f.read()


# -----------------------------------------------------------------------------
# signals


@pytest.mark.parametrize("world, number", [(1, signal.SIGINT), (2, signal.SIGTERM)])
def test_fault_a_signal_saves_and_leaves(tmp, world, number):
    out = os.path.join(tmp, f"signal-{world}")
    endless = dict(max_iters=100000, eval_interval=100000, always_save_checkpoint=False)
    p = start(world, command(tmp, out, **endless), tmp)
    wait_for(os.path.join(out, "metrics.jsonl"), '"iter": 5,')
    if world == 1:
        p.send_signal(number)
    else:  # as a scheduler does: every process of the job
        for pid in children(p.pid):
            os.kill(pid, number)
    text = finish(p)
    assert p.returncode == 0, text
    assert "stopped by a signal" in text and "--init_from=resume" in text, text
    assert os.path.exists(os.path.join(out, "last.pt"))
    assert not os.path.exists(os.path.join(out, "ckpt.pt"))  # that is the best one's name
    done = len(losses(out))
    p = launch(world, arguments(tmp, out, max_iters=done + 2, init_from="resume"))
    assert f"at step {done}" in p.stdout
    assert len(losses(out)) == done + 2


def test_fault_a_signal_does_not_overwrite_the_best_checkpoint(tmp):
    out = os.path.join(tmp, "signal-best")
    run = dict(always_save_checkpoint=False)
    launch(1, arguments(tmp, out, max_iters=2, eval_interval=2, **run))
    best = contents(os.path.join(out, "ckpt.pt"))
    run.update(init_from="resume", max_iters=100000, eval_interval=100000)
    p = start(1, command(tmp, out, **run), tmp)
    wait_for(os.path.join(out, "metrics.jsonl"), '"iter": 5,')
    p.send_signal(signal.SIGTERM)
    text = finish(p)
    assert p.returncode == 0 and "stopped by a signal" in text, text
    assert contents(os.path.join(out, "ckpt.pt")) == best
    assert read_ckpt(out, "last.pt")["iter_num"] == len(losses(out)) > 2


TWO_SIGNALS = """
import os, ranks, signal, time
stop = ranks.StopSignal(ranks.World())
os.kill(os.getpid(), signal.SIGTERM)
os.kill(os.getpid(), signal.SIGTERM)
assert stop.received()
print("the first two were one")
time.sleep(2.2)
os.kill(os.getpid(), signal.SIGTERM)
print("alive")
"""


def test_fault_a_second_signal_stops_at_once():
    p = python("-u", "-c", TWO_SIGNALS)
    assert p.returncode == -signal.SIGTERM, p.stderr
    assert p.stdout == "the first two were one\n"


def test_fault_a_signal_to_torchrun_reaches_the_ranks(tmp):
    out = os.path.join(tmp, "signal-agent")
    p = start(2, command(tmp, out, max_iters=100000, eval_interval=100000), tmp)
    wait_for(os.path.join(out, "metrics.jsonl"), '"iter": 5,')
    p.send_signal(signal.SIGTERM)
    text = finish(p)
    assert "stopped by a signal" in text, text
    assert read_ckpt(out)["iter_num"] == len(losses(out)), text


def case_signal_to_one_rank():
    world = setup("cpu", "auto")
    stop, received = StopSignal(world), []
    for step in range(2):
        if step == 1 and world.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        stop.start()
        received.append(stop.received())
    stop.restore()
    return received


def test_fault_a_signal_to_one_rank_stops_all_after_the_same_step():
    results = on_ranks(2, {"stop": (case_signal_to_one_rank, {})})
    assert values(results, "stop") == [[False, True], [False, True]]


# -----------------------------------------------------------------------------
# what dies, and comes back


def test_fault_nan_stops_all_ranks_and_keeps_the_checkpoint(tmp):
    out = os.path.join(tmp, "nan")
    launch(2, arguments(tmp, out, max_iters=2))
    before = contents(os.path.join(out, "ckpt.pt"))
    run = dict(max_iters=50, init_from="resume", learning_rate=1e18, min_lr=1e18, grad_clip=0.0)
    p = torchrun(2, *command(tmp, out, **run))
    assert p.returncode == 1
    # the training loss, before an evaluation could see it
    line = r"^loss is (?:nan|inf).* at step [34]: try a lower learning_rate"
    assert len(re.findall(line, p.stderr, re.M)) == 1, p.stderr
    assert contents(os.path.join(out, "ckpt.pt")) == before


def test_fault_a_dead_rank_is_restarted_and_the_result_is_exact(tmp):
    out, whole = os.path.join(tmp, "dead"), os.path.join(tmp, "dead-whole")
    run = dict(max_iters=120, eval_interval=20, init_from="auto", gradient_accumulation_steps=2)
    launch(2, arguments(tmp, whole, **run))
    p = start(2, command(tmp, out, **run), tmp, "--max-restarts=1")
    wait_for(os.path.join(out, "metrics.jsonl"), '"iter": 45,')
    os.kill(children(p.pid)[-1], signal.SIGKILL)
    text = finish(p, 120)
    assert p.returncode == 0 and "starting from" in text, text
    assert losses(out) == losses(whole)


def late_setup():
    restarted = os.environ["TORCHELASTIC_RESTART_COUNT"] == "1"
    if os.environ["RANK"] == "0" and restarted:
        time.sleep(2)  # rank 1 is first at the store, where rank 0's old address is
    setup("cpu", "auto")


def test_fault_a_restarted_rank_does_not_call_its_dead_peer():
    first = Ranks(2, late_setup)
    assert first.finish().returncode == 0
    p = Ranks(2, late_setup, restarts=first).finish()
    assert p.returncode == 0, p.stderr


def test_fault_a_dead_node_comes_back(tmp):
    """
    Two nodes (two torchrun agents) under hybrid_shard; one is killed with its ranks and started
    again: the losses of an undisturbed run.
    """
    out, whole = os.path.join(tmp, "node"), os.path.join(tmp, "node-whole")
    run = dict(strategy="hybrid_shard", max_iters=60, eval_interval=20, init_from="auto",
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
    agents = [agent(1), agent(0)]
    first, second = agents
    try:
        wait_for(os.path.join(out, "metrics.jsonl"), '"iter": 25,')
        end(second)
        again = agent(0)
        agents.append(again)
        text = finish(first, 120) + finish(again, 60)
    finally:
        for p in agents:
            if p.poll() is None:
                end(p)
    assert first.returncode == again.returncode == 0, text
    assert "starting from" in text, text
    assert losses(out) == losses(whole)


def end(agent):
    """SIGKILL for torchrun and its ranks, as when a machine goes dark."""
    for pid in [*children(agent.pid), agent.pid]:
        os.kill(pid, signal.SIGKILL)


def test_fault_no_space_keeps_the_old_checkpoint(tmp):
    out = os.path.join(tmp, "full-disk")
    launch(1, arguments(tmp, out, max_iters=2))
    path = os.path.join(out, "ckpt.pt")
    before = contents(path)
    # a limit on the size of files stands in for a full disk
    args = " ".join([sys.executable, *command(tmp, out, max_iters=4, init_from="resume")])
    p = shell("bash", "-c", f"ulimit -f 20; exec {args}")
    assert p.returncode == 1
    assert "cannot write" in p.stderr and "previous checkpoint is untouched" in p.stderr, p.stderr
    assert "Traceback" not in p.stderr, p.stderr
    assert contents(path) == before
    assert not os.path.exists(path + ".tmp")


def test_fault_out_dir_that_cannot_be_made_is_one_line(tmp):
    file = os.path.join(tmp, "a-file")
    open(file, "w").close()
    p = trained(1, arguments(tmp, os.path.join(file, "out")))
    assert p.returncode == 1
    assert "out_dir" in p.stderr and "Traceback" not in p.stderr


# -----------------------------------------------------------------------------
# bad input


@pytest.mark.parametrize("world, overrides, message", [
    (1, dict(dataset="nowhere"), "train.bin is missing; use a directory that has it, or one of"),
    (1, dict(strategy="full_shard"), "torchrun --standalone --nproc_per_node=2"),
    (1, dict(device="cuda"), "--device=cpu"),
    (1, dict(n_lyaer=2), "did you mean n_layer"),
    (1, dict(freeze="nothing"), "freeze='nothing' matches 0 of"),
    (1, dict(freeze="."), "freeze='.' matches 40 of 40 parameters"),
    (1, dict(freeze="("), "not a regular expression"),
    (1, dict(init_from="no/such/dir"), "init_from=no/such/dir"),
    (2, dict(gradient_accumulation_steps=3), "try 2 or 4"),
    (2, dict(init_from="resume", out_dir="nothing-here"), "no checkpoint in out_dir"),
    (2, dict(block_size=100000), "needs at least 100001"),
])
def test_fault_bad_input_is_one_line_and_no_hang(tmp, world, overrides, message):
    if overrides.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("there is CUDA")
    args = command(tmp, os.path.join(tmp, "bad"), **overrides)
    if world == 1:
        p = python(*args, cwd=tmp)
    else:
        p = torchrun(world, *args, cwd=tmp, timeout=60)
    ours = [line for line in p.stderr.splitlines() if message in line]
    assert p.returncode == 1 and len(ours) == 1, p.stderr
    if world == 1:
        assert p.stderr.strip() == ours[0].strip()
        assert "Traceback" not in p.stderr
    else:  # torchrun adds a report of its own, below
        assert 'train.py", line' not in p.stderr, p.stderr


def test_fault_no_pickle_is_executed():
    """data/loader.py has an unpickler that refuses everything; tests/test_data.py attacks it."""
    loads = 0
    for name in os.listdir(HERE):
        if name.endswith(".py") and not name.startswith("test_"):
            code = contents(os.path.join(HERE, name)).decode()
            safe = re.findall(r"torch\.load\(.*weights_only=True\)", code)
            assert code.count("torch.load(") == len(safe), name
            assert "import pickle" not in code, name
            loads += len(safe)
    assert loads >= 2  # ckpt.pt, header.pt


# -----------------------------------------------------------------------------
# long ones, as commands


def kill(runs):
    """
    SIGKILL at random moments, twice a run; each must resume, and end bit for bit where an
    uninterrupted run ends.
    """
    rng = random.Random(time.time())
    kinds = [(1, "full"), (2, "full"), (2, "sharded"), (1, "sharded")]
    run = dict(max_iters=24, eval_interval=2, init_from="auto", gradient_accumulation_steps=2,
               n_embd=120)
    with tempfile.TemporaryDirectory() as tmp:
        make_data(os.path.join(tmp, "toy"))
        for i in range(runs):
            world, kind = kinds[i % len(kinds)]
            whole = os.path.join(tmp, f"whole-{world}-{kind}")
            if not os.path.exists(whole):
                launch(world, arguments(tmp, whole, checkpoint=kind, **run))
            out = os.path.join(tmp, f"run-{i}")
            args = arguments(tmp, out, checkpoint=kind, **run)
            for _ in range(2):
                p = Ranks(world, train.main, args)
                wait_for(os.path.join(out, "metrics.jsonl"), '"loss"')
                time.sleep(rng.random())
                p.kill()
            launch(world, args)
            assert losses(out) == losses(whole), f"run {i}"
            print(f"run {i}: {world} ranks, {kind}, killed twice, resumed, equal bit for bit "
                  f"({i + 1} of {runs})", flush=True)


def test_fault_kill_and_resume():
    """A short version of `python tests/test_faults.py kill 50`."""
    kill(4)


def launches(n):
    """Two-rank runs in a row that must all end with exit code 0."""
    run = dict(max_iters=2, eval_interval=2, dtype="bfloat16", gradient_accumulation_steps=2)
    codes = []
    with tempfile.TemporaryDirectory() as tmp:
        make_data(os.path.join(tmp, "toy"))
        for i in range(n):
            p = torchrun(2, *command(tmp, os.path.join(tmp, "out"), **run))
            codes.append(p.returncode)
            if p.returncode:
                print(p.stdout, p.stderr)
            print(f"launch {i}: exit code {p.returncode}; {codes.count(0)} of {len(codes)} ended "
                  "with 0", flush=True)
    sys.exit(int(any(codes)))


if __name__ == "__main__":
    commands = {"kill": kill, "launches": launches}
    if len(sys.argv) != 3 or sys.argv[1] not in commands:
        raise SystemExit(__doc__.strip())
    commands[sys.argv[1]](int(sys.argv[2]))

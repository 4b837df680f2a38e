"""
Faults: signals, dead ranks and nodes, a full disk, bad input. What must hold: one clear line, no
hang, no checkpoint lost, and after a restart the numbers of an undisturbed run.

    python -m pytest -q tests/test_faults.py
    python tests/test_faults.py 200             # 200 random faults: signals, damage, full disks
    python tests/test_faults.py launches 200    # 200 two-rank launches, all must exit with 0
"""

import glob
import json
import os
import random
import re
import resource
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from subprocess import CompletedProcess

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
    make_data,
    on_ranks,
    python,
    read_ckpt,
    read_metrics,
    run_training,
    script,
    start,
    torchrun,
    trained,
    values,
    wait_for,
)
from torch.distributed.run import get_args_parser

import checkpoint
import train
from ranks import StopSignal, World, setup


def contents(path):
    with open(path, "rb") as f:
        return f.read()


# -----------------------------------------------------------------------------
# signals


@pytest.mark.parametrize("world, number", [(1, signal.SIGINT), (2, signal.SIGTERM)])
def test_fault_a_signal_saves_and_leaves(tmp, world, number):
    out = os.path.join(tmp, f"signal-{world}")
    p = save_and_end(endless(tmp, world, out, always_save_checkpoint=False), number)
    assert p.returncode == 0, p.stderr
    assert "stopped by a signal" in p.stdout and "--init_from=resume" in p.stdout
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
    p = save_and_end(endless(tmp, 1, out, init_from="resume", **run))
    assert p.returncode == 0 and "stopped by a signal" in p.stdout, p.stderr
    assert contents(os.path.join(out, "ckpt.pt")) == best
    assert read_ckpt(out, "last.pt")["iter_num"] == len(losses(out)) > 2


TWO_SIGNALS = """
import os, ranks, signal, time
stop = ranks.StopSignal(ranks.World())
os.kill(os.getpid(), signal.SIGTERM)
os.kill(os.getpid(), signal.SIGTERM)
assert stop.requested()
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


CTRL_C = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n"


def test_fault_ctrl_c_while_importing_says_nothing(tmp_path):
    (tmp_path / "torch.py").write_text(CTRL_C)
    p = start(1, [os.path.join(HERE, "train.py")], tmp_path, PYTHONPATH=str(tmp_path))
    assert (finish(p), p.returncode) == ("", -signal.SIGINT)  # a shell's 130


def test_fault_ctrl_c_before_the_loop_says_nothing(tmp, tmp_path):
    (tmp_path / "c.py").write_text(CTRL_C)
    text = finish(start(2, [*command(tmp, tmp_path / "out"), tmp_path / "c.py"], tmp_path), 120)
    assert "KeyboardInterrupt" not in text and 'train.py", line' not in text, text
    assert "Signal 2 (SIGINT) received" in text, text  # in torchrun's own report


def case_signal_to_one_rank():
    world = setup("cpu", "auto")
    stop, requested = StopSignal(world), []
    for step in range(2):
        if step == 1 and world.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        requested.append(stop.requested())
    return requested


def test_fault_a_signal_to_one_rank_stops_all_after_the_same_step():
    results = on_ranks(2, {"stop": (case_signal_to_one_rank, {})})
    assert values(results, "stop") == [[False, True], [False, True]]


def fails_after_a_signal():
    world = setup("cpu", "auto")
    stop = StopSignal(world)
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop.requested()
    raise RuntimeError("of both ranks")


def test_fault_an_error_after_a_signal_is_said():
    """It must not look like a run that has saved and left."""
    p = Ranks(2, fails_after_a_signal).finish()
    assert p.returncode == 1 and "RuntimeError: of both ranks" in p.stderr


# -----------------------------------------------------------------------------
# what dies, and comes back


def test_fault_nan_stops_all_ranks_and_keeps_the_checkpoint(tmp):
    out = os.path.join(tmp, "nan")
    launch(2, arguments(tmp, out, max_iters=2))
    before = contents(os.path.join(out, "ckpt.pt"))
    run = dict(max_iters=50, init_from="resume", learning_rate=1e18, min_lr=1e18, grad_clip=0.0)
    p = trained(2, arguments(tmp, out, **run))
    assert p.returncode == 1
    # the training loss, before an evaluation could see it
    line = r"^loss is (?:nan|inf).* at step [34]: lower learning_rate"
    assert len(re.findall(line, p.stderr, re.M)) == 1, p.stderr
    assert contents(os.path.join(out, "ckpt.pt")) == before


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_fault_a_stop_signal_in_a_step_that_gave_nan_saves_nothing(tmp, monkeypatch, kind):
    """The loss would show it later: it is logged every 5 steps."""
    name, step = f"nan-and-signal-{kind}", train.train_step
    run = dict(checkpoint=kind, keep_checkpoints=1)
    launch(1, arguments(tmp, os.path.join(tmp, name), max_iters=2, **run))

    def broken(wrapped, *args):
        result = step(wrapped, *args)
        next(wrapped.parameters()).data.fill_(float("nan"))
        StopSignal.number = signal.SIGTERM
        return result

    monkeypatch.setattr(train, "train_step", broken)
    with pytest.raises(SystemExit, match=r"not finite \(.*\) after step 3 and is not saved"):
        run_training(tmp, name, init_from="resume", max_iters=9, log_interval=5, **run)
    assert newest(os.path.join(tmp, name)) == 2


UNDISTURBED = dict(max_iters=60, eval_interval=20, init_from="auto",
                   gradient_accumulation_steps=2)


@pytest.fixture(scope="module")
def undisturbed(tmp):
    """The losses of a run that nothing happens to."""
    out = os.path.join(tmp, "undisturbed")
    launch(2, arguments(tmp, out, **UNDISTURBED))
    return losses(out)


def test_fault_a_dead_rank_is_restarted_and_the_result_is_exact(tmp, undisturbed):
    out = os.path.join(tmp, "dead")
    # 3 restarts, not 1: once, on CI, PyTorch's C++ aborted a restarted rank too (exit code -6)
    p = start(2, command(tmp, out, **UNDISTURBED), tmp, "--max-restarts=3")
    wait_for(os.path.join(out, "metrics.jsonl"), '"iter": 25,')
    os.kill(children(p.pid)[-1], signal.SIGKILL)
    text = finish(p, 120)
    assert p.returncode == 0 and "starting from" in text, text[-6000:]  # where the error is
    assert losses(out) == undisturbed


def late_setup():
    restarted = os.environ["TORCHELASTIC_RESTART_COUNT"] == "1"
    if os.environ["RANK"] == "0" and restarted:
        time.sleep(2)  # rank 1 is first at the store, where rank 0's old address is
    init, mark = dist.init_process_group, "rank " + os.environ["RANK"]

    def look(*args, store, **kwargs):
        assert not store.check([mark]), "a dead rank's keys"  # gloo may wait until they are new
        store.set(mark, "was here")
        init(*args, store=store, **kwargs)

    dist.init_process_group = look
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
    agents = [agent(1), agent(0)]
    first, second = agents
    try:
        wait_for(os.path.join(out, "metrics.jsonl"), '"iter": 15,')
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
    p = Ranks(1, limited, 20_000, arguments(tmp, out, max_iters=4, init_from="resume")).finish()
    assert p.returncode == 1
    assert "cannot write" in p.stderr and "previous checkpoint is untouched" in p.stderr, p.stderr
    assert "Traceback" not in p.stderr, p.stderr
    assert contents(path) == before
    assert not os.path.exists(path + ".tmp")


def test_fault_out_dir_that_cannot_be_made_is_one_line(tmp):
    file = os.path.join(tmp, "a-file")
    open(file, "w").close()
    out = os.path.join(file, "out")
    p = trained(1, arguments(tmp, out))
    assert p.returncode == 1
    assert p.stderr.startswith(f"cannot write {out}: ") and p.stderr.count("\n") == 1, p.stderr
    assert "pass another directory" in p.stderr, p.stderr


# -----------------------------------------------------------------------------
# bad input


@pytest.mark.parametrize("world, overrides, message", [
    (1, dict(dataset="nowhere"), "train.bin is missing; run python data/prepare.py, or pass"),
    (1, dict(strategy="full_shard"), "torchrun --standalone --nproc_per_node=2"),
    (1, dict(device="cuda"), "--device=cpu"),
    (1, dict(freeze="nothing"), "freeze='nothing' matches 0 of"),
    (1, dict(freeze="."), "freeze='.' matches 40 of 40 parameters"),
    (1, dict(freeze="("), "not a regular expression"),
    (1, dict(init_from="no/such/dir"), "init_from=no/such/dir"),
    (2, dict(gradient_accumulation_steps=3), "use a multiple of 2"),
    (2, dict(init_from="resume"), "no checkpoint in out_dir"),
    (2, dict(block_size=100000), "needs 100001; lower it, or prepare more text"),
])
def test_fault_bad_input_is_one_line_and_no_hang(tmp, world, overrides, message):
    if overrides.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("there is CUDA")
    p = trained(world, arguments(tmp, os.path.join(tmp, "bad"), **overrides))
    assert p.returncode == 1 and message in p.stderr and p.stderr.count("\n") == 1, p.stderr


def test_fault_no_pickle_is_executed():
    """
    The two unpicklers, of meta.pkl and of .metadata, refuse what could run; tests/test_data.py and
    tests/test_checkpoint.py attack them.
    """
    loads, unpicklers = 0, []
    for path in glob.glob(os.path.join(HERE, "*.py")) + glob.glob(os.path.join(HERE, "data/*.py")):
        if not os.path.basename(path).startswith("test_"):
            code = contents(path).decode()
            safe = re.findall(r"torch\.load\(.*weights_only=True\)", code)
            assert code.count("torch.load(") == len(safe), path
            assert not re.search(r"pickle\.loads?\(", code), path
            loads += len(safe)
            unpicklers += re.findall(r"class (\w+)\(.*Unpickler\)", code)
            # PyTorch's own reader and its loading by path unpickle without asking
            assert "dcp.FileSystemReader(" not in code.replace("(dcp.FileSystemReader)", ""), path
            assert not re.search(r"dcp\.load\([^)]*checkpoint_id", code), path
    assert loads >= 1  # to open a ckpt.pt
    assert sorted(unpicklers) == ["MetadataUnpickler", "SafeUnpickler"]


# -----------------------------------------------------------------------------
# long ones, as commands

RUN = dict(max_iters=24, eval_interval=2, init_from="auto", gradient_accumulation_steps=2,
           n_embd=120)


def limited(bytes_, argv, main=train.main):
    """train.py on a disk that is full as soon as a file has so many bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_, bytes_))
    main(argv)


def checkpoint_files(out):
    names = glob.glob(os.path.join(out, "*.pt")) + glob.glob(os.path.join(out, "step-*", "*"))
    return names + glob.glob(os.path.join(out, "step-*", ".metadata"))


def newest(out):
    """Step of the newest intact checkpoint, -1 without one."""
    try:
        source = checkpoint.find(out, World())
    except SystemExit:
        return -1
    return source.header["iter_num"] if source else -1


def signal_ranks(rng, world, kind, out, args):
    """SIGTERM, SIGINT, SIGHUP or SIGKILL to one rank or to all, at any moment."""
    number = rng.choice([signal.SIGTERM, signal.SIGINT, signal.SIGHUP, *[signal.SIGKILL] * 3])
    p = Ranks(world, train.main, args)
    time.sleep(rng.random() * 4)
    for rank in rng.choice([p.ranks, [rng.choice(p.ranks)]]):
        if rank.is_alive():
            os.kill(rank.pid, number)
    return f"{number.name}", p.finish()


def signal_torchrun(rng, world, kind, out, args):
    """The same to torchrun or one of its ranks; ranks that it leaves behind must end."""
    number = rng.choice([signal.SIGTERM, signal.SIGHUP, *[signal.SIGKILL] * 2])
    p = start(2, [os.path.join(HERE, "train.py"), *args], out + "-cwd")
    time.sleep(5 + rng.random() * 6)
    pids = children(p.pid) if p.poll() is None else []
    target = rng.choice([p.pid, *pids])
    try:
        os.kill(target, number)
    except ProcessLookupError:
        pass  # it was over
    text = finish(p, 120)  # waits for orphans too: they print to the same pipe
    return f"{number.name} to torchrun or a rank of it", CompletedProcess("", 1, "", text)


def damage(rng, world, kind, out, args):
    """Truncate a file of a checkpoint, turn a bit, zero a block, or remove it."""
    run = Ranks(world, train.main, args)
    time.sleep(3 + rng.random() * 4)
    run.kill()
    files = checkpoint_files(out)
    if not files:
        return "killed before its first checkpoint", None
    path = rng.choice(files)
    data, what = bytearray(contents(path)), rng.choice(["truncate", "flip", "zero", "remove"])
    at = rng.randrange(len(data))
    if what == "truncate":
        data = data[:at]
    elif what == "flip":
        data[at] ^= 1 << rng.randrange(8)
    elif what == "zero":
        data[at:at + 4096] = bytes(len(data[at:at + 4096]))
    if what == "remove":
        os.remove(path)
    else:
        with open(path, "wb") as f:
            f.write(data)
    return f"{what} {os.path.relpath(path, out)}", None


def fill_disk(rng, world, kind, out, args):
    limit = rng.choice([200, 5000, 100_000, 1_000_000, 5_000_000])
    return f"full at {limit:,} bytes", Ranks(world, limited, limit, args).finish()


OURS = 'ranks.py", line'  # in every traceback of a script here, and in none of torchrun's
FAULTS = [signal_ranks, signal_ranks, damage, fill_disk, signal_torchrun]


def faults(n, seed=None):
    """
    n random faults, one to three on the way of a run. No traceback ever; a checkpoint that was
    whole stays; and what comes out at the end is an undisturbed run's, bit for bit.
    """
    rng, done, i = random.Random(seed or time.time()), 0, 0
    with tempfile.TemporaryDirectory() as tmp:
        make_data(os.path.join(tmp, "toy"))
        while done < n:
            world, kind = rng.choice([(1, "full"), (2, "full"), (2, "sharded"), (1, "sharded")])
            whole = os.path.join(tmp, f"whole-{world}")
            if not os.path.exists(whole):
                launch(world, arguments(tmp, whole, **RUN))
            out, i = os.path.join(tmp, f"run-{i}"), i + 1
            os.makedirs(out + "-cwd")
            args = arguments(tmp, out, checkpoint=kind, **RUN)
            kinds, story = FAULTS[:4 if world == 1 else 5], []
            for fault in rng.choices(kinds, k=min(n - done, rng.choice([1, 2, 3]))):
                before = newest(out)
                what, p = fault(rng, world, kind, out, args)
                story.append(what)
                done += 1
                assert p is None or OURS not in p.stderr, (story, p.stderr)
                assert fault is damage or newest(out) >= before, (story, before, newest(out))
            p = trained(world, args)
            if p.returncode:  # all that was there is damaged: it says what to remove
                assert "; remove it, or pass another out_dir" in p.stderr, (story, p.stderr)
                assert "Traceback" not in p.stderr, (story, p.stderr)
                shutil.rmtree(out)
                launch(world, args)
            if kind == "sharded":
                p = script("checkpoint.py", "full", out)
            assert os.path.exists(os.path.join(out, "ckpt.pt")), (story, os.listdir(out), p)
            ours, theirs = (read_ckpt(path)["model"] for path in (out, whole))
            assert all(torch.equal(ours[name], theirs[name]) for name in theirs), story
            rows = {r["iter"]: r["loss"] for r in read_metrics(whole) if "loss" in r}
            for row in read_metrics(out):
                assert "loss" not in row or row["loss"] == rows[row["iter"]], story
            print(f"{done} of {n}: {world} ranks, {kind}: {', '.join(story)}: equal bit for bit",
                  flush=True)


def test_fault_random_ones():
    """A short version of `python tests/test_faults.py 200`."""
    faults(4, seed=14)


# -----------------------------------------------------------------------------
# one run a directory


def impatient(argv):
    """train.py, whose waits for the directory, 50 of 0.2 s, are shorter."""
    sleep = time.sleep
    time.sleep = lambda seconds: sleep(0.02 if seconds == 0.2 else seconds)
    train.main(argv)


def test_fault_two_runs_in_one_directory(tmp):
    """The second says who has it, on one line; when the first dies the directory is free."""
    out = os.path.join(tmp, "two-runs")
    first = endless(tmp, 1, out)
    try:
        p = Ranks(2, impatient, arguments(tmp, out, max_iters=2)).finish()
    finally:
        first.kill()
    line = f"out_dir={out} is in use by process {first.ranks[0].pid} on {socket.gethostname()}; "
    assert p.returncode == 1 and p.stderr.startswith(line), p.stderr
    assert p.stderr.count("\n") == 1, p.stderr
    launch(1, arguments(tmp, out, max_iters=2))


def test_fault_orphans_of_torchrun_end_and_leave_the_directory_to_the_next_run(tmp, undisturbed):
    out = os.path.join(tmp, "orphans")
    first = start(2, command(tmp, out, **UNDISTURBED), tmp)
    wait_for(os.path.join(out, "metrics.jsonl"), '"iter": 25,')
    first.kill()  # torchrun alone; its ranks go with it
    second = start(2, command(tmp, out, **UNDISTURBED), tmp)
    text = finish(first, 60)  # ends when its ranks have ended
    assert "step 60" not in text and OURS not in text, text
    text = finish(second, 120)
    assert second.returncode == 0 and "starting from" in text, text
    assert losses(out) == undisturbed


def test_fault_a_closed_terminal_saves(tmp):
    """SIGHUP, and nobody reads the output any more."""
    out = os.path.join(tmp, "hangup")
    p = start(1, command(tmp, out, max_iters=10**5, eval_interval=10**5), tmp)
    wait_for(os.path.join(out, "metrics.jsonl"), '"iter": 5,')
    p.stdout.close()
    p.send_signal(signal.SIGHUP)
    assert p.wait(60) == 0
    assert read_ckpt(out)["iter_num"] == len(losses(out))


def ignoring_hangup():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    stop = StopSignal(World())
    os.kill(os.getpid(), signal.SIGHUP)
    print("stops" if stop.requested() else "goes on")


def test_fault_nohup_is_obeyed():
    assert Ranks(1, ignoring_hangup).finish().stdout == "goes on\n"


def train_apart(out, argv):
    """train.py; each rank's relative out_dir is another directory."""
    here = os.path.join(out, "node-" + os.environ["RANK"])
    os.makedirs(here)
    os.chdir(here)
    train.main(argv)


def test_fault_directory_that_nodes_do_not_share(tmp, tmp_path):
    run = dict(checkpoint="sharded", eval_interval=1, gradient_accumulation_steps=2)
    at = {steps: tmp_path / str(steps) for steps in (1, 100000)}  # at the end, or on the way
    started = [Ranks(2, train_apart, str(at[steps]), arguments(tmp, "out", max_iters=steps, **run))
               for steps in at]
    with ThreadPoolExecutor() as threads:  # each waits for seconds
        ended = list(threads.map(Ranks.finish, started))
    for steps, p in zip(at, ended):
        assert p.returncode == 1
        assert p.stderr.startswith(
            "out_dir=out is not the same on all nodes, out/step-000000001 lacks __1_0.distcp: "
            "use a shared disk"), p.stderr
        assert p.stderr.count("\n") == 1, p.stderr
        for node in ("node-0", "node-1"):
            assert os.path.exists(at[steps] / node / "out")
            assert not glob.glob(str(at[steps] / node / "out/*/header.json"))
    # full ones need no shared disk
    run.update(checkpoint="full", max_iters=1)
    p = Ranks(2, train_apart, str(tmp_path / "full"), arguments(tmp, "out", **run)).finish()
    assert p.returncode == 0, p.stderr
    assert read_ckpt(tmp_path / "full/node-0/out")["iter_num"] == 1


def endless(tmp, world, out, **overrides):
    """Ranks that train until they get a signal, and have begun."""
    steps = {"max_iters": 10**5, "eval_interval": 10**5, **overrides}
    p = Ranks(world, train.main, arguments(tmp, out, gradient_accumulation_steps=2, **steps))
    wait_for(os.path.join(out, "metrics.jsonl"), '"iter": 5,')
    return p


def save_and_end(p, number=signal.SIGTERM):
    """A signal to every process of the job, as a scheduler does: it saves now."""
    for rank in p.ranks:
        os.kill(rank.pid, number)
    return p.finish()


@pytest.mark.parametrize("world, kind", [(1, "full"), (2, "full"), (1, "sharded"), (2, "sharded")])
def test_fault_directory_that_was_moved_is_the_next_runs(tmp, tmp_path, world, kind):
    """The first run's step has the name of the second's: what this one keeps is its own."""
    out, moved = str(tmp_path / "out"), str(tmp_path / "moved")
    run = dict(checkpoint=kind)
    launch(world, arguments(tmp, out, max_iters=2, gradient_accumulation_steps=2, **run))
    first = endless(tmp, world, out, init_from="resume", **run)
    os.rename(out, moved)
    launch(1, arguments(tmp, out, max_iters=3, **run))
    before = snapshot(out)
    p = save_and_end(first)
    assert p.returncode == 1 and p.stderr.count("\n") == 1, p.stderr
    assert p.stderr.startswith(f"out_dir={out} was moved or removed meanwhile"), p.stderr
    assert snapshot(out) == before
    assert newest(out) == 3 and newest(moved) == 2
    p = launch(world, arguments(tmp, moved, max_iters=4, gradient_accumulation_steps=2,
                                init_from="resume", **run))
    assert "at step 2" in p.stdout and len(losses(moved)) == 4


def snapshot(out):
    """{path: bytes} of everything below out."""
    paths = glob.glob("**", root_dir=out, recursive=True, include_hidden=True)
    files = [path for path in paths if os.path.isfile(os.path.join(out, path))]
    return {path: contents(os.path.join(out, path)) for path in files}


@pytest.mark.parametrize("world, kind", [(1, "full"), (2, "full"), (2, "sharded")])
def test_fault_directory_that_was_removed(tmp, tmp_path, world, kind):
    """It says so, and does not come back with half of a run in it."""
    out = str(tmp_path / "out")
    first = endless(tmp, world, out, checkpoint=kind)
    shutil.rmtree(out)
    p = save_and_end(first)
    assert p.returncode == 1 and p.stderr.count("\n") == 1, p.stderr
    assert p.stderr.startswith(f"out_dir={out} was moved or removed meanwhile"), p.stderr
    assert not os.path.exists(out)


def train_while_moved(argv, out):
    """train.py; rank 0's directory goes when all is written, before it is completed."""
    complete = checkpoint.Saver.complete

    def moved(saver, path, header, written):
        if written:
            written.result()
        if saver.world.rank == 0:
            shutil.copytree(out, out + "-moved")
            os.replace(os.path.join(out, "lock"), out + "-moved/lock")  # as if all had moved
            open(os.path.join(out, "lock"), "w").close()
        complete(saver, path, header, written)

    checkpoint.Saver.complete = moved
    train.main(argv)


@pytest.mark.parametrize("world", [1, 2])
def test_fault_directory_that_was_moved_while_a_save_is_written(tmp, tmp_path, world):
    out = str(tmp_path / "out")
    run = dict(checkpoint="sharded", max_iters=2, gradient_accumulation_steps=2)
    p = Ranks(world, train_while_moved, arguments(tmp, out, **run), out).finish()
    assert p.returncode == 1 and p.stderr.count("\n") == 1, p.stderr
    assert p.stderr.startswith(f"out_dir={out} was moved or removed meanwhile"), p.stderr
    assert newest(out) == newest(out + "-moved") == -1


# -----------------------------------------------------------------------------
# what only one rank meets


def test_fault_of_rank_0_alone_is_one_line(tmp):
    """Rank 1 has no part in it: its broken connection is not reported."""
    out = os.path.join(tmp, "rank-0")
    launch(1, arguments(tmp, out, max_iters=2))
    os.remove(os.path.join(out, "metrics.jsonl"))
    os.makedirs(os.path.join(out, "metrics.jsonl"))
    p = torchrun(2, *command(tmp, out, init_from="resume"))
    assert p.returncode == 1
    lines = [line for line in p.stderr.splitlines() if "Is a directory" in line]
    assert len(lines) == 1, p.stderr
    assert lines[0].startswith(f"cannot write {out}/metrics.jsonl: "), p.stderr
    assert OURS not in p.stderr, p.stderr


@pytest.mark.parametrize("kind, limited_ranks", [
    ("full", [0]), ("sharded", [0]), ("sharded", [1]), ("sharded", [0, 1])])
def test_fault_disk_full_at_one_rank_or_all(tmp, kind, limited_ranks):
    out = os.path.join(tmp, f"disk-{kind}-{len(limited_ranks)}-{limited_ranks[0]}")
    run = dict(checkpoint=kind, gradient_accumulation_steps=2)
    launch(2, arguments(tmp, out, max_iters=2, **run))
    before = newest(out)
    args = arguments(tmp, out, max_iters=4, init_from="resume", **run)
    p = Ranks(2, limited_at, limited_ranks, 30_000, args).finish()
    assert p.returncode == 1
    lines = [line for line in p.stderr.splitlines() if line.startswith("cannot write")]
    assert lines and "previous checkpoint is untouched" in lines[0], p.stderr
    assert len(set(lines)) == len(lines) == 1 and OURS not in p.stderr, p.stderr
    assert newest(out) == before == 2


def dies_while_saving(argv):
    def write_data(*args):
        os.kill(os.getpid(), signal.SIGKILL)

    if os.environ["RANK"] == "1":
        dcp.FileSystemWriter.write_data = write_data
    train.main(argv)


def test_fault_a_rank_that_dies_in_a_sharded_save_is_no_full_disk(tmp):
    out = os.path.join(tmp, "dies-while-saving")
    run = dict(checkpoint="sharded", max_iters=2, gradient_accumulation_steps=2)
    p = Ranks(2, dies_while_saving, arguments(tmp, out, **run)).finish()
    assert (p.returncode, p.stderr) == (signal.SIGKILL, ""), p.stderr


def limited_at(ranks, bytes_, argv):
    limited(bytes_ if int(os.environ["RANK"]) in ranks else resource.RLIM_INFINITY, argv)


def test_fault_disk_full_for_metrics(tmp):
    out = os.path.join(tmp, "disk-metrics")
    p = Ranks(1, limited, 2000, arguments(tmp, out, max_iters=50, eval_interval=100)).finish()
    assert p.returncode == 1
    assert re.fullmatch(r"cannot write \S+metrics.jsonl: .*\n", p.stderr), p.stderr


def test_fault_disk_full_while_made_full(tmp):
    out = os.path.join(tmp, "disk-command")
    launch(1, arguments(tmp, out, max_iters=2, checkpoint="sharded"))
    p = Ranks(1, limited, 20_000, ["full", out], checkpoint.main).finish()
    assert p.returncode == 1
    assert re.fullmatch(r"cannot write \S+ckpt.pt: .*\n", p.stderr), p.stderr
    assert newest(out) == 2 and not glob.glob(os.path.join(out, "*.tmp"))


@pytest.mark.parametrize("world", [1, 2])
def test_fault_directory_that_cannot_be_written(tmp, world):
    p = trained(world, arguments(tmp, "/sys/kernel"))  # there, and read-only for root too
    assert p.returncode == 1
    assert re.fullmatch(r"cannot write /sys/kernel: .*; pass.*\n|cannot write /sys/kernel: .*\n",
                        p.stderr), p.stderr


# -----------------------------------------------------------------------------
# SIGTERM to torchrun


def slow_save(path, *args):
    """A save that takes longer than torchrun's own patience of 30 s."""
    time.sleep(33)
    return WRITE(path, *args)


WRITE = checkpoint.write_ckpt


def slow_saver(argv):
    checkpoint.write_ckpt = slow_save
    train.main(argv)


@pytest.fixture(scope="module", autouse=True)
def slow_run(tmp):
    """It starts with this file's first test, and its own test, the last, looks at the end."""
    if not hasattr(get_args_parser().parse_args(["script"]), "shutdown_timeout"):
        yield None, None  # PyTorch 2.11 always waits 30 s
        return
    out = os.path.join(tmp, "slow-save")
    script = "import sys; sys.path[:0] = sys.argv.pop(1).split(':'); import test_faults, ranks; "
    script += "ranks.run(test_faults.slow_saver, sys.argv[1:])"
    path = os.path.join(tmp, "slow.py")
    with open(path, "w") as f:
        f.write(script.replace("; ", "\n"))
    args = arguments(tmp, out, max_iters=10**5, eval_interval=10**5)
    p = start(2, [path, f"{HERE}:{HERE}/tests", *args], tmp, TORCH_ELASTIC_SHUTDOWN_TIMEOUT="120")

    def stop():
        wait_for(os.path.join(out, "metrics.jsonl"), '"iter": 5,', 120)
        p.terminate()

    threading.Thread(target=stop, daemon=True).start()
    yield p, out
    if p.poll() is None:
        end(p)


def test_fault_a_save_longer_than_torchruns_patience(slow_run):
    """As README's variable asks, torchrun waits; it ends with 1, whatever its ranks end with."""
    p, out = slow_run
    if p is None:
        pytest.skip("this torchrun has no --shutdown-timeout")
    text = finish(p, 150)
    assert "stopped by a signal" in text and OURS not in text, text
    assert p.returncode == 1 and "SignalException" in text, text
    assert read_ckpt(out)["iter_num"] == len(losses(out)), text


# -----------------------------------------------------------------------------
# mistakes: each one line, exit code 1


def write(path, data):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as f:
        f.write(data if isinstance(data, bytes) else json.dumps(data).encode())


def data_with(tmp, name, meta=None, directory=None):
    """A copy of the toy data with another meta.json, or a directory instead of a file."""
    path = os.path.join(tmp, "mistakes", name)
    shutil.copytree(os.path.join(tmp, "toy"), path)
    if directory:
        os.remove(os.path.join(path, directory))
        os.makedirs(os.path.join(path, directory))
    else:
        write(os.path.join(path, "meta.json"), meta)
    return dict(dataset=path)


def checkpoint_with(tmp, name, **fields):
    """A checkpoint with other fields in it, to resume from."""
    out = os.path.join(tmp, "mistakes", name)
    whole = os.path.join(tmp, "mistakes-whole")
    if not os.path.exists(whole):
        launch(1, arguments(tmp, whole, max_iters=1))
    os.makedirs(out)
    ckpt = read_ckpt(whole)
    for key, value in fields.items():
        ckpt[key] = value(ckpt[key])
    torch.save(ckpt, os.path.join(out, "ckpt.pt"))
    return dict(out_dir=out, init_from="resume")


def short(weights):
    return {name: t[:-1] if t.dim() == 2 else t for name, t in weights.items()}


def wrong_moments(optimizer):
    optimizer["state"][0]["exp_avg"] = torch.zeros(3, 3)
    return optimizer


MISTAKES = {  # name: (overrides, or what makes them; what the line says)
    "meta list": (partial(data_with, meta=[1]), "meta.json: not readable"),
    "meta number": (partial(data_with, meta=3), "meta.json: not readable"),
    "meta text": (partial(data_with, meta={"vocab_size": "67"}), "vocab_size is '67'"),
    "meta float": (partial(data_with, meta={"vocab_size": 67.5}), "vocab_size is 67.5"),
    "meta null": (partial(data_with, meta={"vocab_size": None}), "vocab_size is None"),
    "meta zero": (partial(data_with, meta={"vocab_size": 0}), "vocab_size is 0"),
    "meta huge": (partial(data_with, meta={"vocab_size": 10**12}), "vocab_size is 1000000000000"),
    "train.bin": (partial(data_with, directory="train.bin"), "train.bin: Is a directory"),
    "wide": (dict(n_embd=3 * 10**6), "out of memory: "),
    "wider": (dict(n_embd=3 * 10**9), "out of memory: "),
    "batch": (dict(batch_size=10**10), "out of memory: "),
    "iter_num": (partial(checkpoint_with, iter_num=str), "its iter_num is '1'"),
    "config": (partial(checkpoint_with, config=list), "ckpt.pt: not readable (TypeError: "),
    "model_args": (partial(checkpoint_with, model_args=str), "its model_args is "),
    "best": (partial(checkpoint_with, best_val_loss=lambda x: "low"), "could not convert string"),
    "names": (partial(checkpoint_with, param_names=lambda names: names[:2]), "IndexError"),
    "model": (partial(checkpoint_with, model=short), "ckpt.pt is of another model: model."),
    "no weights": (partial(checkpoint_with, model=lambda w: 3), "ckpt.pt: not readable ("),
    "moments": (partial(checkpoint_with, optimizer=wrong_moments), "wte.weight is (3, 3), not ("),
    "scaler": (partial(checkpoint_with, scaler=lambda s: [1]), "its scaler is [1]"),
    "n_head": (dict(n_head=7), "n_embd=30 must be a multiple of n_head=7"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_in_training_is_one_line(tmp, name):
    overrides, message = MISTAKES[name]
    if callable(overrides):
        overrides = overrides(tmp, name)
    out = os.path.join(tmp, "mistakes", "out")
    p = trained(1, arguments(tmp, out, **overrides))
    assert p.returncode == 1, p.stdout
    assert message in p.stderr and p.stderr.count("\n") == 1, p.stderr


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
    if len(sys.argv) == 2 and sys.argv[1].isdigit():
        faults(int(sys.argv[1]))
    elif len(sys.argv) == 3 and sys.argv[1] == "launches":
        launches(int(sys.argv[2]))
    else:
        raise SystemExit(__doc__.strip())

"""
ranks.py: what ranks agree on, how they wait, stop and leave. Restarts are in test_faults.py.

    python -m pytest -q tests/test_ranks.py
"""

import io
import os
import re
import resource
import signal
import subprocess
import sys
import time
import warnings
from contextlib import redirect_stdout
from datetime import timedelta
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from harness import (
    HASH_SEEDS,
    HERE,
    Ranks,
    arguments,
    built,
    cannot_simulate,
    finish,
    heard,
    on_ranks,
    refused,
    start,
    tiny,
    values,
)
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.testing._internal.distributed.fake_pg import FakeStore

import fsdp
import ranks
import train
from configurator import resolve


def case_from_rank0():
    """What an action of rank 0 returns, how often it ran here, and what its SystemExits say."""
    world, calls = ranks.setup("cpu", "auto"), []
    value = ranks.from_rank0(world, lambda: calls.append(1) or {"n": 3})
    with pytest.raises(SystemExit) as e:
        ranks.from_rank0(world, lambda: sys.exit(3))
    said = refused(ranks.from_rank0, world, lambda: sys.exit("no disk"))
    return value, len(calls), said, e.value.code


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


def case_mean_and_longest():
    """Of losses 1.0 and 4.0, and 0.5 and 0.25 seconds; and how many collectives it took."""
    world = ranks.setup("cpu", "auto")
    with heard() as calls:
        loss, seconds = [(1.0, 0.5), (4.0, 0.25)][world.rank]
        mean, longest = ranks.mean_and_longest(torch.tensor(loss), seconds, world)
    return mean, longest, len(calls)


def case_timeouts(tmp):
    """Seconds that each group of a hybrid mesh waits."""
    run = built(tmp, strategy="hybrid_shard", shard_group_size=1)
    groups = next(run.model.parameters()).device_mesh.get_all_groups()
    backends = [group._get_backend(torch.device("cpu")) for group in groups]
    return [backend.options._timeout.total_seconds() for backend in backends]


MESHES = {  # name: (ranks in a group that shards, or None for DDP, with_gather)
    "ddp": (None, False), "full_shard": (0, False), "and a full checkpoint": (0, True),
    "hybrid": (2, False), "hybrid and a full checkpoint": (2, True), "hybrid of all": (4, False)}


def case_connect():
    """What `connect` runs, were this NCCL: [(kind, ranks in the group, bytes)]; first what gloo
    needs."""
    ranks.setup("cpu", "auto")
    cpu, unit, found = torch.device("cpu"), torch.nn.Linear(10, 7, bias=False), []
    with heard() as calls:
        ranks.connect(cpu, unit, fsdp.make_mesh("cpu"), with_gather=True)
    found.append(calls)
    with warnings.catch_warnings(), patch.object(dist, "get_backend_config", lambda g: "nccl"):
        warnings.simplefilter("error", FutureWarning)  # torch 2.13 has new names
        for size, gathers in MESHES.values():
            mesh = None if size is None else fsdp.make_mesh("cpu", size)
            with heard() as calls:
                ranks.connect(cpu, unit, mesh, gathers)
            found.append([(kind, group, size) for kind, group, _, size in calls])
    return found


def test_ranks_connect_what_a_step_sends_in_each_group(tmp):
    """NCCL connects for each kind and size: a unit's 70 numbers, one for the norm."""
    results = on_ranks(4, {"": (case_connect, {})})
    for rank, (gloo, *found) in enumerate(values(results, "")):
        assert gloo == []
        found = dict(zip(MESHES, found))

        def in_group(size, rows):
            whole = 4 * size * rows
            return [["all_gather", size, whole], ["reduce_scatter", size, whole],
                    ["all_reduce", size, 4]]

        gather = [["gather", 4, 72]]
        assert found["ddp"] == [["all_reduce", 4, 4 * 70]]
        assert found["full_shard"] == in_group(4, 18) == found["hybrid of all"]
        assert found["and a full checkpoint"] == in_group(4, 18) + gather
        gather = [["gather", 2, 4 * 35]] if rank < 2 else []  # the group of rank 0
        replicas = [["all_reduce", 2, 4 * 35]]
        assert found["hybrid"] == in_group(2, 35) + replicas
        assert found["hybrid and a full checkpoint"] == in_group(2, 35) + gather + replicas


def test_ranks_learn_what_rank_0_did_and_that_one_of_them_got_a_signal(tmp):
    results = on_ranks(2, {"rank0": (case_from_rank0, {}), "stop": (case_signal_to_one_rank, {}),
                           "time": (case_timeouts, dict(tmp=tmp)),
                           "log": (case_mean_and_longest, {})})
    assert values(results, "log") == [[2.5, 0.5, 1]] * 2
    assert values(results, "time") == [[ranks.TIMEOUT.total_seconds()] * 2] * 2
    assert values(results, "rank0") == [[{"n": 3}, n, "no disk", 3] for n in (1, 0)]
    assert values(results, "stop") == [[False, False, True, True]] * 2


@pytest.mark.parametrize("checkpoint, strategy, expected", [
    ("full", "hybrid_shard", ([4, 2], True, True)),
    ("sharded", "hybrid_shard", ([4, 2], True, False)),
    ("full", "full_shard", ([8], True, True)), ("full", "ddp", (None, False, False))])
def test_ranks_connect_every_group_before_the_model_has_memory(tmp, checkpoint, strategy, expected):
    """NCCL takes its memory then; later that of the second group would come in backward. (DDP has
    sent its weights before.)"""
    connected = []
    world = ranks.World(size=8, local_size=2)
    cfg = resolve(tiny(tmp, strategy=strategy, gradient_accumulation_steps=8,
                       checkpoint=checkpoint), world, distributed=True)
    model = train.meta_model(cfg)

    def listed(device, unit, mesh=None, with_gather=False):
        assert unit is model.blocks[0]
        sizes = mesh and [group.size() for group in mesh.get_all_groups()]
        connected.append((sizes, all(p.is_meta for p in model.parameters()), with_gather))

    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    try:
        with patch.object(train, "connect", listed):
            train.parallelize(model, cfg, world)
    finally:
        dist.destroy_process_group()
    assert connected == [expected]


def case_one_gpu():
    """What this rank sees, and takes; and a sum."""
    dist.barrier()  # the other rank may still be connecting
    dist.destroy_process_group()  # so that this opens one
    world = ranks.setup("auto", "auto")
    total = torch.ones(1)
    dist.all_reduce(total)
    return dict(
        seed=int(os.environ["PYTHONHASHSEED"]), hash=hash("a"), gpus=torch.cuda.device_count(),
        device=str(world.device), backend=dist.get_backend_config(dist.group.WORLD),
        total=total.item())


@pytest.mark.skipif(torch.cuda.is_available(), reason="it simulates a machine with one GPU")
def test_ranks_on_a_machine_with_one_gpu(monkeypatch):
    """Each has a hash seed of its own, as under torchrun. They take the CPU and gloo: NCCL would
    refuse two ranks on one GPU."""
    if reason := cannot_simulate():
        pytest.skip(reason)
    monkeypatch.setenv("SIM_GPUS", "1")
    first, second = values(on_ranks(2, {"": (case_one_gpu, {})}), "")
    assert [first.pop("seed"), second.pop("seed")] == HASH_SEEDS[:2]
    assert first.pop("hash") != second.pop("hash")
    assert first == second == dict(gpus=1, device="cpu", backend="cpu:gloo,cuda:gloo", total=2.0)


@pytest.mark.parametrize("size, nodes, gpus, device", [
    (2, 1, 1, "cpu"), (2, 1, 2, "cuda"), (1, 1, 1, "cuda"), (2, 1, 0, "cpu"), (4, 2, 1, "refused")])
def test_ranks_of_one_node_share_a_cpu_where_gpus_are_too_few(capsys, size, nodes, gpus, device):
    """With device=auto: README's two processes on a machine with one GPU. All ranks alike."""
    local, seen = size // nodes, []
    for rank in range(local):
        env = dict(RANK=rank, WORLD_SIZE=size, LOCAL_RANK=rank, LOCAL_WORLD_SIZE=local)
        with (patch.dict(os.environ, {key: str(value) for key, value in env.items()}),
              patch.object(ranks, "open_group"), patch.object(ranks, "patient_group"),
              patch.object(torch.cuda, "set_device"),
              patch.object(torch.cuda, "is_available", lambda: gpus > 0),
              patch.object(torch.cuda, "get_device_capability", lambda index: (9, 0)),
              patch.object(torch.cuda, "device_count", lambda: gpus)):
            try:
                seen.append(ranks.setup("auto", "auto").device.type)
            except SystemExit as e:
                seen.append("refused" if "--device=cpu" in e.code else e.code)
    assert seen[-1] == device and (device == "refused" or len(set(seen)) == 1)
    # Each process may see a GPU of its own alone, as with Slurm's --gpus-per-task=1.
    line = ("device=auto: fewer GPUs (1) than processes (2): all take the CPU; if each process "
            "sees only its own GPU, pass --device=cuda\n")
    assert capsys.readouterr().out == (line if (size, nodes, gpus) == (2, 1, 1) else "")


@pytest.mark.parametrize("cores, cpu_offload, asked, threads", [
    (8, 0.0, "1", None), (8, 0.5, "1", 4), (4, 0.5, "1", 2), (1, 0.5, "1", 1), (8, 0.5, "3", None)])
def test_ranks_share_the_cores_when_the_cpu_updates(
        tmp, monkeypatch, cores, cpu_offload, asked, threads):
    """Of 8 cores those that Slurm or taskset leaves to a node's two ranks. asked: the user's
    OMP_NUM_THREADS; torchrun's is 1."""
    told = []
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(cores))
    monkeypatch.setattr(torch, "set_num_threads", told.append)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    cfg = tiny(tmp, cpu_offload=cpu_offload)
    with patch.object(train.configurator, "resolve", side_effect=SystemExit("later")):  # ends it
        assert refused(train.train, cfg) == "later"
    assert told == ([] if threads is None else [threads])


def test_ranks_print_at_once():
    """Into a pipe too, or a killed run's last lines would be lost."""
    pipe = io.BytesIO()
    with redirect_stdout(io.TextIOWrapper(io.BufferedWriter(pipe))):
        ranks.print0(ranks.World(), "said")
        assert pipe.getvalue() == b"said\n"


@pytest.mark.parametrize("disk", ["|", "/dev/full"])
def test_ranks_train_on_if_a_log_line_cannot_be_printed(tmp, tmp_path, disk):
    """Its reader went away, as of `train.py | head -1`; or the disk is full."""
    program = "import sys, train; from ranks import run; run(train.main, sys.argv[1:])"
    argv = arguments(tmp, tmp_path / "out", max_iters=3)
    read, write = os.pipe() if disk == "|" else (0, os.open(disk, os.O_WRONLY))
    if disk == "|":
        os.close(read)
    p = subprocess.run([sys.executable, "-c", program, *argv], stdout=write, stderr=subprocess.PIPE,
                       text=True, cwd=HERE, timeout=100)
    os.close(write)
    assert (p.returncode, p.stderr) == (0, "")
    assert (tmp_path / "out/ckpt.pt").exists()


def test_ranks_of_srun_alone_are_no_ranks(monkeypatch):
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "8")
    assert "srun started 8 processes" in refused(ranks.setup, "cpu", "auto")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    assert ranks.setup("cpu", "auto").size == 1


def test_ranks_say_that_this_pytorch_cannot_use_the_gpus(monkeypatch, capsys):
    """The driver counts them, and an old one makes them unavailable. Rank 0 says it."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for local_rank, n in ((None, 1), (0, 1), (1, 0)):
        assert ranks.pick_device("auto", local_rank).type == "cpu"
        assert capsys.readouterr().out.count("this PyTorch cannot use them") == n
    assert ranks.pick_device("cpu").type == "cpu" and capsys.readouterr().out == ""
    assert "can use 0 GPUs" in refused(ranks.pick_device, "cuda")


@pytest.mark.parametrize("asked, found", [
    ({}, "expandable_segments:True"), ({"PYTORCH_ALLOC_CONF": "backend:native"}, "backend:native"),
    ({"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, None)])
def test_ranks_of_gpus_allocate_in_segments_that_grow(monkeypatch, asked, found):
    """Unless somebody has set the allocator's options, and before CUDA starts."""
    for key in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(key, "")  # so that it is taken back, whatever happens here
        monkeypatch.delenv(key)
    for key, value in asked.items():
        monkeypatch.setenv(key, value)
    seen = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda index: seen.append(os.environ.get("PYTORCH_ALLOC_CONF")))
    assert ranks.pick_device("cuda").type == "cuda" and seen == [found]


@pytest.mark.parametrize("name, local_rank, device", [
    ("auto", None, "mps"), ("auto", 0, "cpu"), ("mps", 0, "mps"), ("mps", 1, "refused")])
def test_ranks_of_a_mac_take_its_gpu_if_they_are_alone(monkeypatch, name, local_rank, device):
    """One process may use it. Of several, one alone would have it, and the others the CPU."""
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    if device == "refused":
        assert "--device=cpu" in refused(ranks.pick_device, name, local_rank)
    else:
        assert ranks.pick_device(name, local_rank).type == device


def waits_for_a_peer(**env):
    ranks.TIMEOUT = timedelta(seconds=2)
    os.environ.update(WORLD_SIZE="2", **env)
    ranks.setup("cpu", "auto")


@pytest.mark.parametrize("hosts_the_store", [True, False])
def test_ranks_whose_peer_never_comes_end_when_their_time_is_up(hosts_the_store):
    """Rank 0 hosts the store on several nodes, where PyTorch's own limit would be a minute. On one
    torchrun does: a rank then looks there for its peer."""
    wait = waits_for_a_peer
    if hosts_the_store:
        wait = partial(wait, RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    p = Ranks(1, wait, alone=hosts_the_store).finish(30)
    assert p.returncode == 1 and re.search(r"[Tt]imed? ?out after \d", p.stderr), p.stderr


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
        dist.barrier()  # or one might end while the other still connects, which gloo would say
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


@pytest.mark.parametrize("code, waits", [(0, ["patient", 0]), (3, [3])])
def test_ranks_leave_together_after_a_run_that_ended_well(monkeypatch, code, waits):
    """Rank 0 may take long to upload its log, and peers still use the connections of a rank."""
    done = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(ranks, "patient_group", lambda: "patient")
    monkeypatch.setattr(dist, "barrier", lambda group: done.append(group))
    monkeypatch.setattr(os, "_exit", lambda code: done.append(code))
    ranks.run(lambda: sys.exit(code) if code else None)
    assert done == waits


def is_late():
    """Rank 1 comes to the same error when rank 0 has left, and torchrun has sent its SIGTERM."""
    world = ranks.setup("cpu", "auto")
    stop = ranks.StopSignal(world)
    while world.rank == 1 and not stop.received:
        time.sleep(0.01)
    sys.exit("a line")


def is_slower():
    """Rank 0 comes to the same error when rank 1 has already left with it."""
    time.sleep(0.3 if os.environ["RANK"] == "0" else 0)
    sys.exit("a line")


@pytest.mark.parametrize("late", [is_late, is_slower])
def test_ranks_leave_with_one_line_if_one_is_late(late):
    p = Ranks(2, late).finish()
    assert (p.returncode, p.stderr) == (1, "a line\n")


def test_ranks_of_every_node_say_why_they_leave(monkeypatch, capsys):
    """The first of each: torchrun shows what its own node has printed. And if torchrun's file
    cannot be written."""
    for key, value in dict(RANK=8, LOCAL_RANK=0, TORCHELASTIC_ERROR_FILE="/nowhere/error").items():
        monkeypatch.setenv(key, str(value))
    with pytest.raises(SystemExit):
        ranks.run(sys.exit, "a line")
    assert capsys.readouterr().err == "a line\n"


def test_ranks_leave_with_a_traceback_after_a_bug():
    p = Ranks(1, raises, ValueError("a bug")).finish()
    assert p.returncode == 1 and "in raises\n" in p.stderr and "ValueError: a bug\n" in p.stderr


def opens_files(tmp, hard):
    """Groups for each of 32 blocks, where a process may have 64 open files."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    built(tmp, strategy="full_shard", reshard_group_size=2, n_layer=32)


def test_ranks_may_open_as_many_files_as_the_system_lets_them(tmp):
    """The groups of reshard_group_size pass the soft limit."""
    p = Ranks(4, opens_files, tmp, 2048).finish()
    assert (p.returncode, p.stderr) == (0, "")


INTERRUPTS = """
import os, signal
os.kill(os.getpid(), signal.SIGINT)
print("goes on", flush=True)
os._exit(7)
"""


def test_ctrl_c_while_prepare_writes_is_one_line(tmp_path):
    (tmp_path / "tqdm.py").write_text(INTERRUPTS)
    (tmp_path / "a.txt").write_text("hello")
    argv = [f"{HERE}/data/prepare.py", "x", "a.txt", "--tokenizer=bytes", f"--out={tmp_path}/x"]
    p = start(1, argv, tmp_path, PYTHONPATH=str(tmp_path))
    assert finish(p).startswith(f"{tmp_path}/x: stopped; ") and p.returncode == 1

"""
What a GPU runs: whole steps, on one and on two; and what fake ones show of it.

    python -m pytest -q -rs -k cuda      # on a GPU machine: these, and others' tests of a GPU

On a CPU test_fsdp.py trains in these modes. Fake `cuda` tensors have a device and no memory.
PyTorch without CUDA runs neither autograd nor copies between devices on them.
"""

import os
import re
import shlex
import shutil
import socket
import sys
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from unittest.mock import MagicMock, patch

import harness
import numpy as np
import pytest
import torch
from commands import read
from harness import (
    DEVICES,
    HERE,
    PYTHONPATH,
    TINY,
    arguments,
    built,
    launch,
    losses,
    on_ranks,
    plain_training,
    run_training,
    shell,
    simulates,
    steps,
    tiny,
    values,
)
from torch._subclasses import FakeTensorMode
from torch.distributed.checkpoint import filesystem
from torch.distributed.fsdp import CPUOffloadPolicy

import fsdp
import metrics
import ranks
import saves
import test_fsdp
import train
from configurator import resolve
from data.loader import Batches
from optimizer import LossScaler

CUDA = torch.device("cuda", 0)


# ---------- training on one GPU -----------------------------------------------

SHARD = dict(strategy="full_shard")
EXACT = {
    "single": dict(strategy="single"),
    "full_shard": SHARD,
    "half offloaded": dict(SHARD, cpu_offload=0.5),
    "all offloaded": dict(SHARD, cpu_offload=1.0),
    "activation_offload": dict(SHARD, activation_checkpointing="full", activation_offload=True),
    "selective": dict(SHARD, activation_checkpointing="selective"),
    "full": dict(SHARD, activation_checkpointing="full"),
    "loss_chunks": dict(SHARD, loss_chunks=4),
    "compiled": dict(SHARD, compile=True),
}
# Heads of 16: cuDNN's attention, which H100s prefer, takes no 16-bit heads but multiples of 8.
ROUNDED = {  # (keys, the largest relative difference of a loss)
    "bfloat16": (dict(SHARD, dtype="bfloat16", n_embd=48), 5e-3),
    "float16": (dict(strategy="single", dtype="float16", n_embd=48), 5e-3),
}


def case_training(tmp, name, **keys):
    """A run's losses and norms. Its products are in fp32, without TF32."""
    real_gpu = keys["device"] == "cuda" and "simgpu" not in sys.modules  # which has no Triton
    compiles = nullcontext if real_gpu else harness.no_compiler
    with (patch.object(torch, "set_float32_matmul_precision"),
          patch.object(harness, "no_compiler", compiles)):
        rows = run_training(tmp, name, **keys)
    return [(row["loss"], row["grad_norm"]) for row in rows]


def trainings(tmp, device, runs):
    """Cases for on_ranks."""
    return {name: (case_training, dict(tmp=tmp, name=f"{device} {name}", device=device, **keys))
            for name, keys in runs.items()}


@pytest.fixture(scope="module")
def one_rank(tmp):
    """What `case_training` returned for each of the runs above."""
    runs = {**EXACT, **{name: keys for name, (keys, _) in ROUNDED.items()}}
    return on_ranks(1, trainings(tmp, "cuda", runs))


def in_plain_pytorch(tmp, **keys):
    """[(loss, norm)] of the same run on a CPU, by a loop of its own."""
    losses, norms, *_ = plain_training(tiny(tmp, **keys))
    return list(zip(losses, norms))


@pytest.mark.parametrize("name", EXACT)
def test_cuda_trains_as_a_cpu_does(tmp, one_rank, name):
    """5 steps in fp32: the losses and the gradients' norms."""
    expected = in_plain_pytorch(tmp)
    [rows] = values(one_rank, name)
    assert np.array(rows) == pytest.approx(np.array(expected), rel=2e-5)


@pytest.mark.parametrize("name", ROUNDED)
def test_cuda_trains_in_fewer_bits(tmp, one_rank, name):
    keys, limit = ROUNDED[name]
    assert keys["n_embd"] // TINY["n_head"] % 8 == 0
    expected = in_plain_pytorch(tmp, n_embd=keys["n_embd"])
    [rows] = values(one_rank, name)
    assert [row[0] for row in rows] == pytest.approx([row[0] for row in expected], rel=limit)


@contextmanager
def no_synchronization(device):
    """Inside, the host must not wait for the device. On a CPU: ask for no number."""
    def asked(*args):
        raise AssertionError("the host would wait for the GPU here")

    if device == "cpu":
        names = ("item", "tolist", "__bool__", "__float__")
        with patch.multiple(torch.Tensor, **{name: asked for name in names}):
            yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def case_unlogged_steps(tmp, device, **keys):
    run = built(tmp, device=device, **keys)
    steps(run)  # makes the optimizer's state
    scaler = LossScaler(run.cfg)
    with no_synchronization(device):
        for step in (1, 2):
            loss, norm = train.train_step(
                run.wrapped, run.optimizer, scaler, run.batches, step, run.cfg, run.world,
                run.micro_batch)
    return loss.item(), norm.item()


@pytest.mark.parametrize("device", DEVICES[1])
def test_cuda_unlogged_steps_do_not_wait(tmp, device):
    cases = {name: (case_unlogged_steps, dict(tmp=tmp, device=device, **EXACT[name]))
             for name in ("single", "full_shard", "selective", "loss_chunks")}
    results = on_ranks(1, cases)
    losses, norms, *_ = plain_training(tiny(tmp))
    for name in cases:
        assert values(results, name) == [pytest.approx([losses[2], norms[2]], rel=2e-5)]


# ---------- training on two and four -------------------------------------------
# On fewer GPUs, ranks share them, each a node of its own to NCCL: own_node.py.


HYBRID = dict(strategy="hybrid_shard", shard_group_size=2)
STOPS = dict(max_iters=3, eval_interval=3)
BETWEEN = {  # {ranks: {name: keys}}
    2: {
        "ddp": dict(strategy="ddp"),
        "ddp compiled": dict(strategy="ddp", compile=True),
        "ZeRO-1": dict(strategy="shard_grad_op", grad_sync="last"),
        "shard_grad_op": dict(strategy="shard_grad_op"),
        "full_shard": SHARD,
        "full_shard last": dict(SHARD, grad_sync="last"),
        "full_shard compiled": dict(SHARD, compile=True),
        "hybrid of one": dict(strategy="hybrid_shard", shard_group_size=1),
        "half offloaded": dict(SHARD, cpu_offload=0.5),
        "all offloaded": dict(SHARD, cpu_offload=1.0),
        "activation_offload": dict(
            SHARD, activation_checkpointing="full", activation_offload=True),
        "sharded": dict(SHARD, checkpoint="sharded", **STOPS),
        "full": dict(SHARD, checkpoint="full", **STOPS),
    },
    4: {
        "ddp": dict(strategy="ddp"),
        "full_shard": SHARD,
        "hybrid": HYBRID,
        "hybrid last": dict(HYBRID, grad_sync="last"),
        "hpZ": dict(SHARD, reshard_group_size=2),
        "half offloaded": dict(SHARD, cpu_offload=0.5),
    },
}
RESUMED = {  # {ranks: {name: keys}}; on 2 they have stopped
    1: {"sharded": dict(SHARD, checkpoint="sharded"), "full": dict(SHARD, checkpoint="full")},
    4: {"sharded": dict(SHARD, checkpoint="sharded"), "full": dict(HYBRID, checkpoint="full")},
}
ROUNDED_ON_TWO = {**ROUNDED, "float16 full_shard": (dict(ROUNDED["float16"][0], **SHARD), 5e-3)}
ROUNDED_ON_TWO["float16"] = (dict(ROUNDED["float16"][0], strategy="ddp"), 5e-3)


def same(results, runs, expected):
    for name, keys in runs.items():
        rows = np.array(values(results, name)[0])
        assert rows == pytest.approx(expected[:keys.get("max_iters", 5)], rel=2e-5), name


def test_cuda_ranks_train_as_one_and_resume_on_fewer_and_more(tmp):
    expected = np.array(in_plain_pytorch(tmp))
    for world, runs in BETWEEN.items():
        runs = {f"{name} on {world}": keys for name, keys in runs.items()}
        same(on_ranks(world, trainings(tmp, "cuda", runs)), runs, expected)
    for world, runs in RESUMED.items():
        resumed = {}
        for name, keys in runs.items():
            before, out = (f"{tmp}/cuda {name} on {n}" for n in (2, f"2, then {world}"))
            shutil.copytree(before, out)
            resumed[f"{name} on 2, then {world}"] = dict(keys, init_from="resume")
        same(on_ranks(world, trainings(tmp, "cuda", resumed)), resumed, expected)


def test_cuda_two_ranks_train_in_fewer_bits(tmp):
    runs = {f"{name} on 2": keys for name, (keys, _) in ROUNDED_ON_TWO.items()}
    results = on_ranks(2, trainings(tmp, "cuda", runs))
    for name, (keys, limit) in ROUNDED_ON_TWO.items():
        expected = [loss for loss, _ in in_plain_pytorch(tmp, n_embd=keys["n_embd"])]
        got = [loss for loss, _ in values(results, f"{name} on 2")[0]]
        assert got == pytest.approx(expected, rel=limit), name


@pytest.mark.parametrize("device", DEVICES[2][1:])  # on a CPU: test_fsdp.py
def test_cuda_float16_overflow_on_one_rank_skips_the_step_on_both(tmp, device):
    keys = dict(tmp=tmp, device=device, **SHARD)
    zero, one = values(on_ranks(2, {"": (test_fsdp.case_overflow, keys)}), "")
    assert zero["scale"] == [1024.0, 512.0, 512.0] and one["scale"][2] == 512.0
    assert zero["moved"] == zero["unmoved"] == []


@pytest.mark.slow
def test_cuda_page_starts_two_nodes_on_one_gpu(tmp, tmp_path):
    """docs/clusters.md's commands, with another config and port."""
    page = read("docs/clusters.md")
    [block] = re.findall(r"```text\n(export NCCL_SOCKET_IFNAME.*?)```", page, re.S)
    simulated = simulates(1)
    keys = dict(gradient_accumulation_steps=2, init_from="scratch", device="cuda")
    argv = shlex.join(arguments(tmp, str(tmp_path / "out"), **{**TINY, **keys}))
    program = f"{'-m simgpu ' * simulated}{HERE}/train.py {argv}"
    block = block.replace("train.py config/quickstart.py --out_dir=out-nccl", program)
    block = block.replace("torchrun", f"{sys.executable} -m torch.distributed.run")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        block = block.replace("29500", str(s.getsockname()[1]))
    env = dict(SIM_GPUS="1", PYTHONPATH=PYTHONPATH) if simulated else dict(CUDA_VISIBLE_DEVICES="0")
    p = shell("bash", "-c", f"{block}\nwait", cwd=tmp_path, env=env)
    assert "2 x cuda" in p.stdout, p.stderr
    launch(2, arguments(tmp, str(tmp_path / "cpu"), **{**TINY, **keys, "device": "cpu"}))
    assert losses(tmp_path / "out") == pytest.approx(losses(tmp_path / "cpu"), rel=2e-5)


def overlap(events):
    """Of the all-gathers' time, the share in which another kernel than NCCL's runs, on any stream.
    events: a profiler's. FSDP2's annotation of a gather is among them, as long as the gather."""
    kernels = [e for e in events if e.device_type == torch.autograd.DeviceType.CUDA
               and not e.is_user_annotation]
    gathers = united(e for e in kernels if "AllGather" in e.name)
    others = united(e for e in kernels if "nccl" not in e.name)
    shared = 0
    for start, end in gathers:
        shared += sum(max(0, min(end, b) - max(start, a)) for a, b in others)
    return shared / sum(end - start for start, end in gathers)


def united(events):
    """The spans of time that they take, without overlaps."""
    apart = []
    for start, end in sorted((e.time_range.start, e.time_range.end) for e in events):
        if apart and start <= apart[-1][1]:
            start, last = apart.pop()
            end = max(last, end)
        apart.append((start, end))
    return apart


GATHER = "ncclDevKernel_AllGather_RING_LL"


@pytest.mark.parametrize("trace, share", [
    ([(GATHER, 0, 10), ("gemm", 4, 6), ("gemm", 8, 12), (GATHER, 20, 30)], 4 / 20),
    # NCCL's other kernels do not compute, and an annotation is none
    ([(GATHER, 0, 10), ("ncclDevKernel_ReduceScatter", 0, 10), ("FSDP::all_gather", 0, 10)], 0),
    # two streams at once, and a kernel inside of another: time counts once
    ([(GATHER, 0, 10), ("gemm", 0, 6), ("copy", 4, 8), ("gemm", 1, 3), ("add", 9, 9)], 8 / 10),
    ([(GATHER, 0, 10), (GATHER, 5, 15), ("gemm", 0, 15)], 1)])
def test_cuda_overlap_is_the_share_of_gathers_beside_computation(trace, share):
    gpu, cpu = torch.autograd.DeviceType.CUDA, torch.autograd.DeviceType.CPU
    events = [SimpleNamespace(name="aten::mm", device_type=cpu, is_user_annotation=False,
                              time_range=SimpleNamespace(start=0, end=100))]
    for name, start, end in trace:
        events.append(SimpleNamespace(
            name=name, device_type=gpu, is_user_annotation=name.startswith("FSDP"),
            time_range=SimpleNamespace(start=start, end=end)))
    assert overlap(events) == share


def case_trace(tmp, device):
    # So large that the GPU takes longer for a block than the host for asking.
    run = built(tmp, device=device, n_layer=12, n_head=12, n_embd=1536, block_size=512,
                batch_size=32, gradient_accumulation_steps=2, dtype="bfloat16", **SHARD)
    steps(run, n=3)
    with torch.profiler.profile() as profile:
        steps(run, first=3)
    return overlap(profile.events())


@pytest.mark.parametrize("device", DEVICES[2][1:])
def test_cuda_gathers_run_beside_computation(tmp, device):
    if torch.cuda.device_count() < 2 or "simgpu" in sys.modules:
        pytest.skip("needs 2 of CUDA's GPUs: two ranks on one take turns, and a simulated one "
                    "does not take the time of a real one")
    shares = values(on_ranks(2, {"": (case_trace, dict(tmp=tmp, device=device))}), "")
    assert min(shares) > 0.5


# ---------- parts, on any machine ---------------------------------------------


def test_cuda_pause_of_the_log_begins_when_what_is_queued_is_done(tmp, monkeypatch):
    """The steps since the last line wait on the GPU: their time is no part of the evaluation's."""
    clock = [0]

    def wait(device):
        clock[0] += 40

    monkeypatch.setattr(metrics.time, "time", lambda: clock[0])
    monkeypatch.setattr(torch.cuda, "synchronize", wait)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(metrics, "peak_flops", lambda device: None)
    for device, seconds in ((CUDA, 41), (torch.device("cpu"), 1)):
        log = metrics.Log(tiny(tmp), ranks.World(device=device), "", None, 0)
        clock[0] += 1
        with log.paused():
            clock[0] += 100
        assert clock[0] - log.since == seconds


def test_cuda_is_not_used_by_the_thread_that_writes_a_checkpoint(tmp):
    """A new thread's device is GPU 0, whatever its rank's is. Here it is as if there were one."""
    run = built(tmp, checkpoint="sharded", out_dir=f"{tmp}/writer")
    directory = saves.RunDirectory(run.cfg.out_dir)
    run_id = directory.claim(None)
    saver = saves.Saver(
        directory.path, run_id, run.cfg, run.world, None, False, run.batches, lambda *times: None)
    Serial = filesystem._SerialCpuLoader
    with (patch.object(torch.cuda, "is_available", lambda: True),
          patch.object(filesystem, "_OverlappingCpuLoader") as on_gpu,
          patch.object(filesystem, "_SerialCpuLoader", wraps=Serial) as serial):
        saver.save(run.model, run.optimizer, LossScaler(run.cfg), 1)
        saver.finish()
    assert (on_gpu.call_count, serial.call_count) == (0, 1)
    assert "step-000000001" in os.listdir(run.cfg.out_dir)


# ---------- fake tensors ------------------------------------------------------


def on_fake_gpu(function):
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        return function()


@pytest.mark.parametrize("fraction, on_host", [(0.0, ""), (0.5, "1"), (1.0, "012 root")])
def test_cuda_offloaded_units_are_allocated_on_the_host(tmp, fraction, on_host):
    """Pinned; and the root only if all is there."""
    model = train.meta_model(tiny(tmp))
    model.set_reduce_scatter_unused_params = MagicMock()  # FSDP2's, as fully_shard is
    mesh = SimpleNamespace(device_type="cuda")
    with patch.object(fsdp, "fully_shard") as sharded:
        on_fake_gpu(lambda: fsdp.shard(model, model.blocks, mesh, cpu_offload=fraction))
    policies = [call.kwargs["offload_policy"] for call in sharded.call_args_list]
    params = {str(i): block.mlp.c_fc.weight for i, block in enumerate(model.blocks)}
    params["root"] = model.lm_head.weight
    for (name, p), policy in zip(params.items(), policies, strict=True):
        host = name in on_host
        assert p.device.type == ("cpu" if host else "cuda")
        assert isinstance(policy, CPUOffloadPolicy) == host
        assert not host or policy.pin_memory


def half_offloaded():
    """Parameters with gradients, every other one in host memory."""
    model = torch.nn.Module()
    for i in range(4):
        p = torch.nn.Parameter(torch.empty((4, 4)[i // 2:], device=(CUDA, "cpu")[i % 2]))
        p.grad = torch.empty_like(p)
        model.register_parameter(f"p{i}", p)
    return model


def test_cuda_clipping_scales_gradients_where_they_are():
    """One norm of both memories, on the device; a scale copied to where gradients are."""
    scaled = []
    with patch.object(torch, "_foreach_mul_", lambda ts, scale: scaled.append(
            ({t.device.type for t in ts}, len(ts), scale.device.type))):
        norm = on_fake_gpu(lambda: fsdp.clip_grad_norm(half_offloaded(), 1.0))
    assert norm.device == CUDA
    assert sorted(scaled, key=str) == [({"cpu"}, 2, "cpu"), ({"cuda"}, 2, "cuda")]


def test_cuda_one_gpu_evaluates_and_gathers(tmp):
    """Forward, loss and masks make nothing on another device; a gathered tensor is the host's."""
    world = ranks.World(device=CUDA)
    cfg = resolve(tiny(tmp, device="cuda", strategy="single", dtype="bfloat16"), world)
    meta = train.meta_model(cfg)

    def evaluated():
        model = train.parallelize(meta, cfg, world)
        x = torch.empty(2, 16, dtype=torch.int64, device=CUDA)
        with fsdp.inference(model):
            loss = model(x, x)[1]
        gathered = {fsdp.gather_full(p).device.type for p in model.parameters()}
        return loss.device, {p.device for p in model.parameters()}, gathered

    assert on_fake_gpu(evaluated) == (CUDA, {CUDA}, {"cpu"})


def test_cuda_batches_are_pinned_before_they_are_copied(tmp):
    """Or the copy would wait for the GPU; non_blocking only where memory is pinned."""
    batches = Batches(tiny(tmp), ranks.World(device=CUDA))
    x = MagicMock()
    with torch.no_grad():
        batches.to_device(x, x)
    pinned = x.pin_memory.return_value
    pinned.to.assert_called_with(CUDA, non_blocking=pinned.is_pinned.return_value)
    assert not x.to.called

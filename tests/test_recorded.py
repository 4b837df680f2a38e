"""
The recorded step: the ordinary step's numbers, no wait of the host, and what cannot be recorded.

    python -m pytest -q tests/test_recorded.py   # on this machine's GPUs, or on those of simgpu

A simulated GPU records and replays each operation, on the memory that it had.
"""

import os
import shutil
import sys
from contextlib import nullcontext
from unittest.mock import patch

import harness
import numpy as np
import pytest
import torch
from harness import (
    built,
    losses,
    on_ranks,
    read_metrics,
    refused,
    run_training,
    steps,
    tiny,
    values,
)
from torch.distributed.tensor import DTensor

import fsdp
import train
from configurator import resolve
from optimizer import LossScaler
from ranks import World, pick_device
from recorded import Recorded

SHARD = dict(strategy="full_shard")
THREE = dict(gradient_accumulation_steps=6)  # micro-batches, three on each of two ranks
LAST = dict(grad_sync="last", gradient_accumulation_steps=6)
CKPT = "activation_checkpointing"
MODES = {  # name: (ranks, keys, how far the numbers may be from the ordinary step's)
    "single": (1, dict(strategy="single", gradient_accumulation_steps=3), 0),
    "single compiled": (1, dict(strategy="single", compile=True), 0),
    # Micro-batches whose targets count differently: the weight is another in each.
    "masks": (1, dict(strategy="single", gradient_accumulation_steps=3, dataset="masked"), 0),
    "one rank": (1, dict(SHARD, gradient_accumulation_steps=3, dropout=0.1), 0),
    "bfloat16": (1, dict(SHARD, dtype="bfloat16", n_embd=48), 0),
    "float16": (1, dict(strategy="single", dtype="float16", n_embd=48), 0),
    "full_shard": (2, dict(SHARD, **THREE), 0),
    "full_shard last": (2, dict(SHARD, **LAST), 0),
    "shard_grad_op": (2, dict(THREE, strategy="shard_grad_op"), 0),
    "shard_grad_op last": (2, dict(LAST, strategy="shard_grad_op"), 0),
    "selective": (2, {**SHARD, CKPT: "selective", "dropout": 0.1}, 0),
    "full": (2, {**SHARD, **THREE, CKPT: "full", "dropout": 0.1}, 0),
    "loss_chunks": (2, dict(SHARD, loss_chunks=4, prefetch_blocks=1), 0),
    "compiled": (2, dict(SHARD, compile=True), 0),
    "ddp": (2, dict(THREE, strategy="ddp"), 1e-6),
    "hybrid_shard": (4, dict(strategy="hybrid_shard", shard_group_size=2,
                             gradient_accumulation_steps=12), 1e-6),
}


def compiles(device):
    """A real GPU compiles. On a simulated one graphs are traced, and no kernels are made."""
    real_gpu = device == "cuda" and "simgpu" not in sys.modules
    return nullcontext() if real_gpu else harness.no_compiler()


def weights(run):
    """This rank's rows of all parameters, as numbers."""
    rows = [rows_of(p.detach()).cpu().flatten() for p in run.model.parameters()]
    return torch.cat(rows).tolist()


def rows_of(t):
    return t.to_local() if isinstance(t, DTensor) else t


def case_recorded(tmp, device, cuda_graph, **keys):
    """(losses and norms of some steps, weights) with an evaluation in between; and of a recorded
    run, whose addresses stayed."""
    is_ddp = keys["strategy"] == "ddp"
    n = 15 if is_ddp else 7
    rows, kept = [], []
    with compiles(device):
        run = built(tmp, device=device, cuda_graph=cuda_graph, **keys)
        if cuda_graph:
            run.micro_batch.warm_up = 11 if is_ddp else 2
        for step in range(n):
            if step == n - 2:
                with fsdp.inference(run.wrapped):
                    x, y, _ = run.batches.read(0, 0)
                    run.wrapped(x, y)
            rows.append(steps(run, first=step))
            grads = [p.grad for p in run.model.parameters() if p.grad is not None]
            kept.append([rows_of(g).data_ptr() for g in grads])
    if cuda_graph:
        micro_batches = run.cfg.gradient_accumulation_steps // run.world.size
        assert len(run.micro_batch.recordings) == min(micro_batches, 3)
        assert kept[1] == kept[-1]  # a replay writes where gradients were while it was recorded
    return rows, weights(run)


@pytest.fixture(scope="module")
def found(tmp):
    """{"mode True", if it was recorded: what case_recorded returned, by rank}"""
    masked = shutil.copytree(f"{tmp}/toy", f"{tmp}/recorded-masks")
    for split in ("train", "val"):
        place = np.arange(os.path.getsize(f"{masked}/{split}.bin") // 2)
        (place // 16 % 3 * place % 5 < 2).tofile(f"{masked}/{split}.mask")
    results = {}
    for world in (1, 2, 4):
        cases = {}
        for name, (n, keys, _) in MODES.items():
            for cuda_graph in (False, True):
                kwargs = dict(keys, tmp=tmp, device="cuda", cuda_graph=cuda_graph)
                if "dataset" in keys:
                    kwargs["dataset"] = masked
                if n == world:
                    cases[f"{name} {cuda_graph}"] = case_recorded, kwargs
        results.update(on_ranks(world, cases))
    return results


@pytest.mark.parametrize("name", MODES)
def test_cuda_recorded_step_is_the_ordinary_one(found, name):
    limit = MODES[name][2]
    ours, theirs = (values(found, f"{name} {cuda_graph}") for cuda_graph in (True, False))
    for (rows, numbers), (expected, others) in zip(ours, theirs, strict=True):
        assert np.array(rows) == pytest.approx(np.array(expected), rel=limit, abs=0)
        if limit:
            assert numbers == pytest.approx(others, rel=1e-4, abs=1e-6)
        else:
            assert numbers == others


def case_waits(tmp, device, **keys):
    """What the host waits for in the last of some recorded steps, none of which is logged."""
    run = built(tmp, device=device, cuda_graph=True, **keys)
    run.micro_batch.warm_up = 2
    scaler = LossScaler(run.cfg)
    for step in range(6):
        if step == 5:
            torch.cuda.set_sync_debug_mode("error")
        train.train_step(
            run.wrapped, run.optimizer, scaler, run.batches, step, run.cfg, run.world,
            run.micro_batch)
    torch.cuda.set_sync_debug_mode("default")
    _, inputs, result = next(iter(run.micro_batch.recordings.values()))
    return [t.device.type for t in (*inputs, result)]


@pytest.mark.parametrize("world, keys", [(1, dict(strategy="single")), (2, SHARD)])
def test_cuda_recorded_step_makes_the_host_wait_for_nothing(tmp, world, keys):
    results = on_ranks(world, {"": (case_waits, dict(keys, tmp=tmp, device="cuda"))})
    assert values(results, "") == world * [4 * ["cuda"]]


# ---------- a whole run -------------------------------------------------------


def case_run(tmp, name, device, **keys):
    """Rows of a run of 18 steps with evaluations and saves, cut in two where it resumes."""
    out = os.path.join(tmp, name)
    keys = dict(keys, tmp=tmp, name=name, device=device, eval_interval=4, keep_every=8)
    with patch.object(Recorded.__init__, "__defaults__", (1, None, 3)):
        run_training(**keys, max_iters=10)
        run_training(**keys, max_iters=18, init_from="resume")
    return losses(out), [row["val_loss"] for row in read_metrics(out) if "val_loss" in row]


def test_cuda_recorded_run_evaluates_saves_and_resumes(tmp):
    """As an ordinary one does, to the last bit."""
    cases = {}
    for cuda_graph in (False, True):
        kwargs = dict(tmp=tmp, name=f"recorded-{cuda_graph}", device="cuda", cuda_graph=cuda_graph,
                      dropout=0.1, gradient_accumulation_steps=4, **SHARD)
        cases[str(cuda_graph)] = case_run, kwargs
    results = on_ranks(2, cases)
    assert values(results, "True") == values(results, "False")
    assert len(values(results, "True")[0][0]) == 18


# ---------- what cannot be recorded -------------------------------------------


class Asks(torch.nn.Module):
    """It asks the GPU for a number, in the steps after the first ones too."""
    def forward(self, x):
        return x * x.mean().item()


class Drops(torch.nn.Module):
    """It leaves out its work in every other call, as a layer that Python's random drops."""
    calls = 0

    def forward(self, x):
        self.calls += 1
        return x if self.calls % 2 else 2 * x


class Counts(torch.nn.Module):
    """A number of its own that grows from call to call."""
    calls = 0

    def forward(self, x):
        self.calls += 1
        return x * self.calls


def case_decides(tmp, device, module, **keys):
    """The line with which a run ends whose model has this module before its head."""
    run = built(tmp, device=device, cuda_graph=True, **keys)
    run.micro_batch.warm_up = 2
    norm = run.model.transformer.ln_f
    decides = module()
    norm.register_forward_hook(lambda _, args, output: decides(output))
    return refused(steps, run, n=6)


@pytest.mark.parametrize("module, said", [
    (Asks, "x * x.mean().item()"), (Drops, "decides something on the host"),
    (Counts, "decides something on the host")])
@pytest.mark.parametrize("keys", [dict(strategy="single"), SHARD])
def test_cuda_model_that_decides_on_the_host_is_one_line(tmp, module, said, keys):
    kwargs = dict(keys, tmp=tmp, device="cuda", module=module)
    [line] = values(on_ranks(1, {"": (case_decides, kwargs)}), "")
    assert "--cuda_graph=False" in line and "\n" not in line
    if module is Asks:  # the place, and CUDA's reason
        path, number = line.split(" ")[0].rsplit(":", 1)
        with open(path) as f:
            assert said in f.read().splitlines()[int(number) - 1]
        assert "captur" in line
    else:
        assert said in line


class Fills(torch.nn.Module):
    """No memory is left for it once it is recorded."""
    def forward(self, x):
        if torch.cuda.is_current_stream_capturing():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB")
        return x


def case_fills(tmp, **keys):
    with pytest.raises(torch.OutOfMemoryError, match="3 GiB"):
        case_decides(tmp, module=Fills, **keys)


def test_cuda_recording_that_runs_out_of_memory_says_so(tmp):
    values(on_ranks(1, {"": (case_fills, dict(SHARD, tmp=tmp, device="cuda"))}), "")


def test_recorded_needs_no_gpu_where_there_is_none(tmp):
    """The key does nothing there, in silence."""
    assert not resolve(tiny(tmp, cuda_graph=True), World()).cuda_graph
    assert resolve(tiny(tmp, cuda_graph=True), World(device=torch.device("cuda"))).cuda_graph
    ordinary = run_training(tmp, "recorded-on-a-cpu", max_iters=3)
    asked = run_training(tmp, "recorded-on-a-cpu-too", max_iters=3, cuda_graph=True)
    assert [row["loss"] for row in asked] == [row["loss"] for row in ordinary]


@pytest.mark.parametrize("keys", [
    dict(cpu_offload=0.5), dict(dtype="float8"),
    dict(activation_offload=True, activation_checkpointing="full")])
def test_recorded_what_waits_for_the_host_is_refused(tmp, keys):
    world = World(device=torch.device("cuda"))
    line = refused(resolve, tiny(tmp, cuda_graph=True, **SHARD, **keys), world, True)
    assert line.startswith("cuda_graph=True") and "--cuda_graph=False" in line


@pytest.mark.parametrize("capability, set_by_user, expected", [
    ((9, 0), None, "0"), ((10, 0), None, None), ((9, 0), "1", "1")])
def test_recorded_collectives_use_no_registered_buffers(
        monkeypatch, capability, set_by_user, expected):
    """Of expandable segments, below compute capability 10. Before a group is made."""
    for name, value in (("NCCL_GRAPH_REGISTER", set_by_user), ("PYTORCH_ALLOC_CONF", None)):
        monkeypatch.delenv(name, raising=False)
        if value:
            monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    pick_device("cuda", 0)
    assert os.environ.get("NCCL_GRAPH_REGISTER") == expected

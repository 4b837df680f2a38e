"""
What a GPU runs: whole steps on one, two and four.

    python -m pytest -q -rs -k cuda      # on a GPU machine: these, and others' tests of a GPU

On a CPU test_fsdp.py trains in these modes. Ranks share GPUs that are too few, each a node of its
own to NCCL: own_node in harness.py.
"""

import functools
import os
import sys
from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
import training
from harness import on_ranks, values
from torch.distributed.checkpoint import filesystem
from training import built, plain_training, run_training, tiny

import saves
import test_fsdp
from optimizer import LossScaler

# ---------- training ------------------------------------------------------------

SINGLE = dict(strategy="single")
DDP = dict(strategy="ddp")
SHARD = dict(strategy="full_shard")
RECOMPUTED = dict(activation_checkpointing="full", activation_offload=True)
# Heads of 16: cuDNN's attention, which H100s prefer, takes no 16-bit heads but multiples of 8.
BF16 = dict(dtype="bfloat16", n_embd=48)
FP16 = dict(dtype="float16", n_embd=48)
MODES = {  # name: (ranks, keys)
    "single": (1, SINGLE),
    "loss_chunks": (1, dict(SHARD, loss_chunks=4)),
    "selective": (1, dict(SHARD, activation_checkpointing="selective")),
    "float16": (1, dict(SINGLE, **FP16)),
    "ddp": (2, DDP),
    "full_shard": (2, SHARD),
    "shard_grad_op last": (2, dict(strategy="shard_grad_op", grad_sync="last")),
    # Adam divides by a gradient's size: only beside its eps does it show who has been clipped.
    "half offloaded": (2, dict(SHARD, cpu_offload=0.5, grad_clip=1e-5)),
    "all offloaded": (2, dict(SHARD, cpu_offload=1.0, **RECOMPUTED)),
    "compiled": (2, dict(SHARD, compile=True)),
    "bfloat16": (2, dict(SHARD, **BF16)),
    "float16 ddp": (2, dict(DDP, **FP16)),
    "ddp compiled": (4, dict(DDP, compile=True)),
    "hybrid": (4, dict(strategy="hybrid_shard", shard_group_size=2)),
    "hpZ": (4, dict(SHARD, reshard_group_size=2)),
}


def case_training(tmp, name, **keys):
    """A run's losses and norms. Its products are in fp32, without TF32."""
    real_gpu = keys["device"] == "cuda" and "simgpu" not in sys.modules  # which has no Triton
    compiles = nullcontext if real_gpu else training.no_compiler
    with (patch.object(torch, "set_float32_matmul_precision"),
          patch.object(training, "no_compiler", compiles)):
        rows = run_training(tmp, name, **keys)
    return [(row["loss"], row["grad_norm"]) for row in rows]


def trainings(tmp, device, runs):
    """Cases for on_ranks."""
    return {name: (case_training, dict(tmp=tmp, name=f"{device} {name}", device=device, **keys))
            for name, keys in runs.items()}


@pytest.fixture(scope="module")
def trained(tmp):
    """trained(ranks): what each of the modes on so many returned, and an overflow on two."""
    @functools.cache
    def get(world):
        runs = {name: keys for name, (n, keys) in MODES.items() if n == world}
        cases = trainings(tmp, "cuda", runs)
        if world == 2:
            keys = dict(tmp=tmp, device="cuda", **SHARD)
            cases["overflow"] = test_fsdp.case_overflow, keys
        return on_ranks(world, cases)
    return get


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=pytest.mark.slow) if world == 4 else name
    for name, (world, _) in MODES.items()])
def test_cuda_trains_as_a_cpu_does(tmp, trained, name):
    """5 steps: the losses, and in fp32 the gradients' norms, of plain PyTorch on a CPU."""
    world, keys = MODES[name]
    rows = values(trained(world), name)[0]
    theirs = {key: keys[key] for key in ("n_embd", "grad_clip") if key in keys}
    losses, norms, *_ = plain_training(tiny(tmp, **theirs))
    exact = "dtype" not in keys
    assert [loss for loss, _ in rows] == pytest.approx(losses, rel=2e-5 if exact else 5e-3)
    if exact:
        assert [norm for _, norm in rows] == pytest.approx(norms, rel=2e-5)


def test_cuda_float16_overflow_on_one_rank_skips_the_step_on_both(trained):
    zero, one = values(trained(2), "overflow")
    assert zero["scale"] == [1024.0, 512.0, 512.0] and one["scale"][2] == 512.0
    assert zero["moved"] == zero["unmoved"] == []


# ---------- on any machine ------------------------------------------------------


def test_cuda_is_not_used_by_the_thread_that_writes_a_checkpoint(tmp):
    """A new thread's device is GPU 0, whatever its rank's is. Here it is as if there were one."""
    run = built(tmp, checkpoint="sharded", out_dir=f"{tmp}/writer")
    directory = saves.RunDirectory(run.cfg.out_dir)
    run_id = directory.claim(None)
    saver = saves.Saver(directory.path, run_id, run.cfg, run.world, None)
    Serial = filesystem._SerialCpuLoader
    with (patch.object(torch.cuda, "is_available", lambda: True),
          patch.object(filesystem, "_OverlappingCpuLoader") as on_gpu,
          patch.object(filesystem, "_SerialCpuLoader", wraps=Serial) as serial):
        saver.save(run.model, run.optimizer, LossScaler(run.cfg), 1)
        saver.finish()
    assert (on_gpu.call_count, serial.call_count) == (0, 1)
    assert "step-000000001" in os.listdir(run.cfg.out_dir)

"""
What only a GPU runs, as far as a machine without one shows it.

    python -m pytest -q tests/test_cuda.py

Fake `cuda` tensors have a device and no memory. PyTorch without CUDA runs neither autograd nor
copies between devices on them, so whole steps wait for a GPU (docs/gpu.md).
"""

import os
from types import SimpleNamespace
from unittest.mock import MagicMock, patch

import pytest
import torch
import torch.distributed as dist
from harness import built, on_ranks, tiny, values
from torch._subclasses import FakeTensorMode
from torch.distributed.checkpoint import filesystem
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.nn import functional as F

import checkpoint
import fsdp
import ranks
import train
from configurator import resolve
from data.loader import Batches
from model import attend

CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize("dtype, grouped", [
    (torch.bfloat16, True), (torch.float16, False), (torch.float32, False)])
def test_cuda_heads_are_grouped_only_where_flash_attention_does_it(dtype, grouped):
    """float16 is for GPUs before sm80, without it: they would keep T x T scores."""
    q, k = torch.randn(2, 6, 300, 10).to(dtype), torch.randn(2, 2, 300, 10).to(dtype)
    with patch.object(F, "scaled_dot_product_attention") as kernel:
        attend(q, k, k, 0.0)
    assert kernel.call_args.kwargs["enable_gqa"] is grouped
    assert kernel.call_args.args[1].size(1) == (2 if grouped else 6)


def case_broadcast():
    """What a rank calls, in order, while it loads a full checkpoint's tensor from rank 0."""
    world, calls = ranks.setup("cpu", "auto"), []
    patient = ranks.patient_group()
    model = torch.nn.Linear(2, 3, bias=False)
    model.config = None
    source = checkpoint.Source("ckpt.pt", {}, {"model.weight": (3, 2)},
                               lambda key: calls.append("read") or torch.ones(3, 2))
    with (patch.object(dist, "barrier", lambda group: calls.append(
              "patient barrier" if group is patient else "barrier")),
          patch.object(dist, "broadcast", lambda t, src: calls.append("broadcast"))):
        checkpoint.load(source, model, None, world)
    return calls


def test_cuda_broadcasts_do_not_queue_ahead_of_rank_0s_disk():
    """NCCL's watchdog gives each ten minutes from when a rank enqueues it."""
    first, second = values(on_ranks(2, {"": (case_broadcast, {})}), "")
    assert first == ["read", "patient barrier", "broadcast"]
    assert second == ["patient barrier", "broadcast"]


def test_cuda_is_not_used_by_the_thread_that_writes_a_checkpoint(tmp):
    """A new thread's device is GPU 0, whatever its rank's is. Here it is as if there were one."""
    run = built(tmp, checkpoint="sharded", out_dir=f"{tmp}/writer")
    saver = checkpoint.Saver(run.cfg.out_dir, run.world)
    saver.claim(run.cfg, None)
    scaler, Serial = torch.amp.GradScaler("cpu", enabled=False), filesystem._SerialCpuLoader
    with (patch.object(torch.cuda, "is_available", lambda: True),
          patch.object(filesystem, "_OverlappingCpuLoader") as on_gpu,
          patch.object(filesystem, "_SerialCpuLoader", wraps=Serial) as serial):
        saver.save(run.model, run.optimizer, scaler, 1, 1.0)
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

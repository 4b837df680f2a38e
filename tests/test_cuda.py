"""
What only a GPU runs, as far as a machine without one shows it.

    python -m pytest -q tests/test_cuda.py

Fake `cuda` tensors have a device and no memory. PyTorch without CUDA runs neither autograd nor
copies between devices on them, so whole steps wait for a GPU (docs/gpu.md).
"""

import gc
import os
from types import SimpleNamespace
from unittest.mock import MagicMock, patch

import pytest
import torch
import torch.distributed as dist
from harness import on_ranks, tiny, values
from torch._subclasses import FakeTensorMode
from torch.distributed.checkpoint import filesystem
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore

import checkpoint
import fsdp
import ranks
import train
from configurator import resolve
from data.loader import Batches
from model import attend
from optimizer import make_optimizer

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


def case_broadcast(tmp):
    """What a rank calls, in order, while it loads a full checkpoint's tensors from rank 0."""
    world, calls = ranks.setup("cpu", "auto"), []
    patient = ranks.patient_group()
    source = SimpleNamespace(path="", sharded=False, header={"shapes": {"model.weight": (3, 2),
                                                                        "model.bias": (3,)}})
    source.get = lambda key: calls.append("read") or torch.ones(source.header["shapes"][key])
    model = torch.nn.Linear(2, 3)

    def barrier(group):
        calls.append("patient barrier" if group is patient else "barrier")

    def broadcast(t, src):
        calls.append("broadcast")
        t.fill_(1)

    with patch.object(dist, "barrier", barrier), patch.object(dist, "broadcast", broadcast):
        checkpoint.load(source, model, None, world)
    return calls


def test_cuda_broadcasts_do_not_queue_ahead_of_rank_0s_disk(tmp):
    """NCCL's watchdog gives each ten minutes from when a rank enqueues it."""
    first, second = values(on_ranks(2, {"": (case_broadcast, dict(tmp=tmp))}), "")
    assert first == 2 * ["read", "patient barrier", "broadcast"]
    assert second == 2 * ["patient barrier", "broadcast"]


def case_writer(tmp):
    """A sharded save in the background, as if a GPU were there; how often it asked for one."""
    cfg = tiny(tmp, strategy="full_shard", checkpoint="sharded", out_dir=f"{tmp}/writer")
    world = ranks.setup(cfg.device, cfg.backend)
    cfg = resolve(cfg, world)
    _, model, optimizer = train.build(cfg, world)
    saver = checkpoint.Saver(cfg.out_dir, world)
    saver.claim(cfg, None)
    Serial = filesystem._SerialCpuLoader
    with (patch.object(torch.cuda, "is_available", lambda: True),
          patch.object(filesystem, "_OverlappingCpuLoader") as on_gpu,
          patch.object(filesystem, "_SerialCpuLoader", wraps=Serial) as serial):
        saver.save(model, optimizer, torch.amp.GradScaler("cpu", enabled=False), 1, 1.0)
        saver.finish(wait=True)
    return on_gpu.call_count, serial.call_count, os.listdir(cfg.out_dir)


def test_cuda_is_not_used_by_the_thread_that_writes_a_checkpoint(tmp):
    """A new thread's device is GPU 0, whatever its rank's is."""
    on_gpu, serial, written = values(on_ranks(1, {"": (case_writer, dict(tmp=tmp))}), "")[0]
    assert (on_gpu, serial) == (0, 1) and "step-000000001" in written


def test_cuda_sharded_adamw_keeps_nothing_of_a_step(tmp):
    """torch 2.11 keeps two DTensorSpecs a parameter and step, so requirements.txt asks for more."""
    def specs():
        gc.collect()
        return sum(type(o).__name__ == "DTensorSpec" for o in gc.get_objects())

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        mesh, model = dist.init_device_mesh("cpu", (2,)), torch.nn.Linear(8, 8)
        fully_shard(model, mesh=mesh)
        model.blocks = torch.nn.ModuleList()  # a model has some
        optimizer, counts = make_optimizer(model, tiny(tmp)), []
        for _ in range(4):
            for p in model.parameters():
                p.grad = torch.ones_like(p)
            optimizer.step()
            counts.append(specs())
    finally:
        dist.destroy_process_group()
    assert counts[1] == counts[3]


# ---------- fake tensors ------------------------------------------------------


def on_fake_gpu(function):
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        return function()


def half_offloaded():
    """Parameters with gradients, every other one in host memory."""
    model = torch.nn.Module()
    model.blocks = torch.nn.ModuleList()
    for i in range(4):
        p = torch.nn.Parameter(torch.empty((4, 4)[i // 2:], device=(CUDA, "cpu")[i % 2]))
        p.grad = torch.empty_like(p)
        model.register_parameter(f"p{i}", p)
    return model


def test_cuda_clipping_scales_gradients_where_they_are():
    """One norm of both memories, on the device; a scale copied to where gradients are."""
    def clipped():
        return fsdp.clip_grad_norm(half_offloaded(), 1.0, ranks.World(device=CUDA)).device

    scaled = []
    with patch.object(torch, "_foreach_mul_", lambda ts, scale: scaled.append(
            ({t.device.type for t in ts}, len(ts), scale.device.type))):
        assert on_fake_gpu(clipped) == CUDA
    assert sorted(scaled, key=str) == [({"cpu"}, 2, "cpu"), ({"cuda"}, 2, "cuda")]


def test_cuda_adamw_keeps_its_state_beside_the_parameters(tmp):
    """Adam's step too: fused kernels want it on their device."""
    def devices():
        model = half_offloaded()
        update = make_optimizer(model, tiny(tmp))
        update.step()
        return [(p.device, {t.device for t in update.state[p].values()}, len(update.state[p]))
                for p in model.parameters()]

    for device, of_state, n in on_fake_gpu(devices):
        assert of_state == {device} and n == 3


def test_cuda_one_gpu_evaluates_and_gathers(tmp):
    """Forward, loss and masks make nothing on another device; a gathered tensor is the host's."""
    world = ranks.World(device=CUDA)
    cfg = resolve(tiny(tmp, device="cuda", strategy="single", dtype="bfloat16"), world)
    meta = train.meta_model(cfg)

    def evaluated():
        model = fsdp.parallelize(meta, cfg, world)
        x = torch.empty(2, 16, dtype=torch.int64, device=CUDA)
        with fsdp.inference(model):
            loss = model(x, x)[1]
        gathered = {fsdp.gather_full(p, world).device.type for p in model.parameters()}
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

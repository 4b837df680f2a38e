"""
What is kept for backward: offloaded activations, the loss in chunks.

    python -m pytest -q tests/test_activations.py

Checkpointing is in test_fsdp.py; what a plan says of all this in test_plan.py.
"""

from unittest.mock import patch

import pytest
import torch
from harness import on_ranks, plain_gpt, tiny, values
from torch import nn
from torch.nn import functional as F

import activations
import fsdp
import ranks
import train
from configurator import STRATEGIES, resolve
from data.loader import Batches
from model import head_loss

CPU = torch.device("cpu")

# -----------------------------------------------------------------------------
# the loss in chunks


def some_loss(loss_of, T=13, V=67):
    """(loss, gradients) of the same head, inputs and targets, a third of which are ignored."""
    generator = torch.Generator().manual_seed(0)
    head = nn.Linear(10, V, bias=False)
    with torch.no_grad():
        head.weight.normal_(generator=generator)
    x = torch.randn(3, T, 10, generator=generator, requires_grad=True)
    targets = torch.randint(V, (3, T), generator=generator)
    targets[:, 1::3] = -1
    targets[0, :7] = -1  # one chunk has fewer than another
    loss = loss_of(x, head, targets)
    (5 * loss).backward()
    return loss, x.grad, head.weight.grad


@pytest.mark.parametrize("T, chunks", [(13, 1), (13, 4), (13, 13), (13, 50), (12, 3)])
def test_activations_loss_in_chunks_is_the_mean_of_all_targets(T, chunks):
    def plain(x, head, targets):
        return F.cross_entropy(head(x).flatten(0, 1), targets.flatten(), ignore_index=-1)

    def ours(x, head, targets):
        logits, loss = head_loss(x, head, targets, chunks)
        assert logits is None
        return loss

    for a, b in zip(some_loss(plain, T), some_loss(ours, T)):
        assert torch.allclose(a, b, rtol=1e-6, atol=1e-6)


def test_activations_only_one_chunk_of_logits_exists():
    sizes, cross_entropy = [], F.cross_entropy

    def spy(logits, *args, **kwargs):
        sizes.append(len(logits))
        return cross_entropy(logits, *args, **kwargs)

    saved = []
    with (patch.object(F, "cross_entropy", spy),
          torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t)):
        some_loss(lambda *args: head_loss(*args, chunks=4)[1])
    assert sizes == 2 * [3 * 4, 3 * 4, 3 * 4, 3 * 1] or sorted(sizes) == 2 * [3] + 6 * [12]
    assert all(t.size(-1) != 67 for t in saved[:8])  # forward keeps no logits


def case_chunks(tmp, **keys):
    """(losses, largest difference of a gradient relative to its norm) with and without chunks."""
    runs = []
    for chunks in (0, 3):
        cfg = tiny(tmp, loss_chunks=chunks, **keys)
        world = ranks.setup(cfg.device, cfg.backend)
        cfg = resolve(cfg, world)
        wrapped, model, _ = train.build(cfg, world)
        batches, total = Batches(cfg, world), 0.0
        for micro in range(2):
            x, y = batches.train(0, micro)
            y = y.masked_fill(torch.arange(16) % (3 + world.rank) == 0, -1)
            fsdp.set_grad_sync(wrapped, cfg, micro == 1)
            with fsdp.autocast(cfg, world.device):
                loss = wrapped(x, y)[1]
            loss.backward()
            total += loss.item()
        runs.append((total, {n: fsdp.gather_full(p.grad, world)
                             for n, p in model.named_parameters()}))
    (loss, grads), (cut, cut_grads) = runs
    worst = 0.0
    if world.rank == 0:
        worst = max(((grads[n] - cut_grads[n]).norm() / (grads[n].norm() + 1e-3)).item()
                    for n in grads)
    return loss, cut, worst


CHUNKED = {f"{strategy}-{dtype}": dict(strategy=strategy, dtype=dtype, compile=False,
                                       shard_group_size=2 * (strategy == "hybrid_shard"))
           for strategy in STRATEGIES[1:] for dtype in ("float32", "bfloat16")}


@pytest.fixture(scope="module")
def chunked(tmp):
    cases = {name: (case_chunks, {"tmp": tmp, **keys}) for name, keys in CHUNKED.items()}
    return on_ranks(2, cases)


@pytest.mark.parametrize("name", CHUNKED)
def test_activations_loss_in_chunks_in_every_strategy(chunked, name):
    for loss, cut, worst in values(chunked, name):
        bf16 = "bfloat16" in name
        assert cut == pytest.approx(loss, rel=1e-3 if bf16 else 1e-6)
        assert worst <= (2e-2 if bf16 else 1e-6)


def test_activations_loss_chunks_of_a_model_without_head_loss_is_one_line(tmp):
    model = plain_gpt()
    del model.head_loss
    with pytest.raises(SystemExit, match="loss_chunks=2: model=gpt2 has no head_loss"):
        activations.keep_less(model, tiny(tmp, loss_chunks=2), CPU)


# -----------------------------------------------------------------------------
# activation_offload


def saved_bytes(model, dtype, hooks):
    """(bytes of what blocks[0] saves and hooks, (pack, unpack), take away, its gradients)"""
    x = torch.linspace(-1, 1, 960).view(2, 16, 30).requires_grad_() * 1
    counted, (pack, unpack) = [], hooks

    def count(t):
        packed = pack(t)
        counted.append(0 if packed is t else t.nbytes)
        return packed

    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        with torch.autograd.graph.saved_tensors_hooks(count, unpack):
            y = model.blocks[0](x)
    y.sum().backward()
    return sum(counted), [p.grad.clone() for p in model.blocks[0].parameters()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_offload_moves_activations_and_no_weights(dtype):
    """Neither parameters nor autocast's copies of them, which are 2 bytes for each weight."""
    model = plain_gpt().train()
    offload = activations.Offload(CPU)
    moved, grads = saved_bytes(model, dtype, (offload.to_host, offload.to_device))
    model.zero_grad()
    everything, expected = saved_bytes(
        model, dtype, (lambda t: (t,), lambda packed: packed[0]))
    matrices = 12 * 30 * 30 * dtype.itemsize
    norms = 2 * 2 * 30 * 4  # each saves its weight and bias
    assert moved == everything - matrices - norms
    assert all(map(torch.equal, grads, expected))


def test_activations_offload_brings_back_what_it_took_and_nothing_else():
    offload = activations.Offload(CPU)
    seed = torch.empty(2, device="meta")  # as attention's seed is on the CPU in a run on CUDA
    assert offload.to_device(offload.to_host(seed)) is seed
    t = torch.randn(3)
    packed = offload.to_host(t)
    assert packed is not t and offload.leaving == []  # on a CPU nobody waits
    assert torch.equal(offload.to_device(packed), t)


class Stream:
    """In a CUDA stream's place: notes who waits for whom."""

    def __init__(self, name, log):
        self.name, self.log = name, log

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")

    def record_event(self):
        self.log.append(f"{self.name} records")
        return f"event {len(self.log)}"

    def wait_event(self, event):
        self.log.append(f"{self.name} waits for {event}")


def test_activations_offload_on_a_stream_of_its_own():
    """The order of copies and waits that CUDA would see; copies themselves run on the CPU."""
    log = []
    offload = activations.Offload(CPU)
    offload.stream, compute = Stream("copies", log), Stream("compute", log)
    empty = torch.empty

    class Within:
        def __init__(self, stream):
            log.append(f"on {stream.name}:")

        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

    def recorded(t, stream):
        log.append(f"used by {stream.name}")

    def unpinned(*args, pin_memory, **kwargs):
        assert pin_memory
        return empty(*args, **kwargs)

    with (patch.object(torch.cuda, "stream", Within),
          patch.object(torch.cuda, "current_stream", lambda device: compute),
          patch.object(torch.Tensor, "record_stream", recorded),
          patch.object(torch, "empty", unpinned)):
        x = torch.ones(4, requires_grad=True)
        y = offload(torch.exp, x * 1)  # saves its output
        first = offload.left
        assert [len(tensors) for tensors in first[1:]] == [1]  # held until its copy has run
        z = offload(torch.exp, y)
        assert log == ["copies waits for compute", "on copies:", "copies records",
                       "copies waits for compute", "on copies:",
                       f"compute waits for {first[0]}", "copies records"]
        assert offload.left[1] is not first[1]  # the first block's tensors are let go
        log.clear()
        z.sum().backward()
        assert log == 2 * ["on copies:", "compute waits for copies", "used by compute"]
        assert offload.left is None and offload.leaving == []
    assert torch.allclose(x.grad, z.detach() * y.detach())


# -----------------------------------------------------------------------------
# what else changes how a step's numbers are kept and sent


def case_reduce(tmp, reduce_dtype):
    """Gradients of one step by ddp in reduce_dtype, and the dtypes that were all-reduced."""
    cfg = tiny(tmp, strategy="ddp", reduce_dtype=reduce_dtype, grad_clip=0.0)
    world = ranks.setup(cfg.device, cfg.backend)
    cfg = resolve(cfg, world)
    wrapped, model, _ = train.build(cfg, world)
    sent, all_reduce = [], torch.distributed.all_reduce

    def spy(t, *args, **kwargs):
        sent.append(str(t.dtype))
        return all_reduce(t, *args, **kwargs)

    with patch.object(torch.distributed, "all_reduce", spy):
        wrapped(*Batches(cfg, world).train(0, 0))[1].backward()
    return sorted(set(sent)), [p.grad.flatten().tolist() for p in model.parameters()]


def test_ddp_reduces_in_reduce_dtype_without_nccl(tmp):
    dtypes = ("float32", "bfloat16", "float16")
    results = on_ranks(2, {d: (case_reduce, dict(tmp=tmp, reduce_dtype=d)) for d in dtypes})
    exact = values(results, "float32")[0][1]
    for dtype, precision in (("bfloat16", 2**-7), ("float16", 2**-9)):
        a, b = values(results, dtype)
        assert a[0] == [f"torch.{dtype}"] and a == b
        for ours, theirs in zip(a[1], exact):
            ours, theirs = torch.tensor(ours), torch.tensor(theirs)
            assert 0 < (ours - theirs).norm() <= precision * theirs.norm() + 1e-6


def case_threads(tmp, **keys):
    cfg = tiny(tmp, strategy="full_shard", **keys)
    world = ranks.setup(cfg.device, cfg.backend)
    with patch("os.cpu_count", lambda: 8):
        train.build(resolve(cfg, world), world)
    return torch.get_num_threads()


def test_threads_of_the_node_are_divided_when_the_cpu_updates(tmp):
    results = on_ranks(2, {"device": (case_threads, dict(tmp=tmp)),
                           "host": (case_threads, dict(tmp=tmp, cpu_offload=0.5))})
    assert values(results, "device") == [1, 1] and values(results, "host") == [4, 4]

"""
What is kept for backward: the blocks' inputs, in host memory; the loss in chunks.

    python -m pytest -q tests/test_activations.py

Checkpointing is in test_fsdp.py; what a plan says of all this in test_plan.py.
"""

from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from harness import on_ranks, plain_gpt, tiny, values
from torch import nn
from torch.nn import functional as F

import configurator
import fsdp
import ranks
import train
from configurator import STRATEGIES, resolve
from data.loader import Batches
from model import GPT
from optimizer import make_state, require_gradients

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


def in_chunks(n):
    """The loss as GPT.head_loss computes it in n pieces."""
    def loss_of(x, head, targets):
        logits, loss = GPT.head_loss(SimpleNamespace(lm_head=head, loss_chunks=n), x, targets)
        assert logits is None
        return loss
    return loss_of


@pytest.mark.parametrize("T, chunks", [(13, 1), (13, 4), (13, 13), (13, 50), (12, 3)])
def test_activations_loss_in_chunks_is_the_mean_of_all_targets(T, chunks):
    def plain(x, head, targets):
        return F.cross_entropy(head(x).flatten(0, 1), targets.flatten(), ignore_index=-1)

    for a, b in zip(some_loss(plain, T), some_loss(in_chunks(chunks), T)):
        assert torch.allclose(a, b, rtol=1e-6, atol=1e-6)


def test_activations_only_one_chunk_of_logits_exists():
    sizes, cross_entropy = [], F.cross_entropy

    def spy(logits, *args, **kwargs):
        sizes.append(len(logits))
        return cross_entropy(logits, *args, **kwargs)

    saved = []
    with (patch.object(F, "cross_entropy", spy),
          torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t)):
        some_loss(in_chunks(4))
    assert sizes == 2 * [3 * 4, 3 * 4, 3 * 4, 3 * 1] or sorted(sizes) == 2 * [3] + 6 * [12]
    assert all(t.size(-1) != 67 for t in saved[:8])  # forward keeps no logits


def case_chunks(tmp, **keys):
    """(losses, largest difference of a gradient relative to its norm) with and without chunks;
    how often each computed a cross-entropy."""
    runs, calls = [], []
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
            with patch.object(F, "cross_entropy", wraps=F.cross_entropy) as spy:
                with fsdp.autocast(cfg, world.device):
                    loss = wrapped(x, y)[1]
                loss.backward()
            total += loss.item()
            calls.append(spy.call_count)
        runs.append((total, {n: fsdp.gather_full(p.grad, world)
                             for n, p in model.named_parameters()}))
    (loss, grads), (cut, cut_grads) = runs
    worst = 0.0
    if world.rank == 0:
        worst = max(((grads[n] - cut_grads[n]).norm() / (grads[n].norm() + 1e-3)).item()
                    for n in grads)
    return loss, cut, worst, calls


CHUNKED = {f"{strategy}-{dtype}": dict(strategy=strategy, dtype=dtype, compile=False,
                                       shard_group_size=2 * (strategy == "hybrid_shard"))
           for strategy in STRATEGIES[1:] for dtype in ("float32", "bfloat16")}


@pytest.fixture(scope="module")
def chunked(tmp):
    cases = {name: (case_chunks, {"tmp": tmp, **keys}) for name, keys in CHUNKED.items()}
    return on_ranks(2, cases)


@pytest.mark.parametrize("name", CHUNKED)
def test_activations_loss_in_chunks_in_every_strategy(chunked, name):
    for loss, cut, worst, calls in values(chunked, name):
        bf16 = "bfloat16" in name
        assert cut == pytest.approx(loss, rel=1e-3 if bf16 else 1e-6)
        assert worst <= (2e-2 if bf16 else 1e-6)
        assert calls == [1, 1, 6, 6]  # three pieces of two micro-batches, and again in backward


def test_activations_loss_chunks_of_a_model_without_head_loss_is_one_line(tmp):
    with (patch.object(configurator, "model_file", lambda name: SimpleNamespace(Model=nn.Linear)),
          pytest.raises(SystemExit, match="loss_chunks=2 .*model=gpt2 has no head_loss") as e):
        resolve(tiny(tmp, loss_chunks=2), ranks.World())
    assert "\n" not in str(e.value)


# -----------------------------------------------------------------------------
# activation_offload

OFFLOAD = dict(activation_checkpointing="full", activation_offload=True)


def backward(cfg, dtype, device=CPU):
    """A step of a GPT with dropout whose blocks are changed as cfg says: (its gradients, the
    blocks' inputs, what went through save_on_cpu, what save_on_cpu was asked for)."""
    gpt, inputs, packed, asked = plain_gpt(dropout=0.1).train(), [], [], []
    fsdp.checkpoint_activations(gpt, cfg, device)
    for block in gpt.blocks:
        block.register_forward_pre_hook(lambda block, args: inputs.append(args[0]))
    save_on_cpu = torch.autograd.graph.save_on_cpu

    def spy(**kwargs):
        asked.append(kwargs)
        hooks = save_on_cpu()  # nothing is pinned without a GPU
        pack = hooks.pack_hook
        hooks.pack_hook = lambda t: packed.append(t) or pack(t)
        return hooks

    idx = torch.arange(32).view(2, 16)
    torch.manual_seed(0)
    with (patch.object(torch.autograd.graph, "save_on_cpu", spy),
          torch.autocast("cpu", dtype, enabled=dtype != torch.float32)):
        loss = gpt(idx, idx)[1]
    loss.backward()
    return [p.grad for p in gpt.parameters()], inputs, packed, asked


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_offload_moves_the_blocks_inputs_and_no_weights(tmp, dtype):
    """Neither parameters nor autocast's copies of them; and backward gets the same numbers."""
    grads, inputs, packed, _ = backward(tiny(tmp, **OFFLOAD), dtype)
    packed = [t for t in packed if t.numel()]  # checkpoint saves an empty tensor too
    assert [t.data_ptr() for t in packed] == [x.data_ptr() for x in inputs]
    assert [t.nbytes for t in packed] == 3 * [2 * 16 * 30 * 4]
    for how in ("full", "selective", "none"):
        expected, _, packed, _ = backward(tiny(tmp, activation_checkpointing=how), dtype)
        assert packed == []
        assert all(map(torch.equal, grads, expected))


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:1", "mps"])
def test_activations_offload_pins_memory_for_cuda_only(tmp, device):
    _, _, _, asked = backward(tiny(tmp, **OFFLOAD), torch.float32, torch.device(device))
    assert asked == 3 * [dict(pin_memory=device.startswith("cuda"))]


# -----------------------------------------------------------------------------
# what else changes how a step's numbers are kept and sent


def case_reduce(tmp, **keys):
    """Gradients of one step by ddp in reduce_dtype, and the dtypes that were all-reduced."""
    cfg = tiny(tmp, strategy="ddp", grad_clip=0.0, **keys)
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
    cases = {d: (case_reduce, dict(tmp=tmp, reduce_dtype=d)) for d in dtypes}
    cases["mixed"] = case_reduce, dict(tmp=tmp, reduce_dtype="float16", dtype="bfloat16")
    results = on_ranks(2, cases)
    assert values(results, "mixed")[0][0] == ["torch.float16"]
    exact = values(results, "float32")[0][1]
    for dtype, precision in (("bfloat16", 2**-7), ("float16", 2**-9)):
        a, b = values(results, dtype)
        assert a[0] == [f"torch.{dtype}"] and a == b
        for ours, theirs in zip(a[1], exact):
            ours, theirs = torch.tensor(ours), torch.tensor(theirs)
            assert 0 < (ours - theirs).norm() <= precision * theirs.norm() + 1e-6


def case_storages(tmp):
    """The first gradient of a micro-batch that is not reduced; how many storages hold the gradients
    when each micro-batch of two steps is fetched."""
    cfg = tiny(tmp, strategy="ddp", gradient_accumulation_steps=6)
    world = ranks.setup(cfg.device, cfg.backend)
    cfg = resolve(cfg, world)
    wrapped, model, optimizer = train.build(cfg, world)
    batches, scaler, counts = Batches(cfg, world), torch.amp.GradScaler("cpu", enabled=False), []
    make_state(optimizer)  # as a resumed run does
    require_gradients(model, batches.train(0, 0), cfg, world)  # as every run
    fsdp.set_grad_sync(wrapped, cfg, is_last_micro_batch=False)
    wrapped(*batches.train(0, 0))[1].backward()
    own = next(model.parameters()).grad.norm().item()
    optimizer.zero_grad(set_to_none=False)

    def fetch(step, micro):
        grads = [p.grad for p in model.parameters()]
        counts.append(len({g if g is None else g.untyped_storage().data_ptr() for g in grads}))
        return batches.train(step, micro)

    batch = batches.train(0, 0)
    for step in range(2):
        _, _, batch = train.train_step(wrapped, optimizer, scaler, SimpleNamespace(train=fetch),
                                       batch, step, cfg, world)
    return own, counts


def test_ddp_keeps_gradients_in_its_buckets_only(tmp):
    """From the first micro-batch on: beside the buckets they would take 4 bytes a parameter. And
    reduces none but the last's: not in the first step either, or resuming would round otherwise."""
    results = on_ranks(2, {"ddp": (case_storages, dict(tmp=tmp))})
    (own, counts), (other, same) = values(results, "ddp")
    assert counts == same == 6 * [1]  # the tiny model's fit one bucket
    assert own != other


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

"""
What is kept for backward: the loss in chunks, what checkpointing keeps, the blocks' inputs in host
memory.

    python -m pytest -q tests/test_activations.py
"""

from collections import Counter
from unittest.mock import patch

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from training import plain_gpt

import activations

# -----------------------------------------------------------------------------
# the loss in chunks


def test_activations_only_one_chunk_of_logits_exists():
    """Three chunks of 13 tokens, in bf16. (In fp32 every mode has them: test_fsdp.py's pairs.)"""
    gpt, saved = plain_gpt(), []
    idx = torch.arange(3 * 13).view(3, 13)
    targets = idx.masked_fill(torch.arange(13) % 3 == 1, -1)
    targets[0, :7] = -1  # a chunk has fewer that count than another
    with torch.autocast("cpu", torch.bfloat16):
        gpt.lm_head.register_forward_hook(lambda head, args, out: setattr(head, "out", out))
        gpt(idx, targets)  # whose logits are detached
        logits = gpt.lm_head.out.float().flatten(0, 1)
        expected = F.cross_entropy(logits, targets.flatten(), ignore_index=-1)
        grads = torch.autograd.grad(expected, [*gpt.parameters()])
        gpt.loss_chunks = 3
        with (patch.object(F, "cross_entropy", wraps=F.cross_entropy) as calls,
              torch.autograd.graph.saved_tensors_hooks(
                  lambda t: saved.append(t.shape) or t, lambda t: t)):
            logits, loss = gpt(idx, targets)
            kept = [shape for shape in saved if shape[-1:] == (67,)]
            loss.backward()
    assert logits is None and set(kept) <= {(30, 67)}  # the head's weight, and no logits
    sizes = [len(call.args[0]) for call in calls.call_args_list]
    assert sorted(sizes) == 2 * [3 * 3] + 4 * [3 * 5]  # again in backward
    assert loss.dtype == torch.float32 and loss.item() == pytest.approx(expected.item(), rel=1e-4)
    for p, grad in zip(gpt.parameters(), grads):
        assert (p.grad - grad).norm() <= 2e-2 * (grad.norm() + 1e-3)


# -----------------------------------------------------------------------------
# activation_checkpointing, activation_offload


class Listen(TorchDispatchMode):
    """With Listen() as ran: a Counter of the operators that run inside."""

    def __enter__(self):
        super().__enter__()
        self.ran = Counter()
        return self.ran

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.ran[op.overloadpacket] += 1
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype, bias, products", [
    (torch.float32, True, ["addmm", "_scaled_dot_product_flash_attention_for_cpu"]),
    (torch.bfloat16, False, ["mm", "_scaled_dot_product_flash_attention_for_cpu"])])
def test_activations_selective_runs_only_the_cheap_parts_again(dtype, bias, products):
    """Such as GELU; full runs matrix products and attention again too."""
    idx, ran = torch.arange(32).view(2, 16), {}
    for mode in ("none", "selective", "full"):
        gpt = plain_gpt(bias=bias)
        activations.checkpoint_activations(gpt.blocks, mode)
        with Listen() as ran[mode], torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            gpt(idx, idx)[1].backward()
    selective, full = (set(ran[mode] - ran["none"]) for mode in ("selective", "full"))
    assert torch.ops.aten.gelu in selective & full
    assert selective.isdisjoint(activations.PRODUCTS)
    assert full & activations.PRODUCTS == {getattr(torch.ops.aten, name) for name in products}


def backward(dtype, *how):
    """A step of a GPT with dropout whose blocks are checkpointed so: (its gradients, the blocks'
    inputs, what went through save_on_cpu)."""
    gpt, inputs, packed = plain_gpt(dropout=0.1).train(), [], []
    if how:
        activations.checkpoint_activations(gpt.blocks, *how)
    for block in gpt.blocks:
        block.register_forward_pre_hook(lambda block, args: inputs.append(args[0]))
    save_on_cpu = torch.autograd.graph.save_on_cpu

    def spy(pin_memory):
        assert pin_memory  # as it was told
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
    return [p.grad for p in gpt.parameters()], inputs, packed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_offload_moves_the_blocks_inputs_and_no_weights(dtype):
    """Neither parameters nor autocast's copies of them; and backward gets the same numbers."""
    grads, inputs, packed = backward(dtype, "full", True, True)
    packed = [t for t in packed if t.numel()]  # checkpoint saves an empty tensor too
    assert [t.data_ptr() for t in packed] == [x.data_ptr() for x in inputs]
    assert [t.nbytes for t in packed] == 3 * [2 * 16 * 30 * 4]
    for how in (["full"], ["selective"], []):
        expected, _, packed = backward(dtype, *how)
        assert packed == []
        assert all(map(torch.equal, grads, expected))


def test_activations_all_blocks_that_train_are_checkpointed_and_no_frozen_prefix():
    """Also the first of them, whose input needs no gradient."""
    gpt, ran = plain_gpt(), Counter()
    for name, p in gpt.named_parameters():
        p.requires_grad_("h.1" in name or "h.2" in name)
    for i, block in enumerate(gpt.blocks):
        block.ln_1.register_forward_hook(lambda *args, i=i: ran.update([i]))
    activations.checkpoint_activations(gpt.blocks, "full")
    idx = torch.arange(32).view(2, 16)
    gpt(idx, idx)[1].backward()
    assert ran == {0: 1, 1: 2, 2: 2}

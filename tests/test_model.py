"""
The GPT against the formulas of the paper, its initial values, and the text it generates. What any
model file must do is in test_contract.py.

    python -m pytest -q tests/test_model.py
"""

import math

import pytest
import torch
from torch.nn import functional as F
from training import plain_gpt

import model
import sample
from model import attend


def small_gpt(**sizes):
    return plain_gpt(seed=1, **{**dict(n_layer=2, n_head=2, n_embd=16, block_size=12), **sizes})


def test_model_matches_hand_written_gpt2():
    """Forward, with nothing but matrix products."""
    gpt = small_gpt()
    sd = {k: torch.randn_like(v) * 0.3 for k, v in gpt.state_dict().items()}
    sd["lm_head.weight"] = sd["transformer.wte.weight"]
    gpt.load_state_dict(sd)
    idx = torch.randint(67, (2, 12))

    def norm(x, name):
        x = x - x.mean(-1, keepdim=True)
        x = x / (x.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
        return x * sd[name + ".weight"] + sd[name + ".bias"]

    def linear(x, name):
        return x @ sd[name + ".weight"].T + sd[name + ".bias"]

    future = torch.ones(12, 12).triu(1) > 0
    x = sd["transformer.wte.weight"][idx] + sd["transformer.wpe.weight"][:12]
    for i in range(2):
        block = f"transformer.h.{i}."
        qkv = linear(norm(x, block + "ln_1"), block + "attn.c_attn").split(16, dim=2)
        q, k, v = (t.view(2, 12, 2, 8).transpose(1, 2) for t in qkv)  # (B, nh, T, hs)
        scores = (q @ k.transpose(2, 3) / math.sqrt(8)).masked_fill(future, -math.inf)
        y = (scores.softmax(-1) @ v).transpose(1, 2).reshape(2, 12, 16)
        x = x + linear(y, block + "attn.c_proj")
        h = linear(norm(x, block + "ln_2"), block + "mlp.c_fc")
        gelu = 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h ** 3)))
        x = x + linear(gelu, block + "mlp.c_proj")
    expected = norm(x, "transformer.ln_f") @ sd["transformer.wte.weight"].T
    assert torch.allclose(gpt(idx, idx)[0], expected, atol=1e-4)


def test_model_cpu_bf16_attention_equals_sdpa():
    q, k, v = (torch.randn(2, 3, 64, 8, requires_grad=True) for _ in range(3))
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    got = attend(q.bfloat16(), k.bfloat16(), v.bfloat16(), 0.0)
    assert (got.float() - expected).abs().max() < 0.05
    a = torch.autograd.grad(expected.sum(), (q, k, v))
    b = torch.autograd.grad(got.float().sum(), (q, k, v))
    assert all((x - y).abs().max() < 0.1 for x, y in zip(a, b))


def test_model_initialization_covers_all_and_follows_the_table():
    gpt = small_gpt(n_embd=128, n_head=4, vocab_size=512, block_size=64)
    for name, p in gpt.named_parameters():
        if name.endswith("bias"):
            assert (p == 0).all()
        elif ".ln_" in name:
            assert (p == 1).all()
        else:
            std = 0.02 / math.sqrt(4) if "c_proj" in name else 0.02
            assert abs(p.std().item() / std - 1) < 0.05
            assert abs(p.mean().item()) < std / 10
    with pytest.raises(ValueError, match="no initial value"):
        gpt.initial_value("transformer.rotary.weight", (2, 2), 0)
    with pytest.raises(ValueError, match="no initial value"):  # a matrix, not zeros for its name
        gpt.initial_value("transformer.h.0.attn.bias", (2, 2), 0)


@pytest.mark.parametrize("shape", [(7,), (1, 9), (10, 3), (4, 30), (5, 2, 3)])
def test_model_rows_of_an_initial_value_are_those_of_the_whole(monkeypatch, shape):
    monkeypatch.setattr(model.normal, "chunk", 8)
    value = model.normal(shape, 0.02, key=(1, "name"))
    whole = value[:]
    assert whole.shape == shape and whole.unique().numel() == whole.numel()
    for a in range(len(whole) + 2):
        for b in range(a, len(whole) + 2):
            assert torch.equal(value[a:b], whole[a:b])


def test_model_generate_draws_from_the_top_k_of_the_real_vocabulary():
    gpt = small_gpt()
    prompt = torch.zeros(64, 1, dtype=torch.long)

    def drawn(temperature):
        generator = torch.Generator().manual_seed(0)
        options = dict(vocab_size=50, generator=generator)
        return sample.generate(gpt, prompt, 1, temperature, 3, **options)[:, 1]

    allowed = gpt(prompt[:1])[0][0, 0, :50].topk(3).indices
    for temperature in (0.8, 2.0):
        out = drawn(temperature)
        assert set(out.tolist()) == set(allowed.tolist())
        assert torch.equal(out, drawn(temperature))
    for temperature in (0, 1e-300):
        assert drawn(temperature).unique().tolist() == [allowed[0]]

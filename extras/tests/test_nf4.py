"""
A base of 4 bits: bitsandbytes' bytes, and a plain layer's numbers. Its runs are in test_lora.py.

    pip install bitsandbytes transformers peft && python -m pytest -q extras/tests/test_nf4.py
"""

import copy
import os
from unittest.mock import patch

import numpy as np
import pytest
import torch
from harness import on_ranks, refused, values
from torch import nn
from training import built, no_compiler, read_ckpt, resident, run_training, tiny

from data.loader import TokenFiles
from extras import huggingface, lora, nf4
from ranks import World

KEYS = dict(n_embd=64, n_head=4, model="gpt2+lora", base_bits=4, lora_rank=4, learning_rate=3e-3)
FULL_SHARD = dict(strategy="full_shard")


def test_nf4_bytes_are_the_nearest_of_the_published_levels():
    """QLoRA's appendix E: quantiles of the normal distribution, and a zero."""
    below, above = (torch.special.ndtri(torch.linspace(0.9677083, 0.5, n, dtype=torch.float64)[:-1])
                    for n in (8, 9))
    levels = torch.cat([-below, torch.zeros(1), above.flip(0)]).numpy() / above.max().item()
    assert np.abs(nf4.LEVELS.numpy() - levels).max() < 1e-6
    w = np.random.default_rng(1).normal(size=(3, 128)).astype(np.float32)
    packed = nf4.pack(torch.tensor(w))
    for row, ours, back in zip(w, packed, nf4.unpack(packed, torch.float32)):
        scales = [np.abs(block).max() for block in (row[:64], row[64:])]
        sizes = np.repeat(scales, 64)
        codes = np.abs(row / sizes - levels[:, None]).argmin(axis=0)
        halves = [16 * first + second for first, second in zip(codes[::2], codes[1::2])]
        assert ours.tolist() == halves + [*np.array(scales, "<f4").tobytes()]
        assert np.allclose(back, levels[codes] * sizes, atol=1e-6)
    assert torch.equal(nf4.pack(torch.tensor(w[1:2])), packed[1:2])  # a rank packs its rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nf4_bytes_and_values_are_bitsandbytes(dtype):
    functional = pytest.importorskip("bitsandbytes.functional")
    w = torch.randn(96, 256).to(dtype)
    w[5, 64:128] = 0
    packed = nf4.pack(w)
    codes, state = functional.quantize_4bit(w, blocksize=64, quant_type="nf4")
    assert torch.equal(packed[:, :128].flatten(), codes.flatten())
    assert torch.equal(packed[:, 128:].contiguous().view(torch.float32).flatten(), state.absmax)
    assert torch.equal(nf4.unpack(packed, dtype), functional.dequantize_4bit(codes, state))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nf4_layer_is_a_plain_one_bit_for_bit(dtype, compiled):
    """Output and gradient of x, under autocast too. In between it keeps its bytes alone."""
    torch.manual_seed(1)
    plain = nn.Linear(128, 96).requires_grad_(False)
    layer = copy.deepcopy(plain)
    nf4.convert([layer])
    plain.weight.copy_(nf4.unpack(layer.weight, torch.float32))
    found, kept = [], []
    for each in (plain, layer):
        x = torch.randn(2, 5, 128, generator=torch.Generator().manual_seed(2)).requires_grad_()
        with no_compiler(), torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            y = (torch.compile(each, fullgraph=True) if compiled else each)(x)
        y.float().square().sum().backward()
        found.append((y.dtype, y.tolist(), x.grad.tolist()))
    assert found[0] == found[1] and found[0][0] == dtype
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        layer(x)
    assert [t.data_ptr() for t in kept] == [layer.weight.data_ptr()]


def case_memory(tmp):
    """(growth of this process's peak while it draws and packs, the largest layer), in bytes."""
    built(tmp, **KEYS, **FULL_SHARD)  # what PyTorch loads once
    before = resident("VmRSS", reset=True)
    built(tmp, **{**KEYS, **FULL_SHARD, "n_layer": 1, "n_embd": 2048})
    return resident("VmHWM") - before, 4 * 8192 * 2048


@pytest.mark.skipif(torch.__version__ < "2.12", reason="FSDP2 refuses integers")
def test_nf4_no_rank_holds_a_layer_beyond_its_rows(tmp):
    """Packing takes about four times a quarter of a layer; the layers in fp32 are three whole."""
    for growth, layer in values(on_ranks(4, {"memory": (case_memory, dict(tmp=tmp))}), "memory"):
        assert growth < 2 * layer


def test_nf4_says_what_has_4_bits_and_who_cannot_shard_it(tmp):
    run = built(tmp, **{**KEYS, "model": "llama+lora", "n_inner": 100})
    packed = 3 * 36 * (2 * 64 + 2 * 16 + 2 * 100)  # of 64 inputs each; down_proj has 100
    size = packed + 4 * (3 * 64 * 100 + 7 * 64 + 2 * 67 * 64)
    assert [*run.model.describe()] == [
        f"the base takes {size / 2**20:,.1f} MiB, with 4 bits in 18 of its layers"]
    run_training(tmp, "nf4-base", max_iters=1, n_embd=64, n_head=4)
    cfg = tiny(tmp, **KEYS, **FULL_SHARD, base=os.path.join(tmp, "nf4-base"))
    with patch.object(torch, "__version__", "2.11.0"):
        assert "from torch 2.12 on" in refused(lora.open_base, "gpt2", cfg, World(), True)


@pytest.mark.slow
def test_nf4_exports_for_peft_beside_bitsandbytes_and_merged(tmp, tmp_path, capsys):
    """peft has our loss, but that bitsandbytes rounds its scales on some CPUs. Added to the base as
    it was, the adapters have another loss."""
    transformers, peft, _ = map(pytest.importorskip, ("transformers", "peft", "bitsandbytes"))
    from test_huggingface import make_hf
    hf, out, adapter, merged = (str(tmp_path / name) for name in ("hf", "out", "adapter", "merged"))
    make_hf(tmp_path / "hf", "llama3", hidden_size=192, intermediate_size=256, vocab_size=67)
    sizes = dict(n_layer=2, n_head=6, n_kv_head=2, n_embd=192, n_inner=256, rope_theta=5e5)
    run = {**KEYS, **sizes, "model": "llama+lora", "base": hf}
    run_training(tmp, out, eval_iters=1000, **run)
    huggingface.main([out, adapter, "--adapter"])
    huggingface.main([out, merged])
    assert "not to its 4 bits" in capsys.readouterr().out
    bits = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    base = transformers.AutoModelForCausalLM.from_pretrained(
        hf, quantization_config=bits, dtype=torch.float32)
    files = TokenFiles(f"{tmp}/toy", "val", 16, 67)
    x, y = files.batch(range(len(files)))
    beside, added = (nn.functional.cross_entropy(model(x).logits.flatten(0, 1), y.flatten()).item()
                     for model in (peft.PeftModel.from_pretrained(base, adapter),
                                   transformers.AutoModelForCausalLM.from_pretrained(merged)))
    expected = read_ckpt(out)["best_val_loss"]
    assert beside == pytest.approx(expected, rel=1e-3)
    assert 0.01 < abs(added / expected - 1) < 0.1

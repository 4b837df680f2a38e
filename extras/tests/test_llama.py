"""
llama.py: rotary positions, grouped heads, initial values, sizes; and a run from one Hugging Face
directory to another. Its logits are compared in test_huggingface.py, and that it trains alike in
every mode, resumes and generates in test_contract.py.

    python -m pytest -q extras/tests/test_llama.py
"""

import json
import os
import re

import pytest
import torch
from harness import flags, on_ranks, script, values
from test_hf_tokenizer import make
from test_huggingface import make_hf
from test_prepare import run_prepare
from torch.nn import functional as F
from training import launch, plain_model, read_ckpt, resident, started, tiny

import checkpoint
import train
from configurator import load_config, resolve
from data.files import open_tokens
from data.loader import TokenFiles, read_meta
from extras import llama
from extras.llama import attend_in_groups
from ranks import setup

transformers = pytest.importorskip("transformers")

IDX = torch.arange(16)[None]


@pytest.mark.parametrize("T, dtype, limit", [
    (64, torch.bfloat16, 0.05), (600, torch.bfloat16, 0.05), (64, torch.float32, 1e-5)])
def test_llama_grouped_heads_equal_expanded_ones(T, dtype, limit):
    """In half precision PyTorch groups them itself, on short sequences a CPU does not."""
    q = torch.randn(2, 6, T, 8).to(dtype)
    k, v = (torch.randn(2, 2, T, 8).to(dtype) for _ in range(2))
    scores = q.float() @ k.float().repeat_interleave(3, 1).mT / 8**0.5
    weights = scores.masked_fill(torch.ones(T, T).triu(1) > 0, -torch.inf).softmax(-1)
    expected = weights @ v.float().repeat_interleave(3, 1)
    assert (attend_in_groups(q, k, v).float() - expected).abs().max() < limit


def case_memory(path):
    """(growth of this process's peak while it loads, the largest parameter, all), in bytes."""
    world = setup("cpu", "auto")
    argv = [f"--init_from={path}", "--strategy=full_shard", "--compile=False", "--dtype=float32"]
    cfg, source, _ = started(resolve(load_config([*argv, "--device=cpu"]), world), world)
    model = train.meta_model(cfg)
    train.parallelize(model, cfg, world)
    for p in model.parameters():
        p.detach().to_local().zero_()  # this rank's rows are in memory before
    before = resident("VmRSS", reset=True)
    checkpoint.load(source, model, None, world)
    growth = resident("VmHWM") - before
    sizes = [4 * p.numel() for p in model.parameters()]
    return growth, max(sizes), sum(sizes)


def test_llama_loading_takes_the_memory_of_one_tensor(tmp_path):
    """In fp32, and of the file's, in bf16, which is mapped."""
    sizes = dict(hidden_size=512, intermediate_size=1024, vocab_size=40000, num_attention_heads=4)
    model = make_hf(tmp_path / "small", "llama3", **sizes)
    model.to(torch.bfloat16).save_pretrained(tmp_path, max_shard_size="100MB")
    found = on_ranks(2, {"memory": (case_memory, dict(path=str(tmp_path)))})
    for growth, largest, whole in values(found, "memory"):
        assert whole > 2 * largest > 160e6
        assert growth <= 2.25 * largest


def test_llama_angles_and_turns_are_fp32_in_bf16(tmp):
    config = plain_model(tiny(tmp, model="llama")).config
    x = torch.randn(1, 1, 500, 64).bfloat16()
    cos, sin = llama.rotation(1500, 500, 64, config, "cpu")
    assert cos.dtype == sin.dtype == torch.float32
    a, b = x.double().chunk(2, -1)
    turned = torch.view_as_real(torch.complex(a, b) * torch.complex(cos, sin).to(torch.cdouble))
    expected = torch.cat(turned.unbind(-1), -1).bfloat16()
    assert (llama.rotate(x, cos, sin) != expected).float().mean() < 0.01  # rounded once


def test_llama_initial_values_and_norms(tmp):
    sizes = dict(n_embd=192, n_inner=512, qk_norm=True, qkv_bias=True, norm_eps=1e-3)
    model = plain_model(tiny(tmp, model="llama", **sizes))
    assert {m.eps for m in model.modules() if isinstance(m, torch.nn.RMSNorm)} == {1e-3}
    for name, p in model.named_parameters():
        if p.dim() == 1:
            assert (p == name.endswith("norm.weight")).all()
        else:
            std = 0.02 / 6**0.5 if re.search("o_proj|down_proj", name) else 0.02
            assert abs(p.std().item() / std - 1) < 0.05, name
    with pytest.raises(ValueError):  # rotary positions have no end, so nothing else would say it
        model(torch.zeros(1, model.config.block_size + 1, dtype=torch.long))


# ---------- from one Hugging Face directory to another ------------------------


SENTENCES = [f"the {a} {b} {c} the {d}" for a in ("quick", "lazy", "old") for b in ("fox", "dog")
             for c in ("sees", "hears") for d in ("cat", "sun", "sea", "hill")]


def val_loss(model, data):
    """transformers' own, over the windows of val.bin."""
    files = TokenFiles(data, "val", 32, 360)
    x, y = files.batch(range(len(files)))
    logits = model(x).logits.detach()
    return F.cross_entropy(logits.flatten(0, 1), y.flatten()).item()


def test_llama_from_hugging_face_and_back(tmp_path):
    """prepare with their tokenizer, fine-tune on 2 ranks full_shard, sample, export: no network."""
    hf_dir, data, out, back = (tmp_path / name for name in ("hf", "data", "out", "back"))
    hf = make(hf_dir, "{{ messages }}", learned=SENTENCES)
    end = hf.token_to_id("<|im_end|>")
    theirs = make_hf(hf_dir, "smollm2", vocab_size=360, eos_token_id=end, bos_token_id=0)  # padded
    assert hf.get_vocab_size() < 360
    transformers.GenerationConfig(eos_token_id=[end, 7], max_new_tokens=9).save_pretrained(hf_dir)
    chats = "".join(json.dumps(dict(q=s, a=s[::-1])) + "\n" for s in SENTENCES)
    (tmp_path / "chats.jsonl").write_text(chats)
    run_prepare(["x", tmp_path / "chats.jsonl", f"--out={tmp_path}/made", f"--tokenizer={hf_dir}",
                 "--template=Q: {q}\nA: {a}", "--val_fraction=0.2"])
    os.rename(tmp_path / "made", data)  # it is whole without the model's directory
    first = hf.encode(f"Q: {SENTENCES[0]}\nA: {SENTENCES[0][::-1]}").ids + [end]
    assert open_tokens(data / "train.bin")[:len(first)].tolist() == first
    meta = {"vocab_size": hf.get_vocab_size(), "tokenizer": "tokenizer.json"}
    assert read_meta(data).items() >= meta.items()

    run = dict(dataset=data, out_dir=out, init_from=hf_dir, block_size=32, batch_size=2,
               gradient_accumulation_steps=4, max_iters=6, eval_interval=6, eval_iters=50,
               learning_rate=1e-2, warmup_iters=0, dtype="float32", compile=False, device="cpu",
               strategy="full_shard")
    said = launch(2, flags(**run)).stdout
    # it resumes, although its data has fewer tokens than its padded vocabulary
    said += launch(2, flags(**{**run, "init_from": "resume", "max_iters": 7})).stdout
    first, _, again, last = (float(x) for x in re.findall(r"val loss ([\d.]+)", said))
    assert "at step 6" in said and last < again < first - 0.1
    assert val_loss(theirs, data) == pytest.approx(first, abs=1e-4)
    assert read_ckpt(out)["model_args"]["vocab_size"] == 360

    p = script("extras/huggingface.py", out, back)
    assert p.returncode == 0, p.stderr
    model = transformers.AutoModelForCausalLM.from_pretrained(back).eval()
    assert val_loss(model, data) == pytest.approx(last, abs=1e-4)
    # it stops where theirs stops, and reads as far, though it was trained on 32 tokens
    for key in ("eos_token_id", "bos_token_id", "max_position_embeddings"):
        assert getattr(model.config, key) == getattr(theirs.config, key)
    for file in ("generation_config.json", "tokenizer.json", "chat_template.jinja"):
        assert (back / file).read_text() == (hf_dir / file).read_text()
    for source in (f"--out_dir={out}", f"--init_from={back}"):  # it has a tokenizer too
        p = script("sample.py", source, "--num_samples=1", "--max_new_tokens=20",
                   "--dtype=float32", "--start=the quick fox")
        assert p.returncode == 0 and p.stdout.startswith("the quick fox"), p.stderr

"""
llama.py: rotary positions, grouped heads, sizes; tokenizers of the `tokenizers` library; and a run
from one Hugging Face directory to another. Its logits are compared in test_huggingface.py, and
that it trains alike in every mode, resumes and generates in test_contract.py.

    python -m pytest -q tests/test_llama.py
"""

import json
import os
import re
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from harness import (
    HERE,
    Ranks,
    arguments,
    assert_same_weights,
    built,
    flags,
    launch,
    losses,
    on_ranks,
    plain_model,
    read_ckpt,
    refused,
    resident,
    script,
    started,
    tiny,
    values,
)
from test_data import gpt2_or_skip
from test_huggingface import make_hf
from torch.nn import functional as F

import checkpoint
import fsdp
import sample
import train
from configurator import load_config, resolve
from data.files import open_tokens
from data.loader import TokenFiles, read_meta
from data.prepare import Job, chunks, encode
from data.tokenizer import encoder, tokenizer
from extras import llama
from extras.huggingface import byte_level, understand
from extras.llama import attend_in_groups
from ranks import setup

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

IDX = torch.arange(16)[None]


def case_bf16_rotation(tmp):
    """Types that rotate() sees under FSDP's bf16 policy, and the loss."""
    run = built(tmp, model="llama", strategy="full_shard", dtype="bfloat16")
    with patch.object(llama, "rotate", side_effect=llama.rotate) as rotate:
        loss = run.wrapped(IDX, IDX)[1].item()
    seen = {tuple(str(t.dtype) for t in call.args) for call in rotate.call_args_list}
    return sorted(seen), loss


def test_llama_stretches_wavelengths_as_llama_3_1_does(tmp):
    """In tokens: up to 2,048 not at all, from 8,192 on by the factor, between in proportion to the
    turns that 8,192 tokens make."""
    config = plain_model(tiny(tmp, model="llama", rope_theta=5e5)).config
    angles = []
    for factor in (1.0, 8.0):
        one = llama.rotation(1, 1, 128, replace(config, rope_factor=factor), "cpu")
        angles.append(torch.atan2(one[1][0], one[0][0]))  # of the first token, in (64,) frequencies
    length = 2 * torch.pi / angles[0]
    share = ((8192 / length - 1) / 3).clamp(0, 1)
    kept, stretched = length < 2048, length > 8192
    assert kept.sum() > 20 and stretched.sum() > 20 and (kept | stretched).sum() < 64
    ratio = angles[1] / angles[0]
    assert torch.allclose(ratio, share + (1 - share) / 8, rtol=1e-4)
    assert (ratio[kept] == 1).all() and torch.allclose(ratio[stretched], torch.tensor(1 / 8))


def test_llama_angles_stay_fp32_under_fsdps_bf16(tmp):
    expected = plain_model(tiny(tmp, model="llama"))(IDX, IDX)[1].item()
    results = on_ranks(2, {"bf16": (case_bf16_rotation, dict(tmp=tmp))})
    for seen, loss in values(results, "bf16"):
        assert seen == [["torch.bfloat16", "torch.float32", "torch.float32"]]
        assert loss == pytest.approx(expected, rel=1e-2)


def test_llama_cache_holds_the_heads_of_keys_only(tmp):
    model = plain_model(tiny(tmp, model="llama", n_kv_head=1))
    cache = [sample.KVCache() for _ in model.blocks]
    for tokens in (IDX, IDX[:, :1]):
        model(tokens[:, :15], cache=cache)
    assert [c.k.shape for c in cache] == [(1, 1, 16, 10)] * 3


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


@pytest.mark.parametrize("dtype, grouped", [
    (torch.bfloat16, True), (torch.float16, False), (torch.float32, False)])
def test_llama_heads_are_grouped_only_where_flash_attention_does_it(dtype, grouped):
    """float16 is for GPUs before sm80, without it: they would keep T x T scores."""
    q, k = torch.randn(2, 6, 300, 10).to(dtype), torch.randn(2, 2, 300, 10).to(dtype)
    with patch.object(F, "scaled_dot_product_attention") as kernel:
        attend_in_groups(q, k, k)
    assert kernel.call_args.kwargs.get("enable_gqa", False) is grouped
    assert kernel.call_args.args[1].size(1) == (2 if grouped else 6)


def test_llama_attention_stays_in_bf16_where_autocast_runs_rmsnorm_in_fp32(tmp):
    """As CUDA's does: fp32 queries would leave flash attention."""
    model = plain_model(tiny(tmp, model="llama", qk_norm=True))
    norm, seen = F.rms_norm, []

    def attention(q, k, v):
        seen.append((q.dtype, k.dtype, v.dtype))
        return attend_in_groups(q, k, v)

    with (patch.object(F, "rms_norm", lambda x, *args: norm(x.float(), *args)),
          patch("extras.llama.attend_in_groups", attention), torch.autocast("cpu", torch.bfloat16)):
        model(IDX, IDX)
    assert set(seen) == {(torch.bfloat16,) * 3}


def test_llama_initial_values_cover_all(tmp):
    sizes = dict(n_embd=192, n_inner=512, qk_norm=True, qkv_bias=True, norm_eps=1e-3)
    model = plain_model(tiny(tmp, model="llama", **sizes))
    assert {m.eps for m in model.modules() if isinstance(m, torch.nn.RMSNorm)} == {1e-3}
    for name, p in model.named_parameters():
        if name.endswith("norm.weight"):
            assert (p == 1).all()
        elif name.endswith("bias"):
            assert (p == 0).all()
        else:
            std = 0.02 / 6**0.5 if re.search("o_proj|down_proj", name) else 0.02
            assert abs(p.std().item() / std - 1) < 0.05, name
    with pytest.raises(ValueError, match="no initial value"):
        model.initial_value("model.bias.weight", (2, 2), 0)


def test_llama_configs_have_the_published_numbers():
    published = dict(  # of Llama 3's config.json
        model_type="llama", rope_scaling=None, rms_norm_eps=1e-5, max_position_embeddings=8192,
        num_attention_heads=32, num_hidden_layers=32, hidden_size=4096, intermediate_size=14336,
        hidden_act="silu", vocab_size=128256)
    llama3 = dict(published, num_key_value_heads=8, rope_theta=5e5, tie_word_embeddings=False)
    _, sizes = understand(llama3)
    cfg = load_config([os.path.join(HERE, "extras", "config", "llama3_8b.py")])
    assert {key: getattr(cfg.sizes, key) for key in sizes} == sizes
    assert understand(dict(llama3, head_dim=128))[1] == dict(sizes, head_dim=0)  # as in config/
    _, absent = understand(published)  # what transformers takes where a key is absent
    keys = "rope_theta", "n_kv_head", "tie_embeddings"
    assert [absent[key] for key in keys] == [1e4, 32, False]


@pytest.mark.parametrize("name, millions", [
    ("finetune_smollm2", 134.5), ("llama2_7b", 6738.4), ("llama2_70b", 68976.6),
    ("llama3_8b", 8030.3)])
def test_llama_configs_have_the_published_sizes(name, millions):
    model = train.meta_model(load_config([os.path.join(HERE, "extras", "config", f"{name}.py")]))
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.05)


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


@pytest.mark.parametrize("dtype, limit", [("float32", 1.7), ("bfloat16", 2.25)])
def test_llama_loading_takes_the_memory_of_one_tensor(tmp_path, dtype, limit):
    """In fp32, and of this rank's half; a file in bf16 is mapped, and cast on rank 0 only."""
    sizes = dict(hidden_size=512, intermediate_size=1024, vocab_size=40000, num_attention_heads=4)
    model = make_hf(tmp_path / "small", "llama3", **sizes)
    model.to(getattr(torch, dtype)).save_pretrained(tmp_path, max_shard_size="100MB")
    assert os.path.exists(tmp_path / "model.safetensors.index.json") == (dtype == "float32")
    cases = {"memory": (case_memory, dict(path=str(tmp_path)))}
    results = values(on_ranks(2, cases), "memory")
    for (growth, largest, whole), most in zip(results, (limit, 1.7)):
        assert whole > 2 * largest > 160e6
        assert growth <= most * largest


# ---------- tokenizers, and from one Hugging Face directory to another --------


SENTENCES = [f"the {a} {b} {c} the {d}" for a in ("quick", "lazy", "old") for b in ("fox", "dog")
             for c in ("sees", "hears") for d in ("cat", "sun", "sea", "hill")]


def make_tokenizer(path, end="</s>", more=()):
    """A tokenizer trained on the spot: byte-level BPE that begins a text with <s>."""
    hf = tokenizers.Tokenizer(tokenizers.models.BPE())
    hf.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    hf.decoder = tokenizers.decoders.ByteLevel()
    hf.train_from_iterator(SENTENCES, tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>", end], show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()))
    hf.add_tokens(list(more))
    hf.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", hf.token_to_id("<s>"))])
    os.makedirs(path, exist_ok=True)
    hf.enable_truncation(8)  # some files ask for it; a document is not cut
    hf.save(str(path / "tokenizer.json"))
    hf.no_truncation()
    return hf, hf.token_to_id(end)


def prepare(source, out, tokenizer, *argv):
    p = script("data/prepare.py", "x", source, f"--out={out}", f"--tokenizer={tokenizer}",
               *argv, HF_HUB_OFFLINE="1")
    assert p.returncode == 0, p.stderr


def val_loss(model, data):
    """transformers' own, over the windows of val.bin."""
    files = TokenFiles(data, "val", 32, 320)
    x, y = files.batch(range(len(files)))
    logits = model(x).logits.detach()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten()).item()


@pytest.mark.parametrize("freeze", ["", "embed_tokens"])
def test_llama_large_untied_embedding_is_a_unit_and_trains_as_on_one_rank(tmp, freeze):
    """Two micro-batches a rank; and frozen, where backward never comes to it."""
    sizes = dict(n_layer=2, n_head=2, n_kv_head=1, n_embd=8, n_inner=8, tie_embeddings=False)
    with torch.device("meta"):
        model = llama.Model(llama.ModelConfig(vocab_size=67, block_size=16, **sizes))
    assert fsdp.find_units(model, model.blocks)[0] is model.model.embed_tokens
    run = dict(model="llama", freeze=freeze, max_iters=4, gradient_accumulation_steps=4, **sizes)
    outs = [os.path.join(tmp, f"untied-{world}-{freeze}") for world in (1, 2)]
    for world, out in enumerate(outs, 1):
        launch(world, arguments(tmp, out, **run))
    assert losses(outs[1]) == pytest.approx(losses(outs[0]), rel=1e-5)
    assert_same_weights(*(read_ckpt(out)["model"] for out in outs), 1e-4)


def test_llama_from_hugging_face_and_back(tmp_path):
    """prepare with their tokenizer, fine-tune on 2 ranks full_shard, sample, export: no network."""
    hf_dir, data, out, back = (tmp_path / name for name in ("hf", "data", "out", "back"))
    hf, end = make_tokenizer(hf_dir)
    theirs = make_hf(hf_dir, "smollm2", vocab_size=320, eos_token_id=end, bos_token_id=0)  # padded
    transformers.GenerationConfig(eos_token_id=[end, 7], max_new_tokens=9).save_pretrained(hf_dir)
    (hf_dir / "tokenizer_config.json").write_text(json.dumps(dict(eos_token="</s>")))
    (hf_dir / "chat_template.jinja").write_text("{{ messages }}")
    chats = "".join(json.dumps(dict(q=s, a=s[::-1])) + "\n" for s in SENTENCES)
    (tmp_path / "chats.jsonl").write_text(chats)
    prepare(tmp_path / "chats.jsonl", tmp_path / "made", hf_dir, r"--template=Q: {q}\nA: {a}",
            "--val_fraction=0.2")
    os.rename(tmp_path / "made", data)  # it is whole without the model's directory
    both = [open_tokens(data / f"{split}.bin").tolist() for split in ("train", "val")]
    expected = [hf.encode(f"Q: {s}\nA: {s[::-1]}").ids + [end] for s in SENTENCES]
    assert sorted(sum(both, [])) == sorted(sum(expected, []))
    assert both[0][:len(expected[0])] == expected[0]
    assert read_meta(data) == {"vocab_size": hf.get_vocab_size(), "tokenizer": "tokenizer.json"}

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
    assert read_ckpt(out)["model_args"]["vocab_size"] == 320

    p = script("extras/huggingface.py", out, back)
    assert p.returncode == 0, p.stderr
    model = transformers.AutoModelForCausalLM.from_pretrained(back).eval()
    assert val_loss(model, data) == pytest.approx(last, abs=1e-4)
    # it stops where theirs stops, and reads as far, though it was trained on 32 tokens
    for key in ("eos_token_id", "bos_token_id", "max_position_embeddings"):
        assert getattr(model.config, key) == getattr(theirs.config, key)
    for file in ("generation_config.json", "tokenizer_config.json", "tokenizer.json",
                 "chat_template.jinja"):
        assert (back / file).read_text() == (hf_dir / file).read_text()

    for source in (f"--out_dir={out}", f"--init_from={back}"):  # it has a tokenizer too
        p = Ranks(1, sample.main, [source, "--num_samples=1", "--max_new_tokens=20",
                                   "--dtype=float32", "--start=the quick fox"]).finish()
        assert p.returncode == 0 and p.stdout.startswith("the quick fox"), p.stderr


def start_on(tmp_path, meta, *argv):
    """Begin a run from the model in hf/ on data with this meta.json, in data/."""
    (tmp_path / "data").mkdir(exist_ok=True)
    (tmp_path / "data" / "meta.json").write_text(json.dumps(meta))
    argv = argv or (f"--init_from={tmp_path}/hf",)
    argv = [*argv, f"--dataset={tmp_path}/data", "--device=cpu", f"--out_dir={tmp_path}/out"]
    world = setup("cpu", "auto")
    return started(resolve(load_config(argv), world), world)


@pytest.mark.parametrize("meta", [
    dict(tokenizer="bytes", vocab_size=257), dict(tokenizer="gpt2", vocab_size=50304),
    dict(chars=sorted(set("".join(SENTENCES))), vocab_size=19), dict(tokenizer="tokenizer.json")])
def test_tokenizer_of_the_data_is_the_models(tmp_path, meta):
    """Else nothing that the model has learned would count. A copy without one starts."""
    make_tokenizer(tmp_path / "hf")
    make_hf(tmp_path / "hf", "smollm2", vocab_size=320)
    other = tokenizers.Tokenizer(tokenizers.models.Unigram([(c, -1.0) for c in "<abcdefgh"], 0))
    other.save(str(tmp_path / "other.json"))
    os.makedirs(tmp_path / "data")
    if meta.get("tokenizer") == "tokenizer.json":
        os.rename(tmp_path / "other.json", tmp_path / "data" / "tokenizer.json")
    lora = "--model=llama+lora", f"--base={tmp_path}/hf"
    for argv in ((), lora):
        line = refused(start_on, tmp_path, meta, *argv)
        assert f"--tokenizer={tmp_path}/hf" in line and "another tokenizer" in line
        assert meta.get("tokenizer", "characters") in line
    (tmp_path / "hf" / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1")
    start_on(tmp_path, meta)
    os.remove(tmp_path / "hf" / "tokenizer.json")
    start_on(tmp_path, meta)
    start_on(tmp_path, meta, *lora)


def test_tokenizer_of_a_chat_model_is_its_bases(tmp_path):
    """With more tokens, a few of other names, and another start, end and template. And data that
    does not say which it has may have any."""
    make_hf(tmp_path / "hf", "smollm2", vocab_size=320)
    make_tokenizer(tmp_path / "hf", end="<|im_end|>", more=["<|im_start|>"])
    make_tokenizer(tmp_path / "data")
    text = json.loads((tmp_path / "data" / "tokenizer.json").read_text())
    renamed = dict(zip([*text["model"]["vocab"]][-5:], "vwxyz"))
    text["model"] = dict(type="WordLevel", unk_token="<s>", vocab={
        renamed.get(token, token) + "!" * (token in renamed): i
        for token, i in text["model"]["vocab"].items()})
    (tmp_path / "data" / "tokenizer.json").write_text(json.dumps(text))
    start_on(tmp_path, dict(tokenizer="tokenizer.json"))
    os.remove(tmp_path / "data" / "tokenizer.json")
    for meta in ({}, dict(vocab_size=320), dict(tokenizer=None)):
        start_on(tmp_path, meta)


@pytest.mark.parametrize("name", ["gpt2", "bytes"])
def test_tokenizer_of_an_export_is_that_of_its_data(tmp_path, monkeypatch, name):
    """As the hub's GPT-2 has tiktoken's."""
    if name == "gpt2":
        bpe = gpt2_or_skip(monkeypatch)
        tokens = [bpe.decode_single_token_bytes(i) for i in range(bpe.eot_token)]
    else:
        tokens = [bytes([i]) for i in range(256)]
    make_hf(tmp_path / "hf", "gpt2", vocab_size=len(tokens) + 1, n_embd=6)
    for file, content in byte_level(tokens, len(tokens) + 1)[0].items():
        (tmp_path / "hf" / file).write_bytes(content)
    for other in ("gpt2", "bytes"):
        meta = dict(tokenizer=other, vocab_size=len(tokens) + 1)
        if other == name:
            start_on(tmp_path, meta)
        else:
            assert f"another tokenizer, {other}" in refused(start_on, tmp_path, meta)


def test_tokenizer_of_a_large_vocabulary_makes_uint32_files(tmp_path):
    """llm.c's header, as its own data_common.py writes it for Llama 3: magic, version, count."""
    hf, end = make_tokenizer(tmp_path / "tok", more=[f"<|{i}|>" for i in range(70_000)])
    text, out = "the old dog <|69999|> " * 50, tmp_path / "out"
    (tmp_path / "a.txt").write_text(text)
    prepare(tmp_path / "a.txt", out, tmp_path / "tok" / "tokenizer.json", "--workers=1")
    found = []
    for split in ("train", "val"):
        head = np.fromfile(out / f"{split}.bin", np.int32, 256).tolist()
        tokens = np.fromfile(out / f"{split}.bin", np.uint32, offset=1024).tolist()
        assert head == [20240801, 7, len(tokens)] + 253 * [0]
        found += tokens
    assert found == [*hf.encode(text).ids, end] and max(found) == hf.get_vocab_size() - 1
    encode, decode, n = tokenizer(read_meta(out), out)
    assert n == hf.get_vocab_size() > 70_000 and decode(encode("the old dog")) == "the old dog"


def tokens_of(text, path):
    encoder.cache_clear()
    args = SimpleNamespace(tokenizer=str(path), template=None, column="text")
    job = Job(args, encoder(str(path)))
    chunk, = chunks([(0.5, [text])], job.key)
    *parts, _ = encode(chunk, job)
    return np.frombuffer(b"".join(parts), np.uint16).tolist()


def test_tokenizer_end_of_text_is_the_configs_or_a_usual_one(tmp_path):
    hf, end = make_tokenizer(tmp_path, end="<|im_end|>")
    assert "no end-of-text token" in refused(encoder, str(tmp_path))
    for eos in ("<|im_end|>", {"content": "<|im_end|>"}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
        assert tokens_of("the dog", tmp_path) == [*hf.encode("the dog").ids, end]
    hf.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A <|im_end|>", special_tokens=[("<|im_end|>", end)])
    hf.save(str(tmp_path / "tokenizer.json"))
    assert tokens_of("the dog", tmp_path).count(end) == 1  # it puts it there itself
    words = tokenizers.models.WordLevel({"the": 0, "</s>": 9}, unk_token="the")
    tokenizers.Tokenizer(words).save(str(tmp_path / "gaps.json"))
    gaps = encoder(str(tmp_path / "gaps.json"))
    assert (gaps.end, gaps.vocab_size) == (9, 10)  # the largest id counts, not how many


@pytest.mark.parametrize("vocab_size, tied, is_unit", [
    (9000, False, True), (9000, True, False), (200, False, False)])
def test_llama_units_are_blocks_and_a_large_embedding_that_is_not_tied(vocab_size, tied, is_unit):
    sizes = dict(n_layer=2, n_head=2, n_kv_head=2, n_embd=16, n_inner=64)
    with torch.device("meta"):
        model = llama.Model(llama.ModelConfig(
            vocab_size=vocab_size, tie_embeddings=tied, **sizes))
    expected = [model.model.embed_tokens] * is_unit + list(model.blocks)
    assert fsdp.find_units(model, model.blocks) == expected


@pytest.mark.parametrize("name, per_block", [
    ("llama2_7b", ["mlp"]),
    ("llama2_70b", ["self_attn", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"])])
def test_llama_units_by_size_are_the_published_wrapping(name, per_block):
    """FSDP1's size_based_auto_wrap_policy with 100,000,000 on Llama 2, as its users print it."""
    cfg = load_config([os.path.join(HERE, "extras", "config", f"{name}.py")])
    with torch.device("meta"):
        model = llama.Model(cfg.sizes)
    names = {module: name for name, module in model.named_modules()}
    expected = [f"model.layers.{i}.{part}" for i in range(cfg.sizes.n_layer) for part in per_block]
    units = [names[unit] for unit in fsdp.find_units(model, model.blocks, 100_000_000)]
    assert units == ["model.embed_tokens", *expected, "lm_head"]

"""
llama.py against transformers, in and out of Hugging Face's format; its tokenizers; its units.

    python -m pytest -q tests/test_llama.py

That it trains alike in every mode, resumes and generates is in test_contract.py.
"""

import json
import os
import re
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from harness import (
    HERE,
    Ranks,
    flags,
    launch,
    make_data,
    on_ranks,
    plain_model,
    read_ckpt,
    resident,
    script,
    tiny,
    trained,
    values,
)

import checkpoint
import fsdp
import metrics
import sample
import train
from configurator import config_class, load_config, resolve, with_model
from data.loader import TokenFiles, read_meta
from data.prepare import encode
from data.tokenizer import encoder, tokenizer
from huggingface import export, open_pretrained, understand
from llama import LlamaConfig, rotation
from ranks import World, setup

transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors")

LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=8192, rope_theta=5e5)
KINDS = {  # name: (transformers' class, its config's values)
    "llama2": ("Llama", dict(rope_theta=1e4, num_key_value_heads=6)),
    "llama3": ("Llama", dict(rope_parameters=LLAMA3)),
    "smollm2": ("Llama", dict(rope_theta=1e5, tie_word_embeddings=True)),
    "qwen3": ("Qwen3", dict(rope_theta=1e6, head_dim=24)),
}


def make_hf(path, kind="llama3", shards=False, **values):
    """A random model by transformers, saved in path."""
    name, more = KINDS[kind]
    sizes = dict(vocab_size=91, hidden_size=48, intermediate_size=100, num_hidden_layers=2,
                 num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=512,
                 initializer_range=0.2)
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**sizes, **more, **values})
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    model.save_pretrained(path, max_shard_size="30KB" if shards else "1GB")
    return model


def opened(path):
    """(cfg, our model) from a Hugging Face directory, as sample.py opens it."""
    cfg = config_class("gpt2")(strategy="single", compile=False, init_from=str(path),
                               gradient_accumulation_steps=1, dtype="float32")
    source = train.open_start(cfg, World())
    cfg = with_model(resolve(cfg, World()), source)
    model = train.meta_model(cfg)
    fsdp.parallelize(model, cfg, World())
    checkpoint.load(source, model, None, World())
    return cfg, model.eval()


# -----------------------------------------------------------------------------
# in and out of Hugging Face's format


@pytest.mark.parametrize("kind", KINDS)
def test_llama_logits_and_tokens_are_transformers(tmp_path, kind):
    theirs = make_hf(tmp_path / "hf", kind, shards=True)
    files = os.listdir(tmp_path / "hf")
    assert "model.safetensors.index.json" in files and "model.safetensors" not in files
    _, ours = opened(tmp_path / "hf")
    idx = torch.randint(91, (2, 300))
    with torch.no_grad():
        logits, expected = ours(idx, idx)[0], theirs(idx).logits
    assert (logits - expected).abs().max() < 1e-4  # 0.0 on torch 2.13
    assert logits.std() > 0.5
    prompt = idx[:1, :10]
    tokens = sample.generate(ours, prompt, 50, temperature=0)
    with torch.no_grad():
        greedy = theirs.generate(prompt, max_new_tokens=50, do_sample=False, eos_token_id=None)
    assert tokens.tolist() == greedy.tolist()
    assert tokens[0, 10:].unique().numel() > 3

    # out, by way of one of our own checkpoints' Source
    source = open_pretrained(str(tmp_path / "hf"))
    for dtype in ("float32", "bfloat16"):
        export(source, str(tmp_path / dtype), dtype)
        back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / dtype)
        assert type(back) is type(theirs)
        assert back.dtype == getattr(torch, dtype)
        for name, p in theirs.named_parameters():
            assert torch.equal(back.get_parameter(name), p.to(back.dtype)), name
        assert back.lm_head.weight.data_ptr() == back.model.embed_tokens.weight.data_ptr() or (
            kind != "smollm2")
        with torch.no_grad():
            difference = (back.float()(idx).logits - expected).abs().max()
        assert difference < (1e-4 if dtype == "float32" else 1.0)


def test_llama_scaled_frequencies_are_transformers():
    """At Llama 3.1's own sizes, where some wavelengths are kept, blended and stretched."""
    config = transformers.LlamaConfig(hidden_size=4096, num_attention_heads=32,
                                      max_position_embeddings=131072, rope_parameters=LLAMA3)
    theirs = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    positions = torch.tensor([[0, 1, 4095, 131071]])
    cos, sin = theirs(torch.zeros(1), positions)
    ours = LlamaConfig(n_embd=4096, n_head=32, n_kv_head=8, rope_theta=5e5, rope_factor=8.0)
    for i, (position, limit) in enumerate(zip(positions[0].tolist(), (1e-6, 1e-6, 1e-4, 1e-2))):
        for got, expected in zip(rotation(position, 1, 128, ours, "cpu"), (cos, sin)):
            assert (got[0] - expected[0, i, :64]).abs().max() < limit


def case_bf16_rotation(tmp):
    """Types that rotate() sees, and the loss, under FSDP's bf16 policy."""
    import llama
    seen, original = set(), llama.rotate

    def spy(x, cos, sin):
        seen.add((str(x.dtype), str(cos.dtype), str(original(x, cos, sin).dtype)))
        return original(x, cos, sin)

    llama.rotate = spy
    world = setup("cpu", "auto")
    cfg = resolve(tiny(tmp, model="llama", strategy="full_shard", dtype="bfloat16"), world)
    wrapped, _, _ = train.build(cfg, world)
    idx = torch.arange(16)[None]
    loss = wrapped(idx, idx)[1].item()
    llama.rotate = original
    return sorted(seen), loss


def test_llama_angles_stay_fp32_under_fsdps_bf16(tmp):
    results = values(on_ranks(2, {"bf16": (case_bf16_rotation, dict(tmp=tmp))}), "bf16")
    expected = plain_model(tiny(tmp, model="llama"))
    idx = torch.arange(16)[None]
    for seen, loss in results:
        assert seen == [["torch.bfloat16", "torch.float32", "torch.bfloat16"]]
        assert loss == pytest.approx(expected(idx, idx)[1].item(), rel=1e-2)


def test_llama_cache_holds_the_heads_of_keys_only(tmp):
    model = plain_model(tiny(tmp, model="llama", n_kv_head=1))
    cache = [sample.KVCache() for _ in model.blocks]
    model(torch.zeros(2, 5, dtype=torch.long), cache=cache)
    model(torch.zeros(2, 1, dtype=torch.long), cache=cache)
    assert [c.k.shape for c in cache] == [(2, 1, 6, 10)] * 3


def test_llama_grouped_heads_equal_expanded_ones():
    """In half precision PyTorch groups them itself, on short sequences a CPU does not."""
    from model import attend
    for T, dtype in ((64, torch.bfloat16), (600, torch.bfloat16), (64, torch.float32)):
        q = torch.randn(2, 6, T, 8).to(dtype)
        k, v = (torch.randn(2, 2, T, 8).to(dtype) for _ in range(2))
        full = [t.float().repeat_interleave(3, 1) for t in (k, v)]
        scores = (q.float() @ full[0].mT / 8**0.5).masked_fill(
            torch.ones(T, T).triu(1) > 0, -torch.inf)
        expected = scores.softmax(-1) @ full[1]
        got = attend(q, k, v, 0.0).float()
        assert (got - expected).abs().max() < (1e-5 if dtype == torch.float32 else 0.05)


REFUSED = [
    ("llama2", dict(attention_bias=True), "attention_bias=True"),
    ("llama2", dict(mlp_bias=True), "mlp_bias=True"),
    ("llama2", dict(hidden_act="gelu"), "hidden_act='gelu'"),
    ("llama2", dict(rope_scaling=dict(rope_type="yarn", factor=4.0)), "yarn"),
    ("llama2", dict(rope_scaling=dict(type="linear", factor=2.0)), "linear"),
    ("llama2", dict(rope_scaling=dict(LLAMA3, low_freq_factor=2.0)), "low_freq_factor"),
    ("llama2", dict(quantization_config=dict(bits=4)), "quantization_config"),
    ("llama2", dict(head_dim=7), "head_dim=7 must be even"),
    ("llama2", dict(num_key_value_heads=4), "must be a multiple of n_kv_head=4"),
    ("llama2", dict(model_type="mistral"), "model_type='mistral' is none of gpt2, llama, qwen3"),
    ("qwen3", dict(use_sliding_window=True), "use_sliding_window=True"),
    ("gpt2", dict(activation_function="relu"), "activation_function='relu'"),
    ("gpt2", dict(layer_norm_epsilon=1e-6), "layer_norm_epsilon=1e-06"),
    ("gpt2", dict(scale_attn_weights=False), "scale_attn_weights=False"),
    ("gpt2", dict(scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx=True"),
    ("gpt2", dict(n_inner=100), "n_inner=100"),
    ("gpt2", dict(tie_word_embeddings=False), "tie_word_embeddings=False"),
]
PLAIN = {
    "llama2": dict(model_type="llama", hidden_size=48, intermediate_size=100, vocab_size=91,
                   num_hidden_layers=2, num_attention_heads=6, max_position_embeddings=64,
                   rms_norm_eps=1e-5),
    "gpt2": dict(model_type="gpt2", n_layer=2, n_head=3, n_embd=30, vocab_size=91, n_positions=24,
                 n_inner=120, activation_function="gelu_pytorch_tanh"),
}
PLAIN["qwen3"] = dict(PLAIN["llama2"], model_type="qwen3")


@pytest.mark.parametrize("kind, change, message", REFUSED)
def test_llama_config_that_we_do_not_compute_is_one_clear_line(tmp_path, kind, change, message):
    understand(PLAIN[kind])  # without the change
    (tmp_path / "config.json").write_text(json.dumps({**PLAIN[kind], **change}))
    with pytest.raises(SystemExit) as e:
        open_pretrained(str(tmp_path))
    assert message in str(e.value) and "\n" not in str(e.value)


def published(**values):
    return dict(dict(hidden_act="silu", rope_scaling=None, vocab_size=128256), **values)


def test_llama_published_configs_are_understood():
    """The numbers of released config.json files, and the sizes in config/."""
    llama3 = published(model_type="llama", hidden_size=4096, intermediate_size=14336,
                       num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
                       max_position_embeddings=8192, rms_norm_eps=1e-5, rope_theta=500000.0,
                       tie_word_embeddings=False)
    _, args = understand(llama3)
    cfg = load_config([os.path.join(HERE, "config", "llama3_8b.py")])
    assert {k: getattr(cfg, k) for k in args} == args
    scaling = {k: v for k, v in LLAMA3.items() if k != "rope_theta"}
    _, scaled = understand(dict(llama3, rope_scaling=scaling, max_position_embeddings=131072))
    assert scaled == dict(args, rope_factor=8.0, block_size=131072)
    _, small = understand(published(  # SmolLM2-135M: the defaults of llama.py
        model_type="llama", hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
        num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=8192,
        rms_norm_eps=1e-5, rope_theta=100000, tie_word_embeddings=True, vocab_size=49152))
    assert LlamaConfig(**small) == LlamaConfig(block_size=8192)
    assert understand(dict(llama3, head_dim=128))[1] == dict(args, head_dim=0)  # as in config/
    _, absent = understand(PLAIN["llama2"])  # what transformers takes where a key is absent
    keys = "rope_theta", "n_kv_head", "tie_embeddings"
    assert [absent[key] for key in keys] == [1e4, 6, False]
    assert understand(dict(PLAIN["llama2"], num_key_value_heads=1))[1]["n_kv_head"] == 1


@pytest.mark.parametrize("name, hub", [
    ("gpt2-xl", "openai-community/gpt2-xl"), ("org/model", "org/model")])
def test_llama_name_on_the_hub(monkeypatch, name, hub):
    hub_library = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub_library, "snapshot_download", lambda name, **kwargs: sys.exit(name))
    with pytest.raises(SystemExit, match=f"^{hub}$"):
        open_pretrained(name)
    with pytest.raises(SystemExit, match="^bert-base-uncased$"):  # others have no owner either
        encoder("bert-base-uncased")


SIZES = {  # millions of parameters, as published
    "finetune_smollm2": 134.5, "llama2_7b": 6738.4, "llama2_70b": 68976.6, "llama3_8b": 8030.3}


@pytest.mark.parametrize("name", SIZES)
def test_llama_configs_have_the_published_sizes(name):
    cfg = load_config([os.path.join(HERE, "config", f"{name}.py")])
    n = sum(p.numel() for p in train.meta_model(cfg).parameters())
    assert n / 1e6 == pytest.approx(SIZES[name], abs=0.05)


# -----------------------------------------------------------------------------
# memory: one tensor at a time


def case_memory(path):
    """(growth of this process's peak while it loads, the largest parameter, all), in bytes; and
    each parameter's norm."""
    world = setup("cpu", "auto")
    cfg = config_class("gpt2")(strategy="full_shard", compile=False, init_from=path,
                               gradient_accumulation_steps=2, dtype="float32")
    source = train.open_start(cfg, world)
    cfg = with_model(resolve(cfg, world), source)
    model = train.meta_model(cfg)
    fsdp.parallelize(model, cfg, world)
    for p in model.parameters():
        p.detach().to_local().zero_()  # this rank's rows are in memory before
    before = resident("VmRSS", reset=True)
    checkpoint.load(source, model, None, world)
    growth, sizes = resident("VmHWM") - before, [4 * p.numel() for p in model.parameters()]
    norms = sorted(p.full_tensor().norm().item() for p in model.parameters())
    return growth, max(sizes), sum(sizes), norms


@pytest.mark.parametrize("dtype, limit", [("float32", 1.2), ("bfloat16", 1.75)])
def test_llama_loading_takes_the_memory_of_one_tensor(tmp_path, dtype, limit):
    """In fp32; a file in bf16 is mapped (half of that), and cast beside it on rank 0 only."""
    model = make_hf(tmp_path / "a", hidden_size=512, intermediate_size=1024, vocab_size=40000,
                    num_attention_heads=4)
    model.to(getattr(torch, dtype)).save_pretrained(tmp_path, max_shard_size="100MB")
    assert os.path.exists(tmp_path / "model.safetensors.index.json") == (dtype == "float32")
    cases = {"memory": (case_memory, dict(path=str(tmp_path)))}
    zero, one = values(on_ranks(2, cases), "memory")
    print(zero, one)
    norms = sorted(p.float().norm().item() for p in model.parameters())
    for (growth, largest, whole, got), most in ((zero, limit), (one, 1.2)):
        assert got == pytest.approx(norms, rel=1e-5)
        assert whole > 2 * largest > 160e6
        assert growth <= most * largest


# -----------------------------------------------------------------------------
# the contract: keys, resume, another model


@pytest.mark.parametrize("flag, message", [
    ("--dropout=0.1", "no key dropout"),
    ("--bias=True", "no key bias"),
    ("--n_kv_head=4", "n_head=9 must be a multiple of n_kv_head=4"),
    ("--n_embd=577", "n_embd=577 must be a multiple of n_head=9"),
    ("--head_dim=63", "head_dim=63 must be even"),
    ("--n_inner=0", "n_inner=0 must be at least 1"),
    ("--norm_eps=x", "norm_eps='x' must be a finite number"),
    ("--qk_norm=1", "qk_norm=1 must be True or False"),
])
def test_llama_bad_key_is_one_clear_line(flag, message):
    with pytest.raises(SystemExit) as e:
        load_config(["--model=llama", flag])
    assert message in e.value.code and "\n" not in e.value.code


def test_llama_config_is_compared_key_by_key_on_resume(tmp, tmp_path):
    """Two KV heads do not resume as one, nor rotary positions with another base."""
    out = tmp_path / "out"
    cfg = tiny(tmp, model="llama", n_kv_head=3, out_dir=str(out), max_iters=1)
    values_of = {k: v for k, v in vars(cfg).items() if k != "model"}
    launch(1, ["--model=llama", *flags(**values_of)])
    source = checkpoint.find(str(out), World())
    changed = dict(n_kv_head=1, rope_theta=5e5, n_inner=49, norm_eps=1e-6, qk_norm=True,
                   tie_embeddings=True, rope_factor=8.0, head_dim=12, block_size=17)
    for key, value in changed.items():
        other = tiny(tmp, model="llama", **{"n_kv_head": 3, key: value})
        with pytest.raises(SystemExit, match=f"{key}={value} in this run, but .* has {key}="):
            checkpoint.compare(source, other)
    checkpoint.compare(source, tiny(tmp, model="llama", n_kv_head=3, block_size=8))  # shorter
    with pytest.raises(SystemExit, match="block_size=8 in this run"):  # whose rows DCP cannot cut
        checkpoint.compare(replace(source, sharded=True), tiny(tmp, model="llama", n_kv_head=3,
                                                               block_size=8))


def test_llama_every_key_is_read_and_explained():
    with open(os.path.join(HERE, "llama.py")) as f:
        code = f.read()
    for key in LlamaConfig.__dataclass_fields__:
        assert re.search(rf"\b(config|c)\.{key}\b", code), key
    text = script("train.py", "--model=llama", "--help").stdout
    assert re.search(r"^  --n_kv_head=3\n +heads of keys and values", text, re.M)
    assert "--dropout" not in text and "--batch_size=12" in text


def test_llama_initial_values_cover_all(tmp):
    model = plain_model(tiny(tmp, model="llama", n_embd=192, n_inner=512, qk_norm=True,
                             norm_eps=1e-3))
    assert {m.eps for m in model.modules() if isinstance(m, torch.nn.RMSNorm)} == {1e-3}
    for name, p in model.named_parameters():
        if name.endswith("norm.weight"):
            assert (p == 1).all()
        else:
            std = 0.02 / 6**0.5 if re.search("o_proj|down_proj", name) else 0.02
            assert abs(p.std().item() / std - 1) < 0.05, name
    with pytest.raises(ValueError, match="no initial value"):
        model.initial_value("model.bias.weight", (2, 2), 0)


def test_llama_flops_are_the_formula(tmp):
    """6 for each weight in a product, 12 T C a layer for attention (PaLM, appendix B)."""
    for tied in (False, True):
        model = train.meta_model(tiny(tmp, model="llama", tie_embeddings=tied, head_dim=12))
        n = sum(p.numel() for p in model.parameters() if p.dim() == 2)
        if not tied:  # then it is only looked up
            n -= model.model.embed_tokens.weight.numel()
        c = model.config
        expected = 6 * n + 12 * c.n_layer * c.n_head * 12 * c.block_size
        assert metrics.flops_per_token(model, World()) == expected


@pytest.mark.parametrize("file", ["fsdp.py", "plan.py", "rehearse.py", "checkpoint.py", "train.py"])
def test_llama_is_unknown_to_the_core(file):
    with open(os.path.join(HERE, file)) as f:
        assert "llama" not in f.read().lower()


# -----------------------------------------------------------------------------
# tokenizers, and from one Hugging Face directory to another


SENTENCES = [f"the {a} {b} {c} the {d}" for a in ("quick", "lazy", "old") for b in ("fox", "dog")
             for c in ("sees", "hears") for d in ("cat", "sun", "sea", "hill")]


def make_tokenizer(path, size=300, end="</s>"):
    """A tokenizer trained on the spot: byte-level BPE that begins a text with <s>."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    hf = Tokenizer(models.BPE())
    hf.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    hf.decoder = decoders.ByteLevel()
    hf.train_from_iterator(SENTENCES, trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<s>", end], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    hf.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", hf.token_to_id("<s>"))])
    hf.enable_truncation(8)  # some files ask for it; a document is not cut, nor filled
    hf.enable_padding(length=64)
    os.makedirs(path, exist_ok=True)
    hf.save(str(path / "tokenizer.json"))
    return hf


def tokens_of(path):
    raw = open(path, "rb").read()
    from data.loader import open_tokens
    return open_tokens(str(path)).tolist(), raw


def draws_at_5(token):
    """For generate(): this token is the fifth, the others are 9."""
    def force(ids, scores):
        scores = torch.full_like(scores, -torch.inf)
        scores[:, token if ids.size(1) == 4 else 9] = 0.0
        return scores
    return force


def test_llama_from_hugging_face_and_back(tmp_path):
    """prepare with their tokenizer, fine-tune on 2 ranks full_shard, sample, export: no network."""
    hf_dir, data, out = tmp_path / "hf", tmp_path / "data", tmp_path / "out"
    hf = make_tokenizer(hf_dir)
    hf.no_truncation()
    hf.no_padding()
    end = hf.token_to_id("</s>")
    theirs = make_hf(hf_dir, "smollm2", vocab_size=320, shards=True, eos_token_id=end,  # padded
                     bos_token_id=hf.token_to_id("<s>"))
    transformers.GenerationConfig(eos_token_id=[end, 7], max_new_tokens=9).save_pretrained(hf_dir)
    (hf_dir / "tokenizer_config.json").write_text(json.dumps(dict(
        tokenizer_class="PreTrainedTokenizerFast", eos_token="</s>", bos_token="<s>")))
    (tmp_path / "chats.jsonl").write_text("".join(
        json.dumps(dict(q=s, a=s[::-1])) + "\n" for s in SENTENCES))
    p = script("data/prepare.py", "x", tmp_path / "chats.jsonl", f"--out={data}",
               f"--tokenizer={hf_dir}", r"--template=Q: {q}\nA: {a}", "--val_fraction=0.2",
               HF_HUB_OFFLINE="1")
    assert p.returncode == 0, p.stderr
    train_tokens, val_tokens = (tokens_of(data / f"{split}.bin")[0] for split in ("train", "val"))
    expected = [hf.encode(f"Q: {s}\nA: {s[::-1]}").ids + [end] for s in SENTENCES]
    both = train_tokens + val_tokens
    assert sorted(sum(expected, [])) == sorted(both) and both[:len(expected[0])] == expected[0]
    meta = {"vocab_size": hf.get_vocab_size(), "tokenizer": "tokenizer.json"}
    assert read_meta(str(data)) == meta

    os.rename(data, tmp_path / "moved")  # it is whole without the model's directory
    data = tmp_path / "moved"
    run = dict(dataset=data, out_dir=out, init_from=hf_dir, block_size=32, batch_size=2,
               gradient_accumulation_steps=4, max_iters=6, eval_interval=6, eval_iters=50,
               learning_rate=1e-2, warmup_iters=0, dtype="float32", compile=False, device="cpu",
               strategy="full_shard")
    p = launch(2, flags(**run))
    first, last = (float(x) for x in re.findall(r"val loss ([\d.]+)", p.stdout))
    assert last < first - 0.1
    ours = read_ckpt(out)
    assert ours["model_args"]["vocab_size"] == 320 and ours["config"]["model"] == "llama"

    def exported():
        p = script("huggingface.py", out, tmp_path / "back")
        assert p.returncode == 0, p.stderr
        back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
        again = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
        # it stops where theirs stops, and reads as far, though it was trained on 32 tokens
        assert (again.eos_token, again.eos_token_id) == ("</s>", end)
        for key in ("eos_token_id", "bos_token_id", "max_position_embeddings"):
            assert getattr(back.config, key) == getattr(theirs.config, key)
        assert back.generation_config.eos_token_id == [end, 7]
        assert back.generation_config.max_new_tokens == 9
        prompt = torch.tensor([[5, 6]])
        for hugging in (transformers.AutoModelForCausalLM.from_pretrained(hf_dir), back):
            for stop, length in ((7, 5), (end, 5), (8, 11)):  # 7 and end are the original's
                text = hugging.generate(prompt, logits_processor=[draws_at_5(stop)])
                assert text.size(1) == length
        return back, again

    back, again = exported()
    files = TokenFiles(str(data), "val", 32, 320)
    x, y = files.batch(range(len(files)))
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(back(x).logits.flatten(0, 1), y.flatten())
        before = torch.nn.functional.cross_entropy(theirs(x).logits.flatten(0, 1), y.flatten())
    assert loss.item() == pytest.approx(float(ours["best_val_loss"]), abs=1e-4)
    assert before.item() == pytest.approx(first, abs=1e-4)
    assert again.decode(again.encode("the quick fox"), skip_special_tokens=True) == "the quick fox"

    # it resumes, although its data has fewer tokens than its padded vocabulary
    sizes = {k: v for k, v in ours["model_args"].items() if k not in ("block_size", "vocab_size")}
    run.update(init_from="resume", max_iters=7)
    assert "at step 6" in launch(2, ["--model=llama", *flags(**run, **sizes)]).stdout
    exported()

    args = [f"--out_dir={out}", "--num_samples=1", "--max_new_tokens=20", "--dtype=float32"]
    p = Ranks(1, sample.main, [*args, "--start=the quick fox"]).finish()
    assert p.returncode == 0 and p.stdout.startswith("the quick fox"), p.stderr
    args[0] = f"--init_from={tmp_path / 'back'}"  # Hugging Face's directory has a tokenizer too
    p = Ranks(1, sample.main, [*args, "--start=the quick fox"]).finish()
    assert p.returncode == 0 and p.stdout.startswith("the quick fox"), p.stderr

    # data of more symbols than the model has
    make_data(str(tmp_path / "large"), vocab=400)
    p = trained(1, flags(**{**run, "init_from": hf_dir, "strategy": "single",
                            "dataset": tmp_path / "large", "out_dir": tmp_path / "no"}))
    assert p.returncode == 1 and "beyond vocab_size=320" in p.stderr and p.stderr.count("\n") == 1


def test_tokenizer_of_a_large_vocabulary_makes_uint32_files(tmp_path):
    """llm.c's header, as its own data_common.py writes it for Llama 3: magic, version, count."""
    path = tmp_path / "tok"
    hf = make_tokenizer(path)
    hf.no_truncation()
    hf.no_padding()
    from tokenizers import AddedToken
    hf.add_special_tokens([AddedToken(f"<|{i}|>") for i in range(70_000)])
    hf.save(str(path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("the old dog <|69999|> " * 50)
    p = script("data/prepare.py", "x", tmp_path / "a.txt", f"--out={tmp_path / 'out'}",
               f"--tokenizer={path / 'tokenizer.json'}", "--workers=1")
    assert p.returncode == 0, p.stderr
    parts = [tokens_of(tmp_path / "out" / f"{split}.bin") for split in ("train", "val")]
    expected = hf.encode("the old dog <|69999|> " * 50).ids + [hf.token_to_id("</s>")]
    assert parts[0][0] + parts[1][0] == expected and max(expected) == hf.get_vocab_size() - 1
    for tokens, raw in parts:
        assert len(raw) == 1024 + 4 * len(tokens)
        head = torch.frombuffer(bytearray(raw[:1024]), dtype=torch.int32)
        assert head[:3].tolist() == [20240801, 7, len(tokens)] and not head[3:].any()
    encode, decode, n = tokenizer(read_meta(str(tmp_path / "out")), str(tmp_path / "out"))
    assert n == hf.get_vocab_size() > 70_000 and decode(encode("the old dog")) == "the old dog"


def test_tokenizer_end_of_text_is_the_configs_or_a_usual_one(tmp_path):
    def tokens_of_a_document():
        train, val = encode(["the old dog"], np.dtype(np.uint16), str(tmp_path / "a"), 0.5)
        return np.frombuffer(train + val, np.uint16).tolist()

    hf = make_tokenizer(tmp_path / "a", end="<|im_end|>")
    end = hf.token_to_id("<|im_end|>")
    with pytest.raises(SystemExit, match="no end-of-text token"):
        encoder(str(tmp_path / "a"))
    for eos in ("<|im_end|>", {"content": "<|im_end|>"}):
        (tmp_path / "a" / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
        encoder.cache_clear()
        assert tokens_of_a_document()[-1] == end
    from tokenizers import Tokenizer, models, processors
    hf.post_processor = processors.TemplateProcessing(
        single="$A <|im_end|>", special_tokens=[("<|im_end|>", end)])
    hf.save(str(tmp_path / "a" / "tokenizer.json"))
    encoder.cache_clear()
    assert tokens_of_a_document().count(end) == 1
    gaps = Tokenizer(models.WordLevel({"the": 0, "</s>": 9}, unk_token="the"))
    gaps.save(str(tmp_path / "gaps.json"))
    assert encoder(str(tmp_path / "gaps.json"))[2] == 10  # the largest id counts, not how many


def test_tokenizer_bad_input_is_one_clear_line(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    for name, message in ((tmp_path / "tokenizer.json", "not a tokenizer"),
                          (tmp_path / "none.json", "neither a directory here nor on the Hugging")):
        (tmp_path / "a.txt").write_text("x")
        p = script("data/prepare.py", "x", tmp_path / "a.txt", f"--out={tmp_path / 'o'}",
                   f"--tokenizer={name}", HF_HUB_OFFLINE="1")
        assert p.returncode == 1 and message in p.stderr and p.stderr.count("\n") == 1, p.stderr

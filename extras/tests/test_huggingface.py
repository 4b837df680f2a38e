"""
Hugging Face's format, in and out: GPT-2, Llama, Mistral and Qwen against transformers.

    python -m pytest -q extras/tests/test_huggingface.py
"""

import json
import os
from dataclasses import asdict

import pytest
import torch
from harness import refused
from test_hf_tokenizer import make, pre, tokenizers
from training import plain_gpt

import sample
import train
from checkpoint import Source
from configurator import load_config, resolve
from extras import huggingface
from extras.huggingface import KEPT, export, open_pretrained, understand
from ranks import setup
from start import final_config, open_start

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

IDX = torch.arange(16)[None]
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=8192)
GPT2 = dict(n_layer=2, n_head=3, n_embd=48, n_positions=512)
LLAMA = dict(num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2, hidden_size=48,
             intermediate_size=100, max_position_embeddings=512)
KINDS = {  # name: (transformers' model type, its config's values)
    "gpt2": ("gpt2", GPT2),
    "llama2": ("llama", dict(LLAMA, num_key_value_heads=6)),
    "llama3": ("llama", dict(LLAMA, rope_parameters=dict(LLAMA3, rope_theta=5e5))),
    "smollm2": ("llama", dict(LLAMA, tie_word_embeddings=True)),
    "mistral": ("mistral", dict(LLAMA, sliding_window=None)),
    "ministral": ("mistral", dict(LLAMA, sliding_window=512, head_dim=24)),  # all of the context
    "qwen2": ("qwen2", LLAMA),
    "qwen3": ("qwen3", dict(LLAMA, head_dim=24)),
}


def make_hf(path, kind, **more):
    """A random model by transformers, saved in path; a Llama in shards."""
    torch.manual_seed(0)
    model_type, values = KINDS[kind]
    values = {**values, "vocab_size": 91, "initializer_range": 0.2, **more}
    config = transformers.AutoConfig.for_model(model_type, **values)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(p, std=0.1)
    model.save_pretrained(path, max_shard_size="1GB" if kind == "gpt2" else "30KB")
    assert os.path.exists(path / "model.safetensors.index.json") == (kind != "gpt2")
    return model


def begun(*argv):
    """(cfg, what to call, its optimizer) of a run on CPUs."""
    world = setup("cpu", "auto")
    cfg = load_config(["--device=cpu", "--compile=False", "--dtype=float32", *argv])
    cfg = resolve(cfg, world)
    source, resumed = open_start(cfg, world)
    assert not resumed
    cfg = final_config(cfg, source, resumed, world)
    return cfg, *train.build(train.meta_model(cfg), cfg, world, source)


def loaded(path, *argv):
    """What to call, with the values of a Hugging Face directory, as train.py starts from it."""
    return begun(f"--init_from={path}", *argv)[1].eval()


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_huggingface_logits_and_tokens_are_transformers(tmp_path, kind):
    """In and out. A run on two ranks is in test_llama.py, and GPT-2's start below."""
    theirs, hf = make_hf(tmp_path / "hf", kind), str(tmp_path / "hf")
    ours = loaded(hf)
    idx = torch.randint(91, (2, 300))
    expected = theirs(idx).logits
    assert (ours(idx, idx)[0] - expected).abs().max() < 1e-4 and expected.std() > 0.5
    tokens = sample.generate(ours, idx[:1, :10], 50, temperature=0)
    greedy = theirs.generate(idx[:1, :10], max_new_tokens=50, do_sample=False, eos_token_id=None)
    assert tokens.tolist() == greedy.tolist() and tokens[0, 10:].unique().numel() > 3
    for dtype in ("float32", "bfloat16"):
        export(open_pretrained(hf), str(tmp_path / dtype), dtype)
        back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / dtype)
        assert type(back) is type(theirs) and back.dtype == getattr(torch, dtype)
        assert getattr(back.config, "sliding_window", None) is None  # Mistral's default is 4096
        for name, p in theirs.named_parameters():
            assert torch.equal(back.get_parameter(name), p.to(back.dtype)), name
        tied = back.lm_head.weight.data_ptr() == back.get_input_embeddings().weight.data_ptr()
        assert tied == (kind in ("gpt2", "smollm2"))
        difference = (back.float().eval()(idx).logits - expected).abs().max()
        assert difference < (1e-4 if dtype == "float32" else 1.0)


@pytest.mark.parametrize("kind", huggingface.ARCHITECTURES)
def test_huggingface_takes_transformers_defaults_for_keys_that_are_missing(kind):
    """Also for those that we only compare."""
    theirs = transformers.AutoConfig.for_model(kind).to_dict()
    given = dict(sliding_window=None) if kind == "mistral" else {}  # by default it has a window
    assert understand({"model_type": kind, **given}) == understand({**theirs, **given})
    for key, computed in huggingface.ARCHITECTURES[kind]["fixed"].items():
        assert computed[0] == theirs.get(key) or key == "sliding_window"


def source_of(model):
    flat = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    header = dict(model_args=asdict(model.config), config={"model": "gpt2"})
    return Source("memory", header, {key: tuple(t.shape) for key, t in flat.items()}, flat.get)


@torch.no_grad()
def test_huggingface_of_a_model_without_biases_has_zeros(tmp_path):
    """GPT-2 has biases everywhere."""
    gpt = plain_gpt(bias=False, dropout=0.2)
    export(source_of(gpt), str(tmp_path))
    model = transformers.GPT2LMHeadModel
    theirs, info = model.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert (gpt(IDX, IDX)[0] - theirs.eval()(IDX).logits).abs().max() < 1e-5
    assert theirs.config.resid_pdrop == theirs.config.attn_pdrop == 0.2  # the run's
    assert theirs.config.eos_token_id is None  # not GPT-2's, which is beyond this vocabulary


def test_huggingface_out_refuses_what_would_be_read_as_another_model(tmp_path):
    """What it has no format for; and any file that is there, which may be another model's."""
    source = source_of(plain_gpt())
    source.header["config"] = {"model": "mine"}
    assert "model=mine" in refused(export, source, str(tmp_path))
    source.header.update(config={"model": "llama"}, model_args=dict(qk_norm=True, qkv_bias=True))
    assert "qk_norm with qkv_bias" in refused(export, source, str(tmp_path))
    (tmp_path / "tokenizer.model").touch()
    for write in (export, huggingface.export_adapter):
        assert "(tokenizer.model)" in refused(write, source, str(tmp_path))
    assert os.listdir(tmp_path) == ["tokenizer.model"]


def test_huggingface_tokenizer_is_that_of_the_data(tmp_path, monkeypatch, capsys):
    """Of GPT-2 the hub's, whose config says nothing. One beside the tokens is in test_llama.py."""
    monkeypatch.chdir(tmp_path)
    hub = tmp_path / "openai-community/gpt2"
    hf = make(hub, special=["<s>", "<|endoftext|>"])
    (hub / "tokenizer_config.json").write_text('{"model_max_length": 1024}')
    kept = {file: json.dumps({"eos_token_id": 7}) for file in ("config.json", KEPT[1])}
    make_hf(tmp_path / "hf", "llama3")  # whose own tokenizer would split other tokens
    source = open_pretrained("hf")
    source.header["config"]["dataset"] = "gone"
    for name in ("gpt2", "bytes"):
        source.header.update(meta=dict(vocab_size=300, tokenizer=name), kept=kept)
        export(source, name)
    theirs = transformers.AutoTokenizer.from_pretrained("gpt2")
    text = "  don't stop\n\n\tI'LL 12,345 caf\u00e9 \U0001f31e"
    assert theirs(text)["input_ids"] == hf.encode(text).ids
    assert theirs.eos_token_id == hf.token_to_id("<|endoftext|>")
    for file in kept:  # a text ends with it too
        assert json.loads((tmp_path / "gpt2" / file).read_text())["eos_token_id"] == [1, 7]
    assert "without a tokenizer: the data's is bytes" in capsys.readouterr().out


MODELS = dict(eos_token="<s>", padding_side="left", chat_template="{{ messages }}")
OTHER = dict(tokenizer_class="GPT2Tokenizer")  # it would split a text by GPT-2's pattern


@pytest.mark.parametrize("datas, models, expected", [
    (None, None, {}), (None, MODELS, MODELS), (None, dict(MODELS, pad_token="other"), {}),
    (dict(OTHER, chat_template="own"), MODELS, dict(MODELS, chat_template="own"))])
def test_huggingface_tokenizer_takes_from_the_model_what_the_data_lacks(
        tmp_path, datas, models, expected):
    """From the model that the run began from, if it has the same tokens. The data's has no end, and
    a pattern of its own, whatever its class."""
    words = pre.Split(tokenizers.Regex(r"\S+|\s+"), "isolated")
    splits = pre.Sequence([words, pre.ByteLevel(add_prefix_space=False, use_regex=False)])
    own = make(tmp_path / "data", special=["<s>"], learned=["a12345b"], splits=splits)
    os.remove(tmp_path / "data/tokenizer_config.json")
    if datas:
        (tmp_path / "data/tokenizer_config.json").write_text(json.dumps(datas))
    source = source_of(plain_gpt())
    source.header["config"]["dataset"] = str(tmp_path / "data")
    source.header["meta"] = dict(vocab_size=300, tokenizer="tokenizer.json")
    if models:
        source.header["kept"] = {KEPT[2]: json.dumps(models), KEPT[4]: MODELS["chat_template"]}
    export(source, tmp_path / "out")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "the a12345b sun"
    assert theirs(text)["input_ids"] == own.encode(text).ids
    nothing = dict(eos_token=None, padding_side="right", chat_template=None)
    assert {key: getattr(theirs, key) for key in nothing} == {**nothing, **expected}


def edited(**values):
    """An edit of config.json."""
    def edit(path):
        text = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**text, **values}))
    return edit


def old_shards(path):
    for name in ("model-00001-of-00002.safetensors", "model.safetensors.index.json"):
        (path / name).write_text("old")


@pytest.mark.parametrize("edit, flags, message", [
    (old_shards, "", None),
    (edited(n_layer=4), "", "transformer.h.3.ln_1.weight is missing"),
    (edited(), "--n_layer=3 --dropout=0.1", None),
    (edited(n_layer=2), "", "is of another model"),
    (lambda path: os.truncate(path / "model.safetensors", 1000), "", "cannot be read as a Hugging"),
    (edited(), "--model=llama", "--model=gpt2"),
    (lambda path: rewritten(path, doubled(-1, "transformer.wte.weight")), "", "and wte differ"),
])
def test_huggingface_odd_files_and_other_sizes_are_one_clear_line(tmp_path, edit, flags, message):
    export(source_of(plain_gpt()), str(tmp_path))
    edit(tmp_path)
    if message:
        line = refused(loaded, tmp_path, *flags.split())
        assert message in line and flags[2:] in line
    else:
        ours = loaded(tmp_path, *flags.split())
        assert torch.equal(ours(IDX, IDX)[0], plain_gpt()(IDX, IDX)[0])


def rewritten(path, change):
    """Write all weights into one file, after a change of {name: tensor}."""
    tensors = {}
    for file in path.glob("*.safetensors*"):
        if file.suffix == ".safetensors":
            tensors.update(safetensors.load_file(file))
        file.unlink()
    change(tensors)
    safetensors.save_file(tensors, path / "model.safetensors", {"format": "pt"})


def renamed(old, new):
    """A change: this part of all names."""
    def change(tensors):
        for name in [name for name in tensors if old in name]:
            tensors[name.replace(old, new, 1)] = tensors.pop(name)
    return change


def headless(tensors):
    """A change: to the names of LlamaModel, with a buffer that older files have."""
    renamed("model.", "")(tensors)
    tensors["rotary_emb.inv_freq"] = torch.ones(4)


def doubled(factor, embedding="model.embed_tokens.weight"):
    """A change: the head has a table of its own."""
    def change(tensors):
        tensors["lm_head.weight"] = factor * tensors[embedding]
    return change


@pytest.mark.parametrize("kind, change, config, tied", [
    ("llama3", headless, {}, False),
    ("smollm2", headless, {}, True),
    ("llama3", renamed("", "model."), {}, False),  # of a model that another holds as its .model
    ("smollm2", renamed("model.embed_tokens", "lm_head"), {}, True),
    ("smollm2", doubled(1), {}, True),
    ("smollm2", doubled(-1), {}, False),  # as FSDP saves a pair that it has untied
    ("llama3", dict, dict(tie_word_embeddings=True), False),
    ("gpt2", renamed("transformer.", ""), {}, True),
    ("gpt2", doubled(1, "transformer.wte.weight"), {}, True),
    ("llama3", dict, dict(original_max_position_embeddings=8192), False)])
@torch.no_grad()
def test_huggingface_odd_names_tables_and_configs_are_read_as_by_transformers(
        tmp_path, kind, change, config, tied):
    make_hf(tmp_path, kind)
    rewritten(tmp_path, change)
    edited(**config)(tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ours = loaded(tmp_path)
    assert (ours(IDX, IDX)[0] - theirs(IDX).logits).abs().max() < 1e-4
    embedding = next(ours.parameters())
    assert (ours.lm_head.weight is embedding) == tied
    export(open_pretrained(str(tmp_path)), str(tmp_path / "out"))
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert (back(IDX).logits - theirs(IDX).logits).abs().max() < 1e-4


@pytest.mark.parametrize("kind, key, value, said", [
    ("gpt2", "activation_function", "relu", "activation_function='relu'"),
    ("llama2", "attention_bias", True, "attention_bias=True"),
    ("llama2", "rope_scaling", dict(rope_type="yarn", factor=4.0), "rotary positions"),
    ("llama3", "original_max_position_embeddings", 4096, "rotary positions"),
    ("mistral", "sliding_window", 511, "sliding_window=511")])
def test_huggingface_refuses_what_we_do_not_compute(tmp_path, kind, key, value, said):
    model_type, values = KINDS[kind]
    config = dict(values, vocab_size=91, model_type=model_type)
    understand(config)  # without the change
    (tmp_path / "config.json").write_text(json.dumps({**config, key: value}))
    assert said in refused(open_pretrained, str(tmp_path))

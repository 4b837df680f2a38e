"""
Hugging Face's format, in and out: GPT-2, Llama, Mistral and Qwen against transformers.

    python -m pytest -q extras/tests/test_huggingface.py
"""

import json
import os
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from harness import HERE, arguments, on_ranks, plain_gpt, refused, started, steps, values
from test_data import gpt2_or_skip
from test_masks import SAMPLES, SMALL, STEPS, masked, windows_of  # noqa: F401  a fixture too
from torch.nn import functional as F

import sample
import train
from checkpoint import Source
from configurator import load_config, resolve
from data import loader
from data.tokenizer import encoder
from extras import huggingface
from extras.huggingface import KEPT, export, open_pretrained, understand
from ranks import World, setup

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
    cfg, source, resumed = started(resolve(cfg, world), world)
    assert not resumed
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


ODD = dict(  # no value is a default of transformers
    gpt2=dict(n_layer=2, n_head=3, n_embd=48, n_positions=512, vocab_size=91),
    llama=dict(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, hidden_size=64,
               intermediate_size=100, head_dim=24, rms_norm_eps=1e-3, rope_theta=5e5,
               tie_word_embeddings=True, max_position_embeddings=512, vocab_size=91))
ODD["mistral"] = dict(ODD["llama"], sliding_window=None)
ODD["qwen2"] = ODD["qwen3"] = ODD["llama"]


def understood(config):
    """What we read from a config.json, or why not."""
    try:
        return understand(config)
    except ValueError as e:
        return str(e)


@pytest.mark.parametrize("kind", ODD)
def test_huggingface_takes_transformers_default_for_a_key_that_is_missing(kind):
    """One by one, and for all at once, also for those that we only compare."""
    read = understood(dict(ODD[kind], model_type=kind))
    for missing in ODD[kind]:
        rest = {key: value for key, value in ODD[kind].items() if key != missing}
        theirs = transformers.AutoConfig.for_model(kind, **rest).to_dict()
        found = understood(dict(rest, model_type=kind))
        assert found == understood(theirs), missing
        assert found != read or missing == "sliding_window"  # here longer than the context
    theirs = transformers.AutoConfig.for_model(kind).to_dict()
    assert understood({"model_type": kind}) == understood(theirs)
    for key, computed in huggingface.ARCHITECTURES[kind]["fixed"].items():
        assert computed[0] == theirs.get(key) or key == "sliding_window"


@pytest.mark.parametrize("kind, config", [
    ("qwen2", dict(num_key_value_heads=None)),  # as many as there are heads
    ("mistral", dict(head_dim=None)),
    ("gpt2", dict(num_attention_heads=4, hidden_size=64)),  # its other names
    ("llama", dict(rope_scaling=LLAMA3, rope_parameters=dict(rope_type="default", rope_theta=9.0))),
    ("llama", dict(rope_parameters=dict(LLAMA3, rope_theta=9.0))),
    ("llama", dict(rope_parameters=dict(rope_type="default"))),
    ("llama", dict(rope_scaling=dict(type="linear", factor=2.0))),
    ("llama", dict(rope_scaling=dict(rope_type="default", type="linear", factor=2.0)))])
def test_huggingface_reads_a_config_as_transformers_does(kind, config):
    config = dict(ODD[kind], **config)
    theirs = transformers.AutoConfig.for_model(kind, **deepcopy(config))
    found, expected = (understood(one) for one in (dict(config, model_type=kind), theirs.to_dict()))
    assert found == expected or "rotary positions" in found and "rotary positions" in expected


def case_gpt2(path, strategy):
    """The names of the parameters whose values are not the file's."""
    wrapped = loaded(path, f"--strategy={strategy}")
    get, wrong = open_pretrained(path).get, []
    for name, p in wrapped.named_parameters():
        name = name.removeprefix("module.")  # of DDP
        full = p.full_tensor() if strategy == "full_shard" else p
        if not torch.equal(full, get(f"model.{name}")):
            wrong.append(name)
    return wrong


def test_huggingface_gpt2_starts_on_ranks_with_its_weights(tmp_path):
    """Its files are transposed, and each rank takes its rows of them."""
    make_hf(tmp_path, "gpt2")
    cases = {name: (case_gpt2, dict(path=str(tmp_path), strategy=name))
             for name in ("ddp", "full_shard")}
    results = on_ranks(2, cases)
    assert [values(results, name) for name in cases] == [[[], []], [[], []]]


def source_of(model, **header):
    flat = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    header = dict(model_args=asdict(model.config), config={"model": "gpt2"}) | header
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
    """Weights beside the new ones, which a program may take; and what it has no format for."""
    source = source_of(plain_gpt())
    make_hf(tmp_path, "llama3")
    (tmp_path / "adapter_config.json").touch()
    there = sorted(os.listdir(tmp_path))
    assert "(adapter_config.json, model-00001-of" in refused(export, source, str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == there
    source.header["config"] = {"model": "moe"}
    assert "model=moe" in refused(export, source, str(tmp_path))
    source.header.update(config={"model": "llama"}, model_args=dict(qk_norm=True, qkv_bias=True))
    assert "qk_norm with qkv_bias" in refused(export, source, str(tmp_path))


TEXTS = ["  don't stop\n\n\tI'LL 12,345 <|im_end|>", "caf\u00e9 \U0001f31e\u65e5\u672c ",
         "\x00\u0301\ufb03"]


@pytest.mark.parametrize("name, vocab_size", [("gpt2", 50304), ("bytes", 257), ("bytes", 256)])
def test_huggingface_tokenizer_is_that_of_the_data(tmp_path, monkeypatch, name, vocab_size):
    """Of GPT-2 from tiktoken's table, and the same for bytes."""
    encode = gpt2_or_skip(monkeypatch).encode_ordinary if name == "gpt2" else encoder(name).encode
    model = plain_gpt(vocab_size=vocab_size, n_embd=4, n_head=1)
    meta = dict(vocab_size=vocab_size, tokenizer=name)
    kept = {file: json.dumps({"eos_token_id": 7}) for file in ("config.json", KEPT[1])}
    source = source_of(model, config={"dataset": "gone", "model": "gpt2"}, meta=meta, kept=kept)
    export(source, str(tmp_path))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    code = Path(HERE, "train.py").read_text() + Path(__file__).read_text()
    texts = [*TEXTS, code, code.replace("\n", "\r\n")]
    for text in texts:
        assert theirs(text)["input_ids"] == list(encode(text))
        assert theirs.decode(encode(text)) == text
    end = {50304: 50256, 257: 256, 256: None}[vocab_size]
    assert theirs.eos_token_id == end
    for file in kept:  # a text ends with it too
        ends = json.loads((tmp_path / file).read_text())["eos_token_id"]
        assert ends == (7 if end is None else [end, 7])


def edited(**values):
    """An edit of config.json."""
    def edit(path):
        text = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**text, **values}))
    return edit


def lost_shard(path):
    os.rename(path / "model.safetensors", path / "model-00001-of-00002.safetensors")
    edited(n_layer=4)(path)


def indexed(*names):
    """An edit: the index names these files. The first is there, and so is an older save's."""
    def edit(path):
        (path / "model-00001-of-00002.safetensors").write_text("old")
        os.rename(path / "model.safetensors", path / names[0])
        text = json.dumps({"weight_map": dict(enumerate(names))})
        (path / "model.safetensors.index.json").write_text(text)
    return edit


def old_shards(path):
    for name in ("model-00001-of-00002.safetensors", "model.safetensors.index.json"):
        (path / name).write_text("old")


@pytest.mark.parametrize("edit, flags, message", [
    (old_shards, "", None),
    (indexed("model-00001-of-00001.safetensors"), "", None),
    (indexed("model-1-of-2.safetensors", "model-2-of-2.safetensors"), "", "model-2-of-2.safet"),
    (indexed("../outside.safetensors"), "", "No such file"),  # what a file says is no path
    (lost_shard, "", "transformer.h.3.ln_1.weight is missing"),
    (edited(n_embd=30.0, n_layer=3.0), "", None),
    (edited(), "--n_layer=3 --dropout=0.1", None),
    (edited(n_layer=2.5), "", "n_layer=2.5 must be a whole number"),
    (edited(n_layer=2), "", "is of another model: this one has no model.transformer.h.2."),
    (lambda path: os.truncate(path / "model.safetensors", 1000), "", "cannot be read as a Hugging"),
    (edited(), "--model=llama", "--model=gpt2"),
])
def test_huggingface_odd_files_and_other_sizes_are_one_clear_line(tmp_path, edit, flags, message):
    export(source_of(plain_gpt()), str(tmp_path))
    edit(tmp_path)
    if message:
        line = refused(loaded, tmp_path, *flags.split())
        assert message in line and flags[2:] in line and str(tmp_path) in line
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


def tiny(tensors):
    """A change: values so small that norm_eps counts."""
    tensors["model.embed_tokens.weight"] *= 0.005


@pytest.mark.parametrize("kind, change, config, tied", [
    ("llama3", headless, {}, False),
    ("smollm2", headless, {}, True),
    ("llama3", renamed("", "model."), {}, False),  # of a model that another holds as its .model
    ("smollm2", renamed("model.embed_tokens", "lm_head"), {}, True),
    ("smollm2", doubled(1), {}, True),
    ("smollm2", doubled(-1), {}, False),  # as FSDP saves a pair that it has untied
    ("llama3", dict, dict(tie_word_embeddings=True), False),
    ("mistral", headless, {}, False),
    ("qwen2", headless, {}, False),
    ("gpt2", renamed("transformer.", ""), {}, True),
    ("gpt2", renamed("transformer.wte", "lm_head"), {}, True),
    ("gpt2", doubled(1, "transformer.wte.weight"), {}, True),
    ("llama2", tiny, dict(rms_norm_eps=...), False),
    ("qwen3", tiny, dict(rms_norm_eps=...), False),
    ("llama3", dict, dict(original_max_position_embeddings=8192), False)])
@torch.no_grad()
def test_huggingface_odd_names_tables_and_configs_are_read_as_by_transformers(
        tmp_path, kind, change, config, tied):
    make_hf(tmp_path, kind)
    rewritten(tmp_path, change)
    text = json.loads((tmp_path / "config.json").read_text()) | config
    text = {key: value for key, value in text.items() if value is not ...}
    (tmp_path / "config.json").write_text(json.dumps(text))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ours = loaded(tmp_path)
    assert (ours(IDX, IDX)[0] - theirs(IDX).logits).abs().max() < 1e-4
    embedding = next(ours.parameters())
    assert (ours.lm_head.weight is embedding) == tied
    export(open_pretrained(str(tmp_path)), str(tmp_path / "out"))
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert (back(IDX).logits - theirs(IDX).logits).abs().max() < 1e-4


REFUSED = {
    "gpt2": dict(activation_function="relu", layer_norm_epsilon=1e-6, scale_attn_weights=False,
                 scale_attn_by_inverse_layer_idx=True, n_inner=100, tie_word_embeddings=False),
    "llama2": dict(attention_bias=True, mlp_bias=True, hidden_act="gelu", model_type="phi3",
                   quantization_config=dict(bits=4), head_dim=7, num_key_value_heads=4,
                   rms_norm_eps=None, tie_word_embeddings=None),
    "llama3": dict(original_max_position_embeddings=4096),  # it takes precedence
    "mistral": dict(sliding_window=511),
    "qwen2": dict(use_sliding_window=True),
    "qwen3": dict(use_sliding_window=True, attention_bias=True),
}
SCALINGS = (dict(rope_type="yarn", factor=4.0), dict(type="linear", factor=2.0),
            dict(LLAMA3, low_freq_factor=2.0))


@pytest.mark.parametrize("kind, key, value", [
    *[(kind, key, value) for kind in REFUSED for key, value in REFUSED[kind].items()],
    *[("llama2", "rope_scaling", scaling) for scaling in SCALINGS]])
def test_huggingface_refuses_what_we_do_not_compute(tmp_path, kind, key, value):
    model_type, values = KINDS[kind]
    config = dict(values, vocab_size=91, model_type=model_type)
    understand(config)  # without the change
    (tmp_path / "config.json").write_text(json.dumps({**config, key: value}))
    said = {"rope_scaling": "rotary positions", "num_key_value_heads": "n_kv_head=4",
            "original_max_position_embeddings": "rotary positions",
            "rms_norm_eps": "norm_eps=None", "tie_word_embeddings": "tie_"}
    assert said.get(key, f"{key}={value!r}") in refused(open_pretrained, str(tmp_path))


def test_huggingface_refuses_two_tables_of_gpt2(tmp_path):
    make_hf(tmp_path, "gpt2")
    rewritten(tmp_path, doubled(-1, "transformer.wte.weight"))
    assert "lm_head and wte differ" in refused(open_pretrained, str(tmp_path))


@pytest.mark.slow  # it needs accelerate
def test_huggingface_a_step_is_that_of_transformers_trainer(masked, tmp_path):  # noqa: F811
    """The same data, accumulated in the same way, from the same weights."""
    pytest.importorskip("accelerate")
    theirs = make_hf(tmp_path / "hf", "llama3", vocab_size=67)
    argv = arguments(masked, str(tmp_path / "out"), **SMALL)
    left_out = ("--n_", "--bias", "--dropout", "--vocab", "--model")  # they are the file's
    argv = [arg for arg in argv if not arg.startswith(left_out)]
    cfg, wrapped, optimizer = begun(
        *argv, f"--init_from={tmp_path}/hf", "--decay_lr=False", "--weight_decay=0.0")
    run = SimpleNamespace(world=World(), cfg=cfg, wrapped=wrapped, optimizer=optimizer,
                          batches=loader.Batches(cfg, World()),
                          micro_batch=train.micro_batch(wrapped, cfg, World()))
    norms = [steps(run, first=step)[1] for step in range(STEPS - 1)]

    x, y = windows_of(masked, "train")
    rows = []
    for window in loader.train_order(len(x), cfg.seed, 0, SAMPLES)[:8 * (STEPS - 1)]:
        # It shifts the targets itself. The last input has no target, so any token will do.
        labels = y[window].masked_fill(y[window] == -1, -100)
        labels = F.pad(labels, (1, 0), value=-100)
        rows.append(dict(input_ids=F.pad(x[window], (0, 1)), labels=labels))

    class InOrder(transformers.Trainer):
        def _get_train_sampler(self, *args):
            return torch.utils.data.SequentialSampler(rows)

    trainer = InOrder(theirs, train_dataset=rows, args=transformers.TrainingArguments(
        str(tmp_path / "theirs"), per_device_train_batch_size=1, gradient_accumulation_steps=8,
        max_steps=STEPS - 1, learning_rate=1e-3, lr_scheduler_type="constant", weight_decay=0.0,
        adam_beta1=cfg.beta1, adam_beta2=cfg.beta2, max_grad_norm=cfg.grad_clip,
        logging_steps=1, report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True))
    trainer.train()
    expected = [row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row]
    assert norms == pytest.approx(expected, rel=1e-5) and len(norms) == 3
    for name, p in wrapped.named_parameters():
        q = theirs.get_parameter(name)
        assert (p - q).norm() <= 1e-5 * q.norm(), name

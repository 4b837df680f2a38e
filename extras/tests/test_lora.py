"""
LoRA: peft's numbers, the same ones in every mode, small checkpoints, and bytes.

    pip install transformers peft && python -m pytest -q extras/tests/test_lora.py
"""

import json
import os
import shutil
from collections import Counter
from dataclasses import asdict, replace
from types import SimpleNamespace

import formulas
import pytest
import torch
import training
from harness import on_ranks, refused, values
from training import arguments, built, read_ckpt, run_training, steps, tiny

import checkpoint
import sample
import train
from configurator import load_config, resolve
from data.loader import TokenFiles
from extras import huggingface, lora
from ranks import World

SIZES = dict(n_embd=64, n_head=4)  # 3 ranks cut its rows unevenly
NAME = dict(SIZES, model="gpt2+lora")  # of a run that goes on too: the harness passes sizes
LORA = dict(NAME, lora_rank=4)
KEYS = dict(LORA, lora_alpha=6.0, learning_rate=1e-2)
ZERO3 = dict(strategy="full_shard")
MODES = {  # {name: (ranks, keys)}
    "ddp": (2, dict(strategy="ddp")),
    "zero2": (2, dict(strategy="shard_grad_op", grad_sync="last")),
    "zero3": (3, ZERO3),
    "hybrid": (4, dict(strategy="hybrid_shard", shard_group_size=2)),
    "regathered": (4, dict(ZERO3, reshard_group_size=2)),
    "checkpointed": (2, dict(ZERO3, activation_checkpointing="full", cpu_offload=0.5)),
    "compiled": (2, dict(ZERO3, compile=True, activation_checkpointing="selective")),
    "units": (2, dict(ZERO3, wrap_min_params=800, loss_chunks=2)),
    "stopped": (2, dict(ZERO3, checkpoint="sharded", max_iters=2)),  # to go on from it
    "resumed": (3, dict(ZERO3, checkpoint="sharded", init_from="resume"))}
BITS = (0, 4) if torch.__version__ >= "2.12" else (0,)  # before, FSDP2 refuses integers


@pytest.fixture(scope="module")
def base(tmp):
    """A run's directory, to begin on."""
    run_training(tmp, "lora-base", max_iters=2, **SIZES)
    return os.path.join(tmp, "lora-base")


@pytest.fixture(scope="module")
def single(tmp, base):
    """{bits of the base: the rows of one process}, with whose steps the others are compared."""
    return {bits: run_training(tmp, f"lora-single{bits}", base=base, base_bits=bits, **KEYS,
                               compare=f"{tmp}/lora{bits}.json") for bits in (0, 4)}


@pytest.fixture(scope="module")
def ranks(tmp, base, single):
    results = {}
    for world in (2, 3, 4):
        cases = {}
        for bits in BITS:
            more = dict(tmp=tmp, base=base, base_bits=bits, compare=f"{tmp}/lora{bits}.json")
            for name, keys in [(name, keys) for name, (n, keys) in MODES.items() if n == world]:
                out = name.replace("resumed", "stopped")
                run = dict(KEYS, **keys, **more, name=f"lora-{out}{bits}")
                cases[f"{name}{bits}"] = run_training, run
            if world == 3:
                cases[f"bytes{bits}"] = case_bytes, dict(tmp=tmp, base_bits=bits)
        results.update(on_ranks(world, cases))
    return results


@pytest.mark.slow
@pytest.mark.parametrize("name", MODES)
@pytest.mark.parametrize("bits", BITS)
def test_lora_every_mode_has_the_numbers_of_one_process(ranks, single, name, bits):
    """All numbers of each step are compared."""
    found, expected = values(ranks, f"{name}{bits}")[0], single[bits]
    assert len(found) == (2 if name == "stopped" else 5)
    for key, limit in (("loss", 1e-6), ("grad_norm", 1e-5)):
        wanted = [row[key] for row in expected][:len(found)]
        assert [row[key] for row in found] == pytest.approx(wanted, rel=limit)


@pytest.mark.parametrize("bits", [0, 4])
def test_lora_only_the_adapters_train_and_are_saved(tmp, base, single, bits):
    assert single[bits][-1]["loss"] < single[bits][0]["loss"] - 0.02
    state = read_ckpt(os.path.join(tmp, f"lora-single{bits}"))
    assert len(state["model"]) == 2 * 12 and state["model_args"]["base"] == base
    assert all(name.endswith((".lora_A", ".lora_B")) for name in state["model"])
    assert len(state["optimizer"]["state"]) == 24
    cfg = load_config(["--model=gpt2+lora", f"--base={os.path.relpath(base)}"])
    assert cfg.sizes.base == base  # a later run may start in another directory
    model = train.meta_model(load_config(arguments(tmp, "x", **KEYS)))
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == set(state["model"])
    assert all(p.is_meta for p in model.parameters())  # or no FLOPs are counted
    unopened = train.meta_model(cfg)
    with pytest.raises(ValueError, match="not open"):
        unopened.initial_value("transformer.ln_f.weight", (768,), 1)


@pytest.mark.parametrize("bits", [0, 4])
def test_lora_samples_and_begins_on_other_adapters(tmp, single, monkeypatch, capsys, bits):
    """sample.py takes no flag of LoRA, and a run may begin on what another has trained."""
    out = os.path.join(tmp, f"lora-single{bits}")
    monkeypatch.setattr(sample, "tokenizer", lambda *meta: (lambda text: [1], str, 67))
    sample.main([f"--out_dir={out}", "--max_new_tokens=5", "--device=cpu", "--dtype=float32"])
    assert capsys.readouterr().out.startswith("[1, ")
    rows = run_training(tmp, "lora-again", init_from=out, max_iters=1, **NAME)
    assert rows[0]["loss"] < single[bits][0]["loss"] - 0.02  # the same batch
    state = read_ckpt(os.path.join(tmp, "lora-again"))
    assert state["model_args"]["base"] == os.path.join(tmp, "lora-base")


@pytest.mark.parametrize("bits", [0, 4])
def test_lora_resumes_bit_for_bit(tmp, base, single, bits):
    out = os.path.join(tmp, f"lora-again{bits}")
    run_training(tmp, out, base=base, base_bits=bits, max_iters=2, **KEYS)
    rows = run_training(tmp, out, init_from="resume", **NAME, learning_rate=KEYS["learning_rate"])
    assert [row["loss"] for row in rows] == [row["loss"] for row in single[bits]]
    again, whole = (read_ckpt(path)["model"] for path in (out, f"{tmp}/lora-single{bits}"))
    assert all(torch.equal(again[key], whole[key]) for key in whole)


def test_lora_initial_values_are_a_linear_layers_and_zero():
    """A's bound is 1 / sqrt(its inputs), as nn.Linear's, and not its rank's."""
    for shape in ((4, 400), (400, 4)):
        value = lora.initial_value("x.lora_A", shape, 1)
        assert value.abs().max().item() == pytest.approx(shape[1] ** -0.5, rel=0.01)
        assert not lora.initial_value("x.lora_B", shape, 1).any()
        assert not torch.equal(lora.initial_value("y.lora_A", shape, 1), value)


def test_lora_adapts_plain_linear_layers_of_the_blocks_only(tmp):
    """Others have a forward of their own, which LoRA's would replace, as float8's would LoRA's."""
    class Loud(torch.nn.Linear):
        def forward(self, x):
            return 100 * super().forward(x)

    gpt = training.plain_gpt()
    gpt.blocks[0].mlp.c_fc.__class__ = Loud
    found = lora.targets(gpt, "")
    assert len(found) == 11 and gpt.blocks[0].mlp.c_fc not in found.values()
    model = dict(LORA, model="gpt2+lora+float8")
    cfg = resolve(tiny(tmp, dtype="bfloat16", **model), World())
    line = refused(train.build, train.meta_model(cfg), cfg, World())
    assert "c_attn is a LoRALinear" in line


def test_lora_adapts_pytorchs_own_layer_in_evaluation_too():
    """Its fast path would take the base's weights alone."""
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = SimpleNamespace(blocks=layer, named_modules=layer.named_modules)
    lora.adapt(model, lora.Keys(lora_rank=2))
    for name, p in layer.named_parameters():
        if ".lora_" in name:
            torch.nn.init.normal_(p)
    x = torch.randn(1, 3, 8)
    trains = layer(x)
    with torch.no_grad():
        assert torch.allclose(layer.eval()(x), trains, rtol=1e-4)


def test_lora_whose_base_was_trained_on_says_so(tmp, base, tmp_path, capsys):
    """The adapters were trained beside other weights. The header knows which, and stays so."""
    own, out = shutil.copytree(base, tmp_path / "base"), str(tmp_path / "out")
    run_training(tmp, out, base=str(own), max_iters=1, **KEYS)
    ckpt = read_ckpt(own)
    torch.save({**ckpt, "iter_num": 3}, own / "ckpt.pt")
    for max_iters in (2, 3):
        capsys.readouterr()
        run_training(tmp, out, init_from="resume", max_iters=max_iters, **NAME,
                     learning_rate=KEYS["learning_rate"])
        said = capsys.readouterr().err
        assert f"step 2 of run {ckpt['run']}" in said and f"now step 3 of run {ckpt['run']}" in said


def test_lora_a_base_in_hugging_faces_format_is_known_by_its_weights(base, tmp_path):
    """So one that was replaced is said, as one that was trained on."""
    pytest.importorskip("safetensors")
    source = checkpoint.find(base, World())
    origins = []
    for i, factor in enumerate((1, 1, 1.01)):
        scaled = replace(source, get=lambda key, factor=factor: source.get(key) * factor)
        huggingface.export(scaled, tmp_path / str(i))
        origins.append(huggingface.open_pretrained(str(tmp_path / str(i))).header["origin"])
    assert origins[0] == origins[1] != origins[2]


def test_lora_exports_of_a_shorter_run_on_a_base_of_ours(tmp, base, tmp_path):
    """Merged, with the base's context; and for peft, which needs the base exported."""
    transformers, peft = map(pytest.importorskip, ("transformers", "peft"))
    out, merged, plain, adapter = (str(tmp_path / x) for x in ("out", "merged", "plain", "adapter"))
    run_training(tmp, out, base=base, block_size=8, eval_iters=1000, **KEYS)
    there = sorted(os.listdir(base))
    assert f"{base}: files are here" in refused(huggingface.main, [out, base])
    assert f"base={base} is a run of ours" in refused(huggingface.main, [out, adapter, "--adapter"])
    assert sorted(os.listdir(base)) == there and not os.path.exists(adapter)
    for argv in ([out, merged], [base, plain], [out, adapter, "--adapter", f"--base={plain}"]):
        huggingface.main(argv)
    files = TokenFiles(f"{tmp}/toy", "val", 8, 67)
    x, y = files.batch(range(len(files)))
    for theirs in (transformers.AutoModelForCausalLM.from_pretrained(merged),
                   peft.AutoPeftModelForCausalLM.from_pretrained(adapter)):
        loss = torch.nn.functional.cross_entropy(theirs(x).logits.flatten(0, 1), y.flatten())
        assert loss.item() == pytest.approx(read_ckpt(out)["best_val_loss"], rel=1e-5)
        assert theirs.config.n_positions == 16


def case_bytes(tmp, **bits):
    """What a step sends, and in which types parameters are kept."""
    run = built(tmp, dtype="bfloat16", frozen_dtype="bfloat16", **ZERO3, **KEYS, **bits)
    steps(run)
    sent = Counter()
    with training.heard() as calls:
        steps(run, first=1)
    for kind, group, _, size in calls:
        sent[kind, group] += size
    params = run.model.named_parameters()
    return dict(
        dtypes=sorted({(name.split(".")[-1], str(p.dtype)) for name, p in params}),
        is_formula=sent == formulas.traffic(run.model, run.cfg, run.world))


@pytest.mark.slow
@pytest.mark.parametrize("bits", BITS)
def test_lora_gathers_in_bf16_or_bytes_and_reduces_adapters_only(ranks, bits):
    for got in values(ranks, f"bytes{bits}"):
        assert {kind for name, kind in got["dtypes"] if "lora" in name} == {"torch.float32"}
        base = {kind for name, kind in got["dtypes"] if "lora" not in name}
        assert base == {"torch.bfloat16", *["torch.uint8"] * (bits == 4)}
        assert got["is_formula"]


@pytest.mark.parametrize("keys, said", [
    (dict(base=""), "--base"),
    (dict(lora_targets="lm_head"), "matches none of the blocks' 12 linear layers"),
    (dict(model="llama+lora"), "is of model=gpt2, not llama"),
    (dict(name="lora-base"), "must stay")])  # a run moves what it finds in its out_dir
def test_lora_mistakes_are_one_line(tmp, base, keys, said):
    run = {**LORA, "base": base, "name": "lora-none", **keys}
    assert said in refused(run_training, tmp, **run)
    assert os.path.exists(os.path.join(base, "ckpt.pt"))


def adapters(ours, theirs):
    """(our parameter, peft's) for each that trains."""
    for name, p in theirs.named_parameters():
        if p.requires_grad:
            name = name.removeprefix("base_model.model.").removesuffix(".default.weight")
            yield ours.get_parameter(name), p


def peft_run(tmp_path, kind):
    """(cfg, our model and optimizer, peft's with the same values) on a base of transformers."""
    peft = pytest.importorskip("peft")
    from test_huggingface import begun, make_hf
    hf = tmp_path / "hf"
    theirs = make_hf(hf, kind)
    if kind == "qwen2":  # in bf16, to which merged weights must not be rounded
        theirs.bfloat16().save_pretrained(hf)
        theirs = type(theirs).from_pretrained(hf, dtype=torch.float32).eval()
    names = {"smollm2": ["q_proj", "down_proj"], "llama3": ["v_proj", "up_proj"],
             "qwen2": ["k_proj", "o_proj"], "gpt2": ["c_attn", "mlp.c_proj"]}[kind]
    name = "gpt2" if kind == "gpt2" else "llama"
    cfg, ours, optimizer = begun(
        f"--model={name}+lora", f"--base={hf}", "--lora_rank=4", "--lora_alpha=12",
        f"--lora_targets=({'|'.join(names)})$", "--out_dir=none")
    config = peft.LoraConfig(r=4, lora_alpha=12, target_modules=names, task_type="CAUSAL_LM",
                             fan_in_fan_out=kind == "gpt2")
    theirs = peft.get_peft_model(theirs, config)
    config.base_model_name_or_path = str(hf)  # as from_pretrained would have it
    for p, q in adapters(ours, theirs):
        q.data.copy_(p)
    return cfg, ours, optimizer, theirs


@pytest.mark.slow  # it needs peft
@pytest.mark.parametrize("kind", ["smollm2", "llama3", "qwen2", "gpt2"])
def test_lora_ten_steps_are_pefts(tmp_path, kind):
    """Losses, logits and gradients; then out in peft's layout and merged, and in again."""
    transformers, peft = map(pytest.importorskip, ("transformers", "peft"))
    from test_huggingface import loaded
    cfg, ours, optimizer, theirs = peft_run(tmp_path, kind)
    own = torch.optim.AdamW([q for _, q in adapters(ours, theirs)], lr=3e-2,
                            betas=(cfg.beta1, cfg.beta2), weight_decay=cfg.weight_decay)
    theirs.eval()  # GPT-2's has dropout
    for group in optimizer.param_groups:
        group["lr"] = 3e-2
    for step in range(10):
        idx = torch.randint(91, (2, 33), generator=torch.Generator().manual_seed(step))
        logits, loss = ours(idx[:, :-1], idx[:, 1:])
        out = theirs(idx[:, :-1])
        expected = torch.nn.functional.cross_entropy(out.logits.flatten(0, 1), idx[:, 1:].flatten())
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
        assert (logits - out.logits).abs().max() < 1e-5 * out.logits.abs().max()
        loss.backward()
        expected.backward()
        for p, q in adapters(ours, theirs):
            assert (p.grad - q.grad).norm() <= 1e-5 * q.grad.norm().clamp(min=1e-3)
        for each in (optimizer, own):
            each.step()
            each.zero_grad()
    with theirs.disable_adapter():
        difference = (theirs(idx[:, :-1]).logits - out.logits).abs().max()
    assert difference > 0.1  # the adapters count

    # Out: a checkpoint of ours in peft's layout, and merged.
    flat = checkpoint.flat_state(ours)
    header = dict(huggingface.open_pretrained(str(tmp_path / "hf")).header)
    header.update(model_args=asdict(cfg.sizes), config={"model": cfg.model})
    shapes = {key: tuple(t.shape) for key, t in flat.items()}
    source = checkpoint.Source("memory", header, shapes, flat.__getitem__)
    huggingface.export_adapter(source, str(tmp_path / "adapter"))
    huggingface.export(source, str(tmp_path / "merged"))
    auto = transformers.AutoModelForCausalLM
    with torch.no_grad():
        expected = ours.eval()(idx, idx)[0]
        back = peft.PeftModel.from_pretrained(
            auto.from_pretrained(tmp_path / "hf", dtype=torch.float32),
            tmp_path / "adapter").eval()
        assert (back(idx).logits - expected).abs().max() < 1e-4
        merged = auto.from_pretrained(tmp_path / "merged").eval()
        assert (merged(idx).logits - expected).abs().max() < 1e-4
        # In: what peft itself has saved.
        theirs.save_pretrained(str(tmp_path / "theirs"))
        again = loaded(tmp_path / "theirs")
        assert (again(idx, idx)[0] - expected).abs().max() < 1e-4


@pytest.mark.parametrize("change, said", [
    (dict(use_rslora=True), "use_rslora=True"),
    (dict(alpha_pattern={"c_attn": 2}), "alpha_pattern={"),
    (dict(init_lora_weights="pissa"), "init_lora_weights='pissa'"),  # it changes the base
    (dict(later="on"), "later='on'"),
    ("h.1.attn.c_attn.lora_magnitude_vector", "lora_magnitude_vector"),  # DoRA's
    ("wte.lora_A.weight", "wte.lora_A"),
    ({}, "no such")])  # nothing else is wrong: the next line would be its base's
def test_lora_adapters_that_we_do_not_compute_are_refused(tmp_path, change, said):
    safetensors = pytest.importorskip("safetensors.torch")
    config = dict(peft_type="LORA", r=4, lora_alpha=8, later=None,
                  base_model_name_or_path=str(tmp_path / "no such"))
    names = ["h.0.attn.c_attn.lora_A.weight"]
    if isinstance(change, str):
        names.append(change)
    else:
        config.update(change)
    tensors = {f"base_model.model.transformer.{name}": torch.ones(4, 8) for name in names}
    safetensors.save_file(tensors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    line = refused(huggingface.open_pretrained, str(tmp_path))
    assert said in line and str(tmp_path) in line

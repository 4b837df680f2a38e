"""
LoRA: peft's numbers, the same ones in every mode, small checkpoints, and bytes.

    pip install transformers peft && python -m pytest -q extras/tests/test_lora.py
"""

import json
import os
import shutil
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch
from harness import (
    arguments,
    built,
    heard,
    launch,
    losses,
    on_ranks,
    plain_gpt,
    read_ckpt,
    refused,
    run_training,
    script,
    started,
    steps,
    tiny,
    values,
)
from torch.distributed.tensor import DTensor

import checkpoint
import start
import train
from configurator import load_config, resolve
from extras import huggingface, lora
from ranks import World, setup

NAME = dict(model="gpt2+lora")  # of a run that goes on too, since the harness passes a model
LORA = dict(NAME, lora_rank=4)
KEYS = dict(LORA, lora_alpha=6.0, learning_rate=1e-2)
ZERO3 = dict(strategy="full_shard")
MODES = {  # name: (ranks, keys)
    "ddp": (2, dict(strategy="ddp")),
    "zero2": (2, dict(strategy="shard_grad_op", grad_sync="last")),
    "zero3": (2, ZERO3),
    "sharded": (2, dict(ZERO3, checkpoint="sharded")),
    "checkpointed": (2, dict(ZERO3, activation_checkpointing="full", cpu_offload=0.5)),
    "compiled": (2, dict(ZERO3, compile=True, activation_checkpointing="selective")),
    "units": (2, dict(ZERO3, wrap_min_params=800, loss_chunks=2)),
    "hybrid": (4, dict(strategy="hybrid_shard", shard_group_size=2)),
}


@pytest.fixture(scope="module")
def base(tmp):
    """A run's directory, to begin on."""
    run_training(tmp, "lora-base", max_iters=2)
    return os.path.join(tmp, "lora-base")


def keys_of_run(tmp, base, name, **more):
    return {**dict(tmp=tmp, name="lora-" + name, base=base, **KEYS), **more}


@pytest.fixture(scope="module")
def ranks(tmp, base):
    results = {}
    for world in (2, 4):
        cases = {name: (run_training, keys_of_run(tmp, base, name, **keys))
                 for name, (n, keys) in MODES.items() if n == world}
        if world == 2:
            cases["bytes"] = case_bytes, dict(tmp=tmp)
        results.update(on_ranks(world, cases))
    return results


@pytest.fixture(scope="module")
def single(tmp, base):
    return run_training(**keys_of_run(tmp, base, "single"))


def columns(rows):
    return [row["loss"] for row in rows], [row["grad_norm"] for row in rows]


def weights(tmp, name):
    source = checkpoint.find(os.path.join(tmp, "lora-" + name), World())
    return {key: source.whole(key) for key in source.shapes}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODES)
def test_lora_every_mode_has_the_numbers_of_one_process(tmp, ranks, single, name):
    ours, theirs = columns(values(ranks, name)[0]), columns(single)
    assert ours[0] == pytest.approx(theirs[0], rel=1e-6)
    assert ours[1] == pytest.approx(theirs[1], rel=1e-5)
    a, b = weights(tmp, name), weights(tmp, "single")
    assert a.keys() == b.keys()
    for key in a:
        assert (a[key] - b[key]).norm() <= 2e-5 * b[key].norm().clamp(min=1e-3), key


def test_lora_only_the_adapters_train_and_are_saved(tmp, base, single):
    assert single[-1]["loss"] < single[0]["loss"] - 0.02
    state = read_ckpt(os.path.join(tmp, "lora-single"))
    assert len(state["model"]) == 2 * 12 and state["model_args"]["base"] == base
    assert all(name.endswith((".lora_A", ".lora_B")) for name in state["model"])
    assert len(state["optimizer"]["state"]) == 24
    model = train.meta_model(load_config(arguments(tmp, "x", **KEYS)))
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == set(state["model"])
    assert all(p.is_meta for p in model.parameters())  # or no FLOPs are counted


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_lora_resumes_bit_for_bit_and_at_another_world_size(tmp, base, ranks, kind):
    """Without a flag of LoRA: the checkpoint has them."""
    whole = columns(values(ranks, "zero3")[0])[0]
    name = f"part-{kind}"
    out = os.path.join(tmp, "lora-" + name)
    run = dict(ZERO3, **NAME, checkpoint=kind, learning_rate=KEYS["learning_rate"])
    first = keys_of_run(tmp, base, name, max_iters=2, **run)
    second = dict(run, tmp=tmp, name="lora-" + name, init_from="resume", max_iters=4)
    results = on_ranks(2, {"first": (run_training, first), "second": (run_training, second)})
    values(results, "first")
    assert columns(values(results, "second")[0])[0] == whole[:4]
    p = launch(1, arguments(tmp, out, init_from="resume", max_iters=5, **NAME,
                            learning_rate=KEYS["learning_rate"]))
    assert "at step 4" in p.stdout
    assert losses(out) == pytest.approx(whole, rel=1e-6)


def test_lora_samples_and_begins_on_other_adapters(tmp, single):
    """sample.py takes no flag of LoRA, and a run may begin on what another has trained."""
    out = os.path.join(tmp, "lora-single")
    p = script("sample.py", f"--out_dir={out}", "--start=ids:1", "--num_samples=1",
               "--max_new_tokens=5", "--device=cpu", "--dtype=float32")
    assert p.returncode == 0, p.stderr
    rows = run_training(tmp, "lora-again", init_from=out, max_iters=1, **NAME)
    assert rows[0]["loss"] < single[0]["loss"] - 0.02  # the same batch
    state = read_ckpt(os.path.join(tmp, "lora-again"))
    assert state["model_args"]["base"] == os.path.join(tmp, "lora-base")


def test_lora_begins_on_a_sharded_base_with_its_loss(tmp):
    """B is zero, so the first loss is the base's own."""
    base = dict(max_iters=1, checkpoint="sharded")
    run_training(tmp, "lora-sharded-base", **base)
    base = os.path.join(tmp, "lora-sharded-base")
    begun, whole = (run_training(tmp, f"lora-begun-{len(keys)}", max_iters=1, **keys)
                    for keys in (dict(KEYS, base=base), dict(init_from=base)))
    assert columns(begun)[0] == pytest.approx(columns(whole)[0], rel=1e-6)


def of_before(path):
    """A checkpoint as it was before 2026-11-28: the base beside the sizes, no "+" in its model."""
    header = checkpoint.open_one(path).header
    args = header["model_args"]
    header.update(base=args.pop("base"), base_origin=args.pop("base_origin"))
    header["config"]["model"] = "gpt2"
    if os.path.isdir(path):
        with open(os.path.join(path, checkpoint.HEADER), "w") as f:
            f.write(checkpoint.sealed(header))
    else:
        ckpt = torch.load(path, weights_only=True)
        torch.save({**ckpt, **header}, path)


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_lora_checkpoints_of_before_say_how_they_are_brought_up_to_date(tmp, base, kind):
    whole = run_training(**keys_of_run(tmp, base, f"new-{kind}", checkpoint=kind, max_iters=3))
    name = f"lora-old-{kind}"
    out = os.path.join(tmp, name)
    run_training(**keys_of_run(tmp, base, f"old-{kind}", checkpoint=kind, max_iters=2))
    path = checkpoint.find(out, World()).path
    of_before(path)
    p = script("sample.py", f"--out_dir={out}", "--device=cpu")
    assert p.returncode == 1 and p.stderr.count("\n") == 1, p.stderr
    assert path in p.stderr and "extras/lora.py, whose header says" in p.stderr
    assert f"python -m extras.lora {out}" in lora.__doc__.replace("out-x", out)
    p = script("extras/lora.py", out)
    assert p.returncode == 0, p.stderr
    keys = dict(NAME, checkpoint=kind, learning_rate=KEYS["learning_rate"])
    rows = run_training(tmp, name, init_from="resume", max_iters=3, **keys)
    assert columns(rows) == columns(whole)
    assert "no LoRA checkpoint of before" in refused(lora.main, [out])


def test_lora_commands_of_before_say_what_to_pass():
    line = refused(load_config, ["extras/config/finetune_smollm2.py", "--lora_rank=16"])
    assert "lora_rank" in line and "extras/lora.py, whose header says what to pass" in line
    paths = [f"extras/config/{name}.py" for name in ("finetune_smollm2", "lora")]
    assert " ".join(paths) in lora.__doc__
    cfg = load_config(paths)
    assert (cfg.model, cfg.init_from, cfg.sizes.lora_rank) == ("llama+lora", "scratch", 16)
    assert cfg.sizes.base == "HuggingFaceTB/SmolLM2-135M"


def test_lora_initial_values_are_a_linear_layers_and_zero():
    """A's bound is 1 / sqrt(its inputs), as nn.Linear's, and not its rank's."""
    torch.manual_seed(1)
    for shape in ((4, 400), (400, 4)):
        value = lora.initial_value("x.lora_A", shape, 1)
        of_torch = torch.nn.Linear(shape[1], shape[0]).weight
        assert value.abs().max().item() == pytest.approx(of_torch.abs().max().item(), rel=0.01)
        assert not lora.initial_value("x.lora_B", shape, 1).any()
        assert not torch.equal(lora.initial_value("y.lora_A", shape, 1), value)


def test_lora_base_is_found_from_another_directory(tmp, base, monkeypatch):
    monkeypatch.chdir(tmp)
    cfg = load_config(arguments(tmp, "x", base="lora-base", **KEYS))
    assert started(resolve(cfg, World()), World())[0].sizes.base == base


def test_lora_whose_base_was_trained_on_or_moved_says_so(tmp, base, tmp_path, capsys):
    """The adapters were trained beside other weights. The header knows which."""
    own, out = shutil.copytree(base, tmp_path / "base"), str(tmp_path / "out")
    run_training(tmp, out, base=str(own), max_iters=1, **KEYS)
    capsys.readouterr()

    def starts():
        cfg = load_config(arguments(tmp, out, init_from="resume", **NAME))
        started(resolve(cfg, World()), World())
        return capsys.readouterr().err

    assert starts() == ""
    ckpt = read_ckpt(own)
    run = ckpt["run"]
    for change, now in ((dict(iter_num=3), f"step 3 of run {run}"),
                        (dict(run="another"), "step 2 of run another")):
        torch.save({**ckpt, **change}, own / "ckpt.pt")
        line = starts()
        assert line.count("\n") == 1 and f"base={own} " in line
        assert f"step 2 of run {run}" in line and now in line
    # what such a run saves still knows the base of its adapters
    run_training(tmp, out, init_from="resume", max_iters=2,
                 learning_rate=KEYS["learning_rate"], **NAME)
    assert f"step 2 of run {run}" in starts()
    p = script("extras/huggingface.py", out, tmp_path / "merged")
    assert p.returncode == 0 and p.stderr.count("now step 2 of run another") == 1, p.stderr
    own.rename(tmp_path / "moved")
    line = refused(starts)
    assert f"base={own}: " in line and "init_from" not in line


def case_bytes(tmp):
    """What a step sends, and in which types parameters are kept."""
    run = built(tmp, dtype="bfloat16", frozen_dtype="bfloat16", gradient_accumulation_steps=2,
                **ZERO3, **KEYS)
    steps(run)
    with heard() as calls:
        steps(run, first=1)
    params = dict(run.model.named_parameters())
    assert all(isinstance(p, DTensor) for p in params.values())
    of_blocks = {name: p for name, p in params.items() if ".h." in name}
    padded = {name: -(-len(p) // 2) * 2 * p[0].numel() for name, p in params.items()}
    return dict(
        dtypes=sorted({(name.split(".")[-1], str(p.dtype)) for name, p in params.items()}),
        gathers=[call for call in calls if call[0] == "all_gather"],
        reduced=sum(size for kind, _, _, size in calls if kind == "reduce_scatter"),
        blocks=sum(padded[name] for name in of_blocks),
        root=sum(padded.values()) - sum(padded[name] for name in of_blocks),
        adapters=sum(n for name, n in padded.items() if ".lora_" in name))


@pytest.mark.slow
def test_lora_gathers_in_bf16_and_reduces_adapters_only(ranks):
    for got in values(ranks, "bytes"):
        assert {tuple(pair) for pair in got["dtypes"]} == {
            ("weight", "torch.bfloat16"), ("bias", "torch.bfloat16"),
            ("lora_A", "torch.float32"), ("lora_B", "torch.float32")}
        assert {dtype for _, _, dtype, _ in got["gathers"]} == {"torch.bfloat16"}
        assert sum(size for *_, size in got["gathers"]) == 2 * (2 * got["blocks"] + got["root"])
        assert got["reduced"] == 4 * got["adapters"]


@torch.no_grad()
def test_lora_merged_weights_give_the_adapters_logits(tmp, single):
    world = setup("cpu", "auto")
    cfg = load_config(arguments(tmp, os.path.join(tmp, "lora-single"), init_from="resume", **NAME))
    cfg, source, _ = started(resolve(cfg, world), world)
    idx = torch.arange(16)[None]
    adapted = train.build(train.meta_model(cfg), cfg, world, source)[0].eval()(idx, idx)[0]
    merged, gpt = huggingface.merged(source), plain_gpt()
    before = gpt(idx, idx)[0]
    for name, p in gpt.named_parameters():
        p.copy_(merged.get(f"model.{name}"))
    after = gpt(idx, idx)[0]
    assert (after - adapted).abs().max() < 1e-5 < (after - before).abs().max()


def test_lora_merged_weights_keep_what_bf16_would_round_away(monkeypatch):
    """Of a base in bf16, whose next number after 1 is 1.0078."""
    shapes = {"model.x.weight": (2, 3)}
    base = checkpoint.Source(
        "base", dict(config={}), shapes, lambda key: torch.ones(2, 3, dtype=torch.bfloat16))
    adapters = {"model.x.lora_A": torch.ones(1, 3), "model.x.lora_B": torch.full((2, 1), 0.001)}
    header = dict(model_args=dict(lora_alpha=2.0, lora_rank=1), config={"model": "gpt2+lora"})
    cfg = SimpleNamespace(sizes=SimpleNamespace(opened=base))
    monkeypatch.setattr(huggingface, "with_own_files", lambda *args: cfg)
    sizes = {key: tuple(t.shape) for key, t in adapters.items()}
    source = checkpoint.Source("adapters", header, sizes, adapters.__getitem__)
    merged = huggingface.merged(source)
    assert torch.equal(merged.whole("model.x.weight"), torch.full((2, 3), 1.002))
    assert merged.header == dict(header, config={"model": "gpt2"}, kept=None)


@pytest.mark.parametrize("out", ["", "lora-single"])
def test_lora_a_base_that_lacks_a_tensor_is_refused(tmp, tmp_path, single, out):
    """By a new adapter, and by one that goes on."""
    base = os.path.join(tmp, "lora-base")
    ckpt = read_ckpt(base)
    del ckpt["model"]["transformer.h.1.ln_1.weight"]
    keys = dict(NAME, init_from="resume") if out else dict(LORA, base=base)
    cfg = load_config(arguments(tmp, os.path.join(tmp, out or "lora-new"), **keys))
    cfg, source, _ = started(resolve(cfg, World()), World())
    torch.save(ckpt, tmp_path / "ckpt.pt")
    cfg.sizes.opened = checkpoint.open_full(str(tmp_path / "ckpt.pt"))
    line = refused(train.build, train.meta_model(cfg), cfg, World(), source)
    assert "transformer.h.1.ln_1.weight is missing" in line


def test_lora_without_a_base_has_the_models_initial_values(tmp):
    """As bench builds it."""
    cfg = resolve(tiny(tmp, **LORA), World())
    adapted, _ = train.build(train.meta_model(cfg), cfg, World())
    named = dict(adapted.named_parameters())
    for name, p in plain_gpt().named_parameters():
        assert torch.equal(named[name], p), name


def test_lora_mistakes_are_one_line(tmp, base):
    def said(*argv, **more):
        argv = [*arguments(tmp, os.path.join(tmp, "lora-none"), **{**LORA, **more}), *argv]
        world = setup("cpu", "auto")

        def begin():
            cfg, _, _ = started(resolve(load_config(argv), world), world)
            train.meta_model(cfg)

        return refused(begin)

    assert "--base" in said()
    assert "matches none of the blocks' 12 linear layers" in said(
        "--lora_targets=lm_head", base=base)
    assert "not a regular expression" in said("--lora_targets=(", base=base)
    assert "--frozen_dtype=float32" in said("--frozen_dtype=bfloat16", base=base)
    line = said(out_dir=base, init_from="resume")  # a run without adapters
    assert "has model=gpt2: for gpt2+lora pass it by that model's own key" in line
    assert "lora_rank=0 must be" in said("--lora_rank=0", base=base)
    assert "pass --model=gpt2+lora" in said(base=base, model="llama+lora")
    for out_dir in (base, os.path.dirname(base)):  # a run moves what it finds there
        line = said(out_dir=out_dir, base=os.path.join(base, "ckpt.pt"))
        assert "must stay" in line and "--out_dir" in line


def test_lora_leaves_linear_layers_with_a_forward_of_their_own_alone(tmp):
    class Loud(torch.nn.Linear):
        def forward(self, x):
            return 100 * super().forward(x)

    gpt = plain_gpt()
    gpt.blocks[0].mlp.c_fc.__class__ = Loud
    found = lora.targets(gpt, "")
    assert len(found) == 11 and gpt.blocks[0].mlp.c_fc not in found.values()


def test_lora_base_that_has_moved_is_named_anew(tmp, base, tmp_path):
    """By a run that goes on, which says so."""
    out, moved = str(tmp_path / "out"), str(tmp_path / "moved")
    first = run_training(tmp, out, base=base, max_iters=1, **KEYS)
    shutil.copytree(base, moved)
    argv = arguments(tmp, out, init_from="resume", **NAME, base=moved)
    cfg, source, _ = started(resolve(load_config(argv), World()), World())
    assert cfg.sizes.base == moved and cfg.sizes.opened.path.startswith(moved)
    assert first


def test_lora_in_float8_is_refused(tmp):
    cfg = resolve(tiny(tmp, n_embd=48, dtype="float8", **LORA), World())
    line = refused(train.parallelize, train.meta_model(cfg), cfg, World())
    assert "c_attn is a LoRALinear" in line and "--dtype=bfloat16" in line


def test_lora_begun_on_other_adapters_does_not_move_its_base_away(tmp, base, single):
    """Then its checkpoint would be its own base."""
    cfg = load_config(arguments(tmp, base, init_from=os.path.join(tmp, "lora-single"),
                                **NAME))
    assert "must stay" in refused(started, cfg, World())
    cfg = load_config(arguments(tmp, "elsewhere", init_from=os.path.join(tmp, "lora-single"),
                                **NAME))
    assert started(cfg, World())[0].sizes.base == base


def test_lora_frozen_too_leaves_nothing_to_train(tmp):
    cfg = resolve(tiny(tmp, freeze="lora", **LORA), World())
    assert "0 are left to train" in refused(train.meta_model, cfg)


def test_lora_is_asked_for_by_its_model(tmp_path):
    path = tmp_path / "lora.py"
    path.write_text("model = 'llama'\nn_kv_head = 9\n")
    cfg = load_config([str(path), "--model=llama+lora", "--lora_alpha=2"])
    assert (cfg.model, cfg.sizes.lora_alpha, cfg.sizes.n_kv_head) == ("llama+lora", 2.0, 9)
    assert "lora_rank" in refused(load_config, ["--model=gpt2+lora", "--loro_rank=8"])
    assert "no loro.py" in refused(load_config, ["--model=gpt2+loro"])


def peft_run(tmp_path, kind):
    """(cfg, our model and optimizer, peft's with the same values) on a base of transformers."""
    peft = pytest.importorskip("peft")
    from test_huggingface import make_hf
    hf = tmp_path / "hf"
    theirs = make_hf(hf, kind)
    names = {"smollm2": ["q_proj", "down_proj"], "llama3": ["v_proj", "up_proj"],
             "qwen2": ["k_proj", "o_proj"], "gpt2": ["c_attn", "mlp.c_proj"]}[kind]
    world = setup("cpu", "auto")
    name = "gpt2" if kind == "gpt2" else "llama"
    argv = [f"--model={name}+lora", f"--base={hf}", "--device=cpu", "--compile=False",
            "--dtype=float32", "--out_dir=none", "--lora_rank=4", "--lora_alpha=12",
            f"--lora_targets=({'|'.join(names)})$"]
    cfg, source, _ = started(resolve(load_config(argv), world), world)
    ours, optimizer = train.build(train.meta_model(cfg), cfg, world, source)
    config = peft.LoraConfig(r=4, lora_alpha=12, target_modules=names, task_type="CAUSAL_LM",
                             fan_in_fan_out=kind == "gpt2")
    theirs = peft.get_peft_model(theirs, config)
    config.base_model_name_or_path = str(hf)  # as from_pretrained would have it
    for name, p in theirs.named_parameters():
        if p.requires_grad:
            name = name.removeprefix("base_model.model.").removesuffix(".default.weight")
            p.data.copy_(ours.get_parameter(name))
    return cfg, ours, optimizer, theirs


@pytest.mark.parametrize("kind", ["smollm2", "llama3", "qwen2", "gpt2"])
def test_lora_ten_steps_are_pefts(tmp_path, kind):
    """Losses, logits and gradients; then out in peft's layout and merged, and in again."""
    transformers = pytest.importorskip("transformers")
    cfg, ours, optimizer, theirs = peft_run(tmp_path, kind)
    own = torch.optim.AdamW([p for p in theirs.parameters() if p.requires_grad], lr=3e-2,
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
        for name, p in theirs.named_parameters():
            if p.requires_grad:
                name = name.removeprefix("base_model.model.").removesuffix(".default.weight")
                grad = ours.get_parameter(name).grad
                assert (grad - p.grad).norm() <= 1e-5 * p.grad.norm().clamp(min=1e-3), name
        for each in (optimizer, own):
            each.step()
            each.zero_grad()
    with theirs.disable_adapter():
        difference = (theirs(idx[:, :-1]).logits - out.logits).abs().max()
    assert difference > 0.1  # the adapters count

    # Out: a checkpoint of ours in peft's layout, and merged.
    peft = pytest.importorskip("peft")
    source = source_of_adapters(cfg, ours, str(tmp_path / "hf"))
    huggingface.export_adapter(source, str(tmp_path / "adapter"))
    huggingface.export(source, str(tmp_path / "merged"))
    auto = transformers.AutoModelForCausalLM
    with torch.no_grad():
        expected = ours.eval()(idx, idx)[0]
        back = peft.PeftModel.from_pretrained(
            auto.from_pretrained(tmp_path / "hf"), tmp_path / "adapter").eval()
        assert (back(idx).logits - expected).abs().max() < 1e-4
        merged = auto.from_pretrained(tmp_path / "merged").eval()
        assert (merged(idx).logits - expected).abs().max() < 1e-4
        # In: what peft itself has saved.
        theirs.save_pretrained(str(tmp_path / "theirs"))
        world = setup("cpu", "auto")
        argv = [f"--init_from={tmp_path}/theirs", "--device=cpu", "--compile=False",
                "--dtype=float32"]
        cfg, source, _ = started(resolve(load_config(argv), world), world)
        again = train.build(train.meta_model(cfg), cfg, world, source)[0].eval()
        assert (again(idx, idx)[0] - expected).abs().max() < 1e-4


def source_of_adapters(cfg, model, hf):
    """A checkpoint of this run, as it would be in a file."""
    flat = checkpoint.flat_state(model)
    header = dict(huggingface.open_pretrained(hf).header)
    header.update(model_args=asdict(cfg.sizes), config={"model": cfg.model})
    shapes = {key: tuple(t.shape) for key, t in flat.items()}
    return checkpoint.Source("memory", header, shapes, flat.__getitem__)


def test_lora_export_command_opens_the_base(tmp, tmp_path, single):
    """A run on a run's directory: merged, and in peft's layout."""
    pytest.importorskip("safetensors")
    out = os.path.join(tmp, "lora-single")
    for name, flags in (("merged", []), ("adapter", ["--adapter"])):
        p = script("extras/huggingface.py", out, tmp_path / name, *flags)
        assert p.returncode == 0, p.stderr
    gpt = huggingface.open_pretrained(str(tmp_path / "merged"))
    source = start.open_source(load_config([f"--init_from={out}"]), World())
    whole = huggingface.merged(source)
    assert gpt.shapes.keys() == whole.shapes.keys() - {"model.lm_head.weight"}
    for key in gpt.shapes:
        assert torch.equal(gpt.whole(key), whole.whole(key)), key
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == os.path.join(tmp, "lora-base")
    assert len(config["target_modules"]) == 12 and config["r"] == 4
    assert "leave out --adapter" in refused(
        huggingface.main, [os.path.join(tmp, "lora-base"), str(tmp_path / "x"), "--adapter"])


@pytest.mark.parametrize("config, said", [
    (dict(use_dora=True), "use_dora=True"),
    (dict(use_rslora=True), "use_rslora=True"),
    (dict(rank_pattern={"h.0.attn.c_attn": 2}), "rank_pattern={"),
    (dict(init_lora_weights="pissa"), "init_lora_weights='pissa'"),
    (dict(init_lora_weights="pissa_niter_2"), "init_lora_weights='pissa_niter_2'"),
    (dict(init_lora_weights="olora", target_modules=["attn.c_proj"]), "init_lora_weights='olora'"),
    (dict(layers_to_transform=[1]), "layers_to_transform=[1]"),
    (dict(trainable_token_indices=[1, 2]), "trainable_token_indices=[1, 2]"),
    (dict(target_modules=["c_attn", "wte"]), "wte.lora_embedding_A"),
    (dict(target_modules=["c_attn", "lm_head"]), "lm_head.")])
def test_lora_peft_adapters_that_we_do_not_compute_are_refused(tmp_path, config, said):
    peft = pytest.importorskip("peft")
    from test_huggingface import make_hf
    config = dict(target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM") | config
    model = peft.get_peft_model(make_hf(tmp_path / "hf", "gpt2"), peft.LoraConfig(**config))
    model.save_pretrained(str(tmp_path / "theirs"))
    line = refused(huggingface.open_pretrained, str(tmp_path / "theirs"))
    assert said in line and str(tmp_path) in line
    if "merge_and_unload" in line:  # the remedy
        model.merge_and_unload().save_pretrained(str(tmp_path / "merged"))
        huggingface.open_pretrained(str(tmp_path / "merged"))


@pytest.mark.parametrize("init", [False, "gaussian", "orthogonal", "eva", "mica"])
@torch.no_grad()
def test_lora_peft_adapters_are_read_however_they_begin(tmp_path, init):
    """If they leave the base as it is. Keys that are off don't matter, not even later versions'."""
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    from test_huggingface import loaded, make_hf
    hf, path = tmp_path / "hf", tmp_path / "theirs"
    config = peft.LoraConfig(target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM",
                             init_lora_weights=init)
    model = peft.get_peft_model(make_hf(hf, "llama3"), config)
    for name, p in model.named_parameters():
        if "lora_" in name:
            p.add_(0.1 * torch.randn_like(p))
    config.base_model_name_or_path = str(hf)
    model.save_pretrained(str(path))
    idx = torch.arange(16)[None]
    base = transformers.AutoModelForCausalLM.from_pretrained(hf).eval()
    before = base(idx).logits
    expected = peft.PeftModel.from_pretrained(base, path).eval()(idx).logits
    assert (expected - before).abs().max() > 0.1
    text = json.loads((path / "adapter_config.json").read_text())
    short = {key: value for key, value in text.items() if key not in ("r", "lora_alpha")}
    for content in (text, short, dict(text, later=None, others=False, more={}, most=[])):
        (path / "adapter_config.json").write_text(json.dumps(content))
        assert (loaded(path)(idx, idx)[0] - expected).abs().max() < 1e-4
    for key in {*text, "later"} - {*huggingface.PEFT_OTHERS}:
        (path / "adapter_config.json").write_text(json.dumps(text | {key: "on"}))
        assert f"{key}='on'" in refused(huggingface.open_pretrained, str(path))

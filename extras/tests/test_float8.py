"""
--model=gpt2+float8: 8 bits where they were asked for, and plain fp32 in every file. What computes
needs torchao, and is skipped without it.

    pip install torchao && python -m pytest -q extras/tests/test_float8.py
"""

import os
from types import SimpleNamespace

import formulas
import pytest
import torch
import training
from harness import on_ranks, refused, values
from test_cuda import trainings
from torch.distributed.tensor.debug import CommDebugMode
from training import arguments, built, launch, plain_gpt, read_ckpt, run_training, steps, tiny

import checkpoint
from configurator import make_config
from extras import float8
from extras.to_full import whole
from ranks import World

SIZES = dict(n_embd=48, dtype="bfloat16")  # multiples of 16, as float8 products want them
FLOAT8 = dict(SIZES, model="gpt2+float8")
RUNS = {
    "ddp": dict(strategy="ddp"),
    "full_shard": dict(strategy="full_shard"),
    "sharded": dict(strategy="full_shard", checkpoint="sharded", cpu_offload=0.5),
    "options": dict(strategy="shard_grad_op", activation_checkpointing="full",
                    wrap_min_params=3000, freeze=r"wte|h\.0\.mlp", optimizer="muon"),
}


@pytest.fixture(scope="module")
def ranks(tmp):
    pytest.importorskip("torchao")
    cases = {model: (case_mechanisms, dict(tmp=tmp, model=model))
             for model in ("gpt2+float8", "gpt2")}
    for name, keys in RUNS.items():
        cases[name] = run_training, dict(tmp=tmp, name="f8-" + name, **FLOAT8, **keys)
    return on_ranks(2, cases)


def case_mechanisms(tmp, model):
    """What is float8, and what a step sends after the first."""
    keys = dict(SIZES, strategy="full_shard", gradient_accumulation_steps=2)
    run = built(tmp, model=model, **keys)
    steps(run)
    with CommDebugMode() as comm, training.heard() as calls:
        steps(run, first=1)
    counts = comm.get_comm_counts().items()
    layers = [n for n, m in run.model.named_modules() if type(m).__name__ == "Float8Linear"]
    return dict(
        layers=layers,
        names=[name for name, _ in run.model.named_parameters()],
        gathered=sum(size for kind, *_, size in calls if kind == "all_gather"),
        reduced=sum(n for op, n in counts if "reduce" in str(op) and "scatter" not in str(op)),
        formula=formulas.traffic(run.model, run.cfg, run.world)["all_gather", 2])


@pytest.mark.slow  # it needs torchao
def test_float8_gathers_one_byte_an_element(ranks):
    """The blocks' matrices, forward and backward; biases, norms and the root in bf16."""
    eight, sixteen = (values(ranks, model)[0] for model in ("gpt2+float8", "gpt2"))
    layers = [f"transformer.h.{i}.{name}" for i in range(3)
              for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")]
    assert eight["layers"] == layers and sixteen["layers"] == []
    assert eight["names"] == sixteen["names"]
    matrices = 3 * 12 * 48 * 48
    assert sixteen["gathered"] - eight["gathered"] == 2 * matrices
    assert [r["gathered"] for r in (eight, sixteen)] == [r["formula"] for r in (eight, sixteen)]
    assert eight["reduced"] == sixteen["reduced"] + 1  # all scales at once, beside clipping's norm


@pytest.mark.slow  # it needs torchao
@pytest.mark.parametrize("name", RUNS)
def test_float8_trains_as_bf16_does(tmp, ranks, name):
    ours = [r["loss"] for r in values(ranks, name)[0]]
    single_keys = dict(strategy="single", wrap_min_params=0, cpu_offload=0.0)
    keys = {**RUNS[name], **single_keys}
    single = run_training(tmp, "f8-single-" + name, **FLOAT8, **keys)
    bf16 = [r["loss"] for r in run_training(tmp, "bf16-" + name, **SIZES, **keys)]
    assert ours == pytest.approx([r["loss"] for r in single], rel=2e-3)
    assert ours == pytest.approx(bf16, rel=2e-3) and ours != bf16


@pytest.mark.slow  # it needs torchao
def test_float8_checkpoints_are_plain_and_go_on_without_float8(tmp, ranks):
    values(ranks, "sharded")
    out = os.path.join(tmp, "f8-sharded")
    source = checkpoint.find(out, World())
    for key in source.shapes:
        t = whole(source, key)
        assert type(t) is torch.Tensor and t.dtype == torch.float32, key
    for step, (model, world) in enumerate((("gpt2", 1), ("gpt2+float8", 2)), 5):
        run = dict(SIZES, model=model, init_from="resume", max_iters=step + 1)
        p = launch(world, arguments(tmp, out, **run))
        assert f"at step {step}" in p.stdout
    assert {t.dtype for t in read_ckpt(out)["model"].values()} == {torch.float32}


def test_float8_is_for_the_blocks_matrices_that_fit():
    gpt = plain_gpt(n_embd=48)
    assert len(float8.linears(gpt)) == 12 and gpt.lm_head not in float8.linears(gpt)
    assert float8.linears(plain_gpt()) == []  # 30 wide
    one = torch.nn.ModuleList(torch.nn.Linear(*sizes) for sizes in ((16, 24), (24, 16), (32, 48)))
    assert float8.linears(SimpleNamespace(blocks=one)) == [one[2]]


@pytest.mark.parametrize("ranks, keys, said", [
    # torchao gathers no padding: NCCL would wait for bytes that nobody sends.
    (5, {}, "5 ranks do not divide the 192 rows of transformer.h.0.attn.c_attn"),
    (10, dict(strategy="hybrid_shard", shard_group_size=5), "5 ranks do not divide"),
    (2, dict(dtype="float16"), "needs --dtype=bfloat16"),
    (2, dict(cuda_graph=True), "cuda_graph")])
def test_float8_is_refused_where_it_would_go_wrong_silently(ranks, keys, said):
    cfg = make_config({"strategy": "full_shard", "dtype": "bfloat16", **keys})
    world = World(size=ranks)
    assert said in refused(float8.convert, plain_gpt(n_embd=64, n_head=2), cfg, world)


@pytest.mark.slow  # it needs torchao
def test_cuda_trains_in_float8(tmp):
    pytest.importorskip("torchao")
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no float8")
    losses, *_ = training.plain_training(tiny(tmp, n_embd=SIZES["n_embd"]))
    results = on_ranks(1, trainings(tmp, "cuda", {"float8": dict(FLOAT8, strategy="full_shard")}))
    [rows] = values(results, "float8")
    assert [loss for loss, _ in rows] == pytest.approx(losses, rel=2e-2)

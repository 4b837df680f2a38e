"""
dtype=float8: 8 bits where they were asked for, and plain fp32 in every file. What computes needs
torchao, and is skipped without it.

    pip install torchao && python -m pytest -q extras/tests/test_float8.py
"""

import importlib.util
import os
import sys
from types import SimpleNamespace

import formulas
import pytest
import torch
from harness import (
    DEVICES,
    arguments,
    built,
    heard,
    launch,
    on_ranks,
    plain_gpt,
    plain_training,
    read_ckpt,
    refused,
    run_training,
    steps,
    tiny,
    values,
)
from test_cuda import trainings
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

import checkpoint
from configurator import make_config
from extras import float8
from ranks import World


def needs_torchao(test):
    """README's command installs none, so the test is a slow one."""
    has = importlib.util.find_spec("torchao")
    return pytest.mark.slow(pytest.mark.skipif(not has, reason="no torchao")(test))


SIZES = dict(n_embd=48, dtype="float8")  # multiples of 16, as float8 products want them
RUNS = {
    "full_shard": dict(strategy="full_shard"),
    "sharded": dict(strategy="full_shard", checkpoint="sharded"),
    "options": dict(strategy="shard_grad_op", activation_checkpointing="full",
                    wrap_min_params=3000, freeze=r"wte|h\.0\.mlp", optimizer="muon"),
}


@pytest.fixture(scope="module")
def ranks(tmp):
    cases = {dtype: (case_mechanisms, dict(tmp=tmp, dtype=dtype))
             for dtype in ("float8", "bfloat16")}
    for name, keys in RUNS.items():
        cases[name] = run_training, dict(tmp=tmp, name="f8-" + name, **{**SIZES, **keys})
    return on_ranks(2, cases)


def case_mechanisms(tmp, dtype):
    """What is float8, and what a step sends after the first."""
    run = built(tmp, n_embd=48, dtype=dtype, strategy="full_shard", gradient_accumulation_steps=2)
    steps(run)
    with CommDebugMode() as comm, heard() as calls:
        steps(run, first=1)
    counts = comm.get_comm_counts().items()
    state = checkpoint.flat_state(run.model, run.optimizer)
    kinds = {type(t.to_local() if isinstance(t, DTensor) else t).__name__ for t in state.values()}
    layers = [n for n, m in run.model.named_modules() if type(m).__name__ == "Float8Linear"]
    return dict(
        layers=layers,
        names=[name for name, _ in run.model.named_parameters()],
        kinds=sorted(kinds),
        gathered=sum(size for kind, *_, size in calls if kind == "all_gather"),
        reduced=sum(n for op, n in counts if "reduce" in str(op) and "scatter" not in str(op)),
        formula=formulas.traffic(run.model, run.cfg, run.world)["all_gather", 2])


@needs_torchao
def test_float8_gathers_one_byte_an_element(ranks):
    """The blocks' matrices, forward and backward; biases, norms and the root in bf16."""
    eight, sixteen = (values(ranks, dtype)[0] for dtype in ("float8", "bfloat16"))
    layers = [f"transformer.h.{i}.{name}" for i in range(3)
              for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")]
    assert eight["layers"] == layers and sixteen["layers"] == []
    assert eight["names"] == sixteen["names"]
    matrices = 3 * 12 * 48 * 48
    assert sixteen["gathered"] - eight["gathered"] == 2 * matrices
    assert [r["gathered"] for r in (eight, sixteen)] == [r["formula"] for r in (eight, sixteen)]
    assert eight["kinds"] == sixteen["kinds"] == ["Tensor"]  # what a checkpoint writes
    assert eight["reduced"] == sixteen["reduced"] + 1  # all scales at once, beside clipping's norm


@needs_torchao
@pytest.mark.parametrize("name", RUNS)
def test_float8_trains_as_bf16_does(tmp, ranks, name):
    ours = [r["loss"] for r in values(ranks, name)[0]]
    keys = {**SIZES, **RUNS[name], "strategy": "single", "wrap_min_params": 0}
    single = run_training(tmp, "f8-single-" + name, **keys)
    bf16 = [r["loss"] for r in run_training(tmp, "bf16-" + name, **{**keys, "dtype": "bfloat16"})]
    assert ours == pytest.approx([r["loss"] for r in single], rel=2e-3)
    assert ours == pytest.approx(bf16, rel=2e-3) and ours != bf16


@needs_torchao
@pytest.mark.parametrize("name", ["full_shard", "sharded"])
def test_float8_checkpoints_are_plain_and_go_on_in_any_dtype(tmp, ranks, name):
    values(ranks, name)
    out = os.path.join(tmp, "f8-" + name)
    source = checkpoint.find(out, World())
    for key in source.shapes:
        t = source.whole(key)
        assert type(t) is torch.Tensor and t.dtype == torch.float32, key
    for step, (dtype, world) in enumerate((("float32", 1), ("float8", 2)), 5):
        run = dict(SIZES, dtype=dtype, init_from="resume", max_iters=step + 1)
        p = launch(world, arguments(tmp, out, **run))
        assert f"at step {step}" in p.stdout
    assert {t.dtype for t in read_ckpt(out)["model"].values()} == {torch.float32}


def test_float8_is_for_the_blocks_matrices_that_fit():
    gpt = plain_gpt(n_embd=48)
    assert len(float8.linears(gpt)) == 12 and gpt.lm_head not in float8.linears(gpt)
    assert float8.linears(plain_gpt()) == []  # 30 wide
    one = torch.nn.ModuleList(torch.nn.Linear(*sizes) for sizes in ((16, 24), (24, 16), (32, 48)))
    assert float8.linears(SimpleNamespace(blocks=one)) == [one[2]]


@pytest.mark.parametrize("device, ranks, keys, said", [
    ("cpu", 2, {}, "pip install torchao"), ("cpu", 0, {}, "pip install torchao"),
    ("cuda", 2, {}, "--dtype=bfloat16"), ("mps", 2, {}, "--dtype=bfloat16"),
    # In backward a product sums over the tokens, and a GPU's wants multiples of 16.
    ("cpu", 2, dict(block_size=15), "batch_size x block_size"),
    # torchao gathers no padding: NCCL would wait for bytes that nobody sends.
    ("cpu", 5, {}, "5 ranks do not divide the 192 rows of transformer.h.0.attn.c_attn"),
    ("cpu", 10, dict(strategy="hybrid_shard", shard_group_size=2), "pip install torchao"),
    ("cpu", 32, {}, "pip install torchao")])
def test_float8_is_refused_where_it_cannot_be(monkeypatch, device, ranks, keys, said):
    monkeypatch.setitem(sys.modules, "torchao.float8", None)  # the last line that it would say
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    strategy = dict(strategy="full_shard" if ranks else "single")
    cfg = make_config({**strategy, **dict(batch_size=2, block_size=16), **keys})
    world = World(size=ranks, device=torch.device(device))
    assert said in refused(float8.convert, plain_gpt(n_embd=64, n_head=2), cfg, world)


@needs_torchao
@pytest.mark.parametrize("device", DEVICES[1])
def test_cuda_trains_in_float8(tmp, device):
    is_real = device == "cuda" and torch.cuda.is_available()
    if is_real and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no float8")
    losses, *_ = plain_training(tiny(tmp, n_embd=SIZES["n_embd"]))
    results = on_ranks(1, trainings(tmp, device, {"float8": dict(SIZES, strategy="full_shard")}))
    [rows] = values(results, "float8")
    assert [loss for loss, _ in rows] == pytest.approx(losses, rel=2e-2)

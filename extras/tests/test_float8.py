"""
dtype=float8: 8 bits where they were asked for, and plain fp32 in every file. What computes needs
torchao, and is skipped without it.

    pip install torchao && python -m pytest -q extras/tests/test_float8.py
"""

import importlib.util
import os
import sys
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import formulas
import pytest
import torch
from harness import (
    DEVICES,
    TINY,
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
from configurator import load_config, make_config
from extras import float8, plan
from extras.plan.rehearse import rehearse
from ranks import World

needs_torchao = pytest.mark.skipif(not importlib.util.find_spec("torchao"), reason="no torchao")
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


def converted(device, ranks=0, **sizes):
    """The line that it ends with, on so many ranks that share a weight."""
    strategy = "full_shard" if ranks else "single"
    cfg = make_config(dict(strategy=strategy, batch_size=2, block_size=16))
    world = World(size=ranks, device=torch.device(device))
    return refused(float8.convert, plain_gpt(**sizes), cfg, world)


def test_float8_is_refused_where_it_cannot_be(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    assert "pip install torchao" in converted("cpu")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    assert "--dtype=bfloat16" in converted("cuda")
    assert "--dtype=bfloat16" in converted("mps")


@needs_torchao
def test_float8_plan_gathers_less_and_leaves_ddp_out():
    machine = SimpleNamespace(strategy=None, gpus_per_node=8, gpu_memory=2**36, host_memory=2**40,
                              attention="flash2", cluster=None)
    argv = ["--n_layer=2", "--n_head=2", "--n_embd=64", "--block_size=64", "--vocab_size=256"]
    rows = []
    for dtype in ("float8", "bfloat16"):
        placed = plan.variants(load_config([*argv, f"--dtype={dtype}"]), 8, machine)
        assert ("ddp" in [cfg.strategy for cfg, _ in placed]) == (dtype == "bfloat16")
        rows.append(plan.plan(*placed[-1], machine))  # full_shard
    eight, sixteen = rows
    assert 0 < eight["gathered"] < sixteen["gathered"] and eight["sent"] < sixteen["sent"]
    assert eight["parameters"] == sixteen["parameters"]


@needs_torchao
def test_float8_plan_multiplies_in_8_bits():
    """The blocks' products, though torchao says of its tensors that they are bf16. Not the head's,
    which has one forward and two backward."""
    machine, rest = plan.parse([
        "--gpu=H100", "--n_layer=2", "--n_head=2", "--n_embd=64", "--block_size=64",
        "--vocab_size=256", "--dtype=float8", "--strategy=full_shard", "--world_size=8"])
    [(cfg, world)] = plan.variants(load_config(rest), 8, machine)
    *_, program = rehearse(replace(cfg, gradient_accumulation_steps=8), world)
    products = [op for op in program if getattr(op, "flops", 0) and not op.head]
    assert Counter(op.width for op in products) == {1: 3 * 4 * 2, 2: 3}


@pytest.mark.parametrize("ranks, layer", [
    (5, "transformer.h.0.attn.c_attn"), (32, None), (0, None)])
def test_float8_rows_that_the_ranks_do_not_divide_are_refused(monkeypatch, ranks, layer):
    """torchao gathers no padding: NCCL would wait for bytes that nobody sends."""
    monkeypatch.setitem(sys.modules, "torchao.float8", None)  # the next line it would say
    said = converted("cpu", ranks, n_embd=64, n_head=2)
    if layer:
        assert f"5 ranks do not divide the 192 rows of {layer}" in said
        assert "--shard_group_size" in said
    else:
        assert "pip install torchao" in said


def test_float8_that_the_ranks_do_not_divide_is_refused_by_the_plan():
    argv = ["config/train_gpt2_xl.py", "--dtype=float8", "--strategy=full_shard",
            "--cuda_graph=False"]
    said = refused(plan.main, [*argv, "--world_size=128"])
    assert said.startswith("dtype=float8: 128 ranks do not divide the 4800 rows")


def test_float8_tokens_that_16_does_not_divide_are_refused(tmp):
    """In backward a product sums over them, and a GPU's wants multiples of 16."""
    said = refused(built, tmp, strategy="single", batch_size=3, block_size=8, **SIZES)
    assert "batch_size x block_size" in said and "16" in said


@needs_torchao
@pytest.mark.parametrize("device", DEVICES[1])
def test_cuda_trains_in_float8(tmp, device):
    # Without a GPU it is simulated; to ask a CUDA build for its capability would raise.
    if device == "cuda" and torch.cuda.is_available():
        if torch.cuda.get_device_capability() < (8, 9):
            pytest.skip("this GPU has no float8")
    assert SIZES["n_embd"] // TINY["n_head"] % 8 == 0  # or cuDNN's attention takes no such heads
    losses, *_ = plain_training(tiny(tmp, n_embd=SIZES["n_embd"]))
    results = on_ranks(1, trainings(tmp, device, {"float8": dict(SIZES, strategy="full_shard")}))
    [rows] = values(results, "float8")
    assert [loss for loss, _ in rows] == pytest.approx(losses, rel=2e-2)

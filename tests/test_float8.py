"""
dtype=float8: 8 bits where they were asked for, and plain fp32 in every file. What computes needs
torchao, and is skipped without it.

    pip install torchao && python -m pytest -q tests/test_float8.py
"""

import functools
import importlib.util
import os
import sys
from contextlib import ExitStack
from unittest.mock import patch

import formulas
import pytest
import torch
import torch.distributed as dist
from harness import arguments, launch, on_ranks, plain_gpt, read_ckpt, run_training, tiny, values
from test_plan import MACHINE
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

import checkpoint
import float8
import plan
import train
from configurator import load_config, resolve
from data import loader
from ranks import World, setup

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
    @functools.cache
    def get():
        cases = {dtype: (case_mechanisms, dict(tmp=tmp, dtype=dtype))
                 for dtype in ("float8", "bfloat16")}
        for name, keys in RUNS.items():
            cases[name] = run_training, dict(tmp=tmp, name="f8-" + name, **{**SIZES, **keys})
        return on_ranks(2, cases)
    return get


def case_mechanisms(tmp, dtype):
    """What is float8, and what a step sends after the first."""
    cfg = tiny(tmp, n_embd=48, dtype=dtype, strategy="full_shard", gradient_accumulation_steps=2)
    world = setup(cfg.device, cfg.backend)
    cfg = resolve(cfg, world)
    wrapped, model, optimizer = train.build(cfg, world)
    batches, scaler = loader.Batches(cfg, world), torch.amp.GradScaler("cpu", enabled=False)
    batch, gathered = batches.train(0, 0), []

    def listen(original):
        def call(out, *args, **kwargs):
            tensors = [t for t in (out, *args, *kwargs.values()) if isinstance(t, torch.Tensor)]
            gathered.append(max(t.numel() * t.element_size() for t in tensors))
            return original(out, *args, **kwargs)
        return call

    for step in range(2):
        gathered.clear()
        with CommDebugMode() as comm, ExitStack() as stack:
            for name in ("all_gather_into_tensor", "all_gather_single"):
                if hasattr(dist, name):
                    stack.enter_context(patch.object(dist, name, listen(getattr(dist, name))))
            _, _, batch = train.train_step(wrapped, optimizer, scaler, batches, batch, step, cfg,
                                           world)
    counts = comm.get_comm_counts().items()
    reduced = sum(n for op, n in counts if "reduce" in str(op) and "scatter" not in str(op))
    state = checkpoint.flat_state(model, optimizer)
    kinds = {type(t.to_local() if isinstance(t, DTensor) else t).__name__ for t in state.values()}
    return dict(layers=[n for n, m in model.named_modules() if type(m).__name__ == "Float8Linear"],
                names=[name for name, _ in model.named_parameters()], kinds=sorted(kinds),
                gathered=sum(gathered), reduced=reduced,
                formula=formulas.traffic(model, cfg, world)["all_gather", 2])


@needs_torchao
def test_float8_gathers_one_byte_an_element(ranks):
    """The blocks' matrices, forward and backward; biases, norms and the root in bf16."""
    eight, sixteen = (values(ranks(), dtype)[0] for dtype in ("float8", "bfloat16"))
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
    rows = values(ranks(), name)[0]
    keys = {**RUNS[name], "strategy": "single", "wrap_min_params": 0}
    bf16 = run_training(tmp, "bf16-" + name, **{**SIZES, **keys, "dtype": "bfloat16"})
    assert [r["loss"] for r in rows] == pytest.approx([r["loss"] for r in bf16], rel=2e-3)
    assert [r["loss"] for r in rows] != [r["loss"] for r in bf16]
    single = run_training(tmp, "f8-single-" + name, **{**SIZES, **keys})
    assert [r["loss"] for r in rows] == pytest.approx([r["loss"] for r in single], rel=2e-3)


@needs_torchao
@pytest.mark.parametrize("name", ["full_shard", "sharded"])
def test_float8_checkpoints_are_plain_and_go_on_in_any_dtype(tmp, ranks, name):
    values(ranks(), name)
    out = os.path.join(tmp, "f8-" + name)
    source = checkpoint.find(out, World())
    for key in source.header["shapes"]:
        t = source.get(key)
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


def test_float8_is_refused_in_one_clear_line(tmp, monkeypatch):
    for remedy, keys in (("use --strategy=full_shard or --dtype=bfloat16", dict(strategy="ddp")),
                         ("use --dtype=bfloat16", dict(strategy="full_shard", cpu_offload=0.5))):
        with pytest.raises(SystemExit, match=remedy):
            resolve(tiny(tmp, **SIZES, **keys), World(size=2), distributed=True)
    cfg = tiny(tmp, **SIZES, strategy="single")
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(SystemExit, match="pip install torchao"):
        float8.convert(plain_gpt(), cfg, World())
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with pytest.raises(SystemExit, match="H100 or newer; use --dtype=bfloat16"):
        float8.convert(plain_gpt(), cfg, World(device=torch.device("cuda", 0)))


@needs_torchao
def test_float8_plan_is_rehearsed_without_ddp():
    argv = ["--n_layer=2", "--n_head=2", "--n_embd=64", "--block_size=64", "--vocab_size=256"]
    eight, sixteen = (load_config([*argv, f"--dtype={t}"]) for t in ("float8", "bfloat16"))
    names = [cfg.strategy for cfg, _ in plan.variants(eight, 8, MACHINE)]
    assert names == ["single", "shard_grad_op", "full_shard"]
    eight, sixteen = (plan.plan(*plan.variants(cfg, 8, MACHINE)[-1], MACHINE)
                      for cfg in (eight, sixteen))
    assert 0 < eight["gathered"] < sixteen["gathered"]
    assert eight["parameters"] == sixteen["parameters"] and eight["sent"] < sixteen["sent"]

"""
torch.compile compiles what it is asked to: graphs are counted, whatever else a run asks for.

    python -m pytest -q tests/test_compile.py
    TORCH_LOGS=graph_code python train.py config/quickstart.py --compile=True   # shows the graphs
"""

import pytest
import torch
from harness import on_ranks, values
from nets import FILLS_IN
from torch._dynamo.utils import counters
from training import built, no_compiler, steps

import activations
import train
from model import MLP, GPTConfig

SELECTIVE = dict(activation_checkpointing="selective")
FULL = dict(activation_checkpointing="full", loss_chunks=3)
ZERO3 = dict(strategy="full_shard")
CASES = {
    "single": dict(strategy="single", evaluates=True),
    "ddp full": dict(strategy="ddp", **FULL),
    "full_shard selective": dict(**ZERO3, **SELECTIVE),
    "by size offload": dict(**ZERO3, wrap_min_params=2000, cpu_offload=0.5),
    "last": dict(strategy="shard_grad_op", grad_sync="last", gradient_accumulation_steps=2),
    "evaluates": dict(**ZERO3, evaluates=True, batch_size=4),
    "bf16": dict(**ZERO3, dtype="bfloat16", loss_chunks=3),
    "frozen full": dict(**ZERO3, **FULL, freeze=r"wte|wpe|h\.0", n_layer=3),
    # more blocks than the 8 graphs that dynamo by itself keeps of a function
    "deep": dict(**ZERO3, **FULL, n_layer=9)}


def case_graphs(tmp, evaluates=False, **keys):
    """Loss and norm of two steps, eager and compiled, with an evaluation in between; graphs after
    each; breaks."""
    rows = []
    for compiled in (False, True):
        with no_compiler():
            counters.clear()
            run = built(tmp, **{"gradient_accumulation_steps": 1, "n_layer": 2, **keys},
                        eval_iters=100, compile=compiled)  # of 37 windows the last batch has one
            numbers, graphs = [], []
            for step in range(2):
                numbers += steps(run, step)
                graphs.append(counters["stats"]["unique_graphs"])
                if evaluates:
                    train.evaluate(run.wrapped, run.batches, run.cfg, run.world)
            rows.append((numbers, graphs, len(counters["graph_break"])))
    return rows


@pytest.fixture(scope="module")
def results(tmp):
    return on_ranks(1, {name: (case_graphs, {"tmp": tmp, **k}) for name, k in CASES.items()})


@pytest.mark.parametrize("name", CASES)
def test_compile_one_graph_for_all_blocks_and_one_for_the_loss(results, name):
    keys = CASES[name]
    (eager, none, _), (compiled, graphs, breaks) = values(results, name)[0]
    assert none == [0, 0]
    assert compiled == pytest.approx(eager, rel=1e-2 if name == "bf16" else 1e-5)
    # Nothing is compiled again but for an evaluation, once, of all but its last batch.
    assert graphs[1] == (2 if "evaluates" in keys else 1) * graphs[0]
    if keys.get("wrap_min_params"):  # FSDP's hooks inside the blocks cut them into pieces
        assert graphs[0] == 7
    elif keys["strategy"] != "single":
        # Of blocks: a frozen one, the first one that trains, one whose input needs a gradient.
        kinds = 3 if "freeze" in keys else 1
        if not FILLS_IN and "activation_checkpointing" in keys:
            kinds = keys.get("n_layer", 2)  # torch 2.9: each that is recomputed
        assert graphs[0] == kinds + 1 and breaks == 0
    else:
        assert graphs[0] == 1  # the whole model


def test_compile_every_one_of_many_different_blocks():
    with no_compiler():
        counters.clear()
        blocks = [MLP(GPTConfig(n_embd=4 * i, n_head=1)) for i in range(1, 13)]
        activations.compile_blocks(blocks)
        for block in blocks:
            block(torch.ones(1, block.c_fc.in_features))
        assert counters["stats"]["unique_graphs"] == len(blocks)

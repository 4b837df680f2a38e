"""
torch.compile compiles what it is asked to: graphs are counted, whatever else a run asks for.

    python -m pytest -q tests/test_compile.py
    TORCH_LOGS=graph_code python train.py config/quickstart.py --compile=True   # shows the graphs
"""

from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

import pytest
import torch
from harness import built, no_compiler, on_ranks, steps, values
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters

import train

SELECTIVE = dict(activation_checkpointing="selective")
FULL = dict(activation_checkpointing="full", loss_chunks=3)
ZERO2 = dict(strategy="shard_grad_op")
ZERO3 = dict(strategy="full_shard")
CASES = {  # what configurator.conflicts refuses, such as activation_offload, is in test_config.py
    "single": dict(strategy="single"),
    "ddp full": dict(strategy="ddp", **FULL),
    "shard_grad_op": ZERO2,
    "full_shard selective": dict(**ZERO3, **SELECTIVE),
    "offload full": dict(**ZERO3, **FULL, cpu_offload=0.5),
    "by size offload": dict(**ZERO3, wrap_min_params=2000, cpu_offload=0.5),
    "hybrid": dict(strategy="hybrid_shard", **SELECTIVE, cpu_offload=0.5),
    "last": dict(**ZERO2, grad_sync="last", gradient_accumulation_steps=2),
    "bf16": dict(**ZERO3, dtype="bfloat16", loss_chunks=3),
    "frozen full": dict(**ZERO3, **FULL, freeze=r"wte|wpe|h\.0", n_layer=3),
    "untied": dict(**ZERO3, model="test_fsdp", loss_chunks=3),
    # more blocks than the 8 times that dynamo compiles a function again
    "deep": dict(**ZERO3, **FULL, n_layer=9)}


def case_graphs(tmp, **keys):
    """Loss and norm of two steps, eager and compiled; graphs after each compiled step; breaks."""
    rows = []
    for compiled in (False, True):
        with no_compiler():
            counters.clear()
            run = built(tmp, **{"gradient_accumulation_steps": 1, "n_layer": 2, **keys},
                        compile=compiled)
            numbers, graphs = [], []
            for step in range(2):
                numbers += steps(run, step)
                graphs.append(counters["stats"]["unique_graphs"])
            rows.append((numbers, graphs, len(counters["graph_break"])))
    return rows


@contextmanager
def graphs_made():
    """Two lists that fill inside: of each graph of forward, has it symbols for sizes? And how many
    gradients each graph of backward is given."""
    symbols, given = [], []

    def forward(graph, inputs):
        sizes = [n for t in inputs if isinstance(t, torch.Tensor) for n in t.shape]
        symbols.append(any(isinstance(n, torch.SymInt) for n in (*sizes, *inputs)))
        return graph

    def backward(graph, inputs):
        given.append(sum("tangent" in node.name for node in graph.graph.nodes))
        return graph

    backend = aot_autograd(fw_compiler=forward, bw_compiler=backward)
    with no_compiler(), patch.object(torch, "compile", partial(torch.compile, backend=backend)):
        yield symbols, given


def case_evaluation(tmp, strategy):
    """Of a compiled run that evaluates between two steps."""
    with graphs_made() as made:
        run = built(tmp, strategy=strategy, gradient_accumulation_steps=1, batch_size=4,
                    eval_iters=100, compile=True)  # of 37 windows the last batch has one
        for step in range(2):
            steps(run, step)
            train.evaluate(run.wrapped, run.batches, run.cfg, run.world)
    return made


@pytest.fixture(scope="module")
def results(tmp):
    return on_ranks(1, {name: (case_graphs, {"tmp": tmp, **k}) for name, k in CASES.items()})


@pytest.mark.parametrize("name", CASES)
def test_compile_one_graph_for_all_blocks_and_one_for_the_loss(results, name):
    keys = CASES[name]
    (eager, none, _), (compiled, graphs, breaks) = values(results, name)[0]
    assert none == [0, 0]
    assert compiled == pytest.approx(eager, rel=1e-2 if name == "bf16" else 1e-5)
    assert graphs[0] == graphs[1]  # nothing is compiled again
    if keys.get("wrap_min_params"):  # FSDP's hooks inside the blocks cut them into pieces
        assert graphs[0] == 7
    elif keys["strategy"] != "single":
        # Of blocks: a frozen one, the first one that trains, one whose input needs a gradient.
        kinds = 3 if "freeze" in keys else 1
        assert graphs[0] == kinds + 1 and breaks == 0
    else:
        assert graphs[0] == 1  # the whole model


def test_compile_evaluation_adds_its_own_graphs_and_changes_none(tmp):
    """A batch of another size would make them dynamic for good. And backward of the head is given
    the loss's gradient, none of zeros for logits that nobody uses."""
    expected = dict(single=1, full_shard=2)  # graphs of a step
    results = on_ranks(1, {strategy: (case_evaluation, dict(tmp=tmp, strategy=strategy))
                           for strategy in expected})
    for strategy, graphs in expected.items():
        symbols, given = values(results, strategy)[0]
        assert symbols == 2 * graphs * [False]  # with gradients and without
        assert given == graphs * [1]

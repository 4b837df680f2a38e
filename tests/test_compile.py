"""
torch.compile compiles what it is asked to: graphs are counted, whatever else a run asks for.

    python -m pytest -q tests/test_compile.py
    TORCH_LOGS=graph_code python train.py config/quickstart.py --compile=True   # shows the graphs
"""

import itertools
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from harness import no_compiler, on_ranks, tiny, values
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters

import ranks
import train
from configurator import SHARDED, STRATEGIES, conflicts, resolve
from data.loader import Batches

FACTORS = dict(
    strategy=STRATEGIES, activation_checkpointing=["none", "selective", "full"],
    activation_offload=[False, True], cpu_offload=[0.0, 0.5], wrap_min_params=[0, 2000],
    loss_chunks=[0, 3])


def combinations():
    """{name: keys} that may be compiled, and those that only compile=True forbids."""
    accepted, refused = {}, {}
    for chosen in itertools.product(*FACTORS.values()):
        keys = dict(zip(FACTORS, chosen), gradient_accumulation_steps=1, n_layer=2)
        wrong = []
        for compiled in (False, True):
            cfg = tiny("", **keys, compile=compiled)
            with no_compiler():
                wrong.append([key for key, bad, _ in conflicts(cfg, ranks.World(), True) if bad])
        if not wrong[1]:
            accepted["-".join(map(str, chosen))] = keys
        elif not wrong[0]:
            refused["-".join(map(str, chosen))] = keys
    return accepted, refused


ACCEPTED, REFUSED = combinations()


def is_counted(strategy, activation_checkpointing, cpu_offload, wrap_min_params, loss_chunks, **_):
    """A third of them: each costs a second. What shards in another way compiles the same."""
    if loss_chunks != (3 if activation_checkpointing == "full" else 0):
        return False
    if strategy == "hybrid_shard":
        return cpu_offload and not wrap_min_params and activation_checkpointing == "selective"
    return strategy in ("single", "ddp", "full_shard") or not (cpu_offload or wrap_min_params)


CASES = {name: keys for name, keys in ACCEPTED.items() if is_counted(**keys)}
CASES |= {
    # more blocks than the 8 times that dynamo compiles a function again
    "deep": dict(strategy="full_shard", n_layer=9, activation_checkpointing="full"),
    "bf16": dict(strategy="full_shard", n_layer=2, dtype="bfloat16", loss_chunks=3),
    "untied": dict(strategy="full_shard", n_layer=2, model="test_fsdp", loss_chunks=3),
    "last": dict(strategy="shard_grad_op", n_layer=2, grad_sync="last")}


def case_graphs(tmp, **keys):
    """Loss and norm of two steps, eager and compiled; graphs after each compiled step; breaks."""
    rows = []
    for compiled in (False, True):
        with no_compiler():
            counters.clear()
            cfg = tiny(tmp, **{"gradient_accumulation_steps": 2, **keys}, compile=compiled)
            world = ranks.setup(cfg.device, cfg.backend)
            cfg = resolve(cfg, world)
            wrapped, _, optimizer = train.build(cfg, world)
            batches, scaler = Batches(cfg, world), torch.amp.GradScaler("cpu", enabled=False)
            batch, numbers, graphs = batches.train(0, 0), [], []
            for step in range(2):
                loss, norm, batch = train.train_step(wrapped, optimizer, scaler, batches, batch,
                                                     step, cfg, world)
                numbers += [loss.item(), norm.item()]
                graphs.append(counters["stats"]["unique_graphs"])
            rows.append((numbers, graphs, len(counters["graph_break"])))
    return rows


def case_evaluation(tmp, strategy):
    """Of a compiled run that evaluates between two steps: graphs of forward and how many have
    symbols for sizes; gradients that each graph of backward is given."""
    symbols, given = [], []

    def forward(graph, inputs):
        sizes = [n for t in inputs if isinstance(t, torch.Tensor) for n in t.shape]
        symbols.append(any(isinstance(n, torch.SymInt) for n in sizes))
        return graph

    def backward(graph, inputs):
        given.append(sum("tangent" in node.name for node in graph.graph.nodes))
        return graph

    backend = aot_autograd(fw_compiler=forward, bw_compiler=backward)
    with no_compiler(), patch.object(torch, "compile", partial(torch.compile, backend=backend)):
        cfg = tiny(tmp, strategy=strategy, gradient_accumulation_steps=1, batch_size=4,
                   eval_iters=100, compile=True)  # of 37 windows the last batch has one
        world = ranks.setup(cfg.device, cfg.backend)
        cfg = resolve(cfg, world)
        wrapped, _, optimizer = train.build(cfg, world)
        batches, scaler = Batches(cfg, world), torch.amp.GradScaler("cpu", enabled=False)
        batch, stop = batches.train(0, 0), SimpleNamespace(requested=lambda: False)
        for step in range(2):
            _, _, batch = train.train_step(wrapped, optimizer, scaler, batches, batch, step, cfg,
                                           world)
            train.evaluate(wrapped, batches, cfg, world, stop)
    return symbols, given


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
    elif keys["strategy"] in SHARDED:
        assert graphs[0] == 2 and breaks == 0
    else:
        assert graphs[0] == 1  # the whole model; DDP's own wrapper stays outside


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


def test_compile_what_cannot_be_compiled_is_refused_in_one_line(tmp):
    reasons = set()
    for keys in REFUSED.values():
        with no_compiler(), pytest.raises(SystemExit) as e:
            resolve(tiny(tmp, **keys, compile=True), ranks.World(), True)
        assert "\n" not in str(e.value) and "--compile=False" in str(e.value)
        reasons.add(str(e.value).split("=")[0])
    assert reasons == {"activation_offload", "wrap_min_params"}
    assert all(keys["activation_offload"] or keys["wrap_min_params"] for keys in REFUSED.values())

"""
Muon: the update of whole matrices, though a rank keeps only some rows of each.

    python -m pytest -q extras/tests/test_muon.py

The update rule is torch.optim.Muon's.
"""

import functools
from collections import Counter
from unittest.mock import patch

import formulas
import numpy as np
import pytest
import torch
import training
from harness import on_ranks, values
from test_cuda import case_training, trainings
from torch.distributed.tensor.debug import CommDebugMode
from training import assert_same_weights, built, read_ckpt, run_training

from extras import muon

MUON = dict(optimizer="muon", momentum=0.9, weight_decay=0.3)
ZERO3 = dict(strategy="full_shard")
HYBRID = dict(strategy="hybrid_shard", shard_group_size=2)
FREEZE = r"wte|h\.0\.(ln_1|mlp)|h\.1\.attn"

# ---------- parity -------------------------------------------------------------

RUNS = {  # name: (ranks, keys); no size divides 67 or 30, and 5 rows on 4 ranks leave one without
    "ddp-3": (3, dict(strategy="ddp")),
    "full_shard-3": (3, ZERO3),
    "hybrid_shard-6": (6, HYBRID),  # three groups of two: neither axis can stand for the other
    "offload-2": (2, dict(strategy="shard_grad_op", cpu_offload=0.5, wrap_min_params=2000)),
    "freeze-3": (3, dict(**ZERO3, freeze=FREEZE)),
    "empty-4": (4, dict(**ZERO3, n_embd=5, n_head=1)),
}


@pytest.fixture(scope="module")
def ranks(tmp):
    """ranks(world) -> the results of all cases at that world size, run once."""
    @functools.cache
    def get(world):
        cases = {}
        for name, (size, keys) in RUNS.items():
            if size == world:
                keys = {**MUON, **training.two_each(world), **keys}
                cases[name] = run_training, dict(keys, tmp=tmp, name="muon-" + name)
        for name, (size, keys) in MECHANISMS.items():
            if size == world:
                cases["mech-" + name] = case_mechanisms, dict(tmp=tmp, **keys)
        return on_ranks(world, cases)
    return get


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_muon_parity_of_strategies(tmp, ranks, name):
    """Each has the numbers of one process, whose update is PyTorch's, by the test below."""
    world, keys = RUNS[name]
    rows = values(ranks(world), name)[0]
    own = {k: keys[k] for k in ("freeze", "n_embd", "n_head") if k in keys}
    single = run_training(tmp, f"muon-single-{name}", strategy="single", **MUON, **own)
    assert [r["loss"] for r in rows] == pytest.approx([r["loss"] for r in single], rel=1e-6)
    found, expected = (read_ckpt(f"{tmp}/muon-{one}")["model"] for one in (name, f"single-{name}"))
    assert_same_weights(found, expected, 1e-5)


def gradients(*models):
    """The same random gradients for each model's parameters."""
    generator = torch.Generator().manual_seed(0)
    for params in zip(*(model.parameters() for model in models)):
        grad = torch.randn(params[0].shape, generator=generator)
        for p in params:
            p.grad = grad.clone()


def test_muon_update_rule_is_pytorchs_in_bf16(tmp):
    """Bit for bit, of tall, wide and square matrices; PyTorch's always orthogonalizes in bf16."""
    ours, theirs = (built(tmp, strategy="single", dtype="bfloat16", **MUON) for _ in range(2))
    matrices = {name: p for name, p in theirs.model.named_parameters()
                if ".h." in name and p.dim() == 2}
    reference = torch.optim.Muon(matrices.values(), lr=1e-3, weight_decay=0.3, momentum=0.9,
                                 adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        gradients(ours.model, theirs.model)
        ours.optimizer.step()
        reference.step()
    weights = dict(ours.model.named_parameters())
    assert [name for name, p in matrices.items() if not torch.equal(weights[name], p)] == []
    assert len(matrices) == 12


@pytest.mark.parametrize("freeze", [r"h\.", "wte|wpe|ln|bias"])
def test_muon_trains_if_all_matrices_or_all_others_are_frozen(tmp, freeze):
    """Without matrices the run is AdamW's. Both go on."""
    def of(name, optimizer, **more):
        keys = dict(freeze=freeze, eval_interval=2, **{"max_iters": 4, **more})
        rows = run_training(tmp, f"muon-{name}-{freeze}", optimizer=optimizer, **keys)
        return [row["loss"] for row in rows]

    whole = of("whole", "adamw" if freeze == r"h\." else "muon")
    of("part", "muon", max_iters=2)
    assert of("part", "muon", init_from="resume") == whole and len({*whole}) == 4


# ---------- mechanisms: who orthogonalizes what, and what is sent and kept -----

MECHANISMS = {
    "ddp": (3, dict(strategy="ddp")), "full_shard": (3, ZERO3), "hybrid_shard": (6, HYBRID),
    "bf16": (2, dict(**ZERO3, dtype="bfloat16", cpu_offload=1.0)),
    "fp16": (2, dict(**ZERO3, dtype="float16")),  # fp32: its gradients are too small for float16
}


def test_muon_goes_on_with_a_state_that_pytorch_loads(tmp):
    """load_state_dict gives it new groups and state, which its AdamW must step with too."""
    run = built(tmp, strategy="single", **MUON)
    model, optimizer = run.model, run.optimizer
    gradients(model)
    optimizer.step()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.load_state_dict(optimizer.state_dict())
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    assert all(map(torch.equal, model.parameters(), before))
    assert optimizer.adamw.state is optimizer.state
    assert all(optimizer.state[p]["step"] == 2 for p in optimizer.param_groups[-1]["params"])


def case_mechanisms(tmp, **keys):
    run = built(tmp, **MUON, **keys)
    run.wrapped(*run.batches.get(0, 0)[:2])[1].backward()
    shapes, moved, kept = [], Counter(), 0
    orthogonalize = muon.orthogonalize

    def watch(m):
        shapes.append([*m.shape, str(m.dtype)])
        return orthogonalize(m)

    with (training.heard() as sent, CommDebugMode() as comm,
          patch.object(muon, "orthogonalize", watch)):
        run.optimizer.step()
    for kind, group, _, size in sent:
        moved[kind, group] += size
    for tensors in run.optimizer.state.values():
        kept += sum(muon.rows_of(t).numel() * 4 for t in tensors.values() if t.dim())
    formula = formulas.traffic(run.model, run.cfg, run.world)
    at_rest = formulas.kept(run.model, run.cfg, run.world)
    return dict(
        collectives={str(op).split(".")[1]: n for op, n in comm.get_comm_counts().items()},
        shapes=shapes,
        as_formula=[moved == {key: n for key, n in formula.items() if key[0] == "all_to_all"},
                    kept == sum(memory["optimizer"] for memory in at_rest)])


@pytest.mark.slow
@pytest.mark.parametrize("name", MECHANISMS)
def test_muon_mechanisms(ranks, name):
    """12 matrices, each whole and on one rank only; what is sent and kept is the formula."""
    world, keys = MECHANISMS[name]
    per_rank = values(ranks(world), "mech-" + name)
    dtype = str(torch.bfloat16 if name == "bf16" else torch.float32)
    whole = {(90, 30): 3, (30, 30): 3, (120, 30): 3, (30, 120): 3}
    seen = Counter((*shape[:2], shape[2]) for r in per_rank for shape in r["shapes"])
    assert seen == {(*shape, dtype): n for shape, n in whole.items()}
    for r in per_rank:
        assert r["collectives"] == {"alltoall_base_": 1 if name == "ddp" else 2}
        assert 12 // world - 1 <= len(r["shapes"]) <= 12 // world + 1
        assert r["as_formula"] == [True, True]


# ---------- on a GPU -----------------------------------------------------------

@pytest.mark.slow
def test_cuda_trains_with_muon_as_a_cpu_does(tmp):
    """5 steps in fp32: the losses and the gradients' norms. Ranks may share a GPU."""
    run = dict(optimizer="muon")
    expected = case_training(tmp, "muon on a cpu", strategy="single", device="cpu", **run)
    for world, keys in {1: ZERO3, 2: ZERO3, 4: HYBRID}.items():
        name = f"muon on {world}"
        results = on_ranks(world, trainings(tmp, "cuda", {name: dict(keys, **run)}))
        rows = np.array(values(results, name)[0])
        assert rows == pytest.approx(np.array(expected), rel=2e-5), name

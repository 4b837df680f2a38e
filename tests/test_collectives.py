"""
Every path that communicates, under PyTorch's own comparison: TORCH_DISTRIBUTED_DEBUG=DETAIL
compares each collective over the ranks (which one, shapes, types) before it runs. Gloo alone sees
another size, and NCCL nothing at all. DDP is not among them: PyTorch 2.13 and 2.15 crash where it
is made under DETAIL.

    python -m pytest -q tests/test_collectives.py
"""

import os

import numpy as np
import pytest
from harness import make_data, on_ranks, run_training, values

ZERO3 = dict(strategy="full_shard")
SHARDED = dict(strategy="full_shard", checkpoint="sharded")
SHORT = dict(max_iters=2, eval_interval=1, eval_iters=1, gradient_accumulation_steps=4)


def case_run(tmp, name, **keys):
    """How many steps it logged."""
    return len(run_training(tmp, "detail-" + name, **{**SHORT, **keys}))


def case(tmp, name, **keys):
    return case_run, dict(tmp=tmp, name=name, **keys)


def require_same(monkeypatch, cases):
    """Run {ranks: {name: case}} under the comparison."""
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    for world, of_world in cases.items():
        results = on_ranks(world, of_world)
        for name, (function, _) in of_world.items():
            first, *others = values(results, name)
            assert all(got == first for got in others), name
            assert function is not case_run or first in (2, 4), name


@pytest.mark.slow
def test_collectives_are_the_same_on_all_ranks(tmp, tmp_path, monkeypatch):
    masked = f"{tmp_path}/masked"  # every third token is learned
    make_data(masked)
    for split in ("train", "val"):
        place = np.arange(os.path.getsize(f"{masked}/{split}.bin") // 2)
        (place % 3 == 0).tofile(f"{masked}/{split}.mask")
    base = os.path.join(tmp, "detail-scratch")
    two = dict(
        scratch=case(tmp, "scratch", **ZERO3),
        from_full=case(
            tmp, "scratch", init_from="resume", max_iters=4, prefetch_blocks=1, **ZERO3),
        sharded=case(tmp, "sharded", **SHARDED),
        from_sharded=case(
            tmp, "sharded", init_from="resume", max_iters=4, strategy="shard_grad_op",
            grad_sync="last", checkpoint="sharded"),
        other_run=case(tmp, "other-run", init_from=base, **ZERO3),
        masks=case(tmp, "masks", dataset=masked, **ZERO3),
        offload=case(tmp, "offload", cpu_offload=0.5, activation_checkpointing="full", **ZERO3),
        units=case(tmp, "units", wrap_min_params=800, freeze="wte", **ZERO3),
    )
    four = dict(hybrid=case(tmp, "hybrid", strategy="hybrid_shard", shard_group_size=2))
    require_same(monkeypatch, {2: two, 4: four})

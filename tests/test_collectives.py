"""
Every path that communicates, under PyTorch's own comparison: TORCH_DISTRIBUTED_DEBUG=DETAIL
compares each collective over the ranks (which one, shapes, types) before it runs. Gloo alone sees
another size, and NCCL nothing at all. DDP is not among them: PyTorch 2.13 and 2.15 crash where it
is made under DETAIL (three lines of plain PyTorch do).

    python -m pytest -q tests/test_collectives.py
"""

import os

import numpy as np
import pytest
import torch
import torch.distributed as dist
from harness import built, make_data, on_ranks, run_training, values

import fsdp
import sample

ZERO3 = dict(strategy="full_shard")
SHARDED = dict(strategy="full_shard", checkpoint="sharded")
SHORT = dict(max_iters=2, eval_interval=1, eval_iters=1, gradient_accumulation_steps=4)


def case_run(tmp, name, **keys):
    """How many steps it logged."""
    return len(run_training(tmp, "detail-" + name, **{**SHORT, **keys}))


def case_sample(tmp):
    """Tokens by a model that is sharded over the ranks."""
    run = built(tmp, **ZERO3)
    with fsdp.inference(run.wrapped):
        return sample.generate(run.wrapped, torch.tensor([[1, 2, 3]]), 4, temperature=0).tolist()


def case_other_shapes():
    """What is said where ranks broadcast two tensors in different orders, as those of a set."""
    tensors = {"a": torch.zeros(2, 8), "b": torch.zeros(8, 2)}
    names = sorted(tensors, reverse=dist.get_rank() == 1)
    try:
        for name in names:
            dist.broadcast(tensors[name], src=0)
    except RuntimeError as e:
        return str(e)


def case(tmp, name, **keys):
    return case_run, dict(tmp=tmp, name=name, **keys)


def make_masked(path):
    """A data set of which every third token is learned."""
    make_data(path)
    for split in ("train", "val"):
        tokens = np.fromfile(f"{path}/{split}.bin", np.uint16)
        (np.arange(len(tokens)) % 3 == 0).astype(np.uint8).tofile(f"{path}/{split}.mask")


def require_same(monkeypatch, cases):
    """Run {ranks: {name: case}} under the comparison."""
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    for world, of_world in cases.items():
        results = on_ranks(world, of_world)
        for name, (function, _) in of_world.items():
            got = values(results, name)
            if function is case_run:
                assert got == [2] * world or got == [4] * world, name
            elif function is case_other_shapes:  # the comparison itself
                assert all("mismatch" in text for text in got), got
            else:
                assert got[0] == got[1], name


@pytest.mark.slow
def test_collectives_are_the_same_on_all_ranks(tmp, tmp_path, monkeypatch):
    make_masked(f"{tmp_path}/masked")
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
        masks=case(tmp, "masks", dataset=f"{tmp_path}/masked", **ZERO3),
        offload=case(tmp, "offload", cpu_offload=0.5, activation_checkpointing="full", **ZERO3),
        units=case(tmp, "units", wrap_min_params=800, freeze="wte", **ZERO3),
        sample=(case_sample, dict(tmp=tmp)),
    )
    two["other shapes"] = case_other_shapes, {}
    four = dict(hybrid=case(tmp, "hybrid", strategy="hybrid_shard", shard_group_size=2))
    require_same(monkeypatch, {2: two, 4: four})

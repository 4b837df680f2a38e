"""
Every path that communicates, under PyTorch's own comparison: TORCH_DISTRIBUTED_DEBUG=DETAIL
compares each collective over the ranks (which one, shapes, types) before it runs. Gloo alone sees
another size, and NCCL nothing at all. DDP is not among them: PyTorch 2.13 and 2.15 crash where it
is made under DETAIL (three lines of plain PyTorch do).

    pip install transformers torchao && python -m pytest -q tests/test_collectives.py
"""

import importlib.util
import os
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from harness import built, make_data, on_ranks, run_training, values

import fsdp
import sample

ZERO3 = dict(strategy="full_shard")
SHARDED = dict(strategy="full_shard", checkpoint="sharded")
LORA = dict(lora_rank=4, lora_alpha=6.0)
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


@pytest.fixture
def paths(tmp, monkeypatch):
    """{ranks: {name: case}}"""
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    masked = f"{tmp}/detail-masked"
    make_data(masked)
    for split in ("train", "val"):
        tokens = np.fromfile(f"{masked}/{split}.bin", np.uint16)
        (np.arange(len(tokens)) % 3 == 0).astype(np.uint8).tofile(f"{masked}/{split}.mask")
    base = os.path.join(tmp, "detail-scratch")

    def run(name, **keys):
        return case_run, dict(tmp=tmp, name=name, **keys)

    two = dict(
        scratch=run("scratch", **ZERO3),
        from_full=run("scratch", init_from="resume", max_iters=4, prefetch_blocks=1, **ZERO3),
        sharded=run("sharded", **SHARDED),
        from_sharded=run(
            "sharded", init_from="resume", max_iters=4, strategy="shard_grad_op",
            grad_sync="last", checkpoint="sharded"),
        other_run=run("other-run", init_from=base, **ZERO3),
        lora=run("lora", init_from=base, **LORA, **ZERO3),
        from_lora=run("lora", init_from="resume", max_iters=4, **LORA, **SHARDED),
        masks=run("masks", dataset=masked, **ZERO3),
        mixture=run("mixture", dataset=f"{tmp}/toy:2,{masked}:1", **ZERO3),
        muon=run("muon", optimizer="muon", **SHARDED),
        offload=run("offload", cpu_offload=0.5, activation_checkpointing="full", **ZERO3),
        units=run("units", wrap_min_params=800, freeze="wte", **ZERO3),
        sample=(case_sample, dict(tmp=tmp)),
    )
    if importlib.util.find_spec("transformers"):
        from test_huggingface import case_gpt2, make_hf  # only here: it needs transformers

        path = Path(tmp, "detail-hf")
        make_hf(path, "gpt2")
        two["huggingface"] = case_gpt2, dict(path=str(path), **ZERO3)
    if importlib.util.find_spec("torchao"):
        two["float8"] = run("float8", dtype="float8", n_embd=48, **SHARDED)
    two["other shapes"] = case_other_shapes, {}
    four = dict(hybrid=run("hybrid", strategy="hybrid_shard", shard_group_size=2, optimizer="muon"))
    return {2: two, 4: four}


def test_collectives_are_the_same_on_all_ranks(paths):
    for world, cases in paths.items():
        results = on_ranks(world, cases)
        for name, (case, _) in cases.items():
            got = values(results, name)
            if case is case_run:
                assert got == [2] * world or got == [4] * world, name
            elif case is case_other_shapes:  # the comparison itself
                assert all("mismatch" in text for text in got), got
            else:
                assert got[0] == got[1], name

"""
FSDP's units: which modules they are, and which of them host memory takes. On the meta device; what
ranks make of them is in test_fsdp.py.

    python -m pytest -q tests/test_units.py
"""

import os

import pytest
import torch.distributed as dist
from harness import HERE, plain_gpt, tiny
from torch.testing._internal.distributed.fake_pg import FakeStore

import fsdp
import train
from configurator import load_config
from ranks import World


def test_units_by_size_leave_a_tied_embedding_in_the_root():
    gpt = plain_gpt(n_layer=1, n_head=2, n_embd=64, block_size=64, vocab_size=1000)
    matrices = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    expected = ["transformer.wpe"] + [f"transformer.h.0.{m}" for m in matrices]
    assert [name for name, _ in fsdp.find_units(gpt, 4096)] == expected


def test_units_are_the_blocks_in_forward_order():
    gpt = plain_gpt(n_layer=12)
    assert fsdp.find_units(gpt) == [(f"transformer.h.{i}", gpt.blocks[i]) for i in range(12)]


def test_units_offload_is_spread():
    units = [(str(i), None) for i in range(8)]
    counts = [len(fsdp.offloaded_units(units, f)) for f in (0, 0.25, 0.5, 0.9)]
    assert counts == [0, 2, 4, 7]
    assert fsdp.offloaded_units(units, 0.5) == {"1", "3", "5", "7"}
    assert fsdp.offloaded_units(units, 1) == {*map(str, range(8)), ""}  # the root too


@pytest.mark.parametrize("freeze, blocks", [
    (r"wte|wpe|h\.0\.ln_1", []), (r"wte|wpe|h\.[01]", [0, 1])])
def test_units_that_backward_never_reaches_are_all_frozen(freeze, blocks):
    gpt = plain_gpt()
    fsdp.freeze(gpt, freeze)
    prefix = fsdp.frozen_prefix(gpt, fsdp.find_units(gpt))
    assert [unit for _, unit in prefix] == [gpt.blocks[i] for i in blocks]


def test_units_are_shared_by_neighbours(tmp):
    """hybrid_shard: rank 5 of 8 shares a copy with rank 4, and the others have copies."""
    dist.init_process_group("fake", rank=5, world_size=8, store=FakeStore())
    try:
        mesh = fsdp.make_mesh(tiny(tmp, strategy="hybrid_shard", shard_group_size=2), World(5, 8))
        assert mesh["shard"].mesh.tolist() == [4, 5]
        assert mesh["replicate"].mesh.tolist() == [1, 3, 5, 7]
    finally:
        dist.destroy_process_group()


BLOCK = "model.layers.{i}."
ATTENTION, UP = [BLOCK + "self_attn"], [BLOCK + f"mlp.{name}_proj" for name in ("gate", "up",
                                                                                "down")]


@pytest.mark.parametrize("name, per_block", [("llama2_7b", [BLOCK + "mlp"]),
                                             ("llama2_70b", ATTENTION + UP)])
def test_llama_units_by_size_are_the_published_wrapping(name, per_block):
    """FSDP1's size_based_auto_wrap_policy with 100,000,000 on Llama 2, as its users print it."""
    cfg = load_config([os.path.join(HERE, "config", f"{name}.py")])
    model = train.meta_model(cfg)
    units = [unit for unit, _ in fsdp.find_units(model, 100_000_000)]
    expected = ["model.embed_tokens"]
    for i in range(cfg.n_layer):
        expected += [unit.format(i=i) for unit in per_block]
    assert units == [*expected, "lm_head"]

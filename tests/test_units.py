"""
FSDP's units: which modules they are, and which of them host memory takes. On the meta device; what
ranks make of them is in test_fsdp.py.

    python -m pytest -q tests/test_units.py
"""

from functools import partial

import pytest
import torch.distributed as dist
from harness import plain_gpt
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import fsdp
import test_fsdp
from model import GPT


def test_units_by_size_are_the_innermost_that_are_large_enough():
    """c_fc and c_proj of the MLP have 3,720 and 3,630 parameters, attention's two matrices
    2,790 + 930 = 3,720; norms go to the root."""
    gpt = plain_gpt()
    expected = []
    for block in gpt.blocks:
        expected += [block.attn, block.mlp.c_fc, block.mlp.c_proj]
    assert fsdp.find_units(gpt, gpt.blocks, 3000) == expected


def test_units_by_size_leave_a_tied_embedding_in_the_root():
    gpt = plain_gpt(n_layer=1, n_head=2, n_embd=64, block_size=64, vocab_size=1000)
    block = gpt.blocks[0]
    expected = [gpt.transformer.wpe, block.attn.c_attn, block.attn.c_proj, block.mlp.c_fc,
                block.mlp.c_proj]
    assert fsdp.find_units(gpt, gpt.blocks, 4096) == expected


@pytest.mark.parametrize("vocab_size, tied, is_unit", [
    (9000, False, True), (9000, True, False), (200, False, False)])
def test_units_are_blocks_and_a_large_embedding_that_is_not_tied(vocab_size, tied, is_unit):
    sizes = dict(n_layer=2, n_head=2, n_embd=16, block_size=16, vocab_size=vocab_size)
    gpt = plain_gpt(GPT if tied else test_fsdp.Model, **sizes)
    expected = [gpt.transformer.wte] * is_unit + list(gpt.blocks)
    assert fsdp.find_units(gpt, gpt.blocks) == expected


def test_units_have_a_block_that_is_used_twice_once():
    block, other = nn.Linear(4, 4), nn.Linear(4, 4)
    model = nn.Sequential(block, other, block)
    assert fsdp.find_units(model, model) == [block, other]


@pytest.mark.parametrize("n, fraction, expected", [
    (8, 0, []), (8, 0.25, [3, 7]), (8, 0.5, [1, 3, 5, 7]), (8, 1, [*range(8)]), (3, 0.5, [1])])
def test_units_are_spread_over_the_depth(n, fraction, expected):
    assert fsdp.evenly([*range(n)], fraction) == expected
    assert len(fsdp.evenly(range(100), 0.29)) == 29  # 100 * 0.29 is below 29, by rounding


def test_units_ahead_are_in_the_order_of_their_forward():
    """Outer before inner, where units nest: find_units has them the other way round."""
    gpt, asked = plain_gpt(), {}
    units = [m for block in gpt.blocks[:2] for m in (block.mlp.c_fc, block.mlp, block)]
    for unit in units:
        unit.set_modules_to_forward_prefetch = partial(asked.setdefault, (unit, "forward"))
        unit.set_modules_to_backward_prefetch = partial(asked.setdefault, (unit, "backward"))
    fsdp.prefetch(gpt, units, 2)
    ordered = [m for block in gpt.blocks[:2] for m in (block, block.mlp, block.mlp.c_fc)]
    for i, unit in enumerate(ordered):
        assert asked[unit, "forward"] == ordered[i + 1:i + 3]
        assert asked[unit, "backward"] == ordered[max(0, i - 2):i][::-1]


def test_units_are_shared_by_neighbours():
    """hybrid_shard: rank 5 of 8 shares a copy with rank 4, and the others have copies."""
    dist.init_process_group("fake", rank=5, world_size=8, store=FakeStore())
    try:
        mesh = fsdp.make_mesh("cpu", shard_group_size=2)
        assert mesh["shard"].mesh.tolist() == [4, 5]
        assert mesh["replicate"].mesh.tolist() == [1, 3, 5, 7]
    finally:
        dist.destroy_process_group()

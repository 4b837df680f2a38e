"""
extras/memory.py beside sums of one's own, PyTorch's profiler and the closed formulas of a strategy.

    python -m pytest -q extras/tests/test_memory.py
"""

import formulas
import torch
from harness import built, on_ranks, steps, values

from extras.memory import MemoryTracer


def test_memory_is_of_storages_that_live():
    """A view adds nothing, and a freed or emptied storage counts no more."""
    weight = torch.ones(64, 32)
    with MemoryTracer() as tracer:
        x = torch.ones(16, 64)
        y = x @ weight
        first = y[0]
        del x
        first.add_(1)
        weight.untyped_storage().resize_(0)
        first.add_(1)
    x_size, weight_size, y_size = 16 * 64, 64 * 32, 16 * 32
    whole = x_size + weight_size + y_size
    numbers = [x_size, whole, whole, weight_size + y_size, y_size]
    assert tracer.bytes == [4 * n for n in numbers]


def at_rest(tracer):
    """Bytes between two operations, as one more of them tells."""
    one = torch.ones(1)
    return tracer.bytes[-1] - one.nbytes


def traced(tmp, strategy):
    """Of a step on these ranks: (bytes at rest, bytes by the formula, collectives)."""
    run = built(tmp, strategy=strategy, gradient_accumulation_steps=2)
    with MemoryTracer() as tracer:
        steps(run, n=2)  # DDP's buckets are final after the first
        tracer.clear()
        steps(run, first=2)
        rest = at_rest(tracer)
    device, _ = formulas.kept(run.model, run.cfg, run.world)
    return rest, device, tracer.collectives


def test_memory_of_strategies_is_the_closed_formula(tmp):
    """On two ranks: at rest parameters and moments, with DDP also gradients. 3 blocks and the root
    are units; ZeRO-3 gathers the blocks again in backward."""
    gathers = dict(ddp=0, shard_grad_op=3 + 1, full_shard=2 * 3 + 1)
    cases = {name: (traced, dict(tmp=tmp, strategy=name)) for name in gathers}
    results = on_ranks(2, cases)
    for name, expected in gathers.items():
        for rest, kept, collectives in values(results, name):
            if name != "ddp":
                del kept["gradients"]
            # AdamW's 38 counters, a batch of 2 x 2 x 16 tokens, and the loss come on top.
            assert 0 <= rest - sum(kept.values()) < 1000
            assert collectives.get("c10d::_allgather_base_", 0) == expected
            assert collectives.get("c10d::_reduce_scatter_base_", 0) == (4 if expected else 0)

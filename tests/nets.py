"""
Somebody else's small models, sharded over two ranks and beside themselves in one process. A file of
tests says `cases(globals())`: each of its functions case_... runs on two ranks, all in one launch.
"""

import re
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from harness import on_ranks, values
from torch import nn
from torch.distributed.fsdp import FSDPModule

import fsdp

# From torch 2.13 on, a unit may leave a parameter without a gradient on one rank.
FILLS_IN = hasattr(FSDPModule, "set_reduce_scatter_unused_params")


class Net(nn.Module):
    """Three blocks and a head in the root."""

    def __init__(self, block=lambda: nn.Linear(8, 8)):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.head = nn.Linear(8, 8)

    def forward(self, x):
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8, bias=False)
        self.outer = nn.Linear(8, 8)

    def forward(self, x):
        return self.outer(torch.tanh(self.inner(x)))


class Normed(nn.Module):
    """It has running statistics."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8, bias=False)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x):
        return self.norm(self.linear(x))


class Skips(Net):
    skipped = None  # the block that is left out

    def forward(self, x):
        for i, block in enumerate(self.blocks):
            if i != self.skipped:
                x = block(x)
        return self.head(x)


def inputs(rank):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))


def sharded(model, units=None, **options):
    units = model.blocks if units is None else units
    fsdp.shard(model, units, fsdp.make_mesh("cpu"), **options)
    return model


def fill(model, plain):
    """Give a sharded model the values of one in one process."""
    for p, q in zip(model.parameters(), plain.parameters()):
        fsdp.write_full(p, q.detach())


def square(model, x):
    return model(x).float().square().sum()


def backward(model, loss=square):
    """Each rank's own inputs if the model is sharded; else the mean over all ranks'."""
    ranks = [dist.get_rank()] if fsdp.fsdp_root(model) else [0, 1]
    for rank in ranks:
        (loss(model, inputs(rank)) / len(ranks)).backward()


def reshard(model):
    with fsdp.inference(model):
        pass  # at its end nothing is gathered


def distance(found, expected):
    """Between two lists of tensors, as a share of the norm of the second."""
    found, expected = (
        torch.cat([getattr(t, "full_tensor", lambda t=t: t)().detach().flatten() for t in ts])
        for ts in (found, expected))
    return ((found - expected).norm() / expected.norm()).item()


def assert_exact(model, plain, loss=square, limit=1e-6):
    """The sharded model's gradients are the mean of the plain one's over the ranks' inputs."""
    backward(model, loss)
    backward(plain, loss)
    reshard(model)
    for (name, p), q in zip(model.named_parameters(), plain.named_parameters()):
        if q[1].requires_grad:
            assert distance([p.grad], [q[1].grad]) <= limit, name


@contextmanager
def says(text, error=ValueError):
    with pytest.raises(error, match=re.escape(text)):
        yield


def cases(scope):
    """Makes the file's test of its functions case_..., which run in one launch."""
    found = {}
    functions = {name: f for name, f in scope.items() if name.startswith("case_")}

    @pytest.mark.parametrize("name", functions)
    def test_case(name):
        if not found:
            every = {name: (function, {}) for name, function in functions.items()}
            found.update(on_ranks(2, every, timeout=200))
        values(found, name)

    scope["test_case"] = test_case

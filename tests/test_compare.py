"""
compare.py: ranks that are not at the same place are found, and said on all of them.

    python -m pytest -q tests/test_compare.py
"""

import copy
from dataclasses import dataclass

import nets
import torch
import torch.distributed as dist
from nets import Net, assert_exact, backward, cases, distance, inputs, says, sharded, square
from torch import nn

import activations
import compare
import fsdp


def case_units_that_are_alike():
    """It says nothing of units in units, recomputed, prefetched, in host memory; two forwards
    before a backward; generation until all ranks have enough."""
    model = Net(nets.Block)
    activations.checkpoint_activations(model.blocks, "full")
    units = [m for block in model.blocks for m in (block.inner, block)]
    sharded(model, units, cpu_offload=0.5, prefetch_units=1)
    with compare.check_units(model):
        for _ in range(2):
            loss = square(model, inputs(dist.get_rank()))
            if nets.FILLS_IN:  # torch 2.9 cannot: "got mixed torch.Tensor and DTensor"
                loss = loss + square(model, inputs(dist.get_rank()))
            loss.backward()
        with fsdp.inference(model):
            model(inputs(dist.get_rank()))


def case_different_units():
    rank = dist.get_rank()
    for skipped, said in (
            (rank, "['forward of blocks.1', 'forward of blocks.0']"),
            ([None, 2][rank], "['forward of blocks.2', 'end of forward of the root'")):
        model = sharded(nets.Skips())
        with says(said), compare.check_units(model):
            backward(model)  # the same on both ranks: nothing is said
            model.skipped = skipped
            model(inputs(rank))


def case_one_forward_more():
    model = sharded(Net())
    with says("'the end of check_units'"), compare.check_units(model):
        with torch.no_grad():
            for _ in range(1 + dist.get_rank()):
                model(inputs(0))


class Heads(Net):
    """Rank 0's loss is that of one head, rank 1's that of the other."""

    is_touched = False

    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x):
        own = int(torch.equal(x, inputs(1)))
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        answers = [head(x) for head in self.heads]
        return answers[own] + 0 * answers[1 - own] if self.is_touched else answers[own]


class Towers(Net):
    """Rank 1's loss does not reach the first block."""

    def forward(self, x):
        image = self.blocks[0](x)
        if torch.equal(x, inputs(1)):
            image = image.detach()
        return self.blocks[2](image + self.blocks[1](x))


def case_no_gradient_on_one_rank():
    for kind, said in ((Heads, "['backward of heads.0', 'backward of heads.1']"),
                       (Towers, "['backward of blocks.0', 'end of backward']")):
        for keeps in (False, True):
            model = kind()
            units = [*model.blocks, *getattr(model, "heads", [])]
            sharded(model, units, reshard_after_forward=not keeps)
            with says(said), compare.check_units(model):
                backward(model)
    # The two remedies.
    plain = Heads()
    backward(plain)
    for in_root in (True, False) if nets.FILLS_IN else (False,):
        model = Heads()
        model.is_touched = not in_root
        units = model.blocks if in_root else [*model.blocks, *model.heads]
        sharded(model, units, reshard_after_forward=False)
        with compare.check_units(model):
            backward(model)
        assert distance(nets.gradients(model.heads), nets.gradients(plain.heads)) < 1e-6


class Two(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return y, y.tanh()


def case_one_of_two_outputs():
    """It says nothing if one of a unit's outputs gets a gradient."""
    class OneOrBoth(Net):
        def forward(self, x):
            first, second = self.blocks[0](x)
            answer = self.head(second)
            return answer + first if dist.get_rank() == 0 else answer

    model = OneOrBoth(lambda: Two(8, 8))
    del model.blocks[1:]
    with compare.check_units(sharded(model)):
        backward(model)


@dataclass
class Found:
    last: object = None


class Changes(nn.Linear):
    """A unit that changes what it is given."""

    def __init__(self, change):
        super().__init__(8, 8)
        self.change = change

    def forward(self, x, given):
        self.change(given)
        return super().forward(x)


class Gives(nn.Module):
    def __init__(self, change, given, by_keyword=False):
        super().__init__()
        self.unit = Changes(change)
        self.given = given
        self.by_keyword = by_keyword

    def forward(self, x):
        given = copy.deepcopy(self.given)
        if self.by_keyword:
            return self.unit(x, given=given), given
        return self.unit(x, given), given


ONE = torch.ones(())
CHANGES = [  # what a unit does to what it is given
    (lambda skips: skips.append(ONE), []),
    (lambda skips: skips.append(ONE), [], True),
    (lambda skips: skips.pop(), [ONE, ONE]),
    (lambda nested: nested[0].update(k=ONE), ({},)),
    (lambda nested: nested[0].update(k=ONE), ({"k": None},)),
    (lambda nested: nested[0].update(k=ONE), [{"k": 2 * ONE}]),
    (lambda named: named.update(other=named.pop("one")), {"one": ONE}),
    (lambda found: vars(found).update(last=ONE), Found()),
]


def with_a_policy(*change):
    """FSDP2 then copies what it gives to a unit."""
    model = Gives(*change)
    return sharded(model, [model.unit], mp_policy=fsdp.mixed_precision(torch.float32))


def case_a_unit_that_changes_a_copy():
    for change, *given in CHANGES:
        model = with_a_policy(change, *given)
        for is_training in (True, False):
            with torch.set_grad_enabled(is_training):
                _, found = model(inputs(0))
                assert str(found) == str(given[0])  # nothing is said, and the change is lost
                with says("unit changed a list"), compare.check_units(model):
                    model(inputs(0))


def case_a_unit_that_changes_a_copy_on_one_rank():
    def append_on_one(seen):
        if dist.get_rank() == 1:
            seen.append(ONE)

    model = with_a_policy(append_on_one, [])
    with says("unit changed a list"), compare.check_units(model):
        model(inputs(0))  # both ranks say it


def case_units_that_return_what_their_caller_stores():
    class Keeps(Net):
        def forward(self, x):
            skips = []
            for block in self.blocks:
                x, skip = block(x)
                skips.append(skip)
            return self.head(x * sum(skips))

    policy = fsdp.mixed_precision(torch.float32)
    model = sharded(Keeps(lambda: Two(8, 8)), mp_policy=policy)
    with compare.check_units(model):
        assert_exact(model, Keeps(lambda: Two(8, 8)))


cases(globals())

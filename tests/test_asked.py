"""
What FSDP2 asks of a model: each row of the table in docs/your_model.md, on two ranks. A case has
the beginning of its row as its name. It shows what happens, and that the remedy is exact.

    python -m pytest -q tests/test_asked.py
"""

import copy
import importlib.util
import os
import re
from abc import ABC
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from harness import HERE, on_ranks, values
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import (
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.nn import functional as F

import activations
import checks
import fsdp

IN_BF16 = fsdp.mixed_precision(torch.bfloat16)
ROWS = {}  # {the beginning of a row: its case}


def row(beginning):
    def add(case):
        ROWS[beginning] = case
        return case
    return add


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


def inputs(rank):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))


def sharded(model, units=None, **options):
    mesh = options.pop("mesh", None) or fsdp.make_mesh("cpu")
    fsdp.shard(model, model.blocks if units is None else units, mesh, **options)
    return model


def square(model, x):
    return model(x).float().square().sum()


def backward(model, loss=square):
    loss(model, inputs(dist.get_rank())).backward()


def reshard(model):
    with fsdp.inference(model):
        pass  # at its end nothing is gathered


def assert_exact(model, plain, loss=square, limit=1e-6):
    """The sharded model's gradients are the mean of the plain one's over the ranks' inputs."""
    backward(model, loss)
    for rank in range(dist.get_world_size()):
        (loss(plain, inputs(rank)) / dist.get_world_size()).backward()
    reshard(model)
    for (name, p), q in zip(model.named_parameters(), plain.parameters()):
        if q.requires_grad:
            error = (p.grad.full_tensor() - q.grad).norm() / q.grad.norm()
            assert error <= limit, (name, error)


@contextmanager
def says(text, error=(RuntimeError, ValueError)):
    with pytest.raises(error, match=re.escape(text)):
        yield


# ---------- the same units, in the same order ----------------------------------


@row("ranks call different units")
def case_different_units():
    class Skips(Net):
        skipped = None

        def forward(self, x):
            for i, block in enumerate(self.blocks):
                if i != self.skipped:
                    x = block(x)
            return x

    rank = dist.get_rank()
    # It says nothing of units in units, recomputed, prefetched, in host memory; two forwards
    # before a backward.
    model = Net(Block)
    activations.checkpoint_activations(model.blocks, "full")
    units = [m for block in model.blocks for m in (block.inner, block)]
    sharded(model, units, cpu_offload=0.5, prefetch_units=1)
    with checks.check_units(model):
        for _ in range(2):
            loss = square(model, inputs(rank)) + square(model, inputs(rank))
            loss.backward()
        with fsdp.inference(model):
            model(inputs(rank))
    for skipped, said in (
            (rank, "['forward of blocks.1', 'forward of blocks.0']"),
            ([None, 2][rank], "['forward of blocks.2', 'end of forward of the root'")):
        model = sharded(Skips())
        with says(said, ValueError), checks.check_units(model):
            backward(model)  # the same on both ranks: nothing is said
            model.skipped = skipped
            model(inputs(rank))


@row("one rank runs one forward more")
def case_one_forward_more():
    rank = dist.get_rank()
    model = sharded(Net())
    with says("'the end of check_units'", ValueError), checks.check_units(model):
        with torch.no_grad():
            for _ in range(1 + rank):
                model(inputs(rank))

    def generate(lengths, x):
        """Until all ranks have as many as they want."""
        given = []
        while True:
            is_wanted = torch.tensor(float(len(given) < lengths[rank]))
            all_wanted = is_wanted.clone()
            dist.all_reduce(all_wanted)
            if not all_wanted:
                return given
            x = model(x)
            if is_wanted:
                given.append(x)

    model, plain = sharded(Net()), Net()
    with checks.check_units(model), fsdp.inference(model):
        given = generate([2, 4], inputs(rank))
    assert len(given) == [2, 4][rank]
    x = inputs(rank)
    for t in given:
        x = plain(x)
        assert torch.equal(t, x)


class Heads(Net):
    """Each rank's loss is that of another head."""

    is_touched = False

    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x, rank):
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        answers = [head(x) for head in self.heads]
        loss = answers[rank].square().sum()
        if self.is_touched:
            loss = loss + 0 * answers[1 - rank].sum()
        return loss


@row("a unit that gets no gradient on one rank")
def case_another_head():
    def mean(plain):
        for rank in range(2):
            (plain(inputs(rank), rank) / 2).backward()

    rank = dist.get_rank()
    for keeps in (False, True):
        model = Heads()
        units = [*model.blocks, *model.heads]
        sharded(model, units, reshard_after_forward=not keeps)
        with says("['backward of heads.0', 'backward of heads.1']", ValueError):
            with checks.check_units(model):
                model(inputs(rank), rank).backward()

    class Two(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return y, y.tanh()

    class OneOrBoth(Net):
        def forward(self, x):
            first, second = self.blocks[0](x)
            answer = self.head(second)
            return answer + first if rank == 0 else answer

    # It says nothing if one of a unit's outputs gets a gradient.
    model = OneOrBoth(lambda: Two(8, 8))
    del model.blocks[1:]
    sharded(model)
    with checks.check_units(model):
        backward(model)

    # The error that check_units prevents, and the two remedies.
    plain = Heads()
    mean(plain)
    expected = torch.cat([p.grad.flatten() for p in plain.heads.parameters()])
    for in_root, is_touched in ((False, False), (True, False), (False, True)):
        model = Heads()
        model.is_touched = is_touched
        units = [*model.blocks] if in_root else [*model.blocks, *model.heads]
        sharded(model, units, reshard_after_forward=False)
        model(inputs(rank), rank).backward()
        found = torch.cat([p.grad.full_tensor().flatten() for p in model.heads.parameters()])
        error = (found - expected).norm() / expected.norm()
        assert (error < 1e-6) == (in_root or is_touched), error
        if in_root or is_touched:
            model.zero_grad()
            with checks.check_units(model):
                model(inputs(rank), rank).backward()


@row("a unit that backward never reaches on one rank")
def case_backward_ends_earlier():
    class Towers(Net):
        def forward(self, x, has_image):
            image = self.blocks[0](x)
            if not has_image:
                image = 0 * image if self.is_touched else image.detach()
            return self.blocks[2](image + self.blocks[1](x)).square().sum()

    rank = dist.get_rank()
    model = sharded(Towers())
    model.is_touched = False
    with says("['backward of blocks.0', 'end of backward']", ValueError):
        with checks.check_units(model):
            model(inputs(rank), has_image=rank == 0).backward()
    model = sharded(Towers())
    model.is_touched = True
    with checks.check_units(model):
        model(inputs(rank), has_image=rank == 0).backward()


# ---------- what a unit gets and returns ----------------------------------------


@dataclass
class Found:
    last: object = None


@row("a unit changes a list, dict or dataclass")
def case_containers():
    class Appends(nn.Linear):
        def forward(self, x, skips):
            skips.append(x)
            return super().forward(x)

    class Pops(nn.Linear):
        def forward(self, x, skips):
            return super().forward(x + skips.pop())

    class Sets(nn.Linear):
        def forward(self, x, nested):
            nested[0]["k"] = x
            return super().forward(x)

    class Renames(nn.Linear):
        def forward(self, x, named):
            named["other"] = named.pop("one")
            return super().forward(x)

    class Assigns(nn.Linear):
        def forward(self, x, found):
            found.last = x
            return super().forward(x)

    class Writes(nn.Linear):
        def forward(self, x, *, keyword):
            keyword.append(x)
            return super().forward(x)

    class Calls(nn.Module):
        def __init__(self, unit, given):
            super().__init__()
            self.unit = unit(8, 8)
            self.given = given

        def forward(self, x):
            given = copy.deepcopy(self.given)
            if isinstance(self.unit, Writes):
                return self.unit(x, keyword=given), given
            return self.unit(x, given), given

    x = inputs(0)
    one = torch.ones(())
    for unit, given in ((Appends, []), (Pops, [one, one]), (Sets, ({},)), (Sets, ({"k": None},)),
                        (Sets, [{"k": one}]), (Renames, {"one": one}), (Assigns, Found()),
                        (Writes, [])):
        model = Calls(unit, given)
        sharded(model, [model.unit])
        for is_training in (True, False):
            with torch.set_grad_enabled(is_training):
                found = model(x)[1]
                assert str(found) == str(given)  # nothing is said, and the change is lost
                with says("unit changed a list", ValueError), checks.check_units(model):
                    model(x)

    class AppendsOnOne(nn.Linear):
        def forward(self, x, seen):
            if dist.get_rank() == 1:
                seen.append(x)
            return super().forward(x)

    model = Calls(AppendsOnOne, [])
    sharded(model, [model.unit])
    with says("unit changed a list", ValueError), checks.check_units(model):
        model(x)  # both ranks say it

    class Returns(nn.Linear):
        def forward(self, x):
            return super().forward(x), x

    class Keeps(Net):
        def forward(self, x):
            skips = []
            for block in self.blocks:
                x, skip = block(x)
                skips.append(skip)
            for skip in skips:
                x = x * skip
            return self.head(x)

    def block():
        return Returns(8, 8)

    model = sharded(Keeps(block))
    with checks.check_units(model):
        assert_exact(model, Keeps(block))


@row("a unit returns a plain object")
def case_plain_object():
    class Answer:
        pass

    class Plain(nn.Linear):
        def forward(self, x):
            answer = Answer()
            answer.value = super().forward(x)
            return answer

    class Packed(nn.Linear):
        def forward(self, x):
            return dict(found=[Found(super().forward(x))])

    class Unpacks(Net):
        def forward(self, x):
            for block in self.blocks:
                x = block(x)
                x = x.value if isinstance(x, Answer) else x["found"][0].last
            return self.head(x)

    with says("out of bounds for storage of size 0"):
        backward(sharded(Unpacks(lambda: Plain(8, 8))))

    def block():
        return Packed(8, 8)

    assert_exact(sharded(Unpacks(block)), Unpacks(block))


@row("`y += x` on a unit's output")
def case_in_place():
    class View(nn.Linear):
        def forward(self, x):
            return super().forward(x).view(4, 8)

    class InPlace(Net):
        def forward(self, x):
            x = self.blocks[0](x)
            y = self.blocks[1](x)
            if self.in_place:
                y += x
            else:
                y = y + x
            return self.head(y)

    def net(in_place):
        model = InPlace(lambda: View(8, 8))
        del model.blocks[2]
        model.in_place = in_place
        return model

    with says("out of bounds for storage of size 0"), pytest.warns(match="returned a view tensor"):
        backward(sharded(net(True)))
    assert_exact(sharded(net(False)), net(True))


# ---------- who is called when --------------------------------------------------


@row("a method other than `forward`")
def case_method():
    class Inside(Block):
        def early(self, x):
            return self.inner(x)

    class Asks(Net):
        def forward(self, x):
            return super().forward(self.blocks[0].early(x))

    with says("got mixed torch.Tensor and DTensor"):
        backward(sharded(Asks(Inside)))
    model = sharded(Asks(Inside))
    register_fsdp_forward_method(model.blocks[0], "early")
    assert_exact(model, Asks(Inside))


@row("a part of a unit, or of the root, called from outside")
def case_part():
    class Asks(Net):
        def forward(self, x):
            return super().forward(self.blocks[0].inner(x))

    with says("got mixed torch.Tensor and DTensor"):
        backward(sharded(Asks(Block)))
    model = Asks(Block)
    assert_exact(sharded(model, [model.blocks[0].inner, *model.blocks]), Asks(Block))

    def loss(model, x):
        return model.head(x).square().sum()

    with says("got mixed torch.Tensor and DTensor"):
        backward(sharded(Net()), loss)


@row("a unit called before the root")
def case_tower_first():
    class Towers(Net):
        def both(self, x):
            return self(self.blocks[0](x))

    def loss(model, x):
        return model.both(x).square().sum()

    with says("requires running forward through the root module first"):
        backward(sharded(Towers()), loss)
    model = sharded(Towers())
    register_fsdp_forward_method(model, "both")
    assert_exact(model, Towers(), loss)


@row("a unit that is never called")
def case_never_called():
    class Attention(nn.MultiheadAttention):
        def __init__(self):
            super().__init__(8, 2, batch_first=True)

        def forward(self, x):
            return super().forward(x[None], x[None], x[None], need_weights=False)[0][0]

    model = Net(Attention)
    units = fsdp.find_units(model, model.blocks, 72)
    assert model.blocks[0].out_proj in units
    with says("got mixed torch.Tensor and DTensor"):
        backward(sharded(model, units))
    assert_exact(sharded(Net(Attention)), Net(Attention), limit=1e-5)


@row("a gradient of a gradient")
def case_gradient_penalty():
    def loss(model, x, keep=lambda reshard: None):
        x = x.clone().requires_grad_()
        keep(False)
        y = square(model, x)
        gradient, = torch.autograd.grad(y, x, create_graph=True)
        keep(True)
        return y + gradient.square().sum()

    with says("out of bounds for storage of size 0"):
        backward(sharded(Net()), loss)
    model = sharded(Net())

    def kept(net, x):
        return loss(net, x, model.set_reshard_after_backward if net is model else lambda _: None)

    assert_exact(model, Net(), kept)
    assert all(isinstance(p, fsdp.DTensor) for p in model.parameters())


@row("an evaluation between backward and step")
def case_evaluation_before_step():
    model = sharded(Net())
    backward(model)
    with torch.no_grad():
        model(inputs(0))
    with says("head.weight is not sharded, so its gradient is out of sight", ValueError):
        fsdp.clip_grad_norm(model, 1.0)


@row("a parameter that is added after `shard`")
def case_late_parameter():
    def net():
        model = Net()
        model.head = nn.Linear(8, 4)
        return model

    model = sharded(Net())
    model.head = nn.Linear(8, 4)
    backward(model)
    with says("head.weight is not sharded", ValueError):
        fsdp.clip_grad_norm(model, 1.0)
    assert_exact(sharded(net()), net())


@row("`torch.inference_mode()` around an evaluation")
def case_inference_mode():
    model = sharded(Net())
    with torch.inference_mode():
        model(inputs(0))
    with says("Inplace update to inference tensor"):
        backward(model)
    model = sharded(Net())
    with torch.inference_mode(), fsdp.inference(model):
        model(inputs(0))
    assert_exact(model, Net())


@row("`torch.compile(model)`, or another wrapper")
def case_wrapper():
    model = sharded(Net())
    wrapped = torch.compile(model, backend="eager")
    fsdp.set_grad_sync(wrapped, False, every=False)
    square(wrapped, inputs(dist.get_rank())).backward()
    assert model.blocks[0].weight.grad is None  # not reduced yet
    fsdp.set_grad_sync(wrapped, True, every=False)
    square(wrapped, inputs(dist.get_rank())).backward()
    plain = Net()
    for rank in range(2):
        square(plain, inputs(rank)).backward()
    norm = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    assert abs(fsdp.clip_grad_norm(wrapped, 1.0) - norm) < 1e-4 * norm
    with fsdp.autocast(wrapped, "cpu", torch.bfloat16):
        assert not torch.is_autocast_enabled("cpu")
    with fsdp.inference(wrapped):
        wrapped(inputs(0))
    assert all(isinstance(p, fsdp.DTensor) for p in model.parameters())


@row("an optimizer made before `shard`")
def case_early_optimizer():
    model = Net()
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    with says("make it after `shard`"):
        checks.after_building(sharded(model), early)
    checks.after_building(model, torch.optim.SGD(model.parameters(), lr=0.1))


@row("an optimizer made after a forward")
def case_late_optimizer():
    def moved(model, optimizer):
        before = [fsdp.gather_full(p) for p in model.parameters()]
        backward(model)
        optimizer.step()
        after = [fsdp.gather_full(p) for p in model.parameters()]
        return [not torch.equal(*pair) for pair in zip(before, after) if pair[0] is not None]

    model = sharded(Net())
    backward(model)
    model(inputs(0))
    late = torch.optim.SGD(model.parameters(), lr=0.1)
    reshard(model)
    in_time = torch.optim.SGD(model.parameters(), lr=0.1)
    is_moved = moved(model, late)
    assert dist.get_rank() or is_moved == 6 * [True] + 2 * [False]  # the head is the root's
    assert all(moved(model, in_time))


# ---------- parameters ----------------------------------------------------------


@row("`.item()` or `float()` of a DTensor's norm or sum")
def case_number_of_a_norm():
    model = sharded(Net())
    backward(model)
    grad = model.head.weight.grad
    whole = grad.full_tensor().norm().item()
    assert abs(float(grad.norm()) - whole) > 0.1 * whole
    assert abs(grad.norm().full_tensor().item() - whole) < 1e-5 * whole


@row("an L2 penalty in the loss")
def case_penalty():
    def loss(model, x):
        penalty = sum(p.square().sum() for p in model.parameters())
        if isinstance(penalty, fsdp.DTensor):
            penalty = penalty.full_tensor()
        return square(model, x) + penalty

    with says("got mixed torch.Tensor and DTensor"):
        model = sharded(Net())
        (square(model, inputs(0)) + sum(p.square().sum() for p in model.parameters())).backward()
    assert_exact(sharded(Net()), Net(), loss)


@row("`p.register_hook(f)`")
def case_register_hook():
    model, ran = sharded(Net()), []
    weight = model.blocks[0].weight
    weight.register_hook(lambda grad: ran.append("hook"))
    weight.register_post_accumulate_grad_hook(lambda p: ran.append(tuple(p.grad.to_local().shape)))
    backward(model)
    assert ran == [(4, 8)]


@row("a parameter that no rank uses")
def case_unused():
    def moved(model):
        model.idle.weight.data.copy_(model.idle.weight.data)
        before = idle_weight(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
        backward(model)
        optimizer.step()
        return (idle_weight(model) - before).abs().max().item()

    def idle_weight(model):
        weight = model.idle.weight.detach()
        return (weight.full_tensor() if isinstance(weight, fsdp.DTensor) else weight).clone()

    def net(frozen):
        model = Net()
        model.idle = nn.Linear(8, 8).requires_grad_(not frozen)
        return model

    assert moved(net(False)) == 0 < 0.001 < moved(sharded(net(False)))
    assert moved(sharded(net(True))) == 0


@row("resuming with a parameter frozen that has trained before")
def case_frozen_since():
    model = sharded(Net())
    optimizer = torch.optim.AdamW(model.parameters())
    backward(model)
    optimizer.step()
    weights, state = get_state_dict(model, optimizer)
    for is_frozen in (True, False):
        model = sharded(Net())
        optimizer = torch.optim.AdamW(model.parameters())
        model.head.weight.requires_grad_(not is_frozen)
        set_state_dict(
            model, optimizer, model_state_dict=weights, optim_state_dict=copy.deepcopy(state))
        has_state = bool(optimizer.state.get(model.head.weight))
        assert has_state != is_frozen and optimizer.state[model.head.bias]


@row("`nn.init.normal_(p)` and the like after `shard`")
def case_init_after_shard():
    model = sharded(Net())
    torch.manual_seed(0)
    weight = model.head.weight
    nn.init.normal_(weight)
    whole = weight.full_tensor()
    assert torch.equal(whole[:4], whole[4:])
    value = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    fsdp.write_full(weight, value)
    assert torch.equal(weight.full_tensor(), value)


@row("a trained parameter is in bf16 or fp16")
def case_trained_in_bf16():
    model = Net()
    model.blocks[1].to(torch.bfloat16)
    with says("blocks.1.weight trains in torch.bfloat16"):
        checks.before_sharding(model)
    checks.before_sharding(model.float())
    checks.before_sharding(Net().double())  # nothing is rounded away
    checks.before_sharding(Net().to(torch.complex64))
    model = Net().to(torch.bfloat16)
    model.requires_grad_(False)
    checks.before_sharding(model)
    model.blocks[1].lora = nn.Parameter(torch.ones(8))  # in fp32, beside bf16 that is frozen
    register_lora(model.blocks[1])
    sharded(model, mp_policy=IN_BF16)
    backward(model)
    assert model.blocks[1].lora.grad.dtype == torch.float32
    assert model.blocks[1].weight.to_local().dtype == torch.bfloat16


def register_lora(block):
    block.forward = lambda x: F.linear(x, block.weight, block.bias) * block.lora


@row("a parameter shared between two units")
def case_tied_in_two_units():
    def net():
        model = Net()
        model.blocks[2].weight = model.blocks[0].weight
        return model

    with says("is shared with a parameter already managed by another FSDP group"):
        backward(sharded(net()))
    model = net()
    assert_exact(sharded(model, [model.blocks[1]]), net())


@row("a module that several blocks share")
def case_shared_module():
    def net(block=Block):
        model = Net(block)
        for block in model.blocks:
            block.inner = model.blocks[0].inner
        return model

    with says("Cannot concatenate overlapping meshes"):
        sharded(net())
    for options in (dict(), dict(reshard_after_forward=False), dict(cpu_offload=0.5)):
        model = net()
        units = [model.blocks[0].inner, *model.blocks]
        activations.checkpoint_activations(model.blocks, "full")
        assert_exact(sharded(model, units, **options), net())
    # One block in three places, as ALBERT's.
    model, plain = Net(Block), Net(Block)
    for each in (model, plain):
        each.blocks = nn.ModuleList(3 * [each.blocks[0]])
    units = fsdp.find_units(model, model.blocks)
    assert units == [model.blocks[0]]
    assert_exact(sharded(model, units), plain)


class Embeds(nn.Module):
    """A table, a block, and a head that reads the table itself."""

    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(0)
        self.emb = nn.Embedding(20, 8, **options)
        self.blocks = nn.ModuleList([nn.Linear(8, 8)])

    def forward(self, x):
        tokens = (x[:, 0].abs() * 10).long() % 20
        return F.linear(self.blocks[0](self.emb(tokens)), self.emb.weight)


@row("a head that reads `model.emb.weight` itself")
def case_head_reads_the_table():
    model = Embeds()
    units = fsdp.find_units(model, model.blocks)
    assert units == [model.emb, *model.blocks]
    with says("got mixed torch.Tensor and DTensor"):
        backward(sharded(model, units))
    assert_exact(sharded(Embeds()), Embeds(), limit=1e-5)


@row("`nn.Embedding(max_norm=...)`")
def case_max_norm():
    tokens = torch.arange(20)
    plain = nn.Embedding(20, 8, max_norm=0.5)
    plain(tokens)
    assert plain.weight.norm(dim=1).max() < 0.6
    model = nn.Sequential(nn.Embedding(20, 8, max_norm=0.5))
    sharded(model, [model[0]])
    out = model(tokens)
    assert out.norm(dim=1).max() < 0.6  # the copy was changed
    reshard(model)
    assert model[0].weight.full_tensor().norm(dim=1).max() > 1  # and is lost


@row("a parameter that is not contiguous")
def case_not_contiguous():
    def net():
        model = Net()
        model.head.weight = nn.Parameter(model.head.weight.detach().t())
        return model

    with says("FSDP does not support non-contiguous parameters", (NotImplementedError,)):
        sharded(net())
    model = net()
    model.head.weight.data = model.head.weight.data.contiguous()
    assert_exact(sharded(model), net())


@row("`class M(ABC, nn.Module)`")
def case_abc():
    class Wrong(ABC, Net):
        pass

    class Right(Net, ABC):
        pass

    with says("object layout differs from 'Wrong'", TypeError):
        sharded(Wrong())
    assert_exact(sharded(Right()), Net())


@row("a parameter of 0 dimensions")
def case_scalar():
    def net(shape):
        model = Net()
        model.blocks[0].scale = nn.Parameter(torch.ones(shape))
        block = model.blocks[0]
        block.forward = lambda x: F.linear(x, block.weight, block.bias) * block.scale
        return model

    with says("doesn't support scalar parameters"):
        sharded(net(()))
    assert_exact(sharded(net((1,))), net((1,)))


@row("`copy.deepcopy(model)` after `shard`")
def case_deepcopy():
    with says("FSDP does not support deepcopy", (AssertionError, RuntimeError)):
        copy.deepcopy(sharded(Net()))


# ---------- buffers -------------------------------------------------------------


@row("a buffer on the meta device")
def case_meta_buffer():
    model = Net()
    model.register_buffer("table", torch.ones(8, device="meta"))
    with says("table is on the meta device", ValueError):
        checks.before_sharding(model)
    model.table = torch.ones(8)
    checks.before_sharding(model)


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8, bias=False)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x):
        return self.norm(self.linear(x))


@row("a table that is a plain attribute")
def case_plain_table():
    class Scaled(Net):
        def __init__(self):
            super().__init__()
            self.table = torch.ones(8)

        def forward(self, x):
            return super().forward(x * self.table)

    with torch.device("meta"):
        model = Scaled()
    sharded(model)
    for p, q in zip(model.parameters(), Net().parameters()):
        fsdp.write_full(p, q.detach())
    with says("meta", (RuntimeError, NotImplementedError)):
        backward(model)
    model.table = torch.ones(8)
    assert_exact(model, Net())


@row("a value kept in a unit's attribute")
def case_kept_value():
    class Keeps(nn.Linear):
        def forward(self, x):
            self.kept = super().forward(x)
            return self.kept

    class Reads(Net):
        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return self.head(x + self.blocks[0].kept)

    class Passes(Net):
        def forward(self, x):
            first = x = self.blocks[0](x)
            for block in self.blocks[1:]:
                x = block(x)
            return self.head(x + first)

    for kind in (Reads, Passes):
        assert_exact(sharded(kind(lambda: Keeps(8, 8))), kind(lambda: Keeps(8, 8)))


@row("BatchNorm and other running statistics")
def case_running_statistics():
    model = sharded(Net(Normed))
    backward(model)

    def both(name):
        found = [None, None]
        dist.all_gather_object(found, model.get_buffer(name).tolist())
        return found

    zero, one = both("blocks.0.norm.running_mean")
    assert zero != one
    for buffer in model.buffers():
        if buffer.is_floating_point():
            dist.all_reduce(buffer)
            buffer /= 2
    mean = (torch.tensor(zero) + torch.tensor(one)) / 2
    found = torch.tensor(both("blocks.0.norm.running_mean"))
    assert torch.allclose(found, mean.expand(2, 8))


@row("running statistics in a checkpointed block")
def case_checkpointed_statistics():
    for mode in ("full", "selective"):
        for norm in (nn.BatchNorm1d, spectral):
            model = Net(Normed)
            for block in model.blocks:
                block.norm = norm(8)
            activations.checkpoint_activations(model.blocks, mode)
            backward(sharded(model))
            if norm is nn.BatchNorm1d:
                assert model.blocks[0].norm.num_batches_tracked == 2
    model, plain = Net(Normed), Net(Normed)
    activations.checkpoint_activations([block.linear for block in model.blocks], "full")
    assert_exact(sharded(model), plain)
    assert model.blocks[0].norm.num_batches_tracked == 1


def spectral(n):
    return nn.utils.parametrizations.spectral_norm(nn.Linear(n, n))


@row("buffers in fp32, with `param_dtype=torch.bfloat16`")
def case_fp32_buffers():
    class Turns(nn.Linear):
        def __init__(self):
            super().__init__(8, 8)
            self.register_buffer("table", torch.eye(8))

        def forward(self, x):
            table = self.table.type_as(x) if self.casts else self.table
            return super().forward(x) @ table

    Turns.casts = False
    with says("expected m1 and m2 to have the same dtype"):
        backward(sharded(Net(Turns), mp_policy=IN_BF16))
    Turns.casts = True
    assert_exact(sharded(Net(Turns), mp_policy=IN_BF16), Net(Turns), limit=0.03)


@row("a float argument of a block")
def case_float_argument():
    class Rotary(nn.Linear):
        def __init__(self):
            super().__init__(8, 8)

        def forward(self, x, positions):
            angles = positions.float()[:, None] * torch.linspace(0.5, 1, 8)
            return super().forward(x) * angles.cos().type_as(x)

    class Turns(Net):
        def __init__(self, kind):
            super().__init__(Rotary)
            self.kind = kind

        def forward(self, x):
            positions = torch.arange(1001, 1001 + len(x)).to(self.kind)
            for block in self.blocks:
                x = x + torch.tanh(block(x, positions))
            return self.head(x)

    def error(kind):
        x = inputs(0)
        plain = Turns(kind)(x)
        with torch.no_grad():
            out = sharded(Turns(kind), mp_policy=IN_BF16)(x)
        return ((out - plain).norm() / plain.norm()).item()

    assert error(torch.float32) > 0.1
    assert error(torch.int64) < 0.03


@row("BatchNorm, with `param_dtype=torch.bfloat16`")
def case_batchnorm_in_bf16():
    with says("expected scalar type BFloat16 but found Float"):
        backward(sharded(Net(Normed), mp_policy=IN_BF16))
    model = Net(Normed)
    mesh = fsdp.make_mesh("cpu")
    in_fp32 = MixedPrecisionPolicy(param_dtype=torch.float32, output_dtype=torch.bfloat16)
    for block in model.blocks:
        fully_shard(block.norm, mesh=mesh, mp_policy=in_fp32)
    assert_exact(sharded(model, mesh=mesh, mp_policy=IN_BF16), Net(Normed), limit=0.05)
    assert model.blocks[0].norm.running_mean.dtype == torch.float32


# ---------- optimizers ----------------------------------------------------------


class Momentum(torch.optim.Optimizer):
    """Somebody's own."""

    def __init__(self, params):
        super().__init__(params, dict(lr=0.1))

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                momentum += p.grad
                p -= 0.1 * momentum


class WithClosure(Momentum):
    def step(self, closure=None):
        super().step()


@row("a set or list of parameters made before `shard`")
def case_marks():
    """As Mamba and timm mark them; on the meta device too, where they are made once more."""
    def made(device):
        model = Net().to(device)
        biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
        for p in biases:
            p._no_weight_decay = True
        return model, biases

    def require_marks(model):
        for name, p in model.named_parameters():
            assert getattr(p, "_no_weight_decay", False) == name.endswith("bias")

    for device in ("cpu", "meta"):
        model, biases = made(device)
        sharded(model)
        for p, q in zip(model.parameters(), Net().parameters()):
            fsdp.write_full(p, q.detach())
        assert not set(biases).intersection(model.parameters())
        require_marks(model)
        assert_exact(model, Net())
        require_marks(model)  # after a step too
    model, _ = made("meta")  # of one process, or for DDP
    fsdp.allocate(model, "cpu")
    require_marks(model)


@row("several micro-batches, and `set_grad_sync` is never told of the last")
def case_never_the_last():
    for keeps in (False, True):
        model = sharded(Net(), reshard_after_forward=not keeps)
        for is_last in (False, False, True):
            fsdp.set_grad_sync(model, is_last, keep_gathered=keeps)
            backward(model)
            if not is_last:
                with says("set_grad_sync was not told of the last micro-batch", ValueError):
                    fsdp.clip_grad_norm(model, 1.0)
        plain = Net()
        for rank in range(2):
            (3 / 2 * square(plain, inputs(rank))).backward()
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        assert abs(fsdp.clip_grad_norm(model, 1.0) - expected) < 1e-5 * expected


@row("your own optimizer's `step(self)`")
def case_closure():
    model = sharded(Net())
    with says("unexpected keyword argument 'closure'", TypeError):
        get_state_dict(model, Momentum(model.parameters()))
    model = sharded(Net())
    state = get_state_dict(model, WithClosure(model.parameters()))[1]["state"]
    assert state["head.weight"]["momentum"].shape == (8, 8)


@row("your own optimizer works on `p.to_local()`")
def case_norms():
    def move(p, g):
        p -= 0.1 * p.norm() / g.norm() * g

    def root(matrix):  # Shampoo's preconditioner
        matrix = matrix + torch.eye(len(matrix))
        values, vectors = torch.linalg.eigh(matrix)
        return vectors @ torch.diag(values**-0.25) @ vectors.T

    def shampoo(g):
        return root(g @ g.T) @ g @ root(g.T @ g)

    model, plain = sharded(Net()), Net()
    assert_exact(model, plain)
    with torch.no_grad():
        for p, q in zip(model.parameters(), plain.parameters()):
            rows, own = p.to_local().clone(), p.grad.to_local()
            move(p, p.grad)
            before, after = q.clone(), q.clone()
            move(after, q.grad)
            assert (p.full_tensor() - after).norm() <= 1e-6 * after.norm()
            move(rows, own)
            assert (rows - p.to_local()).norm() > 1e-4 * rows.norm()  # in silence
            if q.dim() == 2:
                expected = shampoo(q.grad).chunk(2)[dist.get_rank()]
                found = shampoo(p.grad.full_tensor()).chunk(2)[dist.get_rank()]
                assert (found - expected).norm() <= 1e-5 * expected.norm()
                assert (shampoo(own) - expected).norm() > 1e-2 * expected.norm()
            assert not torch.equal(before, after)


# ---------- transformers --------------------------------------------------------


def decoders():
    from transformers import GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    ends = dict(bos_token_id=0, eos_token_id=31, pad_token_id=30)
    dropout = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    sizes = dict(n_embd=16, n_head=2, n_layer=2, n_positions=32, vocab_size=32)
    gpt2 = GPT2LMHeadModel(GPT2Config(**sizes, **dropout, **ends))
    sizes = dict(d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, vocab_size=32)
    t5 = T5ForConditionalGeneration(T5Config(
        **sizes, dropout_rate=0.0, decoder_start_token_id=0, **ends))
    gpt2.blocks = gpt2.transformer.h
    t5.blocks = nn.ModuleList([*t5.encoder.block, *t5.decoder.block])
    return gpt2, t5


@row("transformers' decoders in `checkpoint_activations`")
def case_use_cache():
    ids = torch.arange(12).view(2, 6)

    def loss(model, x):
        return model(input_ids=ids, labels=ids.flip(1)).loss

    def without_cache(model, mode):
        model.config.use_cache = False
        if model.config.is_encoder_decoder:
            model.decoder.config.use_cache = False
        activations.checkpoint_activations(model.blocks, mode)

    for i in range(2):
        plain = decoders()[i].train()
        model = decoders()[i].train()
        activations.checkpoint_activations(model.blocks, "selective")
        with says("encountered during backward but not found in storage"):
            backward(sharded(model), loss)
        for mode in ("selective", "full"):
            model = decoders()[i].train()
            without_cache(model, mode)
            plain.zero_grad()
            assert_exact(sharded(model), plain, loss, limit=1e-5)
        model = decoders()[i].train()
        model.gradient_checkpointing_enable()
        plain.zero_grad()
        assert_exact(sharded(model), plain, loss, limit=1e-5)


@row("transformers' `generate` of an encoder and a decoder")
def case_generate():
    rank = dist.get_rank()
    x = torch.arange(6)[None] + rank
    # It goes on until all ranks have enough, though one wants more.
    wanted = dict(max_new_tokens=2 + 3 * rank, do_sample=False)
    for i in range(2):
        plain, model = decoders()[i].eval(), decoders()[i]
        expected = plain.generate(x, **wanted)
        sharded(model)
        if i == 1:
            with says("got mixed torch.Tensor and DTensor"), fsdp.inference(model):
                model.generate(x, **wanted)
            model = sharded(decoders()[i])
            register_fsdp_forward_method(model, "generate")
        with checks.check_units(model), fsdp.inference(model):
            assert torch.equal(model.generate(x, **wanted), expected)


def test_asked_from_pretrained_keeps_the_type_that_was_saved(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=8, n_head=1, n_layer=1, n_positions=8, vocab_size=8)
    transformers.GPT2Model(config).bfloat16().save_pretrained(tmp_path)
    load = transformers.GPT2Model.from_pretrained
    assert load(tmp_path).dtype == torch.bfloat16
    assert load(tmp_path, dtype=torch.float32).dtype == torch.float32


# ---------- the table -----------------------------------------------------------

has_transformers = importlib.util.find_spec("transformers") is not None


def needs_transformers(name):
    return name.startswith("transformers'")


@pytest.fixture(scope="module")
def found():
    cases = {}
    for i, (name, case) in enumerate(ROWS.items()):
        if has_transformers or not needs_transformers(name):
            cases[str(i)] = (case, {})
    return on_ranks(2, cases, timeout=200)


@pytest.mark.parametrize("i, name", list(enumerate(ROWS)))
def test_asked_of_a_model(found, i, name):
    if needs_transformers(name) and not has_transformers:
        pytest.skip("transformers is not here")
    values(found, str(i))


def test_asked_rows_are_cases():
    with open(os.path.join(HERE, "docs", "your_model.md")) as f:
        section = re.search(r"\n## What goes wrong, and what to do\n(.*?)\n## ", f.read(), re.S)[1]
    beginnings = [line[2:] for line in section.splitlines() if line.startswith("| ")][1:]
    for beginning in beginnings:
        assert any(map(beginning.startswith, ROWS)), f"no case for: {beginning}"
    for name in ROWS:
        assert any(line.startswith(name) for line in beginnings), f"no row for: {name}"

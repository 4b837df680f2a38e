"""
What FSDP2 asks of a model: each row of the tables in docs/your_model.md, on two ranks. A case has
the beginning of its row as its name. It shows what happens, and that the remedy is exact.

    python -m pytest -q tests/test_asked.py
"""

import copy
import importlib.util
import io
import os
import re
import tempfile
import warnings
from abc import ABC
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import HERE, on_ranks, values
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import (
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.nn.functional import all_gather
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


class Does(nn.Linear):
    """A block that computes function(linear, ...), where `linear` is a linear layer."""

    def __init__(self, function):
        super().__init__(8, 8)
        self.function = function

    def forward(self, *args, **kwargs):
        return self.function(super().forward, *args, **kwargs)


def inputs(rank):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))


def sharded(model, units=None, **options):
    mesh = options.pop("mesh", None) or fsdp.make_mesh("cpu")
    fsdp.shard(model, model.blocks if units is None else units, mesh, **options)
    return model


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


def whole(t):
    t = t.detach()
    return t.full_tensor() if isinstance(t, fsdp.DTensor) else t.clone()


def distance(found, expected):
    """Between two lists of tensors, as a share of the norm of the second."""
    found, expected = (torch.cat([whole(t).flatten() for t in ts]) for ts in (found, expected))
    return ((found - expected).norm() / expected.norm()).item()


def gradients(model):
    return [p.grad for p in model.parameters() if p.requires_grad]


def assert_exact(model, plain, loss=square, limit=1e-6):
    """The sharded model's gradients are the mean of the plain one's over the ranks' inputs."""
    backward(model, loss)
    backward(plain, loss)
    reshard(model)
    for (name, p), q in zip(model.named_parameters(), plain.parameters()):
        if q.requires_grad:
            assert distance([p.grad], [q.grad]) <= limit, name


@contextmanager
def says(text, error=(RuntimeError, ValueError)):
    with pytest.raises(error, match=re.escape(text)):
        yield


# ---------- the same units, in the same order ----------------------------------


class Skips(Net):
    skipped = None  # the block that is left out

    def forward(self, x):
        for i, block in enumerate(self.blocks):
            if i != self.skipped:
                x = block(x)
        return self.head(x)


@row("ranks call different units")
def case_different_units():
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

    is_touched = False

    def forward(self, x):
        image = self.blocks[0](x)
        if torch.equal(x, inputs(1)):
            image = 0 * image if self.is_touched else image.detach()
        return self.blocks[2](image + self.blocks[1](x))


@row("a unit that gets no gradient on one rank")
def case_no_gradient_on_one_rank():
    def units_of(model):
        return [*model.blocks, *getattr(model, "heads", [])]

    for kind, said in ((Heads, "['backward of heads.0', 'backward of heads.1']"),
                       (Towers, "['backward of blocks.0', 'end of backward']")):
        for keeps in (False, True):
            model = kind()
            sharded(model, units_of(model), reshard_after_forward=not keeps)
            with says(said, ValueError), checks.check_units(model):
                backward(model)

    def two(linear, x):
        y = linear(x)
        return y, y.tanh()

    class OneOrBoth(Net):
        def forward(self, x):
            first, second = self.blocks[0](x)
            answer = self.head(second)
            return answer + first if dist.get_rank() == 0 else answer

    # It says nothing if one of a unit's outputs gets a gradient.
    model = OneOrBoth(lambda: Does(two))
    del model.blocks[1:]
    sharded(model)
    with checks.check_units(model):
        backward(model)

    # The error that check_units prevents, and the two remedies.
    plain = Heads()
    backward(plain)
    for in_root, is_touched in ((False, False), (True, False), (False, True)):
        model = Heads()
        model.is_touched = is_touched
        units = model.blocks if in_root else units_of(model)
        sharded(model, units, reshard_after_forward=False)
        backward(model)
        is_right = distance(gradients(model.heads), gradients(plain.heads)) < 1e-6
        assert is_right == (in_root or is_touched)
        if is_right:
            with checks.check_units(model):
                backward(model)
    model = Towers()
    model.is_touched = True
    with checks.check_units(sharded(model)):
        backward(model)


# ---------- what a unit gets and returns ----------------------------------------


@dataclass
class Found:
    last: object = None


@row("with `param_dtype` set, a unit changes a list, dict or dataclass")
def case_containers():
    def after(change, linear, x, given, also=None):
        change(given if also is None else also)
        return linear(x)

    class Calls(nn.Module):
        def __init__(self, change, given, by_keyword=False):
            super().__init__()
            self.unit = Does(partial(after, change))
            self.given = given
            self.by_keyword = by_keyword

        def forward(self, x):
            given = copy.deepcopy(self.given)
            if self.by_keyword:
                return self.unit(x, None, also=given), given
            return self.unit(x, given), given

    x, one = inputs(0), torch.ones(())
    changes = (
        (lambda skips: skips.append(one), []),
        (lambda skips: skips.append(one), [], True),
        (lambda skips: skips.pop(), [one, one]),
        (lambda nested: nested[0].update(k=one), ({},)),
        (lambda nested: nested[0].update(k=one), ({"k": None},)),
        (lambda nested: nested[0].update(k=one), [{"k": 2 * one}]),
        (lambda named: named.update(other=named.pop("one")), {"one": one}),
        (lambda found: vars(found).update(last=one), Found()),
    )
    for change, *given in changes:
        model = Calls(change, *given)
        sharded(model, [model.unit], mp_policy=fsdp.mixed_precision(torch.float32))
        for is_training in (True, False):
            with torch.set_grad_enabled(is_training):
                found = model(x)[1]
                assert str(found) == str(given[0])  # nothing is said, and the change is lost
                with says("unit changed a list", ValueError), checks.check_units(model):
                    model(x)

    def append_on_one(seen):
        if dist.get_rank() == 1:
            seen.append(one)

    model = Calls(append_on_one, [])
    sharded(model, [model.unit], mp_policy=fsdp.mixed_precision(torch.float32))
    with says("unit changed a list", ValueError), checks.check_units(model):
        model(x)  # both ranks say it
    model = Calls(*changes[0])
    sharded(model, [model.unit])
    with checks.check_units(model):
        assert model(x)[1] == [one]  # without a policy FSDP2 makes no copy

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
        return Does(lambda linear, x: (linear(x), x))

    model = sharded(Keeps(block))
    with checks.check_units(model):
        assert_exact(model, Keeps(block))


@row("a unit returns a plain object")
def case_plain_object():
    class Answer:
        pass

    def plain(linear, x):
        answer = Answer()
        answer.value = linear(x)
        return answer

    def packed():
        return Does(lambda linear, x: dict(found=[Found(linear(x))]))

    class Unpacks(Net):
        def forward(self, x):
            for block in self.blocks:
                x = block(x)
                x = x.value if isinstance(x, Answer) else x["found"][0].last
            return self.head(x)

    with says("out of bounds for storage of size 0"):
        backward(sharded(Unpacks(lambda: Does(plain))))
    assert_exact(sharded(Unpacks(packed)), Unpacks(packed))


@row("`y += x` on a unit's output")
def case_in_place():
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
        model = InPlace(lambda: Does(lambda linear, x: linear(x).view(4, 8)))
        del model.blocks[2]
        model.in_place = in_place
        return model

    with says("out of bounds for storage of size 0"), pytest.warns(match="returned a view tensor"):
        backward(sharded(net(True)))
    assert_exact(sharded(net(False)), net(True))

    # A warning after a Linear on 3-D input, which is harmless.
    with warnings.catch_warnings(record=True) as said:
        assert_exact(sharded(Net()), Net(), lambda model, x: square(model, x[None]))
    assert any("returned a view" in str(w.message) for w in said) or torch.__version__ >= (2, 14)


@row("a float argument of the model or of a block")
def case_float_argument():
    def turn(linear, x, t, scale):
        angles = scale * t.float()[:, None] * torch.linspace(0.5, 1, 8)
        y = linear(x)
        return y * angles.cos().type_as(y)

    class Turns(Net):
        def forward(self, x, t, scale):
            x = x.to(self.head.weight.dtype)
            for block in self.blocks:
                x = x + torch.tanh(block(x, t, scale))
            return self.head(x)

    def error(t, scale, **options):
        plain, model = (Turns(lambda: Does(turn)) for _ in range(2))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, **options)
        found = sharded(model, mp_policy=policy)(inputs(0), t, scale)
        return distance([found], [plain(inputs(0), t, scale)])

    positions = torch.arange(1001, 1005)
    assert error(positions.float(), 1) > 0.1 and error(positions, 1) < 0.03
    assert torch.tensor([1001, 50.12]).bfloat16().tolist() == [1000, 50]
    times = positions / 2000
    assert error(times, 2000) > 0.1 and error(times, 2000, cast_forward_inputs=False) < 0.03


@row("a loss outside of the model")
def case_loss_outside():
    x, y = inputs(0), torch.arange(4)
    output = sharded(Net(), mp_policy=IN_BF16)(x)
    loss, in_fp32 = F.cross_entropy(output, y), F.cross_entropy(output.float(), y)
    assert loss.dtype == torch.bfloat16 and loss == in_fp32.bfloat16() != in_fp32
    assert abs(in_fp32 - F.cross_entropy(Net()(x), y)) < 0.01
    with says("not implemented for 'BFloat16'", NotImplementedError):
        F.ctc_loss(output.log_softmax(-1)[:, None], y[None, :2], (4,), (2,))


@row("a second model that only runs forward")
def case_teacher():
    def train(model, teacher, only_forward):
        def loss(model, x):
            with only_forward(teacher):
                target = teacher(x) + 1
            return F.mse_loss(model(x), target)

        averages = [*teacher.parameters()]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(6):
            backward(model, loss)
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for mean, p in zip(averages, model.parameters()):
                    mean.lerp_(p, 0.5)
        with torch.no_grad():
            return [teacher(inputs(2))]

    def no_grad(teacher):
        return torch.no_grad()

    expected = train(Net(), Net(), no_grad)
    assert distance(train(sharded(Net()), sharded(Net()), no_grad), expected) > 0.1
    assert distance(train(sharded(Net()), sharded(Net()), fsdp.inference), expected) < 1e-6


# ---------- the loss -------------------------------------------------------------


@row("a loss that is the mean over targets")
def case_mean_of_means():
    def batches_of(rank):
        x = inputs(rank)
        y = torch.arange(8).view(2, 4)
        y[0, 1 + rank:] = -100  # padding: 1 or 2 targets, and 4
        return [(x, y[0]), (x, y[1])]

    rank, plain = dist.get_rank(), Net()
    x, y = map(torch.cat, zip(*batches_of(0), *batches_of(1)))
    F.cross_entropy(plain(x), y).backward()
    model = sharded(Net())
    for x, y in batches_of(rank):
        (F.cross_entropy(model(x), y) / 2).backward()
    assert distance(gradients(model), gradients(plain)) > 0.1

    model = sharded(Net())
    scope = dict(model=model, batches=batches_of(rank), dist=dist, F=F)
    *count, loss = shown(0).splitlines()
    exec("\n".join(count), scope)
    for x, y in batches_of(rank):
        scope.update(x=x, y=y)
        exec(loss, scope)
        scope["loss"].backward()
    assert distance(gradients(model), gradients(plain)) < 1e-6


@row("a contrastive loss over all ranks' features")
def case_contrastive():
    def without_gradients(own):
        parts = [torch.empty_like(own) for _ in range(2)]
        dist.all_gather(parts, own.detach())
        parts[dist.get_rank()] = own
        return parts

    def loss(model, x, gather=all_gather):
        is_sharded = isinstance(model, fsdp.FSDPModule)
        parts = gather(model(x)) if is_sharded else [model(inputs(rank)) for rank in (0, 1)]
        features = F.normalize(torch.cat(parts), dim=-1)
        return F.cross_entropy(features @ features.T, torch.arange(8).flip(0))

    model, plain = sharded(Net()), Net()
    with pytest.warns(FutureWarning, match="all_gather is deprecated"):
        assert_exact(sharded(Net()), plain, loss)
    backward(model, partial(loss, gather=without_gradients))
    assert distance([2 * g for g in gradients(model)], gradients(plain)) < 1e-6


@row("`param_dtype=torch.float16` without a scaled loss")
def case_float16():
    def net():
        return sharded(Net(), mp_policy=fsdp.mixed_precision(torch.float16))

    model, plain = net(), Net()
    backward(model, lambda model, x: 1e-9 * square(model, x))
    assert not any(whole(g).any() for g in gradients(model))

    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for overflows in (True, False):
        backward(model, lambda model, x: scaler.scale(square(model, x)))
        if overflows and dist.get_rank() == 1:
            model.head.weight.grad.to_local()[0, 0] = torch.inf
        scaler.unscale_(optimizer)
        norm = fsdp.clip_grad_norm(model, 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert scaler.get_scale() == 512 and norm.isfinite() != overflows
        assert not overflows or distance(model.parameters(), plain.parameters()) == 0
    backward(plain)
    nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert distance(model.parameters(), plain.parameters()) < 1e-3


@row("`torch.autograd.grad` of a weight")
def case_gradient_of_a_weight():
    def balanced(name, model, x):
        y = model(x)
        weight = model.get_parameter(name)
        first, second = y.square().sum(), y.tanh().sum()
        norms = [torch.autograd.grad(loss, weight, retain_graph=True)[0].norm()
                 for loss in (first, second)]
        return first + norms[0] / norms[1] * second

    with says("appears to not have been used in the graph"):
        backward(sharded(Net()), partial(balanced, "blocks.2.weight"))
    for name, reshards in (("head.weight", True), ("blocks.2.weight", False)):
        model = sharded(Net(), reshard_after_forward=reshards)
        assert_exact(model, Net(), partial(balanced, name))


@row("in bf16 or fp16 with `set_grad_sync(..., every=False)`, a parameter")
def case_unused_at_first():
    def step(model, skips, **options):
        for i, skipped in enumerate(skips):
            model.skipped = skipped
            fsdp.set_grad_sync(model, is_last_micro_batch=i == 1, **options)
            backward(model)
        return gradients(model)

    for skips in ((1, None), (None, 1)):
        expected = step(Skips(), skips)
        for every in (True, False):
            model = sharded(Skips(), [], mp_policy=IN_BF16)
            try:
                assert distance(step(model, skips, every=every), expected) < 0.03
            except AssertionError as e:
                assert "expects uniform gradient dtype" in str(e)
                assert skips[0] == 1 and not every and torch.__version__ < (2, 15)


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
    backward(wrapped)
    assert model.blocks[0].weight.grad is None  # not reduced yet
    fsdp.set_grad_sync(wrapped, True, every=False)
    backward(wrapped)
    plain = Net()
    backward(plain, lambda model, x: 2 * square(model, x))
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
    part = torch.optim.SGD([{"params": model.head.parameters()}], lr=0.1)
    sharded(model)
    part.add_param_group({"params": model.blocks.parameters()})
    for optimizer in (early, part):
        with says("right after `shard`. Or they are of another module"):
            checks.after_building(model, optimizer)
    checks.after_building(model, torch.optim.SGD(model.parameters(), lr=0.1))


@row("a loss or another module with parameters of its own")
def case_loss_with_parameters():
    def net():
        loss = nn.Linear(8, 3, bias=False)
        with torch.no_grad():
            loss.weight.fill_(0.5)
        return Net(), loss

    def train(model, loss, *others):
        parameters = [p for module in (model, loss) for p in module.parameters()]
        optimizer = torch.optim.SGD(parameters, lr=0.1, foreach=False)
        checks.after_building(model, optimizer, *others)
        backward(model, lambda model, x: square(lambda x: loss(model(x)), x))
        optimizer.step()
        reshard(model)
        if others:
            reshard(loss)
        return parameters

    model, loss = net()
    with says("trains 1 parameters that are not the model's, with shapes [(3, 8)]"):
        train(sharded(model), loss)
    model, loss = net()
    expected = train(model, loss, loss)
    for is_alone in (True, False):
        model, loss = net()
        if is_alone:
            found = train(sharded(model), sharded(loss, []), loss)
        else:
            model.head = nn.Sequential(model.head, loss)
            found = train(sharded(model), nn.Identity())
        assert distance(found, expected) < 1e-6


@row("`torch.manual_seed(seed + rank)` before a model with values")
def case_seed_by_rank():
    def net(seed):
        model = Net()
        torch.manual_seed(seed)
        nn.init.normal_(model.head.weight)
        model.register_buffer("table", torch.randn(3, dtype=torch.complex64))
        return model

    rank = dist.get_rank()
    with says("head.weight differs between ranks (the sums of its values are ["):
        checks.before_sharding(net(rank))
    model = net(0)
    model.table += rank
    with says("table differs between ranks"):
        checks.before_sharding(model)
    model = net(0)
    model.table[0] = torch.nan
    checks.before_sharding(model)
    if rank == 1:  # only rank 0 has values
        model.to("meta")
        model.table = net(0).table
    with says("blocks.0.weight differs between ranks"):
        checks.before_sharding(model)


@row("one seed on all ranks after building too")
def case_one_seed():
    drawn = []
    for seed in (0, dist.get_rank()):
        torch.manual_seed(seed)
        of_ranks = [None, None]
        dist.all_gather_object(of_ranks, F.dropout(torch.ones(20)).tolist())
        drawn.append(of_ranks)
    (one, same), (first, second) = drawn
    assert one == same and first != second


@row("a list of weights that `__init__` makes")
def case_list_of_weights():
    class Lists(Net):
        def __init__(self, is_early):
            super().__init__(lambda: nn.Linear(8, 8, bias=False))
            self.is_early = is_early
            self.ws = [block.weight for block in self.blocks]

        def forward(self, x):
            ws = self.ws if self.is_early else [block.weight for block in self.blocks]
            return self.head(sum(x @ w.T for w in ws))

    model = sharded(Lists(True))
    backward(model)
    assert model.ws[0].shape == (8, 8) and model.ws[0].grad is not None
    assert model.blocks[0].weight.grad is None
    assert_exact(sharded(Lists(False), []), Lists(False))


@row("an optimizer made after a forward")
def case_late_optimizer():
    def is_moved(model, optimizer):
        before = [*map(whole, model.parameters())]
        backward(model)
        optimizer.step()
        return [distance([p], [q]) > 0 for p, q in zip(model.parameters(), before)]

    model = sharded(Net())
    backward(model)
    model(inputs(0))
    late = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"trains 2 parameters .* or after a forward"):
        checks.after_building(model, late)
    reshard(model)
    in_time = torch.optim.SGD(model.parameters(), lr=0.1)
    checks.after_building(model, in_time)
    assert is_moved(model, late) == 6 * [True] + 2 * [False]  # the head is the root's
    assert all(is_moved(model, in_time))


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
    def train(model, steps, clears=False):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for skipped in steps:
            model.skipped = skipped
            backward(model)
            if clears and skipped is not None:
                for p in model.blocks[skipped].parameters():
                    p.grad = None
            optimizer.step()
            optimizer.zero_grad()
        return model.parameters()

    expected = [*train(Skips(), (None, 1, 0, 1))]
    assert distance(train(sharded(Skips()), (None, 1, 0, 1)), expected) > 0.01
    assert distance(train(sharded(Skips()), (None, 1, 0, 1), clears=True), expected) < 1e-6
    model = Skips()
    model.blocks[1].requires_grad_(False)
    assert distance(train(sharded(model, []), (1, 1)), train(Skips(), (1, 1))) < 1e-6


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
    model = sharded(Net()).to(torch.float16)
    with says("blocks.0.weight trains in torch.float16"):
        checks.after_building(model, torch.optim.SGD(model.parameters()))


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


@row("ActNorm")
def case_act_norm():
    class ActNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.mean = nn.Parameter(torch.zeros(8))
            self.register_buffer("is_set", torch.tensor(False))

        def forward(self, x):
            if not self.is_set:
                with torch.no_grad():
                    self.mean.copy_(x.mean(0) + 3)
                self.is_set.fill_(True)
            return x - self.mean

    model = sharded(Net(ActNorm))
    backward(model)
    reshard(model)
    assert model.blocks[0].is_set and not whole(model.blocks[0].mean).any()
    model = Net(ActNorm)
    model(inputs(0))
    checks.before_sharding(model)
    plain = copy.deepcopy(model)
    assert whole(sharded(model).blocks[0].mean).min() > 1
    assert_exact(model, plain)


@row("a mask of `torch.finfo(torch.float32).min`")
def case_mask():
    def attend(linear, x, hidden):
        scores = linear(x) @ x.T
        if hidden.dtype == torch.bool:
            scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
            hidden = 0
        return torch.softmax(scores + hidden, dim=-1) @ x

    def out(hidden):
        class Masked(Net):
            def forward(self, x):
                return self.blocks[0](x, hidden)

        return sharded(Masked(lambda: Does(attend)), mp_policy=IN_BF16)(inputs(0))

    hidden = torch.zeros(4, 4, dtype=torch.bool)
    hidden[0] = True
    assert out(hidden * torch.finfo(torch.float32).min).isnan().any()
    assert out(hidden).isfinite().all()


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64))

    def forward(self, x):
        return (x.to(torch.complex64) @ self.weight * (1 + 1j)).real.type_as(x)


@row("complex parameters, with `mixed_precision`")
def case_complex():
    policy = fsdp.mixed_precision(torch.bfloat16, reduce_dtype=None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model = sharded(Net(Complex), mp_policy=IN_BF16)
            backward(model)
            assert not whole(model.blocks[0].weight.grad).imag.any()
        except TypeError as e:  # torch 2.13
            assert "input types can't be cast" in str(e)
        dist.barrier()
        assert_exact(sharded(Net(Complex)), Net(Complex))
        assert_exact(sharded(Net(Complex), mp_policy=policy), Net(Complex), limit=0.03)


@row("trained parameters of two types in one unit")
def case_two_types():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.inner = Complex()

        def forward(self, x):
            return self.linear(x) + self.inner(x)

    with says("expects uniform original parameter dtype", AssertionError):
        backward(sharded(Net(Mixed)))
    model = Net(Mixed)
    units = [m for block in model.blocks for m in (block.inner, block)]
    assert_exact(sharded(model, units), Net(Mixed))


@row("a parameter without rows")
def case_no_rows():
    def net(rows):
        model = Net()
        model.blocks[0].extra = nn.Parameter(torch.zeros(rows, 8))
        return model

    with says("_chunk_cat expects non-empty tensor"):
        backward(sharded(net(0)))
    backward(sharded(net(1)))


@row("`nn.Embedding(sparse=True)`")
def case_sparse():
    class Sparse(Net):
        def __init__(self, sparse):
            super().__init__()
            self.emb = nn.Embedding(20, 8, sparse=sparse)

        def forward(self, x):
            return super().forward(self.emb((x[:, 0].abs() * 10).long() % 20))

    with pytest.raises((NotImplementedError, RuntimeError)) as error:
        backward(sharded(Sparse(True)))
    said = str(error.value)
    assert "Could not run 'fsdp::chunk_cat'" in said or "reshape is not implemented" in said
    assert_exact(sharded(Sparse(False)), Sparse(False))


@row("`torch.func.functional_call(model, values, ...)`")
def case_functional_call():
    model, given = sharded(Net()), {n: p.detach() + 1 for n, p in Net().named_parameters()}
    expected = torch.func.functional_call(Net(), given, (inputs(0),))
    with says("'Tensor' object has no attribute '_local_tensor'", AttributeError):
        torch.func.functional_call(model, given, (inputs(0),))
    model = sharded(Net())
    for name, p in model.named_parameters():
        fsdp.write_full(p, given[name])
    assert distance([model(inputs(0))], [expected]) < 1e-6


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


@row("`nn.LazyLinear`")
def case_lazy():
    def net():
        model = Net()
        model.head = nn.LazyLinear(8)
        return model

    with says("head.weight has no values before a first forward"):
        checks.before_sharding(net())
    with says("Can't access the shape of an uninitialized parameter"):
        sharded(net())
    model = net()
    model(inputs(0))
    checks.before_sharding(model)
    plain = copy.deepcopy(model)
    assert_exact(sharded(model), plain)


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
    model = Net(Normed)
    checks.before_sharding(model)
    for kind in (torch.float32, torch.long):
        table = torch.ones(8, dtype=kind, device="meta")
        model.blocks[2].register_buffer("table", table, persistent=False)
        with says("blocks.2.table is on the meta device", ValueError):
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
    exec(shown(1), dict(model=model, dist=dist))
    assert model.blocks[0].norm.num_batches_tracked == 1
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
        backward(plain, lambda model, x: 3 * square(model, x))
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


# ---------- saving and loading -----------------------------------------------


@row("what differs by rank, such as a generator's state")
def case_differs_by_rank():
    rank = dist.get_rank()
    state = torch.Generator().manual_seed(rank).get_state()
    with tempfile.TemporaryDirectory() as own:
        paths = [own]
        dist.broadcast_object_list(paths)
        for key, is_right in (("rng", rank == 0), (f"rng{rank}", True)):
            dcp.save({"run": {key: state}}, checkpoint_id=f"{paths[0]}/{len(key)}")
            loaded = {"run": {key: torch.zeros_like(state)}}
            dcp.load(loaded, checkpoint_id=f"{paths[0]}/{len(key)}")
            assert torch.equal(loaded["run"][key], state) == is_right
        dist.barrier()


@row("rank 0's `torch.save(model.state_dict())`")
def case_save_on_one_rank():
    model, file = sharded(Net()), io.BytesIO()
    state = {name: fsdp.gather_full(t) for name, t in model.state_dict().items()}
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), file)
        file.seek(0)
        assert torch.load(file)["head.weight"].to_local().shape == (4, 8)
        assert all(map(torch.equal, state.values(), Net().state_dict().values()))


@row("`load_state_dict(full)` after `shard`")
def case_load_whole():
    full = {name: t + 1 for name, t in Net().state_dict().items()}
    model = sharded(Net())
    with says("got mixed torch.Tensor and DTensor"):
        model.load_state_dict(full)
    with says("'Parameter' object has no attribute '_local_tensor'", AttributeError):
        model.load_state_dict(full, assign=True)
    model, plain = sharded(Net()), Net()
    plain.load_state_dict(full)
    for name, t in model.state_dict().items():
        fsdp.write_full(t, full[name])
    assert_exact(model, plain)


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


def section():
    with open(os.path.join(HERE, "docs", "your_model.md")) as f:
        return re.search(r"\n## What goes wrong, and what to do\n(.*)", f.read(), re.S)[1]


def shown(i):
    """The code block with this number below the tables."""
    return re.findall(r"```python\n(.*?)```", section(), re.S)[i]


def test_asked_rows_are_cases():
    beginnings = []
    for table in section().split("| when |")[1:]:
        rows = [line[2:-2].split(" | ") for line in table.splitlines() if line.startswith("| ")]
        moments = [cells[0] for cells in rows]
        order = ["build", "forward", "backward", "step", "save"]
        assert moments == sorted(moments, key=order.index)
        for cells in rows:
            assert len(cells) == 4 and all(len(cell.split()) <= 30 for cell in cells), cells
        beginnings += [cells[1] for cells in rows]
    for beginning in beginnings:
        assert any(map(beginning.startswith, ROWS)), f"no case for: {beginning}"
    for name in ROWS:
        assert any(line.startswith(name) for line in beginnings), f"no row for: {name}"

"""
checks.py: each mistake is refused on all ranks, and what is right is not. So are the three that
clip_grad_norm refuses.

    python -m pytest -q tests/test_checks.py

after_first_step is in test_optimizer.py.
"""

import copy
from dataclasses import dataclass

import torch
import torch.distributed as dist
from nets import (
    FILLS_IN,
    Block,
    Net,
    Normed,
    Skips,
    assert_exact,
    backward,
    cases,
    distance,
    gradients,
    inputs,
    reshard,
    says,
    sharded,
    square,
)
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import activations
import checks
import fsdp

# ---------- check_units ---------------------------------------------------------


def case_units_that_are_alike():
    """It says nothing of units in units, recomputed, prefetched, in host memory; two forwards
    before a backward; generation until all ranks have enough."""
    model = Net(Block)
    activations.checkpoint_activations(model.blocks, "full")
    units = [m for block in model.blocks for m in (block.inner, block)]
    sharded(model, units, cpu_offload=0.5, prefetch_units=1)
    with checks.check_units(model):
        for _ in range(2):
            loss = square(model, inputs(dist.get_rank()))
            if FILLS_IN:  # torch 2.9 cannot: "got mixed torch.Tensor and DTensor"
                loss = loss + square(model, inputs(dist.get_rank()))
            loss.backward()
        with fsdp.inference(model):
            model(inputs(dist.get_rank()))


def case_different_units():
    rank = dist.get_rank()
    for skipped, said in (
            (rank, "['forward of blocks.1', 'forward of blocks.0']"),
            ([None, 2][rank], "['forward of blocks.2', 'end of forward of the root'")):
        model = sharded(Skips())
        with says(said), checks.check_units(model):
            backward(model)  # the same on both ranks: nothing is said
            model.skipped = skipped
            model(inputs(rank))


def case_one_forward_more():
    model = sharded(Net())
    with says("'the end of check_units'"), checks.check_units(model):
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
            with says(said), checks.check_units(model):
                backward(model)
    # The two remedies.
    plain = Heads()
    backward(plain)
    for in_root in (True, False) if FILLS_IN else (False,):
        model = Heads()
        model.is_touched = not in_root
        units = model.blocks if in_root else [*model.blocks, *model.heads]
        sharded(model, units, reshard_after_forward=False)
        with checks.check_units(model):
            backward(model)
        assert distance(gradients(model.heads), gradients(plain.heads)) < 1e-6


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
    with checks.check_units(sharded(model)):
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
                with says("unit changed a list"), checks.check_units(model):
                    model(inputs(0))


def case_a_unit_that_changes_a_copy_on_one_rank():
    def append_on_one(seen):
        if dist.get_rank() == 1:
            seen.append(ONE)

    model = with_a_policy(append_on_one, [])
    with says("unit changed a list"), checks.check_units(model):
        model(inputs(0))  # both ranks say it


def case_containers_that_may_be_changed():
    """Without a policy FSDP2 makes no copy; and units may return what their caller stores."""
    model = Gives(*CHANGES[0])
    with checks.check_units(sharded(model, [model.unit])):
        assert model(inputs(0))[1] == [ONE]

    class Keeps(Net):
        def forward(self, x):
            skips = []
            for block in self.blocks:
                x, skip = block(x)
                skips.append(skip)
            return self.head(x * sum(skips))

    policy = fsdp.mixed_precision(torch.float32)
    model = sharded(Keeps(lambda: Two(8, 8)), mp_policy=policy)
    with checks.check_units(model):
        assert_exact(model, Keeps(lambda: Two(8, 8)))


# ---------- before_sharding -----------------------------------------------------


def case_a_model_on_the_meta_device():
    """Its parameters get their values later; but nobody knows those of a buffer."""
    checks.before_sharding(Net().to("meta"))
    with says("blocks.0.norm.running_mean is on the meta device"):
        checks.before_sharding(Net(Normed).to("meta"))
    model = Net()
    if dist.get_rank() == 1:
        model.blocks[1].to("meta")
    with says("blocks.1.weight differs between ranks"):  # both ranks say it
        checks.before_sharding(model)


def case_ranks_with_other_values():
    def net(seed):
        model = Net()
        torch.manual_seed(seed)
        nn.init.normal_(model.head.weight)
        model.register_buffer("table", torch.randn(3))
        return model

    rank = dist.get_rank()
    with says("head.weight differs between ranks"):
        checks.before_sharding(net(rank))
    model = net(0)
    model.table += rank
    with says("table differs between ranks"):
        checks.before_sharding(model)
    model.table = torch.arange(3.0) if rank else torch.arange(3.0).flip(0)  # sums alike
    with says("table differs between ranks"):
        checks.before_sharding(model)
    model = net(0)
    model.table[0] = torch.nan
    wider, frozen = Net(), Net()
    wider.more = nn.Linear(8, 2 + rank, device="meta")
    frozen.blocks[rank].requires_grad_(False)
    for other, name in ((wider, "more.weight"), (frozen, "blocks.0.weight")):
        with says(f"ranks 0, 1, ... have (('{name}', "):
            checks.before_sharding(other)
    if rank == 0:
        model.register_buffer("last", torch.ones(2))
    with says("(('last', 2, torch.float32, False), 'nothing'): build"):
        checks.before_sharding(model)
    model.last = None
    model.register_buffer("no_rows", torch.zeros(0, 3))
    model.register_buffer("count", torch.tensor(3))
    checks.before_sharding(model)


def case_trained_in_16_bits():
    model = Net()
    model.blocks[1].to(torch.bfloat16)
    with says("blocks.1.weight trains in torch.bfloat16"):
        checks.before_sharding(model)
    for right in (model.float(), Net().double()):
        checks.before_sharding(right)
    frozen = Net().to(torch.bfloat16).requires_grad_(False)
    checks.before_sharding(frozen)
    # An adapter in fp32 beside bf16 that is frozen.
    block = frozen.blocks[1]
    block.lora = nn.Parameter(torch.ones(8))
    block.forward = lambda x: F.linear(x, block.weight, block.bias) * block.lora
    backward(sharded(frozen, mp_policy=fsdp.mixed_precision(torch.bfloat16)))
    assert block.lora.grad.dtype == torch.float32
    assert block.weight.to_local().dtype == torch.bfloat16
    model = sharded(Net()).to(torch.float16)
    with says("blocks.0.weight trains in torch.float16"):
        checks.after_building(model, torch.optim.SGD(model.parameters()))


# ---------- after_building ------------------------------------------------------


def case_early_optimizer():
    model = Net()
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    part = torch.optim.SGD([{"params": model.head.parameters()}], lr=0.1)
    sharded(model)
    part.add_param_group({"params": model.blocks.parameters()})
    for optimizer in (early, part):
        with says("right after `shard`"):
            checks.after_building(model, optimizer)
    checks.after_building(model, torch.optim.SGD(model.parameters(), lr=0.1))


def case_late_optimizer():
    model = sharded(Net())
    model(inputs(0))
    late = torch.optim.SGD(model.parameters(), lr=0.1)
    with says("trains a parameter of shape (8, 8) that is not the model's"):
        checks.after_building(model, late)
    reshard(model)
    checks.after_building(model, torch.optim.SGD(model.parameters(), lr=0.1))
    # Here the forward leaves nothing that is sharded.
    for options in (dict(reshard_after_forward=False), dict(units=[])):
        model = sharded(Net(), **options)
        with torch.no_grad():
            model(inputs(0))
        with says("is not sharded"):
            checks.after_building(model, torch.optim.SGD(model.parameters(), lr=0.1))


def case_a_loss_with_parameters():
    """Of another module than the model."""
    model, loss = Net(), nn.Linear(8, 3, bias=False)
    parameters = [p for module in (sharded(model), loss) for p in module.parameters()]
    with says("trains a parameter of shape (3, 8) that is not the model's"):
        checks.after_building(model, torch.optim.SGD(parameters, lr=0.1))


def case_ignored_params():
    """after_building and clip_grad_norm name them among the causes."""
    model = Net()
    fully_shard(model, mesh=fsdp.make_mesh("cpu"), ignored_params={model.head.bias})
    with says("is not sharded. For example it is among ignored_params"):
        checks.after_building(model, torch.optim.SGD(model.parameters()))
    backward(model)
    with says("or is among ignored_params"):
        fsdp.clip_grad_norm(model, 1.0)


# ---------- what clip_grad_norm refuses -----------------------------------------


def case_never_the_last_micro_batch():
    for keeps in (False, True):
        model = sharded(Net(), reshard_after_forward=not keeps)
        for is_last in (False, False, True):
            fsdp.set_grad_sync(model, is_last, keep_gathered=keeps)
            backward(model)
            if not is_last:
                with says("set_grad_sync was not told of the last micro-batch"):
                    fsdp.clip_grad_norm(model, 1.0)
        plain = Net()
        backward(plain, lambda model, x: 3 * square(model, x))
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        assert abs(fsdp.clip_grad_norm(model, 1.0) - expected) < 1e-5 * expected


def case_a_root_that_is_not_sharded_now():
    """An evaluation between backward and step; a parameter that is added after `shard`."""
    evaluated, added = sharded(Net()), sharded(Net())
    added.head = nn.Linear(8, 4)
    for model in (evaluated, added):
        backward(model)
    with torch.no_grad():
        evaluated(inputs(0))
    for model in (evaluated, added):
        with says("head.weight is not sharded, so its gradient is out of sight"):
            fsdp.clip_grad_norm(model, 1.0)


cases(globals())

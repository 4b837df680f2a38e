"""
checks.py: each mistake is refused on all ranks, and what is right is not. So are the three that
clip_grad_norm refuses, and what compare.check_units finds.

    python -m pytest -q tests/test_checks.py

after_first_step is in test_optimizer.py.
"""

import nets
import torch
import torch.distributed as dist
from nets import Net, backward, cases, inputs, reshard, says, sharded, square
from torch import nn
from torch.nn import functional as F

import activations
import checks
import fsdp
from compare import check_units

# ---------- before_sharding -----------------------------------------------------


def case_a_model_on_the_meta_device():
    """Its parameters get their values later."""
    checks.before_sharding(Net().to("meta"))
    model = Net()
    if dist.get_rank() == 1:
        model.blocks[1].to("meta")
    # Both ranks say it.
    with says("blocks.1.weight (8, 8), torch.float32, requires_grad=True differs between ranks"):
        checks.before_sharding(model)


def case_ranks_with_other_values():
    def net(seed):
        model = Net()
        torch.manual_seed(seed)
        nn.init.normal_(model.head.weight)
        model.register_buffer("table", torch.randn(3))
        return model

    rank = dist.get_rank()
    with says("head.weight (8, 8), torch.float32, requires_grad=True differs between ranks"):
        checks.before_sharding(net(rank))
    model = net(0)
    model.table = torch.arange(3.0) if rank else torch.arange(3.0).flip(0)  # sums alike
    with says("table (3,), torch.float32, requires_grad=False differs between ranks"):
        checks.before_sharding(model)
    model = net(0)
    model.table[0] = torch.nan
    wider, frozen = Net(), Net()
    wider.more = nn.Linear(8, 2 + rank, device="meta")
    frozen.blocks[rank].requires_grad_(False)
    for other, name in ((wider, "more.weight"), (frozen, "blocks.0.weight")):
        with says(f"ranks differ: rank 0 has {name} "):
            checks.before_sharding(other)
    if rank == 0:
        model.register_buffer("last", torch.ones(2))
    with says("last (2,), torch.float32, requires_grad=False, where rank 1 has nothing: build"):
        checks.before_sharding(model)
    model.last = None
    model.register_buffer("no_rows", torch.zeros(0, 3))
    model.register_buffer("count", torch.tensor(3))
    checks.before_sharding(model)


# ---------- after_building ------------------------------------------------------


def case_trained_in_16_bits():
    model = Net()
    model.blocks[1].to(torch.bfloat16)
    with says("blocks.1.weight trains in torch.bfloat16"):
        checks.after_building(model, torch.optim.SGD(model.parameters()))
    frozen = Net().to(torch.bfloat16).requires_grad_(False)
    for right in (model.float(), Net().double(), frozen):
        checks.after_building(right, torch.optim.SGD(right.parameters()))
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


# ---------- compare.check_units -------------------------------------------------


def case_units_that_are_alike():
    """It says nothing of units in units, recomputed, prefetched, in host memory; two forwards
    before a backward; generation until all ranks have enough."""
    model = Net(nets.Block)
    activations.checkpoint_activations(model.blocks, "full")
    units = [m for block in model.blocks for m in (block.inner, block)]
    sharded(model, units, cpu_offload=0.5, prefetch_units=1)
    with check_units(model):
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
        with says(said), check_units(model):
            backward(model)  # the same on both ranks: nothing is said
            model.skipped = skipped
            model(inputs(rank))


def case_one_forward_more():
    model = sharded(Net())
    with says("'the end of check_units'"), check_units(model), torch.no_grad():
        for _ in range(1 + dist.get_rank()):
            model(inputs(0))


class Heads(Net):
    """Rank 0's loss is that of one head, rank 1's that of the other."""

    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x):
        return [head(x) for head in self.heads][int(torch.equal(x, inputs(1)))]


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
            units = getattr(model, "heads", model.blocks)
            sharded(model, units, reshard_after_forward=not keeps)
            with says(said), check_units(model):
                backward(model)


class Fills(nn.Linear):
    """A unit that fills the lists in the list that it is given."""

    def forward(self, x, given):
        for found in given:
            found.append(x)
        return super().forward(x)


def case_a_unit_that_changes_what_it_is_given():
    model = sharded(Fills(8, 8), [], mp_policy=fsdp.mixed_precision(torch.float32))
    given = [[]]
    model(inputs(0), given)
    assert given == [[]]  # nothing is said, and the change is lost
    with says("the root changed a list"), check_units(model):
        model(inputs(0), given=[[]] * dist.get_rank())  # on rank 1 alone, and both say it
    with check_units(model):
        model(inputs(0), []).sum().backward()


cases(globals())

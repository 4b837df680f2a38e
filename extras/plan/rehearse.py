"""
A training step that needs no GPU: `parallelize` and `train_step` run as rank 0 of any number
of ranks, on fake tensors, which have shapes and no memory. A ledger notes the size and kind of
each storage, and each collective.

    timeline, marks, events = rehearse(cfg, world)

This works for any model file and any key. All private parts of PyTorch that it needs are here.
"""

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from unittest.mock import patch
from weakref import WeakKeyDictionary, finalize

import numpy as np
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode
from torch.distributed._tools import fake_collectives  # noqa: F401  which torch 2.9 else lacks
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

import fsdp
import train
from optimizer import LossScaler, allocate_state

# The kinds of memory. A storage that was labelled twice is of the first of its kinds here: the
# shard that FSDP gathers from is also an argument of the gather, and stays a parameter.
KINDS = ("host", "parameters", "optimizer", "gradients", "gathered", "activations")
UPDATE = ("clip", "optimizer")  # the places of a step that are its update


@dataclass
class Event:
    """One thing that happens between ranks or to a unit. size: bytes of a collective's whole
    buffer. ranks: in its group."""
    what: str  # all_gather, reduce_scatter, all_reduce, all_to_all, free or step
    unit: str  # root, block 3, block 3.mlp; empty for clipping and the optimizer
    where: str  # the last mark
    row: int  # of the timeline, just after it
    micro_batch: int  # from 1
    size: int = 0
    ranks: int = 1
    stride: int = 1  # from one of these ranks to the next
    times: int = 1  # in the step: a rehearsed micro-batch may stand for several

    def part(self):
        """The part of the step: a micro-batch's number, or one more for the update."""
        return self.micro_batch + (self.where in UPDATE)

    def sent(self):
        """Bytes that a rank sends round a ring: the buffer without a rank's share, and twice as
        much in an all-reduce, which reduces and then gathers."""
        rounds = 2 if self.what == "all_reduce" else 1
        return rounds * self.size * (self.ranks - 1) / self.ranks

    def continues(self, before):
        """True if a unit is freed, or in our DDP reduced, tensor by tensor."""
        same = replace(before, row=self.row, size=self.size) == self
        return same and self.what in ("free", "all_reduce")


def rehearse(cfg, world, flash=True):
    """A training step of rank 0:

    timeline  bytes of each of KINDS after every change: (changes, kinds)
    marks     [(row of the timeline, where)]: from there on the step is at this place
    events    [Event]: collectives, frees and the update, in order

    flash: False for a GPU without a fused attention, which keeps T x T probabilities.
    """
    # Three micro-batches take the memory and the traffic of any number: the first gathers the
    # root, the last reduces, and the second stands for all others.
    micro_batches = cfg.gradient_accumulation_steps // world.size
    rehearsed = min(micro_batches, 3 if cfg.strategy != "single" else 2)
    cfg = replace(cfg, gradient_accumulation_steps=rehearsed * world.size)

    with parallelized(cfg, world, flash) as (wrapped, model, world, fake, ledger):
        with fake, ledger:
            timeline, marks = step(wrapped, model, cfg, world, ledger)

    for event in ledger.events:
        if event.micro_batch == rehearsed - 1:  # it stands for those left out, too
            event.times += micro_batches - rehearsed
    return timeline, marks, ledger.events


def wrapped_text(cfg, world):
    """The model as PyTorch prints it once it is wrapped: the class of a unit begins with FSDP."""
    with parallelized(cfg, world) as (wrapped, *_):
        return str(wrapped)


@contextmanager
def parallelized(cfg, world, flash=True):
    """What rank 0 has before its first step: (the module to call, the model in it, its World, the
    mode of its fake tensors, their ledger)."""
    on_gpu = world.device.type == "cuda"
    ledger = Ledger(on_gpu)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    dist.init_process_group("fake", rank=0, world_size=world.size, store=FakeStore())
    try:
        with stand_ins(fake, ledger, on_gpu, flash):
            world = replace(world, device=torch.device("cpu"))  # no CUDA streams here
            model = train.meta_model(cfg)
            ledger.unit_names = name_units(model)
            wrapped = train.parallelize(model, cfg, world)
            yield wrapped, model, world, fake, ledger
    finally:
        dist.destroy_process_group()


def step(wrapped, model, cfg, world, ledger):
    """Run train_step, and tell the ledger the kinds of tensors and where the step is.
    Returns (timeline, marks)."""
    optimizer = train.make_optimizer(model, cfg)
    allocate_state(optimizer)
    on_host = {p for p in model.parameters() if ledger.kind(p) == "host"}
    for p in model.parameters():
        state = optimizer.state.get(p)  # None if it is frozen
        if p in on_host:
            ledger.label("host", state, pinned=False)  # no GPU copies it
        else:
            ledger.label("optimizer", state)
    if cfg.cuda_graph:  # a recorded step keeps its gradients
        for p in model.parameters():
            p.grad = torch.zeros_like(p) if p.requires_grad else None

    def label_gradients(*args):
        for p in model.parameters():
            ledger.label("host" if p in on_host else "gradients", p.grad)

    label_gradients()  # DDP's are there before the first backward
    optimizer.register_step_pre_hook(label_gradients)
    place_marks(model, optimizer, ledger)

    x = torch.empty(cfg.batch_size, cfg.sizes.block_size, dtype=torch.int64)
    batches = SimpleNamespace(
        get=lambda step, micro: (x, x, 1.0),
        prefetch_next=lambda step, micro: None,
    )
    scaler = LossScaler(replace(cfg, dtype="float32"))  # the norm has no value to look at
    train.train_step(
        model, wrapped, optimizer, scaler, batches, 0, cfg, world, train.forward_backward)
    return ledger.timeline()  # now: afterwards the optimizer's memory is freed


def place_marks(model, optimizer, ledger):
    """Hooks by which the ledger knows where the step is."""

    def mark(where):
        return lambda *args: ledger.mark(where)

    def mark_backward(i):
        def after_forward(block, args, out):
            x, *_ = tree_leaves(out)  # one tensor or several
            if x.requires_grad:
                x.register_hook(mark(f"backward, block {i}"))
        return after_forward

    # Prepended: FSDP's own hooks gather the root, which belongs to the forward, and a block
    # before its forward and its backward.
    model.register_forward_pre_hook(mark("forward"), prepend=True)
    for i, block in enumerate(model.blocks):
        block.register_forward_pre_hook(mark(f"forward, block {i}"), prepend=True)
        block.register_forward_hook(mark_backward(i), prepend=True)
    model.blocks[-1].register_forward_hook(mark("forward, head"))
    model.register_forward_hook(mark("backward, head"))
    optimizer.register_step_pre_hook(mark("optimizer"))
    optimizer.register_step_post_hook(lambda *args: ledger.event("step"))


def name_units(model):
    """{module: its name as a unit}."""
    names = {module: name for name, module in model.named_modules()}
    units = {module: name for module, name in names.items()}
    for i, block in enumerate(model.blocks):
        for module in block.modules():
            inside = names[module].removeprefix(names[block])
            units[module] = f"block {i}{inside}"
    units[model] = "root"
    return units


# ---------- the ledger --------------------------------------------------------


# Operations of FSDP whose tensors are all of one kind.
TELLING = {
    "fsdp.all_gather_copy_in": "gathered",
    "fsdp.chunk_cat": "gradients",
    "fsdp.chunk_cat_mixed_dtype": "gradients",  # its name from torch 2.15 on
    "c10d._reduce_scatter_base_": "gradients",
}
# The methods in which FSDP2 works for a unit.
FSDP2_WORKS = (
    "pre_forward", "unshard", "wait_for_unshard", "post_forward", "reshard", "pre_backward",
    "post_backward", "finalize_backward",
)
# (kind, which argument is the whole buffer, which is the group)
COLLECTIVES = {
    "c10d._allgather_base_": ("all_gather", 0, 2),
    "c10d._reduce_scatter_base_": ("reduce_scatter", 1, 2),
    "c10d.allreduce_": ("all_reduce", 0, 1),
    "c10d.alltoall_base_": ("all_to_all", 1, 2),
}


@dataclass(eq=False)
class Entry:
    """The ledger's entry for a storage."""
    size: int = 0  # bytes, now
    kind: str = "activations"
    pinned: bool = True  # in host memory: True if a GPU's copies begin or end there


class Ledger(TorchDispatchMode):
    """The bytes of each storage over time, and the events meanwhile. A storage's kind may turn
    out later: a gradient is an activation until FSDP reduces it."""

    def __init__(self, pins_host_memory):
        super().__init__()
        self.pins_host_memory = pins_host_memory
        self.entries = WeakKeyDictionary()  # of the storages that are alive
        self.changes = []  # [(entry, bytes more or less)]
        self.marks = []  # [(number of changes before it, where)]
        self.events = []
        self.micro_batch = 0
        self.unit = ""  # the one that FSDP or DDP is busy with
        self.unit_names = {}  # {module: name}

    def mark(self, where):
        self.marks.append((len(self.changes), where))
        if where == "forward":
            self.micro_batch += 1

    def row(self):
        """The timeline's row: the number of changes since the step began."""
        start, _ = self.marks[0]
        return len(self.changes) - start

    @contextmanager
    def busy_with(self, module):
        before = self.unit
        self.unit = self.unit_names[module]
        yield
        self.unit = before

    def event(self, what, **collective):
        """Note that something happens to the unit."""
        if not self.micro_batch:
            return  # before the step
        _, where = self.marks[-1]
        new = Event(what, self.unit, where, self.row(), self.micro_batch, **collective)
        if self.events and new.continues(self.events[-1]):
            self.events[-1].row = new.row
            self.events[-1].size += new.size
        else:
            self.events.append(new)

    def label(self, kind, tensors, pinned=True):
        """Note the kind of the tensors in a pytree."""
        for t in tree_leaves(tensors):
            if isinstance(t, torch.Tensor):
                self.note(storage_of(t), kind, pinned)

    def kind(self, t):
        return self.note(storage_of(t)).kind

    def note(self, storage, kind="activations", pinned=True):
        """Note a storage's size and kind; returns its entry."""
        entry = self.entries.get(storage)
        if entry is None:
            entry = self.entries[storage] = Entry()
            finalize(storage, lambda: self.changes.append((entry, -entry.size)))
        size = storage.nbytes()
        if size != entry.size:
            self.changes.append((entry, size - entry.size))
            entry.size = size
        entry.kind = min(entry.kind, kind, key=KINDS.index)
        entry.pinned &= pinned
        return entry

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        """Every operation of the step comes here."""
        if DTensor in types:
            return NotImplemented  # the operation comes back with their local tensors
        if op is torch.ops.prim.device.default:
            return args[0].fake_device  # three calls in five; here it costs nothing
        out = op(*args, **(kwargs or {}))
        self.label("activations", out)

        name = str(op).removesuffix(".default")
        if name in TELLING:
            self.label(TELLING[name], (args, kwargs))
        elif name == "aten._to_copy" and self.kind(args[0]) == "parameters":
            self.label("gathered", out)  # parameters in the compute type
        if name in COLLECTIVES:
            kind, buffer, group = COLLECTIVES[name]
            ranks = dist.get_process_group_ranks(dist.ProcessGroup.unbox(args[group]))
            stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
            size = sum(t.nbytes for t in tree_leaves(args[buffer]))
            self.event(kind, size=size, ranks=len(ranks), stride=stride)
        return out

    def timeline(self):
        """(timeline, marks) of the step alone: row 0 is before it, row n after n changes."""
        changes = np.zeros((len(self.changes), len(KINDS)))
        for row, (entry, size) in zip(changes, self.changes):
            if entry.kind == "host" and entry.pinned and self.pins_host_memory:
                size = int(np.sign(size)) * power_of_two(abs(size))
            row[KINDS.index(entry.kind)] = size
        start, _ = self.marks[0]
        marks = [(n - start, where) for n, where in self.marks]
        return changes.cumsum(axis=0)[start - 1:], marks


def power_of_two(size):
    """The bytes that PyTorch pins for `size` of them: the next power of two."""
    return 1 << (size - 1).bit_length()


def storage_of(t):
    """Of the tensor with memory: a DTensor wraps this rank's rows, and torchao wraps float8's."""
    while is_traceable_wrapper_subclass(t):
        inner, _ = t.__tensor_flatten__()
        t = getattr(t, inner[0])
    return t.untyped_storage()


# ---------- stand-ins ---------------------------------------------------------


@contextmanager
def stand_ins(fake, ledger, on_gpu, flash):
    """Replace parts of PyTorch: where fake tensors need it, where memory changes unseen, and
    where a CPU's kernel keeps other tensors for backward than a GPU's."""
    resize = torch.UntypedStorage.resize_
    materialize = fsdp.materialize
    to = torch.Tensor.to

    def listed_resize(storage, size):  # FSDP's way to allocate and free what it gathers
        resize(storage, size)
        ledger.note(storage, "gathered")
        if size == 0:
            ledger.event("free")

    memory = {}  # module: the kind of its parameters

    def listed_fully_shard(module, offload_policy, **options):
        is_offloaded = isinstance(offload_policy, CPUOffloadPolicy)
        for inner in module.modules():  # units inside it have been here before
            memory.setdefault(inner, "host" if is_offloaded else "parameters")
        fully_shard(module, offload_policy=offload_policy, **options)

    def fake_materialize(module, device):
        with fake:  # no sooner: cutting fake tensors into 1,024 shards takes half a minute
            materialize(module, device)
        for inner in module.modules():
            for p in inner.parameters(recurse=False):
                ledger.label(memory.get(inner, "parameters"), p)

    def to_other_memory(t, *args, **kwargs):
        if "non_blocking" not in kwargs:
            return to(t, *args, **kwargs)
        copy = t.clone()  # PyTorch would skip it, since all is on one CPU here
        if ledger.kind(t) != "host":
            ledger.label("host", copy)
        return copy

    def to_cpu(t):
        copy = t.clone()
        ledger.label("host", copy)
        return copy

    def of_unit(method):  # notes the unit that FSDP2 works for
        def call(group, *args, **options):
            with ledger.busy_with(group.modules[0]):
                return method(group, *args, **options)
        return call

    keep_in_group = FSDPParam.to_sharded_post_forward

    def listed_keep_in_group(param):  # where reshard_after_forward is a number of ranks
        keep_in_group(param)
        ledger.label("gathered", param._sharded_post_forward_param_data)

    clip = fsdp.clip_grad_norm

    def marked_clip(*args):
        ledger.mark("clip")
        return clip(*args)

    def update_nothing(*args, **kwargs):
        """AdamW's kernel works in place and allocates nothing. With fake DTensors PyTorch would
        run it on copies of all of them."""

    patches = [
        # Where FSDP2 takes back a gather that nobody has waited for.
        patch.object(torch.accelerator, "current_stream", torch.cpu.current_stream),
        patch.object(torch.UntypedStorage, "resize_", listed_resize),
        patch.object(torch.Tensor, "to", to_other_memory),
        patch.object(torch.Tensor, "cpu", to_cpu),
        patch.object(torch, "_fused_adamw_", update_nothing),
        patch.object(FSDPParam, "to_sharded_post_forward", listed_keep_in_group),
        patch.object(fsdp, "fully_shard", listed_fully_shard),
        patch.object(fsdp, "materialize", fake_materialize),
        patch.object(fsdp, "clip_grad_norm", marked_clip),
        patch.object(fsdp, "DistributedDataParallel", ddp_in(ledger)),
    ]
    for name in FSDP2_WORKS:
        method = of_unit(getattr(FSDPParamGroup, name))
        patches.append(patch.object(FSDPParamGroup, name, method))
    if on_gpu:
        patches += gpu_kernels(flash)
    with ExitStack() as stack:
        for each in patches:
            stack.enter_context(each)
        yield


def gpu_kernels(flash):
    """Patches that keep for backward what a GPU's kernels keep."""
    fused_attention = F.scaled_dot_product_attention
    layer_norm = F.layer_norm

    def is_written_out(*args):  # by itself it is for CPUs only
        return not flash

    # With dropout a CPU's kernel keeps T x T numbers, a GPU's does not.
    def without_dropout(*args, dropout_p=0.0, **kwargs):
        return fused_attention(*args, **kwargs)

    # A GPU's kernel keeps a byte per number, a CPU's as many bytes as x has.
    def dropout(x, p=0.5, training=True, inplace=False):
        return torch.native_dropout(x, p, training)[0] if p and training else x

    # A GPU's kernel keeps x and a number per row, as layer_norm does; a CPU's also keeps two
    # copies of x in fp32. Under autocast a GPU's x is fp32.
    def rms_norm(x, shape, weight=None, eps=None):
        if torch.is_autocast_enabled("cpu"):
            x = x.float()
        return layer_norm(x, shape, weight)

    return [
        patch("model.explicit_is_faster", is_written_out),
        patch.object(F, "scaled_dot_product_attention", without_dropout),
        patch.object(F, "dropout", dropout),
        patch.object(F, "rms_norm", rms_norm),
    ]


def ddp_in(ledger):
    """A class in place of DDP, whose reducer is C++ and needs real memory: it reduces each
    gradient by itself, which holds and sends as many bytes as buckets do."""

    class OneByOne(torch.nn.Module):
        def __init__(self, module, **options):
            super().__init__()
            self.module = module
            self.require_backward_grad_sync = True  # fsdp.set_grad_sync sets it
            self.blocks = {p: block for block in module.blocks for p in block.parameters()}
            for p in module.parameters():
                if p.requires_grad:
                    p.register_post_accumulate_grad_hook(self.reduce)

        def forward(self, *args):
            return self.module(*args)

        def reduce(self, p):
            if self.require_backward_grad_sync:
                with ledger.busy_with(self.blocks.get(p, self.module)):
                    dist.all_reduce(p.grad)

    return OneByOne

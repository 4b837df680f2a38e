"""
A training step that needs no GPU: `parallelize` and `train_step` run as rank 0 of any number of
ranks, on fake tensors, which have shapes and no memory. It works for any model file and any key.

FSDP2 tells PyTorch's profiler what it does and for which unit, such as
`FSDP::all_gather (layers.3)`. These labels are operations too, so the ledger here reads them.
"""

from contextlib import ExitStack
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
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.profiler import record_function
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

import fsdp
import train
from configurator import STRATEGIES
from optimizer import allocate_state

# The kinds of memory; the first two are the host's. A storage that was labelled twice is of the
# first of its kinds here: a gradient that FSDP2 reduces was an activation before.
KINDS = ("host", "pinned", "parameters", "optimizer", "gradients", "gathered", "activations")


def rehearse(cfg, world):
    """A training step of rank 0:

    timeline  bytes of each of KINDS before the step and after every change: (1 + changes, kinds)
    events    [Event]: collectives, in order
    """
    # Three micro-batches take the memory and the traffic of any number: the first gathers the
    # root, the last reduces, and the second stands for all others. Without FSDP2 there is no root.
    micro_batches = cfg.gradient_accumulation_steps // world.size
    rehearsed = min(micro_batches, 3 if STRATEGIES[cfg.strategy].sharded else 2)
    cfg = replace(cfg, gradient_accumulation_steps=rehearsed * world.size)
    on_gpu = world.device.type == "cuda"
    world = replace(world, device=torch.device("cpu"))  # no CUDA streams here
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    ledger = Ledger()
    dist.init_process_group("fake", rank=0, world_size=world.size, store=FakeStore())
    with ExitStack() as stack:
        stack.callback(dist.destroy_process_group)
        for each in stand_ins(fake, ledger) + (gpu_kernels() if on_gpu else []):
            stack.enter_context(each)
        model = train.meta_model(cfg)
        if hasattr(model, "convert"):  # as in train.build
            model.convert(cfg, world)
        wrapped = train.parallelize(model, cfg, world)
        with fake, ledger:
            timeline = step(wrapped, model, cfg, world, ledger, on_gpu)

    for event in ledger.events:
        if event.micro_batch == rehearsed - 1:  # it stands for those left out, too
            event.times += micro_batches - rehearsed
    return timeline, ledger.events


def step(wrapped, model, cfg, world, ledger, on_gpu):
    """Run train_step, and tell the ledger the kinds of tensors. Returns its timeline."""
    optimizer = train.make_optimizer(model, cfg)
    allocate_state(optimizer)
    on_host = {p for p in model.parameters() if ledger.kind(p) == "pinned"}
    for p in model.parameters():
        ledger.label("host" if p in on_host else "optimizer", optimizer.state.get(p))
    if cfg.cuda_graph:  # a recorded step keeps its gradients
        for p in model.parameters():
            p.grad = torch.zeros_like(p) if p.requires_grad else None

    def label_gradients(*args):
        for p in model.parameters():
            ledger.label("pinned" if p in on_host else "gradients", p.grad)

    label_gradients()  # DDP's are there before the first backward
    optimizer.register_step_pre_hook(label_gradients)

    def forward_backward(*args):
        ledger.micro_batch += 1
        return train.forward_backward(*args)

    x = torch.empty(cfg.batch_size, cfg.sizes.block_size, dtype=torch.int64)
    batches = SimpleNamespace(get=lambda *args: (x, x, 1.0), prefetch_next=lambda *args: None)
    scaler = SimpleNamespace(scale=1.0, accepts=lambda norm: True)  # a fake norm has no value
    ledger.start = len(ledger.changes)
    ledger.events.clear()
    train.train_step(
        model, wrapped, optimizer, scaler, batches, 0, cfg, world, forward_backward)
    return ledger.timeline(on_gpu)  # now: afterwards memory is freed


# What FSDP2 allocates under a label. (post_forward: if reshard_after_forward is a number.)
LABELS = {
    "FSDP::all_gather": "gathered",
    "FSDP::all_gather_copy_out": "gathered",
    "FSDP::post_forward": "gathered",
    "FSDP::post_backward_accumulate": "gradients",
    "FSDP::post_backward_reduce": "gradients",
}
BEGIN_LABEL = torch.ops.profiler._record_function_enter_new.default
END_LABEL = torch.ops.profiler._record_function_exit._RecordFunction
# (what, which argument is the whole buffer, which is the group)
COLLECTIVES = {
    torch.ops.c10d._allgather_base_.default: ("all_gather", 0, 2),
    torch.ops.c10d._reduce_scatter_base_.default: ("reduce_scatter", 1, 2),
    torch.ops.c10d.allreduce_.default: ("all_reduce", 0, 1),
    torch.ops.c10d.alltoall_base_.default: ("all_to_all", 1, 2),
}


@dataclass
class Event:
    """A collective. size: bytes of its whole buffer."""
    what: str  # all_gather, reduce_scatter, all_reduce or all_to_all
    label: str  # FSDP2's, with the name of the unit unless it is the root
    row: int  # of the timeline, just after it
    micro_batch: int  # from 1; the update's are of the last
    size: int
    ranks: int  # in the group
    stride: int  # from one of these ranks to the next
    times: int = 1  # in the step: a rehearsed micro-batch may stand for several

    def sent(self):
        """Bytes that a rank sends round a ring: the buffer without a rank's share, and twice as
        much in an all-reduce, which reduces and then gathers."""
        rounds = 2 if self.what == "all_reduce" else 1
        return rounds * self.size * (self.ranks - 1) / self.ranks


class Ledger(TorchDispatchMode):
    """The bytes of each storage over time, and the events meanwhile."""

    def __init__(self):
        super().__init__()
        self.entries = WeakKeyDictionary()  # {a storage that is alive: its size and kind}
        self.changes = []  # [(entry, bytes more or less)]
        self.start = 0  # the number of changes before the step
        self.events = []
        self.micro_batch = 0
        self.labels = [""]  # the innermost is last

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # the operation comes back with their local tensors
        if op is torch.ops.prim.device.default:
            return args[0].fake_device  # three calls in five; here it costs nothing
        out = op(*args, **(kwargs or {}))
        kind = LABELS.get(self.labels[-1].split(" (")[0], "activations")
        if op is BEGIN_LABEL:
            self.labels.append(args[0])
        elif op is END_LABEL:
            self.labels.pop()
        elif op is torch.ops.aten._to_copy.default and self.kind(args[0]) == "parameters":
            self.label("gathered", out)  # parameters in the compute type
        else:
            self.label(kind, out)
        if kind == "gradients":
            self.label(kind, args)
        if op in COLLECTIVES:
            what, buffer, group = COLLECTIVES[op]
            ranks = dist.get_process_group_ranks(dist.ProcessGroup.unbox(args[group]))
            stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
            size = sum(t.nbytes for t in tree_leaves(args[buffer]))
            row = len(self.changes) - self.start
            label = self.labels[-1]
            self.events.append(
                Event(what, label, row, self.micro_batch, size, len(ranks), stride))
        return out

    def label(self, kind, tensors):
        """Note the kind of the tensors in a pytree."""
        for t in tree_leaves(tensors):
            if isinstance(t, torch.Tensor):
                self.note(storage_of(t), kind)

    def kind(self, t):
        return self.note(storage_of(t)).kind

    def note(self, storage, kind="activations"):
        """Note a storage's size and kind; returns its entry."""
        entry = self.entries.get(storage)
        if entry is None:
            entry = self.entries[storage] = SimpleNamespace(size=0, kind="activations")
            finalize(storage, self.change, entry, 0)
        self.change(entry, storage.nbytes())
        entry.kind = min(entry.kind, kind, key=KINDS.index)
        return entry

    def change(self, entry, size):
        if size != entry.size:
            self.changes.append((entry, size - entry.size))
            entry.size = size

    def timeline(self, on_gpu):
        """A row before the step, and one after each of its changes."""
        changes = np.zeros((len(self.changes), len(KINDS)))
        for row, (entry, size) in zip(changes, self.changes):
            if on_gpu and entry.kind == "pinned":  # PyTorch allocates a power of two
                size = int(np.sign(size)) << (abs(size) - 1).bit_length()
            row[KINDS.index(entry.kind)] = size
        return changes.cumsum(axis=0)[self.start - 1:]


def storage_of(t):
    """Of the tensor with memory: a DTensor wraps this rank's rows, and torchao wraps float8's."""
    while is_traceable_wrapper_subclass(t):
        # torchao's own __tensor_flatten__ reads the value of a scale, which a fake one lacks.
        name = "_tensor" if hasattr(t, "_tensor") else t.__tensor_flatten__()[0][0]
        t = getattr(t, name)
    return t.untyped_storage()


def stand_ins(fake, ledger):
    """Patches where fake tensors need them, and where memory changes unseen."""
    resize = torch.UntypedStorage.resize_
    materialize = fsdp.materialize
    to = torch.Tensor.to
    memory = {}  # module: the kind of its parameters

    def noted_resize(storage, size):  # FSDP2's way to allocate and free what it gathers
        resize(storage, size)
        ledger.note(storage, "gathered")

    def noted_fully_shard(module, offload_policy, **options):
        is_offloaded = isinstance(offload_policy, CPUOffloadPolicy)
        for inner in module.modules():  # units inside it have been here before
            memory.setdefault(inner, "pinned" if is_offloaded else "parameters")
        fully_shard(module, offload_policy=offload_policy, **options)

    def fake_materialize(module, device):
        with fake:  # no sooner: cutting fake tensors into 1,024 shards takes half a minute
            materialize(module, device)
        for inner in module.modules():
            for p in inner.parameters(recurse=False):
                ledger.label(memory.get(inner, "parameters"), p)

    def moved(t):  # between host and device; PyTorch would skip it, since here all is on one CPU
        copy = t.clone()
        if ledger.kind(t) != "pinned":
            ledger.label("pinned", copy)
        return copy

    def noted_to(t, *args, **kwargs):
        return moved(t) if "non_blocking" in kwargs else to(t, *args, **kwargs)

    return [
        # Where FSDP2 takes back a gather that nobody has waited for.
        patch.object(torch.accelerator, "current_stream", torch.cpu.current_stream),
        patch.object(torch.UntypedStorage, "resize_", noted_resize),
        patch.object(torch.Tensor, "to", noted_to),
        patch.object(torch.Tensor, "cpu", moved),
        # AdamW's kernel allocates nothing. With fake DTensors PyTorch would run it on copies.
        patch.object(torch, "_fused_adamw_", lambda *args, **kwargs: None),
        patch.object(fsdp, "fully_shard", noted_fully_shard),
        patch.object(fsdp, "materialize", fake_materialize),
        patch.object(fsdp, "DistributedDataParallel", OneByOne),
    ]


class OneByOne(torch.nn.Module):
    """In place of DDP, whose reducer is C++ and needs real memory: it reduces each gradient by
    itself, which holds and sends as many bytes as buckets do. It has a label as FSDP2 has."""

    def __init__(self, module, **options):
        super().__init__()
        self.module = module
        self.require_backward_grad_sync = True  # fsdp.set_grad_sync sets it
        for p in module.parameters():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(self.reduce)

    def forward(self, *args):
        return self.module(*args)

    def reduce(self, p):
        if self.require_backward_grad_sync:
            with record_function("DDP::all_reduce"):
                dist.all_reduce(p.grad)


def gpu_kernels():
    """Patches that keep for backward what a GPU's kernels keep."""
    fused_attention = F.scaled_dot_product_attention

    # With dropout a CPU's kernel keeps T x T numbers, a GPU's does not.
    def without_dropout(*args, dropout_p=0.0, **kwargs):
        return fused_attention(*args, **kwargs)

    # A GPU's kernel keeps a byte per number, a CPU's as many bytes as x has.
    def dropout(x, p=0.5, training=True, inplace=False):
        return torch.native_dropout(x, p, training)[0] if p and training else x

    # A GPU's kernel keeps x and a number per row, as layer_norm does; a CPU's also keeps two
    # copies of x in fp32. Under autocast a GPU's x is fp32.
    def rms_norm(x, shape, weight=None, eps=None):
        return F.layer_norm(x.float() if torch.is_autocast_enabled("cpu") else x, shape, weight)

    return [
        patch.object(F, "scaled_dot_product_attention", without_dropout),
        patch.object(F, "dropout", dropout),
        patch.object(F, "rms_norm", rms_norm),
    ]

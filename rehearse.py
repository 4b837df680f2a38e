"""
A training step that needs no GPU: `parallelize` and `train_step` run as rank 0 of any number of
ranks, on fake tensors, which have shapes and no memory. A ledger notes what each storage holds.

    timeline, marks, collectives = rehearse(cfg, world)

This holds for any model file and any key. All private parts of PyTorch that it needs are here.
"""

import math
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch
from weakref import WeakKeyDictionary, finalize

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

import float8
import fsdp
from configurator import DTYPES
from optimizer import local, make_optimizer, make_state
from train import meta_model, train_step

try:
    from torch._subclasses import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torch.utils._python_dispatch import TorchDispatchMode
except ImportError as e:
    raise SystemExit(f"the rehearsal needs private parts of PyTorch ({e}); use torch 2.13")

# what memory holds; of two names the first: a shard that is gathered from stays a parameter
KINDS = ("host", "parameters", "optimizer", "gradients", "gathered", "activations")


def rehearse(cfg, world):
    """A training step of rank 0:
    timeline     bytes of each of KINDS after every change: (changes, kinds)
    marks        [(change, where)]: from there on it is in forward, head, backward or optimizer
    collectives  {(kind, ranks in the group): bytes of their whole buffers in the step}"""
    micro_batches = cfg.gradient_accumulation_steps // world.size
    # two need the memory of any number; with `last` a first, one between and a last send different
    rehearsed = min(micro_batches, 3 if cfg.grad_sync == "last" else 2)
    cfg = replace(cfg, gradient_accumulation_steps=rehearsed * world.size)
    fake, ledger = FakeTensorMode(allow_non_fake_inputs=True), Ledger(world.device.type == "cuda")
    with ExitStack() as stack:
        dist.init_process_group("fake", rank=0, world_size=world.size, store=FakeStore())
        stack.callback(dist.destroy_process_group)
        for stand_in in stand_ins(fake, ledger, cfg, world):
            stack.enter_context(stand_in)
        world = replace(world, device=torch.device("cpu"))  # no CUDA streams here
        model = meta_model(cfg)
        wrapped = fsdp.parallelize(model, cfg, world)
        with fake, ledger:
            timeline, marks = step(wrapped, model, cfg, world, ledger)
    collectives = Counter()
    for i, calls in enumerate(reversed(ledger.collectives)):  # the last but one for those left out
        for key, size in calls.items():
            collectives[key] += size * (1 + micro_batches - rehearsed if i == 1 else 1)
    return timeline, marks, collectives


def step(wrapped, model, cfg, world, ledger):
    """train_step, while the ledger learns which tensors are what; returns its timeline."""
    def label(kind, tensors_of):
        for p in model.parameters():
            on_host = ledger.kind(float8.plain(p)) == "host"
            ledger.label("host" if on_host else kind, tensors_of(p))

    optimizer = make_optimizer(model, cfg)
    with patch.object(ledger, "pins", False):  # no GPU copies the moments
        make_state(optimizer)
    label("optimizer", optimizer.state.get)
    float8.scale_each_step(model, optimizer, cfg)
    label("gradients", lambda p: p.grad)  # DDP's buckets

    def after_block(i, out):
        x, *_ = tree_leaves(out)  # one tensor or several
        if x.requires_grad:
            x.register_hook(lambda grad: ledger.mark(f"backward, block {i}"))

    model.register_forward_pre_hook(lambda *_: ledger.mark("forward"), prepend=True)
    for i, block in enumerate(model.blocks):
        block.register_forward_hook(lambda block, args, out, i=i: after_block(i, out))
    model.blocks[-1].register_forward_hook(lambda *_: ledger.mark("forward, head"))
    model.register_forward_hook(lambda *_: ledger.mark("backward, head"))
    optimizer.register_step_pre_hook(lambda *_: label("gradients", lambda p: p.grad))
    optimizer.register_step_pre_hook(lambda *_: ledger.mark("optimizer"))
    x = torch.empty(cfg.batch_size, cfg.block_size, dtype=torch.int64)
    batches = SimpleNamespace(train=lambda step, micro: (x, x))
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    train_step(wrapped, optimizer, scaler, batches, (x, x), 0, cfg, world)
    return ledger.timeline()


class Ledger(TorchDispatchMode):
    """How many bytes each storage takes from when to when. What it is may turn out later."""

    TELLING = {  # operations of FSDP whose tensors are of one kind
        "fsdp.all_gather_copy_in": "gathered", "fsdp.chunk_cat": "gradients",
        "c10d._reduce_scatter_base_": "gradients"}
    COLLECTIVES = {  # (kind, which argument is the whole buffer, which is the group)
        "c10d._allgather_base_": ("all_gather", 0, 2), "c10d.allreduce_": ("all_reduce", 0, 1),
        "c10d._reduce_scatter_base_": ("reduce_scatter", 1, 2),
        "c10d.alltoall_base_": ("all_to_all", 1, 2)}

    def __init__(self, pins):
        super().__init__()
        self.pins = pins  # is host memory pinned, where a GPU's copies begin or end?
        self.entries, self.changes, self.marks = WeakKeyDictionary(), [], []
        self.collectives = []  # of each micro-batch

    def mark(self, where):
        self.marks.append((len(self.changes), where))
        if where == "forward":
            self.collectives.append(Counter())

    def note(self, storage, kind="activations"):
        """Note a storage's size and kind: of all that it was called, the first in KINDS."""
        entry = self.entries.get(storage)
        if entry is None:
            entry = self.entries[storage] = SimpleNamespace(size=0, kind=kind, pinned=self.pins)
            finalize(storage, lambda: self.changes.append((entry, -entry.size)))
        if storage.nbytes() != entry.size:
            self.changes.append((entry, storage.nbytes() - entry.size))
            entry.size = storage.nbytes()
        entry.kind = min(entry.kind, kind, key=KINDS.index)
        return entry.kind

    def label(self, kind, tensors):
        """Note what the tensors of a pytree are; returns it."""
        for t in tree_leaves(tensors):
            if isinstance(t, torch.Tensor):
                self.note(local(t).untyped_storage(), kind)
        return tensors

    def kind(self, t):
        return self.note(local(t).untyped_storage())

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # the operation comes back with their local tensors
        if op is torch.ops.prim.device.default:
            return args[0].fake_device  # three calls in five; here it costs nothing
        out = self.label("activations", op(*args, **(kwargs or {})))
        name = str(op).removesuffix(".default")
        if name in self.TELLING:
            self.label(self.TELLING[name], (args, kwargs))
        elif name == "aten._to_copy" and self.kind(args[0]) == "parameters":
            self.label("gathered", out)  # parameters in the compute type
        if name in self.COLLECTIVES and self.collectives:
            kind, buffer, group = self.COLLECTIVES[name]
            ranks = dist.ProcessGroup.unbox(args[group]).size()
            size = sum(t.nbytes for t in tree_leaves(args[buffer]))
            self.collectives[-1][kind, ranks] += size
        return out

    def timeline(self):
        changes = np.zeros((len(self.changes), len(KINDS)))
        for row, (entry, size) in zip(changes, self.changes):
            if entry.pinned and entry.kind == "host" and size:  # PyTorch pins powers of two
                size = math.copysign(1 << (abs(size) - 1).bit_length(), size)
            row[KINDS.index(entry.kind)] = size
        start = self.marks[0][0]  # row 0 is what there is before the step, row n after n changes
        return changes.cumsum(axis=0)[start - 1:], [(n - start, where) for n, where in self.marks]


def stand_ins(fake, ledger, cfg, world):
    """What the rehearsal puts in place of PyTorch's own."""
    to, to_empty, resize = torch.Tensor.to, torch.nn.Module.to_empty, torch.UntypedStorage.resize_
    attention = F.scaled_dot_product_attention

    def listed_resize(storage, size):  # FSDP's way to allocate and free what it gathers
        resize(storage, size)
        ledger.note(storage, "gathered")

    def fake_to_empty(module, device, recurse=True):
        with fake:  # no sooner: cutting fake tensors into 1,024 shards takes half a minute
            to_empty(module, device=device, recurse=recurse)
        for p in module.parameters(recurse):  # fsdp.shard says "cpu" of what it offloads
            ledger.label("host" if device == "cpu" else "parameters", float8.plain(p))

    def between_memories(t, *args, **kwargs):
        if "non_blocking" not in kwargs:
            return to(t, *args, **kwargs)
        copy = t.clone()  # PyTorch would spare it: all is on one CPU here
        return copy if ledger.kind(t) == "host" else ledger.label("host", copy)

    def reduced_one_by_one(model, **_):  # DDP's reducer is C++ and wants real memory
        copies = []  # in another reduce_dtype; NCCL keeps them until all is reduced

        def reduce(p):
            if model.require_backward_grad_sync:
                copies.append(p.grad.to(DTYPES[cfg.reduce_dtype]))
                dist.all_reduce(copies[-1])
                torch.autograd.Variable._execution_engine.queue_callback(copies.clear)

        for p in model.parameters():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(reduce)
        model.register_comm_hook = lambda *_: None
        return model

    yield patch.object(torch.UntypedStorage, "resize_", listed_resize)
    yield patch.object(torch.nn.Module, "to_empty", fake_to_empty)
    yield patch.object(torch.Tensor, "to", between_memories)
    yield patch.object(torch.Tensor, "cpu", lambda t: ledger.label("host", t.clone()))
    yield patch.object(fsdp, "DistributedDataParallel", reduced_one_by_one)
    # in place, it allocates nothing; but for fake DTensors PyTorch runs it on copies of all of them
    yield patch.object(torch, "_fused_adamw_", lambda *args, **kwargs: None)
    if world.device.type != "cpu":
        yield patch("model.explicit_is_faster", lambda *args: False)  # a detour of CPUs only
        # with dropout, a CPU's kernel keeps T x T numbers, a GPU's not
        yield patch.object(F, "scaled_dot_product_attention",
                           lambda *args, dropout_p=0.0, **kwargs: attention(*args, **kwargs))
        # a GPU's kernel keeps x and a number a row, as this does; a CPU's two more x in fp32
        yield patch.object(F, "rms_norm", lambda x, shape, weight=None, eps=None:
                           F.layer_norm(x, shape, weight))

"""
A step's program: a GPU's work, which rehearse.py records and timing.py prices.

It has Operations, each on a stream, and makes one stream wait for another by a Record of an event
and a Wait for it. FSDP2 makes all these calls itself, so their order is its own.
"""

from dataclasses import dataclass, field, replace
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.flop_counter import flop_registry

COMPUTE = torch.cpu.current_stream()  # the stream of operations that ask for no other
UPDATE = ("clip", "optimizer")  # the places of a step that are its update
# Operations that touch no memory, though PyTorch does not call them views.
FREE = {
    "aten._unsafe_view", "aten.empty.memory_format", "aten.empty_like", "aten.empty_strided",
    "aten.new_empty", "profiler._record_function_enter_new",
    "profiler._record_function_exit._RecordFunction",
}
# Operations that read only as much as they return, whatever the table's size.
LOOK_UPS = {
    "aten.embedding", "aten.gather", "aten.index.Tensor", "aten.index_select",
    "aten.nll_loss_forward",
}
# Operations that write their first argument and do not read it.
OVERWRITES = {
    "aten._foreach_copy_", "aten._foreach_zero_", "aten.copy_", "aten.fill_.Scalar", "aten.zero_",
}


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


@dataclass(eq=False)
class Operation:
    """One piece of a GPU's work: a kernel, a copy or a collective."""
    name: str  # PyTorch's; or copy (between host and device), update, update on the host
    where: str  # in the step
    micro_batch: int
    row: int  # of the timeline, just after it
    reads: list  # [(an object that stands for a storage, bytes)]
    writes: list
    flops: float = 0.0
    width: int = 2  # bytes per number that it multiplies
    head: int = 0  # of attention: the size of a head
    length: int = 0  # of attention: tokens
    event: object = None  # of a collective: rehearse.Event
    size: int = 0  # of a collective's whole buffer
    calls: float = 1.0  # of a collective: less than 1 where several are sent as one
    # The host's work until then: calls of PyTorch's dispatcher, and units that FSDP2 was busy with.
    issued: tuple = (0, 0)
    stream: object = field(default_factory=torch.cpu.current_stream)

    def part(self):
        """The part of the step: a micro-batch's number, or one more for the update."""
        return self.micro_batch + (self.where in UPDATE)

    def moved(self):
        """Bytes read and written."""
        return sum(size for _, size in self.reads + self.writes)


@dataclass(eq=False)
class Wait:
    """The stream does nothing more until the event."""
    stream: object
    event: object


@dataclass(eq=False)
class Record:
    """The event comes when the stream has done everything before it."""
    stream: object
    event: object


def joins(before, event):
    """True if event continues before: a unit is freed, and in our DDP reduced, tensor by tensor."""
    same = replace(before, row=event.row, size=event.size) == event
    return same and event.what in ("free", "all_reduce")


def recording_streams(program):
    """Patches. On a CPU, too, FSDP2 uses streams and events, but they do nothing there: patched,
    they note in the program which stream waits for which."""

    def wait_event(stream, event):
        program.append(Wait(stream, event))

    def record(event, stream=None):
        program.append(Record(stream or torch.cpu.current_stream(), event))

    def record_event(stream):
        event = torch.cpu.Event()
        event.record(stream)
        return event

    def wait_stream(stream, other):
        stream.wait_event(other.record_event())

    return [
        patch.object(torch.cpu.Stream, "wait_event", wait_event),
        patch.object(torch.cpu.Stream, "wait_stream", wait_stream),
        patch.object(torch.cpu.Stream, "record_event", record_event),
        patch.object(torch.cpu.Event, "record", record),
        # Where FSDP2 takes back a gather that nobody has waited for.
        patch.object(torch.accelerator, "current_stream", torch.cpu.current_stream),
    ]


def is_free(op, name):
    return op.is_view or name in FREE


def touched(name, args, kwargs, out):
    """(the tensors that an operation reads, the ones that it writes), as pytrees."""
    if name in LOOK_UPS:
        return out, out
    if name == "fsdp.all_gather_copy_in":
        return args[0], args[0]  # the rank's rows, to their place in the whole
    if name in OVERWRITES:
        return args[1:], args[0]
    if name.startswith("aten._foreach_") and out is None:
        return (args, kwargs), args[0]  # in place
    return (args, kwargs), out


def local(t):
    """The tensor with memory: a DTensor wraps this rank's rows, and torchao wraps float8's."""
    while is_traceable_wrapper_subclass(t):
        inner, _ = t.__tensor_flatten__()
        t = getattr(t, inner[0])
    return t


def computed(op, args, kwargs, out):
    """dict of an Operation's fields: the FLOPs of a product or of attention, and its sizes."""
    if "scaled_dot_product" not in str(op):
        count = flop_registry.get(op.overloadpacket)
        if not count:
            return {}
        # The first argument is multiplied, or has the type of the tensors that are. The last may be
        # a number, such as a convolution's groups.
        return dict(flops=count(*args, **kwargs, out_val=out), width=local(args[0]).itemsize)
    # The registry is of no use here: from torch 2.15 on it knows a CPU's kernel, and counts the
    # products that a causal kernel leaves out.
    is_backward = "backward" in str(op)
    q, k = args[1:3] if is_backward else args[:2]
    B, nh, T, hs = q.shape
    length = k.size(2)
    # Causal: half of two products of 2 B nh T T hs. Backward has five.
    flops = 2 * B * nh * T * length * hs * (2.5 if is_backward else 1)
    return dict(flops=flops, width=q.itemsize, head=hs, length=length)

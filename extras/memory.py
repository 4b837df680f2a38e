"""
Measure a real step on this rank, on a CPU too: the bytes of all live tensors after each operation,
and the number of collectives.

    with MemoryTracer() as tracer:
        for step in range(2):  # the first step allocates the optimizer's state
            tracer.clear()
            train_step()
    print(max(tracer.bytes), tracer.collectives)

The tracer knows a tensor from the first operation that takes or returns it: trace a step before the
one you measure. It sees neither memory inside an operation (cuBLAS's workspace, gloo's buffers) nor
the allocator's cache. The plan (extras/plan.py) predicts the same bytes.
"""

from collections import Counter
from weakref import WeakSet

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class MemoryTracer(TorchDispatchMode):
    """bytes: of the live tensors, after each operation since clear().
    collectives: {PyTorch's name, such as c10d::_allgather_base_: calls}."""

    def __init__(self):
        super().__init__()
        self.storages = WeakSet()  # views share one; freed ones leave by themselves
        self.clear()

    def clear(self):
        """Forget the operations so far, but not the tensors."""
        self.bytes = []
        self.collectives = Counter()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # the operation comes back with this rank's rows
        out = op(*args, **(kwargs or {}))
        for t in tree_leaves((args, kwargs, out)):
            if isinstance(t, torch.Tensor):
                self.storages.add(t.untyped_storage())
        self.bytes.append(sum(storage.nbytes() for storage in self.storages))
        if op.namespace == "c10d":
            self.collectives[op.name()] += 1
        return out

"""
NCCL, by gloo on the same bytes.

A communicator is gloo's, on connections of its own. Like NCCL it takes only contiguous tensors of
one GPU, and each rank needs its own. The order of streams is NCCL's (device.cpp, section 6).
"""

import os
import socket
import warnings

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.utils._pytree import tree_leaves, tree_map_only

import simgpu

# Not in this list: coalescing managers and batches of sends, which fail as in a CPU build.
COLLECTIVES = (
    "allreduce_", "allreduce_coalesced_", "broadcast_", "reduce_", "_allgather_base_",
    "allgather_", "allgather_into_tensor_coalesced_", "_reduce_scatter_base_", "reduce_scatter_",
    "reduce_scatter_tensor_coalesced_", "alltoall_base_", "alltoall_", "gather_", "scatter_",
    "send", "recv_")


class ProcessGroupNCCL(dist.ProcessGroupGloo):
    """PyTorch's process group for the backend "nccl"."""

    class Options:
        is_high_priority_stream = False
        global_ranks_in_group = ()
        group_name = ""
        split_from = split_color = None
        _timeout = dist.constants.default_pg_timeout

    made = {}  # by the name of the group

    def __init__(self, store, rank, size, options=None, device=None):
        options = options or self.Options()
        super().__init__(store, rank, size, timeout=options._timeout)
        # Its operations run in a group whose CPU backend this is.
        self.group = dist.ProcessGroup(store, rank, size)
        self.group._register_backend(
            torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, self)
        self.store = store
        self.device = None
        self.number = 1 + len(self.made)
        self.made[options.group_name] = self
        if device is not None:
            self.connect(device)

    def connect(self, device):
        """Set the device: from torch 2.15 on when the group is made, GPU LOCAL_RANK modulo their
        number; before that at the first collective. Each rank of a host must have a GPU of its
        own; NCCL_HOSTID says which host that is."""
        self.device = device
        host = os.environ.get("NCCL_HOSTID") or socket.gethostname()
        mine = f"{host} {device}"
        self.store.set(f"gpu of {self.rank()}", mine)
        for rank in range(self.size()):
            theirs = self.store.get(f"gpu of {rank}").decode()
            if rank != self.rank() and theirs == mine:
                raise dist.DistBackendError(
                    f"NCCL: Duplicate GPU detected: ranks {rank} and {self.rank()} are both on "
                    f"{device}")

    def require(self, name, tensors):
        """ValueError if NCCL would not take these tensors."""
        devices = {t.device for t in tensors}
        if len(devices) > 1:
            raise ValueError(f"NCCL: {name} of tensors on {sorted(map(str, devices))}")
        [device] = devices
        if self.device is None:
            self.connect(device)
        if device != self.device:
            raise ValueError(
                f"NCCL: {name} of a tensor on {device}, in a communicator of {self.device}")
        for t in tensors:
            if not t.is_contiguous():
                raise ValueError(f"NCCL: {name}: tensors must be contiguous")


def tensors_in(tree):
    return [t for t in tree_leaves(tree) if isinstance(t, torch.Tensor)]


def communicator(group):
    """The group's NCCL; None if it has only gloo, which takes a GPU's tensors too."""
    return ProcessGroupNCCL.made.get(dist.ProcessGroup.unbox(group).group_name)


def implementation(name):
    """torch.ops.c10d.<name> for tensors on CUDA."""
    op = getattr(torch.ops.c10d, name).default
    names = [arg.name for arg in op._schema.arguments]
    group_at = names.index("process_group")

    @torch._disable_dynamo
    def call(*args):
        nccl = communicator(args[group_at])
        group = nccl.group.boxed() if nccl else args[group_at]
        tensors = tensors_in(args)
        reads, writes = [], []
        for arg_name, arg in zip(names, args):
            if "output" not in arg_name and name != "recv_":
                reads += tensors_in(arg)
            if "input" not in arg_name and name != "send":
                writes += tensors_in(arg)
        if nccl:
            nccl.require(name, tensors)
        else:  # gloo copies them through the host's memory
            torch.cuda.synchronize(tensors[0].device)
        ranks = dist.ProcessGroup.unbox(group).size()
        size = max(sum(t.nbytes for t in reads), sum(t.nbytes for t in writes))
        simgpu.note("collective", f"{name.strip('_')} {tensors[0].dtype} {ranks} ranks", size)

        of_host = list(tree_map_only(torch.Tensor, torch.ops.simgpu.borrowed, args))
        of_host[group_at] = group
        result = op(*of_host)
        has_outputs = isinstance(result, (tuple, list))
        work = torch.ops.simgpu.collective(
            name, reads, writes, result[-1] if has_outputs else result,
            nccl.number if nccl else 0, tensors[0].device)
        return (args[0], work) if has_outputs else work

    return call


@torch._disable_dynamo
def barrier(tensor, group, *args):
    """As NCCL's, it makes the host wait."""
    nccl = communicator(group)
    if nccl:
        nccl.require("barrier", [tensor])
        group = nccl.group.boxed()
    torch.cuda.synchronize(tensor.device)
    return torch.ops.c10d.barrier(torch.empty(0), group, *args)


for name in ("ProcessGroupNCCL", "ProcessGroupNCCL2"):  # from torch 2.15 on the second is used
    setattr(c10d, name, ProcessGroupNCCL)
# PyTorch's C++ would split a group that knows its device into groups that have only gloo.
dist.ProcessGroup.bound_device_id = property(lambda self: None, lambda self, device: None)
c10d._NCCL_AVAILABLE = True
torch.cuda.nccl.version = lambda: (2, 29, 0)
c10d.is_nccl_available = dist.is_nccl_available = lambda: True
library = torch.library.Library("c10d", "IMPL")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that they replace others
    for name in COLLECTIVES:
        if hasattr(torch.ops.c10d, name):
            library.impl(name, implementation(name), "CUDA", allow_override=True)
    library.impl("barrier", barrier, "CUDA", allow_override=True)

"""
Prices of the simulated GPU's operations (extras/simgpu), as the plan has them. Its clock then says
how long a step takes.
"""

import sys

import torch
import torch.distributed as dist

from extras.plan import program, timing

COLLECTIVES = {
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "allreduce_": "all_reduce",
}
libraries = []  # the prices end with them


def give_prices(cluster=None):
    """From now on each operation takes its time on the simulated GPU."""
    cluster = cluster or this_cluster()

    def price(name, reads, writes):
        return price_of(name, reads, writes, cluster)

    library = torch.library.Library("simgpu", "IMPL")
    for key in ("CPU", "CUDA"):
        library.impl("price", price, key)
    libraries.append(library)
    sys.modules["simgpu"].device.simgpu_price(1)


def this_cluster():
    gpu = timing.find_gpu(torch.cuda.get_device_name(0))
    return timing.Cluster(gpu, gpus_per_node=8, network=gpu.network, attention=gpu.kernel)


def price_of(name, reads, writes, cluster):
    """Seconds of an operation. name: PyTorch's; reads, writes: its tensors."""
    if name == "_fused_adamw_":  # it writes gradients only if a scaler has to divide them
        writes = writes[:len(writes) // 4 * 3]
    tensors = reads + writes
    size = max(t.nbytes for t in tensors)
    moved = [(i, t.nbytes) for i, t in enumerate(tensors)]
    op = program.Operation("aten." + name, "", 1, 0, moved, [])
    op.width = tensors[0].itemsize
    if name in COLLECTIVES:
        ranks = dist.get_world_size()
        op.event = program.Event(COLLECTIVES[name], "", "", 0, 1, size, ranks)
        op.size = size
    elif name in ("mm", "bmm", "addmm"):
        a, b = tensors[-3:-1]
        op.flops = 2.0 * a.numel() * b.size(-1)
    elif "scaled_dot_product" in name:
        B, nh, T, hs = tensors[0].shape
        op.flops = 2.0 * B * nh * T * T * hs * (2.5 if "backward" in name else 1)
        op.head, op.length = hs, T
    return timing.price(op, cluster)

"""
A rank that shares a GPU with others: NCCL takes each for another node's.

    torchrun --standalone --nproc_per_node=2 tests/own_node.py train.py --device=cuda   # on one GPU

NCCL refuses two ranks of one host on one GPU, and asks NCCL_HOSTID which host that is. So real
NCCL runs between them, over sockets: its kernels, groups, streams and watchdog, but no NVLink.
"""

import os
import runpy
import sys


def environment(rank, gpus):
    """For this rank, where there are fewer GPUs than ranks."""
    return dict(
        NCCL_HOSTID=f"node {rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1",
        LOCAL_RANK=str(rank % gpus), LOCAL_WORLD_SIZE="1")


if __name__ == "__main__":
    import torch

    os.environ.update(environment(int(os.environ["RANK"]), torch.cuda.device_count()))
    sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")

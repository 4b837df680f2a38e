r"""
Sharded Muon in a hundred lines: `--optimizer=muon`, for the matrices inside the blocks.

Muon (Jordan et al. 2024) replaces the momentum of a matrix by the nearest matrix whose
singular values are all about 1. That needs the whole matrix, and a rank has some rows of it.
So each matrix has an owner. A step has two all-to-alls, for all matrices together:

         rank 0                   rank 1                   (A, B belong to 0; C to 1)
         rows 0- of A  B  C       rows 1- of A  B  C       momentum, by rows
                 \__ to the owners, in one all-to-all __/
         A  B  whole              C  whole                 orthogonalize: each rank its own
                 /__ back to the rows, in another _____\
         rows 0- of A  B  C       rows 1- of A  B  C       update this rank's rows

Under DDP every rank has all rows, so only the second is needed. With hybrid_shard the ranks
of one copy gather a matrix, and its owner sends the rows to the ranks of all copies. Each
matrix is orthogonalized once in the world, so W ranks take about 1/W of the time.

Updates have the size of AdamW's (0.2 an element: Liu et al. 2025), so that one learning
rate and one weight decay serve both. docs/fsdp.md says what it sends.
"""

import math

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor


def matrices_of(model):
    """What Muon updates: what the model names in `matrices`, or the blocks' 2-D parameters."""
    if hasattr(model, "matrices"):
        params = model.matrices()
    else:
        params = [p for p in model.blocks.parameters() if p.dim() == 2]
    return [p for p in params if p.requires_grad]


class Muon(torch.optim.Optimizer):
    def __init__(self, matrices, adamw, lr, weight_decay, momentum, dtype=torch.float32):
        """matrices: parameters of two dimensions, or stacks of such (more dimensions).
        adamw: an optimizer of all other parameters, which steps with this one.
        dtype: to send and to orthogonalize in, float32 or bfloat16."""
        own = dict(params=matrices, lr=lr, weight_decay=weight_decay, momentum=momentum)
        super().__init__([own, *adamw.param_groups], {})
        adamw.state = self.state  # one state, for checkpoints
        self.adamw = adamw
        self.dtype = dtype

    @torch.no_grad()
    def step(self):
        """Update all parameters (all ranks: collective)."""
        self.adamw.step()
        group = self.param_groups[0]
        matrices = [p for p in group["params"] if p.grad is not None]
        mesh = getattr(matrices[0], "device_mesh", None)
        # Offloaded rows travel over the GPU too.
        device = mesh.device_type if mesh else matrices[0].device
        rank, world = 0, 1
        if dist.is_initialized():
            rank, world = dist.get_rank(), dist.get_world_size()
        copy = mesh.size(-1) if mesh else 1  # neighbouring ranks that share a copy
        first = rank // copy * copy  # the first of mine

        # One buffer for this rank's rows, by owner. All shards are padded to the same size.
        owned = divide(matrices, world)
        padded = {}
        for p in [p for share in owned for p in share]:
            padded[p] = math.ceil(len(p) / copy) * math.prod(p.shape[1:])
        sizes = [sum(padded[p] for p in share) for share in owned]  # of each owner
        rows = torch.zeros(sum(sizes), device=device, dtype=self.dtype)
        pieces = dict(zip(padded, rows.split(list(padded.values()))))
        for p, piece in pieces.items():
            own = local(p)
            piece[:own.numel()] = self.nesterov(p, group["momentum"]).flatten()

        # To the owners, among the ranks that share a copy.
        mine = rows[sum(sizes[:first]):sum(sizes[:first + copy])]
        if copy > 1:
            sent = mine
            mine = sent.new_empty(copy * sizes[rank])
            dist.all_to_all_single(
                mine, sent,
                output_split_sizes=[sizes[rank]] * copy,
                input_split_sizes=sizes[first:first + copy],
                group=mesh.get_group("shard"))
        mine = mine.view(copy, sizes[rank])  # one line a rank: its rows of all my matrices
        for p, m in zip(owned[rank], mine.split([padded[p] for p in owned[rank]], dim=1)):
            whole = m.reshape(-1, *p.shape[1:])  # padding stays 0
            m.copy_(orthogonalize(whole).reshape(m.shape))

        # From the owners to whoever keeps these rows, in every copy.
        if world > 1:
            copies = mine.expand(world // copy, copy, sizes[rank]).flatten()
            dist.all_to_all_single(
                rows, copies,
                output_split_sizes=sizes,
                input_split_sizes=[sizes[rank]] * world)
        for p, piece in pieces.items():
            own = local(p)
            update = piece[:own.numel()].view(own.shape).to(own.device)
            own.mul_(1 - group["lr"] * group["weight_decay"])
            own.add_(update, alpha=-group["lr"] * 0.2 * math.sqrt(max(p.shape[-2:])))

    def nesterov(self, p, beta):
        """Add this rank's rows of the gradient to its momentum; return where that leads."""
        state = self.state[p]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p)
        momentum = local(state["momentum_buffer"])
        grad = local(p.grad)
        momentum.lerp_(grad, 1 - beta)
        return grad.lerp(momentum, beta)


def orthogonalize(m):
    """m with its singular values moved to between 0.7 and 1.2, by five steps of a
    Newton-Schulz iteration with Jordan's coefficients. Of a stack, each matrix's."""
    if m.dim() > 2:
        return torch.stack([orthogonalize(x) for x in m])
    tall = m.size(0) > m.size(1)
    x = m.T if tall else m  # so that x @ x.T is the smaller square
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        square = x @ x.T
        square = torch.addmm(square, square, square, beta=-4.7750, alpha=2.0315)
        x = torch.addmm(x, square, x, beta=3.4445)
    return x.T if tall else x


def divide(matrices, world):
    """The matrices that each rank owns: the costliest first, to who has the least to do."""
    owned = [[] for _ in range(world)]
    load = [0] * world
    for m in sorted(matrices, key=cost, reverse=True):
        rank = load.index(min(load))
        owned[rank].append(m)
        load[rank] += cost(m)
    return owned


def cost(m):
    """Multiplications of one iteration, for each matrix of a stack."""
    short, long = sorted(m.shape[-2:])
    return m.numel() // long * short * (2 * long + short)


def local(t):
    return t.to_local() if isinstance(t, DTensor) else t

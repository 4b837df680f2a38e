r"""
Sharded Muon: `--optimizer=muon`, for the matrices inside the blocks.

Muon (Jordan et al. 2024) replaces the momentum of a matrix by the nearest matrix whose
singular values are all about 1. That takes the whole matrix, but a rank has only some rows.
So each matrix has an owner, and a step has two all-to-alls, for all matrices together:

         rank 0                   rank 1                   (A, B belong to 0; C to 1)
         rows 0- of A  B  C       rows 1- of A  B  C       momentum, by rows
                 \__ to the owners, in one all-to-all __/
         A  B  whole              C  whole                 orthogonalize: each rank its own
                 /__ back to the rows, in another _____\
         rows 0- of A  B  C       rows 1- of A  B  C       update this rank's rows

Under DDP every rank has all rows, so only the second is needed. With hybrid_shard the ranks
of one copy gather a matrix, and its owner sends the rows to the ranks of all copies. Each
matrix is orthogonalized once in the world, so W ranks take about 1/W of the time.

Updates have the size of AdamW's (0.2 per element: Liu et al. 2025), so that one learning
rate and one weight decay work for both. extras/docs/training.md says how much a rank sends.
"""

import math

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from configurator import DTYPES
from optimizer import make as make_adamw


def make(model, cfg):
    """Muon for the blocks' 2-D parameters that decay; AdamW for the rest."""
    matrices = [p for p in model.blocks.parameters() if p.dim() == 2 and p.requires_grad]
    matrices = [p for p in matrices if not getattr(p, "_no_weight_decay", False)]
    others = set(model.parameters()).difference(matrices)
    adamw = make_adamw(model, cfg, [p for p in model.parameters() if p in others])
    if not matrices:  # all are frozen
        return adamw
    return Muon(
        matrices,
        adamw,
        lr=cfg.learning_rate,
        weight_decay=cfg.weight_decay,
        momentum=cfg.momentum,
        # Unscaled gradients are too small for float16.
        dtype=torch.float32 if cfg.dtype == "float16" else DTYPES[cfg.dtype],
    )


class Muon(torch.optim.Optimizer):
    def __init__(self, matrices, adamw, lr, weight_decay, momentum, dtype=torch.float32):
        """matrices: parameters of two dimensions.
        adamw: an optimizer of all other parameters, which steps with this one.
        dtype: to send and to orthogonalize in, float32 or bfloat16."""
        muons = dict(
            params=matrices,
            lr=lr,
            weight_decay=weight_decay,
            momentum=momentum,
        )
        super().__init__([muons, *adamw.param_groups], {})
        self.adamw = adamw
        self.dtype = dtype

        # The ranks. `sharing` neighbours share a copy of the model.
        self.rank = 0
        self.world = 1
        self.sharing = 1
        self.shard_group = None
        self.device = matrices[0].device
        if dist.is_initialized():
            self.rank = dist.get_rank()
            self.world = dist.get_world_size()
        if isinstance(matrices[0], DTensor):
            mesh = matrices[0].device_mesh
            self.sharing = mesh.size(-1)
            self.shard_group = mesh.get_group("shard")
            self.device = torch.device(mesh.device_type)  # offloaded rows travel over it too

    @torch.no_grad()
    def step(self):
        """Update all parameters (all ranks: collective)."""
        # One state and its groups, for checkpoints. (load_state_dict makes new ones.)
        self.adamw.state = self.state
        self.adamw.param_groups = self.param_groups[1:]
        self.adamw.step()
        group = self.param_groups[0]
        matrices = [p for p in group["params"] if p.grad is not None]
        owned = divide(matrices, self.world)  # by rank

        # One buffer for this rank's rows of all matrices, owner by owner.
        ordered = sum(owned, [])
        sizes = {p: self.shard_size(p) for p in ordered}
        by_owner = [sum(sizes[p] for p in share) for share in owned]
        rows = torch.zeros(sum(by_owner), device=self.device, dtype=self.dtype)
        pieces = rows.split(list(sizes.values()))
        for p, piece in zip(ordered, pieces):
            self.nesterov(p, group["momentum"], piece)

        # To the owners, who orthogonalize, and back.
        lines = self.send_to_owners(rows, by_owner)
        mine = owned[self.rank]
        columns = lines.split([sizes[p] for p in mine], dim=1)
        for p, column in zip(mine, columns):
            whole = column.reshape(-1, p.size(1))  # padding stays 0
            column.copy_(orthogonalize(whole).reshape(column.shape))
        self.send_to_rows(lines, rows, by_owner)

        # Update this rank's rows.
        lr = group["lr"]
        for p, piece in zip(ordered, pieces):
            own = rows_of(p)
            update = piece[:own.numel()].view(own.shape)
            if own.device.type != update.device.type:
                update = to_host(update)
            scale = 0.2 * math.sqrt(max(p.shape))
            own.mul_(1 - lr * group["weight_decay"])
            own.add_(update, alpha=-lr * scale)

    def shard_size(self, p):
        """Elements of a rank's rows of p. All ranks send equally many, so the last ones pad."""
        most_rows = math.ceil(len(p) / self.sharing)
        return most_rows * p.size(1)

    def nesterov(self, p, beta, piece):
        """Add this rank's rows of the gradient to its momentum, and write the direction of the
        update to the beginning of `piece`."""
        state = self.state[p]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p)
        momentum = rows_of(state["momentum_buffer"])
        grad = rows_of(p.grad)
        momentum.lerp_(grad, 1 - beta)
        direction = grad.lerp(momentum, beta)
        direction = direction.flatten().to(piece.dtype)
        if direction.device.type != piece.device.type:
            direction = direction.pin_memory()  # so that the copy need not wait for the GPU
        piece[:len(direction)].copy_(direction, non_blocking=True)

    def send_to_owners(self, rows, by_owner):
        """A line from each rank that shares this copy: its rows of the matrices that this
        rank owns (collective). by_owner: the elements of `rows` that go to each rank."""
        size = by_owner[self.rank]
        first = self.rank // self.sharing * self.sharing  # the first rank of this copy
        to_each = by_owner[first:first + self.sharing]
        start = sum(by_owner[:first])
        sent = rows[start:start + sum(to_each)]
        if self.sharing == 1:
            return sent.view(1, size)
        lines = sent.new_empty(self.sharing, size)
        dist.all_to_all_single(
            lines.view(-1),
            sent,
            output_split_sizes=[size] * self.sharing,
            input_split_sizes=to_each,
            group=self.shard_group,
        )
        return lines

    def send_to_rows(self, lines, rows, by_owner):
        """Fill `rows` with every owner's answer: one line for each rank that shares a copy, in
        every copy (collective)."""
        if self.world == 1:
            return  # `lines` is `rows`
        size = by_owner[self.rank]
        copies = lines.expand(self.world // self.sharing, *lines.shape)
        dist.all_to_all_single(
            rows,
            copies.flatten(),
            output_split_sizes=by_owner,
            input_split_sizes=[size] * self.world,
        )


def rows_of(t):
    """This rank's rows of t; all of them, if t is no DTensor."""
    return t.to_local() if isinstance(t, DTensor) else t


def to_host(t):
    """t in pinned host memory: PyTorch pins the copy if it need not wait for it."""
    copy = t.to("cpu", non_blocking=True)
    torch.cuda.current_stream().synchronize()
    return copy


def orthogonalize(m):
    """m with its singular values moved to between 0.7 and 1.2, by five steps of a
    Newton-Schulz iteration with Jordan's coefficients."""
    tall = m.size(0) > m.size(1)
    x = m.T if tall else m  # so that x @ x.T is the smaller square
    norm = x.norm().clamp(min=1e-7)
    x = x / norm
    for _ in range(5):
        square = x @ x.T
        square = torch.addmm(square, square, square, beta=-4.7750, alpha=2.0315)
        x = torch.addmm(x, square, x, beta=3.4445)
    return x.T if tall else x


def divide(matrices, world):
    """The matrices that each rank owns: the costliest first, to the rank with the least to
    do."""
    owned = [[] for _ in range(world)]
    load = [0] * world
    for m in sorted(matrices, key=cost, reverse=True):
        rank = load.index(min(load))
        owned[rank].append(m)
        load[rank] += cost(m)
    return owned


def cost(m):
    """Multiplications per iteration."""
    short, long = sorted(m.shape)
    return short**2 * (2 * long + short)

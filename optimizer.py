"""
What turns gradients into steps: AdamW, or Muon for the blocks' matrices; the learning rate.

    optimizer = make_optimizer(model, cfg)   # after sharding, before the first forward
    lr = learning_rate_at(step, cfg)

Yours is a torch.optim.Optimizer. When sharded a parameter and its gradient are DTensors, of which a
rank has some rows. Checkpoints keep self.state[p] and nothing else, which its first step makes
whole: tensors of any shape, each under a name, DTensors placed as p or plain ones that are the same
on all ranks. Others could not go on at another world size; the first save refuses them.
"""

import math

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import fsdp
from configurator import DTYPES
from ranks import mean


def make_optimizer(model, cfg):
    """AdamW: matrices and embeddings decay, vectors do not (nanoGPT's groups, in its order). With
    muon the blocks' matrices, or what the model's own `matrices` returns, are a group before them.
    Call it before any forward, which would leave gathered copies as the root's parameters."""
    trained = [p for p in model.parameters() if p.requires_grad]
    blocks = [p for p in model.blocks.parameters() if p.dim() == 2]
    matrices = model.matrices() if hasattr(model, "matrices") else blocks
    hidden = {p: None for p in matrices if p.requires_grad and cfg.optimizer == "muon"}
    decayed = [p for p in trained if p.dim() >= 2 and p not in hidden]
    groups = [{"params": decayed, "weight_decay": cfg.weight_decay},
              {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0}]
    # fused: one kernel, where the other variants make a dozen temporaries as large as the model
    adamw = torch.optim.AdamW(groups, cfg.learning_rate, (cfg.beta1, cfg.beta2), fused=True)
    return Muon(hidden, adamw, cfg) if hidden else adamw


def learning_rate_at(step, cfg):
    """Linear warm-up to learning_rate, cosine to min_lr at lr_decay_iters, then min_lr."""
    if not cfg.decay_lr:
        return cfg.learning_rate
    if step < cfg.warmup_iters:
        return cfg.learning_rate * (step + 1) / (cfg.warmup_iters + 1)
    if step >= cfg.lr_decay_iters:
        return cfg.min_lr
    progress = (step - cfg.warmup_iters) / (cfg.lr_decay_iters - cfg.warmup_iters)
    return cfg.min_lr + 0.5 * (1 + math.cos(math.pi * progress)) * (cfg.learning_rate - cfg.min_lr)


def make_state(optimizer):
    """The state of all parameters, by a step of zeros; its values, and theirs, mean nothing."""
    grads = {p: p.grad for group in optimizer.param_groups for p in group["params"]}
    for p in grads:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for p, grad in grads.items():  # DDP's are views of its buckets
        p.grad = grad


def require_gradients(model, batch, cfg, world):
    """SystemExit unless each rank's batch gives every trained parameter a gradient (collective).
    FSDP2 reduces those that have one: with others on another rank it would sum gradients of
    different parameters, or hang. So ask before the first backward, whose graph shows them."""
    with fsdp.autocast(cfg, world.device):  # not through DDP, which would reduce the next backward
        loss = model(*batch)[1]  # has a name, or torch 2.12 frees the graph
    nodes, seen = [loss.grad_fn], {None}
    for node in nodes:  # the loop extends the list
        parents = {parent for parent, _ in node.next_functions} - seen
        nodes += parents
        seen |= parents
    leaves = {getattr(node, "variable", None) for node in nodes}
    reached = {name for name, p in model.named_parameters() if p in leaves}
    for prefix, unit in model.named_modules():
        if isinstance(unit, FSDPModule):
            unit.unshard()  # the graph ends in gathered parameters
            reached |= {name for name, p in unit.named_parameters(prefix) if p in leaves}
            unit.reshard()
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    share, least = mean(torch.tensor([float(name in reached) for name in trained]), world).min(0)
    if share < 1:
        raise SystemExit(f"{trained[least]} gets a gradient on {share * world.size:.0f} of "
                         f"{world.size} ranks; let the model add 0 * its output, or --freeze it")


class Muon(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024) for the matrices, `adamw` for its own groups. Muon's updates have
    the size of AdamW's (0.2 a number: Liu et al. 2025), so one learning rate serves both.

    An update needs the whole matrix, and a rank has some rows of it and of its momentum. So each
    matrix has an owner: it is sent the rows, orthogonalizes once, and sends the rows back, in two
    all-to-alls a step for all matrices together. The ranks share the work."""

    def __init__(self, matrices, adamw, cfg):
        group = dict(params=matrices, lr=cfg.learning_rate, weight_decay=cfg.weight_decay,
                     momentum=cfg.momentum)
        super().__init__([group, *adamw.param_groups], {})
        adamw.state = self.state
        self.adamw = adamw
        # not in float16: its range is too small for gradients whose scale is gone
        self.dtype = torch.float32 if cfg.dtype == "float16" else DTYPES[cfg.dtype]

    @torch.no_grad()
    def step(self):
        """Update all parameters (all ranks: collective)."""
        self.adamw.step()
        group = self.param_groups[0]
        trained = [p for p in group["params"] if p.grad is not None]
        mesh = getattr(trained[0], "device_mesh", None)
        device = mesh.device_type if mesh else trained[0].device  # for offloaded rows too
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        g = mesh.size(-1) if mesh else 1  # neighbours share a copy of the model
        first = rank // g * g

        # this rank's rows, by owner; the last shards are padded to the size of the first
        shares = divide(trained, world)
        size = {p: math.ceil(len(p) / g) * (p.numel() // len(p)) for share in shares for p in share}
        n = [sum(size[p] for p in share) for share in shares]
        flat = torch.zeros(sum(n), device=device, dtype=self.dtype)
        pieces = dict(zip(size, flat.split(list(size.values()))))
        for p, piece in pieces.items():
            if not self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
            grad, momentum = local(p.grad), local(self.state[p]["momentum_buffer"])
            momentum.lerp_(grad, 1 - group["momentum"])
            piece[:grad.numel()] = grad.lerp(momentum, group["momentum"]).flatten()  # Nesterov's

        # to the owners in this copy, and from the owners to whoever keeps these rows
        mine = flat[sum(n[:first]):sum(n[:first + g])]
        if mesh:
            sent, mine = mine, mine.new_empty(g * n[rank])
            dist.all_to_all_single(mine, sent, [n[rank]] * g, n[first:first + g],
                                   group=mesh.get_group("shard"))
        mine = mine.view(g, n[rank])
        for p, m in zip(shares[rank], mine.split([size[p] for p in shares[rank]], dim=1)):
            m.copy_(orthogonalize(m.reshape(-1, *p.shape[1:])).reshape(m.shape))  # padding stays 0
        if world > 1:
            copies = mine.expand(world // g, g, n[rank]).flatten()
            dist.all_to_all_single(flat, copies, n, [n[rank]] * world)

        for p, piece in pieces.items():
            rate, rows = group["lr"], local(p)
            rows.mul_(1 - rate * group["weight_decay"])
            rows.add_(piece[:rows.numel()].view(rows.shape).to(rows.device),
                      alpha=-rate * 0.2 * math.sqrt(max(p.shape[-2:])))


def orthogonalize(m):
    """m with its singular values moved to between 0.7 and 1.2, by five steps of a Newton-Schulz
    iteration with Jordan's coefficients. Of a stack, each matrix's."""
    if m.dim() > 2:
        return torch.stack([orthogonalize(x) for x in m])
    x = m.T if m.size(0) > m.size(1) else m  # so that x @ x.T is the smaller square
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        square = x @ x.T
        square = torch.addmm(square, square, square, beta=-4.7750, alpha=2.0315)
        x = torch.addmm(x, square, x, beta=3.4445)
    return x.T if m.size(0) > m.size(1) else x


def divide(matrices, world):
    """The matrices that each rank owns: the costliest first, to the rank with the least to do."""
    def cost(m):  # of its products
        short, long = sorted(m.shape[-2:])
        return m.numel() // long * short * (2 * long + short)

    shares, load = [[] for _ in range(world)], [0] * world
    for m in sorted(matrices, key=cost, reverse=True):
        rank = load.index(min(load))
        shares[rank].append(m)
        load[rank] += cost(m)
    return shares


def local(t):
    return t.to_local() if isinstance(t, DTensor) else t

"""
A user's program, copied beside fsdp.py and compare.py, and the mistakes that it may have.
"""

import math

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import activations
import compare
import fsdp


class Block(nn.Module):
    def __init__(self, mistake):
        super().__init__()
        self.mistake = mistake
        self.norm = nn.BatchNorm1d(5) if mistake == "batch norm" else nn.LayerNorm(10)
        self.up = nn.Linear(10, 20)
        self.down = nn.Linear(20, 10)
        self.register_buffer("book", torch.zeros(10))

    def forward(self, x, aux):
        if self.mistake == "counted in a checkpointed block":
            self.book += 1
        h = self.down(F.gelu(self.up(self.norm(x))))
        if self.mistake == "codebook by own batch":
            self.book.lerp_(h.detach().mean((0, 1)), 0.1)
        if self.mistake == "appends to a list":
            aux.append(h.square().mean())
        return x + h * getattr(self.down.weight, "mark", 1.0)


class Gate(nn.Module):
    """It returns a scalar first."""

    def forward(self, x):
        return x.mean(), x


class Words(nn.Module):
    """With buffers of all kinds, and a parameter of one row."""

    def __init__(self, mistake):
        super().__init__()
        self.mistake = mistake
        self.emb = nn.Embedding(11, 10)
        self.blocks = nn.ModuleList(Block(mistake) for _ in range(3))
        self.gate = Gate()
        self.head = nn.Linear(10, 11, bias=False)
        self.scale = nn.Parameter(torch.ones(1))
        self.shift = nn.Parameter(torch.zeros(1))  # softmax does not see it: its gradient is noise
        self.slow = nn.Parameter(torch.ones(11), requires_grad=False)
        self.weights = [self.head.weight]
        self.depth = 3
        self.register_buffer("mask", torch.full((5, 5), -torch.inf).triu(1))
        self.register_buffer("unset", torch.full((2,), torch.nan))
        self.register_buffer("turns", torch.polar(torch.ones(4), torch.arange(4.0)))
        if not mistake:  # DDP and DCP take no sparse ones
            self.register_buffer("graph", torch.eye(3).to_sparse())
        if mistake == "tied by data":
            self.head.weight.data = self.emb.weight.data
        if mistake == "mark on a weight":
            self.blocks[0].down.weight.mark = 3.0

    def stack(self, x, aux):
        for block in self.blocks[:self.depth]:
            x = block(x, aux)
        return x

    def forward(self, tokens):
        _, x = self.gate(self.emb(tokens) * self.scale)
        aux = []
        if self.mistake or not dist.is_initialized():
            x = self.stack(x, aux)
        else:
            x = checkpoint(self.stack, x, aux, use_reentrant=False)  # calls the units' hooks twice
        if self.mistake == "moved in forward":
            with torch.no_grad():
                self.slow.lerp_(self.head.weight.sum(1), 0.1)
        listed = self.mistake == "weights listed in __init__"
        head = self.weights[0] if listed else self.head.weight
        logits = F.linear(x, head) * (1 + sum(aux))
        return logits + self.slow + self.shift


def train(path, mistake="", first=0, last=6):
    """A run with a mistake, or without: twelve samples a step, on any number of ranks. Returns what
    compare.py says of it."""
    is_sharded = dist.is_initialized()
    rank, size = (dist.get_rank(), dist.get_world_size()) if is_sharded else (0, 1)
    torch.manual_seed(rank if mistake == "seed by rank" else 0)
    model = call = Words(mistake)
    if mistake == "optimizer before shard":
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    chosen = set(model.emb.parameters())
    if mistake == "counted in a checkpointed block" and is_sharded:
        activations.checkpoint_activations(model.blocks, "full")
    if is_sharded and "ddp" in mistake:
        call = fsdp.replicate(model)
    elif is_sharded:
        ahead = 1 if "evaluation" in mistake else 0
        fsdp.shard(model, model.blocks, fsdp.make_mesh("cpu"), prefetch_units=ahead)
    if mistake == "drawn after shard":
        nn.init.normal_(model.head.weight)
    if mistake == "a hook on a weight":
        model.head.weight.register_hook(torch.zeros_like)
    if mistake != "optimizer before shard":
        rate = 3e-3 * size if mistake == "rate times ranks" else 3e-3
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    if mistake == "chosen before shard":
        others = [p for p in model.parameters() if p not in chosen]
        slow = [p for p in model.parameters() if p in chosen]
        optimizer = torch.optim.AdamW([{"params": others}, {"params": slow}], lr=3e-3)
    anew = mistake == "scheduler made anew"
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + anew * n))
    if first and mistake == "resumed with gradients":
        call(torch.zeros(2, 5, dtype=torch.long)).sum().backward()
    if first or (is_sharded and mistake == "saved before the first step"):
        weights, state = get_state_dict(model, optimizer)
    if first:
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=f"{path}-saved")
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
        optimizer.zero_grad()
    own_losses = [math.inf]
    outputs = dict(model.blocks.named_children())
    if not is_sharded:
        outputs["of one run"] = model.gate
    compared = compare.Compare(path, model, outputs)
    for step in range(first, last):
        tokens = torch.randint(11, (12, 6), generator=torch.Generator().manual_seed(step))
        mine = tokens[:12 // size] if mistake == "one batch for all ranks" else tokens[rank::size]
        x, y = mine[:, :-1], mine[:, 1:]
        if mistake == "padding":
            y = y.where(torch.arange(5) <= y[:, :1] % 5, -100)
        fsdp.set_grad_sync(call, is_last_micro_batch=True)
        logits = (model if mistake == "inner model under ddp" else call)(x)
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
        if mistake == "a sum":
            loss = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum") / 60
        if mistake == "a variance":
            loss = loss + 3 * logits.mean((1, 2)).var()
        loss.backward()
        if mistake == "part of a gradient":
            model.emb.weight.grad[:7].zero_()
        compared.step(step, optimizer, loss)
        if mistake == "own norms":
            for p in model.head.parameters():
                p.grad.mul_(1 / getattr(p.grad, "_local_tensor", p.grad).norm())
        if mistake == "rate by own loss" and loss.item() > own_losses[-1]:
            optimizer.param_groups[0]["lr"] *= 0.5
        own_losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        if anew:
            scheduler.step()
        if last == 3 and step == 2:
            weights, state = get_state_dict(model, optimizer)
            dcp.save({"model": weights, "optimizer": state}, checkpoint_id=f"{path}-saved")
        with torch.no_grad():
            if mistake == "clamped after a plain forward":
                call(x)
                model.emb.weight.clamp_(-0.2, 0.2)
            if mistake == "data replaced":
                model.blocks[0].up.weight.data = model.blocks[0].up.weight.detach() * 0.5
            if not mistake or mistake == "unit left out of an evaluation":
                model.depth = 2 if mistake else 3
                for p in model.parameters():
                    p.mul_(2)  # other weights, as an average is
                if mistake and is_sharded:  # what `inference` does, but for what is prefetched
                    call(x)
                    model.reshard()
                else:
                    with fsdp.inference(model):
                        call(x)
                for p in model.parameters():
                    p.mul_(0.5)
                model.depth = 3
    return str(compared)

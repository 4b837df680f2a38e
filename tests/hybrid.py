"""
A model unlike the others, which must pass the contract as it is: a gated linear recurrence and
latent attention in turns, one attention more that is called after each block, a second head that in
training predicts the token after the next, a projection that never trains, arguments by keyword,
and dropout under a key of another name.

Sizes: B sequences of T tokens, C = width, L = latent.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch.nn import functional as F

from model import cross_entropy, normal


@dataclass
class ModelConfig:
    block_size: int = 128
    vocab_size: int = 50304
    n_layer: int = 4
    width: int = 30
    latent: int = 12  # width of what keys and values are made from
    kernel: int = 4  # of the convolution before the recurrence
    further: float = 0.3  # weight of the second head's loss
    drop: float = 0.1


class Recurrence(nn.Module):
    """h[t] = a[t] h[t - 1] + (1 - a[t]) v[t], a channel at a time, all positions at once."""

    def __init__(self, config):
        super().__init__()
        C = config.width
        self.conv = nn.Conv1d(C, C, config.kernel, groups=C, padding=config.kernel - 1)
        self.gate = nn.Linear(C, C)
        self.value = nn.Linear(C, C, bias=False)
        self.out = nn.Linear(C, C, bias=False)

    def forward(self, x):
        T = x.size(1)
        x = self.conv(x.mT)[..., :T].mT  # (B, T, C), of the last `kernel` positions
        keep = F.logsigmoid(self.gate(x).float())  # log a
        new = -torch.expm1(keep) * self.value(x).float()
        total = keep.cumsum(dim=1)
        decay = total[:, :, None] - total[:, None]  # (B, T, T, C): from s to t
        later = torch.ones(T, T, dtype=torch.bool, device=x.device).triu(1)
        decay = decay.masked_fill(later[..., None], -math.inf).exp()
        y = (decay * new[:, None]).sum(dim=2)  # (B, T, C)
        return self.out(y.type_as(x))


class LatentAttention(nn.Module):
    """One head."""

    def __init__(self, config):
        super().__init__()
        C = config.width
        self.query = nn.Linear(C, C, bias=False)
        self.down = nn.Linear(C, config.latent, bias=False)
        self.down.requires_grad_(False)  # it stays as it is drawn
        self.norm = nn.RMSNorm(config.latent, 1e-5)
        self.up = nn.Linear(config.latent, 2 * C, bias=False)
        self.out = nn.Linear(C, C, bias=False)

    def forward(self, x):
        q = self.query(x)
        k, v = self.up(self.norm(self.down(x)).type_as(x)).chunk(2, dim=-1)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))


class Block(nn.Module):
    def __init__(self, config, mixer):
        super().__init__()
        self.norm = nn.RMSNorm(config.width, 1e-5)
        self.mixer = mixer(config)
        self.dropout = nn.Dropout(config.drop)

    def forward(self, x, *, position):
        y = self.norm(x) * (1 + position[:, None])
        return x + self.dropout(self.mixer(y))


class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        C = config.width
        self.embedding = nn.Embedding(config.vocab_size, C)
        mixers = [LatentAttention if i % 2 else Recurrence for i in range(config.n_layer)]
        self.blocks = nn.ModuleList(Block(config, mixer) for mixer in mixers)
        self.shared = LatentAttention(config)
        self.norm = nn.RMSNorm(C, 1e-5)
        self.head = nn.Linear(C, config.vocab_size, bias=False)
        self.further = nn.Linear(C, C, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, idx, targets=None):
        x = self.embedding(idx)  # (B, T, C)
        position = torch.arange(idx.size(1), device=idx.device) / self.config.block_size
        for block in self.blocks:
            x = block(x, position=position)  # in fp32, which FSDP casts
            x = x + self.shared(x)
        x = self.norm(x)
        if targets is None:
            return self.head(x[:, [-1]]), None
        logits = self.head(x)
        loss = cross_entropy(logits, targets)
        if self.training:
            further = self.head(self.further(x[:, :-1]))
            loss = loss + self.config.further * cross_entropy(further, targets[:, 1:])
        return logits.detach(), loss

    def initial_value(self, name, shape, seed):
        if name.endswith("norm.weight"):
            return torch.ones(shape)
        if name.endswith("gate.bias"):  # short memories and long ones, the same in each block
            return torch.linspace(0, 3, *shape)
        if name.endswith("bias"):
            return torch.zeros(shape)
        return normal(shape, 0.05, key=(seed, name))

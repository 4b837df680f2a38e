"""
A model unlike the others, which must pass the contract as it is: a convolution and attention in
turns, one attention more that is called after each block, a second head that in training predicts
the token after the next, a projection that never trains, an argument by keyword, and dropout under
a key of another name.

Sizes: B sequences of T tokens, C = width, L = latent.
"""

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
    latent: int = 12  # width of queries, keys and values
    drop: float = 0.1


class Convolution(nn.Conv1d):
    """Of each position and the three before it, a channel at a time."""

    def __init__(self, config):
        super().__init__(config.width, config.width, 4, groups=config.width, padding=3)

    def forward(self, x):
        return super().forward(x.mT)[..., :x.size(1)].mT  # (B, T, C)


class Attention(nn.Module):
    """One head, whose keys are its values."""

    def __init__(self, config):
        super().__init__()
        self.query = nn.Linear(config.width, config.latent, bias=False)
        self.down = nn.Linear(config.width, config.latent, bias=False)
        self.down.requires_grad_(False)  # it stays as it is drawn
        self.up = nn.Linear(config.latent, config.width, bias=False)

    def forward(self, x):
        kv = self.down(x)  # (B, T, L)
        return self.up(F.scaled_dot_product_attention(self.query(x), kv, kv, is_causal=True))


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
        mixers = [Attention if i % 2 else Convolution for i in range(config.n_layer)]
        self.blocks = nn.ModuleList(Block(config, mixer) for mixer in mixers)
        self.shared = Attention(config)
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
            loss = loss + 0.3 * cross_entropy(further, targets[:, 1:])
        return logits.detach(), loss

    def initial_value(self, name, shape, seed):
        if name.endswith("norm.weight"):
            return torch.ones(shape)
        if name.endswith("bias"):
            return torch.zeros(shape)
        return normal(shape, 0.05, key=(seed, name))

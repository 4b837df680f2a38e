"""
A masked language model, which must pass the contract as it is: some tokens of a row are hidden, and
predicted from the mean of all. So it is not causal, and forward draws random numbers, in an
evaluation too. One attribute says that. T is block_size, always.

Sizes: B sequences of T tokens, C = width, V = vocab_size.
"""

from dataclasses import dataclass

import torch
import torch.nn as nn

from model import cross_entropy, normal


@dataclass
class ModelConfig:
    block_size: int = 128
    vocab_size: int = 50304
    n_layer: int = 2
    width: int = 30
    hidden: float = 0.3  # share of the tokens that are hidden


class Model(nn.Module):
    causal = False

    def __init__(self, config):
        super().__init__()
        self.config = config
        C = config.width
        self.embedding = nn.Embedding(config.vocab_size + 1, C)  # the last one: hidden
        self.positions = nn.Embedding(config.block_size, C)
        self.blocks = nn.ModuleList(nn.Linear(C, C) for _ in range(config.n_layer))
        self.head = nn.Linear(C, config.vocab_size, bias=False)

    def forward(self, idx, targets):
        hidden = torch.rand(idx.shape, device=idx.device) < self.config.hidden
        x = self.embedding(idx.where(~hidden, self.config.vocab_size))  # (B, T, C)
        x = x + self.positions.weight  # so no other T fits
        for block in self.blocks:
            x = x + torch.tanh(block(x)).mean(dim=1, keepdim=True)
        logits = self.head(x)  # (B, T, V)
        counts = targets != -1
        total = cross_entropy(logits, idx.where(hidden & counts, -1), reduction="sum")
        # Not by the number of hidden ones: that may be 0, and is another on each rank.
        return logits.detach(), total / (self.config.hidden * counts.sum())

    def initial_value(self, name, shape, seed):
        return normal(shape, 0.05, key=(seed, name))

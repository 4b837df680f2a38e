"""
A mixture of experts in one file: the third model of tests/test_contract.py, a pattern for yours.

A block returns two tensors, an expert's weights are a slice of a stack, and the loss has a second
term. Each token takes its n_active experts out of n_expert; the others' outputs are multiplied by
0 and not left out, so that every expert gets a gradient from every batch.

Architecture: Shazeer et al. 2017; the loss that balances the experts is the Switch Transformer's
(Fedus et al. 2021).
"""

import math
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch.nn import functional as F

from model import GPT, CausalSelfAttention, GPTConfig, normal


@dataclass
class MoEConfig(GPTConfig):
    # --- model moe
    n_expert: int = 4  # in each block
    n_active: int = 2  # of them for each token
    balance: float = 0.01  # weight of the loss that balances the experts

    def __post_init__(self):
        super().__post_init__()
        if not 1 <= self.n_active <= self.n_expert:
            raise ValueError(f"n_active={self.n_active} must be from 1 to n_expert={self.n_expert}")


class Experts(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config, E, C = config, config.n_expert, config.n_embd
        self.router = nn.Linear(C, E, bias=False)
        self.c_fc = nn.Parameter(torch.empty(E, 2 * C, C))  # E matrices, as nn.Linear has them
        self.c_proj = nn.Parameter(torch.empty(E, C, 2 * C))

    def forward(self, x):
        """x (B, T, C) -> the experts' sum (B, T, C), and how unbalanced they are."""
        chances = self.router(x).float().softmax(dim=-1)  # (B, T, E)
        best = chances.topk(self.config.n_active, dim=-1)
        weights = torch.zeros_like(chances).scatter(-1, best.indices, best.values)
        outputs = []
        for e in range(self.config.n_expert):
            y = F.linear(F.gelu(F.linear(x, self.c_fc[e])), self.c_proj[e])
            outputs.append(y * weights[..., e, None].to(y.dtype))
        taken = (weights > 0).float().mean(dim=(0, 1)) / self.config.n_active  # (E,)
        unbalanced = self.config.n_expert * (taken * chances.mean(dim=(0, 1))).sum()
        return sum(outputs), unbalanced


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = Experts(config)

    def forward(self, x, cache=None):
        x = x + self.attn(self.ln_1(x), cache)
        y, unbalanced = self.mlp(self.ln_2(x))
        return x + y, unbalanced


class MoE(GPT):
    def __init__(self, config):
        super().__init__(config)
        self.transformer.h = nn.ModuleList([Block(config) for _ in range(config.n_layer)])

    def forward(self, idx, targets=None, cache=None):
        """idx (B, T) token ids -> (logits, loss), as GPT's."""
        past = 0 if cache is None else cache[0].length
        pos = torch.arange(past, past + idx.size(1), device=idx.device)
        x = self.transformer.wte(idx) + self.transformer.wpe(pos)  # (B, T, C)
        x = self.transformer.drop(x)
        unbalanced = 0.0
        for i, block in enumerate(self.blocks):
            x, of_block = block(x, None if cache is None else cache[i])
            unbalanced = unbalanced + of_block
        x = self.transformer.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits, loss = self.head_loss(x, targets)
        return logits, loss + self.config.balance * unbalanced / self.config.n_layer

    def matrices(self):
        """What Muon updates: the experts' stacks and attention, not the router."""
        return [p for name, p in self.blocks.named_parameters()
                if p.dim() >= 2 and "router" not in name]

    def initial_value(self, name, shape, seed):
        kind = name.split(".")[-1]
        if kind == "c_proj":  # of a stack, the end of a residual branch
            return normal(shape, 0.02 / math.sqrt(2 * self.config.n_layer), (seed, name))
        if kind == "c_fc" or "router" in name:
            return normal(shape, 0.02, (seed, name))
        return super().initial_value(name, shape, seed)


ModelConfig, Model = MoEConfig, MoE

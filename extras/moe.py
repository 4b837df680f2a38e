"""
A mixture of experts in one file: a GPT with several MLPs, experts, in each block.

    python train.py --model=moe config/quickstart.py    # 4 experts, 2 active
    python train.py --model=moe config/quickstart.py --n_expert=8 --n_active=1

A router sends each token to the n_active best of n_expert experts, and adds up their
answers. In training a second term of the loss keeps the experts about equally busy.

Every expert computes every token, and the answers of those not chosen are multiplied by 0.
That takes n_expert / n_active times the products. But no shape depends on the data, so the
model compiles and can be planned, and every expert gets a gradient from every batch. Large
models sort the tokens by expert instead, and put the experts on different GPUs.

Sizes: B sequences of T tokens, C = n_embd, E = n_expert.
Architecture: Shazeer et al. 2017; the loss that balances the experts is the Switch
Transformer's (Fedus et al. 2021).
"""

import math
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch.nn import functional as F

from model import GPT, CausalSelfAttention, GPTConfig, normal


@dataclass
class MoEConfig(GPTConfig):
    n_expert: int = 4  # experts per block
    n_active: int = 2  # experts per token
    balance: float = 0.01  # weight of the loss that balances the experts


class Router(nn.Linear):
    """In fp32 whatever dtype is: rounding would change which experts are the best."""

    def forward(self, x):
        device = "cpu" if x.is_meta else x.device.type  # autocast knows no meta device
        with torch.autocast(device, enabled=False):
            return F.linear(x.float(), self.weight.float())


class Experts(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        E = config.n_expert
        C = config.n_embd
        self.router = Router(C, E, bias=False)
        # Stacks of E matrices (out, in). FSDP cuts them between experts, so with more
        # ranks than experts some ranks keep none.
        self.c_fc = nn.Parameter(torch.empty(E, 2 * C, C))
        self.c_proj = nn.Parameter(torch.empty(E, C, 2 * C))

    def forward(self, x):
        """x (B, T, C) -> the experts' answer (B, T, C), and how unbalanced they are, over all
        tokens: padding of masked data counts too."""
        scores = self.router(x)  # (B, T, E)
        chances = scores.softmax(dim=-1)
        best = chances.topk(self.config.n_active, dim=-1)  # (B, T, n_active)
        weights = torch.zeros_like(chances)  # 0 for the others
        weights = weights.scatter(-1, best.indices, best.values)  # (B, T, E)
        # All matrices at once: the backward of self.c_fc[e] would fill a whole stack with
        # zeros for each expert.
        c_fc = self.c_fc.unbind()
        c_proj = self.c_proj.unbind()
        answer = 0
        for e in range(self.config.n_expert):
            y = F.gelu(F.linear(x, c_fc[e]))  # (B, T, 2 C)
            y = F.linear(y, c_proj[e])  # (B, T, C)
            answer = answer + y * weights[..., e, None].to(y.dtype)

        # 1 if all experts are equally busy, more if few do most. The share of the tokens is
        # a count and has no gradient: it says how hard to push down an expert's chance.
        share = (weights > 0).float().mean(dim=(0, 1)) / self.config.n_active  # (E,)
        chance = chances.mean(dim=(0, 1))  # (E,)
        unbalanced = self.config.n_expert * (share * chance).sum()
        return answer, unbalanced


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
        blocks = [Block(config) for _ in range(config.n_layer)]
        self.transformer.h = nn.ModuleList(blocks)  # instead of GPT's

    def forward(self, idx, targets=None, cache=None):
        """idx (B, T) token ids -> (logits, loss), as GPT's; in training with the second term."""
        past = 0 if cache is None else cache[0].length
        pos = torch.arange(past, past + idx.size(1), device=idx.device)
        x = self.transformer.wte(idx) + self.transformer.wpe(pos)  # (B, T, C)
        x = self.transformer.drop(x)
        unbalanced = 0.0
        caches = cache or [None] * len(self.blocks)
        for block, block_cache in zip(self.blocks, caches):
            x, term = block(x, block_cache)
            unbalanced = unbalanced + term
        x = self.transformer.ln_f(x)
        if targets is None:
            last = x[:, -1:, :]  # (B, 1, C): generation needs no other
            return self.lm_head(last), None
        logits, loss = self.head_loss(x, targets)
        if self.training:  # an evaluation reports the cross-entropy alone
            loss = loss + self.config.balance * unbalanced / self.config.n_layer
        return logits, loss

    def matrices(self):
        """Muon's parameters: the experts' stacks and attention, not the router."""
        params = self.blocks.named_parameters()
        return [p for name, p in params if p.dim() >= 2 and "router" not in name]

    def initial_value(self, name, shape, seed):
        """As GPT's, for stacks too."""
        kind = name.split(".")[-1]
        if kind == "c_proj":  # a stack at the end of a residual branch
            std = 0.02 / math.sqrt(2 * self.config.n_layer)
            return normal(shape, std, key=(seed, name))
        if kind == "c_fc" or "router" in name:
            return normal(shape, 0.02, key=(seed, name))
        return super().initial_value(name, shape, seed)


# The names that --model looks for.
ModelConfig = MoEConfig
Model = MoE

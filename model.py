"""
The GPT, and nothing about parallelism: GPT-2's architecture in plain PyTorch, with nanoGPT's names.

    from model import GPT, GPTConfig
    model = GPT(GPTConfig(n_layer=4, n_head=4, n_embd=128))   # PyTorch's values, not yet GPT-2's
    logits, loss = model(idx, targets)

This is also the pattern of a model file (`--model=NAME` takes NAME.py), and `python -m pytest
tests/test_contract.py --model=NAME` checks yours. It defines ModelConfig, a dataclass whose fields
become keys of the run (block_size, vocab_size and n_layer among them), and Model, an nn.Module with
    config                           its ModelConfig
    blocks                           the repeated layers in forward order: FSDP's units
    forward(idx, targets, cache)     -> (logits, loss); cache, optional, is only for sample.py
    initial_value(name, shape, seed) -> the whole starting value of a parameter
    head_loss(x, targets)            as GPT's, with its attribute loss_chunks (both optional)
    matrices()                       -> parameters for Muon; if absent the blocks' 2-D ones
Parameters are registered in the order in which forward uses them; there are no buffers, which
nobody would shard or fill. Every batch gives every parameter that trains a gradient, as all ranks
reduce the same ones: where an expert has no tokens, add 0 * its output. train.py builds the model
on the meta device (names and shapes, no memory), shards it, and then fills it with initial_value.

Sizes: B sequences of T tokens, C = n_embd, nh heads of hs = C / nh, V = vocab_size.
Architecture: Radford et al. 2019 (GPT-2): pre-LayerNorm, learned positions, GELU, tied head.
"""

import hashlib
import math
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


@dataclass
class GPTConfig:
    # --- model gpt2
    block_size: int = 1024  # context length in tokens
    vocab_size: int = 50304  # if the data has no meta.json; GPT-2's, padded to 64s
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768  # width; a multiple of n_head
    dropout: float = 0.0  # 0 to pre-train; 0.1 or more to fine-tune, or for little data
    bias: bool = False  # True: in Linear and LayerNorm, as GPT-2; False is a bit better and faster

    def __post_init__(self):
        for key in ("block_size", "vocab_size", "n_layer", "n_head", "n_embd"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key}={getattr(self, key)} must be at least 1")
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd={self.n_embd} must be a multiple of n_head={self.n_head}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout} must be at least 0 and below 1")


class CausalSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.n_head = config.n_head
        self.dropout = config.dropout
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)  # q, k, v
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.resid_dropout = nn.Dropout(config.dropout)

    def forward(self, x, cache=None):
        B, T, C = x.size()
        # unbind, not permute: its backward writes one contiguous gradient for c_attn
        qkv = self.c_attn(x).view(B, T, 3, self.n_head, C // self.n_head).unbind(2)
        q, k, v = (t.transpose(1, 2) for t in qkv)  # (B, nh, T, hs) each
        if cache is not None:
            k, v = cache.extend(k, v)
        y = attend(q, k, v, self.dropout if self.training else 0.0)  # (B, nh, T, hs)
        y = y.transpose(1, 2).reshape(B, T, C)  # heads side by side
        return self.resid_dropout(self.c_proj(y))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        # GPT-2's tanh form; nanoGPT's exact GELU differs by about 1e-3 in the loss
        return self.dropout(self.c_proj(F.gelu(self.c_fc(x), approximate="tanh")))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x, cache=None):
        x = x + self.attn(self.ln_1(x), cache)
        x = x + self.mlp(self.ln_2(x))
        return x


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.loss_chunks = 0  # the key of this name sets it
        self.transformer = nn.ModuleDict(dict(
            wte=nn.Embedding(config.vocab_size, config.n_embd),
            wpe=nn.Embedding(config.block_size, config.n_embd),
            drop=nn.Dropout(config.dropout),
            h=nn.ModuleList([Block(config) for _ in range(config.n_layer)]),
            ln_f=nn.LayerNorm(config.n_embd, bias=config.bias),
        ))
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight  # tied: one tensor under two names

    @property
    def blocks(self):
        return self.transformer.h

    def forward(self, idx, targets=None, cache=None):
        """idx (B, T) token ids -> (logits, loss). With targets (B, T; -1 is ignored): logits
        (B, T, V), detached, and the mean cross-entropy in fp32. Without: of the last position, and
        None. cache: a sample.KVCache per block; once it holds something, idx is one token (B, 1).
        """
        past = 0 if cache is None else cache[0].length
        T = idx.size(1)
        if past + T > self.config.block_size:
            raise ValueError(f"{past + T} tokens do not fit block_size={self.config.block_size}")
        pos = torch.arange(past, past + T, device=idx.device)
        x = self.transformer.wte(idx) + self.transformer.wpe(pos)  # (B, T, C)
        x = self.transformer.drop(x)
        for i, block in enumerate(self.blocks):
            x = block(x, None if cache is None else cache[i])
        x = self.transformer.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None  # generation needs the last position only
        return self.head_loss(x, targets)

    def head_loss(self, x, targets):
        """x (B, T, C), targets (B, T) -> logits (B, T, V), and the mean loss over targets but -1.
        With loss_chunks=N: None, and the loss in N pieces of the sequence, each computed again in
        backward. (Not torch 2.13's F.linear_cross_entropy: it breaks graphs and fp16's scaling.)"""
        if not self.loss_chunks:
            logits = self.lm_head(x)
            # detached, or a compiled backward would add up a gradient of zeros for them
            return logits.detach(), cross_entropy(logits, targets)

        def sum_loss(x, targets):
            return cross_entropy(self.lm_head(x), targets, reduction="sum")

        total = 0.0
        for piece in zip(*(t.chunk(self.loss_chunks, dim=1) for t in (x, targets))):
            total += checkpoint(sum_loss, *piece, use_reentrant=False, preserve_rng_state=False)
        return None, total / (targets != -1).sum()

    def initial_value(self, name, shape, seed):
        """The whole starting value of parameter `name`: fp32, on the CPU, of (seed, name) alone, so
        that every world size, strategy and device has the same. DTensor's do not promise it."""
        module, kind = name.split(".")[-2:]
        if kind == "bias":
            return torch.zeros(shape)
        if module in ("ln_1", "ln_2", "ln_f"):
            return torch.ones(shape)
        if module == "c_proj":  # the end of a residual branch
            return normal(shape, 0.02 / math.sqrt(2 * self.config.n_layer), (seed, name))
        if module in ("wte", "wpe", "lm_head", "c_attn", "c_fc"):
            return normal(shape, 0.02, (seed, name))
        raise ValueError(f"{name} has no initial value: add it to initial_value")


ModelConfig, Model = GPTConfig, GPT  # the names that --model looks for

# ---------- what other model files share: attention, loss, random numbers -----


def attend(q, k, v, dropout):
    """Causal attention: q, k, v (B, nh, T, hs); k and v are longer where a cache had some. They
    may have fewer heads: each then serves several of q's (grouped-query attention)."""
    B, nh, T, hs = q.size()
    explicit = explicit_is_faster(q.device.type, q.dtype, T)
    if explicit or q.dtype != torch.bfloat16:  # only flash is sure to group heads, in bf16
        k, v = (t.repeat_interleave(nh // t.size(1), 1) if t.size(1) < nh else t for t in (k, v))
    if explicit:
        mask = torch.full((T, T), -math.inf, dtype=q.dtype).triu(1)
        q, k, v = (t.reshape(B * nh, T, hs) for t in (q, k, v))
        scores = torch.baddbmm(mask, q, k.transpose(1, 2), alpha=1 / math.sqrt(hs))  # (B nh, T, T)
        weights = F.dropout(F.softmax(scores, dim=-1), dropout)
        return torch.bmm(weights, v).view(B, nh, T, hs)
    return F.scaled_dot_product_attention(q, k, v, is_causal=T > 1, dropout_p=dropout,
                                          enable_gqa=k.size(1) < nh)


def explicit_is_faster(device_type, dtype, T):
    # on CPUs in bf16 attention that is written out takes 9%, 20% and 45% of the fused kernel's time
    # at T = 64, 128 and 256 (AMX); from T = 512 on, and in fp32, it is slower
    return device_type == "cpu" and dtype == torch.bfloat16 and 1 < T <= 256


def cross_entropy(logits, targets, reduction="mean"):
    """In fp32: a bf16 sum over V loses digits."""
    logits = logits.float().view(-1, logits.size(-1))
    return F.cross_entropy(logits, targets.reshape(-1), ignore_index=-1, reduction=reduction)


def normal(shape, std, key):
    generator = torch.Generator().manual_seed(derive_seed(*key))
    return torch.empty(shape).normal_(0.0, std, generator=generator)


def derive_seed(*key):
    """A 63-bit seed from any printable key, such as (seed, step, micro), the same everywhere."""
    return int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:8], "little") >> 1

"""
The GPT, without any parallelism: GPT-2's architecture in plain PyTorch, with nanoGPT's
names.

    from model import GPT, GPTConfig
    model = GPT(GPTConfig(n_layer=4, n_head=4, n_embd=128))  # PyTorch's initial values
    logits, loss = model(idx, targets)

Sizes: B sequences of T tokens, C = n_embd, nh heads of hs = C / nh, V = vocab_size.
Architecture: Radford et al. 2019 (GPT-2): pre-LayerNorm, learned positions, GELU, a tied
head.

For another model, write a file like this one (docs/model_file.md): `--model=NAME` loads NAME.py
next to it.
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
    block_size: int = 1024  # context length in tokens
    vocab_size: int = 50304  # if the data has no meta.json: GPT-2's, padded to a multiple of 64
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768  # width; a multiple of n_head
    dropout: float = 0.0  # 0 for pre-training; 0.1 or more for fine-tuning or little data
    bias: bool = False  # in Linear and LayerNorm. True: as in GPT-2; False: a bit better and faster

    def __post_init__(self):
        if self.n_embd % self.n_head:
            raise ValueError(
                f"n_embd={self.n_embd} must be a multiple of n_head={self.n_head}")


class CausalSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        C = config.n_embd
        self.n_head = config.n_head
        self.dropout = config.dropout
        # Queries, keys and values in one product.
        self.c_attn = nn.Linear(C, 3 * C, bias=config.bias)
        self.c_proj = nn.Linear(C, C, bias=config.bias)
        self.resid_dropout = nn.Dropout(config.dropout)

    def forward(self, x, cache=None):
        B, T, C = x.size()
        hs = C // self.n_head
        qkv = self.c_attn(x)  # (B, T, 3 C)
        qkv = qkv.view(B, T, 3, self.n_head, hs)
        # unbind, not permute: its backward writes one contiguous gradient for c_attn.
        q, k, v = [t.transpose(1, 2) for t in qkv.unbind(2)]  # (B, nh, T, hs) each
        if cache is not None:
            k, v = cache.extend(k, v)
        dropout = self.dropout if self.training else 0.0
        y = attend(q, k, v, dropout)  # (B, nh, T, hs)
        y = y.transpose(1, 2)
        y = y.reshape(B, T, C)  # heads side by side
        y = self.c_proj(y)  # (B, T, C)
        return self.resid_dropout(y)


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        C = config.n_embd
        self.c_fc = nn.Linear(C, 4 * C, bias=config.bias)
        self.c_proj = nn.Linear(4 * C, C, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        x = self.c_fc(x)  # (B, T, 4 C)
        # GPT-2's tanh form. nanoGPT's exact GELU differs by about 1e-3 in the loss.
        x = F.gelu(x, approximate="tanh")
        x = self.c_proj(x)  # (B, T, C)
        return self.dropout(x)


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        C = config.n_embd
        self.ln_1 = nn.LayerNorm(C, bias=config.bias)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(C, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x, cache=None):
        x = x + self.attn(self.ln_1(x), cache)
        x = x + self.mlp(self.ln_2(x))
        return x


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.loss_chunks = 0  # set from the config key; see head_loss
        V = config.vocab_size
        C = config.n_embd
        blocks = [Block(config) for _ in range(config.n_layer)]
        self.transformer = nn.ModuleDict(dict(
            wte=nn.Embedding(V, C),
            wpe=nn.Embedding(config.block_size, C),
            drop=nn.Dropout(config.dropout),
            h=nn.ModuleList(blocks),
            ln_f=nn.LayerNorm(C, bias=config.bias),
        ))
        self.lm_head = nn.Linear(C, V, bias=False)
        # The head is the embedding: one tensor under two names.
        self.transformer.wte.weight = self.lm_head.weight

    @property
    def blocks(self):
        return self.transformer.h

    def forward(self, idx, targets=None, cache=None):
        """idx (B, T) token ids -> (logits, loss).

        With targets (B, T), where -1 is ignored: logits (B, T, V), detached, and their mean
        cross-entropy in fp32. Without: logits (B, 1, V) of the last position, and None.
        cache: one sample.KVCache per block; once they are filled, idx must be a single token.
        """
        past = 0 if cache is None else cache[0].length
        pos = torch.arange(past, past + idx.size(1), device=idx.device)  # (T,)
        x = self.transformer.wte(idx) + self.transformer.wpe(pos)  # (B, T, C)
        x = self.transformer.drop(x)
        caches = cache or [None] * len(self.blocks)
        for block, block_cache in zip(self.blocks, caches):
            x = block(x, block_cache)
        x = self.transformer.ln_f(x)
        if targets is None:
            last = x[:, -1:, :]  # (B, 1, C): generation needs only the last position
            return self.lm_head(last), None
        return self.head_loss(x, targets)

    def head_loss(self, x, targets):
        """x (B, T, C), targets (B, T) -> logits (B, T, V) and the loss.

        With loss_chunks=N it computes the loss over N pieces of the sequence and recomputes each
        in backward. The logits are None, since they never all exist at once.
        """
        if not self.loss_chunks:
            logits = self.lm_head(x)
            loss = cross_entropy(logits, targets)
            # Detach, or a compiled backward would accumulate a gradient of zeros for them.
            return logits.detach(), loss

        def sum_loss(x, targets):
            return cross_entropy(self.lm_head(x), targets, reduction="sum")

        # Not F.linear_cross_entropy: in torch 2.13 it breaks graphs and fp16's loss scaling.
        total = 0.0
        pieces = zip(x.chunk(self.loss_chunks, dim=1), targets.chunk(self.loss_chunks, dim=1))
        for piece in pieces:
            total += checkpoint(sum_loss, *piece, use_reentrant=False)
        return None, total / (targets != -1).sum()

    def initial_value(self, name, shape, seed):
        """The starting value of parameter `name`: fp32, on the CPU. It depends only on the seed
        and the name, so all world sizes and devices start from the same model. value[:] draws
        all of it, value[a:b] only those rows.
        """
        module, kind = name.split(".")[-2:]
        if kind == "bias" and len(shape) == 1:  # not a matrix of that name
            return torch.zeros(shape)
        if module in ("ln_1", "ln_2", "ln_f"):
            return torch.ones(shape)
        if module == "c_proj":  # the end of a residual branch
            std = 0.02 / math.sqrt(2 * self.config.n_layer)
            return normal(shape, std, key=(seed, name))
        if module in ("wte", "wpe", "lm_head", "c_attn", "c_fc"):
            return normal(shape, 0.02, key=(seed, name))
        raise ValueError(f"{name} has no initial value: add it to initial_value")


# The names that --model looks for.
ModelConfig = GPTConfig
Model = GPT


# ---------- shared by other model files: attention, loss, random numbers ----------


def attend(q, k, v, dropout):
    """Causal attention of q (B, nh, T, hs) to k and v -> (B, nh, T, hs). k and v are longer than T
    if a cache holds earlier positions, and then T is 1."""
    # A single new token sees the whole cache.
    return F.scaled_dot_product_attention(q, k, v, is_causal=q.size(2) > 1, dropout_p=dropout)


def cross_entropy(logits, targets, reduction="mean"):
    """Ignores targets of -1. Computes in fp32, since a sum over V in bf16 loses precision."""
    V = logits.size(-1)
    return F.cross_entropy(
        logits.float().view(-1, V),  # (B T, V)
        targets.reshape(-1),
        ignore_index=-1,
        reduction=reduction,
    )


class normal:
    """Normally distributed numbers, drawn when sliced: value[:] is the whole tensor, value[a:b]
    only those rows. They depend only on `key` (DTensor's own would depend on the mesh).

    A rank needn't draw the other ranks' rows: the numbers come in chunks of rows, and each chunk
    has its own generator.
    """

    chunk = 2**20  # numbers, or one row if that is more; changing it changes the numbers

    def __init__(self, shape, std, key):
        self.shape = tuple(shape)
        self.std = std
        self.seed = derive_seed(*key)

    def __getitem__(self, rows):
        n, *row = self.shape
        first, last, _ = rows.indices(n)
        value = torch.empty(last - first, *row)
        height = max(1, self.chunk // math.prod(row))  # rows per chunk
        chunks = range(first // height, math.ceil(last / height))
        for i in chunks:
            start = i * height
            end = min(start + height, n)
            generator = torch.Generator().manual_seed(self.seed + i)
            drawn = torch.normal(0.0, self.std, (end - start, *row), generator=generator)
            # Rows start .. end - 1 are drawn: copy the requested ones.
            a = max(first, start)
            b = min(last, end)
            asked = drawn[a - start:b - start]
            value[a - first:b - first] = asked
        return value


def derive_seed(*key):
    """A 63-bit seed from any printable key, such as (seed, step, micro)."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1

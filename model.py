"""
The GPT, and nothing about parallelism: GPT-2's architecture in plain PyTorch, with nanoGPT's names.

    from model import GPT, GPTConfig
    model = GPT(GPTConfig(n_layer=4, n_head=4, n_embd=128))
    model.init_weights(seed=1337)
    logits, loss = model(idx, targets)

It is built on the meta device by fsdp.py (`with torch.device("meta")`), which shards it first and gives
it memory and values afterwards; so the constructor creates no values, and there are no buffers: a buffer is
not sharded, and `to_empty` would fill it with garbage.

Sizes in the comments: B sequences, T tokens each, C = n_embd, nh heads of hs = C / nh, V = vocab_size.
Architecture: Radford et al. 2019 (GPT-2); pre-LayerNorm, learned positions, tanh-GELU, tied head.
"""

import hashlib
import math
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch.nn import functional as F


@dataclass
class GPTConfig:
    block_size: int = 1024
    vocab_size: int = 50304  # GPT-2's 50257, rounded up to a multiple of 64: tensor cores like round sizes
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    bias: bool = True  # True: biases in Linears and LayerNorms, like GPT-2. False: a bit better and faster

    def __post_init__(self):
        for key in ("block_size", "vocab_size", "n_layer", "n_head", "n_embd"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key}={getattr(self, key)}: must be at least 1")
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd={self.n_embd} does not divide by n_head={self.n_head}: every head has n_embd / n_head channels")


class KVCache:
    """Keys and values that one layer has already computed, each (B, nh, t, hs); for generation only."""

    def __init__(self):
        self.k = self.v = None

    def extend(self, k, v):
        if self.k is not None:
            k, v = torch.cat((self.k, k), dim=2), torch.cat((self.v, v), dim=2)
        self.k, self.v = k, v
        return k, v


def explicit_attention(device_type, dtype, T):
    """
    Is attention written out faster than PyTorch's fused kernel? On CPUs in bf16, whose kernel is slow (backward above all):
    at T = 64 / 128 / 256 it took 0.09 / 0.2 / 0.45 of its time on a CPU with AMX. From T = 512 on the T x T matrix
    costs more than it saves; in fp32 always.
    """
    return device_type == "cpu" and dtype == torch.bfloat16 and 1 < T <= 256


def attend(q, k, v, dropout):
    """Causal attention: q (B, nh, T, hs) against k and v of the same length, or one new q (T = 1) against all that a cache holds."""
    B, nh, T, hs = q.size()
    if explicit_attention(q.device.type, q.dtype, T):
        mask = torch.full((T, T), -math.inf, dtype=q.dtype).triu(1)
        scores = torch.baddbmm(mask, q.reshape(-1, T, hs), k.reshape(-1, T, hs).transpose(1, 2), alpha=1 / math.sqrt(hs))
        return torch.bmm(F.dropout(F.softmax(scores, dim=-1), dropout), v.reshape(-1, T, hs)).view(B, nh, T, hs)
    return F.scaled_dot_product_attention(q, k, v, is_causal=T > 1, dropout_p=dropout)


def gelu(x):
    """GPT-2's tanh-GELU (nanoGPT uses the exact one: a difference of about 1e-3 in the loss)."""
    if torch.compiler.is_compiling() and x.device.type == "cpu":
        # the same function, as 0.5 (1 + tanh u) = sigmoid(2 u): compiled for a CPU, exp takes a third of tanh's time
        u = x.float()
        return (u * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (u + 0.044715 * u * u * u))).to(x.dtype)
    return F.gelu(x, approximate="tanh")


class CausalSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)  # q, k, v in one product
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.resid_dropout = nn.Dropout(config.dropout)
        self.n_head, self.dropout = config.n_head, config.dropout

    def forward(self, x, cache=None):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).view(B, T, 3, self.n_head, C // self.n_head).permute(2, 0, 3, 1, 4)  # (B, nh, T, hs) each
        if cache is not None:
            k, v = cache.extend(k, v)
        y = attend(q, k, v, self.dropout if self.training else 0.0)  # (B, nh, T, hs)
        y = y.transpose(1, 2).reshape(B, T, C)  # heads side by side again
        return self.resid_dropout(self.c_proj(y))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        return self.dropout(self.c_proj(gelu(self.c_fc(x))))


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
        self.transformer = nn.ModuleDict(dict(
            wte=nn.Embedding(config.vocab_size, config.n_embd),
            wpe=nn.Embedding(config.block_size, config.n_embd),
            drop=nn.Dropout(config.dropout),
            h=nn.ModuleList([Block(config) for _ in range(config.n_layer)]),
            ln_f=nn.LayerNorm(config.n_embd, bias=config.bias),
        ))
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight  # tied: one tensor under two names

    @torch.no_grad()
    def init_weights(self, seed, write=lambda p, full: p.copy_(full)):
        """Set every parameter to `initial_value`; `write(parameter, full_value)` stores it (fsdp.py keeps its rows)."""
        for name, p in self.named_parameters():
            write(p, initial_value(name, p.shape, self.config, seed))

    def flops_per_token(self):
        """FLOPs of forward and backward for one token (PaLM, appendix B): 6 for each weight in a product, and 12 C T a layer for attention."""
        c = self.config
        n = sum(p.numel() for p in self.parameters()) - self.transformer.wpe.weight.numel()  # wpe is only looked up
        return 6 * n + 12 * c.n_layer * c.n_embd * c.block_size

    def forward(self, idx, targets=None, cache=None):
        """
        idx (B, T) token ids -> (logits, loss).

        With targets (B, T; -1 is ignored): logits (B, T, V) and the mean cross-entropy, in fp32 whatever the
        compute type. Without: logits of the last position only, (B, 1, V), and None.
        cache: one KVCache a layer; idx then continues what the cache holds.
        """
        B, T = idx.size()
        past = 0 if cache is None or cache[0].k is None else cache[0].k.size(2)
        if past + T > self.config.block_size:
            raise ValueError(f"a sequence of {past + T} tokens is longer than block_size={self.config.block_size}")
        pos = torch.arange(past, past + T, device=idx.device)
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(pos))  # (B, T, C)
        for i, block in enumerate(self.transformer.h):
            x = block(x) if cache is None else block(x, cache[i])
        x = self.transformer.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None  # generation needs the last position only
        logits = self.lm_head(x)  # (B, T, V)
        # float(): a bf16 sum over the vocabulary would lose most of its digits
        loss = F.cross_entropy(logits.float().view(-1, logits.size(-1)), targets.reshape(-1), ignore_index=-1)
        return logits, loss

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None, vocab_size=None, generator=None, use_cache=True):
        """
        Continue idx (B, T) by max_new_tokens sampled tokens; returns (B, T + max_new_tokens).

        temperature 0 takes the likeliest token. vocab_size: the tokenizer's real size, so that the rows which pad
        the vocabulary are never drawn. When the context is full it restarts from its last half: positions are
        learned and absolute, so a sliding window would invalidate the cache at every token; this way the cost
        stays linear in length, and the result does not depend on use_cache.
        Under FSDP every rank must call it with the same idx and an equally seeded generator: it gathers weights.
        """
        context, cache = idx[:, -self.config.block_size:], None
        for _ in range(max_new_tokens):
            if context.size(1) > self.config.block_size:
                context, cache = context[:, -max(1, self.config.block_size // 2):], None
            if use_cache and cache is None:
                cache, new = [KVCache() for _ in self.transformer.h], context
            else:
                new = context[:, -1:] if use_cache else context
            logits = self(new, cache=cache)[0][:, -1, :vocab_size].float()  # (B, V)
            if temperature == 0:
                token = logits.argmax(dim=-1, keepdim=True)
            else:
                if top_k:
                    kth = logits.topk(min(top_k, logits.size(-1))).values[:, [-1]]
                    logits = logits.masked_fill(logits < kth, -math.inf)
                token = torch.multinomial(F.softmax(logits / temperature, dim=-1), num_samples=1, generator=generator)
            idx, context = torch.cat((idx, token), dim=1), torch.cat((context, token), dim=1)
        return idx


# -----------------------------------------------------------------------------
# initialization: all of it


def derive_seed(*key):
    """A 63-bit seed from any printable key, the same on every machine; (seed, 'name') and (seed, step, rank) never collide in practice."""
    return int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:8], "little") >> 1


def initial_value(name, shape, config, seed):
    """
    The full starting value (fp32, on CPU) of the parameter `name`, a function of (seed, name) alone.

    | parameter                              | value                          |
    |----------------------------------------|--------------------------------|
    | c_proj.weight (end of a residual branch) | normal, 0.02 / sqrt(2 n_layer) |
    | every other Linear and Embedding weight | normal, 0.02                   |
    | LayerNorm weight                       | 1                              |
    | every bias                             | 0                              |

    Drawn whole and on the CPU even if a rank keeps a few rows: this is what makes a model independent of the
    world size, the strategy and the device. (DTensor's own random ops are not: FSDP2 gives no such promise.)
    Raises ValueError for a name that the table does not cover.
    """
    module, _, kind = name.rpartition(".")
    module = module.rpartition(".")[2]
    if kind == "bias":
        return torch.zeros(shape)
    if module in ("ln_1", "ln_2", "ln_f"):
        return torch.ones(shape)
    if module in ("wte", "wpe", "lm_head", "c_attn", "c_fc", "c_proj"):
        std = 0.02 / math.sqrt(2 * config.n_layer) if module == "c_proj" else 0.02
        return torch.empty(shape).normal_(0.0, std, generator=torch.Generator().manual_seed(derive_seed(seed, name)))
    raise ValueError(f"no initial value for parameter {name}: add it to the table in model.initial_value")

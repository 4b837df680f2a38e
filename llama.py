"""
Llama in one file: Llama 1 to 3, TinyLlama, SmolLM2, and Qwen3's dense models. `--model=llama`.

    python train.py --model=llama --n_layer=4 --n_embd=144 --n_inner=384    # from scratch
    python train.py config/finetune_smollm2.py                              # from Hugging Face's

A second model by the contract in model.py, with Hugging Face's names; a fork can delete it.

Sizes: B sequences of T tokens, C = n_embd, nh query heads and nkv key-value heads of hs, V tokens.
Architecture: Touvron et al. 2023 (Llama), Dubey et al. 2024 (Llama 3): RMSNorm before each part,
rotary positions, grouped-query attention, SwiGLU, no biases.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch.nn import functional as F

from model import GPT, attend, normal


@dataclass
class LlamaConfig:
    # --- model llama; the defaults are SmolLM2-135M's
    block_size: int = 2048  # context length in tokens
    vocab_size: int = 49152  # if the data has no meta.json
    n_layer: int = 30
    n_head: int = 9
    n_kv_head: int = 3  # heads of keys and values; n_head / n_kv_head query heads share one
    n_embd: int = 576  # width
    n_inner: int = 1536  # width of the MLP, about 8/3 n_embd
    head_dim: int = 0  # size of a head; 0: n_embd / n_head
    norm_eps: float = 1e-5  # under RMSNorm's root
    rope_theta: float = 100000.0  # base of the rotary wavelengths: 1e4 for Llama 2, 5e5 for Llama 3
    rope_factor: float = 1.0  # stretches long wavelengths: 8 for Llama 3.1 and 3.3, 32 for 3.2
    tie_embeddings: bool = True  # the head is the embedding, as in small models
    qk_norm: bool = False  # RMSNorm on each head's queries and keys: Qwen3

    def __post_init__(self):
        for key in LlamaConfig.__dataclass_fields__:
            least = 0 if key in ("head_dim", "norm_eps", "tie_embeddings", "qk_norm") else 1
            if getattr(self, key) < least:
                raise ValueError(f"{key}={getattr(self, key)} must be at least {least}")
        for key, part in (("n_embd", "n_head"), ("n_head", "n_kv_head")):
            value, divisor = getattr(self, key), getattr(self, part)
            if value % divisor and not (part == "n_head" and self.head_dim):
                raise ValueError(f"{key}={value} must be a multiple of {part}={divisor}")
        if head_size(self) % 2:
            raise ValueError(f"head_dim={head_size(self)} must be even: pairs are rotated")


def head_size(config):
    return config.head_dim or config.n_embd // config.n_head


def rotation(start, T, hs, config, device):
    """Cosines and sines of positions start .. start + T - 1: (T, hs / 2) each, in fp32. No table,
    which would be a buffer, and no argument of blocks, which FSDP's policy would cast to bf16."""
    frequency = 1.0 / config.rope_theta ** (torch.arange(0, hs, 2, device=device).float() / hs)
    if config.rope_factor > 1:  # Llama 3.1: divide the low frequencies, blend between 2048 and 8192
        turns = 8192 * frequency / (2 * math.pi)  # in the context that Llama 3 was trained with
        keep = ((turns - 1) / (4 - 1)).clamp(0, 1)  # 0 below one turn, 1 above four
        frequency = (1 - keep) * frequency / config.rope_factor + keep * frequency
    angles = torch.arange(start, start + T, device=device).float()[:, None] * frequency
    return angles.cos(), angles.sin()


def rotate(x, cos, sin):
    """x (B, nh, T, hs), each (x[i], x[i + hs / 2]) turned by its angle: Hugging Face's pairs."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config, hs = config, head_size(config)
        self.q_proj = nn.Linear(config.n_embd, config.n_head * hs, bias=False)
        self.k_proj = nn.Linear(config.n_embd, config.n_kv_head * hs, bias=False)
        self.v_proj = nn.Linear(config.n_embd, config.n_kv_head * hs, bias=False)
        if config.qk_norm:
            self.q_norm = nn.RMSNorm(hs, config.norm_eps)
            self.k_norm = nn.RMSNorm(hs, config.norm_eps)
        self.o_proj = nn.Linear(config.n_head * hs, config.n_embd, bias=False)

    def forward(self, x, cache=None):
        B, T, _ = x.size()
        hs = head_size(self.config)
        q, k, v = (f(x).view(B, T, -1, hs) for f in (self.q_proj, self.k_proj, self.v_proj))
        if self.config.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (B, nh, T, hs), twice (B, nkv, T, hs)
        cos, sin = rotation(cache.length if cache else 0, T, hs, self.config, x.device)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if cache is not None:
            k, v = cache.extend(k, v)
        y = attend(q, k, v, 0.0)  # (B, nh, T, hs)
        return self.o_proj(y.transpose(1, 2).reshape(B, T, -1))  # heads side by side


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.n_embd, config.n_inner, bias=False)
        self.up_proj = nn.Linear(config.n_embd, config.n_inner, bias=False)
        self.down_proj = nn.Linear(config.n_inner, config.n_embd, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.n_embd, config.norm_eps)  # fp32 inside
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.n_embd, config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x, cache=None):
        x = x + self.self_attn(self.input_layernorm(x), cache)
        x = x + self.mlp(self.post_attention_layernorm(x))
        return x


class Llama(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.loss_chunks = 0  # for head_loss
        self.model = nn.ModuleDict(dict(
            embed_tokens=nn.Embedding(config.vocab_size, config.n_embd),
            layers=nn.ModuleList([Block(config) for _ in range(config.n_layer)]),
            norm=nn.RMSNorm(config.n_embd, config.norm_eps),
        ))
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    @property
    def blocks(self):
        return self.model.layers

    def forward(self, idx, targets=None, cache=None):
        """idx (B, T) token ids -> (logits, loss), as GPT's."""
        past = 0 if cache is None else cache[0].length
        total = past + idx.size(1)
        if total > self.config.block_size:
            raise ValueError(f"{total} tokens do not fit block_size={self.config.block_size}")
        x = self.model.embed_tokens(idx)  # (B, T, C)
        for i, block in enumerate(self.blocks):
            x = block(x, None if cache is None else cache[i])
        x = self.model.norm(x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None  # generation needs the last position only
        return self.head_loss(x, targets)

    head_loss = GPT.head_loss

    def initial_value(self, name, shape, seed):
        """As GPT's, with its smaller ends of branches; Hugging Face draws all with 0.02."""
        module = name.split(".")[-2]
        if module.endswith("norm"):
            return torch.ones(shape)
        if module in ("o_proj", "down_proj"):  # the end of a residual branch
            return normal(shape, 0.02 / math.sqrt(2 * self.config.n_layer), (seed, name))
        if module.endswith("_proj") or module in ("embed_tokens", "lm_head"):
            return normal(shape, 0.02, (seed, name))
        raise ValueError(f"{name} has no initial value: add it to initial_value")


ModelConfig, Model = LlamaConfig, Llama  # the names that --model looks for

"""
Llama in one file: Llama 1 to 3, TinyLlama, SmolLM2, Mistral, dense Qwen2 to 3. `--model=llama`.

    python train.py --model=llama config/quickstart.py --n_kv_head=2 --n_inner=344
    python train.py extras/config/finetune_smollm2.py    # from a model in Hugging Face's format

A second model that follows the contract in model.py, with Hugging Face's names.

Sizes: B sequences of T tokens, C = n_embd, nh query heads of hs, nkv key-value heads.
Architecture: Touvron et al. 2023 (Llama), Dubey et al. 2024 (Llama 3): RMSNorm before
each part, rotary positions, grouped-query attention, SwiGLU, no biases (but Qwen2's).
"""

import math
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch.nn import functional as F

from model import GPT, attend, normal


@dataclass
class LlamaConfig:
    block_size: int = 2048  # context length in tokens. All defaults are SmolLM2-135M's
    vocab_size: int = 49152  # if the data has no meta.json
    n_layer: int = 30
    n_head: int = 9
    n_kv_head: int = 3  # heads of keys and values, each for n_head / n_kv_head query heads
    n_embd: int = 576  # width
    n_inner: int = 1536  # width of the MLP, about 8/3 n_embd
    head_dim: int = 0  # size of a head; 0: n_embd / n_head
    norm_eps: float = 1e-5  # under RMSNorm's root
    rope_theta: float = 1e5  # base of rotary wavelengths: 1e4 in Llama 2, 5e5 in Llama 3
    rope_factor: float = 1.0  # stretches long ones: 8 in Llama 3.1 and 3.3, 32 in 3.2
    tie_embeddings: bool = True  # the head is the embedding, as in small models
    qk_norm: bool = False  # RMSNorm on each head's queries and keys: Qwen3
    qkv_bias: bool = False  # biases of queries, keys and values: Qwen2

    def __post_init__(self):
        if not self.head_dim and self.n_embd % self.n_head:
            raise ValueError(
                f"n_embd={self.n_embd} must be a multiple of n_head={self.n_head}")
        if self.n_head % self.n_kv_head:
            raise ValueError(
                f"n_head={self.n_head} must be a multiple of n_kv_head={self.n_kv_head}: let "
                f"n_kv_head be {self.n_head}, or a divisor of it")


def head_size(config):
    return config.head_dim or config.n_embd // config.n_head


def rotation(start, T, hs, config, device):
    """Cosines and sines of positions start .. start + T - 1: (T, hs / 2) each, in fp32.

    Each block computes them in each forward. A table would be a buffer, and an argument of
    the block would be cast to bf16 by FSDP's policy.
    """
    exponent = torch.arange(0, hs, 2, device=device).float() / hs
    frequency = 1.0 / config.rope_theta**exponent  # (hs / 2,), in radians per token
    if config.rope_factor > 1:
        # Llama 3 was trained with 8,192 tokens. Llama 3.1 stretches the wavelengths that
        # turn less than once in these, keeps those that turn more than 4 times, and
        # blends between.
        turns = 8192 * frequency / (2 * math.pi)
        keep = ((turns - 1) / (4 - 1)).clamp(0, 1)
        frequency = (1 - keep) * frequency / config.rope_factor + keep * frequency
    position = torch.arange(start, start + T, device=device).float()
    angle = position[:, None] * frequency  # (T, hs / 2)
    return angle.cos(), angle.sin()


def rotate(x, cos, sin):
    """Turn each pair (x[i], x[i + hs / 2]) of x (B, nh, T, hs) by its angle. Hugging Face
    pairs them so; Meta's own files pair neighbours."""
    a, b = x.float().chunk(2, dim=-1)  # (B, nh, T, hs / 2) each
    turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    return turned.type_as(x)


def attend_in_groups(q, k, v):
    """attend, where each of k's and v's heads (B, nkv, ...) serves nh / nkv query heads."""
    times = q.size(1) // k.size(1)
    if times > 1 and q.dtype == torch.bfloat16:
        # Only flash attention reliably supports groups, and only in bf16.
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=q.size(2) > 1, enable_gqa=True)
    if times > 1:
        k = k.repeat_interleave(times, dim=1)  # (B, nh, ...)
        v = v.repeat_interleave(times, dim=1)
    return attend(q, k, v, dropout=0.0)


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        C = config.n_embd
        hs = head_size(config)
        self.q_proj = nn.Linear(C, config.n_head * hs, bias=config.qkv_bias)
        self.k_proj = nn.Linear(C, config.n_kv_head * hs, bias=config.qkv_bias)
        self.v_proj = nn.Linear(C, config.n_kv_head * hs, bias=config.qkv_bias)
        if config.qk_norm:
            self.q_norm = nn.RMSNorm(hs, config.norm_eps)
            self.k_norm = nn.RMSNorm(hs, config.norm_eps)
        self.o_proj = nn.Linear(config.n_head * hs, C, bias=False)

    def forward(self, x, cache=None):
        B, T, C = x.size()
        hs = head_size(self.config)
        q = self.q_proj(x).view(B, T, -1, hs)  # (B, T, nh, hs)
        k = self.k_proj(x).view(B, T, -1, hs)  # (B, T, nkv, hs)
        v = self.v_proj(x).view(B, T, -1, hs)
        if self.config.qk_norm:
            # On CUDA autocast runs RMSNorm in fp32, and leaves its output so.
            q = self.q_norm(q).type_as(v)
            k = self.k_norm(k).type_as(v)
        q = q.transpose(1, 2)  # (B, nh, T, hs)
        k = k.transpose(1, 2)  # (B, nkv, T, hs)
        v = v.transpose(1, 2)
        past = cache.length if cache else 0
        cos, sin = rotation(past, T, hs, self.config, x.device)
        q = rotate(q, cos, sin)
        k = rotate(k, cos, sin)
        if cache is not None:
            k, v = cache.extend(k, v)
        y = attend_in_groups(q, k, v)  # (B, nh, T, hs)
        y = y.transpose(1, 2).reshape(B, T, -1)  # heads side by side: (B, T, nh hs)
        return self.o_proj(y)


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        C = config.n_embd
        self.gate_proj = nn.Linear(C, config.n_inner, bias=False)
        self.up_proj = nn.Linear(C, config.n_inner, bias=False)
        self.down_proj = nn.Linear(config.n_inner, C, bias=False)

    def forward(self, x):
        gate = F.silu(self.gate_proj(x))  # (B, T, n_inner)
        return self.down_proj(gate * self.up_proj(x))


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
        self.loss_chunks = 0  # as the key of this name: see head_loss in model.py
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
            raise ValueError(
                f"{total} tokens do not fit block_size={self.config.block_size}")
        x = self.model.embed_tokens(idx)  # (B, T, C)
        caches = cache or [None] * len(self.blocks)
        for block, block_cache in zip(self.blocks, caches):
            x = block(x, block_cache)
        x = self.model.norm(x)
        if targets is None:
            last = x[:, -1:, :]  # (B, 1, C): generation needs no other
            return self.lm_head(last), None
        return self.head_loss(x, targets)

    head_loss = GPT.head_loss  # it uses lm_head and loss_chunks

    def initial_value(self, name, shape, seed):
        """As GPT's, with smaller values at the ends of residual branches. (transformers
        draws all values with 0.02.)"""
        module = name.split(".")[-2]
        if name.endswith(".bias"):
            return torch.zeros(shape)
        if module.endswith("norm"):
            return torch.ones(shape)
        if module in ("o_proj", "down_proj"):  # the end of a residual branch
            std = 0.02 / math.sqrt(2 * self.config.n_layer)
            return normal(shape, std, key=(seed, name))
        if module.endswith("_proj") or module in ("embed_tokens", "lm_head"):
            return normal(shape, 0.02, key=(seed, name))
        raise ValueError(f"{name} has no initial value: add it to initial_value")


# The names that --model looks for.
ModelConfig = LlamaConfig
Model = Llama

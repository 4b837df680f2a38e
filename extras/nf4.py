"""
A frozen linear layer whose weight has 4 bits a number: nf4 (Dettmers et al. 2023, QLoRA), with
bitsandbytes' codes and scales. extras/lora.py makes a base of such layers with --base_bits=4.

The weight is one parameter of bytes, so FSDP2 cuts it by rows, gathers and frees it as any other:

    weight (out, in / 2 + in / 16) uint8
        codes   in / 2   two in a byte, the first in its upper half: numbers of LEVELS
        scales  in / 16  fp32, one for each block of 64 numbers of the row: its largest size

A rank packs its rows by themselves. Forward and backward unpack the weight, and keep only its bytes
in between.
"""

import torch
from torch import nn
from torch.nn import functional as F

BLOCK = 64  # numbers that share a scale

# nf4's 16 levels are equally likely to be the nearest one, if weights have a normal distribution.
LEVELS = torch.tensor([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0], device="cpu")
PAIRS = torch.cartesian_prod(LEVELS, LEVELS)  # of each byte, (256, 2)
PAIRS_ON = {}  # {device: PAIRS there}


@torch.compiler.assume_constant_result  # else a graph would copy them to the GPU in each step
def pairs_on(device):
    if device not in PAIRS_ON:
        PAIRS_ON[device] = PAIRS.to(device)
    return PAIRS_ON[device]


def pack(weight):
    """(rows, width) numbers -> (rows, width / 2 + width / 16) bytes. BLOCK must divide width."""
    rows, width = weight.shape
    # GPT-2's from the hub is transposed: bucketize would warn, and take longer.
    blocks = weight.float().contiguous().view(rows, width // BLOCK, BLOCK)
    scales = blocks.abs().amax(dim=-1)  # (rows, width / BLOCK)
    ratios = blocks * (1 / scales.clamp(min=1e-38))[..., None]  # rounds as bitsandbytes does
    middles = (LEVELS[1:] + LEVELS[:-1]).to(weight.device) / 2
    codes = torch.bucketize(ratios, middles, out_int32=True).byte().view(rows, width)
    return torch.cat([codes[:, ::2] << 4 | codes[:, 1::2], scales.view(torch.uint8)], dim=1)


def unpack(packed, dtype):
    """(rows, width / 2 + width / 16) bytes -> (rows, width) numbers."""
    rows, width = unpacked_shape(packed.shape)
    codes, scales = packed.split([width // 2, width // 16], dim=1)
    scales = scales.contiguous().view(torch.float32)  # (rows, width / BLOCK)
    weight = F.embedding(codes.int(), pairs_on(packed.device))
    weight.view(rows, width // BLOCK, BLOCK).mul_(scales[..., None])  # in place: it is large
    return weight.view(rows, width).to(dtype)


def unpacked_shape(shape):
    return shape[0], shape[1] * 16 // 9


class PackedRows:
    """A weight's value, which is packed when it is sliced: value[a:b] are these rows."""

    def __init__(self, value, shape):
        self.value = value
        self.shape = shape

    def __getitem__(self, rows):
        return pack(self.value[rows])


class Product(torch.autograd.Function):
    """x (..., in) and packed (out, ...) bytes -> (..., out)."""

    @staticmethod
    def forward(ctx, x, packed, bias):
        ctx.save_for_backward(packed)
        return F.linear(x, unpack(packed, x.dtype), bias)

    @staticmethod
    def backward(ctx, grad):
        packed, = ctx.saved_tensors
        return grad @ unpack(packed, grad.dtype), None, None


class Linear4(nn.Linear):
    """y = x weight.T + bias, all of it frozen."""

    def forward(self, x):
        return Product.apply(x, self.weight, self.bias)


def convert(modules):
    """Make Linear4 of the plain linear layers whose width BLOCK divides, in place."""
    for module in modules:
        if type(module) is nn.Linear and module.in_features % BLOCK == 0:
            module.__class__ = Linear4
            module.weight = nn.Parameter(pack(module.weight.detach()), requires_grad=False)

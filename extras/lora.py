"""
LoRA (Hu et al. 2021): the base stays as it is, and a small product is trained beside each
linear layer of the blocks.

    python train.py extras/config/finetune_smollm2.py --lora_rank=16 --lora_alpha=32
    python train.py ... --lora_rank=16 --lora_targets='q_proj|v_proj'
    python sample.py --out_dir=out-smollm2    # its checkpoint names the base

    y = x weight.T + lora_alpha / lora_rank * x lora_A.T lora_B.T
        weight (out, in) is the base's, frozen;
        lora_A (rank, in) and lora_B (out, rank) are trained, in fp32

A checkpoint has only the adapters and their moments, and names the base in its header.
"""

import math
import re
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from configurator import DTYPES
from model import derive_seed


class LoRALinear(nn.Linear):
    def forward(self, x):
        y = super().forward(x)  # (..., out)
        # The base may be kept in bf16, and without autocast x is in bf16 too.
        small = F.linear(x, self.lora_A.to(x.dtype)) * self.lora_scale  # (..., rank)
        return y + F.linear(small, self.lora_B.to(x.dtype))


def adapt(model, cfg):
    """Freeze a model on the meta device, as the base, and put LoRA's matrices beside its linear
    layers, in place."""
    # Checkpoints leave these out. Not a set: all ranks fill them in the same order.
    model.base_names = tuple(name for name, _ in model.named_parameters())
    for p in model.parameters():
        p.requires_grad_(False)
        p.data = p.data.to(DTYPES[cfg.frozen_dtype])
    for module in targets(model, cfg.lora_targets).values():
        # No wrapper: it would change the names of the base's parameters.
        module.__class__ = LoRALinear
        module.lora_scale = cfg.lora_alpha / cfg.lora_rank
        out, width = module.weight.shape
        device = module.weight.device
        module.lora_A = nn.Parameter(torch.empty(cfg.lora_rank, width, device=device))
        module.lora_B = nn.Parameter(torch.empty(out, cfg.lora_rank, device=device))
    model.initial_value = partial(initial_value, model.initial_value)


def targets(model, pattern):
    """{name: module} of the blocks' linear layers in whose name the pattern is found.
    SystemExit if there is none."""
    inside = set(model.blocks.modules())
    layers = {}
    for name, module in model.named_modules():
        if module in inside and isinstance(module, nn.Linear):
            layers[name] = module
    try:
        hits = {name: layers[name] for name in layers if re.search(pattern, name)}
    except re.error as e:
        raise SystemExit(f"lora_targets={pattern!r} is not a regular expression: {e}")
    if not hits:
        example = next(iter(layers), "nothing: the blocks have none")
        raise SystemExit(
            f"lora_targets={pattern!r} matches none of the blocks' {len(layers)} linear layers; "
            f"names look like {example}")
    return hits


def initial_value(of_base, name, shape, seed):
    """The model's own; an adapter's A is drawn as nn.Linear's weight and its B is zero, so the
    model begins as its base. A depends on the seed and the name alone."""
    if name.endswith(".lora_B"):
        return torch.zeros(shape)
    if name.endswith(".lora_A"):
        generator = torch.Generator().manual_seed(derive_seed(seed, name))
        bound = 1 / math.sqrt(shape[1])
        return torch.empty(shape).uniform_(-bound, bound, generator=generator)
    return of_base(name, shape, seed)

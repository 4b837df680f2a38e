"""
LoRA (Hu et al. 2021): the base stays as it is, and a small product is trained beside each
linear layer of the blocks. The core sees a model whose checkpoints lack the base.

    python train.py CONFIG --model=llama+lora --base=BASE --lora_rank=16 --init_from=scratch
    python train.py extras/config/finetune_smollm2.py extras/config/lora.py    # for example
    python train.py CONFIG --model=llama+lora --init_from=resume
    python train.py CONFIG --model=llama+lora --base=BASE --base_bits=4    # QLoRA: see nf4.py
    python sample.py --out_dir=out-smollm2    # the checkpoint names its base

    y = x weight.T + lora_alpha / lora_rank * x lora_A.T lora_B.T
        weight (out, in) is the base's, frozen;
        lora_A (rank, in) and lora_B (out, rank) are trained, in fp32

BASE is another run's out_dir, a hub name, or a directory in Hugging Face's format.
"""

import math
import os
import re
import sys
from dataclasses import dataclass
from functools import cache, partial
from types import SimpleNamespace
from typing import Literal

import torch
from torch import nn
from torch.nn import functional as F

import start
from configurator import model_file, with_sizes
from extras import nf4
from model import derive_seed
from ranks import print0


@dataclass
class Keys:
    # --- LoRA
    base: str = ""  # the frozen model: another run's out_dir, a hub name or a directory
    base_origin: str = ""  # set by the run: which step of which run the base was, or a CRC of its
    #   files
    base_bits: Literal[0, 4] = 0  # 4: keep the blocks' linear layers of the base in 4 bits (QLoRA),
    #   where their width is a multiple of 64; 0: in frozen_dtype
    lora_rank: int = 16
    lora_alpha: float = 32.0  # LoRA's output is scaled by lora_alpha / lora_rank
    lora_targets: str = ""  # regex of layers to adapt, e.g. 'q_proj|v_proj'; empty: all

    opened = None  # not a key: the base's Source, which open_base opens and a run keeps

    def __post_init__(self):
        if hasattr(super(), "__post_init__"):
            super().__post_init__()
        if os.path.exists(self.base):
            self.base = os.path.abspath(self.base)  # a later run may start in another directory


@cache
def around(name):
    """The model file of --model=NAME+lora."""
    inner = model_file(name)

    @dataclass
    class ModelConfig(Keys, inner.ModelConfig):
        pass

    class Model(inner.Model):
        def __init__(self, config):
            super().__init__(config)
            self.requires_grad_(False)
            if config.base_bits:
                nf4.convert(self.blocks.modules())
            self.not_saved = [name for name, _ in self.named_parameters()]
            adapt(self, config)

        def initial_value(self, name, shape, seed):
            if ".lora_" in name:
                return initial_value(name, shape, seed)
            if self.get_parameter(name).dtype == torch.uint8:
                value = self.base_value(name, nf4.unpacked_shape(shape), seed)
                return nf4.PackedRows(value, shape)
            return self.base_value(name, shape, seed)

        def base_value(self, name, shape, seed):
            if not self.config.base:  # extras/bench.py needs none; a run does, see open_base
                return super().initial_value(name, shape, seed)
            if self.config.opened is None:
                raise ValueError(f"base={self.config.base} is not open; --base= draws its values")
            return self.config.opened.value(f"model.{name}", shape, self.config)

        def describe(self):
            layers = sum(isinstance(module, nf4.Linear4) for module in self.modules())
            size = sum(self.get_parameter(name).nbytes for name in self.not_saved) / 2**20
            yield f"the base takes {size:,.1f} MiB, with 4 bits in {layers} of its layers"

    return SimpleNamespace(
        ModelConfig=ModelConfig, Model=Model, open_base=partial(open_base, name))


def open_base(name, cfg, world, resumed):
    """cfg with the sizes of its base, and with its Source as sizes.opened (all ranks)."""
    base = cfg.sizes.base
    if not base:
        raise SystemExit(
            f"model={cfg.model}: it needs a base; pass --base=DIR, a hub name or another run's "
            "out_dir")
    if not resumed and os.path.realpath(base) == os.path.realpath(cfg.out_dir):
        raise SystemExit(
            f"out_dir={cfg.out_dir} is LoRA's base, which must stay there; pass another --out_dir")
    source = start.open_weights(base, world, dataset=None if resumed else cfg.dataset)
    theirs = source.header["config"]["model"]
    if theirs.removesuffix("+float8") != name.removesuffix("+float8"):
        raise SystemExit(
            f"base={base} is of model={theirs}, not {name}; pass --model=NAME+lora with the name "
            "of its model, or merge its own adapters first")
    before = cfg.sizes.base_origin
    now = source.header.get("origin", "")
    if before and before != now:
        print0(world, f"base={base} was {before} when LoRA began, and is now "
                      f"{now or 'something else'}", file=sys.stderr)
    cfg = with_sizes(
        cfg, cfg.model, source.header["model_args"], source.path, whole_context=False)
    whole = cfg.strategy in ("single", "ddp", "")  # "": an export
    if cfg.sizes.base_bits and not whole and torch.__version__ < "2.12":
        raise SystemExit(
            f"base_bits=4: FSDP2 shards integers from torch 2.12 on, and this is "
            f"{torch.__version__}; pass --strategy=ddp (now {cfg.strategy})")
    cfg.sizes.base_origin = before or now
    cfg.sizes.opened = source
    return cfg


def adapt(model, config):
    """Put LoRA's matrices beside the linear layers of a model on the meta device, in place."""
    for module in targets(model, config.lora_targets).values():
        # No wrapper: it would change the names of the base's parameters.
        module.__class__ = LoRALinear if type(module) is nn.Linear else LoRALinear4
        module.lora_scale = config.lora_alpha / config.lora_rank
        out, width = module.out_features, module.in_features
        device = module.weight.device
        module.lora_A = nn.Parameter(torch.empty(config.lora_rank, width, device=device))
        module.lora_B = nn.Parameter(torch.empty(out, config.lora_rank, device=device))


# Else nn.TransformerEncoderLayer, in evaluation, reads its layers' weights and calls no layer.
torch.backends.mha.set_fastpath_enabled(False)


class LoRALinear(nn.Linear):
    def forward(self, x):
        y = super().forward(x)  # (..., out)
        # The base may be kept in bf16, and without autocast x is in bf16 too.
        small = F.linear(x, self.lora_A.to(x.dtype)) * self.lora_scale  # (..., rank)
        return y + F.linear(small, self.lora_B.to(x.dtype))


class LoRALinear4(LoRALinear, nf4.Linear4):
    """Beside a weight of 4 bits: here LoRALinear's super() is Linear4."""


def targets(model, pattern):
    """{name: module} of the blocks' linear layers in whose name the pattern is found.
    SystemExit if there is none."""
    inside = set(model.blocks.modules())
    layers = {}
    for name, module in model.named_modules():
        # Another subclass has a forward of its own.
        if module in inside and type(module) in (nn.Linear, nf4.Linear4):
            layers[name] = module
    hits = {name: layers[name] for name in layers if re.search(pattern, name)}
    if not hits:
        example = next(iter(layers), "nothing: the blocks have none")
        raise SystemExit(
            f"lora_targets={pattern!r} matches none of the blocks' {len(layers)} linear layers; "
            f"names look like {example}")
    return hits


def initial_value(name, shape, seed):
    """A is drawn as nn.Linear's weight, from the seed and the name alone. B is zero, so the model
    begins as its base."""
    if name.endswith(".lora_B"):
        return torch.zeros(shape)
    generator = torch.Generator().manual_seed(derive_seed(seed, name))
    bound = 1 / math.sqrt(shape[1])
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)

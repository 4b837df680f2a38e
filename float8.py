"""
dtype=float8: the blocks' linear layers compute in 8 bits, and FSDP2 gathers their weights in 8
bits. All else computes in bf16. The work is torchao's (pip install torchao).
"""

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from configurator import SHARDED


def linears(model):
    """The layers that compute in float8: the blocks', of sizes that GPUs multiply in float8."""
    return [m for m in model.blocks.modules() if isinstance(m, nn.Linear)
            and m.in_features % 16 == m.out_features % 16 == 0]


def convert(model, cfg, world):
    """With dtype=float8, torchao's layers instead; names, shapes and fp32 weights stay."""
    if cfg.dtype != "float8":
        return
    kind = world.device.type
    if kind == "mps" or (kind == "cuda" and torch.cuda.get_device_capability() < (8, 9)):
        raise SystemExit("dtype=float8 needs an H100 or newer; use --dtype=bfloat16")
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError:
        raise SystemExit("dtype=float8 needs a package that is not here: pip install torchao")
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=cfg.strategy in SHARDED,
                                emulate=kind == "cpu")
    ours = set(linears(model))
    convert_to_float8_training(model, config=config, module_filter_fn=lambda m, _: m in ours)


def scale_each_step(model, optimizer, cfg):
    """After each step one all-reduce for the scales of all weights, instead of one a gather."""
    if cfg.dtype == "float8":
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp as rescale
        optimizer.register_step_post_hook(lambda *_: rescale(model))


def plain(t):
    """t without torchao's subclass around its shard: checkpoints are plain fp32."""
    shard = getattr(t, "_local_tensor", None)
    if not hasattr(shard, "_precomputed_scale"):
        return t
    return DTensor.from_local(shard._tensor, t.device_mesh, t.placements, shape=t.shape,
                              stride=t.stride())

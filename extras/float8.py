"""
dtype=float8: the blocks' linear layers compute in 8 bits, and FSDP2 gathers their weights in
8 bits. Everything else computes in bf16. The work is torchao's (pip install torchao).

    convert(model, cfg, world)  # on meta, before fsdp.shard
    scale_each_step(model, optimizer)
"""

from torch import nn

from configurator import STRATEGIES


def convert(model, cfg, world):
    """Replace the blocks' linear layers by torchao's, in place. Names, shapes and fp32
    weights stay. SystemExit if these keys or sizes cannot be combined with float8."""
    shard_group = 0  # the ranks that FSDP2 gathers a weight from
    if STRATEGIES[cfg.strategy].sharded:
        shard_group = cfg.shard_group_size or world.size
    if cfg.cuda_graph:
        # Each step makes new scales, and a replayed one would read the recorded ones.
        raise SystemExit("cuda_graph=True does not go with dtype=float8; use --dtype=bfloat16")
    chosen = set(linears(model))
    for name, module in model.named_modules():
        if module in chosen and type(module) is not nn.Linear:  # such as LoRA's
            raise SystemExit(
                f"dtype=float8: {name} is a {type(module).__name__}, which has no float8; use "
                "--dtype=bfloat16")
        # torchao gathers rows without padding, so all ranks must have the same number.
        if shard_group and module in chosen and module.out_features % shard_group:
            raise SystemExit(
                f"dtype=float8: {shard_group} ranks do not divide the {module.out_features} "
                f"rows of {name}; use --strategy=hybrid_shard with a --shard_group_size that "
                "does, or --dtype=bfloat16")
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    convert_to_float8_training(
        model,
        config=Float8LinearConfig(
            enable_fsdp_float8_all_gather=shard_group > 0,
            emulate=world.device.type == "cpu",  # for tests
        ),
        module_filter_fn=lambda module, name: module in chosen,
    )


def linears(model):
    """The blocks' linear layers whose sizes GPUs can multiply in float8."""
    layers = []
    for module in model.blocks.modules():
        if isinstance(module, nn.Linear):
            if module.in_features % 16 == 0 and module.out_features % 16 == 0:
                layers.append(module)
    return layers


def scale_each_step(model, optimizer):
    """Compute the scales of all weights after each step: one all-reduce, not one per gather."""
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    def rescale(*args):
        precompute_float8_dynamic_scale_for_fsdp(model)

    optimizer.register_step_post_hook(rescale)

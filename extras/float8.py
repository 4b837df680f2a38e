"""
--model=NAME+float8: the blocks' linear layers train in 8 bits, and FSDP2 gathers their weights in
8 bits. Everything else computes in bf16. The work is torchao's (pip install torchao).

    torchrun --standalone --nproc_per_node=8 train.py CONFIG --model=gpt2+float8 --dtype=bfloat16

A checkpoint holds plain fp32 weights. With --model=NAME a run goes on without float8, and sample.py
never uses it.
"""

import weakref
from functools import cache
from types import SimpleNamespace

from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from configurator import STRATEGIES, model_file


@cache
def around(name):
    """The model file of --model=NAME+float8."""
    inner = model_file(name)

    class Model(inner.Model):
        def convert(self, cfg, world):
            convert(self, cfg, world)

    return SimpleNamespace(**{**vars(inner), "Model": Model})


def convert(model, cfg, world):
    """Replace the blocks' linear layers of a model on the meta device by torchao's, in place.
    Names, shapes and fp32 weights stay. SystemExit if these keys or sizes cannot be combined with
    float8."""
    shard_group = 0  # the ranks that FSDP2 gathers a weight from
    if STRATEGIES[cfg.strategy].sharded:
        shard_group = cfg.shard_group_size or world.size
    if cfg.dtype != "bfloat16":
        raise SystemExit(f"model={cfg.model} needs --dtype=bfloat16 (now {cfg.dtype})")
    if cfg.cuda_graph:
        # Each step makes new scales, and a replayed one would read the recorded ones.
        raise SystemExit(f"cuda_graph=True does not go with model={cfg.model}")
    chosen = set(linears(model))
    for name, module in model.named_modules():
        if module in chosen and type(module) is not nn.Linear:  # such as LoRA's
            raise SystemExit(
                f"model={cfg.model}: {name} is a {type(module).__name__}, which has no float8")
        # torchao gathers rows without padding, so all ranks must have the same number.
        if shard_group and module in chosen and module.out_features % shard_group:
            raise SystemExit(
                f"model={cfg.model}: {shard_group} ranks do not divide the {module.out_features} "
                f"rows of {name}; use --strategy=hybrid_shard with a --shard_group_size that does")
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    convert_to_float8_training(
        model,
        config=Float8LinearConfig(
            enable_fsdp_float8_all_gather=shard_group > 0,
            emulate=world.device.type == "cpu",  # for tests
        ),
        module_filter_fn=lambda module, name: module in chosen,
    )
    if shard_group:
        scale_each_step(model)


def linears(model):
    """The blocks' linear layers whose sizes GPUs can multiply in float8."""
    layers = []
    for module in model.blocks.modules():
        if isinstance(module, nn.Linear):
            if module.in_features % 16 == 0 and module.out_features % 16 == 0:
                layers.append(module)
    return layers


def scale_each_step(model):
    """Compute the scales of all weights after each step of the model's optimizer: one all-reduce,
    not one per gather."""
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp
    alive = weakref.ref(model)  # the hook below outlives the model

    def rescale(optimizer, *args):
        model = alive()
        trained = {p for group in optimizer.param_groups for p in group["params"]}
        if model and any(layer.weight in trained for layer in linears(model)):
            precompute_float8_dynamic_scale_for_fsdp(model)

    def begin(*args):
        first_forward.remove()
        # The optimizer was made later than this model. So the hook is for all of them.
        register_optimizer_step_post_hook(rescale)

    # Not before: a step that only allocates state finds weights without values.
    first_forward = model.register_forward_pre_hook(begin)

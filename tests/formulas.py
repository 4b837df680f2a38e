"""
What a rank keeps and sends, by closed formulas from names and shapes. Real ranks are compared with
them (test_fsdp.py), and so is any estimate of them.

    device, host = kept(model, cfg, world)      # {kind: bytes} at rest, with gradients
    traffic(model, cfg, world)                  # {(collective, ranks in the group): bytes a step}
"""

import math
from collections import Counter

import torch

import fsdp
from configurator import STRATEGIES, named_file

WIDTHS = dict(float32=4, bfloat16=2, float16=2)  # bytes


def units_of(model, cfg):
    """[{name: parameter}] by unit, each parameter once; the root, which has the rest, is last."""
    left, units = dict(model.named_parameters()), []
    names = {module: name for name, module in model.named_modules()}
    inner = []
    if STRATEGIES[cfg.strategy].sharded:
        inner = fsdp.find_units(model, model.blocks, cfg.wrap_min_params)
    for unit in inner:
        inside = names[unit] + "."
        units.append({key: left.pop(key) for key in list(left) if key.startswith(inside)})
    return [*units, left]


def sharing(cfg, world):
    """Ranks that share a copy of the model."""
    if not STRATEGIES[cfg.strategy].sharded:
        return 1
    return cfg.shard_group_size or world.size


def padded(p, g):
    """Elements of one of g shards: every rank's has as many rows."""
    return math.ceil(len(p) / g) * math.prod(p.shape[1:])


def kept(model, cfg, world):
    """({kind: bytes} on the device, in host memory): 4 bytes a parameter, and for the rank's own
    rows that train 4 of gradient and 8 of AdamW's moments, or 4 of Muon's one."""
    g, units, muons = sharing(cfg, world), units_of(model, cfg), muon_matrices(model, cfg)
    device_and_host = Counter(), Counter()
    for i, unit in enumerate(units):
        inner, f = len(units) - 1, cfg.cpu_offload
        on_host = f == 1 or i < inner and int((i + 1) * f + 1e-9) > int(i * f + 1e-9)
        for p in unit.values():
            rows = math.ceil(len(p) / g)
            own = max(0, min(rows, len(p) - world.rank % g * rows)) * math.prod(p.shape[1:])
            own *= p.requires_grad  # the last ranks have fewer, or none
            moments = 4 if any(p is m for m in muons) else 8
            device_and_host[on_host].update(
                parameters=4 * padded(p, g), gradients=4 * own, optimizer=moments * own)
    return device_and_host


def traffic(model, cfg, world):
    """Bytes of the whole buffers of a step's collectives, rank 0's where they differ."""
    if cfg.strategy == "single":
        return {}
    g, units, sent = sharing(cfg, world), units_of(model, cfg), Counter()
    A = cfg.gradient_accumulation_steps // world.size
    syncs = A if cfg.grad_sync == "every" else 1
    trained = sum(padded(p, g) for unit in units for p in unit.values() if p.requires_grad)
    trained *= WIDTHS[cfg.reduce_dtype]
    if cfg.strategy == "ddp":
        sent["all_reduce", world.size] = trained * syncs
    else:
        sent["reduce_scatter", g] = trained * g * syncs
        sent["all_reduce", g] = 4  # of clipping: the square of the norm
    if STRATEGIES[cfg.strategy].in_groups:
        sent["all_reduce", world.size // g] += trained  # between the groups, once a step
    if STRATEGIES[cfg.strategy].sharded:
        for i, unit in enumerate(units):
            size = gathered(unit, cfg, g)
            first, again = times_gathered(model, cfg, units, i, A, syncs)
            sent["all_gather", g] += first * size
            if again:
                sent["all_gather", cfg.reshard_group_size or g] += again * size
    matrices = muon_matrices(model, cfg)
    if matrices:
        width = 2 if cfg.dtype == "bfloat16" else 4
        shares = named_file("muon").divide(matrices, world.size)  # by owner
        size = [sum(padded(p, g) for p in share) * width for share in shares]
        first = world.rank // g * g
        if STRATEGIES[cfg.strategy].sharded:
            sent["all_to_all", g] += sum(size[first:first + g])  # rows to the owners in this copy
        sent["all_to_all", world.size] += size[world.rank] * world.size  # an owner's to all ranks
    return dict(sent)


def times_gathered(model, cfg, units, i, A, syncs):
    """Of unit i (in forward, in backward). The root once a step. Of the others ZeRO-2: once a
    reduction. ZeRO-3: for each forward, and for each backward that comes by, or comes to the unit
    after it, since FSDP2 gathers one ahead. An embedding's backward does not read its table."""
    if i == len(units) - 1:  # the root
        return 1, 0
    if not STRATEGIES[cfg.strategy].reshard_after_forward:
        return syncs, 0
    first = [p.requires_grad for p in model.parameters()].index(True)
    before = [id(p) for p in model.parameters()][:first]  # backward never comes there
    reached = any(id(p) not in before for unit in units[i:i + 2] for p in unit.values())
    tables = [m.weight for m in model.modules() if isinstance(m, torch.nn.Embedding)]
    is_table = all(any(p is table for table in tables) for p in units[i].values())
    return A, A if reached and not is_table else 0


def gathered(unit, cfg, g):
    """Bytes of a unit; with float8, one for an element of the blocks' matrices of 16s."""
    size = 0
    for name, p in unit.items():
        eight = cfg.model.endswith("+float8") and ".h." in name and p.dim() == 2
        eight = eight and not any(n % 16 for n in p.shape)
        eight = eight or p.dtype == torch.uint8  # a policy casts no integers
        size += padded(p, g) * g * (1 if eight else WIDTHS[cfg.dtype])
    return size


def muon_matrices(model, cfg):
    """Of the blocks, what trains and is 2-D."""
    if cfg.optimizer != "muon":
        return []
    params = [p for p in model.blocks.parameters() if p.dim() == 2]
    return [p for p in params if p.requires_grad]

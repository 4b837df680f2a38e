"""
The proofs about sharding: the same numbers in every mode, by the mechanism that was asked for.

    python -m pytest -q test_fsdp.py          # on a CPU with gloo, about a minute

A case is a function that runs on every rank and returns what it found; one launch per world size
runs all cases of that size. The tests compare with plain PyTorch, or with closed formulas.
"""

import copy
import functools
import itertools
import math
import os
import random
from collections import Counter, defaultdict
from unittest.mock import patch

import formulas
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import training
from harness import on_ranks, values
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from training import WAYS, plain_gpt, read_ckpt, run_training, steps, tiny, two_each

import configurator
import fsdp
import model
from model import GPT, GPTConfig
from optimizer import LossScaler

# This file is a model file too: --model=test_fsdp is a GPT whose head is not tied. Code that ties
# parameters again, as `allocate` does, must not tie this one.

ModelConfig = GPTConfig


class Model(GPT):
    def __init__(self, config):
        super().__init__(config)
        self.lm_head.weight = nn.Parameter(torch.empty_like(self.lm_head.weight))


# -----------------------------------------------------------------------------
# running on ranks

CASES = defaultdict(dict)  # {world: {name: (function, kwargs)}}
DDP = dict(strategy="ddp")
ZERO2 = dict(strategy="shard_grad_op")
ZERO3 = dict(strategy="full_shard")
HYBRID = dict(strategy="hybrid_shard", shard_group_size=2)
UNITS = dict(model="test_fsdp", wrap_min_params=1000)  # embedding and head are units, too
STRATEGIES = [*WAYS.values()]
mode = configurator.STRATEGIES.get  # a strategy's row
SHARDED = [(world, keys) for world, keys in STRATEGIES if mode(keys["strategy"]).sharded]


def case(*rows):
    """Run the decorated function for each of rows: (world, name, kwargs)."""
    def register(function):
        for world, name, kwargs in rows:
            CASES[world][name] = function, kwargs
        return function
    return register


@pytest.fixture(scope="session")
def ranks(tmp):
    """ranks(world) -> the results of all cases at that world size, run once."""
    @functools.cache
    def get(world):
        cases = {}
        for name, (f, kwargs) in CASES[world].items():
            cases[name] = f, {"tmp": tmp, **kwargs}
            if (world, name) in PARITY:
                cases[name][1]["compare"] = training.steps_alone(tmp, **own_keys(kwargs))
        return on_ranks(world, cases)
    return get


def built(tmp, **overrides):
    """training.built, in fewer micro-batches."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    return training.built(tmp, **{**two_each(world), **overrides})


def whole(run):
    """Copies of all parameters on rank 0; Nones elsewhere."""
    params = run.model.named_parameters()
    return {name: copy.deepcopy(fsdp.gather_full(p)) for name, p in params}


def local(t):
    return t.to_local() if isinstance(t, DTensor) else t


# -----------------------------------------------------------------------------
# parity: every mode and option against plain single-process PyTorch, and the steps' numbers by
# compare.py against our own single process

FREEZE = r"wte|h\.0\.(ln_1|mlp)"  # parts of units: frozen and trained parameters are mixed
FACTORS = dict(
    strategy=[*WAYS], grad_sync=["every", "last"],
    activation_checkpointing=["none", "full", "selective"], activation_offload=[False, True],
    cpu_offload=[0.0, 0.5, 1.0], wrap_min_params=[0, 2000], prefetch_blocks=[0, 1, 2],
    freeze=["", FREEZE], grad_clip=[0.0, 0.5], loss_chunks=[0, 3])  # compile: tests/test_compile.py


def allowed(keys):
    of_sharding = keys["cpu_offload"] or keys["wrap_min_params"] or keys["prefetch_blocks"]
    if of_sharding and not mode(keys["strategy"]).sharded:
        return False
    return not keys["activation_offload"] or keys["activation_checkpointing"] == "full"


def pairwise():
    """Few cases in which every allowed pair of two options' values occurs: greedy, always equal."""
    every = [dict(zip(FACTORS, chosen)) for chosen in itertools.product(*FACTORS.values())]
    every = [keys for keys in every if allowed(keys)]
    random.Random(0).shuffle(every)
    numbers, pairs, chosen = {}, [], []
    for keys in every:
        bits = 0  # an integer as a set of pairs: ten times as fast
        for pair in itertools.combinations(keys.items(), 2):
            bits |= 1 << numbers.setdefault(pair, len(numbers))
        pairs.append(bits)
    missing = (1 << len(numbers)) - 1
    while missing:
        best = max(range(len(every)), key=lambda i: (pairs[i] & missing).bit_count())
        chosen.append(every[best])
        missing &= ~pairs[best]
    return chosen


def own_keys(keys):
    """The others are ways to run it."""
    own = ("freeze", "grad_clip", "bias", "model", "dropout", "seed")
    return {k: keys[k] for k in own if k in keys}


def run_case(world, name, **keys):
    CASES[world][name] = run_training, {"name": name, **two_each(world), **keys}


for world, keys in STRATEGIES + [(4, DDP), (4, ZERO2), (4, ZERO3)]:
    run_case(world, f"{keys['strategy']}-{world}", **keys)
for keys in (DDP, ZERO3):  # dropout's masks go by seed and micro-batch, not by rank
    run_case(3, f"{keys['strategy']}-3", **keys, dropout=0.2, seed=7)
run_case(3, "shard_grad_op-3", **ZERO2, grad_sync="last")
SHORT = dict(max_iters=3, eval_interval=3)
for i, keys in enumerate(pairwise()):
    # without biases: Adam blows the rounding noise of LayerNorm's bias up to 1.3e-5
    world, group = (4, 2) if mode(keys["strategy"]).in_groups else (2, 0)
    run_case(world, f"pair{i}", **keys, **SHORT, shard_group_size=group, bias=False)
for keys in (DDP, ZERO3):
    run_case(2, f"untied-{keys['strategy']}", **keys, **SHORT, model="test_fsdp")
run_case(2, "untied-units", **ZERO3, **SHORT, **UNITS)
REGATHER = dict(reshard_group_size=2)  # after forward each two of four ranks keep the blocks
for i, keys in enumerate((
        dict(HYBRID, shard_group_size=4), dict(ZERO3, activation_checkpointing="full"),
        dict(ZERO3, grad_sync="last", prefetch_blocks=2, cpu_offload=0.5),
        dict(ZERO3, freeze=FREEZE, **UNITS))):
    run_case(4, f"regather{i}", **keys, **SHORT, **REGATHER)


def in_two_buckets(**kwargs):
    """DDP's first bucket gets one parameter. By default all of the tiny model fit into it."""
    with patch.object(dist, "_DEFAULT_FIRST_BUCKET_BYTES", 1):
        return run_training(**kwargs)


CASES[2]["ddp-buckets"] = in_two_buckets, dict(CASES[2]["ddp-2"][1], name="ddp-buckets")
PARITY = [(world, name) for world in CASES for name in CASES[world]]


@pytest.fixture(scope="session")
def plain(tmp):
    """plain(key=value, ...) -> losses, norms and weights of the independent reference."""
    return functools.cache(lambda **overrides: training.plain_training(tiny(tmp, **overrides)))


def assert_parity(tmp, rows, name, expected):
    losses, norms, weights, _ = expected
    ours = read_ckpt(os.path.join(tmp, name))["model"]
    assert [r["loss"] for r in rows] == pytest.approx(losses, rel=1e-6)
    assert [r["grad_norm"] for r in rows] == pytest.approx(norms, rel=1e-5)
    training.assert_same_weights(ours, weights, 1e-5)


@pytest.mark.parametrize("model", ["gpt2", "test_fsdp"])  # a tied head, one of its own
def test_parity_single(tmp, plain, model):
    name = f"single-{model}"
    assert_parity(tmp, run_training(tmp, name, model=model), name, plain(model=model))


@pytest.mark.parametrize("world, name", PARITY)
def test_parity_of_modes_pairs_of_options_and_an_untied_head(tmp, ranks, plain, world, name):
    keys = CASES[world][name][1]
    expected = plain(**own_keys(keys), max_iters=keys.get("max_iters", 5))
    assert_parity(tmp, values(ranks(world), name)[0], name, expected)


# -----------------------------------------------------------------------------
# mechanisms: what a loss cannot show


@case(*((world, f"mech-{keys['strategy']}", keys) for world, keys in SHARDED))
def case_mechanisms(tmp, **overrides):
    allocated = []
    materialize = fsdp.materialize

    def spy(module, device):
        meta = [name for name, p in module.named_parameters() if p.is_meta]
        materialize(module, device)
        for p in map(module.get_parameter, meta):
            allocated.append((tuple(p.shape), local(p).numel()))

    with patch.object(fsdp, "materialize", spy):
        run = built(tmp, **overrides)
    steps(run)
    model, params = run.model, dict(run.model.named_parameters())
    shard = run.cfg.shard_group_size or run.world.size
    moments = []
    for p in params.values():
        for key in ("exp_avg", "exp_avg_sq"):
            moment = run.optimizer.state[p][key]
            moments.append(isinstance(moment, DTensor) and local(moment).shape == local(p).shape)

    def gathered():
        return [n for n, p in model.named_parameters() if not isinstance(p, DTensor)]

    with fsdp.inference(run.wrapped):
        run.wrapped(*run.batches.get(0, 0)[:2])
        inside = gathered()
    return dict(
        blocks=all(isinstance(block, FSDPModule) for block in model.blocks),
        dtensor=all(isinstance(p, DTensor) for p in params.values()),
        rows=all(len(local(p)) <= -(-len(p) // shard) for p in params.values()),
        moments=all(moments),
        total=sum(local(p).numel() for p in params.values()),
        tied=model.lm_head.weight is model.transformer.wte.weight,
        allocated=len(allocated),
        whole=[shape for shape, n in allocated if shape[0] > 1 and n >= math.prod(shape)],
        inside=inside, outside=gathered())


@pytest.mark.parametrize("world, strategy", [(w, keys["strategy"]) for w, keys in SHARDED])
def test_mechanisms_of_sharding(ranks, world, strategy):
    per_rank = values(ranks(world), f"mech-{strategy}")
    for r in per_rank:
        for key in ("blocks", "dtensor", "rows", "moments", "tied", "allocated"):
            assert r[key], key
        assert r["whole"] == r["outside"] == []
        root = ["transformer.wte.weight", "transformer.wpe.weight", "transformer.ln_f.weight",
                "transformer.ln_f.bias"]
        # by name, whatever configurator.py says of those that everybody knows
        keeps = {"shard_grad_op": True, "full_shard": False, "hybrid_shard": False}
        if keeps.get(strategy, not mode(strategy).reshard_after_forward):
            assert len(r["inside"]) > len(root)  # ZeRO-2: blocks stay gathered after forward ...
        else:
            assert r["inside"] == root  # ... ZeRO-3: they are resharded, the root is not
    total = sum(p.numel() for p in plain_gpt().parameters())
    assert sum(r["total"] for r in per_rank) == total * world // 2  # four ranks hold two copies


OPTIONS = {"plain": {}, "bf16": dict(dtype="bfloat16"), "reduce": dict(reduce_dtype="bfloat16"),
           "frozen": dict(freeze=r"wte|wpe|h\.0\.")}
TRAFFIC = {}  # (strategy, grad_sync, option): (world, name, kwargs)
for (world, keys), sync, option in itertools.product(STRATEGIES, ("every", "last"), OPTIONS):
    some = {"ddp": ("plain", "frozen")}.get(keys["strategy"], OPTIONS)
    if option in some and (option == "plain" or not mode(keys["strategy"]).in_groups):
        name = f"coll-{keys['strategy']}-{sync}-{option}"
        kwargs = dict(**keys, grad_sync=sync, **OPTIONS[option])
        TRAFFIC[keys["strategy"], sync, option] = world, name, kwargs
MORE_TRAFFIC = {
    "table": (2, "coll-table", dict(ZERO3, **UNITS)),
    "regather": (4, "coll-regather", dict(ZERO3, **REGATHER)),
    "regather table": (4, "coll-regather-table", dict(ZERO3, **REGATHER, **UNITS))}


@case(*((world, f"drawn-{keys['strategy']}", keys) for world, keys in SHARDED[1:]))
def case_drawn(tmp, **overrides):
    counted = []
    numbers = torch.Tensor.normal_

    def count(t, *args, **kwargs):
        counted.append(t.numel())
        return numbers(t, *args, **kwargs)

    with (patch.object(model.normal, "chunk", 100),  # of a few rows of the tiny model
          patch.object(torch.Tensor, "normal_", count)):
        built(tmp, **overrides)
    return sum(counted)


@pytest.mark.parametrize("world, strategy", [(w, keys["strategy"]) for w, keys in SHARDED[1:]])
def test_mechanisms_a_rank_draws_its_rows_of_the_one_model(ranks, world, strategy):
    drawn = values(ranks(world), f"drawn-{strategy}")
    total = sum(p.numel() for p in plain_gpt().parameters() if p.dim() > 1)
    assert max(drawn) < 0.6 * total  # its half, and the rest of a chunk


@case(*TRAFFIC.values(), *MORE_TRAFFIC.values())
def case_collectives(tmp, **overrides):
    """Counts by CommDebugMode, bytes by listening to torch.distributed; DDP's C++ by its hook."""
    run = built(tmp, gradient_accumulation_steps=3 * dist.get_world_size(), **overrides)
    buckets = []
    if run.cfg.strategy == "ddp":
        def hook(group, bucket):
            buckets.append(bucket.buffer().numel())
            return allreduce_hook(group, bucket)
        run.wrapped.register_comm_hook(None, hook)
    steps(run)  # the first step sets things up
    with CommDebugMode() as comm:  # one micro-batch
        fsdp.set_grad_sync(run.wrapped, is_last_micro_batch=True)
        run.wrapped(*run.batches.get(1, 0)[:2])[1].backward()
    run.optimizer.zero_grad()

    with training.heard() as traffic:
        steps(run, first=1)
    buckets.clear()
    steps(run, first=2)
    counts = {str(op).split(".")[1]: n for op, n in comm.get_comm_counts().items()}
    formula = [[*key, n] for key, n in formulas.traffic(run.model, run.cfg, run.world).items()]
    return dict(formula=formula, counts=counts, traffic=traffic, buckets=buckets)


@pytest.mark.parametrize("strategy, grad_sync, option", [t for t in TRAFFIC if mode(t[0]).sharded])
def test_mechanisms_collectives_match_the_table(ranks, strategy, grad_sync, option):
    """The table in docs/fsdp.md, in counts and in bytes. Of the four units the last is the root."""
    world, name, _ = TRAFFIC[strategy, grad_sync, option]
    r = values(ranks(world), name)[0]
    micro, blocks = 3, 3
    units = blocks + 1
    sync = micro if grad_sync == "every" else 1

    # ZeRO-3 gathers the blocks again for backward. A first block that is all frozen has none, but
    # FSDP2 gathers it, since it gathers one ahead.
    gathered, trained, times = 2 * blocks, units, micro
    if option == "frozen":
        trained = units - 1
    if not mode(strategy).reshard_after_forward:
        gathered, times = blocks, sync
    names = [name for name, *_ in r["traffic"]]
    assert names.count("all_gather") == 1 + gathered * times  # the root once a step
    assert names.count("reduce_scatter") == trained * sync
    if option != "frozen":  # PyTorch's own count of one micro-batch
        assert r["counts"]["_allgather_base_"] == 1 + gathered
        assert r["counts"]["_reduce_scatter_base_"] == trained

    dtypes = {dtype for kind, _, dtype, _ in r["traffic"] if kind == "reduce_scatter"}
    assert dtypes == {"torch.bfloat16" if option == "reduce" else "torch.float32"}
    assert_traffic(r)


@pytest.mark.parametrize("option", MORE_TRAFFIC)
def test_mechanisms_collectives_where_backward_gathers_less(ranks, option):
    """An embedding's table only in forward; in backward the blocks inside groups of two ranks."""
    world, name, _ = MORE_TRAFFIC[option]
    assert_traffic(values(ranks(world), name)[0])


def assert_traffic(result):
    """The formula's bytes, by kind and by size of the group."""
    moved = Counter()
    for kind, n, _, size in result["traffic"]:
        moved[kind, n] += size
    assert moved == {(kind, n): size for kind, n, size in result["formula"]}


@pytest.mark.parametrize("option", ["plain", "frozen"])
@pytest.mark.parametrize("grad_sync", ["every", "last"])
def test_mechanisms_ddp_reduces_what_trains(ranks, grad_sync, option):
    r = values(ranks(2), f"coll-ddp-{grad_sync}-{option}")[0]
    assert r["formula"] == [["all_reduce", 2, sum(r["buckets"]) * 4]]


BYTES = [
    DDP, ZERO3, dict(**ZERO2, freeze=FREEZE), dict(**ZERO3, cpu_offload=0.5),
    dict(**ZERO3, cpu_offload=1.0, freeze=r"h\.1\."), dict(**ZERO3, wrap_min_params=2000)]
BYTES_AT = [(world, f"bytes-{i}-{world}", keys) for world in (2, 3)
            for i, keys in enumerate(BYTES)] + [(4, "bytes-hybrid-4", HYBRID)]


@case(*BYTES_AT)
def case_persistent_bytes(tmp, **overrides):
    """Bytes this rank keeps: parameters, gradients (after backward) and moments."""
    run = built(tmp, **overrides)
    steps(run)
    run.wrapped(*run.batches.get(1, 0)[:2])[1].backward()
    with fsdp.inference(run.wrapped):
        pass  # at its end nothing is gathered

    def size(tensors):  # of their storages, each once
        storages = [local(t).untyped_storage() for t in tensors if local(t).numel()]
        return sum({s.data_ptr(): s.nbytes() for s in storages}.values())

    trained = [p for p in run.model.parameters() if p.requires_grad]
    frozen = [p for p in run.model.parameters() if not p.requires_grad]
    state = run.optimizer.state
    return dict(
        params=size(run.model.parameters()),
        grads=sum(local(p.grad).numel() * 4 for p in trained),
        moments=size(state[p][key] for p in trained for key in ("exp_avg", "exp_avg_sq")),
        frozen=sum(p.grad is not None or p in state for p in frozen),
        formula=formulas.kept(run.model, run.cfg, run.world))


@pytest.mark.parametrize("world, name, keys", BYTES_AT)
def test_mechanisms_bytes_kept_by_a_rank_are_the_formula(ranks, world, name, keys):
    """Rows padded to ceil(rows / g); gradients and moments of own rows that train; all in fp32."""
    for r in values(ranks(world), name):
        device, host = map(Counter, r["formula"])  # one kind of memory on a CPU
        sums = [device[kind] + host[kind] for kind in ("parameters", "gradients", "optimizer")]
        assert [r["params"], r["grads"], r["moments"]] == sums
        assert r["frozen"] == 0
        assert (sum(host.values()) > 0) == ("cpu_offload" in keys)
        assert (sum(device.values()) == 0) == (keys.get("cpu_offload") == 1)


@case((2, "calls", {}))
def case_calls(tmp):
    """Names of what each unit prefetches in forward, and of what is offloaded."""
    with (patch.object(FSDPModule, "set_modules_to_forward_prefetch", autospec=True) as forward,
          patch.object(fsdp, "fully_shard", wraps=fsdp.fully_shard) as shard):
        run = built(tmp, **ZERO3, prefetch_blocks=2, cpu_offload=0.5)
    names = {module: name for name, module in run.wrapped.named_modules()}
    ahead = [[names[m] for m in call.args[1]] for call in forward.call_args_list]
    return ahead, [names[call.args[0]] for call in shard.call_args_list
                   if isinstance(call.kwargs.get("offload_policy"), CPUOffloadPolicy)]


def test_mechanisms_blocks_are_prefetched_and_offloaded(ranks):
    ahead, offloaded = values(ranks(2), "calls")[0]
    h1, h2 = (f"transformer.h.{i}" for i in (1, 2))
    assert ahead == [[h1, h2], [h2], []] and offloaded == [h1]


# -----------------------------------------------------------------------------
# precision, clipping


OVERFLOWS = {f"fp16-{keys['strategy']}": keys for world, keys in STRATEGIES if world == 2}
OVERFLOWS["fp16-half"] = dict(ZERO3, cpu_offload=0.5)
OVERFLOWS["fp16-offloaded"] = dict(ZERO3, cpu_offload=1.0)


@case(*((2, name, keys) for name, keys in OVERFLOWS.items()))
def case_overflow(tmp, **overrides):
    """float16: an overflow on one rank only."""
    run = built(tmp, dtype="float16", loss_scale=1024.0, **overrides)
    rank = run.world.rank
    scaler = LossScaler(run.cfg)
    steps(run, scaler=scaler)
    weights = whole(run)
    scale = [scaler.scale]
    if rank == 1:  # one rank's loss becomes so large that its gradients leave float16
        scaler.scale = 3e38
    before, _ = steps(run, first=1, scaler=scaler)
    skipped = whole(run)
    scale.append(scaler.scale)
    if rank == 1:
        scaler.scale = 512.0
    loss, norm = steps(run, first=2, scaler=scaler)
    later = whole(run)
    scale.append(scaler.scale)
    moved = [n for n in weights if rank == 0 and not torch.equal(weights[n], skipped[n])]
    unmoved = [n for n in weights if rank == 0 and torch.equal(skipped[n], later[n])]
    return dict(scale=scale, loss=loss, norm=norm, moved=moved, unmoved=unmoved, before=before)


@pytest.mark.parametrize("name", OVERFLOWS)
def test_precision_float16_overflow_skips_the_step_on_all_ranks(ranks, name):
    zero, one = values(ranks(2), name)
    assert zero["scale"] == [1024.0, 512.0, 512.0]
    assert one["scale"][1] < 3e38 and one["scale"][2] == 512.0
    assert zero["moved"] == zero["unmoved"] == []
    assert math.isfinite(zero["loss"]) and 0.1 < zero["norm"] < 2  # without the scale
    # The skipped step's loss is divided by the scale that it had, not by the next step's.
    assert zero["before"] == pytest.approx(zero["loss"], rel=0.1)


@case((2, "clip-part", {}))
def case_clip_a_part(tmp):
    """Norms of a norm layer, whose parameters are the root's, of a block and of all; and their own
    parameters' whole gradients."""
    run = built(tmp, **ZERO3)
    run.wrapped(*run.batches.get(0, 0)[:2])[1].backward()
    norms = []
    for part in (run.model.transformer.ln_f, run.model.blocks[1], run.model):
        whole = [p.grad.full_tensor().flatten() for p in part.parameters()]
        norms.append((fsdp.clip_grad_norm(part, 0.0).item(), torch.cat(whole).norm().item()))
    return norms


def test_clipping_a_part_of_a_sharded_model(ranks):
    for norms in values(ranks(2), "clip-part"):
        assert all(found == pytest.approx(expected, rel=1e-6) for found, expected in norms)
        assert len({found for found, _ in norms}) == 3


def test_clipping_divides_by_the_loss_scale_without_a_limit_too():
    gpt = plain_gpt()
    for limit in (0.0, 1e9):
        for p in gpt.parameters():
            p.grad = torch.full_like(p, 8.0)
        fsdp.clip_grad_norm(gpt, limit, loss_scale=4.0)
        assert all(torch.equal(p.grad, torch.full_like(p, 2.0)) for p in gpt.parameters())

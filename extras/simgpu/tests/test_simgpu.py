"""
Whole trainings on simulated GPUs (extras/simgpu/README.md), beside the same ones on a CPU.

    python -m pytest -q extras/simgpu/tests/test_simgpu.py       # one, two and four GPUs

A mode is a combination of keys; together they have every pair of two keys' values. Of each run: its
losses, norms and samples are those of one process on a CPU; nothing races; in a step that is not
logged the host waits for nothing, unless rows are offloaded. Then: the peak of the device's memory
beside the plan's, and the bytes between host and device.
"""

import functools
import gc
import importlib.util
import itertools
import math
import os
import random
import shutil
import sys
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from harness import built, on_ranks, read_metrics, run_training, steps, tiny, values

import checkpoint
import fsdp
import sample
import saves
import train
from configurator import resolve
from ranks import World

simgpu = sys.modules.get("simgpu")  # in ranks that harness has forked from the simulating server
pytestmark = [pytest.mark.slow, pytest.mark.skipif(
    torch.cuda.is_available() and simgpu is None,
    reason="this machine has a GPU, which runs tests/test_cuda.py; or set SIM_GPUS=4")]

# ---------- modes -------------------------------------------------------------

# Steps 0 and 3 are logged: step 2 is not, nor is there an evaluation around it. 48 = 3 heads of 16,
# which memory-efficient attention takes in fp32.
BASE = dict(
    n_embd=48, max_iters=4, eval_interval=4, eval_iters=2, log_interval=3,
    gradient_accumulation_steps=4, always_save_checkpoint=True)
LLAMA = dict(model="llama", n_kv_head=1, n_inner=64)
MOE = dict(model="moe", n_expert=2, n_active=1)
FACTORS = dict(  # name: [keys]
    precision=[{}, dict(dtype="bfloat16"), dict(dtype="float16"), dict(reduce_dtype="bfloat16")],
    model=[{}, LLAMA, MOE],
    optimizer=[{}, dict(optimizer="muon")],
    activations=[{}, dict(activation_checkpointing="selective"),
                 dict(activation_checkpointing="full"),
                 dict(activation_checkpointing="full", activation_offload=True)],
    loss_chunks=[{}, dict(loss_chunks=3)],
    freeze=[{}, dict(freeze=r"wte|wpe|embed_tokens|(h|layers)\.0\.")],
    checkpoint=[{}, dict(checkpoint="sharded")],
    resumes=[False, True],
)
WHOLE = {**FACTORS, "precision": FACTORS["precision"][:3]}  # reduce_dtype is for what is sharded
SINGLE = {**WHOLE, "strategy": [dict(strategy="single")]}
SHARDED = dict(
    strategy=[dict(strategy="shard_grad_op"), dict(strategy="full_shard"),
              dict(strategy="hybrid_shard", shard_group_size=1)],
    grad_sync=[{}, dict(grad_sync="last")],
    cpu_offload=[{}, dict(cpu_offload=0.5), dict(cpu_offload=1.0)],
    units=[{}, dict(prefetch_blocks=2), dict(wrap_min_params=3000)],
    **FACTORS)
DDP = dict(
    strategy=[dict(strategy="ddp")],
    grad_sync=[{}, dict(grad_sync="every")],
    **WHOLE)


def allowed(mode):
    """The command refuses these."""
    if mode.get("units") and "wrap_min_params" in mode["units"]:
        return not mode["activations"] and not mode["loss_chunks"]
    return True


def pairwise(factors):
    """Few modes with every pair of two factors' values that is allowed: greedy, always equal."""
    draw = random.Random(0)
    missing, chosen = set(), []
    modes = [{name: draw.choice(some) for name, some in factors.items()} for _ in range(3000)]
    modes = [mode for mode in modes if allowed(mode)]
    pairs = [{(a, str(mode[a]), b, str(mode[b])) for a, b in itertools.combinations(mode, 2)}
             for mode in modes]
    missing.update(*pairs)
    while missing:
        best = max(range(len(modes)), key=lambda i: len(pairs[i] & missing))
        chosen.append(modes[best])
        missing -= pairs[best]
    return chosen


def keys_of(mode):
    keys = {}
    for some in mode.values():
        if isinstance(some, dict):
            keys.update(some)
    return dict(keys, resumes=mode["resumes"])


def title(keys):
    """Of a mode, and its directory."""
    words = [keys.get("strategy", "single")]
    for key, value in keys.items():
        if key in ("model", "optimizer", "checkpoint"):
            words.append(value)
        elif key in ("freeze", "activation_offload", "resumes", "masks"):
            words += [key] if value else []
        elif key != "strategy" and key not in LLAMA and key not in MOE:
            words.append(f"{key}={value}")
    return " ".join(words)


MASKED = dict(masks=True)  # the loader's masks: a micro-batch's weight, and -1 among its targets
REGATHER = dict(strategy="full_shard", shard_group_size=0, reshard_group_size=2)  # one copy
FOUR = [  # two copies of two shards each
    REGATHER, dict(REGATHER, dtype="bfloat16", cpu_offload=0.5, freeze=r"wte|h\.0\."),
    dict(MASKED, dtype="bfloat16", grad_sync="last"),
    dict(), dict(dtype="bfloat16", optimizer="muon"), dict(cpu_offload=0.5, checkpoint="sharded"),
    dict(grad_sync="last", reduce_dtype="bfloat16"), dict(LLAMA, cpu_offload=1.0, resumes=True)]
# By hand: what no pair needs, and compiled code takes its time.
LORA = dict(model="gpt2+lora", lora_rank=4, lora_alpha=6.0, learning_rate=1e-2)
MORE = [
    (1, dict(dropout=0.1)),
    (1, dict(dropout=0.1, activation_checkpointing="full", dtype="float16")),
    (1, dict(compile=True, **LLAMA)),
    *[(1, dict(dtype="float8"))] * (importlib.util.find_spec("torchao") is not None),
    (1, dict(dtype="bfloat16", **LORA)),
    (2, dict(strategy="full_shard", compile=True, loss_chunks=3)),
    (2, dict(strategy="ddp", compile=True, dtype="bfloat16")),
    (2, dict(strategy="full_shard", cpu_offload=0.5, resumes=True, **LORA)),
    (2, dict(strategy="ddp", optimizer="muon", **LORA))]
MODES = {}  # (world, name): keys
for world, factors in ((1, SINGLE), (2, DDP), (2, SHARDED)):
    for keys in map(keys_of, pairwise(factors)):
        MODES[world, title(keys)] = keys
for keys in (dict(strategy="ddp"), dict(strategy="full_shard", loss_chunks=3)):
    MODES[2, title({**keys, **MASKED})] = {**keys, **MASKED}
for keys in FOUR:
    keys = dict(strategy="hybrid_shard", shard_group_size=2) | keys
    MODES[4, title(keys)] = keys
for world, keys in MORE:
    MODES[world, title(keys)] = dict(strategy="single") | keys


# ---------- runs --------------------------------------------------------------


def whole_run(tmp, name, resumes=False, masks=False, **keys):
    """{step: loss, norm}, {step: losses of an evaluation} and tokens sampled at the end."""
    built = []
    build = train.build

    def kept(*args):
        built[:] = [args[0], *build(*args)]
        return built[1:]

    keys = {**BASE, **keys}
    if "lora_rank" in keys:
        keys["base"] = os.path.join(tmp, "lora-base")
    if masks:
        keys["dataset"] = os.path.join(tmp, "masked")
    with patch.object(train, "build", kept):
        if resumes:
            first = dict(keys, max_iters=2, eval_interval=2)
            run_training(tmp, name, **first)
            keys["init_from"] = "resume"
        run_training(tmp, name, **keys)
    steps, evaluations = {}, {}
    for row in read_metrics(os.path.join(tmp, name)):
        if "loss" in row:
            steps[row["iter"]] = row["loss"], row["grad_norm"]
        else:
            evaluations[row["iter"]] = row["train_loss"], row["val_loss"]

    model, wrapped, _ = built
    device = torch.device(keys["device"])
    generator = torch.Generator(device).manual_seed(7)
    prompt = torch.tensor([[1, 2, 3]], device=device)
    dtype = train.DTYPES[keys.get("dtype", "float32")]
    with fsdp.inference(wrapped), fsdp.autocast(wrapped, device.type, dtype):
        text = sample.generate(
            model, prompt, 20, top_k=20, vocab_size=60, generator=generator)
    return dict(steps=steps, evaluations=evaluations, text=text.tolist())


@contextmanager
def watched_step(number):
    """A list of what made the host wait from this step's begin to that of the next."""
    step, waits = train.train_step, []
    begin = None

    def watching(*args):
        nonlocal begin
        if begin is not None:
            waits.extend(event for event in seen.events[begin:] if event.waits)
            begin = None
        if args[4] == number:
            begin = len(seen.events)
        return step(*args)

    with simgpu.watch() as seen, patch.object(train, "train_step", watching):
        yield waits


def case_run(tmp, name, **keys):
    with simgpu.watch() as seen, watched_step(2) as waits:
        run = whole_run(tmp, name, **keys)
        torch.cuda.synchronize()  # what is still on its way arrives, and is compared
    return dict(run, races=list(map(str, seen.races)), waits=list(map(str, waits)),
                late=simgpu.device.simgpu_late(), used=simgpu.devices_used())


@pytest.fixture(scope="module", autouse=True)
def masked(tmp):
    """The toy data set in which few tokens are learned, and of two thirds of the windows none."""
    data = os.path.join(tmp, "masked")
    shutil.copytree(os.path.join(tmp, "toy"), data)
    for split in ("train", "val"):
        place = np.arange(os.path.getsize(f"{data}/{split}.bin") // 2)
        learned = (place % 5 < 2) & (place // 16 % 3 == 0)
        learned.tofile(f"{data}/{split}.mask")


@pytest.fixture(scope="module")
def on_gpus(tmp):
    """world -> what each of its modes has shown."""
    run_training(tmp, "lora-base", **BASE)

    @functools.cache
    def run(world):
        cases = {name: (case_run, dict(tmp=tmp, name=f"{world} {name}", device="cuda", **keys))
                 for (w, name), keys in MODES.items() if w == world}
        return on_ranks(world, cases)
    return run


@pytest.fixture(scope="module")
def on_cpu(tmp):
    """The keys that change numbers -> the run in one process on a CPU."""
    numbers = ("model", "n_kv_head", "n_inner", "n_expert", "n_active", "optimizer", "freeze",
               "masks", "dropout", *LORA)

    @functools.cache
    def run(**keys):
        name = "cpu-" + title(keys)
        return whole_run(tmp, name, device="cpu", strategy="single", log_interval=1, **{
            "eval_interval": 2, **keys})
    return lambda keys: run(**{key: keys[key] for key in numbers if key in keys})


# A gradient that is offloaded must be on the host before AdamW takes it there.
FOR_OFFLOADED = ("_fsdp_param_group.py", "_fsdp_collectives.py", "clip_grad.py", "fsdp.py",
                 "muon.py")


@pytest.mark.parametrize("world, name", MODES)
def test_simgpu_trains_as_a_cpu_does(on_gpus, on_cpu, world, name):
    keys = MODES[world, name]
    ranks = values(on_gpus(world), name)
    for rank, seen in enumerate(ranks):
        assert seen["races"] == []
        assert seen["late"] == 0
        assert seen["used"] == [rank]
        waits = seen["waits"]
        if keys.get("cpu_offload"):
            waits = [w for w in waits if not any(place in w for place in FOR_OFFLOADED)]
        if keys["strategy"] == "ddp":  # orders its buckets anew after its first step
            waits = [w for w in waits if "torch/nn/parallel/distributed.py" not in w]
        if keys.get("dtype") == "float16":
            # Whether a gradient overflowed is read once per step.
            waits = [w for w in waits if "optimizer.py" not in w]
        assert waits == []

    expected, seen = on_cpu(keys), ranks[0]
    # 16 bits: of each product 2**-8 or 2**-11, and a gradient's norm is less certain than a loss
    in_16_bits = "dtype" in keys or "reduce_dtype" in keys
    limit, limit_of_norm = (5e-3, 5e-2) if in_16_bits else (1e-5, 1e-5)
    assert set(seen["steps"]) >= {"3"} and set(seen["evaluations"]) >= {"4"}
    for step, (loss, norm) in seen["steps"].items():
        of_cpu = expected["steps"][int(step)]
        assert loss == pytest.approx(of_cpu[0], rel=limit)
        assert norm == pytest.approx(of_cpu[1], rel=limit_of_norm)
    for step, losses in seen["evaluations"].items():
        assert losses == pytest.approx(expected["evaluations"][int(step)], rel=limit)
    if not in_16_bits:
        assert all(rank["text"] == expected["text"] for rank in ranks)


# ---------- memory ------------------------------------------------------------

# Large enough that 512 bytes, to which an allocation is rounded, are little.
LARGE = dict(n_layer=4, n_embd=192, block_size=64, batch_size=4, gradient_accumulation_steps=4,
             dtype="float32")
ZERO3 = dict(strategy="full_shard")
CHECKPOINTED = dict(ZERO3, activation_checkpointing="full")
WAYS = {
    "ddp": dict(strategy="ddp"),
    "shard_grad_op": dict(strategy="shard_grad_op", grad_sync="last"),
    "full_shard": ZERO3,
    "hybrid_shard": dict(strategy="hybrid_shard", shard_group_size=1),
    "bfloat16": dict(ZERO3, dtype="bfloat16"),
    "half offloaded": dict(ZERO3, cpu_offload=0.5),
    "all offloaded": dict(ZERO3, cpu_offload=1.0),
    "selective": dict(ZERO3, activation_checkpointing="selective"),
    "full": CHECKPOINTED,
    "activation_offload": dict(CHECKPOINTED, activation_offload=True),
    "muon": dict(ZERO3, optimizer="muon"),
    "llama": dict(ZERO3, **LLAMA | dict(n_inner=512), dtype="bfloat16"),
}


def case_memory(tmp, **keys):
    """Bytes: a step's peak, and what it copies to the device and to the host."""
    gc.collect()
    before = torch.cuda.memory_allocated()
    run = built(tmp, **{**LARGE, **keys})
    steps(run)
    torch.cuda.reset_peak_memory_stats()
    with simgpu.watch() as seen:
        steps(run, first=1)
    copied = {way: sum(event.bytes for event in seen.copies if event.what.startswith(way))
              for way in ("to device", "to host")}
    peak = torch.cuda.max_memory_allocated() - before
    with simgpu.watch() as saving:
        tensors = checkpoint.flat_state(run.model, run.optimizer)
        saves.require_finite_state(tensors, run.world, step=2)
    rows = sum(p.to_local().nbytes for block in list(run.model.blocks)[1::2]
               for p in block.parameters()) if keys["strategy"] == "full_shard" else 0
    return dict(copied, peak=peak, rows=rows, asked=len(saving.waits))


@pytest.fixture(scope="module")
def memory(tmp):
    return on_ranks(2, {name: (case_memory, dict(tmp=tmp, device="cuda", **keys))
                        for name, keys in WAYS.items()})


@pytest.mark.parametrize("way", WAYS)
def test_simgpu_memory_is_what_the_plan_says(tmp, memory, way):
    """The plan rehearses on fake tensors, on one stream. Here the real step ran, on FSDP's streams,
    with buffers that live until another stream has read them."""
    plan = pytest.importorskip("extras.plan").plan
    world = World(size=2, device=torch.device("cuda"), local_size=2)
    cfg = resolve(tiny(tmp, **{**LARGE, **WAYS[way], "device": "cuda"}), world, distributed=True)
    machine = SimpleNamespace(
        gpu_memory=math.inf, host_memory=math.inf, attention="flash2", cluster=None)
    planned = plan(cfg, world, machine)["peak"]
    peak = values(memory, way)[0]["peak"]
    # Nothing is fragmented. What is above the plan: allocations are rounded up.
    assert planned <= peak <= 1.005 * planned


def test_simgpu_copies_between_host_and_device_are_the_formulas(memory):
    micro_batches = 2
    tokens = 4 * 64
    # Inputs and targets in int64, of the second and of the next step's first. The step's own
    # first has been prefetched by the step before.
    batches = 2 * 2 * 8 * tokens
    numbers = 200  # bytes: norms and scales of clipping, the loss

    [r, _] = values(memory, "full_shard")
    assert 0 <= r["to device"] - batches < numbers and r["to host"] < numbers
    # Offloaded rows are copied for forward and for backward; a gradient goes back.
    [r, _] = values(memory, "half offloaded")
    assert 0 <= r["to device"] - batches - 2 * micro_batches * r["rows"] < numbers
    assert 0 <= r["to host"] - micro_batches * r["rows"] < numbers
    # A checkpointed block's input goes out and comes back.
    [r, _] = values(memory, "activation_offload")
    inputs = 4 * micro_batches * tokens * 192 * 4
    assert 0 <= r["to device"] - batches - inputs < numbers
    assert 0 <= r["to host"] - inputs < numbers


def test_simgpu_a_save_waits_once_for_all_norms(memory):
    for way in ("ddp", "full_shard", "hybrid_shard", "muon"):
        assert [rank["asked"] for rank in values(memory, way)] == [1, 1]

# ---------- time --------------------------------------------------------------

# Slow enough that products, memory and collectives all count beside the shortest kernel.
SLOW_GPU = "1:0.02:1"
# How far the plan may be. It reduces DDP's gradients one by one, and of so small a model DDP sends
# all of them at the end.
TIMED = {"full_shard": 0.01, "shard_grad_op": 0.01, "hybrid_shard": 0.01, "ddp": 0.27}


def clocked(way):
    return {**LARGE, **WAYS[way], "dtype": "bfloat16", "device": "cuda"}


def slow_cluster():
    from extras.plan import timing  # here: a fork may have deleted it

    gpu = timing.find_gpu(SLOW_GPU)
    return timing.Cluster(gpu, gpus_per_node=8, network=gpu.network, attention="flash2")


def case_clock(tmp, way, device):
    """Seconds of a step by the streams' clocks."""
    from extras.plan.simulated import give_prices

    run = built(tmp, **clocked(way))
    steps(run)
    give_prices(slow_cluster())
    torch.cuda.synchronize()
    begin = simgpu.device.simgpu_seconds(torch.cuda.current_device(), 0)
    steps(run, first=1)
    torch.cuda.synchronize()
    simgpu.device.simgpu_price(0)
    return simgpu.device.simgpu_seconds(torch.cuda.current_device(), -1) - begin


@pytest.fixture(scope="module")
def clock(tmp):
    pytest.importorskip("extras.plan.timing")
    return on_ranks(2, {way: (case_clock, dict(tmp=tmp, way=way, device="cuda")) for way in TIMED})


@pytest.mark.parametrize("way", TIMED)
def test_simgpu_a_step_takes_as_long_as_the_plan_says(tmp, clock, way, monkeypatch):
    """Its clock goes by what FSDP2 and DDP ask for, operation by operation; the plan's by what was
    rehearsed. Each operation has the same price."""
    plan = pytest.importorskip("extras.plan").plan
    world = World(size=2, device=torch.device("cuda"), local_size=2)
    cfg = resolve(tiny(tmp, **clocked(way)), world, distributed=True)
    machine = SimpleNamespace(
        gpu_memory=math.inf, host_memory=math.inf, attention="flash2", cluster=slow_cluster(),
        flops_per_token=1.0)
    # The simulated GPU does not know that compute is slower beside a collective, and has no host.
    monkeypatch.setattr("extras.plan.timing.TAKEN", 0.0)
    planned = plan(cfg, world, machine)["step"].on_gpu
    assert values(clock, way)[0] == pytest.approx(planned, rel=TIMED[way])


# ---------- communicators -----------------------------------------------------


def case_groups(tmp, name, **keys):
    """The sizes of the groups in which NCCL runs during a whole run, which keep its memory."""
    with simgpu.watch() as seen:
        run_training(tmp, f"groups {name}", init_from="scratch", **BASE, **keys)
    return sorted({int(event.what.split()[-2]) for event in seen.collectives})


def test_simgpu_hybrid_sharding_needs_no_nccl_among_all_ranks(tmp):
    """Norms, logged losses, evaluations and a full checkpoint included. One group is all ranks."""
    hybrid = dict(strategy="hybrid_shard", shard_group_size=2)
    runs = {"2": hybrid, "sharded": dict(hybrid, checkpoint="sharded"),
            "4": dict(hybrid, shard_group_size=4), "ddp": dict(strategy="ddp")}
    results = on_ranks(4, {name: (case_groups, dict(tmp=tmp, name=name, device="cuda", **keys))
                           for name, keys in runs.items()})
    for name, sizes in {"2": [2], "sharded": [2], "4": [4], "ddp": [4]}.items():
        assert values(results, name) == [sizes] * 4

"""
The plan against other ways to know: what a step holds, what it sends, and its time by hand.

    python -m pytest -q extras/tests/test_plan.py

The closed formulas are those of formulas.py, which test_fsdp.py compares with real ranks.
"""

import math
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch
from weakref import WeakSet

import formulas
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import train
from configurator import STRATEGIES, load_config
from extras import plan
from extras.rehearse import COLLECTIVES, KINDS, Event, rehearse
from optimizer import LossScaler

pytestmark = pytest.mark.slow

GIB = 2**30
MACHINE = SimpleNamespace(
    strategy=None, gpus_per_node=8, gpu_memory=80 * GIB, host_memory=math.inf, gpu=None)
SMALL = ["--n_layer=3", "--n_head=6", "--n_embd=384", "--block_size=512", "--batch_size=4"]
HYBRID = ["--strategy=hybrid_shard", "--shard_group_size=4"]


def placed(size, *argv):
    """(cfg, World) for `size` GPUs."""
    cfg = load_config([*SMALL, f"--gradient_accumulation_steps={size}", *argv])
    return plan.place(replace(cfg, strategy=cfg.strategy or "full_shard"), size, MACHINE)


# ---------- the rehearsal ----------

# units in units: attention's keys and values are one together, its other two matrices their own
NESTED = ["--model=llama", "--n_inner=1024", "--n_kv_head=2", "--wrap_min_params=80000"]


@pytest.mark.parametrize("size, argv", [
    (1, ["--strategy=single"]), (8, ["--strategy=ddp"]), (8, []), (7, []),
    (16, HYBRID), (8, ["--freeze=mlp"]),
    (8, ["--cpu_offload=0.5"]), (8, ["--cpu_offload=1"]), (8, ["--cpu_offload=0.34", *NESTED]),
    (1, ["--strategy=single", "--optimizer=muon"]), (7, ["--optimizer=muon", "--freeze=mlp"]),
    (8, ["--model=test_fsdp"]),
    (16, [*HYBRID, "--optimizer=muon"])])
def test_plan_rehearsed_state_is_the_closed_formula(size, argv):
    """At rest 16 bytes a parameter, rows rounded up to the ranks'; the same by two ways."""
    cfg, world = placed(size, "--vocab_size=1000", *argv)
    model = train.meta_model(cfg)
    device, host = formulas.kept(model, cfg, world)
    # on a CPU: what a GPU copies from is pinned, and more than the formula
    timeline, events = rehearse(cfg, replace(world, device=torch.device("cpu")))
    counters = 4 * len(list(model.parameters()))  # AdamW counts its steps
    clipping = [event.row for event in events if not event.label]
    full = timeline[:, KINDS.index("gradients")].argmax()  # without clipping's all-reduce
    for n in (0, *clipping, full)[:2]:  # before the step, and before the optimizer's
        at = dict(zip(KINDS, timeline[n]))
        gradients = n > 0 or cfg.strategy == "ddp"  # in its buckets, all the time
        assert at["parameters"] == device["parameters"]
        assert 0 <= at["optimizer"] - device["optimizer"] <= counters
        assert at["gradients"] == pytest.approx(device["gradients"] * gradients, rel=0.02)
        state = host.total() - (0 if gradients else host["gradients"])
        assert at["host"] + at["pinned"] == pytest.approx(state, rel=0.02, abs=counters)


class MemoryTracer(TorchDispatchMode):
    """Of a real step: the bytes of all live tensors after each operation, and the collectives. A
    tensor is known from the first operation that takes or returns it."""

    def __init__(self):
        super().__init__()
        self.storages = WeakSet()  # views share one; freed ones leave by themselves
        self.clear()

    def clear(self):
        """Forget the operations so far, but not the tensors."""
        self.bytes = []
        self.collectives = Counter()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # the operation comes back with this rank's rows
        out = op(*args, **(kwargs or {}))
        for t in tree_leaves((args, kwargs, out)):
            if isinstance(t, torch.Tensor):
                self.storages.add(t.untyped_storage())
        self.bytes.append(sum(storage.nbytes() for storage in self.storages))
        if op.namespace == "c10d":
            self.collectives[op.name()] += 1
        return out


@pytest.mark.parametrize("size, argv", [
    (1, ["--strategy=single", "--dtype=float32"]), (1, ["--strategy=single", "--dtype=bfloat16"]),
    (1, ["--strategy=single", "--dtype=bfloat16", "--model=gpt2+lora", "--base_bits=4"]),
    (8, ["--freeze=mlp", "--activation_checkpointing=selective"]),
    (8, ["--strategy=shard_grad_op", "--gradient_accumulation_steps=16"]),
    (16, [*HYBRID, "--gradient_accumulation_steps=32"]), (8, ["--optimizer=muon"])])
def test_plan_peak_and_collectives_are_a_real_steps(size, argv):
    """The second of two steps: rank 0's own, in a group that sends nothing."""
    cfg, world = placed(size, "--device=cpu", "--n_layer=2", "--vocab_size=512", "--block_size=128",
                        "--n_embd=192", *argv)
    timeline, events = rehearse(cfg, world)
    planned = Counter()
    for event in events:
        planned[event.what] += event.times

    x = torch.zeros(cfg.batch_size, cfg.sizes.block_size, dtype=torch.int64)
    batches = SimpleNamespace(get=lambda step, micro: (x, x, 1.0),
                              prefetch_next=lambda step, micro: None)
    scaler = LossScaler(replace(cfg, dtype="float32"))  # a fake norm has no value
    dist.init_process_group("fake", rank=0, world_size=world.size, store=FakeStore())
    try:
        with MemoryTracer() as tracer:
            model = train.meta_model(cfg)
            wrapped, optimizer = train.build(model, cfg, world)
            for step in range(2):  # the first makes the optimizer's state
                tracer.clear()
                train.train_step(model, wrapped, optimizer, scaler, batches, step, cfg, world,
                                 train.forward_backward)
    finally:
        dist.destroy_process_group()
    assert timeline.sum(axis=1).max() == pytest.approx(max(tracer.bytes), rel=0.01)
    kinds = {op.name(): what for op, (what, *_) in COLLECTIVES.items()}
    assert planned == {kinds[name]: n for name, n in tracer.collectives.items()}


def test_plan_host_memory_is_what_is_offloaded_and_what_a_sharded_save_copies():
    """On CPUs nothing is pinned, and so no size is rounded up. 8 ranks share a node's."""
    argv = "--vocab_size=1024", "--device=cpu", "--n_embd=1536"
    none, half, all_, saved = (plan.plan(*placed(8, *argv, *more), MACHINE) for more in (
        [], ["--cpu_offload=0.5"], ["--cpu_offload=1"], ["--checkpoint=sharded"]))
    n = sum(p.numel() for p in train.meta_model(placed(8, *argv)[0]).parameters())
    assert none["peak"] > half["peak"] > all_["peak"] and none["host"] == 0
    assert 16 * n <= all_["host"] <= 1.3 * 16 * n  # and a block's copies
    assert saved["host"] == pytest.approx(12 * n, rel=1e-4)  # and AdamW's counters


# ---------- what a step sends ----------


TINY = ["--n_layer=3", "--n_head=3", "--n_embd=30", "--block_size=16", "--batch_size=1",
        "--vocab_size=67", "--bias=True"]  # rows that 7 ranks do not divide
WAYS = {name: (7, [f"--strategy={name}"]) for name in STRATEGIES if name != "single"}
for name, strategy in STRATEGIES.items():
    if strategy.in_groups:
        WAYS[name] = 16, [f"--strategy={name}", "--shard_group_size=4"]
WAYS["regather"] = 16, ["--strategy=full_shard", "--reshard_group_size=4"]
ON_ALL = [
    *([f"--grad_sync={sync}", f"micro_batches={n}"] for sync in ("every", "last") for n in (2, 5)),
    ["--dtype=float32"], ["--freeze=mlp", "micro_batches=2"],
    [r"--freeze=wte|wpe|h\.[01]\.", "micro_batches=2"],
    [r"--freeze=wte|wpe|h\.[01]\.", "--grad_sync=last", "micro_batches=4"], [r"--freeze=h\.1\."],
    ["--optimizer=muon"], ["--optimizer=muon", "--dtype=float16", "micro_batches=3"],
    ["--optimizer=muon", r"--freeze=h\.0\.attn"],
    ["--activation_checkpointing=full", "--activation_offload=True", "--loss_chunks=3"]]
ON_SHARDED = [
    ["--reduce_dtype=bfloat16"],
    ["--wrap_min_params=2000"], ["--prefetch_blocks=2"], ["--cpu_offload=0.5"], ["--cpu_offload=1"],
    ["--model=llama", "--n_inner=50", "--n_kv_head=1", "--wrap_min_params=500"]]
if torch.__version__ >= "2.12":  # before, FSDP2 refuses integers
    ON_SHARDED.append(["--model=gpt2+lora", "--base_bits=4", "--n_embd=192"])
SENT = [(name, more) for name in WAYS for more in ON_ALL + (name != "ddp") * ON_SHARDED]


@pytest.mark.parametrize("name, more", SENT, ids=[f"{name} {' '.join(m)}" for name, m in SENT])
def test_plan_rehearsed_collectives_are_the_closed_formula(name, more):
    """Kind, group and bytes of whole buffers, clipping's 4 among them. Of many micro-batches only
    some are rehearsed."""
    size, argv = WAYS[name]
    flags = [*TINY, *argv, *(flag for flag in more if flag.startswith("--"))]
    if "--model=llama" in more:
        flags.remove("--bias=True")
        flags = ["--model=llama", *flags]
    n = [int(flag.split("=")[1]) for flag in more if flag.startswith("micro_batches")]
    cfg = load_config([*flags, f"--gradient_accumulation_steps={size * sum(n or [1])}"])
    cfg, world = plan.place(cfg, size, MACHINE)
    _, events = rehearse(cfg, world)
    collectives = Counter()
    for e in events:
        collectives[e.what, e.ranks] += e.times * e.size
    assert collectives == formulas.traffic(train.meta_model(cfg), cfg, world)


def test_plan_of_float8_gathers_a_byte_per_element():
    """Of the blocks' matrices, 12 C^2 each, in forward and in backward."""
    pytest.importorskip("torchao")
    gathered = []
    for model in ("gpt2", "gpt2+float8"):
        _, events = rehearse(*placed(8, f"--model={model}", "--dtype=bfloat16"))
        gathered.append(sum(event.size for event in events if event.what == "all_gather"))
    assert gathered[0] - gathered[1] == 2 * 3 * 12 * 384**2


@pytest.mark.parametrize("size, host, device, argv, fits", [
    (16, 0, 68, [], "yes"), (16, 0, 69, [], "maybe"), (16, 0, 91, [], "no"),
    (16, 10, 90, [], "maybe"), (16, 11, 1, [], "no"), (2, 30, 1, [], "yes"),  # two on their node
    (2, 0, 34, ["--cuda_graph=True"], "yes"), (2, 0, 35, ["--cuda_graph=True"], "maybe")])
def test_plan_fits_in_two_thirds_of_a_gpu_and_a_nodes_host_memory(size, host, device, argv, fits):
    machine = SimpleNamespace(**{**vars(MACHINE), "gpu_memory": 100, "host_memory": 80})
    timeline = np.zeros((3, len(KINDS)))
    timeline[1:, 1:3] = (host, 1), (0, device)
    cfg = load_config(["--strategy=full_shard", *argv])
    with patch.object(plan, "rehearse", lambda *args: (timeline, [])):
        one = plan.plan(*plan.place(cfg, size, machine), machine)
    assert (one["host"], one["peak"], one["fits"]) == (min(size, 8) * host, device, fits)


# ---------- the command ----------


SHALLOW = "--world_size=8", "--n_layer=4", "--block_size=512", "--n_head=16", "--n_embd=2048"


@pytest.mark.parametrize("argv, gpu_memory, taken", [
    (["--n_layer=2"], 80, "single"), (SHALLOW, 18, "ddp"), (SHALLOW, 12.2, "shard_grad_op"),
    (SHALLOW, 2, "")])
def test_plan_takes_the_simplest_strategy_that_fits(capsys, argv, gpu_memory, taken):
    plan.main([*argv, f"--gpu_memory={gpu_memory}"])
    last = capsys.readouterr().out.splitlines()[-1]
    assert (f"take --strategy={taken}, " if taken else "--loss_chunks=8") in last


# ---------- times ----------

H100 = SimpleNamespace(gpu=plan.GPUS["H100"], mfu=0.5, link=None, gpus_per_node=8)
A_SECOND = 0.5 * 989e12  # FLOPs


@pytest.mark.parametrize("link, flops, expected", [
    (None, 9 * A_SECOND, 9 + 7 / 8 * 4),  # three gathers run beside nine seconds of products
    (None, 0, 7 / 8 * 7), (720, 0, 7 / 8 * 3.5)])
def test_timing_of_a_step_is_a_sum_by_hand(link, flops, expected):
    """The first gather, the last reduction and clipping's all-reduce stand alone."""
    second = 360e9  # bytes of a whole buffer
    events = [Event(what, label, 0, 1, second, 8, 1, times) for what, label, times in (
        ("all_gather", "FSDP::", 1), ("all_gather", "FSDP::", 3),
        ("reduce_scatter", "FSDP::", 1), ("all_reduce", "", 1))]
    machine = SimpleNamespace(**{**vars(H100), "link": link})
    assert plan.seconds(events, flops, machine) == pytest.approx(expected)


@pytest.mark.parametrize("ranks, stride, gb", [
    (8, 1, 360), (64, 1, 360),  # eight lines of 50 leave a node
    (2, 8, 50), (4, 4, 100)])
def test_timing_a_ring_is_as_fast_as_its_slowest_link(ranks, stride, gb):
    event = Event("all_gather", "", 0, 1, 1, ranks, stride)
    assert plan.rate(event, H100) == gb * 1e9

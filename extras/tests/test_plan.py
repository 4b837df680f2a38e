"""
plan/ against other ways to know: what a step holds, and what it sends. What plan refuses on its
command line is in test_mistakes_of_extras.py.

    python -m pytest -q extras/tests/test_plan.py
    python extras/tests/test_plan.py    # beside PyTorch's own memory trackers: 124M to 13B

The closed formulas are those of formulas.py, which test_fsdp.py compares with real ranks.
"""

import importlib
import math
import os
import re
import sys
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import formulas
import numpy as np
import pytest
import torch
import torch.distributed as dist
from harness import (
    HERE,
    built,
    heard,
    on_ranks,
    plain_gpt,
    python,
    refused,
    steps,
    tiny,
    values,
)
from test_optimizer import Factored
from torch.distributed.fsdp._fully_shard._fsdp_collectives import foreach_reduce
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore

import fsdp
import train
from configurator import STRATEGIES, load_config, resolve
from extras import plan
from extras.muon import divide
from extras.plan import timing
from extras.plan.picture import relative
from extras.plan.rehearse import KINDS, Event, Ledger, power_of_two, rehearse
from model import GPT
from optimizer import LossScaler
from ranks import World

pytestmark = pytest.mark.slow

GIB = 2**30
MACHINE = SimpleNamespace(
    strategy=None, gpus_per_node=8, gpu_memory=80 * GIB, host_memory=math.inf, cluster=None,
    attention="flash2")
SMALL = ["--n_layer=3", "--n_head=6", "--n_embd=384", "--block_size=512", "--batch_size=4"]
HYBRID = ["--strategy=hybrid_shard", "--shard_group_size=4"]
REGATHER = ["--strategy=full_shard", "--reshard_group_size=4"]
OURS = ("single", "ddp", "shard_grad_op", "full_shard", "hybrid_shard")  # a fork may add some


def placed(size, *argv):
    """(cfg, World) for `size` GPUs."""
    cfg = load_config([*SMALL, f"--gradient_accumulation_steps={size}", *argv])
    return plan.place(replace(cfg, strategy=cfg.strategy or "full_shard"), size, MACHINE)


def row(size, *argv):
    """plan's; its columns add up to its peak."""
    one = plan.plan(*placed(size, *argv), MACHINE)
    assert sum(one[kind] for kind in KINDS[1:]) == one["peak"]
    assert one["peak"] == one["timeline"][:, 1:].sum(axis=1).max()
    return one


def state(one):
    """{kind: bytes on the device} of a row before the optimizer's step."""
    start = dict((where, n) for n, where in one["marks"])["optimizer"]
    kinds = ("parameters", "gradients", "optimizer")
    return {kind: one["timeline"][start, KINDS.index(kind)] for kind in kinds}


def step_of(cfg):
    """train_step's arguments between the optimizer and the step's number."""
    x = torch.zeros(cfg.batch_size, cfg.sizes.block_size, dtype=torch.int64)
    batches = SimpleNamespace(get=lambda step, micro: (x, x, 1.0),
                              prefetch_next=lambda step, micro: None)
    return LossScaler(replace(cfg, dtype="float32")), batches  # a fake norm has no value


@contextmanager
def fake_group(world):
    """Collectives that send nothing."""
    dist.init_process_group("fake", rank=0, world_size=world.size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


# -----------------------------------------------------------------------------
# the rehearsal


def tracked(cfg, world):
    """
    Bytes at the peak of two whole steps by the trackers that PyTorch has (private, and slower than
    the rehearsal): device and host together. Its own way for everything but the model and the step.
    """
    from torch._subclasses import FakeTensorMode
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed._tools.mem_tracker import MemTracker
    if cfg.strategy == "ddp":  # its buckets: all gradients, all the time
        cfg, world = replace(cfg, strategy="single", gradient_accumulation_steps=2), World()
    micro_batches = min(cfg.gradient_accumulation_steps // world.size, 2)
    cfg = replace(cfg, gradient_accumulation_steps=micro_batches * world.size)

    def norm(x, shape, weight=None, eps=None, plain=F.rms_norm, on=world.device.type):
        if on == "cpu":
            return plain(x, shape, weight, eps)
        return F.layer_norm(x, shape, weight)  # keeps as much as a GPU's kernel

    world = replace(world, device=torch.device("cpu"))
    model = train.meta_model(cfg)
    with fake_group(world):
        mesh = None
        if STRATEGIES[cfg.strategy].sharded:
            mesh = fsdp.make_mesh("cpu", cfg.shard_group_size)
        with (FakeTensorMode(allow_non_fake_inputs=True),
              patch("model.explicit_is_faster", lambda *args: False),
              patch.object(F, "rms_norm", norm),
              patch.object(torch, "_fused_adamw_", lambda *args, **kwargs: None)):
            with patch.object(fsdp, "make_mesh", lambda *args: mesh):
                wrapped = train.parallelize(model, cfg, world)
            optimizer = train.make_optimizer(model, cfg)
            tracker = FSDPMemTracker(wrapped, optimizer) if mesh else MemTracker()
            if not mesh:
                tracker.track_external(model, optimizer)

            def restart(module, args):  # the trackers want it between forwards, before their hooks
                if module is wrapped:
                    tracker.reset_mod_stats()
            hook = torch.nn.modules.module.register_module_forward_pre_hook(restart)
            with tracker:
                work = train.micro_batch(wrapped, cfg, world)
                for step in range(2):  # the first makes the optimizer's state
                    train.train_step(wrapped, optimizer, *step_of(cfg), step, cfg, world, work)
            hook.remove()
            return tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]


def difference(cfg, world):
    return rehearse(cfg, world)[0].sum(axis=1).max() / tracked(cfg, world) - 1


WIDE = ["--n_embd=1536", "--batch_size=1", "--block_size=64", "--activation_checkpointing=full"]


@pytest.mark.parametrize("size, argv", [
    (1, []), (8, ["--activation_checkpointing=selective"]), (512, WIDE), (8, WIDE),
    (1, ["--strategy=single"]), (1, ["--strategy=single", "--dtype=float32", *WIDE]),
    (8, ["--strategy=ddp", *WIDE]), (8, ["--strategy=shard_grad_op", *WIDE]),
    (16, [*HYBRID, *WIDE]),
    (16, ["--strategy=hybrid_shard", "--gradient_accumulation_steps=48", *WIDE]),
    (8, ["--gradient_accumulation_steps=32"]),
    (8, ["--gradient_accumulation_steps=16", "--grad_sync=last", *WIDE]),
    (8, ["--strategy=shard_grad_op", "--gradient_accumulation_steps=16", "--grad_sync=last"]),
    (8, [r"--freeze=wte|wpe|h\.[01]\."]), (8, ["--freeze=mlp"]), (8, ["--wrap_min_params=100000"]),
    (8, ["--prefetch_blocks=2", *WIDE]), (8, ["--dtype=float16", "--bias=True"]),
    (8, ["--reduce_dtype=bfloat16", *WIDE]), (8, ["--cpu_offload=0.5", *WIDE]),
    (8, ["--model=llama", "--n_inner=1024", "--device=cpu", "--dtype=float32"]),
    (1, ["--strategy=single", "--model=test_fsdp"]), (8, ["--model=test_fsdp"]),  # untied
    (8, ["--optimizer=muon", *WIDE]),
])
def test_plan_rehearsal_is_pytorchs_trackers(size, argv):
    """Within 1%, most of them exactly; `python tests/test_plan.py` has the large models."""
    # few symbols: the blocks, not the logits, are what is compared
    cfg, world = placed(size, "--vocab_size=1024", *argv)
    # offloaded shards and gradients are copied, which the trackers' one memory does not show
    limit = 0.03 if cfg.cpu_offload else 0.01
    assert abs(difference(cfg, world)) < limit


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
    timeline, marks, *_ = rehearse(cfg, replace(world, device=torch.device("cpu")))
    counters = 4 * len(list(model.parameters()))  # AdamW counts its steps
    for n, where in (marks[0], marks[-1]):  # before the step, and before the optimizer's
        at = dict(zip(KINDS, timeline[n]))
        gradients = where == "optimizer" or cfg.strategy == "ddp"  # in its buckets, all the time
        assert at["parameters"] == device["parameters"]
        assert 0 <= at["optimizer"] - device["optimizer"] <= counters
        assert at["gradients"] == pytest.approx(device["gradients"] * gradients, rel=0.02)
        state = host.total() - (0 if gradients else host["gradients"])
        assert at["host"] == pytest.approx(state, rel=0.02, abs=counters)


def allocated(cfg, world):
    """Bytes at the peak of a real step's second, over what there was before it, as PyTorch's
    profiler heard from the CPU's allocator: rank 0's own, in a group that sends nothing."""
    # torch 2.13 makes no gloo group, such as the patient one, beside a fake one.
    with fake_group(world), patch.object(train, "patient_barrier"):
        wrapped, optimizer = train.build(train.meta_model(cfg), cfg, world)
        work = train.micro_batch(wrapped, cfg, world)
        train.train_step(wrapped, optimizer, *step_of(cfg), 0, cfg, world, work)
        with torch.profiler.profile(profile_memory=True) as profile:
            train.train_step(wrapped, optimizer, *step_of(cfg), 1, cfg, world, work)
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


@pytest.mark.parametrize("size, argv", [
    (1, ["--strategy=single", "--dtype=float32"]), (1, ["--strategy=single", "--dtype=bfloat16"]),
    (8, []),
    (8, ["--strategy=shard_grad_op", "--gradient_accumulation_steps=16"]),
    (16, [*HYBRID, "--gradient_accumulation_steps=32"]),
    (8, ["--optimizer=muon"])])
def test_plan_peak_is_a_real_steps(size, argv):
    cfg, world = placed(size, "--device=cpu", "--n_layer=2", "--vocab_size=512", "--block_size=128",
                        "--n_embd=192", *argv)
    timeline, *_ = rehearse(cfg, world)
    state = sum(timeline[0, KINDS.index(kind)] for kind in ["parameters", "optimizer"])
    tokens = 4 * 128 * 8  # the batch was there before the real step
    assert timeline.sum(axis=1).max() - state - tokens == pytest.approx(
        allocated(cfg, world), rel=0.01)


def peak_from(where, cfg, world):
    """Bytes on the device at their most from the last mark `where` to the next."""
    timeline, marks, *_ = rehearse(cfg, world)
    starts = [n for n, _ in marks] + [len(timeline)]
    i = max(i for i, (_, name) in enumerate(marks) if name == where)
    return timeline[starts[i]:starts[i + 1], 1:].sum(axis=1).max()


def test_plan_ddp_copies_for_muon():
    """In bf16, beside 16 bytes a parameter: in Muon's step the blocks' matrices, and the owner's
    for every rank. Muon's state has 4 bytes less."""
    cfg, world = placed(8, "--strategy=ddp", "--vocab_size=1000", "--dtype=bfloat16", *WIDE)
    plain, muon = (peak_from("optimizer", replace(cfg, optimizer=optimizer), world)
                   for optimizer in ("adamw", "muon"))
    matrices = [p for p in train.meta_model(cfg).blocks.parameters() if p.dim() > 1]
    b, own = (sum(p.numel() for p in some) for some in (matrices, divide(matrices, 8)[0]))
    assert muon - plain + 4 * b == pytest.approx(2 * b + 2 * 8 * own, rel=0.01)


def test_plan_offload_separates_device_and_host():
    none, half, all_, saved = (
        row(8, "--vocab_size=1024", *WIDE, *more)
        for more in ([], ["--cpu_offload=0.5"], ["--cpu_offload=1"], ["--activation_offload=True"]))
    assert none["peak"] > half["peak"] > all_["peak"] and none["host"] == 0
    assert set(state(all_).values()) == {0} and all_["parameters"] == all_["optimizer"] == 0
    node = 8 * sum(state(none).values())
    assert node <= all_["host"] <= 2 * node  # 8 ranks share a node's; copies; pinned memory
    x = 1 * 64 * 1536 * 2
    assert saved["host"] == 8 * 3 * 2**18 > 8 * 3 * x  # each block's input, in bf16
    assert 0 < none["peak"] - saved["peak"] <= 3 * x


def test_plan_pinned_host_memory_is_powers_of_two():
    """Parameters, gradients and activations of what is offloaded, each tensor; not the moments."""
    sizes = ["--n_layer=2", "--n_head=3", "--n_embd=384", "--block_size=96", "--bias=False"]
    cfg, world = placed(2, "--vocab_size=1000", "--cpu_offload=1", *sizes)
    timeline, marks, *_ = rehearse(cfg, world)
    pinned = moments = 0
    for p in train.meta_model(cfg).parameters():
        own = 4 * math.ceil(len(p) / 2) * p[0].numel()
        pinned += 2 ** math.ceil(math.log2(own))
        moments += 2 * own
    host = [timeline[n, 0] for n, where in marks if where in ("forward", "optimizer")]
    counters = 4 * len(list(train.meta_model(cfg).parameters()))
    assert 0 <= host[0] - pinned - moments <= counters
    assert 0 <= host[-1] - 2 * pinned - moments <= counters
    one = "--strategy=single", "--activation_offload=True", "--activation_checkpointing=full"
    x = 4 * 96 * 384 * 4  # 589,824 bytes, pinned as 2^20; autocast keeps it fp32
    assert row(1, *sizes, *one, "--compile=False")["host"] == 2 * 2**20 > 2 * x


@pytest.mark.parametrize("t", [torch.empty(4).expand(1000, 4), torch.empty(1000)[:4]])
def test_plan_a_view_moves_no_more_than_there_is(t):
    """An expanded tensor is smaller than it looks, and a slice than its storage."""
    [(_, size)] = Ledger(pins_host_memory=False, weight=1).sizes([t])
    assert size == 16


@pytest.mark.parametrize("size, pinned", [
    (1, 1), (3, 4), (4, 4), (2**20, 2**20), (2**20 + 1, 2**21)])
def test_plan_pinned_size_that_is_a_power_of_two_stays(size, pinned):
    assert power_of_two(size) == pinned


def test_plan_loss_chunks_lower_gpt2_xls_peak_by_the_logits():
    """Of 12 bytes for each token and symbol, and 2 of bf16 logits, an eighth is left. Two of its
    blocks: the logits do not depend on how many there are."""
    argv = ["config/train_gpt2_xl.py", "--n_layer=2", "--gradient_accumulation_steps=8"]
    cfg = load_config(argv)
    assert cfg.loss_chunks == 8  # the config has it on
    losses, peaks = [], []
    for chunks in (0, 8):
        timeline, marks, *_ = rehearse(*plan.place(replace(cfg, loss_chunks=chunks), 8, MACHINE))
        start = {where: n for n, where in marks}
        head = timeline[start["forward, head"]:start["backward, block 1"], 1:].sum(axis=1)
        losses.append(head.max() - head[0])
        peaks.append(timeline[:, 1:].sum(axis=1).max())
    logits = 8 * 1024 * 50304
    assert 12 <= losses[0] / logits <= 14.2
    gradients = 2 * 2 * 50304 * 1600  # of the head, in bf16: the sum so far and a chunk's
    assert 12 / 8 <= losses[1] / logits <= 14.2 / 8 + gradients / logits
    assert peaks[0] - peaks[1] >= 0.8 * 12 * 7 / 8 * logits  # then the peak is elsewhere


def test_plan_cpus_and_gpus_attention_differ():
    """Up to T = 256 in bf16 a CPU keeps T x T probabilities, a GPU does not."""
    argv = "--strategy=single", "--block_size=128", "--dtype=bfloat16", "--vocab_size=256"
    gpu, cpu, dropout = (
        row(1, *argv, *more)
        for more in ([], ["--device=cpu"], ["--dropout=0.1"]))
    per_layer = 4 * 6 * 128 * 128 * 2  # B nh T T in bf16
    assert cpu["peak"] - gpu["peak"] > 2 * per_layer
    assert gpu["peak"] < dropout["peak"] < 1.5 * gpu["peak"]  # masks, but no T x T


def kept_until_backward(*argv):
    """Bytes of activations at the end of the last block's forward, and the config."""
    cfg, world = placed(1, "--strategy=single", "--vocab_size=1000", *argv)
    timeline, marks, *_ = rehearse(cfg, world)
    return timeline[dict(map(reversed, marks))["forward, head"], KINDS.index("activations")], cfg


def test_plan_counts_a_gpus_masks_and_the_fp32_of_qk_norm():
    """Of dropout a byte a number: after the embedding and twice a block. Under CUDA's autocast
    RMSNorm keeps its x in fp32, where a CPU's would keep bf16."""
    (none, cfg), (dropout, _) = (kept_until_backward(f"--dropout={p}") for p in (0.0, 0.1))
    tokens = cfg.batch_size * cfg.sizes.block_size
    assert dropout - none == tokens * cfg.sizes.n_embd * (1 + 2 * cfg.sizes.n_layer)
    llama = "--model=llama", "--n_inner=1024", "--n_kv_head=2", "--dtype=bfloat16"
    (none, cfg), (normed, _) = (
        kept_until_backward(*llama, f"--qk_norm={on}") for on in (False, True))
    rows = tokens * (cfg.sizes.n_head + cfg.sizes.n_kv_head) * cfg.sizes.n_layer
    assert normed - none == pytest.approx(rows * 4 * cfg.sizes.n_embd / cfg.sizes.n_head, rel=0.04)


@pytest.mark.parametrize("name", ["llama_1b", "llama2_7b", "llama3_8b"])
def test_plan_recipes_say_their_peak_and_time(name):
    """As planned now; the larger ones' by the same command, in their headers too."""
    path = f"{HERE}/extras/config/{name}.py"
    said = re.search(r"^# On (\d+) GPUs the plan's peak is ([\d.]+) GiB", open(path).read(), re.M)
    cfg = load_config([path])
    one = plan.plan(*plan.place(cfg, int(said[1]), MACHINE), MACHINE)
    assert f"{one['peak'] / GIB:.1f}" == said[2]
    gpu = timing.H100
    cluster = timing.Cluster(gpu, 8, gpu.network, gpu.kernel, compiled=cfg.compile)
    micro_batches = cfg.gradient_accumulation_steps // int(said[1])
    step = timing.run(one["program"], cluster, micro_batches)
    seconds = re.search(r"^# With --gpu=H100 it plans ([\d.]+) s per step", open(path).read(), re.M)
    # At the end of backward torch 2.13 waits for the root's reduction before it reduces an
    # embedding that is a unit, as llama3_8b's; 2.15 waits once, for both, and saves 0.3 ms of each
    # micro-batch.
    assert step.seconds == pytest.approx(float(seconds[1]), abs=0.0015)


@pytest.mark.parametrize("config, size, flags, fits", [
    # "Without CPU offloading we'd only be able to fit a batch size of 1 per GPU."
    ("gpt3_13b", 8, ["--batch_size=1"], "maybe"), ("gpt3_13b", 8, ["--batch_size=2"], "no"),
    ("gpt3_13b", 1, ["--batch_size=8", "--cpu_offload=1.0", "--host_memory=256"], "yes"),
    ("gpt3_6.7b", 1, ["--batch_size=8", "--cpu_offload=1.0", "--host_memory=128"], "yes")])
def test_plan_fairseqs_models_fit_v100s_of_32_gb(config, size, flags, fits):
    """As its page on fully sharded training says, with full checkpointing, in fp16. And the
    config's header says what is planned on one."""
    path = f"{HERE}/extras/config/{config}.py"
    [one] = plan.main([
        path, f"--world_size={size}", "--gpu=V100",
        "--strategy=full_shard", "--activation_checkpointing=full", "--checkpoint=none",
        f"--gradient_accumulation_steps={size}", *flags])
    assert one["fits"] == fits
    if size == 1:
        with open(path) as f:
            header = f.read().replace("\n# ", " ")
        said = re.search(r"plans ([\d.]+) GiB, (\d+) of the host and (\d+) tokens/s", header)
        planned = f"{one['peak'] / GIB:.1f}", f"{one['host'] / GIB:.0f}", f"{one['tok/s']:.0f}"
        assert said.groups() == planned


@pytest.mark.parametrize("offload", [0.0, 0.5, 1.0])
def test_plan_host_memory_has_what_a_sharded_save_copies(offload):
    """12 bytes a parameter of the rank's own rows, wherever they are: here 8 ranks divide all. On
    CPUs, where nothing is pinned, and so no size is rounded up."""
    argv = "--vocab_size=1024", "--device=cpu", f"--cpu_offload={offload}"
    none, saved = (row(8, *argv, f"--checkpoint={kind}") for kind in ("full", "sharded"))
    n = plan.count(train.meta_model(placed(8, *argv)[0]))
    assert (none["host"] > 0) == (offload > 0)
    assert saved["host"] - none["host"] == pytest.approx(12 * n, rel=1e-4)  # and AdamW's counters


def test_plan_gradients_that_wait_for_their_reduction_are_no_activations():
    """With --grad_sync=last each rank keeps whole ones in fp32 between two micro-batches, and FSDP
    tells what they are only when it reduces them."""
    argv = "--strategy=shard_grad_op", "--grad_sync=last", "--gradient_accumulation_steps=16"
    cfg, world = placed(8, "--vocab_size=1024", *argv)
    timeline, marks, *_ = rehearse(cfg, world)
    [_, second] = [n for n, where in marks if where == "forward"]
    kept = dict(zip(KINDS, timeline[second]))
    assert kept["gradients"] == 4 * plan.count(train.meta_model(cfg))
    assert kept["activations"] < 0.01 * kept["gradients"]


def test_plan_cpus_and_gpus_rmsnorm_differ():
    """A GPU's kernel keeps a number a row; a CPU's makes and keeps the normalized x too."""
    argv = "--model=llama", "--n_inner=1024", "--strategy=single", "--dtype=float32"
    gpu, cpu = (row(1, *argv, "--vocab_size=256", *more) for more in ([], ["--device=cpu"]))
    x = 4 * 512 * 384 * 4  # B T C in fp32
    assert cpu["activations"] - gpu["activations"] == pytest.approx(2 * 3 * x, rel=0.01)


@pytest.mark.parametrize("name", [
    "torch._subclasses", "torch.testing._internal.distributed.fake_pg",
    "torch.utils._python_dispatch"])
def test_plan_without_pytorchs_private_parts_is_one_line(monkeypatch, name):
    for module in ("extras.plan.rehearse", "extras.plan"):
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)
    said = refused(importlib.import_module, "extras.plan")
    assert name in said and "torch 2.13 or 2.15" in said  # the README names these


# -----------------------------------------------------------------------------
# what a step sends

TINY = ["--n_layer=3", "--n_head=3", "--n_embd=30", "--block_size=16", "--batch_size=1",
        "--vocab_size=67", "--bias=True"]  # rows that 7 ranks do not divide
WAYS = {name: (7, [f"--strategy={name}"]) for name in STRATEGIES if name != "single"}
for name, strategy in STRATEGIES.items():
    if strategy.in_groups:
        WAYS[name] = 16, [f"--strategy={name}", "--shard_group_size=4"]
WAYS["regather"] = 16, REGATHER
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
    _, _, events, _ = rehearse(cfg, world)
    collectives = Counter()
    for e in events:
        if e.size:
            collectives[e.what, e.ranks] += e.times * e.size
    assert collectives == formulas.traffic(train.meta_model(cfg), cfg, world)


@pytest.mark.parametrize("more", [
    [], ["--prefetch_blocks=2"], ["--cpu_offload=0.5"], ["--wrap_min_params=2000"],
    ["--activation_checkpointing=full"], [r"--freeze=wte|wpe|h\.0\."], ["--grad_sync=last"]])
@pytest.mark.parametrize("name", [name for name in WAYS if name != "ddp"])
def test_plan_every_gathered_unit_is_freed(name, more):
    """And it is gathered by itself: never twice without a free. So each has a place and a row."""
    size, argv = WAYS[name]
    flags = [*TINY, *argv, *more, f"--gradient_accumulation_steps={2 * size}"]
    timeline, _, events, _ = rehearse(*plan.place(load_config(flags), size, MACHINE))
    whole = set()
    ahead = "freeze" in str(more) and name != "shard_grad_op"
    for e in events:
        if ahead and e.unit == "block 0" and e.where.startswith("backward"):
            continue  # gathered ahead of a backward that never comes there: FSDP2 drops it
        if e.what == "all_gather":
            assert e.unit not in whole and e.where.startswith(("forward", "backward"))
            whole.add(e.unit)
        elif e.what == "free":
            whole.remove(e.unit)
    assert whole == set()
    rows = [e.row for e in events]
    assert rows == sorted(rows) and 0 < rows[0] and rows[-1] < len(timeline)
    assert [e.what for e in events][-1] == "step"


def test_plan_a_part_of_each_block_stays_for_backward():
    """A quarter, in bf16, with groups of four; until then the step is the same."""
    held = []
    for argv in (["--strategy=full_shard"], REGATHER):
        cfg = load_config([*TINY, *argv, "--dtype=bfloat16", "--gradient_accumulation_steps=16"])
        cfg, world = plan.place(cfg, 16, MACHINE)
        timeline, marks, _, _ = rehearse(cfg, world)
        row = dict((where, row) for row, where in marks)["forward, head"]
        held.append(timeline[row, KINDS.index("gathered")])
        blocks = train.meta_model(cfg).blocks
    padded = sum(formulas.padded(p, 16) * 16 for p in blocks.parameters())
    assert held[1] - held[0] == 2 * padded / 4


def case_collectives(tmp, **keys):
    """[(kind, ranks, bytes)] that a real step asks for, in order."""
    run = built(tmp, **keys)
    with heard() as calls:
        steps(run)
    return [(kind, ranks, size) for kind, ranks, _, size in calls]


ORDERS = {name: dict(strategy="full_shard", dropout=0.1, **keys) for name, keys in dict(
    plain={}, muon=dict(optimizer="muon"), offload=dict(cpu_offload=0.5, prefetch_blocks=1),
    zero2=dict(grad_sync="last"), size=dict(wrap_min_params=2000),
    bf16=dict(dtype="bfloat16", activation_checkpointing="full", loss_chunks=2)).items()}
ORDERS["zero2"]["strategy"] = "shard_grad_op"


def test_plan_events_come_in_the_order_of_a_real_step(tmp):
    """Kind, group and bytes of every collective, one by one, of two micro-batches on 2 ranks."""
    keys = {name: dict(keys, gradient_accumulation_steps=4) for name, keys in ORDERS.items()}
    real = on_ranks(2, {name: (case_collectives, dict(tmp=tmp, **keys[name])) for name in keys})
    for name in keys:
        cfg, world = plan.place(tiny(tmp, **keys[name]), 2, MACHINE)
        _, _, events, _ = rehearse(cfg, world)
        planned = [[e.what, e.ranks, e.size] for e in events if e.size]
        assert len(planned) > 8 and planned == values(real, name)[0], name


def test_plan_says_its_headroom_and_its_network(capsys):
    lines = command(capsys, *TINY, "--world_size=2", "--gpu=H100", "--network=100")
    said = "fits: at most 68% of a GPU in tensors; maybe: 90%; the rest is headroom"
    assert said in lines
    assert ("assumed: 360 GB/s per GPU in a node of 8, 100 Gb/s per GPU between nodes (--network)"
            in lines)


def test_plan_prints_the_events_of_the_docs(capsys):
    """extras/docs/plan.md shows the quickstart's, and docs/fsdp.md counts them. In =all nothing is
    folded, and what is sent adds up to the table's column. The page shows what the newest torch
    holds."""
    with open(os.path.join(HERE, "extras", "docs", "plan.md")) as f:
        text = f.read()
    shown = r"(python -m extras\.plan [^\n]*--events)\n```\n+```text\n(.*?)```"
    said = re.search(shown, text, re.S)
    events = said[2]
    if "unsharded_grad" in foreach_reduce.__wrapped__.__code__.co_varnames:
        # In torch 2.13 this variable of a loop keeps a unit's last gradient until all are reduced:
        # of a block that of c_proj, 512 x 128 in bf16, and so 0.12 MiB more. In 2.15 the loop is
        # in a function of its own.
        for block, newest, oldest in ((3, "18.78", "18.90"), (0, " 7.46", " 7.58")):
            line = f"reduce-scatter  block {block}             0.38         {newest}"
            assert line in events
            events = events.replace(line, line.replace(newest, oldest))
    flags = said[1].split()[3:] + ["--vocab_size=256"]
    plan.main(flags)
    out = capsys.readouterr().out
    assert events in out
    plan.main([flag.replace("--events", "--events=all") for flag in flags])
    out = capsys.readouterr().out
    assert (out.count("all-gather"), out.count("reduce-scatter")) == (9, 5)
    table, _, steps = out.partition("a step of rank 0")
    column = re.findall(r"(?:all-gather|scatter|all-reduce).{18}\s*(\d+\.\d+) ", steps)
    sent = float(re.search(r"^full_shard.* ([\d.]+)  yes", table, re.M)[1])
    assert len(column) == 15 and sum(map(float, column)) == pytest.approx(sent, abs=0.05)


def test_plan_events_fold_blocks_that_do_the_same(capsys):
    """A line each at the ends, where a neighbour is missing. Three micro-batches of 7 stand for
    all; a config file may follow the flag."""
    lines = command(capsys, *TINY, "--n_layer=9", "--events", "--world_size=2",
                    "--strategy=full_shard", "--gradient_accumulation_steps=14",
                    "--prefetch_blocks=2", "--grad_sync=last")
    for line in ("micro-batch 1 of 7", "micro-batches 2 to 6 of 7, each", "micro-batch 7 of 7",
                 "  forward, blocks 2 to 6: the same", "  backward, blocks 6 to 2: the same"):
        assert line in lines
    lines = command(capsys, *TINY, "--n_layer=9", "--events", "--world_size=2",
                    "--strategy=full_shard", r"--freeze=h\.4\.mlp")
    assert any("reduce-scatter  block 4 " in line for line in lines)  # it sends less than others
    assert "  backward, blocks 7 to 5: the same" in lines
    lines = command(capsys, *TINY, "--events", "--world_size=2", "--gradient_accumulation_steps=6")
    assert [line.split(",")[0] for line in lines if "a step of rank 0" in line] == [
        "ddp", "shard_grad_op", "full_shard"]
    out = "\n".join(lines)
    assert "buckets of 25 MiB" in out and out.count("nothing is gathered") == 2


@pytest.mark.parametrize("unit, where, place", [
    ("block 5", "backward, block 6", (-1, "")), ("block 7.mlp", "forward, block 7", (0, ".mlp")),
    ("block 7.attn", "forward, block 7", (0, ".attn")), ("block 12.mlp", "forward", "block 12.mlp"),
    ("root", "backward, block 0", "root")])
def test_plan_blocks_do_the_same_with_the_same_part_of_them(unit, where, place):
    """By this --events folds: a block that gathers its mlp does not what gathers its attn."""
    assert relative(unit, where) == place


def test_plan_ddps_gradients_are_one_event_a_block(capsys):
    """Though they are reduced one by one."""
    lines = command(capsys, *TINY, "--events=all", "--world_size=2", "--strategy=ddp",
                    "--gradient_accumulation_steps=2")
    found = re.findall(r"all-reduce +(root|block \d)", "\n".join(lines))
    assert found == ["root", "block 2", "block 1", "block 0", "root"]


def test_plan_sends_as_much_in_each_micro_batch():
    keys = *TINY, "--strategy=full_shard"
    one, two, seven = (
        row(2, *keys, f"--gradient_accumulation_steps={n}")["sent"] for n in (2, 4, 14))
    norm = 4  # bytes of clipping's all-reduce, once a step
    # The root's gather too: of embedding (68 rows with padding), positions, weight and bias, in
    # bf16, rank 0 sends half.
    once = norm + (68 + 16 + 2) * 30 * 2 / 2
    assert seven - once == 7 * (one - once) and two - once == 2 * (one - once)


def test_plan_events_hold_what_is_on_the_device(capsys):
    lines = command(capsys, *TINY, "--events", "--world_size=2", "--strategy=full_shard",
                    "--cpu_offload=1")
    peak = next(float(line.split()[6]) for line in lines if line.startswith("full_shard  "))
    events = [line for line in lines if re.match(r"  .*(gather|free|step)  ", line)]
    assert events and max(float(line.split()[-1]) for line in events) <= peak


def test_plan_one_process_sends_nothing():
    assert row(1, *TINY, "--strategy=single")["sent"] == 0


@pytest.mark.parametrize("collectives, sent", [
    ({("all_reduce", 16): 1600}, 3000),
    ({("all_gather", 16): 1600, ("reduce_scatter", 16): 800, ("all_reduce", 16): 4}, 2257.5),
    ({("all_gather", 8): 800, ("reduce_scatter", 8): 800, ("all_reduce", 2): 100}, 1500),
    ({("all_to_all", 4): 400, ("all_to_all", 16): 160}, 450), ({("all_gather", 1): 5}, 0)])
def test_plan_sent_bytes_are_a_rings(collectives, sent):
    """(W - 1) / W of the buffer for a gather, a scatter or an exchange, twice that for an
    all-reduce."""
    events = [Event(kind, "", "", 0, 1, size, ranks)
              for (kind, ranks), size in collectives.items()]
    assert sum(e.sent() for e in events) == sent


@pytest.mark.parametrize("size, host, device, fits", [
    (16, 0, 68, "yes"), (16, 0, 69, "maybe"), (16, 0, 90, "maybe"), (16, 0, 91, "no"),
    (16, 10, 90, "maybe"), (16, 11, 1, "no"),
    (2, 30, 1, "yes")])  # two ranks on their node
def test_plan_fits_in_two_thirds_of_a_gpu_and_a_nodes_host_memory(size, host, device, fits):
    sizes = dict(gpu_memory=100, host_memory=80)
    machine = SimpleNamespace(**{**vars(MACHINE), **sizes})
    timeline = np.zeros((3, len(KINDS)))
    timeline[1:, :2] = (host, 1), (0, device)
    seen = timeline, [(0, "forward"), (1, "optimizer")], [], []
    with patch.object(plan, "rehearse", lambda *args: seen):
        one = plan.plan(*plan.place(load_config(["--strategy=full_shard"]), size, machine), machine)
    assert (one["host"], one["peak"], one["fits"]) == (min(size, 8) * host, device, fits)
    assert one["where"] == ("forward" if device == 1 else "optimizer")


@pytest.mark.parametrize("device, fits", [(34, "yes"), (35, "maybe"), (90, "maybe"), (91, "no")])
def test_plan_recorded_fits_if_twice_the_peak_does(device, fits):
    machine = SimpleNamespace(**{**vars(MACHINE), "gpu_memory": 100, "host_memory": 80})
    timeline = np.zeros((3, len(KINDS)))
    timeline[1:, 1] = device
    seen = timeline, [(0, "forward")], [], []
    cfg = load_config(["--strategy=full_shard", "--cuda_graph=True"])
    with patch.object(plan, "rehearse", lambda *args: seen):
        assert plan.plan(*plan.place(cfg, 2, machine), machine)["fits"] == fits


@pytest.mark.parametrize("size, argv, ranks", [
    (1, ["--strategy=single"], 1), (8, [], 8), (7, [], 7), (16, HYBRID, 4),
    (8, ["--strategy=shard_grad_op"], 8), (8, ["--gradient_accumulation_steps=24"], 8)])
def test_plan_valley_is_12_bytes_a_parameter(size, argv, ranks):
    """Of this rank's rows: fp32 masters and two moments. The gradients are gone. Beside them are
    AdamW's counters and a batch of tokens."""
    cfg, world = placed(size, "--vocab_size=1000", *argv)
    one = plan.plan(cfg, world, MACHINE)
    parameters = list(train.meta_model(cfg).parameters())
    rows = sum(-(-len(p) // ranks) * p[0].numel() for p in parameters)
    rest = 4 * len(parameters) + 8 * cfg.batch_size * cfg.sizes.block_size
    assert 0 <= one["valley"] - 12 * rows <= rest


def test_plan_valley_of_what_is_offloaded_is_in_host_memory():
    cfg, world = placed(8, "--vocab_size=1000", "--cpu_offload=1")
    one = plan.plan(cfg, world, MACHINE)
    assert one["valley"] <= 8 * cfg.batch_size * cfg.sizes.block_size


def test_plan_rows_beside_the_guide():
    """Of extras/docs/plan.md: those of Llama-2 7B, by its own command and the flags of the row. Two
    rows only, since each takes 20 seconds."""
    with open(os.path.join(HERE, "extras/docs/plan.md")) as f:
        page = f.read()
    command = re.search(r"\npython -m extras.plan (extras/config/llama2_7b.py.*?)\n```", page, re.S)
    argv = command[1].replace("\\\n", " ").split()
    table = page.split("batch 10 per GPU | valley | peak")[1]
    rows = re.findall(r"^\| plan, (.*?) \| ([\d.]+) \| ([\d.]+) \|$", table, re.M)
    assert len(rows) == 6
    for said, valley, peak in (rows[0], rows[5]):
        [row] = plan.main([os.path.join(HERE, argv[0]), *argv[1:], *re.findall(r"--[^` ]+", said)])
        assert [f"{row[key] / 1e9:.1f}" for key in ("valley", "peak")] == [valley, peak]


def test_plan_fairseqs_13b_has_a_head_of_its_own():
    """What docs/migration.md and the recipe say of its 13,110,865,920 parameters."""
    recipe = load_config([os.path.join(HERE, "extras/config/gpt3_13b.py")])
    with torch.device("meta"):
        gpt = GPT(replace(recipe.sizes, bias=True, vocab_size=50272))
    n = sum(p.numel() for p in gpt.parameters())
    head, positions = 50272 * 5120, 2 * 5120
    for page in ("docs/migration.md", "extras/config/gpt3_13b.py"):
        with open(os.path.join(HERE, page)) as f:
            assert f"{n + head + positions:,} parameters" in f.read()
    with open(os.path.join(HERE, "docs/migration.md")) as f:
        assert f"ours has {n:,}." in f.read()


def test_plan_zero_accounting_of_the_docs_is_the_papers():
    """Rajbhandari et al. 2020, figure 1: 7.5B parameters on 64 GPUs, 2 + 2 + 12 bytes of each."""
    P, N = 7.5e9, 64
    with open(os.path.join(HERE, "docs", "fsdp.md")) as f:
        text = f.read()
    for size, said in ((16 * P, "120"), ((4 + 12 / N) * P, "31.4"), ((2 + 14 / N) * P, "16.6"),
                       (16 / N * P, "1.9")):
        assert round(size / 1e9, 1) == float(said)
        assert re.search(rf"(?<![\d.]){said}(?![\d])", text), said


# -----------------------------------------------------------------------------
# which strategies


@pytest.mark.parametrize("size, argv, expected", [
    (1, [], "single full_shard"), (1, ["--cpu_offload=0.5"], "full_shard"),
    (8, [], "single ddp shard_grad_op full_shard"),
    (8, ["--strategy=single"], "single ddp shard_grad_op full_shard"),
    (16, [], "single ddp shard_grad_op full_shard hybrid_shard"),
    (12, [], "single ddp shard_grad_op full_shard"),  # 12 are no two nodes
    (8, ["--strategy=hybrid_shard"], "single ddp shard_grad_op full_shard hybrid_shard"),
    (16, HYBRID, "single ddp shard_grad_op full_shard hybrid_shard"),
    (16, ["--cpu_offload=0.5"], "shard_grad_op full_shard hybrid_shard"),
    (8, ["--wrap_min_params=9"], "shard_grad_op full_shard"),
    (8, ["--reduce_dtype=bfloat16"], "shard_grad_op full_shard"),
    (8, ["--grad_sync=last"], "ddp shard_grad_op full_shard"),
    (8, ["--dtype=float8"], "single shard_grad_op full_shard")])
def test_plan_variants_are_the_strategies_that_the_keys_allow(size, argv, expected):
    todo = plan.variants(load_config(argv), size, MACHINE)
    assert [cfg.strategy for cfg, _ in todo if cfg.strategy in OURS] == expected.split()
    group = 4 if argv == HYBRID else 8
    for cfg, world in todo:
        ranks = 1 if cfg.strategy == "single" else size
        assert (world.size, world.local_size) == (ranks, min(ranks, 8))
        assert cfg.shard_group_size == (group if STRATEGIES[cfg.strategy].in_groups else 0)
        assert cfg.gradient_accumulation_steps == math.ceil(40 / ranks) * ranks
        assert (cfg.dtype, cfg.compile) == (cfg.dtype.replace("auto", ""), False)


@pytest.mark.parametrize("size, argv, words", [
    (8, ["--strategy=ddp", "--cpu_offload=0.5"], ["cpu_offload", "full_shard"]),
    (1, ["--strategy=single", "--grad_sync=last"], ["grad_sync", "ddp"]),
    (8, ["--activation_offload=True"], ["activation_offload", "--activation_checkpointing=full"]),
    (12, ["--strategy=hybrid_shard"], ["shard_group_size", "divisor of 12"])])
def test_plan_variants_refuse_what_the_config_itself_asks_for(size, argv, words):
    line = refused(plan.variants, load_config(argv), size, MACHINE)
    assert all(word in line for word in words), line


# -----------------------------------------------------------------------------
# the command


def command(capsys, *argv):
    plan.main(list(argv))
    return capsys.readouterr().out.strip().splitlines()


SHALLOW = "--world_size=8", "--n_layer=4", "--block_size=512", "--n_head=16", "--n_embd=2048"


@pytest.mark.parametrize("argv, gpu_memory, host_memory, taken", [
    (["--n_layer=2"], 80, math.inf, "single"), (SHALLOW, 18, math.inf, "ddp"),
    (SHALLOW, 12.2, math.inf, "shard_grad_op"),  # ddp may fit
    (SHALLOW, 7.5, math.inf, "shard_grad_op"),  # and here it may
    (SHALLOW, 2, math.inf, ""),
    ([*SHALLOW, "--cpu_offload=1"], 9, 4, "")])
def test_plan_takes_the_simplest_strategy_that_fits(capsys, argv, gpu_memory, host_memory, taken):
    lines = command(
        capsys, *argv, f"--gpu_memory={gpu_memory}", f"--host_memory={host_memory}")
    heads = [line for line in lines if line.endswith("fits  peak at")][0].split()
    assert heads[3:12] == [*KINDS[1:], "peak", "valley", "host/node", "sent"]
    unit = dict(GiB=1, MiB=1024)[heads[0]]
    fitting = dict(yes=[], maybe=[], no=[])
    for name, *cells in [line.split() for line in lines if line.startswith((*STRATEGIES,))]:
        sizes = [float(cell.replace(",", "")) for cell in cells[:9]]
        assert sum(sizes[:5]) == pytest.approx(sizes[5], abs=0.03)
        share = sizes[5] / (gpu_memory * unit)
        if sizes[7] > host_memory * unit:
            share = math.inf
        fits = "yes" if share <= 0.68 else "maybe" if share <= 0.9 else "no"
        assert cells[9] == fits
        if name != "single" or argv[0] != SHALLOW[0]:
            fitting[fits].append(name)
    simplest = [*fitting["yes"], *fitting["maybe"]][:1]
    assert simplest == ([taken] if taken else [])
    verb = "take" if fitting["yes"] else "try"
    last = f"{verb} --strategy={taken}, " if taken else "--loss_chunks=8"
    assert last in lines[-1]


@pytest.mark.parametrize("config, units", [("llama2_7b", 34), ("llama2_70b", 322)])
def test_plan_units_prints_the_model_as_fsdp2_wraps_it(capsys, config, units):
    """With units by size: as many as in LambdaLabs' guide, the root not among them."""
    path = os.path.join(HERE, "extras/config", f"{config}.py")
    flags = ["--world_size=8", "--wrap_min_params=100000000"]
    assert plan.main([path, *flags, "--units"]) == []
    said = capsys.readouterr().out
    assert f"; {units} units and the root; model.embed_tokens has" in said
    layers, block = re.search(r"(\d+) x Block\(\n(.*?)^      \)", said, re.M | re.S).groups()
    outside = said.replace(block, "").count("FSDP")  # the root is one of them
    assert outside - 1 + int(layers) * block.count("FSDP") == units
    assert "--units: strategy=ddp has none" in refused(
        plan.main, [path, flags[0], "--units", "--strategy=ddp", "--cpu_offload=0.0"])


def test_plan_units_may_be_none(capsys):
    """Where --wrap_min_params is more than any module has, all is the root. The one strategy that
    is given is rehearsed alone."""
    lines = command(capsys, *SMALL, "--wrap_min_params=1000000000", "--strategy=full_shard",
                    "--world_size=8", "--gradient_accumulation_steps=8")
    assert [line.split()[0] for line in lines if line.startswith((*STRATEGIES,))] == ["full_shard"]
    assert "gradient_accumulation_steps=8, a multiple of 8" in lines[1]


def test_plan_says_that_it_takes_more_micro_batches_than_the_config(capsys):
    lines = command(capsys, *TINY, "--strategy=full_shard", "--world_size=3",
                    "--gradient_accumulation_steps=4")
    assert "gradient_accumulation_steps=6 instead of 4, a multiple of 3: 2 x" in lines[1]


def test_plan_table_of_a_large_model_is_quick_and_small():
    """175B's blocks on 1,024 GPUs; all 96 of them take 3 s a strategy (python tests/test_plan.py
    has the deep ones)."""
    code = """if True:
        import time, resource
        from extras import plan
        from extras.plan import timing
        start = time.time()
        plan.main(["extras/config/gpt3_175b.py", "--world_size=1024", "--n_layer=4",
                   "--gpu_memory=24"])
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print("took", time.time() - start, peak)"""
    p = python("-c", code)
    assert p.returncode == 0, p.stderr
    seconds, gib = map(float, p.stdout.split("took ")[1].split())
    assert gib < 4 and seconds < 60, p.stdout  # 4 on a quiet machine
    lines = p.stdout.splitlines()
    rows = [line for line in lines if line.startswith((*STRATEGIES,))]
    assert [line.split()[0] for line in rows] == list(STRATEGIES)
    fits = {line.split()[0]: "  no " not in line for line in rows if line.startswith(OURS)}
    assert "4 units and the root; transformer.h.0 has 1,811.96M parameters" in p.stdout
    assert fits == dict(single=False, ddp=False, shard_grad_op=False, full_shard=True,
                        hybrid_shard=True)
    assert ("planned with gradient_accumulation_steps=2048 instead of 1536, a multiple of 1024: "
            "2 x batch_size 1 x 2,048 tokens per GPU and step") in p.stdout


def drawn(monkeypatch, *argv):
    """(rows, figure) of a command with --plot."""
    figures, draw = [], plan.draw
    monkeypatch.setattr(plan, "draw", lambda rows, *a: figures.append((rows, draw(rows, *a))))
    plan.main([*SMALL, "--world_size=4", "--gpu=H100", *argv])
    return figures[0]


def spans(panel):
    """[(from, to, height, colour)] of its bars."""
    found = []
    for c in panel.collections:
        for path in c.get_paths():
            box = path.get_extents()
            height = round((box.y0 + box.y1) / 2)
            found.append((box.x0, box.x1, height, tuple(c.get_facecolor()[0])))
    return found


@pytest.mark.parametrize("gpu_memory", [0.5, 80])
def test_plan_plot_shows_the_peak(tmp_path, capsys, monkeypatch, gpu_memory):
    """Of a small model in MiB, over the milliseconds of a step's last micro-batch; a GPU that is
    much larger than the peak would press it flat."""
    collections = pytest.importorskip("matplotlib.collections")
    path = tmp_path / "memory.png"
    rows, figure = drawn(
        monkeypatch, f"--gpu_memory={gpu_memory}", f"--plot={path}", "--vocab_size=5000",
        "--gradient_accumulation_steps=8", "--grad_sync=last")
    assert path.read_bytes().startswith(b"\x89PNG") and f"wrote {path}" in capsys.readouterr().out
    names = [panel.get_title().split(":")[0] for panel in figure.axes[:3]]
    assert names == [r["strategy"] for r in rows] == ["ddp", "shard_grad_op", "full_shard"]
    assert figure.get_suptitle().startswith("gpt2 on 4 GPUs of ")
    assert figure.axes[0].get_ylabel() == "MiB on a GPU"
    assert figure.axes[-1].get_xlabel() == "ms"
    [legend] = figure.legends
    assert "head and update begin" in [text.get_text() for text in legend.get_texts()]
    for row, panel in zip(rows, figure.axes):
        filled = [c for c in panel.collections if isinstance(c, collections.PolyCollection)]
        step = row["step"]
        x = step.times_at(range(len(row["timeline"]))) - step.begin(row["events"][-1].micro_batch)
        total = row["timeline"][x >= 0, 1:].sum(axis=1) / 2**20
        outline = filled[-1].get_paths()[0].vertices  # of the activations: below, and back on top
        drawn_x, y = outline[-2:-2 - len(total):-1].T
        assert len(filled) == 5 and y == pytest.approx(total)
        assert drawn_x == pytest.approx(1e3 * x[x >= 0])
        assert y.max() == pytest.approx(row["peak"] / 2**20)
        assert y.max() > 0.1 * panel.get_ylim()[1]  # not flat
        lines = {line.get_ydata()[0] for line in panel.lines if line.get_linestyle() == "--"}
        assert lines == ({512} if gpu_memory == 0.5 else set())  # the GPU's size


def test_plan_plot_shows_which_unit_is_whole_when(tmp_path, monkeypatch):
    """Of the last of 3 micro-batches; under each strategy a row for each unit, the root lowest. And
    below, what computes and what communicates: a block is gathered while the one before runs."""
    pytest.importorskip("matplotlib")
    rows, figure = drawn(monkeypatch, f"--plot={tmp_path}/m.svg", "--vocab_size=500",
                         "--gradient_accumulation_steps=12")
    bars = []  # of each strategy: [[(from, to)] of each unit]
    for panel in figure.axes[3:6]:
        found = sorted(spans(panel))
        bars.append([[(x0, x1) for x0, x1, y, _ in found if y == unit] for unit in range(4)])
    ticks = figure.axes[3].get_yticklabels()
    assert [tick.get_text() for tick in ticks] == ["root", "block 2"]
    ddp, zero2, zero3 = bars
    assert all(unit == ddp[0] and len(unit) == 1 for unit in ddp)  # always
    assert [len(unit) for unit in zero2] == [1, 1, 1, 1]
    assert [len(unit) for unit in zero3] == [1, 2, 2, 2]
    for a, b in zip(zero2[1:], zero2[2:]):  # a staircase: the last in is the first out
        assert a[0][0] < b[0][0] < b[0][1] < a[0][1]
    for a, b in zip(zero3[1:], zero3[2:]):  # up and down, always one ahead
        assert a[0][0] < b[0][0] < a[0][1] < b[0][1] < b[1][1] < a[1][1]
        assert b[1][0] < a[1][0] < b[1][1]

    for row, panel in zip(rows, figure.axes[6:]):
        begin = row["step"].begin(3)
        compute = [(x0, x1) for x0, x1, y, _ in spans(panel) if y == 1]
        sent = [(x0, x1, color) for x0, x1, y, color in spans(panel) if y == 0]
        idle = sum(b - a for a, b in row["step"].waits if a >= begin)
        end = max(x1 for _, x1 in compute)
        assert end - sum(x1 - x0 for x0, x1 in compute) == pytest.approx(1e3 * idle, abs=1e-6)
        assert min(x0 for x0, _, _ in sent) >= 0  # what came before is not drawn
        assert len({color for _, _, color in sent}) == (1 if row["strategy"] == "ddp" else 2)
    gather_of_block_1 = zero3[2][1][0]  # in backward
    assert any(x0 <= gather_of_block_1 < x1 for x0, x1 in compute)


def test_plan_refused_leaves_an_earlier_picture_whole(tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "memory.png").write_bytes(b"the last plan's")
    argv = ["--gpu=H100", f"--plot={tmp_path}/memory.png", "--freeze=nobody"]
    assert "freeze" in refused(plan.main, argv)
    assert (tmp_path / "memory.png").read_bytes() == b"the last plan's"


def test_plan_has_the_state_of_an_optimizer_of_ones_own(tmp):
    machine = SimpleNamespace(
        gpu_memory=2**36, host_memory=2**40, attention="flash2", cluster=None)
    cfg = resolve(tiny(tmp, strategy="single"), World())
    with patch.object(train, "make_optimizer", Factored):
        row = plan.plan(cfg, World(), machine)
    shapes = [p.shape for p in plain_gpt().parameters()]
    expected = sum(8 + 4 * shape[0] for shape in shapes)
    assert row["optimizer"] == expected + sum(4 * shape[1]**2 for shape in shapes if shape[1:])


# -----------------------------------------------------------------------------


def accuracy():
    """124M, 1.5B and 13B on 1, 8, 64 ranks with the three kinds of activation checkpointing."""
    worst, seconds = 0, 0
    for shape in ((12, 12, 768, 1024, 12), (48, 25, 1600, 1024, 8), (40, 40, 5120, 2048, 2)):
        keys = ("n_layer", "n_head", "n_embd", "block_size", "batch_size")
        flags = [f"--{key}={value}" for key, value in zip(keys, shape)]
        for size in (1, 8, 64):
            for mode in ("none", "selective", "full"):
                more = [f"--activation_checkpointing={mode}",
                        f"--gradient_accumulation_steps={3 * size}"]
                cfg, world = placed(size, *flags, *more)
                start = time.time()
                timeline, *_ = rehearse(cfg, world)
                seconds += time.time() - start
                peak = timeline.sum(axis=1).max()
                off = peak / tracked(cfg, world) - 1
                worst = max(worst, abs(off))
                print(f"{shape[2]:5d} wide x {shape[0]}, {size:2d} ranks, {mode:9s} "
                      f"{peak / 1e9:8.3f} GB, {off:+.3%}", flush=True)
    print(f"largest difference {worst:.3%}; the rehearsals took {seconds / 27:.1f} s each")


if __name__ == "__main__":
    accuracy()

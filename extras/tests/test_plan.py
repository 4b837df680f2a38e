"""
plan/ against other ways to know: what a step holds, what it sends, and its time by hand.

    python -m pytest -q extras/tests/test_plan.py

The closed formulas are those of formulas.py, which test_fsdp.py compares with real ranks.
"""

import math
import re
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
from harness import HERE, built, heard, on_ranks, steps, tiny, values
from torch._subclasses import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.testing._internal.distributed.fake_pg import FakeStore

import fsdp
import train
from configurator import STRATEGIES, load_config
from extras import plan
from extras.plan import timing
from extras.plan.rehearse import KINDS, Event, rehearse
from optimizer import LossScaler

pytestmark = pytest.mark.slow

GIB = 2**30
MACHINE = SimpleNamespace(
    strategy=None, gpus_per_node=8, gpu_memory=80 * GIB, host_memory=math.inf, gpu=None)
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


# ---------- the rehearsal ----------

WIDE = ["--n_embd=1536", "--batch_size=1", "--block_size=64", "--activation_checkpointing=full"]
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


def tracked(cfg, world):
    """Bytes at the peak of two steps, device and host together, by PyTorch's own tracker."""
    world = replace(world, device=torch.device("cpu"))
    mesh = fsdp.make_mesh("cpu", cfg.shard_group_size)
    model = train.meta_model(cfg)
    with (FakeTensorMode(allow_non_fake_inputs=True),
          patch.object(fsdp, "make_mesh", lambda *args: mesh),
          patch("model.explicit_is_faster", lambda *args: False),
          patch.object(torch, "_fused_adamw_", lambda *args, **kwargs: None)):
        wrapped = train.parallelize(model, cfg, world)
        optimizer = train.make_optimizer(wrapped, cfg)
        tracker = FSDPMemTracker(wrapped, optimizer)

        def restart(module, args):  # the tracker wants it between forwards, before its own hooks
            if module is wrapped:
                tracker.reset_mod_stats()

        hook = torch.nn.modules.module.register_module_forward_pre_hook(restart)
        with tracker:
            work = train.micro_batch(wrapped, cfg, world)
            for step in range(2):  # the first makes the optimizer's state
                train.train_step(wrapped, optimizer, *step_of(cfg), step, cfg, world, work)
        hook.remove()
        return tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]


@pytest.mark.parametrize("size, argv", [
    (8, []), (512, WIDE), (8, ["--strategy=shard_grad_op", *WIDE]), (16, [*HYBRID, *WIDE]),
    (8, ["--activation_checkpointing=selective"]), (8, ["--freeze=mlp"])])
def test_plan_rehearsal_is_pytorchs_tracker(size, argv):
    """Few symbols: the blocks, not the logits, are what is compared."""
    cfg, world = placed(size, "--vocab_size=1024", *argv)
    with fake_group(world):
        expected = tracked(cfg, world)
    assert rehearse(cfg, world)[0].sum(axis=1).max() == pytest.approx(expected, rel=0.01)


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


@pytest.mark.parametrize("offload", [0.0, 0.5, 1.0])
def test_plan_host_memory_has_what_a_sharded_save_copies(offload):
    """12 bytes a parameter of the rank's own rows, wherever they are: here 8 ranks divide all. On
    CPUs, where nothing is pinned, and so no size is rounded up."""
    argv = "--vocab_size=1024", "--device=cpu", f"--cpu_offload={offload}"
    none, saved = (row(8, *argv, f"--checkpoint={kind}") for kind in ("full", "sharded"))
    n = plan.count(train.meta_model(placed(8, *argv)[0]))
    assert (none["host"] > 0) == (offload > 0)
    assert saved["host"] - none["host"] == pytest.approx(12 * n, rel=1e-4)  # and AdamW's counters


# ---------- what a step sends ----------

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
    *_, events = rehearse(cfg, world)
    collectives = Counter()
    for e in events:
        if e.size:
            collectives[e.what, e.ranks] += e.times * e.size
    assert collectives == formulas.traffic(train.meta_model(cfg), cfg, world)


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
        *_, events = rehearse(cfg, world)
        planned = [[e.what, e.ranks, e.size] for e in events if e.size]
        assert len(planned) > 8 and planned == values(real, name)[0], name


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


@pytest.mark.parametrize("size, host, device, argv, fits", [
    (16, 0, 68, [], "yes"), (16, 0, 69, [], "maybe"), (16, 0, 90, [], "maybe"),
    (16, 0, 91, [], "no"), (16, 10, 90, [], "maybe"), (16, 11, 1, [], "no"),
    (2, 30, 1, [], "yes"),  # two ranks on their node
    (2, 0, 34, ["--cuda_graph=True"], "yes"), (2, 0, 35, ["--cuda_graph=True"], "maybe")])
def test_plan_fits_in_two_thirds_of_a_gpu_and_a_nodes_host_memory(size, host, device, argv, fits):
    sizes = dict(gpu_memory=100, host_memory=80)
    machine = SimpleNamespace(**{**vars(MACHINE), **sizes})
    timeline = np.zeros((3, len(KINDS)))
    timeline[1:, :2] = (host, 1), (0, device)
    seen = timeline, [(0, "forward"), (1, "optimizer")], []
    cfg = load_config(["--strategy=full_shard", *argv])
    with patch.object(plan, "rehearse", lambda *args: seen):
        one = plan.plan(*plan.place(cfg, size, machine), machine)
    assert (one["host"], one["peak"], one["fits"]) == (min(size, 8) * host, device, fits)
    assert one["where"] == ("forward" if device == 1 else "optimizer")


# ---------- which strategies ----------


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


# ---------- the command ----------


def command(capsys, *argv):
    plan.main(list(argv))
    return capsys.readouterr().out.strip().splitlines()


LLAMA2_7B = f"{HERE}/extras/config/llama2_7b.py"
SEVENTY = ["--n_layer=80", "--n_head=64", "--n_kv_head=8", "--n_embd=8192", "--n_inner=28672"]
SHALLOW = "--world_size=8", "--n_layer=4", "--block_size=512", "--n_head=16", "--n_embd=2048"


@pytest.mark.parametrize("argv, gpu_memory, taken", [
    (["--n_layer=2"], 80, "single"), (SHALLOW, 18, "ddp"), (SHALLOW, 12.2, "shard_grad_op"),
    (SHALLOW, 2, "")])
def test_plan_takes_the_simplest_strategy_that_fits(capsys, argv, gpu_memory, taken):
    lines = command(capsys, *argv, f"--gpu_memory={gpu_memory}")
    assert (f"take --strategy={taken}, " if taken else "--loss_chunks=8") in lines[-1]


def test_plan_units_prints_the_model_as_fsdp2_wraps_it(capsys):
    """Llama-2 70B in units by size: as many as in LambdaLabs' guide, without the root."""
    argv = [LLAMA2_7B, *SEVENTY, "--world_size=8", "--wrap_min_params=100000000", "--units"]
    assert plan.main(argv) == []
    assert "; 322 units and the root; model.embed_tokens has" in capsys.readouterr().out


def test_plan_recipes_say_their_peak():
    with open(LLAMA2_7B) as f:
        said = re.search(r"^# On (\d+) GPUs the plan's peak is ([\d.]+) GiB", f.read(), re.M)
    cfg = load_config([LLAMA2_7B])
    one = plan.plan(*plan.place(cfg, int(said[1]), MACHINE), MACHINE)
    assert f"{one['peak'] / GIB:.1f}" == said[2]


@pytest.mark.parametrize("size, flags, fits", [
    # "Without CPU offloading we'd only be able to fit a batch size of 1 per GPU."
    (8, ["--batch_size=1"], "maybe"), (8, ["--batch_size=2"], "no"),
    (1, ["--batch_size=8", "--cpu_offload=1.0", "--host_memory=256"], "yes")])
def test_plan_fairseqs_13b_fits_v100s_of_32_gb(size, flags, fits):
    """As its page on fully sharded training says, with full checkpointing, in fp16."""
    [one] = plan.main([
        f"{HERE}/extras/config/gpt3_13b.py", f"--world_size={size}", "--gpu=V100",
        "--strategy=full_shard", "--checkpoint=none", f"--gradient_accumulation_steps={size}",
        *flags])
    assert one["fits"] == fits


# ---------- times ----------

H100 = SimpleNamespace(gpu=timing.GPUS["H100"], mfu=0.5, link=None, gpus_per_node=8)
A_SECOND = 0.5 * 989e12  # FLOPs


@pytest.mark.parametrize("link, flops, expected", [
    (None, 9 * A_SECOND, 9 + 7 / 8 * 4),  # three gathers run beside nine seconds of products
    (None, 0, 7 / 8 * 7), (720, 0, 7 / 8 * 3.5)])
def test_timing_of_a_step_is_a_sum_by_hand(link, flops, expected):
    """The first gather, the last reduction and clipping's all-reduce stand alone."""
    second = 360e9  # bytes of a whole buffer
    events = [Event(what, "", where, 0, 1, second, ranks=8, times=times) for what, where, times in (
        ("all_gather", "forward", 1), ("all_gather", "forward, block 1", 3),
        ("reduce_scatter", "backward, block 0", 1), ("all_reduce", "clip", 1))]
    machine = SimpleNamespace(**{**vars(H100), "link": link})
    assert timing.seconds(events, flops, machine) == pytest.approx(expected)


@pytest.mark.parametrize("ranks, stride, gb", [
    (8, 1, 360), (64, 1, 360),  # eight lines of 50 leave a node
    (2, 8, 50), (4, 4, 100)])
def test_timing_a_ring_is_as_fast_as_its_slowest_link(ranks, stride, gb):
    event = Event("all_gather", "", "forward", 0, 1, 1, ranks, stride)
    assert timing.rate(event, H100) == gb * 1e9


@pytest.mark.parametrize("more, waits", [
    ([], True), (["--cuda_graph=True"], False), (["--batch_size=3000"], False)])
def test_timing_says_where_the_gpu_may_wait_for_the_host(capsys, more, waits):
    out = command(capsys, *SMALL, "--world_size=2", "--gpu=H100", "--strategy=ddp", *more)
    assert any("wait for the host" in line for line in out) == waits


def test_timing_columns_and_the_whole_run(capsys):
    argv = *TINY, "--world_size=2", "--tokens=1e9", "--strategy=full_shard", "--cpu_offload=0.5"
    lines = command(capsys, *argv, "--gpu=A100", "--mfu=0.25")
    said = "times: at 25% of the peak (--mfu), links of 235 GB/s in a node of 8, 25 between"
    assert any(line.startswith(said) for line in lines)
    assert "copies between host and GPU come on top" in lines
    [cells] = [line.split() for line in lines if line.startswith("full_shard ")]
    seconds, rate, mfu = (float(cell.strip("%").replace(",", "")) for cell in cells[10:13])
    assert 0 < mfu <= 25
    [hours] = re.findall(r"tokens with full_shard on 2 GPUs: ([\d.]+) hours", "\n".join(lines))
    assert float(hours) == pytest.approx(1e9 / rate / 2 / 3600, abs=0.06)


def test_timing_full_checkpointing_runs_forward_again():
    flags = "--gpu=H100", "--world_size=1", "--strategy=single", *SMALL
    [none], [full] = (plan.main([*flags, f"--activation_checkpointing={kind}"])
                      for kind in ("none", "full"))
    assert full["s/step"] == pytest.approx(4 / 3 * none["s/step"])

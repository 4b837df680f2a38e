"""
plan.py: its formulas and its rehearsal against other ways to know.

    python -m pytest -q tests/test_plan.py
    python tests/test_plan.py      # the rehearsal and PyTorch's own memory trackers: 124M to 13B

The collectives and bytes that real ranks move and keep are compared with plan.traffic and
plan.kept in test_fsdp.py.
"""

import math
import re
import time
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from harness import python
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore

import fsdp
import plan
import train
from configurator import SHARDED, load_config
from optimizer import make_optimizer
from ranks import World

MACHINE = SimpleNamespace(gpus_per_node=8, gpu_memory=80 * plan.GIB, host_memory=math.inf,
                          flops=None, bandwidth=None, network=None)
SMALL = ["--n_layer=3", "--n_head=6", "--n_embd=384", "--block_size=512", "--batch_size=4"]


def row(size, *argv):
    cfg = load_config([*SMALL, f"--gradient_accumulation_steps={size}", *argv])
    return plan.plan(replace(cfg, strategy=cfg.strategy or "full_shard"), size, MACHINE)


def placed(size, *argv):
    """(cfg, World) for `size` GPUs."""
    cfg = load_config([*SMALL, f"--gradient_accumulation_steps={size}", *argv])
    return plan.place(replace(cfg, strategy=cfg.strategy or "full_shard"), size, MACHINE)


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
    dist.init_process_group("fake", rank=0, world_size=world.size, store=FakeStore())
    try:
        mesh = fsdp.make_mesh(cfg, world) if cfg.strategy in SHARDED else None
        with (FakeTensorMode(allow_non_fake_inputs=True),
              patch("model.explicit_is_faster", lambda *args: False),
              patch.object(F, "rms_norm", norm),
              patch.object(torch, "_fused_adamw_", lambda *args, **kwargs: None)):
            with patch.object(fsdp, "make_mesh", lambda *args: mesh):
                wrapped = fsdp.parallelize(model, cfg, world)
            optimizer = make_optimizer(model, cfg)
            x = torch.empty(cfg.batch_size, cfg.block_size, dtype=torch.int64)
            batches = SimpleNamespace(train=lambda step, micro: (x, x))
            tracker = FSDPMemTracker(wrapped, optimizer) if mesh else MemTracker()
            if not mesh:
                tracker.track_external(model, optimizer)

            def restart(module, args):  # the trackers want it between forwards, before their hooks
                if module is wrapped:
                    tracker.reset_mod_stats()
            hook = torch.nn.modules.module.register_module_forward_pre_hook(restart)
            scaler = torch.amp.GradScaler("cpu", enabled=False)
            with tracker:
                for step in range(2):  # the first makes the optimizer's state
                    train.train_step(wrapped, optimizer, scaler, batches, (x, x), step, cfg, world)
            hook.remove()
            return tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    finally:
        dist.destroy_process_group()


def difference(cfg, world):
    timeline, _ = plan.rehearse(cfg, world)
    return timeline.sum(axis=1).max() / tracked(cfg, world) - 1


WIDE = ["--n_embd=1536", "--batch_size=1", "--block_size=64", "--activation_checkpointing=full"]


@pytest.mark.parametrize("size, argv", [
    (1, []), (8, ["--activation_checkpointing=selective"]), (512, WIDE), (8, WIDE),
    (1, ["--strategy=single"]), (1, ["--strategy=single", "--dtype=float32", *WIDE]),
    (8, ["--strategy=ddp", *WIDE]), (8, ["--strategy=shard_grad_op", *WIDE]),
    (16, ["--strategy=hybrid_shard", "--shard_group_size=4", *WIDE]),
    (16, ["--strategy=hybrid_shard", "--gradient_accumulation_steps=48", *WIDE]),
    (8, ["--gradient_accumulation_steps=32"]),
    (8, ["--gradient_accumulation_steps=16", "--grad_sync=last", *WIDE]),
    (8, ["--strategy=shard_grad_op", "--gradient_accumulation_steps=16", "--grad_sync=last"]),
    (8, [r"--freeze=wte|wpe|h\.[01]\."]), (8, ["--freeze=mlp"]), (8, ["--wrap_min_params=100000"]),
    (8, ["--prefetch_blocks=2", *WIDE]), (8, ["--dtype=float16", "--bias=True"]),
    (8, ["--reduce_dtype=bfloat16", *WIDE]), (8, ["--cpu_offload=0.5", *WIDE]),
    (8, ["--model=llama", "--n_inner=1024", "--device=cpu", "--dtype=float32"]),
    (8, ["--optimizer=muon", *WIDE]),
])
def test_plan_rehearsal_is_pytorchs_trackers(size, argv):
    """Within 1%, most of them exactly; `python tests/test_plan.py` has the large models."""
    # few symbols: the blocks, not the logits, are what is compared
    cfg, world = placed(size, "--vocab_size=1024", *argv)
    # offloaded shards and gradients are copied, which the trackers' one memory does not show
    limit = 0.03 if cfg.cpu_offload else 0.01
    assert abs(difference(cfg, world)) < limit


LLAMA_LIKE = """
from dataclasses import dataclass
import torch, torch.nn as nn
from torch.nn import functional as F

@dataclass
class ModelConfig:
    block_size: int = 64
    vocab_size: int = 512
    n_layer: int = 2
    width: int = 96

class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.norm = nn.RMSNorm(c.width)
        self.qkv = nn.Linear(c.width, 3 * c.width, bias=False)
        self.gate, self.up = (nn.Linear(c.width, 3 * c.width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * c.width, c.width, bias=False)

    def forward(self, x, cache=None):
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        h = self.norm(x + y)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))

class Model(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.config = c
        self.embedding = nn.Embedding(c.vocab_size, c.width)
        self.blocks = nn.ModuleList([Block(c) for _ in range(c.n_layer)])
        self.head = nn.Linear(c.width, c.vocab_size, bias=False)  # not tied

    def forward(self, idx, targets=None, cache=None):
        x = self.embedding(idx)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return logits, F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
"""


@pytest.mark.parametrize("strategy, size", [("single", 1), ("full_shard", 8)])
def test_plan_holds_for_a_model_file_that_it_does_not_know(tmp_path, monkeypatch, strategy, size):
    (tmp_path / "llama_like.py").write_text(LLAMA_LIKE)
    monkeypatch.syspath_prepend(tmp_path)
    cfg = load_config(["--model=llama_like", f"--gradient_accumulation_steps={size}",
                       f"--strategy={strategy}", "--batch_size=4", "--width=192"])
    none = plan.plan(cfg, size, MACHINE)
    full = plan.plan(replace(cfg, activation_checkpointing="full"), size, MACHINE)
    n = (2 * 512 + 12 * 192 * 2) * 192 + 2 * 192  # embedding, head; blocks of 3 + 9; norms
    assert none["parameters"] + none["gradients"] + none["optimizer"] == pytest.approx(
        16 * n / size, rel=1e-3)
    assert none["peak"] > full["peak"] > 16 * n / size
    assert (none["sent"] > 0) == (size > 1)
    assert abs(difference(*plan.place(cfg, size, MACHINE))) < 0.01


@pytest.mark.parametrize("size, argv", [
    (1, ["--strategy=single"]), (8, ["--strategy=ddp"]), (8, []), (7, []),
    (16, ["--strategy=hybrid_shard", "--shard_group_size=4"]), (8, ["--freeze=mlp"]),
    (8, ["--cpu_offload=0.5"]), (8, ["--cpu_offload=1"]),
    (1, ["--strategy=single", "--optimizer=muon"]), (7, ["--optimizer=muon", "--freeze=mlp"]),
    (16, ["--strategy=hybrid_shard", "--shard_group_size=4", "--optimizer=muon"])])
def test_plan_rehearsed_state_is_the_closed_formula(size, argv):
    """At rest 16 bytes a parameter, rows rounded up to the ranks'; the same by two ways."""
    cfg, world = placed(size, "--vocab_size=1000", *argv)
    model = train.meta_model(cfg)
    device, host = plan.kept(model, cfg, world)
    # on a CPU: what a GPU copies from is pinned, and more than the formula
    timeline, marks = plan.rehearse(cfg, replace(world, device=torch.device("cpu")))
    counters = 4 * len(list(model.parameters()))  # AdamW counts its steps
    for n, where in (marks[0], marks[-1]):  # before the step, and before the optimizer's
        at, gradients = dict(zip(plan.KINDS, timeline[n])), where == "optimizer"
        assert at["parameters"] == device["parameters"]
        assert 0 <= at["optimizer"] - device["optimizer"] <= counters
        assert at["gradients"] == pytest.approx(device["gradients"] * gradients, rel=0.02)
        state = host.total() - (0 if gradients else host["gradients"])
        assert at["host"] == pytest.approx(state, rel=0.02, abs=counters)
    g = cfg.shard_group_size or world.size if cfg.strategy in SHARDED else 1
    if not cfg.freeze:
        def padded(params):
            return sum(math.ceil(p.shape[0] / g) * p[0].numel() for p in params)

        one_moment = [p for p in model.blocks.parameters() if p.dim() > 1]  # Muon's
        less = 4 * padded(one_moment) * (cfg.optimizer == "muon")
        n = padded(model.parameters())
        assert (device["parameters"] + host["parameters"]) == 4 * n
        assert device.total() + host.total() == 16 * n - less  # rank 0 has no empty rows


def test_plan_loss_takes_three_logits_in_fp32():
    """Log-probabilities, their gradient, the logits' gradient: 12 B T V bytes over what the blocks
    left; the model's own logits in bf16 may still be there."""
    cfg, world = placed(8, "--vocab_size=50304")
    timeline, marks = plan.rehearse(cfg, world)
    start = {where: n for n, where in marks}
    activations = timeline[:, plan.KINDS.index("activations")]
    loss = activations[start["forward, head"]:start["backward, block 2"]].max()
    logits = 4 * 512 * 50304
    assert 12 <= (loss - activations[start["forward, head"]]) / logits <= 14.2


def kept_for_backward(block, x):
    """Bytes of the storages that autograd saves in a real forward, parameters left out."""
    saved = {}

    def pack(t):
        if not isinstance(t, torch.nn.Parameter) and not isinstance(t._base, torch.nn.Parameter):
            saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        block(x)
    return sum(saved.values())


@pytest.mark.parametrize("mode", ["none", "full"])
def test_plan_activations_of_a_block_are_what_autograd_really_saves(mode):
    held = []
    argv = ["--dtype=float32", "--vocab_size=256", "--block_size=64", "--n_embd=96", "--device=cpu"]
    for layers in (2, 3):
        cfg, world = placed(1, *argv, f"--n_layer={layers}", "--strategy=single",
                            f"--activation_checkpointing={mode}")
        timeline, marks = plan.rehearse(cfg, world)
        start = {where: n for n, where in marks}
        held.append(timeline[start["forward, head"], plan.KINDS.index("activations")])
    with torch.device("cpu"):
        model = train.model_file("gpt2").Model(train.model_config(cfg))
    x = torch.randn(4, 64, 96, requires_grad=True).mul(1)
    real = x.nbytes if mode == "full" else kept_for_backward(model.blocks[0], x)
    assert held[1] - held[0] == real


def allocated(cfg, world):
    """Bytes at the peak of a real step's second, over what there was before it, as PyTorch's
    profiler heard from the CPU's allocator: rank 0's own, in a group that sends nothing."""
    dist.init_process_group("fake", rank=0, world_size=world.size, store=FakeStore())
    try:
        model = train.meta_model(cfg)
        wrapped = fsdp.parallelize(model, cfg, world)
        optimizer = make_optimizer(model, cfg)
        for p in model.parameters():
            fsdp.write_full(p, torch.zeros(p.shape))
        x = torch.zeros(cfg.batch_size, cfg.block_size, dtype=torch.int64)
        batches = SimpleNamespace(train=lambda step, micro: (x, x))
        args = wrapped, optimizer, torch.amp.GradScaler("cpu", enabled=False), batches, (x, x)
        train.train_step(*args, 0, cfg, world)
        with torch.profiler.profile(profile_memory=True) as profile:
            train.train_step(*args, 1, cfg, world)
    finally:
        dist.destroy_process_group()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


@pytest.mark.parametrize("size, argv", [
    (1, ["--strategy=single", "--dtype=float32"]), (1, ["--strategy=single", "--dtype=bfloat16"]),
    (8, []), (8, ["--strategy=shard_grad_op", "--gradient_accumulation_steps=16"]),
    (16, ["--strategy=hybrid_shard", "--shard_group_size=4", "--gradient_accumulation_steps=32"]),
    (8, ["--optimizer=muon"])])
def test_plan_peak_is_a_real_steps(size, argv):
    cfg, world = placed(size, "--device=cpu", "--n_layer=2", "--vocab_size=512", "--block_size=128",
                        "--n_embd=192", *argv)
    timeline, _ = plan.rehearse(cfg, world)
    state = sum(timeline[0, plan.KINDS.index(kind)] for kind in ["parameters", "optimizer"])
    tokens = 4 * 128 * 8  # the batch was there before the real step
    assert timeline.sum(axis=1).max() - state - tokens == pytest.approx(
        allocated(cfg, world), rel=0.01)


def test_plan_offload_separates_device_and_host():
    none, half, all_, saved = (
        row(8, "--vocab_size=1024", *WIDE, *more)
        for more in ([], ["--cpu_offload=0.5"], ["--cpu_offload=1"], ["--activation_offload=True"]))
    assert none["peak"] > half["peak"] > all_["peak"] and none["host"] == 0
    assert all_["parameters"] == all_["gradients"] == all_["optimizer"] == 0
    state = 8 * sum(none[kind] for kind in ("parameters", "gradients", "optimizer"))
    assert state <= all_["host"] <= 2 * state  # 8 ranks share a node's; copies; pinned memory
    x = 1 * 64 * 1536 * 2
    assert saved["host"] == 8 * 3 * 2**18 > 8 * 3 * x  # each block's input, in bf16
    assert 0 < none["peak"] - saved["peak"] <= 3 * x


def test_plan_pinned_host_memory_is_powers_of_two():
    """Parameters, gradients and activations of what is offloaded, each tensor; not the moments."""
    sizes = ["--n_layer=2", "--n_head=3", "--n_embd=384", "--block_size=96", "--bias=False"]
    cfg, world = placed(2, "--vocab_size=1000", "--cpu_offload=1", *sizes)
    timeline, marks = plan.rehearse(cfg, world)
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


def test_plan_loss_chunks_lower_gpt2_xls_peak_by_the_logits():
    """Of 12 bytes for each token and symbol, and 2 of bf16 logits, an eighth is left. Two of its
    blocks: the logits do not depend on how many there are."""
    argv = ["config/train_gpt2_xl.py", "--n_layer=2", "--gradient_accumulation_steps=8"]
    cfg = load_config(argv)
    assert cfg.loss_chunks == 8  # the config has it on
    losses, peaks = [], []
    for chunks in (0, 8):
        timeline, marks = plan.rehearse(*plan.place(replace(cfg, loss_chunks=chunks), 8, MACHINE))
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


def test_plan_cpus_and_gpus_rmsnorm_differ():
    """A GPU's kernel keeps a number a row; a CPU's makes and keeps the normalized x too."""
    argv = "--model=llama", "--n_inner=1024", "--strategy=single", "--dtype=float32"
    gpu, cpu = (row(1, *argv, "--vocab_size=256", *more) for more in ([], ["--device=cpu"]))
    x = 4 * 512 * 384 * 4  # B T C in fp32
    assert cpu["activations"] - gpu["activations"] == pytest.approx(2 * 3 * x, rel=0.01)


def test_plan_without_pytorchs_private_parts_is_one_line(monkeypatch):
    monkeypatch.setattr("rehearse.FakeTensorMode", None)
    with pytest.raises(SystemExit, match="private parts of PyTorch"):
        plan.rehearse(*placed(8))


# -----------------------------------------------------------------------------
# the formulas


def test_plan_zero_accounting_is_the_papers(capsys):
    """Rajbhandari et al. 2020, figure 1: 7.5B parameters on 64 GPUs."""
    plan.main(["--accounting=zero", "--params=7.5e9", "--world_size=64"])
    assert re.findall(r"([\d.]+) GB", capsys.readouterr().out) == ["120.0", "31.4", "16.6", "1.9"]


def test_plan_sent_bytes_are_a_rings():
    """(W - 1) / W of the buffer for a gather or a scatter, twice that for an all-reduce; a group
    inside a node uses its fast links."""
    world = World(size=16, local_size=8)
    for strategy, group, traffic, expected in [
            ("ddp", 0, {"all_reduce": 1600}, (0, 3000)),
            ("full_shard", 0, {"all_gather": 1600, "reduce_scatter": 800}, (0, 2250)),
            ("hybrid_shard", 8, {"all_gather": 800, "reduce_scatter": 800, "all_reduce": 100},
             (1400, 100))]:
        cfg = replace(load_config([]), strategy=strategy, shard_group_size=group)
        assert plan.sent(traffic, cfg, world, 8) == expected


def test_plan_a_step_takes_the_longer_of_computing_and_sending():
    machine = SimpleNamespace(flops=1e12, bandwidth=4, network=0.5)
    assert plan.step_seconds(1e12, (2e9, 1e9), machine) == 2.5
    assert plan.step_seconds(4e12, (2e9, 1e9), machine) == 4
    machine.bandwidth = machine.network = None
    assert plan.step_seconds(3e12, (2e9, 1e9), machine) == 3
    machine.flops = None
    assert plan.step_seconds(1, (1, 1), machine) is None


def test_plan_flops_count_recomputation_and_frozen_parameters():
    cfg, world = placed(1, "--n_layer=2", "--n_head=2", "--n_embd=64", "--block_size=32",
                        "--batch_size=1", "--strategy=single", "--vocab_size=50304")
    head, blocks, T = 50304 * 64, 2 * 12 * 64**2, 32
    base = (6 * (head + blocks) + 12 * 2 * 64 * T) * T
    assert plan.flops(cfg, world) == base
    again = replace(cfg, activation_checkpointing="full")
    last = 2 * 4 * 64**2  # the blocks' last product: nothing in them needs its output
    assert plan.flops(again, world) == base + (2 * (blocks - last) + 4 * 2 * 64 * T) * T
    again = replace(cfg, loss_chunks=4)
    assert plan.flops(again, world) == base + 2 * head * T
    frozen = replace(cfg, freeze="mlp")
    assert plan.flops(frozen, world) == base - 2 * (2 * 8 * 64**2) * T


# -----------------------------------------------------------------------------
# the command


def command(capsys, *argv):
    plan.main(list(argv))
    return capsys.readouterr().out.strip().splitlines()


SHALLOW = "--n_layer=4", "--block_size=512", "--n_head=16", "--n_embd=2048"


@pytest.mark.parametrize("argv, message", [
    (["--n_layer=2", "--gpu_memory=80"], r"^take --strategy=single: the fastest that fits"),
    (["--world_size=8", *SHALLOW, "--gpu_memory=14"], r"^take --strategy=ddp: .*, by the bytes"),
    (["--world_size=8", *SHALLOW, "--gpu_memory=9"], r"^take --strategy=shard_grad_op: "),
    (["--world_size=8", *SHALLOW, "--gpu_memory=6.2"], r"--loss_chunks=8 does$"),
    (["--world_size=8", *SHALLOW, "--gpu_memory=3"],
     r"--loss_chunks=8 --activation_checkpointing=selective does$"),
    (["--world_size=8", *SHALLOW, "--gpu_memory=2"],
     r"--activation_checkpointing=full --batch_size=6 --gradient_accumulation_steps=80 does$"),
    (["--world_size=8", *SHALLOW, "--activation_offload=True", "--compile=False",
      "--gpu_memory=2.2", "--host_memory=8"], r"--activation_checkpointing=full does$"),
    ([*SHALLOW, "--batch_size=1", "--gpu_memory=4", "--host_memory=64"],
     r"=full_shard .*--activation_checkpointing=full --cpu_offload=0\.\d does \(with few micro-b"),
    ([*SHALLOW, "--batch_size=1", "--gpu_memory=4", "--host_memory=1"],
     r"^nothing fits, whatever is changed"),
    ([*SHALLOW, "--gpu_memory=0.1"], r"take more GPUs, or a smaller model or block_size$"),
])
def test_plan_advice_is_the_smallest_change_that_fits(capsys, argv, message):
    lines = command(capsys, *argv)
    assert re.search(message, lines[-1]), lines
    rehearsed = [line for line in lines if line.startswith("  --")]
    sizes = [float(size) for line in rehearsed for size in re.findall(r"([\d.]+) GiB a GPU", line)]
    limit = plan.FULL * float([a for a in argv if "gpu_memory" in a][0].split("=")[1])
    host_is_short = {"--host_memory=1", "--host_memory=8"} & set(argv)
    if sizes and not host_is_short:  # the last one fits, and none before it
        assert all(size > limit * 0.99 for size in sizes[:-1])
        assert "smaller model" in lines[-1] or sizes[-1] <= limit * 1.01


def test_plan_table_of_a_large_model_is_quick_and_small():
    """175B's blocks on 1,024 GPUs; all 96 of them take 3 s a strategy (python tests/test_plan.py
    has the deep ones)."""
    code = ("import plan, time, resource; t = time.time(); plan.main(['config/gpt3_175b.py', "
            "'--world_size=1024', '--n_layer=4', '--gpu_memory=24', '--gpu=H100', "
            "'--bandwidth=450', '--network=50']); print('took', time.time() - t, "
            "resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)")
    p = python("-c", code)
    assert p.returncode == 0, p.stderr
    seconds, gib = map(float, p.stdout.split("took ")[1].split())
    assert gib < 4 and seconds < 60, p.stdout  # 4 on a quiet machine
    lines = p.stdout.splitlines()
    rows = [line for line in lines if line.startswith(plan.STRATEGIES)]
    assert [line.split()[0] for line in rows] == list(plan.STRATEGIES)
    fits = {line.split()[0]: "  yes " in line for line in rows}
    assert "units like transformer.h.0: 54.0 MiB of parameters a rank; 3,456.0 MiB" in p.stdout
    assert fits == dict(single=False, ddp=False, shard_grad_op=False, full_shard=True,
                        hybrid_shard=True)
    assert "45% of H100's data sheet" in p.stdout and "planned with 2048" in p.stdout


def test_plan_mfu_scales_the_time_of_a_step(capsys):
    times = []
    for flags in (["--gpu=H100"], ["--gpu=H100", "--mfu=0.9"], ["--flops=989e12"]):
        line = [x for x in command(capsys, *SMALL, *flags) if x.startswith("single")][0]
        times.append(float(re.search(r"([\d.]+)  (yes|no)", line)[1]))
    assert times[0] == pytest.approx(2 * times[1], rel=0.05)
    assert times[1] > times[2] > 0.8 * times[1]


def test_plan_plot_shows_the_peak(tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    figures, draw = [], plan.draw
    monkeypatch.setattr(plan, "draw", lambda rows, *a: figures.append((rows, draw(rows, *a))))
    path = tmp_path / "memory.png"
    out = command(capsys, *SMALL, "--world_size=4", "--gpu_memory=4", f"--plot={path}",
                  "--gradient_accumulation_steps=8", "--grad_sync=last", "--strategy=full_shard")
    assert path.read_bytes().startswith(b"\x89PNG") and f"wrote {path}" in out
    rows, figure = figures[0]
    assert [panel.get_title().split()[0] for panel in figure.axes] == [r["strategy"] for r in rows]
    for row, panel in zip(rows, figure.axes):
        x, stack = plan.progress(row)
        assert stack.sum(axis=1).max() == row["peak"] and (x[1:] >= x[:-1]).all()
        top = max(c.get_paths()[0].vertices[:, 1].max() for c in panel.collections)
        assert top == pytest.approx(row["peak"] / plan.GIB)
        assert panel.lines[0].get_ydata()[0] == 4  # the GPU's size


@pytest.mark.parametrize("argv, message", [
    (["config/gpt3_175b.py", "--world_size=96"], "shard_group_size=128"),
    (["--world_size=0"], "--world_size=0"), (["--world_size=1.5"], "invalid int value: '1.5'"),
    (["--gpu_memory=-1"], "--gpu_memory=-1.0: pass a finite number above 0"),
    (["--gpu=H101"], "--gpu=H101 is not listed; use one of"), (["--bandwidth=fast"], "--bandwidth"),
    (["--accounting=zero"], "--params=7.5e9"), (["--accounting=two"], "--accounting=zero"),
    (["--n_lyaer=2"], "did you mean n_layer"), (["--flops=nan"], "--flops=nan"),
    (["--world_size"], "expected one argument"), (["--freeze=nobody"], "freeze='nobody'"),
    (["--plot=/nowhere/x.png"], "--plot=/nowhere/x.png"), (["--plot=x.xyz"], "--plot=x.xyz"),
])
def test_plan_bad_input_is_one_clear_line(argv, message):
    with pytest.raises(SystemExit) as e:
        plan.main(argv)
    assert message in str(e.value) and "\n" not in str(e.value)


def test_plan_bad_input_ends_with_code_1_and_no_traceback():
    p = python("plan.py", "--mfu=0")
    assert p.returncode == 1 and p.stderr == "--mfu=0.0: pass a finite number above 0\n"
    p = python("plan.py", "--help")
    assert p.returncode == 0 and "--world_size" in p.stdout and "zero: 2 + 2 + 12" in p.stdout


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
                timeline, _ = plan.rehearse(cfg, world)
                seconds += time.time() - start
                peak = timeline.sum(axis=1).max()
                off = peak / tracked(cfg, world) - 1
                worst = max(worst, abs(off))
                print(f"{shape[2]:5d} wide x {shape[0]}, {size:2d} ranks, {mode:9s} "
                      f"{peak / 1e9:8.3f} GB, {off:+.3%}", flush=True)
    print(f"largest difference {worst:.3%}; the rehearsals took {seconds / 27:.1f} s each")


if __name__ == "__main__":
    accuracy()

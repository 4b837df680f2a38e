"""
timing.py: prices against sums by hand, the streams against drawings by hand, and the whole
against what others published (published.py). What plan.py prints of it is tested here too.

    python -m pytest -q tests/test_timing.py
"""

import os
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from harness import HERE, refused
from test_plan import HYBRID, REGATHER, TINY, command, placed
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from extras import plan
from extras.plan import published, timing
from extras.plan.picture import print_event
from extras.plan.program import COMPUTE, Event, Operation, Record, Wait
from extras.plan.program import touched as touched_by
from extras.plan.rehearse import rehearse
from optimizer import make_adamw

pytestmark = pytest.mark.slow

# A GPU with round numbers: 1 PFLOP/s of products and 1 TB/s of memory that kernels reach.
ROUND = replace(
    timing.H100, peak=2e15, products=0.5, memory=1e12 / timing.MEMORY_SHARE, nvlink=100e9,
    pcie=30e9, attention=dict(flash2=(200e12, 100e12)))
CLUSTER = timing.Cluster(ROUND, gpus_per_node=8, network=50e9, attention="flash2")


# -----------------------------------------------------------------------------
# prices


@pytest.mark.parametrize("keys, ms", [
    # a product of 1,000 x 1,000 x 1,000,000 in bf16: 2 TFLOP, and 4.002 GB, side by side
    (dict(name="aten.mm", moved=4.002e9, flops=2e12), 4.002),
    (dict(name="aten.mm", moved=1e9, flops=2e12), 2),
    (dict(name="aten.mm", moved=1e9, flops=2e12, width=4), 4),  # TF32
    (dict(name="aten._scaled_mm", moved=0.5e9, flops=2e12, width=1), 1),
    (dict(name="aten.mm", moved=12, flops=12), 0.004),  # as long as any kernel
    # attention of 2,400 tokens: 1 + 600 / 2,400; heads of 128, then of 64
    (dict(name="attention", moved=1e9, flops=1e12, head=128, length=2400), 5 * 1.25),
    (dict(name="attention", moved=1e9, flops=1e12, head=64, length=600), 10 * 2),
    (dict(name="attention", moved=1e9, flops=1e12, head=64, length=600, width=4), 20 * 2),
    (dict(name="aten.add", moved=3e9), 3),
    (dict(name="aten.add", moved=12), 0.004),
    (dict(name="copy", moved=2 * 30e9), 1000),  # it is read there and written here
    (dict(name="update on the host", moved=timing.HOST), 1000)])
def test_timing_prices_are_sums_by_hand(keys, ms):
    moved = [("x", keys["moved"])]
    op = Operation(where="", micro_batch=1, row=0, reads=moved, writes=[], **{
        key: value for key, value in keys.items() if key != "moved"})
    assert 1e3 * timing.price(op, CLUSTER) == pytest.approx(ms)


def test_timing_a_v100_has_no_tf32():
    """So fp32 takes 8 times as long as fp16, by its data sheet: 15.7 TFLOP/s beside 125."""
    v100 = replace(ROUND, fp32=timing.V100.fp32)
    op = operation("mm", [], [], flops=2e12, width=4)
    assert timing.price(op, replace(CLUSTER, gpu=v100)) == pytest.approx(8 * 2e-3)


CALL, HOP, ACROSS = 8.4e-6, 3.4e-6, 14e-6


@pytest.mark.parametrize("what, size, ranks, stride, seconds", [
    ("all_gather", 8e9, 8, 1, CALL + 7 * HOP + 7e9 / 100e9),
    ("all_reduce", 8e9, 8, 1, CALL + 14 * HOP + 14e9 / 100e9),
    ("all_gather", 8e9, 4, 1, CALL + 3 * HOP + 6e9 / 100e9),  # half of a node
    # two nodes: 8 lines of 50 GB/s are 400, more than NVLink; of 4 nodes with 2 each 100
    ("reduce_scatter", 16e9, 16, 1, CALL + 14 * HOP + ACROSS + 15e9 / 100e9),
    # hybrid's all-reduce: a GPU of each of 2 nodes, with its own line
    ("all_reduce", 8e9, 2, 8, CALL + 2 * ACROSS + 8e9 / 50e9),
    # groups of 4: two GPUs of each of 2 nodes, and then one
    ("all_reduce", 8e9, 4, 4, CALL + 4 * HOP + 2 * ACROSS + 12e9 / 100e9),
    ("all_reduce", 8e9, 4, 8, CALL + 6 * ACROSS + 12e9 / 50e9),
    ("all_gather", 8e9, 1, 1, 0)])
def test_timing_collectives_go_round_a_ring(what, size, ranks, stride, seconds):
    event = Event(what, "root", "forward", 0, 1, size=size, ranks=ranks, stride=stride)
    op = Operation("", "forward", 1, 0, [], [], event=event, size=size)
    assert timing.price(op, CLUSTER) == pytest.approx(seconds)


def operation(name, reads, writes, where="forward, block 0", **more):
    return Operation(f"aten.{name}", where, 1, 0, reads, writes, **more)


def test_timing_a_fused_group_reads_and_writes_what_is_outside():
    """x -> a -> b, and y: a lives inside, b is read by a product, c by nobody."""
    program = [
        operation("mul", [("x", 10)], [("a", 20)]),
        operation("add", [("a", 20), ("y", 5)], [("b", 30)]),
        operation("add", [("b", 30), ("x", 10)], [("c", 40)]),
        operation("mm", [("b", 30)], [("d", 1)], flops=1.0),
        operation("mul", [("d", 1)], [("e", 2)]),
        operation("mul", [("e", 2)], [], where="backward")]
    first, product, second, third = timing.fuse(program)
    assert (first.reads, first.writes) == ([("x", 10), ("y", 5)], [("b", 30)])
    assert product is program[3]
    assert (second.reads, second.writes) == ([("d", 1)], [("e", 2)])
    assert third.where == "backward"


def recorded(argv, size=8):
    cfg, world = placed(size, *TINY, *argv)
    *_, program = rehearse(cfg, world)
    return program, cfg


def test_timing_counts_the_products_attention_and_the_update():
    """FLOPs and bytes of a whole step of 2 blocks, from its shapes. TINY's rows are not divided by
    7 ranks, and so is what is padded."""
    flags = ["--n_layer=2", "--strategy=full_shard", "--dtype=bfloat16"]
    program, cfg = recorded(flags)
    ops = [op for op in program if isinstance(op, Operation)]
    C, T, V = cfg.sizes.n_embd, cfg.sizes.block_size, cfg.sizes.vocab_size
    products = sum(op.flops for op in ops if not op.head)
    assert products == 3 * 2 * T * (2 * 12 * C * C + C * V)
    assert sum(op.flops for op in ops if op.head) == 3.5 * 2 * 2 * T * T * C
    rows = sum(-(-len(p) // 8) * p[0].numel() for p in plan.meta_model(cfg).parameters())
    update = sum(op.moved() for op in ops if op.name == "update")
    assert update == pytest.approx(7 * 4 * rows, rel=0.01)  # p, m, v read and written, g read


@pytest.mark.parametrize("name, arguments, reads, writes", [
    ("aten.mul_.Tensor", "xy", "xy", "x"), ("aten.copy_", "xy", "y", "x"),
    ("aten.zero_", "x", "", "x"), ("aten._foreach_mul_.List", "xy", "xy", "x"),
    ("aten._foreach_copy_", "xy", "y", "x")])
def test_timing_in_place_is_read_and_written_but_by_a_copy(name, arguments, reads, writes):
    args = [[letter] for letter in arguments]
    out = None if "foreach" in name else args[0]
    touched = touched_by(name, args, {}, out)
    assert ["".join(tree_leaves(some)) for some in touched] == [reads, writes]


def test_timing_counts_a_convolution(models):
    """hybrid.py's has a group for each channel, and pads 3 positions on the left and as many on
    the right."""
    shutil.copy(os.path.join(HERE, "tests", "hybrid.py"), models)
    argv = ["--model=hybrid", "--n_layer=1", "--width=32", "--block_size=16", "--batch_size=2",
            "--vocab_size=67", "--gradient_accumulation_steps=2", "--strategy=full_shard"]
    for dtype, width in (("bfloat16", 2), ("float32", 4)):
        [row] = plan.main([*argv, f"--dtype={dtype}", "--world_size=2", "--gpu=H100"])
        ops = [op for op in row["program"] if "convolution" in getattr(op, "name", "")]
        assert [op.name for op in ops] == ["aten.convolution", "aten.convolution_backward"]
        assert ops[0].flops == 2 * 2 * (16 + 3) * 32 * 4
        assert [op.width for op in ops] == [width, width]


# -----------------------------------------------------------------------------
# streams


L = 3  # blocks


def drawn(monkeypatch, argv, f=0, b=0, g=0, r=0, a=0, micro_batches=1, size=8):
    """The step that FSDP2 asks for, if a block's forward took f seconds and its backward b, each
    gather g, reduce-scatter r and all-reduce a, and all else nothing."""
    program, _ = recorded([*argv, f"--gradient_accumulation_steps={micro_batches * size}"], size)
    lasts = dict(all_gather=g, reduce_scatter=r, all_reduce=a)
    compute = dict(forward=f, backward=b)
    seen = set()

    def price(op, cluster):
        if op.event:
            return 0 if op.where == "clip" else lasts[op.event.what]
        first = (op.where, op.micro_batch) not in seen and op.name.startswith("aten.")
        if not first or "block" not in op.where or op.stream is not COMPUTE:
            return 0
        seen.add((op.where, op.micro_batch))
        return compute[op.where.partition(",")[0]]

    monkeypatch.setattr(timing, "price", price)
    monkeypatch.setattr(timing, "TAKEN", 0.0)
    return timing.run(program, CLUSTER, micro_batches)


FULL = ["--strategy=full_shard"]
ZERO2 = ["--strategy=shard_grad_op"]


@pytest.mark.parametrize("argv, lasts, expected, exposed", [
    # The root's gather and the first block's are in front, the last two reductions at the end;
    # all others are under compute.
    (FULL, dict(f=10, b=20, g=2, r=3), 2 * 2 + L * 30 + 2 * 3, 10),
    (ZERO2, dict(f=10, b=20, g=2, r=3), 2 * 2 + L * 30 + 2 * 3, 10),
    # Nothing to hide under: one after the other, with one group of ranks.
    (FULL, dict(g=2, r=3), (2 * L + 1) * 2 + (L + 1) * 3, 26),
    (ZERO2, dict(g=2, r=3), (L + 1) * 2 + (L + 1) * 3, 20),
    # Communication takes longer than compute. Forward: gathers one after the other, then the last
    # block. Backward: its gather has begun then; from there on gathers and reductions take turns
    # in one queue, and after the last of them a block's backward hides nothing.
    (FULL, dict(f=1, g=4), (L + 1) * 4 + 3 * 4, 25),
    # Groups of 4: the all-reduces have a queue of their own, after each reduce-scatter.
    (HYBRID, dict(f=10, b=20, g=2, r=3, a=5), 2 * 2 + L * 30 + 3 + 2 * 5, 17),
    (HYBRID, dict(f=10, b=20, g=2, r=3, a=30), 2 * 2 + L * 10 + 20 + 3 + (L + 1) * 30, 87),
    # Of the first block 12 gradients, and two embeddings.
    (["--strategy=ddp"], dict(f=10, b=20, a=0.1), L * 30 + 14 * 0.1, 1.4),
])
def test_timing_streams_are_the_drawing(monkeypatch, argv, lasts, expected, exposed):
    step = drawn(monkeypatch, argv, size=16 if argv == HYBRID else 8, **lasts)
    assert step.seconds == pytest.approx(expected)
    assert step.exposed * step.seconds == pytest.approx(exposed)


@pytest.mark.parametrize("argv, exposed", [
    # The root is gathered by the first. Each gathers its first block, and reduces two units last.
    (FULL, 2 + 5 * (2 + 2 * 3)),
    ([*ZERO2, "--grad_sync=last"], 2 * 2 + 2 * 3)])  # by the first, and after the last
def test_timing_one_micro_batch_stands_for_those_left_out(monkeypatch, argv, exposed):
    """In the step's seconds and in those that it waits."""
    step = drawn(monkeypatch, argv, f=10, b=20, g=2, r=3, micro_batches=5)
    assert step.seconds == pytest.approx(5 * L * 30 + exposed)
    assert step.exposed * step.seconds == pytest.approx(exposed)


@pytest.mark.parametrize("gather, product, ends, waits", [
    (6, 10, 11, 0),  # a sixth of the gather is lost: 5 of the 10 seconds are done when it ends
    (18, 0.5, 18, 14.5),  # of the rest of its time compute waits
    (6, None, 6, 6)])  # and where it waits it loses nothing
def test_timing_kernels_are_slower_beside_a_collective(monkeypatch, gather, product, ends, waits):
    """The product lasts longer, and the one after that does not."""
    other, done = torch.cpu.Stream(), torch.cpu.Event()
    event = Event("all_gather", "root", "forward", 0, 1, size=1, ranks=8)
    lasts = dict(neg=0, gather=gather, mm=product, mul=1)
    program = [
        operation("neg", [], []), operation("gather", [], [], event=event, stream=other),
        Record(other, done), operation("mm", [], []), Wait(COMPUTE, done),
        operation("mul", [], [], where="optimizer")]
    if product is None:
        program.pop(3)
    monkeypatch.setattr(timing, "price", lambda op, cluster: lasts[op.name.removeprefix("aten.")])
    step = timing.run(program, CLUSTER, 1)
    assert step.seconds == pytest.approx(ends + 1)
    assert step.exposed * step.seconds == pytest.approx(waits)
    assert step.span(event) == (0, gather)


@pytest.mark.parametrize("argv, size", [
    (FULL, 8), (ZERO2, 8), (HYBRID, 16), ([*FULL, "--prefetch_blocks=2"], 8),
    ([*FULL, "--cpu_offload=0.5"], 8), ([*FULL, "--optimizer=muon"], 8)])
def test_timing_collectives_begin_in_the_order_that_was_rehearsed(argv, size):
    """In each group of ranks. And compute waits for what it needs: no block before its gather."""
    cfg, world = placed(size, *TINY, *argv, f"--gradient_accumulation_steps={2 * size}")
    _, _, events, program = rehearse(cfg, world)
    step = timing.run(program, CLUSTER, 2)
    groups = {(e.ranks, e.stride) for e in events if e.size}
    for group in groups:
        listed = [e for e in events if (e.ranks, e.stride) == group]
        starts = [step.span(e)[0] for e in listed]
        assert starts == sorted(starts)
    for e in events:
        if e.what == "all_gather" and e.where == f"forward, {e.unit}":
            here = [op.row for op in program if isinstance(op, Operation) and op.head
                    and (op.where, op.micro_batch) == (e.where, e.micro_batch)]
            assert step.span(e)[1] < step.times_at(here[0])


# -----------------------------------------------------------------------------
# the host


HOST = dict(DISPATCH=1e-3, UNIT=20e-3, COMPILED_UNIT=50e-3)


@pytest.mark.parametrize("cluster, calls, units, micro_batches, on_host", [
    # two micro-batches of 100 and 300 calls and of 3 units, and an update of 10 calls
    (dict(), (100, 400, 410), (3, 6, 6), 2, 0.410 + 6 * 0.02),
    (dict(), (100, 400, 410), (3, 6, 6), 5, 0.410 + 3 * 0.100 + (6 + 3 * 3) * 0.02),
    (dict(host=1.5), (100, 400, 410), (3, 6, 6), 2, 1.5 * (0.410 + 6 * 0.02)),
    (dict(compiled=True), (100, 400, 410), (3, 6, 6), 2, 6 * 0.05),
    (dict(compiled=True), (100, 400, 410), (0, 0, 0), 2, 0)])
def test_timing_the_host_may_be_the_limit(
        monkeypatch, cluster, calls, units, micro_batches, on_host):
    """A step takes as long as the GPU, or as the host if that takes longer."""
    for name, seconds in HOST.items():
        monkeypatch.setattr(timing, name, seconds)
    places = [("forward, block 0", 1), ("forward, block 0", 2), ("optimizer", 2)]
    program = [
        Operation("aten.mm", where, number, 0, [], [], flops=2e14, issued=issued)
        for (where, number), issued in zip(places, zip(calls, units))]
    step = timing.run(program, replace(CLUSTER, **cluster), micro_batches)
    on_gpu = 0.2 * (micro_batches + 1)
    assert step.on_gpu == pytest.approx(on_gpu)
    assert step.on_host == pytest.approx(on_host)
    assert step.seconds == pytest.approx(max(on_gpu, on_host))
    assert step.busy_host == pytest.approx(on_host / max(on_gpu, on_host))


def test_timing_counts_what_the_host_does():
    """FSDP2 works for each block and the root in each micro-batch; the other calls of PyTorch's
    dispatcher are those of plain PyTorch, and count double with selective checkpointing."""
    class Calls(TorchDispatchMode):
        n = 0

        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            self.n += 1
            return op(*args, **(kwargs or {}))

    flags = ["--n_layer=2", "--dtype=float32", "--grad_clip=0"]
    program, cfg = recorded(["--strategy=single", *flags], size=1)
    model = plan.meta_model(cfg).to_empty(device="cpu")
    optimizer = make_adamw(list(model.parameters()), cfg)
    idx = torch.zeros(cfg.batch_size, cfg.sizes.block_size, dtype=torch.int64)
    for _ in range(2):  # the first makes AdamW's moments
        with Calls() as real:
            model(idx, idx)[1].backward()
            torch.nn.utils.get_total_norm([p.grad for p in model.parameters()], foreach=False)
            optimizer.step()
            optimizer.zero_grad()
    assert program[-1].issued == (pytest.approx(real.n, rel=0.05), 0)

    program, _ = recorded([*FULL, *flags, "--gradient_accumulation_steps=16"])
    calls, units = program[-1].issued
    assert calls < 2.5 * real.n and units == 2 * (2 + 1)
    selective, _ = recorded([*FULL, *flags, "--activation_checkpointing=selective"])
    none, _ = recorded([*FULL, *flags])
    assert selective[-1].issued[0] > 2 * none[-1].issued[0]


# -----------------------------------------------------------------------------
# other machines


@pytest.mark.parametrize("argv, sizes", [
    (FULL, (4, 16)), (["--strategy=ddp"], (2, 32)), (HYBRID, (8, 32)), (ZERO2, (8, 64)),
    (HYBRID, (16, 64)),  # four copies of four shards: only the groups of copies grow
    (REGATHER, (8, 32))])  # the groups of backward do not
def test_timing_grown_is_as_rehearsed_there(argv, sizes):
    steps = []
    for size in sizes:
        cfg, world = placed(size, "--n_layer=2", *argv, "--dtype=bfloat16")
        *_, program = rehearse(cfg, world)
        if size == sizes[0]:
            fixed = cfg.shard_group_size, cfg.reshard_group_size
            rows = argv in (FULL, ZERO2, REGATHER)
            program = timing.grown(program, sizes[1] / size, fixed, rows)
        steps.append(timing.run(program, CLUSTER, 1))
    grown, rehearsed = steps
    assert grown.seconds == pytest.approx(rehearsed.seconds, rel=0.01)
    assert grown.exposed == pytest.approx(rehearsed.exposed, rel=0.05)


@pytest.mark.parametrize("name, found", [
    ("h100", timing.H100), ("A100-40", timing.GPUS["A100-40"]),
    ("NVIDIA A100-SXM4-80GB", timing.A100)])
def test_timing_finds_gpus_by_any_of_their_names(name, found):
    assert timing.find_gpu(name) is found


def test_timing_another_gpu_is_priced_by_its_data_sheet():
    gpu = timing.find_gpu("989:3.35:360")
    assert replace(gpu, name=timing.H100.name, kernel="cudnn") == timing.H100
    assert timing.find_gpu("1978:3.35:360").attention["flash2"][0] == 2 * 338e12


@pytest.mark.parametrize("name, kernel, dtype", [
    ("V100", "written_out", "float16"), ("Tesla V100-SXM2-32GB", "written_out", "float16"),
    ("A100", "flash2", "bfloat16"), ("H100", "cudnn", "bfloat16"), ("H200", "cudnn", "bfloat16"),
    ("B200", "cudnn", "bfloat16"), ("989:3.35:360", "flash2", "bfloat16")])
def test_timing_attention_and_dtype_are_what_the_gpu_has(name, kernel, dtype):
    machine, rest = plan.parse([f"--gpu={name}", *TINY, "--strategy=full_shard"])
    assert machine.attention == machine.cluster.attention == kernel
    [(cfg, _)] = plan.variants(plan.load_config(rest), 8, machine)
    assert cfg.dtype == dtype


def test_timing_one_measured_rate_sets_that_of_products():
    program, _ = recorded(["--n_embd=768", "--block_size=512", "--batch_size=32", *FULL])
    fast = replace(CLUSTER, gpu=replace(ROUND, memory=1e14), host=0.01)  # products are the limit
    seven = replace(fast, gpu=replace(fast.gpu, products=0.7))
    seconds = timing.run(program, seven, 1).seconds
    found = timing.calibrated(program, fast, 1, seconds)
    assert found.gpu.products == pytest.approx(0.7, abs=1e-4)
    assert "--gpu" in refused(timing.calibrated, program, fast, 1, 1e-6)
    # Where the host is the limit it sets none, and the refusal says what to pass instead.
    slow = replace(CLUSTER, host=100.0)
    seconds = 1.5 * timing.run(program, slow, 1).seconds
    assert "pass --host=150.00 " in refused(timing.calibrated, program, slow, 1, seconds)


# -----------------------------------------------------------------------------
# what others published


def test_timing_predicts_what_others_published():
    """With all in host memory too."""
    rows = published.rows(published.ROWS.splitlines())
    ratios = [published.predicted(row)[0] / float(row["tok_s_gpu"]) for row in rows]
    assert len(ratios) == 26 and sum(row["offload"] == "1.0" for row in rows) == 3
    assert published.error(ratios) <= 0.09
    assert published.within(0.25, ratios) == 1


GPT2 = ["config/train_gpt2.py", "--batch_size=12", "--cuda_graph=False"]
XL = ["config/train_gpt2_xl.py", "--batch_size=4", "--cuda_graph=False"]
RECORDED = "--cuda_graph=True"
LLAMA_1B = ["extras/config/llama_1b.py"]
SINGLE = "--strategy=single"
EAGER = "--compile=False"


@pytest.mark.parametrize("ms, argv", [
    (26.7, [*GPT2, SINGLE]),
    (27.6, [*GPT2, SINGLE, "--bias=False"]),
    (28.9, [*GPT2, "--strategy=ddp", "--bias=False"]),
    (39.7, [*GPT2, SINGLE, EAGER]),
    (40.7, [*GPT2, SINGLE, EAGER, "--dtype=float16"]),
    (222.6, [*XL, SINGLE, EAGER]),
    (252.7, [*XL, *FULL, EAGER]),
    (167.7, [*XL, *FULL]),
    (274.8, [*LLAMA_1B, SINGLE]),
    (279.9, [*LLAMA_1B, *FULL]),
    (310.5, [*LLAMA_1B, *FULL, EAGER]),
    (314.8, [*LLAMA_1B, *FULL, EAGER, "--prefetch_blocks=1"]),
    (336.4, [*LLAMA_1B, *FULL, EAGER, "--activation_checkpointing=selective"]),
    (380.7, [*LLAMA_1B, *FULL, EAGER, "--activation_checkpointing=full"]),
    (416.3, [*LLAMA_1B, *FULL, EAGER, "--activation_checkpointing=full",
             "--activation_offload=True"]),
    (417.5, [*LLAMA_1B, *FULL, EAGER, "--optimizer=muon"])])
def test_timing_is_within_15_percent_of_an_h100(ms, argv):
    """Of the steps that extras/docs/gpu.md has, but for compiled full_shard of 124M (one block of
    steps took 37 ms and another 58) and cpu_offload (one host's memory)."""
    common = ["--gpu=H100", "--world_size=1", "--gradient_accumulation_steps=1"]
    [row] = plan.main(["--dtype=bfloat16", *argv, *common])
    assert 1e3 * row["s/step"] == pytest.approx(ms, rel=0.15)


@pytest.mark.parametrize("ms, argv", [
    (25.6, [*GPT2, *FULL, RECORDED]),
    (33.0, [*GPT2, *FULL, EAGER, RECORDED]),
    (126.6, [*XL, *FULL, EAGER, RECORDED]),
    (130.9, [*XL, SINGLE, EAGER, RECORDED])])
def test_timing_of_a_recorded_step_is_within_15_percent_of_an_h200(ms, argv):
    """Of docs/measurements.md. There the host is no limit, whatever the plan says of it."""
    common = ["--gpu=H200", "--world_size=1", "--gradient_accumulation_steps=1", "--host=9"]
    [row] = plan.main(["--dtype=bfloat16", *argv, *common])
    assert 1e3 * row["s/step"] == pytest.approx(ms, rel=0.15)


@pytest.mark.parametrize("key", ["model", "gpu", "attn", "dtype", "reduce", "ac", "strategy"])
def test_timing_a_published_row_that_is_not_known_is_passed_over(capsys, tmp_path, key):
    """And a line says of which row and why; the others count."""
    head, first, second, *_ = published.ROWS.splitlines()
    unknown = dict(zip(head.split(","), first.split(",")))
    unknown[key] = "new"
    path = tmp_path / "runs.csv"
    path.write_text("\n".join([head, ",".join(unknown.values()), second]))
    [row] = published.expressible(path)
    assert row["gpus"] == "32"
    assert capsys.readouterr().out == f"passed over llm-foundry 2023-10, 16 GPUs: {key}=new\n"


def test_timing_published_rows_are_linear_in_depth():
    """What is predicted from 2 and 4 blocks is what all blocks give."""
    row = next(row for row in published.rows(published.ROWS.splitlines()) if "1b" in row["model"])
    [planned] = plan.main(published.arguments(row))
    rate, exposed = published.predicted(row)
    assert rate == pytest.approx(planned["tok/s"], rel=0.005)
    assert exposed == pytest.approx(planned["exposed"], abs=0.002)


# -----------------------------------------------------------------------------
# what plan.py prints of it

TIMED = ["--gpu=H100", "--world_size=8", "--n_layer=2", "--strategy=full_shard",
         "--gradient_accumulation_steps=16"]


def row_of(lines, strategy="full_shard"):
    """{column: text}."""
    heads = next(line for line in lines if line.endswith("fits  peak at"))
    cells = next(line for line in lines if line.startswith(strategy + "  "))
    return dict(zip(heads.split()[3:], cells.split()[1:]))


def test_timing_columns_and_the_whole_run(capsys):
    """With --gpu; tokens/s are of a GPU, and a run's days and price follow from them."""
    lines = command(capsys, *TIMED, "--tokens=3e9", "--price=2.5")
    row = row_of(lines)
    seconds, rate = float(row["s/step"]), float(row["tok/s"].replace(",", ""))
    assert rate == pytest.approx(2 * 12 * 1024 / seconds, rel=0.02)
    assert all(row[key].endswith("%") for key in ("MFU", "exposed", "CPU"))
    hours = 3e9 / rate / 3600
    assert f": {hours / 8:.1f} hours" in "\n".join(lines)  # days from 24 hours on
    assert f"{hours:,.0f} GPU-hours" in lines
    assert f"{2.5 * hours:,.0f} dollars, at 2.5 per GPU-hour" in lines
    assert any("full power" in line and "evaluation" in line for line in lines)
    lines = command(capsys, *TIMED, "--tokens=3e12")
    assert f": {1000 * hours / 8 / 24:,.2f} days" in "\n".join(lines)


def test_timing_without_a_gpu_the_table_stays_as_it_was(capsys):
    lines = command(capsys, *TIMED[1:2], *TIMED[2:])
    assert list(row_of(lines))[6:10] == ["valley", "host/node", "sent", "fits"]
    assert sum("--gpu=V100" in line for line in lines) == 1


def test_timing_a_list_of_gpus_is_one_rehearsal(capsys, monkeypatch):
    """The first number's row is that of the table; a point is named from which more help less."""
    calls = []
    monkeypatch.setattr(plan, "rehearse", lambda *args: calls.append(args) or rehearse(*args))
    lines = command(capsys, *TIMED, "--world_size=64,8,16", "--network=1")
    assert len(calls) == 1
    more = [line.split() for line in lines if re.match(r"full_shard +\d+ +\d+ ", line)]
    assert [line[1:3] for line in more] == [["8", "2"], ["16", "1"], ["64", "1"]]
    assert more[0][4:] == [row_of(lines)[key] for key in plan.TIMES]
    per_gpu = [float(line[5].replace(",", "")) for line in more]
    assert per_gpu[0] > per_gpu[1] > per_gpu[2]
    assert any(line.startswith("full_shard: beyond 8 GPUs each one more") for line in lines)
    [line] = [line for line in lines if "instead of" in line]  # the config's are no multiple of 64
    assert "64 on 64 GPUs instead of 16" in line and " 16 on" not in line and "train.py" in line


def test_timing_the_whole_run_is_priced_on_each_number_of_gpus(capsys):
    lines = command(capsys, *TIMED, "--world_size=8,16", "--tokens=3e9", "--price=2.5")
    for size in (8, 16):
        [cells] = [line.split() for line in lines if re.match(rf"full_shard +{size} ", line)]
        days, hours, dollars = [float(cell.replace(",", "")) for cell in cells[9:]]
        rate = float(cells[3].replace(",", ""))
        assert hours == pytest.approx(size * 3e9 / rate / 3600, abs=0.51)
        assert days == pytest.approx(3e9 / rate / 3600 / 24, abs=0.006)
        assert dollars == pytest.approx(2.5 * size * 3e9 / rate / 3600, abs=0.51)
    heads = [line.split() for line in lines if line.endswith("dollars")]
    assert heads[0][-3:] == ["days", "GPU-hours", "dollars"]
    assert not any("instead of" in line for line in lines)


def test_timing_large_numbers_do_not_touch_their_neighbours(capsys):
    """Nor the long name of a unit in --events."""
    plan.print_line("full_shard", 3 * ["1,234,567,890.12"], 3 * ["1,234,567,890"], "yes", "forward")
    assert len(capsys.readouterr().out.split()) == 9
    where = "forward, block 10"
    event = Event("all_gather", "block 10.attn.c_attn", where, 0, 1, size=2 * 10**9, ranks=2)
    print_event(event, where, dict(timeline=np.zeros((1, 6))), unit=1)
    cells = "forward, block 10 all-gather block 10.attn.c_attn 1,000,000,000.00 0.00"
    assert capsys.readouterr().out.split() == cells.split()


def test_timing_a_list_of_gpus_for_hybrid_shard_is_each_ones_own_plan(capsys):
    """More GPUs are more copies: a rank keeps as many rows."""
    argv = [*TIMED[:1], "--n_layer=2", "--strategy=hybrid_shard", "--shard_group_size=4",
            "--gradient_accumulation_steps=32", "--batch_size=1", "--block_size=64"]
    alone = row_of(command(capsys, *argv, "--world_size=16"), "hybrid_shard")
    lines = command(capsys, *argv, "--world_size=8,16")
    [grown] = [line.split() for line in lines if re.match(r"hybrid_shard +16 ", line)]
    rates = [float(rate.replace(",", "")) for rate in (grown[5], alone["tok/s"])]
    assert rates[0] == pytest.approx(rates[1], rel=0.01)


def test_timing_the_limit_is_where_more_gpus_give_less_than_the_first(capsys):
    plan.print_limit("ddp", {8: 800.0, 16: 1500.0, 32: 2716.0, 64: 3500.0})  # 100, then 87, 76, 24
    assert capsys.readouterr().out.startswith("ddp: beyond 16 GPUs")
    plan.print_limit("ddp", {8: 800.0, 16: 1500.0, 32: 2800.0})
    assert capsys.readouterr().out == ""


def test_timing_measured_sets_what_the_config_gives(capsys):
    lines = command(capsys, *TIMED, "--measured=50000", "--compile=False")
    assert float(row_of(lines)["tok/s"].replace(",", "")) == pytest.approx(50_000, abs=5)


def test_timing_measured_is_of_the_configs_own_strategy(capsys, tmp_path):
    """Not of the last in the table."""
    (tmp_path / "ddp.py").write_text("strategy = 'ddp'")
    keys = [flag for flag in TIMED if "strategy" not in flag]
    lines = command(capsys, str(tmp_path / "ddp.py"), *keys, "--measured=50000")
    assert float(row_of(lines, "ddp")["tok/s"].replace(",", "")) == pytest.approx(50_000, abs=5)
    assert float(row_of(lines)["tok/s"].replace(",", "")) > 50_050


def test_timing_network_is_in_gigabits():
    """An H100's line has 400 Gb/s, which are 50 GB/s."""
    for flags in ([], ["--network=400"]):
        machine, _ = plan.parse(["--gpu=H100", *flags])
        assert machine.cluster.network == 50e9


def test_timing_a_slower_host_is_the_limit(capsys):
    """With --host its part takes so many times as long; where it is the limit, so does the step."""
    argv = [*TIMED, "--batch_size=1", "--compile=False"]
    once, twice = [row_of(command(capsys, *argv, f"--host={n}")) for n in (10, 20)]
    assert once["CPU"] == twice["CPU"] == "100%"
    assert float(twice["s/step"]) == pytest.approx(2 * float(once["s/step"]), rel=0.02)
    assert refused(plan.parse, ["--host=0"]).startswith("--host=0.0: ")


def test_timing_compiled_is_faster_and_slow_attention_slower(capsys):
    rates = {}
    for more in ("--compile=False", "--compile=True", "--attention=triton",
                 "--attention=written_out", "--dtype=float32"):
        rates[more] = float(row_of(command(capsys, *TIMED, more))["tok/s"].replace(",", ""))
    compiled = rates["--compile=True"]
    assert compiled > max(rate for more, rate in rates.items() if more != "--compile=True")


def test_timing_events_have_a_start_and_a_duration(capsys):
    """In ms from their micro-batch's begin; the root's gather is exposed, the blocks' are not."""
    lines = command(capsys, *TIMED, "--n_layer=6", "--events=all")
    gathers = [line.split() for line in lines if "all-gather" in line and "exposed" not in line]
    assert len(gathers) >= 2 * 2 * 4
    exposed = [line for line in lines if line.endswith("exposed")]
    assert any(" root " in line for line in exposed)
    starts = [float(re.search(r"\.\d\d +([\d.]+) +[\d.]+ +[\d,.]+(?:  exposed)?$", line)[1])
              for line in lines if "all-gather" in line]
    back = [i for i in range(1, len(starts)) if starts[i] < starts[i - 1]]
    assert back == [len(starts) // 2 + 1]  # of two micro-batches; the first gathers the root

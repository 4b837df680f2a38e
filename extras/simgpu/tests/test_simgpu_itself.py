"""
The simulated GPU sees bugs: each of these is put in by hand, and its check must name it.

    # the list: which check sees which bug
    python -m pytest -q extras/simgpu/tests/test_simgpu_itself.py -v

A case is written twice in one: with right=True it is what one should write, and no check says
anything. The table is repeated in extras/simgpu/README.md.
"""

import functools
import os
import runpy
import sys
import threading
import types
from unittest.mock import patch

import harness
import pytest
import torch
import torch.distributed as dist
from harness import built, on_ranks, steps, values
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as recompute

import fsdp
import saves
from data.loader import Batches
from optimizer import LossScaler

simgpu = sys.modules.get("simgpu")  # in ranks that harness has forked from the simulating server
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and simgpu is None,
    reason="this machine has a GPU, which runs tests/test_cuda.py; or set SIM_GPUS=4")

@pytest.mark.parametrize("without", [dict(CXX="", PATH=""), dict(CXX=sys.executable)])
def test_simgpu_where_it_cannot_be_built_tests_skip_in_one_line(monkeypatch, tmp_path, without):
    """There is no compiler; what is named as one does not compile it."""
    for name, value in dict(without, SIM_CACHE=str(tmp_path)).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delitem(sys.modules, "simgpu", raising=False)
    monkeypatch.setattr(harness, "cannot_simulate", harness.cannot_simulate.__wrapped__)
    with pytest.raises(pytest.skip.Exception) as skipped:
        harness.simulates(1)
    reason = str(skipped.value)
    assert reason.startswith("simgpu: ") and "\n" not in reason
    assert ("needs a C++ compiler" in reason) == ("PATH" in without)
    assert ("does not build it" in reason) == ("PATH" not in without)


def test_simgpu_is_built_for_each_pytorch(monkeypatch, tmp_path):
    """And once for one: what is there is taken."""
    path = os.path.join(harness.SIMGPU, "simgpu", "build.py")
    build = types.SimpleNamespace(**runpy.run_path(path))
    built = []

    def compile_to(path, compiler, torch):
        built.append(path)
        open(path, "w").close()

    monkeypatch.setenv("SIM_CACHE", str(tmp_path))
    for version in ("2.13.0+cpu", "2.13.0+cu130", "2.13.0+cpu"):
        torch_dir = tmp_path / version
        torch_dir.mkdir(exist_ok=True)
        (torch_dir / "version.py").write_text(f"__version__ = '{version}'")
        names = dict(compile_to=compile_to, torch_dir=lambda path=torch_dir: str(path))
        monkeypatch.setenv("CXX", "a compiler")
        with patch.dict(build.library.__globals__, names):
            build.library()
    assert len(set(built)) == len(built) == 2


BUGS = {}  # name: (check, words that it says, function)


def bug(check, words):
    def register(function):
        BUGS[function.__name__] = check, words, function
        return function
    return register


def cuda(*shape, **options):
    return torch.ones(*shape, device="cuda", **options)


def side_stream():
    """A stream that has waited for what there is."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    return stream


# ---------- on the wrong device -----------------------------------------------


@bug("used", "cuda:0")
def a_new_thread_uses_gpu_0(tmp, right):
    """Of every rank: each has its context there, and gigabytes are gone on GPU 0."""
    device = torch.device("cuda", torch.cuda.current_device() if right else None)
    thread = threading.Thread(target=lambda: torch.zeros(3, device=device))
    thread.start()
    thread.join()


@bug("wait", "Long pageable")
def a_batch_stays_on_the_host(tmp, right):
    """FSDP and DDP copy it then."""
    to_device = Batches.to_device if right else lambda self, *tensors: tensors
    with patch.object(Batches, "to_device", to_device):
        steps(built(tmp, device="cuda"))


@bug("error", "Expected all tensors to be on the same device")
def positions_are_made_on_the_host(tmp, right):
    table = torch.nn.Embedding(8, 3, device="cuda")
    table(torch.arange(8, device="cuda" if right else None))


@bug("error", "Expected all tensors to be on the same device")
def attentions_mask_is_on_the_host(tmp, right):
    q = cuda(1, 2, 4, 8)
    mask = torch.ones(4, 4, device="cuda" if right else "cpu").tril().bool()
    F.scaled_dot_product_attention(q, q, q, attn_mask=mask)


@bug("error", "Expected all tensors to be on the same device")
def an_offloaded_gradient_is_scaled_by_the_devices_norm(tmp, right):
    offloaded, scale = [torch.ones(3), torch.ones(2)], cuda(())
    torch._foreach_mul_(offloaded, scale.to("cpu") if right else scale)


@bug("error", "Expected a 'cuda' device type for generator")
def a_generator_of_the_host_draws_for_the_device(tmp, right):
    generator = torch.Generator("cuda" if right else "cpu")
    torch.randn(3, device="cuda", generator=generator)


@bug("error", "can't convert cuda")
def numpy_gets_a_tensor_of_the_device(tmp, right):
    x = cuda(3)
    (x.cpu() if right else x).numpy()


@bug("error", "out of memory")
def it_does_not_fit(tmp, right):
    simgpu.set_memory(0.001)
    try:
        torch.empty(1000 if right else 2**20, device="cuda")
    finally:
        simgpu.set_memory(80)


# ---------- what the host reads or writes too early ---------------------------


@bug("value", "nan")
def a_copy_to_the_host_is_read_before_it_is_there(tmp, right):
    x = cuda(3).to("cpu", non_blocking=True)
    if right:
        torch.cuda.synchronize()
    return x.tolist()


@bug("race", "the host has changed what is being copied")
def the_source_of_a_copy_is_changed_before_it_has_left(tmp, right):
    x = torch.ones(3, pin_memory=True)
    x.to("cuda", non_blocking=True)
    if right:
        torch.cuda.synchronize()
    x.zero_()
    torch.cuda.synchronize()


@bug("value", "nan")
def a_save_does_not_wait_for_the_rows_that_it_writes(tmp, right):
    """In the background, while the optimizer goes on."""
    run = built(tmp, device="cuda", strategy="full_shard", checkpoint="sharded", out_dir="x",
                eval_only=True)
    steps(run)
    to, written = torch.Tensor.to, {}

    def without_waiting(t, *args, copy=False, **options):
        return to(t, *args, **(dict(non_blocking=True) if copy else options))

    def keep(name, header, rows):
        written.update(rows)
        return 0.0, None

    saver = saves.Saver(
        tmp, None, run.cfg, run.world, None, False, run.batches, lambda *times: None)
    with (patch.object(torch.Tensor, "to", to if right else without_waiting),
          patch.object(saver, "write", keep),
          patch.object(saves, "require_finite_state")):
        saver.save(run.model, run.optimizer, LossScaler(run.cfg), 1)
        saver.finish()
    return float(next(iter(written.values())).to_local().sum())


# ---------- streams -----------------------------------------------------------


@bug("race", "add reads a tensor [3] Float on stream")
def a_stream_reads_what_another_has_not_written_yet(tmp, right):
    stream, x = side_stream(), cuda(3) + 1
    if right:
        stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        x + 1


@bug("race", "zero_ writes a tensor")
def a_stream_overwrites_what_another_still_reads(tmp, right):
    x = cuda(3)
    stream = side_stream()
    with torch.cuda.stream(stream):
        x + 1
    if right:
        torch.cuda.current_stream().wait_stream(stream)
    x.zero_()


@bug("race", "add reads a tensor")
def an_event_is_recorded_too_early(tmp, right):
    stream, event, x = torch.cuda.Stream(), torch.cuda.Event(), cuda(3)
    event.record()
    x.mul_(2)
    if right:
        event.record()
    stream.wait_event(event)
    with torch.cuda.stream(stream):
        x + 1


@bug("race", "freed and given away")
def memory_is_freed_while_another_stream_reads_it(tmp, right):
    x = cuda(1000)
    stream = side_stream()
    with torch.cuda.stream(stream):
        x + 1
    if right:
        x.record_stream(stream)
    del x
    torch.zeros(1000, device="cuda")


# ---------- what makes the host wait ------------------------------------------


@bug("wait", "_local_scalar_dense")
def a_step_asks_for_a_number(tmp, right):
    norm = cuda(3).norm()
    if not right:
        norm.item()


@bug("wait", "_local_scalar_dense")
def a_step_decides_by_a_tensor(tmp, right):
    x = cuda(3)
    if right:
        torch.where(x > 0, x, 0)
    elif (x > 0).all():
        pass


@bug("wait", "index")
def a_step_selects_by_a_mask(tmp, right):
    x = cuda(3)
    x.where(x > 0, 0) if right else x[x > 0]


@bug("wait", "pageable")
def a_batch_comes_from_pageable_memory(tmp, right):
    x = torch.ones(3)
    (x.pin_memory() if right else x).to("cuda", non_blocking=True)


@bug("wait", "pageable")
def activations_are_offloaded_to_pageable_memory(tmp, right):
    x = cuda(3, requires_grad=True)
    with torch.autograd.graph.save_on_cpu(pin_memory=right):
        y = x * x
    y.backward(cuda(3))


@bug("wait", "synchronize the device")
def a_step_synchronizes(tmp, right):
    torch.cuda.current_stream().wait_stream(torch.cuda.Stream())
    if not right:
        torch.cuda.synchronize()


# ---------- collectives -------------------------------------------------------


@functools.cache
def nccl():
    return dist.new_group(backend="nccl")


@bug("error", "No backend type associated with device type cpu")
def nccl_gets_a_tensor_of_the_host(tmp, right):
    dist.all_reduce(cuda(3) if right else torch.ones(3), group=nccl())


@bug("error", "must be contiguous")
def nccl_gets_a_tensor_that_is_not_contiguous(tmp, right):
    x = cuda(3, 2).T
    dist.all_reduce(x.contiguous() if right else x)


@bug("error", "NCCL: _allgather_base_ of tensors on ['cpu', 'cuda:")
def nccl_gathers_into_host_memory(tmp, right):
    whole = torch.empty(2 * 3, device="cuda" if right else "cpu")
    dist.all_gather_single(whole, cuda(3))


@bug("race", "allreduce_ writes it")
def a_result_is_read_before_the_collective_is_waited_for(tmp, right):
    x = cuda(3)
    work = dist.all_reduce(x, async_op=True)
    if right:
        work.wait()
    x + 1
    work.wait()


@bug("race", "zero_ writes a tensor")
def a_tensor_is_changed_while_it_is_sent(tmp, right):
    x, whole = cuda(3), cuda(6)
    work = dist.all_gather_single(whole, x, async_op=True)
    if right:
        work.wait()
    x.zero_()
    work.wait()


@bug("race", "where allreduce_ writes it")
def ddps_hook_divides_what_is_not_yet_reduced(tmp, right):
    def hook(state, bucket):
        buffer = bucket.buffer()
        future = dist.all_reduce(buffer, async_op=True).get_future()
        if right:
            return future.then(lambda f: f.value()[0].div_(2))
        buffer.div_(2)
        return future.then(lambda f: f.value()[0])

    run = built(tmp, device="cuda", strategy="ddp")
    run.wrapped.register_comm_hook(None, hook)
    steps(run)


@bug("error", "a communicator of cuda:")
def a_tensor_is_on_another_ranks_gpu(tmp, right):
    rank = dist.get_rank()
    dist.all_reduce(cuda(1))
    dist.all_reduce(torch.ones(1, device=f"cuda:{rank if right else 1 - rank}"))


@bug("error", "Duplicate GPU detected")
def two_ranks_take_the_same_gpu(tmp, right):
    gpu = dist.get_rank() if right else 0
    with patch.dict(os.environ, LOCAL_RANK=str(gpu)):  # by which torch 2.15 connects at once
        group = dist.new_group(backend="nccl")
    dist.all_reduce(torch.ones(1, device=f"cuda:{gpu}"), group=group)


# ---------- memory ------------------------------------------------------------


@bug("value", "too much")
def losses_are_added_up_with_their_graphs(tmp, right):
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.max_memory_allocated()
    weight, total = cuda(64, 64, requires_grad=True), 0
    for _ in range(8):
        loss = (weight @ weight).relu().sum()
        total = total + (loss.detach() if right else loss)
    peak = torch.cuda.max_memory_allocated() - before
    return "" if peak < 7 * weight.nbytes else f"too much: {peak}"


# ---------- CUDA graphs -------------------------------------------------------


def record(function, stream=None, graph=None):
    """(the recording, what the function returned)."""
    stream = stream or side_stream()
    graph = graph or torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):  # torch 2.13 stays on it if the recording fails
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            result = function()
    return graph, result


@bug("value", "nan")
def a_result_is_read_before_the_first_replay(tmp, right):
    graph, result = record(lambda: cuda(3).sum())
    if right:
        graph.replay()
    return result.item()


@bug("value", "3.0")
def a_number_of_the_host_is_recorded(tmp, right):
    x, scale = cuda(3), cuda(()) if right else 1.0
    graph, result = record(lambda: (x * scale).sum())
    scale *= 2
    graph.replay()
    return result.item()


@bug("value", "3.0")
def an_input_is_not_copied_into_place(tmp, right):
    x = cuda(3)
    graph, result = record(lambda: x.sum())
    batch = 2 * cuda(3)
    if right:
        x.copy_(batch)
    else:
        x = batch
    graph.replay()
    return result.item()


@bug("value", "None")
def gradients_are_dropped_between_replays(tmp, right):
    weight = cuda(3, requires_grad=True)
    weight.grad = torch.zeros_like(weight)
    graph, _ = record(lambda: weight.sum().backward())
    assert weight.grad.tolist() == [0, 0, 0]  # recording has added nothing
    if right:
        weight.grad.zero_()
    else:
        weight.grad = None
    graph.replay()
    return f"gradient: {weight.grad}"


def drops(x):
    """Recomputed in backward, so the generator goes back."""
    y = recompute(lambda x: F.dropout(F.dropout(x, 0.5) * x, 0.5), x, use_reentrant=False)
    y.sum().backward()


@bug("value", "another mask")
def the_seed_is_set_after_the_replay(tmp, right):
    x = cuda(64, requires_grad=True)
    x.grad = torch.zeros_like(x)
    graph, _ = record(lambda: drops(x))
    torch.manual_seed(1 if right else 2)
    graph.replay()
    torch.manual_seed(1)
    replayed, x.grad = x.grad, None
    drops(x)
    return "" if replayed.equal(x.grad) else "another mask"


@bug("error", "only if new seed is the same")
def a_recorded_function_sets_the_seed(tmp, right):
    def draw(seeds):
        if seeds:
            torch.manual_seed(1)
        return torch.rand(3, device="cuda")

    record(lambda: draw(seeds=not right))


NOT_PERMITTED = "CUDA error: operation not permitted when stream is capturing"


@bug("error", "CUDA error: operation failed due to a previous error during capture")
def a_wait_in_a_recording_is_caught(tmp, right):
    def ask(x):
        try:
            return x if right else x.item()
        except torch.AcceleratorError as e:
            assert str(e).startswith(NOT_PERMITTED)

    x = cuda(())
    record(lambda: ask(x))


def fails_in_a_recording(function, stream=None):
    """Raise what the function has raised. (A recording that went wrong raises an error of its own
    at its end.)"""
    try:
        record(function, stream)
    except RuntimeError as e:
        raise e.__context__ or e


@bug("error", NOT_PERMITTED)
def a_recording_decides_by_a_tensor(tmp, right):
    x = cuda(3)
    fails_in_a_recording(lambda: torch.where(x > 0, x, 0) if right else x[x > 0])


@bug("error", NOT_PERMITTED)
def a_recording_copies_from_pageable_memory(tmp, right):
    x = torch.ones(3, pin_memory=right)
    fails_in_a_recording(lambda: x.to("cuda", non_blocking=True))


@bug("error", NOT_PERMITTED)
def a_recording_synchronizes(tmp, right):
    event = torch.cuda.Event()
    event.record()
    if right:
        event.synchronize()
    fails_in_a_recording(lambda: right or event.synchronize())


@bug("error", "CUDA graphs must be captured on a non-default stream")
def a_recording_is_on_the_default_stream(tmp, right):
    record(lambda: cuda(3), side_stream() if right else torch.cuda.default_stream())


@bug("error", "dependency created on uncaptured work in another stream")
def a_recording_waits_for_an_earlier_event(tmp, right):
    """As FSDP2 does for a unit that was gathered before, and not waited for."""
    event = torch.cuda.Event()
    event.record()

    def wait():
        if right:
            event.record()
        torch.cuda.current_stream().wait_event(event)

    fails_in_a_recording(wait)


@bug("error", "CUDA error: invalid argument")
def an_event_of_a_recording_is_waited_for_later(tmp, right):
    event = torch.cuda.Event()
    record(lambda: event.record())
    if right:
        event.record()
    torch.cuda.current_stream().wait_event(event)


@bug("error", "Called CUDAGraph::replay without a preceding successful capture")
def a_failed_recording_is_replayed(tmp, right):
    graph, x = torch.cuda.CUDAGraph(), cuda(())
    try:
        record(lambda: right or x.item(), graph=graph)
    except torch.AcceleratorError:
        pass
    graph.replay()


@bug("error", "capturing stream has unjoined work")
def a_recording_leaves_a_stream_behind(tmp, right):
    def work():
        stream = side_stream()
        with torch.cuda.stream(stream):
            cuda(3)
        if right:
            torch.cuda.current_stream().wait_stream(stream)

    record(work)


@bug("error", "stale reference to the default stream")
def a_first_backward_was_on_the_default_stream(tmp, right):
    """There gradients are added up from then on, while somebody keeps that node, as DDP does.
    PyTorch says so by itself, as it asks whether a stream is recorded."""
    weight, stream = cuda(3, requires_grad=True), side_stream()
    with torch.cuda.stream(stream if right else torch.cuda.default_stream()):
        kept = weight.sum()
    fails_in_a_recording(lambda: (kept + weight.sum()).backward(), stream)


@bug("race", "add_ writes a tensor")
def a_replay_does_not_wait_for_its_input(tmp, right):
    x = cuda(3)
    graph, _ = record(lambda: x.add_(1))
    stream = side_stream()
    x.mul_(2)
    if right:
        stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph.replay()


@bug("error", "CUDA error: operation failed due to a previous error during capture")
def ddp_is_recorded_before_its_11_steps(tmp, right):
    """It takes the time of the first ten, for which the host waits."""
    stream = side_stream()
    with torch.cuda.stream(stream):
        run = built(tmp, device="cuda", strategy="ddp", gradient_accumulation_steps=2)
        x, y, _ = run.batches.get(0, 0)
        for _ in range(11 if right else 3):
            run.wrapped(x, y)[1].backward()
        torch.cuda.synchronize()
        record(lambda: run.wrapped(x, y)[1].backward(), stream)


@bug("value", "the first weights")
def fsdp2s_first_forward_is_recorded(tmp, right):
    """It pads the rows of a rank that has fewer: a copy, which each replay repeats."""
    with torch.cuda.stream(side_stream()):
        run = built(tmp, device="cuda", strategy="full_shard")
        x, y, _ = run.batches.get(0, 0)
        if right:
            run.wrapped(x, y)[1].backward()
        graph, _ = record(lambda: run.wrapped(x, y)[1].backward(), torch.cuda.current_stream())
        rows = [p.to_local().detach() for p in run.model.parameters()]
        torch._foreach_zero_(rows)
        graph.replay()
        return "the first weights" if any(t.any() for t in rows) else ""


# ---------- the test ----------------------------------------------------------


def case_bug(tmp, name, right, device):
    """What the checks say."""
    _, _, function = BUGS[name]
    torch.cuda.set_device(dist.get_rank())
    used = set(simgpu.devices_used())
    value = error = ""
    with simgpu.watch() as seen:
        try:
            value = str(function(tmp, right) or "")
        except Exception as e:
            error = f"{type(e).__name__}: {e}"
    said = dict(
        value=value, error=error, race=seen.races, wait=seen.waits,
        used=[f"cuda:{i}" for i in set(simgpu.devices_used()) - used])
    torch.cuda.synchronize()
    return {check: str(what) if what else "" for check, what in said.items()}


def case_kernels(device):
    """{what is run: [[kernel, tensors that it reads, tensors that it writes]]}."""
    ran = []

    def price(name, reads, writes):
        ran.append([name, len(reads), len(writes)])
        return 0.0

    library = torch.library.Library("simgpu", "IMPL")
    library.impl("price", price, "CUDA")
    x, y, out = cuda(8, 4), cuda(8, 4), cuda(8, 4)
    gate = cuda(8, 4, requires_grad=True)
    loss = F.silu(gate)
    does = {
        "x += y": lambda: x.add_(y),
        "x + y": lambda: x + y,
        "out=": lambda: torch.add(x, y, out=out),
        "copy": lambda: x.copy_(y),
        "foreach": lambda: torch._foreach_mul_([x, y], 2.0),
        "norms": lambda: torch._foreach_norm([x, y]),
        "layer_norm": lambda: F.layer_norm(x, (4,)),
        "chunk_cat": lambda: torch._chunk_cat([x, y], 0, 2, out=cuda(2, 16)),
        "silu's gradient": lambda: loss.backward(out),
    }
    kernels = {}
    for name, function in does.items():
        simgpu.device.simgpu_price(1)
        function()
        simgpu.device.simgpu_price(0)
        kernels[name] = [kernel for kernel in ran if kernel[0] != "fill_"]
        ran.clear()
    return kernels


def case_facts(device):
    """What does not depend on a bug: who has seen how much, and whose memory it is."""
    torch.cuda.set_device(dist.get_rank())
    with simgpu.watch() as outer:
        with simgpu.watch() as inner:
            pass
        cuda(1).item()
    mine = cuda(2**20)
    free, total = torch.cuda.mem_get_info()
    allocated = torch.cuda.memory_allocated()
    other = torch.cuda.memory_allocated(1 - dist.get_rank())
    return dict(
        outer=len(outer.waits), inner=len(inner.waits), taken=total - free - allocated,
        allocated=allocated >= mine.nbytes, other=other)


def case_kept(device):
    """Bytes that a recording keeps, and that are left when it is gone; does anybody get them?"""
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    before = simgpu.device.simgpu_kept(rank)
    allocated = torch.cuda.memory_allocated()
    graph, tensors = record(lambda: [cuda(1000) for _ in range(4)])
    places = {t.data_ptr() for t in tensors}
    tensors.clear()
    given = {t.data_ptr() for t in [cuda(1000) for _ in range(8)]}
    kept = simgpu.device.simgpu_kept(rank) - before
    del graph
    return dict(
        kept=kept, left=simgpu.device.simgpu_kept(rank) - before, given=len(places & given),
        allocated=torch.cuda.memory_allocated() - allocated)


def train_steps(run, numbers, recordings=None):
    """[[loss, norm]] of these steps, each of two micro-batches, as train.train_step does them.
    recordings: each micro-batch is recorded once and replayed, {its number: (graph, loss, input)}.
    """
    def forward_backward(x, y):
        loss = run.wrapped(x, y)[1] / 2
        loss.backward()
        return loss.detach()

    seen = []
    for number in numbers:
        total = torch.zeros((), device="cuda")
        for micro in range(2):
            fsdp.set_grad_sync(run.wrapped, is_last_micro_batch=micro == 1)
            batch = run.batches.get(number, micro)[:2]
            if recordings is not None and micro not in recordings:
                own = [t.clone() for t in batch]
                recordings[micro] = *record(
                    functools.partial(forward_backward, *own), torch.cuda.current_stream()), own
            torch.manual_seed(10 * number + 2 * micro + dist.get_rank())
            if recordings is None:
                total += forward_backward(*batch)
                continue
            graph, loss, own = recordings[micro]
            torch._foreach_copy_(own, batch)
            graph.replay()
            total += loss
        norm = fsdp.clip_grad_norm(run.wrapped, run.cfg.grad_clip)
        run.optimizer.step()
        run.optimizer.zero_grad(set_to_none=False)
        seen.append([total, norm])
    return seen


def case_recorded(tmp, warm_up, **keys):
    """Steps as they are and recorded, with an evaluation among them: their numbers and weights, and
    what a replay shows the host."""
    torch.cuda.set_device(dist.get_rank())
    runs = []
    with torch.cuda.stream(side_stream()):
        for recordings in (None, {}):
            run = built(tmp, gradient_accumulation_steps=4, n_embd=48, **keys)
            numbers = train_steps(run, range(warm_up))
            with simgpu.watch() as first:
                numbers += train_steps(run, [warm_up], recordings)
            with fsdp.inference(run.wrapped):
                x, y, _ = run.batches.read(0, 0)
                numbers.append([run.wrapped(x, y)[1]])
            with simgpu.watch() as seen:
                numbers += train_steps(run, range(warm_up + 1, warm_up + 4), recordings)
            weights = [getattr(p, "_local_tensor", p) for p in run.model.parameters()]
            runs.append(dict(
                numbers=[[n.item() for n in some] for some in numbers],
                weights=[w.detach().double().sum().item() for w in weights],
                races=list(map(str, first.races + seen.races)),
                waits=list(map(str, seen.waits)),
                collectives=[event.what for event in seen.collectives]))
    return runs


WAYS = {
    "full_shard": dict(
        strategy="full_shard", dropout=0.1, activation_checkpointing="full", warm_up=3),
    "ddp": dict(strategy="ddp", dtype="bfloat16", warm_up=11),
}


@pytest.fixture(scope="module")
def said(tmp):
    cases = {f"{name} {right}": (case_bug, dict(tmp=tmp, name=name, right=right, device="cuda"))
             for name in BUGS for right in (True, False)}
    cases["kernels"] = case_kernels, dict(device="cuda")
    cases["facts"] = case_facts, dict(device="cuda")
    cases["kept"] = case_kept, dict(device="cuda")
    for way, keys in WAYS.items():
        cases[way] = case_recorded, dict(tmp=tmp, device="cuda", **keys)
    return on_ranks(2, cases)


def test_simgpu_one_watch_may_end_inside_of_another(said):
    for rank in values(said, "facts"):
        assert (rank["outer"], rank["inner"]) == (1, 0)


def test_simgpu_memory_is_counted_for_each_gpu(said):
    for rank in values(said, "facts"):
        assert rank["allocated"] and rank["taken"] == 0 and rank["other"] == 0


def test_simgpu_runs_one_kernel_where_a_gpu_does(said):
    """In a CPU build of PyTorch too, which composes these of several. What is changed in place is
    read and written."""
    kernels, _ = values(said, "kernels")
    assert kernels == {
        "x += y": [["add_", 2, 1]],
        "x + y": [["add", 2, 1]],
        "out=": [["add", 2, 1]],
        "copy": [["copy_", 1, 1]],
        "foreach": [["_foreach_mul_", 2, 2]],
        "norms": [["_foreach_norm", 2, 2]],
        "layer_norm": [["native_layer_norm", 1, 3]],
        "chunk_cat": [["_chunk_cat", 2, 1]],
        "silu's gradient": [["silu_backward", 2, 1]],
    }


def test_simgpu_a_recording_keeps_its_memory_as_long_as_it_lives(said):
    for rank in values(said, "kept"):
        assert rank == dict(kept=4 * 4096, left=0, given=0, allocated=0)


@pytest.mark.parametrize("way", WAYS)
def test_simgpu_a_recorded_step_is_the_ordinary_one(said, way):
    """To the last bit, with dropout and recomputation, autocast, FSDP2's and DDP's streams."""
    for ordinary, recorded in values(said, way):
        assert len(ordinary["collectives"]) > 3
        assert recorded == ordinary
        assert recorded["races"] == recorded["waits"] == []


@pytest.mark.parametrize("name", BUGS)
def test_simgpu_sees(said, name):
    check, words, _ = BUGS[name]
    # Of rank 1: on rank 0 GPU 0 is right.
    _, right = values(said, f"{name} True")
    assert right["race"] == right["error"] == "" and words not in right[check]
    _, wrong = values(said, f"{name} False")
    assert words in wrong[check], wrong

"""
The recorded step: the ordinary step's numbers, no wait of the host, and what cannot be recorded.

    python -m pytest -q extras/tests/test_recorded.py    # on GPUs, or on those of simgpu

A simulated GPU records and replays each operation, on the memory that it had.
"""

import functools
import itertools
import os
from unittest.mock import patch

import numpy as np
import pytest
import torch
from harness import on_ranks, refused, values
from test_cuda import case_training
from training import built, make_data, read_metrics, steps, tiny

import train
from configurator import resolve
from extras.recorded import Recorded
from optimizer import LossScaler
from ranks import World

SHARD = dict(strategy="full_shard")
ZERO2 = dict(strategy="shard_grad_op")
MODES = {  # name: (ranks, keys), with three micro-batches on each rank
    # Micro-batches whose targets count differently: the weight is another in each.
    "masks": (1, dict(strategy="single", masks=True)),
    "float16": (1, dict(strategy="single", dtype="float16", n_embd=48)),
    "full": (2, dict(SHARD, activation_checkpointing="full", dropout=0.1, masks=True)),
    "bfloat16": (2, dict(SHARD, dtype="bfloat16", n_embd=48)),
    "selective last": (2, dict(SHARD, activation_checkpointing="selective", grad_sync="last")),
    "shard_grad_op": (2, ZERO2),
    "shard_grad_op last": (2, dict(ZERO2, grad_sync="last")),
    "compiled": (2, dict(SHARD, compile=True)),
    "ddp": (2, dict(strategy="ddp", warm_up=11, ends=[15])),
    "hybrid_shard": (4, dict(strategy="hybrid_shard", shard_group_size=2)),
}
ROUNDED = ("ddp", "hybrid_shard")  # a sum over ranks in another order: to 1e-6


def case_run(tmp, name, warm_up=2, ends=(6, 12), masks=False, **keys):
    """The numbers of a run with evaluations and saves that resumes after the first of its ends."""
    data = f"{tmp}/recorded-masks" if masks else f"{tmp}/toy"
    run = dict(tmp=tmp, name=name, dataset=data, eval_interval=4, init_from="auto", **keys)
    with patch.object(Recorded.__init__, "__defaults__", (1, None, warm_up)):
        for end in ends:
            rows = case_training(**run, max_iters=end)
    evaluated = read_metrics(os.path.join(tmp, name))
    return [*map(list, rows), [row["val_loss"] for row in evaluated if "val_loss" in row]]


@pytest.fixture(scope="module")
def found(tmp):
    """found(ranks): {"mode True", if it was recorded: what case_run returned}"""
    make_data(f"{tmp}/recorded-masks")
    for split in ("train", "val"):
        place = np.arange(os.path.getsize(f"{tmp}/recorded-masks/{split}.bin") // 2)
        (place // 16 % 3 * place % 5 < 2).tofile(f"{tmp}/recorded-masks/{split}.mask")

    @functools.cache
    def get(world):
        cases = {}
        for name, (n, keys) in MODES.items():
            own = dict(keys, tmp=tmp, device="cuda", gradient_accumulation_steps=3 * n)
            for cuda_graph in (False, True) if n == world else ():
                title = f"{name} {cuda_graph}"
                cases[title] = case_run, dict(own, name=title, cuda_graph=cuda_graph)
        return on_ranks(world, cases)
    return get


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=pytest.mark.slow) if world > 1 else name
    for name, (world, _) in MODES.items()])
def test_cuda_recorded_run_is_the_ordinary_one(found, name):
    """To the last bit, also where it evaluates, saves and resumes."""
    results = found(MODES[name][0])
    ours, theirs = (values(results, f"{name} {cuda_graph}")[0] for cuda_graph in (True, False))
    assert len(ours) == 1 + (15 if name == "ddp" else 12)
    limit = 1e-6 if name in ROUNDED else 0
    for numbers, expected in zip(ours, theirs, strict=True):
        assert numbers == pytest.approx(expected, rel=limit, abs=0)


def case_waits(tmp, device, **keys):
    """What the host waits for in the last of some recorded steps, none of which is logged."""
    run = built(tmp, device=device, cuda_graph=True, gradient_accumulation_steps=3, **keys)
    run.work.warm_up = 2
    scaler = LossScaler(run.cfg)
    kept = []
    for step in range(6):
        if step == 5:
            torch.cuda.set_sync_debug_mode("error")
        train.train_step(
            run.model, run.wrapped, run.optimizer, scaler, run.batches, step, run.cfg, run.world,
            run.work)
        kept.append([p.grad.data_ptr() for p in run.model.parameters()])
    torch.cuda.set_sync_debug_mode("default")
    # One recording for the first micro-batch, one for the last and one between; and a replay
    # writes where gradients were while it was recorded.
    assert len(run.work.recordings) == 3 and kept[1] == kept[-1]
    _, inputs, result, *_ = next(iter(run.work.recordings.values()))
    tensors = [t for t in (*inputs, result) if isinstance(t, torch.Tensor)]
    return [t.device.type for t in tensors]


def case_decides(tmp, device, **keys):
    """The error with which a run ends whose model leaves out some work before its head in every
    other call, as a layer that Python's random drops."""
    run = built(tmp, device=device, cuda_graph=True, gradient_accumulation_steps=1, **keys)
    run.work.warm_up = 2
    factor = itertools.cycle((1, 2))
    run.model.transformer.ln_f.register_forward_hook(lambda _, args, output: next(factor) * output)
    with pytest.raises(RuntimeError) as e:
        steps(run, n=6)
    return str(e.value)


def test_cuda_recorded_step_waits_for_nothing_and_decides_nothing_on_the_host(tmp):
    on_gpu = dict(tmp=tmp, device="cuda")
    cases = {"waits": (case_waits, dict(on_gpu, strategy="single"))}
    for strategy in ("single", "full_shard"):
        cases[strategy] = case_decides, dict(on_gpu, strategy=strategy)
    results = on_ranks(1, cases)
    assert values(results, "waits") == [4 * ["cuda"]]
    for strategy in ("single", "full_shard"):
        [line] = values(results, strategy)
        assert "decides something on the host" in line


class Program:
    """One of somebody's own. Its step is a method."""

    def __init__(self):
        torch.manual_seed(0)
        layers = [torch.nn.Linear(8, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 8)]
        self.net = torch.nn.Sequential(*layers).cuda()
        self.net[0].requires_grad_(False)
        self.arguments = [torch.randn(4, 8).cuda(), 0.5]

    def step(self, x, factor):
        loss = factor * self.net(x).square().sum()
        loss.backward()
        return loss.detach()


CHANGES = {  # name: what happens before step 6, which is recorded since step 3
    "a batch of 1": lambda run: run.arguments.__setitem__(0, torch.randn(1, 8).cuda()),
    "another type": lambda run: run.arguments.__setitem__(0, torch.randn(4, 8).cuda().double()),
    "another number": lambda run: run.arguments.__setitem__(1, 2.0),
    "eval() of a part": lambda run: run.net[1].eval(),
    "unfrozen": lambda run: run.net[0].requires_grad_(True),
    # The old ones are gone: without care new ones would get their ids.
    "other gradients": lambda run: [
        run.net.zero_grad(),
        *(setattr(p, "grad", torch.zeros_like(p)) for p in run.net[2].parameters())],
}


def case_changed(device):
    """{change: what step 6 says}, and without one the losses of 12 steps, recorded and not."""
    torch.cuda.set_stream(torch.cuda.Stream())
    found = {}
    for change in ("not recorded", "nothing", *CHANGES):
        run = Program()
        work = run.step if change == "not recorded" else Recorded(run.net, run.step, warm_up=3)
        losses = []
        for step in range(12):
            torch.manual_seed(step)
            if step == 6 and change in CHANGES:
                CHANGES[change](run)
                with pytest.raises(RuntimeError) as e:
                    work(*run.arguments)
                found[change] = str(e.value)
                break
            losses.append(work(*run.arguments).item())
            with torch.no_grad():
                for p in run.net[2].parameters():
                    p -= 0.01 * p.grad
                    p.grad.zero_()
        else:
            found[change] = losses
    return found


def test_cuda_recording_that_no_longer_fits_the_call_is_not_replayed():
    [found] = values(on_ranks(1, {"changed": (case_changed, dict(device="cuda"))}), "changed")
    assert found.pop("nothing") == found.pop("not recorded")
    assert set(found) == set(CHANGES)
    assert all("no longer fits" in line for line in found.values()), found


@pytest.mark.parametrize("keys", [
    dict(cpu_offload=0.5), dict(activation_offload=True, activation_checkpointing="full")])
def test_recorded_what_waits_for_the_host_is_refused(tmp, keys):
    world = World(device=torch.device("cuda"))
    line = refused(resolve, tiny(tmp, cuda_graph=True, **SHARD, **keys), world, True)
    assert "--cuda_graph=False" in line

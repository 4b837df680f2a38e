"""
compare.py: right runs are the same, and of a wrong one it names what differs first. (check_units is
in test_checks.py.)

    python -m pytest -q tests/test_compare.py
"""

import functools
import io
import math
import os
import re
from contextlib import redirect_stdout

import numpy as np
import pytest
import torch
import torch.distributed as dist
from harness import HERE, on_ranks, script, values
from loop import train
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor
from training import WAYS, run_training, steps_alone

import compare

# ---------- runs of train.py that are right: no false alarm -------------------

ZERO3 = dict(strategy="full_shard")
ALIKE = {"float16": (2, dict(ZERO3, dtype="float16", loss_scale=512.0))}  # name: (ranks, keys)
if os.path.isdir(os.path.join(HERE, "extras")):
    RECORDED = dict(device="cuda", cuda_graph=True, max_iters=14)
    ALIKE |= {
        "muon": (3, dict(ZERO3, optimizer="muon")),
        "muon in groups": (4, dict(WAYS["hybrid_shard"][1], optimizer="muon")),
        "lora": (3, dict(ZERO3, model="gpt2+lora")),
        "recorded": (2, dict(ZERO3, **RECORDED)),
        "recorded ddp": (2, dict(strategy="ddp", **RECORDED)),
    }
OF_THE_RUN = "model base dtype optimizer max_iters".split()  # the others are ways to run it


def said_by(**run):
    """What a run of train.py says of its steps."""
    with redirect_stdout(io.StringIO()) as out:
        run_training(**run)
    return re.findall(r".*to compare:.*|.*compared:.*|.*the same as.*", out.getvalue())


@pytest.mark.parametrize("name", ALIKE)
def test_alike(tmp, name):
    """test_fsdp.py compares the other strategies and options in this way."""
    world, keys = ALIKE[name]
    if name == "lora":
        steps_alone(tmp)
        keys = dict(keys, base=os.path.join(tmp, "alone {}"))
    path = steps_alone(tmp, **{key: keys[key] for key in OF_THE_RUN if key in keys})
    run = dict(keys, tmp=tmp, name=name, compare=path)
    said, *_ = values(on_ranks(world, {name: (said_by, run)}), name)
    assert len(said) == 1 and said[0].startswith(f"{keys.get('max_iters', 5)} steps are the same")


def test_two_ranks_and_three_that_resume(tmp):
    path = os.path.join(tmp, "two ranks.json")
    first = dict(tmp=tmp, compare=path, **ZERO3)
    halves = {kind: dict(first, name=f"half {kind}", checkpoint=kind, eval_interval=3)
              for kind in ("full", "sharded")}
    on_two = {kind: (said_by, dict(half, max_iters=3)) for kind, half in halves.items()}
    results = on_ranks(2, {"whole": (said_by, dict(first, name="whole")), **on_two})
    assert "run again to compare" in values(results, "whole")[0][0]
    on_three = {kind: (said_by, dict(half, init_from="resume")) for kind, half in halves.items()}
    for kind, said in on_ranks(3, on_three).items():
        assert values(results, kind)[0][0].startswith("3 steps are the same")
        assert said[0]["value"][0].startswith("2 steps are the same")


# ---------- a user's program, with one mistake at a time ----------------------

MISTAKES = {  # what the message names
    "": "^6 steps are the same",
    "optimizer before shard": "weight scale is unmoved.*state steps are only in the other",
    "codebook by own batch": "buffer blocks.0.book differs between ranks",
    "appends to a list": "loss is 0.*gradient emb.weight is off",
    "mark on a weight": "output 0 is off",
    "tied by data": "step 1 .*weight emb.weight is off",
    "a sum": "loss is 0.5000 times.*all .* gradients are 0.5000 times .*: a sum where",
    "a variance": "output 0 is|loss is .*gradient emb.weight is off",
    "padding": "loss is",
    "part of a gradient": "0 differs .*gradient emb.weight is off by \\S+$",
    "own norms": "state exp_avg head.weight is off",
    "rate by own loss": "group 0 lr differs between ranks",
    "saved before the first step": "only in this run",
    "clamped after a plain forward": "weight emb.weight is off",
    "unit left out of an evaluation": "output 2 is off",
    "inner model under ddp": "gradient scale differs between ranks",
    "scheduler made anew": "group 0 lr is 0.0015 instead of 0.0006",
    "resumed with gradients": "state exp_avgs are only in the other run",
    # rows of your_model.md that went
    "seed by rank": "step 0 .*weight emb.weight is off",
    "drawn after shard": "weight head.weight is off",
    "moved in forward": "weight slow is",
    "data replaced": "output 0 is off",
    "batch norm": "buffer blocks.0.norm.running_mean differs between ranks",
    "counted in a checkpointed block": "3 .*buffers are 2.0000 times|book is 2.0000 times",
    "weights listed in __init__": "gradient head.weight is zero",
    "a hook on a weight": "gradient head.weight is off",
    "one batch for all ranks": "step 0 .*output 0 is off",
    "chosen before shard": "step 0 .*group 0 numel is .*group 1 numel is 0 instead of 110",
    "rate times ranks": "group 0 lr is 0.006 instead of 0.003",
}


def case_loop(path, mistake):
    try:
        if mistake in ("scheduler made anew", "resumed with gradients"):
            train(path, mistake, last=3)
            return train(path, mistake, first=3)
        return train(path, mistake)
    except ValueError as e:
        return str(e)


@functools.cache
def said_of_loops(tmp):
    cases = {}
    for i, mistake in enumerate(MISTAKES):
        path = os.path.join(tmp, f"loop{i}.json")
        train(path, mistake)
        cases[mistake] = case_loop, dict(path=path, mistake=mistake)
    return on_ranks(2, cases)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_it_names_the_mistake(tmp, mistake):
    for said in values(said_of_loops(tmp), mistake):  # on both ranks
        assert re.search(MISTAKES[mistake], said.replace("\n", " ")), said


# ---------- what else it says -------------------------------------------------


def test_the_numbers_of_a_tensor_are_the_sums_of_its_parts():
    """The formula, an element at a time."""
    t = torch.randn(5, 3, 2, dtype=torch.complex128)
    expected = [t.abs().square().sum().item()]
    numbers = torch.view_as_real(t).flatten().tolist()
    for wave in (0.7, 1.9, 2.9):
        expected.append(sum(x * math.cos(wave * i + 1) for i, x in enumerate(numbers)))
    found = compare.fingerprint(t[:3]) + compare.fingerprint(t[3:], first_row=3)
    assert found.tolist() == pytest.approx(expected, rel=1e-12)


def case_tensor_parallel(path):
    model = nn.Linear(8, 8)
    mesh = dist.init_device_mesh("cpu", (2,))
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(1)]))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(ValueError, match="weight is not cut by rows alone"):
        compare.Compare(path, model).step(0, optimizer, 0.0)


def test_tensor_parallelism_is_refused(tmp):
    values(on_ranks(2, {"": (case_tensor_parallel, dict(path=f"{tmp}/parallel.json"))}), "")


def amplifying(path, first):
    """Each step makes what rounding has changed four times as large."""
    model = nn.Linear(1, 1, bias=False)
    model.weight.data.fill_(first)
    compared = compare.Compare(path, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for step in range(9):
        kept = model.weight.detach()
        model.weight.grad = kept - torch.frac(4 * kept)
        compared.step(step, optimizer, 1.0)
        optimizer.step()


def test_rounding_that_grows_is_said(tmp):
    path = f"{tmp}/amplified.json"
    amplifying(path, 0.1234567)
    with pytest.raises(ValueError, match="were off by .*\n  this grew step by step, as round"):
        amplifying(path, 0.1234567 + 3e-8)


def one_weight(path, gradients, lr=1e-9, is_compiled=False, first=1.0, **options):
    """Steps of a weight of 1, which hardly moves, beside bytes, which are larger."""
    model = nn.Linear(1, 1, bias=False)
    model.weight.data.fill_(first)
    model.codes = nn.Parameter(torch.full((9999,), 200, dtype=torch.uint8), requires_grad=False)
    model = torch.compile(model, backend="eager") if is_compiled else model  # other names
    optimizer = torch.optim.SGD([dict(params=[model.weight], initial_lr=lr)], lr=lr)
    compared = compare.Compare(path, model, **options)
    for step, gradient in gradients.items():
        model.weight.grad = torch.full((1, 1), gradient)
        compared.step(step, optimizer, 1.0)


def test_gradients_that_jump_alone_are_said(tmp):
    one_weight(f"{tmp}/kink.json", {0: 1.0, 1: 1.0})
    with pytest.raises(ValueError, match="1.0002 times .*\n.*\n  only gradients: rounding"):
        one_weight(f"{tmp}/kink.json", {0: 1.0, 1: 1.0002}, is_compiled=True)


def test_bytes_do_not_outweigh_weights(tmp):
    one_weight(f"{tmp}/bytes.json", {0: 1.0})
    with pytest.raises(ValueError, match="weight weight is 1.0100 times"):
        one_weight(f"{tmp}/bytes.json", {0: 1.0}, first=1.01)


def test_rates_are_the_same_whatever_the_tolerance(tmp):
    one_weight(f"{tmp}/rates.json", {0: 1.0})
    with pytest.raises(ValueError, match="lr is 1.04e-09 instead of 1e-09\n  group 0 .*lr is 1"):
        one_weight(f"{tmp}/rates.json", {0: 1.04}, lr=np.float64(1.04e-9), tolerance=0.05)


def case_file_of_one_rank(path):
    """Only rank 0 has it, first empty. A step's number that comes again is refused."""
    if dist.get_rank() == 0:
        open(path, "w").close()
    else:
        path += " of another node"
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    compared = compare.Compare(path, model)
    compared.step(5, optimizer, 0.0)
    with pytest.raises(ValueError, match="step 5 came twice"):
        compared.step(5, optimizer, 0.0)
    dist.barrier()  # rank 0 has written it
    again = compare.Compare(path, model)
    again.step(5, optimizer, 0.0)
    assert again.worst == 0


def test_what_ranks_read_is_rank_0s(tmp):
    seen = {"": (case_file_of_one_rank, dict(path=f"{tmp}/of one.json"))}
    values(on_ranks(2, seen), "")


def test_two_files(tmp):
    paths = [f"{tmp}/{name}.json" for name in ("one", "same", "sum", "none")]
    train(paths[0], "rate times ranks")  # of one
    train(paths[1], "rate times ranks")
    train(paths[2], "scheduler made anew", last=4)
    same, differs, missing = (script("compare.py", path, paths[0]) for path in paths[1:])
    assert same.stdout == f"6 steps are the same as in {paths[0]}, to 0e+00\n"
    assert differs.returncode == missing.returncode == 1
    line = f"step 1 differs from {paths[0]}:\n  group 0 lr is 0.0015 instead of"
    assert differs.stderr.startswith(line)
    assert "No such file" in missing.stderr and missing.stderr.count("\n") == 1

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

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import HERE, on_ranks, script, values
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from training import WAYS, run_training, steps_alone

import activations
import compare
import fsdp

# ---------- runs of train.py that are right: no false alarm -------------------

ZERO3 = dict(strategy="full_shard")
ALIKE = {"float16": (2, dict(ZERO3, dtype="float16"))}  # name: (ranks, keys)
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
    "rate times ranks": "group 0 lr is 0.006 instead of 0.003",
}


class Block(nn.Module):
    def __init__(self, mistake):
        super().__init__()
        self.mistake = mistake
        self.norm = nn.BatchNorm1d(5) if mistake == "batch norm" else nn.LayerNorm(10)
        self.up = nn.Linear(10, 20)
        self.down = nn.Linear(20, 10)
        self.register_buffer("book", torch.zeros(10))

    def forward(self, x, aux):
        if self.mistake == "counted in a checkpointed block":
            self.book += 1
        h = self.down(F.gelu(self.up(self.norm(x))))
        if self.mistake == "codebook by own batch":
            self.book.lerp_(h.detach().mean((0, 1)), 0.1)
        if self.mistake == "appends to a list":
            aux.append(h.square().mean())
        return x + h * getattr(self.down.weight, "mark", 1.0)


class Words(nn.Module):
    """With buffers of all kinds, and a parameter of one row."""

    def __init__(self, mistake):
        super().__init__()
        self.mistake = mistake
        self.emb = nn.Embedding(11, 10)
        self.blocks = nn.ModuleList(Block(mistake) for _ in range(3))
        self.head = nn.Linear(10, 11, bias=False)
        self.scale = nn.Parameter(torch.ones(1))
        self.shift = nn.Parameter(torch.zeros(1))  # softmax does not see it: its gradient is noise
        self.slow = nn.Parameter(torch.ones(11), requires_grad=False)
        self.weights = [self.head.weight]
        self.depth = 3
        self.register_buffer("mask", torch.full((5, 5), -torch.inf).triu(1))
        self.register_buffer("turns", torch.polar(torch.ones(4), torch.arange(4.0)))
        if not mistake:  # DDP and DCP take no sparse ones
            self.register_buffer("graph", torch.eye(3).to_sparse())
        if mistake == "tied by data":
            self.head.weight.data = self.emb.weight.data
        if mistake == "mark on a weight":
            self.blocks[0].down.weight.mark = 3.0

    def stack(self, x, aux):
        for block in self.blocks[:self.depth]:
            x = block(x, aux)
        return x

    def forward(self, tokens):
        x = self.emb(tokens) * self.scale
        aux = []
        if self.mistake or not dist.is_initialized():
            x = self.stack(x, aux)
        else:
            x = checkpoint(self.stack, x, aux, use_reentrant=False)  # calls the units' hooks twice
        if self.mistake == "moved in forward":
            with torch.no_grad():
                self.slow.lerp_(self.head.weight.sum(1), 0.1)
        listed = self.mistake == "weights listed in __init__"
        head = self.weights[0] if listed else self.head.weight
        logits = F.linear(x, head) * (1 + sum(aux))
        return logits + self.slow + self.shift


def program(path, mistake="", first=0, last=6):
    """Twelve samples a step on any number of ranks. Returns what compare.py says of it."""
    is_sharded = dist.is_initialized()
    rank, size = (dist.get_rank(), dist.get_world_size()) if is_sharded else (0, 1)
    torch.manual_seed(rank if mistake == "seed by rank" else 0)
    model = call = Words(mistake)
    if mistake == "optimizer before shard":
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if mistake == "counted in a checkpointed block" and is_sharded:
        activations.checkpoint_activations(model.blocks, "full")
    if is_sharded and "ddp" in mistake:
        call = fsdp.replicate(model)
    elif is_sharded:
        ahead = 1 if "evaluation" in mistake else 0
        fsdp.shard(model, model.blocks, fsdp.make_mesh("cpu"), prefetch_units=ahead)
    if mistake == "drawn after shard":
        nn.init.normal_(model.head.weight)
    if mistake == "a hook on a weight":
        model.head.weight.register_hook(torch.zeros_like)
    if mistake != "optimizer before shard":
        rate = 3e-3 * size if mistake == "rate times ranks" else 3e-3
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    anew = mistake == "scheduler made anew"
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + anew * n))
    if first and mistake == "resumed with gradients":
        call(torch.zeros(2, 5, dtype=torch.long)).sum().backward()
    if first or (is_sharded and mistake == "saved before the first step"):
        weights, state = get_state_dict(model, optimizer)
    if first:
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=f"{path}-saved")
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
        optimizer.zero_grad()
    own_losses = [math.inf]
    compared = compare.Compare(path, model, dict(model.blocks.named_children()))
    for step in range(first, last):
        tokens = torch.randint(11, (12, 6), generator=torch.Generator().manual_seed(step))
        mine = tokens[:12 // size] if mistake == "one batch for all ranks" else tokens[rank::size]
        x, y = mine[:, :-1], mine[:, 1:]
        if mistake == "padding":
            y = y.where(torch.arange(5) <= y[:, :1] % 5, -100)
        fsdp.set_grad_sync(call, is_last_micro_batch=True)
        logits = (model if mistake == "inner model under ddp" else call)(x)
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
        if mistake == "a sum":
            loss = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum") / 60
        if mistake == "a variance":
            loss = loss + 3 * logits.mean((1, 2)).var()
        loss.backward()
        if mistake == "part of a gradient":
            model.emb.weight.grad[:7].zero_()
        compared.step(step, optimizer, loss)
        if mistake == "own norms":
            for p in model.head.parameters():
                p.grad.mul_(1 / getattr(p.grad, "_local_tensor", p.grad).norm())
        if mistake == "rate by own loss" and loss.item() > own_losses[-1]:
            optimizer.param_groups[0]["lr"] *= 0.5
        own_losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        if anew:
            scheduler.step()
        if last == 3 and step == 2:
            weights, state = get_state_dict(model, optimizer)
            dcp.save({"model": weights, "optimizer": state}, checkpoint_id=f"{path}-saved")
        with torch.no_grad():
            if mistake == "clamped after a plain forward":
                call(x)
                model.emb.weight.clamp_(-0.2, 0.2)
            if mistake == "data replaced":
                model.blocks[0].up.weight.data = model.blocks[0].up.weight.detach() * 0.5
            if not mistake or mistake == "unit left out of an evaluation":
                model.depth = 2 if mistake else 3
                for p in model.parameters():
                    p.mul_(2)  # other weights, as an average is
                with fsdp.inference(model):
                    call(x)
                for p in model.parameters():
                    p.mul_(0.5)
                model.depth = 3
    return str(compared)


def case_program(path, mistake):
    try:
        if mistake in ("scheduler made anew", "resumed with gradients"):
            program(path, mistake, last=3)
            return program(path, mistake, first=3)
        return program(path, mistake)
    except ValueError as e:
        return str(e)


@functools.cache
def said_of_programs(tmp):
    cases = {}
    for i, mistake in enumerate(MISTAKES):
        path = os.path.join(tmp, f"program{i}.json")
        program(path, mistake)
        cases[mistake] = case_program, dict(path=path, mistake=mistake)
    return on_ranks(2, cases)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_it_names_the_mistake(tmp, mistake):
    for said in values(said_of_programs(tmp), mistake):  # on both ranks
        assert re.search(MISTAKES[mistake], said.replace("\n", " ")), said


# ---------- what else it says -------------------------------------------------


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


def test_two_files(tmp):
    paths = [f"{tmp}/{name}.json" for name in ("one", "same", "sum", "none")]
    program(paths[0], "rate times ranks")  # of one
    program(paths[1], "rate times ranks")
    program(paths[2], "scheduler made anew", last=4)
    same, differs, missing = (script("compare.py", path, paths[0]) for path in paths[1:])
    assert same.stdout == f"6 steps are the same as in {paths[0]}, to 0e+00\n"
    assert differs.returncode == missing.returncode == 1
    assert f"step 1 differs from {paths[0]}:\n  group 0 lr is 0.0015 instead of" in differs.stderr
    assert "No such file" in missing.stderr

"""
docs/fork.md's code, as it stands on the page.

    python -m pytest -q tests/upstream/test_fork.py
"""

import os
import re
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from commands import read
from harness import (
    assert_same_weights,
    built,
    copied,
    initialized,
    on_ranks,
    plain_gpt,
    python,
    read_ckpt,
    refused,
    run_training,
    shell,
    tiny,
    two_each,
    values,
)
from torch import nn
from torch.distributed.tensor import DTensor

import fsdp
import start
import train
from model import GPT, normal


def shown(name):
    """The page's Python block that has this name in it."""
    blocks = re.findall(r"^```python\n(.*?)^```", read("docs/fork.md"), re.M | re.S)
    [block] = [block for block in blocks if name in block]
    return block


@pytest.mark.slow
def test_fork_the_diff_adds_an_optimizer(tmp_path):
    """docs/fork.md has it, and the test to run: both, in a copy of the project."""
    page = read("docs/fork.md")
    copy = copied(tmp_path / "copy")
    diff = re.search(r"^```diff\n(.*?)^```", page, re.M | re.S)[1]
    (copy / "nadam.diff").write_text(diff)
    p = shell("git", "apply", "nadam.diff", cwd=copy)
    assert p.returncode == 0, p.stderr
    command = re.search(r"^python (-m pytest .*)", page, re.M)[1].split()
    p = python(*command, cwd=copy, env={"PYTHONPATH": str(copy)})
    assert p.returncode == 0 and "1 passed" in p.stdout, p.stdout


class Averaging(torch.optim.AdamW):
    def step(self, closure=None):
        super().step(closure)
        for p in (p for group in self.param_groups for p in group["params"]):
            state = self.state[p]
            mean = state.setdefault("average", torch.zeros_like(p))
            mean.lerp_(p.detach(), 0.5)


def test_fork_a_checkpoint_of_the_average(tmp, monkeypatch):
    """It has the averages as its weights, and another run begins with them."""
    with patch.object(train, "make_optimizer", lambda model, cfg: Averaging(model.parameters())):
        run_training(tmp, "out", max_iters=2)
    monkeypatch.chdir(tmp)
    exec(shown("average"), dict(torch=torch, os=os))
    weights = read_ckpt("out-average")["model"]
    trained = read_ckpt("out")
    for i, name in enumerate(trained["param_names"]):
        mean = trained["optimizer"]["state"][i]["average"]
        assert weights[name].equal(mean) and not weights[name].equal(trained["model"][name])
    run_training(tmp, "next", init_from="out-average", max_iters=1, learning_rate=0.0, min_lr=0.0)
    assert_same_weights(read_ckpt("next")["model"], weights, 0)


def case_noise(tmp, strategy):
    """What the page's lines add to all parameters, one after the other."""
    run = built(tmp, **two_each(2), strategy=strategy)

    def whole():
        tensors = [p.detach() for p in run.model.parameters()]
        tensors = [t.full_tensor() if isinstance(t, DTensor) else t for t in tensors]
        return torch.cat([t.flatten() for t in tensors])

    before = whole()
    exec(shown("noise"), dict(
        fsdp=fsdp, normal=normal, torch=torch, wrapped=run.wrapped, cfg=run.cfg, step=3))
    return (whole() - before).tolist()


def test_fork_random_numbers_are_those_of_one_process(tmp):
    cases = {name: (case_noise, dict(tmp=tmp, strategy=name)) for name in ("ddp", "full_shard")}
    alone = case_noise(tmp, "single")
    assert torch.tensor(alone).std() == pytest.approx(0.01, rel=0.05)
    found = on_ranks(2, cases)
    for name in cases:
        for of_rank in values(found, name):
            assert of_rank == pytest.approx(alone, abs=1e-6), name


def test_fork_adapter_begins_as_its_base_and_trains_only_scales():
    plain = plain_gpt()
    with torch.device("meta"):
        model = GPT(plain.config)
    names = tuple(name for name, _ in model.named_parameters())
    room = dict(torch=torch, nn=nn)
    exec(shown("def adapt"), room)
    room["adapt"](model)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    linear = [m for m in plain.blocks.modules() if isinstance(m, nn.Linear)]
    assert model.base_names == names and len(trained) == len(linear)
    assert trained.isdisjoint(names) and all(name.endswith(".scale") for name in trained)
    fsdp.allocate(model, torch.device("cpu"))
    initialized(model, 1337)
    x = torch.arange(8)[None]
    y = torch.ones_like(x)
    ours, plain_loss = model(x, y)[1], plain(x, y)[1]
    assert ours == plain_loss
    ours.backward()
    assert all((p.grad is not None) == p.requires_grad for p in model.parameters())


def test_fork_an_adapter_is_refused_with_the_default_of_its_key(tmp):
    """Where a run without it was; the key here stands for one of a fork's, which may be a bool."""
    cfg = tiny(tmp, activation_offload=True)
    plain = SimpleNamespace(base=None, path="out/ckpt.pt")
    said = refused(start.with_base, plain, True, cfg, "activation_offload")
    assert "out/ckpt.pt has activation_offload=False; pass --activation_offload=False" in said

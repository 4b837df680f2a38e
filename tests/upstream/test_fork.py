"""
docs/fork.md's code, as it stands on the page.

    python -m pytest -q tests/upstream/test_fork.py
"""

import os
import re

import pytest
import test_contract as contract
import torch
from harness import HERE, copied, python, torchrun
from training import arguments, built, read_metrics, run_training, tiny

import metrics
import train
from ranks import World

with open(os.path.join(HERE, "docs", "fork.md")) as f:
    PAGE = f.read()


def shown(name):
    """The page's Python block that has this name in it."""
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
    [block] = [block for block in blocks if name in block]
    return block


FILES = {"rotary": "RotaryAttention", "nadam": "NAdam"}  # name: what is in it


@pytest.fixture(scope="module")
def walked(tmp_path_factory):
    """A copy of the project with the files of the page's walk, and its changes of the core."""
    copy = copied(tmp_path_factory.mktemp("walk") / "copy")
    for name, word in FILES.items():
        (copy / f"{name}.py").write_text(shown(word))
    code = {path: (copy / path).read_text() for path in ("train.py", "configurator.py")}
    for diff in re.findall(r"^```diff\n(.*?)^```", PAGE, re.M | re.S):
        before = re.sub(r"^(\+.*\n|[ -])", "", diff, flags=re.M)
        [path] = [path for path in code if code[path].count(before) == 1]
        code[path] = code[path].replace(before, re.sub(r"^(-.*\n|[ +])", "", diff, flags=re.M))
        (copy / path).write_text(code[path])
    return copy


def test_fork_the_walks_model_keeps_the_contract(tmp, models):
    (models / "rotary.py").write_text(shown(FILES["rotary"]))
    contract.assert_kept(tmp, "rotary")
    learned = run_training(tmp, "gpt2", max_iters=1)[0]["loss"]
    turned = run_training(tmp, "rotary", model="rotary", max_iters=1)[0]["loss"]
    assert turned != learned  # positions matter
    assert metrics.flops_per_token(train.meta_model(tiny(tmp, model="rotary")), World()) > 0


@pytest.mark.slow
@pytest.mark.parametrize("end, some, passed", [
    ("model=rotary --ranks", "causality or full_shard", 4),
    ("optimizer=nadam --ranks", "causality or full_shard", 4),
    ("test_metrics.py", "column", 1)])
def test_fork_the_walks_own_tests_pass(walked, end, some, passed):
    """Some of them."""
    commands = re.findall(r"^python -m (pytest .*)", PAGE, re.M)
    [command] = [line for line in commands if line.endswith(end)]
    env = {"PYTHONPATH": str(walked)}
    p = python("-m", *command.split(), "-k", some, cwd=walked, env=env, timeout=300)
    assert p.returncode == 0 and f"{passed} passed" in p.stdout, p.stdout


def walked_run(tmp, walked, **keys):
    """The rows of metrics.jsonl of a run of the changed copy on two ranks."""
    out = f"{tmp}/walk-{keys['strategy']}"
    keys = dict(gradient_accumulation_steps=4, max_iters=3, eval_interval=3, **keys)
    p = torchrun(2, "train.py", *arguments(tmp, out, **keys), cwd=walked,
                 env={"PYTHONPATH": str(walked)})
    assert p.returncode == 0, p.stdout + p.stderr
    return read_metrics(out)


@pytest.mark.slow
def test_fork_the_changed_steps_norms_of_blocks_are_plain_pytorchs(tmp, walked):
    run = built(tmp, gradient_accumulation_steps=4)
    for micro in range(4):
        x, y, _ = run.batches.get(0, micro)
        (run.model(x, y)[1] / 4).backward()
    norms = [torch.nn.utils.get_total_norm([p.grad for p in block.parameters()]).item()
             for block in run.model.blocks]
    for strategy in ("ddp", "full_shard"):
        rows = walked_run(tmp, walked, strategy=strategy)
        first = next(row for row in rows if "loss" in row)
        assert [first[f"norm_{i}"] for i in range(3)] == pytest.approx(norms, rel=1e-5)


@pytest.mark.slow
def test_fork_the_changed_step_leaves_out_what_jumps(tmp, walked):
    """Here all steps, or none."""
    for limit in (1e-6, 1e6):
        rows = walked_run(tmp, walked, strategy="full_shard", skip_above=limit)
        first, last = [row["val_loss"] for row in rows if "val_loss" in row]
        assert (first == last) == (limit < 1)

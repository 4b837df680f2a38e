"""
That test_contract.py has nothing to say of good files: the smallest of docs/model_file.md,
hybrid.py, masked.py; and what it says of copies of masked.py with a mistake.

    python -m pytest -q tests/test_contract_examples.py
"""

import os
import re
import shutil

import pytest
import test_contract as contract
import torch
from harness import HERE, built, on_ranks, plain_gpt, refused, run_training, started, values

import sample
import train
from configurator import load_config, resolve
from ranks import World


def test_contract_holds_for_the_smallest_file(tmp, models):
    """docs/model_file.md has it; it lacks all that is optional."""
    with open(os.path.join(HERE, "docs", "model_file.md")) as f:
        code = re.search(r"^```python\n(.*?)^```", f.read(), re.M | re.S)[1]
    (models / "smallest.py").write_text(code)
    contract.test_contract_of_the_file(tmp, "smallest")
    said = refused(train.train, contract.small(tmp, "smallest", loss_chunks=2))
    assert said.startswith("loss_chunks: model=smallest has no head_loss")


@pytest.mark.slow
def test_contract_holds_for_a_hybrid(tmp, models):
    """In all modes at two ranks; at 3 and 4 too if you pass --model=hybrid from its own copy."""
    shutil.copy(os.path.join(HERE, "tests", "hybrid.py"), models)
    contract.test_contract_of_the_file(tmp, "hybrid")
    for name, (world, _) in contract.MODES.items():
        if world == 2:
            contract.test_contract_modes(tmp, "hybrid", name)


def test_weights_of_ones_own_module_become_a_checkpoint(tmp, models, monkeypatch):
    """By the lines in docs/migration.md."""
    with open(os.path.join(HERE, "docs", "migration.md")) as f:
        code = re.search(r"^```python\n(.*?)^```", f.read(), re.M | re.S)[1]
    monkeypatch.chdir(models)
    shutil.copy(os.path.join(HERE, "model.py"), "mine.py")
    sizes = dict(re.findall(r"(\w+)=(\d+)", re.search(r"ModelConfig\((.*)\)", code)[1]))
    theirs = plain_gpt(bias=False, **{key: int(n) for key, n in sizes.items()})
    torch.save(theirs.state_dict(), "pytorch_model.bin")
    exec(compile(code, "docs/migration.md", "exec"), {})

    flags = ("--init_from=out-mine", f"--dataset={tmp}/toy", "--device=cpu", "--compile=False")
    cfg, source, resumed = started(resolve(load_config(flags), World()), World())
    assert cfg.model == "mine" and not resumed
    ours, _ = train.build(train.meta_model(cfg), cfg, World(), source)
    assert all(map(torch.equal, ours.parameters(), theirs.parameters()))


LAST_TOKEN = ("idx, targets)", "idx, targets=None)", "        counts =",
              "        if targets is None: return logits[:, [-1]], None\n        counts =")
SILENT = ("    causal = False\n", "")
ANY_T = ("self.positions.weight ", "self.positions.weight[:idx.size(1)] ")
MASKED = {  # name: (what it says, then what masked.py has, what its copy has instead, ...)
    "length": (r"any T up to block_size;.* causal = False .*\(5\)", *SILENT),
    "no_sampling": (r"forward\(idx\) fails.* causal = False", *SILENT, *ANY_T),
    "noise": ("no random numbers in eval mode.* causal = False", *SILENT, *ANY_T, *LAST_TOKEN),
    "both_sides": ("depend on no later token.* causal = False", *SILENT, *ANY_T, *LAST_TOKEN,
                   "self.config.hidden\n", "self.config.hidden * self.training\n"),
    "rows": ("mixes the rows of a batch", "x = block(x)", "x = block(x + x.mean(0))"),
    "every_row": ("no row whose targets are all -1", "hidden & counts", "hidden"),
    "python": ("from torch in eval mode too", "import torch\n", "import random\nimport torch\n",
               "torch.rand(idx.shape, device=idx.device) <",
               "(torch.rand(idx.shape) if self.training else random.random() + 0 * idx) <"),
    "bf16": ("forward fails in bf16", "self.norm(x))  #", "self.norm(x).float())  #"),
}


def test_contract_holds_for_a_masked_model(tmp, models):
    """It sees both sides, and draws random numbers in an evaluation: its attribute says so. The
    rest is asked of it too."""
    path = shutil.copy(os.path.join(HERE, "tests", "masked.py"), models)
    contract.test_contract_of_the_file(tmp, "masked")
    with open(path) as f:
        masked = f.read()
    for name, (sentence, *changes) in MASKED.items():
        code = masked
        for before, after in zip(changes[::2], changes[1::2]):
            assert before in code
            code = code.replace(before, after)
        (models / f"masked_{name}.py").write_text(code)
        with pytest.raises(pytest.fail.Exception, match=sentence):
            contract.test_contract_of_the_file(tmp, f"masked_{name}")


def case_evaluations(tmp, **keys):
    run = built(tmp, model="masked", eval_iters=5, **keys)
    losses = []
    for step in range(2):
        torch.manual_seed(step)
        losses.append(train.evaluate(run.wrapped, run.batches, run.cfg, run.world))
    return losses


def test_contract_random_numbers_of_an_evaluation_are_the_same_each_time(tmp, models):
    """On any number of ranks, of which the last has fewer windows."""
    shutil.copy(os.path.join(HERE, "tests", "masked.py"), models)
    first, second = case_evaluations(tmp)
    assert first == second
    for said in values(on_ranks(2, {"": (case_evaluations, dict(tmp=tmp))}), ""):
        for losses in said:
            assert losses == pytest.approx(first, rel=1e-6)


def test_contract_a_model_that_is_not_causal_trains_and_is_not_sampled_from(tmp, models):
    shutil.copy(os.path.join(HERE, "tests", "masked.py"), models)
    assert len(run_training(tmp, "masked-run", model="masked", max_iters=1)) == 1
    line = refused(sample.main, [f"--out_dir={tmp}/masked-run", "--device=cpu", "--dtype=float32"])
    assert "model=masked" in line and "causal = False" in line

"""
What test_contract.py says of files with a mistake, and that it has nothing to say of good ones.

    python -m pytest -q tests/test_contract_examples.py
"""

import os
import re
import shutil

import pytest
import test_contract as contract
import torch
from harness import HERE, on_ranks, refused, values
from training import built, plain_gpt, read_metrics, run_training, started

import sample
import train
from configurator import load_config, resolve
from ranks import World


def python_of(*path):
    """The text of a file; of a page its first block of Python."""
    with open(os.path.join(HERE, *path)) as f:
        text = f.read()
    return re.search(r"^```python\n(.*?)^```", text, re.M | re.S)[1] if ".md" in path[-1] else text


def changed(code, *changes):
    """The code with the second text instead of the first, the fourth instead of the third, ..."""
    for before, after in zip(changes[::2], changes[1::2]):
        assert before in code
        code = code.replace(before, after)
    return code


# What the smallest file has, where the others differ.
STEP = "x = x + torch.tanh(block(x))"
LOSS = "cross_entropy(logits, targets)"
EMBEDDING = "        self.embedding = nn.Embedding(config.vocab_size, C)\n"
HEAD = "        self.head = "
BLOCK = """class Block(nn.Linear):
    def forward(self, x, *, scale):
        return (1 + scale) * nn.functional.dropout(super().forward(x), 0.1, self.training)


@dataclass"""

# Instead of its forward: some tokens are hidden, and predicted from the mean of all. So it is not
# causal, and draws random numbers in an evaluation too.
MASKED = """    causal = False

    def forward(self, idx, targets):
        assert idx.size(1) == self.config.block_size  # always
        hidden = torch.rand(idx.shape, device=idx.device) < 0.3
        x = self.embedding(idx.where(~hidden, 0))  # (B, T, C)
        for block in self.blocks:
            x = x + torch.tanh(block(x)).mean(dim=1, keepdim=True)
        logits = self.head(x)  # (B, T, V)
        counts = targets != -1
        total = cross_entropy(logits, idx.where(hidden & counts, -1), reduction="sum")
        # Not by the number of hidden ones: that may be 0, and is another on each rank.
        return logits.detach(), total / (0.3 * counts.sum())
"""

FILES = {"smallest": python_of("docs", "model_file.md"), "gpt": python_of("model.py")}
FILES["masked"] = re.sub(r"    def forward.*(?=\n    def )", MASKED, FILES["smallest"], flags=re.S)
# Its blocks have dropout and take a keyword; after each comes a module that never trains.
FILES["unlike"] = changed(
    FILES["smallest"], "@dataclass", BLOCK, "nn.Linear(C, C) for", "Block(C, C) for",
    HEAD, f"        self.shared = Block(C, C).requires_grad_(False)\n{HEAD}",
    STEP, "x = x + self.shared(torch.tanh(block(x, scale=x)), scale=x)")


@pytest.mark.parametrize("name", ["smallest", "masked", "unlike"])
def test_contract_holds_for_good_files(tmp, models, name):
    (models / f"{name}.py").write_text(FILES[name])
    contract.assert_kept(tmp, name)


def test_a_loss_of_several_terms_is_logged_term_by_term(tmp, models):
    """Of a model that in training predicts more than the next token. The terms add up."""
    terms = f"torch.stack([{LOSS}, {LOSS} / 4]) if self.training else {LOSS}"
    for name, loss in (("terms", terms), ("one", f"{LOSS} * (1.25 if self.training else 1)")):
        text = FILES["smallest"].replace(LOSS, loss)
        (models / f"{name}.py").write_text(f"{text}\n\nModel.loss_terms = ('next', 'other')\n")
    contract.assert_kept(tmp, "terms")
    rows = {}
    for name in ("terms", "one"):
        out = os.path.join(tmp, name)
        train.train(contract.small(tmp, name, out_dir=out, strategy="single", max_iters=2))
        rows[name] = [row for row in read_metrics(out) if "loss" in row]
    assert len(rows["terms"]) == 2
    for row, one in zip(rows["terms"], rows["one"]):
        assert row["loss"] == pytest.approx(1.25 * row["next"]) == pytest.approx(5 * row["other"])
        assert row["grad_norm"] == pytest.approx(one["grad_norm"])


GRU = """class Block(nn.GRUCell):
    def forward(self, x):
        return super().forward(x.flatten(0, 1)).view_as(x)


@dataclass"""

MISTAKES = {  # name: (file, its check or build, what that says, what the file has, the copy, ...)
    "a key of every run": (
        "smallest", "keys", "rename", "    width", "    seed: int = 1\n    width"),
    "drawn by the process": (
        "smallest", "parameters", "embedding.weight.*from seed and name",
        "normal(shape, 0.02, key=(seed, name))", "torch.randn(shape)"),
    "all alike": ("smallest", "parameters", "blocks.1.weight begins as", "seed, name)", "seed, 1)"),
    "a parameter that changes": (
        "smallest", "state", "'head.weight'", STEP, f"{STEP}; self.head.weight.data.mul_(0.99999)"),
    "a number that grows": (
        "smallest", "state", "keep no state", STEP,
        f"{STEP} * (n := getattr(self, 'n', 1)); self.n = n + 1"),
    "left out at random": (
        "smallest", "order", "call each block once", STEP, f"if torch.rand(()) < 0.5: {STEP}"),
    "registered late": (
        "smallest", "order", "register modules", EMBEDDING, "", HEAD, EMBEDDING + HEAD),
    "a sum": ("smallest", "loss", "must be the mean", LOSS, LOSS.replace("s)", "s, 'sum')")),
    "a large term": ("smallest", "loss", "in training", LOSS, f"{LOSS} * (1 + 2 * self.training)"),
    "a later token": ("smallest", "causality", "a later", "block(x)", "block(x).mean(1, True)"),
    "another row": ("smallest", "causality", "mixes the rows", "block(x)", "block(x + x.mean(0))"),
    "an expert without tokens": (
        "smallest", "gradients", "blocks.0.weight has no gradient", STEP,
        f"if block is not self.blocks[0] or (idx < 40).any(): {STEP}"),
    "the wrong device": (
        "smallest", "any_device", "device=idx.device", STEP,
        f"{STEP}; x = x + torch.arange(idx.size(1))[:, None]"),
    "a cache from 0 on": ("gpt", "generation", "with a cache", "else cache[0].length", "else 0"),
    "a tensor on meta": (
        "smallest", "single", "device meta", HEAD, f"        self.t = torch.ones(C)\n{HEAD}",
        STEP, f"{STEP} * self.t"),
    "another unit's weight": (
        "smallest", "full_shard", "mixed torch.Tensor and DTensor",
        "logits = self.head(x)", "logits = self.head(x) + x @ self.embedding.weight.T"),
    "products changed in place": (
        "smallest", "selective", "is off by", "@dataclass", GRU,
        "nn.Linear(C, C) for", "Block(C, C) for"),
    "another head_loss": (
        "gpt", "loss_chunks", "Expected", "(targets != -1).sum()", "targets.numel()"),
    "a loss in bf16": (
        "smallest", "bfloat16", r"logits.float\(\)", LOSS,
        "nn.functional.cross_entropy(logits.mT, targets, ignore_index=-1).float()"),
    "noise": ("masked", "state", "unless self.training", "    causal = False\n", ""),
    "rows without targets": (
        "masked", "causality", "rows whose targets are all -1", "hidden & counts", "hidden"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_contract_names_the_mistake(tmp, models, name):
    file, check, said, *changes = MISTAKES[name]
    (models / "mistaken.py").write_text(changed(FILES[file], *changes))
    with pytest.raises(Exception, match=said):
        if check in contract.BUILDS:
            contract.test_contract_of_each_build(tmp, "mistaken", check)
        else:
            getattr(contract, check)(contract.small(tmp, "mistaken"))


# ---------- what else such files do -------------------------------------------


def test_weights_of_ones_own_module_become_a_checkpoint(tmp, models, monkeypatch):
    """By the lines in docs/migration.md."""
    code = python_of("docs", "migration.md")
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


def case_evaluations(tmp, **keys):
    run = built(tmp, model="masked", eval_iters=5, **keys)
    losses = []
    for step in range(2):
        torch.manual_seed(step)
        losses.append(train.evaluate(run.wrapped, run.batches, run.cfg, run.world))
    return losses


def test_contract_random_numbers_of_an_evaluation_are_the_same_each_time(tmp, models):
    """On any number of ranks, of which the last has fewer windows."""
    (models / "masked.py").write_text(FILES["masked"])
    first, second = case_evaluations(tmp)
    assert first == second
    for said in values(on_ranks(2, {"": (case_evaluations, dict(tmp=tmp))}), ""):
        for losses in said:
            assert losses == pytest.approx(first, rel=1e-6)


def test_contract_a_model_that_is_not_causal_trains_and_is_not_sampled_from(tmp, models):
    (models / "masked.py").write_text(FILES["masked"])
    assert len(run_training(tmp, "masked-run", model="masked", max_iters=1)) == 1
    line = refused(sample.main, [f"--out_dir={tmp}/masked-run", "--device=cpu", "--dtype=float32"])
    assert "model=masked" in line and "causal = False" in line

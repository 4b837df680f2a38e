"""
minimal.py, docs/own_model.py and every config work. And the house stands as README draws it: which
file may import which. What train.py takes on a machine with few GPUs is in test_ranks.py.

    python -m pytest -q tests/test_readme.py
    python -m pytest -q tests/test_readme.py -k house
"""

import ast
import functools
import math
import os
import re
from glob import glob

import pytest
import torch
from commands import read
from harness import (
    HERE,
    SHORT,
    SIMGPU,
    flags,
    launch,
    python,
    script,
    simulates,
)

from configurator import load_config
from model import GPT, GPTConfig

CONFIGS = sorted(glob("*.py", root_dir=os.path.join(HERE, "config")))


# -----------------------------------------------------------------------------
# minimal.py


def test_minimal_without_torchrun_is_one_line():
    p = script("minimal.py")
    assert p.returncode == 1 and p.stderr.count("\n") == 1 and "torchrun" in p.stderr


def test_minimal_on_ranks_that_cannot_share_its_samples_is_one_line():
    p = script("minimal.py", WORLD_SIZE="5")
    assert p.returncode == 1 and p.stderr.count("\n") == 1 and "12 samples" in p.stderr


def launched(n, gpus, cwd, program, *args):
    """A program under torchrun, on a machine with so many GPUs."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={n}"]
    env = dict(CUDA_VISIBLE_DEVICES=",".join(map(str, range(gpus))))
    if 0 < torch.cuda.device_count() < gpus:
        pytest.skip(f"it is about a machine with {gpus} GPUs")
    if gpus and simulates(gpus):
        launcher += ["-m", "simgpu"]
        env = dict(SIM_GPUS=str(gpus), PYTHONPATH=os.pathsep.join([SIMGPU, HERE]))
    p = python(*launcher, program, *args, cwd=cwd, env=env)
    assert p.returncode == 0, p.stderr
    return p


@pytest.mark.parametrize("n, gpus", [
    (3, 0), (2, 1), pytest.param(2, 2, marks=pytest.mark.slow)])
def test_minimal_trains_as_one_process(tmp_path, n, gpus):
    """It prints what plain PyTorch computes, and its checkpoint has those weights. On a machine
    with fewer GPUs than ranks it takes the CPU. (README's command, a slow test, runs all steps.)"""
    whole = read("minimal.py")
    assert "range(101)" in whole
    (tmp_path / "short.py").write_text(whole.replace("range(101)", "range(21)"))
    p = launched(n, gpus, tmp_path, "short.py")
    assert "Warning" not in p.stderr, p.stderr
    device = "cuda" if gpus >= n else "cpu"
    model = GPT(GPTConfig(block_size=64, vocab_size=256, n_layer=4, n_head=4, n_embd=128))
    rows = sum(math.ceil(len(q) / n) * q[0].numel() for q in model.parameters())
    block = sum(q.numel() for q in model.blocks[1].parameters())
    root = (256 + 64 + 1) * 128  # tokens, positions, the last norm
    total = sum(q.numel() for q in model.parameters())
    assert f"512 rows, and rank 0 of {n} keeps {math.ceil(512 / n)} of them" in p.stdout
    assert f"keeps {rows:,} of {total:,} parameters, on {device}" in p.stdout
    assert f"{block + root:,} whole" in p.stdout

    losses, expected = plain_minimal()
    printed = [float(text) for text in re.findall(r"loss (\S+)", p.stdout)]
    assert printed == pytest.approx(losses[::20], abs=6e-4)  # it prints three digits
    saved = torch.load(tmp_path / "out-minimal.pt")
    assert saved.keys() == expected.keys()
    for name, t in saved.items():
        assert (t - expected[name]).norm() < 1e-2 * expected[name].norm(), name


@functools.cache
def plain_minimal():
    """minimal.py's first 21 steps in plain PyTorch: (losses, weights)."""
    model = GPT(GPTConfig(block_size=64, vocab_size=256, n_layer=4, n_head=4, n_embd=128))
    for name, q in model.named_parameters():
        q.data.copy_(model.initial_value(name, q.shape, 1337)[:])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    text = torch.tensor(list(open(torch.__file__, "rb").read()))
    losses = []
    for step in range(21):
        torch.manual_seed(step)
        samples = [text[i:i + 65] for i in torch.randint(len(text) - 64, (12,))]
        samples = torch.stack(samples)
        loss = model(samples[:, :-1], samples[:, 1:])[1]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.state_dict()


# -----------------------------------------------------------------------------
# docs/own_model.py

OWN = os.path.join(HERE, "docs", "own_model.py")


def plain_own(steps):
    """Its model in plain PyTorch, on whole batches: (losses, share of new images right, model)."""
    code = ast.parse(read("docs/own_model.py"))
    own = {"__name__": "own", "rank": 0, "size": 1, "device": "cpu"}
    kept = [node for node in code.body if isinstance(node, (ast.ImportFrom, ast.ClassDef))
            or getattr(node, "name", "") == "images_of" or ast.unparse(node) == "import torch"]
    exec(compile(ast.Module(kept, []), OWN, "exec"), own)
    torch.manual_seed(0)
    model = own["Model"]()
    optimizer = torch.optim.AdamW([
        dict(params=[p for p in model.parameters() if p.dim() == 1], weight_decay=0),
        dict(params=[p for p in model.parameters() if p.dim() > 1], weight_decay=0.1)], lr=1e-4)
    losses = []
    for step in range(steps):
        x, y = own["images_of"](step)
        loss = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    x, y = own["images_of"](-2)
    return losses, (model(x).argmax(dim=1) == y).float().mean().item(), model


def own_run(n, cwd, *args, gpus=0):
    """What it printed: ({step: loss}, percentage of new images right)."""
    p = launched(n, gpus, cwd, OWN, *args)
    assert "Warning" not in p.stderr, p.stderr
    assert p.stdout.count("are right") == 1  # one rank speaks
    losses = re.findall(r"step (\d+): loss ([\d.]+)", p.stdout)
    losses = {int(step): float(loss) for step, loss in losses}
    return losses, int(re.search(r"(\d+)% of new images", p.stdout)[1])


def test_own_model_trains_as_plain_pytorch(tmp_path):
    """On two ranks, then on three from their checkpoint, with whole weights in the end. And by
    itself without sharding."""
    expected, right, model = plain_own(60)
    losses, _ = own_run(2, tmp_path, "--save=saved")
    more, found = own_run(3, tmp_path, "--resume=saved/step-40", "--steps=60", "--save=saved")
    losses.update(more)
    assert losses == {step: pytest.approx(expected[step - 1], abs=1.5e-4)  # it prints four digits
                      for step in range(10, 61, 10)}
    assert found == pytest.approx(100 * right, abs=1.1)
    saved = torch.load(tmp_path / "saved" / "weights.pt")
    for name, p in model.state_dict().items():
        assert (saved.pop(name) - p).norm() < 1e-2 * p.norm(), name
    assert not saved
    plain, found = own_run(2, tmp_path, "--plain", "--steps=30")
    assert plain == {step: losses[step] for step in (10, 20, 30)}


@pytest.mark.parametrize("args, env, said", [
    (["--resume=none"], {}, "--resume=none: no checkpoint there"),
    ([], dict(RANK="0", WORLD_SIZE="5"), "5 processes cannot share 96 images")])
def test_own_model_mistakes_are_one_line(args, env, said):
    p = script("docs/own_model.py", *args, **env)
    assert p.returncode == 1 and p.stderr.count("\n") == 1 and said in p.stderr


@pytest.mark.slow
@pytest.mark.parametrize("n, gpus, options, tolerance", [
    (1, 0, [], 1.5e-4), (2, 2, [], 1.5e-4), (2, 0, ["--bf16"], 5e-3), (1, 0, ["--bf16"], 5e-3),
    (2, 0, ["--plain", "--bf16"], 5e-3)])
def test_own_model_in_other_modes(tmp_path, n, gpus, options, tolerance):
    expected, _, model = plain_own(20)
    losses, _ = own_run(n, tmp_path, "--steps=20", *options, gpus=gpus)
    assert losses == {step: pytest.approx(expected[step - 1], abs=tolerance) for step in (10, 20)}
    exact = own_run(n, tmp_path, "--steps=20")[0] if options else losses
    assert (losses == exact) == (not options)  # the option does something


# -----------------------------------------------------------------------------
# config/; test_data.py asks every data/*/prepare.py for its help


@pytest.mark.parametrize("name", CONFIGS)
def test_readme_every_config_runs_two_steps(tmp, name):
    run_two_steps(tmp, os.path.join(HERE, "config", name))


def run_two_steps(tmp, path, **keys):
    """A config of any size in seconds, on one rank or two."""
    cfg = load_config([path])
    small = dict(
        model=cfg.model, gradient_accumulation_steps=2, wandb_log=False, init_from="scratch",
        dataset=os.path.join(tmp, "toy"), out_dir=os.path.join(tmp, os.path.basename(path)))
    if cfg.strategy == "hybrid_shard":
        small["shard_group_size"] = 2
    world = 1 if cfg.strategy in ("", "single") else 2
    launch(world, [path, *SHORT, *flags(**{**small, **keys})])


# -----------------------------------------------------------------------------
# the house: a room is a file, or the folder data/


def modules(*patterns):
    """{name of a module: path} of the product; tests and data/*/prepare.py are none."""
    found = {}
    for pattern in patterns:
        for path in glob(pattern, root_dir=HERE):
            if path not in ("test_fsdp.py", "conftest.py"):
                name = path.removesuffix(".py").removesuffix("/__init__").replace(os.sep, ".")
                found[name] = path
    return found


CORE = modules("*.py", "data/*.py")


def room_of(module):
    return "data" if module.startswith("data.") else module


def imports_of(path, known):
    """The rooms that a file's import statements name, those inside functions too. known: names of
    modules."""
    names = set()
    for node in ast.walk(ast.parse(read(path))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return {room_of(name) for name in names & known.keys()}


GROUND = {
    "model", "fsdp", "recorded", "activations", "checks", "optimizer", "ranks", "configurator",
    "data"}


def test_house_the_ground_floor_knows_only_torch():
    for module, path in CORE.items():
        if room_of(module) in GROUND:
            assert imports_of(path, CORE) <= {room_of(module)}, path

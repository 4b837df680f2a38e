"""
What is printed in README.md and docs/ works: links, commands, configs. And the house stands as
it is drawn there: which file may import which, and that extras/ can go.

    python -m pytest -q tests/test_readme.py
    python -m pytest -q tests/test_readme.py -k house
"""

import ast
import graphlib
import importlib
import math
import os
import re
import shlex
import shutil
import sys
from glob import glob

import pytest
import torch
from harness import HERE, Ranks, flags, launch, of_ours, python, shell, simulates

from configurator import STRATEGIES, load_config
from model import GPT, GPTConfig

CONFIGS = sorted(glob("*.py", root_dir=os.path.join(HERE, "config")))
PAGES = [os.path.join(HERE, "README.md"), *sorted(glob(os.path.join(HERE, "docs", "*.md")))]


def read(path):
    with open(os.path.join(HERE, path), encoding="utf-8") as f:
        return f.read()


# -----------------------------------------------------------------------------
# README.md and docs/


def anchors(page):
    """What GitHub makes of the headings of a page."""
    text = re.sub(r"^```.*?^```", "", read(page), flags=re.M | re.S)  # a comment is no heading
    titles = re.findall(r"^#+ (.*)", text, re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=os.path.basename)
def test_readme_links_point_to_what_exists(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", read(page)):
        path, _, anchor = link.partition("#")
        if re.match(r"\w+:", link):  # https:, mailto:
            continue
        target = os.path.join(os.path.dirname(page), path) if path else page
        assert os.path.exists(target), link
        assert not anchor or anchor in anchors(target), link


def test_readme_ruff_passes():
    pytest.importorskip("ruff")
    p = python("-m", "ruff", "check", HERE)
    assert p.returncode == 0, p.stdout


def sh_commands(page):
    """The lines of its ```sh blocks, joined over backslashes. What needs a cluster, GPUs or a
    network stands in ```text blocks."""
    blocks = re.findall(r"^```sh\n(.*?)^```", read(page), re.M | re.S)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [line for line in lines if line.strip() and not line.startswith("#")]


# in a fresh environment these run in .ci/run
INSTALLED = r"python3 -m venv|\. \.venv|pip install|python -m pytest"
SHORT = flags(max_iters=2, eval_interval=2, eval_iters=1, n_layer=2, n_head=2, n_embd=16,
              block_size=16, batch_size=1, device="cpu", dtype="float32", compile=False)


def shortened(command):
    """The same command in seconds, by appended flags."""
    more, trains = [], re.search(r"train\.py|extras\.bench", command)
    if trains and "--help" not in command:
        more += SHORT
        if "dataset" not in command:
            more += ["--dataset=data/python_stdlib"]  # of the copy
    if "sample.py" in command:
        more += ["--max_new_tokens=5", "--num_samples=1"]
    if "extras.plan" in command:
        more += ["--n_layer=2"]
    return " ".join([command, *more])


def in_ranks(command, here=HERE):
    """The command in forked ranks, which spares each process seconds of imports; None if it is
    none of ours."""
    launcher = r"(?:torchrun --standalone --nproc_per_node=(\d+)|python)"
    ours = re.match(launcher + r" (?:-m (extras\.\w+)|(\w+)\.py) (.*)", command)
    if ours:
        n, extra, file, argv = ours.groups()
        p = Ranks(int(n or 1), main_in, here, extra or file, shlex.split(argv), alone=not n)
        return p.finish(180)


def main_in(here, module, argv):
    os.chdir(here)
    importlib.import_module(module).main(argv)


def copied(path):
    """The project without what git ignores."""
    left_out = (".git", ".venv", "out", "out-*", "*.bin", "__pycache__", ".*_cache")
    return shutil.copytree(HERE, path, ignore=shutil.ignore_patterns(*left_out))


def run_in(copy, command, as_printed):
    path = os.path.dirname(sys.executable) + ":" + os.environ["PATH"]
    p = None if as_printed else in_ranks(command, copy)
    env = {"PYTHONPATH": str(copy), "PATH": path}
    p = p or shell("bash", "-c", command, cwd=copy, timeout=180, env=env)
    assert p.returncode == 0, f"{command}\n{p.stdout}\n{p.stderr}"


def test_readme_commands_run(tmp_path):
    """In a copy of the project, in order: README.md, then the pages of docs/."""
    copy = copied(tmp_path / "copy")
    first, second, *_ = sh_commands("README.md")
    assert "python3 -m venv" in first and "minimal.py" in first and "quickstart" in second
    for i, line in enumerate(line for page in PAGES for line in sh_commands(page)):
        for command in map(str.strip, line.split("&&")):
            if not re.match(INSTALLED, command):
                # its first commands as a user would
                run_in(copy, shortened(command), as_printed=i in (0, 1))


def test_readme_gpu_commands_run_small_on_a_cpu(tmp):
    """Every bench of docs/gpu.md, but nanoGPT's own and float8's; test_plan.py runs plan.py."""
    text = read("docs/gpu.md").replace("\\\n", " ")
    commands = re.findall(r"^(?:torchrun|python) .*-m extras\.bench .*", text, re.M)
    commands = [command for command in commands if "float8" not in command]
    assert commands
    sizes = [*SHORT[3:], "--gradient_accumulation_steps=1", f"--dataset={tmp}/toy"]
    for command in commands:
        command = command.replace("extras.bench", "extras.bench --steps=1")
        p = in_ranks(" ".join([command, *sizes]))
        assert p.returncode == 0, f"{command}\n{p.stdout}\n{p.stderr}"


def test_readme_shows_all_of_minimal():
    block = re.search(r"^```python\n(.*?)^```", read("README.md"), re.M | re.S)[1]
    assert block == read("minimal.py")


def test_minimal_without_torchrun_is_one_line():
    p = python("minimal.py")
    assert p.returncode == 1 and p.stderr.count("\n") == 1 and "torchrun" in p.stderr


def test_minimal_on_ranks_that_cannot_share_its_samples_is_one_line():
    p = python("minimal.py", env=dict(WORLD_SIZE="5"))
    assert p.returncode == 1 and p.stderr.count("\n") == 1 and "12 samples" in p.stderr


def test_minimal_is_what_docs_measure():
    """bare.py in docs/measurements.md is minimal.py at other sizes."""
    bare = re.search(r"# bare.py.*?^```", read("docs/measurements.md"), re.M | re.S)[0]
    replaced = re.findall(r'^    "(.*?)": ', bare, re.M)
    assert len(replaced) == 7
    for text in replaced:
        assert text in read("minimal.py"), text


@pytest.mark.parametrize("n, gpus", [(3, 0), (2, 1), (2, 2)])
def test_minimal_trains_as_one_process(tmp_path, n, gpus):
    """It prints what plain PyTorch computes, and its checkpoint has those weights. On a machine
    with fewer GPUs than ranks it takes the CPU."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={n}"]
    env = dict(CUDA_VISIBLE_DEVICES=",".join(map(str, range(gpus))))
    if gpus and simulates(gpus):
        launcher += ["-m", "simgpu"]
        env = dict(SIM_GPUS=str(gpus), PYTHONPATH=os.path.join(HERE, "tests"))
    device = "cuda" if gpus >= n else "cpu"
    p = python(*launcher, os.path.join(HERE, "minimal.py"), cwd=tmp_path, env=env)
    assert p.returncode == 0 and "Warning" not in p.stderr, p.stderr
    model = GPT(GPTConfig(block_size=64, vocab_size=256, n_layer=4, n_head=4, n_embd=128))
    rows = sum(math.ceil(len(q) / n) * q[0].numel() for q in model.parameters())
    block = sum(q.numel() for q in model.blocks[1].parameters())
    root = (256 + 64 + 1) * 128  # tokens, positions, the last norm
    total = sum(q.numel() for q in model.parameters())
    assert f"512 rows, and rank 0 of {n} keeps {math.ceil(512 / n)} of them" in p.stdout
    assert f"keeps {rows:,} of {total:,} parameters, on {device}" in p.stdout
    assert f"{block + root:,} whole" in p.stdout

    for name, q in model.named_parameters():
        q.data.copy_(model.initial_value(name, q.shape, 1337)[:])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    text = torch.tensor(list(open(torch.__file__, "rb").read()))
    losses = []
    for step in range(101):
        torch.manual_seed(step)
        samples = [text[i:i + 65] for i in torch.randint(len(text) - 64, (12,))]
        samples = torch.stack(samples)
        loss = model(samples[:, :-1], samples[:, 1:])[1]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    printed = [float(text) for text in re.findall(r"loss (\S+)", p.stdout)]
    assert printed == pytest.approx(losses[::20], abs=6e-4)  # it prints three digits
    saved = torch.load(tmp_path / "out-minimal.pt")
    expected = model.state_dict()
    assert saved.keys() == expected.keys()
    for name, t in saved.items():
        assert (t - expected[name]).norm() < 1e-2 * expected[name].norm(), name


# -----------------------------------------------------------------------------
# config/; test_data.py asks every data/*/prepare.py for its help


@pytest.mark.parametrize("name", CONFIGS)
def test_readme_every_config_runs_two_steps(tmp, name):
    path = os.path.join(HERE, "config", name)
    cfg = load_config([path])
    small = dict(
        model=cfg.model, gradient_accumulation_steps=2, wandb_log=False, init_from="scratch",
        dataset=os.path.join(tmp, "toy"), out_dir=os.path.join(tmp, "config-" + name))
    if cfg.model == "llama":
        small.update(n_kv_head=1, n_inner=32, vocab_size=67)
    if cfg.strategy == "hybrid_shard":
        small["shard_group_size"] = 2
    world = 1 if cfg.strategy in ("", "single") else 2
    if cfg.lora_rank:  # the base is another run, of the same sizes
        small.update(frozen_dtype="float32")
        base = dict(small, lora_rank=0, out_dir=os.path.join(tmp, "base-" + name))
        launch(world, [path, *SHORT, *flags(**base)])
        small.update(init_from=base["out_dir"])
    launch(world, [path, *SHORT, *flags(**small)])


# -----------------------------------------------------------------------------
# the house: a room is a file, or the folder data/


# {name of a module: path} of the product; tests and data/*/prepare.py are none
PATHS = [path for pattern in ("*.py", "data/*.py", "extras/*.py", "extras/planning/*.py")
         for path in glob(pattern, root_dir=HERE) if path not in ("test_fsdp.py", "conftest.py")]
ROOMS = {path.removesuffix(".py").replace(os.sep, "."): path for path in PATHS}


def room_of(module):
    return "data" if module.startswith("data.") else module


def imports_of(path):
    """The rooms that a file's import statements name, those inside functions too."""
    names = set()
    for node in ast.walk(ast.parse(read(path))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return {room_of(name) for name in names & ROOMS.keys()}


def house():
    """{room: rooms that it imports}."""
    found = {}
    for module, path in ROOMS.items():
        room = room_of(module)
        found.setdefault(room, set()).update(imports_of(path) - {room})
    return found


GROUND = {"model", "fsdp", "optimizer", "ranks", "configurator", "data"}


def test_house_the_ground_floor_knows_only_torch():
    for room, imported in house().items():
        if room in GROUND or room in ("extras.muon", "extras.float8"):
            assert imported == set(), room
        if room in ("extras.llama", "extras.moe", "extras.lora"):
            assert imported == {"model"}, room
        if not room.startswith("extras."):  # what a fork may delete is imported by its key only
            assert not [name for name in imported if name.startswith("extras.")], room


@of_ours
def test_house_has_few_floors_and_no_circle():
    found = house()
    order = list(graphlib.TopologicalSorter(found).static_order())  # CycleError names a circle
    floor = {}
    for room in order:
        floor[room] = 1 + max((floor[below] for below in found[room]), default=0)
    assert max(floor.values()) <= 6
    core = [room for room in found if f"`{room}.py`" in read("README.md")]  # not your own model
    assert sum(len(found[room]) for room in core) <= 21
    assert max(map(len, found.values())) <= 8  # of extras/ too, however many files it has


def test_house_readme_names_all_that_know_strategies_by_name():
    recipe = re.search(r"- \*\*Another strategy\*\*.*?\n- ", read("README.md"), re.S)[0]
    found = set()
    for path in ROOMS.values():
        for function in ast.walk(ast.parse(read(path))):
            if isinstance(function, ast.FunctionDef):
                compared = [n for n in ast.walk(function) if isinstance(n, ast.Compare)]
                texts = map(ast.unparse, compared)
                if any(re.search(r"\.strategy\b.*'", text) for text in texts):
                    found.add(function.name)
    assert "train_step" in found  # what the search would find, if it works
    assert [name for name in found if f"`{name}`" not in recipe] == []
    code = "\n".join(map(read, ROOMS.values()))
    for name in set(re.findall(r"`(\w+)`", recipe)) - {*STRATEGIES, "shard"}:
        assert re.search(rf"^(def {name}\(|{name} = )", code, re.M), name


def test_house_stands_without_extras(tmp, tmp_path):
    """In a copy, after `rm -r extras`: README's quickstart and tests of test_fsdp.py pass, all
    tests are found or skipped, and a key that needs a file of extras/ says so in one line."""
    copy = copied(tmp_path / "copy")
    shutil.rmtree(copy / "extras")

    def run(*args):
        return python(*args, cwd=copy, env={"PYTHONPATH": str(copy)})

    # its own README, files and keys are its own affair
    (copy / "README.md").write_text("# A fork\n")
    (copy / "mine.py").write_text("import train  # noqa\n")
    config = (copy / "configurator.py").read_text()
    config = config.replace("    # --- system\n", "    # --- system\n    gamma: float = 1.0\n")
    (copy / "configurator.py").write_text(config)
    chosen = "recomputed or test_parity_single or few_floors or every_key_is_read"
    p = run("-m", "pytest", "-q", "-rs", "-k", chosen)
    assert p.returncode == 0 and "\n3 passed, " in p.stdout, p.stdout
    assert p.stdout.count("it holds nanoFSDP2 itself") == 2, p.stdout
    for flag, file in {"--init_from=gpt2": "huggingface", "--optimizer=muon": "muon",
                       "--dtype=float8": "float8", "--lora_rank=8": "lora",
                       "--model=llama": "extras/"}.items():
        p = run("train.py", *SHORT, flag, f"--dataset={tmp}/toy", f"--out_dir={tmp_path}/out")
        assert p.returncode == 1 and p.stderr.count("\n") == 1, p.stderr
        assert flag[2:].replace("llama", "'llama'") in p.stderr and file in p.stderr, p.stderr
    for command in sh_commands("README.md")[1].split("&&"):
        run_in(copy, shortened(command.strip()), as_printed=True)

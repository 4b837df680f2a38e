"""
What is printed in README.md and docs/ works, and the house is in order: configs, scripts, links,
commands; the shape of lines, and which file may import which.

    python -m pytest -q tests/test_readme.py
    python -m pytest -q tests/test_readme.py -k house
"""

import ast
import graphlib
import importlib
import os
import re
import shlex
import shutil
import sys
from glob import glob

import pytest
import torch
import torch.distributed as dist
from harness import HERE, Ranks, flags, launch, of_ours, on_ranks, python, shell, values
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import distribute_tensor

from configurator import load_config
from model import GPT, GPTConfig

CONFIGS = sorted(name for name in os.listdir(os.path.join(HERE, "config")) if name.endswith(".py"))
PAGES = [os.path.join(HERE, "README.md"), *sorted(glob(os.path.join(HERE, "docs", "*.md")))]


def read(path):
    with open(os.path.join(HERE, path), encoding="utf-8") as f:
        return f.read()


# -----------------------------------------------------------------------------
# README.md and docs/


@of_ours
def test_readme_has_at_most_200_lines():
    assert len(read("README.md").splitlines()) <= 200


@of_ours
def test_readme_tells_how_long_the_core_is():
    files = ("model.py", "train.py", "fsdp.py", "ranks.py")
    assert sum(len(read(file).splitlines()) for file in files) <= 960
    said = ", ".join(f"`{file}`" for file in files)
    assert f"Read {said}, in that order: 960 lines" in read("README.md")


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
        if anchor:
            assert anchor in anchors(target), link


def test_readme_ruff_passes():
    pytest.importorskip("ruff")
    p = python("-m", "ruff", "check", HERE)
    assert p.returncode == 0, p.stdout


def sh_commands(page):
    """
    The lines of its ```sh blocks, joined over backslashes. What needs a cluster, GPUs or a network
    stands in ```text blocks.
    """
    blocks = re.findall(r"^```sh\n(.*?)^```", read(page), re.M | re.S)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [line for line in lines if line.strip() and not line.startswith("#")]


# in a fresh environment these run in .ci/run
INSTALLED = r"python3 -m venv|\. \.venv|pip install|python -m pytest"
SHORT = flags(max_iters=2, eval_interval=2, eval_iters=1, n_layer=2, n_head=2, n_embd=16,
              block_size=16, batch_size=1, device="cpu", dtype="float32", compile=False)


def shortened(command):
    """The same command in seconds, by appended flags."""
    more, trains = [], re.search(r"(train|bench)\.py", command)
    if trains and "--help" not in command:
        more += SHORT
        if "dataset" not in command:
            more += ["--dataset=data/python_stdlib"]  # of the copy
    if "sample.py" in command:
        more += ["--max_new_tokens=5", "--num_samples=1"]
    if "plan.py" in command:
        more += ["--n_layer=2"]
    return " ".join([command, *more])


def in_ranks(command, here=HERE):
    """The command in forked ranks, which spares each process seconds of imports; None if it is
    none of ours."""
    launcher = r"(?:torchrun --standalone --nproc_per_node=(\d+)|python)"
    ours = re.match(launcher + r" (\w+)\.py (.*)", command)
    if ours:
        n, module, argv = ours.groups()
        return Ranks(int(n or 1), main_in, here, module, shlex.split(argv), alone=not n).finish(180)


def main_in(here, module, argv):
    os.chdir(here)
    importlib.import_module(module).main(argv)


def copied(path):
    """The project without what git ignores."""
    left_out = (".git", ".venv", "out", "out-*", "*.bin", "__pycache__", ".*_cache")
    return shutil.copytree(HERE, path, ignore=shutil.ignore_patterns(*left_out))


def test_readme_commands_run(tmp_path):
    """In a copy of the project, in order: README.md, then the pages of docs/."""
    copy = copied(tmp_path / "copy")
    path = os.path.dirname(sys.executable) + ":" + os.environ["PATH"]
    first, second, *_ = sh_commands("README.md")
    assert "python3 -m venv" in first and "quickstart" in first
    assert "pytest" in second
    for i, line in enumerate(line for page in PAGES for line in sh_commands(page)):
        for command in map(str.strip, line.split("&&")):
            if re.match(INSTALLED, command) or "--init_from=gpt2" in command:
                continue
            command, as_printed = shortened(command), i in (0, 3)  # its first ones, and a torchrun
            p = None if as_printed else in_ranks(command, copy)
            p = p or shell("bash", "-c", command, cwd=copy, timeout=180,
                           env={"PYTHONPATH": str(copy), "PATH": path})
            assert p.returncode == 0, f"{command}\n{p.stdout}\n{p.stderr}"


def test_readme_names_all_that_know_strategies_by_name():
    recipe = re.search(r"- \*\*Another strategy\*\*.*?\n- ", read("README.md"), re.S)[0]
    found = set()
    for path in PRODUCT.values():
        for function in nodes(path, ast.FunctionDef):
            for node in ast.walk(function):
                if isinstance(node, ast.Compare) and ".strategy " in ast.unparse(node) + " ":
                    found |= {function.name} if "'" in ast.unparse(node) else set()
    assert len(found) >= 8
    for name in found:
        assert f"`{name}`" in recipe, name


def test_readme_a_fork_may_delete_what_it_says(tmp_path):
    """In a copy: every test is still found, and one line says what is missing."""
    text = re.search(r"A fork can delete (.*?)\.\n", read("README.md"), re.S)[1]
    names = re.findall(r"`(\w+\.py)`", text)
    assert len(names) == 6
    copy = copied(tmp_path / "copy")
    for name in names:
        os.remove(copy / name)

    def run(*args):
        return python(*args, cwd=copy, env={"PYTHONPATH": str(copy)})

    # its own README, files and keys are its own affair
    (copy / "README.md").write_text("# A fork\n" + 300 * "\n" + "A fork can delete `x.py`.\n")
    (copy / "mine.py").write_text("import train  # noqa\n")
    config = (copy / "configurator.py").read_text()
    config = config.replace("    # --- system\n", "    # --- system\n    gamma: float = 1.0\n")
    (copy / "configurator.py").write_text(config)
    p = run("-m", "pytest", "-q", "-rs", "-k", "(contract or recomputed or 200_lines or how_long "
            "or every_file_has or config_every_key_is_read) and not test_contract.py")
    assert p.returncode == 0 and "\n4 passed, " in p.stdout, p.stdout
    assert p.stdout.count("nanoFSDP2 itself to its size and files") == 4, p.stdout
    said = {"--init_from=gpt2": "init_from=gpt2 needs huggingface.py, which is not here\n",
            "--model=llama": "model='llama': gpt2 is model.py, any other NAME is NAME.py beside "
                             "it, with a Model and a dataclass ModelConfig\n"}
    for flag in said:
        p = run("train.py", flag, f"--out_dir={tmp_path / 'out'}")
        assert (p.returncode, p.stderr) == (1, said[flag])


def case_readme():
    """README's dozen lines on this rank, and plain PyTorch with both ranks' rows as one batch."""
    block = re.search(r"^```python\n(.*?)^```", read("README.md"), re.M | re.S)[1]
    tokens = torch.randint(50304, (3, 2, 17), generator=torch.Generator().manual_seed(0))
    rank = dist.get_rank()
    scope = dict(
        torch=torch, init_device_mesh=dist.init_device_mesh, fully_shard=fully_shard, GPT=GPT,
        GPTConfig=GPTConfig, distribute_tensor=distribute_tensor,
        batches=[(rows[rank:rank + 1, :-1], rows[rank:rank + 1, 1:]) for rows in tokens])
    exec(block, scope)
    plain = GPT(GPTConfig(n_layer=4, n_head=4, n_embd=128))
    for name, p in plain.named_parameters():
        p.data.copy_(plain.initial_value(name, p.shape, 1337))
    optimizer = torch.optim.AdamW(plain.parameters())
    for rows in tokens:
        plain(rows[:, :-1], rows[:, 1:])[1].backward()
        optimizer.step()
        optimizer.zero_grad()
    expected, off, rows = dict(plain.named_parameters()), 0.0, 0
    for name, p in scope["model"].named_parameters():
        off = max(off, (p.full_tensor() - expected[name]).norm() / expected[name].norm())
        rows += abs(2 * p.to_local().numel() - p.numel())
    units = [name for name, m in scope["model"].named_modules() if isinstance(m, FSDPModule)]
    return dict(units=units, off=float(off), rows=rows)


def test_readme_shows_fsdp2_itself():
    r = values(on_ranks(2, {"readme": (case_readme, {})}), "readme")
    assert r[0]["units"] == ["", *(f"transformer.h.{i}" for i in range(4))]
    assert r[0]["off"] < 1e-5 and r[0]["rows"] == 0  # half of the rows each


def test_readme_gpu_commands_run_small_on_a_cpu(tmp):
    """Every bench of docs/gpu.md, but nanoGPT's own and float8's; test_plan.py runs plan.py."""
    text = read("docs/gpu.md").replace("\\\n", " ")
    commands = re.findall(r"^(?:torchrun|python) .*(?:bench|plan)\.py .*", text, re.M)
    assert len(commands) == 7
    tiny_sizes = " ".join([*SHORT[3:], "--gradient_accumulation_steps=1",
                           f"--dataset={os.path.join(tmp, 'toy')}"])
    for command in commands:
        if "float8" in command or "plan.py" in command:
            continue
        if "bench" in command:
            command = command.replace("bench.py", "bench.py --steps=1")
        p = in_ranks(f"{command} {tiny_sizes}")
        assert p.returncode == 0, f"{command}\n{p.stdout}\n{p.stderr}"


# -----------------------------------------------------------------------------
# config/; test_data.py asks every data/*/prepare.py for its help


@pytest.mark.parametrize("name", CONFIGS)
def test_readme_every_config_runs_two_steps(tmp, name):
    path = os.path.join(HERE, "config", name)
    cfg = load_config([path])
    assert cfg.n_embd % cfg.n_head == 0
    small = dict(model=cfg.model)
    if cfg.model == "llama":
        small.update(n_kv_head=1, n_inner=32)
    small.update(
        n_layer=2, n_head=2, n_embd=16, block_size=16, batch_size=1, max_iters=2, eval_interval=2,
        gradient_accumulation_steps=2, eval_iters=1, compile=False, device="cpu", dtype="float32",
        dataset=os.path.join(tmp, "toy"), out_dir=os.path.join(tmp, "config-" + name),
        wandb_log=False, init_from="scratch")
    if cfg.strategy == "hybrid_shard":
        small["shard_group_size"] = 2
    world = 1 if cfg.strategy in ("", "single") else 2
    launch(world, [path, *flags(**small)])


# -----------------------------------------------------------------------------
# the house


def python_files():
    """Paths of all .py files of the repository, relative to it."""
    paths = []
    for folder, folders, files in os.walk(HERE):
        folders[:] = [f for f in folders if not f.startswith((".", "out", "__pycache__"))]
        for file in files:
            if file.endswith(".py"):
                paths.append(os.path.relpath(os.path.join(folder, file), HERE))
    return sorted(paths)


def nodes(path, kind):
    return [node for node in ast.walk(ast.parse(read(path))) if isinstance(node, kind)]


@pytest.mark.parametrize("path", python_files())
def test_house_lines_are_short_and_say_one_thing(path):
    for i, line in enumerate(read(path).splitlines(), 1):
        assert len(line) <= 100, f"{path}:{i}: {len(line)} columns"
    for node in nodes(path, ast.Expr):
        one = not isinstance(node.value, ast.Tuple)
        assert one, f"{path}:{node.lineno}: a statement that is a tuple; one statement a line"
    for node in nodes(path, ast.IfExp):
        inner = [n for n in ast.walk(node) if isinstance(n, ast.IfExp) and n is not node]
        assert not inner, f"{path}:{node.lineno}: nested conditional expressions; use if and elif"


def module_of(path):
    return path.removesuffix(".py").replace(os.sep, ".")


PRODUCT = {module_of(path): path for path in python_files()
           if path.startswith("data") or os.sep not in path}
PRODUCT = {name: path for name, path in PRODUCT.items() if name not in ("test_fsdp", "conftest")}


def imported(statements):
    """The project's own modules that these import statements name."""
    names = set()
    for node in statements:
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names & PRODUCT.keys()


IMPORTS = {name: imported(nodes(path, (ast.Import, ast.ImportFrom)))
           for name, path in PRODUCT.items()}
LAYERS = [
    {"model", "llama", "configurator", "ranks"} | {name for name in PRODUCT if "." in name},
    {"float8"},
    {"fsdp"},
    {"checkpoint", "optimizer"},
    {"metrics"},
    {"huggingface"},
    {"train"},
    {"rehearse", "bench", "sample"},
    {"plan"},
]


def test_house_imports_have_no_circle():
    """Imports inside functions count too."""
    graphlib.TopologicalSorter(IMPORTS).prepare()  # CycleError names the circle


@of_ours
def test_house_every_file_has_its_layer_and_imports_only_downwards():
    assert PRODUCT.keys() <= set().union(*LAYERS)  # a new file: say here where it belongs
    below = set()
    for layer in LAYERS:
        below |= layer
        for name in layer & PRODUCT.keys():
            assert IMPORTS[name] <= below, f"{name} imports {IMPORTS[name] - below}"


@of_ours
def test_house_models_and_foundations_import_almost_nothing_of_the_project():
    assert IMPORTS["model"] == set()
    assert IMPORTS["ranks"] == set()
    assert IMPORTS.get("llama", set()) <= {"model"}
    assert imported(ast.parse(read("configurator.py")).body) == set()  # models: when one is named
    data = {name for name in PRODUCT if name.startswith("data.")}
    for name in data:
        assert IMPORTS[name] <= data, name
    assert IMPORTS["fsdp"] <= {"configurator", "float8", "model", "ranks"} | data
    assert "plan" not in IMPORTS["train"]


def test_house_nothing_imports_llama():
    """It proves that one file is a model: no other file imports it."""
    assert not [name for name in PRODUCT if "llama" in IMPORTS[name]]

"""
extras/ as a whole: its links and configs work, its keys are used, its files import only what they
may, and the project stands without it.

    python -m pytest -q extras/tests/test_house.py
"""

import os
import re
import shlex
import shutil
from glob import glob

import harness
import pytest
from harness import HERE, SHORT, copied, python
from test_config import require_unknown_model
from test_readme import (
    CORE,
    house,
    modules,
    read,
    run_two_steps,
)

from configurator import load_config
from extras import bench, plan
from extras.gpu_report import __main__ as gpu_report

EXTRAS = modules("extras/*.py", "extras/plan/*.py", "extras/gpu_report/*.py")

# -----------------------------------------------------------------------------
# pages, configs, keys, commands


CONFIGS = set(glob("*.py", root_dir=f"{HERE}/extras/config")) - {"lora.py"}  # it changes another


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_house_every_config_of_extras_runs_two_steps(tmp, name):
    path = os.path.join(HERE, "extras", "config", name)
    cfg = load_config([path])
    small = {}
    if cfg.model.startswith("llama"):
        small.update(n_kv_head=1, n_inner=32, vocab_size=67)
    if cfg.model == "llama+lora":  # the base is another run, of the same sizes
        small.update(frozen_dtype="float32")
        base = os.path.join(tmp, "base-" + name)
        own = dict(n_kv_head=1, n_inner=32, vocab_size=67, rope_theta=5e5, tie_embeddings=False)
        own.update(model="llama", out_dir=base)
        run_two_steps(tmp, os.path.join(HERE, "extras", "config", "llama3_8b.py"), **own)
        small.update(base=base)
    run_two_steps(tmp, path, **small)


@pytest.mark.parametrize("name", ["plan", "extras/moe", "extras.moe"])
def test_house_models_of_extras_have_a_name_and_no_path(tmp_path, monkeypatch, capsys, name):
    require_unknown_model(tmp_path, monkeypatch, capsys, name)


def test_house_paths_may_begin_with_the_home_directory(tmp_path, monkeypatch):
    """A shell leaves the ~ in --out=~/x."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs/bench.py").touch()
    own, _ = bench.parse(["--profile=~/p"])
    assert own.profile == f"{tmp_path}/p" and (tmp_path / "p").is_dir()
    own = gpu_report.parse(["--out=~/r", "--nanogpt=~/theirs"])
    assert (own.out, own.nanogpt) == (f"{tmp_path}/r", f"{tmp_path}/theirs")
    pytest.importorskip("matplotlib")
    own, _ = plan.parse(["--gpu=H100", "--plot=~/x.png"])
    assert own.plot == f"{tmp_path}/x.png"


@pytest.mark.slow
def test_house_tools_of_extras_start_from_another_directory(tmp_path):
    """By their paths, as train.py, sample.py and data/prepare.py do."""
    names = ("plan", "bench.py", "huggingface.py")
    paths = [os.path.join(HERE, "extras", name) for name in names]
    started = [harness.start(1, [path, "--help"], tmp_path, PYTHONPATH="") for path in paths]
    for path, p in zip(paths, started):
        out = harness.finish(p)
        assert p.returncode == 0 and "python -m extras." in out, f"{path}\n{out}"


# -----------------------------------------------------------------------------
# which file imports which


def test_house_the_core_imports_nothing_of_extras():
    """Only the files that a key names, by that key."""
    found = house({**CORE, **EXTRAS})
    for room, imported in found.items():
        if room == "extras.muon":
            assert imported == {"configurator", "optimizer"}, room
        if room == "extras.float8":
            assert imported == {"configurator"}, room
        if room in ("extras.llama", "extras.moe"):
            assert imported == {"model"}, room
        if not room.startswith("extras."):
            assert not [name for name in imported if name.startswith("extras.")], room


# -----------------------------------------------------------------------------
# without it

# The files that may name extras/: they look for it, and say so if it is not here.
LOOKUPS = {
    "configurator.py", "conftest.py", "data/files.py", "tests/commands.py", "tests/harness.py",
    "tests/test_contract.py", "tests/test_readme.py", "tests/upstream/test_commands.py",
    "tests/upstream/test_style.py", "README.md"}


@pytest.fixture(scope="module")
def left(tmp_path_factory):
    """A copy of the project after `rm -r extras`."""
    copy = copied(tmp_path_factory.mktemp("left") / "copy")
    shutil.rmtree(copy / "extras")
    return copy


def run_in(copy, *args):
    return python(*args, cwd=copy, env={"PYTHONPATH": str(copy)}, timeout=500)


def test_house_nothing_that_is_left_names_extras(left):
    """But for lookups, and README. Nor does it name a file that was there."""
    gone = set()
    for pattern in ("*.py", "config/*.py", "docs/*.md", "tests/*.py", "simgpu/tests/*.py"):
        paths = glob(f"extras/{pattern}", root_dir=HERE)
        gone.update(map(os.path.basename, paths))
    gone -= {os.path.basename(path) for path in glob("**/*", root_dir=left, recursive=True)}
    named = {}
    for path in glob("**/*", root_dir=left, recursive=True):
        if path in LOOKUPS or not path.endswith((".py", ".md", ".txt", ".toml")):
            continue
        text = read(path)
        files = set(re.findall(r"\b\w+\.(?:py|md)\b", text)) & gone
        named[path] = [*re.findall(r".*extras.*", text), *files]
    assert {path: names for path, names in named.items() if names} == {}


def readmes_tests():
    return shlex.split(re.search(r"^ +python (-m pytest .*)", read("README.md"), re.M)[1])


@pytest.mark.slow
def test_house_stands_without_extras(left):
    """README's command for the tests, on some of them: none is skipped because a file is gone."""
    command = readmes_tests()
    p = run_in(left, *command, "--co")
    assert p.returncode == 0, p.stdout
    chosen = "recomputed or floors or every_key or every_config or mistake"
    p = run_in(left, *command, "-rs", "-k", chosen)
    assert p.returncode == 0 and " passed" in p.stdout, p.stdout
    assert "SKIPPED" not in p.stdout, p.stdout


@pytest.mark.slow
def test_house_a_fork_of_another_name_stands_without_extras(left, tmp_path):
    """Its own README, files and keys are its own affair, once it has deleted tests/upstream."""
    fork = shutil.copytree(left, tmp_path / "fork")
    shutil.rmtree(fork / "tests/upstream")
    (fork / "README.md").write_text("# A fork\n")
    (fork / "mine.py").write_text("import train  # noqa\n")
    config = (fork / "configurator.py").read_text()
    config = config.replace("    # --- system\n", "    # --- system\n    gamma: float = 1.0\n")
    (fork / "configurator.py").write_text(config)
    chosen = "recomputed or test_parity_single or house"
    p = run_in(fork, *readmes_tests(), "-rs", "-k", chosen)
    assert p.returncode == 0 and " passed" in p.stdout, p.stdout
    assert "SKIPPED" not in p.stdout, p.stdout


@pytest.mark.slow
@pytest.mark.parametrize("flag, file", [
    ("--init_from=gpt2", "huggingface"), ("--optimizer=muon", "muon"),
    ("--dtype=float8", "float8"), ("--model=gpt2+lora", "lora"),
    ("--model=llama", "llama")])
def test_house_a_key_without_its_file_is_one_line(tmp, tmp_path, left, flag, file):
    p = run_in(left, "train.py", *SHORT, flag, f"--dataset={tmp}/toy", f"--out_dir={tmp_path}/out")
    assert p.returncode == 1 and p.stderr.count("\n") == 1, p.stderr
    key, _, value = flag[2:].partition("=")
    assert key in p.stderr and value in p.stderr, p.stderr
    assert f"no {file}.py beside model.py or in extras/" in p.stderr, p.stderr


@pytest.mark.slow
@pytest.mark.parametrize("command, wanted_by, file", [
    ("train.py --dataset=a:2,b:1", "dataset=a:2,b:1", "mixture"),
    ("data/prepare.py x a.txt --tokenizer=owner/name", "tokenizer=owner/name", "hf_tokenizer")])
def test_house_data_without_its_file_is_one_line(tmp_path, left, command, wanted_by, file):
    p = run_in(left, *command.split())
    assert p.returncode == 1 and p.stderr.count("\n") == 1, p.stderr
    assert f"{wanted_by} needs extras/{file}.py, which is not here" in p.stderr
    assert not (left / "data/x").exists()


@pytest.mark.slow
def test_house_quickstart_runs_without_extras(left):
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    for command in (
        ("data/python_stdlib/prepare.py",),
        (*launcher, "train.py", "config/quickstart.py", *SHORT),
        ("sample.py", "--out_dir=out-quickstart", "--max_new_tokens=5", "--num_samples=1"),
    ):
        p = run_in(left, *command)
        assert p.returncode == 0, p.stderr

"""
learn.ipynb runs from top to bottom, as a reader runs it: in a clone whose path has a space, each
program in a file of its own under torchrun. What it claims is asserted in its cells. And what it
shows here was printed by such a run.

    python -m pytest -q extras/tests/upstream/test_notebook.py
    jupyter nbconvert --to notebook --execute --inplace learn.ipynb    # its outputs anew

(That needs nbconvert. In the notebook itself it is "Run All".)
"""

import base64
import json
import os
import re
import shutil
import subprocess

import pytest
import torch
from commands import read
from harness import HERE, SIMGPU, cannot_simulate, copied, python, torchrun

CELLS = json.loads(read("learn.ipynb"))["cells"]
CODE = [cell for cell in CELLS if cell["cell_type"] == "code"]


def source(cell):
    return "".join(cell["source"])


def printed(cell):
    """What it has printed, its pictures aside."""
    return "".join("".join(output.get("text", "")) for output in cell["outputs"])


def execute(cells, directory):
    """The cells in one new kernel. CellExecutionError if one of them raises."""
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    pytest.importorskip("matplotlib")
    text = json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5})
    notebook = nbformat.reads(text, 4)
    kinder = ("PYTHONPATH", "OMP_NUM_THREADS", "OMP_WAIT_POLICY")
    before = {key: os.environ.pop(key) for key in kinder if key in os.environ}
    # Its %pip must not change the environment of the tests, as it did where pip has a cap on torch.
    os.environ["PIP_DRY_RUN"] = "1"
    try:
        client = nbclient.NotebookClient(
            notebook, timeout=600, kernel_name="python3",
            resources={"metadata": {"path": str(directory)}})
        client.execute()
    finally:
        del os.environ["PIP_DRY_RUN"]
        os.environ.update(before)
    return notebook.cells


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """(the notebook's directory after a whole run, its code cells)."""
    clone = copied(tmp_path_factory.mktemp("a reader") / "a clone")
    cells = execute(CELLS, clone)
    return clone, [cell for cell in cells if cell["cell_type"] == "code"]


@pytest.mark.slow
def test_notebook_runs_and_prints_what_it_shows(executed):
    """Word for word. Its numbers may be others; what they must be is asserted there."""
    _, cells = executed

    def words(cell):
        text = re.sub(r"\+(cpu|cu\d+)", "", printed(cell))
        return re.sub(r"[\d.,]*\d(e[-+]\d+)?", "N", text).split()

    assert len(cells) == len(CODE)
    version = re.match(r"torch (\d+\.\d+)", printed(CODE[1]))[1]
    if torch.cuda.is_available() or not torch.__version__.startswith(version):
        return  # a GPU, or another PyTorch with its own warnings
    for ran, shown in zip(cells, CODE):
        if "--quiet" in source(shown) or "first ten" in source(shown):
            continue  # pip's words depend on what is installed, and these are times
        assert words(ran) == words(shown), source(shown)


def test_notebook_claims_are_assertions():
    """Equal losses, counts of events, bytes: each has its assert, which a run must pass."""
    asserted = "\n".join(re.findall(r"^ *assert .*", "\n".join(map(source, CODE)), re.M))
    for claim in ("difference", "120, 31.4, 16.6, 1.9", "sharded.items()", '("all-gather")',
                  '("reduce-scatter")', "_allgather_base_", "MiB", "[18, 109, 81]", "1e-5", "lora_",
                  "whole", '"ddp"'):
        assert claim in asserted, claim


def test_notebook_is_from_one_run_and_has_no_paths():
    assert [cell["execution_count"] for cell in CODE] == [*range(1, len(CODE) + 1)]
    for cell in CODE:
        assert cell["outputs"] or "assert" in source(cell) or "import" in source(cell)
        assert not re.search(r"/(home|root|work|tmp|usr|Users|content)\b", printed(cell)), cell
    pictures = [o for cell in CODE for o in cell["outputs"] if "image/png" in o.get("data", {})]
    assert len(pictures) >= 6


def test_notebook_prints_lines_that_fit_the_page():
    """104 columns, but for the two programs side by side."""
    for cell in CODE:
        limit = 124 if "!diff" in source(cell) else 104
        assert max(map(len, printed(cell).splitlines()), default=0) <= limit, source(cell)


def test_notebook_drew_readmes_picture_of_the_units():
    """assets/units.png: which unit is whole when. After another run, save the notebook's again."""
    [cell] = [cell for cell in CODE if "units are whole" in source(cell)]
    [first, _] = [o["data"] for o in cell["outputs"] if "image/png" in o.get("data", {})]
    with open(os.path.join(HERE, "assets", "units.png"), "rb") as f:
        assert base64.b64decode(first["image/png"]) == f.read()


def test_notebook_has_few_words():
    words = [word for cell in CELLS if cell["cell_type"] == "markdown"
             for word in source(cell).split()]
    assert len(words) <= 1000


def test_notebook_starts_programs_by_torchrun_from_files():
    """Each program of several ranks is a file, so it runs elsewhere as it is."""
    code = "\n".join(map(source, CODE))
    written = set(re.findall(r"^%%writefile (\S+)", code, re.M))
    started = re.findall(r"^!.*?(out-learn/\w+\.py)", code, re.M)
    assert set(started) <= written and len(set(started)) >= 8
    assert "mp.spawn" not in code and "multiprocessing" not in code


def test_notebook_links_point_to_what_exists():
    text = "\n".join(source(cell) for cell in CELLS if cell["cell_type"] == "markdown")
    links = re.findall(r"\]\((\S+?)\)", text)
    assert len(links) >= 4
    for link in links:
        assert os.path.exists(os.path.join(HERE, link)), link


@pytest.mark.slow
def test_notebook_outside_a_clone_makes_one(tmp_path, monkeypatch):
    """Its first cell clones the repository, from the address that is set."""
    origin = tmp_path / "origin"
    origin.mkdir()
    for name in ("fsdp.py", "requirements.txt"):
        shutil.copy(os.path.join(HERE, name), origin)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for args in (["init", "-q"], ["add", "."], ["commit", "-qm", "a"]):
        subprocess.run([*git, *args], cwd=origin, check=True)
    monkeypatch.setenv("NANOFSDP2", str(origin))
    here = tmp_path / "here"
    here.mkdir()
    execute([dict(CODE[0], outputs=[])], here)
    assert (here / "nanoFSDP2/fsdp.py").exists() and (here / "nanoFSDP2/out-learn").is_dir()
    assert not (here / "out-learn").exists()


def test_notebook_outside_a_clone_and_without_an_address_says_what_to_set(tmp_path, monkeypatch):
    monkeypatch.delenv("NANOFSDP2", raising=False)
    with pytest.raises(Exception, match="set NANOFSDP2"):
        execute([dict(CODE[0], outputs=[])], tmp_path)
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_notebook_answer_to_the_exercise_about_zero2(executed):
    """Without the two hooks: 54 collectives, and the same losses."""
    clone, _ = executed
    program = (clone / "out-learn/zero3.py").read_text()
    for hook in ("forward_hook(unit.free)", "full_backward_pre_hook(unit.gather)"):
        line = f"    block.register_{hook}\n"
        assert line in program
        program = program.replace(line, "")
    (clone / "out-learn/zero2.py").write_text(program.replace('"zero3"', '"zero2"'))
    p = torchrun(2, "out-learn/zero2.py", cwd=clone, env=dict(PYTHONPATH=str(clone)))
    assert p.returncode == 0, p.stderr
    zero2, zero3 = (json.loads((clone / f"out-learn/{name}.json").read_text())
                    for name in ("zero2", "zero3"))
    assert len(zero2["events"]) == 54 and len(zero3["events"]) == 78
    assert zero2["losses"] == pytest.approx(zero3["losses"], abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zero3", "sharded", "watch"])
def test_notebook_programs_run_on_two_gpus(executed, name):
    """The same losses as on the CPU."""
    if reason := cannot_simulate():
        pytest.skip(reason)
    clone, _ = executed
    file = clone / "out-learn" / f"{name}.json"
    on_cpu = json.loads(file.read_text())["losses"]
    file.unlink()
    p = python("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "simgpu",
               f"out-learn/{name}.py", cwd=clone,
               env=dict(SIM_GPUS="2", PYTHONPATH=f"{SIMGPU}:{clone}"))
    assert p.returncode == 0, p.stderr
    assert json.loads(file.read_text())["losses"] == pytest.approx(on_cpu, abs=1e-5)

"""
learn.ipynb runs from top to bottom, as a reader runs it: in a clone whose path has a space, each
program in a file of its own under torchrun. What it claims is asserted in its cells.

    python -m pytest -q extras/tests/upstream/test_notebook.py
    jupyter nbconvert --to notebook --execute --inplace learn.ipynb    # its outputs anew
"""

import re

import pytest
import torch
from harness import copied


def words(cell):
    """What it prints, without pictures and numbers: what those must be is asserted there."""
    text = "".join("".join(output.get("text", "")) for output in cell["outputs"])
    return re.sub(r"[\d.,]*\d(e[-+]\d+)?", "N", re.sub(r"\+(cpu|cu\d+)", "", text)).split()


@pytest.mark.slow
def test_notebook_runs_and_prints_what_it_shows(tmp_path, monkeypatch):
    nbformat, nbclient, *_ = map(
        pytest.importorskip, ("nbformat", "nbclient", "ipykernel", "matplotlib"))
    clone = copied(tmp_path / "a clone")
    for kinder in ("PYTHONPATH", "OMP_NUM_THREADS", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(kinder, raising=False)
    # Its %pip must not change the environment of the tests, as it did where pip has a cap on torch.
    monkeypatch.setenv("PIP_DRY_RUN", "1")
    shown = nbformat.read(clone / "learn.ipynb", 4).cells
    notebook = nbformat.read(clone / "learn.ipynb", 4)
    nbclient.NotebookClient(  # CellExecutionError if a cell raises
        notebook, timeout=600, kernel_name="python3",
        resources={"metadata": {"path": str(clone)}}).execute()
    if torch.cuda.is_available() or not torch.__version__.startswith("2.15"):
        return  # a GPU, or another PyTorch with its own warnings
    for ran, cell in zip(notebook.cells, shown):
        # pip's words depend on what is installed, and the first ten are times
        if cell["cell_type"] == "code" and not re.search("--quiet|first ten", cell["source"]):
            assert words(ran) == words(cell), cell["source"]

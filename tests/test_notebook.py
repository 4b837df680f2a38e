"""
learn.ipynb runs from top to bottom, as a reader runs it: in a clone whose path has a space, each
program in a file of its own under torchrun. It needs no extras/. What it claims is asserted in its
cells.

    python -m pytest -q tests/test_notebook.py
    jupyter nbconvert --to notebook --execute --inplace learn.ipynb    # its outputs anew
"""

import re
import shutil

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
    shutil.rmtree(clone / "extras", ignore_errors=True)
    for kinder in ("PYTHONPATH", "OMP_NUM_THREADS", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(kinder, raising=False)
    shown = nbformat.read(clone / "learn.ipynb", 4).cells
    notebook = nbformat.read(clone / "learn.ipynb", 4)
    nbclient.NotebookClient(  # CellExecutionError if a cell raises
        notebook, timeout=600, kernel_name="python3",
        resources={"metadata": {"path": str(clone)}}).execute()
    if torch.cuda.is_available() or not torch.__version__.startswith("2.15"):
        return  # a GPU, or another PyTorch with its own warnings
    for ran, cell in zip(notebook.cells, shown):
        if cell["cell_type"] == "code" and "first ten" not in cell["source"]:  # these are times
            assert words(ran) == words(cell), cell["source"]

"""
This repository's own pages and keys: its pages say what the code says. A fork deletes this
directory.

    python -m pytest -q tests/upstream/test_style.py
"""

import os
import re

import pytest
from harness import HERE, python
from test_config import keys, require_read_and_tested, text_of


def test_readme_ruff_passes():
    pytest.importorskip("ruff")
    p = python("-m", "ruff", "check", HERE)
    assert p.returncode == 0, p.stdout


def test_config_every_key_is_read_and_tested():
    """A key that no code reads, or no test sets, is a defect."""
    code = text_of("[!t]*.py", "train.py", "data/*.py")
    tests = text_of("test_fsdp.py", "tests/*.py", "config/*.py")
    ours = [f for f in keys("gpt2") if f.name != "momentum"]  # which extras/muon.py reads
    require_read_and_tested(ours, code, tests)


def test_zero_accounting_of_the_docs_is_the_papers():
    """Rajbhandari et al. 2020, figure 1: 7.5B parameters on 64 GPUs, 2 + 2 + 12 bytes of each."""
    P, N = 7.5e9, 64
    with open(os.path.join(HERE, "docs", "fsdp.md")) as f:
        text = f.read()
    for size, said in ((16 * P, "120"), ((4 + 12 / N) * P, "31.4"), ((2 + 14 / N) * P, "16.6"),
                       (16 / N * P, "1.9")):
        assert round(size / 1e9, 1) == float(said)
        assert re.search(rf"(?<![\d.]){said}(?!\d)", text), said

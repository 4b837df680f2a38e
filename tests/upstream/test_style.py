"""
This repository's own code and keys. A fork deletes this directory.

    python -m pytest -q tests/upstream/test_style.py
"""

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

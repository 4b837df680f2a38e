"""What test_fsdp.py and tests/ share: pytest finds it here."""

import os
import sys

import pytest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "tests"))
from harness import make_data  # noqa: E402

import configurator  # noqa: E402


@pytest.fixture
def models(tmp_path, monkeypatch):
    """tmp_path, as if the files in it lay beside model.py: for --model, also of forked ranks."""
    (tmp_path / "model.py").symlink_to(os.path.join(configurator.HERE, "model.py"))
    monkeypatch.setattr(configurator, "HERE", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def pytest_addoption(parser):
    parser.addoption("--model", action="append", help="for tests/test_contract.py: a model file's "
                     "name, as train.py takes it; again for another")
    parser.addoption("--keys", action="append", help="for tests/test_contract.py: small values of "
                     "the file's own keys, e.g. --keys=n_inner=50")


@pytest.fixture(scope="session")
def tmp(tmp_path_factory):
    """A directory for all tests of a session; its data set `toy` has 67 symbols and a pattern."""
    path = tmp_path_factory.mktemp("fsdp")
    make_data(str(path / "toy"))
    return str(path)

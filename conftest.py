"""What test_fsdp.py and tests/ share: pytest finds it here."""

import os
import sys

import pytest

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "tests"))
sys.path.append(os.path.join(HERE, "extras", "tests"))  # for extras/tests/upstream
import harness  # noqa: E402, F401  before PyTorch, which reads what it sets
from training import make_data  # noqa: E402

import configurator  # noqa: E402


@pytest.fixture
def models(tmp_path, monkeypatch):
    """tmp_path, as if the files in it lay beside model.py: for --model, also of forked ranks."""
    for name in ("model.py", "optimizer.py", "extras"):
        path = os.path.join(configurator.HERE, name)
        if os.path.exists(path):  # a fork may have deleted extras/
            (tmp_path / name).symlink_to(path)
    monkeypatch.setattr(configurator, "HERE", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:  # another test's file may have the same name
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def pytest_configure(config):
    config.addinivalue_line(
        "markers", "slow: what README's command for the tests leaves out; pytest -m slow runs it")


def pytest_addoption(parser):
    parser.addoption("--model", action="append", help="for tests/test_contract.py: a model file's "
                     "name, as train.py takes it; again for another")
    parser.addoption("--keys", action="append", help="for tests/test_contract.py: small values of "
                     "the file's own keys, e.g. --keys=n_inner=50")
    parser.addoption("--optimizer", action="append", help="for tests/test_contract.py: train "
                     "with it; a name, as train.py takes it")
    parser.addoption("--ranks", action="store_true", help="for tests/test_contract.py: train the "
                     "file too, on 1 to 4 processes in every mode")


@pytest.fixture(scope="session")
def tmp(tmp_path_factory):
    """A directory for all tests of a session; its data set `toy` has 67 symbols and a pattern."""
    path = tmp_path_factory.mktemp("fsdp")
    make_data(str(path / "toy"))
    return str(path)

"""
extras/ as a whole: its configs work, and the project stands without it.

    python -m pytest -q extras/tests/test_house.py
"""

import os
import shutil
from glob import glob

import pytest
from harness import HERE, copied, python
from test_readme import run_two_steps

from configurator import load_config

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
        run_two_steps(tmp, os.path.join(HERE, "extras", "config", "llama2_7b.py"), **own)
        small.update(base=base)
    run_two_steps(tmp, path, **small)


@pytest.mark.slow
def test_house_stands_without_extras(tmp_path):
    """As after `rm -r extras tests/upstream`: all is collected, and these quick tests run."""
    names = ("config", "contract_examples", "metrics", "pages", "sample", "train")
    chosen = [f"tests/test_{name}.py" for name in names]
    copy = copied(tmp_path / "copy")
    shutil.rmtree(copy / "extras")
    shutil.rmtree(copy / "tests/upstream")
    command = ("-m", "pytest", "-q", "-n", "0", "-m", "not slow")
    for more in (["--co"], chosen):
        p = python(*command, *more, cwd=copy, env={"PYTHONPATH": str(copy)}, timeout=1200)
        assert p.returncode == 0, p.stdout[-5000:]

"""
The contract of a model file (tests/test_contract.py), asked of llama.py, and one test more: a plan
of the model counts the bytes that there are.

    python -m pytest -q extras/tests/test_contract_of_extras.py
    python -m pytest -q extras/tests/test_contract_of_extras.py --model=NAME --ranks    # of yours
"""

import formulas
import pytest
from test_contract import (  # noqa: F401  pytest finds them here
    pytest_generate_tests,
    small,
    test_contract_modes,
    test_contract_of_each_build,
    test_contract_of_the_file,
    test_contract_resume,
)

import train
from configurator import resolve
from extras.rehearse import KINDS, rehearse
from ranks import World

pytestmark = pytest.mark.slow

USUAL = ["llama"]  # without --model


def test_contract_plan(tmp, model):
    """A rehearsed step keeps the parameters and gradients that there are."""
    world = World(size=2, local_size=2)
    cfg = resolve(small(tmp, model), world, distributed=True)
    device, _ = formulas.kept(train.meta_model(cfg), cfg, world)
    timeline, events = rehearse(cfg, world)
    [clipping] = [event for event in events if not event.label]
    held = dict(zip(KINDS, timeline[clipping.row]))
    assert held["parameters"] == device["parameters"]
    assert held["gradients"] == pytest.approx(device["gradients"], rel=0.02)

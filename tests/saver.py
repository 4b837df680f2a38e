"""A run's Saver on its own, and what a run begins with, for the tests of checkpoints."""

import torch
from torch.utils._pytree import keystr, tree_flatten_with_path
from training import started, tiny

import checkpoint
import saves
import train
from configurator import Config, load_config, resolve
from optimizer import LossScaler
from ranks import World, from_rank0

NO_SCALER = LossScaler(Config(dtype="float32"))


def claimed(run, out, source=None, resumed=False):
    """The Saver of a run; from scratch without a source."""
    directory = saves.RunDirectory(str(out))
    run_id = from_rank0(run.world, lambda: directory.claim(source, resumed))
    return saves.Saver(directory.path, run_id, run.cfg, run.world, source)


def save(saver, run, step):
    saver.best_val_loss = 2.5
    saver.save(run.model, run.optimizer, NO_SCALER, step)


def found(out):
    return checkpoint.find(str(out), World())


def resumed(tmp, out, **overrides):
    """The model and optimizer that a run with init_from=resume begins with."""
    keys = {"out_dir": str(out), "init_from": "resume", **overrides}
    cfg = resolve(tiny(tmp, **keys), World())
    cfg.given = load_config([f"--{key}={value}" for key, value in keys.items()]).given
    cfg, source, _ = started(cfg, World())
    return train.build(train.meta_model(cfg), cfg, World(), source)


def assert_equal(a, b):
    """Two states, bit for bit, with all that is in them."""
    ours, theirs = ({keystr(path): leaf for path, leaf in tree_flatten_with_path(state)[0]}
                    for state in (a, b))
    assert ours.keys() == theirs.keys()
    for where, x in ours.items():
        y = theirs[where]
        assert type(x) is type(y), where
        assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y, where

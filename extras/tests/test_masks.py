"""
Masks: which tokens are learned (extras/masked.py), and the mean over those of a whole step.

    python -m pytest -q extras/tests/test_masks.py
"""

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from harness import on_ranks, refused, values
from training import assert_same_weights, built, make_data, plain_gpt, plain_training, steps, tiny

import fsdp
import train
from data import loader
from extras.masked import MaskedFiles
from optimizer import LossScaler
from ranks import World

T = 16  # the block_size of TINY
STEPS = 4
SAMPLES = 8 * STEPS  # a step has 8


def uneven(n, samples):
    """A mask for n windows: how many targets count in each of these training samples."""
    counts = [
        16, 0, 9, 0, 16, 0, 2, 0,  # of 2 ranks the second has none
        16, 1, 5, 0, 0, 0, 16, 0,  # here it has one
        0, 0, 0, 0, 0, 3, 0, 0,
        0, 0, 0, 0, 0, 0, 0, 0]  # nobody has any
    mask = np.zeros(n * T + 1, np.uint8)
    for window, count in zip(samples, counts):
        mask[window * T + 1:][:T][T - count:] = 1
    return mask


@pytest.fixture(scope="module")
def masked(tmp_path_factory):
    """A directory whose data set `toy` has masks."""
    path = tmp_path_factory.mktemp("masks")
    make_data(str(path / "toy"), n=2000)
    draw = np.random.default_rng(0)
    for split in ("train", "val"):
        tokens = len(np.fromfile(path / f"toy/{split}.bin", np.uint16))
        mask = (draw.random(tokens) < 0.2).astype(np.uint8)
        if split == "train":
            n = (tokens - 1) // T
            mask[:n * T + 1] = uneven(n, loader.train_order(n, 1337, 0, SAMPLES))
        else:
            mask[:5 * T] = 0  # these windows have no target
        mask.tofile(path / f"toy/{split}.mask")
    return str(path)


def windows_of(tmp, split):
    """Inputs and targets of all windows, by another way than the loader's."""
    tokens = np.fromfile(f"{tmp}/toy/{split}.bin", np.uint16).astype(np.int64)
    learned = np.fromfile(f"{tmp}/toy/{split}.mask", np.uint8) == 1
    targets = np.where(learned, tokens, -1)
    starts = range(0, len(tokens) - T, T)
    x = np.stack([tokens[i:i + T] for i in starts])
    y = np.stack([targets[i + 1:i + T + 1] for i in starts])
    return torch.from_numpy(x), torch.from_numpy(y)


def test_each_shard_has_a_mask_of_its_own(masked, tmp_path):
    """Cut in two, behind a window's last target, the windows are what they were."""
    cut = 6 * T
    for kind in ("bin", "mask"):
        item = np.uint16 if kind == "bin" else np.uint8
        whole = np.fromfile(f"{masked}/toy/val.{kind}", item)
        whole[:cut + 1].tofile(tmp_path / f"x_val_1.{kind}")
        whole[cut:].tofile(tmp_path / f"x_val_2.{kind}")
    x, y = windows_of(masked, "val")
    files = MaskedFiles(tmp_path, "val", T, 67)
    ours = files.batch(range(len(files), 2 * len(files)))  # in later epochs, too
    assert torch.equal(ours[0], x[:len(files)]) and torch.equal(ours[1], y[:len(files)])
    assert files.counts.tolist() == (y[:len(files)] != -1).sum(1).tolist()
    assert len(files.files) == 2 and len({*files.counts.tolist()}) > 2


# ---------- the mean over the targets of a step -------------------------------

BIG = dict(
    eval_iters=1000, batch_size=8, gradient_accumulation_steps=1, max_iters=STEPS, bias=False)
SMALL = dict(
    eval_iters=1000, batch_size=1, gradient_accumulation_steps=8, bias=False)
ALONE = {"big": BIG, "small": SMALL}
ON_TWO = {
    "chunks": dict(SMALL, strategy="full_shard", loss_chunks=3),
    "scaled": dict(SMALL, strategy="ddp", scale=1024.0),
}
for strategy in ("ddp", "shard_grad_op", "full_shard"):
    for sync in ("every", "last"):
        ON_TWO[f"{strategy} {sync}"] = dict(SMALL, strategy=strategy, grad_sync=sync)


def case_run(tmp, name, scale=0.0, **keys):
    """[(loss, norm) of each step]. The weights before the last step go to a file."""
    run = built(tmp, **keys)
    scaled = replace(run.cfg, dtype="float16", loss_scale=scale) if scale else run.cfg
    scaler = LossScaler(scaled)
    said = []
    for step in range(STEPS):
        if step == STEPS - 1:
            weights = {key: fsdp.gather_full(p) for key, p in run.model.named_parameters()}
            if run.world.rank == 0:
                torch.save(weights, f"{tmp}/{name}.pt")
        loss, norm = steps(run, first=step, scaler=scaler)
        said.append((train.all_reduce_mean_(torch.tensor(loss), run.world).item(), norm))
    return said


def case_evaluation(tmp):
    run = built(tmp, **{**SMALL, "batch_size": 2}, strategy="full_shard")
    return train.evaluate(run.wrapped, run.batches, run.cfg, run.world)


@pytest.fixture(scope="module")
def results(masked):
    cases = {name: (case_run, dict(tmp=masked, name=name, **keys))
             for name, keys in ON_TWO.items()}
    cases["evaluation"] = case_evaluation, dict(tmp=masked)
    return on_ranks(2, cases)


@pytest.fixture(scope="module")
def plain(masked):
    """One big batch a step, in plain PyTorch, whose mean is over its targets that count; of
    the last step, which has none, nothing."""
    losses, norms, weights, _ = plain_training(tiny(masked, **{**BIG, "max_iters": STEPS - 1}))
    return losses, norms, weights


@pytest.mark.parametrize("name", [*ALONE, *ON_TWO])
def test_a_step_is_the_mean_over_its_targets_however_they_are_divided(
        masked, results, plain, name):
    if name in ALONE:
        ranks = [case_run(masked, name, **ALONE[name])]
    else:
        ranks = values(results, name)
    losses, norms, expected = plain
    for said in ranks:  # the same on each
        found_losses, found_norms = zip(*said)
        assert found_losses[:-1] == pytest.approx(losses, rel=1e-6)
        assert found_norms[:-1] == pytest.approx(norms, rel=1e-6)
        assert found_losses[-1] == found_norms[-1] == 0  # no target: no gradient, and no NaN
    weights = torch.load(f"{masked}/{name}.pt")
    assert_same_weights(weights, {key: expected[key] for key in weights}, 1e-6)


def test_an_evaluation_is_the_mean_over_the_targets_of_its_windows(masked, results):
    said = values(results, "evaluation")
    gpt = plain_gpt(bias=False)
    for split in ("train", "val"):
        with torch.no_grad():
            expected = gpt(*windows_of(masked, split))[1].item()
        assert [losses[split] for losses in said] == pytest.approx([expected] * 2, rel=1e-6)


def test_masks_that_do_not_fit_are_refused(tmp, tmp_path):
    data = tmp_path / "toy"
    shutil.copytree(f"{tmp}/toy", data)

    def line(**keys):
        return refused(loader.open_batches, tiny(str(tmp_path), **keys), World())

    for n in (5399, 5401):
        (data / "train.mask").write_bytes(b"\1" * n)
        assert "train.mask" in line() and "one byte for each of 5,400 tokens" in line()
    (data / "train.mask").write_bytes(b"\1" * 5400)
    assert "val.mask: it is missing" in line()
    (data / "val.mask").write_bytes(b"\1" * 600)
    assert loader.open_batches(tiny(str(tmp_path)), World())
    (data / "meta.json").write_text('{"vocab_size": 67, "window": 32}')
    assert "block_size=16" in line() and "--block_size=32" in line()

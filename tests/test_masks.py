"""
Masks: which tokens are learned (data/files.py), and the mean over those of a whole step.

    python -m pytest -q tests/test_masks.py
"""

import functools
import os
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from harness import (
    TINY,
    assert_same_weights,
    built,
    make_data,
    on_ranks,
    plain_gpt,
    plain_training,
    refused,
    steps,
    tiny,
    values,
)

import fsdp
import train
from data import loader
from optimizer import LossScaler
from ranks import World

T = TINY["block_size"]
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


def test_targets_that_the_mask_leaves_out_are_ignored(masked):
    x, y = windows_of(masked, "train")
    files = loader.TokenFiles(f"{masked}/toy", "train", T, 67)
    ours = files.batch(range(len(x), 2 * len(x)))  # in later epochs, too
    assert torch.equal(ours[0], x) and torch.equal(ours[1], y)
    assert files.counts.tolist() == (y != -1).sum(1).tolist()


def test_each_shard_has_a_mask_of_its_own(masked, tmp_path):
    """Cut in two, behind a window's last target, the windows are what they were."""
    cut = 6 * T
    for kind in ("bin", "mask"):
        item = np.uint16 if kind == "bin" else np.uint8
        whole = np.fromfile(f"{masked}/toy/val.{kind}", item)
        whole[:cut + 1].tofile(tmp_path / f"x_val_1.{kind}")
        whole[cut:].tofile(tmp_path / f"x_val_2.{kind}")
    x, y = windows_of(masked, "val")
    files = loader.TokenFiles(tmp_path, "val", T, 67)
    ours = files.batch(range(len(files)))
    assert torch.equal(ours[0], x[:len(files)]) and torch.equal(ours[1], y[:len(files)])
    assert files.counts.tolist() == (y[:len(files)] != -1).sum(1).tolist()
    assert len(files.files) == 2 and len({*files.counts.tolist()}) > 2


def test_masks_are_looked_at_where_an_evaluation_reads(tmp, tmp_path):
    """Of its eval_iters * batch_size windows one with a target is enough, but it needs one."""
    data = tmp_path / "toy"
    shutil.copytree(f"{tmp}/toy", data)
    n = 599 // T
    first, second, *_ = loader.eval_order(n, 4)
    assert second not in loader.eval_order(n, 2)
    for window, accepted in ((second, True), (second + 1, False)):
        mask = np.zeros(600, np.uint8)
        mask[window * T + 1:][:T] = 1
        mask.tofile(data / "val.mask")
        np.ones(5400, np.uint8).tofile(data / "train.mask")
        cfg = tiny(str(tmp_path), eval_iters=2, batch_size=2)
        if accepted:
            loader.Batches(cfg, World())
        else:
            assert "leaves out every token" in refused(loader.Batches, cfg, World())


# ---------- the mean over the targets of a step -------------------------------

BIG = dict(
    eval_iters=1000, batch_size=8, gradient_accumulation_steps=1, max_iters=STEPS, bias=False)
SMALL = dict(
    eval_iters=1000, batch_size=1, gradient_accumulation_steps=8, bias=False)
HYBRID = dict(strategy="hybrid_shard", shard_group_size=2)
CASES = {  # {ranks: {name: keys}}
    1: {"big": BIG, "small": SMALL},
    2: {f"{strategy} {sync}": dict(SMALL, strategy=strategy, grad_sync=sync)
        for strategy in ("ddp", "shard_grad_op", "full_shard") for sync in ("every", "last")},
    4: {f"hybrid {sync}": dict(SMALL, **HYBRID, grad_sync=sync) for sync in ("every", "last")},
}
CASES[2]["chunks"] = dict(SMALL, strategy="full_shard", loss_chunks=3)
CASES[2]["scaled"] = dict(SMALL, strategy="ddp", scale=1024.0)
CASES[4]["evaluation"] = dict(SMALL, **HYBRID, batch_size=2)


def case_run(tmp, name, scale=0.0, **keys):
    """[(loss, norm) of each step], or an evaluation instead. The weights before the last step
    go to a file."""
    run = built(tmp, **keys)
    if name == "evaluation":
        return train.evaluate(run.wrapped, run.batches, run.cfg, run.world)
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


@pytest.fixture(scope="module")
def results(masked):
    @functools.cache
    def get(world):
        cases = {name: (case_run, dict(tmp=masked, name=name, **keys))
                 for name, keys in CASES[world].items()}
        return on_ranks(world, cases)
    return get


@pytest.fixture(scope="module")
def plain(masked):
    """One big batch a step, in plain PyTorch, whose mean is over its targets that count; of
    the last step, which has none, nothing."""
    losses, norms, weights, _ = plain_training(tiny(masked, **{**BIG, "max_iters": STEPS - 1}))
    return losses, norms, weights


@pytest.mark.parametrize("world, name", [
    (world, name) for world in CASES for name in CASES[world] if name != "evaluation"])
def test_a_step_is_the_mean_over_its_targets_however_they_are_divided(
        masked, results, plain, world, name):
    ranks = values(results(world), name)
    losses, norms, expected = plain
    for said in ranks:  # the same on each
        found_losses, found_norms = zip(*said)
        assert found_losses[:-1] == pytest.approx(losses, rel=1e-6)
        assert found_norms[:-1] == pytest.approx(norms, rel=1e-6)
        assert found_losses[-1] == found_norms[-1] == 0  # no target: no gradient, and no NaN
    weights = torch.load(f"{masked}/{name}.pt")
    assert_same_weights(weights, {key: expected[key] for key in weights}, 1e-6)


def test_an_evaluation_is_the_mean_over_the_targets_of_its_windows(masked, results):
    said = values(results(4), "evaluation")
    gpt = plain_gpt(bias=False)
    for split in ("train", "val"):
        with torch.no_grad():
            expected = gpt(*windows_of(masked, split))[1].item()
        assert [losses[split] for losses in said] == pytest.approx([expected] * 4, rel=1e-6)


def test_without_masks_every_number_is_that_of_the_mean_of_means(tmp, tmp_path):
    """Bit for bit; a mask of ones changes nothing either. 9 micro-batches, 15 tokens: no power
    of two hides a rounding."""
    keys = dict(block_size=15, gradient_accumulation_steps=9, grad_clip=0.0, eval_iters=1000)
    shutil.copytree(f"{tmp}/toy", tmp_path / "toy")
    for split in ("train", "val"):
        tokens = np.fromfile(tmp_path / f"toy/{split}.bin", np.uint16)
        np.ones(len(tokens), np.uint8).tofile(tmp_path / f"toy/{split}.mask")
    found = []
    for path in (tmp, str(tmp_path)):
        run = built(path, **keys)
        evaluation = train.evaluate(run.wrapped, run.batches, run.cfg, run.world)
        found.append((evaluation, steps(run)))
    assert found[0] == found[1]

    model = plain_gpt(block_size=15)
    total = torch.zeros(())
    for micro in range(9):
        x, y, _ = run.batches.get(0, micro)
        loss = model(x, y)[1] / 9
        loss.backward()
        total += loss.detach()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    assert found[0][1] == (total.item(), norm.item())
    files = run.batches.files["val"]
    total = weights = 0.0
    with torch.no_grad():
        for i in range(0, len(files), 2):
            windows = range(i, min(i + 2, len(files)))
            total += (model(*files.batch(windows))[1] * len(windows)).double()
            weights += len(windows)
    assert found[0][0]["val"] == pytest.approx((total / weights).item(), rel=1e-7)



def test_masks_that_do_not_fit_are_refused(tmp, tmp_path):
    data = tmp_path / "toy"
    shutil.copytree(f"{tmp}/toy", data)

    def line(**keys):
        return refused(loader.Batches, tiny(str(tmp_path), **keys), World())

    for n in (5399, 5401):
        (data / "train.mask").write_bytes(b"\1" * n)
        assert "train.mask" in line() and f"{n:,} bytes for 5,400 tokens" in line()
    (data / "train.mask").write_bytes(b"\1" * 5400)
    (data / "val.mask").write_bytes(b"\0" * 600)
    assert "leaves out every token" in line() and " val " in line()
    for name in ("val", "train"):
        os.remove(data / f"{name}.mask")
    shutil.copy(data / "train.bin", data / "x_train_1.bin")
    shutil.move(data / "train.bin", data / "x_train_2.bin")
    (data / "x_train_2.mask").write_bytes(b"\1" * 5400)
    assert "x_train_1.mask" in line()
    (data / "meta.json").write_text('{"vocab_size": 67, "window": 32}')
    assert "block_size=16" in line() and "--block_size=32" in line()
    assert "x_train_1.mask" in line(block_size=32)

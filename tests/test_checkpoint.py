"""
Checkpoints: what one run writes another reads, at any world size and strategy, bit for bit.

    python -m pytest -q tests/test_checkpoint.py

Damage is in test_damage.py, kills and full disks in test_faults.py.
"""

import math
import os
import re
import shutil
import sys
import time
import zlib
from concurrent import futures
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from unittest.mock import MagicMock, patch

import pytest
import torch
from harness import (
    NO_BATCHES,
    arguments,
    assert_same_weights,
    built,
    launch,
    losses,
    on_ranks,
    power_cut,
    read_ckpt,
    read_metrics,
    refused,
    resident,
    run_training,
    script,
    started,
    steps,
    tiny,
    values,
)
from torch.distributed import checkpoint as dcp
from torch.distributed.tensor import DTensor
from torch.utils._pytree import keystr, tree_flatten_with_path

import checkpoint
import saves
import train
from configurator import Config, load_config, resolve
from model import GPT, GPTConfig
from optimizer import LossScaler
from ranks import World, from_rank0

FREEZE = r"wte|h\.0\.(ln_1|mlp)"  # parts of units: frozen and trained parameters are mixed
NO_SCALER = LossScaler(Config(dtype="float32"))


def claimed(run, out, source=None, resumed=False):
    """The Saver of a run; from scratch without a source."""
    directory = saves.RunDirectory(str(out))
    run_id = from_rank0(run.world, lambda: directory.claim(source, resumed))
    return saver_of(run, directory.path, run_id, source, resumed)


def saver_of(run, path, run_id, source=None, resumed=False):
    def report(*times):
        pass

    return saves.Saver(path, run_id, run.cfg, run.world, source, resumed, run.batches, report)


def locked(out):
    """The RunDirectory of another run there, which has only the lock."""
    directory = saves.RunDirectory(str(out))
    directory.lock()
    return directory


def save(saver, run, step, improved=False):
    saver.best_val_loss = 2.5
    saver.save(run.model, run.optimizer, NO_SCALER, step, improved)


def found(out):
    return checkpoint.find(str(out), World())


def state_of(out):
    """{key: tensor} of the newest checkpoint: weights and optimizer state."""
    source = found(out)
    return {key: source.whole(key) for key in source.shapes}


def assert_equal(a, b):
    """Two states, bit for bit, with all that is in them."""
    ours, theirs = ({keystr(path): leaf for path, leaf in tree_flatten_with_path(state)[0]}
                    for state in (a, b))
    assert ours.keys() == theirs.keys()
    for where, x in ours.items():
        y = theirs[where]
        assert type(x) is type(y), where
        assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y, where


def snapshot(out):
    """{path: bytes} of everything below out."""
    paths = filter(Path.is_file, Path(out).rglob("*"))
    return {str(path.relative_to(out)): path.read_bytes() for path in paths}


def make_full(out):
    p = script("saves.py", "full", out)
    assert p.returncode == 0, p.stderr
    return p.stdout


# -----------------------------------------------------------------------------
# resuming


CHAIN = [  # ranks, strategy, kind of checkpoint, other keys
    (2, "full_shard", "full", {}),
    (3, "shard_grad_op", "sharded", dict(cpu_offload=0.5)),
    (1, "", "full", {}),
    (4, "hybrid_shard", "sharded", dict(shard_group_size=2)),
    (2, "ddp", "sharded", {}),
    (2, "full_shard", "full", {}),
]


def test_checkpoint_chain_across_world_sizes_and_strategies(tmp):
    """Every strategy, both kinds, offloaded on the way: the losses of one uninterrupted run."""
    whole, chain = os.path.join(tmp, "whole"), os.path.join(tmp, "chain")
    launch(1, arguments(tmp, whole, max_iters=12))
    for i, (world, strategy, kind, more) in enumerate(CHAIN):
        run = dict(strategy=strategy, checkpoint=kind, init_from="auto", **more)
        launch(world, arguments(tmp, chain, max_iters=2 * (i + 1), **run))
    assert losses(chain) == pytest.approx(losses(whole), rel=1e-5)
    assert_same_weights(read_ckpt(chain)["model"], read_ckpt(whole)["model"], 1e-4)
    rows = read_metrics(chain)
    assert [row["iter"] for row in rows if "loss" in row] == [*range(12)]  # without duplicates
    assert {row["run"] for row in rows} == {found(chain).header["run"]}  # it is one run


@pytest.mark.parametrize("world, kind", [(1, "full"), (2, "full"), (2, "sharded")])
def test_checkpoint_resume_is_bitwise(tmp, world, kind):
    """12 = 6 + 6 steps, with dropout, evaluation at another interval."""
    whole, parts = (os.path.join(tmp, f"resume-{world}-{kind}-{name}")
                    for name in ("whole", "parts"))
    run = dict(checkpoint=kind, gradient_accumulation_steps=2, dropout=0.1)
    launch(world, arguments(tmp, whole, max_iters=12, eval_interval=12, **run))
    launch(world, arguments(tmp, parts, max_iters=6, eval_interval=4, **run))
    run.update(init_from="resume")
    p = launch(world, arguments(tmp, parts, max_iters=12, eval_interval=5, **run))
    assert "at step 6" in p.stdout
    assert losses(parts) == losses(whole)
    if kind == "sharded":
        kept = sorted(d for d in os.listdir(parts) if d.startswith("step-"))
        assert kept == ["step-000000010", "step-000000012"]  # keep_checkpoints=2
    ours = state_of(parts)
    assert_equal(ours, state_of(whole))
    kinds = {key.partition(".")[0] for key in ours}
    assert kinds == {"model", "step", "exp_avg", "exp_avg_sq"}


def test_checkpoint_best_is_that_of_the_validation_loss(tmp, monkeypatch):
    """A resumed run knows it. One that saves at every evaluation does too, and replaces it."""
    said = iter([(5.0, 5.0), (6.0, 4.0), (1.0, 9.0), (0.5, 4.5),  # of training and validation
                 (0.5, 4.2), (0.5, 4.1), (0.5, 4.2), (0.5, 4.1)])
    monkeypatch.setattr(train, "evaluate", lambda *_: dict(zip(("train", "val"), next(said))))
    run = dict(eval_interval=1, init_from="auto")
    for max_iters, always, step in ((3, False, 1), (2, False, 1), (2, True, 2)):
        run_training(tmp, "by-val", max_iters=max_iters, always_save_checkpoint=always, **run)
        saved = read_ckpt(os.path.join(tmp, "by-val"))
        assert (saved["iter_num"], saved["best_val_loss"]) == (step, 4.0)


def test_checkpoint_newest_of_all_kinds_is_resumed(sound, tmp_path):
    """ckpt.pt is the best, last.pt where a signal stopped, and sharded ones beside them. Of the
    same step a full one is taken."""
    shutil.copytree(sound, tmp_path, dirs_exist_ok=True)
    ckpt = full_one(sound, tmp_path / "other")
    for name, step, expected in (
            ("ckpt.pt", 1, "step-000000004"), ("ckpt.pt", 4, "ckpt.pt"), ("ckpt.pt", 5, "ckpt.pt"),
            ("last.pt", 3, "ckpt.pt"), ("last.pt", 6, "last.pt")):
        torch.save({**ckpt, "iter_num": step}, tmp_path / name)
        assert found(tmp_path).path == str(tmp_path / expected)


def test_checkpoint_has_the_loss_scale_of_float16(tmp, tmp_path):
    """A resumed run goes on with it, and does not start over from 65,536."""
    out = str(tmp_path / "out")
    launch(1, arguments(tmp, out, max_iters=2, dtype="float16"))
    ckpt = read_ckpt(out)
    ckpt["scaler"] = dict(scale=128.0, _growth_tracker=70)
    torch.save(ckpt, f"{out}/ckpt.pt")
    run = dict(max_iters=3, dtype="float16", init_from="resume")
    launch(1, arguments(tmp, out, **run))
    scales = [row["loss_scale"] for row in read_metrics(out) if "loss" in row]
    assert scales[2] == 128.0
    assert read_ckpt(out)["scaler"] == dict(scale=128.0, _growth_tracker=71)
    # and one that has nothing left to do leaves it all as it is
    before = snapshot(out)["ckpt.pt"]
    assert "max_iters=3" in launch(1, arguments(tmp, out, **run)).stdout
    assert len(losses(out)) == 3 and snapshot(out)["ckpt.pt"] == before


# -----------------------------------------------------------------------------
# what is in the files


@pytest.fixture(scope="module")
def sound(tmp):
    """A directory with sharded checkpoints of steps 2 and 4, by two ranks."""
    out = os.path.join(tmp, "sound")
    run = dict(max_iters=4, eval_interval=2, checkpoint="sharded", gradient_accumulation_steps=2)
    launch(2, arguments(tmp, out, **run))
    return out


def full_one(sharded, out):
    """The content of a ckpt.pt, made of the newest one there."""
    shutil.copytree(sharded, out)
    make_full(out)
    shutil.rmtree(out / "step-000000004")
    return read_ckpt(out)


def resumed(tmp, out, **overrides):
    """The model and optimizer that a run with init_from=resume begins with."""
    keys = {"out_dir": str(out), "init_from": "resume", **overrides}
    given = load_config([f"--{key}={value}" for key, value in keys.items()]).given
    cfg = resolve(tiny(tmp, **keys), World())
    cfg.given = given
    cfg, source, _ = started(cfg, World())
    return train.build(train.meta_model(cfg), cfg, World(), source)


def test_checkpoint_has_nanogpts_layout(tmp):
    out = os.path.join(tmp, "layout")
    launch(1, arguments(tmp, out, max_iters=2, bias=False))
    ckpt = read_ckpt(out)
    theirs = {"model", "optimizer", "model_args", "iter_num", "best_val_loss", "config"}
    assert theirs < ckpt.keys()
    assert ckpt["iter_num"] == 2 and ckpt["config"]["n_layer"] == 3
    assert ckpt["meta"] == {"vocab_size": 67}  # ours, for sample.py
    head, wte = ckpt["model"]["lm_head.weight"], ckpt["model"]["transformer.wte.weight"]
    assert head.data_ptr() == wte.data_ptr()  # tied: stored once
    # what nanoGPT does with it: strict load, an AdamW with its two groups, integer-indexed state
    model = GPT(GPTConfig(**ckpt["model_args"]))
    model.load_state_dict(ckpt["model"])
    params = list(model.parameters())
    matrices, vectors = [p for p in params if p.dim() >= 2], [p for p in params if p.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": vectors}])
    optimizer.load_state_dict(ckpt["optimizer"])
    assert all(optimizer.state[p]["exp_avg"].shape == p.shape for p in params)
    # and by whose name: theirs is the order of these groups
    names = {p: name for name, p in model.named_parameters()}
    assert ckpt["param_names"] == [names[p] for p in matrices + vectors]


def test_checkpoint_of_nanogpt_is_resumed(tmp):
    """Theirs: prefixes of DDP and compile, causal masks, no parameter names; optimizer included."""
    out, whole = os.path.join(tmp, "from-nanogpt"), os.path.join(tmp, "from-nanogpt-whole")
    launch(1, arguments(tmp, out, max_iters=3, bias=False))
    ckpt = read_ckpt(out)
    weights = {"module._orig_mod." + name: tensor for name, tensor in ckpt["model"].items()}
    name, tensor = weights.popitem()
    weights[name.replace("module._orig_mod.", "_orig_mod.module.")] = tensor  # compiled around DDP
    for i in range(3):
        weights[f"module._orig_mod.transformer.h.{i}.attn.bias"] = torch.ones(1, 1, 16, 16)
    theirs = {key: ckpt[key] for key in ("optimizer", "model_args", "iter_num", "config")}
    theirs["config"] = {"learning_rate": 1e-3}  # neither a model nor an optimizer is named
    theirs.update(model=weights, best_val_loss=torch.tensor(9.0))
    torch.save(theirs, os.path.join(out, "ckpt.pt"))
    os.remove(os.path.join(out, "metrics.jsonl"))  # they write none
    launch(2, arguments(tmp, out, max_iters=6, bias=False, init_from="resume"))
    launch(1, arguments(tmp, whole, max_iters=6, bias=False))
    assert losses(out) == pytest.approx(losses(whole)[3:], rel=1e-5)
    assert read_ckpt(out)["run"]


def noted(calls, name, function):
    """The function. It notes in `calls` that it has ended."""
    def call(*args):
        result = function(*args)
        calls.append(name)
        return result
    return call


def case_both_kinds(tmp, out, freeze):
    """The same state, saved full and sharded; what loading each calls, in order."""
    run = built(tmp, strategy="full_shard", freeze=freeze)
    steps(run)
    saver = claimed(run, f"{out}/direct")
    save(saver, run, 1)
    saver.finish()
    full = checkpoint.find(f"{out}/direct", run.world)
    saver.out_dir, saver.cfg = out, replace(run.cfg, checkpoint="sharded")
    plans, merge = [], dcp.DefaultSavePlanner.create_global_plan

    def merged(planner, of_ranks):
        plans.append([len(plan.items) > 0 for plan in of_ranks])
        return merge(planner, of_ranks)

    with patch.object(dcp.DefaultSavePlanner, "create_global_plan", merged):
        for step in (0, 1):
            save(saver, run, step)
            saver.finish()
    if run.world.rank == 0:  # the second time ranks send it no plan, since they are the same
        assert plans == [[True] * run.world.size, [False] * run.world.size]
    calls, wait = [], train.patient_barrier
    for source in (full, checkpoint.find(out, run.world)):
        with (patch.object(checkpoint, "load", noted(calls, "read", checkpoint.load)),
              patch.object(train, "patient_barrier", noted(calls, "wait", wait))):
            train.set_values(run.model, run.optimizer, source, run.cfg.seed, run.world)
    return calls


def test_checkpoint_sharded_made_full_equals_the_full_one(tmp, tmp_path):
    cases = {}
    for name, freeze in (("all", ""), ("some", FREEZE)):
        kwargs = dict(tmp=tmp, out=str(tmp_path / name), freeze=freeze)
        cases[name] = (case_both_kinds, kwargs)
    results = on_ranks(2, cases)
    for name in cases:
        # NCCL would end a collective, in which the slowest disk keeps ranks waiting.
        assert values(results, name) == 2 * [2 * ["read", "wait"]]
        assert "step-000000001" in make_full(tmp_path / name)
        ours, direct = read_ckpt(tmp_path / name), read_ckpt(tmp_path / name / "direct")
        assert ours["config"].pop("checkpoint") == "sharded"
        assert direct["config"].pop("checkpoint") == "full"
        for group in direct["optimizer"]["param_groups"]:
            group["betas"] = list(group["betas"])  # JSON has no tuples
        assert_equal(ours, direct)
        assert len(ours["optimizer"]["state"]) == len(ours["param_names"])  # of what trains
        head, wte = ours["model"]["lm_head.weight"], ours["model"]["transformer.wte.weight"]
        assert head.data_ptr() == wte.data_ptr()


def test_checkpoint_that_is_sharded_is_read_by_rows(sound, monkeypatch):
    """As PyTorch's own reader reads it; and a few rows without the other rank's file."""
    path = os.path.join(sound, "step-000000004")
    source = checkpoint.open_sharded(path)
    whole = {key: source.whole(key) for key in source.shapes}
    theirs = {key: torch.empty_like(t) for key, t in whole.items()}
    dcp.load(theirs, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    assert_equal(whole, theirs)
    read, opened = [], open

    def noted_open(file, *mode):
        read.append(os.path.basename(file))
        return opened(file, *mode)

    monkeypatch.setattr(checkpoint, "open", noted_open, raising=False)
    key = "model.transformer.wte.weight"  # 67 rows: 34 of rank 0, and 33 of rank 1
    for rows, files in ((slice(3, 34), ["__0_0.distcp"]), (slice(34, 99), ["__1_0.distcp"]),
                        (slice(33, 35), ["__0_0.distcp", "__1_0.distcp"]), (slice(70, 99), [])):
        value = checkpoint.open_sharded(path).get(key)
        read.clear()
        assert torch.equal(value[rows], whole[key][rows]) and read == files


def test_checkpoint_command_leaves_full_ones_and_a_running_run_alone(sound, tmp_path):
    out = str(tmp_path / "out")
    shutil.copytree(sound, out)
    run = locked(out)
    line = refused(saves.main, ["full", out])
    assert f"out_dir={out}" in line and f"process {os.getpid()} " in line
    run.lock_file.close()
    saves.main(["full", out])
    assert read_ckpt(out)["iter_num"] == 4
    shutil.rmtree(f"{out}/step-000000004")
    before = snapshot(out)
    assert "already" in make_full(out) and snapshot(out) == before


def test_checkpoint_crops_a_table_of_positions_and_nothing_else(tmp, sound, tmp_path):
    """Its first rows, weights and moments. What else differs in rows is another model."""
    ckpt = full_one(sound, tmp_path / "out")
    table = ckpt["model"]["transformer.wpe.weight"]
    number = ckpt["param_names"].index("transformer.wpe.weight")
    moments = ckpt["optimizer"]["state"][number]["exp_avg"]
    assert len(table) == len(moments) == 16
    for out in (tmp_path / "out", sound):  # full, and sharded
        model, optimizer = resumed(tmp, out, block_size=8)
        assert torch.equal(model.transformer.wpe.weight, table[:8])
        state = optimizer.state[model.transformer.wpe.weight]
        assert torch.equal(state["exp_avg"], moments[:8])
        assert torch.equal(model.transformer.wte.weight, ckpt["model"]["transformer.wte.weight"])
    for name in ("transformer.wte.weight", "transformer.h.0.attn.c_attn.weight"):
        longer = torch.cat((ckpt["model"][name], torch.zeros(8, 30)))
        weights = {**ckpt["model"], name: longer}
        torch.save({**ckpt, "model": weights}, tmp_path / "out/ckpt.pt")
        for block_size in (8, 16):
            line = refused(resumed, tmp, tmp_path / "out", block_size=block_size)
            assert name in line and "another model" in line


def test_checkpoint_of_all_is_resumed_where_some_are_frozen_now(tmp, sound):
    """What is frozen has no moments. What trains since has new ones: test_damage.py."""
    model, optimizer = resumed(tmp, sound, freeze=FREEZE)
    trained = [p for p in model.parameters() if p.requires_grad]
    assert set(optimizer.state) == set(trained) and len(trained) < len([*model.parameters()])


def test_checkpoint_that_a_run_starts_from_is_not_mapped_while_it_trains(tmp, monkeypatch):
    """Its disk space is free once the next one has its name."""
    run_training(tmp, "mapped", max_iters=1)
    mapped = []

    def look(function, *args):
        mapped.append(f"{tmp}/mapped/ckpt.pt" in Path("/proc/self/maps").read_text())
        return function(*args)

    for name in ("build", "train_step"):
        monkeypatch.setattr(train, name, partial(look, getattr(train, name)))
    run_training(tmp, "mapped", init_from="resume", max_iters=2)
    assert mapped == [True, False]


def test_checkpoint_of_a_version_with_other_keys_is_resumed(tmp, sound, tmp_path, capsys):
    """Keys of its config that are gone, and new ones that it lacks; or with weights alone."""
    out = tmp_path / "out"
    ckpt = full_one(sound, out)
    ckpt["config"].update(a_key_of_before=1)
    del ckpt["config"]["keep_checkpoints"]
    torch.save(ckpt, out / "ckpt.pt")
    _, optimizer = resumed(tmp, out, gradient_accumulation_steps=2)
    assert len(optimizer.state) == 40 and capsys.readouterr().out == ""
    del ckpt["optimizer"], ckpt["param_names"]
    torch.save(ckpt, out / "ckpt.pt")
    model, optimizer = resumed(tmp, out)
    assert not optimizer.state
    assert torch.equal(model.transformer.wte.weight, ckpt["model"]["transformer.wte.weight"])


# -----------------------------------------------------------------------------
# complete or not there


def test_checkpoint_that_is_sharded_is_on_the_disk_before_an_older_one_goes(tmp, tmp_path):
    """Its files before its header has its name; and all names before anything is removed. Its
    .metadata is as small as Python's buffer, in which PyTorch 2.13 would leave it."""
    run = built(tmp, checkpoint="sharded", keep_checkpoints=1)
    saver, rename, remove, done = claimed(run, tmp_path), os.replace, checkpoint.remove_sharded, []
    old, new = tmp_path / "step-000000001", tmp_path / "step-000000002"

    def replace(source, target):
        assert all(is_safe(f"{os.path.dirname(target)}/{name}")
                   for name in (".metadata", "__0_0.distcp", "header.json.tmp"))
        done.append(str(target))
        rename(source, target)

    def remove_sharded(path):
        if path == str(old) and old.exists() and new.exists():
            assert is_safe(new) and is_safe(new / "header.json") and is_safe(tmp_path)
            done.append(path)
        remove(path)

    state = {"model.x": torch.zeros(3)}
    with (power_cut() as is_safe, patch.object(os, "replace", replace),
          patch.object(saves, "flat_state", lambda *args: state),
          patch.object(saves, "remove_sharded", remove_sharded)):
        save(saver, run, 1)
        save(saver, run, 2)
        saver.finish()
    assert done == [f"{old}/header.json", f"{new}/header.json", str(old)]


def test_checkpoint_link_to_the_best_is_on_the_disk(sharded):
    saver, run, out = sharded
    saver.cfg = replace(run.cfg, always_save_checkpoint=False)
    with power_cut() as is_safe:
        saver.written.put(None)
        save(saver, run, 1, improved=True)
        saver.finish()
        assert os.readlink(out / "best") == "step-000000001" and is_safe(out)


@pytest.fixture
def sharded(tmp, tmp_path, monkeypatch):
    """(saver, run, out_dir) of a run whose ranks have written when a test says so."""
    run = built(tmp, checkpoint="sharded")
    saver = claimed(run, tmp_path / "out[1]")
    saver.written = Queue()  # of None, or what a test would have go wrong
    write_data = checkpoint.dcp.FileSystemWriter.write_data

    def written(*args):
        result = write_data(*args)
        if error := saver.written.get(timeout=60):
            raise error
        return result

    monkeypatch.setattr(checkpoint.dcp.FileSystemWriter, "write_data", written)
    return saver, run, tmp_path / "out[1]"


def another(saver, run, out, source, resumed=False):
    """The Saver of a run after this one, with its keys, and its ranks that write when told."""
    later = claimed(run, out, source, resumed)
    later.cfg, later.written = saver.cfg, saver.written
    return later


def complete(saver, run, step):
    save(saver, run, step)
    saver.written.put(None)
    saver.finish()


def test_checkpoint_is_complete_when_all_is_written_and_old_ones_go(sharded, tmp_path):
    saver, run, out = sharded
    for step in (0, 2, 5):  # of killed runs, half-written
        (out / f"step-{step:09d}").mkdir()
        (out / f"step-{step:09d}/__1_0.distcp").touch()
    other = tmp_path / "out1/step-000000000"  # what out[1] would name as a pattern
    mine = out / "step-000000000-mine"
    for path in (other, mine):
        path.mkdir(parents=True)
        (path / "header.json").touch()
    for step in (1, 2, 3):
        before = checkpoint.complete_steps(out)
        save(saver, run, step)
        assert checkpoint.complete_steps(out) == before and not saver.saving[0].done()
        saver.written.put(None)
        saver.finish()
        assert checkpoint.complete_steps(out) == [*before, f"step-{step:09d}"][-2:]
    newest = out / "step-000000003"
    header = checkpoint.read_header(newest)
    assert header["run"] == saver.run_id and header["iter_num"] == 3
    assert header["files"] == {
        name: zlib.crc32((newest / name).read_bytes()) for name in (".metadata", "__0_0.distcp")}
    for name in ("step-000000002", "step-000000003"):
        assert sorted(os.listdir(out / name)) == [".metadata", "__0_0.distcp", "header.json"]
    # an earlier half-written one is gone; a later one, and what is no run's, are not counted
    assert set(os.listdir(out)) == {mine.name, *(f"step-{step:09d}" for step in (2, 3, 5))}
    assert os.listdir(other) == os.listdir(mine) == ["header.json"]


@pytest.mark.parametrize("keep, every, kept", [
    (1, 0, [3, 9]), (2, 0, [2, 3, 9]), (1, 2, [2, 3, 9])])
def test_checkpoint_keeps_as_many_as_it_is_told(sharded, keep, every, kept):
    """Those that are damaged and have a higher number do not count; milestones stay."""
    saver, run, out = sharded
    saver.cfg = replace(run.cfg, keep_checkpoints=keep, keep_every=every)
    for step in (9, 1, 2, 3):
        complete(saver, run, step)
    assert checkpoint.complete_steps(out) == [f"step-{step:09d}" for step in kept]


def test_checkpoint_best_one_whose_save_failed_bars_no_other(sharded):
    """The next one that is better than what is on the disk becomes the best; even if no rank has
    looked meanwhile how the save ended, since all must find the same."""
    saver, run, out = sharded
    saver.cfg = replace(run.cfg, always_save_checkpoint=False)
    for step, val_loss, error in ((1, 3.0, None), (2, 2.0, DISK_FULL), (3, 2.5, None)):
        saver.written.put(error)
        improved = saver.improves(val_loss)
        assert improved
        saver.save(run.model, run.optimizer, NO_SCALER, step, improved)
    saver.wait()
    assert os.readlink(out / "best") == "step-000000003"
    assert checkpoint.read_header(out / "step-000000003")["best_val_loss"] == 2.5
    assert not saver.improves(2.6)


def test_checkpoint_milestone_is_taken_where_all_else_is_damaged(sound, tmp, tmp_path):
    run_training(tmp, str(tmp_path / "out"), max_iters=4, keep_every=2)
    with open(tmp_path / "out" / "ckpt.pt", "r+b") as f:
        f.truncate(1000)
    os.remove(tmp_path / "out" / "step-000000004.pt")
    assert found(tmp_path / "out").path.endswith("step-000000002.pt")


def test_run_in_a_checkpoints_own_directory_is_refused(sound, tmp):
    """Its run could remove it, with all that is in it."""
    out = os.path.join(sound, "step-000000004")
    before = os.listdir(sound)
    line = refused(train.train, load_config(arguments(tmp, out, init_from="resume")))
    assert f"{out} is a checkpoint" in line and "--init_from" in line
    assert os.listdir(sound) == before


def test_checkpoint_seconds_that_block_include_the_wait_for_the_one_before(sharded):
    saver, run, out = sharded
    reports, wait = [], saver.wait
    saver.report = lambda *report: reports.append(report)

    def waiting():
        if saver.saving:
            saver.written.put(None)
            futures.wait([saver.saving[0]])
            time.sleep(0.2)  # as if it had taken so long
        wait()

    save(saver, run, 1)
    saver.wait = waiting
    save(saver, run, 2)
    saver.finish()
    assert reports[0][2] < 0.2 <= reports[1][2]


def test_checkpoint_best_sharded_one_keeps_its_name(sharded):
    """Also in a run that has resumed; and if the save of a better one failed. A run that only
    begins with the weights has no best yet."""
    saver, run, out = sharded
    saver.cfg = replace(run.cfg, keep_checkpoints=1, always_save_checkpoint=False)
    for step, improved, error in ((1, True, None), (2, True, DISK_FULL), (3, False, None)):
        saver.written.put(error)
        save(saver, run, step, improved)
        saver.wait()
    header = checkpoint.read_header(out / "step-000000003")
    source = SimpleNamespace(header=header)
    saver = another(saver, run, out, source, resumed=True)
    complete(saver, run, 4)
    assert os.readlink(out / "best") == "step-000000001"
    assert checkpoint.complete_steps(out) == ["step-000000001", "step-000000004"]
    saver.written.put(None)
    save(saver, run, 5, True)
    saver.finish()
    assert os.readlink(out / "best") == "step-000000005"
    assert checkpoint.complete_steps(out) == ["step-000000005"]
    saver = another(saver, run, out, source)
    for step in (1, 2):
        complete(saver, run, step)
    assert checkpoint.complete_steps(out) == ["step-000000002"]
    assert not os.path.lexists(out / "best")


def test_checkpoint_milestones_and_the_clock(tmp, tmp_path, capsys):
    """Of full ones step-<n>.pt stays, beside ckpt.pt or last.pt, which is the next one's.
    The best is ckpt.pt, which another learning rate no longer reaches. From a milestone a run
    goes on bit for bit, and another one begins."""
    out, run = str(tmp_path / "out"), dict(eval_interval=2, save_interval=3, keep_every=4)
    run_training(tmp, out, max_iters=9, **run)
    names = ["ckpt.pt", "metrics.jsonl", "step-000000004.pt", "step-000000008.pt"]
    assert sorted(os.listdir(out)) == names and read_ckpt(out)["iter_num"] == 9
    assert re.findall(r"saved step (\d+) ", capsys.readouterr().out) == ["3", "4", "6", "8", "9"]
    assert sum(row.get("save_s") is not None for row in read_metrics(out)) in (3, 4)
    whole = losses(out)

    again = str(tmp_path / "again")
    os.mkdir(again)
    shutil.copy(f"{out}/step-000000004.pt", f"{again}/ckpt.pt")
    run.update(init_from="resume", always_save_checkpoint=False)
    run_training(tmp, again, max_iters=8, **run)
    assert losses(again) == whole[4:8]
    both = [read_ckpt(again, name) for name in ("ckpt.pt", "step-000000008.pt")]
    assert both[0]["iter_num"] == 8
    assert_equal(*both)
    run.update(learning_rate=1.0, min_lr=1.0)  # it gets worse
    run_training(tmp, again, max_iters=13, **run)
    assert read_ckpt(again)["iter_num"] == 8 and read_ckpt(again, "last.pt")["iter_num"] == 13
    assert read_ckpt(again, "step-000000012.pt")["iter_num"] == 12
    os.rename(again, f"{again}-moved")
    assert read_ckpt(f"{again}-moved")["iter_num"] == 8
    assert found(f"{out}/step-000000008.pt").header["iter_num"] == 8


def test_checkpoint_of_a_kill_while_old_ones_are_removed_is_none(sharded, monkeypatch):
    """The header goes first: a directory that has lost only its rows would be a damaged one."""
    saver, run, out = sharded
    saver.cfg = replace(run.cfg, keep_checkpoints=1)
    monkeypatch.setattr(checkpoint.shutil, "rmtree", lambda *args, **kwargs: None)  # the kill
    for step in (1, 2):
        complete(saver, run, step)
        assert checkpoint.complete_steps(out) == [f"step-{step:09d}"]
    save(saver, run, 2)  # and where a new one takes its name
    assert checkpoint.complete_steps(out) == []
    saver.written.put(None)
    saver.finish()


DISK_FULL = OSError("disk full")


def test_checkpoint_save_that_fails_is_said_in_the_next_step_and_tried_again(
        sharded, monkeypatch, capsys):
    """Wherever it fails: while a rank writes, or while it reads what it has written."""
    saver, run, out = sharded
    for step, error in ((1, DISK_FULL), (2, None)):
        if step == 2:
            monkeypatch.setattr(checkpoint, "checksum", MagicMock(side_effect=DISK_FULL))
        save(saver, run, step)
        saver.poll()  # it still writes
        assert capsys.readouterr().err == ""
        saver.written.put(error)
        futures.wait([saver.saving[0]], 60)
        saver.poll()
        line = capsys.readouterr().err
        assert line.startswith(f"cannot write {out}/step-{step:09d}: disk full; ")
        assert line.count("\n") == 1 and not (out / f"step-{step:09d}").exists()  # it has room
    saver.poll()
    assert capsys.readouterr().err == ""
    line = refused(saver.finish)
    assert "the last save" in line and "continue with --init_from=auto" in line
    monkeypatch.setattr(checkpoint, "checksum", lambda path: 0)
    complete(saver, run, 3)
    save(saver, run, 4)
    saver.written.put(DISK_FULL)
    complete(saver, run, 5)  # it says so too when it has waited for the one before
    assert "step-000000004: disk full" in capsys.readouterr().err
    save(saver, run, 6)
    saver.written.put(DISK_FULL)
    assert "continue with --init_from=auto" in refused(saver.finish)
    assert checkpoint.complete_steps(out) == ["step-000000003", "step-000000005"]


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_checkpoint_in_the_background_has_a_group_of_its_own(sharded, kind):
    """Collectives of the run, which goes on, would meet its own."""
    saver, run, out = sharded
    saver.cfg = replace(run.cfg, checkpoint=kind)
    with patch.object(saves, "from_rank0", wraps=saves.from_rank0) as agree:
        complete(saver, run, 1)
    assert agree.call_args.args[2] is saver.group


def test_checkpoint_on_a_disk_that_ranks_do_not_share_ends_the_run(sharded):
    saver, run, out = sharded
    complete(saver, run, 1)
    finish = checkpoint.Writer.finish

    def finish_of_two(writer, metadata, results):  # rank 0 gets a checksum, and sees no file
        finish(writer, metadata, [*results, ([], {"__1_0.distcp": 5})])

    with patch.object(checkpoint.Writer, "finish", finish_of_two):
        line = refused(complete, saver, run, 2)
    assert "__1_0.distcp" in line and "out_dir=" in line and "--checkpoint=full" in line
    assert checkpoint.complete_steps(out) == ["step-000000001"]


def test_checkpoint_of_one_process_has_the_values_of_its_step(tmp, tmp_path):
    """It is written while training goes on."""
    run = built(tmp, checkpoint="sharded")
    saver = claimed(run, tmp_path)
    expected = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    save(saver, run, 1)
    for p in run.model.parameters():
        p.data.fill_(7)
    saver.finish()
    source = found(tmp_path)
    assert all(torch.equal(source.whole(f"model.{name}"), p) for name, p in expected.items())


def test_run_that_only_evaluates_refuses_nan_too(tmp, tmp_path):
    source = SimpleNamespace(header={"iter_num": 7, "best_val_loss": 2.0})
    run = SimpleNamespace(cfg=tiny(tmp), world=World(), batches=NO_BATCHES)
    saver = saver_of(run, str(tmp_path), None, source)  # weights of another run
    line = refused(saver.require_finite, math.nan, "validation loss", 0)
    assert "learning_rate" in line and "float32" not in line  # which it does already
    run.cfg = tiny(tmp, dtype="bfloat16")
    saver = saver_of(run, str(tmp_path), None, source, resumed=True)
    line = refused(saver.require_finite, math.nan, "validation loss", 7)
    assert "dtype=float32 (now bfloat16)" in line


def test_checkpoint_that_is_being_written_is_completed_before_nan_ends_the_run(sharded):
    """Else its ranks would leave without their threads, and lose a good one of an earlier step.
    NaN shows in a loss, or in the next save. The ranks write when somebody waits for them."""
    saver, run, out = sharded
    wait = saver.wait

    def waiting():
        if saver.saving:
            saver.written.put(None)
        wait()

    saver.wait = waiting
    saver.require_finite(1.0, "loss", 0)
    save(saver, run, 1)
    line = refused(saver.require_finite, math.inf, "loss", 2)
    assert "inf" in line and f"what was saved in {saver.cfg.out_dir} before is untouched" in line
    save(saver, run, 1)
    line = refused(saver.require_finite, math.nan, "loss", 2)
    assert "learning_rate" in line and saver.saving is None
    save(saver, run, 2)
    run.model.lm_head.weight.data.fill_(math.nan)
    assert "step 3" in refused(save, saver, run, 3) and saver.saving is None
    assert checkpoint.complete_steps(out) == ["step-000000001", "step-000000002"]


def case_not_finite(tmp, out, number, **overrides):
    """A save when a rank's rows have such a number."""
    run = built(tmp, keep_checkpoints=1, **overrides)
    steps(run)
    saver = claimed(run, out)
    save(saver, run, 1)
    rows = run.optimizer.state[run.model.transformer.wte.weight]["exp_avg"]
    rows = rows.to_local() if isinstance(rows, DTensor) else rows
    if run.world.rank == 1 or run.cfg.strategy == "ddp":  # where all ranks have the same
        rows[-1, -1] = number
    line = refused(save, saver, run, 2)
    return line, checkpoint.find(out, run.world).header["iter_num"]


@pytest.mark.parametrize("strategy, kind, number", [
    ("ddp", "full", math.inf), ("full_shard", "sharded", -math.inf)])
def test_checkpoint_that_is_not_finite_is_never_saved(tmp, tmp_path, strategy, kind, number):
    """Whoever has it, no rank saves."""
    kwargs = dict(tmp=tmp, out=str(tmp_path), number=number, strategy=strategy, checkpoint=kind)
    for line, kept in values(on_ranks(2, {"save": (case_not_finite, kwargs)}), "save"):
        assert "exp_avg.transformer.wte.weight" in line and "step 2" in line
        assert "learning_rate" in line and kept == 1


# -----------------------------------------------------------------------------
# one run a directory


@pytest.mark.parametrize("file, moved", [
    ("ckpt.pt", True), ("last.pt", True), ("metrics.jsonl", True), ("step-000000001/x", True),
    ("step-000000001.pt", True),
    ("ckpt.pt.bak", False), ("step-of-mine", False)])
def test_run_moves_what_any_file_of_a_run_shows(tmp_path, capsys, file, moved):
    """Where a link leads: out_dir may be one to a faster disk. It has the lock as before."""
    (tmp_path / "disk" / file).parent.mkdir(parents=True)
    (tmp_path / "disk" / file).touch()
    (tmp_path / "out").symlink_to(tmp_path / "disk")
    directory = saves.RunDirectory(str(tmp_path / "out"))
    run_id = directory.claim(None)
    place = f"disk.{run_id}" if moved else "disk"
    assert (tmp_path / place / file).exists()
    assert (f"moved it to {tmp_path}/{place}\n" in capsys.readouterr().out) == moved
    assert len(os.listdir(tmp_path / "disk")) == (not moved)
    for name in ("disk", "out"):
        assert f"process {os.getpid()} " in refused(locked, tmp_path / name)


def test_run_waits_for_the_lock_of_a_node_that_may_be_dead(tmp_path, monkeypatch):
    """Two minutes, and none for a process on this node."""
    (tmp_path / "out").mkdir()
    running, slept = locked(tmp_path / "out"), []
    monkeypatch.setattr(saves.time, "sleep", slept.append)
    assert f"process {os.getpid()} on " in refused(locked, tmp_path / "out")
    assert slept == []
    (tmp_path / "out.lock").write_text("process 7 on node-12")
    line = refused(locked, tmp_path / "out")
    assert "is in use by process 7 on node-12; " in line and sum(slept) == 120

    def give_up(seconds):
        running.lock_file.close()

    monkeypatch.setattr(saves.time, "sleep", give_up)
    assert locked(tmp_path / "out").lock_file
    assert (tmp_path / "out.lock").read_text() == f"process {os.getpid()} on {os.uname().nodename}"


def test_run_on_a_disk_without_locks_says_so(tmp_path, monkeypatch, capsys):
    def flock(*args):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(saves.fcntl, "flock", flock)
    saves.RunDirectory(str(tmp_path / "out")).claim(None)
    line = capsys.readouterr().out
    assert "out.lock" in line and "never start two runs" in line and line.count("\n") == 1


@pytest.mark.parametrize("flag", [
    "--freeze=nothing", "--block_size=100000", "--init_from=resume", "--wandb_log=True",
    "--tensorboard=True"])
def test_run_that_is_refused_leaves_everything_as_it_was(tmp, tmp_path, monkeypatch, flag):
    """It moves no earlier run aside, and makes nothing where none was. (A lock may stay.)"""
    for package in ("wandb", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, package, None)  # it is not installed
    (tmp_path / "out").mkdir()
    (tmp_path / "out/metrics.jsonl").touch()
    for name in ("out", "no/such"):
        cfg = load_config([*arguments(tmp, tmp_path / name), flag])
        assert refused(train.train, cfg).startswith(flag[2:].partition("=")[0]) or "block" in flag
    assert set(os.listdir(tmp_path)) <= {"out", "out.lock"}
    assert os.listdir(tmp_path / "out") == ["metrics.jsonl"]


def test_run_has_the_lock_before_it_chooses_a_checkpoint(tmp, tmp_path):
    """The other run would remove what this one has chosen. The line names that run, and none of
    those before it."""
    locked(tmp_path).lock_file.close()
    running = locked(tmp_path)
    cfg = load_config(arguments(tmp, tmp_path, init_from="auto"))
    with patch.object(checkpoint, "find") as find:
        line = refused(train.train, cfg)
    assert "in use" in line and line.count("process ") == 1
    find.assert_not_called()
    running.lock_file.close()


def test_run_that_only_evaluates_touches_nothing(tmp):
    """Nor does it need the lock."""
    out = os.path.join(tmp, "evaluates")
    trained = launch(1, arguments(tmp, out, max_iters=2)).stdout
    before = snapshot(out)
    running = locked(out)
    for init_from, step in (("scratch", 0), ("resume", 2)):
        run = dict(init_from=init_from, eval_only=True, tensorboard=True)
        said = launch(1, arguments(tmp, out, **run)).stdout
        assert re.search(f"^step {step}: .*\n", said, re.M)[0] in trained and "iter " not in said
    running.lock_file.close()
    assert snapshot(out) == before
    launch(1, arguments(tmp, out + "-nowhere", eval_only=True))
    assert not os.path.exists(out + "-nowhere") and not os.path.exists(out + "-nowhere.lock")


# -----------------------------------------------------------------------------
# memory


def case_gather_memory(tmp, out):
    sizes = dict(n_layer=6, n_embd=510, n_head=3, gradient_accumulation_steps=2)
    run = built(tmp, strategy="full_shard", **sizes)
    steps(run)
    saver = claimed(run, out)
    before = resident("VmRSS", reset=True)
    save(saver, run, 1)
    n = [p.numel() * 4 for p in run.model.parameters()]
    return dict(above=resident("VmHWM") - before, state=3 * sum(n), largest=max(n))


def test_checkpoint_gather_memory(tmp):
    """A full save on 2 ranks: rank 0 holds the full state beside what training holds, rank 1 one
    parameter (and gloo's receive buffer)."""
    kwargs = dict(tmp=tmp, out=os.path.join(tmp, "memory"))
    zero, one = values(on_ranks(2, {"memory": (case_gather_memory, kwargs)}), "memory")
    slack = 30e6  # buffers of gloo and of the file
    assert zero["state"] >= 200e6 and zero["above"] <= 1.15 * zero["state"] + slack, zero
    assert one["above"] <= 2 * one["largest"] + slack, one

"""
saves.py: who may write in a directory, when a checkpoint is complete, which ones stay, and what a
save that fails or is not finite does. Kills and full disks of whole runs: test_faults.py.

    python -m pytest -q tests/test_saves.py
"""

import math
import os
import re
import time
import zlib
from concurrent import futures
from dataclasses import replace
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from unittest.mock import MagicMock, patch

import pytest
import torch
from harness import on_ranks, refused, values
from saver import NO_SCALER, claimed, found, save
from training import arguments, built, run_training, steps, tensor_of

import checkpoint
import saves
import train
from configurator import load_config

DISK_FULL = OSError("disk full")


@pytest.fixture
def sharded(tmp, tmp_path, monkeypatch):
    """(saver, run, out_dir) of a run whose ranks have written when a test says so."""
    run = built(tmp, checkpoint="sharded")
    saver = claimed(run, tmp_path / "out")
    saver.written = Queue()  # of None, or what a test would have go wrong
    write_data = checkpoint.dcp.FileSystemWriter.write_data

    def written(*args):
        result = write_data(*args)
        if error := saver.written.get(timeout=60):
            raise error
        return result

    monkeypatch.setattr(checkpoint.dcp.FileSystemWriter, "write_data", written)
    return saver, run, tmp_path / "out"


def complete_steps(out):
    return [int(path.name[5:]) for path in checkpoint.complete_steps(out)]


def complete(saver, run, step):
    save(saver, run, step)
    saver.written.put(None)
    saver.finish()


# -----------------------------------------------------------------------------
# complete or not there; which ones stay


def test_checkpoint_that_is_sharded_is_on_the_disk_before_an_older_one_goes(tmp, tmp_path):
    """Its files before its header has its name; and all names before anything is removed. Its
    .metadata is as small as Python's buffer, in which PyTorch 2.13 would leave it."""
    run = built(tmp, checkpoint="sharded", keep_checkpoints=1)
    saver, rename, remove, done = claimed(run, tmp_path), os.replace, checkpoint.remove_sharded, []
    old, new = tmp_path / "step-000000001", tmp_path / "step-000000002"
    synced = {}  # {inode: a file's content, or a directory's names, at the last os.fsync}

    def content(path):
        return {*os.listdir(path)} if os.path.isdir(path) else Path(path).read_bytes()

    def fsync(fd):
        synced[os.fstat(fd).st_ino] = content(os.readlink(f"/proc/self/fd/{fd}"))

    def is_safe(path):  # from a power cut
        return synced.get(os.stat(path).st_ino) == content(path)

    def replace(source, target):
        assert all(is_safe(f"{os.path.dirname(target)}/{name}")
                   for name in (".metadata", "__0_0.distcp", "header.json.tmp"))
        done.append(str(target))
        rename(source, target)

    def remove_sharded(path):
        if path == old and old.exists() and new.exists():
            assert is_safe(new) and is_safe(new / "header.json") and is_safe(tmp_path)
            done.append(str(path))
        remove(path)

    state = {"model.x": torch.zeros(3)}
    with (patch.object(os, "fsync", fsync), patch.object(os, "replace", replace),
          patch.object(saves, "flat_state", lambda *args: state),
          patch.object(checkpoint, "remove_sharded", remove_sharded)):
        save(saver, run, 1)
        save(saver, run, 2)
        saver.finish()
    assert done == [f"{old}/header.json", f"{new}/header.json", str(old)]


def test_checkpoint_is_complete_when_all_is_written_and_old_ones_go(sharded):
    saver, run, out = sharded
    for step in (0, 2, 5):  # of killed runs, half-written
        (out / f"step-{step:09d}").mkdir()
        (out / f"step-{step:09d}/__1_0.distcp").touch()
    mine = out / "step-000000000-mine"
    mine.mkdir()
    (mine / "header.json").touch()
    for step in (1, 2, 3):
        before = complete_steps(out)
        save(saver, run, step)
        assert complete_steps(out) == before and not saver.saving.done()
        saver.written.put(None)
        saver.finish()
        assert complete_steps(out) == [*before, step][-2:]
    newest = out / "step-000000003"
    source = checkpoint.open_sharded(newest)
    assert source.header["run"] == saver.header["run"] and source.header["iter_num"] == 3
    assert source.files == {"__0_0.distcp": zlib.crc32((newest / "__0_0.distcp").read_bytes())}
    for name in ("step-000000002", "step-000000003"):
        assert sorted(os.listdir(out / name)) == [".metadata", "__0_0.distcp", "header.json"]
    # an earlier half-written one is gone; a later one, and what is no run's, are not counted
    assert set(os.listdir(out)) == {mine.name, *(f"step-{step:09d}" for step in (2, 3, 5))}
    assert os.listdir(mine) == ["header.json"]


@pytest.mark.parametrize("keep, kept", [(1, [3, 9]), (2, [2, 3, 9]), (0, [1, 2, 3, 9])])
def test_checkpoint_keeps_as_many_as_it_is_told(sharded, keep, kept):
    """0: all. Those that are damaged and have a higher number do not count."""
    saver, run, out = sharded
    saver.cfg = replace(run.cfg, keep_checkpoints=keep)
    for step in (9, 1, 2, 3):
        complete(saver, run, step)
    assert complete_steps(out) == kept


def test_checkpoint_best_is_that_of_the_validation_loss(tmp, monkeypatch):
    """A resumed run knows it. One that saves at every evaluation does too, and replaces it."""
    said = iter([(5.0, 5.0), (6.0, 4.0), (1.0, 9.0), (0.5, 4.5),  # of training and validation
                 (0.5, 4.2), (0.5, 4.1), (0.5, 4.2), (0.5, 4.1)])
    monkeypatch.setattr(train, "evaluate", lambda *_: dict(zip(("train", "val"), next(said))))
    run = dict(eval_interval=1, init_from="auto")
    for max_iters, always, step in ((3, False, 1), (2, False, 1), (2, True, 2)):
        run_training(tmp, "by-val", max_iters=max_iters, always_save_checkpoint=always, **run)
        header = found(f"{tmp}/by-val").header
        assert (header["iter_num"], header["best_val_loss"]) == (step, 4.0)


def test_best_one_whose_save_failed_bars_no_other(sharded):
    """The next one that is better than what is on the disk becomes the best, in a resumed run too;
    even if no rank has looked meanwhile how the save ended, since all must find the same."""
    saver, run, out = sharded
    saver.cfg = replace(run.cfg, keep_checkpoints=1, always_save_checkpoint=False)
    for step, val_loss, error in ((1, 3.0, None), (2, 2.0, DISK_FULL), (3, 2.5, None)):
        saver.written.put(error)
        improved = saver.improves(val_loss)
        assert improved
        saver.save(run.model, run.optimizer, NO_SCALER, step)
    saver.wait()
    header = checkpoint.open_sharded(out / "step-000000003").header
    assert header["best_val_loss"] == 2.5 and not saver.improves(2.6)
    resumed = claimed(run, out, found(out), resumed=True)
    assert resumed.improves(2.0)
    saver.written.put(DISK_FULL)
    resumed.save(run.model, run.optimizer, NO_SCALER, 4)
    assert not resumed.improves(2.6)


def test_saves_by_the_clock(tmp, tmp_path, capsys):
    run_training(tmp, str(tmp_path / "out"), max_iters=8, eval_interval=2, save_interval=3)
    assert re.findall("saved step (.+?) ", capsys.readouterr().out) == ["3", "6", "8"]


def test_checkpoint_of_a_kill_while_old_ones_are_removed_is_none(sharded, monkeypatch):
    """The header goes first: a directory that has lost only its rows would be a damaged one."""
    saver, run, out = sharded
    saver.cfg = replace(run.cfg, keep_checkpoints=1)
    monkeypatch.setattr(checkpoint.shutil, "rmtree", lambda *args, **kwargs: None)  # the kill
    for step in (1, 2):
        complete(saver, run, step)
        assert complete_steps(out) == [step]
    save(saver, run, 2)  # and where a new one takes its name
    end = time.time() + 60
    while complete_steps(out) and time.time() < end:
        time.sleep(0.01)
    assert complete_steps(out) == []
    saver.written.put(None)
    saver.finish()


# -----------------------------------------------------------------------------
# a save that fails, in the background


def test_save_that_fails_is_said_in_the_next_step_and_tried_again(sharded, monkeypatch, capsys):
    """Wherever it fails: while a rank writes, or while it reads what it has written."""
    saver, run, out = sharded
    for step, error in ((1, DISK_FULL), (2, None)):
        if step == 2:
            monkeypatch.setattr(checkpoint, "checksum", MagicMock(side_effect=DISK_FULL))
        save(saver, run, step)
        saver.poll()  # it still writes
        assert capsys.readouterr().err == ""
        saver.written.put(error)
        futures.wait([saver.saving], 60)
        saver.poll()
        line = capsys.readouterr().err
        assert line.startswith(f"cannot write {out}/step-{step:09d}: disk full; ")
        assert line.count("\n") == 1 and not (out / f"step-{step:09d}").exists()  # it has room
    assert "the last save" in refused(saver.finish)
    monkeypatch.setattr(checkpoint, "checksum", lambda path: 0)
    complete(saver, run, 3)
    save(saver, run, 4)
    saver.written.put(DISK_FULL)
    complete(saver, run, 5)  # it says so too when it has waited for the one before
    assert "step-000000004: disk full" in capsys.readouterr().err
    assert complete_steps(out) == [3, 5]


def test_checkpoint_in_the_background_has_a_group_of_its_own(sharded):
    """Collectives of the run, which goes on, would meet its own."""
    saver, run, out = sharded
    with patch.object(saves, "from_rank0", wraps=saves.from_rank0) as agree:
        complete(saver, run, 1)
    assert [call.args[2] for call in agree.call_args_list] == [saver.group] * 2


def test_checkpoint_on_a_disk_that_ranks_do_not_share_ends_the_run(sharded):
    saver, run, out = sharded
    complete(saver, run, 1)
    finish = checkpoint.Writer.finish

    def finish_of_two(writer, metadata, results):  # rank 0 gets a checksum, and sees no file
        finish(writer, metadata, [*results, ([], {"__1_0.distcp": 5})])

    with patch.object(checkpoint.Writer, "finish", finish_of_two):
        line = refused(complete, saver, run, 2)
    assert "__1_0.distcp" in line and "out_dir=" in line and "--checkpoint=full" in line
    assert complete_steps(out) == [1]


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
    assert all(torch.equal(tensor_of(source, f"model.{name}"), p) for name, p in expected.items())


def test_checkpoint_that_is_being_written_is_completed_before_nan_ends_the_run(sharded):
    """Else its ranks would leave without their threads, and lose a good one of an earlier step.
    NaN shows in a loss, or in the next save."""
    saver, run, out = sharded
    saver.require_finite(1.0, "loss", 0)
    for number in (math.inf, math.nan):
        save(saver, run, 1)
        saver.written.put(None)
        line = refused(saver.require_finite, number, "loss", 2)
        assert "learning_rate" in line and saver.saving is None
    save(saver, run, 2)
    saver.written.put(None)
    run.model.lm_head.weight.data.fill_(math.nan)
    assert "step 3" in refused(save, saver, run, 3) and saver.saving is None
    assert complete_steps(out) == [1, 2]


def case_not_finite(tmp, out):
    """A save when one rank's rows have such a number."""
    run = built(tmp, strategy="full_shard", checkpoint="sharded", keep_checkpoints=1)
    steps(run)
    saver = claimed(run, out)
    save(saver, run, 1)
    if run.world.rank == 1:
        moments = run.optimizer.state[run.model.transformer.wte.weight]["exp_avg"]
        moments.to_local()[-1, -1] = -math.inf
    line = refused(save, saver, run, 2)
    return line, checkpoint.find(out, run.world).header["iter_num"]


def test_checkpoint_that_is_not_finite_is_never_saved(tmp, tmp_path):
    """Whoever has it, no rank saves."""
    cases = {"save": (case_not_finite, dict(tmp=tmp, out=str(tmp_path)))}
    for line, kept in values(on_ranks(2, cases), "save"):
        assert "not finite" in line and "step 2" in line
        assert "learning_rate" in line and kept == 1


# -----------------------------------------------------------------------------
# one run a directory


@pytest.mark.parametrize("file, moved", [
    ("ckpt.pt", True), ("metrics.jsonl", True), ("step-000000001/x", True),
    ("ckpt.pt.bak", False), ("step-of-mine", False)])
def test_run_moves_what_any_file_of_a_run_shows(tmp_path, capsys, file, moved):
    """Where a link leads: out_dir may be one to a faster disk. It has the lock as before. Another
    run's directory inside stays, since that run may be training."""
    (tmp_path / "disk" / file).parent.mkdir(parents=True)
    (tmp_path / "disk" / file).touch()
    (tmp_path / "disk" / "other").mkdir()
    (tmp_path / "disk" / "other" / "metrics.jsonl").touch()
    (tmp_path / "out").symlink_to(tmp_path / "disk")
    directory = saves.RunDirectory(str(tmp_path / "out"))
    run_id = directory.claim(None)
    place = f"disk.{run_id}" if moved else "disk"
    assert (tmp_path / place / file).exists()
    assert (f"moved it to {tmp_path}/{place}\n" in capsys.readouterr().out) == moved
    assert (tmp_path / "disk" / file).exists() != moved
    assert os.listdir(tmp_path / "disk" / "other") == ["metrics.jsonl"]
    for name in ("disk", "out"):
        assert "in use" in refused(saves.RunDirectory(str(tmp_path / name)).lock)


def test_run_that_was_copied_has_an_id_of_its_own(tmp_path):
    """Else W&B would take both for one."""
    source = SimpleNamespace(header=dict(run="x", path=str(tmp_path / "a")))
    ids = [saves.RunDirectory(str(tmp_path / out)).claim(source, True) for out in ("a", "b")]
    assert ids[0] == "x" != ids[1]
    assert saves.RunDirectory(str(tmp_path / "c")).claim(None) != ids[1]  # in the same second


def test_run_has_the_lock_before_it_chooses_a_checkpoint(tmp, tmp_path):
    """The other run would remove what this one has chosen."""
    directory = saves.RunDirectory(str(tmp_path))
    directory.lock()
    cfg = load_config(arguments(tmp, tmp_path, init_from="auto"))
    with patch.object(checkpoint, "find") as find:
        assert "in use by another run" in refused(train.train, cfg)
    find.assert_not_called()
    directory.lock_file.close()


@pytest.mark.parametrize("flag", ["--freeze=nothing", "--block_size=100000", "--init_from=resume"])
def test_run_that_is_refused_leaves_everything_as_it_was(tmp, tmp_path, flag):
    """It moves no earlier run aside, and makes nothing where none was. (A lock may stay.)"""
    (tmp_path / "out").mkdir()
    (tmp_path / "out/metrics.jsonl").touch()
    for name in ("out", "no/such"):
        cfg = load_config([*arguments(tmp, tmp_path / name), flag])
        assert refused(train.train, cfg).startswith(flag[2:].partition("=")[0]) or "block" in flag
    assert set(os.listdir(tmp_path)) <= {"out", "out.lock"}
    assert os.listdir(tmp_path / "out") == ["metrics.jsonl"]


def test_run_that_only_evaluates_touches_nothing(tmp, capsys):
    """Nor does it need the lock."""
    out = os.path.join(tmp, "evaluates")
    run_training(tmp, out, max_iters=2, eval_interval=2)
    trained = capsys.readouterr().out
    before = {path: path.read_bytes() for path in Path(out).iterdir()}
    running = saves.RunDirectory(out)
    running.lock()
    for init_from, step in (("scratch", 0), ("resume", 2)):
        train.main(arguments(tmp, out, init_from=init_from, eval_only=True))
        said = capsys.readouterr().out
        line = next(line for line in said.splitlines() if line.startswith(f"step {step}: "))
        assert line in trained and "iter " not in said
    running.lock_file.close()
    assert {path: path.read_bytes() for path in Path(out).iterdir()} == before
    train.main(arguments(tmp, out + "-nowhere", eval_only=True))
    assert not os.path.exists(out + "-nowhere") and not os.path.exists(out + "-nowhere.lock")

"""
Checkpoints: what one run writes another reads, at any world size and strategy, bit for bit.

    python -m pytest -q tests/test_checkpoint.py
    python -m pytest -q tests/test_checkpoint.py -k "nanogpt or huggingface"
"""

import concurrent.futures
import fcntl
import json
import os
import pickle
import random
import re
import shutil
import zlib
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import torch.distributed.checkpoint as dcp
from harness import (
    Ranks,
    arguments,
    assert_same_weights,
    launch,
    losses,
    make_data,
    on_ranks,
    read_ckpt,
    read_metrics,
    resident,
    run_training,
    script,
    tiny,
    trained,
    values,
)
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

import checkpoint
import fsdp
import huggingface
import sample
import train
from configurator import load_config, resolve, with_model
from data.loader import Batches
from model import GPT, GPTConfig
from ranks import World, setup

FREEZE = r"wte|h\.0\.(ln_1|mlp)"  # parts of units: frozen and trained parameters are mixed


def built(tmp, **overrides):
    """(world, cfg, what to call, model, optimizer) on these ranks."""
    world = setup("cpu", "auto")
    cfg = resolve(tiny(tmp, **overrides), world)
    return world, cfg, *train.build(cfg, world)


def one_step(world, cfg, wrapped, model, optimizer):
    scaler, batches = torch.amp.GradScaler("cpu", enabled=False), Batches(cfg, world)
    batch = batches.train(0, 0)
    train.train_step(wrapped, optimizer, scaler, batches, batch, 0, cfg, world)


def complete(out):
    """Names of the sharded checkpoints that have their header, oldest first."""
    names = [name for name in os.listdir(out) if re.fullmatch(r"step-\d{9}", name)]
    return sorted(n for n in names if os.path.exists(os.path.join(out, n, "header.json")))


def save(saver, model, optimizer, step, name="ckpt.pt"):
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    saver.save(model, optimizer, scaler, step, 2.5, name)


def header_of(path):
    with open(os.path.join(path, "header.json")) as f:
        return json.load(f)


def assert_equal(a, b, where="ckpt"):
    """Two states, bit for bit, with all that is in them."""
    assert type(a) is type(b), where
    if isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_equal(a[key], b[key], f"{where}[{key!r}]")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), where
        for i in range(len(a)):
            assert_equal(a[i], b[i], f"{where}[{i}]")
    elif isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and torch.equal(a, b), where
    else:
        assert a == b, where


def make_full(out):
    p = script("checkpoint.py", "full", out)
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
    assert len(losses(chain)) == 12
    assert_same_weights(read_ckpt(chain)["model"], read_ckpt(whole)["model"], 1e-4)
    iters = [row["iter"] for row in read_metrics(chain) if "loss" in row]
    assert iters == list(range(12))  # appended without duplicates


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
        make_full(whole)
        make_full(parts)
    a, b = read_ckpt(whole), read_ckpt(parts)
    assert_equal(a["model"], b["model"])
    assert_equal(a["optimizer"], b["optimizer"])
    kinds = {kind for state in a["optimizer"]["state"].values() for kind in state}
    assert kinds == {"step", "exp_avg", "exp_avg_sq"}


def test_checkpoint_of_a_finished_run_leaves_nothing_to_train(tmp):
    out = os.path.join(tmp, "finished")
    launch(1, arguments(tmp, out, max_iters=2))
    before = open(os.path.join(out, "ckpt.pt"), "rb").read()
    p = launch(1, arguments(tmp, out, max_iters=2, init_from="resume"))
    assert "nothing left to train: max_iters=2; raise --max_iters to continue" in p.stdout
    assert "at step 2" in p.stdout and "saving" not in p.stdout
    assert len(losses(out)) == 2
    assert open(os.path.join(out, "ckpt.pt"), "rb").read() == before


def test_checkpoint_best_is_kept_and_later_ones_know_it(tmp):
    out = os.path.join(tmp, "best")
    run = dict(eval_interval=2)
    launch(1, arguments(tmp, out, max_iters=4, always_save_checkpoint=False, **run))
    best = read_ckpt(out)["best_val_loss"]
    run.update(init_from="resume", learning_rate=1.0, min_lr=1.0)  # it gets worse
    launch(1, arguments(tmp, out, max_iters=6, always_save_checkpoint=False, **run))
    assert read_ckpt(out)["iter_num"] == 4  # not overwritten
    launch(1, arguments(tmp, out, max_iters=8, always_save_checkpoint=True, **run))
    after = read_ckpt(out)
    last = [row["val_loss"] for row in read_metrics(out) if "val_loss" in row][-1]
    assert after["iter_num"] == 8
    assert after["best_val_loss"] == best < last
    # evaluating the worse state at step 8 does not make it the best
    launch(1, arguments(tmp, out, max_iters=10, always_save_checkpoint=True, **run))
    assert read_ckpt(out)["best_val_loss"] == best


def test_checkpoint_newest_of_best_and_last_is_resumed(tmp):
    """ckpt.pt is the best, last.pt where a signal stopped: whichever has more steps."""
    out = os.path.join(tmp, "newest")
    launch(1, arguments(tmp, out, max_iters=2))
    best, last = os.path.join(out, "ckpt.pt"), os.path.join(out, "last.pt")
    ckpt = read_ckpt(out)
    torch.save({**ckpt, "iter_num": 1}, last)
    assert checkpoint.find(out, World()).path == best
    torch.save({**ckpt, "iter_num": 3}, last)
    assert checkpoint.find(out, World()).path == last
    p = launch(1, arguments(tmp, out, max_iters=4, init_from="resume"))
    assert f"starting from {last} at step 3" in p.stdout


def test_checkpoint_freeze_then_unfreeze_then_freeze(tmp):
    """Moments of what is frozen do not exist; they start when it trains, and go again."""
    out = os.path.join(tmp, "thaw")
    p = launch(2, arguments(tmp, out, max_iters=2, freeze=FREEZE))
    ckpt = read_ckpt(out)
    frozen = [t.numel() for name, t in ckpt["model"].items() if re.search(FREEZE, name)]
    assert f"\n{sum(frozen):,} parameters are frozen: " in p.stdout
    n = len(ckpt["model"]) - 1  # the tied head is no parameter of its own
    assert len(ckpt["optimizer"]["state"]) == len(ckpt["param_names"]) < n
    assert not any(re.search(FREEZE, name) for name in ckpt["param_names"])
    launch(2, arguments(tmp, out, max_iters=4, init_from="resume"))
    assert len(read_ckpt(out)["param_names"]) == n
    assert len(losses(out)) == 4
    launch(2, arguments(tmp, out, max_iters=6, init_from="resume", freeze=FREEZE))
    again = read_ckpt(out)
    assert again["param_names"] == ckpt["param_names"]
    assert again["optimizer"]["state"].keys() == ckpt["optimizer"]["state"].keys()
    assert len(losses(out)) == 6


# -----------------------------------------------------------------------------
# what is in the files


def test_checkpoint_has_nanogpts_layout(tmp):
    out = os.path.join(tmp, "layout")
    launch(1, arguments(tmp, out, max_iters=2, bias=False))
    ckpt = read_ckpt(out)
    theirs = {"model", "optimizer", "model_args", "iter_num", "best_val_loss", "config"}
    assert ckpt.keys() == theirs | {"param_names", "run", "scaler", "meta", "kept"}
    assert list(ckpt["model_args"])
    assert ckpt["iter_num"] == 2
    assert ckpt["config"]["n_layer"] == 3
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


def test_checkpoint_of_nanogpt_is_resumed(tmp):
    """Theirs: prefixes of DDP and compile, causal masks, no parameter names; optimizer included."""
    out, whole = os.path.join(tmp, "from-nanogpt"), os.path.join(tmp, "from-nanogpt-whole")
    launch(1, arguments(tmp, out, max_iters=3, bias=False))
    ckpt = read_ckpt(out)
    weights = {"module._orig_mod." + name: tensor for name, tensor in ckpt["model"].items()}
    for i in range(3):
        weights[f"module._orig_mod.transformer.h.{i}.attn.bias"] = torch.ones(1, 1, 16, 16)
    theirs = {key: ckpt[key] for key in ("optimizer", "model_args", "iter_num", "config")}
    theirs.update(model=weights, best_val_loss=torch.tensor(9.0))
    torch.save(theirs, os.path.join(out, "ckpt.pt"))
    os.remove(os.path.join(out, "metrics.jsonl"))  # they write none
    launch(2, arguments(tmp, out, max_iters=6, bias=False, init_from="resume"))
    launch(1, arguments(tmp, whole, max_iters=6, bias=False))
    assert losses(out) == pytest.approx(losses(whole)[3:], rel=1e-5)


UNTIED = """
import torch
from torch import nn
import model

class Untied(model.GPT):
    def __init__(self, config):
        super().__init__(config)
        self.lm_head.weight = nn.Parameter(torch.empty_like(self.lm_head.weight))

ModelConfig, Model = model.GPTConfig, Untied
"""


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_checkpoint_of_an_untied_model_has_its_head(tmp, tmp_path, models, kind):
    (models / "untied.py").write_text(UNTIED)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run = dict(model="untied", checkpoint=kind)
    launch(1, arguments(tmp, whole, max_iters=4, **run))
    launch(2, arguments(tmp, parts, max_iters=2, **run))
    launch(1, arguments(tmp, parts, max_iters=4, init_from="resume", **run))
    assert losses(parts) == pytest.approx(losses(whole), rel=1e-5)
    if kind == "sharded":
        make_full(parts)
        make_full(whole)
    ckpt = read_ckpt(parts)
    head, wte = ckpt["model"]["lm_head.weight"], ckpt["model"]["transformer.wte.weight"]
    assert head.shape == wte.shape and (head - wte).abs().max() > 1e-3
    assert {"lm_head.weight", "transformer.wte.weight"} <= set(ckpt["param_names"])
    assert len(ckpt["optimizer"]["state"]) == len(ckpt["model"])
    assert_same_weights(ckpt["model"], read_ckpt(whole)["model"], 1e-4)


def case_both_kinds(tmp, out, freeze):
    """The same state, saved full and sharded; are the collectives of reading patient?"""
    world, cfg, wrapped, model, optimizer = built(tmp, strategy="full_shard", freeze=freeze)
    one_step(world, cfg, wrapped, model, optimizer)
    saver = checkpoint.Saver(out, world)
    saver.claim(cfg, None)
    save(saver, model, optimizer, 1, "direct.pt")
    saver.cfg = replace(cfg, checkpoint="sharded")
    save(saver, model, optimizer, 1)
    saver.finish(wait=True)
    with (patch.object(checkpoint, "mean", wraps=checkpoint.mean) as mean,
          patch.object(checkpoint, "patient_group", wraps=checkpoint.patient_group) as patient):
        checkpoint.load(checkpoint.find(out, world), model, optimizer, world)
    return complete(out), mean.call_args.kwargs["patient"], patient.call_count


@pytest.mark.parametrize("freeze", ["", FREEZE])
def test_checkpoint_sharded_made_full_equals_the_full_one(tmp, tmp_path, freeze):
    kwargs = dict(tmp=tmp, out=str(tmp_path), freeze=freeze)
    results = on_ranks(2, {"both": (case_both_kinds, kwargs)})
    assert values(results, "both") == [[["step-000000001"], True, 2]] * 2
    assert "step-000000001" in make_full(tmp_path)
    ours, direct = read_ckpt(tmp_path), read_ckpt(tmp_path, "direct.pt")
    kinds = [ckpt["config"].pop("checkpoint") for ckpt in (ours, direct)]
    assert kinds == ["sharded", "full"]
    for group in direct["optimizer"]["param_groups"]:
        group["betas"] = list(group["betas"])  # JSON has no tuples
    assert_equal(ours, direct)
    head, wte = ours["model"]["lm_head.weight"], ours["model"]["transformer.wte.weight"]
    assert head.data_ptr() == wte.data_ptr()


def test_checkpoint_command_without_a_sharded_one_is_one_clear_line(tmp, tmp_path):
    p = script("checkpoint.py", "full", tmp_path)
    assert p.returncode == 1
    assert p.stderr == f"{tmp_path}: no checkpoint there\n"
    launch(1, arguments(tmp, tmp_path, max_iters=1))
    assert "is a full checkpoint already" in make_full(tmp_path)


def test_checkpoint_command_leaves_a_running_run_alone(sound, tmp_path, monkeypatch):
    out = str(tmp_path / "out")
    shutil.copytree(sound["sharded"][0], out)
    monkeypatch.setattr(checkpoint.time, "sleep", lambda seconds: None)
    run = checkpoint.Saver(out, World())
    with pytest.raises(SystemExit, match="is in use by process"):
        checkpoint.main(["full", out])
    run.file.close()
    checkpoint.main(["full", out])
    assert read_ckpt(out)["iter_num"] == 4


def test_checkpoint_that_a_run_starts_from_is_not_mapped_while_it_trains(tmp, monkeypatch):
    """Its disk space is free once the next one has its name."""
    out, mapped = os.path.join(tmp, "mapped"), []
    launch(1, arguments(tmp, out, max_iters=1))

    def looking(function):
        def look(*args):
            with open("/proc/self/maps") as f:
                mapped.append(f"{out}/ckpt.pt" in f.read())
            return function(*args)
        return look

    for name in ("build", "Log"):
        monkeypatch.setattr(train, name, looking(getattr(train, name)))
    run_training(tmp, "mapped", init_from="resume", max_iters=2)
    assert mapped == [True, False]


# -----------------------------------------------------------------------------
# complete or not there


def test_checkpoint_file_is_synced_before_it_gets_its_name(tmp_path, monkeypatch):
    """A crash of the machine may undo what was not synced, but not what was renamed before it."""
    calls, path = [], str(tmp_path / "file")
    rename = os.replace

    def recorded(source, target):
        calls.append(("rename", source, target))
        rename(source, target)

    def fsync(fd):
        calls.append(("sync", os.readlink(f"/proc/self/fd/{fd}"), os.fstat(fd).st_size))

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", recorded)
    def write(f):
        f.write(b"hello")
        assert not os.path.exists(path)

    checkpoint.atomic(path, write)
    [(_, tmp, size), renamed, (sync, directory, _)] = calls
    assert size == 5 and renamed == ("rename", tmp, path)
    assert (sync, directory) == ("sync", str(tmp_path))
    assert os.listdir(tmp_path) == ["file"]


def test_checkpoint_file_that_fails_half_way_leaves_the_old_one(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def write(f):
        f.write(b"half")
        raise OSError("no space")

    with pytest.raises(SystemExit, match=f"cannot write {path}: no space; the previous"):
        checkpoint.atomic(str(path), write)
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["file"]


class Background:
    """Stands in for DCP's asynchronous save of one rank: it has written when a test says so."""

    def __init__(self, monkeypatch, saver):
        self.pending = []
        saver.group = "a process group"
        monkeypatch.setattr(checkpoint.dcp, "async_save", self.async_save)
        monkeypatch.setattr(checkpoint.dist, "gather_object", self.gather_object)

    def async_save(self, tensors, storage_writer, process_group):
        path = storage_writer.path
        os.makedirs(path, exist_ok=True)
        for name in (".metadata", "__0_0.distcp"):
            with open(os.path.join(path, name), "w") as f:
                f.write(f"{name} of {path}")
        self.pending.append(concurrent.futures.Future())
        return self.pending[-1]

    def gather_object(self, mine, every, group):
        every[0] = mine


@pytest.fixture
def sharded(tmp, tmp_path, monkeypatch):
    """(saver, Background, the model's arguments of a save) in tmp_path / "out[1]"."""
    world, cfg, _, model, optimizer = built(tmp, checkpoint="sharded")
    saver = checkpoint.Saver(str(tmp_path / "out[1]"), world)
    saver.claim(cfg, None)
    return saver, Background(monkeypatch, saver), (model, optimizer)


def ended(saver):
    """Wait for the background; what it failed with comes from finish()."""
    assert concurrent.futures.wait([saver.saving], timeout=60).done
    saver.finish()


def test_checkpoint_is_complete_when_all_is_written_and_old_ones_go(sharded, tmp_path):
    saver, background, state = sharded
    out = tmp_path / "out[1]"
    old_layout, half = out / "step-000000000", out / "step-000000005"
    for path, name in ((old_layout, "header.pt"), (half, ".metadata")):
        path.mkdir()
        (path / name).touch()
    for step in (1, 2, 3):
        before = complete(out)
        save(saver, *state, step)
        saver.finish()
        assert complete(out) == before and not saver.saving.done()  # half-written
        background.pending[-1].set_result(None)
        ended(saver)
        assert complete(out) == [*before, f"step-{step:09d}"][-2:]  # keep_checkpoints=2
    newest = out / "step-000000003"
    assert sorted(os.listdir(newest)) == [".metadata", "__0_0.distcp", "header.json"]
    files = {name: zlib.crc32((newest / name).read_bytes()) for name in (".metadata",
                                                                       "__0_0.distcp")}
    header = header_of(newest)
    assert header["files"] == files and list(header)[-1] == "checksum"
    assert header["run"] == saver.run_id and header["iter_num"] == 3
    # what is not complete, or of the previous layout, is not counted and not removed
    kept = {"lock", *(f"step-{step:09d}" for step in (0, 2, 3, 5))}
    assert set(os.listdir(out)) == kept
    save(saver, *state, 4)
    background.pending[-1].set_exception(OSError("disk full"))
    with pytest.raises(SystemExit, match="disk full; the previous checkpoint is untouched"):
        ended(saver)
    assert complete(out) == ["step-000000002", "step-000000003"]


def test_checkpoint_keeps_as_many_as_it_is_told(sharded, tmp_path):
    saver, background, state = sharded
    other = tmp_path / "out1" / "step-000000000"  # what out[1] would name as a pattern
    mine = tmp_path / "out[1]" / "step-000000000-mine"
    for path in (other, mine):
        path.mkdir(parents=True)
        (path / "header.json").touch()
    for keep, kept in ((1, [3]), (3, [1, 2, 3])):
        saver.cfg = replace(saver.cfg, keep_checkpoints=keep)
        for step in (1, 2, 3):
            save(saver, *state, step)
            background.pending[-1].set_result(None)
            saver.finish(wait=True)
        assert complete(tmp_path / "out[1]") == [f"step-{step:09d}" for step in kept]
    assert os.listdir(other) == os.listdir(mine) == ["header.json"]


def test_checkpoint_of_one_process_has_the_values_of_its_step(tmp, tmp_path):
    """It is written while training goes on."""
    world, cfg, _, model, optimizer = built(tmp, checkpoint="sharded")
    saver = checkpoint.Saver(str(tmp_path), world)
    saver.claim(cfg, None)
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    save(saver, model, optimizer, 1)
    for p in model.parameters():
        p.data.fill_(7)
    saver.finish(wait=True)
    source = checkpoint.find(str(tmp_path), world)
    assert all(torch.equal(source.get(f"model.{name}"), p) for name, p in expected.items())


def test_checkpoint_that_lacks_a_ranks_file_is_not_completed(sharded, tmp_path, monkeypatch):
    """Rank 1 has written to another disk: rank 0 gets its checksum, and sees no file."""
    saver, background, state = sharded

    def gather_object(mine, every, group):
        every[:] = [mine, {"__1_0.distcp": 5}]

    monkeypatch.setattr(checkpoint.dist, "gather_object", gather_object)
    save(saver, *state, 1)
    background.pending[-1].set_result(None)
    with pytest.raises(SystemExit, match="not the same on all nodes, .* lacks __1_0.distcp"):
        ended(saver)
    assert complete(tmp_path / "out[1]") == []


def test_checkpoint_of_the_previous_sharded_layout_is_one_clear_line(tmp, tmp_path):
    out = str(tmp_path)
    path = tmp_path / "step-000000004"
    path.mkdir()
    torch.save({"iter_num": 4}, path / "header.pt")
    (path / ".metadata").touch()
    line = (f"{path}: of an older version; to keep it, run that version's python checkpoint.py "
            f"full {out}, which makes it a ckpt.pt; remove it, or pass another out_dir")
    with pytest.raises(SystemExit) as e:
        checkpoint.find(out, World())
    assert e.value.code == line
    # beside one that this version reads: passed over, not among those that are removed, and out
    # of the way of the same step
    full = os.path.join(tmp, "beside-an-older-layout")
    launch(1, arguments(tmp, full, max_iters=1))
    shutil.copy(os.path.join(full, "ckpt.pt"), tmp_path)
    run = dict(checkpoint="sharded", keep_checkpoints=1, eval_interval=2, init_from="resume")
    p = launch(1, arguments(tmp, out, max_iters=5, **run))
    assert p.stderr == f"skipping {line}\n" and "at step 1" in p.stdout
    assert complete(out) == ["step-000000005"]
    assert sorted(os.listdir(f"{path}.old")) == [".metadata", "header.pt"]


def test_checkpoint_of_a_version_with_other_keys_is_resumed(tmp):
    """Keys of its config that are gone, and new ones that it lacks."""
    out, whole = os.path.join(tmp, "other-keys"), os.path.join(tmp, "other-keys-whole")
    launch(1, arguments(tmp, whole, max_iters=4))
    launch(1, arguments(tmp, out, max_iters=2))
    ckpt = read_ckpt(out)
    ckpt["config"].update(a_key_of_before=1)
    del ckpt["config"]["keep_checkpoints"]
    torch.save(ckpt, os.path.join(out, "ckpt.pt"))
    p = launch(1, arguments(tmp, out, max_iters=4, init_from="resume"))
    assert "differs" not in p.stdout and losses(out) == losses(whole)


def test_checkpoint_of_weights_alone_is_opened(tmp_path):
    weights = {"model": {"w": torch.ones(2)}, "iter_num": 3, "best_val_loss": 1.0,
               "model_args": {}, "config": {}}
    torch.save(weights, tmp_path / "ckpt.pt")
    assert checkpoint.find(str(tmp_path), World()).header["shapes"] == {"model.w": (2,)}


def test_checkpoint_damage_is_a_clear_line_or_the_older_one(tmp):
    out = os.path.join(tmp, "damage")
    launch(1, arguments(tmp, out, max_iters=2))
    path = os.path.join(out, "ckpt.pt")
    good = open(path, "rb").read()

    def resume(**overrides):
        run = {"max_iters": 3, "init_from": "resume", **overrides}
        return trained(1, arguments(tmp, out, **run))

    def write(data):
        with open(path, "wb") as f:
            f.write(data)

    damaged = {
        "truncated": good[:len(good) // 2], "empty": b"", "no zip": b"hello" * 100,
        "flipped": good[:30] + bytes([good[30] ^ 255]) + good[31:],
        "flipped magic": bytes([good[0] ^ 1]) + good[1:],
    }
    for name, data in damaged.items():
        write(data)
        p = resume()
        if p.returncode == 0:  # a bit that carries nothing: then it must be the right state
            assert "at step 2" in p.stdout, name
        else:
            assert p.returncode == 1, name
            assert "ckpt.pt" in p.stderr and "Traceback" not in p.stderr, (name, p.stderr)
            assert p.stderr.strip().count("\n") == 0, (name, p.stderr)
    write(good)
    other_sizes = [(dict(n_layer=2), "--n_layer=3"), (dict(n_embd=60), "--n_embd=30"),
                   (dict(block_size=32), "--block_size=16")]
    for overrides, message in other_sizes:
        p = resume(**overrides)
        assert p.returncode == 1, p.stderr
        assert message in p.stderr and "Traceback" not in p.stderr, p.stderr
    # a half-written directory beside the complete file
    os.makedirs(os.path.join(out, "step-000000009"))
    assert "at step 2" in resume(max_iters=2).stdout
    # a complete directory beside a damaged file
    launch(1, arguments(tmp, out, max_iters=4, init_from="resume", checkpoint="sharded"))
    write(good[:1000])
    p = resume(max_iters=4)
    assert p.returncode == 0
    assert "at step 4" in p.stdout and "skipping" in p.stderr
    p = trained(1, arguments(tmp, os.path.join(tmp, "nothing"), init_from="resume"))
    assert p.returncode == 1
    assert "no checkpoint in out_dir" in p.stderr and "Traceback" not in p.stderr


# -----------------------------------------------------------------------------
# one run a directory


def snapshot(out):
    """{path: bytes} of everything below out."""
    found = {}
    for directory, _, names in os.walk(out):
        for name in names:
            path = os.path.join(directory, name)
            found[path] = open(path, "rb").read()
    return found


@pytest.mark.parametrize("first, second", [("sharded", "sharded"), ("full", "sharded")])
def test_run_a_new_one_moves_the_old_aside(tmp, first, second):
    """A: 6 steps. B: from scratch, 2 steps. auto goes on with B, and A is whole where it went."""
    out = os.path.join(tmp, f"reused-{first}-{second}")
    launch(1, arguments(tmp, out, max_iters=6, checkpoint=first))
    if first == "full":  # as after a signal with always_save_checkpoint=False
        shutil.copy(os.path.join(out, "ckpt.pt"), os.path.join(out, "last.pt"))
    with open(os.path.join(out, "notes.txt"), "w") as f:
        f.write("of a person")
    old = snapshot(out)
    p = launch(1, arguments(tmp, out, max_iters=2, checkpoint=second))
    run_id = checkpoint.find(out, World()).header["run"]
    aside = f"{os.path.realpath(out)}.{run_id}"
    assert f"{out} had an earlier run; moved it to {aside}\n" in p.stdout
    lock = os.path.join(aside, "lock")  # the new run's until it had moved the directory
    moved = {path: data for path, data in snapshot(aside).items() if path != lock}
    assert moved == {path.replace(out, aside): data for path, data in old.items()
                     if path != os.path.join(out, "lock")}
    assert sorted(os.listdir(out)) == ["lock", "metrics.jsonl", "step-000000002"]
    p = launch(1, arguments(tmp, out, max_iters=4, checkpoint=second, init_from="auto"))
    assert "at step 2" in p.stdout and "moved" not in p.stdout and len(losses(out)) == 4
    p = launch(1, arguments(tmp, aside, max_iters=7, init_from="resume"))
    assert "at step 6" in p.stdout


@pytest.mark.parametrize("file", ["ckpt.pt", "last.pt", "metrics.jsonl", "step-000000001/x",
                                  "events.out.tfevents.1"])
def test_run_moves_what_any_file_of_a_run_shows(tmp_path, file):
    out = tmp_path / "out"
    (out / file).parent.mkdir(parents=True)
    (out / file).touch()
    saver = checkpoint.Saver(str(out), World())
    saver.claim(None, None)
    assert (tmp_path / f"out.{saver.run_id}" / file).exists()
    assert os.listdir(out) == ["lock"]
    with pytest.raises(BlockingIOError):  # the lock is that of the new directory
        with open(out / "lock") as f:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
    saver.still_ours("")


def test_run_leaves_what_no_run_wrote(tmp_path):
    for name in ("notes.txt", "step-of-mine", "ckpt.pt.bak"):
        (tmp_path / name).touch()
    checkpoint.Saver(str(tmp_path), World()).claim(None, None)
    assert sorted(os.listdir(tmp_path)) == ["ckpt.pt.bak", "lock", "notes.txt", "step-of-mine"]


def test_run_that_waited_does_not_take_a_directory_that_moved_meanwhile(tmp_path, monkeypatch):
    """Two runs started at once: the first moves what was there while the second waits for it."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "ckpt.pt").touch()
    first = checkpoint.Saver(str(out), World())
    monkeypatch.setattr(checkpoint.time, "sleep", lambda seconds: first.claim(None, None))
    with pytest.raises(SystemExit, match="was moved or removed"):
        checkpoint.Saver(str(out), World())
    first.still_ours("")
    assert (tmp_path / f"out.{first.run_id}" / "ckpt.pt").exists()


def test_run_moves_the_directory_that_a_link_names(tmp_path):
    """out_dir is a link to a faster disk: the new run goes there too."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk/ckpt.pt").touch()
    (tmp_path / "out").symlink_to(tmp_path / "disk")
    saver = checkpoint.Saver(str(tmp_path / "out"), World())
    saver.claim(None, None)
    saver.still_ours("")
    assert os.listdir(tmp_path / "disk") == ["lock"]
    assert (tmp_path / f"disk.{saver.run_id}/ckpt.pt").exists()


def train_in(here, argv):
    os.chdir(here)
    train.main([str(arg) for arg in argv])


def test_run_does_not_move_the_directory_that_you_are_in(tmp, tmp_path):
    inside = tmp_path / "out" / "inside"
    inside.mkdir(parents=True)
    (tmp_path / "out" / "ckpt.pt").touch()
    for here in (inside, inside.parent):
        p = Ranks(1, train_in, str(here), arguments(tmp, tmp_path / "out")).finish()
        assert p.returncode == 1
        assert p.stderr == (
            f"out_dir={tmp_path}/out has an earlier run, and cannot be moved aside while you are "
            "in it; pass another --out_dir\n")
    assert os.listdir(tmp_path) == ["out"]


def test_run_does_not_follow_a_link_in_place_of_its_lock(tmp, tmp_path):
    """Somebody else may write in a shared directory; a file of ours must not be emptied."""
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "lock").symlink_to(precious)
    p = trained(1, arguments(tmp, tmp_path / "out", max_iters=1))
    assert p.returncode == 1 and p.stderr.startswith(f"cannot write {tmp_path}/out: "), p.stderr
    assert p.stderr.count("\n") == 1 and precious.read_text() == "mine"


@pytest.mark.parametrize("kind, link", [("full", "ckpt.pt.tmp"), ("full", "ckpt.pt"),
                                        ("sharded", "step-000000001")])
def test_run_does_not_follow_a_link_in_place_of_what_it_writes(tmp, tmp_path, kind, link):
    precious, out = tmp_path / "precious", tmp_path / "out"
    precious.mkdir()
    (precious / "mine").write_text("mine")
    world, cfg, _, model, optimizer = built(tmp, checkpoint=kind)
    saver = checkpoint.Saver(str(out), world)
    saver.claim(cfg, None)
    (out / link).symlink_to(precious if kind == "sharded" else precious / "mine")
    save(saver, model, optimizer, 1)
    saver.finish(wait=True)
    assert os.listdir(precious) == ["mine"] and (precious / "mine").read_text() == "mine"
    assert checkpoint.find(str(out), world).header["iter_num"] == 1
    assert not any(path.is_symlink() for path in out.iterdir())


def test_run_has_an_id_in_all_that_it_writes(tmp):
    out = os.path.join(tmp, "ids")
    launch(1, arguments(tmp, out, max_iters=2))
    first = read_ckpt(out)["run"]
    launch(2, arguments(tmp, out, max_iters=4, init_from="resume", checkpoint="sharded"))
    assert checkpoint.find(out, World()).header["run"] == first
    assert {row["run"] for row in read_metrics(out)} == {first}
    launch(1, arguments(tmp, out, max_iters=2))
    assert read_ckpt(out)["run"] != first
    assert {row["run"] for row in read_metrics(out)} == {read_ckpt(out)["run"]}


@pytest.mark.parametrize("init_from", ["scratch", "resume"])
def test_run_that_only_evaluates_touches_nothing(tmp, init_from):
    out = os.path.join(tmp, f"evaluates-{init_from}")
    launch(1, arguments(tmp, out, max_iters=2))
    before = snapshot(out)
    p = launch(1, arguments(tmp, out, init_from=init_from, eval_only=True, tensorboard=True))
    assert "step 0: " in p.stdout or "step 2: " in p.stdout
    assert snapshot(out) == before
    launch(1, arguments(tmp, out + "-nowhere", eval_only=True))
    assert not os.path.exists(out + "-nowhere")


def test_run_resumed_otherwise_says_what_differs(tmp):
    out = os.path.join(tmp, "otherwise")
    launch(1, arguments(tmp, out, max_iters=2))
    run = dict(init_from="resume", log_interval=2, eval_interval=3, max_iters=3)
    p = launch(1, arguments(tmp, out, **run))
    assert "differs" not in p.stdout and "lr_decay_iters" not in p.stdout
    run.update(max_iters=4, lr_decay_iters=3, seed=7, batch_size=3, beta2=0.9,
               dropout=0.1, block_size=8)
    p = launch(1, arguments(tmp, out, **run))
    assert f"this run differs from that of {out}/ckpt.pt: " in p.stdout
    assert (": batch_size=3 (was 2), seed=7 (was 1337), beta2=0.9 (was 0.95), lr_decay_"
            "iters=3 (was 20), block_size=8 (was 16), dropout=0.1 (was 0.0)\n") in p.stdout
    assert ("from step lr_decay_iters=3 to max_iters=4 the learning rate is min_lr=0.0001\n"
            in p.stdout)


def test_run_resumed_with_another_vocabulary_names_a_remedy_that_works(tmp):
    out, other = os.path.join(tmp, "vocabulary"), os.path.join(tmp, "toy-of-80")
    launch(1, arguments(tmp, out, max_iters=1))
    make_data(other, vocab=80)
    p = trained(1, arguments(tmp, out, init_from="resume", dataset=other))
    assert p.returncode == 1 and p.stderr.count("\n") == 1
    assert p.stderr.startswith(f"vocab_size=80 in this run, but {out}/ckpt.pt has vocab_size=67; "
                               "pass its data set, or another out_dir")


# -----------------------------------------------------------------------------
# damage


@pytest.fixture(scope="module")
def sound(tmp):
    """{kind: (out_dir with checkpoints of steps 2 and 4, {key: tensor} of step 4)}."""
    out = {}
    for kind in ("full", "sharded"):
        directory = os.path.join(tmp, f"sound-{kind}")
        launch(2, arguments(tmp, directory, max_iters=4, eval_interval=2, checkpoint=kind))
        source = checkpoint.find(directory, World())
        out[kind] = directory, {key: source.get(key) for key in source.header["shapes"]}
    return out


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_damage_never_loads(sound, tmp_path, kind, capsys):
    """
    40 times a bit or a block anywhere in the newest checkpoint: it is refused, or, of a full one,
    every tensor is as it was (a zip has bytes that mean nothing).
    """
    out, expected = sound[kind]
    files = [os.path.join(out, "ckpt.pt")]
    if kind == "sharded":
        newest = os.path.join(out, "step-000000004")
        files = [os.path.join(newest, name) for name in os.listdir(newest)]
        assert sorted(map(os.path.basename, files)) == [
            ".metadata", "__0_0.distcp", "__1_0.distcp", "header.json"]
    rng, refused = random.Random(4), 0
    for i in range(40):
        path = files[i % len(files)]
        good = open(path, "rb").read()
        data, at = bytearray(good), rng.randrange(len(good))
        if i // 4 % 2:
            data[at:at + 512] = bytes(len(data[at:at + 512]))
        else:
            data[at] ^= 1 << rng.randrange(8)
        with open(path, "wb") as f:
            f.write(data)
        try:
            source = checkpoint.find(out, World())
            step = source.header["iter_num"]
        except SystemExit as e:
            assert kind == "full" and "\n" not in e.code, e.code
            step = None
        if step == 4:
            assert kind == "full" or data == good, (path, at)
            assert all(torch.equal(source.get(key), t) for key, t in expected.items()), (path, at)
        else:
            assert step == (2 if kind == "sharded" else None)
            refused += 1
        with open(path, "wb") as f:
            f.write(good)
    assert refused > 25
    assert checkpoint.find(out, World()).header["iter_num"] == 4


@pytest.mark.parametrize("world, what", [(1, "missing"), (2, "truncated"), (2, "both")])
def test_damage_of_a_sharded_one_falls_back_to_the_older(sound, tmp, tmp_path, world, what):
    out = tmp_path / "out"
    shutil.copytree(sound["sharded"][0], out)
    files = [out / "step-000000004" / "__1_0.distcp"]
    if what == "both":
        files.append(out / "step-000000002" / "__0_0.distcp")
    for path in files:
        if what == "missing":
            path.unlink()
        else:
            path.write_bytes(path.read_bytes()[:-100])
    p = trained(world, arguments(tmp, out, init_from="auto", max_iters=6, checkpoint="sharded"))
    step = out / "step-000000004"
    if what == "both":
        assert p.returncode == 1
        assert p.stderr == (f"{step}: damaged, or not visible to every rank; remove it, or pass "
                            "another out_dir\n")
    else:
        assert p.returncode == 0 and "at step 2" in p.stdout, p.stderr
        assert p.stderr.startswith(f"skipping {step}: damaged, ") and p.stderr.count("\n") == 1


def test_damage_anywhere_in_the_header_is_noticed(sound):
    """Every byte of it, one bit each, and many lengths."""
    path = os.path.join(sound["sharded"][0], "step-000000004")
    file = os.path.join(path, "header.json")
    with open(file, "rb") as f:
        good = f.read()
    rng = random.Random(5)
    flipped = [good[:i] + bytes([good[i] ^ 1 << rng.randrange(8)]) + good[i + 1:]
               for i in range(len(good))]
    try:
        for data in [*flipped, *(good[:n] for n in range(0, len(good), 16)), good + b" ", b"[]"]:
            with open(file, "wb") as f:
                f.write(data)
            with pytest.raises((ValueError, KeyError, TypeError, AttributeError)):
                checkpoint.open_sharded(path)
    finally:
        with open(file, "wb") as f:
            f.write(good)
    assert checkpoint.open_sharded(path).header["iter_num"] == 4


def swap(out, a, b):
    (out / "kept").write_bytes((out / a).read_bytes())
    (out / a).write_bytes((out / b).read_bytes())
    os.replace(out / "kept", out / b)


NEW, OLD = "step-000000004", "step-000000002"


@pytest.mark.parametrize("a, b, left", [
    (f"{NEW}/__0_0.distcp", f"{NEW}/__1_0.distcp", 2),  # of another rank
    (f"{NEW}/__0_0.distcp", f"{OLD}/__0_0.distcp", None),  # of another step
    (f"{NEW}/header.json", f"{OLD}/header.json", None),
    (f"{NEW}/.metadata", f"{NEW}/header.json", 2)])
def test_damage_swapped_files_are_noticed(sound, tmp_path, a, b, left):
    out = tmp_path / "out"
    shutil.copytree(sound["sharded"][0], out)
    assert (out / a).read_bytes() != (out / b).read_bytes()
    swap(out, a, b)
    if left:
        assert checkpoint.find(str(out), World()).header["iter_num"] == left
    else:
        with pytest.raises(SystemExit, match=r"step-00000000\d: damaged"):
            checkpoint.find(str(out), World())


@pytest.mark.parametrize("name", ["__0_0.distcp", "__1_0.distcp", ".metadata", "header.json"])
def test_damage_a_file_of_another_step_or_none_is_noticed(sound, tmp_path, name):
    out = tmp_path / "out"
    shutil.copytree(sound["sharded"][0], out)
    shutil.copy(out / OLD / name, out / NEW / name)
    assert checkpoint.find(str(out), World()).header["iter_num"] == 2
    os.remove(out / NEW / name)
    assert checkpoint.find(str(out), World()).header["iter_num"] == 2


def resumed(tmp, out, **overrides):
    """What a run with init_from=resume begins with: (model, optimizer)."""
    cfg = resolve(tiny(tmp, **{"out_dir": str(out), "init_from": "resume", **overrides}), World())
    cfg, source, _ = train.choose_start(cfg, World())
    return train.build(cfg, World(), source)[1:]


def with_weight(change):
    """An edit of ckpt.pt: another value of its last layer's first matrix."""
    name = "transformer.h.2.attn.c_attn.weight"
    return lambda ckpt: ckpt["model"].update({name: change(ckpt["model"][name])})


ODD = [  # an edit of ckpt.pt, what the line says
    (lambda c: c["config"].update(model=5), "its model is 5"),
    (lambda c: c["config"].update(dataset=5), "its dataset is 5"),
    (lambda c: c["config"].update(model="out-x.evil"), "model='out-x.evil': gpt2 is model.py, any"),
    (lambda c: c["config"].update(seed=RunsCode("ran")), "more in it than tensors and plain value"),
    (lambda c: c["model_args"].update(vocab_size="67"), "vocab_size='67' must be a whole number"),
    (lambda c: c["model_args"].update(n_embd=30.5), "n_embd=30.5 must be a whole number"),
    (lambda c: c["model"].update({"transformer.h.3.ln_1.weight": torch.ones(30)}),
     "is of another model: this one has no model.transformer.h.3.ln_1.weight"),
    (with_weight(torch.Tensor.int), "no dense tensor of floats, but torch.int32"),
    (with_weight(torch.Tensor.bool), "no dense tensor of floats, but torch.bool"),
    (with_weight(torch.Tensor.to_sparse), "no dense tensor of floats, but torch.float32, torch.sp"),
    (with_weight(lambda w: w * torch.nan), "c_attn.weight is not finite (NaN or infinity) in"),
    (lambda c: c["optimizer"]["state"][0]["exp_avg"].fill_(torch.inf),
     "exp_avg.transformer.wte.weight is not finite (NaN or infinity) in ")]


@pytest.mark.parametrize("edit, message", ODD)
def test_damage_of_what_a_full_one_means_is_one_clear_line(sound, tmp, tmp_path, edit, message):
    ckpt = read_ckpt(sound["full"][0])
    edit(ckpt)
    torch.save(ckpt, tmp_path / "ckpt.pt")
    with pytest.raises(SystemExit) as e:
        resumed(tmp, tmp_path)
    assert message in e.value.code and "\n" not in e.value.code
    assert "weights_only" not in e.value.code


@pytest.mark.parametrize("edit, anew", [
    (lambda state: None, 0), (lambda state: state.pop(3), 1), (dict.clear, 40),
    (lambda state: state[3].pop("exp_avg"), 1)])
def test_damage_optimizer_state_that_is_missing_is_said(sound, tmp, tmp_path, capsys, edit, anew):
    ckpt = read_ckpt(sound["full"][0])
    edit(ckpt["optimizer"]["state"])
    torch.save(ckpt, tmp_path / "ckpt.pt")
    model, optimizer = resumed(tmp, tmp_path)
    line = f"{tmp_path}/ckpt.pt lacks optimizer state of {anew} parameters that train now; "
    assert (line in capsys.readouterr().out) == (anew > 0)
    assert len(optimizer.state) == 40 - anew
    model(*torch.ones(2, 1, 4, dtype=torch.long))[1].backward()
    optimizer.step()


def test_checkpoint_that_is_pruned_while_it_is_opened_is_one_clear_line(sound, tmp_path):
    """As when sample.py or the command reads beside a run that saves."""
    out = tmp_path / "out"
    shutil.copytree(sound["sharded"][0], out)
    source = checkpoint.find(str(out), World())
    shutil.rmtree(source.path)
    line = f"{source.path} was removed or damaged while it was read; start again"
    with pytest.raises(SystemExit, match=line):
        source.get("model.transformer.wte.weight")
    with pytest.raises(SystemExit, match=line):
        checkpoint.load(source, GPT(GPTConfig(**source.header["model_args"])), None, World())


def case_not_finite(tmp, out, **overrides):
    """A save when a rank's rows have an infinite number."""
    world, cfg, wrapped, model, optimizer = built(tmp, keep_checkpoints=1, **overrides)
    one_step(world, cfg, wrapped, model, optimizer)
    saver = checkpoint.Saver(out, world)
    saver.claim(cfg, None)
    save(saver, model, optimizer, 1)
    state = optimizer.state[model.transformer.wte.weight]["exp_avg"]
    if world.rank == 1 or cfg.strategy == "ddp":  # where all ranks have the same
        checkpoint.local(state)[-1, -1] = torch.inf
    try:
        save(saver, model, optimizer, 2)
    except SystemExit as e:
        return e.code, checkpoint.find(out, world).header["iter_num"]


@pytest.mark.parametrize("strategy, kind", [("ddp", "full"), ("full_shard", "sharded")])
def test_checkpoint_that_is_not_finite_is_never_saved(tmp, tmp_path, strategy, kind):
    """Whoever has it, no rank saves."""
    kwargs = dict(tmp=tmp, out=str(tmp_path), strategy=strategy, checkpoint=kind)
    for code, kept in values(on_ranks(2, {"save": (case_not_finite, kwargs)}), "save"):
        assert code.startswith("exp_avg.transformer.wte.weight is not finite (NaN or infinity) "
                               "after step 2 and is not saved: try a lower learning_rate")
        assert kept == 1


# -----------------------------------------------------------------------------
# nothing runs


class RunsCode:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def attack_directly(metadata, trap):
    metadata.planner_data = RunsCode(trap)


def attack_by_bytes(metadata, trap):
    """PyTorch would load this entry with pickle: it claims to be no tensor."""
    key = next(iter(metadata.state_dict_metadata))
    metadata.state_dict_metadata[key] = BytesStorageMetadata()


def attack_by_attribute(metadata, trap):
    """A dotted name walks from an admitted class to another object."""
    metadata.planner_data = Metadata.__init__


def attack_by_path(metadata, trap):
    """Tensors from a file outside of the directory, which no checksum covers."""
    next(iter(metadata.storage_data.values())).relative_path = "../x"


RUNS, READS = "it wants to run", "its .metadata names a file that is not beside it, or not in"


@pytest.mark.parametrize("attack, message", [
    (attack_directly, RUNS), (attack_by_bytes, RUNS), (attack_by_attribute, RUNS),
    (attack_by_path, READS)])
def test_security_metadata_runs_no_code(sound, tmp, tmp_path, attack, message):
    """Through every door: resume, sample, the command; and where PyTorch itself reads it."""
    out, trap = tmp_path / "out", tmp_path / "ran"
    step = out / "step-000000004"
    shutil.copytree(sound["sharded"][0], out)
    shutil.rmtree(out / "step-000000002")
    metadata = pickle.loads((step / ".metadata").read_bytes())
    attack(metadata, str(trap))
    crafted = pickle.dumps(metadata)
    (step / ".metadata").write_bytes(crafted)
    header = header_of(step)
    header["files"][".metadata"] = zlib.crc32(crafted)  # an attacker would do so too
    del header["checksum"]
    (step / "header.json").write_text(checkpoint.sealed(header))
    resume = arguments(tmp, out, init_from="resume", max_iters=6)
    for file, argv in [(train, resume), (sample, [f"--out_dir={out}"]),
                       (checkpoint, ["full", str(out)])]:
        p = Ranks(1, file.main, argv).finish()
        assert p.returncode == 1 and message in p.stderr, p.stderr
        assert p.stderr.count("\n") == 1
    if message == RUNS:
        reader = checkpoint.MetadataReader(str(step))
        with pytest.raises(BaseException, match=f"{RUNS}|metadata is None"):  # 2.11 says less
            dcp.load({"model.x": torch.zeros(1)}, storage_reader=reader, no_dist=True)
    assert not trap.exists()


@pytest.mark.parametrize("name", ["../x.distcp", "/x.distcp"])
def test_security_a_file_elsewhere_is_not_read(sound, tmp_path, name):
    """Though both lists agree on it, and on its checksum."""
    step = tmp_path / "step-000000004"
    shutil.copytree(os.path.join(sound["sharded"][0], "step-000000004"), step)
    header = header_of(step)
    header["files"][name] = 0
    del header["checksum"]
    (step / "header.json").write_text(checkpoint.sealed(header))
    with pytest.raises(ValueError, match="names a file that is not beside it"):
        checkpoint.open_sharded(str(step))


def test_security_pytorch_alone_would_have_run_it(tmp_path):
    """The trap is a real one."""
    dcp.save({"x": torch.zeros(1)}, checkpoint_id=tmp_path, no_dist=True)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    attack_directly(metadata, str(tmp_path / "ran"))
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    dcp.FileSystemReader(tmp_path).read_metadata()
    assert (tmp_path / "ran").exists()


# -----------------------------------------------------------------------------
# memory


def test_checkpoint_gather_memory(tmp):
    """
    Peak host memory of a full save at 2 ranks, above what training holds: rank 0 the full state,
    rank 1 one parameter.
    """
    kwargs = dict(tmp=tmp, out=os.path.join(tmp, "memory"))
    results = on_ranks(2, {"memory": (case_gather_memory, kwargs)})
    zero, one = values(results, "memory")
    print(zero, one)
    slack = 30e6  # buffers of gloo and of the file
    assert zero["state"] >= 200e6
    assert zero["above"] <= 1.15 * zero["state"] + slack
    assert one["above"] <= 2 * one["largest"] + slack  # gloo's receive buffer beside the parameter


def case_gather_memory(tmp, out):
    sizes = dict(n_layer=6, n_embd=510, n_head=3, gradient_accumulation_steps=2)
    world, cfg, wrapped, model, optimizer = built(tmp, strategy="full_shard", **sizes)
    one_step(world, cfg, wrapped, model, optimizer)
    saver = checkpoint.Saver(out, world)
    saver.claim(cfg, None)
    before = resident("VmRSS", reset=True)
    save(saver, model, optimizer, 1)
    n = [p.numel() * 4 for p in model.parameters()]
    return dict(above=resident("VmHWM") - before, state=3 * sum(n), largest=max(n))


# -----------------------------------------------------------------------------
# Hugging Face's format


def case_huggingface(tmp, path):
    """Logits of a Hugging Face directory, sharded."""
    world = setup("cpu", "auto")
    cfg = tiny(tmp, strategy="full_shard", init_from=path)
    source = train.open_start(cfg, world)
    cfg = resolve(with_model(cfg, source), world)
    wrapped, _, _ = train.build(cfg, world, source)
    idx = torch.arange(20)[None]
    with fsdp.inference(wrapped):
        logits, _ = wrapped(idx, idx)
    return logits[0].tolist()


def test_huggingface_in_and_out(tmp, tmp_path):
    """Logits of transformers' own model, loaded here sharded on two ranks, trained, and back."""
    pytest.importorskip("safetensors")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=2, n_head=3, n_embd=30, vocab_size=91, n_positions=24)
    theirs = transformers.GPT2LMHeadModel(config).eval()
    for name, p in theirs.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(p, std=0.1)
    theirs.save_pretrained(tmp_path / "hf")
    idx = torch.arange(20)[None]
    expected = theirs(idx).logits[0]
    kwargs = dict(tmp=tmp, path=str(tmp_path / "hf"))
    for logits in values(on_ranks(2, {"hf": (case_huggingface, kwargs)}), "hf"):
        assert (torch.tensor(logits) - expected).abs().max() < 1e-5
    out = tmp_path / "out"
    launch(1, arguments(tmp, out, init_from=tmp_path / "hf", max_iters=2, block_size=20, n_layer=2))
    p = script("huggingface.py", out, tmp_path / "back")
    assert p.returncode == 0, p.stderr
    back = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "back").eval()
    assert back.config.resid_pdrop == back.config.attn_pdrop == 0.0  # this run's
    ckpt = read_ckpt(out)
    model = GPT(GPTConfig(**ckpt["model_args"])).eval()
    model.load_state_dict(ckpt["model"])
    assert (model(idx, idx)[0] - back(idx).logits).abs().max() < 1e-5
    assert (back(idx).logits - expected).abs().max() > 1e-3  # it has trained in between


def test_huggingface_bad_input_is_one_clear_line(tmp_path):
    pytest.importorskip("safetensors")
    p = script("huggingface.py", tmp_path, tmp_path / "back")
    assert p.returncode == 1
    assert p.stderr == f"{tmp_path}: no checkpoint there\n"
    assert not os.path.exists(tmp_path / "back")
    with pytest.raises(SystemExit, match="not a model in Hugging Face format"):
        huggingface.open_pretrained(str(tmp_path))


def stray_index(path):
    """Names are a directory's own: what an index names is not read."""
    (path / "model.safetensors.index.json").write_text('{"weight_map": {"x": "../x.safetensors"}}')


def lost_shard(path):
    os.rename(path / "model.safetensors", path / "model-00001-of-00002.safetensors")
    (path / "model.safetensors.index.json").write_text("{}")
    edited(n_layer=4)(path)


def edited(**values):
    """An edit of config.json."""
    def edit(path):
        file = path / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **values}))
    return edit


def replaced(change):
    """An edit of a weight in model.safetensors."""
    def edit(path):
        from safetensors.torch import load_file, save_file
        tensors = load_file(path / "model.safetensors")
        name = "transformer.h.2.ln_1.weight"
        save_file({**tensors, name: change(tensors[name])}, path / "model.safetensors")
    return edit


@pytest.mark.parametrize("edit, message", [
    (edited(n_embd=30.0, n_layer=3.0), None),
    (replaced(torch.Tensor.double), None),
    (edited(n_layer=2.5), "n_layer=2.5 must be a whole number"),
    (edited(n_embd=1e9, n_head=1), "size calculation overflowed"),
    (edited(n_layer=2), "is of another model: this one has no model.transformer.h.2."),
    (replaced(torch.Tensor.int), "transformer.h.2.ln_1.weight is I32, not floats"),
    (replaced(torch.Tensor.bool), "transformer.h.2.ln_1.weight is BOOL, not floats"),
    (replaced(lambda w: w * torch.nan), "ln_1.weight is not finite (NaN or infinity) in "),
    (stray_index, None),
    (lost_shard, "transformer.h.3.ln_1.weight is missing, not (30,)")])
def test_huggingface_odd_files_are_one_clear_line(sound, tmp, tmp_path, edit, message):
    pytest.importorskip("safetensors")
    huggingface.export(checkpoint.find(sound["full"][0], World()), str(tmp_path))
    edit(tmp_path)
    try:
        resumed(tmp, "", init_from=str(tmp_path))
        said = None
    except (SystemExit, RuntimeError) as e:  # ranks.run makes a line of the overflow
        said = str(e)
    assert said == message if message is None else message in said and "\n" not in said


@pytest.mark.parametrize("argv, message", [
    ([], None), (["--n_layer=3", "--block_size=8", "--dropout=0.1"], None),
    (["--n_layer=12"], "n_layer=12 in this run, but DIR has n_layer=3; pass --n_layer=3, or "),
    (["--vocab_size=50304"], "vocab_size=50304 in this run, but DIR has vocab_size=67; pass --v"),
    (["--block_size=32"], "block_size=32 in this run, but DIR has block_size=16; pass --block_"),
    (["--model=llama"], "model=llama in this run, but DIR has model=gpt2; pass --model=gpt2,")])
def test_huggingface_model_and_sizes_that_contradict_it_are_refused(sound, tmp_path, argv, message):
    """If they are given, though they may be the defaults; what is not given is the directory's."""
    pytest.importorskip("safetensors")
    huggingface.export(checkpoint.find(sound["full"][0], World()), str(tmp_path))
    cfg = resolve(load_config([*argv, f"--init_from={tmp_path}", "--device=cpu"]), World())
    if message is None:
        assert train.choose_start(cfg, World())[0].n_layer == 3
    else:
        with pytest.raises(SystemExit, match=re.escape(message.replace("DIR", str(tmp_path)))):
            train.choose_start(cfg, World())


def test_huggingface_out_without_biases_writes_zeros(tmp, tmp_path):
    """GPT-2 has biases everywhere; a model without them gives the same logits there."""
    pytest.importorskip("safetensors")
    transformers = pytest.importorskip("transformers")
    launch(1, arguments(tmp, tmp_path / "out", max_iters=2, bias=False))
    source = checkpoint.find(str(tmp_path / "out"), World())
    with pytest.raises(SystemExit, match="cannot write /proc/x: "):
        huggingface.export(source, "/proc/x")
    huggingface.export(source, str(tmp_path / "hf"))
    theirs = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "hf").eval()
    ckpt = read_ckpt(tmp_path / "out")
    model = GPT(GPTConfig(**ckpt["model_args"])).eval()
    model.load_state_dict(ckpt["model"])
    idx = torch.arange(16)[None]
    assert (model(idx, idx)[0] - theirs(idx).logits).abs().max() < 1e-5

"""
Checkpoints: what one run writes another reads, at any world size and strategy, bit for bit.

    python -m pytest -q tests/test_checkpoint.py
    python -m pytest -q tests/test_checkpoint.py -k "nanogpt or huggingface"
"""

import os
import pickle
import random
import re
import shutil
import zlib
from concurrent.futures import Future

import pytest
import torch
import torch.distributed.checkpoint as dcp
from harness import (
    HERE,
    Ranks,
    arguments,
    assert_same_weights,
    launch,
    losses,
    make_data,
    on_ranks,
    python,
    read_ckpt,
    read_metrics,
    resident,
    tiny,
    trained,
    values,
)
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

import checkpoint
import fsdp
import outdir
import sample
import train
from configurator import resolve
from data.loader import Batches
from huggingface import export, open_pretrained
from model import GPT, GPTConfig
from ranks import setup

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


def latest(out):
    """The directory that out/latest names."""
    path = os.path.join(out, "latest")
    return os.path.join(out, open(path).read().strip()) if os.path.exists(path) else None


def header_of(model, optimizer, cfg, iter_num):
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    return checkpoint.make_header(model, optimizer, cfg, "a-run", iter_num, 2.5, scaler)


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
    p = python("checkpoint.py", "full", out)
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
    launch(1, arguments(tmp, whole, max_iters=18))
    for i, (world, strategy, kind, more) in enumerate(CHAIN):
        run = dict(strategy=strategy, checkpoint=kind, init_from="auto", **more)
        launch(world, arguments(tmp, chain, max_iters=3 * (i + 1), **run))
    assert losses(chain) == pytest.approx(losses(whole), rel=1e-5)
    assert len(losses(chain)) == 18
    assert_same_weights(read_ckpt(chain)["model"], read_ckpt(whole)["model"], 1e-4)
    iters = [row["iter"] for row in read_metrics(chain) if "loss" in row]
    assert iters == list(range(18))  # appended without duplicates


@pytest.mark.parametrize("world, kind, model", [
    (1, "full", "gpt2"), (2, "full", "gpt2"), (2, "sharded", "gpt2"),
    (2, "full", "llama"), (2, "sharded", "llama")])
def test_checkpoint_resume_is_bitwise(tmp, world, kind, model):
    """30 = 15 + 15 steps, with dropout where there is one, evaluation at another interval."""
    whole, parts = (os.path.join(tmp, f"resume-{world}-{kind}-{model}-{name}")
                    for name in ("whole", "parts"))
    run = dict(model=model, checkpoint=kind, gradient_accumulation_steps=2)
    if model == "gpt2":
        run["dropout"] = 0.1
    launch(world, arguments(tmp, whole, max_iters=30, eval_interval=30, **run))
    launch(world, arguments(tmp, parts, max_iters=15, eval_interval=4, **run))
    run.update(init_from="resume")
    p = launch(world, arguments(tmp, parts, max_iters=30, eval_interval=7, **run))
    assert "at step 15" in p.stdout
    assert losses(parts) == losses(whole)
    if kind == "sharded":
        kept = sorted(d for d in os.listdir(parts) if d.startswith("step-"))
        assert kept == ["step-000000028", "step-000000030"]  # keep_checkpoints=2
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
    assert checkpoint.find(out).path == best
    torch.save({**ckpt, "iter_num": 3}, last)
    assert checkpoint.find(out).path == last
    p = launch(1, arguments(tmp, out, max_iters=4, init_from="resume"))
    assert f"starting from {last} at step 3" in p.stdout


def test_checkpoint_freeze_then_unfreeze_then_freeze(tmp):
    """Moments of what is frozen do not exist; they start when it trains, and go again."""
    out = os.path.join(tmp, "thaw")
    launch(2, arguments(tmp, out, max_iters=2, freeze=FREEZE))
    ckpt = read_ckpt(out)
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
    assert ckpt.keys() == theirs | {"param_names", "run", "scaler"}
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
    """Theirs: _orig_mod. prefixes, causal masks, no parameter names; optimizer included."""
    out, whole = os.path.join(tmp, "from-nanogpt"), os.path.join(tmp, "from-nanogpt-whole")
    launch(1, arguments(tmp, out, max_iters=3, bias=False))
    ckpt = read_ckpt(out)
    weights = {"_orig_mod." + name: tensor for name, tensor in ckpt["model"].items()}
    for i in range(3):
        weights[f"_orig_mod.transformer.h.{i}.attn.bias"] = torch.ones(1, 1, 16, 16)
    theirs = {key: ckpt[key] for key in ("optimizer", "model_args", "iter_num", "config")}
    theirs.update(model=weights, best_val_loss=torch.tensor(9.0))
    torch.save(theirs, os.path.join(out, "ckpt.pt"))
    launch(2, arguments(tmp, out, max_iters=6, bias=False, init_from="resume"))
    launch(1, arguments(tmp, whole, max_iters=6, bias=False))
    assert losses(out) == pytest.approx(losses(whole)[3:], rel=1e-5)  # theirs logged elsewhere


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
def test_checkpoint_of_an_untied_model_has_its_head(tmp, tmp_path, monkeypatch, kind):
    (tmp_path / "untied.py").write_text(UNTIED)
    monkeypatch.syspath_prepend(tmp_path)  # the forked ranks get it too
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
    """The same state, saved full and sharded."""
    world, cfg, wrapped, model, optimizer = built(tmp, strategy="full_shard", freeze=freeze)
    one_step(world, cfg, wrapped, model, optimizer)
    header = header_of(model, optimizer, cfg, 1)
    checkpoint.save_full(os.path.join(out, "direct.pt"), model, optimizer, header, world)
    saver = checkpoint.ShardedSaver(out, 2, world)
    saver.save(model, optimizer, header)
    saver.finish(wait=True)
    return latest(out)


@pytest.mark.parametrize("freeze", ["", FREEZE])
def test_checkpoint_sharded_made_full_equals_the_full_one(tmp, tmp_path, freeze):
    kwargs = dict(tmp=tmp, out=str(tmp_path), freeze=freeze)
    results = on_ranks(2, {"both": (case_both_kinds, kwargs)})
    assert values(results, "both") == [str(tmp_path / "step-000000001")] * 2
    assert "step-000000001" in make_full(tmp_path)
    ours, direct = read_ckpt(tmp_path), read_ckpt(tmp_path, "direct.pt")
    assert_equal(ours, direct)
    head, wte = ours["model"]["lm_head.weight"], ours["model"]["transformer.wte.weight"]
    assert head.data_ptr() == wte.data_ptr()


def test_checkpoint_command_without_a_sharded_one_is_one_clear_line(tmp, tmp_path):
    p = python("checkpoint.py", "full", tmp_path)
    assert p.returncode == 1
    assert p.stderr == f"{tmp_path}: no checkpoint there\n"
    launch(1, arguments(tmp, tmp_path, max_iters=1))
    assert "is a full checkpoint already" in make_full(tmp_path)


# -----------------------------------------------------------------------------
# complete or not there


def test_checkpoint_file_is_synced_before_it_gets_its_name(tmp_path, monkeypatch):
    """A crash of the machine may undo what was not synced, but not what was renamed before it."""
    calls, path = [], str(tmp_path / "file")
    replace = os.replace

    def recorded(source, target):
        calls.append(("rename", source, target))
        replace(source, target)

    monkeypatch.setattr(outdir, "sync", lambda path: calls.append(("sync", path)))
    monkeypatch.setattr(os, "replace", recorded)
    with outdir.atomic(path) as tmp:
        open(tmp, "w").close()
        assert not os.path.exists(path)
    assert calls == [("sync", tmp), ("rename", tmp, path), ("sync", str(tmp_path))]
    synced = []
    monkeypatch.undo()
    monkeypatch.setattr(os, "fsync", synced.append)
    outdir.sync(path)
    assert len(synced) == 1


def test_checkpoint_latest_moves_when_all_is_written_and_old_ones_go(tmp, tmp_path, monkeypatch):
    world, cfg, _, model, optimizer = built(tmp)
    saver = checkpoint.ShardedSaver(str(tmp_path), 2, world)
    pending = []  # saves under way in the background

    def async_save(tensors, checkpoint_id, process_group):
        pending.append(Future())
        os.makedirs(checkpoint_id)
        open(os.path.join(checkpoint_id, ".metadata"), "w").close()
        return pending[-1]

    saver.group = "a process group"
    monkeypatch.setattr(checkpoint.dcp, "async_save", async_save)
    for step in (1, 2, 3):
        before = latest(str(tmp_path))
        saver.save(model, optimizer, header_of(model, optimizer, cfg, step))
        saver.finish()
        assert latest(str(tmp_path)) == before  # half-written
        pending[-1].set_result(None)
        saver.finish()
        assert latest(str(tmp_path)) == str(tmp_path / f"step-{step:09d}")
    names = ["latest", "step-000000002", "step-000000003"]
    assert sorted(os.listdir(tmp_path)) == names
    assert sorted(os.listdir(tmp_path / names[-1])) == [".metadata", "header.pt"]
    saver.save(model, optimizer, header_of(model, optimizer, cfg, 4))
    pending[-1].set_exception(OSError("disk full"))
    with pytest.raises(SystemExit, match="disk full; the previous checkpoint is untouched"):
        saver.finish()
    assert latest(str(tmp_path)) == str(tmp_path / "step-000000003")
    assert {"step-000000002", "step-000000003"} <= set(os.listdir(tmp_path))


def test_checkpoint_of_an_older_versions_sharded_layout_is_one_clear_line(tmp_path):
    path = tmp_path / "step-000000002"
    path.mkdir()
    torch.save({"iter_num": 2, "steps": {}}, path / "header.pt")
    (path / ".metadata").touch()
    with pytest.raises(SystemExit, match="an older version wrote it") as e:
        checkpoint.find(str(tmp_path))
    assert "\n" not in str(e.value)


def test_checkpoint_of_weights_alone_is_opened(tmp_path):
    weights = {"model": {"w": torch.ones(2)}, "iter_num": 3, "best_val_loss": 1.0,
               "model_args": {}, "config": {}}
    torch.save(weights, tmp_path / "ckpt.pt")
    assert checkpoint.find(str(tmp_path)).header["shapes"] == {"model.w": (2,)}


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
    old = snapshot(out)
    if first == "full":  # as after a signal with always_save_checkpoint=False
        old[os.path.join(out, "last.pt")] = old[os.path.join(out, "ckpt.pt")]
        with open(os.path.join(out, "last.pt"), "wb") as f:
            f.write(old[os.path.join(out, "last.pt")])
    p = launch(1, arguments(tmp, out, max_iters=2, checkpoint=second))
    [aside] = [name for name in os.listdir(out) if name.startswith("before-")]
    assert f"{out} has an earlier run; moved it to {out}/{aside}\n" in p.stdout
    moved = {path.replace(aside + os.sep, ""): data
             for path, data in snapshot(os.path.join(out, aside)).items()}
    assert moved == {path: data for path, data in old.items() if not path.endswith("lock")}
    p = launch(1, arguments(tmp, out, max_iters=4, checkpoint=second, init_from="auto"))
    assert "at step 2" in p.stdout and len(losses(out)) == 4
    p = launch(1, arguments(tmp, os.path.join(out, aside), max_iters=7, init_from="resume"))
    assert "at step 6" in p.stdout


def test_run_has_an_id_in_all_that_it_writes(tmp):
    out = os.path.join(tmp, "ids")
    launch(1, arguments(tmp, out, max_iters=2))
    first = read_ckpt(out)["run"]
    launch(2, arguments(tmp, out, max_iters=4, init_from="resume", checkpoint="sharded"))
    assert checkpoint.find(out).header["run"] == first
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
    assert "differs" not in p.stdout
    run.update(max_iters=4, seed=7, batch_size=3, beta2=0.9)
    p = launch(1, arguments(tmp, out, **run))
    assert f"this run differs from that of {out}/ckpt.pt: " in p.stdout
    assert ": batch_size=3 (was 2), seed=7 (was 1337), beta2=0.9 (was 0.95)\n" in p.stdout


def test_run_resumed_with_another_vocabulary_names_a_remedy_that_works(tmp):
    out, other = os.path.join(tmp, "vocabulary"), os.path.join(tmp, "toy-of-80")
    launch(1, arguments(tmp, out, max_iters=1))
    make_data(other, vocab=80)
    p = trained(1, arguments(tmp, out, init_from="resume", dataset=other))
    assert p.returncode == 1 and p.stderr.count("\n") == 1
    assert p.stderr.startswith(f"vocab_size=80 in this run, but {out}/ckpt.pt has vocab_size=67; "
                               "use the data set that it was trained on")


def test_run_resumed_drops_damaged_lines_of_its_metrics(tmp):
    out = os.path.join(tmp, "bad-lines")
    launch(1, arguments(tmp, out, max_iters=2))
    path = os.path.join(out, "metrics.jsonl")
    lines = open(path, "rb").read().splitlines(keepends=True)
    # of two runs at once, of a bad disk, and the half line of a kill
    bad = [b'{"iter": 1, "lo{"iter": 1}\n', b"\xff\x00\n", b"3\n", b'{"loss": 1}\n', b'{"it']
    with open(path, "wb") as f:
        f.writelines([lines[0], *bad[:4], *lines[1:], bad[4]])
    p = launch(1, arguments(tmp, out, max_iters=3, init_from="resume"))
    assert p.stderr == f"{path}: 4 damaged lines left out\n"
    assert [row["iter"] for row in read_metrics(out) if "loss" in row] == [0, 1, 2]


# -----------------------------------------------------------------------------
# damage


@pytest.fixture(scope="module")
def sound(tmp):
    """{kind: (out_dir with checkpoints of steps 2 and 4, {key: tensor} of step 4)}."""
    out = {}
    for kind in ("full", "sharded"):
        directory = os.path.join(tmp, f"sound-{kind}")
        launch(2, arguments(tmp, directory, max_iters=4, eval_interval=2, checkpoint=kind))
        source = checkpoint.find(directory)
        out[kind] = directory, {key: source.get(key) for key in source.header["shapes"]}
    return out


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_damage_never_loads(sound, tmp_path, kind, capsys):
    """
    40 times a bit or a block anywhere in the newest checkpoint: it is refused, or every tensor is
    as it was (a zip has bytes that mean nothing).
    """
    out, expected = sound[kind]
    files = [os.path.join(out, "ckpt.pt")]
    if kind == "sharded":
        newest = os.path.join(out, "step-000000004")
        files = [os.path.join(newest, name) for name in os.listdir(newest)]
        assert sorted(map(os.path.basename, files)) == [
            ".metadata", "__0_0.distcp", "__1_0.distcp", "header.pt"]
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
            source = checkpoint.find(out)
            step = source.header["iter_num"]
        except SystemExit as e:
            assert kind == "full" and "\n" not in e.code, e.code
            step = None
        if step == 4:
            assert all(torch.equal(source.get(key), t) for key, t in expected.items()), (path, at)
        else:
            assert step == (2 if kind == "sharded" else None)
            refused += 1
        with open(path, "wb") as f:
            f.write(good)
    assert refused > 25
    assert checkpoint.find(out).header["iter_num"] == 4


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


@pytest.mark.parametrize("attack", [attack_directly, attack_by_bytes, attack_by_attribute])
def test_security_metadata_runs_no_code(sound, tmp, tmp_path, attack):
    """Through every door: resume, sample, the command; and where PyTorch itself reads it."""
    out, trap = tmp_path / "out", tmp_path / "ran"
    step = out / "step-000000004"
    shutil.copytree(sound["sharded"][0], out)
    shutil.rmtree(out / "step-000000002")
    metadata = pickle.loads((step / ".metadata").read_bytes())
    attack(metadata, str(trap))
    crafted = pickle.dumps(metadata)
    (step / ".metadata").write_bytes(crafted)
    header = torch.load(step / "header.pt", weights_only=True)
    header["metadata_crc32"] = zlib.crc32(crafted)  # an attacker would do so too
    torch.save(header, step / "header.pt")
    resume = arguments(tmp, out, init_from="resume", max_iters=6)
    for script, argv in [(train, resume), (sample, [f"--out_dir={out}"]),
                         (checkpoint, ["full", str(out)])]:
        p = Ranks(1, script.main, argv).finish()
        assert p.returncode == 1 and "it wants to run" in p.stderr, p.stderr
        assert p.stderr.count("\n") == 1
    reader = checkpoint.MetadataReader(str(step))
    with pytest.raises(BaseException, match="it wants to run|metadata is None"):  # 2.11 says less
        dcp.load({"model.x": torch.zeros(1)}, storage_reader=reader, no_dist=True)
    assert not trap.exists()


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
    header = header_of(model, optimizer, cfg, 1)
    before = resident("VmRSS", reset=True)
    checkpoint.save_full(os.path.join(out, "ckpt.pt"), model, optimizer, header, world)
    n = [p.numel() * 4 for p in model.parameters()]
    return dict(above=resident("VmHWM") - before, state=3 * sum(n), largest=max(n))


# -----------------------------------------------------------------------------
# Hugging Face's format


def case_huggingface(tmp, path):
    """Logits of a Hugging Face directory, sharded."""
    world = setup("cpu", "auto")
    cfg = tiny(tmp, strategy="full_shard", init_from=path)
    source = train.open_start(cfg, world)
    cfg = resolve(train.with_architecture(cfg, source), world)
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
    launch(1, arguments(tmp, out, init_from=tmp_path / "hf", max_iters=2, block_size=20))
    p = python(os.path.join(HERE, "huggingface.py"), out, tmp_path / "back")
    assert p.returncode == 0, p.stderr
    back = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "back").eval()
    ckpt = read_ckpt(out)
    model = GPT(GPTConfig(**ckpt["model_args"])).eval()
    model.load_state_dict(ckpt["model"])
    assert (model(idx, idx)[0] - back(idx).logits).abs().max() < 1e-5
    assert (back(idx).logits - expected).abs().max() > 1e-3  # it has trained in between


def test_huggingface_bad_input_is_one_clear_line(tmp_path):
    pytest.importorskip("safetensors")
    p = python("huggingface.py", tmp_path, tmp_path / "back")
    assert p.returncode == 1
    assert p.stderr == f"{tmp_path}: no checkpoint there\n"
    assert not os.path.exists(tmp_path / "back")
    with pytest.raises(SystemExit, match="not a model in Hugging Face format"):
        open_pretrained(str(tmp_path))


def test_huggingface_out_without_biases_writes_zeros(tmp, tmp_path):
    """GPT-2 has biases everywhere; a model without them gives the same logits there."""
    pytest.importorskip("safetensors")
    transformers = pytest.importorskip("transformers")
    launch(1, arguments(tmp, tmp_path / "out", max_iters=2, bias=False))
    export(checkpoint.find(str(tmp_path / "out")), str(tmp_path / "hf"))
    theirs = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "hf").eval()
    ckpt = read_ckpt(tmp_path / "out")
    model = GPT(GPTConfig(**ckpt["model_args"])).eval()
    model.load_state_dict(ckpt["model"])
    idx = torch.arange(16)[None]
    assert (model(idx, idx)[0] - theirs(idx).logits).abs().max() < 1e-5

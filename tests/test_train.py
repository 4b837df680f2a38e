"""
Training: that every option does what its help says, that the loop stops, evaluates and saves in
this order, what a start takes from a checkpoint, and that the log says what happened.

    python -m pytest -q tests/test_train.py

A loss alone would not notice most of this, so these tests look at the mechanism: what the scaler
did, what was called in which order, what a clock says.
"""

import os
import re
import signal
import threading
from dataclasses import asdict
from unittest.mock import patch

import numpy as np
import pytest
import torch
from harness import on_ranks, refused, values
from torch.nn import functional as F
from training import (
    TINY,
    built,
    losses,
    make_data,
    plain_gpt,
    read_ckpt,
    run_training,
    started,
    steps,
    tiny,
)

import checkpoint
import metrics
import ranks
import saves
import start
import train
from configurator import Keys, as_dict, load_config
from data.loader import Batches
from ranks import StopSignal, World

# -----------------------------------------------------------------------------
# options


def test_option_bfloat16_is_autocast_where_nothing_is_sharded(tmp):
    """In training and evaluation. FSDP2's policy casts by itself: test_fsdp_functions.py."""
    run, seen = built(tmp, dtype="bfloat16", gradient_accumulation_steps=2), []
    run.model.blocks[1].register_forward_pre_hook(
        lambda *args: seen.append(torch.is_autocast_enabled("cpu")))
    steps(run)
    train.evaluate(run.wrapped, run.batches, run.cfg, run.world)
    assert len(seen) > 2 and all(seen)


def test_option_dropout_is_on_where_gpt2_has_it():
    """After the embeddings, on attention's weights, and at the end of both branches of a block."""
    gpt, idx = plain_gpt(dropout=0.2), torch.arange(16)[None]
    for training in (True, False):
        gpt.train(training)
        for dtype in (torch.float32, torch.bfloat16):  # attention is fused, or written out
            with (patch.object(F, "dropout", wraps=F.dropout) as plain,
                  patch.object(F, "scaled_dot_product_attention",
                               wraps=F.scaled_dot_product_attention) as fused,
                  torch.autocast("cpu", dtype, enabled=dtype != torch.float32)):
                gpt(idx, idx)
            # nn.Dropout says whether it is on, after its rate
            rates = [call.args[1] * all(call.args[2:3]) for call in plain.call_args_list]
            rates += [call.kwargs["dropout_p"] for call in fused.call_args_list]
            assert rates == [0.2 * training] * (1 + 3 * 3)


def test_option_frozen_parameters_may_have_half_the_memory(tmp):
    model = train.meta_model(tiny(tmp, freeze="wte|wpe", frozen_dtype="bfloat16"))
    types = {p.requires_grad: p.dtype for p in model.parameters()}
    assert types == {True: torch.float32, False: torch.bfloat16}


# -----------------------------------------------------------------------------
# where a run starts


SIZES = dict(n_layer=2, n_head=2, n_embd=8, block_size=32, vocab_size=67, bias=False)


def started_on(tmp, *flags, init_from="resume", sizes=SIZES, **config):
    """The final config of a run, given a checkpoint of these sizes and config."""
    own = asdict(tiny(tmp, **SIZES, dropout=0.5))
    config = {"model": "gpt2", **(config or own)}
    header = dict(model_args=dict(sizes, dropout=0.5), config=config)
    source = checkpoint.Source("there/ckpt.pt", header, {})
    cfg = load_config([f"--dataset={tmp}/toy", *flags])
    return start.final_config(cfg, source, init_from in ("resume", "auto"), World())


def test_start_from_another_run_takes_its_weights_alone(tmp, capsys):
    """Not its step, its best loss, its moments or its loss scale."""
    run_training(tmp, "another", max_iters=2, eval_interval=2)
    saved = read_ckpt(os.path.join(tmp, "another"))
    assert saved["iter_num"] == 2 and saved["optimizer"]["state"]
    saved["scaler"] = dict(scale=128.0)  # as float16 has it
    torch.save(saved, os.path.join(tmp, "another", "ckpt.pt"))
    cfg = tiny(tmp, init_from=os.path.join(tmp, "another"), strategy="single")
    cfg, source, resumed = started(cfg, World())
    assert not resumed
    assert (source.header["iter_num"], source.header["best_val_loss"]) == (0, 1e9)
    assert source.header["scaler"] is None
    wrapped, optimizer = train.build(train.meta_model(cfg), cfg, World(), source)
    assert not optimizer.state  # it comes in the first step
    assert "lacks" not in capsys.readouterr().out  # nor was it wanted
    for name, p in wrapped.named_parameters():
        assert torch.equal(p, saved["model"][name]), name


def test_start_takes_the_checkpoints_model_and_sizes_and_this_runs_dropout(tmp, models):
    (models / "other.py").write_text(
        "from dataclasses import dataclass\n"
        "from model import GPT as Model, GPTConfig\n"
        "@dataclass\n"
        "class ModelConfig(GPTConfig):\n"
        "    n_own: int = 1\n")
    cfg = started_on(tmp, "--dropout=0.25", "--n_layer=2")
    assert {key: getattr(cfg.sizes, key) for key in SIZES} == SIZES and cfg.sizes.dropout == 0.25
    cfg = started_on(tmp, sizes=dict(SIZES, n_own=3), model="other", optimizer="adamw")
    assert (cfg.model, cfg.sizes.n_own) == ("other", 3)


@pytest.mark.parametrize("init_from, flags, theirs, expected", [
    ("resume", [], 32, 32), ("resume", [], 4096, 4096), ("auto", ["--block_size=16"], 32, 16),
    # fine-tuning: at most the default, 1024
    ("gpt2", [], 32, 32), ("gpt2", [], 4096, 1024), ("gpt2", ["--block_size=16"], 32, 16)])
def test_start_may_crop_the_context(tmp, init_from, flags, theirs, expected):
    """A longer one would take more memory."""
    cfg = started_on(tmp, *flags, init_from=init_from, sizes=dict(SIZES, block_size=theirs))
    assert cfg.sizes.block_size == expected


def test_start_says_each_key_that_has_changed(tmp, capsys):
    """But init_from, which every resumed run sets."""
    started_on(tmp, init_from="gpt2")  # another run, and not this one going on
    assert capsys.readouterr().out == ""
    same = [f"--{key}={getattr(tiny(tmp), key)}" for key in TINY if hasattr(Keys, key)]
    started_on(tmp, *same, "--init_from=auto", "--batch_size=12", "--block_size=8", "--freeze=wpe")
    said = capsys.readouterr().out.splitlines()
    moved = "; text is skipped or comes again"
    changed = (
        ("batch_size=12", "2", moved), ("freeze='wpe'", "''", ""), ("block_size=8", "32", moved),
        ("dropout=0.0", "0.5", ""))
    assert said == [f"{new} now, and {old} in there/ckpt.pt{more}" for new, old, more in changed]


@pytest.mark.parametrize("data, vocab_size", [("toy", 67), ("none", 50304)])
@pytest.mark.parametrize("init_from", ["scratch", "auto"])
def test_start_without_a_checkpoint_takes_the_datas_vocabulary(
        tmp, capsys, init_from, data, vocab_size):
    flags = dict(dataset=f"{tmp}/{data}", out_dir=f"{tmp}/none", init_from=init_from)
    cfg, *rest = started(load_config([f"--{k}={v}" for k, v in flags.items()]), World())
    assert (cfg.sizes.vocab_size, *rest) == (vocab_size, None, False)
    assert ("so this is a new run" in capsys.readouterr().out) == (init_from == "auto")


def test_start_on_other_data_or_with_another_loss_scale_forgets_the_old(tmp):
    """Else no validation loss might ever be better than the other data's, and nothing be saved."""
    for key, value, name, new in (("dataset", "other", "best_val_loss", 1e9),
                                  ("loss_scale", 1024.0, "scaler", None)):
        for now in (value, getattr(tiny(tmp), key)):
            header = dict(model_args=SIZES, config=as_dict(tiny(tmp)), best_val_loss=1.5, scaler={})
            source = checkpoint.Source("there/ckpt.pt", dict(header), {})
            start.final_config(tiny(tmp, **SIZES, **{key: now}), source, True, World())
            assert source.header[name] == (new if now == value else header[name])


def test_start_keeps_what_the_run_has_kept_unless_it_is_told(tmp):
    """A resume without its flag deletes nothing."""
    theirs = dict(keep_checkpoints=0, always_save_checkpoint=False)
    kept = ("keep_checkpoints", "always_save_checkpoint")
    for flags, expected in (([], (0, False)), (["--keep_checkpoints=3"], (3, False))):
        cfg = started_on(tmp, *flags, **theirs)
        assert tuple(getattr(cfg, key) for key in kept) == expected


def test_start_on_data_of_other_tokens_is_refused(tmp):
    letters, words = dict(chars=["a", "b"]), dict(tokenizer="tokenizer.json", vocab_crc=1)
    for i, (ours, theirs, is_refused) in enumerate((
            (letters, letters, False), (letters, dict(chars=["b", "a"]), True),
            (letters, dict(tokenizer="bytes"), True), (letters, dict(vocab_size=2), False),
            (letters, None, False),  # nanoGPT's
            (words, dict(words, vocab_crc=2), True), (words, dict(tokenizer="gpt2"), False))):
        data = f"{tmp}/tokens-{i}"
        make_data(data, **ours)
        arguments = checkpoint.Source("there", dict(meta=theirs), {}), data
        if is_refused:
            said = refused(start.require_same_tokens, *arguments)
            assert said == f"dataset={data} has another tokenizer than the data of there"
        else:
            start.require_same_tokens(*arguments)


def case_ranks_differ(tmp):
    """What each rank says if it has another value of a key, or other data under one name."""
    world = ranks.setup("cpu", "auto")
    same = dict(strategy="ddp", max_iters=1)
    said = [refused(train.train, tiny(tmp, **same, **{key: values[world.rank]}))
            for key, values in (("seed", (1, 2)), ("out_dir", ("a", "b")), ("init_from", (
                "scratch", "resume")), ("gradient_accumulation_steps", (2, 3)))]
    make_data(f"{tmp}/of-rank-{world.rank}/data", n=6000 + 10 * world.rank)
    os.chdir(f"{tmp}/of-rank-{world.rank}")
    said.append(refused(train.train, tiny(tmp, **same, dataset="data")))
    return [line.partition(";")[0].removeprefix("ranks differ: ") for line in said]


def test_start_is_refused_on_all_ranks_if_they_differ(tmp):
    """Before anything is built or written: DDP would send rank 0's weights and hide it."""
    results = on_ranks(2, {"differ": (case_ranks_differ, {"tmp": tmp})})
    assert values(results, "differ") == [[
        "seed is 1 on rank 0, and 2 on rank 1", "out_dir is 'a' on rank 0, and 'b' on rank 1",
        "init_from is 'scratch' on rank 0, and 'resume' on rank 1",
        "gradient_accumulation_steps is 2 on rank 0, and 3 on rank 1",
        "tokens of train is 5400 on rank 0, and 5409 on rank 1"]] * 2


# -----------------------------------------------------------------------------
# the loop: stop? due? done?


def events(tmp, name, signal_at=None, **keys):
    """What a run of 4 steps does, in order. A signal comes while it does what has the number
    signal_at. The validation loss never improves."""
    done = []

    def noted(event, function):
        def call(*args):
            if len(done) == signal_at:
                os.kill(os.getpid(), signal.SIGTERM)
            done.append(event)
            result = function(*args)
            return {**result, "val": 1.0} if event == "evaluate" else result
        return call

    with (patch.object(StopSignal, "requested", noted("stop?", StopSignal.requested)),
          patch.object(saves.Saver, "poll", noted("poll", saves.Saver.poll)),
          patch.object(train, "evaluate", noted("evaluate", train.evaluate)),
          patch.object(train, "train_step", noted("step", train.train_step)),
          patch.object(saves.Saver, "save", noted("save", saves.Saver.save))):
        run_training(tmp, name, max_iters=4, eval_interval=2, gradient_accumulation_steps=2, **keys)
    return done


AGAIN = ["poll", "stop?"]  # has a save failed? has somebody sent a signal?
WHOLE = [*AGAIN, "evaluate", "step", *AGAIN, "step",
         *AGAIN, "evaluate", "save", "step", *AGAIN, "step", *AGAIN, "evaluate", "save"]


@pytest.mark.parametrize("signal_at, expected, step", [
    (None, WHOLE, 4),
    (1, AGAIN, None),  # before the first step: there is nothing to save
    (3, [*WHOLE[:4], *AGAIN, "save"], 1),
    (9, [*WHOLE[:12], *AGAIN, "save"], 3),  # in an evaluation: seen after the next step
    (14, [*WHOLE[:15], *AGAIN, "save"], 4),  # in the last step: it leaves without evaluating
    (17, WHOLE, 4)])  # in the last evaluation: it was about to leave
def test_loop_stops_evaluates_and_saves_in_this_order(tmp, capsys, signal_at, expected, step):
    name = f"loop-{signal_at}"
    out = os.path.join(tmp, name)
    assert events(tmp, name, signal_at) == expected
    assert ("--init_from=auto" in capsys.readouterr().out) == (expected != WHOLE)
    assert os.path.exists(f"{out}/ckpt.pt") == (step is not None)
    if step:
        assert read_ckpt(out)["iter_num"] == len(losses(out)) == step
        # a resumed run that is stopped before its first step leaves the checkpoint as it is
        assert events(tmp, name, 1, init_from="auto") == AGAIN
        assert "--init_from=auto" in capsys.readouterr().out


def test_step_fetches_the_next_micro_batch_while_the_gpu_works(tmp, monkeypatch):
    """On the last one's backward, which the host has only launched."""
    run, events = built(tmp, gradient_accumulation_steps=2), []

    def told(call):
        def called(*args, **kwargs):
            events.append(call.__name__)
            return call(*args, **kwargs)
        return called

    for call in (Batches.get, Batches.prefetch_next):
        monkeypatch.setattr(Batches, call.__name__, told(call))
    monkeypatch.setattr(torch.Tensor, "backward", told(torch.Tensor.backward))
    steps(run)
    assert events == 2 * ["get", "backward", "prefetch_next"]


def test_loop_without_checkpoints_saves_nothing(tmp):
    events(tmp, "no-checkpoints", 9, checkpoint="none")
    assert os.listdir(os.path.join(tmp, "no-checkpoints")) == ["metrics.jsonl"]


# -----------------------------------------------------------------------------
# evaluation


def test_evaluation_with_a_partial_last_batch_is_the_mean_over_windows(tmp):
    """37 windows in batches of 2 on 2 ranks: the last round has one window, and one rank none."""
    cfg = tiny(tmp, eval_iters=1000, strategy="single")
    gpt = plain_gpt()
    tokens = np.fromfile(os.path.join(tmp, "toy", "val.bin"), np.uint16).astype(np.int64)
    rows = torch.from_numpy(np.stack([tokens[16 * w:16 * w + 17] for w in range(37)]))
    with torch.no_grad():
        expected = gpt(rows[:, :-1], rows[:, 1:])[1].item()
    sums = []  # (of losses, of windows), on each rank, for both splits
    for rank in range(2):
        world = World(rank, 2)
        with patch.object(train, "all_reduce_mean_", lambda x, world: sums.append(x.tolist()) or x):
            train.evaluate(gpt, train.open_batches(cfg, world), cfg, world)
    total, windows = np.sum(sums[1::2], axis=0)  # after those of the train split
    assert windows == 37 and total / windows == pytest.approx(expected, rel=1e-6)


def test_evaluation_alone_notices_nan(tmp):
    run = dict(learning_rate=1e18, min_lr=1e18, grad_clip=0.0, decay_lr=False, log_interval=1000)
    said = refused(run_training, tmp, "nan-eval", eval_interval=3, max_iters=6, **run)
    assert "validation loss is nan at step 3" in said
    assert not os.path.exists(os.path.join(tmp, "nan-eval", "ckpt.pt"))


# -----------------------------------------------------------------------------
# the log, checkpoints while training goes on


def test_log_time_is_a_steps_without_evaluation_and_saves(tmp, monkeypatch, capsys):
    """Each takes 60, 100 and 1000 s, by a clock that only they move."""
    now = [0.0]

    def slow(function, seconds):
        def call(*args):
            now[0] += seconds
            return function(*args)
        return call

    monkeypatch.setattr(metrics.time, "time", lambda: now[0])
    monkeypatch.setattr(train, "train_step", slow(train.train_step, 60))
    monkeypatch.setattr(train, "evaluate", slow(train.evaluate, 100))
    monkeypatch.setattr(saves.Saver, "save", slow(saves.Saver.save, 1000))
    rows = run_training(tmp, "clock", max_iters=8, eval_interval=4, log_interval=3)
    assert [row["iter"] for row in rows] == [0, 3, 6, 7]
    assert [row["time_ms"] for row in rows] == [60_000.0] * 4
    assert [row["tokens_per_s"] for row in rows] == [12 * 2 * 16 / 60] * 4
    left = re.findall(r", (\S+)m left", capsys.readouterr().out)
    assert left == ["7.0", "4.0", "1.0", "0.0"]


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_checkpoint_is_completed_while_training_goes_on(tmp, tmp_path, monkeypatch, kind):
    """And the next save waits for it: the first is held up until then."""
    done, waited_for = [], threading.Event()
    wait_for_save, complete = saves.Saver.wait, saves.Saver.write

    def waiting(saver):
        if saver.saving:
            waited_for.set()
        wait_for_save(saver)

    def held(saver, *args):
        assert waited_for.wait(60)
        end = complete(saver, *args)
        done.append("complete")
        return end

    def noted(event, function):
        return lambda *args, **kwargs: done.append(event) or function(*args, **kwargs)

    monkeypatch.setattr(saves.Saver, "wait", waiting)
    monkeypatch.setattr(saves.Saver, "write", held)
    monkeypatch.setattr(train, "train_step", noted("step", train.train_step))
    check = saves.require_finite_state  # the first thing that a save does
    monkeypatch.setattr(saves, "require_finite_state", noted("save", check))
    run_training(tmp, tmp_path / "out", checkpoint=kind, max_iters=4, eval_interval=2)
    assert done == ["step", "step", "save", "step", "step", "complete", "save", "complete"]

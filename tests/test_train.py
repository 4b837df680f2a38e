"""
Training: that every option does what its help says, that the loop stops, evaluates and saves in
this order, what a start takes from a checkpoint, and that the log says what happened.

    python -m pytest -q tests/test_train.py

A loss alone would not notice most of this, so these tests look at the mechanism: what the scaler
did, what was called in which order, what a clock says.
"""

import json
import os
import re
import shutil
import signal
import threading
from dataclasses import asdict
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from harness import (
    NO_BATCHES,
    TINY,
    arguments,
    built,
    log_step,
    losses,
    on_ranks,
    plain_gpt,
    read_ckpt,
    read_metrics,
    refused,
    run_training,
    started,
    steps,
    tiny,
    trained,
    values,
)
from torch.nn import functional as F

import checkpoint
import metrics
import model
import optimizer
import saves
import start
import train
from configurator import load_config
from data.loader import Batches, TokenFiles
from ranks import StopSignal, World

SHORT = dict(gradient_accumulation_steps=8, max_iters=3, eval_interval=3)
DROPOUT = dict(dropout=0.2, seed=7)


@pytest.fixture(scope="module")
def at_two(tmp):
    """The results of all that runs on two ranks."""
    cases = {name: (case_losses, dict(tmp=tmp, name=f"two-{name}", strategy=name, **DROPOUT))
             for name in ("ddp", "full_shard")}
    cases["autocast"] = case_autocast, dict(tmp=tmp)
    cases["packages"] = case_packages, dict(tmp=tmp)
    return on_ranks(2, cases)


def case_packages(tmp):
    """A run whose other ranks lack wandb."""
    def required(cfg):
        if dist.get_rank() > 0:
            raise SystemExit("no wandb here")

    with patch.object(train, "require_packages", required):
        return len(run_training(tmp, "packages", **SHORT))


def test_packages_are_asked_for_where_they_are_used(at_two):
    """Rank 0 alone logs. The others would wait for a rank that left before them."""
    assert values(at_two, "packages") == [SHORT["max_iters"]] * 2


def test_flops_are_counted_on_a_model_that_does_not_train(tmp):
    """Its forward runs on the meta device, and may leave a tensor of that device in it."""
    counted, built = [], []
    build = train.build
    with (patch.object(metrics, "peak_flops", lambda device: 1e12),
          patch.object(metrics, "flops_per_token", lambda model, *_: counted.append(model) or 0),
          patch.object(train, "build", lambda *args: built.append(args[0]) or build(*args))):
        run_training(tmp, "counted", max_iters=1)
    assert len(counted) == len(built) == 1 and counted[0] is not built[0]


def logged(out, key):
    return [row[key] for row in read_metrics(out) if key in row]


# -----------------------------------------------------------------------------
# float16: the loss is scaled, gradients are unscaled before clipping, the scaler is saved


def test_train_float16_scales_and_unscales(tmp, monkeypatch):
    """A lost scale, or one that was not taken out again, is a factor of 65536 in the norm."""
    fp16, fp32 = os.path.join(tmp, "fp16"), os.path.join(tmp, "fp16-fp32")
    scales = []
    forward = model.GPT.forward

    def watched(self, idx, targets=None, cache=None):
        logits, loss = forward(self, idx, targets, cache)
        if loss.requires_grad:  # gradients of 1e-9 would be 0 in float16
            loss.register_hook(lambda grad: scales.append(grad.item()))
        return logits, loss

    run_training(tmp, "fp16-fp32", max_iters=3)
    monkeypatch.setattr(model.GPT, "forward", watched)
    run_training(tmp, "fp16", max_iters=3, dtype="float16")
    assert scales == 3 * 12 * [pytest.approx(65536 / 12)]  # 12 micro-batches
    assert logged(fp16, "loss_scale") == [65536.0] * 3
    assert logged(fp32, "loss_scale") == [None] * 3
    # the rows differ: gradients were computed in float16
    assert logged(fp16, "grad_norm") != logged(fp32, "grad_norm")
    assert logged(fp16, "grad_norm") == pytest.approx(logged(fp32, "grad_norm"), rel=0.02)
    assert losses(fp16) == pytest.approx(losses(fp32), rel=1e-3)
    assert read_ckpt(fp32)["scaler"] is None


@pytest.mark.parametrize("log_interval", [1, 3])
def test_train_float16_says_how_many_steps_overflowed(tmp, monkeypatch, capsys, log_interval):
    """Also where the scale grows as often as it falls."""
    skipped = []  # of each step: True if a weight stayed as it was

    def step(wrapped, *args):
        before = wrapped.lm_head.weight.detach().clone()
        result = train_step(wrapped, *args)
        skipped.append(torch.equal(before, wrapped.lm_head.weight))
        return result

    train_step = train.train_step
    monkeypatch.setattr(optimizer.LossScaler, "GROW_AFTER", 1)
    monkeypatch.setattr(train, "train_step", step)
    rows = run_training(tmp, f"fp16-overflow-{log_interval}", dtype="float16", max_iters=10,
                        loss_scale=2.0**26, eval_interval=10, log_interval=log_interval)
    said = re.findall(r"^iter (\d+): .* float16.* skipped: (\d+), .* ([\d.e+]+)$",
                      capsys.readouterr().out, re.M)
    expected, first = [], 0
    for row in rows:
        n = sum(skipped[first:row["iter"] + 1])
        first = row["iter"] + 1
        if n:
            expected.append((str(row["iter"]), str(n), f"{row['loss_scale']:g}"))
    assert said == expected and 2 < sum(skipped) < 8


# -----------------------------------------------------------------------------
# options


def case_autocast(tmp):
    """Is autocast on in a block's forward, in training and evaluation; and its input's type."""
    seen = []

    def look(module, args):
        seen.append([torch.is_autocast_enabled("cpu"), str(args[0].dtype)])

    for strategy in ("ddp", "full_shard"):
        run = built(tmp, strategy=strategy, dtype="bfloat16", gradient_accumulation_steps=2)
        run.model.blocks[1].register_forward_pre_hook(look)
        steps(run)
        train.evaluate(run.wrapped, run.batches, run.cfg, run.world)
    return seen


def test_option_autocast_is_for_ddp_alone(at_two):
    """FSDP2's policy casts by itself; both together would cast the norms and the loss again."""
    ddp, full_shard = [True, "torch.float32"], [False, "torch.bfloat16"]
    for seen in values(at_two, "autocast"):
        n = len(seen) // 2
        assert n >= 3 and seen == [ddp] * n + [full_shard] * n


def case_losses(tmp, name, **keys):
    return [row["loss"] for row in run_training(tmp, name, **SHORT, **keys)]


@pytest.mark.parametrize("strategy", ["ddp", "full_shard"])
def test_dropout_does_not_depend_on_the_world_size(tmp, at_two, strategy):
    """Masks go by micro-batch, not by rank. (Without dropout: the parity in test_fsdp.py.)"""
    expected = case_losses(tmp, f"one-{strategy}", strategy="single", **DROPOUT)
    for mine in values(at_two, strategy):
        assert mine == pytest.approx(expected, rel=1e-5)


def test_seed_decides_weights_and_dropout(tmp):
    weights, seeds = [], set()
    for seed in (7, 1337):
        with patch.object(torch, "manual_seed") as of_dropout:
            case_losses(tmp, f"seed-{seed}", seed=seed)
        seeds.update(call.args for call in of_dropout.call_args_list)
        weights.append(read_ckpt(os.path.join(tmp, f"seed-{seed}"))["model"]["lm_head.weight"])
    assert len(seeds) >= 2 * 3 * 8  # another for each seed, step and micro-batch
    assert (weights[0] - weights[1]).norm() > weights[0].norm()


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
    """(Flags that contradict it are refused in test_config.py and test_mistakes.py.)"""
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
    """And says so where nobody asked for it: a longer one would take more memory."""
    sizes = dict(SIZES, block_size=theirs)
    cfg = started_on(tmp, *flags, init_from=init_from, sizes=sizes)
    assert cfg.sizes.block_size == expected
    source = checkpoint.Source("there", dict(model_args=sizes, iter_num=0), {})
    model = train.meta_model(cfg)
    said = "\n".join(metrics.describe(cfg, model, NO_BATCHES, source, World()))
    asked = flags or expected == theirs
    assert ("context 1,024 of 4,096" in said and "--block_size=4096" in said) == (not asked)
    assert ("context" in said) == (not asked)


def test_start_says_that_the_data_has_grown(tmp, tmp_path, capsys):
    """The order of its windows is another then; but not for a run of its own."""
    data = shutil.copytree(f"{tmp}/toy", tmp_path / "toy")
    run = dict(dataset=str(data), max_iters=2)
    run_training(tmp, "grown", **run)
    size = (data / "train.bin").stat().st_size // 2
    for grown in (0, 99):
        with open(data / "train.bin", "ab") as f:
            f.write(bytes(2 * grown))
        run_training(tmp, "grown", init_from="resume", **run)
        line = f"toy: {size:,} tokens when the checkpoint was written, and now {size + 99:,} in"
        assert (line in capsys.readouterr().out) == bool(grown)
    run_training(tmp, "grown-2", init_from=f"{tmp}/grown", **run)
    assert "when the checkpoint was written" not in capsys.readouterr().out


@pytest.mark.parametrize("keys, said", [
    (dict(dtype="bfloat16", frozen_dtype="bfloat16"), "no parameter is frozen"),
    ({}, ""), (dict(warmup_iters=5), "never reached"), (dict(warmup_iters=4), ""),
    (dict(warmup_iters=4, lr_decay_iters=4), "never reached"),
    (dict(warmup_iters=4, lr_decay_iters=4, lr_schedule="constant"), ""),
    (dict(warmup_iters=8, decay_lr=False), ""), (dict(lr_decay_iters=4), "from step lr_decay")])
def test_start_says_what_a_key_does_not_do(tmp, keys, said):
    cfg = tiny(tmp, **keys)
    lines = [*metrics.describe(cfg, train.meta_model(cfg), NO_BATCHES, None, World())][2:]
    assert said in "".join(lines) and len(lines) == bool(said)


def test_start_says_what_changes_the_numbers(tmp, capsys):
    same = [f"--{key}={TINY[key]}" for key in (
        "batch_size", "gradient_accumulation_steps", "learning_rate", "min_lr", "warmup_iters",
        "lr_decay_iters", "grad_clip")]
    started_on(tmp, *same, "--dropout=0.5", "--max_iters=9", "--strategy=ddp", "--out_dir=else")
    started_on(tmp, init_from="gpt2")  # another run, and not this one going on
    assert capsys.readouterr().out == ""
    started_on(tmp, *same[1:], "--seed=7", "--block_size=8", "--freeze=wpe", "--dropout=0.5")
    line = capsys.readouterr().out
    assert line.count("\n") == 1 and "there/ckpt.pt" in line and line.count("=") == 4
    for new, old in (("batch_size=12", "2"), ("seed=7", "1337"), ("block_size=8", "32"),
                     ("freeze='wpe'", "''")):
        assert re.search(rf"{new} .*?{old}", line)


@pytest.mark.parametrize("data, vocab_size", [("toy", 67), ("none", 50304)])
@pytest.mark.parametrize("init_from", ["scratch", "auto"])
def test_start_without_a_checkpoint_takes_the_datas_vocabulary(tmp, init_from, data, vocab_size):
    flags = dict(dataset=f"{tmp}/{data}", out_dir=f"{tmp}/none", init_from=init_from)
    cfg, *rest = started(load_config([f"--{k}={v}" for k, v in flags.items()]), World())
    assert (cfg.sizes.vocab_size, *rest) == (vocab_size, None, False)


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


def test_loop_without_checkpoints_says_that_nothing_was_saved(tmp, capsys):
    events(tmp, "no-checkpoints", 9, checkpoint="none")
    said = capsys.readouterr().out
    assert "nothing was saved, because checkpoint=none" in said
    assert "saving" not in said and "saved step" not in said
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
            train.evaluate(gpt, train.Batches(cfg, world), cfg, world)
    total, windows = np.sum(sums[1::2], axis=0)  # after those of the train split
    assert windows == 37 and total / windows == pytest.approx(expected, rel=1e-6)


def test_evaluation_alone_notices_nan(tmp):
    out = os.path.join(tmp, "nan-eval")
    run = dict(learning_rate=1e18, min_lr=1e18, grad_clip=0.0, decay_lr=False, log_interval=1000)
    p = trained(1, arguments(tmp, out, eval_interval=3, max_iters=6, **run))
    assert p.returncode == 1 and p.stderr.count("\n") == 1
    assert "validation loss is nan at step 3" in p.stderr and "learning_rate" in p.stderr
    assert not os.path.exists(os.path.join(out, "ckpt.pt"))


# -----------------------------------------------------------------------------
# the log, sharded checkpoints while training goes on, data


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


def test_log_on_a_full_disk_is_said_and_the_run_goes_on(tmp, monkeypatch, capsys):
    """Rows wait in the file's buffer until there is room."""
    real = open

    def opened(path, mode):
        return real("/dev/full" if mode == "a" else f"{tmp}/earlier.jsonl", mode)

    monkeypatch.setattr(metrics, "open", opened, raising=False)
    log = metrics.Log(tiny(tmp), World(), tmp, "id", 0)
    assert capsys.readouterr().err.startswith("cannot write /dev/full")
    for step in range(2):
        log_step(log, step)
        said = capsys.readouterr()
        assert f"iter {step}: " in said.out and said.err.count("\n") == 1
        assert said.err.startswith("cannot write /dev/full: No space left")
    room = real(f"{tmp}/room.jsonl", "w")
    os.dup2(room.fileno(), log.file.fileno())
    log_step(log, 2)
    rows = [json.loads(row) for row in real(f"{tmp}/room.jsonl")]
    assert [row["iter"] for row in rows] == [0, 0, 1, 2] and capsys.readouterr().err == ""


def test_log_goes_on_after_half_a_row(tmp, tmp_path):
    """As a full disk leaves it."""
    (tmp_path / "metrics.jsonl").write_text('{"iter": 0, "loss": 2}\n{"iter": 1, "lo')
    log = metrics.Log(tiny(tmp), World(), str(tmp_path), "id", 1)
    log.evaluation(1, {"val": 1.0, "train": 1.0})
    assert [row["iter"] for row in read_metrics(tmp_path)] == [0, 1]


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


def test_tokens_are_checked_as_they_are_read(tmp_path):
    """The start looks at 100 windows; a wrong one elsewhere is found when its window comes."""
    for split in ("train", "val"):
        with open(tmp_path / f"{split}.bin", "wb") as f:
            f.truncate(2 * (2**26 + 64))  # zeros, and no room on the disk
            f.seek(2 * (2**26 + 40))
            f.write(np.uint16(99).tobytes())
    files = TokenFiles(str(tmp_path), "train", 16, 67)
    files.batch([0, 2**22])
    assert "token 99" in refused(files.batch, [2**22 + 2])

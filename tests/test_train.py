"""
The training loop: that every option does what its help says, and that the log says what happened.

    python -m pytest -q tests/test_train.py

A loss alone would not notice most of this, so these tests look at the mechanism: which collectives
carry what type, what was gathered ahead, what the scaler did, what a clock says.
"""

import glob
import itertools
import math
import os
import signal
import threading
from collections import defaultdict
from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from harness import (
    Ranks,
    arguments,
    assert_same_weights,
    launch,
    losses,
    on_ranks,
    plain_gpt,
    read_ckpt,
    read_metrics,
    run_training,
    tiny,
    trained,
    values,
)
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F

import checkpoint
import fsdp
import metrics
import model
import sample
import train
from configurator import resolve
from data.loader import TokenFiles
from ranks import StopSignal, World, setup

CASES = defaultdict(dict)  # {world: {name: (function, kwargs)}}


def case(world, name, **kwargs):
    """Run the decorated function on `world` ranks under this name; one launch a world size."""
    def register(function):
        CASES[world][name] = function, kwargs
        return function
    return register


@pytest.fixture(scope="module")
def ranks(tmp):
    """ranks(world, name) -> what the case returned on each rank."""
    results = {}

    def get(world, name):
        if world not in results:
            cases = {n: (f, {"tmp": tmp, **kw}) for n, (f, kw) in CASES[world].items()}
            results[world] = on_ranks(world, cases)
        return values(results[world], name)
    return get


NO_STOP = SimpleNamespace(requested=lambda: False)


def logged(out, key):
    return [row[key] for row in read_metrics(out) if key in row]


# -----------------------------------------------------------------------------
# float16: the loss is scaled, gradients are unscaled before clipping, the scaler is saved


def test_train_float16_scales_and_unscales(tmp):
    """A lost scale, or one that was not taken out again, is a factor of 65536 in the norm."""
    fp16, fp32 = os.path.join(tmp, "fp16"), os.path.join(tmp, "fp16-fp32")
    launch(1, arguments(tmp, fp16, max_iters=3, dtype="float16"))
    launch(1, arguments(tmp, fp32, max_iters=3))
    assert logged(fp16, "loss_scale") == [65536.0] * 3
    assert logged(fp32, "loss_scale") == [None] * 3
    # the rows differ: gradients were computed in float16
    assert logged(fp16, "grad_norm") != logged(fp32, "grad_norm")
    assert logged(fp16, "grad_norm") == pytest.approx(logged(fp32, "grad_norm"), rel=0.02)
    assert losses(fp16) == pytest.approx(losses(fp32), rel=1e-3)
    assert read_ckpt(fp16)["scaler"]["_growth_tracker"] == 3
    assert read_ckpt(fp32)["scaler"] is None
    for init_from, steps in (("resume", 4), ("auto", 5)):
        launch(1, arguments(tmp, fp16, max_iters=steps, dtype="float16", init_from=init_from))
        assert read_ckpt(fp16)["scaler"]["_growth_tracker"] == steps  # the old one went on


def test_train_float16_says_what_overflowed_and_nothing_else(tmp, monkeypatch, capsys):
    scaler = partial(torch.amp.GradScaler, init_scale=2.0**26)
    monkeypatch.setattr(torch.amp, "GradScaler", scaler)
    scales = [row["loss_scale"] for row in run_training(tmp, "fp16-overflow", dtype="float16",
                                                        max_iters=9, eval_interval=9)]
    said = [line for line in capsys.readouterr().out.splitlines() if "overflowed" in line]
    text = "iter {}: gradients overflowed in float16, step skipped, loss scale {:g} -> {:g}"
    pairs = enumerate(zip(scales, scales[1:]))
    expected = [text.format(i, a, b) for i, (a, b) in pairs if a > b]
    assert 0 < len(expected) < 8 and said[:len(expected)] == expected  # the last step's may follow


def test_train_float16_keeps_gradients_that_underflow(tmp, monkeypatch):
    """Gradients of 1e-9 are 0 in float16 unless the loss was scaled before backward."""
    scales = []
    forward = model.GPT.forward

    def tiny_loss(self, idx, targets=None, cache=None):
        logits, loss = forward(self, idx, targets, cache)
        if self.training and loss is not None and not loss.is_meta:
            loss.register_hook(lambda grad: scales.append(grad.item()))
        return logits, loss

    monkeypatch.setattr(model.GPT, "forward", tiny_loss)
    run_training(tmp, "fp16-scale", dtype="float16", max_iters=1)
    assert scales == [pytest.approx(65536.0 / 12)] * 12  # 12 micro-batches


# -----------------------------------------------------------------------------
# options


class Heard:
    """Collectives of torch.distributed as they are called: (name, dtype, bytes)."""
    NAMES = ("all_reduce", "reduce_scatter_tensor", "reduce_scatter_single")

    def __init__(self):
        self.calls, self.patches = [], []

    def __enter__(self):
        for name in filter(lambda name: hasattr(dist, name), self.NAMES):
            self.patches.append(patch.object(dist, name, self.listen(name, getattr(dist, name))))
            self.patches[-1].start()
        return self

    def __exit__(self, *exception):
        for p in self.patches:
            p.stop()

    def listen(self, name, original):
        def call(*args, **kwargs):
            tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)]
            big = max(tensors, key=lambda t: t.numel())
            self.calls.append((name, str(big.dtype), big.numel() * big.element_size()))
            return original(*args, **kwargs)
        return call


def built(tmp, **overrides):
    cfg = tiny(tmp, **overrides)
    world = setup("cpu", "auto")
    cfg = resolve(cfg, world)
    return world, cfg, *train.build(cfg, world)


@case(2, "auto-ddp", strategy="ddp")
@case(2, "auto-full", strategy="full_shard")
def case_grad_sync_auto(tmp, strategy):
    """What `auto` means is when gradients are really reduced, in a step of 3 micro-batches."""
    world, cfg, wrapped, _, optimizer = built(tmp, strategy=strategy,
                                              gradient_accumulation_steps=6)
    batches = train.Batches(cfg, world)
    reduced = []
    if strategy == "ddp":
        def hook(group, bucket):
            reduced.append(bucket.buffer().numel())
            future = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future
        wrapped.register_comm_hook(None, hook)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    with Heard() as heard:
        train.train_step(wrapped, optimizer, scaler, batches, batches.train(0, 0), 0, cfg, world)
    scatters = [call for call in heard.calls if call[0].startswith("reduce_scatter")]
    whole = sum(p.numel() for p in wrapped.parameters())
    return dict(share=sum(reduced) / whole, scatters=len(scatters))


def test_option_grad_sync_auto_is_last_for_ddp_and_every_for_fsdp(ranks):
    assert ranks(2, "auto-ddp")[0]["share"] == 1  # all gradients once, not three times
    assert ranks(2, "auto-full")[0]["scatters"] == 3 * 4  # each micro-batch: three blocks, the root


@case(2, "prefetch", n=2)
@case(2, "prefetch-none", n=0)
def case_prefetch(tmp, n):
    _, _, _, gpt, _ = built(tmp, strategy="full_shard", prefetch_blocks=n, n_layer=4)
    number = {block: i for i, block in enumerate(gpt.blocks)}
    lists = {}
    for kind in ("forward", "backward"):
        with patch.object(FSDPModule, f"set_modules_to_{kind}_prefetch", autospec=True) as told:
            fsdp.prefetch(gpt, fsdp.find_units(gpt), n)
        lists[kind] = {number[call.args[0]]: [number[m] for m in call.args[1]]
                       for call in told.call_args_list}
    with patch.object(fsdp, "prefetch") as asked:
        built(tmp, strategy="full_shard", prefetch_blocks=n)
    return dict(lists=lists, asked=asked.call_count)


def test_option_prefetch_names_the_next_blocks_in_each_direction(ranks):
    r = ranks(2, "prefetch")[0]
    assert r["asked"] == 1 and ranks(2, "prefetch-none")[0]["asked"] == 0
    forward = {"0": [1, 2], "1": [2, 3], "2": [3], "3": []}
    backward = {"0": [], "1": [0], "2": [1, 0], "3": [2, 1]}
    assert r["lists"] == {"forward": forward, "backward": backward}


@case(2, "autocast")
def case_autocast(tmp):
    """Is autocast on in a block's forward, in training and evaluation; and its input's type."""
    seen = {}
    for strategy in ("ddp", "full_shard"):
        world, cfg, wrapped, gpt, optimizer = built(tmp, strategy=strategy, dtype="bfloat16")
        batches = train.Batches(cfg, world)

        def look(module, args, strategy=strategy):
            now = [torch.is_autocast_enabled("cpu"), str(args[0].dtype)]
            seen.setdefault(strategy, {})[module.training] = now

        gpt.blocks[1].register_forward_pre_hook(look)
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        train.train_step(wrapped, optimizer, scaler, batches, batches.train(0, 0), 0, cfg, world)
        train.evaluate(wrapped, batches, cfg, world, NO_STOP)
        seen[strategy] = [seen[strategy][training] for training in (True, False)]
    return seen


def test_option_autocast_is_for_ddp_alone(ranks):
    """FSDP2's policy casts by itself; both together would cast the norms and the loss again."""
    ddp, full_shard = [True, "torch.float32"], [False, "torch.bfloat16"]
    assert ranks(2, "autocast") == [dict(ddp=[ddp] * 2, full_shard=[full_shard] * 2)] * 2


@case(8, "hybrid-8", strategy="hybrid_shard", shard_group_size=2)
@case(2, "seed-7", strategy="full_shard", seed=7)
@case(2, "drop-ddp", strategy="ddp", dropout=0.2)
@case(2, "drop-full", strategy="full_shard", dropout=0.2)
def case_run(tmp, **overrides):
    keys = {"gradient_accumulation_steps": 8, "max_iters": 3, "eval_interval": 3, **overrides}
    name = "-".join(map(str, ["case", dist.get_world_size(), *overrides.values()]))
    rows = run_training(tmp, name, **keys)
    return [row["loss"] for row in rows]


def alone(tmp, name, **overrides):
    """The same in one process."""
    keys = {"gradient_accumulation_steps": 8, "max_iters": 3, "eval_interval": 3, **overrides}
    return [row["loss"] for row in run_training(tmp, name, **keys)]


@pytest.mark.parametrize("world, name, overrides", [
    (8, "hybrid-8", {}),  # four groups of two: neither axis of the mesh can stand for the other
    (2, "seed-7", dict(seed=7)),
    # masks go by micro-batch, not by rank
    (2, "drop-ddp", dict(dropout=0.2)), (2, "drop-full", dict(dropout=0.2))])
def test_train_losses_do_not_depend_on_the_world_size(tmp, ranks, world, name, overrides):
    expected = alone(tmp, f"alone-{name}", **overrides)
    for mine in ranks(world, name):
        assert mine == pytest.approx(expected, rel=1e-5)
    assert expected != pytest.approx(alone(tmp, f"usual-{name}"), rel=1e-4) or not overrides


def test_option_dropout_is_on_where_gpt2_has_it(tmp, monkeypatch):
    """After the embeddings, on attention's weights, and at the end of both branches of a block."""
    plain, fused = [], []
    dropout, attention = F.dropout, F.scaled_dot_product_attention

    def count_plain(x, p=0.5, training=True, inplace=False):
        plain.append((p, training))
        return dropout(x, p, training, inplace)

    def count_fused(*args, dropout_p=0.0, **kwargs):
        fused.append(dropout_p)
        return attention(*args, dropout_p=dropout_p, **kwargs)

    monkeypatch.setattr(F, "dropout", count_plain)
    monkeypatch.setattr(F, "scaled_dot_product_attention", count_fused)
    gpt, idx = plain_gpt(dropout=0.2), torch.arange(16)[None]
    for training in (True, False):
        gpt.train(training)
        plain.clear()
        fused.clear()
        gpt(idx, idx)
        assert plain == [(0.2, training)] * (1 + 2 * 3)
        assert fused == [0.2 if training else 0.0] * 3
        plain.clear()
        with torch.autocast("cpu", torch.bfloat16):  # where attention is written out
            gpt(idx, idx)
        assert sum(p for p, on in plain if on) == pytest.approx(0.2 * 10 * training)


def test_loss_leaves_out_targets_of_minus_one():
    torch.manual_seed(0)
    logits, targets = torch.randn(2, 3, 5), torch.tensor([[1, -1, 4], [-1, -1, 0]])
    logs = logits - logits.exp().sum(-1, keepdim=True).log()
    by_hand = -(logs[0, 0, 1] + logs[0, 2, 4] + logs[1, 2, 0]) / 3
    assert model.cross_entropy(logits, targets).item() == pytest.approx(by_hand.item(), rel=1e-6)
    assert model.cross_entropy(logits.bfloat16(), targets).dtype == torch.float32


def test_sample_temperature_divides_the_logits(monkeypatch):
    seen = []
    monkeypatch.setattr(torch, "multinomial", lambda p, **kwargs: seen.append(p) or p.argmax())
    sample.draw(torch.tensor([[0.0, math.log(2.0)]]), 0.5, None, None)  # odds 1 : 2, squared
    assert seen[0].tolist() == [[pytest.approx(0.2), pytest.approx(0.8)]]


def test_train_takes_the_checkpoints_vocabulary_where_the_data_says_none(tmp_path):
    source = SimpleNamespace(header={"model_args": {"vocab_size": 67}})
    cfg = tiny("", dataset=str(tmp_path), vocab_size=50304)
    assert train.with_vocabulary(cfg, source).vocab_size == 67
    assert train.with_vocabulary(cfg).vocab_size == 50304


# -----------------------------------------------------------------------------
# evaluation


@pytest.mark.parametrize("size", [1, 2])
def test_evaluation_with_a_partial_last_batch_is_the_mean_over_windows(tmp, size):
    """37 windows in batches of 2 on 2 ranks: the last round has one window, and one rank none."""
    cfg = tiny(tmp, eval_iters=1000, strategy="single")
    gpt = plain_gpt()
    tokens = np.fromfile(os.path.join(tmp, "toy", "val.bin"), np.uint16).astype(np.int64)
    rows = torch.from_numpy(np.stack([tokens[16 * w:16 * w + 17] for w in range(37)]))
    with torch.no_grad():
        expected = gpt(rows[:, :-1], rows[:, 1:])[1].item()
    sums = torch.zeros(2, dtype=torch.float64)  # of losses, of weights; summed over the ranks
    for rank in range(size):
        for x, y, weight in train.Batches(cfg, World(rank, size)).fixed("val"):
            with torch.no_grad():
                sums += torch.tensor([gpt(x, y)[1].item() * weight, weight])
    assert sums[1] == 37
    assert (sums[0] / sums[1]).item() == pytest.approx(expected, rel=1e-6)
    if size == 1:
        measured = train.evaluate(gpt, train.Batches(cfg, World()), cfg, World(), NO_STOP)
        assert measured["val"] == pytest.approx(expected, rel=1e-6)


def test_evaluation_alone_notices_nan(tmp):
    out = os.path.join(tmp, "nan-eval")
    run = dict(learning_rate=1e18, min_lr=1e18, grad_clip=0.0, decay_lr=False, log_interval=1000)
    p = trained(1, arguments(tmp, out, eval_interval=3, max_iters=6, **run))
    assert p.returncode == 1
    assert "validation loss is nan at step 3" in p.stderr, p.stderr
    assert not os.path.exists(os.path.join(out, "ckpt.pt"))


def signalled_in_evaluation(argv, evaluation, batch):
    """train.py; SIGTERM comes while that batch of that evaluation is read."""
    fixed, splits = train.Batches.fixed, []

    def signalled(batches, split):
        splits.append(split)
        for i, one in enumerate(fixed(batches, split)):
            if splits.count("train") == evaluation and i == batch:
                os.kill(os.getpid(), signal.SIGTERM)
            assert splits.count("train") < evaluation or i <= batch, "it went on"
            yield one

    with patch.object(train.Batches, "fixed", signalled):
        train.main(argv)


def test_evaluation_ends_at_a_stop_signal(tmp):
    """A long evaluation: the signal is seen between two batches, and the state is saved."""
    out = os.path.join(tmp, "signal-eval")
    argv = arguments(tmp, out, max_iters=100, eval_interval=3, eval_iters=8)
    p = Ranks(1, signalled_in_evaluation, argv, 2, 3).finish()
    assert p.returncode == 0, p.stderr
    assert "stopped by a signal after step 3" in p.stdout and "step 3: train" not in p.stdout
    assert read_ckpt(out)["iter_num"] == len(losses(out)) == 3


# -----------------------------------------------------------------------------
# the log


def test_log_time_is_a_steps_without_evaluation(tmp, monkeypatch):
    """Each step takes 1 s and each evaluation 100 s, by a clock that only they move."""
    clock = itertools.count()  # it also moves at each look: by nothing
    now = [next(clock)]
    step, evaluation = train.train_step, train.evaluate

    def slow(function, seconds):
        def call(*args):
            now[0] += seconds
            return function(*args)
        return call

    monkeypatch.setattr(metrics.time, "time", lambda: float(now[0]))
    monkeypatch.setattr(train, "train_step", slow(step, 1))
    monkeypatch.setattr(train, "evaluate", slow(evaluation, 100))
    rows = run_training(tmp, "clock", max_iters=8, eval_interval=4, log_interval=3)
    assert [row["iter"] for row in rows] == [0, 3, 6, 7]
    assert [row["time_ms"] for row in rows] == [1000.0] * 4
    tokens = 12 * 2 * 16
    assert [row["tokens_per_s"] for row in rows] == [tokens] * 4


# -----------------------------------------------------------------------------
# sharded checkpoints while training goes on


def complete(out):
    return sorted(path.split(os.sep)[-2] for path in glob.glob(os.path.join(out, "*/header.json")))


@case(2, "background", strategy="full_shard")
def case_completed_in_the_background(tmp, strategy):
    """
    What is complete before and after each step. The first save is held up until step 3 has begun;
    then that step waits for it, and finish() comes later.
    """
    out, going_on = os.path.join(tmp, "background"), threading.Event()
    before, after, savers = [], [], []
    step, complete_one, save = train.train_step, checkpoint.Saver.complete, checkpoint.Saver.save

    def held(saver, *args):
        assert going_on.wait(60)
        complete_one(saver, *args)

    def noted(saver, *args):
        savers.append(saver)
        save(saver, *args)

    def look(*args):
        before.append(complete(out))
        result = step(*args)
        if len(before) == 4:
            going_on.set()
            savers[-1].saving.result(60)
            dist.barrier()  # rank 0's is the one that adds the header
        after.append(complete(out))
        return result

    with (patch.object(checkpoint.Saver, "complete", held), patch.object(train, "train_step", look),
          patch.object(checkpoint.Saver, "save", noted)):
        run_training(tmp, "background", strategy=strategy, checkpoint="sharded", max_iters=5,
                     eval_interval=2, gradient_accumulation_steps=2)
    return dict(before=before[:4], after=after[:4], end=complete(out))


def test_checkpoint_is_completed_while_training_goes_on(ranks):
    for r in ranks(2, "background"):
        assert r["before"] == [[]] * 4
        assert r["after"] == [[]] * 3 + [["step-000000002"]]
        assert r["end"] == ["step-000000004", "step-000000005"]


def test_checkpoint_the_next_sharded_save_waits_for_the_last(tmp, tmp_path, monkeypatch):
    world = World()
    cfg = resolve(tiny(tmp, checkpoint="sharded"), world)
    _, gpt, optimizer = train.build(cfg, world)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    saver = checkpoint.Saver(str(tmp_path / "out"), world)
    saver.claim(cfg, None)
    saver.group, running, seen = "a process group", [], []

    def async_save(tensors, storage_writer, process_group):
        seen.append(([future.done() for future in running], complete(tmp_path / "out")))
        running.append(Future())
        os.makedirs(storage_writer.path, exist_ok=True)
        open(os.path.join(storage_writer.path, ".metadata"), "w").close()
        return running[-1]

    def gather_object(mine, every, group):
        every[0] = mine

    monkeypatch.setattr(checkpoint.dcp, "async_save", async_save)
    monkeypatch.setattr(checkpoint.dist, "gather_object", gather_object)
    for step in (1, 2):
        if running:
            threading.Timer(0.5, running[0].set_result, [None]).start()
        saver.save(gpt, optimizer, scaler, step, 1.0)
    assert seen == [([], []), ([True], ["step-000000001"])]
    running[1].set_result(None)
    saver.finish(wait=True)
    assert complete(tmp_path / "out") == ["step-000000001", "step-000000002"]


# -----------------------------------------------------------------------------
# data


def test_tokens_are_checked_as_they_are_read(tmp_path):
    """The start looks at 100 windows; a wrong one elsewhere is found when its window comes."""
    for split in ("train", "val"):
        with open(tmp_path / f"{split}.bin", "wb") as f:
            f.truncate(2 * (2**26 + 64))  # zeros, and no room on the disk
            f.seek(2 * (2**26 + 40))
            f.write(np.uint16(99).tobytes())
    files = TokenFiles(str(tmp_path), "train", 16, 67)
    files.batch([0, 2**22])
    with pytest.raises(SystemExit, match="token 99 is beyond vocab_size=67"):
        files.batch([2**22 + 2])


@case(2, "signal")
def case_signal_in_evaluation(tmp):
    """Rank 1 alone has the signal; both stop, after the same batch."""
    world, cfg, wrapped, _, _ = built(tmp, strategy="full_shard", eval_iters=8)
    batches, stop = train.Batches(cfg, world), StopSignal(world)
    complete = train.evaluate(wrapped, batches, cfg, world, stop)
    stop.number = 15 * world.rank
    stopped = train.evaluate(wrapped, batches, cfg, world, stop)
    return [complete is None, stopped is None]


def test_evaluation_stops_on_all_ranks_together(ranks):
    assert ranks(2, "signal") == [[False, True]] * 2


def test_seed_decides_weights_and_data(tmp, ranks):
    """Seed 7 on two ranks is seed 7 in one process, and not the seed of the other tests."""
    run = dict(max_iters=3, eval_interval=3, gradient_accumulation_steps=8)
    with patch.object(torch, "manual_seed") as sevens:
        run_training(tmp, "seed-weights", seed=7, **run)
    mine = read_ckpt(os.path.join(tmp, "case-2-full_shard-7"))["model"]
    assert_same_weights(mine, read_ckpt(os.path.join(tmp, "seed-weights"))["model"], 1e-5)
    with patch.object(torch, "manual_seed") as usual:
        run_training(tmp, "seed-usual", **run)
    of_dropout = [{call.args for call in seeds.call_args_list} for seeds in (sevens, usual)]
    assert len(set.union(*of_dropout)) >= 2 * 3 * 8  # another for each micro-batch and seed
    with pytest.raises(AssertionError):
        assert_same_weights(mine, read_ckpt(os.path.join(tmp, "seed-usual"))["model"], 1e-2)

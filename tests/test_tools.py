"""
sample.py, and what a run logs.

    python -m pytest -q tests/test_tools.py
"""

import json
import math
import os
import re
import shutil
import sys
from dataclasses import asdict
from types import SimpleNamespace
from unittest.mock import MagicMock, patch

import pytest
import torch
from harness import (
    HERE,
    TINY,
    Ranks,
    arguments,
    launch,
    log_step,
    make_data,
    on_ranks,
    plain_gpt,
    python,
    read_metrics,
    refused,
    run_training,
    tiny,
    two_each,
    values,
)

import metrics
import sample
import train
from data import loader
from ranks import World

# -----------------------------------------------------------------------------
# sample.py


def from_stdin(path, argv):
    """sample.py, with a file as its stdin."""
    os.dup2(os.open(path, os.O_RDONLY), 0)
    sample.main(argv)


def test_tools_sample_from_everything(tmp, models):
    """A sharded checkpoint of a model with keys of its own; a prompt from stdin, a flag, a file."""
    shutil.copy(os.path.join(HERE, "tests", "hybrid.py"), models)
    out = os.path.join(tmp, "sampled")
    make_data(str(models / "bytes"), vocab=256, tokenizer="bytes")
    own = dict(model="hybrid", latent=10)
    launch(2, arguments(tmp, out, max_iters=2, checkpoint="sharded", dataset=models / "bytes",
                        **own))
    args = [f"--out_dir={out}", "--num_samples=1", "--max_new_tokens=30", "--dtype=float32"]
    (models / "p.txt").write_text("import")
    runs = [Ranks(1, from_stdin, models / "p.txt", [*args, "--start=-"]).finish()]
    os.rename(models / "bytes", models / "gone")  # the checkpoint knows its tokenizer
    for start in ("import", f"FILE:{models / 'p.txt'}"):
        runs.append(Ranks(1, sample.main, [*args, f"--start={start}"]).finish())
    assert all(p.returncode == 0 and p.stdout.startswith("import") for p in runs), runs
    assert len({p.stdout for p in runs}) == 1
    assert len(runs[0].stdout) > len("import\n---------------\n")


def saved_gpt(path, vocab_size, meta):
    """A checkpoint of a GPT whose data set is gone."""
    gpt = plain_gpt(vocab_size=vocab_size, n_embd=3)
    ckpt = dict(model=gpt.state_dict(), model_args=asdict(gpt.config), iter_num=1, meta=meta,
                best_val_loss=1.0, config={"dataset": "gone"})
    torch.save(ckpt, path / "ckpt.pt")


@pytest.mark.parametrize("vocab_size, meta, known", [
    (67, {}, False), (128256, {"vocab_size": 128256}, False), (67, {"tokenizer": "own"}, False),
    (67, {"chars": ["a", "b"]}, True), (257, {"vocab_size": 257, "tokenizer": "bytes"}, True)])
def test_tools_sample_without_a_tokenizer_reads_and_prints_ids(
        tmp_path, capsys, vocab_size, meta, known):
    saved_gpt(tmp_path, vocab_size, meta)
    argv = [f"--out_dir={tmp_path}", "--num_samples=1", "--max_new_tokens=3"]

    def said(*more):
        sample.main([*argv, *more])
        return capsys.readouterr().out

    if known:
        assert said("--start=a").startswith("a")
        assert "," not in said("--start=ids:1,0")
    else:
        assert re.match(r"5,66,\d+,\d+,\d+\n-", said("--start=ids:5,66"))
        assert re.match(r"0,\d+,\d+,\d+\n-", said())
        why = refused(sample.main, [*argv, "--start=a"])
        assert "gone" in why and f"vocab_size={vocab_size}" in why and "ids:1,2,3" in why
    assert f"{vocab_size} is beyond" in refused(sample.main, [*argv, f"--start=ids:1,{vocab_size}"])


@pytest.mark.parametrize("use_cache", [True, False])
def test_tools_sample_cuts_a_long_prompt_at_its_beginning(use_cache):
    """A context of 16 of 21 tokens: the text goes on behind the last ones."""
    gpt, prompt = plain_gpt(), torch.arange(21)[None] * 3
    whole, end = (sample.generate(gpt, idx, 12, temperature=0, use_cache=use_cache)
                  for idx in (prompt, prompt[:, -16:]))
    assert torch.equal(whole[:, :21], prompt) and torch.equal(whole[:, 5:], end)


def test_tools_sample_writes_what_its_terminal_can(tmp_path):
    """Of one that is not UTF-8, a ? for the rest."""
    saved_gpt(tmp_path, 2, dict(vocab_size=2, chars=["a", "\u00e9"]))
    argv = [f"--out_dir={tmp_path}", "--num_samples=1", "--max_new_tokens=9", "--start=ids:1,0"]
    p = python(os.path.join(HERE, "sample.py"), *argv, env={"PYTHONIOENCODING": "ascii"})
    assert p.returncode == 0 and p.stdout.startswith("?a"), p.stderr


def test_tools_sample_temperature_divides_the_logits():
    with patch.object(torch, "multinomial") as drawn:
        sample.draw(torch.tensor([[0.0, math.log(2.0)]]), 0.5, None, None)  # odds 1 : 2, squared
    assert drawn.call_args.args[0].tolist() == [[pytest.approx(0.2), pytest.approx(0.8)]]


def test_tools_sample_leaves_cudnns_attention_out(tmp, monkeypatch):
    """It makes a plan for every length of the cache; flash is the first of the others. And all
    samples share one generator, under autocast, with the tokenizer's real size."""
    seen, numbers = [], set()

    def generate(model, x, n, temperature, top_k, vocab_size, generator):
        numbers.add(torch.rand(1, generator=generator).item())
        assert x.tolist() == [[1]]  # an empty prompt is a line end
        seen.append((torch.backends.cuda.cudnn_sdp_enabled(), vocab_size,
                     torch.backends.cuda.flash_sdp_enabled(), torch.is_autocast_enabled("cpu")))
        return x

    run_training(tmp, "sampled-flash", max_iters=1, eval_interval=1)
    monkeypatch.setattr(sample, "generate", generate)
    monkeypatch.setattr(sample, "tokenizer", lambda *meta: (lambda s: [1] * len(s), str, 60))
    sample.main([f"--out_dir={tmp}/sampled-flash", "--num_samples=2", "--dtype=bfloat16",
                 "--start="])
    assert seen == [(False, 60, True, True)] * 2 and len(numbers) == 2


# -----------------------------------------------------------------------------
# what a run logs


def test_tools_log_line_and_metrics(tmp, capsys):
    """Lines begin as nanoGPT's do; a row has all numbers."""
    run_training(tmp, "metrics", max_iters=3, log_interval=2, decay_lr=False, freeze="wpe")
    said = capsys.readouterr().out
    assert re.findall(r"^iter (\d+): loss \d\.\d{4}, time \d+\.\d\dms, ", said, re.M) == ["0", "2"]
    assert "epoch = 14 steps" in said  # 337 windows, 24 a step
    assert "toy: 5,400 tokens of train and 600 of val" in said
    assert "ids up to 66, vocab_size=67" in said
    assert "480 parameters are frozen" in said  # 16 positions of 30
    evaluated, first, *_, last = read_metrics(os.path.join(tmp, "metrics"))
    train_loss, val_loss = evaluated["train_loss"], evaluated["val_loss"]
    assert f"step 0: train loss {train_loss:.4f}, val loss {val_loss:.4f}\n" in said
    assert train_loss != val_loss
    assert (evaluated["tokens"], last["tokens"]) == (0, 3 * 384)
    assert 0 < evaluated["wall_s"] < first["wall_s"]
    assert evaluated["val_perplexity"] == pytest.approx(math.exp(val_loss))
    assert {"run", "iter", "loss", "tokens_per_s", "mfu", "grad_norm", "lr", "loss_scale",
            "peak_memory", "valley_memory", "peak_reserved", "free_memory", "alloc_retries",
            "time_ms", "data_ms", "perplexity", "epoch", "sequences_per_step", "tokens_per_step",
            "time", "train_s", "save_s", "save_blocked_s", "wall_s"} <= first.keys()
    assert first["lr"] == TINY["learning_rate"]
    assert 0 < first["data_ms"] < first["time_ms"] and first["peak_reserved"] is None
    assert first["peak_memory"] > 2**26  # bytes: PyTorch alone is more than 64 MiB
    assert first["perplexity"] == pytest.approx(math.exp(first["loss"]))
    assert first["epoch"] == pytest.approx(24 / 337)
    assert (first["sequences_per_step"], first["tokens_per_step"]) == (24, 384)
    assert 0 < first["train_s"] < first["wall_s"]  # without the first evaluation
    config, *_ = map(json.loads, open(os.path.join(tmp, "metrics", "metrics.jsonl")))
    assert config["config"]["n_embd"] == TINY["n_embd"] and config["iter"] == 0
    assert "12 x 2 sequences of a rank" in said and said.startswith("drawing initial values")
    assert re.search(r"^done in \d+ s: max_iters=3$", said, re.M)


MEASURED = set("""run time time_ms data_ms tokens_per_s mfu peak_memory valley_memory peak_reserved
    free_memory alloc_retries wall_s train_s save_s save_blocked_s""".split())


def test_tools_a_column_is_the_same_on_one_rank_and_on_two(tmp):
    """Of all ranks' rows and batches, not of rank 0's: a fork's columns too."""
    rows = []
    for world in (1, 2):
        out = os.path.join(tmp, f"columns-{world}")
        launch(world, arguments(tmp, out, max_iters=3, eval_interval=3, **two_each(2)))
        rows.append(read_metrics(out))
    for one, two in zip(*rows, strict=True):
        assert one.keys() == two.keys()
        for key in one.keys() - MEASURED:
            expected = one[key] and pytest.approx(one[key], rel=1e-4)  # or None
            assert two[key] == expected, key


def test_tools_a_save_is_in_the_next_row_alone(tmp, tmp_path):
    log = metrics.Log(tiny(tmp), World(), str(tmp_path), "the-id", 0)
    log_step(log, 0)
    log.saved(0, 2.0, 0.5)
    log_step(log, 1)
    log_step(log, 2)
    rows = [(row["save_s"], row["save_blocked_s"]) for row in read_metrics(tmp_path)]
    assert rows == [(None, None), (2.0, 0.5), (None, None)]


def test_tools_a_norm_that_is_not_finite_is_null_in_json(tmp, tmp_path):
    log = metrics.Log(tiny(tmp), World(), str(tmp_path), "the-id", 0)
    log_step(log, 0, norm=math.nan)
    log.evaluation(1, dict(train=2.0, val=1000.0))  # exp(1000) has no float
    text = (tmp_path / "metrics.jsonl").read_text()
    assert '"grad_norm": null' in text and "NaN" not in text and "Infinity" not in text


def plain_flops(frozen=0, unreached=0):
    """FLOPs of one token by the formula (PaLM, appendix B): for each weight of a product 2 forward,
    2 for the input's gradient, 2 for its own; 4 T C forward and 8 backward for a layer's attention.
    frozen blocks spare their own gradients, unreached ones all of backward."""
    L, C, T = (TINY[key] for key in ("n_layer", "n_embd", "block_size"))
    block = 12 * C**2
    attention = 12 * L * T * C - 8 * unreached * T * C
    return 6 * 67 * C + 6 * L * block + attention - 2 * (frozen + unreached) * block


@pytest.mark.parametrize("model, freeze, frozen, unreached", [
    ("gpt2", "", 0, 0), ("gpt2", r"h\.1\.", 1, 0), ("gpt2", r"wpe|h\.[12]\.", 2, 0),
    # an untied head, so that the embeddings can be frozen, and two blocks behind them. Block 2's
    # first product needs no gradient of its input; but its LayerNorm trains, so it does
    ("test_fsdp", r"wte|wpe|h\.[01]\.", 2, 2)])
def test_tools_flops_are_the_formula_and_frozen_parameters_spare_theirs(
        tmp, model, freeze, frozen, unreached):
    model = train.meta_model(tiny(tmp, bias=False, model=model, freeze=freeze))
    assert metrics.flops_per_token(model, World()) == plain_flops(frozen, unreached)


def test_tools_mfu_is_relative_to_all_ranks_peaks(tmp, tmp_path, monkeypatch, capsys):
    """A step of 2 s on two ranks of a peak that they reach a tenth of."""
    peak = plain_flops() * 12 * 2 * 16 / 2 / 2 * 10
    monkeypatch.setattr(metrics, "peak_flops", lambda device: peak)
    monkeypatch.setattr(metrics.time, "time", lambda: 5.0)
    cfg = tiny(tmp, bias=False)
    ideal_s = metrics.ideal_seconds(train.meta_model(cfg), cfg, World(size=2))
    log = metrics.Log(cfg, World(size=2), str(tmp_path), "the-id", 0, ideal_s)
    monkeypatch.setattr(metrics.time, "time", lambda: 7.0)
    log_step(log, 0, waited=0.5)
    assert "time 2000.00ms, mfu 10.00%, 192 tok/s" in capsys.readouterr().out
    monkeypatch.setattr(metrics.time, "time", lambda: 11.0)
    log_step(log, 1, waited=0.25)
    rows = [(row["mfu"], row["time_ms"], row["wall_s"]) for row in read_metrics(tmp_path)]
    assert rows == [pytest.approx((0.1, 2e3, 2)), pytest.approx((0.05, 4e3, 6))]  # in all: 6 s
    assert [row["data_ms"] for row in read_metrics(tmp_path)] == [500, 250]


def case_slow_disk(tmp):
    """Rank 1 waits 5 s for each of its two micro-batches of a step, by its clock."""
    now = [0.0]

    def clock():
        now[0] += 5.0 * int(os.environ["RANK"])
        return now[0]

    with patch.object(loader, "time", SimpleNamespace(perf_counter=clock)):
        rows = run_training(tmp, "slow", gradient_accumulation_steps=4, max_iters=4, log_interval=2)
    return [row["data_ms"] for row in rows]


def test_tools_data_ms_is_that_of_the_slowest_rank(tmp):
    """For it all ranks wait. The first row has step 0 and the first micro-batch of step 1."""
    first, *_ = values(on_ranks(2, {"": (case_slow_disk, dict(tmp=tmp))}), "")
    assert first == [15_000, 10_000, 10_000]


def test_tools_a_gpus_line_has_what_the_allocator_says(tmp, tmp_path, monkeypatch, capsys):
    """The peak is of the steps since the last line: neither an evaluation nor a save counts."""
    stats = {"reserved_bytes.all.peak": 3 * 2**30, "num_alloc_retries": 5,
             "allocated_bytes.all.current": 2**29}
    resets = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**33, 2**34))
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", resets.append)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(metrics, "peak_memory", lambda device: 2**30)
    log = metrics.Log(tiny(tmp), World(device=torch.device("cuda")), str(tmp_path), "the-id", 0)
    assert len(resets) == 1
    log_step(log, 0)
    assert len(resets) == 2
    with log.paused():
        pass
    assert len(resets) == 3
    said = "mem 1.00GiB (0.50GiB at rest, 3.00GiB reserved, 8.00GiB free, 5 retries), "
    assert said in capsys.readouterr().out
    (row,) = read_metrics(tmp_path)
    assert row["peak_reserved"] == 3 * 2**30 and row["alloc_retries"] == 5
    assert row["valley_memory"] == 2**29 and row["free_memory"] == 2**33


@pytest.mark.parametrize("name, peak", [
    ("NVIDIA H100 PCIe", 756e12), ("NVIDIA L40S", 362e12), ("NVIDIA A10G", 70e12),
    ("Tesla V100-SXM2-32GB", 125e12), ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
    ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None), ("NVIDIA L400", None)])
def test_tools_peak_flops_needs_the_exact_name(monkeypatch, name, peak):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert metrics.peak_flops(SimpleNamespace(type="cuda")) == peak


def test_tools_tensorboard(tmp, tmp_path):
    """Each number of each row, at once, since a kill must lose none; a resumed run logs the later
    steps again."""
    writers = []
    module = SimpleNamespace(SummaryWriter=lambda *args, **kwargs: writers.append(
        (args, kwargs, MagicMock())) or writers[-1][2])
    for step, purged in ((0, None), (2, 2)):
        with patch.object(metrics, "package", lambda name, wanted_by: module):
            log = metrics.Log(tiny(tmp, tensorboard=True), World(), str(tmp_path), "id", step)
        log.write(dict(iter=step, loss=1.5, mfu=None))
        args, kwargs, writer = writers[-1]
        assert (args, kwargs) == ((str(tmp_path),), dict(purge_step=purged))
        assert [call.args for call in writer.add_scalar.call_args_list] == [
            ("iter", step, step), ("loss", 1.5, step)]
        assert writer.flush.called


def test_tools_wandb(tmp, tmp_path, monkeypatch):
    """wandb's run has our run's id; a resumed run goes on in it; rank 0 alone logs."""
    wandb = MagicMock()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    cfg = tiny(tmp, wandb_log=True, wandb_project="p", wandb_run_name="r")
    for step, resume in ((0, None), (1, "allow")):
        log = metrics.Log(cfg, World(), str(tmp_path), "the-id", step)
        log.write(dict(iter=step, loss=2.5))
        log.close()
        told = wandb.init.call_args.kwargs
        assert (told["project"], told["name"], told["config"]["n_layer"]) == ("p", "r", 3)
        assert (told["id"], told["resume"]) == ("the-id", resume)
        run = wandb.init.return_value
        run.log.assert_called_with(dict(iter=step, loss=2.5), step=step)
        assert run.finish.call_count == step + 1
    metrics.Log(cfg, World(rank=1, size=2), str(tmp_path), "the-id", 0).write(dict(iter=0))
    assert wandb.init.call_count == 2 and len(read_metrics(tmp_path)) == 2

"""
metrics.py: what a run prints and logs, on any number of ranks.

    python -m pytest -q tests/test_metrics.py
"""

import json
import math
import os
import re
import sys
from unittest.mock import MagicMock

import pytest
import torch
from training import TINY, arguments, launch, read_metrics, run_training, tiny

import metrics
import train
from optimizer import LossScaler
from ranks import World


def test_metrics_lines_and_rows(tmp, capsys):
    """Lines begin as nanoGPT's do; a row has all numbers."""
    run_training(tmp, "metrics", max_iters=3, log_interval=2, decay_lr=False, freeze="wpe")
    said = capsys.readouterr().out
    assert re.findall(r"^iter (\d+): loss \d\.\d{4}, time \d+\.\d\dms, ", said, re.M) == ["0", "2"]
    assert "toy: 5,400 tokens of train, epoch = 14 steps" in said  # of 384
    evaluated, first, *_, last = read_metrics(os.path.join(tmp, "metrics"))
    train_loss, val_loss = evaluated["train_loss"], evaluated["val_loss"]
    assert f"step 0: train loss {train_loss:.4f}, val loss {val_loss:.4f}\n" in said
    assert train_loss != val_loss
    assert {"run", "iter", "loss", "tokens_per_s", "mfu", "grad_norm", "lr", "loss_scale",
            "peak_memory", "time_ms", "time"} <= first.keys()
    assert first["lr"] == TINY["learning_rate"]
    assert first["peak_memory"] > 2**26  # bytes: PyTorch alone is more than 64 MiB
    config, *_ = map(json.loads, open(os.path.join(tmp, "metrics", "metrics.jsonl")))
    assert config["config"]["n_embd"] == TINY["n_embd"] and config["iter"] == 0
    assert re.search(r"^done in \d+ s$", said, re.M)


def test_metrics_of_a_resumed_run_go_on_after_whole_rows(tmp):
    """A full disk has left half a row."""
    run_training(tmp, "half", max_iters=2, eval_interval=2)
    out = os.path.join(tmp, "half")
    rows = read_metrics(out)
    with open(os.path.join(out, "metrics.jsonl"), "a") as f:
        f.write('{"run": "x", "it')
    run_training(tmp, "half", max_iters=3, init_from="resume")
    assert read_metrics(out)[:len(rows)] == rows and len(read_metrics(out)) > len(rows)


MEASURED = set("run time time_ms tokens_per_s mfu peak_memory".split())


def test_metrics_a_column_is_the_same_on_one_rank_and_on_two(tmp):
    """Of all ranks' rows and batches, not of rank 0's: a fork's columns too."""
    rows = []
    for world in (1, 2):
        out = os.path.join(tmp, f"columns-{world}")
        run = dict(gradient_accumulation_steps=4, batch_size=6, max_iters=3, eval_interval=3)
        launch(world, arguments(tmp, out, **run))
        rows.append(read_metrics(out))
    for one, two in zip(*rows, strict=True):
        assert one.keys() == two.keys()
        for key in one.keys() - MEASURED:
            expected = one[key] and pytest.approx(one[key], rel=1e-4)  # or None
            assert two[key] == expected, key


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
def test_metrics_flops_are_the_formula_and_frozen_parameters_spare_theirs(
        tmp, model, freeze, frozen, unreached):
    model = train.meta_model(tiny(tmp, bias=False, model=model, freeze=freeze))
    assert metrics.flops_per_token(model, World()) == plain_flops(frozen, unreached)


def test_metrics_mfu_is_relative_to_all_ranks_peaks(tmp, tmp_path, monkeypatch, capsys):
    """A step of 2 s on two ranks of a peak that they reach a tenth of."""
    peak = plain_flops() * 12 * 2 * 16 / 2 / 2 * 10
    monkeypatch.setattr(metrics, "peak_flops", lambda device: peak)
    monkeypatch.setattr(metrics.time, "time", lambda: 5.0)
    cfg = tiny(tmp, bias=False)
    ideal_s = metrics.ideal_seconds(train.meta_model(cfg), cfg, World(size=2))
    log = metrics.Log(cfg, World(size=2), str(tmp_path), "the-id", 0, ideal_s)
    monkeypatch.setattr(metrics.time, "time", lambda: 7.0)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    scaler = LossScaler(cfg)
    log.step(0, dict(loss=4.0, grad_norm=1.0, own=0.25), optimizer, scaler)
    said = capsys.readouterr().out
    assert "time 2000.00ms, mfu 10.00%, 192 tok/s, grad_norm 1.0000, own 0.2500, mem" in said
    monkeypatch.setattr(metrics.time, "time", lambda: 11.0)
    numbers = dict(loss=4.0, grad_norm=math.inf, own=0.25)  # JSON has no infinity
    log.step(1, numbers, optimizer, scaler)
    rows = read_metrics(tmp_path)
    assert [row["mfu"] for row in rows] == pytest.approx([0.1, 0.05])
    assert [row["time_ms"] for row in rows] == pytest.approx([2e3, 4e3])
    assert [(row["grad_norm"], row["own"]) for row in rows] == [(1.0, 0.25), (None, 0.25)]


def test_metrics_wandb(tmp, tmp_path, monkeypatch):
    """wandb's run has our run's id; a resumed run goes on in it; rank 0 alone logs."""
    wandb = MagicMock()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    cfg = tiny(tmp, wandb_log=True, wandb_project="p", wandb_run_name="r")
    for step in (0, 1):
        log = metrics.Log(cfg, World(), str(tmp_path), "the-id", step)
        log.evaluation(step, dict(train=math.nan, val=2.5))  # JSON has no NaN
        log.close()
        told = wandb.init.call_args.kwargs
        assert (told["project"], told["name"], told["config"]["n_layer"]) == ("p", "r", 3)
        assert (told["id"], told["resume"]) == ("the-id", "allow")
        run = wandb.init.return_value
        row = dict(iter=step, train_loss=None, val_loss=2.5)
        run.log.assert_called_with(row, step=step)
        assert read_metrics(tmp_path)[-1].items() >= row.items()
    metrics.Log(cfg, World(rank=1, size=2), str(tmp_path), "the-id", 0).write(dict(iter=0))
    assert wandb.init.call_count == 2 and len(read_metrics(tmp_path)) == 2

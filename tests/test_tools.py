"""bench.py, sample.py, what a run logs, and eval_only."""

import json
import math
import os
import re
import sys
import types
from dataclasses import asdict
from unittest.mock import patch

import pytest
import torch
from harness import (
    TINY,
    Ranks,
    arguments,
    launch,
    make_data,
    plain_gpt,
    python,
    read_metrics,
    script,
    tiny,
    trained,
)
from torch.utils.flop_counter import FlopCounterMode

import bench
import fsdp
import metrics
import sample
import train
from ranks import World

# -----------------------------------------------------------------------------
# bench.py


def bench_main(*argv):
    """bench.py on a machine of 1e6 FLOP/s, which it does not measure: that takes a second each."""
    bench.matmul_rate = lambda device, dtype: 1e6
    bench.main(list(argv))


def plain_flops(frozen=0, unreached=0):
    """FLOPs of one token by the formula (PaLM, appendix B): for each weight of a product 2 forward,
    2 for the input's gradient, 2 for its own; 4 T C forward and 8 backward for a layer's attention.
    frozen blocks spare their own gradients, unreached ones all of backward."""
    L, C, T = (TINY[key] for key in ("n_layer", "n_embd", "block_size"))
    block = 12 * C**2
    attention = 12 * L * T * C - 8 * unreached * T * C
    return 6 * 67 * C + 6 * L * block + attention - 2 * (frozen + unreached) * block


@pytest.mark.parametrize("freeze, frozen, unreached", [
    ("", 0, 0), (r"h\.1\.", 1, 0), (r"wpe|h\.[12]\.", 2, 0)])
def test_tools_flops_are_the_formula_and_frozen_parameters_spare_theirs(
        tmp, freeze, frozen, unreached):
    model = train.meta_model(tiny(tmp, bias=False))
    fsdp.freeze(model, freeze)
    assert metrics.flops_per_token(model, World()) == plain_flops(frozen, unreached)


def test_tools_flops_of_what_backward_never_reaches(tmp):
    """An untied head, so that the embeddings can be frozen, and two blocks behind them."""
    model = train.meta_model(tiny(tmp, bias=False, model="test_fsdp"))
    fsdp.freeze(model, r"wte|wpe|h\.[01]\.")
    # block 2's first product needs no gradient of its input: its LayerNorm trains, so it does
    assert metrics.flops_per_token(model, World()) == plain_flops(frozen=2, unreached=2)


def test_tools_bench(tmp, tmp_path):
    """Its figures against each other and against plain PyTorch's count of the FLOPs."""
    traces = tmp_path / "traces"
    model = arguments(tmp, tmp_path, gradient_accumulation_steps=2, bias=False)
    p = Ranks(2, bench_main, *model, "--steps=3", "--strategies=ddp,full_shard",
              "--variants=;batch_size=4", f"--profile={traces}").finish()
    assert p.returncode == 0, p.stderr
    names = ["strategy=ddp", "strategy=full_shard",
             "batch_size=4 strategy=ddp", "batch_size=4 strategy=full_shard"]
    expected, first = plain_flops(), None
    for name, batch_size in zip(names, (2, 2, 4, 4)):
        line = re.search(rf"^{name} +(\d.*) x its time$", p.stdout, re.M)[1]
        numbers = [float(number.replace(",", "")) for number in re.findall(r"[\d.,]+", line)]
        ms, fastest, slowest, tokens_per_s, of_matmul, memory, host, ratio = numbers
        first = first or ms
        tokens = 2 * batch_size * TINY["block_size"]
        assert fastest <= ms <= slowest
        assert tokens_per_s == pytest.approx(tokens / ms * 1e3, rel=0.1 / ms, abs=1)  # both rounded
        assert of_matmul / 100 == pytest.approx(expected * tokens_per_s / 2 / 1e6, rel=0.001)
        # the same figure on a CPU, but the second reading is a moment later
        assert host == pytest.approx(memory, rel=0.02)
        assert memory > 64 and " n/a " in line
        assert ratio == pytest.approx(ms / first, rel=0.1 / min(ms, first), abs=1e-3)
    assert len(re.findall(" x its time$", p.stdout, re.M)) == 4

    # the profile: every rank's trace has the products, rank 0's table the collectives
    for name in names:
        assert f"\n{name}: 3 steps" in p.stdout
        for rank in range(2):
            with open(traces / f"trace-{name.replace(' ', '_')}-{rank}.json") as f:
                ops = {e.get("name", "") for e in json.load(f)["traceEvents"]}
            assert ops & {"aten::mm", "aten::addmm"}
            collective = "reduce_scatter" if "full_shard" in name else "allreduce"
            assert any(collective in op for op in ops)
    assert "c10d::_reduce_scatter_base_" in p.stdout and "c10d::allreduce_" in p.stdout


def test_tools_bench_measures_the_machine(monkeypatch):
    """The rate of its products is what PyTorch counts of them, on a machine of 1 GFLOP/s."""
    def timer(statement, num_threads, globals):
        with FlopCounterMode(display=False) as counter:
            eval(statement, globals)
        measured = types.SimpleNamespace(median=counter.get_total_flops() / 1e9)
        return types.SimpleNamespace(blocked_autorange=lambda min_run_time: measured)

    monkeypatch.setattr(bench, "Timer", timer)
    assert bench.matmul_rate(torch.device("cpu"), torch.float32) == pytest.approx(1e9)


@pytest.mark.parametrize("argv, message", [
    (["--steps=0"], "--steps=0"),
    (["--steps=x"], "'x'"),
    (["--stepz=3"], "did you mean steps?"),
    (["--variants=strategy=dpp"], "strategy='dpp'"),
    (["--strategies=ddp"], "the others torchrun"),
    ([f"--profile={__file__}"], "pass another path"),
])
def test_tools_bench_bad_input_is_one_clear_line(tmp, tmp_path, capsys, monkeypatch, argv, message):
    monkeypatch.setattr(bench, "training", None)  # it is said before anything is built
    with pytest.raises(SystemExit) as e:
        bench.main(arguments(tmp, tmp_path) + argv)
    assert message in e.value.code and "\n" not in e.value.code
    assert capsys.readouterr() == ("", "")


def test_tools_bench_help_and_exit_code():
    p = script("bench.py", "--help")
    assert p.returncode == 0 and "bench.py config/quickstart.py --steps=3 --profile" in p.stdout
    p = Ranks(1, bench_main, "--steps=0").finish()
    assert p.returncode == 1 and p.stderr.count("\n") == 1 and "--steps=0" in p.stderr


# -----------------------------------------------------------------------------
# sample.py, eval_only


def test_tools_sample_from_everything(tmp, tmp_path):
    out = os.path.join(tmp, "sampled")
    make_data(str(tmp_path / "bytes"), vocab=256, tokenizer="bytes")
    launch(2, arguments(tmp, out, max_iters=2, checkpoint="sharded", dataset=tmp_path / "bytes"))
    args = [f"--out_dir={out}", "--num_samples=1", "--max_new_tokens=30", "--dtype=float32"]
    (tmp_path / "p.txt").write_text("import")
    runs = [python("sample.py", *args, "--start=-", stdin="import")]
    os.rename(tmp_path / "bytes", tmp_path / "gone")  # the checkpoint knows its tokenizer
    for start in ("import", f"FILE:{tmp_path / 'p.txt'}"):
        runs.append(Ranks(1, sample.main, [*args, f"--start={start}"]).finish())
    assert all(p.returncode == 0 and p.stdout.startswith("import") for p in runs), runs[0].stderr
    assert len({p.stdout for p in runs}) == 1
    assert len(runs[0].stdout) > len("import\n---------------\n")
    p = Ranks(1, sample.main, [f"--out_dir={tmp_path}"]).finish()
    assert p.returncode == 1 and p.stderr == (
        f"init_from=resume: no model to sample from in out_dir={tmp_path}; pass a run's --out_dir, "
        "or --init_from=gpt2\n")


@pytest.mark.parametrize("vocab_size, meta, message", [
    (67, {}, "gone: no tokenizer is known for vocab_size=67; put the data's meta.json or"),
    (128256, {"vocab_size": 128256}, "gone: no tokenizer is known for vocab_size=128256; put"),
    (67, {"made": "by hand"}, "gone: no tokenizer is known for vocab_size=67; put"),
    (67, [1], "its meta is [1]"),
    (67, {"chars": ["a", "b"]}, None), (257, {"vocab_size": 257, "tokenizer": "bytes"}, None)])
def test_tools_sample_takes_no_tokenizer_that_it_does_not_know(
        tmp_path, capsys, vocab_size, meta, message):
    gpt = plain_gpt(vocab_size=vocab_size, n_embd=3)
    ckpt = dict(model=gpt.state_dict(), model_args=asdict(gpt.config), iter_num=1, meta=meta,
                best_val_loss=1.0, config={"dataset": "gone"})
    torch.save(ckpt, tmp_path / "ckpt.pt")
    argv = [f"--out_dir={tmp_path}", "--num_samples=1", "--max_new_tokens=3", "--start=a"]
    if message is None:
        sample.main(argv)
        assert capsys.readouterr().out.startswith("a")
    else:
        with pytest.raises(SystemExit) as e:
            sample.main(argv)
        assert message in e.value.code and "\n" not in e.value.code


@pytest.mark.parametrize("argv, message", [
    (["--num_samples=0"], "--num_samples=0: it must be at least 1"),
    (["--temperature=-1"], "--temperature=-1.0: it must be at least 0"),
    (["--temperature=nan"], "--temperature=nan: it must be at least 0"),
    (["--seed=9223372036854775808"], "below 2**63"),
    (["--use_cache=maybe"], "--use_cache=maybe"),
    (["--top_k=x"], "'x'"),
    (["--start=FILE:/nowhere"], "FILE:/nowhere"),
])
def test_tools_sample_bad_input_is_one_clear_line(argv, message):
    with pytest.raises(SystemExit) as e:
        sample.arguments(argv)
    assert message in e.value.code and "\n" not in e.value.code


@pytest.mark.parametrize("init_from", ["scratch", "auto"])
def test_tools_sample_without_a_model_is_one_clear_line(tmp_path, init_from):
    with pytest.raises(SystemExit, match=f"init_from={init_from}: no model to sample from"):
        sample.main([f"--init_from={init_from}", f"--out_dir={tmp_path}"])


def test_tools_eval_only(tmp):
    out = os.path.join(tmp, "eval_only")
    launch(1, arguments(tmp, out, max_iters=14))
    written = os.stat(os.path.join(out, "ckpt.pt")).st_mtime_ns
    p = launch(1, arguments(tmp, out, max_iters=20, init_from="resume", eval_only=True, seed=1337))
    assert re.search(r"^step 14: train loss \d\.\d{4}, val loss \d\.\d{4}$", p.stdout, re.M)
    assert "iter 14" not in p.stdout
    assert os.stat(os.path.join(out, "ckpt.pt")).st_mtime_ns == written


# -----------------------------------------------------------------------------
# what a run logs


def test_tools_log_line_and_metrics(tmp):
    out = os.path.join(tmp, "metrics")
    p = launch(1, arguments(
        tmp, out, max_iters=3, log_interval=2, keep_checkpoints=1, reduce_dtype="float32",
        backend="auto", wandb_log=False, weight_decay=0.0, beta1=0.8, beta2=0.9, decay_lr=False))
    assert re.search(r"^iter 0: loss \d\.\d{4}, time \d+\.\d\dms, mfu n/a, [\d,]+ tok/s, "
                     r"norm \d+\.\d\d, mem \d\.\d\dGiB, \d+\.\dm left$", p.stdout, re.M), p.stdout
    assert "tokens a step, epoch = 14 steps\n" in p.stdout  # 337 windows, 24 a step
    assert "frozen" not in p.stdout
    row = read_metrics(out)[0]
    line = f"step 0: train loss {row['train_loss']:.4f}, val loss {row['val_loss']:.4f}\n"
    assert line in p.stdout and row["train_loss"] != row["val_loss"]
    assert row["val_perplexity"] == pytest.approx(math.exp(row["val_loss"]))
    row = [r for r in read_metrics(out) if "loss" in r][0]
    assert {"iter", "loss", "tokens_per_s", "mfu", "grad_norm", "lr", "loss_scale", "peak_memory",
            "wall_s"} <= row.keys()
    assert row["lr"] == TINY["learning_rate"]


def test_tools_mfu_is_relative_to_all_ranks_peaks(tmp, monkeypatch, capsys):
    """A step of 2 s on two ranks of a peak that they reach a tenth of."""
    cfg = tiny(tmp, bias=False)
    peak = plain_flops() * 12 * 2 * 16 / 2 / 2 * 10
    monkeypatch.setattr(metrics, "peak_flops", lambda device: peak)
    monkeypatch.setattr(metrics.time, "time", lambda: 5.0)
    log = metrics.Log(cfg, World(size=2), None, 0, train.meta_model(cfg))
    monkeypatch.setattr(metrics.time, "time", lambda: 7.0)
    log.step(0, 4.0, 1.0, 1e-3, None)
    assert "time 2000.00ms, mfu 10.00%, 192 tok/s" in capsys.readouterr().out


def main_without(package, argv):
    sys.modules[package] = None  # importing it fails, whether it is installed or not
    train.main(argv)


@pytest.mark.parametrize("package, overrides", [
    ("wandb", dict(wandb_log=True, wandb_project="p", wandb_run_name="r")),
    ("tensorboard", dict(tensorboard=True)),
])
def test_tools_missing_package_is_one_clear_line(tmp, package, overrides):
    argv = arguments(tmp, os.path.join(tmp, "missing"), **overrides)
    p = Ranks(1, main_without, package, argv).finish()
    assert p.returncode == 1 and f"pip install {package}" in p.stderr
    assert "Traceback" not in p.stderr


def test_tools_tensorboard(tmp):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    out = os.path.join(tmp, "tensorboard")
    p = trained(1, arguments(tmp, out, max_iters=3, tensorboard=True))
    assert p.returncode == 0, p.stderr
    events = EventAccumulator(out).Reload()
    logged = [(r["iter"], r["loss"]) for r in read_metrics(out) if "loss" in r]
    assert len(logged) == 3
    for event, (step, loss) in zip(events.Scalars("loss"), logged, strict=True):
        assert event.step == step and event.value == pytest.approx(loss)
    assert "val_loss" in events.Tags()["scalars"] and "mfu" not in events.Tags()["scalars"]
    for step, purged in ((0, None), (2, 2)):  # a resumed run logs the later steps again
        with patch("torch.utils.tensorboard.SummaryWriter") as writer:
            log = metrics.Log(tiny(tmp, out_dir=out, tensorboard=True), World(), "id", step, None)
            log.write(dict(iter=step, loss=1.0))
        writer.assert_called_once_with(out, purge_step=purged)
        assert writer.return_value.flush.called  # a kill loses no row


def test_tools_wandb(tmp, tmp_path, monkeypatch):
    """wandb's run has our run's id; a resumed run goes on in it."""
    calls, logged = [], []

    def init(**kwargs):
        calls.append(kwargs)
        return types.SimpleNamespace(log=lambda row, step: logged.append((step, row)),
                                     finish=lambda: logged.append("finished"))

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    cfg = tiny(tmp, out_dir=str(tmp_path), wandb_log=True, wandb_project="p", wandb_run_name="r")
    for step in (0, 1):
        log = metrics.Log(cfg, World(), "the-id", step, None)
        log.write(dict(iter=step, loss=2.5))
        log.close()
    rows = [dict(iter=i, loss=2.5) for i in (0, 1)]
    assert logged == [(0, rows[0]), "finished", (1, rows[1]), "finished"]
    first, second = calls
    assert first["project"] == "p" and first["name"] == "r" and first["config"]["n_layer"] == 3
    assert first["id"] == second["id"] == "the-id"
    assert first["resume"] is None and second["resume"] == "allow"
    metrics.Log(cfg, World(rank=1, size=2), "the-id", 0, None).write(dict(iter=0, loss=2.5))
    assert len(calls) == 2 and len(read_metrics(tmp_path)) == 2  # other ranks log nothing


def test_tools_metrics_of_a_resumed_run_come_after_those_that_are_there(tmp, tmp_path):
    """Each row is there as soon as it is logged."""
    cfg = tiny(tmp, out_dir=str(tmp_path))
    metrics.Log(cfg, World(), "the-id", 0, None).write(dict(iter=0, loss=1.0))
    metrics.Log(cfg, World(), "the-id", 0, None).evaluation(1, dict(train=2.0, val=1000.0))
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows == [dict(run="the-id", iter=0, loss=1.0), dict(
        run="the-id", iter=1, train_loss=2.0, val_loss=1000.0, val_perplexity=math.exp(700))]
    with open(tmp_path / "metrics.jsonl", "a") as f:
        f.write('{"run": "the-')  # where a disk was full
    metrics.Log(cfg, World(), "the-id", 2, None).write(dict(iter=2, loss=3.0))
    *_, half, last = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert half == '{"run": "the-' and json.loads(last)["loss"] == 3.0


@pytest.mark.parametrize("name, peak", [
    ("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA H100 PCIe", 756e12), ("NVIDIA H100 NVL", 835e12),
    ("NVIDIA H200", 989e12), ("NVIDIA GH200 480GB", 989e12), ("NVIDIA B200", 2250e12),
    ("NVIDIA A100-SXM4-80GB", 312e12), ("NVIDIA A100 80GB PCIe", 312e12),
    ("NVIDIA L40", 181e12), ("NVIDIA L40S", 362e12), ("NVIDIA L4", 121e12),
    ("NVIDIA GeForce RTX 4090", 165e12), ("Tesla V100-SXM2-16GB", 125e12), ("Tesla T4", 65e12),
    ("NVIDIA RTX A1000", None), ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
    ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None), ("NVIDIA A100-SXM-64GB", None),
    ("NVIDIA L400", None), ("NVIDIA GeForce GTX 1050", None),
])
def test_tools_peak_flops_needs_the_exact_name(monkeypatch, name, peak):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert metrics.peak_flops(types.SimpleNamespace(type="cuda")) == peak
    assert metrics.peak_flops(torch.device("cpu")) is None


def test_tools_sample_leaves_cudnns_attention_out(tmp, tmp_path, monkeypatch):
    """It makes a plan for every length of the cache; flash is the first of the others. And each
    sample has random numbers of its own, autocast, and the tokenizer's real size."""
    seen, numbers = [], set()

    def generate(model, x, n, temperature, top_k, vocab_size, generator):
        numbers.add(torch.rand(1, generator=generator).item())
        assert x.tolist() == [[1]]  # an empty prompt is a line end
        seen.append((torch.backends.cuda.cudnn_sdp_enabled(), vocab_size,
                     torch.backends.cuda.flash_sdp_enabled(), torch.is_autocast_enabled("cpu")))
        return x

    out = os.path.join(tmp, "sampled-flash")
    make_data(str(tmp_path / "bytes"), vocab=256, tokenizer="bytes")
    launch(1, arguments(tmp, out, max_iters=1, eval_interval=1, dataset=tmp_path / "bytes"))
    monkeypatch.setattr(sample, "generate", generate)
    monkeypatch.setattr(sample, "tokenizer", lambda *meta: (lambda s: [1] * len(s), str, 60))
    sample.main([f"--out_dir={out}", "--num_samples=2", "--dtype=bfloat16", "--start="])
    assert seen == [(False, 60, True, True)] * 2 and len(numbers) == 2

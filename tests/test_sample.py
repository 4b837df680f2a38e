"""
sample.py: text from any checkpoint.

    python -m pytest -q tests/test_sample.py
"""

import math
import os
from dataclasses import asdict
from unittest.mock import patch

import pytest
import torch
from harness import refused
from test_contract_examples import FILES
from training import arguments, launch, make_data, plain_gpt, run_training

import sample


def test_sample_from_everything(tmp, models, capsys):
    """A sharded checkpoint of a model with keys of its own; a prompt from a flag, or a file."""
    (models / "smallest.py").write_text(FILES["smallest"])
    out = os.path.join(tmp, "sampled")
    make_data(str(models / "bytes"), vocab=256, tokenizer="bytes")
    own = dict(model="smallest", width=10)
    launch(2, arguments(tmp, out, max_iters=2, checkpoint="sharded", dataset=models / "bytes",
                        **own))
    args = [f"--out_dir={out}", "--num_samples=1", "--max_new_tokens=30", "--dtype=float32"]
    (models / "p.txt").write_text("import")
    os.rename(models / "bytes", models / "gone")  # the checkpoint knows its tokenizer
    said = []
    for start in ("import", f"FILE:{models}/p.txt"):
        sample.main([*args, f"--start={start}"])
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] and said[0].startswith("import")
    assert len(said[0]) > len("import\n---------------\n")


def saved_gpt(path, vocab_size, meta):
    """A checkpoint of a GPT whose data set is gone."""
    gpt = plain_gpt(vocab_size=vocab_size, n_embd=3)
    ckpt = dict(model=gpt.state_dict(), model_args=asdict(gpt.config), iter_num=1, meta=meta,
                best_val_loss=1.0, config={"dataset": "gone"})
    torch.save(ckpt, path / "ckpt.pt")


@pytest.mark.parametrize("vocab_size, meta, known", [
    (67, {}, False), (67, {"tokenizer": "own"}, False),
    (67, {"chars": ["b", "a"]}, True), (257, {"vocab_size": 257, "tokenizer": "bytes"}, True)])
def test_sample_needs_a_tokenizer_and_no_data(tmp_path, capsys, vocab_size, meta, known):
    """Without a prompt a text begins with a line end, or where there is none, with token 0."""
    saved_gpt(tmp_path, vocab_size, meta)
    argv = [f"--out_dir={tmp_path}", "--num_samples=1", "--max_new_tokens=3"]
    first = "\n" if "tokenizer" in meta else "b"
    if known:
        for start, begin in ((["--start=a"], "a"), ([], first), (["--start="], first)):
            sample.main([*argv, *start])
            assert capsys.readouterr().out.startswith(begin)
    else:
        line = refused(sample.main, argv)
        assert "gone" in line and f"vocab_size={vocab_size}" in line


def test_sample_cuts_a_long_prompt_at_its_beginning(tmp_path, capsys):
    """A context of 16 of 21 tokens: the text goes on behind the last ones, and a line says so."""
    gpt, prompt = plain_gpt(), torch.arange(21)[None] * 3
    whole, end = (sample.generate(gpt, idx, 12, temperature=0) for idx in (prompt, prompt[:, -16:]))
    assert torch.equal(whole[:, :21], prompt) and torch.equal(whole[:, 5:], end)
    saved_gpt(tmp_path, 67, {"chars": ["a", "b"]})
    for length, lines in ((16, 0), (21, 1)):
        sample.main([f"--out_dir={tmp_path}", "--max_new_tokens=1", f"--start={'a' * length}"])
        line = capsys.readouterr().err
        assert line.count("\n") == lines and ("21" in line and "16" in line) == (lines > 0)


@pytest.mark.parametrize("temperature, top_k, expected", [
    (0.5, None, [1 / 5, 4 / 5]), (1, 1, [0, 1]), (1, 0, [1 / 3, 2 / 3]), (1, -1, [1 / 3, 2 / 3])])
def test_sample_draws_by_temperature_and_top_k(temperature, top_k, expected):
    with patch.object(torch, "multinomial") as drawn:
        sample.draw(torch.tensor([[0.0, math.log(2.0)]]), temperature, top_k, None)  # odds 1 : 2
    assert drawn.call_args.args[0].tolist() == [pytest.approx(expected)]


def test_sample_leaves_cudnns_attention_out(tmp, monkeypatch):
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

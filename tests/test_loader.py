"""
data/loader.py and how it reads data/files.py: the order of windows, batches, formats, vocabularies.

    python -m pytest -q tests/test_loader.py

What makes the files is in test_prepare.py.
"""

import itertools
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from harness import refused
from training import tiny

from data import loader
from data.files import RECORD, header
from data.loader import TokenFiles
from data.tokenizer import tokenizer
from ranks import World


@pytest.mark.parametrize("n", [1, 2, 3, 10, 97, 1024])
def test_every_window_once_an_epoch(n):
    order = loader.train_order(n, 7, 0, 2 * n).tolist()
    first, second, other = order[:n], order[n:], loader.train_order(n, 8, 0, n).tolist()
    assert sorted(first) == sorted(other) == list(range(n))
    assert sorted(second) == list(range(n, 2 * n))
    second = [window - n for window in second]
    assert n < 10 or first != second and first != other  # reshuffled, and seeded


def test_order_is_random_enough():
    order = loader.train_order(5000, 1, 0, 5000)
    for other in (order[1:], np.arange(4999)):
        assert abs(np.corrcoef(order[:-1], other)[0, 1]) < 0.05


def test_each_epoch_cuts_the_text_elsewhere(tmp_path):
    """Or a model learns the windows of a small text by heart."""
    for i, n in enumerate((100, 17)):
        text = np.arange(1000 * i, 1000 * i + n, dtype=np.uint16)
        path = tmp_path / f"x_train_{i:06d}.bin"
        path.write_bytes(header(text.dtype, n) + text.tobytes())
    found = TokenFiles(tmp_path, "train", 16, 4000)
    begins = []
    for epoch in range(40):
        x, y = found.batch(range(7 * epoch, 7 * epoch + 7))
        begin = x[0, 0].item()
        begins.append(begin)
        assert (y == x + 1).all() and x[6, 0] == 1000  # the second text has only one place
        assert set(x[:6].flatten().tolist()) == set(range(begin, min(begin + 96, 99)))
    assert begins[:2] == [0, 9] and set(begins) == set(range(16))  # the golden section of 16 is 9.9


def batches_of(tmp, size, **keys):
    return [loader.open_batches(tiny(tmp, **keys), World(rank, size)) for rank in range(size)]


def test_a_prefetched_batch_is_the_one_that_follows_and_is_not_kept(tmp):
    part, plain = (batches_of(tmp, 2, gradient_accumulation_steps=4)[1] for _ in range(2))
    places = [(0, 0), (0, 1), (1, 0), (1, 1)]
    with patch.object(part, "read", side_effect=part.read) as read:
        for place in places:
            assert torch.equal(part.get(*place)[0], plain.get(*place)[0])
            assert not part.prefetched  # or its memory would be kept
            part.prefetch_next(*place)
    assert [call.args for call in read.call_args_list] == [*places, (2, 0)]  # each once
    # Another micro-batch than the prefetched one is read, too.
    assert torch.equal(part.get(7, 1)[0], plain.get(7, 1)[0])


@pytest.mark.parametrize("size, eval_iters", [(1, 5), (2, 5), (3, 5), (3, 100)])
def test_evaluation_visits_each_fixed_window_once_on_any_number_of_ranks(tmp, size, eval_iters):
    parts = batches_of(tmp, size, eval_iters=eval_iters)
    val = parts[0].files["val"]
    order = loader.eval_order(len(val), eval_iters * 2)
    assert len(order) == min(len(val), eval_iters * 2)
    seen = [list(part.fixed("val")) for part in parts]
    assert len({len(micro_batches) for micro_batches in seen}) == 1  # forwards are collectives
    rows = []
    for x, y, weight in itertools.chain(*zip(*seen)):
        assert x.shape == y.shape == (2, 16)  # whole, for compiled graphs
        assert (y >= 0).sum() == max(1, 16 * weight)  # the mean of nothing is NaN
        assert (y[max(1, int(weight)):] == -1).all()
        rows += x[:int(weight)].tolist()
    assert rows == val.batch(order)[0].tolist()


def test_an_evaluations_windows_are_evenly_spread():
    """To the end of the split, also where their number does not divide it."""
    assert loader.eval_order(10, 4).tolist() == [0, 2, 5, 7]
    assert loader.eval_order(7, 5).tolist() == [0, 1, 2, 4, 5]
    assert loader.eval_order(3, 5).tolist() == [0, 1, 2]


# ---------- files ---------------------------------------------------------------


def write_tokens(path, count):
    np.arange(count, dtype=np.uint16).tofile(path)


@pytest.mark.parametrize("magic, dtype", [(20240520, np.uint16), (20240801, np.uint32)])
def test_llmc_headers_and_shards(tmp_path, magic, dtype):
    data = tmp_path / "run[1]"  # a name, not a pattern
    data.mkdir()
    shards = [np.arange(200, 240, dtype=dtype) * 270, np.arange(35, dtype=dtype)]
    for i, tokens in enumerate(shards):
        head = np.zeros(256, dtype=np.int32)
        head[:3] = magic, 1, len(tokens)
        (data / f"fine_train_{i:03d}.bin").write_bytes(head.tobytes() + tokens.tobytes())
    windows = [shard[start:start + 16] for shard in shards for start in (0, 16)]
    glob = Path.glob
    with patch.object(Path, "glob", lambda *args: sorted(glob(*args))[::-1]):
        found = TokenFiles(str(data), "train", 16, 200000)  # whatever order the disk has
    assert len(found) == 4
    assert found.batch(range(4))[0].tolist() == np.stack(windows).tolist()
    with open(data / "fine_train_001.bin", "ab") as f:
        f.write(b"xx")  # more than its header says
    assert "fine_train_001.bin" in refused(TokenFiles, str(data), "train", 16, 200000)


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_a_file_of_another_type_is_refused(tmp_path, dtype):
    """Read as uint16 it would have only ids of the vocabulary."""
    tokens = np.random.default_rng(0).integers(65, size=5000)
    tokens.astype(dtype).tofile(tmp_path / "train.bin")
    assert "write uint16" in refused(TokenFiles, tmp_path, "train", 16, 65)


def test_a_window_needs_one_token_more_than_its_length(tmp_path):
    """Of exactly n x block_size tokens the last window has no last target; one more is enough."""
    for count, windows in ((17, 1), (32, 1), (33, 2), (48, 2), (49, 3)):
        write_tokens(tmp_path / "train.bin", count)
        found = TokenFiles(tmp_path, "train", 16, 99)
        assert len(found) == windows
        x, y = found.batch([windows - 1])
        assert x[0].tolist() == [*range(16 * windows - 16, 16 * windows)]
        assert y[0].tolist() == [*range(16 * windows - 15, 16 * windows + 1)]


def test_shards_are_those_of_one_whole_data_set(tmp_path):
    def first_tokens(split="train"):
        found = TokenFiles(tmp_path, split, 16, 9999)
        return [int(tokens[0]) for tokens in found.files]

    # and what a killed prepare.py leaves
    for file in ("my_train_001.bin", "my_val_001.bin", "other_train_1.bin.tmp"):
        write_tokens(tmp_path / file, 33)
    assert first_tokens("train") == first_tokens("val") == [0]
    (tmp_path / RECORD).write_text('{"finished": false}')
    assert "start it again" in refused(first_tokens)
    (tmp_path / RECORD).write_text('{"finished": true, "tokens": {"train": 34}}')
    assert "33 of 34 tokens" in refused(first_tokens)  # a copy that lacks a shard
    for name in ("other_train_001.bin", "train.bin"):
        write_tokens(tmp_path / name, 33)
        assert "several data sets" in refused(first_tokens)
        (tmp_path / name).unlink()


def test_a_data_set_is_the_one_directory_with_tokens(tmp_path, monkeypatch):
    """Raw text in a directory of that name hides no data set. Two data sets are ambiguous."""
    here, below = tmp_path / "here", tmp_path / "data"
    for path in (here / "mine", below / "mine"):
        path.mkdir(parents=True)
    monkeypatch.chdir(here)
    monkeypatch.setattr(loader, "HERE", below)
    write_tokens(below / "mine/my_train_000001.bin", 33)
    assert loader.data_dir("mine") == below / "mine"
    write_tokens(here / "mine/train.bin", 33)
    line = refused(loader.data_dir, "mine")
    assert f"{here}/mine" in line and f"{below}/mine" in line
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in (here / "mine", "~/here/mine"):
        assert loader.data_dir(name) == here / "mine"
    monkeypatch.chdir(below)  # both are the same
    assert loader.data_dir("mine").samefile(below / "mine")


def test_meta_pkl_is_refused(tmp_path):
    """A pickle could run code."""
    (tmp_path / "meta.pkl").touch()
    assert "make it a meta.json" in refused(loader.read_meta, tmp_path)


def test_tokenizers_decode_what_they_encode():
    text = "caf\u00e9"
    characters = {"vocab_size": 4, "chars": sorted(text)}
    for meta in (characters, {"vocab_size": 257, "tokenizer": "bytes"}):
        encode, decode, vocab_size = tokenizer(meta)
        assert decode(encode(text)) == text
        assert vocab_size == meta["vocab_size"] and max(encode(text)) < vocab_size
    assert decode([*encode("a"), 256, *encode("b")]) == "ab"
    assert "'xz'" in refused(tokenizer({"chars": ["a"]})[0], "zax")

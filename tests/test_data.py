"""
Data: the order of windows, formats and vocabularies (loader.py), and any text (prepare.py).

    python -m pytest -q tests/test_data.py

What all of these commands refuse is in test_mistakes.py.
"""

import csv
import errno
import glob as glob_module
import gzip
import hashlib
import itertools
import json
import multiprocessing
import os
import pickle
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
import weakref
from contextlib import ExitStack
from glob import glob
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from harness import (
    HERE,
    children,
    flags,
    refused,
    run_training,
    script,
    tiny,
)

from data import files, loader
from data import prepare as prepare_py
from data.files import RECORD, header, shard_name, write_files
from data.loader import TokenFiles
from data.shakespeare_char import prepare as shakespeare_char
from data.tokenizer import encoder, gpt2_bpe, tokenizer
from ranks import World

OFFLINE = {"HF_HUB_OFFLINE": "1"}
os.environ.update(OFFLINE)  # before `datasets` is imported, which looks once
DATASETS = sorted(map(os.path.dirname, glob("*/prepare.py", root_dir=os.path.join(HERE, "data"))))


def tokens_of(path):
    return np.fromfile(path, dtype=np.uint16).tolist()


@pytest.mark.parametrize("n", [1, 2, 3, 10, 97, 1024])
def test_every_window_once_an_epoch(n):
    order = loader.train_order(n, 7, 0, 2 * n).tolist()
    first, second, other = order[:n], order[n:], loader.train_order(n, 8, 0, n).tolist()
    assert sorted(first) == sorted(other) == list(range(n))
    assert sorted(second) == list(range(n, 2 * n))
    second = [window - n for window in second]
    assert n < 10 or first != second and first != other  # reshuffled, and seeded


def test_each_epoch_cuts_the_text_elsewhere_unless_it_is_padded(tmp_path):
    """Or a model learns the windows of a small text by heart."""
    for i, n in enumerate((100, 17)):
        text = np.arange(1000 * i, 1000 * i + n, dtype=np.uint16)
        path = tmp_path / shard_name("x", "train", i)
        path.write_bytes(header(text.dtype, n) + text.tobytes())
    files = TokenFiles(tmp_path, "train", 16, 4000)
    begins = []
    for epoch in range(40):
        x, y = files.batch(range(7 * epoch, 7 * epoch + 7))
        begin = x[0, 0].item()
        begins.append(begin)
        assert (y == x + 1).all() and x[6, 0] == 1000  # the second text has only one place
        assert set(x[:6].flatten().tolist()) == set(range(begin, min(begin + 96, 99)))
    assert begins[:2] == [0, 9] and set(begins) == set(range(16))  # the golden section of 16 is 9.9
    (tmp_path / "meta.json").write_text('{"window": 16}')
    padded = TokenFiles(tmp_path, "train", 16, 4000)
    assert [padded.batch([7 * epoch])[0][0, 0].item() for epoch in range(40)] == 40 * [0]


def test_order_is_random_enough_and_stays_for_runs_that_resume_with_newer_code():
    order = loader.train_order(5000, 1, 0, 5000)
    for other in (order[1:], np.arange(4999)):
        assert abs(np.corrcoef(order[:-1], other)[0, 1]) < 0.05
    assert loader.train_order(97, 7, 95, 5).tolist() == [92, 17, 97 + 71, 97 + 28, 97 + 12]


def batches_of(tmp, size, **keys):
    return [loader.Batches(tiny(tmp, **keys), World(rank, size)) for rank in range(size)]


@pytest.mark.parametrize("size, batch_size", [(1, 2), (2, 2), (3, 4), (4, 1)])
def test_batch_independent_of_world_size(tmp, size, batch_size):
    """The union of all ranks' micro-batches of a step: the same, in order, however split."""
    keys = dict(batch_size=batch_size, gradient_accumulation_steps=24 // batch_size)
    parts, found = batches_of(tmp, size, **keys), []
    for micro in range(24 // batch_size // size):
        found += [part.get(3, micro)[0] for part in parts]
    whole, = batches_of(tmp, 1, batch_size=24, gradient_accumulation_steps=1)
    assert torch.equal(torch.cat(found), whole.get(3, 0)[0])


def test_a_prefetched_batch_is_the_one_that_follows_and_is_not_kept(tmp):
    part, plain = (batches_of(tmp, 2, gradient_accumulation_steps=4)[1] for _ in range(2))
    for step, micro in itertools.product(range(2), range(2)):
        with patch.object(part, "read", side_effect=part.read) as read:
            x, y, weight = part.get(step, micro)
            part.prefetch_next(step, micro)
        # Only the first one is read when it is asked for; the others have been prefetched.
        places = [call.args for call in read.call_args_list]
        following = (step, 1) if micro == 0 else (step + 1, 0)
        assert places == [(0, 0), following][(step, micro) != (0, 0):]
        expected = plain.get(step, micro)
        assert torch.equal(x, expected[0]) and torch.equal(y, expected[1])
        assert weight == expected[2]
        x_again = part.get(*following)[0]
        kept = weakref.ref(x_again)
        del x_again
        assert kept() is None
        part.prefetch_next(step, micro)
    # Another micro-batch than the prefetched one is read, too.
    assert torch.equal(part.get(7, 1)[0], plain.get(7, 1)[0])


@pytest.mark.parametrize("size, eval_iters", [(1, 5), (2, 5), (3, 5), (4, 5), (3, 100)])
def test_evaluation_visits_each_fixed_window_once_on_any_number_of_ranks(tmp, size, eval_iters):
    parts = batches_of(tmp, size, eval_iters=eval_iters)
    files = parts[0].files["val"]
    order = loader.eval_order(len(files), eval_iters * 2)
    assert len(order) == min(len(files), eval_iters * 2)
    seen = [list(part.fixed("val")) for part in parts]
    assert len({len(micro_batches) for micro_batches in seen}) == 1  # forwards are collectives
    rows = []
    for x, y, weight in itertools.chain(*zip(*seen)):
        assert x.shape == y.shape == (2, 16)  # whole, for compiled graphs
        assert (y >= 0).sum() == max(1, 16 * weight)  # the mean of nothing is NaN
        assert (y[max(1, int(weight)):] == -1).all()
        rows += x[:int(weight)].tolist()
    assert rows == files.batch(order)[0].tolist()


class Counting(TokenFiles):
    """What docs/fork.md asks of data that is no files: here the numbers from w on."""

    def __init__(self, directory, split, block_size, vocab_size):
        self.block_size = block_size
        self.tokens_in_all = 500 * block_size
        self.largest = vocab_size - 1

    def __len__(self):
        return 500

    def batch(self, windows):
        x = torch.as_tensor(windows)[:, None] + torch.arange(self.block_size)
        return x % 67, (x + 1) % 67


def test_data_that_is_no_files_trains_as_readme_says(tmp, monkeypatch, capsys):
    monkeypatch.setattr(loader, "TokenFiles", Counting)
    rows = run_training(tmp, "counting", max_iters=12, learning_rate=1e-2, min_lr=1e-2)
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.3
    assert "toy: 8,000 tokens of train" in capsys.readouterr().out


class Masking(Counting):
    """Leaves out the first w % 5 targets of window w, and says so."""

    masks = True

    def __init__(self, *args):
        super().__init__(*args)
        self.counts = self.block_size - np.arange(500) % 5

    def batch(self, windows):
        x, y = super().batch(windows)
        for row, w in zip(y, windows):
            row[:int(w) % 5] = -1
        return x, y


class Unsaid(Masking):
    masks = ()


class Miscounting(Masking):
    def __init__(self, *args):
        super().__init__(*args)
        self.counts = 0 * self.counts + self.block_size


class Floats(Counting):
    def batch(self, windows):
        x, y = super().batch(windows)
        return x + 0.5, y


class FloatTargets(Counting):
    def batch(self, windows):
        x, y = super().batch(windows)
        return x, y + 0.5


def test_targets_that_a_class_of_ones_own_leaves_out_count_as_it_says(tmp, monkeypatch, capsys):
    """The weights make a step's loss the mean over those that are left."""
    monkeypatch.setattr(loader, "TokenFiles", Masking)
    parts = batches_of(tmp, 2, gradient_accumulation_steps=4)
    found = [part.get(3, micro) for part in parts for micro in range(2)]
    counts = [(y != -1).sum().item() for _, y, _ in found]
    assert len({*counts}) > 1
    assert [weight for _, _, weight in found] == [4 * count / sum(counts) for count in counts]
    rows = run_training(tmp, "masking", max_iters=12, learning_rate=1e-2, min_lr=1e-2)
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.3 and abs(rows[0]["loss"] - np.log(67)) < 0.1
    assert "% of the targets count" in capsys.readouterr().out


@pytest.mark.parametrize("kind", [Unsaid, Miscounting, Floats, FloatTargets])
def test_a_class_of_ones_own_that_would_train_on_something_else_is_refused(tmp, monkeypatch, kind):
    """Its loss would be divided by targets that are not there, or ids would lose a fraction."""
    monkeypatch.setattr(loader, "TokenFiles", kind)
    part, = batches_of(tmp, 1)
    line = refused(lambda: [part.get(step, 0) for step in range(9)])
    assert kind.__name__ in line and "int64" in line and "docs/fork.md" in line


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
    files = TokenFiles(str(data), "train", 16, 200000)
    assert len(files) == 4
    assert files.batch(range(4))[0].tolist() == np.stack(windows).tolist()
    with open(data / "fine_train_001.bin", "ab") as f:
        f.write(b"xx")  # more than its header says
    line = refused(TokenFiles, str(data), "train", 16, 200000)
    assert "fine_train_001.bin" in line and "prepare it again" in line


@pytest.mark.parametrize("dtype", ["int32", "uint32", "int64", "uint64", "float32", "float64"])
@pytest.mark.parametrize("vocab_size, given", [(65, 65), (65, 50304), (50304, 50304),
                                               (128256, 128256)])
def test_a_file_of_another_type_is_named_and_refused(tmp_path, dtype, vocab_size, given):
    """Read as uint16 some have only ids of the vocabulary, at least in the windows of a start."""
    tokens = np.random.default_rng(0).integers(vocab_size, size=5000)
    tokens[:150] = 0
    tokens.astype(dtype).tofile(tmp_path / "train.bin")
    line = refused(TokenFiles, tmp_path, "train", 16, given)
    assert f"it looks like {dtype.removeprefix('u')}" in line and "np.uint16" in line
    head = np.zeros(256, np.int32)
    head[:3] = 20240801, 7, len(tokens)
    with open(tmp_path / "train.bin", "wb") as f:
        f.write(head.tobytes() + tokens.astype(np.uint32).tobytes())
    assert len(TokenFiles(tmp_path, "train", 16, given)) == 312


@pytest.mark.parametrize("tokens", [
    np.zeros(5000), np.arange(5000) % 2, 1 - np.arange(5000) % 2, np.arange(5000) % 3,
    np.arange(5000) < 1, np.where(np.arange(5000) < 4000, 0, np.arange(5000) % 2 * 5),
    np.random.default_rng(0).integers(2, size=5000),
    np.where(np.arange(5000) % 100, 0, np.arange(5000) // 5),
    np.random.default_rng(0).integers(5, size=5000) ** 5 * (np.arange(5000) % 5 == 0)])
def test_odd_data_of_uint16_is_taken(tmp_path, tokens):
    """Of zeros, with a zero as every second token, of few different ones."""
    tokens.astype(np.uint16).tofile(tmp_path / "train.bin")
    for vocab_size in (1025, 50304):
        assert len(TokenFiles(tmp_path, "train", 16, vocab_size)) == 312


def write_tokens(path, count):
    np.arange(count, dtype=np.uint16).tofile(path)


def test_a_window_needs_one_token_more_than_its_length(tmp_path):
    """Of exactly n x block_size tokens the last window has no last target; one more is enough."""
    for count, windows in ((17, 1), (32, 1), (33, 2), (48, 2), (49, 3)):
        write_tokens(tmp_path / "train.bin", count)
        files = TokenFiles(tmp_path, "train", 16, 99)
        assert len(files) == windows
        x, y = files.batch([windows - 1])
        assert x[0].tolist() == [*range(16 * windows - 16, 16 * windows)]
        assert y[0].tolist() == [*range(16 * windows - 15, 16 * windows + 1)]
    write_tokens(tmp_path / "train.bin", 16)
    assert "needs 17" in refused(TokenFiles, tmp_path, "train", 16, 99)


def test_shards_are_those_of_one_whole_data_set(tmp_path):
    def first_tokens(split="train"):
        files = TokenFiles(tmp_path, split, 16, 9999)
        return [int(tokens[0]) for tokens in files.files]

    # a name with "_train_" in it, and what a killed prepare.py leaves
    for file in ("my_train_2_train_001.bin", "my_train_2_val_001.bin", "other_train_1.bin.tmp"):
        write_tokens(tmp_path / file, 33)
    assert first_tokens("train") == first_tokens("val") == [0]
    for other in ("train.bin", "fine_train_000001.bin"):
        write_tokens(tmp_path / other, 33)
        line = refused(first_tokens)
        assert other in line and "my_train_2_train_001.bin" in line
        assert first_tokens("val") == [0]
        os.remove(tmp_path / other)
    (tmp_path / RECORD).write_text('{"finished": false}')
    assert "start it again" in refused(first_tokens)


def test_a_directory_of_raw_text_hides_no_data_set(tmp_path, monkeypatch):
    """Of two directories of that name the one with tokens is meant; of two with tokens, neither."""
    here, below = tmp_path / "here", tmp_path / "data"
    for path in (here / "mine", below / "mine"):
        path.mkdir(parents=True)
    monkeypatch.chdir(here)
    monkeypatch.setattr(loader, "HERE", below)
    write_tokens(here / "mine/raw.txt", 33)
    assert loader.data_dir("mine") == Path("mine")  # neither has any
    write_tokens(below / "mine/my_train_000001.bin", 33)
    for name in ("mine", "./mine"):
        assert loader.data_dir(name) == below / "mine"
    assert loader.data_dir(str(here / "mine")) == here / "mine"  # a whole path is clear
    write_tokens(here / "mine/train.bin", 33)
    line = refused(loader.data_dir, "mine")
    assert "dataset=mine" in line and str(here / "mine") in line and str(below / "mine") in line
    for path in (here / "mine", below / "mine"):
        assert loader.data_dir(str(path)) == path
    os.remove(below / "mine/my_train_000001.bin")
    assert loader.data_dir("mine") == Path("mine")
    for name in ("", "none"):
        assert loader.data_dir(name) == below / name
    monkeypatch.setenv("HOME", str(tmp_path))
    assert loader.data_dir("~/here/mine") == here / "mine"
    monkeypatch.chdir(below)  # both are the same
    write_tokens(below / "mine/train.bin", 33)
    assert loader.data_dir("mine").samefile(below / "mine")


def test_shards_follow_each_other_by_name_in_whatever_order_the_disk_has_them(
        tmp_path, monkeypatch):
    for number in (1, 2, 10):
        tokens = np.full(33, number, np.uint16)
        tokens.tofile(tmp_path / shard_name("x", "train", number))
    listed = sorted(os.listdir(tmp_path))
    for names in itertools.permutations(listed):
        monkeypatch.setattr(glob_module, "glob", lambda *_, names=names, **__: [*names])
        files = TokenFiles(tmp_path, "train", 16, 99)
        assert files.batch(range(6))[0][:, 0].tolist() == [1, 1, 2, 2, 10, 10]


def test_an_evaluations_windows_are_evenly_spread():
    """To the end of the split, also where their number does not divide it."""
    assert loader.eval_order(10, 4).tolist() == [0, 2, 5, 7]
    assert loader.eval_order(7, 5).tolist() == [0, 1, 2, 4, 5]
    assert loader.eval_order(3, 5).tolist() == [0, 1, 2]


def test_meta_pkl_is_nanogpts_and_runs_no_code(tmp_path):
    meta = {"vocab_size": 2, "itos": {1: "b", 0: "a"}, "stoi": {"a": 0, "b": 1}}
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(meta))
    assert loader.read_meta(tmp_path) == {"vocab_size": 2, "chars": ["a", "b"]}
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps({**meta, "x": os.system}))
    assert "meta.pkl: " in refused(loader.read_meta, tmp_path)


def test_tokenizers_decode_what_they_encode():
    text = "caf\u00e9"
    characters = {"vocab_size": 4, "chars": sorted(text)}
    for meta in (characters, {"vocab_size": 257, "tokenizer": "bytes"}):
        encode, decode, vocab_size = tokenizer(meta)
        assert decode(encode(text)) == text
        assert vocab_size == meta["vocab_size"] and max(encode(text)) < vocab_size
    assert decode([*encode("a"), 256, *encode("b")]) == "ab"
    assert "'xz'" in refused(tokenizer({"chars": ["a"]})[0], "zax")


@pytest.mark.parametrize("name", ["", *DATASETS])
def test_every_prepare_runs_and_has_help(name):
    path = os.path.join("data", name, "prepare.py")
    p = script(path, "--help")
    assert p.returncode == 0 and f"python {path}" in p.stdout


def test_stdlib_is_reproducible(tmp_path):
    both = []
    for out in (tmp_path / "a", tmp_path / "b"):
        assert script("data/python_stdlib/prepare.py", f"--out={out}").returncode == 0
        assert loader.read_meta(out) == {"vocab_size": 256, "tokenizer": "bytes"}
        both.append([bytes(tokens_of(out / f"{split}.bin")) for split in ("train", "val")])
    assert both[0] == both[1]
    train, val = both[0]
    assert b"def " in train and b"def " in val


def test_shakespeare_holds_out_the_last_tenth(tmp_path, monkeypatch):
    text = "To be or n\u00f6t" * 50
    (tmp_path / "input.txt").write_text(text)
    monkeypatch.setattr(shakespeare_char, "SHA256", hashlib.sha256(text.encode()).hexdigest())
    argv = [f"--input={tmp_path / 'input.txt'}", f"--out={tmp_path / 'out'}"]
    monkeypatch.setattr(sys, "argv", ["prepare.py", *argv])
    shakespeare_char.main()
    _, decode, _ = tokenizer(loader.read_meta(tmp_path / "out"))
    parts = [decode(tokens_of(tmp_path / f"out/{split}.bin")) for split in ("train", "val")]
    assert parts == [text[:540], text[540:]]


@pytest.mark.parametrize("cores", [1, 3])
def test_prepare_takes_the_cores_that_it_may_use(monkeypatch, cores):
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(cores))
    assert f"one per core, here {cores})" in script("data/prepare.py", "--help").stdout


def documents(n=300):
    rng = random.Random(0)
    words = ["alpha", "beta", "gamma", "d\u00e9lta"]
    return [f"document {i}: " + " ".join(rng.choice(words) for _ in range(40)) for i in range(n)]


ARGS = SimpleNamespace(tokenizer="bytes", template=None, column="text")
JOB = prepare_py.Job(ARGS, encoder("bytes"))


def prepare(sources, out, command=("data/prepare.py", "x"), tokenizer="bytes", **options):
    return script(*command, *sources, *flags(out=out, tokenizer=tokenizer, **options), **OFFLINE)


def prepared(sources, out, **options):
    """The tokens of train and val."""
    shutil.rmtree(out, ignore_errors=True)
    p = prepare(sources, out, **options)
    assert p.returncode == 0, p.stderr
    return [tokens_of(out / f"{split}.bin") for split in ("train", "val")]


def split_documents(tokens):
    """The documents, as bytes, of tokens with 256 after each; UTF-8 has no byte 255."""
    return np.minimum(tokens, 255).astype(np.uint8).tobytes().split(b"\xff")[:-1]


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_prepare_splits_by_text_in_any_format_order_and_number_of_workers(tmp_path):
    Dataset = pytest.importorskip("datasets").Dataset
    docs = documents()
    data = Dataset.from_dict({"text": docs, "n": list(range(300))})
    data.to_json(tmp_path / "a.jsonl")
    data.to_parquet(tmp_path / "a.parquet")
    data.to_csv(tmp_path / "a.csv")
    Dataset.from_dict({"text": docs[::-1]}).to_json(tmp_path / "reversed.jsonl")

    def parts_of(name, **options):
        parts = prepared([tmp_path / name], tmp_path / "out", val_fraction=0.2, **options)
        return [split_documents(part) for part in parts]

    train, val = parts_of("a.jsonl", workers=1)
    assert sorted(train + val) == sorted(d.encode() for d in docs)  # once, in one split
    assert 0.1 < len(val) / len(docs) < 0.3
    assert parts_of("a.parquet", workers=2) == parts_of("a.csv") == [train, val]
    assert parts_of("reversed.jsonl") == [train[::-1], val[::-1]]
    for part, limited in zip((train, val), parts_of("a.jsonl", limit=200)):
        assert 0 < len(limited) < len(part) and part[:len(limited)] == limited


def test_prepare_splits_as_it_did_in_earlier_processes_and_versions():
    """By SHA-256, not by Python's hash, which each process seeds anew."""
    docs = [f"document {i}" for i in range(20)]
    chunk, = prepare_py.chunks([(0.3, docs)], JOB.key)
    _, val, _ = prepare_py.encode(chunk, JOB)
    numbers = [int(text.split()[1]) for text in split_documents(np.frombuffer(val, np.uint16))]
    assert numbers == [5, 6, 9, 11, 12, 14]


def test_a_document_ends_once():
    """Some tokenizers put the end there themselves; an empty text has it too."""
    for ids in ([1, 256], [1], [], [256, 1]):
        own = encoder("bytes")._replace(encode=lambda text, ids=ids: ids)
        assert JOB.encode("x", own).tolist() == [*ids, *[256] * (ids[-1:] != [256])]


@pytest.mark.parametrize("n, options", [
    (1, {}), (2, dict(val_fraction=0.5)), (100, {}),
    (100, dict(val_fraction=0.05))])  # the hash holds out five: some, but fewer than 10,000 tokens
def test_prepare_cuts_few_documents_in_two(tmp_path, n, options):
    """A text file is one document. Of few of them val.bin has the end of the tokens."""
    docs = [f"{text}\n\nsecond paragraph".encode() for text in documents(n)]
    for i, text in enumerate(docs):
        (tmp_path / f"{i:03d}.txt").write_bytes(text)
    train, val = prepared(sorted(tmp_path.glob("*.txt")), tmp_path / "o", **options)
    found = split_documents(train + val)
    assert sorted(found) == sorted(docs)
    assert options or found == docs  # else what the hash held out is last
    assert len(val) == pytest.approx(options.get("val_fraction", 0.1) * len(train + val), abs=1)


def test_prepare_takes_names_columns_and_templates(tmp_path):
    """Names of files are no patterns; 0 is text, and null is none."""
    rows = [{"n": 0, "my text": None}, {"n": 12, "my text": "{n}"}]
    path = write_jsonl(tmp_path / "a[1].jsonl", rows)
    write_jsonl(tmp_path / "a1.jsonl", [])  # what it would name as a pattern
    same = write_jsonl(tmp_path / "same.ndjson", rows)
    assert split_documents(np.concatenate(prepared([same], tmp_path / "o", column="n"))) == [
        b"0", b"12"]
    for options, expected in ((dict(template=r"{n}|\n{my text}"), [b"0|\n", b"12|\n{n}"]),
                              (dict(column="n"), [b"0", b"12"])):
        train, val = prepared([path], tmp_path / "o", **options)
        assert sorted(split_documents(train + val)) == expected


def test_prepare_takes_files_as_other_programs_write_them(tmp_path):
    """A byte order mark and CRLF; an empty field is null, and "NA" is text; rows without text
    are counted."""
    table = "\ufefftext,n\r\nNA,1\r\n\"None; \"\"a\"\"\r\nb\",\r\n,2\r\n"
    lines = ['{"text": "a"}', '{"body": "no text"}', '{"text": ""}', '{"text": "b\\r\\n"}',
             '{"text": null}']
    files = {"a.txt": "\ufeffone\r\ntwo\rthree\n", "a.csv": table,
             "A.TSV": table.replace(",", "\t"), "a.jsonl": "\ufeff" + "\r\n".join(lines)}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content.encode())
    expected = [b"one\ntwo\nthree\n", b"NA", b'None; "a"\r\nb', b"NA", b'None; "a"\r\nb',
                b"a", b"b\r\n"]
    for limit, empty in ((99, 5), (7, 4)):
        out = tmp_path / f"o{limit}"
        p = prepare([tmp_path / name for name in files], out, limit=limit, workers=1)
        assert p.returncode == 0 and f"left out: {empty}\n" in p.stdout, p.stderr + p.stdout
        tokens = tokens_of(out / "train.bin") + tokens_of(out / "val.bin")
        assert split_documents(tokens) == expected
    p = prepare([tmp_path / "a.txt"], tmp_path / "o", workers=1)
    assert p.returncode == 0 and "left out" not in p.stdout


BESIDE = os.path.abspath(os.path.join(HERE, "..", "shared"))  # has what needs a network


def gpt2_or_skip(monkeypatch):
    if os.path.isdir(os.path.join(BESIDE, "tiktoken")):
        monkeypatch.setenv("TIKTOKEN_CACHE_DIR", os.path.join(BESIDE, "tiktoken"))
    try:
        return gpt2_bpe()
    except SystemExit as e:
        pytest.skip(e.code)


def test_prepare_with_gpt2s_tokenizer(tmp_path, monkeypatch):
    encode = gpt2_or_skip(monkeypatch).encode_ordinary
    text = "the quick <|endoftext|> fox"  # what looks like a special token in a text is text
    (tmp_path / "a.txt").write_text(text)
    train, val = prepared([tmp_path / "a.txt"], tmp_path / "o", tokenizer="gpt2")
    assert train + val == [*encode(text), 50256]
    assert loader.read_meta(tmp_path / "o") == {"vocab_size": 50304, "tokenizer": "gpt2"}
    text = os.path.join(BESIDE, "data", "tinyshakespeare.txt")
    if os.path.exists(text):
        p = script("data/shakespeare/prepare.py", f"--input={text}", f"--out={tmp_path}")
        assert "301,966" in p.stdout and "36,059" in p.stdout  # nanoGPT's numbers


def files_left(out):
    return os.listdir(out) if out.exists() else []


@pytest.mark.parametrize("path", ["data/python_stdlib/prepare.py", "data/prepare.py"])
def test_prepare_on_a_full_disk_is_one_clear_line(tmp_path, path):
    (tmp_path / "a.txt").write_text("abc " * 20_000)
    argv = [] if "stdlib" in path else ["x", tmp_path / "a.txt", "--tokenizer=bytes"]
    out = tmp_path / "o"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        p = script(path, *argv, f"--out={out}")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert p.returncode == 1 and f"cannot write {out}: " in p.stderr and "--out" in p.stderr
    assert p.stderr.count("\n") == 1
    assert files_left(out) == ([] if "stdlib" in path else [RECORD])  # which says whose it is
    assert script(path, *argv, f"--out={out}").returncode == 0
    files = {name for name in os.listdir(out) if name != RECORD}
    assert files == {"meta.json", "train.bin", "val.bin"}


def test_prepare_sends_a_million_characters_at_a_time_and_keeps_their_order():
    """Short documents go to a worker together, and long ones do not pile up in memory."""
    for lengths, expected in (([3 << 20, 9, 8], [1, 2]), ([1 << 18] * 9, [4, 4, 1])):
        docs = ["x" * n for n in lengths]
        found = [(len(chunk.documents), chunk.rows)
                 for chunk in prepare_py.chunks([(0.5, docs)], JOB.key) if chunk.documents]
        assert found == list(zip(expected, itertools.accumulate(expected)))
    read = []
    docs = (read.append(letter) or letter * (1 << 20) for letter in "abcdefgh")
    found = []
    chunks = prepare_py.chunks([(0.5, docs)], JOB.key)
    for chunk, (*parts, _) in prepare_py.tokenize(chunks, 1, JOB):
        tokens = [np.frombuffer(part, np.uint16) for part in parts]
        found += [doc[:1].decode() for doc in split_documents(np.concatenate(tokens))]
        assert len(read) < chunk.rows + 5  # for one worker 4 wait
    assert found == list("abcdefgh")


def test_prepare_leaves_nothing_after_a_mistake_and_replaces_nothing(tmp_path, monkeypatch):
    text, bad, out = tmp_path / "a.txt", tmp_path / "bad.txt", tmp_path / "o"
    text.write_text("some text")
    bad.write_bytes(b"\xff")
    assert prepare([text, bad], out).returncode == 1 and not out.exists()
    prepared([text], out)
    before = files_of(out)
    assert prepare([text], out).returncode == 0  # with the same arguments it is done already
    stdlib = script("data/python_stdlib/prepare.py", f"--out={out}")
    others = [stdlib, prepare([text], out, val_fraction=0.2)]
    record = json.loads(before[RECORD])
    earlier = {key: record[key] for key in ("arguments", "tokens")}  # of an earlier version
    (out / RECORD).write_text(json.dumps(earlier))
    assert "prepared already" in prepare([text], out).stdout
    (out / RECORD).write_bytes(before[RECORD])
    (tmp_path / "there").mkdir()
    for directory in (tmp_path, tmp_path / "there"):  # a.txt there is another file
        monkeypatch.chdir(directory)
        (directory / "a.txt").touch()
        os.utime(directory / "a.txt", (1e9, 1e9))
        others.append(prepare(["a.txt"], out))
    assert others.pop(-2).returncode == 0
    date = os.stat(text).st_mtime
    for content, now in (("same size", 1e9), ("same size", 2e9), ("longer text", date)):
        text.write_text(content)
        os.utime(text, (now, now))
        others.append(prepare([text], out))
        assert "the documents are not those" in others[-1].stderr
    text.write_text("some text")
    for now in (1e9, 2e9):  # only touched
        os.utime(text, (now, now))
        assert "prepared already" in prepare([text], out).stdout
    for p in others:
        assert p.returncode == 1 and f"{out}: " in p.stderr and "--out" in p.stderr
        assert p.stderr.count("\n") == 1 and files_of(out) == before


@pytest.mark.parametrize("command", [
    ["data/prepare.py", "x", "~/a.txt", "--tokenizer=bytes"],
    ["data/shakespeare_char/prepare.py", "--input=~/a.txt"], ["data/python_stdlib/prepare.py"]])
def test_a_path_may_begin_with_the_home_directory(tmp_path, monkeypatch, command):
    """A shell leaves the ~ in --out=~/x; a directory of that name was made."""
    monkeypatch.chdir(tmp_path)
    home = tmp_path / "home"
    home.mkdir()
    text = os.path.join(BESIDE, "data", "tinyshakespeare.txt")
    (home / "a.txt").write_text("abc " * 9)
    if "shakespeare" in command[0]:
        if not os.path.exists(text):
            pytest.skip("no copy of tiny Shakespeare")
        shutil.copy(text, home / "a.txt")
    p = script(*command, "--out=~/o", HOME=str(home))
    assert p.returncode == 0, p.stderr
    assert (home / "o/train.bin").exists() and os.listdir(tmp_path) == ["home"]
    again = script(*command, f"--out={home}/o", HOME=str(home))
    assert again.returncode == 0, again.stderr


def test_a_copy_that_lacks_a_shard_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_py, "CHUNK", 50)
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "some text " * 5}] * 4)
    argv = ["x", path, "--tokenizer=bytes", "--shard_tokens=50", f"--out={tmp_path}/o"]
    run_prepare(argv)
    assert len(TokenFiles(tmp_path / "o", "train", 10, 257).files) == 4
    os.remove(tmp_path / "o/x_train_000002.bin")
    line = refused(TokenFiles, tmp_path / "o", "train", 10, 257)
    assert "148 of 199 tokens" in line and RECORD in line
    assert len(TokenFiles(tmp_path / "o", "val", 1, 257).files) == 1
    assert "148 of 199 tokens" in refused(run_prepare, argv)


def files_of(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize("size", [2, 4])
def test_prepare_writes_shards_as_llmc_does(tmp_path, monkeypatch, size):
    """A shard ends with the chunk with which train or val is full; none is empty; another read
    of the header."""
    monkeypatch.setattr(prepare_py, "MANY", 1)
    job = prepare_py.Job(ARGS, encoder("bytes")._replace(vocab_size=30_000 * size))
    arguments = dict(name="some/x", shard_tokens=4, source=[])
    shards = prepare_py.Shards(tmp_path, arguments, job, 0.1)
    first = 0
    for counts in ((1, 1), (1, 2), (1, 6), (5, 0), (0, 1), (1, 1)):  # of train, of val
        parts = [np.arange(first, first + count, dtype=job.dtype).tobytes() for count in counts]
        first += 10
        shards.add(prepare_py.Chunk([], 0.5, rows=first, empty=0, crc=first), parts)
    shards.finish({})
    magic = {2: (20240520, 1), 4: (20240801, 7)}[size]
    expected = {"x_train_000001": [0, 10, 20], "x_val_000001": [0, 10, 11, *range(20, 26)],
                "x_train_000002": [*range(30, 35)],
                "x_train_000003": [50], "x_val_000003": [40, 50]}
    for name, tokens in expected.items():
        raw = (tmp_path / f"{name}.bin").read_bytes()
        assert np.frombuffer(raw[:1024], np.int32).tolist() == [*magic, len(tokens)] + 253 * [0]
        assert np.frombuffer(raw[1024:], job.dtype).tolist() == tokens
    assert {*files_of(tmp_path)} == {RECORD, *(f"{name}.bin" for name in expected)}
    assert json.loads((tmp_path / RECORD).read_text()) == dict(
        arguments=arguments, finished=True, rows=60, crc=60, shards=3, files=[".bin"],
        stats={}, tokens=dict(train=9, val=11))
    files = TokenFiles(tmp_path, "val", 1, 60)  # x_val_000002 is not missed
    assert [len(tokens) for tokens in files.files] == [9, 2]


def test_a_header_counts_to_its_limit():
    """A shard ends with its chunk, and that may be one long document."""
    head = header(np.dtype(np.uint16), 2**31 - 1)
    assert np.frombuffer(head, np.int32)[2] == 2**31 - 1
    assert "cut the longest" in refused(header, np.dtype(np.uint16), 2**31)
    assert prepare_py.LARGEST + 4 * prepare_py.CHUNK < 2**31  # at most 4 bytes a character


def test_prepare_holds_out_the_end_before_the_first_shard(tmp_path):
    """Where documents are long no hash gives val enough of them, however many come."""
    docs = [letter * (1 << 20) for letter in "abc"]
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in docs])
    p = prepare([path], tmp_path / "o", shard_tokens=2_000_000)
    assert p.returncode == 0, p.stderr
    train, val = (TokenFiles(tmp_path / "o", split, 16, 257).files for split in ("train", "val"))
    assert len(train) == 2 and len(val) == 1
    tokens = 2 * (2**20 + 1)
    assert len(val[0]) == round(0.1 * tokens) and set(val[0][:-1]) == {98} and val[0][-1] == 256
    docs = split_documents(np.concatenate([train[0], val[0], train[1]]))
    assert [(doc[:1], len(doc)) for doc in docs] == [(b, 2**20) for b in (b"a", b"b", b"c")]


def test_files_are_renamed_when_they_are_on_the_disk_and_the_renames_are_synced_too(tmp_path):
    """After a power cut a file is whole or what it was, and one that was written stays."""
    seen = []
    fsync, replace = os.fsync, os.replace

    def synced(fd):
        path = os.readlink(f"/proc/self/fd/{fd}")
        seen.append((os.path.basename(path), None if os.path.isdir(path) else open(path).read()))
        fsync(fd)

    def renamed(source, target):
        seen.append((source.name, target.name))
        replace(source, target)

    with patch.object(os, "fsync", synced), patch.object(os, "replace", renamed):
        write_files(str(tmp_path), {"a": [b"x", memoryview(b"y")], "b": lambda f: f.write(b"z")})
    assert seen == [("a.tmp", "xy"), ("b.tmp", "z"), ("a.tmp", "a"), ("b.tmp", "b"),
                    (tmp_path.name, None)]
    assert files_of(tmp_path) == {"a": b"xy", "b": b"z"}


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_files_stay_what_they_were_when_a_write_fails(tmp_path, monkeypatch, call):
    """The error is the caller's to tell; no temporary file stays."""
    before = {"a": b"old", "b": b"old"}
    write_files(tmp_path, {name: [content] for name, content in before.items()})
    full = OSError(errno.ENOSPC, "No space left on device")

    def fails(*_):
        raise full

    if call != "write":
        monkeypatch.setattr(os, call, fails)
    with pytest.raises(OSError) as e:
        write_files(tmp_path, {"a": [b"new"], "b": fails if call == "write" else [b"new"]})
    assert e.value is full and files_of(tmp_path) == before


# What write_files does to the disk: before each of these calls, and after it, a kill may come.
CALLS = ((files, "open"), (os, "fsync"), (os, "replace"), (Path, "unlink"))


def run_prepare(argv, main=prepare_py.main, kill_at=0, pids=None):
    """prepare.py; killed at its kill_at-th call of those that write. pids gets its workers' ids."""
    left = itertools.count(kill_at, -1)

    def counted(call):
        def then_killed(*args, **kwargs):
            if next(left) == 1:
                with open(pids, "a") as f:
                    print(*children(os.getpid()), file=f)
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)
        return then_killed

    with ExitStack() as stack:
        stack.enter_context(patch.object(sys, "argv", ["prepare.py", *map(str, argv)]))
        for place, name in CALLS:
            call = getattr(place, name, open)
            stack.enter_context(patch.object(place, name, counted(call), create=True))
        main()


def starts_until_done(argv, pids, capfd, check=lambda: None, **options):
    """Start it again and again, killed a call later each time; (how many kills, what it said)."""
    said = ""
    for kill_at in itertools.count(1):
        told = dict(argv=argv, kill_at=kill_at, pids=pids, **options)
        p = multiprocessing.get_context("fork").Process(target=run_prepare, kwargs=told)
        p.start()
        end = time.time() + 60
        while p.exitcode is None and time.time() < end:  # join would wait for its workers too
            time.sleep(0.01)
        said += capfd.readouterr().out
        if p.exitcode == 0:
            return kill_at - 1, said
        assert p.exitcode == -signal.SIGKILL
        check()


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as f:
            return " Z " not in f.read()
    except OSError:
        return False


@pytest.fixture
def hub(monkeypatch):
    """A data set of the hub: train has 300 documents, validation 40, and test none."""
    splits = dict(train=documents(300), validation=documents(40), test=[""])
    fake = ModuleType("datasets")
    fake.logging = SimpleNamespace(set_verbosity=print, CRITICAL=50)
    fake.load_dataset = lambda path, split, **_: [{"text": text} for text in splits[split]]
    monkeypatch.setitem(sys.modules, "datasets", fake)
    return {split: [text.encode() for text in texts] for split, texts in splits.items()}


@pytest.mark.parametrize("shard_tokens", [10**6, 20_000])
def test_prepare_takes_a_split_of_the_hub_for_val(tmp_path, monkeypatch, hub, shard_tokens):
    """All of it, however few tokens it has; and of the other split no document."""
    monkeypatch.setattr(prepare_py, "CHUNK", 5000)
    argv = ["x", "owner/name", "--val_split=validation", "--tokenizer=bytes", "--workers=1",
            f"--shard_tokens={shard_tokens}"]

    def both(out):
        return [split_documents(np.concatenate(TokenFiles(out, split, 16, 257).files))
                for split in ("train", "val")]

    run_prepare([*argv, f"--out={tmp_path}/o"])
    assert both(tmp_path / "o") == [hub["train"], hub["validation"]]
    assert (tmp_path / "o/train.bin").exists() == (shard_tokens == 10**6)
    run_prepare([*argv, f"--out={tmp_path}/p", "--limit=30"])
    assert both(tmp_path / "p") == [hub["train"][:30], hub["validation"]]
    line = refused(run_prepare, [*argv, "--val_split=test", f"--out={tmp_path}/q"])
    assert "leave a split empty" in line and not (tmp_path / "q").exists()


def test_fineweb_edu_takes_its_smallest_sample(tmp_path, hub):
    for flag, subset in (("--limit=200", "sample-10BT"), ("--subset=other", "other")):
        out = tmp_path / subset
        p = script("data/fineweb_edu/prepare.py", "--tokenizer=bytes", flag, f"--out={out}")
        assert p.returncode == 0, p.stderr
        assert json.loads((out / RECORD).read_text())["arguments"]["subset"] == subset


def test_wikitext103_takes_the_published_validation_split(tmp_path, monkeypatch, hub):
    p = script("data/wikitext103/prepare.py", "--tokenizer=bytes", f"--out={tmp_path}/o")
    assert p.returncode == 0, p.stderr
    assert split_documents(tokens_of(tmp_path / "o/val.bin")) == hub["validation"]
    asked = json.loads((tmp_path / "o" / RECORD).read_text())["arguments"]
    assert asked["val_split"] == "validation" and asked["subset"] == "wikitext-103-raw-v1"
    (tmp_path / "a.txt").write_text("x")
    p = script("data/wikitext103/prepare.py", tmp_path / "a.txt", f"--out={tmp_path}/p")
    assert p.returncode == 1 and "pass --val_split= for those" in p.stderr


def test_prepare_goes_on_after_a_kill_or_a_full_disk_to_the_same_bytes(tmp_path, monkeypatch,
                                                                       capfd):
    """Whichever file it has just written. Its workers end too."""
    monkeypatch.setattr(prepare_py, "CHUNK", 5000)
    monkeypatch.setattr(prepare_py, "MANY", 1)
    rng = random.Random(0)
    texts = ["".join(rng.choices("abc \n", k=6000)) for _ in range(7)]
    rows = [{"text": text} for text in (texts[0], "", *texts[1:4], "", texts[4])]
    a, b, whole, out = (tmp_path / name for name in ("a.jsonl", "b.txt", "whole", "out"))
    write_jsonl(a, rows)
    date = os.stat(a).st_mtime
    b.write_text(texts[5])
    c = tmp_path / "c.txt"
    c.write_text(texts[6])  # the seventh document: six are asked for
    argv = ["x", str(a), str(b), str(c), "--tokenizer=bytes", "--shard_tokens=4000",
            "--val_fraction=0.3", "--workers=1", "--limit=6", f"--out={out}"]
    run_prepare([*argv, f"--out={whole}"])
    record = json.loads((whole / RECORD).read_text())
    assert record["rows"] == 8 and record["shards"] == 6 and record["finished"]
    expected = files_of(whole)
    assert len(expected) == 9  # seven shards, meta.json and prepare.json

    def shards_are_as_expected():
        found = files_of(out)
        assert all(found[name] == expected[name] for name in found if name.endswith(".bin"))
        return len(found)

    full = OSError(errno.ENOSPC, "No space left on device")
    for error, remedy in ((full, f"cannot write {out}: No space"), (KeyboardInterrupt, "stopped")):
        # in the record of the second shard
        with patch.object(os, "fsync", side_effect=[None] * 7 + [error]):
            line = refused(run_prepare, argv)
        assert remedy in line and "start it again" in line
        assert not list(out.glob("*.tmp")) and shards_are_as_expected() > 1
    assert "start it again" in refused(TokenFiles, out, "train", 16, 257)

    for other in ("--limit=99", "--shard_tokens=4001", "--template={text}", "--val_fraction=0.2"):
        key = other[2:].partition("=")[0]
        assert f"another {key};" in refused(run_prepare, [*argv, other])
    # A row more, less, or another, or a text that is cut elsewhere, before those that are left.
    moved = [{"text": texts[0][:-1]}, {"text": texts[0][-1]}, *rows[2:]]
    for changed in ([{"text": "one more"}, *rows], rows[1:], [{"text": texts[5]}, *rows[1:]], [],
                    moved):
        write_jsonl(a, changed)
        assert "the documents are not those" in refused(run_prepare, argv)
        shards_are_as_expected()
    write_jsonl(a, rows)
    os.utime(a, (date, date))  # which prepare.json has

    shutil.rmtree(out)
    workers = tmp_path / "workers"
    kills, said = starts_until_done(argv, workers, capfd, shards_are_as_expected)
    assert "left out: 2\n" in said  # those before the kills too
    assert files_of(out) == expected and kills > 15
    left, end = workers.read_text().split(), time.time() + 20
    assert len(left) > 10  # of all kills: in the last ones the pool was gone
    while (left := [*filter(is_running, left)]) and time.time() < end:
        time.sleep(0.05)
    assert not left


def test_prepare_goes_on_after_kills_at_random_to_the_same_bytes(tmp_path):
    """The command itself, from sources of each kind, one of them packed."""
    draw = random.Random(0)
    texts = ["".join(draw.choices("abc ,\"\n\u00e9", k=30_000)) for _ in range(60)]
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    with gzip.open(tmp_path / "b.csv.gz", "wt", encoding="utf-8", newline="") as f:
        csv.writer(f).writerows([["text"], *([text] for text in texts)])
    (tmp_path / "c.txt").write_text("".join(texts))
    argv = [sys.executable, f"{HERE}/data/prepare.py", "x", path, tmp_path / "b.csv.gz",
            tmp_path / "c.txt", "--tokenizer=bytes", "--shard_tokens=500000", "--workers=1",
            "--val_fraction=0.2"]

    def start(out):
        return subprocess.Popen([*argv, f"--out={out}"], stdout=subprocess.DEVNULL)

    started = time.time()
    assert start(tmp_path / "whole").wait() == 0
    seconds = time.time() - started
    expected = files_of(tmp_path / "whole")
    assert len(expected) > 7
    for _ in range(6):
        p = start(tmp_path / "out")
        time.sleep(draw.uniform(0.3, 1) * seconds)
        p.kill()
        assert p.wait() in (0, -signal.SIGKILL)
    assert start(tmp_path / "out").wait() == 0
    assert files_of(tmp_path / "out") == expected

"""
data/prepare.py, the other data/*/prepare.py and how data/files.py writes: any text becomes tokens,
whole or not at all.

    python -m pytest -q tests/test_prepare.py

What is read from files of each kind is in test_documents.py.
"""

import errno
import hashlib
import itertools
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import tiktoken
from harness import children, flags, refused, script

from data import files, loader
from data import prepare as prepare_py
from data.files import RECORD, write_files
from data.loader import TokenFiles
from data.shakespeare_char import prepare as shakespeare_char
from data.tokenizer import encoder, tokenizer

os.environ["HF_HUB_OFFLINE"] = "1"  # before `datasets` is imported, which looks once


def tokens_of(path):
    return np.fromfile(path, dtype=np.uint16).tolist()


def documents(n=300):
    rng = random.Random(0)
    words = ["alpha", "beta", "gamma", "d\u00e9lta"]
    return [f"document {i}: " + " ".join(rng.choice(words) for _ in range(40)) for i in range(n)]


ARGS = SimpleNamespace(tokenizer="bytes", template=None, column="text")


def prepared(sources, out, **options):
    """The tokens of train and val."""
    shutil.rmtree(out, ignore_errors=True)
    run_prepare(["x", *sources, *flags(out=out, **{"tokenizer": "bytes", **options})])
    return [tokens_of(out / f"{split}.bin") for split in ("train", "val")]


def split_documents(tokens):
    """The documents, as bytes, of tokens with 256 after each; UTF-8 has no byte 255."""
    return np.minimum(tokens, 255).astype(np.uint8).tobytes().split(b"\xff")[:-1]


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def files_of(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


# ---------- documents become tokens ---------------------------------------------


def test_prepare_splits_by_text_in_any_order_and_number_of_workers(tmp_path):
    docs = documents()
    path = tmp_path / "a.jsonl"

    def parts_of(docs, **options):
        write_jsonl(path, [{"text": text} for text in docs])
        parts = prepared([path], tmp_path / "out", val_fraction=0.2, **options)
        return [split_documents(part) for part in parts]

    train, val = parts_of(docs, workers=1)
    assert sorted(train + val) == sorted(d.encode() for d in docs)  # once, in one split
    assert (len(val), val[0][:11]) == (74, b"document 3:")  # not by Python's hash, which changes
    assert parts_of(docs[::-1], workers=2) == [train[::-1], val[::-1]]
    for part, limited in zip((train, val), parts_of(docs, limit=200)):
        assert 0 < len(limited) < len(part) and part[:len(limited)] == limited


@pytest.mark.parametrize("n, options", [
    (1, {}), (2, dict(val_fraction=0.5)), (100, {}),
    (100, dict(val_fraction=0.3))])  # the hash holds out some: 10,000 bytes, and fewer tokens
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


def test_prepare_takes_columns_and_templates(tmp_path, capsys):
    """0 is text, and null is none. Backslashes stay, and a line says so of the usual slip."""
    rows = [{"n": 0, "my text": None}, {"n": 12, "my text": "{n}"}]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    for options, expected in ((dict(template="{n}|\n{my text}"), [b"0|\n", b"12|\n{n}"]),
                              (dict(template=r"C:\new\{n}"), [rb"C:\new\0", rb"C:\new\12"]),
                              (dict(column="n"), [b"0", b"12"])):
        train, val = prepared([path], tmp_path / "o", **options)
        assert sorted(split_documents(train + val)) == expected
        said = capsys.readouterr().out
        assert ("backslash" in said) == ("\\n" in options.get("template", ""))


@pytest.fixture
def gpt2(monkeypatch):
    """tiktoken with a vocabulary of our own, since GPT-2's is a download: the bytes, and some
    tokens of several bytes."""
    ranks = {bytes([i]): i for i in range(256)}
    for text in (b"A: caf", b" the", b" sun", b"\n\n", b"\xf0\x9f\x8c"):
        for end in range(2, len(text) + 1):
            ranks[text[:end]] = len(ranks)
    special = {"<|endoftext|>": 50256}
    bpe = tiktoken.Encoding("gpt2", pat_str="(?s).+", mergeable_ranks=ranks, special_tokens=special)
    monkeypatch.setattr(tiktoken, "get_encoding", {"gpt2": bpe}.get)
    encoder.cache_clear()
    yield bpe
    encoder.cache_clear()


def test_prepare_with_gpt2s_tokenizer(tmp_path, gpt2):
    """What looks like a special token in a text is text; in a prompt it is the token."""
    text = "the quick <|endoftext|> fox"
    (tmp_path / "a.txt").write_text(text)
    train, val = prepared([tmp_path / "a.txt"], tmp_path / "o", tokenizer="gpt2")
    assert train + val == [*gpt2.encode_ordinary(text), 50256]
    meta = loader.read_meta(tmp_path / "o")
    assert meta == {"vocab_size": 50304, "tokenizer": "gpt2"}
    encode, decode, size = tokenizer(meta)
    assert encode(text) == [*b"the quick ", 50256, *b" fox"]
    assert (decode(encode(text)), size) == (text, 50257)


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
    assert "leave a split empty" in line


# ---------- the data sets that have a command of their own ----------------------


def test_stdlib_and_shakespeare_hold_out_their_end(tmp_path, monkeypatch):
    for out in (tmp_path / "a", tmp_path / "b"):
        assert script("data/python_stdlib/prepare.py", f"--out={out}").returncode == 0
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")
    assert loader.read_meta(tmp_path / "a") == {"vocab_size": 256, "tokenizer": "bytes"}
    assert b"def " in bytes(tokens_of(tmp_path / "a/val.bin"))
    text = "To be or n\u00f6t" * 50
    (tmp_path / "input.txt").write_text(text)
    monkeypatch.setattr(shakespeare_char, "SHA256", hashlib.sha256(text.encode()).hexdigest())
    monkeypatch.setenv("HOME", str(tmp_path))  # a shell leaves the ~ in --out=~/x
    monkeypatch.setattr(sys, "argv", ["prepare.py", "--input=~/input.txt", "--out=~/out"])
    shakespeare_char.main()
    _, decode, _ = tokenizer(loader.read_meta(tmp_path / "out"))
    parts = [decode(tokens_of(tmp_path / f"out/{split}.bin")) for split in ("train", "val")]
    assert parts == [text[:540], text[540:]]


# ---------- files, whole or not there -------------------------------------------


def test_prepare_replaces_nothing(tmp_path, monkeypatch, capsys):
    """With the same arguments and documents it is done already. The content of sources counts, and
    not their dates."""
    monkeypatch.setattr(prepare_py, "CHUNK", 1)  # so that one may end where the documents did
    rows = [{"text": text} for text in documents(30)]
    path, out, bad = write_jsonl(tmp_path / "a.jsonl", rows), tmp_path / "o", tmp_path / "bad.txt"
    bad.write_bytes(b"\xff")
    argv = ["x", path, "--tokenizer=bytes", "--workers=1", f"--out={out}"]
    assert "bad.txt" in refused(run_prepare, [*argv, bad])  # before it has written any tokens
    run_prepare(argv)
    os.utime(path, (0, 0))
    run_prepare(argv)
    assert "prepared already" in capsys.readouterr().out
    before = files_of(out)
    record = json.loads(before[RECORD])
    del record["crc"]  # as of another version
    (out / RECORD).write_text(json.dumps(record))
    assert "another data set is here" in refused(run_prepare, argv)
    (out / RECORD).write_bytes(before[RECORD])
    assert script("data/python_stdlib/prepare.py", f"--out={out}").returncode
    for other in ("--val_fraction=0.2", bad):
        assert "pass another --out" in refused(run_prepare, [*argv, other])
    as_long = {"text": rows[0]["text"][::-1]}
    for changed in ([*rows, {"text": "one more"}], [as_long, *rows[1:]]):
        write_jsonl(path, changed)
        assert "the documents are not those" in refused(run_prepare, argv)
    assert files_of(out) == before


@pytest.mark.parametrize("size", [2, 4])
def test_prepare_writes_shards_as_llmc_does(tmp_path, size):
    """None is empty; another read of the header. The data's own name may look like a shard's."""
    name = {2: "x", 4: "x_train_1"}[size]
    job = prepare_py.Job(ARGS, encoder("bytes")._replace(vocab_size=30_000 * size))
    arguments = dict(name=f"some/{name}", shard_tokens=4, source=[])
    record = prepare_py.open_record(tmp_path, arguments)
    expected = {"train_000001": [0, 10, 20], "val_000001": [0, 10, 11, *range(20, 26)],
                "train_000002": [*range(30, 35)],
                "train_000003": [50], "val_000003": [40, 50]}
    expected = {f"{name}_{end}": tokens for end, tokens in expected.items()}
    for i in (1, 2, 3):
        waiting = {}
        for split in ("train", "val"):
            tokens = expected.get(f"{name}_{split}_00000{i}", [])
            waiting[split] = np.array(tokens, job.dtype).tobytes()
        prepare_py.write_shard(tmp_path, job, waiting, record, {}, is_last=i == 3)
    magic = {2: (20240520, 1), 4: (20240801, 7)}[size]
    for name, tokens in expected.items():
        raw = (tmp_path / f"{name}.bin").read_bytes()
        assert np.frombuffer(raw[:1024], np.int32).tolist() == [*magic, len(tokens)] + 253 * [0]
        assert np.frombuffer(raw[1024:], job.dtype).tolist() == tokens
    assert {*files_of(tmp_path)} == {RECORD, *(f"{name}.bin" for name in expected)}
    record = json.loads((tmp_path / RECORD).read_text())
    assert record["finished"] and record["tokens"] == dict(train=9, val=11)
    for split, lengths in (("train", [3, 5, 1]), ("val", [9, 2])):  # val_000002 is not missed
        assert [*map(len, TokenFiles(tmp_path, split, 1, 60).files)] == lengths


def test_prepare_holds_out_the_end_before_the_first_shard(tmp_path, monkeypatch):
    """Where documents are long no hash gives val enough of them, however many come."""
    monkeypatch.setattr(prepare_py, "CHUNK", 1)
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": letter * 99} for letter in "abc"])
    run_prepare(["x", path, "--tokenizer=bytes", "--shard_tokens=200", f"--out={tmp_path}/o"])
    train, val = (TokenFiles(tmp_path / "o", split, 16, 257).files for split in ("train", "val"))
    first, second = ([*b"a" * 99, 256, *b"b" * 80], [*b"c" * 99, 256])
    assert [tokens.tolist() for tokens in (*train, *val)] == [first, second, [*b"b" * 19, 256]]


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
    assert seen == [("a.tmp", "xy"), ("a.tmp", "a"), (tmp_path.name, None),
                    ("b.tmp", "z"), ("b.tmp", "b"), (tmp_path.name, None)]
    # Some shares cannot sync a directory (CIFS, WSL's DrvFs), and say so.
    invalid = OSError(errno.EINVAL, "Invalid argument")
    with patch.object(os, "fsync", side_effect=[None, invalid]):
        write_files(tmp_path, {"b": [b"z"]})
    # What fails leaves the old one, and no temporary file.
    with patch.object(os, "replace", side_effect=OSError), pytest.raises(OSError):
        write_files(tmp_path, {"a": [b"new"]})
    assert files_of(tmp_path) == {"a": b"xy", "b": b"z"}


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

    encoder.cache_clear()  # as in a process of its own
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
    argv = ["x", a, b, c, "--tokenizer=bytes", "--shard_tokens=4000",
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
    for error in (full, KeyboardInterrupt):
        # in the second shard
        with patch.object(os, "fsync", side_effect=[None] * 9 + [error]):
            with pytest.raises((OSError, KeyboardInterrupt)):
                run_prepare(argv)
        assert not list(out.glob("*.tmp")) and shards_are_as_expected() > 1
    assert "start it again" in refused(TokenFiles, out, "train", 16, 257)

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
    kills, _ = starts_until_done(argv, workers, capfd, shards_are_as_expected)
    assert files_of(out) == expected and kills > 15
    left, end = workers.read_text().split(), time.time() + 20
    assert len(left) > 10  # of all kills: in the last ones the pool was gone
    while (left := [*filter(is_running, left)]) and time.time() < end:
        time.sleep(0.05)
    assert not left


def test_prepare_writes_a_small_sets_vocabulary_before_its_tokens(tmp_path):
    """After a kill in between, a run would take GPT-2's."""
    with patch.object(prepare_py, "write_files") as write:
        prepare_py.write_small(tmp_path / "x", [1], [2], vocab_size=3)
    assert [*write.call_args.args[1]] == ["meta.json", "train.bin", "val.bin"]

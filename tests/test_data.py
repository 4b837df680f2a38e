"""
Data: the order of windows, formats and vocabularies (loader.py), and any text (prepare.py).

    python -m pytest -q tests/test_data.py

What all of these commands refuse is in test_mistakes.py, tokenizers of the `tokenizers` library in
test_llama.py.
"""

import hashlib
import io
import itertools
import json
import os
import pickle
import random
import resource
import sys
from glob import glob

import numpy as np
import pytest
import torch
from harness import HERE, flags, refused, script, tiny

from data import loader
from data.loader import TokenFiles
from data.prepare import chunks, tokenize, write_headers
from data.shakespeare_char import prepare as shakespeare_char
from data.tokenizer import gpt2_bpe, tokenizer
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
    assert sorted(first) == sorted(second) == sorted(other) == list(range(n))
    assert n < 10 or first != second and first != other  # reshuffled, and seeded


def test_order_is_random_enough_and_stays_for_runs_that_resume_with_newer_code():
    order = loader.train_order(5000, 1, 0, 5000)
    for other in (order[1:], np.arange(4999)):
        assert abs(np.corrcoef(order[:-1], other)[0, 1]) < 0.05
    assert loader.train_order(97, 7, 95, 5).tolist() == [92, 17, 71, 28, 12]


def batches_of(tmp, size, **keys):
    return [loader.Batches(tiny(tmp, **keys), World(rank, size)) for rank in range(size)]


@pytest.mark.parametrize("size, batch_size", [(1, 2), (2, 2), (3, 4), (4, 1)])
def test_batch_independent_of_world_size(tmp, size, batch_size):
    """The union of all ranks' micro-batches of a step: the same, in order, however split."""
    keys = dict(batch_size=batch_size, gradient_accumulation_steps=24 // batch_size)
    parts, found = batches_of(tmp, size, **keys), []
    for micro in range(24 // batch_size // size):
        found += [part.train(3, micro)[0] for part in parts]
    whole, = batches_of(tmp, 1, batch_size=24, gradient_accumulation_steps=1)
    assert torch.equal(torch.cat(found), whole.train(3, 0)[0])


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
        assert (y >= 0).all(1).sum() == max(1, weight)  # the mean of nothing is NaN
        assert (y[max(1, weight):] == -1).all()
        rows += x[:weight].tolist()
    assert rows == files.batch(order)[0].tolist()


@pytest.mark.parametrize("magic, dtype", [(20240520, np.uint16), (20240801, np.uint32)])
def test_llmc_headers_and_shards(tmp_path, magic, dtype):
    data = tmp_path / "run[1]"  # a name, not a pattern
    data.mkdir()
    shards = [np.arange(200, 240, dtype=dtype) * 270, np.arange(35, dtype=dtype)]
    for i, tokens in enumerate(shards):
        header = np.zeros(256, dtype=np.int32)
        header[:3] = magic, 1, len(tokens)
        (data / f"fine_train_{i:03d}.bin").write_bytes(header.tobytes() + tokens.tobytes())
    windows = [shard[start:start + 16] for shard in shards for start in (0, 16)]
    files = TokenFiles(str(data), "train", 16, 200000)
    assert len(files) == 4
    assert files.batch(range(4))[0].tolist() == np.stack(windows).tolist()
    with open(data / "fine_train_001.bin", "ab") as f:
        f.write(b"xx")  # more than its header says
    line = refused(TokenFiles, str(data), "train", 16, 200000)
    assert "fine_train_001.bin" in line and "prepare it again" in line


def test_meta_pkl_is_nanogpts_and_runs_no_code(tmp_path):
    meta = {"vocab_size": 2, "itos": {1: "b", 0: "a"}, "stoi": {"a": 0, "b": 1}}
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(meta))
    assert loader.read_meta(tmp_path) == {"vocab_size": 2, "chars": ["a", "b"]}
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps({**meta, "x": os.system}))
    assert "meta.pkl: not readable" in refused(loader.read_meta, tmp_path)


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
    argv = ["prepare.py", f"--input={tmp_path / 'input.txt'}", f"--out={tmp_path / 'out'}"]
    monkeypatch.setattr(shakespeare_char, "SHA256", hashlib.sha256(text.encode()).hexdigest())
    monkeypatch.setattr(sys, "argv", argv)
    shakespeare_char.main("shakespeare_char", "", shakespeare_char.characters)
    _, decode, _ = tokenizer(loader.read_meta(tmp_path / "out"))
    parts = [decode(tokens_of(tmp_path / f"out/{split}.bin")) for split in ("train", "val")]
    assert parts == [text[:540], text[540:]]


def documents(n=300):
    rng = random.Random(0)
    words = ["alpha", "beta", "gamma", "d\u00e9lta"]
    return [f"document {i}: " + " ".join(rng.choice(words) for _ in range(40)) for i in range(n)]


def prepare(sources, out, command=("data/prepare.py", "x"), tokenizer="bytes", **options):
    return script(*command, *sources, *flags(out=out, tokenizer=tokenizer, **options), **OFFLINE)


def prepared(sources, out, **options):
    """The tokens of train and val."""
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
    """Names of files are no patterns; 0 is text, and null is none; alpaca's own template."""
    pytest.importorskip("datasets")
    rows = [{"n": 0, "my text": None}, {"n": 12, "my text": "{n}"}]
    path = write_jsonl(tmp_path / "a[1].jsonl", rows)
    write_jsonl(tmp_path / "a1.jsonl", [])  # what it would name as a pattern
    for options, expected in ((dict(template=r"{n}|\n{my text}"), [b"0|\n", b"12|\n{n}"]),
                              (dict(column="n"), [b"0", b"12"])):
        train, val = prepared([path], tmp_path / "o", **options)
        assert sorted(split_documents(train + val)) == expected
    write_jsonl(path, [dict(instruction="Say", input="it", output="what")] * 2)
    train, val = prepared([path], tmp_path / "o", command=["data/alpaca/prepare.py"])
    text = b"### Instruction:\nSay\nit\n### Response:\nwhat"
    assert split_documents(train + val) == [text] * 2


def test_prepare_with_gpt2s_tokenizer(tmp_path, monkeypatch):
    """Where a directory beside the repository has its vocabulary and Shakespeare, without a
    network."""
    beside = os.path.abspath(os.path.join(HERE, "..", "shared"))
    if os.path.isdir(os.path.join(beside, "tiktoken")):
        monkeypatch.setenv("TIKTOKEN_CACHE_DIR", os.path.join(beside, "tiktoken"))
    try:
        encode = gpt2_bpe().encode_ordinary
    except SystemExit as e:
        pytest.skip(e.code)
    text = "the quick <|endoftext|> fox"  # what looks like a special token in a text is text
    (tmp_path / "a.txt").write_text(text)
    train, val = prepared([tmp_path / "a.txt"], tmp_path / "o", tokenizer="gpt2")
    assert train + val == [*encode(text), 50256]
    assert loader.read_meta(tmp_path / "o") == {"vocab_size": 50304, "tokenizer": "gpt2"}
    text = os.path.join(beside, "data", "tinyshakespeare.txt")
    if os.path.exists(text):
        p = script("data/shakespeare/prepare.py", f"--input={text}", f"--out={tmp_path}")
        assert "301,966" in p.stdout and "36,059" in p.stdout  # nanoGPT's numbers


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
    assert p.stderr.count("\n") == 1 and os.listdir(out) == []  # nothing is left behind
    (out / "prepare.tmp").mkdir()  # as a run leaves it that is killed
    (out / "prepare.tmp" / "old.bin").write_text("x")
    assert script(path, *argv, f"--out={out}").returncode == 0
    assert sorted(os.listdir(out)) == ["meta.json", "train.bin", "val.bin"]


def test_prepare_sends_a_million_characters_at_a_time_and_keeps_their_order():
    """Short documents go to a worker together, and long ones do not pile up in memory."""
    for lengths, expected in (([3 << 20, 9, 8], [1, 2]), ([1 << 18] * 9, [4, 4, 1])):
        assert [len(chunk) for chunk in chunks("x" * n for n in lengths)] == expected
    docs = [letter * (1 << 20) for letter in "abcdef"]  # for one worker 4 wait
    files = io.BytesIO(), io.BytesIO()
    tokenize(docs, files, 1, "bytes", np.dtype(np.uint16), 0.5)
    train, val = (split_documents(np.frombuffer(f.getvalue(), np.uint16)) for f in files)
    assert sorted(train + val) == [doc.encode() for doc in docs]
    assert (train, val) == (sorted(train), sorted(val)) and train and val
    assert "--limit" in refused(write_headers, files, [1, 2**31])  # more than a header counts

"""Data: the order of windows, formats and vocabularies (loader.py), and any text (prepare.py)."""

import csv
import importlib
import io
import json
import os
import pickle
import random
import resource
import signal
import subprocess
import sys
import time
from glob import glob
from unittest.mock import patch

import numpy as np
import pytest
import tiktoken
import torch
from harness import HERE, Ranks, environment, flags, script, shell, tiny

from data import loader
from data.loader import TokenFiles
from data.prepare import chunks, tokenize
from data.tokenizer import tokenizer
from ranks import World

SHAKESPEARE = os.path.join(HERE, "..", "shared", "data", "tinyshakespeare.txt")
VOCABULARY = os.path.abspath(os.path.join(HERE, "..", "shared", "tiktoken"))
OFFLINE = {"HF_HUB_OFFLINE": "1"}
os.environ.update(OFFLINE)  # before `datasets` is imported, which looks once
DATASETS = sorted(map(os.path.dirname, glob("*/prepare.py", root_dir=os.path.join(HERE, "data"))))


def tokens_of(path):
    return np.fromfile(path, dtype=np.uint16).tolist()


# -----------------------------------------------------------------------------
# loader.py


@pytest.mark.parametrize("n", [1, 2, 3, 10, 97, 1024])
def test_every_window_once_an_epoch(n):
    first, second = (sorted(loader.train_order(n, 7, epoch * n, n)) for epoch in (0, 1))
    assert first == second == list(range(n))
    if n > 9:
        order = list(loader.train_order(n, 7, 0, n))
        assert order != list(loader.train_order(n, 7, n, n))  # reshuffled
        assert order != list(loader.train_order(n, 8, 0, n))  # seeded


def test_order_is_random_enough():
    order = loader.train_order(5000, 1, 0, 5000)
    assert abs(np.corrcoef(order, np.arange(5000))[0, 1]) < 0.05
    assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 0.05


def test_order_is_the_same_in_every_version():
    """A run that resumes with newer code goes on with the samples that it has not seen."""
    assert loader.train_order(97, 7, 95, 5).tolist() == [92, 17, 71, 28, 12]


def batches_of(tmp, size, **overrides):
    cfg = tiny(tmp, **overrides)
    return [loader.Batches(cfg, World(rank=rank, size=size)) for rank in range(size)]


def test_batch_independent_of_world_size(tmp):
    """The union of all ranks' micro-batches of a step: the same, in order, however split."""
    def step_of(size, batch_size, accumulation):
        parts = batches_of(tmp, size, batch_size=batch_size,
                           gradient_accumulation_steps=accumulation)
        out = []
        for micro in range(accumulation // size):
            out += [part.train(3, micro)[0] for part in parts]
        return torch.cat(out)
    expected = step_of(1, 24, 1)
    for size, batch_size, accumulation in [(1, 2, 12), (2, 2, 12), (3, 4, 6), (4, 1, 24)]:
        assert torch.equal(step_of(size, batch_size, accumulation), expected)


@pytest.mark.parametrize("size, eval_iters", [(1, 5), (2, 5), (3, 5), (4, 5), (3, 100)])
def test_evaluation_visits_each_fixed_window_once_on_any_number_of_ranks(tmp, size, eval_iters):
    parts = batches_of(tmp, size, eval_iters=eval_iters)
    files = parts[0].files["val"]
    order = loader.eval_order(len(files), eval_iters * 2)
    assert len(order) == min(len(files), eval_iters * 2)
    seen = [list(part.fixed("val")) for part in parts]
    assert len({len(micro_batches) for micro_batches in seen}) == 1  # forwards are collectives
    rows = []
    for micro_batches in zip(*seen):
        for x, y, weight in micro_batches:
            assert x.shape == y.shape == (2, 16)  # whole, for compiled graphs
            assert (y[max(1, weight):] == -1).all() and (y[:weight] >= 0).all()
            rows += x[:weight].tolist()
    assert rows == files.batch(order)[0].tolist()


def test_targets_are_inputs_shifted(tmp):
    files = TokenFiles(os.path.join(tmp, "toy"), "train", 16, 67)
    raw = tokens_of(os.path.join(tmp, "toy", "train.bin"))
    x, y = files.batch([3])
    assert x.tolist() == [raw[48:64]] and y.tolist() == [raw[49:65]]
    assert len(files) == (len(raw) - 1) // 16


@pytest.mark.parametrize("magic, dtype", [(20240520, np.uint16), (20240801, np.uint32)])
def test_llmc_headers_and_shards(tmp_path, magic, dtype):
    tmp_path = tmp_path / "run[1]"  # a name, not a pattern
    tmp_path.mkdir()
    top = 60000 if dtype is np.uint16 else 100000
    shards = [np.arange(top - 40, top, dtype=dtype), np.arange(35, dtype=dtype)]
    for i, tokens in enumerate(shards):
        header = np.zeros(256, dtype=np.int32)
        header[:3] = magic, 1, len(tokens)
        with open(tmp_path / f"fine_train_{i:03d}.bin", "wb") as f:
            f.write(header.tobytes() + tokens.tobytes())
    files = TokenFiles(str(tmp_path), "train", 16, 200000)
    assert len(files) == 39 // 16 + 34 // 16
    for window, start, shard in [(0, 0, 0), (1, 16, 0), (2, 0, 1), (3, 16, 1)]:
        assert files.batch([window])[0][0].tolist() == shards[shard][start:start + 16].tolist()
    with open(tmp_path / "fine_train_001.bin", "ab") as f:
        f.write(b"xx")
    with pytest.raises(SystemExit, match="or damaged"):  # it has more than its header says
        TokenFiles(str(tmp_path), "train", 16, 200000)


def test_bad_files_are_one_clear_line(tmp_path):
    with pytest.raises(SystemExit, match="missing"):
        TokenFiles(str(tmp_path), "train", 16, 67)
    remedy = "python data/openwebtext/prepare.py"
    with pytest.raises(SystemExit, match=remedy if os.getcwd() == HERE else "prepare.py"):
        TokenFiles(os.path.join(HERE, "data", "openwebtext"), "nosuchsplit", 16, 67)
    remedy = r"data/prepare.py, or pass another --dataset"
    with pytest.raises(SystemExit, match=remedy):
        TokenFiles(os.path.join(HERE, "data"), "train", 16, 67)  # its prepare.py wants a name
    for data, message in [
        (b"", "0 bytes for a header of 0 and 0 tokens of 2; it is empty or damaged"),
        (bytes(2 * 1), "1 tokens, and block_size=16 needs 17; lower it, or prepare more text"),
        (bytes(2 * 16), "16 tokens, and block_size=16 needs 17; lower it, or prepare more text"),
        (bytes(101), "101 bytes for a header of 0 and 50 tokens of 2; it is empty or damaged"),
        (np.full(99, 67, dtype=np.uint16).tobytes(), "train.bin: token 67 is beyond vocab_size=67"),
    ]:
        (tmp_path / "train.bin").write_bytes(data)
        with pytest.raises(SystemExit, match=message):
            TokenFiles(str(tmp_path), "train", 16, 67)


class RunsCode:
    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


def test_meta_pkl_runs_no_code(tmp_path):
    chars = ["a", "b"]
    meta = {"vocab_size": 2, "itos": dict(enumerate(chars)), "stoi": {"a": 0, "b": 1}}
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(meta))
    assert loader.read_meta(str(tmp_path)) == {"vocab_size": 2, "chars": chars}
    del meta["vocab_size"]
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(meta))
    assert loader.read_meta(str(tmp_path)) == {"vocab_size": 2, "chars": chars}
    meta = {"vocab_size": 2, "x": RunsCode(f"touch {tmp_path}/ran")}
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(meta))
    with pytest.raises(SystemExit, match="not readable"):
        loader.read_meta(str(tmp_path))
    assert not (tmp_path / "ran").exists()


def test_tokenizers_decode_what_they_encode():
    text = "caf\u00e9"
    characters = {"vocab_size": 4, "chars": sorted(text)}
    for meta in (characters, {"vocab_size": 257, "tokenizer": "bytes"}):
        encode, decode, vocab_size = tokenizer(meta)
        assert decode(encode(text)) == text
        assert vocab_size == meta["vocab_size"] and max(encode(text)) < vocab_size
    assert decode([*encode("a"), 256, *encode("b")]) == "ab"
    with pytest.raises(SystemExit, match="never seen: 'xz'"):
        tokenizer({"chars": ["a"]})[0]("zax")


# -----------------------------------------------------------------------------
# the data sets that come with a prepare.py


@pytest.mark.parametrize("name", ["", *DATASETS])
def test_every_prepare_has_readable_help(name):
    p = script(os.path.join("data", name, "prepare.py"), "--help", COLUMNS="100")
    assert p.returncode == 0 and f"python {os.path.join('data', name, 'prepare.py')}" in p.stdout
    assert max(map(len, p.stdout.splitlines())) <= 100
    if name == "":
        assert r"--template='Q: {question}\nA: {answer}'" in p.stdout  # not broken in two
    if name == "alpaca":
        assert "0.01 of the documents" in " ".join(p.stdout.split())  # its own default


def test_stdlib_is_reproducible(tmp_path):
    for name in ("a", "b"):
        p = script("data/python_stdlib/prepare.py", f"--out={tmp_path / name}")
        assert p.returncode == 0
    for file in ("train.bin", "val.bin", "meta.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    text = bytes(tokens_of(tmp_path / "a" / "val.bin"))
    assert b"def " in text and b"import " in text
    if sys.version_info[:2] == (3, 11):  # the numbers of its docstring
        found = [len(tokens_of(tmp_path / "a" / f"{split}.bin")) for split in ("train", "val")]
        printed = script("data/python_stdlib/prepare.py", "--help").stdout
        assert [f"{n / 1e6:.2f}M" in printed for n in found] == [True, True], found


def test_shakespeare_checks_the_sum(tmp_path):
    (tmp_path / "wrong.txt").write_text("To be")
    p = script("data/shakespeare_char/prepare.py", f"--input={tmp_path / 'wrong.txt'}",
               f"--out={tmp_path}")
    assert p.returncode == 1 and "sha256" in p.stderr and "Traceback" not in p.stderr
    assert not (tmp_path / "train.bin").exists()


def prepare_small(name, *argv):
    """The main of a data set that needs neither a network nor data/prepare.py."""
    module = importlib.import_module(f"data.{name}.prepare")
    args = [name, "", module.characters] if name == "shakespeare_char" else []
    with (patch.object(module, "download", lambda path: "To be " * 20_000, create=True),
          patch.object(sys, "argv", ["prepare.py", *argv])):
        module.main(*args)


def prepare_full(*args):
    """The same on a disk that is full at 100,000 bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    prepare_small(*args)


@pytest.mark.parametrize("name", ["shakespeare_char", "python_stdlib"])
def test_prepare_small_data_sets_bad_input_is_one_clear_line(tmp_path, name):
    for flag, message in (("--bogus", "unrecognized arguments: --bogus"),
                          ("--out=/proc/x", "cannot write /proc/x: No such file or directory; ")):
        with pytest.raises(SystemExit, match=message):
            prepare_small(name, flag)
    p = Ranks(1, prepare_full, name, f"--out={tmp_path}").finish()
    assert (p.returncode, p.stdout, p.stderr.count("\n")) == (1, "", 1), p.stderr
    assert p.stderr.startswith(f"cannot write {tmp_path}: ") and os.listdir(tmp_path) == []


# -----------------------------------------------------------------------------
# prepare.py


def documents(n=300):
    rng = random.Random(0)
    words = ["alpha", "beta", "gamma", "d\u00e9lta"]
    return [f"document {i}: " + " ".join(rng.choice(words) for _ in range(40)) for i in range(n)]


def prepare(sources, out, tokenizer="bytes", env=OFFLINE, **options):
    return script("data/prepare.py", "x", *sources, f"--out={out}",
                  *flags(tokenizer=tokenizer, **options), **env)


def prepared(sources, out, **options):
    """The tokens of train and val."""
    p = prepare(sources, out, **options)
    assert p.returncode == 0, p.stderr
    return [tokens_of(out / f"{split}.bin") for split in ("train", "val")]


def split_documents(tokens):
    """The documents, as bytes, of tokens with 256 after each."""
    text = " ".join(map(str, tokens))
    return [bytes(map(int, part.split())) for part in text.split("256") if part.split()]


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_prepare_gives_the_tokens_of_an_independent_encoding(tmp_path):
    datasets = pytest.importorskip("datasets")
    docs = documents()
    write_jsonl(tmp_path / "a.jsonl", [{"text": d, "n": i} for i, d in enumerate(docs)])
    datasets.Dataset.from_dict({"text": docs}).to_parquet(str(tmp_path / "a.parquet"))
    with open(tmp_path / "a.csv", "w", newline="") as f:
        csv.writer(f).writerows([["text", "n"], *([d, i] for i, d in enumerate(docs))])
    expected = None
    for name, workers in (("a.jsonl", 1), ("a.parquet", 2), ("a.csv", 2)):
        out = tmp_path / name.replace(".", "-")
        parts = prepared([tmp_path / name], out, val_fraction=0.2, workers=workers)
        train, val = map(split_documents, parts)
        assert sorted(train + val) == sorted(d.encode() for d in docs)  # once, in one split
        assert 0.1 < len(val) / len(docs) < 0.3
        assert expected is None or parts == expected  # for any format and number of workers
        expected = parts


def test_prepare_puts_a_document_in_the_same_split_whatever_the_order_and_limit(tmp_path):
    pytest.importorskip("datasets")
    rows = [{"text": d} for d in documents(400)]
    write_jsonl(tmp_path / "a.jsonl", rows)
    write_jsonl(tmp_path / "b.jsonl", rows[::-1])
    a = prepared([tmp_path / "a.jsonl"], tmp_path / "a", val_fraction=0.3)
    b = prepared([tmp_path / "b.jsonl"], tmp_path / "b", val_fraction=0.3)
    c = prepared([tmp_path / "a.jsonl"], tmp_path / "c", val_fraction=0.3, limit=300)
    for all_docs, reverse, limited in zip(a, b, c):
        all_docs, reverse, limited = map(split_documents, (all_docs, reverse, limited))
        assert all_docs == reverse[::-1] and 0 < len(limited) < len(all_docs)
        assert all_docs[:len(limited)] == limited


@pytest.mark.parametrize("n", [1, 2, 100])
def test_prepare_takes_few_text_files_with_its_defaults(tmp_path, n):
    """A text file is one document. Few of them are cut in two: the last tenth of the tokens."""
    docs = documents(n)
    for i, text in enumerate(docs):
        (tmp_path / f"{i:03d}.txt").write_text(text + "\n\nsecond paragraph")
    parts = prepared(sorted(tmp_path.glob("*.txt")), tmp_path / "o")
    expected = b"\n\nsecond paragraph|".join(d.encode() for d in [*docs, ""])
    assert bytes(b"|"[0] if t == 256 else t for t in parts[0] + parts[1]) == expected
    assert len(parts[1]) == pytest.approx(len(expected) / 10, abs=1)


def test_prepare_takes_ten_thousand_documents_with_its_defaults(tmp_path):
    pytest.importorskip("datasets")
    docs = documents(10_000)
    write_jsonl(tmp_path / "a.jsonl", [{"text": d} for d in docs])
    train, val = prepared([tmp_path / "a.jsonl"], tmp_path / "o")
    assert sorted(split_documents(train + val)) == sorted(d.encode() for d in docs)
    assert 10_000 <= len(val) <= len(train) / 5


def test_prepare_obeys_val_fraction_where_the_text_is_cut_in_two(tmp_path):
    for i in range(2):
        (tmp_path / f"{i}.txt").write_text("x" * 999)
    files = [tmp_path / "0.txt", tmp_path / "1.txt"]
    assert list(map(len, prepared(files, tmp_path / "half", val_fraction=0.5))) == [1000, 1000]
    assert list(map(len, prepared(files, tmp_path / "most", val_fraction=0.9))) == [200, 1800]
    assert "the last 90% of the text" in prepare(files, tmp_path / "most", val_fraction=0.9).stdout


def test_prepare_takes_names_and_no_patterns(tmp_path):
    for name, text in (("a1.txt", "one"), ("a[1].txt", "exact")):
        (tmp_path / name).write_text(text)
    train, val = prepared([tmp_path / "a[1].txt"], tmp_path / "o", val_fraction=0.5)
    assert split_documents(train + val) == [b"exact"]
    p = prepare([tmp_path / "a*.txt"], tmp_path / "o")
    assert p.returncode == 1 and "a*.txt: no such file" in p.stderr


def test_prepare_data_set_takes_local_files_instead_of_the_hubs(tmp_path):
    pytest.importorskip("datasets")
    row = dict(instruction="Say", input="it", output="x" * 20)
    write_jsonl(tmp_path / "a[1].jsonl", [row] * 2)
    write_jsonl(tmp_path / "a1.jsonl", [])  # what the first would name as a pattern
    p = script("data/alpaca/prepare.py", tmp_path / "a[1].jsonl", f"--out={tmp_path}",
               "--tokenizer=bytes", **OFFLINE)
    assert p.returncode == 0, p.stderr
    tokens = tokens_of(tmp_path / "train.bin") + tokens_of(tmp_path / "val.bin")
    text = "### Instruction:\nSay\nit\n### Response:\n" + "x" * 20
    assert split_documents(tokens) == [text.encode()] * 2


def test_prepare_bpe_and_template(tmp_path):
    if not os.path.isdir(VOCABULARY):
        pytest.skip("GPT-2's vocabulary is not at hand")
    env = {"TIKTOKEN_CACHE_DIR": VOCABULARY}
    write_jsonl(tmp_path / "a.jsonl", [{"q": f"question {i}", "a": "answer"} for i in range(50)])
    parts = prepared([tmp_path / "a.jsonl"], tmp_path / "o", tokenizer="gpt2", env=env,
                     template="Q: {q}\\nA: {a}", val_fraction=0.2)
    encode = tiktoken.get_encoding("gpt2").encode_ordinary
    expected = [encode(f"Q: question {i}\nA: answer") + [50256] for i in range(50)]
    assert sorted(sum(expected, [])) == sorted(parts[0] + parts[1])
    assert [d for d in expected if d == parts[0][:len(d)]]
    p = script("data/shakespeare/prepare.py", f"--input={SHAKESPEARE}", f"--out={tmp_path / 's'}",
               **env)
    assert "301,966" in p.stdout and "36,059" in p.stdout  # nanoGPT's numbers


def test_prepare_template_writes_zero_and_leaves_out_null(tmp_path):
    pytest.importorskip("datasets")
    path = tmp_path / "a[1].jsonl"  # a name, not a pattern
    write_jsonl(path, [{"n": 0, "my text": None}, {"n": 12, "my text": "{n}"}])
    train, val = prepared([path], tmp_path / "o", template="{n}|{my text}")
    assert split_documents(train + val) == [b"0|", b"12|{n}"]
    train, val = prepared([path], tmp_path / "o2", column="n")
    assert split_documents(train + val) == [b"0", b"12"]


def test_prepare_bad_input_is_one_clear_line(tmp_path):
    pytest.importorskip("datasets")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "bad.txt").write_bytes(b"abc \xff\xfe")
    (tmp_path / "bad.csv").write_bytes(b"text\nabc \xff\xfe\n")
    (tmp_path / "a.md").write_text("x")
    write_jsonl(tmp_path / "a.jsonl", [{"body": "x"}])
    for names, message in [
        (["empty.txt"], "0 tokens leave a split empty"),
        (["empty.jsonl"], "0 tokens leave a split empty"),
        (["empty.jsonl", "a.jsonl"], "a.jsonl: no text in column text"),
        (["bad.txt"], "'utf-8' codec can't decode byte 0xff"),
        (["bad.csv"], "a file must be whole, and UTF-8"),
        (["a.md"], "not a file of kind .txt, .jsonl"),
        (["a.jsonl"], "no text in column text; pass --column or --template for one of body"),
        (["none.txt"], "no such file"),
        (["bad.txt", "none.txt"], "bad.txt: UnicodeDecodeError"),
        (["empty.txt", "none.txt"], "none.txt: no such file"),  # one of many is not passed over
    ]:
        p = prepare([tmp_path / name for name in names], tmp_path / "out")
        assert p.returncode == 1 and message in p.stderr, p.stderr
        assert p.stderr.count("\n") == 1, p.stderr
    p = prepare(["some/dataset"], tmp_path / "out")
    assert p.returncode == 1 and "check the name and the network" in p.stderr, p.stderr
    assert "Traceback" not in p.stderr
    for option in (dict(limit=0), dict(val_fraction=1)):
        p = prepare([tmp_path / "a.jsonl"], tmp_path / "out", column="body", **option)
        assert p.returncode == 1 and "--limit at least 1" in p.stderr
    assert os.listdir(tmp_path / "out") == []


def test_prepare_killed_half_way_leaves_no_data(tmp_path):
    pytest.importorskip("datasets")
    rows = [{"text": d * 20} for d in documents()]
    write_jsonl(tmp_path / "a.jsonl", rows * 60)
    out = tmp_path / "o"
    command = [sys.executable, "data/prepare.py", "x", str(tmp_path / "a.jsonl"), f"--out={out}",
               "--tokenizer=bytes"]
    p = subprocess.Popen(command, cwd=HERE, env={**environment(), **OFFLINE},
                         stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                         start_new_session=True)
    begun, end = out / "prepare.tmp" / "train.bin", time.time() + 60
    while time.time() < end and p.poll() is None:
        if begun.exists() and begun.stat().st_size:
            break
        time.sleep(0.01)
    os.killpg(p.pid, signal.SIGKILL)
    p.wait()
    assert begun.exists() and not (out / "train.bin").exists()
    with pytest.raises(SystemExit, match="missing"):
        TokenFiles(str(out), "train", 16, 257)


@pytest.mark.parametrize("row, options, message", [
    ({"text": ["a", "b"]}, {}, "a.jsonl: no text in column text; pass --column or --template"),
    ({"text": {"a": "b"}}, {}, "a.jsonl: no text in column text; pass --column or --template"),
    ({"text": "a" * 50000}, dict(out="a-file"), "cannot write"),
    ({"text": "a" * 50000}, dict(out="/sys/kernel/x"), "cannot write /sys/kernel/x"),
    ({"text": "a" * 50000}, dict(limit="x"), "argument --limit"),
])
def test_prepare_mistake_is_one_clear_line(tmp_path, row, options, message):
    pytest.importorskip("datasets")
    write_jsonl(tmp_path / "a.jsonl", [row])
    (tmp_path / "a-file").write_text("")
    options = {"out": "o", **options}
    p = prepare([tmp_path / "a.jsonl"], tmp_path / options.pop("out"), **options)
    assert p.returncode == 1 and message in p.stderr, p.stderr
    assert p.stderr.count("\n") == 1, p.stderr


def test_prepare_on_a_full_disk_is_one_clear_line(tmp_path):
    (tmp_path / "a.txt").write_text("abc " * 100_000)
    script = f"data/prepare.py x {tmp_path}/a.txt --out={tmp_path}/o --tokenizer=bytes"
    p = shell("bash", "-c", f"ulimit -f 40; exec {sys.executable} {script}")
    assert p.returncode == 1
    line = f"cannot write {tmp_path}/o: File too large; make room, or pass another --out\n"
    assert p.stderr == line
    assert os.listdir(tmp_path / "o") == []


def test_prepare_sends_a_million_characters_at_a_time():
    """Short documents go to a worker together, and long ones do not pile up in memory."""
    lengths = [[len(text) for text in chunk] for chunk in chunks("x" * n for n in (3 << 20, 9, 8))]
    assert lengths == [[3 << 20], [9, 8]]
    assert [len(chunk) for chunk in chunks(["x" * (1 << 18)] * 9)] == [4, 4, 1]


def test_prepare_keeps_the_order_of_more_chunks_than_wait_at_once():
    docs = [letter * (1 << 20) for letter in "abcdef"]  # for one worker 4 wait
    files = io.BytesIO(), io.BytesIO()
    tokenize(docs, files, 1, np.dtype(np.uint16), "bytes", 0.5)
    train, val = (split_documents(np.frombuffer(f.getvalue(), np.uint16)) for f in files)
    assert sorted(train + val) == [doc.encode() for doc in docs]
    assert (train, val) == (sorted(train), sorted(val)) and train and val

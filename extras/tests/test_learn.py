"""
--learn and --window of extras/masks.py, and the masks that it writes.

    python -m pytest -q extras/tests/test_learn.py
"""

import itertools
import json
import os
import re
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
from harness import refused
from test_data import (
    files_of,
    gpt2_or_skip,
    prepare,
    run_prepare,
    split_documents,
    starts_until_done,
    write_jsonl,
)

from data import prepare as prepare_py
from data.documents import render
from data.files import open_masks, open_split
from data.tokenizer import encoder, gpt2_bpe
from extras import masks

COMMAND = ["extras/masks.py", "x"]


def job(own, **options):
    """A Job with masks, as extras/masks.py makes it of its options."""
    args = SimpleNamespace(
        **{**dict(tokenizer="", template=None, column="text", chat=None, learn=None, window=None),
           **options})
    return masks.Masked(args, own)


def require_masks_of_a_column(own, size_of, begins=0, ends=False):
    """A token that has one of the column's characters is learned. The end, if it follows them.

    size_of: function of a token, its length in bytes. begins: how many tokens the tokenizer puts
    before a text. ends: does it end a text itself?"""
    texts = ["", "caf\u00e9 ", "\U0001f31e\U0001f31e sun", "\n\n", " the sun"]
    for a, b in itertools.product(texts, texts):
        row = dict(q=a, a=b)
        for template, at_the_end in (("Q: {q}\nA: {a}", True), ("Q: {q}{a}\n", False)):
            text = render(template, row, "")
            masked = job(own, template=template, learn="a")
            if not b.strip():  # an empty answer
                assert masked.document(row, "") is None
                continue
            tokens = masked.encode(masked.document(row, ""), own)
            ids = [*own.encode(text)]
            assert tokens["token"].tolist() == ids + (not ends) * [own.end]
            assert tokens["learned"][-1] == at_the_end
            chars = [i for i, char in enumerate(text) for _ in char.encode()]  # of each byte
            start = len(template.split("{a}")[0].format(**row))
            at = 0
            for token, learned in tokens.tolist()[begins:-1]:
                mine = chars[at:at + size_of(token)]
                assert learned == any(start <= i < start + len(b) for i in mine), (text, at)
                at += len(mine)
            assert at == len(chars)


@pytest.mark.parametrize("name", ["bytes", "gpt2"])
def test_learn_masks_a_columns_characters_and_keeps_the_tokens(monkeypatch, name):
    def size_of(token):
        return 1 if name == "bytes" else len(gpt2_bpe().decode_single_token_bytes(token))

    if name == "gpt2":
        gpt2_or_skip(monkeypatch)
    require_masks_of_a_column(encoder(name), size_of)


def documents_of(directory, split, window):
    """Tokens and masks of a split's files, one after the other."""
    paths = sorted(directory.glob(f"*{split}*.bin"))
    tokens = [np.fromfile(path, np.uint16, offset=1024 * ("x_" in path.name)) for path in paths]
    masks = [np.fromfile(path.with_suffix(".mask"), np.uint8) for path in paths]
    assert list(map(len, tokens)) == list(map(len, masks))
    more = int(window > 1)  # for the last window's last target
    assert not any(mask[len(mask) - more:].any() for mask in masks)
    files = open_split(directory, split)  # prepare.json counts as many
    assert [mask.tolist() for mask in open_masks(files)] == [mask.tolist() for mask in masks]
    return [np.concatenate([part[:len(part) - more] for part in both]) for both in (tokens, masks)]


@pytest.mark.parametrize("window", [1, 32])
def test_masks_are_split_sharded_and_go_on_after_a_kill_with_their_tokens(tmp_path, monkeypatch,
                                                                          capfd, window):
    monkeypatch.setattr(prepare_py, "CHUNK", 500)
    monkeypatch.setattr(prepare_py, "MANY", 1)
    rows = [{"q": f"what is {i}?" * (1 + i % 3), "a": "xyz" * i} for i in range(60)]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    out = tmp_path / "out"
    argv = ["x", path, "--tokenizer=bytes", "--template=Q: {q} A: {a}", "--learn=a",
            "--shard_tokens=1500", "--val_fraction=0.3", "--workers=1"]
    argv += [f"--window={window}"] * (window > 1)
    run_prepare([*argv, f"--out={tmp_path}/whole"], masks.main)
    share = re.search(r"\S+% of the tokens are learned", capfd.readouterr().out)[0]
    expected = files_of(tmp_path / "whole")
    assert json.loads(expected["meta.json"]).get("window", 1) == window

    seen = []
    for split in ("train", "val"):
        tokens, mask = documents_of(tmp_path / "whole", split, window)
        assert f"x_{split}_000002.bin" in expected
        assert len(expected[f"x_{split}_000001.mask"]) % window == (window > 1)
        at = 0
        while at < len(tokens):
            prompt, _, answer = split_documents(tokens[at:])[0].partition(b" A: ")
            start, end = len(prompt) + 4, len(prompt) + 5 + len(answer)
            size = end + -end % window
            assert np.flatnonzero(mask[at:at + size]).tolist() == [*range(start, end)]
            assert (tokens[at + end:at + size] == 256).all()
            seen.append({"q": prompt.decode()[3:], "a": answer.decode()})
            at += size
    assert sorted(seen, key=rows.index) == rows[1:]  # the first has an empty answer

    argv.append(f"--out={out}")
    kills, said = starts_until_done(argv, tmp_path / "workers", capfd, main=masks.main)
    assert files_of(out) == expected and kills > 15 and share in said
    assert "learn" in refused(run_prepare, [*argv, "--learn=q"], masks.main)
    plain = [one for one in argv if "learn" not in str(one) and "window" not in str(one)]
    assert "another " in refused(run_prepare, plain)

    run_prepare(argv, masks.main)  # it is done, and says so
    for path in out.glob("*.mask"):
        path.unlink()
    assert ".mask: it is missing" in refused(run_prepare, argv, masks.main)


def test_what_is_hashed_of_a_text_with_spans_stays():
    """Another string would put it into another split."""
    own = encoder("bytes")
    for learn, key in (("a", '["\u00e9t\u00e9", [[0, 1]]]'), (None, "\u00e9t\u00e9")):
        masked = job(own, template="{a}t\u00e9", learn=learn, window=8)
        assert masked.key(masked.document({"a": "\u00e9"}, "")) == key


def test_few_windows_are_cut_at_a_window(tmp_path):
    """Where val gets the end of the tokens; and without --learn all but the padding counts."""
    (tmp_path / "a.txt").write_text("abc" * 233)
    p = prepare([tmp_path / "a.txt"], tmp_path / "o", COMMAND, window=32)
    assert p.returncode == 0 and "99.0% of the tokens are learned" in p.stdout, p.stdout
    (train, ours), (val, theirs) = (documents_of(tmp_path / "o", s, 32) for s in ("train", "val"))
    assert (len(train), len(val)) == (608, 96)
    assert np.concatenate([ours, theirs]).tolist() == [0] + [1] * 699 + [0] * 4

    os.remove(tmp_path / "o/train.mask")
    os.remove(tmp_path / "o/val.mask")
    for split in ("train", "val"):  # padding would be learned
        assert "it is missing" in refused(open_masks, open_split(tmp_path / "o", split))
    shutil.rmtree(tmp_path / "o")
    (tmp_path / "o").mkdir()
    (tmp_path / "o/train.mask").touch()  # of tokens that were there
    p = prepare([tmp_path / "a.txt"], tmp_path / "o")
    assert p.returncode == 1 and "train.mask" in p.stderr

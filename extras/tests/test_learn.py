"""
--learn, --special and --window of extras/masks.py: masks by hand, and of chats as transformers'.

    python -m pytest -q extras/tests/test_learn.py
"""

import itertools
import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import test_prepare
from harness import HERE, refused
from test_hf_tokenizer import make
from test_prepare import files_of, run_prepare, split_documents, starts_until_done, write_jsonl

from data import prepare as prepare_py
from data.documents import render
from data.tokenizer import encoder
from extras import masks

gpt2 = test_prepare.gpt2  # a fixture


def job(own, **options):
    """A Job with masks, as extras/masks.py makes it of its options."""
    args = SimpleNamespace(
        **{**dict(tokenizer="", template=None, column="text", learn=None, window=None,
                  special=None), **options})
    return masks.Masked(args, own)


OF_FILES = dict(  # {name: the tokenizer in a file}
    file={},
    untrimmed=dict(trim=False),
    ends=dict(last="<|im_end|>"),  # as Gemma's may
    spaces=dict(learned=["sun  \n\n  the", "A:  "]),
)


@pytest.mark.parametrize("name", ["bytes", "gpt2", *OF_FILES])
def test_learn_masks_a_columns_characters_and_keeps_the_tokens(tmp_path, request, name):
    """A token that has one of the column's characters is learned. The end, if it follows them."""
    if name == "gpt2":
        bpe = request.getfixturevalue("gpt2")
    is_file = name in OF_FILES
    hf = make(tmp_path, **OF_FILES[name]) if is_file else None
    own = encoder(str(tmp_path) if is_file else name)

    def size_of(token):
        if is_file:
            return len(hf.id_to_token(token))
        return 1 if name == "bytes" else len(bpe.decode_single_token_bytes(token))

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
            assert tokens["token"].tolist() == ids + (name != "ends") * [own.end]
            assert tokens["learned"][-1] == at_the_end
            chars = [i for i, char in enumerate(text) for _ in char.encode()]  # of each byte
            start = len(template.split("{a}")[0].format(**row))
            at = 0
            for token, learned in tokens.tolist()[is_file:-1]:  # a file's begins with <s>
                mine = chars[at:at + size_of(token)]
                assert learned == any(start <= i < start + len(b) for i in mine), (text, at)
                at += len(mine)
            assert at == len(chars)


def documents_of(directory, split, window):
    """Tokens and masks of a split's files, one after the other."""
    paths = sorted(directory.glob(f"*{split}*.bin"))
    tokens = [np.fromfile(path, np.uint16, offset=1024 * ("x_" in path.name)) for path in paths]
    masks = [np.fromfile(path.with_suffix(".mask"), np.uint8) for path in paths]
    more = int(window > 1)  # for the last window's last target
    assert not any(mask[len(mask) - more:].any() for mask in masks)
    return [np.concatenate([part[:len(part) - more] for part in both]) for both in (tokens, masks)]


@pytest.mark.parametrize("window", [1, 32])
def test_masks_are_split_sharded_and_go_on_after_a_kill_with_their_tokens(tmp_path, monkeypatch,
                                                                          capfd, window):
    monkeypatch.setattr(prepare_py, "CHUNK", 2000)
    monkeypatch.setattr(prepare_py, "MANY", 1)
    rows = [{"q": f"what is {i}?" * (1 + i % 3), "a": "xyz" * i} for i in range(60)]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    out = tmp_path / "out"
    argv = ["x", path, "--tokenizer=bytes", "--template=Q: {q} A: {a}", "--learn=a",
            "--shard_tokens=3000", "--val_fraction=0.3", "--workers=1"]
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
    if window == 1:
        return

    argv.append(f"--out={out}")
    kills, said = starts_until_done(argv, tmp_path / "workers", capfd, main=masks.main)
    assert files_of(out) == expected and kills > 10 and share in said
    assert "learn" in refused(run_prepare, [*argv, "--learn=q"], masks.main)
    plain = [one for one in argv if "learn" not in str(one) and "window" not in str(one)]
    assert "learn" in refused(run_prepare, plain)


def test_few_windows_are_cut_at_a_window(tmp_path, capsys):
    """Where val gets the end of the tokens; and without --learn all but the padding counts."""
    (tmp_path / "a.txt").write_text("abc" * 233)
    argv = ["x", tmp_path / "a.txt", "--tokenizer=bytes", "--window=32", "--workers=1"]
    run_prepare([*argv, f"--out={tmp_path}/o"], masks.main)
    assert "99.0% of the tokens are learned" in capsys.readouterr().out
    (train, ours), (val, theirs) = (documents_of(tmp_path / "o", s, 32) for s in ("train", "val"))
    assert (len(train), len(val)) == (608, 96)
    assert np.concatenate([ours, theirs]).tolist() == [0] + [1] * 699 + [0] * 4


def test_learn_of_two_columns_leaves_a_row_out_if_the_last_is_empty():
    own = encoder("bytes")
    masked = job(own, template="{a}|{b}|{c}.", learn="a,c")
    assert masked.document(dict(a="xx", b="yyyy", c=" \n"), "") is None
    tokens = masked.encode(masked.document(dict(a="xx", b="yyyy", c="zz"), ""), own)
    assert tokens["token"].tolist() == [*b"xx|yyyy|zz.", 256]
    assert tokens["token"][tokens["learned"] == 1].tolist() == [*b"xxzz"]
    keys = {masked.key(masks.Document("xyz", [(i, 3)])) for i in range(3)}
    assert len(keys) == 3  # so their CRC knows that an answer begins elsewhere


# ---------- chats, by the recipe of extras/docs/masks.md ------------------------------

ANSWERS = " Me:\n\u00e9t\u00e9 \U0001f31e. ", "Yes", "No \u00e9"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
CHATML = (
    "{% for m in messages %}{% if m.role == 'user' %}" + TURN + "{% else %}<|im_start|>assistant\n"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{{ '\n' }}{% endif %}{% endfor %}"
    + PROMPT)


def chats(i):
    """A conversation of one to three turns."""
    turns = [[{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": answer}]
             for answer in ANSWERS]
    return sum(turns[:1 + i % 3], [])


def test_special_tokens_of_chats_are_transformers_and_only_answers_are_learned(
        tmp_path, monkeypatch, capsys):
    """So is the mask, where the template says what an answer is."""
    transformers = pytest.importorskip("transformers")
    hf = make(tmp_path / "t", CHATML, trim=False)
    # Nobody asked for a greeting, and an empty answer would teach the model to end at once.
    nothing = [{"role": "assistant", "content": "Hi"}, chats(0)[0], {**chats(0)[1], "content": " "}]
    write_jsonl(tmp_path / "chats.jsonl", [{"messages": chats(2)}, {"messages": nothing}])
    monkeypatch.chdir(tmp_path)
    page = Path(HERE, "extras/docs/masks.md").read_text()
    recipe = re.search(r"^```python\n(import json.*?)^```", page, re.M | re.S)[1]
    recipe = recipe.replace("HuggingFaceTB/SmolLM2-135M-Instruct", str(tmp_path / "t"))
    exec(recipe, {})
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(rows) == 3

    own = encoder(str(tmp_path / "t"))
    masked = job(own, template="{prompt}{answer}", learn="answer", special=True)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / "t")
    for turn, row in enumerate(rows):
        tokens = masked.encode(masked.document(row, ""), own)
        found = theirs.apply_chat_template(
            chats(2)[:2 * turn + 2], return_dict=True, return_assistant_tokens_mask=True)
        assert tokens["token"].tolist() == found["input_ids"][:len(tokens)]
        rest = found["input_ids"][len(tokens):]
        assert hf.decode(rest, skip_special_tokens=False) in ("", "\n")  # nobody says it
        said = hf.decode(tokens["token"][tokens["learned"] == 1], skip_special_tokens=False)
        assert said == f"{ANSWERS[turn]}<|im_end|>"
        last = np.flatnonzero(tokens["learned"])[0]
        assert tokens["learned"].tolist()[last:] == found["assistant_masks"][last:len(tokens)]
        assert found["assistant_masks"][last - 1] == 0
        assert not any(found["assistant_masks"][len(tokens):])

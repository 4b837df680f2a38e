"""
Which tokens are learned: chats and --learn of data/prepare.py, and the masks that it writes.

    python -m pytest -q extras/tests/test_chat.py
"""

import itertools
import json
import multiprocessing
import os
import re
import shutil
import signal
from glob import glob

import numpy as np
import pytest
from harness import HERE, copied, refused, script, shell
from test_data import (
    files_of,
    gpt2_or_skip,
    prepare,
    prepared,
    run_prepare,
    split_documents,
    write_jsonl,
)

from data import prepare as prepare_py
from data.documents import render
from data.files import STATE, open_masks, open_split
from data.tokenizer import encoder, gpt2_bpe
from extras.chat import chat_of, message

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

JOB = prepare_py.Job("", np.dtype(np.uint16), 0.5, has_mask=True)
SYSTEM, HI, HELLO, SUN, YES = (
    {"role": role, "content": text}
    for role, text in (("system", "Be brief."), ("user", "Hi, who is it?"),
                       ("assistant", " Me:\n\u00e9t\u00e9 \U0001f31e. "), ("user", "Sun?"),
                       ("assistant", "Yes")))

PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
CHATML = "{% for m in messages %}" + TURN + "{% endfor %}" + PROMPT
GENERATION = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}" + PROMPT)
DEFAULT = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are kind.<|im_end|>\n{% endif %}"
    + CHATML)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start|>{{ m.role }}<|stop|>\n\n"
    "{{ m.content | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|stop|>\n\n{% endif %}")
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles alternate') }}"
    "{% endif %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}")
PLAIN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}")
# As Qwen3's: the last turn says that it thought of nothing, earlier ones do not.
THINKS = CHATML.replace(
    "{{ m.content }}",
    "{% if loop.last and m.role == 'assistant' %}<think></think>{% endif %}{{ m.content }}")
FORGETS = CHATML.replace(PROMPT, PROMPT.replace("assistant\n", "assistant\n<think>"))


def make(path, template, end="<|im_end|>", metaspace=False, trim=True, last=""):
    """A tokenizer trained on the spot, with a chat template, as a model's directory has it.
    last: a special token that it puts behind each text."""
    kind = tokenizers.pre_tokenizers.Metaspace() if metaspace else \
        tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    hf = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=metaspace))
    hf.pre_tokenizer = kind
    hf.decoder = tokenizers.decoders.ByteFallback() if metaspace else \
        tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "</s>", "[INST]", "[/INST]", "<|im_start|>", "<|im_end|>", "<|start|>",
               "<|stop|>", "<|eot|>"]
    bytes_ = [f"<0x{i:02X}>" for i in range(256)] if metaspace else []
    hf.train_from_iterator(["Be brief", "the sun", "who is it? ", ". \n\n", "Yes: Yes"] * 9,
                           tokenizers.trainers.BpeTrainer(
        vocab_size=700, special_tokens=special + bytes_, show_progress=False,
        initial_alphabet=alphabet if not metaspace else []))
    # As Llama 3's: a text begins with <s>, and a token's place in it is without its spaces.
    hf.post_processor = tokenizers.processors.Sequence([
        tokenizers.processors.ByteLevel(trim_offsets=trim),
        tokenizers.processors.TemplateProcessing(
            single=f"<s> $A {last}".strip(),
            special_tokens=[(token, hf.token_to_id(token)) for token in ("<s>", end)])])
    path.mkdir()
    hf.enable_truncation(9)  # some files ask for both
    hf.enable_padding(length=9)
    hf.save(str(path / "tokenizer.json"))
    hf.no_truncation()
    hf.no_padding()
    config = dict(eos_token=end, bos_token="<s>", tokenizer_class="PreTrainedTokenizerFast")
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "chat_template.jinja").write_text(template)
    return hf


def learned_parts(tokens, decode):
    """The text of each run of learned tokens."""
    runs = itertools.groupby(tokens.tolist(), key=lambda item: item[1])
    return [decode([token for token, _ in run]) for learned, run in runs if learned]


def masked(messages, path):
    encoder.cache_clear()
    chat = chat_of("text", {"messages": messages}, "row 1")
    own = encoder(str(path))
    return [prepare_py.items_with_mask(document, own, JOB) for document in chat.documents(own)]


ALL = [SYSTEM, HI, HELLO, SUN, YES]
SAID = [" Me:\n\u00e9t\u00e9 \U0001f31e. ", "Yes"]


@pytest.mark.parametrize("name, template, messages, expected", [
    ("chatml", CHATML, ALL, [said + "<|im_end|>" for said in SAID]),
    ("default", DEFAULT, ALL[1:], [said + "<|im_end|>" for said in SAID]),
    ("generation", GENERATION, ALL, [said + "<|im_end|>" for said in SAID]),
    ("llama3", LLAMA3, ALL, [said.strip() + "<|eot|>" for said in SAID]),
    ("mistral", MISTRAL, ALL[1:], [" " + said + "</s>" for said in SAID]),
    ("plain", PLAIN, ALL, [f" {said}\n" for said in SAID]),
    ("greeting", CHATML, [YES, *ALL[1:]], [said + "<|im_end|>" for said in SAID]),
    ("unanswered", CHATML, ALL[:-1], [SAID[0] + "<|im_end|>"]),
    ("twice", CHATML, [HI, HELLO, YES], [said + "<|im_end|>" for said in SAID]),
])
def test_chat_learns_what_the_assistant_says(tmp_path, name, template, messages, expected):
    """Tokens, and where the template says so the mask too, are those of transformers, which
    loses a turn that begins with a token of a trimmed space."""
    hf = make(tmp_path / "t", template, end="</s>" if name == "mistral" else "<|im_end|>",
              metaspace=name == "mistral", trim=name != "generation")
    tokens, = masked(messages, tmp_path / "t")
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / "t")
    told = dict(tokenize=True, return_dict=True, return_assistant_tokens_mask=name == "generation")
    found = theirs.apply_chat_template(messages, **told)
    assert tokens["token"].tolist() == found["input_ids"]

    def decode(ids):
        return hf.decode(ids, skip_special_tokens=False).replace("\u2581", " ")

    assert learned_parts(tokens, decode) == expected
    if name == "generation":
        assert tokens["learned"].tolist() == found["assistant_masks"]


def test_chat_whose_template_rewrites_earlier_turns_becomes_one_document_a_turn(tmp_path):
    hf = make(tmp_path / "t", THINKS)
    documents = masked(ALL, tmp_path / "t")
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / "t")
    for tokens, said, end in zip(documents, SAID, (3, 5), strict=True):
        text = theirs.apply_chat_template(ALL[:end], tokenize=False)
        assert tokens["token"].tolist() == hf.encode(text, add_special_tokens=False).ids

        def decode(ids):
            return hf.decode(ids, skip_special_tokens=False)

        assert learned_parts(tokens, decode) == [f"<think></think>{said}<|im_end|>"]


def test_chat_rows_are_messages_or_sharegpts(tmp_path):
    parts = [{"type": "text", "text": "Sun"}, {"type": "text", "text": "?", "image": None}]
    rows = [{"messages": [HI, HELLO, SUN, YES]},
            {"conversations": [{"from": "human", "value": HI["content"]},
                               {"from": "gpt", "value": HELLO["content"], "weight": 1},
                               {"role": "user", "content": parts}, {**YES, "tool_calls": None}]}]
    found = []
    for row in rows:
        messages = chat_of("text", row, "").messages
        found.append([(one["role"], one["content"]) for one in messages])
    assert found[0] == found[1] == [(m["role"], m["content"]) for m in ALL[1:]]
    both = {"role": None, "content": None, "from": "gpt", "value": "x"}  # of a file with both
    assert message(both, "")["content"] == "x"
    assert chat_of("other", {"other": rows[0]["messages"]}, "").messages == ALL[1:]
    for nothing in ([], None, [HI], [HELLO, HI]):  # nobody asked for the first turn
        assert chat_of("text", {"messages": nothing}, "") is None
    for row, remedy in (({"body": ""}, '{"messages": [...]}'),
                        ({"id": 1, "talk": [HI]}, "--column for one of talk")):
        line = refused(chat_of, "text", row, "row 7")
        assert "row 7: no column" in line and line.endswith(remedy)
    odd = [3, {"role": "user", "content": 3}, {"role": "user", "content": [{"type": "image"}]},
           {"from": None, "value": "x"}, {**YES, "tool_calls": [{"name": "f"}]}]
    for one in odd:
        assert "row 7: " in refused(message, one, "row 7")


def test_chat_rows_of_a_file_of_several_kinds(tmp_path):
    """`datasets` gives each row the columns, and each message the keys, that others have."""
    datasets = pytest.importorskip("datasets")
    gpts = [{"from": "human", "value": HI["content"]}, {"from": "gpt", "value": HELLO["content"]}]
    odd = [{"role": "human", "content": HI["content"], "name": "Ann"},
           {"role": "gpt", "content": HELLO["content"]}]
    rows = [{"messages": [HI, HELLO]}, {"conversations": gpts}, {"messages": gpts},
            {"messages": odd}]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    found = datasets.load_dataset("json", data_files=str(path), split="train", streaming=True)
    for row in found:
        assert row.keys() == {"messages", "conversations"}
        messages = chat_of("text", row, "").messages
        assert [(one["role"], one["content"]) for one in messages] == [
            ("user", HI["content"]), ("assistant", HELLO["content"])]
    assert messages[0]["name"] == "Ann"


def test_chat_mistakes_are_one_clear_line(tmp_path):
    """From a worker too: a template that refuses the roles, or whose prompt is not its turn's."""
    for name, template in (("strict", MISTRAL), ("forgets", FORGETS)):
        make(tmp_path / name, template)
    hf = tmp_path / "without" / "tokenizer.json"
    make(tmp_path / "without", "")
    (tmp_path / "without/chat_template.jinja").unlink()
    chats = write_jsonl(tmp_path / "chats.jsonl", [{"messages": [SYSTEM, HI, HELLO]}])
    for name, reason in dict(strict="roles alternate", forgets="<think>").items():
        p = prepare([chats, "--chat"], tmp_path / "o", tokenizer=tmp_path / name, workers=1)
        assert p.returncode == 1 and p.stderr.count("\n") == 1, p.stderr
        assert reason in p.stderr and "Be brief" in p.stderr and not (tmp_path / "o").exists()
    for argv, tokenizer, said in ((["--chat"], hf, "no chat template"),
                                  (["--chat"], "bytes", "no chat template"),
                                  (["--chat", "--learn=a"], hf, "--learn"),
                                  (["--learn=a,c", "--template={a} {b}"], "bytes", "--learn=a,c"),
                                  (["--learn=a"], "bytes", "--template"),
                                  (["--window=0"], "bytes", "--window"),
                                  (["--window=9", "--shard_tokens=8"], "bytes", "--window")):
        p = prepare([chats, *argv], tmp_path / "o", tokenizer=tokenizer)
        assert p.returncode == 1 and said in p.stderr and p.stderr.count("\n") == 1, p.stderr


@pytest.mark.parametrize("name", ["bytes", "gpt2", "file", "ends"])
def test_learn_masks_a_columns_characters_and_keeps_the_tokens(tmp_path, monkeypatch, name):
    """A token that has one of them is learned. The end, if it follows them."""
    is_file = name in ("file", "ends")  # which ends a text itself, as Gemma's may
    hf = make(tmp_path / name, CHATML, last="<|im_end|>" if name == "ends" else "")
    if name == "gpt2":
        gpt2_or_skip(monkeypatch)
    own = encoder(str(tmp_path / name) if is_file else name)
    texts = ["", "caf\u00e9 ", "\U0001f31e\U0001f31e sun", "\n\n", " the sun"]
    for a, b in itertools.product(texts, texts):
        row = dict(q=a, a=b)
        for template, ends in (("Q: {q}\nA: {a}", True), ("Q: {q}{a}\n", False)):
            text = render(template, [], row, "").text
            tokens = prepare_py.items_with_mask(render(template, ["a"], row, ""), own, JOB)
            ids = [*own.encode(text)]
            assert tokens["token"].tolist() == ids + (name != "ends") * [own.end]
            assert tokens["learned"][-1] == ends
            chars = [i for i, char in enumerate(text) for _ in char.encode()]  # of each byte
            start = len(template.split("{a}")[0].format(**row))
            at = 0
            for token, learned in tokens.tolist()[is_file:-1]:  # without <s>
                mine = chars[at:at + len(piece(name, hf, token))]
                assert learned == any(start <= i < start + len(b) for i in mine), (text, at)
                at += len(mine)
            assert at == len(chars)


def piece(name, hf, token):
    """A token's bytes, or as many characters."""
    if name == "gpt2":
        return gpt2_bpe().decode_single_token_bytes(token)
    return "x" if name == "bytes" else hf.id_to_token(token)


def test_every_prepare_of_extras_runs_and_has_help():
    names = glob("extras/data/*/prepare.py", root_dir=HERE)
    assert names
    for path in names:
        p = script(path, "--help")
        assert p.returncode == 0 and f"python {path}" in p.stdout


def test_prepare_takes_alpacas_template(tmp_path):
    pytest.importorskip("datasets")
    rows = [dict(instruction="Say", input="it", output="what")] * 2
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    train, val = prepared([path], tmp_path / "o", command=["extras/data/alpaca/prepare.py"])
    text = b"### Instruction:\nSay\nit\n### Response:\nwhat"
    assert split_documents(train + val) == [text] * 2
    assert set(open_masks(open_split(tmp_path / "o", "train"))) == set()
    prepared([path], tmp_path / "o", command=["extras/data/alpaca/prepare.py"], learn="output")
    for split in ("train", "val"):
        tokens, learned = documents_of(tmp_path / "o", split, window=1)
        assert bytes(tokens[learned == 1][:4].astype(np.uint8)) in b"what"


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
            "--shard_tokens=1500", "--val_fraction=0.3", "--workers=1", f"--window={window}"]
    run_prepare([*argv, f"--out={tmp_path}/whole"])
    share = re.search(r"\S+% of the tokens are learned", capfd.readouterr().out)[0]
    expected = files_of(tmp_path / "whole")
    assert json.loads(expected["meta.json"]).get("window", 1) == window

    seen = []
    for split in ("train", "val"):
        tokens, mask = documents_of(tmp_path / "whole", split, window)
        assert f"x_{split}_000002.bin" in expected
        assert len(expected[f"x_{split}_000001.mask"]) == 1500 - 1500 % window + (window > 1)
        at = 0
        while at < len(tokens):
            prompt, _, answer = split_documents(tokens[at:])[0].partition(b" A: ")
            start, end = len(prompt) + 4, len(prompt) + 5 + len(answer)
            size = end + -end % window
            assert np.flatnonzero(mask[at:at + size]).tolist() == [*range(start, end)]
            assert (tokens[at + end:at + size] == 256).all()
            seen.append({"q": prompt.decode()[3:], "a": answer.decode()})
            at += size
    assert sorted(seen, key=rows.index) == rows

    argv.append(f"--out={out}")
    for renames in itertools.count(1, 3):
        told = (argv, renames, tmp_path / "workers")
        p = multiprocessing.get_context("fork").Process(target=run_prepare, args=told)
        p.start()
        p.join(60)
        said = capfd.readouterr().out
        if p.exitcode == 0:
            break
        assert p.exitcode == -signal.SIGKILL
        assert "learn" in refused(run_prepare, [*argv[:-1], "--learn=q", argv[-1]])
    assert files_of(out) == expected and renames > 4 and share in said

    run_prepare(argv)  # it is done, and says so
    for path in out.glob("*.mask"):
        path.unlink()
    assert ".mask: it is missing" in refused(run_prepare, argv)


def test_git_sees_nothing_of_what_prepare_writes(tmp_path):
    """A clone stays clean, so `git add -A` adds no data: tokens, masks, copies of a tokenizer."""
    git = shutil.which("git") or pytest.skip("there is no git")
    clone = copied(tmp_path / "clone")
    make(tmp_path / "t", CHATML)
    (tmp_path / "t/special_tokens_map.json").write_text("{}")
    rows = [{"messages": [{**SUN, "content": f"{i}?"}, YES]} for i in range(9)]
    chats = write_jsonl(tmp_path / "chats.jsonl", rows)

    def changed():
        p = shell(git, "status", "--porcelain", cwd=clone)
        assert p.returncode == 0, p.stderr
        return p.stdout

    shell(git, "init", cwd=clone)
    assert changed()
    shell(git, "add", ".", cwd=clone)
    shell(git, "-c", "user.name=x", "-c", "user.email=x@x", "commit", "-m", "x", cwd=clone)
    assert not changed()
    out = clone / "data" / "chats"
    p = prepare([chats, "--chat"], out, tokenizer=tmp_path / "t", shard_tokens=60)
    assert p.returncode == 0, p.stderr
    (out / STATE).touch()  # what a kill leaves
    (out / "train.bin.tmp").touch()
    assert len(list(out.iterdir())) > 11 and not changed()
    out.rename(clone / "data" / "python_stdlib" / "chats")  # of the name python_stdlib/chats
    assert not changed()


def test_few_windows_are_cut_at_a_window(tmp_path):
    """Where val gets the end of the tokens; and without --learn all but the padding counts."""
    (tmp_path / "a.txt").write_text("abc" * 233)
    p = prepare([tmp_path / "a.txt"], tmp_path / "o", window=32)
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

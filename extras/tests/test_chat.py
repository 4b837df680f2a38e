"""
Which tokens of a chat are learned (extras/chat.py), and other data that only extras/ prepares.

    python -m pytest -q extras/tests/test_chat.py
"""

import itertools
import json
import random
import re
import shutil
from glob import glob

import numpy as np
import pytest
from harness import HERE, copied, refused, script, shell
from test_data import prepare, prepared, run_prepare, split_documents, write_jsonl
from test_learn import COMMAND, documents_of, job, require_masks_of_a_column

from data import prepare as prepare_py
from data.documents import rows
from data.files import RECORD, open_masks, open_split
from data.tokenizer import encoder
from data.tokenizer import tokenizer as sampling
from extras import chat, hf_tokenizer, masks
from extras.chat import chat_of, message

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

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


def make(path, template, end="<|im_end|>", metaspace=False, trim=True, last="", **parts):
    """A tokenizer trained on the spot, with a chat template, as a model's directory has it.
    last: a special token that it puts behind each text. parts: others than those below."""
    kind = tokenizers.pre_tokenizers.Metaspace() if metaspace else \
        tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    hf = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=metaspace))
    for part, value in {"pre_tokenizer": kind, **parts}.items():
        setattr(hf, part, value)
    hf.decoder = tokenizers.decoders.ByteFallback() if metaspace else \
        tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "</s>", "[INST]", "[/INST]", "<|im_start|>", "<|im_end|>", "<|start|>",
               "<|stop|>", "<|eot|>"]
    bytes_ = [f"<0x{i:02X}>" for i in range(256)] if metaspace else []
    texts = ["Be brief", "the sun", "who is it? ", ". \n\n", "Yes: Yes", ".\n", "_\n"]
    hf.train_from_iterator(texts * 9, tokenizers.trainers.BpeTrainer(
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
    own = encoder(str(path))
    masks = job(own, chat=True)
    chat = masks.document({"messages": messages}, "row 1")
    return [masks.items(part, own) for part in chat.parts(own)]


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
    ("left out", CHATML, [HI, {**HELLO, "weight": 0}, SUN, YES], [SAID[1] + "<|im_end|>"]),
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
    left_out, = masked([*ALL[:4], {**YES, "train": False}], tmp_path / "t")
    assert left_out.tolist() == documents[0].tolist()


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
    said = [{"role": "user", "content": "\u00e9"}, YES]
    key = '[{"role": "user", "content": "\u00e9"}, {"role": "assistant", "content": "Yes"}]'
    assert chat_of("text", {"messages": said}, "").key == key  # its hash decides the split
    both = {"role": None, "content": None, "from": "gpt", "value": "x"}  # of a file with both
    assert message(both, "")["content"] == "x"
    assert chat_of("other", {"other": rows[0]["messages"]}, "").messages == ALL[1:]
    for nothing in ([], None, [HI], [HELLO, HI],  # nobody asked for the first turn
                    [HI, {**HELLO, "weight": 0.0}]):
        assert chat_of("text", {"messages": nothing}, "") is None
    for other, roles in (("bot", "bot"), ("model", "model"), ("observation", "observation"),
                         ("prompter", "prompter"), ("Assistant", "Assistant")):
        for talk in ([HI, {**YES, "role": other}], [HI, HELLO, {"from": other, "value": "x"}, YES],
                     [{"role": other, "content": "x"}, HI, HELLO]):
            line = refused(chat_of, "text", {"messages": talk}, "row 7")
            assert line.startswith(f"row 7: the chat template gets no {roles}; rename a role to")
    both = [{"from": "function_call", "value": "f"}, {"from": "observation", "value": "x"}]
    line = refused(chat_of, "text", {"conversations": [HI, *both, YES]}, "row 7")
    assert "the chat template gets no function_call, observation;" in line
    for row, lists in (({"body": ""}, "none"), ({"id": 1, "talk": [HI]}, "talk")):
        line = refused(chat_of, "text", row, "row 7")
        assert "row 7: no column" in line and line.endswith(f"--column takes another: {lists}")
    call = {"name": "f", "arguments": "{}"}
    odd = [3, {"role": "user", "content": 3}, {"role": "user", "content": [{"type": "image"}]},
           {"from": None, "value": "x"}, {**YES, "tool_calls": [call]},
           {**YES, "function_call": call}, {**YES, "content": None, "function_call": call},
           {**SYSTEM, "tools": [call]}, {**HI, "images": ["a.png"]}, {**YES, "audio": {"id": "x"}},
           {"role": "user", "text": "Hi"}, {"role": "assistant", "content": None},
           {"from": "gpt", "value": None}, {"from": "gpt", "text": "Hi"}]
    for one in odd:
        assert "row 7: " in refused(message, one, "row 7")


def test_what_stands_beside_a_conversation_is_its_first_message_or_refused():
    told = {"role": "system", "content": SYSTEM["content"]}
    for key in ("system", "system_prompt"):
        row = {key: told["content"], "messages": [HI, HELLO], "tools": "[]", "images": None}
        assert chat_of("text", row, "").messages == [told, HI, HELLO]
    for nothing in ("", None):
        row = {"system": nothing, "tools": [], "messages": [HI, HELLO]}
        assert chat_of("text", row, "").messages == [HI, HELLO]
    for key, value in (("tools", '[{"name": "f"}]'), ("tools", [{"name": "f"}]),
                       ("functions", [{}]), ("images", ["a.png"]), ("image", "a.png")):
        line = refused(chat_of, "text", {"messages": [HI, HELLO], key: value}, "row 7")
        assert line.startswith("row 7: ") and key in line and "leave out" in line
    assert "row 7: " in refused(chat_of, "text", {"system": ["x"], "messages": [HI]}, "row 7")


@pytest.mark.parametrize("key", ["weight", "train", "training", "trainable", "loss"])
def test_a_turn_whose_flag_is_false_is_not_learned(tmp_path, key):
    make(tmp_path / "t", CHATML)
    expected, = masked([HI, {**HELLO, "weight": 0}, SUN, YES], tmp_path / "t")
    for no in (False, 0, "false", "False", "0"):
        tokens, = masked([HI, {**HELLO, key: no}, SUN, {**YES, key: True}], tmp_path / "t")
        assert tokens.tolist() == expected.tolist()
        assert chat_of("text", {"messages": [HI, {**HELLO, key: no}]}, "") is None


def test_a_row_with_an_empty_answer_is_left_out_and_counted(tmp_path):
    """Else the model learns to end at once. Of a turn that is not learned it may be empty."""
    make(tmp_path / "t", CHATML)
    empty = [{**YES, "content": text} for text in ("", " \n", [], [{"type": "text", "text": ""}])]
    for one in empty:
        for talk in ([HI, one], [HI, HELLO, SUN, one], [HI, one, SUN, YES]):
            assert chat_of("text", {"messages": talk}, "") is None
    for talk in ([empty[0], HI, HELLO], [HI, {**empty[0], "weight": 0}, SUN, YES],
                 [{**HI, "content": ""}, HELLO]):
        assert len(chat_of("text", {"messages": talk}, "").messages) == len(talk)
    chats = [[HI, HELLO], [HI, empty[0]], [HI, HELLO, SUN, empty[1]], [SUN, YES], [SUN, HELLO]]
    path = write_jsonl(tmp_path / "a.jsonl", [{"messages": talk} for talk in chats])
    answers = [{"q": "Sun?", "a": text} for text in ("Yes", "", " ", "No", "Me")]
    other = write_jsonl(tmp_path / "b.jsonl", answers)
    for source, options in ((path, ["--chat"]), (other, ["--template={q} {a}", "--learn=a"])):
        p = prepare([source, *options], tmp_path / source.stem, COMMAND, tokenizer=tmp_path / "t")
        assert p.returncode == 0 and "without text or answer, left out: 2\n" in p.stdout, p.stderr


@pytest.mark.parametrize("by", ["json", "datasets"])
def test_chat_rows_of_a_file_of_several_kinds(tmp_path, by):
    """`datasets` gives each row the columns, and each message the keys, that others have."""
    gpts = [{"from": "human", "value": HI["content"]}, {"from": "gpt", "value": HELLO["content"]}]
    odd = [{"role": "human", "content": HI["content"], "name": "Ann"},
           {"role": "gpt", "content": HELLO["content"], "weight": 1, "seen": True}]
    chats = [{"messages": [HI, HELLO]}, {"conversations": gpts}, {"messages": gpts},
             {"messages": odd}]
    path = write_jsonl(tmp_path / "a.jsonl", chats)
    found = [row for _, row in rows(str(path), "train", None)]
    if by == "datasets":
        datasets = pytest.importorskip("datasets")
        how = dict(data_files=str(path), split="train", streaming=True)
        found = datasets.load_dataset("json", **how)
    for row in found:
        messages = chat_of("text", row, "").messages
        assert [(one["role"], one["content"]) for one in messages] == [
            ("user", HI["content"]), ("assistant", HELLO["content"])]
    assert messages[0]["name"] == "Ann" and "weight" not in messages[1]


def test_chat_reads_what_a_file_says(tmp_path):
    """Half of a surrogate pair is ?; a number is no text; a later row may have no column; of a
    turn it may say that it is not learned."""
    path = tmp_path / "a.jsonl"
    chat = '{"messages": [{"role": "user", "content": %s}, {"role": "assistant", "content": "b"}]}'
    left_out = [chat.replace('"b"', f'"b", {key}') % '"a"' for key in (
        '"weight": 0', '"weight": 0.0', '"train": false', '"weight": null, "train": false')]
    path.write_text("\n".join([chat % r'"a\ud800"', '{"n": 1}', chat % "1e5", *left_out]))
    (_, first), (_, second), (where, third), *others = rows(str(path), "train", None)
    assert [chat_of("text", row, "") for _, row in others] == [None] * len(left_out)
    assert chat_of("text", first, "").messages[0]["content"] == "a?"
    assert chat_of("text", second, "") is None
    assert f"{path}: line 3: " in refused(chat_of, "text", third, where)


def test_chat_mistakes_are_one_clear_line(tmp_path):
    """From a worker too: a template that refuses the roles, or whose prompt is not its turn's."""
    for name, template in (("strict", MISTRAL), ("forgets", FORGETS)):
        make(tmp_path / name, template)
    hf = tmp_path / "without" / "tokenizer.json"
    make(tmp_path / "without", "")
    (tmp_path / "without/chat_template.jinja").unlink()
    chats = write_jsonl(tmp_path / "chats.jsonl", [{"messages": [SYSTEM, HI, HELLO]}])
    for name, reason in dict(strict="roles alternate", forgets="<think>").items():
        told = dict(command=COMMAND, tokenizer=tmp_path / name, workers=1)
        p = prepare([chats, "--chat"], tmp_path / "o", **told)
        assert p.returncode == 1 and p.stderr.count("\n") == 1, p.stderr
        assert reason in p.stderr and "Be brief" in p.stderr and not (tmp_path / "o").exists()
    for argv, tokenizer, said in ((["--chat"], hf, "no chat template"),
                                  (["--chat"], "bytes", "no chat template"),
                                  (["--chat", "--learn=a"], hf, "--learn"),
                                  (["--learn=a,c", "--template={a} {b}"], "bytes", "--learn=a,c"),
                                  (["--learn=a"], "bytes", "--template"),
                                  (["--window=0"], "bytes", "--window"),
                                  (["--window=1.5"], "bytes", "--window")):
        p = prepare([chats, *argv], tmp_path / "o", COMMAND, tokenizer=tokenizer)
        assert p.returncode == 1 and said in p.stderr and p.stderr.count("\n") == 1, p.stderr


@pytest.mark.parametrize("name", ["file", "ends"])
def test_learn_masks_a_columns_characters_by_a_file_s_tokenizer(tmp_path, name):
    """It may end a text itself, as Gemma's may."""
    hf = make(tmp_path / name, CHATML, last="<|im_end|>" if name == "ends" else "")
    require_masks_of_a_column(
        encoder(str(tmp_path / name)), lambda token: len(hf.id_to_token(token)),
        begins=1, ends=name == "ends")


def test_special_tokens_in_a_column_are_text_and_in_a_template_they_are_not(tmp_path):
    hf = make(tmp_path / "t", CHATML)
    own = encoder(str(tmp_path / "t"))
    text = "the </s>sun</s>, <|im_end|>"
    for _ in range(2):  # a chat in between changes nothing
        for ids in (own.encode(text), masks.places_of(text, own, False)[0]):
            assert hf.decode(list(ids), skip_special_tokens=True) == text
        ids, _ = masks.places_of(text, own, has_special_tokens=True)
        assert ids == hf.encode(text, add_special_tokens=False).ids
        assert ids.count(own.end) == 1


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
@pytest.mark.parametrize("is_finished", [True, False])
def test_another_tokenizer_of_the_same_path_is_refused(tmp_path, monkeypatch, capsys, file,
                                                       is_finished):
    """Else it is "prepared already", or one data set gets the tokens of two."""
    monkeypatch.setattr(prepare_py, "CHUNK", 500)
    monkeypatch.setattr(prepare_py, "MANY", 1)
    path = tmp_path / "t"
    make(path, CHATML)
    rows = [{"messages": [{**HI, "content": f"{i}?"}, HELLO]} for i in range(60)]
    chats = write_jsonl(tmp_path / "chats.jsonl", rows)
    argv = ["x", chats, "--chat", f"--tokenizer={path}", "--workers=1", "--shard_tokens=400",
            "--val_fraction=0.3", f"--out={tmp_path}/o"]
    run_prepare(argv, masks.main)
    record = tmp_path / "o" / RECORD
    if not is_finished:  # as after a kill behind its last shard
        record.write_text(json.dumps({**json.loads(record.read_text()), "finished": False}))
    before = (path / file).read_bytes()
    (path / file).write_bytes(before + b" ")
    assert f"{tmp_path}/o: prepared with another tokenizer.json" in refused(
        run_prepare, argv, masks.main)
    shutil.copytree(path, tmp_path / "new")  # the same content, with another date
    shutil.rmtree(path)
    shutil.move(tmp_path / "new", path)
    (path / file).write_bytes(before)
    capsys.readouterr()
    run_prepare(argv, masks.main)
    assert ("prepared already" in capsys.readouterr().out) == is_finished
    older = json.loads(record.read_text())
    del older["arguments"]["tokenizer.json"]  # of an earlier version
    record.write_text(json.dumps(older))
    run_prepare(argv, masks.main)
    assert "prepared already" in capsys.readouterr().out


def test_a_tokenizer_with_dropout_gives_the_same_tokens_each_time(tmp_path):
    hf = make(tmp_path / "t", CHATML)
    text = "Be brief, the sun: who is it? Yes" * 20
    expected = hf.encode(text, add_special_tokens=False).ids
    hf.model.dropout = 0.5
    hf.save(str(tmp_path / "t/tokenizer.json"))
    assert hf.encode(text, add_special_tokens=False).ids != expected
    own = encoder(str(tmp_path / "t"))
    encode, _, _ = sampling({"vocab_size": 700}, str(tmp_path / "t"))
    for _ in range(3):
        assert own.encode(text).tolist()[1:] == encode(text)[1:] == expected


@pytest.mark.parametrize("last", ["", "<|im_end|>", "<|im_end|> </s>"])
def test_a_prompt_is_not_ended_by_its_tokenizer(tmp_path, last):
    """But begun; and an end that the prompt has stays there."""
    hf = make(tmp_path / "t", CHATML)
    tokens = ("<s>", "</s>", "<|im_end|>")
    hf.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"<s> $A {last}".strip(),
        special_tokens=[(token, hf.token_to_id(token)) for token in tokens])
    hf.save(str(tmp_path / "t/tokenizer.json"))
    encode, decode, _ = sampling({"vocab_size": 700}, str(tmp_path / "t"))
    for text in ("the sun", "", "\n", "\u00e9 ", "Hi<|im_end|>", "<|im_end|>\n", "</s>"):
        alone = hf.encode(text, add_special_tokens=False).ids
        assert encode(text) == [hf.token_to_id("<s>"), *alone]
        assert len(hf.encode(text).ids) == 1 + len(alone) + len(last.split())


LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")


@pytest.mark.parametrize("name, cuts", [
    ("gpt2", " \n"), ("llama3", " \n"), ("words", " \n"), ("prefix", " "), ("metaspace", " "),
    ("whole", ""), ("llama2", ""), ("ends", "")])
def test_a_long_text_has_the_same_tokens_in_pieces(tmp_path, monkeypatch, name, cuts):
    """Cut before the white space where the tokenizer splits whatever stands there."""
    pre, norm = tokenizers.pre_tokenizers, tokenizers.normalizers
    whole = pre.ByteLevel(add_prefix_space=False, use_regex=False)
    split = pre.Split(tokenizers.Regex(LLAMA3_SPLIT), "isolated")
    llama2 = norm.Sequence([norm.Prepend("\u2581"), norm.Replace(" ", "\u2581")])
    hf = make(tmp_path / "t", CHATML, **dict(
        gpt2={},
        llama3=dict(pre_tokenizer=pre.Sequence([split, whole])),
        words=dict(pre_tokenizer=pre.Whitespace()),
        prefix=dict(pre_tokenizer=pre.ByteLevel(add_prefix_space=True)),
        metaspace=dict(metaspace=True),
        whole=dict(pre_tokenizer=whole),
        llama2=dict(metaspace=True, pre_tokenizer=None, normalizer=llama2),
        ends=dict(last="<|im_end|>"),
    )[name])
    hf.encode_special_tokens = True
    monkeypatch.setattr(hf_tokenizer, "PIECE", 50)
    own = hf_tokenizer.encoder_of(str(tmp_path / "t"))
    letters = "aB1_ \n\t\r.'s/-\u00e9\u0301\u65e5\u3002\u00a0\u3000\U0001f31e"
    odd = "".join(random.Random(0).choices(letters, k=9000))
    with open(chat.__file__) as f:
        code = f.read()
    for text in ("", odd, code, code.replace("\n", "\r\n"), code.replace(" ", "")):
        found = hf.encode(text)
        ids, places = masks.places_of(text, own, False)
        assert own.encode(text).tolist() == ids == found.ids
        assert places == found.offsets
    pieces = hf_tokenizer.pieces_of(hf).findall(odd)
    assert {piece[0] for piece in pieces[1:]} == {*cuts} and "".join(pieces) == odd


@pytest.mark.parametrize("name, text, share", [
    ("bpe", "ab \u65e5", 20), ("bpe", "ab cb", 17), ("words", "ab \u65e5", 20), ("words", "ab", 0),
    ("bytes", "ab \u65e5 \U0001f31e \0", 0), ("fallback", "ab \u65e5 \U0001f31e", 0),
    ("composed", "\u0301b a\u0301 e\u0301", 0),
    ("normal", "a\u0301b\t\uff21\u00a0 \1b e\u0302", 0), ("normal", "ab \u65e5", 20)])
def test_prepare_says_once_how_much_of_the_text_is_lost(tmp_path, monkeypatch, capsys, name, text,
                                                        share):
    """Characters that a tokenizer drops, or has its unknown token for; not those that it
    normalizes."""
    models, trainers = tokenizers.models, tokenizers.trainers
    special = ["</s>", "<unk>", "[UNK]"]
    how = dict(special_tokens=special, show_progress=False, vocab_size=300)
    kinds = {  # the model, its trainer, and what it learns
        "bpe": (models.BPE(), trainers.BpeTrainer(**how), "ab"),
        "words": (models.WordLevel(unk_token="[UNK]"), trainers.WordLevelTrainer(**how), "ab"),
        "normal": (models.Unigram(), trainers.UnigramTrainer(unk_token="<unk>", **how),
                   "\u00e1b a\u00ea")}
    path = tmp_path / "t"
    if name in kinds:
        model, trainer, learned = kinds[name]
        hf = tokenizers.Tokenizer(model)
        hf.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        if name == "normal":
            norm = tokenizers.normalizers
            hf.normalizer = norm.Sequence([norm.Nmt(), norm.NFKC(), norm.Lowercase()])
            hf.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
        hf.train_from_iterator([learned] * 9, trainer)
        path.mkdir()
        hf.save(str(path / "tokenizer.json"))
    else:
        more = dict(normalizer=tokenizers.normalizers.NFC()) if name == "composed" else {}
        make(path, CHATML, metaspace=name == "fallback", **more)
    monkeypatch.setattr(prepare_py, "CHUNK", 900)
    docs = [f"{text} " * 600] * 4
    docs += ["ab " * (len(docs[0]) // 3)] * 4  # of these nothing
    source = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in docs])
    run_prepare(["x", source, f"--tokenizer={path}", "--workers=1", f"--out={tmp_path}/o"])
    said = re.findall(r"about (\S+)% of the characters are lost", capsys.readouterr().out)
    assert [*map(float, said)] == ([pytest.approx(share / 2, abs=1)] if share else [])


def test_every_prepare_of_extras_runs_and_has_help():
    names = glob("extras/data/*/prepare.py", root_dir=HERE)
    assert names
    for path in names:
        p = script(path, "--help")
        assert p.returncode == 0 and f"python {path}" in p.stdout


def test_prepare_takes_alpacas_template(tmp_path):
    rows = [dict(instruction="Say", input="it", output="what")] * 2
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    train, val = prepared([path], tmp_path / "o", command=["extras/data/alpaca/prepare.py"])
    text = b"### Instruction:\nSay\nit\n### Response:\nwhat"
    assert split_documents(train + val) == [text] * 2
    assert open_masks(open_split(tmp_path / "o", "train")) == []
    prepared([path], tmp_path / "o", command=["extras/data/alpaca/prepare.py"], learn="output")
    for split in ("train", "val"):
        tokens, learned = documents_of(tmp_path / "o", split, window=1)
        assert bytes(tokens[learned == 1][:4].astype(np.uint8)) in b"what"


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
    p = prepare([chats, "--chat"], out, COMMAND, tokenizer=tmp_path / "t", shard_tokens=60)
    assert p.returncode == 0, p.stderr
    (out / "train.bin.tmp").touch()  # what a kill leaves
    assert len(list(out.iterdir())) > 9 and not changed()
    out.rename(clone / "data" / "python_stdlib" / "chats")  # of the name python_stdlib/chats
    assert not changed()

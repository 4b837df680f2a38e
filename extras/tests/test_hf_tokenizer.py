"""
Tokenizers of the `tokenizers` library: which text, end and tokenizer a run takes. Their masks are
in test_learn.py.

    python -m pytest -q extras/tests/test_hf_tokenizer.py
"""

import json
import os
import re
from functools import partial

import pytest
from harness import refused
from test_prepare import run_prepare, write_jsonl
from training import started

from configurator import load_config, resolve
from data.tokenizer import encoder, tokenizer
from extras import hf_tokenizer, masks
from ranks import World

tokenizers = pytest.importorskip("tokenizers")
pre, post = tokenizers.pre_tokenizers, tokenizers.processors

SPECIAL = ["<s>", "</s>", "[INST]", "[/INST]", "<|im_start|>", "<|im_end|>"]
TEXTS = ["Be brief", "the sun", "who is it? ", ". \n\n", "Yes: Yes", ".\n", "_\n"]


def make(path, template=None, end="<|im_end|>", learned=TEXTS, special=SPECIAL, last="", trim=True,
         splits=None):
    """A tokenizer trained on the spot, with a chat template, as a model's directory has it.
    last: special tokens that it puts behind each text. trim: a token's place is without its
    spaces. splits: the library's pre_tokenizer."""
    hf = tokenizers.Tokenizer(tokenizers.models.BPE())
    hf.pre_tokenizer = splits or pre.ByteLevel(add_prefix_space=False)
    hf.decoder = tokenizers.decoders.ByteLevel()
    hf.train_from_iterator(learned * 9, tokenizers.trainers.BpeTrainer(
        vocab_size=700, special_tokens=special, show_progress=False,
        initial_alphabet=pre.ByteLevel.alphabet()))
    # As Llama 3's: a text begins with <s>.
    begins_and_ends = post.TemplateProcessing(
        single=f"<s> $A {last}".strip(),
        special_tokens=[(token, hf.token_to_id(token)) for token in special[:6]])
    hf.post_processor = post.Sequence([post.ByteLevel(trim_offsets=trim), begins_and_ends])
    os.makedirs(path, exist_ok=True)
    hf.enable_truncation(9)  # some files ask for both; a document is not cut
    hf.enable_padding(length=9)
    hf.save(str(path / "tokenizer.json"))
    hf.no_truncation()
    hf.no_padding()
    config = dict(eos_token=end, bos_token="<s>", tokenizer_class="PreTrainedTokenizerFast")
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (path / "chat_template.jinja").write_text(template)
    return hf


def test_special_tokens_in_a_text_are_text_and_in_a_template_they_are_not(tmp_path):
    hf = make(tmp_path)
    own = encoder(str(tmp_path))
    text = "the </s>sun</s>, <|im_end|>"
    for _ in range(2):  # a template in between changes nothing
        for ids in (own.encode(text), masks.places_of(text, own, False)[0]):
            assert hf.decode(list(ids), skip_special_tokens=True) == text
        ids, _ = masks.places_of(text, own, has_special_tokens=True)
        assert ids == hf.encode(text, add_special_tokens=False).ids and ids.count(own.end) == 1


@pytest.mark.parametrize("last", ["", "<|im_end|>", "<|im_end|> </s>"])
def test_a_prompt_is_begun_and_not_ended_by_its_tokenizer(tmp_path, last):
    """Once, if the prompt has that beginning too. An end that the prompt has stays there."""
    hf = make(tmp_path, last=last)
    encode, _, _ = tokenizer({"vocab_size": 700}, str(tmp_path))
    for text in ("the sun", "", "\n", "\u00e9 ", "Hi<|im_end|>", "<|im_end|>\n", "</s>"):
        alone = hf.encode(text, add_special_tokens=False).ids
        assert encode(text) == encode("<s>" + text) == [hf.token_to_id("<s>"), *alone]
        assert encode("<s><s>" + text) == 2 * [hf.token_to_id("<s>")] + alone
        assert len(hf.encode(text).ids) == 1 + len(alone) + len(last.split())


def test_end_of_a_text_is_the_configs_or_a_usual_one(tmp_path):
    for eos, expected in (("<|im_end|>", "<|im_end|>"), ({"content": "<|im_end|>"}, "<|im_end|>"),
                          (None, "</s>")):
        hf = make(tmp_path, end=eos)
        assert hf_tokenizer.encoder_of(str(tmp_path)).end == hf.token_to_id(expected)
    make(tmp_path, special=["<s>"], end=None)
    assert "name its eos_token" in refused(hf_tokenizer.encoder_of, str(tmp_path))
    os.remove(tmp_path / "tokenizer_config.json")
    words = tokenizers.models.WordLevel({"the": 0, "</s>": 9}, unk_token="the")
    tokenizers.Tokenizer(words).save(str(tmp_path / "gaps.json"))
    gaps = encoder(str(tmp_path / "gaps.json"))
    assert (gaps.end, gaps.vocab_size) == (9, 10)  # the largest id counts, not how many


@pytest.mark.parametrize("file, named", [
    ("tokenizer_config.json", {"additional_special_tokens": ["<new>"]}),
    ("tokenizer_config.json", {"extra_special_tokens": {"image_token": "<new>"}}),
    ("tokenizer_config.json", {"pad_token": {"content": "<new>", "__type": "AddedToken"}}),
    ("tokenizer_config.json", {"added_tokens_decoder": {"999": {"content": "<new>"}}}),
    ("special_tokens_map.json", {"mask_token": "<new>"})])
def test_special_tokens_that_only_a_config_names_are_refused_with_the_remedy(
        tmp_path, file, named):
    """With it they are transformers'."""
    transformers = pytest.importorskip("transformers")
    make(tmp_path)
    said = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / file).write_text(json.dumps({**said, **named, "add_bos_token": True}))
    text = "the <new> sun"
    expected = transformers.AutoTokenizer.from_pretrained(tmp_path)(text)["input_ids"]
    for opened in (hf_tokenizer.encoder_of, partial(tokenizer, {"vocab_size": 700})):
        line = refused(opened, str(tmp_path))
        assert "such as <new>" in line
    exec(re.search("AutoT.*", line)[0].replace("DIR", "str(tmp_path)"), {
        "AutoTokenizer": transformers.AutoTokenizer, "tmp_path": tmp_path})
    assert encoder(str(tmp_path)).encoding(text, True).ids == expected[1:]
    assert tokenizer({"vocab_size": 700}, str(tmp_path))[0](text) == expected


def test_another_tokenizer_of_the_same_path_is_refused(tmp_path, capsys):
    """Else it is "prepared already", or one data set gets the tokens of two."""
    make(tmp_path / "t", "{{ messages }}")
    source = write_jsonl(tmp_path / "a.jsonl", [{"text": f"{i}?" * 20} for i in range(60)])
    argv = ["x", source, f"--tokenizer={tmp_path}/t", "--workers=1", f"--out={tmp_path}/o"]
    run_prepare(argv)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        before = (tmp_path / "t" / file).read_bytes()
        (tmp_path / "t" / file).write_bytes(before + b" ")
        assert "tokenizer_crc" in refused(run_prepare, argv)
        (tmp_path / "t" / file).write_bytes(before)
    run_prepare(argv)
    assert "prepared already" in capsys.readouterr().out


def start_on(tmp_path, meta, *argv):
    """Begin a run from the model in hf/ on data with this meta.json, in data/."""
    (tmp_path / "data/meta.json").write_text(json.dumps(meta))
    argv = argv or (f"--init_from={tmp_path}/hf",)
    argv = [*argv, f"--dataset={tmp_path}/data", "--device=cpu", f"--out_dir={tmp_path}/out"]
    return started(resolve(load_config(argv), World()), World())


@pytest.mark.parametrize("name", ["bytes", "gpt2", "characters", "tokenizer.json"])
def test_a_model_starts_on_data_of_its_own_tokenizer_only(tmp_path, name):
    """Else nothing that it has learned would count. A copy without one starts on any."""
    from test_huggingface import make_hf
    make_hf(tmp_path / "hf", "smollm2", vocab_size=320)
    make(tmp_path / "hf")
    meta = dict(tokenizer=name, vocab_size=257)
    data = tmp_path / "data/tokenizer.json"
    data.parent.mkdir()
    if name == "characters":
        meta = dict(chars=sorted(set("".join(TEXTS))), vocab_size=19)
    if name == "tokenizer.json":
        other = tokenizers.models.Unigram([(char, -1.0) for char in "<abcdefg"], 0)
        tokenizers.Tokenizer(other).save(str(data))
    lora = "--model=llama+lora", f"--base={tmp_path}/hf"
    for argv in ((), lora):
        line = refused(start_on, tmp_path, meta, *argv)
        assert f"--tokenizer={tmp_path}/hf" in line and name in line
    os.rename(tmp_path / "hf/tokenizer.json", data)  # its own, as prepare.py copies it
    start_on(tmp_path, dict(tokenizer="tokenizer.json"))
    start_on(tmp_path, meta)

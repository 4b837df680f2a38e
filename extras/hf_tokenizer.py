"""
Tokenizers of Hugging Face's `tokenizers` library: a tokenizer.json, and the files beside it.

    encoder = encoder_of("HuggingFaceTB/SmolLM2-135M")    # or a directory, or the file itself
    hf, vocab_size = open_tokenizer("my_model/tokenizer.json")

prepare.py copies these files beside the tokens, so the directory stays whole when it moves.
"""

import json
import os
from functools import partial
from pathlib import Path

import numpy as np

from data.tokenizer import TOKENIZER, Encoder

# Files beside it, which say where text ends and how chats are written.
BESIDE = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
# How models name their end of a document, if no tokenizer_config.json says it.
ENDS = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "[EOS]")


def encoder_of(name, needs_end=True):
    """The Encoder of a tokenizer.json, of a directory that has one, or of a hub name. needs_end:
    SystemExit if it has no end-of-text token, instead of an end that is None."""
    file = Path(name)
    if not file.is_file():
        file = Path(local_copy(name, "tokenizer*.json", *BESIDE), TOKENIZER)
    hf, vocab_size = open_tokenizer(str(file))
    files = files_of(file)
    config = json.loads(files.get("tokenizer_config.json", "{}"))
    ends = [*names([config.get("eos_token")]), *ENDS]
    known = [hf.token_to_id(end) for end in ends if end in hf.get_vocab()]
    if needs_end and not known:
        raise SystemExit(
            f"{file}: no end-of-text token; name its eos_token in tokenizer_config.json")
    encoding = partial(encode, hf)
    return Encoder(
        lambda text: np.array(encoding(text).ids, np.uint32),
        known[0] if known else None,
        vocab_size,
        name=TOKENIZER,
        files=files,
        encoding=encoding,
    )


def files_of(file):
    """{name: bytes} of a tokenizer.json, whatever it is called, and of the files beside it."""
    beside = [path for path in map(file.with_name, BESIDE) if path.exists()]
    return {TOKENIZER: file.read_bytes(), **{path.name: path.read_bytes() for path in beside}}


def unknown_tokens(files):
    """Special tokens that the files beside a tokenizer.json name and it lacks. transformers adds
    them, so a text with one has other tokens there. files: {name: bytes}."""
    named = set()
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        config = json.loads(files.get(file, "{}"))
        named.update(names(config[key] for key in config if key.endswith("_token")))
        for key in ("additional_special_tokens", "extra_special_tokens", "added_tokens_decoder"):
            several = config.get(key) or ()
            named.update(names(several.values() if isinstance(several, dict) else several))
    return named.difference(names(json.loads(files[TOKENIZER]).get("added_tokens", ())))


def names(tokens):
    """The texts of these tokens, each a text or a dict that has it as its content."""
    texts = [token["content"] if isinstance(token, dict) else token for token in tokens]
    return [text for text in texts if isinstance(text, str)]  # add_bos_token is a bool


def open_tokenizer(file):
    """(the library's tokenizer, its vocab_size) from a tokenizer.json. SystemExit if files beside
    it name tokens that it lacks."""
    try:
        from tokenizers import Tokenizer  # here: few need it
        hf = Tokenizer.from_file(file)
    except Exception as e:  # the library raises plain Exceptions
        raise SystemExit(
            f"{file}: not a tokenizer.json (pip install tokenizers): {e}; from other files "
            "transformers makes one: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)")
    if unknown := unknown_tokens(files_of(Path(file))):
        raise SystemExit(
            f"{file} lacks special tokens that the files beside it name, such as {min(unknown)}: "
            "write all into it, AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)")
    # Some files ask for both, for batches; a document is taken whole.
    hf.no_truncation()
    hf.no_padding()
    if getattr(hf.model, "dropout", None):  # it draws other tokens each time
        hf.model.dropout = None
    return hf, max(hf.get_vocab().values()) + 1


# ---------- from text to tokens -----------------------------------------------


def encode(hf, text, has_special_tokens=False):
    """The library's Encoding of a text, which takes 150 bytes of memory for each character. Special
    tokens in it are text, as the </s> of HTML is, unless a chat template wrote it."""
    hf.encode_special_tokens = not has_special_tokens
    return hf.encode(text, add_special_tokens=not has_special_tokens)


def encode_prompt(hf, text):
    """A prompt's tokens: with those that the tokenizer puts before a text, once if the text begins
    with them too, and without those behind it, such as </s>."""
    ids = hf.encode(text).ids
    is_added = hf.encode(text + "a").special_tokens_mask
    ids = ids[:len(ids) - [*is_added[::-1], 0].index(0)]
    is_twice = is_added[:2] == [1, 0] and ids[:1] == ids[1:2]
    return ids[1:] if is_twice else ids


# ---------- files -------------------------------------------------------------


def local_copy(name, *patterns):
    """The directory `name`, or a copy of the hub's files that match the patterns."""
    if os.path.isdir(name):
        return name
    try:
        from huggingface_hub import snapshot_download
        hub = f"openai-community/{name}" if name.startswith("gpt2") else name
        return snapshot_download(hub, allow_patterns=list(patterns))
    except Exception as e:
        raise SystemExit(
            f"{name}: neither a directory here nor on the Hugging Face hub "
            f"({type(e).__name__}); without a network it must be a local directory")

"""
Tokenizers: text to token ids and back.

    encode, decode, n = tokenizer(meta, directory)    # to sample: as the data's meta.json says
    encoder("gpt2")    # to prepare data: an Encoder, as a user of prepare.py names it

GPT-2's is tiktoken's; bytes and characters need no library. Any other is a tokenizer.json,
Hugging Face's format, which prepare.py copies beside the tokens.
"""

import os
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from data.files import extra

TOKENIZER = "tokenizer.json"
TOKENIZERS = ("gpt2", "bytes", TOKENIZER)  # what a meta.json may name


# ---------- to sample: as the data says ---------------------------------------


def tokenizer(meta, directory=""):
    """(encode: str -> [id], decode: [id] -> str, number of real tokens). meta: as read_meta
    returns it for `directory`. Without a tokenizer, text is token ids with commas."""
    name = name_of(meta, directory)
    if name == "characters":
        return of_characters(meta["chars"])
    if name == "bytes":
        return lambda text: list(text.encode()), decode_bytes, meta["vocab_size"]
    if name == TOKENIZER:
        file = os.path.join(directory, TOKENIZER)
        hf, vocab_size = extra("hf_tokenizer", wanted_by=file).open_tokenizer(file)
        return lambda text: hf.encode(text).ids, hf.decode, vocab_size
    if name == "gpt2":
        bpe = gpt2_bpe()
        return lambda text: bpe.encode(text, allowed_special="all"), bpe.decode, bpe.n_vocab
    return of_ids(meta["vocab_size"], directory)


def name_of(meta, directory):
    """The tokenizer's name: characters, bytes, gpt2, tokenizer.json, or None."""
    if "chars" in meta:
        return "characters"
    if "tokenizer" in meta:
        return meta["tokenizer"]
    if os.path.exists(os.path.join(directory, TOKENIZER)):
        return TOKENIZER
    is_gpt2s = meta["vocab_size"] in (50257, 50304)  # and padded
    return "gpt2" if is_gpt2s else None


def of_ids(vocab_size, directory):
    def encode(text):
        if text.strip():
            raise SystemExit(
                f"{directory}: no tokenizer is known for vocab_size={vocab_size}; pass token "
                "ids, --start=ids:1,2,3, or put the data's meta.json or tokenizer.json there")
        return [0]  # an empty prompt

    return encode, lambda tokens: ",".join(map(str, tokens)), vocab_size


def of_characters(chars):
    def encode(text):
        new = "".join(sorted(set(text) - set(chars)))
        if new:
            raise SystemExit(f"the prompt has characters this model has never seen: {new!r}")
        return [chars.index(c) for c in text]

    return encode, lambda tokens: "".join(chars[t] for t in tokens), len(chars)


def decode_bytes(tokens):
    """The text of these tokens. 256 ends a document, and is no byte."""
    return bytes(t for t in tokens if t < 256).decode(errors="replace")


# ---------- to prepare data: as the user says ---------------------------------


class Encoder(NamedTuple):
    encode: Any  # function: str -> ids; begins a text as its model does, Llama with <s>
    end: int  # the id that ends a document
    vocab_size: int
    name: str  # in meta.json
    files: dict = {}  # {name: path}, to be copied beside the tokens


@cache  # a worker of prepare.py asks for each chunk
def encoder(name):
    """The Encoder gpt2 or bytes, or that of a tokenizer.json, a directory or a hub name."""
    if name == "bytes":
        return Encoder(encode_bytes, 256, 257, name)
    if name == "gpt2":
        bpe = gpt2_bpe()
        return Encoder(bpe.encode_ordinary, bpe.eot_token, 50304, name)
    return extra("hf_tokenizer", wanted_by=f"tokenizer={name}").encoder_of(name)


def encode_bytes(text):
    return np.frombuffer(text.encode(), np.uint8)


def gpt2_bpe():
    """GPT-2's tokenizer. SystemExit if its vocabulary cannot be downloaded."""
    import tiktoken
    try:
        return tiktoken.get_encoding("gpt2")
    except Exception as e:
        raise SystemExit(
            f"GPT-2's vocabulary cannot be downloaded ({type(e).__name__}); set "
            "TIKTOKEN_CACHE_DIR to a directory that has it (or prepare data with "
            "--tokenizer=bytes)")

"""
Tokenizers: text to token ids and back.

    encode, decode, n = tokenizer(meta, directory)    # for sampling: named by the data's meta.json
    encoder("gpt2")    # for preparing data: an Encoder, named by the user of prepare.py

GPT-2's is tiktoken's; bytes and characters need no library. Any other is a tokenizer.json,
Hugging Face's format, which prepare.py copies next to the tokens.
"""

import os
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

TOKENIZER = "tokenizer.json"


# ---------- for sampling: named by the data -----------------------------------


def tokenizer(meta, directory=""):
    """(encode: str -> [id], decode: [id] -> str, number of real tokens). meta: read_meta's
    result for `directory`. SystemExit if it knows no tokenizer."""
    name = name_of(meta, directory)
    if name == "characters":
        return of_characters(meta["chars"])
    if name == "bytes":
        return lambda text: list(text.encode()), decode_bytes, meta["vocab_size"]
    if name == TOKENIZER:
        file = os.path.join(directory, TOKENIZER)
        library = hugging_faces()
        hf, vocab_size = library.open_tokenizer(file)
        return partial(library.encode_prompt, hf), hf.decode, vocab_size
    if name == "gpt2":
        bpe = gpt2_bpe()
        return lambda text: bpe.encode(text, allowed_special="all"), bpe.decode, bpe.n_vocab
    raise SystemExit(
        f"{directory}: no tokenizer is known for vocab_size={meta['vocab_size']}; put the data's "
        "meta.json or tokenizer.json there")


def name_of(meta, directory):
    """The tokenizer's name: characters, bytes, gpt2, tokenizer.json, or None."""
    if "chars" in meta:
        return "characters"
    if "tokenizer" in meta:
        return meta["tokenizer"]
    if os.path.exists(os.path.join(directory, TOKENIZER)):
        return TOKENIZER
    is_gpt2s = meta["vocab_size"] in (50257, 50304)  # the latter padded
    return "gpt2" if is_gpt2s else None


def of_characters(chars):
    def encode(text):
        new = "".join(sorted(set(text) - set(chars)))
        if new:
            raise SystemExit(f"the prompt has characters this model has never seen: {new!r}")
        return [chars.index(c) for c in text]

    return encode, lambda tokens: "".join(chars[t] for t in tokens), len(chars)


def decode_bytes(tokens):
    """The text of these tokens. 256 is not a byte: it ends a document."""
    return bytes(t for t in tokens if t < 256).decode(errors="replace")


# ---------- for preparing data: named by the user -----------------------------


class Encoder(NamedTuple):
    encode: Any  # function: str -> ids; starts a text as its model expects, Llama's with <s>
    end: int  # the id that ends a document
    vocab_size: int
    name: str  # in meta.json
    files: dict = {}  # {name: bytes}, to be written next to the tokens
    encoding: Any = None  # of a tokenizer.json: function, see hf_tokenizer.encode


@cache  # prepare.py's workers call it for each chunk
def encoder(name):
    """The Encoder for gpt2, bytes, a tokenizer.json, its directory or a hub name."""
    if name == "bytes":
        return Encoder(lambda text: np.frombuffer(text.encode(), np.uint8), 256, 257, name)
    if name == "gpt2":
        bpe = gpt2_bpe()
        return Encoder(bpe.encode_ordinary, bpe.eot_token, 50304, name)
    return hugging_faces().encoder_of(name)


def hugging_faces():
    """The module extras/hf_tokenizer.py, which a fork may have deleted."""
    from configurator import named_file  # only here: it imports torch, which takes seconds

    return named_file("hf_tokenizer")


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

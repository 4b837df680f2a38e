"""
Tokenizers: text to token ids and back.

    encode, decode, n = tokenizer(meta, directory)    # as the data's meta.json says
    encoder("HuggingFaceTB/SmolLM2-135M")    # an Encoder, as a user of prepare.py says

GPT-2's is tiktoken's; bytes and characters need no library. Any other is a tokenizer.json
of the `tokenizers` library, which prepare.py copies beside the tokens, so that the
directory can move.
"""

import json
import os
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

TOKENIZER = "tokenizer.json"
TOKENIZERS = ("gpt2", "bytes", TOKENIZER)  # what a meta.json may name
# Files beside it, which say where text ends and how chats are written.
BESIDE = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
# How models name their end of a document, where no tokenizer_config.json says.
ENDS = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "[EOS]")


# ---------- to sample: as the data says ---------------------------------------


def tokenizer(meta, directory=""):
    """(encode: str -> [id], decode: [id] -> str, number of real tokens) for what read_meta
    has read in directory. Without a tokenizer, text is token ids with commas."""
    name = name_of(meta, directory)
    if name == "characters":
        return of_characters(meta["chars"])
    if name == "bytes":
        return lambda text: list(text.encode()), decode_bytes, meta["vocab_size"]
    if name == TOKENIZER:
        hf, vocab_size = open_tokenizer(os.path.join(directory, TOKENIZER))
        return lambda text: hf.encode(text).ids, hf.decode, vocab_size
    if name == "gpt2":
        bpe = gpt2_bpe()
        return lambda text: bpe.encode(text, allowed_special="all"), bpe.decode, bpe.n_vocab
    return of_ids(meta["vocab_size"], directory)


def name_of(meta, directory):
    """Which tokenizer that is: characters, bytes, gpt2, tokenizer.json, or None."""
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
    """The text of these tokens. 256, where there is one, ends a document."""
    return bytes(t for t in tokens if t < 256).decode(errors="replace")


# ---------- to prepare data: as the user says ---------------------------------


class Encoder(NamedTuple):
    encode: Any  # function: str -> ids; begins a text as its model does, Llama with <s>
    # function: (str, add_special_tokens) -> (ids, [(start, end)]): the characters of the text
    # that each token stands for
    spans: Any
    end: int  # the id that ends a document
    vocab_size: int
    file: str | None = None  # its tokenizer.json


@cache  # a worker of prepare.py asks for each chunk
def encoder(name):
    """The Encoder gpt2 or bytes, or that of a tokenizer.json, a directory or a hub name."""
    if name == "bytes":
        return Encoder(encode_bytes, spans_of_bytes, 256, 257)
    if name == "gpt2":
        bpe = gpt2_bpe()
        return Encoder(bpe.encode_ordinary, partial(spans_of_gpt2, bpe), bpe.eot_token, 50304)
    file = name
    if not os.path.isfile(name):
        directory = local_copy("tokenizer", name, "tokenizer*.json", *BESIDE)
        file = os.path.join(directory, TOKENIZER)
    hf, vocab_size = open_tokenizer(file)
    config = Path(file).with_name("tokenizer_config.json")
    eos = None
    if config.exists():
        eos = json.loads(config.read_text("utf-8")).get("eos_token")
    if isinstance(eos, dict):
        eos = eos["content"]
    for end in (eos, *ENDS):
        if end in hf.get_vocab():
            end_id = hf.token_to_id(end)
            spans = partial(spans_of_file, hf)
            return Encoder(lambda text: hf.encode(text).ids, spans, end_id, vocab_size, file)
    raise SystemExit(f"{file}: no end-of-text token; name its eos_token in {config.name}")


def encode_bytes(text):
    return np.frombuffer(text.encode(), np.uint8)


def spans_of_bytes(text, add_special_tokens=True):  # there are none to add
    ids = encode_bytes(text)
    return ids, spans_of_pieces(text, [1] * len(ids))


def spans_of_gpt2(bpe, text, add_special_tokens=True):  # there are none to add
    ids = bpe.encode_ordinary(text)
    return ids, spans_of_pieces(text, map(len, bpe.decode_tokens_bytes(ids)))


def spans_of_pieces(text, sizes):
    """[(start, end)] in characters, of pieces of so many bytes. One may hold part of a
    character."""
    character = []  # that each byte belongs to
    for i, one in enumerate(text):
        character += [i] * len(one.encode())
    spans = []
    at = 0
    for size in sizes:
        spans.append((character[at], character[at + size - 1] + 1))
        at += size
    return spans


def spans_of_file(hf, text, add_special_tokens=True):
    found = hf.encode(text, add_special_tokens=add_special_tokens)  # <s> and the like
    return found.ids, found.offsets


# ---------- where they come from ----------------------------------------------


def open_tokenizer(file):
    """(the library's tokenizer, its vocab_size) from a tokenizer.json."""
    try:
        from tokenizers import Tokenizer  # here: few need it
        hf = Tokenizer.from_file(file)
    except Exception as e:  # the library raises plain Exceptions
        raise SystemExit(
            f"{file}: not a tokenizer of the library (pip install tokenizers): {e}")
    # Some files ask for both, for batches; a document is taken as it is.
    hf.no_truncation()
    hf.no_padding()
    return hf, max(hf.get_vocab().values()) + 1


def local_copy(key, name, *patterns):
    """The directory `name`, or a copy of the hub's files that match the patterns. key: what
    a user has said it with."""
    if os.path.isdir(name):
        return name
    try:
        from huggingface_hub import snapshot_download
        hub = f"openai-community/{name}" if name.startswith("gpt2") else name
        return snapshot_download(hub, allow_patterns=list(patterns))
    except Exception as e:
        raise SystemExit(
            f"{key}={name}: neither a directory here nor on the Hugging Face hub "
            f"({type(e).__name__}); without a network it must be a local directory")


def gpt2_bpe():
    """GPT-2's tokenizer; SystemExit with the remedy if its vocabulary cannot be had."""
    import tiktoken
    try:
        return tiktoken.get_encoding("gpt2")
    except Exception as e:
        raise SystemExit(
            f"GPT-2's vocabulary cannot be downloaded ({type(e).__name__}); set "
            "TIKTOKEN_CACHE_DIR to a directory that has it (or prepare data with "
            "--tokenizer=bytes)")

"""
Tokenizers: text to token ids and back.

    encode, decode, n = tokenizer(meta, directory)     # as meta.json in the data's directory says
    document, vocab_size = encoder("HuggingFaceTB/SmolLM2-135M")    # for prepare.py: text -> ids

GPT-2's is tiktoken's; bytes and characters need no library. Any other is a tokenizer.json of the
`tokenizers` library, which prepare.py copies beside the tokens, so that the directory can move.
"""

import json
import os
from functools import cache

import numpy as np

TOKENIZER = "tokenizer.json"
# how models name their end of a document, where no tokenizer_config.json says
ENDS = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "[EOS]")


def tokenizer(meta, directory=""):
    """(encode: str -> [id], decode: [id] -> str, number of real tokens) for read_meta's answer."""
    if "chars" in meta:
        chars = meta["chars"]
        ids = {c: i for i, c in enumerate(chars)}
        def encode(text):
            new = "".join(sorted(set(text) - set(ids)))
            if new:
                raise SystemExit(f"the prompt has characters this model has never seen: {new!r}")
            return [ids[c] for c in text]
        return encode, lambda tokens: "".join(chars[t] for t in tokens), len(chars)
    file = os.path.join(directory, TOKENIZER)
    kind = meta.get("tokenizer", TOKENIZER if os.path.exists(file) else "gpt2")
    if kind == "bytes":
        def decode(tokens):  # 256, where there is one, ends a document
            return bytes(t for t in tokens if t < 256).decode(errors="replace")
        return lambda text: list(text.encode()), decode, meta["vocab_size"]
    if kind == TOKENIZER:
        hf, size = open_tokenizer(file)
        return lambda text: hf.encode(text).ids, hf.decode, size
    bpe = gpt2_bpe()
    return lambda text: bpe.encode(text, allowed_special="all"), bpe.decode, bpe.n_vocab


@cache  # a worker of prepare.py asks for each chunk
def encoder(name):
    """(document: str -> ids, vocab_size): gpt2, bytes, a tokenizer.json, a directory or a hub name.
    The ids begin as the tokenizer begins a text (Llama's with <s>), as in a prompt, and end with
    its end of text."""
    if name == "bytes":
        return lambda text: np.append(np.frombuffer(text.encode(), np.uint8), np.uint16(256)), 257
    if name == "gpt2":
        bpe = gpt2_bpe()
        return lambda text: [*bpe.encode_ordinary(text), bpe.eot_token], 50304
    file = tokenizer_file(name)
    hf, size = open_tokenizer(file)
    end = end_of_text(hf, file)

    def document(text):
        ids = hf.encode(text).ids
        return ids if ids[-1:] == [end] else [*ids, end]  # some put it there themselves

    return document, size


def end_of_text(hf, file):
    """The id that ends a document: tokenizer_config.json's eos_token, else a usual name's."""
    names, path = ENDS, os.path.join(os.path.dirname(file), "tokenizer_config.json")
    if os.path.exists(path):
        with open(path, encoding="utf-8") as f:
            eos = json.load(f).get("eos_token")
        names = (eos["content"] if isinstance(eos, dict) else eos, *ENDS)
    for name in filter(None, names):
        if hf.token_to_id(name) is not None:
            return hf.token_to_id(name)
    raise SystemExit(f"{file}: no end-of-text token; name its eos_token in a tokenizer_config.json")


def tokenizer_file(name):
    """The tokenizer.json that name, a file, a directory or a hub name, stands for."""
    if os.path.isfile(name):
        return name
    return os.path.join(local_copy("tokenizer", name, name, "tokenizer*.json"), TOKENIZER)


def open_tokenizer(file):
    """(the library's tokenizer, its vocab_size) from a tokenizer.json."""
    try:
        from tokenizers import Tokenizer  # here: few need it
        hf = Tokenizer.from_file(file)
    except Exception as e:  # the library raises plain Exceptions
        raise SystemExit(f"{file}: not a tokenizer of the library (pip install tokenizers): {e}")
    hf.no_truncation()  # some files ask for it
    hf.no_padding()
    return hf, max(hf.get_vocab().values()) + 1


def local_copy(key, name, hub_name, *patterns):
    """The directory `name`, or a copy of the hub's files that match; key is what asked for it."""
    if os.path.isdir(name):
        return name
    try:
        from huggingface_hub import snapshot_download
        return snapshot_download(hub_name, allow_patterns=list(patterns))
    except Exception as e:
        raise SystemExit(f"{key}={name}: neither a directory here nor on the Hugging Face hub "
                         f"({type(e).__name__}); without a network pass a local directory")


def gpt2_bpe():
    """GPT-2's tokenizer; SystemExit with the remedy if its vocabulary cannot be had."""
    import tiktoken
    try:
        return tiktoken.get_encoding("gpt2")
    except Exception as e:
        raise SystemExit(f"GPT-2's vocabulary cannot be downloaded ({type(e).__name__}); set "
                         "TIKTOKEN_CACHE_DIR to a directory that has it, or use --tokenizer=bytes")

"""
Tokenizers: text to token ids and back.

    encode, decode, n = tokenizer(meta, directory)     # as meta.json in the data's directory says
    encode, end, n, file = encoder("HuggingFaceTB/SmolLM2-135M")    # for prepare.py

GPT-2's is tiktoken's; bytes and characters need no library. Any other is a tokenizer.json of the
`tokenizers` library, which prepare.py copies beside the tokens, so that the directory can move.
"""

import json
import os
from functools import cache
from pathlib import Path

import numpy as np

TOKENIZER = "tokenizer.json"
# how models name their end of a document, where no tokenizer_config.json says
ENDS = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "[EOS]")


def tokenizer(meta, directory=""):
    """(encode: str -> [id], decode: [id] -> str, number of real tokens) for read_meta's answer."""
    if "chars" in meta:
        chars = meta["chars"]
        def encode(text):
            new = "".join(sorted(set(text) - set(chars)))
            if new:
                raise SystemExit(f"the prompt has characters this model has never seen: {new!r}")
            return [chars.index(c) for c in text]
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
    if "tokenizer" not in meta and meta["vocab_size"] not in (50257, 50304):  # GPT-2's, and padded
        raise SystemExit(f"{directory}: no tokenizer is known for vocab_size={meta['vocab_size']}; "
                         "put the data's meta.json or tokenizer.json there")
    bpe = gpt2_bpe()
    return lambda text: bpe.encode(text, allowed_special="all"), bpe.decode, bpe.n_vocab


@cache  # a worker of prepare.py asks for each chunk
def encoder(name):
    """(encode: str -> ids, end of text, vocab_size, file or None) of gpt2, bytes, a tokenizer.json,
    a directory or a hub name. A text begins as the tokenizer begins it, Llama's with <s>."""
    if name == "bytes":
        return lambda text: np.frombuffer(text.encode(), np.uint8), 256, 257, None
    if name == "gpt2":
        bpe = gpt2_bpe()
        return bpe.encode_ordinary, bpe.eot_token, 50304, None
    file = name
    if not os.path.isfile(name):
        file = os.path.join(local_copy("tokenizer", name, "tokenizer*.json"), TOKENIZER)
    hf, size = open_tokenizer(file)
    config, eos = Path(file).with_name("tokenizer_config.json"), None
    if config.exists():
        eos = json.loads(config.read_text("utf-8")).get("eos_token")
    if isinstance(eos, dict):
        eos = eos["content"]
    for end in (eos, *ENDS):
        if end in hf.get_vocab():
            return lambda text: hf.encode(text).ids, hf.token_to_id(end), size, file
    raise SystemExit(f"{file}: no end-of-text token; name its eos_token in {config.name}")


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


def local_copy(key, name, *patterns):
    """The directory `name`, or a copy of the hub's files that match; key is what asked for it."""
    if os.path.isdir(name):
        return name
    try:
        from huggingface_hub import snapshot_download
        hub = f"openai-community/{name}" if name.startswith("gpt2") else name
        return snapshot_download(hub, allow_patterns=list(patterns))
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

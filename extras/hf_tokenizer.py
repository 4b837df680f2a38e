"""
Tokenizers of Hugging Face's `tokenizers` library: a tokenizer.json, and the files beside it.

    encoder = encoder_of("HuggingFaceTB/SmolLM2-135M")    # or a directory, or the file itself
    hf, vocab_size = open_tokenizer("my_model/tokenizer.json")

prepare.py copies these files beside the tokens, so the directory stays whole when it moves.
"""

import json
import os
from pathlib import Path

from data.tokenizer import TOKENIZER, Encoder

# Files beside it, which say where text ends and how chats are written.
BESIDE = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
# How models name their end of a document, if no tokenizer_config.json says it.
ENDS = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "[EOS]")


def encoder_of(name):
    """The Encoder of a tokenizer.json, of a directory that has one, or of a hub name."""
    file = Path(name)
    if not file.is_file():
        file = Path(local_copy("tokenizer", name, "tokenizer*.json", *BESIDE), TOKENIZER)
    hf, vocab_size = open_tokenizer(str(file))
    hf.encode_special_tokens = True  # as text: a document may write </s> for struck-through HTML
    config = file.with_name("tokenizer_config.json")
    eos = None
    if config.exists():
        eos = json.loads(config.read_text("utf-8")).get("eos_token")
    if isinstance(eos, dict):
        eos = eos["content"]
    known = [end for end in (eos, *ENDS) if end in hf.get_vocab()]
    if not known:
        raise SystemExit(f"{file}: no end-of-text token; name its eos_token in {config.name}")
    beside = [path for path in map(file.with_name, BESIDE) if path.exists()]
    return Encoder(
        lambda text: hf.encode(text).ids,
        hf.token_to_id(known[0]),
        vocab_size,
        name=TOKENIZER,
        files={TOKENIZER: file, **{path.name: path for path in beside}},
    )


def open_tokenizer(file):
    """(the library's tokenizer, its vocab_size) from a tokenizer.json."""
    try:
        from tokenizers import Tokenizer  # here: few need it
        hf = Tokenizer.from_file(file)
    except Exception as e:  # the library raises plain Exceptions
        raise SystemExit(
            f"{file}: not a tokenizer of the library (pip install tokenizers): {e}")
    # Some files ask for both, for batches; a document is taken whole.
    hf.no_truncation()
    hf.no_padding()
    return hf, max(hf.get_vocab().values()) + 1


def local_copy(key, name, *patterns):
    """The directory `name`, or a copy of the hub's files that match the patterns. key: the
    option that names it, for errors."""
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

"""
Tiny Shakespeare, one token a character (65 of them): 1,003,854 training and 111,540 validation
tokens.

    python data/shakespeare_char/prepare.py                    # downloads 1.1 MB, checks its sha256
    python data/shakespeare_char/prepare.py --input=input.txt  # a local copy
"""

import argparse
import hashlib
import json
import os
import sys
import urllib.request
from tempfile import TemporaryDirectory

import numpy as np

URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"


def characters(text):
    """(encode: str -> [id], meta): a token for each character of text."""
    chars = sorted(set(text))
    ids = {c: i for i, c in enumerate(chars)}
    return lambda part: [ids[c] for c in part], {"vocab_size": len(chars), "chars": chars}


def main(name, doc, tokenizer):
    """The command line, also data/shakespeare's. tokenizer: as characters()."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=doc, formatter_class=raw)
    parser.error = sys.exit  # one line and exit code 1, as everywhere here
    parser.add_argument("--input", metavar="FILE", help="a local copy, instead of the download")
    parser.add_argument("--out", metavar="DIR", help=f"instead of data/{name}/")
    args = parser.parse_args()
    data = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    out = args.out or os.path.join(data, name)
    text = download(args.input)
    encode, meta = tokenizer(text)
    split = int(0.9 * len(text))  # nanoGPT's: the last tenth is for validation
    parts = {"train.bin": encode(text[:split]), "val.bin": encode(text[split:])}
    try:
        os.makedirs(out, exist_ok=True)
        with TemporaryDirectory(dir=out) as tmp:  # a full disk leaves nothing behind
            for file, tokens in parts.items():
                np.array(tokens, dtype=np.uint16).tofile(f"{tmp}/{file}")
            with open(f"{tmp}/meta.json", "w", encoding="utf-8") as f:
                json.dump(meta, f)
            for file in os.listdir(tmp):
                os.replace(f"{tmp}/{file}", f"{out}/{file}")
    except OSError as e:
        raise SystemExit(f"cannot write {out}: {e.strerror or e}; make room, or pass another --out")
    for file, tokens in parts.items():
        print(f"{out}/{file}: {len(tokens):,} tokens")


def download(path):
    """The text, from a local copy if path names one. SystemExit if it is not tiny Shakespeare."""
    source = path or URL
    try:
        if path:
            with open(path, "rb") as f:
                raw = f.read()
        else:
            with urllib.request.urlopen(URL, timeout=30) as response:
                raw = response.read()
    except OSError as e:
        raise SystemExit(f"{source}: {e}; get the file elsewhere and pass --input=FILE")
    found = hashlib.sha256(raw).hexdigest()
    if found != SHA256:
        raise SystemExit(f"{source}: sha256 is {found}, tiny Shakespeare's is {SHA256}")
    return raw.decode()


if __name__ == "__main__":
    main("shakespeare_char", __doc__, characters)

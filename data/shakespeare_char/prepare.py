"""
Tiny Shakespeare, one token a character (65 of them): 1,003,854 training and 111,540 validation tokens.

    python data/shakespeare_char/prepare.py                       # downloads 1.1 MB, checks its sha256
    python data/shakespeare_char/prepare.py --input=input.txt     # a local copy
"""

import argparse
import hashlib
import json
import os
import urllib.request

import numpy as np

URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"


def characters(part, text):
    """(tokens of part, meta): every character of the whole text has a number."""
    chars = sorted(set(text))
    ids = {c: i for i, c in enumerate(chars)}
    return [ids[c] for c in part], {"vocab_size": len(chars), "chars": chars}


def main(doc, here, tokenize):
    """Also data/shakespeare's, with another tokenizer."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", help="a local copy of the text, instead of the download")
    parser.add_argument("--out", default=here, help="directory for train.bin, val.bin and meta.json")
    args = parser.parse_args()
    try:
        if args.input:
            with open(args.input, "rb") as f:
                raw = f.read()
        else:
            with urllib.request.urlopen(URL, timeout=30) as response:
                raw = response.read()
    except OSError as e:
        raise SystemExit(f"{args.input or URL}: {e}; get the file elsewhere and pass --input=FILE")
    if hashlib.sha256(raw).hexdigest() != SHA256:
        raise SystemExit(f"{args.input or URL}: sha256 is {hashlib.sha256(raw).hexdigest()}, tiny Shakespeare's is {SHA256}")
    text = raw.decode()
    split = int(0.9 * len(text))  # nanoGPT's split: the last tenth validates
    os.makedirs(args.out, exist_ok=True)
    for name, part in (("train", text[:split]), ("val", text[split:])):
        tokens, meta = tokenize(part, text)
        tmp = os.path.join(args.out, f"{name}.bin.tmp")
        np.array(tokens, dtype=np.uint16).tofile(tmp)
        os.replace(tmp, os.path.join(args.out, f"{name}.bin"))
        print(f"{name}.bin: {len(tokens):,} tokens")
    with open(os.path.join(args.out, "meta.json"), "w", encoding="utf-8") as f:
        json.dump(meta, f)


if __name__ == "__main__":
    main(__doc__, os.path.dirname(os.path.abspath(__file__)), characters)

"""
The offline data set: this Python's own standard library, byte by byte (vocabulary 256).

    python data/python_stdlib/prepare.py

Needs no network and no package but numpy. Writes train.bin, val.bin (every 10th file, so no text is
in both) and meta.json beside this file. With Python 3.11 they have 8.66M and 0.89M tokens; the same
Python always gives the same files.

Left out are tests, installed packages and generated tables (encodings, Unicode data, pydoc topics):
a model trained on those prints code-page tables.
"""

import argparse
import json
import os
import sys
import sysconfig
from tempfile import TemporaryDirectory

import numpy as np

SKIP = {
    "test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "__pycache__",
    "lib2to3", "ensurepip", "turtledemo",
}
SKIP_PREFIXES = ("config-", "lib-dynload", "_sysconfigdata")


def sources(root):
    """Paths of the library's own .py files below root, in an order that root does not change."""
    paths = []
    for folder, folders, files in os.walk(root):
        folders[:] = [f for f in folders if f not in SKIP and not f.startswith(SKIP_PREFIXES)]
        for file in files:
            if file.endswith(".py") and file != "topics.py" and not file.startswith(SKIP_PREFIXES):
                paths.append(os.path.join(folder, file))
    return sorted(paths, key=lambda path: os.path.relpath(path, root))


def main():
    here = os.path.dirname(os.path.abspath(__file__))
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.error = sys.exit  # one line and exit code 1, as everywhere here
    parser.add_argument("--out", metavar="DIR", default=here,
                        help="directory for the files (default: data/python_stdlib/)")
    out = parser.parse_args().out
    root = sysconfig.get_paths()["stdlib"]
    splits = {"train": [], "val": []}
    for i, path in enumerate(sources(root)):
        with open(path, "rb") as f:
            splits["val" if i % 10 == 9 else "train"].append(f.read())
    if not splits["val"]:
        raise SystemExit(f"{root}: has no standard library; install Python with its .py files")
    texts = {split: b"\n\n".join(files) for split, files in splits.items()}
    try:
        os.makedirs(out, exist_ok=True)
        with TemporaryDirectory(dir=out) as tmp:  # a full disk leaves nothing behind
            for split, text in texts.items():
                tokens = np.frombuffer(text, dtype=np.uint8).astype(np.uint16)
                tokens.tofile(f"{tmp}/{split}.bin")
            with open(f"{tmp}/meta.json", "w") as f:
                json.dump({"vocab_size": 256, "tokenizer": "bytes"}, f)
            for file in os.listdir(tmp):
                os.replace(f"{tmp}/{file}", f"{out}/{file}")
    except OSError as e:
        raise SystemExit(f"cannot write {out}: {e.strerror or e}; make room, or pass another --out")
    for split, text in texts.items():
        print(f"{out}/{split}.bin: {len(text):,} tokens from {len(splits[split])} files")


if __name__ == "__main__":
    main()

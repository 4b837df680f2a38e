"""
The offline data set: the running interpreter's own standard library, byte by byte (vocabulary 256).

    python data/python_stdlib/prepare.py

Needs no network and no package but numpy. Writes train.bin (about 10M tokens), val.bin (every 10th file, so no text is
in both) and meta.json beside this file. The same interpreter always gives the same files.
Left out: tests, installed packages, and generated tables (encodings/, unicode data, pydoc topics): a model trained on
those prints code-page tables.
"""

import argparse
import json
import os
import sysconfig

import numpy as np

SKIP = {"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "__pycache__", "lib2to3", "ensurepip", "turtledemo"}


def sources(root):
    """Paths of the library's .py files below root, sorted, without SKIP and data tables."""
    paths = []
    for folder, folders, files in os.walk(root):
        folders[:] = [f for f in folders if f not in SKIP and not f.startswith(("config-", "lib-dynload"))]
        paths += [os.path.join(folder, f) for f in files if f.endswith(".py") and not f.startswith("_sysconfigdata") and f != "topics.py"]
    return sorted(paths, key=lambda p: os.path.relpath(p, root))


def main():
    here = os.path.dirname(os.path.abspath(__file__))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=here, help="directory for train.bin, val.bin and meta.json")
    out = parser.parse_args().out
    root = sysconfig.get_paths()["stdlib"]
    splits = {"train": [], "val": []}
    for i, path in enumerate(sources(root)):
        with open(path, "rb") as f:
            splits["val" if i % 10 == 9 else "train"].append(f.read())
    if not splits["val"]:
        raise SystemExit(f"{root}: no standard library sources found; install Python with its .py files")
    os.makedirs(out, exist_ok=True)
    for split, files in splits.items():
        tokens = np.frombuffer(b"\n\n".join(files), dtype=np.uint8).astype(np.uint16)
        tmp = os.path.join(out, f"{split}.bin.tmp")
        tokens.tofile(tmp)
        os.replace(tmp, os.path.join(out, f"{split}.bin"))
        print(f"{split}.bin: {len(tokens):,} tokens from {len(files)} files")
    with open(os.path.join(out, "meta.json"), "w") as f:
        json.dump({"vocab_size": 256, "tokenizer": "bytes"}, f)


if __name__ == "__main__":
    main()

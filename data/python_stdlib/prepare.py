"""
The offline data set: this Python's own standard library, byte by byte (vocabulary 256).

    python data/python_stdlib/prepare.py

Needs no network. Writes train.bin, val.bin (every 10th file, so no text is in both) and
meta.json beside this file. With Python 3.11 they have 8.66M and 0.89M tokens; the same
Python always gives the same files.

It skips tests, installed packages and generated tables (encodings, Unicode data, pydoc's
topics): a model trained on those prints code-page tables.
"""

import os
import sys
import sysconfig
from pathlib import Path

sys.path.insert(0, str(Path(__file__).absolute().parents[2]))
from data.prepare import HERE, parser_of, write_small  # noqa: E402

SKIP = """
    test tests idle_test site-packages dist-packages __pycache__ encodings lib2to3 ensurepip
    turtledemo topics.py
""".split()
SKIP_PREFIXES = ("config-", "lib-dynload", "_sysconfigdata")


def sources(root):
    """Paths of the library's own .py files, in the same order for any root."""
    paths = []
    for folder, folders, files in os.walk(root):
        folders[:] = filter(is_own, folders)  # walk descends only into these
        paths += [os.path.join(folder, file) for file in filter(is_own, files)]
    return sorted(path for path in paths if path.endswith(".py"))


def is_own(name):
    return name not in SKIP and not name.startswith(SKIP_PREFIXES)


def main():
    args = parser_of(__doc__).parse_args()
    texts = [Path(path).read_bytes() for path in sources(sysconfig.get_paths()["stdlib"])]
    val = b"\n\n".join(texts[9::10])
    del texts[9::10]
    train = b"\n\n".join(texts)
    out = args.out or HERE / "python_stdlib"
    write_small(out, list(train), list(val), vocab_size=256, tokenizer="bytes")


if __name__ == "__main__":
    main()

"""
The files of a data set, as prepare.py writes them and loader.py reads them.

Each split (train, val) is one file, or shards:

    train.bin                          nanoGPT's: uint16, one token after the other
    NAME_train_000001.bin, ...         llm.c's: a header, then uint16 or uint32

A train.bin may have the header too; tokens above 65,535 need it. The same directory has meta.json,
and prepare.json, which records how the files were made and whether they are complete.

X.bin may come with X.mask, which says what is learned: see extras/masked.py. Without masks the
model learns all tokens.
"""

import errno
import json
import os
from pathlib import Path

import numpy as np

# llm.c's header is 256 int32: a magic number, a version, the number of tokens, and zeros.
HEADER_BYTES = 256 * 4
# {type of the tokens: (magic number, version)}
FORMATS = {
    np.dtype(np.uint16): (20240520, 1),
    np.dtype(np.uint32): (20240801, 7),
}
RECORD = "prepare.json"


# ---------- writing: all or nothing -------------------------------------------


def write_files(directory, files):
    """Write {name: content}, one after the other. If this is killed, each file is either complete
    or unchanged. A content is an iterable of bytes-like objects, or a function that writes to
    the open file. Raises OSError if the disk refuses, and any error of such a function."""
    for name, content in files.items():
        path = Path(directory, name)
        temporary = path.with_name(f"{name}.tmp")
        try:
            with open(temporary, "wb") as f:
                if callable(content):
                    content(f)
                else:
                    f.writelines(content)
                f.flush()
                os.fsync(f.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        sync(directory)  # the new name itself


def sync(path):
    """Wait until a file's content, or a directory's names, are on disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as e:  # some shares (CIFS, WSL's DrvFs) cannot sync a directory
        if e.errno != errno.EINVAL or not os.path.isdir(path):
            raise
    finally:
        os.close(fd)


# ---------- tokens ------------------------------------------------------------


def header(dtype, count):
    """llm.c's header for `count` tokens, as bytes. Raises an error if it can't count that far."""
    numbers = np.zeros(256, np.int32)
    numbers[:3] = *FORMATS[dtype], count
    return numbers.tobytes()


def read_record(directory):
    """The content of prepare.json, or {} if there is none."""
    path = Path(directory, RECORD)
    return json.loads(path.read_text()) if path.exists() else {}


def open_split(directory, split):
    """Memory maps of a split's shards, in order, or of its one file. SystemExit if they are
    not one complete data set."""
    record = read_record(directory)
    found = Path(directory).glob(f"*_{split}_[0-9]*.bin")
    shards = sorted(path for path in found if path.stem.split("_")[-2] == split)  # of x_train_1 too
    names = {path.name.rpartition(f"_{split}_")[0] for path in shards}
    if len(names) > 1 or (shards and Path(directory, f"{split}.bin").exists()):
        raise SystemExit(f"{directory}: several data sets are here; leave one of them")
    files = [open_tokens(path) for path in shards or [Path(directory, f"{split}.bin")]]
    count = sum(map(len, files))
    prepared = record.get("tokens", {}).get(split, count)
    if count != prepared or not record.get("finished", True):
        raise SystemExit(
            f"{directory}: {count:,} of {prepared:,} tokens of {split} are here, or prepare.py has "
            f"not finished; start it again, or move {RECORD} away to do without the others")
    return files


def open_tokens(path):
    """A memory map of the tokens in path. SystemExit if it is missing or damaged."""
    if not path.exists():
        raise SystemExit(
            f"{path}: no such file; it must be a file of tokens, made by data/prepare.py or "
            "by the data set's own prepare.py; or pass another --dataset")
    size = path.stat().st_size
    head = np.fromfile(path, np.int32, count=3)
    dtype = np.dtype(np.uint16)
    offset = 0
    count = size // dtype.itemsize
    for with_header, (magic, _) in FORMATS.items():
        if len(head) == 3 and head[0] == magic:
            dtype = with_header
            offset = HEADER_BYTES
            count = int(head[2])
    if count < 1 or size != offset + count * dtype.itemsize:
        raise SystemExit(
            f"{path}: {size} bytes for a header of {offset} and {count} tokens of "
            f"{dtype.itemsize}; it is empty or damaged, prepare it again")
    tokens = np.memmap(path, dtype, mode="r", offset=offset)
    # An int32 or int64 file, NumPy's default, read as uint16 has zeros in between: upper halves.
    tail = tokens[len(tokens) % 4:][-1000:]
    if not offset and len(tail) > 200 and not tail[1::2].any() and len(set(tail[::2])) > 1:
        raise SystemExit(
            f"{path}: every other number is 0, as in int32 or int64: write uint16, or put llm.c's "
            "header before it (docs/data.md)")
    return tokens


def has_masks(directory):
    return ".mask" in read_record(directory).get("files", []) or any(Path(directory).glob("*.mask"))

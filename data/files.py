"""
The files of a data set, as prepare.py writes them and loader.py reads them.

Each split (train, val) is one file, or shards:

    train.bin                          nanoGPT's: uint16, one token after the other
    NAME_train_000001.bin, ...         llm.c's: a header, then uint16 or uint32

A train.bin may have the header too; tokens above 65,535 need it. The same directory has meta.json,
and prepare.json, which records how the files were made and whether they are complete.

X.bin may come with X.mask: one byte per token, without a header. The byte is 1 if the model
learns to predict that token, and 0 if not. Without masks it learns all tokens.
"""

import glob
import importlib
import json
import os
import re
from pathlib import Path

import numpy as np

# llm.c's header is 256 int32: a magic number, a version, the number of tokens, and zeros.
HEADER_BYTES = 256 * 4
# {type of the tokens: (magic number, version)}
FORMATS = {
    np.dtype(np.uint16): (20240520, 1),
    np.dtype(np.uint32): (20240801, 7),
}
# Types that a file may have by mistake, widest first: NumPy's defaults are int64 and float64.
OTHERS = ("int64", "float64", "int32", "float32")
LOOK = 1 << 15  # tokens at a file's start that are checked for such a type
RECORD = "prepare.json"


def extra(name, wanted_by):
    """The module extras/<name>.py, which a fork may have deleted. (configurator.py has the
    same function, but imports torch, and preparing data needs none.)"""
    path = Path(__file__).absolute().parents[1] / "extras" / f"{name}.py"
    if not path.exists():
        raise SystemExit(f"{wanted_by} needs extras/{name}.py, which is not here")
    return importlib.import_module(f"extras.{name}")


# ---------- writing: all or nothing -------------------------------------------


def write_files(directory, files):
    """Write {name: content}. If this is killed, each file is either complete or unchanged.

    A content is an iterable of bytes-like objects, or a function that writes to the open file.
    Raises OSError if the disk refuses, and any error of such a function; then no file has changed,
    unless only a rename or the last sync failed.
    """
    temporary = {name: Path(directory, f"{name}.tmp") for name in files}
    try:
        for name, content in files.items():
            with open(temporary[name], "wb") as f:
                if callable(content):
                    content(f)
                else:
                    f.writelines(content)
                f.flush()
                os.fsync(f.fileno())
        for name, path in temporary.items():
            os.replace(path, Path(directory, name))
        sync(directory)  # the renames themselves
    finally:
        for path in temporary.values():
            path.unlink(missing_ok=True)


def sync(path):
    """Wait until a file's content, or a directory's names, are on disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# ---------- tokens ------------------------------------------------------------


def header(dtype, count):
    """llm.c's header for `count` tokens, as bytes. SystemExit if it can't count that far."""
    if count >= 2**31:
        raise SystemExit(f"a shard of {count:,} tokens, beyond 2**31; cut the longest document")
    numbers = np.zeros(256, np.int32)
    numbers[:3] = *FORMATS[dtype], count
    return numbers.tobytes()


def shard_name(name, split, number):
    return f"{name}_{split}_{number:06d}.bin"


def file_pattern(split):
    """Matches a split's files; the first group is the name of a shard's data set."""
    return re.compile(rf"{split}\.bin|(.*)_{split}_[^_]+\.bin")


def read_record(directory):
    """The content of prepare.json, or {} if there is none."""
    path = Path(directory, RECORD)
    return json.loads(path.read_text()) if os.path.exists(path) else {}


def open_split(directory, split):
    """Memory maps of a split's shards, in order, or of its one file. SystemExit if they are
    not one complete data set."""
    record = read_record(directory)
    if not record.get("finished", True):
        raise SystemExit(f"{directory}: prepare.py has not finished here; start it again")
    paths = {}  # {name of a data set: paths}
    for file in sorted(glob.glob("*.bin", root_dir=directory)):
        match = file_pattern(split).fullmatch(file)
        if match:
            paths.setdefault(match[1], []).append(Path(directory, file))
    if len(paths) > 1:
        firsts = ", ".join(of_one[0].name for of_one in paths.values())
        raise SystemExit(
            f"{directory}: files of several data sets ({firsts}); leave one of them there")
    if not paths:
        open_tokens(Path(directory, f"{split}.bin"))  # raises: the file is missing
    _, of_one = paths.popitem()
    files = [open_tokens(path) for path in of_one]
    count = sum(map(len, files))
    prepared = record.get("tokens", {}).get(split, count)
    if count != prepared:
        raise SystemExit(
            f"{directory}: {count:,} of {prepared:,} tokens of {split} are here; copy or "
            f"prepare it again, or move {RECORD} away to do without the others")
    return files


def open_tokens(path):
    """A memory map of the tokens in path. SystemExit if it is missing or damaged."""
    path = Path(path)
    try:
        size = path.stat().st_size
        head = np.fromfile(path, np.int32, count=3)
    except OSError as e:
        raise SystemExit(
            f"{path}: {e.strerror}; it must be a file of tokens, made by data/prepare.py or "
            "by the data set's own prepare.py; or pass another --dataset")
    if head.tobytes().startswith(b"\x93NUMPY"):
        raise SystemExit(f"{path}: .npy; convert it: np.load(OLD).astype(np.uint16).tofile(NEW)")
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
    return np.memmap(path, dtype, mode="r", offset=offset)


def require_uint16(tokens, vocab_size):
    """SystemExit if a file without a header looks like another type: its first bytes, read as
    that type, are whole numbers below vocab_size."""
    if tokens.offset == HEADER_BYTES:
        return
    head = np.array(tokens[:LOOK])
    head = head[:len(head) // 4 * 4]
    for dtype in OTHERS:
        numbers = head.view(dtype)
        with np.errstate(invalid="ignore"):  # tokens read as floats may be NaN, which is no token
            is_token = (numbers >= 0) & (numbers < vocab_size) & (numbers == np.floor(numbers))
        # Zeros look the same in all types, and so may data with a short period, such as 1, 0.
        others = numbers[numbers != 0]
        if is_token.all() and len(others) >= 100 and len(np.unique(others)) > 1:
            raise SystemExit(
                f"{tokens.filename}: it looks like {dtype}, but without a header it must be "
                "uint16; write np.array(tokens, np.uint16), or uint32 after llm.c's header")


def open_masks(files):
    """Memory maps of the masks of a split's token files; [] if it has none. SystemExit if
    they do not fit."""
    paths = [Path(tokens.filename).with_suffix(".mask") for tokens in files]
    missing = [path for path in paths if not path.exists()]
    is_expected = ".mask" in read_record(paths[0].parent).get("files", [])
    if len(missing) == len(paths) and not is_expected:
        return []
    if missing:
        raise SystemExit(
            f"{missing[0]}: it is missing, but this data has masks; copy or prepare the data "
            "again")
    for path, tokens in zip(paths, files):
        if path.stat().st_size != len(tokens):
            raise SystemExit(
                f"{path}: {path.stat().st_size:,} bytes for {len(tokens):,} tokens, but each "
                "token has one byte; copy or prepare the data again")
    return [np.memmap(path, np.bool_, mode="r") for path in paths]

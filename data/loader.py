"""
Batches of tokens. Which ones come when is a pure function of (seed, split, step), so a
run that resumes has nothing to restore.

    batches = Batches(cfg, world)
    x, y = batches.train(step, micro)    # (batch_size, block_size) each, on the device

A split is cut into windows of block_size tokens. Each epoch visits every window once, in
an order that is computed window by window, without a shuffled index in memory. (nanoGPT
draws random offsets instead.)

A split is a file, train.bin or val.bin, or shards, *_train_*.bin or *_val_*.bin. A file
is nanoGPT's, uint16 without a header, or llm.c's, a header and then uint16 or uint32.
"""

import glob
import json
import os
import pickle
from pathlib import Path

import numpy as np
import torch

HERE = Path(__file__).absolute().parent
# llm.c's header is 256 int32: a magic number, a version, the number of tokens, and zeros.
HEADER_BYTES = 256 * 4
UINT32 = 20240801  # the magic number of files of uint32
DTYPE_OF_MAGIC = {20240520: np.dtype(np.uint16), UINT32: np.dtype(np.uint32)}


class Batches:
    """This rank's micro-batches. At any world size a step has the same samples, in order."""

    def __init__(self, cfg, world):
        self.cfg = cfg
        self.world = world
        # A batch too large for memory fails here, not after hours of listing its windows.
        np.empty((cfg.batch_size, cfg.block_size))
        self.files = {}
        for split in ("train", "val"):
            self.files[split] = TokenFiles(
                data_dir(cfg.dataset), split, cfg.block_size, cfg.vocab_size)

    def train(self, step, micro):
        """Inputs and targets of one micro-batch: (batch_size, block_size) each, int64."""
        cfg = self.cfg
        # gradient_accumulation_steps counts all ranks' micro-batches, as in nanoGPT.
        first_of_step = step * cfg.gradient_accumulation_steps
        number = first_of_step + micro * self.world.size + self.world.rank
        files = self.files["train"]
        windows = train_order(
            len(files), cfg.seed, first=number * cfg.batch_size, count=cfg.batch_size)
        return self.to_device(*files.batch(windows))

    def fixed(self, split):
        """Yield (inputs, targets, weight): this rank's part of the windows of an evaluation.

        weight: how many windows of the micro-batch count. All ranks yield equally often,
        for each forward is a collective. One that has run out of windows yields weight 0.
        """
        B = self.cfg.batch_size
        files = self.files[split]
        order = eval_order(len(files), self.cfg.eval_iters * B)
        for start in range(0, len(order), B * self.world.size):
            first = start + self.world.rank * B
            windows = order[first:first + B]
            weight = len(windows)
            # Repeat windows up to B: a compiled model would be compiled again for fewer.
            x, y = files.batch(np.resize(windows if weight else order, B))
            # Ignore those, but never all: the mean of nothing is NaN, and 0 * NaN too.
            y[max(1, weight):] = -1
            yield *self.to_device(x, y), weight

    def to_device(self, *tensors):
        device = self.world.device
        if device.type == "cuda":
            # From pinned memory the copy runs while the GPU computes.
            tensors = [t.pin_memory() for t in tensors]
        return [t.to(device, non_blocking=t.is_pinned()) for t in tensors]


class TokenFiles:
    """One split of a data set: windows of block_size tokens over memory-mapped files."""

    def __init__(self, directory, split, block_size, vocab_size):
        """SystemExit if the data is missing, damaged or does not fit the model."""
        self.block_size = block_size
        self.vocab_size = vocab_size
        shards = sorted(glob.glob(f"*_{split}_*.bin", root_dir=directory))
        names = shards or [f"{split}.bin"]
        self.files = [open_tokens(Path(directory, name)) for name in names]
        # n windows take n * block_size + 1 tokens: a last target follows the last input.
        windows = [(len(tokens) - 1) // block_size for tokens in self.files]
        self.starts = np.cumsum([0] + windows)  # the number of each file's first window
        if len(self) == 0:
            longest = max(self.files, key=len)
            raise SystemExit(
                f"{longest.filename}: {len(longest)} tokens, and block_size={block_size} "
                f"needs {block_size + 1}; lower it, or prepare more text")
        # Look at 100 windows now: the tokens of another vocabulary nearly always show.
        self.batch(eval_order(len(self), 100))

    def __len__(self):
        return int(self.starts[-1])

    def batch(self, windows):
        """Inputs and targets of these windows: (len(windows), block_size) each, int64."""
        T = self.block_size
        rows = np.empty((len(windows), T + 1), dtype=np.int64)
        files = np.searchsorted(self.starts, windows, side="right") - 1
        for row, window, file in zip(rows, windows, files):
            tokens = self.files[file]
            start = (window - self.starts[file]) * T
            row[:] = tokens[start:start + T + 1]
            if row.max() >= self.vocab_size:
                raise SystemExit(
                    f"{tokens.filename}: token {row.max()} is beyond vocab_size="
                    f"{self.vocab_size}; use this model's tokenizer, or fix meta.json")
        rows = torch.from_numpy(rows)
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


# ---------- files -------------------------------------------------------------


def data_dir(dataset):
    """data/<dataset>; a path to a directory is taken as it is."""
    return Path(dataset) if os.path.isdir(dataset) else HERE / dataset


def open_tokens(path):
    """A memory map of the tokens in path. SystemExit if it is missing or damaged."""
    try:
        size = path.stat().st_size
        head = np.fromfile(path, dtype=np.int32, count=3)
    except OSError as e:
        raise SystemExit(
            f"{path}: {e.strerror}; it must be a file of tokens, made by the data set's own "
            "prepare.py or by data/prepare.py; or pass another --dataset")
    has_header = len(head) == 3 and head[0] in DTYPE_OF_MAGIC
    dtype = DTYPE_OF_MAGIC[head[0]] if has_header else np.dtype(np.uint16)
    offset = HEADER_BYTES if has_header else 0
    n = int(head[2]) if has_header else size // dtype.itemsize
    if n < 1 or size != offset + n * dtype.itemsize:
        raise SystemExit(
            f"{path}: {size} bytes for a header of {offset} and {n} tokens of "
            f"{dtype.itemsize}; it is empty or damaged, prepare it again")
    return np.memmap(path, dtype, mode="r", offset=offset)


def read_meta(directory):
    """What a data set says about its tokens: vocab_size, and a tokenizer's name or a list
    of chars; {} if it says nothing. SystemExit if that is damaged."""
    path = Path(directory, "meta.json")
    if not os.path.exists(path):
        path = Path(directory, "meta.pkl")  # nanoGPT's
    if not os.path.exists(path):
        return {}
    try:
        with path.open("rb") as f:
            meta = json.load(f) if path.suffix == ".json" else SafeUnpickler(f, {}).load()
        if "itos" in meta:  # {id: character}
            chars = [char for _, char in sorted(meta["itos"].items())]
            meta = {"vocab_size": len(chars), "chars": chars}
        vocab_size = meta.get("vocab_size", 1)
        # The largest vocabularies have a quarter of a million tokens.
        if type(vocab_size) is not int or not 1 <= vocab_size < 2**24:
            raise ValueError(f"vocab_size is {vocab_size!r}")
        return meta
    except Exception as e:
        raise SystemExit(
            f"{path}: not readable ({type(e).__name__}: {e}); prepare the data again")


class SafeUnpickler(pickle.Unpickler):
    """Reads a pickle without running code from it. Numbers, strings, lists and dicts need
    none. Anything else is refused unless it is in admitted, {module: "name name"}."""

    def __init__(self, file, admitted):
        super().__init__(file)
        self.admitted = admitted

    def find_class(self, module, name):
        if name not in self.admitted.get(module, "").split():
            raise pickle.UnpicklingError(f"it wants to run {module}.{name}")
        return super().find_class(module, name)


# ---------- order -------------------------------------------------------------


def train_order(n, seed, first, count):
    """Windows of training samples first .. first + count - 1. An epoch is n samples."""
    samples = range(first, first + count)
    return np.array([permute(s % n, n, key=(seed, s // n)) for s in samples])


def permute(i, n, key):
    """Where i goes in a pseudo-random permutation of range(n), in O(1) memory."""
    # A Feistel network permutes the numbers below side * side, which is at least n. If i
    # goes to n or beyond, it goes on from there, and ends below n where no other does.
    side = 1 << max(1, ((n - 1).bit_length() + 1) // 2)
    round_keys = np.random.SeedSequence(key).generate_state(4).tolist()
    while True:
        left, right = divmod(i, side)
        for round_key in round_keys:
            # Each round can be undone, whatever scramble returns: so it is a permutation.
            left, right = right, left ^ scramble(right ^ round_key) % side
        i = left * side + right
        if i < n:
            return i


def scramble(x):
    """32 bits, each of which depends on many bits of x."""
    x = x * 0x9E3779B1 & 0xFFFFFFFF
    x = (x ^ x >> 15) * 0x85EBCA6B & 0xFFFFFFFF
    return x ^ x >> 13


def eval_order(n, count):
    """The fixed windows of an evaluation: `count` of n, evenly spread, or all."""
    count = min(n, count)
    return np.arange(count) * n // count

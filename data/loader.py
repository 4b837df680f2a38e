"""
Batches of tokens. Which ones come when is a pure function of (seed, split, step), so a
run that resumes has nothing to restore.

    batches = Batches(cfg, world)
    x, y = batches.train(step, micro)    # (batch_size, block_size) each, on the device

A split is cut into windows of block_size tokens. Each epoch visits every window once, in
an order that is computed window by window, without a shuffled index in memory. (nanoGPT
draws random offsets instead.)

A split is a file or shards; files.py has their layout.
"""

import json
import os
import pickle
import time
from bisect import bisect_right
from pathlib import Path

import numpy as np
import torch

from data.files import open_split

HERE = Path(__file__).absolute().parent


class Batches:
    """This rank's micro-batches. At any world size a step has the same samples, in order."""

    def __init__(self, cfg, world):
        self.cfg = cfg
        self.world = world
        self.seconds = 0  # that training has waited for its batches
        self.files = {}
        directory = data_dir(cfg.dataset)
        for split in ("train", "val"):
            self.files[split] = TokenFiles(directory, split, cfg.block_size, cfg.vocab_size)

    def train(self, step, micro):
        """read(step, micro), and the time that it takes is added to self.seconds."""
        start = time.perf_counter()
        batch = self.read(step, micro)
        self.seconds += time.perf_counter() - start
        return batch

    def read(self, step, micro):
        """Inputs and targets of one micro-batch: (batch_size, block_size) each, int64."""
        cfg = self.cfg
        world = self.world
        # gradient_accumulation_steps counts all ranks' micro-batches, as in nanoGPT.
        number = step * cfg.gradient_accumulation_steps
        number += micro * world.size + world.rank
        files = self.files["train"]
        windows = train_order(
            len(files),
            cfg.seed,
            first=number * cfg.batch_size,
            count=cfg.batch_size,
        )
        x, y = files.batch(windows)
        return self.to_device(x, y)

    def fixed(self, split):
        """Yield (inputs, targets, weight): this rank's part of the windows of an evaluation.

        weight: how many windows of the micro-batch count. All ranks yield equally often,
        for each forward is a collective. One that has run out of windows yields weight 0.
        """
        B = self.cfg.batch_size
        world = self.world
        files = self.files[split]
        order = eval_order(len(files), self.cfg.eval_iters * B)
        for start in range(0, len(order), world.size * B):
            first = start + world.rank * B
            windows = order[first:first + B]
            weight = len(windows)
            if weight == 0:
                windows = order
            # Repeat windows up to B: a compiled model would be compiled again for fewer.
            x, y = files.batch(np.resize(windows, B))
            # Their targets are ignored. Keep one row at least: the mean of none is NaN.
            y[max(1, weight):] = -1
            x, y = self.to_device(x, y)
            yield x, y, weight

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
        self.files = open_split(directory, split)
        # n windows take n * block_size + 1 tokens: a last target follows the last input.
        self.starts = [0]  # the number of each file's first window
        for tokens in self.files:
            windows = (len(tokens) - 1) // block_size
            self.starts.append(self.starts[-1] + windows)
        if len(self) == 0:
            longest = max(self.files, key=len)
            raise SystemExit(
                f"{longest.filename}: {len(longest)} tokens, and block_size={block_size} "
                f"needs {block_size + 1}; lower it, or prepare more text")
        # Look at 100 windows now: the tokens of another vocabulary nearly always show.
        self.batch(eval_order(len(self), 100))

    def __len__(self):
        return self.starts[-1]

    def batch(self, windows):
        """Inputs and targets of these windows: (len(windows), block_size) each, int64."""
        T = self.block_size
        rows = np.empty((len(windows), T + 1), np.int64)
        for row, window in zip(rows, windows):
            row[:] = self.window(window)
        rows = torch.from_numpy(rows)
        x = rows[:, :-1]
        y = rows[:, 1:]
        return x.contiguous(), y.contiguous()

    def window(self, number):
        """The block_size + 1 tokens of a window."""
        T = self.block_size
        file = bisect_right(self.starts, number) - 1
        tokens = self.files[file]
        start = (number - self.starts[file]) * T
        row = tokens[start:start + T + 1]
        largest = row.max()
        if largest >= self.vocab_size:
            raise SystemExit(
                f"{tokens.filename}: token {largest} is beyond vocab_size="
                f"{self.vocab_size}; use this model's tokenizer, or fix meta.json")
        return row


# ---------- files -------------------------------------------------------------


def data_dir(dataset):
    """data/<dataset>; a path to a directory is taken as it is."""
    return Path(dataset) if os.path.isdir(dataset) else HERE / dataset


def read_meta(directory):
    """What a data set says about its tokens: vocab_size, and a tokenizer's name or a list
    of chars; {} if it says nothing. SystemExit if that is damaged."""
    readers = {"meta.json": json.load, "meta.pkl": load_pickle}
    for name, load in readers.items():
        path = Path(directory, name)
        if os.path.exists(path):
            return checked_meta(path, load)
    return {}


def checked_meta(path, load):
    try:
        with path.open("rb") as f:
            meta = load(f)
        vocab_size = meta.get("vocab_size", 1)
        if type(vocab_size) is not int or vocab_size < 1:
            raise ValueError(f"vocab_size is {vocab_size!r}")
        return meta
    except Exception as e:
        raise SystemExit(
            f"{path}: not readable ({type(e).__name__}: {e}); prepare the data again")


def load_pickle(file):
    """nanoGPT's meta.pkl. Of a data set of characters it has {id: character}."""
    meta = SafeUnpickler(file, {}).load()
    if "itos" not in meta:
        return meta
    chars = [char for _, char in sorted(meta["itos"].items())]
    return {"vocab_size": len(chars), "chars": chars}


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
    order = []
    for sample in range(first, first + count):
        epoch, i = divmod(sample, n)
        order.append(permute(i, n, key=(seed, epoch)))
    return np.array(order)


def permute(i, n, key):
    """Where i goes in a pseudo-random permutation of range(n), in O(1) memory."""
    # A Feistel network permutes the numbers below side * side, which is at least n.
    bits = ((n - 1).bit_length() + 1) // 2
    side = 1 << max(1, bits)
    round_keys = np.random.SeedSequence(key).generate_state(4).tolist()
    # Cycle walking: permute again until the result is below n.
    while True:
        left, right = divmod(i, side)
        for round_key in round_keys:
            # Each round can be undone, whatever scramble returns: so it is a permutation.
            scrambled = left ^ scramble(right ^ round_key) % side
            left = right
            right = scrambled
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

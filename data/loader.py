"""
Batches of tokens. Their order is a pure function of (seed, split, step), so a resumed run has
nothing to restore.

    batches = open_batches(cfg, world)
    x, y, weight = batches.get(step, micro)  # (batch_size, block_size) each, on the device
    batches.prefetch_next(step, micro)       # read the following one while the GPU is busy

A split is cut into windows of block_size tokens. Each epoch visits every window once, in
an order that is computed window by window, without a shuffled index in memory, and each cuts
the text at other places (but for each file's last window): a model that saw the same windows again
would learn them by heart. (torch.randperm would take 8 bytes a window on every rank; nanoGPT's
random offsets read some text twice and some never.)

A split is a file or shards; files.py describes them. Masked-out targets are -1, which models
ignore.
"""

import json
from bisect import bisect_right
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch

from configurator import named_file
from data.files import has_masks, open_split

HERE = Path(__file__).absolute().parent
GOLDEN = (5**0.5 - 1) / 2  # epoch e begins e * GOLDEN % 1 of a window later: evenly spread


def open_batches(cfg, world):
    """The Batches for cfg.dataset, which may have masks."""
    if has_masks(data_dir(cfg.dataset)):
        return named_file("masked").MaskedBatches(cfg, world)
    return Batches(cfg, world, TokenFiles)


class Batches:
    """This rank's micro-batches. A step has the same samples, in order, at any world size.
    kind: TokenFiles, or a subclass."""

    def __init__(self, cfg, world, kind):
        self.cfg = cfg
        self.world = world
        self.prefetched = {}  # {(step, micro): its batch}, one at a time
        self.files = {}  # {split: TokenFiles}
        directory = data_dir(cfg.dataset)
        for split in ("train", "val"):
            self.files[split] = kind(
                directory, split, cfg.sizes.block_size, cfg.sizes.vocab_size)

    def get(self, step, micro):
        """(inputs, targets, weight) of one micro-batch: (batch_size, block_size) each, int64.
        Reads it now unless it was prefetched.

        weight: how many of its targets count, relative to the mean micro-batch of this step
        over all ranks. Without masks it is 1.
        """
        batch = self.prefetched.pop((step, micro), None)  # keep no second reference
        return batch or self.read(step, micro)

    def prefetch_next(self, step, micro):
        """Read the micro-batch after this one, and keep it for get()."""
        micro += 1
        if micro == self.cfg.gradient_accumulation_steps // self.world.size:
            step += 1
            micro = 0
        self.prefetched = {(step, micro): self.read(step, micro)}

    def read(self, step, micro):
        """The batch that get() returns."""
        B = self.cfg.batch_size
        world = self.world
        # gradient_accumulation_steps counts all ranks' micro-batches, as in nanoGPT.
        number = step * self.cfg.gradient_accumulation_steps
        number += micro * world.size + world.rank
        x, y = self.files["train"].batch(self.samples(number * B, B))
        x, y, count = self.ready(x, y)
        return x, y, count / self.mean_targets(step)

    def samples(self, first, count):
        """The windows of training samples first .. first + count - 1."""
        return train_order(len(self.files["train"]), self.cfg.seed, first, count)

    def mean_targets(self, step):
        """How many targets of a micro-batch count, averaged over all ranks' micro-batches of
        this step: here all."""
        return self.cfg.batch_size * self.cfg.sizes.block_size

    def fixed(self, split):
        """Yield (inputs, targets, weight): this rank's share of an evaluation's windows.

        weight: how many targets of the micro-batch count, in windows. All ranks yield equally
        often, since each forward is a collective; a rank that runs out of windows has weight 0.
        """
        B = self.cfg.batch_size
        world = self.world
        files = self.files[split]
        order = eval_order(len(files), self.cfg.eval_iters * B)
        for start in range(0, len(order), world.size * B):
            first = start + world.rank * B
            windows = order[first:first + B]
            # Repeat windows up to B: a smaller batch would recompile a compiled model.
            x, y = files.batch(np.resize(windows if len(windows) else order, B))
            y[len(windows):] = -1
            x, y, count = self.ready(x, y)
            yield x, y, count / self.cfg.sizes.block_size

    def ready(self, x, y):
        """(x, y, how many targets count), with x and y on the device."""
        count = np.count_nonzero(y.numpy() != -1)
        if count == 0:
            # Keep one target: the mean over none is NaN. The batch has weight 0.
            y[0, 0] = 0
        device = self.world.device
        if device.type == "cuda":
            # Copying from pinned memory overlaps with the GPU's work.
            x = x.pin_memory()
            y = y.pin_memory()
        x = x.to(device, non_blocking=x.is_pinned())
        y = y.to(device, non_blocking=y.is_pinned())
        return x, y, count


class TokenFiles:
    """One split of a data set: windows of block_size tokens in memory-mapped files.
    docs/fork.md shows what a subclass without files needs."""

    def __init__(self, directory, split, block_size, vocab_size):
        """SystemExit if the data is missing, damaged or does not fit the model."""
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.files = open_split(directory, split)
        # n windows take n * block_size + 1 tokens: the last input needs a target too.
        windows = [(len(tokens) - 1) // block_size for tokens in self.files]
        self.starts = [*accumulate(windows, initial=0)]  # the number of each file's first window
        self.tokens_in_all = sum(map(len, self.files))
        if len(self) == 0:
            raise SystemExit(
                f"{directory}: {self.tokens_in_all} tokens of {split}, but block_size={block_size} "
                f"needs {block_size + 1}; lower it, or prepare more text")
        # Check 100 windows now: tokens of another vocabulary nearly always show up.
        self.batch(eval_order(len(self), 100))

    def __len__(self):
        return self.starts[-1]

    def place(self, window):
        """(file, position of its first token in it) of a window, numbered as by train_order."""
        epoch, window = divmod(int(window), len(self))
        file = bisect_right(self.starts, window) - 1
        start = (window - self.starts[file]) * self.block_size
        start += int(epoch * GOLDEN % 1 * self.block_size)
        last = len(self.files[file]) - self.block_size - 1
        return file, min(start, last)

    def batch(self, windows):
        """Inputs and targets of these windows: (len(windows), block_size) each, int64."""
        T = self.block_size
        x = np.empty((len(windows), T), np.int64)
        y = np.empty_like(x)
        for row, window in enumerate(windows):
            file, start = self.place(window)
            tokens = self.files[file][start:start + T + 1]
            largest = tokens.max()
            if largest >= self.vocab_size:
                raise SystemExit(
                    f"{self.files[file].filename}: token {largest} is beyond vocab_size="
                    f"{self.vocab_size}; use this model's tokenizer, or fix meta.json")
            x[row] = tokens[:-1]
            y[row] = tokens[1:]
        return torch.from_numpy(x), torch.from_numpy(y)


# ---------- files -------------------------------------------------------------


def data_dir(dataset):
    """data/<dataset>, or the directory of that path: the one with tokens."""
    paths = [Path(dataset).expanduser(), HERE / dataset]  # a shell leaves the ~ of --dataset=~/x
    # A directory of raw text may have the data set's name.
    found = [path for path in paths if any(path.glob("*train*.bin"))]
    if len(found) == 2 and not found[0].samefile(found[1]):
        raise SystemExit(f"dataset={dataset}: {found[0].absolute()} or {found[1]}? pass either")
    return found[0] if found else paths[1]


def read_meta(directory):
    """The data set's meta.json: vocab_size, and a tokenizer's name or a list of chars; {} if it
    has none. SystemExit for nanoGPT's meta.pkl: a pickle could run code."""
    path = Path(directory, "meta.json")
    if path.exists():
        return json.loads(path.read_text())
    if path.with_suffix(".pkl").exists():
        raise SystemExit(f"{directory}: has a meta.pkl; make it a meta.json, see docs/data.md")
    return {}


# ---------- order -------------------------------------------------------------


def train_order(n, seed, first, count):
    """The windows of training samples first .. first + count - 1. An epoch visits all n windows:
    epoch e's have the numbers e * n .. e * n + n - 1."""
    epochs, samples = np.divmod(np.arange(first, first + count), n)
    order = np.empty(count, np.int64)
    for epoch in set(epochs.tolist()):
        now = epochs == epoch
        order[now] = epoch * n + permute(samples[now], n, key=(seed, epoch))
    return order


def permute(numbers, n, key):
    """These elements of a pseudo-random permutation of range(n), in O(1) memory."""
    # A Feistel network permutes the numbers below side * side, which is at least n.
    bits = ((n - 1).bit_length() + 1) // 2
    side = 1 << max(1, bits)
    round_keys = np.random.SeedSequence(key).generate_state(4).tolist()
    result = numbers.astype(np.uint64)
    # Cycle walking: permute again any numbers that are not below n.
    beyond = np.full(len(numbers), True)
    while beyond.any():
        left, right = np.divmod(result[beyond], side)
        for round_key in round_keys:
            # Each round is invertible whatever scramble returns, so this is a permutation.
            scrambled = left ^ scramble(right ^ round_key) % side
            left = right
            right = scrambled
        result[beyond] = left * side + right
        beyond = result >= n
    return result.astype(np.int64)


def scramble(x):
    """32 bits, each depending on many bits of x."""
    x = x * 0x9E3779B1 & 0xFFFFFFFF
    x = (x ^ x >> 15) * 0x85EBCA6B & 0xFFFFFFFF
    return x ^ x >> 13


def eval_order(n, count):
    """The fixed windows of an evaluation: `count` of n, evenly spread, or all."""
    count = min(n, count)
    return np.arange(count) * n // count

"""
Batches of tokens. Their order is a pure function of (seed, split, step), so a resumed run has
nothing to restore.

    batches = Batches(cfg, world)
    x, y, weight = batches.get(step, micro)  # (batch_size, block_size) each, on the device
    batches.prefetch_next(step, micro)       # read the following one while the GPU is busy

A split is cut into windows of block_size tokens. Each epoch visits every window once, in
an order that is computed window by window, without a shuffled index in memory, and each cuts
the text at other places: a model that saw the same windows again would learn them by heart.
(torch.randperm would take 8 bytes a window on every rank; nanoGPT's random offsets read some text
twice and some never. Here a sample's number gives its window, at any world size, without state.)

A split is a file or shards; files.py describes them, and the masks. Masked-out targets are -1,
which models ignore. A window with no other targets is read anyway, with weight 0: skipping it
would make the order depend on the masks.
"""

import glob
import json
import os
import pickle
import time
from bisect import bisect_right
from pathlib import Path

import numpy as np
import torch

from data.files import open_masks, open_split, require_uint16
from data.tokenizer import TOKENIZERS

HERE = Path(__file__).absolute().parent
GOLDEN = (5**0.5 - 1) / 2  # epoch e begins e * GOLDEN % 1 of a window later: evenly spread


class Batches:
    """This rank's micro-batches. A step has the same samples, in order, at any world size."""

    def __init__(self, cfg, world):
        self.cfg = cfg
        self.world = world
        self.counted = None, 0  # a step, and its mean_targets
        self.prefetched = None, None  # (step, micro), and its batch
        self.seconds = 0  # that training waited for reads since the last log line
        self.files = {}  # {split: TokenFiles}
        directory = data_dir(cfg.dataset)
        for split in ("train", "val"):
            files = TokenFiles(directory, split, cfg.sizes.block_size, cfg.sizes.vocab_size)
            if files.count(eval_order(len(files), cfg.eval_iters * cfg.batch_size)) == 0:
                raise SystemExit(
                    f"{directory}: in the windows of {split} that an evaluation reads, "
                    "the mask leaves out every token; raise eval_iters, or prepare again "
                    "with more text or another block_size")
            self.files[split] = files

    def get(self, step, micro):
        """(inputs, targets, weight) of one micro-batch: (batch_size, block_size) each, int64.
        Reads it now unless it was prefetched.

        weight: how many of its targets count, relative to the mean micro-batch of this step
        over all ranks. Without masks it is 1.
        """
        found, batch = self.prefetched
        self.prefetched = None, None  # or its memory would be kept for too long
        if found != (step, micro):
            batch = self.read(step, micro)
        return batch

    def prefetch_next(self, step, micro):
        """Read the micro-batch after this one, and keep it for get()."""
        micro += 1
        if micro == self.cfg.gradient_accumulation_steps // self.world.size:
            step += 1
            micro = 0
        self.prefetched = (step, micro), self.read(step, micro)

    def read(self, step, micro):
        """The batch that get() returns; adds the time it takes to self.seconds."""
        started = time.perf_counter()
        B = self.cfg.batch_size
        world = self.world
        # gradient_accumulation_steps counts all ranks' micro-batches, as in nanoGPT.
        number = step * self.cfg.gradient_accumulation_steps
        number += micro * world.size + world.rank
        files = self.files["train"]
        windows = self.samples(number * B, B)
        x, y = files.batch(windows)
        left = files.count(windows) if files.masks else y.numel()
        is_typed = x.dtype == y.dtype == torch.int64
        # Else mean_targets would count other targets.
        if not is_typed or np.count_nonzero(y.numpy() != -1) != left:
            raise SystemExit(
                f"{type(files).__name__}: batch() must give int64, and -1 as a target only if "
                "masks is true and counts has how many are left; see docs/fork.md")
        x, y, count = self.ready(x, y)
        weight = count / self.mean_targets(step)
        self.seconds += time.perf_counter() - started
        return x, y, weight

    def samples(self, first, count):
        """The windows of training samples first .. first + count - 1."""
        return train_order(len(self.files["train"]), self.cfg.seed, first, count)

    def mean_targets(self, step):
        """How many targets of a micro-batch count, averaged over all ranks' micro-batches of
        this step. Each rank counts all of them, so that no rank waits for another."""
        A = self.cfg.gradient_accumulation_steps
        B = self.cfg.batch_size
        files = self.files["train"]
        if not files.masks:
            return B * self.cfg.sizes.block_size
        if self.counted[0] != step:
            total = files.count(self.samples(step * A * B, A * B))
            self.counted = step, total / A or 1  # 1: without targets all weights are 0
        return self.counted[1]

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
        x, y = self.to_device(x, y)
        return x, y, count

    def to_device(self, *tensors):
        device = self.world.device
        if device.type == "cuda":
            # Copying from pinned memory overlaps with the GPU's work.
            tensors = [t.pin_memory() for t in tensors]
        return [t.to(device, non_blocking=t.is_pinned()) for t in tensors]


class TokenFiles:
    """One split of a data set: windows of block_size tokens in memory-mapped files.
    docs/fork.md shows what a subclass without files needs."""

    masks = ()  # those of its files; true if a target may be -1

    def __init__(self, directory, split, block_size, vocab_size):
        """SystemExit if the data is missing, damaged or does not fit the model."""
        self.block_size = block_size
        self.vocab_size = vocab_size
        window = read_meta(directory).get("window")
        if window not in (None, block_size):
            raise SystemExit(
                f"block_size={block_size}, but {directory} is padded to windows of {window}; "
                f"pass --block_size={window}, or prepare it again with --window={block_size}")
        self.files = open_split(directory, split)
        self.masks = open_masks(self.files)
        self.moves = window is None and not self.masks  # padded windows stay, and counted ones
        # n windows take n * block_size + 1 tokens: the last input needs a target too.
        self.starts = [0]  # the number of each file's first window
        for tokens in self.files:
            windows = (len(tokens) - 1) // block_size
            self.starts.append(self.starts[-1] + windows)
        self.tokens_in_all = sum(map(len, self.files))
        if len(self) == 0:
            longest = max(self.files, key=len)
            raise SystemExit(
                f"{longest.filename}: {len(longest)} tokens, but block_size={block_size} "
                f"needs {block_size + 1}; lower it, or prepare more text, or again with a larger "
                "--val_fraction")
        # How many targets count in each window.
        counts = []
        for mask, start, end in zip(self.masks, self.starts, self.starts[1:]):
            targets = mask[1:(end - start) * block_size + 1]
            counts.append(np.count_nonzero(targets.reshape(-1, block_size), axis=1))
        self.counts = np.concatenate(counts) if counts else None
        for tokens in self.files:
            require_uint16(tokens, vocab_size)
        # Check 100 windows now: tokens of another vocabulary nearly always show up.
        inputs, _ = self.batch(eval_order(len(self), 100))
        self.largest = inputs.max().item()

    def __len__(self):
        return self.starts[-1]

    def count(self, windows):
        """How many targets of these windows count."""
        if not self.masks:
            return len(windows) * self.block_size
        return self.counts[windows % len(self)].sum().item()

    def place(self, window):
        """(file, position of its first token in it) of a window, numbered as by train_order."""
        epoch, window = divmod(int(window), len(self))
        file = bisect_right(self.starts, window) - 1
        start = (window - self.starts[file]) * self.block_size
        if self.moves:
            start += int(epoch * GOLDEN % 1 * self.block_size)
        return file, min(start, len(self.files[file]) - self.block_size - 1)

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
            if self.masks:
                learned = self.masks[file][start + 1:start + T + 1]
                y[row, ~learned] = -1
        return torch.from_numpy(x), torch.from_numpy(y)


# ---------- files -------------------------------------------------------------


def data_dir(dataset):
    """data/<dataset>, or the directory of that path: the one with tokens."""
    dataset = os.path.expanduser(dataset)  # a shell leaves the ~ in --dataset=~/x
    paths = [Path(path) for path in (dataset, HERE / dataset) if os.path.isdir(path)]
    found = [path for path in paths if glob.glob("*train*.bin", root_dir=path)]
    if len(found) == 2 and not found[0].samefile(found[1]):
        raise SystemExit(f"dataset={dataset}: {found[0].absolute()} or {found[1]}? pass either")
    # A directory of raw text may have the data set's name.
    return [*found, *paths, HERE / dataset][0]


def read_meta(directory):
    """The data set's meta.json or meta.pkl: vocab_size, and a tokenizer's name or a list of
    chars; {} if it has neither. SystemExit if the file is damaged."""
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
        if "chars" not in meta and meta.get("tokenizer") not in (None, *TOKENIZERS):
            raise ValueError(f"tokenizer is {meta['tokenizer']!r}, but must be one of {TOKENIZERS}")
        return meta
    except Exception as e:
        raise SystemExit(
            f"{path}: {type(e).__name__}: {e}; mend it, or prepare the data again")


def load_pickle(file):
    """Load nanoGPT's meta.pkl. For a data set of characters it has {id: character}."""
    meta = SafeUnpickler(file, {}).load()
    if "itos" not in meta:
        return meta
    chars = [char for _, char in sorted(meta["itos"].items())]
    return {"vocab_size": len(chars), "chars": chars}


class SafeUnpickler(pickle.Unpickler):
    """Reads a pickle without running code from it. Numbers, strings, lists and dicts are
    safe. Anything else is refused unless it is in admitted, {module: "name name"}."""

    def __init__(self, file, admitted):
        super().__init__(file)
        self.admitted = admitted

    def find_class(self, module, name):
        if name not in self.admitted.get(module, "").split():
            raise pickle.UnpicklingError(f"it wants to run {module}.{name}")
        return super().find_class(module, name)


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

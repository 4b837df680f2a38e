"""
Batches of tokens. Which ones come when is a pure function of (seed, split, step), so a run that
resumes has nothing to restore.

    batches = Batches(cfg, world)
    x, y = batches.train(step, micro)               # (batch_size, block_size) each, on the device

A file is cut into windows of block_size tokens. Each epoch visits every window once, in an order
computed window by window: no shuffled index in memory. nanoGPT draws offsets at random instead.
Formats: nanoGPT's headerless uint16, and llm.c's 256-int32 header before uint16 or uint32, in
train.bin and val.bin or in shards *_train_*.bin and *_val_*.bin.
"""

import glob
import json
import os
import pickle

import numpy as np
import torch

HERE = os.path.dirname(os.path.abspath(__file__))
HEADER_BYTES = 256 * 4  # llm.c's: magic, version, number of tokens, padding
UINT32 = 20240801  # the magic of files of uint32 tokens; llm.c's Llama 3 files have version 7
DTYPE_OF_MAGIC = {20240520: np.dtype(np.uint16), UINT32: np.dtype(np.uint32)}


class Batches:
    """This rank's micro-batches. A step's samples are the same, in order, for any world size."""

    def __init__(self, cfg, world):
        self.cfg, self.world = cfg, world
        np.empty((cfg.batch_size, cfg.block_size))  # too large? say it before an hour of counting
        self.files = {split: TokenFiles(data_dir(cfg.dataset), split, cfg.block_size,
                                        cfg.vocab_size) for split in ("train", "val")}

    def train(self, step, micro):
        """Inputs and targets of one micro-batch: (batch_size, block_size) each, int64."""
        cfg, files = self.cfg, self.files["train"]
        # gradient_accumulation_steps counts all ranks' micro-batches, as in nanoGPT
        part = step * cfg.gradient_accumulation_steps + micro * self.world.size + self.world.rank
        windows = train_order(len(files), cfg.seed, part * cfg.batch_size, cfg.batch_size)
        return self.to_device(*files.batch(windows))

    def fixed(self, split):
        """Yield (inputs, targets, weight): this rank's part of an evaluation's fixed windows."""
        B, files = self.cfg.batch_size, self.files[split]
        order = eval_order(len(files), self.cfg.eval_iters * B)
        # Every rank gets equally many micro-batches, for every forward is a collective:
        # a rank that runs out of windows repeats the first one with weight 0.
        for start in range(0, len(order), B * self.world.size):
            windows = order[start + self.world.rank * B:][:B]
            # of full size, or a compiled model would be compiled again, and for any size
            x, y = files.batch(np.resize(windows if len(windows) else order, B))
            y[max(1, len(windows)):] = -1  # ignored
            yield *self.to_device(x, y), len(windows)

    def to_device(self, x, y):
        if self.world.device.type == "cuda":  # pinned, the copy runs while the GPU computes
            x, y = x.pin_memory(), y.pin_memory()
        return [t.to(self.world.device, non_blocking=t.is_pinned()) for t in (x, y)]


class TokenFiles:
    """One split of a data set: windows of block_size tokens over memory-mapped files."""

    def __init__(self, directory, split, block_size, vocab_size):
        """SystemExit if the data is missing, damaged or does not fit the model."""
        self.block_size, self.vocab_size = block_size, vocab_size
        paths = sorted(glob.glob(os.path.join(glob.escape(directory), f"*_{split}_*.bin")))
        paths = paths or [os.path.join(directory, f"{split}.bin")]
        if not os.path.exists(paths[0]):
            own = os.path.exists(os.path.join(directory, "prepare.py"))
            made = os.path.relpath(os.path.join(directory if own else HERE, "prepare.py"))
            raise SystemExit(f"{paths[0]} is missing; run python {made}, or pass another --dataset")
        self.files = [open_tokens(path) for path in paths]
        # the last target lies beyond the last input: n windows take n * block_size + 1 tokens
        windows = [(len(tokens) - 1) // block_size for tokens in self.files]
        self.starts = np.cumsum([0] + windows)
        if len(self) < 1:
            raise SystemExit(f"{paths[0]}: {max(map(len, self.files))} tokens, and block_size="
                             f"{block_size} needs {block_size + 1}; lower it, or prepare more text")
        self.batch(eval_order(len(self), 100))  # a wrong tokenizer nearly always shows here

    def __len__(self):
        return int(self.starts[-1])

    def batch(self, windows):
        """Inputs and targets of these window numbers: (len(windows), block_size) each, int64."""
        T = self.block_size
        out = np.empty((len(windows), T + 1), dtype=np.int64)
        for row, window in zip(out, windows):
            file = int(np.searchsorted(self.starts, window, side="right")) - 1
            tokens, start = self.files[file], (int(window) - int(self.starts[file])) * T
            row[:] = tokens[start:start + T + 1]
            if row.max() >= self.vocab_size:
                raise SystemExit(f"{tokens.filename}: token {row.max()} is beyond vocab_size="
                                 f"{self.vocab_size}; use this model's tokenizer, or fix meta.json")
        out = torch.from_numpy(out)
        return out[:, :-1].contiguous(), out[:, 1:].contiguous()


def open_tokens(path):
    """A memory map of the tokens in path, any of the formats. SystemExit if it is damaged."""
    try:
        size, head = os.path.getsize(path), np.fromfile(path, dtype=np.int32, count=3)
    except OSError as e:
        raise SystemExit(f"{path}: {e.strerror}; it must be a file of tokens")
    dtype, offset, n = np.dtype(np.uint16), 0, size // 2
    if len(head) == 3 and head[0] in DTYPE_OF_MAGIC:
        dtype, offset, n = DTYPE_OF_MAGIC[head[0]], HEADER_BYTES, int(head[2])
    if n < 1 or size != offset + n * dtype.itemsize:
        raise SystemExit(f"{path}: {size} bytes for a header of {offset} and {n} tokens of "
                         f"{dtype.itemsize}; it is empty or damaged, prepare it again")
    return np.memmap(path, dtype, mode="r", offset=offset)


def train_order(n, seed, first, count):
    """Window numbers of training samples first .. first + count - 1; an epoch is n samples."""
    return np.array([permute(i % n, n, (seed, i // n)) for i in range(first, first + count)])


def permute(i, n, key):
    """The image of i under a pseudo-random permutation of range(n), in O(1) memory."""
    # a Feistel network permutes the next power of 4; walking on until below n stays within n
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    rounds = np.random.SeedSequence(key).generate_state(4)
    while True:
        left, right = i >> half, i & mask
        # each round is invertible, whatever the mixing: this is what makes it a permutation
        for k in rounds.tolist():
            mixed = (right ^ k) * 0x9E3779B1 & 0xFFFFFFFF
            mixed = (mixed ^ mixed >> 15) * 0x85EBCA6B & 0xFFFFFFFF
            left, right = right, left ^ (mixed ^ mixed >> 13) & mask
        i = left << half | right
        if i < n:
            return i


def eval_order(n, count):
    """The fixed windows of an evaluation: count spread evenly over n, or all if there are fewer."""
    return np.arange(min(n, count)) * n // min(n, count)


def data_dir(dataset):
    """data/<dataset>; a path to a directory is taken as it is."""
    return dataset if os.path.isdir(dataset) else os.path.join(HERE, dataset)


class SafeUnpickler(pickle.Unpickler):
    """Numbers, strings, lists and dicts need no code; what wants to run some is refused."""
    ADMITTED = {}  # {module: names}

    def find_class(self, module, name):
        if name not in self.ADMITTED.get(module, "").split():
            raise pickle.UnpicklingError(f"it wants to run {module}.{name}")
        return super().find_class(module, name)


def read_meta(directory):
    """A data set's vocab_size, and its tokenizer or list of chars; SystemExit if damaged."""
    paths = [os.path.join(directory, name) for name in ("meta.json", "meta.pkl")]
    path = next(filter(os.path.exists, paths), None)  # ours, or nanoGPT's
    if path is None:
        return {}
    try:
        with open(path, "rb") as f:
            meta = json.load(f) if path.endswith(".json") else SafeUnpickler(f).load()
        vocab_size = meta.get("vocab_size", len(meta.get("itos", "?")))
        if type(vocab_size) is not int or not 1 <= vocab_size < 2**24:  # the largest has a million
            raise ValueError(f"vocab_size is {vocab_size!r}")
        if "itos" in meta:
            meta = dict(vocab_size=vocab_size, chars=[meta["itos"][i] for i in range(vocab_size)])
        return meta
    except Exception as e:
        raise SystemExit(f"{path}: not readable ({type(e).__name__}: {e}); prepare the data again")

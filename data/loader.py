"""
Batches. Which tokens come when is a pure function of (seed, split, position): nothing to save, nothing to restore.

    data = TokenFiles("data/shakespeare_char", "train", block_size, vocab_size)
    x, y = data.batch(train_order(len(data), seed, first, count))       # (count, block_size) each

A file is cut into windows of block_size tokens (plus one, the last target). Each epoch visits every window once, in an
order that is a pseudo-random permutation of (seed, epoch), computed window by window: no shuffled index in memory,
however many billion tokens. nanoGPT draws offsets at random instead: some windows twice, some never.

Formats, told apart by the first bytes: nanoGPT's headerless uint16, and llm.c's 256-int32 header with uint16 or
uint32 tokens. train.bin / val.bin, or shards named *_train_*.bin / *_val_*.bin.
"""

import glob
import json
import os
import pickle

import numpy as np
import torch

MAGIC = {20240520: np.uint16, 20240801: np.uint32}  # llm.c / modded-nanogpt: magic, version, number of tokens, padding to 256 int32
HEADER = 256 * 4  # bytes


def data_dir(dataset):
    """data/<dataset> beside this file; a path is taken as it is."""
    return dataset if os.path.isdir(dataset) else os.path.join(os.path.dirname(os.path.abspath(__file__)), dataset)


class TokenFiles:
    """One split of a data set: windows of block_size tokens over one or many memory-mapped files."""

    def __init__(self, directory, split, block_size, vocab_size):
        """SystemExit (one line) if the data is missing, damaged or does not fit the model."""
        self.block_size, self.vocab_size = block_size, vocab_size
        paths = sorted(glob.glob(os.path.join(directory, f"*_{split}_*.bin"))) or [os.path.join(directory, f"{split}.bin")]
        if not os.path.exists(paths[0]):
            script = os.path.join(directory, "prepare.py")
            raise SystemExit(f"{paths[0]} is missing; " + (f"prepare the data first: python {os.path.relpath(script)}" if os.path.exists(script) else
                             f"dataset must be one of {', '.join(datasets())} (or a directory with {split}.bin)"))
        self.files = [open_tokens(path) for path in paths]
        # the last window's last target needs one token more: n windows take n * block_size + 1 tokens
        windows = [max(0, len(tokens) - 1) // block_size for tokens in self.files]
        self.starts = np.cumsum([0] + windows)
        if len(self) < 1:
            raise SystemExit(f"{paths[0]}: {sum(map(len, self.files))} tokens, block_size={block_size} needs at least {block_size + 1}; use a smaller --block_size")
        for path, tokens in zip(paths, self.files):
            self.check(tokens[:1 << 26], path)  # a wrong tokenizer shows at once (0.1 s); the rest is checked as it is read

    def __len__(self):
        return int(self.starts[-1])

    def check(self, tokens, where):
        if len(tokens) and int(tokens.max()) >= self.vocab_size:
            raise SystemExit(f"{where}: token {int(tokens.max())} is beyond vocab_size={self.vocab_size}; prepare the data again, or correct its meta.json")

    def batch(self, windows):
        """Inputs and targets (len(windows), block_size), int64, for these window numbers."""
        T = self.block_size
        out = np.empty((len(windows), T + 1), dtype=np.int64)
        for row, window in zip(out, windows):
            file = int(np.searchsorted(self.starts, window, side="right")) - 1
            start = (int(window) - int(self.starts[file])) * T
            row[:] = self.files[file][start:start + T + 1]
        self.check(out, f"window {windows[int(out.max(axis=1).argmax())]} of the data")
        out = torch.from_numpy(out)
        return out[:, :-1].contiguous(), out[:, 1:].contiguous()


def open_tokens(path):
    """A memory map of the tokens in path, any of the formats. SystemExit if it is damaged."""
    size = os.path.getsize(path)
    head = np.fromfile(path, dtype=np.int32, count=3)
    if len(head) == 3 and int(head[0]) in MAGIC:
        dtype = MAGIC[int(head[0])]
        if size != HEADER + int(head[2]) * np.dtype(dtype).itemsize:
            raise SystemExit(f"{path}: {size} bytes, its header promises {int(head[2])} tokens of {np.dtype(dtype).itemsize} bytes; it is truncated, prepare it again")
        return np.memmap(path, dtype=dtype, mode="r", offset=HEADER)
    if size % 2:
        raise SystemExit(f"{path}: {size} bytes is not a whole number of 2-byte tokens; it is truncated, prepare it again")
    return np.memmap(path, dtype=np.uint16, mode="r") if size else np.zeros(0, dtype=np.uint16)


# -----------------------------------------------------------------------------
# the order of windows


def train_order(n, seed, first, count):
    """Window numbers of the training samples first .. first + count - 1; sample i belongs to epoch i // n of n windows."""
    samples = np.arange(first, first + count)
    return np.array([permute(int(i % n), n, (seed, int(i // n))) for i in samples])


def permute(i, n, key):
    """The image of i under a pseudo-random permutation of range(n), in O(1) memory: a Feistel network, walked until it lands below n."""
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    rounds = [int(k) for k in np.random.SeedSequence([abs(int(k)) for k in key]).generate_state(4)]
    while True:
        left, right = i >> half, i & mask
        for k in rounds:  # each round is invertible, whatever the mixing function: this is what makes it a permutation
            mixed = (right ^ k) * 0x9E3779B1 & 0xFFFFFFFF
            mixed = (mixed ^ mixed >> 15) * 0x85EBCA6B & 0xFFFFFFFF
            left, right = right, left ^ (mixed ^ mixed >> 13) & mask
        i = left << half | right
        if i < n:
            return i


def eval_order(n, count):
    """The fixed windows of an evaluation: count of them spread evenly over n, or all if there are fewer."""
    return np.arange(n) if count >= n else np.arange(count) * n // count


# -----------------------------------------------------------------------------
# vocabularies


class SafeUnpickler(pickle.Unpickler):
    """Reads nanoGPT's meta.pkl: numbers, strings, lists and dicts need no code, and nothing else is let in."""

    def find_class(self, module, name):
        raise pickle.UnpicklingError(f"it wants to run {module}.{name}")


def read_meta(directory):
    """{'vocab_size': n, 'chars': [...] (character-level only)} of a data set, {} if it has none. SystemExit if damaged."""
    path = os.path.join(directory, "meta.json")
    try:
        if os.path.exists(path):
            with open(path, encoding="utf-8") as f:
                return json.load(f)
        path = os.path.join(directory, "meta.pkl")
        if os.path.exists(path):
            with open(path, "rb") as f:
                meta = SafeUnpickler(f).load()
            out = {"vocab_size": int(meta["vocab_size"])}
            if "itos" in meta:
                out["chars"] = [meta["itos"][i] for i in range(out["vocab_size"])]
            return out
    except Exception as e:
        raise SystemExit(f"{path}: not readable ({type(e).__name__}: {e}); prepare the data again")
    return {}


def tokenizer(meta):
    """(encode: str -> [id], decode: [id] -> str, real vocabulary size) for read_meta's answer; GPT-2's BPE where it names none."""
    if "chars" in meta:
        chars = meta["chars"]
        ids = {c: i for i, c in enumerate(chars)}

        def encode(text):
            unknown = sorted(set(text) - set(ids))
            if unknown:
                raise SystemExit(f"the prompt has characters this model has never seen: {''.join(unknown)!r}")
            return [ids[c] for c in text]
        return encode, lambda tokens: "".join(chars[t] for t in tokens), len(chars)
    if meta.get("tokenizer") == "bytes":  # 0..255; 256, where there is one, ends a document
        return lambda text: list(text.encode()), lambda tokens: bytes(t for t in tokens if t < 256).decode(errors="replace"), meta["vocab_size"]
    bpe = gpt2_bpe()
    return lambda text: bpe.encode(text, allowed_special={"<|endoftext|>"}), bpe.decode, bpe.n_vocab


def gpt2_bpe():
    """GPT-2's tokenizer; SystemExit with the remedy where it cannot be had."""
    import tiktoken
    try:
        return tiktoken.get_encoding("gpt2")
    except Exception as e:
        raise SystemExit(f"GPT-2's vocabulary is not cached and could not be downloaded ({type(e).__name__}); "
                         "set TIKTOKEN_CACHE_DIR to a directory that has it, or prepare the data as bytes")


def datasets():
    """Names of the data sets that have a prepare.py."""
    here = os.path.dirname(os.path.abspath(__file__))
    return sorted(os.path.basename(os.path.dirname(p)) for p in glob.glob(os.path.join(here, "*", "prepare.py")))

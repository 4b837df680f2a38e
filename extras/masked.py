"""
Token files with masks, as masks.py makes them: X.bin comes with X.mask, one byte per token, without
a header. The byte is 1 if the model learns to predict that token, and 0 if not.

A window without targets is read anyway, with weight 0: skipping it would make the order depend on
the masks.
"""

from pathlib import Path

import numpy as np

from data.files import open_split
from data.loader import Batches, TokenFiles, read_meta


class MaskedFiles(TokenFiles):
    def __init__(self, directory, split, block_size, vocab_size):
        window = read_meta(directory).get("window")
        if window not in (None, block_size):
            raise SystemExit(
                f"block_size={block_size}, but {directory} is padded to windows of {window}; "
                f"pass --block_size={window}, or prepare it again with --window={block_size}")
        self.masks = open_masks(open_split(directory, split))
        super().__init__(directory, split, block_size, vocab_size)
        # How many targets count in each window.
        counts = []
        for mask, start, end in zip(self.masks, self.starts, self.starts[1:]):
            targets = mask[1:(end - start) * block_size + 1]
            counts.append(np.count_nonzero(targets.reshape(-1, block_size), axis=1))
        self.counts = np.concatenate(counts)

    def place(self, window):
        """As in the first epoch: targets are counted once, so windows stay where they are."""
        return super().place(window % len(self))

    def batch(self, windows):
        x, y = super().batch(windows)
        for row, window in enumerate(windows):
            file, start = self.place(window)
            learned = self.masks[file][start + 1:start + self.block_size + 1]
            y.numpy()[row, ~learned] = -1
        return x, y


class MaskedBatches(Batches):
    """Batches of which some targets count. The loss is the mean over those of a whole step."""

    counted = None, 0  # a step, and its mean_targets

    def __init__(self, cfg, world, kind=MaskedFiles):
        super().__init__(cfg, world, kind)

    def mean_targets(self, step):
        """Each rank counts all targets of the step, so that no rank waits for another."""
        A = self.cfg.gradient_accumulation_steps
        B = self.cfg.batch_size
        if self.counted[0] != step:
            files = self.files["train"]
            windows = self.samples(step * A * B, A * B)
            total = files.counts[windows % len(files)].sum().item()
            self.counted = step, total / A or 1  # 1: without targets all weights are 0
        return self.counted[1]


def open_masks(files):
    """Memory maps of the masks of a split's token files. SystemExit if they do not fit."""
    masks = []
    for tokens in files:
        path = Path(tokens.filename).with_suffix(".mask")
        if not path.exists() or path.stat().st_size != len(tokens):
            raise SystemExit(
                f"{path}: it is missing, or does not have one byte for each of {len(tokens):,} "
                "tokens; copy or prepare the data again")
        masks.append(np.memmap(path, np.bool_, mode="r"))
    return masks

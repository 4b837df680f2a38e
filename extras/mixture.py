"""
A mixture of data sets: --dataset=fineweb_edu:7,my_code:2,my_math:1

    parse_mixture("web:7,code:2,math:1")  # {"web": 7, "code": 2, "math": 1}
    mixture = Mixture([7, 2, 1])
    mixture.sets(20, 3)                # for samples 20, 21 and 22: which set each comes from
    mixture.taken(20)                  # [14, 4, 2] samples of each set came before sample 20

A sample's number alone decides which set it comes from. At any point of a run each set has
had its share of the samples, rounded up or down. Each set has its own epochs, in its own
order.
"""

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np

from data.loader import Batches, data_dir, read_meta, train_order

LONGEST = 100_000  # samples until the pattern repeats; it is computed when a run starts


class MixedBatches(Batches):
    """Batches whose samples come from several data sets."""

    def open(self):
        weights = parse_mixture(self.cfg.dataset)
        require_one_vocabulary(weights)
        self.mixture = Mixture([*weights.values()])
        total = sum(weights.values())
        parts = []
        for name, weight in weights.items():
            part = Batches(replace(self.cfg, dataset=name), self.world)
            parts.append((name, weight / total, part))
        return parts

    def samples(self, first, count):
        """As Batches.samples, with an entry for each data set."""
        sets = self.mixture.sets(first, count)
        taken = self.mixture.taken(first)
        found = []
        for number, (_, _, part) in enumerate(self.parts):
            files = part.files["train"]
            rows = np.flatnonzero(sets == number)
            windows = train_order(len(files), self.cfg.seed, taken[number], len(rows), number)
            found.append((files, rows, windows))
        return found


# ---------- which data sets ---------------------------------------------------


def parse_mixture(dataset):
    """{name: weight} of the key `dataset`, in whole numbers without a common divisor.
    SystemExit if it is no mixture."""
    weights = {}
    for part in dataset.split(","):
        name, _, text = part.rpartition(":")
        try:
            weight = Fraction(text)
        except (ValueError, ZeroDivisionError):
            weight = 0
        if not name or name in weights or weight <= 0:
            raise SystemExit(
                f"dataset={dataset!r}: {part!r} does not fit; a mixture is NAME:WEIGHT,"
                "NAME:WEIGHT with different names, and weights above 0")
        weights[name] = weight
    unit = math.lcm(*(weight.denominator for weight in weights.values()))
    whole = [int(weight * unit) for weight in weights.values()]
    divisor = math.gcd(*whole)
    whole = [weight // divisor for weight in whole]
    if sum(whole) > LONGEST:
        raise SystemExit(
            f"dataset={dataset!r}: the proportions {':'.join(map(str, whole))} repeat only after "
            f"{sum(whole):,} samples; round the weights, {LONGEST:,} is the most")
    return dict(zip(weights, whole))


def require_one_vocabulary(names):
    """SystemExit unless the data sets say that they have the same vocabulary."""
    first, *others = names
    for name in others:
        if vocabulary(name) != vocabulary(first):
            raise SystemExit(
                f"{data_dir(name)} and {data_dir(first)} have different vocabularies, by their "
                "meta.json; prepare both with the same --tokenizer")


def vocabulary(name):
    """The vocabulary by meta.json, and the tokenizer's file if there is one."""
    meta = read_meta(data_dir(name))
    file = data_dir(name) / "tokenizer.json"
    said = {key: meta.get(key) for key in ("vocab_size", "tokenizer", "chars")}
    return said, file.read_bytes() if file.exists() else None


# ---------- which sample from which -------------------------------------------


class Mixture:
    """Which set each training sample comes from: a pattern that repeats."""

    def __init__(self, weights):
        self.weights = np.array(weights)
        self.pattern = np.array(pattern(weights))

    def sets(self, first, count):
        """The number of the set of each of the samples first .. first + count - 1."""
        return self.pattern[np.arange(first, first + count) % len(self.pattern)]

    def taken(self, first):
        """How many samples of each set come before sample `first`."""
        whole, rest = divmod(first, len(self.pattern))
        started = np.bincount(self.pattern[:rest], minlength=len(self.weights))
        return (whole * self.weights + started).tolist()


def pattern(weights):
    """The set of each of sum(weights) samples, such that after n of them a set of weight w has
    n w / sum(weights), rounded up or down. It is a known schedule of periodic tasks on one
    processor: a set's k-th sample may not come too early, and the earliest deadline is next
    (Baruah et al. 1996, Pfair)."""
    total = sum(weights)
    taken = [0] * len(weights)
    order = []
    for n in range(total):
        deadlines = {}
        for number, weight in enumerate(weights):
            if taken[number] * total < (n + 1) * weight:  # else it would be beyond rounding up
                deadlines[number] = math.ceil(Fraction((taken[number] + 1) * total, weight))
        chosen = min(deadlines, key=deadlines.get)
        taken[chosen] += 1
        order.append(chosen)
    return order

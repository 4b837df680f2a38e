"""
A mixture of data sets: --dataset=fineweb_edu:7,my_code:2,my_math:1

    weights_of("web:7,code:2,math:1")  # {"web": 7, "code": 2, "math": 1}
    mixture = Mixture([7, 2, 1])
    mixture.sets(20, 3)                # of samples 20, 21 and 22: the number of each one's set
    mixture.taken(20)                  # [14, 4, 2] samples of each set came before sample 20

A sample's number alone decides which set it comes from. At any point of a run each set has
had its share of the samples, rounded up or down.
"""

import math
import os
from fractions import Fraction

import numpy as np

LONGEST = 100_000  # samples until the pattern repeats; it is computed when a run starts


def weights_of(dataset):
    """{name: weight} of the key `dataset`, in whole numbers without a common divisor; of one
    set {its name: 1}. SystemExit if it is no mixture."""
    if os.path.isdir(dataset) or not any(mark in dataset for mark in ":,"):
        return {dataset: 1}
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

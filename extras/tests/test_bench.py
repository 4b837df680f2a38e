"""
extras/bench.py: its figures against each other, and against PyTorch's count of FLOPs.

    python -m pytest -q extras/tests/test_bench.py
"""

import re

import pytest
from harness import Ranks
from test_metrics import plain_flops
from training import TINY, arguments

from extras import bench


def measured(*argv):
    """The command on a machine of 1e6 FLOP/s, as it is told."""
    bench.peak_flops = lambda device: 1e6
    bench.main(list(argv))


@pytest.mark.slow
def test_bench_figures_fit_each_other_and_plain_pytorchs_count_of_flops(tmp, tmp_path):
    model = arguments(tmp, tmp_path, gradient_accumulation_steps=2, bias=False)
    p = Ranks(2, measured, *model, "--steps=3",
              "--variants=;strategy=ddp;batch_size=4,strategy=ddp").finish()
    assert p.returncode == 0, p.stderr
    rows = re.findall(r"^(batch_size=4)?\D+ +(\d.*) x its time$", p.stdout, re.M)
    assert len(rows) == 3
    expected, first = plain_flops(), None
    for four, line in rows:
        numbers = [float(number.replace(",", "")) for number in re.findall(r"[\d.,]+", line)]
        ms, fastest, slowest, tokens_per_s, mfu, memory, host, ratio = numbers
        first = first or ms
        tokens = 2 * (4 if four else 2) * TINY["block_size"]
        assert fastest <= ms <= slowest
        assert tokens_per_s == pytest.approx(tokens / ms * 1e3, rel=0.1 / ms, abs=1)  # both rounded
        assert mfu / 100 == pytest.approx(expected * tokens_per_s / 2 / 1e6, rel=0.001)
        assert host == pytest.approx(memory, rel=0.02) and memory > 64 and " n/a " in line
        rounding = ms / first * 0.1 / min(ms, first) + 1e-3  # of the times, and of the ratio
        assert ratio == pytest.approx(ms / first, abs=rounding)

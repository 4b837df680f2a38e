"""
extras/bench.py: its figures against each other, its traces, its graphs. What it refuses is in
test_mistakes_of_extras.py.

    python -m pytest -q extras/tests/test_bench.py
"""

import json
import re
import sys
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from harness import TINY, Ranks, arguments, on_ranks, values
from test_compile import graphs_made
from test_tools import plain_flops
from torch.utils.flop_counter import FlopCounterMode

from extras import bench
from ranks import World


def measured(*argv):
    """The command on a machine of 1e6 FLOP/s, which it is told: measuring takes a second."""
    bench.matmul_rate = lambda device, dtype: 1e6
    bench.main(list(argv))


@pytest.mark.slow
def test_bench_figures_and_traces(tmp, tmp_path):
    """Its figures against each other and against plain PyTorch's count of the FLOPs."""
    traces = tmp_path / "traces"
    model = arguments(tmp, tmp_path, gradient_accumulation_steps=2, bias=False)
    p = Ranks(2, measured, *model, "--steps=3", "--strategies=ddp,full_shard",
              "--variants=;batch_size=4", f"--profile={traces}").finish()
    assert p.returncode == 0, p.stderr
    names = ["strategy=ddp", "strategy=full_shard",
             "batch_size=4 strategy=ddp", "batch_size=4 strategy=full_shard"]
    expected, first = plain_flops(), None
    for name, batch_size in zip(names, (2, 2, 4, 4)):
        line = re.search(rf"^{name} +(\d.*) x its time$", p.stdout, re.M)[1]
        numbers = [float(number.replace(",", "")) for number in re.findall(r"[\d.,]+", line)]
        ms, fastest, slowest, tokens_per_s, of_matmul, memory, host, ratio = numbers
        first = first or ms
        tokens = 2 * batch_size * TINY["block_size"]
        assert fastest <= ms <= slowest
        assert tokens_per_s == pytest.approx(tokens / ms * 1e3, rel=0.1 / ms, abs=1)  # both rounded
        assert of_matmul / 100 == pytest.approx(expected * tokens_per_s / 2 / 1e6, rel=0.001)
        # the same figure on a CPU, but the second reading is a moment later
        assert host == pytest.approx(memory, rel=0.02)
        assert memory > 64 and " n/a " in line
        # the two times are rounded to 0.1 ms, and the ratio itself to 0.001
        expected_ratio = ms / first
        rounding = expected_ratio * 0.1 / min(ms, first) + 1e-3
        assert ratio == pytest.approx(expected_ratio, abs=rounding)
    assert len(re.findall(" x its time$", p.stdout, re.M)) == 4

    # the profile: every rank's trace has the products and the collectives
    for name in names:
        assert f"\n{name}: 3 steps" in p.stdout
        for rank in range(2):
            with open(traces / f"trace-{name.replace(' ', '_')}-{rank}.json") as f:
                ops = {e.get("name", "") for e in json.load(f)["traceEvents"]}
            assert ops & {"aten::mm", "aten::addmm"}
            collective = "reduce_scatter" if "full_shard" in name else "allreduce"
            assert any(collective in op for op in ops)
        # The slowest operations: which ones they are is the machine's affair.
        assert "aten::" in p.stdout.partition(f"\n{name}: 3 steps")[2].partition("Self CPU time")[0]


def test_bench_measures_the_machine(monkeypatch):
    """The rate of its products is what PyTorch counts of them, on a machine of 1 GFLOP/s."""
    def timer(statement, num_threads, globals):
        assert globals["a"].dtype == torch.bfloat16
        with FlopCounterMode(display=False) as counter:
            eval(statement, globals)
        measured = SimpleNamespace(median=counter.get_total_flops() / 1e9)
        return SimpleNamespace(blocked_autorange=lambda min_run_time: measured)

    monkeypatch.setattr("torch.utils.benchmark.Timer", timer)
    assert bench.matmul_rate(torch.device("cpu"), torch.bfloat16) == pytest.approx(1e9)


def test_bench_starts_as_train_does_with_threads_for_what_is_offloaded(monkeypatch):
    """torchrun gives each process one; any variant may need them."""
    monkeypatch.setattr(bench, "setup", lambda *args: sys.exit(args))
    with pytest.raises(SystemExit) as e:
        bench.main(["--variants=cpu_offload=0;cpu_offload=0.5"])
    assert e.value.code == ("auto", "auto", 0.5)


def test_bench_records_memory_with_pythons_frames_only(tmp_path):
    """C++ frames take the host's time from the very steps that are traced."""
    world = World(device=torch.device("cuda", 0))
    with (patch.object(torch.cuda.memory, "_record_memory_history") as record,
          patch.object(torch.cuda.memory, "_dump_snapshot") as dump):
        bench.profile("a b", iter([1.0]), tmp_path, world)
    assert record.call_args.kwargs["stacks"] == "python"
    dump.assert_called_once_with(f"{tmp_path}/trace-a_b-0.pickle")


def case_bench(tmp, strategy):
    """Of a bench with three sizes, where dynamo would compile a function once."""
    argv = arguments(tmp, tmp, strategy=strategy, compile=True, gradient_accumulation_steps=1,
                     n_layer=1)
    with (graphs_made() as (symbols, _), torch._dynamo.config.patch(recompile_limit=1),
          patch.object(bench, "matmul_rate", lambda *_: 1e9)):
        bench.main([*argv, "--steps=1", "--variants=;batch_size=3;block_size=8"])
        return symbols


@pytest.mark.slow
def test_bench_every_variant_has_static_graphs(tmp):
    """Dynamo counts by function: a second size in the process would make it dynamic, whose time
    says nothing of a run, and from the ninth on it would compile none."""
    expected = dict(single=1, full_shard=2)  # graphs of a step
    results = on_ranks(1, {strategy: (case_bench, dict(tmp=tmp, strategy=strategy))
                           for strategy in expected})
    for strategy, graphs in expected.items():
        assert values(results, strategy) == [3 * graphs * [False]]

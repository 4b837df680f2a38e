"""
extras/gpu_report: short forms of it on simulated GPUs, and rows that go wrong.

    python -m pytest -q extras/tests/test_gpu_report.py
"""

import getpass
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from harness import HERE, cannot_simulate, refused, usual_signals

from configurator import load_config
from extras.gpu_report import __main__ as gpu_report
from extras.gpu_report import predict, programs, write
from extras.gpu_report.rows import Row, rows
from extras.gpu_report.work import NotHere, Setting, Work, children

pytestmark = pytest.mark.slow

SHORT = ("minimal.py", "124M", "124M compiled", "1B full_shard", "1B single")
simulates = pytest.mark.skipif(bool(cannot_simulate()), reason=cannot_simulate())


def started(cwd, *argv, gpus=2):
    env = dict(os.environ, PYTHONPATH=HERE, SIM_GPUS=str(gpus), OMP_NUM_THREADS="1")
    return subprocess.Popen(
        [sys.executable, "-m", "extras.gpu_report", *argv], cwd=cwd, env=env, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, preexec_fn=usual_signals)


def report(cwd):
    return json.loads((cwd / "gpu-report.json").read_text())


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """A short form that was killed after its first row, and then run to its end."""
    cwd = tmp_path_factory.mktemp("a reader")
    argv = ["--tiny", f"--rows={','.join(SHORT)}"]
    p = started(cwd, *argv)
    lines = iter(p.stdout.readline, "")
    first = next((line for line in lines if line.startswith("minimal.py")), "")
    p.send_signal(signal.SIGKILL)
    p.wait()
    before = report(cwd)["rows"]
    p = started(cwd, *argv)
    said = p.communicate(timeout=900)[0]
    return cwd, first, before, p.returncode, said


@simulates
def test_gpu_report_goes_on_after_a_kill(short):
    cwd, first, before, code, said = short
    assert first.startswith("minimal.py: loss") and len(before) < len(SHORT)
    assert code == 0, said
    after = report(cwd)["rows"]
    assert after["minimal.py"] == before["minimal.py"] and "minimal.py" not in said
    assert set(after) == set(SHORT)


@simulates
def test_gpu_report_rows_have_both_numbers_or_a_reason(short):
    cwd, *_ = short
    kept = report(cwd)["rows"]
    assert kept["124M compiled"]["reason"] == "a simulated GPU has no compiler"
    minimal = kept["minimal.py"]
    assert minimal["measured"]["ranks"] == 2
    assert minimal["measured"]["loss"] == pytest.approx(minimal["predicted"]["loss"], abs=1e-3)
    for name in SHORT[3:] + ("124M",):
        measured, predicted = kept[name]["measured"], kept[name]["predicted"]
        # Each allocation is rounded to 512 bytes, which is much of so small a model.
        for key in ("peak", "valley"):
            assert measured[key] == pytest.approx(predicted[key], rel=0.15), (name, key)
        # The device's clock has the plan's prices.
        assert measured["seconds"] == pytest.approx(predicted["seconds"], rel=0.15), name
        assert kept[name]["command"].startswith("python ") and kept[name]["wall_s"] > 0
    ranks = [kept[name]["measured"]["tok/s"] for name in ("1B full_shard", "1B single")]
    assert ranks[0] != ranks[1]


@simulates
def test_gpu_report_names_nobody_and_reads_by_itself(short):
    cwd, *_ = short
    page = (cwd / "gpu-report.md").read_text()
    whole = page + (cwd / "gpu-report.json").read_text()
    for private in (os.uname().nodename, str(cwd), HERE, str(Path.home()), sys.prefix):
        assert private not in whole, private
    assert f"/{getpass.getuser()}/" not in whole
    assert page.startswith("# A report of 2 x NVIDIA H100 80GB HBM3, simulated\n")
    matters, others = page.split("## The other rows")
    assert "| 1B full_shard | 2 |" in matters and "| 1B single | 1 |" in others
    assert all(line.count("|") in (0, 6, 14) for line in page.splitlines())


@simulates
def test_gpu_report_of_another_machine_stays(short):
    cwd, *_ = short
    text = (cwd / "gpu-report.json").read_bytes()
    for argv, gpus, why in (
            (["--tiny"], 1, "of another machine, 2 x NVIDIA"), ([], 2, "made with --tiny")):
        p = started(cwd, *argv, gpus=gpus)
        said = p.communicate(timeout=100)[0]
        assert p.returncode == 1 and said.count("\n") == 1 and why in said, said
        assert "--out" in said
    assert (cwd / "gpu-report.json").read_bytes() == text
    (cwd / "other.json").write_text("[]")
    p = started(cwd, "--tiny", "--out=other")
    assert "other.json is not a report" in p.communicate(timeout=100)[0]
    assert (cwd / "other.json").read_text() == "[]"


@simulates
def test_gpu_report_of_too_few_minutes_is_one_line(tmp_path):
    p = started(tmp_path, "--minutes=0.5")
    said = p.communicate(timeout=100)[0]
    assert p.returncode == 1 and said.count("\n") == 1, said
    assert "--minutes=0.5: minimal.py alone may take 1" in said and os.listdir(tmp_path) == []


@pytest.mark.parametrize("flag, why", [
    ("--minutes=-1", "above 0"), ("--nanogpt=nowhere", "there is no bench.py"),
    ("--minuets=3", "unrecognized")])
def test_gpu_report_mistakes_are_one_line(flag, why):
    assert why in refused(gpu_report.parse, [flag])


def test_gpu_report_without_a_gpu_is_one_line(tmp_path):
    env = dict(os.environ, PYTHONPATH=HERE, CUDA_VISIBLE_DEVICES="")
    env.pop("SIM_GPUS", None)
    p = subprocess.run([sys.executable, "-m", "extras.gpu_report"], cwd=tmp_path, env=env,
                       text=True, capture_output=True)
    assert p.returncode == 1 and p.stderr.count("\n") == 1, p.stderr
    assert "has no GPU" in p.stderr and "SIM_GPUS=2" in p.stderr
    assert os.listdir(tmp_path) == []


# -----------------------------------------------------------------------------
# rows that go wrong


def setting_of(tmp_path):
    return Setting(tmp_path, tiny=False, simulated=False, nanogpt="", rows={}, torch="",
                   visible=["0", "1"], rates="")


def taken(tmp_path, program, seconds=60):
    """What the report keeps of a row."""
    row = Row("a row", "nothing", gpus=1, seconds=seconds, program=program)
    return gpu_report.take(row, setting_of(tmp_path), [0], None)


def script(tmp_path, text):
    path = tmp_path / "script.py"
    path.write_text(text)
    return path


def test_gpu_report_of_a_row_that_fails_has_its_first_error(tmp_path):
    path = script(
        tmp_path, "import torch\nraise torch.OutOfMemoryError('CUDA out of memory. Tried 3 GiB')")
    kept = taken(tmp_path, lambda work: work.call(path, gpus=0))
    assert kept["status"] == "failed" and "CUDA out of memory. Tried 3 GiB" in kept["reason"]
    assert kept["command"] == "python logs/script.py"
    log = (tmp_path / "a-row" / "log.txt").read_text()
    assert log.startswith("$ python logs/script.py") and "Traceback" in log
    kept = taken(tmp_path, lambda work: 1 / 0)
    assert kept["status"] == "failed" and kept["reason"] == "division by zero"


def test_gpu_report_of_a_row_that_hangs_has_its_limit(tmp_path, monkeypatch):
    path = script(tmp_path, "import time\nprint('begun', flush=True)\ntime.sleep(1000)")
    work = []

    def program(this):
        work.append(this)
        return this.call(path, gpus=0)

    monkeypatch.setattr(Work, "LEAST", 1)
    kept = taken(tmp_path, program, seconds=1)
    assert kept["status"] == "stopped" and "after 3 s" in kept["reason"]
    [p] = work[0].running
    assert p.poll() is not None  # nothing is left


def test_gpu_report_stops_the_ranks_of_a_torchrun_too(tmp_path):
    path = script(tmp_path, "import time\ntime.sleep(1000)")
    row = Row("ranks", "", gpus=2, seconds=60)
    work = Work(row, setting_of(tmp_path), [0, 1])
    work.make_folder()
    p = work.start(path, ranks=2, gpus=0)
    while len(children(p.pid)) < 2:
        time.sleep(0.05)
    ranks = children(p.pid)
    work.stop()
    deadline = time.monotonic() + 20
    while any(os.path.exists(f"/proc/{rank}/cwd") for rank in ranks):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_gpu_report_has_a_row_for_all_that_is_asked_for():
    """Each is of this machine, or says what it lacks."""
    table = {row.name: row for row in rows(1, tiny=False, simulated=False, nanogpt="")}
    assert table["1B ddp"].needs == "it takes two GPUs"
    theirs = ["124M beside nanoGPT", "Shakespeare to the end"]
    assert all(table[name].needs == "pass --nanogpt=DIR" for name in theirs)
    assert table["a rank is killed"].needs == "" and table["a rank is killed"].gpus == 1
    assert sum(row.matters for row in table.values()) == 7
    eight = rows(8, tiny=False, simulated=False, nanogpt="")
    assert all(row.gpus in (1, 2, 8) for row in eight)
    assert [row.name for row in eight if row.needs] == theirs
    assert {row.name: row for row in eight}["XL float8"].needs == ""
    seven = {row.name: row for row in rows(7, tiny=False, simulated=False, nanogpt="")}
    assert "even number" in seven["1B hybrid_shard"].needs


def test_gpu_report_trains_nanogpts_characters_by_its_keys(tmp_path):
    """Their lines and ours, read by the same function; and what it says without their data."""
    out, data = tmp_path / "out-ours", tmp_path / "data" / "shakespeare_char"
    keys = load_config(programs.CHARACTERS)
    assert (keys.learning_rate, keys.max_iters, keys.sizes.n_embd) == (1e-3, 5000, 384)

    def call(program, *argv, cwd=None):
        if cwd:
            return "step 0: train loss 4.2, val loss 4.3\nstep 9: train loss 1.0, val loss 1.5\n"
        load_config(argv)
        out.mkdir()
        (out / "metrics.jsonl").write_text('{"val_loss": 1.4}\n{"loss": 1.0}\n{"val_loss": 1.6}\n')

    work = SimpleNamespace(
        tiny=False, nanogpt=str(tmp_path), call=call, directory=lambda name: tmp_path / name)
    with pytest.raises(NotHere, match="prepare.py"):
        programs.to_the_end(work)
    data.mkdir(parents=True)
    (data / "train.bin").touch()
    ours, theirs = programs.to_the_end(work)
    assert (ours["val_loss"], theirs["val_loss"]) == (1.4, 1.5)


def test_gpu_report_of_older_and_smaller_gpus_says_what_they_lack():
    def table(memory, capability, torchao="0.17"):
        gpu = dict(memory=memory * 2**30, capability=capability)
        return {row.name: row for row in rows(1, False, False, "", gpu, torchao)}

    assert "this GPU has 8.0" in table(80, "8.0")["XL float8"].needs
    assert "torchao" in table(80, "9.0", torchao=None)["XL float8"].needs
    assert table(80, "9.0")["XL float8"].needs == "" and "350M full_shard" not in table(80, "9.0")
    small = table(24, "8.9")
    assert not any(name.startswith("1B") for name in small)
    assert small["a full save"].trains in small
    assert len(small) == len(table(80, "9.0"))


@pytest.mark.parametrize("name", ["350M full_shard", "350M single", "350M loss_chunks=0"])
def test_gpu_report_rows_of_24_gib_fit(tmp_path, name):
    gpu = dict(name="NVIDIA L4", memory=23 * 2**30, capability="8.9")
    row = {row.name: row for row in rows(1, False, False, "", gpu)}[name]
    predict.make_data(tmp_path / "data", vocab_size=50257)
    found = predict.step(row.keys, 1, gpu, 1, tmp_path)
    assert 10 * 2**30 < found["peak"] < 0.9 * gpu["memory"]


def test_gpu_report_of_a_compiled_row_has_no_ratio_of_peaks():
    measured = dict(seconds=1.0, peak=3.0, valley=1.0)
    kept = dict(measured=measured, predicted=dict(seconds=2.0, peak=2.0, valley=1.0))
    ratios = []
    for name in ("124M", "124M compiled"):
        row = {row.name: row for row in rows(1, False, False, "")}[name]
        ratios.append(write.step_line(row, kept, 1.0).count("1.50"))
    assert ratios == [1, 0]


def test_gpu_report_without_pytest_has_no_tests(tmp_path, monkeypatch):
    monkeypatch.setattr(programs, "find_spec", lambda name: None)
    kept = taken(tmp_path, programs.tests)
    assert kept["status"] == "not here" and "pytest" in kept["reason"]


def test_gpu_report_beside_nanogpt_does_not_clip():
    """Its bench.py does not."""
    asked = []

    def step(keys, steps):
        asked.append(keys)
        return dict(seconds=0.02)

    work = SimpleNamespace(
        tiny=True, nanogpt="", keys_of=lambda name: ["--batch_size=12"], step=step,
        call=lambda *argv, cwd: "time per iteration: 30.0ms")
    measured, _ = programs.nanogpt(work)
    assert measured["ratio"] == pytest.approx(1.5)
    assert asked == [["--batch_size=12", "--grad_clip=0"]]


def test_gpu_report_reads_what_programs_print():
    log = "step 0: loss 4.123\nstep 9: loss 2.73 and so on\n"
    assert programs.losses(log) == [4.123, 2.73]
    assert write.beside(3.0, 2.0, 1.0) == ["3.00", "2.00", "1.50"]
    assert write.beside(3.0, None, 1.0) == ["3.00", "n/a", ""]

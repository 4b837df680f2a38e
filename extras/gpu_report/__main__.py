"""
One command for whoever has a GPU: what no CPU can tell, as a file.

    python -m extras.gpu_report                  # ten minutes on one GPU
    python -m extras.gpu_report --minutes=60     # on two or more
    SIM_GPUS=2 python -m extras.gpu_report --tiny    # to try it, on simulated ones

It writes gpu-report.md, gpu-report.json and the logs in gpu-report-logs/. After each row they are
complete: stop it whenever you like, and the same command goes on with the rows that are missing.
extras/docs/gpu.md says what each row proves. No name of a host or a user is in the report.
"""

import fcntl
import json
import multiprocessing
import os
import subprocess
import sys
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).absolute().parents[2]))
from extras.gpu_report import predict, write  # noqa: E402
from extras.gpu_report.rows import rows  # noqa: E402
from extras.gpu_report.work import (  # noqa: E402
    HERE,
    SIMGPU,
    NotHere,
    Setting,
    Work,
)
from ranks import first_line, run  # noqa: E402

GIB = 2**30
TINY_ROW = 15  # seconds of a row with --tiny, about


def parse(argv):
    parser = ArgumentParser(
        usage="python -m extras.gpu_report [flags]",
        description=__doc__,
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.error = sys.exit  # one line and exit code 1, as everywhere here
    add = parser.add_argument
    add("--minutes", type=float, default=10, help="for this call (%(default)s)")
    add("--out", default="gpu-report", help="its files are NAME.md, NAME.json, NAME-logs/")
    add("--rows", default="", metavar="NAME,NAME", help="only these, such as 124M,1B full_shard")
    add("--nanogpt", default="", metavar="DIR", type=os.path.expanduser, help="a clone of nanoGPT")
    add("--tiny", action="store_true", help="tiny sizes, to try the command itself")
    own = parser.parse_args(argv)
    if not own.minutes > 0:
        raise SystemExit(f"--minutes={own.minutes:g}: pass a number above 0")
    if own.nanogpt and not os.path.exists(os.path.join(own.nanogpt, "bench.py")):
        raise SystemExit(f"--nanogpt={own.nanogpt}: there is no bench.py; clone karpathy/nanoGPT")
    own.nanogpt = own.nanogpt and os.path.abspath(own.nanogpt)
    own.out = os.path.abspath(os.path.expanduser(own.out))
    return own


def this_machine():
    """What machine.py says. SystemExit if there is no GPU."""
    command = [sys.executable, "extras/gpu_report/machine.py"]
    env = dict(os.environ)
    if "SIM_GPUS" in env:
        command[1:1] = ["-m", "simgpu"]
        env["PYTHONPATH"] = str(SIMGPU)
    p = subprocess.run(command, cwd=HERE, env=env, capture_output=True, text=True)
    if p.returncode:
        why = p.stderr.strip().splitlines() or [f"exit code {p.returncode}"]
        raise SystemExit(f"PyTorch does not start here: {why[-1]}")
    machine = json.loads(p.stdout.splitlines()[-1])
    if not machine["gpus"]:
        raise SystemExit("this machine has no GPU that PyTorch sees; SIM_GPUS=2 simulates two")
    return machine


def opened(own, machine):
    """The report so far. SystemExit if it is of another machine, or of other sizes."""
    path = Path(own.out + ".json")
    report = dict(machine=machine, tiny=own.tiny, seed=1337, rows={})
    if not path.exists():
        return report
    try:
        before = json.loads(path.read_text())
        gpus, tiny = before["machine"]["gpus"], before["tiny"]
    except (OSError, ValueError, KeyError, TypeError):
        raise SystemExit(f"{path} is not a report of this command; pass another --out")
    if write.names(gpus) != write.names(machine["gpus"]):
        raise SystemExit(f"{path} is of another machine, {write.names(gpus)}; pass another --out")
    if tiny != own.tiny:
        how = "with" if tiny else "without"
        raise SystemExit(f"{path} was made {how} --tiny; pass another --out")
    before["machine"] = machine  # its versions may be other ones now
    return before


def take(row, setting, ids, predicted):
    """Run a row, and return what the report keeps of it."""
    work = Work(row, setting, ids)
    begin = time.time()
    kept = dict(gpus=row.gpus, predicted=predicted)
    try:
        work.make_folder()
        if row.program:
            kept["measured"], kept["predicted"] = row.program(work)
        else:
            kept["measured"] = work.step(row.keys, trace=row.trace)
        kept["status"] = "measured"
    except NotHere as e:
        kept.update(status="not here", reason=str(e))
    except TimeoutError as e:
        kept.update(status="stopped", reason=str(e))
    except Exception as e:  # a row's fault is a row
        kept.update(status="failed", reason=str(e).strip() or type(e).__name__)
    finally:
        work.stop()
    kept.update(command=work.command, wall_s=round(time.time() - begin, 1), torch=setting.torch)
    return kept


def main(argv):
    own = parse(argv)
    os.chdir(HERE)  # where the rows' files are
    machine = this_machine()
    n = len(machine["gpus"])
    report = opened(own, machine)
    smallest = min(machine["gpus"], key=lambda gpu: gpu["memory"])
    all_rows = rows(
        n, own.tiny, machine["simulated"], own.nanogpt, smallest, machine["versions"]["torchao"])
    table = {row.name: row for row in all_rows}
    chosen = [name.strip() for name in own.rows.split(",") if name]
    for name in chosen:
        if name not in table:
            raise SystemExit(f"--rows={name}: no such row; they are {', '.join(table)}")
    todo = [row for row in table.values() if not chosen or row.name in chosen]
    todo = [row for row in todo if is_missing(report["rows"].get(row.name), bool(chosen))]
    deadline = time.time() + 60 * own.minutes
    able = [row for row in todo if not row.needs]
    if able and needs_seconds(able[0], own.tiny) > 60 * own.minutes:
        raise SystemExit(
            f"--minutes={own.minutes:g}: {able[0].name} alone may take "
            f"{needs_seconds(able[0], own.tiny) / 60:g}; pass more")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    # Here, and where it is planned, nobody may use a GPU: that takes memory.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    setting = Setting(
        folder=Path(own.out + "-logs").absolute(),
        tiny=own.tiny,
        simulated=machine["simulated"],
        nanogpt=own.nanogpt,
        rows=table,
        torch=machine["versions"]["torch"],
        visible=visible.split(",") if visible else [str(i) for i in range(n)],
        rates=predict.rates(machine["gpus"][0]),
    )
    with writing(own.out):
        setting.folder.mkdir(parents=True, exist_ok=True)
        lock = open(setting.folder / "lock", "w")
        predict.make_data(setting.folder / "data", vocab_size=256 if own.tiny else 50257)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise SystemExit(f"--out={own.out}: another call writes there; wait, or pass another")

    def keep(row, kept):
        if "reason" in kept:
            kept["reason"] = setting.shown(kept["reason"])
        report["rows"][row.name] = kept
        with writing(own.out):
            write.write(report, table, own.out)
        print(write.line(row, kept), flush=True)

    processes = min(4, max(1, machine["cores"] // 2))
    spawn = multiprocessing.get_context("spawn")  # CUDA allows no fork
    with futures.ProcessPoolExecutor(processes, spawn, predict.begin) as planners:
        plans = {}
        for row in todo:
            keys = row.keys or (row.trains and table[row.trains].keys)
            if keys and not row.needs:
                more = ["--attention=flash2"] if row.env and "SDPA" in row.env[0][0] else []
                if setting.simulated:
                    more.append("--host=1e-6")  # its clock has no host
                plans[row.name] = planners.submit(
                    predict.step, keys, row.gpus, smallest, n, setting.folder, more)
        run_rows(todo, n, plans, deadline, own, setting, smallest, keep)
        missing = [row for row in todo if report["rows"][row.name]["status"] == "left"]
        report["rates"] = predict.fitted(report, table, setting)
    with writing(own.out):
        write.write(report, table, own.out)
    print(f"wrote {own.out}.md and .json")
    if missing:
        print(f"{len(missing)} rows are left: the same command goes on with {missing[0].name}")


@contextmanager
def writing(path):
    """A disk that is full or read-only is one line."""
    try:
        yield
    except OSError as e:
        raise SystemExit(f"cannot write {path}: {e.strerror}; make room, or pass another --out")


def prediction(future):
    """Its numbers; in a text why the plan refuses; None if it has none."""
    try:
        return future.result()
    except Exception as e:  # of a planner that was killed, or of a package's import
        print(f"no plan: {first_line(e)}", file=sys.stderr)


def run_rows(todo, n, plans, deadline, own, setting, gpu, keep):
    """Run them in order, side by side where they take only a part of the GPUs. gpu: the one with
    the least memory."""
    free = list(range(n))
    running = {}  # {future: (row, ids)}

    def collect():
        done, _ = futures.wait(running, return_when=futures.FIRST_COMPLETED)
        for future in done:
            row, ids = running.pop(future)
            free.extend(ids)
            keep(row, future.result())

    with futures.ThreadPoolExecutor(n) as threads:
        for row in todo:
            if row.needs:
                keep(row, dict(status="not here", reason=row.needs, gpus=row.gpus))
                continue
            predicted = prediction(plans[row.name]) if row.name in plans else None
            if isinstance(predicted, str):  # why the plan refuses it
                keep(row, dict(status="not here", reason=predicted, gpus=row.gpus))
                continue
            if predicted and predicted["peak"] > 0.9 * gpu["memory"]:
                reason = (
                    f"the plan's peak is {predicted['peak'] / GIB:.1f} GiB; a GPU has "
                    f"{gpu['memory'] / GIB:.0f}")
                kept = dict(status="not here", reason=reason, gpus=row.gpus, predicted=predicted)
                keep(row, kept)
                continue
            while len(free) < row.gpus:
                collect()
            if time.time() + needs_seconds(row, own.tiny) > deadline:
                reason = f"no time left: it may take {needs_seconds(row, own.tiny):.0f} s"
                keep(row, dict(status="left", reason=reason, gpus=row.gpus, predicted=predicted))
                continue
            free.sort()
            ids = [free.pop(0) for _ in range(row.gpus)]
            running[threads.submit(take, row, setting, ids, predicted)] = row, ids
        while running:
            collect()


def needs_seconds(row, tiny):
    return TINY_ROW if tiny else row.seconds


def is_missing(kept, is_chosen):
    """True of a row that may be measured now: there was no time, or something else was lacking.
    What has failed is tried again if it is chosen."""
    again = ("left", "not here", "failed", "stopped") if is_chosen else ("left", "not here")
    return kept is None or kept["status"] in again


if __name__ == "__main__":
    run(main, sys.argv[1:])

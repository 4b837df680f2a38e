"""
Runs the programs of a row on its GPUs, with a time limit, and its output in a log.

    work = Work(row, setting, ids=[0, 1])
    log = work.call("minimal.py", ranks=2)  # RuntimeError says its first error, or TimeoutError
    found = work.step(keys)                 # what step.py has measured
"""

import ctypes
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).absolute().parents[2]
SIMGPU = HERE / "extras" / "simgpu"
PR_SET_PDEATHSIG = 1
libc = ctypes.CDLL(None)  # loaded here, since nothing may be loaded between fork and exec


@dataclass
class Setting:
    """What all rows share."""
    folder: Path  # of logs, data and checkpoints
    tiny: bool
    simulated: bool
    nanogpt: str
    rows: dict  # {name: Row}
    torch: str  # its version
    visible: list  # the names that CUDA_VISIBLE_DEVICES has for the GPUs
    rates: object  # the plan's of this GPU: {name: FLOP/s or bytes/s}, or why there are none


    def shown(self, text):
        """A command or a line without this machine's paths and names."""
        names = {
            str(self.folder): "logs", sys.executable: "python", str(HERE): ".",
            self.nanogpt: "nanoGPT", os.path.expanduser("~"): "~", sys.prefix: "python's",
            tempfile.gettempdir(): "tmp", socket.getfqdn(): "HOST", socket.gethostname(): "HOST",
            os.environ.get("USER", ""): "USER"}
        for name in sorted(names, key=len, reverse=True):
            if len(name) > 2:  # a home of / would be everywhere
                text = text.replace(name, names[name])
        return text


class NotHere(Exception):
    """This machine lacks what a row needs."""


class Work:
    LEAST = 60  # seconds of a limit

    def __init__(self, row, setting, ids):
        self.row = row
        self.setting = setting
        self.ids = ids
        self.tiny = setting.tiny
        self.nanogpt = setting.nanogpt
        self.folder = setting.folder / re.sub(r"\W+", "-", row.name).strip("-")
        self.log = self.folder / "log.txt"
        self.command = ""  # the first one
        limit = 120 if setting.tiny else self.LEAST + 2 * row.seconds
        self.deadline = time.monotonic() + limit
        self.limit = limit
        self.running = []
        self.outputs = []

    def make_folder(self):
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)

    # ---------- programs ----------

    def start(self, *argv, ranks=0, restarts=0, gpus=None, cwd=HERE):
        """A program in the background; under torchrun if it has ranks."""
        command = [sys.executable]
        if ranks:
            command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
            command += [f"--max-restarts={restarts}"] if restarts else []
        environment = self.environment(self.row.gpus if gpus is None else gpus)
        if "SIM_GPUS" in environment and argv[0] != "-m":  # pytest takes them itself
            command += ["-m", "simgpu"]
        command += [str(arg) for arg in argv]
        self.command = self.command or self.shown(command)
        with open(self.log, "a") as log:
            print(f"$ {self.shown(command)}", file=log, flush=True)
            p = subprocess.Popen(
                command, cwd=cwd, env=environment, stdout=log, stderr=log,
                start_new_session=True, preexec_fn=end_with_parent)
        p.begin = self.log.stat().st_size
        self.running.append(p)
        return p

    def wait(self, p, may_fail=False):
        """Its output."""
        try:
            p.wait(max(0, self.deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"stopped after {self.limit} s")
        with open(self.log) as f:
            f.seek(p.begin)
            log = f.read()
        if p.returncode and not may_fail:
            raise RuntimeError(self.first_error(log))
        return log

    def require_time(self):
        if time.monotonic() > self.deadline:
            raise TimeoutError(f"stopped after {self.limit} s")

    def call(self, *argv, may_fail=False, **options):
        return self.wait(self.start(*argv, **options), may_fail)

    def stop(self):
        """Remove checkpoints, and kill what still runs, a torchrun's ranks first: each is in a
        session of its own."""
        for p in self.running:
            if p.poll() is None:
                for pid in [*descendants(p.pid), p.pid]:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                p.wait()
        for path in self.outputs:
            shutil.rmtree(path, ignore_errors=True)

    def child(self, name, *argv, ranks):
        """The JSON that a program of this directory writes."""
        result = self.folder / "result.json"
        result.unlink(missing_ok=True)
        more = ["--tiny"] if self.tiny and name == "rates.py" else []
        self.call(f"extras/gpu_report/{name}", f"--result={result}", *more, *argv, ranks=ranks)
        return json.loads(result.read_text())

    def step(self, keys, steps=None, trace=False):
        steps = steps or (3 if self.tiny else 10)
        ranks = self.row.gpus if self.row.gpus > 1 or is_sharded(keys) else 0
        own = [f"--steps={steps}", *(["--trace"] if trace else [])]
        return self.child("step.py", *own, *self.with_data(keys), ranks=ranks)

    # ---------- what they are given ----------

    def environment(self, gpus):
        env = dict(os.environ, OMP_NUM_THREADS=os.environ.get("OMP_NUM_THREADS", "1"))
        env.update(self.row.env)
        for name in list(env):  # somebody else's job, such as a pod's
            if name.startswith(("TORCHELASTIC_", "PET_", "MASTER_", "GROUP_", "ROLE_", "LOCAL_")):
                del env[name]
        for name in ("RANK", "WORLD_SIZE"):
            env.pop(name, None)
        simulated = env.pop("SIM_GPUS", None)
        visible = [self.setting.visible[i] for i in self.ids[:gpus]]
        env["CUDA_VISIBLE_DEVICES"] = ",".join(visible)
        if simulated and gpus:
            del env["CUDA_VISIBLE_DEVICES"]
            env["SIM_GPUS"] = str(gpus)
            env["PYTHONPATH"] = str(SIMGPU)
        return env

    def with_data(self, keys):
        return [*keys, f"--dataset={self.setting.folder / 'data'}"]

    def keys_of(self, name):
        keys = self.setting.rows[name].keys
        return self.with_data(keys)

    def directory(self, name):
        """For a run's checkpoints. They are removed when the row has ended."""
        self.outputs.append(self.folder / name)
        return self.outputs[-1]

    def require_disk(self, size):
        free = shutil.disk_usage(self.folder).free
        if free < size:
            raise NotHere(f"it writes {size / 1e9:.0f} GB, and the disk has {free / 1e9:.0f}")

    # ---------- what they say ----------

    def first_error(self, log):
        """The first line that names one; else the last before torchrun's own report."""
        lines = [line.strip() for line in log.splitlines()]
        for line in lines:
            if re.search(r"^(\[rank\d+\]: )?[\w.]*(Error|Exception)\b|out of memory", line):
                return line
        said = []
        for line in lines:
            if re.match(r"[EW]\d{4} .*torch/distributed/elastic|Traceback", line):
                break
            if line and not re.match(r"\$|NCCL version|[IW]\d{4} |.*Warning", line):
                said.append(line)
        return said[-1] if said else "it ended without a word"

    def shown(self, command):
        return self.setting.shown(" ".join(command))


def children(pid):
    """The processes that it has started: a torchrun's ranks."""
    with suppress(OSError):
        path = Path(f"/proc/{pid}/task/{pid}/children")
        return [int(child) for child in path.read_text().split()]
    return []


def descendants(pid):
    """Its children, theirs, and so on, also in sessions of their own."""
    found = []
    for child in children(pid):
        found += [child, *descendants(child)]
    return found


def is_sharded(keys):
    return any(key in keys for key in (
        "--strategy=full_shard", "--strategy=shard_grad_op", "--strategy=hybrid_shard"))


def end_with_parent():
    """In a new process: a SIGTERM when its parent dies, even of -9. (Linux has it.)"""
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)

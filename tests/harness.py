"""
Run commands as a user would, and functions on several ranks; for these tests and for a fork's own.

    p = python("train.py", "config/quickstart.py")      # CompletedProcess with text
    p = script("data/prepare.py", "--help")              # in this process, without its imports
    p = Ranks(2, function, *args).finish()               # function(*args) on 2 ranks
    results = on_ranks(2, {"name": (function, kwargs)})  # what it returned on each rank
    assert values(results, "name") == [0, 1]

Each rank is forked from a server of its own that has imported everything: a tenth of a second a
launch, after the first, instead of torchrun's five. As under torchrun, ranks share no memory, and a
set has another order on each of them. They get torchrun's environment and store, gloo on CPU, one
thread, and no fixed port. What hangs is ended and reported, and no rank outlives pytest. A function
must be in a file that can be imported.

Ranks that are told device=cuda share GPUs that are too few (own_node says how). Where there are
none they get simulated ones, if simgpu, a project of its own, is on PYTHONPATH; else the test is
skipped.
"""

import functools
import importlib.util
import io
import json
import os
import pickle
import runpy
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import redirect_stderr, redirect_stdout, suppress
from unittest.mock import patch

import pytest

# Threads of OpenMP that wait for each other do not spin: other processes need the cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ["OMP_NUM_THREADS"] = "1"
# A progress bar comes after a second, and would be one more line where a test expects one.
os.environ.setdefault("TQDM_DISABLE", "1")
HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # the repository
SPEC = importlib.util.find_spec("simgpu")
SIMGPU = os.path.dirname(os.path.dirname(SPEC.origin)) if SPEC else ""  # the directory it lies in
sys.path[:0] = [HERE, os.path.join(HERE, "tests")]

if os.environ.get("SIM_GPUS"):
    import simgpu  # noqa: F401  before torch, which then has that many simulated GPUs

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import configurator  # noqa: E402
import ranks  # noqa: E402

# -----------------------------------------------------------------------------
# commands


def shell(*args, timeout=120, cwd=HERE, env=None):
    """Run a command to its end, or kill its process group; CompletedProcess with text."""
    # the handler tells where a rank was when PyTorch's C++ aborted it
    env = {**os.environ, "PYTHONPATH": HERE, "PYTHONFAULTHANDLER": "1", **(env or {})}
    p = subprocess.Popen([str(a) for a in args], cwd=cwd, env=env, text=True,
                         stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                         start_new_session=True)
    try:
        out, err = p.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(p.pid, signal.SIGKILL)
        out, err = p.communicate()
        pytest.fail(f"{' '.join(map(str, args))}\nhung for {timeout} s\n{out}\n{err}")
    return subprocess.CompletedProcess(args, p.returncode, out, err)


def python(*args, **kwargs):
    return shell(sys.executable, *args, **kwargs)


def torchrun(n, *args, **kwargs):
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={n}")
    return python(*launcher, *args, **kwargs)  # --standalone takes a free port by itself


def script(path, *args, **env):
    """python(path, *args) in this process, which has imported what takes a new one seconds."""
    out, err = io.StringIO(), io.StringIO()
    own = dict(argv=[path, *map(str, args)], path=[*sys.path])
    with (patch.multiple(sys, **own), patch.dict(os.environ, env), redirect_stdout(out),
          redirect_stderr(err)):
        code = exit_code(runpy.run_path, os.path.join(HERE, path), run_name="__main__")
    return subprocess.CompletedProcess(path, code, out.getvalue(), err.getvalue())


def exit_code(function, *args, **kwargs):
    """Call it as a program does, which prints what ends it; the program's exit code."""
    try:
        function(*args, **kwargs)
    except SystemExit as e:
        if not isinstance(e.code, str):
            return e.code or 0
        print(e.code, file=sys.stderr)
        return 1
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def flags(**overrides):
    return [f"--{k}={v}" for k, v in overrides.items()]


def refused(function, *args, **kwargs):
    """The one line that it says to this input."""
    with pytest.raises(SystemExit) as e:
        function(*args, **kwargs)
    assert isinstance(e.value.code, str) and "\n" not in e.value.code, e.value.code
    return e.value.code


def copied(path):
    """The project without what git ignores, in the new directory `path`."""
    left_out = (".git", ".venv", "out", "out-*", "*.bin", "__pycache__", ".*_cache")
    return shutil.copytree(HERE, path, ignore=shutil.ignore_patterns(*left_out))


def children(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as f:
        return [int(c) for c in f.read().split()]


# -----------------------------------------------------------------------------
# functions on ranks


def wants_cuda(args):
    """Does --device=cuda, or {"device": "cuda"}, lie anywhere in them?"""
    return any(text in repr(args) for text in ("'--device=cuda'", "'device': 'cuda'"))


def gpus_for(args):
    """How many (real, simulated) GPUs these arguments get; skips the test if there are none."""
    if not wants_cuda(args):
        return 0, 0
    real = torch.cuda.device_count()
    if not real and not SIMGPU:
        pytest.skip("there is no GPU, and no simgpu on PYTHONPATH to simulate one")
    return real, 0 if real else 4


def own_node(rank, gpus):
    """The environment of a rank where there are fewer GPUs than ranks: NCCL takes it for another
    node's. NCCL refuses two ranks of one host on one GPU, and asks NCCL_HOSTID which host that is.
    So real NCCL runs between them, over sockets: its kernels, groups, streams and watchdog, but no
    NVLink."""
    return dict(
        NCCL_HOSTID=f"node {rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1",
        LOCAL_RANK=str(rank % gpus), LOCAL_WORLD_SIZE="1")


@functools.cache
def server_of(rank, gpus):
    """The server that a rank is forked from. gpus: how many its PyTorch simulates."""
    path = os.pathsep.join(filter(None, [HERE, os.path.join(HERE, "tests"), SIMGPU]))
    env = dict(os.environ, PYTHONPATH=path, PYTHONHASHSEED=str(1 + rank))
    if gpus:
        env["SIM_GPUS"] = str(gpus)
    # In a session of its own, which Ctrl-C does not reach: pytest decides when it ends.
    return subprocess.Popen([sys.executable, "-c", "import harness; harness.serve()"], env=env,
                            bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                            start_new_session=True)


def serve():
    """For each line of stdin fork a rank; print its pid, and once it has ended its exit code. stdin
    ends when pytest does, in whatever way: the rank is then killed."""
    for name in ("sample", "torch._dynamo", "training"):  # so that no rank has to
        importlib.import_module(name)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            become_rank(*pickle.loads(bytes.fromhex(line)))
        with suppress(BrokenPipeError):  # pytest is gone, as the next look at stdin says
            print(pid, flush=True)
        ended = 0
        while not ended:
            if select.select([sys.stdin], [], [], 0.01)[0]:  # no line comes now, only its end
                os.kill(pid, signal.SIGKILL)
                os._exit(0)
            ended, status = os.waitpid(pid, os.WNOHANG)
        print(os.waitstatus_to_exitcode(status), flush=True)
    os._exit(0)  # without Python's clean-up, which takes a second


def become_rank(env, path, logs, models, work):
    files = {0: os.devnull, 1: os.path.join(logs, "out"), 2: os.path.join(logs, "err")}
    for fd, name in files.items():
        os.dup2(os.open(name, os.O_RDWR | os.O_APPEND), fd)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
    os.environ.update({k: str(v) for k, v in env.items()})
    configurator.HERE = models  # as the fixture `models` has set it
    os.chdir(HERE)
    sys.path[:] = path  # which leads to the function
    function, args = pickle.loads(work)
    code = exit_code(ranks.run, function, *args)
    sys.stdout.flush()
    os._exit(code)


class Ranks:
    """
    function(*args) on `world` ranks, started at once. A launch ends the one before, which a test
    that failed may have left.

    alone: without torchrun's environment, as one rank is by default. restarts: an earlier Ranks,
    whose store these ranks get, as torchrun's restarted ranks do.
    """

    latest = None

    def __init__(self, world, function, *args, alone=None, restarts=None):
        if Ranks.latest:
            Ranks.latest.kill()
        gpus, simulated = gpus_for(args)
        env = {}
        if not (world == 1 if alone is None else alone):
            self.store = restarts.store if restarts else dist.TCPStore(
                "127.0.0.1", 0, is_master=True, wait_for_workers=False)
            env.update(
                WORLD_SIZE=world, LOCAL_WORLD_SIZE=world, GROUP_WORLD_SIZE=1,
                MASTER_ADDR="127.0.0.1", MASTER_PORT=self.store.port,
                TORCHELASTIC_USE_AGENT_STORE=True,
                TORCHELASTIC_RESTART_COUNT=int(restarts is not None))
        self.logs = tempfile.TemporaryDirectory()
        for name in ("out", "err"):
            open(os.path.join(self.logs.name, name), "w").close()
        work = pickle.dumps((function, args))
        self.servers = [server_of(rank, simulated) for rank in range(world)]
        for rank, server in enumerate(self.servers):  # they import side by side
            own = {**env, "RANK": rank, "LOCAL_RANK": rank} if env else {}
            if 0 < gpus < world:
                own |= own_node(rank, gpus)
            request = (own, sys.path, self.logs.name, configurator.HERE, work)
            server.stdin.write(pickle.dumps(request).hex().encode() + b"\n")
        self.pids = [int(server.stdout.readline()) for server in self.servers]
        self.codes = {}  # {rank that has ended: its exit code, or minus a signal's number}
        Ranks.latest = self

    def left(self):
        return [rank for rank in range(len(self.pids)) if rank not in self.codes]

    def send(self, number, *to):
        """A signal to these ranks, or to all."""
        for rank in to or self.left():
            with suppress(ProcessLookupError):  # it has just ended
                if rank not in self.codes:
                    os.kill(self.pids[rank], number)

    def kill(self):
        self.send(signal.SIGKILL)
        self.wait(60)

    def wait(self, seconds, until_one_fails=False):
        """Until all have ended; at most this many seconds."""
        end = time.time() + seconds
        while self.left() and not (until_one_fails and any(self.codes.values())):
            reports = {self.servers[rank].stdout: rank for rank in self.left()}
            come, _, _ = select.select(reports, [], [], max(0, end - time.time()))
            if not come:
                break
            for report in come:
                self.codes[reports[report]] = int(report.readline())

    def finish(self, timeout=120):
        """CompletedProcess; when a rank fails the others are ended too, as torchrun would."""
        self.wait(timeout, until_one_fails=True)
        code = max(map(abs, self.codes.values()), default=0)  # not that of those ended here
        hung = self.left() and not code
        self.send(signal.SIGTERM)
        self.wait(0 if hung else 8)
        self.kill()
        out, err = (open(os.path.join(self.logs.name, name)).read() for name in ("out", "err"))
        if hung:
            pytest.fail(f"hung for {timeout} s\n{out}\n{err}")
        return subprocess.CompletedProcess("", code, out, err)


def on_ranks(world, cases, timeout=600):
    """
    Run cases {name: (function, kwargs)} in as few launches as possible; {name: [rank's result]}.

    A result is {"value": what the function returned} or {"error": text}. After a failure a new
    launch runs the cases that are left; after a segmentation fault it begins with the same one,
    once: torch 2.15's gloo had one in its own thread (2026-11-28; not again in 29 launches).
    """
    if dist.get_debug_level() == dist.DebugLevel.DETAIL:  # DDP crashes there, torch 2.13 to 2.15
        cases = {name: case for name, case in cases.items() if "'ddp'" not in repr(case)}
    results, crashed = {}, set()
    while len(results) < len(cases):
        left = {name: case for name, case in cases.items() if name not in results}
        with tempfile.TemporaryDirectory() as out:
            code = None
            try:
                p = Ranks(world, run_cases, left, out, alone=False).finish(timeout)
                code = p.returncode
                said = f"ended with {p.returncode}\n{p.stdout}\n{p.stderr}"
            except pytest.fail.Exception as e:  # one hung; those before it have ended
                said = str(e)
            for name in left:
                files = [os.path.join(out, f"{name}-{rank}.json") for rank in range(world)]
                if not all(map(os.path.exists, files)):
                    if code == signal.SIGSEGV and name not in crashed:
                        crashed.add(name)
                    else:
                        results[name] = [{"error": said}]
                    break
                results[name] = [json.load(open(file)) for file in files]
    return results


def run_cases(cases, out):
    # NCCL connects at once from torch 2.15 on, and refuses two ranks of a host on one GPU: so it
    # is here only where a case wants GPUs, of which each rank has one, or is a node of its own.
    dist.init_process_group("cpu:gloo,cuda:nccl" if wants_cuda(cases) else "gloo")
    for name, (function, kwargs) in cases.items():
        try:
            result = {"value": function(**kwargs)}
        except (SystemExit, pytest.skip.Exception) as e:
            result = {"error": str(e)}
        with open(os.path.join(out, f"{name}-{dist.get_rank()}.json"), "w") as f:
            json.dump(result, f)
        dist.barrier()


def values(results, name):
    """What a case returned on each rank; fails with the first rank's error."""
    if name not in results:
        pytest.skip("no DDP under TORCH_DISTRIBUTED_DEBUG=DETAIL")
    errors = [r["error"] for r in results[name] if "error" in r]
    assert not errors, errors[0]
    return [r["value"] for r in results[name]]

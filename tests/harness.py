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

Ranks that are told device=cuda share GPUs that are too few (own_node.py says how). Where there are
none they get simulated ones, if simgpu, a project of its own, is on PYTHONPATH; else the test is
skipped.
"""

import functools
import importlib.util
import io
import json
import os
import pickle
import re
import runpy
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import types
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import fields
from functools import partial
from unittest.mock import patch

import numpy as np
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
from own_node import environment as own_node  # noqa: E402

import configurator  # noqa: E402
import ranks  # noqa: E402
import train  # noqa: E402
from configurator import (  # noqa: E402
    STRATEGIES,
    load_config,
    make_config,
    model_file,
    resolve,
)
from data.loader import open_batches  # noqa: E402
from model import GPT, GPTConfig, derive_seed  # noqa: E402
from optimizer import LossScaler  # noqa: E402
from start import final_config, open_start  # noqa: E402

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


def script(path, *args, **env):
    """python(path, *args) in this process, which has imported what takes a new one seconds."""
    out, err = io.StringIO(), io.StringIO()
    own = dict(argv=[path, *map(str, args)], path=[*sys.path])
    with (patch.multiple(sys, **own), patch.dict(os.environ, env), redirect_stdout(out),
          redirect_stderr(err)):
        code = exit_code(runpy.run_path, os.path.join(HERE, path), run_name="__main__")
    return subprocess.CompletedProcess(path, code, out.getvalue(), err.getvalue())


def exit_code(function, *args, **kwargs):
    """What a program that calls this ends with, and what it then prints."""
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


def copied(path):
    """The project without what git ignores, in the new directory `path`."""
    left_out = (".git", ".venv", "out", "out-*", "*.bin", "__pycache__", ".*_cache")
    return shutil.copytree(HERE, path, ignore=shutil.ignore_patterns(*left_out))


def children(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as f:
        return [int(c) for c in f.read().split()]


# -----------------------------------------------------------------------------
# functions on ranks

SIMULATED = 4  # GPUs


def wants_cuda(args):
    """Does --device=cuda, or {"device": "cuda"}, lie anywhere in them?"""
    return any(text in repr(args) for text in ("'--device=cuda'", "'device': 'cuda'"))


def simulates():
    """Must GPUs be simulated? Skips the test if they cannot be."""
    if torch.cuda.device_count():
        return False
    if not SIMGPU:
        pytest.skip("there is no GPU, and no simgpu on PYTHONPATH to simulate one")
    return True


@functools.cache
def server_of(rank, gpus):
    """The server that a rank is forked from. gpus: how many its PyTorch simulates."""
    path = os.pathsep.join(filter(None, [HERE, os.path.join(HERE, "tests"), SIMGPU]))
    env = dict(os.environ, PYTHONPATH=path, PYTHONHASHSEED=str(1 + rank))
    if gpus:
        env["SIM_GPUS"] = str(gpus)
    # In a session of its own, where Ctrl-C does not come: it ends with its stdin, as pytest does.
    return subprocess.Popen([sys.executable, "-c", "import harness; harness.serve()"], env=env,
                            bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                            start_new_session=True)


def serve():
    """For each line of stdin fork a rank; print its pid, and once it has ended its exit code."""
    for name in ("sample", "torch._dynamo"):  # no rank has to
        importlib.import_module(name)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            become_rank(*pickle.loads(bytes.fromhex(line)))
        with suppress(BrokenPipeError):  # as below
            print(pid, flush=True)
        ended = 0
        while not ended:
            if select.select([sys.stdin], [], [], 0.01)[0]:  # its end: pytest is gone
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
    configurator.HERE = models  # what the fixture `models` has set
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
        on_gpus = wants_cuda(args)
        simulated = SIMULATED if on_gpus and simulates() else 0
        gpus = torch.cuda.device_count() if on_gpus else 0
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
        """Until all have ended; no longer than so many seconds."""
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
    if dist.get_debug_level() == dist.DebugLevel.DETAIL:  # torch 2.13 to 2.15 crash there
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


# -----------------------------------------------------------------------------
# training runs

# no world size of the tests divides its vocabulary and width (67 and 30: uneven by 2, 3 or 4)
TINY = dict(
    n_layer=3, n_head=3, n_embd=30, block_size=16, dropout=0.0, bias=True,
    batch_size=2, gradient_accumulation_steps=12, max_iters=5, eval_interval=5, eval_iters=2,
    log_interval=1, warmup_iters=2, lr_decay_iters=20, learning_rate=1e-3, min_lr=1e-4,
    grad_clip=0.5, dtype="float32", device="cpu", compile=False, always_save_checkpoint=True)
OTHERS = dict(n_kv_head=1, n_inner=50, rope_theta=1e4, tie_embeddings=False)  # llama's


def refused(function, *args, **kwargs):
    """The one line that it says to this input."""
    with pytest.raises(SystemExit) as e:
        function(*args, **kwargs)
    assert isinstance(e.value.code, str) and "\n" not in e.value.code, e.value.code
    return e.value.code


def tensor_of(source, key):
    """A value of a checkpoint's Source, as a tensor."""
    value = source.get(key)
    return value[:] if source.shapes[key] else value


def two_each(world):
    """The 24 sequences of TINY's steps as two micro-batches on each rank, which takes less time.
    Not on 3, where they round so that the weights come close to the tests' limits."""
    return {} if world == 3 else dict(gradient_accumulation_steps=2 * world, batch_size=12 // world)


def keys_of(model):
    """TINY, as far as --model=model has its keys."""
    names = configurator.keys_of(model)
    return {key: value for key, value in {**TINY, **OTHERS}.items() if key in names}


# {strategy: (ranks on which it shows, keys)}, but for single
WAYS = {}
for name, row in STRATEGIES.items():
    if row.in_groups:
        WAYS[name] = 4, dict(strategy=name, shard_group_size=2)
    elif name != "single":
        WAYS[name] = 2, dict(strategy=name)


def tiny(tmp, model="gpt2", **overrides):
    """The config of a small run on the toy data of the fixture `tmp`."""
    keys = {**keys_of(model), "vocab_size": 67, "dataset": os.path.join(tmp, "toy"), **overrides}
    return make_config({"model": model, **keys})


def plain_gpt(model=GPT, seed=1337, **sizes):
    """A GPT outside of any strategy: TINY's sizes unless told, and its initial values."""
    keys = {f.name: TINY[f.name] for f in fields(GPTConfig) if f.name in TINY}
    return initialized(model(GPTConfig(**{**keys, "vocab_size": 67, **sizes})), seed)


def plain_model(cfg):
    """The config's model outside of any strategy, and its initial values."""
    return initialized(model_file(cfg.model).Model(cfg.sizes), cfg.seed)


def initialized(model, seed):
    for name, p in model.named_parameters():
        p.data.copy_(model.initial_value(name, p.shape, seed)[:])
    return model.eval()


# TINY's: warm-up over 2 steps to 1e-3, then a cosine to 1e-4 at step 20, where cos(0), cos(pi/18)
# and cos(pi/9) are
RATES = [1e-3 / 3, 2e-3 / 3, 1e-3, 9.931634888554936e-4, 9.728616793536588e-4]


def plain_training(cfg):
    """The same run in plain PyTorch, with a loop, a schedule and AdamW of its own: (losses, norms
    of the gradients, weights, {name: where a weight has had a gradient})."""
    model, batches = plain_model(cfg).train(), open_batches(cfg, ranks.World())
    named = dict(model.named_parameters())
    for name, p in named.items():
        if cfg.freeze and re.search(cfg.freeze, name):
            p.requires_grad_(False)
    trained = [p for p in named.values() if p.requires_grad]
    decay = cfg.weight_decay
    groups = [{"params": [p for p in trained if p.dim() > 1], "weight_decay": decay},
              {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), foreach=False, fused=False)
    losses, norms = [], []
    largest = {name: torch.zeros_like(p) for name, p in named.items() if p.requires_grad}
    for step, rate in enumerate(RATES[:cfg.max_iters]):
        total = 0.0
        for micro in range(cfg.gradient_accumulation_steps):
            torch.manual_seed(derive_seed(cfg.seed, step, micro))
            loss = model(*batches.get(step, micro)[:2])[1] / cfg.gradient_accumulation_steps
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(trained, cfg.grad_clip or 1e9)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        for name, p in named.items():
            if p.grad is not None:
                largest[name] = torch.maximum(largest[name], p.grad.abs())
        optimizer.zero_grad()
        losses.append(total)
        norms.append(norm.item())
    # A gradient that is zero but for rounding, such as the bias of the keys: AdamW divides that
    # noise by its own size, and what comes of it is another in every mode.
    noise = 1e-6 * max(size.max() for size in largest.values())
    counts = {name: size > noise for name, size in largest.items()}
    return losses, norms, dict(model.state_dict()), counts


def started(cfg, world):
    """(its final config, the Source of its values, whether it goes on), as train.train does."""
    source, resumed = open_start(cfg, world)
    return final_config(cfg, source, resumed, world), source, resumed


def built(tmp, **overrides):
    """A run on these ranks, before its first step: world, cfg, what to call, the model, its
    optimizer, batches."""
    world = ranks.setup(overrides.get("device", "cpu"), "auto")
    cfg = resolve(tiny(tmp, **overrides), world)
    model = train.meta_model(cfg)
    wrapped, optimizer = train.build(model, cfg, world)
    return types.SimpleNamespace(
        world=world, cfg=cfg, wrapped=wrapped, model=model, optimizer=optimizer,
        batches=open_batches(cfg, world),
        forward_backward=train.maybe_recorded(wrapped, cfg, world))


def steps(run, first=0, n=1, scaler=None):
    """Its optimizer steps first .. first + n - 1; (loss, norm) of the last."""
    scaler = scaler or LossScaler(run.cfg)
    for step in range(first, first + n):
        numbers = train.train_step(
            run.model, run.wrapped, run.optimizer, scaler, run.batches, step, run.cfg, run.world,
            run.forward_backward)
    return numbers["loss"].item(), numbers["grad_norm"].item()


# as FSDP2 and ours call them; the _single names are newer
COLLECTIVES = dict(
    all_gather_into_tensor="all_gather", all_gather_single="all_gather",
    reduce_scatter_tensor="reduce_scatter", reduce_scatter_single="reduce_scatter",
    all_reduce="all_reduce", all_to_all_single="all_to_all", gather="gather")


@contextmanager
def heard():
    """The collectives that torch.distributed is asked for inside: a list that fills with
    (kind, ranks in the group, dtype, bytes of the whole buffer). DDP's C++ asks by itself."""
    calls = []

    def listen(kind, original):
        def call(*args, **kwargs):
            tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)]
            whole = args[1] if kind == "all_to_all" else max(tensors, key=torch.Tensor.numel)
            group = dist.get_world_size(kwargs.get("group"))
            calls.append((kind, group, str(whole.dtype), whole.numel() * whole.element_size()))
            return original(*args, **kwargs)
        return call

    with ExitStack() as patches:
        for name, kind in COLLECTIVES.items():
            if hasattr(dist, name):
                call = listen(kind, getattr(dist, name))
                patches.enter_context(patch.object(dist, name, call))
        yield calls


def flags(**overrides):
    return [f"--{k}={v}" for k, v in overrides.items()]


def arguments(tmp, out, model="gpt2", **overrides):
    keys = {**keys_of(model), "dataset": os.path.join(tmp, "toy"), "out_dir": out, **overrides}
    return flags(model=model, **keys)


def trained(world, argv):
    """train.py with these arguments on `world` ranks; CompletedProcess."""
    return Ranks(world, train.main, [str(a) for a in argv]).finish()


def launch(world, argv):
    """It must end well."""
    p = trained(world, argv)
    assert p.returncode == 0, p.stdout + p.stderr
    return p


def run_training(tmp, name, **overrides):
    """A whole run on these ranks, as the command would; returns its logged steps."""
    out = os.path.join(tmp, name)
    cfg = load_config(arguments(tmp, out, **overrides))
    handlers = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        with no_compiler():
            train.train(cfg)
    finally:  # the process goes on: pytest's, or a rank with more cases
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return [r for r in read_metrics(out) if "loss" in r]


def run_compiled(**run):
    """run_training without evaluation: to compile that too takes as long again."""
    with patch.object(train, "evaluate", lambda *_: dict(train=1.0, val=1.0)):
        return run_training(**run)


@contextmanager
def no_compiler():
    """Compile by a backend that traces like any other and needs no C++ compiler."""
    with patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")):
        yield
    torch._dynamo.reset()


def make_data(path, vocab=67, n=6000, seed=0, **meta):
    """A data set whose next token is the last one plus 1, 2 or 5: there is something to learn."""
    os.makedirs(path)
    rng = np.random.default_rng(seed)
    steps = rng.choice([1, 2, 5], size=n, p=[0.7, 0.2, 0.1])
    tokens = (np.cumsum(steps) % vocab).astype(np.uint16)
    tokens[: n * 9 // 10].tofile(os.path.join(path, "train.bin"))
    tokens[n * 9 // 10:].tofile(os.path.join(path, "val.bin"))
    with open(os.path.join(path, "meta.json"), "w") as f:
        json.dump({"vocab_size": vocab, **meta}, f)


def read_metrics(out):
    """The rows that count: a resumed run appends, and takes back what lies from its step on."""
    def place(row):  # the evaluation before a step has its number
        return row["iter"], "loss" in row

    rows = []
    with open(os.path.join(out, "metrics.jsonl")) as f:
        for row in map(json.loads, f):
            if "config" in row:  # a start's
                continue
            rows = [earlier for earlier in rows if place(earlier) < place(row)] + [row]
    return rows


def losses(out):
    return [r["loss"] for r in read_metrics(out) if "loss" in r]


def read_ckpt(out, name="ckpt.pt"):
    return torch.load(os.path.join(out, name), weights_only=True)


def assert_same_weights(a, b, tolerance):
    """
    Relative difference in norm of each parameter.

    Left out: the bias of the keys. Softmax does not see it, so its gradient is zero but for
    rounding, and Adam divides that noise by its own size.
    """
    assert a.keys() == b.keys()
    for key in a:
        x, y = a[key], b[key]
        if key.endswith("c_attn.bias"):
            n = len(x) // 3
            x, y = torch.cat((x[:n], x[2 * n:])), torch.cat((y[:n], y[2 * n:]))
        error = (x - y).norm() / x.norm().clamp(min=1e-3)
        assert error <= tolerance, f"{key}: relative difference {error:.2e}"


def resident(field, reset=False):
    """Bytes: VmRSS is what this process has in memory now, VmHWM its peak since the last reset."""
    if reset:
        with open("/proc/self/clear_refs", "w") as f:
            f.write("5")
    with open("/proc/self/status") as f:
        return int(re.search(rf"{field}:\s+(\d+) kB", f.read())[1]) * 1024

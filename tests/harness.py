"""
Run commands as a user would, and functions on several ranks; for these tests and for a fork's own.

    p = python("train.py", "config/quickstart.py")      # CompletedProcess with text
    p = torchrun(2, "train.py", "--strategy=ddp")
    p = script("data/prepare.py", "--help")              # in this process, without its imports
    p = Ranks(2, function, *args).finish()               # function(*args) on 2 ranks
    results = on_ranks(2, {"name": (function, kwargs)})  # what it returned on each rank
    assert values(results, "name") == [0, 1]

Each rank is forked from a server of its own that has imported everything: a second a launch
instead of torchrun's five. As under torchrun, ranks share no memory, and a set has another order on
each of them. They get torchrun's environment and store, gloo on CPU, one thread, and no fixed port.
What hangs is ended and reported. As they import your file, a script needs
`if __name__ == "__main__":` around what it starts.

Ranks that are told device=cuda share GPUs that are too few (own_node.py says how). Where there are
none they get simulated ones, if simgpu, a project of its own, is on PYTHONPATH; else the test is
skipped.
"""

import functools
import importlib.util
import io
import json
import multiprocessing.connection
import multiprocessing.forkserver
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import types
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import fields
from functools import partial
from unittest.mock import patch

import numpy as np
import pytest

# Threads of OpenMP that wait for each other do not spin: other processes need the cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A progress bar comes after a second, and would be one more line where a test expects one.
os.environ.setdefault("TQDM_DISABLE", "1")
HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # the repository
SPEC = importlib.util.find_spec("simgpu")
SIMGPU = os.path.dirname(os.path.dirname(SPEC.origin)) if SPEC else ""  # the directory it lies in
sys.path[:0] = [HERE, os.path.join(HERE, "tests")]
PYTHONPATH = os.pathsep.join(filter(None, [*sys.path[:2], SIMGPU]))
os.environ["PYTHONPATH"] = PYTHONPATH  # of the servers that import this file

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


def environment():
    launcher = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    env = {k: v for k, v in os.environ.items() if k not in launcher}
    # the handler tells where a rank was when PyTorch's C++ aborted it
    return {**env, "OMP_NUM_THREADS": "1", "PYTHONPATH": HERE, "PYTHONFAULTHANDLER": "1"}


def shell(*args, timeout=120, cwd=HERE, stdin="", env=None):
    """Run a command to its end, or kill its process group; CompletedProcess with text."""
    p = subprocess.Popen([str(a) for a in args], cwd=cwd, env={**environment(), **(env or {})},
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.PIPE,
                         text=True, start_new_session=True)
    try:
        out, err = p.communicate(stdin, timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(p.pid, signal.SIGKILL)
        out, err = p.communicate()
        pytest.fail(f"{' '.join(map(str, args))}\nhung for {timeout} s\n{out}\n{err}")
    return subprocess.CompletedProcess(args, p.returncode, out, err)


def python(*args, **kwargs):
    return shell(sys.executable, *args, **kwargs)


def script(path, *args, **env):
    """python(path, *args) in this process, which has imported what takes a new one seconds."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    own = dict(argv=[path, *map(str, args)], path=[*sys.path])
    with (patch.multiple(sys, **own), patch.dict(os.environ, env), redirect_stdout(out),
          redirect_stderr(err)):
        try:
            runpy.run_path(os.path.join(HERE, path), run_name="__main__")
        except SystemExit as e:
            code = int(bool(e.code))
            if isinstance(e.code, str):
                print(e.code, file=sys.stderr)
    return subprocess.CompletedProcess(path, code, out.getvalue(), err.getvalue())


def torchrun(n, *args, **kwargs):
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={n}")
    return python(*launcher, *args, **kwargs)  # --standalone takes a free port by itself


def copied(path):
    """The project without what git ignores, in the new directory `path`."""
    left_out = (".git", ".venv", "out", "out-*", "*.bin", "__pycache__", ".*_cache")
    return shutil.copytree(HERE, path, ignore=shutil.ignore_patterns(*left_out))


def start(world, args, tmp, *options, **env):
    """A command in the background: a Popen with its output in one pipe, on `world` ranks."""
    command = [sys.executable]
    if world > 1:
        command += ["-m", "torch.distributed.run", *options, f"--nproc_per_node={world}"]
        command += ["--standalone"] if not any("--rdzv" in o for o in options) else []
    if wants_cuda(args) and simulates():
        command += ["-m", "simgpu"]
        env = dict(env, SIM_GPUS=str(SIMULATED), PYTHONPATH=PYTHONPATH)
    if wants_cuda(args) and 0 < torch.cuda.device_count() < world:
        command += [os.path.join(HERE, "tests", "own_node.py")]
    return subprocess.Popen(command + [str(a) for a in args], cwd=tmp, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                            start_new_session=True, env={**environment(), **env},
                            preexec_fn=usual_signals)


def usual_signals():
    """In a new process: a shell's background has Ctrl-C ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def finish(p, seconds=60):
    """The output of a started command; fails if it does not end in time."""
    try:
        return p.communicate(timeout=seconds)[0]
    except subprocess.TimeoutExpired:
        os.killpg(p.pid, signal.SIGKILL)
        pytest.fail("hung: " + p.communicate()[0])


def children(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as f:
        return [int(c) for c in f.read().split()]


# -----------------------------------------------------------------------------
# functions on ranks

PRELOADED = ["harness", "sample", "torch._dynamo"]  # by the server that ranks are forked from
SIMULATED = 4  # GPUs


def wants_cuda(value):
    """Does --device=cuda, or {"device": "cuda"}, lie anywhere in it?"""
    if isinstance(value, dict):
        return value.get("device") == "cuda" or wants_cuda(list(value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(wants_cuda, value))
    return value == "--device=cuda"


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
    server = multiprocessing.forkserver.ForkServer()
    server.set_forkserver_preload(PRELOADED)
    env = dict(PYTHONHASHSEED=str(1 + rank))
    if gpus:
        env["SIM_GPUS"] = str(gpus)
    with patch.dict(os.environ, env):
        server.ensure_running()
    return server


class Ranks:
    """
    function(*args) on `world` ranks, started at once, each forked from its own server.

    alone: without torchrun's environment, as one rank is by default. restarts: an earlier Ranks,
    whose store these ranks get, as torchrun's restarted ranks do.
    """

    def __init__(self, world, function, *args, alone=None, restarts=None):
        context = multiprocessing.get_context("forkserver")
        gpus = SIMULATED if wants_cuda(args) and simulates() else 0
        shared = torch.cuda.device_count() if wants_cuda(args) else 0
        servers = [server_of(rank, gpus) for rank in range(world)]  # they import side by side
        # Said to every rank: a server that started during a test that sets it would pass it on,
        # and ranks that compare their collectives hang with ranks that do not.
        env = dict(TORCH_DISTRIBUTED_DEBUG=os.environ.get("TORCH_DISTRIBUTED_DEBUG", "OFF"))
        if not (world == 1 if alone is None else alone):
            self.store = restarts.store if restarts else dist.TCPStore(
                "127.0.0.1", 0, is_master=True, wait_for_workers=False)
            env.update(
                WORLD_SIZE=world, LOCAL_WORLD_SIZE=world, GROUP_WORLD_SIZE=1,
                MASTER_ADDR="127.0.0.1", MASTER_PORT=self.store.port,
                TORCHELASTIC_USE_AGENT_STORE=True,
                TORCHELASTIC_RESTART_COUNT=int(restarts is not None))
        self.logs, self.ranks = tempfile.TemporaryDirectory(), []
        for name in ("out", "err"):
            open(os.path.join(self.logs.name, name), "w").close()
        for rank, server in enumerate(servers):
            own = {**env, "RANK": rank, "LOCAL_RANK": rank} if "WORLD_SIZE" in env else env
            if 0 < shared < world:
                own |= own_node(rank, shared)
            told = (own, self.logs.name, configurator.HERE, function, args)
            p = context.Process(target=forked, args=told, daemon=True)  # ends with pytest, at last
            with patch.object(multiprocessing.forkserver, "connect_to_new_process",
                              server.connect_to_new_process):
                p.start()
            self.ranks.append(p)

    def kill(self):
        for p in self.ranks:
            p.kill()
        for p in self.ranks:
            p.join()

    def finish(self, timeout=120):
        """CompletedProcess; when a rank fails the others are ended too, as torchrun would."""
        end, running, code = time.time() + timeout, self.ranks, 0
        while running and time.time() < end and not any(p.exitcode for p in self.ranks):
            multiprocessing.connection.wait([p.sentinel for p in running], timeout=1)
            running = [p for p in running if p.exitcode is None]
        hung = time.time() >= end
        if not hung and running:
            code = max(abs(p.exitcode or 0) for p in self.ranks)
        for p in running:
            p.terminate()  # as torchrun does when a rank has failed
        for p in running:
            p.join(0 if hung else 8)
        self.kill()
        out, err = (open(os.path.join(self.logs.name, name)).read() for name in ("out", "err"))
        if hung:
            pytest.fail(f"hung for {timeout} s\n{out}\n{err}")
        code = code or max(abs(p.exitcode) for p in self.ranks)
        return subprocess.CompletedProcess("", code, out, err)


def forked(env, logs, models, function, args):
    for fd, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(os.path.join(logs, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND), fd)
    usual_signals()
    os.environ.update({k: str(v) for k, v in env.items()})
    dist.set_debug_level_from_env()  # DETAIL: PyTorch compares each collective over the ranks
    configurator.HERE = models  # what the fixture `models` has set
    os.chdir(HERE)
    torch.set_num_threads(1)
    ranks.run(function, *args)


def on_ranks(world, cases, timeout=600):
    """
    Run cases {name: (function, kwargs)} in as few launches as possible; {name: [rank's result]}.

    A result is {"value": what the function returned} or {"error": text}. After a failure a new
    launch runs the cases that are left; after a segmentation fault it begins with the same one,
    once: torch 2.15's gloo had one in its own thread (2026-11-28; not again in 29 launches).
    """
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


def command(tmp, out, **overrides):
    return [os.path.join(HERE, "train.py"), *arguments(tmp, out, **overrides)]


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

"""
Small training runs of the product, and plain PyTorch's beside them.

    run = built(tmp, strategy="ddp")         # on the ranks that call it, before its first step
    loss, norm = steps(run, n=3)
    rows = run_training(tmp, "name")         # a whole run; what it logged
    launch(2, arguments(tmp, out))           # train.py on 2 ranks
    losses, norms, weights, _ = plain_training(tiny(tmp))

The fixture `tmp` is in conftest.py.
"""

import json
import os
import re
import signal
import types
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from functools import partial
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from harness import Ranks, flags

import configurator
import ranks
import train
from configurator import STRATEGIES, load_config, make_config, model_file, resolve
from data.loader import open_batches
from model import GPT, GPTConfig, derive_seed
from optimizer import LossScaler
from start import final_config, open_start

# no world size of the tests divides its vocabulary and width (67 and 30: uneven by 2, 3 or 4)
TINY = dict(
    n_layer=3, n_head=3, n_embd=30, block_size=16, dropout=0.0, bias=True,
    batch_size=2, gradient_accumulation_steps=12, max_iters=5, eval_interval=5, eval_iters=2,
    log_interval=1, warmup_iters=2, lr_decay_iters=20, learning_rate=1e-3, min_lr=1e-4,
    grad_clip=0.5, dtype="float32", device="cpu", compile=False, always_save_checkpoint=True)
OTHERS = dict(n_kv_head=1, n_inner=50, rope_theta=1e4, tie_embeddings=False)  # llama's


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
        work=train.maybe_recorded(wrapped, cfg, world))


def steps(run, first=0, n=1, scaler=None):
    """Its optimizer steps first .. first + n - 1; (loss, norm) of the last."""
    scaler = scaler or LossScaler(run.cfg)
    for step in range(first, first + n):
        numbers = train.train_step(
            run.model, run.wrapped, run.optimizer, scaler, run.batches, step, run.cfg, run.world,
            run.work)
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


def steps_alone(tmp, **keys):
    """The file for --compare of a run by one process."""
    path = os.path.join(tmp, f"alone {keys}.json")
    if not os.path.exists(path):
        run_training(tmp, f"alone {keys}", compare=path, **keys)
    return path


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

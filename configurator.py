"""
The config: every key of a run, once, with its type, default, allowed values and help.

    cfg = load_config(["config/train_gpt2.py", "--batch_size=8", "--compile=False"])
    cfg = resolve(cfg, world)     # 'auto' spelled out for these ranks and this device

Config files are Python assignments. Files and --key=value flags apply left to right, the last wins.
A model's own keys are in its file, in ModelConfig; name --model before them. Keys that nanoGPT has
keep its names and meanings. A mistake is a SystemExit with one line.
"""

import ast
import difflib
import functools
import importlib
import inspect
import math
import os
import re
import shutil
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields, is_dataclass, make_dataclass, replace
from typing import Annotated, Literal, get_args, get_origin

import torch
import torch.distributed as dist

HERE = os.path.dirname(os.path.abspath(__file__))
SHARDED = ("shard_grad_op", "full_shard", "hybrid_shard")
STRATEGIES = ("single", "ddp") + SHARDED
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16,
          "float8": torch.bfloat16}  # float8 is for the blocks' linear layers; the rest is bf16

# A key's type says what it may be: (Python type, test, what an error says)
Whole = Annotated[int, lambda n: n >= 0, "a whole number, 0 or more"]
Positive = Annotated[int, lambda n: n >= 1, "a whole number, at least 1"]
Number = Annotated[float, lambda x: 0 <= x < math.inf, "a finite number, 0 or more"]
Fraction = Annotated[float, lambda x: 0 <= x <= 1, "a fraction from 0 to 1"]
BelowOne = Annotated[float, lambda x: 0 <= x < 1, "a number from 0, below 1"]
Device = Annotated[str, re.compile(r"auto|cpu|mps|cuda(:\d+)?").fullmatch, "auto, cpu, mps or cuda"]
Path = Annotated[str, len, "a name or a path"]
PLAIN = {
    int: (int, lambda n: True, "a whole number"),
    float: (float, math.isfinite, "a finite number"),
    bool: (bool, lambda b: True, "True or False"),
    str: (str, lambda s: True, "a string"),
}


@dataclass
class Config:
    # --- files
    out_dir: Path = "out"  # checkpoints and metrics.jsonl
    init_from: str = "scratch"  # scratch, resume, auto (resume if there is a checkpoint),
    #   or in Hugging Face format: gpt2[-medium|-large|-xl], another hub name, a directory
    checkpoint: Literal["full", "sharded"] = "full"  # full: one portable ckpt.pt.
    #   sharded: a directory, written in the background, for models too large for one host
    keep_checkpoints: Positive = 2  # how many sharded ones to keep
    always_save_checkpoint: bool = True  # False: only when the validation loss improves
    # --- evaluating and watching
    eval_interval: Positive = 2000  # steps between evaluations; each may write a checkpoint
    eval_iters: Positive = 200  # reads eval_iters * batch_size fixed windows of each split
    eval_only: bool = False  # evaluate once and stop
    log_interval: Positive = 1  # steps between log lines; each one waits for the GPU
    wandb_log: bool = False  # log to Weights & Biases too
    wandb_project: str = "nanofsdp2"
    wandb_run_name: str = "run"
    tensorboard: bool = False  # log to TensorBoard too, in out_dir
    # --- data
    dataset: Path = "openwebtext"  # a directory below data/, or any path with train.bin and val.bin
    gradient_accumulation_steps: Positive = 40  # micro-batches a step over all ranks together
    batch_size: Positive = 12  # sequences in a micro-batch; lower it when memory runs out
    seed: Whole = 1337  # weights, data order, dropout: everything random follows from it
    # --- model
    model: str = "gpt2"  # gpt2 is model.py, any other NAME is NAME.py: see the header of model.py
    freeze: str = ""  # parameters whose name matches do not train, e.g. 'wte|wpe|h\.[0-9]\.'
    # --- optimizer
    optimizer: Literal["adamw", "muon"] = "adamw"  # muon: for the blocks' matrices, AdamW elsewhere
    momentum: BelowOne = 0.95  # Muon's
    learning_rate: Number = 6e-4  # the peak, AdamW's and Muon's
    max_iters: Whole = 600000  # steps
    weight_decay: Number = 0.1  # on matrices and embeddings, not on biases and norms
    beta1: BelowOne = 0.9
    beta2: BelowOne = 0.95  # 0.99 when a step has few tokens
    grad_clip: Number = 1.0  # limit of the global gradient norm; 0: none
    decay_lr: bool = True  # warm up, then cosine; False: constant
    warmup_iters: Whole = 2000
    lr_decay_iters: Whole = 600000  # usually max_iters
    min_lr: Number = 6e-5  # usually learning_rate / 10
    # --- system
    device: Device = "auto"  # cpu, cuda, cuda:1, mps; under torchrun each rank has its own GPU
    dtype: Literal[("auto", *DTYPES)] = "auto"  # to compute in; parameters stay fp32.
    #   float32, bfloat16, float16, float8 (in linear layers; H100, torchao); auto: fastest safe one
    compile: bool = True  # torch.compile: a minute at the start, then faster; off for short runs
    backend: Literal["auto", "nccl", "gloo"] = "auto"  # auto: nccl on GPUs, gloo on CPUs
    # --- sharding
    strategy: Literal[("", *STRATEGIES)] = ""  # empty: full_shard under torchrun, else single.
    #   single, ddp, shard_grad_op (ZeRO-2), full_shard (ZeRO-3), hybrid_shard (ZeRO-3 in groups)
    shard_group_size: Whole = 0  # hybrid_shard: ranks that share one copy; 0: the ranks of a node
    reduce_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    #   in which ranks sum gradients; bfloat16 or float16 halve that traffic and cost accuracy
    wrap_min_params: Whole = 0  # 0: an FSDP unit per block. N: any module of at least N parameters
    cpu_offload: Fraction = 0.0  # share of the blocks in host memory; take few large micro-batches
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    #   selective recomputes the cheap parts, full whole blocks: least memory, a third more compute
    activation_offload: bool = False  # what activation_checkpointing=full keeps, in host memory
    loss_chunks: Whole = 0  # N: head and loss in N pieces, twice: logits never exist whole; try 8
    prefetch_blocks: Whole = 0  # units to gather ahead; 0 leaves it to FSDP2, 2 or more cost memory
    grad_sync: Literal["auto", "every", "last"] = "auto"
    #   reduce gradients after every micro-batch (least memory) or the last; auto: last for ddp only


Config.given = ()  # of a config from load_config: the keys that files and flags have set


def model_file(name):
    """The module that --model names; its Model and ModelConfig are the model."""
    file, module = "model" if name == "gpt2" else str(name), None
    # nothing else is imported: that would run it, and a checkpoint may name anything
    if file.isidentifier() and os.path.exists(os.path.join(HERE, f"{file}.py")):
        module = importlib.import_module(file)
    if not hasattr(module, "Model") or not is_dataclass(getattr(module, "ModelConfig", None)):
        raise SystemExit(f"model={name!r}: gpt2 is model.py, any other NAME is NAME.py beside it, "
                         "with a Model and a dataclass ModelConfig")
    return module


@functools.cache
def config_class(model):
    """Config's keys and the model's in one dataclass."""
    cls = model_file(model).ModelConfig
    for f in fields(cls):
        key = f"model={model!r}: ModelConfig.{f.name}, a {f.type!r},"
        if f.name in Config.__dataclass_fields__:
            raise SystemExit(f"{key} needs another name: every run has a key {f.name}")
        if f.default is MISSING or not (f.type in PLAIN or get_origin(f.type) is Literal):
            raise SystemExit(f"{key} must be an int, float, bool, str or Literal, with a default "
                             "(and the file without from __future__ import annotations)")
    return make_dataclass("RunConfig", [("model", str, model)], bases=(Config, cls))


def model_config(cfg):
    cls = model_file(cfg.model).ModelConfig
    return cls(**{f.name: getattr(cfg, f.name) for f in fields(cls)})


def load_config(argv, flags=()):
    """Config files and --key=value flags, applied left to right over the defaults. flags: names
    that the command takes itself, which a mistyped one may have meant."""
    cls, values = config_class(Config.model), {}
    for arg in argv:
        if arg.startswith("--") and "=" in arg:
            given = dict([arg[2:].split("=", 1)])  # the first '=': a value may contain more
        else:
            given = run_file(arg, {**vars(cls()), **values})
        cls = config_class(given.get("model", cls.model))
        values.update({key: coerce(key, given[key], cls, arg, flags) for key in given})
    return make_config(type("RunConfig", (cls,), {"given": tuple(values)}), values)


def with_model(cfg, source):
    """cfg with the model of a checkpoint, and its sizes; dropout stays this run's."""
    cls = config_class(source.header["config"].get("model", "gpt2"))
    values = {f.name: getattr(cfg, f.name) for f in fields(cls) if hasattr(cfg, f.name)}
    for key, value in source.header["model_args"].items():
        if key != "dropout":
            values[key] = coerce(key, value, cls, source.path)
    return make_config(cls, {**values, "model": cls.model})


def make_config(cls, values):
    try:
        cfg = cls(**values)
        if getattr(cfg, "n_layer", 1) > 10_000:  # they would be built for minutes without a word
            raise ValueError(f"n_layer={cfg.n_layer} must be at most 10000")
        return cfg
    except (TypeError, ValueError) as e:  # a key of another model; sizes that do not fit together
        raise SystemExit(f"{str(e).removeprefix('RunConfig.__init__() ')} (model={cls.model})")


def run_file(path, before):
    """{key: value} that the file sets. It may compute with the values before it, as in nanoGPT."""
    scope = dict(before)
    try:
        with open(path) as f:
            exec(compile(f.read(), path, "exec"), scope)
    except (Exception, SystemExit) as e:
        raise SystemExit(f"{path}: {type(e).__name__}: {getattr(e, 'strerror', e)}; it must be a "
                         "config file, or write --key=value")
    return {key: value for key, value in scope.items() if before.get(key) is not value
            and not (key.startswith("_") or callable(value) or inspect.ismodule(value))}


def coerce(key, value, cls, where, flags=()):
    """value as the key's type: exact, except that 1 may become 1.0, and 1e4 become 10000."""
    types = {f.name: f.type for f in fields(cls)}
    if key not in types:
        near = difflib.get_close_matches(key, [*flags, *types], 1)
        hint = f"did you mean {near[0]}?" if near else "--help lists the keys"
        raise SystemExit(f"{where}: no key {key} (model={cls.model}); {hint} (--model comes first)")
    rule = get_args(types[key])  # of an Annotated; of a Literal its values
    if get_origin(types[key]) is Literal:
        rule = type(rule[0]), rule.__contains__, f"one of {', '.join(map(repr, rule))}"
    kind, test, words = PLAIN.get(types[key], rule)
    with suppress(SyntaxError, ValueError, OverflowError):  # what is no number stays as it is
        if where.startswith("--") and kind is not str:  # a flag's text
            value = ast.literal_eval(str(value).capitalize())  # also true, false
        if {kind, type(value)} == {int, float} and kind(value) == value:
            value = kind(value)
    if type(value) is not kind or not test(value):
        raise SystemExit(f"{where}: {key}={value!r} must be {words}")
    return value


def help_text(usage, model="gpt2"):
    """usage, then every key with its default and its comment in the code."""
    lines = [usage.strip()]
    for cls in (Config, *reversed(model_file(model).ModelConfig.__mro__[:-1])):
        for line in inspect.getsource(cls).splitlines():
            key = re.match(r"    (\w+): .+? = (\S+)", line)
            _, _, comment = line.partition("# ")
            if key:
                lines.append(f"  --{key[1]}={key[2]}")
            if comment.startswith("--- "):
                lines += ["", comment[4:]]
            elif comment and (key or line.startswith("    #   ")):
                lines.append(f"        {comment.strip()}")
    return "\n".join(lines)


def resolve(cfg, world, distributed=None):
    """cfg with strategy, dtype, grad_sync and shard_group_size spelled out. SystemExit if keys can
    not be combined. distributed: is there a process group, or would there be (plan.py)?"""
    distributed = dist.is_initialized() if distributed is None else distributed
    cfg = replace(cfg, strategy=cfg.strategy or ("full_shard" if distributed else "single"),
                  dtype=best_dtype(world.device) if cfg.dtype == "auto" else cfg.dtype)
    for key, wrong, remedy in conflicts(cfg, world, distributed):
        if wrong:
            raise SystemExit(f"{key}={getattr(cfg, key)!r} with strategy={cfg.strategy} on "
                             f"{world.device.type}, {world.size} processes: {remedy}")
    sync = "last" if cfg.strategy == "ddp" else "every"
    group = (cfg.shard_group_size or world.local_size) if cfg.strategy == "hybrid_shard" else 0
    return replace(cfg, shard_group_size=group,
                   grad_sync=sync if cfg.grad_sync == "auto" else cfg.grad_sync)


def conflicts(c, world, distributed):
    """[(key, is it wrong?, remedy)]."""
    W, kind, single = world.size, world.device.type, c.strategy == "single"
    hybrid, group = c.strategy == "hybrid_shard", c.shard_group_size or world.local_size
    mode = c.activation_checkpointing
    inside = c.wrap_min_params and (mode != "none" or c.loss_chunks)  # units in what is recomputed
    compiler = any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "clang++"))
    only = dict(cpu_offload=SHARDED, wrap_min_params=SHARDED, prefetch_blocks=SHARDED,
                reduce_dtype=STRATEGIES[1:], grad_sync=STRATEGIES[1:],
                shard_group_size=("hybrid_shard",))
    return [
        ("strategy", W > 1 if single else not distributed,
         "single needs python train.py, the others torchrun --standalone --nproc_per_node=2"),
        *[(key, getattr(c, key) != getattr(Config, key) and c.strategy not in strategies,
           f"it is for {', '.join(strategies)}; use --{key}={getattr(Config, key)}")
          for key, strategies in only.items()],
        ("shard_group_size", hybrid and W % group,
         f"{W} processes do not divide into groups of {group}; use a divisor of {W}"),
        ("backend", c.backend == "nccl" and kind != "cuda" and not single,
         "NCCL needs CUDA; use --backend=auto"),
        ("gradient_accumulation_steps", c.gradient_accumulation_steps % W,
         f"it counts all ranks' micro-batches; use a multiple of {W}"),
        ("dtype", c.dtype == "float8" and c.strategy == "ddp",
         "it is for what FSDP gathers; use --strategy=full_shard or --dtype=bfloat16"),
        ("cpu_offload", c.cpu_offload and c.dtype in ("float8", "float16"),
         f"{c.dtype}'s scales and the gradients would lie apart; use --dtype=bfloat16 or float32"),
        ("loss_chunks", c.loss_chunks and not hasattr(model_file(c.model).Model, "head_loss"),
         f"model={c.model} has no head_loss (see the header of model.py); use --loss_chunks=0"),
        ("activation_offload", c.activation_offload and (c.compile or mode != "full"),
         "it moves what checkpointing keeps; use --activation_checkpointing=full --compile=False"),
        ("wrap_min_params", inside and (c.compile or c.prefetch_blocks or mode == "selective"),
         "use --wrap_min_params=0, or full checkpointing with --compile=False --prefetch_blocks=0"),
        ("compile", c.compile and kind == "cpu" and not compiler,
         "compiling for a CPU needs a C++ compiler; install g++, or use --compile=False"),
    ]


def best_dtype(device):
    """The compute type that the device is fast at; bf16 first, since it needs no loss scaling."""
    if device.type == "cuda":
        return "bfloat16" if torch.cuda.get_device_capability(device) >= (8, 0) else "float16"
    # private probes, as there are no public ones; if they disappear, fp32 is always right
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    fast = device.type == "cpu" and any(getattr(torch.cpu, p, bool)() for p in probes)
    return "bfloat16" if fast else "float32"

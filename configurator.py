"""
The config: every key of a run, once, with its type, default, allowed values and help.

    cfg = load_config(["config/train_gpt2.py", "--batch_size=8", "--compile=False"])
    cfg = resolve(cfg, world)     # 'auto' spelled out for these ranks and this device

Config files are Python assignments. Files and --key=value flags apply left to right; the last one
wins. The keys of the model itself are in its file, in ModelConfig; name --model before them. Keys
that nanoGPT has keep its names and meanings. A mistake raises SystemExit with one line.
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
from dataclasses import MISSING, dataclass, fields, is_dataclass, make_dataclass, replace
from typing import Annotated, Literal, get_args, get_origin

import torch
import torch.distributed as dist

HERE = os.path.dirname(os.path.abspath(__file__))
SHARDED = ("shard_grad_op", "full_shard", "hybrid_shard")
STRATEGIES = ("single", "ddp") + SHARDED
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16,
          "float8": torch.bfloat16}  # float8 is for the blocks' linear layers; the rest is bf16

# A key's type says what it may be: (Python type, test, what an error says).
Positive = Annotated[int, lambda n: n >= 1, "a whole number, at least 1"]
Fraction = Annotated[float, lambda x: 0 <= x <= 1, "a fraction from 0 to 1"]
BelowOne = Annotated[float, lambda x: 0 <= x < 1, "a number from 0, below 1"]
Device = Annotated[str, re.compile(r"auto|cpu|mps|cuda(:\d+)?").fullmatch,
                   "auto, cpu, mps, cuda or cuda:<number>"]
Path = Annotated[str, len, "a name or a path"]
PLAIN = {
    int: (int, lambda n: n >= 0, "a whole number, 0 or more"),
    float: (float, lambda x: 0 <= x < math.inf, "a finite number, 0 or more"),
    bool: (bool, lambda b: True, "True or False"),
    str: (str, lambda s: True, "a string"),
}
# a model's may be negative, as far as its __post_init__ lets them
SIGNED = {**PLAIN, int: (int, lambda n: True, "a whole number"),
          float: (float, math.isfinite, "a finite number")}


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
    seed: int = 1337  # weights, data order, dropout: everything random follows from it
    # --- model
    model: str = "gpt2"  # gpt2 is model.py, any other NAME is NAME.py: see the header of model.py
    freeze: str = ""  # parameters whose name matches do not train, e.g. 'wte|wpe|h\.[0-9]\.'
    # --- optimizer
    optimizer: Literal["adamw", "muon"] = "adamw"  # muon: the blocks' matrices by Muon, at the same
    #   learning rate; the rest by AdamW
    momentum: BelowOne = 0.95  # muon's
    learning_rate: float = 6e-4  # the peak
    max_iters: int = 600000  # steps
    weight_decay: float = 0.1  # on matrices and embeddings, not on biases and norms
    beta1: BelowOne = 0.9
    beta2: BelowOne = 0.95  # 0.99 when a step has few tokens
    grad_clip: float = 1.0  # limit of the global gradient norm; 0: none
    decay_lr: bool = True  # warm up, then cosine; False: constant
    warmup_iters: int = 2000
    lr_decay_iters: int = 600000  # usually max_iters
    min_lr: float = 6e-5  # usually learning_rate / 10
    # --- system
    device: Device = "auto"  # cpu, cuda, cuda:1, mps; under torchrun each rank has its own GPU
    dtype: Literal[("auto", *DTYPES)] = "auto"  # compute type; parameters stay fp32.
    #   float32, bfloat16, float16 (scales the loss); auto: the fastest safe one of the device;
    #   float8: the blocks' linear layers in 8 bits, the rest bfloat16 (H100; pip install torchao)
    compile: bool = True  # torch.compile: a minute at the start, then faster; off for short runs
    backend: Literal["auto", "nccl", "gloo"] = "auto"  # auto: nccl on GPUs, gloo on CPUs
    # --- sharding
    strategy: Literal[("", *STRATEGIES)] = ""  # empty: full_shard under torchrun, else single.
    #   single, ddp, shard_grad_op (ZeRO-2), full_shard (ZeRO-3), hybrid_shard (sharded in a group
    #   of ranks, replicated across groups)
    shard_group_size: int = 0  # hybrid_shard: ranks that share one copy; 0: the ranks of a node
    reduce_dtype: Literal["float32", "bfloat16", "float16"] = "float32"  # type in which ranks
    #   sum their gradients; bfloat16 or float16 halve that traffic and cost accuracy
    wrap_min_params: int = 0  # 0: an FSDP unit per block. N: any module of at least N parameters
    cpu_offload: Fraction = 0.0  # of the blocks: parameters, gradients, optimizer in host memory.
    #   Take few micro-batches and a large batch_size: from the second micro-batch on gradients are
    #   added on the host, while the GPU waits; and one rank alone does not overlap its copies
    activation_checkpointing: Literal["none", "selective", "full"] = "none"  # in backward,
    #   selective recomputes the cheap parts, full whole blocks: least memory, a third more compute
    activation_offload: bool = False  # with activation_checkpointing=full: what it keeps, the
    #   blocks' inputs, waits in host memory
    loss_chunks: int = 0  # N: head and loss in N pieces of the sequence, recomputed in backward, so
    #   that the logits, 12 bytes for each token and symbol, never exist whole; 8 is a good start
    prefetch_blocks: int = 0  # units to gather ahead; 0 leaves it to FSDP2, 2 or more cost memory
    grad_sync: Literal["auto", "every", "last"] = "auto"  # when to reduce gradients:
    #   every micro-batch (least memory) or the last; auto: last for ddp, every when sharded


Config.given = ()  # of a config from load_config: the keys that files and flags have set

# ---------- the model's keys join those of Config -----------------------------


def model_file(name):
    """The module that --model names; its Model and ModelConfig are the model."""
    file = "model" if name == "gpt2" else str(name)
    # nothing else is imported: that would run it, and a checkpoint may name anything
    if not file.isidentifier() or not os.path.exists(os.path.join(HERE, f"{file}.py")):
        raise SystemExit(f"model={name!r}: gpt2 is model.py, any other NAME is NAME.py beside it, "
                         "with a Model and a ModelConfig")
    try:
        module = importlib.import_module(file)
    except ImportError as e:
        raise SystemExit(f"model={name!r}: {e}")
    if not hasattr(module, "Model") or not is_dataclass(getattr(module, "ModelConfig", None)):
        raise SystemExit(f"model={name!r}: {file}.py has no Model or no dataclass ModelConfig; see "
                         "model.py")
    return module


@functools.cache
def config_class(model):
    """Config's keys and the model's in one dataclass; SystemExit for a key that cannot be one."""
    cls = model_file(model).ModelConfig
    for f in fields(cls):
        named = get_origin(f.type) is Literal and {str} == {*map(type, get_args(f.type))}
        if f.name in Config.__dataclass_fields__:
            raise SystemExit(f"model={model!r}: every run has a key {f.name}; rename ModelConfig's")
        if f.default is MISSING or not (f.type in PLAIN or named):
            raise SystemExit(f"model={model!r}: ModelConfig.{f.name}, a {f.type!r}, must be an int,"
                             " float, bool, str or Literal of strings, with a default (and the "
                             "file without from __future__ import annotations)")
    return make_dataclass("RunConfig", [("model", str, model)], bases=(Config, cls))


def model_config(cfg):
    """The model's part of cfg."""
    cls = model_file(cfg.model).ModelConfig
    return cls(**{f.name: getattr(cfg, f.name) for f in fields(cls)})


# ---------- files, flags, help ------------------------------------------------


def load_config(argv, flags=()):
    """Config files and --key=value flags, applied left to right over the defaults. flags: names
    that the command takes itself, which a mistyped one may have meant."""
    values = {}
    for i, arg in enumerate(argv):
        cls = config_class(values.get("model", Config.model))
        if not arg.startswith("--"):
            given = run_file(arg, {**{f.name: f.default for f in fields(cls)}, **values})
        elif "=" in arg:
            given = dict([arg[2:].split("=", 1)])  # the first '=': a value may contain more
        else:
            raise SystemExit(f"{arg}: write it as {arg}=value")
        cls = config_class(given.get("model", cls.model))
        for key, value in given.items():
            late = any(other.startswith("--model=") for other in argv[i + 1:])
            if late and key not in cls.__dataclass_fields__:
                raise SystemExit(f"{arg}: model={cls.model} has no key {key}; --model comes first")
            values[key] = coerce(key, value, cls, arg, flags)
    cls = config_class(values.get("model", Config.model))
    return make_config(type("RunConfig", (cls,), {"given": tuple(values)}), values)


def make_config(cls, values):
    try:
        cfg = cls(**values)
        if getattr(cfg, "n_layer", 1) > 10_000:  # they would be built for minutes without a word
            raise ValueError(f"n_layer={cfg.n_layer} must be at most 10000")
        return cfg
    except (TypeError, ValueError) as e:  # a key of another model; sizes that do not fit together
        raise SystemExit(f"{str(e).removeprefix('RunConfig.__init__() ')} (model={cls.model})")


def with_model(cfg, source):
    """cfg with the model of a checkpoint, and its sizes; dropout stays this run's."""
    cls = config_class(source.header["config"].get("model", "gpt2"))
    values = {f.name: getattr(cfg, f.name) for f in fields(cls) if hasattr(cfg, f.name)}
    for key, value in source.header["model_args"].items():
        if key != "dropout":
            values[key] = coerce(key, value, cls, source.path)
    return make_config(cls, {**values, "model": cls.model})


def run_file(path, before):
    """{key: value} that the file sets. It may compute with the values before it, as in nanoGPT."""
    scope = dict(before)
    try:
        with open(path) as f:
            exec(compile(f.read(), path, "exec"), scope)
    except OSError as e:
        raise SystemExit(f"{path}: {e.strerror}; pass a config file such as config/quickstart.py, "
                         "or --key=value")
    except (Exception, SystemExit) as e:
        raise SystemExit(f"{path}: {type(e).__name__}: {e}")
    given = {}
    for key, value in scope.items():
        helper = key.startswith("_") or inspect.ismodule(value) or callable(value)
        if not helper and before.get(key) is not value:
            given[key] = value
    return given


def coerce(key, value, cls, where, flags=()):
    """value as the key's type: exact, except that 1 may become 1.0, and 1e4 become 10000."""
    types = {f.name: f.type for f in fields(cls)}
    if key not in types:
        near = difflib.get_close_matches(key, [*flags, *types], 1)
        hint = f"did you mean {near[0]}?" if near else "--help lists the keys"
        raise SystemExit(f"{where}: unknown key {key} (model={cls.model}); {hint}")
    kind, test, words = rule(types[key], PLAIN if key in Config.__dataclass_fields__ else SIGNED)
    if where.startswith("--") and kind is not str:  # a flag's text
        try:
            value = ast.literal_eval({"true": "True", "false": "False"}.get(value, value))
        except (SyntaxError, ValueError):
            pass
    if kind is int and type(value) is float and value.is_integer():
        value = int(value)
    elif kind is float and type(value) is int and abs(value) < 1e300:
        value = float(value)
    if type(value) is not kind or not test(value):
        raise SystemExit(f"{where}: {key}={value!r} must be {words}")
    return value


def rule(declared, plain):
    """(Python type, test, what an error says) of a key's declared type."""
    if get_origin(declared) is Literal:
        choices = get_args(declared)
        return str, choices.__contains__, f"one of {', '.join(map(repr, choices))}"
    return get_args(declared) or plain[declared]


def help_text(usage, model="gpt2"):
    """usage, then every key with its default and its comment in the code."""
    def line(match):
        key, default, comment = match.groups()
        return f"  --{key}={default}" + (f"\n        {comment}" if comment else "")

    text = usage.strip()
    for cls in (Config, *reversed(model_file(model).ModelConfig.__mro__[:-1])):
        keys = re.findall(r"^    (?:\w+: .+ = .+|# --- .*|#   .*)$", inspect.getsource(cls), re.M)
        body = "\n".join(keys).replace("    #   ", " " * 8).replace("    # --- ", "\n")
        text += "\n" + re.sub(r"^    (\w+): .+? = (\S+)(?:  # (.*))?$", line, body, flags=re.M)
    return text


# ---------- what a config means on these ranks, and what cannot be combined ---


def resolve(cfg, world, distributed=None):
    """
    cfg with strategy, dtype, grad_sync and shard_group_size spelled out for this run.

    distributed: is there a process group (plan.py asks for runs that do not exist)?
    SystemExit with key, value and remedy for a combination that makes no sense.
    """
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
    W, device = world.size, world.device.type
    sharded, single, ddp = c.strategy in SHARDED, c.strategy == "single", c.strategy == "ddp"
    hybrid, group = c.strategy == "hybrid_shard", c.shard_group_size or world.local_size
    recomputed = c.activation_checkpointing != "none" or c.loss_chunks
    below = max(1, c.gradient_accumulation_steps // W) * W
    compiler = any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "clang++"))
    return [
        ("strategy", not single and not distributed,
         "it needs torchrun, e.g. torchrun --standalone --nproc_per_node=2 train.py ..."),
        ("strategy", single and W > 1, "use ddp or full_shard, or start with python train.py"),
        ("backend", c.backend == "nccl" and not single and device != "cuda",
         "NCCL needs CUDA; use --backend=auto"),
        ("gradient_accumulation_steps", c.gradient_accumulation_steps % W,
         f"it counts all ranks' micro-batches and must be a multiple of {W}; "
         f"try {below} or {below + W}"),
        *[(key, getattr(c, key) and not sharded,
           "only sharded strategies have it; use --strategy=full_shard")
          for key in ("cpu_offload", "wrap_min_params", "prefetch_blocks")],
        *[(key, getattr(c, key) != usual and single,
           f"one process reduces nothing; use --{key}={usual}")
          for key, usual in (("reduce_dtype", "float32"), ("grad_sync", "auto"))],
        ("dtype", c.dtype == "float8" and ddp,
         "it is for what FSDP gathers; use --strategy=full_shard or --dtype=bfloat16"),
        ("cpu_offload", c.cpu_offload and c.dtype == "float8",
         "float8's scales need all weights in one memory; use --dtype=bfloat16"),
        ("shard_group_size", c.shard_group_size and not hybrid,
         "only hybrid_shard has groups; use --strategy=hybrid_shard"),
        ("shard_group_size", hybrid and W % group,
         f"{W} processes do not divide into groups of {group}; use a divisor of {W}"),
        ("activation_offload", c.activation_offload and c.activation_checkpointing != "full",
         "it moves what checkpointing keeps, blocks' inputs; use --activation_checkpointing=full"),
        ("activation_offload", c.activation_offload and c.compile,
         "dynamo does not enter the hooks that move activations; use --compile=False"),
        ("wrap_min_params", c.wrap_min_params and c.compile and recomputed,
         "dynamo enters nothing that is recomputed and has FSDP's hooks inside; use "
         "--compile=False, or --wrap_min_params=0 for a unit per block"),
        ("wrap_min_params", c.wrap_min_params and c.activation_checkpointing == "selective",
         "selective cannot recompute across units inside a block; use "
         "--activation_checkpointing=full, or --wrap_min_params=0 for a unit per block"),
        ("prefetch_blocks",
         c.prefetch_blocks and c.wrap_min_params and c.activation_checkpointing != "none",
         "what is recomputed inside a block would gather units that backward has left already; use "
         "--prefetch_blocks=0, or --wrap_min_params=0 for a unit per block"),
        ("cpu_offload", c.cpu_offload and c.dtype == "float16" and device == "cuda",
         "GradScaler copies its scale to host memory without waiting, so offloaded gradients may "
         "be scaled by an old one; use --dtype=bfloat16 or float32, or --cpu_offload=0"),
        ("compile", c.compile and device == "cpu" and not compiler,
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

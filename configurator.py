"""
The config: the one definition of every key, with its type, default, allowed values and help.

    cfg = load_config(["config/train_gpt2.py", "--batch_size=8", "--compile=False"])
    cfg = resolve(cfg, world)     # 'auto' resolved for these ranks and this device

Config files are Python assignments. Files and --key=value flags apply left to right, the
last wins. A model's own keys are in its file, in ModelConfig. They end up in cfg.sizes:
cfg.batch_size, but cfg.sizes.block_size. nanoGPT's keys keep their names and meanings. An unknown
key, a value of another type, or keys that do not go together raise SystemExit with one line.
"""

import ast
import importlib
import inspect
import os
import runpy
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Literal, get_args

import torch
import torch.distributed as dist

HERE = os.path.dirname(os.path.abspath(__file__))


@dataclass(frozen=True)
class Strategy:
    sharded: bool = False  # by FSDP2, with these two of its arguments:
    reshard_after_forward: bool = True  # False: a unit stays whole until its backward
    in_groups: bool = False  # on a mesh of two dimensions: each group of ranks has its own copy


STRATEGIES = {
    "single": Strategy(),
    "ddp": Strategy(),
    "shard_grad_op": Strategy(sharded=True, reshard_after_forward=False),
    "full_shard": Strategy(sharded=True),
    "hybrid_shard": Strategy(sharded=True, in_groups=True),
}
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass
class Keys:
    """Every key of a run, but for the model's own."""
    # --- files
    out_dir: str = "out"  # checkpoints and metrics.jsonl
    init_from: str = "scratch"  # scratch, resume, auto (resume if there is a checkpoint),
    #   another run's out_dir, to take its weights, or a model in Hugging Face format
    #   (extras/huggingface.py): gpt2[-medium|-large|-xl], another hub name, a directory;
    #   a longer context is cut to block_size
    checkpoint: Literal["full", "sharded", "none"] = "full"  # full: one portable ckpt.pt.
    #   sharded: a directory where each rank writes its rows, for models too large for one host.
    #   none: save nothing, for trials
    save_interval: int = 0  # steps between checkpoints; 0: one at each evaluation
    keep_checkpoints: int = 2  # how many sharded ones to keep; 0: all
    always_save_checkpoint: bool = True  # False: save only if the validation loss has improved,
    #   whatever save_interval says
    # --- evaluating and watching
    eval_interval: int = 2000  # steps between evaluations; each may write a checkpoint
    eval_iters: int = 200  # reads eval_iters * batch_size fixed windows of a split, or all
    eval_only: bool = False  # evaluate once and stop
    log_interval: int = 1  # steps between log lines; each one waits for the GPU
    compare: str = ""  # a file of steps: made if it is not there; else the first step that differs
    #   from it ends the run (compare.py). Take ten steps or so; with it dtype=auto is float32
    wandb_log: bool = False  # log to Weights & Biases too: pip install wandb
    wandb_project: str = "nanofsdp2"
    wandb_run_name: str = "run"
    # --- data
    dataset: str = "openwebtext"  # a directory in data/, or a path, with its train.bin
    #   and val.bin
    gradient_accumulation_steps: int = 40  # micro-batches per step, over all ranks
    batch_size: int = 12  # sequences in a micro-batch; lower it when memory runs out
    seed: int = 1337  # for everything random: weights, data order, dropout
    # --- model
    model: str = "gpt2"  # gpt2 is model.py, NAME is NAME.py or extras/NAME.py: see model.py;
    #   NAME+OTHER is that model as OTHER.py changes it: extras/ has llama, +lora and +float8
    freeze: str = ""  # regex of parameters not to train, e.g. 'wte|wpe|h\.[0-9]\.'
    frozen_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    #   the type of frozen parameters; bfloat16 takes half the memory and needs dtype=bfloat16
    # --- optimizer
    optimizer: str = "adamw"  # or NAME, which is NAME.py or extras/NAME.py: see optimizer.py;
    #   extras/ has muon: for the blocks' matrices, AdamW elsewhere
    momentum: float = 0.95  # extras/muon.py's
    learning_rate: float = 6e-4  # the peak
    max_iters: int = 600000  # steps
    weight_decay: float = 0.1  # on matrices and embeddings, not on biases and norms
    beta1: float = 0.9
    beta2: float = 0.95  # 0.99 when a step has few tokens
    grad_clip: float = 1.0  # maximum global gradient norm; 0: no clipping
    decay_lr: bool = True  # warm up, then lr_schedule; False: constant from the first step
    warmup_iters: int = 2000
    lr_schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    #   after warm-up; wsd: constant, then linear in the last fifth of lr_decay_iters. To end such
    #   a run at any step N, resume it there with lr_decay_iters and max_iters set to 1.25 N
    lr_decay_iters: int = 600000  # usually max_iters
    min_lr: float = 6e-5  # usually learning_rate / 10
    # --- system
    device: str = "auto"  # cpu, cuda, cuda:1, mps; under torchrun each rank has its own GPU
    dtype: Literal[("auto", *DTYPES)] = "auto"  # the compute type; parameters stay fp32.
    #   auto: bfloat16 on GPUs that are fast in it, float16 on older ones, float32 on CPUs
    loss_scale: float = 65536.0  # float16's initial scale; the run then adjusts it
    compile: bool = True  # torch.compile: takes a minute, then runs faster; turn off for short runs
    cuda_graph: bool = False  # record a GPU's work in a step once, and replay it: faster where the
    #   GPU waits for the CPU, and takes more memory (extras/recorded.py)
    backend: Literal["auto", "nccl", "gloo"] = "auto"  # NCCL on GPUs, gloo on CPUs; gloo: on both
    # --- sharding
    strategy: Literal[("", *STRATEGIES)] = ""  # empty: full_shard under torchrun, else single.
    #   single, ddp, shard_grad_op (ZeRO-2), full_shard (ZeRO-3), hybrid_shard (ZeRO-3 in groups)
    shard_group_size: int = 0  # hybrid_shard's ranks per copy of the model; 0: those of a node
    reshard_group_size: int = 0  # N: after forward each group of N ranks keeps a copy in dtype,
    #   so that backward gathers inside it, e.g. in a node (ZeRO++'s hpZ); 0: off. FSDP2 makes
    #   process groups for each unit: 32 units on 4 ranks make 128, and NCCL connects each
    reduce_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    #   for summing gradients over ranks; bfloat16 or float16 halve that traffic and cost accuracy,
    #   more with hybrid_shard or grad_sync=last, which also sum micro-batches in it
    wrap_min_params: int = 0  # 0: an FSDP unit per block. N: any module of at least N parameters
    cpu_offload: float = 0.0  # fraction of blocks in host memory; use few large micro-batches,
    #   and OMP_NUM_THREADS=cores per rank, since the CPU then runs the optimizer
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    #   selective recomputes the cheap parts; full: whole blocks, least memory, a third more compute
    activation_offload: bool = False  # keep block inputs in host memory; needs
    #   activation_checkpointing=full, and compile=False, or weights move too
    loss_chunks: int = 0  # N: compute head and loss in N pieces, recomputed in backward; try 8
    prefetch_blocks: int = 0  # units to gather ahead; 0 leaves it to FSDP2, 2 or more cost memory
    grad_sync: Literal["auto", "every", "last"] = "auto"
    #   reduce gradients after every micro-batch (least memory) or the last; auto: last for ddp only


@dataclass
class Config(Keys):
    sizes: object = None  # the model's own keys, in its file's ModelConfig
    given: list = field(default_factory=list)  # the keys set by a file or a flag


# ---------- files that a key names --------------------------------------------


def model_file(name):
    """What --model names: model.py, NAME.py, or for NAME+OTHER what OTHER.py makes `around` NAME.
    It has Model and a dataclass ModelConfig."""
    inner, plus, outer = name.rpartition("+")
    file = named_file(outer)
    return file.around(inner) if plus else file


def named_file(name):
    """The module NAME.py at the top or in extras/. Without such a file, gpt2 is model.py and adamw
    is optimizer.py."""
    built_in = {"gpt2": "model", "adamw": "optimizer"}
    for package, file in (("", name), ("extras", name), ("", built_in.get(name, ""))):
        path = os.path.join(HERE, package, f"{file}.py")
        # Import nothing else: an import runs code, and a checkpoint may name anything.
        if file.isidentifier() and os.path.exists(path):
            return importlib.import_module(f"{package}.{file}".lstrip("."))
    raise SystemExit(f"no {name}.py beside model.py or in extras/, and this run needs it")


# ---------- from files and flags to a config ----------------------------------


def keys_of(model):
    """{key: its dataclass field} for a run with this model."""
    return {f.name: f for f in (*fields(Keys), *fields(model_file(model).ModelConfig))}


def load_config(argv):
    """Config files and --key=value flags, applied left to right over the defaults."""
    values = {}
    origins = {}  # {key: the file or flag that has set it}
    for arg in argv:
        if not arg.startswith("--"):
            assigned = run_file(arg, {key: literal(value) for key, value in values.items()})
        elif "=" in arg:
            key, _, text = arg[2:].partition("=")  # the value may contain another =
            assigned = {key: text}
        else:
            raise SystemExit(f"{arg}: write --key=value, without a space")
        values.update(assigned)
        origins.update(dict.fromkeys(assigned, arg))
    return make_config(values, origins)


def run_file(path, before):
    """{key: value} of the file's assignments. It may import modules, define functions, and read
    what was set before it."""
    try:
        scope = runpy.run_path(path, init_globals=before)
    except (Exception, SystemExit) as e:
        raise SystemExit(f"{path}: {type(e).__name__}: {e}; is it a config file?")
    # Python takes `a: 1` for a type.
    typed = [key for key in scope.get("__annotations__", ()) if scope.get(key) is before.get(key)]
    if typed or not path.endswith(".py"):
        raise SystemExit(f"{path}: a config file is NAME.py, and its lines are key = value")
    assigned = {}
    for key, value in scope.items():
        is_helper = key.startswith("_") or callable(value) or inspect.ismodule(value)
        is_new = key not in before or value is not before[key]
        if is_new and not is_helper:
            assigned[key] = value
    return assigned


def make_config(values, origins=None):
    """The Config of {key: value}; the model's own keys go into its sizes.
    origins: {key: what has set it, for an error's line}."""
    origins = origins or {}
    model = values.get("model", Config.model)
    keys = keys_of(model)
    own = {}
    sizes = {}
    for key, value in values.items():
        where = origins.get(key, "config")
        if key not in keys:
            raise SystemExit(
                f"{where}: no key {key} (model={model}); --help lists the keys, and a helper in a "
                "config file begins with _")
        part = own if hasattr(Config, key) else sizes
        part[key] = checked(key, value, keys[key].type, where)
    try:
        sizes = model_file(model).ModelConfig(**sizes)
    except ValueError as e:  # sizes that do not fit together
        raise SystemExit(f"{e} (model={model})")
    return Config(**own, sizes=sizes, given=list(origins))


def checked(key, value, kind, where):
    """value as the key's type: what a flag's text says, and 1 as 1.0, 1e4 as 10000."""
    choices = get_args(kind)  # of a Literal
    if choices:
        kind = type(choices[0])
    if kind is str and isinstance(value, str):
        if value[:1] + value[-1:] == "[]":  # as a regex it would be a set of characters
            raise SystemExit(f"{where}: {key}={value} is a list; write a text, such as a|b")
        value = os.path.expanduser(value)  # shells leave the ~ of --out_dir=~/x
    else:
        value = literal(value)
    if {kind, type(value)} == {int, float} and kind(value) == value:
        value = kind(value)
    if type(value) is not kind or (choices and value not in choices):
        allowed = f"one of {choices}" if choices else f"of type {kind.__name__}"
        raise SystemExit(f"{where}: {key}={value!r} must be {allowed}")
    return value


def literal(value):
    """What a flag's text says, such as 8, 1e-3, True or true; any other value as it is."""
    if isinstance(value, str):
        with suppress(SyntaxError, ValueError):
            return ast.literal_eval(value.capitalize())
    return value


def as_dict(cfg):
    """{key: value} of all keys."""
    return {f.name: getattr(cfg, f.name) for f in fields(Keys)} | asdict(cfg.sizes)


def with_sizes(cfg, model, sizes, where, whole_context=True):
    """cfg with the model and sizes of a checkpoint. SystemExit if a file or a flag has set another
    value. These may differ:
    - a model with the same ModelConfig, such as NAME+float8 beside NAME
    - dropout, which is this run's; and the path of a base, which may have moved
    - a shorter block_size; with whole_context=False, cfg's is taken even if nobody has set it
    where: the checkpoint's path."""
    ours = as_dict(cfg)
    if "model" in cfg.given and model_file(cfg.model).ModelConfig is model_file(model).ModelConfig:
        model = cfg.model
    # Of another model, what was set; the rest are its own defaults.
    taken = cfg.given if cfg.model != model else ours
    values = {key: ours[key] for key in ours if key in taken or hasattr(Config, key)}
    for key, theirs in {"model": model, **sizes}.items():
        is_given = key in cfg.given
        if key == "dropout" or (key == "base" and is_given):
            continue
        if key == "block_size" and ours[key] < theirs and (is_given or not whole_context):
            theirs = ours[key]
        if is_given and ours[key] != theirs:
            raise SystemExit(
                f"{key}={ours[key]}, but {where} has {key}={theirs}; pass --{key}={theirs}")
        values[key] = theirs
    return make_config(values, dict.fromkeys(cfg.given, where))


def help_text(usage, model="gpt2"):
    """usage, then the code that declares the keys: types, defaults, and comments."""
    classes = [Keys, *reversed(model_file(model).ModelConfig.__mro__[:-1])]
    return "\n\n".join([usage.strip(), *map(inspect.getsource, classes)])


# ---------- resolved for these ranks and this device ---------------------------


def resolve(cfg, world, distributed=False):
    """cfg with strategy, dtype, grad_sync and hybrid_shard's group size resolved. SystemExit if
    keys cannot be combined. distributed: True to plan for ranks that do not run here."""
    distributed = distributed or dist.is_initialized()
    resolved = replace(cfg)
    resolved.strategy = cfg.strategy or ("full_shard" if distributed else "single")
    if cfg.dtype == "auto":
        resolved.dtype = "float32" if cfg.compare else best_dtype(world.device)
    if cfg.grad_sync == "auto":
        resolved.grad_sync = "last" if resolved.strategy == "ddp" else "every"
    if STRATEGIES[resolved.strategy].in_groups and not cfg.shard_group_size:
        resolved.shard_group_size = world.local_size
    if world.device.type != "cuda":
        resolved.cuda_graph = False
    for wrong, line in conflicts(resolved, world.size, distributed):
        if wrong:
            raise SystemExit(line)
    return resolved


def conflicts(cfg, size, distributed):
    """[(True if it is wrong, the error's line)]: keys that would go wrong in silence, and ways to
    start a run that everybody tries. cfg: without 'auto'."""
    single = cfg.strategy == "single"
    in_groups = STRATEGIES[cfg.strategy].in_groups
    micro_batches = cfg.gradient_accumulation_steps
    offloads = cfg.cpu_offload or cfg.activation_offload
    least = dict(batch_size=1, eval_interval=1, eval_iters=1, log_interval=1, save_interval=0,
                 keep_checkpoints=0, seed=0, grad_clip=0)
    too_small = [(getattr(cfg, key) < n, f"{key}={getattr(cfg, key)} must be {n} or more")
                 for key, n in least.items()]
    return too_small + [
        (single and size > 1, "strategy=single: start one process, python train.py"),
        (not single and not distributed,
         f"strategy={cfg.strategy}: start it with torchrun --standalone --nproc_per_node=2"),
        (micro_batches < 1 or micro_batches % size,
         f"gradient_accumulation_steps={micro_batches} must be a multiple of {size}, all ranks"),
        (cfg.decay_lr and cfg.lr_schedule != "constant" and cfg.min_lr > cfg.learning_rate,
         f"min_lr={cfg.min_lr} is above learning_rate={cfg.learning_rate}"),
        (cfg.shard_group_size and not in_groups,
         "shard_group_size is for strategy=hybrid_shard"),
        ("://" in cfg.out_dir, f"out_dir={cfg.out_dir} must be a directory here, not an address"),
        (in_groups and (size % cfg.shard_group_size or cfg.shard_group_size == 1 < size),
         f"shard_group_size={cfg.shard_group_size} must divide {size} ranks, and be more than 1"),
        (cfg.cuda_graph and offloads, "offloading cannot be recorded; use --cuda_graph=False"),
    ]


def best_dtype(device):
    """The fastest compute type of the device; bf16 if it can, which needs no loss scaling."""
    if device.type != "cuda":
        return "float32"
    return "bfloat16" if torch.cuda.get_device_capability(device) >= (8, 0) else "float16"

"""
The config: the one definition of every key, with its type, default, allowed values and help.

    cfg = load_config(["config/train_gpt2.py", "--batch_size=8", "--compile=False"])
    cfg = resolve(cfg, world)     # 'auto' resolved for these ranks and this device

Config files are Python assignments. Files and --key=value flags apply left to right, the
last wins. A model's own keys are in its file, in ModelConfig; pass --model before them. They end
up in cfg.sizes: cfg.batch_size, but cfg.sizes.block_size. nanoGPT's keys keep their names and
meanings. A mistake raises SystemExit with one line.
"""

import ast
import builtins
import difflib
import functools
import importlib
import inspect
import math
import os
import re
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, get_args, get_origin

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
    "float8": torch.bfloat16,  # 8 bits in the blocks' linear layers; the rest is bf16
}

# A key's type: a Python type, a test of the value, and the text of an error.
Whole = Annotated[int, lambda n: n >= 0, "a whole number, 0 or more"]
Positive = Annotated[int, lambda n: n >= 1, "a whole number, at least 1"]
Number = Annotated[float, lambda x: 0 <= x < math.inf, "a finite number, 0 or more"]
Scale = Annotated[float, lambda x: 0 < x < math.inf, "a finite number above 0"]
Fraction = Annotated[float, lambda x: 0 <= x <= 1, "a fraction from 0 to 1"]
BelowOne = Annotated[float, lambda x: 0 <= x < 1, "a number from 0, below 1"]
Device = Annotated[str, re.compile(r"auto|cpu|mps|cuda(:\d+)?").fullmatch, "auto, cpu, mps or cuda"]
NonEmpty = Annotated[str, lambda s: s != "", "a name or a path"]
PLAIN = {  # the types of a model file's keys
    int: Annotated[int, lambda n: True, "a whole number"],
    float: Annotated[float, math.isfinite, "a finite number"],
    bool: Annotated[bool, lambda b: True, "True or False"],
    str: Annotated[str, lambda s: True, "a string"],
}


def noted(default):
    """A key's default. A resumed run that changes this key says so, since its numbers change."""
    return field(default=default, metadata={"noted": True})


@dataclass
class Config:
    # --- files
    out_dir: NonEmpty = "out"  # checkpoints and metrics.jsonl
    init_from: str = "scratch"  # scratch, resume, auto (resume if there is a checkpoint),
    #   another run's out_dir, to take its weights, or a model in Hugging Face format:
    #   gpt2[-medium|-large|-xl], another hub name, a directory;
    #   a longer context is cut to block_size
    checkpoint: Literal["full", "sharded", "none"] = "full"  # full: one portable ckpt.pt.
    #   sharded: a directory where each rank writes its rows, for models too large for one host.
    #   none: save nothing, for trials
    save_interval: Whole = 0  # steps between checkpoints; 0: one at each evaluation
    keep_checkpoints: Positive = 2  # how many sharded ones to keep
    keep_every: Whole = 0  # N: every N steps write one that is never removed
    always_save_checkpoint: bool = True  # False: evaluations save only if the validation
    #   loss improved; the best is ckpt.pt, or the link best
    # --- evaluating and watching
    eval_interval: Positive = 2000  # steps between evaluations; each may write a checkpoint
    eval_iters: Positive = 200  # reads eval_iters * batch_size fixed windows of a split, or all
    eval_only: bool = False  # evaluate once and stop
    log_interval: Positive = 1  # steps between log lines; each one waits for the GPU
    wandb_log: bool = False  # log to Weights & Biases too
    wandb_project: str = "nanofsdp2"
    wandb_run_name: str = "run"
    tensorboard: bool = False  # log to TensorBoard too, in out_dir
    # --- data
    dataset: NonEmpty = noted("openwebtext")  # a directory in data/, or a path, with its train.bin
    #   and val.bin
    gradient_accumulation_steps: Positive = noted(40)  # micro-batches per step, over all ranks
    batch_size: Positive = noted(12)  # sequences in a micro-batch; lower it when memory runs out
    seed: Whole = noted(1337)  # for everything random: weights, data order, dropout
    # --- model
    model: str = "gpt2"  # gpt2 is model.py, NAME is NAME.py or extras/NAME.py: see model.py;
    #   NAME+OTHER is that model as OTHER.py changes it, e.g. llama+lora
    freeze: str = noted("")  # regex of parameters not to train, e.g. 'wte|wpe|h\.[0-9]\.'
    frozen_dtype: Literal["float32", "bfloat16", "float16"] = noted("float32")
    #   the type of frozen parameters; bfloat16 takes half the memory and needs dtype=bfloat16
    # --- optimizer
    optimizer: str = "adamw"  # or NAME, which is NAME.py or extras/NAME.py: see optimizer.py;
    #   muon: for the blocks' matrices, AdamW elsewhere
    momentum: BelowOne = noted(0.95)  # extras/muon.py's
    learning_rate: Number = noted(6e-4)  # the peak, for AdamW and Muon
    max_iters: Whole = 600000  # steps
    weight_decay: Number = noted(0.1)  # on matrices and embeddings, not on biases and norms
    beta1: BelowOne = noted(0.9)
    beta2: BelowOne = noted(0.95)  # 0.99 when a step has few tokens
    grad_clip: Number = noted(1.0)  # maximum global gradient norm; 0: no clipping
    decay_lr: bool = noted(True)  # warm up, then lr_schedule; False: constant from the first step
    warmup_iters: Whole = noted(2000)
    lr_schedule: Literal["cosine", "linear", "wsd", "constant"] = noted("cosine")
    #   after warm-up; wsd: constant, then linear in the last fifth of lr_decay_iters. To end such
    #   a run at any step N, resume it there with lr_decay_iters and max_iters set to 1.25 N
    lr_decay_iters: Whole = noted(600000)  # usually max_iters
    min_lr: Number = noted(6e-5)  # usually learning_rate / 10
    # --- system
    device: Device = "auto"  # cpu, cuda, cuda:1, mps; under torchrun each rank has its own GPU
    dtype: Literal[("auto", *DTYPES)] = "auto"  # the compute type; parameters stay fp32.
    #   float32, bfloat16, float16, float8 (extras/float8.py: linear layers; H100, torchao);
    #   auto: the fastest safe one
    loss_scale: Scale = 65536.0  # float16's initial scale; the run then adjusts it
    compile: bool = True  # torch.compile: takes a minute, then runs faster; turn off for short runs
    cuda_graph: bool = False  # record a GPU's work in a step once, and replay it: faster where the
    #   GPU waits for the CPU, and takes more memory (docs/switches.md)
    backend: Literal["auto", "nccl", "gloo"] = "auto"  # auto: nccl on GPUs, gloo on CPUs
    # --- sharding
    strategy: Literal[("", *STRATEGIES)] = ""  # empty: full_shard under torchrun, else single.
    #   single, ddp, shard_grad_op (ZeRO-2), full_shard (ZeRO-3), hybrid_shard (ZeRO-3 in groups)
    shard_group_size: Whole = 0  # hybrid_shard's ranks per copy of the model; 0: those of a node
    reshard_group_size: Whole = 0  # N: after forward each group of N ranks keeps a copy in dtype,
    #   so that backward gathers inside it, e.g. in a node (ZeRO++'s hpZ); 0: off. FSDP2 makes
    #   process groups for each unit: 32 units on 4 ranks make 128, and NCCL connects each
    reduce_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    #   for summing gradients over ranks; bfloat16 or float16 halve that traffic and cost accuracy,
    #   more with hybrid_shard or grad_sync=last, which also sum micro-batches in it
    wrap_min_params: Whole = 0  # 0: an FSDP unit per block. N: any module of at least N parameters
    cpu_offload: Fraction = 0.0  # fraction of blocks in host memory; use few large micro-batches
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    #   selective recomputes the cheap parts; full: whole blocks, least memory, a third more compute
    activation_offload: bool = False  # keep block inputs in host memory; needs
    #   activation_checkpointing=full and compile=False
    loss_chunks: Whole = 0  # N: compute head and loss in N pieces, recomputed in backward; try 8
    prefetch_blocks: Whole = 0  # units to gather ahead; 0 leaves it to FSDP2, 2 or more cost memory
    grad_sync: Literal["auto", "every", "last"] = "auto"
    #   reduce gradients after every micro-batch (least memory) or the last; auto: last for ddp only

    # Not keys:
    sizes: object = None  # the model's own keys, in its file's ModelConfig
    given: list = field(default_factory=list)  # the keys set by a file or a flag

    @property
    def decays(self):
        """Whether the learning rate falls to min_lr."""
        return self.decay_lr and self.lr_schedule != "constant"


# ---------- files that a key names --------------------------------------------


def model_file(name):
    """What --model names: model.py, NAME.py, or for NAME+OTHER what OTHER.py makes `around` NAME.
    It has Model and ModelConfig."""
    inner, plus, outer = str(name).rpartition("+")
    if plus:
        return named_file(f"model={name!r}", outer, "around").around(inner)
    file = "model" if name == "gpt2" else name
    module = named_file(f"model={name!r}", file, "Model", "ModelConfig")
    if not is_dataclass(module.ModelConfig):
        raise SystemExit(f"model={name!r}: its file lacks a dataclass ModelConfig")
    return module


def named_file(wanted_by, name, *needed):
    """The module NAME.py at the top or in extras/. SystemExit if it is not there, or lacks one of
    the needed names."""
    module = None
    # Import nothing else: an import runs code, and a checkpoint may name anything.
    if str(name).isidentifier():
        if os.path.exists(os.path.join(HERE, f"{name}.py")):
            module = importlib.import_module(name)
        elif os.path.exists(os.path.join(HERE, "extras", f"{name}.py")):
            module = importlib.import_module(f"extras.{name}")
    if module is None:
        raise SystemExit(f"{wanted_by}: no {name}.py beside model.py or in extras/")
    for each in needed:
        if not hasattr(module, each):
            raise SystemExit(f"{wanted_by}: {name}.py lacks {each}")
    return module


def package(name, wanted_by):
    """A package that is not in requirements.txt."""
    try:
        return importlib.import_module(name)
    except ImportError as e:
        raise SystemExit(f"{wanted_by}: {e}; pip install {e.name or name}")


# ---------- from files and flags to a config ----------------------------------


@functools.cache
def keys_of(model):
    """{key: its dataclass field} for a run with this model."""
    keys = {f.name: f for f in fields(Config) if f.name not in ("sizes", "given")}
    for f in fields(model_file(model).ModelConfig):
        if f.name in Config.__dataclass_fields__:
            raise SystemExit(f"model={model!r}: every run has a key {f.name}; rename ModelConfig's")
        keys[f.name] = f
    return keys


def make_config(values, given=()):
    """The Config of {key: value}; the model's own keys go into its sizes."""
    model = values.get("model", Config.model)
    sizes = {key: value for key, value in values.items() if key not in Config.__dataclass_fields__}
    own = {key: value for key, value in values.items() if key not in sizes}
    try:
        sizes = model_file(model).ModelConfig(**sizes)
    except ValueError as e:  # sizes that do not fit together
        raise SystemExit(f"{e} (model={model})")
    return Config(**own, sizes=sizes, given=list(given))


def as_dict(cfg):
    """{key: value} of all keys."""
    keys = {**vars(cfg), **asdict(cfg.sizes)}
    del keys["sizes"], keys["given"]
    return keys


def load_config(argv):
    """Config files and --key=value flags, applied left to right over the defaults."""
    values = {}
    for arg in argv:
        model = values.get("model", Config.model)
        if arg.startswith("--") and "=" in arg:
            key, _, text = arg[2:].partition("=")  # the value may contain another =
            kind, _, _ = rule(key, model, arg)
            assigned = {key: text if kind is str else parse(text)}
        elif arg.startswith("--"):
            require_key(arg[2:], model, arg)
            raise SystemExit(f"{arg}: write --key=value, without a space")
        else:
            assigned = run_file(arg, before={**as_dict(make_config({"model": model})), **values})
        model = coerce("model", assigned.get("model", model), model, arg)
        for key, value in assigned.items():
            value = coerce(key, value, model, arg)
            # Shells leave the ~ of --out_dir=~/x.
            values[key] = os.path.expanduser(value) if isinstance(value, str) else value
    for key in values:
        require_key(key, model, f"--model={model}")  # it may be from an earlier --model
    return make_config(values, given=values)


def run_file(path, before):
    """{key: value} of the file's assignments. The file may use the values set before it."""
    # Earlier values go into builtins, so that scope holds only the file's assignments.
    scope = {"__builtins__": {**vars(builtins), **before}}
    try:
        with open(path) as f:
            exec(compile(f.read(), path, "exec"), scope)
    except (Exception, SystemExit) as e:
        reason = getattr(e, "strerror", None) or e
        raise SystemExit(
            f"{path}: {type(e).__name__}: {reason}; it must be a config file, or write "
            "--key=value")
    assigned = {}
    for key, value in scope.items():
        is_helper = key.startswith("_") or callable(value) or inspect.ismodule(value)
        if not is_helper:
            assigned[key] = value
    return assigned


def with_sizes(cfg, model, sizes, where, whole_context=True):
    """cfg with the model and sizes of a checkpoint, but this run's dropout. SystemExit if a file
    or a flag set another value; a shorter block_size is allowed, and another value of a noted key.
    where: the checkpoint's path. whole_context=False: take cfg's block_size if it is shorter,
    even if it is only the default."""
    if "model" in cfg.given and cfg.model != model:
        if cfg.model.startswith(f"{model}+"):
            raise SystemExit(
                f"{where} has model={model}: for {cfg.model} pass it by that model's own key, as "
                "--help says, with --init_from=scratch")
        refuse("model", cfg.model, model, where)
    for key in cfg.given:
        require_key(key, model, where)
    keys = keys_of(model)
    values = {key: value for key, value in as_dict(cfg).items() if key in keys}
    for key, value in {"model": model, **sizes}.items():
        value = coerce(key, value, model, f"{where}: model_args")
        is_own = key in cfg.given and "noted" in keys[key].metadata
        if key == "dropout" or is_own:
            continue
        ours = values.get(key, value)  # this run's model may have no such key
        is_shorter = key == "block_size" and ours < value
        if is_shorter and (key in cfg.given or not whole_context):
            value = ours
        if key in cfg.given and ours != value:
            refuse(key, ours, value, where)
        values[key] = value
    return make_config(values, cfg.given)


def refuse(key, ours, theirs, where):
    raise SystemExit(
        f"{key}={ours} in this run, but {where} has {key}={theirs}; pass --{key}={theirs}, or "
        "another out_dir or init_from")


def differences(before, cfg):
    """["key=new (was old)"]; before: {key: value} of a checkpoint. Other sizes are refused."""
    changed = []
    now = as_dict(cfg)
    for key, declared in keys_of(cfg.model).items():
        is_noted = "noted" in declared.metadata or key in ("block_size", "dropout")
        if is_noted and before.get(key, now[key]) != now[key]:
            changed.append(f"{key}={now[key]!r} (was {before[key]!r})")
    return changed


def require_key(key, model, where):
    """SystemExit if there is no such key; it suggests a similar one."""
    keys = keys_of(model)
    if key in keys:
        return
    near = difflib.get_close_matches(key, keys, 1)
    hint = f"did you mean {near[0]}?" if near else "--help lists the keys (a helper begins with _)"
    hint = hint_from_extras(key) or hint
    raise SystemExit(f"{where}: no key {key} (model={model}); {hint} (--model comes first)")


def hint_from_extras(key):
    """For a key that this model does not have: the file in extras/ that declares it, or ""."""
    for path in sorted(Path(HERE, "extras").glob("*.py")):
        if re.search(rf"^    {re.escape(key)}: ", path.read_text("utf-8"), re.M):
            return f"it is a key of extras/{path.name}, whose header says what to pass"
    return ""


def rule(key, model, where):
    """(the Python type of a key, a test of its value, the text of an error)."""
    require_key(key, model, where)
    allowed = keys_of(model)[key].type
    allowed = PLAIN.get(allowed, allowed)
    if get_origin(allowed) is Literal:
        choices = get_args(allowed)
        return type(choices[0]), choices.__contains__, f"one of {', '.join(map(repr, choices))}"
    return get_args(allowed)


def coerce(key, value, model, where):
    """value as the key's type. It only converts whole numbers: 1 to 1.0, 1e4 to 10000."""
    kind, test, words = rule(key, model, where)
    if kind is int and type(value) is float and value.is_integer():
        value = int(value)
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind or not test(value):
        raise SystemExit(f"{where}: {key}={value!r} must be {words}")
    return value


def parse(text):
    """Parse a flag's number, True or False; return any other text as it is."""
    try:
        return ast.literal_eval(text.capitalize())  # also true, false
    except (SyntaxError, ValueError):
        return text


def help_text(usage, model="gpt2"):
    """usage, then every key with its default and its comment in the code."""
    keys = keys_of(model)
    classes = reversed(model_file(model).ModelConfig.__mro__[:-1])
    code = [inspect.getsource(Config), f"# --- model {model}\n", *map(inspect.getsource, classes)]
    lines = [usage.strip()]
    for line in "".join(code).splitlines():
        key = re.match(r"    (\w+): .+? = (?:noted\()?([^\s)]+)", line)
        _, _, comment = line.partition("# ")
        if comment.startswith("--- "):  # a heading
            lines += ["", comment[4:]]
            continue
        if key and key[1] not in keys:
            continue
        if key:
            lines.append(f"  --{key[1]}={key[2]}")
        if comment and (key or line.startswith("    #   ")):
            lines.append(f"        {comment.strip()}")
    return "\n".join(lines)


# ---------- resolved for these ranks and this device ---------------------------


def resolve(cfg, world, distributed=None):
    """cfg with strategy, dtype, grad_sync and hybrid_shard's group size resolved. SystemExit if
    keys cannot be combined. distributed: True for ranks with a process group that are elsewhere;
    None: as in this process."""
    if distributed is None:
        distributed = dist.is_initialized()
    strategy = cfg.strategy or ("full_shard" if distributed else "single")
    dtype = best_dtype(world.device) if cfg.dtype == "auto" else cfg.dtype
    grad_sync = cfg.grad_sync
    if grad_sync == "auto":
        grad_sync = "last" if strategy == "ddp" else "every"
    group = cfg.shard_group_size
    if STRATEGIES[strategy].in_groups:
        group = group or world.local_size
    spelled_out = replace(
        cfg,
        strategy=strategy,
        dtype=dtype,
        grad_sync=grad_sync,
        shard_group_size=group,
        cuda_graph=cfg.cuda_graph and world.device.type == "cuda",
    )
    for key, wrong, remedy in conflicts(spelled_out, cfg, world, distributed):
        if wrong:
            mode = f"strategy={strategy} on {world.device.type}, world size {world.size}"
            if key != "strategy":
                mode = f"{key}={getattr(spelled_out, key)!r} with {mode}"
            raise SystemExit(f"{mode}: {remedy}")
    return spelled_out


def conflicts(cfg, asked, world, distributed):
    """[(key, True if it is wrong, remedy)]; asked: the config before 'auto' was resolved."""
    size = world.size
    single = cfg.strategy == "single"
    group = cfg.shard_group_size
    uneven_groups = STRATEGIES[cfg.strategy].in_groups and size % group
    copy = group if STRATEGIES[cfg.strategy].in_groups else size  # ranks that share one
    regather = cfg.reshard_group_size
    mode = cfg.activation_checkpointing
    # wrap_min_params may put units inside a part that is recomputed.
    inside = cfg.wrap_min_params and (mode != "none" or cfg.loss_chunks)
    table = [
        ("strategy", single and size > 1, "start one process: python train.py"),
        ("strategy", not single and not distributed,
         "start it with torchrun --standalone --nproc_per_node=2, or use --strategy=single"),
        ("shard_group_size",
         STRATEGIES[cfg.strategy].in_groups and group == 1 < size and not asked.shard_group_size,
         "LOCAL_WORLD_SIZE says that each node has one process, so nothing would be sharded; use "
         f"--shard_group_size={size}, or --strategy=ddp"),
        ("shard_group_size", uneven_groups,
         f"{size} processes do not divide into groups of {group}; use a divisor of {size}"),
        ("gradient_accumulation_steps", cfg.gradient_accumulation_steps % size,
         f"it counts all ranks' micro-batches; use a multiple of {size}"),
        ("reshard_group_size", STRATEGIES[cfg.strategy].sharded
         and (regather == 1 or (regather and copy % regather)),
         f"{copy} ranks share a copy; use a divisor of {copy}, from 2 on"),
        ("min_lr", cfg.decays and cfg.min_lr > cfg.learning_rate,
         f"the rate would climb to it from learning_rate={cfg.learning_rate}; use "
         f"--min_lr={cfg.learning_rate / 10:g}"),
        ("reshard_group_size", regather and cfg.dtype == "float8",
         "FSDP2 cannot do that with float8 weights; use --reshard_group_size=0"),
        ("dtype", cfg.dtype == "float8" and cfg.strategy == "ddp",
         "it needs parameters that FSDP gathers; use --strategy=full_shard or --dtype=bfloat16"),
        ("frozen_dtype", cfg.frozen_dtype not in ("float32", cfg.dtype),
         f"it computes in {cfg.dtype}; use --frozen_dtype=float32, or --dtype={cfg.frozen_dtype}"),
        ("cpu_offload", cfg.cpu_offload and cfg.dtype == "float8",
         "float8's scales and weights would be on two devices; use --dtype=bfloat16"),
        ("cuda_graph", cfg.cuda_graph and (
            cfg.cpu_offload or cfg.activation_offload or cfg.dtype == "float8"),
         "offloading and float8 cannot be recorded; use --cuda_graph=False"),
        ("activation_offload", cfg.activation_offload and (cfg.compile or mode != "full"),
         "it moves the inputs that checkpointing keeps; use --activation_checkpointing=full "
         "--compile=False"),
        ("wrap_min_params",
         inside and (cfg.compile or cfg.prefetch_blocks or mode == "selective"),
         "use --wrap_min_params=0, or full checkpointing with --compile=False "
         "--prefetch_blocks=0"),
    ]
    sharded = [name for name, row in STRATEGIES.items() if row.sharded]
    only = {
        "cpu_offload": sharded,
        "wrap_min_params": sharded,
        "prefetch_blocks": sharded,
        "reduce_dtype": sharded,
        "grad_sync": [name for name in STRATEGIES if name != "single"],
        "shard_group_size": [name for name in sharded if STRATEGIES[name].in_groups],
        "reshard_group_size": [
            name for name in sharded if STRATEGIES[name].reshard_after_forward],
    }
    for key, strategies in only.items():
        default = getattr(Config, key)
        given = getattr(asked, key) != default
        remedy = f"it is for {', '.join(strategies)}; use --{key}={default}"
        table.append((key, given and cfg.strategy not in strategies, remedy))
    return table


def best_dtype(device):
    """The fastest compute type of the device; bf16 if it can, which needs no loss scaling."""
    if device.type == "cuda":
        has_bf16 = torch.cuda.get_device_capability(device) >= (8, 0)
        return "bfloat16" if has_bf16 else "float16"
    if device.type == "cpu":
        # Private probes, since there are no public ones. If they disappear, fp32 always works.
        for probe in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
            if hasattr(torch.cpu, probe) and getattr(torch.cpu, probe)():
                return "bfloat16"
    return "float32"

"""
Train a GPT: on one device, with DDP, or sharded with FSDP2, by the same loop and with the same numbers.

    python train.py config/quickstart.py                                        # one process: CPU, one GPU, or MPS
    torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2.py --strategy=ddp
    torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2_xl.py   # full_shard (ZeRO-3)
    python train.py --help                                                      # every key, its default, when to change it

Config files are Python assignments; files and --key=value flags apply left to right, the last wins.
"""

import ast
import difflib
import inspect
import json
import math
import os
import re
import signal
import sys
import time
from dataclasses import asdict, dataclass, fields, replace

import torch

import fsdp
import plan
from checkpoint import ShardedSaver, atomic, check, load, open_source, save_full
from data.loader import TokenFiles, data_dir, eval_order, read_meta, train_order
from fsdp import print0
from model import GPT, GPTConfig, derive_seed

# -----------------------------------------------------------------------------
# the config: every knob there is. Names and meanings are nanoGPT's where nanoGPT has them.


@dataclass
class Config:
    # input and output
    out_dir: str = "out"  # checkpoints and metrics.jsonl
    eval_interval: int = 2000  # steps between evaluations (each may write a checkpoint)
    log_interval: int = 1  # steps between log lines; raise it on a fast GPU, reading the loss waits for the device
    eval_iters: int = 200  # evaluation reads eval_iters * batch_size fixed windows of each split, or the whole split if that is less
    eval_only: bool = False  # evaluate once and stop
    always_save_checkpoint: bool = True  # False: only when the validation loss improves (small data that overfits)
    init_from: str = "scratch"  # scratch, resume, auto (resume if there is a checkpoint), gpt2[-medium|-large|-xl], or a Hugging Face directory
    checkpoint: str = "full"  # full: one portable ckpt.pt. sharded: a directory, written in the background; for models too large for one host
    keep_checkpoints: int = 2  # how many sharded checkpoints to keep
    # watching
    wandb_log: bool = False  # log to Weights & Biases too
    wandb_project: str = "nanofsdp2"
    wandb_run_name: str = "run"
    tensorboard: bool = False  # log to TensorBoard too, in out_dir
    profile: bool = False  # record a PyTorch profiler trace of steps 10-12 of this run (and on CUDA a memory snapshot) to out_dir
    # data
    dataset: str = "openwebtext"  # a directory below data/, or any path with train.bin and val.bin
    gradient_accumulation_steps: int = 40  # micro-batches a step over all processes; divided by the world size
    batch_size: int = 12  # sequences in a micro-batch; lower it when memory runs out, and raise accumulation
    block_size: int = 1024  # context length
    seed: int = 1337  # weights, data order, dropout: everything random follows from it
    # model
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0  # 0 for pre-training, 0.1 and more for fine-tuning and small data
    bias: bool = False  # biases in Linear and LayerNorm; False is a bit better and faster, GPT-2 has them
    freeze: str = ""  # regular expression of parameter names that do not train, e.g. 'wte|wpe|h\.[0-9]\.'
    # optimizer: AdamW
    learning_rate: float = 6e-4  # the peak
    max_iters: int = 600000  # steps
    weight_decay: float = 0.1  # on matrices and embeddings, not on biases and LayerNorms
    beta1: float = 0.9
    beta2: float = 0.95  # 0.99 when a step has few tokens
    grad_clip: float = 1.0  # limit of the global gradient norm; 0 disables it
    decay_lr: bool = True  # warm up, then cosine; False: constant
    warmup_iters: int = 2000
    lr_decay_iters: int = 600000  # usually max_iters
    min_lr: float = 6e-5  # usually learning_rate / 10
    # system
    device: str = "auto"  # auto, cpu, cuda, cuda:1, mps; under torchrun each process takes its local rank's GPU
    dtype: str = "auto"  # compute type: float32, bfloat16, float16 (with loss scaling); auto: the fastest safe one of the device
    compile: bool = True  # torch.compile: a minute at the start, then faster; per block when sharded. Off for short runs
    backend: str = "auto"  # auto: NCCL on GPUs with gloo beside it, gloo on CPUs. shm: gloo, but FSDP's shards go through shared memory: faster on a node's CPUs
    # sharding
    strategy: str = ""  # single, ddp, shard_grad_op (ZeRO-2), full_shard (ZeRO-3), hybrid_shard; '': full_shard under torchrun, else single
    shard_group_size: int = 0  # hybrid_shard: ranks that share one copy of the model; 0: the ranks of a node
    reduce_dtype: str = "float32"  # type in which gradients are summed; bfloat16 halves that traffic and costs accuracy
    wrap_min_params: int = 0  # 0: a unit per block. N: any module of at least N parameters becomes a unit, bottom-up
    cpu_offload: float = 0.0  # fraction of the blocks whose parameters, gradients and moments live in host memory; 1: everything
    activation_checkpointing: str = "none"  # selective: recompute the cheap parts. full: recompute blocks, least memory, a third more compute
    activation_offload: bool = False  # keep saved activations in host memory; with activation_checkpointing full or none
    prefetch_blocks: int = 0  # units to gather ahead; 0 leaves it to FSDP2, 2 and more cost memory
    grad_sync: str = "auto"  # every: reduce each micro-batch, least memory. last: once a step. auto: last for ddp, every when sharded


CHOICES = {
    "checkpoint": ("full", "sharded"), "dtype": ("auto", *fsdp.DTYPES), "strategy": ("", *fsdp.STRATEGIES), "reduce_dtype": tuple(fsdp.DTYPES),
    "activation_checkpointing": ("none", "selective", "full"), "grad_sync": ("auto", "every", "last"), "backend": ("auto", "nccl", "gloo", "shm"),
}
AT_LEAST_1 = ("eval_interval", "log_interval", "eval_iters", "gradient_accumulation_steps", "batch_size", "block_size", "n_layer", "n_head", "n_embd", "keep_checkpoints")
BELOW_1 = ("dropout", "beta1", "beta2")


def coerce(key, value, where):
    """value as the type of Config.key: exact, but an int may become a float, and a whole float (1e4) an int. SystemExit otherwise."""
    kinds = {f.name: f.type for f in fields(Config)}
    if key not in kinds:
        near = difflib.get_close_matches(key, kinds, 1)
        raise SystemExit(f"{where}: unknown key {key}" + (f"; did you mean {near[0]}?" if near else "; python train.py --help lists the keys"))
    kind = kinds[key]
    if kind is int and isinstance(value, float) and value.is_integer():
        value = int(value)
    if kind is float and type(value) is int and abs(value) < 1e300:
        value = float(value)
    if type(value) is not kind or kind is float and not math.isfinite(value):
        raise SystemExit(f"{where}: {key}={value!r} must be {dict(int='a whole number', float='a finite number', bool='True or False', str='a string')[kind.__name__]}")
    return value


def check_values(cfg):
    """SystemExit, with key, value and remedy, for what no run could mean. What depends on the machine is fsdp.resolve's."""
    for key, choices in CHOICES.items():
        if getattr(cfg, key) not in choices:
            raise SystemExit(f"{key}={getattr(cfg, key)!r} must be one of {', '.join(map(repr, choices))}")
    if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", cfg.device):
        raise SystemExit(f"device={cfg.device!r} must be auto, cpu, mps, cuda or cuda:<number>")
    for f in fields(Config):
        value = getattr(cfg, f.name)
        if f.name in AT_LEAST_1 and value < 1:
            raise SystemExit(f"{f.name}={value} must be at least 1")
        if f.type in (int, float) and value < 0:
            raise SystemExit(f"{f.name}={value} must not be negative")
        if f.name in BELOW_1 and value >= 1 or f.name == "cpu_offload" and value > 1:
            raise SystemExit(f"{f.name}={value} must be below 1" if f.name in BELOW_1 else f"{f.name}={value} must be a fraction from 0 to 1")
    if cfg.n_embd % cfg.n_head:
        raise SystemExit(f"n_embd={cfg.n_embd} must be a multiple of n_head={cfg.n_head}")
    return cfg


def load_config(argv, base=None):
    """Config from config files and --key=value flags, applied left to right over `base`."""
    values = asdict(base or Config())
    for arg in argv:
        if arg.startswith("--"):
            key, equals, text = arg[2:].partition("=")  # the first '=': values may contain more
            if not equals:
                raise SystemExit(f"{arg}: write it as {arg}=value")
            kind = {f.name: f.type for f in fields(Config)}.get(key)
            try:
                value = ast.literal_eval({"true": "True", "false": "False"}.get(text, text)) if kind is not str else text
            except (SyntaxError, ValueError):
                value = text
            values[key] = coerce(key, value, arg)
        else:
            scope = dict(values)  # a file may compute with the values so far, as in nanoGPT
            try:
                with open(arg) as f:
                    exec(compile(f.read(), arg, "exec"), scope)
            except OSError as e:
                raise SystemExit(f"{arg}: {e.strerror}; pass an existing config file, e.g. {' '.join(sorted(os.path.join('config', f) for f in os.listdir(os.path.join(HERE, 'config')))[:3])}, or --key=value")
            except Exception as e:
                raise SystemExit(f"{arg}: {type(e).__name__}: {e}")
            for key, value in scope.items():
                if not key.startswith("_") and not inspect.ismodule(value) and not callable(value) and values.get(key) is not value:
                    values[key] = coerce(key, value, arg)
    return check_values(Config(**values))


def split_flags(argv, own):
    """({key: value} of a script's own flags, defaults in `own`; the rest of argv, for load_config)."""
    values, rest = dict(own), []
    for arg in argv:
        key, _, value = arg.removeprefix("--").partition("=")
        if arg.startswith("--") and key in own:
            values[key] = value or "True"
        else:
            rest.append(arg)
    return values, rest


HERE = os.path.dirname(os.path.abspath(__file__))


def help_text():
    """The module's usage, then Config's fields with the comments that stand beside them in this file."""
    lines = [re.sub(r"^    (\w+): (\w+) = (.*?)(  # (.*))?$", lambda m: f"  --{m[1]}={m[3]}" + (f"\n        {m[5]}" if m[5] else ""), line)
             for line in inspect.getsource(Config).splitlines()[2:]]
    return __doc__.strip() + "\n\n" + "\n".join(re.sub(r"^    # (.*)", r"\n\1:", line) for line in lines)


# -----------------------------------------------------------------------------
# pieces of the loop


def learning_rate_at(step, cfg):
    """Linear warm-up to learning_rate, cosine to min_lr at lr_decay_iters, then min_lr."""
    if not cfg.decay_lr:
        return cfg.learning_rate
    if step < cfg.warmup_iters:
        return cfg.learning_rate * (step + 1) / (cfg.warmup_iters + 1)
    if step >= cfg.lr_decay_iters:
        return cfg.min_lr
    progress = (step - cfg.warmup_iters) / (cfg.lr_decay_iters - cfg.warmup_iters)
    return cfg.min_lr + 0.5 * (1 + math.cos(math.pi * progress)) * (cfg.learning_rate - cfg.min_lr)


def make_optimizer(gpt, cfg):
    """AdamW over what trains: matrices and embeddings decay, vectors do not (nanoGPT's two groups, in its order)."""
    params = [p for p in gpt.parameters() if p.requires_grad]
    groups = [{"params": [p for p in params if p.dim() >= 2], "weight_decay": cfg.weight_decay},
              {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0}]
    # fused: one kernel for all parameters instead of a dozen temporaries as large as they are
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=cfg.learning_rate, betas=(cfg.beta1, cfg.beta2), fused=True)


class Batches:
    """
    This rank's micro-batches: step s, micro-batch m -> x, y (batch_size, block_size) on the device.

    The global batch of a step is samples s * G .. s * G + G - 1 (G = accumulation * batch_size), whatever the world
    size; micro-batch m of rank r takes its (m * world_size + r)-th part.
    """

    def __init__(self, cfg, dist, vocab_size):
        self.cfg, self.dist = cfg, dist
        self.files = {split: TokenFiles(data_dir(cfg.dataset), split, cfg.block_size, vocab_size) for split in ("train", "val")}

    def train(self, step, micro):
        part = step * self.cfg.gradient_accumulation_steps + micro * self.dist.world_size + self.dist.rank
        return self.to_device(self.files["train"], train_order(len(self.files["train"]), self.cfg.seed, part * self.cfg.batch_size, self.cfg.batch_size))

    def fixed(self, split):
        """The evaluation's micro-batches of this rank and their weights; every rank gets equally many, the spare ones weigh 0."""
        B, W = self.cfg.batch_size, self.dist.world_size
        order = eval_order(len(self.files[split]), self.cfg.eval_iters * B)
        for start in range(self.dist.rank * B, -(-len(order) // (B * W)) * B * W, B * W):
            windows = order[start:start + B]
            yield *self.to_device(self.files[split], windows if len(windows) else order[:1]), len(windows)

    def to_device(self, files, windows):
        x, y = files.batch(windows)
        if self.dist.device.type == "cuda":  # pinned and non-blocking: the copy runs while the GPU computes
            return x.pin_memory().to(self.dist.device, non_blocking=True), y.pin_memory().to(self.dist.device, non_blocking=True)
        return x.to(self.dist.device), y.to(self.dist.device)


def train_step(model, optimizer, scaler, batches, batch, step, cfg, dist):
    """
    Accumulate, clip, update (all ranks). `batch` is the step's first micro-batch, fetched while the step before computed.

    Returns (mean loss of this rank's micro-batches, global gradient norm before clipping, first micro-batch of step + 1);
    the first two are 0-d tensors on the device: reading them would wait for it.
    """
    accumulation = cfg.gradient_accumulation_steps // dist.world_size
    torch.manual_seed(derive_seed(cfg.seed, step, dist.rank))  # dropout
    for group in optimizer.param_groups:
        group["lr"] = learning_rate_at(step, cfg)
    total = torch.zeros((), device=dist.device)
    for micro in range(accumulation):
        last = micro == accumulation - 1
        if accumulation > 1:
            fsdp.set_grad_sync(model, cfg, last)
        with fsdp.autocast(cfg, dist.device):
            loss = model(*batch)[1] / accumulation  # FSDP and DDP average over ranks, so only the micro-batches are left
        batch = batches.train(step + 1, 0) if last else batches.train(step, micro + 1)  # while a GPU works on the forward
        scaler.scale(loss).backward()
        total += loss.detach()
    scaler.unscale_(optimizer)
    norm = fsdp.clip_grad_norm(model, cfg.grad_clip, dist)
    scaler.step(optimizer)  # float16: skipped, on all ranks alike, if a gradient overflowed
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    return total, norm, batch


def evaluate(model, batches, cfg, dist):
    """{'train': loss, 'val': loss} over the fixed windows (all ranks: forwards are collectives); draws no random number."""
    losses = {}
    with fsdp.inference(model):
        for split in ("train", "val"):
            total = torch.zeros(2, device=dist.device, dtype=torch.float32 if dist.device.type == "mps" else torch.float64)
            for x, y, weight in batches.fixed(split):
                with fsdp.autocast(cfg, dist.device):
                    loss = model(x, y)[1]
                total += torch.stack((loss * weight, torch.full_like(loss, weight)))
            total = fsdp.mean(total, dist)
            losses[split] = (total[0] / total[1]).item()  # synchronization point
    return losses


class StopSignal:
    """
    SIGTERM and SIGINT end the run after the current step, on all ranks together; a second one ends it at once.

    The ranks agree through an all-reduce of one number on the CPU that runs beside the step: start() before, stop() after.
    """

    def __init__(self, dist):
        self.dist, self.received, self.work = dist, 0, None
        self.before = {number: signal.signal(number, self.handle) for number in (signal.SIGTERM, signal.SIGINT)}

    def handle(self, number, frame):
        if self.received and time.time() - self.since > 2:  # sooner, it is the first one again: torchrun forwards what the terminal also sends
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        if not self.received:
            self.received, self.since = number, time.time()

    def start(self):
        if self.dist.world_size > 1:
            self.flag = torch.tensor([float(self.received != 0)])
            self.work = torch.distributed.all_reduce(self.flag, async_op=True)

    def stop(self):
        """True on every rank or on none."""
        if self.work is None:
            return self.received != 0
        self.work.wait()
        return self.flag.item() > 0

    def restore(self):
        for number, handler in self.before.items():
            signal.signal(number, handler)


PEAK_FLOPS = {  # dense bf16 FLOP/s by a part of the device's name, from the makers' data sheets; a more special name first
    "B200": 2250e12, "H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "GH200": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12,
    "A10": 125e12, "V100": 125e12, "T4": 65e12, "RTX 4090": 165e12, "RTX 3090": 71e12,
}


def peak_flops(dist):
    """Peak of this rank's device in FLOP/s, None where unknown."""
    name = torch.cuda.get_device_name(dist.device) if dist.device.type == "cuda" else ""
    return next((peak for key, peak in PEAK_FLOPS.items() if key in name), None)


def peak_memory(dist):
    """Bytes: the device allocator's peak on CUDA, elsewhere the process's peak resident set."""
    return torch.cuda.max_memory_allocated(dist.device) if dist.device.type == "cuda" else peak_host_memory()


def peak_host_memory():
    """Bytes of the process's peak resident set."""
    import resource
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class Metrics:
    """out_dir/metrics.jsonl (one object a line), and wandb and TensorBoard when asked for; rank 0 only."""

    def __init__(self, cfg, dist, step):
        self.sinks, self.file = [], None
        if dist.rank != 0:
            return
        path = os.path.join(cfg.out_dir, "metrics.jsonl")
        if step and os.path.exists(path):  # resumed: what the interrupted run logged beyond its checkpoint will be logged again
            with open(path) as f:
                kept = [line for line in f if line.endswith("\n") and json.loads(line)["iter"] < step]
            with atomic(path) as tmp, open(tmp, "w") as f:
                f.writelines(kept)
        self.file = open(path, "a" if step else "w")
        if cfg.wandb_log:
            wandb = optional("wandb", "wandb_log")
            run = wandb.init(project=cfg.wandb_project, name=cfg.wandb_run_name, config=asdict(cfg), dir=cfg.out_dir,
                             id=re.sub(r"\W", "-", f"{cfg.wandb_run_name}-{os.path.abspath(cfg.out_dir)}")[-64:], resume="allow" if step else None)
            self.sinks.append((lambda row: run.log(row, step=row["iter"]), run.finish))
        if cfg.tensorboard:
            optional("tensorboard", "tensorboard")
            from torch.utils.tensorboard import SummaryWriter
            writer = SummaryWriter(cfg.out_dir, purge_step=step or None)
            self.sinks.append((lambda row: [writer.add_scalar(k, v, row["iter"]) for k, v in row.items() if isinstance(v, (int, float))], writer.close))

    def write(self, row):
        if self.file:
            self.file.write(json.dumps(row) + "\n")
            self.file.flush()
            for log, _ in self.sinks:
                log(row)

    def close(self):
        for _, close in self.sinks:
            close()


def optional(package, key):
    try:
        return __import__(package)
    except ImportError:
        raise SystemExit(f"{key}=True needs a package that is not installed: pip install {package}")


def start_profiler(cfg, dist):
    """A running torch.profiler that writes steps 10-12 to out_dir/trace-<rank>.json, and on CUDA their allocations to memory-<rank>.pickle."""
    from torch.profiler import profile, schedule
    cuda = dist.device.type == "cuda"
    if cuda:  # private, and the only way: documented in PyTorch's "Understanding CUDA Memory Usage"
        torch.cuda.memory._record_memory_history(max_entries=100000)

    def write(prof):
        prof.export_chrome_trace(os.path.join(cfg.out_dir, f"trace-{dist.rank}.json"))
        if cuda:
            torch.cuda.memory._dump_snapshot(os.path.join(cfg.out_dir, f"memory-{dist.rank}.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)
        print0(dist, f"profile written to {cfg.out_dir}/trace-*.json")
    prof = profile(schedule=schedule(wait=9, warmup=1, active=3, repeat=1), on_trace_ready=write, record_shapes=True, profile_memory=True)
    prof.start()
    return prof


def duration(seconds):
    return f"{seconds / 3600:.1f}h" if seconds >= 5400 else f"{seconds / 60:.1f}m" if seconds >= 90 else f"{seconds:.0f}s"


# -----------------------------------------------------------------------------
# the run


def build(cfg, dist, source, vocab_size):
    """(model to call, the GPT itself, optimizer): meta, shard, materialize, load. All ranks."""
    args = dict(n_layer=cfg.n_layer, n_head=cfg.n_head, n_embd=cfg.n_embd, block_size=cfg.block_size, bias=cfg.bias, vocab_size=vocab_size, dropout=cfg.dropout)
    with torch.device("meta"):  # 1) no memory, no values
        gpt = GPT(GPTConfig(**args))
    model = fsdp.parallelize(gpt, cfg, dist)  # 2) shard, 3) materialize this rank's rows
    optimizer = make_optimizer(gpt, cfg)  # before any forward: the first one leaves the root's parameters gathered
    if source is None:  # 4) values
        gpt.init_weights(cfg.seed, fsdp.write_full)
    else:
        check(source, args)
        load(source, gpt, optimizer, dist)
    return model, gpt, optimizer


def main(argv):
    if "--help" in argv or "-h" in argv:
        print(help_text())
        return
    train(load_config(argv))


def train(cfg):
    """The whole run; returns the last logged training loss."""
    # --- set-up (all ranks) ---
    dist, cfg = fsdp.setup(cfg)
    torch.set_float32_matmul_precision("high")  # TF32 on GPUs, as nanoGPT; nothing changes on CPUs
    source = open_source(cfg.init_from, cfg.out_dir, dist)
    meta = read_meta(data_dir(cfg.dataset))
    vocab_size = meta.get("vocab_size", 50304)
    step, best_val_loss = 0, 1e9
    if source:
        step, best_val_loss = source.header["iter_num"], source.header["best_val_loss"]
        if cfg.init_from not in ("resume", "auto"):  # a pre-trained model brings its own architecture
            args = source.header["model_args"]
            cfg = replace(cfg, **{k: args[k] for k in ("n_layer", "n_head", "n_embd", "bias")}, block_size=min(cfg.block_size, args["block_size"]))
            vocab_size = args["vocab_size"]
        elif "vocab_size" not in meta:
            vocab_size = source.header["model_args"]["vocab_size"]
    batches = Batches(cfg, dist, vocab_size)
    before = peak_memory(dist)
    model, gpt, optimizer = build(cfg, dist, source, vocab_size)
    scaler = torch.amp.GradScaler(dist.device.type, enabled=cfg.dtype == "float16")  # otherwise each of its calls passes through
    if source and source.header["scaler"]:
        scaler.load_state_dict(source.header["scaler"])
    if dist.rank == 0:
        try:
            os.makedirs(cfg.out_dir, exist_ok=True)
        except OSError as e:
            raise SystemExit(f"out_dir={cfg.out_dir}: {e.strerror}; pass another --out_dir")
    saver = ShardedSaver(cfg.out_dir, cfg.keep_checkpoints, dist) if cfg.checkpoint == "sharded" else None
    metrics = Metrics(cfg, dist, step)

    tokens_per_step = cfg.gradient_accumulation_steps * cfg.batch_size * cfg.block_size
    flops_per_step = gpt.flops_per_token() * tokens_per_step
    peak = peak_flops(dist)
    n_params = sum(p.numel() for p in gpt.parameters())
    print0(dist, f"{n_params / 1e6:.2f}M parameters, strategy {cfg.strategy}, {dist.world_size} x {dist.device.type}, {cfg.dtype}, "
                 f"{tokens_per_step:,} tokens a step, epoch = {len(batches.files['train']) * cfg.block_size / tokens_per_step:,.0f} steps")
    trained = sum(p.numel() for p in gpt.parameters() if p.requires_grad)
    if trained < n_params:
        print0(dist, f"{n_params - trained:,} parameters are frozen: {(n_params - trained) * 12 / 2**20:.1f} MiB of gradients and moments do not exist (over all shards)")
    if cfg.strategy in fsdp.SHARDED:
        print0(dist, "\n".join(fsdp.describe_units(gpt, cfg, dist)))
    planned = plan.plan(gpt, cfg, dist)
    print0(dist, plan.summary(planned))
    if source:
        print0(dist, f"starting from {source.path} at step {step}")

    def save(path_name="ckpt.pt"):
        header = dict(model_args={**asdict(gpt.config)}, iter_num=step, best_val_loss=best_val_loss, config=asdict(cfg),
                      scaler=scaler.state_dict() if cfg.dtype == "float16" else None)
        print0(dist, f"saving checkpoint to {cfg.out_dir}")
        if saver:
            saver.save(gpt, optimizer, header)
        else:
            save_full(os.path.join(cfg.out_dir, path_name), gpt, optimizer, header, dist)

    # --- the loop (all ranks do the same; only rank 0 prints and writes) ---
    stop = StopSignal(dist)
    profiler = start_profiler(cfg, dist) if cfg.profile else None
    batch = batches.train(step, 0)
    first_step, t_start = step, time.time()
    t_log, last_logged, tokens_per_s = t_start, step, None
    lossf = float("nan")
    while True:
        # evaluation, checkpoint, and the end
        if step % cfg.eval_interval == 0 or step == cfg.max_iters or cfg.eval_only:
            t0 = time.time()
            losses = evaluate(model, batches, cfg, dist)
            print0(dist, f"step {step}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}")
            metrics.write(dict(iter=step, train_loss=losses["train"], val_loss=losses["val"], val_perplexity=perplexity(losses["val"])))
            require_finite(losses["val"], "validation loss", step, cfg, dist)
            improved = losses["val"] < best_val_loss
            best_val_loss = min(best_val_loss, losses["val"])
            if (improved or cfg.always_save_checkpoint) and step > first_step and not cfg.eval_only:
                save()
            t_log += time.time() - t0  # not part of the steps' time
        if step >= cfg.max_iters or cfg.eval_only:
            break

        # one optimizer step
        stop.start()
        scale = scaler.get_scale() if scaler.is_enabled() else None
        loss, norm, batch = train_step(model, optimizer, scaler, batches, batch, step, cfg, dist)
        if saver:
            saver.poll()

        # log
        if scale is not None and scaler.get_scale() < scale:
            print0(dist, f"iter {step}: gradients overflowed in float16, step skipped, loss scale {scale:g} -> {scaler.get_scale():g}")
        if step % cfg.log_interval == 0 or step + 1 == cfg.max_iters:
            lossf = fsdp.mean(loss, dist).item()  # synchronization point
            require_finite(lossf, "loss", step, cfg, dist)
            now = time.time()
            dt = (now - t_log) / (step + 1 - last_logged)
            t_log, last_logged = now, step + 1
            tokens_per_s = tokens_per_step / dt
            mfu = flops_per_step / dt / (peak * dist.world_size) if peak else None
            left = dt * (cfg.max_iters - step - 1)
            print0(dist, f"iter {step}: loss {lossf:.4f}, time {dt * 1000:.2f}ms, mfu {f'{mfu * 100:.2f}%' if mfu else 'n/a'}, "
                         f"{tokens_per_s:,.0f} tok/s, norm {norm:.2f}, mem {peak_memory(dist) / 2**30:.2f}GiB, {duration(left)} left")
            metrics.write(dict(iter=step, loss=lossf, perplexity=perplexity(lossf), lr=optimizer.param_groups[0]["lr"], grad_norm=norm.item(),
                               time_ms=dt * 1000, tokens_per_s=tokens_per_s, mfu=mfu, loss_scale=scale, peak_memory=peak_memory(dist), wall_s=now - t_start))
        step += 1
        if step == first_step + 2:  # the second step had Adam's state from its beginning
            print0(dist, f"memory: peak {plan.size(peak_memory(dist) - before)} after 2 steps, over the {plan.size(before)} before the model was built; planned {plan.size(planned['peak'])}")
        if profiler:
            profiler.step()

        # a scheduler's or the user's signal
        if stop.stop():
            if cfg.always_save_checkpoint or saver:
                save()
            else:
                save("last.pt")  # ckpt.pt stays the best so far
            print0(dist, f"stopped by a signal after step {step}; go on with the same command and --init_from=resume")
            break

    # --- leave ---
    if profiler:
        profiler.stop()
    if saver:
        saver.wait()
    metrics.close()
    stop.restore()
    return lossf


def perplexity(loss):
    return math.exp(min(loss, 700.0))


def require_finite(value, what, step, cfg, dist):
    """All ranks see the same value, so all stop together; nothing is written."""
    if not math.isfinite(value):
        raise SystemExit(f"{what} is {value} at step {step}: try a lower learning_rate (now {cfg.learning_rate}), more warmup_iters, grad_clip=1.0, "
                         f"or dtype=bfloat16 / float32 (now {cfg.dtype}); the last checkpoint in {cfg.out_dir} is untouched")


if __name__ == "__main__":
    fsdp.run(main, sys.argv[1:])

"""
Train a GPT. The same loop trains on one device, with DDP, or sharded with FSDP2. It is
minimal.py's step plus everything a real run needs: accumulation, clipping, evaluation,
resuming, logs.

    python train.py config/quickstart.py             # one process: CPU, one GPU, MPS
    torchrun --standalone --nproc_per_node=2 train.py config/quickstart.py --strategy=ddp
    torchrun --standalone --nproc_per_node=2 train.py config/quickstart.py \\
        --strategy=full_shard
    python train.py --help                           # every key

Config files are Python assignments. Files and --key=value flags apply left to right, and
the last wins.
"""

import re
import signal
import sys
from dataclasses import replace

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the next imports: no traceback

import torch

import activations
import checkpoint
import checks
import configurator
import fsdp
from configurator import DTYPES, STRATEGIES, extra
from data.loader import data_dir, open_batches, read_meta
from metrics import Log, describe, require_packages, step_flops
from model import derive_seed
from optimizer import LossScaler, allocate_state, learning_rate_at, make_adamw
from ranks import (
    StopSignal,
    all_reduce_mean_,
    connect,
    from_rank0,
    print0,
    run,
    setup,
)

# ---------- build: model, strategy, optimizer, values -------------------------


def build(model, cfg, world, source=None):
    """Allocate a model from the meta device, and load its values from `source` or initialize them
    (all ranks). Returns (wrapped, optimizer): wrapped is the DDP module around the model, or the
    model itself."""
    # 1) Allocate memory, for the whole model or for this rank's rows.
    wrapped = parallelize(model, cfg, world)
    # 2) Make the optimizer before any forward: a forward leaves the root gathered, and its
    # parameters would no longer be this rank's rows.
    optimizer = make_optimizer(model, cfg)
    # 3) Set the values. Each rank draws only the initial values in chunks that overlap its rows.
    if source:
        allocate_state(optimizer)  # all of it; load drops what the source lacks
        checkpoint.load(source, model, optimizer, world)
    if source is None:
        print0(world, "drawing initial values: about a minute per 3 billion numbers and core")
    for name, p in model.named_parameters():
        if source is None or not source.has(name):  # LoRA's matrices, which its base lacks
            fsdp.write_full(p, model.initial_value(name, p.shape, cfg.seed))
    checks.after_building(model, optimizer)
    if cfg.dtype == "float8":
        extra("float8", wanted_by="dtype=float8").scale_each_step(model, optimizer)
    return wrapped, optimizer


def meta_model(cfg):
    """The config's model on the meta device: names, shapes, requires_grad, and no memory."""
    with torch.device("meta"):
        model = configurator.model_file(cfg.model).Model(cfg.sizes)
    if cfg.lora_rank:
        extra("lora", wanted_by=f"lora_rank={cfg.lora_rank}").adapt(model, cfg)
    if cfg.freeze:
        freeze(model, cfg.freeze)
    checks.before_sharding(model)
    return model


def freeze(model, pattern):
    """Freeze the parameters whose names match: no gradient, no optimizer state."""
    named = dict(model.named_parameters())
    try:
        hits = [name for name in named if re.search(pattern, name)]
    except re.error as e:
        raise SystemExit(f"freeze={pattern!r} is not a regular expression: {e}")
    for name in hits:
        named[name].requires_grad_(False)
    trained = [name for name, p in named.items() if p.requires_grad]
    if not hits or not trained:
        example = list(named)[len(named) // 2]
        raise SystemExit(
            f"freeze={pattern!r} matches {len(hits)} of {len(named)} parameters, and "
            f"{len(trained)} are left to train; names look like {example}")


def parallelize(model, cfg, world):
    """Apply precision, activation checkpointing, compilation and strategy to a model on the meta
    device, in place, and allocate its parameters, uninitialized. Returns the module to call
    (all ranks).

    Activation checkpointing replaces block.forward first, and compiling second, so that the
    graph contains the recomputation. FSDP2's hooks stay outside both: a block is gathered before
    it computes anything, and no graph contains a hook."""
    if cfg.loss_chunks and not hasattr(model, "loss_chunks"):
        raise SystemExit(
            f"loss_chunks={cfg.loss_chunks}: model={cfg.model} has no head_loss that supports it "
            "(see docs/model_file.md); use --loss_chunks=0")
    model.loss_chunks = cfg.loss_chunks
    is_sharded = STRATEGIES[cfg.strategy].sharded
    if cfg.dtype == "float8":
        group = cfg.shard_group_size or world.size
        extra("float8", wanted_by="dtype=float8").convert(
            model,
            world.device.type,
            shard_group=group if is_sharded else 0,
            tokens=cfg.batch_size * cfg.sizes.block_size,
        )
    activations.checkpoint_activations(
        model.blocks,
        cfg.activation_checkpointing,
        offload_to_host=cfg.activation_offload,
        pin_memory=world.device.type == "cuda",
    )
    if cfg.compile and cfg.strategy != "single":
        # Block by block: FSDP2's hooks would break up a graph of the whole model, and DDP would
        # cut it at its buckets, in mid-block. A single process keeps the whole graph: block
        # by block the quickstart takes 4.7% longer on 2 CPU cores, and 124M 1.2% on an H200.
        torch._dynamo.config.optimize_ddp = False
        activations.compile_blocks(model.blocks)
        if hasattr(model, "head_loss"):
            model.head_loss = torch.compile(model.head_loss, dynamic=False)
    if is_sharded:
        shard_model(model, cfg, world)
        return model
    fsdp.allocate(model, world.device)
    if cfg.strategy == "ddp":
        return fsdp.replicate(model)
    if cfg.compile:
        model.compile(dynamic=False)
    return model


def shard_model(model, cfg, world):
    """Apply a sharded strategy's keys to the model, in place (all ranks)."""
    mesh = fsdp.make_mesh(world.device.type, cfg.shard_group_size)
    # Connect each group now. A full checkpoint is gathered over the shard group.
    for group in mesh.get_all_groups():  # the last is the shard group
        with_gather = group is mesh.get_group(-1) and cfg.checkpoint == "full"
        connect(group, world.device, with_gather)
    units = getattr(model, "units", None)  # a model file may list its own
    if units is None or cfg.wrap_min_params:
        units = fsdp.find_units(model, model.blocks, cfg.wrap_min_params)
    row = STRATEGIES[cfg.strategy]
    fsdp.shard(
        model,
        units,
        mesh,
        mp_policy=fsdp.mixed_precision(DTYPES[cfg.dtype], DTYPES[cfg.reduce_dtype]),
        reshard_after_forward=cfg.reshard_group_size or row.reshard_after_forward,
        cpu_offload=cfg.cpu_offload,
        prefetch_units=cfg.prefetch_blocks,
    )


def make_optimizer(model, cfg):
    """AdamW; or Muon for the matrices that it handles, and AdamW for the rest."""
    if cfg.optimizer == "adamw":
        return make_adamw(model.parameters(), cfg)
    if cfg.optimizer != "muon":
        raise SystemExit(f"optimizer={cfg.optimizer}: make_optimizer in train.py does not know it")
    muon = extra("muon", wanted_by="optimizer=muon")
    matrices = muon.matrices_of(model)
    others = set(model.parameters()).difference(matrices)
    return muon.Muon(
        matrices,
        make_adamw([p for p in model.parameters() if p in others], cfg),
        lr=cfg.learning_rate,
        weight_decay=cfg.weight_decay,
        momentum=cfg.momentum,
        # Unscaled gradients are too small for float16.
        dtype=torch.float32 if cfg.dtype == "float16" else DTYPES[cfg.dtype],
    )


# ---------- start: from scratch, from a checkpoint, from Hugging Face ---------


def open_start(cfg, world):
    """Open the run's starting point (all ranks). Returns (source, resumed): source is None when
    starting from scratch; resumed is True if the run continues, False if it only takes the
    weights."""
    source = open_source(cfg, world)
    resumed = source is not None and cfg.init_from in ("resume", "auto")
    if source is None and cfg.init_from == "resume":
        raise SystemExit(
            f"init_from=resume: no checkpoint in out_dir={cfg.out_dir}; use scratch, or "
            "auto to resume only if there is one")
    # A new LoRA run needs a base; a checkpoint without LoRA cannot be resumed with it.
    if cfg.lora_rank and not (source and source.base):
        if source is None:
            raise SystemExit(
                f"lora_rank={cfg.lora_rank}: it needs a base; pass --init_from=DIR, a hub name or "
                "another run's out_dir")
        if resumed:
            configurator.refuse("lora_rank", cfg.lora_rank, 0, source.path)
        source = checkpoint.on_base(source, cfg.init_from)
    if source and source.base and not resumed:
        checkpoint.require_base_outside(cfg.out_dir, source.header["base"])
    return source, resumed


def final_config(cfg, source, resumed, world):
    """cfg with the source's model sizes, or the vocabulary size of the data. SystemExit if a file
    or a flag contradicts them. When resuming, prints other differences."""
    if source is None:
        return with_vocabulary(cfg)
    # Defaults for checkpoints that lack these keys: older ones, nanoGPT's, Hugging Face's.
    theirs = {
        "model": "gpt2", "optimizer": "adamw", "lr_schedule": "cosine", **source.header["config"]}
    sizes = source.header["model_args"]
    # A new run keeps its own block_size if that is shorter: it saves memory.
    cfg = configurator.with_sizes(
        cfg, theirs["model"], sizes, source.path, whole_context=resumed)
    if resumed:
        if cfg.optimizer != theirs["optimizer"]:
            configurator.refuse("optimizer", cfg.optimizer, theirs["optimizer"], source.path)
        changed = configurator.differences({**theirs, **sizes}, cfg)
        if changed:
            print0(world, f"this run differs from the run of {source.path}: {', '.join(changed)}")
    return cfg


def with_vocabulary(cfg):
    """cfg with the vocabulary size of its data, if meta.json has one; SystemExit if a file or a
    flag set another."""
    ours = cfg.sizes.vocab_size
    size = read_meta(data_dir(cfg.dataset)).get("vocab_size", ours)
    if "vocab_size" in cfg.given and ours != size:
        raise SystemExit(
            f"vocab_size={ours}, but dataset={cfg.dataset} has {size} symbols; pass "
            f"--vocab_size={size}, or another --dataset")
    return replace(cfg, sizes=replace(cfg.sizes, vocab_size=size))


def open_source(cfg, world, key="init_from"):
    """Open the checkpoint or model that cfg.init_from names (all ranks). None for scratch, or if
    there is no checkpoint. If it holds LoRA's matrices, their base is opened too.
    key: where the name came from, for error lines."""
    if cfg.init_from == "scratch":
        return None
    own = cfg.init_from in ("resume", "auto")
    source = checkpoint.find(cfg.out_dir if own else cfg.init_from, world)
    if source and not own:
        source = checkpoint.weights_only(source)
    if not source and not own:
        huggingface = extra("huggingface", wanted_by=f"{key}={cfg.init_from}")
        # Rank 0 downloads it, and then every rank opens the copy in its own node's cache.
        path = from_rank0(world, lambda: huggingface.open_pretrained(cfg.init_from, key).path)
        source = huggingface.open_pretrained(path, key)
    base = source and source.header.get("base")
    if base:
        source.base = open_source(replace(cfg, init_from=base), world, f"{source.path}: base")
        before = source.header.get("base_origin")
        now = source.base.header.get("origin", "something else")
        if before and before != now:
            print0(world, f"{source.path}: base={base} was {before} when LoRA began, "
                          f"and is now {now}", file=sys.stderr)
    return source


# ---------- one step, one evaluation ------------------------------------------


def train_step(wrapped, optimizer, scaler, batches, step, cfg, world):
    """One optimizer step (all ranks): set the learning rate, accumulate, clip, update.

    Returns this rank's loss (average it over ranks for the step's loss) and the global gradient
    norm before clipping. Both are 0-d tensors: reading them waits for the device.
    """
    accumulation = cfg.gradient_accumulation_steps // world.size  # micro-batches per rank
    for group in optimizer.param_groups:
        group["lr"] = learning_rate_at(step, cfg)
    step_loss = torch.zeros((), device=world.device)
    for micro in range(accumulation):
        is_last = micro == accumulation - 1
        # grad_sync: by default DDP reduces in the last micro-batch, and FSDP2 in each.
        fsdp.set_grad_sync(wrapped, is_last, every=cfg.grad_sync == "every")
        # Seed dropout by the micro-batch's number within the step, so that its masks are the same
        # at any world size.
        number = micro * world.size + world.rank
        torch.manual_seed(derive_seed(cfg.seed, step, number))
        x, y, weight = batches.get(step, micro)
        with fsdp.autocast(wrapped, world.device.type, DTYPES[cfg.dtype]):
            # Keep only the loss: holding the logits would keep their memory.
            loss = wrapped(x, y)[1]
        # FSDP and DDP average over ranks; dividing by accumulation averages over micro-batches.
        # weight is n / mean(n): n targets count in this micro-batch, and the mean is over all
        # micro-batches of the step (data/loader.py). So each target of the step counts equally.
        loss = loss * weight / accumulation
        # Fetch the next micro-batch while the GPU runs forward. Any later may be too late: after a
        # logged step the GPU's queue is empty.
        batches.prefetch_next(step, micro)
        scaler.scaled(loss).backward()
        step_loss += loss.detach()
    norm = fsdp.clip_grad_norm(wrapped, cfg.grad_clip, scaler.scale)
    # float16: if a gradient overflowed on any rank, all ranks skip the step.
    if scaler.accepts(norm):
        optimizer.step()
    fsdp.zero_grad(wrapped, optimizer)
    return step_loss, norm


def evaluate(wrapped, batches, cfg, world):
    """{split: mean loss} over the targets of fixed windows (all ranks: each forward gathers).
    With several data sets this is their weighted mean, and "split/NAME" has each one's loss."""
    losses = {}
    for split in ("train", "val"):
        losses[split] = 0.0
        for name, share, part in batches.parts:
            loss = mean_loss(wrapped, part.fixed(split), cfg, world)
            losses[split] += share * loss
            if share < 1:
                losses[f"{split}/{name}"] = loss
    return losses


def mean_loss(wrapped, weighted_batches, cfg, world):
    dtype = torch.float32 if world.device.type == "mps" else torch.float64
    total = torch.zeros((), device=world.device, dtype=dtype)
    weights = torch.zeros_like(total)
    with fsdp.inference(wrapped):
        for turn, (x, y, weight) in enumerate(weighted_batches):
            # If the model draws random numbers in evaluation, make them the same each time, at
            # any world size.
            number = turn * world.size + world.rank
            torch.manual_seed(derive_seed(cfg.seed, "evaluation", number))
            with fsdp.autocast(wrapped, world.device.type, DTYPES[cfg.dtype]):
                loss = wrapped(x, y)[1]
            total += loss * weight
            weights += weight
    all_reduce_mean_(total, world)
    all_reduce_mean_(weights, world)
    return (total / weights).item()  # synchronization point


# ---------- the run -----------------------------------------------------------


def train(cfg):
    """The whole run (all ranks)."""
    # --- set-up: lock the directory, choose a start, build ---
    world = setup(cfg.device, cfg.backend, cfg.cpu_offload)
    cfg = configurator.resolve(cfg, world)
    from_rank0(world, lambda: require_packages(cfg))  # only rank 0 logs
    torch.set_float32_matmul_precision("high")  # TF32 on GPUs, as in nanoGPT
    directory = checkpoint.RunDirectory(cfg.out_dir)
    if not cfg.eval_only:
        from_rank0(world, directory.lock)
    source, resumed = open_start(cfg, world)
    cfg = final_config(cfg, source, resumed, world)
    first_step = source.header["iter_num"] if source else 0
    best_val_loss = source.header["best_val_loss"] if source else 1e9
    model = meta_model(cfg)
    flops = step_flops(model, cfg, world)
    batches = open_batches(cfg, world)
    wrapped, optimizer = build(model, cfg, world, source)
    scaler = LossScaler(cfg)  # for float16
    if source and source.header.get("scaler"):
        scaler.load_state_dict(source.header["scaler"])
    for line in describe(cfg, model, batches, source, world):
        print0(world, line)
    # eval_only leaves the directory as it is.
    run_id = None
    if not cfg.eval_only:
        run_id = from_rank0(world, lambda: directory.claim(source, resumed))
    log = Log(cfg, world, directory.path, run_id, first_step, flops)
    saver = checkpoint.Saver(directory.path, run_id, cfg, world, source, resumed, log.saved)
    source = None  # unmap the file, or it takes disk space even after it is replaced
    stop = StopSignal(world)

    # --- the loop: every rank does the same; only rank 0 prints and writes ---
    step = first_step
    is_checked = False
    while True:
        saver.poll()  # a save in the background may have failed
        # Stop? A scheduler or the user has sent a signal: save, and leave.
        if stop.requested():
            if step > first_step:
                saver.save(model, optimizer, scaler, step, best_val_loss)
            hint = "continue with the same command and --init_from=auto"
            if cfg.checkpoint == "none":
                hint = "nothing was saved, because checkpoint=none"
            print0(world, f"stopped by a signal after step {step}; {hint}")
            break

        # Due? Evaluate.
        done = cfg.eval_only or step >= cfg.max_iters
        evaluated = done or step % cfg.eval_interval == 0
        improved = False
        if evaluated:
            with log.paused():
                losses = evaluate(wrapped, batches, cfg, world)
                saver.require_finite(losses["val"], "validation loss", step)
                log.evaluation(step, losses)
                improved = losses["val"] < best_val_loss
                best_val_loss = min(best_val_loss, losses["val"])

        # Due? Save.
        if step > first_step and checkpoint.is_due(cfg, step, evaluated, improved):
            with log.paused():
                saver.save(model, optimizer, scaler, step, best_val_loss, improved)

        # Done? Leave.
        if done:
            break

        # Else one optimizer step.
        loss, norm = train_step(wrapped, optimizer, scaler, batches, step, cfg, world)
        if optimizer.state and not is_checked:  # float16 may have skipped the first steps
            checks.after_first_step(model, optimizer)
            is_checked = True
        if step % cfg.log_interval == 0 or step + 1 == cfg.max_iters:
            lossf = all_reduce_mean_(loss, world).item()  # synchronization point
            saver.require_finite(lossf, "loss", step)
            log.step(step, lossf, norm.item(), optimizer, scaler, batches)
        step += 1

    # --- leave ---
    saver.finish()
    log.close()


def main(argv):
    if "--help" in argv or "-h" in argv:
        chosen = dict(arg.split("=", 1) for arg in argv if "=" in arg)
        print(configurator.help_text(__doc__, chosen.get("--model", "gpt2")))
        return
    train(configurator.load_config(argv))


if __name__ == "__main__":
    run(main, sys.argv[1:])

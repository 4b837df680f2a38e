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

minimal.py's steps are here too: 1) the mesh and 3) the sharding in shard_model, 2) meta_model,
4) the values in set_values, 5) train_step, 6) Saver.save.
"""

import re
import sys

import torch

import activations
import checkpoint
import checks
import configurator
import fsdp
import saves
from compare import Compare
from configurator import DTYPES, STRATEGIES
from data.loader import open_batches
from metrics import Log, describe, ideal_seconds
from model import derive_seed
from optimizer import LossScaler, learning_rate_at
from ranks import StopSignal, all_reduce_mean_, from_rank0, print0, require_same, run, setup
from start import final_config, open_start

# ---------- build: model, strategy, optimizer, values -------------------------


def build(model, cfg, world, source=None):
    """Allocate a model from the meta device, and set its values: see set_values (all ranks).
    Returns (wrapped, optimizer): wrapped is the DDP module around the model, or the model
    itself."""
    if cfg.cuda_graph:  # CUDA graphs cannot record the default stream: take another throughout
        torch.cuda.set_stream(torch.cuda.Stream())
    if hasattr(model, "convert"):  # a model file may change its layers for training, on meta
        model.convert(cfg, world)
    wrapped = parallelize(model, cfg, world)
    # Make the optimizer before any forward: a forward leaves the root gathered, and its
    # parameters would no longer be this rank's rows.
    optimizer = make_optimizer(model, cfg)
    for group in optimizer.param_groups:
        # A checkpoint has these too: they show what the optimizer changes, such as Prodigy's d.
        group["made"] = {key: n for key, n in group.items() if type(n) in (int, float)}
    set_values(model, optimizer, source, cfg.seed, world)
    checks.after_building(model, optimizer)
    return wrapped, optimizer


def set_values(model, optimizer, source, seed, world):
    """Load the source's values, or draw initial ones (all ranks). What no checkpoint holds,
    `not_saved`, always comes from initial_value. Each rank draws or reads only its rows."""
    if source:
        checkpoint.load(source, model, optimizer, world)
    for name, p in model.named_parameters():
        if source is None or name in checkpoint.not_saved(model):
            fsdp.write_full(p, model.initial_value(name, p.shape, seed))


def meta_model(cfg):
    """minimal.py's step 2: names, shapes, requires_grad, and no memory."""
    with torch.device("meta"):
        model = configurator.model_file(cfg.model).Model(cfg.sizes)
    if cfg.freeze:
        freeze(model, cfg.freeze)
    for p in model.parameters():
        if not p.requires_grad and p.is_floating_point():
            p.data = p.data.to(DTYPES[cfg.frozen_dtype])
    return model


def freeze(model, pattern):
    """Freeze the parameters whose names match: no gradient, no optimizer state."""
    named = dict(model.named_parameters())
    hits = [name for name in named if re.search(pattern, name)]
    if not hits:
        raise SystemExit(f"freeze={pattern!r} matches no parameter; one is {[*named][-1]}")
    for name in hits:
        named[name].requires_grad_(False)


def parallelize(model, cfg, world):
    """Apply precision, activation checkpointing, compilation and strategy to a model on the meta
    device, in place, and allocate its parameters, as NaN. Returns the module to call
    (all ranks)."""
    model.loss_chunks = cfg.loss_chunks
    change_blocks(model, cfg, world)
    if STRATEGIES[cfg.strategy].sharded:
        shard_model(model, cfg, world)
        return model
    fsdp.allocate(model, world.device)
    if cfg.strategy == "ddp":
        return fsdp.replicate(model)
    if cfg.compile:
        model.compile(dynamic=False)
    return model


def change_blocks(model, cfg, world):
    """Activation checkpointing replaces block.forward first, and compiling second, so that the
    graph contains the recomputation. FSDP2's hooks stay outside both: a block is gathered before
    it computes anything, and no graph contains a hook."""
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


def shard_model(model, cfg, world):
    """minimal.py's steps 1, 3 and the memory of 4, with the keys of a sharded strategy: in place
    (all ranks)."""
    mesh = fsdp.make_mesh(world.device.type, cfg.shard_group_size)
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
    """What `make` returns in the file that the key names: optimizer.py for adamw."""
    return configurator.named_file(cfg.optimizer).make(model, cfg)


# ---------- one step, one evaluation ------------------------------------------


def forward(wrapped, x, y, weight, cfg, world):
    """The loss of x (B, T) and y (B, T), times their weight: a 0-d tensor, or a vector of terms."""
    with fsdp.autocast(wrapped, world.device.type, DTYPES[cfg.dtype]):
        # Keep only the loss: holding the logits would keep their memory. They come detached, so a
        # term of the loss that is made of them here would have no gradient: see head_loss.
        return wrapped(x, y)[1] * weight


def forward_backward(wrapped, x, y, weight, cfg, world):
    """One micro-batch (all ranks): add to the gradients. Returns its part of the step's loss, times
    float16's scale. FSDP2 and DDP average over ranks; the weight is for the mean over
    micro-batches."""
    loss = forward(wrapped, x, y, weight, cfg, world)
    loss.sum().backward()
    return loss.detach()


def maybe_recorded(wrapped, cfg, world):
    """forward_backward, or with cuda_graph a recording of it, to keep from step to step."""
    if not cfg.cuda_graph:
        return forward_backward
    micro_batches = cfg.gradient_accumulation_steps // world.size
    Recorded = configurator.named_file("recorded").Recorded
    return Recorded(wrapped, forward_backward, per_step=micro_batches, forward=forward)


def maybe_compared(model, cfg):
    """With compare, the Compare of the run's steps; it names the first block that differs."""
    blocks = {name: module for name, module in model.named_modules() if module in [*model.blocks]}
    tolerance = 1e-4 if cfg.dtype == "float32" else 0.05
    return Compare(cfg.compare, model, blocks, tolerance) if cfg.compare else None


def train_step(
        model, wrapped, optimizer, scaler, batches, step, cfg, world, forward_backward,
        compared=None):
    """One optimizer step (all ranks): set the learning rate, accumulate, clip, update.
    model: the one inside wrapped. forward_backward: the function above, or its recording.
    compared: a Compare.

    Returns numbers for the log, {name: 0-d tensor on the device}: the log writes their means over
    ranks. The mean of the ranks' losses is the step's; the gradient norm, before clipping, is the
    same on all. Reading one waits for the device.
    """
    for group in optimizer.param_groups:
        group["lr"] = learning_rate_at(step, cfg) * group.get("lr_scale", 1.0)
    micro_batches = cfg.gradient_accumulation_steps // world.size  # of this rank
    every = cfg.grad_sync == "every"  # by default FSDP2 reduces after each, and DDP after the last
    # ZeRO-1: if forward leaves units gathered, and only the last micro-batch reduces gradients,
    # units stay gathered until then.
    keep_gathered = not every and not STRATEGIES[cfg.strategy].reshard_after_forward
    scale = scaler.scale  # float16's, else 1; `accepts` below may change it
    loss = torch.zeros((), device=world.device)
    for micro in range(micro_batches):
        is_last = micro == micro_batches - 1
        fsdp.set_grad_sync(wrapped, is_last, every=every, keep_gathered=keep_gathered)
        # Seed dropout by the micro-batch's number within the step, so that its masks are the same
        # at any world size.
        torch.manual_seed(derive_seed(cfg.seed, step, micro * world.size + world.rank))
        x, y, weight = batches.get(step, micro)
        # The weight is n / mean(n): n targets count in this micro-batch, and the mean is over all
        # micro-batches of the step (data/loader.py). So each target of the step counts equally.
        # A tensor, since a recording would keep a number. (`full` does not wait for the GPU.)
        weight = torch.full((), weight * scale / micro_batches, device=world.device)
        loss = loss + forward_backward(wrapped, x, y, weight, cfg, world)
        # Fetch the next micro-batch while the GPU works on this one.
        batches.prefetch_next(step, micro)
    if compared:
        compared.step(step, optimizer, loss.sum() / scale, scale)
    norm = fsdp.clip_grad_norm(wrapped, cfg.grad_clip, scale)
    # float16: if a gradient overflowed on any rank, all ranks skip the step.
    if scaler.accepts(norm):
        optimizer.step()
    fsdp.zero_grad(wrapped, optimizer, in_place=cfg.cuda_graph)
    terms = dict(zip(getattr(model, "loss_terms", ()), loss.flatten() / scale))
    return {"loss": loss.sum() / scale, "grad_norm": norm, **terms}


def evaluate(wrapped, batches, cfg, world):
    """{split: mean loss} over the targets of fixed windows (all ranks: each forward gathers)."""
    return {s: mean_loss(wrapped, batches.fixed(s), cfg, world) for s in ("train", "val")}


def mean_loss(wrapped, weighted_batches, cfg, world):
    dtype = torch.float32 if world.device.type == "mps" else torch.float64
    sums = torch.zeros(2, device=world.device, dtype=dtype)  # of losses times weights, of weights
    with fsdp.inference(wrapped):
        for turn, (x, y, weight) in enumerate(weighted_batches):
            # If the model draws random numbers in evaluation, make them the same each time, at
            # any world size.
            torch.manual_seed(derive_seed(cfg.seed, "evaluation", turn * world.size + world.rank))
            sums[0] += forward(wrapped, x, y, weight, cfg, world).sum()
            sums[1] += weight
    total, weights = all_reduce_mean_(sums.cpu(), world)
    return (total / weights).item()


# ---------- the run -----------------------------------------------------------


def train(cfg):
    """The whole run (all ranks)."""
    # --- set-up: lock the directory, choose a start, build ---
    world = setup(cfg.device, cfg.backend)
    # nanoGPT's files put the time into this one, and only rank 0 reads it.
    cfg.wandb_run_name = from_rank0(world, lambda: cfg.wandb_run_name)
    require_same(configurator.as_dict(cfg), world)
    cfg = configurator.resolve(cfg, world)
    # TF32 on GPUs, as in nanoGPT. Steps that are compared are computed in fp32.
    torch.set_float32_matmul_precision("highest" if cfg.compare else "high")
    directory = saves.RunDirectory(cfg.out_dir)
    if not cfg.eval_only:
        from_rank0(world, directory.lock)
    source, resumed = open_start(cfg, world)
    cfg = final_config(cfg, source, resumed, world)
    first_step = source.header["iter_num"] if source else 0
    model = meta_model(cfg)
    ideal_s = ideal_seconds(model, cfg, world)
    batches = open_batches(cfg, world)
    tokens = {f"tokens of {split}": file.tokens_in_all for split, file in batches.files.items()}
    require_same({**configurator.as_dict(cfg), **tokens}, world)  # once more, resolved
    wrapped, optimizer = build(model, cfg, world, source)
    forward_backward = maybe_recorded(wrapped, cfg, world)
    compared = maybe_compared(model, cfg)
    scaler = LossScaler(cfg)  # for float16
    scaler.load_state_dict(source.header.get("scaler") if source else None)
    for line in describe(cfg, model, optimizer, batches, source, world):
        print0(world, line)
    # eval_only leaves the directory as it is.
    run_id = None if cfg.eval_only else from_rank0(
        world, lambda: directory.claim(source, resumed))
    log = Log(cfg, world, directory.path, run_id, first_step, ideal_s)
    saver = saves.Saver(directory.path, run_id, cfg, world, source)
    # Drop the checkpoint's memory map: a file that is replaced takes space while it is mapped.
    source = None
    stop = StopSignal(world)

    # --- the loop: every rank does the same; only rank 0 prints and writes ---
    step = first_step
    is_checked = False
    while True:
        saver.poll()  # a save in the background may have failed
        # Stop? A scheduler or the user has sent a signal: save, and leave.
        if stop.requested():
            if step > first_step and cfg.always_save_checkpoint:
                saver.save(model, optimizer, scaler, step)
            print0(world, f"stopped by a signal after step {step}; --init_from=auto continues from "
                          f"the newest checkpoint in {cfg.out_dir}")
            break

        # Due? Evaluate.
        done = cfg.eval_only or step >= cfg.max_iters
        evaluates = done or step % cfg.eval_interval == 0
        improved = False
        if evaluates:
            with log.paused():
                losses = evaluate(wrapped, batches, cfg, world)
                saver.require_finite(losses["val"], "validation loss", step)
                log.evaluation(step, losses)
                improved = saver.improves(losses["val"])

        # Due? Save.
        if step > first_step and saves.is_due(cfg, step, evaluates, improved):
            with log.paused():
                saver.save(model, optimizer, scaler, step)

        # Done? Leave.
        if done:
            break

        # Else one optimizer step.
        numbers = train_step(
            model, wrapped, optimizer, scaler, batches, step, cfg, world, forward_backward,
            compared)
        if optimizer.state and not is_checked:  # float16 may have skipped the first steps
            checks.after_first_step(model, optimizer)
            is_checked = True
        if step % cfg.log_interval == 0 or step + 1 == cfg.max_iters:
            means = torch.stack([*numbers.values()]).cpu()  # synchronization point
            means = dict(zip(numbers, all_reduce_mean_(means, world).tolist()))
            saver.require_finite(means["loss"], "loss", step)
            log.step(step, means, optimizer, scaler)
        step += 1

    # --- leave ---
    if compared:
        print0(world, compared)
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

"""
Train a GPT: on one device, with DDP, or sharded with FSDP2, by the same loop.

    python train.py config/quickstart.py                          # one process: CPU, one GPU, MPS
    torchrun --standalone --nproc_per_node=2 train.py config/quickstart.py --strategy=ddp
    torchrun --standalone --nproc_per_node=2 train.py config/quickstart.py --strategy=full_shard
    python train.py --help                                        # every key

Config files are Python assignments; files and --key=value flags apply left to right, the last wins.
"""

import math
import os
import sys
import time
from dataclasses import replace

import torch

import checkpoint
import fsdp
from configurator import help_text, load_config, model_config, model_file, resolve, with_model
from data.loader import Batches, data_dir, read_meta
from metrics import Metrics, describe, duration, flops_per_token, peak_flops, peak_memory
from model import derive_seed
from optimizer import learning_rate_at, make_optimizer
from outdir import claim, hold
from ranks import StopSignal, from_rank0, mean, print0, run, setup

# ---------- build -------------------------------------------------------------


def meta_model(cfg):
    """The config's model on the meta device: names, shapes, what trains; no memory, no values."""
    with torch.device("meta"):
        model = model_file(cfg.model).Model(model_config(cfg))
    fsdp.freeze(model, cfg.freeze)
    return model


def build(cfg, world, source=None):
    """
    (wrapped, model, optimizer): call `wrapped`, read names from `model`. All ranks. The order of
    these steps matters.
    """
    if cfg.cpu_offload:  # the CPU updates what is offloaded; torchrun gave it one thread
        torch.set_num_threads(max(1, os.cpu_count() // world.local_size))
    model = meta_model(cfg)  # 1) names, shapes, and what trains: FSDP2 groups by requires_grad
    wrapped = fsdp.parallelize(model, cfg, world)  # 2) shard, and allocate this rank's rows
    optimizer = make_optimizer(model, cfg)  # 3) before any forward gathers parameters
    if source:  # 4) values
        checkpoint.load(source, model, optimizer, world)
    else:
        for name, p in model.named_parameters():
            fsdp.write_full(p, model.initial_value(name, p.shape, cfg.seed))
    return wrapped, model, optimizer


OWN = ("resume", "auto")  # values of init_from that name a checkpoint of this run


def open_start(cfg, world):
    """The Source that cfg.init_from names, None for a fresh start; SystemExit if it is missing."""
    if cfg.init_from == "scratch":
        return None
    if cfg.init_from not in OWN:
        from huggingface import open_pretrained  # here, so that a fork can delete the file
        return from_rank0(world, lambda: open_pretrained(cfg.init_from))
    source = checkpoint.find(cfg.out_dir, world)
    if source is None and cfg.init_from == "resume":
        raise SystemExit(f"init_from=resume: no checkpoint in out_dir={cfg.out_dir}; use scratch, "
                         "or auto to resume only if there is one")
    return source


def with_vocabulary(cfg, source=None):
    """cfg with vocab_size from the data, else the config; a checkpoint's may be larger (padded)."""
    theirs = source.header["model_args"].get("vocab_size", 0) if source else 0
    meta = read_meta(data_dir(cfg.dataset))
    return replace(cfg, vocab_size=max(meta.get("vocab_size", theirs or cfg.vocab_size), theirs))


def with_architecture(cfg, source):
    """cfg with the model of a checkpoint, and its sizes."""
    name = source.header["config"].get("model", "gpt2")
    return with_model(cfg, name, source.header["model_args"])


# ---------- one step ----------------------------------------------------------


def train_step(wrapped, optimizer, scaler, batches, batch, step, cfg, world):
    """
    Accumulate, clip, update (all ranks). `batch` is the step's first micro-batch.

    Returns (mean loss of this rank's micro-batches, global gradient norm before clipping, first
    micro-batch of step + 1). The first two are 0-d tensors: reading them waits for the device.
    """
    accumulation = cfg.gradient_accumulation_steps // world.size
    for group in optimizer.param_groups:
        group["lr"] = learning_rate_at(step, cfg)
    total = torch.zeros((), device=world.device)
    for micro in range(accumulation):
        last = micro == accumulation - 1
        fsdp.set_grad_sync(wrapped, cfg, last)
        # dropout: by micro-batch, not by rank, so that the masks do not depend on the world size
        torch.manual_seed(derive_seed(cfg.seed, step, micro * world.size + world.rank))
        with fsdp.autocast(cfg, world.device):
            loss = wrapped(*batch)[1]  # a name for the logits would keep them through backward
        loss = loss / accumulation  # FSDP and DDP average over ranks; this, over micro-batches
        # fetch the next batch now, while the GPU is still computing
        batch = batches.train(step + 1, 0) if last else batches.train(step, micro + 1)
        scaler.scale(loss).backward()
        total += loss.detach()
    scaler.unscale_(optimizer)
    norm = fsdp.clip_grad_norm(wrapped, cfg.grad_clip, world)
    scaler.step(optimizer)  # float16: skipped, on all ranks alike, if a gradient overflowed
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    return total, norm, batch


def evaluate(wrapped, batches, cfg, world, stop):
    """{split: mean loss} over fixed windows, None after a stop signal (all ranks: it gathers)."""
    losses = {}
    dtype = torch.float32 if world.device.type == "mps" else torch.float64
    with fsdp.inference(wrapped):
        for split in ("train", "val"):
            total = torch.zeros(2, device=world.device, dtype=dtype)  # of losses, of weights
            for x, y, weight in batches.fixed(split):
                stop.start()
                with fsdp.autocast(cfg, world.device):
                    loss = wrapped(x, y)[1]
                if stop.received():
                    return None
                total += torch.stack((loss * weight, torch.full_like(loss, weight)))
            total = mean(total, world)
            losses[split] = (total[0] / total[1]).item()  # synchronization point
    return losses


def require_finite(value, what, step, cfg):
    """All ranks see the same value, so all stop together; no checkpoint is written."""
    if not math.isfinite(value):
        raise SystemExit(
            f"{what} is {value} at step {step}: try a lower learning_rate (now "
            f"{cfg.learning_rate}), more warmup_iters, grad_clip=1.0, or dtype=bfloat16 or float32 "
            f"(now {cfg.dtype}); the last checkpoint in {cfg.out_dir} is untouched")


# ---------- the run -----------------------------------------------------------


def train(cfg):
    """The whole run (all ranks); returns the last logged training loss."""
    # --- set-up ---
    world = setup(cfg.device, cfg.backend)
    cfg = resolve(cfg, world)
    torch.set_float32_matmul_precision("high")  # TF32 on GPUs, as nanoGPT; CPUs do not change
    lock = None if cfg.eval_only else hold(cfg.out_dir, world)  # it lasts as long as the process
    source = open_start(cfg, world)
    step, best_val_loss = 0, 1e9
    if source and cfg.init_from not in OWN:
        context = cfg.block_size
        cfg = with_architecture(cfg, source)
        cfg = replace(cfg, block_size=min(context, cfg.block_size))  # a shorter one saves memory
    else:
        cfg = with_vocabulary(cfg, source)
        if source:
            checkpoint.check(source, cfg)
            for line in checkpoint.changed(source, cfg):
                print0(world, line)
            step, best_val_loss = source.header["iter_num"], source.header["best_val_loss"]
    batches = Batches(cfg, world)
    wrapped, model, optimizer = build(cfg, world, source)
    # float16 only; else its calls pass through
    scaler = torch.amp.GradScaler(world.device.type, enabled=cfg.dtype == "float16")
    if source and source.header["scaler"]:
        scaler.load_state_dict(source.header["scaler"])
    run_id = saver = None
    if not cfg.eval_only:  # which leaves everything as it is
        run_id = claim(cfg, source if cfg.init_from in OWN else None, world)
        if cfg.checkpoint == "sharded":
            saver = checkpoint.ShardedSaver(cfg.out_dir, cfg.keep_checkpoints, world)
    metrics = Metrics(cfg, world, run_id, step)
    tokens_per_step = cfg.gradient_accumulation_steps * cfg.batch_size * cfg.block_size
    for line in describe(cfg, model, batches, tokens_per_step, source, world):
        print0(world, line)

    def save(step, best_val_loss, name="ckpt.pt"):
        print0(world, f"saving checkpoint to {cfg.out_dir}")
        header = checkpoint.make_header(model, optimizer, cfg, run_id, step, best_val_loss, scaler)
        if saver:
            saver.save(model, optimizer, header)
        else:
            checkpoint.save_full(os.path.join(cfg.out_dir, name), model, optimizer, header, world)

    # --- the loop: every rank does the same; only rank 0 prints and writes ---
    stop = StopSignal(world)
    peak = peak_flops(world.device)
    flops_per_step = flops_per_token(meta_model(cfg)) * tokens_per_step
    batch = batches.train(step, 0)
    first_step, lossf = step, float("nan")
    t_start = time.time()
    t_log, last_logged = t_start, step
    while True:
        # evaluation, checkpoint, and the end
        losses, t0 = None, time.time()
        due = step % cfg.eval_interval == 0 or step >= cfg.max_iters or cfg.eval_only
        if due and not stop.received():
            losses = evaluate(wrapped, batches, cfg, world, stop)
        if losses:
            val = losses["val"]
            print0(world, f"step {step}: train loss {losses['train']:.4f}, val loss {val:.4f}")
            require_finite(val, "validation loss", step, cfg)
            metrics.write(dict(iter=step, train_loss=losses["train"], val_loss=val))
            improved = val < best_val_loss
            best_val_loss = min(best_val_loss, val)
            wanted = improved or cfg.always_save_checkpoint
            if wanted and step > first_step and not cfg.eval_only:
                save(step, best_val_loss)
            t_log += time.time() - t0  # not part of the steps' time

        # a scheduler's or the user's signal, in the step or in the evaluation
        if stop.received():
            remedy = "nothing to save yet"
            if step > first_step:
                ckpt_is_best = not cfg.always_save_checkpoint and not saver
                save(step, best_val_loss, "last.pt" if ckpt_is_best else "ckpt.pt")
                remedy = "continue with the same command and --init_from=resume"
            print0(world, f"stopped by a signal after step {step}; {remedy}")
            break
        if step >= cfg.max_iters or cfg.eval_only:
            break

        # one optimizer step
        stop.start()
        scale = scaler.get_scale() if scaler.is_enabled() else None  # float16: waits for the GPU
        loss, norm, batch = train_step(wrapped, optimizer, scaler, batches, batch, step, cfg, world)
        if saver:
            saver.finish()

        # log
        if scale and scaler.get_scale() < scale:
            print0(world, f"iter {step}: gradients overflowed in float16, step skipped, "
                          f"loss scale {scale:g} -> {scaler.get_scale():g}")
        if step % cfg.log_interval == 0 or step + 1 == cfg.max_iters:
            lossf = mean(loss, world).item()  # synchronization point; norm is there by then
            require_finite(lossf, "loss", step, cfg)
            now = time.time()
            dt = (now - t_log) / (step + 1 - last_logged)
            t_log, last_logged = now, step + 1
            tokens_per_s, memory = tokens_per_step / dt, peak_memory(world.device)
            mfu = flops_per_step / dt / (peak * world.size) if peak else None
            print0(world, f"iter {step}: loss {lossf:.4f}, time {dt * 1000:.2f}ms, "
                          f"mfu {f'{mfu:.2%}' if mfu else 'n/a'}, {tokens_per_s:,.0f} tok/s, "
                          f"norm {norm:.2f}, mem {memory / 2**30:.2f}GiB, "
                          f"{duration(dt * (cfg.max_iters - step - 1))} left")
            metrics.write(dict(
                iter=step, loss=lossf, grad_norm=norm.item(), lr=optimizer.param_groups[0]["lr"],
                time_ms=dt * 1000, tokens_per_s=tokens_per_s, mfu=mfu, loss_scale=scale,
                peak_memory=memory, wall_s=now - t_start))
        step += 1

    # --- leave ---
    if saver:
        saver.finish(wait=True)
    metrics.close()
    stop.restore()
    del lock  # from here on the directory is free
    return lossf


def main(argv):
    if "--help" in argv or "-h" in argv:
        names = [arg.removeprefix("--model=") for arg in argv if arg.startswith("--model=")]
        return print(help_text(__doc__, *names[-1:]))
    train(load_config(argv))


if __name__ == "__main__":
    run(main, sys.argv[1:])

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
import signal
import sys
from dataclasses import replace

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the loop, Ctrl-C ends this at once

import torch

import checkpoint
import float8
import fsdp
from configurator import help_text, load_config, model_config, model_file, resolve, with_model
from data.loader import Batches, data_dir, read_meta
from metrics import Log, describe
from model import derive_seed
from optimizer import learning_rate_at, make_optimizer, require_gradients
from ranks import StopSignal, from_rank0, mean, print0, run, setup


def meta_model(cfg):
    """The config's model on the meta device: names, shapes, what trains; no memory, no values."""
    with torch.device("meta"):
        model = model_file(cfg.model).Model(model_config(cfg))
    fsdp.freeze(model, cfg.freeze)
    return model


def build(cfg, world, source=None):
    """(wrapped, model, optimizer): call `wrapped`, read names from `model`. All ranks, in order."""
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
    float8.scale_each_step(model, optimizer, cfg)
    return wrapped, model, optimizer


def open_start(cfg, world):
    """The Source that cfg.init_from names, None for a fresh start."""
    if cfg.init_from == "scratch":
        return None
    if cfg.init_from not in ("resume", "auto"):
        try:
            from huggingface import open_pretrained  # here, so that a fork can delete the file
        except ImportError:
            raise SystemExit(f"init_from={cfg.init_from} needs huggingface.py, which is not here")
        return from_rank0(world, lambda: open_pretrained(cfg.init_from))
    return checkpoint.find(cfg.out_dir, world)


def choose_start(cfg, world):
    """(cfg with the model's sizes, source, resumed: the run goes on where source ended)."""
    source = open_start(cfg, world)
    if source is None:
        if cfg.init_from == "resume":
            raise SystemExit(f"init_from=resume: no checkpoint in out_dir={cfg.out_dir}; use "
                             "scratch, or auto to resume only if there is one")
        return with_vocabulary(cfg), None, False
    theirs = with_model(cfg, source)  # or a line that says what is wrong there
    resumed = cfg.init_from in ("resume", "auto")
    if resumed:
        cfg = with_vocabulary(cfg, source)
    for line in checkpoint.compare(source, cfg, resumed):
        print0(world, line)
    if not resumed:  # a shorter context saves memory
        cfg = replace(theirs, block_size=min(cfg.block_size, theirs.block_size))
    return cfg, source, resumed


def with_vocabulary(cfg, source=None):
    """cfg with vocab_size from the data, else the config; a checkpoint's may be larger (padded)."""
    theirs = source.header["model_args"].get("vocab_size", 0) if source else 0
    meta = read_meta(data_dir(cfg.dataset))
    return replace(cfg, vocab_size=max(meta.get("vocab_size", theirs or cfg.vocab_size), theirs))


def train_step(wrapped, optimizer, scaler, batches, batch, step, cfg, world):
    """Accumulate, clip, update (all ranks). `batch` is the step's first micro-batch. Returns (mean
    loss of this rank's micro-batches, global gradient norm before clipping, first micro-batch of
    step + 1). The first two are 0-d tensors: reading them waits for the device."""
    accumulation = cfg.gradient_accumulation_steps // world.size
    for group in optimizer.param_groups:
        group["lr"] = learning_rate_at(step, cfg)
    total = torch.zeros((), device=world.device)
    for micro in range(accumulation):
        is_last = micro == accumulation - 1
        fsdp.set_grad_sync(wrapped, cfg, is_last)
        # dropout: by micro-batch, not by rank, so that the masks do not depend on the world size
        torch.manual_seed(derive_seed(cfg.seed, step, micro * world.size + world.rank))
        with fsdp.autocast(cfg, world.device):
            loss = wrapped(*batch)[1]  # a name for the logits would keep them through backward
        loss = loss / accumulation  # FSDP and DDP average over ranks; this, over micro-batches
        # fetch the next batch now, while the GPU is still computing
        batch = batches.train(step + 1, 0) if is_last else batches.train(step, micro + 1)
        scaler.scale(loss).backward()
        total += loss.detach()
    scaler.unscale_(optimizer)
    norm = fsdp.clip_grad_norm(wrapped, cfg.grad_clip, world)
    scaler.step(optimizer)  # float16: skipped, on all ranks alike, if a gradient overflowed
    scaler.update()
    # DDP's gradients are views of its buckets; set to None, the next ones would lie beside those
    optimizer.zero_grad(set_to_none=cfg.strategy != "ddp" or accumulation == 1)
    return total, norm, batch


def evaluate(wrapped, batches, cfg, world, stop):
    """{split: mean loss} over fixed windows, None after a stop signal (all ranks: it gathers)."""
    losses = {}
    dtype = torch.float32 if world.device.type == "mps" else torch.float64
    with fsdp.inference(wrapped):
        for split in ("train", "val"):
            total = torch.zeros(2, device=world.device, dtype=dtype)  # of losses, of weights
            for x, y, weight in batches.fixed(split):
                if stop.requested():
                    return None
                with fsdp.autocast(cfg, world.device):
                    loss = wrapped(x, y)[1]
                total += torch.stack((loss * weight, torch.full_like(loss, weight)))
            total = mean(total, world)
            losses[split] = (total[0] / total[1]).item()  # synchronization point
    return losses


def require_finite(value, what, step, cfg):
    """All ranks see the same value, so all stop together; no checkpoint is written."""
    if not math.isfinite(value):
        raise SystemExit(f"{what} is {value} at step {step}: lower learning_rate (now "
                         f"{cfg.learning_rate}), or try dtype=float32 (now {cfg.dtype}); the last "
                         f"checkpoint in {cfg.out_dir} is untouched")


def train(cfg):
    """The whole run (all ranks); returns the last logged training loss."""
    # --- set-up ---
    world = setup(cfg.device, cfg.backend)
    cfg = resolve(cfg, world)
    torch.set_float32_matmul_precision("high")  # TF32 on GPUs, as nanoGPT; CPUs do not change
    # the directory is this run's from here on; eval_only leaves everything as it is
    saver = None if cfg.eval_only else checkpoint.Saver(cfg.out_dir, world)
    cfg, source, resumed = choose_start(cfg, world)
    step = source.header["iter_num"] if resumed else 0
    best_val_loss = source.header["best_val_loss"] if resumed else 1e9
    batches = Batches(cfg, world)
    wrapped, model, optimizer = build(cfg, world, source)
    # float16 only; else its calls pass through
    scaler = torch.amp.GradScaler(world.device.type, enabled=cfg.dtype == "float16")
    if source and source.header.get("scaler"):
        scaler.load_state_dict(source.header["scaler"])
    if saver:
        saver.claim(cfg, source, resumed)
    for line in describe(cfg, model, batches, source, world):
        print0(world, line)
    del source  # unmaps its file, which may be deleted already, and on disk for the map alone
    log = Log(cfg, world, saver and saver.run_id, step, meta_model(cfg))
    stop = StopSignal(world)

    # --- the loop: every rank does the same; only rank 0 prints and writes ---
    batch = batches.train(step, 0)
    first_step, lossf = step, float("nan")
    while True:
        # evaluation and checkpoint
        stopped = stop.requested()  # by a scheduler's or the user's signal
        done = step >= cfg.max_iters or cfg.eval_only
        if not stopped and (done or step % cfg.eval_interval == 0):
            with log.paused():
                losses = evaluate(wrapped, batches, cfg, world, stop)
                stopped = losses is None
                if not stopped:
                    require_finite(losses["val"], "validation loss", step, cfg)
                    log.evaluation(step, losses)
                    improved = losses["val"] < best_val_loss
                    best_val_loss = min(best_val_loss, losses["val"])
                    if saver and step > first_step and (improved or cfg.always_save_checkpoint):
                        saver.save(model, optimizer, scaler, step, best_val_loss)

        # the end
        if stopped:
            remedy = "nothing to save yet"
            if step > first_step:
                name = "ckpt.pt" if cfg.always_save_checkpoint else "last.pt"  # ckpt.pt is the best
                saver.save(model, optimizer, scaler, step, best_val_loss, name)
                remedy = "continue with the same command and --init_from=resume"
            print0(world, f"stopped by a signal after step {step}; {remedy}")
        if stopped or done:
            break

        # one optimizer step
        if step == first_step and world.size > 1:
            require_gradients(model, batch, cfg, world)
        scale = scaler.get_scale() if scaler.is_enabled() else None  # float16: waits for the GPU
        loss, norm, batch = train_step(wrapped, optimizer, scaler, batches, batch, step, cfg, world)
        if saver:
            saver.finish()  # what was written meanwhile
        if scale and scaler.get_scale() < scale:
            print0(world, f"iter {step}: gradients overflowed in float16, step skipped, "
                          f"loss scale {scale:g} -> {scaler.get_scale():g}")
        if step % cfg.log_interval == 0 or step + 1 == cfg.max_iters:
            lossf = mean(loss, world).item()  # synchronization point; norm is there by then
            require_finite(lossf, "loss", step, cfg)
            log.step(step, lossf, norm.item(), optimizer.param_groups[0]["lr"], scale)
        step += 1

    # --- leave ---
    if saver:
        saver.finish(wait=True)
    log.close()
    return lossf


def main(argv):
    if "--help" in argv or "-h" in argv:
        names = [arg.removeprefix("--model=") for arg in argv if arg.startswith("--model=")]
        return print(help_text(__doc__, *names[-1:]))
    train(load_config(argv))


if __name__ == "__main__":
    run(main, sys.argv[1:])

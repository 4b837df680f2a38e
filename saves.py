"""
A run's directory and its saves: who may write there, when a checkpoint is due, which ones stay,
and how they are written while training goes on.

    directory = RunDirectory(cfg.out_dir)
    directory.lock()                          # rank 0, before it chooses a checkpoint
    run_id = directory.claim(source, resumed) # rank 0, once every check has passed
    saver = Saver(directory.path, run_id, cfg, world, source)
    saver.save(model, optimizer, scaler, step)  # if is_due(cfg, step, ...)
    saver.poll()                              # in each step: a save may have failed
    saver.finish()                            # at the end

checkpoint.py says what a checkpoint is.
"""

import fcntl
import math
import os
import secrets
import sys
import time
import warnings
from concurrent import futures
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor

import checkpoint
from checkpoint import STEP, complete_steps, flat_state
from configurator import as_dict
from data.loader import data_dir, read_meta
from fsdp import gather_full, tied_names
from ranks import TIMEOUT, all_reduce_mean_, from_rank0, print0

# DCP's, in one process; and torch 2.9's, of what it does itself.
warnings.filterwarnings("ignore", "torch.distributed is disabled|TypedStorage|Please use the new")

# ---------- who may write in a directory --------------------------------------


class RunDirectory:
    """out_dir, where one run at a time may write. A run locks it before it chooses a
    checkpoint, and claims it once every check has passed, so a refused run changes
    nothing. Only rank 0 calls the methods."""

    def __init__(self, out_dir):
        # Absolute, since the directory may be a link, or the current one.
        self.path = os.path.realpath(out_dir)
        self.lock_file = None  # the lock is held while this file is open

    def lock(self):
        """If the directory exists, keep other runs out until this process ends. The lock is on a
        file next to the directory, because that may be renamed."""
        if self.lock_file or not os.path.isdir(self.path):
            return
        self.lock_file = open(self.path + ".lock", "a+")
        try:
            fcntl.flock(self.lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SystemExit(
                f"out_dir={self.path} is in use by another run; wait until it ends (a shared disk "
                "keeps a dead node's lock for two minutes), or pass another --out_dir")
        except OSError as e:
            print(f"{self.path}: no locks here ({e.strerror}), so never start two runs there")

    def claim(self, source, resumed=False):
        """Make the directory if there is none, and return the run's id. A run that resumes here
        keeps its id, and a copy elsewhere gets its own. A new run moves the files of an earlier
        one aside, but not other runs' directories inside."""
        os.makedirs(self.path, exist_ok=True)
        self.lock()
        run_id = time.strftime("%Y%m%d-%H%M%S-") + secrets.token_hex(3)
        if resumed:
            is_copy = source.header.get("path", self.path) != self.path
            return run_id if is_copy else source.header.get("run", run_id)  # nanoGPT's have none
        of_a_run = ("ckpt.pt", STEP, "metrics.jsonl")
        earlier = [file for pattern in of_a_run for file in sorted(Path(self.path).glob(pattern))]
        if earlier:
            aside = f"{self.path}.{run_id}"
            os.makedirs(aside)
            for file in earlier:  # the newest step last: a kill on the way leaves it here
                file.rename(Path(aside, file.name))
            print(f"{self.path} had an earlier run; moved it to {aside}", flush=True)
        return run_id


# ---------- when one is due, and which ones stay ------------------------------


def is_due(cfg, step, evaluated, improved):
    """True if the run saves at this step: every save_interval steps, or at evaluations. With
    always_save_checkpoint=False only if the validation loss has improved."""
    if not cfg.always_save_checkpoint:
        return improved
    if cfg.save_interval:
        return step % cfg.save_interval == 0 or step >= cfg.max_iters
    return evaluated


def remove_older(newest, keep):
    """Remove sharded checkpoints older than `newest`, including any that a kill left
    half-written, but the newest `keep` that are complete, or all of these with keep=0."""
    # Keep those of later steps. This run found them damaged when it resumed an older one.
    complete = [path for path in complete_steps(newest.parent) if path <= newest]
    for path in newest.parent.glob(STEP):
        if path < newest and path not in complete[-keep:]:
            checkpoint.remove_sharded(path)


# ---------- a run's saves -----------------------------------------------------


class Saver:
    """Writes a run's checkpoints in the background, one at a time (all ranks)."""

    def __init__(self, out_dir, run_id, cfg, world, source):
        self.out_dir = out_dir
        self.cfg = cfg
        self.world = world
        header = source.header if source else {}
        self.best_val_loss = header.get("best_val_loss", 1e9)
        self.best_written = self.best_val_loss  # in the newest checkpoint
        # What all headers of this run say.
        self.header = dict(
            model_args=asdict(cfg.sizes),
            config=as_dict(cfg),
            meta=read_meta(data_dir(cfg.dataset)),
            run=run_id,
            path=self.out_dir,
            # The Hugging Face files of the model that the run began from: an export needs them.
            kept=header.get("kept"),
        )
        self.background = futures.ThreadPoolExecutor(1)
        self.saving = None  # the save in the background: a Future of what `write` returns
        self.failed = False  # True if the last save that ended has failed
        self.group = None
        if dist.is_initialized():
            # Background collectives must not mix with training's.
            self.group = dist.new_group(backend="gloo", timeout=TIMEOUT)

    def improves(self, val_loss):
        """True if this validation loss is the best so far (all ranks, which must agree)."""
        self.wait()  # if saving the best one failed, it no longer counts as the best
        best = self.best_val_loss
        self.best_val_loss = min(best, val_loss)
        return val_loss < best

    # --- 1) copy the state, while training waits

    def save(self, model, optimizer, scaler, step):
        """Save the state after this many steps. Returns once it is copied to host memory: all to
        rank 0's for a full checkpoint, each rank's rows to its own for a sharded one."""
        if self.cfg.checkpoint == "none":
            return
        print0(self.world, f"saving checkpoint to {self.cfg.out_dir}")
        self.wait()  # the check below may end the process, and would cut off the previous save
        start = time.perf_counter()
        tensors = flat_state(model, optimizer)
        require_finite_state(tensors, self.world, step)
        names = {p: name for name, p in model.named_parameters()}
        header = dict(
            self.header,
            param_names=[names[p] for group in optimizer.param_groups for p in group["params"]],
            param_groups=optimizer.state_dict()["param_groups"],
            ties=[tied for tied in tied_names(model) if f"model.{tied[0]}" in tensors],
            scaler=scaler.state_dict() or None,
            iter_num=step,
            best_val_loss=self.best_val_loss,
        )
        # Copy in this thread: a new thread's device is GPU 0, and its collectives would mix with
        # training's. (dcp.async_save copies twice, and blocks three times as long.)
        if self.cfg.checkpoint == "full":
            copies = {key: gather_full(t) for key, t in tensors.items()}
            name = "ckpt.pt"
        else:
            # `* 1` copies, and unlike clone() it drops the wrapper of torchao's float8 rows.
            copies = {key: (t * 1).cpu() for key, t in tensors.items()}
            name = f"step-{step:09d}"
        self.saving = self.background.submit(self.write, name, header, copies, start)

    # --- 2) write the copies, in the background

    def write(self, name, header, copies, start):
        """Write a checkpoint (all ranks). Returns its header, the seconds since start, and rank 0's
        line on why it failed, or None."""
        path = Path(self.out_dir, name)
        error = None
        try:
            if self.cfg.checkpoint == "sharded":
                # A killed run may have left a partial one there.
                from_rank0(self.world, lambda: checkpoint.remove_sharded(path), self.group)
                checkpoint.write_sharded(path, copies, header, self.group)
                if self.world.rank == 0:
                    remove_older(path, self.cfg.keep_checkpoints)
            elif self.world.rank == 0:
                checkpoint.write_ckpt_pt(path, copies, header)
        except dcp.CheckpointException as e:  # on all ranks, whichever failed
            error, _ = next(iter(e.failures.values()))
            if isinstance(error, SystemExit):  # no later save would succeed
                raise error
        except (OSError, RuntimeError) as e:
            error = e
        if error and self.cfg.checkpoint == "sharded" and self.world.rank == 0:
            checkpoint.remove_sharded(path)  # the next save may need the room
        line = error and f"cannot write {path}: {error}; what was there before is untouched"
        line = from_rank0(self.world, lambda: line, self.group)
        return header, time.perf_counter() - start, line

    # --- 3) how it ended

    def poll(self):
        """Report the save in the background if it has ended."""
        if self.saving and self.saving.done():
            self.wait()

    def wait(self):
        """Wait for the save in the background, if there is one, and report it. If it failed,
        print why and go on: the next save tries again."""
        if not self.saving:
            return
        future = self.saving
        self.saving = None
        header, seconds, line = future.result()
        self.failed = line is not None
        if self.failed:
            print0(self.world, line, file=sys.stderr)
            self.best_val_loss = self.best_written
            return
        self.best_written = header["best_val_loss"]
        print0(self.world, f"saved step {header['iter_num']} in {seconds:.2f}s")

    def finish(self):
        """Wait for the run's last save. SystemExit if it failed."""
        self.wait()
        if self.failed:
            raise SystemExit(
                f"the last save in {self.cfg.out_dir} failed, as its line says: mend that, and "
                "continue with --init_from=auto")

    # --- numbers that aren't finite are never saved

    def require_finite(self, loss, what, step):
        """SystemExit if the loss is NaN or infinite. All ranks have the same loss, so
        all of them stop without saving."""
        if not math.isfinite(loss):
            self.wait()  # the save in the background is of an earlier, good step
            raise SystemExit(
                f"{what} is {loss} at step {step}: lower learning_rate (now "
                f"{self.cfg.learning_rate}), or try dtype=float32 (now {self.cfg.dtype}); what "
                f"was saved in {self.cfg.out_dir} before is untouched")


def require_finite_state(tensors, world, step):
    """SystemExit on all ranks if any rank has a NaN or an infinity (collective)."""
    norms = []
    for t in tensors.values():
        rows = t.to_local() if isinstance(t, DTensor) else t
        norms.append(rows.float().norm(1).to(world.device))
    # One copy to the host, since it waits for the GPU. A mean keeps NaN and infinity.
    norm = all_reduce_mean_(torch.stack(norms).sum().cpu(), world)
    if not norm.isfinite():
        raise SystemExit(
            f"a weight or its optimizer state is not finite (NaN or infinity) after step {step}, "
            "and nothing is saved: try a lower learning_rate, or grad_clip=1.0")

"""
A run's directory and its saves: who may write there, when a checkpoint is due, which ones stay,
and how they are written while training goes on.

    directory = RunDirectory(cfg.out_dir)
    directory.lock()                          # rank 0, before it chooses a checkpoint
    run_id = directory.claim(source, resumed) # rank 0, once every check has passed
    saver = Saver(directory.path, run_id, cfg, world, source, resumed, batches, report)
    saver.save(model, optimizer, scaler, step, improved)  # if is_due(cfg, step, ...)
    saver.poll()                              # in each step: a save may have failed
    saver.finish()                            # at the end

    python saves.py full out-x    # out-x's newest checkpoint, sharded, as out-x/ckpt.pt

checkpoint.py says what a checkpoint is.
"""

import fcntl
import math
import os
import sys
import time
import warnings
from concurrent import futures
from contextlib import suppress
from dataclasses import asdict

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor

from checkpoint import (
    HEADER,
    Writer,
    cannot_write,
    complete_steps,
    find,
    flat_state,
    remove_sharded,
    steps,
    write_ckpt_pt,
)
from configurator import as_dict
from data.files import sync
from data.loader import data_dir, read_meta
from fsdp import gather_full, tied_names
from ranks import PATIENCE, World, all_reduce_mean_, from_rank0, print0, run

warnings.filterwarnings("ignore", "torch.distributed is disabled")  # DCP, in one process

# ---------- who may write in a directory --------------------------------------


class RunDirectory:
    """out_dir, where one run at a time may write. A run locks it before it chooses a
    checkpoint, and claims it once every check has passed, so a refused run changes
    nothing. Only rank 0 calls the methods."""

    def __init__(self, out_dir):
        # Absolute, since the directory may be a link, or the current one.
        self.path = os.path.realpath(out_dir)
        self.lock_file = None  # the lock is held while this file is open

    def lock(self, seconds=120):
        """If the directory exists, keep other runs out until this process ends. The lock
        is on a file next to it, because the directory may be renamed.
        seconds: to wait for another node, since a shared disk keeps a dead one's lock a while."""
        if self.lock_file or not os.path.isdir(self.path):
            return
        if os.path.exists(os.path.join(self.path, HEADER)):
            raise SystemExit(f"out_dir={self.path} is a checkpoint: pass it as --init_from")
        path = self.path + ".lock"
        try:
            self.lock_file = open(path, "a+")
        except OSError as e:
            raise SystemExit(cannot_write(path, e))
        try:
            fcntl.flock(self.lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.lock_file.seek(0)
            holder = self.lock_file.read()
            if seconds <= 0 or holder.endswith(f" on {os.uname().nodename}"):
                raise SystemExit(
                    f"out_dir={self.path} is in use by {holder}; wait until that run ends, or "
                    "pass another --out_dir")
            if seconds == 120:
                print(f"out_dir={self.path} is in use by {holder}: waiting for two minutes")
            time.sleep(10)
            self.lock_file = None
            return self.lock(seconds - 10)
        except OSError as e:
            print(f"{path}: no locks here ({e.strerror}), so never start two runs there")
        self.lock_file.truncate(0)
        me = f"process {os.getpid()} on {os.uname().nodename}"
        print(me, end="", file=self.lock_file, flush=True)

    def claim(self, source, resumed=False):
        """Make the directory if there is none, and return the run's id. A resumed run
        keeps its source's id. A new run renames the whole directory of an earlier one."""
        run_id = time.strftime(f"%Y%m%d-%H%M%S-{os.getpid()}")
        try:
            os.makedirs(self.path, exist_ok=True)
            self.lock()
            if resumed:
                return source.header.get("run") or run_id  # nanoGPT's have none
            names = os.listdir(self.path)
            of_a_run = {"ckpt.pt", "last.pt", "metrics.jsonl"}
            milestones = steps(self.path, ".pt")
            if steps(self.path) or milestones or of_a_run.intersection(names):
                aside = f"{self.path}.{run_id}"
                os.rename(self.path, aside)
                os.makedirs(self.path)
                print(f"{self.path} had an earlier run; moved it to {aside}", flush=True)
        except OSError as e:
            raise SystemExit(cannot_write(self.path, e))
        return run_id


# ---------- when one is due, and which ones stay ------------------------------


def is_due(cfg, step, evaluated, improved):
    """True if the run saves at this step: every save_interval steps, else at evaluations.
    Milestones, and the best one if it is kept, are always saved."""
    if cfg.save_interval:
        due = step % cfg.save_interval == 0 or step >= cfg.max_iters
    else:
        due = evaluated and cfg.always_save_checkpoint
    is_best = improved and not cfg.always_save_checkpoint
    return due or is_best or is_milestone(step, cfg)


def is_milestone(step, cfg):
    """True if this step's checkpoint is never removed."""
    return cfg.keep_every > 0 and step % cfg.keep_every == 0


def remove_older(path, best, cfg):
    """Remove sharded checkpoints older than `path`, including any that a kill left
    half-written. Keep the newest cfg.keep_checkpoints, milestones, and the best one, and
    point the link out_dir/best at it."""
    out_dir, this = os.path.split(path)
    # Leave higher numbers alone: they are damaged, or the run would have resumed them.
    complete = [name for name in complete_steps(out_dir) if name <= this]
    stay = complete[-cfg.keep_checkpoints:]
    stay += [name for name in complete if is_milestone(int(name.removeprefix("step-")), cfg)]
    if best in complete:
        stay.append(best)
    for name in steps(out_dir):
        if name < this and name not in stay:
            remove_sharded(os.path.join(out_dir, name))
    if best in complete:
        tmp = os.path.join(out_dir, "best.tmp")
        with suppress(FileNotFoundError):
            os.remove(tmp)
        os.symlink(best, tmp)
        os.replace(tmp, os.path.join(out_dir, "best"))
        sync(out_dir)


# ---------- a run's saves -----------------------------------------------------


class Saver:
    """Writes a run's checkpoints in the background, one at a time (all ranks).

    report: function of (step, seconds, seconds in which training was blocked), called after each
    save that succeeded."""

    def __init__(self, out_dir, run_id, cfg, world, source, resumed, batches, report):
        self.out_dir = out_dir
        self.run_id = run_id
        self.cfg = cfg
        self.world = world
        self.report = report
        # The Hugging Face files of the model that the run began from: an export needs them.
        self.kept = source.header.get("kept") if source else None
        self.meta = from_rank0(world, lambda: read_meta(data_dir(cfg.dataset)))
        # A resumed run that finds others says so.
        self.tokens = {cfg.dataset: batches.files["train"].tokens_in_all}
        self.best = None  # name of the best sharded checkpoint
        if resumed:
            self.best = source.header.get("best")
        self.best_val_loss = source.header["best_val_loss"] if source else 1e9
        self.best_written = self.best_val_loss  # in the newest checkpoint's header
        self.background = futures.ThreadPoolExecutor(1)
        self.saving = None  # the save in the background: its future, header, start, blocked seconds
        self.failed = False  # True if the last save that ended has failed
        self.group = None
        if dist.is_initialized():
            # Background collectives must not mix with training's, and may wait long for
            # the slowest disk.
            self.group = dist.new_group(backend="gloo", timeout=PATIENCE)

    def improves(self, val_loss):
        """True if this validation loss is the best so far (all ranks, which must agree)."""
        self.wait()  # a best one that could not be saved is none
        before = self.best_val_loss
        self.best_val_loss = min(before, val_loss)
        return val_loss < before

    # --- 1) copy the state, while training waits

    def save(self, model, optimizer, scaler, step, improved=False):
        """Save the state after this many steps. Returns once it is copied to host memory: all to
        rank 0's for a full checkpoint, each rank's rows to its own for a sharded one.
        improved: the validation loss is the best so far."""
        if self.cfg.checkpoint == "none":
            return
        print0(self.world, f"saving checkpoint to {self.cfg.out_dir}")
        before = time.perf_counter()
        self.wait()  # the check below may end the process, and would cut off the previous save
        start = time.perf_counter()
        tensors = flat_state(model, optimizer)
        require_finite_state(tensors, self.world, step)
        header = self.new_header(model, optimizer, scaler, tensors, step, improved)
        # Copy in this thread: a new thread's device is GPU 0, and its collectives would mix with
        # training's. (dcp.async_save copies twice, and blocks three times as long.)
        if self.cfg.checkpoint == "full":
            copies = {key: gather_full(t) for key, t in tensors.items()}
            # With always_save_checkpoint=False only the best one is called ckpt.pt.
            name = "ckpt.pt" if improved or self.cfg.always_save_checkpoint else "last.pt"
        else:
            copies = {key: t.to("cpu", copy=True) for key, t in tensors.items()}
            name = f"step-{step:09d}"
            # A killed run may have left a partial one there.
            from_rank0(self.world, lambda: remove_sharded(os.path.join(self.out_dir, name)))
        blocked = time.perf_counter() - before
        future = self.background.submit(self.write, name, header, copies)
        self.saving = future, header, start, blocked

    def new_header(self, model, optimizer, scaler, tensors, step, improved):
        """A checkpoint's description of its run and its parameters."""
        names = {p: name for name, p in model.named_parameters()}
        params = [p for group in optimizer.param_groups for p in group["params"]]
        is_best = improved and not self.cfg.always_save_checkpoint
        return dict(
            model_args=asdict(self.cfg.sizes),
            config=as_dict(self.cfg),
            param_names=[names[p] for p in params],
            param_groups=optimizer.state_dict()["param_groups"],
            ties=[tied for tied in tied_names(model) if f"model.{tied[0]}" in tensors],
            scaler=scaler.state_dict() or None,
            meta=self.meta,
            torch=str(torch.__version__),
            run=self.run_id,
            kept=self.kept,
            tokens=self.tokens,
            iter_num=step,
            best_val_loss=self.best_val_loss,
            best=f"step-{step:09d}" if is_best else self.best,
        )

    # --- 2) write the copies, in the background

    def write(self, name, header, tensors):
        """Write a checkpoint (all ranks). Returns when it was done, and rank 0's line on why it
        failed, or None."""
        path = os.path.join(self.out_dir, name)
        step = header["iter_num"]
        line = None
        try:
            if self.cfg.checkpoint == "sharded":
                self.write_sharded(path, header, tensors)
            elif self.world.rank == 0:
                names = [name]
                if is_milestone(step, self.cfg):
                    names.insert(0, f"step-{step:09d}.pt")
                write_ckpt_pt(self.out_dir, names, tensors, header)
        except OSError as e:
            line = cannot_write(path, e)
        line = from_rank0(self.world, lambda: line, self.group)
        return time.perf_counter(), line

    def write_sharded(self, path, header, rows):
        """All ranks write their rows, and then rank 0 removes older checkpoints."""
        # From the second save on ranks only tell rank 0 that their plans are the same.
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
        cause = None
        try:
            dcp.save(
                rows, storage_writer=Writer(path, header), planner=planner,
                process_group=self.group)
        except dcp.CheckpointException as e:  # on all ranks, whichever failed
            cause, _ = next(iter(e.failures.values()))
        if cause:
            if self.world.rank == 0:
                remove_sharded(path)  # the next save may need the room
            raise cause  # `write` reports an OSError; others end the run: a bug, or no shared disk
        if self.world.rank == 0:
            self.best = header["best"]
            remove_older(path, self.best, self.cfg)

    # --- 3) how it ended

    def poll(self):
        """Report the save in the background if it has ended."""
        if self.saving and self.saving[0].done():
            self.wait()

    def wait(self):
        """Wait for the save in the background, if there is one, and report it. If it failed,
        print why and go on: the next save tries again."""
        if not self.saving:
            return
        future, header, start, blocked = self.saving
        self.saving = None
        end, line = future.result()
        self.failed = line is not None
        if self.failed:
            print0(self.world, line, file=sys.stderr)
            self.best_val_loss = self.best_written  # else a best one that is lost would bar others
            return
        self.best_written = header["best_val_loss"]
        self.report(header["iter_num"], end - start, blocked)

    def finish(self):
        """Wait for the run's last save. SystemExit if it failed."""
        self.wait()
        if self.failed:
            raise SystemExit(
                f"the last save in {self.cfg.out_dir} failed, as its line says: mend that, and "
                "continue with --init_from=auto")

    # --- what is not finite is not saved

    def require_finite(self, loss, what, step):
        """SystemExit if the loss is NaN or infinite. All ranks have the same loss, so
        all of them stop without saving."""
        if math.isfinite(loss):
            return
        self.wait()  # the save in the background is of an earlier, good step
        rate = self.cfg.learning_rate
        line = f"{what} is {loss} at step {step}: lower learning_rate (now {rate})"
        if self.cfg.dtype != "float32":
            line += f", or try dtype=float32 (now {self.cfg.dtype})"
        raise SystemExit(f"{line}; what was saved in {self.cfg.out_dir} before is untouched")


def require_finite_state(tensors, world, step):
    """SystemExit on all ranks if any rank has a NaN or an infinity (collective)."""
    norms = []
    for t in tensors.values():
        rows = t.to_local() if isinstance(t, DTensor) else t
        norms.append(rows.float().norm(1).to(world.device))
    # One copy to the host, since it waits for the GPU. A mean keeps NaN and infinity.
    norms = all_reduce_mean_(torch.stack(norms).cpu(), world)
    for key, norm in zip(tensors, norms):
        if not norm.isfinite():
            raise SystemExit(
                f"{key} is not finite (NaN or infinity) after step {step} and is not saved: "
                "try a lower learning_rate, or grad_clip=1.0")


# ---------- the command -------------------------------------------------------


def main(argv):
    if "--help" in argv or "-h" in argv:
        print(__doc__.strip())
        return
    if len(argv) != 2 or argv[0] != "full":
        raise SystemExit("usage: python saves.py full OUT_DIR")
    out_dir = argv[1]
    directory = RunDirectory(out_dir)
    directory.lock()  # a run there might remove what we read
    source = find(out_dir, World())
    if source is None:
        raise SystemExit(f"{out_dir}: no checkpoint there")
    if not source.sharded:
        print(f"{source.path} is a full checkpoint already")
        return
    path = os.path.join(directory.path, "ckpt.pt")
    del source.header["files"]
    flat = {key: source.whole(key) for key in source.shapes}
    try:
        write_ckpt_pt(directory.path, ["ckpt.pt"], flat, source.header)
    except OSError as e:
        raise SystemExit(cannot_write(path, e))
    print(f"{source.path} -> {path}")


if __name__ == "__main__":
    run(main, sys.argv[1:])

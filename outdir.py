"""
out_dir: one run at a time writes there, nothing is lost, and nothing is half-written.

    lock = hold(cfg.out_dir, world)            # before a checkpoint is chosen
    run_id = claim(cfg, source, world)         # a new run moves an older one's files aside
    with writing(path), atomic(path) as tmp: ...
"""

import fcntl
import glob
import os
import secrets
import socket
import time
from contextlib import contextmanager

import torch
from torch.distributed.checkpoint.api import CheckpointException

from ranks import from_rank0, mean

# ---------- one run a directory -----------------------------------------------


def claim(cfg, source, world):
    """The id of the run, which is source's, or a new one (None) that moves what is there aside. All
    ranks; SystemExit if a sharded checkpoint could not be read by all."""
    def on_rank0():
        run = source.header.get("run") if source else None
        run = run or time.strftime("%Y%m%d-%H%M%S-") + secrets.token_hex(2)
        if source is None:
            with writing(cfg.out_dir):
                set_aside(cfg.out_dir, run)
        return run

    if cfg.checkpoint == "sharded":
        require_shared(cfg.out_dir, world)
    return from_rank0(world, on_rank0)


def hold(out_dir, world):
    """Make out_dir, and lock it until this process ends: rank 0 returns the lock, to keep (all)."""
    lock = None

    def on_rank0():
        nonlocal lock
        with writing(out_dir):
            os.makedirs(out_dir, exist_ok=True)
            lock = lock_directory(out_dir)

    from_rank0(world, on_rank0)
    return lock


def lock_directory(out_dir):
    """An open file whose lock ends with this process, however it ends. SystemExit if it is held."""
    file = open(os.path.join(out_dir, "lock"), "a+")
    file.seek(0)
    for _ in range(50):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:  # 10 s: ranks that lost their torchrun finish a step first
            time.sleep(0.2)
        except OSError:  # some network file systems have no locks
            print(f"{out_dir}: no file locks there, so never start two runs in it")
            return file
    else:
        raise SystemExit(f"out_dir={out_dir} is in use by {file.read()}; wait until that run ends, "
                         "or pass another --out_dir")
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()
    return file


def set_aside(out_dir, run):
    """Move another run's files to out_dir/before-<run>."""
    names = []
    for pattern in ("ckpt.pt", "last.pt", "latest", "step-*", "events.out.*", "metrics.jsonl"):
        names += glob.glob(pattern, root_dir=out_dir)
    if names:
        aside = os.path.join(out_dir, f"before-{run}")
        os.makedirs(aside)
        for name in names:
            os.rename(os.path.join(out_dir, name), os.path.join(aside, name))
        print(f"{out_dir} has an earlier run; moved it to {aside}", flush=True)


def require_shared(out_dir, world):
    """SystemExit on every rank unless all see one out_dir: rank 0 leaves a token there."""
    def leave_token():
        token = os.path.join(out_dir, f"token-{secrets.token_hex(8)}")
        with writing(token):
            open(token, "w").close()
        return token

    token = from_rank0(world, leave_token)
    seen = mean(torch.tensor(float(os.path.exists(token))), world)
    if world.rank == 0:
        os.remove(token)
    if seen < 1:
        raise SystemExit(f"out_dir={out_dir} is not the same directory on all nodes, and sharded "
                         "checkpoints need that; use a shared disk, or --checkpoint=full")


# ---------- writing files -----------------------------------------------------

# torch.save raises RuntimeError on a full disk; CheckpointException is no Exception
WRITE_ERRORS = (OSError, RuntimeError, CheckpointException)


@contextmanager
def atomic(path):
    """A temporary name to write to; becomes `path` if the block ends well, else disappears."""
    tmp = path + ".tmp"
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    try:
        yield tmp
        sync(tmp)
        os.replace(tmp, path)
        sync(os.path.dirname(path) or ".")  # the rename itself
    except BaseException:
        if os.path.exists(tmp):
            os.remove(tmp)
        raise


def sync(path):
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def writing(path):
    """A failure to write inside is one line."""
    try:
        yield
    except torch.OutOfMemoryError:  # a RuntimeError too; ranks.run knows what to say
        raise
    except WRITE_ERRORS as e:
        if isinstance(e, CheckpointException):
            e, _ = next(iter(e.failures.values()))  # the first rank's
        raise SystemExit(f"cannot write {path}: {first_line(e)}; the previous checkpoint is "
                         "untouched. Make room, or pass another --out_dir")


def first_line(e):
    return (str(e).strip() or type(e).__name__).splitlines()[0]

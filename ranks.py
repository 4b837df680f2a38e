"""
Processes: who am I among the ranks, how a run starts, and how it leaves.

    world = setup(cfg.device, cfg.backend)   # rank, size, device; the process group under torchrun
    print0(world, "once, not once a rank")
    stop = StopSignal(world)                 # SIGTERM, Ctrl-C: all ranks stop after the same step
    run(main, sys.argv[1:])                  # a user's mistake is one line and exit code 1
"""

import functools
import os
import re
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

PATIENCE = timedelta(hours=12)  # of waits for one rank's disk or network


@dataclass(frozen=True)
class World:
    """This process among the others."""
    rank: int = 0
    size: int = 1
    device: torch.device = torch.device("cpu")
    local_size: int = 1  # ranks on this node
    parent: int = 0  # torchrun's process


def setup(device, backend):
    """The World of this process. Under torchrun, which sets RANK, also opens the process group."""
    env = {"LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, **os.environ}
    distributed = "RANK" in env
    if distributed:
        rank, size, local_rank = (int(env[k]) for k in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
        device, node = pick_device(device, local_rank), int(env["LOCAL_WORLD_SIZE"])
        world = World(rank, size, device, node, os.getppid())
    else:
        world = World(device=pick_device(device))
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)  # first, or every rank opens a context on GPU 0
    if distributed and not dist.is_initialized():
        # NCCL never alone: offloaded gradients, stop flags and objects go through the CPU
        nccl = world.device.type == "cuda" and backend != "gloo"
        dist.init_process_group("cpu:gloo,cuda:nccl" if nccl else "gloo", store=fresh_store(),
                                rank=rank, world_size=size, timeout=timedelta(minutes=10))
    if distributed:
        patient_group()  # now, while all ranks are here
    return world


@functools.cache
def patient_group():
    """The ranks as a group that waits for hours: while rank 0 writes a checkpoint, or downloads."""
    return dist.new_group(backend="gloo", timeout=PATIENCE)


def fresh_store():
    """
    torchrun's store outlives a restart of the ranks (pytorch issue 135712), so a restarted rank
    could read the address that its dead peer left there. A new prefix per start prevents that.
    Across nodes restart counts differ; there docs/clusters.md exports a variable instead.
    """
    env = os.environ
    if env.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or env.get("GROUP_WORLD_SIZE") != "1":
        return None
    store = dist.TCPStore(env["MASTER_ADDR"], int(env["MASTER_PORT"]), is_master=False)
    return dist.PrefixStore("start " + env["TORCHELASTIC_RESTART_COUNT"], store)


def pick_device(name, local_rank=None):
    """'auto', 'cpu', 'mps', 'cuda' or 'cuda:1'; under torchrun, this local rank's own GPU."""
    mps = torch.backends.mps.is_available()
    if name == "auto" and torch.cuda.is_available():
        name = "cuda"
    elif name == "auto":
        name = "mps" if mps and local_rank is None else "cpu"
    kind, _, index = name.partition(":")
    index = int(index or 0) if local_rank is None else local_rank
    available = {"cuda": torch.cuda.device_count(), "mps": int(mps), "cpu": sys.maxsize}
    if index >= available.get(kind, 0):
        fewer = "" if local_rank is None else "fewer processes per node, or "
        raise SystemExit(f"device={name}: this machine has {available.get(kind, 0)} of that kind, "
                         f"and number {index} was requested; use {fewer}--device=cpu")
    return torch.device(kind, index) if kind == "cuda" else torch.device(kind)


def print0(world, *args):
    if world.rank == 0:
        try:
            print(*args, flush=True)
        except OSError:  # the terminal was closed: the run goes on, and saves when SIGHUP says so
            sys.stdout = open(os.devnull, "w")


def mean(x, world, patient=False):
    """The mean of tensor x over all ranks, in place (collective). patient: for hours."""
    if world.size > 1:
        dist.all_reduce(x, group=patient_group() if patient else None)
        x /= world.size
    return x


def from_rank0(world, action):
    """action() on rank 0; what it returns, or its SystemExit, on every rank (collective)."""
    box = [None, None]  # its value, or what is wrong
    if world.rank == 0:
        try:
            box[0] = action()
        except SystemExit as e:
            box[1] = e.code
    if world.size > 1:
        dist.broadcast_object_list(box, src=0, group=patient_group(), device=torch.device("cpu"))
    if box[1]:
        raise SystemExit(box[1])
    return box[0]


class StopSignal:
    """
    SIGTERM, SIGINT and SIGHUP end the run on all ranks after this step or the next; a second one
    ends this rank immediately. The ranks agree by an all-reduce of one number beside each step.
    """
    number = 0  # the first signal that this process got

    def __init__(self, world):
        self.world, self.at = world, 0.0
        self.flag, self.work = torch.zeros(1), None  # what the ranks agree on
        self.before = {n: signal.signal(n, self.handle)
                       for n in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
                       if signal.getsignal(n) != signal.SIG_IGN}  # nohup ignores SIGHUP

    def handle(self, number, frame):
        if not self.number:
            StopSignal.number, self.at = number, time.time()
        elif time.time() - self.at > 2:  # within 2 s it is the same Ctrl-C, forwarded by torchrun
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def start(self):
        orphan = self.world.parent not in (0, os.getppid())  # torchrun was killed
        self.flag[0] = 2 if orphan else bool(self.number)
        if self.world.size > 1:
            self.work = dist.all_reduce(self.flag, dist.ReduceOp.MAX, async_op=True)

    def received(self):
        """After what start() came before: True on every rank or on none. SystemExit if the launcher
        is gone: a new run may have taken over, so this one must not write any more."""
        if self.work:
            self.work.wait()
            self.work = None
        if self.flag == 2:
            raise SystemExit("torchrun is gone; this run ends without saving")
        return bool(self.flag)

    def restore(self):
        StopSignal.number = 0
        for number, handler in self.before.items():
            signal.signal(number, handler)


def out_of_memory(e):
    """What to say if that is what e is. PyTorch's CPU allocator has no class for it."""
    if isinstance(e, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(e):
        return (f"out of memory: {str(e).splitlines()[0]}; lower batch_size, block_size or the "
                "model's sizes, or see what fits with python plan.py")


def run(main, *args):
    """
    Call main(*args) and leave: a SystemExit's text is one line and exit code 1.

    With gloo's threads alive one interpreter in ten aborts in its own clean-up, after all work is
    done (exit code -6). So a process with a group leaves through os._exit.
    """
    code, wait = 0, False
    try:
        main(*args)
    except SystemExit as e:
        code = e.code or 0
        wait = int(os.environ.get("LOCAL_RANK", 0)) > 0  # all saw the same: local rank 0 says it
    except BaseException as e:
        code = out_of_memory(e) or traceback.format_exc()
        wait = dist.is_initialized() and isinstance(e, RuntimeError)  # or a peer left, and said why
        if StopSignal.number and re.search("by peer|Broken pipe|remote process", str(e)):
            code = 1  # torchrun asked this rank to end too, before it could notice
    if isinstance(code, str):
        if wait:  # if another rank has failed, torchrun ends this one meanwhile
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # StopSignal would only note it
            time.sleep(5)
        print(code, file=sys.stderr)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    if dist.is_initialized():
        if code == 0:
            dist.all_reduce(torch.zeros(1))  # a barrier: others may still use our connections
        os._exit(code)
    sys.exit(code)

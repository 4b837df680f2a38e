"""
Processes: who am I among the ranks, how a run starts, and how it leaves.

    world = setup(cfg.device, cfg.backend)   # rank, size, device; the process group under torchrun
    stop = StopSignal(world)                 # SIGTERM, Ctrl-C: all ranks stop after the same step
    run(main, sys.argv[1:])                  # a user's mistake is one line and exit code 1
"""

import functools
import os
import signal
import socket
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
    rank: int = 0
    size: int = 1
    device: torch.device = torch.device("cpu")
    local_size: int = 1  # ranks on this node


def setup(device, backend):
    """The World of this process. Under torchrun, which sets RANK, also opens the process group."""
    env = {"LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, **os.environ}
    if "RANK" not in env:
        return World(device=pick_device(device))
    if "TORCHELASTIC_RUN_ID" in env:  # Linux ends a rank with its torchrun: a new run may take over
        # private, as PyTorch's spawn has it; where it is missing, nothing happens
        getattr(torch.multiprocessing, "_prctl_pr_set_pdeathsig", id)(signal.SIGKILL)
    rank, size, local_rank, local_size = (
        int(env[k]) for k in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    device = pick_device(device, local_rank)
    if not dist.is_initialized():
        try:
            # torchrun's store is there before its ranks; PyTorch would try for minutes, and log it
            if env.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
                socket.create_connection((env["MASTER_ADDR"], env["MASTER_PORT"]), 60).close()
            store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=60)))
        except (OSError, RuntimeError):
            raise SystemExit(f"torchrun at {env['MASTER_ADDR']} does not answer; start it again")
        store.set_timeout(timedelta(minutes=10))
        if env.get("GROUP_WORLD_SIZE") == "1":  # nodes count restarts apart: see docs/clusters.md
            # torchrun's store outlives a restart (pytorch issue 135712): without a new prefix a
            # restarted rank could call the address that its dead peer left there
            store = dist.PrefixStore("start " + env["TORCHELASTIC_RESTART_COUNT"], store)
        # NCCL never alone: offloaded gradients, stop flags and objects go through the CPU
        nccl = device.type == "cuda" and backend != "gloo"
        dist.init_process_group("cpu:gloo,cuda:nccl" if nccl else "gloo", store=store, rank=rank,
                                world_size=size, timeout=timedelta(minutes=10))
    patient_group()  # now, while all ranks are here
    return World(rank, size, device, local_size)


@functools.cache
def patient_group():
    """The ranks as a group that waits for hours: while rank 0 writes a checkpoint, or downloads."""
    return dist.new_group(backend="gloo", timeout=PATIENCE)


def pick_device(name, local_rank=None):
    """'auto', 'cpu', 'mps', 'cuda' or 'cuda:1'; under torchrun, this local rank's own GPU."""
    count = {"cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available()),
             "cpu": sys.maxsize}
    if name == "auto":
        kinds = ("cuda", "mps", "cpu") if local_rank is None else ("cuda", "cpu")
        name = next(kind for kind in kinds if count[kind])
    kind, _, index = name.partition(":")
    index = int(index or 0) if local_rank is None else local_rank
    if index >= count[kind]:
        raise SystemExit(f"device={name}: this machine has {count[kind]} of that kind; use "
                         "--device=cpu, or fewer processes a node")
    if kind != "cuda":
        return torch.device(kind)
    torch.cuda.set_device(index)  # now, or every rank opens a context on GPU 0
    return torch.device(kind, index)


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
    """SIGTERM, SIGINT, SIGHUP: all ranks stop after the same step. A second one ends at once."""
    number = 0  # the first signal that this process got

    def __init__(self, world):
        self.world, self.time = world, 0.0
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
                signal.signal(number, self.handle)

    def handle(self, number, frame):
        if not self.number:
            StopSignal.number, self.time = number, time.time()
        elif time.time() - self.time > 2:  # within 2 s: the same Ctrl-C, forwarded by torchrun
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def requested(self):
        """Has any rank got a signal? The same answer on all of them (collective)."""
        flag = torch.tensor(self.number)
        if self.world.size > 1:
            dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag)


def peer_left(e):
    """Did a connection break because another rank ended? (An OSError is of a file or download.)"""
    words = ("by peer", "Broken pipe", "Connection refused", "remote process")
    return isinstance(e, RuntimeError) and any(word in str(e) for word in words)


def run(main, *args):
    """Call main(*args) and leave: a SystemExit's text is one line and exit code 1, said by local
    rank 0. With gloo's threads alive one interpreter in ten aborts in its own clean-up (exit code
    -6), after all work is done, so a process with a group leaves through os._exit."""
    code, wait, left = 0, False, False
    try:
        main(*args)
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT  # as a shell says it
    except SystemExit as e:
        code = e.code or 0
        wait = int(os.environ.get("LOCAL_RANK", 0)) > 0  # local rank 0 says the same
    except BaseException as e:
        code = traceback.format_exc()
        first, left = str(e).partition("\n")[0], peer_left(e)
        words = ("can't allocate memory", "size calculation overflowed")  # RuntimeErrors of CPUs
        if isinstance(e, (torch.OutOfMemoryError, MemoryError)) or any(w in str(e) for w in words):
            code = f"out of memory: {first}; lower batch_size or the model's sizes, see plan.py"
        elif left:
            code = f"another rank ended, or the network failed: {first}"
        wait = "RANK" in os.environ and isinstance(e, RuntimeError)  # maybe another rank's fault
    if isinstance(code, str):
        if wait:  # if another rank says it, torchrun ends this one meanwhile
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # StopSignal would only note it
            time.sleep(5)
        if not (left and StopSignal.number):  # torchrun has asked this one to end too
            print(code, file=sys.stderr)
        code = 1
    sys.stdout.flush()
    if dist.is_initialized():
        if code == 0:
            dist.all_reduce(torch.zeros(1))  # a barrier: others may still use our connections
        os._exit(code)
    sys.exit(code)

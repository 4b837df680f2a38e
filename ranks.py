"""
Processes: start them, agree on values, stop them together, and leave.

    world = setup("auto", "auto")            # rank, size, device; opens the process group
    stop = StopSignal(world)                 # SIGTERM, Ctrl-C: all ranks stop after the same step
    run(main, sys.argv[1:])                  # a user's mistake prints one line, exit code 1

torchrun starts the processes and tells each its place in environment variables: RANK,
WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE. Without them this process is alone.
"""

import os
import signal
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

# A rank that waits longer for the others gives up. Long enough for one rank to download a model, or
# to write a whole checkpoint: the others wait for it in a collective over gloo.
TIMEOUT = timedelta(hours=2)


@dataclass(frozen=True)
class World:
    rank: int = 0  # 0 to size - 1
    size: int = 1
    device: torch.device = torch.device("cpu")
    local_size: int = 1  # ranks on this node


# ---------- start -------------------------------------------------------------


def setup(device, backend):
    """The World of this process; under torchrun, open its process group (all ranks)."""
    if "RANK" not in os.environ:
        return World(device=pick_device(device))
    rank = int(os.environ["RANK"])
    size = int(os.environ["WORLD_SIZE"])
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    device = pick_device(device, int(os.environ.get("LOCAL_RANK", 0)), local_size)
    if not dist.is_initialized():
        open_group(rank, size, device, backend)
    return World(rank, size, device, local_size)


def pick_device(name, local_rank=None, local_size=1):
    """The device that 'auto', 'cpu', 'mps', 'cuda' or 'cuda:1' means on this machine. With a
    local_rank (under torchrun), 'cuda' is that rank's own GPU, and 'auto' takes the CPU if the
    node has fewer GPUs than ranks."""
    if name == "auto":
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        name = "cpu"
        if gpus >= local_size:
            name = "cuda"
        elif gpus and local_rank == 0:
            print(f"device=auto: fewer GPUs ({gpus}) than processes here ({local_size}): all "
                  "take the CPU")
        elif torch.backends.mps.is_available() and local_rank is None:  # one process can use it
            name = "mps"
    device = torch.device(name)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise SystemExit(f"device={name}: this PyTorch can use no GPU here; use --device=cpu")
        # Against fragmentation. NCCL cannot register such memory for CUDA graphs on GPUs before
        # Blackwell (PyTorch issue 158029).
        if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # its older name
            os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
        os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
        index = device.index or 0
        device = torch.device("cuda", index if local_rank is None else local_rank)
        torch.cuda.set_device(device)  # before anything else, or every rank starts on GPU 0
    return device


def open_group(rank, size, device, backend):
    store, _, _ = next(dist.rendezvous("env://", timeout=TIMEOUT))
    if os.environ.get("GROUP_WORLD_SIZE") == "1":
        # torchrun's store outlives a restart (PyTorch issue 135712): a restarted rank could
        # connect to the address that its dead peer left there. So each start uses its own keys.
        # On several nodes each counts its own restarts; docs/clusters.md has the remedy.
        store = dist.PrefixStore("start " + os.environ["TORCHELASTIC_RESTART_COUNT"], store)
    backends = "gloo"
    if device.type == "cuda" and backend != "gloo":
        # Gloo too, for stop flags and other values that ranks agree on in host memory.
        backends = "cpu:gloo,cuda:nccl"
    # NCCL connects at first use. (device_id would connect now, and split groups from this one.)
    dist.init_process_group(
        backends, store=store, rank=rank, world_size=size, timeout=TIMEOUT)


# ---------- agree -------------------------------------------------------------


def print0(world, *args, file=None):
    if world.rank == 0:
        with suppress(OSError):  # a full disk, or the log's reader went away: train on
            print(*args, file=file, flush=True)


def all_reduce_mean_(x, world):
    """Replace tensor x by its mean over all ranks, in place; returns it (collective)."""
    if world.size > 1:
        dist.all_reduce(x)
        x /= world.size
    return x


def from_rank0(world, action, group=None):
    """Call action() on rank 0 while the others wait. Every rank then returns its result, or raises
    its SystemExit (collective).
    group: a gloo group of all ranks; by default the one that setup has opened."""
    box = [None, None]  # the result, and the arguments of a SystemExit
    if world.rank == 0:
        try:
            box[0] = action()
        except SystemExit as e:
            box[1] = e.args
    if world.size > 1:
        dist.broadcast_object_list(box, src=0, group=group, device=torch.device("cpu"))
    if box[1] is not None:
        raise SystemExit(*box[1])
    return box[0]


def require_same(values, world):
    """SystemExit on all ranks if one of them has another {key: value} (collective)."""
    of_ranks = [values] * world.size
    if world.size > 1:
        dist.all_gather_object(of_ranks, values)
    for rank, theirs in enumerate(of_ranks):
        for key, value in theirs.items():
            if value != of_ranks[0].get(key):
                raise SystemExit(
                    f"ranks differ: {key} is {of_ranks[0].get(key)!r} on rank 0, and {value!r} on "
                    f"rank {rank}; does a config file draw it, or does a node have another command "
                    "or other data?")


class StopSignal:
    """Catches SIGTERM and Ctrl-C, so that all ranks can stop after the same step."""

    def __init__(self, world):
        self.world = world
        self.received = False  # by this process
        signal.signal(signal.SIGTERM, self.handle)
        signal.signal(signal.SIGINT, self.handle)

    def handle(self, number, frame):
        self.received = True
        # A second signal ends the run at once. But under torchrun it is the same Ctrl-C: the
        # terminal sends it to the ranks, and torchrun forwards it to them again.
        if not dist.is_initialized():
            signal.signal(number, signal.SIG_DFL)

    def requested(self):
        """True on every rank if any rank received a signal (collective; over gloo, so it does
        not wait for the GPU)."""
        return all_reduce_mean_(torch.tensor(float(self.received)), self.world).item() > 0


# ---------- leave -------------------------------------------------------------


def run(main, *args):
    """Call main(*args) and end the process. A SystemExit prints one line, exit code 1; any other
    exception prints a traceback."""
    if "RANK" not in os.environ:
        return main(*args)  # Python prints a SystemExit's line
    code = 0
    try:
        main(*args)
        if dist.is_initialized():
            # A barrier: peers may still use our connections.
            dist.all_reduce(torch.zeros(()))
    except SystemExit as e:
        code = e.code or 0
        if os.environ.get("LOCAL_RANK", "0") != "0":
            let_others_speak()  # the first rank usually has the same line
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
    except Exception:
        code = 1
        traceback.print_exc()
        finish_wandb(code)
        let_others_speak()  # a peer may have died and broken our connection
    with suppress(OSError):
        sys.stdout.flush()
    finish_wandb(code)
    # Leave without Python's clean-up: gloo's threads may outlive it, and abort the process (exit
    # code -6). destroy_process_group does not help: 2 of 40 launches of a script, with torch 2.13.
    os._exit(code)


def finish_wandb(code):
    """Let W&B write and upload the rest of its log. It would do so at Python's clean-up."""
    if "wandb" in sys.modules:
        sys.modules["wandb"].finish(exit_code=code)


def let_others_speak():
    """Wait a second. If another rank has failed first, torchrun ends this one meanwhile, so that
    only the other's error is reported."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(1)

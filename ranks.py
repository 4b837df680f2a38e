"""
Processes: start them, agree on values, stop them together, and leave.

    world = setup("auto", "auto")            # rank, size, device; opens the process group
    stop = StopSignal(world)                 # SIGTERM, Ctrl-C: all ranks stop after the same step
    run(main, sys.argv[1:])                  # a user's mistake prints one line, exit code 1

torchrun starts the processes and tells each its place in environment variables: RANK,
WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE. Without them this process is alone.
"""

import functools
import math
import os
import resource
import signal
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

TIMEOUT = timedelta(minutes=10)  # a rank that waits longer for a collective gives up
PATIENCE = timedelta(hours=12)  # when all ranks wait for one rank's disk or download


@dataclass(frozen=True)
class World:
    rank: int = 0  # 0 to size - 1
    size: int = 1
    device: torch.device = torch.device("cpu")
    local_size: int = 1  # ranks on this node


# ---------- start -------------------------------------------------------------


def setup(device, backend, cpu_offload=0.0):
    """The World of this process; under torchrun, open its process group (all ranks).
    cpu_offload: if above 0 the CPU runs the optimizer, on this rank's share of the cores.
    """
    env = os.environ
    local_size = int(env.get("LOCAL_WORLD_SIZE", 1))
    # torchrun gives each process one thread, unless the user set another number.
    if cpu_offload and env.get("OMP_NUM_THREADS", "1") == "1":
        torch.set_num_threads(max(1, usable_cores() // local_size))
    # Raise the soft limit of open files: process groups open some, and so do shards of data.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # macOS says "no limit", but has one
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if "RANK" not in env:
        if int(env.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
            raise SystemExit(
                f"srun started {env['SLURM_STEP_NUM_TASKS']} processes, each a run of its own: let "
                "srun start one torchrun per node (docs/clusters.md)")
        return World(device=pick_device(device))
    rank = int(env["RANK"])
    size = int(env["WORLD_SIZE"])
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    one_node = size == local_size  # so all ranks count the same GPUs
    if device == "auto" and one_node and 0 < gpus < size:
        # For example two processes, to try things out on a machine with one GPU.
        if rank == 0:
            print(f"device=auto: fewer GPUs ({gpus}) than processes ({size}): all take the CPU; "
                  "if each process sees only its own GPU, pass --device=cuda")
        device = "cpu"
    device = pick_device(device, int(env.get("LOCAL_RANK", 0)))
    if not dist.is_initialized():
        open_group(rank, size, device, backend)
    patient_group()  # made now, while all ranks are here
    return World(rank, size, device, local_size)


def usable_cores():
    """The cores that this process may use: Slurm or taskset may allow fewer than there are."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


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
    dist.init_process_group(
        backends, store=store, rank=rank, world_size=size, timeout=TIMEOUT)


def connect(device, unit, mesh=None, with_gather=False):
    """Send once what a step sends, and set the groups' timeouts (all ranks). NCCL connects and
    takes memory at first use: do that now, while memory is free, so that a broken network shows
    before a minute of compiling. Gloo is already connected.

    in a group that shards          all-gather and reduce-scatter of a unit; an all-reduce of one
                                    number, for the norm; with_gather: gather_full's gather
    between the groups of hybrid    all-reduce of a unit's rows
    among all ranks, with DDP       all-reduce of a bucket, about as large as a unit

    What the ranks agree on in host memory goes over gloo. Muon connects its own.
    unit: a module with a usual unit's parameters. NCCL chooses an algorithm by a message's size:
        here that of fp32, in which gradients are reduced. (In bf16 a gather sends half.)
    mesh: from make_mesh; None for DDP.
    """
    groups = mesh.get_all_groups() if mesh else [dist.group.WORLD]
    for group in groups:
        if dist.get_backend(group) != "fake":  # the plan rehearses on it; it has no timeout
            group.set_timeout(TIMEOUT)  # PyTorch's default for hybrid_shard's groups is 30 minutes
    if "nccl" not in dist.get_backend_config(groups[0]):
        return
    numel = sum(p.numel() for p in unit.parameters())
    size = mesh.size(-1) if mesh else 1
    rows = torch.ones(math.ceil(numel / size), device=device)
    if mesh:
        shard_group = groups.pop()
        whole = torch.ones(len(rows) * size, device=device)
        dist.all_gather_single(whole, rows, group=shard_group)
        dist.reduce_scatter_single(rows, whole, group=shard_group)
        dist.all_reduce(rows[:1], group=shard_group)
        if with_gather and 0 in dist.get_process_group_ranks(shard_group):
            pieces = list(whole.split(len(rows))) if dist.get_rank() == 0 else None
            dist.gather(rows, pieces, dst=0, group=shard_group)
    for replicas in groups:
        dist.all_reduce(rows, group=replicas)
    rows.sum().item()  # wait until the GPU has run them


@functools.cache
def patient_group():
    """The same ranks, as a group that waits for hours while rank 0 reads or writes."""
    return dist.new_group(backend="gloo", timeout=PATIENCE)


def patient_barrier():
    """Wait until every rank is here, for hours if need be (collective)."""
    if dist.is_initialized():
        dist.barrier(patient_group())


def pick_device(name, local_rank=None):
    """The device that 'auto', 'cpu', 'mps', 'cuda' or 'cuda:1' means on this machine. With
    a local_rank (under torchrun), 'cuda' is that rank's own GPU. SystemExit if it has none.
    """
    is_first = local_rank in (None, 0)
    has_mps = torch.backends.mps.is_available() and is_first  # only one process can use it
    if name == "auto":
        name = "cpu"
        if torch.cuda.is_available():
            name = "cuda"
        elif has_mps and local_rank is None:
            name = "mps"
        elif is_first and torch.cuda.device_count():  # the driver counts them
            print("device=auto: GPUs are here, but this PyTorch cannot use them; see "
                  "docs/troubleshooting.md")
    kind, _, index = name.partition(":")
    if kind == "cuda":
        index = int(index or 0) if local_rank is None else local_rank
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if index >= count:
            raise SystemExit(
                f"device={name}: this PyTorch can use {count} GPUs here; use --device=cpu, or "
                "fewer processes per node")
        # Against fragmentation, unless the user set the allocator's options.
        if not os.environ.keys() & {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}:
            os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
        # Below compute capability 10 NCCL cannot register such memory for CUDA graphs (PyTorch
        # issue 158029).
        if torch.cuda.get_device_capability(index) < (10, 0):
            os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
        torch.cuda.set_device(index)  # before anything else, or every rank starts on GPU 0
        return torch.device("cuda", index)
    if kind == "mps" and not has_mps:
        raise SystemExit("device=mps: there is none for this process; use --device=cpu")
    return torch.device(kind)


# ---------- agree -------------------------------------------------------------


def print0(world, *args, file=None):
    if world.rank == 0:
        with suppress(OSError):  # a log's reader went away, or its disk is full: train on
            print(*args, file=file, flush=True)


def all_reduce_mean_(x, world, patient=False):
    """Replace tensor x by its mean over all ranks, in place; returns it (collective).
    patient: wait for hours, since a slow disk may delay a rank."""
    if world.size > 1:
        dist.all_reduce(x, group=patient_group() if patient else None)
        x /= world.size
    return x


def mean_and_longest(loss, seconds, world):
    """(the mean of the ranks' losses, the longest of their seconds). One collective for both: a
    row has the loss, and then a place for each rank's seconds. Waits for the device.
    loss: a 0-d tensor on the device."""
    row = torch.zeros(1 + world.size)  # on the host, where it is read
    row[0] = loss
    row[1 + world.rank] = seconds * world.size  # the mean divides it; other ranks have 0 there
    mean, *all_seconds = all_reduce_mean_(row, world).tolist()
    return mean, max(all_seconds)


def from_rank0(world, action, group=None):
    """Call action() on rank 0 while the others wait, for hours if need be. Every rank then
    returns its result, or raises its SystemExit (collective).
    group: a group of all ranks; by default the patient one."""
    box = [None, None]  # the result, and the arguments of a SystemExit
    if world.rank == 0:
        try:
            box[0] = action()
        except SystemExit as e:
            box[1] = e.args
    if world.size > 1:
        group = group or patient_group()
        dist.broadcast_object_list(box, src=0, group=group, device=torch.device("cpu"))
    if box[1] is not None:
        raise SystemExit(*box[1])
    return box[0]


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
    exception prints a traceback. torchrun's report repeats the error of the rank that failed
    first."""
    code = 0
    try:
        main(*args)
    except (Exception, SystemExit) as e:
        code = report(e)
    try:
        sys.stdout.flush()
    except OSError:
        sys.stdout = None  # or Python would try again, and end with code 120
    if not dist.is_initialized():
        sys.exit(code)
    if code == 0:
        # Peers may still use our connections, and rank 0's log may take long to upload.
        patient_barrier()
    # Leave without Python's clean-up: gloo's threads may outlive it, and abort the process (exit
    # code -6). destroy_process_group does not help: 2 of 40 launches of a script, with torch 2.13.
    os._exit(code)


def report(e):
    """Say why the process ends, and return its exit code. A SystemExit with a number says
    nothing: the number is the code."""
    line = None
    if isinstance(e, SystemExit):
        if e.code is None or isinstance(e.code, int):
            return e.code or 0
        line = str(e.code)
    elif isinstance(e, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(e):
        line = f"out of memory: {first_line(e)}; lower batch_size or the model's sizes"
    speaks = int(os.environ.get("LOCAL_RANK", 0)) == 0  # others usually have the same line
    if line is None:
        traceback.print_exc()
    else:
        # One line in torchrun's report too, from Python 3.11 on.
        e.args = (line,)
        e.__traceback__ = e.__context__ = None
        if speaks:
            print(line, file=sys.stderr)
    if "RANK" in os.environ and not (line and speaks):
        # When a process has ended, torchrun ends the others; it polls ten times a second. Wait: a
        # peer may have died and broken this rank's connection, or may still have the line to say.
        time.sleep(1)
    with suppress(OSError):  # the disk may be full
        get_error_handler().record_exception(e)  # to the file that torchrun's report reads
    return 1


def first_line(e):
    """An exception's message in one line."""
    return (str(e).strip() or type(e).__name__).splitlines()[0]

"""
A simulated CUDA device, for PyTorch on a machine without one.

    import simgpu  # before torch; SIM_GPUS=2 in the environment: two of them
    import torch

    with simgpu.watch() as seen:
        train_step(model.to("cuda"), batch)
    assert seen.races == []  # two streams, or a stream and the host, at the same memory
    assert seen.waits == []  # where the host waited for the device, and for which operation
    print(seen.report())

or, without a change to a program:

    SIM_GPUS=2 torchrun --nproc_per_node=2 -m simgpu train.py

Tensors on "cuda" have CUDA's device and rules. Their bytes are in host memory, and CPU kernels
compute on them, so the numbers are real. README.md, beside this directory, says what is simulated.

    build.py      builds device.cpp with g++ when it is first needed
    device.cpp    memory, streams, copies, kernels
    cuda.py       torch.cuda's functions
    nccl.py       collectives

This directory needs no other file of the repository, so it may be copied out.
"""

import atexit
import ctypes
import os
import sys
from contextlib import contextmanager
from dataclasses import dataclass, field

from .build import CannotBuild, library, torch_dir

HERE = os.path.dirname(os.path.abspath(__file__))
TORCH = torch_dir()

if "torch" in sys.modules:
    raise CannotBuild("simgpu: import it before torch, which asks for CUDA only once")
os.environ.setdefault("SIM_GPUS", "1")
# The library names PyTorch's libraries without their paths, so they are loaded first, a CUDA
# build's too. Of two functions that are registered for one operation the last counts: ours.
ctypes.CDLL(os.path.join(TORCH, "lib", "libtorch.so"))
device = ctypes.CDLL(library())
for _name in ("allocated", "kept", "peak", "pinned", "pinned_peak", "late"):
    getattr(device, f"simgpu_{_name}").restype = ctypes.c_int64
device.simgpu_forget.argtypes = (ctypes.c_int64,)
device.simgpu_seconds.restype = ctypes.c_double
device.simgpu_elapsed.restype = ctypes.c_double
device.simgpu_elapsed.argtypes = ctypes.c_void_p, ctypes.c_void_p

import torch  # noqa: E402

device.simgpu_install(os.path.exists(os.path.join(TORCH, "lib", "libtorch_cuda.so")))


# ---------- events ------------------------------------------------------------


@dataclass(frozen=True)
class Event:
    kind: str  # race, wait, copy or collective
    what: str
    bytes: int  # copied or sent
    waits: bool  # True if the host waits for it
    where: str  # innermost first: "fsdp.py:331 < train.py:252", and where in PyTorch

    def __str__(self):
        return f"{self.kind}: {self.what}, at {self.where}"


@dataclass(eq=False)  # two may hold equal events, and only one of them ends
class Seen:
    """The events inside a `with simgpu.watch()`, in order."""
    events: list = field(default_factory=list)

    def of(self, kind):
        return [event for event in self.events if event.kind == kind]

    @property
    def races(self):
        return self.of("race")

    @property
    def copies(self):
        return self.of("copy")

    @property
    def collectives(self):
        return self.of("collective")

    @property
    def waits(self):
        return [event for event in self.events if event.waits]

    def report(self):
        """Races and the host's waits as text; equal ones once, with their number."""
        lines = {}
        for event in self.races + self.waits:
            lines[str(event)] = lines.get(str(event), 0) + 1
        return "\n".join(f"{n} x {line}" for line, n in lines.items())


watchers = []
forbidden = False  # True: waits raise, by torch.cuda.set_sync_debug_mode("error")


@contextmanager
def watch():
    seen = Seen()
    watchers.append(seen)
    try:
        yield seen
    finally:
        watchers.remove(seen)


def note(kind, what, size=0, waits=False):
    if not watchers:
        return
    event = Event(kind, what, size, waits, call_site())
    for seen in watchers:
        seen.events.append(event)


@torch._disable_dynamo
def listener(kind, what, size, waits):
    note(kind.decode(), what.decode(), size, bool(waits))
    return int(forbidden and bool(waits))


# The frames of PyTorch that say nothing.
SKIPPED = ("/_ops.py", "/library.py", "/_tensor.py", "/_device.py", "/overrides.py",
           "/eval_frame.py", "/_dispatch_utils.py", "/_compile.py")


def call_site(depth=3):
    """The innermost frames outside PyTorch and Python's library, and PyTorch's innermost."""
    own = []
    inside = ""
    frame = sys._getframe(1)
    while frame and len(own) < depth:
        path = frame.f_code.co_filename
        if path.startswith(TORCH):
            if not own and not inside and not path.endswith(SKIPPED):
                inside = f" [torch{path.removeprefix(TORCH)}:{frame.f_lineno}]"
        elif os.path.isabs(path) and not path.startswith(HERE) and "/lib/python3" not in path:
            own.append(f"{os.path.basename(path)}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(own) + inside


_listener = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int64, ctypes.c_int)(listener)
device.simgpu_listen(_listener)
atexit.register(device.simgpu_listen, None)  # tensors are freed later than Python's functions


# ---------- memory ------------------------------------------------------------


def set_memory(gib):
    """Set the memory per GPU: a larger allocation raises torch.OutOfMemoryError."""
    ctypes.c_int64.in_dll(device, "simgpu_memory_of_a_device").value = int(gib * 2**30)


set_memory(float(os.environ.get("SIM_GPU_MEMORY", 80)))


def devices_used():
    """The GPUs that this process has used. CUDA would keep hundreds of MB on each."""
    return [i for i in range(int(os.environ["SIM_GPUS"])) if device.simgpu_used(i)]


from . import cuda, nccl  # noqa: E402, F401

"""
torch.cuda's functions, for the simulated device.

torch.cuda asks the driver, through functions that a CPU build lacks. Those that training needs are
here, by PyTorch's own device-independent interface (torch.accelerator, torch.Stream) where it has
one. The others fail as in a CPU build.
"""

import ctypes
import os
from contextlib import nullcontext
from types import SimpleNamespace

import torch
import torch.cuda

import simgpu
from simgpu import device as sim

N = int(os.environ["SIM_GPUS"])
NAME = "NVIDIA H100 80GB HBM3"
CAPABILITY = (9, 0)


def index_of(device=None):
    """A device's index: the current one's for None; 1 for 1, "cuda:1", torch.device("cuda", 1)."""
    if isinstance(device, int):
        return device
    index = torch.device(device).index if device is not None else None
    return torch.accelerator.current_device_index() if index is None else index


# ---------- devices -----------------------------------------------------------


def initialize():
    """CUDA's first use does it. A DeviceMesh sets the device only if CUDA has not been used."""
    torch.cuda._initialized = True


def set_device(device):
    if index_of(device) >= 0:
        initialize()
        torch.accelerator.set_device_index(index_of(device))


def current_device():
    initialize()
    return index_of()


class device:
    """with torch.cuda.device(1): ..."""

    def __init__(self, device):
        self.index = index_of(device)

    def __enter__(self):
        self.before = index_of()
        set_device(self.index)

    def __exit__(self, *exception):
        set_device(self.before)


def get_device_properties(device=None):
    return SimpleNamespace(
        name=NAME, major=CAPABILITY[0], minor=CAPABILITY[1], total_memory=mem_get_info(device)[1],
        multi_processor_count=132, L2_cache_size=50 * 2**20, warp_size=32)


# ---------- streams and events ------------------------------------------------


class Stream(torch.Stream):
    def __new__(cls, device=None, priority=0, **known):
        if known:
            return super().__new__(cls, **known)
        return super().__new__(cls, torch.device("cuda", index_of(device)), priority=priority)


def as_cuda(stream):
    return Stream(stream_id=stream.stream_id, device_index=stream.device_index,
                  device_type=stream.device_type)


class Event(torch.Event):
    def __new__(cls, enable_timing=False, blocking=False, interprocess=False, external=False):
        return super().__new__(cls, torch.device("cuda"), enable_timing=enable_timing)

    def elapsed_time(self, end):  # torch.Event's takes no event of a subclass
        return 1e3 * sim.simgpu_elapsed(self.event_id, end.event_id)


def current_stream(device=None):
    return as_cuda(torch.accelerator.current_stream(torch.device("cuda", index_of(device))))


def default_stream(device=None):
    return Stream(stream_id=0, device_index=index_of(device), device_type=1)


def synchronize(device=None):
    torch.accelerator.synchronize(index_of(device))


def set_sync_debug_mode(mode):
    """ "error" forbids whatever makes the host wait. (PyTorch's own lets some of it pass.)"""
    simgpu.forbidden = mode in ("error", 2)


# ---------- memory ------------------------------------------------------------


def memory_allocated(device=None):
    return sim.simgpu_allocated(index_of(device))


def max_memory_allocated(device=None):
    return sim.simgpu_peak(index_of(device))


def reset_peak_memory_stats(device=None):
    sim.simgpu_reset_peak(index_of(device))


def memory_stats(device=None):
    """Nothing is cached or fragmented: reserved bytes are the allocated ones."""
    now, peak = memory_allocated(device), max_memory_allocated(device)
    stats = {"num_alloc_retries": 0, "num_ooms": 0}
    for kind in ("allocated", "reserved", "active", "requested"):
        stats[f"{kind}_bytes.all.current"] = now
        stats[f"{kind}_bytes.all.peak"] = peak
    return stats


def host_memory_stats():
    """Statistics of pinned memory."""
    return {"allocated_bytes.current": sim.simgpu_pinned(),
            "allocated_bytes.peak": sim.simgpu_pinned_peak()}


def reset_peak_host_memory_stats():
    sim.simgpu_reset_pinned_peak()


def mem_get_info(device=None):
    total = ctypes.c_int64.in_dll(sim, "simgpu_memory_of_a_device").value
    return total - memory_allocated(device), total


def resize_storage(storage, size):
    """UntypedStorage.resize_, by which FSDP allocates and frees."""
    if storage.device.type != "cuda":
        return resize_of_pytorch(storage, size)
    t = torch.empty(0, dtype=torch.uint8, device=storage.device)
    torch.ops.aten.set_.source_Storage_storage_offset(t, storage, 0, (0,), (1,))
    torch.ops.simgpu.resize_storage(t, size)


resize_of_pytorch = torch.UntypedStorage.resize_


# ---------- random numbers ----------------------------------------------------


def manual_seed_all(seed):
    for generator in torch.cuda.default_generators:
        generator.manual_seed(int(seed))


def manual_seed(seed):
    torch.cuda.default_generators[index_of()].manual_seed(int(seed))


# ---------- CUDA graphs -------------------------------------------------------

POOL = 0, 0  # in name only: each recording keeps all memory that it allocates


class CUDAGraph:
    """Operations that are run again, on the same memory: device.cpp, section 7."""

    current = None  # the one that records, or is replayed
    number = 0

    def __init__(self, keep_graph=False):
        self.collectives = []  # functions that begin one: nccl.py

    def capture_begin(self, pool=None, **options):
        self.number = torch.ops.simgpu.begin_recording()
        CUDAGraph.current = self

    def capture_end(self):
        CUDAGraph.current = None
        torch.ops.simgpu.end_recording(self.number)

    def replay(self):
        CUDAGraph.current = self
        torch.ops.simgpu.replay(self.number)
        CUDAGraph.current = None

    def pool(self):
        return POOL

    def reset(self, forget=sim.simgpu_forget):
        forget(self.number)
        self.number = 0

    __del__ = reset


# ---------- put in torch.cuda's place -----------------------------------------


def nothing(*args, **kwargs):
    pass


INSTEAD = dict(
    is_available=lambda: True,
    is_initialized=lambda: torch.cuda._initialized,
    init=initialize,
    _lazy_init=initialize,
    _lazy_call=lambda function, **options: function(),
    _is_in_bad_fork=lambda: False,
    device_count=lambda: N,
    current_device=current_device,
    set_device=set_device,
    device=device,
    get_device_name=lambda device=None: NAME,
    get_device_capability=lambda device=None: CAPABILITY,
    get_device_properties=get_device_properties,
    get_arch_list=lambda: ["sm_90"],
    is_bf16_supported=lambda *args, **kwargs: True,
    CUDAGraph=CUDAGraph,
    graph_pool_handle=lambda: POOL,
    is_current_stream_capturing=lambda: torch.accelerator.current_stream().is_capturing(),
    Stream=Stream,
    Event=Event,
    stream=lambda stream: nullcontext() if stream is None else stream,
    set_stream=torch.accelerator.set_stream,
    current_stream=current_stream,
    default_stream=default_stream,
    synchronize=synchronize,
    set_sync_debug_mode=set_sync_debug_mode,
    memory_allocated=memory_allocated,
    memory_reserved=memory_allocated,
    max_memory_allocated=max_memory_allocated,
    max_memory_reserved=max_memory_allocated,
    reset_peak_memory_stats=reset_peak_memory_stats,
    memory_stats=memory_stats,
    host_memory_stats=host_memory_stats,
    reset_peak_host_memory_stats=reset_peak_host_memory_stats,
    mem_get_info=mem_get_info,
    empty_cache=nothing,
    ipc_collect=nothing,
    manual_seed=manual_seed,
    manual_seed_all=manual_seed_all,
)
# Other modules of torch.cuda have imported some of these by name.
for module in (torch.cuda, torch.cuda.memory, torch.cuda.random, torch.cuda.graphs):
    for name, function in INSTEAD.items():
        if module is torch.cuda or hasattr(module, name):
            setattr(module, name, function)
torch.cuda.default_generators = tuple(torch.ops.simgpu.default_generator(i) for i in range(N))
torch.backends.cuda.is_built = lambda: True
torch.UntypedStorage.resize_ = resize_storage
torch._C._cuda_getCurrentRawStream = lambda index: 0
torch._C._host_emptyCache = nothing
for name in ("_cuda_CUDAAllocator_AllocatorState", "_set_cached_tensors_enabled"):
    if not hasattr(torch._C, name):  # torch.compile imports them where there is CUDA
        setattr(torch._C, name, type(name, (), {}))

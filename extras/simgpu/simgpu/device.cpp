/*
A CUDA device that is not there.

PyTorch's core knows nothing of CUDA. It asks for it in a few places, and a library that is loaded
before PyTorch can answer there. This file does:

    1. time lines     what streams, events and the host have waited for
    2. memory         of the devices, and pinned; who has touched it last
    3. copies         between host and device, which arrive late
    4. kernels        a CPU's, on the same bytes
    5. attention      flash and memory-efficient, by the CPU's flash kernel; RMS norm
    6. collectives    on a stream of their own, while gloo moves the bytes
    7. recordings     CUDA graphs: operations that are run again, on the same memory
    8. answers        device guard, hooks, generator: what PyTorch asks

A tensor on "cuda" has CUDA's device and CUDA's dispatch keys, so autograd, autocast, FSDP and DDP
treat it as one. Its bytes are in host memory. An operation on it reaches the dispatcher's CUDA key,
where one function for all operations (section 4) runs the CPU's kernel on those bytes. So the
numbers are real.

The host runs everything at once, in the order in which it is called. A GPU would not. What might
have come in another order is found by vector clocks (section 1), as race detectors do: no luck is
needed, and one run shows each race of that run.

Built by build.py, loaded by __init__.py. It needs no header of Python's: the two talk by ctypes,
and by a few operations named simgpu::*.
*/

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/library.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

namespace simgpu {
using namespace c10;
using at::Tensor;
using torch::jit::Stack;

static int number_of_devices() {
  static const char* n = getenv("SIM_GPUS");
  return n ? std::max(1, atoi(n)) : 1;
}

// State is made once and never destroyed: threads of PyTorch's still free tensors while a process
// ends. One lock guards all of it. It is never held while Python or a kernel is called.
static std::recursive_mutex& lock = *new std::recursive_mutex;
using Locked = std::lock_guard<std::recursive_mutex>;

// What Python hears: "race", "wait", "copy" and "free" (see Event in __init__.py). It returns 1 to
// forbid what happens, as torch.cuda.set_sync_debug_mode("error") does.
using Listener = int (*)(const char* kind, const char* what, int64_t bytes, int host_waits);
static Listener listener = nullptr;
static void tell(const char* kind, const std::string& what, int64_t bytes = 0, bool waits = false) {
  if (listener && listener(kind, what.c_str(), bytes, waits))
    TORCH_CHECK(false, "called a synchronizing CUDA operation: ", what);
}
static void tell_races(const std::vector<std::string>& races) {
  for (auto& race : races) tell("race", race);
}

// ---------- 1. time lines: what streams, events and the host have waited for ----------------------
//
// Each stream counts its operations. A time line says how far along each stream one may look: entry
// s = 7 means "the first seven operations of stream s lie before me". A stream is a time line; an
// event is a copy of one; what the host has waited for is one too. To wait is to take the larger of
// each entry, and nothing else in this file orders anything.

using StreamId = int64_t;  // of all devices
struct TimeLine {
  std::map<StreamId, uint64_t> seen;
  double seconds = 0;  // when it is so far, if operations are priced (simgpu.clock)

  void wait_for(const TimeLine& other) {
    for (auto& [stream, count] : other.seen) seen[stream] = std::max(seen[stream], count);
    seconds = std::max(seconds, other.seconds);
  }
  bool knows(StreamId stream, uint64_t count) const {
    auto it = seen.find(stream);
    return it != seen.end() && it->second >= count;
  }
};
static auto& streams = *new std::map<StreamId, TimeLine>;
static auto& host = *new TimeLine;

static constexpr int64_t STREAMS_OF_A_DEVICE = 1'000'000;
static constexpr int64_t POOL = 32;  // PyTorch, too, hands out 32 streams of a device, round robin
static thread_local DeviceIndex current_device = 0;  // a new thread's is GPU 0, as CUDA's
static thread_local std::map<DeviceIndex, int64_t> current_stream;

static StreamId stream_of(DeviceIndex device, int64_t id) {
  return device * STREAMS_OF_A_DEVICE + id;
}
static StreamId current(DeviceIndex device) { return stream_of(device, current_stream[device]); }
// A collective runs on a stream of its communicator.
static constexpr int64_t FIRST_OF_NCCL = 1000;
static bool is_nccls(StreamId stream) { return stream % STREAMS_OF_A_DEVICE >= FIRST_OF_NCCL; }
static std::string name_of(StreamId stream) {
  const auto id = stream % STREAMS_OF_A_DEVICE;
  const auto what = is_nccls(stream) ? c10::str("NCCL's stream ", id - FIRST_OF_NCCL) :
      id ? c10::str("stream ", id) : "the default stream";
  return c10::str(what, " of cuda:", stream / STREAMS_OF_A_DEVICE);
}

static auto& devices_used = *new std::set<DeviceIndex>;  // a context on each: hundreds of MB

// A new operation of a stream: it comes after all that the host has waited for.
static void launch(StreamId stream, double price = 0) {
  Locked l(lock);
  devices_used.insert(stream / STREAMS_OF_A_DEVICE);
  auto& line = streams[stream];
  line.wait_for(host);
  line.seen[stream]++;
  line.seconds += price;
}

static void host_waits_for(const TimeLine& line);  // and so gets late copies: section 3

// What a CUDA graph keeps (section 7).
struct Recording {
  StreamId origin;
  Tensor generator_before;  // its state
  std::map<std::shared_ptr<void>, std::vector<char>> memory_before;  // and its bytes
  std::vector<std::function<void()>> steps;
  std::map<std::string, Tensor> states;  // of the generator, by their bytes while it was recorded
  bool is_invalid = false;
};
static auto& recordings = *new std::map<StreamId, Recording*>;  // of the streams that record now
static Recording* recording_on(StreamId stream) {
  Locked l(lock);
  return recordings[stream];
}
static void fail(Recording* recording, int code, const char* why) {  // as CUDA does
  if (recording) recording->is_invalid = true;
  throw AcceleratorError({__func__, __FILE__, __LINE__}, code, c10::str("CUDA error: ", why));
}

struct Event : TimeLine {
  Recording* recording;
  StreamId origin;
};
static Event event_on(StreamId stream) {
  Locked l(lock);
  auto* recording = recordings[stream];
  return {streams[stream], recording, recording ? recording->origin : stream};
}
static void wait_for_event(const Event& event, StreamId stream) {
  Locked l(lock);
  auto& recording = recordings[stream];
  if (recording && recording != event.recording)
    fail(recording, 905, "dependency created on uncaptured work in another stream");
  if (event.recording && recordings[event.origin] != event.recording)
    fail(nullptr, 1, "invalid argument");  // the event's recording is over
  recording = event.recording;  // from now on the stream takes part in it
  streams[stream].wait_for(event);
}

// ---------- 2. memory: of the devices, and pinned; who has touched it last ------------------------

struct Access {
  size_t begin, end;  // bytes
  StreamId stream;
  uint64_t count;  // which operation of the stream
  bool is_write;
  const std::string* operation;
};
struct Block {
  size_t size;
  DeviceIndex device;
  StreamId stream;  // where it was allocated, and to whom it goes back
  std::shared_ptr<void> memory;  // recordings keep it, too
  std::vector<Access> accesses;  // the last ones; older ones lie before these
  std::set<StreamId> recorded;  // by record_stream
};
// Freed on its stream, but another stream had work on it that this one did not wait for.
struct FreedInUse {
  TimeLine users;
  size_t size;
  std::string operation;
};
static auto& blocks = *new std::map<const char*, Block>;
static auto& freed_in_use = *new std::map<StreamId, std::vector<FreedInUse>>;
static auto& allocated = *new std::map<DeviceIndex, size_t>;
static auto& peak = *new std::map<DeviceIndex, size_t>;
static auto& kept = *new std::map<DeviceIndex, size_t>;  // that, and what only recordings still use

extern "C" int64_t simgpu_memory_of_a_device;
int64_t simgpu_memory_of_a_device = int64_t(80) << 30;

static size_t rounded(size_t n) { return (n + 511) / 512 * 512; }  // as PyTorch's allocator does

static Block* block_of(const void* p) {
  auto it = blocks.upper_bound((const char*)p);
  if (it == blocks.begin()) return nullptr;
  --it;
  return (const char*)p < it->first + it->second.size ? &it->second : nullptr;
}

static void wait_for_collectives_on(const void* begin, size_t size);  // section 6

// PyTorch's allocator gives freed memory to the next who asks on the same stream, at once. It trusts
// that whoever used it on another stream has made this stream wait, or has called record_stream.
static void require_no_user(StreamId stream, size_t size) {
  std::vector<std::string> races;
  {
    Locked l(lock);
    auto& line = streams[stream];
    line.wait_for(host);
    auto& freed = freed_in_use[stream];
    for (auto& f : freed)
      for (auto& [user, count] : f.users.seen)
        if (!line.knows(user, count)) {
          races.push_back(c10::str(
              f.size, " bytes of ", name_of(stream), " are freed and given away while ",
              name_of(user), " may not have finished ", f.operation));
          break;
        }
    freed.clear();
  }
  tell_races(races);
}

static void forget_block(void* p);
static DataPtr hand_out(std::shared_ptr<void> memory, size_t size, Device device) {
  void* p = memory.get();
  if (!size) return {p, device};
  const auto stream = current(device.index());
  require_no_user(stream, size);
  Locked l(lock);
  devices_used.insert(device.index());
  auto& now = allocated[device.index()];
  now += rounded(size);
  kept[device.index()] += rounded(size);
  std::shared_ptr<void> counted(p, [=](void*) mutable {
    Locked l(lock);
    kept[device.index()] -= rounded(size);
    memory.reset();
  });
  blocks[(char*)p] = Block{size, device.index(), stream, counted, {}, {}};
  peak[device.index()] = std::max(peak[device.index()], now);
  return {p, p, &forget_block, device};
}

static void forget_block(void* p) {
  std::shared_ptr<void> memory;  // may be freed at the end, without the lock
  Block* block;
  {
    Locked l(lock);
    block = block_of(p);
  }
  if (!block) return;
  wait_for_collectives_on(p, block->size);
  Locked l(lock);
  FreedInUse freed{{}, block->size, ""};
  auto& line = streams[block->stream];
  // NCCL holds on to what its collectives use until somebody waits for them.
  for (auto& a : block->accesses)
    if (!line.knows(a.stream, a.count) && !block->recorded.count(a.stream) && !is_nccls(a.stream)) {
      freed.users.seen[a.stream] = std::max(freed.users.seen[a.stream], a.count);
      freed.operation = *a.operation;
    }
  if (!freed.users.seen.empty()) freed_in_use[block->stream].push_back(freed);
  allocated[block->device] -= rounded(block->size);
  memory = std::move(block->memory);
  blocks.erase((char*)p);
}

static void require_room(size_t n, DeviceIndex device) {
  Locked l(lock);
  TORCH_CHECK_WITH(
      OutOfMemoryError, allocated[device] + rounded(n) <= (size_t)simgpu_memory_of_a_device,
      "CUDA out of memory. Tried to allocate ", n, " bytes; simulated GPU ", int(device), " has ",
      simgpu_memory_of_a_device, " bytes, of which ", allocated[device], " are in use");
}

struct DeviceAllocator final : Allocator {
  DataPtr allocate(size_t n) override {
    const Device device(kCUDA, current_device);
    require_room(n, device.index());
    if (!n) return {nullptr, device};
    void* p = aligned_alloc(64, (n + 63) / 64 * 64);
    TORCH_CHECK_WITH(OutOfMemoryError, p, "host memory is out: ", n, " bytes for a simulated GPU");
    memset(p, 0xFF, n);  // NaN, and -1: nobody takes it for zeros
    return hand_out({p, &free}, n, device);
  }
  void copy_data(void* to, const void* from, size_t n) const override { memcpy(to, from, n); }
};
static auto& device_memory = *new DeviceAllocator;

// What a CPU kernel has returned becomes a device's.
static DataPtr adopt(const Storage& storage, Device device) {
  require_room(storage.nbytes(), device.index());
  std::shared_ptr<void> memory(std::make_shared<Storage>(storage), storage.mutable_data());
  return hand_out(memory, storage.nbytes(), device);
}

// Pinned host memory. PyTorch pins powers of two.
static auto& pinned = *new std::map<const char*, size_t>;
static size_t pinned_now = 0, pinned_peak = 0;
static size_t power_of_two(size_t n) {
  size_t power = 1;
  while (power < n) power *= 2;
  return power;
}
struct PinnedAllocator final : Allocator {
  DataPtr allocate(size_t n) override {
    void* p = aligned_alloc(64, (n + 64) / 64 * 64);
    memset(p, 0xFF, n);
    Locked l(lock);
    pinned[(char*)p] = n;
    pinned_now += power_of_two(n);
    pinned_peak = std::max(pinned_peak, pinned_now);
    return {p, p, &release, Device(kCPU)};
  }
  static void release(void* p) {
    {
      Locked l(lock);
      pinned_now -= power_of_two(pinned[(char*)p]);
      pinned.erase((char*)p);
    }
    free(p);
  }
  void copy_data(void* to, const void* from, size_t n) const override { memcpy(to, from, n); }
};
static auto& pinned_memory = *new PinnedAllocator;

static bool is_pinned(const void* p) {
  Locked l(lock);
  auto it = pinned.upper_bound((const char*)p);
  if (it == pinned.begin()) return false;
  --it;
  return (const char*)p < it->first + std::max<size_t>(it->second, 1);
}

// The bytes from the first to the last element of a tensor: {} if it has none.
struct Bytes {
  char* begin = nullptr;
  size_t size = 0;
};
static Bytes bytes_of(const Tensor& t) {
  if (!t.defined() || !t.numel() || !t.has_storage() || !t.storage().data()) return {};
  int64_t last = 0;
  for (int64_t i = 0; i < t.dim(); i++) last += (t.size(i) - 1) * t.stride(i);
  auto* begin = (char*)t.storage().mutable_data() + t.storage_offset() * t.itemsize();
  return {begin, (last + 1) * t.itemsize()};
}

// Operation number streams[stream].seen[stream] reads or writes a tensor. Returns a sentence if what
// another stream does there may come before, after or at the same time.
static void touch(
    const Tensor& t, bool is_write, StreamId stream, const std::string& operation,
    std::vector<std::string>& races) {
  const auto bytes = bytes_of(t);
  if (!bytes.size) return;
  Locked l(lock);
  auto* block = block_of(bytes.begin);
  if (!block) return;
  auto& line = streams[stream];
  const Access now{
      size_t(bytes.begin), size_t(bytes.begin) + bytes.size, stream, line.seen[stream], is_write,
      &operation};
  auto& all = block->accesses;
  std::string race;
  for (auto& a : all) {
    const bool overlaps = a.begin < now.end && now.begin < a.end;
    if (!overlaps || !(is_write || a.is_write) || line.knows(a.stream, a.count)) continue;
    race = c10::str(
        operation, is_write ? " writes" : " reads", " a tensor ", t.sizes(), " ", t.scalar_type(),
        " on ", name_of(stream), ", which has not waited for ", name_of(a.stream), ", where ",
        *a.operation, a.is_write ? " writes it" : " reads it");
  }
  // Forget what lies before this operation and inside of what it touches: who comes after this one
  // comes after that, too. A read does not come after other reads, so it replaces its own stream's.
  all.erase(
      std::remove_if(
          all.begin(), all.end(),
          [&](const Access& a) {
            const bool inside = now.begin <= a.begin && a.end <= now.end;
            return inside && (is_write || (!a.is_write && a.stream == stream));
          }),
      all.end());
  all.push_back(now);
  if (!race.empty()) races.push_back(race);
}

// ---------- 3. copies: between host and device, which arrive late ---------------------------------
//
// From or to pinned memory, and with non_blocking=True, a copy is an operation of a stream like any
// other: the host goes on. Then the host must not look at what is copied to it, nor change what is
// copied from it, before it has waited. To the host: until then its memory holds 0xFF (NaN, -1). From
// the host: at that time the bytes are compared with what they were when the copy was called.
// Any other copy makes the host wait.

struct Late {
  StreamId stream;
  uint64_t count;
  Tensor on_host;  // keeps the memory, as PyTorch's allocator of pinned memory does
  char* begin;  // where on the host
  std::vector<char> bytes;
  bool to_host;
  std::string what;
};
static auto& late = *new std::vector<Late>;
static constexpr size_t MOST_LATE = 4096;  // a host that never waits is not this far ahead

// The copy is over: its bytes are there, or those it came from may change. Returns a race.
static std::string arrive(const Late& copy) {
  if (copy.to_host) {
    memcpy(copy.begin, copy.bytes.data(), copy.bytes.size());
    return "";
  }
  if (!memcmp(copy.begin, copy.bytes.data(), copy.bytes.size())) return "";
  return "the host has changed what is being copied: " + copy.what;
}

static void host_waits_for(const TimeLine& line) {
  if (auto* recording = recording_on(current(current_device)))
    fail(recording, 900, "operation not permitted when stream is capturing");
  std::vector<std::string> races;
  std::vector<Late> arrived;  // whose tensors are freed without the lock
  {
    Locked l(lock);
    host.wait_for(line);
    std::vector<Late> rest;
    for (size_t i = 0; i < late.size(); i++) {
      const bool too_many = late.size() - i > MOST_LATE;
      auto& to = too_many || host.knows(late[i].stream, late[i].count) ? arrived : rest;
      to.push_back(std::move(late[i]));
    }
    late.swap(rest);
    for (auto& copy : arrived) races.push_back(arrive(copy));
  }
  races.erase(std::remove(races.begin(), races.end(), ""), races.end());
  tell_races(races);
}

static void host_waits_for_stream(StreamId stream) {
  TimeLine line;
  {
    Locked l(lock);
    line = streams[stream];
  }
  host_waits_for(line);
}

// What a copy from the host finds there: this stream may have put it there itself, although the host
// cannot see it yet (activations that are offloaded and fetched again).
static std::vector<char> as_the_stream_sees(
    Bytes from, StreamId stream, std::vector<std::string>& races) {
  std::vector<char> bytes(from.begin, from.begin + from.size);
  Locked l(lock);
  for (auto& copy : late) {
    auto* begin = std::max(copy.begin, from.begin);
    auto* end = std::min(copy.begin + copy.bytes.size(), from.begin + from.size);
    if (!copy.to_host || begin >= end) continue;
    if (!streams[stream].knows(copy.stream, copy.count))
      races.push_back(c10::str(
          "a copy from the host on ", name_of(stream), ", which has not waited for ",
          name_of(copy.stream), ", where ", copy.what, " goes there"));
    memcpy(&bytes[begin - from.begin], &copy.bytes[begin - copy.begin], end - begin);
  }
  return bytes;
}

static Tensor host_view(const Tensor& t, bool keep = true);
static Tensor frozen(const Tensor& t);
static double priced(const std::string& name, at::TensorList reads, at::TensorList writes);
static void settle(const Tensor& t) {
  const auto bytes = bytes_of(t);
  if (bytes.size) wait_for_collectives_on(bytes.begin, bytes.size);
}

static Tensor& copy_(Tensor& to, const Tensor& from, bool non_blocking) {
  static const std::string name = "copy_";
  if (!to.numel()) return to;
  at::AutoDispatchBelowADInplaceOrView below;
  settle(to);
  settle(from);
  const bool crosses = to.is_cuda() != from.is_cuda();
  // CUDA copies bytes. Another dtype or other strides need a tensor in between: on the device if
  // non_blocking, else on the host (copy_kernel_cuda in PyTorch's Copy.cu).
  const bool same_dtype = to.scalar_type() == from.scalar_type();
  const bool as_bytes = same_dtype && to.sizes() == from.sizes() &&
      to.strides() == from.strides() && to.is_non_overlapping_and_dense();
  if (crosses && !as_bytes) {
    const bool convert_first = from.is_cuda() == non_blocking;
    Tensor source = from, target = to;
    if (convert_first) {
      source = from.to(to.scalar_type()).expand_as(to).contiguous();
      if (!to.is_contiguous()) target = at::empty_like(to, MemoryFormat::Contiguous);
    } else {
      source = from.expand_as(to).contiguous();
      if (!to.is_contiguous() || !same_dtype)
        target = at::empty(to.sizes(), to.options().dtype(from.scalar_type()));
    }
    copy_(target, source, non_blocking);
    if (!target.is_same(to)) to.copy_(target, non_blocking);
    return to;
  }

  const Device device = from.is_cuda() ? from.device() : to.device();
  const StreamId stream = current(device.index());
  const auto& on_host = from.is_cuda() ? to : from;
  const bool is_pinned_ = is_pinned(on_host.storage().data());
  const bool waits = crosses && (!non_blocking || !is_pinned_);
  auto* recording = recording_on(stream);
  if (recording) {
    if (waits) host_waits_for_stream(stream);
    recording->steps.push_back([to = frozen(to), from = frozen(from), non_blocking]() mutable {
      copy_(to, from, non_blocking);
    });
  }
  launch(stream, priced(name, from, to));
  std::vector<std::string> races;
  touch(from, false, stream, name, races);
  touch(to, true, stream, name, races);
  if (recording && crosses) {  // the host's memory stays as it is
    if (to.is_cuda()) memcpy(bytes_of(to).begin, bytes_of(from).begin, bytes_of(to).size);
    return to;
  }
  if (!crosses) {
    host_view(to).copy_(host_view(from));
    if (from.device() != to.device())
      tell("copy", c10::str("from ", from.device(), " to ", to.device()), to.nbytes());
    tell_races(races);
    return to;
  }

  const auto source = bytes_of(from), target = bytes_of(to);
  const std::string what = c10::str(
      from.is_cuda() ? "to host " : "to device ", from.sizes(), " ", from.scalar_type(),
      is_pinned_ ? " pinned" : " pageable", non_blocking ? " non_blocking" : "");
  tell("copy", what, source.size, waits);
  Late copy{stream, 0, on_host, nullptr, {}, from.is_cuda(), what};
  {
    Locked l(lock);
    copy.count = streams[stream].seen[stream];
  }
  if (from.is_cuda()) {
    copy.begin = target.begin;
    copy.bytes.assign(source.begin, source.begin + source.size);
    memset(target.begin, 0xFF, target.size);
  } else {
    copy.begin = source.begin;
    copy.bytes = as_the_stream_sees(source, stream, races);
    memcpy(target.begin, copy.bytes.data(), copy.bytes.size());
  }
  {
    Locked l(lock);
    late.push_back(std::move(copy));
  }
  tell_races(races);
  if (waits) host_waits_for_stream(stream);
  return to;
}

// FSDP copies lists, of which some may be in host memory.
static void foreach_copy_(at::TensorList to, at::TensorList from, bool non_blocking) {
  for (size_t i = 0; i < to.size(); i++) {
    Tensor t = to[i];
    copy_(t, from[i], non_blocking);
  }
}

// ---------- 4. kernels: a CPU's, on the same bytes ------------------------------------------------

static Tensor tensor_of(Storage storage, DispatchKey key, const Tensor& like) {
  auto t = at::detail::make_tensor<TensorImpl>(
      std::move(storage), DispatchKeySet(key), like.dtype());
  t.unsafeGetTensorImpl()->set_storage_offset(like.storage_offset());
  t.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides());
  return t;
}

// The same bytes as a tensor of the host's. keep: the memory lives as long as this view.
static Tensor view_of(const Tensor& t, bool keep, Device device) {
  using Memory = std::shared_ptr<void>;
  Memory* owner = nullptr;
  if (keep) {
    Locked l(lock);
    auto* block = block_of(t.storage().data());
    owner = new Memory(block ? block->memory : nullptr);
  }
  DataPtr p(t.storage().mutable_data(), owner, [](void* m) { delete (Memory*)m; }, device);
  Allocator* allocator = device.is_cpu() ? GetCPUAllocator() : &device_memory;
  Storage storage(
      Storage::use_byte_size_t(), t.storage().nbytes(), std::move(p), allocator, true);
  return tensor_of(
      std::move(storage), device.is_cpu() ? DispatchKey::CPU : DispatchKey::CUDA, t);
}
static Tensor host_view(const Tensor& t, bool keep) {
  return t.defined() && t.is_cuda() ? view_of(t, keep, kCPU) : t;
}
// What a recording keeps of a tensor is its place: FSDP frees the memory of tensors that live on. Of
// a number in host memory it keeps the value.
static Tensor frozen(const Tensor& t) {
  if (t.defined() && t.is_cuda()) return view_of(t, true, t.device());
  return !t.defined() || is_pinned(t.storage().data()) ? t : t.clone();
}

// Replace each tensor in a value, which may be one, a list of them, or a list of lists.
template <class F>
static void replace_tensors(IValue& value, F f) {
  if (value.isTensor()) {
    value = f(value.toTensor());
  } else if (value.isTensorList()) {
    List<Tensor> list;
    for (const Tensor& t : value.toTensorList()) list.push_back(f(t));
    value = list;
  } else if (value.isOptionalTensorList()) {
    List<std::optional<Tensor>> list;
    for (const std::optional<Tensor>& t : value.toOptionalTensorList())
      list.push_back(t ? std::optional<Tensor>(f(*t)) : t);
    value = list;
  } else if (value.isList() && value.toListRef().size() && value.toListRef()[0].isTensorList()) {
    List<List<Tensor>> lists;
    for (IValue inner : value.toListRef()) {
      replace_tensors(inner, f);
      lists.push_back(inner.toTensorList());
    }
    value = lists;
  }
}

// What an operation's schema, and a few lists, say about it.
struct Operation {
  std::string name;
  bool is_view = false;  // the same memory in another shape: no kernel runs
  bool may_mix = false;  // takes tensors of the host beside the device's
  bool waits = false;
  std::vector<bool> writes;  // for each argument
  int generator = -1;  // which argument
  bool draws = false;  // random numbers
};

// The host must know a result's size, or its value.
static const std::set<std::string> WAITS = {
    "_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2", "unique_dim",
    "unique_consecutive", "bincount", "repeat_interleave.Tensor", "multinomial", "histc"};
// Indices may be in host memory.
static const std::set<std::string> MAY_MIX = {
    "index.Tensor", "index.Tensor_out", "index_put_", "index_put", "_index_put_impl_"};

static const Operation& describe(const OperatorHandle& op) {
  static auto& known = *new std::unordered_map<const FunctionSchema*, Operation>;
  Locked l(lock);
  auto& schema = op.schema();
  auto [it, is_new] = known.try_emplace(&schema);
  auto& o = it->second;
  if (!is_new) return o;
  o.name = op.operator_name().name;
  if (o.name.rfind("aten::", 0) == 0) o.name = o.name.substr(6);
  const auto& overload = op.operator_name().overload_name;
  const auto full_name = o.name + (overload.empty() ? "" : "." + overload);
  o.may_mix = MAY_MIX.count(full_name);
  o.waits = WAITS.count(full_name);
  o.draws = op.hasTag(at::Tag::nondeterministic_seeded);
  bool writes_any = false, aliases = false;
  for (auto& arg : schema.arguments()) {
    const bool writes = arg.alias_info() && arg.alias_info()->isWrite();
    if (arg.name() == "generator") o.generator = o.writes.size();
    o.writes.push_back(writes);
    writes_any |= writes;
  }
  for (auto& result : schema.returns()) aliases |= result.alias_info() != nullptr;
  o.is_view = (aliases && !writes_any) || o.name.rfind("set_", 0) == 0;
  return o;
}

// One call: the device's tensors are replaced by views of their bytes, and the results replaced back.
struct Call {
  const Operation& operation;
  std::vector<std::pair<Tensor, Tensor>> seen;  // (the device's, the host's view of it)
  std::vector<std::pair<StorageImpl*, Storage>> results;
  std::vector<std::pair<Tensor, bool>> touched;  // (tensor, is it written)
  std::vector<Tensor> reads, writes;  // in place: both
  Device device = kCPU;
  std::optional<Device> other;  // if there is a second one
  bool has_mask = false;

  Tensor to_host(const Tensor& t, bool is_written, bool is_read = true) {
    if (!t.defined()) return t;
    if (!t.is_cuda()) {
      // A number may come as a tensor without dimensions, in host memory.
      if (t.dim()) other = t.device();
      return t;
    }
    if (device == kCPU) device = t.device();
    if (t.device() != device) other = t.device();
    has_mask |= t.scalar_type() == kBool;
    if (!operation.is_view) {
      settle(t);
      touched.emplace_back(t, is_written);
      if (is_read) reads.push_back(t);
      if (is_written) writes.push_back(t);
    }
    for (auto& [ours, view] : seen)
      if (ours.is_same(t)) return view;
    seen.emplace_back(t, host_view(t));
    return seen.back().second;
  }

  Tensor to_device(const Tensor& t) {
    if (!t.defined() || t.device() != kCPU) return t;
    for (auto& [ours, view] : seen)
      if (view.is_same(t)) return ours;
    auto* impl = t.storage().unsafeGetStorageImpl();
    for (auto& [ours, view] : seen)
      if (view.storage().unsafeGetStorageImpl() == impl)
        return tensor_of(ours.storage(), DispatchKey::CUDA, t);
    auto storage = std::find_if(
        results.begin(), results.end(), [&](auto& known) { return known.first == impl; });
    if (storage == results.end()) {
      results.emplace_back(
          impl,
          Storage(Storage::use_byte_size_t(), t.storage().nbytes(), adopt(t.storage(), device),
                  &device_memory, true));
      storage = results.end() - 1;
    }
    auto result = tensor_of(storage->second, DispatchKey::CUDA, t);
    touched.emplace_back(result, true);
    writes.push_back(result);
    return result;
  }

  void require_one_device() const {
    if (!other || device == kCPU || (operation.may_mix && other->is_cpu())) return;
    TORCH_CHECK(
        false, "Expected all tensors to be on the same device, but found at least two devices, ",
        device, " and ", *other, "! (", operation.name, ")");
  }

  // A kernel may have resized an output (out=), and so moved it.
  void adopt_resized() {
    for (auto& [ours, view] : seen) {
      if (ours.storage().data() != view.storage().data()) {
        auto* impl = ours.storage().unsafeGetStorageImpl();
        impl->set_data_ptr_noswap(adopt(view.storage(), ours.device()));
        impl->set_nbytes(view.storage().nbytes());
      }
      if (ours.sizes() != view.sizes() || ours.strides() != view.strides())
        ours.unsafeGetTensorImpl()->set_sizes_and_strides(view.sizes(), view.strides());
    }
  }

  // It has run, on the current stream.
  void note() const {
    const StreamId stream = current(device.index());
    launch(stream, priced(operation.name, reads, writes));
    std::vector<std::string> races;
    for (auto& [t, is_written] : touched) touch(t, is_written, stream, operation.name, races);
    tell_races(races);
  }
};

// A generator of the device is a CPU's inside; kernels and the dispatcher ask what it is.
struct SimGenerator final : at::CPUGeneratorImpl {
  explicit SimGenerator(DeviceIndex i) : at::CPUGeneratorImpl(default_rng_seed_val) {
    device_ = Device(kCUDA, std::max<DeviceIndex>(i, 0));
    key_set_ = DispatchKeySet(DispatchKey::CUDA);
  }
};
struct OpenGenerator : GeneratorImpl {
  using GeneratorImpl::device_;
  using GeneratorImpl::key_set_;
};
struct GeneratorAsCpu {  // while a CPU's kernel draws from it
  GeneratorImpl* g;
  Device device;
  explicit GeneratorAsCpu(GeneratorImpl* g) : g(g), device(g->device()) { become(kCPU); }
  ~GeneratorAsCpu() { become(device); }
  void become(Device d) {
    g->*(&OpenGenerator::device_) = d;
    g->*(&OpenGenerator::key_set_) =
        DispatchKeySet(d.is_cuda() ? DispatchKey::CUDA : DispatchKey::CPU);
  }
};
static at::Generator& default_generator(DeviceIndex i) {
  static auto& all = *new std::map<DeviceIndex, at::Generator>;
  i = i < 0 ? current_device : i;
  if (!all.count(i)) all[i] = at::make_generator<SimGenerator>(i);
  return all[i];
}

// A kernel that takes no generator, such as native_dropout's, draws from the host's: so they change
// places, before it and after.
static void swap_generators(DeviceIndex i) {
  auto& host = at::detail::getDefaultCPUGenerator();
  auto* hosts = (at::CPUGeneratorImpl*)host.unsafeGetGeneratorImpl();
  auto* ours = (at::CPUGeneratorImpl*)default_generator(i).unsafeGetGeneratorImpl();
  const auto engine = hosts->engine();
  hosts->set_engine(ours->engine());
  ours->set_engine(engine);
}

// Any operation on tensors of the device comes here, unless it has a function of its own.
static void run(const OperatorHandle& op, Stack* stack) {
  const auto& operation = describe(op);
  Call call{operation};
  const size_t n = op.schema().arguments().size();
  auto last = torch::jit::last(*stack, n);
  std::vector<IValue> args(last.begin(), last.end());
  torch::jit::drop(*stack, n);

  // 1) Arguments of the device become arguments of the host.
  Device wanted(kCUDA, current_device);
  for (size_t i = 0; i < n; i++) {
    if (args[i].isDevice() && args[i].toDevice().is_cuda()) {
      if (args[i].toDevice().has_index()) wanted = args[i].toDevice();
      args[i] = Device(kCPU);
    }
    const bool is_written = operation.writes[i];
    const bool is_read = !op.schema().arguments()[i].is_out();
    replace_tensors(
        args[i], [&](const Tensor& t) { return call.to_host(t, is_written, is_read); });
  }
  call.require_one_device();
  if (call.device == kCPU) call.device = wanted;
  std::optional<GeneratorAsCpu> generator;
  if (operation.generator >= 0) {
    auto& arg = args[operation.generator];
    if (arg.isNone()) arg = default_generator(call.device.index());
    TORCH_CHECK(
        arg.toGenerator().device().is_cuda(), "Expected a 'cuda' device type for generator but "
        "found 'cpu' (", operation.name, ")");
    generator.emplace(arg.toGenerator().unsafeGetGeneratorImpl());
  }
  const bool draws_as_host = operation.draws && operation.generator < 0;

  // 2) A CPU's kernel.
  for (auto& arg : args) stack->push_back(std::move(arg));
  if (draws_as_host) swap_generators(call.device.index());
  {
    at::AutoDispatchBelowADInplaceOrView below;
    op.callBoxed(*stack);
  }
  if (draws_as_host) swap_generators(call.device.index());
  generator.reset();

  // 3) Results of the host become the device's.
  call.adopt_resized();
  for (size_t i = stack->size() - op.schema().returns().size(); i < stack->size(); i++)
    replace_tensors((*stack)[i], [&](const Tensor& t) { return call.to_device(t); });
  if (operation.is_view) return;

  // 4) Who has touched what, on which stream.
  call.note();
  // Indices of the host are copied; of a mask, PyTorch asks where it is true.
  const bool by_index = operation.may_mix && (call.other || call.has_mask);
  if (operation.waits || by_index) {
    tell("wait", operation.name, 0, true);
    host_waits_for_stream(current(call.device.index()));
  }
}

// ---------- 5. kernels that a CPU has not: attention, and a norm ----------------------------------

// The choice that PyTorch makes on an sm80 or newer: flash for 16 bits, memory-efficient in fp32 and
// with a mask, written out else. What they keep for backward is what the CPU's flash kernel keeps.
static int64_t choose_attention(
    const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& mask,
    double dropout, bool causal, std::optional<double> scale, bool grouped) {
  using at::SDPBackend;
  const bool in_16_bits = q.scalar_type() == kHalf || q.scalar_type() == kBFloat16;
  const int64_t aligned = in_16_bits ? 8 : 4;
  auto choice = SDPBackend::math;
  if (dropout > 0)
    choice = SDPBackend::math;  // a GPU's kernels draw their own random numbers; not simulated
  else if (in_16_bits && !mask && q.size(-1) <= 256)
    choice = SDPBackend::flash_attention;
  else if (!grouped && q.size(-1) % aligned == 0)
    choice = SDPBackend::efficient_attention;
  return (int64_t)choice;
}

struct Arguments {  // by name: their order differs between versions of PyTorch
  const OperatorHandle& op;
  Stack& stack;
  const IValue& operator()(const std::string& name) const {
    auto& all = op.schema().arguments();
    for (size_t i = 0; i < all.size(); i++)
      if (all[i].name() == name) return stack[stack.size() - all.size() + i];
    TORCH_CHECK(false, "simgpu: ", op.schema(), " has no argument ", name);
  }
  bool has(const std::string& name) const {
    return op.schema().argumentIndexWithName(name).has_value();
  }
  Tensor tensor(const std::string& name) const {  // undefined if it is None
    auto& value = (*this)(name);
    return value.isTensor() ? value.toTensor() : Tensor();
  }
};

// Key and value have fewer heads where they are grouped.
static Tensor repeat_heads(const Tensor& t, int64_t heads) {
  return t.size(1) == heads ? t : t.repeat_interleave(heads / t.size(1), 1);
}
static Tensor sum_heads(const Tensor& gradient, int64_t heads) {
  if (gradient.size(1) == heads) return gradient;
  return gradient.unflatten(1, {heads, gradient.size(1) / heads}).sum(2);
}

// Flash and memory-efficient attention are the CPU's flash kernel.
static void attention(const OperatorHandle& op, Stack* stack) {
  const Arguments args{op, *stack};
  const bool is_backward = args.has("grad_out") || args.has("grad_out_");
  Call call{describe(op)};
  auto host = [&](const std::string& name) { return call.to_host(args.tensor(name), false); };

  const auto q = host("query");
  const auto heads = q.size(1);
  const auto groups = args.tensor("key").size(1);
  const auto k = repeat_heads(host("key"), heads), v = repeat_heads(host("value"), heads);
  const bool has_mask = args.has("attn_bias");
  const auto mask = has_mask ? host("attn_bias") : Tensor();
  const std::optional<Tensor> attn_mask = mask.defined() ? std::optional(mask) : std::nullopt;
  const bool causal = args("is_causal").toBool();
  const auto scale = args("scale").toOptional<double>();
  TORCH_CHECK(args("dropout_p").toDouble() == 0, "simgpu: no dropout inside of attention");

  std::vector<IValue> results;
  if (is_backward) {
    const auto grad = host(has_mask ? "grad_out_" : "grad_out");
    auto [dq, dk, dv] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, host("out"), host("logsumexp"), 0.0, causal, attn_mask, scale);
    for (auto& t : {dq, sum_heads(dk, groups), sum_heads(dv, groups)})
      results.emplace_back(call.to_device(t));
    if (has_mask) results.emplace_back(Tensor());  // of a mask that trains: none
  } else {
    auto [out, logsumexp] =
        at::_scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask, scale);
    // Memory-efficient attention's lies as (B, T, heads, size), whatever the query's; compiled code
    // relies on it.
    if (has_mask) out = out.transpose(1, 2).contiguous().transpose(1, 2);
    for (auto& result : op.schema().returns()) {
      auto& name = result.name();
      if (name == "output") results.emplace_back(call.to_device(out));
      else if (name == "logsumexp" || name == "log_sumexp")
        results.emplace_back(call.to_device(logsumexp));
      else if (name == "max_q") results.emplace_back(q.sym_size(2));
      else if (name == "max_k") results.emplace_back(k.sym_size(2));
      else if (name == "cum_seq_q" || name == "cum_seq_k") results.emplace_back(Tensor());
      else results.emplace_back(at::empty({0}, args.tensor("query").options().dtype(kLong)));
    }
  }
  call.require_one_device();
  torch::jit::drop(*stack, op.schema().arguments().size());
  for (auto& result : results) stack->push_back(result);
  call.note();
}

// A norm that a CPU build composes of many operations: a GPU's keeps the input and a number a row.
static std::vector<int64_t> last_dimensions(const IValue& shape) {
  std::vector<int64_t> dimensions;
  for (int64_t i = -(int64_t)shape.toListRef().size(); i < 0; i++) dimensions.push_back(i);
  return dimensions;
}
static void rms_norm(const OperatorHandle& op, Stack* stack) {
  const Arguments args{op, *stack};
  Call call{describe(op)};
  const auto input = call.to_host(args.tensor("input"), false);
  const auto weight = call.to_host(args.tensor("weight"), false);
  const auto over = last_dimensions(args("normalized_shape"));
  const auto x = input.to(kFloat);
  std::vector<Tensor> results;
  if (args.has("grad_out")) {
    const auto grad = call.to_host(args.tensor("grad_out"), false).to(kFloat);
    const auto normal = x * call.to_host(args.tensor("rstd"), false);
    const auto g = weight.defined() ? grad * weight.to(kFloat) : grad;
    const auto rstd = call.to_host(args.tensor("rstd"), false);
    results.push_back((rstd * (g - normal * (g * normal).mean(over, true))).to(input.dtype()));
    results.push_back(
        weight.defined() ? (grad * normal).reshape({-1, weight.numel()}).sum(0)
                               .view(weight.sizes()).to(weight.dtype())
                         : Tensor());
  } else {
    const auto eps = args("eps").toOptional<double>();
    const auto rstd = (x.square().mean(over, true) +
        eps.value_or(std::numeric_limits<float>::epsilon())).rsqrt();
    const auto normal = x * rstd;
    results.push_back(
        (weight.defined() ? normal * weight.to(kFloat) : normal).to(input.dtype()));
    results.push_back(rstd);
  }
  call.require_one_device();
  torch::jit::drop(*stack, op.schema().arguments().size());
  for (auto& t : results) stack->push_back(call.to_device(t));
  call.note();
}

// ---------- 6. collectives: on a stream of their own, while gloo moves the bytes ------------------
//
// NCCL's collective is an operation of a stream of its communicator. It begins after what the calling
// stream has been given, and the calling stream goes on after it only once somebody calls wait(),
// which does not stop the host. Here gloo begins at once, in its own threads, and the next operation
// that touches the memory waits for gloo. So the host is not stopped either: another collective, or a
// barrier of the CPU's group, may come first on another rank, as with NCCL.

struct InFlight {
  intrusive_ptr<c10d::Work> work;
  std::vector<Bytes> bytes;
};
static auto& in_flight = *new std::vector<InFlight>;

static void wait_for_collectives_on(const void* begin, size_t size) {
  std::vector<intrusive_ptr<c10d::Work>> works;
  {
    Locked l(lock);
    if (in_flight.empty()) return;
    std::vector<InFlight> rest;
    for (auto& f : in_flight) {
      const bool overlaps = std::any_of(f.bytes.begin(), f.bytes.end(), [&](const Bytes& b) {
        return b.begin < (const char*)begin + size && (const char*)begin < b.begin + b.size;
      });
      if (overlaps) works.push_back(f.work);
      else rest.push_back(f);
    }
    in_flight.swap(rest);
  }
  for (auto& work : works) work->wait();
}

// What NCCL returns.
struct CollectiveWork final : c10d::Work {
  std::vector<Device> devices;
  Event end;  // of the collective
  std::vector<Tensor> kept;  // inputs and outputs, until somebody waits
  intrusive_ptr<ivalue::Future> future;

  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  void synchronize() override { wait(kNoTimeout); }
  bool wait(std::chrono::milliseconds) override {
    for (auto& device : devices) wait_for_event(end, current(device.index()));
    kept.clear();
    return true;
  }
  intrusive_ptr<ivalue::Future> getFuture() override { return future; }
};

// Called by nccl.py once gloo has begun. While recording it has not: a replay begins number i.
static intrusive_ptr<c10d::Work> collective(
    const std::string& name, const std::vector<Tensor>& reads, const std::vector<Tensor>& writes,
    const std::optional<intrusive_ptr<c10d::Work>>& gloo, int64_t i, int64_t communicator,
    Device device) {
  static auto& names = *new std::set<std::string>;
  const std::string* kept_name;
  {
    Locked l(lock);
    kept_name = &*names.insert(name).first;
  }
  auto work = make_intrusive<CollectiveWork>();
  work->devices = {device};
  InFlight flight{gloo.value_or(nullptr), {}};
  for (auto* tensors : {&reads, &writes})
    for (auto& t : *tensors) {
      flight.bytes.push_back(bytes_of(t));
      work->kept.push_back(t);
    }
  const StreamId stream = stream_of(device.index(), FIRST_OF_NCCL + communicator);
  wait_for_event(event_on(current(device.index())), stream);
  if (auto* recording = recording_on(stream)) {
    std::vector<Tensor> from, to;
    for (auto& t : reads) from.push_back(frozen(t));
    for (auto& t : writes) to.push_back(frozen(t));
    recording->steps.push_back([=] {
      static const auto begin = Dispatcher::singleton()
          .findSchemaOrThrow("simgpu::begin", "")
          .typed<intrusive_ptr<c10d::Work>(int64_t)>();
      for (auto* tensors : {&from, &to}) std::for_each(tensors->begin(), tensors->end(), settle);
      collective(name, from, to, begin.call(i), i, communicator, device)->wait(kNoTimeout);
    });
  } else {
    Locked l(lock);
    in_flight.push_back(flight);
  }
  launch(stream, priced(name, reads, writes));
  std::vector<std::string> races;
  for (auto& t : reads) touch(t, false, stream, *kept_name, races);
  for (auto& t : writes) touch(t, true, stream, *kept_name, races);
  work->end = event_on(stream);
  // A future of CUDA's notes the current stream when it is completed, and makes who waits for it, or
  // goes on from it, wait for that: here NCCL's stream, and after it DDP's hooks.
  work->future = make_intrusive<ivalue::Future>(
      ListType::create(TensorType::get()), std::vector<Device>{device});
  const auto before = current_stream[device.index()];
  current_stream[device.index()] = FIRST_OF_NCCL + communicator;
  work->future->markCompleted(IValue(writes));
  current_stream[device.index()] = before;
  tell_races(races);
  return work;
}

// ---------- 7. recordings: CUDA graphs, operations that are run again, on the same memory ---------
//
// CUDA runs nothing while it records. Here operations run, on their streams, so that results have
// sizes and races are found; but collectives send nothing, and in the end memory and the generator
// are put back. A replay runs the operations in their order, as work of one stream: with the numbers
// that they had, on the memory that they had. Autograd, autocast and Python have no part in it.

static std::vector<Tensor> tensors_in(ArrayRef<IValue> values) {
  std::vector<Tensor> all;
  for (IValue value : values)
    replace_tensors(value, [&](const Tensor& t) { return all.emplace_back(t); });
  return all;
}

// A replay draws its own random numbers, in the recording's order, and goes back to an earlier state
// of the generator where the recording did (recomputation in backward). It knows which one by the
// bytes that the state had in the recording.
static std::string bytes_of(const at::Generator& generator) {
  const auto state = generator.get_state();
  return std::string((char*)state.data_ptr(), state.nbytes());
}
static void note_state(Recording* recording, const at::Generator& generator) {
  const auto bytes = bytes_of(generator);
  recording->states[bytes];
  recording->steps.push_back([=] { recording->states[bytes] = generator.get_state(); });
}
static void take_state(Recording* recording, at::Generator generator) {
  const auto bytes = bytes_of(generator);
  TORCH_CHECK(
      recording->states.count(bytes), "CUDAGeneratorImpl::set_current_seed can be called during "
      "stream capture only if new seed is the same as the original seed.");
  recording->steps.push_back([=]() mutable { generator.set_state(recording->states[bytes]); });
}

using Kernel = void (*)(const OperatorHandle&, Stack*);
template <Kernel kernel>
static void recorded(const OperatorHandle& op, Stack* stack) {
  auto* recording = recording_on(current(current_device));
  if (!recording || describe(op).is_view) return kernel(op, stack);
  auto last = torch::jit::last(*stack, op.schema().arguments().size());
  Stack args(last.begin(), last.end());
  const bool draws = describe(op).draws;
  if (draws) take_state(recording, default_generator(current_device));
  kernel(op, stack);
  last = torch::jit::last(*stack, op.schema().returns().size());
  Stack results(last.begin(), last.end());
  for (auto* values : {&args, &results})
    for (auto& value : *values) replace_tensors(value, frozen);
  recording->steps.push_back([=, results = tensors_in(results)] {
    Stack stack = args;
    kernel(op, &stack);
    const auto made = tensors_in(stack);
    for (size_t i = 0; i < made.size(); i++) {
      Tensor to = results[i];
      if (to.defined() && to.storage().data() != made[i].storage().data()) copy_(to, made[i], false);
    }
  });
  if (draws) note_state(recording, default_generator(current_device));
}

static int64_t begin_recording() {
  const auto stream = current(current_device);
  TORCH_CHECK(
      stream % STREAMS_OF_A_DEVICE, "CUDA graphs must be captured on a non-default stream. "
      "(However, after capture, it's ok to replay them on the default stream.)");
  Locked l(lock);
  auto* recording = new Recording{stream, default_generator(current_device).get_state()};
  for (auto& [p, block] : blocks)
    if (block.device == current_device)
      recording->memory_before[block.memory].assign(p, p + block.size);
  note_state(recording, default_generator(current_device));
  recordings[stream] = recording;
  return (int64_t)recording;
}

static void end_recording(int64_t number) {
  auto* recording = (Recording*)number;
  Locked l(lock);
  const auto& origin = streams[recording->origin];
  bool is_joined = true;
  for (auto& [stream, its_recording] : recordings) {
    if (its_recording != recording) continue;
    const auto count = streams[stream].seen[stream];
    is_joined &= !count || origin.knows(stream, count) || host.knows(stream, count);
    its_recording = nullptr;
  }
  host.wait_for(origin);  // for nothing: nothing has run
  auto& before = recording->memory_before;
  for (auto& [memory, bytes] : before) memcpy(memory.get(), bytes.data(), bytes.size());
  for (auto& [p, block] : blocks)
    if (block.device == current_device && !before.count(block.memory))
      memset((char*)p, 0xFF, block.size);
  before.clear();
  take_state(recording, default_generator(current_device));
  default_generator(current_device).set_state(recording->generator_before);
  if (!is_joined) fail(recording, 904, "capturing stream has unjoined work");
  if (recording->is_invalid)
    fail(recording, 901, "operation failed due to a previous error during capture");
}

static void replay(int64_t number) {
  auto* recording = (Recording*)number;
  TORCH_CHECK(
      recording && !recording->is_invalid,
      "Called CUDAGraph::replay without a preceding successful capture.");
  at::AutoDispatchBelowADInplaceOrView below;
  for (auto& step : recording->steps) step();
}

// ---------- 8. answers: device guard, hooks, generator --------------------------------------------

struct Guard final : impl::DeviceGuardImplInterface {
  static Device of(Device d) { return d.has_index() ? d : Device(kCUDA, current_device); }
  static StreamId id(const Stream& s) { return stream_of(s.device_index(), s.id()); }
  static Stream stream(Device d, int64_t id) { return Stream(Stream::UNSAFE, of(d), id); }

  DeviceType type() const override { return kCUDA; }
  DeviceIndex deviceCount() const noexcept override { return number_of_devices(); }
  Device getDevice() const override { return Device(kCUDA, current_device); }
  void setDevice(Device d) const override {
    TORCH_CHECK(d.index() < number_of_devices(), "CUDA error: invalid device ordinal ", d);
    if (d.has_index()) current_device = d.index();
  }
  void uncheckedSetDevice(Device d) const noexcept override {
    if (d.has_index()) current_device = d.index();
  }
  Device exchangeDevice(Device d) const override {
    const Device before(kCUDA, current_device);
    setDevice(d);
    return before;
  }

  Stream getStream(Device d) const override { return stream(d, current_stream[of(d).index()]); }
  Stream getDefaultStream(Device d) const override { return stream(d, 0); }
  Stream getNewStream(Device d, int) const override {
    static int64_t last = 0;
    Locked l(lock);
    last = last % POOL + 1;
    return stream(d, last);
  }
  Stream getStreamFromGlobalPool(Device d, bool) const override { return getNewStream(d, 0); }
  Stream exchangeStream(Stream s) const override {
    const auto before = getStream(s.device());
    current_stream[s.device_index()] = s.id();
    return before;
  }

  void record(void** event, const Stream& s, const DeviceIndex, const EventFlag) const override {
    if (!*event) *event = new Event;
    *(Event*)*event = event_on(id(s));
  }
  void block(void* event, const Stream& s) const override {
    if (event) wait_for_event(*(Event*)event, id(s));
  }
  bool isStreamCapturing(const Stream& s) const override { return recording_on(id(s)); }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    delete (Event*)event;
  }
  // Whoever asks will ask again until it is so: it is so, and the host knows.
  bool queryEvent(void* event) const override {
    if (event) host_waits_for(*(Event*)event);
    return true;
  }
  bool queryStream(const Stream& s) const override {
    host_waits_for_stream(id(s));
    return true;
  }
  void synchronizeEvent(void* event) const override {
    if (event) wait("synchronize an event", *(Event*)event);
  }
  void synchronizeStream(const Stream& s) const override {
    TimeLine line;
    {
      Locked l(lock);
      line = streams[id(s)];
    }
    wait("synchronize a stream", line);
  }
  void synchronizeDevice(const DeviceIndex i) const override {
    TimeLine all;
    {
      Locked l(lock);
      for (auto& [stream, line] : streams)
        if (stream / STREAMS_OF_A_DEVICE == i) all.wait_for(line);
    }
    wait("synchronize the device", all);
  }
  static void wait(const char* what, const TimeLine& line) {
    tell("wait", what, 0, true);
    host_waits_for(line);
    wait_for_collectives_on(nullptr, SIZE_MAX);
  }
  double elapsedTime(void* from, void* to, const DeviceIndex) const override {
    return (((Event*)to)->seconds - ((Event*)from)->seconds) * 1000;
  }
  void recordDataPtrOnStream(const DataPtr& p, const Stream& s) const override {
    Locked l(lock);
    if (auto* block = block_of(p.get())) block->recorded.insert(id(s));
  }
};

static void record_stream(Tensor& t, Stream s) {
  Guard().recordDataPtrOnStream(t.storage().data_ptr(), s);
}

struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex i) const override {
    Locked l(lock);
    return devices_used.count(i);
  }
  DeviceIndex deviceCount() const override { return number_of_devices(); }
  int getNumGPUs() const override { return number_of_devices(); }
  DeviceIndex current_device() const override { return simgpu::current_device; }
  DeviceIndex getCurrentDevice() const override { return simgpu::current_device; }
  void setCurrentDevice(DeviceIndex i) const override { Guard().setDevice(Device(kCUDA, i)); }
  DeviceIndex exchangeDevice(DeviceIndex i) const override {
    const auto before = simgpu::current_device;
    if (i >= 0) setCurrentDevice(i);
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex i) const override { return exchangeDevice(i); }
  void deviceSynchronize(DeviceIndex i) const override { Guard().synchronizeDevice(i); }
  Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  Allocator* getCUDADeviceAllocator() const override { return &device_memory; }
  bool isPinnedPtr(const void* p) const override { return is_pinned(p); }
  Device getDeviceFromPtr(void* p) const override {
    Locked l(lock);
    auto* block = block_of(p);
    TORCH_CHECK(block, "this pointer is not a simulated GPU's");
    return Device(kCUDA, block->device);
  }
  const at::Generator& getDefaultGenerator(DeviceIndex i) const override {
    return default_generator(i);
  }
  at::Generator getNewGenerator(DeviceIndex i) const override {
    return at::make_generator<SimGenerator>(i);
  }
};

// DDP's logger wants to know how long things take.
struct HostTimer final : c10d::Timer {
  explicit HostTimer(Device) {}
  std::optional<int64_t> measureDifference(Event a, Event b) override {
    host_waits_for({});  // CUDA's does: DDP may not be recorded while it measures
    return getTimeRef(b) - getTimeRef(a);
  }
};

// Memory without values.
template <class Make>
static Tensor on_device(std::optional<Device> device, Make make) {
  const auto before = current_device;
  if (device && device->has_index()) Guard().setDevice(*device);
  auto t = make();
  current_device = before;
  return t;
}
static Tensor empty(
    IntArrayRef size, std::optional<ScalarType> dtype, std::optional<Layout>,
    std::optional<Device> device, std::optional<bool>, std::optional<MemoryFormat> format) {
  return on_device(device, [&] {
    return at::detail::empty_generic(
        size, &device_memory, DispatchKeySet(DispatchKey::CUDA), dtype_or_default(dtype), format);
  });
}
static Tensor empty_strided(
    IntArrayRef size, IntArrayRef stride, std::optional<ScalarType> dtype, std::optional<Layout>,
    std::optional<Device> device, std::optional<bool>) {
  return on_device(device, [&] {
    return at::detail::empty_strided_generic(
        size, stride, &device_memory, DispatchKeySet(DispatchKey::CUDA), dtype_or_default(dtype));
  });
}
// FSDP's way to allocate and to free what it gathers.
static void resize_storage(const Tensor& t, int64_t size) {
  auto* storage = t.storage().unsafeGetStorageImpl();
  on_device(storage->device(), [&] {
    DataPtr memory = device_memory.allocate(size);
    if (const auto n = std::min<size_t>(storage->nbytes(), size))
      memcpy(memory.get(), storage->data(), n);
    storage->set_data_ptr_noswap(std::move(memory));
    storage->set_nbytes(size);
    return Tensor();
  });
}
static const Tensor& resize_(const Tensor& t, IntArrayRef size, std::optional<MemoryFormat>) {
  t.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  const size_t need = (t.numel() + t.storage_offset()) * t.itemsize();
  if (t.storage().nbytes() < need) resize_storage(t, need);
  return t;
}
static Tensor& set_storage(
    Tensor& t, Storage source, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  t.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  t.unsafeGetTensorImpl()->set_storage_offset(offset);
  t.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
  return t;
}

// The price of an operation in seconds: Python's, if it wants to know the time.
static bool is_priced = false;
static double priced(const std::string& name, at::TensorList reads, at::TensorList writes) {
  if (!is_priced) return 0;
  static const auto op = Dispatcher::singleton()
      .findSchemaOrThrow("simgpu::price", "")
      .typed<double(std::string_view, at::TensorList, at::TensorList)>();
  return op.call(name, reads, writes);
}

// For nccl.py: the memory of the host's or the device's, without owning it. Freeing waits for gloo.
static Tensor borrowed(const Tensor& t) {
  settle(t);
  return host_view(t, /*keep=*/false);
}

TORCH_LIBRARY(simgpu, m) {
  m.def("price(str name, Tensor[] reads, Tensor[] writes) -> float");  // Python's
  m.def("resize_storage(Tensor t, int n) -> ()");
  m.def("borrowed(Tensor t) -> Tensor");
  m.def(
      "collective(str name, Tensor[] reads, Tensor[] writes, "
      "__torch__.torch.classes.c10d.Work? gloo, int i, int communicator, Device device) -> "
      "__torch__.torch.classes.c10d.Work",
      collective);
  m.def("begin(int i) -> __torch__.torch.classes.c10d.Work");  // Python's
  m.def("begin_recording() -> int", begin_recording);
  m.def("end_recording(int number) -> ()", end_recording);
  m.def("replay(int number) -> ()", replay);
  m.def("default_generator(int i) -> Generator?", [](int64_t i) {
    return std::optional<at::Generator>(default_generator(i));
  });
}
TORCH_LIBRARY_IMPL(simgpu, CUDA, m) {
  m.impl("resize_storage", resize_storage);
  m.impl("borrowed", borrowed);
}

// Before PyTorch is imported: it asks for these once, and keeps the answer. A CUDA build of PyTorch
// brings its own; these are preferred.
static const bool registered = [] {
  at::CUDAHooksRegistry()->Register(
      "CUDAHooks", [](at::CUDAHooksArgs) { return std::make_unique<Hooks>(); },
      REGISTRY_PREFERRED);
  c10d::TimerRegistry()->Register(
      kCUDA, [](Device d) { return std::make_unique<HostTimer>(d); }, REGISTRY_PREFERRED);
  return true;
}();

// After PyTorch is imported: here the last one counts. replace: a CUDA build's own kernels.
static void install(bool replace) {
  static Guard guard;
  impl::DeviceGuardImplRegistrar(kCUDA, &guard);
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choose_attention);

  // That an operation has two kernels is meant.
  struct Silent final : WarningHandler {
    void process(const Warning&) override {}
  } silent;
  WarningUtils::WarningHandlerGuard silence(&silent);

  using torch::CppFunction;
  using torch::Library;
  static auto& libraries = *new std::vector<std::unique_ptr<Library>>;
  auto library = [](const char* name) -> Library& {
    libraries.push_back(
        std::make_unique<Library>(Library::IMPL, name, DispatchKey::CUDA, __FILE__, __LINE__));
    return *libraries.back();
  };
  auto& aten = library("aten");
  std::set<std::string> own;
  auto implement = [&](const char* name, CppFunction&& function) {
    own.insert(name);
    aten.impl(name, std::move(function));
  };
  implement("empty.memory_format", CppFunction(empty));
  implement("empty_strided", CppFunction(empty_strided));
  implement("copy_", CppFunction(copy_));
  implement("_foreach_copy_", CppFunction(foreach_copy_));
  implement("resize_", CppFunction(resize_));
  implement("set_.source_Storage_storage_offset", CppFunction(set_storage));
  implement("record_stream", CppFunction(record_stream));
  for (auto* name : {
           "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward",
           "_scaled_dot_product_efficient_attention",
           "_scaled_dot_product_efficient_attention_backward"})
    implement(name, CppFunction::makeFromBoxedFunction<&recorded<&attention>>());

  for (auto* name : {"_fused_rms_norm", "_fused_rms_norm_backward"})
    implement(name, CppFunction::makeFromBoxedFunction<&recorded<&rms_norm>>());

  // Everything else. A CPU build has no kernels for CUDA, so a fallback takes all; a CUDA build's are
  // replaced one by one. But in a CPU build PyTorch would compose some of others before it comes to
  // the fallback: `x += y` of a sum and a copy, the gradient of SiLU with five tensors in between. So
  // what has one kernel on a CPU has one here, and so has what only a GPU has one for.
  library("_").fallback(CppFunction::makeFromBoxedFunction<&recorded<&run>>());
  for (auto& name : Dispatcher::singleton().getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    const auto short_name = name.name.substr(6) +
        (name.overload_name.empty() ? "" : "." + name.overload_name);
    auto op = Dispatcher::singleton().findOp(name);
    if (own.count(short_name) || !op) continue;
    const bool on_gpu_alone = short_name.rfind("_foreach_", 0) == 0 ||
        short_name.rfind("_chunk_cat", 0) == 0 || short_name == "split_with_sizes_copy.out";
    const bool has_kernel = on_gpu_alone || op->hasKernelForDispatchKey(DispatchKey::CPU) ||
        (replace && op->hasKernelForDispatchKey(DispatchKey::CUDA));
    if (!has_kernel) continue;
    aten.impl(short_name.c_str(), CppFunction::makeFromBoxedFunction<&recorded<&run>>());
  }
}

}  // namespace simgpu

// ---------- what Python calls by ctypes -----------------------------------------------------------

extern "C" {
using namespace simgpu;

void simgpu_install(int replace) { install(replace); }
void simgpu_listen(Listener l) { listener = l; }
void simgpu_price(int on) { is_priced = on; }
int64_t simgpu_allocated(int device) { Locked l(lock); return allocated[device]; }
int64_t simgpu_kept(int device) { Locked l(lock); return kept[device]; }
int64_t simgpu_peak(int device) { Locked l(lock); return peak[device]; }
void simgpu_reset_peak(int device) { Locked l(lock); peak[device] = allocated[device]; }
int64_t simgpu_pinned() { Locked l(lock); return pinned_now; }
int64_t simgpu_pinned_peak() { Locked l(lock); return pinned_peak; }
void simgpu_reset_pinned_peak() { Locked l(lock); pinned_peak = pinned_now; }
void simgpu_forget(int64_t recording) {
  wait_for_collectives_on(nullptr, SIZE_MAX);
  delete (Recording*)recording;
}
int64_t simgpu_late() { Locked l(lock); return late.size(); }
int simgpu_used(int device) { Locked l(lock); return devices_used.count(device); }
double simgpu_elapsed(void* from, void* to) {
  return ((TimeLine*)to)->seconds - ((TimeLine*)from)->seconds;
}
double simgpu_seconds(int device, int64_t stream) {
  Locked l(lock);
  return stream < 0 ? host.seconds : streams[stream_of(device, stream)].seconds;
}
}

// A GPU driver without a GPU, under CUDA's names and HIP's: copies and events are done later, by a thread per
// stream.
//
// Device memory has addresses that fault where the host looks at them. Every call is counted by CUDA's name.
// The functions beginning with `fake` are the tests' handles.
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kOutOfMemory = 2, kInvalidContext = 201, kAlreadyRegistered = 712, kNotRegistered = 713,
              kNotReady = 600;
constexpr uint64_t kDeviceTag = 1ull << 52;

struct Event {
  std::atomic<int> pending{0};
};

struct Failure {
  int code;
  int64_t skip;   // calls that still succeed
  int64_t times;  // then this many fail
};

struct State {
  std::mutex mutex;  // protects everything below but the atomics
  std::map<std::string, uint64_t> counts;
  std::map<std::string, Failure> failures;
  std::map<uintptr_t, uint64_t> registered;
  std::multiset<uintptr_t> targets;  // of copies that are not done
  uint64_t pageable = 0;
  uint64_t violations = 0;
  std::mutex gate_mutex;  // protects `held`
  std::condition_variable gate;
  bool held = false;
  std::atomic<int64_t> delay_us{0};
};

State* const state = new State;
int context_object;
thread_local std::vector<void*> contexts;
thread_local int hip_device = 7;

// Counts a call. Returns the error with which it must fail, or 0.
int Begin(const char* name) {
  std::lock_guard<std::mutex> lock(state->mutex);
  ++state->counts[name];
  const auto failure = state->failures.find(name);
  if (failure == state->failures.end()) return 0;
  if (failure->second.skip-- > 0) return 0;
  return failure->second.times-- > 0 ? failure->second.code : 0;
}

class Stream {
 public:
  Stream() : thread_(&Stream::Run, this) { thread_.detach(); }

  void Add(std::function<void()> work) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      queue_.push_back(std::move(work));
    }
    arrived_.notify_one();
  }

  bool Idle() {
    std::lock_guard<std::mutex> lock(mutex_);
    return queue_.empty();
  }

 private:
  void Run() {
    for (;;) {
      std::function<void()>* work;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        arrived_.wait(lock, [this] { return !queue_.empty(); });
        work = &queue_.front();
      }
      {
        std::unique_lock<std::mutex> lock(state->gate_mutex);
        state->gate.wait(lock, [] { return !state->held; });
      }
      if (const int64_t delay = state->delay_us.load())
        std::this_thread::sleep_for(std::chrono::microseconds(delay));
      (*work)();
      std::lock_guard<std::mutex> lock(mutex_);
      queue_.pop_front();
    }
  }

  std::mutex mutex_;  // protects the queue
  std::condition_variable arrived_;
  std::deque<std::function<void()>> queue_;
  std::thread thread_;
};

uint8_t* Untagged(uint64_t address) { return reinterpret_cast<uint8_t*>(address & ~kDeviceTag); }

bool CoversLocked(uintptr_t address, size_t nbytes) {
  auto range = state->registered.upper_bound(address);
  if (range == state->registered.begin()) return false;
  --range;
  return address + nbytes <= range->first + range->second;
}

int CopyToHost(const char* name, bool ready, void* to, uint64_t from, size_t nbytes, void* stream) {
  if (const int error = Begin(name)) return error;
  if (!ready) return kInvalidContext;
  const auto target = reinterpret_cast<uintptr_t>(to);
  {
    std::lock_guard<std::mutex> lock(state->mutex);
    if (!(from & kDeviceTag)) ++state->violations;
    if (!CoversLocked(target, nbytes)) ++state->pageable;
    state->targets.insert(target);
  }
  static_cast<Stream*>(stream)->Add([=] {
    std::memcpy(to, Untagged(from), nbytes);
    std::lock_guard<std::mutex> lock(state->mutex);
    state->targets.erase(state->targets.find(target));
  });
  return 0;
}

int CopyOnDevice(bool ready, uint64_t to, uint64_t from, size_t nbytes, void* stream) {
  if (const int error = Begin("cuMemcpyDtoDAsync_v2")) return error;
  if (!ready) return kInvalidContext;
  static_cast<Stream*>(stream)->Add([=] { std::memcpy(Untagged(to), Untagged(from), nbytes); });
  return 0;
}

int CreateEvent(bool ready, void** event, unsigned flags) {
  if (const int error = Begin("cuEventCreate")) return error;
  if (!ready) return kInvalidContext;
  if (flags != 2) return 1;  // with times an event costs more
  *event = new Event;
  return 0;
}

int DestroyEvent(void* event) {
  if (const int error = Begin("cuEventDestroy_v2")) return error;
  delete static_cast<Event*>(event);
  return 0;
}

int RecordEvent(bool ready, void* event, void* stream) {
  if (const int error = Begin("cuEventRecord")) return error;
  if (!ready) return kInvalidContext;
  static_cast<Event*>(event)->pending.fetch_add(1);
  static_cast<Stream*>(stream)->Add([=] { static_cast<Event*>(event)->pending.fetch_sub(1); });
  return 0;
}

int QueryEvent(void* event) {
  if (const int error = Begin("cuEventQuery")) return error;
  return static_cast<Event*>(event)->pending.load() != 0 ? kNotReady : 0;
}

int QueryStream(void* stream) {
  if (const int error = Begin("cuStreamQuery")) return error;
  return static_cast<Stream*>(stream)->Idle() ? 0 : kNotReady;
}

int Register(bool ready, void* memory, size_t nbytes) {
  if (const int error = Begin("cuMemHostRegister_v2")) return error;
  if (!ready) return kInvalidContext;
  std::lock_guard<std::mutex> lock(state->mutex);
  const auto address = reinterpret_cast<uintptr_t>(memory);
  if (state->registered.count(address)) return kAlreadyRegistered;
  state->registered[address] = nbytes;
  return 0;
}

int Unregister(bool ready, void* memory) {
  if (const int error = Begin("cuMemHostUnregister")) return error;
  if (!ready) return kInvalidContext;
  std::lock_guard<std::mutex> lock(state->mutex);
  const auto range = state->registered.find(reinterpret_cast<uintptr_t>(memory));
  if (range == state->registered.end()) return kNotRegistered;
  const auto target = state->targets.lower_bound(range->first);
  if (target != state->targets.end() && *target < range->first + range->second) ++state->violations;
  state->registered.erase(range);
  return 0;
}

bool InContext() { return !contexts.empty(); }
bool OnDevice() { return hip_device == 3; }

}  // namespace

// CUDA.
EXPORT int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return Begin("cuDeviceGet");
}
EXPORT int cuDevicePrimaryCtxRetain(void** context, int) {
  *context = &context_object;
  return Begin("cuDevicePrimaryCtxRetain");
}
EXPORT int cuCtxPushCurrent_v2(void* context) {
  if (const int error = Begin("cuCtxPushCurrent_v2")) return error;
  contexts.push_back(context);
  return 0;
}
EXPORT int cuCtxPopCurrent_v2(void** context) {
  if (const int error = Begin("cuCtxPopCurrent_v2")) return error;
  if (contexts.empty()) return kInvalidContext;
  *context = contexts.back();
  contexts.pop_back();
  return 0;
}
EXPORT int cuMemcpyDtoHAsync_v2(void* to, unsigned long long from, size_t nbytes, void* stream) {
  return CopyToHost("cuMemcpyDtoHAsync_v2", InContext(), to, from, nbytes, stream);
}
EXPORT int cuMemcpyDtoDAsync_v2(unsigned long long to, unsigned long long from, size_t nbytes, void* stream) {
  return CopyOnDevice(InContext(), to, from, nbytes, stream);
}
EXPORT int cuEventCreate(void** event, unsigned flags) { return CreateEvent(InContext(), event, flags); }
EXPORT int cuEventDestroy_v2(void* event) { return DestroyEvent(event); }
EXPORT int cuEventRecord(void* event, void* stream) { return RecordEvent(InContext(), event, stream); }
EXPORT int cuEventQuery(void* event) { return QueryEvent(event); }
EXPORT int cuStreamQuery(void* stream) { return QueryStream(stream); }
EXPORT int cuMemHostRegister_v2(void* memory, size_t nbytes, unsigned) {
  return Register(InContext(), memory, nbytes);
}
EXPORT int cuMemHostUnregister(void* memory) { return Unregister(InContext(), memory); }

// Functions that would make the host wait for the device, or the device for the host. None may be called.
#define WAITS(name) \
  EXPORT int name() { return Begin(#name); }
WAITS(cuStreamSynchronize)
WAITS(cuCtxSynchronize)
WAITS(cuEventSynchronize)
WAITS(cuMemcpyDtoH_v2)
WAITS(cuMemcpy)
WAITS(cuLaunchHostFunc)
WAITS(cuStreamAddCallback)
WAITS(cuStreamWaitValue32_v2)
WAITS(cuMemAllocHost_v2)
WAITS(cuMemHostAlloc)
WAITS(cuMemFreeHost)
WAITS(cuMemFree_v2)

// HIP.
EXPORT int hipGetDevice(int* ordinal) {
  *ordinal = hip_device;
  return 0;
}
EXPORT int hipSetDevice(int ordinal) {
  hip_device = ordinal;
  return 0;
}
EXPORT int hipMemcpyDtoHAsync(void* to, void* from, size_t nbytes, void* stream) {
  return CopyToHost("cuMemcpyDtoHAsync_v2", OnDevice(), to, reinterpret_cast<uint64_t>(from), nbytes, stream);
}
EXPORT int hipMemcpyDtoDAsync(void* to, void* from, size_t nbytes, void* stream) {
  return CopyOnDevice(OnDevice(), reinterpret_cast<uint64_t>(to), reinterpret_cast<uint64_t>(from), nbytes,
                      stream);
}
EXPORT int hipEventCreateWithFlags(void** event, unsigned flags) {
  return CreateEvent(OnDevice(), event, flags);
}
EXPORT int hipEventDestroy(void* event) { return DestroyEvent(event); }
EXPORT int hipEventRecord(void* event, void* stream) { return RecordEvent(OnDevice(), event, stream); }
EXPORT int hipEventQuery(void* event) { return QueryEvent(event); }
EXPORT int hipStreamQuery(void* stream) { return QueryStream(stream); }
EXPORT int hipHostRegister(void* memory, size_t nbytes, unsigned) {
  return Register(OnDevice(), memory, nbytes);
}
EXPORT int hipHostUnregister(void* memory) { return Unregister(OnDevice(), memory); }

// The tests' handles.
EXPORT void* fake_stream() { return new Stream; }
EXPORT uint64_t fake_allocate(uint64_t nbytes) {
  return reinterpret_cast<uint64_t>(::operator new(nbytes + 64)) | kDeviceTag;
}
EXPORT void fake_free(uint64_t address) { ::operator delete(Untagged(address)); }

// The effect of a kernel: in the stream's order, it writes to device memory.
EXPORT void fake_write(void* stream, uint64_t address, const void* bytes, uint64_t nbytes) {
  std::vector<uint8_t> copy(static_cast<const uint8_t*>(bytes), static_cast<const uint8_t*>(bytes) + nbytes);
  static_cast<Stream*>(stream)->Add([=] { std::memcpy(Untagged(address), copy.data(), copy.size()); });
}
EXPORT void fake_read(uint64_t address, void* bytes, uint64_t nbytes) {
  std::memcpy(bytes, Untagged(address), nbytes);
}
EXPORT int fake_idle(void* stream) { return static_cast<Stream*>(stream)->Idle(); }

// Streams do nothing while held.
EXPORT void fake_hold(int held) {
  {
    std::lock_guard<std::mutex> lock(state->gate_mutex);
    state->held = held != 0;
  }
  state->gate.notify_all();
}
EXPORT void fake_delay(int64_t microseconds) { state->delay_us.store(microseconds); }
EXPORT void fake_fail(const char* name, int code, int64_t skip, int64_t times) {
  std::lock_guard<std::mutex> lock(state->mutex);
  state->failures[name] = {code, skip, times};
}
EXPORT void fake_reset() {
  std::lock_guard<std::mutex> lock(state->mutex);
  state->failures.clear();
  state->counts.clear();
  state->pageable = state->violations = 0;
  state->delay_us.store(0);
}
EXPORT uint64_t fake_count(const char* name) {
  std::lock_guard<std::mutex> lock(state->mutex);
  const auto count = state->counts.find(name);
  return count == state->counts.end() ? 0 : count->second;
}
// Names of everything that was called, a line each. Returns the length.
EXPORT uint64_t fake_called(char* out, uint64_t out_bytes) {
  std::lock_guard<std::mutex> lock(state->mutex);
  std::string names;
  for (const auto& count : state->counts) names += count.first + "\n";
  std::snprintf(out, out_bytes, "%s", names.c_str());
  return names.size();
}
EXPORT uint64_t fake_pageable() {
  std::lock_guard<std::mutex> lock(state->mutex);
  return state->pageable;
}
// Reads of host memory as though it were the device's, and pinned memory given up while the device still
// writes to it.
EXPORT uint64_t fake_violations() {
  std::lock_guard<std::mutex> lock(state->mutex);
  return state->violations;
}
EXPORT uint64_t fake_registered_bytes() {
  std::lock_guard<std::mutex> lock(state->mutex);
  uint64_t nbytes = 0;
  for (const auto& range : state->registered) nbytes += range.second;
  return nbytes;
}
EXPORT uint64_t fake_context_depth() { return contexts.size(); }
EXPORT int fake_hip_device() { return hip_device; }

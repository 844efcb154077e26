#include "gpu/driver.h"

#include <dlfcn.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <string>
#include <thread>

#include "abi/exports.h"

namespace hcb {
namespace {

constexpr unsigned kDisableTiming = 2;     // CU_EVENT_DISABLE_TIMING, hipEventDisableTiming
constexpr unsigned kRegisterPortable = 1;  // CU_MEMHOSTREGISTER_PORTABLE, hipHostRegisterPortable
constexpr auto kMaxWaitAtExit = std::chrono::seconds(1);

// Never freed: handlers may call the driver until the process has ended.
struct Driver {
  GpuFunctions functions = {};
  hcb_gpu_vendor vendor;
};

std::mutex open_mutex;  // protects opening
std::atomic<Driver*> driver{nullptr};
std::atomic<bool> usable{false};
std::atomic<int64_t> uses{0};

struct Name {
  void** function;
  const char* cuda;  // null: the vendor needs no such function
  const char* hip;
};

template <typename F>
void** Slot(F* function) {
  return reinterpret_cast<void**>(function);
}

bool FindAll(void* library, hcb_gpu_vendor vendor, GpuFunctions* f, std::string* error) {
  const Name names[] = {
      {Slot(&f->copy_to_host), "cuMemcpyDtoHAsync_v2", "hipMemcpyDtoHAsync"},
      {Slot(&f->copy_on_device), "cuMemcpyDtoDAsync_v2", "hipMemcpyDtoDAsync"},
      {Slot(&f->event_create), "cuEventCreate", "hipEventCreateWithFlags"},
      {Slot(&f->event_destroy), "cuEventDestroy_v2", "hipEventDestroy"},
      {Slot(&f->event_record), "cuEventRecord", "hipEventRecord"},
      {Slot(&f->event_query), "cuEventQuery", "hipEventQuery"},
      {Slot(&f->stream_query), "cuStreamQuery", "hipStreamQuery"},
      {Slot(&f->host_register), "cuMemHostRegister_v2", "hipHostRegister"},
      {Slot(&f->host_unregister), "cuMemHostUnregister", "hipHostUnregister"},
      {Slot(&f->device_get), "cuDeviceGet", nullptr},
      {Slot(&f->context_retain), "cuDevicePrimaryCtxRetain", nullptr},
      {Slot(&f->context_push), "cuCtxPushCurrent_v2", nullptr},
      {Slot(&f->context_pop), "cuCtxPopCurrent_v2", nullptr},
      {Slot(&f->get_device), nullptr, "hipGetDevice"},
      {Slot(&f->set_device), nullptr, "hipSetDevice"},
  };
  for (const Name& entry : names) {
    const char* name = vendor == HCB_CUDA ? entry.cuda : entry.hip;
    if (name == nullptr) continue;
    *entry.function = dlsym(library, name);
    if (*entry.function == nullptr) {
      *error = std::string("it has no function ") + name;
      return false;
    }
  }
  return true;
}

void* Load(hcb_gpu_vendor vendor, const char* name, std::string* used) {
  static const char* const kCuda[] = {"libcuda.so.1", "libcuda.so", nullptr};
  static const char* const kRocm[] = {"libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6", nullptr};
  if (name != nullptr && *name != 0) {
    *used = name;
    return dlopen(name, RTLD_NOW | RTLD_LOCAL);
  }
  const char* const* candidates = vendor == HCB_CUDA ? kCuda : kRocm;
  *used = candidates[0];
  for (; *candidates != nullptr; ++candidates) {
    if (void* library = dlopen(*candidates, RTLD_NOW | RTLD_LOCAL)) return library;
  }
  // so that dlerror describes the first name, which users know best
  dlopen(used->c_str(), RTLD_NOW | RTLD_LOCAL);
  return nullptr;
}

// After this no driver call begins, and those in progress have ended (unless one hangs).
void CloseGpuDriver() {
  usable.store(false, std::memory_order_seq_cst);
  const auto deadline = std::chrono::steady_clock::now() + kMaxWaitAtExit;
  while (uses.load(std::memory_order_seq_cst) != 0 && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::yield();
  }
}

// Later calls change nothing. False with the reason in `error`.
bool OpenGpuDriver(hcb_gpu_vendor vendor, const char* library, std::string* error) {
  std::lock_guard<std::mutex> lock(open_mutex);
  if (Driver* found = driver.load(std::memory_order_relaxed)) {
    if (found->vendor == vendor) return true;
    *error = "this process has opened the driver of another vendor's GPUs";
    return false;
  }
  std::string used;
  void* handle = Load(vendor, library, &used);
  if (handle == nullptr) {
    const char* reason = dlerror();
    *error =
        "the GPU driver " + used + " cannot be loaded: " + (reason != nullptr ? reason : "no reason given");
    return false;
  }
  auto* found = new Driver;
  found->vendor = vendor;
  std::string missing;
  if (!FindAll(handle, vendor, &found->functions, &missing)) {
    delete found;
    dlclose(handle);
    *error = "the GPU driver " + used + " cannot be used: " + missing;
    return false;
  }
  driver.store(found, std::memory_order_release);
  usable.store(true, std::memory_order_seq_cst);
  // Registered after the driver's own exit handlers, so that it runs before them.
  std::atexit(CloseGpuDriver);
  return true;
}

}  // namespace

void CloseGpuDriverAfterFork() {
  new (&open_mutex) std::mutex;
  usable.store(false, std::memory_order_relaxed);
  uses.store(0, std::memory_order_relaxed);
}

std::unique_ptr<GpuDevice> GpuDevice::Open(int ordinal, int* error) {
  std::unique_ptr<GpuDevice> device(new GpuDevice(ordinal));
  const Driver* found = driver.load(std::memory_order_acquire);
  if (found == nullptr || !usable.load(std::memory_order_seq_cst)) {
    *error = 0;
    return nullptr;
  }
  if (found->vendor == HCB_CUDA) {
    int handle;
    *error = found->functions.device_get(&handle, ordinal);
    if (*error == 0) *error = found->functions.context_retain(&device->context_, handle);
    if (*error != 0) return nullptr;
  }
  return device;
}

GpuDevice::Use::Use(const GpuDevice& device) {
  uses.fetch_add(1, std::memory_order_seq_cst);
  if (usable.load(std::memory_order_seq_cst)) {
    const Driver* found = driver.load(std::memory_order_acquire);
    if (found->vendor == HCB_CUDA) {
      error_ = found->functions.context_push(device.context_);
    } else {
      error_ = found->functions.get_device(&previous_);
      if (error_ == 0 && previous_ != device.ordinal_) {
        error_ = found->functions.set_device(device.ordinal_);
      } else {
        previous_ = -1;
      }
    }
    valid_ = error_ == 0;
  }
  if (!valid_) uses.fetch_sub(1, std::memory_order_seq_cst);
}

GpuDevice::Use::~Use() {
  if (!valid_) return;
  const Driver* found = driver.load(std::memory_order_acquire);
  if (found->vendor == HCB_CUDA) {
    void* popped;
    found->functions.context_pop(&popped);
  } else if (previous_ >= 0) {
    found->functions.set_device(previous_);
  }
  uses.fetch_sub(1, std::memory_order_seq_cst);
}

const GpuFunctions* GpuDevice::Use::operator->() const {
  return &driver.load(std::memory_order_acquire)->functions;
}

void* GpuDevice::TakeEvent(const Use& use) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!idle_events_.empty()) {
      void* event = idle_events_.back();
      idle_events_.pop_back();
      return event;
    }
  }
  void* event = nullptr;
  return use->event_create(&event, kDisableTiming) == 0 ? event : nullptr;
}

void GpuDevice::GiveEvent(const Use& use, void* event) {
  if (event == nullptr) return;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (idle_events_.size() < kMaxIdleEvents) {
      idle_events_.push_back(event);
      return;
    }
  }
  use->event_destroy(event);
}

bool GpuDevice::Pin(void* memory, uint64_t nbytes) {
  Use use(*this);
  return use && use->host_register(memory, nbytes, kRegisterPortable) == 0;
}

bool GpuDevice::Unpin(void* memory) {
  Use use(*this);
  return use && use->host_unregister(memory) == 0;
}

}  // namespace hcb

int32_t hcb_gpu_open(int32_t vendor, const char* library, char* error, uint64_t error_bytes) {
  std::string text;
  const bool found = hcb::OpenGpuDriver(static_cast<hcb_gpu_vendor>(vendor), library, &text);
  if (error_bytes != 0) std::snprintf(error, error_bytes, "%s", text.c_str());
  return found;
}

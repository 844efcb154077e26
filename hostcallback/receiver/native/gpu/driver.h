// The GPU driver: the few functions of libcuda or libamdhip64 that taps need, found at run time.
//
// The build needs none of them, and a machine without a GPU has none. No function waits for the device;
// docs/design/gpu-transport.md explains why none may.
#ifndef HOSTCALLBACK_GPU_DRIVER_H_
#define HOSTCALLBACK_GPU_DRIVER_H_

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "abi/types.h"

namespace hcb {

// Names are those of CUDA's driver API; HIP's functions take the same arguments. All return 0 for success.
// CUDA's device pointers are integers, which are passed like pointers on every 64-bit platform.
struct GpuFunctions {
  int (*copy_to_host)(void* to, const void* from, size_t nbytes, void* stream);
  int (*copy_on_device)(void* to, const void* from, size_t nbytes, void* stream);
  int (*event_create)(void** event, unsigned flags);
  int (*event_destroy)(void* event);
  int (*event_record)(void* event, void* stream);
  int (*event_query)(void* event);
  int (*stream_query)(void* stream);
  int (*host_register)(void* memory, size_t nbytes, unsigned flags);
  int (*host_unregister)(void* memory);
  // CUDA only: a thread has a stack of contexts.
  int (*device_get)(int* device, int ordinal);
  int (*context_retain)(void** context, int device);
  int (*context_push)(void* context);
  int (*context_pop)(void** context);
  // HIP only: a thread has a current device.
  int (*get_device)(int* ordinal);
  int (*set_device)(int ordinal);
};

constexpr int kGpuNotReady = 600;  // what the queries return while work is pending, in CUDA and in HIP

// One device and its events. Lives as long as the process, like the ring that owns it.
class GpuDevice {
 public:
  // Retains the device's primary context, in which XLA works, for the life of the process. Null with the
  // driver's error in `error`, or 0 if the driver may not be called.
  static std::unique_ptr<GpuDevice> Open(int ordinal, int* error);

  // While an object of this class lives, the calling thread may call the driver for the device. It is invalid
  // once the process has begun to end, because the driver may be gone, and in a forked child. The destructor
  // restores the thread's own context.
  class Use {
   public:
    explicit Use(const GpuDevice& device);
    ~Use();
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;
    explicit operator bool() const { return valid_; }
    // The driver's error; 0 if it was not called.
    int error() const { return error_; }
    const GpuFunctions* operator->() const;

   private:
    bool valid_ = false;
    int error_ = 0;
    int previous_ = -1;
  };

  // Returns an event that records no times; null if the driver cannot create one. Within a Use.
  void* TakeEvent(const Use& use);
  void GiveEvent(const Use& use, void* event);

  // Lets the device copy into the memory asynchronously. False if the driver cannot pin it. Any thread.
  bool Pin(void* memory, uint64_t nbytes);
  // False: the memory must stay mapped, because the driver cannot be told that it goes.
  bool Unpin(void* memory);

 private:
  explicit GpuDevice(int ordinal) : ordinal_(ordinal) {}

  static constexpr size_t kMaxIdleEvents = 4096;

  const int ordinal_;
  void* context_ = nullptr;
  std::mutex mutex_;  // protects everything below
  std::vector<void*> idle_events_;
};

}  // namespace hcb

#endif  // HOSTCALLBACK_GPU_DRIVER_H_

// The GPU driver: the few functions of libcuda or libamdhip64 that taps need, found at run time.
//
// Nothing here is needed to build, and nothing of it is there on a machine without a GPU. None of the functions waits for the
// device; docs/design/gpu-transport.md says why none may.
#ifndef HOSTCALLBACK_GPU_DRIVER_H_
#define HOSTCALLBACK_GPU_DRIVER_H_

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "abi/c_abi.h"

namespace hcb {

// Names as in CUDA's driver API; HIP has the same with the same arguments. All return 0 for success. CUDA's device pointers are
// integers, which travel as pointers do on every 64-bit platform.
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
  // Only CUDA: a thread has a stack of contexts.
  int (*device_get)(int* device, int ordinal);
  int (*context_retain)(void** context, int device);
  int (*context_push)(void* context);
  int (*context_pop)(void** context);
  // Only HIP: a thread has a current device.
  int (*get_device)(int* ordinal);
  int (*set_device)(int ordinal);
};

constexpr int kGpuNotReady = 600;  // what the queries return while work is pending, in CUDA and in HIP

// Loads the driver from `library`, or from the vendor's usual name if that is null or empty. Once it has been loaded, this
// changes nothing any more. False, and in `error` what is missing.
bool OpenGpuDriver(hcb_gpu_vendor vendor, const char* library, std::string* error);

// No driver call begins after this, and those that run have ended (but for one that hangs).
void CloseGpuDriver();
void CloseGpuDriverAfterFork();

// One device, with what belongs to it. Lives as long as the process, like the ring that has it.
class GpuDevice {
 public:
  // Keeps the device's primary context, which XLA works in, alive for ever. Null, and in `error` what the driver said,
  // or 0 if it may not be asked.
  static std::unique_ptr<GpuDevice> Open(int ordinal, int* error);

  // While one of these lives, the calling thread may call the driver for the device; none is valid once the process has begun to
  // end, when the driver may be gone already, and in a forked child. The thread's own context is back afterwards.
  class Use {
   public:
    explicit Use(const GpuDevice& device);
    ~Use();
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;
    explicit operator bool() const { return valid_; }
    // Why the driver refused; 0 if it was not asked.
    int error() const { return error_; }
    const GpuFunctions* operator->() const;

   private:
    bool valid_ = false;
    int error_ = 0;
    int previous_ = -1;
  };

  // An event that records no times; null if the driver makes none. Within a Use.
  void* TakeEvent(const Use& use);
  void GiveEvent(const Use& use, void* event);

  // Lets the device copy into the memory while the program goes on. False if the driver cannot. Any thread.
  bool Pin(void* memory, uint64_t nbytes);
  // False: the memory must stay where it is, since nobody can tell the driver any more.
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

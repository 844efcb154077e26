// Holds programs back: while the hold is on, programs that reach it wait, without blocking a thread of XLA.
//
// The host uses it to find out whether anything else runs on a device: see hostcallback/sync/fence.py.
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <utility>
#include <vector>

#include "abi/exports.h"
#include "handlers/call_frame.h"

namespace hcb {
namespace {

struct Hold {
  std::mutex mutex;  // protects everything below
  bool on = false;
  std::thread::id began;  // the thread that began it
  bool held_it = false;   // whether a program was held on that thread, which then waits for it
  std::vector<std::unique_ptr<Future>> waiting;
};

// Never destroyed: programs may reach it while the process ends.
Hold* TheHold() {
  static Hold* hold = new Hold;
  return hold;
}

XLA_FFI_Error* Pass(XLA_FFI_CallFrame* frame) {
  for (int64_t i = 0; i < frame->rets.size; ++i) {
    if (!IsArray(*frame, i)) continue;
    const XLA_FFI_Buffer& result = Result(*frame, i);
    if (const uint64_t nbytes = AsArrayRef(result).nbytes) std::memset(result.data, 0, nbytes);
  }
  Hold* const hold = TheHold();
  std::lock_guard<std::mutex> lock(hold->mutex);
  if (!hold->on) return nullptr;
  std::unique_ptr<Future> future = Future::Make(frame);
  if (future == nullptr) {
    return MakeError(frame->api, XLA_FFI_Error_Code_UNIMPLEMENTED,
                     "hostcallback: this jaxlib's FFI has no futures; jaxlib 0.8.0 or later is needed");
  }
  hold->held_it |= hold->began == std::this_thread::get_id();
  hold->waiting.push_back(std::move(future));
  return nullptr;
}

}  // namespace

// The waiting programs are the parent's.
void ResetHoldAfterFork() { new (TheHold()) Hold; }

}  // namespace hcb

void hcb_hold_begin(void) {
  hcb::Hold* const hold = hcb::TheHold();
  std::lock_guard<std::mutex> lock(hold->mutex);
  hold->on = true;
  hold->began = std::this_thread::get_id();
  hold->held_it = false;
}

int32_t hcb_hold_end(void) {
  hcb::Hold* const hold = hcb::TheHold();
  std::vector<std::unique_ptr<hcb::Future>> waiting;
  int32_t found;
  {
    std::lock_guard<std::mutex> lock(hold->mutex);
    found = (hold->on ? HCB_HOLD_ON : 0) | (hold->held_it ? HCB_HOLD_HELD_BEGINNER : 0);
    hold->on = false;
    waiting.swap(hold->waiting);
  }
  for (const std::unique_ptr<hcb::Future>& future : waiting) future->SetAvailable();
  return found;
}

XLA_FFI_Error* hcb_hold(XLA_FFI_CallFrame* frame) {
  return hcb::IsExecution(frame) ? hcb::Pass(frame) : nullptr;
}

// Holds programs back: while the hold is on, programs that reach it wait, without blocking a thread of XLA.
//
// The host uses it to find out whether anything else runs on a device: see hostcallback/sync/fence.py.
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

#include "abi/exports.h"
#include "handlers/call_frame.h"

namespace hcb {
namespace {

struct Hold {
  std::mutex mutex;  // protects everything below
  bool on = false;
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
}

int32_t hcb_hold_end(void) {
  hcb::Hold* const hold = hcb::TheHold();
  std::vector<std::unique_ptr<hcb::Future>> waiting;
  bool on;
  {
    std::lock_guard<std::mutex> lock(hold->mutex);
    on = hold->on;
    hold->on = false;
    waiting.swap(hold->waiting);
  }
  for (const std::unique_ptr<hcb::Future>& future : waiting) future->SetAvailable();
  return on;
}

XLA_FFI_Error* hcb_hold(XLA_FFI_CallFrame* frame) {
  return hcb::IsExecution(frame) ? hcb::Pass(frame) : nullptr;
}

#include "handlers/hold.h"

#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

#include "handlers/ffi_handlers.h"
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
    if (frame->rets.types[i] != XLA_FFI_RetType_BUFFER) continue;
    const XLA_FFI_Buffer& result = *static_cast<const XLA_FFI_Buffer*>(frame->rets.rets[i]);
    const ArrayRef array = AsArrayRef(result, BitsPerElement(result.dtype));
    if (array.nbytes != 0) std::memset(result.data, 0, array.nbytes);
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

void BeginHold() {
  Hold* const hold = TheHold();
  std::lock_guard<std::mutex> lock(hold->mutex);
  hold->on = true;
}

bool EndHold() {
  Hold* const hold = TheHold();
  std::vector<std::unique_ptr<Future>> waiting;
  bool on;
  {
    std::lock_guard<std::mutex> lock(hold->mutex);
    on = hold->on;
    hold->on = false;
    waiting.swap(hold->waiting);
  }
  for (const std::unique_ptr<Future>& future : waiting) future->SetAvailable();
  return on;
}

void ResetHoldAfterFork() { new (TheHold()) Hold; }

}  // namespace hcb

extern "C" XLA_FFI_Error* hcb_hold(XLA_FFI_CallFrame* call_frame) {
  if (hcb::AnswerMetadataQuery(call_frame)) return nullptr;
  if (call_frame->stage != XLA_FFI_ExecutionStage_EXECUTE) return nullptr;
  return hcb::Pass(call_frame);
}

// The XLA FFI handler that reads a clock for loops with progress bars.
#include <cstring>

#include "handlers/ffi_handlers.h"
#include "handlers/call_frame.h"
#include "os/clock.h"

namespace hcb {
namespace {

constexpr uint32_t kIntervalUs = 1000;  // a reading takes less than a microsecond

XLA_FFI_Error* ReadClock(XLA_FFI_CallFrame* frame) {
  const uint32_t reading[2] = {static_cast<uint32_t>(UnixNowNs() / 1000), kIntervalUs};
  for (int64_t i = 0; i < frame->rets.size; ++i) {
    if (frame->rets.types[i] != XLA_FFI_RetType_BUFFER) continue;
    const XLA_FFI_Buffer& result = *static_cast<const XLA_FFI_Buffer*>(frame->rets.rets[i]);
    if (result.dtype == XLA_FFI_DataType_TOKEN) continue;
    std::memcpy(result.data, reading, sizeof(reading));
  }
  return nullptr;
}

}  // namespace
}  // namespace hcb

extern "C" XLA_FFI_Error* hcb_clock(XLA_FFI_CallFrame* call_frame) {
  if (hcb::AnswerMetadataQuery(call_frame)) return nullptr;
  if (call_frame->stage != XLA_FFI_ExecutionStage_EXECUTE) return nullptr;
  return hcb::ReadClock(call_frame);
}

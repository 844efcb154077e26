// The XLA FFI handler that reads a clock for loops with progress bars.
#include "os/clock.h"

#include <cstring>

#include "abi/exports.h"
#include "handlers/call_frame.h"

XLA_FFI_Error* hcb_clock(XLA_FFI_CallFrame* frame) {
  constexpr uint32_t kIntervalUs = 1000;  // a reading takes less than a microsecond
  if (!hcb::IsExecution(frame)) return nullptr;
  const uint32_t reading[2] = {static_cast<uint32_t>(hcb::UnixNowNs() / 1000), kIntervalUs};
  for (int64_t i = 0; i < frame->rets.size; ++i) {
    if (hcb::IsArray(*frame, i)) std::memcpy(hcb::Result(*frame, i).data, reading, sizeof(reading));
  }
  return nullptr;
}

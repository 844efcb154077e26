// The XLA FFI handlers that read a clock: for loops with progress bars, and at the edges of timed places.
#include "os/clock.h"

#include <cstring>

#include "abi/exports.h"
#include "handlers/call_frame.h"

namespace hcb {
namespace {

XLA_FFI_Error* ReadEdge(const XLA_FFI_CallFrame& frame) {
  const int64_t count = frame.args.size - 2;
  if (count < 0 || frame.rets.size != count + 2 || AsArrayRef(Operand(frame, count)).nbytes != 8 ||
      AsArrayRef(Operand(frame, count + 1)).nbytes != 8 || AsArrayRef(Result(frame, count)).nbytes != 8 ||
      AsArrayRef(Result(frame, count + 1)).nbytes != 4) {
    return Invalid(frame,
                   "hostcallback: an edge takes arrays and two uint32[2], and makes these, a uint32[2] and "
                   "a float32");
  }
  const int64_t now = UnixNowNs();
  int64_t since;
  std::memcpy(&since, Operand(frame, count + 1).data, sizeof(since));
  for (int64_t i = 0; i < count; ++i) {
    const ArrayRef from = AsArrayRef(Operand(frame, i)), to = AsArrayRef(Result(frame, i));
    if (from.nbytes != to.nbytes) {
      return Invalid(frame, "hostcallback: an edge has a result of another size than its operand");
    }
    if (to.nbytes != 0 && Result(frame, i).data != Operand(frame, i).data) {
      std::memcpy(Result(frame, i).data, Operand(frame, i).data, to.nbytes);
    }
  }
  const float seconds = static_cast<float>(static_cast<double>(now - since) * 1e-9);
  std::memcpy(Result(frame, count).data, &now, sizeof(now));
  std::memcpy(Result(frame, count + 1).data, &seconds, sizeof(seconds));
  return nullptr;
}

}  // namespace
}  // namespace hcb

XLA_FFI_Error* hcb_clock(XLA_FFI_CallFrame* frame) {
  constexpr uint32_t kIntervalUs = 1000;  // a reading takes less than a microsecond
  if (!hcb::IsExecution(frame)) return nullptr;
  const uint32_t reading[2] = {static_cast<uint32_t>(hcb::UnixNowNs() / 1000), kIntervalUs};
  for (int64_t i = 0; i < frame->rets.size; ++i) {
    if (hcb::IsArray(*frame, i)) std::memcpy(hcb::Result(*frame, i).data, reading, sizeof(reading));
  }
  return nullptr;
}

XLA_FFI_Error* hcb_edge(XLA_FFI_CallFrame* frame) {
  return hcb::IsExecution(frame) ? hcb::ReadEdge(*frame) : nullptr;
}

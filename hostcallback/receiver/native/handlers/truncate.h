// Truncates the arrays of an emission to their first elements, so that only these are copied.
//
// docs/wire-format.md, "Truncated messages", describes the message.
#ifndef HOSTCALLBACK_HANDLERS_TRUNCATE_H_
#define HOSTCALLBACK_HANDLERS_TRUNCATE_H_

#include <cstdint>
#include <vector>

#include "handlers/call_frame.h"
#include "third_party/xla/ffi/api/c_api.h"
#include "wire/encode.h"

namespace hcb {

// The memory that a truncated emission points to. It must outlive the emission.
class Truncation {
 public:
  // Truncates `emission`, of the operands of `frame`, to at most `elements` elements per array; false if all
  // are that small, and nothing changes. Its first array is a shape record then, in the host's memory.
  bool Apply(const XLA_FFI_CallFrame& frame, uint64_t elements, Emission* emission);

  std::vector<int64_t> shapes;  // the shape record. May be moved, which keeps the data's address

 private:
  static constexpr uint64_t kUsual = 512;

  void WritePrefix(const XLA_FFI_CallFrame& frame, uint64_t elements, Emission* emission);

  ArrayList arrays_;
  alignas(64) uint8_t usual_[kUsual];
  std::vector<uint8_t> large_;
};

}  // namespace hcb

#endif  // HOSTCALLBACK_HANDLERS_TRUNCATE_H_

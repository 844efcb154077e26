// The XLA FFI handler that copies arrays, many in one call, before a program writes over them. Its first
// results are the operands themselves, in their memory.
#include <cstring>

#include "abi/exports.h"
#include "handlers/call_frame.h"

namespace hcb {
namespace {

XLA_FFI_Error* Copy(const XLA_FFI_CallFrame& frame) {
  const int64_t count = frame.args.size;
  if (frame.rets.size != 2 * count) {
    return Invalid(frame, "hostcallback: a copy has not two results for each operand");
  }
  for (int64_t i = 0; i < 2 * count; ++i) {
    const XLA_FFI_Buffer& from = Operand(frame, i % count);
    const XLA_FFI_Buffer& to = Result(frame, i);
    const uint64_t nbytes = AsArrayRef(from).nbytes;
    if (nbytes != AsArrayRef(to).nbytes) {
      return Invalid(frame, "hostcallback: a copy has a result of another size than its operand");
    }
    if (nbytes != 0 && to.data != from.data) std::memcpy(to.data, from.data, nbytes);
  }
  return nullptr;
}

}  // namespace
}  // namespace hcb

XLA_FFI_Error* hcb_copy(XLA_FFI_CallFrame* frame) {
  return hcb::IsExecution(frame) ? hcb::Copy(*frame) : nullptr;
}

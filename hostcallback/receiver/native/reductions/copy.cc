// The XLA FFI handler that copies arrays, many in one call, before a program writes over them. Its first results are the
// operands themselves, in their memory.
#include <cstring>

#include "handlers/call_frame.h"
#include "handlers/ffi_handlers.h"

namespace hcb {
namespace {

XLA_FFI_Error* Copy(const XLA_FFI_CallFrame& frame) {
  const int64_t count = frame.args.size;
  if (frame.rets.size != 2 * count) {
    return MakeError(frame.api, XLA_FFI_Error_Code_INVALID_ARGUMENT,
                     "hostcallback: a copy has not two results for each operand");
  }
  for (int64_t i = 0; i < 2 * count; ++i) {
    const XLA_FFI_Buffer& from = *static_cast<const XLA_FFI_Buffer*>(frame.args.args[i % count]);
    const XLA_FFI_Buffer& to = *static_cast<const XLA_FFI_Buffer*>(frame.rets.rets[i]);
    const uint64_t nbytes = AsArrayRef(from, BitsPerElement(from.dtype)).nbytes;
    if (nbytes != AsArrayRef(to, BitsPerElement(to.dtype)).nbytes) {
      return MakeError(frame.api, XLA_FFI_Error_Code_INVALID_ARGUMENT,
                       "hostcallback: a copy has a result of another size than its operand");
    }
    if (nbytes != 0 && to.data != from.data) std::memcpy(to.data, from.data, nbytes);
  }
  return nullptr;
}

}  // namespace
}  // namespace hcb

extern "C" XLA_FFI_Error* hcb_copy(XLA_FFI_CallFrame* call_frame) {
  if (call_frame->extension_start != nullptr && hcb::AnswerMetadataQuery(call_frame)) return nullptr;
  if (call_frame->stage != XLA_FFI_ExecutionStage_EXECUTE) return nullptr;
  return hcb::Copy(*call_frame);
}

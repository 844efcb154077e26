// The XLA FFI handler that counts the calls of a program, and tells the first failed call of a row from later ones.
#include <cstring>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "handlers/call_frame.h"
#include "handlers/ffi_handlers.h"

namespace hcb {
namespace {

struct History {
  uint32_t calls = 0;
  std::vector<uint8_t> failed;  // the tests of the last call
};

std::mutex mutex;  // protects `histories`
std::unordered_map<int32_t, History>& Histories() {
  static auto* const histories = new std::unordered_map<int32_t, History>;  // threads may outlive static destructors
  return *histories;
}

// The attribute `program`: an int32 array with the number of the program.
const XLA_FFI_Array* FindProgram(const XLA_FFI_CallFrame& frame) {
  for (int64_t i = 0; i < frame.attrs.size; ++i) {
    const XLA_FFI_ByteSpan& name = *frame.attrs.names[i];
    if (name.len != 7 || std::memcmp(name.ptr, "program", 7) != 0) continue;
    if (frame.attrs.types[i] != XLA_FFI_AttrType_ARRAY) return nullptr;
    const XLA_FFI_Array* array = static_cast<const XLA_FFI_Array*>(frame.attrs.attrs[i]);
    return array->dtype == XLA_FFI_DataType_S32 && array->size == 1 ? array : nullptr;
  }
  return nullptr;
}

XLA_FFI_Error* Judge(const XLA_FFI_CallFrame& frame) {
  const XLA_FFI_Array* const program = FindProgram(frame);
  if (program == nullptr || frame.args.size != 1 || frame.rets.size != 1) {
    return MakeError(frame.api, XLA_FFI_Error_Code_INVALID_ARGUMENT,
                     "hostcallback: a verdict has no int32 attribute `program`, or not one operand and one result");
  }
  const XLA_FFI_Buffer& operand = *static_cast<const XLA_FFI_Buffer*>(frame.args.args[0]);
  const XLA_FFI_Buffer& result = *static_cast<const XLA_FFI_Buffer*>(frame.rets.rets[0]);
  const ArrayRef failed = AsArrayRef(operand, 8);
  if (operand.dtype != XLA_FFI_DataType_PRED || result.dtype != XLA_FFI_DataType_U32 || AsArrayRef(result, 32).nbytes != 8) {
    return MakeError(frame.api, XLA_FFI_Error_Code_INVALID_ARGUMENT,
                     "hostcallback: a verdict takes a bool[n] and makes a uint32[2]");
  }
  const uint8_t* const flags = static_cast<const uint8_t*>(operand.data);
  const std::lock_guard<std::mutex> lock(mutex);
  History& history = Histories()[*static_cast<const int32_t*>(program->data)];
  if (history.failed.size() != failed.nbytes) history.failed.assign(failed.nbytes, 0);
  bool any = false, any_new = false;
  for (uint64_t i = 0; i < failed.nbytes; ++i) {
    any = any || flags[i];
    any_new = any_new || (flags[i] && !history.failed[i]);
    history.failed[i] = flags[i];
  }
  const uint32_t verdict[2] = {any_new ? 1u : any ? 2u : 0u, history.calls++};
  std::memcpy(result.data, verdict, sizeof(verdict));
  return nullptr;
}

void ForgetFailures() {
  const std::lock_guard<std::mutex> lock(mutex);
  for (auto& [program, history] : Histories()) history.failed.assign(history.failed.size(), 0);
}

}  // namespace
}  // namespace hcb

extern "C" void hcb_verdict_forget(void) { hcb::ForgetFailures(); }

extern "C" XLA_FFI_Error* hcb_verdict(XLA_FFI_CallFrame* call_frame) {
  if (call_frame->extension_start != nullptr && hcb::AnswerMetadataQuery(call_frame)) return nullptr;
  if (call_frame->stage != XLA_FFI_ExecutionStage_EXECUTE) return nullptr;
  return hcb::Judge(*call_frame);
}

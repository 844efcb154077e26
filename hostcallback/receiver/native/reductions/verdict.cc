// The XLA FFI handler that counts the calls of a program, and tells the first failed call of a row from later
// ones.
#include <cstring>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "abi/exports.h"
#include "handlers/call_frame.h"

namespace hcb {
namespace {

struct History {
  uint32_t calls = 0;
  std::vector<uint8_t> failed;  // the tests of the last call
};

std::mutex judging;  // protects `histories`
std::unordered_map<int32_t, History>& Histories() {
  // threads may outlive static destructors
  static auto* const histories = new std::unordered_map<int32_t, History>;
  return *histories;
}

XLA_FFI_Error* Judge(const XLA_FFI_CallFrame& frame) {
  const XLA_FFI_Array* const program = FindArray(frame, "program", XLA_FFI_DataType_S32);
  if (program == nullptr || program->size != 1 || frame.args.size != 1 || frame.rets.size != 1) {
    return Invalid(
        frame, "hostcallback: a verdict has no int32 attribute `program`, or not one operand and one result");
  }
  const XLA_FFI_Buffer& operand = Operand(frame, 0);
  const XLA_FFI_Buffer& result = Result(frame, 0);
  const ArrayRef failed = AsArrayRef(operand, 8);
  if (operand.dtype != XLA_FFI_DataType_PRED || result.dtype != XLA_FFI_DataType_U32 ||
      AsArrayRef(result, 32).nbytes != 8) {
    return Invalid(frame, "hostcallback: a verdict takes a bool[n] and makes a uint32[2]");
  }
  const uint8_t* const flags = static_cast<const uint8_t*>(operand.data);
  const std::lock_guard<std::mutex> lock(judging);
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

}  // namespace
}  // namespace hcb

void hcb_verdict_forget(void) {
  const std::lock_guard<std::mutex> lock(hcb::judging);
  for (auto& [program, history] : hcb::Histories()) history.failed.assign(history.failed.size(), 0);
}

XLA_FFI_Error* hcb_verdict(XLA_FFI_CallFrame* frame) {
  return hcb::IsExecution(frame) ? hcb::Judge(*frame) : nullptr;
}

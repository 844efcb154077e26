// FFI handlers of the benchmarks: one does nothing, one copies its operand, one takes time without using a
// processor, and one calls a function.
#include <time.h>

#include <atomic>
#include <cstdint>
#include <cstring>

#include "third_party/xla/ffi/api/c_api.h"

namespace {

bool AnswerMetadataQuery(XLA_FFI_CallFrame* frame) {
  for (XLA_FFI_Extension_Base* it = frame->extension_start; it != nullptr; it = it->next) {
    if (it->type != XLA_FFI_Extension_Metadata) continue;
    XLA_FFI_Metadata* metadata = reinterpret_cast<XLA_FFI_Metadata_Extension*>(it)->metadata;
    metadata->api_version.major_version =
        frame->api ? frame->api->api_version.major_version : XLA_FFI_API_MAJOR;
    metadata->api_version.minor_version =
        frame->api ? frame->api->api_version.minor_version : XLA_FFI_API_MINOR;
    metadata->traits = 0;
    metadata->state_type_id = XLA_FFI_UNKNOWN_TYPE_ID;
    return true;
  }
  return false;
}

}  // namespace

#define BENCH_EXPORT extern "C" __attribute__((visibility("default")))

BENCH_EXPORT XLA_FFI_Error* hcb_bench_empty(XLA_FFI_CallFrame* frame) {
  AnswerMetadataQuery(frame);
  return nullptr;
}

// Copies the operand to the memory whose address is its only attribute, an int64. The memory begins with a
// counter of copies; the next cache line has the number of slots, the bytes from one to the next, and those
// of the operand, all int64; the slots follow.
BENCH_EXPORT XLA_FFI_Error* hcb_bench_copy(XLA_FFI_CallFrame* frame) {
  if (AnswerMetadataQuery(frame) || frame->stage != XLA_FFI_ExecutionStage_EXECUTE) return nullptr;
  constexpr int64_t kLine = 8;
  int64_t address;
  std::memcpy(&address, static_cast<const XLA_FFI_Scalar*>(frame->attrs.attrs[0])->value, sizeof(address));
  int64_t* shared = reinterpret_cast<int64_t*>(address);
  auto* copied = reinterpret_cast<std::atomic<int64_t>*>(shared);
  const int64_t count = copied->load(std::memory_order_relaxed);
  const int64_t slots = shared[kLine], slot_bytes = shared[kLine + 1], nbytes = shared[kLine + 2];
  char* slot = reinterpret_cast<char*>(shared + 2 * kLine) + count % slots * slot_bytes;
  for (int64_t i = 0; i < frame->args.size; ++i) {
    const auto* operand = static_cast<const XLA_FFI_Buffer*>(frame->args.args[i]);
    if (operand->dtype != XLA_FFI_DataType_TOKEN) std::memcpy(slot, operand->data, nbytes);
  }
  copied->store(count + 1, std::memory_order_release);
  return nullptr;
}

// Sleeps for the nanoseconds in its only attribute, an int64. The result is the operand, a float32.
BENCH_EXPORT XLA_FFI_Error* hcb_bench_pace(XLA_FFI_CallFrame* frame) {
  if (AnswerMetadataQuery(frame) || frame->stage != XLA_FFI_ExecutionStage_EXECUTE) return nullptr;
  int64_t nanoseconds;
  std::memcpy(&nanoseconds, static_cast<const XLA_FFI_Scalar*>(frame->attrs.attrs[0])->value,
              sizeof(nanoseconds));
  const timespec rest = {nanoseconds / 1'000'000'000, nanoseconds % 1'000'000'000};
  nanosleep(&rest, nullptr);
  void* operand = static_cast<const XLA_FFI_Buffer*>(frame->args.args[0])->data;
  void* result = static_cast<const XLA_FFI_Buffer*>(frame->rets.rets[0])->data;
  if (result != operand) std::memcpy(result, operand, sizeof(float));
  return nullptr;
}

// Calls the function at the address in its only attribute, an int64, with the addresses of the operands and
// of the result, which are two scalars and one.
BENCH_EXPORT XLA_FFI_Error* hcb_bench_call(XLA_FFI_CallFrame* frame) {
  if (AnswerMetadataQuery(frame) || frame->stage != XLA_FFI_ExecutionStage_EXECUTE) return nullptr;
  int64_t address;
  std::memcpy(&address, static_cast<const XLA_FFI_Scalar*>(frame->attrs.attrs[0])->value, sizeof(address));
  const auto data = [](void* buffer) { return static_cast<const XLA_FFI_Buffer*>(buffer)->data; };
  reinterpret_cast<void (*)(void*, void*, void*)>(address)(
      data(frame->args.args[0]), data(frame->args.args[1]), data(frame->rets.rets[0]));
  return nullptr;
}

// The XLA FFI handlers of taps on a GPU: they put copies into XLA's stream and return.
//
// The operands are in the device's memory, and perhaps not computed yet: the handlers neither look at them nor wait for
// them. They have no trait that lets XLA record their calls in a command buffer, which would replay the copies only.
#include <algorithm>
#include <cstring>

#include "handlers/ffi_handlers.h"
#include "handlers/call_frame.h"
#include "wire/frame.h"
#include "rules/occurrences.h"
#include "rules/rule_table.h"
#include "handlers/truncate.h"

namespace hcb {
namespace {

XLA_FFI_Error* GetStream(const XLA_FFI_CallFrame& frame, void** stream) {
  XLA_FFI_Stream_Get_Args args = {};
  args.struct_size = XLA_FFI_Stream_Get_Args_STRUCT_SIZE;
  args.ctx = frame.ctx;
  XLA_FFI_Error* error = frame.api->XLA_FFI_Stream_Get(&args);
  *stream = args.stream;
  return error;
}

// Copies operands to results unless the runtime has aliased them. Returns 0, or the driver's error.
int PassThrough(const XLA_FFI_CallFrame& frame, const GpuDevice* gpu, void* stream) {
  for (int64_t i = 0; i < std::min(frame.args.size, frame.rets.size); ++i) {
    if (frame.rets.types[i] != XLA_FFI_RetType_BUFFER) continue;
    const XLA_FFI_Buffer& operand = *static_cast<const XLA_FFI_Buffer*>(frame.args.args[i]);
    const XLA_FFI_Buffer& result = *static_cast<const XLA_FFI_Buffer*>(frame.rets.rets[i]);
    if (result.dtype == XLA_FFI_DataType_TOKEN || result.data == operand.data) continue;
    const ArrayRef array = AsArrayRef(operand, BitsPerElement(operand.dtype));
    if (array.nbytes == 0) continue;
    if (gpu == nullptr) return -1;
    GpuDevice::Use use(*gpu);
    if (!use) return -1;
    if (const int failed = use->copy_on_device(result.data, array.data, array.nbytes, stream)) return failed;
  }
  return 0;
}

XLA_FFI_Error* Emit(XLA_FFI_CallFrame* frame, Emission& emission, Control* control, bool off, bool sharded) {
  const uint8_t* const prefix = emission.prefix;
  const uint64_t consumer_id = HCB_FROM_PREFIX(prefix, consumer_id);
  ArrayList arrays;
  Ring* ring;
  int32_t ordinal;
  if (XLA_FFI_Error* error = ReadGpuEmission(*frame, &arrays, &emission, &ring, &ordinal)) return error;
  DeviceTap tap = {};
  if (XLA_FFI_Error* error = GetStream(*frame, &tap.stream)) return error;
  const int refused = ring->UseGpu(ordinal);
  if (PassThrough(*frame, ring->gpu(), tap.stream) != 0) {
    return MakeError(frame->api, XLA_FFI_Error_Code_INTERNAL,
                     "hostcallback: the GPU driver could not copy a tapped array to the result of the tap");
  }
  const bool aborts = Aborts(emission.device);
  if (aborts && IsPoisoned(emission.run_id)) return EndLaunch(frame->api);
  tap.ends_launch = aborts;
  tap.check = (HCB_FROM_PREFIX(prefix, flags) & kCheck) != 0;
  tap.predicate = static_cast<uint32_t>(HCB_FROM_PREFIX(prefix, device));
  tap.sharded = sharded;
  tap.occurrence = -1;
  if (sharded && (arrays.size() == 0 || arrays.front().nbytes < sizeof(int64_t))) return NoShardRecord(frame->api);
  Truncation truncation;
  if (tap.check) {
    // Failures of a sharded check are counted even while it is off; only the reader sees whether it failed.
    tap.off = off || IsOffOn(emission.device, consumer_id);
    if (tap.off && !sharded) return nullptr;
  } else if (sharded) {
    const Occurrence next = NextDecided(ring->device(), emission.run_id, consumer_id, control, emission.time_ns);
    if (!next.sent) return nullptr;
    tap.occurrence = next.number;
  } else if (control != nullptr) {
    if (!control->Admit(emission.device, emission.time_ns)) return nullptr;
    const uint64_t elements = control->truncate();
    if (elements != 0 && truncation.Apply(*frame, elements, &emission)) tap.host_arrays = 1;
  }
  if (refused != 0) {
    ring->Lose(HCB_COPY_CONTEXT, refused);
    return nullptr;
  }
  emission.from_device = &tap;
  // Without room this thread, which launches programs, waits; the device continues with the programs already launched.
  return ring->Emit(emission, nullptr) == Verdict::kTooLarge ? TooLarge(frame->api) : nullptr;
}

bool HasResults(const XLA_FFI_CallFrame& frame) {
  for (int64_t i = 0; i < frame.rets.size; ++i) {
    if (frame.rets.types[i] != XLA_FFI_RetType_BUFFER) continue;
    if (static_cast<const XLA_FFI_Buffer*>(frame.rets.rets[i])->dtype != XLA_FFI_DataType_TOKEN) return true;
  }
  return false;
}

// A fast path for taps that are off.
XLA_FFI_Error* Handle(XLA_FFI_CallFrame* frame, bool sharded) {
  if (frame->extension_start != nullptr && AnswerMetadataQuery(frame)) return nullptr;
  if (frame->stage != XLA_FFI_ExecutionStage_EXECUTE) return nullptr;
  Emission emission;
  if (XLA_FFI_Error* error = ReadPrefix(*frame, &emission)) return error;
  const bool check = (HCB_FROM_PREFIX(emission.prefix, flags) & kCheck) != 0;
  Control* const control = FindControl(HCB_FROM_PREFIX(emission.prefix, consumer_id));
  const bool off = (control != nullptr && control->off()) || (check && ChecksAreOff());
  if (off && !sharded && !AnyAborts() && !HasResults(*frame)) {
    if (!check) control->CountSuppressed();
    return nullptr;
  }
  return Emit(frame, emission, control, off, sharded);
}

}  // namespace
}  // namespace hcb

extern "C" XLA_FFI_Error* hcb_gpu_tap(XLA_FFI_CallFrame* call_frame) { return hcb::Handle(call_frame, false); }

extern "C" XLA_FFI_Error* hcb_gpu_tap_shard(XLA_FFI_CallFrame* call_frame) { return hcb::Handle(call_frame, true); }

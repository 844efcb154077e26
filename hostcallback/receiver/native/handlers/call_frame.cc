#include "handlers/call_frame.h"

#include <cstring>

#include "abi/exports.h"
#include "os/clock.h"
#include "ring/registry.h"

namespace hcb {
namespace {

void DestroyError(const XLA_FFI_Api* api, XLA_FFI_Error* error) {
  if (error == nullptr) return;
  XLA_FFI_Error_Destroy_Args args = {};
  args.struct_size = XLA_FFI_Error_Destroy_Args_STRUCT_SIZE;
  args.error = error;
  api->XLA_FFI_Error_Destroy(&args);
}

}  // namespace

XLA_FFI_Error* MakeError(const XLA_FFI_Api* api, XLA_FFI_Error_Code code, const char* message) {
  XLA_FFI_Error_Create_Args args = {};
  args.struct_size = XLA_FFI_Error_Create_Args_STRUCT_SIZE;
  args.message = message;
  args.errc = code;
  return api->XLA_FFI_Error_Create(&args);
}

XLA_FFI_Error* Invalid(const XLA_FFI_CallFrame& frame, const char* message) {
  return MakeError(frame.api, XLA_FFI_Error_Code_INVALID_ARGUMENT, message);
}

bool AnswersQuery(XLA_FFI_CallFrame* frame) {
  for (XLA_FFI_Extension_Base* it = frame->extension_start; it != nullptr; it = it->next) {
    if (it->type != XLA_FFI_Extension_Metadata) continue;
    XLA_FFI_Metadata* metadata = reinterpret_cast<XLA_FFI_Metadata_Extension*>(it)->metadata;
    // Up to 0.8.0 the runtime demands its own version, 0.1, and passes no API; later ones accept a range of
    // versions.
    metadata->api_version.major_version =
        frame->api ? frame->api->api_version.major_version : XLA_FFI_API_MAJOR;
    metadata->api_version.minor_version =
        frame->api ? frame->api->api_version.minor_version : XLA_FFI_API_MINOR;
    metadata->traits = 0;
    metadata->state_type_id = XLA_FFI_UNKNOWN_TYPE_ID;  // not counted in struct_size in 0.8.0, but present
    return true;
  }
  return false;
}

uint64_t BitsPerElement(XLA_FFI_DataType dtype) {
  switch (static_cast<int>(dtype)) {
    case XLA_FFI_DataType_S1:
    case XLA_FFI_DataType_U1:
      return 1;
    case XLA_FFI_DataType_S2:
    case XLA_FFI_DataType_U2:
      return 2;
    case XLA_FFI_DataType_S4:
    case XLA_FFI_DataType_U4:
    case XLA_FFI_DataType_F4E2M1FN:
      return 4;
    case XLA_FFI_DataType_PRED:
    case XLA_FFI_DataType_S8:
    case XLA_FFI_DataType_U8:
    case XLA_FFI_DataType_F8E5M2:
    case XLA_FFI_DataType_F8E3M4:
    case XLA_FFI_DataType_F8E4M3:
    case XLA_FFI_DataType_F8E4M3FN:
    case XLA_FFI_DataType_F8E4M3B11FNUZ:
    case XLA_FFI_DataType_F8E5M2FNUZ:
    case XLA_FFI_DataType_F8E4M3FNUZ:
    case XLA_FFI_DataType_F8E8M0FNU:
      return 8;
    case XLA_FFI_DataType_S16:
    case XLA_FFI_DataType_U16:
    case XLA_FFI_DataType_F16:
    case XLA_FFI_DataType_BF16:
      return 16;
    case XLA_FFI_DataType_S32:
    case XLA_FFI_DataType_U32:
    case XLA_FFI_DataType_F32:
      return 32;
    case XLA_FFI_DataType_S64:
    case XLA_FFI_DataType_U64:
    case XLA_FFI_DataType_F64:
    case XLA_FFI_DataType_C64:
      return 64;
    case XLA_FFI_DataType_C128:
      return 128;
    default:
      return 0;
  }
}

// XLA:CPU packs sub-byte elements, element 0 in the low bits, as the wire format does; but the unused bits of
// the last byte are not zero there (seen with int2, int4, uint2, uint4 and float4 on jaxlib 0.8.0, 0.10.2 and
// 0.12.0).
ArrayRef AsArrayRef(const XLA_FFI_Buffer& buffer, uint64_t bits) {
  const uint64_t total_bits = Elements(buffer) * bits;
  const uint64_t used = total_bits % 8;
  return {buffer.data, (total_bits + 7) / 8, static_cast<uint8_t>(used ? (1u << used) - 1 : 0xff)};
}

namespace {

XLA_FFI_Error* ReadOperands(const XLA_FFI_CallFrame& frame, ArrayList* arrays) {
  for (int64_t i = 0; i < frame.args.size; ++i) {
    if (frame.args.types[i] != XLA_FFI_ArgType_BUFFER) {
      return MakeError(frame.api, XLA_FFI_Error_Code_UNIMPLEMENTED,
                       "hostcallback: a tap's operand is not a buffer");
    }
    const XLA_FFI_Buffer& operand = Operand(frame, i);
    if (operand.dtype == XLA_FFI_DataType_TOKEN) continue;
    const uint64_t bits = BitsPerElement(operand.dtype);
    if (bits == 0) {
      return MakeError(
          frame.api, XLA_FFI_Error_Code_UNIMPLEMENTED,
          "hostcallback: a tapped array has an element type that this version of the native library does not "
          "know; update hostcallback, or convert the array before the tap");
    }
    arrays->Add(AsArrayRef(operand, bits));
  }
  return nullptr;
}

}  // namespace

__attribute__((hot)) XLA_FFI_Error* ReadPrefix(const XLA_FFI_CallFrame& frame, Emission* emission) {
  const XLA_FFI_Array* prefix = FindArray(frame, "prefix", XLA_FFI_DataType_U8);
  if (prefix == nullptr || !ValidPrefix(static_cast<const uint8_t*>(prefix->data), prefix->size)) {
    return Invalid(
        frame,
        "hostcallback: the tap's attribute `prefix` is not a uint8 array with a frame's header and metadata");
  }
  emission->prefix = static_cast<const uint8_t*>(prefix->data);
  emission->prefix_bytes = prefix->size;
  return nullptr;
}

__attribute__((hot)) XLA_FFI_Error* ReadEmission(const XLA_FFI_CallFrame& frame, ArrayList* arrays,
                                                 Emission* emission, Ring** ring, int32_t* gpu) {
  const XLA_FFI_Api* api = frame.api;
  if (!HCB_API_HAS(api, XLA_FFI_DeviceOrdinal_Get)) {
    return MakeError(
        api, XLA_FFI_Error_Code_UNIMPLEMENTED,
        "hostcallback: this jaxlib's FFI tells no device ordinal; jaxlib 0.8.0 or later is needed");
  }
  XLA_FFI_DeviceOrdinal_Get_Args device = {};
  device.struct_size = XLA_FFI_DeviceOrdinal_Get_Args_STRUCT_SIZE;
  device.ctx = frame.ctx;
  if (XLA_FFI_Error* error = api->XLA_FFI_DeviceOrdinal_Get(&device)) return error;
  XLA_FFI_RunId_Get_Args run = {};
  run.struct_size = XLA_FFI_RunId_Get_Args_STRUCT_SIZE;
  run.ctx = frame.ctx;
  if (XLA_FFI_Error* error = api->XLA_FFI_RunId_Get(&run)) return error;
  if (XLA_FFI_Error* error = ReadOperands(frame, arrays)) return error;

  if (gpu != nullptr) *gpu = device.device_ordinal;
  *ring = RingForEmission(gpu != nullptr ? hcb_gpu_ring(device.device_ordinal) : device.device_ordinal);
  if (*ring == nullptr) {
    return MakeError(api, XLA_FFI_Error_Code_RESOURCE_EXHAUSTED,
                     "hostcallback: no memory for the device's ring");
  }
  emission->arrays = arrays->data();
  emission->array_count = arrays->size();
  emission->payload_bytes = PayloadBytes(arrays->data(), arrays->size());
  emission->time_ns = UnixNowNs();
  emission->run_id = run.run_id;
  emission->device = (*ring)->device_id();
  emission->from_device = nullptr;
  return nullptr;
}

std::unique_ptr<Future> Future::Make(XLA_FFI_CallFrame* frame) {
  const XLA_FFI_Api* api = frame->api;
  if (!HCB_API_HAS(api, XLA_FFI_Future_SetError)) return nullptr;
  XLA_FFI_Future_Create_Args args = {};
  args.struct_size = XLA_FFI_Future_Create_Args_STRUCT_SIZE;
  if (XLA_FFI_Error* error = api->XLA_FFI_Future_Create(&args)) {
    DestroyError(api, error);
    return nullptr;
  }
  // In 0.8.0 `struct_size` does not count the field, although it exists since the function does.
  frame->future = args.future;
  return std::unique_ptr<Future>(new Future(api, args.future));
}

template <typename Tell>
void Future::InMode(Tell tell) {
  std::fenv_t own;
  std::fegetenv(&own);
  std::fesetenv(&environment_);
  DestroyError(api_, tell());
  std::fesetenv(&own);
}

void Future::SetAvailable() {
  InMode([this] {
    XLA_FFI_Future_SetAvailable_Args args = {};
    args.struct_size = XLA_FFI_Future_SetAvailable_Args_STRUCT_SIZE;
    args.future = future_;
    return api_->XLA_FFI_Future_SetAvailable(&args);
  });
}

void Future::SetError(const char* message) {
  InMode([this, message] {
    XLA_FFI_Future_SetError_Args args = {};
    args.struct_size = XLA_FFI_Future_SetError_Args_STRUCT_SIZE;
    args.future = future_;
    args.error = MakeError(api_, XLA_FFI_Error_Code_INTERNAL, message);
    return api_->XLA_FFI_Future_SetError(&args);
  });
}

}  // namespace hcb

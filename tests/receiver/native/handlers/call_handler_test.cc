// Runs the handler of calls with an FFI that makes no futures: the handler holds its thread until the reply,
// or the failure, arrives.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>

#include "abi/exports.h"
#include "check.h"
#include "third_party/xla/ffi/api/c_api.h"
#include "wire/frame.h"

struct XLA_FFI_Error {
  std::string message;
};

namespace {

constexpr int32_t kDevice = 5;

XLA_FFI_Error* CreateError(XLA_FFI_Error_Create_Args* args) { return new XLA_FFI_Error{args->message}; }
void DestroyError(XLA_FFI_Error_Destroy_Args* args) { delete args->error; }
XLA_FFI_Error* NoFuture(XLA_FFI_Future_Create_Args*) { return new XLA_FFI_Error{"no futures here"}; }
XLA_FFI_Error* GetDevice(XLA_FFI_DeviceOrdinal_Get_Args* args) {
  args->device_ordinal = kDevice;
  return nullptr;
}
XLA_FFI_Error* GetRun(XLA_FFI_RunId_Get_Args* args) {
  args->run_id = 1;
  return nullptr;
}

// Answers the next call with 4.5, or fails it.
void Host(bool fail) {
  hcb_ring* ring = hcb_ring_get(kDevice);
  static hcb_batch batch;
  CHECK(hcb_ring_read(ring, -1, 0, &batch) == 1);
  hcb::FrameHeader header;
  uint64_t capacity;
  std::memcpy(&header, static_cast<uint8_t*>(hcb_ring_memory(ring, &capacity)) + batch.offsets[0],
              sizeof(header));
  hcb_ring_release(ring, batch.ends[0], 1);
  if (fail) {
    hcb_call_fail(kDevice, header.seq, "the host function raised");
    return;
  }
  const float value = 4.5;
  const void* array = &value;
  const uint64_t nbytes = sizeof(value);
  hcb_call_resume(hcb_call_reply(kDevice, header.seq, 1, &array, &nbytes));
}

}  // namespace

int main() {
  XLA_FFI_Api api = {};
  api.struct_size = XLA_FFI_Api_STRUCT_SIZE;
  api.XLA_FFI_Error_Create = CreateError;
  api.XLA_FFI_Error_Destroy = DestroyError;
  api.XLA_FFI_Future_Create = NoFuture;
  api.XLA_FFI_DeviceOrdinal_Get = GetDevice;
  api.XLA_FFI_RunId_Get = GetRun;

  hcb::FrameHeader prefix = {};
  prefix.flags = hcb::kCall;
  XLA_FFI_Array array = {XLA_FFI_DataType_U8, sizeof(prefix), &prefix};
  char text[] = "prefix";
  XLA_FFI_ByteSpan name = {text, 6};
  XLA_FFI_ByteSpan* names[] = {&name};
  XLA_FFI_AttrType attr_types[] = {XLA_FFI_AttrType_ARRAY};
  void* attrs[] = {&array};

  float result = 0;
  XLA_FFI_Buffer token = {};
  token.dtype = XLA_FFI_DataType_TOKEN;
  XLA_FFI_Buffer buffer = {};
  buffer.dtype = XLA_FFI_DataType_F32;
  buffer.data = &result;
  void* rets[] = {&token, &buffer};
  XLA_FFI_RetType ret_types[] = {XLA_FFI_RetType_BUFFER, XLA_FFI_RetType_BUFFER};

  XLA_FFI_CallFrame frame = {};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.api = &api;
  frame.stage = XLA_FFI_ExecutionStage_EXECUTE;
  frame.attrs.size = 1;
  frame.attrs.types = attr_types;
  frame.attrs.names = names;
  frame.attrs.attrs = attrs;
  frame.rets.size = 2;
  frame.rets.types = ret_types;
  frame.rets.rets = rets;

  hcb_config config = {};
  CHECK(hcb_ring_open(kDevice, &config) != nullptr);
  std::thread answering(Host, false);
  CHECK(hcb_call_host(&frame) == nullptr);
  answering.join();
  CHECK(result == 4.5f);

  std::thread failing(Host, true);
  XLA_FFI_Error* error = hcb_call_host(&frame);
  failing.join();
  CHECK(error != nullptr && error->message == "the host function raised");
  delete error;
  CHECK(hcb_call_count(kDevice) == 0);
  return 0;
}

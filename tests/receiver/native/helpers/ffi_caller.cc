// Calls a handler as XLA does, with a constructed call frame: one function, for tests to load.
#include <cstring>
#include <string>
#include <vector>

#include "third_party/xla/ffi/api/c_api.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

struct XLA_FFI_Error {
  std::string message;
};

struct XLA_FFI_ExecutionContext {
  int32_t ordinal;
  int64_t run_id;
  void* stream;
};

namespace {

XLA_FFI_Error* CreateError(XLA_FFI_Error_Create_Args* args) { return new XLA_FFI_Error{args->message}; }
void DestroyError(XLA_FFI_Error_Destroy_Args* args) { delete args->error; }
XLA_FFI_Error* GetDevice(XLA_FFI_DeviceOrdinal_Get_Args* args) {
  args->device_ordinal = args->ctx->ordinal;
  return nullptr;
}
XLA_FFI_Error* GetRun(XLA_FFI_RunId_Get_Args* args) {
  args->run_id = args->ctx->run_id;
  return nullptr;
}
XLA_FFI_Error* GetStream(XLA_FFI_Stream_Get_Args* args) {
  args->stream = args->ctx->stream;
  return nullptr;
}

XLA_FFI_Api MakeApi() {
  XLA_FFI_Api api = {};
  api.struct_size = XLA_FFI_Api_STRUCT_SIZE;
  api.api_version.minor_version = 1;
  api.XLA_FFI_Error_Create = CreateError;
  api.XLA_FFI_Error_Destroy = DestroyError;
  api.XLA_FFI_DeviceOrdinal_Get = GetDevice;
  api.XLA_FFI_RunId_Get = GetRun;
  api.XLA_FFI_Stream_Get = GetStream;
  return api;
}

}  // namespace

// The operands are a token and `count` vectors; the results are a token and, if `results` is not null, as
// many vectors. Returns whether the handler succeeded; otherwise `error` holds the reason.
EXPORT int call_handler(XLA_FFI_Error* (*handler)(XLA_FFI_CallFrame*), int32_t ordinal, int64_t run_id,
                        void* stream, const uint8_t* prefix, uint64_t prefix_bytes, uint64_t count,
                        void* const* data, const int32_t* dtypes, const int64_t* lengths,
                        void* const* results, char* error, uint64_t error_bytes) {
  static const XLA_FFI_Api api = MakeApi();
  XLA_FFI_ExecutionContext context = {ordinal, run_id, stream};
  XLA_FFI_Array array = {XLA_FFI_DataType_U8, prefix_bytes, const_cast<uint8_t*>(prefix)};
  XLA_FFI_ByteSpan name = {"prefix", 6};
  XLA_FFI_ByteSpan* names[] = {&name};
  XLA_FFI_AttrType attr_types[] = {XLA_FFI_AttrType_ARRAY};
  void* attrs[] = {&array};

  XLA_FFI_Buffer token = {};
  token.dtype = XLA_FFI_DataType_TOKEN;
  std::vector<int64_t> dims(lengths, lengths + count);
  std::vector<XLA_FFI_Buffer> operands(count), outputs(count);
  std::vector<void*> args = {&token}, rets = {&token};
  for (uint64_t i = 0; i < count; ++i) {
    operands[i].dtype = static_cast<XLA_FFI_DataType>(dtypes[i]);
    operands[i].data = data[i];
    operands[i].rank = 1;
    operands[i].dims = &dims[i];
    outputs[i] = operands[i];
    args.push_back(&operands[i]);
    if (results == nullptr) continue;
    outputs[i].data = results[i];
    rets.push_back(&outputs[i]);
  }
  std::vector<XLA_FFI_ArgType> arg_types(args.size(), XLA_FFI_ArgType_BUFFER);
  std::vector<XLA_FFI_RetType> ret_types(rets.size(), XLA_FFI_RetType_BUFFER);

  XLA_FFI_CallFrame frame = {};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.api = &api;
  frame.ctx = &context;
  frame.stage = XLA_FFI_ExecutionStage_EXECUTE;
  frame.attrs.size = 1;
  frame.attrs.types = attr_types;
  frame.attrs.names = names;
  frame.attrs.attrs = attrs;
  frame.args.size = static_cast<int64_t>(args.size());
  frame.args.types = arg_types.data();
  frame.args.args = args.data();
  frame.rets.size = static_cast<int64_t>(rets.size());
  frame.rets.types = ret_types.data();
  frame.rets.rets = rets.data();
  XLA_FFI_Error* failure = handler(&frame);
  if (failure == nullptr) return 1;
  std::strncpy(error, failure->message.c_str(), error_bytes - 1);
  delete failure;
  return 0;
}

// Whether the handler lets XLA record its calls in a command buffer.
EXPORT int command_buffer_compatible(XLA_FFI_Error* (*handler)(XLA_FFI_CallFrame*)) {
  static const XLA_FFI_Api api = MakeApi();
  XLA_FFI_Metadata metadata = {};
  metadata.struct_size = XLA_FFI_Metadata_STRUCT_SIZE;
  XLA_FFI_Metadata_Extension extension = {};
  extension.extension_base.type = XLA_FFI_Extension_Metadata;
  extension.metadata = &metadata;
  XLA_FFI_CallFrame frame = {};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.api = &api;
  frame.extension_start = &extension.extension_base;
  handler(&frame);
  return (metadata.traits & XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE) != 0;
}

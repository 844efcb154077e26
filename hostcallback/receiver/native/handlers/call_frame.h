// Reads the operands, attributes and context of a call of XLA's FFI, and creates its errors and futures.
//
// It uses the raw C API of version 0.1, so that one binary works with every jaxlib from 0.8.0 on: no FFI
// state or types, the runtime's own version in the metadata, and a look at `struct_size` before any optional
// function is called.
#ifndef HOSTCALLBACK_HANDLERS_CALL_FRAME_H_
#define HOSTCALLBACK_HANDLERS_CALL_FRAME_H_

#include <cfenv>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "ring/ring.h"
#include "third_party/xla/ffi/api/c_api.h"
#include "wire/encode.h"

namespace hcb {

// True if the runtime's API table reaches up to the function `name`.
#define HCB_API_HAS(api, name) ((api)->struct_size >= offsetof(XLA_FFI_Api, name) + sizeof((api)->name))

XLA_FFI_Error* MakeError(const XLA_FFI_Api* api, XLA_FFI_Error_Code code, const char* message);

// Whether a handler is called to do its work. The runtime also asks it once per program for its metadata,
// which this answers, and calls it in other stages.
bool AnswersQuery(XLA_FFI_CallFrame* frame);
inline bool IsExecution(XLA_FFI_CallFrame* frame) {
  if (frame->extension_start != nullptr && AnswersQuery(frame)) return false;
  return frame->stage == XLA_FFI_ExecutionStage_EXECUTE;
}

// Error of a program that calls a handler otherwise than our lowering does.
XLA_FFI_Error* Invalid(const XLA_FFI_CallFrame& frame, const char* message);

inline const XLA_FFI_Buffer& Operand(const XLA_FFI_CallFrame& frame, int64_t i) {
  return *static_cast<const XLA_FFI_Buffer*>(frame.args.args[i]);
}
inline const XLA_FFI_Buffer& Result(const XLA_FFI_CallFrame& frame, int64_t i) {
  return *static_cast<const XLA_FFI_Buffer*>(frame.rets.rets[i]);
}
// Whether a result is an array, not a token.
inline bool IsArray(const XLA_FFI_CallFrame& frame, int64_t result) {
  return frame.rets.types[result] == XLA_FFI_RetType_BUFFER &&
         Result(frame, result).dtype != XLA_FFI_DataType_TOKEN;
}

inline uint64_t Elements(const XLA_FFI_Buffer& buffer) {
  uint64_t count = 1;
  for (int64_t i = 0; i < buffer.rank; ++i) count *= static_cast<uint64_t>(buffer.dims[i]);
  return count;
}

// The attribute of that name if it is an array of that type, otherwise null. The name's length is known here,
// so that it is compared without a library call.
template <size_t kSize>
const XLA_FFI_Array* FindArray(const XLA_FFI_CallFrame& frame, const char (&name)[kSize],
                               XLA_FFI_DataType dtype) {
  for (int64_t i = 0; i < frame.attrs.size; ++i) {
    const XLA_FFI_ByteSpan& found = *frame.attrs.names[i];
    if (found.len != kSize - 1 || __builtin_memcmp(found.ptr, name, kSize - 1) != 0) continue;
    if (frame.attrs.types[i] != XLA_FFI_AttrType_ARRAY) return nullptr;
    const XLA_FFI_Array* array = static_cast<const XLA_FFI_Array*>(frame.attrs.attrs[i]);
    return array->dtype == dtype ? array : nullptr;
  }
  return nullptr;
}

// Bits per element; 0 for a token or a type that this version does not know.
uint64_t BitsPerElement(XLA_FFI_DataType dtype);

// The memory of a buffer whose elements have `bits` bits.
ArrayRef AsArrayRef(const XLA_FFI_Buffer& buffer, uint64_t bits);
inline ArrayRef AsArrayRef(const XLA_FFI_Buffer& buffer) {
  return AsArrayRef(buffer, BitsPerElement(buffer.dtype));
}

// A list of ArrayRef that needs no allocation for messages of the usual size.
class ArrayList {
 public:
  void Add(const ArrayRef& array) {
    if (many_.empty() && count_ < kFew) {
      few_[count_++] = array;
      return;
    }
    if (many_.empty()) many_.assign(few_, few_ + count_);
    many_.push_back(array);
    ++count_;
  }
  ArrayRef& front() { return many_.empty() ? few_[0] : many_[0]; }
  const ArrayRef* data() const { return many_.empty() ? few_ : many_.data(); }
  size_t size() const { return count_; }

 private:
  static constexpr size_t kFew = 16;
  ArrayRef few_[kFew];
  std::vector<ArrayRef> many_;
  size_t count_ = 0;
};

// Reads the attribute `prefix`, which names the emission's consumer.
XLA_FFI_Error* ReadPrefix(const XLA_FFI_CallFrame& frame, Emission* emission);

// Reads the rest of an emission: device, run, time, and the operands without tokens as `arrays`. Returns an
// error, or null with the device's ring in `ring`. If `gpu` is given, the device is a GPU, and its number in
// this process goes there.
XLA_FFI_Error* ReadEmission(const XLA_FFI_CallFrame& frame, ArrayList* arrays, Emission* emission,
                            Ring** ring, int32_t* gpu = nullptr);

// Makes XLA wait for the host without blocking one of XLA's threads.
class Future {
 public:
  // Announces to XLA that the handler's work ends later. Null if this runtime does not support futures.
  static std::unique_ptr<Future> Make(XLA_FFI_CallFrame* frame);

  // One of them must be called, once. XLA runs the rest of the program on the calling thread, in the
  // floating-point mode of the program's first part; afterwards the thread's own mode is restored.
  void SetAvailable();
  void SetError(const char* message);

 private:
  template <typename Tell>
  void InMode(Tell tell);
  Future(const XLA_FFI_Api* api, XLA_FFI_Future* future) : api_(api), future_(future) {
    std::fegetenv(&environment_);
  }

  const XLA_FFI_Api* const api_;
  XLA_FFI_Future* const future_;
  std::fenv_t environment_;
};

}  // namespace hcb

#endif  // HOSTCALLBACK_HANDLERS_CALL_FRAME_H_

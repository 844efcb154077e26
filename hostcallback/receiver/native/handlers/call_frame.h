// Reads the operands, attributes and context of a call of XLA's FFI, and creates its errors and futures.
//
// It uses the raw C API of version 0.1, so that one binary works with every jaxlib from 0.8.0 on: no FFI state or
// types, the runtime's own version in the metadata, and a look at `struct_size` before any optional function is called.
#ifndef HOSTCALLBACK_HANDLERS_CALL_FRAME_H_
#define HOSTCALLBACK_HANDLERS_CALL_FRAME_H_

#include <cfenv>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "wire/encode.h"
#include "ring/ring.h"
#include "third_party/xla/ffi/api/c_api.h"

namespace hcb {

// True if the runtime's API table reaches up to the function `name`.
#define HCB_API_HAS(api, name) ((api)->struct_size >= offsetof(XLA_FFI_Api, name) + sizeof((api)->name))

XLA_FFI_Error* MakeError(const XLA_FFI_Api* api, XLA_FFI_Error_Code code, const char* message);
void DestroyError(const XLA_FFI_Api* api, XLA_FFI_Error* error);

// The runtime asks each handler once per program for its metadata. Returns whether this call was that question.
bool AnswerMetadataQuery(XLA_FFI_CallFrame* frame);

// Bits per element; 0 for a token or a type that this version does not know.
uint64_t BitsPerElement(XLA_FFI_DataType dtype);

// The memory of a buffer whose elements have `bits` bits.
ArrayRef AsArrayRef(const XLA_FFI_Buffer& buffer, uint64_t bits);

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

// Lists the operands without tokens.
XLA_FFI_Error* ReadOperands(const XLA_FFI_CallFrame& frame, ArrayList* arrays);

// Reads the attribute `prefix`, which names the emission's consumer.
XLA_FFI_Error* ReadPrefix(const XLA_FFI_CallFrame& frame, Emission* emission);

// Reads the rest of an emission: device, run, time, and the operands as `arrays`. Returns an error, or null with the
// device's ring in `ring`.
XLA_FFI_Error* ReadEmission(const XLA_FFI_CallFrame& frame, ArrayList* arrays, Emission* emission, Ring** ring);

// The same for a GPU. `ordinal` gets the GPU's number in this process.
XLA_FFI_Error* ReadGpuEmission(const XLA_FFI_CallFrame& frame, ArrayList* arrays, Emission* emission, Ring** ring,
                               int32_t* ordinal);

// Errors of a tap whose frame is larger than its ring allows, of a shard without a shard record, and of a launch
// that a failed check has ended.
XLA_FFI_Error* TooLarge(const XLA_FFI_Api* api);
XLA_FFI_Error* NoShardRecord(const XLA_FFI_Api* api);
XLA_FFI_Error* EndLaunch(const XLA_FFI_Api* api);

// Makes XLA wait for the host without blocking one of XLA's threads.
class Future {
 public:
  // Announces to XLA that the handler's work ends later. Null if this runtime does not support futures.
  static std::unique_ptr<Future> Make(XLA_FFI_CallFrame* frame);

  // One of them must be called, once. XLA runs the rest of the program on the calling thread, in the floating-point
  // mode of the program's first part; afterwards the thread's own mode is restored.
  void SetAvailable();
  void SetError(const char* message);

 private:
  Future(const XLA_FFI_Api* api, XLA_FFI_Future* future) : api_(api), future_(future) { std::fegetenv(&environment_); }

  const XLA_FFI_Api* const api_;
  XLA_FFI_Future* const future_;
  std::fenv_t environment_;
};

}  // namespace hcb

#endif  // HOSTCALLBACK_HANDLERS_CALL_FRAME_H_

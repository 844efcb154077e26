// The XLA FFI handler of calls: emits its operands into the ring of its device, and makes the program wait for the
// results of the reply. On a thread of the host it runs the host function on that thread.
#include <memory>
#include <string>
#include <utility>

#include "handlers/ffi_handlers.h"
#include "ring/call_table.h"
#include "handlers/call_frame.h"
#include "handlers/host_threads.h"

namespace hcb {
namespace {

// A program that waits for a reply without blocking one of XLA's threads.
class FutureCall final : public PendingCall {
 public:
  explicit FutureCall(std::unique_ptr<Future> future) : future_(std::move(future)) {}

  void Finish(const char* error) override {
    if (error == nullptr) {
      future_->SetAvailable();
    } else {
      future_->SetError(error);
    }
  }

 private:
  const std::unique_ptr<Future> future_;
};

XLA_FFI_Error* ReadResults(const XLA_FFI_CallFrame& frame, std::vector<PendingCall::Result>* results) {
  for (int64_t i = 0; i < frame.rets.size; ++i) {
    if (frame.rets.types[i] != XLA_FFI_RetType_BUFFER) {
      return MakeError(frame.api, XLA_FFI_Error_Code_UNIMPLEMENTED, "hostcallback: a call's result is not a buffer");
    }
    const XLA_FFI_Buffer& result = *static_cast<const XLA_FFI_Buffer*>(frame.rets.rets[i]);
    if (result.dtype == XLA_FFI_DataType_TOKEN) continue;
    const uint64_t bits = BitsPerElement(result.dtype);
    if (bits == 0) {
      return MakeError(frame.api, XLA_FFI_Error_Code_UNIMPLEMENTED,
                       "hostcallback: a call's result has an element type that this version of the native library does "
                       "not know; update hostcallback, or convert the array behind the call");
    }
    results->push_back({result.data, AsArrayRef(result, bits).nbytes});
  }
  return nullptr;
}

XLA_FFI_Error* Call(XLA_FFI_CallFrame* frame) {
  ArrayList arrays;
  Emission emission;
  Ring* ring;
  if (XLA_FFI_Error* error = ReadPrefix(*frame, &emission)) return error;
  if (XLA_FFI_Error* error = ReadEmission(*frame, &arrays, &emission, &ring)) return error;
  std::vector<PendingCall::Result> results;
  if (XLA_FFI_Error* error = ReadResults(*frame, &results)) return error;
  if (!ring->Fits(emission)) {
    return MakeError(frame->api, XLA_FFI_Error_Code_INVALID_ARGUMENT,
                     "hostcallback: the metadata of this call exceeds half of the device's ring; pass fewer arrays at once "
                     "or make the ring larger");
  }
  std::string error;
  if (MayCallHere(*ring)) {
    if (CallHere(ring, emission, std::move(results), &error)) return nullptr;
    return MakeError(frame->api, XLA_FFI_Error_Code_INTERNAL, error.c_str());
  }
  std::unique_ptr<PendingCall> call;
  std::shared_ptr<ThreadCall::State> waiting;
  if (std::unique_ptr<Future> future = Future::Make(frame)) {
    call = std::make_unique<FutureCall>(std::move(future));
  } else {
    waiting = std::make_shared<ThreadCall::State>();
    call = std::make_unique<ThreadCall>(waiting);
  }
  call->results = std::move(results);
  ring->Append(emission, std::move(call));
  if (waiting == nullptr || waiting->Wait(&error)) return nullptr;
  return MakeError(frame->api, XLA_FFI_Error_Code_INTERNAL, error.c_str());
}

}  // namespace
}  // namespace hcb

extern "C" XLA_FFI_Error* hcb_call_host(XLA_FFI_CallFrame* call_frame) {
  if (hcb::AnswerMetadataQuery(call_frame)) return nullptr;
  if (call_frame->stage != XLA_FFI_ExecutionStage_EXECUTE) return nullptr;
  return hcb::Call(call_frame);
}

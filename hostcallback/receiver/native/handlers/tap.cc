// The XLA FFI handler of taps: emits its operands into the ring of the device that runs it.
#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "handlers/ffi_handlers.h"
#include "handlers/call_frame.h"
#include "handlers/latest.h"
#include "wire/frame.h"
#include "rules/occurrences.h"
#include "rules/rule_table.h"
#include "handlers/truncate.h"

namespace hcb {
namespace {

// Makes XLA wait for an emission without blocking one of XLA's threads.
class FutureCompletion final : public Completion {
 public:
  FutureCompletion(std::unique_ptr<Future> future, std::vector<int64_t> record)
      : future_(std::move(future)), record_(std::move(record)) {}
  void Complete() override { future_->SetAvailable(); }

 private:
  const std::unique_ptr<Future> future_;
  const std::vector<int64_t> record_;  // the emission points to it until it has been copied into the ring
};

class FutureFactory final : public CompletionFactory {
 public:
  FutureFactory(XLA_FFI_CallFrame* frame, std::vector<int64_t>* record) : frame_(frame), record_(record) {}

  std::unique_ptr<Completion> Make() override {
    std::unique_ptr<Future> future = Future::Make(frame_);
    if (!future) return nullptr;
    return std::make_unique<FutureCompletion>(std::move(future), std::move(*record_));  // moving keeps the data's address
  }

 private:
  XLA_FFI_CallFrame* const frame_;
  std::vector<int64_t>* const record_;
};

// Copies operands to results unless the runtime has aliased them.
void PassThrough(const XLA_FFI_CallFrame& frame) {
  for (int64_t i = 0; i < std::min(frame.args.size, frame.rets.size); ++i) {
    if (frame.rets.types[i] != XLA_FFI_RetType_BUFFER) continue;
    const XLA_FFI_Buffer& operand = *static_cast<const XLA_FFI_Buffer*>(frame.args.args[i]);
    const XLA_FFI_Buffer& result = *static_cast<const XLA_FFI_Buffer*>(frame.rets.rets[i]);
    if (result.dtype == XLA_FFI_DataType_TOKEN || result.data == operand.data) continue;
    const ArrayRef array = AsArrayRef(operand, BitsPerElement(operand.dtype));
    if (array.nbytes != 0) std::memcpy(result.data, array.data, array.nbytes);
  }
}

// A message of shards begins with its shard record (receiver/sinks/sharding/sinks.py): int64, whose first number is
// the occurrence. Puts a copy with `occurrence` filled in into `record`, and replaces the record at the front of
// `arrays` with it.
void StampShardRecord(int64_t occurrence, ArrayList* arrays, std::vector<int64_t>* record) {
  ArrayRef& front = arrays->front();
  record->resize(front.nbytes / sizeof(int64_t));
  std::memcpy(record->data(), front.data, record->size() * sizeof(int64_t));
  (*record)[0] = occurrence;
  front.data = record->data();
}

// Whether a check's whole predicate holds. False also for a prefix that names no predicate.
bool Holds(const uint8_t* prefix, const ArrayList& arrays) {
  const size_t index = static_cast<size_t>(HCB_FROM_PREFIX(prefix, device));
  if (index >= arrays.size()) return false;
  const ArrayRef& predicate = arrays.data()[index];
  return predicate.nbytes == 0 || std::memchr(predicate.data, 0, predicate.nbytes) == nullptr;
}

// Not inlined, so that other emissions do not pay for its space on the stack.
__attribute__((noinline)) XLA_FFI_Error* EmitHeads(XLA_FFI_CallFrame* frame, Emission& emission, uint64_t elements, Ring* ring) {
  Truncation truncation;
  truncation.Apply(*frame, elements, &emission);
  FutureFactory futures(frame, &truncation.shapes);
  return ring->Emit(emission, &futures) == Verdict::kTooLarge ? TooLarge(frame->api) : nullptr;
}

__attribute__((noinline)) void Keep(const XLA_FFI_CallFrame& frame, Emission& emission, Control* control, Ring* ring) {
  Truncation truncation;
  if (const uint64_t elements = control->truncate()) truncation.Apply(frame, elements, &emission);
  KeepLatest(control, emission, ring);
}

// `off`: whether the tap is off on every device.
__attribute__((noinline)) XLA_FFI_Error* Emit(XLA_FFI_CallFrame* frame, Emission& emission, Control* control, bool off,
                                              bool sharded) {
  const uint8_t* const prefix = emission.prefix;
  const uint64_t consumer_id = HCB_FROM_PREFIX(prefix, consumer_id);
  const uint32_t flags = HCB_FROM_PREFIX(prefix, flags);
  const bool check = (flags & kCheck) != 0;
  ArrayList arrays;
  Ring* ring;
  if (XLA_FFI_Error* error = ReadEmission(*frame, &arrays, &emission, &ring)) return error;
  const bool aborts = Aborts(emission.device);
  if (aborts && (flags & (kLate | kLast)) == 0 && IsPoisoned(emission.run_id)) return EndLaunch(frame->api);
  if (sharded && (arrays.size() == 0 || arrays.front().nbytes < sizeof(int64_t))) return NoShardRecord(frame->api);
  std::vector<int64_t> record;
  if (check) {
    // Rules do not apply to checks, only switches: a failure that a rule left out would be missing from the report.
    off = off || IsOffOn(emission.device, consumer_id);
    if (off && !sharded) return nullptr;
    if (Holds(prefix, arrays)) return nullptr;
    // Counted even while the check is off, so that the devices agree on the number when it is on again.
    if (sharded) StampShardRecord(NextOccurrence(emission.device, emission.run_id, consumer_id), &arrays, &record);
    if (off) return nullptr;
  } else if (sharded) {
    const Occurrence next = NextDecided(emission.device, emission.run_id, consumer_id, control, emission.time_ns);
    if (!next.sent) return nullptr;
    StampShardRecord(next.number, &arrays, &record);
  } else if (control != nullptr) {
    const Admission admission = control->Ask(emission.device, emission.time_ns);
    if (admission == Admission::kTooSoon) Keep(*frame, emission, control, ring);
    if (admission != Admission::kSend) return nullptr;
    if (const uint64_t elements = control->truncate()) return EmitHeads(frame, emission, elements, ring);
  }
  FutureFactory futures(frame, &record);
  if (ring->Emit(emission, &futures) == Verdict::kTooLarge) return TooLarge(frame->api);
  if (check && aborts) {
    Poison(emission.run_id);
    if ((flags & kLate) == 0) return EndLaunch(frame->api);
  }
  if (aborts && (flags & kLast) != 0 && IsPoisoned(emission.run_id)) return EndLaunch(frame->api);
  return nullptr;
}

// A fast path for taps that are off.
XLA_FFI_Error* Handle(XLA_FFI_CallFrame* frame, bool sharded) {
  if (frame->extension_start != nullptr && AnswerMetadataQuery(frame)) return nullptr;
  if (frame->stage != XLA_FFI_ExecutionStage_EXECUTE) return nullptr;
  Emission emission;
  if (XLA_FFI_Error* error = ReadPrefix(*frame, &emission)) return error;
  if (frame->rets.size != 0) PassThrough(*frame);
  const bool check = (HCB_FROM_PREFIX(emission.prefix, flags) & kCheck) != 0;
  Control* const control = FindControl(HCB_FROM_PREFIX(emission.prefix, consumer_id));
  const bool off = (control != nullptr && control->off()) || (check && ChecksAreOff());
  if (off && !sharded && !AnyAborts()) {
    if (!check) control->CountSuppressed();
    return nullptr;
  }
  return Emit(frame, emission, control, off, sharded);
}

}  // namespace
}  // namespace hcb

extern "C" XLA_FFI_Error* hcb_tap(XLA_FFI_CallFrame* call_frame) { return hcb::Handle(call_frame, false); }

extern "C" XLA_FFI_Error* hcb_tap_shard(XLA_FFI_CallFrame* call_frame) { return hcb::Handle(call_frame, true); }

// The XLA FFI handlers of taps: they emit their operands into the ring of the device that runs them.
//
// On a GPU the operands are in the device's memory, and perhaps not computed yet: the handlers put copies
// into XLA's stream and return; they neither look at the operands nor wait for them. They have no trait that
// lets XLA record their calls in a command buffer, which would replay the copies only.
#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "abi/exports.h"
#include "handlers/call_frame.h"
#include "handlers/latest.h"
#include "handlers/truncate.h"
#include "rules/occurrences.h"
#include "rules/rule_table.h"
#include "wire/frame.h"

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
    // moving keeps the data's address
    return std::make_unique<FutureCompletion>(std::move(future), std::move(*record_));
  }

 private:
  XLA_FFI_CallFrame* const frame_;
  std::vector<int64_t>* const record_;
};

XLA_FFI_Error* TooLarge(const XLA_FFI_CallFrame& frame) {
  return Invalid(frame,
                 "hostcallback: the metadata of this tap exceeds half of the device's ring; tap fewer arrays "
                 "at once or make "
                 "the ring larger");
}

XLA_FFI_Error* EndLaunch(const XLA_FFI_CallFrame& frame) {
  return MakeError(frame.api, XLA_FFI_Error_Code_ABORTED,
                   "hostcallback: a check failed, and its receiver's on_error=\"abort\" ends the program; "
                   "the receiver and "
                   "barrier_wait report which check it was");
}

// A tap as its handler is called for it.
struct Tap {
  XLA_FFI_CallFrame* frame;
  Control* control;  // the rules of its consumer; null if it has none
  uint64_t consumer_id;
  uint32_t flags;
  bool check;
  bool off;  // on every device
  bool sharded;
  Emission emission;
  Ring* ring;
};

// Copies operands to results unless the runtime has aliased them. `copy` returns 0, or an error, with which
// this ends.
template <typename Copy>
int PassThrough(const XLA_FFI_CallFrame& frame, Copy copy) {
  for (int64_t i = 0; i < std::min(frame.args.size, frame.rets.size); ++i) {
    if (!IsArray(frame, i) || Result(frame, i).data == Operand(frame, i).data) continue;
    const ArrayRef array = AsArrayRef(Operand(frame, i));
    if (array.nbytes == 0) continue;
    if (const int failed = copy(Result(frame, i).data, array)) return failed;
  }
  return 0;
}

// A message of shards begins with its shard record (receiver/sinks/sharding/sinks.py): int64, whose first
// number is the occurrence. Puts a copy with `occurrence` filled in into `record`, and replaces the record at
// the front of `arrays` with it.
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
__attribute__((noinline)) XLA_FFI_Error* EmitHeads(Tap& tap, uint64_t elements) {
  Truncation truncation;
  truncation.Apply(*tap.frame, elements, &tap.emission);
  FutureFactory futures(tap.frame, &truncation.shapes);
  return tap.ring->Emit(tap.emission, &futures) == Verdict::kTooLarge ? TooLarge(*tap.frame) : nullptr;
}

__attribute__((noinline)) void Keep(Tap& tap) {
  Truncation truncation;
  if (const uint64_t elements = tap.control->truncate())
    truncation.Apply(*tap.frame, elements, &tap.emission);
  KeepLatest(tap.control, tap.emission, tap.ring);
}

// Reads what every emission needs. Returns an error, or null.
XLA_FFI_Error* Read(Tap* tap, ArrayList* arrays, int32_t* gpu) {
  if (XLA_FFI_Error* error = ReadEmission(*tap->frame, arrays, &tap->emission, &tap->ring, gpu)) return error;
  if (tap->sharded && (arrays->size() == 0 || arrays->front().nbytes < sizeof(int64_t))) {
    return Invalid(*tap->frame, "hostcallback: a tap of shards has no shard record");
  }
  return nullptr;
}

__attribute__((noinline, hot)) XLA_FFI_Error* Emit(Tap& tap) {
  Emission& emission = tap.emission;
  const uint32_t flags = tap.flags;
  ArrayList arrays;
  if (XLA_FFI_Error* error = Read(&tap, &arrays, nullptr)) return error;
  const bool aborts = Aborts(emission.device);
  if (aborts && (flags & (kLate | kLast)) == 0 && IsPoisoned(emission.run_id)) return EndLaunch(*tap.frame);
  std::vector<int64_t> record;
  if (tap.check) {
    // Rules do not apply to checks, only switches: a failure that a rule left out would be missing from the
    // report.
    const bool off = tap.off || IsOffOn(emission.device, tap.consumer_id);
    if (off && !tap.sharded) return nullptr;
    if (Holds(emission.prefix, arrays)) return nullptr;
    // Counted even while the check is off, so that the devices agree on the number when it is on again.
    if (tap.sharded)
      StampShardRecord(NextOccurrence(emission.device, emission.run_id, tap.consumer_id), &arrays, &record);
    if (off) return nullptr;
  } else if (tap.sharded) {
    const Occurrence next =
        NextDecided(emission.device, emission.run_id, tap.consumer_id, tap.control, emission.time_ns);
    if (!next.sent) return nullptr;
    StampShardRecord(next.number, &arrays, &record);
  } else if (tap.control != nullptr) {
    const Admission admission = tap.control->Ask(emission.device, emission.time_ns);
    if (admission == Admission::kTooSoon) Keep(tap);
    if (admission != Admission::kSend) return nullptr;
    if (const uint64_t elements = tap.control->truncate()) return EmitHeads(tap, elements);
  }
  FutureFactory futures(tap.frame, &record);
  if (tap.ring->Emit(emission, &futures) == Verdict::kTooLarge) return TooLarge(*tap.frame);
  if (tap.check && aborts) {
    Poison(emission.run_id);
    if ((flags & kLate) == 0) return EndLaunch(*tap.frame);
  }
  if (aborts && (flags & kLast) != 0 && IsPoisoned(emission.run_id)) return EndLaunch(*tap.frame);
  return nullptr;
}

XLA_FFI_Error* GetStream(const XLA_FFI_CallFrame& frame, void** stream) {
  XLA_FFI_Stream_Get_Args args = {};
  args.struct_size = XLA_FFI_Stream_Get_Args_STRUCT_SIZE;
  args.ctx = frame.ctx;
  XLA_FFI_Error* error = frame.api->XLA_FFI_Stream_Get(&args);
  *stream = args.stream;
  return error;
}

int PassThroughOnGpu(const XLA_FFI_CallFrame& frame, const GpuDevice* gpu, void* stream) {
  return PassThrough(frame, [gpu, stream](void* result, const ArrayRef& array) {
    if (gpu == nullptr) return -1;
    GpuDevice::Use use(*gpu);
    return use ? use->copy_on_device(result, array.data, array.nbytes, stream) : -1;
  });
}

__attribute__((noinline)) XLA_FFI_Error* EmitFromGpu(Tap& tap) {
  Emission& emission = tap.emission;
  ArrayList arrays;
  int32_t ordinal;
  if (XLA_FFI_Error* error = Read(&tap, &arrays, &ordinal)) return error;
  DeviceTap from = {};
  if (XLA_FFI_Error* error = GetStream(*tap.frame, &from.stream)) return error;
  const int refused = tap.ring->UseGpu(ordinal);
  if (PassThroughOnGpu(*tap.frame, tap.ring->gpu(), from.stream) != 0) {
    return MakeError(tap.frame->api, XLA_FFI_Error_Code_INTERNAL,
                     "hostcallback: the GPU driver could not copy a tapped array to the result of the tap");
  }
  from.ends_launch = Aborts(emission.device);
  if (from.ends_launch && IsPoisoned(emission.run_id)) return EndLaunch(*tap.frame);
  from.check = tap.check;
  from.predicate = static_cast<uint32_t>(HCB_FROM_PREFIX(emission.prefix, device));
  from.sharded = tap.sharded;
  from.occurrence = -1;
  Truncation truncation;
  if (tap.check) {
    // Failures of a sharded check are counted even while it is off; only the reader sees whether it failed.
    from.off = tap.off || IsOffOn(emission.device, tap.consumer_id);
    if (from.off && !tap.sharded) return nullptr;
  } else if (tap.sharded) {
    const Occurrence next =
        NextDecided(tap.ring->device(), emission.run_id, tap.consumer_id, tap.control, emission.time_ns);
    if (!next.sent) return nullptr;
    from.occurrence = next.number;
  } else if (tap.control != nullptr) {
    if (!tap.control->Admit(emission.device, emission.time_ns)) return nullptr;
    const uint64_t elements = tap.control->truncate();
    if (elements != 0 && truncation.Apply(*tap.frame, elements, &emission)) from.host_arrays = 1;
  }
  if (refused != 0) {
    tap.ring->Lose(HCB_COPY_CONTEXT, refused);
    return nullptr;
  }
  emission.from_device = &from;
  // Without room this thread, which launches programs, waits; the device continues with the programs already
  // launched.
  return tap.ring->Emit(emission, nullptr) == Verdict::kTooLarge ? TooLarge(*tap.frame) : nullptr;
}

bool HasResults(const XLA_FFI_CallFrame& frame) {
  for (int64_t i = 0; i < frame.rets.size; ++i) {
    if (IsArray(frame, i)) return true;
  }
  return false;
}

// With a fast path for taps that are off. What each emission runs is `hot`: the compiler puts these functions
// next to each other, so that fewer pages of code are cold after a pause.
__attribute__((hot)) inline XLA_FFI_Error* Handle(XLA_FFI_CallFrame* frame, bool sharded, bool on_gpu) {
  if (!IsExecution(frame)) return nullptr;
  Tap tap;
  tap.frame = frame;
  if (XLA_FFI_Error* error = ReadPrefix(*frame, &tap.emission)) return error;
  if (!on_gpu && frame->rets.size != 0) {
    PassThrough(*frame, [](void* result, const ArrayRef& array) {
      std::memcpy(result, array.data, array.nbytes);
      return 0;
    });
  }
  tap.consumer_id = HCB_FROM_PREFIX(tap.emission.prefix, consumer_id);
  tap.flags = HCB_FROM_PREFIX(tap.emission.prefix, flags);
  tap.check = (tap.flags & kCheck) != 0;
  tap.control = FindControl(tap.consumer_id);
  tap.off = (tap.control != nullptr && tap.control->off()) || (tap.check && ChecksAreOff());
  tap.sharded = sharded;
  if (tap.off && !sharded && !AnyAborts() && !(on_gpu && HasResults(*frame))) {
    if (!tap.check) tap.control->CountSuppressed();
    return nullptr;
  }
  return on_gpu ? EmitFromGpu(tap) : Emit(tap);
}

}  // namespace
}  // namespace hcb

__attribute__((hot)) XLA_FFI_Error* hcb_tap(XLA_FFI_CallFrame* frame) {
  return hcb::Handle(frame, false, false);
}

XLA_FFI_Error* hcb_tap_shard(XLA_FFI_CallFrame* frame) { return hcb::Handle(frame, true, false); }

XLA_FFI_Error* hcb_gpu_tap(XLA_FFI_CallFrame* frame) { return hcb::Handle(frame, false, true); }

XLA_FFI_Error* hcb_gpu_tap_shard(XLA_FFI_CallFrame* frame) { return hcb::Handle(frame, true, true); }

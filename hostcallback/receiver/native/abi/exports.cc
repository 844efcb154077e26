// The exported functions of a ring and of frames: each translates its arguments and calls the library.
#include "abi/exports.h"

#include <cfenv>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "os/clock.h"
#include "os/delivery_turn.h"
#include "ring/call_table.h"
#include "ring/ring.h"
#include "wire/encode.h"

namespace {

using namespace hcb;

// A message of the host, with its list of arrays.
struct HostEmission : Emission {
  HostEmission(const uint8_t* prefix, uint64_t prefix_bytes, uint64_t count, const void* const* addresses,
               const uint64_t* nbytes)
      : Emission{} {
    refs.reserve(count);
    for (uint64_t i = 0; i < count; ++i) refs.push_back({addresses[i], nbytes[i], 0xff});
    this->prefix = prefix;
    this->prefix_bytes = prefix_bytes;
    arrays = refs.data();
    array_count = refs.size();
    payload_bytes = PayloadBytes(arrays, array_count);
  }

  // Stamps it with the time of now and the ring's device.
  void StampFor(const Ring& ring) {
    time_ns = UnixNowNs();
    device = ring.device_id();
  }

  std::vector<ArrayRef> refs;
};

// Copies of a message's arrays, until they are in the ring.
class Payload final : public Completion {
 public:
  explicit Payload(HostEmission* emission) {
    copies_.reserve(emission->refs.size());
    for (ArrayRef& ref : emission->refs) {
      const uint8_t* data = static_cast<const uint8_t*>(ref.data);
      copies_.emplace_back(data, data + ref.nbytes);
      ref.data = copies_.back().data();
    }
  }
  void Complete() override {}

 private:
  std::vector<std::vector<uint8_t>> copies_;
};

int32_t StatusOf(Verdict verdict) {
  switch (verdict) {
    case Verdict::kEmitted:
      return HCB_EMITTED;
    case Verdict::kDropped:
      return HCB_DROPPED;
    case Verdict::kPending:
      return HCB_QUEUED;
    case Verdict::kTooLarge:
      break;
  }
  return HCB_TOO_LARGE;
}

}  // namespace

uint32_t hcb_abi_version(void) { return HCB_ABI_VERSION; }

void hcb_ring_set_device_id(hcb_ring* ring, int32_t id) { RingOf(ring)->SetDeviceId(id); }

void hcb_ring_configure(hcb_ring* ring, const hcb_config* config) { RingOf(ring)->Configure(*config); }

int32_t hcb_ring_keep_in_file(hcb_ring* ring, const char* path, const char* name, uint64_t blocks_bytes) {
  return RingOf(ring)->KeepInFile(path, name, blocks_bytes);
}

void* hcb_ring_memory(hcb_ring* ring, uint64_t* capacity_bytes) {
  *capacity_bytes = RingOf(ring)->capacity();
  return RingOf(ring)->memory();
}

uint32_t hcb_ring_read(hcb_ring* ring, int64_t timeout_ns, uint32_t turn_frames, hcb_batch* batch) {
  const uint32_t frames = RingOf(ring)->Read(timeout_ns, batch);
  if (turn_frames != 0 && frames >= turn_frames) TakeDeliveryTurn();
  return frames;
}

uint32_t hcb_ring_copy_ahead(hcb_ring* ring, uint64_t* position, uint8_t* out, uint64_t capacity,
                             uint64_t* offsets, uint32_t most, uint64_t* needed) {
  return RingOf(ring)->CopyAhead(position, out, capacity, offsets, most, needed);
}

int32_t hcb_ring_release(hcb_ring* ring, uint64_t position, uint64_t frames) {
  return RingOf(ring)->Release(position, frames);
}

void hcb_ring_admit(hcb_ring* ring) { RingOf(ring)->AdmitWaiters(); }

uint32_t hcb_ring_read_call(hcb_ring* ring, int64_t timeout_ns, hcb_call_frame* frame) {
  return RingOf(ring)->ReadCall(timeout_ns, frame);
}

void hcb_ring_end_read_call(hcb_ring* ring) { RingOf(ring)->EndReadCall(); }

void hcb_ring_wake(hcb_ring* ring) { RingOf(ring)->Wake(); }

void hcb_ring_counters(hcb_ring* ring, hcb_counters* out) { RingOf(ring)->ReadCounters(out); }

uint64_t hcb_ring_discarded(hcb_ring* ring) { return RingOf(ring)->discarded(); }

int32_t hcb_ring_send(hcb_ring* ring, const uint8_t* prefix, uint64_t prefix_bytes, uint64_t count,
                      const void* const* arrays, const uint64_t* nbytes, int64_t run_id) {
  if (!ValidPrefix(prefix, prefix_bytes)) return HCB_INVALID;
  HostEmission emission(prefix, prefix_bytes, count, arrays, nbytes);
  emission.StampFor(*RingOf(ring));
  emission.run_id = run_id;
  return StatusOf(RingOf(ring)->Emit(emission, nullptr));
}

int32_t hcb_ring_append(hcb_ring* ring, const uint8_t* prefix, uint64_t prefix_bytes) {
  if (!ValidPrefix(prefix, prefix_bytes)) return HCB_INVALID;
  HostEmission emission(prefix, prefix_bytes, 0, nullptr, nullptr);
  emission.StampFor(*RingOf(ring));
  return StatusOf(RingOf(ring)->Append(emission));
}

int32_t hcb_ring_post(hcb_ring* ring, const uint8_t* prefix, uint64_t prefix_bytes, uint64_t count,
                      const void* const* arrays, const uint64_t* nbytes, int64_t run_id) {
  if (!ValidPrefix(prefix, prefix_bytes)) return HCB_INVALID;
  HostEmission emission(prefix, prefix_bytes, count, arrays, nbytes);
  emission.StampFor(*RingOf(ring));
  emission.run_id = run_id;
  if (!RingOf(ring)->Fits(emission)) return HCB_TOO_LARGE;
  return StatusOf(RingOf(ring)->AppendOwned(emission, std::make_unique<Payload>(&emission)));
}

int32_t hcb_ring_call(hcb_ring* ring, const uint8_t* prefix, uint64_t prefix_bytes, uint64_t count,
                      const void* const* arrays, const uint64_t* nbytes, uint64_t result_count,
                      void* const* results, const uint64_t* result_nbytes, char* error,
                      uint64_t error_bytes) {
  if (!ValidPrefix(prefix, prefix_bytes)) return HCB_INVALID;
  HostEmission emission(prefix, prefix_bytes, count, arrays, nbytes);
  emission.StampFor(*RingOf(ring));
  auto state = std::make_shared<ThreadCall::State>();
  auto call = std::make_unique<ThreadCall>(state);
  for (uint64_t i = 0; i < result_count; ++i) call->results.push_back({results[i], result_nbytes[i]});
  if (RingOf(ring)->Append(emission, std::move(call)) == Verdict::kTooLarge) return HCB_TOO_LARGE;
  std::string message;
  if (state->Wait(&message)) return HCB_EMITTED;
  if (error_bytes != 0) std::snprintf(error, error_bytes, "%s", message.c_str());
  return HCB_DROPPED;
}

uint64_t hcb_encode_frame(const hcb_stamp* stamp, const uint8_t* prefix, uint64_t prefix_bytes,
                          uint64_t count, const void* const* arrays, const uint64_t* nbytes, uint8_t* out,
                          uint64_t out_bytes) {
  if (!ValidPrefix(prefix, prefix_bytes)) return 0;
  HostEmission emission(prefix, prefix_bytes, count, arrays, nbytes);
  emission.time_ns = stamp->time_ns;
  emission.run_id = stamp->run_id;
  emission.device = stamp->device;
  const uint64_t frame_bytes = FrameBytes(prefix_bytes - sizeof(FrameHeader), emission.payload_bytes);
  if (frame_bytes > out_bytes) return frame_bytes;
  FrameHeader header;  // `out` may lie anywhere
  WriteHeader(emission, stamp->seq, stamp->position, stamp->flags, &header);
  std::memcpy(out, &header, sizeof(header));
  WriteInlineBody(emission, out + sizeof(header));
  return frame_bytes;
}

void hcb_ring_set_host_call(hcb_ring* ring, hcb_host_call call) { RingOf(ring)->SetHostCall(call); }

int32_t hcb_own_call_read(hcb_ring* ring, hcb_own_call* own, int64_t timeout_ns, hcb_call_frame* frame) {
  return RingOf(ring)->ReadOwnCall(own, timeout_ns, frame);
}

int32_t hcb_own_call_withdraw(hcb_ring* ring, hcb_own_call* own, const char* message) {
  std::unique_ptr<PendingCall> call = RingOf(ring)->WithdrawOwnCall(own);
  if (call) call->Finish(message);
  return call != nullptr;
}

int32_t hcb_own_call_ended(hcb_own_call* own) { return reinterpret_cast<ThreadCall::State*>(own)->Ended(); }

int32_t hcb_gpu_prepare(hcb_ring* ring, int32_t ordinal) { return RingOf(ring)->UseGpu(ordinal); }

void hcb_default_float_mode(void) { std::fesetenv(FE_DFL_ENV); }

namespace hcb {

// Each renews the state of its file, which another thread of the parent may have been changing.
void CloseGpuDriverAfterFork();
void ResetSwitchesAfterFork();
void ResetCallsAfterFork();
void ResetSupervisorAfterFork();
void ResetCompletersAfterFork();
void ResetDeliveryTurnAfterFork();
void ResetHoldAfterFork();
void ResetWaitAfterFork();
void ResetCellsAfterFork();
void ResetOccurrencesAfterFork();
void ResetLatestAfterFork();
void ResetRingsAfterFork();

}  // namespace hcb

void hcb_after_fork_child(void) {
  CloseGpuDriverAfterFork();
  ResetSwitchesAfterFork();
  ResetCallsAfterFork();
  ResetSupervisorAfterFork();
  ResetCompletersAfterFork();
  ResetDeliveryTurnAfterFork();
  ResetHoldAfterFork();
  ResetWaitAfterFork();
  ResetCellsAfterFork();
  ResetOccurrencesAfterFork();
  ResetLatestAfterFork();
  ResetRingsAfterFork();
}

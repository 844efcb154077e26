// The exported functions except the XLA FFI handlers: each translates its arguments and calls the library.
#include "abi/exports.h"

#include <sys/resource.h>
#include <time.h>

#include <algorithm>
#include <cfenv>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "ring/call_table.h"
#include "os/crc32.h"
#include "os/exit_status.h"
#include "os/interpreter.h"
#include "wire/columns.h"
#include "rules/rule.h"
#include "wire/encode.h"
#include "gpu/driver.h"
#include "handlers/hold.h"
#include "handlers/latest.h"
#include "handlers/settled.h"
#include "handlers/host_threads.h"
#include "rules/occurrences.h"
#include "ring/ring.h"
#include "ring/registry.h"
#include "os/stall_events.h"
#include "rules/rule_table.h"
#include "os/signal_watch.h"
#include "os/clock.h"

namespace {

hcb::Ring* Of(hcb_ring* handle) { return reinterpret_cast<hcb::Ring*>(handle); }
hcb_ring* Handle(hcb::Ring* ring) { return reinterpret_cast<hcb_ring*>(ring); }

std::vector<hcb::ArrayRef> ArrayRefs(uint64_t count, const void* const* arrays, const uint64_t* nbytes) {
  std::vector<hcb::ArrayRef> refs;
  refs.reserve(count);
  for (uint64_t i = 0; i < count; ++i) refs.push_back({arrays[i], nbytes[i], 0xff});
  return refs;
}

hcb::Emission MakeEmission(const uint8_t* prefix, uint64_t prefix_bytes, const std::vector<hcb::ArrayRef>& arrays) {
  hcb::Emission emission = {};
  emission.prefix = prefix;
  emission.prefix_bytes = prefix_bytes;
  emission.arrays = arrays.data();
  emission.array_count = arrays.size();
  emission.payload_bytes = hcb::PayloadBytes(arrays.data(), arrays.size());
  return emission;
}

void CopyText(const std::string& text, char* out, uint64_t out_bytes) {
  if (out_bytes == 0) return;
  const size_t length = std::min<size_t>(text.size(), out_bytes - 1);
  std::memcpy(out, text.data(), length);
  out[length] = 0;
}

int64_t ReadClock(clockid_t clock) {
  timespec now;
  clock_gettime(clock, &now);
  return static_cast<int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

int32_t StatusOf(hcb::Verdict verdict) {
  switch (verdict) {
    case hcb::Verdict::kEmitted:
      return HCB_EMITTED;
    case hcb::Verdict::kDropped:
      return HCB_DROPPED;
    case hcb::Verdict::kPending:
      return HCB_QUEUED;
    case hcb::Verdict::kTooLarge:
      break;
  }
  return HCB_TOO_LARGE;
}

}  // namespace

uint32_t hcb_abi_version(void) { return HCB_ABI_VERSION; }


hcb_ring* hcb_ring_open(int32_t device, const hcb_config* config) {
  bool made;
  hcb::Ring* ring = hcb::OpenRing(device, *config, &made);
  if (ring != nullptr && !made) ring->Configure(*config);
  return Handle(ring);
}

hcb_ring* hcb_ring_get(int32_t device) { return Handle(hcb::FindRing(device)); }

void hcb_ring_set_device_id(hcb_ring* ring, int32_t id) { Of(ring)->SetDeviceId(id); }

void hcb_ring_configure(hcb_ring* ring, const hcb_config* config) { Of(ring)->Configure(*config); }

int32_t hcb_ring_keep_in_file(hcb_ring* ring, const char* path, const char* name, uint64_t blocks_bytes) {
  return Of(ring)->KeepInFile(path, name, blocks_bytes);
}

void* hcb_ring_memory(hcb_ring* ring, uint64_t* capacity_bytes) {
  *capacity_bytes = Of(ring)->capacity();
  return Of(ring)->memory();
}

uint32_t hcb_ring_read(hcb_ring* ring, int64_t timeout_ns, hcb_batch* batch) {
  return Of(ring)->Read(timeout_ns, batch);
}

uint32_t hcb_ring_copy_ahead(hcb_ring* ring, uint64_t* position, uint8_t* out, uint64_t capacity, uint64_t* offsets, uint32_t most,
                             uint64_t* needed) {
  return Of(ring)->CopyAhead(position, out, capacity, offsets, most, needed);
}

void hcb_batch_columns(hcb_ring* ring, const hcb_batch* batch, hcb_columns* columns) {
  hcb::ReadColumns(Of(ring)->memory(), *batch, columns);
}

void hcb_batch_stack(hcb_ring* ring, const hcb_batch* batch, const hcb_columns* columns, uint64_t from, uint64_t count,
                     uint64_t stride, uint8_t* out) {
  hcb::CopyStack(Of(ring)->memory(), *batch, *columns, from, count, stride, out);
}

int32_t hcb_ring_release(hcb_ring* ring, uint64_t position, uint64_t frames) {
  return Of(ring)->Release(position, frames) ? 1 : 0;
}

void hcb_ring_admit(hcb_ring* ring) { Of(ring)->AdmitWaiters(); }

uint32_t hcb_ring_read_call(hcb_ring* ring, int64_t timeout_ns, hcb_call_frame* frame) {
  return Of(ring)->ReadCall(timeout_ns, frame);
}

void hcb_ring_end_read_call(hcb_ring* ring) { Of(ring)->EndReadCall(); }

void hcb_ring_wake(hcb_ring* ring) { Of(ring)->Wake(); }

void hcb_ring_counters(hcb_ring* ring, hcb_counters* out) { Of(ring)->ReadCounters(out); }

uint64_t hcb_ring_discarded(hcb_ring* ring) { return Of(ring)->discarded(); }

uint64_t hcb_emissions(void) { return hcb::Emissions(); }

void hcb_settle(uint64_t emissions) { hcb::Settle(emissions); }

int32_t hcb_is_settled(void) { return hcb::IsSettled(); }

void hcb_note_emission(void) { hcb::NoteEmission(); }

void hcb_buffer_waits(hcb_get_buffer original, hcb_wait wait) { hcb::WaitInBuffers(original, wait); }

void hcb_waited(void) { hcb::NoteWaited(); }

int hcb_buffer(void* object, void* view, int flags) { return hcb::GetBuffer(object, view, flags); }

void hcb_block_free(void* memory) { hcb::BlockPool::Free(memory); }

int32_t hcb_ring_send(hcb_ring* ring, const uint8_t* prefix, uint64_t prefix_bytes, uint64_t count,
                      const void* const* arrays, const uint64_t* nbytes, int64_t run_id) {
  if (!hcb::ValidPrefix(prefix, prefix_bytes)) return HCB_INVALID;
  const std::vector<hcb::ArrayRef> refs = ArrayRefs(count, arrays, nbytes);
  hcb::Emission emission = MakeEmission(prefix, prefix_bytes, refs);
  emission.time_ns = hcb::UnixNowNs();
  emission.run_id = run_id;
  emission.device = Of(ring)->device_id();
  return StatusOf(Of(ring)->Emit(emission, nullptr));
}

int32_t hcb_ring_append(hcb_ring* ring, const uint8_t* prefix, uint64_t prefix_bytes) {
  if (!hcb::ValidPrefix(prefix, prefix_bytes)) return HCB_INVALID;
  hcb::Emission emission = MakeEmission(prefix, prefix_bytes, {});
  emission.time_ns = hcb::UnixNowNs();
  emission.device = Of(ring)->device_id();
  return StatusOf(Of(ring)->Append(emission));
}

int32_t hcb_ring_call(hcb_ring* ring, const uint8_t* prefix, uint64_t prefix_bytes, uint64_t count, const void* const* arrays,
                      const uint64_t* nbytes, uint64_t result_count, void* const* results, const uint64_t* result_nbytes,
                      char* error, uint64_t error_bytes) {
  if (!hcb::ValidPrefix(prefix, prefix_bytes)) return HCB_INVALID;
  const std::vector<hcb::ArrayRef> refs = ArrayRefs(count, arrays, nbytes);
  hcb::Emission emission = MakeEmission(prefix, prefix_bytes, refs);
  emission.time_ns = hcb::UnixNowNs();
  emission.device = Of(ring)->device_id();
  auto state = std::make_shared<hcb::ThreadCall::State>();
  auto call = std::make_unique<hcb::ThreadCall>(state);
  for (uint64_t i = 0; i < result_count; ++i) call->results.push_back({results[i], result_nbytes[i]});
  const hcb::Verdict verdict = Of(ring)->Append(emission, std::move(call));
  if (verdict == hcb::Verdict::kTooLarge) return HCB_TOO_LARGE;
  std::string message;
  if (state->Wait(&message)) return HCB_EMITTED;
  CopyText(message, error, error_bytes);
  return HCB_DROPPED;
}

uint64_t hcb_encode_frame(const hcb_stamp* stamp, const uint8_t* prefix, uint64_t prefix_bytes, uint64_t count,
                          const void* const* arrays, const uint64_t* nbytes, uint8_t* out, uint64_t out_bytes) {
  if (!hcb::ValidPrefix(prefix, prefix_bytes)) return 0;
  const std::vector<hcb::ArrayRef> refs = ArrayRefs(count, arrays, nbytes);
  hcb::Emission emission = MakeEmission(prefix, prefix_bytes, refs);
  emission.time_ns = stamp->time_ns;
  emission.run_id = stamp->run_id;
  emission.device = stamp->device;
  const uint64_t frame_bytes = hcb::FrameBytes(prefix_bytes - sizeof(hcb::FrameHeader), emission.payload_bytes);
  if (frame_bytes > out_bytes) return frame_bytes;
  hcb::FrameHeader header;  // `out` may lie anywhere
  hcb::WriteHeader(emission, stamp->seq, stamp->position, stamp->flags, &header);
  std::memcpy(out, &header, sizeof(header));
  hcb::WriteInlineBody(emission, out + sizeof(header));
  return frame_bytes;
}

int32_t hcb_supervise_wait(int64_t timeout_ns, hcb_event* event) { return hcb::WaitForEvent(timeout_ns, event); }

void hcb_fail_exit(int32_t status) { hcb::FailExit(status); }

int32_t hcb_watch_termination(int32_t fd) { return hcb::WatchTermination(fd); }
void hcb_unwatch_termination(void) { hcb::UnwatchTermination(); }

int32_t hcb_watch_interrupt(int32_t fd) { return hcb::WatchInterrupt(fd); }
void hcb_unwatch_interrupt(void) { hcb::UnwatchInterrupt(); }


hcb_call* hcb_call_reply(int32_t device, uint64_t seq, uint64_t count, const void* const* arrays, const uint64_t* nbytes) {
  std::unique_ptr<hcb::PendingCall> call = hcb::TakeCall(device, seq);
  if (!call) return nullptr;
  if (!call->Accepts(count, nbytes)) {
    hcb::FailElsewhere(std::move(call), "hostcallback: the reply to this call has other lengths than its results");
    return nullptr;
  }
  call->Take(arrays);
  return reinterpret_cast<hcb_call*>(call.release());
}

void hcb_call_resume(hcb_call* call) {
  hcb::ResumeCall(std::unique_ptr<hcb::PendingCall>(reinterpret_cast<hcb::PendingCall*>(call)));
}

void hcb_call_fail(int32_t device, uint64_t seq, const char* message) { hcb::FailCall(device, seq, message); }

uint64_t hcb_call_count(int32_t device) { return hcb::CountCalls(device); }

void hcb_call_close(const char* message) { hcb::CloseCalls(message); }

int32_t hcb_switch(uint64_t consumer_id, int32_t device, int32_t off) {
  return hcb::Switch(consumer_id, device, off != 0) ? HCB_EMITTED : HCB_NO_MEMORY;
}

void hcb_switch_all_checks(int32_t off) { hcb::SwitchAllChecks(off != 0); }

int32_t hcb_abort_on_check(int32_t device, int32_t on) {
  return hcb::AbortOnCheck(device, on != 0) ? HCB_EMITTED : HCB_NO_MEMORY;
}

int32_t hcb_control_set(uint64_t consumer_id, const hcb_control* control) {
  hcb::Control* found = hcb::MakeControl(consumer_id);
  if (found == nullptr) return HCB_NO_MEMORY;
  found->Set(*control);
  hcb::SendLatest(found);
  return HCB_EMITTED;
}

uint64_t hcb_latest_send(void) { return hcb::SendLatest(); }

uint64_t hcb_latest_waiting(void) { return hcb::WaitingLatest(); }

void hcb_control_gate(uint64_t consumer_id, int32_t device, int32_t closed) {
  hcb::Control* found = hcb::FindControl(consumer_id);
  if (found != nullptr) found->SetGate(device, closed != 0);
}

uint64_t hcb_control_suppressed(uint64_t consumer_id) {
  hcb::Control* found = hcb::FindControl(consumer_id);
  return found == nullptr ? 0 : found->Suppressed();
}

int64_t hcb_waits(int64_t* cpu_ns) {
  *cpu_ns = ReadClock(CLOCK_THREAD_CPUTIME_ID);
#ifdef RUSAGE_THREAD
  rusage usage;
  if (getrusage(RUSAGE_THREAD, &usage) == 0) return usage.ru_nvcsw;
#endif
  return 0;
}

int64_t hcb_sleep(int64_t ns) {
  const timespec pause = {static_cast<time_t>(ns / 1'000'000'000), static_cast<long>(ns % 1'000'000'000)};
  nanosleep(&pause, nullptr);
  return ReadClock(CLOCK_MONOTONIC);
}

int32_t hcb_page_checksums(const uint8_t* data, uint64_t nbytes, uint64_t page_bytes, uint32_t* checksums) {
  return hcb::PageChecksums(data, nbytes, page_bytes, checksums) ? 1 : 0;
}

int32_t hcb_gpu_open(int32_t vendor, const char* library, char* error, uint64_t error_bytes) {
  std::string text;
  const bool found = hcb::OpenGpuDriver(static_cast<hcb_gpu_vendor>(vendor), library, &text);
  CopyText(text, error, error_bytes);
  return found ? 1 : 0;
}

int32_t hcb_gpu_prepare(hcb_ring* ring, int32_t ordinal) { return Of(ring)->UseGpu(ordinal); }

int32_t hcb_gpu_ring(int32_t ordinal) { return hcb::GpuRing(ordinal); }

void hcb_set_host_threads(const hcb_host_threads* threads) { hcb::SetHostThreads(*threads); }

void hcb_ring_set_host_call(hcb_ring* ring, hcb_host_call call) { Of(ring)->SetHostCall(call); }

int32_t hcb_own_call_read(hcb_ring* ring, hcb_own_call* own, int64_t timeout_ns, hcb_call_frame* frame) {
  return Of(ring)->ReadOwnCall(own, timeout_ns, frame);
}

int32_t hcb_own_call_withdraw(hcb_ring* ring, hcb_own_call* own, const char* message) {
  std::unique_ptr<hcb::PendingCall> call = Of(ring)->WithdrawOwnCall(own);
  if (call) call->Finish(message);
  return call != nullptr;
}

int32_t hcb_own_call_ended(hcb_own_call* own) { return reinterpret_cast<hcb::ThreadCall::State*>(own)->Ended() ? 1 : 0; }

void hcb_default_float_mode(void) { std::fesetenv(FE_DFL_ENV); }

int64_t hcb_thread_states(uint64_t* ids, uint64_t capacity, uint64_t* made) { return hcb::ThreadStates(ids, capacity, made); }

void hcb_hold_thread(int64_t nanoseconds) { hcb::HoldThread(nanoseconds); }

void hcb_hold_begin(void) { hcb::BeginHold(); }

int32_t hcb_hold_end(void) { return hcb::EndHold() ? 1 : 0; }

void hcb_after_fork_child(void) {
  hcb::CloseGpuDriverAfterFork();
  hcb::ResetSwitchesAfterFork();
  hcb::ResetCallsAfterFork();
  hcb::ResetSupervisorAfterFork();
  hcb::ResetCompletersAfterFork();
  hcb::ResetHoldAfterFork();
  hcb::ResetOccurrencesAfterFork();
  hcb::ResetLatestAfterFork();
  hcb::ResetRingsAfterFork();
}

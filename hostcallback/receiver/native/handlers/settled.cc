#include "handlers/settled.h"

#include <atomic>
#include <cfenv>
#include <chrono>
#include <thread>

#include "handlers/call_frame.h"
#include "handlers/ffi_handlers.h"
#include "handlers/host_threads.h"
#include "ring/registry.h"

namespace hcb {
namespace {

constexpr auto kStall = std::chrono::seconds(1);

std::atomic<uint64_t> settled{0};
std::atomic<uint64_t> noted{0};

// Written with the interpreter lock held, before GetBuffer is called for the first time, and read with it.
hcb_get_buffer original_get_buffer = nullptr;
hcb_wait wait_for_output = nullptr;
thread_local bool waited = false;

// Whether the wait came to its end.
bool Waited() {
  waited = false;
  wait_for_output();
  return waited;
}

// At most one thread of the programs waits, of at least two: the tap function that it waits for may need one.
void WaitOnOwnThread() {
  static std::atomic<bool> one_waits{false};
  static const bool others = std::thread::hardware_concurrency() > 1;
  if (!others || one_waits.exchange(true, std::memory_order_acquire)) return;
  WaitUntilDelivered(kStall);
  one_waits.store(false, std::memory_order_release);
}

}  // namespace

uint64_t Emissions() { return SumOfHeads() + noted.load(std::memory_order_relaxed); }

void NoteEmission() { noted.fetch_add(1, std::memory_order_relaxed); }

void Settle(uint64_t emissions) { settled.store(emissions, std::memory_order_relaxed); }

bool IsSettled() { return Emissions() == settled.load(std::memory_order_relaxed); }

void WaitInBuffers(hcb_get_buffer original, hcb_wait wait) {
  original_get_buffer = original;
  wait_for_output = wait;
}

void NoteWaited() { waited = true; }

int GetBuffer(void* object, void* view, int flags) {
  const int status = original_get_buffer(object, view, flags);
  // After it: it waits for the program that computes the object.
  if (status == 0 && !IsSettled() && !Waited()) InterruptHost();
  return status;
}

void WaitAtEnd() {
  if (wait_for_output == nullptr || IsSettled()) return;
  if (!IsHostThread()) return WaitOnOwnThread();
  std::fenv_t programs_own;
  std::fegetenv(&programs_own);
  std::fesetenv(FE_DFL_ENV);  // XLA flushes denormals on its threads
  if (!Waited()) InterruptHost();
  std::fesetenv(&programs_own);
}

}  // namespace hcb

extern "C" XLA_FFI_Error* hcb_wait_for_output(XLA_FFI_CallFrame* call_frame) {
  if (hcb::AnswerMetadataQuery(call_frame)) return nullptr;
  if (call_frame->stage == XLA_FFI_ExecutionStage_EXECUTE) hcb::WaitAtEnd();
  return nullptr;
}

#include "handlers/host_threads.h"

#include <atomic>
#include <cfenv>
#include <chrono>
#include <thread>
#include <utility>

namespace hcb {
namespace {

constexpr char kInterrupted[] = "hostcallback: a call was interrupted (KeyboardInterrupt) before its host function ran";

// Set once; the structure is never freed.
std::atomic<const hcb_host_threads*> host_threads{nullptr};

// Runs `call`; returns whether the user has interrupted the thread.
bool Run(const hcb_host_threads& host, hcb_host_call call, ThreadCall::State* own) {
  std::fenv_t programs_own;
  std::fegetenv(&programs_own);
  std::fesetenv(FE_DFL_ENV);  // XLA flushes denormals on its threads
  const int32_t entered = host.enter();
  // An interrupt from the time when the device computed must not be raised inside `call`.
  const bool interrupted =
      host.interrupted() != 0 || call(reinterpret_cast<hcb_own_call*>(own), ResumedDevice() >= 0) != 0;
  host.leave(entered);
  std::fesetenv(&programs_own);
  return interrupted;
}

}  // namespace

void SetHostThreads(const hcb_host_threads& threads) { host_threads = new hcb_host_threads(threads); }

void InterruptHost() { host_threads.load(std::memory_order_acquire)->interrupt(); }

bool IsHostThread() {
  const hcb_host_threads* host = host_threads.load(std::memory_order_acquire);
  return host != nullptr && host->this_thread() != nullptr;
}

bool MayCallHere(const Ring& ring) { return ring.host_call() != nullptr && IsHostThread(); }

bool CallHere(Ring* ring, const Emission& emission, std::vector<PendingCall::Result> results, std::string* error) {
  const hcb_host_threads& host = *host_threads.load(std::memory_order_acquire);
  auto state = std::make_shared<ThreadCall::State>();
  auto call = std::make_unique<ThreadCall>(state);
  call->owner = state.get();
  call->results = std::move(results);
  ring->Append(emission, std::move(call));
  const bool interrupted = Run(host, ring->host_call(), state.get());
  ring->LeaveOwnTurn(state.get());
  while (!state->Ended()) {
    // The call was given up. Its frame may still wait for room, and its arrays are in the program's memory until it
    // is written.
    if (std::unique_ptr<PendingCall> left = ring->WithdrawOwnCall(state.get())) {
      left->Finish(kInterrupted);
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
  }
  const bool done = state->Wait(error);
  if (interrupted) host.interrupt();
  return done;
}

}  // namespace hcb

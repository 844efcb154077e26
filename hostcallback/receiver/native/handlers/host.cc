// Handlers that enter the host: calls, which wait for the reply of a host function, and waits for what was
// emitted.
//
// A program that runs on one of the host's threads enters the host at once, on the same thread. The host
// tells how to recognize these threads and how to enter; the library knows nothing else about it. A call of a
// program on another thread waits for the reply without blocking that thread.
#include <atomic>
#include <cfenv>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "abi/exports.h"
#include "handlers/call_frame.h"
#include "ring/call_table.h"
#include "ring/registry.h"

namespace {

using namespace hcb;

constexpr char kInterrupted[] =
    "hostcallback: a call was interrupted (KeyboardInterrupt) before its host function ran";
constexpr auto kStall = std::chrono::seconds(1);

// Set once; the structure is never freed.
std::atomic<const hcb_host_threads*> host_threads{nullptr};

std::atomic<uint64_t> settled{0};
std::atomic<uint64_t> noted{0};

// Written with the interpreter lock held, before hcb_buffer is called for the first time, and read with it.
hcb_get_buffer original_get_buffer = nullptr;
std::atomic<hcb_wait> wait_for_output{nullptr};  // null while nothing waits
thread_local bool waited = false;

// The host's functions; null if the calling thread is none of the host's.
const hcb_host_threads* HostOfThisThread() {
  const hcb_host_threads* host = host_threads.load(std::memory_order_acquire);
  return host != nullptr && host->this_thread() != nullptr ? host : nullptr;
}

// The host's floating-point mode on a program's thread. XLA flushes denormals there.
class HostMode {
 public:
  HostMode() {
    std::fegetenv(&programs_own_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~HostMode() { std::fesetenv(&programs_own_); }

 private:
  std::fenv_t programs_own_;
};

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
      return MakeError(frame.api, XLA_FFI_Error_Code_UNIMPLEMENTED,
                       "hostcallback: a call's result is not a buffer");
    }
    if (!IsArray(frame, i)) continue;
    const uint64_t bits = BitsPerElement(Result(frame, i).dtype);
    if (bits == 0) {
      return MakeError(
          frame.api, XLA_FFI_Error_Code_UNIMPLEMENTED,
          "hostcallback: a call's result has an element type that this version of the native library does "
          "not know; update hostcallback, or convert the array behind the call");
    }
    results->push_back({Result(frame, i).data, AsArrayRef(Result(frame, i), bits).nbytes});
  }
  return nullptr;
}

// Runs the host function on the calling thread; returns whether an interrupt is to be set again.
bool Run(const hcb_host_threads& host, hcb_host_call call, ThreadCall::State* own) {
  const HostMode mode;
  const int32_t entered = host.enter();
  // An interrupt from the time when the device computed must not be raised at the first line of `call`.
  const int32_t came = host.interrupted();
  const bool interrupted = call(reinterpret_cast<hcb_own_call*>(own), ResumedDevice() >= 0, came != 0) != 0;
  host.leave(entered);
  return interrupted;
}

// Emits a call and runs its host function on the calling thread, once all earlier messages have been
// delivered. Returns whether the results are in place; if not, `error` has the reason.
bool CallHere(const hcb_host_threads& host, Ring* ring, const Emission& emission,
              std::vector<PendingCall::Result> results, std::string* error) {
  auto state = std::make_shared<ThreadCall::State>();
  auto call = std::make_unique<ThreadCall>(state);
  call->owner = state.get();
  call->results = std::move(results);
  ring->Append(emission, std::move(call));
  const bool interrupted = Run(host, ring->host_call(), state.get());
  ring->LeaveOwnTurn(state.get());
  while (!state->Ended()) {
    // The call was given up. Its frame may still wait for room, and its arrays are in the program's memory
    // until it is written.
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

XLA_FFI_Error* Call(XLA_FFI_CallFrame* frame) {
  ArrayList arrays;
  Emission emission;
  Ring* ring;
  if (XLA_FFI_Error* error = ReadPrefix(*frame, &emission)) return error;
  if (XLA_FFI_Error* error = ReadEmission(*frame, &arrays, &emission, &ring)) return error;
  std::vector<PendingCall::Result> results;
  if (XLA_FFI_Error* error = ReadResults(*frame, &results)) return error;
  if (!ring->Fits(emission)) {
    return Invalid(*frame,
                   "hostcallback: the metadata of this call exceeds half of the device's ring; pass fewer "
                   "arrays at once "
                   "or make the ring larger");
  }
  std::string error;
  const hcb_host_threads* const host = ring->host_call() != nullptr ? HostOfThisThread() : nullptr;
  if (host != nullptr) {
    if (CallHere(*host, ring, emission, std::move(results), &error)) return nullptr;
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

// Waits in the host. Sets an interrupt again that ended the wait, for the host to handle when it can.
void WaitInHost(hcb_wait wait) {
  waited = false;
  wait();
  if (!waited) host_threads.load(std::memory_order_acquire)->interrupt();
}

// At most one thread of the programs waits, of at least two: the tap function that it waits for may need one.
std::atomic<bool> one_waits{false};
const bool others = std::thread::hardware_concurrency() > 1;

void WaitOnOwnThread() {
  if (!others || one_waits.exchange(true, std::memory_order_acquire)) return;
  WaitUntilDelivered(kStall);
  one_waits.store(false, std::memory_order_release);
}

// On a thread of the host, which dispatched the program, it waits as hcb_buffer does. A thread of the program
// waits too, without entering the host, if no other one does, and as long as a tap function takes at most a
// second.
void WaitAtEnd() {
  const hcb_wait wait = wait_for_output.load();
  if (wait == nullptr || hcb_is_settled()) return;
  if (HostOfThisThread() == nullptr) return WaitOnOwnThread();
  const HostMode mode;
  WaitInHost(wait);
}

}  // namespace

namespace hcb {

// The thread that waits is the parent's.
void ResetWaitAfterFork() { one_waits.store(false); }

}  // namespace hcb

void hcb_set_host_threads(const hcb_host_threads* threads) { host_threads = new hcb_host_threads(*threads); }

uint64_t hcb_emissions(void) { return SumOfHeads() + noted.load(std::memory_order_relaxed); }

void hcb_note_emission(void) { noted.fetch_add(1, std::memory_order_relaxed); }

void hcb_settle(uint64_t emissions) { settled.store(emissions, std::memory_order_relaxed); }

int32_t hcb_is_settled(void) { return hcb_emissions() == settled.load(std::memory_order_relaxed); }

void hcb_buffer_waits(hcb_get_buffer original, hcb_wait wait) {
  if (original != nullptr) original_get_buffer = original;
  wait_for_output.store(wait);
}

void hcb_waited(void) { waited = true; }

int hcb_buffer(void* object, void* view, int flags) {
  const int status = original_get_buffer(object, view, flags);
  // After it: it waits for the program that computes the object.
  const hcb_wait wait = wait_for_output.load();
  if (status == 0 && wait != nullptr && !hcb_is_settled()) WaitInHost(wait);
  return status;
}

XLA_FFI_Error* hcb_call_host(XLA_FFI_CallFrame* frame) { return IsExecution(frame) ? Call(frame) : nullptr; }

XLA_FFI_Error* hcb_wait_for_output(XLA_FFI_CallFrame* frame) {
  if (IsExecution(frame)) WaitAtEnd();
  return nullptr;
}

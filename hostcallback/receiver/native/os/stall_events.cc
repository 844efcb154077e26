#include "os/stall_events.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <new>

#include "abi/exports.h"

namespace {

using Clock = std::chrono::steady_clock;

// A device that is faster than its taps begins to wait thousands of times per second. One STALL event per
// period is enough. An event that comes earlier is delivered at the end of the period, so that a lasting wait
// never goes unnoticed.
constexpr auto kStallPause = std::chrono::milliseconds(100);

struct Mailbox {
  std::mutex mutex;  // protects everything below
  std::condition_variable arrived;
  std::deque<hcb_event> events;
  Clock::time_point next_stall = {};  // the earliest time of the next STALL event
};

// Never destroyed: handlers may still run while the process exits.
Mailbox* TheMailbox() {
  static Mailbox* mailbox = new Mailbox;
  return mailbox;
}

}  // namespace

namespace hcb {

void SignalSupervisor(hcb_event_kind kind, int32_t device) {
  Mailbox* box = TheMailbox();
  {
    std::lock_guard<std::mutex> lock(box->mutex);
    const bool known = std::any_of(box->events.begin(), box->events.end(), [=](const hcb_event& event) {
      return event.kind == kind && event.device == device;
    });
    if (known) return;
    box->events.push_back({kind, device});
  }
  box->arrived.notify_one();
}

void ResetSupervisorAfterFork() { new (TheMailbox()) Mailbox; }

}  // namespace hcb

int32_t hcb_supervise_wait(int64_t timeout_ns, hcb_event* event) {
  Mailbox* box = TheMailbox();
  const Clock::time_point deadline =
      timeout_ns < 0 ? Clock::time_point::max() : Clock::now() + std::chrono::nanoseconds(timeout_ns);
  std::unique_lock<std::mutex> lock(box->mutex);
  for (;;) {
    const Clock::time_point now = Clock::now();
    const auto due = std::find_if(box->events.begin(), box->events.end(), [=](const hcb_event& e) {
      return e.kind != HCB_EVENT_STALL || now >= box->next_stall;
    });
    if (due != box->events.end()) {
      *event = *due;
      box->events.erase(due);
      if (event->kind == HCB_EVENT_STALL) box->next_stall = now + kStallPause;
      return 1;
    }
    if (now >= deadline) {
      *event = {HCB_NO_EVENT, 0};
      return 0;
    }
    const Clock::time_point next = box->events.empty() ? deadline : std::min(deadline, box->next_stall);
    if (next == Clock::time_point::max()) {
      box->arrived.wait(lock);
    } else {
      box->arrived.wait_until(lock, next);
    }
  }
}

#include "supervisor.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <new>

namespace hcb {
namespace {

struct Mailbox {
  std::mutex mutex;  // protects everything below
  std::condition_variable arrived;
  std::deque<hcb_event> events;
  bool wake_requested = false;
};

// Never destroyed: handlers may still run while the process exits.
Mailbox* TheMailbox() {
  static Mailbox* mailbox = new Mailbox;
  return mailbox;
}

}  // namespace

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

bool WaitForEvent(int64_t timeout_ns, hcb_event* event) {
  Mailbox* box = TheMailbox();
  std::unique_lock<std::mutex> lock(box->mutex);
  const auto ready = [box] { return !box->events.empty() || box->wake_requested; };
  if (timeout_ns < 0) {
    box->arrived.wait(lock, ready);
  } else {
    box->arrived.wait_for(lock, std::chrono::nanoseconds(timeout_ns), ready);
  }
  if (box->events.empty()) {
    box->wake_requested = false;
    *event = {HCB_NO_EVENT, 0};
    return false;
  }
  *event = box->events.front();
  box->events.pop_front();
  return true;
}

void WakeSupervisor() {
  Mailbox* box = TheMailbox();
  {
    std::lock_guard<std::mutex> lock(box->mutex);
    box->wake_requested = true;
  }
  box->arrived.notify_one();
}

void ResetSupervisorAfterFork() { new (TheMailbox()) Mailbox; }

}  // namespace hcb

#include "handlers/latest.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

#include "abi/exports.h"
#include "os/clock.h"
#include "rules/latest.h"
#include "rules/rule_table.h"

namespace hcb {
namespace {

constexpr int64_t kShortestWaitNs = 1'000'000;  // of the timer, which serves all taps
constexpr int64_t kRetryNs = 10'000'000;

std::atomic<LatestSlot*> all_slots{nullptr};
std::atomic<uint64_t> waiting{0};

struct Timer {
  std::mutex mutex;  // protects everything below
  std::condition_variable earlier;
  std::vector<LatestSlot*> slots;
  int64_t wakes_at = 0;
  uint64_t changes = 0;  // of rules
  bool running = false;
};

// Never destroyed: its thread outlives main.
Timer* TheTimer() {
  static Timer* timer = new Timer;
  return timer;
}

// Keeps a message's memory until it is in the ring.
class Memory final : public Completion {
 public:
  explicit Memory(std::unique_ptr<uint8_t[]> bytes) : bytes_(std::move(bytes)) { waiting.fetch_add(1); }
  void Complete() override { waiting.fetch_sub(1); }

 private:
  const std::unique_ptr<uint8_t[]> bytes_;
};

bool Send(LatestSlot* slot) {
  return slot->TakeTo([slot](const Emission& emission, std::unique_ptr<uint8_t[]> bytes, Ring* ring) {
    if (!ring->Fits(emission)) {
      slot->control->CountLeftOut(slot->device, 1);
      return;
    }
    ring->AppendOwned(emission, std::make_unique<Memory>(std::move(bytes)));
  });
}

// Sends the slot's message if its time has come. Returns when to look again; 0: when a message is kept again.
int64_t Look(LatestSlot* slot) {
  if (slot->full()) {
    // A newer message may take the place of this one, instead of a second one in the queue.
    if (Ring* ring = slot->ring(); ring->SomebodyWaits()) return UnixNowNs() + kRetryNs;
    const int64_t due = slot->control->Claim(slot->device, UnixNowNs());
    if (due != 0) return due;
    Send(slot);
  }
  slot->scheduled.store(false, std::memory_order_seq_cst);
  // A producer that has kept a message meanwhile may have seen that the slot was scheduled.
  const bool again = slot->full() && !slot->scheduled.exchange(true, std::memory_order_seq_cst);
  return again ? slot->control->NotBefore(slot->device) : 0;
}

void WaitLocked(Timer* timer, std::unique_lock<std::mutex>* lock) {
  if (timer->slots.empty()) {
    timer->wakes_at = INT64_MAX;
    timer->earlier.wait(*lock);
    return;
  }
  const auto first =
      std::min_element(timer->slots.begin(), timer->slots.end(),
                       [](const LatestSlot* a, const LatestSlot* b) { return a->due < b->due; });
  const int64_t now = UnixNowNs();
  const int64_t wait = std::max((*first)->due - now, kShortestWaitNs);
  timer->wakes_at = now + wait;
  timer->earlier.wait_for(*lock, std::chrono::nanoseconds(wait));
}

void* RunTimer(void* argument) {
  Timer* timer = static_cast<Timer*>(argument);
  std::unique_lock<std::mutex> lock(timer->mutex);
  for (;;) {
    WaitLocked(timer, &lock);
    timer->wakes_at = 0;
    const int64_t now = UnixNowNs();
    const auto due = std::partition(timer->slots.begin(), timer->slots.end(),
                                    [now](const LatestSlot* slot) { return slot->due > now; });
    const std::vector<LatestSlot*> looked(due, timer->slots.end());
    timer->slots.erase(due, timer->slots.end());
    const uint64_t changes = timer->changes;
    lock.unlock();
    std::vector<int64_t> next;
    next.reserve(looked.size());
    for (LatestSlot* slot : looked) next.push_back(Look(slot));
    lock.lock();
    for (size_t i = 0; i < looked.size(); ++i) {
      if (next[i] == 0) continue;  // a producer may have scheduled the slot meanwhile
      looked[i]->due = timer->changes == changes ? next[i] : 0;
      timer->slots.push_back(looked[i]);
    }
  }
}

void Schedule(LatestSlot* slot) {
  Timer* timer = TheTimer();
  {
    std::lock_guard<std::mutex> lock(timer->mutex);
    slot->due = slot->control->NotBefore(slot->device);
    timer->slots.push_back(slot);
    if (!timer->running) {
      pthread_t thread;
      timer->running = pthread_create(&thread, nullptr, RunTimer, timer) == 0;
      if (timer->running) pthread_detach(thread);
    }
    if (timer->wakes_at <= slot->due + kShortestWaitNs) return;
  }
  timer->earlier.notify_one();
}

// Null if the system has no memory.
LatestSlot* SlotOf(Control* control, int32_t device) {
  if (LatestSlot* slot = control->slot(device)) return slot;
  std::lock_guard<std::mutex> lock(TheTimer()->mutex);
  if (LatestSlot* slot = control->slot(device)) return slot;
  LatestSlot* const made =
      new (std::nothrow) LatestSlot(control, device, all_slots.load(std::memory_order_relaxed));
  if (made == nullptr) return nullptr;
  control->SetSlot(device, made);
  all_slots.store(made, std::memory_order_release);
  return made;
}

// After a change of rules the times at which the timer would look do not hold.
void Reschedule(const Control* control) {
  Timer* timer = TheTimer();
  {
    std::lock_guard<std::mutex> lock(timer->mutex);
    ++timer->changes;
    for (LatestSlot* slot : timer->slots) {
      if (slot->control == control) slot->due = 0;
    }
  }
  timer->earlier.notify_one();
}

// Sends the messages that are kept now: all, or those of one consumer. Never waits. Returns their number.
uint64_t SendLatest(const Control* control = nullptr) {
  uint64_t sent = 0;
  bool any = false;
  for (LatestSlot* slot = all_slots.load(std::memory_order_acquire); slot != nullptr; slot = slot->next) {
    if (control != nullptr && slot->control != control) continue;
    any = true;
    if (!slot->full()) continue;
    slot->control->Restart(slot->device, UnixNowNs());
    sent += Send(slot) ? 1 : 0;
  }
  if (control != nullptr && any) Reschedule(control);
  return sent;
}

}  // namespace

void KeepLatest(Control* control, const Emission& emission, Ring* own) {
  LatestSlot* const slot = SlotOf(control, emission.device);
  if (slot == nullptr) return control->CountLeftOut(emission.device, 1);
  const uint64_t left_out = slot->Keep(emission, own);
  if (left_out != 0) control->CountLeftOut(emission.device, left_out);
  if (slot->scheduled.load(std::memory_order_seq_cst) || !slot->full()) return;
  if (!slot->scheduled.exchange(true, std::memory_order_seq_cst)) Schedule(slot);
}

void ResetLatestAfterFork() {
  new (TheTimer()) Timer;
  waiting.store(0);
  for (LatestSlot* slot = all_slots.load(); slot != nullptr; slot = slot->next) slot->ResetAfterFork();
}

}  // namespace hcb

int32_t hcb_control_set(uint64_t consumer_id, const hcb_control* control) {
  hcb::Control* found = hcb::MakeControl(consumer_id);
  if (found == nullptr) return HCB_NO_MEMORY;
  found->Set(*control);
  hcb::SendLatest(found);
  return HCB_EMITTED;
}

uint64_t hcb_latest_send(void) { return hcb::SendLatest(); }

uint64_t hcb_latest_waiting(void) { return hcb::waiting.load(); }

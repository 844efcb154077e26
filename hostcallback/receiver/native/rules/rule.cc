#include "rules/rule.h"

#include <algorithm>
#include <new>

#include "rules/latest.h"

namespace hcb {

namespace {

std::atomic<uint32_t> stripes_taken;
// This thread's stripe, from 1 on; 0: none yet. In the TLS block that every thread has from the start:
// otherwise each access is a call.
thread_local uint32_t own_stripe __attribute__((tls_model("initial-exec"))) = 0;

template <typename T>
bool Change(std::atomic<T>* field, T value) {
  return field->exchange(value, std::memory_order_relaxed) != value;
}

}  // namespace

void Control::Set(const hcb_control& rules) {
  SwitchOff(rules.off != 0);
  truncate_.store(rules.truncate, std::memory_order_relaxed);
  bool changed = Change(&every_, std::max<uint64_t>(rules.every, 1));
  changed |= Change(&interval_ns_, rules.interval_ns);
  changed |= Change(&probe_every_, rules.probe_every);
  changed |= Change(&probe_ns_, rules.probe_ns);
  if (changed) epoch_.fetch_add(1, std::memory_order_relaxed);
  const bool gated = rules.probe_every != 0 || rules.probe_ns != 0;
  decides_.store(rules.every > 1 || rules.interval_ns != 0 || gated, std::memory_order_release);
}

void Control::SetGate(int32_t device, bool closed) {
  DeviceState* state = StateOf(device);
  // no memory: the gate stays open, and the receiver drops messages that the predicate rejects
  if (state == nullptr) return;
  state->held.store(0, std::memory_order_relaxed);
  state->next_probe.store(0, std::memory_order_relaxed);
  state->closed.store(closed, std::memory_order_release);
}

bool Control::Admit(int32_t device, int64_t now_ns) {
  const Admission admission = Ask(device, now_ns);
  if (admission == Admission::kTooSoon) CountLeftOut(device, 1);
  return admission == Admission::kSend;
}

Admission Control::Ask(int32_t device, int64_t now_ns) {
  if (off()) {
    CountSuppressed();
    return Admission::kLeaveOut;
  }
  const bool decides = decides_.load(std::memory_order_acquire);
  if (!decides && !keeps_.load(std::memory_order_acquire)) return Admission::kSend;
  DeviceState* state = StateOf(device);
  if (state == nullptr) return Admission::kSend;  // no memory: too many messages are better than none
  const Admission admission = decides ? Decide(state, now_ns) : Admission::kSend;
  uint64_t left_out = admission == Admission::kLeaveOut ? 1 : 0;
  if (admission == Admission::kSend) {
    if (LatestSlot* kept = state->slot.load(std::memory_order_acquire)) left_out = kept->Clear();
  }
  if (left_out != 0) state->suppressed.fetch_add(left_out, std::memory_order_relaxed);
  return admission;
}

void Control::CountLeftOut(int32_t device, uint64_t messages) {
  if (DeviceState* state = StateOf(device)) state->suppressed.fetch_add(messages, std::memory_order_relaxed);
}

LatestSlot* Control::slot(int32_t device) {
  DeviceState* state = StateOf(device);
  return state == nullptr ? nullptr : state->slot.load(std::memory_order_acquire);
}

void Control::SetSlot(int32_t device, LatestSlot* slot) {
  DeviceState* state = StateOf(device);
  if (state == nullptr) return;
  state->slot.store(slot, std::memory_order_release);
  keeps_.store(true, std::memory_order_release);
}

int64_t Control::Claim(int32_t device, int64_t now_ns) {
  DeviceState* state = StateOf(device);
  const int64_t interval = interval_ns_.load(std::memory_order_relaxed);
  if (state == nullptr || interval == 0) return 0;
  int64_t not_before = state->not_before.load(std::memory_order_relaxed);
  if (now_ns < not_before && not_before - now_ns <= interval) return not_before;
  if (state->not_before.compare_exchange_strong(not_before, now_ns + interval, std::memory_order_relaxed))
    return 0;
  return std::max(not_before, now_ns + 1);
}

void Control::Restart(int32_t device, int64_t now_ns) {
  DeviceState* state = StateOf(device);
  const int64_t interval = interval_ns_.load(std::memory_order_relaxed);
  if (state != nullptr && interval != 0)
    state->not_before.store(now_ns + interval, std::memory_order_relaxed);
}

int64_t Control::NotBefore(int32_t device) {
  DeviceState* state = StateOf(device);
  return state == nullptr ? 0 : state->not_before.load(std::memory_order_relaxed);
}

Admission Control::Decide(DeviceState* state, int64_t now_ns) {
  const uint32_t epoch = epoch_.load(std::memory_order_relaxed);
  if (state->epoch.load(std::memory_order_relaxed) != epoch &&
      state->epoch.exchange(epoch, std::memory_order_relaxed) != epoch) {
    state->seen.store(0, std::memory_order_relaxed);
    state->not_before.store(0, std::memory_order_relaxed);
  }
  const uint64_t every = every_.load(std::memory_order_relaxed);
  if (every > 1 && state->seen.fetch_add(1, std::memory_order_relaxed) % every != 0)
    return Admission::kLeaveOut;
  if (state->closed.load(std::memory_order_acquire) && !Probe(state, now_ns)) return Admission::kLeaveOut;
  const int64_t interval = interval_ns_.load(std::memory_order_relaxed);
  if (interval == 0) return Admission::kSend;
  int64_t not_before = state->not_before.load(std::memory_order_relaxed);
  // More than one interval ahead means that the clock was set back.
  if (now_ns < not_before && not_before - now_ns <= interval) return Admission::kTooSoon;
  return state->not_before.compare_exchange_strong(not_before, now_ns + interval, std::memory_order_relaxed)
             ? Admission::kSend
             : Admission::kTooSoon;
}

// Whether a message passes a closed gate, so that the predicate is asked again.
bool Control::Probe(DeviceState* state, int64_t now_ns) {
  const int64_t probe_ns = probe_ns_.load(std::memory_order_relaxed);
  const uint64_t probe_every = probe_every_.load(std::memory_order_relaxed);
  const int64_t next_probe = state->next_probe.load(std::memory_order_relaxed);
  const uint64_t held = state->held.fetch_add(1, std::memory_order_relaxed) + 1;
  const bool in_time = next_probe == 0 || (now_ns < next_probe && next_probe - now_ns <= probe_ns);
  const bool due = (probe_every != 0 && held >= probe_every) || (probe_ns != 0 && !in_time);
  if (due) state->held.store(0, std::memory_order_relaxed);
  if (due || next_probe == 0) state->next_probe.store(now_ns + probe_ns, std::memory_order_relaxed);
  return due;
}

void Control::CountSuppressed() {
  uint32_t own = own_stripe;
  if (own == 0)
    own = own_stripe = std::min(stripes_taken.fetch_add(1, std::memory_order_relaxed) + 1, kStripes);
  std::atomic<uint64_t>& count = off_counts_[own - 1].count;
  // only this thread writes to the stripe: an atomic addition would take as long as all the rest
  if (own < kStripes) {
    count.store(count.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  } else {
    count.fetch_add(1, std::memory_order_relaxed);
  }
}

uint64_t Control::Suppressed() const {
  uint64_t count = 0;
  for (const Stripe& stripe : off_counts_) count += stripe.count.load(std::memory_order_relaxed);
  for (const DeviceState* s = states_.load(std::memory_order_acquire); s != nullptr; s = s->next) {
    count += s->suppressed.load(std::memory_order_relaxed);
  }
  return count;
}

Control::DeviceState* Control::StateOf(int32_t device) {
  DeviceState* head = states_.load(std::memory_order_acquire);
  for (DeviceState* s = head; s != nullptr; s = s->next) {
    if (s->device == device) return s;
  }
  DeviceState* made = new (std::nothrow) DeviceState{};
  if (made == nullptr) return nullptr;
  made->device = device;
  made->epoch.store(epoch_.load(std::memory_order_relaxed), std::memory_order_relaxed);
  for (;;) {
    made->next = head;
    if (states_.compare_exchange_weak(head, made, std::memory_order_acq_rel)) return made;
    for (DeviceState* s = head; s != made->next; s = s->next) {
      if (s->device != device) continue;
      delete made;  // another thread was faster
      return s;
    }
  }
}

}  // namespace hcb

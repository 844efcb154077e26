#include "rules/rule_table.h"

#include <atomic>
#include <cstddef>
#include <mutex>
#include <new>

#include "abi/exports.h"

namespace hcb {
namespace {

constexpr size_t kRuleSlots = 1 << 16;              // a power of two, at most half of it used
constexpr uint64_t kAborting = 0x61626f7274696e67;  // used in place of a consumer id

// Open addressing. Keys are never removed, so that lookups need no lock.
struct RuleSlot {
  std::atomic<uint64_t> key;  // 0: free
  std::atomic<bool> on;       // of keys that are not consumers
  std::atomic<Control*> control;
};

std::mutex writing;  // protects writing
std::atomic<RuleSlot*> slots;
size_t used = 0;
std::atomic<bool> checks_off;
std::atomic<bool> single_devices;  // whether anything was ever switched off on one device only
std::atomic<bool> aborting;        // whether failing checks were ever set to end their launch

constexpr size_t kPoisoned = 64;
std::atomic<int64_t> poisoned[kPoisoned];  // the most recent ones
std::atomic<uint32_t> poisoned_count;

uint64_t Key(uint64_t consumer_id, int32_t device) {
  uint64_t key = consumer_id ^ (static_cast<uint64_t>(device + 1) * 0x9e3779b97f4a7c15);
  key ^= key >> 32;
  return key == 0 ? 1 : key;
}

RuleSlot* Find(RuleSlot* table, uint64_t key) {
  size_t i = static_cast<size_t>(key * 0x9e3779b97f4a7c15 >> 48) & (kRuleSlots - 1);
  for (;; i = (i + 1) & (kRuleSlots - 1)) {
    const uint64_t found = table[i].key.load(std::memory_order_acquire);
    if (found == key || found == 0) return &table[i];
  }
}

// The slot of a key, taken if it is free. Null if the table is full. Needs `writing`.
RuleSlot* Take(uint64_t key) {
  RuleSlot* table = slots.load(std::memory_order_relaxed);
  if (table == nullptr) {
    table =
        new (std::nothrow) RuleSlot[kRuleSlots]();  // never freed: a program may run while the process ends
    if (table == nullptr) return nullptr;
    slots.store(table, std::memory_order_release);
  }
  RuleSlot* slot = Find(table, key);
  if (slot->key.load(std::memory_order_relaxed) == 0) {
    if (used == kRuleSlots / 2) return nullptr;
    ++used;
    slot->key.store(key, std::memory_order_release);
  }
  return slot;
}

bool Get(uint64_t key) {
  RuleSlot* table = slots.load(std::memory_order_acquire);
  if (table == nullptr) return false;
  const RuleSlot* slot = Find(table, key);
  return slot->key.load(std::memory_order_acquire) == key && slot->on.load(std::memory_order_relaxed);
}

// Switching to the current value needs no slot.
bool Set(uint64_t key, bool on) {
  if (Get(key) == on) return true;
  std::lock_guard<std::mutex> lock(writing);
  RuleSlot* slot = Take(key);
  if (slot != nullptr) slot->on.store(on, std::memory_order_relaxed);
  return slot != nullptr;
}

}  // namespace

__attribute__((hot)) Control* FindControl(uint64_t consumer_id) {
  RuleSlot* table = slots.load(std::memory_order_acquire);
  if (table == nullptr) return nullptr;
  // A free slot has no control.
  return Find(table, Key(consumer_id, kEveryDevice))->control.load(std::memory_order_acquire);
}

Control* MakeControl(uint64_t consumer_id) {
  if (Control* control = FindControl(consumer_id)) return control;
  std::lock_guard<std::mutex> lock(writing);
  RuleSlot* slot = Take(Key(consumer_id, kEveryDevice));
  if (slot == nullptr) return nullptr;
  Control* control = slot->control.load(std::memory_order_relaxed);
  if (control == nullptr) {
    control = new (std::nothrow) Control;
    slot->control.store(control, std::memory_order_release);
  }
  return control;
}

bool ChecksAreOff() { return checks_off.load(std::memory_order_relaxed); }

bool IsOffOn(int32_t device, uint64_t consumer_id) {
  return single_devices.load(std::memory_order_relaxed) && Get(Key(consumer_id, device));
}

bool AnyAborts() { return aborting.load(std::memory_order_relaxed); }

bool Aborts(int32_t device) { return AnyAborts() && Get(Key(kAborting, device)); }

void Poison(int64_t run_id) {
  if (IsPoisoned(run_id)) return;
  const uint32_t number = poisoned_count.fetch_add(1, std::memory_order_relaxed);
  poisoned[number % kPoisoned].store(run_id, std::memory_order_release);
}

bool IsPoisoned(int64_t run_id) {
  const uint32_t count = poisoned_count.load(std::memory_order_relaxed);
  for (uint32_t i = 0; i < kPoisoned && i < count; ++i) {
    if (poisoned[i].load(std::memory_order_acquire) == run_id) return true;
  }
  return false;
}

// The switches stay as they are. `writing` may be held by a thread that does not exist in the child.
void ResetSwitchesAfterFork() { new (&writing) std::mutex; }

}  // namespace hcb

int32_t hcb_switch(uint64_t consumer_id, int32_t device, int32_t off) {
  bool done;
  if (device != hcb::kEveryDevice) {
    if (off) hcb::single_devices.store(true, std::memory_order_relaxed);
    done = hcb::Set(hcb::Key(consumer_id, device), off != 0);
  } else {
    hcb::Control* control = off ? hcb::MakeControl(consumer_id) : hcb::FindControl(consumer_id);
    if (control != nullptr) control->SwitchOff(off != 0);
    done = control != nullptr || !off;
  }
  return done ? HCB_EMITTED : HCB_NO_MEMORY;
}

void hcb_switch_all_checks(int32_t off) { hcb::checks_off.store(off != 0, std::memory_order_relaxed); }

int32_t hcb_abort_on_check(int32_t device, int32_t on) {
  // Up to jaxlib 0.8, a program that is compiled again repeats the run ids of the first one.
  if (on) hcb::aborting.store(true, std::memory_order_relaxed);
  if (on) hcb::poisoned_count.store(0, std::memory_order_relaxed);
  return hcb::Set(hcb::Key(hcb::kAborting, device), on != 0) ? HCB_EMITTED : HCB_NO_MEMORY;
}

void hcb_control_gate(uint64_t consumer_id, int32_t device, int32_t closed) {
  if (hcb::Control* found = hcb::FindControl(consumer_id)) found->SetGate(device, closed != 0);
}

uint64_t hcb_control_suppressed(uint64_t consumer_id) {
  hcb::Control* found = hcb::FindControl(consumer_id);
  return found == nullptr ? 0 : found->Suppressed();
}

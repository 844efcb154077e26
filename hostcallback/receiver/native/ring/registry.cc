#include "ring/registry.h"

#include <atomic>
#include <mutex>
#include <new>

#include "os/stall_events.h"

namespace hcb {
namespace {

// One entry per ring, newest first. Entries and rings are never freed, because programs may emit at any time, so
// readers of the list need no lock. A process has few devices; a list is as fast as a table and has no limit.
struct Entry {
  int32_t device;
  Ring* ring;
  Entry* next;
};

std::atomic<Entry*> entries{nullptr};
std::mutex entries_mutex;  // protects insertion

}  // namespace

Ring* FindRing(int32_t device) {
  // Without the lock: entries are only ever prepended, and live as long as the process. The acquire pairs with the release in
  // OpenRing.
  for (Entry* entry = entries.load(std::memory_order_acquire); entry != nullptr; entry = entry->next) {
    if (entry->device == device) return entry->ring;
  }
  return nullptr;
}

Ring* OpenRing(int32_t device, const hcb_config& config, bool* made) {
  *made = false;
  if (Ring* ring = FindRing(device)) return ring;
  // Looked up again with the lock, because another thread may have made it meanwhile.
  std::lock_guard<std::mutex> lock(entries_mutex);
  if (Ring* ring = FindRing(device)) return ring;
  std::unique_ptr<Ring> ring = Ring::Make(device, config);
  if (!ring) return nullptr;
  *made = true;
  entries.store(new Entry{device, ring.get(), entries.load(std::memory_order_relaxed)}, std::memory_order_release);
  return ring.release();
}

Ring* RingForEmission(int32_t device) {
  if (Ring* ring = FindRing(device)) return ring;
  bool made;
  Ring* ring = OpenRing(device, hcb_config{}, &made);
  if (made) SignalSupervisor(HCB_EVENT_NEW_RING, device);
  return ring;
}

uint64_t SumOfHeads() {
  uint64_t sum = 0;
  for (Entry* entry = entries.load(std::memory_order_acquire); entry != nullptr; entry = entry->next) {
    sum += entry->ring->head();
  }
  return sum;
}

void ResetRingsAfterFork() {
  new (&entries_mutex) std::mutex;
  for (Entry* entry = entries.load(); entry != nullptr; entry = entry->next) entry->ring->ResetAfterFork();
}

}  // namespace hcb

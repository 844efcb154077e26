#include "ring/registry.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <new>
#include <thread>

#include "abi/exports.h"
#include "os/stall_events.h"
#include "os/thread_sleep.h"

namespace hcb {
namespace {

// One entry per ring, newest first. Entries and rings are never freed, because programs may emit at any time,
// so readers of the list need no lock. A process has few devices; a list is as fast as a table and has no
// limit.
struct RingEntry {
  int32_t device;
  Ring* ring;
  RingEntry* next;
};

std::atomic<RingEntry*> entries{nullptr};
std::mutex entries_mutex;  // protects insertion

// Null if the device has no ring.
Ring* FindRing(int32_t device) {
  // Without the lock: entries are only ever prepended, and live as long as the process. The acquire pairs
  // with the release in OpenRing.
  for (RingEntry* entry = entries.load(std::memory_order_acquire); entry != nullptr; entry = entry->next) {
    if (entry->device == device) return entry->ring;
  }
  return nullptr;
}

// The device's ring, created with `config` if it has none; `made` tells whether it was. Null if the system
// has no memory.
Ring* OpenRing(int32_t device, const hcb_config& config, bool* made) {
  *made = false;
  if (Ring* ring = FindRing(device)) return ring;
  // Looked up again with the lock, because another thread may have made it meanwhile.
  std::lock_guard<std::mutex> lock(entries_mutex);
  if (Ring* ring = FindRing(device)) return ring;
  std::unique_ptr<Ring> ring = Ring::Make(device, config);
  if (!ring) return nullptr;
  *made = true;
  entries.store(new RingEntry{device, ring.get(), entries.load(std::memory_order_relaxed)},
                std::memory_order_release);
  return ring.release();
}

constexpr auto kFirstPause = std::chrono::microseconds(20);
constexpr auto kMaxPause = std::chrono::microseconds(500);

// A tap function that sleeps may wait for the very program that waits for it. A thread that waits for the
// interpreter wakes up every 5 ms, so that it is not taken for one that sleeps.
constexpr auto kMaxSleep = std::chrono::milliseconds(10);

// Whether the thread that delivers sleeps in a tap function, and has for kMaxSleep.
class SleepingReader {
 public:
  bool Sleeps(const Ring& ring, std::chrono::steady_clock::time_point now) {
    const int32_t thread = ring.DeliveringThread();
    const uint64_t sleep = thread != 0 ? SleepOfThread(thread) : 0;
    if (sleep == 0 || sleep != sleep_) since_ = now;
    sleep_ = sleep;
    return now - since_ > kMaxSleep;
  }

 private:
  uint64_t sleep_ = 0;
  std::chrono::steady_clock::time_point since_;
};

// Waits for the frames before `end`. A reader that rests is woken at once.
void WaitFor(Ring* ring, uint64_t end, std::chrono::nanoseconds stall) {
  auto since = std::chrono::steady_clock::now();
  uint64_t seen = ring->BeingDelivered();
  SleepingReader reader;
  std::chrono::nanoseconds pause = kFirstPause;
  while (!ring->IsDelivered(end) && !ring->ReaderEmits()) {
    ring->Wake();
    std::this_thread::sleep_for(pause);
    pause = std::min<std::chrono::nanoseconds>(2 * pause, kMaxPause);
    const auto now = std::chrono::steady_clock::now();
    if (const uint64_t delivered = ring->BeingDelivered(); delivered != seen) {
      seen = delivered;
      since = now;
    }
    if (now - since > stall || reader.Sleeps(*ring, now)) return;
  }
}

}  // namespace

__attribute__((hot)) Ring* RingForEmission(int32_t device) {
  if (Ring* ring = FindRing(device)) return ring;
  bool made;
  Ring* ring = OpenRing(device, hcb_config{}, &made);
  if (made) SignalSupervisor(HCB_EVENT_NEW_RING, device);
  return ring;
}

uint64_t SumOfHeads() {
  uint64_t sum = 0;
  for (RingEntry* entry = entries.load(std::memory_order_acquire); entry != nullptr; entry = entry->next) {
    sum += entry->ring->head();
  }
  return sum;
}

void WaitUntilDelivered(std::chrono::nanoseconds stall) {
  for (RingEntry* entry = entries.load(std::memory_order_acquire); entry != nullptr; entry = entry->next) {
    WaitFor(entry->ring, entry->ring->head(), stall);
  }
}

void ResetRingsAfterFork() {
  new (&entries_mutex) std::mutex;
  for (RingEntry* entry = entries.load(); entry != nullptr; entry = entry->next)
    entry->ring->ResetAfterFork();
}

}  // namespace hcb

hcb_ring* hcb_ring_open(int32_t device, const hcb_config* config) {
  bool made;
  hcb::Ring* ring = hcb::OpenRing(device, *config, &made);
  if (ring != nullptr && !made) ring->Configure(*config);
  return reinterpret_cast<hcb_ring*>(ring);
}

hcb_ring* hcb_ring_get(int32_t device) { return reinterpret_cast<hcb_ring*>(hcb::FindRing(device)); }

// A GPU's ordinal counts the process's GPUs, and so may equal the id of a CPU device.
int32_t hcb_gpu_ring(int32_t ordinal) { return -2 - ordinal; }

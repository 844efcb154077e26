#include "rules/latest.h"

#include <cstring>
#include <new>

namespace hcb {

uint64_t LatestSlot::Keep(const Emission& emission, Ring* ring) {
  if (emission.payload_bytes > kLatestBytes) return 1;
  const uint64_t nbytes = emission.prefix_bytes + emission.payload_bytes;
  std::lock_guard<std::mutex> lock(mutex_);
  if (nbytes > capacity_) {
    std::unique_ptr<uint8_t[]> larger(new (std::nothrow) uint8_t[nbytes]);
    if (!larger) return 1;
    bytes_ = std::move(larger);
    capacity_ = nbytes;
  }
  std::memcpy(bytes_.get(), emission.prefix, emission.prefix_bytes);
  WritePayload(emission, bytes_.get() + emission.prefix_bytes);
  emission_ = emission;
  emission_.prefix = bytes_.get();
  emission_.array_count = 1;
  ring_ = ring;
  return full_.exchange(true, std::memory_order_seq_cst) ? 1 : 0;
}

uint64_t LatestSlot::Clear() {
  if (!full()) return 0;
  std::lock_guard<std::mutex> lock(mutex_);
  return full_.exchange(false, std::memory_order_seq_cst) ? 1 : 0;
}

// The mutex may be held by a thread that does not exist in the child, in the middle of a copy.
void LatestSlot::ResetAfterFork() {
  new (&mutex_) std::mutex;
  (void)bytes_.release();
  capacity_ = 0;
  full_.store(false, std::memory_order_relaxed);
  scheduled.store(false, std::memory_order_relaxed);
}

}  // namespace hcb

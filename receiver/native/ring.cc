// What a ring is apart from its two sides: memory, configuration, counters, waking, fork.
#include "ring.h"

#include <sys/mman.h>

#include <algorithm>
#include <new>

namespace hcb {
namespace {

constexpr uint64_t kDefaultCapacity = 8ull << 20;
constexpr uint64_t kMinCapacity = 4096;  // holds the frames of any scalar twice over; tests need tiny rings
constexpr uint64_t kMaxCapacity = 1ull << 40;
constexpr uint64_t kDefaultThreshold = 64ull << 10;
constexpr uint64_t kDefaultBudget = 64ull << 20;
constexpr auto kExpected = std::chrono::microseconds(100);

uint64_t PowerOfTwo(uint64_t n) {
  uint64_t power = kMinCapacity;
  while (power < n && power < kMaxCapacity) power *= 2;
  return power;
}

hcb_config WithDefaults(hcb_config config) {
  config.capacity_bytes = PowerOfTwo(config.capacity_bytes ? config.capacity_bytes : kDefaultCapacity);
  if (config.external_threshold_bytes == 0) config.external_threshold_bytes = kDefaultThreshold;
  // A frame of at most half the ring always fits once the ring is empty, wherever its end is; a quarter leaves room for two.
  config.external_threshold_bytes = std::min(config.external_threshold_bytes, config.capacity_bytes / 4);
  if (config.block_budget_bytes == 0) config.block_budget_bytes = kDefaultBudget;
  if (config.sample_every == 0) config.sample_every = 1;
  return config;
}

}  // namespace

std::unique_ptr<Ring> Ring::Make(int32_t device, const hcb_config& config) {
  const hcb_config complete = WithDefaults(config);
  void* memory = mmap(nullptr, complete.capacity_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return nullptr;
  return std::unique_ptr<Ring>(new Ring(device, complete, static_cast<uint8_t*>(memory)));
}

Ring::Ring(int32_t device, const hcb_config& config, uint8_t* memory)
    : device_(device),
      device_id_(device),
      capacity_(config.capacity_bytes),
      external_threshold_(config.external_threshold_bytes),
      memory_(memory),
      config_(config) {
  blocks_.SetStockLimit(config.block_budget_bytes / 2);
}

Ring::~Ring() { munmap(memory_, capacity_); }

void Ring::Configure(const hcb_config& config) {
  const hcb_config complete = WithDefaults(config);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    config_ = complete;
  }
  // Pinning costs more than memory.
  blocks_.SetStockLimit(complete.block_budget_bytes / (gpu_.load() != nullptr ? 1 : 2));
  AdmitWaiters();  // a larger budget may have made room
}

void Ring::ReadCounters(hcb_counters* out) {
  std::lock_guard<std::mutex> lock(mutex_);
  // The reader's side first: what it releases meanwhile counts as queued, never the other way round.
  const uint64_t released_frames = released_frames_.load(std::memory_order_acquire) + discarded();
  const uint64_t released = released_.load(std::memory_order_acquire);
  out->emitted = emitted_;
  out->dropped = dropped_;
  out->emitted_bytes = emitted_bytes_;
  out->queued_messages = emitted_ > released_frames ? emitted_ - released_frames : 0;
  out->queued_bytes = head_.load(std::memory_order_relaxed) - released + outstanding_bytes_;
  out->waiting_producers = waiters_.size();
  out->next_seq = next_seq_ - discarded_.load();
  out->released_messages = released_frames;
  out->discarded = discarded();
  out->unpinned = unpinned_;
}

void Ring::WakeReader() {
  if (wake_from_.exchange(kAwake, std::memory_order_seq_cst) == kAwake) return;
  // The empty critical section makes sure that the reader is in its wait, not on the way to it.
  { std::lock_guard<std::mutex> lock(sleep_mutex_); }
  sleep_.notify_one();
}

// Tells whoever is to take the call at `position`, which has just been committed.
void Ring::AnnounceCall(uint64_t position) {
  std::lock_guard<std::mutex> lock(sleep_mutex_);
  urgent_end_ = std::max(urgent_end_, position + 1);
  const bool in_front = !turn_taken_ && cursor_ == position;
  if (in_front && ResumedDevice() == device_) {
    // This thread looks for calls as soon as the program lets go of it. Should that take long, the reader comes in between.
    expected_ = position;
    expected_until_ = Clock::now() + kExpected;
    if (wake_from_.load(std::memory_order_relaxed) == kAwake) return;
  } else if (in_front && callers_ != 0) {
    call_arrived_.notify_one();
    return;
  }
  wake_from_.store(kAwake, std::memory_order_seq_cst);
  sleep_.notify_one();
}

void Ring::Wake() {
  {
    std::lock_guard<std::mutex> lock(sleep_mutex_);
    wake_requested_ = true;
    wake_from_.store(kAwake, std::memory_order_seq_cst);
  }
  sleep_.notify_one();
}

void Ring::ResetAfterFork() {
  // Other threads of the parent may have held any lock and been inside any container. Nothing is destroyed: what the
  // containers own (blocks, completions) is the parent's business.
  new (&mutex_) std::mutex;
  new (&sleep_mutex_) std::mutex;
  new (&sleep_) std::condition_variable;
  new (&call_arrived_) std::condition_variable;
  new (&waiters_) std::deque<Waiter*>;
  new (&outstanding_) std::deque<OutstandingBlock>;
  new (&copies_) std::deque<DeviceCopy>;
  gpu_ = nullptr;
  oldest_copy_ = kNoCopy;
  lost_ = discarded_ = 0;
  given_back_ = unpinned_ = 0;
  blocks_.ResetAfterFork();
  outstanding_bytes_ = 0;
  next_seq_ = emitted_ = dropped_ = emitted_bytes_ = sample_tick_ = 0;
  // Positions go on: an old header in the memory can never pass for a new one.
  const uint64_t head = AlignUp(head_.load(), capacity_);
  head_ = released_ = head;
  cursor_ = head;
  cursor_frames_ = 0;
  released_frames_ = 0;
  waiting_ = 0;
  turn_taken_ = reader_turn_ = false;
  stream_end_ = {};
  callers_ = 0;
  wake_from_ = kAwake;
  wake_requested_ = false;
}

}  // namespace hcb

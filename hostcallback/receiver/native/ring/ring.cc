// The parts of a ring that belong to neither side: memory, configuration, counters, waking, fork.
#include "ring/ring.h"

#include <errno.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <thread>

#include "os/clock.h"
#include "ring/block_arena.h"

namespace hcb {
namespace {

constexpr uint64_t kDefaultCapacity = 8ull << 20;
constexpr uint64_t kMinCapacity = 4096;  // holds the frames of two scalars of any type; tests need tiny rings
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
  // A frame of at most half the ring always fits into an empty ring, wherever its end is; a quarter leaves
  // room for two.
  config.external_threshold_bytes = std::min(config.external_threshold_bytes, config.capacity_bytes / 4);
  if (config.block_budget_bytes == 0) config.block_budget_bytes = kDefaultBudget;
  if (config.sample_every == 0) config.sample_every = 1;
  return config;
}

// Not a plain store: the reader may have released more in between.
void Raise(std::atomic<uint64_t>* number, const std::atomic<uint64_t>& wanted) {
  uint64_t there = number->load(std::memory_order_seq_cst);
  while (there < wanted.load(std::memory_order_seq_cst) &&
         !number->compare_exchange_weak(there, wanted.load())) {
  }
}

}  // namespace

std::unique_ptr<Ring> Ring::Make(int32_t device, const hcb_config& config) {
  const hcb_config complete = WithDefaults(config);
  uint8_t* base = MapRing(complete.capacity_bytes);
  if (base == nullptr) return nullptr;
  return std::unique_ptr<Ring>(new Ring(device, complete, base));
}

Ring::Ring(int32_t device, const hcb_config& config, uint8_t* base)
    : device_(device),
      device_id_(device),
      capacity_(config.capacity_bytes),
      external_threshold_(config.external_threshold_bytes),
      base_(base),
      control_(new (base) RingControl{}),
      memory_(base + kRingPage),
      config_(config) {
  Initialize(control_);
  overwrites_ = (config.steps & HCB_OVERWRITE_OLDEST) != 0;
  blocks_.SetStockLimit(config.block_budget_bytes / 2);
}

Ring::~Ring() { UnmapRing(base_, capacity_); }

void Ring::Initialize(RingControl* control) const {
  std::memcpy(control->magic, kRingMagic, sizeof(kRingMagic));
  control->version = kRingFileVersion;
  control->page_bytes = kRingPage;
  control->capacity = capacity_;
  control->device = device_;
  control->device_id = device_id();
  control->wake_from = kAwake;
}

void Ring::SetDeviceId(int32_t id) {
  device_id_.store(id, std::memory_order_relaxed);
  control_->device_id = id;
}

// Whether all reserved frames are committed. Damaged frames count as committed: the reader reports them.
bool Ring::AllCommittedLocked() const {
  const uint64_t head = control_->head.load(std::memory_order_relaxed);
  uint64_t at = control_->released.load(std::memory_order_acquire) & ~(kFrameAlign - 1);
  while (at != head && Check(at, head) == HCB_INTACT) {
    const FrameHeader& header = *At(at);
    const uint32_t flags = LoadFlags(&header);
    if (flags & kBusy) return false;
    at += RingBytes(header, flags);
  }
  return true;
}

int Ring::KeepInFile(const char* path, const char* name, uint64_t blocks_bytes) {
  const uint64_t ring_bytes = kRingPage + capacity_;
  blocks_bytes = AlignUp(blocks_bytes, kRingPage);
  RingFile file;
  if (const int error = file.Create(path, ring_bytes + blocks_bytes)) return error;
  uint8_t* copy = file.Map(0, ring_bytes);
  if (copy == nullptr) return errno;
  int error;
  while ((error = MoveInto(&file, copy, name, blocks_bytes)) == EAGAIN) std::this_thread::yield();
  munmap(copy, ring_bytes);
  Wake();  // a reader that went to sleep meanwhile may have noted that in the old memory
  if (error == 0) error = file.Publish();
  if (error != 0 || blocks_bytes == 0) return error;
  uint8_t* arena = file.Map(ring_bytes, blocks_bytes);
  if (arena == nullptr) return errno;
  blocks_.UseArena(new BlockArena(arena, blocks_bytes, ring_bytes));
  return 0;
}

// EAGAIN: a producer has reserved a frame and still writes to the old memory.
int Ring::MoveInto(RingFile* file, uint8_t* copy, const char* name, uint64_t blocks_bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (in_file_) return EEXIST;
  if (pinned_) return EBUSY;
  if (!AllCommittedLocked()) return EAGAIN;
  const uint64_t ring_bytes = kRingPage + capacity_;
  RingControl* const control = new (copy) RingControl{};
  Initialize(control);
  control->pid = getpid();
  control->created_ns = UnixNowNs();
  control->blocks_offset = blocks_bytes != 0 ? ring_bytes : 0;
  control->blocks_bytes = blocks_bytes;
  std::strncpy(control->name, name, kDeviceNameBytes - 1);
  control->head = control_->head.load();
  control->released = control_->released.load();
  control->delivered = control_->delivered.load();
  control->released_frames = control_->released_frames.load();
  std::memcpy(copy + kRingPage, memory_, capacity_);
  if (file->Map(0, ring_bytes, base_) == nullptr) return errno;
  in_file_ = true;
  // Memory that the reader released during the copy: see Release.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  Raise(&control_->released, released_here_);
  Raise(&control_->released_frames, released_frames_here_);
  return 0;
}

void Ring::Configure(const hcb_config& config) {
  const hcb_config complete = WithDefaults(config);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    config_ = complete;
    overwrites_.store((complete.steps & HCB_OVERWRITE_OLDEST) != 0, std::memory_order_relaxed);
  }
  // A larger stock for a GPU, because pinning takes long.
  blocks_.SetStockLimit(complete.block_budget_bytes / (gpu_.load() != nullptr ? 1 : 2));
  AdmitWaiters();  // a larger budget may have made room
}

void Ring::ReadCounters(hcb_counters* out) {
  std::lock_guard<std::mutex> lock(mutex_);
  // The reader's side first: frames released meanwhile count as queued, never the other way round.
  const uint64_t released_frames = control_->released_frames.load(std::memory_order_acquire) + discarded();
  const uint64_t released = control_->released.load(std::memory_order_acquire);
  out->emitted = emitted_;
  out->dropped = dropped_;
  out->emitted_bytes = emitted_bytes_;
  out->queued_messages = emitted_ > released_frames ? emitted_ - released_frames : 0;
  out->queued_bytes = control_->head.load(std::memory_order_relaxed) - released + outstanding_bytes_;
  out->waiting_producers = waiters_.size();
  out->next_seq = next_seq_ - discarded_.load();
  out->released_messages = released_frames;
  out->discarded = discarded();
  out->unpinned = unpinned_;
}

void Ring::WakeReader() {
  if (control_->wake_from.exchange(kAwake, std::memory_order_seq_cst) == kAwake) return;
  // The empty critical section ensures that the reader is waiting, not about to wait.
  {
    std::lock_guard<std::mutex> lock(sleep_mutex_);
  }
  sleep_.notify_one();
}

// Tells the thread that must take the call at `position`, which has just been committed.
void Ring::AnnounceCall(uint64_t position) {
  std::lock_guard<std::mutex> lock(sleep_mutex_);
  urgent_end_ = std::max(urgent_end_, position + 1);
  const bool in_front = !turn_taken_ && cursor_ == position;
  if (in_front && OwnerInFront() != nullptr) {
    // its owner is about to look, or waits because another thread has written the frame
    own_turn_.notify_all();
  } else if (in_front && ResumedDevice() == device_) {
    // This thread looks for calls as soon as the program returns. If that takes long, the reader wakes a
    // caller.
    expected_ = position;
    expected_until_ = Clock::now() + kExpected;
    if (control_->wake_from.load(std::memory_order_relaxed) != kAwake) WakeReaderLocked();
  } else if (in_front && callers_ != 0) {
    call_arrived_.notify_one();
  } else {
    WakeReaderLocked();
  }
}

void Ring::WakeReaderLocked() {
  control_->wake_from.store(kAwake, std::memory_order_seq_cst);
  sleep_.notify_one();
}

void Ring::Wake() {
  {
    std::lock_guard<std::mutex> lock(sleep_mutex_);
    wake_requested_ = true;
    control_->wake_from.store(kAwake, std::memory_order_seq_cst);
  }
  sleep_.notify_one();
}

void Ring::ResetAfterFork() {
  // Other threads of the parent may have held any lock and been changing any container. Nothing is destroyed,
  // because the contents (blocks, completions) belong to the parent.
  new (&mutex_) std::mutex;
  new (&sleep_mutex_) std::mutex;
  new (&sleep_) std::condition_variable;
  new (&call_arrived_) std::condition_variable;
  new (&own_turn_) std::condition_variable;
  host_call_ = nullptr;
  new (&waiters_) std::deque<Waiter*>;
  new (&outstanding_) std::deque<OutstandingBlock>;
  new (&copies_) std::deque<DeviceCopy>;
  gpu_ = nullptr;
  oldest_copy_ = kNoCopy;
  lost_ = discarded_ = 0;
  given_back_ = overwritten_ = unpinned_ = 0;
  holding_ = false;
  blocks_.ResetAfterFork();
  if (in_file_) {  // the file is the parent's
    const uint64_t head = control_->head.load();
    if (MapRing(capacity_, base_) == nullptr) _exit(1);  // the child must not write into its parent's file
    new (base_) RingControl{};
    Initialize(control_);
    control_->head = head;
    in_file_ = false;
  }
  outstanding_bytes_ = 0;
  next_seq_ = emitted_ = dropped_ = emitted_bytes_ = sample_tick_ = 0;
  // Positions continue, so that an old header in the memory can never be taken for a new one.
  const uint64_t head = AlignUp(control_->head.load(), capacity_);
  control_->head = control_->released = control_->delivered = released_here_ = head;
  cursor_ = head;
  cursor_frames_ = 0;
  control_->released_frames = released_frames_here_ = 0;
  waiting_ = 0;
  turn_taken_ = reader_turn_ = false;
  delivering_thread_.store(0);
  turn_owner_ = nullptr;
  stream_end_ = {};
  callers_ = 0;
  control_->wake_from = kAwake;
  wake_requested_ = false;
}

}  // namespace hcb

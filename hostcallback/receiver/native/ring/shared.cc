// Rings that another process reads: the writer's part, and the reader's.
//
// The writer does two tasks that a reader in its process would do: it frees payload blocks when the other process has released their
// frames, and it admits waiting emissions, on a thread that runs while any wait.
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <thread>
#include <vector>

#include "ring/block_arena.h"
#include "ring/ring.h"

namespace hcb {
namespace {

constexpr auto kLook = std::chrono::microseconds(300);  // interval at which waiting emissions are admitted

struct Attendant {
  std::mutex mutex;  // protects everything below
  std::condition_variable arrived;
  std::vector<Ring*> rings;
  bool running = false;
};

// Never destroyed: its thread outlives main.
Attendant* TheAttendant() {
  static Attendant* attendant = new Attendant;
  return attendant;
}

void* Attend(void* argument) {
  Attendant* attendant = static_cast<Attendant*>(argument);
  std::unique_lock<std::mutex> lock(attendant->mutex);
  for (;;) {
    attendant->arrived.wait(lock, [attendant] { return !attendant->rings.empty(); });
    const std::vector<Ring*> rings = attendant->rings;
    lock.unlock();
    std::vector<Ring*> done;
    for (Ring* ring : rings) {
      ring->AdmitWaiters();
      if (!ring->SomebodyWaits()) done.push_back(ring);
    }
    std::this_thread::sleep_for(kLook);
    lock.lock();
    for (Ring* ring : done) {
      if (ring->SomebodyWaits()) continue;
      attendant->rings.erase(std::find(attendant->rings.begin(), attendant->rings.end(), ring));
    }
  }
}

}  // namespace

void AttendTo(Ring* ring) {
  Attendant* attendant = TheAttendant();
  {
    std::lock_guard<std::mutex> lock(attendant->mutex);
    const bool known = std::find(attendant->rings.begin(), attendant->rings.end(), ring) != attendant->rings.end();
    if (known && attendant->running) return;
    if (!known) attendant->rings.push_back(ring);
    if (!attendant->running) {
      pthread_t thread;
      attendant->running = pthread_create(&thread, nullptr, Attend, attendant) == 0;
      if (attendant->running) pthread_detach(thread);
    }
  }
  attendant->arrived.notify_one();
}

void ResetAttendantAfterFork() { new (TheAttendant()) Attendant; }

int Ring::ShareWith(Ring* twin) {
  {
    std::lock_guard<std::mutex> lock(twin->mutex_);
    if (!twin->in_file_) return EINVAL;
    twin->outside_.store(true, std::memory_order_seq_cst);
  }
  if (twin->SomebodyWaits()) AttendTo(twin);  // emissions that came while no process read the twin
  shared_twin_.store(twin, std::memory_order_release);
  return 0;
}

void Ring::Reclaim() {
  {
    std::lock_guard<std::mutex> reader(sleep_mutex_);
    std::lock_guard<std::mutex> lock(mutex_);
    if (!outside_.load(std::memory_order_relaxed)) return;
    ReclaimLocked();
    outside_.store(false, std::memory_order_seq_cst);
    cursor_ = delivered_end_ = control_->released.load(std::memory_order_acquire);
    released_here_ = cursor_;
    cursor_frames_ = released_frames_here_ = control_->released_frames.load(std::memory_order_relaxed);
    turn_taken_ = reader_turn_ = false;
    holding_ = false;
  }
  AdmitWaiters();
}

// Frees the payload blocks of frames that the other process has released.
void Ring::ReclaimLocked() {
  const uint64_t released = control_->released.load(std::memory_order_acquire);
  while (!outstanding_.empty() && outstanding_.front().position < released) {
    BlockPool::Free(outstanding_.front().memory);
    outstanding_bytes_ -= outstanding_.front().nbytes;
    outstanding_.pop_front();
  }
}

std::unique_ptr<Ring> Ring::Attach(const char* path, int* error) {
  const int descriptor = open(path, O_RDWR | O_CLOEXEC | O_NOFOLLOW);
  if (descriptor < 0) {
    *error = errno;
    return nullptr;
  }
  struct stat status;
  RingControl control;
  *error = 0;
  if (fstat(descriptor, &status) != 0) *error = errno;
  const uint64_t nbytes = *error == 0 ? static_cast<uint64_t>(status.st_size) : 0;
  // Only the identifying fields are used: the rest of the control page is being written to.
  if (*error == 0 && pread(descriptor, static_cast<void*>(&control), sizeof(control), 0) != sizeof(control)) *error = EINVAL;
  const bool power = *error == 0 && control.capacity >= kRingPage && (control.capacity & (control.capacity - 1)) == 0;
  if (*error == 0 && (std::memcmp(control.magic, kRingMagic, sizeof(kRingMagic)) != 0 || control.version != kRingFileVersion ||
                      control.page_bytes != kRingPage || !power || control.capacity > nbytes ||
                      nbytes - control.capacity < kRingPage)) {
    *error = EINVAL;
  }
  void* base = MAP_FAILED;
  if (*error == 0) {
    base = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    if (base == MAP_FAILED) *error = errno;
  }
  close(descriptor);
  if (*error != 0) return nullptr;
  uint8_t* const copy = MapRing(control.capacity);
  if (copy == nullptr) {
    munmap(base, nbytes);
    *error = ENOMEM;
    return nullptr;
  }
  return std::unique_ptr<Ring>(new Ring(control, static_cast<uint8_t*>(base), nbytes, copy));
}

// The identity is that which was checked: the other process may change the page at any time.
Ring::Ring(const RingControl& checked, uint8_t* base, uint64_t file_bytes, uint8_t* copy)
    : device_(checked.device),
      device_id_(checked.device_id),
      capacity_(checked.capacity),
      external_threshold_(0),
      base_(base),
      control_(reinterpret_cast<RingControl*>(base)),
      memory_(copy + kRingPage),
      theirs_(base + kRingPage),
      attached_bytes_(file_bytes),
      config_() {
  cursor_ = delivered_end_ = control_->released.load(std::memory_order_acquire) & ~(kFrameAlign - 1);
  released_here_ = cursor_;
  cursor_frames_ = released_frames_here_ = control_->released_frames.load(std::memory_order_relaxed);
  blocks_.SetStockLimit(16ull << 20);
}

// The head as the other process states it, if it can be one; otherwise nothing is there to be read. It may not reach into frames that
// are not released.
uint64_t Ring::TheirHead() const {
  const uint64_t head = control_->head.load(std::memory_order_acquire) & ~(kFrameAlign - 1);
  const uint64_t start = released_here_.load(std::memory_order_relaxed);
  return head - start > capacity_ || head - start < cursor_ - start ? cursor_ : head;
}

// Copies a header, or the rest of the frame of such a header, out of the other process's memory. Only the copies are checked and used:
// the other process may change its memory at any time.
void Ring::CopyHeader(uint64_t position) const {
  const FrameHeader* theirs = reinterpret_cast<const FrameHeader*>(theirs_ + (position & (capacity_ - 1)));
  FrameHeader* ours = At(position);
  const uint32_t flags = LoadFlags(theirs);
  std::memcpy(static_cast<void*>(ours), theirs, sizeof(FrameHeader));
  ours->flags = flags;
}

void Ring::CopyFrame(uint64_t position) const {
  const FrameHeader* ours = At(position);
  const uint64_t offset = (position & (capacity_ - 1)) + sizeof(FrameHeader);
  std::memcpy(memory_ + offset, theirs_ + offset, RingBytes(*ours, ours->flags) - sizeof(FrameHeader));
}

// Copies the payload of an EXTERNAL frame, because the block stays the writer's. False if it is not in the file.
bool Ring::CopyBlock(uint64_t position, OutstandingBlock* block) {
  const FrameHeader* header = At(position);
  BlockDescriptor descriptor;
  std::memcpy(&descriptor, reinterpret_cast<const uint8_t*>(header + 1) + AlignUp(header->meta_bytes, kFrameAlign),
              sizeof(descriptor));
  const uint64_t start = descriptor.file_offset;
  if (start == 0 || descriptor.nbytes != header->payload_bytes || start > attached_bytes_ ||
      attached_bytes_ - start < kArenaPayload || attached_bytes_ - start - kArenaPayload < descriptor.nbytes) {
    return false;
  }
  ArenaRecord record;
  std::memcpy(&record, base_ + start, sizeof(record));
  if (std::memcmp(record.magic, kArenaMagic, sizeof(kArenaMagic)) != 0 || record.position != position ||
      record.nbytes != descriptor.nbytes) {
    return false;
  }
  block->memory = blocks_.Allocate(descriptor.nbytes);
  if (block->memory == nullptr) return false;
  block->position = position;
  block->nbytes = descriptor.nbytes;
  std::memcpy(block->memory, base_ + start + kArenaPayload, descriptor.nbytes);
  return true;
}

void Ring::MarkWriterDead() {
  std::lock_guard<std::mutex> reader(sleep_mutex_);
  const uint64_t head = TheirHead();
  for (uint64_t at = cursor_; at != head && Check(at, head) == HCB_INTACT;) {
    const FrameHeader* header = At(at);
    const uint32_t flags = LoadFlags(header);
    FrameHeader* theirs = reinterpret_cast<FrameHeader*>(theirs_ + (at & (capacity_ - 1)));
    if (flags & kBusy) __atomic_store_n(&theirs->flags, (flags & ~kBusy) | kDiscarded, __ATOMIC_SEQ_CST);
    at += RingBytes(*header, flags);
  }
}

}  // namespace hcb

// The reader's side of a ring: waiting, walking over committed frames, taking blocks, releasing, and skipping damage.
#ifdef __linux__
#include <sys/prctl.h>
#endif

#include <algorithm>
#include <cstring>

#include "os/futex.h"
#include "ring/ring.h"

namespace hcb {
namespace {

using Clock = std::chrono::steady_clock;

// Beyond a year a timeout is practically infinite, and adding it to the clock could overflow.
constexpr int64_t kForever = 365ll * 24 * 3600 * 1'000'000'000;

// A frame that comes after a pause is read at once. Then, while more frames are expected, the reader only looks at
// growing intervals: waking it costs the producer a system call, each wake-up costs a processor about 20 us, and
// each batch needs the interpreter lock, which the dispatching thread needs too. But it does not rest while
// kRestBytes or more are queued.
constexpr auto kStream = std::chrono::milliseconds(10);
constexpr auto kFirstRest = std::chrono::microseconds(500);
constexpr auto kMaxRest = std::chrono::milliseconds(4);
constexpr uint64_t kRestBytes = 192 << 10;

// Longest interval at which the reader queries a GPU's copy. The interval grows while the copy takes.
constexpr auto kMaxPoll = std::chrono::microseconds(500);

// Makes the calling thread's sleeps end on time; the kernel adds 50 us by default.
void SleepPrecisely() {
#ifdef __linux__
  static thread_local const int done = prctl(PR_SET_TIMERSLACK, 5000UL, 0UL, 0UL, 0UL);
  (void)done;
#endif
}

Clock::time_point Deadline(int64_t timeout_ns) {
  if (timeout_ns < 0 || timeout_ns > kForever) return Clock::time_point::max();
  return Clock::now() + std::chrono::nanoseconds(timeout_ns);
}

uint32_t LoadFlags(const FrameHeader* header) { return __atomic_load_n(&header->flags, __ATOMIC_SEQ_CST); }

bool Folds(const FrameHeader& header) { return (LoadFlags(&header) & (kFolds | kExternal)) == kFolds; }

uint64_t RingBytes(const FrameHeader& header, uint32_t flags) {
  return FrameBytes(header.meta_bytes, (flags & kExternal) ? sizeof(BlockDescriptor) : header.payload_bytes);
}

}  // namespace

// HCB_INTACT if an intact header, BUSY or not, lies at `position`, otherwise its damage.
hcb_damage Ring::Check(uint64_t position, uint64_t head) const {
  const FrameHeader& header = *At(position);
  const uint32_t flags = LoadFlags(&header);
  if (std::memcmp(header.magic, kMagic, sizeof(kMagic)) != 0) return HCB_DAMAGED_MAGIC;
  if (header.version != kVersion) return HCB_DAMAGED_VERSION;
  if ((flags & ~kKnownFlags) != 0) return HCB_DAMAGED_FLAGS;
  if (header.position != position) return HCB_DAMAGED_POSITION;
  const uint64_t limit = std::min(head - position, capacity_ - (position & (capacity_ - 1)));
  // The parts first, so that their sum cannot overflow.
  if (header.meta_bytes > limit) return HCB_DAMAGED_LENGTH;
  if (!(flags & kExternal) && header.payload_bytes > limit) return HCB_DAMAGED_LENGTH;
  if (RingBytes(header, flags) > limit) return HCB_DAMAGED_LENGTH;
  return HCB_INTACT;
}

bool Ring::Readable() const {
  const uint64_t head = SettledHead();
  if (cursor_ == head) return false;
  return Check(cursor_, head) != HCB_INTACT || !(LoadFlags(At(cursor_)) & kBusy);
}

bool Ring::CallInFront() const {
  const uint64_t head = control_->head.load(std::memory_order_acquire);
  if (cursor_ == head || Check(cursor_, head) != HCB_INTACT) return false;
  return (LoadFlags(At(cursor_)) & (kCall | kBusy | kDiscarded)) == kCall;
}

// The owner of the call in front, which must take it; null if any thread may.
const void* Ring::OwnerInFront() const { return OwnerOfCall(device_, At(cursor_)->seq); }

uint64_t Ring::QueuedBytes() {
  std::lock_guard<std::mutex> lock(mutex_);
  return control_->head.load(std::memory_order_relaxed) - cursor_ + outstanding_bytes_;
}

// Gives the reader the turn if the frame in front is for it. A call is for a thread that waits in ReadCall, if there
// is one; but the thread that emitted it takes precedence if it is about to look.
bool Ring::TakeTurnLocked() {
  if (turn_taken_ || !Readable()) return false;
  if (CallInFront()) {
    if (OwnerInFront() != nullptr) {
      own_turn_.notify_all();
      return false;
    }
    if (expected_ == cursor_ && Clock::now() < expected_until_) return false;
    if (callers_ != 0) {
      call_arrived_.notify_one();
      return false;
    }
  }
  turn_taken_ = reader_turn_ = true;
  walking_.store(true, std::memory_order_relaxed);
  holding_.store(true, std::memory_order_release);
  return true;
}

// False while a call is on its way or being read: the thread that has the turn has the cursor too.
bool Ring::MayRestLocked() const { return !turn_taken_ && cursor_ >= urgent_end_; }

void Ring::LengthenRest() {
  rest_ = rest_ == Clock::duration::zero() ? kFirstRest : std::min<Clock::duration>(2 * rest_, kMaxRest);
}

// Sleeps until `end`, unless an urgent frame, a thread that waits for delivery or room, or many bytes come before.
void Ring::Rest(std::unique_lock<std::mutex>* lock, Clock::time_point end) {
  SleepPrecisely();
  const uint64_t many = std::min(kRestBytes, capacity_ / 4);
  while (!wake_requested_ && MayRestLocked() && Clock::now() < end) {
    // As in WaitTurn: frames reserved before this store are counted below, frames reserved after it wake the reader.
    const uint32_t word = control_->wake_word.load(std::memory_order_seq_cst);
    control_->wake_from.store(cursor_ + many, std::memory_order_seq_cst);
    const bool somebody_waits = waiting_.load(std::memory_order_seq_cst) != 0;
    if (somebody_waits && CopyPending()) break;  // a device still copies: only queries show when it has finished
    if (somebody_waits || QueuedBytes() >= many) {
      // If the frame in front is still being written, wait for its commit.
      control_->wake_from.store(kAsleep, std::memory_order_seq_cst);
      { std::lock_guard<std::mutex> reserve(mutex_); }
      if (Readable()) break;
    }
    Sleep(lock, end, word);
  }
  control_->wake_from.store(kAwake, std::memory_order_relaxed);
}

// Sleeps until that time or until woken. In a process other than the writer's, only if control_->wake_word is still
// `word`.
void Ring::Sleep(std::unique_lock<std::mutex>* lock, Clock::time_point until, uint32_t word) {
  if (attached_bytes_ != 0) {
    lock->unlock();
    FutexWait(&control_->wake_word, word, until);
    lock->lock();
  } else if (until == Clock::time_point::max()) {
    sleep_.wait(*lock);
  } else {
    sleep_.wait_until(*lock, until);
  }
}

bool Ring::WaitTurn(Clock::time_point deadline) {
  std::unique_lock<std::mutex> lock(sleep_mutex_);
  reader_ = std::this_thread::get_id();
  for (auto now = Clock::now(); now < stream_end_ && MayRestLocked(); now = Clock::now()) {
    Rest(&lock, std::min(deadline, now + rest_));
    if (CopyPending()) {
      lock.unlock();
      SettleCopies();
      lock.lock();
    }
    if (TakeTurnLocked()) return true;
    if (wake_requested_ || Clock::now() >= deadline) break;
    if (CopyPending() && waiting_.load(std::memory_order_seq_cst) != 0) break;
    LengthenRest();
  }
  if (TakeTurnLocked()) return true;
  for (;;) {
    if (CopyPending()) {
      lock.unlock();
      SettleCopies();
      lock.lock();
    }
    const uint32_t word = control_->wake_word.load(std::memory_order_seq_cst);
    control_->wake_from.store(kAsleep, std::memory_order_seq_cst);
    std::atomic_thread_fence(std::memory_order_seq_cst);  // for a producer in another process, which has another mutex
    // A producer that reserves after this critical section sees the reader asleep when it commits; the head of one
    // that reserved before is visible below.
    { std::lock_guard<std::mutex> reserve(mutex_); }
    const bool turn = TakeTurnLocked();
    const bool late = deadline != Clock::time_point::max() && Clock::now() >= deadline;
    if (turn || wake_requested_ || late) {
      control_->wake_from.store(kAwake, std::memory_order_relaxed);
      if (!turn) wake_requested_ = false;
      return turn;
    }
    const bool expecting = !turn_taken_ && CallInFront() && expected_ == cursor_;
    auto until = expecting ? std::min(deadline, expected_until_) : deadline;
    if (CopyPending()) {
      SleepPrecisely();
      until = std::min(until, Clock::now() + poll_);
      poll_ = std::min<Clock::duration>(2 * poll_, kMaxPoll);
    } else {
      poll_ = kFirstPoll;
    }
    Sleep(&lock, until, word);
  }
}

uint32_t Ring::Read(int64_t timeout_ns, hcb_batch* batch) {
  const Clock::time_point deadline = Deadline(timeout_ns);
  batch->frames = batch->blocks_count = batch->damage = batch->folded_total = 0;
  if (reader_turn_) control_->delivered.store(delivered_end_, std::memory_order_relaxed);  // the last batch has been delivered
  EndReaderTurn();
  if (ReportLost(batch)) return 0;
  if (waiting_.load(std::memory_order_seq_cst) != 0) AdmitWaiters();
  while (batch->frames == 0 && batch->damage == 0) {
    if (!WaitTurn(deadline)) return 0;
    Walk(batch);
    walking_.store(false, std::memory_order_release);
    if (batch->frames != 0 || batch->damage != 0) break;
    EndReaderTurn();
    if (discarded() != 0 && !CopyPending()) return 0;  // a thread may wait for a frame that turned out not to be a message
  }
  if (batch->frames != 0) {
    const auto now = Clock::now();
    if (now >= stream_end_) rest_ = Clock::duration::zero();
    stream_end_ = now + kStream;
    LengthenRest();
  }
  // Taking blocks has freed budget.
  if (batch->blocks_count != 0 && waiting_.load(std::memory_order_seq_cst) != 0) AdmitWaiters();
  return static_cast<uint32_t>(batch->frames);
}

uint32_t Ring::ReadCall(int64_t timeout_ns, hcb_call_frame* frame) {
  const Clock::time_point deadline = Deadline(timeout_ns);
  {
    std::unique_lock<std::mutex> lock(sleep_mutex_);
    while (turn_taken_ || !CallInFront() || OwnerInFront() != nullptr) {
      if (Clock::now() >= deadline) return 0;
      ++callers_;
      call_arrived_.wait_until(lock, deadline);
      --callers_;
    }
    turn_taken_ = true;
    holding_.store(true, std::memory_order_release);
  }
  if (TakeCall(frame)) return 1;
  EndReadCall();
  return 0;
}

int32_t Ring::ReadOwnCall(const void* owner, int64_t timeout_ns, hcb_call_frame* frame) {
  const Clock::time_point deadline = Deadline(timeout_ns);
  {
    std::unique_lock<std::mutex> lock(sleep_mutex_);
    if (reader_ == std::this_thread::get_id()) return HCB_OWN_CALL_WAITS_FOR_ITSELF;
    while (turn_taken_ || !CallInFront() || OwnerInFront() != owner) {
      if (Clock::now() >= deadline) return HCB_OWN_CALL_LATER;
      own_turn_.wait_until(lock, deadline);
    }
    turn_taken_ = true;
    turn_owner_ = owner;
    holding_.store(true, std::memory_order_release);
  }
  if (TakeCall(frame)) return HCB_OWN_CALL_TAKEN;
  EndReadCall();
  return HCB_OWN_CALL_LATER;
}

void Ring::LeaveOwnTurn(const void* owner) {
  {
    std::lock_guard<std::mutex> lock(sleep_mutex_);
    if (turn_owner_ != owner) return;
  }
  if (released_here_.load(std::memory_order_relaxed) != cursor_ && Release(cursor_, 1)) AdmitWaiters();
  EndReadCall();
}

// Discards the frame of a call. Not possible while the reader looks at frames, nor while the frame is being written,
// because that reads the program's memory.
std::unique_ptr<PendingCall> Ring::WithdrawOwnCall(const void* owner) {
  std::lock_guard<std::mutex> reader(sleep_mutex_);
  uint64_t position;
  if (walking_.load(std::memory_order_acquire) || !FindOwnCall(device_, owner, &position)) return nullptr;
  if (position >= released_here_.load(std::memory_order_acquire)) {  // otherwise it has been read
    const uint32_t flags = LoadFlags(At(position));
    if (flags & kBusy) return nullptr;
    std::lock_guard<std::mutex> lock(mutex_);
    if (flags & kExternal) DropBlockLocked(position);
    --emitted_;
    ++dropped_;
    __atomic_store_n(&At(position)->flags, flags | kDiscarded, __ATOMIC_SEQ_CST);
  }
  std::unique_ptr<PendingCall> call = TakeOwnCall(device_, owner);
  WakeReaderLocked();
  return call;
}

void Ring::DropBlockLocked(uint64_t position) {
  const auto block = std::find_if(outstanding_.begin(), outstanding_.end(),
                                  [position](const OutstandingBlock& b) { return b.position == position; });
  if (block == outstanding_.end()) return;
  BlockPool::Free(block->memory);
  outstanding_bytes_ -= block->nbytes;
  outstanding_.erase(block);
}

// Takes the call in front. False if it is damaged, which the reader reports.
bool Ring::TakeCall(hcb_call_frame* frame) {
  FrameHeader& header = *At(cursor_);
  const uint32_t flags = LoadFlags(&header);
  OutstandingBlock block = {};
  if ((flags & kExternal) && !TakeBlock(cursor_, &block)) return false;
  Renumber(&header);
  frame->offset = cursor_ & (capacity_ - 1);
  frame->memory = block.memory;
  frame->nbytes = block.nbytes;
  cursor_ += RingBytes(header, flags);
  frame->end = cursor_;
  ++cursor_frames_;
  // Taking a block has freed budget.
  if (block.memory != nullptr && waiting_.load(std::memory_order_seq_cst) != 0) AdmitWaiters();
  return true;
}

void Ring::EndReaderTurn() {
  if (!reader_turn_) return;
  reader_turn_ = false;
  std::lock_guard<std::mutex> lock(sleep_mutex_);
  turn_taken_ = false;
  holding_.store(false, std::memory_order_release);
}

void Ring::EndReadCall() {
  std::lock_guard<std::mutex> lock(sleep_mutex_);
  turn_taken_ = false;
  turn_owner_ = nullptr;
  holding_.store(false, std::memory_order_release);
  if (!Readable()) return;
  if (CallInFront() && OwnerInFront() != nullptr) {
    own_turn_.notify_all();
  } else if (CallInFront() && callers_ != 0) {
    call_arrived_.notify_one();
  } else {
    sleep_.notify_one();
  }
}

// A call is always the first frame of its batch, so that it can be left to another thread, as it must be if its own
// thread takes it. The end of a stream is alone in its batch, so that a batch is accounted for as a whole.
void Ring::Walk(hcb_batch* batch) {
  const uint64_t head = SettledHead();
  const uint64_t start = cursor_;
  uint64_t bytes = 0;
  while (cursor_ != head && batch->frames < HCB_BATCH_FRAMES && batch->blocks_count < HCB_BATCH_BLOCKS &&
         bytes < HCB_BATCH_BYTES) {
    hcb_damage damage = Check(cursor_, head);
    const FrameHeader& header = *At(cursor_);
    const uint32_t flags = LoadFlags(&header);
    if (damage == HCB_INTACT) {
      if ((flags & kBusy) || ((flags & (kCall | kEndOfStream)) && batch->frames != 0)) break;
      if ((flags & (kCall | kDiscarded)) == kCall && OwnerOfCall(device_, header.seq) != nullptr) break;
      const bool message = !(flags & (kPad | kDiscarded));
      OutstandingBlock block = {};
      if (message && (flags & kExternal) && !TakeBlock(cursor_, &block)) damage = HCB_DAMAGED_BLOCK;
      if (damage == HCB_INTACT) {
        const uint64_t nbytes = RingBytes(header, flags);
        if (message) {
          if (block.memory != nullptr) batch->blocks[batch->blocks_count++] = {batch->frames, block.memory, block.nbytes};
          Renumber(At(cursor_));
          Enter(batch);
          bytes += FrameBytes(header.meta_bytes, header.payload_bytes);
          ++cursor_frames_;
        }
        if ((flags & kDiscarded) && header.seq == kNoSeq) given_back_.fetch_add(1, std::memory_order_release);
        cursor_ += nbytes;
        // Skipped frames are released together with the frame before them.
        if (batch->frames != 0) batch->ends[batch->frames - 1] = cursor_;
        if (message && (flags & kEndOfStream)) break;
        continue;
      }
    }
    // Frames before the damage are delivered first; the next read finds the damage again.
    if (batch->frames == 0) SkipDamage(head, damage, batch);
    break;
  }
  delivered_end_ = cursor_;
  if (batch->frames == 0) ReleaseSkipped(start);  // after that other threads may move the cursor
}

// Lists the message at the cursor. Of a check that fails repeatedly, only the first and the last failure are listed,
// so that counting the others costs the reader nothing.
void Ring::Enter(hcb_batch* batch) {
  const uint64_t offset = cursor_ & (capacity_ - 1);
  if (batch->frames >= 2 && Folds(*HeaderAt(offset))) {
    const uint64_t last = batch->frames - 1;
    const FrameHeader& one = *HeaderAt(batch->offsets[last - 1]);
    const FrameHeader& two = *HeaderAt(batch->offsets[last]);
    const uint64_t consumer_id = HeaderAt(offset)->consumer_id;
    if (Folds(one) && Folds(two) && one.consumer_id == consumer_id && two.consumer_id == consumer_id) {
      batch->offsets[last] = offset;
      ++batch->folded[last];
      ++batch->folded_total;
      return;
    }
  }
  batch->folded[batch->frames] = 0;
  batch->offsets[batch->frames++] = offset;
}

// Moves the block of the frame at `position` from the ring to `block`. False if the frame's descriptor is not that of a block of
// this ring, which only damage can bring about.
bool Ring::TakeBlock(uint64_t position, OutstandingBlock* block) {
  if (attached_bytes_ != 0) return CopyBlock(position, block);
  const FrameHeader* header = At(position);
  BlockDescriptor descriptor;
  std::memcpy(&descriptor, reinterpret_cast<const uint8_t*>(header + 1) + AlignUp(header->meta_bytes, kFrameAlign),
              sizeof(descriptor));
  std::lock_guard<std::mutex> lock(mutex_);
  if (outstanding_.empty()) return false;
  *block = outstanding_.front();  // blocks are taken in the order of their frames
  if (block->position != position || block->nbytes != header->payload_bytes || block->nbytes != descriptor.nbytes ||
      reinterpret_cast<uint64_t>(block->memory) != descriptor.address) {
    return false;
  }
  outstanding_.pop_front();
  outstanding_bytes_ -= block->nbytes;
  return true;
}

// Copies the payload of an EXTERNAL frame that no reader has taken. False if its block is not there. With `sleep_mutex_` and not while
// the reader walks, because a reader could take the block meanwhile.
bool Ring::CopyPayload(uint64_t position, uint8_t* out) {
  const uint64_t nbytes = At(position)->payload_bytes;
  OutstandingBlock found = {};
  if (attached_bytes_ != 0) {
    if (!CopyBlock(position, &found)) return false;
    std::memcpy(out, found.memory, nbytes);
    BlockPool::Free(found.memory);
    return true;
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto block = std::find_if(outstanding_.begin(), outstanding_.end(),
                                    [position](const OutstandingBlock& b) { return b.position == position; });
    if (block == outstanding_.end() || block->memory == nullptr || block->nbytes != nbytes) return false;
    found = *block;
  }
  std::memcpy(out, found.memory, nbytes);  // without the lock that producers need
  return true;
}

uint32_t Ring::CopyAhead(uint64_t* position, uint8_t* out, uint64_t capacity, uint64_t* offsets, uint32_t most,
                         uint64_t* needed) {
  *needed = 0;
  if (gpu() != nullptr) return 0;  // numbers of its frames are final only when the reader has come to them
  std::lock_guard<std::mutex> reader(sleep_mutex_);
  if (walking_.load(std::memory_order_acquire)) return 0;
  const uint64_t head = SettledHead();
  uint64_t at = std::max(*position, cursor_);
  uint64_t used = 0;
  uint32_t frames = 0;
  while (at != head && frames < most && Check(at, head) == HCB_INTACT) {
    const FrameHeader& header = *At(at);
    const uint32_t flags = LoadFlags(&header);
    if (flags & (kBusy | kEndOfStream)) break;
    if (!(flags & (kPad | kDiscarded))) {
      const uint64_t start = sizeof(FrameHeader) + AlignUp(header.meta_bytes, kFrameAlign);
      const uint64_t nbytes = FrameBytes(header.meta_bytes, header.payload_bytes);
      if (nbytes > capacity - used) {
        if (frames == 0) *needed = nbytes;
        break;
      }
      uint8_t* const copy = out + used;
      if (flags & kExternal) {
        std::memcpy(copy, &header, start);
        const uint32_t inline_flags = flags & ~kExternal;
        std::memcpy(copy + offsetof(FrameHeader, flags), &inline_flags, sizeof(inline_flags));
        if (!CopyPayload(at, copy + start)) break;
        std::memset(copy + start + header.payload_bytes, 0, nbytes - start - header.payload_bytes);
      } else {
        std::memcpy(copy, &header, nbytes);
      }
      offsets[frames++] = used;
      used += nbytes;
    }
    at += RingBytes(header, flags);
  }
  *position = at;
  return frames;
}

// How many messages lie between the intact header at `from` and the head. `intact`: whether the frames follow one another
// without damage all the way, which makes the number exact.
uint64_t Ring::CountMessagesLocked(uint64_t from, bool* intact) const {
  const uint64_t head = control_->head.load(std::memory_order_relaxed);
  uint64_t messages = 0;
  while (from != head && Check(from, head) == HCB_INTACT) {
    const uint32_t flags = LoadFlags(At(from));
    if (!(flags & (kPad | kDiscarded))) ++messages;
    from += RingBytes(*At(from), flags);
  }
  *intact = from == head;
  return messages;
}

// Moves the cursor to the next intact header, or to the head if there is none, and reports what lies between.
void Ring::SkipDamage(uint64_t head, hcb_damage damage, hcb_batch* batch) {
  const uint64_t start = cursor_;
  uint64_t next = start + kFrameAlign;
  // A header holds its own position, so that nothing else, old headers included, passes for one.
  while (next < head && Check(next, head) != HCB_INTACT) next += kFrameAlign;
  next = std::min(next, head);
  uint64_t lost = 0;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    bool exact;
    const uint64_t behind = CountMessagesLocked(next, &exact);
    // With more damage behind, the next skip settles the account.
    if (exact && attached_bytes_ == 0) lost = emitted_ - discarded_.load() - behind - cursor_frames_;
    while (!outstanding_.empty() && outstanding_.front().position < next) {
      BlockPool::Free(outstanding_.front().memory);  // an unfinished one is freed by its producer, who misses the entry
      outstanding_bytes_ -= outstanding_.front().nbytes;
      outstanding_.pop_front();
    }
  }
  FailCallsBetween(device_, start, next,
                   "hostcallback: the message of this call was damaged: some code in this process writes into memory that "
                   "it does not own; run it under AddressSanitizer");
  batch->damage = damage;
  batch->damage_start = start;
  batch->damage_end = next;
  batch->damage_messages = lost;
  cursor_ = next;
  cursor_frames_ += lost;
  CountReleased(lost);
}

// Gives back what was walked over without a frame to release it with.
void Ring::ReleaseSkipped(uint64_t from) {
  if (cursor_ != from && control_->released.load(std::memory_order_relaxed) == from && Release(cursor_, 0)) AdmitWaiters();
}

// First here, then where others look: see MoveInto. Only the reader does.
void Ring::CountReleased(uint64_t frames) {
  const uint64_t all = released_frames_here_.load(std::memory_order_relaxed) + frames;
  released_frames_here_.store(all, std::memory_order_seq_cst);
  control_->released_frames.store(all, std::memory_order_release);
}

bool Ring::Release(uint64_t position, uint64_t frames) {
  CountReleased(frames);
  const bool all = position == cursor_;
  released_here_.store(position, std::memory_order_seq_cst);  // first: see MoveInto
  control_->released.store(position, std::memory_order_seq_cst);
  if (all) holding_.store(false, std::memory_order_seq_cst);
  return waiting_.load(std::memory_order_seq_cst) != 0;
}

}  // namespace hcb

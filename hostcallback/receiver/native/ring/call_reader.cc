// Threads that take the frame of a call themselves: any thread that runs host functions, or the one that
// emitted it.
#include "ring/ring.h"

namespace hcb {

bool Ring::CallInFront() const {
  const uint64_t head = control_->head.load(std::memory_order_acquire);
  if (cursor_ == head || Check(cursor_, head) != HCB_INTACT) return false;
  return (LoadFlags(At(cursor_)) & (kCall | kBusy | kDiscarded)) == kCall;
}

// The owner of the call in front, which must take it; null if any thread may.
const void* Ring::OwnerInFront() const { return OwnerOfCall(device_, At(cursor_)->seq); }

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
    // Before the turn's thread reads without the lock: overwriting producers must leave the cursor to it.
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
    // The call would wait for the frames before it, which this thread is delivering: an error instead of a
    // deadlock.
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
    // The lock is given up before the release, which admits waiting emissions and may take long.
    if (turn_owner_ != owner) return;
  }
  if (released_here_.load(std::memory_order_relaxed) != cursor_ && Release(cursor_, 1)) AdmitWaiters();
  EndReadCall();
}

// Discards the frame of a call. Not possible while the reader looks at frames, nor while the frame is being
// written, because that reads the program's memory.
std::unique_ptr<PendingCall> Ring::WithdrawOwnCall(const void* owner) {
  std::lock_guard<std::mutex> reader(sleep_mutex_);
  uint64_t position;
  if (walking_.load(std::memory_order_acquire) || !FindOwnCall(device_, owner, &position)) return nullptr;
  if (position >= released_here_.load(std::memory_order_acquire)) {  // otherwise it has been read
    const uint32_t flags = LoadFlags(At(position));
    if (flags & kBusy) return nullptr;
    std::lock_guard<std::mutex> lock(mutex_);
    if (flags & kExternal) DropBlockLocked(FindBlockLocked(position));
    --emitted_;
    ++dropped_;
    __atomic_store_n(&At(position)->flags, flags | kDiscarded, __ATOMIC_SEQ_CST);
  }
  std::unique_ptr<PendingCall> call = TakeOwnCall(device_, owner);
  WakeReaderLocked();
  return call;
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

}  // namespace hcb

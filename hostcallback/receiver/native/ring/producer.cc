// The producers' side of a ring: reserving, copying, committing, and the policies for emissions without room.
#include <algorithm>
#include <cstring>
#include <thread>

#include "abi/exports.h"
#include "os/stall_events.h"
#include "ring/ring.h"

namespace hcb {
namespace {

uint64_t RingBytes(const Emission& emission, bool external) {
  return FrameBytes(emission.prefix_bytes - sizeof(FrameHeader),
                    external ? sizeof(BlockDescriptor) : emission.payload_bytes);
}

// A ring is larger than a core's own caches: a frame's first lines would be waited for.
void Prefetch(const void* frame, uint64_t frame_bytes) {
  constexpr uint64_t kLineBytes = 64, kMostBytes = 256;
  const char* bytes = static_cast<const char*>(frame);
  for (uint64_t line = 0; line < std::min(frame_bytes, kMostBytes); line += kLineBytes) {
    __builtin_prefetch(bytes + line, 1);
  }
}

}  // namespace

bool Ring::GoesOutside(const Emission& emission) const {
  return emission.payload_bytes > external_threshold_ || RingBytes(emission, false) > capacity_ / 4;
}

bool Ring::Fits(const Emission& emission) const {
  return RingBytes(emission, GoesOutside(emission)) <= capacity_ / 2;
}

__attribute__((hot)) Verdict Ring::Emit(const Emission& emission, CompletionFactory* completions) {
  if (!Fits(emission)) return Verdict::kTooLarge;
  NoteEmissionOfReader();
  std::unique_lock<std::mutex> lock(mutex_);
  if (config_.steps & HCB_LEAVE_OUT) return DropLocked();
  if ((config_.steps & HCB_SAMPLE_BEYOND_HALF) && !KeepSampleLocked()) return DropLocked();
  if (waiters_.empty()) {
    Reservation reservation;
    if (ReserveLocked(emission, &reservation)) {
      lock.unlock();
      return CopyAndCommit(emission, reservation);
    }
  }
  if ((config_.steps & HCB_OVERWRITE_OLDEST) && waiters_.empty()) {
    lock.unlock();  // lock order: the reader's lock comes before this one
    Reservation reservation;
    if (OverwriteFor(emission, &reservation)) return CopyAndCommit(emission, reservation);
    lock.lock();
  }
  if (config_.drop_after_ns < 0) return DropLocked();
  if (config_.drop_after_ns > 0) return WaitAsThread(&lock, emission, config_.drop_after_ns);
  lock.unlock();  // making a completion calls XLA
  std::unique_ptr<Completion> completion = completions != nullptr ? completions->Make() : nullptr;
  lock.lock();
  return completion ? Enqueue(&lock, emission, std::move(completion), nullptr)
                    : WaitAsThread(&lock, emission, -1);
}

Verdict Ring::Append(const Emission& emission, std::unique_ptr<PendingCall> call) {
  if (!Fits(emission)) return Verdict::kTooLarge;
  std::unique_lock<std::mutex> lock(mutex_);
  return Enqueue(&lock, emission, nullptr, std::move(call));
}

Verdict Ring::AppendOwned(const Emission& emission, std::unique_ptr<Completion> owner) {
  std::unique_lock<std::mutex> lock(mutex_);
  return Enqueue(&lock, emission, std::move(owner), nullptr);
}

bool Ring::KeepSampleLocked() {
  const uint64_t used =
      control_->head.load(std::memory_order_relaxed) - control_->released.load(std::memory_order_acquire);
  if (used <= capacity_ / 2 && outstanding_bytes_ <= config_.block_budget_bytes / 2) return true;
  return sample_tick_++ % config_.sample_every == 0;
}

Verdict Ring::DropLocked() {
  ++next_seq_;
  ++dropped_;
  return Verdict::kDropped;
}

// Makes room by dropping the oldest frames, if the reader holds none of them and no emission waits.
bool Ring::OverwriteFor(const Emission& emission, Reservation* reservation) {
  for (;; std::this_thread::yield()) {
    std::lock_guard<std::mutex> reader(sleep_mutex_);
    std::lock_guard<std::mutex> lock(mutex_);
    if (!MayOverwriteLocked() || !waiters_.empty()) return false;
    const Overwriting done = MakeRoomLocked(emission);
    if (done == Overwriting::kDone) return ReserveLocked(emission, reservation);
    if (done == Overwriting::kImpossible) return false;
  }
}

bool Ring::MayOverwriteLocked() const {
  return (config_.steps & HCB_OVERWRITE_OLDEST) && !holding_.load(std::memory_order_seq_cst);
}

Ring::Overwriting Ring::MakeRoomLocked(const Emission& emission) {
  Room room;
  while (!FindRoomLocked(emission, &room)) {
    const Overwriting done = OverwriteOldestLocked();
    if (done != Overwriting::kDone) return done;
  }
  return Overwriting::kDone;
}

// Drops the oldest frame. Impossible if a program waits for its reply, if it ends a stream, or if there is
// none.
Ring::Overwriting Ring::OverwriteOldestLocked() {
  const uint64_t head = SettledHead();
  const uint64_t position = control_->released.load(std::memory_order_relaxed) & ~(kFrameAlign - 1);
  if (position == head || Check(position, head) != HCB_INTACT) return Overwriting::kImpossible;
  const FrameHeader& header = *At(position);
  const uint32_t flags = LoadFlags(&header);
  if (flags & (kCall | kEndOfStream)) return Overwriting::kImpossible;
  if (flags & kBusy) return Overwriting::kBusy;
  if (!(flags & (kPad | kDiscarded))) {
    if (flags & kExternal) {
      if (outstanding_.empty() || outstanding_.front().position != position) return Overwriting::kImpossible;
      DropBlockLocked(outstanding_.begin());
    }
    ++dropped_;
    ++cursor_frames_;
    overwritten_.fetch_add(1, std::memory_order_release);
  } else if ((flags & kDiscarded) && header.seq == kNoSeq) {
    given_back_.fetch_add(1, std::memory_order_release);
  }
  cursor_ = position + RingBytes(header, flags);
  released_here_.store(cursor_, std::memory_order_seq_cst);
  control_->released.store(cursor_, std::memory_order_seq_cst);
  return Overwriting::kDone;
}

uint64_t Ring::PadBefore(uint64_t position, uint64_t frame_bytes) const {
  const uint64_t rest = capacity_ - (position & (capacity_ - 1));
  return rest < frame_bytes ? rest : 0;
}

__attribute__((hot)) bool Ring::FindRoomLocked(const Emission& emission, Room* room) const {
  room->external = GoesOutside(emission);
  if (room->external && outstanding_bytes_ != 0 &&
      (emission.payload_bytes > config_.block_budget_bytes ||
       outstanding_bytes_ > config_.block_budget_bytes - emission.payload_bytes)) {
    return false;
  }
  room->frame_bytes = RingBytes(emission, room->external);
  room->position = HeadLocked();
  room->pad = PadBefore(room->position, room->frame_bytes);
  // Sequentially consistent, like `waiting_`: either this load sees the room that the reader released, or the
  // reader sees the waiter that this emission becomes (see Release).
  const uint64_t used = room->position - control_->released.load(std::memory_order_seq_cst);
  return used + room->pad + room->frame_bytes <= capacity_;
}

__attribute__((hot)) bool Ring::ReserveLocked(const Emission& emission, Reservation* reservation) {
  Room room;
  if (!FindRoomLocked(emission, &room)) return false;
  const auto [external, frame_bytes, head, pad] = room;
  uint64_t position = head;
  if (pad != 0) {
    FrameHeader filler = {};
    std::memcpy(filler.magic, kMagic, sizeof(kMagic));
    filler.version = kVersion;
    filler.flags = kPad;
    filler.payload_bytes = pad - sizeof(FrameHeader);
    filler.position = position;
    *At(position) = filler;
    position += pad;
  }
  reservation->frame = At(position);
  reservation->position = position;
  reservation->external = external;
  reservation->committed_flags =
      WriteHeader(emission, next_seq_, position, (external ? kExternal : 0) | kBusy, reservation->frame) &
      ~kBusy;
  if (external) {
    outstanding_.push_back({position, emission.payload_bytes, nullptr});
    outstanding_bytes_ += emission.payload_bytes;
  }
  if (emission.from_device != nullptr)
    reservation->copy = BeginCopyLocked(*emission.from_device, *reservation);
  ++next_seq_;
  ++emitted_;
  emitted_bytes_ += frame_bytes + (external ? emission.payload_bytes : 0);
  control_->head.store(position + frame_bytes, std::memory_order_release);
  Prefetch(At(position + frame_bytes), frame_bytes);  // the next frame is often like this one
  return true;
}

__attribute__((hot)) void Ring::Commit(FrameHeader* frame, uint32_t flags) {
  // read first: a committed frame may be read and overwritten at once
  const uint64_t position = frame->position;
  // Sequentially consistent, like `wake_from`: either the reader sees the frame or this thread sees the
  // reader asleep.
  __atomic_exchange_n(&frame->flags, flags, __ATOMIC_SEQ_CST);
  if (flags & kCall) {
    AnnounceCall(position);
    return;
  }
  const uint64_t wake_from = control_->wake_from.load(std::memory_order_seq_cst);
  // Positions do not count payloads outside the ring.
  if (position >= wake_from || ((flags & kExternal) && wake_from != kAwake && HasManyBlocks())) WakeReader();
}

__attribute__((hot)) Verdict Ring::CopyAndCommit(const Emission& emission, const Reservation& reservation) {
  if (emission.from_device != nullptr) return CopyFromDevice(emission, reservation);
  uint8_t* after_header = reinterpret_cast<uint8_t*>(reservation.frame + 1);
  if (!reservation.external) {
    WriteInlineBody(emission, after_header);
    Commit(reservation.frame, reservation.committed_flags);
    return Verdict::kEmitted;
  }
  const uint64_t position = reservation.position;
  void* block = blocks_.Allocate(emission.payload_bytes);
  if (block != nullptr) WritePayload(emission, static_cast<uint8_t*>(block));
  const uint64_t file_offset =
      block != nullptr ? BlockPool::Mark(block, position, emission.payload_bytes) : 0;
  const BlockDescriptor descriptor = {
      reinterpret_cast<uint64_t>(block), emission.payload_bytes, file_offset, {}};
  std::memcpy(WriteMetadata(emission, after_header), &descriptor, sizeof(descriptor));
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto entry = FindBlockLocked(position);
    if (entry == outstanding_.end()) {  // the reader skipped this stretch of the ring as damaged
      BlockPool::Free(block);
      return Verdict::kDropped;
    }
    if (block == nullptr) {
      DropBlockLocked(entry);
      --emitted_;
      ++dropped_;
    } else {
      entry->memory = block;
    }
  }
  if (block == nullptr && (reservation.committed_flags & kCall)) {
    hcb_call_fail(device_, reservation.frame->seq,
                  "hostcallback: the system has no memory for the arrays of this call");
  }
  Commit(reservation.frame, reservation.committed_flags | (block == nullptr ? kDiscarded : 0));
  return block == nullptr ? Verdict::kDropped : Verdict::kEmitted;
}

// Reserves room for the waiter's frame, and enters its call before any thread can read the frame. False if
// there is no room.
bool Ring::AdmitLocked(Waiter* waiter) {
  if (!ReserveLocked(waiter->emission, &waiter->reservation)) return false;
  if (waiter->call) {
    EnterCall(device_, waiter->reservation.frame->seq, waiter->reservation.position, std::move(waiter->call));
  }
  return true;
}

// Queues the waiter, or admits it at once if room has appeared and it is the first.
void Ring::EnterQueueLocked(Waiter* waiter) {
  waiters_.push_back(waiter);
  waiting_.store(static_cast<uint32_t>(waiters_.size()), std::memory_order_seq_cst);
  if (waiters_.front() != waiter) return;
  // A second attempt, now that the reader can see the waiter.
  if (AdmitLocked(waiter)) {
    waiter->admitted = true;
    waiters_.pop_front();
    waiting_.store(0, std::memory_order_relaxed);
    return;
  }
  // Not WakeReader: it takes the reader's lock, which comes before `mutex_`. A reader that is about to wait
  // misses this notification, and then rests for a few milliseconds.
  if (control_->wake_from.load(std::memory_order_seq_cst) != kAwake) sleep_.notify_one();
  SignalSupervisor(HCB_EVENT_STALL, device_);
}

// A waiter is admitted when the reader releases memory. If the reader holds none now, it may have released it
// before this one waited.
bool Ring::MustAdmitLocked(const Waiter& waiter) const { return !waiter.admitted && MayOverwriteLocked(); }

Verdict Ring::Enqueue(std::unique_lock<std::mutex>* lock, const Emission& emission,
                      std::unique_ptr<Completion> completion, std::unique_ptr<PendingCall> call) {
  auto waiter = std::make_unique<Waiter>();
  waiter->prefix.assign(emission.prefix, emission.prefix + emission.prefix_bytes);
  waiter->arrays.assign(emission.arrays, emission.arrays + emission.array_count);
  waiter->emission = emission;
  waiter->emission.prefix = waiter->prefix.data();
  waiter->emission.arrays = waiter->arrays.data();
  waiter->completion = std::move(completion);
  waiter->call = std::move(call);
  EnterQueueLocked(waiter.get());
  if (!waiter->admitted) {
    const bool admit = MustAdmitLocked(*waiter);
    waiter.release();  // owned by the queue; AdmitWaiters deletes it
    lock->unlock();
    if (admit) AdmitWaiters();
    return Verdict::kPending;
  }
  lock->unlock();
  const Verdict verdict = CopyAndCommit(waiter->emission, waiter->reservation);
  if (!waiter->completion) return verdict;
  // on this thread: its producer is this very call, so the program cannot continue here
  waiter->completion->Complete();
  return Verdict::kPending;
}

Verdict Ring::WaitAsThread(std::unique_lock<std::mutex>* lock, const Emission& emission, int64_t timeout_ns) {
  std::condition_variable admitted;
  Waiter waiter;
  waiter.emission = emission;
  waiter.thread = &admitted;
  EnterQueueLocked(&waiter);
  // a resting reader would not be woken: it commits a GPU's frames itself
  if (emission.from_device != nullptr) {
    lock->unlock();
    WakeReader();
    lock->lock();
  }
  // Only until this waiter is admitted: others may wait for this thread to write and commit its frame.
  while (MustAdmitLocked(waiter)) {
    lock->unlock();
    const Overwriting done = AdmitFirst();
    if (done == Overwriting::kBusy) std::this_thread::yield();
    lock->lock();
    if (done == Overwriting::kImpossible) break;
  }
  const auto done = [&waiter] { return waiter.admitted; };
  if (timeout_ns < 0) {
    admitted.wait(*lock, done);
  } else if (!admitted.wait_for(*lock, std::chrono::nanoseconds(timeout_ns), done)) {
    waiters_.erase(std::find(waiters_.begin(), waiters_.end(), &waiter));
    waiting_.store(static_cast<uint32_t>(waiters_.size()), std::memory_order_seq_cst);
    const bool others = !waiters_.empty();
    const Verdict verdict = DropLocked();
    lock->unlock();
    if (others) AdmitWaiters();  // the next waiter's emission may be smaller
    return verdict;
  }
  lock->unlock();
  return CopyAndCommit(emission, waiter.reservation);
}

void Ring::AdmitWaiters() {
  for (;;) {
    const Overwriting done = AdmitFirst();
    if (done == Overwriting::kImpossible) return;
    if (done == Overwriting::kBusy) std::this_thread::yield();
  }
}

// Admits the first waiter, if there is room or room can be made. A waiting thread writes its frame itself.
Ring::Overwriting Ring::AdmitFirst() {
  Waiter* waiter;
  {
    std::unique_lock<std::mutex> reader(sleep_mutex_, std::defer_lock);
    if (overwrites_.load(std::memory_order_relaxed)) reader.lock();  // lock order: before `mutex_`
    std::lock_guard<std::mutex> lock(mutex_);
    if (waiters_.empty()) return Overwriting::kImpossible;
    waiter = waiters_.front();
    if (reader.owns_lock() && MayOverwriteLocked()) {
      const Overwriting done = MakeRoomLocked(waiter->emission);
      if (done != Overwriting::kDone) return done;
    }
    if (!AdmitLocked(waiter)) return Overwriting::kImpossible;
    waiters_.pop_front();
    waiting_.store(static_cast<uint32_t>(waiters_.size()), std::memory_order_relaxed);
    if (waiter->thread != nullptr) {
      waiter->admitted = true;
      waiter->thread->notify_one();  // under the lock: the waiter lives on that thread's stack
      return Overwriting::kDone;
    }
  }
  std::unique_ptr<Waiter> owned(waiter);
  CopyAndCommit(owned->emission, owned->reservation);
  if (owned->completion) CompleteElsewhere(std::move(owned->completion));
  return Overwriting::kDone;
}

}  // namespace hcb

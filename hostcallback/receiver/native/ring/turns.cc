// Whose turn it is to read a ring, and how the reader waits for its turn: resting in a stream of frames, or
// asleep.
#ifdef __linux__
#include <sys/prctl.h>
#endif

#include <algorithm>

#include "os/thread_sleep.h"
#include "ring/ring.h"

namespace hcb {
namespace {

// Beyond a year a timeout is practically infinite, and adding it to the clock could overflow.
constexpr int64_t kForever = 365ll * 24 * 3600 * 1'000'000'000;

// A frame that comes after a pause is read at once. Then, while more frames are expected, the reader only
// looks at growing intervals: waking it costs the producer a system call, each wake-up costs a processor
// about 20 us, and each batch needs the interpreter lock, which the dispatching thread needs too, and code
// that has left the processor's caches. But it does not rest while kRestBytes or more are queued, or
// kRestBlockBytes in payloads outside the ring. Frames are expected for kStream after a batch, or for kRests
// intervals.
constexpr auto kStream = std::chrono::milliseconds(10);
constexpr auto kFirstRest = std::chrono::microseconds(500);
constexpr auto kMaxRest = std::chrono::milliseconds(16);
constexpr int kRests = 2;
constexpr uint64_t kRestBytes = 192 << 10;
constexpr uint64_t kRestBlockBytes = 768 << 10;

// Longest interval at which the reader queries a GPU's copy. The interval grows while the copy takes.
constexpr auto kMaxPoll = std::chrono::microseconds(500);

// Makes the calling thread's sleeps end on time; the kernel adds 50 us by default.
void SleepPrecisely() {
#ifdef __linux__
  static thread_local const int done = prctl(PR_SET_TIMERSLACK, 5000UL, 0UL, 0UL, 0UL);
  (void)done;
#endif
}

thread_local Ring* reads __attribute__((tls_model("initial-exec"))) = nullptr;  // whose reader the thread is

}  // namespace

Ring::Clock::time_point Ring::Deadline(int64_t timeout_ns) {
  if (timeout_ns < 0 || timeout_ns > kForever) return Clock::time_point::max();
  return Clock::now() + std::chrono::nanoseconds(timeout_ns);
}

void Ring::NoteEmissionOfReader() {
  if (Ring* const own = reads) own->reader_emits_.store(true, std::memory_order_relaxed);
}

bool Ring::Readable() const {
  const uint64_t head = SettledHead();
  if (cursor_ == head) return false;
  return Check(cursor_, head) != HCB_INTACT || !(LoadFlags(At(cursor_)) & kBusy);
}

bool Ring::HasManyBlocks() {
  std::lock_guard<std::mutex> lock(mutex_);
  return outstanding_bytes_ != 0 &&
         outstanding_bytes_ >= std::min(kRestBlockBytes, config_.block_budget_bytes / 4);
}

// Gives the reader the turn if the frame in front is for it. A call is for a thread that waits in ReadCall,
// if there is one; but the thread that emitted it takes precedence if it is about to look.
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
  delivering_thread_.store(ThreadNumber(), std::memory_order_relaxed);
  walking_.store(true, std::memory_order_relaxed);
  holding_.store(true, std::memory_order_release);
  return true;
}

// False while a call is on its way or being read: the thread that has the turn has the cursor too.
bool Ring::MayRestLocked() const { return !turn_taken_ && cursor_ >= urgent_end_; }

void Ring::LengthenRest() {
  rest_ = rest_ == Clock::duration::zero() ? kFirstRest : std::min<Clock::duration>(2 * rest_, kMaxRest);
}

// After a batch: its stream may go on.
void Ring::ExpectMore() {
  const auto now = Clock::now();
  if (now >= stream_end_) rest_ = Clock::duration::zero();
  LengthenRest();
  stream_end_ = now + std::max<Clock::duration>(kStream, kRests * rest_);
}

// Sleeps until `end`, unless an urgent frame, a thread that waits for delivery or room, or many bytes come
// before.
void Ring::Rest(std::unique_lock<std::mutex>* lock, Clock::time_point end) {
  SleepPrecisely();
  const uint64_t many = std::min(kRestBytes, capacity_ / 4);
  while (!wake_requested_ && MayRestLocked() && Clock::now() < end) {
    // As in WaitTurn: frames reserved before this store are counted below, frames reserved after it wake the
    // reader.
    control_->wake_from.store(cursor_ + many, std::memory_order_seq_cst);
    const bool somebody_waits = waiting_.load(std::memory_order_seq_cst) != 0;
    // a device still copies: only queries show when it has finished
    if (somebody_waits && CopyPending()) break;
    // The blocks first: with `mutex_`, so that the head is that of the frames reserved before.
    if (somebody_waits || HasManyBlocks() ||
        control_->head.load(std::memory_order_relaxed) - cursor_ >= many) {
      // If the frame in front is still being written, wait for its commit.
      control_->wake_from.store(kAsleep, std::memory_order_seq_cst);
      {
        std::lock_guard<std::mutex> reserve(mutex_);
      }
      if (Readable()) break;
    }
    Sleep(lock, end);
  }
  control_->wake_from.store(kAwake, std::memory_order_relaxed);
}

// Sleeps until that time or until woken.
void Ring::Sleep(std::unique_lock<std::mutex>* lock, Clock::time_point until) {
  if (until == Clock::time_point::max()) {
    sleep_.wait(*lock);
  } else {
    sleep_.wait_until(*lock, until);
  }
}

bool Ring::IsDelivered(uint64_t position) {
  if (control_->delivered.load(std::memory_order_acquire) >= position) return true;
  std::lock_guard<std::mutex> lock(sleep_mutex_);
  return !turn_taken_ && cursor_ >= position;  // no thread holds frames
}

uint64_t Ring::BeingDelivered() {
  std::lock_guard<std::mutex> lock(sleep_mutex_);
  return turn_taken_ ? control_->delivered.load(std::memory_order_relaxed) : cursor_;
}

bool Ring::WaitTurn(Clock::time_point deadline) {
  std::unique_lock<std::mutex> lock(sleep_mutex_);
  reader_ = std::this_thread::get_id();
  reads = this;
  for (auto now = Clock::now(); now < stream_end_ && MayRestLocked(); now = Clock::now()) {
    Rest(&lock, std::min({deadline, stream_end_, now + rest_}));
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
    control_->wake_from.store(kAsleep, std::memory_order_seq_cst);
    // A producer that reserves after this critical section sees the reader asleep when it commits; the head
    // of one that reserved before is visible below.
    {
      std::lock_guard<std::mutex> reserve(mutex_);
    }
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
    Sleep(&lock, until);
  }
}

void Ring::EndReaderTurn() {
  if (!reader_turn_) return;
  reader_turn_ = false;
  delivering_thread_.store(0, std::memory_order_relaxed);
  std::lock_guard<std::mutex> lock(sleep_mutex_);
  turn_taken_ = false;
  holding_.store(false, std::memory_order_release);
}

}  // namespace hcb

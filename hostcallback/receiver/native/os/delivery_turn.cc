#include "os/delivery_turn.h"

#include <time.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <new>

#include "abi/exports.h"

namespace hcb {
namespace {

using Clock = std::chrono::steady_clock;

// A thread that has kept the turn for longer is taken to be blocked, as in a tap function that waits.
constexpr auto kMaxKept = std::chrono::milliseconds(3);

// The address of a thread's copy identifies the thread.
thread_local char this_thread;

struct Waiting {
  const void* thread;
  bool is_queued;
  std::condition_variable given;
};

class Turn {
 public:
  void Take() {
    std::unique_lock<std::mutex> lock(mutex_);
    if (holder_ == nullptr || holder_ == &this_thread) {
      Become(&this_thread);
      return;
    }
    Waiting me = {&this_thread, true, {}};
    waiting_.push_back(&me);
    while (holder_ != nullptr && holder_ != &this_thread) {
      if (!me.is_queued) {  // it got the turn, but was not woken in time
        waiting_.push_front(&me);
        me.is_queued = true;
      }
      const Clock::time_point end = since_ + kMaxKept;
      if (Clock::now() < end) {
        me.given.wait_until(lock, end);
      } else {
        PassToFirst();
      }
    }
    Become(&this_thread);
  }

  // To the thread that has waited longest. False if the calling thread does not have the turn, or not any
  // more.
  bool Give() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (holder_ != &this_thread) return false;
    if (waiting_.empty()) {
      holder_ = nullptr;
    } else {
      PassToFirst();
    }
    return true;
  }

  bool IsAwaited() {
    std::lock_guard<std::mutex> lock(mutex_);
    return holder_ == &this_thread && !waiting_.empty();
  }

 private:
  void PassToFirst() {
    Waiting* const next = waiting_.front();
    waiting_.pop_front();
    next->is_queued = false;
    Become(next->thread);
    next->given.notify_one();
  }

  void Become(const void* thread) {
    holder_ = thread;
    since_ = Clock::now();
  }

  std::mutex mutex_;  // protects everything below
  const void* holder_ = nullptr;
  Clock::time_point since_;
  std::deque<Waiting*> waiting_;  // in the order in which they came
};

// Never destroyed: receiver threads outlive main.
Turn* TheTurn() {
  static Turn* turn = new Turn;
  return turn;
}

}  // namespace

void TakeDeliveryTurn() { TheTurn()->Take(); }

void ResetDeliveryTurnAfterFork() { new (TheTurn()) Turn; }

}  // namespace hcb

void hcb_delivery_turn_give(void) { hcb::TheTurn()->Give(); }

int32_t hcb_delivery_turn_awaited(void) { return hcb::TheTurn()->IsAwaited(); }

int64_t hcb_delivery_pause(int64_t ns) {
  const bool takes_again = hcb::TheTurn()->Give();
  timespec time = {static_cast<time_t>(ns / 1'000'000'000), static_cast<long>(ns % 1'000'000'000)};
  if (ns != 0) nanosleep(&time, nullptr);
  if (takes_again) hcb::TheTurn()->Take();
  clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<int64_t>(time.tv_sec) * 1'000'000'000 + time.tv_nsec;
}

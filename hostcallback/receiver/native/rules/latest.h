// The latest message of a tap that its rate left out, on one device: the value to be sent if no newer one
// follows.
#ifndef HOSTCALLBACK_RULES_LATEST_H_
#define HOSTCALLBACK_RULES_LATEST_H_

#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <utility>

#include "wire/encode.h"

namespace hcb {

class Control;
class Ring;

// Payloads above this length are not kept: a program that computes little per step would spend its time on
// copies.
constexpr uint64_t kLatestBytes = 64 << 10;

// A copy of one message. Any thread. It lives as long as the process.
class LatestSlot {
 public:
  LatestSlot(Control* control, int32_t device, LatestSlot* next)
      : control(control), device(device), next(next) {}

  // Copies a message in place of the one before. Returns how many messages that leaves out: the one before,
  // or this one if it is too large or the system has no memory.
  uint64_t Keep(const Emission& emission, Ring* ring) {
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
  // Drops the message, because a newer one is sent. Returns the number of dropped messages.
  uint64_t Clear() {
    if (!full()) return 0;
    std::lock_guard<std::mutex> lock(mutex_);
    return full_.exchange(false, std::memory_order_seq_cst) ? 1 : 0;
  }
  // The ring of the message that was kept last; null if there was none.
  Ring* ring() {
    std::lock_guard<std::mutex> lock(mutex_);
    return ring_;
  }
  bool full() const { return full_.load(std::memory_order_seq_cst); }
  // Calls `send(emission, memory, ring)` with the message, if there is one. `memory` owns what the emission
  // points to. A newer message of the same device is not sent before that call returns.
  template <typename Send>
  bool TakeTo(Send send) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!full()) return false;
    ArrayRef payload = {bytes_.get() + emission_.prefix_bytes, emission_.payload_bytes, 0xff};
    emission_.arrays = &payload;
    send(emission_, std::move(bytes_), ring_);
    capacity_ = 0;
    full_.store(false, std::memory_order_seq_cst);
    return true;
  }
  // In a forked child: the message is the parent's, of which another thread may have held the mutex, in the
  // middle of a copy.
  void ResetAfterFork() {
    new (&mutex_) std::mutex;
    (void)bytes_.release();
    capacity_ = 0;
    full_.store(false, std::memory_order_relaxed);
    scheduled.store(false, std::memory_order_relaxed);
  }

  Control* const control;
  const int32_t device;
  LatestSlot* const next;              // in the list of all slots
  std::atomic<bool> scheduled{false};  // whether the timer will look at the slot
  int64_t due = 0;                     // of the timer: when it looks

 private:
  std::mutex mutex_;                  // protects everything below; `full_` is read without it
  std::unique_ptr<uint8_t[]> bytes_;  // prefix, payload
  uint64_t capacity_ = 0;
  Emission emission_ = {};
  Ring* ring_ = nullptr;
  std::atomic<bool> full_{false};
};

}  // namespace hcb

#endif  // HOSTCALLBACK_RULES_LATEST_H_

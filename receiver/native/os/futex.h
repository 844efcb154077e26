// Sleeping on a number that another process changes.
#ifndef HOSTCALLBACK_FUTEX_H_
#define HOSTCALLBACK_FUTEX_H_

#include <atomic>
#include <chrono>
#include <cstdint>

namespace hcb {

// Sleeps while `*word` is `value`, until somebody wakes it or the time comes; may return early. Without futexes (not Linux) it
// sleeps for a moment.
void FutexWait(std::atomic<uint32_t>* word, uint32_t value, std::chrono::steady_clock::time_point until);
// Changes the number and wakes who sleeps on it.
void FutexWake(std::atomic<uint32_t>* word);

}  // namespace hcb

#endif  // HOSTCALLBACK_FUTEX_H_

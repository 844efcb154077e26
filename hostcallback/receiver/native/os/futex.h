// Sleeping on a number in shared memory until another process changes it.
#ifndef HOSTCALLBACK_FUTEX_H_
#define HOSTCALLBACK_FUTEX_H_

#include <atomic>
#include <chrono>
#include <cstdint>

namespace hcb {

// Sleeps while `*word` is `value`, until FutexWake or the time `until`; may return early. Without futexes (not on
// Linux) it sleeps for a moment.
void FutexWait(std::atomic<uint32_t>* word, uint32_t value, std::chrono::steady_clock::time_point until);
// Changes the number and wakes the threads that sleep on it.
void FutexWake(std::atomic<uint32_t>* word);

}  // namespace hcb

#endif  // HOSTCALLBACK_FUTEX_H_

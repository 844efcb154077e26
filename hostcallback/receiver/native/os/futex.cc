#include "os/futex.h"

#include <algorithm>
#include <climits>
#include <thread>

#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#endif

namespace hcb {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kLongest = std::chrono::hours(1);  // keeps the time within a timespec's range

}  // namespace

#ifdef __linux__

void FutexWait(std::atomic<uint32_t>* word, uint32_t value, Clock::time_point until) {
  const auto now = Clock::now();
  if (until <= now) return;
  const auto left = until - now < kLongest ? until - now : Clock::duration(kLongest);
  const int64_t ns = std::chrono::duration_cast<std::chrono::nanoseconds>(left).count();
  timespec timeout = {static_cast<time_t>(ns / 1'000'000'000), static_cast<long>(ns % 1'000'000'000)};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAIT, value, &timeout, nullptr, 0);
}

void FutexWake(std::atomic<uint32_t>* word) {
  word->fetch_add(1, std::memory_order_seq_cst);
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

#else

void FutexWait(std::atomic<uint32_t>* word, uint32_t value, Clock::time_point until) {
  if (word->load() != value) return;
  std::this_thread::sleep_until(std::min(until, Clock::now() + std::chrono::milliseconds(2)));
}

void FutexWake(std::atomic<uint32_t>* word) { word->fetch_add(1); }

#endif

}  // namespace hcb

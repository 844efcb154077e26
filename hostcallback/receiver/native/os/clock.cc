#include "os/clock.h"

#include <sys/resource.h>
#include <time.h>

#include <atomic>

#include "abi/exports.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <x86intrin.h>
#endif

namespace {

int64_t ReadClock(clockid_t clock) {
  timespec now;
  clock_gettime(clock, &now);
  return static_cast<int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

#if defined(__x86_64__)

// A thread reads the system's clock once per millisecond, and counts the processor's ticks in between. It
// measures the length of a tick once, with the clock that no user sets, over at least kMeasureNs:
constexpr int64_t kMeasureNs = 20'000'000;
constexpr int64_t kMaxMeasureNs = 10'000'000'000;
constexpr int64_t kAnchorNs = 1'000'000;

// Nanoseconds per tick in units of 2^-32; 0 until measured, kNever if ticks cannot be trusted.
constexpr uint64_t kNever = ~0ull;
std::atomic<uint64_t> tick{0};

// A tick count and the time at which it was read.
struct Moment {
  uint64_t ticks = 0;
  int64_t ns = 0;
};

// Reads both within so few ticks that the thread was not interrupted between; gives up after a few attempts.
bool ReadBoth(clockid_t clock, Moment* out) {
  constexpr uint64_t kClose = 4'000;
  for (int attempt = 0; attempt < 4; ++attempt) {
    const uint64_t before = __rdtsc();
    out->ns = ReadClock(clock);
    out->ticks = __rdtsc();
    if (out->ticks - before < kClose) return true;
  }
  return false;
}

// The processor tells whether its counter has a constant rate that is equal on all cores.
bool TicksAreConstant() {
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid(0x80000007, &eax, &ebx, &ecx, &edx) != 0 && (edx & (1u << 8)) != 0;
}

void MeasureTick() {
  static thread_local Moment first;
  if (first.ticks == 0) {
    if (!TicksAreConstant()) {
      tick.store(kNever, std::memory_order_relaxed);
    } else if (!ReadBoth(CLOCK_MONOTONIC, &first)) {
      first = {};
    }
    return;
  }
  Moment now;
  if (!ReadBoth(CLOCK_MONOTONIC, &now) || now.ns - first.ns < kMeasureNs || now.ticks <= first.ticks) return;
  if (now.ns - first.ns > kMaxMeasureNs) {  // the machine may have been suspended or migrated
    first = now;
    return;
  }
  const double length = static_cast<double>(now.ns - first.ns) / static_cast<double>(now.ticks - first.ticks);
  tick.store(static_cast<uint64_t>(length * 4294967296.0), std::memory_order_relaxed);
}

#endif

}  // namespace

namespace hcb {

__attribute__((hot)) int64_t UnixNowNs() {
#if defined(__x86_64__)
  static thread_local Moment anchor __attribute__((tls_model("initial-exec")));
  const uint64_t length = tick.load(std::memory_order_relaxed);
  if (length != 0 && length != kNever) {
    const uint64_t ticks = __rdtsc() - anchor.ticks;
    // Fewer than 2^32 ticks, so that the product fits into 64 bits.
    const uint64_t ns = ticks < (1ull << 32) ? ticks * length >> 32 : kAnchorNs;
    if (ns < kAnchorNs) return anchor.ns + static_cast<int64_t>(ns);
    if (ReadBoth(CLOCK_REALTIME, &anchor)) return anchor.ns;
    anchor = {};
  } else if (length == 0) {
    MeasureTick();
  }
#endif
  return ReadClock(CLOCK_REALTIME);
}

}  // namespace hcb

int64_t hcb_waits(int64_t* cpu_ns) {
  *cpu_ns = ReadClock(CLOCK_THREAD_CPUTIME_ID);
#ifdef RUSAGE_THREAD
  rusage usage;
  if (getrusage(RUSAGE_THREAD, &usage) == 0) return usage.ru_nvcsw;
#endif
  return 0;
}

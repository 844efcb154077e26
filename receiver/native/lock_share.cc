#include "lock_share.h"

#include <sys/resource.h>
#include <time.h>

namespace hcb {

int64_t UsedWhileOthersWaited() {
#ifdef RUSAGE_THREAD
  static thread_local int64_t last_ns = 0;
  static thread_local int64_t last_waits = 0;
  rusage usage;
  if (getrusage(RUSAGE_THREAD, &usage) != 0) return 0;
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  const int64_t ns = static_cast<int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
  if (usage.ru_nvcsw == last_waits) return 0;
  const int64_t used = ns - last_ns;
  last_ns = ns;
  last_waits = usage.ru_nvcsw;
  return used;
#else
  return 0;  // macOS tells nothing about threads
#endif
}

}  // namespace hcb

#include "os/thread_sleep.h"

#ifdef __linux__
#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#endif

namespace hcb {

#ifdef __linux__

int32_t ThreadNumber() { return static_cast<int32_t>(syscall(SYS_gettid)); }

uint64_t SleepOfThread(int32_t thread) {
  char text[4096];
  std::snprintf(text, sizeof(text), "/proc/self/task/%d/status", thread);
  const int file = open(text, O_RDONLY | O_CLOEXEC);
  if (file < 0) return 0;
  const ssize_t bytes = read(file, text, sizeof(text) - 1);
  close(file);
  if (bytes <= 0) return 0;
  text[bytes] = 0;
  const char* const state = std::strstr(text, "\nState:\t");
  if (state == nullptr || (state[8] != 'S' && state[8] != 'D')) return 0;
  constexpr char kSwitches[] = "\nvoluntary_ctxt_switches:\t";
  const char* const switches = std::strstr(text, kSwitches);
  return switches != nullptr ? std::strtoull(switches + sizeof(kSwitches) - 1, nullptr, 10) : 0;
}

#else

int32_t ThreadNumber() { return 0; }

uint64_t SleepOfThread(int32_t) { return 0; }

#endif

}  // namespace hcb

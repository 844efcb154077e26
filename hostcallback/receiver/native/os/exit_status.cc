#include "os/exit_status.h"

#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>

namespace hcb {
namespace {

std::atomic<int32_t> wanted{0};

#ifdef __GLIBC__
// Python decides on the status after its own exit handlers, and C exit handlers cannot change it otherwise than by ending the
// process. So this runs late: it is registered when the library is loaded, and handlers run in the reverse order.
void Replace(int status, void*) {
  if (status != 0 || wanted.load() == 0) return;
  std::fflush(nullptr);
  _exit(wanted.load());
}

const int registered = on_exit(Replace, nullptr);
#endif

}  // namespace

void FailExit(int32_t status) { wanted.store(status); }

}  // namespace hcb

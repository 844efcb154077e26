// The exit status of a process whose taps failed without anyone having been told.
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>

#include "abi/exports.h"

namespace {

std::atomic<int32_t> wanted{0};

#ifdef __GLIBC__
// Python decides on the status after its own exit handlers, and C exit handlers cannot change it otherwise
// than by ending the process. So this runs late: it is registered when the library is loaded, and handlers
// run in the reverse order.
void Replace(int status, void*) {
  if (status != 0 || wanted.load() == 0) return;
  std::fflush(nullptr);
  _exit(wanted.load());
}

const int registered = on_exit(Replace, nullptr);
#endif

}  // namespace

// Where the C library has no on_exit it does nothing.
void hcb_fail_exit(int32_t status) { wanted.store(status); }

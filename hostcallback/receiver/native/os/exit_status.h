// The exit status of a process whose taps failed without anyone having been told.
#ifndef HOSTCALLBACK_OS_EXIT_STATUS_H_
#define HOSTCALLBACK_OS_EXIT_STATUS_H_

#include <cstdint>

namespace hcb {

// Makes a process that would exit with 0 exit with `status`. Any thread. Where the C library has no on_exit it does nothing.
void FailExit(int32_t status);

}  // namespace hcb

#endif  // HOSTCALLBACK_OS_EXIT_STATUS_H_

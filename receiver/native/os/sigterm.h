// What happens on SIGTERM before whoever else handles it: a byte in a pipe wakes a thread of the host.
#ifndef HOSTCALLBACK_TERMINATION_H_
#define HOSTCALLBACK_TERMINATION_H_

#include <cstdint>

namespace hcb {

// Puts our handler before the one there is, unless it is there. Returns whether that one is the default, which ends the
// process: it is not called then, and the host ends the process when it is through. One thread at a time.
bool WatchTermination(int32_t fd);
// The handler that was there before is there again, unless somebody has replaced ours.
void UnwatchTermination();

}  // namespace hcb

#endif  // HOSTCALLBACK_TERMINATION_H_

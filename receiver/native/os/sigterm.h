// A SIGTERM handler that runs before the other handlers: a byte in a pipe wakes a thread of the host.
#ifndef HOSTCALLBACK_TERMINATION_H_
#define HOSTCALLBACK_TERMINATION_H_

#include <cstdint>

namespace hcb {

// Installs the handler before the current one, unless it is the current one. Returns whether the previous action is
// the default, which ends the process: it is not taken, and the host ends the process when it has finished. One
// thread at a time.
bool WatchTermination(int32_t fd);
// Restores the previous handler, unless another library has replaced ours.
void UnwatchTermination();

}  // namespace hcb

#endif  // HOSTCALLBACK_TERMINATION_H_

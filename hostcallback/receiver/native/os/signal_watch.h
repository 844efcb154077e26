// Handlers of SIGTERM and SIGINT that run before the other handlers: a byte in a pipe wakes a thread of the host.
#ifndef HOSTCALLBACK_OS_SIGNAL_WATCH_H_
#define HOSTCALLBACK_OS_SIGNAL_WATCH_H_

#include <cstdint>

namespace hcb {

// Installs the handler before the current one, unless it is the current one. Returns whether the previous action of
// SIGTERM is the default, which ends the process: it is not taken, and the host ends the process when it has finished.
// One thread at a time.
bool WatchTermination(int32_t fd);
// Restores the previous handler, unless another library has replaced ours.
void UnwatchTermination();

// The same for SIGINT, but only before a handler: where the action is the default or to ignore it, it stays so, and the
// result is false.
bool WatchInterrupt(int32_t fd);
void UnwatchInterrupt();

}  // namespace hcb

#endif  // HOSTCALLBACK_OS_SIGNAL_WATCH_H_

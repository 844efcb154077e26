// The time of day for message stamps. Cheaper than the system call if the processor's tick counter can be
// trusted.
#ifndef HOSTCALLBACK_OS_CLOCK_H_
#define HOSTCALLBACK_OS_CLOCK_H_

#include <cstdint>

namespace hcb {

// Unix time in nanoseconds. Any thread. Within a microsecond of CLOCK_REALTIME.
int64_t UnixNowNs();

}  // namespace hcb

#endif  // HOSTCALLBACK_OS_CLOCK_H_

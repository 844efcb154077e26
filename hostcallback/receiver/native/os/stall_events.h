// Events for the host's supervisor thread: a producer waits, or an unknown device has created a ring.
#ifndef HOSTCALLBACK_OS_STALL_EVENTS_H_
#define HOSTCALLBACK_OS_STALL_EVENTS_H_

#include <cstdint>

#include "abi/types.h"

namespace hcb {

// Any thread. An event that has not been fetched is not queued a second time.
void SignalSupervisor(hcb_event_kind kind, int32_t device);

}  // namespace hcb

#endif  // HOSTCALLBACK_OS_STALL_EVENTS_H_

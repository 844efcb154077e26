// Tells the host's supervisor thread what it must act on: a producer that waits, a ring that nobody opened.
#ifndef HOSTCALLBACK_SUPERVISOR_H_
#define HOSTCALLBACK_SUPERVISOR_H_

#include <cstdint>

#include "abi/c_abi.h"

namespace hcb {

// Any thread. An event that has not been fetched yet is not queued twice.
void SignalSupervisor(hcb_event_kind kind, int32_t device);

bool WaitForEvent(int64_t timeout_ns, hcb_event* event);
void ResetSupervisorAfterFork();

}  // namespace hcb

#endif  // HOSTCALLBACK_SUPERVISOR_H_

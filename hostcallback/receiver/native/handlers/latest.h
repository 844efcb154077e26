// Sends the last message of a burst that a rate left out: when its time has come, at a barrier, and when the rules change.
#ifndef HOSTCALLBACK_HANDLERS_LATEST_H_
#define HOSTCALLBACK_HANDLERS_LATEST_H_

#include <cstdint>

#include "ring/ring.h"
#include "rules/rule.h"

namespace hcb {

// Keeps a message that came too soon. `own`: the ring of its device.
void KeepLatest(Control* control, const Emission& emission, Ring* own);

// Sends the messages that are kept now: all, or those of one consumer. Never waits. Returns their number.
uint64_t SendLatest(const Control* control = nullptr);
// Number of those that wait for room in their ring.
uint64_t WaitingLatest();

void ResetLatestAfterFork();

}  // namespace hcb

#endif  // HOSTCALLBACK_HANDLERS_LATEST_H_

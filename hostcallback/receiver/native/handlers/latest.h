// Sends the last message of a burst that a rate left out: when its time has come, at a barrier, and when the
// rules change.
#ifndef HOSTCALLBACK_HANDLERS_LATEST_H_
#define HOSTCALLBACK_HANDLERS_LATEST_H_

#include "ring/ring.h"
#include "rules/rule.h"

namespace hcb {

// Keeps a message that came too soon. `own`: the ring of its device.
void KeepLatest(Control* control, const Emission& emission, Ring* own);

}  // namespace hcb

#endif  // HOSTCALLBACK_HANDLERS_LATEST_H_

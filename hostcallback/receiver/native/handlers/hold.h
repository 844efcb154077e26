// Holds programs back: while the hold is on, programs that reach it wait, without blocking a thread of XLA.
//
// The host uses it to find out whether anything else runs on a device: see hostcallback/sync/fence.py.
#ifndef HOSTCALLBACK_HANDLERS_HOLD_H_
#define HOSTCALLBACK_HANDLERS_HOLD_H_

namespace hcb {

void BeginHold();

// Continues the waiting programs on the calling thread. Returns whether the hold was on.
bool EndHold();

// Forgets the waiting programs, which are the parent's.
void ResetHoldAfterFork();

}  // namespace hcb

#endif  // HOSTCALLBACK_HANDLERS_HOLD_H_

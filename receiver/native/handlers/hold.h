// Holds programs back: while the hold is on, those that come to it wait, without a thread of XLA.
//
// The host uses it to find out that nothing else runs on a device: see hostcallback/sync/fence.py.
#ifndef HOSTCALLBACK_HOLD_H_
#define HOSTCALLBACK_HOLD_H_

namespace hcb {

void BeginHold();

// Lets the programs go on that wait, on the calling thread. Returns whether the hold was on.
bool EndHold();

// The programs that wait are the parent's.
void ResetHoldAfterFork();

}  // namespace hcb

#endif  // HOSTCALLBACK_HOLD_H_

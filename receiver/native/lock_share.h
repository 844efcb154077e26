// How much of a lock that threads hand to each other the calling thread had lately, and whether others wanted it.
#ifndef HOSTCALLBACK_LOCK_SHARE_H_
#define HOSTCALLBACK_LOCK_SHARE_H_

#include <cstdint>

namespace hcb {

// Nanoseconds of processor that the calling thread has used since the last call of this that told of a wait, if it had to wait for
// anything since; else 0. Preemption is no waiting.
int64_t UsedWhileOthersWaited();

}  // namespace hcb

#endif  // HOSTCALLBACK_LOCK_SHARE_H_

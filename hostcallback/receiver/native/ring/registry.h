// The rings of this process, by device ordinal.
#ifndef HOSTCALLBACK_RING_REGISTRY_H_
#define HOSTCALLBACK_RING_REGISTRY_H_

#include <chrono>
#include <cstdint>

#include "abi/types.h"
#include "ring/ring.h"

namespace hcb {

// The device's ring. For handlers: a ring that does not exist is created with the default configuration, and
// the supervisor told. Null if the system has no memory.
Ring* RingForEmission(int32_t device);

// The sum of the positions up to which the rings have been reserved. It grows with each emission. Lock-free.
uint64_t SumOfHeads();

// Waits until the rings' readers have delivered what has been emitted. Gives up on a ring whose reader has
// delivered nothing for `stall`, runs a program itself, or sleeps in a tap function: that may wait for this
// thread's program. Holds no lock.
void WaitUntilDelivered(std::chrono::nanoseconds stall);

}  // namespace hcb

#endif  // HOSTCALLBACK_RING_REGISTRY_H_

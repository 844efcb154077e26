// The rings of this process, by device ordinal.
#ifndef HOSTCALLBACK_RING_REGISTRY_H_
#define HOSTCALLBACK_RING_REGISTRY_H_

#include <chrono>
#include <cstdint>

#include "abi/types.h"
#include "ring/ring.h"

namespace hcb {

// The number of a GPU's ring. A GPU's ordinal counts the process's GPUs, and so may equal the id of a CPU device.
constexpr int32_t GpuRing(int32_t ordinal) { return -2 - ordinal; }

// Lock-free. Null if the device has no ring.
Ring* FindRing(int32_t device);

// The device's ring, created with `config` if it has none; `made` tells whether it was. Null if the system has no
// memory.
Ring* OpenRing(int32_t device, const hcb_config& config, bool* made);

// For handlers: like OpenRing with the default configuration, and signals the supervisor if the ring is new.
Ring* RingForEmission(int32_t device);

// The sum of the positions up to which the rings have been reserved. It grows with each emission. Lock-free.
uint64_t SumOfHeads();

// Waits until the rings' readers have delivered what has been emitted. Gives up on a ring whose reader has delivered nothing
// for `stall`, runs a program itself, or sleeps in a tap function: that may wait for this thread's program. Holds no lock.
void WaitUntilDelivered(std::chrono::nanoseconds stall);

void ResetRingsAfterFork();

}  // namespace hcb

#endif  // HOSTCALLBACK_RING_REGISTRY_H_

// Whether anything was emitted since the host last found that all was delivered. For threads that look often.
#ifndef HOSTCALLBACK_SETTLED_H_
#define HOSTCALLBACK_SETTLED_H_

#include <cstdint>

#include "abi/types.h"

namespace hcb {

// A number that changes with each emission of this process. Does not wait.
uint64_t Emissions();

// Notes that all is delivered that was emitted when Emissions() was `emissions`.
void Settle(uint64_t emissions);

bool IsSettled();

// Counts an emission that is in no ring.
void NoteEmission();

// See hcb_buffer_waits.
void WaitInBuffers(hcb_get_buffer original, hcb_wait wait);
// See hcb_waited.
void NoteWaited();
// Waits as GetBuffer does, if the calling thread is one of the host's: the program runs on the thread that dispatched it.
void WaitOnHostThread();
int GetBuffer(void* object, void* view, int flags);

}  // namespace hcb

#endif  // HOSTCALLBACK_SETTLED_H_

// Whether anything was emitted since the host last found that all was delivered. For threads that look often.
#ifndef HOSTCALLBACK_HANDLERS_SETTLED_H_
#define HOSTCALLBACK_HANDLERS_SETTLED_H_

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
// At the end of a program. On a thread of the host, which dispatched the program, it waits as GetBuffer does. A thread of the
// program waits too, without entering the host, if no other one does, and as long as a tap function takes at most a second.
void WaitAtEnd();
int GetBuffer(void* object, void* view, int flags);

}  // namespace hcb

#endif  // HOSTCALLBACK_HANDLERS_SETTLED_H_

// The host's threads: a program that runs on one of them can call the host at once, on the same thread.
//
// The host tells how to recognize these threads and how to enter the host; the library knows nothing else about the
// host.
#ifndef HOSTCALLBACK_HANDLERS_HOST_THREADS_H_
#define HOSTCALLBACK_HANDLERS_HOST_THREADS_H_

#include <memory>
#include <string>
#include <vector>

#include "abi/types.h"
#include "ring/call_table.h"
#include "wire/encode.h"
#include "ring/ring.h"

namespace hcb {

void SetHostThreads(const hcb_host_threads& threads);

// Whether the calling thread is one of the host's.
bool IsHostThread();

// Sets an interrupt again that the host was told of, for the host to handle when it can.
void InterruptHost();

// Whether the calling thread is a host thread, and the ring's host functions run on such threads.
bool MayCallHere(const Ring& ring);

// Emits a call and runs its host function on the calling thread, in the host's floating-point mode, once all earlier
// messages have been delivered. Returns whether the results are in place; if not, `error` has the reason.
bool CallHere(Ring* ring, const Emission& emission, std::vector<PendingCall::Result> results, std::string* error);

}  // namespace hcb

#endif  // HOSTCALLBACK_HANDLERS_HOST_THREADS_H_

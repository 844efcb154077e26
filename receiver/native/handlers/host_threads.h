// The host's threads: those on which a program can call the host at once, since the host runs there already.
//
// The host tells how to know them, and how to enter it; the library knows nothing more of it.
#ifndef HOSTCALLBACK_HOST_THREADS_H_
#define HOSTCALLBACK_HOST_THREADS_H_

#include <memory>
#include <string>
#include <vector>

#include "abi/c_abi.h"
#include "ring/call_table.h"
#include "wire/encode.h"
#include "ring/ring.h"

namespace hcb {

void SetHostThreads(const hcb_host_threads& threads);

// Whether the calling thread is one of them, and the ring's host function is to be run there.
bool MayCallHere(const Ring& ring);

// Emits a call and has the calling thread run its host function, in the floating-point mode of the host, when all before it has been
// delivered. Returns whether the results are in place; else `error` says why not.
bool CallHere(Ring* ring, const Emission& emission, std::vector<PendingCall::Result> results, std::string* error);

}  // namespace hcb

#endif  // HOSTCALLBACK_HOST_THREADS_H_

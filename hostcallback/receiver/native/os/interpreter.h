// The Python interpreter that loaded this library, if there is one. Its functions are found at run time, without
// linking to Python.
#ifndef HOSTCALLBACK_OS_INTERPRETER_H_
#define HOSTCALLBACK_OS_INTERPRETER_H_

#include <cstdint>

namespace hcb {

// See hcb_thread_states.
int64_t ThreadStates(uint64_t* ids, uint64_t capacity, uint64_t* made);

// Whether the interpreter ends, so that its other threads run no Python any more. Signal handlers may call it after the
// first call.
bool IsFinalizing();

// See hcb_hold_thread.
void HoldThread(int64_t nanoseconds);

}  // namespace hcb

#endif  // HOSTCALLBACK_OS_INTERPRETER_H_

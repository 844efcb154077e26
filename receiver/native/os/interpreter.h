// The Python interpreter that this library was loaded into, if there is one: found at run time, for the library knows no Python.
#ifndef HOSTCALLBACK_INTERPRETER_H_
#define HOSTCALLBACK_INTERPRETER_H_

#include <cstdint>

namespace hcb {

// See hcb_thread_states.
int64_t ThreadStates(uint64_t* ids, uint64_t capacity, uint64_t* made);

}  // namespace hcb

#endif  // HOSTCALLBACK_INTERPRETER_H_

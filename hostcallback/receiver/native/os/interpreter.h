// The Python interpreter that loaded this library, if there is one. Its functions are found at run time,
// without linking to Python.
#ifndef HOSTCALLBACK_OS_INTERPRETER_H_
#define HOSTCALLBACK_OS_INTERPRETER_H_

namespace hcb {

// Whether the interpreter ends, so that its other threads run no Python any more. Signal handlers may call it
// after the first call.
bool IsFinalizing();

}  // namespace hcb

#endif  // HOSTCALLBACK_OS_INTERPRETER_H_

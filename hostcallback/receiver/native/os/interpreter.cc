#include "os/interpreter.h"

#include <dlfcn.h>

#include <chrono>
#include <thread>

#include "abi/exports.h"

namespace {

// CPython's stable functions; states and interpreters are opaque.
struct Interpreter {
  void* (*get)(void);
  void* (*first)(void*);
  void* (*next)(void*);
  uint64_t (*id)(void*);
  void* (*make)(void*);
  void (*clear)(void*);
  void (*remove)(void*);

  bool Found() const { return get && first && next && id && make && clear && remove; }
};

template <typename Function>
void Find(const char* name, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, name));
}

Interpreter FindInterpreter() {
  Interpreter found;
  Find("PyInterpreterState_Get", &found.get);
  Find("PyInterpreterState_ThreadHead", &found.first);
  Find("PyThreadState_Next", &found.next);
  Find("PyThreadState_GetID", &found.id);
  Find("PyThreadState_New", &found.make);
  Find("PyThreadState_Clear", &found.clear);
  Find("PyThreadState_Delete", &found.remove);
  return found;
}

}  // namespace

namespace hcb {

bool IsFinalizing() {
  using Function = int (*)(void);
  static const Function found = [] {
    Function function = nullptr;
    Find("Py_IsFinalizing", &function);
    if (function == nullptr) Find("_Py_IsFinalizing", &function);  // before Python 3.13
    return function;
  }();
  return found != nullptr && found() != 0;
}

}  // namespace hcb

int64_t hcb_thread_states(uint64_t* ids, uint64_t capacity, uint64_t* made) {
  static const Interpreter python = FindInterpreter();
  if (!python.Found()) return -1;
  void* const interpreter = python.get();
  int64_t count = 0;
  // States are added at the head of the list, and removed only under the interpreter lock, which the caller
  // holds.
  for (void* state = python.first(interpreter); state != nullptr; state = python.next(state)) {
    if (static_cast<uint64_t>(count) < capacity) ids[count] = python.id(state);
    ++count;
  }
  // A new state's id is higher than all earlier ones: ids count up.
  void* const last = python.make(interpreter);
  if (last == nullptr) return -1;
  *made = python.id(last);
  python.clear(last);
  python.remove(last);
  return count;
}

void hcb_hold_thread(int64_t nanoseconds) {
  std::this_thread::sleep_for(std::chrono::nanoseconds(nanoseconds));
  while (hcb::IsFinalizing()) std::this_thread::sleep_for(std::chrono::hours(1));
}

// Threads that complete emissions which had to wait.
//
// XLA runs what follows a completed future on the thread that completes it, until the program ends or waits again (seen on
// jaxlib 0.8.0, 0.10.2 and 0.12.0). Hence completing is done neither by a ring's reader, which would execute the device's
// program instead of draining, nor by one common thread, where one program would hold up all others.
#ifndef HOSTCALLBACK_COMPLETER_H_
#define HOSTCALLBACK_COMPLETER_H_

#include <memory>

namespace hcb {

// How to tell a producer whose emission waited that it is in the ring.
class Completion {
 public:
  virtual ~Completion() = default;
  virtual void Complete() = 0;  // called once, on a thread of its own for as long as it takes
};

// Calls `completion->Complete()` on a thread that does nothing else meanwhile. Does not wait for it. Any thread.
void CompleteElsewhere(std::unique_ptr<Completion> completion);

void ResetCompletersAfterFork();

}  // namespace hcb

#endif  // HOSTCALLBACK_COMPLETER_H_

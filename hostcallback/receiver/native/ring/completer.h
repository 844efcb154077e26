// Threads that complete emissions that had to wait.
//
// XLA continues a program on the thread that completes its future, until the program ends or waits again
// (seen on jaxlib 0.8.0, 0.10.2 and 0.12.0). So neither a ring's reader completes, which would execute the
// device's program instead of draining, nor a single thread for all, on which one program would delay all
// others.
#ifndef HOSTCALLBACK_RING_COMPLETER_H_
#define HOSTCALLBACK_RING_COMPLETER_H_

#include <memory>

namespace hcb {

// Tells a producer whose emission had to wait that the emission is in the ring.
class Completion {
 public:
  virtual ~Completion() = default;
  virtual void Complete() = 0;  // called once, on a thread that does nothing else meanwhile
};

// Calls `completion->Complete()` on a thread that does nothing else meanwhile. Does not wait for it. Any
// thread.
void CompleteElsewhere(std::unique_ptr<Completion> completion);

}  // namespace hcb

#endif  // HOSTCALLBACK_RING_COMPLETER_H_

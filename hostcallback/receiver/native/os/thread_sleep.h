// How long another thread of this process has been asleep.
#ifndef HOSTCALLBACK_OS_THREAD_SLEEP_H_
#define HOSTCALLBACK_OS_THREAD_SLEEP_H_

#include <cstdint>

namespace hcb {

// The system's number of the calling thread. 0 where the system has none.
int32_t ThreadNumber();

// Which sleep the thread is in: the same number as long as it has not been woken. 0 if it runs, waits for a
// processor, or if the system does not tell. Any thread; reads a file of /proc, about 20 us.
uint64_t SleepOfThread(int32_t thread);

}  // namespace hcb

#endif  // HOSTCALLBACK_OS_THREAD_SLEEP_H_

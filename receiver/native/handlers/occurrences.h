// How often each tap has fired in each launch of a program on each device, for taps whose arrays are shards: the shards of
// one value have equal numbers, also where a policy dropped some messages.
#ifndef HOSTCALLBACK_OCCURRENCES_H_
#define HOSTCALLBACK_OCCURRENCES_H_

#include <cstdint>

#include "rules/rule.h"

namespace hcb {

// 0 for the first call with these arguments, then 1, 2, ... Any thread. Remembers the 256 launches of a device that were used
// last; the runtime has at most a few dozen in flight. (Run ids come back: XLA derives them from a program's name and the number
// of its launches. Counting then goes on, alike on all devices.)
int64_t NextOccurrence(int32_t device, int64_t run_id, uint64_t consumer_id);

// The same for taps, with what the first device to ask is told of the value: whether its shards are sent. The others get the
// same answer, whatever was ruled meanwhile: a value is sent by all devices or by none.
struct Occurrence {
  int64_t number;
  bool sent;
};
Occurrence NextDecided(int32_t device, int64_t run_id, uint64_t consumer_id, Control* control, int64_t now_ns);

void ResetOccurrencesAfterFork();

}  // namespace hcb

#endif  // HOSTCALLBACK_OCCURRENCES_H_

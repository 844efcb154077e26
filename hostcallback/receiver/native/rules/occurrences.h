// Counts how often each tap has fired in each launch of a program on each device, for taps whose arrays are
// shards: shards of one value have equal numbers, even if a policy has dropped messages.
#ifndef HOSTCALLBACK_RULES_OCCURRENCES_H_
#define HOSTCALLBACK_RULES_OCCURRENCES_H_

#include <cstdint>

#include "rules/rule.h"

namespace hcb {

// Returns 0 for the first call with these arguments, then 1, 2, ... Any thread. Remembers the 256 most
// recently used launches of a device; the runtime has at most a few dozen in flight. (Run ids repeat: XLA
// derives them from a program's name and the number of its launches. Counting then continues, equally on all
// devices.)
int64_t NextOccurrence(int32_t device, int64_t run_id, uint64_t consumer_id);

// The same for taps, with the decision whether the value's shards are sent. The first device that asks
// decides; the others get the same answer even if the rules change meanwhile, so that a value is sent by all
// devices or by none.
struct Occurrence {
  int64_t number;
  bool sent;
};
Occurrence NextDecided(int32_t device, int64_t run_id, uint64_t consumer_id, Control* control,
                       int64_t now_ns);

}  // namespace hcb

#endif  // HOSTCALLBACK_RULES_OCCURRENCES_H_

// The rules of all taps, the switches of single devices, and the launches to be ended: read by the handlers,
// written by the host. The table has room for 32,768 different switches in the life of the process.
//
// Reading takes no lock and, if nothing was ever switched or ruled, one load.
#ifndef HOSTCALLBACK_RULES_RULE_TABLE_H_
#define HOSTCALLBACK_RULES_RULE_TABLE_H_

#include <cstdint>

#include "rules/rule.h"

namespace hcb {

bool ChecksAreOff();
bool IsOffOn(int32_t device, uint64_t consumer_id);

// The rules of a consumer; null if none were ever set.
Control* FindControl(uint64_t consumer_id);
// The same, created if it does not exist. Null if the table is full, or the system has no memory.
Control* MakeControl(uint64_t consumer_id);

// Whether a check that fails on the device ends its launch.
bool Aborts(int32_t device);
bool AnyAborts();  // whether that was ever switched on for any device

// Marks a launch that a check has ended: its next handler call, on any device, ends it there too.
void Poison(int64_t run_id);
bool IsPoisoned(int64_t run_id);

}  // namespace hcb

#endif  // HOSTCALLBACK_RULES_RULE_TABLE_H_

// The controls of all taps, what is switched off on single devices, and which launches are to be stopped: looked at by the
// handlers, changed by the host.
//
// Looking takes no lock and, where nothing was ever switched or ruled, one load.
#ifndef HOSTCALLBACK_SWITCHES_H_
#define HOSTCALLBACK_SWITCHES_H_

#include <cstdint>

#include "rules/rule.h"

namespace hcb {

// Switches a consumer's messages off, or on again, on one device or on all. False if the table is full: 32,768 different
// switches in the life of the process.
bool Switch(uint64_t consumer_id, int32_t device, bool off);
void SwitchAllChecks(bool off);
bool ChecksAreOff();
bool IsOffOn(int32_t device, uint64_t consumer_id);

// The control of a consumer; null if nothing was ever ruled.
Control* FindControl(uint64_t consumer_id);
// The same, made if there is none. Null if the table is full, or the system has no memory.
Control* MakeControl(uint64_t consumer_id);

// Whether a check that fails on the device ends its launch. Switching it on forgets what is poisoned.
bool AbortOnCheck(int32_t device, bool on);
bool Aborts(int32_t device);
bool AnyAborts();  // whether any device was ever told to

// A launch that a check has ended: its next handler call, on whatever device, ends it there too.
void Poison(int64_t run_id);
bool IsPoisoned(int64_t run_id);

// What is switched stays so.
void ResetSwitchesAfterFork();

}  // namespace hcb

#endif  // HOSTCALLBACK_SWITCHES_H_

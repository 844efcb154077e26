// What is switched off at run time, and which launches are to be stopped: looked at by the handlers, changed by the host.
//
// Looking takes no lock and, where nothing was ever switched, one load.
#ifndef HOSTCALLBACK_SWITCHES_H_
#define HOSTCALLBACK_SWITCHES_H_

#include <cstdint>

namespace hcb {

constexpr int32_t kEveryDevice = -1;

// Switches a consumer's messages off, or on again, on one device or on all. False if the table is full: 32,768 different
// switches in the life of the process.
bool Switch(uint64_t consumer_id, int32_t device, bool off);
void SwitchAllChecks(bool off);
bool IsOff(uint64_t consumer_id, bool is_check);  // everywhere
bool IsOffOn(int32_t device, uint64_t consumer_id);

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

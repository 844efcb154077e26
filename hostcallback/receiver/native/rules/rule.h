// The rules of one tap, which the host sets while programs run: handlers ask them before they copy anything.
//
// Asking takes no lock. Counters are per device, in the order of its program.
#ifndef HOSTCALLBACK_RULES_RULE_H_
#define HOSTCALLBACK_RULES_RULE_H_

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "abi/types.h"

namespace hcb {

constexpr int32_t kEveryDevice = -1;

class LatestSlot;

enum class Admission {
  kSend,
  kLeaveOut,
  kTooSoon,  // left out by the rate alone: the caller keeps or counts it
};

// The rules of one consumer and their state. It lives as long as the process, because a program may ask at
// any time.
class Control {
 public:
  // Sets the rules. Counters restart if the rules that use them change.
  void Set(const hcb_control& rules);
  void SwitchOff(bool off) { off_.store(off, std::memory_order_relaxed); }
  bool off() const { return off_.load(std::memory_order_relaxed); }

  // The predicate's answer for the last value of a device, or of the shards of all devices (kEveryDevice).
  void SetGate(int32_t device, bool closed);

  // Whether the message that a device is about to send at `now_ns` may be sent. A refused one is counted.
  bool Admit(int32_t device, int64_t now_ns);
  // The same, for a caller that keeps the message if it is kTooSoon (handlers/latest.h). A message that is
  // sent leaves out the one that is kept.
  Admission Ask(int32_t device, int64_t now_ns);
  void CountLeftOut(int32_t device, uint64_t messages);

  // The slot of a device's latest message; null if it has none.
  LatestSlot* slot(int32_t device);
  void SetSlot(int32_t device, LatestSlot* slot);
  // Whether the rate lets the message in the slot be sent now: 0, and the time to the next message starts.
  // Otherwise when it does.
  int64_t Claim(int32_t device, int64_t now_ns);
  // The time to the next message starts now.
  void Restart(int32_t device, int64_t now_ns);
  int64_t NotBefore(int32_t device);
  // Counts a message of a tap that is off, on any device.
  void CountSuppressed();
  uint64_t Suppressed() const;

  // Number of elements to which arrays are cut; 0: arrays are sent whole.
  uint64_t truncate() const { return truncate_.load(std::memory_order_relaxed); }

 private:
  struct alignas(64) DeviceState {
    int32_t device;
    DeviceState* next;
    std::atomic<uint32_t> epoch;
    std::atomic<bool> closed;
    std::atomic<uint64_t> seen;       // emissions since the rules were set
    std::atomic<uint64_t> held;       // messages refused by the closed gate since the last probe
    std::atomic<int64_t> not_before;  // of the next message
    std::atomic<int64_t> next_probe;  // 0: the gate has refused no message yet
    std::atomic<uint64_t> suppressed;
    std::atomic<LatestSlot*> slot;
  };
  struct alignas(64) Stripe {
    std::atomic<uint64_t> count{0};
  };

  DeviceState* StateOf(int32_t device);
  Admission Decide(DeviceState* state, int64_t now_ns);
  bool Probe(DeviceState* state, int64_t now_ns);

  // One stripe for each of the first threads that count; all later threads share the last one.
  static constexpr uint32_t kStripes = 12;

  std::atomic<bool> off_{false};
  std::atomic<bool> decides_{false};  // whether any rule below must be asked
  std::atomic<bool> keeps_{false};    // whether any device has a slot
  std::atomic<uint32_t> epoch_{0};
  std::atomic<uint64_t> every_{1};
  std::atomic<int64_t> interval_ns_{0};
  std::atomic<uint64_t> truncate_{0};
  std::atomic<uint64_t> probe_every_{0};
  std::atomic<int64_t> probe_ns_{0};
  std::atomic<DeviceState*> states_{nullptr};
  Stripe off_counts_[kStripes];
};

}  // namespace hcb

#endif  // HOSTCALLBACK_RULES_RULE_H_

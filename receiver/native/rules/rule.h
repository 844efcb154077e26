// What one tap may send, as the host rules while programs run: the handlers ask before they copy anything.
//
// Asking takes no lock. What is counted is counted for each device, in the order of its program.
#ifndef HOSTCALLBACK_CONTROL_H_
#define HOSTCALLBACK_CONTROL_H_

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "abi/c_abi.h"

namespace hcb {

constexpr int32_t kEveryDevice = -1;

// The rules of one consumer and the state that they need. It lives as long as the process: a program may ask at any time.
class Control {
 public:
  // From now on these rules hold. What they count begins anew if they count other things than before.
  void Set(const hcb_control& rules);
  void SwitchOff(bool off) { off_.store(off, std::memory_order_relaxed); }
  // Whether its messages go to the ring that another process reads, where the device has one. With a gate they do not: the
  // predicate is this process's.
  void SendOutside(bool outside) { outside_.store(outside, std::memory_order_relaxed); }
  bool outside() const { return outside_.load(std::memory_order_relaxed) && !gated_.load(std::memory_order_relaxed); }
  bool off() const { return off_.load(std::memory_order_relaxed); }

  // The predicate's answer for the last value of a device, or of the shards of all devices (kEveryDevice).
  void SetGate(int32_t device, bool closed);

  // Whether the message that a device is about to send at `now_ns` may be sent. One that may not is counted.
  bool Admit(int32_t device, int64_t now_ns);
  // For a message that is off, of whatever device.
  void CountSuppressed();
  uint64_t Suppressed() const;

  // To how many elements arrays are cut; 0: to none, they are sent whole.
  uint64_t truncate() const { return truncate_.load(std::memory_order_relaxed); }

 private:
  struct alignas(64) DeviceState {
    int32_t device;
    DeviceState* next;
    std::atomic<uint32_t> epoch;
    std::atomic<bool> closed;
    std::atomic<uint64_t> seen;         // emissions since the rules were set
    std::atomic<uint64_t> held;         // by the closed gate since the last probe
    std::atomic<int64_t> not_before;    // of the next message
    std::atomic<int64_t> next_probe;    // 0: the gate has held nothing yet
    std::atomic<uint64_t> suppressed;
  };
  struct alignas(64) Stripe {
    std::atomic<uint64_t> count{0};
  };

  DeviceState* StateOf(int32_t device);
  bool Decide(DeviceState* state, int64_t now_ns);
  bool Probe(DeviceState* state, int64_t now_ns);

  // A stripe for each of the first threads that count; the last one is shared by the others.
  static constexpr uint32_t kStripes = 12;

  std::atomic<bool> off_{false};
  std::atomic<bool> outside_{false};
  std::atomic<bool> gated_{false};
  std::atomic<bool> decides_{false};  // whether any rule below has to be asked
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

#endif  // HOSTCALLBACK_CONTROL_H_

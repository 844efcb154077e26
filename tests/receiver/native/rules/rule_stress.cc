// Rules under load: threads of several devices ask while others set rules, gates and switches. Every message
// is either admitted or counted as suppressed, and devices agree about shared values.
//
//   rule_stress COUNT
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "abi/exports.h"
#include "check.h"
#include "rules/occurrences.h"
#include "rules/rule.h"
#include "rules/rule_table.h"

namespace {

constexpr int kDevices = 4;
constexpr uint64_t kConsumers = 3;

hcb_control RulesOf(uint64_t number) {
  hcb_control rules = {};
  if (number % 2) rules.every = number % 7;
  if (number % 3 == 0) rules.interval_ns = 50;
  if (number % 5 == 0) rules.probe_every = 4;
  if (number % 4 == 0) rules.probe_ns = 30;
  rules.truncate = number % 2;
  rules.off = number % 6 == 0;
  return rules;
}

}  // namespace

int main(int argc, char** argv) {
  const uint64_t count = 20 * (argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 2000);
  std::atomic<bool> done{false};
  std::atomic<uint64_t> rounds{0};
  std::atomic<uint64_t> admitted{0};
  std::vector<std::vector<bool>> sent(kDevices);

  std::thread ruler([&done, &rounds] {
    for (uint64_t n = 0; !done.load(); ++n) {
      const uint64_t consumer = 1 + n % kConsumers;
      hcb::MakeControl(consumer)->Set(RulesOf(n));
      hcb::MakeControl(consumer)->SetGate(static_cast<int32_t>(n % kDevices), n % 3 == 1);
      hcb_switch(consumer, hcb::kEveryDevice, n % 11 == 0);
      hcb::MakeControl(99)->Set(RulesOf(n));
      rounds.store(n + 1);
    }
  });
  std::vector<std::thread> devices;
  for (int device = 0; device < kDevices; ++device) {
    devices.emplace_back([&, device] {
      uint64_t own = 0;
      for (uint64_t n = 0; n < count; ++n) {
        // On a busy machine the ruler may not run while the devices do.
        while (n % 1000 == 0 && rounds.load() < 12 * (n / 1000 + 1)) std::this_thread::yield();
        hcb::Control* control = hcb::FindControl(1 + n % kConsumers);
        own += control == nullptr || control->Admit(device, static_cast<int64_t>(n * 10));
        const auto next = hcb::NextDecided(device, 7, 99, hcb::FindControl(99), static_cast<int64_t>(n * 10));
        CHECK(next.number == static_cast<int64_t>(n));
        sent[static_cast<size_t>(device)].push_back(next.sent);
      }
      admitted += own;
    });
  }
  for (std::thread& device : devices) device.join();
  done = true;
  ruler.join();

  uint64_t suppressed = 0;
  for (uint64_t consumer = 1; consumer <= kConsumers; ++consumer)
    suppressed += hcb::FindControl(consumer)->Suppressed();
  CHECK(admitted + suppressed == count * kDevices);
  CHECK(suppressed != 0);
  uint64_t shared = 0;
  for (const bool value : sent[0]) shared += value;
  for (const std::vector<bool>& of_device : sent) CHECK(of_device == sent[0]);
  CHECK(shared + hcb::FindControl(99)->Suppressed() == count);
  std::puts("ok");
  return 0;
}

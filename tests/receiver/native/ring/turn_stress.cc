// The turn to deliver under load: threads take it, pause, give it twice, and now and then keep it for too
// long. Others keep the processors busy, so that a thread may be woken too late. Each gets the turn, and has
// it alone for 3 ms.
//
//   turn_stress COUNT
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <thread>
#include <vector>

#include "abi/exports.h"
#include "check.h"
#include "os/delivery_turn.h"

namespace {

constexpr uint64_t kThreads = 8;
constexpr uint64_t kKeeps =
    200;  // every 200th turn of a thread is kept until another thread must have taken it
constexpr int64_t kAlone = 3'000'000;

int64_t Now() { return std::chrono::steady_clock::now().time_since_epoch().count(); }

// For each thread that has the turn, when it asked for it; 0 for the others.
std::atomic<int64_t> asked[kThreads];

void TakeTurns(uint64_t own, uint64_t count, std::atomic<uint64_t>* awaited) {
  for (uint64_t n = 0; n < count; ++n) {
    const int64_t begin = Now();
    hcb::TakeDeliveryTurn();
    for (const std::atomic<int64_t>& other : asked) {
      const int64_t since = other.load();
      CHECK(since == 0 || Now() - since >= kAlone);
    }
    asked[own].store(begin);
    if (n % kKeeps == own) std::this_thread::sleep_for(std::chrono::milliseconds(4));
    *awaited += hcb_delivery_turn_awaited() != 0;
    asked[own].store(0);
    if (n % 3 == 0) CHECK(hcb_delivery_pause(n % 2 * 1000) > 0);
    hcb_delivery_turn_give();
    if (n % 5 == 0) hcb_delivery_turn_give();
  }
}

}  // namespace

int main(int argc, char** argv) {
  const uint64_t count = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 2000;
  std::atomic<uint64_t> awaited{0};
  std::atomic<bool> done{false};
  std::vector<std::thread> busy;
  std::vector<std::thread> threads;
  for (uint64_t own = 0; own < kThreads; ++own) {
    threads.emplace_back(TakeTurns, own, count, &awaited);
    busy.emplace_back([&done] {
      while (!done.load()) continue;
    });
  }
  for (std::thread& thread : threads) thread.join();
  done.store(true);
  for (std::thread& thread : busy) thread.join();
  CHECK(awaited.load() > 0);
  hcb_delivery_turn_give();
  CHECK(hcb_delivery_turn_awaited() == 0);
  hcb::TakeDeliveryTurn();
  return 0;
}

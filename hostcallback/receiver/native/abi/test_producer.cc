// Producers for tests: real threads, because Python's are too slow to contend for a ring, and one that calls.
#include <atomic>
#include <cstring>
#include <thread>
#include <vector>

#include "abi/exports.h"
#include "wire/frame.h"

namespace {

uint64_t Produce(hcb_ring* ring, uint64_t id, uint64_t count, uint64_t nbytes) {
  hcb::FrameHeader prefix = {};
  prefix.consumer_id = id;
  std::vector<uint8_t> payload(nbytes);
  uint64_t emitted = 0;
  for (uint64_t i = 0; i < count; ++i) {
    std::memset(payload.data(), static_cast<int>(i & 0xff), nbytes);
    std::memcpy(payload.data(), &i, nbytes < sizeof(i) ? nbytes : sizeof(i));
    const void* array = payload.data();
    const int32_t status =
        hcb_ring_send(ring, reinterpret_cast<const uint8_t*>(&prefix), sizeof(prefix), 1, &array, &nbytes, 0);
    if (status == HCB_EMITTED) ++emitted;
  }
  return emitted;
}

}  // namespace

uint64_t hcb_test_produce(hcb_ring* ring, uint32_t threads, uint64_t count, uint64_t nbytes) {
  std::atomic<uint64_t> emitted{0};
  std::vector<std::thread> running;
  for (uint32_t id = 0; id < threads; ++id) {
    running.emplace_back([=, &emitted] { emitted += Produce(ring, id, count, nbytes); });
  }
  for (std::thread& thread : running) thread.join();
  return emitted;
}

int32_t hcb_test_call(hcb_ring* ring, const uint8_t* prefix, uint64_t prefix_bytes, uint64_t count,
                      void* const* results, const uint64_t* nbytes, char* error, uint64_t error_bytes) {
  return hcb_ring_call(ring, prefix, prefix_bytes, 0, nullptr, nullptr, count, results, nbytes, error,
                       error_bytes);
}

// Hammers the rings of GPUs from several streams, with a driver that is late, short of memory and sometimes
// wrong, and checks that every message arrives once, whole and in its stream's order, unless it is a check
// that holds or was reported lost.
//
// `gpu_stress COUNT LIBRARY`, where the library is the fake driver and the caller of handlers.
#include <dlfcn.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <thread>
#include <vector>

#include "abi/exports.h"
#include "check.h"
#include "wire/frame.h"

namespace {

constexpr int kStreams = 3;
constexpr int32_t kOrdinal = 6;
constexpr int32_t kU8 = 6, kU64 = 8;

void* library;

template <typename F>
F* Get(const char* name) {
  void* found = dlsym(library, name);
  CHECK(found != nullptr);
  return reinterpret_cast<F*>(found);
}

uint64_t SizeOf(uint64_t number) { return number % 7 == 0 ? 5000 : 1 + number % 90; }
bool Holds(uint64_t number) { return number % 3 == 0 && number % 2 == 0; }

struct Buffers {
  uint64_t places[3];
};

// Taps `count` times: a predicate, the number, and bytes that repeat the number. Every third tap is a check.
void Launch(uint64_t id, uint64_t count, const Buffers* buffers) {
  void* stream = Get<void*()>("fake_stream")();
  const auto write = Get<void(void*, uint64_t, const void*, uint64_t)>("fake_write");
  const auto call =
      Get<int(XLA_FFI_Error * (*)(XLA_FFI_CallFrame*), int32_t, int64_t, void*, const uint8_t*, uint64_t,
              uint64_t, void* const*, const int32_t*, const int64_t*, void* const*, char*, uint64_t)>(
          "call_handler");
  const uint64_t* const places = buffers->places;
  std::vector<uint8_t> bytes(5000);
  for (uint64_t i = 0; i < count; ++i) {
    // One set of buffers, overwritten by the next step as in a loop on the device.
    const uint8_t predicate = Holds(i) ? 1 : 0;
    std::fill(bytes.begin(), bytes.end(), static_cast<uint8_t>(i));
    write(stream, places[0], &predicate, 1);
    write(stream, places[1], &i, sizeof(i));
    write(stream, places[2], bytes.data(), SizeOf(i));
    hcb::FrameHeader prefix = {};
    prefix.consumer_id = id;
    prefix.flags = i % 3 == 0 ? hcb::kCheck : 0;
    void* data[3];
    for (int k = 0; k < 3; ++k) data[k] = reinterpret_cast<void*>(places[k]);
    const int32_t dtypes[] = {kU8, kU64, kU8};
    const int64_t lengths[] = {1, 1, static_cast<int64_t>(SizeOf(i))};
    char error[200] = "";
    CHECK(call(hcb_gpu_tap, kOrdinal, 1, stream, reinterpret_cast<const uint8_t*>(&prefix), sizeof(prefix), 3,
               data, dtypes, lengths, nullptr, error, sizeof(error)));
  }
  // The buffers are freed then. No thread has waited for the last step if its copy was refused.
  while (Get<int(void*)>("fake_idle")(stream) == 0) std::this_thread::yield();
}

struct Reader {
  hcb_ring* ring;
  std::map<uint64_t, uint64_t> next;  // by stream: the smallest number that may still come
  uint64_t delivered = 0;
  uint64_t lost = 0;
  uint64_t seq = 0;

  void Take(const hcb_batch& batch, uint64_t frame, uint8_t* memory) {
    hcb::FrameHeader header;
    std::memcpy(&header, memory + batch.offsets[frame], sizeof(header));
    CHECK(header.seq == seq++);
    const uint8_t* payload = memory + batch.offsets[frame] + sizeof(header);
    for (uint64_t i = 0; i < batch.blocks_count; ++i) {
      if (batch.blocks[i].frame == frame) payload = static_cast<const uint8_t*>(batch.blocks[i].memory);
    }
    if (header.flags & hcb::kEndOfStream) return;
    uint64_t number;
    std::memcpy(&number, payload + 8, sizeof(number));
    CHECK(number >= next[header.consumer_id]);
    next[header.consumer_id] = number + 1;
    CHECK(number % 3 != 0 || !Holds(number));
    const uint64_t size = SizeOf(number);
    const uint64_t start = size >= 64 ? 64 : 16;
    CHECK(header.payload_bytes == start + size);
    for (uint64_t i = 0; i < size; ++i) CHECK(payload[start + i] == static_cast<uint8_t>(number));
    ++delivered;
  }

  void Run(const std::atomic<bool>& ended) {
    static hcb_batch batch;
    uint64_t capacity;
    uint8_t* memory = static_cast<uint8_t*>(hcb_ring_memory(ring, &capacity));
    for (;;) {
      const bool last = ended.load();
      if (hcb_ring_read(ring, 2'000'000, 0, &batch) == 0) {
        if (batch.damage != 0) {
          CHECK(batch.damage == HCB_COPY_FAILED);
          lost += batch.damage_messages;
          continue;
        }
        hcb_counters counters;
        hcb_ring_counters(ring, &counters);
        if (last && counters.queued_messages == 0) return;
        continue;
      }
      for (uint64_t i = 0; i < batch.frames; ++i) Take(batch, i, memory);
      for (uint64_t i = 0; i < batch.blocks_count; ++i) hcb_block_free(batch.blocks[i].memory);
      hcb_ring_release(ring, batch.ends[batch.frames - 1], batch.frames);
    }
  }
};

}  // namespace

int main(int argc, char** argv) {
  CHECK(argc == 3);
  const uint64_t count = std::strtoull(argv[1], nullptr, 10) / 4;
  library = dlopen(argv[2], RTLD_NOW);
  CHECK(library != nullptr);
  char error[300] = "";
  CHECK(hcb_gpu_open(HCB_CUDA, argv[2], error, sizeof(error)));
  hcb_config config = {};
  config.capacity_bytes = 16 << 10;
  config.block_budget_bytes = 40'000;
  Reader reader = {hcb_ring_open(hcb_gpu_ring(kOrdinal), &config), {}};
  CHECK(reader.ring != nullptr);

  std::atomic<bool> launched{false}, ended{false};
  std::thread reading([&] { reader.Run(ended); });
  std::vector<std::thread> launching;
  const auto allocate = Get<uint64_t(uint64_t)>("fake_allocate");
  Buffers buffers[kStreams];
  for (uint64_t id = 0; id < kStreams; ++id) {
    buffers[id] = {{allocate(1), allocate(8), allocate(5000)}};
    launching.emplace_back(Launch, id, count, &buffers[id]);
  }
  std::thread disturbing([&] {
    const auto fail = Get<void(const char*, int, int64_t, int64_t)>("fake_fail");
    const auto delay = Get<void(int64_t)>("fake_delay");
    hcb::FrameHeader end = {};
    end.flags = hcb::kEndOfStream;
    for (int i = 0; !launched.load(); ++i) {
      delay(i % 4 == 0 ? 20 : 0);
      fail("cuMemHostRegister_v2", 2, 1, i % 3);
      fail("cuEventCreate", 2, 0, i % 2);
      fail("cuEventRecord", 2, 5, i % 2);
      fail("cuMemcpyDtoHAsync_v2", 700, 40, i % 5 == 0);
      hcb_ring_append(reader.ring, reinterpret_cast<const uint8_t*>(&end), sizeof(end));
      hcb_ring_wake(reader.ring);
      hcb_ring_configure(reader.ring, &config);
      hcb_counters counters;
      hcb_ring_counters(reader.ring, &counters);
      std::this_thread::yield();
    }
    delay(0);
  });
  for (std::thread& thread : launching) thread.join();
  launched.store(true);
  disturbing.join();
  ended.store(true);
  reading.join();

  for (const Buffers& of_stream : buffers) {
    for (uint64_t address : of_stream.places) Get<void(uint64_t)>("fake_free")(address);
  }
  hcb_counters counters;
  hcb_ring_counters(reader.ring, &counters);
  uint64_t held = 0;
  for (uint64_t i = 0; i < count; ++i) held += i % 3 == 0 && Holds(i);
  // A check whose copy failed is lost, whether it would have held or not.
  CHECK(counters.dropped == 0);
  CHECK(reader.delivered + counters.discarded == kStreams * count);
  CHECK(counters.discarded >= reader.lost && counters.discarded <= reader.lost + kStreams * held);
  CHECK(counters.queued_messages == 0 && counters.queued_bytes == 0);
  CHECK(Get<uint64_t()>("fake_violations")() == 0);
  using Number = unsigned long long;
  std::printf("%llu delivered, %llu held, %llu lost, %llu unpinned\n", static_cast<Number>(reader.delivered),
              static_cast<Number>(counters.discarded - reader.lost), static_cast<Number>(reader.lost),
              static_cast<Number>(counters.unpinned));
  return 0;
}

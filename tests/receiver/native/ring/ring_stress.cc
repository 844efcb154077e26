// Hammers rings from many threads and checks that every frame arrives once, whole and in its producer's
// order.
//
// A separate program, so that it can run under ThreadSanitizer and AddressSanitizer, which a Python process
// cannot easily.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <thread>
#include <vector>

#include "abi/exports.h"
#include "check.h"
#include "ring/completer.h"
#include "ring/ring.h"
#include "wire/frame.h"

namespace {

constexpr uint64_t kEnd = ~0ull;

// Represents an XLA program that emits `count` frames in a row and never holds a thread while one of them
// waits.
class Program : public hcb::CompletionFactory {
 public:
  Program(hcb::Ring* ring, uint64_t id, uint64_t count, uint64_t nbytes)
      : ring_(ring), count_(count), payload_(nbytes) {
    std::memset(&prefix_, 0, sizeof(prefix_));
    prefix_.consumer_id = id;
  }

  std::unique_ptr<hcb::Completion> Make() override { return std::make_unique<Resume>(this); }

  // Runs until an emission has to wait; the completion goes on from there, on its own thread.
  void Run() {
    while (next_ < count_) {
      std::memset(payload_.data(), static_cast<int>(next_), payload_.size());
      std::memcpy(payload_.data(), &next_, sizeof(next_));
      array_ = {payload_.data(), payload_.size(), 0xff};
      hcb::Emission emission = {};
      emission.prefix = reinterpret_cast<const uint8_t*>(&prefix_);
      emission.prefix_bytes = sizeof(prefix_);
      emission.arrays = &array_;
      emission.array_count = 1;
      emission.payload_bytes = payload_.size();
      ++next_;
      state_.store(kRunning);
      const hcb::Verdict verdict = ring_->Emit(emission, this);
      if (verdict == hcb::Verdict::kPending) {
        // The second of the two, this thread or the completion, goes on.
        if (state_.exchange(kDetached) == kRunning) return;
        continue;
      }
      CHECK(verdict == hcb::Verdict::kEmitted);
    }
    done_.store(true);
  }

  bool done() const { return done_.load(); }

 private:
  enum State { kRunning, kDetached, kCompleted };

  class Resume : public hcb::Completion {
   public:
    explicit Resume(Program* program) : program_(program) {}
    void Complete() override {
      if (program_->state_.exchange(kCompleted) == kDetached) program_->Run();
    }

   private:
    Program* const program_;
  };

  hcb::Ring* const ring_;
  const uint64_t count_;
  hcb::FrameHeader prefix_;
  std::vector<uint8_t> payload_;
  hcb::ArrayRef array_;
  uint64_t next_ = 0;
  std::atomic<int> state_{kRunning};
  std::atomic<bool> done_{false};
};

// Reads until the end-of-stream frame; returns the number of frames from each producer, or, if some may have
// been overwritten (`gaps`), the next expected frame of each.
std::map<uint64_t, uint64_t> Drain(hcb_ring* ring, bool gaps) {
  uint64_t capacity;
  uint8_t* memory = static_cast<uint8_t*>(hcb_ring_memory(ring, &capacity));
  auto batch = std::make_unique<hcb_batch>();
  std::map<uint64_t, uint64_t> next;
  uint64_t seq = 0;
  for (;;) {
    const uint32_t frames = hcb_ring_read(ring, -1, 0, batch.get());
    CHECK(batch->damage == 0);
    uint64_t block = 0;
    bool end = false;
    for (uint32_t i = 0; i < frames; ++i) {
      const uint8_t* frame = memory + batch->offsets[i];
      hcb::FrameHeader header;
      std::memcpy(&header, frame, sizeof(header));
      CHECK(header.seq == seq || (gaps && header.seq > seq));
      seq = header.seq + 1;
      if (header.flags & hcb::kEndOfStream) {
        CHECK(i + 1 == frames);
        end = true;
        continue;
      }
      const uint8_t* payload = frame + sizeof(header);
      if (header.flags & hcb::kExternal) {
        CHECK(block < batch->blocks_count && batch->blocks[block].frame == i);
        CHECK(batch->blocks[block].nbytes == header.payload_bytes);
        payload = static_cast<const uint8_t*>(batch->blocks[block].memory);
      }
      uint64_t counter;
      std::memcpy(&counter, payload, sizeof(counter));
      CHECK(counter == next[header.consumer_id] || (gaps && counter > next[header.consumer_id]));
      next[header.consumer_id] = counter + 1;
      for (uint64_t k = sizeof(counter); k < header.payload_bytes; ++k) CHECK(payload[k] == (counter & 0xff));
      if (header.flags & hcb::kExternal) hcb_block_free(batch->blocks[block++].memory);
    }
    CHECK(block == batch->blocks_count);
    // In two parts, like a reader that releases room early.
    if (frames > 1) hcb_ring_release(ring, batch->ends[frames / 2 - 1], frames / 2);
    if (frames > 0) hcb_ring_release(ring, batch->ends[frames - 1], frames - (frames > 1 ? frames / 2 : 0));
    if (end) return next;
  }
}

// `file`: the ring is moved there meanwhile.
void Round(int32_t device, uint64_t threads, uint64_t programs, uint64_t count, uint64_t nbytes,
           bool overwrites = false, const char* file = nullptr) {
  hcb_config config = {};
  config.steps = overwrites ? HCB_OVERWRITE_OLDEST : 0;
  config.capacity_bytes = 4096;
  config.block_budget_bytes = 64 << 10;
  hcb_ring* ring = hcb_ring_open(device, &config);
  CHECK(ring != nullptr);
  std::map<uint64_t, uint64_t> received;
  std::thread reader([&] { received = Drain(ring, overwrites); });
  std::vector<std::unique_ptr<Program>> running;
  for (uint64_t i = 0; i < programs; ++i) {
    running.push_back(
        std::make_unique<Program>(reinterpret_cast<hcb::Ring*>(ring), 1000 + i, count, nbytes + 8 * i));
  }
  std::vector<std::thread> starters;
  for (auto& program : running) starters.emplace_back([&program] { program->Run(); });
  if (file != nullptr) {
    starters.emplace_back([ring, file] {
      std::remove(file);
      CHECK(hcb_ring_keep_in_file(ring, file, "cpu:0", 256 << 10) == 0);
    });
  }
  CHECK(hcb_test_produce(ring, static_cast<uint32_t>(threads), count, nbytes) == threads * count);
  for (std::thread& starter : starters) starter.join();
  for (auto& program : running) {
    while (!program->done()) std::this_thread::yield();
  }
  hcb::FrameHeader end = {};
  end.consumer_id = kEnd;
  end.flags = hcb::kEndOfStream;
  CHECK(hcb_ring_append(ring, reinterpret_cast<const uint8_t*>(&end), sizeof(end)) >= 0);
  reader.join();
  if (!overwrites) {
    CHECK(received.size() == threads + programs);
    for (const auto& entry : received) CHECK(entry.second == count);
  }
  hcb_counters counters;
  hcb_ring_counters(ring, &counters);
  CHECK(counters.queued_messages == 0 && counters.queued_bytes == 0 && counters.waiting_producers == 0);
  CHECK(overwrites || counters.dropped == 0);
  CHECK(counters.dropped == counters.discarded && counters.emitted == (threads + programs) * count + 1);
  if (file != nullptr) CHECK(std::remove(file) == 0);
}

}  // namespace

int main(int argc, char** argv) {
  const uint64_t count = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 2000;
  int32_t device = 0;
  Round(device++, 4, 0, count, 8);
  Round(device++, 0, 4, count, 24);
  Round(device++, 3, 3, count, 137);
  Round(device++, 2, 2, count / 4, 5000);    // outside the ring
  Round(device++, 2, 2, count / 20, 70000);  // over the budget: one at a time
  Round(device++, 3, 3, count, 137, true);
  Round(device++, 2, 2, count / 4, 5000, true);
  for (int i = 0; i < 20; ++i) Round(device++, 3, 3, count / 10, 137, i % 2 == 1, argv[2]);
  for (int i = 0; i < 5; ++i) Round(device++, 2, 2, count / 10, 5000, i % 2 == 1, argv[2]);
  std::puts("ok");
  return 0;
}

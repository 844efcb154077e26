// Programs that call and tap in turns, a reader that delivers the taps, and threads that answer the calls and
// go on with the programs: checks that every call is answered once, in its program's order, with all that is
// before it delivered.
//
// A separate program, so that it can run under ThreadSanitizer and AddressSanitizer, which a Python process
// cannot easily.
#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "abi/exports.h"
#include "check.h"
#include "ring/call_table.h"
#include "ring/ring.h"
#include "wire/frame.h"

namespace {

constexpr uint64_t kPrograms = 6;
constexpr uint64_t kAnswerers = 3;
constexpr uint64_t kEnd = ~0ull;

// Messages delivered of each program, in its order: twice the step for a tap, one more for a call.
std::atomic<uint64_t> delivered[kPrograms];

void Deliver(const hcb::FrameHeader& header, uint64_t value) {
  CHECK(delivered[header.consumer_id].fetch_add(1) == value);
}

// Represents an XLA program: in each step a tap, then a call whose result must be the step. It continues on
// the thread that answers the call.
class Program {
 public:
  Program(hcb::Ring* ring, uint64_t id, uint64_t steps, uint64_t padding)
      : ring_(ring), steps_(steps), payload_(2 + padding) {
    std::memset(&prefix_, 0, sizeof(prefix_));
    prefix_.consumer_id = id;
  }

  // Emits until it waits for a call, or ends.
  void Run() {
    if (step_ == steps_) {
      std::lock_guard<std::mutex> lock(mutex_);
      done_ = true;
      ended_.notify_one();
      return;
    }
    Emit(0, 2 * step_, nullptr);
    auto call = std::make_unique<Waiting>(this);
    call->results.push_back({&result_, sizeof(result_)});
    Emit(hcb::kCall, 2 * step_ + 1, std::move(call));
  }

  void Join() {
    std::unique_lock<std::mutex> lock(mutex_);
    ended_.wait(lock, [this] { return done_; });
  }

 private:
  class Waiting final : public hcb::PendingCall {
   public:
    explicit Waiting(Program* program) : program_(program) {}
    void Finish(const char* error) override {
      CHECK(error == nullptr);
      CHECK(program_->result_ == program_->step_);
      ++program_->step_;
      program_->Run();
    }

   private:
    Program* const program_;
  };

  void Emit(uint32_t flags, uint64_t value, std::unique_ptr<hcb::PendingCall> call) {
    prefix_.flags = flags;
    payload_[0] = value;
    const hcb::ArrayRef array = {payload_.data(), payload_.size() * sizeof(uint64_t), 0xff};
    hcb::Emission emission = {};
    emission.prefix = reinterpret_cast<const uint8_t*>(&prefix_);
    emission.prefix_bytes = sizeof(prefix_);
    emission.arrays = &array;
    emission.array_count = 1;
    emission.payload_bytes = array.nbytes;
    emission.device = ring_->device();
    if (call) {
      ring_->Append(emission, std::move(call));
    } else {
      CHECK(ring_->Emit(emission, nullptr) == hcb::Verdict::kEmitted);
    }
  }

  hcb::Ring* const ring_;
  const uint64_t steps_;
  hcb::FrameHeader prefix_;
  std::vector<uint64_t> payload_;
  uint64_t step_ = 0;
  uint64_t result_ = 0;
  std::mutex mutex_;  // protects done_
  std::condition_variable ended_;
  bool done_ = false;
};

uint64_t ValueOf(const hcb::Ring& ring, uint64_t offset, const void* block) {
  uint64_t value;
  std::memcpy(&value, block != nullptr ? block : ring.memory() + offset + sizeof(hcb::FrameHeader),
              sizeof(value));
  return value;
}

void Answer(hcb::Ring* ring, uint64_t seq, uint64_t value) {
  const uint64_t result = value / 2;
  const void* array = &result;
  const uint64_t nbytes = sizeof(result);
  hcb_call* call = hcb_call_reply(ring->device(), seq, 1, &array, &nbytes);
  CHECK(call != nullptr);
  hcb_call_resume(call);
}

void Answerer(hcb::Ring* ring, const std::atomic<bool>* over) {
  while (!*over) {
    hcb_call_frame frame;
    if (!ring->ReadCall(10'000'000, &frame)) continue;
    hcb::FrameHeader header;
    std::memcpy(&header, ring->memory() + frame.offset, sizeof(header));
    const uint64_t value = ValueOf(*ring, frame.offset, frame.memory);
    hcb_block_free(frame.memory);
    ring->Release(frame.end, 1);
    Deliver(header, value);
    ring->EndReadCall();
    Answer(ring, header.seq, value);
  }
}

void Reader(hcb::Ring* ring) {
  auto batch = std::make_unique<hcb_batch>();
  for (;;) {
    const uint32_t found = ring->Read(-1, batch.get());
    CHECK(batch->damage == 0);
    std::vector<std::pair<uint64_t, uint64_t>> calls;
    bool end = false;
    size_t block = 0;
    for (uint32_t i = 0; i < found; ++i) {
      hcb::FrameHeader header;
      std::memcpy(&header, ring->memory() + batch->offsets[i], sizeof(header));
      if (header.flags & hcb::kEndOfStream) {
        end = true;
        continue;
      }
      void* memory = nullptr;
      if (block < batch->blocks_count && batch->blocks[block].frame == i)
        memory = batch->blocks[block++].memory;
      const uint64_t value = ValueOf(*ring, batch->offsets[i], memory);
      hcb_block_free(memory);
      Deliver(header, value);
      if (header.flags & hcb::kCall) calls.push_back({header.seq, value});
    }
    if (found != 0) ring->Release(batch->ends[found - 1], found);
    // Not here: the programs go on on the thread that answers.
    for (const auto& [seq, value] : calls) std::thread(Answer, ring, seq, value).detach();
    if (end) return;
  }
}

void Stress(hcb::Ring* ring, uint64_t steps, uint64_t answerers, uint64_t padding) {
  for (auto& count : delivered) count = 0;
  std::atomic<bool> over{false};
  std::vector<std::thread> threads;
  threads.emplace_back(Reader, ring);
  for (uint64_t i = 0; i < answerers; ++i) threads.emplace_back(Answerer, ring, &over);
  std::vector<std::unique_ptr<Program>> programs;
  for (uint64_t id = 0; id < kPrograms; ++id) {
    programs.push_back(std::make_unique<Program>(ring, id, steps, padding));
    threads.emplace_back(&Program::Run, programs.back().get());
  }
  for (auto& program : programs) program->Join();
  over = true;
  hcb::FrameHeader sentinel = {};
  sentinel.flags = hcb::kEndOfStream;
  sentinel.consumer_id = kEnd;
  CHECK(hcb_ring_append(reinterpret_cast<hcb_ring*>(ring), reinterpret_cast<const uint8_t*>(&sentinel),
                        sizeof(sentinel)) >= 0);
  for (std::thread& thread : threads) thread.join();
  for (auto& count : delivered) CHECK(count == 2 * steps);
  CHECK(hcb_call_count(ring->device()) == 0);
}

}  // namespace

int main(int, char** argv) {
  const uint64_t steps = std::strtoull(argv[1], nullptr, 10);
  int32_t device = 0;
  for (const uint64_t answerers : {uint64_t{0}, kAnswerers}) {
    for (const uint64_t padding : {uint64_t{0}, uint64_t{300}}) {  // the second in blocks outside of the ring
      hcb_config config = {};
      config.capacity_bytes = 4096;
      const uint64_t count = answerers == 0 ? steps / 10 : steps;
      Stress(reinterpret_cast<hcb::Ring*>(hcb_ring_open(device++, &config)), count, answerers, padding);
    }
  }
  return 0;
}

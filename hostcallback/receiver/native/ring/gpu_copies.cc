// Frames that a GPU copies into: the handler's thread starts the copies, the reader commits the frames when
// they have completed.
//
// No thread waits for the device. The handler puts copies and an event into XLA's stream and returns; the
// reader queries the oldest event, and sleeps again if it has not completed. Decisions that a CPU handler
// makes when it emits (whether a check holds) are made here instead, in the same order.
#include <sys/mman.h>

#include <algorithm>
#include <cstring>

#include "os/stall_events.h"
#include "ring/ring.h"
#include "rules/occurrences.h"
#include "rules/rule_table.h"

namespace hcb {
namespace {

// Number of copies that are committed before the reader looks at the committed frames.
constexpr int kMaxSettled = 1024;

// Clears the gaps between arrays: the host's part of a payload whose arrays the device copies.
void ClearGaps(const Emission& emission, uint8_t* payload, bool padded) {
  const uint64_t line_end = AlignUp(emission.payload_bytes, kFrameAlign);
  if (padded && line_end != emission.payload_bytes)
    std::memset(payload + line_end - kFrameAlign, 0, kFrameAlign);
  uint64_t end = 0;
  for (size_t i = 0; i < emission.array_count; ++i) {
    const uint64_t start = ArrayStart(end, emission.arrays[i].nbytes);
    std::memset(payload + end, 0, start - end);
    end = start + emission.arrays[i].nbytes;
  }
}

}  // namespace

int Ring::UseGpu(int ordinal) {
  if (gpu() != nullptr) return 0;
  std::lock_guard<std::mutex> lock(mutex_);
  if (gpu_.load(std::memory_order_relaxed) != nullptr) return 0;
  int error = 0;
  std::unique_ptr<GpuDevice> gpu = GpuDevice::Open(ordinal, &error);
  if (!gpu) return error == 0 ? -1 : error;
#ifdef MADV_WIPEONFORK
  // Without it, the process's first write to a page after a fork would move it to another page than the
  // device copies into.
  madvise(memory_, capacity_, MADV_WIPEONFORK);
#endif
  pinned_ = gpu->Pin(memory_, capacity_);
  blocks_.PinFor(gpu.get());
  blocks_.SetStockLimit(config_.block_budget_bytes);
  gpu_.store(gpu.release(), std::memory_order_release);
  return 0;
}

void Ring::Lose(hcb_copy_step step, int error) {
  lost_reason_.store(static_cast<uint64_t>(static_cast<uint32_t>(error)) << 8 | step,
                     std::memory_order_relaxed);
  lost_.fetch_add(1, std::memory_order_seq_cst);
  Wake();
}

DeviceCopy* Ring::BeginCopyLocked(const DeviceTap& tap, const Reservation& reservation) {
  DeviceCopy copy = {};
  copy.position = reservation.position;
  copy.committed_flags = reservation.committed_flags;
  copy.external = reservation.external;
  copy.tap = tap;
  copies_.push_back(std::move(copy));
  if (copies_.size() == 1) oldest_copy_.store(reservation.position, std::memory_order_seq_cst);
  return &copies_.back();  // the address is stable until the reader settles the copy
}

Verdict Ring::CopyFromDevice(const Emission& emission, const Reservation& reservation) {
  DeviceCopy* copy = reservation.copy;
  uint8_t* behind_metadata = WriteMetadata(emission, reinterpret_cast<uint8_t*>(reservation.frame + 1));
  bool pinned = pinned_;
  copy->payload = behind_metadata;
  if (reservation.external) {
    copy->payload = static_cast<uint8_t*>(blocks_.Allocate(emission.payload_bytes));
    pinned = copy->payload == nullptr || BlockPool::IsPinned(copy->payload);
    const BlockDescriptor descriptor = {
        reinterpret_cast<uint64_t>(copy->payload), emission.payload_bytes, 0, {}};
    std::memcpy(behind_metadata, &descriptor, sizeof(descriptor));
  }
  if (copy->payload == nullptr) {
    copy->failed = HCB_COPY_NO_MEMORY;
  } else {
    ClearGaps(emission, copy->payload, !reservation.external);
    StartCopies(emission, gpu(), copy);
  }
  const uint64_t position = reservation.position;
  bool first_unpinned;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (reservation.external) {
      // The entry exists: the reader passes no frame that is being copied into.
      FindBlockLocked(position)->memory = copy->payload;
    }
    copy->started = true;
    first_unpinned = !pinned && unpinned_++ == 0;
  }
  if (first_unpinned) SignalSupervisor(HCB_EVENT_NOT_PINNED, device_);
  // A reader that polls need not be woken.
  if (oldest_copy_.load(std::memory_order_seq_cst) == position &&
      control_->wake_from.load(std::memory_order_seq_cst) == kAsleep)
    WakeReader();
  return Verdict::kEmitted;
}

void Ring::StartCopies(const Emission& emission, GpuDevice* gpu, DeviceCopy* copy) {
  GpuDevice::Use use(*gpu);
  if (!use) {
    copy->failed = HCB_COPY_CONTEXT;
    copy->error = use.error();
    return;
  }
  // First, because without an event the reader must query the whole stream for these copies.
  copy->event = gpu->TakeEvent(use);
  uint64_t end = 0;
  for (size_t i = 0; i < emission.array_count && copy->error == 0; ++i) {
    const ArrayRef& array = emission.arrays[i];
    const uint64_t start = ArrayStart(end, array.nbytes);
    end = start + array.nbytes;
    if (copy->tap.check && i == copy->tap.predicate) {
      copy->predicate_start = start;
      copy->predicate_bytes = array.nbytes;
    }
    if (array.nbytes == 0) continue;
    if (i < copy->tap.host_arrays) {
      std::memcpy(copy->payload + start, array.data, array.nbytes);
      continue;
    }
    if (array.last_byte_mask != 0xff) copy->masks.push_back({end - 1, array.last_byte_mask});
    copy->error = use->copy_to_host(copy->payload + start, array.data, array.nbytes, copy->tap.stream);
    copy->on_the_way |= copy->error == 0;
  }
  if (copy->error != 0) copy->failed = HCB_COPY_START;
  if (!copy->on_the_way || copy->event == nullptr || use->event_record(copy->event, copy->tap.stream) != 0) {
    gpu->GiveEvent(use, copy->event);
    copy->event = nullptr;
  }
}

void Ring::SettleCopies() {
  GpuDevice* gpu = this->gpu();
  if (gpu == nullptr) return;
  GpuDevice::Use use(*gpu);
  if (!use && use.error() == 0) return;  // the process is ending
  for (int settled = 0; settled < kMaxSettled; ++settled) {
    DeviceCopy* copy;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (copies_.empty() || !copies_.front().started) return;
      copy = &copies_.front();
    }
    if (copy->on_the_way) {
      int state = use.error();
      if (use)
        state = copy->event != nullptr ? use->event_query(copy->event) : use->stream_query(copy->tap.stream);
      if (state == kGpuNotReady) return;
      if (state != 0 && copy->failed == HCB_COPY_INTACT) {
        copy->failed = HCB_COPY_RUN;
        copy->error = state;
      }
      if (use) gpu->GiveEvent(use, copy->event);
    }
    Settle(copy);
    poll_ = kFirstPoll;
    std::lock_guard<std::mutex> lock(mutex_);
    copies_.pop_front();
    oldest_copy_.store(copies_.empty() ? kNoCopy : copies_.front().position, std::memory_order_seq_cst);
  }
}

// Commits a frame whose copies have completed, or discards it.
void Ring::Settle(DeviceCopy* copy) {
  FrameHeader* frame = At(copy->position);
  // Walk reports the damage
  if (Check(copy->position, control_->head.load(std::memory_order_acquire)) != HCB_INTACT) return;
  if (copy->failed != HCB_COPY_INTACT) {
    Lose(copy->failed, copy->error);
    Discard(copy);
    return;
  }
  for (const auto& [offset, mask] : copy->masks) copy->payload[offset] &= mask;
  const DeviceTap& tap = copy->tap;
  if (tap.check) {
    const uint8_t* predicate = copy->payload + copy->predicate_start;
    if (copy->predicate_bytes == 0 || std::memchr(predicate, 0, copy->predicate_bytes) == nullptr) {
      Discard(copy);
      return;
    }
    if (tap.ends_launch && !tap.off) Poison(frame->run_id);
  }
  if (tap.sharded) {
    const int64_t occurrence =
        tap.occurrence >= 0 ? tap.occurrence : NextOccurrence(device_, frame->run_id, frame->consumer_id);
    std::memcpy(copy->payload, &occurrence, sizeof(occurrence));
  }
  if (tap.off) {
    Discard(copy);
    return;
  }
  __atomic_store_n(&frame->flags, copy->committed_flags, __ATOMIC_SEQ_CST);
}

// Discards a frame that is not a message: it is not delivered, and later messages are numbered as if it had
// never existed.
void Ring::Discard(DeviceCopy* copy) {
  FrameHeader* frame = At(copy->position);
  if (copy->external) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      const auto entry = FindBlockLocked(copy->position);
      outstanding_bytes_ -= entry->nbytes;
      outstanding_.erase(entry);
    }
    BlockPool::Free(copy->payload);  // without the lock: it may call the driver
  }
  frame->seq = kNoSeq;
  discarded_.fetch_add(1, std::memory_order_seq_cst);
  __atomic_store_n(&frame->flags, copy->committed_flags | kDiscarded, __ATOMIC_SEQ_CST);
}

// The end of the readable frames: a device may still write into those after it.
uint64_t Ring::SettledHead() const {
  const uint64_t head = control_->head.load(std::memory_order_acquire);
  return std::min(head, oldest_copy_.load(std::memory_order_acquire));
}

// Gives a message its final number, without the numbers of earlier frames that were discarded.
void Ring::Renumber(FrameHeader* header) {
  const uint64_t given_back = given_back_.load(std::memory_order_relaxed);
  if (given_back == 0) return;
  if (header->flags & kCall) RenumberCall(device_, header->seq, header->seq - given_back);
  header->seq -= given_back;
}

bool Ring::ReportLost(hcb_batch* batch) {
  if (lost_.load(std::memory_order_relaxed) == 0) return false;
  const uint64_t reason = lost_reason_.load(std::memory_order_relaxed);
  batch->damage = HCB_COPY_FAILED;
  batch->damage_messages = lost_.exchange(0, std::memory_order_relaxed);
  batch->damage_start = reason & 0xff;
  batch->damage_end = reason >> 8;
  return true;
}

}  // namespace hcb

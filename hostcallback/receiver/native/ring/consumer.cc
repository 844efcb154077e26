// The reader's side of a ring: walking over committed frames, taking their blocks, releasing, and skipping
// damage.
#include <algorithm>
#include <cstring>

#include "ring/ring.h"

namespace hcb {
namespace {

// Payloads in blocks are handed out and not copied, so that a batch may have more bytes of them: its cost for
// the reader is that of the batch itself.
constexpr uint64_t kBlockDivisor = 4;

bool Folds(const FrameHeader& header) { return (LoadFlags(&header) & (kFolds | kExternal)) == kFolds; }

}  // namespace

// HCB_INTACT if an intact header, BUSY or not, lies at `position`, otherwise its damage.
hcb_damage Ring::Check(uint64_t position, uint64_t head) const {
  const FrameHeader& header = *At(position);
  const uint32_t flags = LoadFlags(&header);
  if (std::memcmp(header.magic, kMagic, sizeof(kMagic)) != 0) return HCB_DAMAGED_MAGIC;
  if (header.version != kVersion) return HCB_DAMAGED_VERSION;
  if ((flags & ~kKnownFlags) != 0) return HCB_DAMAGED_FLAGS;
  if (header.position != position) return HCB_DAMAGED_POSITION;
  const uint64_t limit = std::min(head - position, capacity_ - (position & (capacity_ - 1)));
  // The parts first, so that their sum cannot overflow.
  if (header.meta_bytes > limit) return HCB_DAMAGED_LENGTH;
  if (!(flags & kExternal) && header.payload_bytes > limit) return HCB_DAMAGED_LENGTH;
  if (RingBytes(header, flags) > limit) return HCB_DAMAGED_LENGTH;
  return HCB_INTACT;
}

uint32_t Ring::Read(int64_t timeout_ns, hcb_batch* batch) {
  const Clock::time_point deadline = Deadline(timeout_ns);
  batch->frames = batch->blocks_count = batch->damage = batch->folded_total = 0;
  // the last batch has been delivered
  if (reader_turn_) control_->delivered.store(delivered_end_, std::memory_order_release);
  reader_emits_.store(false, std::memory_order_relaxed);
  EndReaderTurn();
  if (ReportLost(batch)) return 0;
  if (waiting_.load(std::memory_order_seq_cst) != 0) AdmitWaiters();
  while (batch->frames == 0 && batch->damage == 0) {
    if (!WaitTurn(deadline)) return 0;
    Walk(batch);
    walking_.store(false, std::memory_order_release);
    if (batch->frames != 0 || batch->damage != 0) break;
    EndReaderTurn();
    // a thread may wait for a frame that turned out not to be a message
    if (discarded() != 0 && !CopyPending()) return 0;
  }
  if (batch->frames != 0) ExpectMore();
  // Taking blocks has freed budget.
  if (batch->blocks_count != 0 && waiting_.load(std::memory_order_seq_cst) != 0) AdmitWaiters();
  return static_cast<uint32_t>(batch->frames);
}

// The block of the frame at `position`; the end if the reader has taken it.
std::deque<Ring::OutstandingBlock>::iterator Ring::FindBlockLocked(uint64_t position) {
  return std::find_if(outstanding_.begin(), outstanding_.end(),
                      [position](const OutstandingBlock& b) { return b.position == position; });
}

void Ring::DropBlockLocked(std::deque<OutstandingBlock>::iterator block) {
  if (block == outstanding_.end()) return;
  BlockPool::Free(block->memory);  // an unfinished one is freed by its producer, who misses the entry
  outstanding_bytes_ -= block->nbytes;
  outstanding_.erase(block);
}

// A call is always the first frame of its batch, so that it can be left to another thread, as it must be if
// its own thread takes it. The end of a stream is alone in its batch, so that a batch is accounted for as a
// whole.
void Ring::Walk(hcb_batch* batch) {
  const uint64_t head = SettledHead();
  const uint64_t start = cursor_;
  uint64_t bytes = 0;
  uint64_t alike = 0;
  while (cursor_ != head && batch->frames < HCB_BATCH_FRAMES && batch->blocks_count < HCB_BATCH_BLOCKS &&
         bytes < HCB_BATCH_BYTES) {
    hcb_damage damage = Check(cursor_, head);
    const FrameHeader& header = *At(cursor_);
    const uint32_t flags = LoadFlags(&header);
    if (damage == HCB_INTACT) {
      if ((flags & kBusy) || ((flags & (kCall | kEndOfStream)) && batch->frames != 0)) break;
      if ((flags & (kCall | kDiscarded)) == kCall && OwnerOfCall(device_, header.seq) != nullptr) break;
      const bool message = !(flags & (kPad | kDiscarded));
      OutstandingBlock block = {};
      if (message && (flags & kExternal) && !TakeBlock(cursor_, &block)) damage = HCB_DAMAGED_BLOCK;
      if (damage == HCB_INTACT) {
        const uint64_t nbytes = RingBytes(header, flags);
        if (message) {
          if (block.memory != nullptr)
            batch->blocks[batch->blocks_count++] = {batch->frames, block.memory, block.nbytes};
          Renumber(At(cursor_));
          Enter(batch, &alike);
          bytes +=
              FrameBytes(header.meta_bytes, header.payload_bytes) / ((flags & kExternal) ? kBlockDivisor : 1);
          ++cursor_frames_;
        }
        if ((flags & kDiscarded) && header.seq == kNoSeq) given_back_.fetch_add(1, std::memory_order_release);
        cursor_ += nbytes;
        // Skipped frames are released together with the frame before them.
        if (batch->frames != 0) batch->ends[batch->frames - 1] = cursor_;
        if (message && (flags & kEndOfStream)) break;
        continue;
      }
    }
    // Frames before the damage are delivered first; the next read finds the damage again.
    if (batch->frames == 0) SkipDamage(head, damage, batch);
    break;
  }
  delivered_end_ = cursor_;
  if (batch->frames == 0) ReleaseSkipped(start);  // after that other threads may move the cursor
}

// Lists the message at the cursor. Of a check that fails repeatedly, only the first failures and the last one
// are listed, so that counting the others costs the reader nothing. `alike`: how many of the listed messages,
// up to the last one, are failures of one check.
void Ring::Enter(hcb_batch* batch, uint64_t* alike) {
  const uint64_t offset = cursor_ & (capacity_ - 1);
  const FrameHeader& header = *HeaderAt(offset);
  if (!Folds(header)) {
    *alike = 0;
  } else if (*alike != 0 && HeaderAt(batch->offsets[batch->frames - 1])->consumer_id == header.consumer_id) {
    const uint64_t listed = batch->alike_frames != 0 ? batch->alike_frames : uint64_t{HCB_ALIKE_FRAMES};
    if (*alike > listed) {
      const uint64_t last = batch->frames - 1;
      batch->offsets[last] = offset;
      ++batch->folded[last];
      ++batch->folded_total;
      return;
    }
    ++*alike;
  } else {
    *alike = 1;
  }
  batch->folded[batch->frames] = 0;
  batch->offsets[batch->frames++] = offset;
}

// Moves the block of the frame at `position` from the ring to `block`. False if the frame's descriptor is not
// that of a block of this ring, which only damage can bring about.
bool Ring::TakeBlock(uint64_t position, OutstandingBlock* block) {
  const FrameHeader* header = At(position);
  BlockDescriptor descriptor;
  std::memcpy(&descriptor,
              reinterpret_cast<const uint8_t*>(header + 1) + AlignUp(header->meta_bytes, kFrameAlign),
              sizeof(descriptor));
  std::lock_guard<std::mutex> lock(mutex_);
  if (outstanding_.empty()) return false;
  *block = outstanding_.front();  // blocks are taken in the order of their frames
  if (block->position != position || block->nbytes != header->payload_bytes ||
      block->nbytes != descriptor.nbytes || reinterpret_cast<uint64_t>(block->memory) != descriptor.address) {
    return false;
  }
  outstanding_.pop_front();
  outstanding_bytes_ -= block->nbytes;
  return true;
}

// The payload of an EXTERNAL frame that no reader has taken. Null if its block is not there. With
// `sleep_mutex_` and not while the reader walks, because a reader could take the block meanwhile.
const void* Ring::PayloadOf(uint64_t position) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto block = FindBlockLocked(position);
  if (block == outstanding_.end() || block->nbytes != At(position)->payload_bytes) return nullptr;
  return block->memory;
}

uint32_t Ring::CopyAhead(uint64_t* position, uint8_t* out, uint64_t capacity, uint64_t* offsets,
                         uint32_t most, uint64_t* needed) {
  *needed = 0;
  if (gpu() != nullptr) return 0;  // numbers of its frames are final only when the reader has come to them
  std::lock_guard<std::mutex> reader(sleep_mutex_);
  if (walking_.load(std::memory_order_acquire)) return 0;
  const uint64_t head = SettledHead();
  uint64_t at = std::max(*position, cursor_);
  uint64_t used = 0;
  uint32_t frames = 0;
  while (at != head && frames < most && Check(at, head) == HCB_INTACT) {
    const FrameHeader& header = *At(at);
    const uint32_t flags = LoadFlags(&header);
    if (flags & (kBusy | kEndOfStream)) break;
    if (!(flags & (kPad | kDiscarded))) {
      const uint64_t nbytes = FrameBytes(header.meta_bytes, header.payload_bytes);
      if (nbytes > capacity - used) {
        if (frames == 0) *needed = nbytes;
        break;
      }
      uint8_t* const copy = out + used;
      if (flags & kExternal) {
        const void* const payload = PayloadOf(at);
        if (payload == nullptr) break;
        CopyInline(header, payload, copy);
      } else {
        std::memcpy(copy, &header, nbytes);
      }
      offsets[frames++] = used;
      used += nbytes;
    }
    at += RingBytes(header, flags);
  }
  *position = at;
  return frames;
}

// How many messages lie between the intact header at `from` and the head. `intact`: whether the frames follow
// one another without damage all the way, which makes the number exact.
uint64_t Ring::CountMessagesLocked(uint64_t from, bool* intact) const {
  const uint64_t head = control_->head.load(std::memory_order_relaxed);
  uint64_t messages = 0;
  while (from != head && Check(from, head) == HCB_INTACT) {
    const uint32_t flags = LoadFlags(At(from));
    if (!(flags & (kPad | kDiscarded))) ++messages;
    from += RingBytes(*At(from), flags);
  }
  *intact = from == head;
  return messages;
}

// Moves the cursor to the next intact header, or to the head if there is none, and reports what lies between.
void Ring::SkipDamage(uint64_t head, hcb_damage damage, hcb_batch* batch) {
  const uint64_t start = cursor_;
  uint64_t next = start + kFrameAlign;
  // A header holds its own position, so that nothing else, old headers included, passes for one.
  while (next < head && Check(next, head) != HCB_INTACT) next += kFrameAlign;
  next = std::min(next, head);
  uint64_t lost = 0;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    bool exact;
    const uint64_t behind = CountMessagesLocked(next, &exact);
    // With more damage behind, the next skip settles the account.
    if (exact) lost = emitted_ - discarded_.load() - behind - cursor_frames_;
    while (!outstanding_.empty() && outstanding_.front().position < next)
      DropBlockLocked(outstanding_.begin());
  }
  FailCallsBetween(
      device_, start, next,
      "hostcallback: the message of this call was damaged: some code in this process writes into memory that "
      "it does not own; run it under AddressSanitizer");
  batch->damage = damage;
  batch->damage_start = start;
  batch->damage_end = next;
  batch->damage_messages = lost;
  cursor_ = next;
  cursor_frames_ += lost;
  CountReleased(lost);
}

// Gives back what was walked over without a frame to release it with.
void Ring::ReleaseSkipped(uint64_t from) {
  if (cursor_ != from && control_->released.load(std::memory_order_relaxed) == from && Release(cursor_, 0))
    AdmitWaiters();
}

// First here, then where others look: see MoveInto. Only the reader does.
void Ring::CountReleased(uint64_t frames) {
  const uint64_t all = released_frames_here_.load(std::memory_order_relaxed) + frames;
  released_frames_here_.store(all, std::memory_order_seq_cst);
  control_->released_frames.store(all, std::memory_order_release);
}

bool Ring::Release(uint64_t position, uint64_t frames) {
  CountReleased(frames);
  const bool all = position == cursor_;
  released_here_.store(position, std::memory_order_seq_cst);  // first: see MoveInto
  // Sequentially consistent, with `waiting_` below: either this thread sees the waiting emission, or that one
  // sees the room.
  control_->released.store(position, std::memory_order_seq_cst);
  // After `released`: from then on an overwriting producer may move the cursor, and must find it at the
  // released position.
  if (all) holding_.store(false, std::memory_order_seq_cst);
  return waiting_.load(std::memory_order_seq_cst) != 0;
}

}  // namespace hcb

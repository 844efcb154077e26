// Reads the messages of one batch as columns, stacks the payloads of alike ones, so that Python makes arrays
// of many messages at a time, and copies whole frames for a log.

#include <cstring>

#include "abi/exports.h"
#include "ring/ring.h"

namespace {

using namespace hcb;

constexpr uint32_t kNone = ~0u;
constexpr uint32_t kKindSlots = 4 * HCB_BATCH_GROUPS;  // a power of two

// The properties that alike messages share.
struct Kind {
  const uint8_t* metadata;
  uint64_t meta_bytes;
  uint64_t payload_bytes;
  uint64_t batch_of;  // the consumer, if it takes stacks of messages, otherwise 0

  bool operator==(const Kind& other) const {
    return meta_bytes == other.meta_bytes && payload_bytes == other.payload_bytes &&
           batch_of == other.batch_of && std::memcmp(metadata, other.metadata, meta_bytes) == 0;
  }

  uint32_t Hash() const {
    uint64_t hash = payload_bytes * 0x9e3779b97f4a7c15 ^ batch_of;
    for (uint64_t i = 0; i + 8 <= meta_bytes; i += 8) {
      uint64_t word;
      std::memcpy(&word, metadata + i, 8);
      hash = (hash ^ word) * 0xff51afd7ed558ccd;
      hash ^= hash >> 32;
    }
    uint64_t rest = 0;
    std::memcpy(&rest, metadata + (meta_bytes & ~7ull), meta_bytes & 7);
    hash = (hash ^ rest) * 0xff51afd7ed558ccd;
    return static_cast<uint32_t>(hash >> 40) & (kKindSlots - 1);
  }
};

bool Stacks(const FrameHeader& header) {
  return (header.flags & (kExternal | kEndOfStream | kCall)) == 0 && header.meta_bytes != 0 &&
         header.payload_bytes <= HCB_STACK_BYTES;
}

Kind KindOf(const FrameHeader& header) {
  return {reinterpret_cast<const uint8_t*>(&header + 1), header.meta_bytes, header.payload_bytes,
          (header.flags & kBatched) ? header.consumer_id : 0};
}

class Groups {
 public:
  explicit Groups(hcb_columns* columns) : columns_(columns) {
    columns_->groups = 0;
    std::memset(slots_, 0xff, sizeof(slots_));
  }

  // The group of the message, created if there is room for one more; otherwise kNone.
  uint32_t Enter(const FrameHeader& header, uint32_t frame) {
    if (!Stacks(header)) return kNone;
    const Kind kind = KindOf(header);
    if (last_ != kNone && kind == kinds_[last_]) return Count(last_);
    for (uint32_t slot = kind.Hash();; slot = (slot + 1) & (kKindSlots - 1)) {
      const uint32_t found = slots_[slot];
      if (found != kNone && !(kinds_[found] == kind)) continue;
      if (found != kNone) return Count(found);
      if (columns_->groups == HCB_BATCH_GROUPS) return kNone;
      const uint32_t group = static_cast<uint32_t>(columns_->groups++);
      slots_[slot] = group;
      kinds_[group] = kind;
      columns_->group[group] = {frame, 0, 0, header.payload_bytes};
      return Count(group);
    }
  }

 private:
  uint32_t Count(uint32_t group) {
    ++columns_->group[group].count;
    return last_ = group;
  }

  hcb_columns* const columns_;
  uint32_t last_ = kNone;
  uint32_t slots_[kKindSlots];
  Kind kinds_[HCB_BATCH_GROUPS];
};

}  // namespace

void hcb_batch_columns(hcb_ring* ring, const hcb_batch* batch, hcb_columns* columns) {
  const uint8_t* const memory = RingOf(ring)->memory();
  uint32_t group_of[HCB_BATCH_FRAMES];
  Groups groups(columns);
  for (uint32_t i = 0; i < batch->frames; ++i) {
    const FrameHeader& header = *reinterpret_cast<const FrameHeader*>(memory + batch->offsets[i]);
    columns->consumer_ids[i] = header.consumer_id;
    columns->flags[i] = header.flags;
    columns->seqs[i] = header.seq;
    columns->times_ns[i] = header.time_ns;
    columns->run_ids[i] = header.run_id;
    group_of[i] = groups.Enter(header, i);
  }
  // A stable counting sort: the groups one after another, each in the order of emission.
  uint64_t next[HCB_BATCH_GROUPS];
  uint64_t first = 0;
  for (uint64_t g = 0; g < columns->groups; ++g) {
    next[g] = columns->group[g].first = first;
    first += columns->group[g].count;
  }
  for (uint32_t i = 0; i < batch->frames; ++i)
    columns->order[group_of[i] == kNone ? first++ : next[group_of[i]]++] = i;
}

void hcb_batch_stack(hcb_ring* ring, const hcb_batch* batch, const hcb_columns* columns, uint64_t from,
                     uint64_t count, uint64_t stride, uint8_t* out) {
  const uint8_t* const memory = RingOf(ring)->memory();
  for (uint64_t k = from; k < from + count; ++k, out += stride) {
    const FrameHeader& header =
        *reinterpret_cast<const FrameHeader*>(memory + batch->offsets[columns->order[k]]);
    const uint8_t* payload =
        reinterpret_cast<const uint8_t*>(&header + 1) + AlignUp(header.meta_bytes, kFrameAlign);
    CopyArray(out, payload, header.payload_bytes);
  }
}

uint64_t hcb_batch_layout(hcb_ring* ring, const hcb_batch* batch, uint64_t* offsets) {
  const uint8_t* const memory = RingOf(ring)->memory();
  uint64_t end = 0;
  for (uint64_t i = 0; i < batch->frames; ++i) {
    const FrameHeader& header = *reinterpret_cast<const FrameHeader*>(memory + batch->offsets[i]);
    offsets[i] = end;
    end += FrameBytes(header.meta_bytes, header.payload_bytes);
  }
  return end;
}

void hcb_batch_copy(hcb_ring* ring, const hcb_batch* batch, uint8_t* out) {
  const uint8_t* const memory = RingOf(ring)->memory();
  const hcb_block* block = batch->blocks;
  for (uint64_t i = 0; i < batch->frames; ++i) {
    const FrameHeader& header = *reinterpret_cast<const FrameHeader*>(memory + batch->offsets[i]);
    const uint64_t nbytes = FrameBytes(header.meta_bytes, header.payload_bytes);
    if (header.flags & kExternal) {
      CopyInline(header, (block++)->memory, out);
    } else {
      std::memcpy(out, &header, nbytes);
    }
    out += nbytes;
  }
}

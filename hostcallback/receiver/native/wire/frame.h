// The frame of wire format 1: its header, its flags and its size.
//
// docs/wire-format.md is the specification; this file must agree with it byte for byte.
#ifndef HOSTCALLBACK_WIRE_FRAME_H_
#define HOSTCALLBACK_WIRE_FRAME_H_

#include <cstddef>
#include <cstdint>

namespace hcb {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
              "frames are little-endian: headers are written as structs");

constexpr uint64_t kFrameAlign = 64;
constexpr uint8_t kMagic[3] = {'H', 'C', 'B'};
constexpr uint8_t kVersion = 1;

constexpr uint32_t kOrdered = 1u << 0;
constexpr uint32_t kEndOfStream = 1u << 1;
constexpr uint32_t kExternal = 1u << 2;  // ring only: a BlockDescriptor stands for the payload
constexpr uint32_t kPad = 1u << 3;       // ring only: fills the ring's end, so that no frame wraps
constexpr uint32_t kCall = 1u << 5;      // a program waits for the reply
constexpr uint32_t kCheck = 1u << 6;     // a failed check
// of consecutive failures of this check, only the first and the last need be read
constexpr uint32_t kFolds = 1u << 7;
constexpr uint32_t kBatched = 1u << 8;  // its consumer takes stacks of its messages
// only the first elements of arrays; the first array is a shape record
constexpr uint32_t kTruncated = 1u << 9;
constexpr uint32_t kLate = 1u << 10;       // prefix only: emits although a check has ended its launch
constexpr uint32_t kLast = 1u << 11;       // prefix only: as kLate, and then the launch ends
constexpr uint32_t kDiscarded = 1u << 30;  // ring only: reserved, then given up
constexpr uint32_t kBusy = 1u << 31;       // ring only: reserved, still being written
constexpr uint64_t kNoSeq = ~0ull;         // ring only: of a discarded frame whose number the next frame gets
// a prefix may bring them
constexpr uint32_t kMessageFlags = kOrdered | kEndOfStream | kCall | kCheck | kFolds | kBatched | kTruncated;
constexpr uint32_t kKnownFlags = kMessageFlags | kExternal | kPad | kDiscarded | kBusy;

struct FrameHeader {
  uint8_t magic[3];
  uint8_t version;
  uint32_t flags;
  uint64_t consumer_id;
  uint64_t seq;
  int64_t time_ns;
  int64_t run_id;
  int32_t device;
  uint32_t meta_bytes;
  uint64_t payload_bytes;
  uint64_t position;
};
static_assert(sizeof(FrameHeader) == kFrameAlign, "the header is one cache line");
static_assert(offsetof(FrameHeader, flags) == 4 && offsetof(FrameHeader, consumer_id) == 8 &&
                  offsetof(FrameHeader, seq) == 16 && offsetof(FrameHeader, time_ns) == 24 &&
                  offsetof(FrameHeader, run_id) == 32 && offsetof(FrameHeader, device) == 40 &&
                  offsetof(FrameHeader, meta_bytes) == 44 && offsetof(FrameHeader, payload_bytes) == 48 &&
                  offsetof(FrameHeader, position) == 56,
              "wire format 1");

// Reads one field of a header at any address: copying the whole header would wait for its stores.
template <typename Field>
Field LoadField(const uint8_t* header, size_t offset) {
  Field field;
  __builtin_memcpy(&field, header + offset, sizeof(field));
  return field;
}
#define HCB_FROM_PREFIX(prefix, field) \
  hcb::LoadField<decltype(hcb::FrameHeader::field)>(prefix, offsetof(hcb::FrameHeader, field))

// Replaces the payload of an EXTERNAL frame in the ring.
struct BlockDescriptor {
  uint64_t address;
  uint64_t nbytes;
  uint64_t file_offset;  // of the block's record in the ring's file; 0 if it is not there
  uint64_t zeros[5];
};
static_assert(sizeof(BlockDescriptor) == kFrameAlign, "the descriptor fills one unit of the ring");

constexpr uint64_t AlignUp(uint64_t n, uint64_t to) { return (n + to - 1) & ~(to - 1); }

constexpr uint64_t FrameBytes(uint64_t meta_bytes, uint64_t payload_bytes) {
  return sizeof(FrameHeader) + AlignUp(meta_bytes, kFrameAlign) + AlignUp(payload_bytes, kFrameAlign);
}

// Copies an EXTERNAL frame, without that flag: its payload in place of the descriptor.
inline void CopyInline(const FrameHeader& header, const void* payload, uint8_t* out) {
  const uint64_t start = sizeof(FrameHeader) + AlignUp(header.meta_bytes, kFrameAlign);
  const uint64_t padding = AlignUp(header.payload_bytes, kFrameAlign) - header.payload_bytes;
  const uint32_t flags = header.flags & ~kExternal;
  __builtin_memcpy(out, &header, start);
  __builtin_memcpy(out + offsetof(FrameHeader, flags), &flags, sizeof(flags));
  __builtin_memcpy(out + start, payload, header.payload_bytes);
  __builtin_memset(out + start + header.payload_bytes, 0, padding);
}

// Flags of a frame in a ring: its producer clears BUSY while the reader looks.
inline uint32_t LoadFlags(const FrameHeader* header) {
  return __atomic_load_n(&header->flags, __ATOMIC_SEQ_CST);
}

// Bytes that a frame with these flags takes in a ring.
constexpr uint64_t RingBytes(const FrameHeader& header, uint32_t flags) {
  return FrameBytes(header.meta_bytes, (flags & kExternal) ? sizeof(BlockDescriptor) : header.payload_bytes);
}

}  // namespace hcb

#endif  // HOSTCALLBACK_WIRE_FRAME_H_

#include "wire/encode.h"

#include <cstring>

namespace hcb {
namespace {

// Small arrays are packed tightly, so that a few scalars fit into one cache line; larger ones are aligned for
// any SIMD type.
uint64_t ArrayAlign(uint64_t nbytes) { return nbytes >= kFrameAlign ? kFrameAlign : 8; }

}  // namespace

bool ValidPrefix(const uint8_t* prefix, uint64_t prefix_bytes) {
  if (prefix == nullptr || prefix_bytes < sizeof(FrameHeader)) return false;
  return prefix_bytes == sizeof(FrameHeader) + AlignUp(HCB_FROM_PREFIX(prefix, meta_bytes), kFrameAlign);
}

uint64_t ArrayStart(uint64_t end, uint64_t nbytes) { return AlignUp(end, ArrayAlign(nbytes)); }

uint64_t PayloadBytes(const ArrayRef* arrays, size_t count) {
  uint64_t end = 0;
  for (size_t i = 0; i < count; ++i) end = ArrayStart(end, arrays[i].nbytes) + arrays[i].nbytes;
  return end;
}

uint32_t WriteHeader(const Emission& emission, uint64_t seq, uint64_t position, uint32_t flags,
                     FrameHeader* out) {
  // other flags of the prefix would corrupt the ring
  flags |= HCB_FROM_PREFIX(emission.prefix, flags) & kMessageFlags;
  // Each field is written in place: a header assembled on the stack would be copied only after its stores
  // have completed.
  std::memcpy(out->magic, kMagic, sizeof(kMagic));
  out->version = kVersion;
  out->flags = flags;
  out->consumer_id = HCB_FROM_PREFIX(emission.prefix, consumer_id);
  out->seq = seq;
  out->time_ns = emission.time_ns;
  out->run_id = emission.run_id;
  out->device = emission.device;
  out->meta_bytes = HCB_FROM_PREFIX(emission.prefix, meta_bytes);
  out->payload_bytes = emission.payload_bytes;
  out->position = position;
  return flags;
}

uint8_t* WriteMetadata(const Emission& emission, uint8_t* after_header) {
  const uint8_t* from = emission.prefix + sizeof(FrameHeader);
  const uint8_t* const end = emission.prefix + emission.prefix_bytes;
  // Whole cache lines, which need no library call. Most metadata is one line.
  for (; from < end; from += kFrameAlign, after_header += kFrameAlign)
    std::memcpy(after_header, from, kFrameAlign);
  return after_header;
}

__attribute__((hot)) uint64_t WritePayload(const Emission& emission, uint8_t* out) {
  uint64_t end = 0;
  for (size_t i = 0; i < emission.array_count; ++i) {
    const ArrayRef& array = emission.arrays[i];
    const uint64_t start = ArrayStart(end, array.nbytes);
    if (start != end) std::memset(out + end, 0, start - end);
    end = start + array.nbytes;
    if (array.nbytes == 0) continue;  // an empty array may have no address
    CopyArray(out + start, array.data, array.nbytes);
    if (array.last_byte_mask != 0xff) out[end - 1] &= array.last_byte_mask;
  }
  return end;
}

__attribute__((hot)) void WriteInlineBody(const Emission& emission, uint8_t* after_header) {
  uint8_t* payload = WriteMetadata(emission, after_header);
  // The last line first, because it contains the padding: clearing a whole line needs no library call.
  const uint64_t padded = AlignUp(emission.payload_bytes, kFrameAlign);
  if (padded != emission.payload_bytes) std::memset(payload + padded - kFrameAlign, 0, kFrameAlign);
  WritePayload(emission, payload);
}

}  // namespace hcb

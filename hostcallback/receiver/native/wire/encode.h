// Writes frames: a pure encoder that the FFI handlers, the host-side producer and the golden tests share.
#ifndef HOSTCALLBACK_WIRE_ENCODE_H_
#define HOSTCALLBACK_WIRE_ENCODE_H_

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "wire/frame.h"

namespace hcb {

// One array of a payload in the wire's form: C order, sub-byte elements packed, element 0 lowest.
struct ArrayRef {
  const void* data;
  uint64_t nbytes;
  // The bits of the last byte that belong to elements. XLA leaves garbage in the others.
  uint8_t last_byte_mask;
};

// memcpy without a library call for the sizes of scalars, which most taps send.
inline void CopyArray(uint8_t* to, const void* from, uint64_t nbytes) {
  if (nbytes == 4) {
    std::memcpy(to, from, 4);
  } else if (nbytes == 8) {
    std::memcpy(to, from, 8);
  } else {
    std::memcpy(to, from, nbytes);
  }
}

struct DeviceTap;

// The content of a frame, without the fields that its ring assigns (seq and position).
struct Emission {
  const uint8_t* prefix;  // header with consumer id, flags and meta_bytes, then metadata padded to 64
  uint64_t prefix_bytes;
  const ArrayRef* arrays;
  size_t array_count;
  uint64_t payload_bytes;  // PayloadBytes(arrays, array_count)
  int64_t time_ns;
  int64_t run_id;
  int32_t device;
  const DeviceTap* from_device;  // for arrays in a GPU's memory; null if they are in the host's
};

// Whether `prefix` is a header followed by exactly the padded metadata that the header announces.
bool ValidPrefix(const uint8_t* prefix, uint64_t prefix_bytes);

// The start of an array in a payload if the previous one ends at `end`.
uint64_t ArrayStart(uint64_t end, uint64_t nbytes);

// The exact payload length: with the gaps between arrays, without padding after the last one.
uint64_t PayloadBytes(const ArrayRef* arrays, size_t count);

// Writes the complete header, with `flags` added to the message flags of the prefix. Returns the resulting
// flags.
uint32_t WriteHeader(const Emission& emission, uint64_t seq, uint64_t position, uint32_t flags,
                     FrameHeader* out);

// Copies the metadata, which follows the header. Returns the start of the payload.
uint8_t* WriteMetadata(const Emission& emission, uint8_t* after_header);

// Copies the arrays to `out`, zeroing the gaps between them. Returns the payload's length.
uint64_t WritePayload(const Emission& emission, uint8_t* out);

// Writes everything after the header of a frame with an inline payload, tail padding included.
void WriteInlineBody(const Emission& emission, uint8_t* after_header);

}  // namespace hcb

#endif  // HOSTCALLBACK_WIRE_ENCODE_H_

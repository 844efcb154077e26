// The checksums of a tap log's pages.
#ifndef HOSTCALLBACK_CHECKSUMS_H_
#define HOSTCALLBACK_CHECKSUMS_H_

#include <cstdint>

namespace hcb {

// The CRC-32 of zlib of each page of `data`; the last page may be shorter. False where this processor has no instructions that make it
// faster than zlib's: nothing is written then. Any thread.
bool PageChecksums(const uint8_t* data, uint64_t nbytes, uint64_t page_bytes, uint32_t* checksums);

}  // namespace hcb

#endif  // HOSTCALLBACK_CHECKSUMS_H_

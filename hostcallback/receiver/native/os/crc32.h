// The checksums of a tap log's pages.
#ifndef HOSTCALLBACK_OS_CRC32_H_
#define HOSTCALLBACK_OS_CRC32_H_

#include <cstdint>

namespace hcb {

// Computes zlib's CRC-32 of each page of `data`; the last page may be shorter. False if this processor has no
// instructions that are faster than zlib: then nothing is written. Any thread.
bool PageChecksums(const uint8_t* data, uint64_t nbytes, uint64_t page_bytes, uint32_t* checksums);

}  // namespace hcb

#endif  // HOSTCALLBACK_OS_CRC32_H_

// Reads the messages of one batch as columns, and stacks the payloads of alike ones, so that Python makes arrays of
// many messages at a time.
#ifndef HOSTCALLBACK_WIRE_COLUMNS_H_
#define HOSTCALLBACK_WIRE_COLUMNS_H_

#include <cstdint>

#include "abi/types.h"

namespace hcb {

void ReadColumns(const uint8_t* memory, const hcb_batch& batch, hcb_columns* columns);

// Copies the payloads of `count` messages, from index `from` of `columns.order` on, to `out`, `stride` bytes apart.
void CopyStack(const uint8_t* memory, const hcb_batch& batch, const hcb_columns& columns, uint64_t from, uint64_t count,
               uint64_t stride, uint8_t* out);

}  // namespace hcb

#endif  // HOSTCALLBACK_WIRE_COLUMNS_H_

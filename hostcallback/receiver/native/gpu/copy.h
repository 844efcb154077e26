// A copy from a GPU's memory into a reserved frame: the handler starts it, the reader commits the frame.
#ifndef HOSTCALLBACK_GPU_COPY_H_
#define HOSTCALLBACK_GPU_COPY_H_

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "abi/types.h"

namespace hcb {

// How a ring must treat an emission whose arrays are in a GPU's memory. The handler leaves some decisions to
// the reader, because the host can look at the arrays only after the copy.
struct DeviceTap {
  void* stream;
  bool check;            // nothing is sent if the whole predicate holds
  bool ends_launch;      // if the check fails, nothing else of the launch runs
  uint32_t predicate;    // index of the predicate's array
  bool off;              // nothing is sent, but a failure is counted
  uint32_t host_arrays;  // the first `host_arrays` arrays are in the host's memory
  bool sharded;          // the first array is a shard record, whose occurrence must be filled in
  int64_t occurrence;    // -1: counted only if the check fails
};

struct DeviceCopy {
  uint64_t position;
  uint32_t committed_flags;
  bool external;
  DeviceTap tap;
  uint8_t* payload = nullptr;
  uint64_t predicate_start = 0;
  uint64_t predicate_bytes = 0;
  std::vector<std::pair<uint64_t, uint8_t>> masks;  // bytes that elements fill only in part: offset and mask
  // The handler's thread writes the rest until `started` is set, the reader afterwards.
  void* event = nullptr;  // recorded after the copies in the stream
  // the device may write into the frame until the event, or else the whole stream, has completed
  bool on_the_way = false;
  int error = 0;  // of the driver
  hcb_copy_step failed = HCB_COPY_INTACT;
  bool started = false;  // written with the ring's lock
};

}  // namespace hcb

#endif  // HOSTCALLBACK_GPU_COPY_H_

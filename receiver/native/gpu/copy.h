// A copy from a GPU's memory into a frame that is reserved already: from the handler that starts it to the reader that commits it.
#ifndef HOSTCALLBACK_DEVICE_COPY_H_
#define HOSTCALLBACK_DEVICE_COPY_H_

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "abi/c_abi.h"

namespace hcb {

// What a ring has to know of an emission whose arrays are in a GPU's memory, and what its handler leaves to the reader, since
// only after the copy anybody can look at the arrays.
struct DeviceTap {
  void* stream;
  bool check;           // nothing is sent if all of its predicate holds
  bool ends_launch;     // nothing else of the launch runs if it fails
  uint32_t predicate;   // number of that array
  bool off;             // nothing is sent, but a failure is counted
  uint32_t host_arrays; // so many of the first arrays are in the host's memory
  bool sharded;         // the first array is a shard record, in which the occurrence is filled in
  int64_t occurrence;   // -1: counted when a check has failed
};

struct DeviceCopy {
  uint64_t position;
  uint32_t committed_flags;
  bool external;
  DeviceTap tap;
  uint8_t* payload = nullptr;
  uint64_t predicate_start = 0;
  uint64_t predicate_bytes = 0;
  std::vector<std::pair<uint64_t, uint8_t>> masks;  // of bytes that are elements only in part
  // The rest is written by the handler's thread up to `started`, and by the reader after it.
  void* event = nullptr;  // behind the copies in the stream
  bool on_the_way = false;  // the device may write into the frame, until the event or else the whole stream is through
  int error = 0;            // of the driver
  hcb_copy_step failed = HCB_COPY_INTACT;
  bool started = false;  // with the ring's lock
};

}  // namespace hcb

#endif  // HOSTCALLBACK_DEVICE_COPY_H_

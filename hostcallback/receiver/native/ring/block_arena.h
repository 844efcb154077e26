// Payload blocks in a ring's file, from which the undelivered payloads of a killed process can be read.
#ifndef HOSTCALLBACK_RING_BLOCK_ARENA_H_
#define HOSTCALLBACK_RING_BLOCK_ARENA_H_

#include <cstdint>
#include <map>
#include <mutex>

#include "wire/frame.h"

namespace hcb {

// Precedes each block. A freed block keeps its record and contents until its memory is used again.
struct ArenaRecord {
  char magic[8];
  uint64_t position;  // of the frame in the ring
  uint64_t nbytes;    // of the payload, which starts kArenaPayload bytes after the start of this record
  uint64_t zeros[5];
};
static_assert(sizeof(ArenaRecord) == kFrameAlign, "one line");

constexpr uint64_t kArenaPayload = 128;  // the record is followed by the process's own header of the block
constexpr char kArenaMagic[8] = {'H', 'C', 'B', 'B', 'L', 'O', 'K', '\n'};

// Thread-safe. The oldest memory is used first.
class BlockArena {
 public:
  // `memory` must be zeroed; `offset` is its offset in the file.
  BlockArena(uint8_t* memory, uint64_t nbytes, uint64_t offset);

  // Returns memory for a record and a payload of `nbytes`; null if there is no room.
  uint8_t* Allocate(uint64_t nbytes);
  // Writes the record, after the payload has been written.
  static void Mark(uint8_t* block, uint64_t position, uint64_t nbytes);
  void Free(uint8_t* block);
  uint64_t FileOffset(const uint8_t* block) const { return offset_ + static_cast<uint64_t>(block - memory_); }

  // In a forked child: replaces the memory that is shared with the parent by a private copy.
  void ResetAfterFork();

 private:
  struct Extent {
    uint64_t nbytes;
    bool used;
  };

  uint8_t* const memory_;
  const uint64_t nbytes_;
  const uint64_t offset_;
  bool inherited_ = false;  // from the parent of a forked child; written before the child has threads
  std::mutex mutex_;        // protects everything below
  std::map<uint64_t, Extent> extents_;  // by offset; they cover all of the memory
  uint64_t next_ = 0;                   // offset at which the next search starts
};

}  // namespace hcb

#endif  // HOSTCALLBACK_RING_BLOCK_ARENA_H_

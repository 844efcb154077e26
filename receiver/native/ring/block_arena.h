// Payload blocks in a ring's file, so that what a process had not delivered when it was killed can be read there.
#ifndef HOSTCALLBACK_BLOCK_ARENA_H_
#define HOSTCALLBACK_BLOCK_ARENA_H_

#include <cstdint>
#include <map>
#include <mutex>

#include "wire/frame.h"

namespace hcb {

// Lies in front of each block. A block that is given back keeps its contents, and its record, until its memory is used again.
struct ArenaRecord {
  char magic[8];
  uint64_t position;  // of the frame in the ring
  uint64_t nbytes;    // of the payload, which begins kArenaPayload bytes behind this record's start
  uint64_t zeros[5];
};
static_assert(sizeof(ArenaRecord) == kFrameAlign, "one line");

constexpr uint64_t kArenaPayload = 128;  // behind the record lies what the process itself notes of a block
constexpr char kArenaMagic[8] = {'H', 'C', 'B', 'B', 'L', 'O', 'K', '\n'};

// Thread-safe. The oldest memory is used first.
class BlockArena {
 public:
  // `memory` is zeroed, `offset` is where it lies in its file.
  BlockArena(uint8_t* memory, uint64_t nbytes, uint64_t offset);

  // Memory for a record and a payload of `nbytes`, which begin at what is returned; null if there is no room.
  uint8_t* Allocate(uint64_t nbytes);
  // Writes the record, once the payload is there.
  static void Mark(uint8_t* block, uint64_t position, uint64_t nbytes);
  void Free(uint8_t* block);
  uint64_t FileOffset(const uint8_t* block) const { return offset_ + static_cast<uint64_t>(block - memory_); }

  // In a forked child: a copy of its own in the place of the memory that it shares with its parent.
  void ResetAfterFork();

 private:
  struct Extent {
    uint64_t nbytes;
    bool used;
  };

  uint8_t* const memory_;
  const uint64_t nbytes_;
  const uint64_t offset_;
  bool inherited_ = false;  // by a forked child, written before it has threads
  std::mutex mutex_;  // protects everything below
  std::map<uint64_t, Extent> extents_;  // by offset; they cover all of the memory
  uint64_t next_ = 0;                   // where to look first
};

}  // namespace hcb

#endif  // HOSTCALLBACK_BLOCK_ARENA_H_

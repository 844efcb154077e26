#include "ring/block_arena.h"

#include <sys/mman.h>

#include <atomic>
#include <cstring>
#include <new>

namespace hcb {

BlockArena::BlockArena(uint8_t* memory, uint64_t nbytes, uint64_t offset)
    : memory_(memory), nbytes_(nbytes), offset_(offset) {
  extents_[0] = {nbytes, false};
}

uint8_t* BlockArena::Allocate(uint64_t nbytes) {
  if (nbytes > nbytes_) return nullptr;
  const uint64_t need = kArenaPayload + AlignUp(nbytes, kFrameAlign);
  std::lock_guard<std::mutex> lock(mutex_);
  auto first = extents_.lower_bound(next_);
  if (first == extents_.end()) first = extents_.begin();
  auto run = first;  // start of a run of free extents
  uint64_t found = 0;
  auto at = first;
  for (size_t seen = 0; seen < 2 * extents_.size() && found < need; ++seen) {
    if (at == extents_.end()) {  // a block cannot wrap from the end to the start
      at = extents_.begin();
      found = 0;
    }
    if (at->second.used) {
      found = 0;
    } else {
      if (found == 0) run = at;
      found += at->second.nbytes;
    }
    ++at;
  }
  if (found < need) return nullptr;
  const uint64_t start = run->first;
  // Clear the old records first: a record must not vouch for memory that is being written to.
  for (auto it = run; it != at; it = extents_.erase(it))
    std::memset(memory_ + it->first, 0, sizeof(ArenaRecord::magic));
  // The clearing reaches the file before any new bytes do: the process may be killed at any instruction, and
  // recovery trusts records.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  extents_[start] = {need, true};
  if (found != need) {
    extents_[start + need] = {found - need, false};
    std::memset(memory_ + start + need, 0, sizeof(ArenaRecord::magic));
  }
  next_ = start + need;
  return memory_ + start;
}

void BlockArena::Mark(uint8_t* block, uint64_t position, uint64_t nbytes) {
  ArenaRecord record = {};
  record.position = position;
  record.nbytes = nbytes;
  std::memcpy(block, &record, sizeof(record));
  // The magic bytes come last: recovery takes a record with them for complete.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  std::memcpy(block, kArenaMagic, sizeof(kArenaMagic));
}

void BlockArena::Free(uint8_t* block) {
  if (inherited_) return;
  std::lock_guard<std::mutex> lock(mutex_);
  extents_[static_cast<uint64_t>(block - memory_)].used = false;
}

void BlockArena::ResetAfterFork() {
  // another thread of the parent may have been changing the map: nothing is allocated here any more
  inherited_ = true;
  void* copy = mmap(nullptr, nbytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (copy == MAP_FAILED) return;
  std::memcpy(copy, memory_, nbytes_);
  if (mmap(memory_, nbytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) !=
      MAP_FAILED) {
    std::memcpy(memory_, copy, nbytes_);
  }
  munmap(copy, nbytes_);
}

}  // namespace hcb

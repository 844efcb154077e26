#include "block_pool.h"

#include <sys/mman.h>

#include <new>

#include "frame.h"

namespace hcb {

// Blocks of so many bytes are of huge pages where the system has them, as numpy's arrays are: filling such a block for the first time
// takes a page fault for each 2 MiB instead of each 4 KiB, which is half of the time that it takes.
constexpr uint64_t kHugeFrom = 4 << 20;
constexpr uint64_t kHugePage = 2 << 20;

// Lies right in front of the memory that is handed out.
struct alignas(kFrameAlign) BlockPool::Block {
  BlockPool* owner;
  uint64_t capacity;  // bytes behind this header
  void* mapping;
  uint64_t mapped;

  void* memory() { return this + 1; }
  static Block* Of(void* memory) { return static_cast<Block*>(memory) - 1; }
};

void BlockPool::Unmap(Block* block) {
  if (block != nullptr) munmap(block->mapping, block->mapped);
}

BlockPool::Block* BlockPool::TakeLocked(size_t slot) {
  Block* block = stock_[slot];
  stock_[slot] = nullptr;
  if (block != nullptr) stock_bytes_ -= block->capacity;
  return block;
}

void BlockPool::SetStockLimit(uint64_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  stock_limit_ = bytes;
  for (size_t i = 0; i < kStockSlots && stock_bytes_ > stock_limit_; ++i) Unmap(TakeLocked(i));
}

void* BlockPool::Allocate(uint64_t nbytes) {
  const uint64_t capacity = AlignUp(nbytes, kFrameAlign);
  Block* unused;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    size_t best = kStockSlots;
    for (size_t i = 0; i < kStockSlots; ++i) {
      const Block* block = stock_[i];
      // A block of twice the size would waste memory that the budget does not see.
      if (block == nullptr || block->capacity < capacity || block->capacity / 2 > capacity) continue;
      if (best == kStockSlots || block->capacity < stock_[best]->capacity) best = i;
    }
    if (best != kStockSlots) return TakeLocked(best)->memory();
    // Nothing fits: let the oldest go, so that a stock of other sizes does not add up with what is mapped now.
    unused = TakeLocked(next_slot_);
  }
  Unmap(unused);
  // Not malloc: its aligned blocks of this size leave gaps that the next one of the same size does not fit into.
  if (capacity > SIZE_MAX / 2) return nullptr;
  const bool huge = capacity >= kHugeFrom;
  const uint64_t mapped = sizeof(Block) + capacity + (huge ? kHugePage : 0);
  void* mapping = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping == MAP_FAILED) return nullptr;
  uint8_t* raw = static_cast<uint8_t*>(mapping);
  if (huge) {
    // The header goes to the end of a page of its own, so that what is handed out begins with a huge one.
    const uint64_t address = reinterpret_cast<uint64_t>(mapping);
    raw += AlignUp(address + sizeof(Block), kHugePage) - sizeof(Block) - address;
#ifdef MADV_HUGEPAGE
    madvise(raw + sizeof(Block), capacity, MADV_HUGEPAGE);
#endif
  }
  return (new (raw) Block{this, capacity, mapping, mapped})->memory();
}

void BlockPool::Free(void* memory) {
  if (memory == nullptr) return;
  Block* block = Block::Of(memory);
  block->owner->Return(block);
}

void BlockPool::Return(Block* block) {
  Block* oldest;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    // The oldest makes way: a stock of sizes that nobody asks for any more would be of no use.
    oldest = TakeLocked(next_slot_);
    if (stock_bytes_ + block->capacity <= stock_limit_) {
      stock_[next_slot_] = block;
      stock_bytes_ += block->capacity;
      block = nullptr;
    }
    next_slot_ = (next_slot_ + 1) % kStockSlots;
  }
  // Outside the lock: unmapping a large block takes long.
  Unmap(oldest);
  Unmap(block);
}

void BlockPool::ResetAfterFork() {
  new (&mutex_) std::mutex;  // the parent's other threads may have held it
  // A block that another thread was moving in or out may be half-listed: forget them (the pages are shared, copy on write).
  for (Block*& slot : stock_) slot = nullptr;
  stock_bytes_ = 0;
  next_slot_ = 0;
}

}  // namespace hcb

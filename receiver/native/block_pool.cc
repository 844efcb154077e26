#include "block_pool.h"

#include <cstdlib>
#include <new>

#include "frame.h"

namespace hcb {

// Lies right in front of the memory that is handed out.
struct alignas(kFrameAlign) BlockPool::Block {
  BlockPool* owner;
  uint64_t capacity;  // bytes behind this header

  void* memory() { return this + 1; }
  static Block* Of(void* memory) { return static_cast<Block*>(memory) - 1; }
};

void BlockPool::SetStockLimit(uint64_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  stock_limit_ = bytes;
  for (Block*& slot : stock_) {
    if (slot == nullptr || stock_bytes_ <= stock_limit_) continue;
    stock_bytes_ -= slot->capacity;
    std::free(slot);
    slot = nullptr;
  }
}

void* BlockPool::Allocate(uint64_t nbytes) {
  const uint64_t capacity = AlignUp(nbytes, kFrameAlign);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    Block** best = nullptr;
    for (Block*& slot : stock_) {
      // A block of twice the size would waste memory that the budget does not see.
      if (slot == nullptr || slot->capacity < capacity || slot->capacity / 2 > capacity) continue;
      if (best == nullptr || slot->capacity < (*best)->capacity) best = &slot;
    }
    if (best != nullptr) {
      Block* block = *best;
      *best = nullptr;
      stock_bytes_ -= block->capacity;
      return block->memory();
    }
  }
  if (capacity > SIZE_MAX - sizeof(Block)) return nullptr;
  void* raw = nullptr;
  if (posix_memalign(&raw, kFrameAlign, sizeof(Block) + capacity) != 0) return nullptr;
  return (new (raw) Block{this, capacity})->memory();
}

void BlockPool::Free(void* memory) {
  if (memory == nullptr) return;
  Block* block = Block::Of(memory);
  block->owner->Return(block);
}

void BlockPool::Return(Block* block) {
  Block* surplus[2];
  size_t surplus_count = 0;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    Block*& slot = stock_[next_slot_];
    next_slot_ = (next_slot_ + 1) % kStockSlots;
    // The oldest makes way: a stock of sizes that nobody asks for any more would be of no use.
    if (slot != nullptr) {
      stock_bytes_ -= slot->capacity;
      surplus[surplus_count++] = slot;
      slot = nullptr;
    }
    if (stock_bytes_ + block->capacity <= stock_limit_) {
      slot = block;
      stock_bytes_ += block->capacity;
    } else {
      surplus[surplus_count++] = block;
    }
  }
  // Outside the lock: unmapping a large block takes long.
  for (size_t i = 0; i < surplus_count; ++i) std::free(surplus[i]);
}

void BlockPool::ResetAfterFork() {
  new (&mutex_) std::mutex;  // the parent's other threads may have held it
  // A block that another thread was moving in or out may be half-listed: forget them (the pages are shared, copy on write).
  for (Block*& slot : stock_) slot = nullptr;
  stock_bytes_ = 0;
  next_slot_ = 0;
}

}  // namespace hcb

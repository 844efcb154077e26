#include "ring/block_pool.h"

#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <new>

#include "abi/exports.h"
#include "gpu/driver.h"
#include "ring/block_arena.h"
#include "wire/frame.h"

namespace hcb {
namespace {

// Pinned blocks are shared memory: a fork makes private memory copy-on-write, and then the device would copy
// into the old pages while the process reads the new ones. A block that a child may read too is not used
// again.
std::atomic<uint32_t> forks{0};

void CountForks() {
  static const int done =
      pthread_atfork([] { forks.fetch_add(1, std::memory_order_relaxed); }, nullptr, nullptr);
  (void)done;
}

}  // namespace

// Blocks of at least this size use huge pages if the system has them, as numpy's arrays do: the first write
// to such a block then faults once per 2 MiB instead of once per 4 KiB, which saves half of the time.
constexpr uint64_t kHugeFrom = 4 << 20;
constexpr uint64_t kHugePage = 2 << 20;

// Precedes the memory that is handed out.
struct alignas(kFrameAlign) BlockPool::Block {
  BlockPool* owner;
  uint64_t capacity;  // bytes after this header
  void* mapping;
  uint64_t mapped;
  GpuDevice* pinned_for;  // null: not pinned
  BlockArena* arena;      // the block's arena, or null
  bool shared;            // shared memory, which was made to be pinned
  uint32_t forks;         // number of forks before it was made
  Block* next = nullptr;  // among those to be unmapped

  void* memory() { return this + 1; }
  static Block* Of(void* memory) { return static_cast<Block*>(memory) - 1; }
};
static_assert(sizeof(ArenaRecord) + kFrameAlign == kArenaPayload, "a record and a block's header");

void BlockPool::Unmap(Block* block) {
  if (block == nullptr) return;
  // The driver still considers this memory pinned, so it must stay mapped, unless the parent pinned it, which
  // has its own mapping.
  const bool inherited = block->pinned_for != nullptr && block->owner->device_.load() == nullptr;
  if (block->pinned_for != nullptr && !inherited && !block->pinned_for->Unpin(block)) return;
  munmap(block->mapping, block->mapped);
}

BlockPool::Block* BlockPool::TakeLocked(size_t place) {
  Block* block = stock_[place];
  std::copy(stock_ + place + 1, stock_ + stocked_, stock_ + place);
  stock_bytes_ -= block->capacity;
  fewest_ = std::min(fewest_, --stocked_);
  return block;
}

void BlockPool::SetStockLimit(uint64_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  stock_limit_ = bytes;
  while (stock_bytes_ > stock_limit_) Unmap(TakeLocked(0));
}

void BlockPool::PinFor(GpuDevice* device) {
  CountForks();
  std::lock_guard<std::mutex> lock(mutex_);
  device_ = device;
  while (stocked_ > 0) Unmap(TakeLocked(0));
}

bool BlockPool::IsPinned(void* block) { return Block::Of(block)->pinned_for != nullptr; }

void* BlockPool::AllocateIn(BlockArena* arena, uint64_t nbytes) {
  uint8_t* start = arena->Allocate(nbytes);
  if (start == nullptr) return nullptr;
  return (new (start + sizeof(ArenaRecord)) Block{this, nbytes, start, 0, nullptr, arena, false, 0})
      ->memory();
}

uint64_t BlockPool::Mark(void* memory, uint64_t position, uint64_t nbytes) {
  Block* block = Block::Of(memory);
  if (block->arena == nullptr) return 0;
  uint8_t* start = static_cast<uint8_t*>(block->mapping);
  BlockArena::Mark(start, position, nbytes);
  return block->arena->FileOffset(start);
}

void* BlockPool::Allocate(uint64_t nbytes) {
  BlockArena* arena = arena_.load(std::memory_order_acquire);
  // blocks for a device need pinned memory, which the arena is not
  if (arena != nullptr && device_.load() == nullptr) {
    if (void* memory = AllocateIn(arena, nbytes)) return memory;
  }
  const uint64_t capacity = AlignUp(nbytes, kFrameAlign);
  GpuDevice* device;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    device = device_.load();
    size_t best = stocked_;
    for (size_t i = stocked_; i-- > 0 && (best == stocked_ || stock_[best]->capacity != capacity);) {
      const Block* block = stock_[i];
      // A block of more than twice the size would waste memory that the budget does not count.
      if (block->capacity < capacity || block->capacity / 2 > capacity || !MayStay(block)) continue;
      if (best == stocked_ || block->capacity < stock_[best]->capacity) best = i;
    }
    if (best != stocked_) return TakeLocked(best)->memory();
  }
  // Not malloc: its aligned blocks of this size leave gaps that the next block of the same size does not fit
  // into.
  if (capacity > SIZE_MAX / 2) return nullptr;
  const bool huge = device == nullptr && capacity >= kHugeFrom;
  const uint64_t mapped = sizeof(Block) + capacity + (huge ? kHugePage : 0);
  const int sharing = device != nullptr ? MAP_SHARED : MAP_PRIVATE;
  void* mapping = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, sharing | MAP_ANONYMOUS, -1, 0);
  if (mapping == MAP_FAILED) return nullptr;
  uint8_t* raw = static_cast<uint8_t*>(mapping);
  if (huge) {
    // The header is at the end of a separate page, so that the memory after it starts with a huge page.
    const uint64_t address = reinterpret_cast<uint64_t>(mapping);
    raw += AlignUp(address + sizeof(Block), kHugePage) - sizeof(Block) - address;
#ifdef MADV_HUGEPAGE
    madvise(raw + sizeof(Block), capacity, MADV_HUGEPAGE);
#endif
  }
  Block* block = new (raw) Block{this,    capacity, mapping,           mapped,
                                 nullptr, nullptr,  device != nullptr, forks.load(std::memory_order_relaxed)};
  if (device != nullptr && device->Pin(raw, mapped)) block->pinned_for = device;
  return block->memory();
}

// Whether the block may be handed out again.
bool BlockPool::MayStay(const Block* block) const {
  if (!block->shared) return true;
  return block->pinned_for != nullptr && block->forks == forks.load(std::memory_order_relaxed);
}

void BlockPool::Free(void* memory) {
  if (memory == nullptr) return;
  Block* block = Block::Of(memory);
  block->owner->Return(block);
}

void BlockPool::Return(Block* block) {
  if (block->arena != nullptr) {
    block->arena->Free(static_cast<uint8_t*>(block->mapping));
    return;
  }
  Block* unneeded = nullptr;
  const auto drop = [&unneeded](Block* one) {
    one->next = unneeded;
    unneeded = one;
  };
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (++returns_ == kTrimAfter) {
      surplus_ = (fewest_ + 1) / 2;
      fewest_ = stocked_;
      returns_ = 0;
    }
    if (surplus_ > 0) {
      --surplus_;
      if (stocked_ > 0) drop(TakeLocked(0));
    }
    while (stocked_ > 0 && !MayStay(stock_[0])) drop(TakeLocked(0));
    if (MayStay(block) && block->capacity <= stock_limit_) {
      // The oldest make room: a stock of sizes that are not requested any more would be useless.
      while (stocked_ == kMaxStock || stock_bytes_ + block->capacity > stock_limit_) drop(TakeLocked(0));
      stock_[stocked_++] = block;
      stock_bytes_ += block->capacity;
    } else {
      drop(block);
    }
  }
  // Outside the lock: unmapping a large block takes long.
  while (unneeded != nullptr) {
    Block* next = unneeded->next;
    Unmap(unneeded);
    unneeded = next;
  }
}

void BlockPool::ResetAfterFork() {
  new (&mutex_) std::mutex;  // another thread of the parent may have held it
  // Another thread may have been moving a block, so the lists are inconsistent: forget the blocks (their
  // pages are copy-on-write).
  stocked_ = fewest_ = surplus_ = 0;
  stock_bytes_ = 0;
  returns_ = 0;
  device_ = nullptr;
  if (BlockArena* arena = arena_.exchange(nullptr)) arena->ResetAfterFork();
}

}  // namespace hcb

void hcb_block_free(void* memory) { hcb::BlockPool::Free(memory); }

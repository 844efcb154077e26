// Memory for payloads outside a ring, with a small stock so that repeated large taps do not page-fault.
#ifndef HOSTCALLBACK_RING_BLOCK_POOL_H_
#define HOSTCALLBACK_RING_BLOCK_POOL_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>

namespace hcb {

class BlockArena;
class GpuDevice;

// Thread-safe. A pool must outlive its blocks; rings, which own them, are never destroyed.
class BlockPool {
 public:
  // Limit of the stock in bytes; lowering it frees blocks.
  void SetStockLimit(uint64_t bytes);

  // Pins blocks that are allocated from now on, so that the device can copy into them asynchronously. Blocks
  // that cannot be pinned are handed out too.
  void PinFor(GpuDevice* device);
  static bool IsPinned(void* block);

  // Allocates from `arena` from now on, as long as it has room; null ends that.
  void UseArena(BlockArena* arena) { arena_.store(arena, std::memory_order_release); }
  // Records in the arena's file which frame a filled block belongs to. Returns the record's offset in the
  // file; 0 if the block is not in an arena.
  static uint64_t Mark(void* block, uint64_t position, uint64_t nbytes);

  // 64-byte aligned memory for `nbytes`; null if the system has none.
  void* Allocate(uint64_t nbytes);

  // Gives a block back to the pool that it came from. Any thread; null is ignored.
  static void Free(void* block);

  void ResetAfterFork();

 private:
  struct Block;
  // as many blocks as queue up while a reader rests; the bytes have their own limit
  static constexpr size_t kMaxStock = 256;
  // number of blocks given back after which half of those by which the stock was too large are freed
  static constexpr uint32_t kTrimAfter = 4096;

  void* AllocateIn(BlockArena* arena, uint64_t nbytes);
  void Return(Block* block);
  bool MayStay(const Block* block) const;
  Block* TakeLocked(size_t place);
  static void Unmap(Block* block);

  std::mutex mutex_;  // protects everything below
  // In the order in which they were given back; the last one is used first, since it may still be in a cache.
  Block* stock_[kMaxStock] = {};
  size_t stocked_ = 0;
  size_t fewest_ = 0;   // least number of blocks in the stock since `returns_` was 0
  size_t surplus_ = 0;  // blocks to free, one each time that one is given back
  uint32_t returns_ = 0;
  uint64_t stock_bytes_ = 0;
  uint64_t stock_limit_ = 0;
  std::atomic<GpuDevice*> device_{nullptr};  // written with the lock
  std::atomic<BlockArena*> arena_{nullptr};  // never destroyed: numpy arrays may use its blocks
};

}  // namespace hcb

#endif  // HOSTCALLBACK_RING_BLOCK_POOL_H_

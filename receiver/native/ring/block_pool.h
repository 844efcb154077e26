// Memory for payloads that travel outside a ring, with a small stock so that repeated big taps do not page-fault.
#ifndef HOSTCALLBACK_BLOCK_POOL_H_
#define HOSTCALLBACK_BLOCK_POOL_H_

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
  // Bytes that the stock may hold; lowering it frees what is too much.
  void SetStockLimit(uint64_t bytes);

  // Pins what is allocated from now on, so that the device can copy into it while the program goes on. Blocks that cannot be
  // pinned are handed out all the same.
  void PinFor(GpuDevice* device);
  static bool IsPinned(void* block);

  // Takes blocks from `arena`, as long as it has room, from now on; null ends that.
  void UseArena(BlockArena* arena) { arena_.store(arena, std::memory_order_release); }
  // Of a block that is filled: says in the arena's file which frame it belongs to. Returns where its record lies in the file; 0 if it
  // is not of an arena.
  static uint64_t Mark(void* block, uint64_t position, uint64_t nbytes);

  // 64-byte aligned memory for `nbytes`; null if the system has none.
  void* Allocate(uint64_t nbytes);

  // Gives a block back to the pool that it came from. Any thread; null is ignored.
  static void Free(void* block);

  void ResetAfterFork();

 private:
  struct Block;
  static constexpr size_t kStockSlots = 256;  // as many as a reader that rests falls behind; the bytes are limited apart

  void* AllocateIn(BlockArena* arena, uint64_t nbytes);
  void Return(Block* block);
  bool MayStay(const Block* block) const;
  Block* TakeLocked(size_t slot);
  static void Unmap(Block* block);

  std::mutex mutex_;  // protects everything below
  Block* stock_[kStockSlots] = {};
  size_t next_slot_ = 0;  // the next to be filled, hence the oldest when all are
  uint64_t stock_bytes_ = 0;
  uint64_t stock_limit_ = 0;
  std::atomic<GpuDevice*> device_{nullptr};  // written with the lock
  std::atomic<BlockArena*> arena_{nullptr};  // never destroyed: numpy has blocks of it
};

}  // namespace hcb

#endif  // HOSTCALLBACK_BLOCK_POOL_H_

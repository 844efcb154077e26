// One device's stream of frames: many producers, one reader, bounded memory.
//
// The protocol is the Linux BPF ring buffer's (kernel/bpf/ringbuf.c, Documentation/bpf/ringbuf.rst): a
// producer reserves under a short lock, where it takes a sequence number and writes a BUSY header before it
// publishes the new head; it copies without the lock and commits by clearing BUSY. The reader takes frames in
// order up to the first BUSY one and is woken only if it sleeps. Positions count bytes and never wrap; a
// frame lies at `position % capacity` and never crosses the end.
//
// An emission that finds no room is dropped or waits, as the policy says. Waiting emissions form one queue
// per ring, in order. The reader admits them as it releases room: it copies them, and a thread made for that
// tells their producers. While an emission waits, its producer's thread is free if the emission can be
// completed later.
//
// A GPU copies into frames that stay BUSY until its event has completed: the reader queries it, and commits
// (ring/gpu_copies.cc).
#ifndef HOSTCALLBACK_RING_RING_H_
#define HOSTCALLBACK_RING_RING_H_

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "abi/types.h"
#include "gpu/copy.h"
#include "gpu/driver.h"
#include "ring/block_pool.h"
#include "ring/call_table.h"
#include "ring/completer.h"
#include "ring/file.h"
#include "wire/encode.h"
#include "wire/frame.h"

namespace hcb {

// Asks the producer for a completion when its emission must wait. Null: the calling thread waits.
class CompletionFactory {
 public:
  virtual ~CompletionFactory() = default;
  virtual std::unique_ptr<Completion> Make() = 0;
};

enum class Verdict {
  kEmitted,
  kDropped,   // by the policy, or because the system has no memory; counted
  kPending,   // queued; the completion tells when it is in the ring
  kTooLarge,  // can never fit: its metadata exceeds half of the ring
};

class Ring {
 public:
  // Maps `config.capacity_bytes`; Make returns null if the system has no memory for it.
  static std::unique_ptr<Ring> Make(int32_t device, const hcb_config& config);
  ~Ring();
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  // Producers: any thread.
  Verdict Emit(const Emission& emission, CompletionFactory* completions);
  // Appends the emission after those that wait, regardless of the policy. Never waits. `call` is entered into
  // the table of calls under the frame's sequence number. The emission must fit.
  Verdict Append(const Emission& emission, std::unique_ptr<PendingCall> call = nullptr);
  // The same; `owner` is completed when what the emission points to is not needed any more.
  Verdict AppendOwned(const Emission& emission, std::unique_ptr<Completion> owner);
  bool SomebodyWaits() const { return waiting_.load(std::memory_order_seq_cst) != 0; }

  // Makes the ring that of a GPU, once: emissions `from_device` need it. Returns 0, or the driver's error.
  int UseGpu(int ordinal);
  // Counts a message that was lost before it had a place in the ring.
  void Lose(hcb_copy_step step, int error);
  // Whether the ring can ever hold the emission's frame.
  bool Fits(const Emission& emission) const;

  // The reader: one thread at a time. Read returns the number of frames; 0: timeout, woken, or
  // `batch->damage` is set. Threads that wait in ReadCall get the calls, as long as there are any.
  uint32_t Read(int64_t timeout_ns, hcb_batch* batch);
  bool Release(uint64_t position, uint64_t frames);  // returns whether emissions wait for room
  void AdmitWaiters();

  // For threads that run host functions: waits for a call that is the next frame, until the reader has
  // delivered all frames before it and waits in Read. Takes it: 1, or 0 if the time is over. The reader
  // pauses until EndReadCall.
  uint32_t ReadCall(int64_t timeout_ns, hcb_call_frame* frame);
  void EndReadCall();

  // For the thread that waits for a call and takes its frame itself: see hcb_own_call_read.
  int32_t ReadOwnCall(const void* owner, int64_t timeout_ns, hcb_call_frame* frame);
  // Ends a turn that its owner has not ended, and releases the frame that it took.
  void LeaveOwnTurn(const void* owner);
  // Takes the owner's call out of the table, if its frame is written and no thread has taken it.
  std::unique_ptr<PendingCall> WithdrawOwnCall(const void* owner);
  // Runs host functions on threads of the host; null if they run elsewhere.
  hcb_host_call host_call() const { return host_call_.load(std::memory_order_acquire); }
  void SetHostCall(hcb_host_call call) { host_call_.store(call, std::memory_order_release); }

  // Copies frames that the reader has not taken yet, with their payloads behind them, without taking them.
  // Any thread, while the reader delivers what it took. From `*position` on, or from the reader's position if
  // that is further; moves `*position` behind the last one. Stops before a frame that is being written, is
  // damaged, or ends a stream. Returns the number of frames; 0 with `*needed` set: the next one alone needs
  // that many bytes.
  uint32_t CopyAhead(uint64_t* position, uint8_t* out, uint64_t capacity, uint64_t* offsets, uint32_t most,
                     uint64_t* needed);

  // Any thread.
  void Wake();
  // Whether all frames before `position` have been delivered. Does not wait.
  bool IsDelivered(uint64_t position);
  // The position up to which frames have been delivered or are being delivered.
  uint64_t BeingDelivered();
  // Whether the reader's thread has emitted since it began to deliver what it holds: it runs a program of a
  // tap function.
  bool ReaderEmits() const { return reader_emits_.load(std::memory_order_relaxed); }
  // The system's number of the reader's thread while it delivers, else 0.
  int32_t DeliveringThread() const { return delivering_thread_.load(std::memory_order_relaxed); }
  void Configure(const hcb_config& config);
  void ReadCounters(hcb_counters* out);
  // The position behind the last reserved frame, without the lock.
  uint64_t head() const { return control_->head.load(std::memory_order_acquire); }
  uint64_t discarded() const {
    return given_back_.load(std::memory_order_acquire) + overwritten_.load(std::memory_order_acquire);
  }
  void ResetAfterFork();

  // Moves the ring's memory and its contents into a new file, and later payload blocks into an arena of
  // `blocks_bytes` in the same file: both remain if the process is killed. Once. Returns 0 or an errno.
  int KeepInFile(const char* path, const char* name, uint64_t blocks_bytes);

  GpuDevice* gpu() const { return gpu_.load(std::memory_order_acquire); }
  int32_t device() const { return device_; }
  // The device number in the frames' headers; by default the same.
  int32_t device_id() const { return device_id_.load(std::memory_order_relaxed); }
  void SetDeviceId(int32_t id);
  uint8_t* memory() const { return memory_; }
  uint64_t capacity() const { return capacity_; }

 private:
  // Notes, if the calling thread is a reader, that its tap function runs a program.
  static void NoteEmissionOfReader();

  // The place of an emission in the ring.
  struct Reservation {
    FrameHeader* frame;
    uint64_t position;
    uint32_t committed_flags;
    bool external;
    DeviceCopy* copy = nullptr;  // of an emission `from_device`
  };

  // A queued emission: of a waiting thread, or to be copied by the thread that admits it.
  struct Waiter {
    Emission emission;
    Reservation reservation = {};
    bool admitted = false;
    std::condition_variable* thread = nullptr;
    std::unique_ptr<Completion> completion;
    std::unique_ptr<PendingCall> call;
    // Copies of the emission's prefix and array list, because the producer may have continued. The arrays'
    // data stays the producer's.
    std::vector<uint8_t> prefix;
    std::vector<ArrayRef> arrays;
  };

  // A payload outside the ring whose frame the reader has not taken yet.
  struct OutstandingBlock {
    uint64_t position;
    uint64_t nbytes;
    void* memory;  // null while its producer still copies
  };

  Ring(int32_t device, const hcb_config& config, uint8_t* base);

  // producer.cc. "Locked" functions need `mutex_`.
  bool GoesOutside(const Emission& emission) const;
  bool KeepSampleLocked();
  bool ReserveLocked(const Emission& emission, Reservation* reservation);
  Verdict DropLocked();
  bool OverwriteFor(const Emission& emission, Reservation* reservation);
  enum class Overwriting {
    kDone,
    kBusy,        // the oldest frame is being written: try again
    kImpossible,  // the oldest frame must not be dropped, or there is none
  };
  Overwriting AdmitFirst();
  bool MayOverwriteLocked() const;
  Overwriting MakeRoomLocked(const Emission& emission);
  Overwriting OverwriteOldestLocked();
  bool MustAdmitLocked(const Waiter& waiter) const;
  // Aligned, because other processes can write into a ring in a file: wherever the head is, a frame stays
  // inside.
  uint64_t HeadLocked() const { return control_->head.load(std::memory_order_relaxed) & ~(kFrameAlign - 1); }
  uint64_t PadBefore(uint64_t position, uint64_t frame_bytes) const;
  // What an emission takes of the ring, and where.
  struct Room {
    bool external;  // its payload is in a block
    uint64_t frame_bytes;
    uint64_t position;  // where it begins, with the pad
    uint64_t pad;       // bytes before the frame that stay unused
  };
  bool FindRoomLocked(const Emission& emission, Room* room) const;
  Verdict CopyAndCommit(const Emission& emission, const Reservation& reservation);
  void Commit(FrameHeader* frame, uint32_t flags);
  Verdict WaitAsThread(std::unique_lock<std::mutex>* lock, const Emission& emission, int64_t timeout_ns);
  Verdict Enqueue(std::unique_lock<std::mutex>* lock, const Emission& emission,
                  std::unique_ptr<Completion> completion, std::unique_ptr<PendingCall> call);
  bool AdmitLocked(Waiter* waiter);
  void EnterQueueLocked(Waiter* waiter);

  // ring/gpu_copies.cc. From `CopyPending` on, for the reader only.
  DeviceCopy* BeginCopyLocked(const DeviceTap& tap, const Reservation& reservation);
  Verdict CopyFromDevice(const Emission& emission, const Reservation& reservation);
  void StartCopies(const Emission& emission, GpuDevice* gpu, DeviceCopy* copy);
  bool CopyPending() const { return oldest_copy_.load(std::memory_order_seq_cst) != kNoCopy; }
  void SettleCopies();
  void Settle(DeviceCopy* copy);
  void Discard(DeviceCopy* copy);
  uint64_t SettledHead() const;
  void Renumber(FrameHeader* header);
  bool ReportLost(hcb_batch* batch);

  // turns.cc
  using Clock = std::chrono::steady_clock;
  static Clock::time_point Deadline(int64_t timeout_ns);
  bool Readable() const;
  // Whether the payloads outside the ring have too many bytes for a rest of the reader.
  bool HasManyBlocks();
  bool TakeTurnLocked();
  void EndReaderTurn();
  bool WaitTurn(Clock::time_point deadline);
  bool MayRestLocked() const;
  void ExpectMore();
  void LengthenRest();
  void Rest(std::unique_lock<std::mutex>* lock, Clock::time_point end);
  void Sleep(std::unique_lock<std::mutex>* lock, Clock::time_point until);

  // call_reader.cc
  bool CallInFront() const;
  const void* OwnerInFront() const;
  bool TakeCall(hcb_call_frame* frame);

  // consumer.cc
  std::deque<OutstandingBlock>::iterator FindBlockLocked(uint64_t position);
  void DropBlockLocked(std::deque<OutstandingBlock>::iterator block);
  void Walk(hcb_batch* batch);
  void Enter(hcb_batch* batch, uint64_t* alike);
  const FrameHeader* HeaderAt(uint64_t offset) const {
    return reinterpret_cast<const FrameHeader*>(memory_ + offset);
  }
  hcb_damage Check(uint64_t position, uint64_t head) const;
  bool TakeBlock(uint64_t position, OutstandingBlock* block);
  const void* PayloadOf(uint64_t position);
  void CountReleased(uint64_t frames);
  void SkipDamage(uint64_t head, hcb_damage damage, hcb_batch* batch);
  uint64_t CountMessagesLocked(uint64_t from, bool* intact) const;
  void ReleaseSkipped(uint64_t from);

  // ring.cc
  void Initialize(RingControl* control) const;
  bool AllCommittedLocked() const;
  int MoveInto(RingFile* file, uint8_t* copy, const char* name, uint64_t blocks_bytes);
  void WakeReader();
  void WakeReaderLocked();  // with `sleep_mutex_`
  void AnnounceCall(uint64_t position);
  FrameHeader* At(uint64_t position) const {
    return reinterpret_cast<FrameHeader*>(memory_ + (position & (capacity_ - 1)));
  }

  static constexpr uint64_t kNoCopy = ~0ull;
  static constexpr auto kFirstPoll = std::chrono::microseconds(20);

  const int32_t device_;
  std::atomic<int32_t> device_id_;
  const uint64_t capacity_;  // a power of two
  const uint64_t external_threshold_;
  uint8_t* const base_;  // start of the control page, which the frames follow
  // the control page. The memory behind these pointers may be replaced, its contents stay
  RingControl* const control_;
  uint8_t* const memory_;
  BlockPool blocks_;
  bool in_file_ = false;                 // written with `mutex_`
  std::atomic<bool> overwrites_{false};  // whether the policy overwrites, readable without `mutex_`
  std::atomic<hcb_host_call> host_call_{nullptr};
  std::atomic<GpuDevice*> gpu_{nullptr};  // set once, with `mutex_`
  bool pinned_ = false;                   // written before `gpu_`

  std::mutex mutex_;  // protects the reservation side: everything down to the next comment of this kind
  hcb_config config_;
  uint64_t next_seq_ = 0;
  uint64_t emitted_ = 0;
  uint64_t dropped_ = 0;
  uint64_t emitted_bytes_ = 0;
  uint64_t sample_tick_ = 0;
  uint64_t outstanding_bytes_ = 0;
  std::deque<OutstandingBlock> outstanding_;
  std::deque<Waiter*> waiters_;    // in the order of their emission
  std::deque<DeviceCopy> copies_;  // copies that the reader has not settled, in the order of their frames
  uint64_t unpinned_ = 0;          // copies into memory that could not be pinned

  // Producers write these under `mutex_`, like control_->head, and the reader reads them without it. Separate
  // cache lines, because both sides poll them.
  alignas(64) std::atomic<uint32_t> waiting_{0};  // waiters_.size(), which the reader reads without the lock
  // position of the first of copies_; frames from there on are not readable yet
  std::atomic<uint64_t> oldest_copy_{kNoCopy};
  std::atomic<uint64_t> lost_{0};         // messages whose copies failed, and which have not been reported
  std::atomic<uint64_t> lost_reason_{0};  // of the last one: error and hcb_copy_step

  std::atomic<uint64_t> released_frames_here_{0};  // the reader's last value of control_->released_frames
  alignas(64) std::atomic<uint64_t> released_here_{0};  // the reader's last value of control_->released
  // accepted frames that turned out not to be messages: of a GPU's checks, and lost ones
  std::atomic<uint64_t> discarded_{0};
  std::atomic<uint64_t> given_back_{0};   // those before the cursor, whose sequence numbers are reused
  std::atomic<uint64_t> overwritten_{0};  // accepted frames before the cursor that were overwritten
  std::atomic<bool> walking_{false};      // whether the reader looks at frames
  // whether a batch is not released yet: then only the reader moves the cursor
  std::atomic<bool> holding_{false};
  // of the reader: time until its next query of a GPU's event
  std::chrono::steady_clock::duration poll_ = kFirstPoll;
  uint64_t cursor_ = 0;         // of the thread that holds a batch: the next position to look at
  uint64_t delivered_end_ = 0;  // of the reader: position after the batch that is being delivered
  uint64_t cursor_frames_ = 0;  // messages before the cursor, lost ones included
  std::chrono::steady_clock::duration rest_{};  // of the reader: how long it lets frames of a stream wait
  std::chrono::steady_clock::time_point stream_end_{};  // of the reader: until then more frames are expected
  bool reader_turn_ = false;                            // of the reader: whether it has the turn
  std::atomic<bool> reader_emits_{false};
  std::atomic<int32_t> delivering_thread_{0};

  // Values of control_->wake_from.
  static constexpr uint64_t kAsleep = 0;
  static constexpr uint64_t kAwake = ~0ull;
  // protects everything below, and `cursor_` while no thread has the turn
  alignas(64) std::mutex sleep_mutex_;
  std::condition_variable sleep_;         // of the reader
  std::condition_variable call_arrived_;  // of the threads in ReadCall
  std::condition_variable own_turn_;      // of the threads in ReadOwnCall
  bool wake_requested_ = false;
  bool turn_taken_ = false;  // a thread reads: no other thread may before the frames have been delivered
  const void* turn_owner_ = nullptr;  // the owner that took the turn in ReadOwnCall
  std::thread::id reader_;            // the thread that called Read last
  uint32_t callers_ = 0;              // threads in ReadCall
  uint64_t urgent_end_ = 0;           // the reader must not rest while frames before it are unread
  uint64_t expected_ = ~0ull;         // position of a call that the emitting thread is about to take
  std::chrono::steady_clock::time_point expected_until_{};
};

inline Ring* RingOf(hcb_ring* handle) { return reinterpret_cast<Ring*>(handle); }

}  // namespace hcb

#endif  // HOSTCALLBACK_RING_RING_H_

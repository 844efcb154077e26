// The calls whose programs wait for a reply, by device and sequence number of the frame that carries each.
//
// A call is entered before its frame can be read. Exactly one party takes it out and ends it: the reply, a
// failure, a reader that skips the frame as damaged, or the end of the process.
#ifndef HOSTCALLBACK_RING_CALL_TABLE_H_
#define HOSTCALLBACK_RING_CALL_TABLE_H_

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace hcb {

// A program that waits for the results of a call.
class PendingCall {
 public:
  struct Result {
    void* data;
    uint64_t nbytes;
  };

  virtual ~PendingCall() = default;

  // Whether a reply of these lengths fits the results.
  bool Accepts(uint64_t count, const uint64_t* nbytes) const;
  // Copies the arrays of such a reply into the results.
  void Take(const void* const* arrays);

  // Tells the program, once: null if its results are in place, else the reason why they never will be. The
  // program may continue on the calling thread, until it ends or waits again.
  virtual void Finish(const char* error) = 0;

  std::vector<Result> results;  // memory of the program, which stays valid until Finish
  int32_t device = -1;
  // identifies the waiting thread, if that thread takes the frame out of the ring itself
  const void* owner = nullptr;
};

// The device whose program the calling thread continues in hcb_call_resume; -1 for none.
int32_t ResumedDevice();

// A call on whose result its thread waits. The table owns the call; both own the state.
class ThreadCall final : public PendingCall {
 public:
  class State {
   public:
    // Returns whether the results are in place; if not, `error` has the reason.
    bool Wait(std::string* error);
    // Whether the call has ended, with results or with an error.
    bool Ended();

   private:
    friend class ThreadCall;
    std::mutex mutex_;  // protects everything below
    std::condition_variable ended_;
    bool done_ = false;
    bool failed_ = false;
    std::string error_;
  };

  explicit ThreadCall(std::shared_ptr<State> state) : state_(std::move(state)) {}
  void Finish(const char* error) override;

 private:
  const std::shared_ptr<State> state_;
};

// Enters a call whose frame lies at `position` of its ring. Any thread, even with the ring's lock held.
void EnterCall(int32_t device, uint64_t seq, uint64_t position, std::unique_ptr<PendingCall> call);

// The owner that must take the call's frame out of the ring; null if any thread may, or if no such call
// exists (any more). Any thread.
const void* OwnerOfCall(int32_t device, uint64_t seq);

// The position of the frame of the owner's call; false if the owner has no call in the table.
bool FindOwnCall(int32_t device, const void* owner, uint64_t* position);
// Takes the owner's call out: the caller must finish it. Null if there is none, for example because it has
// failed.
std::unique_ptr<PendingCall> TakeOwnCall(int32_t device, const void* owner);

// Changes the sequence number of the call's frame.
void RenumberCall(int32_t device, uint64_t from, uint64_t to);

// Fails the calls whose frames lie there, on a thread of the library: the thread that detects the failure
// must not continue their programs.
void FailCallsBetween(int32_t device, uint64_t start, uint64_t end, const char* error);

}  // namespace hcb

#endif  // HOSTCALLBACK_RING_CALL_TABLE_H_

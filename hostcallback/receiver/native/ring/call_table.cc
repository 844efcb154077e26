#include "ring/call_table.h"

#include <cstring>
#include <map>
#include <new>
#include <utility>

#include "abi/exports.h"
#include "ring/completer.h"

namespace hcb {
namespace {

thread_local int32_t resumed_device = -1;

struct Entry {
  uint64_t position;
  std::unique_ptr<PendingCall> call;
};

using Calls = std::map<std::pair<int32_t, uint64_t>, Entry>;

struct Table {
  std::mutex mutex;  // protects everything below
  Calls calls;       // by device and sequence number
  bool closed = false;
  std::string closed_error;
};

// Never destroyed: handlers may still run while the process exits.
Table* TheTable() {
  static Table* table = new Table;
  return table;
}

Calls::iterator FindOwnLocked(Table* table, int32_t device, const void* owner) {
  auto it = table->calls.lower_bound({device, 0});
  while (it != table->calls.end() && it->first.first == device && it->second.call->owner != owner) ++it;
  return it != table->calls.end() && it->first.first == device ? it : table->calls.end();
}

// Takes out the call at `found`; null if there is none.
std::unique_ptr<PendingCall> RemoveLocked(Table* table, Calls::iterator found) {
  if (found == table->calls.end()) return nullptr;
  std::unique_ptr<PendingCall> call = std::move(found->second.call);
  table->calls.erase(found);
  return call;
}

std::unique_ptr<PendingCall> TakeCall(int32_t device, uint64_t seq) {
  Table* table = TheTable();
  std::lock_guard<std::mutex> lock(table->mutex);
  return RemoveLocked(table, table->calls.find({device, seq}));
}

class Failure final : public Completion {
 public:
  Failure(std::unique_ptr<PendingCall> call, std::string error)
      : call_(std::move(call)), error_(std::move(error)) {}
  void Complete() override { call_->Finish(error_.c_str()); }

 private:
  const std::unique_ptr<PendingCall> call_;
  const std::string error_;
};

// The thread that detects a failure must not continue the call's program.
void FailElsewhere(std::unique_ptr<PendingCall> call, const std::string& error) {
  CompleteElsewhere(std::make_unique<Failure>(std::move(call), error));
}

}  // namespace

int32_t ResumedDevice() { return resumed_device; }

bool PendingCall::Accepts(uint64_t count, const uint64_t* nbytes) const {
  if (count != results.size()) return false;
  for (size_t i = 0; i < results.size(); ++i) {
    if (results[i].nbytes != nbytes[i]) return false;
  }
  return true;
}

void PendingCall::Take(const void* const* arrays) {
  for (size_t i = 0; i < results.size(); ++i) {
    // an empty array may have no address
    if (results[i].nbytes != 0) std::memcpy(results[i].data, arrays[i], results[i].nbytes);
  }
}

bool ThreadCall::State::Wait(std::string* error) {
  std::unique_lock<std::mutex> lock(mutex_);
  ended_.wait(lock, [this] { return done_; });
  *error = error_;
  return !failed_;
}

bool ThreadCall::State::Ended() {
  std::lock_guard<std::mutex> lock(mutex_);
  return done_;
}

void ThreadCall::Finish(const char* error) {
  {
    std::lock_guard<std::mutex> lock(state_->mutex_);
    state_->done_ = true;
    state_->failed_ = error != nullptr;
    if (error != nullptr) state_->error_ = error;
  }
  state_->ended_.notify_one();
}

void EnterCall(int32_t device, uint64_t seq, uint64_t position, std::unique_ptr<PendingCall> call) {
  Table* table = TheTable();
  std::unique_lock<std::mutex> lock(table->mutex);
  call->device = device;
  if (!table->closed) {
    table->calls[{device, seq}] = {position, std::move(call)};
    return;
  }
  const std::string error = table->closed_error;
  lock.unlock();
  FailElsewhere(std::move(call), error);
}

const void* OwnerOfCall(int32_t device, uint64_t seq) {
  Table* table = TheTable();
  std::lock_guard<std::mutex> lock(table->mutex);
  const auto found = table->calls.find({device, seq});
  return found == table->calls.end() ? nullptr : found->second.call->owner;
}

bool FindOwnCall(int32_t device, const void* owner, uint64_t* position) {
  Table* table = TheTable();
  std::lock_guard<std::mutex> lock(table->mutex);
  const auto found = FindOwnLocked(table, device, owner);
  if (found == table->calls.end()) return false;
  *position = found->second.position;
  return true;
}

std::unique_ptr<PendingCall> TakeOwnCall(int32_t device, const void* owner) {
  Table* table = TheTable();
  std::lock_guard<std::mutex> lock(table->mutex);
  return RemoveLocked(table, FindOwnLocked(table, device, owner));
}

void RenumberCall(int32_t device, uint64_t from, uint64_t to) {
  Table* table = TheTable();
  std::lock_guard<std::mutex> lock(table->mutex);
  auto call = table->calls.extract({device, from});
  if (call.empty()) return;
  call.key() = {device, to};
  table->calls.insert(std::move(call));
}

void FailCallsBetween(int32_t device, uint64_t start, uint64_t end, const char* error) {
  std::vector<std::unique_ptr<PendingCall>> lost;
  Table* table = TheTable();
  {
    std::lock_guard<std::mutex> lock(table->mutex);
    for (auto it = table->calls.lower_bound({device, 0});
         it != table->calls.end() && it->first.first == device;) {
      if (it->second.position < start || it->second.position >= end) {
        ++it;
        continue;
      }
      lost.push_back(std::move(it->second.call));
      it = table->calls.erase(it);
    }
  }
  for (auto& call : lost) FailElsewhere(std::move(call), error);
}

// The calls' programs do not run in the child: nothing is finished or destroyed, since it belongs to the
// parent.
void ResetCallsAfterFork() { new (TheTable()) Table; }

}  // namespace hcb

hcb_call* hcb_call_reply(int32_t device, uint64_t seq, uint64_t count, const void* const* arrays,
                         const uint64_t* nbytes) {
  std::unique_ptr<hcb::PendingCall> call = hcb::TakeCall(device, seq);
  if (!call) return nullptr;
  if (!call->Accepts(count, nbytes)) {
    hcb::FailElsewhere(std::move(call),
                       "hostcallback: the reply to this call has other lengths than its results");
    return nullptr;
  }
  call->Take(arrays);
  return reinterpret_cast<hcb_call*>(call.release());
}

void hcb_call_resume(hcb_call* call) {
  const std::unique_ptr<hcb::PendingCall> replied(reinterpret_cast<hcb::PendingCall*>(call));
  const int32_t outer = hcb::resumed_device;
  hcb::resumed_device = replied->device;
  replied->Finish(nullptr);
  hcb::resumed_device = outer;
}

void hcb_call_fail(int32_t device, uint64_t seq, const char* message) {
  if (std::unique_ptr<hcb::PendingCall> call = hcb::TakeCall(device, seq))
    hcb::FailElsewhere(std::move(call), message);
}

uint64_t hcb_call_count(int32_t device) {
  hcb::Table* table = hcb::TheTable();
  std::lock_guard<std::mutex> lock(table->mutex);
  uint64_t count = 0;
  for (const auto& entry : table->calls) count += entry.first.first == device;
  return count;
}

void hcb_call_close(const char* message) {
  hcb::Calls calls;
  hcb::Table* table = hcb::TheTable();
  {
    std::lock_guard<std::mutex> lock(table->mutex);
    table->closed = true;
    table->closed_error = message;
    calls.swap(table->calls);
  }
  for (auto& entry : calls) hcb::FailElsewhere(std::move(entry.second.call), message);
}

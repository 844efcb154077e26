#include "rules/occurrences.h"

#include <deque>
#include <mutex>
#include <new>
#include <unordered_map>
#include <utility>
#include <vector>

namespace hcb {
namespace {

constexpr size_t kLaunches = 256;

struct CountedLaunch {
  int64_t run_id;
  std::unordered_map<uint64_t, int64_t> counts;  // by consumer id
};

// Which values of one tap in one launch are sent: one bit each. A device may be up to kKept values behind the
// fastest one.
class Decisions {
 public:
  bool Of(int64_t number, Control* control, int64_t now_ns) {
    // The launch was forgotten here, but not in the device's count.
    if (number > begin_ + static_cast<int64_t>(sent_.size())) {
      sent_.clear();
      begin_ = number;
    }
    if (number == begin_ + static_cast<int64_t>(sent_.size())) {
      if (sent_.size() == kKept) {
        sent_.erase(sent_.begin(), sent_.begin() + kKept / 2);
        begin_ += kKept / 2;
      }
      sent_.push_back(control == nullptr || control->Admit(kEveryDevice, now_ns));
    }
    return number >= begin_ && sent_[static_cast<size_t>(number - begin_)];
  }

 private:
  static constexpr size_t kKept = 1 << 20;
  int64_t begin_ = 0;
  std::vector<bool> sent_;
};

struct DecidedLaunch {
  int64_t run_id;
  std::unordered_map<uint64_t, Decisions> decisions;  // by consumer id
};

struct State {
  std::mutex mutex;
  std::unordered_map<int32_t, std::deque<CountedLaunch>> launches;  // by device, the most recently used last
  std::deque<DecidedLaunch> decided;  // of all devices, the most recently used last
};

State* state = new State;  // never freed: a program may run while the process ends

template <typename Launch>
Launch& FindLaunch(std::deque<Launch>& launches, int64_t run_id) {
  if (!launches.empty() && launches.back().run_id == run_id) return launches.back();
  for (auto it = launches.begin(); it != launches.end(); ++it) {
    if (it->run_id != run_id) continue;
    Launch found = std::move(*it);
    launches.erase(it);
    launches.push_back(std::move(found));
    return launches.back();
  }
  if (launches.size() == kLaunches) launches.pop_front();
  launches.push_back({run_id, {}});
  return launches.back();
}

}  // namespace

int64_t NextOccurrence(int32_t device, int64_t run_id, uint64_t consumer_id) {
  std::lock_guard<std::mutex> lock(state->mutex);
  return FindLaunch(state->launches[device], run_id).counts[consumer_id]++;
}

Occurrence NextDecided(int32_t device, int64_t run_id, uint64_t consumer_id, Control* control,
                       int64_t now_ns) {
  std::lock_guard<std::mutex> lock(state->mutex);
  const int64_t number = FindLaunch(state->launches[device], run_id).counts[consumer_id]++;
  Decisions& decisions = FindLaunch(state->decided, run_id).decisions[consumer_id];
  return {number, decisions.Of(number, control, now_ns)};
}

// The mutex may be held by a thread that does not exist in the child.
void ResetOccurrencesAfterFork() { state = new (std::nothrow) State; }

}  // namespace hcb

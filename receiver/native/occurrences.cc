#include "occurrences.h"

#include <deque>
#include <mutex>
#include <new>
#include <unordered_map>
#include <utility>

namespace hcb {
namespace {

constexpr size_t kLaunches = 256;

struct Launch {
  int64_t run_id;
  std::unordered_map<uint64_t, int64_t> counts;  // by consumer id
};

struct State {
  std::mutex mutex;
  std::unordered_map<int32_t, std::deque<Launch>> launches;  // by device, the last used last
};

State* state = new State;  // never freed: a program may run while the process ends

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

// The mutex may be held by a thread that does not exist in the child.
void ResetOccurrencesAfterFork() { state = new (std::nothrow) State; }

}  // namespace hcb

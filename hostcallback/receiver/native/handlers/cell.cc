// Cells: values that the host changes while programs read them. The XLA FFI handler that reads one.
//
// All devices of a launch read the same value at the same point, without a collective: the first device that
// reaches a read decides, and the others follow. A point is a launch, a site (a line of the program) and a
// number: how often the device has read there in this launch.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

#include "abi/exports.h"
#include "handlers/call_frame.h"

namespace hcb {
namespace {

using Value = std::shared_ptr<const std::vector<uint8_t>>;

// The attribute `cell`, before the value of a cell that the host has not made.
struct Request {
  uint64_t cell;
  uint64_t type;     // of dtype and shape
  uint64_t site;     // equal in all processes
  uint32_t devices;  // of this process, in a launch
  uint32_t once;     // whether all reads of a launch have one value
};

// From the read of this number on, the launch's devices read this value.
struct Decision {
  uint64_t first;
  Value value;
};

struct Launch {
  int64_t run_id;
  uint64_t decided = 0;  // reads of the fastest device
  std::deque<Decision> decisions;
  std::vector<std::pair<int32_t, uint64_t>> reads;  // by device

  uint64_t& ReadsOf(int32_t device) {
    for (auto& [known, count] : reads) {
      if (known == device) return count;
    }
    return reads.emplace_back(device, 0).second;
  }

  // What every device has passed is forgotten. A device that leaves reads out holds up to kKept values.
  void Forget(uint32_t devices) {
    uint64_t slowest = decided;
    for (const auto& [device, count] : reads) slowest = std::min(slowest, count);
    if (reads.size() < devices) slowest = 0;
    while (decisions.size() > 1 && (decisions[1].first <= slowest || decisions.size() > kKept)) {
      decisions.pop_front();
    }
  }

  static constexpr size_t kKept = 1024;
};

struct Site {
  uint64_t id;
  std::deque<Launch> launches;  // the most recently used last

  // Remembers more launches than a runtime has in flight.
  Launch& Find(int64_t run_id) {
    for (auto it = launches.rbegin(); it != launches.rend(); ++it) {
      if (it->run_id != run_id) continue;
      if (it != launches.rbegin()) std::rotate(std::prev(it.base()), it.base(), launches.end());
      return launches.back();
    }
    if (launches.size() == kLaunches) launches.pop_front();
    launches.push_back({run_id, 0, {}, {}});
    return launches.back();
  }

  static constexpr size_t kLaunches = 256;
};

// It lives as long as the process, because a program may read it at any time.
class Cell {
 public:
  Cell(uint64_t id, uint64_t type, const uint8_t* value, size_t nbytes)
      : id(id), type(type), nbytes(nbytes), value_(Make(value, nbytes)) {}

  // Sets the value now, or before the read of the number `at`. Returns the number of reads so far.
  uint64_t Set(const uint8_t* value, int64_t at) {
    Value made = Make(value, nbytes);
    std::lock_guard<std::mutex> lock(mutex_);
    if (at >= 0) {
      later_.push_back({static_cast<uint64_t>(at), std::move(made)});
    } else {
      Now();
      value_ = std::move(made);
    }
    return reads_;
  }

  // Reads without agreement, as in a launch of one device. Returns the number of reads before.
  uint64_t Read(uint8_t* out, bool counts = true) {
    std::lock_guard<std::mutex> lock(mutex_);
    std::memcpy(out, Now()->data(), nbytes);
    return counts ? reads_++ : reads_;
  }

  void ReadAgreed(const Request& request, int64_t run_id, int32_t device, uint8_t* out) {
    std::lock_guard<std::mutex> lock(mutex_);
    Site& site = SiteOf(request.site);
    Launch& launch = site.Find(run_id);
    uint64_t& reads = launch.ReadsOf(device);
    const uint64_t number = request.once ? 0 : reads++;
    if (number >= launch.decided) {
      launch.decided = number + 1;
      const Value& now = Now();
      ++reads_;
      if (launch.decisions.empty() || launch.decisions.back().value != now) {
        launch.decisions.push_back({number, now});
      }
    }
    const Value* value = &launch.decisions.front().value;
    for (const Decision& decision : launch.decisions) {
      if (decision.first > number) break;
      value = &decision.value;
    }
    std::memcpy(out, (*value)->data(), nbytes);
    if (!request.once && launch.decisions.size() > 1) launch.Forget(request.devices);
  }

  void ForgetLaunches(uint64_t site) {
    std::lock_guard<std::mutex> lock(mutex_);
    SiteOf(site).launches.clear();
  }

  void ResetAfterFork() { new (&mutex_) std::mutex; }

  const uint64_t id;
  const uint64_t type;
  const size_t nbytes;

 private:
  static Value Make(const uint8_t* value, size_t nbytes) {
    return std::make_shared<const std::vector<uint8_t>>(value, value + nbytes);
  }

  // The value of the next read.
  const Value& Now() {
    while (!later_.empty() && later_.front().first <= reads_) {
      value_ = std::move(later_.front().second);
      later_.pop_front();
    }
    return value_;
  }

  Site& SiteOf(uint64_t id) {
    for (Site& site : sites_) {
      if (site.id == id) return site;
    }
    sites_.push_back({id, {}});
    return sites_.back();
  }

  std::mutex mutex_;  // protects everything below
  Value value_;
  std::deque<std::pair<uint64_t, Value>> later_;  // by the number of the read
  uint64_t reads_ = 0;                            // devices of a launch read together
  std::vector<Site> sites_;
};

// Open addressing. Cells are never removed, so that lookups need no lock.
constexpr size_t kCellSlots = 4096;  // a power of two, at most half of it used
std::atomic<Cell*> cells[kCellSlots];
std::mutex making;  // protects writing
size_t made = 0;

std::atomic<Cell*>& SlotOf(uint64_t id) {
  size_t i = static_cast<size_t>(id * 0x9e3779b97f4a7c15 >> 52) & (kCellSlots - 1);
  for (;; i = (i + 1) & (kCellSlots - 1)) {
    const Cell* cell = cells[i].load(std::memory_order_acquire);
    if (cell == nullptr || cell->id == id) return cells[i];
  }
}

// The cell of that id, made with this value if there is none. Null if the table is full.
Cell* FindOrMake(uint64_t id, uint64_t type, const uint8_t* value, size_t nbytes) {
  if (Cell* cell = SlotOf(id).load(std::memory_order_acquire)) return cell;
  std::lock_guard<std::mutex> lock(making);
  std::atomic<Cell*>& slot = SlotOf(id);
  Cell* cell = slot.load(std::memory_order_acquire);
  if (cell != nullptr || made == kCellSlots / 2) return cell;
  cell = new (std::nothrow) Cell(id, type, value, nbytes);
  if (cell == nullptr) return nullptr;
  ++made;
  slot.store(cell, std::memory_order_release);
  return cell;
}

// The launch and the device of a call. Returns an error, or null.
XLA_FFI_Error* ReadContext(const XLA_FFI_CallFrame& frame, int64_t* run_id, int32_t* device) {
  XLA_FFI_DeviceOrdinal_Get_Args ordinal = {};
  ordinal.struct_size = XLA_FFI_DeviceOrdinal_Get_Args_STRUCT_SIZE;
  ordinal.ctx = frame.ctx;
  if (XLA_FFI_Error* error = frame.api->XLA_FFI_DeviceOrdinal_Get(&ordinal)) return error;
  XLA_FFI_RunId_Get_Args run = {};
  run.struct_size = XLA_FFI_RunId_Get_Args_STRUCT_SIZE;
  run.ctx = frame.ctx;
  if (XLA_FFI_Error* error = frame.api->XLA_FFI_RunId_Get(&run)) return error;
  *run_id = run.run_id;
  *device = ordinal.device_ordinal;
  return nullptr;
}

XLA_FFI_Error* Read(const XLA_FFI_CallFrame& frame) {
  const XLA_FFI_Array* attribute = FindArray(frame, "cell", XLA_FFI_DataType_U8);
  const int64_t result = frame.rets.size - 1;
  if (attribute == nullptr || attribute->size < sizeof(Request) || result < 0 || !IsArray(frame, result)) {
    return Invalid(frame, "hostcallback: a read of a knob has no attribute `cell`, or no result");
  }
  const uint8_t* data = static_cast<const uint8_t*>(attribute->data);
  Request request;
  std::memcpy(&request, data, sizeof(request));
  const size_t nbytes = attribute->size - sizeof(request);
  Cell* cell = FindOrMake(request.cell, request.type, data + sizeof(request), nbytes);
  if (cell == nullptr) {
    return MakeError(frame.api, XLA_FFI_Error_Code_RESOURCE_EXHAUSTED,
                     "hostcallback: this process has too many knobs; use an array in place of several");
  }
  if (cell->type != request.type || cell->nbytes != nbytes) {
    return Invalid(frame,
                   "hostcallback: a program reads a knob that has another dtype or shape in this process; "
                   "give one of the two another name");
  }
  uint8_t* out = static_cast<uint8_t*>(Result(frame, result).data);
  if (request.devices == 1 && !request.once) {
    cell->Read(out);
    return nullptr;
  }
  int64_t run_id;
  int32_t device;
  if (XLA_FFI_Error* error = ReadContext(frame, &run_id, &device)) return error;
  cell->ReadAgreed(request, run_id, device, out);
  return nullptr;
}

}  // namespace

// The mutexes may be held by threads that do not exist in the child, where no program runs.
void ResetCellsAfterFork() {
  new (&making) std::mutex;
  for (std::atomic<Cell*>& slot : cells) {
    if (Cell* cell = slot.load(std::memory_order_relaxed)) cell->ResetAfterFork();
  }
}

}  // namespace hcb

int64_t hcb_cell_set(uint64_t id, uint64_t type, const uint8_t* value, uint64_t nbytes, int64_t at) {
  hcb::Cell* cell = hcb::FindOrMake(id, type, value, nbytes);
  if (cell == nullptr) return HCB_NO_MEMORY;
  if (cell->type != type || cell->nbytes != nbytes) return HCB_INVALID;
  return static_cast<int64_t>(cell->Set(value, at));
}

int64_t hcb_cell_get(uint64_t id, uint8_t* out, int32_t counts) {
  hcb::Cell* cell = hcb::SlotOf(id).load(std::memory_order_acquire);
  if (cell == nullptr) return HCB_INVALID;
  return static_cast<int64_t>(cell->Read(out, counts != 0));
}

void hcb_cell_forget_launches(uint64_t id, uint64_t site) {
  if (hcb::Cell* cell = hcb::SlotOf(id).load(std::memory_order_acquire)) cell->ForgetLaunches(site);
}

XLA_FFI_Error* hcb_cell(XLA_FFI_CallFrame* frame) {
  return hcb::IsExecution(frame) ? hcb::Read(*frame) : nullptr;
}

// The memory of a ring: one control page, then the frames. It can be moved into a file while the ring is in
// use, and another process can map that file. docs/flight-recorder.md describes the bytes.
#ifndef HOSTCALLBACK_RING_FILE_H_
#define HOSTCALLBACK_RING_FILE_H_

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace hcb {

constexpr uint64_t kRingPage = 4096;
constexpr uint32_t kRingFileVersion = 1;
constexpr char kRingMagic[8] = {'H', 'C', 'B', 'R', 'I', 'N', 'G', '\n'};
constexpr size_t kDeviceNameBytes = 64;

// The first page. Fields that both sides of a ring poll have separate cache lines.
struct RingControl {
  char magic[8];
  uint32_t version;
  uint32_t page_bytes;  // start of the frames
  uint64_t capacity;
  int32_t device;
  int32_t device_id;  // in the frames' headers
  int64_t pid;
  int64_t created_ns;      // Unix time
  uint64_t blocks_offset;  // of the arena, from the file's start; 0 if there is none
  uint64_t blocks_bytes;
  char name[kDeviceNameBytes];  // of the device, as reports show it

  alignas(64) std::atomic<uint64_t> head;      // end of the reserved frames
  alignas(64) std::atomic<uint64_t> released;  // frames before it may be overwritten
  std::atomic<uint64_t> delivered;             // frames before it have been delivered
  std::atomic<uint64_t> released_frames;       // messages before `released`
  // A commit at or after this position wakes the reader: never while it is awake, always while it sleeps and,
  // while it rests, when many bytes have come since its last read.
  alignas(64) std::atomic<uint64_t> wake_from;
  std::atomic<uint32_t> wake_word;  // not used any more: readers in other processes slept on it
};
static_assert(sizeof(RingControl) <= kRingPage, "one page");
static_assert(offsetof(RingControl, capacity) == 16 && offsetof(RingControl, pid) == 32 &&
                  offsetof(RingControl, blocks_offset) == 48 && offsetof(RingControl, name) == 64 &&
                  offsetof(RingControl, head) == 128 && offsetof(RingControl, released) == 192 &&
                  offsetof(RingControl, delivered) == 200 && offsetof(RingControl, released_frames) == 208 &&
                  offsetof(RingControl, wake_from) == 256 && offsetof(RingControl, wake_word) == 264,
              "ring file 1");

// Memory for a page and `capacity` bytes of frames; at `where`, replacing the mapping there, if that is
// given. Null if the system has no memory.
uint8_t* MapRing(uint64_t capacity, uint8_t* where = nullptr);
void UnmapRing(uint8_t* base, uint64_t capacity);

// A file of exactly `nbytes`, all of which the file system has allocated: a page that it could not provide
// later would end the process. The file gets its name in Publish; without that, the destructor removes it.
class RingFile {
 public:
  ~RingFile();
  int Create(const char* path, uint64_t nbytes);  // 0 or an errno
  uint8_t* Map(uint64_t offset, uint64_t nbytes, uint8_t* where = nullptr);
  int Publish();

 private:
  int descriptor_ = -1;
  char path_[4096];
  char partial_[4096];
  bool published_ = false;
};

}  // namespace hcb

#endif  // HOSTCALLBACK_RING_FILE_H_

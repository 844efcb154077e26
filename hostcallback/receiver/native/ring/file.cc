#include "ring/file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace hcb {

uint8_t* MapRing(uint64_t capacity, uint8_t* where) {
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | (where != nullptr ? MAP_FIXED : 0);
  void* base = mmap(where, kRingPage + capacity, PROT_READ | PROT_WRITE, flags, -1, 0);
  return base == MAP_FAILED ? nullptr : static_cast<uint8_t*>(base);
}

void UnmapRing(uint8_t* base, uint64_t capacity) { munmap(base, kRingPage + capacity); }

RingFile::~RingFile() {
  if (descriptor_ < 0) return;
  close(descriptor_);
  if (!published_) unlink(partial_);
}

int RingFile::Create(const char* path, uint64_t nbytes) {
  const int wanted = snprintf(path_, sizeof(path_), "%s", path);
  const int partial = snprintf(partial_, sizeof(partial_), "%s.partial", path);
  if (wanted < 0 || partial < 0 || static_cast<size_t>(partial) >= sizeof(partial_)) return ENAMETOOLONG;
  unlink(partial_);  // left by a process that was killed
  descriptor_ = open(partial_, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (descriptor_ < 0) return errno;
#ifdef __APPLE__
  fstore_t store = {F_ALLOCATEALL, F_PEOFPOSMODE, 0, static_cast<off_t>(nbytes), 0};
  if (fcntl(descriptor_, F_PREALLOCATE, &store) != 0) return errno;
  return ftruncate(descriptor_, static_cast<off_t>(nbytes)) != 0 ? errno : 0;
#else
  return posix_fallocate(descriptor_, 0, static_cast<off_t>(nbytes));
#endif
}

uint8_t* RingFile::Map(uint64_t offset, uint64_t nbytes, uint8_t* where) {
  int flags = MAP_SHARED | (where != nullptr ? MAP_FIXED : 0);
#ifdef MAP_POPULATE
  flags |= MAP_POPULATE;  // otherwise each page costs a fault when a producer first writes to it
#endif
#ifdef SYS_mmap
  // Not the C library's function, which ThreadSanitizer takes for a write to memory that other threads use:
  // the kernel replaces the mapping atomically by one with the same contents.
  void* base = reinterpret_cast<void*>(syscall(SYS_mmap, where, nbytes, PROT_READ | PROT_WRITE, flags,
                                               descriptor_, static_cast<off_t>(offset)));
#else
  void* base = mmap(where, nbytes, PROT_READ | PROT_WRITE, flags, descriptor_, static_cast<off_t>(offset));
#endif
  return base == MAP_FAILED ? nullptr : static_cast<uint8_t*>(base);
}

int RingFile::Publish() {
  if (rename(partial_, path_) != 0) return errno;
  published_ = true;
  return 0;
}

}  // namespace hcb

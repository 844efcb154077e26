// A ring that one process writes and another one reads, while a third changes its memory: `program CHANGES FILE`.
//
// The reader must neither crash nor hang, whatever it finds. Three processes, because one that maps the file twice would not share what
// the mapping process knows. A separate program, so that it can run under the sanitizers.
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "abi/exports.h"
#include "check.h"
#include "ring/file.h"
#include "ring/ring.h"
#include "wire/columns.h"
#include "wire/frame.h"

namespace {

constexpr uint64_t kCapacity = 64 << 10;
constexpr uint64_t kArena = 256 << 10;

void Write(const char* path) {
  hcb_config config = {};
  config.capacity_bytes = kCapacity;
  config.external_threshold_bytes = 2048;
  config.block_budget_bytes = kArena / 2;
  config.drop_after_ns = -1;  // drops what finds no room
  std::unique_ptr<hcb::Ring> own = hcb::Ring::Make(7, config);
  std::unique_ptr<hcb::Ring> ring = hcb::Ring::Make(7, config);
  CHECK(own != nullptr && ring != nullptr);
  CHECK(ring->KeepInFile(path, "cpu:7", kArena) == 0);
  CHECK(own->ShareWith(ring.get()) == 0);
  std::vector<uint8_t> payload(4096);
  uint8_t prefix[2 * sizeof(hcb::FrameHeader)] = {};  // padded, as those of programs are
  for (uint64_t i = 0;; ++i) {
    const uint64_t sizes[] = {4, 64, 4, 1000, 3000};
    hcb::ArrayRef array = {payload.data(), sizes[i % 5], 0xff};
    hcb::Emission emission = {};
    emission.prefix = prefix;
    emission.prefix_bytes = i % 2 == 0 ? sizeof(hcb::FrameHeader) + 24 : sizeof(hcb::FrameHeader);
    emission.arrays = &array;
    emission.array_count = 1;
    emission.payload_bytes = array.nbytes;
    ring->Emit(emission, nullptr);  // dropped if there is no room
    if (i % 64 == 0) usleep(50);
  }
}

// Touches all that a batch says it has.
uint64_t Sum(const hcb::Ring& ring, const hcb_batch& batch, hcb_columns* columns) {
  uint64_t sum = 0;
  for (uint64_t i = 0; i < batch.frames; ++i) {
    const uint8_t* frame = ring.memory() + batch.offsets[i];
    hcb::FrameHeader header;
    std::memcpy(static_cast<void*>(&header), frame, sizeof(header));
    const uint64_t nbytes = hcb::RingBytes(header, header.flags);
    CHECK(batch.offsets[i] + nbytes <= ring.capacity());
    for (uint64_t k = 0; k < nbytes; ++k) sum += frame[k];
  }
  for (uint64_t i = 0; i < batch.blocks_count; ++i) {
    const uint8_t* memory = static_cast<const uint8_t*>(batch.blocks[i].memory);
    for (uint64_t k = 0; k < batch.blocks[i].nbytes; ++k) sum += memory[k];
    hcb_block_free(batch.blocks[i].memory);
  }
  hcb::ReadColumns(ring.memory(), batch, columns);
  for (uint64_t g = 0; g < columns->groups; ++g) {
    const auto& group = columns->group[g];
    const uint64_t stride = group.payload_bytes;
    std::vector<uint8_t> out(group.count * stride + 1);
    hcb::CopyStack(ring.memory(), batch, *columns, group.first, group.count, stride, out.data());
    for (uint8_t byte : out) sum += byte;
  }
  return sum;
}

volatile sig_atomic_t told = 0;

void Read(const char* path) {
  int error = 0;
  std::unique_ptr<hcb::Ring> ring;
  for (int i = 0; ring == nullptr && i < 10000; ++i) {
    ring = hcb::Ring::Attach(path, &error);
    if (ring == nullptr) usleep(1000);
  }
  CHECK(ring != nullptr);
  auto batch = std::make_unique<hcb_batch>();
  auto columns = std::make_unique<hcb_columns>();
  uint64_t sum = 0, frames = 0, damages = 0;
  for (uint64_t turn = 0; !told; ++turn) {
    alarm(20);  // ends a reader that hangs
    const uint32_t found = ring->Read(1000000, batch.get());
    if (found != 0) {
      sum += Sum(*ring, *batch, columns.get());
      ring->Release(batch->ends[found - 1], found + batch->folded_total);
    }
    frames += found;
    damages += batch->damage != 0;
    if (turn % 16 == 15) {  // as a reader process that starts
      std::unique_ptr<hcb::Ring> again = hcb::Ring::Attach(path, &error);
      if (again != nullptr) ring = std::move(again);
    }
  }
  ring->MarkWriterDead();
  while (ring->Read(0, batch.get()) != 0) ring->Release(batch->ends[batch->frames - 1], batch->frames);
  std::fprintf(stderr, "%llu frames, %llu damages, %llu\n", static_cast<unsigned long long>(frames),
               static_cast<unsigned long long>(damages), static_cast<unsigned long long>(sum & 1));
  CHECK(frames != 0 && damages != 0);
}

uint64_t Odd(std::mt19937_64* random) {
  const uint64_t odd[] = {0, 1, 63, 64, kCapacity - 64, kCapacity, 1ull << 31, (1ull << 32) - 1, 1ull << 62, ~0ull};
  return (*random)() % 3 == 0 ? (*random)() : odd[(*random)() % 10] + ((*random)() % 4 == 0 ? (*random)() % 4096 : 0);
}

// Changes a field of the control page, of a frame's header, of a block's descriptor or record, or any bytes.
void Change(uint8_t* base, uint64_t nbytes, std::mt19937_64* random) {
  static const uint64_t control[] = {128, 192, 200, 208, 256, 264, 16, 24, 48, 56};
  static const uint64_t header[] = {0, 4, 8, 16, 40, 44, 48, 56};
  uint8_t* frames = base + hcb::kRingPage;
  switch ((*random)() % 6) {
    case 0: {
      const uint64_t value = Odd(random);
      std::memcpy(base + control[(*random)() % 10], &value, sizeof(value));
      break;
    }
    case 1: {  // a plausible head or cursor: near the other one
      uint64_t value;
      std::memcpy(&value, base + 128, sizeof(value));
      value += (*random)() % (2 * kCapacity) - kCapacity;
      std::memcpy(base + ((*random)() % 2 ? 128 : 192), &value, sizeof(value));
      break;
    }
    case 2:
    case 3: {
      const uint64_t at = (*random)() % (kCapacity / 64) * 64;
      const uint64_t field = header[(*random)() % 8];
      const uint64_t value = Odd(random);
      std::memcpy(frames + at + field, &value, field >= 48 || field == 8 || field == 16 ? 8 : 4);
      break;
    }
    case 4: {
      const uint64_t at = (*random)() % (nbytes / 64) * 64;
      const uint64_t value = Odd(random);
      std::memcpy(base + at + (*random)() % 8 * 8, &value, sizeof(value));
      break;
    }
    default:
      base[(*random)() % nbytes] = static_cast<uint8_t>((*random)());
  }
}

}  // namespace

int main(int count, char** arguments) {
  CHECK(count == 3);
  const char* path = arguments[2];
  const pid_t writer = fork();
  if (writer == 0) Write(path);
  const pid_t reader = fork();
  if (reader == 0) {
    signal(SIGTERM, [](int) { told = 1; });
    Read(path);
    std::exit(0);
  }
  int descriptor = -1;
  for (int i = 0; descriptor < 0 && i < 10000; ++i) {
    descriptor = open(path, O_RDWR);
    if (descriptor < 0) usleep(1000);
  }
  struct stat status;
  CHECK(descriptor >= 0 && fstat(descriptor, &status) == 0);
  const uint64_t nbytes = static_cast<uint64_t>(status.st_size);
  uint8_t* base = static_cast<uint8_t*>(mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0));
  CHECK(base != MAP_FAILED);
  uint8_t page[512];
  std::memcpy(page, base, sizeof(page));
  std::mt19937_64 random(static_cast<uint64_t>(std::atoll(arguments[1])));
  const uint64_t changes = static_cast<uint64_t>(std::atoll(arguments[1]));
  pid_t current = writer;
  int ended = 0;
  for (uint64_t i = 0; i < changes; ++i) {
    Change(base, nbytes, &random);
    if (i % 8 == 0) usleep(20);
    if (i % 128 == 127) {
      // What a new writer has written: one whose page was changed may wait forever.
      kill(current, SIGKILL);
      waitpid(current, nullptr, 0);
      char next[4096];
      std::snprintf(next, sizeof(next), "%s.next", path);
      unlink(next);
      current = fork();
      if (current == 0) Write(next);
      for (int k = 0; k < 10000 && access(next, F_OK) != 0; ++k) usleep(500);
      usleep(2000);
      kill(current, SIGSTOP);
      const int other = open(next, O_RDONLY);
      CHECK(other >= 0 && read(other, base, nbytes) == static_cast<ssize_t>(nbytes));
      close(other);
      kill(current, SIGCONT);
    }
    CHECK(waitpid(reader, &ended, WNOHANG) == 0);
  }
  kill(current, SIGKILL);
  waitpid(current, nullptr, 0);
  kill(reader, SIGTERM);
  CHECK(waitpid(reader, &ended, 0) == reader);
  if (!WIFEXITED(ended) || WEXITSTATUS(ended) != 0) std::fprintf(stderr, "the reader's status is %d\n", ended);
  return WIFEXITED(ended) && WEXITSTATUS(ended) == 0 ? 0 : 1;
}

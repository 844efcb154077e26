/* Loads a library of a wheel, sends 10,000 frames through a ring that has room for few, on two threads, and reads them in order.
 * A plain C program: it runs where no Python does, under an emulator of another machine. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "abi/exports.h"

enum { FRAMES = 10000, HEADER_BYTES = 64 };

#define CHECK(condition) ((condition) ? (void)0 : (fprintf(stderr, "line %d: %s\n", __LINE__, #condition), exit(1)))

static hcb_ring* ring;
static __typeof__(hcb_ring_send)* ring_send;

static void* function(void* library, const char* name) {
  void* found = dlsym(library, name);
  CHECK(found != NULL);
  return found;
}

static void* produce(void* unused) {
  const uint8_t prefix[HEADER_BYTES] = {0}; /* the consumer 0, without metadata; the ring adds the rest */
  for (uint64_t i = 0; i < FRAMES; ++i) {
    const void* array = &i;
    const uint64_t nbytes = sizeof(i);
    CHECK(ring_send(ring, prefix, sizeof(prefix), 1, &array, &nbytes, 0) == HCB_EMITTED);
  }
  return unused;
}

int main(int count, char** arguments) {
  CHECK(count == 2);
  void* library = dlopen(arguments[1], RTLD_NOW);
  if (library == NULL) return fprintf(stderr, "%s\n", dlerror()), 1;
  __typeof__(hcb_abi_version)* version = function(library, "hcb_abi_version");
  __typeof__(hcb_ring_open)* open = function(library, "hcb_ring_open");
  __typeof__(hcb_ring_memory)* memory = function(library, "hcb_ring_memory");
  __typeof__(hcb_ring_read)* read = function(library, "hcb_ring_read");
  __typeof__(hcb_ring_release)* release = function(library, "hcb_ring_release");
  __typeof__(hcb_ring_admit)* admit = function(library, "hcb_ring_admit");
  ring_send = function(library, "hcb_ring_send");
  CHECK(version() == HCB_ABI_VERSION);

  const hcb_config config = {.capacity_bytes = 4096};
  ring = open(0, &config);
  CHECK(ring != NULL);
  uint64_t capacity = 0;
  const uint8_t* bytes = memory(ring, &capacity);
  pthread_t producer;
  CHECK(pthread_create(&producer, NULL, produce, NULL) == 0);
  static hcb_batch batch;
  for (uint64_t next = 0; next < FRAMES;) {
    const uint32_t frames = read(ring, 30000000000, 0, &batch);
    CHECK(frames > 0 && batch.damage == 0);
    for (uint32_t i = 0; i < frames; ++i, ++next) {
      CHECK(memcmp(bytes + batch.offsets[i] + HEADER_BYTES, &next, sizeof(next)) == 0);
    }
    if (release(ring, batch.ends[frames - 1], frames)) admit(ring);
  }
  CHECK(pthread_join(producer, NULL) == 0);
  printf("%d frames\n", FRAMES);
  return 0;
}

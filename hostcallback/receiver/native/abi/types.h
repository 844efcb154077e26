/* The types, constants and error codes of the library's interface, in plain C. */
#ifndef HOSTCALLBACK_ABI_TYPES_H_
#define HOSTCALLBACK_ABI_TYPES_H_

#include <stdint.h>

#define HCB_ABI_VERSION 28
#define HCB_EXPORT __attribute__((visibility("default")))

typedef struct hcb_ring hcb_ring;
typedef struct hcb_call hcb_call;         /* a call that has its reply, and has not been resumed yet */
typedef struct hcb_own_call hcb_own_call; /* a call whose own thread takes its frame out of the ring */

/* Steps of a back-pressure policy that come before an emission waits for room. */
typedef enum {
  HCB_SAMPLE_BEYOND_HALF = 1, /* beyond half full, drop all but every sample_every-th emission */
  /* drop the oldest frames that the reader has not taken, until one must not be dropped */
  HCB_OVERWRITE_OLDEST = 2,
  HCB_LEAVE_OUT = 4 /* drop every emission, also where there is room */
} hcb_admission_step;

/* A size of zero means the default. */
typedef struct {
  /* of the ring; rounded up to a power of two. Fixed once the ring exists */
  uint64_t capacity_bytes;
  /* larger payloads travel in blocks outside the ring. Fixed once the ring exists */
  uint64_t external_threshold_bytes;
  /* limit of bytes in blocks that the reader has not taken; a single block may exceed it */
  uint64_t block_budget_bytes;
  /* time that an emission waits for room; 0: without limit; negative: it does not wait */
  int64_t drop_after_ns;
  uint32_t steps;        /* hcb_admission_step, added up */
  uint32_t sample_every; /* HCB_SAMPLE_BEYOND_HALF */
} hcb_config;

typedef enum {
  HCB_EMITTED = 0,
  HCB_DROPPED = 1,
  HCB_QUEUED = 2,
  HCB_INVALID = -1,   /* the prefix does not match the metadata length it announces */
  HCB_TOO_LARGE = -2, /* the metadata exceeds what the ring can ever hold */
  HCB_NO_MEMORY = -3
} hcb_status;

typedef struct {
  uint64_t emitted;       /* accepted into the ring */
  uint64_t dropped;       /* refused, or accepted and overwritten; each used a sequence number */
  uint64_t emitted_bytes; /* of the accepted frames, blocks included */
  uint64_t queued_messages;
  uint64_t queued_bytes;
  uint64_t waiting_producers;
  uint64_t next_seq;
  uint64_t released_messages;
  /* accepted frames that are not delivered: overwritten ones and, on a GPU, those of checks that hold and of
   * failed copies */
  uint64_t discarded;
  uint64_t unpinned; /* copies from a GPU into memory that the driver could not pin */
} hcb_counters;

enum { HCB_BATCH_FRAMES = 1024, HCB_BATCH_BLOCKS = 64, HCB_BATCH_BYTES = 1 << 20, HCB_ALIKE_FRAMES = 64 };
enum { HCB_BATCH_GROUPS = 128, HCB_STACK_BYTES = 1024 };

typedef struct {
  uint64_t frame; /* index within the batch */
  void* memory;   /* owned by the caller from now on: hcb_block_free */
  uint64_t nbytes;
} hcb_block;

/* The result of one hcb_ring_read. */
typedef struct {
  uint64_t frames;
  uint64_t blocks_count;
  /* 0, or the hcb_damage for which the bytes [damage_start, damage_end) are not frames */
  uint64_t damage;
  uint64_t damage_start;
  uint64_t damage_end;
  /* emitted messages lost with them; with several damaged stretches, counted with the last one */
  uint64_t damage_messages;
  uint64_t offsets[HCB_BATCH_FRAMES]; /* of the headers, within the ring's memory */
  uint64_t ends[HCB_BATCH_FRAMES];    /* position after each frame, for hcb_ring_release */
  hcb_block blocks[HCB_BATCH_BLOCKS];
  uint64_t folded_total; /* sum of `folded` */
  /* failures of a check that were left out before each frame: of a row of them, the first `alike_frames` and
   * the last are listed. Released with the frame */
  uint64_t folded[HCB_BATCH_FRAMES];
  uint64_t alike_frames; /* given by the reader; 0: HCB_ALIKE_FRAMES */
} hcb_batch;

/* Alike messages of one batch: equal metadata and payload_bytes and, with the flag BATCHED, one consumer. */
typedef struct {
  uint64_t frame; /* index of the first one */
  uint64_t first; /* start of the group in `order` */
  uint64_t count;
  uint64_t payload_bytes; /* of each message */
} hcb_group;

/* The headers of one batch by field, and its groups of alike messages. A group contains only messages with
 * arrays, with a payload in the ring of at most HCB_STACK_BYTES, that are neither calls nor the end of a
 * stream. */
typedef struct {
  uint64_t groups;
  uint64_t consumer_ids[HCB_BATCH_FRAMES];
  uint64_t flags[HCB_BATCH_FRAMES];
  uint64_t seqs[HCB_BATCH_FRAMES];
  int64_t times_ns[HCB_BATCH_FRAMES];
  int64_t run_ids[HCB_BATCH_FRAMES];
  /* indices of frames: group by group, then those in no group; otherwise as emitted */
  uint64_t order[HCB_BATCH_FRAMES];
  hcb_group group[HCB_BATCH_GROUPS];
} hcb_columns;

/* The frame that one hcb_ring_read_call took. */
typedef struct {
  uint64_t offset; /* of the header, within the ring's memory */
  uint64_t end;    /* position after the frame, for hcb_ring_release */
  /* of a payload outside the ring, else null; owned by the caller from now on: hcb_block_free */
  void* memory;
  uint64_t nbytes; /* of that payload */
} hcb_call_frame;

typedef enum {
  HCB_INTACT = 0,
  HCB_DAMAGED_MAGIC = 1,
  HCB_DAMAGED_VERSION = 2,
  HCB_DAMAGED_FLAGS = 3,
  HCB_DAMAGED_POSITION = 4,
  HCB_DAMAGED_LENGTH = 5,
  HCB_DAMAGED_BLOCK = 6,
  HCB_COPY_FAILED = 7 /* not damage: damage_messages were lost before they reached the ring. damage_start is
                         an hcb_copy_step, damage_end the driver's error */
} hcb_damage;

/* The step at which the copy of a message from a GPU failed. */
typedef enum {
  HCB_COPY_INTACT = 0,
  HCB_COPY_CONTEXT = 1,   /* the driver could not be used for the device */
  HCB_COPY_START = 2,     /* the driver refused the copy */
  HCB_COPY_RUN = 3,       /* the device failed before it finished the copy */
  HCB_COPY_NO_MEMORY = 4, /* the host has no memory */
} hcb_copy_step;

/* The header fields that a ring assigns. */
typedef struct {
  uint64_t seq;
  uint64_t position;
  int64_t time_ns;
  int64_t run_id;
  int32_t device;
  uint32_t flags; /* added to those of the prefix */
} hcb_stamp;

typedef enum {
  HCB_NO_EVENT = 0,
  HCB_EVENT_STALL = 1,
  HCB_EVENT_NEW_RING = 2,
  HCB_EVENT_NOT_PINNED = 3 /* from now on copies from this GPU may go through unpinned memory */
} hcb_event_kind;

typedef enum { HCB_CUDA = 0, HCB_ROCM = 1 } hcb_gpu_vendor;

typedef struct {
  int32_t kind; /* hcb_event_kind */
  int32_t device;
} hcb_event;

/* Rules of a tap. A handler asks them in this order, before it copies anything; a refused message uses no
 * sequence number, and is counted. They apply per device and, for taps of shards (hcb_tap_shard), per value
 * of which the shards are parts. */
typedef struct {
  uint64_t every;       /* the first message and each every-th after it; 0 and 1: all */
  uint64_t probe_every; /* while the gate is closed, one message in `probe_every` passes; 0: none by number */
  /* while the gate is closed, one message per this time passes; 0: none by time. With both 0 there is no
   * gate */
  int64_t probe_ns;
  int64_t interval_ns; /* minimum time between two messages; 0: no limit */
  uint64_t truncate;   /* number of elements that are sent of each array; 0: all. Not for shards */
  int32_t off;         /* nothing is sent */
} hcb_control;

/* Functions of the host's threads. The library may call `this_thread` on any thread; it returns null on a
 * thread that is not the host's. `enter` is called before the other functions, and `leave` after them with
 * the result of `enter`. */
typedef struct {
  void* (*this_thread)(void);
  int32_t (*enter)(void);
  void (*leave)(int32_t entered);
  int32_t (*interrupted)(void); /* whether the user has interrupted this thread; clears the interrupt */
  /* sets the interrupt again, for the host to handle when it can. Without `enter` */
  void (*interrupt)(void);
} hcb_host_threads;

/* A type's function that gives out the memory of an object: bf_getbuffer of Python. */
typedef int (*hcb_get_buffer)(void* object, void* view, int flags);
/* Waits in the host, with its lock, and calls hcb_waited at its end unless the user has interrupted it: an
 * interrupt that the host raises before the function's first line leaves no result that could be read. */
typedef void (*hcb_wait)(void);

/* Runs the host function of a call on the host's own thread, which runs the program: takes the call's frame
 * with hcb_own_call_read and answers it. `resumed`: the thread continues a program that another one began.
 * `interrupted`: an interrupt came before, which the call handles or sets again. Returns whether to set one.
 */
typedef int32_t (*hcb_host_call)(hcb_own_call* own, int32_t resumed, int32_t interrupted);

enum {
  HCB_OWN_CALL_TAKEN = 1, /* as after hcb_ring_read_call: call hcb_ring_end_read_call */
  HCB_OWN_CALL_LATER = 0, /* the time is over, or the call has failed */
  /* the calling thread is the ring's reader: the frames before the call would never be read */
  HCB_OWN_CALL_WAITS_FOR_ITSELF = -1
};

#endif /* HOSTCALLBACK_ABI_TYPES_H_ */

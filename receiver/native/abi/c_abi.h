/* The library's whole interface: plain C, called through ctypes by receiver/native/bindings.py.
 *
 * Any thread may use handles and functions, except that one thread at a time reads a ring. Rings live as long as the
 * process, because a compiled program may emit into one at any time.
 */
#ifndef HOSTCALLBACK_C_ABI_H_
#define HOSTCALLBACK_C_ABI_H_

#include <stdint.h>

#define HCB_ABI_VERSION 10
#define HCB_EXPORT __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

typedef struct hcb_ring hcb_ring;
typedef struct hcb_call hcb_call; /* a call that has its reply, and has not been resumed yet */
typedef struct hcb_own_call hcb_own_call; /* a call whose own thread takes its frame out of the ring */

/* Steps of a back-pressure policy that come before an emission waits for room. */
typedef enum {
  HCB_SAMPLE_BEYOND_HALF = 1, /* beyond half full, drop all but every sample_every-th emission */
  HCB_OVERWRITE_OLDEST = 2    /* drop the oldest frames that the reader has not taken, until one must not be dropped */
} hcb_admission_step;

/* A size of zero means the default. */
typedef struct {
  uint64_t capacity_bytes;           /* of the ring; rounded up to a power of two. Fixed once the ring exists */
  uint64_t external_threshold_bytes; /* larger payloads travel in blocks outside the ring. Fixed once the ring exists */
  uint64_t block_budget_bytes;       /* limit of bytes in blocks that the reader has not taken; a single block may exceed it */
  int64_t drop_after_ns;             /* time that an emission waits for room; 0: without limit; negative: it does not wait */
  uint32_t steps;                    /* hcb_admission_step, added up */
  uint32_t sample_every;             /* HCB_SAMPLE_BEYOND_HALF */
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
  uint64_t discarded; /* accepted frames that are not delivered: overwritten ones and, on a GPU, those of checks that hold and of failed copies */
  uint64_t unpinned;  /* copies from a GPU into memory that the driver could not pin */
} hcb_counters;

enum { HCB_BATCH_FRAMES = 1024, HCB_BATCH_BLOCKS = 64, HCB_BATCH_BYTES = 1 << 20 };
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
  uint64_t damage;         /* 0, or the hcb_damage for which the bytes [damage_start, damage_end) are not frames */
  uint64_t damage_start;
  uint64_t damage_end;
  uint64_t damage_messages; /* emitted messages lost with them; with several damaged stretches, counted with the last one */
  uint64_t offsets[HCB_BATCH_FRAMES]; /* of the headers, within the ring's memory */
  uint64_t ends[HCB_BATCH_FRAMES];    /* position after each frame, for hcb_ring_release */
  hcb_block blocks[HCB_BATCH_BLOCKS];
  uint64_t folded_total;             /* sum of `folded` */
  uint64_t folded[HCB_BATCH_FRAMES]; /* failures of a check that were left out before each frame: of more than two in a row,
                                        the first and the last are listed. Released with the frame */
} hcb_batch;

/* Alike messages of one batch: equal metadata and payload_bytes and, with the flag BATCHED, one consumer. */
typedef struct {
  uint64_t frame;         /* index of the first one */
  uint64_t first;         /* start of the group in `order` */
  uint64_t count;
  uint64_t payload_bytes; /* of each message */
} hcb_group;

/* The headers of one batch by field, and its groups of alike messages. A group contains only messages with arrays, with a payload in
 * the ring of at most HCB_STACK_BYTES, that are neither calls nor the end of a stream. */
typedef struct {
  uint64_t groups;
  uint64_t consumer_ids[HCB_BATCH_FRAMES];
  uint64_t flags[HCB_BATCH_FRAMES];
  uint64_t seqs[HCB_BATCH_FRAMES];
  int64_t times_ns[HCB_BATCH_FRAMES];
  int64_t run_ids[HCB_BATCH_FRAMES];
  uint64_t order[HCB_BATCH_FRAMES]; /* indices of frames: group by group, then those in no group; otherwise as emitted */
  hcb_group group[HCB_BATCH_GROUPS];
} hcb_columns;

/* The frame that one hcb_ring_read_call took. */
typedef struct {
  uint64_t offset; /* of the header, within the ring's memory */
  uint64_t end;    /* position after the frame, for hcb_ring_release */
  void* memory;    /* of a payload outside the ring, else null; owned by the caller from now on: hcb_block_free */
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
  HCB_COPY_FAILED = 7 /* not damage: damage_messages were lost before they reached the ring. damage_start is an hcb_copy_step,
                         damage_end the driver's error */
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

HCB_EXPORT uint32_t hcb_abi_version(void);

/* The device's ring, created if it does not exist; an existing one is configured. Null if the system has no memory. */
HCB_EXPORT hcb_ring* hcb_ring_open(int32_t device, const hcb_config* config);
/* The device's ring, or null. */
HCB_EXPORT hcb_ring* hcb_ring_get(int32_t device);
/* Sets the device's number in the headers of its frames and in switches; by default the number of its ring. */
HCB_EXPORT void hcb_ring_set_device_id(hcb_ring* ring, int32_t id);
/* Sets policy, timeout, sampling and budget from now on. The sizes are fixed and ignored. */
HCB_EXPORT void hcb_ring_configure(hcb_ring* ring, const hcb_config* config);
/* Moves the ring's memory into the new file `path`, which remains if the process is killed; `name` is the device's. Payloads outside the
 * ring go into the same file, up to `blocks_bytes` (not those of GPUs). Only once per ring, and for a GPU's ring before hcb_gpu_prepare.
 * Returns 0 or an errno. */
HCB_EXPORT int32_t hcb_ring_keep_in_file(hcb_ring* ring, const char* path, const char* name, uint64_t blocks_bytes);
/* The ring of the same device that another process will read, created if it does not exist; configured like `ring`. Move it into a file,
 * then hand it over: from then on it receives the messages of consumers for which hcb_control_outside was called. 0 or an errno. */
HCB_EXPORT hcb_ring* hcb_ring_beside(int32_t device, const hcb_config* config);
HCB_EXPORT int32_t hcb_ring_hand_over(hcb_ring* ring, hcb_ring* twin);
/* This process reads the ring from now on, from the position that the other process released. That process must not read any more. */
HCB_EXPORT void hcb_ring_take_over(hcb_ring* twin);
HCB_EXPORT int32_t hcb_control_outside(uint64_t consumer_id, int32_t outside);
/* Opens another process's ring by its file, for reading; null with an errno. The other functions read it; release frames once they are
 * delivered. It lives as long as the process. */
HCB_EXPORT hcb_ring* hcb_ring_attach(const char* path, int32_t* error);
/* Discards the frames that the dead writer process had not finished. */
HCB_EXPORT void hcb_ring_abandon(hcb_ring* ring);
HCB_EXPORT void* hcb_ring_memory(hcb_ring* ring, uint64_t* capacity_bytes);

/* Waits for frames (timeout_ns < 0: without limit) and lists those that are ready, in order, up to the batch's limits. Returns their
 * number. 0: the time is over, hcb_ring_wake was called, or batch->damage is set. A damaged stretch is reported once, and the next read
 * continues with the first intact frame after it. */
HCB_EXPORT uint32_t hcb_ring_read(hcb_ring* ring, int64_t timeout_ns, hcb_batch* batch);
/* Copies up to `most` frames that are not read yet to `out`, payloads inline, from `*position` on or from the reader's position if
 * that is further, and moves `*position` behind them. For another thread than the reader, while that delivers. `offsets` gets where
 * each copy begins. Returns their number; 0 with `*needed` set: the next frame alone needs so many bytes. Never of a GPU. */
HCB_EXPORT uint32_t hcb_ring_copy_ahead(hcb_ring* ring, uint64_t* position, uint8_t* out, uint64_t capacity, uint64_t* offsets,
                                        uint32_t most, uint64_t* needed);
/* Reads the columns of a batch that has not been released. Does not wait, and may be called with an interpreter lock held. */
HCB_EXPORT void hcb_batch_columns(hcb_ring* ring, const hcb_batch* batch, hcb_columns* columns);
/* Copies the payloads of `count` messages of one group, from index `from` of `order` on, to `out`, `stride` bytes apart. */
HCB_EXPORT void hcb_batch_stack(hcb_ring* ring, const hcb_batch* batch, const hcb_columns* columns, uint64_t from, uint64_t count,
                                uint64_t stride, uint8_t* out);
/* Returns the memory before `position`, which held `frames` more messages, to the producers. Reader only. Returns whether emissions
 * wait for room: then call hcb_ring_admit, which copies them, and may take long. */
HCB_EXPORT int32_t hcb_ring_release(hcb_ring* ring, uint64_t position, uint64_t frames);
HCB_EXPORT void hcb_ring_admit(hcb_ring* ring);
/* For threads that run host functions: waits until the next frame is a call and the reader, which waits in hcb_ring_read, has delivered
 * all frames before it; takes that frame. Returns 1, or 0 if the time is over. The reader pauses until hcb_ring_end_read_call: before that,
 * read the frame and release its memory. */
HCB_EXPORT uint32_t hcb_ring_read_call(hcb_ring* ring, int64_t timeout_ns, hcb_call_frame* frame);
HCB_EXPORT void hcb_ring_end_read_call(hcb_ring* ring);
/* Makes a waiting read return 0, or else the next read that would wait. */
HCB_EXPORT void hcb_ring_wake(hcb_ring* ring);
HCB_EXPORT void hcb_ring_counters(hcb_ring* ring, hcb_counters* out);
/* hcb_counters.discarded, up to the reader's position. */
HCB_EXPORT uint64_t hcb_ring_discarded(hcb_ring* ring);
HCB_EXPORT void hcb_block_free(void* memory);

/* Emits from the host, under the ring's policy; a BLOCKed caller waits. */
HCB_EXPORT int32_t hcb_ring_send(hcb_ring* ring, const uint8_t* prefix, uint64_t prefix_bytes, uint64_t count,
                                 const void* const* arrays, const uint64_t* nbytes, int64_t run_id);
/* Appends a frame without payload, after the waiting producers, regardless of the policy. Does not wait. */
HCB_EXPORT int32_t hcb_ring_append(hcb_ring* ring, const uint8_t* prefix, uint64_t prefix_bytes);

/* Emits a call from the host, after the waiting producers, regardless of the policy, and waits for its reply. Returns HCB_EMITTED, or
 * HCB_DROPPED with the reason in `error`. */
HCB_EXPORT int32_t hcb_ring_call(hcb_ring* ring, const uint8_t* prefix, uint64_t prefix_bytes, uint64_t count,
                                 const void* const* arrays, const uint64_t* nbytes, uint64_t result_count,
                                 void* const* results, const uint64_t* result_nbytes, char* error, uint64_t error_bytes);

/* Writes one frame to `out`. Returns its length, and writes nothing if that exceeds `out_bytes`. 0: invalid prefix. */
HCB_EXPORT uint64_t hcb_encode_frame(const hcb_stamp* stamp, const uint8_t* prefix, uint64_t prefix_bytes, uint64_t count,
                                     const void* const* arrays, const uint64_t* nbytes, uint8_t* out, uint64_t out_bytes);

/* Waits for an event that a supervisor must handle. STALL events come at most ten times per second. Returns 1 with the event, or 0 if
 * the time is over. */
HCB_EXPORT int32_t hcb_supervise_wait(int64_t timeout_ns, hcb_event* event);

/* From now on SIGTERM writes a byte into the pipe `fd` before the current handler gets the signal; call it again to reinstall the
 * handler if another library has replaced it. Returns 1 if the current handler is the default one, which is not called: then the thread
 * that reads the pipe must end the process, after hcb_unwatch_termination. One thread at a time. */
HCB_EXPORT int32_t hcb_watch_termination(int32_t fd);
/* Restores the previous handler. */
HCB_EXPORT void hcb_unwatch_termination(void);

/* Brings the results of the call whose frame has the sequence number `seq`: row-major arrays, elements of less than a byte packed as in a
 * payload. They are copied. Returns the handle for hcb_call_resume; null if no such call waits (any more), or if the lengths differ from
 * those of its results: then the call fails. */
HCB_EXPORT hcb_call* hcb_call_reply(int32_t device, uint64_t seq, uint64_t count, const void* const* arrays,
                                    const uint64_t* nbytes);
/* Continues the program on the calling thread: returns when it ends or waits again. If it waits for another call, hcb_ring_read_call
 * returns that. */
HCB_EXPORT void hcb_call_resume(hcb_call* call);
/* Fails the program that waits for the call, if one does, with `message`. Does not wait. */
HCB_EXPORT void hcb_call_fail(int32_t device, uint64_t seq, const char* message);
/* Number of waiting calls. */
HCB_EXPORT uint64_t hcb_call_count(int32_t device);
/* Fails all calls, and every call from now on: the process ends, so no reply can come. */
HCB_EXPORT void hcb_call_close(const char* message);

/* Switches the messages of a consumer off (or on again) on all devices (-1) or, for a check, on one. A tap that is off sends nothing.
 * HCB_NO_MEMORY: the table is full. */
HCB_EXPORT int32_t hcb_switch(uint64_t consumer_id, int32_t device, int32_t off);
/* The same for all messages with the flag CHECK. */
HCB_EXPORT void hcb_switch_all_checks(int32_t off);
/* Whether a check that fails on the device ends the launch it is in, on all its devices. */
HCB_EXPORT int32_t hcb_abort_on_check(int32_t device, int32_t on);

/* Rules of a tap. A handler asks them in this order, before it copies anything; a refused message uses no sequence number, and is
 * counted. They apply per device and, for taps of shards (hcb_tap_shard), per value of which the shards are parts. */
typedef struct {
  uint64_t every;       /* the first message and each every-th after it; 0 and 1: all */
  uint64_t probe_every; /* while the gate is closed, one message in `probe_every` passes; 0: none by number */
  int64_t probe_ns;     /* while the gate is closed, one message per this time passes; 0: none by time. With both 0 there is no gate */
  int64_t interval_ns;  /* minimum time between two messages; 0: no limit */
  uint64_t truncate;    /* number of elements that are sent of each array; 0: all. Not for shards */
  int32_t off;          /* nothing is sent */
} hcb_control;

/* Sets the rules of a consumer. Counters restart if the rules that use them change. For checks only `off` applies. HCB_NO_MEMORY: the
 * table is full. */
HCB_EXPORT int32_t hcb_control_set(uint64_t consumer_id, const hcb_control* control);
/* Closes or opens the gate of a consumer that has rules: on a device, or with -1 the gate of shards. */
HCB_EXPORT void hcb_control_gate(uint64_t consumer_id, int32_t device, int32_t closed);
/* Number of messages of a consumer that the rules have refused. */
HCB_EXPORT uint64_t hcb_control_suppressed(uint64_t consumer_id);

/* Returns how often the calling thread has given up its processor voluntarily, to wait (always 0 if the system does not tell), and in
 * `cpu_ns` its processor time in nanoseconds. */
HCB_EXPORT int64_t hcb_waits(int64_t* cpu_ns);
/* Sleeps. Returns the time of the end: CLOCK_MONOTONIC in nanoseconds. */
HCB_EXPORT int64_t hcb_sleep(int64_t ns);

/* Computes zlib's CRC-32 of each page of `data`; the last page may be shorter. 0 if this processor has no instructions for it: then
 * nothing is written. */
HCB_EXPORT int32_t hcb_page_checksums(const uint8_t* data, uint64_t nbytes, uint64_t page_bytes, uint32_t* checksums);
/* Loads the GPU driver from `library`, or from its usual file if that is null or empty. Only the handlers of GPUs need it. Returns 1, or
 * 0 with the reason in `error`. */
HCB_EXPORT int32_t hcb_gpu_open(int32_t vendor, const char* library, char* error, uint64_t error_bytes);
/* Opens the GPU with this ordinal for its ring and pins the ring's memory, so that its first tap need not. Returns 0, or the driver's
 * error: then the first tap tries again. */
HCB_EXPORT int32_t hcb_gpu_prepare(hcb_ring* ring, int32_t ordinal);
/* The number of the ring of the GPU with this FFI ordinal, which counts the GPUs of a process. */
HCB_EXPORT int32_t hcb_gpu_ring(int32_t ordinal);

/* Gives the calling thread the floating-point mode that threads start with. XLA flushes denormals on its threads. */
HCB_EXPORT void hcb_default_float_mode(void);

/* From now on programs wait when they call the handler hcb_hold, until hcb_hold_end. That continues them on the calling thread, and returns
 * whether the hold was on. */
HCB_EXPORT void hcb_hold_begin(void);
HCB_EXPORT int32_t hcb_hold_end(void);

/* Lists the ids of Python's thread states, up to `capacity`, and returns their number, or -1 if there is no Python. `made` is the id of a
 * state that is created and deleted for this call: ids count up. Call it with the interpreter lock held. */
HCB_EXPORT int64_t hcb_thread_states(uint64_t* ids, uint64_t capacity, uint64_t* made);

/* Call it first in a forked child: it renews locks and empties rings, because queued messages are the parent's to deliver. */
HCB_EXPORT void hcb_after_fork_child(void);

/* Test aid: `threads` threads send `count` frames each (consumer_id = thread, payload = its counter, `nbytes` long, every byte
 * after the counter being its low byte). Returns the number of emitted frames. */
HCB_EXPORT uint64_t hcb_test_produce(hcb_ring* ring, uint32_t threads, uint64_t count, uint64_t nbytes);

/* Test aid: hcb_ring_call without arrays. */
HCB_EXPORT int32_t hcb_test_call(hcb_ring* ring, const uint8_t* prefix, uint64_t prefix_bytes, uint64_t count,
                                 void* const* results, const uint64_t* nbytes, char* error, uint64_t error_bytes);

/* The XLA FFI handler (platform CPU): one uint8 array attribute `prefix`, and the tapped arrays as operands. Tokens are
 * skipped; result i, if it exists, gets a copy of operand i.
 * With the flag CHECK in the prefix, the prefix's field `device` is the index of the predicate among the operands (not counting tokens),
 * an array of bytes: nothing is sent if none of them is 0. */
struct XLA_FFI_Error;
struct XLA_FFI_CallFrame;
HCB_EXPORT struct XLA_FFI_Error* hcb_tap(struct XLA_FFI_CallFrame* call_frame);
/* The same for arrays that are shards: the first of them is their shard record, int64, whose first number is replaced by
 * the number of times that the tap has fired on this device in this launch. */
HCB_EXPORT struct XLA_FFI_Error* hcb_tap_shard(struct XLA_FFI_CallFrame* call_frame);
/* The same two for GPUs (platforms CUDA and ROCM). The reader waits for their copies, and decides whether a check holds. */
HCB_EXPORT struct XLA_FFI_Error* hcb_gpu_tap(struct XLA_FFI_CallFrame* call_frame);
HCB_EXPORT struct XLA_FFI_Error* hcb_gpu_tap_shard(struct XLA_FFI_CallFrame* call_frame);
/* The handler of calls: the results are those of hcb_call_reply; the prefix must have the flag CALL. */
HCB_EXPORT struct XLA_FFI_Error* hcb_call_host(struct XLA_FFI_CallFrame* call_frame);
/* Waits while a hold is on, without blocking a thread of XLA; its results are zeros. Platform CPU. */
HCB_EXPORT struct XLA_FFI_Error* hcb_hold(struct XLA_FFI_CallFrame* call_frame);

/* Functions of the host's threads. The library may call `this_thread` on any thread; it returns null on a thread that is not the host's.
 * `enter` is called before the other functions, and `leave` after them with the result of `enter`. */
typedef struct {
  void* (*this_thread)(void);
  int32_t (*enter)(void);
  void (*leave)(int32_t entered);
  int32_t (*interrupted)(void); /* whether the user has interrupted this thread; clears the interrupt */
  void (*interrupt)(void);      /* sets the interrupt again, for the host to handle when it can. Without `enter` */
} hcb_host_threads;

/* Sets them, once and for good. The functions must stay valid. */
HCB_EXPORT void hcb_set_host_threads(const hcb_host_threads* threads);

/* Runs the host function of a call on the host's own thread, which runs the program: takes the call's frame with hcb_own_call_read
 * and answers it. `resumed`: the thread continues a program that another one began. Returns whether it was interrupted. */
typedef int32_t (*hcb_host_call)(hcb_own_call* own, int32_t resumed);

/* Makes `call` run the calls of programs on the host's threads, on these threads. Null: threads in hcb_ring_read_call run them, as all
 * other calls. `call` must stay valid. */
HCB_EXPORT void hcb_ring_set_host_call(hcb_ring* ring, hcb_host_call call);

enum {
  HCB_OWN_CALL_TAKEN = 1,            /* as after hcb_ring_read_call: call hcb_ring_end_read_call */
  HCB_OWN_CALL_LATER = 0,            /* the time is over, or the call has failed */
  HCB_OWN_CALL_WAITS_FOR_ITSELF = -1 /* the calling thread is the ring's reader: the frames before the call would never be read */
};
/* Waits until the call is the next frame and all frames before it are delivered; takes that frame. */
HCB_EXPORT int32_t hcb_own_call_read(hcb_ring* ring, hcb_own_call* own, int64_t timeout_ns, hcb_call_frame* frame);
/* Fails a call whose frame no thread has taken. 0 if the frame is not in the ring yet. */
HCB_EXPORT int32_t hcb_own_call_withdraw(hcb_ring* ring, hcb_own_call* own, const char* message);
/* Whether the call has its reply, or has failed. */
HCB_EXPORT int32_t hcb_own_call_ended(hcb_own_call* own);

#ifdef __cplusplus
}
#endif

#endif /* HOSTCALLBACK_C_ABI_H_ */

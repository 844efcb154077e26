/* The library's whole interface: plain C, called through ctypes by receiver/native/bindings.py.
 *
 * Handles and functions are usable from any thread, except that one ring has one reader at a time. Rings live as long as
 * the process: a compiled program may emit into one at any time.
 */
#ifndef HOSTCALLBACK_C_ABI_H_
#define HOSTCALLBACK_C_ABI_H_

#include <stdint.h>

#define HCB_ABI_VERSION 9
#define HCB_EXPORT __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

typedef struct hcb_ring hcb_ring;
typedef struct hcb_call hcb_call; /* answered, and not resumed yet */
typedef struct hcb_own_call hcb_own_call; /* of a thread that takes its call out of the ring itself */

typedef enum {
  HCB_BLOCK = 0,           /* wait for room; loses nothing */
  HCB_BLOCK_THEN_DROP = 1, /* wait up to timeout_ns, then drop */
  HCB_DROP_NEWEST = 2,     /* drop what finds no room */
  HCB_SAMPLE = 3,          /* beyond half full keep every sample_every-th; drop what finds no room */
  HCB_OVERWRITE_OLDEST = 4 /* drop the oldest that the reader has not taken; what must not be dropped is waited for */
} hcb_policy;

/* A zero means the default for the sizes. */
typedef struct {
  uint64_t capacity_bytes;           /* of the ring; rounded up to a power of two. Fixed once the ring exists */
  uint64_t external_threshold_bytes; /* larger payloads travel in blocks outside the ring. Fixed likewise */
  uint64_t block_budget_bytes;       /* of blocks emitted and not yet taken by the reader; one block may exceed it alone */
  int64_t timeout_ns;                /* BLOCK_THEN_DROP */
  uint32_t policy;                   /* hcb_policy */
  uint32_t sample_every;             /* SAMPLE */
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
  uint64_t dropped;       /* refused, or accepted and overwritten; each spent a sequence number */
  uint64_t emitted_bytes; /* of the accepted frames, blocks included */
  uint64_t queued_messages;
  uint64_t queued_bytes;
  uint64_t waiting_producers;
  uint64_t next_seq;
  uint64_t released_messages;
  uint64_t discarded; /* accepted frames that are not delivered: overwritten ones, of checks on a GPU that hold, failed copies */
  uint64_t unpinned;  /* copies from a GPU into memory that the driver could not pin */
} hcb_counters;

enum { HCB_BATCH_FRAMES = 1024, HCB_BATCH_BLOCKS = 64, HCB_BATCH_BYTES = 1 << 20 };
enum { HCB_BATCH_GROUPS = 128, HCB_STACK_BYTES = 1024 };

typedef struct {
  uint64_t frame; /* index within the batch */
  void* memory;   /* from now on the caller's: hcb_block_free */
  uint64_t nbytes;
} hcb_block;

/* What one hcb_ring_read found. */
typedef struct {
  uint64_t frames;
  uint64_t blocks_count;
  uint64_t damage;         /* 0, or why the bytes [damage_start, damage_end) are no frames: an hcb_damage */
  uint64_t damage_start;
  uint64_t damage_end;
  uint64_t damage_messages; /* emitted messages lost with them; counted with the last of several damaged stretches */
  uint64_t offsets[HCB_BATCH_FRAMES]; /* of the headers, within the ring's memory */
  uint64_t ends[HCB_BATCH_FRAMES];    /* position behind each frame, for hcb_ring_release */
  hcb_block blocks[HCB_BATCH_BLOCKS];
  uint64_t folded_total;             /* the sum of the next */
  uint64_t folded[HCB_BATCH_FRAMES]; /* failures of a check that were left out before each frame: of more than two in a row,
                                        the first and the last are listed. Released with it */
} hcb_batch;

/* Messages of one batch that are alike: equal metadata and payload_bytes, and, with the flag BATCHED, one consumer. */
typedef struct {
  uint64_t frame;         /* the first of them */
  uint64_t first;         /* where they begin in `order` */
  uint64_t count;
  uint64_t payload_bytes; /* of each */
} hcb_group;

/* The headers of one batch by field, and which of its messages are alike. Only those with arrays, with a payload in the ring of at
 * most HCB_STACK_BYTES, that are neither calls nor the end of a stream are in a group. */
typedef struct {
  uint64_t groups;
  uint64_t consumer_ids[HCB_BATCH_FRAMES];
  uint64_t flags[HCB_BATCH_FRAMES];
  uint64_t seqs[HCB_BATCH_FRAMES];
  int64_t times_ns[HCB_BATCH_FRAMES];
  int64_t run_ids[HCB_BATCH_FRAMES];
  uint64_t order[HCB_BATCH_FRAMES]; /* indices of frames: group by group, those of none last; otherwise as emitted */
  hcb_group group[HCB_BATCH_GROUPS];
} hcb_columns;

/* What one hcb_ring_read_call took: one frame. */
typedef struct {
  uint64_t offset; /* of the header, within the ring's memory */
  uint64_t end;    /* position behind the frame, for hcb_ring_release */
  void* memory;    /* of the payload if that is outside the ring, else null; from now on the caller's: hcb_block_free */
  uint64_t nbytes; /* of that */
} hcb_call_frame;

typedef enum {
  HCB_INTACT = 0,
  HCB_DAMAGED_MAGIC = 1,
  HCB_DAMAGED_VERSION = 2,
  HCB_DAMAGED_FLAGS = 3,
  HCB_DAMAGED_POSITION = 4,
  HCB_DAMAGED_LENGTH = 5,
  HCB_DAMAGED_BLOCK = 6,
  HCB_COPY_FAILED = 7 /* no damage: damage_messages were lost before they were in the ring. damage_start is an hcb_copy_step,
                         damage_end the driver's error */
} hcb_damage;

/* Where the copy of a message from a GPU failed. */
typedef enum {
  HCB_COPY_INTACT = 0,
  HCB_COPY_CONTEXT = 1,   /* the driver could not be used for the device */
  HCB_COPY_START = 2,     /* the driver refused it */
  HCB_COPY_RUN = 3,       /* the device did not get through it */
  HCB_COPY_NO_MEMORY = 4, /* of the host */
} hcb_copy_step;

/* The fields of a header that a ring would assign. */
typedef struct {
  uint64_t seq;
  uint64_t position;
  int64_t time_ns;
  int64_t run_id;
  int32_t device;
  uint32_t flags; /* added to the prefix's */
} hcb_stamp;

typedef enum {
  HCB_NO_EVENT = 0,
  HCB_EVENT_STALL = 1,
  HCB_EVENT_NEW_RING = 2,
  HCB_EVENT_NOT_PINNED = 3 /* from now on copies from this GPU may go through memory that is not pinned */
} hcb_event_kind;

typedef enum { HCB_CUDA = 0, HCB_ROCM = 1 } hcb_gpu_vendor;

typedef struct {
  int32_t kind; /* hcb_event_kind */
  int32_t device;
} hcb_event;

HCB_EXPORT uint32_t hcb_abi_version(void);

/* The device's ring, made if there is none; an existing one is configured. Null if the system has no memory. */
HCB_EXPORT hcb_ring* hcb_ring_open(int32_t device, const hcb_config* config);
/* The device's ring, or null. */
HCB_EXPORT hcb_ring* hcb_ring_get(int32_t device);
/* What the device is called in the headers of its frames and in switches; by default the number of its ring. */
HCB_EXPORT void hcb_ring_set_device_id(hcb_ring* ring, int32_t id);
/* Policy, timeout, sampling and budget from now on. The sizes are fixed and ignored. */
HCB_EXPORT void hcb_ring_configure(hcb_ring* ring, const hcb_config* config);
/* Moves the ring's memory into the new file `path`, which a process that is killed leaves behind; `name` is the device's. Payloads outside
 * the ring go into the same file as far as `blocks_bytes` reach (not those of GPUs). Once in the life of a ring, and for a GPU's before
 * hcb_gpu_prepare. Returns 0 or an errno. */
HCB_EXPORT int32_t hcb_ring_keep_in_file(hcb_ring* ring, const char* path, const char* name, uint64_t blocks_bytes);
/* The ring of the same device that another process is to read, made if there is none; configured like `ring`. Put it into a file, then
 * hand it over: from then on the messages of consumers for whom hcb_control_outside was called go there. 0 or an errno. */
HCB_EXPORT hcb_ring* hcb_ring_beside(int32_t device, const hcb_config* config);
HCB_EXPORT int32_t hcb_ring_hand_over(hcb_ring* ring, hcb_ring* twin);
/* This process reads it from now on, from where the other one got to, which must not be reading any more. */
HCB_EXPORT void hcb_ring_take_over(hcb_ring* twin);
HCB_EXPORT int32_t hcb_control_outside(uint64_t consumer_id, int32_t outside);
/* The ring of another process, by its file, for reading; null with an errno. Read it with the other functions, and release what was
 * read once it is delivered. It lives as long as the process. */
HCB_EXPORT hcb_ring* hcb_ring_attach(const char* path, int32_t* error);
/* The other process is dead: what it was writing is given up. */
HCB_EXPORT void hcb_ring_abandon(hcb_ring* ring);
HCB_EXPORT void* hcb_ring_memory(hcb_ring* ring, uint64_t* capacity_bytes);

/* Waits for frames (timeout_ns < 0: without limit) and lists those that are ready, in order, up to the batch's limits.
 * Returns their number. 0: the time is over, hcb_ring_wake was called, or batch->damage says what was skipped; a damaged
 * stretch is reported once, and the next read goes on with the first intact frame behind it. */
HCB_EXPORT uint32_t hcb_ring_read(hcb_ring* ring, int64_t timeout_ns, hcb_batch* batch);
/* The columns of a batch that has not been released. They do not wait, and may be called with an interpreter lock held. */
HCB_EXPORT void hcb_batch_columns(hcb_ring* ring, const hcb_batch* batch, hcb_columns* columns);
/* Copies the payloads of `count` messages, from the place `from` of `order` on, all of one group, to `out`, `stride` bytes apart. */
HCB_EXPORT void hcb_batch_stack(hcb_ring* ring, const hcb_batch* batch, const hcb_columns* columns, uint64_t from, uint64_t count,
                                uint64_t stride, uint8_t* out);
/* Gives the memory before `position`, which held `frames` more messages, back to the producers. Reader only. Returns whether
 * emissions wait for it: then call hcb_ring_admit, which copies them, and may take long. */
HCB_EXPORT int32_t hcb_ring_release(hcb_ring* ring, uint64_t position, uint64_t frames);
HCB_EXPORT void hcb_ring_admit(hcb_ring* ring);
/* For threads that run host functions: waits until the next frame is a call and the reader, which waits in hcb_ring_read, is
 * through with all before it; takes that frame. Returns 1, or 0 when the time is over. The reader stands still until
 * hcb_ring_end_read_call: give the frame's memory back and note what it says before. */
HCB_EXPORT uint32_t hcb_ring_read_call(hcb_ring* ring, int64_t timeout_ns, hcb_call_frame* frame);
HCB_EXPORT void hcb_ring_end_read_call(hcb_ring* ring);
/* Makes a waiting read, or else the next read that would wait, return 0. */
HCB_EXPORT void hcb_ring_wake(hcb_ring* ring);
HCB_EXPORT void hcb_ring_counters(hcb_ring* ring, hcb_counters* out);
/* hcb_counters.discarded, up to where the reader is. */
HCB_EXPORT uint64_t hcb_ring_discarded(hcb_ring* ring);
HCB_EXPORT void hcb_block_free(void* memory);

/* Emits from the host, under the ring's policy; a BLOCKed caller waits. */
HCB_EXPORT int32_t hcb_ring_send(hcb_ring* ring, const uint8_t* prefix, uint64_t prefix_bytes, uint64_t count,
                                 const void* const* arrays, const uint64_t* nbytes, int64_t run_id);
/* Appends a frame without payload whatever the policy, behind the producers that wait, without waiting. */
HCB_EXPORT int32_t hcb_ring_append(hcb_ring* ring, const uint8_t* prefix, uint64_t prefix_bytes);

/* Emits a call from the host, whatever the policy, behind the producers that wait, and waits for its reply. Returns HCB_EMITTED,
 * or HCB_DROPPED with the reason in `error`. */
HCB_EXPORT int32_t hcb_ring_call(hcb_ring* ring, const uint8_t* prefix, uint64_t prefix_bytes, uint64_t count,
                                 const void* const* arrays, const uint64_t* nbytes, uint64_t result_count,
                                 void* const* results, const uint64_t* result_nbytes, char* error, uint64_t error_bytes);

/* Writes one frame to `out`. Returns its length; nothing is written if that exceeds `out_bytes`. 0: invalid prefix. */
HCB_EXPORT uint64_t hcb_encode_frame(const hcb_stamp* stamp, const uint8_t* prefix, uint64_t prefix_bytes, uint64_t count,
                                     const void* const* arrays, const uint64_t* nbytes, uint8_t* out, uint64_t out_bytes);

/* Waits for something that a supervisor must act on. STALL events come at most ten times per second. Returns 1 with the
 * event, 0 if the time is over. */
HCB_EXPORT int32_t hcb_supervise_wait(int64_t timeout_ns, hcb_event* event);

/* From now on SIGTERM writes a byte into the pipe `fd` before the handler that is there now gets it; called again, also before
 * one that has replaced ours since. Returns 1 if that handler is the default one, which is not called: whoever reads the pipe
 * ends the process then, after hcb_unwatch_termination. One thread at a time. */
HCB_EXPORT int32_t hcb_watch_termination(int32_t fd);
/* The handler that was there before is there again. */
HCB_EXPORT void hcb_unwatch_termination(void);

/* Brings the results of the call whose frame has the sequence number `seq`: row-major arrays, elements of less than a byte
 * packed as in a payload. They are copied. Returns what hcb_call_resume must be called with; null if no such call waits (any
 * more), or if the lengths are not those of its results: it fails then. */
HCB_EXPORT hcb_call* hcb_call_reply(int32_t device, uint64_t seq, uint64_t count, const void* const* arrays,
                                    const uint64_t* nbytes);
/* Lets the program go on, on the calling thread: returns when it ends or waits again. If it waits for another call,
 * hcb_ring_read_call has that. */
HCB_EXPORT void hcb_call_resume(hcb_call* call);
/* Fails the program that waits for it, if there is one, with `message`. Does not wait. */
HCB_EXPORT void hcb_call_fail(int32_t device, uint64_t seq, const char* message);
/* How many calls wait. */
HCB_EXPORT uint64_t hcb_call_count(int32_t device);
/* Fails all calls, and every call from now on: the process ends, and nobody will answer. */
HCB_EXPORT void hcb_call_close(const char* message);

/* Switches the messages of a consumer off (or on again) on all devices (-1), or, of a check, on one. What is off sends nothing.
 * HCB_NO_MEMORY: the table is full. */
HCB_EXPORT int32_t hcb_switch(uint64_t consumer_id, int32_t device, int32_t off);
/* The same for everything with the flag CHECK. */
HCB_EXPORT void hcb_switch_all_checks(int32_t off);
/* Whether a check that fails on the device ends the launch it is in, on all its devices. */
HCB_EXPORT int32_t hcb_abort_on_check(int32_t device, int32_t on);

/* What a tap may send. The rules are asked in this order, before anything is copied; what they refuse spends no sequence number
 * and is counted. They hold for each device by itself, and for taps of shards (hcb_tap_shard) for the values that the shards make. */
typedef struct {
  uint64_t every;       /* the first message and each every-th after it; 0 and 1: all */
  uint64_t probe_every; /* while the gate is closed, of so many messages one passes; 0: not by number */
  int64_t probe_ns;     /* likewise, one in this time; 0: not by time. With both 0 there is no gate */
  int64_t interval_ns;  /* at least so long between two messages; 0: no limit */
  uint64_t truncate;    /* of each array the first so many elements; 0: all. Not of shards */
  int32_t off;          /* nothing at all */
} hcb_control;

/* Sets the rules of a consumer. Counting begins anew where they count otherwise than before. Of checks only `off` is asked.
 * HCB_NO_MEMORY: the table is full. */
HCB_EXPORT int32_t hcb_control_set(uint64_t consumer_id, const hcb_control* control);
/* Closes or opens the gate of a consumer that has rules: on a device, or with -1 that of shards. */
HCB_EXPORT void hcb_control_gate(uint64_t consumer_id, int32_t device, int32_t closed);
/* How many messages of a consumer the rules have refused. */
HCB_EXPORT uint64_t hcb_control_suppressed(uint64_t consumer_id);

/* How often the calling thread has waited for anything, that is given its processor up of its own accord (always 0 where the system
 * does not tell), and in `cpu_ns` how many nanoseconds of processor it has used. */
HCB_EXPORT int64_t hcb_waits(int64_t* cpu_ns);
/* Sleeps. Returns the time at which that ended: CLOCK_MONOTONIC in nanoseconds. */
HCB_EXPORT int64_t hcb_sleep(int64_t ns);

/* The CRC-32 (zlib's) of each page of `data`; the last may be shorter. 0 where this processor has no instructions for it: nothing is
 * written then. */
HCB_EXPORT int32_t hcb_page_checksums(const uint8_t* data, uint64_t nbytes, uint64_t page_bytes, uint32_t* checksums);
/* Loads the GPU driver from `library`, or from its usual place if that is null or empty. Nothing but the handlers of GPUs needs
 * it. Returns 1, or 0 with the reason in `error`. */
HCB_EXPORT int32_t hcb_gpu_open(int32_t vendor, const char* library, char* error, uint64_t error_bytes);
/* Opens the GPU with this ordinal for its ring and pins that, so that its first tap need not. Returns 0, or the driver's error: then
 * the first tap tries again. */
HCB_EXPORT int32_t hcb_gpu_prepare(hcb_ring* ring, int32_t ordinal);
/* The number of the ring of the GPU with this FFI ordinal, which counts a process's own devices. */
HCB_EXPORT int32_t hcb_gpu_ring(int32_t ordinal);

/* Gives the calling thread the floating-point mode that threads start with. XLA flushes denormals in what it calls. */
HCB_EXPORT void hcb_default_float_mode(void);

/* From now on programs wait where they call the handler hcb_hold, until hcb_hold_end, which goes on with them on the calling thread
 * and returns whether the hold was on. */
HCB_EXPORT void hcb_hold_begin(void);
HCB_EXPORT int32_t hcb_hold_end(void);

/* The numbers of Python's thread states, of which `ids` has room for `capacity`: returns how many there are, or -1 where no Python is found.
 * `made` is the number of one that is made for that, and ended: numbers count up. With the interpreter lock held. */
HCB_EXPORT int64_t hcb_thread_states(uint64_t* ids, uint64_t capacity, uint64_t* made);

/* In a forked child, before anything else: fresh locks and empty rings, since what is queued is the parent's to deliver. */
HCB_EXPORT void hcb_after_fork_child(void);

/* Test aid: `threads` threads send `count` frames each (consumer_id = thread, payload = its counter, `nbytes` long, every
 * byte that follows the counter being its low byte). Returns how many were emitted. */
HCB_EXPORT uint64_t hcb_test_produce(hcb_ring* ring, uint32_t threads, uint64_t count, uint64_t nbytes);

/* Test aid: hcb_ring_call without arrays. */
HCB_EXPORT int32_t hcb_test_call(hcb_ring* ring, const uint8_t* prefix, uint64_t prefix_bytes, uint64_t count,
                                 void* const* results, const uint64_t* nbytes, char* error, uint64_t error_bytes);

/* The XLA FFI handler (platform CPU): one uint8 array attribute `prefix`, the tapped arrays as operands. Tokens are
 * passed over; result i, if there is one, gets a copy of operand i.
 * With the flag CHECK in the prefix, the prefix's field `device` says which operand (not counting tokens) is the predicate, an
 * array of bytes: nothing is sent where none of them is 0. */
struct XLA_FFI_Error;
struct XLA_FFI_CallFrame;
HCB_EXPORT struct XLA_FFI_Error* hcb_tap(struct XLA_FFI_CallFrame* call_frame);
/* The same for arrays that are shards: the first of them is their shard record, int64, whose first number is replaced by
 * how often the tap has fired on this device in this launch. */
HCB_EXPORT struct XLA_FFI_Error* hcb_tap_shard(struct XLA_FFI_CallFrame* call_frame);
/* The same two for GPUs (platforms CUDA and ROCM), whose copies the reader waits for: it decides whether a check holds. */
HCB_EXPORT struct XLA_FFI_Error* hcb_gpu_tap(struct XLA_FFI_CallFrame* call_frame);
HCB_EXPORT struct XLA_FFI_Error* hcb_gpu_tap_shard(struct XLA_FFI_CallFrame* call_frame);
/* Likewise, but the results are what hcb_call_reply brings; the prefix must have the flag CALL. */
HCB_EXPORT struct XLA_FFI_Error* hcb_call_host(struct XLA_FFI_CallFrame* call_frame);
/* Waits while a hold is on, without holding a thread of XLA; its results are zeros. Platform CPU. */
HCB_EXPORT struct XLA_FFI_Error* hcb_hold(struct XLA_FFI_CallFrame* call_frame);

/* What the library has to know of the host's threads. `this_thread` is asked on any thread and returns null on one that is not the
 * host's; `enter` is called before the others, and `leave` behind them with what it returned. */
typedef struct {
  void* (*this_thread)(void);
  int32_t (*enter)(void);
  void (*leave)(int32_t entered);
  int32_t (*interrupted)(void); /* whether the user has interrupted this thread; takes note of it */
  void (*interrupt)(void);      /* undoes that: the host acts on it when it can. Without `enter` */
} hcb_host_threads;

/* From now on, and for good. The functions must not vanish. */
HCB_EXPORT void hcb_set_host_threads(const hcb_host_threads* threads);

/* Runs the host function of a call on the host's own thread, which runs the program: takes the call's frame with hcb_own_call_read
 * and answers it. `resumed`: the thread goes on with a program that another one began. Returns whether it was interrupted. */
typedef int32_t (*hcb_host_call)(hcb_own_call* own, int32_t resumed);

/* Has the calls of programs that run on the host's threads made by `call`, on these threads. Null: as all others, by whoever calls
 * hcb_ring_read_call. `call` must not vanish. */
HCB_EXPORT void hcb_ring_set_host_call(hcb_ring* ring, hcb_host_call call);

enum {
  HCB_OWN_CALL_TAKEN = 1,            /* as from hcb_ring_read_call: hcb_ring_end_read_call */
  HCB_OWN_CALL_LATER = 0,            /* the time is over, or the call has been failed */
  HCB_OWN_CALL_WAITS_FOR_ITSELF = -1 /* the calling thread is the ring's reader: what is before the call would never be read */
};
/* Waits until the call is the next frame, and all before it is delivered; takes that frame. */
HCB_EXPORT int32_t hcb_own_call_read(hcb_ring* ring, hcb_own_call* own, int64_t timeout_ns, hcb_call_frame* frame);
/* Fails a call that nobody has taken. 0 if its frame is not in the ring yet. */
HCB_EXPORT int32_t hcb_own_call_withdraw(hcb_ring* ring, hcb_own_call* own, const char* message);
/* Whether it has its reply, or has been failed. */
HCB_EXPORT int32_t hcb_own_call_ended(hcb_own_call* own);

#ifdef __cplusplus
}
#endif

#endif /* HOSTCALLBACK_C_ABI_H_ */

/* The library's whole interface: plain C, called through ctypes by receiver/native/bindings.py, and the
 * handlers that XLA calls through its FFI. `abi/types.h` has its types. Each function is defined where its
 * state is.
 *
 * Any thread may use handles and functions, except that one thread at a time reads a ring. Rings live as long
 * as the process, because a compiled program may emit into one at any time. */
#ifndef HOSTCALLBACK_ABI_EXPORTS_H_
#define HOSTCALLBACK_ABI_EXPORTS_H_

#include <stdint.h>

#include "abi/types.h"

#ifdef __cplusplus
extern "C" {
#endif

HCB_EXPORT uint32_t hcb_abi_version(void);

/* The device's ring, created if it does not exist; an existing one is configured. Null if the system has no
 * memory. */
HCB_EXPORT hcb_ring* hcb_ring_open(int32_t device, const hcb_config* config);
/* The device's ring, or null. */
HCB_EXPORT hcb_ring* hcb_ring_get(int32_t device);
/* Sets the device's number in the headers of its frames and in switches; by default the number of its
 * ring. */
HCB_EXPORT void hcb_ring_set_device_id(hcb_ring* ring, int32_t id);
/* Sets policy, timeout, sampling and budget from now on. The sizes are fixed and ignored. */
HCB_EXPORT void hcb_ring_configure(hcb_ring* ring, const hcb_config* config);
/* Moves the ring's memory into the new file `path`, which remains if the process is killed; `name` is the
 * device's. Payloads outside the ring go into the same file, up to `blocks_bytes` (not those of GPUs). Only
 * once per ring, and for a GPU's ring before hcb_gpu_prepare. Returns 0 or an errno. */
HCB_EXPORT int32_t hcb_ring_keep_in_file(hcb_ring* ring, const char* path, const char* name,
                                         uint64_t blocks_bytes);
HCB_EXPORT void* hcb_ring_memory(hcb_ring* ring, uint64_t* capacity_bytes);

/* Waits for frames (timeout_ns < 0: without limit) and lists those that are ready, in order, up to the
 * batch's limits. Returns their number. 0: the time is over, hcb_ring_wake was called, or batch->damage is
 * set. A damaged stretch is reported once, and the next read continues with the first intact frame after
 * it. A batch of `turn_frames` or more comes with the turn to deliver, which one thread has at a time, so
 * that receivers do not compete for the interpreter lock; 0: never. */
HCB_EXPORT uint32_t hcb_ring_read(hcb_ring* ring, int64_t timeout_ns, uint32_t turn_frames, hcb_batch* batch);
/* Copies up to `most` frames that are not read yet to `out`, payloads inline, from `*position` on or from the
 * reader's position if that is further, and moves `*position` behind them. For another thread than the
 * reader, while that delivers. `offsets` gets where each copy begins. Returns their number; 0 with `*needed`
 * set: the next frame alone needs so many bytes. Never of a GPU. */
HCB_EXPORT uint32_t hcb_ring_copy_ahead(hcb_ring* ring, uint64_t* position, uint8_t* out, uint64_t capacity,
                                        uint64_t* offsets, uint32_t most, uint64_t* needed);
/* Reads the columns of a batch that has not been released. Does not wait, and may be called with an
 * interpreter lock held. */
HCB_EXPORT void hcb_batch_columns(hcb_ring* ring, const hcb_batch* batch, hcb_columns* columns);
/* Copies the payloads of `count` messages of one group, from index `from` of `order` on, to `out`, `stride`
 * bytes apart. */
HCB_EXPORT void hcb_batch_stack(hcb_ring* ring, const hcb_batch* batch, const hcb_columns* columns,
                                uint64_t from, uint64_t count, uint64_t stride, uint8_t* out);
/* Where the copies begin that hcb_batch_copy makes of the frames of a batch, in `offsets`; returns their
 * bytes. hcb_batch_copy writes them to `out`, one after another, payloads inline. Of a batch that has not
 * been released and whose blocks are not freed. */
HCB_EXPORT uint64_t hcb_batch_layout(hcb_ring* ring, const hcb_batch* batch, uint64_t* offsets);
HCB_EXPORT void hcb_batch_copy(hcb_ring* ring, const hcb_batch* batch, uint8_t* out);
/* Returns the memory before `position`, which held `frames` more messages, to the producers. Reader only.
 * Returns whether emissions wait for room: then call hcb_ring_admit, which copies them, and may take long. */
HCB_EXPORT int32_t hcb_ring_release(hcb_ring* ring, uint64_t position, uint64_t frames);
HCB_EXPORT void hcb_ring_admit(hcb_ring* ring);
/* For threads that run host functions: waits until the next frame is a call and the reader, which waits in
 * hcb_ring_read, has delivered all frames before it; takes that frame. Returns 1, or 0 if the time is over.
 * The reader pauses until hcb_ring_end_read_call: before that, read the frame and release its memory. */
HCB_EXPORT uint32_t hcb_ring_read_call(hcb_ring* ring, int64_t timeout_ns, hcb_call_frame* frame);
HCB_EXPORT void hcb_ring_end_read_call(hcb_ring* ring);
/* Makes a waiting read return 0, or else the next read that would wait. */
HCB_EXPORT void hcb_ring_wake(hcb_ring* ring);
HCB_EXPORT void hcb_ring_counters(hcb_ring* ring, hcb_counters* out);
/* hcb_counters.discarded, up to the reader's position. */
HCB_EXPORT uint64_t hcb_ring_discarded(hcb_ring* ring);
/* A number that changes with each emission of this process. hcb_settle notes that all is delivered that was
 * emitted when it was `emissions`; hcb_is_settled tells whether nothing was emitted since; hcb_note_emission
 * counts one that is in no ring. None of them waits. */
HCB_EXPORT uint64_t hcb_emissions(void);
HCB_EXPORT void hcb_settle(uint64_t emissions);
HCB_EXPORT int32_t hcb_is_settled(void);
HCB_EXPORT void hcb_note_emission(void);
/* hcb_buffer stands in for a type's function that gives out an object's memory: it calls `original`, and then
 * `wait`, unless all is settled or `wait` is null. Call both with the interpreter lock held. Set `original`
 * before the first hcb_buffer; null keeps it. */
HCB_EXPORT void hcb_buffer_waits(hcb_get_buffer original, hcb_wait wait);
/* Tells the native code that called the `wait` of this thread that it was not interrupted. */
HCB_EXPORT void hcb_waited(void);
HCB_EXPORT int hcb_buffer(void* object, void* view, int flags);
HCB_EXPORT void hcb_block_free(void* memory);

/* Emits from the host, under the ring's policy; a BLOCKed caller waits. */
HCB_EXPORT int32_t hcb_ring_send(hcb_ring* ring, const uint8_t* prefix, uint64_t prefix_bytes, uint64_t count,
                                 const void* const* arrays, const uint64_t* nbytes, int64_t run_id);
/* Appends a frame without payload, after the waiting producers, regardless of the policy. Does not wait. */
HCB_EXPORT int32_t hcb_ring_append(hcb_ring* ring, const uint8_t* prefix, uint64_t prefix_bytes);
/* The same with a payload, which is copied, and as a message of a launch. */
HCB_EXPORT int32_t hcb_ring_post(hcb_ring* ring, const uint8_t* prefix, uint64_t prefix_bytes, uint64_t count,
                                 const void* const* arrays, const uint64_t* nbytes, int64_t run_id);

/* Emits a call from the host, after the waiting producers, regardless of the policy, and waits for its reply.
 * Returns HCB_EMITTED, or HCB_DROPPED with the reason in `error`. */
HCB_EXPORT int32_t hcb_ring_call(hcb_ring* ring, const uint8_t* prefix, uint64_t prefix_bytes, uint64_t count,
                                 const void* const* arrays, const uint64_t* nbytes, uint64_t result_count,
                                 void* const* results, const uint64_t* result_nbytes, char* error,
                                 uint64_t error_bytes);

/* Writes one frame to `out`. Returns its length, and writes nothing if that exceeds `out_bytes`. 0: invalid
 * prefix. */
HCB_EXPORT uint64_t hcb_encode_frame(const hcb_stamp* stamp, const uint8_t* prefix, uint64_t prefix_bytes,
                                     uint64_t count, const void* const* arrays, const uint64_t* nbytes,
                                     uint8_t* out, uint64_t out_bytes);

/* Waits for an event that a supervisor must handle. STALL events come at most ten times per second. Returns 1
 * with the event, or 0 if the time is over. */
HCB_EXPORT int32_t hcb_supervise_wait(int64_t timeout_ns, hcb_event* event);

/* Makes the process exit with `status` if it would exit with 0; 0 undoes that. */
HCB_EXPORT void hcb_fail_exit(int32_t status);
/* From now on SIGTERM writes a byte into the pipe `fd` before the current handler gets the signal; call it
 * again to reinstall the handler if another library has replaced it. Returns 1 if the current handler is the
 * default one, which is not called: then the thread that reads the pipe must end the process, after
 * hcb_unwatch_termination. One thread at a time. */
HCB_EXPORT int32_t hcb_watch_termination(int32_t fd);
/* Restores the previous handler. */
HCB_EXPORT void hcb_unwatch_termination(void);

/* The same for SIGINT. Returns 0, and installs nothing, if no handler is installed now: SIGINT ends the
 * process then, or is ignored. */
HCB_EXPORT int32_t hcb_watch_interrupt(int32_t fd);
/* Whether the next SIGINT only writes the byte, without a call of the handler before ours. Returns what was
 * set before; it is 0 again once there was such a signal. */
HCB_EXPORT int32_t hcb_hold_interrupt(int32_t on);
/* Has an interruptible wait of a thread, a pthread_t, return with EINTR; no other handler sees a signal.
 * Python then looks for signals. Does nothing while SIGINT is not watched, or without glibc. */
HCB_EXPORT void hcb_end_wait(uint64_t thread);
HCB_EXPORT void hcb_unwatch_interrupt(void);

/* Brings the results of the call whose frame has the sequence number `seq`: row-major arrays, elements of
 * less than a byte packed as in a payload. They are copied. Returns the handle for hcb_call_resume; null if
 * no such call waits (any more), or if the lengths differ from those of its results: then the call fails. */
HCB_EXPORT hcb_call* hcb_call_reply(int32_t device, uint64_t seq, uint64_t count, const void* const* arrays,
                                    const uint64_t* nbytes);
/* Continues the program on the calling thread: returns when it ends or waits again. If it waits for another
 * call, hcb_ring_read_call returns that. */
HCB_EXPORT void hcb_call_resume(hcb_call* call);
/* Fails the program that waits for the call, if one does, with `message`. Does not wait. */
HCB_EXPORT void hcb_call_fail(int32_t device, uint64_t seq, const char* message);
/* Number of waiting calls. */
HCB_EXPORT uint64_t hcb_call_count(int32_t device);
/* Fails all calls, and every call from now on: the process ends, so no reply can come. */
HCB_EXPORT void hcb_call_close(const char* message);

/* Switches the messages of a consumer off (or on again) on all devices (-1) or, for a check, on one. A tap
 * that is off sends nothing. HCB_NO_MEMORY: the table is full. */
HCB_EXPORT int32_t hcb_switch(uint64_t consumer_id, int32_t device, int32_t off);
/* The same for all messages with the flag CHECK. */
HCB_EXPORT void hcb_switch_all_checks(int32_t off);
/* Whether a check that fails on the device ends the launch it is in, on all its devices. */
HCB_EXPORT int32_t hcb_abort_on_check(int32_t device, int32_t on);

/* Sets the rules of a consumer. Counters restart if the rules that use them change. For checks only `off`
 * applies. HCB_NO_MEMORY: the table is full. */
HCB_EXPORT int32_t hcb_control_set(uint64_t consumer_id, const hcb_control* control);
/* Sends the messages that are kept because a rate left them out (the latest one of each tap and device). Does
 * not wait. Returns their number. hcb_control_set does it for its consumer. */
HCB_EXPORT uint64_t hcb_latest_send(void);
/* Number of those messages that wait for room in their ring; they count as emitted when they are in it. */
HCB_EXPORT uint64_t hcb_latest_waiting(void);
/* Closes or opens the gate of a consumer that has rules: on a device, or with -1 the gate of shards. */
HCB_EXPORT void hcb_control_gate(uint64_t consumer_id, int32_t device, int32_t closed);
/* Number of messages of a consumer that the rules have refused. */
HCB_EXPORT uint64_t hcb_control_suppressed(uint64_t consumer_id);

/* Returns how often the calling thread has given up its processor voluntarily, to wait (always 0 if the
 * system does not tell), and in `cpu_ns` its processor time in nanoseconds. */
HCB_EXPORT int64_t hcb_waits(int64_t* cpu_ns);
/* Hands the turn to deliver (see hcb_ring_read) to the thread that has waited longest for it. Nothing if the
 * calling thread does not have it: another one takes it from a thread that has kept it for 3 ms. */
HCB_EXPORT void hcb_delivery_turn_give(void);
/* Whether the calling thread has the turn and another one waits for it. */
HCB_EXPORT int32_t hcb_delivery_turn_awaited(void);
/* Sleeps for `ns` nanoseconds. A thread that has the turn gives it before, and takes it again afterwards.
 * Returns the time of the end: CLOCK_MONOTONIC in nanoseconds. */
HCB_EXPORT int64_t hcb_delivery_pause(int64_t ns);

/* Computes zlib's CRC-32 of each page of `data`; the last page may be shorter. 0 if this processor has no
 * instructions for it: then nothing is written. */
HCB_EXPORT int32_t hcb_page_checksums(const uint8_t* data, uint64_t nbytes, uint64_t page_bytes,
                                      uint32_t* checksums);
/* Loads the GPU driver from `library`, or from its usual file if that is null or empty. Only the handlers of
 * GPUs need it. Returns 1, or 0 with the reason in `error`. */
HCB_EXPORT int32_t hcb_gpu_open(int32_t vendor, const char* library, char* error, uint64_t error_bytes);
/* Opens the GPU with this ordinal for its ring and pins the ring's memory, so that its first tap need not.
 * Returns 0, or the driver's error: then the first tap tries again. */
HCB_EXPORT int32_t hcb_gpu_prepare(hcb_ring* ring, int32_t ordinal);
/* The number of the ring of the GPU with this FFI ordinal, which counts the GPUs of a process. */
HCB_EXPORT int32_t hcb_gpu_ring(int32_t ordinal);

/* Gives the calling thread the floating-point mode that threads start with. XLA flushes denormals on its
 * threads. */
HCB_EXPORT void hcb_default_float_mode(void);

/* From now on programs wait when they call the handler hcb_hold, until hcb_hold_end. That continues them on
 * the calling thread. It returns HCB_HOLD_ON if the hold was on, and HCB_HOLD_HELD_BEGINNER if since its
 * beginning a program ran, and waited, on the thread that began it: that thread dispatches synchronously. */
#define HCB_HOLD_ON 1
#define HCB_HOLD_HELD_BEGINNER 2
HCB_EXPORT void hcb_hold_begin(void);
HCB_EXPORT int32_t hcb_hold_end(void);

/* Holds the calling thread for that time, and without end if the interpreter is being finalized then: the
 * thread would be ended where it asks for the interpreter lock. Called without that lock. */
HCB_EXPORT void hcb_hold_thread(int64_t nanoseconds);

/* Lists the ids of Python's thread states, up to `capacity`, and returns their number, or -1 if there is no
 * Python. `made` is the id of a state that is created and deleted for this call: ids count up. Call it with
 * the interpreter lock held. */
HCB_EXPORT int64_t hcb_thread_states(uint64_t* ids, uint64_t capacity, uint64_t* made);

/* Call it first in a forked child: it renews locks and empties rings, because queued messages are the
 * parent's to deliver. */
HCB_EXPORT void hcb_after_fork_child(void);

/* The functions named hcb_test_ are called by tests only. So are hcb_ring_get, hcb_ring_send, hcb_call_count
 * and hcb_encode_frame, which let tests emit, count and compare frames without a program of JAX. */

/* Test aid: `threads` threads send `count` frames each (consumer_id = thread, payload = its counter, `nbytes`
 * long, every byte after the counter being its low byte). Returns the number of emitted frames. */
HCB_EXPORT uint64_t hcb_test_produce(hcb_ring* ring, uint32_t threads, uint64_t count, uint64_t nbytes);

/* Test aid: hcb_ring_call without arrays. */
HCB_EXPORT int32_t hcb_test_call(hcb_ring* ring, const uint8_t* prefix, uint64_t prefix_bytes, uint64_t count,
                                 void* const* results, const uint64_t* nbytes, char* error,
                                 uint64_t error_bytes);

/* Sets them, once and for good. The functions must stay valid. */
HCB_EXPORT void hcb_set_host_threads(const hcb_host_threads* threads);

/* Makes `call` run the calls of programs on the host's threads, on these threads. Null: threads in
 * hcb_ring_read_call run them, as all other calls. `call` must stay valid. */
HCB_EXPORT void hcb_ring_set_host_call(hcb_ring* ring, hcb_host_call call);

/* Waits until the call is the next frame and all frames before it are delivered; takes that frame. */
HCB_EXPORT int32_t hcb_own_call_read(hcb_ring* ring, hcb_own_call* own, int64_t timeout_ns,
                                     hcb_call_frame* frame);
/* Fails a call whose frame no thread has taken. 0 if the frame is not in the ring yet. */
HCB_EXPORT int32_t hcb_own_call_withdraw(hcb_ring* ring, hcb_own_call* own, const char* message);
/* Whether the call has its reply, or has failed. */
HCB_EXPORT int32_t hcb_own_call_ended(hcb_own_call* own);

struct XLA_FFI_Error;
struct XLA_FFI_CallFrame;

/* The XLA FFI handler (platform CPU): one uint8 array attribute `prefix`, and the tapped arrays as operands.
 * Tokens are skipped; result i, if it exists, gets a copy of operand i. With the flag CHECK in the prefix,
 * the prefix's field `device` is the index of the predicate among the operands (not counting tokens), an
 * array of bytes: nothing is sent if none of them is 0. */
HCB_EXPORT struct XLA_FFI_Error* hcb_tap(struct XLA_FFI_CallFrame* call_frame);
/* The same for arrays that are shards: the first of them is their shard record, int64, whose first number is
 * replaced by the number of times that the tap has fired on this device in this launch. */
HCB_EXPORT struct XLA_FFI_Error* hcb_tap_shard(struct XLA_FFI_CallFrame* call_frame);
/* The same two for GPUs (platforms CUDA and ROCM). The reader waits for their copies, and decides whether a
 * check holds. */
HCB_EXPORT struct XLA_FFI_Error* hcb_gpu_tap(struct XLA_FFI_CallFrame* call_frame);
HCB_EXPORT struct XLA_FFI_Error* hcb_gpu_tap_shard(struct XLA_FFI_CallFrame* call_frame);
/* The handler of calls: the results are those of hcb_call_reply; the prefix must have the flag CALL. */
HCB_EXPORT struct XLA_FFI_Error* hcb_call_host(struct XLA_FFI_CallFrame* call_frame);
/* Waits while a hold is on, without blocking a thread of XLA; its results are zeros. Platform CPU. */
HCB_EXPORT struct XLA_FFI_Error* hcb_hold(struct XLA_FFI_CallFrame* call_frame);
/* Waits until the messages of this process are delivered: on a thread of the host with the `wait` of
 * hcb_buffer_waits, on another one for at most a second without progress. Not at all while that `wait` is
 * null. It has a token only. Platform CPU. */
HCB_EXPORT struct XLA_FFI_Error* hcb_wait_for_output(struct XLA_FFI_CallFrame* call_frame);
/* Reads a clock. The result is a uint32[2]: microseconds, which wrap around, and the least number of
 * microseconds between two readings that costs little. The operand changes from reading to reading. Platform
 * CPU. */
HCB_EXPORT struct XLA_FFI_Error* hcb_clock(struct XLA_FFI_CallFrame* call_frame);
/* Reads a clock at an edge of a timed place. Operands: n arrays, a uint32[2] that comes before, and the
 * uint32[2] since which to count. Results: the n arrays, in their memory; the Unix time in nanoseconds as a
 * uint32[2], the lower half first; the seconds since then as a float32. Platform CPU. */
HCB_EXPORT struct XLA_FFI_Error* hcb_edge(struct XLA_FFI_CallFrame* call_frame);
/* Whether arrays of floating-point or complex numbers have elements that are not finite. The attribute
 * `groups`, an int32 array, has for each operand the index of its element of the result, a bool[n]. Platform
 * CPU. */
HCB_EXPORT struct XLA_FFI_Error* hcb_not_finite(struct XLA_FFI_CallFrame* call_frame);
/* Seven statistics of an array of float32 or float64 that has elements, as float32 scalars: mean, std, min,
 * max, norm, fraction of zeros, fraction of elements that are not finite. Platform CPU. */
HCB_EXPORT struct XLA_FFI_Error* hcb_statistics(struct XLA_FFI_CallFrame* call_frame);
/* The same of a device's share of an array, as a row: float32 [1, 8], the seven and the number of elements,
 * which may be 0. Operands: a shard of the array, and the number of the partition. The attribute `shares`, an
 * int64 array, has for each partition the first and the end of its elements, and how many there are along
 * each axis before the padding. Platform CPU. */
HCB_EXPORT struct XLA_FFI_Error* hcb_share_statistics(struct XLA_FFI_CallFrame* call_frame);
/* The statistics of arrays from the rows of their shares, float32 [shares, values, 8]: for each of the arrays
 * seven float32 results of any shape, whose elements are values. Platform CPU. */
HCB_EXPORT struct XLA_FFI_Error* hcb_merged_statistics(struct XLA_FFI_CallFrame* call_frame);
/* For n operands 2n results: the operands, in their memory, and a copy of each. Platform CPU. */
HCB_EXPORT struct XLA_FFI_Error* hcb_copy(struct XLA_FFI_CallFrame* call_frame);
/* What is to be done about a call of a program whose tests are a bool[n]. The attribute `program`, an int32
 * array, has the number of the program. The result is a uint32[2]: 0 for a call that did not fail, 1 for one
 * in which a test failed that did not fail in the call before, 2 for other failed ones; and the number of the
 * call, from 0. Platform CPU. */
HCB_EXPORT struct XLA_FFI_Error* hcb_verdict(struct XLA_FFI_CallFrame* call_frame);
/* Forgets which tests of the last calls failed: the next call in which one fails is the first of a row. Any
 * thread. */
HCB_EXPORT void hcb_verdict_forget(void);

/* Cells are values that the host changes while programs read them. The handler has one uint8 array attribute,
 * `cell` (`Request` in handlers/cell.cc), and the value as its last result. All devices of a launch read one
 * value at one point. Platform CPU. */
HCB_EXPORT struct XLA_FFI_Error* hcb_cell(struct XLA_FFI_CallFrame* call_frame);
/* Sets a cell's value, and makes the cell if it does not exist: now, or, with `at` >= 0, before the read of
 * that number. Returns how often programs have read it so far; devices of one launch read together. `type`:
 * equal for values of one dtype and shape. HCB_INVALID: the cell has another type. HCB_NO_MEMORY: there are
 * 2048 cells. */
HCB_EXPORT int64_t hcb_cell_set(uint64_t id, uint64_t type, const uint8_t* value, uint64_t nbytes,
                                int64_t at);
/* Copies a cell's value to `out`. Returns the number of its reads before; `counts`: this is one more.
 * HCB_INVALID: there is no such cell. */
HCB_EXPORT int64_t hcb_cell_get(uint64_t id, uint8_t* out, int32_t counts);
/* Forgets the launches that have read a cell at a site: up to jaxlib 0.8, a program that is compiled again
 * repeats their numbers. */
HCB_EXPORT void hcb_cell_forget_launches(uint64_t id, uint64_t site);

#ifdef __cplusplus
}
#endif

#endif /* HOSTCALLBACK_ABI_EXPORTS_H_ */

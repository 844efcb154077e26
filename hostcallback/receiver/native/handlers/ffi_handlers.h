/* The handlers that XLA calls through its FFI, by the names under which the library exports them, in plain C. */
#ifndef HOSTCALLBACK_HANDLERS_FFI_HANDLERS_H_
#define HOSTCALLBACK_HANDLERS_FFI_HANDLERS_H_

#include "abi/types.h"

#ifdef __cplusplus
extern "C" {
#endif

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
/* Waits until the messages of this process are delivered: on a thread of the host with the `wait` of hcb_buffer_waits, on another one
 * for at most a second without progress. It has a token only. Platform CPU. */
HCB_EXPORT struct XLA_FFI_Error* hcb_wait_for_output(struct XLA_FFI_CallFrame* call_frame);
/* Reads a clock. The result is a uint32[2]: microseconds, which wrap around, and the least number of microseconds between
 * two readings that costs little. The operand changes from reading to reading. Platform CPU. */
HCB_EXPORT struct XLA_FFI_Error* hcb_clock(struct XLA_FFI_CallFrame* call_frame);
/* Whether arrays of floating-point or complex numbers have elements that are not finite. The attribute `groups`, an int32
 * array, has for each operand the index of its element of the result, a bool[n]. Platform CPU. */
HCB_EXPORT struct XLA_FFI_Error* hcb_not_finite(struct XLA_FFI_CallFrame* call_frame);
/* Seven statistics of an array of float32 or float64 that has elements, as float32 scalars: mean, std, min, max, norm,
 * fraction of zeros, fraction of elements that are not finite. Platform CPU. */
HCB_EXPORT struct XLA_FFI_Error* hcb_statistics(struct XLA_FFI_CallFrame* call_frame);
/* The same of a device's share of an array, as a row: float32 [1, 8], the seven and the number of elements, which may be 0.
 * Operands: a shard of the array, and the number of the partition. The attribute `shares`, an int64 array, has for each
 * partition the first and the end of its elements, and how many there are along each axis before the padding. Platform CPU. */
HCB_EXPORT struct XLA_FFI_Error* hcb_share_statistics(struct XLA_FFI_CallFrame* call_frame);
/* The statistics of arrays from the rows of their shares, float32 [shares, values, 8]: for each of the arrays seven float32
 * results of any shape, whose elements are values. Platform CPU. */
HCB_EXPORT struct XLA_FFI_Error* hcb_merged_statistics(struct XLA_FFI_CallFrame* call_frame);
/* For n operands 2n results: the operands, in their memory, and a copy of each. Platform CPU. */
HCB_EXPORT struct XLA_FFI_Error* hcb_copy(struct XLA_FFI_CallFrame* call_frame);
/* What is to be done about a call of a program whose tests are a bool[n]. The attribute `program`, an int32 array, has the
 * number of the program. The result is a uint32[2]: 0 for a call that did not fail, 1 for one in which a test failed that
 * did not fail in the call before, 2 for other failed ones; and the number of the call, from 0. Platform CPU. */
HCB_EXPORT struct XLA_FFI_Error* hcb_verdict(struct XLA_FFI_CallFrame* call_frame);
/* Forgets which tests of the last calls failed: the next call in which one fails is the first of a row. Any thread. */
HCB_EXPORT void hcb_verdict_forget(void);

#ifdef __cplusplus
}
#endif

#endif /* HOSTCALLBACK_HANDLERS_FFI_HANDLERS_H_ */

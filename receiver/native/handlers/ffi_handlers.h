/* The handlers that XLA calls through its FFI, by the names under which the library exports them, in plain C. */
#ifndef HOSTCALLBACK_FFI_HANDLERS_H_
#define HOSTCALLBACK_FFI_HANDLERS_H_

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
/* Reads a clock. The result is a uint32[2]: microseconds, which wrap around, and the least number of microseconds between
 * two readings that costs little. The operand changes from reading to reading. Platform CPU. */
HCB_EXPORT struct XLA_FFI_Error* hcb_clock(struct XLA_FFI_CallFrame* call_frame);
/* Whether arrays of floating-point or complex numbers have elements that are not finite. The attribute `groups`, an int32
 * array, has for each operand the index of its element of the result, a bool[n]. Platform CPU. */
HCB_EXPORT struct XLA_FFI_Error* hcb_not_finite(struct XLA_FFI_CallFrame* call_frame);
/* Seven statistics of an array of float32 or float64 that has elements, as float32 scalars: mean, std, min, max, norm,
 * fraction of zeros, fraction of elements that are not finite. Platform CPU. */
HCB_EXPORT struct XLA_FFI_Error* hcb_statistics(struct XLA_FFI_CallFrame* call_frame);

#ifdef __cplusplus
}
#endif

#endif /* HOSTCALLBACK_FFI_HANDLERS_H_ */

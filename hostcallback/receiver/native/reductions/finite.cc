// The XLA FFI handler that tests whether arrays are finite, or hold, many in one call.
#include <cstring>

#include "abi/exports.h"
#include "handlers/call_frame.h"
#include "reductions/widths.h"

namespace hcb {
namespace {

// Shifted left by one bit, floating-point numbers that are not finite are the largest unsigned integers of
// their size.
struct Half {  // float16
  using Word = uint16_t;
  static constexpr Word kKept = 0xffff, kNotFinite = 0xf800;
};
struct Brain {  // bfloat16
  using Word = uint16_t;
  static constexpr Word kKept = 0xffff, kNotFinite = 0xff00;
};
struct Single {
  using Word = uint32_t;
  static constexpr Word kKept = 0xffffffff, kNotFinite = 0xff000000;
};
struct Double {  // the upper half of each number tells; the maximum of 64-bit integers takes longer
  using Word = uint32_t;
  static constexpr Word kKept = 0, kNotFinite = 0xffe00000;
};

template <typename Format, int kBytes>
HCB_LOOP bool AnyNotFiniteOf(const uint8_t* data, uint64_t nbytes) {
  using Word = typename Format::Word;
  using Vector = typename Vectors<Word, kBytes>::Type;
  constexpr int kUnrolled = 4;
  constexpr uint64_t kStep = kUnrolled * kBytes;
  constexpr bool kUpperHalves = Format::kKept == 0;
  Vector kept, largest[kUnrolled];
  for (int i = 0; i < static_cast<int>(kBytes / sizeof(Word)); ++i)
    kept[i] = i % 2 ? ~Word{0} : Format::kKept;
#pragma GCC unroll 4
  for (Vector& one : largest) one = Vector{};
  uint64_t at = 0;
  for (; at + kStep <= nbytes; at += kStep) {
#pragma GCC unroll 4
    for (int i = 0; i < kUnrolled; ++i) {
      Vector x;
      std::memcpy(&x, data + at + i * kBytes, kBytes);
      if (kUpperHalves) x &= kept;
      x <<= 1;
      largest[i] = largest[i] > x ? largest[i] : x;
    }
  }
  Word most = 0;
#pragma GCC unroll 4
  for (const Vector& one : largest) {
    for (int i = 0; i < static_cast<int>(kBytes / sizeof(Word)); ++i) most = one[i] > most ? one[i] : most;
  }
  for (; at < nbytes; at += sizeof(Word)) {
    Word x;
    std::memcpy(&x, data + at, sizeof(x));
    if (kUpperHalves && at / sizeof(Word) % 2 == 0) continue;
    x = static_cast<Word>(x << 1);
    most = x > most ? x : most;
  }
  return most >= Format::kNotFinite;
}

HCB_FOR_EACH_WIDTH(bool, AnyNotFinite, (const uint8_t* data, uint64_t nbytes), AnyNotFiniteOf, (data, nbytes))

// Whether an array has an element that is not finite; of booleans, one that is false.
bool Fails(const XLA_FFI_Buffer& buffer) {
  const uint8_t* const data = static_cast<const uint8_t*>(buffer.data);
  const uint64_t nbytes = Elements(buffer) * (BitsPerElement(buffer.dtype) / 8);
  switch (buffer.dtype) {
    case XLA_FFI_DataType_PRED:
      return nbytes != 0 && std::memchr(data, 0, nbytes) != nullptr;
    case XLA_FFI_DataType_F16:
      return AnyNotFinite<Half>(data, nbytes);
    case XLA_FFI_DataType_BF16:
      return AnyNotFinite<Brain>(data, nbytes);
    case XLA_FFI_DataType_F32:
    case XLA_FFI_DataType_C64:
      return AnyNotFinite<Single>(data, nbytes);
    case XLA_FFI_DataType_F64:
    case XLA_FFI_DataType_C128:
      return AnyNotFinite<Double>(data, nbytes);
    default:
      return false;  // the program's lowering leaves out other types
  }
}

XLA_FFI_Error* Test(const XLA_FFI_CallFrame& frame) {
  // For each operand the index of its element of the result.
  const XLA_FFI_Array* const groups = FindArray(frame, "groups", XLA_FFI_DataType_S32);
  const bool is_valid =
      groups != nullptr && frame.rets.size == 1 && static_cast<int64_t>(groups->size) == frame.args.size;
  if (!is_valid) {
    return Invalid(frame,
                   "hostcallback: a test for finite values has no int32 attribute `groups` with a number for "
                   "each operand");
  }
  const XLA_FFI_Buffer& result = Result(frame, 0);
  const int64_t count = static_cast<int64_t>(Elements(result));
  uint8_t* const failed = static_cast<uint8_t*>(result.data);
  std::memset(failed, 0, static_cast<size_t>(count));
  for (int64_t i = 0; i < frame.args.size; ++i) {
    const int32_t group = static_cast<const int32_t*>(groups->data)[i];
    if (group < 0 || group >= count) {
      return Invalid(frame, "hostcallback: a test for finite values has a group beyond its result");
    }
    if (Fails(Operand(frame, i))) failed[group] = 1;
  }
  return nullptr;
}

}  // namespace
}  // namespace hcb

XLA_FFI_Error* hcb_not_finite(XLA_FFI_CallFrame* frame) {
  return hcb::IsExecution(frame) ? hcb::Test(*frame) : nullptr;
}

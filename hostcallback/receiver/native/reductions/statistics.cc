// The XLA FFI handlers that measure an array, or a device's share of one, in one pass over the memory, and
// merge shares.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "abi/exports.h"
#include "handlers/call_frame.h"
#include "reductions/widths.h"

namespace hcb {
namespace {

constexpr uint64_t kPart = 4096;  // elements that the level-1 cache still holds when they are read again
enum Statistic { kMean, kStd, kMin, kMax, kNorm, kZeros, kNonfinite, kStatistics };
// a share's row ends with its number of elements
constexpr int64_t kCount = kStatistics, kRow = kStatistics + 1;

template <typename T>
struct Format;
template <>
struct Format<float> {
  using Bits = uint32_t;
  static constexpr Bits kNotFinite = 0xff000000;  // of the bits, shifted left by one
};
template <>
struct Format<double> {
  using Bits = uint64_t;
  static constexpr Bits kNotFinite = 0xffe0000000000000;
};

// Of the parts so far. The deviation is combined from part to part as by Chan, Golub and LeVeque (1979).
struct Totals {
  double count = 0, sum = 0, mean = 0, squares = 0;  // `squares` of the deviations from the mean
  double low = std::numeric_limits<double>::infinity(), high = -std::numeric_limits<double>::infinity();
  uint64_t zeros = 0, nonfinite = 0;
  bool has_nan = false;

  void Add(double n, double part_sum, double part_squares) {
    const double delta = part_sum / n - mean;
    squares += part_squares + delta * delta * count * n / (count + n);
    count += n;
    sum += part_sum;
    mean += delta * n / count;
  }
};

template <typename T>
void CountNotFinite(const T* data, uint64_t n, Totals* totals) {
  for (uint64_t i = 0; i < n; ++i) {
    totals->nonfinite += !std::isfinite(data[i]);
    totals->has_nan = totals->has_nan || std::isnan(data[i]);
  }
}

template <typename T, int kBytes>
HCB_LOOP void MeasurePart(const T* data, uint64_t n, Totals* totals) {
  using Bits = typename Format<T>::Bits;
  using Vector = typename Vectors<T, kBytes>::Type;
  using BitVector = typename Vectors<Bits, kBytes>::Type;
  constexpr int kLanes = kBytes / sizeof(T), kUnrolled = 2;
  constexpr T kInfinity = std::numeric_limits<T>::infinity();
  Vector sum[kUnrolled], low[kUnrolled], high[kUnrolled];
  BitVector zeros[kUnrolled], largest[kUnrolled];
#pragma GCC unroll 4
  for (int j = 0; j < kUnrolled; ++j) {
    sum[j] = Vector{};
    low[j] = Vector{} + kInfinity;
    high[j] = Vector{} - kInfinity;
    zeros[j] = largest[j] = BitVector{};
  }
  uint64_t i = 0;
  for (; i + kUnrolled * kLanes <= n; i += kUnrolled * kLanes) {
#pragma GCC unroll 4
    for (int j = 0; j < kUnrolled; ++j) {
      Vector x;
      BitVector bits;
      std::memcpy(&x, data + i + j * kLanes, kBytes);
      std::memcpy(&bits, &x, kBytes);
      bits <<= 1;
      sum[j] += x;
      low[j] = x < low[j] ? x : low[j];
      high[j] = x > high[j] ? x : high[j];
      zeros[j] -= (BitVector)(x == Vector{});
      largest[j] = bits > largest[j] ? bits : largest[j];
    }
  }
  double part_sum = 0, part_low = kInfinity, part_high = -kInfinity;
  Bits most = 0;
#pragma GCC unroll 4
  for (int j = 0; j < kUnrolled; ++j) {
    for (int lane = 0; lane < kLanes; ++lane) {
      part_sum += sum[j][lane];
      part_low = std::min<double>(part_low, low[j][lane]);
      part_high = std::max<double>(part_high, high[j][lane]);
      totals->zeros += zeros[j][lane];
      most = std::max<Bits>(most, largest[j][lane]);
    }
  }
  for (uint64_t k = i; k < n; ++k) {
    Bits bits;
    std::memcpy(&bits, data + k, sizeof(bits));
    part_sum += data[k];
    part_low = std::min<double>(part_low, data[k]);
    part_high = std::max<double>(part_high, data[k]);
    totals->zeros += data[k] == 0;
    most = std::max<Bits>(most, static_cast<Bits>(bits << 1));
  }
  totals->low = std::min(totals->low, part_low);
  totals->high = std::max(totals->high, part_high);
  if (most >= Format<T>::kNotFinite) CountNotFinite(data, n, totals);

  const T mean = static_cast<T>(part_sum / static_cast<double>(n));
  Vector squares[kUnrolled];
#pragma GCC unroll 4
  for (Vector& one : squares) one = Vector{};
  for (i = 0; i + kUnrolled * kLanes <= n; i += kUnrolled * kLanes) {
#pragma GCC unroll 4
    for (int j = 0; j < kUnrolled; ++j) {
      Vector x;
      std::memcpy(&x, data + i + j * kLanes, kBytes);
      x -= mean;
      squares[j] += x * x;
    }
  }
  double part_squares = 0;
#pragma GCC unroll 4
  for (const Vector& one : squares) {
    for (int lane = 0; lane < kLanes; ++lane) part_squares += one[lane];
  }
  for (; i < n; ++i) part_squares += (data[i] - mean) * (data[i] - mean);
  totals->Add(static_cast<double>(n), part_sum, part_squares);
}

template <typename T, int kBytes>
HCB_LOOP void MeasureParts(const T* data, uint64_t n, Totals* totals) {
  for (uint64_t i = 0; i < n; i += kPart) MeasurePart<T, kBytes>(data + i, std::min(kPart, n - i), totals);
}

HCB_FOR_EACH_WIDTH(void, Measure, (const T* data, uint64_t n, Totals* totals), MeasureParts,
                   (data, n, totals))

// As the reductions of JAX: NaN spreads; infinite values have no deviation.
void Finish(const Totals& totals, float* out) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double count = totals.count;
  double norm = std::sqrt(totals.squares + totals.mean * totals.mean * count);
  if (totals.nonfinite != 0) norm = totals.has_nan ? nan : std::numeric_limits<double>::infinity();
  out[kMean] = static_cast<float>(totals.sum / count);
  out[kStd] = static_cast<float>(totals.nonfinite != 0 ? nan : std::sqrt(totals.squares / count));
  out[kMin] = static_cast<float>(totals.has_nan ? nan : totals.low);
  out[kMax] = static_cast<float>(totals.has_nan ? nan : totals.high);
  out[kNorm] = static_cast<float>(norm);
  out[kZeros] = static_cast<float>(static_cast<double>(totals.zeros) / count);
  out[kNonfinite] = static_cast<float>(static_cast<double>(totals.nonfinite) / count);
}

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// Of the shares of an array, from their rows, `stride` apart. A row of NaN is of an array that was not there.
void Merge(const float* rows, int64_t shares, int64_t stride, float* out) {
  const float* const end = rows + shares * stride;
  double count = 0, sum = 0, spread = 0, zeros = 0, nonfinite = 0, squares = 0;
  double low = std::numeric_limits<double>::infinity(), high = -low;
  bool has_nan = false;
  for (const float* row = rows; row != end; row += stride) {
    const double n = row[kCount];
    if (n == 0) continue;
    count += n;
    sum += n * row[kMean];
    zeros += n * row[kZeros];
    nonfinite += n * row[kNonfinite];
    squares += static_cast<double>(row[kNorm]) * row[kNorm];
    has_nan = has_nan || std::isnan(row[kMin]);
    low = std::min<double>(low, row[kMin]);
    high = std::max<double>(high, row[kMax]);
  }
  const double mean = sum / count;
  for (const float* row = rows; row != end; row += stride) {
    const double n = row[kCount], away = row[kMean] - mean;
    if (n != 0) spread += n * (static_cast<double>(row[kStd]) * row[kStd] + away * away);
  }
  out[kMean] = static_cast<float>(mean);
  out[kStd] = static_cast<float>(std::sqrt(spread / count));
  out[kMin] = static_cast<float>(has_nan ? kNan : low);
  out[kMax] = static_cast<float>(has_nan ? kNan : high);
  out[kNorm] = static_cast<float>(std::sqrt(squares));
  out[kZeros] = static_cast<float>(zeros / count);
  out[kNonfinite] = static_cast<float>(nonfinite / count);
}

// The elements of a shard that are a device's to measure: those from `begin` to `end` of its first elements
// in each dimension, of which there are `extents`; what is beyond them is padding.
struct Share {
  int64_t begin, end;
  const int64_t* extents;
};

template <typename T>
void MeasureShare(const XLA_FFI_Buffer& value, const Share& share, Totals* totals) {
  const T* const data = static_cast<const T*>(value.data);
  // The elements that are next to each other: of the last dimensions without padding, and of one more.
  int64_t axis = value.rank, run = 1;
  while (axis > 0) {
    --axis;
    run *= share.extents[axis];
    if (share.extents[axis] != value.dims[axis]) break;
  }
  for (int64_t i = share.begin; i < share.end;) {
    int64_t offset = 0, stride = 1, rest = i / run;
    for (int64_t d = value.rank - 1; d >= 0; --d) {
      if (d < axis) {
        offset += rest % share.extents[d] * stride;
        rest /= share.extents[d];
      }
      stride *= value.dims[d];
    }
    const int64_t n = std::min(run - i % run, share.end - i);
    Measure<T>(data + offset + i % run, static_cast<uint64_t>(n), totals);
    i += n;
  }
}

// The attribute `shares`: for each partition begin and end of its share, and the extents of its shard.
bool FindShare(const XLA_FFI_CallFrame& frame, int64_t rank, uint32_t partition, Share* share) {
  const XLA_FFI_Array* const array = FindArray(frame, "shares", XLA_FFI_DataType_S64);
  const size_t numbers = static_cast<size_t>(2 + rank);
  if (array == nullptr || array->size < (partition + 1) * numbers) return false;
  const int64_t* const row = static_cast<const int64_t*>(array->data) + partition * numbers;
  *share = {row[0], row[1], row + 2};
  return true;
}

XLA_FFI_Error* MeasureOneShare(const XLA_FFI_CallFrame& frame) {
  Share share;
  const bool is_valid =
      frame.args.size == 2 && frame.rets.size == 1 && Operand(frame, 1).dtype == XLA_FFI_DataType_U32 &&
      Elements(Result(frame, 0)) == kRow &&
      FindShare(frame, Operand(frame, 0).rank, *static_cast<const uint32_t*>(Operand(frame, 1).data), &share);
  Totals totals;
  if (is_valid && Operand(frame, 0).dtype == XLA_FFI_DataType_F32) {
    MeasureShare<float>(Operand(frame, 0), share, &totals);
  } else if (is_valid && Operand(frame, 0).dtype == XLA_FFI_DataType_F64) {
    MeasureShare<double>(Operand(frame, 0), share, &totals);
  } else {
    return Invalid(
        frame,
        "hostcallback: the statistics of a share are of one array of float32 or float64, with the number of "
        "the partition and the int64 attribute `shares`");
  }
  float out[kRow] = {};
  if (totals.count != 0) Finish(totals, out);
  out[kCount] = static_cast<float>(totals.count);
  std::memcpy(Result(frame, 0).data, out, sizeof(out));
  return nullptr;
}

XLA_FFI_Error* MergeRows(const XLA_FFI_CallFrame& frame) {
  const XLA_FFI_Buffer* const rows = frame.args.size == 1 ? &Operand(frame, 0) : nullptr;
  int64_t results = 0;
  for (int64_t i = 0; i < frame.rets.size; i += kStatistics)
    results += static_cast<int64_t>(Elements(Result(frame, i)));
  if (rows == nullptr || rows->dtype != XLA_FFI_DataType_F32 || rows->rank != 3 || rows->dims[2] != kRow ||
      rows->dims[1] != results || frame.rets.size % kStatistics != 0) {
    return Invalid(frame, "hostcallback: merged statistics are of one float32 array [shares, values, 8]");
  }
  const float* row = static_cast<const float*>(rows->data);
  for (int64_t i = 0; i < frame.rets.size; i += kStatistics) {
    const int64_t values = static_cast<int64_t>(Elements(Result(frame, i)));
    for (int64_t value = 0; value < values; ++value, row += kRow) {
      float out[kStatistics];
      Merge(row, rows->dims[0], results * kRow, out);
      for (int64_t j = 0; j < kStatistics; ++j)
        static_cast<float*>(Result(frame, i + j).data)[value] = out[j];
    }
  }
  return nullptr;
}

XLA_FFI_Error* MeasureOperand(const XLA_FFI_CallFrame& frame) {
  const XLA_FFI_Buffer* const value = frame.args.size == 1 ? &Operand(frame, 0) : nullptr;
  Totals totals;
  if (value != nullptr && value->dtype == XLA_FFI_DataType_F32) {
    Measure<float>(static_cast<const float*>(value->data), Elements(*value), &totals);
  } else if (value != nullptr && value->dtype == XLA_FFI_DataType_F64) {
    Measure<double>(static_cast<const double*>(value->data), Elements(*value), &totals);
  } else {
    return Invalid(frame, "hostcallback: statistics are of one array of float32 or float64");
  }
  float out[kStatistics];
  Finish(totals, out);
  for (int64_t i = 0; i < std::min<int64_t>(frame.rets.size, kStatistics); ++i) {
    std::memcpy(Result(frame, i).data, &out[i], sizeof(float));
  }
  return nullptr;
}

}  // namespace
}  // namespace hcb

XLA_FFI_Error* hcb_statistics(XLA_FFI_CallFrame* frame) {
  return hcb::IsExecution(frame) ? hcb::MeasureOperand(*frame) : nullptr;
}
XLA_FFI_Error* hcb_share_statistics(XLA_FFI_CallFrame* frame) {
  return hcb::IsExecution(frame) ? hcb::MeasureOneShare(*frame) : nullptr;
}
XLA_FFI_Error* hcb_merged_statistics(XLA_FFI_CallFrame* frame) {
  return hcb::IsExecution(frame) ? hcb::MergeRows(*frame) : nullptr;
}

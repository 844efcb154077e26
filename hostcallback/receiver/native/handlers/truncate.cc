#include "handlers/truncate.h"

#include <cstring>

namespace hcb {
namespace {

template <typename Visit>
void ForEachArray(const XLA_FFI_CallFrame& frame, Visit visit) {
  for (int64_t i = 0; i < frame.args.size; ++i) {
    if (Operand(frame, i).dtype != XLA_FFI_DataType_TOKEN) visit(Operand(frame, i));
  }
}

// msgpack's shortest form of numbers and of array lengths, big-endian.
uint8_t* PutBigEndian(uint8_t* out, uint8_t tag, uint64_t value, int bytes) {
  *out++ = tag;
  for (int shift = 8 * (bytes - 1); shift >= 0; shift -= 8) *out++ = static_cast<uint8_t>(value >> shift);
  return out;
}

uint8_t* PutNumber(uint8_t* out, uint64_t value) {
  if (value < 0x80) {
    *out = static_cast<uint8_t>(value);
    return out + 1;
  }
  if (value <= 0xff) return PutBigEndian(out, 0xcc, value, 1);
  if (value <= 0xffff) return PutBigEndian(out, 0xcd, value, 2);
  if (value <= 0xffffffff) return PutBigEndian(out, 0xce, value, 4);
  return PutBigEndian(out, 0xcf, value, 8);
}

uint8_t* PutLength(uint8_t* out, uint64_t length) {
  if (length < 16) {
    *out = static_cast<uint8_t>(0x90 | length);
    return out + 1;
  }
  return length <= 0xffff ? PutBigEndian(out, 0xdc, length, 2) : PutBigEndian(out, 0xdd, length, 4);
}

constexpr uint64_t kLongestNumber = 9;
constexpr uint64_t kLongestLength = 5;

}  // namespace

bool Truncation::Apply(const XLA_FFI_CallFrame& frame, uint64_t elements, Emission* emission) {
  bool any = false;
  ForEachArray(frame, [&](const XLA_FFI_Buffer& operand) { any = any || Elements(operand) > elements; });
  if (!any) return false;
  ForEachArray(frame, [&](const XLA_FFI_Buffer& operand) {
    shapes.push_back(operand.rank);
    shapes.insert(shapes.end(), operand.dims, operand.dims + operand.rank);
  });
  arrays_.Add({shapes.data(), shapes.size() * sizeof(int64_t), 0xff});
  const ArrayRef* whole = emission->arrays;
  ForEachArray(frame, [&](const XLA_FFI_Buffer& operand) {
    ArrayRef array = *whole++;
    if (Elements(operand) > elements) {
      const uint64_t bits = elements * BitsPerElement(operand.dtype);
      array.nbytes = (bits + 7) / 8;
      array.last_byte_mask = static_cast<uint8_t>(bits % 8 ? (1u << bits % 8) - 1 : 0xff);
    }
    arrays_.Add(array);
  });
  WritePrefix(frame, elements, emission);
  emission->arrays = arrays_.data();
  emission->array_count = arrays_.size();
  emission->payload_bytes = PayloadBytes(arrays_.data(), arrays_.size());
  return true;
}

void Truncation::WritePrefix(const XLA_FFI_CallFrame& frame, uint64_t elements, Emission* emission) {
  // The longest possible metadata: each dimension and each type code is one number.
  const uint64_t numbers = shapes.size() + arrays_.size() + 2;
  const uint64_t most = numbers * kLongestNumber + (2 * arrays_.size() + 1) * kLongestLength;
  const uint64_t room = sizeof(FrameHeader) + AlignUp(most, kFrameAlign);
  uint8_t* prefix = usual_;
  if (room > kUsual) {
    large_.resize(room);
    prefix = large_.data();
  }
  std::memcpy(prefix, emission->prefix, sizeof(FrameHeader));
  uint8_t* const metadata = prefix + sizeof(FrameHeader);
  uint8_t* out = PutLength(metadata, arrays_.size());
  out = PutLength(out, 2);
  out = PutNumber(out, XLA_FFI_DataType_S64);
  out = PutLength(out, 1);
  out = PutNumber(out, shapes.size());
  ForEachArray(frame, [&](const XLA_FFI_Buffer& operand) {
    out = PutLength(out, 2);
    out = PutNumber(out, static_cast<uint64_t>(operand.dtype));
    if (Elements(operand) > elements) {
      out = PutNumber(PutLength(out, 1), elements);
      return;
    }
    out = PutLength(out, static_cast<uint64_t>(operand.rank));
    for (int64_t i = 0; i < operand.rank; ++i) out = PutNumber(out, static_cast<uint64_t>(operand.dims[i]));
  });
  const uint64_t meta_bytes = static_cast<uint64_t>(out - metadata);
  const uint64_t padded = AlignUp(meta_bytes, kFrameAlign);
  std::memset(out, 0, padded - meta_bytes);
  FrameHeader* header = reinterpret_cast<FrameHeader*>(prefix);
  header->flags |= kTruncated;
  header->meta_bytes = static_cast<uint32_t>(meta_bytes);
  emission->prefix = prefix;
  emission->prefix_bytes = sizeof(FrameHeader) + padded;
}

}  // namespace hcb

// CRC-32 by carry-less multiplication: Gopal et al., "Fast CRC Computation for Generic Polynomials Using
// PCLMULQDQ Instruction", Intel 2009, for the bit-reflected polynomial of zlib. The constants are those of
// the paper's table.
#include <algorithm>
#include <array>

#include "abi/exports.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__x86_64__)

namespace {

constexpr uint64_t kBlockBytes = 16;
constexpr uint64_t kLeastBytes = 4 * kBlockBytes;

constexpr std::array<uint32_t, 256> MakeTable() {
  std::array<uint32_t, 256> table = {};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0xedb88320u : 0);
    table[byte] = crc;
  }
  return table;
}

constexpr std::array<uint32_t, 256> kTable = MakeTable();

uint32_t ByBytes(uint32_t crc, const uint8_t* data, uint64_t nbytes) {
  for (uint64_t i = 0; i < nbytes; ++i) crc = (crc >> 8) ^ kTable[(crc ^ data[i]) & 0xff];
  return crc;
}

#define HCB_WITH_CLMUL __attribute__((target("pclmul,sse4.1")))

HCB_WITH_CLMUL inline __m128i Load(const uint8_t* data) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(data));
}

// Advances `value` by the distance of `constants`, and adds `next`.
HCB_WITH_CLMUL inline __m128i Fold(__m128i value, __m128i constants, __m128i next) {
  const __m128i low = _mm_clmulepi64_si128(value, constants, 0x00);
  const __m128i high = _mm_clmulepi64_si128(value, constants, 0x11);
  return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

// `nbytes` must be a multiple of 16 and at least 64.
HCB_WITH_CLMUL uint32_t ByBlocks(uint32_t crc, const uint8_t* data, uint64_t nbytes) {
  const __m128i by_four = _mm_set_epi64x(0x01c6e41596, 0x0154442bd4);
  const __m128i by_one = _mm_set_epi64x(0x00ccaa009e, 0x01751997d0);
  const __m128i by_half = _mm_set_epi64x(0, 0x0163cd6124);
  const __m128i polynomial = _mm_set_epi64x(0x01f7011641, 0x01db710641);
  const __m128i low_words = _mm_setr_epi32(~0, 0, ~0, 0);

  __m128i a = _mm_xor_si128(Load(data), _mm_cvtsi32_si128(static_cast<int>(crc)));
  __m128i b = Load(data + 16), c = Load(data + 32), d = Load(data + 48);
  for (data += 64, nbytes -= 64; nbytes >= 64; data += 64, nbytes -= 64) {
    a = Fold(a, by_four, Load(data));
    b = Fold(b, by_four, Load(data + 16));
    c = Fold(c, by_four, Load(data + 32));
    d = Fold(d, by_four, Load(data + 48));
  }
  a = Fold(Fold(Fold(a, by_one, b), by_one, c), by_one, d);
  for (; nbytes >= 16; data += 16, nbytes -= 16) a = Fold(a, by_one, Load(data));

  // Reduces 128 bits to 64, to 32, and then by Barrett's method.
  a = _mm_xor_si128(_mm_srli_si128(a, 8), _mm_clmulepi64_si128(a, by_one, 0x10));
  a = _mm_xor_si128(_mm_srli_si128(a, 4), _mm_clmulepi64_si128(_mm_and_si128(a, low_words), by_half, 0x00));
  const __m128i quotient = _mm_clmulepi64_si128(_mm_and_si128(a, low_words), polynomial, 0x10);
  a = _mm_xor_si128(a, _mm_clmulepi64_si128(_mm_and_si128(quotient, low_words), polynomial, 0x00));
  return static_cast<uint32_t>(_mm_extract_epi32(a, 1));
}

uint32_t Checksum(const uint8_t* data, uint64_t nbytes) {
  uint32_t crc = ~0u;
  const uint64_t whole = nbytes >= kLeastBytes ? nbytes / kBlockBytes * kBlockBytes : 0;
  if (whole != 0) crc = ByBlocks(crc, data, whole);
  return ~ByBytes(crc, data + whole, nbytes - whole);
}

}  // namespace

int32_t hcb_page_checksums(const uint8_t* data, uint64_t nbytes, uint64_t page_bytes, uint32_t* checksums) {
  static const bool has_clmul =
      __builtin_cpu_supports("pclmul") != 0 && __builtin_cpu_supports("sse4.1") != 0;
  if (!has_clmul) return 0;
  for (uint64_t at = 0; at < nbytes; at += page_bytes) {
    *checksums++ = Checksum(data + at, std::min(page_bytes, nbytes - at));
  }
  return 1;
}

#else

int32_t hcb_page_checksums(const uint8_t*, uint64_t, uint64_t, uint32_t*) { return 0; }

#endif

// Products of rows that are rounded to int8 with integer matrices: int8 with a scale for each output, and the quantized
// blocks of GGUF files.
//
// A weight is scale * (code - offset) + minimum, where `code` has 4 to 8 bits and 32 inputs (16 in Q6_K) share scale and
// minimum. A matrix [O, I] is stored as units of sixteen outputs, the lanes, by `unit` inputs. Sums over a block are whole
// numbers and therefore exact in any order; the blocks are one chain. See jaxspec/models/blocks.py for the layout of a unit.

#pragma once

#include <algorithm>
#include <limits>

#include "lanes.h"
#include "table.h"

namespace {

// The maximum number of rows and of blocks of sixteen outputs whose sums stay in registers; how many bytes ahead weights are
// prefetched into the first-level cache (floats, integers); and whether a single pass over weights prefetches the next weights
// into the second-level cache (see `Fetch`).
#if defined(AVX512)
constexpr long kTileRows = 8, kFloatRows = 8, kTileBlocks = 2, kAhead = 512, kBlocksAhead = 2048;
constexpr bool kFetchesAlone = true;
#else
constexpr long kTileRows = 4, kFloatRows = 6, kTileBlocks = 1, kAhead = 2048, kBlocksAhead = 1024;
constexpr bool kFetchesAlone = false;
#endif

// Sixteen groups of four bytes, and sixteen sums of int32.
#if defined(AVX512_VNNI)
using Bytes = __m512i;
inline Bytes bytes(const void* at) { return _mm512_loadu_si512(at); }
inline Bytes spread(int value) { return _mm512_set1_epi32(value); }
inline Bytes common(Bytes x, Bytes y) { return _mm512_and_si512(x, y); }
inline Bytes joined(Bytes x, Bytes y) { return _mm512_or_si512(x, y); }
inline Bytes shifted(Bytes x, int n) { return n < 0 ? _mm512_srli_epi32(x, -n) : _mm512_slli_epi32(x, n); }
inline Lanes to_float(Bytes x) { return {_mm512_cvtepi32_ps(x)}; }
#else
struct Bytes {
  __m256i a, b;
};
inline Bytes bytes(const void* at) {
  return {_mm256_loadu_si256((const __m256i*)at), _mm256_loadu_si256((const __m256i*)at + 1)};
}
inline Bytes spread(int value) { return {_mm256_set1_epi32(value), _mm256_set1_epi32(value)}; }
inline Bytes common(Bytes x, Bytes y) { return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)}; }
inline Bytes joined(Bytes x, Bytes y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
inline __m256i shifted(__m256i x, int n) { return n < 0 ? _mm256_srli_epi32(x, -n) : _mm256_slli_epi32(x, n); }
inline Bytes shifted(Bytes x, int n) { return {shifted(x.a, n), shifted(x.b, n)}; }
inline Lanes to_float(Bytes x) { return both(_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)); }
inline Bytes plus(Bytes x, Bytes y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
// 16-bit sums, and sums of two products of bytes.
inline Bytes plus_short(Bytes x, Bytes y) { return {_mm256_add_epi16(x.a, y.a), _mm256_add_epi16(x.b, y.b)}; }
inline Bytes short_pairs(Bytes w, Bytes x) { return {_mm256_maddubs_epi16(w.a, x.a), _mm256_maddubs_epi16(w.b, x.b)}; }
inline __m256i of_short(__m256i x) { return _mm256_madd_epi16(x, _mm256_set1_epi16(1)); }
inline Bytes of_short(Bytes x) { return {of_short(x.a), of_short(x.b)}; }  // sums of two 16-bit values
inline Bytes magnitude(Bytes x) { return {_mm256_abs_epi8(x.a), _mm256_abs_epi8(x.b)}; }
inline Bytes times_sign(Bytes x, Bytes y) { return {_mm256_sign_epi8(x.a, y.a), _mm256_sign_epi8(x.b, y.b)}; }
#endif

// The part of the next weights that a pass over some outputs prefetches into the second-level cache. All passes prefetch a
// part, so that memory is read all the time.
struct Fetch {
  const char* at;
  long step;  // bytes to prefetch for each cache line of weights that is read; if it is small, a line is prefetched repeatedly
  void line() {
    _mm_prefetch(at, _MM_HINT_T1);
    at += step;
  }
};

enum class Scales { kOfOutput, kOfBlock, kOfUnit };

// A type of blocks: the bits of a code, its offset, the owner of the scale (`Scales`), the number of inputs with the same
// scale, and whether there is a minimum. In units of 256 inputs, scales and minimums are float16 times an integer of each block.
template <int bits_, int offset_, Scales scales, int part_ = 32, bool minimum_ = false, class Factor_ = uint8_t>
struct Block {
  using Value = int8_t;
  using Factor = Factor_;
  static constexpr bool rounded = true, of_output = scales == Scales::kOfOutput, of_unit = scales == Scales::kOfUnit;
  static constexpr bool minimum = minimum_;
  // A step of a sum reads `words` vectors of codes, each of four inputs.
#if defined(AVX512_VNNI)
  static constexpr int words = 1;
#else
  static constexpr int words = bits_ == 5 || bits_ == 6 ? 2 : 1;
#endif
  static constexpr long tile_rows = kTileRows, tile_blocks = 1;  // one stream of memory is faster than two
  static constexpr int bits = bits_, part = part_, unit = of_unit ? 256 : 32, parts = unit / part;
  static constexpr int halves = of_output ? 0 : minimum ? 64 : 32;  // bytes of float16 scales and minimums
  static constexpr int factors = of_unit ? parts * kLanes : 0;      // bytes of the integers of scales or of minimums
  static constexpr int header = halves + (minimum ? 2 : 1) * factors, size = header + unit / 32 * bits * 64;
  static constexpr long line = size / (unit / 32 * bits);  // bytes for each line of codes
#if defined(AVX512_VNNI)
  static constexpr int offset = offset_;
#else
  static constexpr int offset = bits == 8 ? 0 : offset_;
#endif
  static constexpr int offset_bits = offset == 128 ? 7 : offset == 32 ? 5 : offset == 16 ? 4 : 3;
  static long stride(long width) { return width / unit * size; }

  // The codes of inputs 4 k to 4 k + 3 of a block of 32.
  static Bytes codes(const char* at, int k) {
    if constexpr (bits == 8) {
#if defined(AVX512_VNNI)
      return bytes(at + 64 * k);
#else
      const __m256i sign = _mm256_set1_epi8((char)0x80);
      const Bytes w = bytes(at + 64 * k);
      return {_mm256_xor_si256(w.a, sign), _mm256_xor_si256(w.b, sign)};
#endif
    } else {
      const Bytes low = common(shifted(bytes(at + 64 * (k % 4)), k < 4 ? 0 : -4), spread(0x0f0f0f0f));
      if constexpr (bits == 4) return low;
      // The number of higher bits of a code; the number of groups whose higher bits are in one vector.
      constexpr int more = bits - 4, each = more ? 8 / more : 8;
      const Bytes high = shifted(bytes(at + 256 + 64 * (k / each)), 4 - more * (k % each));
      return joined(low, common(high, spread(((16 << more) - 16) * 0x01010101)));
    }
  }

  // The sum of codes times integers. The result is int32, and includes `less` times the offset.
#if defined(AVX512_VNNI)
  static Bytes begin(int less) { return offset ? shifted(spread(less), offset_bits) : spread(0); }
  static Bytes add(Bytes sum, const Bytes (&w)[1], const Bytes (&x)[1]) { return _mm512_dpbusd_epi32(sum, w[0], x[0]); }
  static Bytes end(Bytes sum, int) { return sum; }
#else
  // Sums in 16 bits cover as many products as cannot overflow: sixteen for 4-bit codes, four for 5 or 6 bits, two for 8 bits.
  static Bytes begin(int less) { return bits > 4 && offset ? shifted(spread(less), offset_bits) : spread(0); }
  static Bytes add(Bytes sum, const Bytes (&w)[words], const Bytes (&x)[words]) {
    Bytes few = bits == 8 ? short_pairs(magnitude(w[0]), times_sign(x[0], w[0])) : short_pairs(w[0], x[0]);
    for (int word = 1; word < words; word++) few = plus_short(few, short_pairs(w[word], x[word]));
    sum = bits == 4 ? plus_short(sum, few) : plus(sum, of_short(few));
    asm("" : "+x"(sum.a), "+x"(sum.b));  // keeps compilers from reordering the sums, which would spill registers
    return sum;
  }
  static Bytes end(Bytes sum, int less) {
    if constexpr (bits > 4) return sum;
    return offset ? plus(of_short(sum), shifted(spread(less), offset_bits)) : of_short(sum);
  }
#endif
};

using Int8 = Block<8, 128, Scales::kOfOutput>;
using Q8_0 = Block<8, 128, Scales::kOfBlock>;
using Q4_0 = Block<4, 8, Scales::kOfBlock>;
using Q4_1 = Block<4, 0, Scales::kOfBlock, 32, true>;
using Q5_0 = Block<5, 16, Scales::kOfBlock>;
using Q5_1 = Block<5, 0, Scales::kOfBlock, 32, true>;
using Q4_K = Block<4, 0, Scales::kOfUnit, 32, true>;
using Q5_K = Block<5, 0, Scales::kOfUnit, 32, true>;
using Q6_K = Block<6, 32, Scales::kOfUnit, 16, false, int8_t>;

// Multiplies R rows with a block of sixteen outputs, of which `last` exist. `rounded` belongs to the first row and has
// `blocks` entries for each row.
template <class Kind, int R>
void block_tile(const char* weights, const int8_t* x, long width, const Rounded* rounded, const float* scale, float* out,
                long outputs, long last, Fetch fetch) {
  const long blocks = width / 32;
  Lanes total[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) total[r] = zeros();
  for (long i = 0; i < width; weights += Kind::size) {
    const char* codes = weights + Kind::header;
    for (int part = 0; part < Kind::parts; i += 32, codes += 64 * Kind::bits, rounded++) {
#pragma GCC unroll 8
      for (int line = 0; line < Kind::bits; line++) {
        fetch.line();
        _mm_prefetch(codes + 64 * line + kBlocksAhead, _MM_HINT_T0);
      }
#pragma GCC unroll 2
      for (int start = 0; start < 32; start += Kind::part, part++) {
        Bytes sum[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) sum[r] = Kind::begin(rounded[r * blocks].less_of(start, Kind::part));
#pragma GCC unroll 8
        for (int k = start / 4; k < (start + Kind::part) / 4; k += Kind::words) {
          Bytes w[Kind::words];
#pragma GCC unroll 2
          for (int word = 0; word < Kind::words; word++) w[word] = Kind::codes(codes, k + word);
#pragma GCC unroll 8
          for (int r = 0; r < R; r++) {
            Bytes four[Kind::words];
#pragma GCC unroll 2
            for (int word = 0; word < Kind::words; word++) four[word] = spread(four_bytes(x + r * width + i + 4 * (k + word)));
            sum[r] = Kind::add(sum[r], w, four);
          }
        }
        Lanes step = zeros(), least = zeros();
        if constexpr (!Kind::of_output) step = from_float16(weights);
        if constexpr (Kind::minimum) least = from_float16(weights + 32);
        if constexpr (Kind::of_unit) {
          const auto* whole = (const typename Kind::Factor*)(weights + Kind::halves) + part * kLanes;
          step = step * from_whole(whole);
          if constexpr (Kind::minimum) least = least * from_whole(whole + Kind::factors);
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
          const Rounded& block = rounded[r * blocks];
          const Lanes one = splat(block.scale), whole = to_float(Kind::end(sum[r], block.less_of(start, Kind::part)));
          total[r] = fma(whole, Kind::of_output ? one : one * step, total[r]);
          if constexpr (Kind::minimum) total[r] = fma(least, splat(block.shift), total[r]);
        }
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
    store(out + r * outputs, Kind::of_output ? total[r] * load(scale, last) : total[r], last);
}

// Rounds a row to integers from -127 to 127 in blocks of 32; the largest magnitude of each block becomes 127.
inline void round_row(const float* x, long width, int8_t* out, Rounded* block) {
  Rounded* first = block;
  for (long from = 0; from < width; from += 32, block++) {
    const long to = std::min(width, from + 32);
    Lanes top = zeros(), bad = zeros();
    for (long i = from; i < to; i += kLanes) {
      const Lanes part = to - i < kLanes ? load(x + i, to - i) : load(x + i);
      top = max(magnitude(part), top);  // ignores NaN
      bad = fma(part, zeros(), bad);    // NaN if any value is not finite
    }
    const float most = highest(top);
    const bool finite = total(bad) == 0.0f;
    const float scale = !finite ? std::numeric_limits<float>::quiet_NaN() : most < 1e-30f ? 0.0f : most / 127.0f;
    *block = {scale, scale, 0, 0, 0};
    if (!finite || most < 1e-30f) continue;  // the values stay zero, because the inverse could be infinite
    const Lanes factor = splat(127.0f / most);
    for (long i = from; i < to; i += kLanes) {
      const long part = std::min(kLanes, to - i);
      store_int8(out + i, rounded((part < kLanes ? load(x + i, part) : load(x + i)) * factor), part);
    }
  }
  for (long from = 0; from < width; from += 32, first++, out += 32) {  // a separate loop, so that the stores have reached the cache
    const __m256i whole = _mm256_loadu_si256((const __m256i*)out), one = _mm256_set1_epi8(1);
    __m256i sums = _mm256_madd_epi16(_mm256_maddubs_epi16(one, whole), _mm256_set1_epi16(1));
    sums = _mm256_hadd_epi32(sums, sums);
    sums = _mm256_hadd_epi32(sums, sums);
    first->less_first = -_mm256_extract_epi32(sums, 0), first->less_second = -_mm256_extract_epi32(sums, 4);
    first->less = first->less_first + first->less_second;
    first->shift = first->scale * (float)-first->less;
  }
}

}  // namespace

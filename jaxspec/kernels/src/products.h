// Products of rows with a packed weight matrix.
//
// A matrix [O, I] is stored as [O / 16, I / g, 16, g], padded with zeros, where g values fill four bytes: 1 of float32, 2
// of bfloat16, 4 of int8 (as uint8, 128 added). The sixteen outputs of a block are the lanes, so that memory is read in
// order and no sum crosses lanes: each output is one chain over I, whatever the number of rows.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "lanes.h"
#include "table.h"

namespace {

inline int four_bytes(const void* at) {
  int word;
  std::memcpy(&word, at, 4);
  return word;
}

struct Float32 {
  using Value = float;
  using Sum = Lanes;
  static constexpr long group = 1;
  static Sum zero() { return zeros(); }
#if defined(AVX512)
  using Weights = __m512;
  static Weights weights(const void* at) { return _mm512_loadu_ps(at); }
  static Weights row(const Value* at) { return _mm512_set1_ps(*at); }
  static Sum add(Sum sum, Weights w, Weights x) { return {_mm512_fmadd_ps(w, x, sum.v)}; }
#else
  using Weights = Lanes;
  static Weights weights(const void* at) { return load((const float*)at); }
  static Weights row(const Value* at) { return splat(*at); }
  static Sum add(Sum sum, Weights w, Weights x) { return fma(w, x, sum); }
#endif
};

struct BFloat16 {
  using Value = uint16_t;
  static constexpr long group = 2;
  using Sum = Lanes;
  static Sum zero() { return zeros(); }
#if defined(AVX512_BF16)
  using Weights = __m512i;
  static Weights weights(const void* at) { return _mm512_loadu_si512(at); }
  static Weights row(const Value* at) { return _mm512_set1_epi32(four_bytes(at)); }
  static Sum add(Sum sum, Weights w, Weights x) { return {_mm512_dpbf16_ps(sum.v, (__m512bh)w, (__m512bh)x)}; }
#elif defined(AVX512)
  struct Weights {
    __m512 even, odd;
  };
  static Weights halves(__m512i both) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(both, 16)),
            _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32((int)0xffff0000)))};
  }
  static Weights weights(const void* at) { return halves(_mm512_loadu_si512(at)); }
  static Weights row(const Value* at) { return halves(_mm512_set1_epi32(four_bytes(at))); }
  static Sum add(Sum sum, const Weights& w, const Weights& x) {
    return {_mm512_fmadd_ps(w.odd, x.odd, _mm512_fmadd_ps(w.even, x.even, sum.v))};
  }
#else
  struct Weights {
    Lanes even, odd;
  };
  static Weights halves(__m256i a, __m256i b) {
    const __m256i high = _mm256_set1_epi32((int)0xffff0000);
    return {{_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(b, 16))},
            {_mm256_castsi256_ps(_mm256_and_si256(a, high)), _mm256_castsi256_ps(_mm256_and_si256(b, high))}};
  }
  static Weights weights(const void* at) {
    return halves(_mm256_loadu_si256((const __m256i*)at), _mm256_loadu_si256((const __m256i*)at + 1));
  }
  static Weights row(const Value* at) {
    const __m256i both = _mm256_set1_epi32(four_bytes(at));
    return halves(both, both);
  }
  static Sum add(Sum sum, const Weights& w, const Weights& x) { return fma(w.odd, x.odd, fma(w.even, x.even, sum)); }
#endif
};

// Sums of weight * value over a block of values, which are whole numbers and therefore exact in any order. Each block of a row
// has a scale of its own; the blocks are one chain.
struct Int8 {
  using Value = int8_t;
  static constexpr long group = 4;
#if defined(AVX512_VNNI)
  using Weights = __m512i;
  using Sum = __m512i;
  static constexpr int offset = 128;  // of the stored weights
  static Sum zero() { return _mm512_setzero_si512(); }
  static Weights weights(const void* at) { return _mm512_loadu_si512(at); }
  static Weights row(const Value* at) { return _mm512_set1_epi32(four_bytes(at)); }
  static Sum add(Sum sum, Weights w, Weights x) { return _mm512_dpbusd_epi32(sum, w, x); }
  static Sum start(int value) { return _mm512_set1_epi32(value); }
  static Lanes finish(Sum sum) { return {_mm512_cvtepi32_ps(sum)}; }
#else
  struct Sum {
    __m256i a, b;
  };
  using Weights = Sum;
  static constexpr int offset = 0;
  static Sum zero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
  static Weights weights(const void* at) {
    const __m256i sign = _mm256_set1_epi8((char)0x80);
    return {_mm256_xor_si256(_mm256_loadu_si256((const __m256i*)at), sign),
            _mm256_xor_si256(_mm256_loadu_si256((const __m256i*)at + 1), sign)};
  }
  static Weights row(const Value* at) {
    const __m256i both = _mm256_set1_epi32(four_bytes(at));
    return {both, both};
  }
  // |w| |x| is at most 127 * 127, so that two of them fit into 16 bits.
  static __m256i dot(__m256i w, __m256i x) {
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
    return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
  }
  static Sum add(Sum sum, const Weights& w, const Weights& x) {
    return {_mm256_add_epi32(sum.a, dot(w.a, x.a)), _mm256_add_epi32(sum.b, dot(w.b, x.b))};
  }
  static Sum start(int value) { return {_mm256_set1_epi32(value), _mm256_set1_epi32(value)}; }
  static Lanes finish(Sum sum) { return both(_mm256_cvtepi32_ps(sum.a), _mm256_cvtepi32_ps(sum.b)); }
#endif
};

// Rows as a product reads them: `width` values each, a multiple of the group.
template <class Kind>
struct Rows {
  const typename Kind::Value* values;
  const float* scales;  // of the blocks of int8 values
  const int* sums;      // of the blocks of int8 values
  long width;
};

// Adds the products of the values `from` to `to` of R rows with B blocks of outputs.
template <class Kind, int R, int B>
inline const char* add_products(typename Kind::Sum (&sum)[B][R], const char* weights, long stride, const typename Kind::Value* x,
                                long width, long from, long to, bool fetch) {
  for (long i = from; i < to; i += Kind::group, weights += 64) {
    typename Kind::Weights w[B];
#pragma GCC unroll 8
    for (int b = 0; b < B; b++) {
      w[b] = Kind::weights(weights + b * stride);
      if (fetch) {
        _mm_prefetch(weights + (b + B) * stride, _MM_HINT_T1);  // the next blocks, into the second-level cache
        _mm_prefetch(weights + b * stride + 512, _MM_HINT_T0);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const typename Kind::Weights value = Kind::row(x + r * width + i);
#pragma GCC unroll 8
      for (int b = 0; b < B; b++) sum[b][r] = Kind::add(sum[b][r], w[b], value);
    }
  }
  return weights;
}

// R rows times B blocks of sixteen outputs, the last of which has `last` outputs.
template <class Kind, int R, int B>
void tile(const char* weights, const Rows<Kind>& rows, long first, const float* scale, float* out, long outputs, long last,
          bool fetch) {
  const long stride = rows.width * kLanes * (long)sizeof(typename Kind::Value);
  const typename Kind::Value* x = rows.values + first * rows.width;
  Lanes total[B][R];
#pragma GCC unroll 8
  for (int b = 0; b < B; b++)
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) total[b][r] = zeros();
  if constexpr (std::is_same_v<Kind, Int8>) {
    const long blocks = (rows.width + kInt8Block - 1) / kInt8Block;
    const float* scales = rows.scales + first * blocks;
    const int* sums = rows.sums + first * blocks;
    for (long block = 0; block < blocks; block++) {
      Int8::Sum sum[B][R];
#pragma GCC unroll 8
      for (int b = 0; b < B; b++)
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) sum[b][r] = Int8::start(-Int8::offset * sums[r * blocks + block]);
      const long from = block * kInt8Block, to = std::min(rows.width, from + kInt8Block);
      weights = add_products<Int8, R, B>(sum, weights, stride, x, rows.width, from, to, fetch);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        const Lanes factor = splat(scales[r * blocks + block]);
#pragma GCC unroll 8
        for (int b = 0; b < B; b++) total[b][r] = fma(Int8::finish(sum[b][r]), factor, total[b][r]);
      }
    }
  } else {
    add_products<Kind, R, B>(total, weights, stride, x, rows.width, 0, rows.width, fetch);
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int b = 0; b < B; b++) {
      const long count = b == B - 1 ? last : kLanes;
      if constexpr (std::is_same_v<Kind, Int8>) total[b][r] = total[b][r] * load(scale + b * kLanes, count);
      store(out + (first + r) * outputs + b * kLanes, total[b][r], count);
    }
}

template <class Kind, int B>
void tiles(int count, const char* weights, const Rows<Kind>& rows, long first, const float* scale, float* out, long outputs,
           long last, bool fetch) {
  switch (count) {
#define CASE(R) \
  case R:       \
    return tile<Kind, R, B>(weights, rows, first, scale, out, outputs, last, fetch)
    CASE(1);
    CASE(2);
    CASE(3);
    CASE(4);
#if defined(AVX512)
    CASE(5);
    CASE(6);
    CASE(7);
    CASE(8);
#endif
#undef CASE
  }
}

#if defined(AVX512)
constexpr long kTileRows = 8, kTileBlocks = 2;
#else
constexpr long kTileRows = 4, kTileBlocks = 1;
#endif

// Writes the outputs of blocks `from` to `to` of a matrix with `outputs` rows.
template <class Kind>
void multiply(const char* weights, const Rows<Kind>& rows, long count, const float* scale, float* out, long outputs, long from,
              long to) {
  const long stride = rows.width * kLanes * (long)sizeof(typename Kind::Value);
  // Rows that fit into the second-level cache together, times blocks that do.
  const long together = std::max(kTileRows, (1L << 18) / (rows.width * (long)sizeof(typename Kind::Value)) / kTileRows * kTileRows);
  const long group = std::max(kTileBlocks, (1L << 17) / stride / kTileBlocks * kTileBlocks);
  for (long outer = from; outer < to; outer += group)
    for (long start = 0; start < count; start += together) {
      const long end = std::min(count, start + together);
      for (long block = outer; block < std::min(to, outer + group);) {
        const bool several = !std::is_same_v<Kind, Int8> && block + kTileBlocks <= std::min(to, outer + group);
        const long blocks = several ? kTileBlocks : 1;  // int8 needs the registers for two kinds of sums
        const long output = block * kLanes, last = std::min(kLanes, outputs - (block + blocks - 1) * kLanes);
        for (long row = start; row < end;) {
          // Groups of nearly equal size: ten rows are five and five.
          const long left = end - row, parts = (left + kTileRows - 1) / kTileRows, size = (left + parts - 1) / parts;
          const bool fetch = row == 0;
          const float* factors = scale ? scale + output : nullptr;
          if (!several)
            tiles<Kind, 1>(size, weights + block * stride, rows, row, factors, out + output, outputs, last, fetch);
          else
            tiles<Kind, kTileBlocks>(size, weights + block * stride, rows, row, factors, out + output, outputs, last, fetch);
          row += size;
        }
        block += blocks;
      }
    }
}

// Rounds a row to bfloat16.
inline void round_row(const float* x, long width, uint16_t* out, float*, int*) {
  const long whole = width / kLanes * kLanes;
  for (long i = 0; i < whole; i += kLanes) store_bfloat16(out + i, load(x + i));
  for (long i = whole; i < width; i++) out[i] = to_bfloat16(x[i]);
}

// Rounds a row to whole numbers from -127 to 127, by blocks, the largest magnitude of which is 127.
inline void round_row(const float* x, long width, int8_t* out, float* scale, int* sum) {
  for (long from = 0; from < width; from += kInt8Block, scale++, sum++) {
    const long to = std::min(width, from + kInt8Block);
    Lanes top = zeros(), bad = zeros();
    for (long i = from; i < to; i += kLanes) {
      const Lanes part = to - i < kLanes ? load(x + i, to - i) : load(x + i);
      top = max(magnitude(part), top);  // passes over NaN
      bad = fma(part, zeros(), bad);    // NaN if any value is not finite
    }
    const float most = highest(top);
    const bool finite = total(bad) == 0.0f;
    *sum = 0;
    *scale = !finite ? std::numeric_limits<float>::quiet_NaN() : most < 1e-30f ? 0.0f : most / 127.0f;
    if (!finite || most < 1e-30f) continue;  // the values stay zero, as the inverse might be infinite
    const Lanes factor = splat(127.0f / most);
    Lanes added = zeros();
    for (long i = from; i < to; i += kLanes) {
      const long part = std::min(kLanes, to - i);
      const Lanes whole = rounded((part < kLanes ? load(x + i, part) : load(x + i)) * factor);
      store_int8(out + i, whole, part);
      added = added + whole;
    }
    *sum = (int)total(added);
  }
}

}  // namespace

// Products of rows with a packed weight matrix.
//
// A matrix [O, I] of floats is stored as [O / 16, I / g, 16, g], padded with zeros, where g values fill four bytes: 1 of
// float32, 2 of bfloat16; for whole numbers see blocks.h. The sixteen outputs of a block are the lanes, so that memory is
// read in order and no sum crosses lanes: each output is one chain over I, whatever the number of rows.

#pragma once

#include <algorithm>
#include <cstring>

#include "blocks.h"
#include "lanes.h"
#include "table.h"

namespace {

struct Float32 {
  using Value = float;
  using Sum = Lanes;
  static constexpr long group = 1;
  static constexpr bool rounded = false;
  static constexpr long tile_rows = kTileRows, tile_blocks = kTileBlocks;
  static long stride(long width) { return width * 64; }
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
  static constexpr bool rounded = false;
  static constexpr long tile_rows = kTileRows, tile_blocks = kTileBlocks;
  static long stride(long width) { return width * 32; }
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

// Rows as a product reads them: `width` values each, padded as the weights are.
template <class Kind>
struct Rows {
  const typename Kind::Value* values;
  const Rounded* rounded;
  long width;
};

// R rows times B blocks of sixteen outputs, the last of which has `last` outputs.
template <class Kind, int R, int B>
void tile(const char* weights, const Rows<Kind>& rows, long first, const float* scale, float* out, long outputs, long last,
          int fetch) {
  const long stride = Kind::stride(rows.width);
  const typename Kind::Value* x = rows.values + first * rows.width;
  out += first * outputs;
  if constexpr (Kind::rounded) {
    const Rounded* rounded = rows.rounded + first * (rows.width / 32);
    block_tile<Kind, R, B>(weights, x, rows.width, rounded, scale, out, outputs, last, fetch);
  } else {
    Lanes sum[B][R];
#pragma GCC unroll 8
    for (int b = 0; b < B; b++)
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) sum[b][r] = zeros();
    for (long i = 0; i < rows.width; i += Kind::group, weights += 64) {
      typename Kind::Weights w[B];
#pragma GCC unroll 8
      for (int b = 0; b < B; b++) {
        w[b] = Kind::weights(weights + b * stride);
        if (fetches(fetch, b)) _mm_prefetch(weights + (b + B) * stride, _MM_HINT_T1);
        if (fetch & 1) _mm_prefetch(weights + b * stride + 512, _MM_HINT_T0);
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        const typename Kind::Weights value = Kind::row(x + r * rows.width + i);
#pragma GCC unroll 8
        for (int b = 0; b < B; b++) sum[b][r] = Kind::add(sum[b][r], w[b], value);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
      for (int b = 0; b < B; b++) store(out + r * outputs + b * kLanes, sum[b][r], b == B - 1 ? last : kLanes);
  }
}

template <class Kind, int B, int R = Kind::tile_rows>
void tiles(long count, const char* weights, const Rows<Kind>& rows, long first, const float* scale, float* out, long outputs,
           long last, int fetch) {
  if (count == R) return tile<Kind, R, B>(weights, rows, first, scale, out, outputs, last, fetch);
  if constexpr (R > 1) tiles<Kind, B, R - 1>(count, weights, rows, first, scale, out, outputs, last, fetch);
}

// Writes the outputs of blocks `from` to `to` of a matrix with `outputs` rows.
template <class Kind>
void multiply(const char* weights, const Rows<Kind>& rows, long count, const float* scale, float* out, long outputs, long from,
              long to) {
  constexpr long kRows = Kind::tile_rows, kBlocks = Kind::tile_blocks;
  const long stride = Kind::stride(rows.width);
  // Rows that fit into the second-level cache together, times blocks that do.
  const long together = std::max(kRows, (1L << 18) / (rows.width * (long)sizeof(typename Kind::Value)) / kRows * kRows);
  const long group = std::max(kBlocks, (1L << 17) / stride / kBlocks * kBlocks);
  for (long outer = from; outer < to; outer += group)
    for (long start = 0; start < count; start += together) {
      const long end = std::min(count, start + together);
      for (long block = outer; block < std::min(to, outer + group);) {
        const bool several = block + kBlocks <= std::min(to, outer + group);
        const long blocks = several ? kBlocks : 1;
        const long output = block * kLanes, last = std::min(kLanes, outputs - (block + blocks - 1) * kLanes);
        for (long row = start, pass = start ? 2 : 0; row < end; pass++) {
          // Groups of nearly equal size: ten rows are five and five.
          const long left = end - row, parts = (left + kRows - 1) / kRows, size = (left + parts - 1) / parts;
          const int fetch = pass > 1 ? 0 : size == count ? 3 : 1 << pass;
          const float* factors = scale ? scale + output : nullptr;
          if (!several)
            tiles<Kind, 1>(size, weights + block * stride, rows, row, factors, out + output, outputs, last, fetch);
          else
            tiles<Kind, kBlocks>(size, weights + block * stride, rows, row, factors, out + output, outputs, last, fetch);
          row += size;
        }
        block += blocks;
      }
    }
}

// Rounds a row to bfloat16.
inline void round_row(const float* x, long width, uint16_t* out, Rounded*) {
  const long whole = width / kLanes * kLanes;
  for (long i = 0; i < whole; i += kLanes) store_bfloat16(out + i, load(x + i));
  for (long i = whole; i < width; i++) out[i] = to_bfloat16(x[i]);
}

}  // namespace

// Products of rows with a packed weight matrix.
//
// A matrix [O, I] of floats is stored as [O / 16, I / g, 16, g], padded with zeros, where g values fill four bytes: 1 of
// float32, 2 of bfloat16; for whole numbers see blocks.h. The sixteen outputs of a block are the lanes, so that memory is
// read in order and sums do not cross lanes: each output is one chain of additions over I, for any number of rows.

#pragma once

#include <algorithm>
#include <cstring>

#include "blocks.h"
#include "lanes.h"
#include "table.h"
#if defined(AMX)
#include "amx.h"
#endif

namespace {

struct Float32 {
  using Value = float;
  static constexpr long group = 1, steps = 1, line = 64;
  static constexpr bool rounded = false;
  static constexpr long tile_rows = kFloatRows, tile_blocks = kTileBlocks;
  static long stride(long width) { return width * 64; }
#if defined(AVX512)
  using Weights = __m512;
  static Weights weights(const void* at, long) { return _mm512_loadu_ps(at); }
  static Weights row(const Value* at) { return _mm512_set1_ps(*at); }
  static Lanes add(Lanes sum, Weights w, Weights x) { return {_mm512_fmadd_ps(w, x, sum.v)}; }
#else
  using Weights = Lanes;
  static Weights weights(const void* at, long) { return load((const float*)at); }
  static Weights row(const Value* at) { return splat(*at); }
  static Lanes add(Lanes sum, Weights w, Weights x) { return fma(w, x, sum); }
#endif
};

// A processor without products of bfloat16 multiplies the first input of a pair and then the second, as float32.
struct BFloat16 {
  static constexpr long group = 2, line = 64;
  static constexpr bool rounded = false;
  static constexpr long tile_rows = kFloatRows, tile_blocks = kTileBlocks;
  static long stride(long width) { return width * 32; }
#if defined(AVX512_BF16)
  using Value = uint16_t;
  using Weights = __m512i;
  static constexpr long steps = 1;
  static Weights weights(const void* at, long) { return _mm512_loadu_si512(at); }
  static Weights row(const Value* at) { return _mm512_set1_epi32(four_bytes(at)); }
  static Lanes add(Lanes sum, Weights w, Weights x) { return {_mm512_dpbf16_ps(sum.v, (__m512bh)w, (__m512bh)x)}; }
#else
  using Value = float;  // rounded to bfloat16
  using Weights = Lanes;
  static constexpr long steps = 2;
  static Weights weights(const void* at, long step) { return step ? odd_bfloat16(at) : even_bfloat16(at); }
  static Weights row(const Value* at) { return splat(*at); }
  static Lanes add(Lanes sum, Weights w, Weights x) { return fma(w, x, sum); }
#endif
};

// The rows of a product: `width` values each, with the same padding as the weights.
template <class Kind>
struct Rows {
  const typename Kind::Value* values;
  const Rounded* rounded;
  long width;
};

// Multiplies R rows with B blocks of sixteen outputs; the last block has `last` outputs.
template <class Kind, int R, int B>
void tile(const char* weights, const Rows<Kind>& rows, long first, const float* scale, float* out, long outputs, long last,
          Fetch fetch) {
  const long stride = Kind::stride(rows.width);
  const typename Kind::Value* x = rows.values + first * rows.width;
  out += first * outputs;
  if constexpr (Kind::rounded) {
    const Rounded* rounded = rows.rounded + first * (rows.width / 32);
    static_assert(B == 1);
    block_tile<Kind, R>(weights, x, rows.width, rounded, scale, out, outputs, last, fetch);
  } else {
    Lanes sum[B][R];
#pragma GCC unroll 8
    for (int b = 0; b < B; b++)
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) sum[b][r] = zeros();
    for (long i = 0; i < rows.width; i += Kind::group, weights += 64) {
#pragma GCC unroll 8
      for (int b = 0; b < B; b++) {
        fetch.line();
        _mm_prefetch(weights + b * stride + kAhead, _MM_HINT_T0);
      }
#pragma GCC unroll 2
      for (long step = 0; step < Kind::steps; step++) {
        typename Kind::Weights w[B];
#pragma GCC unroll 8
        for (int b = 0; b < B; b++) w[b] = Kind::weights(weights + b * stride, step);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
          const typename Kind::Weights value = Kind::row(x + r * rows.width + i + step);
#pragma GCC unroll 8
          for (int b = 0; b < B; b++) sum[b][r] = Kind::add(sum[b][r], w[b], value);
        }
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
           long last, Fetch fetch) {
  if (count == R) return tile<Kind, R, B>(weights, rows, first, scale, out, outputs, last, fetch);
  if constexpr (R > 1) tiles<Kind, B, R - 1>(count, weights, rows, first, scale, out, outputs, last, fetch);
}

// Multiplies `count` rows, at most `Kind::tile_rows`, with B blocks of sixteen outputs; the last block has `last` outputs.
template <int B, class Kind>
void multiply_group(long count, const char* weights, const Rows<Kind>& rows, long first, const float* scale, float* out,
                    long outputs, long last, Fetch fetch) {
  tiles<Kind, B>(count, weights, rows, first, scale, out, outputs, last, fetch);
}

#if defined(AMX)
struct TiledBFloat16 : BFloat16 {
  static constexpr long tile_rows = 2 * kTileHeight;
};

template <int B>
void multiply_group(long count, const char* weights, const Rows<TiledBFloat16>& rows, long first, const float*, float* out,
                    long outputs, long last, Fetch) {
  const auto multiply = count > kTileHeight ? multiply_tiles<B, true> : multiply_tiles<B, false>;
  multiply(weights, BFloat16::stride(rows.width), rows.values + first * rows.width, rows.width, count, out + first * outputs,
           outputs, last);
}
#endif

// Writes the outputs of blocks `from` to `to` of a matrix with `outputs` rows.
template <class Kind>
void multiply(const char* weights, const Rows<Kind>& rows, long count, const float* scale, float* out, long outputs, long from,
              long to) {
  constexpr long kRows = Kind::tile_rows, kBlocks = Kind::tile_blocks;
  const long stride = Kind::stride(rows.width);
  // Multiplies a group of rows that fits into the second-level cache with a group of blocks that also fits.
  const long together = std::max(kRows, (1L << 18) / (rows.width * (long)sizeof(typename Kind::Value)) / kRows * kRows);
  const long group = std::max(kBlocks, (1L << 17) / stride / kBlocks * kBlocks);
  for (long outer = from; outer < to; outer += group)
    for (long start = 0; start < count; start += together) {
      const long end = std::min(count, start + together);
      for (long block = outer; block < std::min(to, outer + group);) {
        const bool several = block + kBlocks <= std::min(to, outer + group);
        const long blocks = several ? kBlocks : 1;
        const long output = block * kLanes, last = std::min(kLanes, outputs - (block + blocks - 1) * kLanes);
        const char* at = weights + block * stride;
        const float* factors = scale ? scale + output : nullptr;
        const long passes = (end - start + kRows - 1) / kRows, bytes = blocks * stride;
        const bool fetches = !start && (kFetchesAlone || passes > 1);
        for (long row = start, pass = 0; pass < passes; pass++) {
          // Groups of nearly equal size: ten rows are five and five.
          const long size = (end - row + passes - pass - 1) / (passes - pass);
          const Fetch fetch = fetches ? Fetch{at + bytes + bytes * pass / passes, Kind::line / passes} : Fetch{at, Kind::line};
          if (several)
            multiply_group<kBlocks>(size, at, rows, row, factors, out + output, outputs, last, fetch);
          else
            multiply_group<1>(size, at, rows, row, factors, out + output, outputs, last, fetch);
          row += size;
        }
        block += blocks;
      }
    }
}

inline void store_rounded(uint16_t* at, Lanes x) { store_bfloat16(at, x); }
inline void store_rounded(float* at, Lanes x) {
  uint16_t half[kLanes];
  store_bfloat16(half, x);
  store(at, from_bfloat16(half));
}

// Rounds a row to bfloat16.
inline void round_row(const float* x, long width, BFloat16::Value* out, Rounded*) {
  long i = 0;
  for (; i + kLanes <= width; i += kLanes) store_rounded(out + i, load(x + i));
  if (i == width) return;
  BFloat16::Value last[kLanes];
  store_rounded(last, load(x + i, width - i));
  std::copy(last, last + width - i, out + i);
}

}  // namespace

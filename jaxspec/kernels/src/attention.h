// Attention of a window's tokens to cache and window, summed in the order of the tokens' positions in the text.
//
// The scores are written to one array in the order of positions: first the scores of the cache, then the scores of the
// window's tokens that the query attends to. The maximum, the exponentials, their sum (by lanes = position mod 16) and the
// weighted sum of the values follow the order of this array, so that the result depends neither on which tokens are cached
// nor on the other queries.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <type_traits>

#include "lanes.h"
#include "table.h"

namespace {

// Values of a type are multiplied in units of `group` values, which fill the four bytes of a lane. On processors without
// bfloat16 products, bfloat16 values are widened to float32.
template <class T>
struct Units {
  static constexpr long group = 1;
  static Lanes some(const float* at, long count) { return count == kLanes ? load(at) : load(at, count); }
  static Lanes some(const uint16_t* at, long count) { return count == kLanes ? from_bfloat16(at) : from_bfloat16(at, count); }
  // Loads sixteen units of a row, of which `count` values exist.
  static Lanes units(const T* at, long count) { return some(at, count); }
  // Loads a unit of `group` rows for each of 32 columns, of which `count` exist.
  static void columns(const T* const* rows, long count, Lanes (&out)[2]) {
    out[0] = some(rows[0], std::min(kLanes, count));
    out[1] = count > kLanes ? some(rows[0] + kLanes, count - kLanes) : zeros();
  }
  static Lanes spread(const float* unit) { return splat(*unit); }
  static Lanes add(Lanes sum, Lanes x, Lanes y) { return fma(x, y, sum); }
  static void put(float* unit, Lanes x) { store(unit, x); }
};

#if defined(AVX512_BF16)
template <>
struct Units<uint16_t> {
  static constexpr long group = 2;
  static __m512i row(const uint16_t* at, long count) {
    return count == 2 * kLanes ? _mm512_loadu_si512(at) : _mm512_maskz_loadu_epi16((__mmask32)((1ull << count) - 1), at);
  }
  static Lanes units(const uint16_t* at, long count) { return {_mm512_castsi512_ps(row(at, count))}; }
  static void columns(const uint16_t* const* rows, long count, Lanes (&out)[2]) {
    const __m512i first = row(rows[0], count), second = row(rows[1], count);
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5, 36,
                                         4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(kLanes));
    out[0] = {_mm512_castsi512_ps(_mm512_permutex2var_epi16(first, low, second))};
    out[1] = {_mm512_castsi512_ps(_mm512_permutex2var_epi16(first, high, second))};
  }
  static Lanes spread(const float* unit) { return {_mm512_castsi512_ps(_mm512_set1_epi32(four_bytes(unit)))}; }
  static Lanes add(Lanes sum, Lanes x, Lanes y) {
    return {_mm512_dpbf16_ps(sum.v, (__m512bh)_mm512_castps_si512(x.v), (__m512bh)_mm512_castps_si512(y.v))};
  }
  static void put(float* unit, Lanes x) { _mm256_storeu_si256((__m256i*)unit, (__m256i)_mm512_cvtneps_pbh(x.v)); }
};
#endif

// The number of queries that share a load. It is large enough that their chains hide the latency of an addition.
#if defined(AVX512)
constexpr int kScored = 12, kMixed = 12;
#else
constexpr int kScored = 6, kMixed = 3;
#endif

// Calls a function with a number from 1 to Q as a constant.
template <int Q, class F>
inline void together(long count, F&& function) {
  if (count == Q) return function(std::integral_constant<int, Q>());
  if constexpr (Q > 1) together<Q - 1>(count, function);
}

// Prefetches values into the second-level cache, because the hardware prefetcher stops at the end of a page.
template <class T>
inline void fetch(const T* at, long count) {
  for (long i = 0; i < count; i += 64 / (long)sizeof(T)) _mm_prefetch((const char*)(at + i), _MM_HINT_T1);
}

constexpr long kQueries = kQueriesPerCall;

// Writes up to sixteen rows as [units, 16].
template <class T>
void turn(const T* from, long count, long width, float* out) {
  constexpr long step = Units<T>::group * kLanes;
  for (long i = 0; i < width; i += step, out += kLanes * kLanes) {
    const long part = std::min(step, width - i);
    Lanes rows[16];
    if (part == step && count == kLanes)
      for (long row = 0; row < kLanes; row++) rows[row] = Units<T>::units(from + row * width + i, step);
    else
      for (long row = 0; row < kLanes; row++)
        rows[row] = row < count ? Units<T>::units(from + row * width + i, part) : zeros();
    transpose(rows);
    for (long j = 0; j < kLanes; j++) store(out + j * kLanes, rows[j]);
  }
}

// Computes the scores of sixteen keys, of which `count` exist, for several transposed queries: one chain over the width each.
template <class T>
void score(const T* keys, long count, long width, const float* queries, long number, float scale, float* tile,
           float* const* lines, long at) {
  turn(keys, count, width, tile);
  for (long q = 0; q < number;) {
    const long some = std::min<long>(kScored, number - q);
    together<kScored>(some, [&](auto count) {
      constexpr int Q = count.value;
      Lanes sum[Q];
      for (int j = 0; j < Q; j++) sum[j] = zeros();
      for (long unit = 0; unit * Units<T>::group < width; unit++) {
        const Lanes key = load(tile + unit * kLanes);
        for (int j = 0; j < Q; j++)
          sum[j] = Units<T>::add(sum[j], key, Units<T>::spread(queries + unit * kLanes + q + j));
      }
      for (int j = 0; j < Q; j++) store(lines[q + j] + at, sum[j] * splat(scale));
    });
    q += some;
  }
}

// Adds weight * value for the positions `from` to `to`, which are multiples of a unit, to the sums of Q queries.
template <class T, int Q, class Row>
void mix(Row row, long width, long from, long to, const float* const* weights, float* const* sums) {
  constexpr long group = Units<T>::group;
  for (long i = 0; i < width; i += 2 * kLanes) {
    const long part = std::min(2 * kLanes, width - i);
    Lanes sum[Q][2];
    for (int q = 0; q < Q; q++)
      for (int v = 0; v < 2; v++) sum[q][v] = load(sums[q] + i + v * kLanes);
    for (long place = from; place < to; place += group) {
      const T* rows[group];
      for (long k = 0; k < group; k++) rows[k] = row(place + k) + i;
      Lanes value[2];
      Units<T>::columns(rows, part, value);
      for (int q = 0; q < Q; q++) {
        const Lanes weight = Units<T>::spread(weights[q] + place / group);
        for (int v = 0; v < 2; v++) sum[q][v] = Units<T>::add(sum[q][v], value[v], weight);
      }
    }
    for (int q = 0; q < Q; q++)
      for (int v = 0; v < 2; v++) store(sums[q] + i + v * kLanes, sum[q][v]);
  }
}

// Memory of one thread. It is not a standard container, because the linker might choose a version compiled for another processor.
struct Scratch {
  float* memory = nullptr;
  long size = 0;
  float* grow(long needed) {
    if (needed > size) {
      std::free(memory);
      memory = (float*)std::malloc(needed * sizeof(float));
      size = memory ? needed : 0;
      if (!memory) std::abort();
    }
    return memory;
  }
  ~Scratch() { std::free(memory); }
};

// Computes queries `start` to `start + number` of the G * T queries of one head.
template <class T>
void attend(const AttentionCall& a, long b, long h, long start, long number) {
  constexpr long unit = Units<T>::group;
  const T *keys = (const T*)a.keys, *values = (const T*)a.values;
  const T *new_keys = (const T*)a.new_keys, *new_values = (const T*)a.new_values;
  thread_local Scratch scratch;
  const long turned = (a.width + 31) / 32 * 32 * kLanes, value_width = (a.value_width + 31) / 32 * 32;
  const long length = a.length[b], size = (length + a.window + 2 * kLanes) / kLanes * kLanes;
  const long pointers = (a.window + 2) * (long)(sizeof(T*) / sizeof(float));
  const long each = value_width + size + a.window + kLanes;
  float* memory = scratch.grow(pointers + value_width + 2 * turned + kQueries * each);
  const T** seen_values = (const T**)memory;  // for each query, its positions that are not shared with the other queries
  float *blank = memory + pointers, *tile = blank + value_width, *queries = tile + turned;
  float *lines[kQueries], *sums[kQueries], *seen[kQueries];
  long begins[kQueries], lasts = 0, earliest = length;
  const bool* masks[kQueries];
  std::fill(blank, tile, 0.0f);
  turn((const T*)a.queries + ((b * a.heads + h) * a.groups * a.tokens + start) * a.width, number, a.width, queries);
  for (long q = 0; q < number; q++) {
    float* own = queries + turned + q * each;
    sums[q] = own;
    lines[q] = own + value_width;
    seen[q] = lines[q] + size;
    const long token = (start + q) % a.tokens;
    masks[q] = a.mask + (b * a.tokens + token) * a.window;
    begins[q] = a.first_seen ? std::max(0, a.first_seen[b * a.tokens + token]) : 0;
    earliest = std::min(earliest, begins[q]);
    for (long w = 0; w < a.window; w++)
      if (masks[q][w]) lasts = std::max(lasts, w + 1);
  }
  const long first_block = earliest / kLanes * kLanes;
  const T* cached_keys = keys + (b * a.heads + h) * a.slots * a.width;
  const T* cached_values = values + (b * a.heads + h) * a.slots * a.value_width;
  const T* own_keys = new_keys + (b * a.heads + h) * a.window * a.width;
  const T* own_values = new_values + (b * a.heads + h) * a.window * a.value_width;
  for (long slot = first_block; slot < length; slot += kLanes) {
    const long count = std::min(kLanes, length - slot), next = std::min(kLanes, length - slot - count);
    fetch(cached_keys + (slot + count) * a.width, next * a.width);
    fetch(cached_values + slot * a.value_width, count * a.value_width);
    score(cached_keys + slot * a.width, count, a.width, queries, number, a.scale, tile, lines, slot);
  }
  for (long w = 0; w < lasts; w += kLanes)
    score(own_keys + w * a.width, std::min(kLanes, a.window - w), a.width, queries, number, a.scale, tile, seen, w);

  float totals[kQueries];
  for (long q = 0; q < number; q++) {
    const float lowest = -std::numeric_limits<float>::infinity();
    float* line = lines[q];
    // With sliding-window attention, a query may not attend to the last cached or the first drafted tokens of its text.
    long end = std::max(length, begins[q]);
    std::fill(line + first_block, line + std::max(first_block, std::min(begins[q], length)), lowest);
    std::fill(line + length, line + end, lowest);
    for (long w = 0; w < lasts; w++)
      if (masks[q][w]) line[end++] = seen[q][w];
    const long padded = (end + kLanes - 1) / kLanes * kLanes;
    for (long i = end; i < padded; i++) line[i] = lowest;
    Lanes top = splat(lowest);
    for (long i = first_block; i < padded; i += kLanes) top = max(top, load(line + i));
    const float most = highest(top);
    Lanes sum = zeros();
    for (long i = first_block; i < padded; i += kLanes) {
      const Lanes weight = exponential(load(line + i) - splat(most));
      Units<T>::put(line + i / unit, weight);  // overwrites scores that were already read
      sum = sum + weight;
    }
    totals[q] = total(sum);
    std::fill(sums[q], sums[q] + value_width, 0.0f);
  }
  const auto cached = [&](long place) { return cached_values + place * a.value_width; };
  for (long q = 0; q < number;) {
    const long some = std::min<long>(kMixed, number - q);
    together<kMixed>(some, [&](auto count) {
      mix<T, count.value>(cached, a.value_width, first_block, length / unit * unit, lines + q, sums + q);
    });
    q += some;
  }
  for (long q = 0; q < number; q++) {
    const long begin = std::max(length, begins[q]), from = begin / unit * unit;
    long count = 0;
    if (from < begin) seen_values[count++] = from < length ? cached(from) : (const T*)blank;
    for (long w = 0; w < lasts; w++)
      if (masks[q][w]) seen_values[count++] = own_values + w * a.value_width;
    if (count % unit) seen_values[count++] = (const T*)blank;
    mix<T, 1>([&](long place) { return seen_values[place - from]; }, a.value_width, from, from + count, lines + q, sums + q);
    const Lanes divisor = splat(totals[q]);
    const long group = (start + q) / a.tokens, token = (start + q) % a.tokens;
    float* out = a.out + (((b * a.tokens + token) * a.heads + h) * a.groups + group) * a.value_width;
    Lanes bad = zeros();
    for (long i = 0; i < a.value_width; i += kLanes) {
      const Lanes mean = load(sums[q] + i) / divisor;
      store(out + i, mean, std::min(kLanes, a.value_width - i));
      bad = fma(mean, zeros(), bad);  // NaN if any value is not finite
    }
    // A value that is not finite makes the whole token NaN, because its product with a weight of zero is NaN.
    if (total(bad) != 0.0f) std::fill(out, out + a.value_width, std::numeric_limits<float>::quiet_NaN());
  }
}

}  // namespace

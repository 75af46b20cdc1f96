// Attention of a window's tokens to cache and window, summed in the order of the tokens' positions in the text.
//
// Scores are written to a line by position, those of the cache first, then those of the window's tokens that the query
// sees. Maximum, exponentials, their sum (by lanes = position mod 16) and the mix of values then run along that line, so
// that the result does not depend on which tokens are cached, nor on the other queries.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <type_traits>

#include "lanes.h"
#include "table.h"

namespace {

template <class T>
inline Lanes values_at(const T* at, long count) {
  if constexpr (sizeof(T) == 4)
    return count == kLanes ? load((const float*)at) : load((const float*)at, count);
  else
    return count == kLanes ? from_bfloat16((const uint16_t*)at) : from_bfloat16((const uint16_t*)at, count);
}

// Queries that share a load, so many that their chains hide the latency of a sum: of one vector for a score, two for a mix.
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

// Prefetches values into the second-level cache; the processor's own prefetching ends with a page.
template <class T>
inline void fetch(const T* at, long count) {
  for (long i = 0; i < count; i += 64 / (long)sizeof(T)) _mm_prefetch((const char*)(at + i), _MM_HINT_T1);
}

constexpr long kQueries = kQueriesPerCall;

// Scores sixteen keys, of which `count` exist, for some queries: one chain over the width each. The queries are stored as
// [width, kQueries].
template <class T>
void score(const T* keys, long count, long width, const float* queries, long number, float* tile, float* const* lines, long at) {
  for (long i = 0; i < width; i += kLanes) {
    const long part = std::min(kLanes, width - i);
    Lanes rows[16];
    for (long key = 0; key < kLanes; key++) rows[key] = key < count ? values_at(keys + key * width + i, part) : zeros();
    transpose(rows);
    for (long j = 0; j < kLanes; j++) store(tile + (i + j) * kLanes, rows[j]);
  }
  for (long q = 0; q < number;) {
    const long some = std::min<long>(kScored, number - q);
    together<kScored>(some, [&](auto count) {
      constexpr int Q = count.value;
      const float* at_query = queries + q;
      Lanes sum[Q];
      for (int j = 0; j < Q; j++) sum[j] = zeros();
      for (long i = 0; i < width; i++) {
        const Lanes key = load(tile + i * kLanes);
        for (int j = 0; j < Q; j++) sum[j] = fma(key, splat(at_query[i * kQueries + j]), sum[j]);
      }
      for (int j = 0; j < Q; j++) store(lines[q + j] + at, sum[j]);
    });
    q += some;
  }
}

// Adds weight * value of the slots `from` to `to` to the sums of Q queries, for V vectors of the values' width.
template <class T, int Q, int V>
void mix_part(const T* values, long stride, long part, long from, long to, const float* const* weights, long shift,
              float* const* sums, long i) {
  Lanes sum[Q][V];
  for (int q = 0; q < Q; q++)
    for (int v = 0; v < V; v++) sum[q][v] = load(sums[q] + i + v * kLanes);
  for (long slot = from; slot < to; slot++) {
    Lanes value[V];
    for (int v = 0; v < V; v++) value[v] = values_at(values + slot * stride + i + v * kLanes, V > 1 ? kLanes : part);
    for (int q = 0; q < Q; q++) {
      const Lanes weight = splat(weights[q][slot + shift]);
      for (int v = 0; v < V; v++) sum[q][v] = fma(weight, value[v], sum[q][v]);
    }
  }
  for (int q = 0; q < Q; q++)
    for (int v = 0; v < V; v++) store(sums[q] + i + v * kLanes, sum[q][v]);
}

template <class T, int Q>
void mix(const T* values, long width, long from, long to, const float* const* weights, long shift, float* const* sums) {
  long i = 0;
  for (; i + 2 * kLanes <= width; i += 2 * kLanes)
    mix_part<T, Q, 2>(values, width, kLanes, from, to, weights, shift, sums, i);
  for (; i < width; i += kLanes)
    mix_part<T, Q, 1>(values, width, std::min(kLanes, width - i), from, to, weights, shift, sums, i);
}

// Memory of one thread. (A standard container here might be linked as another processor's code.)
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
  const T *query = (const T*)a.queries, *keys = (const T*)a.keys, *values = (const T*)a.values;
  const T *new_keys = (const T*)a.new_keys, *new_values = (const T*)a.new_values;
  thread_local Scratch scratch;
  const long width = (a.width + 15) / 16 * 16, value_width = (a.value_width + 15) / 16 * 16;
  const long length = a.length[b], size = (length + a.window + 2 * kLanes) / kLanes * kLanes;
  float* tile = scratch.grow(width * kLanes + kQueries * (a.width + value_width + size + a.window + kLanes));
  float* scaled = tile + width * kLanes;
  float *lines[kQueries], *sums[kQueries], *seen[kQueries];
  long begins[kQueries], lasts = 0, earliest = length;
  const bool* masks[kQueries];
  for (long q = 0; q < number; q++) {
    float* own = scaled + kQueries * a.width + q * (value_width + size + a.window + kLanes);
    sums[q] = own;
    lines[q] = own + value_width;
    seen[q] = lines[q] + size;
    const long token = (start + q) % a.tokens;
    masks[q] = a.mask + (b * a.tokens + token) * a.window;
    begins[q] = a.first_seen ? std::max(0, a.first_seen[b * a.tokens + token]) : 0;
    earliest = std::min(earliest, begins[q]);
    for (long w = 0; w < a.window; w++)
      if (masks[q][w]) lasts = std::max(lasts, w + 1);
    const T* from = query + ((b * a.heads + h) * a.groups * a.tokens + start + q) * a.width;
    for (long i = 0; i < a.width; i += kLanes) {
      const long part = std::min(kLanes, a.width - i);
      float values[kLanes];
      store(values, values_at(from + i, part) * splat(a.scale));
      for (long j = 0; j < part; j++) scaled[(i + j) * kQueries + q] = values[j];
    }
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
    score(cached_keys + slot * a.width, count, a.width, scaled, number, tile, lines, slot);
  }
  for (long w = 0; w < lasts; w += kLanes)
    score(own_keys + w * a.width, std::min(kLanes, a.window - w), a.width, scaled, number, tile, seen, w);

  float totals[kQueries];
  for (long q = 0; q < number; q++) {
    const float lowest = -std::numeric_limits<float>::infinity();
    float* line = lines[q];
    // A query of sliding-window attention may not see the last cached or the first drafted tokens of its text.
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
      store(line + i, weight);
      sum = sum + weight;
    }
    totals[q] = total(sum);
    std::fill(sums[q], sums[q] + value_width, 0.0f);
  }
  for (long q = 0; q < number;) {
    const long some = std::min<long>(kMixed, number - q);
    together<kMixed>(some, [&](auto count) {
      mix<T, count.value>(cached_values, a.value_width, first_block, length, lines + q, 0, sums + q);
    });
    q += some;
  }
  for (long q = 0; q < number; q++) {
    const float* weights = lines[q] + std::max(length, begins[q]);
    const Lanes divisor = splat(totals[q]);
    float* out = a.out + ((b * a.heads + h) * a.groups * a.tokens + start + q) * a.value_width;
    Lanes bad = zeros();
    for (long i = 0; i < a.value_width; i += kLanes) {
      const long part = std::min(kLanes, a.value_width - i);
      Lanes sum = load(sums[q] + i);
      const float* weight = weights;
      for (long w = 0; w < lasts; w++)
        if (masks[q][w]) sum = fma(splat(*weight++), values_at(own_values + w * a.value_width + i, part), sum);
      const Lanes mean = sum / divisor;
      store(out + i, mean, part);
      bad = fma(mean, zeros(), bad);  // NaN if any value is not finite
    }
    // A seen value that is not finite spoils the whole token, as a weight of zero times it is NaN.
    if (total(bad) != 0.0f) std::fill(out, out + a.value_width, std::numeric_limits<float>::quiet_NaN());
  }
}

}  // namespace

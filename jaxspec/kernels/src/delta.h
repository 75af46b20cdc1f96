// Gated DeltaNet, one token after the other: a token reads the state of its parent, and leaves a delta. See
// jaxspec/models/delta.py for the formulas.
//
// A window's token and a committed token change a state by the same operations in the same order, so that the bits depend
// neither on the window nor on how many tokens a commit adds. States are [key width, value width]; a lane is a column, and
// each sum over keys is one chain.

#pragma once

#include <algorithm>
#include <cmath>

#include "attention.h"
#include "lanes.h"
#include "rows.h"
#include "table.h"

namespace {

constexpr long kColumns = 8 * kLanes;      // the columns whose sums fit into registers
constexpr long kTreeColumns = 4 * kLanes;  // the columns of states of a tree that fit into the first-level cache

// Calls a function for parts of a row: with the place of the first lane, and the number of lanes' values.
template <class F>
inline void by_lanes(long width, F&& function) {
  for (long i = 0; i < width; i += kLanes) function(i, std::min(kLanes, width - i));
}

// A part of a row: the number of values in its last lanes, which is a constant if these lanes are whole.
using Whole = std::integral_constant<long, kLanes>;

// Calls a function for groups of columns: with the first column, the number of lanes as a constant, and how many values the
// last lanes have.
template <class F>
inline void by_columns(long width, F&& function) {
  for (long first = 0; first < width; first += kColumns) {
    const long count = std::min(kColumns, width - first);
    together<kColumns / kLanes>((count + kLanes - 1) / kLanes, [&](auto number) {
      const long last = count - (number.value - 1) * kLanes;
      if (last == kLanes) function(first, number, Whole());
      else function(first, number, last);
    });
  }
}

// Loads or stores lanes `j` of N, of which only the last may be a part.
template <int N>
inline Lanes load(const float* at, int j, Whole) {
  return load(at + j * kLanes);
}
template <int N>
inline Lanes load(const float* at, int j, long last) {
  return j == N - 1 ? load(at + j * kLanes, last) : load(at + j * kLanes);
}
template <int N>
inline void store(float* at, int j, Lanes x, Whole) {
  store(at + j * kLanes, x);
}
template <int N>
inline void store(float* at, int j, Lanes x, long last) {
  if (j == N - 1) store(at + j * kLanes, x, last);
  else store(at + j * kLanes, x);
}

inline float squares(const float* x, long width) {
  Lanes sum = zeros();
  by_lanes(width, [&](long i, long part) { sum = fma(load(x + i, part), load(x + i, part), sum); });
  return total(sum);
}

inline void scale_to(const float* x, float factor, float* out, long width) {
  by_lanes(width, [&](long i, long part) { store(out + i, load(x + i, part) * splat(factor), part); });
}

// Mixes the inputs of a token with those of its last ancestors, and splits them into a query, a key and a value per head.
void delta_token(const DeltaCall& c, long b, long t, const float* taps, float* memory) {
  const long keys = c.key_heads * c.key_width, values = c.value_heads * c.value_width, channels = 2 * keys + values;
  const long window = c.past + c.tokens, place = b * c.tokens + t, own = channels + values;
  const bool* mask = c.mask + place * window;
  const float* rows[kMostTaps];
  long found = 0;
  rows[c.taps - 1 - found++] = c.projected + place * own;
  for (long w = c.past + t - 1; w >= 0 && found < c.taps; w--)
    if (mask[w])
      rows[c.taps - 1 - found++] = w < c.past ? c.past_inputs + (b * c.past + w) * channels
                                              : c.projected + (b * c.tokens + w - c.past) * own;
  for (long back = 0; found < c.taps; back++)
    rows[c.taps - 1 - found++] = c.length[b] ? c.inputs + ((b + 1) * (c.taps - 1) - 1 - back) * channels : nullptr;
  by_lanes(channels, [&](long i, long part) {
    Lanes sum = zeros();
    for (long tap = 0; tap < c.taps; tap++)
      if (rows[tap]) sum = fma(load(taps + tap * channels + i, part), load(rows[tap] + i, part), sum);
    store(memory + i, times_logistic(sum, sum), part);
  });
  for (long h = 0; h < c.key_heads; h++)
    for (long which = 0; which < 2; which++) {
      const float* from = memory + which * keys + h * c.key_width;
      float* to = (which ? c.keys : c.queries) + ((b * c.key_heads + h) * c.tokens + t) * c.key_width;
      const float length = std::sqrt(squares(from, c.key_width) + c.unit_epsilon);
      scale_to(from, (which ? 1.0f : 1.0f / std::sqrt((float)c.key_width)) / length, to, c.key_width);
    }
  for (long h = 0; h < c.value_heads; h++) {
    const float* from = memory + 2 * keys + h * c.value_width;
    std::copy(from, from + c.value_width, c.values + ((b * c.value_heads + h) * c.tokens + t) * c.value_width);
    const float* rates = c.rates + place * 2 * c.value_heads;
    const float x = rates[c.value_heads + h] + c.decay_bias[h];
    c.decays[(b * c.value_heads + h) * c.tokens + t] =
        -std::exp(c.decay[h]) * (std::max(x, 0.0f) + std::log1p(std::exp(-std::fabs(x))));
  }
}

// Columns of a state, whose rows are `stride` apart.
template <class T>
struct Columns {
  T* at;
  long stride;
};

// Adds an entry to some columns of a state: to = fading * from + key * delta. `from` and `to` may be the same.
inline void delta_add(Columns<const float> from, Columns<float> to, float fading, const float* key, const float* delta,
                      long rows, long width) {
  by_columns(width, [&](long first, auto number, auto last) {
    constexpr int N = number.value;
    Lanes change[N];
    for (int j = 0; j < N; j++) change[j] = load<N>(delta + first, j, last);
    const Lanes fade = splat(fading);
    for (long row = 0; row < rows; row++) {
      const float* old = from.at + row * from.stride + first;
      float* changed = to.at + row * to.stride + first;
      const Lanes k = splat(key[row]);
      for (int j = 0; j < N; j++) store<N>(changed, j, fma(k, change[j], load<N>(old, j, last) * fade), last);
    }
  });
}

// Computes what a key and a query read of some columns of a state.
inline void delta_read(Columns<const float> state, const float* key, const float* query, float* of_key, float* of_query,
                       long rows, long width) {
  by_columns(width, [&](long first, auto number, auto last) {
    constexpr int N = number.value;
    Lanes a[N], b[N];
    for (int j = 0; j < N; j++) a[j] = b[j] = zeros();
    for (long row = 0; row < rows; row++) {
      const Lanes k = splat(key[row]), q = splat(query[row]);
      for (int j = 0; j < N; j++) {
        const Lanes s = load<N>(state.at + row * state.stride + first, j, last);
        a[j] = fma(s, k, a[j]);
        b[j] = fma(s, q, b[j]);
      }
    }
    for (int j = 0; j < N; j++) {
      store<N>(of_key + first, j, a[j], last);
      store<N>(of_query + first, j, b[j], last);
    }
  });
}

// One head of one row, in the memory of one thread. There are no standard containers; see `Scratch`.
//
// The columns of a state do not depend on each other. A tree is therefore run once for every few columns, whose states
// stay in the first-level cache. A single token reads its state once, and takes all columns together.
struct DeltaHead {
  const DeltaCall& c;
  const long b, h, at, key_head, columns, size;
  long *parent, *first_child, *last_child, *next, *level;  // of each token of the window; -1 for none
  float *of_key, *of_query, *fading, *near, *states;       // `states` has columns of a state for each level of branches
  long first, count;                                       // the columns at work

  // Finds the tree of a window's new tokens, and the level of each token: the number of branches above it.
  DeltaHead(const DeltaCall& c, long b, long h)
      : c(c), b(b), h(h), at(b * c.value_heads + h),
        key_head(b * c.key_heads + (c.tiled ? h % c.key_heads : h / (c.value_heads / c.key_heads))),
        columns(c.tokens > 1 ? std::min(c.value_width, kTreeColumns) : c.value_width),
        size((c.key_width * columns + kLanes - 1) / kLanes * kLanes) {
    thread_local Scratch indices, memory;
    parent = (long*)indices.grow(5 * c.tokens * (long)(sizeof(long) / sizeof(float)));
    first_child = parent + c.tokens, last_child = first_child + c.tokens, next = last_child + c.tokens, level = next + c.tokens;
    std::fill(parent, level, -1L);
    for (long t = 0; t < c.tokens; t++) {
      const bool* mask = c.mask + (b * c.tokens + t) * (c.past + c.tokens) + c.past;
      for (long w = t - 1; w >= 0 && parent[t] < 0; w--)
        if (mask[w]) parent[t] = w;
      const long above = parent[t];
      if (above < 0) continue;
      if (last_child[above] < 0) first_child[above] = t;
      else next[last_child[above]] = t;
      last_child[above] = t;
    }
    long most = 1;
    for (long t = 0; t < c.tokens; t++) {
      level[t] = parent[t] < 0 ? 1 : level[parent[t]] + (t != last_child[parent[t]]);
      most = std::max(most, level[t]);
    }
    const long width = (columns + kLanes - 1) / kLanes * kLanes, numbers = (c.tokens + kLanes - 1) / kLanes * kLanes;
    of_key = memory.grow(2 * width + 2 * numbers + (most + 2) * size);
    of_query = of_key + width, fading = of_query + width, near = fading + numbers, states = near + numbers;
  }

  void run() {
    for (long t = 0; t < c.tokens; t++) {
      fading[t] = std::exp(c.decays[at * c.tokens + t]);
      Lanes both = zeros();
      by_lanes(c.key_width, [&](long i, long part) { both = fma(load(query(t) + i, part), load(key(t) + i, part), both); });
      near[t] = total(both);
    }
    for (first = 0; first < c.value_width; first += columns) {
      count = std::min(columns, c.value_width - first);
      run_columns();
    }
    for (long t = 0; t < c.tokens; t++) finish(t);
  }

  void run_columns() {
    float* blank = states;  // level 0 is the text of an empty row, and then the text with a token's path in `past`
    if (!c.length[b]) std::fill(blank, blank + size, 0.0f);
    for (long t = 0; t < c.tokens; t++) {
      if (parent[t] >= 0) continue;
      Columns<const float> state = {blank, count};
      if (c.length[b]) state = {c.state + at * c.key_width * c.value_width + first, c.value_width};
      float* own = nullptr;
      const bool* mask = c.mask + (b * c.tokens + t) * (c.past + c.tokens);
      for (long w = 0; w < c.past; w++)
        if (mask[w]) {
          own = states + size;
          delta_add(state, {own, count}, std::exp(c.past_decays[at * c.past + w]),
                    c.past_keys + (key_head * c.past + w) * c.key_width,
                    c.past_deltas + (at * c.past + w) * c.value_width + first, c.key_width, count);
          state = {own, count};
        }
      visit(t, state, own);
    }
  }

  // Computes a token and its descendants, given the state before it. `own` is the same state if it may be overwritten.
  void visit(long t, Columns<const float> state, float* own) {
    for (;;) {
      step(t, state);
      if (first_child[t] < 0) return;
      float* after = own ? own : states + level[t] * size;
      delta_add(state, {after, count}, fading[t], key(t), delta(t) + first, c.key_width, count);
      for (long child = first_child[t]; child != last_child[t]; child = next[child]) visit(child, {after, count}, nullptr);
      t = last_child[t];
      own = after;
      state = {after, count};
    }
  }

  const float* query(long t) const { return c.queries + (key_head * c.tokens + t) * c.key_width; }
  const float* key(long t) const { return c.keys + (key_head * c.tokens + t) * c.key_width; }
  float* delta(long t) const { return c.deltas + (at * c.tokens + t) * c.value_width; }
  float* out(long t) const { return c.out + ((b * c.tokens + t) * c.value_heads + h) * c.value_width; }

  // Computes some columns of a token's delta, and of its output before the norm.
  void step(long t, Columns<const float> state) {
    delta_read(state, key(t), query(t), of_key, of_query, c.key_width, count);
    const Lanes near = splat(this->near[t]), fade = splat(fading[t]);
    const float x = c.rates[(b * c.tokens + t) * 2 * c.value_heads + h];
    const Lanes rate = times_logistic(splat(1.0f), splat(x));
    const float* value = c.values + (at * c.tokens + t) * c.value_width + first;
    by_lanes(count, [&](long i, long part) {
      const Lanes change = rate * (load(value + i, part) - fade * load(of_key + i, part));
      store(delta(t) + first + i, change, part);
      store(out(t) + first + i, fma(near, change, fade * load(of_query + i, part)), part);
    });
  }

  // Norms a token's output and multiplies it by its gate.
  void finish(long t) {
    const long width = c.value_width, values = c.value_heads * width, channels = 2 * c.key_heads * c.key_width + values;
    const Lanes factor = splat(1.0f / std::sqrt(squares(out(t), width) / (float)width + c.epsilon));
    const float* gate = c.projected + (b * c.tokens + t) * (channels + values) + channels + h * width;
    by_lanes(width, [&](long i, long part) {
      const Lanes z = load(gate + i, part);
      const Lanes normed = load(out(t) + i, part) * factor * load(c.gate_norm + i, part);
      store(out(t) + i, normed * times_logistic(z, z), part);
    });
  }
};

void delta_head(const DeltaCall& c, long b, long h) { DeltaHead(c, b, h).run(); }

// Adds the first `count` nodes of a path to the state of one head of one row. Values that are not finite count as zeros.
void delta_commit(const DeltaCommit& c, long b, long h) {
  const long at = b * c.value_heads + h, size = c.key_width * c.value_width;
  const long key_head = b * c.key_heads + (c.tiled ? h % c.key_heads : h / (c.value_heads / c.key_heads));
  const float* from = c.state + at * size;
  float* to = c.new_state + at * size;
  if (!c.length[b]) {
    std::fill(to, to + size, 0.0f);
    from = to;
  }
  thread_local Scratch memory;
  float *key = memory.grow(c.key_width + c.value_width), *delta = key + c.key_width;
  const auto finite = [](float x) { return std::isfinite(x) ? x : 0.0f; };
  for (long m = 0; m < c.count[b]; m++) {
    const long node = c.nodes ? std::max(c.nodes[b * c.size + m], 0) : m;
    const float *k = c.keys + (key_head * c.tokens + node) * c.key_width, *d = c.deltas + (at * c.tokens + node) * c.value_width;
    for (long i = 0; i < c.key_width; i++) key[i] = finite(k[i]);
    for (long i = 0; i < c.value_width; i++) delta[i] = finite(d[i]);
    delta_add({from, c.value_width}, {to, c.value_width}, std::exp(finite(c.decays[at * c.tokens + node])), key, delta,
              c.key_width, c.value_width);
    from = to;
  }
  if (from != to) std::copy(from, from + size, to);
}

}  // namespace

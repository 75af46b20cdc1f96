// Functions of one row: RMSNorm (which sums by lanes = column mod 16 for any number of rows), gates, and heads.

#pragma once

#include <algorithm>
#include <cmath>

#include "lanes.h"
#include "table.h"

namespace {

void rms_norm(const float* x, const float* scale, float* out, long rows, long width, float epsilon) {
  const long whole = width / kLanes * kLanes, rest = width - whole;
  for (long row = 0; row < rows; row++, x += width, out += width) {
    Lanes sum = zeros();
    for (long i = 0; i < whole; i += kLanes) sum = fma(load(x + i), load(x + i), sum);
    if (rest) sum = fma(load(x + whole, rest), load(x + whole, rest), sum);
    const Lanes factor = splat(1.0f / std::sqrt(total(sum) / (float)width + epsilon));
    for (long i = 0; i < whole; i += kLanes) store(out + i, load(x + i) * factor * load(scale + i));
    if (rest) store(out + whole, load(x + whole, rest) * factor * load(scale + whole, rest), rest);
  }
}

// x times the logistic function of y.
inline Lanes times_logistic(Lanes x, Lanes y) {
  const Lanes one = splat(1.0f), small = exponential(zeros() - magnitude(y));
  return x * (small + unless_below(one - small, y, zeros())) / (one + small);
}

void prepare(Preparation kind, const float* x, const float* scale, float epsilon, float* out, long width) {
  if (kind == Preparation::kNorm) return rms_norm(x, scale, out, 1, width, epsilon);
  for (long i = 0; i < width; i += kLanes) {
    const long part = std::min(kLanes, width - i);
    const Lanes gate = load(x + i, part), up = load(x + width + i, part);
    // The tanh form of GELU; 1 + tanh(y / 2) is twice the logistic function of y.
    const Lanes cubic = gate * fma(gate * gate, splat(0.0713548163f), splat(1.5957691216f));
    store(out + i, times_logistic(gate, kind == Preparation::kGelu ? cubic : gate) * up, part);
  }
}

// Rotates one head of `width` values by `half` cosines and sines; values from 2 * half on are unchanged.
void rotate(const float* x, const float* cosines, const float* sines, float* out, long half, long width) {
  const auto turn = [&](long i, auto... part) {
    const Lanes low = load(x + i, part...), high = load(x + half + i, part...);
    const Lanes cosine = load(cosines + i, part...), sine = load(sines + i, part...);
    store(out + i, fma(low, cosine, zeros() - high * sine), part...);
    store(out + half + i, fma(high, cosine, low * sine), part...);
  };
  long i = 0;
  for (; i + kLanes <= half; i += kLanes) turn(i);
  if (i < half) turn(i, half - i);
  if (2 * half < width) std::copy(x + 2 * half, x + width, out + 2 * half);
}

void head(const Head& how, const float* x, const float* scale, const float* cosines, const float* sines, void* out) {
  if (scale) rms_norm(x, scale, how.memory, 1, how.width, how.epsilon);
  float* to = how.half_precision ? how.memory + how.width : (float*)out;
  rotate(scale ? how.memory : x, cosines, sines, to, how.half, how.width);
  if (!how.half_precision) return;
  long i = 0;
  for (; i + kLanes <= how.width; i += kLanes) store_bfloat16((uint16_t*)out + i, load(to + i));
  if (i == how.width) return;
  uint16_t last[kLanes];
  store_bfloat16(last, load(to + i, how.width - i));
  std::copy(last, last + how.width - i, (uint16_t*)out + i);
}

}  // namespace

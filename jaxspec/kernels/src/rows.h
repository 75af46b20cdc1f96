// Functions of one row: RMSNorm, which sums by lanes = column mod 16 whatever the number of rows, and rotation of heads.

#pragma once

#include <algorithm>
#include <cmath>

#include "lanes.h"

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

// Rotates one head of `width` values by `half` cosines and sines; values from 2 * half on stay as they are.
void rotate(const float* x, const float* cosines, const float* sines, float* out, long half, long width) {
  for (long i = 0; i < half; i += kLanes) {
    const long part = std::min(kLanes, half - i);
    const Lanes low = load(x + i, part), high = load(x + half + i, part);
    const Lanes cosine = load(cosines + i, part), sine = load(sines + i, part);
    store(out + i, fma(low, cosine, zeros() - high * sine), part);
    store(out + half + i, fma(high, cosine, low * sine), part);
  }
  std::copy(x + 2 * half, x + width, out + 2 * half);
}

}  // namespace

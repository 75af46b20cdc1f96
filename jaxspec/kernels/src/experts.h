// A mixture of experts: the experts of a row, and the sum of their outputs. See jaxspec/models/experts.py.
//
// Both functions read one row alone, so that its bits do not depend on the other rows.

#pragma once

#include <algorithm>
#include <cmath>

#include "lanes.h"
#include "table.h"

namespace {

// Finds the `each` experts with the highest logits, the first ones among equals, and their weights. They are in ascending order.
// In a row with a logit that is not a number or infinite, the weights are NaN.
void route(const float* logits, long count, long each, bool normalise, int* chosen, float* weights) {
  bool finite = true;
  for (long i = 0; i < count; i++) finite = finite && std::isfinite(logits[i]);
  if (!finite) {
    for (long j = 0; j < each; j++) chosen[j] = (int)j, weights[j] = NAN;
    return;
  }
  long last = -1;
  float highest = 0;
  for (long j = 0; j < each; j++) {
    long best = -1;
    for (long i = 0; i < count; i++) {
      const bool later = last < 0 || logits[i] < logits[last] || (logits[i] == logits[last] && i > last);
      if (later && (best < 0 || logits[i] > logits[best])) best = i;
    }
    last = best;
    if (!j) highest = logits[best];
    long at = j;
    for (; at && chosen[at - 1] > best; at--) chosen[at] = chosen[at - 1];
    chosen[at] = (int)best;
  }
  float sum = 0;
  for (long j = 0; j < each; j++) weights[j] = std::exp(logits[chosen[j]] - highest);
  if (normalise)
    for (long j = 0; j < each; j++) sum += weights[j];
  else
    for (long i = 0; i < count; i++) sum += std::exp(logits[i] - highest);
  for (long j = 0; j < each; j++) weights[j] /= sum;
}

// Adds up the rows of `width` values at these indices, times their weights, in order.
void add_experts(const float* rows, const int* indices, const float* weights, long each, float* out, long width) {
  for (long i = 0; i < width; i += kLanes) {
    const long part = std::min(kLanes, width - i);
    Lanes sum = load(rows + indices[0] * width + i, part) * splat(weights[0]);
    for (long j = 1; j < each; j++) sum = fma(load(rows + indices[j] * width + i, part), splat(weights[j]), sum);
    store(out + i, sum, part);
  }
}

}  // namespace

// The kernels of one kind of processor, as functions.

#pragma once

#include <cstdint>

// Values of a row that share a scale when they are rounded to int8, a multiple of four.
constexpr long kInt8Block = 32;

enum class Type { kFloat32, kBFloat16, kInt8 };

struct Product {
  const void* weights;   // packed
  const float* scale;    // of the outputs of int8 weights
  float* out;            // [rows, outputs]
  long rows, outputs, width;  // `width` is a multiple of the type's group
  const void* values;    // the rows, rounded
  const float* scales;  // of the blocks of int8 values
  const int* sums;
};

struct AttentionCall;

struct Kernels {
  const char* name;
  bool (*supported)();
  void (*round)(Type, const float* x, long width, long padded, void* out, float* scale, int* sum);
  void (*multiply)(Type, const Product&, long from, long to);
  void (*attend)(const AttentionCall&, long b, long h, long start, long number);
  void (*rms_norm)(const float* x, const float* scale, float* out, long rows, long width, float epsilon);
  void (*rotate)(const float* x, const float* cosines, const float* sines, float* out, long half, long width);
};

struct AttentionCall {
  bool half;  // bfloat16
  float scale;  // of the scores
  long batch, heads, groups, tokens, width, value_width, slots, window;
  const void *queries, *keys, *values, *new_keys, *new_values;
  const int *length, *first_seen;  // first_seen may be null
  const bool* mask;                // [B, T, W]
  float* out;                      // [B, H, G, T, value_width]
};

constexpr long kQueriesPerCall = 12;

extern const Kernels kAvx512Bf16, kAvx512, kAvx2;

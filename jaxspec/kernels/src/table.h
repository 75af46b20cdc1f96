// The kernels of one kind of processor, as functions.

#pragma once

#include <cstdint>

// The order is that of `TYPES` in jaxspec/kernels/calls.py. For int8 and all later types, rows are rounded to int8 in blocks
// of 32 values.
enum class Type { kFloat32, kBFloat16, kInt8, kQ8_0, kQ4_0, kQ4_1, kQ5_0, kQ5_1, kQ4_K, kQ5_K, kQ6_K, kCount };

// A block of values that are rounded to int8.
struct Rounded {
  float scale, shift;                 // a value is scale times an integer; `shift` is scale times the sum of the integers
  int less, less_first, less_second;  // minus the sum of all integers, of the first half, and of the second half
  int less_of(int start, int part) const { return part == 32 ? less : start ? less_second : less_first; }
};

// The operation that a product applies to its rows first: RMSNorm, or a gate (the activation of the first half of a row times
// the second half). The order is that of `PREPARATIONS` in jaxspec/kernels/calls.py.
enum class Preparation { kNothing, kNorm, kSilu, kGelu, kCount };

struct Product {
  const void* weights;   // packed
  const float* scale;    // scales of the outputs of int8 weights
  float* out;            // [rows, outputs]
  long rows, outputs, width;  // `width` has the same padding as the weights
  const void* values;      // the rows, rounded
  const Rounded* rounded;  // their blocks, if they are int8
  const float* bias;       // [outputs] to add, or null
  const float* residual;   // [rows, outputs] to add, or null
};

// How queries, keys or values are written: with RMSNorm if there is a scale, with `half` pairs of values rotated, and as
// bfloat16 if `half_precision`.
struct Head {
  long width, half;
  float epsilon;
  bool half_precision;
  float* memory;  // for twice the width
};

struct AttentionCall;
struct DeltaCall;
struct DeltaCommit;

struct Kernels {
  const char* name;
  bool (*supported)();
  long (*stride)(Type, long width);  // bytes of the weights of sixteen outputs
  long (*bytes)(Type);                // of a value of a rounded row
  void (*prepare)(Preparation, const float* x, const float* scale, float epsilon, float* out, long width);
  void (*round)(Type, const float* x, long width, long padded, void* out, Rounded* blocks);
  void (*multiply)(Type, const Product&, long from, long to);
  void (*attend)(const AttentionCall&, long b, long h, long start, long number);
  void (*rms_norm)(const float* x, const float* scale, float* out, long rows, long width, float epsilon);
  void (*head)(const Head&, const float* x, const float* scale, const float* cosines, const float* sines, void* out);
  void (*delta_token)(const DeltaCall&, long b, long t, const float* taps, float* memory);
  void (*delta_head)(const DeltaCall&, long b, long h);
  void (*delta_commit)(const DeltaCommit&, long b, long h);
  void (*route)(const float* logits, long count, long each, bool normalise, int* chosen, float* weights);
  void (*add_experts)(const float* rows, const int* indices, const float* weights, long each, float* out, long width);
};

struct AttentionCall {
  bool half;  // bfloat16
  float scale;  // of the scores
  long batch, heads, groups, tokens, width, value_width, slots, window;
  const void *queries, *keys, *values, *new_keys, *new_values;
  const int *length, *first_seen;  // first_seen may be null
  const bool* mask;                // [B, T, W]
  float* out;                      // [B, T, H, G, value_width]
};

constexpr long kQueriesPerCall = 12;  // at most 16

constexpr long kMostTaps = 16;

// A window of T tokens in a layer with Gated DeltaNet. C is 2 Hk Kk + Hv Kv.
struct DeltaCall {
  bool tiled;
  float epsilon, unit_epsilon;
  long batch, tokens, past, key_heads, value_heads, key_width, value_width, taps;
  const float *projected, *rates;                            // [B, T, C + Hv Kv], [B, T, 2 Hv]
  const float *decay, *decay_bias, *gate_norm;               // [Hv], [Hv], [Kv]
  const bool* mask;                                          // [B, T, P + T]
  const int* length;                                         // [B]
  const float *inputs, *state;                               // [B, taps - 1, C], [B, Hv, Kk, Kv]
  const float *past_inputs, *past_keys, *past_deltas, *past_decays;  // [B, P, C], [B, Hk, P, Kk], [B, Hv, P, Kv], [B, Hv, P]
  float *queries, *values;                                   // [B, Hk, T, Kk], [B, Hv, T, Kv]: memory
  float *out, *keys, *deltas, *decays;                       // [B, T, Hv Kv], [B, Hk, T, Kk], [B, Hv, T, Kv], [B, Hv, T]
};

// A commit of `count` of M nodes of a window of T tokens.
struct DeltaCommit {
  bool tiled;
  long batch, tokens, size, key_heads, value_heads, key_width, value_width;
  const int *nodes, *count, *length;          // [B, M] or null, [B], [B]
  const float *state, *keys, *deltas, *decays;
  float* new_state;                           // may be `state`
};

extern const Kernels kAvx512Bf16, kAvx512, kAvx2;

// GCC from version 11 on has <amxbf16intrin.h>, and Clang <amxintrin.h>. The permission to use AMX is Linux's.
#if defined(__x86_64__) && defined(__linux__) && (__has_include(<amxbf16intrin.h>) || __has_include(<amxintrin.h>))
#define HAS_AMX
extern const Kernels kAmx;
#endif

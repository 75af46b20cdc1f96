// Sixteen lanes of float32 on the processor that the including file is compiled for.
//
// The order of every sum over lanes depends only on the indices of the summands, so that the bits of a row depend neither on
// the other rows nor on the number of threads.

#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace {

constexpr long kLanes = 16;

inline int four_bytes(const void* at) {
  int word;
  std::memcpy(&word, at, 4);
  return word;
}

// Rounds to the nearest integer, ties to even.
inline uint16_t to_bfloat16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (x != x) return (uint16_t)(bits >> 16 | 0x40);
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

#if defined(AVX512)

struct Lanes {
  __m512 v;
};
inline Lanes both(__m256 a, __m256 b) { return {_mm512_insertf32x8(_mm512_castps256_ps512(a), b, 1)}; }
inline __m256 first_half(Lanes x) { return _mm512_castps512_ps256(x.v); }
inline __m256 second_half(Lanes x) { return _mm512_extractf32x8_ps(x.v, 1); }
inline Lanes zeros() { return {_mm512_setzero_ps()}; }
inline Lanes splat(float x) { return {_mm512_set1_ps(x)}; }
inline Lanes load(const float* at) { return {_mm512_loadu_ps(at)}; }
inline Lanes load(const float* at, long count) { return {_mm512_maskz_loadu_ps((__mmask16)((1u << count) - 1), at)}; }
inline void store(float* at, Lanes x) { _mm512_storeu_ps(at, x.v); }
inline void store(float* at, Lanes x, long count) { _mm512_mask_storeu_ps(at, (__mmask16)((1u << count) - 1), x.v); }
inline Lanes fma(Lanes a, Lanes b, Lanes c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Lanes operator+(Lanes a, Lanes b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Lanes operator-(Lanes a, Lanes b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Lanes operator*(Lanes a, Lanes b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Lanes operator/(Lanes a, Lanes b) { return {_mm512_div_ps(a.v, b.v)}; }
// Returns the second operand if one of them is NaN.
inline Lanes max(Lanes a, Lanes b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Lanes magnitude(Lanes a) { return {_mm512_abs_ps(a.v)}; }
inline Lanes rounded(Lanes a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
// a, or zero where b < c.
inline Lanes unless_below(Lanes a, Lanes b, Lanes c) {
  return {_mm512_mask_mov_ps(a.v, _mm512_cmp_ps_mask(b.v, c.v, _CMP_LT_OQ), _mm512_setzero_ps())};
}
// 2 to the power of a whole number from -126 to 127.
inline Lanes power_of_two(Lanes n) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127)), 23))};
}
inline Lanes from_bfloat16(const uint16_t* at) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)at)), 16))};
}
// Returns the first elements, or the second elements, of sixteen pairs of bfloat16.
inline Lanes even_bfloat16(const void* at) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(at), 16))}; }
inline Lanes odd_bfloat16(const void* at) {
  return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(at), _mm512_set1_epi32((int)0xffff0000)))};
}
inline Lanes from_float16(const void* at) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)at))}; }
inline Lanes from_whole(const uint8_t* at) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)at)))};
}
inline Lanes from_whole(const int8_t* at) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)at)))};
}
// Stores the first `count` lanes, which are integers from -127 to 127.
inline void store_int8(int8_t* at, Lanes x, long count) {
  _mm_mask_storeu_epi8(at, (__mmask16)((1u << count) - 1), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x.v)));
}
inline void store_bfloat16(uint16_t* at, Lanes x) {
  const __m512i bits = _mm512_castps_si512(x.v), high = _mm512_srli_epi32(bits, 16), one = _mm512_set1_epi32(1);
  const __m512i half = _mm512_add_epi32(_mm512_set1_epi32(0x7fff), _mm512_and_si512(high, one));
  const __m512i near = _mm512_srli_epi32(_mm512_add_epi32(bits, half), 16);
  const __m512i nan = _mm512_or_si512(high, _mm512_set1_epi32(0x40));
  const __m512i out = _mm512_mask_mov_epi32(near, _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q), nan);
  _mm256_storeu_si256((__m256i*)at, _mm512_cvtepi32_epi16(out));
}
inline void transpose(Lanes (&rows)[16]) {
  __m512 t[16], u[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_ps(rows[i].v, rows[i + 1].v);
    t[i + 1] = _mm512_unpackhi_ps(rows[i].v, rows[i + 1].v);
  }
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; j++) {
      __m512d a = _mm512_castps_pd(t[i + j]), b = _mm512_castps_pd(t[i + j + 2]);
      u[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
      u[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
    }
  for (int i = 0; i < 4; i++) {
    __m512 a = _mm512_shuffle_f32x4(u[i], u[i + 4], 0x88), b = _mm512_shuffle_f32x4(u[i], u[i + 4], 0xdd);
    __m512 c = _mm512_shuffle_f32x4(u[i + 8], u[i + 12], 0x88), d = _mm512_shuffle_f32x4(u[i + 8], u[i + 12], 0xdd);
    rows[i].v = _mm512_shuffle_f32x4(a, c, 0x88);
    rows[i + 8].v = _mm512_shuffle_f32x4(a, c, 0xdd);
    rows[i + 4].v = _mm512_shuffle_f32x4(b, d, 0x88);
    rows[i + 12].v = _mm512_shuffle_f32x4(b, d, 0xdd);
  }
}

#else

struct Lanes {
  __m256 a, b;
};
inline Lanes both(__m256 a, __m256 b) { return {a, b}; }
inline __m256 first_half(Lanes x) { return x.a; }
inline __m256 second_half(Lanes x) { return x.b; }
inline Lanes zeros() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Lanes splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Lanes load(const float* at) { return {_mm256_loadu_ps(at), _mm256_loadu_ps(at + 8)}; }
inline Lanes load(const float* at, long count) {
  float copy[16] = {};
  for (long i = 0; i < count; i++) copy[i] = at[i];
  return load(copy);
}
inline void store(float* at, Lanes x) {
  _mm256_storeu_ps(at, x.a);
  _mm256_storeu_ps(at + 8, x.b);
}
inline void store(float* at, Lanes x, long count) {
  float copy[16];
  store(copy, x);
  for (long i = 0; i < count; i++) at[i] = copy[i];
}
inline Lanes fma(Lanes x, Lanes y, Lanes z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline Lanes operator+(Lanes x, Lanes y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline Lanes operator-(Lanes x, Lanes y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline Lanes operator*(Lanes x, Lanes y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline Lanes operator/(Lanes x, Lanes y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline Lanes max(Lanes x, Lanes y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline __m256 magnitude(__m256 x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }
inline Lanes magnitude(Lanes x) { return {magnitude(x.a), magnitude(x.b)}; }
inline Lanes rounded(Lanes x) {
  return {_mm256_round_ps(x.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
          _mm256_round_ps(x.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
inline __m256 unless_below(__m256 a, __m256 b, __m256 c) { return _mm256_andnot_ps(_mm256_cmp_ps(b, c, _CMP_LT_OQ), a); }
inline Lanes unless_below(Lanes x, Lanes y, Lanes z) { return {unless_below(x.a, y.a, z.a), unless_below(x.b, y.b, z.b)}; }
inline __m256 power_of_two(__m256 n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
inline Lanes power_of_two(Lanes n) { return {power_of_two(n.a), power_of_two(n.b)}; }
inline __m256 from_bfloat16(__m128i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16)); }
inline Lanes from_bfloat16(const uint16_t* at) {
  return {from_bfloat16(_mm_loadu_si128((const __m128i*)at)), from_bfloat16(_mm_loadu_si128((const __m128i*)at + 1))};
}
inline Lanes even_bfloat16(const void* at) {
  const auto* pairs = (const __m256i*)at;
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256(pairs), 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256(pairs + 1), 16))};
}
inline Lanes odd_bfloat16(const void* at) {
  const __m256i high = _mm256_set1_epi32((int)0xffff0000);
  const auto* pairs = (const __m256i*)at;
  return {_mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256(pairs), high)),
          _mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256(pairs + 1), high))};
}
// Every processor with AVX2 can convert float16.
inline Lanes from_float16(const void* at) {
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)at)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)at + 1))};
}
inline Lanes from_whole(const uint8_t* at) {
  const __m128i all = _mm_loadu_si128((const __m128i*)at);
  return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(all)), _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(all, 8)))};
}
inline Lanes from_whole(const int8_t* at) {
  const __m128i all = _mm_loadu_si128((const __m128i*)at);
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(all)), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(all, 8)))};
}
inline void store_int8(int8_t* at, Lanes x, long count) {
  const __m256i pairs = _mm256_packs_epi32(_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b));
  const __m256i whole = _mm256_permute4x64_epi64(pairs, 0xd8);  // packing works on 128-bit halves
  const __m128i out = _mm_packs_epi16(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
  if (count == kLanes) return _mm_storeu_si128((__m128i*)at, out);
  int8_t copy[kLanes];
  _mm_storeu_si128((__m128i*)copy, out);
  std::memcpy(at, copy, count);
}
// The bits of bfloat16, in int32.
inline __m256i to_bfloat16(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x), high = _mm256_srli_epi32(bits, 16), one = _mm256_set1_epi32(1);
  const __m256i half = _mm256_add_epi32(_mm256_set1_epi32(0x7fff), _mm256_and_si256(high, one));
  const __m256i near = _mm256_srli_epi32(_mm256_add_epi32(bits, half), 16);
  const __m256i nan = _mm256_or_si256(high, _mm256_set1_epi32(0x40));
  return _mm256_blendv_epi8(near, nan, _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
}
inline void store_bfloat16(uint16_t* at, Lanes x) {
  const __m256i out = _mm256_packus_epi32(to_bfloat16(x.a), to_bfloat16(x.b));
  _mm256_storeu_si256((__m256i*)at, _mm256_permute4x64_epi64(out, 0xd8));
}
inline void transpose(__m256 (&rows)[8]) {
  __m256 t[8], u[8];
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(rows[i], rows[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < 8; i += 4)
    for (int j = 0; j < 2; j++) {
      u[i + 2 * j] = _mm256_shuffle_ps(t[i + j], t[i + j + 2], 0x44);
      u[i + 2 * j + 1] = _mm256_shuffle_ps(t[i + j], t[i + j + 2], 0xee);
    }
  for (int i = 0; i < 4; i++) {
    rows[i] = _mm256_permute2f128_ps(u[i], u[i + 4], 0x20);
    rows[i + 4] = _mm256_permute2f128_ps(u[i], u[i + 4], 0x31);
  }
}
inline void transpose(Lanes (&rows)[16]) {
  __m256 quarters[4][8];  // of rows 0 to 7 and 8 to 15: first halves, then second halves
  for (int i = 0; i < 8; i++) {
    quarters[0][i] = rows[i].a, quarters[1][i] = rows[i + 8].a;
    quarters[2][i] = rows[i].b, quarters[3][i] = rows[i + 8].b;
  }
  for (auto& quarter : quarters) transpose(quarter);
  for (int i = 0; i < 8; i++) {
    rows[i] = {quarters[0][i], quarters[1][i]};
    rows[i + 8] = {quarters[2][i], quarters[3][i]};
  }
}

#endif

inline Lanes from_bfloat16(const uint16_t* at, long count) {
  uint16_t copy[16] = {};
  for (long i = 0; i < count; i++) copy[i] = at[i];
  return from_bfloat16(copy);
}

// Adds the lanes by repeated halving.
inline float total(Lanes x) {
  const __m256 eight = _mm256_add_ps(first_half(x), second_half(x));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

inline float highest(Lanes x) {
  const __m256 eight = _mm256_max_ps(first_half(x), second_half(x));
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

// The exponential of numbers up to 0, with a relative error of 2e-7. Below -87 it is 0; the exponential of NaN is NaN.
inline Lanes exponential(Lanes x) {
  const Lanes least = splat(-87.0f), bounded = max(least, x), n = rounded(bounded * splat(1.44269504f));
  Lanes r = fma(n, splat(-0.693359375f), bounded);
  r = fma(n, splat(2.12194440e-4f), r);
  Lanes y = splat(1.9875691500e-4f);
  for (float coefficient : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    y = fma(y, r, splat(coefficient));
  y = fma(y, r * r, r + splat(1.0f));
  return unless_below(y * power_of_two(n), x, least);
}

}  // namespace

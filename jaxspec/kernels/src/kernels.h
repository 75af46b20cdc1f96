// Included by a file for each kind of processor, which defines TABLE, NAME and SUPPORTED, and what the
// processor has: AVX512, AVX512_BF16, AVX512_VNNI. (Not all compilers define their own macros after a pragma.)

#include <algorithm>

#include "attention.h"
#include "products.h"
#include "rows.h"
#include "table.h"

namespace {

template <class Kind>
void round_one(const float* x, long width, long padded, void* out, float* scale, int* sum) {
  auto* values = (typename Kind::Value*)out;
  std::fill(values, values + padded, (typename Kind::Value)0);
  round_row(x, width, values, scale, sum);
}

// Float32 rows are read as they are.
void round(Type type, const float* x, long width, long padded, void* out, float* scale, int* sum) {
  if (type == Type::kBFloat16) return round_one<BFloat16>(x, width, padded, out, scale, sum);
  round_one<Int8>(x, width, padded, out, scale, sum);
}

template <class Kind>
void product(const Product& p, long from, long to) {
  const Rows<Kind> rows{(const typename Kind::Value*)p.values, p.scales, p.sums, p.width};
  multiply<Kind>((const char*)p.weights, rows, p.rows, p.scale, p.out, p.outputs, from, to);
}

void multiply(Type type, const Product& p, long from, long to) {
  if (type == Type::kFloat32) return product<Float32>(p, from, to);
  if (type == Type::kBFloat16) return product<BFloat16>(p, from, to);
  product<Int8>(p, from, to);
}

void attend(const AttentionCall& call, long b, long h, long start, long number) {
  if (call.half) return attend<uint16_t>(call, b, h, start, number);
  attend<float>(call, b, h, start, number);
}

bool supported() { return SUPPORTED; }

}  // namespace

extern const Kernels TABLE;
const Kernels TABLE = {NAME, supported, round, multiply, attend, rms_norm, rotate};

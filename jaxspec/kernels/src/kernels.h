// A file for each kind of processor includes this file. It defines TABLE, NAME and SUPPORTED, and the features of the
// processor: AVX512, AVX512_BF16, AVX512_VNNI, AMX. (Some compilers do not define their own macros after a pragma.)

#include <algorithm>
#include <type_traits>

#include "attention.h"
#include "delta.h"
#include "experts.h"
#include "products.h"
#include "rows.h"
#include "table.h"

namespace {

template <class Kind>
void round_one(const float* x, long width, long padded, void* out, Rounded* blocks) {
  auto* values = (typename Kind::Value*)out;
  std::fill(values, values + padded, (typename Kind::Value)0);
  round_row(x, width, values, blocks);
}

// Float32 rows are read without preparation.
void round(Type type, const float* x, long width, long padded, void* out, Rounded* blocks) {
  if (type == Type::kBFloat16) return round_one<BFloat16>(x, width, padded, out, blocks);
  round_one<Int8>(x, width, padded, out, blocks);
}

template <class Kind>
void product(const Product& p, long from, long to) {
#if defined(AMX)
  // The choice depends on the matrix alone, so that it is the same for any number of rows.
  if constexpr (std::is_same_v<Kind, BFloat16>)
    if (p.width % kTileInputs == 0) return product<TiledBFloat16>(p, from, to);
#endif
  const Rows<Kind> rows{(const typename Kind::Value*)p.values, p.rounded, p.width};
  multiply<Kind>((const char*)p.weights, rows, p.rows, p.scale, p.out, p.outputs, from, to);
  const long first = from * kLanes, end = std::min(p.outputs, to * kLanes);
  for (long row = 0; row < p.rows; row++) {
    float* out = p.out + row * p.outputs;
    for (long i = first; p.bias && i < end; i++) out[i] += p.bias[i];
    for (long i = first; p.residual && i < end; i++) out[i] += p.residual[row * p.outputs + i];
  }
}

struct Kind {
  long bytes;
  long (*stride)(long width);
  void (*product)(const Product&, long from, long to);
};

template <class One>
constexpr Kind kind() {
  return {sizeof(typename One::Value), One::stride, product<One>};
}

// In the order of `Type`.
constexpr Kind kKinds[] = {kind<Float32>(), kind<BFloat16>(), kind<Int8>(), kind<Q8_0>(), kind<Q4_0>(), kind<Q4_1>(),
                           kind<Q5_0>(),    kind<Q5_1>(),     kind<Q4_K>(), kind<Q5_K>(), kind<Q6_K>()};

long stride(Type type, long width) { return kKinds[(int)type].stride(width); }

long bytes(Type type) { return kKinds[(int)type].bytes; }

void multiply(Type type, const Product& p, long from, long to) { kKinds[(int)type].product(p, from, to); }

void attend(const AttentionCall& call, long b, long h, long start, long number) {
  if (call.half) return attend<uint16_t>(call, b, h, start, number);
  attend<float>(call, b, h, start, number);
}

bool supported() { return SUPPORTED; }

}  // namespace

extern const Kernels TABLE;
const Kernels TABLE = {NAME, supported, stride, bytes, prepare, round, multiply, attend, rms_norm, head,
                       delta_token, delta_head, delta_commit, route, add_experts};

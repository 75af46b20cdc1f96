// The kernels as XLA custom calls.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>

#include "table.h"
#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;

// Chooses the best kernels for this processor, or the kernels that JAXSPEC_KERNELS names.
const Kernels* choose() {
#if defined(__x86_64__)
  for (const Kernels* one : {
#if defined(HAS_AMX)
           &kAmx,
#endif
           &kAvx512Bf16, &kAvx512, &kAvx2}) {
    const char* wanted = std::getenv("JAXSPEC_KERNELS");
    const bool fits = !wanted || !*wanted || std::string(wanted) == "1" || std::string(wanted) == one->name;
    if (fits && one->supported()) return one;
  }
#endif
  return nullptr;
}

const Kernels* kernels() {
  static const Kernels* const found = choose();
  return found;
}

// Yields to the other hardware threads of a core in a waiting loop.
void rest() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Tasks that threads claim one after another. A thread that starts late does not find a task, so the caller never waits for a
// thread that has not started.
struct Tasks {
  std::function<void(long)> run;
  const long count;
  std::atomic<long> next{0}, done{0};
  Tasks(std::function<void(long)> run, long count) : run(std::move(run)), count(count) {}
  void work() {
    for (long task; (task = next.fetch_add(1)) < count; done.fetch_add(1, std::memory_order_release)) run(task);
  }
};

void in_parallel(ffi::ThreadPool& pool, long count, std::function<void(long)> run) {
  const long threads = std::min<long>(pool.num_threads(), count);
  if (threads <= 1) {
    for (long task = 0; task < count; task++) run(task);
    return;
  }
  auto tasks = std::make_shared<Tasks>(std::move(run), count);
  for (long thread = 1; thread < threads; thread++) pool.Schedule([tasks] { tasks->work(); });
  tasks->work();
  while (tasks->done.load(std::memory_order_acquire) < count) rest();
}

// Divides 0 to `count` into parts. A thread takes parts from the front of its own share, so that it reads memory in order,
// and then from the end of the shares of other threads. Parts become smaller towards the end, so that threads end together.
class Shares {
 public:
  Shares(long count, long threads) : threads_(threads), left_(new std::atomic<uint64_t>[threads]) {
    const long pairs = (count + 1) / 2;
    for (long thread = 0; thread < threads; thread++)
      left_[thread] = pack(std::min(count, pairs * thread / threads * 2), std::min(count, pairs * (thread + 1) / threads * 2));
  }
  bool take(long thread, long& from, long& to) {
    for (long other = 0; other < threads_; other++) {
      std::atomic<uint64_t>& left = left_[(thread + other) % threads_];
      for (uint64_t now = left.load();;) {
        const long first = (long)(now >> 32), end = (long)(now & 0xffffffff), size = std::max(2L, (end - first) / 8 * 2);
        if (first == end) break;
        from = other ? std::max(first, (end - size + 1) / 2 * 2) : first;
        to = other ? end : std::min(end, first + size);
        if (left.compare_exchange_weak(now, other ? pack(first, from) : pack(to, end))) return true;
      }
    }
    return false;
  }

 private:
  static uint64_t pack(long first, long end) { return (uint64_t)first << 32 | (uint64_t)end; }
  const long threads_;
  const std::unique_ptr<std::atomic<uint64_t>[]> left_;
};

constexpr long kLeast = 1L << 16;  // bytes of weights above which more than one thread is faster
constexpr long kLeastPlaces = 8;   // minimum number of tokens whose heads a thread computes

long up(long size, long unit) { return (size + unit - 1) / unit * unit; }

const float* given(const ffi::Buffer<ffi::F32>& values) { return values.element_count() ? values.typed_data() : nullptr; }

bool is_float(const ffi::AnyBuffer& values) {
  return values.element_type() == ffi::F32 || values.element_type() == ffi::U16;  // bits of bfloat16
}

ffi::Error multiply(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::AnyBuffer weights, ffi::Buffer<ffi::F32> scale,
                    ffi::Buffer<ffi::F32> norm, ffi::Buffer<ffi::F32> bias, ffi::Buffer<ffi::F32> residual,
                    ffi::ResultBuffer<ffi::F32> out, int64_t kind, int64_t preparation, float epsilon) {
  if (kind < 0 || kind >= (long)Type::kCount) return ffi::Error::InvalidArgument("there is no such type of weights");
  if (preparation < 0 || preparation >= (long)Preparation::kCount)
    return ffi::Error::InvalidArgument("there is no such preparation of rows");
  const Type type = (Type)kind;
  const Preparation before = (Preparation)preparation;
  const bool prepared = before != Preparation::kNothing;
  const long rows = x.dimensions()[0], given_width = x.dimensions()[1], outputs = out->dimensions()[1];
  const long width = prepared && before != Preparation::kNorm ? given_width / 2 : given_width;
  const bool integers = type >= Type::kInt8;
  const long bytes = kernels()->bytes(type);
  const long padded = up(width, integers ? 32 : type == Type::kBFloat16 ? 2 : 1), blocks = (outputs + 15) / 16;
  const long stride = kernels()->stride(type, padded);
  if ((long)weights.size_bytes() != blocks * stride)
    return ffi::Error::InvalidArgument("the weights do not have the size that packing gives them");
  if (type == Type::kInt8 && (long)scale.element_count() != outputs)
    return ffi::Error::InvalidArgument("int8 weights need a scale for each output");
  const float* first = x.typed_data();
  const long threads = blocks * stride < kLeast ? 1 : std::min<long>(pool.num_threads(), (blocks + 1) / 2);
  // Float32 rows can be read without preparation; other rows are prepared first, each by the first free thread.
  const bool rounded = type != Type::kFloat32, made = rounded || prepared;
  const long parts = integers ? padded / 32 : 0;
  const std::unique_ptr<char[]> values(new char[made ? rows * padded * bytes : 0]);
  const std::unique_ptr<Rounded[]> parts_of_rows(new Rounded[rows * parts]);
  const Product product{weights.untyped_data(), scale.typed_data(), out->typed_data(), rows, outputs, padded,
                        made ? (const void*)values.get() : first, parts_of_rows.get(), given(bias), given(residual)};
  std::atomic<long> next{0}, left{made ? rows : 0};
  Shares shares(blocks, threads);
  in_parallel(pool, threads, [&](long thread) {
    const std::unique_ptr<float[]> memory(new float[prepared && rounded ? width : 0]);
    for (long row; made && (row = next.fetch_add(1)) < rows; left.fetch_sub(1, std::memory_order_release)) {
      const float* from = first + row * given_width;
      char* to = values.get() + row * padded * bytes;
      float* between = rounded ? memory.get() : (float*)to;
      if (prepared) kernels()->prepare(before, from, norm.typed_data(), epsilon, between, width);
      if (rounded) kernels()->round(type, prepared ? between : from, width, padded, to, parts_of_rows.get() + row * parts);
    }
    while (left.load(std::memory_order_acquire)) rest();  // waits for threads that have started
    for (long from, to; shares.take(thread, from, to);) kernels()->multiply(type, product, from, to);
  });
  return ffi::Error::Success();
}

ffi::Error attend(ffi::ThreadPool pool, ffi::AnyBuffer queries, ffi::AnyBuffer keys, ffi::AnyBuffer values,
                  ffi::Buffer<ffi::S32> length, ffi::AnyBuffer new_keys, ffi::AnyBuffer new_values,
                  ffi::Buffer<ffi::PRED> mask, ffi::Buffer<ffi::S32> first_seen, ffi::ResultBuffer<ffi::F32> out,
                  int64_t layer, float scale) {
  const auto q = queries.dimensions(), k = keys.dimensions(), v = values.dimensions();
  if (!is_float(queries) || new_keys.element_type() != queries.element_type())
    return ffi::Error::InvalidArgument("queries and keys must both be float32, or bits of bfloat16");
  AttentionCall call;
  call.scale = scale;
  call.half = queries.element_type() == ffi::U16;
  call.batch = q[0], call.heads = q[1], call.groups = q[2], call.tokens = q[3], call.width = q[4];
  call.value_width = v[4], call.slots = k[3], call.window = new_keys.dimensions()[2];
  const long bytes = call.half ? 2 : 4, slots = layer * call.batch * call.heads * call.slots * bytes;
  call.queries = queries.untyped_data();
  call.keys = (const char*)keys.untyped_data() + slots * call.width;
  call.values = (const char*)values.untyped_data() + slots * call.value_width;
  call.new_keys = new_keys.untyped_data(), call.new_values = new_values.untyped_data();
  call.length = length.typed_data();
  call.first_seen = first_seen.element_count() ? first_seen.typed_data() : nullptr;
  call.mask = mask.typed_data();
  call.out = out->typed_data();
  const long each = call.groups * call.tokens, parts = (each + kQueriesPerCall - 1) / kQueriesPerCall,
             share = (each + parts - 1) / parts;
  in_parallel(pool, call.batch * call.heads * parts, [&](long task) {
    const long start = task % parts * share, head = task / parts;
    kernels()->attend(call, head / call.heads, head % call.heads, start, std::min(share, each - start));
  });
  return ffi::Error::Success();
}

ffi::Error rms_norm(ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32> scale, ffi::ResultBuffer<ffi::F32> out, float epsilon) {
  const long width = scale.element_count();
  kernels()->rms_norm(x.typed_data(), scale.typed_data(), out->typed_data(), x.element_count() / width, width, epsilon);
  return ffi::Error::Success();
}

// Splits the queries, keys and values of a token, [B, T, (H G + 2 H) K], into [B, H, G, T, K] and two arrays [B, H, T, K].
ffi::Error heads(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32> cosines, ffi::Buffer<ffi::F32> sines,
                 ffi::Buffer<ffi::F32> query_norm, ffi::Buffer<ffi::F32> key_norm, ffi::Result<ffi::AnyBuffer> queries,
                 ffi::Result<ffi::AnyBuffer> keys, ffi::Result<ffi::AnyBuffer> values, float epsilon) {
  if (!is_float(*queries)) return ffi::Error::InvalidArgument("heads must be float32, or bits of bfloat16");
  const auto dims = queries->dimensions();
  const long batch = dims[0], shared = dims[1], all = shared * dims[2], tokens = dims[3], width = dims[4];
  const long places = batch * tokens, half = places ? cosines.element_count() / places : 0;
  const bool half_precision = queries->element_type() == ffi::U16;
  const long bytes = width * (half_precision ? 2 : 4);
  const long tasks = std::min<long>(pool.num_threads(), up(places, kLeastPlaces) / kLeastPlaces);
  in_parallel(pool, tasks, [&](long task) {
    const std::unique_ptr<float[]> memory(new float[2 * width]);
    const Head turned{width, half, epsilon, half_precision, memory.get()}, kept{width, 0, epsilon, half_precision, memory.get()};
    for (long place = task * places / tasks; place < (task + 1) * places / tasks; place++) {
      const long row = place / tokens, token = place % tokens;
      const float* from = x.typed_data() + place * (all + 2 * shared) * width;
      const float *cosine = cosines.typed_data() + place * half, *sine = sines.typed_data() + place * half;
      const auto put = [&](ffi::Result<ffi::AnyBuffer>& out, long number, const Head& how, const float* scale) {
        for (long h = 0; h < number; h++, from += width)
          kernels()->head(how, from, scale, cosine, sine,
                          (char*)out->untyped_data() + ((row * number + h) * tokens + token) * bytes);
      };
      put(queries, all, turned, given(query_norm));
      put(keys, shared, turned, given(key_norm));
      put(values, shared, kept, nullptr);
    }
  });
  return ffi::Error::Success();
}

// Computes a layer with Gated DeltaNet for a window; the arrays are those of `DeltaCall`.
ffi::Error delta(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> projected, ffi::Buffer<ffi::F32> rates,
                 ffi::Buffer<ffi::F32> conv, ffi::Buffer<ffi::F32> decay, ffi::Buffer<ffi::F32> decay_bias,
                 ffi::Buffer<ffi::F32> gate_norm, ffi::Buffer<ffi::PRED> mask, ffi::Buffer<ffi::S32> length,
                 ffi::Buffer<ffi::F32> inputs, ffi::Buffer<ffi::F32> state, ffi::Buffer<ffi::F32> past_inputs,
                 ffi::Buffer<ffi::F32> past_keys, ffi::Buffer<ffi::F32> past_deltas, ffi::Buffer<ffi::F32> past_decays,
                 ffi::ResultBuffer<ffi::F32> out, ffi::ResultBuffer<ffi::F32> keys, ffi::ResultBuffer<ffi::F32> deltas,
                 ffi::ResultBuffer<ffi::F32> decays, float epsilon, float unit_epsilon, int64_t tiled) {
  const auto k = keys->dimensions(), s = state.dimensions();
  DeltaCall c;
  c.tiled = tiled, c.epsilon = epsilon, c.unit_epsilon = unit_epsilon;
  c.batch = k[0], c.key_heads = k[1], c.tokens = k[2], c.key_width = k[3], c.value_heads = s[1], c.value_width = s[3];
  c.past = mask.dimensions()[2] - c.tokens, c.taps = conv.dimensions()[2];
  if (c.taps > kMostTaps) return ffi::Error::InvalidArgument("the convolution has more than 16 taps");
  const long channels = conv.dimensions()[0], queries = c.batch * c.key_heads * c.tokens * c.key_width;
  const std::unique_ptr<float[]> memory(new float[queries + deltas->element_count()]), taps(new float[channels * c.taps]);
  for (long channel = 0; channel < channels; channel++)
    for (long tap = 0; tap < c.taps; tap++)
      taps[tap * channels + channel] = conv.typed_data()[channel * c.taps + tap];
  c.projected = projected.typed_data(), c.rates = rates.typed_data();
  c.decay = decay.typed_data(), c.decay_bias = decay_bias.typed_data(), c.gate_norm = gate_norm.typed_data();
  c.mask = mask.typed_data(), c.length = length.typed_data(), c.inputs = inputs.typed_data(), c.state = state.typed_data();
  c.past_inputs = past_inputs.typed_data(), c.past_keys = past_keys.typed_data();
  c.past_deltas = past_deltas.typed_data(), c.past_decays = past_decays.typed_data();
  c.queries = memory.get(), c.values = memory.get() + queries;
  c.out = out->typed_data(), c.keys = keys->typed_data(), c.deltas = deltas->typed_data(), c.decays = decays->typed_data();
  const long places = c.batch * c.tokens;
  const long tasks = std::min<long>(pool.num_threads(), up(places, kLeastPlaces) / kLeastPlaces);
  in_parallel(pool, tasks, [&](long task) {
    const std::unique_ptr<float[]> mixed(new float[channels]);
    for (long place = task * places / tasks; place < (task + 1) * places / tasks; place++)
      kernels()->delta_token(c, place / c.tokens, place % c.tokens, taps.get(), mixed.get());
  });
  in_parallel(pool, c.batch * c.value_heads,
              [&](long task) { kernels()->delta_head(c, task / c.value_heads, task % c.value_heads); });
  return ffi::Error::Success();
}

// Adds committed tokens to the states of a layer; the arrays are those of `DeltaCommit`.
ffi::Error delta_commit(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> state, ffi::Buffer<ffi::F32> keys,
                        ffi::Buffer<ffi::F32> deltas, ffi::Buffer<ffi::F32> decays, ffi::Buffer<ffi::S32> nodes,
                        ffi::Buffer<ffi::S32> count, ffi::Buffer<ffi::S32> length, ffi::ResultBuffer<ffi::F32> new_state,
                        int64_t tiled) {
  const auto k = keys.dimensions(), s = state.dimensions();
  DeltaCommit c;
  c.tiled = tiled, c.batch = k[0], c.key_heads = k[1], c.tokens = k[2], c.key_width = k[3];
  c.value_heads = s[1], c.value_width = s[3], c.size = nodes.dimensions()[1];
  c.nodes = c.size ? nodes.typed_data() : nullptr, c.count = count.typed_data(), c.length = length.typed_data();
  c.state = state.typed_data(), c.keys = keys.typed_data(), c.deltas = deltas.typed_data(), c.decays = decays.typed_data();
  c.new_state = new_state->typed_data();
  in_parallel(pool, c.batch * c.value_heads,
              [&](long task) { kernels()->delta_commit(c, task / c.value_heads, task % c.value_heads); });
  return ffi::Error::Success();
}

// The items of one part of a computation, which threads claim one after another. A thread leaves when all items are done.
struct Stage {
  std::atomic<long> next{0}, done{0};
  template <class F>
  void run(long count, F&& item) {
    for (long i; (i = next.fetch_add(1)) < count; done.fetch_add(1, std::memory_order_release)) item(i);
    wait(count);
  }
  // Threads that have not started have not claimed anything.
  void wait(long count) {
    while (done.load(std::memory_order_acquire) < count) rest();
  }
};

// The packed matrices of all experts, and the rows that they multiply: the rows of each expert are side by side.
struct ExpertMatrices {
  const Type type;
  const char* const weights;
  const float* const scale;
  const long outputs, width, padded, blocks, stride, parts;
  const std::unique_ptr<char[]> values;
  const std::unique_ptr<Rounded[]> rounded;

  ExpertMatrices(Type type, const ffi::AnyBuffer& weights, const ffi::Buffer<ffi::F32>& scale, long outputs, long width,
                 long rows)
      : type(type), weights((const char*)weights.untyped_data()), scale(given(scale)), outputs(outputs), width(width),
        padded(up(width, type >= Type::kInt8 ? 32 : type == Type::kBFloat16 ? 2 : 1)), blocks((outputs + 15) / 16),
        stride(kernels()->stride(type, padded)), parts(type >= Type::kInt8 ? padded / 32 : 0),
        values(new char[rows * row_bytes()]), rounded(new Rounded[rows * parts]) {}

  long row_bytes() const { return padded * kernels()->bytes(type); }
  bool fits(const ffi::AnyBuffer& given, const ffi::Buffer<ffi::F32>& factors, long experts) const {
    return (long)given.size_bytes() == experts * blocks * stride &&
           (type != Type::kInt8 || (long)factors.element_count() == experts * outputs);
  }
  // Writes a row, in the type that the matrices are multiplied with.
  void put(long slot, const float* x) const {
    char* to = values.get() + slot * row_bytes();
    if (type == Type::kFloat32) std::copy(x, x + width, (float*)to);
    else kernels()->round(type, x, width, padded, to, rounded.get() + slot * parts);
  }
  void copy(long from, long to) const {
    std::copy(values.get() + from * row_bytes(), values.get() + (from + 1) * row_bytes(), values.get() + to * row_bytes());
    std::copy(rounded.get() + from * parts, rounded.get() + (from + 1) * parts, rounded.get() + to * parts);
  }
  // Multiplies the rows of an expert, which begin at `slot`, with blocks of its matrix.
  void multiply(long expert, long slot, long rows, float* out, long from, long to) const {
    const Product product{weights + expert * blocks * stride, scale ? scale + expert * outputs : nullptr,
                          out + slot * outputs, rows, outputs, padded, values.get() + slot * row_bytes(),
                          rounded.get() + slot * parts, nullptr, nullptr};
    kernels()->multiply(type, product, from, to);
  }
};

// Computes a mixture of experts. The router's logits of N rows are [N, X]; the matrices of the experts are packed [2 I, E] and
// [E, I]. Each expert that any row has is read once, and multiplies the rows that have it.
ffi::Error experts(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32> logits, ffi::AnyBuffer gate_up,
                   ffi::Buffer<ffi::F32> gate_up_scale, ffi::AnyBuffer down, ffi::Buffer<ffi::F32> down_scale,
                   ffi::ResultBuffer<ffi::F32> out, int64_t gate_up_kind, int64_t down_kind, int64_t gate, int64_t each,
                   int64_t width, int64_t normalise) {
  const auto is_type = [](int64_t kind) { return kind >= 0 && kind < (long)Type::kCount; };
  if (!is_type(gate_up_kind) || !is_type(down_kind)) return ffi::Error::InvalidArgument("there is no such type of weights");
  const Preparation activation = (Preparation)gate;
  if (activation != Preparation::kSilu && activation != Preparation::kGelu)
    return ffi::Error::InvalidArgument("experts need a gate");
  const long rows = x.dimensions()[0], hidden = x.dimensions()[1], count = logits.dimensions()[1], slots = rows * each;
  if (each < 1 || each > count) return ffi::Error::InvalidArgument("a row has 1 to all of the experts");
  const ExpertMatrices first((Type)gate_up_kind, gate_up, gate_up_scale, 2 * width, hidden, slots);
  const ExpertMatrices second((Type)down_kind, down, down_scale, hidden, width, slots);
  if (!first.fits(gate_up, gate_up_scale, count) || !second.fits(down, down_scale, count))
    return ffi::Error::InvalidArgument("the weights do not have the size that packing gives them");
  const std::unique_ptr<float[]> weights(new float[slots]), both(new float[slots * 2 * width]), parts(new float[slots * hidden]);
  const std::unique_ptr<int[]> chosen(new int[slots]), places(new int[slots]);  // of each row: experts, and their slots
  const std::unique_ptr<long[]> starts(new long[count + 1]), used(new long[count]);
  std::unique_ptr<Shares> shares[2];
  long number = 0;  // of experts in use
  Stage route, group, round, gates, sums, products[2];
  const long threads = slots * first.blocks * first.stride < kLeast ? 1 : pool.num_threads();
  in_parallel(pool, threads, [&](long thread) {
    route.run(rows, [&](long row) {
      kernels()->route(logits.typed_data() + row * count, count, each, normalise, chosen.get() + row * each,
                       weights.get() + row * each);
    });
    group.run(1, [&](long) {
      std::fill(starts.get(), starts.get() + count + 1, 0L);
      for (long i = 0; i < slots; i++) starts[chosen[i] + 1]++;
      for (long expert = 0; expert < count; expert++) {
        if (starts[expert + 1]) used[number++] = expert;
        starts[expert + 1] += starts[expert];
      }
      const std::unique_ptr<long[]> next(new long[count]);
      std::copy(starts.get(), starts.get() + count, next.get());
      for (long i = 0; i < slots; i++) places[i] = (int)next[chosen[i]]++;
      shares[0].reset(new Shares(number * first.blocks, threads));
      shares[1].reset(new Shares(number * second.blocks, threads));
    });
    round.run(rows, [&](long row) {
      const int* to = places.get() + row * each;
      first.put(to[0], x.typed_data() + row * hidden);
      for (long j = 1; j < each; j++) first.copy(to[0], to[j]);
    });
    const auto multiply = [&](const ExpertMatrices& matrices, long which, float* to) {
      for (long from, end; shares[which]->take(thread, from, end); products[which].done.fetch_add(end - from))
        for (long at = from, last; at < end; at = last) {
          const long expert = used[at / matrices.blocks], start = at / matrices.blocks * matrices.blocks;
          last = std::min(end, start + matrices.blocks);
          const long slot = starts[expert], size = starts[expert + 1] - slot;
          matrices.multiply(expert, slot, size, to, at - start, last - start);
        }
      products[which].wait(number * matrices.blocks);
    };
    multiply(first, 0, both.get());
    const std::unique_ptr<float[]> memory(new float[width]);
    gates.run(slots, [&](long slot) {
      kernels()->prepare(activation, both.get() + slot * 2 * width, nullptr, 0, memory.get(), width);
      second.put(slot, memory.get());
    });
    multiply(second, 1, parts.get());
    sums.run(rows, [&](long row) {
      kernels()->add_experts(parts.get(), places.get() + row * each, weights.get() + row * each, each,
                             out->typed_data() + row * hidden, hidden);
    });
  });
  return ffi::Error::Success();
}

}  // namespace

extern "C" const char* jaxspec_processor() { return kernels() ? kernels()->name : nullptr; }

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxspec_multiply, multiply,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<int64_t>("kind")
                                  .Attr<int64_t>("preparation")
                                  .Attr<float>("epsilon"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxspec_attend, attend,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::PRED>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<int64_t>("layer")
                                  .Attr<float>("scale"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxspec_rms_norm, rms_norm,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<float>("epsilon"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxspec_heads, heads,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<float>("epsilon"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxspec_delta, delta,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::PRED>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<float>("epsilon")
                                  .Attr<float>("unit_epsilon")
                                  .Attr<int64_t>("tiled"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxspec_delta_commit, delta_commit,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<int64_t>("tiled"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxspec_experts, experts,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<int64_t>("gate_up_kind")
                                  .Attr<int64_t>("down_kind")
                                  .Attr<int64_t>("gate")
                                  .Attr<int64_t>("each")
                                  .Attr<int64_t>("width")
                                  .Attr<int64_t>("normalise"));

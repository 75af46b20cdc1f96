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

// The best kernels for this processor; JAXSPEC_KERNELS may name others.
const Kernels* choose() {
#if defined(__x86_64__)
  for (const Kernels* one : {&kAvx512Bf16, &kAvx512, &kAvx2}) {
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

// Lets the other threads of a core run, in a loop that waits.
void rest() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Tasks that threads claim one after another. A thread that comes late finds none left, so the caller never waits for a
// thread that has not begun.
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

// Parts of 0 to `count`, in pairs. A thread takes from the front of its own share, so that it reads memory in order, and
// then from the end of the shares of others. Parts become smaller as less is left, so that threads end together.
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

constexpr long kLeast = 1L << 16;  // bytes of weights from which threads pay

long up(long size, long unit) { return (size + unit - 1) / unit * unit; }

ffi::Error multiply(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::AnyBuffer weights, ffi::Buffer<ffi::F32> scale,
                    ffi::ResultBuffer<ffi::F32> out, int64_t kind) {
  const long rows = x.dimensions()[0], width = x.dimensions()[1], outputs = out->dimensions()[1];
  if (kind < 0 || kind >= (long)Type::kCount) return ffi::Error::InvalidArgument("there is no such type of weights");
  const Type type = (Type)kind;
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
  // Float32 rows are read as they are; others are rounded first, in as many groups as there are threads.
  const long groups = type == Type::kFloat32 ? 0 : std::min(rows, threads);
  const long parts = integers ? padded / 32 : 0;
  const std::unique_ptr<char[]> values(new char[groups ? rows * padded * bytes : 0]);
  const std::unique_ptr<Rounded[]> parts_of_rows(new Rounded[rows * parts]);
  const Product product{weights.untyped_data(), scale.typed_data(), out->typed_data(), rows, outputs, padded,
                        groups ? (const void*)values.get() : first, parts_of_rows.get()};
  std::atomic<long> next{0}, left{groups};
  Shares shares(blocks, threads);
  in_parallel(pool, threads, [&](long thread) {
    for (long group; (group = next.fetch_add(1)) < groups; left.fetch_sub(1, std::memory_order_release))
      for (long row = group * rows / groups; row < (group + 1) * rows / groups; row++)
        kernels()->round(type, first + row * width, width, padded, values.get() + row * padded * bytes,
                         parts_of_rows.get() + row * parts);
    while (left.load(std::memory_order_acquire)) rest();  // of threads that have begun
    for (long from, to; shares.take(thread, from, to);) kernels()->multiply(type, product, from, to);
  });
  return ffi::Error::Success();
}

ffi::Error attend(ffi::ThreadPool pool, ffi::AnyBuffer queries, ffi::AnyBuffer keys, ffi::AnyBuffer values,
                  ffi::Buffer<ffi::S32> length, ffi::AnyBuffer new_keys, ffi::AnyBuffer new_values,
                  ffi::Buffer<ffi::PRED> mask, ffi::Buffer<ffi::S32> first_seen, ffi::ResultBuffer<ffi::F32> out,
                  int64_t layer, float scale) {
  const auto q = queries.dimensions(), k = keys.dimensions(), v = values.dimensions();
  AttentionCall call;
  call.scale = scale;
  call.half = queries.element_type() == ffi::BF16;
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

// Heads [B, T, H, K] become [B, H, T, K].
ffi::Error rotate(ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32> cosines, ffi::Buffer<ffi::F32> sines,
                  ffi::ResultBuffer<ffi::F32> out) {
  const auto dims = x.dimensions();
  const long batch = dims[0], tokens = dims[1], heads = dims[2], width = dims[3];
  const long half = batch * tokens ? cosines.element_count() / (batch * tokens) : 0;
  const float* from = x.typed_data();
  for (long place = 0; place < batch * tokens; place++)
    for (long h = 0; h < heads; h++, from += width) {
      float* to = out->typed_data() + ((place / tokens * heads + h) * tokens + place % tokens) * width;
      kernels()->rotate(from, cosines.typed_data() + place * half, sines.typed_data() + place * half, to, half, width);
    }
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
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<int64_t>("kind"));
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
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxspec_rotate, rotate,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());

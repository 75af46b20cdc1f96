// The kernels for processors with AVX2 and FMA.

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif
#define TABLE kAvx2
#define NAME "AVX2"
#define SUPPORTED (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
#include "kernels.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif

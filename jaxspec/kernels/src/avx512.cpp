// The kernels for processors with AVX-512 (F, BW, DQ, VL).

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")
#endif
#define AVX512
#define TABLE kAvx512
#define NAME "AVX-512"
#define SUPPORTED (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
#include "kernels.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif

// The kernels for processors with AVX-512, BF16 and VNNI.

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni")
#endif
#define AVX512
#define AVX512_BF16
#define AVX512_VNNI
#define TABLE kAvx512Bf16
#define NAME "AVX-512 with BF16 and VNNI"
#define SUPPORTED (kAvx512.supported() && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni"))
#include "kernels.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif

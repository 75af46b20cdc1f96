// The kernels for processors with AVX-512, BF16, VNNI and AMX (tiles, BF16), on Linux.

#include "table.h"

#if defined(HAS_AMX)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni,amx-tile,amx-bf16"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni,amx-tile,amx-bf16")
#endif
#define AVX512
#define AVX512_BF16
#define AVX512_VNNI
#define AMX
#define TABLE kAmx
#define NAME "AMX"
#define SUPPORTED (kAvx512Bf16.supported() && tiles_permitted())
#include "kernels.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif

// Products of bfloat16 in the tile registers of AMX, for up to 32 rows and 32 outputs at a time.
//
// A register holds 16 rows of 64 bytes: sums of 16 rows and 16 outputs, 32 inputs of 16 rows, or 32 inputs of 16 outputs in the
// order in which packed weights stand in memory. An output is one chain of additions over groups of 32 inputs. The order
// inside a group is the processor's own, and the same for every row, so that the bits of a row do not depend on other rows.

#pragma once

#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>

#include "lanes.h"

namespace {

constexpr long kTileInputs = 32, kTileHeight = 16, kTileBytes = 1024;
constexpr long kTilesAhead = 2048;  // how many bytes ahead weights are prefetched into the first-level cache

// Returns whether the processor has the registers, after asking Linux for permission to use them: their 8 KB must be saved
// for every thread. The permission is for the whole process.
inline bool tiles_permitted() {
  constexpr unsigned kBFloat16 = 1u << 22, kTile = 1u << 24;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & (kBFloat16 | kTile)) != (kBFloat16 | kTile)) return false;
  return !syscall(SYS_arch_prctl, kRequestPermission, kTileData);
}

// The shapes of the registers of this thread, for as long as the object lives. Registers 0 to 3 are sums: of the first and the
// second block of sixteen outputs for the first sixteen rows (0, 2), and for the other rows (1, 3). Registers 4 and 5 are rows,
// 6 and 7 are weights.
class Tiles {
 public:
  explicit Tiles(long rows) {
    const long first = std::min(rows, kTileHeight), second = rows - first;
    const long heights[] = {first, second, first, second, first, second, kTileHeight, kTileHeight};
    Shapes shapes;
    for (int i = 0; i < 8; i++) shapes.heights[i] = (uint8_t)heights[i], shapes.bytes[i] = heights[i] ? 64 : 0;
    _tile_loadconfig(&shapes);
  }
  Tiles(const Tiles&) = delete;
  ~Tiles() { _tile_release(); }

 private:
  struct alignas(64) Shapes {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {};  // of a row
    uint8_t heights[16] = {};
  };
};

template <int number>
void store_sums(void* to, long stride) {  // the number of a register must be a literal
  if constexpr (number == 0) _tile_stored(0, to, stride);
  if constexpr (number == 1) _tile_stored(1, to, stride);
  if constexpr (number == 2) _tile_stored(2, to, stride);
  if constexpr (number == 3) _tile_stored(3, to, stride);
}

// Writes the first `last` of sixteen outputs.
template <int number>
void write_sums(float* out, long rows, long outputs, long last) {
  if (last == kLanes) return store_sums<number>(out, outputs * (long)sizeof(float));
  float sums[kTileHeight * kLanes];
  store_sums<number>(sums, kLanes * (long)sizeof(float));
  for (long row = 0; row < rows; row++) store(out + row * outputs, load(sums + row * kLanes), last);
}

// Multiplies `rows` rows, more than sixteen if `more`, with B blocks of sixteen outputs; the last block has `last` outputs.
template <int B, bool more>
void multiply_tiles(const char* weights, long stride, const uint16_t* x, long width, long rows, float* out, long outputs,
                    long last) {
  const Tiles tiles(rows);
  const long row = width * (long)sizeof(uint16_t);
  const uint16_t* second = x + kTileHeight * width;
  _tile_zero(0);
  if constexpr (more) _tile_zero(1);
  if constexpr (B > 1) _tile_zero(2);
  if constexpr (B > 1 && more) _tile_zero(3);
  for (long i = 0; i < width; i += kTileInputs, weights += kTileBytes) {
    for (int b = 0; b < B; b++)
#pragma GCC unroll 16
      for (long line = 0; line < kTileBytes; line += 64) _mm_prefetch(weights + b * stride + line + kTilesAhead, _MM_HINT_T0);
    _tile_loadd(4, x + i, row);
    if constexpr (more) _tile_loadd(5, second + i, row);
    _tile_loadd(6, weights, 64);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (more) _tile_dpbf16ps(1, 5, 6);
    if constexpr (B > 1) {
      _tile_loadd(7, weights + stride, 64);
      _tile_dpbf16ps(2, 4, 7);
      if constexpr (more) _tile_dpbf16ps(3, 5, 7);
    }
  }
  const long head = std::min(rows, kTileHeight);
  float* below = out + kTileHeight * outputs;
  write_sums<0>(out, head, outputs, B == 1 ? last : kLanes);
  if constexpr (more) write_sums<1>(below, rows - head, outputs, B == 1 ? last : kLanes);
  if constexpr (B > 1) write_sums<2>(out + kLanes, head, outputs, last);
  if constexpr (B > 1 && more) write_sums<3>(below + kLanes, rows - head, outputs, last);
}

}  // namespace

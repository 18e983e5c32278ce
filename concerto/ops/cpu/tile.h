// Matrix tiles as Intel AMX has them: eight registers of up to 16 rows of 64 bytes, and a product of bf16 pairs into
// f32 sums. Two implementations of the same functions, one of which a kernel includes inside its anonymous namespace:
//   tile_amx.h        the processor's
//   tile_emulated.h   plain C++ with the same bits, for tests on processors without tiles
//
//   void tile_configure(const TileConfig&)        sets shapes, of this thread
//   TileConfig tile_configuration()               of this thread; all zero if there is none
//   void tile_zero<t>()
//   void tile_load<t>(const void* p, stride)      rows `stride` bytes apart
//   void tile_store<t>(void* p, stride)
//   void tile_multiply_add<c, a, b>()             c[m][n] += sum over the words k of a[m][k] . b[k][n]
#pragma once

#include <cstdint>

namespace concerto::cpu {

constexpr int kTileRows = 16, kTileRowWords = 16, kTileRegisters = 8;

// As LDTILECFG reads it.
struct alignas(64) TileConfig {
  uint8_t palette = 0;  // 1: the shapes below; 0: no tiles
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};
static_assert(sizeof(TileConfig) == 64);

// All registers whole.
constexpr TileConfig whole_tiles() {
  TileConfig c;
  c.palette = 1;
  for (int t = 0; t < kTileRegisters; ++t) {
    c.row_bytes[t] = kTileRowWords * 4;
    c.rows[t] = kTileRows;
  }
  return c;
}

}  // namespace concerto::cpu

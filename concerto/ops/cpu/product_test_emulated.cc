// The AMX kernel on emulated tiles, and the emulation itself.
#include <cmath>
#include <cstring>
#include <limits>

#include "concerto/ops/cpu/product_test_support.h"
#include "concerto/ops/cpu/tile.h"

namespace concerto::cpu {

std::vector<Isa> levels_under_test() { return {Isa::kAmxBf16}; }

namespace {

#include "concerto/ops/cpu/tile_emulated.h"

struct TileWords {
  uint32_t at[kTileRows][kTileRowWords] = {};
};

uint32_t pair(float low, float high) { return uint32_t{bf16(low).bits} | uint32_t{bf16(high).bits} << 16; }

// c after c += a b on whole tiles.
TileWords product(const TileWords& c, const TileWords& a, const TileWords& b) {
  tile_configure(whole_tiles());
  tile_load<0>(c.at, 64);
  tile_load<1>(a.at, 64);
  tile_load<2>(b.at, 64);
  tile_multiply_add<0, 1, 2>();
  TileWords out;
  tile_store<0>(out.at, 64);
  return out;
}

float f32(uint32_t word) { return __builtin_bit_cast(float, word); }
uint32_t word(float x) { return __builtin_bit_cast(uint32_t, x); }

TEST(EmulatedTiles, MultiplyMatrices) {
  TileWords a, b, c;
  for (int m = 0; m < 16; ++m)
    for (int w = 0; w < 16; ++w) {
      a.at[m][w] = pair(static_cast<float>(m - 2 * w), static_cast<float>(w % 3));
      b.at[m][w] = pair(static_cast<float>(m + w), static_cast<float>(w - m));
      c.at[m][w] = word(static_cast<float>(100 * m + w));
    }
  const TileWords out = product(c, a, b);
  for (int m = 0; m < 16; ++m)
    for (int n = 0; n < 16; ++n) {
      int want = 100 * m + n;  // small whole numbers: exact
      for (int k = 0; k < 16; ++k) want += (m - 2 * k) * (k + n) + k % 3 * (n - k);
      EXPECT_EQ(f32(out.at[m][n]), static_cast<float>(want)) << m << ", " << n;
    }
}

TEST(EmulatedTiles, RoundToNearestEvenOncePerStep) {
  TileWords a, b;
  a.at[0][0] = pair(1, 0), b.at[0][0] = pair(1, 0);
  a.at[0][1] = pair(0x1p-12f, 0), b.at[1][0] = pair(0x1p-12f, 0);  // half a unit in the last place of 1: to even
  EXPECT_EQ(f32(product({}, a, b).at[0][0]), 1.0f);
  a.at[0][1] = pair(0x1.8p-12f, 0);  // three quarters: up
  EXPECT_EQ(f32(product({}, a, b).at[0][0]), 1.0f + 0x1p-23f);
  // First and second elements of pairs are summed apart: neither half unit is lost, where one running sum drops both.
  a = {}, b = {};
  a.at[0][0] = pair(1, 0), b.at[0][0] = pair(1, 0);
  a.at[0][1] = pair(0, 0x1p-12f), b.at[1][0] = pair(0, 0x1p-12f);
  a.at[0][2] = pair(0, 0x1p-12f), b.at[2][0] = pair(0, 0x1p-12f);
  EXPECT_EQ(f32(product({}, a, b).at[0][0]), 1.0f + 0x1p-23f);
}

TEST(EmulatedTiles, SubnormalsAreZero) {
  TileWords a, b, c;
  a.at[0][0] = pair(0x1p-130f, 0), b.at[0][0] = pair(0x1p20f, 0);  // a subnormal factor
  EXPECT_EQ(product(c, a, b).at[0][0], word(0.0f));
  a.at[0][0] = pair(0x1p-70f, 0), b.at[0][0] = pair(-0x1p-60f, 0);  // a subnormal product
  EXPECT_EQ(f32(product(c, a, b).at[0][0]), 0.0f);
  a.at[0][0] = pair(0x1p-126f, 0), b.at[0][0] = pair(1, 0);  // the smallest normal number stays
  EXPECT_EQ(f32(product(c, a, b).at[0][0]), 0x1p-126f);
  c.at[0][0] = 1;  // a subnormal sum to add to
  EXPECT_EQ(f32(product(c, {}, {}).at[0][0]), 0.0f);
}

TEST(EmulatedTiles, InfinityAndNanSpread) {
  TileWords a, b;
  const float infinity = std::numeric_limits<float>::infinity();
  a.at[0][0] = pair(infinity, 0), b.at[0][0] = pair(-2, 0);
  const TileWords out = product({}, a, b);
  EXPECT_EQ(f32(out.at[0][0]), -infinity);
  EXPECT_TRUE(std::isnan(f32(out.at[0][1]))) << "infinity times zero";
  EXPECT_EQ(f32(out.at[1][0]), 0.0f) << "another row";
}

TEST(EmulatedTiles, PartialShapesClearTheRest) {
  TileConfig config = whole_tiles();
  config.rows[0] = 3, config.row_bytes[0] = 8;
  tile_configure(config);
  const TileConfig back = tile_configuration();
  EXPECT_EQ(std::memcmp(&back, &config, sizeof config), 0);
  TileWords ones, out;
  for (auto& row : ones.at)
    for (auto& x : row) x = 1;
  tile_load<0>(ones.at, 64);
  tile_store<0>(out.at, 64);
  for (int m = 0; m < 16; ++m)
    for (int n = 0; n < 16; ++n) EXPECT_EQ(out.at[m][n], m < 3 && n < 2 ? 1u : 0u) << m << ", " << n;
}

TEST(EmulatedTiles, WhatFaultsIsABug) {
  tile_configure({});
  EXPECT_THROW(tile_zero<0>(), Bug);
  TileConfig wide = whole_tiles();
  wide.row_bytes[3] = 68;
  EXPECT_THROW(tile_configure(wide), Bug);
  TileConfig misfit = whole_tiles();
  misfit.rows[2] = 15;
  tile_configure(misfit);
  EXPECT_THROW((tile_multiply_add<0, 1, 2>()), Bug);
}

}  // namespace
}  // namespace concerto::cpu

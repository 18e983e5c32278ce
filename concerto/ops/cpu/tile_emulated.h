// Tiles in plain C++ (tile.h), after Intel's description of the instructions: a product sums the first and the second
// elements of the pairs apart, from zero and in order, by fused multiply-adds; adds the two; adds that to c. Rounding
// is to nearest even, subnormal inputs count as zero and subnormal results become zero. What the processor answers with
// a fault is a failed CHECK.

struct EmulatedTiles {
  TileConfig config;
  uint32_t words[kTileRegisters][kTileRows][kTileRowWords] = {};
};
inline thread_local EmulatedTiles emulated_tiles;

inline float tile_flushed(float x) { return __builtin_fabsf(x) < 0x1p-126f ? __builtin_copysignf(0, x) : x; }

// The low or high bf16 of a word, subnormals as zero.
inline float tile_element(uint32_t word, int half) {
  return tile_flushed(__builtin_bit_cast(float, half == 0 ? word << 16 : word & 0xffff0000u));
}

inline float tile_fused(float a, float b, float sum) {
  const float product = a * b;  // exact unless it leaves the range of normal numbers: 8 bits of significand each
  const float size = __builtin_fabsf(product);
  if (size >= 0x1p-126f && size <= 0x1.fffffep127f) return tile_flushed(sum + product);
  return tile_flushed(__builtin_fmaf(a, b, sum));
}

inline void tile_configure(const TileConfig& config) {
  CHECK(config.palette <= 1, "tile palette {}", config.palette);
  for (int t = 0; t < kTileRegisters && config.palette == 1; ++t)
    CHECK(config.rows[t] <= kTileRows && config.row_bytes[t] <= kTileRowWords * 4 && config.row_bytes[t] % 4 == 0,
          "tile {} of {} rows of {} bytes", t, config.rows[t], config.row_bytes[t]);
  emulated_tiles = {};
  emulated_tiles.config = config;
}

inline TileConfig tile_configuration() { return emulated_tiles.config; }

// The register, once its shape is known to be set.
inline auto& tile_register(int tile) {
  const TileConfig& c = emulated_tiles.config;
  CHECK(c.palette == 1 && c.rows[tile] > 0 && c.row_bytes[tile] > 0, "tile {} is not configured", tile);
  return emulated_tiles.words[tile];
}

inline void emulate_zero(int tile) { __builtin_memset(tile_register(tile), 0, sizeof emulated_tiles.words[tile]); }

inline void emulate_load(int tile, const void* p, int64_t stride) {
  emulate_zero(tile);
  for (int r = 0; r < emulated_tiles.config.rows[tile]; ++r)
    __builtin_memcpy(emulated_tiles.words[tile][r], static_cast<const char*>(p) + r * stride,
                     emulated_tiles.config.row_bytes[tile]);
}

inline void emulate_store(int tile, void* p, int64_t stride) {
  const auto& words = tile_register(tile);
  for (int r = 0; r < emulated_tiles.config.rows[tile]; ++r)
    __builtin_memcpy(static_cast<char*>(p) + r * stride, words[r], emulated_tiles.config.row_bytes[tile]);
}

inline void emulate_multiply_add(int tile_c, int tile_a, int tile_b) {
  const TileConfig& config = emulated_tiles.config;
  auto& c = tile_register(tile_c);
  const auto &a = tile_register(tile_a), &b = tile_register(tile_b);
  const int words = config.row_bytes[tile_a] / 4, columns = config.row_bytes[tile_c] / 4;
  CHECK(tile_a != tile_b && tile_a != tile_c && tile_b != tile_c && config.rows[tile_a] == config.rows[tile_c] &&
            config.rows[tile_b] == words && config.row_bytes[tile_b] == config.row_bytes[tile_c],
        "tiles {}, {}, {} do not fit", tile_c, tile_a, tile_b);
  for (int m = 0; m < config.rows[tile_c]; ++m) {
    float sums[2][kTileRowWords] = {};
    for (int k = 0; k < words; ++k)
      for (int half = 0; half < 2; ++half) {
        const float x = tile_element(a[m][k], half);
        for (int n = 0; n < columns; ++n) sums[half][n] = tile_fused(x, tile_element(b[k][n], half), sums[half][n]);
      }
    for (int n = 0; n < columns; ++n) {
      const float both = tile_flushed(sums[0][n] + sums[1][n]);
      const float sum = tile_flushed(tile_flushed(__builtin_bit_cast(float, c[m][n])) + both);
      c[m][n] = __builtin_bit_cast(uint32_t, sum);
    }
  }
}

template <int kTile>
inline void tile_zero() {
  emulate_zero(kTile);
}

template <int kTile>
inline void tile_load(const void* p, int64_t stride) {
  emulate_load(kTile, p, stride);
}

template <int kTile>
inline void tile_store(void* p, int64_t stride) {
  emulate_store(kTile, p, stride);
}

template <int kC, int kA, int kB>
inline void tile_multiply_add() {
  emulate_multiply_add(kC, kA, kB);
}

// The product kernel on matrix tiles (tile.h). Included by product_amx.cc and by the sources that build it on emulated
// tiles, after product_kernels_body.h and under its rules, with kRows 16, kVectors 2 and kLanes 16. Vec has besides:
// type Sum, add, load, store, stream, store_bf16; settle() after stream.
//
// A panel of A holds 16 rows as tiles: [words / 16][16 rows][16 words], the last filled up with zeros to whole tiles. A
// panel of B, [words][32], is two columns of tiles as it is. Per 16 words a block of 32 x 32 (for the last 16 rows of a
// call, 16 x 64) takes four products on four loads. A row of a tile meets no other row, and every block sums words in
// the same order, so results are row-invariant like all others.
//
// The including file declares before and defines after:
//   pack_row(from, n, to): n <= 32 elements as 16 words, filled up with zero
//   pack_square(from, stride, n, k, to): the transpose of [k <= 32, n <= 16] as [16][16] words, filled up with zeros

constexpr int64_t kTileWide = kTileRowWords, kTileWordsInAll = kTileRows * kTileRowWords;
constexpr int kSumTile = 0, kATile = 4, kBTile = 6;
static_assert(kUnit == 2 && kRows == kTileRows && kColumns == 2 * kTileWide && kLanes == kTileWide);

void pack_a_rows(const void* a, int64_t stride, int64_t rows, int64_t k, uint32_t* packed, int64_t panel_words) {
  for (int64_t r = 0; r < rows; r += kRows, packed += panel_words) {
    const Bits16* from = static_cast<const Bits16*>(a) + r * stride;
    uint32_t* to = packed;
    for (int64_t i = 0; i < k; i += kTileWide * kUnit, to += kTileWordsInAll)
      for (int64_t v = 0; v < smaller(kRows, rows - r); ++v)
        pack_row(from + v * stride + i, smaller(k - i, kTileWide * kUnit), to + v * kTileWide);
  }
}

void pack_a_cols(const void* a, int64_t stride, int64_t rows, int64_t k, uint32_t* packed, int64_t panel_words) {
  for (int64_t i = 0; i < k; i += kTileWide * kUnit, packed += kTileWordsInAll)
    for (int64_t r = 0; r < rows; r += kRows)
      pack_square(static_cast<const Bits16*>(a) + i * stride + r, stride, smaller(kRows, rows - r),
                  smaller(k - i, kTileWide * kUnit), packed + r / kRows * panel_words);
}

template <int kValue>
struct Index {
  static constexpr int value = kValue;
};

// each(Index<0>), each(Index<1>), ...: register numbers are constants.
template <int kCount, class Each>
[[gnu::always_inline]] inline void repeat(Each each) {
  if constexpr (kCount > 0) {
    repeat<kCount - 1>(each);
    each(Index<kCount - 1>{});
  }
}

// One tile's worth of words.
template <int kRowTiles, int kColumnTiles>
[[gnu::always_inline]] inline void add_products(const uint32_t* a, int64_t a_panel_words, const uint32_t* b,
                                                int64_t b_panel_words) {
  repeat<kRowTiles>([&](auto i) { tile_load<kATile + i.value>(a + i.value * a_panel_words, kTileWide * 4); });
  repeat<kColumnTiles>([&](auto v) {
    constexpr int kB = kBTile + v.value % 2;
    tile_load<kB>(b + v.value / 2 * b_panel_words + v.value % 2 * kTileWide, kColumns * 4);
    repeat<kRowTiles>(
        [&](auto i) { tile_multiply_add<kSumTile + i.value * kColumnTiles + v.value, kATile + i.value, kB>(); });
  });
}

struct TileOut {
  float* c;
  int64_t c_stride;
  void* out;
  int64_t out_stride;
  Finish finish;
  bool first;
};

// What lies beyond the last whole tile of words of up to two panels of B, filled up with zeros.
struct LastWords {
  alignas(64) uint32_t words[2][kTileWide * kColumns];

  void fill(const uint32_t* b, int64_t b_panel_words, int64_t panels, int64_t count) {
    for (int64_t j = 0; j < panels; ++j) {
      __builtin_memcpy(words[j], b + j * b_panel_words, static_cast<size_t>(count * kColumns) * 4);
      __builtin_memset(words[j] + count * kColumns, 0, static_cast<size_t>((kTileWide - count) * kColumns) * 4);
    }
  }
};

// `rows` <= kRowTiles * 16 rows times kColumnTiles * 16 columns.
template <int kRowTiles, int kColumnTiles>
void block(const uint32_t* a, int64_t a_panel_words, const uint32_t* b, int64_t b_panel_words, const LastWords& last,
           int64_t words, int64_t rows, const TileOut& to) {
  constexpr int64_t kWidth = kColumnTiles * kTileWide;
  repeat<kRowTiles * kColumnTiles>([](auto t) { tile_zero<kSumTile + t.value>(); });
  int64_t w = 0;
  for (; w + kTileWide <= words; w += kTileWide)
    add_products<kRowTiles, kColumnTiles>(a + w * kRows, a_panel_words, b + w * kColumns, b_panel_words);
  if (w < words)
    add_products<kRowTiles, kColumnTiles>(a + w * kRows, a_panel_words, last.words[0], kTileWide * kColumns);

  const auto store_tiles = [](float* at, int64_t stride) {
    repeat<kRowTiles>([&](auto i) {
      repeat<kColumnTiles>([&](auto v) {
        tile_store<kSumTile + i.value * kColumnTiles + v.value>(at + i.value * kTileRows * stride + v.value * kTileWide,
                                                                stride * 4);
      });
    });
  };
  if (to.first && rows == kRowTiles * kTileRows && to.finish == Finish::kKeep) return store_tiles(to.c, to.c_stride);
  if (to.first && rows == kRowTiles * kTileRows && to.finish == Finish::kStoreF32)
    return store_tiles(static_cast<float*>(to.out), to.out_stride);

  alignas(64) float sums[kRowTiles * kTileRows * kWidth];
  store_tiles(sums, kWidth);
  const auto each_sum = [&](auto put) {
    for (int64_t i = 0; i < rows; ++i)
#pragma GCC unroll 4
      for (int64_t j = 0; j < kWidth; j += kLanes) {
        typename Vec::Sum sum = Vec::load(sums + i * kWidth + j);
        if (!to.first) sum = Vec::add(Vec::load(to.c + i * to.c_stride + j), sum);
        put(sum, i, j);
      }
  };
  switch (to.finish) {
    case Finish::kKeep:
      each_sum([&](auto sum, int64_t i, int64_t j) { Vec::store(to.c + i * to.c_stride + j, sum); });
      break;
    case Finish::kStoreF32:
      each_sum([&](auto sum, int64_t i, int64_t j) {
        Vec::store(static_cast<float*>(to.out) + i * to.out_stride + j, sum);
      });
      break;
    case Finish::kStreamF32:
      each_sum([&](auto sum, int64_t i, int64_t j) {
        Vec::stream(static_cast<float*>(to.out) + i * to.out_stride + j, sum);
      });
      break;
    case Finish::kStoreBF16:
      each_sum([&](auto sum, int64_t i, int64_t j) {
        Vec::store_bf16(static_cast<Bits16*>(to.out) + i * to.out_stride + j, sum);
      });
      break;
    case Finish::kAddF32:
      each_sum([&](auto sum, int64_t i, int64_t j) {
        float* p = static_cast<float*>(to.out) + i * to.out_stride + j;
        Vec::store(p, Vec::add(Vec::load(p), sum));
      });
      break;
  }
}

// Another library on this thread may have given the tiles other shapes, or released them; asking costs a tenth of
// setting.
void use_tiles() {
  static constexpr TileConfig kWhole = whole_tiles();
  const TileConfig now = tile_configuration();
  if (__builtin_memcmp(&now, &kWhole, sizeof now) != 0) tile_configure(kWhole);
}

void tile(const uint32_t* a, int64_t a_panel_words, const uint32_t* b, int64_t b_panel_words, float* c,
          int64_t c_stride, int64_t rows, int64_t panels, int64_t words, bool first, Finish finish, void* out,
          int64_t out_stride, Ahead* ahead) {
  use_tiles();
  const int64_t element = finish == Finish::kStoreBF16 ? 2 : 4, whole = words / kTileWide * kTileWide;
  const auto out_at = [&](int64_t i, int64_t j) {
    return TileOut{c + i * c_stride + j * kColumns,
                   c_stride,
                   static_cast<char*>(out) + (i * out_stride + j * kColumns) * element,
                   out_stride,
                   finish,
                   first};
  };
  LastWords last;
  const auto b_at = [&](int64_t j, int64_t count) {
    if (whole < words) last.fill(b + j * b_panel_words + whole * kColumns, b_panel_words, count, words - whole);
    return b + j * b_panel_words;
  };
  // Pairs of panels of A. A rest of one panel, or of one and a part, is left for the wide blocks where they are whole.
  const int64_t paired = rows % (2 * kRows) > kRows ? rows : rows / (2 * kRows) * (2 * kRows);
  if (paired > 0)
    for (int64_t j = 0; j < panels; ++j) {
      const uint32_t* panel = b_at(j, 1);
      for (int64_t i = 0; i < paired; i += 2 * kRows) {
        fetch_some(ahead);
        fetch_some(ahead);
        block<2, 2>(a + i / kRows * a_panel_words, a_panel_words, panel, b_panel_words, last, words,
                    smaller(2 * kRows, rows - i), out_at(i, j));
      }
    }
  const uint32_t* a_rest = a + paired / kRows * a_panel_words;
  int64_t j = paired == rows ? panels : 0;
  for (; j + 2 <= panels; j += 2) {
    fetch_some(ahead);
    fetch_some(ahead);
    block<1, 4>(a_rest, a_panel_words, b_at(j, 2), b_panel_words, last, words, rows - paired, out_at(paired, j));
  }
  if (j < panels)
    block<1, 2>(a_rest, a_panel_words, b_at(j, 1), b_panel_words, last, words, rows - paired, out_at(paired, j));
  if (finish == Finish::kStreamF32) Vec::settle();
}

constexpr ProductKernels make_table() {
  ProductKernels t = shared_table();
  t.pack_a_rows[kSourceBF16] = pack_a_rows;
  t.pack_a_cols[kSourceBF16] = pack_a_cols;
  t.tile = tile;
  return t;
}

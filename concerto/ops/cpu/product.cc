#include "concerto/ops/cpu/product.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <numeric>

#include "concerto/ops/cpu/product_kernels.h"
#include "concerto/ops/cpu/weight_packing.h"

namespace concerto::cpu {
namespace {

struct TileSize {
  int64_t rows, columns;
};

// Largest tiles: packed rows of A and the packed B fit the second cache level together. A row product packs A again for
// every block of columns, so its tiles are wide. A weight product packs both, B for every block of rows: its tiles are
// high, and go through their rows at most kMostWeightRows at a time. Rows are a multiple of every mr.
constexpr TileSize kRowTile{96, 512}, kWeightTile{1536, 512}, kSmallestTile{48, 64};
constexpr int64_t kMostWeightRows = 528;
// Bytes that packed A and packed B of a weight product take together, where B leaves room: the second cache level but
// for what passes through it.
constexpr int64_t kWeightPacks = 800 << 10;
// Words of a reduction over which a row product sums a panel of the result before it goes on to the next panel.
constexpr int64_t kStretchWords = 4 * kTileWords;
// Words of packed weights that a thread keeps: 16 MB, where there are many threads less, for all share the last cache
// level and memory. A longer reduction takes narrower tiles, and past the narrowest packs its weights again for every
// tile.
constexpr int64_t kMostKeptWords = 4 << 20, kLeastKeptWords = 512 << 10, kNarrowestKept = 128;
int64_t kept_words(int threads) { return std::clamp(8 * kMostKeptWords / threads, kLeastKeptWords, kMostKeptWords); }
// Bytes of packed B that are read again for every few rows of the result without being missed.
constexpr int64_t kBandBytes = 192 * 1024;
// Bytes of weights that are fetched while others are in use: both fit the second cache level.
constexpr int64_t kMostFetched = 512 * 1024;

// Bytes of a result that may still be in the caches when it is read next.
constexpr int64_t kMostCached = 8 << 20;

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

Source source_of(DType type) { return type == DType::kBF16 ? kSourceBF16 : kSourceF32; }

const char* at(const void* data, int64_t elements, DType type) {
  return static_cast<const char*>(data) + elements * dtype_bytes(type);
}

int64_t a_panel_words(const ProductKernels& k) { return kTileWords * k.mr + kPanelGap; }

// Halves a tile until threads end together: until the costliest one is a small part of what a thread has to do, or,
// where all are equal, every thread has as many. `share`: how much of all work lies in the part of the result of
// `rows` x `columns` that the costliest tile is cut from.
TileSize choose_tile(TileSize t, int64_t rows, int64_t columns, double share, int threads) {
  const auto too_big = [&] {
    const int64_t tiles = ceil_div(rows, t.rows) * ceil_div(columns, t.columns);
    if (share == 1 && tiles % threads == 0) return false;
    return share / static_cast<double>(tiles) > 1.0 / (4 * threads);
  };
  while (threads > 1 && too_big() && (t.rows > kSmallestTile.rows || t.columns > kSmallestTile.columns)) {
    if (t.columns > kSmallestTile.columns && (t.columns >= t.rows || t.rows == kSmallestTile.rows))
      t.columns /= 2;
    else
      t.rows /= 2;
  }
  return t;
}

// One thread's packing space, and one for the rows that a tile gathers.
struct Workspace {
  uint32_t* a;
  uint32_t* b;
  float* sums;
  char* rows;
};

// A workspace for each thread, side by side.
class Workspaces {
 public:
  Workspaces(const Context& ctx, int64_t a_words, int64_t b_words, int64_t sums, int64_t row_words)
      : a_words_(round_up(a_words, 16)),
        b_words_(round_up(b_words, 16)),
        sums_(round_up(sums, 16)),
        all_(a_words_ + b_words_ + sums_ + round_up(row_words, 16)) {
    base_ = static_cast<uint32_t*>(ctx.scratch->take_bytes(ctx.pool->size() * all_ * 4));
  }
  Workspace of(int thread) const {
    uint32_t *a = base_ + thread * all_, *b = a + a_words_, *sums = b + b_words_;
    return {a, b, reinterpret_cast<float*>(sums), reinterpret_cast<char*>(sums + sums_)};
  }

 private:
  int64_t a_words_, b_words_, sums_, all_;
  uint32_t* base_;
};

// The tiles of ragged groups: group e has first[e] .. first[e + 1] of them; a group's are numbered through its column
// blocks, rows within.
struct TileList {
  int64_t* first;  // [groups + 1]
  int64_t groups;

  int64_t count() const { return first[groups]; }
  int64_t group_of(int64_t tile) const { return std::upper_bound(first, first + groups + 1, tile) - first - 1; }
};

struct Range {
  int64_t begin = 0, end = 0;
  int64_t size() const { return end - begin; }
};

// fn(tile, next, thread) for tiles [0, count). Threads take runs of at most `most` neighbours as they get free, short
// ones towards the end. While there are many left they take the next run before the last tile of a run, so that they
// know the tile `next` that they will take (-1: not known) and its memory can be fetched.
template <class F>
void for_tiles(ThreadPool& pool, int64_t count, int64_t most, F fn) {
  std::atomic<int64_t> taken{0};
  const auto take = [&] {
    int64_t begin = taken.load(std::memory_order_relaxed), end;
    do {
      end = std::min(count, begin + std::clamp<int64_t>((count - begin) / (4 * pool.size()), 1, most));
    } while (begin < count && !taken.compare_exchange_weak(begin, end, std::memory_order_relaxed));
    return Range{begin, end};
  };
  pool.run([&](int thread) {
    for (Range run = take(); run.size() > 0;) {
      for (int64_t tile = run.begin; tile + 1 < run.end; ++tile) fn(tile, tile + 1, thread);
      const bool early = pool.size() == 1 || count - run.end >= 2 * most * pool.size();
      Range next = early ? take() : Range{};
      fn(run.end - 1, next.size() > 0 ? next.begin : -1, thread);
      run = early ? next : take();
    }
  });
}

// Part `i` of `parts` nearly equal parts of [0, n), borders at multiples of `grain`.
Range part_of(int64_t n, int64_t parts, int64_t i, int64_t grain) {
  const int64_t units = ceil_div(n, grain);
  return {std::min(n, units * i / parts * grain), std::min(n, units * (i + 1) / parts * grain)};
}

// Rows of group e of `rows`.
Range group_rows(const int32_t* offsets, int64_t e, int64_t rows) {
  return offsets ? Range{offsets[e], offsets[e + 1]} : Range{0, rows};
}

// A block of rows as packing wants it: a pointer and a stride in elements.
struct Block {
  const char* data;
  int64_t stride;
};

// Rows [row, row + count) of v, `width` elements from `column` on. With an index they lie anywhere: they are copied
// side by side to `space`, which stays in the second cache level until they are packed.
Block block_of(const View& v, const int32_t* index, int64_t row, int64_t count, int64_t column, int64_t width,
               char* space) {
  if (!index) return {at(v.data, row * v.row_stride + column, v.dtype), v.row_stride};
  constexpr int64_t kAhead = 8;
  const int64_t bytes = width * dtype_bytes(v.dtype);
  const auto source = [&](int64_t i) { return at(v.data, index[row + i] * v.row_stride + column, v.dtype); };
  for (int64_t i = 0; i < count; ++i) {
    if (i + kAhead < count)
      for (int64_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch(source(i + kAhead) + byte);
    std::memcpy(space + i * bytes, source(i), static_cast<size_t>(bytes));
  }
  return {space, width};
}

// The same block, to be fetched ahead of block_of while `register_tiles` are made. Nothing where rows lie so that they
// would push each other out of the second cache level.
Ahead ahead_of(const View& v, const int32_t* index, int64_t row, int64_t count, int64_t column, int64_t width,
               int64_t register_tiles) {
  constexpr int64_t kWayBytes = 64 * 1024, kWays = 8;
  const int64_t stride = v.row_stride * dtype_bytes(v.dtype), bytes = width * dtype_bytes(v.dtype);
  if (count * std::gcd(stride, kWayBytes) > kWays * kWayBytes) return {};
  return {.data = at(v.data, column, v.dtype) + (index ? 0 : row * stride),
          .index = index ? index + row : nullptr,
          .stride = stride,
          .bytes = bytes,
          .rows = count,
          .lines = ceil_div(count * ceil_div(bytes, 64), std::max<int64_t>(1, register_tiles))};
}

// Words of space that block_of needs for `elements` of v.
int64_t space_words(const View& v, int64_t elements) { return ceil_div(elements * dtype_bytes(v.dtype), 4); }

void check_groups(const int32_t* offsets, int64_t groups, int64_t rows) {
  if (!offsets) return;
  CHECK(offsets[0] == 0 && offsets[groups] <= rows, "offsets from {} to {}, {} rows", offsets[0], offsets[groups],
        rows);
  for (int64_t e = 0; e < groups; ++e) CHECK(offsets[e] <= offsets[e + 1], "offsets fall at group {}", e);
}

// Rows of A^T that a weight product packs at a time: the more, the longer the pieces of memory that are read at once.
int64_t weight_rows(int64_t b_words) {
  const int64_t rows = (kWeightPacks / 4 - b_words) / kTileWords / kSmallestTile.rows * kSmallestTile.rows;
  return std::min(rows, kMostWeightRows);
}

void clear(ThreadPool& pool, float* out, int64_t count) {
  pool.parallel_for(count, 1 << 14, [&](int64_t begin, int64_t end, int) { std::fill(out + begin, out + end, 0.0f); });
}

}  // namespace

const ProductKernels& product_kernels(Isa isa, bool bf16) {
  const ProductKernels* k = nullptr;
  if (isa >= Isa::kAmxBf16 && bf16) k = product_kernels_amx_bf16();
  if (!k && isa >= Isa::kAvx512Bf16 && bf16) k = product_kernels_avx512_bf16();
  if (!k && isa >= Isa::kAvx512) k = product_kernels_avx512();
  if (!k && isa >= Isa::kAvx2) k = product_kernels_avx2();
  return k ? *k : *product_kernels_generic();
}

void row_product(const Context& ctx, Isa isa, const RowProduct& p) {
  if (p.out.rows() == 0 || p.n == 0) return;
  const ProductKernels& kernels = product_kernels(isa, p.a.dtype == DType::kBF16 && p.b_type == DType::kBF16);
  const int64_t rows = p.out.rows(), k = p.a.cols(), words = ceil_div(k, kernels.unit);
  TileSize size = choose_tile(kRowTile, rows, p.n, 1, ctx.pool->size());
  const bool packed = p.packed != nullptr;
  CHECK(!packed || kernels.unit == 2, "packed weights are pairs of bf16");
  const int64_t most_kept = packed ? INT64_MAX : kept_words(ctx.pool->size());
  while (words * size.columns > most_kept && size.columns > kNarrowestKept) size.columns /= 2;
  const int64_t column_blocks = ceil_div(p.n, size.columns), step = kTileWords * kernels.unit;
  const int64_t panels_max = ceil_div(ceil_div(p.n, kernels.nr), column_blocks);
  const int64_t kept = std::min(words, most_kept / size.columns / kTileWords * kTileWords),
                strides = ceil_div(words, kept);
  const PackedPanels whole = packed_panels(kernels, p.n, k);
  const int64_t a_panel = a_panel_words(kernels), b_panel = packed ? whole.panel_words : kept * kernels.nr + kPanelGap;

  ArenaScope scope(*ctx.scratch);
  const int64_t a_block = size.rows / kernels.mr * a_panel,
                most_parts = ceil_div(std::min(words, kStretchWords), kTileWords);
  // Rows of whole words are multiplied as they lie.
  const bool straight = kernels.tile_rows && k % kernels.unit == 0 && dtype_bytes(p.a.dtype) * kernels.unit == 4;
  const Workspaces workspaces(ctx, straight ? 0 : most_parts * a_block, packed ? 0 : panels_max * b_panel,
                              size.rows * panels_max * kernels.nr,
                              p.gathers ? space_words(p.a, size.rows * std::min(k, most_parts * step)) : 0);
  TileList tiles{static_cast<int64_t*>(ctx.scratch->take_bytes((p.groups + 1) * 8)), p.groups};
  auto* held = static_cast<int64_t*>(
      ctx.scratch->take_bytes(ctx.pool->size() * kAlignment));  // what each thread's b holds, a cache line each
  if (ctx.dry_run) return;
  check_groups(p.offsets, p.groups, rows);

  tiles.first[0] = 0;
  for (int64_t e = 0; e < p.groups; ++e)
    tiles.first[e + 1] = tiles.first[e] + ceil_div(group_rows(p.offsets, e, rows).size(), size.rows) * column_blocks;
  for (int i = 0; i < ctx.pool->size(); ++i) held[i * (kAlignment / 8)] = -1;

  const auto pack_a = kernels.pack_a_rows[source_of(p.a.dtype)];
  const auto pack_b = (p.reduce_rows ? kernels.pack_b_cols : kernels.pack_b_rows)[source_of(p.b_type)];
  const auto store = kernels.store[source_of(p.out.dtype)];
  const int64_t b_stride = p.reduce_rows ? p.n : k;
  // Whole panels without a bias go from registers to the output.
  const bool bf16_out = p.out.dtype == DType::kBF16;
  const Finish finish = p.bias || (bf16_out && p.accumulate) ? Finish::kKeep
                        : bf16_out                           ? Finish::kStoreBF16
                        : p.accumulate                       ? Finish::kAddF32
                                                             : Finish::kStoreF32;

  struct Place {
    int64_t e, column_block;
    Range rows, columns;
  };
  const auto place_of = [&](int64_t tile) {
    const int64_t e = tiles.group_of(tile), local = tile - tiles.first[e];
    const Range group = group_rows(p.offsets, e, rows);
    const int64_t row_blocks = (tiles.first[e + 1] - tiles.first[e]) / column_blocks;
    const Range r = part_of(group.size(), row_blocks, local % row_blocks, kernels.mr);
    return Place{e,
                 local / row_blocks,
                 {r.begin + group.begin, r.end + group.begin},
                 part_of(p.n, column_blocks, local / row_blocks, kernels.nr)};
  };
  const auto packed_at = [&](int64_t e, int64_t column) {
    return static_cast<const uint32_t*>(p.packed) + e * whole.matrix_words + column / kernels.nr * whole.panel_words;
  };
  // What is read after the words before `w` of a tile: later ones of its rows, or the next tile's rows and weights.
  const auto after = [&](int64_t tile, int64_t w, int64_t next_tile) {
    const Place place = place_of(tile);
    const int64_t register_tiles = ceil_div(place.rows.size(), kernels.mr) * ceil_div(place.columns.size(), kernels.nr);
    if (w < words)
      return ahead_of(p.a, p.a_row, place.rows.begin, place.rows.size(), w * kernels.unit,
                      std::min(k - w * kernels.unit, step), register_tiles);
    if (next_tile < 0) return Ahead{};
    const Place next = place_of(next_tile);
    Ahead ahead = ahead_of(p.a, p.a_row, next.rows.begin, next.rows.size(), 0,
                           std::min(k, kStretchWords * kernels.unit), register_tiles);
    const int64_t weights = next.columns.size() * k * dtype_bytes(p.b_type);
    const bool one_run = packed || !p.reduce_rows || next.columns.size() == p.n;
    if (strides == 1 && one_run && weights <= kMostFetched &&
        (next.e != place.e || next.column_block != place.column_block)) {
      ahead.run = packed ? reinterpret_cast<const char*>(packed_at(next.e, next.columns.begin))
                         : at(p.b, next.e * p.n * k + next.columns.begin * b_stride, p.b_type);
      ahead.run_bytes = weights;
    }
    return ahead;
  };
  // Tiles of the same weights, which are packed or fetched once, to the same thread.
  constexpr int64_t kMostRun = 8;
  const int64_t keys = p.groups * column_blocks;
  const int64_t run = keys == 1 ? 1 : std::clamp<int64_t>(tiles.count() / keys, 1, kMostRun);
  for_tiles(*ctx.pool, tiles.count(), run, [&](int64_t tile, int64_t next_tile, int thread) {
    const Workspace space = workspaces.of(thread);
    int64_t& holds = held[thread * (kAlignment / 8)];
    const auto [e, column_block, r, columns] = place_of(tile);
    if (columns.size() == 0 || r.size() == 0) return;

    const int64_t panels = ceil_div(columns.size(), kernels.nr), whole_panels = columns.size() / kernels.nr;
    const void* b = at(p.b, e * p.n * k, p.b_type);
    Block straight_rows[kStretchWords / kTileWords];
    const auto rows_of_part = [&](int64_t part) {
      return space.rows + part * size.rows * std::min(k, step) * dtype_bytes(p.a.dtype);
    };
    const auto out_at = [&, begin = r.begin * p.out.row_stride + columns.begin](int64_t panel) {
      return const_cast<char*>(at(p.out.data, begin + panel * kernels.nr, p.out.dtype));
    };
    for (int64_t s = 0; s < strides; ++s) {
      const int64_t kept_begin = s * kept, kept_end = std::min(words, kept_begin + kept);
      if (const int64_t key = e * column_blocks + column_block; !packed && (strides > 1 || holds != key)) {
        const int64_t from = kept_begin * kernels.unit, count = std::min(k, kept_end * kernels.unit) - from;
        pack_b(at(b, p.reduce_rows ? from * b_stride + columns.begin : columns.begin * b_stride + from, p.b_type),
               b_stride, columns.size(), count, space.b, b_panel);
        holds = key;
      }
      for (int64_t w = kept_begin; w < kept_end; w += kStretchWords) {
        const int64_t w_end = std::min(kept_end, w + kStretchWords), parts = ceil_div(w_end - w, kTileWords);
        for (int64_t part = 0; part < parts; ++part) {
          const int64_t from = (w + part * kTileWords) * kernels.unit, count = std::min(k - from, step);
          const Block a = block_of(p.a, p.a_row, r.begin, r.size(), from, count, rows_of_part(part));
          straight_rows[part] = a;
          if (!straight) pack_a(a.data, a.stride, r.size(), count, space.a + part * a_block, a_panel);
        }
        Ahead ahead = after(tile, w_end, next_tile);
        const uint32_t* b_words = (packed ? packed_at(e, columns.begin) : space.b) + (w - kept_begin) * kernels.nr;
        const bool once = words <= kTileWords && finish != Finish::kKeep;
        for (int64_t j = 0; j < panels;) {
          const bool direct = finish != Finish::kKeep && j < whole_panels;
          const int64_t wide = once && direct ? whole_panels : 1;
          float* sums = space.sums + j * size.rows * kernels.nr;
          for (int64_t part = 0; part < parts; ++part) {
            const int64_t begin = w + part * kTileWords, end = std::min(w_end, begin + kTileWords);
            const Finish to = direct && end == words ? finish : Finish::kKeep;
            const uint32_t* b_part = b_words + j * b_panel + part * kTileWords * kernels.nr;
            if (straight) {
              const Block& a = straight_rows[part];
              kernels.tile_rows(a.data, a.stride * dtype_bytes(p.a.dtype), b_part, b_panel, sums, kernels.nr, r.size(),
                                wide, end - begin, begin == 0, to, out_at(j), p.out.row_stride, &ahead);
              continue;
            }
            kernels.tile(space.a + part * a_block, a_panel, b_part, b_panel, sums, kernels.nr, r.size(), wide,
                         end - begin, begin == 0, to, out_at(j), p.out.row_stride, &ahead);
          }
          if (w_end == words && !direct)
            store(sums, kernels.nr, r.size(), std::min<int64_t>(kernels.nr, columns.size() - j * kernels.nr),
                  p.bias ? p.bias + columns.begin + j * kernels.nr : nullptr, out_at(j), p.out.row_stride,
                  p.accumulate);
          j += wide;
        }
      }
    }
  });
}

void weight_product(const Context& ctx, Isa isa, const WeightProduct& p) {
  if (p.a.cols() == 0 || p.b.cols() == 0 || (p.rows == 0 && p.accumulate)) return;
  const ProductKernels& kernels = product_kernels(isa, p.a.dtype == DType::kBF16 && p.b.dtype == DType::kBF16);
  const int64_t rows = p.rows, m = p.a.cols(), n = p.b.cols();
  const int64_t panels_max = ceil_div(std::min(n, kWeightTile.columns), kernels.nr);
  const int64_t step = kTileWords * kernels.unit;  // rows of the sum in a block of words
  const int64_t a_panel = a_panel_words(kernels), b_panel = kTileWords * kernels.nr + kPanelGap;
  const int64_t high = weight_rows(panels_max * b_panel);  // rows of the result taken at a time
  const int64_t kept_rows = round_up(std::min(m, kMostWeightRows), kernels.mr);

  ArenaScope scope(*ctx.scratch);
  const Workspaces workspaces(ctx, high / kernels.mr * a_panel, panels_max * b_panel,
                              std::max(high, kept_rows) * panels_max * kernels.nr,
                              p.gathers ? space_words(p.a, step * std::max(high, kWeightTile.columns)) : 0);
  auto* order = static_cast<int32_t*>(ctx.scratch->take_bytes(p.groups * 4));
  if (ctx.dry_run) return;
  check_groups(p.offsets, p.groups, rows);

  // Groups with most rows first, so that the last tiles to be taken are small ones.
  int64_t groups = 0;
  for (int64_t e = 0; e < p.groups; ++e) {
    if (group_rows(p.offsets, e, rows).size() > 0)
      order[groups++] = static_cast<int32_t>(e);
    else if (!p.accumulate)
      clear(*ctx.pool, p.out + e * m * n, m * n);
  }
  std::sort(order, order + groups, [&](int32_t x, int32_t y) {
    const int64_t size_x = group_rows(p.offsets, x, rows).size(), size_y = group_rows(p.offsets, y, rows).size();
    return size_x != size_y ? size_x > size_y : x < y;
  });
  if (groups == 0) return;
  const int64_t used = p.offsets ? p.offsets[p.groups] : rows, largest = group_rows(p.offsets, order[0], rows).size();
  const TileSize size =
      choose_tile(kWeightTile, m, n, static_cast<double>(largest) / static_cast<double>(used), ctx.pool->size());
  const int64_t row_blocks = ceil_div(m, size.rows), column_blocks = ceil_div(n, size.columns),
                blocks = row_blocks * column_blocks;

  const auto pack_a = kernels.pack_a_cols[source_of(p.a.dtype)];
  const auto pack_b = kernels.pack_b_cols[source_of(p.b.dtype)];

  struct Place {
    int64_t e;
    Range group, rows, columns;
  };
  const auto place_of = [&](int64_t tile) {
    const int64_t e = order[tile / blocks], local = tile % blocks;
    return Place{e, group_rows(p.offsets, e, rows), part_of(m, row_blocks, local / column_blocks, kernels.mr),
                 part_of(n, column_blocks, local % column_blocks, kernels.nr)};
  };
  // A tile's rows of the result in nearly equal bands.
  const auto bands_of = [&](const Place& place) { return ceil_div(place.rows.size(), high); };
  const auto band_of = [&](const Place& place, int64_t band) {
    const Range r = part_of(place.rows.size(), bands_of(place), band, kernels.mr);
    return Range{place.rows.begin + r.begin, place.rows.begin + r.end};
  };
  // The block of A that is read after a band over the block of words from row r on.
  const auto a_after = [&](const Place& place, int64_t r, int64_t band, int64_t next_tile) -> Ahead {
    const int64_t register_tiles =
        ceil_div(band_of(place, band).size(), kernels.mr) * ceil_div(place.columns.size(), kernels.nr);
    const auto block = [&](const Place& at, int64_t first, int64_t next_band) {
      const Range rows = band_of(at, next_band);
      return ahead_of(p.a, p.a_row, first, std::min(step, at.group.end - first), rows.begin, rows.size(),
                      register_tiles);
    };
    if (band + 1 < bands_of(place)) return block(place, r, band + 1);
    if (r + step < place.group.end) return block(place, r + step, 0);
    if (next_tile < 0) return {};
    const Place next = place_of(next_tile);
    return block(next, next.group.begin, 0);
  };

  const bool at_lines = n % 16 == 0 && reinterpret_cast<uintptr_t>(p.out) % 64 == 0,
             streams = !p.accumulate && at_lines && p.groups * m * n * 4 > kMostCached;

  // The rows of the result after [i, i + count).
  const View out_rows(p.out, {p.groups * m, n}, DType::kF32);
  const auto out_after = [&](const Place& place, int64_t i, int64_t count) -> Ahead {
    const int64_t first = i + count, register_tiles = count / kernels.mr * ceil_div(place.columns.size(), kernels.nr);
    if (first >= place.rows.end) return {};
    return ahead_of(out_rows, nullptr, place.e * m + first, std::min(count, place.rows.end - first),
                    place.columns.begin, place.columns.size(), register_tiles);
  };

  for_tiles(*ctx.pool, groups * blocks, 1, [&](int64_t tile, int64_t next_tile, int thread) {
    const Workspace space = workspaces.of(thread);
    const Place place = place_of(tile);
    const auto& [e, group, rows_of, j] = place;
    if (rows_of.size() == 0 || j.size() == 0) return;
    // Whole panels go from registers to the result; the last, partial one goes through `sums`.
    const int64_t whole = j.size() / kernels.nr, stored = whole * kernels.nr;
    // Few blocks of words of a small result: their sums wait in the caches, and memory is written once.
    const bool keeps = streams && group.size() > step && group.size() <= 4 * step && rows_of.size() <= kept_rows;
    const int64_t sums_stride = keeps ? ceil_div(j.size(), kernels.nr) * kernels.nr : kernels.nr;
    for (int64_t r = group.begin; r < group.end; r += step) {
      const int64_t count = std::min(step, group.end - r), words = ceil_div(count, kernels.unit);
      const bool first = !keeps || r == group.begin, last = r + step >= group.end;
      const bool adds = p.accumulate || (r > group.begin && !keeps);
      const Finish finish = keeps && !last    ? Finish::kKeep
                            : adds            ? Finish::kAddF32
                            : streams && last ? Finish::kStreamF32
                                              : Finish::kStoreF32;
      const Block b = block_of(p.b, p.b_row, r, count, j.begin, j.size(), space.rows);
      pack_b(b.data, b.stride, j.size(), count, space.b, b_panel);
      for (int64_t band = 0; band < bands_of(place); ++band) {
        const int64_t i = band_of(place, band).begin, height = band_of(place, band).size();
        float* out = p.out + (e * m + i) * n + j.begin;
        const Block a = block_of(p.a, p.a_row, r, count, i, height, space.rows);
        pack_a(a.data, a.stride, height, count, space.a, a_panel);
        Ahead ahead = a_after(place, r, band, next_tile);
        // Few words: the result costs more than the products. It is gone through along its rows, the next ones fetched.
        const bool along_rows = adds && words * j.size() * 4 <= kBandBytes;
        const int64_t few = along_rows ? 2 * kernels.mr : height;
        float* sums = keeps ? space.sums + (i - rows_of.begin) * sums_stride : space.sums;
        for (int64_t row = 0; whole > 0 && row < height; row += few) {
          if (along_rows) ahead = out_after(place, i + row, few);
          kernels.tile(space.a + row / kernels.mr * a_panel, a_panel, space.b, b_panel, sums, sums_stride,
                       std::min(few, height - row), whole, words, first, finish, out + row * n, n, &ahead);
        }
        if (stored < j.size()) {
          float* part = keeps ? sums + stored : sums;
          kernels.tile(space.a, a_panel, space.b + whole * b_panel, b_panel, part, sums_stride, height, 1, words, first,
                       Finish::kKeep, nullptr, 0, &ahead);
          if (!keeps || last)
            kernels.store[kSourceF32](part, sums_stride, height, j.size() - stored, nullptr, out + stored, n, adds);
        }
      }
    }
  });
}

void add_column_sums(const Context& ctx, Isa isa, const View& x, float* sums) {
  if (ctx.dry_run) return;
  const auto add = product_kernels(isa, false).column_sums[source_of(x.dtype)];
  ctx.pool->parallel_for(x.cols(), 64, [&](int64_t begin, int64_t end, int) {
    add(at(x.data, begin, x.dtype), x.row_stride, x.rows(), end - begin, sums + begin);
  });
}

}  // namespace concerto::cpu

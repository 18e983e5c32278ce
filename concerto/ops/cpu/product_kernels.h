// The inner loops of matrix products, built once per instruction set: packing, the register tile, and the write-out.
// product.h drives them.
//
// Everything is counted in *words* of four bytes: a word is one f32 (`unit` 1) or a pair of bf16 that are neighbours in
// the reduction (`unit` 2). An element of the result is a sum over blocks of kTileWords words in order, each summed in
// order from zero. Nothing depends on which row of a tile an element is in: that is what makes products row-invariant.
#pragma once

#include <cstdint>

#include "concerto/ops/cpu/isa.h"

namespace concerto::cpu {

// Words of the reduction that one tile call handles: a panel of B of this length fits the first cache level.
constexpr int64_t kTileWords = 256;
// Panels lie this many words further apart than they are long, so that the same place of several panels does not fall
// into one cache set.
constexpr int64_t kPanelGap = 16;

// What products read. bf16 data comes as its bits.
enum Source { kSourceF32 = 0, kSourceBF16 = 1 };

// Where the sums of a tile go: to c, or rounded once to out. kStreamF32 stores past the caches what is read next much
// later; out and its rows begin at cache lines.
enum class Finish { kKeep, kStoreF32, kStreamF32, kStoreBF16, kAddF32 };

// Memory that is read next. `tile` may fetch it to the second cache level while it multiplies: of the rows some lines
// for every register tile, of the run a line for every word.
struct Ahead {
  const char* data = nullptr;
  const int32_t* index = nullptr;  // row i of them is row index[i] of data; or null: row i
  int64_t stride = 0, bytes = 0;   // from row to row, and what is read of each
  int64_t rows = 0, row = 0;       // how many, and the first that is not fetched
  int64_t byte = 0;                // of that row, already fetched
  int64_t lines = 0;               // for every register tile
  const char* run = nullptr;       // the part of it that is not fetched
  int64_t run_bytes = 0;
};

struct ProductKernels {
  int unit;  // elements in a word
  int mr;    // rows of a register tile
  int nr;    // columns of a register tile: B panels are this wide

  // Packing, by source type; null where this table cannot read it. Strides in elements, k in elements; the last word of
  // a row is filled up with zero. Panels are `panel_words` apart, at least words * width + kPanelGap, and for A
  // kTileWords * mr + kPanelGap. A [rows, k] -> panels [rows / mr], [words][mr] or in an order of the table's own; what
  // a last, partial panel holds beyond its rows is undefined.
  void (*pack_a_rows[2])(const void* a, int64_t stride, int64_t rows, int64_t k, uint32_t* packed, int64_t panel_words);
  // A^T [k, rows] -> the same.
  void (*pack_a_cols[2])(const void* a, int64_t stride, int64_t rows, int64_t k, uint32_t* packed, int64_t panel_words);
  // B^T [n, k] -> panels [n / nr] of [words][nr], columns filled up with zeros.
  void (*pack_b_rows[2])(const void* b, int64_t stride, int64_t n, int64_t k, uint32_t* packed, int64_t panel_words);
  // B [k, n] -> the same.
  void (*pack_b_cols[2])(const void* b, int64_t stride, int64_t n, int64_t k, uint32_t* packed, int64_t panel_words);

  // The two for bf16 and panels at cache lines that are read much later: they may store past the caches, so that a
  // caller ends with a store fence. Null where words are single elements.
  void (*stream_b_rows)(const void* b, int64_t stride, int64_t n, int64_t k, uint32_t* packed, int64_t panel_words);
  void (*stream_b_cols)(const void* b, int64_t stride, int64_t n, int64_t k, uint32_t* packed, int64_t panel_words);

  // c[rows, panels * nr] (+)= A B over `words` <= kTileWords words; `first` overwrites c. The last words of a reduction
  // may go on to `out` instead, as `finish` says; c is then only read, and not at all if the last words are also the
  // first. `ahead` may be null.
  void (*tile)(const uint32_t* a, int64_t a_panel_words, const uint32_t* b, int64_t b_panel_words, float* c,
               int64_t c_stride, int64_t rows, int64_t panels, int64_t words, bool first, Finish finish, void* out,
               int64_t out_stride, Ahead* ahead);

  // The same with A as it lies in memory: rows of whole words, a_stride bytes apart. Null where tiles want it packed.
  void (*tile_rows)(const char* a, int64_t a_stride, const uint32_t* b, int64_t b_panel_words, float* c,
                    int64_t c_stride, int64_t rows, int64_t panels, int64_t words, bool first, Finish finish, void* out,
                    int64_t out_stride, Ahead* ahead);

  // out = c + bias (+ out), rounded once; bias may be null. By the type of out.
  void (*store[2])(const float* c, int64_t c_stride, int64_t rows, int64_t cols, const float* bias, void* out,
                   int64_t out_stride, bool accumulate);
  // sums[cols] += the column sums of x [rows, cols], in row order in blocks of 64 rows.
  void (*column_sums[2])(const void* x, int64_t stride, int64_t rows, int64_t cols, float* sums);
};

// f32 arithmetic, from f32 and bf16 sources. The table of each level; null where this build has none.
const ProductKernels* product_kernels_generic();
const ProductKernels* product_kernels_avx2();
const ProductKernels* product_kernels_avx512();
// bf16 pairs into f32 sums, from bf16 sources only.
const ProductKernels* product_kernels_avx512_bf16();
// The same on matrix tiles.
const ProductKernels* product_kernels_amx_bf16();

// The table for a level, and for sources that are all bf16 if `bf16`.
const ProductKernels& product_kernels(Isa isa, bool bf16);

}  // namespace concerto::cpu

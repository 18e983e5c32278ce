// Products over groups of rows, on the kernels of product_kernels.h. The backend's own dense and grouped products and
// the router's are all one of these two.
//
// Work is cut into tiles that threads take as they get free. A tile packs what it reads into its thread's scratch (the
// packed weights stay there for the next tile of the same group and columns), but for weights that are kept packed and
// rows of whole words; so scratch is a few MB a thread, whatever the number of groups. Tile sizes follow shape and thread count and change no bit of the result.
#pragma once

#include "concerto/ops/context.h"
#include "concerto/ops/cpu/isa.h"

namespace concerto::cpu {

// out[r] = a[r] B_e + bias (+ out[r]) for the rows r of group e. Row-invariant.
struct RowProduct {
  View a;                          // [R, K] f32 or bf16, strided rows; with a_row: row r is row a_row[r] of it
  bool gathers = false;            // whether there is an a_row: in a dry run it has no address
  const int32_t* a_row = nullptr;  // [R] or null
  const void* b = nullptr;         // [groups, N, K] if reduce_rows is false, else [groups, K, N]; dense
  const void* packed = nullptr;    // b as weight_packing.h packs it, or null; b is then not read
  DType b_type = DType::kF32;
  bool reduce_rows = false;
  int64_t n = 0;
  const int32_t* offsets = nullptr;  // [groups + 1], or null: one group of all rows
  int64_t groups = 1;
  const float* bias = nullptr;  // [N] or null
  View out;                     // [R, N] f32 or bf16, strided rows
  bool accumulate = false;
};
void row_product(const Context& ctx, Isa isa, const RowProduct& p);

// out_e (+)= A_e^T B_e over the rows of group e, in row order. A group without rows gives zeros.
struct WeightProduct {
  View a;  // [R, M] f32 or bf16, strided rows; with a_row: row r is row a_row[r] of it
  View b;  // [R, N], likewise with b_row
  bool gathers = false;
  const int32_t *a_row = nullptr, *b_row = nullptr;  // [R] or null
  int64_t rows = 0;                                  // R
  const int32_t* offsets = nullptr;
  int64_t groups = 1;
  float* out = nullptr;  // [groups, M, N] dense
  bool accumulate = true;
};
void weight_product(const Context& ctx, Isa isa, const WeightProduct& p);

// sums[c] += sum over rows of x[r, c], in row order in blocks of 64.
void add_column_sums(const Context& ctx, Isa isa, const View& x, float* sums);

}  // namespace concerto::cpu

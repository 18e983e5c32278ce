// The experts' product: rows sorted by expert, expert e owns rows [offsets[e], offsets[e+1]), each group times its own
// matrix. Ragged, empty groups cost nothing. Row-invariant: row i of the result depends on row i, its matrix and K
// only, never on the number of rows, threads or the grouping. Weight gradients sum over rows in row order in fixed
// blocks of rows counted from the group's first row.
//
// With `row_token` the rows of one operand need not be copied to their experts first: row r is row row_token[r] of [T,
// ...]. The result is the same, bit for bit, as if they had been gathered (permute.h).
#pragma once

#include "concerto/ops/packed_weight.h"

namespace concerto {

struct GroupedLinearForward {
  View x;                    // [R, K] compute, or [T, K] with row_token
  View w;                    // [E, N, K] compute, dense
  View offsets;              // [E + 1] i32, offsets[0] = 0, offsets[E] <= R; rows beyond are not touched
  View y;                    // [R, N] compute
  View row_token;            // [R] i32, each in [0, T); or null
  PackedWeight packed = {};  // w, packed: w then has no memory
};
struct GroupedLinearBackwardInput {
  View dy;                   // [R, N] compute, or [T, N] with row_token
  View w;                    // [E, N, K] compute, dense
  View offsets;              // [E + 1] i32
  View dx;                   // [R, K] compute
  View row_token;            // [R] i32, or null
  PackedWeight packed = {};  // as above
};
struct GroupedLinearBackwardWeight {
  View x;                          // [R, K] compute, or [T, K] with x_row_token
  View dy;                         // [R, N] compute, or [T, N] with dy_row_token
  View offsets;                    // [E + 1] i32
  View dw;                         // [E, N, K] stat, dense
  View x_row_token, dy_row_token;  // [R] i32, or null; at most one of the two
  bool accumulate = true;          // dw += instead of dw =
};

struct GroupedLinearKernels {
  void (*forward)(const Context&, const GroupedLinearForward&) = nullptr;
  void (*backward_input)(const Context&, const GroupedLinearBackwardInput&) = nullptr;
  void (*backward_weight)(const Context&, const GroupedLinearBackwardWeight&) = nullptr;
  const WeightPacking* packing = nullptr;  // of bf16 weights; null: read as they are
};

void grouped_linear_forward(const Context& ctx, const GroupedLinearForward& args);
void grouped_linear_backward_input(const Context& ctx, const GroupedLinearBackwardInput& args);
void grouped_linear_backward_weight(const Context& ctx, const GroupedLinearBackwardWeight& args);

}  // namespace concerto

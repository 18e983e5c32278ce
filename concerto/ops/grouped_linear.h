// The experts' product: rows sorted by expert, expert e owns rows [offsets[e], offsets[e+1]), each group times its own
// matrix. Ragged, empty groups cost nothing. Row-invariant: row i of the result depends on row i, its matrix and K
// only, never on the number of rows, threads or the grouping. Weight gradients sum over rows in row order in fixed
// blocks of rows counted from the group's first row.
#pragma once

#include "concerto/ops/context.h"

namespace concerto {

struct GroupedLinearForward {
  View x;        // [R, K] compute
  View w;        // [E, N, K] compute, dense
  View offsets;  // [E + 1] i32, offsets[0] = 0, offsets[E] <= R; rows beyond are not touched
  View y;        // [R, N] compute
};
struct GroupedLinearBackwardInput {
  View dy;       // [R, N] compute
  View w;        // [E, N, K] compute, dense
  View offsets;  // [E + 1] i32
  View dx;       // [R, K] compute
};
struct GroupedLinearBackwardWeight {
  View x;        // [R, K] compute
  View dy;       // [R, N] compute
  View offsets;  // [E + 1] i32
  View dw;       // [E, N, K] stat, dense, +=
};

struct GroupedLinearKernels {
  void (*forward)(const Context&, const GroupedLinearForward&) = nullptr;
  void (*backward_input)(const Context&, const GroupedLinearBackwardInput&) = nullptr;
  void (*backward_weight)(const Context&, const GroupedLinearBackwardWeight&) = nullptr;
};

void grouped_linear_forward(const Context& ctx, const GroupedLinearForward& args);
void grouped_linear_backward_input(const Context& ctx, const GroupedLinearBackwardInput& args);
void grouped_linear_backward_weight(const Context& ctx, const GroupedLinearBackwardWeight& args);

}  // namespace concerto

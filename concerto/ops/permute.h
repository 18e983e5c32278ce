// Tokens to expert-sorted rows and back. The plan sorts (token, slot) pairs by expert, stable in (token, slot) order,
// and is made once a micro-batch; forward, backward and recompute all replay it.
#pragma once

#include "concerto/ops/context.h"

namespace concerto {

struct MakeDispatchPlan {
  View expert_ids;  // [T, K] i32, each in [0, E)
  View offsets;     // [E + 1] i32: rows of expert e are [offsets[e], offsets[e + 1])
  View row_token;   // [T * K] i32: the token of each row
  View row_of;      // [T, K] i32: the row of each (token, slot)
};
struct GatherRows {  // rows[r] = x[row_token[r]]
  View x;            // [T, H] compute
  View row_token;    // [R] i32
  View rows;         // [R, H] compute
};
struct GatherRowsBackward {  // dx[t] = sum over slots of drows[row_of[t, j]], in slot order, stat sum, one rounding
  View drows;                // [R, H] compute
  View row_of;               // [T, K] i32
  View dx;                   // [T, H] compute
};
struct CombineRows {  // y[t] = add[t] + sum over slots of weights[t, j] * rows[row_of[t, j]], stat sum, one rounding
  View rows;          // [R, H] compute
  View row_of;        // [T, K] i32
  View weights;       // [T, K] stat
  View add;           // [T, H] compute, or null
  View y;             // [T, H] compute
};
struct CombineRowsBackward {  // drows[row_of[t, j]] = weights[t, j] * dy[t]; dweights[t, j] = dot(dy[t], rows[row_of[t,
                              // j]])
  View dy;                    // [T, H] compute
  View rows;                  // [R, H] compute
  View row_of;                // [T, K] i32
  View weights;               // [T, K] stat
  View drows;                 // [R, H] compute; may be the same memory as rows
  View dweights;              // [T, K] stat
};

struct PermuteKernels {
  void (*make_plan)(const Context&, const MakeDispatchPlan&) = nullptr;
  void (*gather)(const Context&, const GatherRows&) = nullptr;
  void (*gather_backward)(const Context&, const GatherRowsBackward&) = nullptr;
  void (*combine)(const Context&, const CombineRows&) = nullptr;
  void (*combine_backward)(const Context&, const CombineRowsBackward&) = nullptr;
};

void make_dispatch_plan(const Context& ctx, const MakeDispatchPlan& args);
void gather_rows(const Context& ctx, const GatherRows& args);
void gather_rows_backward(const Context& ctx, const GatherRowsBackward& args);
void combine_rows(const Context& ctx, const CombineRows& args);
void combine_rows_backward(const Context& ctx, const CombineRowsBackward& args);

}  // namespace concerto

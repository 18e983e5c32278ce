// Tokens to expert-sorted rows and back. The plan sorts (token, slot) pairs by expert, stable in (token, slot) order,
// and is made once a micro-batch; forward, backward and recompute all replay it. The gradient of combine's rows is the
// plain gather of dy: the weights of the rows are in swiglu.h.
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
struct CombineRows {  // y[t] = residual[t] + add[t] + sum over slots of rows[row_of[t, j]], in slot order, stat sum,
                      // one rounding
  View rows;          // [R, H] compute
  View row_of;        // [T, K] i32
  View add;           // [T, H] compute, or null
  View residual;      // [T, H] compute, or null
  View y;             // [T, H] compute
};
struct ScatterSlots {  // rows[row_of[t, j]] = slots[t, j]: what a token has for each of its slots, to the rows
  View slots;          // [T, K] stat, dense
  View row_of;         // [T, K] i32
  View rows;           // [R] stat
};
struct GatherSlots {  // slots[t, j] = rows[row_of[t, j]]: and back
  View rows;          // [R] stat
  View row_of;        // [T, K] i32
  View slots;         // [T, K] stat, dense
};

struct PermuteKernels {
  void (*make_plan)(const Context&, const MakeDispatchPlan&) = nullptr;
  void (*gather)(const Context&, const GatherRows&) = nullptr;
  void (*gather_backward)(const Context&, const GatherRowsBackward&) = nullptr;
  void (*combine)(const Context&, const CombineRows&) = nullptr;
  void (*scatter_slots)(const Context&, const ScatterSlots&) = nullptr;
  void (*gather_slots)(const Context&, const GatherSlots&) = nullptr;
};

void make_dispatch_plan(const Context& ctx, const MakeDispatchPlan& args);
void gather_rows(const Context& ctx, const GatherRows& args);
void gather_rows_backward(const Context& ctx, const GatherRowsBackward& args);
void combine_rows(const Context& ctx, const CombineRows& args);
void scatter_slots(const Context& ctx, const ScatterSlots& args);
void gather_slots(const Context& ctx, const GatherSlots& args);

}  // namespace concerto

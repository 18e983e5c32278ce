// Rotary embedding of interleaved pairs (reference 2.3): dims (2j, 2j+1) of every head turn by position *
// theta^(-2j/d). In place, computed in the stat type. `inverse` turns back, which is the backward pass.
#pragma once

#include "concerto/ops/context.h"

namespace concerto {

struct Rope {
  View x;          // [T, heads * head_dim] compute, strided rows allowed
  View positions;  // [T] i32, each in [0, P)
  View cos_sin;    // [P, head_dim] stat: cos and sin of pair j at columns 2j and 2j + 1
  bool inverse = false;
};

struct RopeKernels {
  void (*apply)(const Context&, const Rope&) = nullptr;
};

void rope_apply(const Context& ctx, const Rope& args);

// Fills the table [P, head_dim] (f32 or f64); angles are taken in double.
void rope_fill_table(View cos_sin, double theta);

}  // namespace concerto

// act = silu(gate) * up over rows whose first half is gate and second half is up (reference 7.4: gate half first), each
// row times a weight of its own if `weights` are given. A routed expert weighs its rows here: down_proj is linear, so
// this is the weighted sum of its outputs.
#pragma once

#include "concerto/ops/context.h"

namespace concerto {

struct SwigluForward {
  View gate_up;  // [R, 2 * F] compute
  View weights;  // [R] stat, or null: all 1
  View act;      // [R, F] compute
};
struct SwigluBackward {
  View gate_up;   // [R, 2 * F] compute
  View weights;   // [R] stat, or null: all 1
  View dact;      // [R, F] compute
  View dgate_up;  // [R, 2 * F] compute; may be the same memory as gate_up
  View dweights;  // [R] stat: dot(dact, silu(gate) * up); given if weights are
  View act;       // [R, F] compute: what forward gave, made again; may be the same memory as dact; or null
};

struct SwigluKernels {
  void (*forward)(const Context&, const SwigluForward&) = nullptr;
  void (*backward)(const Context&, const SwigluBackward&) = nullptr;
};

void swiglu_forward(const Context& ctx, const SwigluForward& args);
void swiglu_backward(const Context& ctx, const SwigluBackward& args);

}  // namespace concerto

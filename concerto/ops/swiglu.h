// act = silu(gate) * up over rows whose first half is gate and second half is up (reference 7.4: gate half first).
#pragma once

#include "concerto/ops/context.h"

namespace concerto {

struct SwigluForward {
  View gate_up;  // [R, 2 * F] compute
  View act;      // [R, F] compute
};
struct SwigluBackward {
  View gate_up;   // [R, 2 * F] compute
  View dact;      // [R, F] compute
  View dgate_up;  // [R, 2 * F] compute; may be the same memory as gate_up
};

struct SwigluKernels {
  void (*forward)(const Context&, const SwigluForward&) = nullptr;
  void (*backward)(const Context&, const SwigluBackward&) = nullptr;
};

void swiglu_forward(const Context& ctx, const SwigluForward& args);
void swiglu_backward(const Context& ctx, const SwigluBackward& args);

}  // namespace concerto

// RMSNorm (reference 2.2): y = w * x * rsqrt(mean(x^2) + eps), in the stat type with one rounding at the end, as
// Paddle's fused kernels do it; Hugging Face rounds before the product with w as well, so that last bits may differ.
// backward_input: with g = dy * w, dx = rstd * (g - x * rstd^2 * mean(g * x)) + residual.
#pragma once

#include "concerto/ops/context.h"

namespace concerto {

struct RmsNormForward {
  View x;  // [T, H] compute
  View w;  // [H] stat
  double eps = 1e-5;
  View y;     // [T, H] compute
  View rstd;  // [T] stat
};
struct RmsNormBackwardInput {
  View dy;        // [T, H] compute
  View x;         // [T, H] compute
  View w;         // [H] stat
  View rstd;      // [T] stat
  View residual;  // [T, H] compute, added to dx; may be null; may be the same memory as dx
  View dx;        // [T, H] compute
  View y;         // [T, H] compute: what forward gave, made again; or null
};
struct RmsNormBackwardWeight {
  View dy;    // [T, H] compute
  View x;     // [T, H] compute
  View rstd;  // [T] stat
  View dw;    // [H] stat, +=
};

struct RmsNormKernels {
  void (*forward)(const Context&, const RmsNormForward&) = nullptr;
  void (*backward_input)(const Context&, const RmsNormBackwardInput&) = nullptr;
  void (*backward_weight)(const Context&, const RmsNormBackwardWeight&) = nullptr;
};

void rms_norm_forward(const Context& ctx, const RmsNormForward& args);
void rms_norm_backward_input(const Context& ctx, const RmsNormBackwardInput& args);
void rms_norm_backward_weight(const Context& ctx, const RmsNormBackwardWeight& args);

}  // namespace concerto

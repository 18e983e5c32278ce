// The parameters of one linear map and its three products; what the segments are built from.
#pragma once

#include "concerto/layers/segment.h"

namespace concerto {

struct LinearLayer {
  const ParameterStore* store = nullptr;
  ParamRef w;     // [N, K]
  ParamRef bias;  // [N] or empty

  int64_t out_features() const { return w.shape[0]; }

  void forward(const Context& ctx, View x, View y) const {
    linear_forward(
        ctx, {.x = x, .w = store->weight(w), .bias = store->weight(bias), .y = y, .packed = store->packed(ctx, w)});
  }
  void backward_input(const Context& ctx, View dy, View dx, bool accumulate = false) const {
    linear_backward_input(
        ctx, {.dy = dy, .w = store->weight(w), .dx = dx, .accumulate = accumulate, .packed = store->packed(ctx, w)});
  }
  void backward_weight(const Context& ctx, View x, View dy) const {
    const ProductGradient dw = store->product_gradient(ctx, w);
    linear_backward_weight(ctx,
                           {.x = x, .dy = dy, .dw = dw.view, .db = store->grad(bias), .accumulate = dw.accumulate});
  }
};

struct NormLayer {
  const ParameterStore* store = nullptr;
  ParamRef w;  // [H]
  double eps = 1e-5;

  void forward(const Context& ctx, View x, View y, View rstd) const {
    rms_norm_forward(ctx, {.x = x, .w = store->weight(w), .eps = eps, .y = y, .rstd = rstd});
  }
  // `y`: forward's result again, or null.
  void backward_input(const Context& ctx, View dy, View x, View rstd, View residual, View dx, View y = {}) const {
    rms_norm_backward_input(
        ctx, {.dy = dy, .x = x, .w = store->weight(w), .rstd = rstd, .residual = residual, .dx = dx, .y = y});
  }
  void backward_weight(const Context& ctx, View dy, View x, View rstd) const {
    rms_norm_backward_weight(ctx, {.dy = dy, .x = x, .rstd = rstd, .dw = store->grad(w)});
  }
};

}  // namespace concerto

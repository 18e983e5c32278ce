// The parameters of one linear map and its three products; what the segments are built from.
//
// Under tensor parallelism a map is cut by its outputs (q, k, v, gate, up, head) or by its inputs (o, down). It then works
// on all rows [T]; where ranks hold shares of a sum, own rows [T_r] of it come out: of y when inputs are cut
// (forward_summed), of dx when outputs are (backward_input_summed).
#pragma once

#include "concerto/layers/tensor_shard.h"

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
  // `own_dy`: the rows that a bias sees which was added after a sum over ranks; null: all of dy.
  void backward_weight(const Context& ctx, View x, View dy, View own_dy = {}) const {
    const ProductGradient dw = store->product_gradient(ctx, w);
    linear_backward_weight(
        ctx,
        {.x = x, .dy = dy, .dw = dw.view, .db = store->grad(bias), .accumulate = dw.accumulate, .bias_dy = own_dy});
  }

  // Own rows of the sum over ranks: y [T_r, N] = sum x w^T + bias, x [T, K of the rank].
  void forward_summed(const SegmentContext& ctx, const TensorShard& shard, View x, View y) const {
    if (!shard.exchange) return forward(ctx.ops, x, y);
    ArenaScope scope(*ctx.ops.scratch);
    const View partial = ctx.ops.scratch->take({x.rows(), out_features()}, store->stat());
    linear_forward(ctx.ops,
                   {.x = x, .w = store->weight(w), .bias = {}, .y = partial, .packed = store->packed(ctx.ops, w)});
    sum_tokens(ctx, shard, {.partial = partial, .bias = store->weight(bias), .own = y});
  }
  // dx [T_r, K] = sum dy w, dy [T, N of the rank].
  void backward_input_summed(const SegmentContext& ctx, const TensorShard& shard, View dy, View dx,
                             bool accumulate = false) const {
    if (!shard.exchange) return backward_input(ctx.ops, dy, dx, accumulate);
    ArenaScope scope(*ctx.ops.scratch);
    const View partial = ctx.ops.scratch->take({dy.rows(), dx.cols()}, store->stat());
    backward_input(ctx.ops, dy, partial);
    sum_tokens(ctx, shard, {.partial = partial, .bias = {}, .own = dx, .accumulate = accumulate});
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

// The table of token embeddings, or a rank's slice of it.
struct EmbeddingLayer {
  EmbeddingLayer(const ParameterStore& store, const ModelConfig& config, const TensorShard& shard);
  // y [T_r, H]: own rows of table[ids], ids [T].
  void forward(const SegmentContext& ctx, View ids, View y) const;
  // dy [T, H]: all rows.
  void backward_weight(const SegmentContext& ctx, View ids, View dy) const;

  const ParameterStore* store;
  ParamRef table;
  int64_t begin = 0;  // first id of the slice
  int64_t skip_id;
  TensorShard shard;
};

}  // namespace concerto

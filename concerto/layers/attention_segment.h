// Pre-norm attention with its residual: hidden + o_proj(attention(rope(qkv(norm(hidden))))) (reference 2.2). q, k and v
// come from one product.
//
// Tensor parallel ranks hold some of the heads; attention sees all tokens. Gathered rows are kept from backward_input to
// backward_weight only: the normed rows are gathered twice rather than held from forward on, and backward_weight
// exchanges nothing, so that a schedule may place it anywhere.
#pragma once

#include "concerto/layers/linear_layer.h"

namespace concerto {

class AttentionSegment final : public Segment {
 public:
  // `prefix`: "model.layers.3." or "model.mtp_block.0."; `name`: the segment's; `layer`: number for observers and
  // caches. `cos_sin` [positions, head_dim] is the rope table, its first row the angle of position 0 (or of the shift,
  // for MTP).
  AttentionSegment(const ParameterStore& store, const ModelConfig& config, const std::string& prefix, std::string name,
                   int layer, View cos_sin, const TensorShard& shard = {});
  void forward(const SegmentContext& ctx, const Acts& in, Acts& out, Saved& saved) const override;
  void backward_input(const SegmentContext& ctx, const Acts& dout, Acts& din, Saved& saved) const override;
  void backward_weight(const SegmentContext& ctx, Saved& saved) const override;

 private:
  void attend_cached(const SegmentContext& ctx, View qkv, View attended) const;
  View q(View qkv) const { return qkv.cols_range(0, q_cols_); }
  View k(View qkv) const { return qkv.cols_range(q_cols_, kv_cols_); }
  View v(View qkv) const { return qkv.cols_range(q_cols_ + kv_cols_, kv_cols_); }
  View qk(View qkv) const { return qkv.cols_range(0, q_cols_ + kv_cols_); }

  NormLayer norm_;
  LinearLayer qkv_, out_;
  int64_t num_heads_, num_kv_heads_, head_dim_, q_cols_, kv_cols_;
  double scale_;
  View cos_sin_;
  TensorShard shard_;
};

}  // namespace concerto

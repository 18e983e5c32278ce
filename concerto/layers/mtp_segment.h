// Entry of a multi-token-prediction block (reference 5.4): u_t = proj([norm_emb(emb(x_{t+1+m})) ; norm_hid(h_t)]),
// embedding half first. The decoder layer and head that follow are the ordinary segments. h is the hidden state before
// the final norm, or for depth 0 after it (`mtp_hidden`).
#pragma once

#include "concerto/layers/linear_layer.h"

namespace concerto {

class MtpSegment final : public Segment {
 public:
  MtpSegment(const ParameterStore& store, const ModelConfig& config, int depth, const TensorShard& shard = {});
  void forward(const SegmentContext& ctx, const Acts& in, Acts& out, Saved& saved) const override;
  void backward_input(const SegmentContext& ctx, const Acts& dout, Acts& din, Saved& saved) const override;
  void backward_weight(const SegmentContext& ctx, Saved& saved) const override;

 private:
  View ids(const SegmentContext& ctx) const;
  NormLayer embedding_norm_, hidden_norm_;
  LinearLayer projection_;
  EmbeddingLayer table_;
  int depth_;
  bool from_normed_;
};

}  // namespace concerto

// Token embedding: hidden [T_r, H] = table[ids] (reference 2.2; no scaling, no position embedding).
#pragma once

#include "concerto/layers/linear_layer.h"

namespace concerto {

class EmbeddingSegment final : public Segment {
 public:
  EmbeddingSegment(const ParameterStore& store, const ModelConfig& config, const TensorShard& shard = {});
  void forward(const SegmentContext& ctx, const Acts& in, Acts& out, Saved& saved) const override;
  void backward_input(const SegmentContext& ctx, const Acts& dout, Acts& din, Saved& saved) const override;
  void backward_weight(const SegmentContext& ctx, Saved& saved) const override;

 private:
  EmbeddingLayer table_;
};

}  // namespace concerto

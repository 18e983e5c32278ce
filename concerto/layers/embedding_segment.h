// Token embedding: hidden [T, H] = table[ids] (reference 2.2; no scaling, no position embedding).
#pragma once

#include "concerto/layers/segment.h"

namespace concerto {

class EmbeddingSegment final : public Segment {
 public:
  EmbeddingSegment(const ParameterStore& store, const ModelConfig& config);
  void forward(const SegmentContext& ctx, const Acts& in, Acts& out, Saved& saved) const override;
  void backward_input(const SegmentContext& ctx, const Acts& dout, Acts& din, Saved& saved) const override;
  void backward_weight(const SegmentContext& ctx, Saved& saved) const override;

 private:
  const ParameterStore& store_;
  ParamRef table_;
  int64_t skip_id_;
};

}  // namespace concerto

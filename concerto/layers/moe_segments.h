// A MoE layer's second half as segments (reference 3.3, 3.4):
//   router   hidden -> normed, logits                                 (router_segments.h)
//   route    logits -> routing weights, dispatch plan                 (router_segments.h)
//   [shared  normed -> mlp]                                           (mlp_segment.h)
//   dispatch normed, routing weights -> rows sorted by expert and their weights
//   experts  rows -> weighted rows, one grouped product over all experts
//   combine  hidden + mlp + sum of rows -> hidden
// Rows go from segment to segment as they are, or as (matrix, row_source): a reader of the latter gathers as it reads.
// Dispatch and combine's gradient give the latter, so that a row is never copied on one rank; a segment between them
// that brings rows from elsewhere gives the former. Backward runs them in reverse: dispatch writes d normed, shared and
// router add to it. Where the experts live on several ranks: parallel/expert_segments.h.
#pragma once

#include "concerto/arch/shard.h"
#include "concerto/layers/linear_layer.h"

namespace concerto {

class DispatchSegment final : public Segment {
 public:
  DispatchSegment(const ModelConfig& config, int layer);
  void forward(const SegmentContext& ctx, const Acts& in, Acts& out, Saved& saved) const override;
  void backward_input(const SegmentContext& ctx, const Acts& dout, Acts& din, Saved& saved) const override;

 private:
  int64_t top_k_;
};

// The experts that `plan` gives this rank, each as wide as its slice; may be none. Offsets are theirs: [L + 1].
class ExpertsSegment final : public Segment {
 public:
  ExpertsSegment(const ParameterStore& store, const ModelConfig& config, const std::string& prefix, int layer,
                 const ShardPlan& plan = {});
  void forward(const SegmentContext& ctx, const Acts& in, Acts& out, Saved& saved) const override;
  void backward_input(const SegmentContext& ctx, const Acts& dout, Acts& din, Saved& saved) const override;
  void backward_weight(const SegmentContext& ctx, Saved& saved) const override;

 private:
  const ParameterStore& store_;
  ParamRef gate_up_, down_;  // [E, 2 F, H], [E, H, F]
  int64_t width_, experts_;
};

class CombineSegment final : public Segment {
 public:
  explicit CombineSegment(int layer, const TensorShard& shard = {});
  void forward(const SegmentContext& ctx, const Acts& in, Acts& out, Saved& saved) const override;
  void backward_input(const SegmentContext& ctx, const Acts& dout, Acts& din, Saved& saved) const override;

 private:
  void observe(const SegmentContext& ctx, const Acts& in, const Acts& out) const;
  TensorShard shard_;
};

}  // namespace concerto

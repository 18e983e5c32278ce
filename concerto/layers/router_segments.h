// The router of a MoE layer as two segments (reference 3.3-3.6, 4.1-4.3):
//   router  hidden -> normed, logits                 norm and fp32 product
//   route   logits -> routing weights, dispatch plan scores, choices, capacity, drops; counts and sums for the losses
// Plain softmax top-k takes the fused op of ops/router.h, any other router the ops of ops/routing.h one by one. Ids,
// slots and plan are made once a micro-batch, in Saved::keep; recompute makes the rest again.
#pragma once

#include <span>

#include "concerto/layers/linear_layer.h"

namespace concerto {

// The model's settings in the words of ops/routing.h.
Scoring scoring_of(const ModelConfig& config);
Gate gate_of(const ModelConfig& config);
DropOrder drop_order_of(const ModelConfig& config);

class RouterSegment final : public Segment {
 public:
  RouterSegment(const ParameterStore& store, const ModelConfig& config, const std::string& prefix, int layer);
  void forward(const SegmentContext& ctx, const Acts& in, Acts& out, Saved& saved) const override;
  void backward_input(const SegmentContext& ctx, const Acts& dout, Acts& din, Saved& saved) const override;
  void backward_weight(const SegmentContext& ctx, Saved& saved) const override;

 private:
  const ParameterStore& store_;
  NormLayer norm_;
  ParamRef w_;  // [E, H]
};

class RouteSegment final : public Segment {
 public:
  // `moe_index`: number of this layer among those of RouterStats.
  RouteSegment(const ParameterStore& store, const ModelConfig& config, const std::string& prefix, int layer,
               int moe_index);
  void forward(const SegmentContext& ctx, const Acts& in, Acts& out, Saved& saved) const override;
  void backward_input(const SegmentContext& ctx, const Acts& dout, Acts& din, Saved& saved) const override;

  // One routing unit over several micro-batches, in token order: choices and drops of all of them at once, before their
  // forward (with SegmentContext::routed). All counts are added to the first part's stats, the others' are zero.
  struct Part {
    View logits;  // [T, E]
    RouterStats* stats = nullptr;
    Saved* saved = nullptr;  // with `keep` set
  };
  void choose_together(const SegmentContext& ctx, std::span<const Part> parts) const;

 private:
  bool is_fused(const SegmentContext& ctx) const;
  void take_plan(int64_t tokens, Saved& saved) const;
  void choose(const SegmentContext& ctx, View logits, View probs, Saved& saved) const;
  void observe(const SegmentContext& ctx, Saved& saved) const;

  const ParameterStore& store_;
  ParamRef bias_;  // empty: choices look at none
  ModelConfig config_;
  bool plain_, may_drop_;
  int moe_index_;
};

}  // namespace concerto

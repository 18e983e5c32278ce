// The router of a MoE layer as two segments (reference 3.3-3.6, 4.1-4.3):
//   router  hidden -> normed, logits                 norm and fp32 product
//   route   logits -> routing weights, dispatch plan scores, choices, capacity, drops; counts and sums for the losses
// Plain softmax top-k takes the fused op of ops/router.h, any other router the ops of ops/routing.h one by one. Ids,
// slots and plan are made once a micro-batch, in Saved::keep; recompute makes the rest again.
//
// Tensor parallel ranks make logits and plan of their own tokens. Choices, counts and sums look at routing units, which
// know no such border: each rank gathers the logits and makes them for all tokens, with the same bits as the others.
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
  RouterSegment(const ParameterStore& store, const ModelConfig& config, const std::string& prefix, int layer,
                const TensorShard& shard = {});
  void forward(const SegmentContext& ctx, const Acts& in, Acts& out, Saved& saved) const override;
  void backward_input(const SegmentContext& ctx, const Acts& dout, Acts& din, Saved& saved) const override;
  void backward_weight(const SegmentContext& ctx, Saved& saved) const override;

 private:
  const ParameterStore& store_;
  NormLayer norm_;
  ParamRef w_;  // [E, H]
  TensorShard shard_;
};

class RouteSegment final : public Segment {
 public:
  // `moe_index`: number of this layer among those of RouterStats.
  RouteSegment(const ParameterStore& store, const ModelConfig& config, const std::string& prefix, int layer,
               int moe_index, const TensorShard& shard = {});
  void forward(const SegmentContext& ctx, const Acts& in, Acts& out, Saved& saved) const override;
  void backward_input(const SegmentContext& ctx, const Acts& dout, Acts& din, Saved& saved) const override;

  // One routing unit over several micro-batches, in token order: choices and drops of all of them at once, before their
  // forward (with SegmentContext::routed). All counts are added to the first part's stats, the others' are zero.
  struct Part {
    View logits;                     // [T_r, E]
    const Tokens* tokens = nullptr;  // the micro-batch's
    RouterStats* stats = nullptr;
    Saved* saved = nullptr;  // with `keep` set
  };
  // The data ranks whose micro-batches belong to the unit too, in order: all make the same choices.
  struct DataRanks {
    const RowExchange* exchange = nullptr;  // null: one data rank
    int64_t tokens = 0, begin = 0;          // of the unit; before this rank's
    bool first = true;                      // of the ranks
  };
  void choose_together(const SegmentContext& ctx, std::span<const Part> parts, const DataRanks& ranks) const;

 private:
  View joined_logits(const SegmentContext& ctx, std::span<const Part> parts, const DataRanks& ranks) const;
  struct Rows {                        // of T or T_r tokens
    View logits, probs, weights, lse;  // [T, E], [T, E], [T, K], [T]
    View expert_ids, slots, kept_ids;  // [T, K]; slots and kept_ids only where choices may be dropped
  };
  struct State {
    Rows rows;                        // the rank's own; ids and slots in Saved::keep
    View offsets, row_token, row_of;  // the plan, in Saved::keep
  };

  bool is_fused(const SegmentContext& ctx) const;
  void take_choices(int64_t tokens, Arena& arena, Rows& rows) const;
  void take_plan(int64_t tokens, Saved& saved) const;
  void take_values(const SegmentContext& ctx, int64_t tokens, DType stat, Arena& arena, Rows& rows) const;
  Rows gather(const SegmentContext& ctx, const Rows& own) const;
  void keep_own(const SegmentContext& ctx, const Rows& all, const Rows& own) const;
  View own_units(const SegmentContext& ctx) const;
  RouterStats unread_stats(const SegmentContext& ctx) const;
  void score(const SegmentContext& ctx, const Rows& rows, const RouterStats& stats, View unit_offsets) const;
  void choose(const SegmentContext& ctx, const Rows& rows) const;
  void observe(const SegmentContext& ctx, Saved& saved) const;

  const ParameterStore& store_;
  ParamRef bias_;  // empty: choices look at none
  ModelConfig config_;
  bool plain_, may_drop_;
  int moe_index_;
  TensorShard shard_;
};

}  // namespace concerto

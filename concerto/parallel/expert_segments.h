// Expert parallelism: the segments of a MoE layer whose experts live on several ranks. In place of the one dispatch
// segment of layers/moe_segments.h stand
//   dispatch_start   counts are exchanged and the plan is made; rows and their routing weights leave
//   [shared experts] work while rows travel
//   dispatch_finish  rows are there, read where they lie (row_source), sorted by (expert, sender, (token, slot))
//   experts          of this rank: ExpertsSegment
//   return           rows go back to their tokens
//   combine          CombineSegment, as on one rank
// Backward, from below: return brings the gradient rows to the experts, dispatch_finish sends those of the inputs and
// of the weights back, the shared experts work while they travel, dispatch_start sums them up.
//
// A row is computed by the same product whoever computes it, and slots are added in the same order, so with etp = 1 the
// layer's output is bit-equal to one rank's. With etp > 1 every row comes back once from each slice of its expert, and
// all are added in the stat type and rounded once.
//
// Rounds: with a bound on the rows that a rank takes at once (ExpertGroup::most_rows), those of later rounds are brought,
// computed and sent back by the return segment, in memory of the call: nothing of them is kept, and backward brings them
// again and makes their weight gradients at once. Every row is computed once all the same and slots add up as before, so
// the output does not change by a bit; the sums of weight gradients have another order.
//
// Tickets: the record of dispatch_start (ExpertTravel, in its Saved) holds their numbers between start and finish, and
// the communicator is the segments' own.
#pragma once

#include <memory>
#include <vector>

#include "concerto/layers/moe_segments.h"
#include "concerto/parallel/expert_layer.h"

namespace concerto {

class DispatchStartSegment final : public Segment {
 public:
  explicit DispatchStartSegment(std::shared_ptr<const ExpertLayer> layer);
  void forward(const SegmentContext& ctx, const Acts& in, Acts& out, Saved& saved) const override;
  void backward_input(const SegmentContext& ctx, const Acts& dout, Acts& din, Saved& saved) const override;

 private:
  void make_plan(const SegmentContext& ctx, const Acts& in, Saved& saved) const;
  std::shared_ptr<const ExpertLayer> layer_;
};

class DispatchFinishSegment final : public Segment {
 public:
  explicit DispatchFinishSegment(std::shared_ptr<const ExpertLayer> layer);
  void forward(const SegmentContext& ctx, const Acts& in, Acts& out, Saved& saved) const override;
  void backward_input(const SegmentContext& ctx, const Acts& dout, Acts& din, Saved& saved) const override;

 private:
  std::shared_ptr<const ExpertLayer> layer_;
};

class ReturnSegment final : public Segment {
 public:
  // `experts`: those of the same unit, which the later rounds run.
  ReturnSegment(std::shared_ptr<const ExpertLayer> layer, const ExpertsSegment& experts);
  void forward(const SegmentContext& ctx, const Acts& in, Acts& out, Saved& saved) const override;
  void backward_input(const SegmentContext& ctx, const Acts& dout, Acts& din, Saved& saved) const override;

 private:
  // A later round, in scratch memory.
  struct Later {
    ExpertRound plan;
    Acts out;     // of the experts
    Saved saved;  // likewise
  };
  void bring(const SegmentContext& ctx, const ExpertTravel& travel, int64_t round, Later& later) const;
  void send_back(const SegmentContext& ctx, const ExpertTravel& travel, const ExpertLayer::Round& round, View sorted,
                 View back, const char* what) const;
  void forward_later(const SegmentContext& ctx, const ExpertTravel& travel, int64_t round, View back) const;
  void backward_later(const SegmentContext& ctx, const ExpertTravel& travel, int64_t round, View sent) const;

  std::shared_ptr<const ExpertLayer> layer_;
  const ExpertsSegment& experts_;
};

// Appends the segments from dispatch to combine, in their order. `shared`: the shared experts' segment, or null. `shard`:
// who shares the tokens of a micro-batch, for those who watch.
void add_expert_segments(std::vector<std::unique_ptr<Segment>>& segments, const ParameterStore& store,
                         const ModelConfig& config, const std::string& prefix, int layer, const ExpertGroup& group,
                         std::unique_ptr<Segment> shared, const TensorShard& shard = {});

}  // namespace concerto

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
// Tickets: the record of dispatch_start (ExpertTravel, in its Saved) holds their numbers between start and finish, and
// the communicator is the segments' own.
#pragma once

#include <memory>
#include <vector>

#include "concerto/comm/communicator.h"
#include "concerto/layers/moe_segments.h"
#include "concerto/parallel/expert_plan.h"

namespace concerto {

// The ep * etp ranks (MeshGroup::kDispatch, in order of rank) that hold all experts once, and which experts are where.
struct ExpertGroup {
  Communicator* dispatch = nullptr;
  ShardPlan plan;
};

// What the segments of one layer share: who they talk to and who holds what.
struct ExpertLayer {
  Communicator* comm = nullptr;
  ShardPlan plan;
  ExpertPlaces places;
  int64_t local = 0;  // experts here
  int64_t top_k = 0;
  int layer = 0;

  ExpertLayer(const ModelConfig& config, const ExpertGroup& group, int layer);

  void exchange_counts(const SegmentContext& ctx, ExpertTravel& travel) const;
  // From this rank's tokens to the experts, and back: rows of any type. The views are the operation's own until wait():
  // `sent` [kept or more, ...], `received` [R, ...], `back` [back_rows, ...]. Gives the ticket's number. Lists of views
  // come from `passing`; `what` names the operation in errors.
  int64_t start_to_experts(const SegmentContext& ctx, const ExpertTravel& travel, View sent, View received,
                           Arena& passing, const char* what) const;
  int64_t start_to_tokens(const SegmentContext& ctx, const ExpertTravel& travel, View received, View back,
                          Arena& passing, const char* what) const;
  void wait(const SegmentContext& ctx, int64_t ticket, const char* what) const;

 private:
  // Two lists of one view a rank. Null in a dry run.
  struct Lists {
    View *to, *from;
  };
  Lists take_lists(Arena& arena) const;
  int64_t start(const Lists& lists, const char* what) const;
};

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
  explicit ReturnSegment(std::shared_ptr<const ExpertLayer> layer);
  void forward(const SegmentContext& ctx, const Acts& in, Acts& out, Saved& saved) const override;
  void backward_input(const SegmentContext& ctx, const Acts& dout, Acts& din, Saved& saved) const override;

 private:
  std::shared_ptr<const ExpertLayer> layer_;
};

// Appends the segments from dispatch to combine, in their order. `shared`: the shared experts' segment, or null.
void add_expert_segments(std::vector<std::unique_ptr<Segment>>& segments, const ParameterStore& store,
                         const ModelConfig& config, const std::string& prefix, int layer, const ExpertGroup& group,
                         std::unique_ptr<Segment> shared);

}  // namespace concerto

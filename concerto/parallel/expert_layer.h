// The communication of a MoE layer whose experts live on several ranks: what the segments of expert_segments.h share.
#pragma once

#include "concerto/comm/communicator.h"
#include "concerto/layers/segment.h"
#include "concerto/parallel/expert_plan.h"

namespace concerto {

// The ep * etp ranks (MeshGroup::kDispatch, in order of rank) that hold all experts once, and which experts are where.
struct ExpertGroup {
  Communicator* dispatch = nullptr;
  ShardPlan plan;
  int64_t most_rows = 0;  // that a rank takes in a round, at least one from each rank; 0: all at once
};

// Who the segments of one layer talk to and who holds what.
struct ExpertLayer {
  Communicator* comm = nullptr;
  ShardPlan plan;
  ExpertPlaces places;
  int64_t local = 0;  // experts here
  int64_t top_k = 0, most_rows = 0;
  int layer = 0;

  ExpertLayer(const ModelConfig& config, const ExpertGroup& group, int layer);

  // Fills the plan's recv_counts and rounds. Not in a dry run.
  void exchange_counts(const SegmentContext& ctx, ExpertTravel& travel) const;
  // In a dry run: the rows to plan for in a round, and how many rounds there are, where ranks have as many tokens.
  int64_t plan_rows(const SegmentContext& ctx, int64_t tokens, ExpertTravel& travel) const;
  // The rows of this rank's tokens and their weights, in the order in which they are sent.
  void gather_sent(const SegmentContext& ctx, ExpertTravel& travel, Arena& passing) const;
  // A round's rows from the tokens to the experts, and back; of any type. The views are the operation's own until
  // wait(): `sent` [kept or more, ...], `received` [R, ...], `back` [back_rows, ...]. Gives the ticket's number. Lists
  // of views come from `passing`; `what` names the operation in errors.
  struct Round {
    int64_t number;
    const ExpertRound& plan;
  };
  int64_t start_to_experts(const SegmentContext& ctx, const ExpertTravel& travel, const Round& round, View sent,
                           View received, Arena& passing, const char* what) const;
  int64_t start_to_tokens(const SegmentContext& ctx, const ExpertTravel& travel, const Round& round, View received,
                          View back, Arena& passing, const char* what) const;
  void wait(const SegmentContext& ctx, int64_t ticket, const char* what) const;

 private:
  // Two lists of one view a rank. Null in a dry run.
  struct Lists {
    View *to, *from;
  };
  Lists take_lists(Arena& arena) const;
  int64_t start(const Lists& lists, const char* what) const;
};

// Rows [begin, end), of a vector or a matrix.
View row_slice(View of, int64_t begin, int64_t end);

}  // namespace concerto

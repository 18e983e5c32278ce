// A pipeline stage: the model's segments in order, joined into units. A unit is what recompute works on and what
// gradient memory is recycled after: an attention half, an MLP or MoE half, or (recompute: full) a whole decoder layer.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "concerto/arch/shard.h"
#include "concerto/config/run_config.h"
#include "concerto/layers/router_segments.h"
#include "concerto/parallel/expert_segments.h"

namespace concerto {

struct Unit {
  std::string name;
  std::vector<std::unique_ptr<Segment>> segments;
  bool recompute = false;
  bool training_only = false;            // MTP: neither evaluation nor generation needs it
  const RouteSegment* routes = nullptr;  // routing_unit global: the unit's first segment, which wants all micro-batches
};

// What a unit keeps of one micro-batch.
struct UnitSaved {
  Acts input;
  std::vector<Saved> segments;
};

// The arenas a unit works on (layers/segment.h); `temporary` holds what recompute makes again.
struct UnitArenas {
  Arena* keep = nullptr;
  Arena* temporary = nullptr;
  Arena* backward = nullptr;
};

// Which part of the model a stage is, and what of it a rank holds.
struct StageLayout {
  StageSpan span;
  TensorShard shard = {};
  ExpertGroup experts = {};  // none: all experts are here
  static StageLayout whole(const ModelConfig& config) { return {.span = {0, config.num_hidden_layers, true, true}}; }
};

class Stage {
 public:
  // `max_positions`: rows of the rope table (longest document of the run, plus MTP depths). With routing_unit global
  // every MoE layer's router ends a unit of its own, so that all micro-batches of a step can meet behind it.
  Stage(const ModelConfig& config, const ParameterStore& store, Recompute recompute, int64_t max_positions,
        RoutingUnit routing_unit = RoutingUnit::kMicroBatch);
  Stage(const ModelConfig& config, const ParameterStore& store, Recompute recompute, int64_t max_positions,
        RoutingUnit routing_unit, const StageLayout& layout);
  // Of these units, whatever they do: tests of schedules.
  Stage(const ModelConfig& config, const StageSpan& span, std::vector<Unit> units);

  const ModelConfig& config() const { return config_; }
  const std::vector<Unit>& units() const { return units_; }
  RoutingUnit routing_unit() const { return routing_unit_; }
  // Units whose gradients (or, in evaluation, outputs) are read at the same time: a residual stream may pass one by.
  int unit_reach() const { return routing_unit_ == RoutingUnit::kGlobal ? 3 : 2; }
  const std::vector<int>& moe_layers() const { return moe_layers_; }  // layer number of each row of RouterStats
  int64_t first_moe_layer() const;                                    // MoE layers of the model before this stage
  const StageSpan& span() const { return layout_.span; }
  const TensorShard& shard() const { return layout_.shard; }
  int64_t rope_bytes() const { return rope_.bytes(); }

 private:
  void add_layer(const ParameterStore& store, int layer, Recompute recompute);
  void add_mtp(const ParameterStore& store, int depth, Recompute recompute);
  Unit& unit(std::string name, bool recompute);

  ModelConfig config_;
  RoutingUnit routing_unit_;
  StageLayout layout_;
  Buffer rope_;
  View cos_sin_;  // [positions, head_dim]
  std::vector<Unit> units_;
  std::vector<int> moe_layers_;
};

// Runs the unit's segments forward on `acts`, in place; for a recomputed unit only its input and routing plan stay.
void unit_forward(const Unit& unit, const SegmentContext& ctx, Acts& acts, UnitSaved& saved, const UnitArenas& arenas);
// Gradients of activations: `grads` from the unit's output to its input. A recomputed unit runs its forward again
// first.
void unit_backward_input(const Unit& unit, const SegmentContext& ctx, Acts& grads, UnitSaved& saved,
                         const UnitArenas& arenas);
void unit_backward_weight(const Unit& unit, const SegmentContext& ctx, UnitSaved& saved);

}  // namespace concerto

// A pipeline stage: the model's segments in order, joined into units. A unit is what recompute works on and what
// gradient memory is recycled after: an attention half, an MLP or MoE half, or (recompute: full) a whole decoder layer.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "concerto/config/run_config.h"
#include "concerto/layers/segment.h"

namespace concerto {

struct Unit {
  std::string name;
  std::vector<std::unique_ptr<Segment>> segments;
  bool recompute = false;
  bool training_only = false;  // MTP: neither evaluation nor generation needs it
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

class Stage {
 public:
  // `max_positions`: rows of the rope table (longest document of the run, plus MTP depths).
  Stage(const ModelConfig& config, const ParameterStore& store, Recompute recompute, int64_t max_positions);

  const ModelConfig& config() const { return config_; }
  const std::vector<Unit>& units() const { return units_; }
  const std::vector<int>& moe_layers() const { return moe_layers_; }  // layer number of each row of RouterStats
  int64_t rope_bytes() const { return rope_.bytes(); }

 private:
  void add_layer(const ParameterStore& store, int layer, Recompute recompute);
  void add_mtp(const ParameterStore& store, int depth, Recompute recompute);
  Unit& unit(std::string name, bool recompute);

  ModelConfig config_;
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

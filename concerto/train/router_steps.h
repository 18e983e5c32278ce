// What a step does to the routers beside the optimizer: the correction bias, and the orthogonal loss of their weights.
// Both are functions of the whole step, not of a micro-batch, so nothing of them is done twice by accumulation or
// recompute.
#pragma once

#include <vector>

#include "concerto/config/run_config.h"
#include "concerto/ops/context.h"
#include "concerto/optim/gradient_sync.h"
#include "concerto/params/parameter_store.h"

namespace concerto {

class RouterSteps {
 public:
  // Its scratch is its own, measured here: the executor's is measured on micro-batches. `moe_layers`: the rank's own
  // layers, by number. `sync`: with other ranks, or null.
  RouterSteps(ParameterStore& store, const RunConfig& config, const std::vector<int>& moe_layers, Context ctx,
              const GradientSync* sync = nullptr);

  // After backward, when gradients are summed at their owners, before their norm: with `orthogonal: loss` adds the
  // loss's gradient, once, at the owner. Writes the loss before its coefficient into each owned layer's place of
  // [MoE layers of the model]; zero without a coefficient.
  void orthogonal_loss(std::vector<double>& by_layer);
  // After the optimizer's step: with `orthogonal: step` the decoupled step; then the correction bias from this step's
  // counts [moe layers][experts], before drops.
  void after_optimizer(const std::vector<std::vector<int64_t>>& tokens_per_expert);

  bool adds_loss() const { return lambda_ > 0 && !decoupled_; }
  int64_t bytes() const { return scratch_.capacity(); }

 private:
  struct Layer {
    ParamRef w, bias;
    size_t row = 0;     // among the MoE layers of the model
    bool owned = true;  // the router's weight, by this rank
  };
  ParameterStore& store_;
  Context ctx_;
  Arena scratch_;
  std::vector<Layer> layers_;
  double lambda_, bias_rate_;
  bool decoupled_;
  int64_t blocks_;
  std::vector<int64_t> usage_;  // [E]
};

}  // namespace concerto

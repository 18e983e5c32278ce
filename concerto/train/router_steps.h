// What a step does to the routers beside the optimizer: the correction bias, and the orthogonal loss of their weights.
// Both are functions of the whole step, not of a micro-batch, so nothing of them is done twice by accumulation or
// recompute.
#pragma once

#include <vector>

#include "concerto/config/run_config.h"
#include "concerto/ops/context.h"
#include "concerto/params/parameter_store.h"

namespace concerto {

class RouterSteps {
 public:
  // Its scratch is its own, measured here: the executor's is measured on micro-batches.
  RouterSteps(ParameterStore& store, const RunConfig& config, const std::vector<int>& moe_layers, Context ctx);

  // After backward, before the gradient's norm: with `orthogonal: loss` adds the loss's gradient. Returns the loss
  // before its coefficient, summed over layers; 0 without a coefficient.
  double orthogonal_loss();
  // After the optimizer's step: with `orthogonal: step` the decoupled step; then the correction bias from this step's
  // counts [moe layers][experts], before drops.
  void after_optimizer(const std::vector<std::vector<int64_t>>& tokens_per_expert);

  bool adds_loss() const { return lambda_ > 0 && !decoupled_; }
  int64_t bytes() const { return scratch_.capacity(); }

 private:
  struct Layer {
    ParamRef w, bias;
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

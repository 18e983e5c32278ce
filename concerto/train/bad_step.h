// Finds out whether a step went wrong, and where the first bad number stands.
#pragma once

#include <string>
#include <vector>

#include "concerto/train/executor.h"

namespace concerto {

// Judges losses: not finite, or (factor > 0) above factor times the mean of the last losses.
class LossGuard {
 public:
  explicit LossGuard(double spike_factor) : factor_(spike_factor) { history_.reserve(kWindow); }
  // Why the step is bad; empty: it is good, and its loss joins the history.
  std::string judge(double loss, double grad_norm);
  const std::vector<double>& history() const { return history_; }
  void restore(std::vector<double> history);

 private:
  static constexpr size_t kWindow = 32, kEnough = 8;  // no verdict on spikes before this many losses
  double factor_;
  std::vector<double> history_;  // oldest first
};

// Runs the micro-batches forward again and looks for the first activation that is not finite, then at the gradients in
// the store, last one first as the backward pass makes them. Text for the error: "hidden.3 (micro-batch 1)" or
// "gradient of model.norm.weight"; "none: every tensor is finite" for a spike.
std::string first_bad_gradient(const ParameterStore& store);  // empty: there is none
std::string first_bad_tensor(Executor& executor, const ParameterStore& store,
                             std::span<const MicroBatch> micro_batches);

}  // namespace concerto

// The router's losses of a step (reference 5.2): from counts and sums of routing units to their values and to what
// backward adds to the router's gradients. They never enter the language-model loss that is reported.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "concerto/config/run_config.h"
#include "concerto/layers/router_stats.h"
#include "concerto/ops/context.h"

namespace concerto {

// Before their coefficients. The balance loss is one over all layers (pooled) or the sum of theirs; z the sum.
struct RouterLossValues {
  double balance = 0, z = 0;
};

class RouterLosses {
 public:
  // `units`: most routing units of a call.
  RouterLosses(const ModelConfig& config, const RoutingOptions& options, int64_t layers, int64_t units);

  bool balance() const { return balance_ != BalanceLoss::kNone; }  // trained
  bool z() const { return z_; }
  bool first_choices() const { return first_choices_; }

  // `stats`: of units that hold tokens[u] tokens each and weigh weights[u] in the step. Writes stats.aux_dprob and
  // stats.z_scale, and adds weighted losses to `values`.
  void apply(const Context& ctx, const RouterStats& stats, std::span<const int64_t> tokens,
             std::span<const double> weights, RouterLossValues& values);

 private:
  View counts_of(const RouterStats& stats, int layer, int64_t units) const;
  double pooled(const Context& ctx, const RouterStats& stats, std::span<const double> weights);
  double one(const Context& ctx, View counts, View prob_sums, View dprob, std::span<const double> weights);

  ModelConfig config_;
  BalanceLoss balance_;
  bool z_, first_choices_;
  int64_t layers_;
  std::vector<int64_t> tokens_, counts_;        // [U], [U * E]
  std::vector<double> scales_, losses_, sums_;  // [U], [U], [U * E]
};

// What decides who goes where and what keeps it balanced, for the start of a run: a loss that nobody trains is silent.
std::string router_summary(const RunConfig& config);

// Adds counts and sums of one micro-batch of one unit to those of the whole unit, which has one row a layer.
void add_router_stats(const RouterStats& part, int64_t layers, const RouterStats& whole);
void clear_router_stats(const RouterStats& stats);

}  // namespace concerto

// The router's losses of a step (reference 5.2): from counts and sums of routing units to their values and to what
// backward adds to the router's gradients. They never enter the language-model loss that is reported.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "concerto/comm/communicator.h"
#include "concerto/config/run_config.h"
#include "concerto/layers/router_stats.h"
#include "concerto/ops/context.h"

namespace concerto {

// Before their coefficients. Of the balance loss either a value a layer, or one over all layers (pooled); z a value a
// layer. Layers are the model's MoE layers: a pipeline stage adds to its own.
struct RouterLossValues {
  std::vector<double> layer_balance, layer_z;  // [MoE layers of the model]
  double pooled_balance = 0;
  void clear(int64_t layers);
  double balance() const;  // summed in the order of layers
  double z() const;
};

// Counts and probability sums of layers, those of earlier pipeline stages too, for the balance loss that is one over all
// layers; and what it adds to every layer's gradients.
struct RouterPool {
  View counts;  // [units, E] i64
  View sums;    // [units, E] f64
  View dprob;   // [units, E] stat; null: not trained
  RouterPool rows(int64_t units) const;
};
void clear_router_pool(const RouterPool& pool);

class RouterLosses {
 public:
  // Of `layers` MoE layers from number `first_layer` on. `units`: most routing units of a call.
  RouterLosses(const ModelConfig& config, const RoutingOptions& options, int64_t first_layer, int64_t layers,
               int64_t units);

  bool balance() const { return layers_ > 0 && balance_ != BalanceLoss::kNone; }  // trained
  bool z() const { return z_; }
  bool first_choices() const { return first_choices_; }
  // Whether the balance loss wants the layers of all stages; also where none is trained: then it is only reported.
  bool pools() const { return config_.num_moe_layers() > 0 && balance_ != BalanceLoss::kPerLayer; }
  bool pool_is_trained() const { return pools() && balance_ != BalanceLoss::kNone; }

  // `stats`: of units that hold tokens[u] tokens each and weigh weights[u] in the step. Writes stats.aux_dprob (of
  // losses by layer) and stats.z_scale, and adds weighted losses to `values`.
  void apply(const Context& ctx, const RouterStats& stats, std::span<const int64_t> tokens,
             std::span<const double> weights, RouterLossValues& values);

  // The pooled loss: every stage adds its layers, in the order of the model; the last makes loss and gradient; every
  // stage spreads that over its layers.
  void add_to_pool(const RouterStats& stats, const RouterPool& pool) const;
  void finish_pool(const Context& ctx, const RouterPool& pool, std::span<const int64_t> tokens,
                   std::span<const double> weights, RouterLossValues& values);
  void spread_pool(const RouterPool& pool, const RouterStats& stats) const;

 private:
  View counts_of(const RouterStats& stats, int layer, int64_t units) const;
  double one(const Context& ctx, View counts, View prob_sums, View dprob, std::span<const double> weights);

  ModelConfig config_;
  BalanceLoss balance_;
  bool z_, first_choices_;
  int64_t first_layer_, layers_;
  std::vector<int64_t> tokens_;          // [U]
  std::vector<double> scales_, losses_;  // [U]
};

// What decides who goes where and what keeps it balanced, for the start of a run: a loss that nobody trains is silent.
std::string router_summary(const RunConfig& config);

// Adds counts and sums of one micro-batch of one unit to those of the whole unit, which has one row a layer.
void add_router_stats(const RouterStats& part, int64_t layers, const RouterStats& whole);
void clear_router_stats(const RouterStats& stats);
// Sums counts and sums over a group of ranks, each of which has seen other micro-batches of the unit.
void reduce_router_stats(const RouterStats& stats, Communicator& group);

}  // namespace concerto

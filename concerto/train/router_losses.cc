#include "concerto/train/router_losses.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "concerto/ops/routing.h"

namespace concerto {

void RouterLossValues::clear(int64_t layers) {
  layer_balance.assign(static_cast<size_t>(layers), 0.0);
  layer_z.assign(static_cast<size_t>(layers), 0.0);
  pooled_balance = 0;
}

double RouterLossValues::balance() const {
  return std::accumulate(layer_balance.begin(), layer_balance.end(), pooled_balance);
}
double RouterLossValues::z() const { return std::accumulate(layer_z.begin(), layer_z.end(), 0.0); }

RouterPool RouterPool::rows(int64_t units) const {
  return {counts.rows_range(0, units), sums.rows_range(0, units), dprob ? dprob.rows_range(0, units) : View{}};
}

void clear_router_pool(const RouterPool& pool) {
  for (const View v : {pool.counts, pool.sums}) std::memset(v.data, 0, static_cast<size_t>(v.bytes()));
}

RouterLosses::RouterLosses(const ModelConfig& config, const RoutingOptions& options, int64_t first_layer,
                           int64_t layers, int64_t units)
    : config_(config),
      balance_(config.num_moe_layers() > 0 ? balance_loss(config, options) : BalanceLoss::kNone),
      z_(layers > 0 && config.router_z_loss_coef > 0 && !options.freeze_router),
      first_choices_(options.balance_counts == BalanceCounts::kFirstChoice ||
                     (options.balance_counts == BalanceCounts::kAuto && config.moe_gate == RouterGate::kTop2 &&
                      !config.moe_use_aux_free)),
      first_layer_(first_layer),
      layers_(layers) {
  const auto u = static_cast<size_t>(units);
  tokens_.resize(u);
  scales_.resize(u);
  losses_.resize(u);
}

View RouterLosses::counts_of(const RouterStats& stats, int layer, int64_t units) const {
  return first_choices_ ? stats.layer_first_choices(layer, units) : stats.layer(stats.bare_counts, layer, units);
}

// tokens_ is set. The weighted loss of the units.
double RouterLosses::one(const Context& ctx, View counts, View prob_sums, View dprob, std::span<const double> weights) {
  const int64_t units = counts.dim(0);
  for (size_t u = 0; u < weights.size(); ++u) scales_[u] = config_.router_aux_loss_coef * weights[u];
  routing_balance(ctx, {.counts = counts,
                        .prob_sums = prob_sums,
                        .tokens = View(tokens_.data(), {units}, DType::kI64),
                        .scale = View(scales_.data(), {units}, DType::kF64),
                        .groups = config_.router_groups(),
                        .loss = View(losses_.data(), {units}, DType::kF64),
                        .aux_dprob = dprob});
  double loss = 0;
  for (size_t u = 0; u < weights.size(); ++u) loss += weights[u] * losses_[u];
  return loss;
}

void RouterLosses::add_to_pool(const RouterStats& stats, const RouterPool& pool) const {
  const int64_t units = pool.counts.dim(0), experts = config_.moe_num_experts;
  for (int64_t l = 0; l < layers_; ++l) {
    const auto layer = static_cast<int>(l);
    const View counts = counts_of(stats, layer, units), sums = stats.layer(stats.prob_sums, layer, units);
    for (int64_t u = 0; u < units; ++u)
      for (int64_t e = 0; e < experts; ++e) {
        pool.counts.as<int64_t>()[u * experts + e] += counts.rows_range(u, 1).as<int64_t>()[e];
        pool.sums.as<double>()[u * experts + e] += sums.rows_range(u, 1).as<double>()[e];
      }
  }
}

// Hugging Face's: as if the tokens of all layers were the tokens of one.
void RouterLosses::finish_pool(const Context& ctx, const RouterPool& pool, std::span<const int64_t> tokens,
                               std::span<const double> weights, RouterLossValues& values) {
  for (size_t u = 0; u < tokens.size(); ++u) tokens_[u] = tokens[u] * config_.num_moe_layers();
  values.pooled_balance += one(ctx, pool.counts, pool.sums, pool.dprob, weights);
}

void RouterLosses::spread_pool(const RouterPool& pool, const RouterStats& stats) const {
  for (int64_t l = 0; l < layers_ && pool.dprob && stats.aux_dprob; ++l)
    std::memcpy(stats.layer(stats.aux_dprob, static_cast<int>(l), pool.counts.dim(0)).data, pool.dprob.data,
                static_cast<size_t>(pool.dprob.bytes()));
}

void RouterLosses::apply(const Context& ctx, const RouterStats& stats, std::span<const int64_t> tokens,
                         std::span<const double> weights, RouterLossValues& values) {
  if (layers_ == 0) return;
  const auto units = static_cast<int64_t>(tokens.size());
  const auto of_layer = [&](std::vector<double>& v, int64_t l) -> double& {
    return v[static_cast<size_t>(first_layer_ + l)];
  };
  if (z_)
    for (size_t u = 0; u < tokens.size(); ++u) {
      const double each = tokens[u] > 0 ? weights[u] / static_cast<double>(tokens[u]) : 0.0;
      stats.z_scale.as<double>()[u] = config_.router_z_loss_coef * each;
      for (int64_t l = 0; l < layers_; ++l)
        of_layer(values.layer_z, l) += each * stats.layer_z_sums(static_cast<int>(l), units).as<double>()[u];
    }
  if (balance_ != BalanceLoss::kPerLayer) return;
  std::copy(tokens.begin(), tokens.end(), tokens_.begin());
  for (int64_t l = 0; l < layers_; ++l) {
    const auto layer = static_cast<int>(l);
    of_layer(values.layer_balance, l) +=
        one(ctx, counts_of(stats, layer, units), stats.layer(stats.prob_sums, layer, units),
            stats.layer(stats.aux_dprob, layer, units), weights);
  }
}

std::string router_summary(const RunConfig& c) {
  const ModelConfig& m = c.model.config;
  std::string text = fmt::format("top-{} of {} experts, {}", m.moe_k, m.moe_num_experts,
                                 m.uses_sinkhorn()                           ? "Sinkhorn-2Gate"
                                 : m.scoring_func == RouterScoring::kSigmoid ? "sigmoid"
                                                                             : "softmax");
  if (m.moe_group_experts) text += fmt::format(" in {} groups", m.moe_k);
  const BalanceLoss balance = balance_loss(m, routing_options(c));
  text += balance == BalanceLoss::kNone
              ? ", no balance loss"
              : fmt::format(", balance loss {} x {}", balance == BalanceLoss::kPooled ? "pooled" : "per layer",
                            m.router_aux_loss_coef);
  if (!c.optimizer.freeze_router && m.router_z_loss_coef > 0)
    text += fmt::format(", z loss x {}", m.router_z_loss_coef);
  if (!c.optimizer.freeze_router && m.moe_orthogonal_loss_lambda > 0)
    text += fmt::format(", orthogonal {} x {}", c.training.orthogonal == Orthogonal::kStep ? "step" : "loss",
                        m.moe_orthogonal_loss_lambda);
  if (m.moe_use_aux_free)
    text += m.moe_router_bias_update_rate > 0 && !c.optimizer.freeze_router
                ? fmt::format(", correction bias +-{} a step", m.moe_router_bias_update_rate)
                : ", correction bias as it is";
  if (may_drop(m))
    text += fmt::format(", capacity {} ({} in evaluation, {} of few tokens)", m.moe_capacity[0], m.moe_capacity[1],
                        m.moe_capacity[2]);
  return text + (c.optimizer.freeze_router ? ", frozen" : "");
}

namespace {

template <class T>
void add_rows(View from, View to) {
  for (int64_t i = 0; i < to.elements(); ++i) to.as<T>()[i] += from.as<T>()[i];
}

}  // namespace

void add_router_stats(const RouterStats& part, int64_t layers, const RouterStats& whole) {
  CHECK(part.stride == 1 && whole.stride == 1 && part.counts.rows() >= layers);
  add_rows<int64_t>(part.counts, whole.counts);
  add_rows<int64_t>(part.bare_counts, whole.bare_counts);
  add_rows<int64_t>(part.kept_counts, whole.kept_counts);
  add_rows<int64_t>(part.claims, whole.claims);
  add_rows<double>(part.prob_sums, whole.prob_sums);
  if (whole.z_sums) add_rows<double>(part.z_sums, whole.z_sums);
}

void clear_router_stats(const RouterStats& s) {
  for (const View v : {s.counts, s.bare_counts, s.kept_counts, s.claims, s.prob_sums, s.z_sums})
    if (v) std::memset(v.data, 0, static_cast<size_t>(v.bytes()));
}

void reduce_router_stats(const RouterStats& s, Communicator& group) {
  for (const View v : {s.counts, s.bare_counts, s.kept_counts, s.claims, s.prob_sums, s.z_sums})
    if (v) group.all_reduce(v);
}

}  // namespace concerto

#include "concerto/layers/router_stats.h"

#include <algorithm>

#include "concerto/ops/routing.h"

namespace concerto {

View RouterStats::layer_claims(int layer, int64_t units) const {
  const int64_t k = claims.rows() / counts.rows();
  return claims.rows_range(layer * stride * k, units * k).reshape({units, k, claims.cols()});
}

View RouterStats::layer_first_choices(int layer, int64_t units) const {
  const int64_t k = claims.rows() / counts.rows();
  View first = claims.rows_range(layer * stride * k, units);
  first.row_stride = k * claims.cols();
  return first;
}

View RouterStats::layer_z_sums(int layer, int64_t units) const {
  if (!z_sums) return {};
  return z_sums.reshape({z_sums.dim(0), 1}).rows_range(layer * stride, units).reshape({units});
}

namespace {

void lay_out(const ModelConfig& c, const RouterStatsSize& size, Arena& arena, RouterStats& s) {
  const int64_t rows = std::max<int64_t>(1, size.layers) * size.units, experts = c.moe_num_experts;
  s.stride = size.units;
  s.counts = arena.take({rows, experts}, DType::kI64);
  s.bare_counts = arena.take({rows, experts}, DType::kI64);
  s.kept_counts = arena.take({rows, experts}, DType::kI64);
  s.claims = arena.take({rows * c.moe_k, experts}, DType::kI64);
  s.prob_sums = arena.take({rows, experts}, DType::kF64);
  if (size.balance) s.aux_dprob = arena.take({rows, experts}, size.stat);
  if (size.z) s.z_sums = arena.take({rows}, DType::kF64);
  if (size.z) s.z_scale = arena.take({size.units}, DType::kF64);
}

}  // namespace

RouterMemory::RouterMemory(const ModelConfig& config, const RouterStatsSize& size) {
  Arena counting;
  lay_out(config, size, counting, stats);
  memory_ = Arena(counting.high_water());
  lay_out(config, size, memory_, stats);
}

int64_t expert_room(const CapacityFactors& factors, bool training, int64_t tokens, int64_t experts) {
  if (tokens == 0) return 0;
  const double factor = training ? factors.train : tokens < experts ? factors.few_tokens : factors.eval;
  // A unit that is not full may be too small for a share of its own; that is no reason to end a run.
  if (factor * static_cast<double>(tokens) < static_cast<double>(experts)) return 1;
  return expert_capacity(factors, training, tokens, experts);
}

int64_t expert_room(const ModelConfig& c, bool training, int64_t tokens) {
  if (c.moe_capacity.empty() || c.moe_num_experts == 0) return tokens;
  const CapacityFactors factors{.train = c.moe_capacity[0], .eval = c.moe_capacity[1], .few_tokens = c.moe_capacity[2]};
  return expert_room(factors, training, tokens, c.moe_num_experts);
}

bool may_drop(const ModelConfig& c) {
  return std::any_of(c.moe_capacity.begin(), c.moe_capacity.end(),
                     [&](double factor) { return factor < static_cast<double>(c.moe_num_experts); });
}

}  // namespace concerto

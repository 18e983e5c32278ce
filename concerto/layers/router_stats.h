// What routing tells of one micro-batch, and what its losses tell back. Rows are (MoE layer, routing unit); a layer has
// `stride` rows, of which the micro-batch uses the first. Counts are integers, made before anything is dropped unless
// said otherwise; probabilities are summed in f64.
#pragma once

#include "concerto/config/model_config.h"
#include "concerto/ops/routing.h"
#include "concerto/tensor/arena.h"

namespace concerto {

struct RouterStats {
  int64_t stride = 1;
  bool first_choices = false;  // somebody reads `claims` for first choices
  View counts;                 // [rows, E] i64: tokens per expert as chosen
  View bare_counts;            // [rows, E] i64: as the bare probabilities would choose
  View kept_counts;            // [rows, E] i64: after drops
  View claims;                 // [rows * K, E] i64: tokens whose choice j is e
  View prob_sums;              // [rows, E] f64
  View z_sums;                 // [rows] f64; null: no z loss
  View aux_dprob;              // [rows, E] stat: gradient of the balance loss by each token's p; null: not trained
  View z_scale;                // [stride] f64: gradient of the z loss by a token's lse^2; null: no z loss

  // Of one layer, all of `units` units. First choices have row stride K * E.
  View layer(View rows, int layer, int64_t units) const { return rows.rows_range(layer * stride, units); }
  View layer_claims(int layer, int64_t units) const;         // [U, K, E]
  View layer_first_choices(int layer, int64_t units) const;  // [U, E]
  View layer_z_sums(int layer, int64_t units) const;         // [U]
};

struct RouterStatsSize {
  int64_t layers = 1, units = 1;
  DType stat = DType::kF32;
  bool balance = false, z = false;  // losses that are trained
};

// The stats with their memory, all zero.
class RouterMemory {
 public:
  RouterMemory() = default;
  RouterMemory(const ModelConfig& config, const RouterStatsSize& size);
  RouterStats stats;
  int64_t bytes() const { return memory_.capacity(); }

 private:
  Arena memory_;
};

// Room C of an expert for a routing unit of `tokens` tokens (reference 3.5), at least 1 if there are tokens. By
// moe_capacity; without it all of them.
int64_t expert_room(const CapacityFactors& factors, bool training, int64_t tokens, int64_t experts);
int64_t expert_room(const ModelConfig& config, bool training, int64_t tokens);
// Can a token be dropped? Not from a factor of moe_num_experts up: an expert gets a token at most once.
bool may_drop(const ModelConfig& config);

}  // namespace concerto

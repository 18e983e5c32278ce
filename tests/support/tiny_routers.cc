#include "tests/support/tiny_routers.h"

#include <ostream>

#include "tests/support/tiny_model.h"

namespace concerto::test {

ModelConfig tiny_moe_with_router_losses() {
  ModelConfig c = tiny_moe();
  c.output_router_logits = false;
  c.router_aux_loss_coef = 0.3;
  c.router_z_loss_coef = 0.02;
  return c;
}

static ModelConfig with_capacity(double factor, TokenDrop order, bool reverse) {
  ModelConfig c = tiny_moe_with_router_losses();
  c.moe_capacity = {factor, factor, factor};
  c.moe_drop_order = order;
  c.moe_reverse_token_drop = reverse;
  return c;
}

static ModelConfig old_gate(double factor) {
  ModelConfig c = with_capacity(factor, TokenDrop::kRankMajor, false);
  c.moe_gate = RouterGate::kTop2;
  c.moe_k = 2;
  c.moe_layer_start_index = 0;
  c.moe_layer_interval = 2;
  c.num_hidden_layers = 4;
  c.sinkhorn_2gate = true;
  c.moe_use_aux_free = false;
  return c;
}

static ModelConfig sigmoid() {
  ModelConfig c = tiny_moe_with_router_losses();
  c.scoring_func = RouterScoring::kSigmoid;
  return c;
}

static ModelConfig grouped() {
  ModelConfig c = tiny_moe_with_router_losses();
  c.moe_k = 4;
  c.moe_group_experts = true;
  return c;
}

void PrintTo(const TinyRouter& r, std::ostream* out) { *out << r.name; }

std::vector<TinyRouter> tiny_routers() {
  const RoutingOptions per_layer{.balance_loss = BalanceLoss::kPerLayer};
  const RoutingOptions first{.balance_loss = BalanceLoss::kPooled, .balance_counts = BalanceCounts::kFirstChoice};
  const ModelConfig losses = tiny_moe_with_router_losses();
  return {{.name = "plain_pooled", .config = tiny_moe()},
          {.name = "plain_per_layer_z", .config = losses, .options = per_layer},
          {.name = "first_choices", .config = losses, .options = first},
          {"drops_rank_major", with_capacity(2, TokenDrop::kRankMajor, false), per_layer, true},
          {"drops_token_major", with_capacity(2, TokenDrop::kTokenMajor, false), per_layer, true},
          {"drops_reverse", with_capacity(2.5, TokenDrop::kRankMajor, true), per_layer, true},
          {"old_gate", old_gate(64), per_layer, false, true},
          {"old_gate_drops", old_gate(2), per_layer, true, true},
          {.name = "sigmoid", .config = sigmoid(), .options = per_layer},
          {.name = "groups", .config = grouped(), .options = per_layer}};
}

}  // namespace concerto::test

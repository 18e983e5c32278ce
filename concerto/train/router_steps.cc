#include "concerto/train/router_steps.h"

#include <algorithm>

#include "concerto/ops/routing.h"

namespace concerto {

RouterSteps::RouterSteps(ParameterStore& store, const RunConfig& config, const std::vector<int>& moe_layers,
                         Context ctx, const GradientSync* sync)
    : store_(store),
      ctx_(ctx),
      lambda_(config.optimizer.freeze_router ? 0 : config.model.config.moe_orthogonal_loss_lambda),
      bias_rate_(config.optimizer.freeze_router ? 0 : config.model.config.moe_router_bias_update_rate),
      decoupled_(config.training.orthogonal == Orthogonal::kStep),
      blocks_(config.model.config.moe_group_orthogonal_loss ? config.model.config.router_groups() : 1),
      usage_(static_cast<size_t>(config.model.config.moe_num_experts)) {
  for (const int layer : moe_layers) {
    const std::string prefix = "model.layers." + std::to_string(layer) + ".mlp.";
    size_t row = 0;
    for (int before = 0; before < layer; ++before) row += config.model.config.is_moe_layer(before);
    const ParamRef w = store.ref(prefix + "gate.weight");
    layers_.push_back({.w = w,
                       .bias = store.ref(prefix + "moe_statics.e_score_correction_bias"),
                       .row = row,
                       .owned = !sync || sync->owns(w.first)});
  }
  ctx_.scratch = &scratch_;
  ctx_.profile = nullptr;
  ctx_.dry_run = true;
  const auto rows = static_cast<size_t>(config.model.config.num_moe_layers());
  std::vector<double> by_layer(rows);
  orthogonal_loss(by_layer);
  after_optimizer(std::vector<std::vector<int64_t>>(rows, usage_));
  ctx_.dry_run = false;
  scratch_ = Arena(scratch_.high_water());
}

void RouterSteps::orthogonal_loss(std::vector<double>& by_layer) {
  std::fill(by_layer.begin(), by_layer.end(), 0.0);
  if (lambda_ == 0) return;
  for (const Layer& layer : layers_)
    if (layer.owned)
      concerto::orthogonal_loss(ctx_, {.w = store_.weight(layer.w),
                                       .blocks = blocks_,
                                       .scale = lambda_,
                                       .loss = View(&by_layer[layer.row], {1}, DType::kF64),
                                       .dw = decoupled_ ? View{} : store_.gradient(layer.w.first)});
}

void RouterSteps::after_optimizer(const std::vector<std::vector<int64_t>>& tokens_per_expert) {
  for (size_t l = 0; l < layers_.size(); ++l) {
    double loss = 0;
    if (lambda_ > 0 && decoupled_)
      orthogonal_step(ctx_, {.w = store_.weight(layers_[l].w),
                             .blocks = blocks_,
                             .rate = lambda_,
                             .loss = View(&loss, {1}, DType::kF64)});
    if (bias_rate_ == 0) continue;
    const std::vector<int64_t>& counts = tokens_per_expert.at(layers_[l].row);
    std::copy(counts.begin(), counts.end(), usage_.begin());
    const auto experts = static_cast<int64_t>(usage_.size());
    bias_update(ctx_, {.usage = View(usage_.data(), {1, experts}, DType::kI64),
                       .bias = store_.weight(layers_[l].bias),
                       .rate = bias_rate_});
  }
}

}  // namespace concerto

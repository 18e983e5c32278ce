#include <cmath>

#include "concerto/checkpoint/store_tensors.h"
#include "concerto/layers/router_stats.h"
#include "concerto/optim/lr_schedule.h"
#include "concerto/train/trainer.h"

namespace concerto {

StepEngine::StepEngine(const RunConfig& config, const Backend& backend, ThreadPool& pool, double docs_per_row,
                       bool poison)
    : config_(config), pool_(pool) {
  const ModelConfig& model = config.model.config;
  const TrainingSection& t = config.training;
  const DType compute = compute_dtype(t.dtype);
  check_backend(backend, compute);
  store_ = std::make_unique<ParameterStore>(tensor_specs(model), compute, StoreUse::kTrain, &backend,
                                            compute_dtype(config.optimizer.moments_dtype));
  stage_ = std::make_unique<Stage>(model, *store_, config.parallel.recompute, t.seq_length, t.routing_unit);
  const int64_t rows = std::min(t.micro_batch_size, t.global_batch_size);
  schedule_ = build_schedule(config.parallel.schedule, (t.global_batch_size + rows - 1) / rows,
                             t.routing_unit == RoutingUnit::kGlobal);
  validate_schedule(schedule_);
  optimizer_ = std::make_unique<Optimizer>(*store_, config.optimizer, static_cast<uint64_t>(config.run.seed));
  executor_ = std::make_unique<Executor>(
      *stage_, *store_, backend, pool,
      ExecutorOptions{.max_tokens = rows * t.seq_length,
                      .max_rows = rows,
                      .usual_docs = std::llround(static_cast<double>(rows) * docs_per_row),
                      .split = schedule_.split,
                      .slots = schedule_.slots,
                      .loss_average = t.loss_average,
                      .token_balance_seqlen = t.token_balance_seqlen,
                      .routing = routing_options(config),
                      .scratch = optimizer_->scratch_bytes({.backend = &backend, .pool = &pool}),
                      .poison = poison});
  router_steps_ = std::make_unique<RouterSteps>(*store_, config, stage_->moe_layers(), executor_->ops());
  for (const int layer : stage_->moe_layers())
    for (int i = 0; i < store_->size(); ++i) {
      const TensorSpec& spec = store_->specs()[static_cast<size_t>(i)];
      if (spec.role == TensorRole::kCorrectionBias && spec.layer == layer) correction_biases_.push_back(i);
    }
  CHECK(correction_biases_.size() == stage_->moe_layers().size());
  predicted_bytes_ = store_->bytes() + executor_->memory().total + stage_->rope_bytes() + router_steps_->bytes();
}

void StepEngine::first_touch_state() { optimizer_->first_touch_state(pool_); }

void StepEngine::first_touch_work() {
  optimizer_->first_touch_gradients(pool_);
  executor_->first_touch();
}

// `total_loss` is what was differentiated; the router's losses are told apart from it, before their coefficients.
void StepEngine::report_losses(StepReport& report) {
  const ModelConfig& model = config_.model.config;
  const bool constant = config_.training.loss_average == LossAverage::kTokenBalance;
  report.loss = output_.loss();
  report.aux_loss = output_.aux_loss;
  report.z_loss = output_.z_loss;
  report.total_loss = constant ? output_.differentiated[0] : report.loss;
  if (balance_loss(model, routing_options(config_)) != BalanceLoss::kNone)
    report.total_loss += model.router_aux_loss_coef * report.aux_loss;
  report.total_loss += model.router_z_loss_coef * report.z_loss;
  if (router_steps_->adds_loss()) report.total_loss += model.moe_orthogonal_loss_lambda * report.orthogonal_loss;
  const int64_t depth = model.num_nextn_predict_layers;
  report.mtp_losses.resize(static_cast<size_t>(depth));
  for (int64_t m = 0; m < depth; ++m) {
    const double loss = output_.loss(static_cast<int>(m) + 1);
    report.mtp_losses[static_cast<size_t>(m)] = loss;
    report.total_loss += constant ? output_.differentiated[static_cast<size_t>(m) + 1]
                                  : model.mtp_loss_scaling_factor / static_cast<double>(depth) * loss;
  }
}

void StepEngine::step(int64_t step, std::span<const MicroBatch> micro_batches, LossGuard* guard, StepReport& report,
                      std::string& why) {
  TraceWriter* const trace = executor_->trace();
  {
    const TraceScope scope(trace, "clear gradients", "optimizer");
    store_->clear_gradients(pool_);
  }
  executor_->run(schedule_, micro_batches, output_);
  report.step = step;
  report.steps = config_.training.steps;
  report.orthogonal_loss = router_steps_->orthogonal_loss();
  report_losses(report);
  report.lr = learning_rate(config_.optimizer, config_.training.steps, step);
  report.tokens = output_.tokens;
  report.moe_layers.assign(stage_->moe_layers().begin(), stage_->moe_layers().end());
  report.tokens_per_expert = output_.tokens_per_expert;
  if (may_drop(config_.model.config)) report.dropped_per_expert = output_.drops_per_expert;
  {
    const TraceScope scope(trace, "gradient norm", "optimizer");
    report.grad_norm = optimizer_->gradient_norm(executor_->ops());
  }
  why = guard ? guard->judge(report.loss, report.grad_norm) : std::string();
  report.skipped = !why.empty();
  if (!report.skipped) {
    const TraceScope scope(trace, "optimizer", "optimizer");
    optimizer_->step(executor_->ops(), step, report.lr, report.grad_norm);
    router_steps_->after_optimizer(output_.tokens_per_expert);
  }
  read_correction_bias(report);
  summarize_loads(report);
}

// A bias that was never anything but zero is not worth a word.
void StepEngine::read_correction_bias(StepReport& report) {
  const auto element = [](View bias, size_t e) {
    return bias.dtype == DType::kF64 ? bias.as<double>()[e] : static_cast<double>(bias.as<float>()[e]);
  };
  const auto experts = static_cast<size_t>(config_.model.config.moe_num_experts);
  for (size_t l = 0; l < correction_biases_.size() && !has_bias_; ++l)
    for (size_t e = 0; e < experts; ++e)
      has_bias_ = has_bias_ || element(store_->master(correction_biases_[l]), e) != 0;
  report.correction_bias.resize(has_bias_ ? correction_biases_.size() : 0);
  for (size_t l = 0; l < report.correction_bias.size(); ++l) {
    report.correction_bias[l].resize(experts);
    for (size_t e = 0; e < experts; ++e)
      report.correction_bias[l][e] = element(store_->master(correction_biases_[l]), e);
  }
}

}  // namespace concerto

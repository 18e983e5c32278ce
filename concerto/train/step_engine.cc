#include "concerto/train/step_engine.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>

#include "concerto/arch/stage_split.h"
#include "concerto/checkpoint/store_tensors.h"
#include "concerto/layers/router_stats.h"
#include "concerto/optim/lr_schedule.h"

namespace concerto {
namespace {

int64_t rows_of(const RunConfig& c) { return std::min(c.training.micro_batch_size, c.training.global_batch_size); }

MeshSizes mesh_of(const RankGroups* groups) { return groups ? groups->mesh().sizes() : MeshSizes{}; }

std::vector<uint8_t> updated_tensors(const std::vector<TensorSpec>& specs, const RankGroups* groups, int64_t zero) {
  if (!groups || zero == 0) return {};
  return owned_tensors(specs, *groups);
}

// Rows of a round within the bound on dispatch buffers; 0: no bound.
int64_t dispatch_rows(const RunConfig& c, DType compute, int ranks) {
  if (c.parallel.dispatch_buffer_mib == 0) return 0;
  const int64_t row = c.model.config.hidden_size * dtype_bytes(compute);
  return std::max<int64_t>(ranks, (c.parallel.dispatch_buffer_mib << 20) / row);
}

}  // namespace

MicroBatch empty_micro_batch() {
  MicroBatch b;
  b.doc_offsets = b.row_offsets = {0};
  return b;
}

Part dealt_micro_batches(int64_t micro_batches, int64_t dp, int64_t dp_rank) {
  const int64_t each = micro_batches / dp, more = micro_batches % dp;
  return {each * dp_rank + std::min(dp_rank, more), each + (dp_rank < more)};
}

PipelineSchedule step_schedule(const RunConfig& c, const MeshSizes& sizes) {
  PipelineSchedule schedule =
      build_pipeline({.name = c.parallel.schedule,
                      .pp = sizes.pp,
                      .vpp = static_cast<int>(c.parallel.vpp),
                      .micro_batches = dealt_micro_batches(micro_batches(c.training), sizes.dp, 0).count,
                      .together = c.training.routing_unit == RoutingUnit::kGlobal});
  validate_pipeline(schedule);
  return schedule;
}

ShardPlan shard_plan(const RunConfig& c, const MeshSizes& sizes, const MeshPlace& place,
                     const PipelineSchedule& schedule) {
  ShardPlan plan{.tp = sizes.tp,
                 .tp_rank = place.tp,
                 .etp = sizes.etp,
                 .etp_rank = place.etp,
                 .ep = sizes.ep,
                 .ep_rank = place.ep};
  const std::vector<StageSpan> spans = split_stages(c.model.config, schedule.stages(), c.parallel.stage_layers);
  for (int chunk = 0; chunk < schedule.chunks; ++chunk)
    plan.stages.push_back(spans[static_cast<size_t>(schedule.virtual_stage(place.pp, chunk))]);
  return plan;
}

StepEngine::StepEngine(const RunConfig& config, const Backend& backend, ThreadPool& pool, double docs_per_row,
                       bool poison, const RankGroups* groups, std::vector<int> rank_of_expert)
    : config_(config), pool_(pool), groups_(groups), schedule_(step_schedule(config, mesh_of(groups))) {
  const ModelConfig& model = config.model.config;
  const TrainingSection& t = config.training;
  const DType compute = compute_dtype(t.dtype);
  check_backend(backend, compute);
  const MeshPlace place = groups ? groups->place() : MeshPlace{};
  ShardPlan plan = shard_plan(config, mesh_of(groups), place, schedule_);
  plan.rank_of_expert = std::move(rank_of_expert);
  std::vector<TensorSpec> specs = tensor_specs(model, plan);
  const std::vector<uint8_t> updated = updated_tensors(specs, groups, config.parallel.zero);
  store_ = std::make_unique<ParameterStore>(
      std::move(specs), compute, StoreUse::kTrain, &backend, compute_dtype(config.optimizer.moments_dtype), updated,
      groups && config.parallel.zero == 2 ? GradientsOf::kUpdated : GradientsOf::kAll);
  if (groups)
    sync_ =
        std::make_unique<GradientSync>(*store_, *groups, tensor_specs(model), static_cast<int>(config.parallel.zero),
                                       config.parallel.grad_wire == "bf16" ? Wire::kBF16 : Wire::kAsIs);
  make_stages(plan);
  optimizer_ =
      std::make_unique<Optimizer>(*store_, config.optimizer, static_cast<uint64_t>(config.run.seed), sync_.get());
  const int64_t rows = rows_of(config);
  std::vector<const Stage*> stages;
  for (const auto& stage : stages_) stages.push_back(stage.get());
  executor_ = std::make_unique<Executor>(
      stages, *store_, backend, pool,
      ExecutorOptions{
          .max_tokens = rows * t.seq_length,
          .max_rows = rows,
          .usual_docs = std::llround(static_cast<double>(rows) * docs_per_row),
          .split = schedule_.split,
          .slots = schedule_.slots[static_cast<size_t>(place.pp)],
          .loss_average = t.loss_average,
          .token_balance_seqlen = t.token_balance_seqlen,
          .routing = routing_options(config),
          .scratch = optimizer_->scratch_bytes({.backend = &backend, .pool = &pool}),
          .poison = poison,
          .groups = {.pp = groups ? std::span(groups->pp()) : std::span<const RankGroups::PipelineChannel>{},
                     .dp = groups ? groups->dp() : nullptr,
                     .pp_rank = place.pp,
                     .tp = plan.tp,
                     .tp_rank = plan.tp_rank,
                     .sync = sync_.get()}});
  std::vector<int> own_layers;
  for (const auto& stage : stages_)
    own_layers.insert(own_layers.end(), stage->moe_layers().begin(), stage->moe_layers().end());
  router_steps_ = std::make_unique<RouterSteps>(*store_, config, own_layers, executor_->ops(), sync_.get());
  for (int layer = 0; layer < model.num_hidden_layers; ++layer)
    if (model.is_moe_layer(layer)) moe_layers_.push_back(layer);
  for (const int layer : own_layers) {
    correction_biases_.push_back(
        store_->find(fmt::format("model.layers.{}.mlp.moe_statics.e_score_correction_bias", layer)));
    CHECK(correction_biases_.back() >= 0);
    bias_rows_.push_back(
        static_cast<size_t>(std::find(moe_layers_.begin(), moe_layers_.end(), layer) - moe_layers_.begin()));
  }
  orthogonal_.resize(moe_layers_.size());
  biases_.resize(moe_layers_.size() * static_cast<size_t>(model.moe_num_experts));
  predicted_bytes_ = store_->bytes() + executor_->memory().total + router_steps_->bytes();
  for (const auto& stage : stages_) predicted_bytes_ += stage->rope_bytes();
}

StepEngine::~StepEngine() = default;

void StepEngine::set_schedule(PipelineSchedule schedule) {
  validate_pipeline(schedule);
  CHECK(schedule.slots == schedule_.slots && schedule.stages() == schedule_.stages() &&
        schedule.micro_batches == schedule_.micro_batches && schedule.split == schedule_.split);
  schedule_ = std::move(schedule);
}

void StepEngine::make_stages(const ShardPlan& plan) {
  StageLayout layout;
  if (groups_ && groups_->tp()) {
    exchange_ = std::make_unique<GroupTokenExchange>(*groups_->tp());
    layout.shard = {.exchange = exchange_.get(), .size = plan.tp, .rank = plan.tp_rank};
  }
  if (groups_)
    layout.experts = {.dispatch = groups_->dispatch(),
                      .plan = plan,
                      .most_rows = dispatch_rows(config_, store_->compute(), plan.ep * plan.etp)};
  for (const StageSpan& span : plan.stages) {
    layout.span = span;
    stages_.push_back(std::make_unique<Stage>(config_.model.config, *store_, config_.parallel.recompute,
                                              config_.training.seq_length, config_.training.routing_unit, layout));
  }
}

// Every data rank plays the same list.
void StepEngine::pad(std::span<const MicroBatch> micro_batches) {
  static const MicroBatch empty = empty_micro_batch();
  padded_.resize(static_cast<size_t>(schedule_.micro_batches));
  for (size_t m = 0; m < padded_.size(); ++m) padded_[m] = m < micro_batches.size() ? micro_batches[m] : empty;
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
  report.aux_loss = output_.aux_loss();
  report.z_loss = output_.z_loss();
  report.orthogonal_loss = std::accumulate(orthogonal_.begin(), orthogonal_.end(), 0.0);
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

// Rows that others read may be under way in the executor's memory: the job ends before an exception takes that away.
template <class F>
void StepEngine::guarded(F&& work) {
  try {
    work();
  } catch (const std::exception& e) {
    if (groups_) groups_->world().abort(e.what());
    throw;
  }
}

void StepEngine::step(int64_t step, std::span<const MicroBatch> micro_batches, LossGuard* guard, StepReport& report,
                      std::string& why) {
  TraceWriter* const trace = executor_->trace();
  {
    const TraceScope scope(trace, "clear gradients", "optimizer");
    store_->clear_gradients(pool_);
  }
  if (static_cast<int64_t>(micro_batches.size()) < schedule_.micro_batches) {
    pad(micro_batches);
    micro_batches = padded_;
  }
  guarded([&] { executor_->run(schedule_, micro_batches, output_); });
  if (sync_) sync_->reduce_gradients();
  router_steps_->orthogonal_loss(orthogonal_);
  if (sync_) {
    sync_->share_gradients();
    sum_output();
  }
  report.step = step;
  report.steps = config_.training.steps;
  report_losses(report);
  report.lr = learning_rate(config_.optimizer, config_.training.steps, step);
  report.tokens = output_.tokens;
  report.moe_layers.assign(moe_layers_.begin(), moe_layers_.end());
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
  const auto experts = static_cast<size_t>(config_.model.config.moe_num_experts);
  std::fill(biases_.begin(), biases_.end(), 0.0);
  const bool gives = !groups_ || (groups_->place().tp == 0 && groups_->place().dp == 0);  // the others hold the same
  for (size_t l = 0; l < correction_biases_.size() && gives; ++l) {
    const View bias = store_->master(correction_biases_[l]);
    double* const to = &biases_[bias_rows_[l] * experts];
    for (size_t e = 0; e < experts; ++e)
      to[e] = bias.dtype == DType::kF64 ? bias.as<double>()[e] : static_cast<double>(bias.as<float>()[e]);
  }
  if (groups_ && !biases_.empty())
    groups_->world().all_reduce(View(biases_.data(), {static_cast<int64_t>(biases_.size())}, DType::kF64));
  has_bias_ = has_bias_ || std::any_of(biases_.begin(), biases_.end(), [](double b) { return b != 0; });
  report.correction_bias.resize(has_bias_ ? moe_layers_.size() : 0);
  for (size_t l = 0; l < report.correction_bias.size(); ++l)
    report.correction_bias[l].assign(biases_.begin() + static_cast<std::ptrdiff_t>(l * experts),
                                     biases_.begin() + static_cast<std::ptrdiff_t>((l + 1) * experts));
}

// Of all ranks. Tensor parallel ranks have seen the same; a stage has seen its own layers, the last one the losses.
void StepEngine::sum_output() {
  const CommScope scope("sum losses and counts");
  const bool counts_here = groups_->place().tp == 0;
  // Of a global unit every data rank has made the whole loss.
  const bool router_here =
      counts_here && (config_.training.routing_unit != RoutingUnit::kGlobal || groups_->place().dp == 0);
  const auto each_real = [&](auto&& visit) {
    for (size_t i = 0; i < output_.loss_sum.size(); ++i) visit(output_.loss_sum[i], counts_here);
    for (double& x : output_.differentiated) visit(x, counts_here);
    for (double& x : output_.router.layer_balance) visit(x, router_here);
    for (double& x : output_.router.layer_z) visit(x, router_here);
    visit(output_.router.pooled_balance, router_here);
    for (double& x : orthogonal_) visit(x, true);  // each from its one owner
  };
  const auto each_count = [&](auto&& visit) {
    visit(output_.tokens, counts_here && groups_->place().pp == 0);
    for (auto* table : {&output_.tokens_per_expert, &output_.drops_per_expert})
      for (auto& row : *table)
        for (int64_t& n : row) visit(n, counts_here);
  };
  sums_.clear();
  counts_.clear();
  each_real([&](double& x, bool mine) { sums_.push_back(mine ? x : 0.0); });
  each_count([&](int64_t& n, bool mine) { counts_.push_back(mine ? n : 0); });
  groups_->world().all_reduce(View(sums_.data(), {static_cast<int64_t>(sums_.size())}, DType::kF64));
  groups_->world().all_reduce(View(counts_.data(), {static_cast<int64_t>(counts_.size())}, DType::kI64));
  size_t at = 0;
  each_real([&](double& x, bool) { x = sums_[at++]; });
  at = 0;
  each_count([&](int64_t& n, bool) { n = counts_[at++]; });
}

void StepEngine::evaluate(const MicroBatch& b, StepOutput& output) {
  guarded([&] { executor_->evaluate(schedule_, b, output); });
}

void StepEngine::sum_evaluation(StepOutput& output) {
  if (!groups_) return;
  const CommScope scope("sum evaluation losses");
  const bool counts_here = groups_->place().tp == 0;
  std::array<double, 1> loss{counts_here ? output.loss_sum[0] : 0.0};
  std::array<int64_t, 2> counts{counts_here ? output.loss_count[0] : 0, counts_here ? output.tokens : 0};
  groups_->world().all_reduce(View(loss.data(), {1}, DType::kF64));
  groups_->world().all_reduce(View(counts.data(), {2}, DType::kI64));
  output.loss_sum[0] = loss[0];
  output.loss_count[0] = counts[0];
  output.tokens = counts[1];
}

}  // namespace concerto

// Routers of every kind in whole models: what a routing unit is, what capacity, losses and the correction bias do in a
// step, and that no plan and no cut into micro-batches changes it beyond what the unit says.
#include <gtest/gtest.h>

#include <cmath>

#include "concerto/cli/backends.h"
#include "concerto/tensor/values.h"
#include "concerto/train/trainer.h"
#include "tests/support/tiny_model.h"

namespace concerto::test {
namespace {

constexpr double kRounding = 1e-11;  // f64 sums of a few hundred terms in another order

struct Router {
  const char* name;
  ModelConfig config;
  RoutingOptions options;
};
void PrintTo(const Router& r, std::ostream* out) { *out << r.name; }

ModelConfig all_losses() {
  ModelConfig c = tiny_moe();
  c.output_router_logits = false;
  c.router_aux_loss_coef = 0.3;
  c.router_z_loss_coef = 0.02;
  return c;
}

ModelConfig with_capacity(double factor, TokenDrop order, bool reverse) {
  ModelConfig c = all_losses();
  c.moe_capacity = {factor, factor, factor};
  c.moe_drop_order = order;
  c.moe_reverse_token_drop = reverse;
  return c;
}

ModelConfig old_gate(double factor) {
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

ModelConfig sigmoid() {
  ModelConfig c = all_losses();
  c.scoring_func = RouterScoring::kSigmoid;
  return c;
}

ModelConfig grouped() {
  ModelConfig c = all_losses();
  c.moe_k = 4;
  c.moe_group_experts = true;
  return c;
}

std::vector<Router> routers() {
  const RoutingOptions per_layer{.balance_loss = BalanceLoss::kPerLayer};
  return {{"plain_pooled", tiny_moe(), {}},
          {"plain_per_layer_z", all_losses(), per_layer},
          {"first_choices",
           all_losses(),
           {.balance_loss = BalanceLoss::kPooled, .balance_counts = BalanceCounts::kFirstChoice}},
          {"drops_rank_major", with_capacity(2, TokenDrop::kRankMajor, false), per_layer},
          {"drops_token_major", with_capacity(2, TokenDrop::kTokenMajor, false), per_layer},
          {"drops_reverse", with_capacity(2.5, TokenDrop::kRankMajor, true), per_layer},
          {"old_gate", old_gate(64), per_layer},
          {"old_gate_drops", old_gate(2), per_layer},
          {"sigmoid", sigmoid(), per_layer},
          {"groups", grouped(), per_layer}};
}

class Routers : public ::testing::TestWithParam<Router> {
 protected:
  TinyRun make(RoutingUnit unit, const Plan& plan = {}, const char* backend = "ref", DType type = DType::kF64) {
    Plan p = plan;
    p.routing = GetParam().options;
    p.routing.unit = unit;
    p.max_tokens = 80;
    if (unit == RoutingUnit::kGlobal) p.slots = 3;
    return TinyRun(GetParam().config, backend_by_name(backend), pool_, type, p);
  }
  std::vector<MicroBatch> parts() const {
    return {random_batch(GetParam().config, {{7}}, 1), random_batch(GetParam().config, {{40, 24}}, 2),
            random_batch(GetParam().config, {{3}}, 3)};
  }
  ThreadPool pool_{1};
};

int64_t sum(const std::vector<std::vector<int64_t>>& counts) {
  int64_t n = 0;
  for (const auto& layer : counts)
    for (const int64_t c : layer) n += c;
  return n;
}

void expect_same(const TinyRun& got, const TinyRun& want) {
  const Distance d = distance(got.gradients(), want.gradients());
  EXPECT_LT(d.value, kRounding) << d.name;
  EXPECT_NEAR(got.output.loss(), want.output.loss(), kRounding);
  EXPECT_NEAR(got.output.aux_loss, want.output.aux_loss, kRounding);
  EXPECT_NEAR(got.output.z_loss, want.output.z_loss, kRounding);
  EXPECT_EQ(got.output.tokens_per_expert, want.output.tokens_per_expert);
  EXPECT_EQ(got.output.drops_per_expert, want.output.drops_per_expert);
}

// Losses, capacity, drop order and Sinkhorn over 7, 64 and 3 tokens are those over 74, layer after layer.
TEST_P(Routers, GlobalUnitIsOneBatch) {
  TinyRun whole = make(RoutingUnit::kMicroBatch), cut = make(RoutingUnit::kGlobal);
  const std::vector<MicroBatch> batches = parts();
  const MicroBatch all = joined(batches);
  whole.step(std::span(&all, 1));
  cut.step(batches);
  expect_same(cut, whole);
  EXPECT_EQ(sum(whole.output.tokens_per_expert),
            74 * GetParam().config.moe_k * static_cast<int64_t>(whole.stage.moe_layers().size()));
  const bool drops = std::string(GetParam().name).find("drops") != std::string::npos;
  EXPECT_EQ(sum(whole.output.drops_per_expert) > 0, drops);
}

// A batch of three sequences as one micro-batch, and as three micro-batches of one.
TEST_P(Routers, SequencesAreUnits) {
  TinyRun whole = make(RoutingUnit::kSequence), cut = make(RoutingUnit::kMicroBatch);
  const std::vector<MicroBatch> batches = parts();
  const MicroBatch all = joined(batches);
  whole.step(std::span(&all, 1));
  cut.step(batches);
  expect_same(whole, cut);
}

// Smaller units: the losses are the token-weighted mean of the units', and so are their gradients.
TEST_P(Routers, SmallerUnitsWeighByTheirTokens) {
  TinyRun all = make(RoutingUnit::kMicroBatch);
  const std::vector<MicroBatch> batches = parts();
  std::vector<MicroBatch> quiet = batches;  // router losses alone
  for (MicroBatch& b : quiet) std::fill(b.targets.begin(), b.targets.end(), kIgnoreIndex);
  all.step(quiet);
  const StepOutput output = all.output;
  const Tensors gradients = all.gradients();
  double balance = 0, z = 0;
  std::vector<double> gate(gradients.at("model.layers.1.mlp.gate.weight").size());
  for (const MicroBatch& b : quiet) {
    all.step(std::span(&b, 1));
    const double weight = static_cast<double>(b.tokens()) / 74;
    balance += weight * all.output.aux_loss;
    z += weight * all.output.z_loss;
    const Tensors one = all.gradients();
    for (size_t i = 0; i < gate.size(); ++i) gate[i] += weight * one.at("model.layers.1.mlp.gate.weight")[i];
  }
  EXPECT_NEAR(output.aux_loss, balance, kRounding);
  EXPECT_NEAR(output.z_loss, z, kRounding);
  EXPECT_LT(distance(gradients.at("model.layers.1.mlp.gate.weight"), gate), kRounding);
  double size = 0;
  for (const double g : gate) size += std::abs(g);
  EXPECT_GT(size, 1e-3);
}

// The main loss weighs nothing: what the router's losses leave in the gate does not depend on accumulation.
TEST_P(Routers, GateGradientsDoNotGrowWithAccumulation) {
  MicroBatch part = random_batch(GetParam().config, {{13}, {7, 4}}, 5);
  std::fill(part.targets.begin(), part.targets.end(), kIgnoreIndex);
  for (const LossAverage average : {LossAverage::kTokens, LossAverage::kMicroBatches}) {
    TinyRun run = make(RoutingUnit::kMicroBatch, {.loss_average = average});
    run.step(std::span(&part, 1));
    const Tensors one = run.gradients();
    run.step(std::vector<MicroBatch>(4, part));
    const Distance d = distance(run.gradients(), one);
    EXPECT_LT(d.value, kRounding) << d.name;
  }
}

TEST_P(Routers, RecomputeScheduleAndPoisonGiveTheSameBits) {
  const std::vector<MicroBatch> batches = parts();
  for (const auto& [backend, type] : {std::pair{"ref", DType::kF32}, {"cpu", DType::kF32}, {"cpu", DType::kBF16}})
    for (const RoutingUnit unit : {RoutingUnit::kSequence, RoutingUnit::kMicroBatch, RoutingUnit::kGlobal}) {
      TinyRun plain = make(unit, {.poison = false}, backend, type);
      plain.step(batches);
      const Tensors want = plain.gradients();
      for (const auto& [name, values] : want)
        for (const double v : values) ASSERT_TRUE(std::isfinite(v)) << name;
      for (const char* schedule : {"1f1b", "zero_bubble"})
        for (const Recompute recompute : {Recompute::kNone, Recompute::kSelective, Recompute::kFull}) {
          TinyRun run = make(unit, {.schedule = schedule, .recompute = recompute}, backend, type);
          run.step(batches);
          EXPECT_EQ(run.output.loss(), plain.output.loss());
          EXPECT_EQ(run.output.aux_loss, plain.output.aux_loss);
          EXPECT_EQ(run.output.z_loss, plain.output.z_loss);
          EXPECT_EQ(run.output.tokens_per_expert, plain.output.tokens_per_expert);
          EXPECT_EQ(run.output.drops_per_expert, plain.output.drops_per_expert);
          const Tensors got = run.gradients();
          for (const auto& [name, values] : want) EXPECT_EQ(got.at(name), values) << name << " " << schedule;
        }
    }
}

TEST_P(Routers, BackendsAgree) {
  TinyRun ref = make(RoutingUnit::kMicroBatch), cpu = make(RoutingUnit::kMicroBatch, {}, "cpu", DType::kF32);
  const std::vector<MicroBatch> batches = parts();
  ref.step(batches);
  cpu.step(batches);
  EXPECT_EQ(cpu.output.tokens_per_expert, ref.output.tokens_per_expert);
  EXPECT_EQ(cpu.output.drops_per_expert, ref.output.drops_per_expert);
  EXPECT_NEAR(cpu.output.aux_loss, ref.output.aux_loss, 1e-5);
  const Distance d = distance(cpu.gradients(), ref.gradients());
  EXPECT_LT(d.value, 1e-4) << d.name;
}

// Evaluation and training with all units: memory was planned for every routing, all tokens to the same experts as well.
TEST_P(Routers, AllTokensToTheSameExperts) {
  const std::vector<MicroBatch> batches = parts();
  for (const RoutingUnit unit : {RoutingUnit::kSequence, RoutingUnit::kMicroBatch, RoutingUnit::kGlobal}) {
    TinyRun run = make(unit, {.recompute = Recompute::kFull}, "cpu", DType::kF32);
    for (int i = 0; i < run.store.size(); ++i) {
      const TensorSpec& s = run.store.specs()[static_cast<size_t>(i)];
      if (s.role == TensorRole::kRouter)
        run.store.set(i, std::vector<float>(static_cast<size_t>(s.shape.elements()), 0.0f).data());
    }
    const StepOutput& output = run.step(batches);
    EXPECT_TRUE(std::isfinite(output.loss()));
    if (!run.config.uses_sinkhorn()) {  // equal logits: every token chooses the same experts, whatever the router
      for (const std::vector<int64_t>& layer : output.tokens_per_expert)
        EXPECT_EQ(*std::max_element(layer.begin(), layer.end()), output.tokens) << testing::PrintToString(layer);
    }
    StepOutput evaluated;
    for (const MicroBatch& b : batches) run.executor.evaluate(b, evaluated);
    EXPECT_TRUE(std::isfinite(evaluated.loss()));
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, Routers, ::testing::ValuesIn(routers()),
                         [](const auto& info) { return std::string(info.param.name); });

// ---- Capacity of evaluation and of few tokens.

TEST(Capacity, EvaluationHasItsOwnFactors) {
  ThreadPool pool(1);
  const auto evaluated = [&](std::vector<double> factors, const std::vector<int>& row) {
    ModelConfig c = tiny_moe();
    c.moe_capacity = std::move(factors);
    TinyRun run(c, backend_by_name("ref"), pool, DType::kF64);
    StepOutput out;
    run.executor.evaluate(random_batch(c, {row}, 4), out);
    return out.loss();
  };
  const double free = evaluated({}, {40});
  EXPECT_EQ(evaluated({1, 8, 1}, {40}), free);  // only the second number counts
  EXPECT_NE(evaluated({8, 1, 8}, {40}), free);
  const double few = evaluated({}, {5});  // fewer tokens than experts: the third
  EXPECT_EQ(evaluated({1, 1, 8}, {5}), few);
  EXPECT_NE(evaluated({8, 8, 2}, {5}), few);
}

TEST(Capacity, RoomOfAnExpert) {
  ModelConfig c = tiny_moe();
  EXPECT_EQ(expert_room(c, true, 11), 11);
  EXPECT_FALSE(may_drop(c));
  c.moe_capacity = {1.5, 2, 4};
  EXPECT_TRUE(may_drop(c));
  EXPECT_EQ(expert_room(c, true, 40), 7);
  EXPECT_EQ(expert_room(c, false, 40), 10);
  EXPECT_EQ(expert_room(c, false, 6), 3);
  EXPECT_EQ(expert_room(c, true, 2), 1);  // a unit that is too small for a share of its own
  EXPECT_EQ(expert_room(c, true, 0), 0);
  c.moe_capacity = {8, 8, 8};
  EXPECT_FALSE(may_drop(c));
}

// ---- The step around the model.

RunConfig steps_config(const ModelConfig& model) {
  RunConfig c;
  c.model.config = model;
  c.training.steps = 10;
  c.training.global_batch_size = 4;
  c.training.micro_batch_size = 2;
  c.training.seq_length = 16;
  c.training.dtype = "f32";
  c.optimizer.lr = 0.01;
  c.optimizer.schedule = LrSchedule::kConstant;
  return c;
}

std::vector<MicroBatch> two_batches(const ModelConfig& c, uint64_t seed) {
  return {random_batch(c, {{16}, {9, 5}}, seed), random_batch(c, {{12}, {16}}, seed + 1)};
}

struct Stepped {
  std::unique_ptr<StepEngine> engine;
  StepReport report;
  Tensors before, after;
};

Stepped one_step(const RunConfig& config, const std::vector<MicroBatch>& batches, LossGuard* guard = nullptr) {
  static ThreadPool pool(1);
  Stepped s;
  s.engine = std::make_unique<StepEngine>(config, backend_by_name("cpu"), pool, 1, true);
  fill_random(s.engine->store(), 11);
  const auto weights = [&] {
    Tensors all;
    for (int i = 0; i < s.engine->store().size(); ++i)
      all[s.engine->store().specs()[static_cast<size_t>(i)].name] = to_doubles(s.engine->store().master(i));
    return all;
  };
  s.before = weights();
  std::string why;
  s.engine->step(1, batches, guard, s.report, why);
  s.after = weights();
  return s;
}

const std::string kBias = "model.layers.1.mlp.moe_statics.e_score_correction_bias",
                  kGate = "model.layers.1.mlp.gate.weight";

// The published pre-training code counts and then forgets to update.
TEST(BiasUpdate, OnceAStepFromTheCountsOfTheStep) {
  ModelConfig model = tiny_moe();
  model.moe_router_bias_update_rate = 0.25;
  RunConfig config = steps_config(model);
  const std::vector<MicroBatch> batches = two_batches(model, 3);
  Tensors first;
  for (const Recompute recompute : {Recompute::kNone, Recompute::kSelective, Recompute::kFull})
    for (const bool whole : {false, true}) {
      config.parallel.recompute = recompute;
      config.training.micro_batch_size = whole ? 4 : 2;
      const Stepped s = one_step(config, whole ? std::vector<MicroBatch>{joined(batches)} : batches);
      const auto& counts = s.report.tokens_per_expert[0];
      int64_t all = 0;
      for (const int64_t n : counts) all += n;
      EXPECT_EQ(all, 58 * model.moe_k);
      bool moved = false;
      for (size_t e = 0; e < counts.size(); ++e) {
        const int64_t less = all - counts[e] * static_cast<int64_t>(counts.size());  // than the mean, in integers
        const auto was = static_cast<float>(s.before.at(kBias)[e]);
        const float want = less == 0 ? was : less > 0 ? was + 0.25f : was - 0.25f;
        EXPECT_EQ(static_cast<float>(s.after.at(kBias)[e]), want) << e;
        moved |= want != was;
      }
      EXPECT_TRUE(moved);
      if (first.empty()) first = s.after;
      EXPECT_EQ(s.after.at(kBias), first.at(kBias));  // accumulation and recompute count nothing twice
    }
}

TEST(BiasUpdate, StaysWithoutARateInABadStepAndWhenFrozen) {
  ModelConfig model = tiny_moe();
  const std::vector<MicroBatch> batches = two_batches(model, 3);
  const Stepped none = one_step(steps_config(model), batches);
  EXPECT_EQ(none.after.at(kBias), none.before.at(kBias));
  model.moe_router_bias_update_rate = 0.25;
  RunConfig frozen = steps_config(model);
  frozen.optimizer.freeze_router = true;
  const Stepped still = one_step(frozen, batches);
  EXPECT_EQ(still.after.at(kBias), still.before.at(kBias));
  LossGuard guard(1.5);
  for (int i = 0; i < 100; ++i) guard.judge(1e-3, 1.0);
  const Stepped bad = one_step(steps_config(model), batches, &guard);
  ASSERT_TRUE(bad.report.skipped);
  EXPECT_EQ(bad.after.at(kBias), bad.before.at(kBias));
}

TEST(FrozenRouter, KeepsItsWeightsAndHasNoLosses) {
  ModelConfig model = all_losses();
  model.output_router_logits = true;
  model.moe_orthogonal_loss_lambda = 0.5;
  RunConfig config = steps_config(model);
  config.optimizer.freeze_router = true;
  const Stepped s = one_step(config, two_batches(model, 3));
  EXPECT_EQ(s.after.at(kGate), s.before.at(kGate));
  EXPECT_NE(s.after.at("model.layers.1.mlp.experts.0.up_proj.weight"),
            s.before.at("model.layers.1.mlp.experts.0.up_proj.weight"));
  EXPECT_EQ(s.report.total_loss, s.report.loss);
  ParameterStore& store = s.engine->store();
  for (const double g : to_doubles(store.gradient(store.find(kGate)))) EXPECT_EQ(g, 0);
}

TEST(OrthogonalLoss, AddsToTheGateOrStepsByItself) {
  ModelConfig model = tiny_moe();
  const std::vector<MicroBatch> batches = two_batches(model, 3);
  RunConfig config = steps_config(model);
  config.optimizer.lr = 0;
  const Stepped without = one_step(config, batches);
  EXPECT_EQ(without.report.orthogonal_loss, 0);
  EXPECT_EQ(without.after.at(kGate), without.before.at(kGate));
  config.model.config.moe_orthogonal_loss_lambda = 0.5;
  const Stepped loss = one_step(config, batches);
  config.training.orthogonal = Orthogonal::kStep;
  const Stepped step = one_step(config, batches);
  EXPECT_GT(loss.report.orthogonal_loss, 0);
  EXPECT_NEAR(loss.report.total_loss - without.report.total_loss, 0.5 * loss.report.orthogonal_loss, 1e-6);
  EXPECT_EQ(loss.report.loss, without.report.loss);  // never in the language-model loss
  EXPECT_EQ(step.report.total_loss, without.report.total_loss);
  // What the loss adds to the gradient is what the step takes off the weight.
  const auto gradient = [](const Stepped& s) {
    return to_doubles(s.engine->store().gradient(s.engine->store().find(kGate)));
  };
  const std::vector<double> with = gradient(loss), bare = gradient(without);
  double size = 0;
  for (size_t i = 0; i < with.size(); ++i) {
    EXPECT_NEAR(step.before.at(kGate)[i] - step.after.at(kGate)[i], with[i] - bare[i], 1e-6);
    size += std::abs(with[i] - bare[i]);
  }
  EXPECT_GT(size, 1e-3);
}

// The gradient is the sum over valid tokens by a constant; the mean is what is told.
TEST(TokenBalance, DividesByAConstant) {
  ThreadPool pool(1);
  ModelConfig model = tiny_moe();
  model.output_router_logits = false;
  const std::vector<MicroBatch> batches = two_batches(model, 8);
  int64_t valid = 0, tokens = 0;
  for (const MicroBatch& b : batches) valid += b.valid_targets(), tokens += b.tokens();
  ASSERT_LT(valid, tokens);
  TinyRun mean(model, backend_by_name("ref"), pool, DType::kF64);
  mean.step(batches);
  const Tensors want = mean.gradients();
  for (const int64_t length : {0, 50}) {
    TinyRun run(model, backend_by_name("ref"), pool, DType::kF64,
                {.loss_average = LossAverage::kTokenBalance, .token_balance_seqlen = length});
    run.step(batches);
    EXPECT_NEAR(run.output.loss(), mean.output.loss(), 1e-13);
    const double ratio = static_cast<double>(valid) / static_cast<double>(length ? 2 * length : tokens);
    EXPECT_NEAR(run.output.differentiated[0], ratio * mean.output.loss(), 1e-12);
    for (const auto& [name, values] : run.gradients())
      for (size_t i = 0; i < values.size(); ++i) ASSERT_NEAR(values[i], ratio * want.at(name)[i], 1e-12) << name;
  }
}

}  // namespace
}  // namespace concerto::test

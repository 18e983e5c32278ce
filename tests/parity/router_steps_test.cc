// What a step does to routers beside forward and backward: the correction bias, the orthogonal loss, frozen routers; and
// the token-balanced loss.
#include <gtest/gtest.h>

#include <cmath>

#include "concerto/cli/backends.h"
#include "concerto/tensor/values.h"
#include "concerto/train/trainer.h"
#include "tests/support/tiny_model.h"
#include "tests/support/tiny_routers.h"

namespace concerto::test {
namespace {

const std::string kBias = "model.layers.1.mlp.moe_statics.e_score_correction_bias",
                  kGate = "model.layers.1.mlp.gate.weight";

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
  ModelConfig model = tiny_moe_with_router_losses();
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

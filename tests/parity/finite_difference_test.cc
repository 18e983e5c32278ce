// Whole models against finite differences in f64: what `train` differentiates is what it says, parameter by parameter.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "concerto/base/rng.h"
#include "concerto/cli/backends.h"
#include "tests/support/tiny_model.h"

namespace concerto::test {
namespace {

ModelConfig moe_interval2() {
  ModelConfig c = tiny_moe();
  c.num_hidden_layers = 4;
  c.moe_layer_start_index = 0;
  c.moe_layer_interval = 2;
  c.use_bias = true;
  return c;
}

ModelConfig with_mtp(ModelConfig c, int64_t depth, MtpHidden hidden, MtpPositions positions, bool bias) {
  c.num_nextn_predict_layers = depth;
  c.mtp_hidden = hidden;
  c.mtp_positions = positions;
  c.use_bias = bias;
  c.mtp_loss_scaling_factor = 0.7;
  return c;
}

// Every loss, and drops; small temperatures would let choices flip under the differences.
ModelConfig other_router(RouterGate gate, RouterScoring scoring, bool groups, double capacity) {
  ModelConfig c = tiny_moe();
  c.moe_gate = gate;
  c.moe_k = groups ? 4 : 2;
  c.scoring_func = scoring;
  c.moe_group_experts = groups;
  c.sinkhorn_2gate = gate == RouterGate::kTop2;
  c.router_aux_loss_coef = 0.3;
  c.router_z_loss_coef = 0.05;
  if (capacity > 0) c.moe_capacity = {capacity, capacity, capacity};
  return c;
}

struct Case {
  const char* name;
  ModelConfig config;
  LossAverage average = LossAverage::kTokens;
  RoutingOptions routing = {};
};
void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

class FiniteDifferences : public ::testing::TestWithParam<Case> {};

bool all_zero(const std::vector<double>& values) {
  return std::all_of(values.begin(), values.end(), [](double v) { return v == 0; });
}

// Two micro-batches, so that the weights between them are in it too.
std::vector<MicroBatch> some_batches(const ModelConfig& config) {
  return {random_batch(config, {{6, 4}}, 21), random_batch(config, {{5}}, 22)};
}

// The loss as a function of one parameter: fourth-order central differences, whose errors (h^4 and 1e-16 / h) are far
// below 1e-9 here.
double slope(TinyRun& run, std::span<const MicroBatch> batches, double* parameter) {
  constexpr double h = 4e-4;
  const double middle = *parameter;
  const auto at = [&](double x) {
    *parameter = x;
    run.step(batches);
    return run.total_loss();
  };
  const double near = at(middle + h) - at(middle - h), far = at(middle + 2 * h) - at(middle - 2 * h);
  *parameter = middle;
  return (8 * near - far) / (12 * h);
}

TEST_P(FiniteDifferences, EveryTensor) {
  const auto& [name, config, average, routing] = GetParam();
  ThreadPool pool(1);
  TinyRun run(config, backend_by_name("ref"), pool, DType::kF64,
              {.loss_average = average, .routing = routing, .slots = 2});
  const std::vector<MicroBatch> batches = some_batches(config);
  run.step(batches);
  const Tensors gradients = run.gradients();
  const auto loads = run.output.tokens_per_expert;
  const Rng rng(3, "elements");
  uint64_t draw = 0;
  int checked = 0;
  std::string without_gradient;
  for (int i = 0; i < run.store.size(); ++i) {
    const TensorSpec& spec = run.store.specs()[static_cast<size_t>(i)];
    const std::vector<double>& g = gradients.at(spec.name);
    if (!spec.trainable) {
      EXPECT_TRUE(all_zero(g)) << spec.name;
      continue;
    }
    const double largest =
        std::abs(*std::max_element(g.begin(), g.end(), [](double a, double b) { return std::abs(a) < std::abs(b); }));
    // The largest, and two of the others at random.
    std::vector<size_t> elements;
    for (size_t j = 0; j < g.size() && elements.empty(); ++j)
      if (std::abs(g[j]) == largest) elements.push_back(j);
    for (int n = 0; n < 2; ++n) elements.push_back(rng.below(draw++, g.size()));
    double* values = run.store.master(i).as<double>();
    for (const size_t j : elements) {
      const double want = slope(run, batches, values + j);
      EXPECT_NEAR(g[j], want, 1e-6 * std::max(std::abs(want), 1e-3 * largest) + 1e-11) << spec.name << "[" << j << "]";
      ++checked;
    }
    // Softmax does not see what a bias of k adds to all of a row, and an expert may have no token with a target.
    if (largest < 1e-14 && spec.expert < 0 && !spec.name.ends_with("k_proj.bias")) without_gradient += spec.name + " ";
  }
  EXPECT_EQ(loads, run.output.tokens_per_expert);  // no choice flipped on the way
  EXPECT_EQ(without_gradient, "");
  EXPECT_GT(checked, 0);
}

INSTANTIATE_TEST_SUITE_P(
    Models, FiniteDifferences,
    ::testing::Values(
        Case{"dense_tied", tiny_dense()}, Case{"moe_untied_aux", tiny_moe()},
        Case{"moe_bias_interval2", moe_interval2()},
        Case{"moe_mean_of_means", moe_interval2(), LossAverage::kMicroBatches},
        Case{"mtp1_pre_main", with_mtp(tiny_dense(), 1, MtpHidden::kPreNorm, MtpPositions::kMain, false)},
        Case{"mtp1_post_shifted", with_mtp(tiny_dense(), 1, MtpHidden::kPostNorm, MtpPositions::kShifted, false)},
        Case{"mtp2_post_main", with_mtp(tiny_moe(), 2, MtpHidden::kPostNorm, MtpPositions::kMain, true)},
        Case{"mtp2_pre_shifted", with_mtp(tiny_moe(), 2, MtpHidden::kPreNorm, MtpPositions::kShifted, true)},
        Case{"topk_drops_per_layer",
             other_router(RouterGate::kTopK, RouterScoring::kSoftmax, false, 2),
             LossAverage::kTokens,
             {.balance_loss = BalanceLoss::kPerLayer}},
        Case{"top2_sinkhorn_global",
             other_router(RouterGate::kTop2, RouterScoring::kSoftmax, false, 2.5),
             LossAverage::kTokens,
             {.unit = RoutingUnit::kGlobal, .balance_loss = BalanceLoss::kPerLayer}},
        Case{"sigmoid_sequences",
             other_router(RouterGate::kTopK, RouterScoring::kSigmoid, false, 0),
             LossAverage::kTokens,
             {.unit = RoutingUnit::kSequence, .balance_loss = BalanceLoss::kPerLayer}},
        Case{"groups_pooled_means",
             other_router(RouterGate::kTopK, RouterScoring::kSoftmax, true, 3),
             LossAverage::kMicroBatches,
             {.balance_loss = BalanceLoss::kPooled, .balance_counts = BalanceCounts::kTopK}},
        Case{"mtp2_pre_main_means", with_mtp(tiny_dense(), 2, MtpHidden::kPreNorm, MtpPositions::kMain, true),
             LossAverage::kMicroBatches}),
    [](const auto& info) { return std::string(info.param.name); });

// ---- Multi-token prediction beside the model without it.

class Mtp : public ::testing::TestWithParam<Case> {
 protected:
  TinyRun make(double weight) {
    ModelConfig c = GetParam().config;
    c.mtp_loss_scaling_factor = weight;
    return TinyRun(c, backend_by_name("ref"), pool_, DType::kF64);
  }
  ThreadPool pool_{1};
};

TEST_P(Mtp, WeightZeroIsOff) {
  TinyRun zero = make(0);
  const std::vector<MicroBatch> batches = some_batches(zero.config);
  zero.step(batches);
  ModelConfig without = GetParam().config;
  without.num_nextn_predict_layers = 0;
  TinyRun off(without, backend_by_name("ref"), pool_, DType::kF64);
  std::vector<MicroBatch> plain = batches;
  for (MicroBatch& b : plain) {
    b.mtp_token_ids.clear();
    b.mtp_targets.clear();
  }
  off.step(plain);
  EXPECT_EQ(zero.output.loss(), off.output.loss());
  EXPECT_GT(zero.output.loss(1), 0);  // still reported
  const Tensors got = zero.gradients();
  for (const auto& [name, want] : off.gradients()) EXPECT_EQ(got.at(name), want) << name;
  for (const auto& [name, values] : got)
    if (name.find("mtp_") != std::string::npos) {
      EXPECT_TRUE(all_zero(values)) << name;
    }
}

// Towards zero the gradient comes to that of the model without it in a straight line, and the losses do not move.
TEST_P(Mtp, GradientIsLinearInTheWeight) {
  TinyRun zero = make(0), small = make(1e-3), large = make(1);
  const std::vector<MicroBatch> batches = some_batches(zero.config);
  for (TinyRun* r : {&zero, &small, &large}) r->step(batches);
  EXPECT_EQ(small.output.loss(), zero.output.loss());
  EXPECT_EQ(small.output.loss(1), large.output.loss(1));
  const Tensors a = zero.gradients(), b = small.gradients(), c = large.gradients();
  double moved = 0;
  for (const auto& [name, base] : a)
    for (size_t i = 0; i < base.size(); ++i) {
      ASSERT_NEAR(b.at(name)[i], base[i] + 1e-3 * (c.at(name)[i] - base[i]), 1e-13) << name;
      moved = std::max(moved, std::abs(c.at(name)[i] - base[i]));
    }
  EXPECT_GT(moved, 1e-3);
}

// Beyond the end of a document no token is read and none is a target: a document's loss is what it is alone.
TEST_P(Mtp, DocumentsDoNotSeeEachOther) {
  TinyRun run = make(1);
  const std::vector<MicroBatch> alone = {random_batch(run.config, {{6}}, 31), random_batch(run.config, {{9}}, 32)};
  const MicroBatch both = joined(alone);
  const int depths = static_cast<int>(run.config.num_nextn_predict_layers);
  run.step(std::span(&both, 1));
  const StepOutput together = run.output;
  run.step(alone);
  for (int i = 0; i <= depths; ++i) EXPECT_NEAR(run.output.loss(i), together.loss(i), 1e-12);
}

INSTANTIATE_TEST_SUITE_P(
    Depths, Mtp,
    ::testing::Values(
        Case{"depth1_pre_main", with_mtp(tiny_dense(), 1, MtpHidden::kPreNorm, MtpPositions::kMain, false)},
        Case{"depth1_post_shifted", with_mtp(tiny_moe(), 1, MtpHidden::kPostNorm, MtpPositions::kShifted, true)},
        Case{"depth2_pre_shifted", with_mtp(tiny_moe(), 2, MtpHidden::kPreNorm, MtpPositions::kShifted, true)},
        Case{"depth2_post_main", with_mtp(tiny_dense(), 2, MtpHidden::kPostNorm, MtpPositions::kMain, false)}),
    [](const auto& info) { return std::string(info.param.name); });

TEST(MtpSwitches, HiddenStateMattersAndAShiftOfAllPositionsDoesNot) {
  ThreadPool pool(1);
  const auto loss = [&](MtpHidden hidden, MtpPositions positions) {
    const ModelConfig c = with_mtp(tiny_dense(), 1, hidden, positions, false);
    TinyRun run(c, backend_by_name("ref"), pool, DType::kF64);
    run.step(some_batches(c));
    return run.output.loss(1);
  };
  const double a = loss(MtpHidden::kPreNorm, MtpPositions::kMain);
  EXPECT_GT(std::abs(a - loss(MtpHidden::kPostNorm, MtpPositions::kMain)), 1e-6);
  // Rope is relative: shifting every position by one turns no score.
  EXPECT_NEAR(a, loss(MtpHidden::kPreNorm, MtpPositions::kShifted), 1e-9);
}

}  // namespace
}  // namespace concerto::test

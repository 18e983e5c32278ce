// Routers of every kind in whole models: what a routing unit is, what capacity and losses do in a step, and that no plan
// and no cut into micro-batches changes it beyond what the unit says.
#include <gtest/gtest.h>

#include <cmath>

#include "concerto/cli/backends.h"
#include "concerto/layers/router_stats.h"
#include "concerto/tensor/values.h"
#include "tests/support/tiny_model.h"
#include "tests/support/tiny_routers.h"

namespace concerto::test {
namespace {

constexpr double kRounding = 1e-11;  // f64 sums of a few hundred terms in another order
const std::string kGate = "model.layers.1.mlp.gate.weight";

// Losses, counts and gradients of the last step, bit for bit.
void expect_same_step(const TinyRun& run, const TinyRun& want) {
  EXPECT_EQ(run.output.loss(), want.output.loss());
  EXPECT_EQ(run.output.aux_loss(), want.output.aux_loss());
  EXPECT_EQ(run.output.z_loss(), want.output.z_loss());
  EXPECT_EQ(run.output.tokens_per_expert, want.output.tokens_per_expert);
  EXPECT_EQ(run.output.drops_per_expert, want.output.drops_per_expert);
  const Tensors got = run.gradients();
  for (const auto& [name, values] : want.gradients()) EXPECT_EQ(got.at(name), values) << name;
}

class Routers : public ::testing::TestWithParam<TinyRouter> {
 protected:
  TinyRun make(RoutingUnit unit, const Plan& plan = {}, const char* backend = "ref", DType type = DType::kF64) {
    return make(GetParam().config, unit, plan, backend, type);
  }
  TinyRun make(const ModelConfig& config, RoutingUnit unit, const Plan& plan = {}, const char* backend = "ref",
               DType type = DType::kF64) {
    return TinyRun(config, backend_by_name(backend), pool_, type, plan_of(unit, plan));
  }
  static Plan plan_of(RoutingUnit unit, Plan plan) {
    plan.routing = GetParam().options;
    plan.routing.unit = unit;
    plan.max_tokens = std::max<int64_t>(80, plan.max_tokens);
    if (unit == RoutingUnit::kGlobal) plan.slots = std::max<int64_t>(3, plan.slots);
    return plan;
  }
  // 7, 64 (in two sequences) and 3 tokens.
  std::vector<MicroBatch> parts() const {
    return {random_batch(GetParam().config, {{7}}, 1), random_batch(GetParam().config, {{34, 11}, {19}}, 2),
            random_batch(GetParam().config, {{3}}, 3)};
  }
  ModelConfig without_router_losses() const {
    ModelConfig c = GetParam().config;
    c.router_aux_loss_coef = c.router_z_loss_coef = 0;
    return c;
  }
  ThreadPool pool_{1};
};

class FreeRouters : public Routers {};  // no choice looks at another token

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
  EXPECT_NEAR(got.output.aux_loss(), want.output.aux_loss(), kRounding);
  EXPECT_NEAR(got.output.z_loss(), want.output.z_loss(), kRounding);
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
  EXPECT_EQ(sum(whole.output.drops_per_expert) > 0, GetParam().drops);
}

// Each sequence as a micro-batch of its own.
std::vector<MicroBatch> sequences(std::span<const MicroBatch> batches) {
  std::vector<MicroBatch> all;
  for (const MicroBatch& b : batches)
    for (size_t r = 0; r + 1 < b.row_offsets.size(); ++r) {
      const int32_t begin = b.row_offsets[r], end = b.row_offsets[r + 1];
      MicroBatch& one = all.emplace_back();
      for (const auto field : {&MicroBatch::token_ids, &MicroBatch::positions, &MicroBatch::targets})
        (one.*field).assign((b.*field).begin() + begin, (b.*field).begin() + end);
      one.row_offsets = {0, end - begin};
      for (const int32_t offset : b.doc_offsets)
        if (offset >= begin && offset <= end) one.doc_offsets.push_back(offset - begin);
    }
  return all;
}

// A batch of four sequences as one micro-batch, and as four micro-batches of one.
TEST_P(Routers, SequencesAreUnits) {
  TinyRun whole = make(RoutingUnit::kSequence), cut = make(RoutingUnit::kMicroBatch);
  const std::vector<MicroBatch> batches = parts();
  const MicroBatch all = joined(batches);
  whole.step(std::span(&all, 1));
  cut.step(sequences(batches));
  expect_same(whole, cut);
}

// The language-model loss knows neither units nor cuts.
TEST_P(FreeRouters, LmGradientIsTheSameUnderEveryUnit) {
  const ModelConfig config = without_router_losses();
  const std::vector<MicroBatch> batches = parts();
  const MicroBatch all = joined(batches);
  TinyRun whole = make(config, RoutingUnit::kMicroBatch);
  whole.step(std::span(&all, 1));
  for (const RoutingUnit unit : {RoutingUnit::kSequence, RoutingUnit::kMicroBatch, RoutingUnit::kGlobal})
    for (const auto& cut : {batches, std::vector<MicroBatch>{all}}) {
      TinyRun run = make(config, unit);
      run.step(cut);
      const Distance d = distance(run.gradients(), whole.gradients());
      EXPECT_LT(d.value, kRounding) << d.name;
      EXPECT_NEAR(run.output.loss(), whole.output.loss(), kRounding);
      EXPECT_EQ(run.output.tokens_per_expert, whole.output.tokens_per_expert);
    }
}

std::vector<MicroBatch> without_targets(std::vector<MicroBatch> batches) {
  for (MicroBatch& b : batches) std::fill(b.targets.begin(), b.targets.end(), kIgnoreIndex);
  return batches;
}

void add(Tensors& to, const Tensors& from, double weight) {
  for (const auto& [name, values] : from) {
    to[name].resize(values.size());
    for (size_t i = 0; i < values.size(); ++i) to[name][i] += weight * values[i];
  }
}

// A step is the mean of its units', each as if it were alone, with its own drops and choices: in the language-model
// loss they weigh by valid targets, in the router's losses by tokens.
TEST_P(Routers, SmallerUnitsWeighByTheirTokens) {
  const std::vector<MicroBatch> batches = parts();
  const int64_t valid = joined(batches).valid_targets();
  for (const RoutingUnit unit : {RoutingUnit::kSequence, RoutingUnit::kMicroBatch}) {
    TinyRun all = make(unit);
    all.step(batches);
    TinyRun model = make(without_router_losses(), RoutingUnit::kMicroBatch), routers = make(RoutingUnit::kMicroBatch);
    Tensors want, of_routers;
    double loss = 0, balance = 0, z = 0;
    int64_t drops = 0;
    for (const MicroBatch& b : unit == RoutingUnit::kSequence ? sequences(batches) : batches) {
      const double by_targets = static_cast<double>(b.valid_targets()) / static_cast<double>(valid);
      const double by_tokens = static_cast<double>(b.tokens()) / 74;
      model.step(std::span(&b, 1));
      loss += by_targets * model.output.loss();
      add(want, model.gradients(), by_targets);
      routers.step(without_targets({b}));
      balance += by_tokens * routers.output.aux_loss();
      z += by_tokens * routers.output.z_loss();
      drops += sum(routers.output.drops_per_expert);
      add(of_routers, routers.gradients(), by_tokens);
    }
    EXPECT_GT(distance(of_routers.at(kGate), std::vector<double>(of_routers.at(kGate).size())), 1e-3);
    add(want, of_routers, 1);
    const Distance d = distance(all.gradients(), want);
    EXPECT_LT(d.value, kRounding) << d.name;
    EXPECT_NEAR(all.output.loss(), loss, kRounding);
    EXPECT_NEAR(all.output.aux_loss(), balance, kRounding);
    EXPECT_NEAR(all.output.z_loss(), z, kRounding);
    EXPECT_EQ(sum(all.output.drops_per_expert), drops);
    EXPECT_EQ(drops > 0, GetParam().drops);
  }
}

// The main loss weighs nothing: what the router's losses leave in the gate does not depend on accumulation.
TEST_P(Routers, GateGradientsDoNotGrowWithAccumulation) {
  const std::vector<MicroBatch> part = without_targets({random_batch(GetParam().config, {{13}, {7, 4}}, 5)});
  for (const LossAverage average : {LossAverage::kTokens, LossAverage::kMicroBatches})
    for (const RoutingUnit unit : {RoutingUnit::kSequence, RoutingUnit::kMicroBatch, RoutingUnit::kGlobal}) {
      // Room for four times the tokens is not four times the room, and Sinkhorn stops by the size of its sums.
      if (unit == RoutingUnit::kGlobal && (GetParam().drops || GetParam().sinkhorn)) continue;
      TinyRun run = make(unit, {.loss_average = average, .slots = 4});
      run.step(part);
      const Tensors one = run.gradients();
      EXPECT_GT(distance(one.at(kGate), std::vector<double>(one.at(kGate).size())), 1e-3);
      for (const size_t times : {2, 4}) {
        run.step(std::vector<MicroBatch>(times, part[0]));
        const Distance d = distance(run.gradients(), one);
        EXPECT_LT(d.value, kRounding) << d.name;
      }
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
          SCOPED_TRACE(schedule);
          expect_same_step(run, plain);
        }
    }
}

// Tokens enough that every op has work for several threads.
TEST_P(Routers, ThreadsGiveTheSameBits) {
  const std::vector<MicroBatch> batches = {random_batch(GetParam().config, {{300, 11}, {390}}, 1),
                                           random_batch(GetParam().config, {{650}}, 2)};
  for (const DType type : {DType::kF32, DType::kBF16})
    for (const RoutingUnit unit : {RoutingUnit::kSequence, RoutingUnit::kMicroBatch, RoutingUnit::kGlobal}) {
      TinyRun one = make(unit, {.max_tokens = 701}, "cpu", type);
      one.step(batches);
      ThreadPool many(2);
      TinyRun run(GetParam().config, backend_by_name("cpu"), many, type, plan_of(unit, {.max_tokens = 701}));
      run.step(batches);
      expect_same_step(run, one);
    }
}

TEST_P(Routers, BackendsAgree) {
  TinyRun ref = make(RoutingUnit::kMicroBatch), cpu = make(RoutingUnit::kMicroBatch, {}, "cpu", DType::kF32);
  const std::vector<MicroBatch> batches = parts();
  ref.step(batches);
  cpu.step(batches);
  EXPECT_EQ(cpu.output.tokens_per_expert, ref.output.tokens_per_expert);
  EXPECT_EQ(cpu.output.drops_per_expert, ref.output.drops_per_expert);
  EXPECT_NEAR(cpu.output.aux_loss(), ref.output.aux_loss(), 1e-5);
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

const auto kName = [](const auto& info) { return std::string(info.param.name); };

std::vector<TinyRouter> free_routers() {
  std::vector<TinyRouter> all = tiny_routers();
  std::erase_if(all, [](const TinyRouter& r) { return r.drops || r.sinkhorn; });
  return all;
}
INSTANTIATE_TEST_SUITE_P(Kinds, FreeRouters, ::testing::ValuesIn(free_routers()), kName);
INSTANTIATE_TEST_SUITE_P(Kinds, Routers, ::testing::ValuesIn(tiny_routers()), kName);

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
  c.moe_num_experts = 0;  // a dense model in a MoE file
  EXPECT_EQ(expert_room(c, true, 11), 11);
}

}  // namespace
}  // namespace concerto::test

// Promise 1: a plan never changes the maths. Schedule, recompute and threads give the same bits; the cut into
// micro-batches, which orders the sums anew, gives the same numbers within rounding.
#include <gtest/gtest.h>

#include <cmath>

#include "concerto/cli/backends.h"
#include "concerto/tensor/values.h"
#include "concerto/train/trainer.h"
#include "tests/support/tiny_model.h"

namespace concerto::test {
namespace {

// What three optimizer steps show of themselves.
struct Trajectory {
  std::vector<double> losses, norms;
  std::vector<Tensors> gradients;
  std::vector<std::vector<std::vector<int64_t>>> tokens_per_expert;
  Tensors weights;
};

struct Options {
  std::string backend = "cpu", dtype = "f32", schedule = "1f1b";
  Recompute recompute = Recompute::kNone;
  int threads = 1;
  bool poison = false;
  int scale = 1;  // of the lengths of documents
};

RunConfig run_config(const ModelConfig& model, const Options& o) {
  RunConfig c;
  c.model.config = model;
  c.training.steps = 3;
  c.training.global_batch_size = 5;
  c.training.micro_batch_size = 2;  // two micro-batches of two rows, one of one
  c.training.seq_length = 16 * o.scale;
  c.training.dtype = o.dtype;
  c.optimizer.lr = 0.01;
  c.optimizer.schedule = LrSchedule::kConstant;
  c.parallel.schedule = o.schedule;
  c.parallel.recompute = o.recompute;
  return c;
}

Trajectory train(const ModelConfig& model, const Options& o) {
  const RunConfig config = run_config(model, o);
  ThreadPool pool(o.threads);
  StepEngine engine(config, backend_by_name(o.backend), pool, 1, o.poison);
  fill_random(engine.store(), 11);
  Trajectory t;
  StepReport report;
  std::string why;
  for (int64_t step = 1; step <= config.training.steps; ++step) {
    const auto seed = static_cast<uint64_t>(10 * step);
    const int n = o.scale;
    const std::vector<MicroBatch> batches = {random_batch(model, {{7 * n, 9 * n}, {13 * n}}, seed),
                                             random_batch(model, {{16 * n}, {n, 4 * n, 8 * n}}, seed + 1),
                                             random_batch(model, {{11 * n}}, seed + 2)};
    engine.step(step, batches, nullptr, report, why);
    t.losses.push_back(report.loss);
    t.losses.push_back(report.total_loss);
    t.losses.insert(t.losses.end(), report.mtp_losses.begin(), report.mtp_losses.end());
    t.norms.push_back(report.grad_norm);
    t.tokens_per_expert.push_back(report.tokens_per_expert);
    Tensors gradients;
    for (int i = 0; i < engine.store().size(); ++i)
      gradients[engine.store().specs()[static_cast<size_t>(i)].name] = to_doubles(engine.store().gradient(i));
    t.gradients.push_back(std::move(gradients));
  }
  for (int i = 0; i < engine.store().size(); ++i)
    t.weights[engine.store().specs()[static_cast<size_t>(i)].name] = to_doubles(engine.store().master(i));
  return t;
}

void expect_same_bits(const Trajectory& got, const Trajectory& want, const std::string& what) {
  SCOPED_TRACE(what);
  EXPECT_EQ(got.losses, want.losses);
  EXPECT_EQ(got.norms, want.norms);
  EXPECT_EQ(got.tokens_per_expert, want.tokens_per_expert);
  for (size_t s = 0; s < want.gradients.size(); ++s)
    for (const auto& [name, values] : want.gradients[s])
      EXPECT_EQ(got.gradients[s].at(name), values) << "step " << s + 1 << " gradient of " << name;
  for (const auto& [name, values] : want.weights) EXPECT_EQ(got.weights.at(name), values) << name;
  for (const double loss : want.losses) EXPECT_TRUE(std::isfinite(loss)) << loss;
}

ModelConfig moe_with_mtp() {
  ModelConfig c = tiny_moe();
  c.num_nextn_predict_layers = 1;
  c.use_bias = true;
  return c;
}

class Plans : public ::testing::TestWithParam<std::tuple<const char*, const char*>> {};

TEST_P(Plans, ScheduleAndRecomputeGiveTheSameBits) {
  const auto [backend, dtype] = GetParam();
  Options o{.backend = backend, .dtype = dtype};
  const Trajectory want = train(moe_with_mtp(), o);
  EXPECT_NE(want.losses[0], want.losses[3]);  // the weights did move
  for (const char* schedule : {"1f1b", "zero_bubble"})
    for (const Recompute recompute : {Recompute::kNone, Recompute::kSelective, Recompute::kFull}) {
      o.schedule = schedule;
      o.recompute = recompute;
      o.poison = true;  // of memory that nothing wrote, not one bit may reach a result
      expect_same_bits(train(moe_with_mtp(), o), want,
                       fmt::format("{} recompute {}", schedule, static_cast<int>(recompute)));
    }
}

TEST_P(Plans, ThreadsGiveTheSameBits) {
  const auto [backend, dtype] = GetParam();
  Options o{.backend = backend, .dtype = dtype};
  ModelConfig model = moe_with_mtp();
  if (std::string(backend) == "cpu") {  // large enough that every op has work for several threads
    o.scale = 6;
    model.vocab_size = 1600;
    model.hidden_size = 96;
    model.intermediate_size = 200;
    model.moe_intermediate_size = 72;
  }
  const Trajectory want = train(model, o);
  for (const int threads : {2, 4}) {
    o.threads = threads;
    expect_same_bits(train(model, o), want, fmt::format("{} threads", threads));
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, Plans,
                         ::testing::Values(std::tuple{"cpu", "f32"}, std::tuple{"cpu", "bf16"},
                                           std::tuple{"ref", "f32"}, std::tuple{"ref", "bf16"}),
                         [](const auto& info) {
                           return std::string(std::get<0>(info.param)) + "_" + std::get<1>(info.param);
                         });

// ---- The cut into micro-batches. In f64 on `ref` only the order of sums differs: 1e-12 is some thousand roundings.

constexpr double kRounding = 1e-12;

class MicroBatches : public ::testing::Test {
 protected:
  TinyRun run(const ModelConfig& config, LossAverage average = LossAverage::kTokens) {
    return TinyRun(config, ref_, pool_, DType::kF64, {.loss_average = average, .max_tokens = 128});
  }
  static ModelConfig without_aux(int64_t mtp = 1) {
    ModelConfig c = tiny_moe();
    c.output_router_logits = false;
    c.num_nextn_predict_layers = mtp;
    return c;
  }
  static std::vector<MicroBatch> rows_of(const ModelConfig& config, const std::vector<int>& lengths) {
    std::vector<MicroBatch> rows;
    for (size_t i = 0; i < lengths.size(); ++i) rows.push_back(random_batch(config, {{lengths[i]}}, 40 + i));
    return rows;
  }
  // `count` micro-batches of neighbouring rows.
  static std::vector<MicroBatch> cut(const std::vector<MicroBatch>& rows, size_t count) {
    std::vector<MicroBatch> out;
    const size_t each = rows.size() / count;
    for (size_t i = 0; i < count; ++i) out.push_back(joined(std::span(rows).subspan(i * each, each)));
    return out;
  }

  ThreadPool pool_{1};
  const Backend& ref_ = backend_by_name("ref");
};

TEST_F(MicroBatches, ValidTokensWeighTheSameInEveryCut) {
  const ModelConfig config = without_aux();
  const std::vector<MicroBatch> rows = rows_of(config, {5, 12, 9, 16});
  TinyRun whole = run(config);
  whole.step(cut(rows, 1));
  const Tensors want = whole.gradients();
  for (const size_t count : {2, 4}) {
    TinyRun parts = run(config);
    parts.step(cut(rows, count));
    const Distance d = distance(parts.gradients(), want);
    EXPECT_LT(d.value, kRounding) << count << " micro-batches: " << d.name;
    EXPECT_NEAR(parts.output.loss(), whole.output.loss(), kRounding);
    EXPECT_NEAR(parts.output.loss(1), whole.output.loss(1), kRounding);
    EXPECT_EQ(parts.output.tokens_per_expert, whole.output.tokens_per_expert);
    EXPECT_EQ(parts.output.loss_count, whole.output.loss_count);
  }
}

// Micro-batches of 7, 64 and 3 valid tokens and one batch of 74 (known-faults 10).
TEST_F(MicroBatches, VeryUnequalMicroBatches) {
  const ModelConfig config = without_aux();
  std::vector<MicroBatch> parts = rows_of(config, {8, 66, 5});
  const int64_t wanted[] = {7, 64, 3};
  for (size_t i = 0; i < 3; ++i) {
    int64_t valid = 0;
    for (size_t t = 0; t < parts[i].targets.size(); ++t)
      parts[i].targets[t] =
          valid < wanted[i] && t + 1 < parts[i].targets.size() ? (++valid, parts[i].token_ids[t + 1]) : kIgnoreIndex;
    ASSERT_EQ(parts[i].valid_targets(), wanted[i]);
  }
  TinyRun apart = run(config), whole = run(config);
  apart.step(parts);
  const MicroBatch all = joined(parts);
  whole.step(std::span(&all, 1));
  EXPECT_EQ(apart.output.loss_count[0], 74);
  EXPECT_NEAR(apart.output.loss(), whole.output.loss(), kRounding);
  const Distance d = distance(apart.gradients(), whole.gradients());
  EXPECT_LT(d.value, kRounding) << d.name;
}

// Baidu's average: each micro-batch's mean weighs the same, whatever its tokens.
TEST_F(MicroBatches, MeanOfMeansIsWhatItSays) {
  const ModelConfig config = without_aux();
  const std::vector<MicroBatch> rows = rows_of(config, {4, 14, 9});
  TinyRun means = run(config, LossAverage::kMicroBatches);
  means.step(rows);
  Tensors want;
  double loss = 0, mtp = 0;
  for (const MicroBatch& row : rows) {
    TinyRun alone = run(config);  // a mean over its own tokens
    alone.step(std::span(&row, 1));
    loss += alone.output.loss() / 3;
    mtp += alone.output.loss(1) / 3;
    for (const auto& [name, values] : alone.gradients()) {
      auto& sum = want[name];
      sum.resize(values.size());
      for (size_t i = 0; i < values.size(); ++i) sum[i] += values[i] / 3;
    }
  }
  EXPECT_NEAR(means.output.loss(), loss, kRounding);
  EXPECT_NEAR(means.output.loss(1), mtp, kRounding);
  const Distance d = distance(means.gradients(), want);
  EXPECT_LT(d.value, kRounding) << d.name;
  TinyRun tokens = run(config);
  tokens.step(rows);
  EXPECT_GT(distance(tokens.gradients(), want).value, 1e-3);  // and it is another average
}

// A micro-batch in which nothing is trained (all prompt) adds nothing and divides by nothing.
TEST_F(MicroBatches, NothingToTrainOn) {
  const ModelConfig config = without_aux();
  std::vector<MicroBatch> rows = rows_of(config, {6, 9});
  const std::vector<MicroBatch> first(rows.begin(), rows.begin() + 1);
  for (auto* targets : {&rows[1].targets, &rows[1].mtp_targets})
    std::fill(targets->begin(), targets->end(), kIgnoreIndex);
  for (const LossAverage average : {LossAverage::kTokens, LossAverage::kMicroBatches}) {
    TinyRun both = run(config, average), one = run(config, average);
    both.step(rows);
    one.step(first);
    const double share = average == LossAverage::kTokens ? 1.0 : 0.5;  // an empty micro-batch still counts as one
    Tensors want = one.gradients();
    for (auto& [name, values] : want)
      for (double& v : values) v *= share;
    EXPECT_LT(distance(both.gradients(), want).value, kRounding);
    EXPECT_NEAR(both.output.loss(), share * one.output.loss(), kRounding);
    TinyRun none = run(config, average);
    none.step(std::span(&rows[1], 1));
    EXPECT_EQ(none.output.loss(), 0);
    for (const auto& [name, values] : none.gradients())
      for (const double v : values) ASSERT_EQ(v, 0) << name;
  }
}

// Rows of unlike lengths share a batch without padding: each gives what it gives alone, bit for bit.
TEST_F(MicroBatches, RaggedRowsAreAsEachRowAlone) {
  struct Hidden final : Observer {
    bool wants_logits() const override { return true; }
    void record(const std::string& name, View value) override {
      if (name == "logits") logits = to_doubles(value);
    }
    std::vector<double> logits;
  };
  const ModelConfig config = without_aux(0);
  const std::vector<MicroBatch> rows = rows_of(config, {3, 17, 1, 8});
  const MicroBatch all = joined(rows);
  for (const auto& [backend, dtype] : {std::pair{"ref", DType::kF32}, {"cpu", DType::kF32}}) {
    TinyRun run(config, backend_by_name(backend), pool_, dtype);
    Hidden seen;
    run.executor.set_observer(&seen);
    run.step(std::span(&all, 1));
    const std::vector<double> together = seen.logits;
    std::vector<double> alone;
    for (const MicroBatch& row : rows) {
      run.step(std::span(&row, 1));
      alone.insert(alone.end(), seen.logits.begin(), seen.logits.end());
    }
    run.executor.set_observer(nullptr);
    EXPECT_EQ(together, alone) << backend;
  }
}

// ---- Auxiliary loss.

Tensors gates(const Tensors& all) {
  Tensors out;
  for (const auto& [name, values] : all)
    if (name.ends_with("mlp.gate.weight")) out[name] = values;
  return out;
}

TEST_F(MicroBatches, AuxLossReachesTheGate) {
  ModelConfig config = tiny_moe();
  const std::vector<MicroBatch> rows = rows_of(config, {12, 12});
  TinyRun with = run(config);
  with.step(rows);
  config.output_router_logits = false;
  TinyRun without = run(config);
  without.step(rows);
  ASSERT_EQ(gates(with.gradients()).size(), 2u);
  for (const auto& [name, values] : gates(with.gradients()))
    EXPECT_GT(distance(without.gradients().at(name), values), 1e-3) << name;
  EXPECT_EQ(with.output.loss(), without.output.loss());          // it is not in the language-model loss
  EXPECT_EQ(with.output.aux_loss(), without.output.aux_loss());  // and is reported even if it is not trained
}

// M = 1, 2, 4 micro-batches of the same tokens (known-faults 9): the same part repeated M times has M equal losses, so
// their mean and its gradient do not depend on M.
TEST_F(MicroBatches, AuxLossDoesNotGrowWithAccumulation) {
  ModelConfig config = tiny_moe();
  config.router_aux_loss_coef = 1;
  MicroBatch part = random_batch(config, {{13}, {7, 4}}, 5);
  std::fill(part.targets.begin(), part.targets.end(), kIgnoreIndex);  // the main loss is zero (known-faults 8)
  TinyRun one = run(config);
  one.step(std::span(&part, 1));
  const Tensors want = gates(one.gradients());
  for (const auto& [name, values] : want) EXPECT_GT(std::abs(values[0]), 0) << name;
  for (const size_t count : {2, 4}) {
    for (const LossAverage average : {LossAverage::kTokens, LossAverage::kMicroBatches}) {
      TinyRun many = run(config, average);
      many.step(std::vector<MicroBatch>(count, part));
      EXPECT_NEAR(many.output.aux_loss(), one.output.aux_loss(), kRounding);
      EXPECT_LT(distance(gates(many.gradients()), want).value, kRounding) << count;
    }
    // The routing unit is the micro-batch; one of all the repetitions has the same loads.
    TinyRun whole = run(config);
    const MicroBatch all = joined(std::vector<MicroBatch>(count, part));
    whole.step(std::span(&all, 1));
    EXPECT_NEAR(whole.output.aux_loss(), one.output.aux_loss(), kRounding);
    EXPECT_LT(distance(gates(whole.gradients()), want).value, kRounding) << count;
  }
}

// The value beside the formula, written out (reference ernie45-model 5.2): E * sum_e f_e P_e over the layers together;
// micro-batches weigh by their own tokens, each with its own counts (known-faults 10).
TEST_F(MicroBatches, AuxLossIsTheFormula) {
  struct Probs final : Observer {
    bool wants_logits() const override { return false; }
    void record(const std::string& name, View value) override {
      if (!name.ends_with(".probs")) return;
      const std::vector<double> v = to_doubles(value);
      all.insert(all.end(), v.begin(), v.end());
    }
    std::vector<double> all;
  };
  const ModelConfig config = tiny_moe();
  const std::vector<MicroBatch> rows = rows_of(config, {7, 64, 3});
  const auto experts = static_cast<size_t>(config.moe_num_experts);
  TinyRun r = run(config);
  double want = 0;
  for (const MicroBatch& row : rows) {
    Probs probs;
    r.executor.set_observer(&probs);
    r.step(std::span(&row, 1));
    r.executor.set_observer(nullptr);
    const size_t lines = probs.all.size() / experts;  // tokens of both MoE layers
    ASSERT_EQ(lines, 2 * static_cast<size_t>(row.tokens()));
    std::vector<double> f(experts), p(experts);
    for (size_t t = 0; t < lines; ++t) {
      const double* line = &probs.all[t * experts];
      for (size_t e = 0; e < experts; ++e) {
        int64_t better = 0;
        for (size_t o = 0; o < experts; ++o) better += line[o] > line[e];
        f[e] += better < config.moe_k ? 1.0 / static_cast<double>(lines) : 0;
        p[e] += line[e] / static_cast<double>(lines);
      }
    }
    double loss = 0;
    for (size_t e = 0; e < experts; ++e) loss += static_cast<double>(experts) * f[e] * p[e];
    EXPECT_NEAR(r.output.aux_loss(), loss, 1e-12);
    want += loss * static_cast<double>(row.tokens()) / 74;
  }
  r.step(rows);
  EXPECT_NEAR(r.output.aux_loss(), want, 1e-12);
}

// ---- Extreme routing.

TEST_F(MicroBatches, AllTokensToOneExpert) {
  ModelConfig config = tiny_moe();
  config.moe_k = 1;
  const std::vector<MicroBatch> rows = {random_batch(config, {{20}, {11}}, 3), random_batch(config, {{9, 9}}, 4)};
  const auto steer = [](ParameterStore& store) {
    for (int i = 0; i < store.size(); ++i)
      if (store.specs()[static_cast<size_t>(i)].role == TensorRole::kCorrectionBias) {
        std::vector<float> bias(static_cast<size_t>(store.specs()[static_cast<size_t>(i)].shape.elements()));
        bias[5] = 100;
        store.set(i, bias.data());
      }
  };
  TinyRun cpu(config, backend_by_name("cpu"), pool_, DType::kF32), ref(config, ref_, pool_, DType::kF64);
  steer(cpu.store);
  steer(ref.store);
  cpu.step(rows);
  ref.step(rows);
  for (const TinyRun* r : {&cpu, &ref})
    for (const auto& layer : r->output.tokens_per_expert)
      for (size_t e = 0; e < layer.size(); ++e) EXPECT_EQ(layer[e], e == 5 ? 49 : 0);
  EXPECT_NEAR(cpu.output.loss(), ref.output.loss(), 1e-5);
  const Tensors got = cpu.gradients();
  for (const auto& [name, want] : ref.gradients()) EXPECT_LT(distance(got.at(name), want), 1e-4) << name;
}

// All scores equal: every choice is a tie, and recompute must not choose again (known-faults 31).
TEST(Ties, RecomputeKeepsTheChoices) {
  const auto flat = [](const char* backend, const char* dtype, Recompute recompute) {
    ModelConfig model = moe_with_mtp();
    const RunConfig config = run_config(model, {.dtype = dtype, .recompute = recompute});
    ThreadPool pool(1);
    StepEngine engine(config, backend_by_name(backend), pool, 1, true);
    ParameterStore& store = engine.store();
    fill_random(store, 11);
    for (int i = 0; i < store.size(); ++i) {
      const TensorSpec& s = store.specs()[static_cast<size_t>(i)];
      if (s.role != TensorRole::kRouter && s.role != TensorRole::kCorrectionBias) continue;
      store.set(i, std::vector<float>(static_cast<size_t>(s.shape.elements()), 0.5f).data());
    }
    StepReport report;
    std::string why;
    Trajectory t;
    const std::vector<MicroBatch> batches = {random_batch(model, {{16}, {16}}, 1), random_batch(model, {{16}, {16}}, 2),
                                             random_batch(model, {{16}}, 3)};
    engine.step(1, batches, nullptr, report, why);
    t.losses = {report.loss, report.total_loss};
    t.norms = {report.grad_norm};
    t.tokens_per_expert = {report.tokens_per_expert};
    t.gradients.emplace_back();
    for (int i = 0; i < store.size(); ++i)
      t.gradients[0][store.specs()[static_cast<size_t>(i)].name] = to_doubles(store.gradient(i));
    return t;
  };
  for (const auto& [backend, dtype] : {std::pair{"ref", "f32"}, {"cpu", "f32"}, {"cpu", "bf16"}}) {
    const Trajectory want = flat(backend, dtype, Recompute::kNone);
    EXPECT_EQ(want.tokens_per_expert[0][0], (std::vector<int64_t>{80, 80, 80, 0, 0, 0, 0, 0}))
        << backend;  // a tie goes to the lower index
    for (const Recompute r : {Recompute::kSelective, Recompute::kFull})
      expect_same_bits(flat(backend, dtype, r), want,
                       fmt::format("{} {} recompute {}", backend, dtype, static_cast<int>(r)));
  }
}

}  // namespace
}  // namespace concerto::test

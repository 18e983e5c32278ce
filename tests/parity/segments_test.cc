// B and W are truly apart: every W after all Bs, in reverse order, gives the sums that B and W together give.
#include <gtest/gtest.h>

#include "concerto/cli/backends.h"
#include "tests/support/tiny_model.h"

namespace concerto::test {
namespace {

struct Case {
  const char* name;
  const char* backend;
  DType dtype;
  bool moe;
  int64_t mtp;
  Recompute recompute;
  int threads;
};

void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

class SegmentsApart : public ::testing::TestWithParam<Case> {
 protected:
  SegmentsApart() : pool_(GetParam().threads) {
    config_ = GetParam().moe ? tiny_moe() : tiny_dense();
    config_.use_bias = true;
    config_.num_nextn_predict_layers = GetParam().mtp;
    const Rows shapes[kBatches] = {{{5, 3}, {4}}, {{9}}, {{1, 2, 3}, {2, 2}}, {{11}, {6}}};
    for (uint64_t i = 0; i < kBatches; ++i) batches_.push_back(random_batch(config_, shapes[i], 100 + i));
  }

  TinyRun make(const char* schedule) {
    return TinyRun(config_, backend_by_name(GetParam().backend), pool_, GetParam().dtype,
                   {.schedule = schedule, .recompute = GetParam().recompute, .slots = kBatches});
  }

  static PipelineSchedule actions(const std::vector<std::pair<ActionKind, std::vector<int>>>& lists, bool split) {
    PipelineSchedule s{.name = "test", .micro_batches = kBatches, .split = split, .ranks = {{}}, .slots = {{kBatches}}};
    for (const auto& [kind, order] : lists)
      for (const int m : order) s.ranks[0].push_back({kind, m});
    return s;
  }

  // Written by the head's B, which declares that it fuses its weight gradient.
  bool is_fused(const std::string& name) const {
    return name.starts_with("lm_head") || (config_.tie_word_embeddings && name == "model.embed_tokens.weight");
  }

  static constexpr int kBatches = 4;
  ThreadPool pool_;
  ModelConfig config_;
  std::vector<MicroBatch> batches_;
};

const std::vector<int> kForwards = {0, 1, 2, 3}, kInputs = {2, 0, 3, 1}, kReversed = {3, 2, 1, 0};

TEST_P(SegmentsApart, BackwardInputWritesNoWeightGradient) {
  TinyRun run = make("zero_bubble");
  run.step(actions({{ActionKind::kForward, kForwards}, {ActionKind::kBackwardInput, kInputs}}, true), batches_);
  for (const auto& [name, values] : run.gradients()) {
    double sum = 0;
    for (const double v : values) sum += std::abs(v);
    if (is_fused(name))
      EXPECT_GT(sum, 0) << name;
    else
      EXPECT_EQ(sum, 0) << name;
  }
}

TEST_P(SegmentsApart, AllWeightsAfterAllInputsInReverseOrder) {
  TinyRun apart = make("zero_bubble");
  const PipelineSchedule late = actions({{ActionKind::kForward, kForwards},
                                         {ActionKind::kBackwardInput, kInputs},
                                         {ActionKind::kBackwardWeight, kReversed}},
                                        true);
  validate_pipeline(late);
  apart.step(late, batches_);
  const Tensors got = apart.gradients();

  // The fused order of the same sums: micro-batch 3 first. The head sums where B is, in another order.
  TinyRun fused = make("1f1b");
  std::vector<std::pair<ActionKind, std::vector<int>>> steps;
  for (const int m : kReversed) {
    steps.push_back({ActionKind::kForward, {m}});
    steps.push_back({ActionKind::kBackward, {m}});
  }
  fused.step(actions(steps, false), batches_);
  const double tolerance = 4 * kBatches * 0x1p-24;  // f32 sums of four micro-batches in another order
  for (const auto& [name, want] : fused.gradients()) {
    if (is_fused(name))
      EXPECT_LE(distance(got.at(name), want), tolerance) << name;
    else
      EXPECT_EQ(got.at(name), want) << name;
  }
  const StepOutput &a = apart.output, &b = fused.output;
  EXPECT_EQ(a.tokens_per_expert, b.tokens_per_expert);
  for (size_t i = 0; i <= static_cast<size_t>(GetParam().mtp); ++i) {
    EXPECT_NEAR(a.loss_sum[i], b.loss_sum[i], 1e-12 * b.loss_sum[i]);
    EXPECT_EQ(a.loss_count[i], b.loss_count[i]);
  }
  EXPECT_NEAR(a.aux_loss(), b.aux_loss(), 1e-12);
}

// What one micro-batch leaves must not reach another: each alone, and all interleaved, add up to the same.
TEST_P(SegmentsApart, MicroBatchesInFlightDoNotSeeEachOther) {
  TinyRun apart = make("zero_bubble");
  apart.step(actions({{ActionKind::kForward, {0}},
                      {ActionKind::kForward, {1}},
                      {ActionKind::kBackwardInput, {0}},
                      {ActionKind::kForward, {2}},
                      {ActionKind::kBackwardInput, {2}},
                      {ActionKind::kBackwardWeight, {0}},
                      {ActionKind::kForward, {3}},
                      {ActionKind::kBackwardInput, {1, 3}},
                      {ActionKind::kBackwardWeight, {1, 2, 3}}},
                     true),
             batches_);
  TinyRun plain = make("zero_bubble");
  plain.step(build_pipeline({.name = "zero_bubble", .micro_batches = kBatches}), batches_);
  const Tensors want = plain.gradients();
  for (const auto& [name, got] : apart.gradients()) {
    if (is_fused(name))
      EXPECT_LE(distance(got, want.at(name)), 4 * kBatches * 0x1p-24) << name;
    else
      EXPECT_EQ(got, want.at(name)) << name;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Backends, SegmentsApart,
    ::testing::Values(Case{"ref_f32_moe", "ref", DType::kF32, true, 0, Recompute::kNone, 1},
                      Case{"ref_f32_moe_mtp_full", "ref", DType::kF32, true, 2, Recompute::kFull, 1},
                      Case{"cpu_f32_moe_mtp", "cpu", DType::kF32, true, 1, Recompute::kNone, 1},
                      Case{"cpu_f32_moe_selective", "cpu", DType::kF32, true, 0, Recompute::kSelective, 1},
                      Case{"cpu_bf16_moe_mtp_full", "cpu", DType::kBF16, true, 2, Recompute::kFull, 2},
                      Case{"cpu_bf16_moe", "cpu", DType::kBF16, true, 0, Recompute::kNone, 1},
                      Case{"ref_f32_dense_mtp", "ref", DType::kF32, false, 1, Recompute::kSelective, 1},
                      Case{"ref_f32_dense_deepest_mtp", "ref", DType::kF32, false, kMostMtpLayers, Recompute::kNone, 1},
                      Case{"cpu_f32_dense_full", "cpu", DType::kF32, false, 0, Recompute::kFull, 1}),
    [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace concerto::test

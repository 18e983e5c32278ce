// Hugging Face's numbers (tests/golden) from every kind of layout: losses, gradients, norm, and the steps of training.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "concerto/checkpoint/store_tensors.h"
#include "concerto/cli/backends.h"
#include "concerto/cli/golden_case.h"
#include "tests/support/parallel_run.h"

namespace concerto::test {
namespace {

const char* kCases[] = {"dense-tiny", "moe-tiny",     "moe-interval2",    "moe-padded",
                        "moe-packed", "mtp-pre-main", "mtp-post-shifted", "lamb-moe"};

struct NamedLayout {
  const char* name;
  Layout layout;
};

const NamedLayout kLayouts[] = {
    {"tp2", {.mesh = {.tp = 2}}},
    {"pp2", {.mesh = {.pp = 2}, .schedule = "zero_bubble_v"}},
    {"dp2", {.mesh = {.dp = 2}}},
    {"ep2", {.mesh = {.dp = 2, .ep = 2}}},
    {"etp2", {.mesh = {.tp = 2, .etp = 2}}},
    {"mixed", {.mesh = {.tp = 2, .dp = 2, .pp = 2, .ep = 2, .etp = 2}, .schedule = "zero_bubble"}}};

Weights weights_of(const std::string& dir, const ModelConfig& config) {
  const auto store = load_hf_store(dir, config, DType::kF32, StoreUse::kTrain);
  Weights all;
  for (int i = 0; i < store->size(); ++i) {
    const TensorSpec& s = store->specs()[static_cast<size_t>(i)];
    all[s.name].resize(static_cast<size_t>(s.shape.elements()));
    store->get(i, all[s.name].data());
  }
  return all;
}

class LayoutGolden : public ::testing::TestWithParam<std::tuple<const char*, NamedLayout>> {
 protected:
  LayoutGolden()
      : dir_(std::string("tests/golden/") + std::get<0>(GetParam())),
        layout_(std::get<1>(GetParam()).layout),
        golden_(dir_),
        model_(load_model_config(dir_)),
        weights_(weights_of(dir_, model_)) {}

  // Each data rank has its rows; the balance loss looks at all of them, as the recorded one does.
  RunTrace run(const std::string& prefix, int64_t steps) {
    Job job{.config = {}, .steps = {}, .start = weights_};
    int64_t rows = 0;
    for (int64_t s = 0; s < steps; ++s) {
      job.steps.push_back(golden_.batch(prefix, s, layout_.mesh.dp, model_).micro_batches);
      for (const MicroBatch& b : job.steps.back()) rows = std::max(rows, b.rows());
    }
    const Shape shape = golden_.shape(prefix + "input_ids");
    job.config = parallel_config(model_, "f32", layout_.mesh.dp, rows, shape[shape.rank() - 1]);
    job.config.training.routing_unit = RoutingUnit::kGlobal;
    job.config.optimizer = golden_.optimizer();
    return run_layout(job, layout_, backend_by_name("cpu"));
  }

  void compare_if(const std::string& name, const std::vector<double>& got) {
    for (const char* prefix : {"", "float64."})
      if (golden_.has(prefix + name)) golden_.compare(prefix + name, got);
  }

  std::string dir_;
  Layout layout_;
  GoldenCase golden_;
  ModelConfig model_;
  Weights weights_;
};

TEST_P(LayoutGolden, Agrees) {
  const RunTrace once = run("", 1);
  const StepTrace& first = once.steps.at(0);
  compare_if("loss", {first.loss});
  compare_if("aux_loss", {first.aux_loss});
  compare_if("total_loss", {first.total_loss});
  compare_if("grad_norm", {first.grad_norm});
  for (size_t m = 0; m < first.mtp_losses.size(); ++m) compare_if(fmt::format("mtp_loss.{}", m), {first.mtp_losses[m]});
  size_t gradients = 0;
  for (const auto& [name, values] : once.first_gradients) {
    gradients += golden_.has("grad." + name);
    compare_if("grad." + name, values);
  }
  EXPECT_EQ(gradients, golden_.names("grad.").size());
  if (golden_.train_steps() > 0) {
    const RunTrace trained = run("train.", golden_.train_steps());
    std::vector<double> total, loss, aux, norms;
    for (const StepTrace& s : trained.steps) {
      total.push_back(s.total_loss);
      loss.push_back(s.loss);
      aux.push_back(s.aux_loss);
      norms.push_back(s.grad_norm);
    }
    compare_if("train.loss", total);
    compare_if("train.ce", loss);
    compare_if("train.aux_loss", aux);
    compare_if("train.grad_norm", norms);
    for (const auto& [name, values] : trained.weights) {
      compare_if("final." + name, values);
      double sum = 0;
      for (size_t i = 0; i < values.size(); ++i) sum += std::pow(values[i] - weights_.at(name)[i], 2);
      compare_if("final_delta_l2." + name, {std::sqrt(sum)});
    }
  }
  const GoldenReport report = golden_.finish();
  EXPECT_GT(report.lines.size(), gradients + 1);
  for (const GoldenLine& l : report.lines)
    EXPECT_TRUE(l.ok()) << fmt::format("{}: max {:.2e} ({:.0e}) l2 {:.2e} ({:.0e})", l.name, l.max, l.tolerance_max,
                                       l.l2, l.tolerance_l2);
}

INSTANTIATE_TEST_SUITE_P(Cases, LayoutGolden,
                         ::testing::Combine(::testing::ValuesIn(kCases), ::testing::ValuesIn(kLayouts)),
                         [](const auto& info) {
                           std::string text = std::string(std::get<0>(info.param)) + "_" + std::get<1>(info.param).name;
                           std::replace(text.begin(), text.end(), '-', '_');
                           return text;
                         });

}  // namespace
}  // namespace concerto::test

#include "concerto/train/load_series.h"

#include <gtest/gtest.h>

#include "concerto/base/error.h"
#include "concerto/base/test_folder.h"

namespace concerto {
namespace {

using Counts = std::vector<int64_t>;

const LoadHead kHead = {.layers = {1, 3}, .experts = 4};

void write_steps(const std::string& path, const Counts& steps, bool extras = false) {
  LoadWriter writer(path, kHead, 0);
  for (const int64_t step : steps) {
    StepReport r;
    r.step = step;
    r.moe_layers = kHead.layers;
    r.tokens_per_expert = {{10, 10, 10, 10}, {step == 2 ? 40 : 20, step == 2 ? 0 : 20, 0, 0}};
    if (extras) {
      r.dropped_per_expert = {{0, 0, 0, 0}, {4, 0, 0, 0}};
      r.correction_bias = {{0, 0, 0, 0}, {-0.5 * static_cast<double>(step), 0, 0, 1}};
    }
    summarize_loads(r);
    writer.write(r);
  }
}

TEST(LoadSeries, SumsAndMeansOfEveryLayer) {
  const TestFolder folder;
  write_steps(folder / "load", {1, 2, 3, 4}, true);
  const LoadSeries s = read_load_series(folder / "load", {});
  EXPECT_EQ(s.experts, 4);
  EXPECT_EQ(s.first_step, 1);
  EXPECT_EQ(s.last_step, 4);
  EXPECT_EQ(s.steps, 4);
  EXPECT_EQ(s.steps_per_bin, 1);
  EXPECT_EQ(s.steps_in_bin, (Counts{1, 1, 1, 1}));
  EXPECT_FALSE(s.damaged);
  ASSERT_EQ(s.layers.size(), 2u);
  EXPECT_EQ(s.layers[0].mean_max_over_mean, 1.0);
  EXPECT_EQ(s.layers[0].mean_entropy, 1.0);
  const LayerSeries& l = s.layers[1];
  EXPECT_EQ(l.layer, 3);
  EXPECT_EQ(l.tokens, (Counts{100, 60, 0, 0}));
  EXPECT_EQ(l.binned, (Counts{20, 20, 0, 0, 40, 0, 0, 0, 20, 20, 0, 0, 20, 20, 0, 0}));
  EXPECT_EQ(l.total.max_over_mean, 2.5);
  EXPECT_EQ(l.total.busiest, 0);
  EXPECT_EQ(l.mean_max_over_mean, 2.5);  // 2, 4, 2, 2
  EXPECT_EQ(l.mean_idle_share, 0.5625);
  EXPECT_EQ(l.mean_entropy, 0.375);  // 1/2, 0, 1/2, 1/2
  EXPECT_EQ(l.worst_max_over_mean, 4.0);
  EXPECT_EQ(l.worst_step, 2);
  EXPECT_EQ(l.total.dropped, 16);
  EXPECT_EQ(l.total.dropped_share(), 0.1);
  EXPECT_TRUE(l.total.has_drops && l.total.has_bias);
  EXPECT_EQ(l.total.bias_min, -2.0) << "of the last step";
  EXPECT_EQ(l.total.bias_max, 1.0);
}

TEST(LoadSeries, ARangeAndSomeLayers) {
  const TestFolder folder;
  write_steps(folder / "load", {1, 2, 3, 4, 5});
  LoadSeriesOptions options;
  options.layers = {3};
  options.first_step = 2;
  options.last_step = 3;
  const LoadSeries s = read_load_series(folder / "load", options);
  ASSERT_EQ(s.layers.size(), 1u);
  EXPECT_EQ(s.layers[0].layer, 3);
  EXPECT_EQ(s.layers[0].tokens, (Counts{60, 20, 0, 0}));
  EXPECT_EQ(s.first_step, 2);
  EXPECT_EQ(s.last_step, 3);
  EXPECT_FALSE(s.layers[0].total.has_drops || s.layers[0].total.has_bias);
}

TEST(LoadSeries, ManyStepsShareColumnsAndGapsStayVisible) {
  const TestFolder folder;
  write_steps(folder / "load", {1, 2, 3, 7, 8, 9, 10});
  LoadSeriesOptions options;
  options.most_bins = 4;
  const LoadSeries s = read_load_series(folder / "load", options);
  EXPECT_EQ(s.steps, 7);
  EXPECT_EQ(s.steps_per_bin, 3);
  EXPECT_EQ(s.steps_in_bin, (Counts{3, 0, 3, 1}));
  EXPECT_EQ(s.layers[0].binned, (Counts{30, 30, 30, 30, 0, 0, 0, 0, 30, 30, 30, 30, 10, 10, 10, 10}));
}

// A file may claim any step; memory follows what it holds.
TEST(LoadSeries, DistantStepsTakeNoMemory) {
  const TestFolder folder;
  write_steps(folder / "load", {1, int64_t{1} << 61});
  const LoadSeries s = read_load_series(folder / "load", {});
  EXPECT_EQ(s.steps, 2);
  EXPECT_LE(s.bins(), 4);
  EXPECT_EQ(s.layers[1].tokens, (Counts{40, 40, 0, 0}));
}

TEST(LoadSeries, WhatIsNotThereIsAnError) {
  const TestFolder folder;
  const auto what = [&](const LoadSeriesOptions& options) {
    try {
      read_load_series(folder / "load", options);
    } catch (const Error& e) {
      EXPECT_EQ(e.code, ErrorCode::kUsage);
      return e.problem + " " + e.fix;
    }
    return std::string("no error");
  };
  write_steps(folder / "load", {});
  EXPECT_NE(what({}).find("no step has been recorded yet"), std::string::npos);
  write_steps(folder / "load", {1, 2});
  EXPECT_NE(what({.layers = {2}}).find("layer 2 is no MoE layer"), std::string::npos);
  EXPECT_NE(what({.layers = {2}}).find("It has 1, 3."), std::string::npos);
  EXPECT_NE(what({.layers = {}, .first_step = 3}).find("The last recorded step is 2."), std::string::npos);
}

TEST(LoadSeries, TellsOfDamageBehindTheLastStep) {
  const TestFolder folder;
  write_steps(folder / "load", {1, 2, 3});
  std::string bytes = read_text(folder / "load");
  bytes.back() ^= 1;
  write_text(folder / "load", bytes);
  const LoadSeries s = read_load_series(folder / "load", {});
  EXPECT_TRUE(s.damaged);
  EXPECT_EQ(s.last_step, 2);
}

}  // namespace
}  // namespace concerto

#include "concerto/train/expert_load.h"

#include <gtest/gtest.h>

#include <cmath>

#include "concerto/base/error.h"

namespace concerto {
namespace {

using Counts = std::vector<int64_t>;

TEST(ExpertLoad, OfABalancedLayer) {
  const LayerLoad load = summarize_load(Counts{5, 5, 5, 5});
  EXPECT_EQ(load.choices, 20);
  EXPECT_EQ(load.max_over_mean, 1.0);
  EXPECT_EQ(load.idle_share, 0.0);
  EXPECT_DOUBLE_EQ(load.entropy, 1.0);
  EXPECT_DOUBLE_EQ(effective_experts(load, 4), 4.0);
  EXPECT_FALSE(load.has_drops);
  EXPECT_FALSE(load.has_bias);
}

TEST(ExpertLoad, OfASkewedLayer) {
  // p = 3/4, 1/4, 0, 0: entropy 2 log 2 - 3/4 log 3 nats, of log 4.
  const LayerLoad load = summarize_load(Counts{1, 3, 0, 0}, Counts{0, 1, 0, 0}, std::vector<double>{0.5, -2, 0, 0.25});
  EXPECT_EQ(load.choices, 4);
  EXPECT_EQ(load.busiest, 1);
  EXPECT_EQ(load.max_over_mean, 3.0);
  EXPECT_EQ(load.idle_share, 0.5);
  EXPECT_NEAR(load.entropy, 1 - 0.75 * std::log(3.0) / std::log(4.0), 1e-15);
  EXPECT_EQ(load.dropped, 1);
  EXPECT_EQ(load.dropped_share(), 0.25);
  EXPECT_TRUE(load.has_drops);
  EXPECT_TRUE(load.has_bias);
  EXPECT_EQ(load.bias_min, -2.0);
  EXPECT_EQ(load.bias_max, 0.5);
}

TEST(ExpertLoad, OfAllToOne) {
  const LayerLoad load = summarize_load(Counts{0, 0, 7, 0});
  EXPECT_EQ(load.max_over_mean, 4.0);
  EXPECT_EQ(load.idle_share, 0.75);
  EXPECT_EQ(load.entropy, 0.0);
  EXPECT_DOUBLE_EQ(effective_experts(load, 4), 1.0);
  EXPECT_EQ(load.busiest, 2);
}

TEST(ExpertLoad, WithoutTokensOrWithOneExpertIsBalanced) {
  for (const Counts& counts : {Counts{0, 0}, Counts{}, Counts{9}}) {
    const LayerLoad load = summarize_load(counts);
    EXPECT_EQ(load.max_over_mean, 1.0);
    EXPECT_EQ(load.idle_share, 0.0);
    EXPECT_EQ(load.entropy, 1.0);
    EXPECT_EQ(load.dropped_share(), 0.0);
  }
}

// Counts of 16 bits would wrap here, and sums in f32 would round.
TEST(ExpertLoad, IsExactForManyTokens) {
  Counts counts(64, 40840 * 8 / 64);
  counts[5] += 1;
  counts[6] -= 1;
  const LayerLoad load = summarize_load(counts);
  EXPECT_EQ(load.choices, 40840 * 8);
  EXPECT_EQ(load.busiest, 5);
  EXPECT_EQ(load.max_over_mean, 5106.0 * 64 / 326720);
  EXPECT_EQ(summarize_load(Counts{40840, 0, 0, 0}).max_over_mean, 4.0);
  const int64_t huge = int64_t{1} << 50;
  EXPECT_EQ(summarize_load(Counts{huge, huge + 1}).choices, 2 * huge + 1);
}

TEST(ExpertLoad, CountsOfOtherSizesAreABug) {
  EXPECT_THROW(summarize_load(Counts{1, 2}, Counts{1}), Bug);
  EXPECT_THROW(summarize_load(Counts{1, 2}, {}, std::vector<double>{1}), Bug);
}

class Watch {
 public:
  explicit Watch(const LoadWatchOptions& options) : watch_(options) {}
  std::vector<std::string> step(const std::vector<Counts>& tokens) {
    std::vector<LayerLoad> loads;
    Counts layers;
    for (const Counts& t : tokens) {
      layers.push_back(static_cast<int64_t>(10 + layers.size()));
      loads.push_back(summarize_load(t));
    }
    return watch_.step(++step_, layers, tokens, loads);
  }

 private:
  LoadWatch watch_;
  int64_t step_ = 0;
};

const LoadWatchOptions kOptions = {.steps = 3, .starving_below = 0.1, .collapsed_below = 0.2, .experts_per_token = 1};

TEST(LoadWatch, SaysOnceThatAnExpertStarves) {
  Watch watch(kOptions);
  const std::vector<Counts> hungry = {{40, 40, 40, 3}, {30, 30, 30, 30}}, fed = {{40, 40, 40, 4}, {30, 30, 30, 30}};
  EXPECT_TRUE(watch.step(hungry).empty());
  EXPECT_TRUE(watch.step(hungry).empty());
  EXPECT_TRUE(watch.step(fed).empty()) << "a step in between begins anew";
  EXPECT_TRUE(watch.step(hungry).empty());
  EXPECT_TRUE(watch.step({{0, 0, 0, 0}, {0, 0, 0, 0}}).empty()) << "says nothing of anybody";
  EXPECT_TRUE(watch.step(hungry).empty());
  const auto said = watch.step(hungry);
  ASSERT_EQ(said.size(), 1u);
  EXPECT_EQ(said[0], "step 7: layer 10: 1 of 4 experts starves (3): under 0.1 of the mean load for 3 steps");
  for (int i = 0; i < 20; ++i) EXPECT_TRUE(watch.step(hungry).empty());
  const std::vector<Counts> two = {{70, 50, 0, 0}, {30, 30, 30, 30}};
  EXPECT_TRUE(watch.step(two).empty());
  EXPECT_TRUE(watch.step(two).empty());
  ASSERT_EQ(watch.step(two).size(), 1u) << "twice as many now";
  for (int i = 0; i < 20; ++i) EXPECT_TRUE(watch.step(two).empty());
}

TEST(LoadWatch, NamesAFewOfManyStarvingExperts) {
  Watch watch({.steps = 1, .starving_below = 0.1, .collapsed_below = 0, .experts_per_token = 1});
  Counts counts(16, 0);
  counts[2] = 100;
  const auto said = watch.step({counts});
  ASSERT_EQ(said.size(), 1u);
  EXPECT_NE(said[0].find("15 of 16 experts starve (0, 1, 3, 4, 5, 6, 7, 8 and 7 more):"), std::string::npos) << said[0];
}

TEST(LoadWatch, SaysOnceThatARouterCollapsed) {
  // Of ten experts, one token one: fewer than 1 + 0.2 * 9 = 2.8 effective ones.
  Watch watch({.steps = 2, .starving_below = 0, .collapsed_below = 0.2, .experts_per_token = 1});
  Counts bad(10, 1);
  bad[4] = 91;
  const Counts good(10, 10);
  EXPECT_TRUE(watch.step({good, bad}).empty());
  const auto said = watch.step({good, bad});
  ASSERT_EQ(said.size(), 1u);
  EXPECT_EQ(said[0],
            "step 2: layer 11: router collapse: choices spread over 1.6 of 10 experts, few for 2 steps; expert 4 takes "
            "91 % of them");
  EXPECT_TRUE(watch.step({good, bad}).empty());
  EXPECT_TRUE(watch.step({good, good}).empty());
  EXPECT_TRUE(watch.step({good, bad}).empty());
  EXPECT_TRUE(watch.step({good, bad}).empty());
}

// With two choices a token, two of four experts is the least there can be.
TEST(LoadWatch, KnowsThatEveryTokenChoosesK) {
  Watch k1({.steps = 1, .starving_below = 0, .collapsed_below = 0.1, .experts_per_token = 1});
  Watch k2({.steps = 1, .starving_below = 0, .collapsed_below = 0.1, .experts_per_token = 2});
  Watch all({.steps = 1, .starving_below = 0, .collapsed_below = 0.1, .experts_per_token = 4});
  EXPECT_TRUE(k1.step({{50, 50, 0, 0}}).empty());
  EXPECT_EQ(k2.step({{50, 50, 0, 0}}).size(), 1u);
  EXPECT_TRUE(all.step({{50, 50, 50, 50}}).empty());
}

TEST(LoadWatch, ZeroStepsSayNothing) {
  Watch watch({.steps = 0, .starving_below = 0.5, .collapsed_below = 0.5, .experts_per_token = 1});
  for (int i = 0; i < 10; ++i) EXPECT_TRUE(watch.step({{100, 0, 0, 0}}).empty());
}

}  // namespace
}  // namespace concerto

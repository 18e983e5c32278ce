#include "concerto/cli/bench_moe.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <set>

#include "concerto/base/error.h"
#include "concerto/cli/backends.h"

namespace concerto {
namespace {

TEST(MoeLoad, EvenZipfAndOne) {
  EXPECT_EQ(expert_loads(Skew::kEven, 8, 4, 2), (std::vector<int64_t>{4, 4, 4, 4}));
  EXPECT_EQ(expert_loads(Skew::kOne, 10, 3, 1), (std::vector<int64_t>{10, 0, 0}));
  EXPECT_EQ(expert_loads(Skew::kOne, 10, 3, 2), (std::vector<int64_t>{10, 5, 5}));
  EXPECT_EQ(expert_loads(Skew::kZipf, 1100, 3, 1), (std::vector<int64_t>{600, 300, 200}));
  // A full expert hands on what it cannot take: of 16 rows the first would have 8.7.
  EXPECT_EQ(expert_loads(Skew::kZipf, 8, 3, 2), (std::vector<int64_t>{8, 5, 3}));
  EXPECT_EQ(expert_loads(Skew::kZipf, 8, 3, 3), (std::vector<int64_t>{8, 8, 8}));
}

TEST(MoeLoad, TokensChooseDifferentExpertsWithTheseLoads) {
  for (const Skew skew : {Skew::kEven, Skew::kZipf, Skew::kOne})
    for (const auto& [tokens, experts, k] :
         {std::array<int64_t, 3>{64, 8, 2}, {101, 7, 3}, {5, 64, 6}, {17, 4, 4}, {1, 1, 1}}) {
      const auto loads = expert_loads(skew, tokens, experts, k);
      EXPECT_EQ(std::accumulate(loads.begin(), loads.end(), int64_t{0}), tokens * k);
      EXPECT_LE(*std::max_element(loads.begin(), loads.end()), tokens);
      const auto chosen = chosen_experts(loads, tokens, k, 3);
      std::vector<int64_t> counts(static_cast<size_t>(experts));
      for (int64_t t = 0; t < tokens; ++t) {
        const std::set<int32_t> of_token(chosen.begin() + t * k, chosen.begin() + (t + 1) * k);
        EXPECT_EQ(static_cast<int64_t>(of_token.size()), k);
        for (const int32_t e : of_token) ++counts[static_cast<size_t>(e)];
      }
      EXPECT_EQ(counts, loads);
    }
}

TEST(BenchMoe, TheRouterSeesTheLoadThatWasAskedFor) {
  ThreadPool pool(2);
  for (const DType dtype : {DType::kBF16, DType::kF32})
    for (const Skew skew : {Skew::kEven, Skew::kZipf, Skew::kOne}) {
      const MoeCase c{.tokens = 96, .experts = 8, .top_k = 2, .hidden = 32, .width = 16, .skew = skew, .dtype = dtype};
      const MoeFigures f = run_moe_case(c, backend_by_name("cpu"), pool, 0, 1);
      const auto loads = expert_loads(skew, c.tokens, c.experts, c.top_k);
      EXPECT_DOUBLE_EQ(f.max_over_mean, static_cast<double>(*std::max_element(loads.begin(), loads.end())) * 8 / 192);
      EXPECT_GT(f.seconds, f.product_seconds);
      EXPECT_GT(f.product_seconds, 0);
      EXPECT_EQ(f.product_flops, 18.0 * 192 * 32 * 16);
    }
}

TEST(BenchMoe, RefusesWhatCannotBe) {
  EXPECT_THROW(check_moe_case({.experts = 4, .top_k = 5}), Error);
  EXPECT_THROW(check_moe_case({.experts = 64, .hidden = 63}), Error);
  EXPECT_THROW(skew_by_name("steep"), Error);
}

}  // namespace
}  // namespace concerto

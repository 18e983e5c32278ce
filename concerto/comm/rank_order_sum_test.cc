#include "concerto/comm/rank_order_sum.h"

#include <gtest/gtest.h>

#include <bit>
#include <limits>
#include <vector>

#include "concerto/base/rng.h"

namespace concerto {
namespace {

template <class T>
Piece piece(std::vector<T>& values) {
  return Piece(View(values.data(), Shape{std::ssize(values)}, dtype_of<T>()));
}

constexpr int kRanks = 5;
constexpr int64_t kElements = 2 * RankOrderSum::kBlock + 3;

template <class T>
std::vector<std::vector<T>> random_parts() {
  std::vector<std::vector<T>> parts(kRanks, std::vector<T>(kElements));
  for (size_t r = 0; r < parts.size(); ++r)
    for (size_t i = 0; i < parts[r].size(); ++i)
      parts[r][i] = T(static_cast<float>(Rng(7, r).normal(i) * (i % 3 ? 1 : 1000)));
  return parts;
}

template <class T, class Out>
std::vector<Out> sum_of(std::vector<std::vector<T>> parts, bool round = false) {
  std::vector<Out> out(kElements);
  sum_in_rank_order(
      kElements, kRanks, round, [&](int r) { return piece(parts[static_cast<size_t>(r)]); }, 1,
      [&](int) { return piece(out); });
  return out;
}

TEST(RankOrderSum, AddsRank0First) {
  const auto parts = random_parts<float>();
  const auto sum = sum_of<float, float>(parts);
  bool order_matters = false;
  for (size_t i = 0; i < sum.size(); ++i) {
    float forward = parts[0][i], backward = parts[kRanks - 1][i];
    for (size_t r = 1; r < kRanks; ++r) forward += parts[r][i], backward += parts[kRanks - 1 - r][i];
    ASSERT_EQ(sum[i], forward) << i;
    order_matters |= forward != backward;
  }
  EXPECT_TRUE(order_matters) << "the values cannot tell one order from another";
}

TEST(RankOrderSum, Bf16IsAddedInF32AndRoundedOnce) {
  const auto parts = random_parts<bf16>();
  const auto narrow = sum_of<bf16, bf16>(parts);
  const auto wide = sum_of<bf16, float>(parts);
  bool once = false;
  for (size_t i = 0; i < wide.size(); ++i) {
    float exact = static_cast<float>(parts[0][i]);
    bf16 stepwise = parts[0][i];
    for (size_t r = 1; r < kRanks; ++r) {
      exact += static_cast<float>(parts[r][i]);
      stepwise = bf16(static_cast<float>(stepwise) + static_cast<float>(parts[r][i]));
    }
    ASSERT_EQ(wide[i], exact) << i;
    ASSERT_EQ(narrow[i].bits, bf16(exact).bits) << i;
    once |= stepwise.bits != bf16(exact).bits;
  }
  EXPECT_TRUE(once) << "the values cannot tell one rounding from many";
}

TEST(RankOrderSum, RoundsEachPartOnTheWireIfAsked) {
  const auto parts = random_parts<float>();
  const auto sum = sum_of<float, float>(parts, true);
  for (size_t i = 0; i < sum.size(); ++i) {
    float want = static_cast<float>(bf16(parts[0][i]));
    for (size_t r = 1; r < kRanks; ++r) want += static_cast<float>(bf16(parts[r][i]));
    ASSERT_EQ(sum[i], want) << i;
  }
}

TEST(RankOrderSum, KeepsAMinusZero) {
  std::vector<float> zero = {-0.0f}, out = {1};
  sum_in_rank_order(
      1, 2, false, [&](int) { return piece(zero); }, 1, [&](int) { return piece(out); });
  EXPECT_EQ(std::bit_cast<uint32_t>(out[0]), 0x80000000u);
}

TEST(RankOrderSum, AddsIntegersAndDoubles) {
  std::vector<int64_t> big = {std::numeric_limits<int64_t>::max() / 2, -7};
  std::vector<int32_t> small = {5, -6};
  std::vector<double> fine = {0.1, 1e300};
  const auto twice = [](auto& values) {
    sum_in_rank_order(
        2, 2, false, [&](int) { return piece(values); }, 1, [&](int) { return piece(values); });
  };
  twice(big), twice(small), twice(fine);
  EXPECT_EQ(big, (std::vector<int64_t>{std::numeric_limits<int64_t>::max() - 1, -14}));
  EXPECT_EQ(small, (std::vector<int32_t>{10, -12}));
  EXPECT_EQ(fine, (std::vector<double>{0.2, 2e300}));
}

}  // namespace
}  // namespace concerto

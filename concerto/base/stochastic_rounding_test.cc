#include "concerto/base/stochastic_rounding.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <set>

namespace concerto {
namespace {

TEST(RoundStochastic, GoesUpAsOftenAsItsPartSays) {
  for (const float sign : {1.0f, -1.0f})
    for (const uint32_t part : {0u, 1u, 0x1234u, 0x8000u, 0xffffu}) {
      const float value = sign * std::bit_cast<float>(0x3f800000u | part);
      int64_t up = 0;
      for (uint32_t r = 0; r < 0x10000; ++r) {
        const float rounded = static_cast<float>(round_stochastic(value, static_cast<uint16_t>(r)));
        ASSERT_TRUE(rounded == sign || rounded == sign * 1.0078125f) << rounded;
        up += rounded != sign;
      }
      EXPECT_EQ(up, part) << sign;  // of 65536
    }
}

TEST(RoundStochastic, KeepsWhatBf16Holds) {
  for (uint32_t high = 0; high < 0x10000; ++high) {
    const float value = std::bit_cast<float>(high << 16);
    for (const uint16_t r : {0, 0x8000, 0xffff}) {
      const bf16 rounded = round_stochastic(value, r);
      if (std::isnan(value)) {
        ASSERT_TRUE(std::isnan(static_cast<float>(rounded)));
      } else {
        ASSERT_EQ(rounded.bits, high);
      }
    }
  }
  const float nan = std::bit_cast<float>(0x7fffffffu);  // whose payload would carry into the sign
  EXPECT_TRUE(std::isnan(static_cast<float>(round_stochastic(nan, 0xffff))));
}

TEST(RoundingBits, AreUniformAndDifferByEveryArgument) {
  const RoundingKey key = rounding_key(1, 2, 3);
  double sum_low = 0, sum_high = 0, product = 0;
  constexpr int kMany = 1 << 16;
  for (uint32_t i = 0; i < kMany; ++i) {
    const uint32_t bits = rounding_bits(key, i);
    const double low = (bits & 0xffff) / 65536.0 - 0.5, high = (bits >> 16) / 65536.0 - 0.5;
    sum_low += low;
    sum_high += high;
    product += low * high;
  }
  const double deviation = std::sqrt(kMany / 12.0);  // of a sum of kMany uniform draws
  EXPECT_LT(std::fabs(sum_low), 4 * deviation);
  EXPECT_LT(std::fabs(sum_high), 4 * deviation);
  EXPECT_LT(std::fabs(product), 4 * std::sqrt(kMany) / 12);
  std::set<uint32_t> seen;
  for (const RoundingKey k : {key, rounding_key(2, 2, 3), rounding_key(1, 3, 3), rounding_key(1, 2, 4),
                              with_high_word(key, 1), with_high_word(key, 2)})
    for (const uint32_t element : {0u, 1u, 0xffffffffu}) seen.insert(rounding_bits(k, element));
  EXPECT_EQ(seen.size(), 18u);
}

}  // namespace
}  // namespace concerto

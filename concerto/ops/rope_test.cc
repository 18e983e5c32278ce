#include "concerto/ops/rope.h"

#include <cmath>

#include "concerto/ops/op_test.h"

namespace concerto::test {
namespace {

constexpr double kTheta = 5e5;
constexpr int64_t kPositions = 40;

Values table_values(int64_t head_dim) {
  Values table(static_cast<size_t>(kPositions * head_dim));
  rope_fill_table(View(table.data(), {kPositions, head_dim}, DType::kF64), kTheta);
  return table;
}

Body body_of(int64_t heads, int64_t head_dim, const Values& x, const Values& positions, bool inverse) {
  return [=](OpRun& r) {
    const int64_t rows = static_cast<int64_t>(positions.size());
    rope_apply(r.context(), {.x = r.inout("x", Kind::kCompute, {rows, heads * head_dim}, x,
                                          {.length = 2, .norm = 2 * largest(x) + 1e-30}, 6),
                             .positions = r.in(Kind::kI32, {rows}, positions),
                             .cos_sin = r.in(Kind::kStat, {kPositions, head_dim}, table_values(head_dim)),
                             .inverse = inverse});
  };
}

class RopeOp : public OpTest {};

TEST_P(RopeOp, Apply) {
  for (const auto& [heads, head_dim] : {std::pair<int64_t, int64_t>{1, 2}, {3, 10}, {2, 64}})
    for (const Values& positions : {integers({}), integers({0}), integers({0, 1, 2, 0, 1, 39, 17})})
      for (const bool inverse : {false, true}) {
        SCOPED_TRACE(fmt::format("{} heads of {} inverse {}", heads, head_dim, inverse));
        const int64_t n = static_cast<int64_t>(positions.size()) * heads * head_dim;
        check_op(GetParam(), body_of(heads, head_dim, normal("x", n), positions, inverse));
      }
}
CONCERTO_ON_EVERY_BACKEND(RopeOp);

// The check vector of the model reference, 2.3.
TEST(RopeValue, InterleavedPairs) {
  const Values got = output_f64(body_of(1, 8, {1, 2, 3, 4, 5, 6, 7, 8}, {3}, false), "x");
  const Values want = {-1.272233, -1.838865, 2.530613, 4.312308, 4.974499, 6.021159, 6.998724, 8.001117};
  for (size_t i = 0; i < 8; ++i) EXPECT_NEAR(got[i], want[i], 5e-7);
}

TEST(RopeGradient, InverseIsTheTranspose) {
  const Values positions = integers({0, 5, 39}), x = normal("x", 3 * 12), dy = normal("dy", 3 * 12);
  const Values dx = output_f64(body_of(2, 6, dy, positions, true), "x");
  check_gradient("dx", x, dx,
                 [&](const Values& v) { return dot(dy, output_f64(body_of(2, 6, v, positions, false), "x")); });
}

TEST(RopeTable, OfACountingArenaIsLeftAlone) {
  EXPECT_NO_THROW(rope_fill_table(View(nullptr, {4, 8}, DType::kF32), kTheta));
  float table[4] = {};
  rope_fill_table(View(table, {2, 2}, DType::kF32), kTheta);
  EXPECT_EQ(table[0], 1.0f);
  EXPECT_EQ(table[2], static_cast<float>(std::cos(1.0)));
  EXPECT_EQ(table[3], static_cast<float>(std::sin(1.0)));
}

}  // namespace
}  // namespace concerto::test

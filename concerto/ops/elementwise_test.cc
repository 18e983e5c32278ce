#include "concerto/ops/elementwise.h"

#include <cmath>
#include <cstring>

#include "concerto/ops/checks.h"
#include "concerto/ops/op_test.h"

namespace concerto::test {
namespace {

class Elementwise : public OpTest {};

TEST_P(Elementwise, Add) {
  for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>{1, 1}, {7, 33}, {0, 4}, {3, 1000}})
    for (const int alias : {0, 1, 2}) {  // out is a tensor of its own, a, b
      SCOPED_TRACE(fmt::format("{} x {} alias {}", rows, cols, alias));
      const Values a = normal("a", rows * cols), b = normal("b", rows * cols);
      check_op(GetParam(), [&](OpRun& r) {
        const View out = alias ? r.inout("out", Kind::kCompute, {rows, cols}, alias == 1 ? a : b, {}, 3)
                               : r.out("out", Kind::kCompute, {rows, cols}, {}, 5);
        add(r.context(), {.a = alias == 1 ? out : r.in(Kind::kCompute, {rows, cols}, a, 2),
                          .b = alias == 2 ? out : r.in(Kind::kCompute, {rows, cols}, b, 1),
                          .out = out});
      });
    }
}

TEST_P(Elementwise, CastRoundsToNearestEven) {
  // Ties of bf16 (8 bits) and f32 (24 bits), both ways, beside what plain rounding would meet.
  const Values x = {1 + 0x1p-8, 1 + 0x3p-8, -1 - 0x1p-8, 1 + 0x1p-8 + 0x1p-20, 1 + 0x1p-24, 1 + 0x3p-24, 0.1, -1e30,
                    0,          3};
  for (Kind from : {Kind::kCompute, Kind::kStat, Kind::kF64})
    for (Kind to : {Kind::kCompute, Kind::kStat, Kind::kF64}) {
      const OpRun types(backend(), type(), type(), 1, -1);
      if (!backend().has(types.type_of(from)) || !backend().has(types.type_of(to))) continue;
      const Outputs got = run_op(backend(), type(), type(), 2, [&](OpRun& r) {
        cast(r.context(), {.in = r.in(from, {2, 5}, x, 3), .out = r.out("out", to, {2, 5}, {}, 2)});
      });
      for (size_t i = 0; i < x.size(); ++i) {
        const double in = round_to(types.type_of(from), x[i]), out = got.at("out").values[i];
        double best = std::fabs(in - out);
        if (types.type_of(to) == DType::kBF16) {  // no neighbour is nearer; at a tie the last bit is 0
          const bf16 bits(static_cast<float>(out));
          for (int step : {-1, 1}) {
            bf16 next = bits;
            next.bits = static_cast<uint16_t>(next.bits + step);
            const double other = std::fabs(in - static_cast<double>(static_cast<float>(next)));
            if (out != 0) {
              EXPECT_TRUE(best < other || (best == other && bits.bits % 2 == 0)) << in;
            }
          }
        } else {
          EXPECT_EQ(out, round_to(types.type_of(to), in));
        }
      }
    }
}

TEST_P(Elementwise, SumSquares) {
  for (const int64_t n : {1, 33, 0, 4096, 20001}) {
    SCOPED_TRACE(n);
    const Values x = normal("x", n);
    check_op(
        GetParam(),
        [&](OpRun& r) {
          const Bound bound{.length = 1,
                            .norm = unit_roundoff(DType::kF64) / unit_roundoff(stat()) * static_cast<double>(n + 1) *
                                    (1 + dot(x, x))};
          sum_squares(r.context(),
                      {.x = r.in(Kind::kStat, {n}, x), .out = r.inout("out", Kind::kF64, {1}, {2}, bound)});
        },
        true);
  }
}

TEST_P(Elementwise, SumSquaresAddsToWhatIsThere) {
  const Outputs got = run_op(backend(), type(), type(), 2, [&](OpRun& r) {
    sum_squares(r.context(), {.x = r.in(Kind::kStat, {3}, {1, 2, -3}), .out = r.inout("out", Kind::kF64, {1}, {0.5})});
  });
  EXPECT_EQ(got.at("out").values[0], 14.5);
}

TEST_P(Elementwise, FillZero) {
  for (const int64_t gap : {0, 3}) {
    const Outputs got = run_op(backend(), type(), type(), 3, [&](OpRun& r) {
      fill_zero(r.context(), r.out("x", Kind::kCompute, {700, 401}, {}, gap));
      fill_zero(r.context(), r.out("empty", Kind::kCompute, {0, 4}));
      fill_zero(r.context(), r.out("counts", Kind::kI64, {5}));
    });
    EXPECT_EQ(got.at("x").values, Values(700 * 401));
    EXPECT_EQ(got.at("counts").values, Values(5));
  }
}
CONCERTO_ON_EVERY_BACKEND(Elementwise);

TEST(Overlap, ColumnSlicesOfOneBufferAreApart) {
  float memory[60];
  const View all(memory, {6, 10}, DType::kF32);
  EXPECT_FALSE(overlap(all.cols_range(0, 4), all.cols_range(4, 6)));
  EXPECT_TRUE(overlap(all.cols_range(0, 5), all.cols_range(4, 6)));
  EXPECT_TRUE(overlap(all.cols_range(4, 6).rows_range(2, 4), all.cols_range(3, 2)));
  EXPECT_FALSE(overlap(all.rows_range(0, 3), all.rows_range(3, 3)));
  EXPECT_FALSE(overlap(View(), all));
}

}  // namespace
}  // namespace concerto::test

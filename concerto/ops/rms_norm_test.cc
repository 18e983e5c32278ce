#include "concerto/ops/rms_norm.h"

#include <cmath>

#include "concerto/ops/op_test.h"

namespace concerto::test {
namespace {

constexpr double kEps = 1e-5;
constexpr std::pair<int64_t, int64_t> kSizes[] = {{1, 1}, {5, 33}, {0, 16}, {40, 64}, {3, 300}};

Body forward_body(int64_t rows, int64_t hidden, const Values& x, const Values& w) {
  return [=](OpRun& r) {
    rms_norm_forward(r.context(), {.x = r.in(Kind::kCompute, {rows, hidden}, x, 3),
                                   .w = r.in(Kind::kStat, {hidden}, w),
                                   .eps = kEps,
                                   .y = r.out("y", Kind::kCompute, {rows, hidden}, {.length = hidden}, 2),
                                   .rstd = r.out("rstd", Kind::kStat, {rows}, {.length = hidden})});
  };
}

enum class Residual { kNone, kOther, kInPlace };

Body backward_input_body(int64_t rows, int64_t hidden, const Values& dy, const Values& x, const Values& w,
                         const Values& rstd, const Values& residual, Residual how, bool again = false) {
  return [=](OpRun& r) {
    const double g = largest(dy) * largest(w) * largest(rstd), xhat = largest(x) * largest(rstd);
    const Bound bound{.length = hidden, .norm = g * (1 + xhat * xhat) + largest(residual)};
    const View dx = how == Residual::kInPlace ? r.inout("dx", Kind::kCompute, {rows, hidden}, residual, bound, 4)
                                              : r.out("dx", Kind::kCompute, {rows, hidden}, bound, 4);
    rms_norm_backward_input(
        r.context(), {.dy = r.in(Kind::kCompute, {rows, hidden}, dy, 1),
                      .x = r.in(Kind::kCompute, {rows, hidden}, x),
                      .w = r.in(Kind::kStat, {hidden}, w),
                      .rstd = r.in(Kind::kStat, {rows}, rstd),
                      .residual = how == Residual::kNone      ? View{}
                                  : how == Residual::kInPlace ? dx
                                                              : r.in(Kind::kCompute, {rows, hidden}, residual, 2),
                      .dx = dx,
                      .y = again ? r.out("y", Kind::kCompute, {rows, hidden}, {.length = 2}, 3) : View{}});
  };
}

Body backward_weight_body(int64_t rows, int64_t hidden, const Values& dy, const Values& x, const Values& rstd,
                          const Values& start) {
  return [=](OpRun& r) {
    const Bound bound{
        .length = rows,
        .norm = largest(dy) * largest(x) * largest(rstd) * std::sqrt(static_cast<double>(rows)) + largest(start)};
    rms_norm_backward_weight(r.context(), {.dy = r.in(Kind::kCompute, {rows, hidden}, dy, 1),
                                           .x = r.in(Kind::kCompute, {rows, hidden}, x, 2),
                                           .rstd = r.in(Kind::kStat, {rows}, rstd),
                                           .dw = r.inout("dw", Kind::kStat, {hidden}, start, bound)});
  };
}

class RmsNorm : public OpTest {};

TEST_P(RmsNorm, Forward) {
  for (const auto& [rows, hidden] : kSizes) {
    SCOPED_TRACE(fmt::format("{} x {}", rows, hidden));
    check_op(GetParam(), forward_body(rows, hidden, normal("x", rows * hidden), normal("w", hidden)));
  }
}

TEST_P(RmsNorm, Backward) {
  for (const auto& [rows, hidden] : kSizes) {
    SCOPED_TRACE(fmt::format("{} x {}", rows, hidden));
    const Values x = rounded(normal("x", rows * hidden), type()), w = rounded(normal("w", hidden), stat());
    const Values dy = normal("dy", rows * hidden), residual = normal("residual", rows * hidden);
    const Values rstd = output_f64(forward_body(rows, hidden, x, w), "rstd");
    for (Residual how : {Residual::kNone, Residual::kOther, Residual::kInPlace})
      for (const bool again : {false, true})
        check_op(GetParam(), backward_input_body(rows, hidden, dy, x, w, rstd, residual, how, again));
    check_op(GetParam(), backward_weight_body(rows, hidden, dy, x, rstd, normal("dw", hidden)));
  }
}

// The y that backward makes again is the one that forward made, to the bit.
TEST_P(RmsNorm, BackwardMakesTheSameY) {
  const int64_t rows = 7, hidden = 83;
  const Values x = normal("x", rows * hidden), w = normal("w", hidden), dy = normal("dy", rows * hidden);
  const Outputs forward = run_op(backend(), type(), type(), 2, forward_body(rows, hidden, x, w));
  const Body back = backward_input_body(rows, hidden, dy, x, w, forward.at("rstd").values, {}, Residual::kNone, true);
  EXPECT_TRUE(same_bits(run_op(backend(), type(), type(), 2, back).at("y").values, forward.at("y").values));
}
CONCERTO_ON_EVERY_BACKEND(RmsNorm);

TEST(RmsNormGradient, FiniteDifferences) {
  const int64_t rows = 3, hidden = 7;
  const Values x = normal("x", rows * hidden), w = normal("w", hidden), dy = normal("dy", rows * hidden);
  const Values residual = normal("residual", rows * hidden), dw0 = normal("dw", hidden);
  const auto loss = [&](const Values& x, const Values& w) {  // the residual branch passes x on
    return dot(dy, output_f64(forward_body(rows, hidden, x, w), "y")) + dot(residual, x);
  };
  const Values rstd = output_f64(forward_body(rows, hidden, x, w), "rstd");
  const Values dx = output_f64(backward_input_body(rows, hidden, dy, x, w, rstd, residual, Residual::kOther), "dx");
  const Values dw = output_f64(backward_weight_body(rows, hidden, dy, x, rstd, dw0), "dw");
  check_gradient("dx", x, dx, [&](const Values& v) { return loss(v, w); });
  check_gradient("dw", w, minus(dw, dw0), [&](const Values& v) { return loss(x, v); });
}

TEST(RmsNormValue, Formula) {
  const Outputs got = run_f64(forward_body(1, 2, {3, 4}, {1, 2}));
  const double rstd = 1 / std::sqrt(12.5 + kEps);
  EXPECT_DOUBLE_EQ(got.at("rstd").values[0], rstd);
  EXPECT_DOUBLE_EQ(got.at("y").values[0], 3 * rstd);
  EXPECT_DOUBLE_EQ(got.at("y").values[1], 8 * rstd);
}

}  // namespace
}  // namespace concerto::test

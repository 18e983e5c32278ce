#include "concerto/ops/optimizer_step.h"

#include <cmath>

#include "concerto/ops/op_test.h"

namespace concerto::test {
namespace {

struct Step {
  int64_t n = 0;
  Values w, m, v, grad;
  bool copy = true;
  double lr = 1e-2, weight_decay = 0.1, grad_scale = 0.5;
  int64_t t = 3;
  double beta1 = 0.9, beta2 = 0.95, eps = 1e-8;
  double c1() const { return 1 - std::pow(beta1, static_cast<double>(t)); }
  double c2() const { return 1 - std::pow(beta2, static_cast<double>(t)); }
};

Step make_step(int64_t n) {
  Step s{.n = n, .w = normal("w", n), .m = normal("m", n, 0.1), .v = normal("v", n, 0.1), .grad = normal("grad", n)};
  for (double& v : s.v) v *= v;
  return s;
}

using Op = void (*)(const Context&, const AdamStep&);

Body body_of(const Step& s, Op op) {
  return [=](OpRun& r) {
    // m and v may cancel: their terms are of the size of m, g and g^2. u is about m / sqrt(v).
    const double g = largest(s.grad) * s.grad_scale;
    const double m = largest(s.m) + g;
    double u = 0;
    for (int64_t i = 0; i < s.n; ++i) {
      const double v = s.beta2 * s.v[i] + (1 - s.beta2) * s.grad[i] * s.grad[i] * s.grad_scale * s.grad_scale;
      u = std::max(u, m / s.c1() / (std::sqrt(v / s.c2()) + s.eps));
    }
    const double ratio = op == lamb_step ? 10 : 1;
    const Bound w{.length = 4, .norm = largest(s.w) + s.lr * u * ratio + 1e-30};
    op(r.context(), {.w = r.inout("w", Kind::kStat, {s.n}, s.w, w),
                     .m = r.inout("m", Kind::kStat, {s.n}, s.m, {.length = 2, .norm = m + 1e-30}),
                     .v = r.inout("v", Kind::kStat, {s.n}, s.v, {.length = 2, .norm = largest(s.v) + g * g + 1e-30}),
                     .grad = r.in(Kind::kStat, {s.n}, s.grad),
                     .copy = s.copy ? r.out("copy", Kind::kCompute, {s.n}, w) : View{},
                     .lr = s.lr,
                     .beta1 = s.beta1,
                     .beta2 = s.beta2,
                     .eps = s.eps,
                     .weight_decay = s.weight_decay,
                     .c1 = s.c1(),
                     .c2 = s.c2(),
                     .grad_scale = s.grad_scale});
  };
}

// The papers' formulas, in the plainest form.
Values by_formula(Step s, bool lamb) {
  Values u(s.w.size());
  double w_norm = 0, u_norm = 0;
  for (size_t i = 0; i < u.size(); ++i) {
    const double g = s.grad[i] * s.grad_scale;
    s.m[i] = s.beta1 * s.m[i] + (1 - s.beta1) * g;
    s.v[i] = s.beta2 * s.v[i] + (1 - s.beta2) * g * g;
    u[i] = s.m[i] / s.c1() / (std::sqrt(s.v[i] / s.c2()) + s.eps) + (lamb ? s.weight_decay * s.w[i] : 0);
    w_norm += s.w[i] * s.w[i];
    u_norm += u[i] * u[i];
  }
  const double ratio = lamb && w_norm > 0 && u_norm > 0 ? std::sqrt(w_norm / u_norm) : 1;
  for (size_t i = 0; i < u.size(); ++i) s.w[i] = s.w[i] * (lamb ? 1 : 1 - s.lr * s.weight_decay) - s.lr * ratio * u[i];
  return s.w;
}

class Optimizer : public OpTest {};

TEST_P(Optimizer, AdamW) {
  for (const int64_t n : {1, 33, 0, 9001})
    for (const bool copy : {false, true}) {
      SCOPED_TRACE(fmt::format("{} elements, copy {}", n, copy));
      Step s = make_step(n);
      s.copy = copy;
      check_op(GetParam(), body_of(s, adamw_step), true);
    }
}

TEST_P(Optimizer, Lamb) {
  for (const int64_t n : {1, 33, 0, 9001})
    for (const bool copy : {false, true}) {
      SCOPED_TRACE(fmt::format("{} elements, copy {}", n, copy));
      Step s = make_step(n);
      s.copy = copy;
      check_op(GetParam(), body_of(s, lamb_step), true);
    }
}

TEST_P(Optimizer, CopyIsTheRoundedWeight) {
  for (Op op : {adamw_step, lamb_step}) {
    const Outputs got = run_op(backend(), type(), type(), 2, body_of(make_step(300), op));
    EXPECT_TRUE(same_bits(got.at("copy").values, rounded(got.at("w").values, type())));
  }
}

// First step from zero moments: sqrt(v) is |g|, so that every weight moves by lr.
TEST_P(Optimizer, FirstStepOfZeroWeights) {
  Step s{.n = 4, .w = Values(4), .m = Values(4), .v = Values(4), .grad = {1, -2, 0.5, 0}, .t = 1};
  for (Op op : {adamw_step, lamb_step}) {  // LAMB's ratio is 1 where the weights are 0
    const Values w = run_op(backend(), type(), type(), 2, body_of(s, op)).at("w").values,
                 want = {-s.lr, s.lr, -s.lr, 0};
    for (size_t i = 0; i < 4; ++i) EXPECT_NEAR(w[i], want[i], s.lr * (1e-7 + 16 * unit_roundoff(stat())));
  }
}

// No gradient, no moments, no decay: the update is 0 and LAMB's ratio 1, not 0 / 0.
TEST_P(Optimizer, ZeroUpdate) {
  const Values w = rounded(normal("w", 5), stat());
  Step s{.n = 5, .w = w, .m = Values(5), .v = Values(5), .grad = Values(5), .weight_decay = 0};
  for (Op op : {adamw_step, lamb_step})
    EXPECT_TRUE(same_bits(run_op(backend(), type(), type(), 2, body_of(s, op)).at("w").values, w));
}
CONCERTO_ON_EVERY_BACKEND(Optimizer);

TEST(OptimizerValue, RefFollowsTheFormulas) {
  for (const int64_t n : {1, 50, 5000})
    for (const bool lamb : {false, true}) {
      const Step s = make_step(n);
      const Values got = output_f64(body_of(s, lamb ? lamb_step : adamw_step), "w"), want = by_formula(s, lamb);
      for (size_t i = 0; i < want.size(); ++i) ASSERT_NEAR(got[i], want[i], 1e-13 * (1 + std::fabs(want[i])));
    }
}

TEST(OptimizerChecks, MomentsOfAnotherShape) {
  Step s = make_step(4);
  EXPECT_THROW(run_f64([&](OpRun& r) {
                 adamw_step(r.context(), {.w = r.inout("w", Kind::kStat, {4}, s.w),
                                          .m = r.inout("m", Kind::kStat, {3}, Values(3)),
                                          .v = r.inout("v", Kind::kStat, {4}, s.v),
                                          .grad = r.in(Kind::kStat, {4}, s.grad),
                                          .copy = {}});
               }),
               Bug);
}

}  // namespace
}  // namespace concerto::test

#include "concerto/ops/linear.h"

#include "concerto/ops/op_test.h"

namespace concerto::test {
namespace {

struct Sizes {
  int64_t rows, in, out;
};
constexpr Sizes kSizes[] = {{1, 1, 1}, {7, 33, 65}, {16, 64, 48}, {5, 16, 130}, {0, 8, 8}, {130, 31, 17}};

class Linear : public OpTest {};

TEST_P(Linear, Forward) {
  for (const auto [rows, in, out] : kSizes)
    for (const bool with_bias : {false, true})
      for (const Kind kind : {Kind::kCompute, Kind::kStat}) {
        SCOPED_TRACE(fmt::format("{} x {} x {} bias {}", rows, in, out, with_bias));
        const Values x = normal("x", rows * in), w = normal("w", out * in), b = normal("b", out);
        const int64_t gap = with_bias ? 3 : 0;
        check_op(GetParam(), [&](OpRun& r) {
          const Bound bound{.length = in, .norm = largest_row_norm(x, in) * largest_row_norm(w, in) + largest(b)};
          linear_forward(r.context(), {.x = r.in(Kind::kCompute, {rows, in}, x, gap),
                                       .w = r.in(Kind::kCompute, {out, in}, w),
                                       .bias = with_bias ? r.in(Kind::kStat, {out}, b) : View{},
                                       .y = r.out("y", kind, {rows, out}, bound, gap)});
        });
      }
}

TEST_P(Linear, BackwardInput) {
  for (const auto [rows, in, out] : kSizes)
    for (const bool accumulate : {false, true})
      for (const Kind kind : {Kind::kCompute, Kind::kStat}) {
        SCOPED_TRACE(fmt::format("{} x {} x {} accumulate {}", rows, in, out, accumulate));
        const Values dy = normal("dy", rows * out), w = normal("w", out * in), start = normal("dx", rows * in);
        const int64_t gap = accumulate ? 5 : 0;
        check_op(GetParam(), [&](OpRun& r) {
          double w_norm = 0;  // of a column
          for (int64_t k = 0; k < in; ++k) {
            double sum = 0;
            for (int64_t n = 0; n < out; ++n) sum += w[n * in + k] * w[n * in + k];
            w_norm = std::max(w_norm, std::sqrt(sum));
          }
          const Bound bound{.length = out, .norm = largest_row_norm(dy, out) * w_norm + largest(start)};
          linear_backward_input(r.context(), {.dy = r.in(Kind::kCompute, {rows, out}, dy, gap),
                                              .w = r.in(Kind::kCompute, {out, in}, w),
                                              .dx = accumulate ? r.inout("dx", kind, {rows, in}, start, bound, gap)
                                                               : r.out("dx", kind, {rows, in}, bound, gap),
                                              .accumulate = accumulate});
        });
      }
}

TEST_P(Linear, BackwardWeight) {
  for (const auto [rows, in, out] : kSizes)
    for (const bool with_bias : {false, true}) {
      SCOPED_TRACE(fmt::format("{} x {} x {} bias {}", rows, in, out, with_bias));
      const Values x = normal("x", rows * in), dy = normal("dy", rows * out);
      const Values dw = normal("dw", out * in), db = normal("db", out);
      const int64_t gap = with_bias ? 3 : 0;
      check_op(GetParam(), [&](OpRun& r) {
        const Bound bound{.length = rows, .norm = largest(x) * largest(dy) * std::sqrt(static_cast<double>(rows)) + 4};
        linear_backward_weight(r.context(), {.x = r.in(Kind::kCompute, {rows, in}, x, gap),
                                             .dy = r.in(Kind::kCompute, {rows, out}, dy, gap),
                                             .dw = r.inout("dw", Kind::kStat, {out, in}, dw, bound),
                                             .db = with_bias ? r.inout("db", Kind::kStat, {out}, db, bound) : View{}});
      });
    }
}

// Where ranks share rows: the weight's gradient from all of them, the bias's from some.
TEST_P(Linear, BiasGradientOfOtherRows) {
  const int64_t in = 9, out = 21;
  const Values x = normal("x", 7 * in), dy = normal("dy", 7 * out), db = normal("db", out);
  for (const int64_t rows : {0, 3, 7})
    check_op(GetParam(), [&](OpRun& r) {
      const Bound bound{.length = 7, .norm = largest(x) * largest(dy) * 7 + 4};
      const View all = r.in(Kind::kCompute, {7, out}, dy);
      linear_backward_weight(r.context(), {.x = r.in(Kind::kCompute, {7, in}, x),
                                           .dy = all,
                                           .dw = r.inout("dw", Kind::kStat, {out, in}, normal("dw", out * in), bound),
                                           .db = r.inout("db", Kind::kStat, {out}, db, bound),
                                           .bias_dy = all.rows_range(2, std::min<int64_t>(rows, 5))});
    });
  const auto db_of = [&](bool some) {
    return output_f64(
        [&](OpRun& r) {
          const View all = r.in(Kind::kCompute, {7, out}, dy), x_all = r.in(Kind::kCompute, {7, in}, x);
          const View three = all.rows_range(2, 3);
          linear_backward_weight(r.context(), {.x = some ? x_all : x_all.rows_range(2, 3),
                                               .dy = some ? all : three,
                                               .dw = r.inout("dw", Kind::kStat, {out, in}, Values(out * in)),
                                               .db = r.inout("db", Kind::kStat, {out}, db),
                                               .bias_dy = some ? three : View{}});
        },
        "db");
  };
  EXPECT_EQ(db_of(true), db_of(false));
}
CONCERTO_ON_EVERY_BACKEND(Linear);

TEST(LinearGradient, FiniteDifferences) {
  const int64_t rows = 3, in = 5, out = 4;
  const Values x = normal("x", rows * in), w = normal("w", out * in), b = normal("b", out),
               dy = normal("dy", rows * out);
  const Values dx0 = normal("dx", rows * in), dw0 = normal("dw", out * in),
               db0 = normal("db", out);  // += adds to these
  const auto loss = [&](const Values& x, const Values& w, const Values& b) {
    return dot(dy, output_f64(
                       [&](OpRun& r) {
                         linear_forward(r.context(), {.x = r.in(Kind::kCompute, {rows, in}, x),
                                                      .w = r.in(Kind::kCompute, {out, in}, w),
                                                      .bias = r.in(Kind::kStat, {out}, b),
                                                      .y = r.out("y", Kind::kCompute, {rows, out})});
                       },
                       "y"));
  };
  const Outputs back = run_f64([&](OpRun& r) {
    const View dy_view = r.in(Kind::kCompute, {rows, out}, dy);
    linear_backward_input(
        r.context(),
        {.dy = dy_view, .w = r.in(Kind::kCompute, {out, in}, w), .dx = r.out("dx", Kind::kCompute, {rows, in})});
    linear_backward_input(r.context(), {.dy = dy_view,
                                        .w = r.in(Kind::kCompute, {out, in}, w),
                                        .dx = r.inout("sum", Kind::kCompute, {rows, in}, dx0),
                                        .accumulate = true});
    linear_backward_weight(r.context(), {.x = r.in(Kind::kCompute, {rows, in}, x),
                                         .dy = dy_view,
                                         .dw = r.inout("dw", Kind::kStat, {out, in}, dw0),
                                         .db = r.inout("db", Kind::kStat, {out}, db0)});
  });
  check_gradient("dx", x, back.at("dx").values, [&](const Values& v) { return loss(v, w, b); });
  check_gradient("dx accumulated", x, minus(back.at("sum").values, dx0),
                 [&](const Values& v) { return loss(v, w, b); });
  check_gradient("dw", w, minus(back.at("dw").values, dw0), [&](const Values& v) { return loss(x, v, b); });
  check_gradient("db", b, minus(back.at("db").values, db0), [&](const Values& v) { return loss(x, w, v); });
}

TEST(LinearChecks, ShapesTypesAndAliasing) {
  const auto call = [](Shape w, Kind y_kind, bool alias) {
    run_f64([&](OpRun& r) {
      const View x = r.inout("x", Kind::kCompute, {2, 3}, Values(6));
      linear_forward(r.context(), {.x = x,
                                   .w = r.in(Kind::kCompute, w, Values(w.elements())),
                                   .bias = {},
                                   .y = alias ? x : r.out("y", y_kind, {2, 3})});
    });
  };
  EXPECT_NO_THROW(call({3, 3}, Kind::kCompute, false));
  EXPECT_THROW(call({3, 4}, Kind::kCompute, false), Bug);
  EXPECT_THROW(call({3, 3}, Kind::kI32, false), Bug);
  EXPECT_THROW(call({3, 3}, Kind::kCompute, true), Bug);
}

}  // namespace
}  // namespace concerto::test

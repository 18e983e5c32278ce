#include "concerto/ops/swiglu.h"

#include <cmath>

#include "concerto/ops/op_test.h"

namespace concerto::test {
namespace {

constexpr std::pair<int64_t, int64_t> kSizes[] = {{1, 1}, {5, 33}, {0, 16}, {40, 64}, {3, 19}};

// `weights` null: none.
Body forward_body(int64_t rows, int64_t width, const Values& gate_up, const Values* weights = nullptr) {
  return [=](OpRun& r) {
    swiglu_forward(r.context(), {.gate_up = r.in(Kind::kCompute, {rows, 2 * width}, gate_up, 3),
                                 .weights = weights ? r.in(Kind::kStat, {rows}, *weights) : View{},
                                 .act = r.out("act", Kind::kCompute, {rows, width}, {}, 2)});
  };
}

struct Form {
  bool in_place, weighted, act, act_in_place;
};

Body backward_body(int64_t rows, int64_t width, const Values& gate_up, const Values& dact, const Values& weights,
                   Form form) {
  return [=](OpRun& r) {
    const double w = form.weighted ? largest(weights) : 1.0;
    const Bound bound{.length = 4, .norm = w * largest(gate_up) * largest(dact) + 1e-30};
    const double act_norm = w * largest(gate_up) * largest(gate_up) + 1e-30;
    const View out = form.in_place ? r.inout("dgate_up", Kind::kCompute, {rows, 2 * width}, gate_up, bound, 3)
                                   : r.out("dgate_up", Kind::kCompute, {rows, 2 * width}, bound, 5);
    const View dact_view = form.act_in_place ? r.inout("act", Kind::kCompute, {rows, width}, dact, {4, act_norm}, 2)
                                             : r.in(Kind::kCompute, {rows, width}, dact, 2);
    View act;
    if (form.act) act = form.act_in_place ? dact_view : r.out("act", Kind::kCompute, {rows, width}, {4, act_norm}, 1);
    SwigluBackward args{.gate_up = form.in_place ? out : r.in(Kind::kCompute, {rows, 2 * width}, gate_up, 3),
                        .weights = {},
                        .dact = dact_view,
                        .dgate_up = out,
                        .dweights = {},
                        .act = act};
    if (form.weighted) {
      const double dot_norm =
          largest_row_norm(dact, width) * std::sqrt(static_cast<double>(width)) * largest(gate_up) * largest(gate_up) +
          1e-30;
      args.weights = r.in(Kind::kStat, {rows}, weights);
      args.dweights = r.out("dweights", Kind::kStat, {rows}, {width, dot_norm});
    }
    swiglu_backward(r.context(), args);
  };
}

class Swiglu : public OpTest {};

TEST_P(Swiglu, ForwardAndBackward) {
  for (const auto& [rows, width] : kSizes)
    for (const double scale : {1.0, 60.0}) {  // 60: exp(-gate) leaves the range of f32
      SCOPED_TRACE(fmt::format("{} x {}, scale {}", rows, width, scale));
      const Values gate_up = normal("gate_up", rows * 2 * width, scale), dact = normal("dact", rows * width);
      const Values weights = normal("weights", rows);
      check_op(GetParam(), forward_body(rows, width, gate_up));
      check_op(GetParam(), forward_body(rows, width, gate_up, &weights));
      for (const bool in_place : {false, true})
        for (const bool weighted : {false, true})
          for (const auto& [act, act_in_place] : {std::pair{false, false}, {true, false}, {true, true}})
            check_op(GetParam(),
                     backward_body(rows, width, gate_up, dact, weights, {in_place, weighted, act, act_in_place}), true);
    }
}

// The act that backward makes again is the one that forward made, to the bit.
TEST_P(Swiglu, BackwardMakesTheSameAct) {
  const int64_t rows = 9, width = 75;
  const Values gate_up = normal("gate_up", rows * 2 * width, 2), dact = normal("dact", rows * width),
               weights = normal("weights", rows);
  for (const bool weighted : {false, true}) {
    const Values want =
        run_op(backend(), type(), type(), 2, forward_body(rows, width, gate_up, weighted ? &weights : nullptr))
            .at("act")
            .values;
    const Values got = run_op(backend(), type(), type(), 2,
                              backward_body(rows, width, gate_up, dact, weights, {true, weighted, true, true}))
                           .at("act")
                           .values;
    EXPECT_TRUE(same_bits(got, want)) << weighted;
  }
}
CONCERTO_ON_EVERY_BACKEND(Swiglu);

TEST(SwigluGradient, FiniteDifferences) {
  const Values gate_up = normal("gate_up", 2 * 6), dact = normal("dact", 2 * 3), weights = normal("weights", 2);
  for (const bool weighted : {false, true}) {
    const Values* w = weighted ? &weights : nullptr;
    const Outputs back = run_f64(backward_body(2, 3, gate_up, dact, weights, {false, weighted, false, false}));
    check_gradient("dgate_up", gate_up, back.at("dgate_up").values,
                   [&](const Values& v) { return dot(dact, output_f64(forward_body(2, 3, v, w), "act")); });
    if (weighted)
      check_gradient("dweights", weights, back.at("dweights").values,
                     [&](const Values& v) { return dot(dact, output_f64(forward_body(2, 3, gate_up, &v), "act")); });
  }
}

TEST(SwigluValue, GateHalfIsFirst) {
  EXPECT_DOUBLE_EQ(output_f64(forward_body(1, 1, {2, 3}), "act")[0], 2 / (1 + std::exp(-2.0)) * 3);
}

}  // namespace
}  // namespace concerto::test

#include "concerto/ops/swiglu.h"

#include <cmath>

#include "concerto/ops/op_test.h"

namespace concerto::test {
namespace {

constexpr std::pair<int64_t, int64_t> kSizes[] = {{1, 1}, {5, 33}, {0, 16}, {40, 64}, {3, 19}};

Body forward_body(int64_t rows, int64_t width, const Values& gate_up) {
  return [=](OpRun& r) {
    swiglu_forward(r.context(), {.gate_up = r.in(Kind::kCompute, {rows, 2 * width}, gate_up, 3),
                                 .act = r.out("act", Kind::kCompute, {rows, width}, {}, 2)});
  };
}

Body backward_body(int64_t rows, int64_t width, const Values& gate_up, const Values& dact, bool in_place) {
  return [=](OpRun& r) {
    const Bound bound{.length = 4, .norm = largest(gate_up) * largest(dact) + 1e-30};
    const View out = in_place ? r.inout("dgate_up", Kind::kCompute, {rows, 2 * width}, gate_up, bound, 3)
                              : r.out("dgate_up", Kind::kCompute, {rows, 2 * width}, bound, 5);
    swiglu_backward(r.context(), {.gate_up = in_place ? out : r.in(Kind::kCompute, {rows, 2 * width}, gate_up, 3),
                                  .dact = r.in(Kind::kCompute, {rows, width}, dact, 2),
                                  .dgate_up = out});
  };
}

class Swiglu : public OpTest {};

TEST_P(Swiglu, ForwardAndBackward) {
  for (const auto& [rows, width] : kSizes)
    for (const double scale : {1.0, 60.0}) {  // 60: exp(-gate) leaves the range of f32
      SCOPED_TRACE(fmt::format("{} x {}, scale {}", rows, width, scale));
      const Values gate_up = normal("gate_up", rows * 2 * width, scale), dact = normal("dact", rows * width);
      check_op(GetParam(), forward_body(rows, width, gate_up));
      for (const bool in_place : {false, true})
        check_op(GetParam(), backward_body(rows, width, gate_up, dact, in_place));
    }
}
CONCERTO_ON_EVERY_BACKEND(Swiglu);

TEST(SwigluGradient, FiniteDifferences) {
  const Values gate_up = normal("gate_up", 2 * 6), dact = normal("dact", 2 * 3);
  check_gradient("dgate_up", gate_up, output_f64(backward_body(2, 3, gate_up, dact, false), "dgate_up"),
                 [&](const Values& v) { return dot(dact, output_f64(forward_body(2, 3, v), "act")); });
}

TEST(SwigluValue, GateHalfIsFirst) {
  EXPECT_DOUBLE_EQ(output_f64(forward_body(1, 1, {2, 3}), "act")[0], 2 / (1 + std::exp(-2.0)) * 3);
}

}  // namespace
}  // namespace concerto::test

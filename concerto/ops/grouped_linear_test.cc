#include "concerto/ops/grouped_linear.h"

#include "concerto/ops/op_test.h"

namespace concerto::test {
namespace {

struct Groups {
  const char* what;
  Values offsets;
  int64_t rows;
};
const Groups kGroups[] = {
    {"ragged", integers({0, 5, 6, 23, 40}), 40},         {"empty experts", integers({0, 0, 9, 9, 9}), 9},
    {"one takes all", integers({0, 0, 70, 70, 70}), 70}, {"no rows", integers({0, 0, 0, 0, 0}), 0},
    {"rows beyond", integers({0, 2, 3, 3, 7}), 12},      {"unused capacity", integers({0, 0, 0, 0, 0}), 6},
};
constexpr int64_t kExperts = 4;

class GroupedLinear : public OpTest {};

// Rows beyond the last offset keep what they held: started with a pattern that the truth keeps as well.
TEST_P(GroupedLinear, Forward) {
  for (const auto& [in, out] : {std::pair<int64_t, int64_t>{33, 17}, {64, 48}, {8, 70}})
    for (const Groups& groups : kGroups) {
      SCOPED_TRACE(fmt::format("{} {} to {}", groups.what, in, out));
      const int64_t rows = groups.rows;
      const Values x = normal("x", rows * in), w = normal("w", kExperts * out * in), y = normal("y", rows * out);
      check_op(
          GetParam(),
          [&](OpRun& r) {
            const Bound bound{.length = in, .norm = largest_row_norm(x, in) * largest_row_norm(w, in) + 1e-30};
            grouped_linear_forward(r.context(), {.x = r.in(Kind::kCompute, {rows, in}, x, 3),
                                                 .w = r.in(Kind::kCompute, {kExperts, out, in}, w),
                                                 .offsets = r.in(Kind::kI32, {kExperts + 1}, groups.offsets),
                                                 .y = r.inout("y", Kind::kCompute, {rows, out}, y, bound, 5)});
          },
          true);
    }
}

TEST_P(GroupedLinear, BackwardInput) {
  for (const auto& [in, out] : {std::pair<int64_t, int64_t>{33, 17}, {64, 48}, {8, 70}})
    for (const Groups& groups : kGroups) {
      SCOPED_TRACE(fmt::format("{} {} to {}", groups.what, in, out));
      const int64_t rows = groups.rows;
      const Values dy = normal("dy", rows * out), w = normal("w", kExperts * out * in), dx = normal("dx", rows * in);
      check_op(
          GetParam(),
          [&](OpRun& r) {
            const double w_norm = largest(w) * std::sqrt(static_cast<double>(out));
            const Bound bound{.length = out, .norm = largest_row_norm(dy, out) * w_norm + 1e-30};
            grouped_linear_backward_input(r.context(), {.dy = r.in(Kind::kCompute, {rows, out}, dy, 2),
                                                        .w = r.in(Kind::kCompute, {kExperts, out, in}, w),
                                                        .offsets = r.in(Kind::kI32, {kExperts + 1}, groups.offsets),
                                                        .dx = r.inout("dx", Kind::kCompute, {rows, in}, dx, bound, 7)});
          },
          true);
    }
}

TEST_P(GroupedLinear, BackwardWeight) {
  for (const auto& [in, out] : {std::pair<int64_t, int64_t>{33, 17}, {64, 48}, {8, 70}})
    for (const Groups& groups : kGroups) {
      SCOPED_TRACE(fmt::format("{} {} to {}", groups.what, in, out));
      const int64_t rows = groups.rows;
      const Values x = normal("x", rows * in), dy = normal("dy", rows * out), dw = normal("dw", kExperts * out * in);
      check_op(
          GetParam(),
          [&](OpRun& r) {
            const Bound bound{.length = rows,
                              .norm = largest(x) * largest(dy) * std::sqrt(static_cast<double>(rows)) + largest(dw)};
            grouped_linear_backward_weight(r.context(),
                                           {.x = r.in(Kind::kCompute, {rows, in}, x, 3),
                                            .dy = r.in(Kind::kCompute, {rows, out}, dy),
                                            .offsets = r.in(Kind::kI32, {kExperts + 1}, groups.offsets),
                                            .dw = r.inout("dw", Kind::kStat, {kExperts, out, in}, dw, bound)});
          },
          true);
    }
}

// The same rows of one expert among other rows, groups and thread counts: the same bits in y, dx and dw.
TEST_P(GroupedLinear, RowsDoNotDependOnTheirNeighbours) {
  const int64_t in = 48, out = 40, mine = 21;
  const Values w = normal("w", kExperts * out * in), x = normal("x", mine * in), dy = normal("dy", mine * out);
  const auto run = [&](int64_t before, int64_t after, int expert, int threads) {
    const int64_t rows = before + mine + after;
    Values all_x = normal("others", rows * in, 3), all_dy = normal("other gradients", rows * out, 3);
    std::copy(x.begin(), x.end(), all_x.begin() + before * in);
    std::copy(dy.begin(), dy.end(), all_dy.begin() + before * out);
    Values offsets(kExperts + 1), weights = w;
    for (int e = 0; e <= kExperts; ++e)
      offsets[e] = e == 0 ? 0.0 : e <= expert ? static_cast<double>(before) : static_cast<double>(before + mine);
    offsets[kExperts] = static_cast<double>(expert == kExperts - 1 ? before + mine : rows);
    std::copy(w.begin(), w.begin() + out * in, weights.begin() + expert * out * in);  // my matrix, whoever I am
    const Outputs got = run_op(backend(), type(), type(), threads, [&](OpRun& r) {
      const View x_view = r.in(Kind::kCompute, {rows, in}, all_x), dy_view = r.in(Kind::kCompute, {rows, out}, all_dy);
      const View w_view = r.in(Kind::kCompute, {kExperts, out, in}, weights);
      const View offsets_view = r.in(Kind::kI32, {kExperts + 1}, offsets);
      grouped_linear_forward(
          r.context(),
          {.x = x_view, .w = w_view, .offsets = offsets_view, .y = r.out("y", Kind::kCompute, {rows, out})});
      grouped_linear_backward_input(
          r.context(),
          {.dy = dy_view, .w = w_view, .offsets = offsets_view, .dx = r.out("dx", Kind::kCompute, {rows, in})});
      grouped_linear_backward_weight(
          r.context(), {.x = x_view,
                        .dy = dy_view,
                        .offsets = offsets_view,
                        .dw = r.inout("dw", Kind::kStat, {kExperts, out, in}, Values(kExperts * out * in))});
    });
    return std::array<Values, 3>{slice(got.at("y").values, before * out, mine * out),
                                 slice(got.at("dx").values, before * in, mine * in),
                                 slice(got.at("dw").values, expert * out * in, out * in)};
  };
  const auto alone = run(0, 0, kExperts - 1, 1);
  for (const auto& [before, after, expert, threads] :
       {std::array<int, 4>{0, 5, 0, 2}, {13, 0, 3, 3}, {1, 100, 1, 2}, {64, 7, 2, 4}, {37, 2, 1, 1}}) {
    const auto other = run(before, after, expert, threads);
    for (int i = 0; i < 3; ++i)
      EXPECT_TRUE(same_bits(alone[i], other[i]))
          << "yxw"[i] << " with " << before << " rows before, " << after << " after, " << threads << " threads";
  }
}

// Each single row alone gives the bits it has among many.
TEST_P(GroupedLinear, OneRowAlone) {
  const int64_t rows = 35, in = 96, out = 33;
  const Values x = normal("x", rows * in), w = normal("w", out * in);
  const auto run = [&](const Values& x) {
    const int64_t rows = static_cast<int64_t>(x.size()) / in;
    return run_op(backend(), type(), type(), 2,
                  [&](OpRun& r) {
                    grouped_linear_forward(r.context(),
                                           {.x = r.in(Kind::kCompute, {rows, in}, x),
                                            .w = r.in(Kind::kCompute, {1, out, in}, w),
                                            .offsets = r.in(Kind::kI32, {2}, {0, static_cast<double>(rows)}),
                                            .y = r.out("y", Kind::kCompute, {rows, out})});
                  })
        .at("y")
        .values;
  };
  const Values all = run(x);
  for (int64_t i : {0, 1, 15, 16, 31, 34})
    EXPECT_TRUE(same_bits(slice(all, i * out, out), run(slice(x, i * in, in)))) << "row " << i;
}

// With row_token: the bits that gathering first gives, in all three products.
TEST_P(GroupedLinear, RowsByTokenAreGatheredRows) {
  const int64_t tokens = 23, rows = 70, in = 65, out = 37;
  const Values offsets = integers({0, 0, 41, 42, 66});  // the last four rows belong to nobody
  const Rng rng(5, "row_token");
  Values row_token, tokens_x = normal("x", tokens * in), tokens_dy = normal("dy", tokens * out);
  for (int64_t r = 0; r < rows; ++r)
    row_token.push_back(static_cast<double>(rng.below(static_cast<uint64_t>(r), static_cast<uint64_t>(tokens))));
  const auto gathered = [&](const Values& from, int64_t cols) {
    Values to;
    for (const double t : row_token)
      to.insert(to.end(), from.begin() + static_cast<int64_t>(t) * cols,
                from.begin() + static_cast<int64_t>(t + 1) * cols);
    return to;
  };
  const Values rows_x = gathered(tokens_x, in), rows_dy = gathered(tokens_dy, out);
  const Values w = normal("w", kExperts * out * in), dw = normal("dw", kExperts * out * in);
  const Values y = normal("y", rows * out), dx = normal("dx", rows * in);
  const auto body = [&](bool by_token) {
    return [=, &tokens_x, &tokens_dy](OpRun& r) {
      const View w_view = r.in(Kind::kCompute, {kExperts, out, in}, w);
      const View offsets_view = r.in(Kind::kI32, {kExperts + 1}, offsets);
      const View list = r.in(Kind::kI32, {rows}, row_token), all_x = r.in(Kind::kCompute, {rows, in}, rows_x),
                 all_dy = r.in(Kind::kCompute, {rows, out}, rows_dy);
      const View x = by_token ? r.in(Kind::kCompute, {tokens, in}, tokens_x, 3) : all_x;
      const View dy = by_token ? r.in(Kind::kCompute, {tokens, out}, tokens_dy, 5) : all_dy;
      const View given = by_token ? list : View{};
      const auto gradient = [&](const char* name) {
        return r.inout(name, Kind::kStat, {kExperts, out, in}, dw, {.length = rows, .norm = 100});
      };
      grouped_linear_forward(r.context(),
                             {.x = x,
                              .w = w_view,
                              .offsets = offsets_view,
                              .y = r.inout("y", Kind::kCompute, {rows, out}, y, {.length = in, .norm = 100}),
                              .row_token = given});
      grouped_linear_backward_input(r.context(),
                                    {.dy = dy,
                                     .w = w_view,
                                     .offsets = offsets_view,
                                     .dx = r.inout("dx", Kind::kCompute, {rows, in}, dx, {.length = out, .norm = 100}),
                                     .row_token = given});
      grouped_linear_backward_weight(
          r.context(),
          {.x = x, .dy = all_dy, .offsets = offsets_view, .dw = gradient("dw by x"), .x_row_token = given});
      grouped_linear_backward_weight(
          r.context(),
          {.x = all_x, .dy = dy, .offsets = offsets_view, .dw = gradient("dw by dy"), .dy_row_token = given});
    };
  };
  check_op(GetParam(), body(true), true);
  const Outputs want = run_op(backend(), type(), type(), 1, body(false)),
                got = run_op(backend(), type(), type(), 2, body(true));
  for (const auto& [name, output] : want) EXPECT_TRUE(same_bits(got.at(name).values, output.values)) << name;
}
CONCERTO_ON_EVERY_BACKEND(GroupedLinear);

TEST(GroupedLinearGradient, FiniteDifferences) {
  const int64_t rows = 5, in = 3, out = 4, experts = 3;
  const Values offsets = integers({0, 2, 2, 5});
  const Values x = normal("x", rows * in), w = normal("w", experts * out * in), dy = normal("dy", rows * out);
  const Values dw0 = normal("dw", experts * out * in);
  const auto loss = [&](const Values& x, const Values& w) {
    return dot(dy, output_f64(
                       [&](OpRun& r) {
                         grouped_linear_forward(r.context(), {.x = r.in(Kind::kCompute, {rows, in}, x),
                                                              .w = r.in(Kind::kCompute, {experts, out, in}, w),
                                                              .offsets = r.in(Kind::kI32, {experts + 1}, offsets),
                                                              .y = r.out("y", Kind::kCompute, {rows, out})});
                       },
                       "y"));
  };
  const Outputs back = run_f64([&](OpRun& r) {
    const View offsets_view = r.in(Kind::kI32, {experts + 1}, offsets), dy_view = r.in(Kind::kCompute, {rows, out}, dy);
    grouped_linear_backward_input(r.context(), {.dy = dy_view,
                                                .w = r.in(Kind::kCompute, {experts, out, in}, w),
                                                .offsets = offsets_view,
                                                .dx = r.out("dx", Kind::kCompute, {rows, in})});
    grouped_linear_backward_weight(r.context(), {.x = r.in(Kind::kCompute, {rows, in}, x),
                                                 .dy = dy_view,
                                                 .offsets = offsets_view,
                                                 .dw = r.inout("dw", Kind::kStat, {experts, out, in}, dw0)});
  });
  check_gradient("dx", x, back.at("dx").values, [&](const Values& v) { return loss(v, w); });
  check_gradient("dw", w, minus(back.at("dw").values, dw0), [&](const Values& v) { return loss(x, v); });
}

}  // namespace
}  // namespace concerto::test

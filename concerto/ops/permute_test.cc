#include "concerto/ops/permute.h"

#include <algorithm>
#include <numeric>

#include "concerto/ops/op_test.h"

namespace concerto::test {
namespace {

struct Routing {
  const char* what;
  int64_t tokens, top_k, experts;
  Values ids;  // [tokens, top_k]
};

// Distinct experts for each token, as a router gives them.
Values random_ids(int64_t tokens, int64_t top_k, int64_t experts) {
  const Rng rng(3, "ids");
  Values ids;
  for (int64_t t = 0; t < tokens; ++t) {
    Values all(static_cast<size_t>(experts));
    std::iota(all.begin(), all.end(), 0.0);
    for (int64_t j = 0; j < top_k; ++j)
      std::swap(all[j], all[j + static_cast<int64_t>(rng.below(static_cast<uint64_t>(t * top_k + j), experts - j))]);
    ids.insert(ids.end(), all.begin(), all.begin() + top_k);
  }
  return ids;
}

std::vector<Routing> routings() {
  Values one(17 * 2, 5.0);
  for (size_t i = 1; i < one.size(); i += 2) one[i] = 2;
  return {{"random", 50, 3, 8, random_ids(50, 3, 8)},
          {"one token", 1, 2, 4, integers({3, 0})},
          {"one expert takes all", 17, 1, 6, Values(17, 4.0)},
          {"two take all", 17, 2, 8, one},
          {"no tokens", 0, 2, 4, {}},
          {"one expert", 5, 1, 1, Values(5)}};
}

Body plan_body(const Routing& s) {
  return [=](OpRun& r) {
    make_dispatch_plan(r.context(), {.expert_ids = r.in(Kind::kI32, {s.tokens, s.top_k}, s.ids),
                                     .offsets = r.out("offsets", Kind::kI32, {s.experts + 1}),
                                     .row_token = r.out("row_token", Kind::kI32, {s.tokens * s.top_k}),
                                     .row_of = r.out("row_of", Kind::kI32, {s.tokens, s.top_k})});
  };
}

// Everything about one routing, for the ops that replay its plan.
struct Planned {
  Planned(const Routing& s, int64_t hidden)
      : tokens(s.tokens), top_k(s.top_k), rows(s.tokens * s.top_k), hidden(hidden) {
    const Outputs plan = run_f64(plan_body(s));
    row_token = plan.at("row_token").values;
    row_of = plan.at("row_of").values;
  }
  int64_t tokens, top_k, rows, hidden;
  Values row_token, row_of;

  View row_of_view(OpRun& r) const { return r.in(Kind::kI32, {tokens, top_k}, row_of); }
};

Body gather_body(const Planned& p, const Values& x) {
  return [=](OpRun& r) {
    gather_rows(r.context(), {.x = r.in(Kind::kCompute, {p.tokens, p.hidden}, x, 3),
                              .row_token = r.in(Kind::kI32, {p.rows}, p.row_token),
                              .rows = r.out("rows", Kind::kCompute, {p.rows, p.hidden}, {}, 1)});
  };
}
Body gather_backward_body(const Planned& p, const Values& drows) {
  return [=](OpRun& r) {
    const Bound bound{.length = p.top_k, .norm = largest(drows) * static_cast<double>(p.top_k)};
    gather_rows_backward(r.context(), {.drows = r.in(Kind::kCompute, {p.rows, p.hidden}, drows, 3),
                                       .row_of = p.row_of_view(r),
                                       .dx = r.out("dx", Kind::kCompute, {p.tokens, p.hidden}, bound, 1)});
  };
}
Body combine_body(const Planned& p, const Values& rows, const Values* add, const Values* residual) {
  return [=](OpRun& r) {
    const auto optional = [&](const Values* v, int64_t gap) {
      return v ? r.in(Kind::kCompute, {p.tokens, p.hidden}, *v, gap) : View{};
    };
    const Bound bound{.length = p.top_k + 2,
                      .norm = largest(rows) * static_cast<double>(p.top_k) + (add ? largest(*add) : 0) +
                              (residual ? largest(*residual) : 0)};
    combine_rows(r.context(), {.rows = r.in(Kind::kCompute, {p.rows, p.hidden}, rows, 3),
                               .row_of = p.row_of_view(r),
                               .add = optional(add, 2),
                               .residual = optional(residual, 4),
                               .y = r.out("y", Kind::kCompute, {p.tokens, p.hidden}, bound, 1)});
  };
}
Body scatter_slots_body(const Planned& p, const Values& slots) {
  return [=](OpRun& r) {
    scatter_slots(r.context(), {.slots = r.in(Kind::kStat, {p.tokens, p.top_k}, slots),
                                .row_of = p.row_of_view(r),
                                .rows = r.out("rows", Kind::kStat, {p.rows})});
  };
}
Body gather_slots_body(const Planned& p, const Values& rows) {
  return [=](OpRun& r) {
    gather_slots(r.context(), {.rows = r.in(Kind::kStat, {p.rows}, rows),
                               .row_of = p.row_of_view(r),
                               .slots = r.out("slots", Kind::kStat, {p.tokens, p.top_k})});
  };
}

class Permute : public OpTest {};

TEST_P(Permute, PlanIsAStableSort) {
  for (const Routing& s : routings()) {
    SCOPED_TRACE(s.what);
    check_op(GetParam(), plan_body(s));
    const Outputs got = run_op(backend(), type(), type(), 2, plan_body(s));
    std::vector<size_t> order(s.ids.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return s.ids[a] < s.ids[b]; });
    for (size_t row = 0; row < order.size(); ++row) {
      EXPECT_EQ(got.at("row_token").values[row], static_cast<double>(order[row] / static_cast<size_t>(s.top_k)));
      EXPECT_EQ(got.at("row_of").values[order[row]], static_cast<double>(row));
    }
    const Values& offsets = got.at("offsets").values;
    for (int64_t e = 0; e <= s.experts; ++e)
      EXPECT_EQ(offsets[e], static_cast<double>(std::count_if(s.ids.begin(), s.ids.end(),
                                                              [&](double id) { return id < static_cast<double>(e); })));
  }
}

TEST_P(Permute, PlanOfManyTokens) {
  const Routing s{"", 40840, 6, 64, random_ids(40840, 6, 64)};
  const Values offsets = run_op(backend(), type(), type(), 3, plan_body(s)).at("offsets").values;
  for (int64_t e = 0; e < s.experts; ++e)
    ASSERT_EQ(offsets[e + 1] - offsets[e],
              static_cast<double>(std::count(s.ids.begin(), s.ids.end(), static_cast<double>(e))));
}

TEST_P(Permute, GatherAndCombine) {
  for (const Routing& s : routings())
    for (const int64_t hidden : {1, 33, 64}) {
      SCOPED_TRACE(fmt::format("{}, hidden {}", s.what, hidden));
      const Planned p(s, hidden);
      const Values x = normal("x", p.tokens * hidden), rows = normal("rows", p.rows * hidden);
      const Values residual = normal("residual", p.tokens * hidden);
      check_op(GetParam(), gather_body(p, x));
      check_op(GetParam(), gather_backward_body(p, rows), true);
      for (const Values* add : {static_cast<const Values*>(nullptr), &x})
        for (const Values* more : {static_cast<const Values*>(nullptr), &residual})
          check_op(GetParam(), combine_body(p, rows, add, more), true);
    }
}

TEST_P(Permute, SlotsGoToTheirRowsAndBack) {
  for (const Routing& s : routings()) {
    SCOPED_TRACE(s.what);
    const Planned p(s, 1);
    const Values slots = rounded(normal("slots", p.rows), stat());
    check_op(GetParam(), scatter_slots_body(p, slots), true);
    check_op(GetParam(), gather_slots_body(p, slots), true);
    const Values rows = run_op(backend(), type(), type(), 2, scatter_slots_body(p, slots)).at("rows").values;
    for (size_t i = 0; i < slots.size(); ++i) EXPECT_EQ(rows[static_cast<size_t>(p.row_of[i])], slots[i]);
    EXPECT_TRUE(same_bits(run_op(backend(), type(), type(), 2, gather_slots_body(p, rows)).at("slots").values, slots));
  }
}

// combine(dispatch(x)) of k slots is k x: exact for k = 2.
TEST_P(Permute, RoundTrip) {
  const Planned p({"", 50, 2, 8, random_ids(50, 2, 8)}, 20);
  const Values x = rounded(normal("x", p.tokens * p.hidden), type());
  Values twice = x;
  for (double& v : twice) v *= 2;
  const Values rows = run_op(backend(), type(), type(), 2, gather_body(p, x)).at("rows").values;
  EXPECT_TRUE(
      same_bits(run_op(backend(), type(), type(), 2, combine_body(p, rows, nullptr, nullptr)).at("y").values, twice));
}
CONCERTO_ON_EVERY_BACKEND(Permute);

TEST(PermuteGradient, FiniteDifferences) {
  const Planned p({"", 4, 2, 3, integers({2, 0, 0, 1, 2, 1, 0, 2})}, 3);
  const Values x = normal("x", p.tokens * 3), rows = normal("rows", p.rows * 3);
  const Values dy = normal("dy", p.tokens * 3), drows = normal("drows", p.rows * 3);
  check_gradient("gather dx", x, output_f64(gather_backward_body(p, drows), "dx"),
                 [&](const Values& v) { return dot(drows, output_f64(gather_body(p, v), "rows")); });
  check_gradient("combine drows", rows, output_f64(gather_body(p, dy), "rows"),
                 [&](const Values& v) { return dot(dy, output_f64(combine_body(p, v, &x, nullptr), "y")); });
  for (const bool residual : {false, true})
    check_gradient("combine dadd", x, dy, [&](const Values& v) {
      return dot(dy, output_f64(combine_body(p, rows, residual ? nullptr : &v, residual ? &v : nullptr), "y"));
    });
}

}  // namespace
}  // namespace concerto::test

// What surrounds routing: capacity, units in pieces, dropped rows, the orthogonal loss, the bias update.
#include <algorithm>
#include <cmath>

#include "concerto/ops/permute.h"
#include "concerto/ops/routing.h"
#include "concerto/ops/test_routing_case.h"

namespace concerto::test {
namespace {

TEST(ExpertCapacity, AsPythonRoundsDown) {
  const CapacityFactors f{6, 1.5, 64};
  EXPECT_EQ(expert_capacity(f, true, 1024, 64), 96);
  EXPECT_EQ(expert_capacity(f, false, 1024, 64), 24);
  EXPECT_EQ(expert_capacity(f, false, 63, 64), 63);  // fewer tokens than experts, in evaluation only
  EXPECT_EQ(expert_capacity(f, false, 64, 64), 1);   // int(1.5)
  EXPECT_EQ(expert_capacity(f, true, 11, 64), 1);
  EXPECT_EQ(expert_capacity({0.1, 1, 1}, true, 30, 3), 1);
  EXPECT_EQ(expert_capacity({1.1, 1, 1}, true, 10, 11), 1);
  EXPECT_EQ(expert_capacity(f, true, 0, 64), 0);  // nobody there
  EXPECT_EQ(expert_capacity({1e300, 1, 1}, true, 100, 3), INT64_MAX);
  for (int64_t tokens = 1; tokens < 200; ++tokens)
    for (int64_t experts = 1; experts <= 30; ++experts)
      for (const double factor : {0.3, 1.1, 2.7}) {
        const double room = factor * static_cast<double>(tokens);
        int64_t want = 0;  // most whole times that `experts` fits into room
        while (static_cast<double>((want + 1) * experts) <= room) ++want;
        if (want == 0) continue;
        ASSERT_EQ(expert_capacity({factor, 1, 1}, true, tokens, experts), want);
      }
}

TEST(ExpertCapacity, ZeroIsAnErrorThatNamesTheFactor) {
  for (const auto& [training, tokens, where] :
       {std::tuple{true, 10, "moe_capacity[0]"}, {false, 64, "moe_capacity[1]"}, {false, 10, "moe_capacity[2]"}})
    for (const double bad : {0.5, 0.0, -3.0, std::nan("")}) {
      CapacityFactors f{64, 64, 64};
      (training ? f.train : tokens == 64 ? f.eval : f.few_tokens) = bad;
      try {
        expert_capacity(f, training, tokens, 64);
        ADD_FAILURE() << where << " " << bad;
      } catch (const Error& e) {
        EXPECT_EQ(e.code, ErrorCode::kConfig);
        EXPECT_EQ(e.where, where);
        EXPECT_NE(e.fix.find("at least"), std::string::npos);
      }
    }
}

Body drop_body(const Values& ids, int64_t top_k, int64_t experts, const Values& claims, const Values& before,
               const Values& capacity, DropOrder order, bool reverse) {
  return [=](OpRun& r) {
    const auto tokens = static_cast<int64_t>(ids.size()) / top_k;
    routing_drop(r.context(), {.expert_ids = r.in(Kind::kI32, {tokens, top_k}, ids),
                               .unit_offsets = r.in(Kind::kI32, {2}, {0, static_cast<double>(tokens)}),
                               .capacity = capacity.empty() ? View{} : r.in(Kind::kI64, {1}, capacity),
                               .claims = r.in(Kind::kI64, {1, top_k, experts}, claims),
                               .before = before.empty() ? View{} : r.in(Kind::kI64, {1, top_k, experts}, before),
                               .order = order,
                               .reverse = reverse,
                               .slots = r.out("slots", Kind::kI32, {tokens, top_k}),
                               .kept_ids = r.out("kept_ids", Kind::kI32, {tokens, top_k}),
                               .kept_counts = r.out("kept_counts", Kind::kI64, {1, experts})});
  };
}

Values claims_of(const Values& ids, int64_t top_k, int64_t experts) {
  Values claims(static_cast<size_t>(top_k * experts));
  for (size_t i = 0; i < ids.size(); ++i)
    ++claims[i % static_cast<size_t>(top_k) * static_cast<size_t>(experts) + static_cast<size_t>(ids[i])];
  return claims;
}

// A unit spread over ranks or micro-batches: each piece, told what is ahead of it, decides as the whole would.
TEST(RoutingPieces, DecideAsTheWholeUnit) {
  const int64_t tokens = 74, top_k = 3, experts = 7;
  const std::vector<int64_t> pieces = {7, 64, 0, 3};
  Values ids;
  for (int64_t t = 0; t < tokens; ++t) {
    const Values p = normal(fmt::format("p{}", t).c_str(), experts);
    for (int e : model::best(p, static_cast<int>(top_k))) ids.push_back(e);
  }
  for (const DropOrder order : {DropOrder::kRankMajor, DropOrder::kTokenMajor})
    for (const bool reverse : {false, true}) {
      const Outputs whole_unit =
          run_f64(drop_body(ids, top_k, experts, claims_of(ids, top_k, experts), {}, {17}, order, reverse));
      EXPECT_LT(*std::min_element(whole_unit.at("slots").values.begin(), whole_unit.at("slots").values.end()), 0);
      std::vector<std::vector<int64_t>> claims;
      std::vector<const int64_t*> pointers;
      int64_t begin = 0;
      for (int64_t n : pieces) {
        const Values c = claims_of(slice(ids, begin * top_k, n * top_k), top_k, experts);
        claims.emplace_back(c.begin(), c.end());
        begin += n;
      }
      for (const auto& c : claims) pointers.push_back(c.data());
      Values slots, kept(static_cast<size_t>(experts));
      begin = 0;
      for (size_t i = 0; i < pieces.size(); ++i) {
        std::vector<int64_t> before(static_cast<size_t>(top_k * experts));
        claims_before(order, reverse, pointers, static_cast<int64_t>(i), top_k, experts, before.data());
        const Outputs part = run_f64(drop_body(slice(ids, begin * top_k, pieces[i] * top_k), top_k, experts,
                                               Values(claims[i].begin(), claims[i].end()),
                                               Values(before.begin(), before.end()), {17}, order, reverse));
        const Values& got = part.at("slots").values;
        slots.insert(slots.end(), got.begin(), got.end());
        for (size_t e = 0; e < kept.size(); ++e) kept[e] += part.at("kept_counts").values[e];
        begin += pieces[i];
      }
      EXPECT_EQ(slots, whole_unit.at("slots").values);
      EXPECT_EQ(kept, whole_unit.at("kept_counts").values);
    }
}

TEST(RoutingDrop, WithoutCapacityNothingIs) {
  const Outputs got = run_f64(
      drop_body({2, 0, 2, 1, 2, 0}, 2, 3, claims_of({2, 0, 2, 1, 2, 0}, 2, 3), {}, {}, DropOrder::kRankMajor, false));
  EXPECT_EQ(got.at("slots").values, integers({0, 0, 1, 0, 2, 1}));
  EXPECT_EQ(got.at("kept_ids").values, integers({2, 0, 2, 1, 2, 0}));
}

TEST(RoutingDrop, BadArgumentsAreCaught) {
  const auto fails = [](const Values& ids, const Values& capacity) {
    EXPECT_THROW(run_f64(drop_body(ids, 1, 3, {0, 0, 0}, {}, capacity, DropOrder::kRankMajor, false)), Bug);
  };
  fails({3}, {1});
  fails({-1}, {1});
  fails({1}, {0});
  RoutingCase c{4, 4, 2, normal("logits", 16)};
  for (const Values& units : {Values{0, 3}, Values{1, 4}, Values{0, 3, 2, 4}}) {
    c.units = units;
    EXPECT_THROW(run_f64(routing_body(c)), Bug);
  }
}

// Dispatch with an expert E for those who have none: its rows lie behind all others, outside every expert's product.
// Cleared, they add nothing, although nobody wrote them (scratch and outputs of tests are full of NaN).
TEST(DroppedRows, ReachNeitherOutputNorGradient) {
  const int64_t tokens = 5, top_k = 2, experts = 3, hidden = 4, rows = tokens * top_k;
  const Values kept = {0, 3, 2, 1, 3, 3, 1, 0, 3, 2};
  for (const BackendCase& backend : backend_cases()) {
    const Body body = [&](OpRun& r) {
      const Context& ctx = r.context();
      const View ids = r.in(Kind::kI32, {tokens, top_k}, kept);
      const View offsets = r.out("offsets", Kind::kI32, {experts + 2});
      const View row_token = r.out("row_token", Kind::kI32, {rows}),
                 row_of = r.out("row_of", Kind::kI32, {tokens, top_k});
      make_dispatch_plan(ctx, {.expert_ids = ids, .offsets = offsets, .row_token = row_token, .row_of = row_of});
      const View out = r.out("rows", Kind::kCompute, {rows, hidden}, {}, 3);
      if (!r.dry())  // what an expert's product leaves: rows of its own
        for (int64_t row = 0; row < offsets.as<int32_t>()[experts]; ++row)
          gather_rows(ctx, {.x = r.in(Kind::kCompute, {1, hidden}, Values(static_cast<size_t>(hidden), 1.0)),
                            .row_token = r.in(Kind::kI32, {1}, {0}),
                            .rows = out.rows_range(row, 1)});
      clear_dropped(ctx, {.offsets = offsets, .rows = out});
      gather_rows_backward(ctx, {.drows = out, .row_of = row_of, .dx = r.out("sum", Kind::kCompute, {tokens, hidden})});
    };
    const Outputs got = run_op(find_backend(backend.backend), backend.type, backend.type, 2, body);
    EXPECT_EQ(got.at("offsets").values, integers({0, 2, 4, 6, 10}));
    Values want;
    for (int64_t t = 0; t < tokens; ++t)
      for (int64_t h = 0; h < hidden; ++h)
        want.push_back((kept[static_cast<size_t>(2 * t)] < 3) + (kept[static_cast<size_t>(2 * t + 1)] < 3));
    EXPECT_EQ(got.at("sum").values, want) << backend;
  }
}

TEST(PaddedForm, DispatchAndCombine) {
  const double nan = std::nan("");
  for (const BackendCase& backend : backend_cases()) {
    const Outputs got = run_op(find_backend(backend.backend), backend.type, backend.type, 1, [&](OpRun& r) {
      pad_dispatch(r.context(), {.x = r.in(Kind::kCompute, {2, 2}, {1, 2, 3, 4}),
                                 .expert_ids = r.in(Kind::kI32, {2, 2}, {1, 0, 0, 1}),
                                 .slots = r.in(Kind::kI32, {2, 2}, {1, 0, -1, 0}),
                                 .scatter_index = r.out("index", Kind::kI32, {2, 2}),
                                 .buffer = r.out("buffer", Kind::kCompute, {2, 2, 2})});
      pad_combine(r.context(), {.buffer = r.in(Kind::kCompute, {2, 2, 2}, {nan, nan, 8, 16, nan, nan, 2, 4}),
                                .scatter_index = r.in(Kind::kI32, {3, 2}, {3, 1, -1, 3, 0, -1}),
                                .weights = r.in(Kind::kCompute, {3, 2}, {.5, .25, 1, 1, 0, 0}),
                                .y = r.out("y", Kind::kCompute, {3, 2})});
    });
    EXPECT_EQ(got.at("index").values, integers({3, 0, -1, 2})) << backend;
    EXPECT_EQ(got.at("buffer").values, Values({1, 2, 0, 0, 3, 4, 1, 2})) << backend;
    EXPECT_EQ(got.at("y").values, Values({3, 6, 2, 4, 0, 0})) << backend;
  }
}

class RouterMatrix : public OpTest {};

Body orthogonal_body(const Values& w, int64_t experts, int64_t hidden, int64_t blocks, double scale, const Values& dw) {
  return [=](OpRun& r) {
    const double n = static_cast<double>(experts * experts);
    orthogonal_loss(r.context(),
                    {.w = r.in(Kind::kStat, {experts, hidden}, w, 1),
                     .blocks = blocks,
                     .scale = scale,
                     .loss = r.out("loss", Kind::kF64, {1}, {.length = hidden, .norm = n}),
                     .dw = dw.empty() ? View{}
                                      : r.inout("dw", Kind::kStat, {experts, hidden}, dw,
                                                {.length = hidden, .norm = largest(dw) + 100 * scale}, 2)});
  };
}

TEST_P(RouterMatrix, OrthogonalLossAndStep) {
  for (const auto& [experts, hidden, blocks] :
       {std::array<int64_t, 3>{1, 1, 1}, {6, 5, 1}, {6, 5, 2}, {16, 70, 4}, {5, 9, 5}}) {
    SCOPED_TRACE(fmt::format("{} x {}, {} blocks", experts, hidden, blocks));
    const Values w = normal("w", experts * hidden), dw = normal("dw", experts * hidden);
    check_op(GetParam(), orthogonal_body(w, experts, hidden, blocks, 0.3, dw), true);
    const Outputs got =
        run_op(backend(), type(), type(), 3, orthogonal_body(w, experts, hidden, blocks, 0.3, Values(dw.size())));
    const double want = model::orthogonal(matrix(rounded(w, stat()), hidden), static_cast<size_t>(blocks));
    EXPECT_NEAR(got.at("loss").values[0], want, 1e-12 * (1 + want));
    // The step: w - rate * gradient, all rows from the matrix as it was.
    const Body step = [&](OpRun& r) {
      orthogonal_step(r.context(), {.w = r.inout("w", Kind::kStat, {experts, hidden}, w,
                                                 {.length = hidden, .norm = largest(w) + 100}, 1),
                                    .blocks = blocks,
                                    .rate = 0.3,
                                    .loss = r.out("loss", Kind::kF64, {1}, {.norm = 1})});
    };
    check_op(GetParam(), step, true);
    const Outputs after = run_op(backend(), type(), type(), 2, step);
    for (size_t i = 0; i < w.size(); ++i)
      ASSERT_NEAR(after.at("w").values[i], round_to(stat(), w[i]) - got.at("dw").values[i],
                  1e-6 * (1 + std::fabs(w[i])));
  }
}

TEST_P(RouterMatrix, BiasUpdate) {
  // Means 3, 10 and 0.75: below, at and above; the middle row is even; the count of one expert is the exact mean.
  const Values usage = {0, 3, 9, 0, 10, 10, 10, 10, 1, 0, 1, 1}, bias = {1, -2, 3, 40, 5, 6, 7, 8, 0, 0, 0, 0};
  const Outputs got = run_op(backend(), type(), type(), 1, [&](OpRun& r) {
    bias_update(r.context(), {.usage = r.inout("usage", Kind::kI64, {3, 4}, usage),
                              .bias = r.inout("bias", Kind::kStat, {3, 4}, bias, {}, 1),
                              .rate = 0.125});
  });
  EXPECT_EQ(got.at("bias").values, Values({1.125, -2, 2.875, 40.125, 5, 6, 7, 8, -.125, .125, -.125, -.125}));
  EXPECT_EQ(got.at("usage").values, Values(12)) << "counts may be used once";
  EXPECT_EQ(got.at("bias").values[1], -2) << "sign(0) is 0";
}

// Usage near 40,840 in steps of one: a mean in bf16 or f32 sums would lose the sign.
TEST_P(RouterMatrix, BiasUpdateComparesIntegers) {
  const double n = 40840, many = 0x1p50;
  const Outputs got = run_op(backend(), type(), type(), 1, [&](OpRun& r) {
    bias_update(r.context(),
                {.usage = r.inout("usage", Kind::kI64, {2, 3}, {n, n + 1, n + 2, many, many + 1, many + 1}),
                 .bias = r.inout("bias", Kind::kStat, {2, 3}, Values(6)),
                 .rate = 1});
  });
  EXPECT_EQ(got.at("bias").values, Values({1, 0, -1, 1, -1, -1}));
}
CONCERTO_ON_EVERY_BACKEND(RouterMatrix);

TEST(OrthogonalGolden, OneNinth) {
  const Values loss = output_f64(orthogonal_body({1, 0, 0, 1, 1, 0, 0, 0, 2}, 3, 3, 1, 1, {}), "loss");
  EXPECT_NEAR(loss[0], 1.0 / 9, 1e-15);
}

TEST(OrthogonalGradient, FiniteDifferences) {
  for (const int64_t blocks : {1, 2}) {
    const Values w = normal("w", 6 * 5);
    const Outputs got = run_f64(orthogonal_body(w, 6, 5, blocks, 0.7, Values(30)));
    check_gradient("w", w, got.at("dw").values, [&](const Values& at) {
      return 0.7 * output_f64(orthogonal_body(at, 6, 5, blocks, 1, {}), "loss")[0];
    });
  }
  // A row of zeros has a loss and no direction.
  const Outputs zero = run_f64(orthogonal_body({0, 0, 1, 0}, 2, 2, 1, 1, Values(4)));
  EXPECT_EQ(zero.at("loss").values[0], 0.25);
  EXPECT_EQ(zero.at("dw").values, Values(4));
}

}  // namespace
}  // namespace concerto::test

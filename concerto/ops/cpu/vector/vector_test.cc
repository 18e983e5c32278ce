// What the tests of every op do not cover: all instruction sets of this processor in one run, borders of the blocks
// that these kernels cut, both ways of attention's backward pass, and what other documents or unused rows may not do.
#include "concerto/ops/cpu/vector/vector_kernels.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "concerto/ops/cpu/vector/kernel_table.h"
#include "concerto/ops/op_test.h"
#include "concerto/ops/ref/ref_backend.h"

namespace concerto::test {
namespace {

struct Level {
  cpu::Isa isa;
  DType type;
};

std::vector<Level> levels() {
  std::vector<Level> all;
  for (cpu::Isa isa : {cpu::Isa::kGeneric, cpu::Isa::kAvx2, cpu::Isa::kAvx512, cpu::Isa::kAvx512Bf16})
    if (isa <= cpu::detected_isa())
      for (DType type : {DType::kF32, DType::kBF16}) all.push_back({isa, type});
  return all;
}

const Backend& backend_of(cpu::Isa isa) {
  static const std::map<cpu::Isa, Backend> backends = [] {
    std::map<cpu::Isa, Backend> made;
    for (const Level& level : levels()) {
      Backend& b = made[level.isa];
      b.name = cpu::isa_name(level.isa);
      b.f32 = b.bf16 = true;
      cpu::fill_vector_kernels(b, level.isa);
    }
    return made;
  }();
  return backends.at(isa);
}

class Vector : public testing::TestWithParam<Level> {
 protected:
  const cpu::KernelTable& table() const { return cpu::kernel_table(GetParam().isa); }
  DType type() const { return GetParam().type; }
  Outputs run(const Body& body, int threads = 2) const {
    return run_op(backend_of(GetParam().isa), type(), type(), threads, body);
  }

  // Against ref in f64 on the same values, and the same bits for one to four threads. Errors in roundings of the
  // output's type on its largest value.
  void check(const Body& body, double roundings) const {
    const Outputs truth = run_op(ref_backend(), DType::kF64, type(), 1, body), one = run(body, 1);
    for (const auto& [name, output] : one) {
      const Values& want = truth.at(name).values;
      const double tolerance = roundings * unit_roundoff(output.type) * largest(want);
      for (size_t i = 0; i < want.size(); ++i)
        ASSERT_LE(std::fabs(output.values[i] - want[i]), tolerance)
            << name << "[" << i << "] is " << output.values[i] << ", wanted " << want[i];
    }
    for (int threads : {2, 3, 4}) {
      const Outputs more = run(body, threads);
      for (const auto& [name, output] : one)
        ASSERT_TRUE(same_bits(output.values, more.at(name).values)) << name << " with " << threads << " threads";
    }
  }
};

INSTANTIATE_TEST_SUITE_P(Levels, Vector, testing::ValuesIn(levels()), [](const auto& info) {
  return std::string(cpu::isa_name(info.param.isa)) + "_" + std::string(dtype_name(info.param.type));
});

TEST_P(Vector, ExpIsWithinTwoUlp) {
  std::vector<float> x;
  for (float v = -104.5f; v < 89.5f; v += 0.00317f) x.push_back(v);
  for (float v : {0.0f, -0.0f, 1e-30f, -1e-30f, 88.7228f, 88.7229f, -87.3365f, -103.9f, 1e30f, -1e30f}) x.push_back(v);
  std::vector<float> y(x.size());
  table().softmax->exp(x.data(), y.data(), static_cast<int64_t>(x.size()));
  for (size_t i = 0; i < x.size(); ++i) {
    const double want = std::exp(static_cast<double>(x[i]));
    if (want > std::numeric_limits<float>::max()) {
      EXPECT_TRUE(std::isinf(y[i]) || y[i] >= 3.4e38f) << x[i];
      continue;
    }
    const float near = static_cast<float>(want);
    const double ulp = static_cast<double>(std::nextafter(near, std::numeric_limits<float>::infinity())) - near;
    ASSERT_LT(std::fabs(y[i] - want), 2 * ulp) << "exp(" << x[i] << ") is " << y[i];
  }
  const float special[] = {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
                           std::numeric_limits<float>::quiet_NaN()};
  float made[3];
  table().softmax->exp(special, made, 3);
  EXPECT_TRUE(std::isinf(made[0]) && made[0] > 0);
  EXPECT_EQ(made[1], 0);
  EXPECT_TRUE(std::isnan(made[2]));
}

// Every bf16 there is, the halfway cases above and below it, and the f32 beside those.
TEST_P(Vector, CastRoundsAsTheScalarTypeDoes) {
  std::vector<float> x;
  for (uint32_t high = 0; high < 0x10000; ++high)
    for (uint32_t low : {0u, 1u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu})
      x.push_back(std::bit_cast<float>(high << 16 | low));
  std::vector<uint16_t> y(x.size());
  table().rows[1].from_f32(x.data(), y.data(), static_cast<int64_t>(x.size()));
  for (size_t i = 0; i < x.size(); ++i) ASSERT_EQ(y[i], bf16(x[i]).bits) << std::hex << std::bit_cast<uint32_t>(x[i]);
}

struct Packed {
  const char* what;
  Values docs;
  int64_t heads, kv_heads, dim;
  int64_t tokens() const { return static_cast<int64_t>(docs.back()); }
};

// Lengths on both sides of lanes (16), tiles (6), key blocks (64) and query blocks (96); one document far longer than
// the rest, so that with two threads backward goes by blocks, and many equal ones, so that it goes by documents.
const Packed kPacked[] = {
    {"borders", integers({0, 15, 31, 48, 111, 175, 240, 336, 433}), 2, 1, 16},
    {"one long", integers({0, 5, 5, 330, 333}), 2, 1, 64},
    {"equal", integers({0, 70, 140, 210, 280}), 4, 2, 32},
    {"wide", integers({0, 67, 200}), 2, 2, 128},
    {"very wide", integers({0, 66}), 1, 1, 256},
    {"no whole vector", integers({0, 33, 100}), 3, 1, 18},
    {"two and a half panels", integers({0, 65}), 2, 2, 80},
    {"odd", integers({0, 9, 80}), 2, 1, 31},
};

Body forward_of(const Packed& p, const Values& q, const Values& k, const Values& v) {
  return [=](OpRun& r) {
    const int64_t tokens = p.tokens();
    attention_forward(r.context(), {.q = r.in(Kind::kCompute, {tokens, p.heads * p.dim}, q, 3),
                                    .k = r.in(Kind::kCompute, {tokens, p.kv_heads * p.dim}, k, 1),
                                    .v = r.in(Kind::kCompute, {tokens, p.kv_heads * p.dim}, v, 2),
                                    .doc_offsets = r.in(Kind::kI32, {static_cast<int64_t>(p.docs.size())}, p.docs),
                                    .num_heads = p.heads,
                                    .num_kv_heads = p.kv_heads,
                                    .head_dim = p.dim,
                                    .scale = 1 / std::sqrt(static_cast<double>(p.dim)),
                                    .out = r.out("out", Kind::kCompute, {tokens, p.heads * p.dim}, {}, 1),
                                    .lse = r.out("lse", Kind::kStat, {tokens, p.heads}, {}, 1)});
  };
}

Body backward_of(const Packed& p, const Values& q, const Values& k, const Values& v, const Values& dout,
                 const Values& out, const Values& lse) {
  return [=](OpRun& r) {
    const int64_t tokens = p.tokens();
    const Shape wide{tokens, p.heads * p.dim}, narrow{tokens, p.kv_heads * p.dim};
    attention_backward(r.context(), {.dout = r.in(Kind::kCompute, wide, dout, 1),
                                     .q = r.in(Kind::kCompute, wide, q),
                                     .k = r.in(Kind::kCompute, narrow, k, 3),
                                     .v = r.in(Kind::kCompute, narrow, v),
                                     .out = r.in(Kind::kCompute, wide, out),
                                     .lse = r.in(Kind::kStat, {tokens, p.heads}, lse, 2),
                                     .doc_offsets = r.in(Kind::kI32, {static_cast<int64_t>(p.docs.size())}, p.docs),
                                     .num_heads = p.heads,
                                     .num_kv_heads = p.kv_heads,
                                     .head_dim = p.dim,
                                     .scale = 1 / std::sqrt(static_cast<double>(p.dim)),
                                     .dq = r.out("dq", Kind::kCompute, wide, {}, 2),
                                     .dk = r.out("dk", Kind::kCompute, narrow, {}, 1),
                                     .dv = r.out("dv", Kind::kCompute, narrow)});
  };
}

TEST_P(Vector, AttentionAtEveryBorder) {
  for (const Packed& p : kPacked) {
    SCOPED_TRACE(p.what);
    const int64_t wide = p.tokens() * p.heads * p.dim, narrow = p.tokens() * p.kv_heads * p.dim;
    const Values q = normal("q", wide, 2), k = normal("k", narrow), v = normal("v", narrow),
                 dout = normal("dout", wide);
    // Sums of f32 over a document; weights are rounded to bf16 in the products.
    const double roundings = type() == DType::kF32 ? 64 : 4;
    check(forward_of(p, q, k, v), roundings);
    Outputs saved = run_op(ref_backend(), DType::kF64, type(), 1, forward_of(p, q, k, v));
    check(backward_of(p, q, k, v, dout, saved["out"].values, saved["lse"].values), 2 * roundings);
  }
}

// A document's result is the same bits wherever it lies, and what is in other documents, even NaN, does not reach it.
TEST_P(Vector, DocumentsDoNotTouch) {
  const Packed alone{"", integers({0, 77}), 2, 1, 32}, packed{"", integers({0, 21, 98, 130}), 2, 1, 32};
  const auto pad = [&](const Values& inner, int64_t columns) {
    Values all(static_cast<size_t>(21 * columns), NAN);
    all.insert(all.end(), inner.begin(), inner.end());
    all.resize(static_cast<size_t>(130 * columns), NAN);
    return all;
  };
  const Values q = normal("q", 77 * 64), k = normal("k", 77 * 32), v = normal("v", 77 * 32),
               dout = normal("d", 77 * 64);
  Outputs one = run(forward_of(alone, q, k, v)), many = run(forward_of(packed, pad(q, 64), pad(k, 32), pad(v, 32)));
  const Values out = one["out"].values, lse = one["lse"].values;
  EXPECT_TRUE(same_bits(out, slice(many["out"].values, 21 * 64, 77 * 64)));
  EXPECT_TRUE(same_bits(lse, slice(many["lse"].values, 21 * 2, 77 * 2)));
  one = run(backward_of(alone, q, k, v, dout, out, lse));
  many = run(backward_of(packed, pad(q, 64), pad(k, 32), pad(v, 32), pad(dout, 64), pad(out, 64), pad(lse, 2)));
  for (const auto& [name, columns] : {std::pair{"dq", 64}, {"dk", 32}, {"dv", 32}})
    EXPECT_TRUE(same_bits(one[name].values, slice(many[name].values, 21 * columns, 77 * columns))) << name;
}

// Scores far apart: the running maximum grows late, or is set by the first key.
TEST_P(Vector, AttentionWithLargeScores) {
  const Packed p{"", integers({0, 200}), 1, 1, 16};
  Values q(200 * 16, 4.0), k(200 * 16);
  for (size_t i = 0; i < 200; ++i)
    for (size_t d = 0; d < 16; ++d)
      k[i * 16 + d] = (i == 0 ? 6.0 : -8.0) + 0.0625 * static_cast<double>(i % 128) * (i / 128);
  const Values v = normal("v", 200 * 16);
  check(forward_of(p, q, k, v), type() == DType::kF32 ? 64 : 4);
  for (double& x : k) x = -x;
  check(forward_of(p, q, k, v), type() == DType::kF32 ? 64 : 4);
}

TEST_P(Vector, CachedRowsMatchForward) {
  const int64_t tokens = 150, heads = 4, kv_heads = 2, dim = 24;
  const Packed p{"", integers({0, tokens}), heads, kv_heads, dim};
  const Values q = normal("q", tokens * heads * dim), k = normal("k", tokens * kv_heads * dim),
               v = normal("v", tokens * kv_heads * dim);
  Outputs whole = run(forward_of(p, q, k, v));
  const int64_t past = 129, rows = tokens - past;
  const Outputs cached = run([&](OpRun& r) {
    attention_cached(r.context(),
                     {.q = r.in(Kind::kCompute, {rows, heads * dim}, slice(q, past * heads * dim, rows * heads * dim)),
                      .k_cache = r.in(Kind::kCompute, {tokens, kv_heads * dim}, k, 1),
                      .v_cache = r.in(Kind::kCompute, {tokens, kv_heads * dim}, v),
                      .past = past,
                      .num_heads = heads,
                      .num_kv_heads = kv_heads,
                      .head_dim = dim,
                      .scale = 1 / std::sqrt(static_cast<double>(dim)),
                      .out = r.out("out", Kind::kCompute, {rows, heads * dim})});
  });
  const Values want = slice(whole["out"].values, past * heads * dim, rows * heads * dim);
  const double tolerance = (type() == DType::kF32 ? 64 : 8) * unit_roundoff(type()) * largest(want);
  for (size_t i = 0; i < want.size(); ++i) ASSERT_NEAR(cached.at("out").values[i], want[i], tolerance) << i;
}

// Sums over fixed blocks: enough rows and elements for several, the last one cut short.
TEST_P(Vector, LongSumsDoNotDependOnThreads) {
  const int64_t rows = 331, hidden = 70, n = 5 * 16384 + 123;
  const Values dy = normal("dy", rows * hidden), x = normal("x", rows * hidden), rstd(static_cast<size_t>(rows), 0.5);
  check(
      [&](OpRun& r) {
        rms_norm_backward_weight(r.context(), {.dy = r.in(Kind::kCompute, {rows, hidden}, dy, 5),
                                               .x = r.in(Kind::kCompute, {rows, hidden}, x),
                                               .rstd = r.in(Kind::kStat, {rows}, rstd),
                                               .dw = r.inout("dw", Kind::kStat, {hidden}, normal("dw", hidden))});
      },
      16);
  const Values w = normal("w", n), grad = normal("g", n, 0.1), v(static_cast<size_t>(n), 0.01);
  check(
      [&](OpRun& r) {
        sum_squares(r.context(), {.x = r.in(Kind::kStat, {n}, w), .out = r.inout("sum", Kind::kF64, {1}, {3.0})});
      },
      1e6);  // f64 output of f32 values: ref sums what was rounded too, only the order differs
  check(
      [&](OpRun& r) {
        lamb_step(r.context(), {.w = r.inout("w", Kind::kStat, {n}, w),
                                .m = r.inout("m", Kind::kStat, {n}, grad),
                                .v = r.inout("v", Kind::kStat, {n}, v),
                                .grad = r.in(Kind::kStat, {n}, grad),
                                .copy = r.out("copy", Kind::kCompute, {n}),
                                .lr = 0.01,
                                .weight_decay = 0.1,
                                .c1 = 0.1,
                                .c2 = 0.05,
                                .grad_scale = 0.5});
      },
      16);
}

// The copy that a step leaves is the cast of the weight it leaves: a resumed run makes it that way.
TEST_P(Vector, StepCopiesWhatCastMakes) {
  const int64_t n = 1000;
  Values w = normal("w", n);
  for (size_t i = 0; i < 40; ++i) w[i] = std::ldexp(w[i], -120 - static_cast<int>(i % 20));  // down to subnormals
  const Values zero(static_cast<size_t>(n), 0.0);
  Outputs step = run([&](OpRun& r) {
    adamw_step(r.context(), {.w = r.inout("w", Kind::kStat, {n}, w),
                             .m = r.inout("m", Kind::kStat, {n}, zero),
                             .v = r.inout("v", Kind::kStat, {n}, zero),
                             .grad = r.in(Kind::kStat, {n}, zero),
                             .copy = r.out("copy", Kind::kCompute, {n}),
                             .lr = 0.01,
                             .weight_decay = 0.1});
  });
  const Outputs cast_made = run([&](OpRun& r) {
    cast(r.context(), {.in = r.in(Kind::kStat, {n}, step["w"].values), .out = r.out("copy", Kind::kCompute, {n})});
  });
  EXPECT_TRUE(same_bits(step["copy"].values, cast_made.at("copy").values));
}

TEST_P(Vector, TopKTakesTiesInOrderAndSurvivesNan) {
  const auto pick = [&](std::vector<float> s, int64_t k) {
    std::vector<int32_t> ids(static_cast<size_t>(k), -1);
    table().softmax->top_k(s.data(), static_cast<int64_t>(s.size()), k, ids.data());
    return ids;
  };
  using Ids = std::vector<int32_t>;
  std::vector<float> s(37, 0.25f);
  EXPECT_EQ(pick(s, 4), (Ids{0, 1, 2, 3}));
  s[36] = 0.5f;
  s[20] = 0.5f;
  EXPECT_EQ(pick(s, 3), (Ids{20, 36, 0}));
  const float inf = std::numeric_limits<float>::infinity();
  EXPECT_EQ(pick({-inf, -inf, 1, -inf}, 3), (Ids{2, 0, 1}));
  EXPECT_EQ(pick({NAN, 2, NAN, 3}, 4), (Ids{3, 1, 0, 2}));
  EXPECT_EQ(pick({-5, -7, -6}, 3), (Ids{0, 2, 1}));
  for (int64_t n : {5, 16, 17, 40, 64, 65, 200}) {  // against a stable sort, with many ties
    std::vector<float> many(static_cast<size_t>(n));
    for (int64_t i = 0; i < n; ++i) many[static_cast<size_t>(i)] = static_cast<float>(i * 37 % 11) - 5;
    Ids sorted(static_cast<size_t>(n));
    std::iota(sorted.begin(), sorted.end(), 0);
    std::stable_sort(sorted.begin(), sorted.end(),
                     [&](int32_t a, int32_t b) { return many[static_cast<size_t>(a)] > many[static_cast<size_t>(b)]; });
    EXPECT_EQ(pick(many, n), sorted) << n;
  }
}

// Many tokens, so that counts and sums come from several blocks, and choices made by a bias of both signs.
TEST_P(Vector, RouterStatisticsOverBlocks) {
  const int64_t tokens = 700, experts = 21, top_k = 3;
  const Values logits = normal("logits", tokens * experts, 2), bias = normal("bias", experts, 0.2);
  Outputs got, want;
  for (bool is_ref : {false, true}) {
    const auto body = [&](OpRun& r) {
      router_select(r.context(), {.logits = r.in(Kind::kStat, {tokens, experts}, logits, 3),
                                  .bias = r.in(Kind::kStat, {experts}, bias),
                                  .probs = r.out("probs", Kind::kStat, {tokens, experts}),
                                  .expert_ids = r.out("ids", Kind::kI32, {tokens, top_k}),
                                  .weights = r.out("weights", Kind::kStat, {tokens, top_k}),
                                  .counts = r.out("counts", Kind::kI64, {experts}),
                                  .bare_counts = r.out("bare", Kind::kI64, {experts}),
                                  .prob_sums = r.out("sums", Kind::kF64, {experts})});
    };
    (is_ref ? want : got) = is_ref ? run_op(ref_backend(), DType::kF32, type(), 1, body) : run(body, 3);
    if (!is_ref) {
      Outputs one = run(body, 1);
      for (const auto& [name, output] : got) EXPECT_TRUE(same_bits(output.values, one[name].values)) << name;
    }
  }
  for (const char* name : {"ids", "counts", "bare"})
    EXPECT_TRUE(same_bits(got[name].values, want[name].values)) << name;
  for (size_t e = 0; e < static_cast<size_t>(experts); ++e)
    EXPECT_NEAR(got["sums"].values[e], want["sums"].values[e], 1e-6 * static_cast<double>(tokens));
}

// One expert takes all, one takes none; several blocks of tokens.
TEST_P(Vector, PlanIsStableOverBlocks) {
  const int64_t tokens = 2500, top_k = 2, experts = 5;
  Values ids;
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t j = 0; j < top_k; ++j) ids.push_back(static_cast<double>(t < 900 ? j : (t * 7 + j * 2) % 4));
  const auto body = [&](OpRun& r) {
    make_dispatch_plan(r.context(), {.expert_ids = r.in(Kind::kI32, {tokens, top_k}, ids),
                                     .offsets = r.out("offsets", Kind::kI32, {experts + 1}),
                                     .row_token = r.out("row_token", Kind::kI32, {tokens * top_k}),
                                     .row_of = r.out("row_of", Kind::kI32, {tokens, top_k})});
  };
  check(body, 0);
}

}  // namespace
}  // namespace concerto::test

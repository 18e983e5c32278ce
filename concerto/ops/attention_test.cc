#include "concerto/ops/attention.h"

#include <cmath>

#include "concerto/ops/op_test.h"

namespace concerto::test {
namespace {

struct Shapes {
  const char* what;
  Values docs;  // offsets
  int64_t heads, kv_heads, dim;
  int64_t tokens() const { return static_cast<int64_t>(docs.back()); }
  int64_t q_cols() const { return heads * dim; }
  int64_t kv_cols() const { return kv_heads * dim; }
  int64_t cols() const { return q_cols() + 2 * kv_cols(); }
  double scale() const { return 1 / std::sqrt(static_cast<double>(dim)); }
};
const Shapes kShapes[] = {
    {"one token", integers({0, 1}), 2, 1, 16},
    {"one document", integers({0, 37}), 4, 2, 16},
    {"documents, some empty", integers({0, 0, 1, 20, 20, 21, 90}), 4, 2, 32},
    {"odd sizes", integers({0, 13, 29}), 3, 3, 10},
    {"long", integers({0, 131, 200}), 2, 1, 64},
    {"no tokens", integers({0, 0}), 2, 2, 8},
};

// One buffer of rows q | k | v, as a fused projection leaves them.
struct Parts {
  View q, k, v;
};
Parts split(const Shapes& s, View qkv) {
  return {qkv.cols_range(0, s.q_cols()), qkv.cols_range(s.q_cols(), s.kv_cols()),
          qkv.cols_range(s.q_cols() + s.kv_cols(), s.kv_cols())};
}

Body forward_body(const Shapes& s, const Values& qkv, bool compare = true) {
  return [=](OpRun& r) {
    const int64_t tokens = s.tokens(), docs = static_cast<int64_t>(s.docs.size());
    const auto [q, k, v] = split(s, r.in(Kind::kCompute, {tokens, s.cols()}, qkv));
    const double high = largest(qkv) + 1e-30, range = high * high * std::sqrt(static_cast<double>(s.dim));
    attention_forward(
        r.context(),
        {.q = q,
         .k = k,
         .v = v,
         .doc_offsets = r.in(Kind::kI32, {docs}, s.docs),
         .num_heads = s.heads,
         .num_kv_heads = s.kv_heads,
         .head_dim = s.dim,
         .scale = s.scale(),
         .out = r.out("out", Kind::kCompute, {tokens, s.q_cols()},
                      {.length = tokens, .norm = high * (1 + range), .rounds_inside = true, .compared = compare}, 3),
         .lse =
             r.out("lse", Kind::kStat, {tokens, s.heads}, {.length = s.dim, .norm = 1 + range, .compared = compare})});
  };
}

Body backward_body(const Shapes& s, const Values& qkv, const Values& dout, const Values& out, const Values& lse) {
  return [=](OpRun& r) {
    const int64_t tokens = s.tokens(), docs = static_cast<int64_t>(s.docs.size());
    const auto [q, k, v] = split(s, r.in(Kind::kCompute, {tokens, s.cols()}, qkv));
    const double high = largest_row_norm(qkv, s.cols()) + 1e-30, d = largest_row_norm(dout, s.q_cols());
    const Bound bound{.length = tokens * s.heads, .norm = 2 * high * high * d, .rounds_inside = true};
    const auto [dq, dk, dv] = split(s, r.out("dqkv", Kind::kCompute, {tokens, s.cols()}, bound, 5));
    attention_backward(r.context(), {.dout = r.in(Kind::kCompute, {tokens, s.q_cols()}, dout, 1),
                                     .q = q,
                                     .k = k,
                                     .v = v,
                                     .out = r.in(Kind::kCompute, {tokens, s.q_cols()}, out),
                                     .lse = r.in(Kind::kStat, {tokens, s.heads}, lse),
                                     .doc_offsets = r.in(Kind::kI32, {docs}, s.docs),
                                     .num_heads = s.heads,
                                     .num_kv_heads = s.kv_heads,
                                     .head_dim = s.dim,
                                     .scale = s.scale(),
                                     .dq = dq,
                                     .dk = dk,
                                     .dv = dv});
  };
}

class Attention : public OpTest {};

TEST_P(Attention, Forward) {
  for (const Shapes& s : kShapes) {
    SCOPED_TRACE(s.what);
    check_op(GetParam(), forward_body(s, normal("qkv", s.tokens() * s.cols())));
  }
}

TEST_P(Attention, Backward) {
  for (const Shapes& s : kShapes) {
    SCOPED_TRACE(s.what);
    const Values qkv = rounded(normal("qkv", s.tokens() * s.cols()), type());
    const Values dout = normal("dout", s.tokens() * s.q_cols());
    const Outputs saved = run_f64(forward_body(s, qkv));
    check_op(GetParam(), backward_body(s, qkv, dout, saved.at("out").values, saved.at("lse").values));
  }
}

// Scores far apart: the online softmax must carry its maximum.
TEST_P(Attention, LargeScores) {
  const Shapes s{"", integers({0, 80}), 2, 1, 16};
  const Outputs got = run_op(backend(), type(), type(), 2, forward_body(s, normal("qkv", 80 * s.cols(), 30)));
  for (const auto& [name, output] : got)
    for (double v : output.values) ASSERT_TRUE(std::isfinite(v)) << name;
}

// A document's rows have the same bits whatever follows it in the batch: padding is one more document.
TEST_P(Attention, DocumentsDoNotSeeEachOther) {
  const Shapes alone{"", integers({0, 20}), 4, 2, 16}, padded{"", integers({0, 20, 50}), 4, 2, 16};
  const Values qkv = normal("qkv", 50 * alone.cols());
  const Values a =
      run_op(backend(), type(), type(), 2, forward_body(alone, slice(qkv, 0, 20 * alone.cols()))).at("out").values;
  const Values b = run_op(backend(), type(), type(), 2, forward_body(padded, qkv)).at("out").values;
  EXPECT_TRUE(same_bits(a, slice(b, 0, 20 * alone.q_cols())));
}

// New tokens against a cache are the last rows of the whole document.
TEST_P(Attention, CachedIsTheTailOfFull) {
  const Shapes s{"", integers({0, 70}), 4, 2, 16};
  const int64_t tokens = s.tokens(), spare = 6;
  const Values qkv = rounded(normal("qkv", tokens * s.cols()), type());
  const Values full = output_f64(forward_body(s, qkv), "out");
  Values k(static_cast<size_t>((tokens + spare) * s.kv_cols()), 1e9), v = k;  // rows beyond must not be read
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t c = 0; c < s.kv_cols(); ++c) {
      k[t * s.kv_cols() + c] = qkv[t * s.cols() + s.q_cols() + c];
      v[t * s.kv_cols() + c] = qkv[t * s.cols() + s.q_cols() + s.kv_cols() + c];
    }
  for (const int64_t count : {1, 3, 70}) {
    SCOPED_TRACE(count);
    const int64_t past = tokens - count;
    Values q;
    for (int64_t t = past; t < tokens; ++t)
      q.insert(q.end(), qkv.begin() + t * s.cols(), qkv.begin() + t * s.cols() + s.q_cols());
    const Body body = [&](OpRun& r) {
      const double high = largest(qkv), range = high * high * std::sqrt(static_cast<double>(s.dim));
      attention_cached(r.context(),
                       {.q = r.in(Kind::kCompute, {count, s.q_cols()}, q, 2),
                        .k_cache = r.in(Kind::kCompute, {tokens + spare, s.kv_cols()}, k),
                        .v_cache = r.in(Kind::kCompute, {tokens + spare, s.kv_cols()}, v),
                        .past = past,
                        .num_heads = s.heads,
                        .num_kv_heads = s.kv_heads,
                        .head_dim = s.dim,
                        .scale = s.scale(),
                        .out = r.out("out", Kind::kCompute, {count, s.q_cols()},
                                     {.length = tokens, .norm = high * (1 + range), .rounds_inside = true})});
    };
    check_op(GetParam(), body);
    const Values tail = output_f64(body, "out");
    for (size_t i = 0; i < tail.size(); ++i)
      ASSERT_NEAR(tail[i], full[past * s.q_cols() + i], 64 * unit_roundoff(DType::kF64) * largest(full));
  }
}
CONCERTO_ON_EVERY_BACKEND(Attention);

TEST(AttentionGradient, FiniteDifferences) {
  const Shapes s{"", integers({0, 4, 4, 7}), 4, 2, 4};
  const Values qkv = normal("qkv", s.tokens() * s.cols()), dout = normal("dout", s.tokens() * s.q_cols());
  const Outputs saved = run_f64(forward_body(s, qkv));
  const Values gradient =
      output_f64(backward_body(s, qkv, dout, saved.at("out").values, saved.at("lse").values), "dqkv");
  check_gradient("dqkv", qkv, gradient,
                 [&](const Values& v) { return dot(dout, output_f64(forward_body(s, v), "out")); });
}

// Two tokens, one head of width 2, by hand.
TEST(AttentionValue, ByHand) {
  const Shapes s{"", integers({0, 2}), 1, 1, 2};
  const Values qkv = {1, 0, 1, 0, 3, 4, 0, 2, 1, 1, 5, 8};
  const Outputs got = run_f64(forward_body(s, qkv));
  const double p = 1 / (1 + std::exp(2 / std::sqrt(2.0)));  // scores of token 1: 0 and 2
  const Values want = {3, 4, 3 * p + 5 * (1 - p), 4 * p + 8 * (1 - p)};
  for (size_t i = 0; i < want.size(); ++i) EXPECT_NEAR(got.at("out").values[i], want[i], 1e-14);
  EXPECT_NEAR(got.at("lse").values[0], 1 / std::sqrt(2.0), 1e-14);
}

}  // namespace
}  // namespace concerto::test

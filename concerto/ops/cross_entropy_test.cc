#include "concerto/ops/cross_entropy.h"

#include <cmath>
#include <limits>

#include "concerto/ops/op_test.h"

namespace concerto::test {
namespace {

struct Loss {
  int64_t tokens, vocab;
  Values logits, targets;
  double scale = 0.25;
};

Body loss_body(const Loss& s, bool gradient) {
  return [=](OpRun& r) {
    const double token = 1 + 2 * largest(s.logits) + std::log(static_cast<double>(s.vocab));
    const Bound sum{.length = s.vocab, .norm = token * static_cast<double>(s.tokens + 1)};
    cross_entropy(r.context(), {.logits = r.in(Kind::kStat, {s.tokens, s.vocab}, s.logits),
                                .targets = r.in(Kind::kI32, {s.tokens}, s.targets),
                                .scale = s.scale,
                                .loss_sum = r.inout("loss_sum", Kind::kF64, {1}, {3.5}, sum),
                                .dlogits = gradient ? r.out("dlogits", Kind::kCompute, {s.tokens, s.vocab},
                                                            {.length = s.vocab, .norm = s.scale * token})
                                                    : View{},
                                .token_loss = gradient ? r.out("token_loss", Kind::kStat, {s.tokens},
                                                               {.length = s.vocab, .norm = token})
                                                       : View{}});
  };
}

std::vector<Loss> cases() {
  std::vector<Loss> all;
  for (const auto& [tokens, vocab] : {std::pair<int64_t, int64_t>{1, 1}, {5, 33}, {0, 8}, {20, 64}, {3, 1000}}) {
    Loss s{tokens, vocab, normal("logits", tokens * vocab, 3), {}};
    for (int64_t t = 0; t < tokens; ++t)
      s.targets.push_back(t % 4 == 1 ? -100.0 : static_cast<double>((t * 7 + 3) % vocab));
    all.push_back(s);
  }
  all.push_back({4, 9, normal("logits", 36), Values(4, -100.0)});
  all.push_back({4, 9, normal("logits", 36, 300), integers({0, 8, 3, -1})});  // exp would overflow
  return all;
}

class CrossEntropyOp : public OpTest {};

TEST_P(CrossEntropyOp, LossAndGradient) {
  for (const Loss& s : cases())
    for (const bool gradient : {false, true}) {
      SCOPED_TRACE(fmt::format("{} x {}, gradient {}", s.tokens, s.vocab, gradient));
      check_op(GetParam(), loss_body(s, gradient), true);
    }
}

TEST_P(CrossEntropyOp, IgnoredTokensAreExactlyZero) {
  const Loss s{3, 5, normal("logits", 15), integers({-100, -1, 2})};
  const Outputs got = run_op(backend(), type(), type(), 2, loss_body(s, true));
  EXPECT_EQ(slice(got.at("token_loss").values, 0, 2), Values(2));
  EXPECT_EQ(slice(got.at("dlogits").values, 0, 10), Values(10));
  EXPECT_GT(got.at("token_loss").values[2], 0);
}

// Where the types agree the gradient may overwrite the logits.
TEST_P(CrossEntropyOp, InPlace) {
  if (type() != stat()) return;
  for (const Loss& s : cases()) {
    const Values apart = run_op(backend(), type(), type(), 2, loss_body(s, true)).at("dlogits").values;
    const Values same = run_op(backend(), type(), type(), 2,
                               [&](OpRun& r) {
                                 const View z = r.inout("z", Kind::kStat, {s.tokens, s.vocab}, s.logits);
                                 cross_entropy(r.context(), {.logits = z,
                                                             .targets = r.in(Kind::kI32, {s.tokens}, s.targets),
                                                             .scale = s.scale,
                                                             .loss_sum = r.inout("loss_sum", Kind::kF64, {1}, {0}),
                                                             .dlogits = z,
                                                             .token_loss = {}});
                               })
                            .at("z")
                            .values;
    EXPECT_TRUE(same_bits(apart, same));
  }
}
CONCERTO_ON_EVERY_BACKEND(CrossEntropyOp);

// The vocabulary cut before each of `borders`; a body for every slice's share, then one for its loss and gradient.
struct CutLoss {
  Loss whole;
  std::vector<int64_t> borders;  // first 0, last the vocabulary
  int64_t slices() const { return static_cast<int64_t>(borders.size()) - 1; }
  int64_t begin(int64_t i) const { return borders[static_cast<size_t>(i)]; }
  int64_t width(int64_t i) const { return begin(i + 1) - begin(i); }
  Values logits(int64_t i) const {
    Values part;
    for (int64_t t = 0; t < whole.tokens; ++t) {
      const Values row = slice(whole.logits, t * whole.vocab + begin(i), width(i));
      part.insert(part.end(), row.begin(), row.end());
    }
    return part;
  }
};

Body share_body(const CutLoss& c, int64_t i) {
  return [=](OpRun& r) {
    const double size = 1 + largest(c.whole.logits) + std::log(static_cast<double>(c.whole.vocab));
    cross_entropy_share(
        r.context(), {.logits = r.in(Kind::kStat, {c.whole.tokens, c.width(i)}, c.logits(i), 2),
                      .targets = r.in(Kind::kI32, {c.whole.tokens}, c.whole.targets),
                      .begin = c.begin(i),
                      .share = r.out("share", Kind::kF64, {c.whole.tokens, 2}, {.length = c.width(i), .norm = size})});
  };
}

Body of_shares_body(const CutLoss& c, int64_t i, const Values& shares, bool gradient) {
  return [=](OpRun& r) {
    const double token = 1 + 2 * largest(c.whole.logits) + std::log(static_cast<double>(c.whole.vocab));
    const Bound one{.length = c.whole.vocab, .norm = token};
    const int64_t tokens = c.whole.tokens;
    cross_entropy_of_shares(
        r.context(), {.logits = r.in(Kind::kStat, {tokens, c.width(i)}, c.logits(i)),
                      .targets = r.in(Kind::kI32, {tokens}, c.whole.targets),
                      .begin = c.begin(i),
                      .shares = r.in(Kind::kF64, {c.slices(), tokens, 2}, shares),
                      .scale = c.whole.scale,
                      .loss_sum = r.inout("loss_sum", Kind::kF64, {1}, {3.5},
                                          {.length = c.whole.vocab, .norm = token * static_cast<double>(tokens + 1)}),
                      .dlogits = gradient ? r.out("dlogits", Kind::kCompute, {tokens, c.width(i)},
                                                  {.length = c.whole.vocab, .norm = c.whole.scale * token}, 3)
                                          : View{},
                      .token_loss = gradient ? r.out("token_loss", Kind::kStat, {tokens}, one) : View{}});
  };
}

std::vector<CutLoss> cut_cases() {
  std::vector<CutLoss> all;
  for (const Loss& s : cases()) {
    if (s.vocab >= 3) all.push_back({s, {0, s.vocab / 3, s.vocab - 1, s.vocab}});
    all.push_back({s, {0, s.vocab}});
  }
  return all;
}

class CrossEntropyCut : public OpTest {
 protected:
  Values shares(const CutLoss& c) const {
    Values all;
    for (int64_t i = 0; i < c.slices(); ++i) {
      const Values one = run_op(backend(), type(), type(), 2, share_body(c, i)).at("share").values;
      all.insert(all.end(), one.begin(), one.end());
    }
    return all;
  }
};

// Against ref in f64 each, then all slices together against the whole vocabulary in f64.
TEST_P(CrossEntropyCut, SlicesGiveTheWhole) {
  for (const CutLoss& c : cut_cases()) {
    SCOPED_TRACE(fmt::format("{} x {} in {}", c.whole.tokens, c.whole.vocab, c.slices()));
    Loss exact = c.whole;
    exact.logits = rounded(exact.logits, stat());
    const Outputs want = run_f64(loss_body(exact, true));
    const Values told = shares(c);
    const double u = unit_roundoff(stat()), out = unit_roundoff(type());
    const double token = 1 + 2 * largest(c.whole.logits) + std::log(static_cast<double>(c.whole.vocab));
    const double slack = (4 + std::sqrt(static_cast<double>(c.whole.vocab))) * u * token;
    for (int64_t i = 0; i < c.slices(); ++i) {
      check_op(GetParam(), share_body(c, i), true);
      for (const bool gradient : {false, true}) check_op(GetParam(), of_shares_body(c, i, told, gradient), true);
      const Outputs got = run_op(backend(), type(), type(), 2, of_shares_body(c, i, told, true));
      EXPECT_NEAR(got.at("loss_sum").values[0], want.at("loss_sum").values[0],
                  slack * static_cast<double>(c.whole.tokens + 1));
      for (int64_t t = 0; t < c.whole.tokens; ++t)
        for (int64_t v = 0; v < c.width(i); ++v) {
          const double truth = want.at("dlogits").values[static_cast<size_t>(t * c.whole.vocab + c.begin(i) + v)];
          EXPECT_NEAR(got.at("dlogits").values[static_cast<size_t>(t * c.width(i) + v)], truth,
                      c.whole.scale * slack + out * std::abs(truth));
        }
    }
  }
}

// What the ranks count once is the same on each of them.
TEST_P(CrossEntropyCut, EverySliceHasTheSameLoss) {
  for (const CutLoss& c : cut_cases()) {
    const Values told = shares(c);
    const Outputs first = run_op(backend(), type(), type(), 2, of_shares_body(c, 0, told, true));
    for (int64_t i = 1; i < c.slices(); ++i) {
      const Outputs other = run_op(backend(), type(), type(), 3, of_shares_body(c, i, told, true));
      EXPECT_TRUE(same_bits(first.at("loss_sum").values, other.at("loss_sum").values));
      EXPECT_TRUE(same_bits(first.at("token_loss").values, other.at("token_loss").values));
    }
  }
}

TEST_P(CrossEntropyCut, InPlace) {
  if (type() != stat()) return;
  const CutLoss c = cut_cases()[4];
  const Values told = shares(c);
  for (int64_t i = 0; i < c.slices(); ++i) {
    const Values apart = run_op(backend(), type(), type(), 2, of_shares_body(c, i, told, true)).at("dlogits").values;
    const auto in_place = [&](OpRun& r) {
      const View z = r.inout("z", Kind::kStat, {c.whole.tokens, c.width(i)}, c.logits(i));
      cross_entropy_of_shares(r.context(), {.logits = z,
                                            .targets = r.in(Kind::kI32, {c.whole.tokens}, c.whole.targets),
                                            .begin = c.begin(i),
                                            .shares = r.in(Kind::kF64, {c.slices(), c.whole.tokens, 2}, told),
                                            .scale = c.whole.scale,
                                            .loss_sum = r.inout("loss_sum", Kind::kF64, {1}, {0}),
                                            .dlogits = z,
                                            .token_loss = {}});
    };
    EXPECT_TRUE(same_bits(apart, run_op(backend(), type(), type(), 2, in_place).at("z").values));
  }
}
CONCERTO_ON_EVERY_BACKEND(CrossEntropyCut);

struct Head {
  int64_t tokens, hidden, vocab;
  Values x, w, bias, targets;
  double scale = 0.125;
  Values dw = {}, db = {};  // what the gradients are added to; empty: `start` everywhere
  double loss_sum = 0;
  bool accumulate = true;
};

Head make_head(int64_t tokens, int64_t hidden, int64_t vocab) {
  Head s{tokens, hidden, vocab, normal("x", tokens * hidden), normal("w", vocab * hidden), normal("bias", vocab), {}};
  for (int64_t t = 0; t < tokens; ++t)
    s.targets.push_back(t % 5 == 2 ? -100.0 : static_cast<double>((t * 11 + 1) % vocab));
  return s;
}

Body head_body(const Head& s, bool bias, bool gradient, double start = 0, Kind dx_kind = Kind::kCompute) {
  return [=](OpRun& r) {
    const int64_t T = s.tokens, H = s.hidden, V = s.vocab;
    const double logit = largest_row_norm(s.x, H) * largest_row_norm(s.w, H) + largest(s.bias),
                 token = 1 + 2 * logit + std::log(static_cast<double>(V));
    const double slip = s.scale * (logit + token);  // of a dlogit, in roundings
    // dlogits are rounded to the compute type; their norm over a row is below 2 * scale.
    const Bound dx{.length = V, .norm = slip * largest_row_norm(s.w, H), .rounds_inside = true};
    const Bound dw{.length = V, .norm = slip * largest(s.x) * static_cast<double>(T) + start, .rounds_inside = true};
    const auto from = [&](const Values& given, int64_t n) {
      return given.empty() ? Values(static_cast<size_t>(n), start) : given;
    };
    head_loss(r.context(), {.x = r.in(Kind::kCompute, {T, H}, s.x, 3),
                            .w = r.in(Kind::kCompute, {V, H}, s.w),
                            .bias = bias ? r.in(Kind::kStat, {V}, s.bias) : View{},
                            .targets = r.in(Kind::kI32, {T}, s.targets),
                            .scale = s.scale,
                            .loss_sum = r.inout("loss_sum", Kind::kF64, {1}, {s.loss_sum},
                                                {.length = V, .norm = token * static_cast<double>(T + 1)}),
                            .dx = gradient ? r.out("dx", dx_kind, {T, H}, dx, 2) : View{},
                            .dw = gradient ? r.inout("dw", Kind::kStat, {V, H}, from(s.dw, V * H), dw) : View{},
                            .db = gradient && bias ? r.inout("db", Kind::kStat, {V}, from(s.db, V), dw) : View{},
                            .token_loss = r.out("token_loss", Kind::kStat, {T}, {.length = V, .norm = token}),
                            .accumulate = s.accumulate});
  };
}

class HeadLossOp : public OpTest {};

TEST_P(HeadLossOp, LossAndGradient) {
  for (const auto& [tokens, hidden, vocab] : {std::array<int64_t, 3>{1, 1, 1}, {5, 33, 17}, {0, 8, 8}, {40, 16, 64}})
    for (const bool bias : {false, true})
      for (const bool gradient : {false, true}) {
        SCOPED_TRACE(fmt::format("{} x {} x {}, bias {}, gradient {}", tokens, hidden, vocab, bias, gradient));
        check_op(GetParam(), head_body(make_head(tokens, hidden, vocab), bias, gradient, 0.5));
      }
}

// A share of a sum over ranks stays in the stat type: rounded, it is what the compute type gets.
TEST_P(HeadLossOp, GradientInTheStatType) {
  const Head s = make_head(11, 33, 17);
  check_op(GetParam(), head_body(s, true, true, 0.5, Kind::kStat));
  const auto dx = [&](Kind kind) {
    return run_op(backend(), type(), type(), 2, head_body(s, true, true, 0.5, kind)).at("dx").values;
  };
  EXPECT_TRUE(same_bits(rounded(dx(Kind::kStat), type()), dx(Kind::kCompute)));
}

// A vocabulary that gives chunks of 64 tokens: both chunks at once give what one after the other gives, bit for bit.
TEST_P(HeadLossOp, Chunks) {
  const int64_t hidden = 3, vocab = 16500;
  const Head all = make_head(70, hidden, vocab);
  const auto part = [&](int64_t begin, int64_t count, const Outputs& before) {
    Head s = all;
    if (!before.empty())
      s.dw = before.at("dw").values, s.db = before.at("db").values, s.loss_sum = before.at("loss_sum").values[0];
    s.tokens = count;
    s.x = slice(all.x, begin * hidden, count * hidden);
    s.targets = slice(all.targets, begin, count);
    return run_op(backend(), type(), type(), 2, head_body(s, true, true));
  };
  const Outputs whole = part(0, 70, {}), first = part(0, 64, {}), second = part(64, 6, first);
  Values dx = first.at("dx").values;
  dx.insert(dx.end(), second.at("dx").values.begin(), second.at("dx").values.end());
  EXPECT_TRUE(same_bits(whole.at("dx").values, dx));
  EXPECT_TRUE(same_bits(slice(whole.at("token_loss").values, 64, 6), second.at("token_loss").values));
  for (const char* sum : {"dw", "db", "loss_sum"}) {
    EXPECT_TRUE(same_bits(whole.at(sum).values, second.at(sum).values)) << sum;
    EXPECT_FALSE(same_bits(first.at(sum).values, second.at(sum).values)) << sum;
  }
}

// Written and not added to, also over several chunks and over none: what was there is gone.
TEST_P(HeadLossOp, WritesItsGradient) {
  for (const int64_t tokens : {0, 5, 70}) {
    Head s = make_head(tokens, 3, 16500);
    const auto added = run_op(backend(), type(), type(), 2, head_body(s, false, true)).at("dw").values;
    s.dw = Values(static_cast<size_t>(16500 * 3), std::numeric_limits<double>::quiet_NaN());
    s.accumulate = false;
    EXPECT_EQ(run_op(backend(), type(), type(), 2, head_body(s, false, true)).at("dw").values, added) << tokens;
  }
}
CONCERTO_ON_EVERY_BACKEND(HeadLossOp);

TEST(HeadLossMemory, NeverAllLogits) {
  for (const int64_t vocab : {512, 32000, 103424}) {
    OpRun small(find_backend("ref"), DType::kF32, DType::kF32, 1, -1),
        large(find_backend("ref"), DType::kF32, DType::kF32, 1, -1);
    head_body({8192, 4, vocab, {}, {}, {}, {}}, false, true)(small);
    head_body({int64_t{1} << 20, 4, vocab, {}, {}, {}, {}}, false, true)(large);
    EXPECT_EQ(small.scratch_used(), large.scratch_used());
    EXPECT_LE(large.scratch_used(), std::max(int64_t{8} << 20, 64 * vocab * 4));
  }
}

TEST(HeadLossGradient, FiniteDifferences) {
  Head s = make_head(4, 3, 5);
  const auto loss = [&](const Values& x, const Values& w, const Values& bias) {
    Head h = s;
    h.x = x, h.w = w, h.bias = bias;
    return s.scale * output_f64(head_body(h, true, false), "loss_sum")[0];
  };
  const Outputs back = run_f64(head_body(s, true, true, 0.5));
  check_gradient("dx", s.x, back.at("dx").values, [&](const Values& v) { return loss(v, s.w, s.bias); });
  check_gradient("dw", s.w, minus(back.at("dw").values, Values(s.w.size(), 0.5)),
                 [&](const Values& v) { return loss(s.x, v, s.bias); });
  check_gradient("db", s.bias, minus(back.at("db").values, Values(s.bias.size(), 0.5)),
                 [&](const Values& v) { return loss(s.x, s.w, v); });
}

TEST(CrossEntropyValue, UniformIsLogOfTheVocabulary) {
  const Outputs got = run_f64(loss_body({1, 8, Values(8, 2.0), {3}}, true));
  EXPECT_NEAR(got.at("loss_sum").values[0], 3.5 + std::log(8.0), 1e-14);
  EXPECT_DOUBLE_EQ(got.at("dlogits").values[3], 0.25 * (1.0 / 8 - 1));
}

TEST(CrossEntropyChecks, RefRefusesATargetOverTheVocabulary) {
  EXPECT_THROW(run_f64(loss_body({1, 8, Values(8), {8}}, true)), Bug);
}

}  // namespace
}  // namespace concerto::test

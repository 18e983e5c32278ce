#include "concerto/ops/router.h"

#include <algorithm>
#include <cmath>

#include "concerto/ops/op_test.h"

namespace concerto::test {
namespace {

struct Select {
  int64_t tokens, experts, top_k;
  Values logits, bias;  // bias empty: null
  double norm_min = 1e-12;
  bool compare_choice = true;  // false: margins may be below rounding, so that another backend may choose otherwise
  Values replay_ids = {};
};

Body select_body(const Select& s) {
  return [=](OpRun& r) {
    const int64_t T = s.tokens, E = s.experts, K = s.top_k;
    const double range = 1 + 2 * largest(s.logits);
    const bool replay = !s.replay_ids.empty();
    const Bound choice{.compared = s.compare_choice};
    const Values given(static_cast<size_t>(E), 77.0);
    router_select(
        r.context(),
        {.logits = r.in(Kind::kStat, {T, E}, s.logits),
         .bias = s.bias.empty() ? View{} : r.in(Kind::kStat, {E}, s.bias),
         .norm_min = s.norm_min,
         .probs = r.out("probs", Kind::kStat, {T, E}, {.length = E, .norm = range}),
         .expert_ids =
             replay ? r.inout("ids", Kind::kI32, {T, K}, s.replay_ids) : r.out("ids", Kind::kI32, {T, K}, choice),
         .weights = r.out("weights", Kind::kStat, {T, K},
                          {.length = E, .norm = range * static_cast<double>(E), .compared = s.compare_choice}),
         .counts = replay ? r.inout("counts", Kind::kI64, {E}, given) : r.out("counts", Kind::kI64, {E}, choice),
         .bare_counts =
             replay ? r.inout("bare_counts", Kind::kI64, {E}, given) : r.out("bare_counts", Kind::kI64, {E}, choice),
         .prob_sums = r.out("prob_sums", Kind::kF64, {E}, {.length = T, .norm = range * static_cast<double>(T + 1)}),
         .replay = replay});
  };
}

// The choice that the probabilities themselves demand: p + b in the stat type, ties to the lower id.
Values choice_of(const Values& probs, const Values& bias, int64_t experts, int64_t top_k, DType stat) {
  Values ids;
  for (size_t row = 0; row < probs.size(); row += static_cast<size_t>(experts)) {
    std::vector<std::pair<double, int64_t>> order;
    for (int64_t e = 0; e < experts; ++e)
      order.push_back(
          {-round_to(stat, probs[row + static_cast<size_t>(e)] + (bias.empty() ? 0.0 : round_to(stat, bias[e]))), e});
    std::sort(order.begin(), order.end());
    for (int64_t j = 0; j < top_k; ++j) ids.push_back(static_cast<double>(order[j].second));
  }
  return ids;
}

Values counts_of(const Values& ids, int64_t experts) {
  Values counts(static_cast<size_t>(experts));
  for (double id : ids) ++counts[static_cast<size_t>(id)];
  return counts;
}

class Router : public OpTest {
 protected:
  // Everything that must hold exactly, given the backend's own probabilities.
  void check_exact(const Select& s, int threads) {
    const Outputs got = run_op(backend(), type(), type(), threads, select_body(s));
    const Values &probs = got.at("probs").values, &ids = got.at("ids").values;
    EXPECT_EQ(ids, choice_of(probs, s.bias, s.experts, s.top_k, stat()));
    EXPECT_EQ(got.at("counts").values, counts_of(ids, s.experts));
    EXPECT_EQ(got.at("bare_counts").values, counts_of(choice_of(probs, {}, s.experts, s.top_k, stat()), s.experts));
    Values sums(static_cast<size_t>(s.experts));
    for (size_t i = 0; i < probs.size(); ++i) sums[i % static_cast<size_t>(s.experts)] += probs[i];
    EXPECT_EQ(got.at("prob_sums").values, sums) << "not in token order";
    for (int64_t t = 0; t < s.tokens; ++t) {
      double sum = 0;
      for (int64_t j = 0; j < s.top_k; ++j) sum += probs[t * s.experts + static_cast<int64_t>(ids[t * s.top_k + j])];
      for (int64_t j = 0; j < s.top_k; ++j) {
        const double want =
            probs[t * s.experts + static_cast<int64_t>(ids[t * s.top_k + j])] / std::max(sum, s.norm_min);
        ASSERT_NEAR(got.at("weights").values[t * s.top_k + j], want,
                    (4 + static_cast<double>(s.top_k)) * unit_roundoff(stat()) * want);
      }
    }
  }
};

TEST_P(Router, Logits) {
  for (const auto& [tokens, hidden, experts] : {std::array<int64_t, 3>{1, 1, 1}, {7, 33, 5}, {0, 8, 4}, {40, 64, 64}}) {
    SCOPED_TRACE(fmt::format("{} x {} x {}", tokens, hidden, experts));
    const Values x = normal("x", tokens * hidden), w = normal("w", experts * hidden),
                 dz = normal("dz", tokens * experts);
    const Values dx = normal("dx", tokens * hidden), dw = normal("dw", experts * hidden);
    check_op(GetParam(), [&](OpRun& r) {
      const Bound bound{.length = hidden, .norm = largest_row_norm(x, hidden) * largest_row_norm(w, hidden)};
      router_logits(r.context(), {.x = r.in(Kind::kCompute, {tokens, hidden}, x, 3),
                                  .w = r.in(Kind::kStat, {experts, hidden}, w),
                                  .logits = r.out("logits", Kind::kStat, {tokens, experts}, bound)});
    });
    check_op(GetParam(), [&](OpRun& r) {
      const Bound bound{
          .length = experts,
          .norm = largest_row_norm(dz, experts) * largest(w) * std::sqrt(static_cast<double>(experts)) + largest(dx)};
      router_logits_backward_input(r.context(), {.dlogits = r.in(Kind::kStat, {tokens, experts}, dz),
                                                 .w = r.in(Kind::kStat, {experts, hidden}, w),
                                                 .dx = r.inout("dx", Kind::kCompute, {tokens, hidden}, dx, bound, 2)});
    });
    check_op(GetParam(), [&](OpRun& r) {
      const Bound bound{.length = tokens,
                        .norm = largest(dz) * largest(x) * std::sqrt(static_cast<double>(tokens)) + largest(dw)};
      router_logits_backward_weight(r.context(), {.dlogits = r.in(Kind::kStat, {tokens, experts}, dz),
                                                  .x = r.in(Kind::kCompute, {tokens, hidden}, x, 3),
                                                  .dw = r.inout("dw", Kind::kStat, {experts, hidden}, dw, bound)});
    });
  }
}

TEST_P(Router, Select) {
  for (const auto& [tokens, experts, top_k] :
       {std::array<int64_t, 3>{1, 1, 1}, {9, 5, 2}, {33, 64, 6}, {20, 17, 17}, {130, 16, 4}, {0, 8, 2}})
    for (const double bias_scale : {0.0, 0.3}) {
      SCOPED_TRACE(fmt::format("{} tokens, top {} of {}, bias {}", tokens, top_k, experts, bias_scale));
      const Select s{tokens, experts, top_k, normal("logits", tokens * experts),
                     bias_scale > 0 ? normal("bias", experts, bias_scale) : Values{}};
      check_op(GetParam(), select_body(s));
      for (int threads : {1, 3}) check_exact(s, threads);
    }
}

// Terms so far apart that the order of a sum shows: it must not be that of the threads.
TEST_P(Router, SumsOfUnequalTermsDoNotDependOnThreads) {
  const int64_t tokens = 3000, experts = 8;
  const Select s{tokens, experts, 2, normal("logits", tokens * experts, 20), {}, 1e-12, false};
  check_op(GetParam(), select_body(s), true);
  const Values probs = run_op(backend(), type(), type(), 2, select_body(s)).at("probs").values;
  Values forwards(experts), backwards(experts);
  for (int64_t i = 0; i < tokens * experts; ++i) {
    forwards[static_cast<size_t>(i % experts)] += probs[static_cast<size_t>(i)];
    backwards[static_cast<size_t>(i % experts)] +=
        probs[static_cast<size_t>((tokens - 1 - i / experts) * experts + i % experts)];
  }
  EXPECT_NE(forwards, backwards) << "the order does not show: the test shows nothing";
}

// Released checkpoints have biases near +40: p + b has coarse steps there, and ties go to the lower id.
TEST_P(Router, LargeBias) {
  Select s{500, 64, 6, normal("logits", 500 * 64, 0.02), normal("bias", 64, 1e-4), 1e-12, false};
  for (double& b : s.bias) b += 40;
  check_exact(s, 2);
  if (stat() != DType::kF32) return;
  const Outputs got = run_op(backend(), type(), type(), 2, select_body(s));
  const Values exact = choice_of(got.at("probs").values, rounded(s.bias, stat()), s.experts, s.top_k, DType::kF64);
  EXPECT_NE(got.at("ids").values, exact) << "no tie was met: the test shows nothing";
}

TEST_P(Router, TiesGoToTheLowerId) {
  Select s{3, 8, 3, Values(24), {}};
  s.logits[8 + 5] = 1;                       // token 1: expert 5, then ties
  s.logits[16 + 2] = s.logits[16 + 7] = -1;  // token 2: neither 2
  const Values got = run_op(backend(), type(), type(), 2, select_body(s)).at("ids").values;
  EXPECT_EQ(got, integers({0, 1, 2, 5, 0, 1, 0, 1, 3}));
}

// A row depends on itself only: padding rows behind it change no bit.
TEST_P(Router, PaddingIndependence) {
  const Select all{40, 16, 4, normal("logits", 40 * 16), normal("bias", 16, 0.1)};
  Select part = all;
  part.tokens = 23;
  part.logits = slice(all.logits, 0, 23 * 16);
  const Outputs a = run_op(backend(), type(), type(), 2, select_body(all)),
                b = run_op(backend(), type(), type(), 2, select_body(part));
  EXPECT_TRUE(same_bits(slice(a.at("probs").values, 0, 23 * 16), b.at("probs").values));
  EXPECT_TRUE(same_bits(slice(a.at("weights").values, 0, 23 * 4), b.at("weights").values));
  EXPECT_TRUE(same_bits(slice(a.at("ids").values, 0, 23 * 4), b.at("ids").values));
}

// 40,840 tokens to one expert: more than f32 or i16 counters bear when they add up in the wrong type.
TEST_P(Router, CountsOfManyTokens) {
  const int64_t tokens = 40840;
  Select s{tokens, 16, 4, Values(static_cast<size_t>(tokens * 16)), {}};
  const Rng rng(5, "bits");
  for (int64_t i = 0; i < tokens * 16; ++i) s.logits[i] = i % 16 == 11 ? 9 : rng.uniform(static_cast<uint64_t>(i));
  check_exact(s, 3);
  const Values counts = run_op(backend(), type(), type(), 2, select_body(s)).at("counts").values;
  EXPECT_EQ(counts[11], tokens);
  double sum = 0;
  for (double c : counts) sum += c;
  EXPECT_EQ(sum, tokens * 4);
}

TEST_P(Router, ReplayKeepsChoiceAndCounts) {
  Select s{30, 16, 4, normal("logits", 30 * 16), normal("bias", 16, 0.1)};
  const Outputs first = run_op(backend(), type(), type(), 2, select_body(s));
  s.replay_ids = first.at("ids").values;
  const Outputs again = run_op(backend(), type(), type(), 2, select_body(s));
  for (const char* same : {"probs", "ids", "weights", "prob_sums"})
    EXPECT_TRUE(same_bits(first.at(same).values, again.at(same).values)) << same;
  EXPECT_EQ(again.at("counts").values, Values(16, 77.0));
  EXPECT_EQ(again.at("bare_counts").values, Values(16, 77.0));
  // Ids that the logits would not choose are replayed all the same.
  for (double& id : s.replay_ids) id = 15 - id;
  check_op(GetParam(), select_body(s));
}

Body backward_body(const Select& s, const Values& dweights, const Values& aux, const Values& probs, const Values& ids) {
  return [=](OpRun& r) {
    const int64_t T = s.tokens, E = s.experts, K = s.top_k;
    double least = 1;  // the smallest divisor
    for (int64_t t = 0; t < T; ++t) {
      double sum = 0;
      for (int64_t j = 0; j < K; ++j) sum += probs[t * E + static_cast<int64_t>(ids[t * K + j])];
      least = std::min(least, std::max(sum, s.norm_min));
    }
    const Bound bound{.length = E, .norm = 4 * (largest(dweights) / least + (aux.empty() ? 0 : largest(aux)))};
    router_select_backward(r.context(), {.dweights = r.in(Kind::kStat, {T, K}, dweights),
                                         .aux_dprob = aux.empty() ? View{} : r.in(Kind::kStat, {E}, aux),
                                         .probs = r.in(Kind::kStat, {T, E}, probs),
                                         .expert_ids = r.in(Kind::kI32, {T, K}, ids),
                                         .norm_min = s.norm_min,
                                         .dlogits = r.out("dlogits", Kind::kStat, {T, E}, bound)});
  };
}

TEST_P(Router, SelectBackward) {
  for (const auto& [tokens, experts, top_k] : {std::array<int64_t, 3>{1, 1, 1}, {9, 5, 2}, {33, 64, 6}, {0, 8, 2}})
    for (const double norm_min : {1e-12, 10.0})
      for (const bool with_aux : {false, true}) {
        SCOPED_TRACE(
            fmt::format("{} tokens, top {} of {}, norm_min {}, aux {}", tokens, top_k, experts, norm_min, with_aux));
        Select s{tokens, experts, top_k, normal("logits", tokens * experts), {}};
        s.norm_min = norm_min;
        const Outputs forward = run_f64(select_body(s));
        check_op(GetParam(),
                 backward_body(s, normal("dweights", tokens * top_k), with_aux ? normal("aux", experts) : Values{},
                               forward.at("probs").values, forward.at("ids").values));
      }
}
CONCERTO_ON_EVERY_BACKEND(Router);

// The golden example of the model reference, 4.3.
TEST(RouterValue, GoldenExample) {
  const Values z = {1.0, 0.5, 0, -0.5, 0.9, 0.6, 0.1, -0.4, 1.2, 0.2, 0.3, 0, 0.8, 0.7, -0.2, 0.1};
  const Outputs plain = run_f64(select_body({4, 4, 2, z, {}}));
  const Values probs = {.455054, .276004, .167405, .101536, .406062, .300818, .182455, .110665,
                        .481778, .177236, .195876, .145109, .361102, .326738, .132842, .179318};
  const Values weights = {.622459, .377541, .574443, .425557, .710950, .289050, .524979, .475021};
  for (size_t i = 0; i < probs.size(); ++i) EXPECT_NEAR(plain.at("probs").values[i], probs[i], 5.1e-7);
  for (size_t i = 0; i < weights.size(); ++i) EXPECT_NEAR(plain.at("weights").values[i], weights[i], 5.1e-7);
  EXPECT_EQ(plain.at("ids").values, integers({0, 1, 0, 1, 0, 2, 0, 1}));
  EXPECT_EQ(plain.at("counts").values, integers({4, 3, 1, 0}));

  const Outputs biased = run_f64(select_body({4, 4, 2, z, {0, 0, .2, 0}}));
  const Values biased_weights = {.731059, .268941, .689974, .310026, .710950, .289050, .731059, .268941};
  Values weight_of(8);  // order of the two choices is by p + b; the example lists expert 0 first
  for (size_t i = 0; i < 8; ++i)
    weight_of[i / 2 * 2 + (biased.at("ids").values[i] == 2)] = biased.at("weights").values[i];
  for (size_t i = 0; i < 8; ++i) EXPECT_NEAR(weight_of[i], biased_weights[i], 5.1e-7);
  EXPECT_EQ(biased.at("counts").values, integers({4, 0, 4, 0}));
  EXPECT_EQ(biased.at("bare_counts").values, integers({4, 3, 1, 0}));
}

// Through logits and select: router weights and inputs, with the aux loss as a weight on every probability.
TEST(RouterGradient, FiniteDifferences) {
  const int64_t tokens = 4, hidden = 5, experts = 6, top_k = 2;
  const Values x = normal("x", tokens * hidden), w = normal("w", experts * hidden), bias = normal("bias", experts, 0.2);
  const Values dweights = normal("dweights", tokens * top_k), aux = normal("aux", experts);
  const auto logits_of = [&](const Values& x, const Values& w) {
    return output_f64(
        [&](OpRun& r) {
          router_logits(r.context(), {.x = r.in(Kind::kCompute, {tokens, hidden}, x),
                                      .w = r.in(Kind::kStat, {experts, hidden}, w),
                                      .logits = r.out("logits", Kind::kStat, {tokens, experts})});
        },
        "logits");
  };
  for (const double norm_min : {1e-12, 2.0}) {
    const auto loss = [&](const Values& x, const Values& w) {
      const Outputs f = run_f64(select_body({tokens, experts, top_k, logits_of(x, w), bias, norm_min}));
      return dot(dweights, f.at("weights").values) + dot(aux, f.at("prob_sums").values);
    };
    const Select s{tokens, experts, top_k, logits_of(x, w), bias, norm_min};
    const Outputs forward = run_f64(select_body(s));
    const Values dlogits =
        output_f64(backward_body(s, dweights, aux, forward.at("probs").values, forward.at("ids").values), "dlogits");
    const Values dx0 = normal("dx", tokens * hidden), dw0 = normal("dw", experts * hidden);  // what is there already
    const Outputs back = run_f64([&](OpRun& r) {
      const View dz = r.in(Kind::kStat, {tokens, experts}, dlogits);
      router_logits_backward_input(r.context(), {.dlogits = dz,
                                                 .w = r.in(Kind::kStat, {experts, hidden}, w),
                                                 .dx = r.inout("dx", Kind::kCompute, {tokens, hidden}, dx0)});
      router_logits_backward_weight(r.context(), {.dlogits = dz,
                                                  .x = r.in(Kind::kCompute, {tokens, hidden}, x),
                                                  .dw = r.inout("dw", Kind::kStat, {experts, hidden}, dw0)});
    });
    check_gradient("dx", x, back.at("dx").values, [&](const Values& v) { return loss(v, w) + dot(dx0, v); });
    check_gradient("dw", w, minus(back.at("dw").values, dw0), [&](const Values& v) { return loss(x, v); });
  }
}

}  // namespace
}  // namespace concerto::test

#include "concerto/ops/routing.h"

#include <cmath>
#include <limits>

#include "concerto/ops/test_routing_case.h"

namespace concerto::test {
namespace {

void expect_near(const Values& got, const Values& want, double tolerance, const char* what) {
  ASSERT_EQ(got.size(), want.size()) << what;
  for (size_t i = 0; i < want.size(); ++i) EXPECT_NEAR(got[i], want[i], tolerance) << what << "[" << i << "]";
}

// The golden example of the model reference, 4.3; its numbers have six digits.
constexpr double kSixDigits = 5.1e-7;
RoutingCase golden() {
  RoutingCase c{4, 4, 2, {1.0, 0.5, 0, -0.5, 0.9, 0.6, 0.1, -0.4, 1.2, 0.2, 0.3, 0, 0.8, 0.7, -0.2, 0.1}, {}};
  c.balance = true;
  c.z_scale = 1;
  return c;
}
const Values kAllKept = {.622459, .377541, .574443, .425557, .710950, .289050, .524979, .475021};

TEST(RoutingGolden, TopK) {
  const Outputs got = run_f64(routing_body(golden()));
  expect_near(got.at("probs").values,
              {.455054, .276004, .167405, .101536, .406062, .300818, .182455, .110665, .481778, .177236, .195876,
               .145109, .361102, .326738, .132842, .179318},
              kSixDigits, "probs");
  EXPECT_EQ(got.at("ids").values, integers({0, 1, 0, 1, 0, 2, 0, 1}));
  EXPECT_EQ(got.at("counts").values, integers({4, 3, 1, 0}));
  EXPECT_EQ(got.at("bare_counts").values, integers({4, 3, 1, 0}));
  EXPECT_EQ(got.at("claims").values, integers({4, 0, 0, 0, 0, 3, 1, 0}));
  expect_near(got.at("weights").values, kAllKept, kSixDigits, "weights");
  EXPECT_NEAR(got.at("loss").values[0], 2.684239, kSixDigits);
  EXPECT_NEAR(got.at("z_sums").values[0] / 4, 3.368079, kSixDigits);
}

// Token 2 loses expert 0 and gives expert 2 all its weight; token 3 loses both. Counts stay those before drops.
TEST(RoutingGolden, TopKWithCapacityTwo) {
  RoutingCase c = golden();
  c.capacity = {2};
  const Outputs got = run_f64(routing_body(c));
  expect_near(got.at("weights").values, {.622459, .377541, .574443, .425557, 0, 1, 0, 0}, kSixDigits, "weights");
  EXPECT_EQ(got.at("slots").values, integers({0, 0, 1, 1, -1, 0, -1, -1}));
  EXPECT_EQ(got.at("kept_ids").values, integers({0, 1, 0, 1, 4, 2, 4, 4}));
  EXPECT_EQ(got.at("counts").values, integers({4, 3, 1, 0}));
  EXPECT_EQ(got.at("kept_counts").values, integers({2, 2, 1, 0}));
}

TEST(RoutingGolden, TopKWithBias) {
  RoutingCase c = golden();
  c.bias = {0, 0, .2, 0};
  const Outputs got = run_f64(routing_body(c));
  const Values weights = {.731059, .268941, .689974, .310026, .710950, .289050, .731059, .268941};
  for (size_t i = 0; i < 8; ++i) {  // listed with expert 0 first; ours are in the order of p + b
    const bool is_second = got.at("ids").values[i] == 2;
    EXPECT_TRUE(is_second || got.at("ids").values[i] == 0);
    EXPECT_NEAR(got.at("weights").values[i], weights[i / 2 * 2 + is_second], kSixDigits);
  }
  EXPECT_EQ(got.at("counts").values, integers({4, 0, 4, 0}));
  EXPECT_EQ(got.at("bare_counts").values, integers({4, 3, 1, 0}));
}

TEST(RoutingGolden, Top2AndSinkhorn) {
  RoutingCase c = golden();
  c.gate = Gate::kTop2;
  EXPECT_EQ(run_f64(routing_body(c)).at("ids").values, integers({0, 1, 0, 1, 0, 2, 0, 1}));
  c.norm_min = 1e-6;
  c.sinkhorn = true;
  c.capacity = {static_cast<double>(expert_capacity({2, 2, 2}, true, 4, 4))};
  const Outputs two = run_f64(routing_body(c));
  EXPECT_EQ(two.at("ids").values, integers({0, 1, 0, 1, 0, 2, 0, 3}));
  expect_near(two.at("weights").values, {.622459, .377541, .574443, .425557, 0, 1, 0, 1}, kSixDigits, "C = 2");
  c.capacity = {4};
  const Outputs four = run_f64(routing_body(c));
  EXPECT_EQ(four.at("ids").values, integers({0, 1, 0, 1, 0, 2, 0, 3}));
  expect_near(four.at("weights").values, {.622459, .377541, .574443, .425557, .710950, .289050, .668188, .331812},
              kSixDigits, "C = 4");
}

// l_aux from first choices: a view of claims, every K-th row.
TEST(RoutingGolden, BalanceOfFirstChoices) {
  const Outputs forward = run_f64(routing_body(golden()));
  const Values loss = output_f64(
      [&](OpRun& r) {
        View first = r.in(Kind::kI64, {1, 2, 4}, forward.at("claims").values);
        first.shape = {1, 4};
        first.row_stride = 8;
        routing_balance(r.context(), {.counts = first,
                                      .prob_sums = r.in(Kind::kF64, {1, 4}, forward.at("prob_sums").values),
                                      .tokens = r.in(Kind::kI64, {1}, {4}),
                                      .scale = r.in(Kind::kF64, {1}, {1}),
                                      .loss = r.out("loss", Kind::kF64, {1}),
                                      .aux_dprob = {}});
      },
      "loss");
  EXPECT_NEAR(loss[0], 1.703996, kSixDigits);
}

// Thousands of small cases, each stage against the model fed with what the stage before it gave.
class Routing : public OpTest {
 protected:
  static RoutingCase random_case(const Rng& rng, int variant) {
    uint64_t at = 0;
    const auto pick = [&](int64_t n) { return static_cast<int64_t>(rng.bits(at++) % static_cast<uint64_t>(n)); };
    RoutingCase c;
    c.gate = variant == 2 || variant == 3 ? Gate::kTop2 : Gate::kTopK;
    c.sinkhorn = variant == 3;
    c.experts = 2 + pick(7);
    c.top_k = c.gate == Gate::kTop2 ? 2 : 1 + pick(std::min<int64_t>(4, c.experts));
    if (variant == 1) {
      c.top_k = c.groups = 1 + pick(3);
      c.experts = c.groups * (1 + pick(4));
    }
    if (variant == 4) c.scoring = Scoring::kSigmoid;
    c.tokens = pick(14);
    if (c.tokens > 0 && pick(2)) {
      const double middle = static_cast<double>(pick(c.tokens + 1));
      c.units = {0, middle, middle, static_cast<double>(c.tokens)};
    }
    // Three kinds of logits: ties everywhere, everybody to one expert, and plain ones.
    const int64_t kind = pick(3);
    for (int64_t i = 0; i < c.tokens * c.experts; ++i)
      c.logits.push_back(kind == 0   ? static_cast<double>(pick(3)) / 2
                         : kind == 1 ? (i % c.experts == c.experts - 1 ? 5 : 0) +
                                           rng.normal(1000 + static_cast<uint64_t>(i)) / 8
                                     : rng.normal(1000 + static_cast<uint64_t>(i)));
    if (pick(2))
      for (int64_t e = 0; e < c.experts; ++e)  // also far below -1, where Paddle's kernel would never choose
        c.bias.push_back(static_cast<double>(pick(3)) / 4 - (pick(4) == 0 ? 50 : 0));
    for (int64_t u = 0; u < c.num_units(); ++u) c.capacity.push_back(static_cast<double>(1 + pick(5)));
    c.full = pick(2) ? FullExperts::kUniform : FullExperts::kLowest;
    c.sinkhorn_temp = pick(2) ? 0.03 : 0.5;
    c.order = pick(2) ? DropOrder::kRankMajor : DropOrder::kTokenMajor;
    c.reverse = pick(3) == 0;
    c.normalize = pick(4) != 0;
    c.norm_min = pick(4) ? 1e-12 : 0.3;
    c.balance = true;
    c.balance_scale = 0.5;
    c.z_scale = 0.1;
    return c;
  }

  void check_choice(const RoutingCase& c, const Outputs& got, const model::Matrix& p, int64_t begin, int64_t end) {
    const model::Matrix z = matrix(rounded(c.logits, stat()), c.experts, begin, end);
    const model::Ids ids = whole(got.at("ids").values, c.top_k, begin, end);
    const Values bias = c.bias.empty() ? Values(static_cast<size_t>(c.experts)) : rounded(c.bias, stat());
    const auto round = stat() == DType::kF32 ? +[](double v) { return static_cast<double>(static_cast<float>(v)); }
                                             : +[](double v) { return v; };
    std::vector<int> first;
    for (const auto& row : ids) first.push_back(row[0]);
    const model::Matrix by_sinkhorn =
        c.sinkhorn ? model::second_by_sinkhorn(z, first, c.sinkhorn_temp, static_cast<long>(c.capacity[unit_]),
                                               c.full == FullExperts::kUniform)
                   : model::Matrix{};
    std::vector<long> claims(static_cast<size_t>(c.top_k * c.experts)), bare(static_cast<size_t>(c.experts));
    for (size_t t = 0; t < z.size(); ++t) {
      model::Row s;
      for (size_t e = 0; e < p[t].size(); ++e) s.push_back(round(p[t][e] + bias[e]));
      for (size_t j = 0; j < ids[t].size(); ++j)
        ++claims[j * static_cast<size_t>(c.experts) + static_cast<size_t>(ids[t][j])];
      const Values none(static_cast<size_t>(c.experts));
      const auto bare_ids = c.groups > 1 ? model::best_of_groups(p[t], none, static_cast<int>(c.groups), round)
                                         : model::best(p[t], static_cast<int>(c.top_k));
      for (int e : bare_ids) ++bare[static_cast<size_t>(e)];
      if (c.gate == Gate::kTopK) {
        ASSERT_EQ(ids[t], c.groups > 1 ? model::best_of_groups(p[t], bias, static_cast<int>(c.groups), round)
                                       : model::best(s, static_cast<int>(c.top_k)));
        continue;
      }
      ASSERT_EQ(ids[t][0], model::best(s, 1)[0]);
      ASSERT_NE(ids[t][0], ids[t][1]);
      if (!c.sinkhorn && c.bias.empty()) {
        ASSERT_EQ(ids[t][1], model::best(model::second_by_logits(z[t], first[t]), 1)[0]);
        continue;
      }
      // Here the order of sums counts: the choice must be the best up to rounding; equal by symmetry means equal bits.
      const model::Row by = c.sinkhorn ? by_sinkhorn[t] : model::second_by_bias(z[t], bias, first[t]);
      const double best = by[static_cast<size_t>(model::best(by, 1)[0])];
      ASSERT_GE(by[static_cast<size_t>(ids[t][1])], best - 100 * unit_roundoff(stat()) * (1 + std::fabs(best)));
      exact_ += ids[t][1] == model::best(by, 1)[0];
      ++seconds_;
    }
    for (size_t i = 0; i < claims.size(); ++i)
      ASSERT_EQ(got.at("claims").values[unit_ * claims.size() + i], static_cast<double>(claims[i]));
    for (size_t e = 0; e < bare.size(); ++e) {
      ASSERT_EQ(got.at("bare_counts").values[unit_ * bare.size() + e], static_cast<double>(bare[e]));
      long sum = 0;
      for (size_t j = 0; j < static_cast<size_t>(c.top_k); ++j) sum += claims[j * bare.size() + e];
      ASSERT_EQ(got.at("counts").values[unit_ * bare.size() + e], static_cast<double>(sum));
    }
  }

  void check_rest(const RoutingCase& c, const Outputs& got, const model::Matrix& p, int64_t begin, int64_t end) {
    const model::Ids ids = whole(got.at("ids").values, c.top_k, begin, end);
    const model::Ids slots = whole(got.at("slots").values, c.top_k, begin, end);
    ASSERT_EQ(slots,
              model::slots(ids, static_cast<long>(c.capacity[unit_]), c.order == DropOrder::kRankMajor, c.reverse));
    const model::Ids kept = whole(got.at("kept_ids").values, c.top_k, begin, end);
    std::vector<long> kept_counts(static_cast<size_t>(c.experts)), counts;
    for (size_t t = 0; t < ids.size(); ++t) {
      const model::Row weights = model::weights(p[t], ids[t], slots[t], c.normalize, rounded({c.norm_min}, stat())[0]);
      for (size_t j = 0; j < ids[t].size(); ++j) {
        ASSERT_EQ(kept[t][j], slots[t][j] < 0 ? c.experts : ids[t][j]);
        if (slots[t][j] >= 0) ++kept_counts[static_cast<size_t>(ids[t][j])];
        ASSERT_NEAR(got.at("weights").values[static_cast<size_t>(begin * c.top_k) + t * ids[t].size() + j], weights[j],
                    20 * unit_roundoff(stat()) * (weights[j] + (slots[t][j] >= 0)));
      }
    }
    for (size_t e = 0; e < kept_counts.size(); ++e) {
      ASSERT_EQ(got.at("kept_counts").values[unit_ * kept_counts.size() + e], static_cast<double>(kept_counts[e]));
      counts.push_back(std::lround(got.at("counts").values[unit_ * kept_counts.size() + e]));
    }
    const double balance = model::balance_loss(p, counts, c.scoring == Scoring::kSigmoid, static_cast<int>(c.groups));
    ASSERT_NEAR(got.at("loss").values[unit_], balance, 1e-12 * (1 + balance));
    const double z = model::z_sum(matrix(rounded(c.logits, stat()), c.experts, begin, end));
    ASSERT_NEAR(got.at("z_sums").values[unit_], z, 30 * unit_roundoff(stat()) * (1 + z));
  }

  size_t unit_ = 0;
  int64_t exact_ = 0, seconds_ = 0;
};

TEST_P(Routing, AgreesWithTheModelOnThousandsOfCases) {
  int64_t drops = 0, empty = 0, lost = 0;
  for (int variant = 0; variant < 5; ++variant)
    for (int seed = 0; seed < 600; ++seed) {
      SCOPED_TRACE(fmt::format("variant {} seed {}", variant, seed));
      const RoutingCase c = random_case(Rng(static_cast<uint64_t>(seed), static_cast<uint64_t>(variant)), variant);
      const Outputs got = run_op(backend(), type(), type(), seed % 8 ? 1 : 3, routing_body(c));
      const Values offsets = c.unit_offsets();
      for (unit_ = 0; unit_ < static_cast<size_t>(c.num_units()); ++unit_) {
        const auto begin = static_cast<int64_t>(offsets[unit_]), end = static_cast<int64_t>(offsets[unit_ + 1]);
        const model::Matrix p = matrix(got.at("probs").values, c.experts, begin, end);
        const model::Matrix z = matrix(rounded(c.logits, stat()), c.experts, begin, end);
        for (size_t t = 0; t < z.size(); ++t) {
          const model::Row want = model::scores(z[t], c.scoring == Scoring::kSigmoid, static_cast<int>(c.groups));
          for (size_t e = 0; e < want.size(); ++e) ASSERT_NEAR(p[t][e], want[e], 20 * unit_roundoff(stat()));
        }
        check_choice(c, got, p, begin, end);
        check_rest(c, got, p, begin, end);
        if (HasFatalFailure()) return;
        empty += begin == end;
      }
      for (size_t i = 0; i < got.at("slots").values.size(); ++i) drops += got.at("slots").values[i] < 0;
      for (int64_t t = 0; t < c.tokens; ++t)
        lost += largest(slice(got.at("weights").values, t * c.top_k, c.top_k)) == 0;
    }
  // The cases show what they are there for.
  EXPECT_GT(drops, 5000);
  EXPECT_GT(empty, 500);
  EXPECT_GT(lost, 500);
  EXPECT_GT(seconds_, 3000);
  EXPECT_GT(exact_, seconds_ * 98 / 100);
}

// Against ref in f64, bitwise repeat, any number of threads: shapes that fill several blocks of tokens, and none.
TEST_P(Routing, BackendsAndThreadsAgree) {
  for (const auto& [tokens, experts, top_k] :
       {std::array<int64_t, 3>{1, 2, 2}, {9, 6, 2}, {300, 64, 6}, {700, 16, 2}, {0, 8, 2}})
    for (int variant = 0; variant < 5; ++variant) {
      if ((variant == 2 || variant == 3) && top_k != 2) continue;
      SCOPED_TRACE(fmt::format("{} tokens, top {} of {}, variant {}", tokens, top_k, experts, variant));
      RoutingCase c{tokens, experts, top_k, normal("logits", tokens * experts)};
      if (variant == 1) {
        if (experts % top_k) continue;
        c.groups = top_k;
      }
      c.gate = variant == 2 || variant == 3 ? Gate::kTop2 : Gate::kTopK;
      c.sinkhorn = variant == 3;
      if (variant == 3) c.sinkhorn_temp = 0.5;
      if (variant == 4) c.scoring = Scoring::kSigmoid;
      if (variant % 2) c.bias = normal("bias", experts, 0.3);
      if (tokens > 100) c.units = {0, 3, 3, static_cast<double>(tokens)};
      for (int64_t u = 0; u < c.num_units(); ++u)
        c.capacity.push_back(static_cast<double>(std::max<int64_t>(1, tokens * top_k / experts)));
      c.balance = true;
      c.balance_scale = 0.7;
      c.z_scale = 0.3;
      c.dweights = normal("dweights", tokens * top_k);
      check_op(GetParam(), routing_body(c), true);
    }
}

// More tokens than i16 or f32 counters bear; one expert takes them all.
TEST_P(Routing, CountsOfManyTokens) {
  const int64_t tokens = 40840, experts = 16;
  RoutingCase c{tokens, experts, 4, Values(static_cast<size_t>(tokens * experts))};
  const Rng rng(5, "bits");
  for (int64_t i = 0; i < tokens * experts; ++i)
    c.logits[static_cast<size_t>(i)] = i % experts == 11 ? 9 : rng.uniform(static_cast<uint64_t>(i));
  c.capacity = {40839};
  const Outputs got = run_op(backend(), type(), type(), 3, routing_body(c));
  EXPECT_EQ(got.at("counts").values[11], tokens);
  EXPECT_EQ(got.at("claims").values[11], tokens);
  EXPECT_EQ(got.at("kept_counts").values[11], tokens - 1);
  EXPECT_EQ(got.at("slots").values[static_cast<size_t>((tokens - 1) * 4)], -1);
  EXPECT_EQ(dot(got.at("counts").values, Values(16, 1.0)), static_cast<double>(tokens * 4));
}

// Gradients of an expert that dropped the token are not read, whatever they are.
TEST_P(Routing, DroppedChoicesLeakNothing) {
  RoutingCase c{6, 4, 2, normal("logits", 24)};
  c.capacity = {1};
  c.dweights = normal("dweights", 12);
  const Outputs clean = run_op(backend(), type(), type(), 1, routing_body(c));
  int64_t dropped = 0;
  for (size_t i = 0; i < 12; ++i)
    if (clean.at("slots").values[i] < 0) c.dweights[i] = std::nan(""), ++dropped;
  ASSERT_GE(dropped, 8);
  const Outputs dirty = run_op(backend(), type(), type(), 1, routing_body(c));
  EXPECT_TRUE(same_bits(clean.at("dlogits").values, dirty.at("dlogits").values));
}

// Tokens of another unit, and tokens behind, change no bit of a unit's results.
TEST_P(Routing, UnitsKnowNothingOfEachOther) {
  RoutingCase both{40, 8, 2, normal("logits", 320), normal("bias", 8, 0.1), {0, 23, 40}};
  both.gate = Gate::kTop2;
  both.sinkhorn = true;
  both.capacity = {5, 3};
  both.balance = true;
  both.balance_scale = both.z_scale = 0.5;
  both.dweights = normal("dweights", 80);
  RoutingCase one = both;
  one.tokens = 23;
  one.units.clear();
  one.logits.resize(23 * 8);
  one.dweights.resize(46);
  one.capacity = {5};
  const Outputs a = run_op(backend(), type(), type(), 2, routing_body(both)),
                b = run_op(backend(), type(), type(), 2, routing_body(one));
  for (const auto& [name, output] : b)
    EXPECT_TRUE(same_bits(slice(a.at(name).values, 0, static_cast<int64_t>(output.values.size())), output.values))
        << name;
}

// First choices fill every expert: the two readings of the reference's 0 / 0. Second choices are dropped in both.
TEST_P(Routing, SinkhornWithoutRoom) {
  RoutingCase c{3, 3, 2, {3, 0, 1, 0, 3, 1, 0, 1, 3}};
  c.gate = Gate::kTop2;
  c.sinkhorn = true;
  c.capacity = {1};
  for (const FullExperts full : {FullExperts::kUniform, FullExperts::kLowest}) {
    c.full = full;
    const Outputs got = run_op(backend(), type(), type(), 1, routing_body(c));
    const bool lowest = full == FullExperts::kLowest;
    EXPECT_EQ(got.at("ids").values, lowest ? integers({0, 1, 1, 0, 2, 0}) : integers({0, 2, 1, 0, 2, 1}));
    EXPECT_EQ(got.at("slots").values, integers({0, -1, 0, -1, 0, -1}));
    EXPECT_EQ(got.at("weights").values, Values({1, 0, 1, 0, 1, 0}));
  }
}

// A run that has gone wrong still gives experts that exist, each once: the error is the loss's to report, not a crash.
TEST_P(Routing, NanLogitsGiveRealExperts) {
  for (int variant = 0; variant < 5; ++variant) {
    RoutingCase c{4, 6, 2, Values(24, std::nan(""))};
    std::fill(c.logits.begin() + 6, c.logits.begin() + 12, 1.0);
    if (variant == 1) c.groups = 2;
    c.gate = variant == 2 || variant == 3 ? Gate::kTop2 : Gate::kTopK;
    c.sinkhorn = variant == 3;
    if (variant == 4) c.scoring = Scoring::kSigmoid;
    if (variant % 2 == 0) c.bias = normal("bias", 6);
    c.capacity = {1};
    const Values ids = run_op(backend(), type(), type(), 1, routing_body(c)).at("ids").values;
    for (size_t t = 0; t < 4; ++t) {
      EXPECT_TRUE(ids[2 * t] >= 0 && ids[2 * t] < 6 && ids[2 * t + 1] >= 0 && ids[2 * t + 1] < 6) << variant;
      EXPECT_NE(ids[2 * t], ids[2 * t + 1]) << variant;
    }
  }
}

// Routing is done in stat types: a bf16 run has the f32 run's.
std::vector<BackendCase> stat_cases() {
  std::vector<BackendCase> cases = backend_cases();
  std::erase_if(cases, [](const BackendCase& c) { return c.type == DType::kBF16; });
  return cases;
}
INSTANTIATE_TEST_SUITE_P(Backends, Routing, testing::ValuesIn(stat_cases()), case_name);

// Weights, balance loss and z loss through scores, with the choice and the drops held.
TEST(RoutingGradient, FiniteDifferences) {
  for (int variant = 0; variant < 3; ++variant)
    for (const bool normalize : {true, false})
      for (const double norm_min : {1e-12, 0.9, 3.0}) {
        SCOPED_TRACE(fmt::format("variant {}, normalize {}, norm_min {}", variant, normalize, norm_min));
        RoutingCase c{7, 6, 2, normal("logits", 42), normal("bias", 6, 0.2), {0, 4, 7}};
        if (variant == 1) c.groups = 2;
        if (variant == 2) c.scoring = Scoring::kSigmoid;
        c.capacity = {2, 1};
        c.normalize = normalize;
        c.norm_min = norm_min;
        c.balance = true;
        c.balance_scale = 0.7;
        c.z_scale = 0.3;
        c.dweights = normal("dweights", 14);
        const Outputs forward = run_f64(routing_body(c));
        ASSERT_LT(*std::min_element(forward.at("slots").values.begin(), forward.at("slots").values.end()), 0);
        RoutingCase held = c;
        held.given_ids = forward.at("ids").values;
        held.given_slots = forward.at("slots").values;
        held.dweights.clear();
        const auto loss = [&](const Values& logits) {
          held.logits = logits;
          const Outputs f = run_f64(routing_body(held));
          double sum = dot(c.dweights, f.at("weights").values) + 0.3 * dot(f.at("z_sums").values, {1, 1});
          for (int64_t u = 0; u < 2; ++u) {
            const double tokens = u == 0 ? 4 : 3;
            sum += 0.7 * 6 / tokens / tokens / static_cast<double>(c.groups) *
                   dot(slice(forward.at("counts").values, u * 6, 6), slice(f.at("prob_sums").values, u * 6, 6));
          }
          return sum;
        };
        check_gradient("logits", c.logits, forward.at("dlogits").values, loss);
      }
}

}  // namespace
}  // namespace concerto::test

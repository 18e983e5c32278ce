// All rows of the oracle's table, and what must not change a bit.
#include <gtest/gtest.h>

#include <map>

#include "concerto/base/rng.h"
#include "concerto/cli/backends.h"
#include "tests/multirank/oracle.h"

namespace concerto::test {
namespace {

class OracleAll : public ::testing::TestWithParam<std::string> {};

// Prints the worst of each layout.
TEST_P(OracleAll, Rows) {
  std::map<std::string, double> worst;
  std::map<std::string, int> count;
  for (const OracleRow& row : oracle_rows()) {
    if (row.kind != GetParam()) continue;
    const std::string of = fmt::format("{:<12} {}", row.dtype, row.exact() ? "bit-equal" : "rounding");
    const double ratio = check_row(row);
    if (ratio > 0.5) fmt::print("{}: {:.3g} of what is allowed\n", row.name(), ratio);
    worst[of] = std::max(worst[of], ratio);
    ++count[of];
  }
  EXPECT_FALSE(worst.empty());
  for (const auto& [of, ratio] : worst)
    fmt::print("{:<14} {:<24} {:>3} rows, worst {:.3g} of what is allowed\n", GetParam(), of, count[of], ratio);
}

std::vector<std::string> all_kinds() {
  std::vector<std::string> names = oracle_kinds();
  names.push_back("extra");
  return names;
}

INSTANTIATE_TEST_SUITE_P(Kinds, OracleAll, ::testing::ValuesIn(all_kinds()),
                         [](const auto& info) { return info.param; });

const OracleRow kRow{.kind = "", .model = "padded", .router = "plain_per_layer_z", .layout = {}, .micro_batches = 5};

const std::vector<Layout>& mixed() {
  static const std::vector<Layout> layouts = {
      {.mesh = {.tp = 2, .dp = 2, .pp = 2, .ep = 2, .etp = 2}, .schedule = "zero_bubble"},
      {.mesh = {.dp = 4, .pp = 2, .ep = 4}, .schedule = "zero_bubble_v"},
      {.mesh = {.dp = 2, .pp = 2, .ep = 2}, .vpp = 2, .schedule = "interleaved"}};
  return layouts;
}

TEST(OracleBits, DelaysChangeNone) {
  const Job job = kRow.job();
  for (const Layout& layout : mixed()) {
    SCOPED_TRACE(layout.name());
    const RunTrace want = run_layout(job, layout, backend_by_name("ref"));
    for (uint64_t seed = 1; seed <= 5; ++seed) {
      Layout late = layout;
      late.local.delay_seed = seed;
      expect_equal(run_layout(job, late, backend_by_name("ref")), want);
    }
  }
}

// Wherever experts live: the same clip factor, the same updates.
TEST(OracleBits, PlacesOfExpertsChangeNone) {
  for (const char* router : {"plain_per_layer_z", "drops_rank_major", "old_gate_drops"})
    for (const Layout& layout : mixed()) {
      OracleRow row = kRow;
      row.router = router;
      const Job job = row.job();
      SCOPED_TRACE(std::string(router) + " " + layout.name());
      const RunTrace want = run_layout(job, layout, backend_by_name("ref"));
      EXPECT_GT(want.steps[0].grad_norm, job.config.optimizer.clip_norm);  // it clips
      for (uint64_t seed = 1; seed <= 3; ++seed) {
        const Rng rng(seed, "places");
        Layout placed = layout;
        const auto experts = static_cast<size_t>(job.config.model.config.moe_num_experts);
        for (size_t e = 0; e < experts; ++e)  // each rank has one; the others as they fall
          placed.rank_of_expert.push_back(static_cast<int>(
              e < static_cast<size_t>(layout.mesh.ep) ? e : rng.below(e, static_cast<uint64_t>(layout.mesh.ep))));
        for (size_t e = experts; e-- > 1;)
          std::swap(placed.rank_of_expert[e], placed.rank_of_expert[rng.below(100 + e, e + 1)]);
        expect_equal(run_layout(job, placed, backend_by_name("ref")), want);
      }
    }
}

// Lists in which actions that do not depend on each other stand in another order.
TEST(OracleBits, PermutedListsChangeNone) {
  OracleRow row = kRow;
  row.model = "moe";
  row.micro_batches = 6;
  const Job job = row.job();
  const RunTrace alone = run_alone(job, backend_by_name("ref"));
  for (const char* schedule : {"1f1b", "zero_bubble", "zero_bubble_v", "interleaved"})
    for (const int pp : {2, 3}) {
      int64_t swaps = 0;
      for (uint64_t seed = 1; seed <= 4; ++seed) {
        const Layout layout{.mesh = {.pp = pp},
                            .vpp = schedule == std::string("interleaved") ? 2 : 1,
                            .schedule = schedule,
                            .shuffle = seed};
        SCOPED_TRACE(layout.name());
        const RunTrace got = run_layout(job, layout, backend_by_name("ref"));
        swaps += got.swaps;
        expect_equal(got, alone);
      }
      EXPECT_GT(swaps, 0) << schedule << " of " << pp << " ranks: no neighbours could change places";
    }
  for (const Layout& layout : mixed()) {
    SCOPED_TRACE(layout.name());
    Layout other = layout;
    other.shuffle = 7;
    expect_equal(run_layout(job, other, backend_by_name("ref")), run_layout(job, layout, backend_by_name("ref")));
  }
}

}  // namespace
}  // namespace concerto::test

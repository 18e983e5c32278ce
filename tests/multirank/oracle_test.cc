// The oracle (oracle.h): a dozen rows of its table, and that the table leaves nothing out. The rest is in
// oracle_all_test.cc.
#include <gtest/gtest.h>

#include <set>

#include "concerto/base/rng.h"
#include "concerto/cli/backends.h"
#include "tests/multirank/oracle.h"
#include "tests/support/tiny_routers.h"

namespace concerto::test {
namespace {

TEST(Oracle, EveryPairHasARow) {
  std::set<std::pair<std::string, std::string>> models, routers;
  std::set<std::string> names;
  const std::vector<OracleRow> rows = oracle_rows();
  EXPECT_GE(rows.size(), 80u);
  for (const OracleRow& row : rows) {
    models.emplace(row.kind, row.model);
    routers.emplace(row.kind, row.router);
    EXPECT_TRUE(names.insert(row.name() + row.kind).second) << row.name() << " stands twice";
    EXPECT_LE(row.layout.mesh.world(), 16);
  }
  for (const std::string& kind : oracle_kinds()) {
    for (const std::string& model : oracle_models()) EXPECT_TRUE(models.count({kind, model})) << kind << " " << model;
    for (const TinyRouter& r : tiny_routers()) EXPECT_TRUE(routers.count({kind, r.name})) << kind << " " << r.name;
  }
}

// A row of each kind and two of the others, drawn with --gtest_random_seed.
TEST(Oracle, ADozenRows) {
  std::map<std::string, std::vector<OracleRow>> by_kind;
  for (const OracleRow& row : oracle_rows()) by_kind[row.kind].push_back(row);
  const Rng rng(static_cast<uint64_t>(GTEST_FLAG_GET(random_seed)), "dozen");
  uint64_t at = 0;
  for (const auto& [kind, rows] : by_kind)
    for (int i = 0; i < (kind == "extra" ? 2 : 1); ++i) check_row(rows[rng.below(at++, rows.size())]);
}

const Layout kMixed{.mesh = {.tp = 2, .dp = 2, .pp = 2, .ep = 2, .etp = 2}, .schedule = "zero_bubble"};

TEST(Oracle, DelaysChangeNoBit) {
  const OracleRow row{.kind = "", .model = "padded", .router = "plain_per_layer_z", .layout = kMixed};
  const RunTrace want = run_layout(row.job(), row.layout, backend_by_name("ref"));
  Layout late = row.layout;
  late.local.delay_seed = 1;
  expect_equal(run_layout(row.job(), late, backend_by_name("ref")), want);
}

}  // namespace
}  // namespace concerto::test

// Every pair of twelve layouts: what one saves, the other loads, saves again and goes on from.
#include <gtest/gtest.h>

#include "tests/multirank/layout_runs.h"

namespace concerto::test {
namespace {

TEST(LayoutPairs, AllOfThem) {
  Workplace work;
  work.write_data("train", 60, 1);
  work.write_data("valid", 5, 2);
  train_in(layout_run_config(work, "alone"), one_rank());
  int pairs = 0;
  for (const RunLayout& a : run_layouts())
    for (const RunLayout& b : run_layouts()) {
      check_pair(work, a, b, work / "alone");
      ++pairs;
    }
  EXPECT_EQ(pairs, 144);
}

}  // namespace
}  // namespace concerto::test

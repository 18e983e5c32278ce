// Promise 1: a layout never changes the maths. A row of the table trains a small model in a layout, ranks as threads, and
// compares losses, every gradient, the norm, router losses, counts, weights and moments after several steps with one
// rank's; and what each rank holds, computes and sends with the formulas of arch/layout_cost.h.
//
// Pipeline layouts without data, tensor or expert parallelism give the same bits, whatever the schedule and recompute,
// but for an embedding that two stages read (tied head, multi-token prediction): its gradient is then the sum of two
// stages' sums. In the others sums are made in another order; most rows run in f64 on `ref`, so what is left is rounding.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "tests/support/parallel_run.h"

namespace concerto::test {

struct OracleRow {
  std::string kind;    // of layout: "tp"; "extra": no part of the pairs that must be covered
  std::string model;   // dense | moe | interval2 | padded | packed | mtp | short
  std::string router;  // of tiny_routers(); empty: no experts
  Layout layout;
  int micro_batches = 4;
  OptimizerName optimizer = OptimizerName::kAdamW;
  RoutingUnit unit = RoutingUnit::kMicroBatch;
  LossAverage average = LossAverage::kTokens;
  std::string dtype = "f64";  // f32 and bf16 run on `cpu`
  bool biases = false;
  bool no_targets = false;    // only the router's losses make gradients
  bool router_steps = false;  // orthogonal loss, moving correction bias
  int heads = 4, kv_heads = 2;

  std::string name() const;
  Job job() const;
  bool exact() const;
};

// In the order of the kinds; at least 80, every pair of (kind, model) and of (kind, router).
std::vector<OracleRow> oracle_rows();
const std::vector<std::string>& oracle_kinds();
const std::vector<std::string>& oracle_models();

// Fails the test where something is off. Returns the worst of all that is compared, as a share of what is allowed (0 for
// rows that must be bit-equal).
double check_row(const OracleRow& row);

// Every number and every bit.
void expect_equal(const RunTrace& got, const RunTrace& want);
// Within `allowed`, of a tensor's greatest element. Returns the worst share of it.
double expect_near(const RunTrace& got, const RunTrace& want, double allowed);

}  // namespace concerto::test

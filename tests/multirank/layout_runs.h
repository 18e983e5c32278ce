// Whole runs in any layout, ranks as threads: what `launch --transport local` does, with a hand on every rank's trainer.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "concerto/comm/local/local_world.h"
#include "tests/support/tiny_training.h"

namespace concerto::test {

struct RunLayout {
  std::string name;
  int ranks = 1;
  ParallelSection parallel;
};

RunLayout one_rank();
const std::vector<RunLayout>& run_layouts();  // twelve, the first is one rank
const RunLayout& run_layout(const std::string& name);

// Of 7 steps of 4 micro-batches in f64 on `ref`: between layouts only the order of sums differs.
RunConfig layout_run_config(const Workplace& work, const std::string& dir);
constexpr double kRunRounding = 1e-9;  // of a number in metrics.jsonl, after some steps

using RankTrainer = std::function<void(Trainer&, const RankGroups* groups)>;
struct LayoutRun {
  RunSummary summary;  // the lead's
  std::string screen;  // what the lead showed
};
// `before`: with every rank's trainer before it runs, on all ranks at once; may be empty.
LayoutRun train_in(const RunConfig& config, const RunLayout& layout, const RankTrainer& before = {});

// Every row of metrics.jsonl has the same fields, whole numbers are the same, and others up to kRunRounding.
void expect_same_rows(const std::string& got_dir, const std::string& want_dir);

// Saves a run in layout `a` and loads it in `b`, which saves it again at once: same content. Then `b` goes on, and its
// losses are those of the run `whole`, which one rank made without a stop.
void check_pair(const Workplace& work, const RunLayout& a, const RunLayout& b, const std::string& whole);
constexpr int64_t kPairStep = 2;  // of the checkpoint that they pass on

}  // namespace concerto::test

// Whole runs of many ranks against one rank's: metrics, checkpoints, exports, going on elsewhere, and what goes wrong.
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <thread>

#include "concerto/base/files.h"
#include "concerto/base/rng.h"
#include "tests/multirank/layout_runs.h"

namespace concerto::test {
namespace {
namespace fs = std::filesystem;

class Layouts : public ::testing::Test {
 protected:
  Layouts() {
    work_.write_data("train", 60, 1);
    work_.write_data("valid", 5, 2);
  }
  RunConfig config(const std::string& dir = "run") const { return layout_run_config(work_, dir); }
  Workplace work_;
};

TEST_F(Layouts, TheirMetricsAreThoseOfOneRank) {
  train_in(config("alone"), one_rank());
  const std::vector<double> valid = metrics_values(work_ / "alone", "valid_loss");
  ASSERT_EQ(valid.size(), 3u);
  for (const RunLayout& layout : run_layouts()) {
    if (layout.ranks == 1) continue;
    SCOPED_TRACE(layout.name);
    const LayoutRun run = train_in(config(layout.name), layout);
    EXPECT_EQ(run.summary.step, 7);
    expect_same_rows(work_ / layout.name, work_ / "alone");
    // One row a token and choice, whoever counted it.
    const std::string loads = read_text_file(work_ / layout.name + "/expert_load.bin");
    EXPECT_EQ(loads, read_text_file(work_ / "alone/expert_load.bin"));
  }
}

// All pairs are in trainer_pairs_test.
TEST_F(Layouts, ACheckpointOfOneGoesOnInAnother) {
  train_in(config("alone"), one_rank());
  const std::vector<RunLayout>& all = run_layouts();
  const Rng rng(3, "pairs");
  for (uint64_t i = 0; i < 6; ++i)
    check_pair(work_, all[rng.below(2 * i, all.size())], all[rng.below(2 * i + 1, all.size())], work_ / "alone");
}

std::vector<std::pair<std::string, std::string>> files_of(const std::string& dir) {
  std::vector<std::pair<std::string, std::string>> files;
  for (const auto& entry : fs::directory_iterator(dir))
    files.emplace_back(entry.path().filename().string(), read_text_file(entry.path().string()));
  std::sort(files.begin(), files.end());
  return files;
}

TEST_F(Layouts, TheExportIsThatOfOneRankByteForByte) {
  for (const char* name : {"dp3", "tp2", "pp2 interleaved", "tp2 dp2 pp2 ep2 etp2"}) {
    SCOPED_TRACE(name);
    train_in(config(name), run_layout(name));
    RunConfig c = config(std::string(name) + " alone");
    c.run.resume = checkpoint_path(work_ / name, 7);
    EXPECT_EQ(train_in(c, one_rank()).summary.step, 7);  // nothing to do but to export
    const auto exported = files_of(work_ / name + "/model");
    EXPECT_GE(exported.size(), 2u);
    EXPECT_TRUE(exported == files_of(c.run.dir + "/model"));
  }
}

// On other numbers of ranks, with rows of steps in metrics.jsonl that the checkpoint knows nothing of.
TEST_F(Layouts, ARunGoesOnOnAnotherNumberOfRanks) {
  train_in(config("alone"), one_rank());
  const char* const ways[][3] = {
      {"dp4 zero2", "tp2", "one rank"}, {"one rank", "dp3", "tp2 dp2 pp2 ep2 etp2"}, {"pp3 zero_bubble", "ep2", "pp2"}};
  for (const auto& way : ways) {
    const std::string first = fmt::format("{}, {}, {}", way[0], way[1], way[2]);
    SCOPED_TRACE(first);
    train_in(config(first), run_layout(way[0]));
    work_.copy_killed_run(first, first + " 2", 2);
    EXPECT_EQ(train_in(config(first + " 2"), run_layout(way[1])).summary.first_step, 3);
    work_.copy_killed_run(first + " 2", first + " 3", 4);
    EXPECT_EQ(train_in(config(first + " 3"), run_layout(way[2])).summary.first_step, 5);
    for (const char* end : {"", " 2", " 3"}) expect_same_rows(work_ / first + end, work_ / "alone");
  }
}

int64_t lines_of(const std::string& file) {
  std::ifstream in(file);
  return std::count(std::istreambuf_iterator<char>(in), {}, '\n');
}

TEST_F(Layouts, AStopSignalSavesOnceAndTheRunGoesOn) {
  RunConfig whole = config("alone");
  whole.training.steps = 40;
  whole.checkpoint.every_steps = 0;
  train_in(whole, one_rank());
  for (const char* name : {"dp3", "tp2 dp2 pp2 ep2 etp2"}) {
    SCOPED_TRACE(name);
    RunConfig c = whole;
    c.run.dir = work_ / name;
    std::thread killer([&] {
      while (lines_of(c.run.dir + "/metrics.jsonl") < 4) std::this_thread::sleep_for(std::chrono::microseconds(200));
      ::kill(::getpid(), SIGTERM);
    });
    const RunSummary s = train_in(c, run_layout(name)).summary;
    killer.join();
    ASSERT_EQ(s.stopped_by, "SIGTERM");
    ASSERT_LT(s.step, 40);
    const std::vector<CheckpointInfo> saved = list_checkpoints(c.run.dir);
    ASSERT_EQ(saved.size(), 1u);
    EXPECT_EQ(saved[0].step, s.step);
    EXPECT_EQ(saved[0].fault, "");
    EXPECT_FALSE(fs::exists(c.run.dir + "/model"));
    EXPECT_EQ(metrics_values(c.run.dir, "loss").size(), static_cast<size_t>(s.step));
    EXPECT_EQ(train_in(c, run_layout("pp2")).summary.first_step, s.step + 1);
    expect_same_rows(c.run.dir, whole.run.dir);
  }
}

TEST_F(Layouts, AFullDiskStopsNoRank) {
  train_in(config("whole"), run_layout("dp2"));
  work_.copy_killed_run("whole", "cut", 2);
  const RunConfig c = config("cut");
  {
    const FileSizeLimit limit(20000);  // enough for the records, not for the weights
    const LayoutRun run = train_in(c, run_layout("dp2"));
    EXPECT_EQ(run.summary.step, 7);
    EXPECT_NE(run.summary.unsaved, "");
    EXPECT_HAS(run.screen, "WARNING: checkpoint 4 could not be saved");
    EXPECT_HAS(run.screen, "WARNING: the model could not be exported");
  }
  EXPECT_EQ(metrics_rows(c.run.dir), metrics_rows(work_ / "whole"));
  EXPECT_EQ(find_latest(c.run.dir).step, 2);
  for (const auto& entry : fs::directory_iterator(c.run.dir))
    EXPECT_EQ(entry.path().string().find(".tmp"), std::string::npos) << entry.path();
  EXPECT_EQ(train_in(c, run_layout("dp2")).summary.first_step, 3);
  EXPECT_EQ(checkpoint_contents(checkpoint_path(c.run.dir, 7)),
            checkpoint_contents(checkpoint_path(work_ / "whole", 7)));
}

// Only one rank, not the lead, meets the fault.
TEST_F(Layouts, AFaultThatOneRankMeetsIsSaidAndTheRunGoesOn) {
  RunConfig c = config();
  c.data.valid.clear();  // its best would be saved too
  set_io_fault_for_tests([](std::string_view operation, const std::string& path) {
    return operation == "write" && path.find("checkpoint-4") != std::string::npos &&
                   path.find("00002-of-00003") != std::string::npos
               ? ENOSPC
               : 0;
  });
  const LayoutRun run = train_in(c, run_layout("dp3"));
  set_io_fault_for_tests(nullptr);
  EXPECT_EQ(run.summary.step, 7);
  EXPECT_EQ(run.summary.unsaved, "");  // later ones could be
  EXPECT_HAS(run.screen, "WARNING: checkpoint 4 could not be saved");
  EXPECT_HAS(run.screen, "00002-of-00003");
  std::vector<int64_t> steps;
  for (const CheckpointInfo& info : list_checkpoints(c.run.dir)) steps.push_back(info.step);
  EXPECT_EQ(steps, (std::vector<int64_t>{2, 6, 7}));
}

// A weight that only one rank holds is NaN: every rank skips every step.
TEST_F(Layouts, AStepThatIsNotFiniteIsSkippedByAllRanks) {
  for (const char* name : {"dp2", "pp2", "ep2", "tp2 dp2 pp2 ep2 etp2"}) {
    SCOPED_TRACE(name);
    const RunLayout& layout = run_layout(name);
    RunConfig c = config(name);
    c.training.on_bad_loss = BadStep::kSkip;
    c.training.steps = 4;
    c.data.valid.clear();
    const LayoutRun run = train_in(c, layout, [&](Trainer& trainer, const RankGroups* groups) {
      if (groups->world().rank() + 1 != layout.ranks) return;
      ParameterStore& store = trainer.engine().store();
      for (int i = 0; i < store.size(); ++i)
        if (store.specs()[static_cast<size_t>(i)].name.ends_with("layers.2.post_attention_layernorm.weight"))
          store.master(i).as<double>()[3] = NAN;
      store.refresh_copies();
    });
    EXPECT_EQ(run.summary.skipped_steps, 4);
    EXPECT_EQ(metrics_values(c.run.dir, "skipped").size(), 4u);
    EXPECT_HAS(run.screen, "step 4 skipped");
    EXPECT_EQ(checkpoint_contents(checkpoint_path(c.run.dir, 2)), checkpoint_contents(checkpoint_path(c.run.dir, 4)));
  }
}

}  // namespace
}  // namespace concerto::test

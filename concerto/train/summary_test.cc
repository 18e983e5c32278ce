#include "concerto/train/summary.h"

#include <gtest/gtest.h>

#include <cstring>
#include <memory>

#include "concerto/base/error.h"
#include "concerto/base/test_folder.h"

namespace concerto {
namespace {

constexpr int64_t kMiB = 1 << 20;

TEST(MemoryReport, ReadsWhatTheProcessUses) {
  const ProcessMemory before = read_process_memory();
  EXPECT_GT(before.rss_bytes, kMiB);
  EXPECT_GE(before.peak_bytes, before.rss_bytes);
  EXPECT_GT(before.anonymous_bytes, 0);
  const int64_t size = 64 * kMiB;
  {
    const std::unique_ptr<char[]> block(new char[static_cast<size_t>(size)]);
    std::memset(block.get(), 1, static_cast<size_t>(size));
    const ProcessMemory during = read_process_memory();
    EXPECT_GT(during.anonymous_bytes - before.anonymous_bytes, size * 9 / 10);
    EXPECT_GT(during.rss_bytes - before.rss_bytes, size * 9 / 10);
    EXPECT_EQ(block[static_cast<size_t>(size) - 1], 1);
  }
  const ProcessMemory after = read_process_memory();
  EXPECT_GE(after.peak_bytes, before.rss_bytes + size * 9 / 10);  // the peak stays
}

TEST(MemoryReport, ComparesPredictedAndReal) {
  MemoryReport r{.baseline_bytes = 40 * kMiB, .predicted_bytes = 460 * kMiB, .peak_bytes = 510 * kMiB};
  EXPECT_EQ(r.predicted_peak_bytes(), 500 * kMiB);
  EXPECT_NEAR(r.error(), 0.02, 1e-12);
  EXPECT_EQ(format_memory_report(r), "predicted 500 MiB (40.0 MiB process + 460 MiB run), real 510 MiB (+2.0 %)");
  r.predicted_bytes = 0;
  EXPECT_EQ(r.error(), 0);
  EXPECT_EQ(format_memory_report(r), "real 510 MiB");
}

RunSummary summary_of(const std::string& run_dir) {
  return {.run_dir = run_dir,
          .first_step = 1,
          .step = 200,
          .steps = 200,
          .stopped_by = "",
          .final_loss = 3.25,
          .best_valid_loss = 3.5,
          .best_valid_step = 150,
          .tokens = 1638400,
          .seconds = 120,
          .train_seconds = 100,
          .skipped_steps = 0,
          .memory = {.baseline_bytes = 40 * kMiB, .predicted_bytes = 460 * kMiB, .peak_bytes = 510 * kMiB},
          .outputs = find_outputs(run_dir)};
}

TEST(Summary, SaysTheNumbersAndWhereToLook) {
  const TestFolder folder;
  write_text(folder / "loss.svg", "");
  write_text(folder / "events.out.tfevents.1.a.2", "");
  write_text(folder / "events.out.tfevents.2.a.2", "");
  std::filesystem::create_directory(folder / "model");
  EXPECT_EQ(format_summary(summary_of(folder.path()), {}, 80, true),
            "Training done: 200 steps\n"
            "  training loss 3.2500\n"
            "  best valid    3.5000 at step 150\n"
            "  tokens        1.64M, 16.4k a second\n"
            "  time          2m00s, of it 1m40s in steps\n"
            "  peak memory   predicted 500 MiB (40.0 MiB process + 460 MiB run), real 510 MiB (+2.0 %)\n"
            "\nIn " +
                folder.path() +
                ":\n"
                "  loss.svg               the loss curve; any web browser opens it\n"
                "  events.out.tfevents.*  tensorboard --logdir " +
                folder.path() +
                "\n"
                "  model                  a Hugging Face folder; concerto generate --model " +
                folder.path() + "/model --prompt ...\n");
}

TEST(Summary, StoppedAndResumedRunsSaySo) {
  RunSummary s = summary_of("none");
  s.first_step = 51;
  s.step = 120;
  s.stopped_by = "SIGTERM";
  s.skipped_steps = 2;
  s.best_valid_loss.reset();
  LossCurves curves;
  curves.train = {{1, 2, 3}, {3, 2, 1}};
  const std::string text = format_summary(s, curves, 80, false);
  EXPECT_TRUE(text.starts_with("Training stopped at step 120 of 200 by SIGTERM, resumed at step 51\n"));
  EXPECT_NE(text.find("       3 |*"), std::string::npos) << text;
  EXPECT_NE(text.find("  skipped steps 2 with a bad loss\n"), std::string::npos);
  EXPECT_EQ(text.find("best valid"), std::string::npos);
  EXPECT_EQ(text.find("In none"), std::string::npos);
}

TEST(Memory, ARunThatDoesNotFitIsSaidBeforeItStarts) {
  EXPECT_GT(read_available_memory(), 0);
  check_memory(5, 5);
  check_memory(int64_t{1} << 60, 0);  // unknown
  try {
    check_memory(int64_t{3} << 30, int64_t{2} << 30);
    ADD_FAILURE();
  } catch (const Error& e) {
    EXPECT_EQ(e.code, ErrorCode::kMemory);
    EXPECT_NE(std::string(e.what()).find("would take 3.00 GiB, 2.00 GiB are free"), std::string::npos) << e.what();
  }
}

}  // namespace
}  // namespace concerto

#include "concerto/train/metrics.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cmath>
#include <csignal>
#include <nlohmann/json.hpp>

#include "concerto/base/error.h"
#include "concerto/base/test_folder.h"
#include "concerto/train/human_units.h"

namespace concerto {
namespace {

using nlohmann::json;

StepReport report_of(int64_t step) {
  StepReport r;
  r.step = step;
  r.steps = 20;
  r.loss = 1.0 / 3.0 + static_cast<double>(step);
  r.total_loss = r.loss + 0.1;
  r.lr = 3e-4;
  r.grad_norm = 0.1;
  r.tokens = 1024;
  r.tokens_per_s = 12345.6;
  r.seconds = 0.083;
  r.moe_layers = {1, 3};
  r.tokens_per_expert = {{10, 10, 10, 10}, {40, 0, 0, 0}};
  summarize_loads(r);
  return r;
}

std::vector<json> rows_of(const std::string& path) {
  std::vector<json> rows;
  std::ifstream in(path);
  for (std::string line; std::getline(in, line);) rows.push_back(json::parse(line));
  return rows;
}

void write_steps(const std::string& path, int64_t resume, int64_t last) {
  MetricsWriter writer(path, resume);
  for (int64_t step = resume + 1; step <= last; ++step) {
    writer.write(report_of(step));
    if (step % 2 == 0) writer.write(EvalReport{.step = step, .valid_loss = 2.5, .valid_tokens = 77, .seconds = 1});
  }
}

TEST(Metrics, WorstLoadOfAllLayers) {
  StepReport r = report_of(1);
  EXPECT_EQ(r.expert_max_over_mean, 4.0);
  EXPECT_EQ(r.expert_idle_share, 0.375);  // 3 of 8
  ASSERT_EQ(r.layer_loads.size(), 2u);
  EXPECT_EQ(r.layer_loads[1].idle_share, 0.75);
  r.moe_layers.clear();
  r.tokens_per_expert.clear();
  summarize_loads(r);
  EXPECT_EQ(r.expert_max_over_mean, 1.0);
  EXPECT_EQ(r.expert_idle_share, 0.0);
  r.dropped_per_expert = {{1}};
  EXPECT_THROW(summarize_loads(r), Bug);
}

TEST(Metrics, RowsHoldEveryFieldExactly) {
  const TestFolder folder;
  StepReport r = report_of(1);
  r.mtp_losses = {5.5, 6.25};
  r.peak_bytes = 1 << 20;
  {
    MetricsWriter writer(folder / "metrics.jsonl", 0);
    writer.write(r);
    r.skipped = true;
    r.loss = NAN;
    writer.write(r);
    writer.write(EvalReport{.step = 2, .valid_loss = 4.5, .valid_tokens = 99, .seconds = 0.5});
  }
  const auto rows = rows_of(folder / "metrics.jsonl");
  ASSERT_EQ(rows.size(), 3u);
  EXPECT_EQ(rows[0]["step"], 1);
  EXPECT_EQ(rows[0]["loss"].get<double>(), 1.0 / 3.0 + 1.0);  // 17 digits give the same double back
  EXPECT_EQ(rows[0]["total_loss"].get<double>(), 1.0 / 3.0 + 1.0 + 0.1);
  EXPECT_EQ(rows[0]["lr"].get<double>(), 3e-4);
  EXPECT_EQ(rows[0]["grad_norm"].get<double>(), 0.1);
  EXPECT_EQ(rows[0]["tokens"], 1024);
  EXPECT_EQ(rows[0]["tokens_per_s"].get<double>(), 12345.6);
  EXPECT_EQ(rows[0]["expert_max_over_mean"].get<double>(), 4.0);
  EXPECT_EQ(rows[0]["expert_idle_share"].get<double>(), 0.375);
  EXPECT_EQ(rows[0]["expert_load"], (json{{"1", 1.0}, {"3", 4.0}}));
  EXPECT_EQ(rows[0]["expert_idle"], (json{{"1", 0.0}, {"3", 0.75}}));
  EXPECT_EQ(rows[0]["expert_entropy"], (json{{"1", 1.0}, {"3", 0.0}}));
  EXPECT_FALSE(rows[0].contains("expert_dropped"));
  EXPECT_FALSE(rows[0].contains("expert_bias"));
  EXPECT_EQ(rows[0]["mtp_losses"], (json{5.5, 6.25}));
  EXPECT_EQ(rows[0]["peak_bytes"], 1 << 20);
  EXPECT_FALSE(rows[0].contains("skipped"));
  EXPECT_TRUE(rows[1]["loss"].is_null());
  EXPECT_EQ(rows[1]["skipped"], true);
  EXPECT_EQ(rows[2]["valid_loss"], 4.5);
  EXPECT_EQ(rows[2]["valid_tokens"], 99);
  EXPECT_FALSE(rows[2].contains("loss"));
}

TEST(Metrics, RowsHoldDropsAndBias) {
  const TestFolder folder;
  StepReport r = report_of(1);
  r.dropped_per_expert = {{0, 0, 0, 0}, {10, 0, 0, 0}};
  r.correction_bias = {{0, 0, 0, 0}, {-0.5, 0.25, 0, 0}};
  summarize_loads(r);
  MetricsWriter(folder / "m", 0).write(r);
  const auto rows = rows_of(folder / "m");
  EXPECT_EQ(rows.at(0)["expert_dropped"], (json{{"1", 0.0}, {"3", 0.25}}));
  EXPECT_EQ(rows[0]["expert_bias"], (json{{"1", {0.0, 0.0}}, {"3", {-0.5, 0.25}}}));
}

TEST(Metrics, SeventeenDigits) {
  const TestFolder folder;
  MetricsWriter(folder / "m", 0).write(report_of(1));
  EXPECT_NE(read_text(folder / "m").find("\"grad_norm\": 0.10000000000000001,"), std::string::npos);
}

TEST(Metrics, ResumedFileEqualsOneThatNeverStopped) {
  const TestFolder folder;
  write_steps(folder / "whole", 0, 20);
  write_steps(folder / "resumed", 0, 13);  // killed after step 13, its last checkpoint is of step 8
  write_steps(folder / "resumed", 8, 20);
  EXPECT_EQ(read_text(folder / "resumed"), read_text(folder / "whole"));
}

TEST(Metrics, TornLastLineIsCut) {
  const TestFolder folder;
  write_steps(folder / "whole", 0, 6);
  write_steps(folder / "torn", 0, 4);
  std::string text = read_text(folder / "torn");
  write_text(folder / "torn", text + "{\"step\": 4, \"valid_lo");
  std::string warning;
  MetricsWriter(folder / "torn", 4, [&](const std::string& line) { warning = line; });
  EXPECT_EQ(read_text(folder / "torn"), text);
  EXPECT_EQ(warning, "");  // what a crash leaves needs no word
  text.pop_back();         // a whole row that lost only its newline stays
  write_text(folder / "torn", text);
  write_steps(folder / "torn", 4, 6);
  EXPECT_EQ(read_text(folder / "torn"), read_text(folder / "whole"));
}

TEST(Metrics, BrokenLinesInTheMiddleAreCutWithAWord) {
  const TestFolder folder;
  write_text(folder / "m", "{\"step\": 1, \"loss\": 2}\nnonsense\n{\"loss\": 3}\n[]\n{\"step\": 2, \"loss\": 1}\n");
  std::string warning;
  MetricsWriter(folder / "m", 2, [&](const std::string& line) { warning = line; });
  EXPECT_EQ(read_text(folder / "m"), "{\"step\": 1, \"loss\": 2}\n{\"step\": 2, \"loss\": 1}\n");
  EXPECT_NE(warning.find("removed 3 broken lines"), std::string::npos);
}

TEST(Metrics, FreshRunStartsEmpty) {
  const TestFolder folder;
  write_text(folder / "m", "{\"step\": 0, \"valid_loss\": 2}\n");
  MetricsWriter(folder / "m", 0);
  EXPECT_EQ(read_text(folder / "m"), "");
}

TEST(Metrics, MissingFolderIsAnError) {
  const TestFolder folder;
  try {
    MetricsWriter(folder / "no/metrics.jsonl", 0);
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.code, ErrorCode::kIo);
    EXPECT_NE(e.where.find("no/metrics.jsonl"), std::string::npos);
  }
}

TEST(Metrics, UnreadableFileIsAnError) {
  const TestFolder folder;
  std::filesystem::create_directory(folder / "m");  // a folder where the file should be
  EXPECT_THROW(MetricsWriter(folder / "m", 3), Error);
}

TEST(RecordFile, FullDiskWarnsOnceAndGoesOn) {
  int warnings = 0;
  RecordFile file("/dev/full", [&](const std::string&) { ++warnings; });
  EXPECT_FALSE(file.append("a row\n"));
  EXPECT_FALSE(file.append("a row\n"));
  EXPECT_EQ(warnings, 1);
}

TEST(RecordFile, HalfWrittenRecordIsCutOff) {
  const TestFolder folder;
  int warnings = 0;
  RecordFile file(folder / "f", [&](const std::string&) { ++warnings; });
  EXPECT_TRUE(file.append("first row\n"));
  rlimit old{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &old), 0);
  const auto handler = ::signal(SIGXFSZ, SIG_IGN);
  const rlimit small{14, old.rlim_max};  // room for 4 more bytes: as a disk that fills up
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  const bool written = file.append("second row\n");
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &old), 0);
  ::signal(SIGXFSZ, handler);
  EXPECT_FALSE(written);
  EXPECT_EQ(read_text(folder / "f"), "first row\n");
  EXPECT_TRUE(file.append("third row\n"));
  EXPECT_EQ(read_text(folder / "f"), "first row\nthird row\n");
  EXPECT_EQ(warnings, 1);
}

TEST(HumanUnits, ReadAsPeopleWrite) {
  EXPECT_EQ(shell_word("runs/a-b_1/model"), "runs/a-b_1/model");
  EXPECT_EQ(shell_word("runs/运行"), "runs/运行");
  EXPECT_EQ(shell_word("my runs/it's"), "'my runs/it'\\''s'");
  EXPECT_EQ(shell_word("$HOME"), "'$HOME'");
  EXPECT_EQ(shell_word(""), "''");
  EXPECT_EQ(format_count(0), "0");
  EXPECT_EQ(format_count(987), "987");
  EXPECT_EQ(format_count(12345), "12.3k");
  EXPECT_EQ(format_count(999600), "1.00M");
  EXPECT_EQ(format_count(1.25e9), "1.25B");
  EXPECT_EQ(format_duration(0.84), "0.8 s");
  EXPECT_EQ(format_duration(42), "42 s");
  EXPECT_EQ(format_duration(59.7), "1m00s");
  EXPECT_EQ(format_duration(7500), "2h05m");
  EXPECT_EQ(format_duration(3 * 86400 + 4 * 3600), "3d04h");
  EXPECT_EQ(format_duration(NAN), "?");
  EXPECT_EQ(format_bytes(512), "512 B");
  EXPECT_EQ(format_bytes(3 << 19), "1.50 MiB");
  EXPECT_EQ(format_bytes(int64_t{20} << 30), "20.0 GiB");
  EXPECT_EQ(display_width("━ab·"), 4);
}

}  // namespace
}  // namespace concerto

#include "concerto/train/trace_writer.h"

#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>
#include <thread>

#include "concerto/base/test_folder.h"

namespace concerto {
namespace {

using nlohmann::json;

std::vector<json> spans_of(const json& trace) {
  std::vector<json> spans;
  for (const auto& event : trace["traceEvents"])
    if (event["ph"] == "X") spans.push_back(event);
  return spans;
}

TEST(TraceWriter, RecordsTheTracedStepsOnly) {
  const TestFolder folder;
  TraceWriter writer(folder / "trace.json", 2, 3);
  writer.name_thread("steps \"main\"");
  for (int64_t step = 1; step <= 5; ++step) {
    writer.begin_step(step);
    {
      const TraceScope outer(&writer, "forward", "compute", 4, 1);
      const TraceScope inner(&writer, "attention\n", "compute");
    }
    EXPECT_EQ(writer.active(), step == 2 || step == 3);
    writer.end_step();
    EXPECT_EQ(std::filesystem::exists(folder / "trace.json"), step >= 3);
  }
  const json trace = json::parse(read_text(folder / "trace.json"));
  const auto spans = spans_of(trace);
  ASSERT_EQ(spans.size(), 6u);
  EXPECT_EQ(spans[0]["name"], "step 2");
  EXPECT_EQ(spans[1]["name"], "forward");
  EXPECT_EQ(spans[1]["cat"], "compute");
  EXPECT_EQ(spans[1]["args"], (json{{"step", 2}, {"layer", 4}, {"micro_batch", 1}}));
  EXPECT_EQ(spans[2]["name"], "attention\n");
  EXPECT_EQ(spans[2]["args"], (json{{"step", 2}}));
  EXPECT_EQ(spans[3]["name"], "step 3");
  for (int i : {0, 3}) {  // a span lies within the one around it
    for (int k : {i, i + 1}) {
      const auto begin = [&](int j) { return spans[static_cast<size_t>(j)]["ts"].get<double>(); };
      const auto end = [&](int j) { return begin(j) + spans[static_cast<size_t>(j)]["dur"].get<double>(); };
      EXPECT_LE(begin(k), begin(k + 1));
      EXPECT_GE(end(k) + 2e-3, end(k + 1));  // printed to a nanosecond
    }
  }
  bool named = false;
  for (const auto& event : trace["traceEvents"])
    named = named || (event["name"] == "thread_name" && event["args"]["name"] == "steps \"main\"");
  EXPECT_TRUE(named);
}

TEST(TraceWriter, ThreadsHaveTheirOwnRows) {
  const TestFolder folder;
  TraceWriter writer(folder / "t", 1, 1);
  writer.name_thread("main");
  writer.begin_step(1);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&writer, t] {
      writer.name_thread("worker " + std::to_string(t));
      for (int i = 0; i < 100; ++i) const TraceScope scope(&writer, "gemm", "compute", t);
    });
  }
  for (auto& t : threads) t.join();
  writer.end_step();
  const json trace = json::parse(read_text(folder / "t"));
  std::map<int, std::string> names;
  for (const auto& event : trace["traceEvents"])
    if (event["name"] == "thread_name") names[event["tid"]] = event["args"]["name"];
  EXPECT_EQ(names.size(), 5u);
  std::map<std::string, int> spans;
  for (const auto& span : spans_of(trace)) {
    const std::string name = names.at(span["tid"]);
    ++spans[name];
    if (name != "main") {
      EXPECT_EQ(name, "worker " + std::to_string(span["args"]["layer"].get<int>()));
    }
  }
  EXPECT_EQ(spans.at("main"), 1);
  EXPECT_EQ(spans.at("worker 2"), 100);
}

TEST(TraceWriter, FullMemoryDropsAndSaysSo) {
  const TestFolder folder;
  TraceWriter writer(folder / "t", 1, 1, 3);
  writer.begin_step(1);
  for (int i = 0; i < 10; ++i) const TraceScope scope(&writer, "x", "y");
  writer.end_step();
  const json trace = json::parse(read_text(folder / "t"));
  EXPECT_EQ(spans_of(trace).size(), 3u);
  EXPECT_EQ(trace["otherData"]["dropped"], 8);
}

TEST(TraceWriter, RunThatEndsEarlyWritesWhatItHas) {
  const TestFolder folder;
  TraceWriter writer(folder / "t", 1, 9);
  writer.begin_step(1);
  writer.end_step();
  EXPECT_FALSE(std::filesystem::exists(folder / "t"));
  writer.finish();
  EXPECT_EQ(spans_of(json::parse(read_text(folder / "t"))).size(), 1u);
}

TEST(TraceWriter, RunThatNeverReachesTheStepsWritesNothing) {
  const TestFolder folder;
  TraceWriter writer(folder / "t", 5, 6);
  writer.begin_step(7);
  writer.end_step();
  writer.finish();
  EXPECT_FALSE(std::filesystem::exists(folder / "t"));
}

TEST(TraceWriter, LongNamesAreCutBetweenCharacters) {
  const TestFolder folder;
  TraceWriter writer(folder / "t", 1, 1);
  writer.begin_step(1);
  writer.end(writer.begin(std::string(46, 'a') + "é", "category longer than fits"));
  writer.end_step();
  const auto spans = spans_of(json::parse(read_text(folder / "t")));
  EXPECT_EQ(spans.at(1)["name"], std::string(46, 'a'));
  EXPECT_EQ(spans.at(1)["cat"], "category longer");
}

TEST(TraceWriter, UnwritableFileWarnsAndTrainingGoesOn) {
  const TestFolder folder;
  std::string warning;
  TraceWriter writer(folder / "no/t", 1, 1, 10, [&](const std::string& line) { warning = line; });
  writer.begin_step(1);
  writer.end_step();
  EXPECT_NE(warning.find("no/t"), std::string::npos) << warning;
}

TEST(TraceScope, NullWriterIsFine) { const TraceScope scope(nullptr, "x", "y"); }

}  // namespace
}  // namespace concerto

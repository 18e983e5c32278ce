// Every golden case of Hugging Face on every backend, in every layout that one rank has.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "concerto/base/test_folder.h"
#include "concerto/checkpoint/safetensors.h"
#include "concerto/cli/backends.h"
#include "concerto/cli/golden.h"

namespace concerto {
namespace {

const char* kCases[] = {"dense-tiny", "moe-tiny",     "moe-interval2",    "moe-padded",
                        "moe-packed", "mtp-pre-main", "mtp-post-shifted", "lamb-moe"};

std::string failures(const GoldenReport& r) {
  std::string text;
  for (const GoldenLine& l : r.lines)
    if (!l.ok())
      text += fmt::format("{}: max {:.2e} ({:.0e}) l2 {:.2e} ({:.0e})\n", l.name, l.max, l.tolerance_max, l.l2,
                          l.tolerance_l2);
  for (const std::string& name : r.unused) text += name + ": neither fed nor compared\n";
  return text;
}

struct Layout {
  const char* backend;
  const char* schedule;
  Recompute recompute;
  int threads;
};

std::string layout_name(const ::testing::TestParamInfo<std::tuple<const char*, Layout>>& info) {
  const auto& [name, l] = info.param;
  std::string text =
      fmt::format("{}_{}_{}_{}_{}", name, l.backend, l.schedule, static_cast<int>(l.recompute), l.threads);
  std::replace(text.begin(), text.end(), '-', '_');
  return text;
}

class Golden : public ::testing::TestWithParam<std::tuple<const char*, Layout>> {};

TEST_P(Golden, Agrees) {
  const auto& [name, layout] = GetParam();
  ThreadPool pool(layout.threads);
  const std::string dir = std::string("tests/golden/") + name;
  const GoldenReport report =
      verify_golden({.model_dir = dir, .golden_dir = dir, .schedule = layout.schedule, .recompute = layout.recompute},
                    backend_by_name(layout.backend), pool);
  EXPECT_TRUE(report.ok()) << failures(report);
  EXPECT_EQ(report.total, static_cast<int64_t>(report.lines.size() + report.fed.size()));
}

INSTANTIATE_TEST_SUITE_P(Cases, Golden,
                         ::testing::Combine(::testing::ValuesIn(kCases),
                                            ::testing::Values(Layout{"ref", "1f1b", Recompute::kNone, 1},
                                                              Layout{"cpu", "1f1b", Recompute::kNone, 2},
                                                              Layout{"cpu", "zero_bubble", Recompute::kSelective, 2},
                                                              Layout{"cpu", "zero_bubble", Recompute::kFull, 3},
                                                              Layout{"cpu", "1f1b", Recompute::kFull, 1})),
                         layout_name);

// One row a micro-batch: gradients and losses weigh valid tokens, so they do not change (no aux loss is in the loss of
// this case).
TEST(GoldenMicroBatches, AccumulationChangesNothing) {
  ThreadPool pool(2);
  for (const char* name : {"dense-tiny"}) {
    const std::string dir = std::string("tests/golden/") + name;
    const GoldenReport report =
        verify_golden({.model_dir = dir, .golden_dir = dir, .micro_batches = 2}, backend_by_name("cpu"), pool);
    EXPECT_TRUE(report.ok()) << failures(report);
  }
}

// case.json with `from` replaced; the message of the error that it gives.
std::string case_fault(const std::string& from, const std::string& to) {
  namespace fs = std::filesystem;
  const TestFolder folder;
  const fs::path dir = folder / "case";
  fs::copy("tests/golden/lamb-moe", dir);
  std::ifstream in("tests/golden/lamb-moe/case.json");
  std::string text{std::istreambuf_iterator<char>(in), {}};
  text.replace(text.find(from), from.size(), to);
  fs::remove(dir / "case.json");
  std::ofstream(dir / "case.json") << text;
  std::string what;
  ThreadPool pool(1);
  try {
    verify_golden({.model_dir = dir.string(), .golden_dir = dir.string()}, backend_by_name("cpu"), pool);
  } catch (const Error& e) {
    what = e.what();
  }
  return what;
}

TEST(GoldenCaseFile, FaultsAreNamed) {
  EXPECT_NE(case_fault("\"lamb\"", "\"sgd\"").find("train.optimizer is \"sgd\""), std::string::npos);
  EXPECT_NE(case_fault("\"router\": {\"max\"", "\"rooter\": {\"max\"").find("no tolerance 'router'"),
            std::string::npos);
  EXPECT_NE(case_fault("\"aux_loss_in_loss\": false", "\"aux_loss_in_loss\": true").find("disagree on the aux loss"),
            std::string::npos);
  EXPECT_NE(case_fault("\"steps\": 20", "\"steps\": \"x\"").find("case.json"), std::string::npos);
  EXPECT_NE(case_fault("\"steps\": 20", "\"steps\": 21").find("wanted"), std::string::npos);
}

// Ids and positions of a file go to kernels that trust them.
TEST(GoldenCaseFile, IdsOutsideTheVocabularyAreRefused) {
  namespace fs = std::filesystem;
  const TestFolder folder;
  const fs::path dir = folder / "ids";
  ThreadPool pool(1);
  const std::pair<const char*, const char*> tensors[] = {{"moe-packed", "input_ids"},
                                                         {"moe-packed", "labels"},
                                                         {"moe-packed", "position_ids"},
                                                         {"moe-packed", "train.input_ids"},
                                                         {"moe-tiny", "generate.prompt_ids"}};
  for (const auto& [from, name] : tensors) {
    fs::remove_all(dir);
    fs::copy(fs::path("tests/golden") / from, dir);
    fs::permissions(dir / "golden.safetensors", fs::perms::owner_all);
    int64_t at = 0;
    {
      const SafetensorsFile file((dir / "golden.safetensors").string());
      at = file.require(name).data - file.entries().front().data + file.bytes();
      for (const SafetensorsEntry& e : file.entries()) at -= e.bytes;
    }
    const int64_t bad = 1 << 30;
    std::fstream out(dir / "golden.safetensors", std::ios::in | std::ios::out | std::ios::binary);
    out.seekp(at);
    out.write(reinterpret_cast<const char*>(&bad), 8);
    out.close();
    try {
      verify_golden({.model_dir = dir.string(), .golden_dir = dir.string()}, backend_by_name("ref"), pool);
      ADD_FAILURE() << name;
    } catch (const Error& e) {
      EXPECT_EQ(e.where, name);
      EXPECT_NE(std::string(e.what()).find("1073741824"), std::string::npos) << e.what();
    }
  }
}

// A comparison that cannot fail is worth nothing: one flipped weight must be seen.
TEST(GoldenFlip, OneFlippedWeightIsSeen) {
  namespace fs = std::filesystem;
  const TestFolder folder;
  const fs::path dir = folder / "flip";
  fs::create_directories(dir);
  for (const char* file : {"config.json", "model.safetensors"})
    fs::copy_file(fs::path("tests/golden/moe-tiny") / file, dir / file);
  fs::permissions(dir / "model.safetensors", fs::perms::owner_all);
  const SafetensorsFile file((dir / "model.safetensors").string());
  const SafetensorsEntry& entry = file.require("model.layers.1.mlp.experts.3.down_proj.weight");
  const int64_t at = entry.data - file.entries().front().data + file.bytes();
  int64_t all = 0;
  for (const SafetensorsEntry& e : file.entries()) all += e.bytes;
  {
    std::fstream out(dir / "model.safetensors", std::ios::in | std::ios::out | std::ios::binary);
    float value;
    std::memcpy(&value, entry.data, 4);
    value = -value;
    out.seekp(at - all);
    out.write(reinterpret_cast<const char*>(&value), 4);
  }
  ThreadPool pool(2);
  const GoldenReport report =
      verify_golden({.model_dir = dir.string(), .golden_dir = "tests/golden/moe-tiny"}, backend_by_name("ref"), pool);
  EXPECT_FALSE(report.ok());
}

}  // namespace
}  // namespace concerto

#include "concerto/cli/inspect_command.h"

#include <gtest/gtest.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <nlohmann/json.hpp>
#include <sstream>

#include "concerto/base/error.h"
#include "concerto/base/files.h"
#include "concerto/base/test_errors.h"
#include "concerto/base/test_folder.h"
#include "concerto/cli/test_command.h"
#include "concerto/train/load_file.h"
#include "concerto/train/test_png.h"

namespace concerto {
namespace {

using nlohmann::json;

std::string run(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), {"inspect", "load"});
  return run_command(add_inspect_command, std::move(arguments));
}

std::string failure(ErrorCode code, const std::vector<std::string>& arguments) {
  return error_of(code, [&] { run(arguments); });
}

std::vector<json> lines(const std::string& text) {
  std::vector<json> result;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) result.push_back(json::parse(line));
  return result;
}

// Layer 2 is balanced; in layer 5, expert 1 gets all in step 3 and expert 3 never anything.
class InspectLoad : public testing::Test {
 protected:
  InspectLoad() { write(1, 6); }
  void write(int64_t first, int64_t last, bool extras = false) const {
    LoadWriter writer(folder_ / kLoadFileName, {.layers = {2, 5}, .experts = 4}, 0);
    for (int64_t step = first; step <= last; ++step) {
      StepReport r;
      r.step = step;
      r.moe_layers = {2, 5};
      r.tokens_per_expert = {{10, 10, 10, 10}, {10, 20, 10, 0}};
      if (step == 3) r.tokens_per_expert[1] = {0, 40, 0, 0};
      if (extras) {
        r.dropped_per_expert = {{0, 0, 0, 0}, {0, 2, 0, 0}};
        r.correction_bias = {{0, 0, 0, 0}, {-0.25, 0, 0, 0.5}};
      }
      summarize_loads(r);
      writer.write(r);
    }
  }
  TestFolder folder_;
};

TEST_F(InspectLoad, PrintsATableAndDrawsAPicture) {
  const std::string table = run({folder_.path()});
  EXPECT_HAS(table, "steps 1 to 6, 4 experts a layer");
  EXPECT_HAS(table, "    2     1.000   1.00       @ 1     0.0 %    1.000      0   1.00 x       0   1.00 x\n");
  EXPECT_HAS(table, "    5     2.333   4.00       @ 3    33.3 %    0.625      1   2.33 x       3   0.00 x\n");
  EXPECT_HAS(table, "picture   " + folder_.path() + "/expert_load.png");
  EXPECT_GT(read_png(read_text(folder_ / "expert_load.png")).height, 300);
}

TEST_F(InspectLoad, ShowsDropsAndBiasWhereThereAreAny) {
  write(1, 2, true);
  const std::string table = run({folder_.path()});
  EXPECT_HAS(table, "dropped  correction bias");
  EXPECT_HAS(table, "5.00 %  -0.25 to 0.5\n");
  const auto rows = lines(run({folder_.path(), "--json"}));
  EXPECT_EQ(rows.at(1)["dropped_share"], 0.05);
  EXPECT_EQ(rows[1]["bias"], (json{-0.25, 0.5}));
}

TEST_F(InspectLoad, JsonHasALineALayer) {
  const auto rows = lines(run({folder_.path() + "/", "--json", "--output", folder_ / "x.png"}));
  ASSERT_EQ(rows.size(), 3u);
  EXPECT_EQ(rows[0]["layer"], 2);
  EXPECT_EQ(rows[1]["tokens_per_expert"], (json{50, 140, 50, 0}));
  EXPECT_EQ(rows[1]["choices"], 240);
  EXPECT_EQ(rows[1]["worst_step"], 3);
  EXPECT_FALSE(rows[1].contains("dropped_share"));
  EXPECT_FALSE(rows[1].contains("bias"));
  EXPECT_EQ(rows[2], (json{{"first_step", 1},
                           {"last_step", 6},
                           {"steps", 6},
                           {"experts", 4},
                           {"damaged", false},
                           {"picture", folder_ / "x.png"}}));
  EXPECT_TRUE(path_exists(folder_ / "x.png"));
  EXPECT_FALSE(path_exists(folder_ / "expert_load.png"));
}

TEST_F(InspectLoad, TakesSomeLayersAndSteps) {
  const auto steps_of = [&](const std::string& steps) {
    const json last = lines(run({folder_.path(), "--json", "--no-picture", "--steps", steps})).back();
    EXPECT_TRUE(last["picture"].is_null());
    return std::pair<int64_t, int64_t>(last["first_step"], last["last_step"]);
  };
  using Pair = std::pair<int64_t, int64_t>;
  EXPECT_EQ(steps_of("2-4"), Pair(2, 4));
  EXPECT_EQ(steps_of("3"), Pair(3, 3));
  EXPECT_EQ(steps_of("5-"), Pair(5, 6));
  EXPECT_EQ(steps_of("-2"), Pair(1, 2));
  EXPECT_EQ(steps_of("4-99"), Pair(4, 6));
  EXPECT_FALSE(path_exists(folder_ / "expert_load.png"));
  const auto layers_of = [&](const std::string& layers) {
    std::vector<int64_t> found;
    for (const json& row : lines(run({folder_.path(), "--json", "--no-picture", "--layers", layers})))
      if (row.contains("layer")) found.push_back(row["layer"]);
    return found;
  };
  EXPECT_EQ(layers_of("5"), (std::vector<int64_t>{5}));
  EXPECT_EQ(layers_of("3-9"), (std::vector<int64_t>{5}));
  EXPECT_EQ(layers_of("0-2,5"), (std::vector<int64_t>{2, 5}));
  EXPECT_EQ(layers_of("2-"), (std::vector<int64_t>{2, 5}));
}

TEST_F(InspectLoad, RefusesWhatIsNotThere) {
  for (const char* steps : {"x", "-", "4-2", "1-2-3", "1 2", "99999999999999999999"})
    EXPECT_HAS(failure(ErrorCode::kUsage, {folder_.path(), "--steps", steps}), "is no step and no range of steps");
  EXPECT_HAS(failure(ErrorCode::kUsage, {folder_.path(), "--steps", "7-"}), "The last recorded step is 6.");
  for (const char* layers : {"x", "1,", ",", "2-x"})
    EXPECT_HAS(failure(ErrorCode::kUsage, {folder_.path(), "--layers", layers}), "is no layer and no range of layers");
  EXPECT_HAS(failure(ErrorCode::kUsage, {folder_.path(), "--layers", "3"}), "layer 3 is no MoE layer");
  EXPECT_HAS(failure(ErrorCode::kUsage, {folder_.path(), "--layers", "6-8"}), "The run has 2, 5.");
  EXPECT_HAS(failure(ErrorCode::kIo, {folder_ / "none"}), "there is no such folder");
  EXPECT_HAS(failure(ErrorCode::kIo, {folder_.path(), "--output", folder_ / "no/x.png"}), "no/x.png");
  EXPECT_THROW(run({folder_.path(), "--output", "x.png", "--no-picture"}), CLI::ParseError);
  const TestFolder dense;
  EXPECT_HAS(failure(ErrorCode::kIo, {dense.path()}), "holds no expert_load.bin");
  write_text(dense / kLoadFileName, "something else");
  EXPECT_HAS(failure(ErrorCode::kData, {dense.path()}), "is no record of expert loads");
}

TEST_F(InspectLoad, SaysWhatItCannotRead) {
  std::string bytes = read_text(folder_ / kLoadFileName);
  bytes.back() ^= 1;
  write_text(folder_ / kLoadFileName, bytes);
  testing::internal::CaptureStderr();
  const auto rows = lines(run({folder_.path(), "--json", "--no-picture"}));
  EXPECT_HAS(testing::internal::GetCapturedStderr(), "damaged behind step 5");
  EXPECT_EQ(rows.back()["damaged"], true);
}

}  // namespace
}  // namespace concerto

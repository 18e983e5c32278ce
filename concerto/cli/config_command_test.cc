#include "concerto/cli/config_command.h"

#include <gtest/gtest.h>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "concerto/base/error.h"
#include "concerto/base/files.h"
#include "concerto/base/test_folder.h"
#include "concerto/cli/overrides.h"
#include "concerto/cli/test_command.h"

namespace concerto {
namespace {

TEST(Overrides, TakesBothForms) {
  const Overrides expected = {{"training.steps", "10"},
                              {"optimizer.lr", "1e-3"},
                              {"backend", "ref"},
                              {"run.dir", "a=b"},
                              {"monitor.sample_prompt", ""}};
  EXPECT_EQ(parse_overrides({"--training.steps=10", "--optimizer.lr", "1e-3", "--backend=ref", "--run.dir=a=b",
                             "--monitor.sample_prompt="}),
            expected);
  EXPECT_TRUE(parse_overrides({}).empty());
  EXPECT_EQ(parse_overrides({"--optimizer.wsd_stable_steps", "-1"}), (Overrides{{"optimizer.wsd_stable_steps", "-1"}}));
}

TEST(Overrides, RefusesTheRest) {
  for (const std::vector<std::string>& bad : std::vector<std::vector<std::string>>{{"steps"},
                                                                                   {"-s", "3"},
                                                                                   {"--"},
                                                                                   {"--=3"},
                                                                                   {"--training.steps"},
                                                                                   {"--training.steps", "--run.seed=1"},
                                                                                   {"--a b=3"},
                                                                                   {"--training.=1"}}) {
    try {
      parse_overrides(bad);
      ADD_FAILURE() << bad[0];
    } catch (const Error& e) {
      EXPECT_EQ(e.code, ErrorCode::kUsage) << bad[0];
    }
  }
}

// Runs `concerto ARGUMENTS...` and returns what it printed.
std::string run(std::vector<std::string> arguments) { return run_command(add_config_command, std::move(arguments)); }

class ConfigCommand : public testing::Test {
 protected:
  const TestFolder folder_;
  const std::string path_ = folder_.write("run.yaml", "model: {num_hidden_layers: 2}\ntraining: {steps: 5}\n");
};

TEST_F(ConfigCommand, ChecksAndShows) {
  const std::string checked = run({"config", "check", path_});
  EXPECT_TRUE(checked.starts_with("OK ")) << checked;
  EXPECT_NE(checked.find("data.train: no training data"), std::string::npos) << checked;
  EXPECT_NE(run({"config", "check", path_, "--json"}).find("\"ok\":true"), std::string::npos);
  EXPECT_NE(run({"config", "show", path_}).find("  steps: 5\n"), std::string::npos);
  EXPECT_NE(run({"config", "show", path_, "--training.steps=7"}).find("  steps: 7\n"), std::string::npos);
  EXPECT_NE(run({"config", "show", path_, "--json", "--training.steps", "8"}).find("\"steps\": 8,"), std::string::npos);
}

TEST_F(ConfigCommand, ShowsTheSchedule) {
  const std::vector<std::string> show = {"config",
                                         "show",
                                         path_,
                                         "--schedule",
                                         "--parallel.pp=2",
                                         "--training.global_batch_size=6",
                                         "--training.micro_batch_size=2"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.begin(), show.begin(), show.end());
    return run(more);
  };
  EXPECT_EQ(with({}),
            "1f1b: pipeline ranks 2, micro-batches 3\n\n"
            "rank 0  F0 F1 .  .  B0--- F2 B1--- .  B2---\n"
            "rank 1  .  F0 B0--- F1 B1--- F2 B2--- .  .\n"
            "F forward, B backward; with the micro-batch; . waits\n\n"
            "bubble 25.00 %, at least 25.00 % in such a schedule, where F, I and W take equally long (B = I + W)\n"
            "micro-batches in flight at most, by rank: 2 1\n");
  const std::string svg = folder_ / "schedule.svg";
  const auto json = nlohmann::json::parse(with({"--json", "--svg", svg, "--parallel.schedule=zero_bubble_v"}));
  EXPECT_EQ(json["schedule"], "zero_bubble_v");
  EXPECT_EQ(json["chunks"], 2);
  EXPECT_EQ(json["in_flight"], nlohmann::json({4, 4}));
  EXPECT_NEAR(json["least_bubble"].get<double>(), 1. / 19, 1e-12);
  EXPECT_TRUE(json["actions"][0].get<std::string>().starts_with("F0 SF0 F1 SF1 F2 SF2 RF0.1 F0.1 I0.1 SB0.1"));
  EXPECT_TRUE(read_text_file(svg).starts_with("<svg xmlns="));
  EXPECT_NE(with({"--ranks", "4"}).find("micro-batches 2 (of the first of 2 data parallel ranks)"), std::string::npos);
  EXPECT_THROW(with({"--ranks", "3"}), Error);
  EXPECT_THROW(with({"--parallel.vpp=2"}), Error);
  EXPECT_THROW(with({"--svg", folder_ / "none/schedule.svg"}), Error);
  EXPECT_THROW(run({"config", "show", path_, "--svg", svg}), Error);
}

TEST_F(ConfigCommand, ShowsTheLayout) {
  const std::vector<std::string> show = {"config",
                                         "show",
                                         path_,
                                         "--layout",
                                         "--parallel.tp=2",
                                         "--parallel.pp=2",
                                         "--parallel.ep=4",
                                         "--model.num_hidden_layers=3"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.begin(), show.begin(), show.end());
    return run(more);
  };
  const std::string text = with({"--parallel.stage_layers=[1, 2]"});  // the least that ep 4 folds over: dp 2
  EXPECT_TRUE(
      text.starts_with("8 ranks: tp 2 x dp 2 x pp 2; experts of a stage: etp 1 x ep 4 x edp 1\n"
                       "schedule 1f1b, ZeRO 1, recompute none; micro-batches a step: 8, of the first data rank: 4\n\n"
                       "pp 0: layers 0, embedding\npp 1: layers 1-2, head\n\n"
                       "rank  pp  dp  tp  ep  experts "))
      << text;
  EXPECT_NE(text.find("\n   3   0   1   1   3     none "), std::string::npos) << text;  // layer 0 is dense
  EXPECT_NE(text.find("\n   7   1   1   1   3    48-63 "), std::string::npos) << text;
  const std::string svg = folder_ / "layout.svg";
  const auto json = nlohmann::json::parse(with({"--json", "--svg", svg, "-n", "16", "--parallel.stage_layers=[1, 2]"}));
  EXPECT_EQ(json["sizes"], nlohmann::json::parse(R"({"tp": 2, "dp": 4, "pp": 2, "ep": 4, "etp": 1, "edp": 2})"));
  ASSERT_EQ(json["layout"].size(), 16u);
  EXPECT_EQ(json["layout"][13]["edp"], 1);
  EXPECT_EQ(json["layout"][13]["stages"][0]["head"], true);
  EXPECT_GT(json["layout"][13]["sent_bytes"]["dispatch"].get<int64_t>(), 0);
  EXPECT_TRUE(read_text_file(svg).starts_with("<svg xmlns="));
  EXPECT_THROW(with({"-n", "6"}), Error);
  EXPECT_THROW(with({"--schedule"}), CLI::ParseError);
  EXPECT_THROW(with({"-n", "0"}), CLI::ParseError);
  EXPECT_THROW(run({"config", "show", path_, "-n", "2"}), Error);
}

// Ranks with more micro-batches, and with more experts, do more; together they do what one rank does.
TEST_F(ConfigCommand, RanksOfALayoutShareTheWork) {
  const auto flops = [&](const std::vector<std::string>& more) {
    std::vector<std::string> arguments = {"config",
                                          "show",
                                          path_,
                                          "--layout",
                                          "--json",
                                          "--model.num_hidden_layers=3",
                                          "--training.global_batch_size=14"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    double sum = 0;
    const nlohmann::json shown = nlohmann::json::parse(run(arguments));
    for (const auto& rank : shown["layout"]) sum += rank["product_flops"].get<double>();
    return sum;
  };
  const double one = flops({"--training.micro_batch_size=4"});
  for (const std::vector<std::string>& layout :
       std::vector<std::vector<std::string>>{{"-n", "12", "--parallel.tp=2", "--parallel.pp=2", "--parallel.ep=3"},
                                             {"-n", "3", "--parallel.ep=3"},
                                             {"-n", "8", "--parallel.tp=4", "--parallel.ep=2", "--parallel.etp=4"},
                                             {"-n", "4", "--parallel.pp=4", "--parallel.schedule=zero_bubble_v"}}) {
    std::vector<std::string> more = layout;
    more.push_back("--training.micro_batch_size=4");
    EXPECT_NEAR(flops(more), one, 1e-9 * one) << layout[1];
  }
}

// The picture of docs/parallelism.md is what the command there draws.
TEST_F(ConfigCommand, DrewThePictureOfTheDocs) {
  const std::string svg = folder_ / "meshes.svg";
  run({"config", "show", "examples/quickstart.yaml", "--layout", "-n", "12", "--svg", svg,
       "--model.path=examples/models/moe-10m", "--training.micro_batch_size=4", "--parallel.tp=2", "--parallel.pp=2",
       "--parallel.ep=3", "--parallel.stage_layers=[3, 1]"});
  EXPECT_EQ(read_text_file(svg), read_text_file("docs/pictures/meshes.svg"));
}

// What a file says and the run does not read is told.
TEST_F(ConfigCommand, PrintsNotes) {
  const std::string path = folder_.write(
      "plan.yaml", "model: {num_hidden_layers: 2, base_model_tp_plan: {layers.*.mlp.up_proj: colwise}}\n");
  EXPECT_NE(
      run({"config", "check", path}).find("\nnote: " + path + ": model.base_model_tp_plan: read; it decides nothing"),
      std::string::npos);
  EXPECT_EQ(nlohmann::json::parse(run({"config", "check", path, "--json"}))["notes"].size(), 1u);
}

TEST_F(ConfigCommand, Fails) {
  EXPECT_THROW(run({"config", "check", path_, "--training.stps=7"}), Error);
  EXPECT_THROW(run({"config", "check", path_, "stray"}), Error);
  EXPECT_THROW(run({"config", "show", "no-such-file.yaml"}), Error);
  EXPECT_THROW(run({"config"}), CLI::ParseError);
}

TEST(ConfigCommandHelp, Explains) {
  EXPECT_NE(run({"config", "help"}).find("optimizer"), std::string::npos);
  EXPECT_NE(run({"config", "help", "training.steps"}).find("train_iters"), std::string::npos);
  EXPECT_TRUE(run({"config", "help", "--markdown"}).starts_with("# Settings"));
  EXPECT_TRUE(run({"config", "help", "run", "--json"}).starts_with("{\"help\":"));
  EXPECT_THROW(run({"config", "help", "training.stps"}), Error);
}

}  // namespace
}  // namespace concerto

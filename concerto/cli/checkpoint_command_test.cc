#include "concerto/cli/checkpoint_command.h"

#include <gtest/gtest.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <nlohmann/json.hpp>
#include <sstream>

#include "concerto/base/test_errors.h"
#include "concerto/base/test_folder.h"
#include "concerto/checkpoint/hf_convert.h"
#include "concerto/checkpoint/test_layouts.h"
#include "concerto/cli/test_command.h"
#include "concerto/comm/local/local_world.h"

namespace concerto {
namespace {

using nlohmann::json;

// Runs `concerto checkpoint ARGUMENTS...` and returns what it printed.
std::string run(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), "checkpoint");
  return run_command(add_checkpoint_command, std::move(arguments));
}

std::vector<json> lines(const std::string& text) {
  std::vector<json> result;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) result.push_back(json::parse(line));
  return result;
}

std::string failure(ErrorCode code, const std::vector<std::string>& arguments) {
  return error_of(code, [&] { run(arguments); });
}

class CheckpointCommand : public testing::Test {
 protected:
  std::string at(const std::string& name) const { return folder_ / name; }
  const TestFolder folder_;
};

TEST_F(CheckpointCommand, LatestOfARunStandsForItsCheckpoint) {
  run({"import", "tests/golden/dense-tiny", "--output", at("run")});
  const json named = lines(run({"inspect", at("run") + "/latest", "--json"})).at(0);
  EXPECT_EQ(named["kind"], "checkpoint");
  EXPECT_EQ(named["path"], at("run") + "/checkpoint-0");
  EXPECT_EQ(lines(run({"verify", at("run") + "/latest", "--json"})).at(0)["ok"], true);
}

TEST_F(CheckpointCommand, InspectsAModelAndAFile) {
  const std::string model = "tests/golden/moe-tiny";
  const std::string table = run({"inspect", model});
  EXPECT_HAS(table, "tests/golden/moe-tiny (model)");
  EXPECT_HAS(table, "129 (F32 129)");
  const json summary = lines(run({"inspect", model, "--json"})).at(0);
  EXPECT_EQ(summary["kind"], "model");
  EXPECT_EQ(summary["tensors"], 129);
  EXPECT_EQ(summary["parameters"], parameter_count(load_model_config(model)));
  const auto tensors = lines(run({"inspect", model + "/model.safetensors", "--json", "--tensors"}));
  ASSERT_EQ(tensors.size(), 130u);
  EXPECT_EQ(tensors[0]["name"], "model.embed_tokens.weight");
  EXPECT_EQ(tensors[0]["shape"], (json{256, 64}));
  EXPECT_EQ(tensors[129]["kind"], "safetensors");
}

TEST_F(CheckpointCommand, ImportsInspectsVerifiesAndExports) {
  EXPECT_HAS(run({"import", "tests/golden/moe-tiny", "--output", at("run")}), "step 0");
  EXPECT_HAS(failure(ErrorCode::kIo, {"import", "tests/golden/moe-tiny", "--output", at("run")}), "exists already");
  EXPECT_HAS(run({"inspect", at("run")}), "1 checkpoints, 0 damaged, latest is step 0");
  const json info = lines(run({"inspect", at("run/checkpoint-0"), "--json"})).at(0);
  EXPECT_EQ(info["kind"], "checkpoint");
  EXPECT_EQ(info["step"], 0);
  EXPECT_EQ(info["weights_only"], true);
  EXPECT_EQ(info["parameters"], parameter_count(load_model_config("tests/golden/moe-tiny")));
  EXPECT_HAS(run({"inspect", at("run/checkpoint-0")}), "none, starts from zero");
  EXPECT_HAS(run({"inspect", at("run/checkpoint-0"), "--tensors", "--json"}), "\"expert\":15");
  for (const std::string& path : {at("run"), at("run/checkpoint-0"), std::string("tests/golden/moe-tiny")})
    EXPECT_EQ(lines(run({"verify", path, "--json"})).at(0)["ok"], true);

  write_file_atomic(at("tokenizer.model"), "pieces");
  run({"export", at("run"), "--output", at("f32"), "--dtype", "f32", "--tokenizer", folder_.path()});
  EXPECT_EQ(list_directory(at("f32")),
            (std::vector<std::string>{"config.json", "model.safetensors", "tokenizer.model"}));
  EXPECT_HAS(run({"verify", at("f32")}), "OK ");
  const json exported = lines(run({"export", at("run/checkpoint-0"), "--output", at("bf16"), "--json"})).at(0);
  EXPECT_EQ(exported["dtype"], "bf16");
  EXPECT_EQ(lines(run({"inspect", at("bf16"), "--json"})).at(0)["dtypes"], (json{{"BF16", 125}, {"F32", 4}}));
  run({"export", at("run"), "--output", at("shards"), "--shard-bytes", "300000"});
  EXPECT_EQ(lines(run({"inspect", at("shards"), "--json"})).at(0)["files"], 2);
  EXPECT_HAS(failure(ErrorCode::kIo, {"export", at("run"), "--output", at("bf16")}), "exists already");
  EXPECT_HAS(failure(ErrorCode::kUsage, {"export", at("run"), "--output", at("x"), "--tokenizer", at("run")}),
             "--tokenizer");
}

// A checkpoint of two tensor parallel ranks.
TEST_F(CheckpointCommand, ReadsAndReshardsACheckpointOfManyRanks) {
  const ModelConfig model = load_model_config("tests/golden/moe-tiny");
  run_local_ranks(2, [&](Communicator& world) {
    RankState state(model, {"tp2", {.tp = 2}}, world.rank());
    state.fill();
    CheckpointMeta meta;
    meta.step = 7;
    meta.model_config = model_config_json(model, "float32");
    SaveOptions options;
    options.world = &world;
    options.model = &model;
    save_checkpoint(at("run"), meta, state.tensors(), options);
  });
  const json info = lines(run({"inspect", at("run/checkpoint-7"), "--json"})).at(0);
  EXPECT_EQ(info["parameters"], parameter_count(model));
  EXPECT_EQ(info["files"], 4);
  EXPECT_GT(info["slices"], info["tensors"]);
  EXPECT_HAS(run({"inspect", at("run/checkpoint-7")}), fmt::format("4 ({} slices)", info["slices"].get<int>()));
  EXPECT_HAS(run({"inspect", at("run/checkpoint-7"), "--tensors"}),
             "weight.model.layers.0.mlp.down_proj.weight  in 2 slices");
  int cut = 0;
  for (const json& tensor : lines(run({"inspect", at("run/checkpoint-7"), "--tensors", "--json"}))) {
    if (tensor.value("name", "") != "weight.model.layers.0.mlp.down_proj.weight") continue;
    ++cut;
    EXPECT_EQ(tensor["shape"], (json{64, 128}));
    ASSERT_EQ(tensor["slices"].size(), 2u);
    EXPECT_EQ(tensor["slices"][1]["slice"], (json{{0, 64}, {64, 128}}));
    EXPECT_EQ(tensor["slices"][1]["file"], "weights-00002-of-00002.safetensors");
    EXPECT_FALSE(tensor.contains("hash"));
  }
  EXPECT_EQ(cut, 1);
  EXPECT_EQ(lines(run({"verify", at("run"), "--json"})).at(0)["ok"], true);

  const json resharded =
      lines(run({"reshard", at("run"), "--output", at("whole"), "--shard-bytes", "300000", "--json"})).at(0);
  EXPECT_EQ(resharded["checkpoint"], at("whole") + "/checkpoint-7");
  EXPECT_GT(resharded["files"], 4);
  EXPECT_HAS(run({"verify", at("whole")}), "OK ");
  EXPECT_HAS(run({"reshard", at("run/checkpoint-7"), "--output", at("again")}), "step 7, whole tensors in 2 files");
  EXPECT_HAS(failure(ErrorCode::kIo, {"reshard", at("run"), "--output", at("whole")}), "exists already");
  for (const char* from : {"run", "whole"})
    run({"export", at(from), "--output", at(std::string("hf-") + from), "--dtype", "f32"});
  EXPECT_EQ(read_text_file(at("hf-run/model.safetensors")), read_text_file(at("hf-whole/model.safetensors")));

  copy_file_synced(at("hf-run/model.safetensors"), at("run/checkpoint-7/stray.safetensors"));
  EXPECT_HAS(run({"verify", at("run/checkpoint-7")}), "stray.safetensors is not of this checkpoint and is not read");
  remove_tree(at("run/checkpoint-7/optimizer-00002-of-00002.safetensors"));
  EXPECT_HAS(failure(ErrorCode::kCheckpoint, {"verify", at("run/checkpoint-7")}),
             "optimizer-00002-of-00002.safetensors: is missing");
  EXPECT_HAS(failure(ErrorCode::kCheckpoint, {"inspect", at("run/checkpoint-7")}), "is missing");
  EXPECT_HAS(failure(ErrorCode::kCheckpoint, {"reshard", at("run/checkpoint-7"), "--output", at("x")}), "is missing");
  EXPECT_FALSE(path_exists(at("x")) || path_exists(at("x.concerto.tmp")));
}

TEST_F(CheckpointCommand, VerifyFindsDamage) {
  run({"import", "tests/golden/moe-tiny", "--output", at("run")});
  const std::string file = at("run/checkpoint-0/weights-00001-of-00001.safetensors");
  std::string text = read_text_file(file);
  text[text.size() / 2] ^= 1;
  write_file_atomic(file, text);
  EXPECT_HAS(failure(ErrorCode::kCheckpoint, {"verify", at("run/checkpoint-0")}), "is damaged");
  EXPECT_HAS(failure(ErrorCode::kCheckpoint, {"verify", at("run")}), "checkpoint-0: ");
  EXPECT_HAS(failure(ErrorCode::kCheckpoint, {"export", at("run"), "--output", at("x")}), "no whole checkpoint");
  EXPECT_HAS(failure(ErrorCode::kCheckpoint, {"export", at("run/checkpoint-0"), "--output", at("x")}), "is damaged");
  EXPECT_FALSE(path_exists(at("x")) || path_exists(at("x.concerto.tmp")));
  remove_tree(at("run/checkpoint-0/config.json"));
  EXPECT_HAS(run({"inspect", at("run")}), "DAMAGED");
}

TEST_F(CheckpointCommand, VerifyFindsValuesThatAreNoNumbers) {
  float x[2] = {1, NAN};
  SafetensorsWriter writer(at("m.safetensors"), {{"w", Shape{2}, DType::kF32}});
  writer.write(View(x, Shape{2}, DType::kF32));
  writer.finish();
  EXPECT_HAS(failure(ErrorCode::kModel, {"verify", at("m.safetensors")}), "tensor \"w\": 1 of 2 values are NaN");
}

TEST_F(CheckpointCommand, SaysWhatIsNoModel) {
  EXPECT_HAS(failure(ErrorCode::kIo, {"inspect", at("none")}), "no such file");
  EXPECT_HAS(failure(ErrorCode::kUsage, {"inspect", folder_.path()}), "neither a model folder");
  EXPECT_THROW(run({"export", folder_.path()}), CLI::ParseError);
  EXPECT_THROW(run({"export", folder_.path(), "--output", at("x"), "--dtype", "f64"}), CLI::ParseError);
  EXPECT_THROW(run({"export", folder_.path(), "--output", at("x"), "--shard-bytes", "0"}), CLI::ParseError);
  EXPECT_THROW(run({"reshard", folder_.path()}), CLI::ParseError);  // no --output
  EXPECT_THROW(run({"reshape", folder_.path()}), CLI::ParseError);
}

}  // namespace
}  // namespace concerto

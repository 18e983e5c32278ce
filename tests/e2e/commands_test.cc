// Every command as a user strings them together, from a text to an exported model, with --json: standard output holds
// JSON, an object or list a line, and nothing else.
#include <gtest/gtest.h>

#include <CLI/CLI.hpp>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>

#include "concerto/cli/program.h"
#include "tests/support/tiny_training.h"

namespace concerto::test {
namespace {

using nlohmann::json;

// "data tokenizer train" and so on: the commands below `app` that take --json.
void json_commands(const CLI::App& app, const std::string& name, std::set<std::string>& found) {
  for (const CLI::App* sub : app.get_subcommands([](const CLI::App*) { return true; })) {
    const std::string full = (name.empty() ? "" : name + " ") + sub->get_name();
    if (sub->get_option_no_throw("--json") != nullptr) found.insert(full);
    json_commands(*sub, full, found);
  }
}

std::vector<json> run_json(const std::string& command, const std::vector<std::string>& arguments) {
  std::vector<const char*> argv = {"concerto"};
  std::vector<std::string> words;
  for (size_t at = 0; at < command.size();) {
    const size_t end = std::min(command.find(' ', at), command.size());
    words.push_back(command.substr(at, end - at));
    at = end + 1;
  }
  words.insert(words.end(), arguments.begin(), arguments.end());
  words.push_back("--json");
  for (const std::string& word : words) argv.push_back(word.c_str());
  ::testing::internal::CaptureStdout();
  ::testing::internal::CaptureStderr();
  const int code = run_program(static_cast<int>(argv.size()), argv.data());
  const std::string out = ::testing::internal::GetCapturedStdout(), error = ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(code, 0) << command << ": " << error;
  std::vector<json> lines;
  for (size_t at = 0; at < out.size();) {
    const size_t end = std::min(out.find('\n', at), out.size());
    lines.push_back(json::parse(out.substr(at, end - at), nullptr, false));
    EXPECT_FALSE(lines.back().is_discarded()) << command << " printed: " << out.substr(at, end - at);
    at = end + 1;
  }
  EXPECT_FALSE(lines.empty()) << command;
  if (lines.empty()) lines.emplace_back();
  return lines;
}

constexpr const char* kModel = R"({"model_type": "ernie4_5_moe", "vocab_size": 320, "hidden_size": 16,
  "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
  "max_position_embeddings": 64, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 8,
  "moe_num_shared_experts": 1, "moe_layer_start_index": 1, "tie_word_embeddings": true})";

constexpr const char* kRun = R"(run: {{dir: "{0}/run", threads: 1}}
model: {{path: "{0}/model"}}
data: {{train: "{0}/data", valid: "{0}/data", tokenizer: "{0}/tokenizer"}}
training: {{steps: 2, global_batch_size: 2, micro_batch_size: 1, seq_length: 16, dtype: f32}}
optimizer: {{lr: 0.001, warmup_steps: 1}}
monitor: {{sample_prompt: "the", sample_tokens: 4}}
)";

TEST(Commands, WithJsonStandardOutputIsAllJson) {
  const Workplace work;
  const std::string here = work / ".", config = here + "/run.yaml", run = here + "/run";
  std::filesystem::create_directories(here + "/model");
  std::ofstream(here + "/model/config.json") << kModel;
  std::ofstream(config) << fmt::format(kRun, here);
  {
    std::ofstream text(here + "/text.txt");
    for (int i = 0; i < 200; ++i) text << "line " << i * 7919 << " of the small text that teaches a tokenizer\n";
  }
  std::set<std::string> done;
  const auto run_command = [&](const std::string& command, const std::vector<std::string>& arguments) {
    done.insert(command);
    return run_json(command, arguments);
  };
  const std::string tokenizer = here + "/tokenizer", data = here + "/data", trained = run + "/model";
  run_command("data tokenizer train", {"--input", here + "/text.txt", "--output", tokenizer, "--vocab-size", "320"});
  const json ids = run_command("data tokenizer encode", {"the text", "--tokenizer", tokenizer})[0];
  EXPECT_TRUE(ids.is_array() && !ids.empty()) << ids;
  EXPECT_TRUE(run_command("data tokenizer decode", {"5", "6", "--tokenizer", tokenizer})[0].is_string());
  run_command("data pack", {here + "/text.txt", "--split", "line", "--tokenizer", tokenizer, "--output", data});
  EXPECT_EQ(run_command("data inspect", {data, "--tokenizer", tokenizer, "--documents", "2"}).size(), 3u);
  run_command("config help", {"training.steps"});
  EXPECT_EQ(run_command("config check", {config})[0]["ok"], true);
  EXPECT_EQ(run_command("config show", {config})[0]["training"]["steps"], 2);
  EXPECT_EQ(run_command("train", {config})[0]["step"], 2);
  EXPECT_TRUE(run_command("eval", {config})[0]["loss"].is_number());
  run_command("generate", {"--model", trained, "--prompt", "the", "--max-tokens", "3", "--threads", "1"});
  EXPECT_EQ(run_command("verify", {"--golden", "tests/golden/moe-tiny", "--threads", "1"}).back()["ok"], true);
  EXPECT_EQ(run_command("checkpoint inspect", {run})[0]["step"], 2);
  run_command("checkpoint inspect", {run + "/latest", "--tensors"});
  run_command("checkpoint verify", {run});
  run_command("checkpoint export", {run, "--output", here + "/exported"});
  run_command("checkpoint import", {here + "/exported", "--output", here + "/imported"});
  run_command("bench step", {"--model", trained, "--batch", "1", "--seq", "8", "--steps", "1", "--threads", "1"});
  run_command("bench moe", {"--tokens", "8", "--experts", "2", "--top-k", "1", "--hidden", "16", "--width", "16",
                            "--seconds", "0", "--threads", "1"});

  CLI::App app;
  add_commands(app);
  std::set<std::string> all;
  json_commands(app, "", all);
  EXPECT_EQ(done, all);  // a new command belongs into this test
}

}  // namespace
}  // namespace concerto::test

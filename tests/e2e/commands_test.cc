// Every command as a user strings them together, from a text to an exported model, with --json: standard output holds
// JSON, an object or list a line, and nothing else.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <set>
#include <tuple>

#include "concerto/base/files.h"
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

// What a rival prints is not trusted: only JSON lines with a number that can be a rate.
TEST(Commands, ARivalThatGivesNoNumberIsAnError) {
  const auto bench = [](const std::string& rival) {
    const std::vector<const char*> argv = {"concerto", "bench",     "step",  "--model", "tests/golden/moe-tiny",
                                           "--batch",  "1",         "--seq", "8",       "--steps",
                                           "1",        "--threads", "1",     "--rival", rival.c_str()};
    ::testing::internal::CaptureStdout();
    ::testing::internal::CaptureStderr();
    const int code = run_program(static_cast<int>(argv.size()), argv.data());
    return std::tuple{code, ::testing::internal::GetCapturedStdout(), ::testing::internal::GetCapturedStderr()};
  };
  for (const char* output : {"", "12345", "fast", "[1, 2]", "{\"tokens_per_s\": \"12\"}", "{\"tokens_per_s\": null}",
                             "{\"tokens_per_s\": 0}", "{\"tokens_per_s\": -5}", "{\"tokens_per_s\": NaN}",
                             "{\"tokens_per_s\": 1e999}", "{\"tokens_per_s\": 12", "{\"rate\": 12}"}) {
    const auto [code, out, error] = bench(fmt::format("printf '%s\\n' '{}'", output));
    EXPECT_EQ(code, 2) << output;
    EXPECT_TRUE(error.starts_with("error (usage): --rival: ended with status 0 and no usable lines.")) << error;
    EXPECT_EQ(out.find("rival"), std::string::npos) << out;
  }
  const auto [failed, out, error] = bench("echo '{\"tokens_per_s\": 12}'; exit 3");
  EXPECT_EQ(failed, 2);
  EXPECT_TRUE(error.starts_with("error (usage): --rival: ended with status 3 and some usable lines.")) << error;
  const auto [killed, nothing, why] = bench("kill -9 $$");
  EXPECT_EQ(killed, 2);
  EXPECT_TRUE(why.starts_with("error (usage): --rival: ended with status 137 and no usable lines.")) << why;
  const auto [fine, text, none] =
      bench("echo warming up; echo '{\"tokens_per_s\": 12.5}'; echo '{\"tokens_per_s\": 7}'");
  EXPECT_EQ(fine, 0) << none;
  EXPECT_NE(text.find("rival     12 tokens/s, ratio "), std::string::npos) << text;
}

// A command in a process of its own, so that signals may end it.
struct Child {
  pid_t pid;
  int out, error;  // its streams, to read

  static Child start(
      const std::vector<std::string>& words, const std::function<void()>& before = [] {}) {
    int out[2], error[2];
    EXPECT_EQ(::pipe(out), 0);
    EXPECT_EQ(::pipe(error), 0);
    ::fcntl(out[1], F_SETPIPE_SZ, 4096);  // the least: a long text fills it
    const pid_t pid = ::fork();
    if (pid == 0) {
      ::dup2(out[1], STDOUT_FILENO);
      ::dup2(error[1], STDERR_FILENO);
      for (const int fd : {out[0], out[1], error[0], error[1]}) ::close(fd);
      before();
      std::vector<const char*> argv = {"concerto"};
      for (const std::string& word : words) argv.push_back(word.c_str());
      const int code = run_program(static_cast<int>(argv.size()), argv.data());
      std::fflush(nullptr);
      ::_exit(code);
    }
    ::close(out[1]);
    ::close(error[1]);
    return {pid, out[0], error[0]};
  }
  // The rest of a stream, or what comes up to `until`.
  static std::string read(int fd, const std::string& until = "") {
    std::string text;
    for (char c; (until.empty() || !text.ends_with(until)) && ::read(fd, &c, 1) == 1;) text += c;
    return text;
  }
  // The exit code, or minus the signal.
  int wait() const {
    int status = 0;
    EXPECT_EQ(::waitpid(pid, &status, 0), pid);
    ::close(out);
    ::close(error);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }
};

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
  EXPECT_EQ(run_command("launch", {config, "-n", "2", "--threads", "--run.dir=" + here + "/launched"})[0]["step"], 2);
  EXPECT_TRUE(run_command("eval", {config})[0]["loss"].is_number());
  run_command("generate", {"--model", trained, "--prompt", "the", "--max-tokens", "3", "--threads", "1"});
  EXPECT_EQ(run_command("verify", {"--golden", "tests/golden/moe-tiny", "--threads", "1"}).back()["ok"], true);
  EXPECT_EQ(run_command("checkpoint inspect", {run})[0]["step"], 2);
  run_command("checkpoint inspect", {run + "/latest", "--tensors"});
  run_command("checkpoint verify", {run});
  run_command("checkpoint export", {run, "--output", here + "/exported"});
  run_command("checkpoint reshard", {run, "--output", here + "/resharded"});
  run_command("checkpoint import", {here + "/exported", "--output", here + "/imported"});
  EXPECT_EQ(run_command("inspect load", {run, "--output", here + "/load.png"}).size(), 2u);  // a layer, the steps
  EXPECT_GT(run_command("inspect routing", {"--model", trained, "--ids", "1,2,3", "--threads", "1"}).size(), 5u);
  run_command("bench step", {"--model", trained, "--batch", "1", "--seq", "8", "--steps", "1", "--threads", "1"});
  run_command("bench moe", {"--tokens", "8", "--experts", "2", "--top-k", "1", "--hidden", "16", "--width", "16",
                            "--seconds", "0", "--threads", "1"});

  CLI::App app;
  add_commands(app);
  std::set<std::string> all;
  json_commands(app, "", all);
  EXPECT_EQ(done, all);  // a new command belongs into this test
}

class Stopped : public ::testing::Test {
 protected:
  Stopped() {
    std::filesystem::create_directories(work_ / "model");
    std::ofstream text(work_ / "text.txt");
    for (int i = 0; i < 200; ++i) text << "line " << i * 7919 << " of the small text that teaches a tokenizer\n";
    text.close();
    std::string model = kModel;
    model.replace(model.find(": 64"), 4, ": 65536");  // positions
    std::ofstream(work_ / "model/config.json") << model;
    std::ofstream(work_ / "run.yaml") << fmt::format(kRun, work_ / ".");
    run_json("data tokenizer train",
             {"--input", work_ / "text.txt", "--output", work_ / "tokenizer", "--vocab-size", "320"});
    run_json("data pack",
             {work_ / "text.txt", "--split", "line", "--tokenizer", work_ / "tokenizer", "--output", work_ / "data"});
  }
  Workplace work_;
};

// Wherever the preparation of a run is: it ends at once, says so, and leaves a folder that nothing is bound to.
TEST_F(Stopped, WhileTheRunIsPrepared) {
  for (const int signal : {SIGINT, SIGTERM})
    for (const char* file : {"tokenizer.model", "data.idx", "data.bin"}) {
      const Child child = Child::start({"train", work_ / "run.yaml"}, [&] {
        set_io_fault_for_tests([=](std::string_view, const std::string& path) {
          if (path.ends_with(file)) ::raise(signal);
          return 0;
        });
      });
      EXPECT_EQ(Child::read(child.error), "Stopped while the run was prepared: no step was made, nothing is changed.\n")
          << file;
      EXPECT_EQ(child.wait(), 128 + signal) << file;
      for (const char* name : {"config.yaml", "metrics.jsonl", "latest"})
        EXPECT_FALSE(path_exists(work_ / "run/" + name)) << name;
    }
  EXPECT_EQ(run_json("train", {work_ / "run.yaml"})[0]["step"], 2);
}

// The sample is the last thing of a run: all is saved, so a signal only ends the text.
TEST_F(Stopped, WhileTheSampleIsShown) {
  std::string prompt;
  while (prompt.size() < 10000) prompt += "the text ";
  for (const int signal : {SIGINT, SIGTERM}) {
    const std::string run = work_ / fmt::format("sampled-{}", signal);
    const Child child =
        Child::start({"train", work_ / "run.yaml", "--run.dir=" + run, "--monitor.sample_prompt=" + prompt});
    const std::string before = Child::read(child.out, "\nsample    the");
    EXPECT_TRUE(before.ends_with("sample    the")) << before;
    ::kill(child.pid, signal);  // while it waits for the pipe, which the prompt has filled
    const std::string text = Child::read(child.out);
    EXPECT_TRUE(text.ends_with("the text  ... (cut off)\n"))
        << text.substr(text.size() - std::min<size_t>(text.size(), 99));
    EXPECT_EQ(Child::read(child.error), "");
    EXPECT_EQ(child.wait(), 0);
    EXPECT_TRUE(path_exists(run + "/checkpoint-2/manifest.json"));
    EXPECT_TRUE(path_exists(run + "/model/config.json"));
  }
}

}  // namespace
}  // namespace concerto::test

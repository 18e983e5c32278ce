// What every command has in common: the form of errors, their exit codes, --json, and output that nobody takes.
#include "concerto/cli/program.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "concerto/base/error.h"
#include "concerto/base/test_folder.h"
#include "concerto/cli/backends.h"

namespace concerto {
namespace {

struct Outcome {
  int code;
  std::string out, error;
};

Outcome run(std::vector<const char*> arguments) {
  arguments.insert(arguments.begin(), "concerto");
  testing::internal::CaptureStdout();
  testing::internal::CaptureStderr();
  const int code = run_program(static_cast<int>(arguments.size()), arguments.data());
  return {code, testing::internal::GetCapturedStdout(), testing::internal::GetCapturedStderr()};
}

TEST(Program, HelpAndVersionAreNoErrors) {
  EXPECT_EQ(run({"--help"}).code, 0);
  EXPECT_EQ(run({"train", "--help"}).code, 0);
  const Outcome version = run({"--version"});
  EXPECT_EQ(version.code, 0);
  EXPECT_TRUE(version.out.starts_with("concerto ")) << version.out;
}

TEST(Program, SaysWhatIsWrongWithACommandLine) {
  const std::vector<std::pair<std::vector<const char*>, std::string>> cases = {
      {{}, "error (usage): concerto: a command is wanted: train, launch, eval,"},
      {{"trian"}, "error (usage): concerto: there is no command 'trian'. Did you mean train?\n"},
      {{"data"},
       "error (usage): concerto data: a command is wanted: tokenizer, pack, inspect. Run `concerto data --help`.\n"},
      {{"train"}, "error (usage): concerto train: CONFIG is required. Run `concerto train --help`.\n"},
      {{"train", "a.yaml", "--bogus"}, "error (usage): --bogus: "},
      {{"generate", "--model", "m", "--promt", "x"},
       "error (usage): concerto generate: there is no option --promt. Did you mean --prompt?\n"},
      {{"generate", "--model", "m", "--promt=x"}, "Did you mean --prompt?\n"},
      {{"generate", "--model", "m", "--prompt", "x", "y"},
       "there is no place for 'y'. Run `concerto generate --help`.\n"},
      {{"generate", "--model", "m", "--prompt", "x", "--max-tokens", "0"},
       "error (usage): concerto generate: --max-tokens: 0 is no whole number from 1 to "},
      {{"generate", "--model", "m", "--prompt", "x", "--max-tokens", "9223372036854775807"},
       "is no whole number from 1 to "},
      {{"generate", "--model", "m", "--prompt", "x", "--temperature", "nan"},
       "--temperature: nan is no number from 0 to "},
      {{"generate", "--model", "m", "--prompt", "x", "--top-p", "1.5"}, "--top-p: 1.5 is no number from 0 to 1"},
      {{"generate", "--model", "m", "--prompt", "x", "--threads", "100000"},
       "--threads: 100000 is no whole number from 0 to "},
      {{"bench", "step", "--model", "m", "--batch", "1x"}, "--batch: 1x is no whole number from 1 to "},
      {{"data", "pack", "x", "--tokenizer", "t", "--output", ""}, "--output: '' names no file"},
      {{"data", "pack", "x", "--tokenizer", "t", "--output", "a/"}, "--output: 'a/' names no file"},
      {{"checkpoint", "export", "x", "--output", ""}, "--output: an empty name"},
      {{"eval", "--model", "m", "--data", "d", "--bogus=3"}, "error (usage): --bogus=3: "},
      {{"eval", "--model", "m", "--data", "d", "--max-batches", "-1"}, "--max-batches: -1 is no whole number"},
  };
  for (const auto& [arguments, text] : cases) {
    const Outcome o = run(arguments);
    EXPECT_EQ(o.code, 2) << text;
    EXPECT_TRUE(o.error.starts_with("error (usage): ")) << o.error;
    EXPECT_NE(o.error.find(text), std::string::npos) << o.error;
    EXPECT_EQ(o.out, "");
  }
}

TEST(Program, JsonErrorsAreObjects) {
  const Outcome o = run({"train", "no-such-file.yaml", "--json"});
  EXPECT_EQ(o.code, 3);
  EXPECT_TRUE(o.error.starts_with("error (config): no-such-file.yaml: ")) << o.error;
  const auto line = nlohmann::json::parse(o.out);
  EXPECT_EQ(line["error"], "config");
  EXPECT_EQ(line["where"], "no-such-file.yaml");
  EXPECT_FALSE(line["what"].get<std::string>().empty());
  EXPECT_FALSE(line["fix"].get<std::string>().empty());
}

TEST(Program, AGpuIsSaidToBePlanned) {
  for (const char* name : {"cuda", "gpu", "cuda:1"}) try {
      backend_by_name(name);
      ADD_FAILURE() << name;
    } catch (const Error& e) {
      EXPECT_EQ(e.code, ErrorCode::kUnsupported);
      EXPECT_STREQ(e.what(), "backend: cuda is planned, not built. Use cpu or ref.");
    }
  try {
    backend_by_name("cpuu");
    ADD_FAILURE();
  } catch (const Error& e) {
    EXPECT_STREQ(e.what(), "backend: 'cpuu' is not a backend. Use cpu or ref.");
  }
}

// People name a run, a checkpoint or a data folder where a model is wanted.
TEST(Program, SaysHowToGetAModelFolder) {
  namespace fs = std::filesystem;
  const TestFolder folder;
  const fs::path dir = folder.path();
  fs::create_directories(dir / "run/checkpoint-3");
  std::ofstream(dir / "run/checkpoint-3/manifest.json") << "{}";
  std::ofstream(dir / "run/checkpoint-3/config.json") << "{}";
  const std::string run_dir = (dir / "run").string(), checkpoint = run_dir + "/checkpoint-3", data = dir.string(),
                    none = data + "/none";
  for (const auto& [path, text] : {std::pair{run_dir, "concerto checkpoint export " + run_dir + " --output DIR"},
                                   {checkpoint, "concerto checkpoint export " + checkpoint + " --output DIR"},
                                   {data, std::string("holds no config.json")},
                                   {none, std::string("there is no such folder")}}) {
    for (const Outcome& o : {run({"generate", "--model", path.c_str(), "--prompt", "x"}),
                             run({"eval", "--model", path.c_str(), "--data", "x"})}) {
      EXPECT_EQ(o.code, 5);
      EXPECT_TRUE(o.error.starts_with("error (model): " + path + ": ")) << o.error;
      EXPECT_NE(o.error.find(text), std::string::npos) << o.error;
    }
  }
}

TEST(Program, AClosedStreamDoesNotGiveItsNumberToAFile) {
  std::fflush(stdout);
  const int saved = ::dup(STDOUT_FILENO);
  ::close(STDOUT_FILENO);
  hold_standard_streams();
  const int file = ::open("/dev/null", O_WRONLY);
  const auto written = ::write(STDOUT_FILENO, "x", 1);
  ::dup2(saved, STDOUT_FILENO);
  ::close(saved);
  ::close(file);
  EXPECT_GT(file, STDERR_FILENO);
  EXPECT_EQ(written, -1);
}

// Results that nobody got are no success.
TEST(Program, StandardOutputThatTakesNothingIsAnError) {
  int gone[2];
  ASSERT_EQ(::pipe(gone), 0);
  ::close(gone[0]);
  ::signal(SIGPIPE, SIG_IGN);  // as train does
  struct Sink {
    int fd;
    const char* error;
  };
  const Sink sinks[] = {{::open("/dev/full", O_WRONLY), "No space left on device. Free space on the disk"},
                        {gone[1], "Broken pipe. Whoever read it is gone: send it to a file."},
                        {::open("/dev/null", O_RDONLY), "Bad file descriptor. It is closed: send it to a file."}};
  for (const Sink& sink : sinks)
    for (const std::vector<const char*>& arguments :
         std::vector<std::vector<const char*>>{{"concerto", "config", "help"}, {"concerto", "--help"}}) {
      ASSERT_GE(sink.fd, 0);
      std::fflush(stdout);
      testing::internal::CaptureStderr();
      const int saved = ::dup(STDOUT_FILENO);
      ::dup2(sink.fd, STDOUT_FILENO);
      const int code = run_program(static_cast<int>(arguments.size()), arguments.data());
      ::dup2(saved, STDOUT_FILENO);
      std::clearerr(stdout);
      ::close(saved);
      const std::string error = testing::internal::GetCapturedStderr();
      EXPECT_EQ(code, 7);
      EXPECT_TRUE(error.starts_with("error (io): standard output: cannot be written: ")) << error;
      EXPECT_NE(error.find(sink.error), std::string::npos) << error;
    }
  for (const Sink& sink : sinks) ::close(sink.fd);
  ::signal(SIGPIPE, SIG_DFL);
}

}  // namespace
}  // namespace concerto

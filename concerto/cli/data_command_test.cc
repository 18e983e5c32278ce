#include "concerto/cli/data_command.h"

#include <gtest/gtest.h>

#include <CLI/CLI.hpp>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "concerto/base/error.h"
#include "concerto/base/test_folder.h"

namespace concerto {
namespace {

namespace fs = std::filesystem;

class DataCommand : public testing::Test {
 protected:
  void SetUp() override {
    std::ofstream text(path("text.txt"));
    for (int i = 0; i < 60; ++i) text << "a line of English number " << i * 7 << "\n一行中文，第" << i << "行\n\n";
  }
  std::string path(const std::string& name) const { return folder_ / name; }
  void write(const std::string& name, const std::string& content) const { folder_.write(name, content); }

  // What the command prints.
  static std::string run(std::vector<std::string> arguments) {
    CLI::App app;
    add_data_command(app);
    arguments.insert(arguments.begin(), "data");
    std::reverse(arguments.begin(), arguments.end());
    testing::internal::CaptureStdout();
    testing::internal::CaptureStderr();
    try {
      app.parse(arguments);
    } catch (...) {
      testing::internal::GetCapturedStdout();
      testing::internal::GetCapturedStderr();
      throw;
    }
    std::fflush(stdout);
    testing::internal::GetCapturedStderr();
    return testing::internal::GetCapturedStdout();
  }
  static nlohmann::json run_json(std::vector<std::string> arguments) {
    arguments.push_back("--json");
    const std::string text = run(std::move(arguments));
    return nlohmann::json::parse(text.substr(0, text.find('\n')));
  }
  void train() {
    run({"tokenizer", "train", "--input", path("text.txt"), "--vocab-size", "400", "--output", path("model")});
  }

  const TestFolder folder_;
};

TEST_F(DataCommand, TrainsATokenizerThatEncodesAndDecodes) {
  const auto trained =
      run_json({"tokenizer", "train", "--input", path("text.txt"), "--vocab-size", "400", "--output", path("model")});
  EXPECT_EQ(trained["vocab_size"], 400);
  EXPECT_TRUE(fs::exists(path("model/tokenizer.json")));
  const auto ids = run_json({"tokenizer", "encode", "English 中文", "--tokenizer", path("model")});
  ASSERT_TRUE(ids.is_array());
  std::vector<std::string> decode = {"tokenizer", "decode", "--tokenizer", path("model")};
  for (const auto& id : ids) decode.push_back(std::to_string(id.get<int>()));
  EXPECT_EQ(run_json(decode), "English 中文");
  EXPECT_EQ(run(decode), "English 中文\n");
  EXPECT_EQ(run({"tokenizer", "decode", "2", "--tokenizer", path("model")}), "\n");
  EXPECT_EQ(run({"tokenizer", "decode", "2", "--special", "--tokenizer", path("model")}), "</s>\n");
  EXPECT_THROW(run({"tokenizer", "decode", "400", "--tokenizer", path("model")}), Error);
}

TEST_F(DataCommand, PacksAndInspects) {
  train();
  const auto packed = run_json(
      {"pack", path("text.txt"), "--split", "paragraph", "--tokenizer", path("model"), "--output", path("out")});
  EXPECT_EQ(packed["documents"], 60);
  EXPECT_EQ(packed["mask"], false);
  EXPECT_EQ(packed["bytes"], fs::file_size(path("text.txt")));
  const auto seen = run_json({"inspect", path("out"), "--tokenizer", path("model"), "--documents", "2"});
  EXPECT_EQ(seen["documents"], 60);
  EXPECT_EQ(seen["tokens"], packed["tokens"]);
  int64_t sum = 0;
  for (const auto& bucket : seen["lengths"]) sum += bucket["documents"].get<int64_t>();
  EXPECT_EQ(sum, 60);
  const std::string text = run({"inspect", path("out"), "--tokenizer", path("model"), "--documents", "1"});
  EXPECT_NE(text.find("60 documents"), std::string::npos);
  EXPECT_NE(text.find("a line of English number 0\n一行中文，第0行</s>"), std::string::npos);
  EXPECT_EQ(text.find("number 7\n"), std::string::npos);
}

TEST_F(DataCommand, PacksConversationsWithTheirMask) {
  train();
  write("chat.jsonl", "{\"src\": [\"hi\"], \"tgt\": [\"ho\"]}\n");
  const auto packed = run_json({"pack", path("chat.jsonl"), "--tokenizer", path("model"), "--output", path("chat")});
  EXPECT_EQ(packed["mask"], true);
  EXPECT_TRUE(fs::exists(path("chat.lsm")));
  EXPECT_EQ(run_json({"inspect", path("chat")})["trained_tokens"], packed["trained_tokens"]);
  EXPECT_LT(packed["trained_tokens"], packed["tokens"]);
}

TEST_F(DataCommand, RefusesWhatItCannotRead) {
  train();
  write("bad.jsonl", "{\"text\": \"fine\"}\n{\"text\"\n");
  try {
    run({"pack", path("bad.jsonl"), "--tokenizer", path("model"), "--output", path("bad")});
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_EQ(error.code, ErrorCode::kData);
    EXPECT_NE(std::string(error.what()).find("bad.jsonl:2"), std::string::npos);
  }
  EXPECT_FALSE(fs::exists(path("bad.idx")));
  EXPECT_THROW(run({"pack", path("text.txt"), "--split", "word", "--tokenizer", path("model"), "--output", path("x")}),
               CLI::ParseError);
  EXPECT_THROW(run({"pack", "--tokenizer", path("model")}), CLI::ParseError);
  EXPECT_THROW(run({"inspect", path("missing")}), Error);
}

}  // namespace
}  // namespace concerto

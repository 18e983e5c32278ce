#include "concerto/base/json.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

namespace concerto {
namespace {

std::string failure(const std::string& text, int max_depth = 64) {
  try {
    parse_json(text, ErrorCode::kModel, "file.json", max_depth);
  } catch (const Error& e) {
    EXPECT_EQ(e.code, ErrorCode::kModel);
    EXPECT_EQ(e.where, "file.json");
    return e.problem;
  }
  return "";
}

TEST(Json, ReadsWhatIsValid) {
  const auto json =
      parse_json(R"({"a": [1, -2, 0.1], "b": {"a": null}, "c": {"a": "\u00e9"}})", ErrorCode::kModel, "x");
  EXPECT_EQ(json["a"][1], -2);
  EXPECT_EQ(json["c"]["a"], "é");
}

TEST(Json, RefusesBrokenText) {
  for (const char* bad : {"", "{", "[1,]", "{\"a\" 1}", "nul", "\"\xff\"", "1 2", "{\"a\": \"\x01\"}"})
    EXPECT_NE(failure(bad).find("not valid JSON"), std::string::npos) << bad;
}

TEST(Json, MessageSaysWhereWithoutTheLibrarysTags) {
  EXPECT_TRUE(failure("{\"a\": }").starts_with("not valid JSON: column 7: ")) << failure("{\"a\": }");
  EXPECT_TRUE(failure("{\n\"a\": }").starts_with("not valid JSON: line 2, column 6: ")) << failure("{\n\"a\": }");
  EXPECT_EQ(failure("{").find("json.exception"), std::string::npos);
}

TEST(Json, MessageIsShortAndPrintable) {
  const std::string message = failure("[" + std::string(100000, 'x'));
  EXPECT_LT(message.size(), 300u);
  for (char c : failure("\"\xff\x01")) EXPECT_TRUE(c >= 0x20 && c < 0x7f);
}

TEST(Json, RefusesANameGivenTwice) {
  EXPECT_NE(failure(R"({"a": 1, "b": {"c": 1}, "a": 2})").find("\"a\" is given twice"), std::string::npos);
  EXPECT_NE(failure(R"([{"a": 1}, {"b": {"c": 1, "c": 1}}])").find("\"c\" is given twice"), std::string::npos);
  EXPECT_EQ(failure(R"([{"a": 1}, {"a": 1}, {"b": {"b": {"b": 2}}}])"), "");
}

TEST(Json, RefusesDeepNesting) {
  EXPECT_EQ(failure("[[[[1]]]]", 4), "");
  EXPECT_NE(failure("[[[[[1]]]]]", 4).find("deeper than 4"), std::string::npos);
  EXPECT_NE(failure(std::string(1 << 20, '[')).find("deeper"), std::string::npos);
}

TEST(Json, Quotes) { EXPECT_EQ(json_quote("a\"\n\xff"), "\"a\\\"\\n\xef\xbf\xbd\""); }

}  // namespace
}  // namespace concerto

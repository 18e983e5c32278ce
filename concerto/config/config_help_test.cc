#include <gtest/gtest.h>

#include <fstream>
#include <iterator>

#include "concerto/base/test_errors.h"
#include "concerto/config/model_fields.h"
#include "concerto/config/run_config.h"
#include "concerto/config/run_fields.h"

namespace concerto {
namespace {

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

TEST(ConfigMarkdown, IsWhatDocsConfigMdHolds) {
  std::ifstream in("docs/config.md");
  const std::string text{std::istreambuf_iterator<char>(in), {}};
  EXPECT_TRUE(text == config_markdown()) << "docs/config.md is stale: concerto config help --markdown > docs/config.md";
}

TEST(ConfigMarkdown, NamesEverySettingAndRule) {
  const std::string text = config_markdown();
  for (const auto& field : run_fields()) EXPECT_TRUE(has(text, "| `" + field.name + "` |")) << field.key();
  for (const auto& field : model_fields()) EXPECT_TRUE(has(text, "| `" + field.name + "` |")) << field.key();
  for (const auto& rule : run_rules()) EXPECT_TRUE(has(text, rule.text)) << rule.text;
  for (const auto& rule : model_rules()) EXPECT_TRUE(has(text, rule.text)) << rule.text;
}

TEST(ConfigHelp, ExplainsSectionsAndSettings) {
  for (const SectionInfo& section : run_sections()) {
    EXPECT_TRUE(has(config_help(""), section.name));
    EXPECT_TRUE(has(config_help(section.name), section.name + ": " + section.help));
  }
  EXPECT_TRUE(has(config_help("training"), "training.seq_length"));
  EXPECT_TRUE(has(config_help("optimizer.wsd_decay"), "one_minus_sqrt: r = 1 - sqrt(q)"));
  EXPECT_TRUE(has(config_help("lr"), "range:   0 <= x"));
  EXPECT_TRUE(has(config_help("train_iters"), "training.steps"));
  EXPECT_TRUE(has(config_help("backend"), "cpu | ref | cuda"));
  EXPECT_TRUE(has(config_help("model.moe_k"), "num_experts_per_tok"));
  EXPECT_TRUE(has(error_of(ErrorCode::kUsage, [] { config_help("trainng"); }), "Did you mean training?"));
}

}  // namespace
}  // namespace concerto

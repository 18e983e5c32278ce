// What a Hugging Face folder says about its tokenizer beside the SentencePiece model: added tokens, the names of
// special ones, the chat template.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace concerto {

struct AddedToken {
  std::string text;
  int32_t id = -1;  // -1: not given, the model knows it
  bool special = false, lstrip = false, rstrip = false;
};

// What a folder says of its tokenizer, beside tokenizer.model.
inline constexpr const char* kTokenizerConfigFiles[] = {"tokenizer_config.json", "special_tokens_map.json",
                                                        "added_tokens.json", "tokenizer.json", "chat_template.jinja"};

struct TokenizerConfig {
  std::vector<AddedToken> added;
  std::map<std::string, std::string> names;  // "eos_token" -> "</s>"
  std::string chat_template;                 // Jinja text; empty: none
  std::map<std::string, std::string> files;  // every tokenizer file of the folder but the model: name -> content
};

// Error(kData) names the file and what is wrong in it.
TokenizerConfig read_tokenizer_config(const std::string& folder);
// tokenizer_config.json and special_tokens_map.json for a model that has none.
std::map<std::string, std::string> default_tokenizer_files(const std::map<std::string, std::string>& names,
                                                           const std::vector<AddedToken>& special,
                                                           const std::string& chat_template, bool add_prefix_space);

}  // namespace concerto

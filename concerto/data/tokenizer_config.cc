#include "concerto/data/tokenizer_config.h"

#include <nlohmann/json.hpp>

#include "concerto/base/files.h"
#include "concerto/base/json.h"

namespace concerto {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

constexpr int64_t kMaxId = 1 << 24;

[[noreturn]] void fail(const std::string& file, const std::string& what) {
  throw Error(ErrorCode::kData, file, what, "Copy the folder again, or correct the file");
}

json parse_object(const std::string& file, const std::string& text) {
  json value = parse_json(text, ErrorCode::kData, file);
  if (!value.is_object()) fail(file, "not a JSON object");
  return value;
}

int32_t checked_id(const std::string& file, const std::string& token, int64_t id) {
  if (id < 0 || id >= kMaxId) fail(file, fmt::format("token '{}' has the id {}", token, id));
  return static_cast<int32_t>(id);
}

bool flag(const json& object, const char* key) {
  const auto it = object.find(key);
  return it != object.end() && it->is_boolean() && it->get<bool>();
}

// A token is written as its text or as an object with a `content`.
std::string token_text(const json& value) {
  if (value.is_string()) return value.get<std::string>();
  if (value.is_object() && value.contains("content") && value["content"].is_string())
    return value["content"].get<std::string>();
  return {};
}

AddedToken added_token(const std::string& file, const json& value, int64_t id) {
  AddedToken token;
  token.text = token_text(value);
  if (token.text.empty()) fail(file, fmt::format("the added token {} has no content", id));
  token.id = checked_id(file, token.text, id);
  if (value.is_object()) {
    token.special = flag(value, "special");
    token.lstrip = flag(value, "lstrip");
    token.rstrip = flag(value, "rstrip");
    if (flag(value, "single_word"))
      fail(file, fmt::format("the added token '{}' is single_word, which is not supported", token.text));
  }
  return token;
}

void read_names(const json& object, TokenizerConfig& config) {
  for (const auto& [key, value] : object.items()) {
    if (key.ends_with("_token") && !key.starts_with("add_")) {
      if (const std::string text = token_text(value); !text.empty()) config.names[key] = text;
    } else if ((key == "additional_special_tokens" || key == "extra_special_tokens") && value.is_array()) {
      for (const auto& item : value)
        if (std::string text = token_text(item); !text.empty())
          config.added.push_back({.text = std::move(text), .special = true});
    }
  }
}

}  // namespace

TokenizerConfig read_tokenizer_config(const std::string& folder) {
  TokenizerConfig config;
  for (const char* name : kTokenizerConfigFiles) {
    const std::string path = folder + "/" + name;
    if (path_exists(path)) config.files[name] = read_text_file(path);
  }
  if (const auto it = config.files.find("added_tokens.json"); it != config.files.end()) {
    const std::string file = folder + "/added_tokens.json";
    const json object = parse_object(file, it->second);
    for (const auto& [text, id] : object.items()) {
      if (text.empty()) fail(file, "a token without text");  // it would match everywhere
      if (!id.is_number_integer()) fail(file, fmt::format("the id of '{}' is no integer", text));
      config.added.push_back({.text = text, .id = checked_id(file, text, id.get<int64_t>())});
    }
  }
  if (const auto it = config.files.find("special_tokens_map.json"); it != config.files.end())
    read_names(parse_object(folder + "/special_tokens_map.json", it->second), config);
  if (const auto it = config.files.find("tokenizer_config.json"); it != config.files.end()) {
    const std::string file = folder + "/tokenizer_config.json";
    const json object = parse_object(file, it->second);
    read_names(object, config);
    if (const auto added = object.find("added_tokens_decoder"); added != object.end()) {
      if (!added->is_object()) fail(file, "added_tokens_decoder is no object");
      for (const auto& [key, value] : added->items()) {
        if (key.empty() || key.size() > 9 || key.find_first_not_of("0123456789") != std::string::npos)
          fail(file, fmt::format("added_tokens_decoder has the key '{}', which is no token id", key));
        config.added.push_back(added_token(file, value, std::stol(key)));
      }
    }
    if (const auto text = object.find("chat_template"); text != object.end() && text->is_string())
      config.chat_template = text->get<std::string>();
  }
  if (const auto it = config.files.find("chat_template.jinja"); it != config.files.end())
    config.chat_template = it->second;
  for (const auto& [key, text] : config.names) config.added.push_back({.text = text, .special = true});
  return config;
}

std::map<std::string, std::string> default_tokenizer_files(const std::map<std::string, std::string>& names,
                                                           const std::vector<AddedToken>& special,
                                                           const std::string& chat_template, bool add_prefix_space) {
  ordered_json config, map, decoder = ordered_json::object();
  for (const auto& token : special)
    decoder[std::to_string(token.id)] = {{"content", token.text}, {"lstrip", false},      {"normalized", false},
                                         {"rstrip", false},       {"single_word", false}, {"special", true}};
  config["added_tokens_decoder"] = std::move(decoder);
  config["add_prefix_space"] = add_prefix_space;
  config["clean_up_tokenization_spaces"] = false;
  for (const auto& [key, text] : names) map[key] = config[key] = text;
  config["model_max_length"] = 1e30;
  config["tokenizer_class"] = "PreTrainedTokenizerFast";
  if (!chat_template.empty()) config["chat_template"] = chat_template;
  return {{"tokenizer_config.json", config.dump(2) + "\n"}, {"special_tokens_map.json", map.dump(2) + "\n"}};
}

}  // namespace concerto

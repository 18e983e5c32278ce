#include "concerto/data/records.h"

#include <nlohmann/json.hpp>

#include "concerto/base/json.h"

namespace concerto {
namespace {

using nlohmann::json;

class Reader {
 public:
  Reader(const json& object, const std::string& where) : object_(object), where_(where) {}

  [[noreturn]] void fail(const std::string& what) const {
    throw Error(ErrorCode::kData, where_, what,
                "Correct or remove the line; the kinds of records: concerto data pack --help");
  }
  bool has(const char* key) const { return object_.contains(key) && !object_[key].is_null(); }
  std::string text(const char* key) const {
    if (!has(key)) return {};
    if (!object_[key].is_string()) fail(fmt::format("'{}' is no string", key));
    return object_[key].get<std::string>();
  }
  std::vector<std::string> texts(const char* key) const {
    const json& value = object_[key];
    if (value.is_string()) return {value.get<std::string>()};
    if (!value.is_array()) fail(fmt::format("'{}' is neither a string nor a list", key));
    std::vector<std::string> list;
    for (const auto& item : value) {
      if (!item.is_string()) fail(fmt::format("'{}' holds something that is no string", key));
      list.push_back(item.get<std::string>());
    }
    return list;
  }
  bool flag(const char* key, bool otherwise) const { return has(key) ? flag(object_[key], key) : otherwise; }
  bool flag(const json& value, const char* key) const {
    if (value.is_boolean()) return value.get<bool>();
    if (value.is_number_integer() && (value == 0 || value == 1)) return value == 1;
    fail(fmt::format("'{}' is neither 0 nor 1", key));
  }
  const std::string& where() const { return where_; }
  const json& operator[](const char* key) const { return object_[key]; }

 private:
  const json& object_;
  const std::string& where_;
};

Record ernie_record(const Reader& in) {
  Record record{.conversation = true, .system = in.text("system")};
  auto prompts = in.texts("src");
  const auto answers = in.texts("tgt");
  if (in.flag("is_system", false)) {
    if (prompts.empty()) in.fail("'is_system' is set, but 'src' is empty");
    record.system = prompts.front();
    prompts.erase(prompts.begin());
  }
  if (prompts.size() != answers.size() || answers.empty())
    in.fail(fmt::format("{} prompts in 'src', {} answers in 'tgt'", prompts.size(), answers.size()));
  for (size_t i = 0; i < answers.size(); ++i) record.turns.push_back({std::move(prompts[i]), answers[i], true});
  if (in.has("label")) {
    if (!in["label"].is_array() || in["label"].size() != answers.size())
      in.fail("'label' is not a list of one number an answer");
    for (size_t i = 0; i < answers.size(); ++i) record.turns[i].trained = in.flag(in["label"][i], "label");
  }
  return record;
}

Record alpaca_record(const Reader& in) {
  Record record{.conversation = true, .system = in.text("system")};
  if (in.has("history")) {
    if (!in["history"].is_array()) in.fail("'history' is no list");
    for (const auto& pair : in["history"]) {
      if (!pair.is_array() || pair.size() != 2 || !pair[0].is_string() || !pair[1].is_string())
        in.fail("'history' holds something that is no pair of strings");
      record.turns.push_back({pair[0].get<std::string>(), pair[1].get<std::string>(), true});
    }
  }
  const std::string input = in.text("input");
  record.turns.push_back({in.text("instruction") + (input.empty() ? "" : "\n" + input), in.text("output"), true});
  return record;
}

Record message_record(const Reader& in) {
  Record record{.conversation = true};
  if (!in["messages"].is_array()) in.fail("'messages' is no list");
  bool asked = false;
  for (const auto& item : in["messages"]) {
    if (!item.is_object()) in.fail("'messages' holds something that is no object");
    const Reader message(item, in.where());
    const std::string role = message.text("role"), content = message.text("content");
    if (role == "system" && record.turns.empty()) {
      record.system = content;
    } else if (role == "user" && !asked) {
      record.turns.push_back({content, "", false});
      asked = true;
    } else if (role == "assistant" && asked) {
      record.turns.back().answer = content;
      record.turns.back().trained = message.flag("label", true);
      asked = false;
    } else {
      in.fail(
          fmt::format("a message of role '{}' at this place; wanted: system?, then user and assistant in turn", role));
    }
  }
  if (asked || record.turns.empty()) in.fail("the conversation does not end with an answer");
  return record;
}

}  // namespace

// A line that is no JSON. Files of one big list are common; they get the command that makes lines of them.
static json parse_line(std::string_view line, const std::string& where) {
  const size_t first = line.find_first_not_of(" \t\r");
  const bool is_list = first != std::string_view::npos && line[first] == '[';
  try {
    json object = parse_json(line, ErrorCode::kData, where);
    if (object.is_object()) return object;
    throw Error(ErrorCode::kData, where, "not a JSON object");
  } catch (const Error& e) {
    throw Error(e.code, e.where, is_list ? "a JSON list, one object a line is wanted" : e.problem,
                is_list ? "Make lines of it: jq -c '.[]' FILE > FILE.jsonl"
                        : "Correct or remove the line; the kinds of records: concerto data pack --help");
  }
}

Record parse_record(std::string_view line, const std::string& where) {
  const json object = parse_line(line, where);
  const Reader in(object, where);
  if (in.has("messages")) return message_record(in);
  if (in.has("src") && in.has("tgt")) return ernie_record(in);
  if (in.has("instruction") && in.has("output")) return alpaca_record(in);
  for (const char* key : {"text", "tgt"}) {
    if (!in.has(key)) continue;
    auto list = in.texts(key);
    if (list.empty()) in.fail(fmt::format("'{}' is empty", key));
    return {.text = std::move(list.front())};
  }
  in.fail("none of the known kinds of records (text; src and tgt; instruction and output; messages)");
}

void tokenize_record(const Tokenizer& tokenizer, const Record& record, const std::string& where, TokenizedRecord& out) {
  out.ids.clear();
  out.trained.clear();
  std::vector<TextPart> parts;
  const auto add = [&](std::string_view text, SpecialText special = SpecialText::kAsTokens) {
    parts.push_back({text, special});
  };
  const auto encode_parts = [&](bool trained) {
    const auto ids = tokenizer.encode(parts);
    out.ids.insert(out.ids.end(), ids.begin(), ids.end());
    if (record.conversation) out.trained.resize(out.ids.size(), trained);
    parts.clear();
  };
  if (!record.conversation) {
    if (tokenizer.eos_id() < 0)
      throw Error(ErrorCode::kData, where, "the tokenizer has no eos token", "Name one in tokenizer_config.json");
    add(record.text, SpecialText::kAsText);
    encode_parts(true);
    out.ids.push_back(tokenizer.eos_id());
    return;
  }
  const ChatTemplate& chat = tokenizer.chat_template();
  add(chat.begin);
  if (!record.system.empty()) {
    add(chat.system_prefix);
    add(record.system, SpecialText::kAsText);
    add(chat.system_suffix);
  }
  for (size_t i = 0; i < record.turns.size(); ++i) {
    const auto& turn = record.turns[i];
    const bool last = i + 1 == record.turns.size();
    add(chat.user_prefix);
    add(turn.prompt, SpecialText::kAsText);
    add(chat.user_suffix);
    add(chat.assistant_prefix);
    encode_parts(false);
    add(turn.answer, SpecialText::kAsText);
    encode_parts(turn.trained);
    // The sign between two turns is not trained; the end of the last answer is.
    add(last ? chat.final_suffix : chat.assistant_suffix);
    if (last) encode_parts(turn.trained);
  }
}

}  // namespace concerto

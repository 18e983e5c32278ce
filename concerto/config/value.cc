#include "concerto/config/value.h"

#include <fmt/format.h>
#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/exceptions.h>
#include <yaml-cpp/parser.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "concerto/base/json.h"

namespace concerto {
namespace {

// A settings file is a few levels deep. Anchors can make a small YAML file unfold without end, so both are bounded.
constexpr size_t kMaxDepth = 8;
constexpr int kMaxNodes = 100000;
constexpr size_t kMaxBytes = kMaxSettingsBytes;

// Builds a Value from the parser's events. The parser is driven by hand because YAML::Load drops what follows the first
// document without a word, and YAML::LoadAll never ends on some broken texts.
class YamlBuilder : public YAML::EventHandler {
 public:
  Value root;

  void OnDocumentStart(const YAML::Mark&) override {}
  void OnDocumentEnd() override {}
  void OnNull(const YAML::Mark& mark, YAML::anchor_t anchor) override { add(at(mark, Value::Kind::kNull), anchor); }
  void OnAlias(const YAML::Mark& mark, YAML::anchor_t anchor) override {
    const auto known = anchors_.find(anchor);
    if (known == anchors_.end()) throw SyntaxFault{line_of(mark), "an alias inside its own anchor"};
    count(known->second, mark);
    Value value = known->second;
    value.line = line_of(mark);
    add(std::move(value), 0);
  }
  void OnScalar(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                const std::string& text) override {
    Value value = at(mark, tag == "!" ? Value::Kind::kQuoted : Value::Kind::kPlain);
    value.text = text;
    add(std::move(value), anchor);
  }
  void OnSequenceStart(const YAML::Mark& mark, const std::string&, YAML::anchor_t anchor,
                       YAML::EmitterStyle::value) override {
    open(mark, Value::Kind::kList, anchor);
  }
  void OnSequenceEnd() override { close(); }
  void OnMapStart(const YAML::Mark& mark, const std::string&, YAML::anchor_t anchor,
                  YAML::EmitterStyle::value) override {
    open(mark, Value::Kind::kMap, anchor);
  }
  void OnMapEnd() override { close(); }

 private:
  struct Open {
    Value value;
    YAML::anchor_t anchor = 0;
    bool has_key = false;
    ValueEntry entry;  // of a map: the key that waits for its value
  };

  static int line_of(const YAML::Mark& mark) { return mark.is_null() ? 0 : mark.line + 1; }
  Value at(const YAML::Mark& mark, Value::Kind kind) {
    if (++nodes_ > kMaxNodes) too_many(mark);
    Value value;
    value.kind = kind;
    value.line = line_of(mark);
    return value;
  }
  [[noreturn]] static void too_many(const YAML::Mark& mark) {
    throw SyntaxFault{line_of(mark), fmt::format("more than {} values", kMaxNodes)};
  }
  void count(const Value& value, const YAML::Mark& mark) {
    if (++nodes_ > kMaxNodes) too_many(mark);
    for (const Value& item : value.items) count(item, mark);
    for (const ValueEntry& entry : value.entries) count(entry.value, mark);
  }
  void open(const YAML::Mark& mark, Value::Kind kind, YAML::anchor_t anchor) {
    if (open_.size() >= kMaxDepth)
      throw SyntaxFault{line_of(mark), fmt::format("nested deeper than {} levels", kMaxDepth)};
    open_.push_back({at(mark, kind), anchor, false, {}});
  }
  void close() {
    Open last = std::move(open_.back());
    open_.pop_back();
    add(std::move(last.value), last.anchor);
  }
  void add(Value value, YAML::anchor_t anchor) {
    if (anchor) anchors_[anchor] = value;
    if (open_.empty()) {
      root = std::move(value);
      return;
    }
    Open& parent = open_.back();
    if (parent.value.kind == Value::Kind::kList) {
      parent.value.items.push_back(std::move(value));
    } else if (parent.has_key) {
      parent.entry.value = std::move(value);
      parent.value.entries.push_back(std::move(parent.entry));
      parent.entry = {};
      parent.has_key = false;
    } else {
      if (!value.is_scalar()) throw SyntaxFault{value.line, "a key is not a plain word"};
      parent.entry.key = value.text;
      parent.entry.line = value.line;
      parent.has_key = true;
    }
  }

  std::vector<Open> open_;
  std::map<YAML::anchor_t, Value> anchors_;
  int nodes_ = 0;
};

Value from_json(const nlohmann::ordered_json& json, int depth, int& nodes) {
  if (depth > static_cast<int>(kMaxDepth)) throw SyntaxFault{0, fmt::format("nested deeper than {} levels", kMaxDepth)};
  if (++nodes > kMaxNodes) throw SyntaxFault{0, fmt::format("more than {} values", kMaxNodes)};
  Value value;
  if (json.is_object()) {
    value.kind = Value::Kind::kMap;
    for (const auto& [key, item] : json.items()) value.entries.push_back({key, from_json(item, depth + 1, nodes), 0});
  } else if (json.is_array()) {
    value.kind = Value::Kind::kList;
    for (const auto& item : json) value.items.push_back(from_json(item, depth + 1, nodes));
  } else if (json.is_string()) {
    value = quoted(json.get<std::string>());
  } else if (!json.is_null()) {
    value = scalar(json.dump());
  }
  return value;
}

int line_of_byte(const std::string& text, size_t byte) {
  return 1 + static_cast<int>(std::count(text.begin(), text.begin() + std::min(byte, text.size()), '\n'));
}

// Flow style: JSON, which is also YAML.
void print_flow(const Value& value, std::string& out) {
  switch (value.kind) {
    case Value::Kind::kNull:
      out += "null";
      break;
    case Value::Kind::kPlain:
      out += value.text;
      break;
    case Value::Kind::kQuoted:
      out += json_quote(value.text);
      break;
    case Value::Kind::kList:
      out += '[';
      for (size_t i = 0; i < value.items.size(); ++i) {
        if (i) out += ", ";
        print_flow(value.items[i], out);
      }
      out += ']';
      break;
    case Value::Kind::kMap:
      out += '{';
      for (size_t i = 0; i < value.entries.size(); ++i) {
        if (i) out += ", ";
        out += json_quote(value.entries[i].key) + ": ";
        print_flow(value.entries[i].value, out);
      }
      out += '}';
      break;
  }
}

}  // namespace

const Value* Value::find(const std::string& key) const {
  for (const ValueEntry& entry : entries)
    if (entry.key == key) return &entry.value;
  return nullptr;
}

Value scalar(std::string text) {
  Value value;
  value.kind = Value::Kind::kPlain;
  value.text = std::move(text);
  return value;
}

Value quoted(std::string text) {
  Value value = scalar(std::move(text));
  value.kind = Value::Kind::kQuoted;
  return value;
}

std::string describe(const Value& value) {
  const auto cut = [](const std::string& text) { return text.size() <= 60 ? text : text.substr(0, 57) + "..."; };
  switch (value.kind) {
    case Value::Kind::kNull:
      return "nothing";
    case Value::Kind::kPlain:
      return cut(value.text);
    case Value::Kind::kQuoted:
      return json_quote(cut(value.text));
    case Value::Kind::kList:
      return "a list";
    case Value::Kind::kMap:
      return "a map";
  }
  return "";
}

bool parse_yaml(const std::string& text, Value& value, SyntaxFault& fault) {
  try {
    if (text.size() > kMaxBytes) throw SyntaxFault{0, fmt::format("{} bytes are too many for settings", text.size())};
    std::istringstream stream(text);
    YAML::Parser parser(stream);
    YamlBuilder builder, rest;
    parser.HandleNextDocument(builder);
    if (parser.HandleNextDocument(rest))
      throw SyntaxFault{rest.root.line, "more than one YAML document, or text behind it"};
    value = std::move(builder.root);
    return true;
  } catch (const SyntaxFault& thrown) {
    fault = thrown;
  } catch (const YAML::Exception& e) {
    fault = {e.mark.is_null() ? 0 : e.mark.line + 1, "YAML syntax: " + e.msg};
  } catch (const std::exception& e) {  // the parser's own corner cases
    fault = {0, std::string("YAML syntax: ") + e.what()};
  }
  return false;
}

bool parse_json_settings(const std::string& text, Value& value, SyntaxFault& fault) {
  try {
    if (text.size() > kMaxBytes) throw SyntaxFault{0, fmt::format("{} bytes are too many for settings", text.size())};
    std::vector<std::set<std::string>> seen;  // in the objects that are open, outermost first
    const auto refuse_repeats = [&seen](int, nlohmann::ordered_json::parse_event_t event,
                                        nlohmann::ordered_json& parsed) {
      using Event = nlohmann::ordered_json::parse_event_t;
      if (event == Event::object_start) seen.emplace_back();
      if (event == Event::object_end) seen.pop_back();
      if (event == Event::key && !seen.back().insert(parsed.get<std::string>()).second)
        throw SyntaxFault{0, fmt::format("key {} is given twice", describe(quoted(parsed.get<std::string>())))};
      return true;
    };
    int nodes = 0;
    value = from_json(nlohmann::ordered_json::parse(text, refuse_repeats), 0, nodes);
    return true;
  } catch (const SyntaxFault& thrown) {
    fault = thrown;
  } catch (const nlohmann::json::parse_error& e) {
    fault = {line_of_byte(text, e.byte ? e.byte - 1 : 0), "JSON syntax: " + json_fault(e.what())};
  } catch (const nlohmann::json::exception& e) {
    fault = {0, "JSON syntax: " + json_fault(e.what())};
  }
  return false;
}

std::string print_json(const Value& value) {
  std::string out;
  print_flow(value, out);
  return out;
}

std::string print_yaml(const Value& map) {
  std::string out;
  for (const ValueEntry& entry : map.entries) {
    out += entry.key + ':';
    if (entry.value.kind == Value::Kind::kMap) {
      for (const ValueEntry& inner : entry.value.entries) out += "\n  " + inner.key + ": " + print_json(inner.value);
    } else {
      out += ' ' + print_json(entry.value);
    }
    out += '\n';
  }
  return out;
}

}  // namespace concerto

// A settings file as a tree: what a field table reads, whatever wrote it (YAML, JSON or the command line). Scalars stay
// text, because only the field knows what they should be.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace concerto {

struct ValueEntry;

struct Value {
  enum class Kind { kNull, kPlain /* 10, true, abc */, kQuoted /* "10" */, kList, kMap };
  Kind kind = Kind::kNull;
  std::string text;                 // kPlain, kQuoted
  std::vector<Value> items;         // kList
  std::vector<ValueEntry> entries;  // kMap, in file order, keys may repeat
  int line = 0;                     // 1-based; 0: unknown

  bool is_scalar() const { return kind == Kind::kPlain || kind == Kind::kQuoted; }
  bool is_null() const { return kind == Kind::kNull; }
  const Value* find(const std::string& key) const;  // first entry of a map with this key, or null
};

struct ValueEntry {
  std::string key;
  Value value;
  int line = 0;
};

// A syntax error (or a file too deep or too large to be a settings file).
struct SyntaxFault {
  int line = 0;  // 1-based; 0: unknown
  std::string what;
};

constexpr int64_t kMaxSettingsBytes = 4 << 20;  // of a settings file

// Both return true and fill `value`, or return false and fill `fault`. They throw nothing on bad text.
bool parse_yaml(const std::string& text, Value& value, SyntaxFault& fault);
bool parse_json_settings(const std::string& text, Value& value, SyntaxFault& fault);

Value scalar(std::string text);            // kPlain
Value quoted(std::string text);            // kQuoted
std::string describe(const Value& value);  // for messages: `"abc"`, `a list`, `nothing`

// Printers: block YAML of a map of maps (lists and deeper maps in flow style), and one-line JSON. parse_yaml reads both
// back.
std::string print_yaml(const Value& map);
std::string print_json(const Value& value);

}  // namespace concerto

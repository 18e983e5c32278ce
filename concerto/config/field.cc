#include "concerto/config/field.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>

namespace concerto {
namespace {

template <class... F>
struct Overloaded : F... {
  using F::operator()...;
};
template <class... F>
Overloaded(F...) -> Overloaded<F...>;

template <class T>
bool parse_number(const std::string& text, T& out) {
  const char* first = text.data();
  const char* last = first + text.size();
  if (text.size() > 1 && *first == '+' && text[1] != '-') ++first;
  const auto [end, error] = std::from_chars(first, last, out);
  return error == std::errc() && end == last && first != last;
}

bool in_range(const FieldInfo& f, double x) {
  if (!f.has_range) return true;
  return (f.low_open ? x > f.low : x >= f.low) && (f.high_open ? x < f.high : x <= f.high);
}

std::string join(const std::vector<std::string>& words, const char* between) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : between) + word;
  return text;
}

std::vector<std::string> first_names(const EnumNames& names) {
  std::vector<std::string> out;
  for (const EnumName& name : names)
    if (*name.help) out.push_back(name.name);
  return out;
}

Problem not_a(const char* wanted, const Value& got) {
  return {fmt::format("expected {}, got {}", wanted, describe(got)), ""};
}

Problem out_of_range(const FieldInfo& f, const Value& got) {
  return {fmt::format("{} is out of range", describe(got)), fmt::format("Choose {}", range_text(f))};
}

Problem not_allowed(const Value& got, const std::vector<std::string>& allowed) {
  const std::string near = got.is_scalar() ? nearest_name(got.text, allowed) : "";
  return {fmt::format("{} is not one of {}", describe(got), join(allowed, ", ")),
          near.empty() ? "" : fmt::format("Did you mean {}?", near)};
}

template <class T>
bool assign_integer(const FieldInfo& f, T* member, const Value& value, Problem& problem) {
  T x{};
  if (value.kind != Value::Kind::kPlain || !parse_number(value.text, x))
    return problem = not_a("a whole number", value), false;
  if (!in_range(f, static_cast<double>(x))) return problem = out_of_range(f, value), false;
  *member = x;
  return true;
}

bool assign_double(const FieldInfo& f, double* member, const Value& value, Problem& problem) {
  double x = 0;
  if (value.kind != Value::Kind::kPlain || !parse_number(value.text, x) || !std::isfinite(x))
    return problem = not_a("a number", value), false;
  if (!in_range(f, x)) return problem = out_of_range(f, value), false;
  *member = x;
  return true;
}

bool assign_bool(bool* member, const Value& value, Problem& problem) {
  const std::string& text = value.text;
  const bool yes = text == "true" || text == "True" || text == "TRUE";
  const bool no = text == "false" || text == "False" || text == "FALSE";
  if (value.kind != Value::Kind::kPlain || (!yes && !no)) return problem = not_a("true or false", value), false;
  *member = yes;
  return true;
}

bool assign_string(const FieldInfo& f, std::string* member, const Value& value, Problem& problem) {
  if (!value.is_scalar()) return problem = not_a("text", value), false;
  const std::string text = f.spelling ? f.spelling(value.text) : value.text;
  if (!f.allowed.empty() && std::find(f.allowed.begin(), f.allowed.end(), text) == f.allowed.end())
    return problem = not_allowed(value, f.allowed), false;
  *member = text;
  return true;
}

bool assign_enum(const EnumSlot& slot, const Value& value, Problem& problem) {
  if (value.is_scalar()) {
    for (const EnumName& name : *slot.names)
      if (value.text == name.name) return slot.set(slot.member, name.value), true;
    // ERNIEKit writes the last constant step behind the name.
    if (value.text.starts_with("wsd:") && std::any_of(slot.names->begin(), slot.names->end(),
                                                      [](const EnumName& n) { return n.name == std::string("wsd"); }))
      return problem = {fmt::format("{} joins two settings", describe(value)),
                        fmt::format("Write schedule: wsd and wsd_stable_steps: {}", value.text.substr(4, 20))},
             false;
  }
  return problem = not_allowed(value, first_names(*slot.names)), false;
}

// One source: "path", or {path: ..., weight: ...}.
bool read_source(const Value& value, DataSource& source, Problem& problem) {
  if (value.is_scalar()) {
    source.path = value.text;
  } else if (value.kind == Value::Kind::kMap) {
    FieldInfo path, weight;
    weight.low = 0, weight.high = 1e12, weight.has_range = weight.low_open = true;
    for (const ValueEntry& entry : value.entries) {
      if (value.find(entry.key) != &entry.value)
        return problem = {fmt::format("{} is given twice in a source", describe(quoted(entry.key))),
                          "Remove one of them"},
               false;
      if (entry.key == "path") {
        if (!assign_string(path, &source.path, entry.value, problem))
          return problem.what = "path: " + problem.what, false;
      } else if (entry.key == "weight") {
        if (!assign_double(weight, &source.weight, entry.value, problem))
          return problem.what = "weight: " + problem.what, false;
      } else {
        return problem = {fmt::format("{} is unknown in a source", describe(quoted(entry.key))),
                          "A source has path and weight"},
               false;
      }
    }
  } else {
    return problem = not_a("a path or {path: ..., weight: ...}", value), false;
  }
  if (source.path.empty()) return problem = {"a source without a path", "Give the prefix of a .bin/.idx pair"}, false;
  return true;
}

bool assign_sources(std::vector<DataSource>* member, const Value& value, Problem& problem) {
  std::vector<DataSource> sources;
  if (value.kind == Value::Kind::kList) {
    for (const Value& item : value.items)
      if (!read_source(item, sources.emplace_back(), problem)) return false;
  } else if (!read_source(value, sources.emplace_back(), problem)) {
    return false;
  }
  *member = std::move(sources);
  return true;
}

bool assign_one(const FieldInfo& f, int64_t* member, const Value& value, Problem& problem) {
  return assign_integer(f, member, value, problem);
}
bool assign_one(const FieldInfo& f, double* member, const Value& value, Problem& problem) {
  return assign_double(f, member, value, problem);
}

template <class T>
bool assign_numbers(const FieldInfo& f, const char* wanted, std::vector<T>* member, const Value& value,
                    Problem& problem) {
  if (value.kind != Value::Kind::kList) return problem = not_a(wanted, value), false;
  std::vector<T> numbers;
  for (const Value& item : value.items)
    if (!assign_one(f, &numbers.emplace_back(), item, problem)) return false;
  *member = std::move(numbers);
  return true;
}

template <class T, class Print>
Value read_numbers(const std::vector<T>& numbers, const Print& print) {
  Value list;
  list.kind = Value::Kind::kList;
  for (const T x : numbers) list.items.push_back(scalar(print(x)));
  return list;
}

constexpr const char* kWholeNumbers = "list of whole numbers";
constexpr const char* kNumbers = "list of numbers";

}  // namespace

std::string print_double(double x) {
  // Shortest digits that read back to the same bits; written so that YAML 1.1 and JSON readers see a float:
  // 500000.0, 1.0e-05.
  const bool plain = x == 0 || (std::abs(x) >= 1e-4 && std::abs(x) < 1e15);
  char buffer[40];
  const auto result = std::to_chars(buffer, buffer + sizeof buffer, x,
                                    plain ? std::chars_format::fixed : std::chars_format::scientific);
  std::string text(buffer, result.ptr);
  if (text.find('.') == std::string::npos) text.insert(std::min(text.find('e'), text.size()), ".0");
  return text;
}

bool assign(const FieldInfo& f, const Slot& slot, const Value& value, Problem& problem) {
  const auto a_list = [](const char* kind) { return std::string("a ") + kind; };
  return std::visit(
      Overloaded{
          [&](bool* m) { return assign_bool(m, value, problem); },
          [&](int* m) { return assign_integer(f, m, value, problem); },
          [&](int64_t* m) { return assign_integer(f, m, value, problem); },
          [&](double* m) { return assign_double(f, m, value, problem); },
          [&](std::string* m) { return assign_string(f, m, value, problem); },
          [&](const EnumSlot& m) { return assign_enum(m, value, problem); },
          [&](std::vector<DataSource>* m) { return assign_sources(m, value, problem); },
          [&](std::vector<int64_t>* m) { return assign_numbers(f, a_list(kWholeNumbers).c_str(), m, value, problem); },
          [&](std::vector<double>* m) { return assign_numbers(f, a_list(kNumbers).c_str(), m, value, problem); }},
      slot);
}

Value read(const Slot& slot) {
  return std::visit(
      Overloaded{
          [](const bool* m) { return scalar(*m ? "true" : "false"); },
          [](const int* m) { return scalar(fmt::to_string(*m)); },
          [](const int64_t* m) { return scalar(fmt::to_string(*m)); },
          [](const double* m) { return scalar(print_double(*m)); }, [](const std::string* m) { return quoted(*m); },
          [](const EnumSlot& m) {
            for (const EnumName& name : *m.names)
              if (name.value == m.get(m.member)) return quoted(name.name);
            CHECK(false, "enum value {} has no name", m.get(m.member));
            return Value{};
          },
          [](const std::vector<DataSource>* m) {
            Value list;
            list.kind = Value::Kind::kList;
            for (const DataSource& source : *m) {
              Value& item = list.items.emplace_back();
              item.kind = Value::Kind::kMap;
              item.entries.push_back({"path", quoted(source.path), 0});
              item.entries.push_back({"weight", scalar(print_double(source.weight)), 0});
            }
            return list;
          },
          [](const std::vector<int64_t>* m) { return read_numbers(*m, [](int64_t x) { return fmt::to_string(x); }); },
          [](const std::vector<double>* m) { return read_numbers(*m, print_double); }},
      slot);
}

std::string type_name(const FieldInfo& f, const Slot& slot) {
  return std::visit(
      Overloaded{
          [](bool*) -> std::string { return "true | false"; }, [](int*) -> std::string { return "whole number"; },
          [](int64_t*) -> std::string { return "whole number"; }, [](double*) -> std::string { return "number"; },
          [&](std::string*) -> std::string { return f.allowed.empty() ? "text" : join(f.allowed, " | "); },
          [](const EnumSlot& m) -> std::string { return join(first_names(*m.names), " | "); },
          [](std::vector<DataSource>*) -> std::string { return "list of {path, weight} or of paths, or one path"; },
          [](std::vector<int64_t>*) -> std::string { return kWholeNumbers; },
          [](std::vector<double>*) -> std::string { return kNumbers; }},
      slot);
}

std::string range_text(const FieldInfo& f) {
  if (!f.has_range) return "";
  const auto number = [](double x) {
    std::string text = print_double(x);
    return text.ends_with(".0") ? text.substr(0, text.size() - 2) : text;
  };
  return fmt::format("{} {} x {} {}", number(f.low), f.low_open ? "<" : "<=", f.high_open ? "<" : "<=", number(f.high));
}

bool value_of_text(const Slot& slot, const std::string& text, Value& value, SyntaxFault& fault) {
  const bool as_is = std::holds_alternative<std::string*>(slot) || std::holds_alternative<EnumSlot>(slot);
  if (as_is) return value = quoted(text), true;
  if (!parse_yaml(text, value, fault)) return false;
  value.line = 0;
  return true;
}

}  // namespace concerto

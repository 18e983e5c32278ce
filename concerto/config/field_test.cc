// The engine: values, numbers, names, and what every table must fulfil.
#include "concerto/config/field.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <random>
#include <set>
#include <sstream>
#include <type_traits>

#include "concerto/config/model_fields.h"
#include "concerto/config/run_fields.h"

namespace concerto {
namespace {

TEST(NearestName, FindsSlipsOnly) {
  const std::vector<std::string> names = {"steps", "seq_length", "micro_batch_size"};
  EXPECT_EQ(nearest_name("stps", names), "steps");
  EXPECT_EQ(nearest_name("setps", names), "steps");
  EXPECT_EQ(nearest_name("seq_len", names), "seq_length");
  EXPECT_EQ(nearest_name("banana", names), "");
  EXPECT_EQ(nearest_name("", names), "");
  EXPECT_EQ(nearest_name(std::string(5000, 'x'), names), "");
}

TEST(PrintDouble, ReadsBackToTheSameBits) {
  EXPECT_EQ(print_double(1), "1.0");
  EXPECT_EQ(print_double(500000), "500000.0");
  EXPECT_EQ(print_double(1e-5), "1.0e-05");
  EXPECT_EQ(print_double(3e-4), "0.0003");
  std::mt19937_64 random(1);
  FieldInfo any;
  for (int i = 0; i < 2000; ++i) {
    const uint64_t bits = random();
    double x;
    std::memcpy(&x, &bits, sizeof x);
    if (!std::isfinite(x)) continue;
    double back = 0;
    Value value;
    SyntaxFault fault;
    Problem problem;
    ASSERT_TRUE(parse_yaml(print_double(x), value, fault));
    ASSERT_TRUE(assign(any, Slot(&back), value, problem)) << print_double(x) << " " << problem.what;
    ASSERT_EQ(x, back);
  }
}

TEST(Value, ReadsYamlAndJsonAlike) {
  const std::string json = R"({"a": {"b": [1, 2.5, "x\"y\u00e9"], "c": null}, "d": true})";
  Value from_yaml, from_json;
  SyntaxFault fault;
  ASSERT_TRUE(parse_yaml(json, from_yaml, fault)) << fault.what;
  ASSERT_TRUE(parse_json_settings(json, from_json, fault)) << fault.what;
  EXPECT_EQ(print_json(from_yaml), print_json(from_json));
  Value again;
  ASSERT_TRUE(parse_yaml(print_yaml(from_json), again, fault)) << fault.what;
  EXPECT_EQ(print_json(again), print_json(from_json));
  EXPECT_EQ(from_yaml.find("d")->line, 1);
}

TEST(Value, RefusesWhatIsNoSettingsFile) {
  Value value;
  SyntaxFault fault;
  EXPECT_FALSE(parse_yaml("a: [1, 2", value, fault));
  EXPECT_FALSE(parse_yaml("a: 1\n---\na: 2\n", value, fault));
  EXPECT_NE(fault.what.find("more than one YAML document"), std::string::npos);
  EXPECT_FALSE(parse_yaml("? [a, b]\n: 1\n", value, fault));
  EXPECT_FALSE(parse_yaml(std::string(5 << 20, ' '), value, fault));
  EXPECT_FALSE(parse_yaml("a: {a: {a: {a: {a: {a: {a: {a: {a: {a: 1}}}}}}}}}", value, fault));
  EXPECT_NE(fault.what.find("nested deeper"), std::string::npos);
  EXPECT_FALSE(parse_yaml(std::string(10000, '['), value, fault));
  // Seven lines that unfold to ten million values.
  std::string bomb = "a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n";
  for (int i = 1; i < 7; ++i) {
    const std::string last = "*a" + std::to_string(i - 1);
    bomb += fmt::format("a{}: &a{} [{}", i, i, last);
    for (int j = 1; j < 10; ++j) bomb += "," + last;
    bomb += "]\n";
  }
  EXPECT_FALSE(parse_yaml(bomb, value, fault));
  EXPECT_NE(fault.what.find("more than"), std::string::npos);
  EXPECT_FALSE(parse_json_settings("{\"a\": 1", value, fault));
  EXPECT_FALSE(parse_json_settings("{\n\"a\": 1,\n\"a\": 2}", value, fault));
  EXPECT_NE(fault.what.find("given twice"), std::string::npos);
  EXPECT_FALSE(parse_json_settings(R"({"a": [{"b": 1, "b": 2}]})", value, fault));
  EXPECT_NE(fault.what.find("given twice"), std::string::npos);
  EXPECT_TRUE(parse_json_settings(R"({"a": {"b": 1}, "c": {"b": 2}})", value, fault)) << fault.what;
  EXPECT_FALSE(parse_json_settings("{\n\"a\": 1,\n\"b\" 2}", value, fault));
  EXPECT_EQ(fault.line, 3);
  EXPECT_FALSE(parse_json_settings("{\"a\": 1e999}", value, fault));
}

template <class Root>
void check_table(const std::vector<Field<Root>>& fields) {
  std::set<std::string> keys, aliases;
  Root root;
  for (const Field<Root>& field : fields) {
    EXPECT_TRUE(keys.insert(field.key()).second) << field.key() << " is declared twice";
    for (const std::string& alias : field.aliases)
      EXPECT_TRUE(aliases.insert(alias).second) << alias << " means two settings";
    EXPECT_FALSE(field.help.empty() || field.help.ends_with('.')) << field.key();
    // The default is a value that the field itself accepts.
    const Slot slot = field.slot(root);
    Problem problem;
    const Value initial = read(slot);
    EXPECT_TRUE(assign(field, slot, initial, problem)) << field.key() << ": " << problem.what;
    EXPECT_EQ(print_json(read(slot)), print_json(initial));
    const bool is_number = std::holds_alternative<int64_t*>(slot) || std::holds_alternative<int*>(slot) ||
                           std::holds_alternative<double*>(slot);
    const bool is_list =
        std::holds_alternative<std::vector<int64_t>*>(slot) || std::holds_alternative<std::vector<double>*>(slot);
    EXPECT_EQ(is_number, field.has_range && !is_list) << field.key() << " needs a range";
  }
}

TEST(Tables, AreSound) {
  check_table(run_fields());
  check_table(model_fields());
  std::set<std::string> known;
  for (const auto& field : model_fields()) {
    known.insert(field.name);
    known.insert(field.aliases.begin(), field.aliases.end());
  }
  for (const auto& key : limited_model_keys()) EXPECT_TRUE(known.insert(key.name).second) << key.name;
  for (const auto& key : ignored_model_keys()) EXPECT_TRUE(known.insert(key).second) << key;
}

// Another value than it had. False if the member can have only one.
bool change(const EnumSlot& slot) {
  for (const EnumName& name : *slot.names)
    if (name.value != slot.get(slot.member)) return slot.set(slot.member, name.value), true;
  return false;
}
bool change(bool* member) { return *member = !*member, true; }
bool change(std::string* member) { return *member += "x", true; }
template <class T>
bool change(std::vector<T>* member) {
  return member->emplace_back(), true;
}
template <class T>
bool change(T* number) {
  return *number += 1, true;
}

const void* address_of(const Slot& slot) {
  return std::visit(
      [](const auto& m) -> const void* {
        if constexpr (std::is_same_v<std::decay_t<decltype(m)>, EnumSlot>)
          return m.member;
        else
          return m;
      },
      slot);
}

// The setting of a line of the dump that differs, "model: hidden_size" or "backend"; all of them if there are many.
std::string differing_keys(const RunConfig& a, const RunConfig& b) {
  std::istringstream here(run_config_yaml(a)), there(run_config_yaml(b));
  std::string section, keys;
  for (std::string x, y; std::getline(here, x) && std::getline(there, y);) {
    if (!x.starts_with(' ')) section = x;
    if (x == y) continue;
    const size_t name = x.find_first_not_of(' ');
    keys += (keys.empty() ? "" : ", ") + (name ? section + " " : "") + x.substr(name, x.find(':', name) - name);
  }
  return keys;
}

// A field that points at the member of another one shows here, and so does a dump that leaves a field out.
template <class Root, class Part>
void check_members(const std::vector<Field<Root>>& fields, const Part& part) {
  std::map<const void*, std::string> owners;
  RunConfig whole;
  for (const Field<Root>& field : fields) {
    const auto [owner, is_new] = owners.emplace(address_of(field.slot(part(whole))), field.key());
    EXPECT_TRUE(is_new) << field.key() << " stands for the member of " << owner->second;
    RunConfig changed;
    const RunConfig initial;
    if (!std::visit([](const auto& m) { return change(m); }, field.slot(part(changed)))) continue;
    // Without experts the dump leaves their fields out.
    if (field.name == "model_type")
      EXPECT_TRUE(differing_keys(changed, initial).starts_with("model: model_type"));
    else
      EXPECT_EQ(differing_keys(changed, initial),
                field.section.empty() ? field.name : field.section + ": " + field.name);
    EXPECT_EQ(run_config_hash(changed) != run_config_hash(initial), field.decides) << field.key();
    const std::vector<std::string> lines = run_config_differences(changed, initial);
    EXPECT_EQ(std::any_of(lines.begin(), lines.end(),
                          [&](const std::string& line) { return line.starts_with(field.key() + ": "); }),
              field.decides)
        << field.key();
  }
}

TEST(Tables, EveryFieldHasAMemberOfItsOwn) {
  check_members(run_fields(), [](RunConfig& c) -> RunConfig& { return c; });
  check_members(model_fields(), [](RunConfig& c) -> ModelConfig& { return c.model.config; });
}

}  // namespace
}  // namespace concerto

// One setting, declared once. A field table is a vector of Field<Root>; parsing, ranges, unknown names, dump, help,
// docs and hash all read it.
#pragma once

#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "concerto/config/faults.h"
#include "concerto/config/run_config.h"
#include "concerto/config/value.h"

namespace concerto {

// The names of an enum, in the order of the docs. The first name of a value is printed; more names of the same value
// are accepted.
struct EnumName {
  int value;
  const char* name;
  const char* help;  // "" for a second name
};
using EnumNames = std::vector<EnumName>;

// A typed pointer to the member that a field stands for.
struct EnumSlot {
  void* member;
  int (*get)(const void*);
  void (*set)(void*, int);
  const EnumNames* names;
};
using Slot = std::variant<bool*, int*, int64_t*, double*, std::string*, EnumSlot, std::vector<DataSource>*,
                          std::vector<int64_t>*, std::vector<double>*>;

template <class E>
EnumSlot enum_slot(E& member, const EnumNames& names) {
  return {&member, [](const void* p) { return static_cast<int>(*static_cast<const E*>(p)); },
          [](void* p, int value) { *static_cast<E*>(p) = static_cast<E>(value); }, &names};
}

struct FieldInfo {
  std::string section, name;  // section is empty for a setting of the top level
  std::string help;           // one sentence, no full stop
  // Range of a number (also of each number of a list); `open` ends are not allowed themselves. Without one: whatever
  // the type holds.
  double low = 0, high = 0;
  bool has_range = false, low_open = false, high_open = false;
  std::vector<std::string> allowed;                       // of a string; empty: any
  std::string (*spelling)(const std::string&) = nullptr;  // of a string: the allowed word that other words mean
  std::string unset;                 // how docs call the default, where the value itself says little
  std::vector<std::string> aliases;  // names of other systems with the same meaning
  bool decides = false;              // decides the numbers of a run: part of the hash
  bool moe_only = false;             // of the model: has no meaning in a dense one
  bool nullable = false;             // of the model: null is as if missing

  std::string key() const { return section.empty() ? name : section + "." + name; }
};

template <class Root>
struct Field : FieldInfo {
  Slot (*slot)(Root&) = nullptr;

  Field(std::string section_, std::string name_, Slot (*slot_)(Root&), std::string help_) : slot(slot_) {
    section = std::move(section_);
    name = std::move(name_);
    help = std::move(help_);
  }
  Field& range(double l, double h) { return low = l, high = h, has_range = true, *this; }
  Field& above(double l, double h) { return range(l, h), low_open = true, *this; }   // l < x <= h
  Field& below(double l, double h) { return range(l, h), high_open = true, *this; }  // l <= x < h
  Field& one_of(std::vector<std::string> names) { return allowed = std::move(names), *this; }
  Field& spelled(std::string (*f)(const std::string&)) { return spelling = f, *this; }
  Field& also(std::vector<std::string> names) { return aliases = std::move(names), *this; }
  Field& when_unset(std::string text) { return unset = std::move(text), *this; }
  Field& decides_numbers() { return decides = true, *this; }
  Field& of_moe() { return moe_only = true, *this; }
  Field& or_null() { return nullable = true, *this; }
};

// What must hold between settings. Not asked when one of its keys already has a fault.
template <class Root>
struct Rule {
  std::vector<std::string> keys;  // the first set one is named in the message
  std::string text;               // for the docs: what must hold
  bool (*holds)(const Root&);
  std::string (*got)(const Root&);  // what is wrong, with the numbers
  std::string fix;
};

struct Problem {
  std::string what, fix;
};

// Writes `value` into the member, or says why not (the member is then untouched).
bool assign(const FieldInfo& field, const Slot& slot, const Value& value, Problem& problem);
// The member as a value that `assign` reads back to the same bits.
Value read(const Slot& slot);
std::string type_name(const FieldInfo& field,
                      const Slot& slot);         // "whole number", "true | false", "cosine | linear | ..."
std::string range_text(const FieldInfo& field);  // "0 < x <= 1", or ""
// The text of a command line override as a value of this field: strings and names are taken as they are, the rest is
// YAML.
bool value_of_text(const Slot& slot, const std::string& text, Value& value, SyntaxFault& fault);
std::string print_double(double x);  // shortest text that reads back to the same bits

}  // namespace concerto

#include "concerto/config/run_config.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "concerto/base/files.h"
#include "concerto/config/faults.h"
#include "concerto/config/model_fields.h"
#include "concerto/config/model_reader.h"
#include "concerto/config/run_fields.h"

namespace concerto {
namespace {

using RunField = Field<RunConfig>;

// One `key: value` of the file or of the command line. A name without a section has an empty one.
struct Setting {
  std::string section, name;
  Value value;
  std::string text;  // of an override: the value as typed
  std::string file;
  int line = 0;
  bool from_command_line() const { return file == kCommandLine; }
  std::string key() const { return section.empty() ? name : section + "." + name; }
};

bool is_section(const std::string& name) {
  const auto& sections = run_sections();
  return std::any_of(sections.begin(), sections.end(), [&](const SectionInfo& s) { return s.name == name; });
}

bool has_alias(const RunField& field, const std::string& name) {
  return std::find(field.aliases.begin(), field.aliases.end(), name) != field.aliases.end();
}

bool is_model_alias(const std::string& name) {
  const std::string field = model_field_name(name);
  return !field.empty() && field != name;
}

// By its own name in its section; by an alias in its section or at the top level.
const RunField* find_field(const std::string& section, const std::string& name) {
  for (const RunField& field : run_fields()) {
    if (field.section == section && field.name == name) return &field;
    if ((section.empty() || field.section == section) && has_alias(field, name)) return &field;
  }
  return nullptr;
}

class Loader {
 public:
  Loader(const std::string& file_name) : file_(file_name) {}

  RunConfig load(const std::string& text, const Overrides& overrides) {
    Value root;
    SyntaxFault syntax;
    if (!parse_yaml(text, root, syntax)) {
      faults_.add({file_, syntax.line, "", syntax.what, ""});
      faults_.throw_if_any(ErrorCode::kConfig);
    }
    split(root);
    for (const auto& [key, value] : overrides) {
      const size_t dot = key.find('.');
      Setting s{dot == std::string::npos ? "" : key.substr(0, dot),
                key.substr(dot == std::string::npos ? 0 : dot + 1),
                {},
                value,
                kCommandLine,
                0};
      settings_.push_back(std::move(s));
    }
    for (const Setting& setting : settings_) apply(setting);
    load_model();
    check_rules();
    faults_.throw_if_any(ErrorCode::kConfig);
    config_.notes = faults_.notes();
    return config_;
  }

 private:
  void fault(const Setting& at, std::string what, std::string fix) {
    faults_.add({at.file, at.line, at.key(), std::move(what), std::move(fix)});
  }

  // The sections of the file into single settings.
  void split(const Value& root) {
    if (root.is_null()) return;
    if (root.kind != Value::Kind::kMap)
      return faults_.add(
          {file_, root.line, "", fmt::format("expected sections of settings, got {}", describe(root)), ""});
    std::set<std::string> seen;
    for (const ValueEntry& entry : root.entries) {
      if (!is_section(entry.key)) {
        settings_.push_back({"", entry.key, entry.value, "", file_, entry.line});
        continue;
      }
      if (!seen.insert(entry.key).second) {
        faults_.add({file_, entry.line, entry.key, "this section is given twice", "Join the two"});
      } else if (entry.value.kind == Value::Kind::kMap) {
        for (const ValueEntry& inner : entry.value.entries)
          settings_.push_back({entry.key, inner.key, inner.value, "", file_, inner.line});
      } else if (!entry.value.is_null()) {
        faults_.add({file_, entry.line, entry.key,
                     fmt::format("expected a map of settings, got {}", describe(entry.value)),
                     fmt::format("Write {}: {{name: value, ...}}", entry.key)});
      }
    }
  }

  void apply(const Setting& s) {
    const RunField* field = find_field(s.section, s.name);
    if (!field && (s.section == "model" || (s.section.empty() && is_model_alias(s.name)))) return apply_model(s);
    if (!field) return unknown(s);
    const std::string key = field->key();
    const auto place = places_.find(key);
    if (place != places_.end() && !s.from_command_line())
      return fault(s, fmt::format("given twice, also as {}", place->second.key()), "Remove one of them");
    places_[key] = s;
    Value value = s.value;
    SyntaxFault syntax;
    Problem problem;
    const Slot slot = field->slot(config_);
    if (s.from_command_line() && !value_of_text(slot, s.text, value, syntax)) {
      problem.what = syntax.what;
    } else if (assign(*field, slot, value, problem)) {
      bad_.erase(key);
      return;
    }
    fault(s, problem.what, problem.fix);
    bad_.insert(key);
  }

  void apply_model(const Setting& s) {
    ModelSetting m{s.name, s.value, s.file, s.line, "model." + s.name};
    if (s.from_command_line()) {
      SyntaxFault syntax;
      if (!parse_yaml(s.text, m.value, syntax)) return fault(s, syntax.what, "");
    }
    model_settings_.push_back(std::move(m));
  }

  void unknown(const Setting& s) {
    for (const ForeignName& foreign : foreign_names())
      if (foreign.name == s.name) return fault(s, "has no setting of the same meaning here", foreign.advice);
    // A known name in the wrong place, then a slip of the pen in the right one, then anywhere.
    std::vector<std::string> here, anywhere;
    std::string elsewhere;
    for (const RunField& field : run_fields()) {
      if (field.name == s.name || has_alias(field, s.name)) elsewhere = field.key();
      if (field.section == s.section) here.push_back(field.name);
      for (const std::string& alias : field.aliases) anywhere.push_back(alias);
    }
    if (elsewhere.empty() && !model_field_name(s.name).empty()) elsewhere = "model." + model_field_name(s.name);
    if (s.section.empty()) {
      for (const SectionInfo& section : run_sections()) here.push_back(section.name);
    } else if (!is_section(s.section)) {
      std::vector<std::string> names;
      for (const SectionInfo& section : run_sections()) names.push_back(section.name);
      const std::string near = nearest_name(s.section, names);
      if (!near.empty()) elsewhere = near + "." + s.name;
    }
    std::string near = elsewhere;
    if (near.empty()) {
      near = nearest_name(s.name, here);
      if (!near.empty() && !s.section.empty()) near = s.section + "." + near;
    }
    if (near.empty()) near = nearest_name(s.name, anywhere);
    fault(s, "unknown setting", near.empty() ? "" : fmt::format("Did you mean {}?", near));
  }

  // Rules with one of these keys do not ask about a model that is not as it was meant.
  void distrust_model() { bad_.insert({"model", "model.max_position_embeddings"}); }

  void load_model() {
    const std::string& path = config_.model.path;
    if (path.empty() && model_settings_.empty()) {
      if (!bad_.contains("model.path"))
        faults_.add({file_, 0, "model.path", "no model is given",
                     "Give a Hugging Face folder, or the fields of its config.json in this section"});
      distrust_model();
      return;
    }
    std::vector<ModelSetting> all;
    if (!path.empty() && !gives_every_field(model_settings_)) {
      Faults unread;
      read_model_file(path, all, unread);
      for (const Fault& f : unread.list()) {
        const Setting& at = places_.at("model.path");
        if (f.key.empty())
          fault(at, fmt::format("{}{}: {}", f.file, f.line ? fmt::format(":{}", f.line) : "", f.what), f.fix);
        else
          faults_.add(f);
      }
      if (!unread.empty()) {
        distrust_model();
        return;
      }
    }
    const std::string from = all.empty() ? file_ : all[0].file;
    const std::string prefix = all.empty() ? "model." : "";
    all.insert(all.end(), model_settings_.begin(), model_settings_.end());
    std::map<std::string, size_t> places;
    const size_t before = faults_.list().size();
    config_.model.config = resolve_model(all, from, prefix, faults_, &places);
    if (faults_.list().size() > before) distrust_model();
    for (const auto& [name, i] : places) {
      // Only to name a place: rules between run and model mostly have a run setting to name.
      places_["model." + name] = {"", all[i].key, {}, "", all[i].file, all[i].line};
    }
  }

  void check_rules() {
    for (const Rule<RunConfig>& rule : run_rules()) {
      const auto is_bad = [&](const std::string& key) { return bad_.contains(key); };
      if (std::any_of(rule.keys.begin(), rule.keys.end(), is_bad) || rule.holds(config_)) continue;
      const auto key =
          std::find_if(rule.keys.begin(), rule.keys.end(), [&](const std::string& k) { return places_.contains(k); });
      if (key == rule.keys.end()) {
        faults_.add({file_, 0, rule.keys[0], rule.got(config_), rule.fix});
      } else {
        const Setting& s = places_.at(*key);
        faults_.add({s.file, s.line, rule.keys[0], rule.got(config_), rule.fix});
      }
    }
  }

  const std::string& file_;
  RunConfig config_;
  std::vector<Setting> settings_;
  std::vector<ModelSetting> model_settings_;
  std::map<std::string, Setting> places_;  // where the value of a key comes from
  std::set<std::string> bad_;              // keys with a fault: rules do not ask about them
  Faults faults_;
};

}  // namespace

RunConfig parse_run_config(const std::string& text, const std::string& file_name, const Overrides& overrides) {
  return Loader(file_name).load(text, overrides);
}

RunConfig load_run_config(const std::string& path, const Overrides& overrides) {
  if (!path_exists(path)) throw Error(ErrorCode::kConfig, path, "no such file", "Give a YAML or JSON config");
  std::string text;
  try {
    text = read_text_file(path, kMaxSettingsBytes);
  } catch (const Error& e) {
    throw Error(ErrorCode::kConfig, path, e.problem, e.fix);
  }
  return parse_run_config(text, path, overrides);
}

void check_trainable(const RunConfig& config) {
  Faults faults;
  for (const Rule<RunConfig>& rule : training_rules())
    if (!rule.holds(config)) faults.add({"", 0, rule.keys[0], rule.got(config), rule.fix});
  faults.throw_if_any(ErrorCode::kConfig);
}

}  // namespace concerto

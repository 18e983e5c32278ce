// Readers of the field table that write: YAML, JSON, hash, differences.
#include <fmt/format.h>

#include "concerto/base/hash.h"
#include "concerto/config/model_fields.h"
#include "concerto/config/run_config.h"
#include "concerto/config/run_fields.h"

namespace concerto {
namespace {

bool is_used(const Field<ModelConfig>& field, const ModelConfig& model) {
  return !field.moe_only || model.model_type == ModelType::kErnie45Moe;
}

// The config as a map of sections. Slots are handed out by a mutable config, hence the copy.
Value to_value(RunConfig config) {
  Value root;
  root.kind = Value::Kind::kMap;
  for (const SectionInfo& section : run_sections()) {
    Value& map = root.entries.emplace_back(ValueEntry{section.name, {}, 0}).value;
    map.kind = Value::Kind::kMap;
    for (const Field<RunConfig>& field : run_fields())
      if (field.section == section.name) map.entries.push_back({field.name, read(field.slot(config)), 0});
    if (section.name != "model") continue;
    for (const Field<ModelConfig>& field : model_fields())
      if (is_used(field, config.model.config))
        map.entries.push_back({field.name, read(field.slot(config.model.config)), 0});
  }
  for (const Field<RunConfig>& field : run_fields())
    if (field.section.empty()) root.entries.push_back({field.name, read(field.slot(config)), 0});
  return root;
}

// Key and text of every setting that decides the numbers.
std::vector<std::pair<std::string, std::string>> deciding(RunConfig config) {
  std::vector<std::pair<std::string, std::string>> out;
  for (const Field<RunConfig>& field : run_fields()) {
    // Which weights a run starts from is known by their place; where the config.json of a new model lies decides
    // nothing.
    const bool start = field.key() == "model.path" && config.model.init == InitFrom::kPretrained;
    if (field.decides || start) out.emplace_back(field.key(), print_json(read(field.slot(config))));
  }
  for (const Field<ModelConfig>& field : model_fields())
    if (field.decides && is_used(field, config.model.config))
      out.emplace_back(field.key(), print_json(read(field.slot(config.model.config))));
  return out;
}

}  // namespace

std::string run_config_yaml(const RunConfig& config) { return print_yaml(to_value(config)); }

std::string run_config_json(const RunConfig& config) { return print_json(to_value(config)); }

std::vector<std::pair<std::string, std::string>> run_config_settings(RunConfig config) {
  std::vector<std::pair<std::string, std::string>> out;
  for (const Field<RunConfig>& field : run_fields())
    out.emplace_back(field.key(), print_json(read(field.slot(config))));
  for (const Field<ModelConfig>& field : model_fields())
    if (is_used(field, config.model.config))
      out.emplace_back(field.key(), print_json(read(field.slot(config.model.config))));
  return out;
}

std::string run_config_hash(const RunConfig& config) {
  uint64_t hash = kFnvBasis;
  for (const auto& [key, text] : deciding(config)) hash = fnv1a(key + "=" + text + "\n", hash);
  return fmt::format("{:016x}", hash);
}

std::vector<std::string> run_config_differences(const RunConfig& a, const RunConfig& b) {
  const auto here = deciding(a), there = deciding(b);
  const auto find = [](const auto& list, const std::string& key) -> const std::string* {
    for (const auto& [name, text] : list)
      if (name == key) return &text;
    return nullptr;
  };
  std::vector<std::string> lines;
  for (const auto& [key, text] : here) {
    const std::string* other = find(there, key);
    if (!other || *other != text)
      lines.push_back(fmt::format("{}: {} here, {} there", key, text, other ? *other : "nothing"));
  }
  for (const auto& [key, text] : there)
    if (!find(here, key)) lines.push_back(fmt::format("{}: nothing here, {} there", key, text));
  return lines;
}

}  // namespace concerto

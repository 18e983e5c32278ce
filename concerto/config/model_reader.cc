#include "concerto/config/model_reader.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>

#include "concerto/base/files.h"
#include "concerto/config/model_fields.h"
#include "concerto/config/run_fields.h"
#include "concerto/config/tp_plan.h"

namespace concerto {
namespace {

const Field<ModelConfig>* find_field(const std::string& name) {
  for (const Field<ModelConfig>& field : model_fields())
    if (field.name == name || std::find(field.aliases.begin(), field.aliases.end(), name) != field.aliases.end())
      return &field;
  return nullptr;
}

// What to write instead of a key that decides nothing in a config.json, but would seem to in a run file. "" if the key
// is none of these.
std::string advice_for_run_file(const std::string& name) {
  if (name == "dtype" || name == "torch_dtype") return "Set training.dtype";
  for (const Field<RunConfig>& field : run_fields())
    if (std::find(field.aliases.begin(), field.aliases.end(), name) != field.aliases.end())
      return fmt::format("Set {}", field.key());
  for (const ForeignName& foreign : foreign_names())
    if (foreign.name == name) return foreign.advice;
  const auto& layout = layout_model_keys();
  if (std::find(layout.begin(), layout.end(), name) != layout.end())
    return "Remove it: the layout of a run stands in the section `parallel`";
  return "";
}

class Resolver {
 public:
  Resolver(const std::vector<ModelSetting>& settings, const std::string& file, const std::string& prefix,
           Faults& faults)
      : settings_(settings), file_(file), prefix_(prefix), faults_(faults) {}

  ModelConfig run() {
    const ModelType type = model_type();
    if (other_family_) return config_;
    const bool old_generation = type == ModelType::kErnie45Moe && is_old_generation();
    config_ = default_model_config(type, old_generation);
    for (size_t i = 0; i < settings_.size(); ++i)
      if (find_field(settings_[i].name) != find_field("model_type")) apply(i);
    if (config_.num_key_value_heads == 0) config_.num_key_value_heads = config_.num_attention_heads;
    if (config_.moe_intermediate_size == 0) config_.moe_intermediate_size = config_.intermediate_size;
    if (type == ModelType::kErnie45Moe) dependent_defaults(old_generation);
    check_groups();
    check_rules();
    if (config_.head_dim == 0 && config_.num_attention_heads > 0)
      config_.head_dim = config_.hidden_size / config_.num_attention_heads;
    return config_;
  }

  std::map<std::string, size_t> places;  // canonical name -> setting

 private:
  void fault(const ModelSetting& at, std::string what, std::string fix) {
    faults_.add({at.file, at.line, at.key, std::move(what), std::move(fix)});
  }

  const ModelSetting* given(const std::string& name) const {
    for (auto it = settings_.rbegin(); it != settings_.rend(); ++it)
      if (it->name == name) return &*it;
    return nullptr;
  }

  bool is_set(const std::string& field) const {
    const auto place = places.find(field);
    return place != places.end() && !settings_[place->second].value.is_null();
  }

  // What the older generation's trainers do where its files say nothing: they update a correction bias that is used, and
  // train a balance loss that has a weight, each layer's (reference 5.2, 5.3). Theirs alone is `moe_aux_loss_lambda`.
  void dependent_defaults(bool old_generation) {
    // The older gate divides by max(g1 + g2, 1e-6) (reference 4.1, step 6).
    if (config_.moe_gate == RouterGate::kTop2 && !is_set("moe_norm_min")) config_.moe_norm_min = 1e-6;
    const ModelSetting* theirs = given("moe_aux_loss_lambda");
    if (!is_set("moe_aux_loss_per_layer") && config_.router_aux_loss_coef > 0)
      config_.moe_aux_loss_per_layer =
          (old_generation && is_set("router_aux_loss_coef")) || (theirs && theirs->key == theirs->name);
    if (old_generation && config_.moe_use_aux_free && !is_set("moe_router_bias_update_rate"))
      config_.moe_router_bias_update_rate = 1e-3;
  }

  // By the keys of the config.json: what a run sets, on top or without a file, says nothing of an age.
  bool is_old_generation() const {
    return std::any_of(settings_.begin(), settings_.end(), [&](const ModelSetting& s) {
      return s.key == s.name && (s.name == "moe_capacity" || s.name == "moe_gate" || s.name == "sinkhorn_2gate");
    });
  }

  ModelType model_type() {
    const Field<ModelConfig>& field = *find_field("model_type");
    ModelConfig read_into;
    const ModelSetting* before = nullptr;
    std::string before_text;
    for (size_t i = 0; i < settings_.size(); ++i) {
      const ModelSetting& s = settings_[i];
      if (s.name != "model_type") continue;
      Problem problem;
      if (!assign(field, field.slot(read_into), s.value, problem)) {
        // Of another family every key is foreign, and one fault says it all.
        other_family_ = s.value.is_scalar() && nearest_name(s.value.text, {"ernie4_5", "ernie4_5_moe"}).empty();
        if (s.value.is_scalar() && s.value.text.find("_vl") != std::string::npos) {
          problem.fix = "Multimodal models are not supported yet";
          other_family_ = true;
        }
        fault(s, problem.what, problem.fix);
        bad_.insert("model_type");
        return ModelType::kErnie45Moe;
      }
      if (before && before_text != s.value.text)
        fault(s, fmt::format("{} here, but {} in {}", describe(s.value), before_text, before->file), "They must agree");
      before = &s;
      before_text = s.value.text;
      places["model_type"] = i;
    }
    return read_into.model_type;
  }

  void apply(size_t i) {
    const ModelSetting& s = settings_[i];
    if (s.name == "rope_parameters" || s.name == "rope_scaling") return apply_rope(i);
    if (s.name == "base_model_tp_plan") return apply_tp_plan(s);
    if (const Field<ModelConfig>* field = find_field(s.name)) return apply_field(i, *field, s.value);
    for (const LimitedKey& limited : limited_model_keys()) {
      if (limited.name != s.name) continue;
      if (!limited.passes(s.value))
        fault(s, fmt::format("{}: {}", describe(s.value), limited.reason),
              fmt::format("Accepted: {}", limited.accepted));
      return;
    }
    if (s.key != s.name)  // written in a run file or on the command line
      if (const std::string advice = advice_for_run_file(s.name); !advice.empty())
        return fault(s, "is no setting of a model and would decide nothing here", advice);
    const auto& ignored = ignored_model_keys();
    if (std::find(ignored.begin(), ignored.end(), s.name) != ignored.end()) return;
    std::vector<std::string> names;
    for (const Field<ModelConfig>& field : model_fields()) {
      names.push_back(field.name);
      names.insert(names.end(), field.aliases.begin(), field.aliases.end());
    }
    if (!prefix_.empty()) names.insert(names.end(), {"path", "init", "init_method"});
    const std::string near = nearest_name(s.name, names);
    fault(s, "unknown setting", near.empty() ? "" : fmt::format("Did you mean {}{}?", prefix_, near));
  }

  void apply_field(size_t i, const Field<ModelConfig>& field, const Value& value) {
    const ModelSetting& s = settings_[i];
    if (field.moe_only && config_.model_type == ModelType::kErnie45) {
      if (!bad_.contains("model_type"))
        fault(s, "has no meaning in a dense model", "Remove it, or set model_type to ernie4_5_moe");
      return;
    }
    const auto place = places.find(field.name);
    if (place != places.end() && settings_[place->second].file == s.file && s.file != kCommandLine) {
      if (!same_value(field, value))
        fault(s, fmt::format("given twice, also as {}", settings_[place->second].key), "Remove one of them");
      return;
    }
    places[field.name] = i;
    if (value.is_null()) {
      if (field.name.ends_with("_token_id")) {
        *std::get<int64_t*>(field.slot(config_)) = -1;
        return;
      }
      if (field.name == "num_key_value_heads") {
        config_.num_key_value_heads = 0;
        return;
      }
      if (field.name == "moe_num_experts") {  // no experts: an older spelling
        config_.moe_num_experts = 0;
        return;
      }
      if (field.name == "head_dim" || field.nullable) return;  // as if missing
      if (field.name == "moe_capacity") {
        config_.moe_capacity.clear();
        return;
      }
    }
    Problem problem;
    if (assign(field, field.slot(config_), value, problem)) return;
    fault(s, problem.what, problem.fix);
    bad_.insert(field.name);
  }

  bool same_value(const Field<ModelConfig>& field, const Value& value) {
    ModelConfig other = config_;
    Problem ignored;
    return assign(field, field.slot(other), value, ignored) &&
           print_json(read(field.slot(other))) == print_json(read(field.slot(config_)));
  }

  void apply_tp_plan(const ModelSetting& s) {
    const TpPlanReading reading = read_tp_plan(s.value);
    for (const Problem& problem : reading.problems) fault(s, problem.what, problem.fix);
    if (!reading.note.empty()) faults_.note(fmt::format("{}: {}: {}", s.file, s.key, reading.note));
  }

  // {rope_type | type: default, rope_theta: number}, or null.
  void apply_rope(size_t i) {
    const ModelSetting& s = settings_[i];
    if (s.value.is_null()) return;
    if (s.value.kind != Value::Kind::kMap)
      return fault(s, fmt::format("expected {{rope_type: default, rope_theta: ...}}, got {}", describe(s.value)), "");
    for (const ValueEntry& entry : s.value.entries) {
      const Value& v = entry.value;
      if (entry.key == "rope_theta") {
        apply_field(i, *find_field("rope_theta"), v);
      } else if (entry.key == "rope_type" || entry.key == "type") {
        if (!v.is_null() && !(v.is_scalar() && v.text == "default"))
          fault(s, fmt::format("{} {}: only rope_type default is supported yet", entry.key, describe(v)), "");
      } else if (entry.key == "partial_rotary_factor" || (entry.key == "factor" && v.is_scalar())) {
        if (std::strtod(v.text.c_str(), nullptr) != 1.0)
          fault(s, fmt::format("{} {} is not supported yet", entry.key, describe(v)), "Accepted: 1");
      } else if (!v.is_null()) {
        fault(s, fmt::format("{} is not supported yet", describe(quoted(entry.key))),
              "Only rope_type and rope_theta are");
      }
    }
  }

  // Group gating beside experts of several modalities is defined only where tokens are told apart (reference 3.5).
  void check_groups() {
    const ModelSetting *groups = given("moe_group_experts"), *experts = given("moe_num_experts");
    const ModelSetting* hard = given("moe_use_hard_gate");
    const bool modalities = (experts && experts->value.kind == Value::Kind::kList) ||
                            (given("vision_config") && !given("vision_config")->value.is_null());
    if (groups && config_.moe_group_experts && modalities && !(hard && hard->value.text == "true"))
      fault(*groups, "group gating is not defined for experts of several modalities",
            "Set it to false, or use a text model");
  }

  void check_rules() {
    for (const Rule<ModelConfig>& rule : model_rules()) {
      const auto is_bad = [&](const std::string& key) { return bad_.contains(key); };
      if (std::any_of(rule.keys.begin(), rule.keys.end(), is_bad) || rule.holds(config_)) continue;
      const auto key =
          std::find_if(rule.keys.begin(), rule.keys.end(), [&](const std::string& k) { return places.contains(k); });
      if (key == rule.keys.end())
        faults_.add({file_, 0, prefix_ + rule.keys[0], rule.got(config_), rule.fix});
      else
        fault(settings_[places.at(*key)], rule.got(config_), rule.fix);
    }
  }

  const std::vector<ModelSetting>& settings_;
  const std::string& file_;
  const std::string& prefix_;
  Faults& faults_;
  ModelConfig config_;
  bool other_family_ = false;
  std::set<std::string> bad_;  // canonical names with a fault
};

}  // namespace

std::string model_field_name(const std::string& name) {
  const Field<ModelConfig>* field = find_field(name);
  return field ? field->name : "";
}

bool gives_every_field(const std::vector<ModelSetting>& settings) {
  std::set<std::string> names;
  bool dense = false;
  for (const ModelSetting& s : settings) {
    names.insert(model_field_name(s.name));
    dense |= s.name == "model_type" && s.value.text == "ernie4_5";
  }
  const auto& fields = model_fields();
  return std::all_of(fields.begin(), fields.end(),
                     [&](const Field<ModelConfig>& f) { return (dense && f.moe_only) || names.contains(f.name); });
}

void read_model_file(const std::string& path, std::vector<ModelSetting>& settings, Faults& faults) {
  namespace fs = std::filesystem;
  std::error_code ec;
  const std::string file = fs::is_directory(path, ec) ? (fs::path(path) / "config.json").string() : path;
  if (!fs::exists(file, ec))
    return faults.add({file, 0, "", "no such file", "Give a Hugging Face model folder or its config.json"});
  std::string text;
  try {
    text = read_text_file(file, kMaxSettingsBytes);
  } catch (const Error& e) {
    return faults.add({file, 0, "", e.problem, e.fix});
  }
  Value root;
  SyntaxFault syntax;
  if (!parse_json_settings(text, root, syntax)) return faults.add({file, syntax.line, "", syntax.what, ""});
  if (root.kind != Value::Kind::kMap)
    return faults.add({file, 0, "", fmt::format("expected an object, got {}", describe(root)), ""});
  if (!root.find("model_type")) faults.add({file, 0, "model_type", "missing", "Set it to ernie4_5 or ernie4_5_moe"});
  for (ValueEntry& entry : root.entries) settings.push_back({entry.key, std::move(entry.value), file, 0, entry.key});
}

ModelConfig resolve_model(const std::vector<ModelSetting>& settings, const std::string& file, const std::string& prefix,
                          Faults& faults, std::map<std::string, size_t>* places) {
  Resolver resolver(settings, file, prefix, faults);
  ModelConfig config = resolver.run();
  if (places) *places = std::move(resolver.places);
  return config;
}

}  // namespace concerto

// Readers of the field table that explain: `concerto config help` and docs/config.md.
#include <fmt/format.h>

#include <algorithm>

#include "concerto/config/model_fields.h"
#include "concerto/config/run_config.h"
#include "concerto/config/run_fields.h"
#include "concerto/config/tp_plan.h"

namespace concerto {
namespace {

// A field of either table, with what its slot tells.
struct Row {
  const FieldInfo* info;
  std::string type, initial;
  std::vector<std::pair<std::string, std::string>> values;  // of an enum: name and meaning
};

Row row_of(const FieldInfo& info, const Slot& slot) {
  const Value initial = read(slot);
  Row row{&info, type_name(info, slot), initial.kind == Value::Kind::kQuoted ? initial.text : print_json(initial), {}};
  if (!info.unset.empty()) row.initial = info.unset;
  if (const EnumSlot* e = std::get_if<EnumSlot>(&slot))
    for (const EnumName& name : *e->names)
      if (*name.help) row.values.emplace_back(name.name, name.help);
  return row;
}

// Every setting in the order of the sections; model fields follow the `model` section's own.
std::vector<Row> all_rows() {
  RunConfig config;
  std::vector<Row> rows;
  for (const SectionInfo& section : run_sections()) {
    for (const Field<RunConfig>& field : run_fields())
      if (field.section == section.name) rows.push_back(row_of(field, field.slot(config)));
    if (section.name == "model")
      for (const Field<ModelConfig>& field : model_fields())
        rows.push_back(row_of(field, field.slot(config.model.config)));
  }
  for (const Field<RunConfig>& field : run_fields())
    if (field.section.empty()) rows.push_back(row_of(field, field.slot(config)));
  return rows;
}

std::string join(const std::vector<std::string>& words, const char* before, const char* after) {
  std::string text;
  for (const std::string& word : words) text += fmt::format("{}{}{}{}", text.empty() ? "" : ", ", before, word, after);
  return text;
}

std::string line_of(const Row& row) {
  return fmt::format("  {:<32} {} [{}]\n", row.info->key(), row.info->help, row.initial);
}

std::string details_of(const Row& row) {
  std::string text =
      fmt::format("{}\n  {}\n  type:    {}\n  default: {}\n", row.info->key(), row.info->help, row.type, row.initial);
  if (row.info->has_range) text += fmt::format("  range:   {}\n", range_text(*row.info));
  for (const auto& [name, meaning] : row.values) text += fmt::format("  {}: {}\n", name, meaning);
  if (!row.info->aliases.empty()) text += fmt::format("  also as: {}\n", join(row.info->aliases, "", ""));
  return text;
}

// The bar ends a cell of a table, so it is escaped.
std::string cell(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == '|') out += '\\';
    out += c;
  }
  return out;
}

std::string markdown_row(const Row& row) {
  std::string meaning = row.info->help;
  for (const auto& [name, help] : row.values) meaning += fmt::format("; `{}`: {}", name, help);
  if (row.info->moe_only) meaning += " (MoE only)";
  std::string type = row.values.empty() ? row.type : "name";
  if (row.info->has_range) type += fmt::format(", {}", range_text(*row.info));
  return fmt::format("| `{}` | {} | {} | {} | {} |\n", row.info->name, cell(type), cell(row.initial), cell(meaning),
                     join(row.info->aliases, "`", "`"));
}

template <class Root>
std::string markdown_rules(const std::vector<Rule<Root>>& rules) {
  std::string text;
  for (const Rule<Root>& rule : rules) text += fmt::format("- {}\n", rule.text);
  return text;
}

const char* kTableHead = "| setting | type | default | meaning | also accepted |\n|---|---|---|---|---|\n";

}  // namespace

std::string config_help(const std::string& key) {
  const std::vector<Row> rows = all_rows();
  std::string text;
  if (key.empty()) {
    text = "A config is one YAML or JSON file of sections; --section.key=value on the command line overrides it.\n\n";
    for (const SectionInfo& section : run_sections()) text += fmt::format("  {:<12} {}\n", section.name, section.help);
    for (const Row& row : rows)
      if (row.info->section.empty())
        text += fmt::format("  {:<12} {} [{}]\n", row.info->name, row.info->help, row.initial);
    return text +
           "\n`concerto config help SECTION` lists a section, `concerto config help SECTION.KEY` explains a setting.\n";
  }
  for (const SectionInfo& section : run_sections()) {
    if (section.name != key) continue;
    text = fmt::format("{}: {}\n", section.name, section.help);
    for (const Row& row : rows)
      if (row.info->section == key) text += line_of(row);
    return text;
  }
  std::vector<std::string> names;
  for (const SectionInfo& section : run_sections()) names.push_back(section.name);
  for (const Row& row : rows) {
    names.push_back(row.info->key());
    names.push_back(row.info->name);
    const auto& aliases = row.info->aliases;
    names.insert(names.end(), aliases.begin(), aliases.end());
    if (row.info->key() == key || row.info->name == key ||
        std::find(aliases.begin(), aliases.end(), key) != aliases.end())
      text += details_of(row);
  }
  if (!text.empty()) return text;
  const std::string near = nearest_name(key, names);
  throw Error(ErrorCode::kUsage, key, "no such section or setting",
              near.empty() ? "Run `concerto config help` for a list" : fmt::format("Did you mean {}?", near));
}

std::string config_markdown() {
  const std::vector<Row> rows = all_rows();
  std::string text =
      "# Settings\n\n"
      "Generated from the field tables in `concerto/config` by `concerto config help --markdown > docs/config.md`; a "
      "test fails when it is "
      "stale.\n\n"
      "A run is one YAML or JSON file of sections. `--section.key=value` on the command line overrides it. Relative "
      "paths are relative to the "
      "current directory. An unknown key is an error that names the nearest known one, and all faults of a file are "
      "reported at once. The names "
      "in the last column (of ERNIEKit, PaddleFormers, Megatron and Hugging Face) mean the same; they stand in the "
      "section or at the top level.\n";
  for (const SectionInfo& section : run_sections()) {
    text += fmt::format("\n## {}\n\nHere: {}.\n\n{}", section.name, section.help, kTableHead);
    bool model_head = false;
    for (const Row& row : rows) {
      if (row.info->section != section.name) continue;
      const bool own = row.info->name == "path" || row.info->name == "init" || row.info->name == "init_method";
      if (section.name == "model" && !own && !model_head) {
        model_head = true;
        text += fmt::format(
            "\nThe fields of a Hugging Face config.json, in the file or inline. Defaults are those of `ernie4_5_moe`; "
            "`ernie4_5` differs below."
            "\n\n{}",
            kTableHead);
      }
      text += markdown_row(row);
    }
  }
  text += fmt::format("\n## Top level\n\n{}", kTableHead);
  for (const Row& row : rows)
    if (row.info->section.empty()) text += markdown_row(row);

  text += "\n## What must hold between settings\n\n" + markdown_rules(run_rules()) + markdown_rules(training_rules()) +
          "\nOf a model:\n\n" + markdown_rules(model_rules());

  text +=
      "\n## Defaults of a model file\n\nA missing field of a config.json takes Hugging Face's default for its "
      "`model_type`. A MoE file with "
      "`moe_capacity`, `moe_gate` or `sinkhorn_2gate` is of the older generation and takes that one's. There, unless "
      "given, "
      "`moe_router_bias_update_rate` is 0.001 if `moe_use_aux_free` is true, and `moe_aux_loss_per_layer` is true if "
      "`router_aux_loss_coef` is given; the latter too in any file that calls this weight `moe_aux_loss_lambda`.\n\n"
      "| field | `ernie4_5` | `ernie4_5_moe` | older MoE file |\n|---|---|---|---|\n";
  ModelConfig dense = default_model_config(ModelType::kErnie45, false);
  ModelConfig moe = default_model_config(ModelType::kErnie45Moe, false);
  ModelConfig old = default_model_config(ModelType::kErnie45Moe, true);
  for (const Field<ModelConfig>& field : model_fields()) {
    const auto text_of = [&](ModelConfig& config) { return print_json(read(field.slot(config))); };
    if (field.name == "model_type" || (text_of(dense) == text_of(moe) && text_of(moe) == text_of(old))) continue;
    const bool all_heads = field.name == "num_key_value_heads";
    text += fmt::format("| `{}` | {} | {} | {} |\n", field.name, field.moe_only ? "-" : text_of(dense), text_of(moe),
                        all_heads ? "num_attention_heads" : text_of(old));
  }

  text +=
      "\n## Keys of a config.json that are not built\n\nAccepted with the values given here, which say what this "
      "version does; any other value "
      "is refused.\n\n| key | accepted | else |\n|---|---|---|\n";
  for (const LimitedKey& key : limited_model_keys())
    text += fmt::format("| `{}` | {} | {} |\n", key.name, cell(key.accepted), cell(key.reason));
  text +=
      "\n`base_model_tp_plan` is read and decides nothing: tensor parallel ranks cut fixed modules in fixed ways. A "
      "plan "
      "that names these splits, or copies of whole modules, passes with a note; another is refused. Its words: " +
      join(tp_plan_words(), "`", "`") + ".\n";
  text +=
      "\nRead and ignored, because they do not change what the model computes: " +
      join(ignored_model_keys(), "`", "`") +
      ".\n\nOf these, the `model` section of a run file refuses what a run sets elsewhere: `dtype`, `torch_dtype`, " +
      join(layout_model_keys(), "`", "`") + ".\n";

  text += "\n## Names of other systems without an equal here\n\n| name | what to do |\n|---|---|\n";
  for (const ForeignName& foreign : foreign_names())
    text += fmt::format("| `{}` | {} |\n", foreign.name, cell(foreign.advice));
  return text;
}

}  // namespace concerto

#include "concerto/cli/config_command.h"

#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "concerto/base/error.h"
#include "concerto/base/files.h"
#include "concerto/cli/layout_view.h"
#include "concerto/cli/overrides.h"
#include "concerto/config/run_config.h"
#include "concerto/topology/layout.h"
#include "concerto/train/step_engine.h"

namespace concerto {
namespace {

struct Options {
  std::string key, path, svg;
  bool markdown = false, json = false, schedule = false, layout = false;
  int64_t ranks = 0;  // 0: as few as the layout takes
};

void print(const std::string& text) { std::fputs(text.c_str(), stdout); }

void help(const Options& options) {
  const std::string text = options.markdown ? config_markdown() : config_help(options.key);
  print(options.json ? nlohmann::json{{"help", text}}.dump() + "\n" : text);
}

std::string summary(const RunConfig& c) {
  const ModelConfig& m = c.model.config;
  std::string text = fmt::format("model: {} layers, hidden {}, {} / {} heads of {}, vocabulary {}", m.num_hidden_layers,
                                 m.hidden_size, m.num_attention_heads, m.num_key_value_heads, m.head_dim, m.vocab_size);
  if (const int64_t layers = m.num_moe_layers())
    text += fmt::format("; {} layers with {} experts, {} a token", layers, m.moe_num_experts, m.moe_k);
  text += fmt::format("\ntraining: {} steps x {} sequences x {} tokens, {}, {} backend\n", c.training.steps,
                      c.training.global_batch_size, c.training.seq_length, c.training.dtype, c.backend);
  return text;
}

// A config without training data is sound: eval and bench need none.
void check(const Options& options, const std::vector<std::string>& rest) {
  const RunConfig config = load_run_config(options.path, parse_overrides(rest));
  std::string missing;
  try {
    check_trainable(config);
  } catch (const Error& e) {
    missing = e.what();
  }
  const std::string hash = run_config_hash(config);
  if (options.json) {
    print(nlohmann::json{{"ok", true},
                         {"config", options.path},
                         {"hash", hash},
                         {"notes", config.notes},
                         {"missing_to_train", missing}}
              .dump() +
          "\n");
    return;
  }
  print(fmt::format("OK {} ({})\n{}", options.path, hash, summary(config)));
  for (const std::string& note : config.notes) print(fmt::format("note: {}\n", note));
  if (!missing.empty()) print(fmt::format("To train it, still missing:\n{}\n", missing));
}

MeshSizes mesh_sizes(const Options& options, const RunConfig& config) {
  return resolve_layout(config, static_cast<int>(options.ranks > 0 ? options.ranks : least_ranks(config.parallel)));
}

nlohmann::json schedule_json(const PipelineSchedule& s, const PipelineTiming& timing, double least) {
  std::vector<std::string> lists;
  for (const std::vector<Action>& list : s.ranks) lists.push_back(list_text(list));
  return {
      {"schedule", s.name},      {"ranks", s.pp},           {"chunks", s.chunks},    {"micro_batches", s.micro_batches},
      {"length", timing.length}, {"bubble", timing.bubble}, {"least_bubble", least}, {"in_flight", peak_in_flight(s)},
      {"slots", s.slots},        {"actions", lists}};
}

std::string schedule_report(const PipelineSchedule& s, const PipelineTiming& timing, double least, int data_ranks) {
  std::string text = fmt::format("{}: pipeline ranks {}, micro-batches {}", s.name, s.pp, s.micro_batches);
  if (s.chunks > 1) text += fmt::format(", virtual stages of a rank {}", s.chunks);
  if (data_ranks > 1) text += fmt::format(" (of the first of {} data parallel ranks)", data_ranks);
  text += "\n\n" + pipeline_text(s);
  text += fmt::format(
      "\nbubble {:.2f} %, at least {:.2f} % in such a schedule, where F, I and W take equally long (B = I + W)\n",
      100 * timing.bubble, 100 * least);
  text += fmt::format("micro-batches in flight at most, by rank: {}", fmt::join(peak_in_flight(s), " "));
  if (s.chunks > 1) text += fmt::format("; each of one chunk, 1/{} of a rank's layers", s.chunks);
  return text + "\n";
}

void show_schedule(const Options& options, const RunConfig& config) {
  const MeshSizes sizes = mesh_sizes(options, config);
  const PipelineSchedule s = step_schedule(config, sizes);
  const PipelineTiming timing = time_pipeline(s);
  const double least = bubble_bound({s.name, s.pp, s.chunks, s.micro_batches, s.together});
  if (!options.svg.empty()) write_file_atomic(options.svg, pipeline_svg(s));
  print(options.json ? schedule_json(s, timing, least).dump() + "\n" : schedule_report(s, timing, least, sizes.dp));
}

void show_layout(const Options& options, const RunConfig& config) {
  const MeshSizes sizes = mesh_sizes(options, config);
  if (!options.svg.empty()) write_file_atomic(options.svg, layout_svg(config, sizes));
  print(options.json ? layout_json(config, sizes).dump() + "\n" : layout_report(config, sizes));
}

void show(const Options& options, const std::vector<std::string>& rest) {
  const RunConfig config = load_run_config(options.path, parse_overrides(rest));
  if (!options.schedule && !options.layout && (!options.svg.empty() || options.ranks > 0))
    throw Error(ErrorCode::kUsage, options.svg.empty() ? "--ranks" : "--svg", "is for --schedule and --layout",
                "Add one of them");
  if (options.schedule) return show_schedule(options, config);
  if (options.layout) return show_layout(options, config);
  print(options.json ? run_config_json(config) + "\n" : run_config_yaml(config));
}

}  // namespace

void add_config_command(CLI::App& app) {
  CLI::App* command = app.add_subcommand("config", "explain settings, check or resolve a config");
  command->require_subcommand(1);
  const auto options = std::make_shared<Options>();

  CLI::App* help_command = command->add_subcommand("help", "list the settings, or explain a section or a setting");
  help_command->add_option("KEY", options->key, "a section, as in training, or a setting, as in training.steps");
  help_command->add_flag("--markdown", options->markdown, "print the whole reference (docs/config.md)");
  help_command->add_flag("--json", options->json, "print one JSON object");
  help_command->callback([options] { help(*options); });

  const auto add = [&](const char* name, const char* text,
                       void (*run)(const Options&, const std::vector<std::string>&)) {
    CLI::App* sub = command->add_subcommand(name, text);
    sub->add_option("CONFIG", options->path, "a YAML or JSON config; --section.key=value behind it overrides a setting")
        ->required();
    sub->add_flag("--json", options->json, "print one JSON object");
    sub->allow_extras();
    sub->callback([sub, options, run] { run(*options, sub->remaining()); });
    return sub;
  };
  add("check", "report every fault of a config", check);
  CLI::App* show_command =
      add("show", "print a config as it is resolved, or what its step looks like on many ranks", show);
  CLI::Option* schedule = show_command->add_flag(
      "--schedule", options->schedule, "print who computes what when, the bubble, and what it could be at least");
  show_command
      ->add_flag("--layout", options->layout,
                 "print which rank holds what: stages, layers, experts, bytes, and what it sends")
      ->excludes(schedule);
  show_command->add_option("--svg", options->svg, "with --schedule or --layout: also draw it, into this file");
  show_command
      ->add_option("-n,--ranks", options->ranks,
                   "with --schedule or --layout: ranks of the job (default: as few as the layout takes)")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 20));
}

}  // namespace concerto

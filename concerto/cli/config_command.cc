#include "concerto/cli/config_command.h"

#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "concerto/base/error.h"
#include "concerto/cli/overrides.h"
#include "concerto/config/run_config.h"

namespace concerto {
namespace {

struct Options {
  std::string key, path;
  bool markdown = false, json = false;
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
    print(nlohmann::json{{"ok", true}, {"config", options.path}, {"hash", hash}, {"missing_to_train", missing}}.dump() +
          "\n");
    return;
  }
  print(fmt::format("OK {} ({})\n{}", options.path, hash, summary(config)));
  if (!missing.empty()) print(fmt::format("To train it, still missing:\n{}\n", missing));
}

void show(const Options& options, const std::vector<std::string>& rest) {
  const RunConfig config = load_run_config(options.path, parse_overrides(rest));
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
  };
  add("check", "report every fault of a config", check);
  add("show", "print a config as it is resolved", show);
}

}  // namespace concerto

// How evenly a run's routers loaded its experts: a table, a picture, or JSON lines.
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "concerto/base/files.h"
#include "concerto/cli/inspect_command.h"
#include "concerto/cli/option_checks.h"
#include "concerto/train/human_units.h"
#include "concerto/train/load_picture.h"

namespace concerto {
namespace {

using Json = nlohmann::ordered_json;

struct InspectLoadOptions {
  std::string run_dir, layers, steps, output;
  bool json = false, no_picture = false;
};

struct Range {
  int64_t first, last;
};

// "7", "3-9", "3-" or "-9"; none if it is nothing of the kind.
std::optional<Range> parse_range(std::string_view text, int64_t lowest, int64_t highest) {
  const auto parse = [](std::string_view part, int64_t& value) {
    const auto [end, error] = std::from_chars(part.data(), part.data() + part.size(), value);
    return error == std::errc() && end == part.data() + part.size() && value >= 0;
  };
  Range range{lowest, highest};
  const size_t dash = text.find('-');
  if (dash == std::string_view::npos) {
    if (!parse(text, range.first)) return std::nullopt;
    range.last = range.first;
    return range;
  }
  const std::string_view before = text.substr(0, dash), after = text.substr(dash + 1);
  if (before.empty() && after.empty()) return std::nullopt;
  if (!before.empty() && !parse(before, range.first)) return std::nullopt;
  if (!after.empty() && !parse(after, range.last)) return std::nullopt;
  return range.first <= range.last ? std::optional<Range>(range) : std::nullopt;
}

// "1,3-5": those of the run's MoE layers. A single number must be one of them; a range takes those that it holds.
std::vector<int64_t> parse_layers(const std::string& text, const LoadHead& head) {
  std::vector<int64_t> layers;
  for (size_t at = 0; at <= text.size();) {
    const size_t comma = std::min(text.find(',', at), text.size());
    const std::string part = text.substr(at, comma - at);
    at = comma + 1;
    const auto range = parse_range(part, 0, std::numeric_limits<int64_t>::max());
    if (!range)
      throw Error(ErrorCode::kUsage, "--layers", fmt::format("'{}' is no layer and no range of layers", part),
                  "Write it as in --layers 1,3-5.");
    if (range->first == range->last) {
      layers.push_back(range->first);
      continue;
    }
    const size_t before = layers.size();
    for (const int64_t layer : head.layers)
      if (layer >= range->first && layer <= range->last) layers.push_back(layer);
    if (layers.size() == before)
      throw Error(ErrorCode::kUsage, "--layers", fmt::format("no MoE layer lies in {}", part),
                  fmt::format("The run has {}.", fmt::join(head.layers, ", ")));
  }
  return layers;
}

std::string record_of(const std::string& run_dir) {
  const std::string path = run_dir + "/" + kLoadFileName;
  if (path_exists(path)) return path;
  if (!is_directory(run_dir)) throw Error(ErrorCode::kIo, run_dir, "there is no such folder", "Give a run folder.");
  throw Error(ErrorCode::kIo, run_dir, fmt::format("holds no {}", kLoadFileName),
              "Only runs of Mixture-of-Experts models write it, unless monitor.expert_load is false.");
}

struct Quietest {
  int64_t expert;
  double over_mean;
};
Quietest quietest_of(const LayerSeries& layer) {
  const auto it = std::min_element(layer.tokens.begin(), layer.tokens.end());
  const double choices = static_cast<double>(std::max<int64_t>(layer.total.choices, 1));
  return {it - layer.tokens.begin(), static_cast<double>(*it) * static_cast<double>(layer.tokens.size()) / choices};
}

void print_table(const LoadSeries& s) {
  const bool drops = s.layers[0].total.has_drops, bias = s.layers[0].total.has_bias;
  fmt::print("steps {} to {}, {} experts a layer\n\n", group_digits(s.first_step), group_digits(s.last_step),
             s.experts);
  fmt::print("layer  max/mean  worst at step      idle  entropy  busiest expert  quietest expert{}{}\n",
             drops ? "   dropped" : "", bias ? "  correction bias" : "");
  for (const LayerSeries& l : s.layers) {
    const Quietest q = quietest_of(l);
    fmt::print("{:>5}  {:>8.3f}  {:>5.2f} {:>9}  {:>6.1f} %  {:>7.3f}  {:>5} {:>6.2f} x  {:>6} {:>6.2f} x", l.layer,
               l.mean_max_over_mean, l.worst_max_over_mean, "@ " + group_digits(l.worst_step), 100 * l.mean_idle_share,
               l.mean_entropy, l.total.busiest, l.total.max_over_mean, q.expert, q.over_mean);
    if (drops) fmt::print("  {:>6.2f} %", 100 * l.total.dropped_share());
    if (bias) fmt::print("  {:.3g} to {:.3g}", l.total.bias_min, l.total.bias_max);
    fmt::print("\n");
  }
}

void print_json(const LoadSeries& s, const std::string& picture) {
  for (const LayerSeries& l : s.layers) {
    Json line{{"layer", l.layer},
              {"choices", l.total.choices},
              {"max_over_mean", l.mean_max_over_mean},
              {"worst_max_over_mean", l.worst_max_over_mean},
              {"worst_step", l.worst_step},
              {"idle_share", l.mean_idle_share},
              {"entropy", l.mean_entropy}};
    if (l.total.has_drops) line["dropped_share"] = l.total.dropped_share();
    if (l.total.has_bias) line["bias"] = {l.total.bias_min, l.total.bias_max};
    line["tokens_per_expert"] = l.tokens;
    fmt::print("{}\n", line.dump());
  }
  Json last{{"first_step", s.first_step}, {"last_step", s.last_step}, {"steps", s.steps}, {"experts", s.experts}};
  last["damaged"] = s.damaged;
  last["picture"] = picture.empty() ? Json() : Json(picture);
  fmt::print("{}\n", last.dump(-1, ' ', false, Json::error_handler_t::replace));
}

void run_inspect_load(InspectLoadOptions o) {
  while (o.run_dir.size() > 1 && o.run_dir.ends_with('/')) o.run_dir.pop_back();
  const std::string path = record_of(o.run_dir);
  LoadSeriesOptions wanted;
  const LoadHead head = LoadReader(path).head();
  if (!o.layers.empty()) wanted.layers = parse_layers(o.layers, head);
  if (!o.steps.empty()) {
    const auto range = parse_range(o.steps, wanted.first_step, wanted.last_step);
    if (!range)
      throw Error(ErrorCode::kUsage, "--steps", fmt::format("'{}' is no step and no range of steps", o.steps),
                  "Write it as in --steps 100-200, 100- or -200.");
    wanted.first_step = range->first;
    wanted.last_step = range->last;
  }
  wanted.most_bins =
      load_picture_columns(static_cast<int64_t>(wanted.layers.empty() ? head.layers.size() : wanted.layers.size()));
  const LoadSeries series = read_load_series(path, wanted);
  if (!o.no_picture) {
    if (o.output.empty()) o.output = o.run_dir + "/expert_load.png";
    write_file_atomic(o.output, load_picture(series, o.run_dir + ": expert load"));
  }
  if (series.damaged)
    warn_on_stderr(fmt::format("{}: damaged behind step {}; what follows is not shown", path, series.last_step));
  if (o.json) return print_json(series, o.no_picture ? "" : o.output);
  print_table(series);
  if (!o.no_picture) fmt::print("\npicture   {}\n", o.output);
}

}  // namespace

void add_inspect_load(CLI::App& inspect) {
  CLI::App* c = inspect.add_subcommand("load", "how evenly the experts of a run were loaded: a table and a picture");
  auto o = std::make_shared<InspectLoadOptions>();
  c->add_option("RUNDIR", o->run_dir, "the folder of a training run, running or done")->required();
  c->add_option("--layers", o->layers, "only these layers, as in 1,3-5");
  c->add_option("--steps", o->steps, "only these steps, as in 100-200, 100- or -200");
  CLI::Option* output = c->add_option("--output", o->output, "the picture, a PNG file [RUNDIR/expert_load.png]");
  output->check(path_to_write());
  c->add_flag("--no-picture", o->no_picture, "print only")->excludes(output);
  c->add_flag("--json", o->json, "one JSON object a layer, and a last one about the steps");
  c->callback([o] { run_inspect_load(*o); });
}

}  // namespace concerto

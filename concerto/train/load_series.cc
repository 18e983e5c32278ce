#include "concerto/train/load_series.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "concerto/base/error.h"

namespace concerto {
namespace {

// Places in the file's list of layers.
std::vector<size_t> wanted_layers(const LoadHead& head, const std::vector<int64_t>& wanted, const std::string& path) {
  std::vector<size_t> places;
  for (size_t l = 0; l < head.layers.size(); ++l)
    if (wanted.empty() || std::find(wanted.begin(), wanted.end(), head.layers[l]) != wanted.end()) places.push_back(l);
  for (const int64_t layer : wanted)
    if (std::find(head.layers.begin(), head.layers.end(), layer) == head.layers.end())
      throw Error(ErrorCode::kUsage, "--layers", fmt::format("layer {} is no MoE layer of {}", layer, path),
                  fmt::format("It has {}.", fmt::join(head.layers, ", ")));
  return places;
}

bool next_in_range(LoadReader& reader, const LoadSeriesOptions& options, LoadRecord& record) {
  while (reader.next(record) && record.step <= options.last_step)
    if (record.step >= options.first_step) return true;
  return false;
}

void find_range(const std::string& path, const LoadSeriesOptions& options, LoadSeries& series) {
  LoadReader reader(path);
  LoadRecord record;
  int64_t newest = 0;
  while (reader.next(record)) {
    newest = record.step;
    if (record.step < options.first_step || record.step > options.last_step) continue;
    if (series.steps++ == 0) series.first_step = record.step;
    series.last_step = record.step;
  }
  series.damaged = reader.damaged();
  if (series.steps == 0)
    throw Error(ErrorCode::kUsage, path,
                newest == 0 ? std::string("no step has been recorded yet") : fmt::format("no step lies in that range"),
                newest == 0 ? std::string("Wait for the first step to end.")
                            : fmt::format("The last recorded step is {}.", newest));
}

void add(const LoadRecord& r, size_t place, int64_t experts, int64_t bin, LayerSeries& layer) {
  const auto at = static_cast<int64_t>(place) * experts;
  const std::span<const int64_t> tokens(r.tokens.data() + at, static_cast<size_t>(experts));
  const auto dropped =
      r.has_drops ? std::span<const int64_t>(r.dropped.data() + at, tokens.size()) : std::span<const int64_t>();
  const LayerLoad load = summarize_load(tokens, dropped);
  layer.total.has_drops = layer.total.has_drops || r.has_drops;
  layer.total.dropped += load.dropped;
  if (r.has_bias) {
    layer.total.has_bias = true;
    layer.total.bias_min = static_cast<double>(r.bias[2 * place]);
    layer.total.bias_max = static_cast<double>(r.bias[2 * place + 1]);
  }
  layer.mean_max_over_mean += load.max_over_mean;
  layer.mean_idle_share += load.idle_share;
  layer.mean_entropy += load.entropy;
  if (load.max_over_mean > layer.worst_max_over_mean) {
    layer.worst_max_over_mean = load.max_over_mean;
    layer.worst_step = r.step;
  }
  for (size_t e = 0; e < tokens.size(); ++e) {
    layer.tokens[e] += tokens[e];
    layer.binned[static_cast<size_t>(bin * experts) + e] += tokens[e];
  }
}

void finish(LayerSeries& layer, int64_t steps) {
  const LayerLoad kept = layer.total;
  layer.total = summarize_load(layer.tokens);
  layer.total.has_drops = kept.has_drops;
  layer.total.dropped = kept.dropped;
  layer.total.has_bias = kept.has_bias;
  layer.total.bias_min = kept.bias_min;
  layer.total.bias_max = kept.bias_max;
  for (double* sum : {&layer.mean_max_over_mean, &layer.mean_idle_share, &layer.mean_entropy})
    *sum /= static_cast<double>(std::max<int64_t>(steps, 1));
}

}  // namespace

LoadSeries read_load_series(const std::string& path, const LoadSeriesOptions& options) {
  LoadSeries series;
  find_range(path, options, series);
  LoadReader reader(path);
  const std::vector<size_t> places = wanted_layers(reader.head(), options.layers, path);
  series.experts = reader.head().experts;
  // A file may claim any distance between two steps: memory goes by the steps that are there.
  const int64_t distance = series.last_step - series.first_step;
  series.steps_per_bin = distance / std::clamp<int64_t>(options.most_bins, 1, 2 * series.steps) + 1;
  const int64_t bins = distance / series.steps_per_bin + 1;
  series.steps_in_bin.assign(static_cast<size_t>(bins), 0);
  for (const size_t place : places) {
    LayerSeries layer;
    layer.layer = reader.head().layers[place];
    layer.tokens.assign(static_cast<size_t>(series.experts), 0);
    layer.binned.assign(static_cast<size_t>(bins * series.experts), 0);
    series.layers.push_back(std::move(layer));
  }
  LoadRecord record;
  series.steps = 0;  // another process may write or cut the file between the two passes
  while (next_in_range(reader, options, record) && record.step <= series.last_step) {
    const int64_t bin = (record.step - series.first_step) / series.steps_per_bin;
    ++series.steps;
    ++series.steps_in_bin[static_cast<size_t>(bin)];
    for (size_t i = 0; i < places.size(); ++i) add(record, places[i], series.experts, bin, series.layers[i]);
  }
  for (LayerSeries& layer : series.layers) finish(layer, series.steps);
  return series;
}

}  // namespace concerto

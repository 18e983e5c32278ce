#include "concerto/train/expert_load.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "concerto/base/error.h"

namespace concerto {

LayerLoad summarize_load(std::span<const int64_t> tokens, std::span<const int64_t> dropped,
                         std::span<const double> bias) {
  CHECK(dropped.empty() || dropped.size() == tokens.size(), "{} drops, {} experts", dropped.size(), tokens.size());
  CHECK(bias.empty() || bias.size() == tokens.size(), "{} biases, {} experts", bias.size(), tokens.size());
  LayerLoad load;
  int64_t highest = 0, idle = 0;
  for (size_t e = 0; e < tokens.size(); ++e) {
    const int64_t n = tokens[e];
    load.choices += n;
    idle += n == 0;
    if (n > highest) {
      highest = n;
      load.busiest = static_cast<int64_t>(e);
    }
  }
  for (const int64_t n : dropped) load.dropped += n;
  load.has_drops = !dropped.empty();
  load.has_bias = !bias.empty();
  if (load.has_bias) {
    const auto [low, high] = std::minmax_element(bias.begin(), bias.end());
    load.bias_min = *low;
    load.bias_max = *high;
  }
  if (load.choices == 0) return load;
  const double sum = static_cast<double>(load.choices), experts = static_cast<double>(tokens.size());
  load.max_over_mean = static_cast<double>(highest) * experts / sum;
  load.idle_share = static_cast<double>(idle) / experts;
  if (tokens.size() < 2) return load;
  double entropy = 0;
  for (const int64_t n : tokens) {
    const double p = static_cast<double>(n) / sum;
    if (n > 0) entropy -= p * std::log(p);
  }
  load.entropy = std::clamp(entropy / std::log(experts), 0.0, 1.0);
  return load;
}

double effective_experts(const LayerLoad& load, int64_t experts) {
  return std::pow(static_cast<double>(experts), load.entropy);
}

int64_t LoadWatch::count_hungry(Layer& layer, std::span<const int64_t> tokens, const LayerLoad& load) const {
  const double mean = static_cast<double>(load.choices) / static_cast<double>(tokens.size());
  int64_t starving = 0;
  for (size_t e = 0; e < tokens.size(); ++e) {
    int64_t& steps = layer.hungry_steps[e];
    steps = static_cast<double>(tokens[e]) < options_.starving_below * mean ? steps + 1 : 0;
    starving += steps >= options_.steps;
  }
  return starving;
}

void LoadWatch::say_starving(int64_t step, int64_t name, std::span<const int64_t> tokens, Layer& layer,
                             int64_t starving) {
  constexpr int64_t kNamed = 8;
  std::string ids;
  int64_t named = 0;
  for (size_t e = 0; e < tokens.size() && named < kNamed; ++e) {
    if (layer.hungry_steps[e] < options_.steps) continue;
    ids += fmt::format("{}{}", named == 0 ? "" : ", ", e);
    ++named;
  }
  if (starving > named) ids += fmt::format(" and {} more", starving - named);
  said_.push_back(fmt::format(
      "step {}: layer {}: {} of {} experts starve{} ({}): under {:g} of the mean load for {} steps", step, name,
      starving, tokens.size(), starving == 1 ? "s" : "", ids, options_.starving_below, options_.steps));
  layer.starving_said = starving;
}

void LoadWatch::say_collapsed(int64_t step, int64_t name, std::span<const int64_t> tokens, const LayerLoad& load) {
  const double share = load.max_over_mean / static_cast<double>(tokens.size());
  said_.push_back(fmt::format(
      "step {}: layer {}: router collapse: choices spread over {:.1f} of {} experts, few for {} steps; expert {} takes "
      "{:.0f} % of them",
      step, name, effective_experts(load, static_cast<int64_t>(tokens.size())), tokens.size(), options_.steps,
      load.busiest, 100 * share));
}

const std::vector<std::string>& LoadWatch::step(int64_t step, std::span<const int64_t> layers,
                                                std::span<const std::vector<int64_t>> tokens,
                                                std::span<const LayerLoad> loads) {
  CHECK(layers.size() == tokens.size() && layers.size() == loads.size());
  said_.clear();
  if (options_.steps == 0) return said_;
  layers_.resize(layers.size());
  for (size_t l = 0; l < layers.size(); ++l) {
    Layer& layer = layers_[l];
    layer.hungry_steps.resize(tokens[l].size(), 0);
    if (loads[l].choices == 0) continue;
    const int64_t starving = count_hungry(layer, tokens[l], loads[l]);
    const auto experts = static_cast<double>(tokens[l].size()), k = static_cast<double>(options_.experts_per_token);
    const double few = k + options_.collapsed_below * std::max(0.0, experts - k);
    const bool collapsed = experts > k && effective_experts(loads[l], static_cast<int64_t>(tokens[l].size())) < few;
    layer.collapsed_steps = collapsed ? layer.collapsed_steps + 1 : 0;
    if (layer.collapsed_steps >= options_.steps && !layer.collapse_said) {
      layer.collapse_said = true;
      say_collapsed(step, layers[l], tokens[l], loads[l]);
    }
    if (starving > 0 && starving >= 2 * layer.starving_said) say_starving(step, layers[l], tokens[l], layer, starving);
  }
  return said_;
}

}  // namespace concerto

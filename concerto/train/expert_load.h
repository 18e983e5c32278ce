// How evenly the routers of a step spread its tokens over the experts: from whole-number counts, one summary a layer.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace concerto {

// One MoE layer in one step (or over several: counts add up). A *choice* is a (token, expert) pair that the router
// chose; top-k routing makes k of them a token.
struct LayerLoad {
  int64_t choices = 0;
  int64_t dropped = 0;       // of them, those that found their expert full
  int64_t busiest = 0;       // the expert with the most choices, the first of equals
  double max_over_mean = 1;  // busiest expert over the mean: 1 is balanced, E is all to one
  double idle_share = 0;     // experts without a single choice, of all
  // -sum_e p_e log p_e / log E, p_e the share of the choices that went to e: 1 is balanced; log k / log E if every
  // token chooses the same k.
  double entropy = 1;
  bool has_drops = false, has_bias = false;  // whether the numbers of drops and of the bias mean anything
  double bias_min = 0, bias_max = 0;         // correction bias over the experts

  double dropped_share() const {
    return choices > 0 ? static_cast<double>(dropped) / static_cast<double>(choices) : 0.0;
  }
};

// `tokens`: choices of each expert, before any is dropped; `dropped`: of them the dropped, the same size, or empty
// where routers drop nothing; `bias`: correction bias of each expert, or empty where there is none. Without any choice
// the layer counts as balanced (1, 0, 1). No allocation.
LayerLoad summarize_load(std::span<const int64_t> tokens, std::span<const int64_t> dropped = {},
                         std::span<const double> bias = {});

// exp(entropy): as many experts, evenly loaded, would spread the choices as far. Between 1 and `experts`.
double effective_experts(const LayerLoad& load, int64_t experts);

struct LoadWatchOptions {
  int64_t steps = 100;           // in a row that a bad load must last; 0: never warn
  double starving_below = 0.01;  // an expert starves with fewer choices than this share of its layer's mean
  double collapsed_below = 0.1;  // a router collapses with fewer effective experts than k + this * (E - k)
  int64_t experts_per_token = 1;
};

// Finds experts that starve and routers that collapse, and says so once: a layer's starving experts again only when
// they have become twice as many, a collapsed layer never again. Steps without a choice count as nothing.
class LoadWatch {
 public:
  explicit LoadWatch(const LoadWatchOptions& options) : options_(options) {}

  // What there is to say after this step, a line each; mostly nothing, and then nothing is allocated after the first
  // call. layers, tokens, loads: [MoE layers]; tokens[l]: [experts].
  const std::vector<std::string>& step(int64_t step, std::span<const int64_t> layers,
                                       std::span<const std::vector<int64_t>> tokens, std::span<const LayerLoad> loads);

 private:
  struct Layer {
    std::vector<int64_t> hungry_steps;  // [experts] in a row
    int64_t collapsed_steps = 0;        // in a row
    int64_t starving_said = 0;
    bool collapse_said = false;
  };
  int64_t count_hungry(Layer& layer, std::span<const int64_t> tokens, const LayerLoad& load) const;
  void say_starving(int64_t step, int64_t name, std::span<const int64_t> tokens, Layer& layer, int64_t starving);
  void say_collapsed(int64_t step, int64_t name, std::span<const int64_t> tokens, const LayerLoad& load);

  LoadWatchOptions options_;
  std::vector<Layer> layers_;
  std::vector<std::string> said_;
};

}  // namespace concerto

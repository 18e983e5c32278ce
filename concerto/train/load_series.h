// A run's expert loads over its steps, as `concerto inspect load` shows them.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "concerto/train/expert_load.h"
#include "concerto/train/load_file.h"

namespace concerto {

struct LoadSeriesOptions {
  std::vector<int64_t> layers;  // numbers of the layers wanted; empty: all MoE layers
  int64_t first_step = 1, last_step = std::numeric_limits<int64_t>::max();
  int64_t most_bins = 800;
};

// One layer over the steps that were asked for.
struct LayerSeries {
  int64_t layer = 0;
  LayerLoad total;  // of the sums over the steps; bias of the last step
  double mean_max_over_mean = 0, mean_idle_share = 0, mean_entropy = 0;  // over the steps
  double worst_max_over_mean = 0;
  int64_t worst_step = 0;
  std::vector<int64_t> tokens;  // [experts] sums over the steps
  std::vector<int64_t> binned;  // [bins x experts] sums over the steps of each bin
};

struct LoadSeries {
  int64_t experts = 0;
  int64_t first_step = 0, last_step = 0;  // the first and last that were found
  int64_t steps = 0;                      // found: less than last - first + 1 if some are missing
  int64_t steps_per_bin = 1;
  std::vector<int64_t> steps_in_bin;  // [bins] found
  std::vector<LayerSeries> layers;
  bool damaged = false;  // the file cannot be read behind last_step

  int64_t bins() const { return static_cast<int64_t>(steps_in_bin.size()); }
};

// Reads RUNDIR/expert_load.bin. Error(kUsage) for a layer that is no MoE layer of the run, or if no step lies in the
// range; otherwise as LoadReader.
LoadSeries read_load_series(const std::string& path, const LoadSeriesOptions& options);

}  // namespace concerto

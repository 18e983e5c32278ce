// The picture of a run: RUNDIR/loss.svg, and a small chart for the terminal, both from metrics.jsonl.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace concerto {

struct Curve {
  std::vector<double> x, y;  // equally long, x ascending, all finite
};

struct LossCurves {
  Curve train, valid;          // loss by step
  Curve expert_max_over_mean;  // by step; empty for a dense model
};

// Reads the rows of a metrics.jsonl; broken lines and values that are null are left out. Error(kIo) if the file cannot
// be opened.
LossCurves read_loss_curves(const std::string& metrics_path);

// Running mean over `half_window` points to each side, fewer near the start so that the first value stays itself.
std::vector<double> smooth(const std::vector<double>& values, int64_t half_window);

// Round numbers (1, 2 or 5 times a power of ten apart) that lie in [low, high], about `wanted` of them.
std::vector<double> nice_ticks(double low, double high, int wanted);

// An SVG picture of 960 x 420 points (600 with the expert panel). Works with any number of points, also none.
std::string loss_svg(const LossCurves& curves, const std::string& title);

// The smoothed training loss as `rows` lines of text of at most `columns` columns, in braille dots or, without unicode,
// in stars. Empty for less than two points.
std::string loss_text(const LossCurves& curves, int64_t columns, int64_t rows, bool unicode);

// Reads RUNDIR/metrics.jsonl and writes RUNDIR/loss.svg as a whole. Error(kIo).
LossCurves write_loss_svg(const std::string& run_dir);

}  // namespace concerto

// Heat maps of expert load. A colour is the load of an expert over the mean of its layer, on a scale of powers of two:
// almost white is the mean, red is more, blue is less, dark grey is nothing at all.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "concerto/train/canvas.h"
#include "concerto/train/load_series.h"

namespace concerto {

// The place in the palette for `tokens` of an expert where the mean is `mean`; white without any mean. Loads beyond 8
// times more or less look like 8 times.
uint8_t load_color(int64_t tokens, double mean);

// Layers by experts, with axes and a bar of the colours: what TensorBoard shows of some steps.
class LoadHeatMap {
 public:
  LoadHeatMap(std::span<const int64_t> layers, int64_t experts);
  void draw(std::span<const std::vector<int64_t>> tokens);  // [layers][experts]; no allocation
  const Canvas& canvas() const { return canvas_; }

 private:
  int64_t experts_, cell_width_, cell_height_;
  Canvas canvas_;
};

// Steps that are drawn apart when a picture shows so many layers; more of them are added up.
int64_t load_picture_columns(int64_t layers);
// For every layer of the series experts by steps, with what is to say about it. As a PNG file. Error(kUsage) for more
// than one picture holds.
std::string load_picture(const LoadSeries& series, const std::string& title);

}  // namespace concerto

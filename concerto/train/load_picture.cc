#include "concerto/train/load_picture.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "concerto/base/error.h"
#include "concerto/train/human_units.h"
#include "concerto/train/loss_plot.h"

namespace concerto {
namespace {

constexpr double kDoublings = 3;  // of the scale, to each side of the mean
constexpr double kGrey = 0.68, kLine = 0.45;

uint8_t ramp_color(double doublings) {
  const double at = (std::clamp(doublings, -kDoublings, kDoublings) + kDoublings) / (2 * kDoublings);
  return static_cast<uint8_t>(std::lround(at * (color::kRamp - 1)));
}

void strong_text(Canvas& c, double x, double y, std::string_view text, double size) {
  c.text(x, y, text, size);
  c.text(x + size / 30, y, text, size);  // the font has one weight
}

// The colours and what they say, from x to x + width, about 4 sizes of text high.
void color_bar(Canvas& c, int64_t x, int64_t y, int64_t width, double size) {
  const auto height = static_cast<int64_t>(size * 1.1);
  c.text(static_cast<double>(x), static_cast<double>(y) - size * 0.5, "tokens of an expert over its layer's mean", size,
         kGrey);
  for (int64_t i = 0; i < width; ++i) {
    const double doublings = (2 * (static_cast<double>(i) + 0.5) / static_cast<double>(width) - 1) * kDoublings;
    c.fill(x + i, y, 1, height, ramp_color(doublings));
  }
  c.frame(x, y, width, height, color::shade(kLine));
  constexpr std::string_view kLabels[] = {"1/8", "1/4", "1/2", "1", "2", "4", "8 x"};
  for (int i = 0; i < 7; ++i) {
    const double at = static_cast<double>(x) + static_cast<double>(width) * i / 6;
    c.fill(static_cast<int64_t>(at), y + height, 1, 5, color::shade(kLine));
    c.text(at, static_cast<double>(y + height) + size * 1.25, kLabels[i], size, kGrey, Align::kCenter);
  }
}

void swatch(Canvas& c, int64_t x, int64_t y, uint8_t shown, std::string_view what, double size) {
  const auto side = static_cast<int64_t>(size * 1.1);
  c.fill(x, y, side, side, shown);
  c.frame(x, y, side, side, color::shade(kLine));
  c.text(static_cast<double>(x + side) + size * 0.5, static_cast<double>(y) + size * 0.9, what, size, kGrey);
}

// So many experts or layers apart that labels of this size have room.
int64_t label_stride(int64_t cell, double size) {
  for (int64_t power = 1;; power *= 10)
    for (const int64_t lead : {1, 2, 4, 5, 8})
      if (static_cast<double>(lead * power * cell) >= size) return lead * power;
}

// ---- The heat map of TensorBoard.

constexpr int64_t kMapLeft = 76, kMapTop = 108, kMapRight = 40, kMapBottom = 66, kBarWidth = 360;
constexpr double kMapText = 16;

}  // namespace

uint8_t load_color(int64_t tokens, double mean) {
  if (!(mean > 0)) return color::kWhite;
  if (tokens == 0) return color::kIdle;
  return ramp_color(std::log2(static_cast<double>(tokens) / mean));
}

LoadHeatMap::LoadHeatMap(std::span<const int64_t> layers, int64_t experts)
    : experts_(experts),
      cell_width_(std::clamp<int64_t>(960 / experts, 2, 40)),
      cell_height_(std::clamp<int64_t>(480 / static_cast<int64_t>(layers.size()), 4, 30)),
      canvas_(kMapLeft + std::max(experts * cell_width_, kBarWidth + 160) + kMapRight,
              kMapTop + static_cast<int64_t>(layers.size()) * cell_height_ + kMapBottom) {
  const int64_t width = experts * cell_width_, height = static_cast<int64_t>(layers.size()) * cell_height_;
  color_bar(canvas_, kMapLeft, 36, kBarWidth, kMapText);
  swatch(canvas_, kMapLeft + kBarWidth + 40, 36, color::kIdle, "no token", kMapText);
  canvas_.frame(kMapLeft, kMapTop, width, height, color::shade(kLine));
  const int64_t stride = label_stride(cell_height_, kMapText * 1.2);
  for (size_t l = 0; l < layers.size(); l += static_cast<size_t>(stride))
    canvas_.text(kMapLeft - 8, kMapTop + (static_cast<double>(l) + 0.5) * static_cast<double>(cell_height_) + 6,
                 fmt::format("{}", layers[l]), kMapText, kGrey, Align::kRight);
  const int64_t across = label_stride(cell_width_, kMapText * 2.2);
  for (int64_t e = 0; e < experts; e += across)
    canvas_.text(kMapLeft + (static_cast<double>(e) + 0.5) * static_cast<double>(cell_width_),
                 static_cast<double>(kMapTop + height) + 22, fmt::format("{}", e), kMapText, kGrey, Align::kCenter);
  canvas_.text(kMapLeft + static_cast<double>(width) / 2, static_cast<double>(kMapTop + height) + 48, "expert",
               kMapText, 1, Align::kCenter);
  canvas_.text(26, kMapTop + static_cast<double>(height) / 2, "layer", kMapText, 1, Align::kCenter, /*upwards=*/true);
}

void LoadHeatMap::draw(std::span<const std::vector<int64_t>> tokens) {
  for (size_t l = 0; l < tokens.size(); ++l) {
    int64_t sum = 0;
    for (const int64_t n : tokens[l]) sum += n;
    const double mean = static_cast<double>(sum) / static_cast<double>(experts_);
    for (int64_t e = 0; e < experts_; ++e)
      canvas_.fill(kMapLeft + e * cell_width_, kMapTop + static_cast<int64_t>(l) * cell_height_, cell_width_,
                   cell_height_, load_color(tokens[l][static_cast<size_t>(e)], mean));
  }
}

// ---- The picture of a run.

namespace {

constexpr int64_t kWidth = 1800, kMargin = 60, kHead = 190, kFoot = 30, kAxis = 96, kBetween = 56;
constexpr int64_t kPanelTop = 56, kPanelBottom = 84;  // room for a panel's title, and for the labels of its steps
constexpr double kTitle = 36, kPanelTitle = 25, kText = 20;

int64_t panels_across(int64_t layers) { return layers <= 6 ? 1 : layers <= 20 ? 2 : 3; }
int64_t plot_width(int64_t layers) {
  const int64_t n = panels_across(layers);
  return (kWidth - 2 * kMargin - (n - 1) * kBetween) / n - kAxis;
}

struct Panel {
  int64_t left, top, width, cell;  // of the plot
  int64_t across;                  // panels side by side
};

// As much as has room above a panel when so many lie side by side.
std::string describe(const LayerSeries& layer, int64_t across) {
  if (across > 1) {
    std::string text =
        fmt::format("max/mean {:.2f}   idle {:.1f} %", layer.mean_max_over_mean, 100 * layer.mean_idle_share);
    if (across == 2) text += fmt::format("   entropy {:.3f}", layer.mean_entropy);
    return text;
  }
  std::string text =
      fmt::format("max/mean {:.2f} (worst {:.2f} at step {})   idle {:.1f} %   entropy {:.3f}   busiest {} ({:.2f} x)",
                  layer.mean_max_over_mean, layer.worst_max_over_mean, layer.worst_step, 100 * layer.mean_idle_share,
                  layer.mean_entropy, layer.total.busiest, layer.total.max_over_mean);
  if (layer.total.has_drops) text += fmt::format("   dropped {:.2f} %", 100 * layer.total.dropped_share());
  if (layer.total.has_bias) text += fmt::format("   bias {:.3g} to {:.3g}", layer.total.bias_min, layer.total.bias_max);
  return text;
}

void panel_cells(Canvas& c, const Panel& p, const LoadSeries& series, const LayerSeries& layer) {
  const int64_t bins = series.bins(), experts = series.experts;
  for (int64_t b = 0; b < bins; ++b) {
    const int64_t x = p.left + p.width * b / bins, right = p.left + p.width * (b + 1) / bins;
    if (series.steps_in_bin[static_cast<size_t>(b)] == 0) {
      c.fill(x, p.top, right - x, experts * p.cell, color::kNone);
      continue;
    }
    const int64_t* tokens = layer.binned.data() + b * experts;
    int64_t sum = 0;
    for (int64_t e = 0; e < experts; ++e) sum += tokens[e];
    const double mean = static_cast<double>(sum) / static_cast<double>(experts);
    for (int64_t e = 0; e < experts; ++e) c.fill(x, p.top + e * p.cell, right - x, p.cell, load_color(tokens[e], mean));
  }
}

void panel_axes(Canvas& c, const Panel& p, const LoadSeries& series) {
  const int64_t height = series.experts * p.cell;
  const uint8_t line = color::shade(kLine);
  c.frame(p.left, p.top, p.width, height, line);
  const int64_t stride = label_stride(p.cell, kText * 1.25);
  for (int64_t e = 0; e < series.experts; e += stride) {
    const double y = static_cast<double>(p.top) + (static_cast<double>(e) + 0.5) * static_cast<double>(p.cell);
    c.fill(p.left - 7, static_cast<int64_t>(y), 6, 1, line);
    c.text(static_cast<double>(p.left) - 13, y + kText * 0.36, fmt::format("{}", e), kText, kGrey, Align::kRight);
  }
  const auto steps = static_cast<double>(series.bins() * series.steps_per_bin);
  const auto first = static_cast<double>(series.first_step), last = static_cast<double>(series.last_step);
  std::vector<double> ticks = nice_ticks(first, last, p.across > 1 ? 5 : 10);
  if (first == last) ticks = {first};
  for (const double tick : ticks) {
    if (tick != std::round(tick)) continue;
    const double x = static_cast<double>(p.left) + (tick - first + 0.5) / steps * static_cast<double>(p.width);
    c.fill(static_cast<int64_t>(x), p.top + height + 1, 1, 6, line);
    c.text(x, static_cast<double>(p.top + height) + 8 + kText, group_digits(static_cast<int64_t>(tick)), kText, kGrey,
           Align::kCenter);
  }
  c.text(static_cast<double>(p.left) + static_cast<double>(p.width) / 2, static_cast<double>(p.top + height) + 58,
         "step", kText, 1, Align::kCenter);
  c.text(static_cast<double>(p.left - kAxis) + 22, static_cast<double>(p.top) + static_cast<double>(height) / 2,
         "expert", kText, 1, Align::kCenter, /*upwards=*/true);
}

void picture_head(Canvas& c, const LoadSeries& series, const std::string& title) {
  strong_text(c, kMargin, 62, title, kTitle);
  std::string text = fmt::format("steps {} to {}, {} experts a layer", group_digits(series.first_step),
                                 group_digits(series.last_step), series.experts);
  if (series.steps_per_bin > 1) text += fmt::format("; a column is {} steps", series.steps_per_bin);
  c.text(kMargin, 104, text, kText, kGrey);
  const int64_t gaps = series.last_step - series.first_step + 1 - series.steps;
  if (gaps > 0)
    c.text(kMargin, 136, fmt::format("{} of these steps are not recorded", group_digits(gaps)), kText, kGrey);
  constexpr int64_t kBar = 480, kBarX = kWidth - kMargin - kBar - 180, kBarY = 74;
  color_bar(c, kBarX, kBarY, kBar, kText);
  swatch(c, kBarX + kBar + 44, kBarY, color::kIdle, "no token", kText);
  if (gaps > 0) swatch(c, kBarX + kBar + 44, kBarY + 36, color::kNone, "no record", kText);
}

}  // namespace

int64_t load_picture_columns(int64_t layers) { return plot_width(layers) / 2; }

std::string load_picture(const LoadSeries& series, const std::string& title) {
  const auto layers = static_cast<int64_t>(series.layers.size()), across = panels_across(layers);
  const int64_t cell = std::clamp<int64_t>(256 / series.experts, 1, 18), width = plot_width(layers);
  const int64_t panel_height = kPanelTop + series.experts * cell + kPanelBottom;
  const int64_t height = kHead + (layers + across - 1) / across * panel_height + kFoot;
  constexpr int64_t kHighest = (int64_t{1} << 27) / kWidth;  // 128 MiB of pixels
  if (height > kHighest)
    throw Error(ErrorCode::kUsage, "--layers",
                fmt::format("{} layers of {} experts are too many for one picture", layers, series.experts),
                "Choose some, as in --layers 1-20.");
  Canvas c(kWidth, height);
  picture_head(c, series, title);
  for (int64_t i = 0; i < layers; ++i) {
    const LayerSeries& layer = series.layers[static_cast<size_t>(i)];
    const Panel p{.left = kMargin + kAxis + i % across * (kAxis + width + kBetween),
                  .top = kHead + i / across * panel_height + kPanelTop,
                  .width = width,
                  .cell = cell,
                  .across = across};
    const std::string name = fmt::format("layer {}", layer.layer);
    strong_text(c, static_cast<double>(p.left), static_cast<double>(p.top) - 16, name, kPanelTitle);
    c.text(static_cast<double>(p.left) + Canvas::text_width(name, kPanelTitle) + 24, static_cast<double>(p.top) - 16,
           describe(layer, across), across > 1 ? kText * 0.9 : kText, kGrey);
    panel_cells(c, p, series, layer);
    panel_axes(c, p, series);
  }
  std::string png;
  c.encode(png);
  return png;
}

}  // namespace concerto

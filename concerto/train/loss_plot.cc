#include "concerto/train/loss_plot.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>

#include "concerto/base/error.h"
#include "concerto/base/files.h"
#include "concerto/train/human_units.h"

namespace concerto {
namespace {

constexpr std::string_view kTrainColor = "#2563a8", kTrainLight = "#a9c9e8", kValidColor = "#e0700d";
constexpr std::string_view kLoadColor = "#2f855a", kLoadLight = "#b2dcc4", kInk = "#1f2933", kGrey = "#66727f",
                           kGrid = "#e4e8ec";
constexpr double kWidth = 960, kLeft = 68, kRight = 28, kTop = 96, kLossHeight = 280, kLoadHeight = 110, kGap = 44,
                 kBottom = 52;
constexpr int64_t kMaxBins = 800;  // about one a point of the picture's width

struct Range {
  double low, high;
};

// Where most of the values lie: single spikes do not flatten the rest.
void extend(std::optional<Range>& range, std::vector<double> values, double outliers) {
  if (values.empty()) return;
  std::sort(values.begin(), values.end());
  const auto skip = static_cast<size_t>(outliers * static_cast<double>(values.size()));
  const double low = values[skip], high = values[values.size() - 1 - skip];
  range = range ? Range{std::min(range->low, low), std::max(range->high, high)} : Range{low, high};
}

Range padded(std::optional<Range> range, double share) {
  if (!range) return {0, 1};
  double extra = (range->high - range->low) * share;
  if (extra <= 0) extra = std::max(std::abs(range->high) * 0.1, 1e-6);
  return {range->low - extra, range->high + extra};
}

std::string tick_label(double value, const std::vector<double>& ticks) {
  const double step = ticks.size() > 1 ? ticks[1] - ticks[0] : std::max(std::abs(value), 1.0);
  const int digits = std::clamp(static_cast<int>(std::ceil(-std::log10(step) - 1e-9)), 0, 12);
  if (std::abs(value) < step * 1e-6) value = 0;
  return digits > 0 ? fmt::format("{:.{}f}", value, digits) : group_digits(std::llround(value));
}

std::string escape(std::string_view text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '&':
        out += "&amp;";
        break;
      case '"':
        out += "&quot;";
        break;
      default:
        out.push_back(static_cast<uint8_t>(c) < 0x20 ? ' ' : c);
    }
  }
  return out;
}

// Two passes of the running mean: its flat top after a spike becomes a hill.
std::vector<double> smooth_curve(const Curve& curve) {
  const auto n = static_cast<int64_t>(curve.y.size());
  const int64_t half = n < 8 ? 0 : std::max<int64_t>(n / 100, 1);
  return smooth(smooth(curve.y, half), half);
}

class Svg {
 public:
  template <class... A>
  void add(fmt::format_string<A...> format, A&&... a) {
    fmt::format_to(std::back_inserter(text_), format, std::forward<A>(a)...);
    text_.push_back('\n');
  }
  void text(double x, double y, std::string_view anchor, double size, std::string_view color, std::string_view what,
            std::string_view weight = "400") {
    add("<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\" font-size=\"{}\" font-weight=\"{}\" fill=\"{}\">{}</text>",
        x, y, anchor, size, weight, color, escape(what));
  }
  void line(double x1, double y1, double x2, double y2, std::string_view color, double width,
            std::string_view dash = "none") {
    add("<line x1=\"{:.1f}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\" stroke=\"{}\" stroke-width=\"{}\" "
        "stroke-dasharray=\"{}\"/>",
        x1, y1, x2, y2, color, width, dash);
  }
  std::string take() { return std::move(text_); }

 private:
  std::string text_;
};

// One pair of axes: maps values to the picture and draws what is in them.
struct Panel {
  double top, height;
  Range x, y;
  std::string_view id;

  double px(double v) const { return kLeft + (v - x.low) / (x.high - x.low) * (kWidth - kLeft - kRight); }
  double py(double v) const { return top + (y.high - v) / (y.high - y.low) * height; }

  void axes(Svg& svg, int wanted_ticks, bool x_labels) const {
    svg.add("<clipPath id=\"{}\"><rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\"/></clipPath>", id,
            kLeft, top, kWidth - kLeft - kRight, height);
    const auto y_ticks = nice_ticks(y.low, y.high, wanted_ticks), x_ticks = nice_ticks(x.low, x.high, 10);
    for (const double v : y_ticks) {
      svg.line(kLeft, py(v), kWidth - kRight, py(v), kGrid, 1);
      svg.text(kLeft - 10, py(v) + 4, "end", 12, kGrey, tick_label(v, y_ticks));
    }
    for (const double v : x_ticks) {
      svg.line(px(v), top + height, px(v), top + height + 5, kGrey, 1);
      if (x_labels) svg.text(px(v), top + height + 20, "middle", 12, kGrey, tick_label(v, x_ticks));
    }
    svg.line(kLeft, top + height, kWidth - kRight, top + height, kGrey, 1);
  }

  // With many points the lowest and highest of each bin are drawn: a band as wide as the noise.
  void raw(Svg& svg, const Curve& c, std::string_view color) const {
    const auto n = static_cast<int64_t>(c.x.size()), bins = std::min(n, kMaxBins);
    std::string points;
    for (int64_t b = 0; b < bins; ++b) {
      const auto first = c.y.begin() + n * b / bins, last = c.y.begin() + n * (b + 1) / bins;
      const auto [low, high] = std::minmax_element(first, last);
      const double at = px(c.x[static_cast<size_t>(n * b / bins)]);
      fmt::format_to(std::back_inserter(points), "{:.1f},{:.1f} ", at, limited(*low));
      if (low != high) fmt::format_to(std::back_inserter(points), "{:.1f},{:.1f} ", at, limited(*high));
    }
    polyline(svg, points, color, 1);
  }
  void smooth_line(Svg& svg, const Curve& c, std::string_view color) const {
    const auto values = smooth_curve(c);
    const auto n = static_cast<int64_t>(c.x.size()), bins = std::min(n, kMaxBins);
    std::string points;
    for (int64_t b = 0; b < bins; ++b) {
      const auto i = static_cast<size_t>(bins == 1 ? 0 : (n - 1) * b / (bins - 1));
      fmt::format_to(std::back_inserter(points), "{:.1f},{:.1f} ", px(c.x[i]), limited(values[i]));
    }
    polyline(svg, points, color, 2.2);
    if (n == 1) svg.add("<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"3\" fill=\"{}\"/>", px(c.x[0]), py(c.y[0]), color);
  }
  void dots(Svg& svg, const Curve& c, std::string_view color) const {
    std::string points;
    for (size_t i = 0; i < c.x.size(); ++i)
      fmt::format_to(std::back_inserter(points), "{:.1f},{:.1f} ", px(c.x[i]), limited(c.y[i]));
    polyline(svg, points, color, 1.4);
    if (c.x.size() > 60) return;
    for (size_t i = 0; i < c.x.size(); ++i)
      svg.add("<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"4\" fill=\"{}\" stroke=\"white\" stroke-width=\"1.5\"/>",
              px(c.x[i]), limited(c.y[i]), color);
  }

 private:
  double limited(double v) const {
    return std::clamp(py(v), top - height, top + 2 * height);
  }  // viewers dislike huge numbers
  void polyline(Svg& svg, const std::string& points, std::string_view color, double width) const {
    svg.add(
        "<polyline clip-path=\"url(#{})\" fill=\"none\" stroke=\"{}\" stroke-width=\"{}\" stroke-linejoin=\"round\" "
        "points=\"{}\"/>",
        id, color, width, points);
  }
};

// Entries from the right edge to the left, above the panel.
void legend(Svg& svg, double y, const std::vector<std::pair<std::string_view, std::string_view>>& entries) {
  double x = kWidth - kRight;
  for (auto it = entries.rbegin(); it != entries.rend(); ++it) {
    const double text_width = 6.6 * static_cast<double>(it->first.size());
    svg.text(x - text_width, y, "start", 12, kInk, it->first);
    svg.line(x - text_width - 26, y - 4, x - text_width - 8, y - 4, it->second, it->second == kTrainLight ? 6 : 2.6);
    x -= text_width + 44;
  }
}

std::string subtitle_of(const LossCurves& curves) {
  if (curves.train.y.empty()) return "no training step yet";
  const auto smoothed = smooth_curve(curves.train);
  std::string text =
      fmt::format("{:.0f} steps, training loss {} (smoothed)", curves.train.x.back(), format_loss(smoothed.back()));
  if (!curves.valid.y.empty()) {
    const auto best = std::min_element(curves.valid.y.begin(), curves.valid.y.end());
    text += fmt::format(", best validation loss {} at step {:.0f}", format_loss(*best),
                        curves.valid.x[static_cast<size_t>(best - curves.valid.y.begin())]);
  }
  return text;
}

std::optional<double> number(const nlohmann::json& row, const char* name) {
  const auto it = row.find(name);
  if (it == row.end() || !it->is_number()) return std::nullopt;
  const double v = it->get<double>();
  return std::isfinite(v) ? std::optional<double>(v) : std::nullopt;
}

void add_point(Curve& curve, double x, std::optional<double> y) {
  if (!y || (!curve.x.empty() && x < curve.x.back())) return;
  curve.x.push_back(x);
  curve.y.push_back(*y);
}

}  // namespace

LossCurves read_loss_curves(const std::string& metrics_path) {
  std::ifstream in(metrics_path, std::ios::binary);
  if (!in) throw Error(ErrorCode::kIo, metrics_path, "cannot be read", "Give the run folder of a training run.");
  LossCurves curves;
  bool experts = false;
  for (std::string line; std::getline(in, line);) {
    const auto row = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (!row.is_object()) continue;
    const auto step = number(row, "step");
    if (!step) continue;
    add_point(curves.train, *step, number(row, "loss"));
    add_point(curves.valid, *step, number(row, "valid_loss"));
    add_point(curves.expert_max_over_mean, *step, number(row, "expert_max_over_mean"));
    experts = experts || row.contains("expert_load");
  }
  if (!experts) curves.expert_max_over_mean = {};
  return curves;
}

std::vector<double> smooth(const std::vector<double>& values, int64_t half_window) {
  std::vector<double> sums(values.size() + 1, 0.0), out(values.size());
  for (size_t i = 0; i < values.size(); ++i) sums[i + 1] = sums[i] + values[i];
  const auto n = static_cast<int64_t>(values.size());
  for (int64_t i = 0; i < n; ++i) {
    const int64_t half = std::min(half_window, i), begin = i - half, end = std::min(i + half + 1, n);
    out[static_cast<size_t>(i)] =
        (sums[static_cast<size_t>(end)] - sums[static_cast<size_t>(begin)]) / static_cast<double>(end - begin);
  }
  return out;
}

std::vector<double> nice_ticks(double low, double high, int wanted) {
  if (!(high > low) || wanted < 1) return {};
  const double rough = (high - low) / wanted, power = std::pow(10.0, std::floor(std::log10(rough)));
  const double lead = rough / power, step = power * (lead <= 1.0 ? 1 : lead <= 2.0 ? 2 : lead <= 5.0 ? 5 : 10);
  std::vector<double> ticks;
  const double first = std::ceil(low / step - 1e-9), last = std::floor(high / step + 1e-9);
  for (double k = first; k <= last && ticks.size() < 100; ++k) ticks.push_back(k * step);
  return ticks;
}

std::string loss_svg(const LossCurves& curves, const std::string& title) {
  const bool experts = !curves.expert_max_over_mean.x.empty();
  const double height = kTop + kLossHeight + kBottom + (experts ? kGap + kLoadHeight : 0);
  Svg svg;
  svg.add(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0}\" height=\"{1}\" viewBox=\"0 0 {0} {1}\" "
      "font-family=\"'DejaVu Sans', 'Helvetica Neue', Arial, sans-serif\">",
      kWidth, height);
  svg.add("<rect width=\"100%\" height=\"100%\" fill=\"white\"/>");
  svg.text(kLeft, 32, "start", 18, kInk, title, "600");
  svg.text(kLeft, 53, "start", 12.5, kGrey, subtitle_of(curves));

  std::optional<Range> steps, losses, loads;
  for (const Curve* c : {&curves.train, &curves.valid}) extend(steps, c->x, 0);
  extend(losses, curves.train.y, 0.005);
  extend(losses, smooth_curve(curves.train), 0);
  extend(losses, curves.valid.y, 0);
  const Panel loss{kTop, kLossHeight, padded(steps, 0.01), padded(losses, 0.04), "loss"};
  loss.axes(svg, 8, !experts);
  loss.raw(svg, curves.train, kTrainLight);
  loss.smooth_line(svg, curves.train, kTrainColor);
  loss.dots(svg, curves.valid, kValidColor);
  svg.text(kLeft, kTop - 10, "start", 13, kInk, "Loss (nats per token)", "600");
  std::vector<std::pair<std::string_view, std::string_view>> entries = {{"each step", kTrainLight},
                                                                        {"training, smoothed", kTrainColor}};
  if (!curves.valid.x.empty()) entries.push_back({"validation", kValidColor});
  legend(svg, kTop - 10, entries);

  if (experts) {
    extend(loads, curves.expert_max_over_mean.y, 0.005);
    extend(loads, {1.0}, 0);
    Range range = padded(loads, 0.06);
    range.low = std::max(range.low, 1 - (range.high - 1) * 0.08);
    const double top = kTop + kLossHeight + kGap;
    const Panel load{top, kLoadHeight, loss.x, range, "load"};
    load.axes(svg, 5, true);
    svg.line(kLeft, load.py(1), kWidth - kRight, load.py(1), kGrey, 1, "4 4");
    load.raw(svg, curves.expert_max_over_mean, kLoadLight);
    load.smooth_line(svg, curves.expert_max_over_mean, kLoadColor);
    svg.text(kLeft, top - 10, "start", 13, kInk, "Busiest expert over the mean, worst layer (1 = balanced)", "600");
  }
  svg.text(kLeft + (kWidth - kLeft - kRight) / 2, height - 12, "middle", 12.5, kInk, "step");
  svg.add("</svg>");
  return svg.take();
}

std::string loss_text(const LossCurves& curves, int64_t columns, int64_t rows, bool unicode) {
  const Curve& c = curves.train;
  constexpr int64_t kLabel = 9;  // "  3.1416 "
  const int64_t plot = columns - kLabel - 2;
  if (c.x.size() < 2 || c.x.back() <= c.x.front() || plot < 4 || rows < 2) return {};
  const auto values = smooth_curve(c);
  const auto [low, high] = std::minmax_element(values.begin(), values.end());
  const double span = std::max(*high - *low, 1e-9);
  const int64_t dots_x = plot * (unicode ? 2 : 1), dots_y = rows * (unicode ? 4 : 1);
  // The bit of each dot of a braille character, by [row][column].
  constexpr uint8_t kDot[4][2] = {{0x01, 0x08}, {0x02, 0x10}, {0x04, 0x20}, {0x40, 0x80}};
  std::vector<uint8_t> cells(static_cast<size_t>(plot * rows), 0);
  const auto set = [&](int64_t x, int64_t y) {
    const int64_t cell_x = unicode ? x / 2 : x, cell_y = unicode ? y / 4 : y;
    cells[static_cast<size_t>(cell_y * plot + cell_x)] |= unicode ? kDot[y % 4][x % 2] : 1;
  };
  int64_t previous = -1;
  for (int64_t x = 0; x < dots_x; ++x) {
    const double step =
        c.x.front() + (c.x.back() - c.x.front()) * static_cast<double>(x) / static_cast<double>(dots_x - 1);
    const auto at = std::min<size_t>(
        static_cast<size_t>(std::lower_bound(c.x.begin(), c.x.end(), step - 1e-9) - c.x.begin()), c.x.size() - 1);
    const auto y = static_cast<int64_t>(std::lround((*high - values[at]) / span * static_cast<double>(dots_y - 1)));
    set(x, y);
    for (int64_t between = std::min(previous, y) + 1; previous >= 0 && between < std::max(previous, y); ++between)
      set(x, between);
    previous = y;
  }
  std::string out;
  for (int64_t row = 0; row < rows; ++row) {
    const double label = *high - span * static_cast<double>(row) / static_cast<double>(rows - 1);
    const bool labelled = row == 0 || row == rows - 1 || (rows >= 5 && row == rows / 2);
    out += labelled ? fmt::format("{:>8.4g} ", label) : std::string(kLabel, ' ');
    out += unicode ? (labelled ? "┤" : "│") : "|";
    for (int64_t x = 0; x < plot; ++x) {
      const uint8_t cell = cells[static_cast<size_t>(row * plot + x)];
      if (!unicode) {
        out.push_back(cell ? '*' : ' ');
      } else if (cell == 0) {
        out.push_back(' ');
      } else {  // U+2800 + dots, in UTF-8
        out.push_back(static_cast<char>(0xe2));
        out.push_back(static_cast<char>(0xa0 | (cell >> 6)));
        out.push_back(static_cast<char>(0x80 | (cell & 0x3f)));
      }
    }
    while (out.back() == ' ') out.pop_back();
    out.push_back('\n');
  }
  out += std::string(kLabel, ' ') + (unicode ? "└" : "+");
  for (int64_t x = 0; x < plot; ++x) out += unicode ? "─" : "-";
  const std::string first = fmt::format("{:.0f}", c.x.front());
  const auto gap = std::max<int64_t>(plot - static_cast<int64_t>(first.size()), 1);
  fmt::format_to(std::back_inserter(out), "\n{:{}}{}{:>{}}\n", "", kLabel + 1, first,
                 fmt::format("step {:.0f}", c.x.back()), gap);
  return out;
}

LossCurves write_loss_svg(const std::string& run_dir) {
  const auto curves = read_loss_curves(run_dir + "/metrics.jsonl");
  auto folder = std::filesystem::path(run_dir);
  if (!folder.has_filename()) folder = folder.parent_path();
  write_file_atomic(run_dir + "/loss.svg", loss_svg(curves, folder.filename().string()));
  return curves;
}

}  // namespace concerto

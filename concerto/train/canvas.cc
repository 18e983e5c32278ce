#include "concerto/train/canvas.h"

#include <algorithm>
#include <cmath>

#include "concerto/base/error.h"
#include "concerto/train/font_outlines.h"

namespace concerto {
namespace color {
namespace {

struct Stop {
  double at;
  Rgb rgb;
};
// After ColorBrewer's RdBu: dark at both ends, so that it also reads in grey and for most who see few colours.
constexpr Stop kStops[] = {{0.00, {8, 48, 107}},    {0.16, {33, 102, 172}},  {0.30, {90, 155, 205}},
                           {0.42, {182, 212, 233}}, {0.50, {248, 246, 240}}, {0.58, {250, 208, 170}},
                           {0.70, {238, 138, 88}},  {0.84, {196, 42, 44}},   {1.00, {103, 0, 31}}};
constexpr Rgb kInk = {31, 41, 51}, kIdleRgb = {60, 60, 66}, kNoneRgb = {226, 228, 231};

Rgb between(const Rgb& a, const Rgb& b, double share) {
  Rgb out{};
  for (size_t i = 0; i < 3; ++i) out[i] = static_cast<uint8_t>(std::lround(a[i] + (b[i] - a[i]) * share));
  return out;
}

std::array<Rgb, 256> make_palette() {
  std::array<Rgb, 256> p{};
  for (int i = 0; i < kRamp; ++i) {
    const double at = static_cast<double>(i) / (kRamp - 1);
    size_t s = 1;
    while (kStops[s].at < at) ++s;
    const Stop &low = kStops[s - 1], &high = kStops[s];
    p[static_cast<size_t>(i)] = between(low.rgb, high.rgb, (at - low.at) / (high.at - low.at));
  }
  p[kIdle] = kIdleRgb;
  p[kNone] = kNoneRgb;
  for (int i = 0; i < kShades; ++i)
    p[static_cast<size_t>(kWhite + i)] = between({255, 255, 255}, kInk, static_cast<double>(i) / (kShades - 1));
  return p;
}

}  // namespace

const std::array<Rgb, 256>& palette() {
  static const std::array<Rgb, 256> colors = make_palette();
  return colors;
}

}  // namespace color

namespace {

const int16_t* glyph_of(char c) {
  const int g = static_cast<uint8_t>(c) - kFirstGlyph;
  return kGlyphNumbers + kGlyphStarts[g >= 0 && g < kGlyphs ? g : '?' - kFirstGlyph];
}

struct Point {
  double x, y;
};
Point middle(Point a, Point b) { return {(a.x + b.x) / 2, (a.y + b.y) / 2}; }

// Sums up the signed area under the edges of an outline, pixel by pixel; a running sum along each row then is how much
// of a pixel lies inside.
struct Coverage {
  float* sums;
  int64_t width, height;

  void line(Point a, Point b) const {
    if (a.y == b.y) return;
    const double sign = a.y < b.y ? 1 : -1;
    if (a.y > b.y) std::swap(a, b);
    const double slope = (b.x - a.x) / (b.y - a.y);
    const auto first = std::max<int64_t>(0, static_cast<int64_t>(std::floor(a.y)));
    for (int64_t y = first; y < height && static_cast<double>(y) < b.y; ++y) {
      const double top = std::max(a.y, static_cast<double>(y)), bottom = std::min(b.y, static_cast<double>(y + 1));
      if (bottom <= top) continue;
      piece(y, a.x + (top - a.y) * slope, a.x + (bottom - a.y) * slope, (bottom - top) * sign);
    }
  }
  void curve(Point a, Point control, Point b) const {
    constexpr int kPieces = 6;  // letters are small
    Point from = a;
    for (int i = 1; i <= kPieces; ++i) {
      const double t = static_cast<double>(i) / kPieces, s = 1 - t;
      const Point to{s * s * a.x + 2 * s * t * control.x + t * t * b.x,
                     s * s * a.y + 2 * s * t * control.y + t * t * b.y};
      line(from, to);
      from = to;
    }
  }

 private:
  // An edge within row y from x0 to x1, `height` of it high: what is right of it is inside.
  void piece(int64_t y, double x0, double x1, double height_here) const {
    if (x0 > x1) std::swap(x0, x1);
    float* row = sums + y * (width + 2);
    const auto left = static_cast<int64_t>(std::floor(x0));
    const double length = x1 - x0;
    for (int64_t x = left;; ++x) {
      const double from = std::max(x0, static_cast<double>(x)), to = std::min(x1, static_cast<double>(x + 1));
      const double share = length > 0 ? (to - from) / length * height_here : height_here;
      const double right = static_cast<double>(x + 1) - (from + to) / 2;  // of this pixel, right of the edge
      const int64_t at = std::clamp<int64_t>(x, 0, width);
      row[at] += static_cast<float>(share * right);
      row[at + 1] += static_cast<float>(share * (1 - right));
      if (static_cast<double>(x + 1) >= x1) break;
    }
  }
};

}  // namespace

Canvas::Canvas(int64_t width, int64_t height) : width_(width), height_(height) {
  CHECK(width > 0 && height > 0 && width <= (int64_t{1} << 28) / height, "{} x {} pixels", width, height);
  pixels_.assign(static_cast<size_t>(width * height), color::kWhite);
}

void Canvas::fill(int64_t x, int64_t y, int64_t width, int64_t height, uint8_t c) {
  const int64_t left = std::max<int64_t>(x, 0), right = std::min(x + width, width_);
  if (left >= right) return;
  for (int64_t row = std::max<int64_t>(y, 0); row < std::min(y + height, height_); ++row)
    std::fill_n(pixels_.begin() + row * width_ + left, right - left, c);
}

void Canvas::frame(int64_t x, int64_t y, int64_t width, int64_t height, uint8_t c) {
  fill(x - 1, y - 1, width + 2, 1, c);
  fill(x - 1, y + height, width + 2, 1, c);
  fill(x - 1, y, 1, height, c);
  fill(x + width, y, 1, height, c);
}

double Canvas::text_width(std::string_view text, double size) {
  double units = 0;
  for (const char c : text) units += *glyph_of(c);
  return units * size / kGlyphUnits;
}

void Canvas::text(double x, double y, std::string_view text, double size, double strength, Align align, bool upwards) {
  const double shift = align == Align::kLeft ? 0 : text_width(text, size) * (align == Align::kCenter ? 0.5 : 1.0);
  (upwards ? y : x) += upwards ? shift : -shift;
  for (const char c : text) {
    const int16_t* numbers = glyph_of(c);
    glyph(numbers, x, y, size, strength, upwards);
    (upwards ? y : x) += (upwards ? -1 : 1) * *numbers * size / kGlyphUnits;
  }
}

void Canvas::glyph(const int16_t* numbers, double x, double y, double size, double strength, bool upwards) {
  // A box around the baseline's point that holds every letter whole.
  const auto room = static_cast<int64_t>(std::ceil(1.3 * size)) + 1;
  const auto left = static_cast<int64_t>(std::floor(x)) - room, top = static_cast<int64_t>(std::floor(y)) - room;
  const int64_t side = 2 * room + 1;
  cover_.assign(static_cast<size_t>(side * (side + 2)), 0.0f);
  const Coverage cover{cover_.data(), side, side};
  const auto place = [&](const int16_t* p) {
    const double px = (p[0] >> 1) * size / kGlyphUnits, py = p[1] * size / kGlyphUnits;
    return upwards ? Point{x - py - static_cast<double>(left), y - px - static_cast<double>(top)}
                   : Point{x + px - static_cast<double>(left), y - py - static_cast<double>(top)};
  };
  const int16_t* at = numbers + 2;
  for (int contour = 0; contour < numbers[1]; ++contour) {
    const int points = *at++;
    const auto on = [&](int i) { return (at[2 * (i % points)] & 1) != 0; };
    const auto point = [&](int i) { return place(at + 2 * (i % points)); };
    int first = 0;
    while (!on(first)) ++first;  // every letter of this font has such a point
    Point from = point(first);
    for (int i = first + 1; i <= first + points; ++i) {
      if (on(i)) {
        cover.line(from, point(i));
        from = point(i);
      } else {
        const Point to = on(i + 1) ? point(i + 1) : middle(point(i), point(i + 1));
        cover.curve(from, point(i), to);
        from = to;
        if (on(i + 1)) ++i;
      }
    }
    at += 2 * points;
  }
  for (int64_t row = 0; row < side; ++row) {
    float inside = 0;
    for (int64_t column = 0; column < side; ++column) {
      inside += cover_[static_cast<size_t>(row * (side + 2) + column)];
      const double share = std::min(1.0, std::abs(static_cast<double>(inside))) * strength;
      const int64_t px = left + column, py = top + row;
      if (share < 1.0 / color::kShades || px < 0 || px >= width_ || py < 0 || py >= height_) continue;
      uint8_t& pixel = pixels_[static_cast<size_t>(py * width_ + px)];
      pixel = pixel < color::kWhite ? color::shade(share) : std::max(pixel, color::shade(share));
    }
  }
}

}  // namespace concerto

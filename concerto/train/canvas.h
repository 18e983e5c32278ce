// A picture to draw on: rectangles and letters in 256 colours, no libraries and no font files.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "concerto/train/png.h"

namespace concerto {

// Colours are places in one palette: kRamp colours of a scale from blue over almost white to red, two that say
// something else, and kShades from white to ink for letters and lines.
namespace color {
constexpr int kRamp = 185;                   // odd: the middle one says "as the mean"
constexpr uint8_t kIdle = 185, kNone = 186;  // nothing at all; not known
constexpr uint8_t kWhite = 187;
constexpr int kShades = 69;
constexpr uint8_t shade(double strength) {  // 0 white, 1 ink
  return static_cast<uint8_t>(kWhite + static_cast<int>(strength * (kShades - 1) + 0.5));
}
const std::array<Rgb, 256>& palette();
}  // namespace color

enum class Align { kLeft, kCenter, kRight };

// x goes right, y goes down, from the upper left corner. What lies outside is left out.
class Canvas {
 public:
  Canvas(int64_t width, int64_t height);  // white; at most 2^28 pixels

  int64_t width() const { return width_; }
  int64_t height() const { return height_; }
  uint8_t at(int64_t x, int64_t y) const { return pixels_[static_cast<size_t>(y * width_ + x)]; }

  void fill(int64_t x, int64_t y, int64_t width, int64_t height, uint8_t color);
  // The outline of a rectangle, one pixel outside of it.
  void frame(int64_t x, int64_t y, int64_t width, int64_t height, uint8_t color);
  // ASCII (others show as '?') on white; x, y is the point of the baseline that `align` says. `size` is that of the
  // font in pixels, `strength` the shade. `upwards` turns it left, so that it is read from below.
  void text(double x, double y, std::string_view text, double size, double strength = 1, Align align = Align::kLeft,
            bool upwards = false);
  static double text_width(std::string_view text, double size);

  void encode(std::string& png) const { encode_png(pixels_, width_, height_, color::palette(), png); }

 private:
  void glyph(const int16_t* numbers, double x, double y, double size, double strength, bool upwards);

  int64_t width_, height_;
  std::vector<uint8_t> pixels_;
  std::vector<float> cover_;  // of the letter that is being drawn
};

}  // namespace concerto

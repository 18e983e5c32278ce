// PNG files and the canvas.
#include <gtest/gtest.h>

#include <set>

#include "concerto/base/error.h"
#include "concerto/base/rng.h"
#include "concerto/train/canvas.h"
#include "concerto/train/test_png.h"

namespace concerto {
namespace {

std::vector<Rgb> greys(size_t n) {
  std::vector<Rgb> colors;
  for (size_t i = 0; i < n; ++i) colors.push_back({static_cast<uint8_t>(i), 1, 2});
  return colors;
}

TEST(Crc32, KnownAnswer) { EXPECT_EQ(crc32("123456789"), 0xcbf43926u); }

TEST(Png, DecodesToTheSamePixels) {
  const Rng rng(1, "pixels");
  uint64_t at = 0;
  for (const auto& [width, height, colors] : std::vector<std::tuple<int64_t, int64_t, int64_t>>{
           {1, 1, 1}, {3, 2, 2}, {300, 40, 2}, {64, 64, 256}, {5000, 3, 256}}) {
    std::vector<uint8_t> pixels;
    for (int64_t i = 0; i < width * height;) {  // runs of every length, and noise
      const auto run = rng.uniform(at++) < 0.5 ? 1 : static_cast<int64_t>(rng.below(at++, 700));
      const auto color = static_cast<uint8_t>(rng.below(at++, static_cast<uint64_t>(colors)));
      for (int64_t k = 0; k < run && i < width * height; ++k, ++i) pixels.push_back(color);
    }
    std::string out = "old";
    encode_png(pixels, width, height, greys(static_cast<size_t>(colors)), out);
    EXPECT_LE(static_cast<int64_t>(out.size()), png_bound(width, height));
    const TestPng png = read_png(out);
    EXPECT_EQ(png.width, width);
    EXPECT_EQ(png.height, height);
    EXPECT_EQ(png.palette.size(), static_cast<size_t>(3 * colors));
    EXPECT_EQ(png.pixels, pixels);
  }
}

TEST(Png, RunsOfEveryLengthAreWhole) {
  for (int64_t width = 1; width < 600; ++width) {
    std::string out;
    encode_png(std::vector<uint8_t>(static_cast<size_t>(width), 7), width, 1, greys(8), out);
    EXPECT_EQ(read_png(out).pixels, std::vector<uint8_t>(static_cast<size_t>(width), 7)) << width;
  }
}

TEST(Png, NoiseKeepsItsBoundAndFlatPicturesAreSmall) {
  std::vector<uint8_t> pixels(400 * 400);
  const Rng rng(2, "noise");
  for (size_t i = 0; i < pixels.size(); ++i) pixels[i] = static_cast<uint8_t>(rng.below(i, 256));
  std::string out;
  encode_png(pixels, 400, 400, greys(256), out);
  EXPECT_LE(static_cast<int64_t>(out.size()), png_bound(400, 400));
  std::fill(pixels.begin(), pixels.end(), 9);
  encode_png(pixels, 400, 400, greys(256), out);
  EXPECT_LT(out.size(), 4000u) << "a dozen bytes a row, and the palette";
}

TEST(Canvas, FillIsCutAtTheEdges) {
  Canvas c(4, 3);
  c.fill(-5, -5, 7, 6, 3);
  c.fill(3, 2, 100, 100, 4);
  c.fill(1, 1, -2, 5, 5);
  std::string rows;
  for (int64_t y = 0; y < 3; ++y)
    for (int64_t x = 0; x < 4; ++x) rows += c.at(x, y) == color::kWhite ? '.' : static_cast<char>('0' + c.at(x, y));
  EXPECT_EQ(rows, "33.........4");
}

// An 'I' is a bar, an 'L' a bar with a foot: right where they should be, and as dark as asked for.
TEST(Canvas, LettersAreDrawnWhereTheyShould) {
  Canvas c(60, 60);
  c.text(10, 50, "L", 50);
  EXPECT_EQ(c.at(17, 30), color::shade(1)) << "the bar";
  EXPECT_EQ(c.at(30, 30), color::kWhite) << "right of it";
  EXPECT_EQ(c.at(30, 47), color::shade(1)) << "the foot";
  EXPECT_EQ(c.at(30, 52), color::kWhite) << "under the baseline";
  EXPECT_EQ(c.at(5, 47), color::kWhite);
  Canvas pale(60, 60);
  pale.text(10, 50, "L", 50, 0.5);
  EXPECT_EQ(pale.at(30, 47), color::shade(0.5));
  Canvas turned(60, 60);  // read from below: the bar lies, the foot goes up at its right end
  turned.text(50, 50, "L", 50, 1, Align::kLeft, true);
  EXPECT_EQ(turned.at(30, 43), color::shade(1)) << "the bar";
  EXPECT_EQ(turned.at(47, 30), color::shade(1)) << "the foot";
  EXPECT_EQ(turned.at(30, 30), color::kWhite);
}

// 'O' and '0' have a hole: the two contours of an outline wind against each other.
TEST(Canvas, HolesStayWhiteAndEdgesAreSmooth) {
  Canvas c(60, 60);
  c.text(5, 50, "O", 50);
  EXPECT_EQ(c.at(5 + 20, 32), color::kWhite);
  std::set<uint8_t> shades;
  int64_t inked = 0;
  for (int64_t y = 0; y < 60; ++y)
    for (int64_t x = 0; x < 60; ++x) {
      shades.insert(c.at(x, y));
      inked += c.at(x, y) != color::kWhite;
    }
  EXPECT_GT(shades.size(), 20u);
  EXPECT_GT(inked, 300);
  EXPECT_LT(inked, 1200);
}

TEST(Canvas, TextIsAlignedByItsWidth) {
  EXPECT_EQ(Canvas::text_width("", 20), 0);
  EXPECT_NEAR(Canvas::text_width("0000", 20), 4 * Canvas::text_width("0", 20), 1e-9);
  EXPECT_EQ(Canvas::text_width("\xc3", 20), Canvas::text_width("?", 20));
  const auto darkest_column = [](Align align) {
    Canvas c(100, 40);
    c.text(50, 30, "I", 30, 1, align);
    int64_t at = -1;
    for (int64_t x = 99; x >= 0; --x)
      if (c.at(x, 20) == color::shade(1)) at = x;
    return at;
  };
  EXPECT_GT(darkest_column(Align::kLeft), 50);
  EXPECT_NEAR(static_cast<double>(darkest_column(Align::kCenter)), 49, 2);
  EXPECT_LT(darkest_column(Align::kRight), 49);
  Canvas small(8, 8);  // letters across and outside of the edge
  for (const char* text : {"W", "gj|"}) small.text(-3, 6, text, 20), small.text(100, -100, text, 20);
}

TEST(Canvas, EveryLetterHasInk) {
  for (char letter = 33; letter < 127; ++letter) {
    Canvas c(60, 60);
    c.text(15, 40, std::string(1, letter), 30);
    int64_t inked = 0;
    for (int64_t y = 0; y < 60; ++y)
      for (int64_t x = 0; x < 60; ++x) inked += c.at(x, y) != color::kWhite;
    EXPECT_GT(inked, 8) << letter;
    EXPECT_LT(inked, 900) << letter << ": an outline that is not closed floods its row";
    for (int64_t x = 0; x < 60; ++x) EXPECT_TRUE(c.at(x, 0) == color::kWhite && c.at(x, 59) == color::kWhite) << letter;
    for (int64_t y = 0; y < 60; ++y) EXPECT_TRUE(c.at(0, y) == color::kWhite && c.at(59, y) == color::kWhite) << letter;
  }
}

TEST(Canvas, TooLargeIsABug) { EXPECT_THROW(Canvas(1 << 20, 1 << 20), Bug); }

TEST(Palette, IsLightInTheMiddleAndDarkAtBothEnds) {
  const auto& p = color::palette();
  const auto light = [&](int i) {
    const Rgb& c = p[static_cast<size_t>(i)];
    return 0.3 * c[0] + 0.59 * c[1] + 0.11 * c[2];
  };
  constexpr int kMiddle = color::kRamp / 2;
  for (int i = 0; i < kMiddle; ++i) {
    EXPECT_LE(light(i), light(i + 1) + 0.5) << i;
    EXPECT_GE(light(kMiddle + i) + 0.5, light(kMiddle + i + 1)) << i;
  }
  EXPECT_GT(light(kMiddle), 240);
  EXPECT_LT(light(0), 60);
  EXPECT_LT(light(color::kRamp - 1), 60);
  EXPECT_EQ(p[color::kWhite], (Rgb{255, 255, 255}));
  EXPECT_EQ(color::shade(1), 255);
}

}  // namespace
}  // namespace concerto

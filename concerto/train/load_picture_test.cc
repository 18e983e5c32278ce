#include "concerto/train/load_picture.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "concerto/base/error.h"
#include "concerto/train/test_png.h"

namespace concerto {
namespace {

constexpr uint8_t kEven = color::kRamp / 2;

TEST(LoadColor, IsAScaleOfPowersOfTwo) {
  EXPECT_EQ(load_color(10, 10), kEven);
  EXPECT_EQ(load_color(0, 10), color::kIdle);
  EXPECT_EQ(load_color(0, 0), color::kWhite);
  EXPECT_EQ(load_color(80, 10), color::kRamp - 1);
  EXPECT_EQ(load_color(8000, 10), color::kRamp - 1);
  EXPECT_EQ(load_color(10, 80), 0);
  EXPECT_EQ(load_color(1, 8000), 0);
  EXPECT_EQ(load_color(20, 10) - kEven, kEven - load_color(5, 10)) << "twice as much and half lie equally far apart";
  EXPECT_GT(load_color(20, 10), kEven);
}

int64_t count(const std::vector<uint8_t>& pixels, uint8_t c) { return std::count(pixels.begin(), pixels.end(), c); }

TEST(LoadHeatMap, ShowsEveryCell) {
  const std::vector<int64_t> layers = {1, 2, 3};
  LoadHeatMap map(layers, 4);
  std::string png;
  map.canvas().encode(png);
  const TestPng empty = read_png(png);
  map.draw(std::vector<std::vector<int64_t>>{{5, 5, 5, 5}, {20, 0, 0, 0}, {0, 0, 0, 0}});
  map.canvas().encode(png);
  const TestPng drawn = read_png(png);
  const int64_t cell = 40 * 30;
  EXPECT_EQ(count(drawn.pixels, kEven) - count(empty.pixels, kEven), 4 * cell);
  EXPECT_EQ(count(drawn.pixels, color::kIdle) - count(empty.pixels, color::kIdle), 3 * cell);
  EXPECT_EQ(count(drawn.pixels, load_color(4, 1)) - count(empty.pixels, load_color(4, 1)), cell);
  EXPECT_GT(count(empty.pixels, color::shade(1)), 20) << "words";
  map.draw(std::vector<std::vector<int64_t>>{{5, 5, 5, 5}, {5, 5, 5, 5}, {5, 5, 5, 5}});
  map.canvas().encode(png);
  EXPECT_EQ(count(read_png(png).pixels, kEven) - count(empty.pixels, kEven), 12 * cell);
}

TEST(LoadHeatMap, OfManyLayersAndExpertsStaysSmall) {
  const std::vector<int64_t> layers(90, 1);
  const LoadHeatMap map(layers, 512);
  EXPECT_LT(map.canvas().width(), 1400);
  EXPECT_LT(map.canvas().height(), 800);
}

LoadSeries series_of(int64_t layers, int64_t experts, int64_t bins) {
  LoadSeries s;
  s.experts = experts;
  s.first_step = 1;
  s.last_step = s.steps = bins;
  s.steps_in_bin.assign(static_cast<size_t>(bins), 1);
  for (int64_t l = 0; l < layers; ++l) {
    LayerSeries layer;
    layer.layer = l + 1;
    layer.tokens.assign(static_cast<size_t>(experts), 3 * bins);
    layer.binned.assign(static_cast<size_t>(bins * experts), 3);
    layer.total = summarize_load(layer.tokens);
    s.layers.push_back(layer);
  }
  return s;
}

TEST(LoadPicture, ShowsEveryColumnAndGap) {
  LoadSeries s = series_of(2, 8, 10);
  std::fill_n(s.layers[0].binned.begin(), 8, 0);
  s.layers[0].binned[2] = 24;
  const TestPng whole = read_png(load_picture(s, "runs/a"));
  s.steps_in_bin[4] = 0;
  s.steps -= 1;
  const TestPng gap = read_png(load_picture(s, "runs/a"));
  ASSERT_EQ(whole.height, gap.height);
  EXPECT_EQ(whole.width, 1800);
  const double cell = static_cast<double>(whole.width - 2 * 60 - 96) / 10 * 18;
  EXPECT_NEAR(static_cast<double>(count(whole.pixels, color::kIdle)), 7 * cell, cell);
  EXPECT_NEAR(static_cast<double>(count(whole.pixels, kEven)), (8 * 10 + 8 * 9) * cell, cell);
  EXPECT_EQ(count(whole.pixels, color::kNone), 0);
  EXPECT_NEAR(static_cast<double>(count(gap.pixels, color::kNone)), 2 * 8 * cell, cell);
}

TEST(LoadPicture, OfAnyShape) {
  for (const auto& [layers, experts, bins] : std::vector<std::tuple<int64_t, int64_t, int64_t>>{
           {1, 1, 1}, {1, 2, 3}, {7, 64, 350}, {28, 64, 210}, {2, 600, 5}}) {
    const TestPng png = read_png(load_picture(series_of(layers, experts, bins), "a run"));
    EXPECT_GT(png.height, 300);
    EXPECT_LE(bins, load_picture_columns(layers));
  }
}

TEST(LoadPicture, TooManyLayersAreRefused) {
  const LoadSeries s = series_of(2000, 1, 1);
  try {
    load_picture(s, "a run");
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.code, ErrorCode::kUsage);
    EXPECT_EQ(e.where, "--layers");
  }
}

}  // namespace
}  // namespace concerto

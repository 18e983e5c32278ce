#include "concerto/train/loss_plot.h"

#include <gtest/gtest.h>

#include <cmath>

#include "concerto/base/error.h"
#include "concerto/base/test_folder.h"
#include "concerto/train/human_units.h"
#include "concerto/train/metrics.h"

namespace concerto {
namespace {

size_t count_of(const std::string& text, const std::string& what) {
  size_t n = 0;
  for (size_t at = 0; (at = text.find(what, at)) != std::string::npos; at += what.size()) ++n;
  return n;
}

LossCurves falling(int64_t steps) {
  LossCurves c;
  for (int64_t i = 1; i <= steps; ++i) {
    c.train.x.push_back(static_cast<double>(i));
    c.train.y.push_back(3 + 5 * std::exp(-static_cast<double>(i) / 10));
  }
  return c;
}

TEST(LossPlot, NiceTicks) {
  EXPECT_EQ(nice_ticks(0, 10, 5), (std::vector<double>{0, 2, 4, 6, 8, 10}));
  EXPECT_EQ(nice_ticks(-3, 3, 6), (std::vector<double>{-3, -2, -1, 0, 1, 2, 3}));
  const auto few = nice_ticks(1.03, 1.38, 3);  // 0.2 apart; 1.0 and 1.4 are outside
  ASSERT_EQ(few.size(), 1u);
  EXPECT_NEAR(few[0], 1.2, 1e-12);
  EXPECT_TRUE(nice_ticks(2, 2, 4).empty());
  EXPECT_TRUE(nice_ticks(NAN, 2, 4).empty());
}

TEST(LossPlot, SmoothKeepsTheFirstValueAndConstants) {
  EXPECT_EQ(smooth({1, 3, 5, 7}, 0), (std::vector<double>{1, 3, 5, 7}));
  EXPECT_EQ(smooth({1, 3, 5, 7}, 1), (std::vector<double>{1, 3, 5, 6}));
  EXPECT_TRUE(smooth({}, 3).empty());
}

TEST(LossPlot, ReadsRowsAndLeavesOutWhatIsNoNumber) {
  const TestFolder folder;
  write_text(
      folder / "metrics.jsonl",
      "{\"step\": 1, \"loss\": 5, \"expert_max_over_mean\": 2, \"expert_load\": {\"1\": 2}}\n"
      "broken\n{\"step\": 2, \"loss\": null, \"expert_max_over_mean\": 1.5}\n"
      "{\"step\": 2, \"valid_loss\": 4.5}\n{\"step\": 3, \"loss\": 4}\n{\"step\": \"x\"}\n[1]\n{\"step\": 4, \"lo");
  const auto c = read_loss_curves(folder / "metrics.jsonl");
  EXPECT_EQ(c.train.x, (std::vector<double>{1, 3}));
  EXPECT_EQ(c.train.y, (std::vector<double>{5, 4}));
  EXPECT_EQ(c.valid.x, (std::vector<double>{2}));
  EXPECT_EQ(c.valid.y, (std::vector<double>{4.5}));
  EXPECT_EQ(c.expert_max_over_mean.y, (std::vector<double>{2, 1.5}));
}

TEST(LossPlot, WritesAPictureFromTheMetricsOfARun) {
  const TestFolder folder;
  {
    MetricsWriter writer(folder / "metrics.jsonl", 0);
    StepReport r;
    r.moe_layers = {1};
    r.tokens_per_expert = {{3, 1}};
    summarize_loads(r);
    for (r.step = 1; r.step <= 50; ++r.step) {
      r.loss = 10.0 / static_cast<double>(r.step);
      writer.write(r);
    }
    writer.write(EvalReport{.step = 25, .valid_loss = 1, .valid_tokens = 10, .seconds = 0});
    writer.write(EvalReport{.step = 50, .valid_loss = 0.5, .valid_tokens = 10, .seconds = 0});
  }
  const auto curves = write_loss_svg(folder.path());
  EXPECT_EQ(curves.train.x.size(), 50u);
  const std::string svg = read_text(folder / "loss.svg");
  EXPECT_TRUE(svg.starts_with("<svg "));
  EXPECT_TRUE(svg.ends_with("</svg>\n"));
  EXPECT_EQ(count_of(svg, "<polyline"), 5u);  // loss: each step, smoothed, validation; experts: each step, smoothed
  EXPECT_EQ(count_of(svg, "<circle"), 2u);
  EXPECT_NE(svg.find("best validation loss 0.5000 at step 50"), std::string::npos);
  EXPECT_NE(svg.find("Busiest expert"), std::string::npos);
  EXPECT_EQ(svg.find("nan"), std::string::npos);
}

TEST(LossPlot, MissingMetricsIsAnError) {
  const TestFolder folder;
  EXPECT_THROW(write_loss_svg(folder.path()), Error);
}

TEST(LossPlot, AnyNumberOfPoints) {
  for (int64_t n : {0, 1, 2, 3, 799, 800, 801, 5000}) {
    const std::string svg = loss_svg(falling(n), "a <b> & c");
    EXPECT_NE(svg.find("a &lt;b&gt; &amp; c"), std::string::npos);
    EXPECT_EQ(svg.find("nan"), std::string::npos) << n;
    EXPECT_EQ(svg.find("inf"), std::string::npos) << n;
    EXPECT_LT(svg.size(), 60000u) << n;  // a long run does not make a large file
  }
}

TEST(LossPlot, TextChartFitsAndFalls) {
  const auto c = falling(100);
  const std::string text = loss_text(c, 40, 6, true);
  EXPECT_EQ(count_of(text, "\n"), 8u);
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = text.find('\n', begin);
    EXPECT_LE(display_width(text.substr(begin, end - begin)), 40);
    begin = end + 1;
  }
  const std::string plain = loss_text(c, 40, 6, false);
  EXPECT_EQ(plain,
            "   7.524 |*\n"
            "         | *\n"
            "         | *\n"
            "    4.81 |  **\n"
            "         |    ***\n"
            "       3 |       **********************\n"
            "         +-----------------------------\n"
            "          1                    step 100\n");
}

TEST(LossPlot, TextChartNeedsTwoPointsAndRoom) {
  EXPECT_EQ(loss_text(falling(1), 40, 6, true), "");
  EXPECT_EQ(loss_text(falling(9), 12, 6, true), "");
  EXPECT_EQ(loss_text(falling(9), 40, 1, true), "");
}

}  // namespace
}  // namespace concerto

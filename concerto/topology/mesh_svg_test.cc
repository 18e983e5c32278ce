#include "concerto/topology/mesh_svg.h"

#include <gtest/gtest.h>

#include "concerto/base/test_errors.h"

namespace concerto {
namespace {

int count_of(const std::string& text, const std::string& part) {
  int n = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++n;
  return n;
}

TEST(MeshSvg, DrawsEachRankInBothMeshes) {
  const std::string svg = mesh_svg(Mesh({.tp = 2, .dp = 3, .pp = 2, .ep = 3}), {"layers 0-3", "layers 4-6 & <head>"});
  EXPECT_EQ(count_of(svg, "<g>"), 2 * 12);
  for (int rank = 0; rank < 12; ++rank)
    EXPECT_EQ(count_of(svg, fmt::format(">{}</text></g>", rank)) + count_of(svg, fmt::format(">{}</text>\n</g>", rank)),
              2);
  for (const char* tag : {"svg", "g", "text", "title"})
    EXPECT_EQ(count_of(svg, fmt::format("<{}>", tag)) + count_of(svg, fmt::format("<{} ", tag)),
              count_of(svg, fmt::format("</{}>", tag)))
        << tag;
  EXPECT_EQ(count_of(svg, ">edp "), 2 * 2);
  EXPECT_EQ(count_of(svg, ">ep "), 2 * 3);
  EXPECT_EQ(count_of(svg, ">dp "), 2 * 3);
  EXPECT_HAS(svg, "12 ranks: tp 2 x dp 3 x pp 2; experts of a stage: etp 1 x ep 3 x edp 2");
  EXPECT_HAS(svg, "pp 1: layers 4-6 &amp; &lt;head&gt;");
  EXPECT_HAS(svg, "<title>rank 7 (pp 1, dp 0, tp 1, ep 1)</title>");
}

TEST(MeshSvg, SlicesOfExpertsHaveTheirExpertsColour) {
  const std::string svg = mesh_svg(Mesh({.dp = 4, .ep = 2, .etp = 2}), {"all"});
  EXPECT_HAS(svg, ">ep 1.0</text>");
  EXPECT_HAS(svg, ">ep 1.1</text>");
  EXPECT_EQ(count_of(svg, "#f09248"), 2);
}

TEST(MeshSvg, LeavesOutWhatWouldBeTooMuch) {
  const std::string svg = mesh_svg(Mesh({.pp = 5}), {"a", "b", "c", "d", "e"}, 2);
  EXPECT_EQ(count_of(svg, "<g>"), 4);
  EXPECT_HAS(svg, "and 3 more pipeline ranks like these");
  EXPECT_THROW(mesh_svg(Mesh({.pp = 2}), {"a"}), Bug);
}

}  // namespace
}  // namespace concerto

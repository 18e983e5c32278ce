#include <gtest/gtest.h>

#include <algorithm>

#include "concerto/base/files.h"
#include "concerto/schedule/pipeline.h"

namespace concerto {
namespace {

int64_t longest_line(const std::string& text) {
  int64_t longest = 0;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = text.find('\n', begin);
    longest = std::max(longest, static_cast<int64_t>(end - begin));
    begin = end + 1;
  }
  return longest;
}

int64_t count_of(const std::string& text, const std::string& part) {
  int64_t n = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + part.size())) ++n;
  return n;
}

TEST(PipelineText, GridWithNumbers) {
  EXPECT_EQ(pipeline_text(build_pipeline({.name = "1f1b", .pp = 2, .micro_batches = 2})),
            "rank 0  F0 F1 .  .  B0--- .  B1---\n"
            "rank 1  .  F0 B0--- F1 B1--- .  .\n"
            "F forward, B backward; with the micro-batch; . waits\n");
  EXPECT_EQ(pipeline_text(build_pipeline({.name = "zero_bubble_v", .pp = 2, .micro_batches = 1})),
            "rank 0  F0 .  .  f0 i0 w0 .  .  I0 W0\n"
            "rank 1  .  F0 f0 .  .  i0 w0 I0 W0 .\n"
            "F forward, I input backward, W weight backward; small letters: chunk 1; with the micro-batch; . waits\n");
}

TEST(PipelineText, NarrowerWhereItMustBe) {
  const std::string middle = pipeline_text(build_pipeline({.name = "zero_bubble", .pp = 3, .micro_batches = 11}));
  EXPECT_LE(longest_line(middle), 120);
  EXPECT_NE(middle.find("I9 W9 I10W10"), std::string::npos) << middle;
  const std::string narrow = pipeline_text(build_pipeline({.name = "zero_bubble", .pp = 8, .micro_batches = 32}));
  EXPECT_LE(longest_line(narrow), 120);
  EXPECT_NE(narrow.find("rank 0  FFFFFFFF.......IWFIWF"), std::string::npos) << narrow;
  EXPECT_EQ(narrow.find("Shown are"), std::string::npos);
  const std::string cut = pipeline_text(build_pipeline({.name = "zero_bubble", .pp = 8, .micro_batches = 100}));
  EXPECT_LE(longest_line(cut), 120);
  EXPECT_NE(cut.find("Shown are the first 112 of 307 units of time: more does not fit 120 columns."), std::string::npos)
      << cut;
}

TEST(PipelineText, NoMicroBatches) {
  EXPECT_EQ(pipeline_text(build_pipeline({.name = "1f1b", .pp = 2, .micro_batches = 0})),
            "rank 0\nrank 1\nF forward, B backward; with the micro-batch; . waits\n");
}

// As many bars as actions, besides the page, the lanes and the legend; every element is closed.
TEST(PipelineSvg, EveryActionHasABar) {
  for (const char* name : {"1f1b", "interleaved", "zero_bubble", "zero_bubble_v"}) {
    const int vpp = name == std::string("interleaved") ? 3 : 1;
    const PipelineSchedule s = build_pipeline({.name = name, .pp = 4, .vpp = vpp, .micro_batches = 9});
    const std::string svg = pipeline_svg(s, {.forward = 1.5});
    const int64_t kinds = s.split ? 3 : 2;
    EXPECT_EQ(count_of(svg, "<g>"), 4 * 9 * s.chunks * kinds);
    EXPECT_EQ(count_of(svg, "<rect"), count_of(svg, "<g>") + 1 + 4 + kinds * s.chunks);
    for (const char* tag : {"g", "svg", "text", "title"})
      EXPECT_EQ(count_of(svg, fmt::format("<{}>", tag)) + count_of(svg, fmt::format("<{} ", tag)),
                count_of(svg, fmt::format("</{}>", tag)))
          << tag;
    EXPECT_EQ(count_of(svg, "rank "), 4) << svg;
    EXPECT_NE(svg.find(fmt::format("{}: 4 ranks, 9 micro-batches, bubble", name)), std::string::npos);
  }
}

// docs/parallelism.md and its pictures are what the program draws today.
TEST(PipelineText, DocumentShowsWhatIsDrawn) {
  const std::string page = read_text_file("docs/parallelism.md");
  for (const char* name : {"1f1b", "interleaved", "zero_bubble", "zero_bubble_v"}) {
    const int vpp = name == std::string("interleaved") ? 2 : 1;
    const PipelineSchedule s = build_pipeline({.name = name, .pp = 4, .vpp = vpp, .micro_batches = 8});
    std::string grid = pipeline_text(s);
    for (int rank = 0; rank < 4; ++rank) {
      const size_t end = grid.find('\n');
      EXPECT_NE(page.find("    " + grid.substr(0, end + 1)), std::string::npos) << name << ", rank " << rank;
      grid.erase(0, end + 1);
    }
    EXPECT_EQ(read_text_file(fmt::format("docs/pictures/schedule_{}.svg", name)), pipeline_svg(s)) << name;
  }
}

}  // namespace
}  // namespace concerto

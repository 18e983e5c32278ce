#include "concerto/topology/mesh_svg.h"

#include <algorithm>
#include <array>

#include "concerto/base/error.h"

namespace concerto {
namespace {

constexpr int kCellWidth = 44, kCellHeight = 24, kMargin = 20, kTitle = 26, kAxis = 22, kRowLabel = 64, kBetween = 48;
// Of ranks that hold the same slice or the same experts.
constexpr std::array kColours = {"#5694d6", "#f09248", "#6cb66a", "#d07bb4",
                                 "#c9b64c", "#7fc5c5", "#a58ad0", "#d98080"};

std::string escaped(const std::string& text) {
  std::string out;
  for (const char c : text) out += c == '&' ? "&amp;" : c == '<' ? "&lt;" : c == '>' ? "&gt;" : std::string(1, c);
  return out;
}

std::string label(int x, int y, const char* anchor, int size, const std::string& text) {
  return fmt::format("<text x=\"{}\" y=\"{}\" text-anchor=\"{}\" font-size=\"{}\">{}</text>\n", x, y, anchor, size,
                     escaped(text));
}

// One fold of a stage's ranks, row by row.
struct Grid {
  std::string name, row_name;
  std::vector<std::string> columns;
  std::vector<int> groups;  // of each column: those of one group have one colour
  int rows = 0;
  int width() const { return kRowLabel + static_cast<int>(columns.size()) * kCellWidth; }
};

Grid attention_grid(const MeshSizes& s) {
  Grid g{"attention, MLPs, vocabulary", "dp", {}, {}, s.dp};
  for (int t = 0; t < s.tp; ++t) {
    g.columns.push_back(fmt::format("tp {}", t));
    g.groups.push_back(t);
  }
  return g;
}

Grid expert_grid(const MeshSizes& s) {
  Grid g{"experts", "edp", {}, {}, s.edp()};
  for (int e = 0; e < s.ep; ++e)
    for (int t = 0; t < s.etp; ++t) {
      g.columns.push_back(s.etp > 1 ? fmt::format("ep {}.{}", e, t) : fmt::format("ep {}", e));
      g.groups.push_back(e);
    }
  return g;
}

std::string draw(const Mesh& mesh, const Grid& g, int first_rank, int x, int y) {
  std::string text = label(x + kRowLabel, y + 12, "start", 12, g.name);
  y += 18;
  const int left = x + kRowLabel;
  for (size_t i = 0; i < g.columns.size(); ++i)
    text += label(left + static_cast<int>(i) * kCellWidth + kCellWidth / 2, y + kAxis - 8, "middle", 10, g.columns[i]);
  y += kAxis;
  int rank = first_rank;
  for (int row = 0; row < g.rows; ++row, y += kCellHeight) {
    text += label(left - 8, y + 16, "end", 10, fmt::format("{} {}", g.row_name, row));
    for (size_t i = 0; i < g.columns.size(); ++i, ++rank) {
      const int at = left + static_cast<int>(i) * kCellWidth;
      text += fmt::format("<g><title>{}</title><rect x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\" fill=\"{}\"/>",
                          mesh.describe(rank), at, y, kCellWidth - 2, kCellHeight - 2,
                          kColours[static_cast<size_t>(g.groups[i]) % kColours.size()]);
      text += label(at + kCellWidth / 2 - 1, y + 15, "middle", 12, std::to_string(rank)) + "</g>\n";
    }
  }
  return text;
}

}  // namespace

std::string mesh_svg(const Mesh& mesh, const std::vector<std::string>& titles, int pictured_stages) {
  const MeshSizes& s = mesh.sizes();
  CHECK(static_cast<int>(titles.size()) == s.pp, "{} titles for {} stages", titles.size(), s.pp);
  const Grid attention = attention_grid(s), experts = expert_grid(s);
  const int stages = std::min(s.pp, pictured_stages), rest = s.pp - stages;
  const int stage_height = kTitle + 18 + kAxis + kCellHeight * std::max(attention.rows, experts.rows) + 12;
  size_t longest = 0;
  for (const std::string& title : titles) longest = std::max(longest, title.size());
  const int width =
      2 * kMargin + std::max({attention.width() + kBetween + experts.width(), static_cast<int>(7 * longest) + 70, 520});
  const int height = 2 * kMargin + 24 + stages * stage_height + (rest > 0 ? kTitle : 0);
  std::string text = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0}\" height=\"{1}\" viewBox=\"0 0 {0} {1}\" "
      "font-family=\"sans-serif\">\n<rect width=\"{0}\" height=\"{1}\" fill=\"white\"/>\n",
      width, height);
  text += label(kMargin, kMargin + 12, "start", 14,
                fmt::format("{} ranks: tp {} x dp {} x pp {}; experts of a stage: etp {} x ep {} x edp {}", s.world(),
                            s.tp, s.dp, s.pp, s.etp, s.ep, s.edp()));
  int y = kMargin + 24;
  for (int p = 0; p < stages; ++p, y += stage_height) {
    text += label(kMargin, y + 18, "start", 13, fmt::format("pp {}: {}", p, titles[static_cast<size_t>(p)]));
    text += draw(mesh, attention, p * s.stage(), kMargin, y + kTitle);
    text += draw(mesh, experts, p * s.stage(), kMargin + attention.width() + kBetween, y + kTitle);
  }
  if (rest > 0) text += label(kMargin, y + 18, "start", 13, fmt::format("and {} more pipeline ranks like these", rest));
  return text + "</svg>\n";
}

}  // namespace concerto

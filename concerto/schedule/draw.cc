#include <algorithm>
#include <cmath>

#include "concerto/base/error.h"
#include "concerto/schedule/pipeline.h"

namespace concerto {
namespace {

constexpr int64_t kColumns = 120;

char letter(ActionKind kind) { return action_text({kind})[0]; }

// How wide a unit of time is drawn, and what its cell says.
struct Cells {
  int64_t width = 1;
  bool numbers = false;

  // Chunks 0, 2, ... in capitals, the others small.
  std::string text(const Action& a, int64_t units) const {
    const char kind = a.chunk % 2 == 0 ? letter(a.kind) : static_cast<char>(std::tolower(letter(a.kind)));
    if (!numbers) return std::string(static_cast<size_t>(units), kind);
    std::string cell = kind + std::to_string(a.micro_batch);
    cell.resize(static_cast<size_t>(units * width - (units > 1 ? 1 : 0)), units > 1 ? '-' : ' ');
    cell.resize(static_cast<size_t>(units * width), ' ');
    return cell;
  }
};

// The widest cells that fit; width 1 if none does.
Cells fitting_cells(const PipelineSchedule& s, int64_t room, int64_t units) {
  const auto digits = static_cast<int64_t>(std::to_string(std::max<int64_t>(s.micro_batches - 1, 0)).size());
  for (const int64_t width : {digits + 2, digits + 1})
    if (width * units <= room) return {width, true};
  return {};
}

std::string rank_line(const std::vector<PipelineTiming::Span>& spans, const Cells& cells, int64_t units) {
  std::string idle = "." + std::string(static_cast<size_t>(cells.width - 1), ' '), line;
  int64_t now = 0;
  const auto wait = [&](int64_t until) {
    for (; now < until; ++now) line += idle;
  };
  for (const PipelineTiming::Span& span : spans) {
    wait(std::llround(span.begin));
    line += cells.text(span.action, std::llround(span.end - span.begin));
    now = std::llround(span.end);
  }
  wait(units);
  return line;
}

std::string legend(const PipelineSchedule& s, const Cells& cells) {
  std::string text = s.split ? "F forward, I input backward, W weight backward" : "F forward, B backward";
  if (s.chunks > 1) text += s.chunks == 2 ? "; small letters: chunk 1" : "; small letters: chunks 1, 3, ...";
  return text + (cells.numbers ? "; with the micro-batch" : "; one letter a unit of time") + "; . waits\n";
}

}  // namespace

std::string pipeline_text(const PipelineSchedule& s) {
  const PipelineTiming timing = time_pipeline(s);
  const auto units = std::llround(timing.length);
  const auto label = static_cast<int64_t>(fmt::format("rank {}  ", s.pp - 1).size());
  const Cells cells = fitting_cells(s, kColumns - label, units);
  const auto room = static_cast<size_t>(kColumns - label);
  std::string text;
  for (int rank = 0; rank < s.pp; ++rank) {
    std::string line = rank_line(timing.ranks[rank], cells, units).substr(0, room);
    line.insert(0, fmt::format("{:<{}}", fmt::format("rank {}", rank), label));
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + "\n";
  }
  text += legend(s, cells);
  if (units > kColumns - label)
    text += fmt::format("Shown are the first {} of {} units of time: more does not fit {} columns.\n", room, units,
                        kColumns);
  return text;
}

namespace {

struct Picture {
  static constexpr double kLeft = 70, kTop = 50, kRow = 30, kBar = 24, kFoot = 60;
  double unit = 1, width = 0, height = 0;  // pixels
};

struct Colour {
  int red, green, blue;
};
Colour colour_of(ActionKind kind) {
  switch (kind) {
    case ActionKind::kForward:
      return {86, 148, 214};
    case ActionKind::kBackward:
    case ActionKind::kBackwardInput:
      return {240, 146, 72};
    default:
      return {108, 182, 106};
  }
}

// Later chunks are paler.
std::string fill(ActionKind kind, int chunk, int chunks) {
  const double pale = chunks > 1 ? 0.6 * chunk / (chunks - 1) : 0;
  const auto mix = [&](int c) { return static_cast<int>(c + (255 - c) * pale); };
  const Colour c = colour_of(kind);
  return fmt::format("#{:02x}{:02x}{:02x}", mix(c.red), mix(c.green), mix(c.blue));
}

std::string bar(double x, double y, double width, const std::string& colour) {
  return fmt::format(R"(<rect x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.0f}" fill="{}"/>)", x, y, width,
                     Picture::kBar, colour);
}

std::string label(double x, double y, const std::string& text, const char* anchor, int size = 12) {
  return fmt::format(R"(<text x="{:.1f}" y="{:.1f}" text-anchor="{}" font-size="{}">{}</text>)", x, y, anchor, size,
                     text)
      .append("\n");
}

std::string draw_rank(const PipelineSchedule& s, const std::vector<PipelineTiming::Span>& spans, int rank,
                      const Picture& p) {
  const double y = Picture::kTop + Picture::kRow * rank, middle = y + Picture::kBar / 2 + 4;
  std::string text = label(Picture::kLeft - 10, middle, fmt::format("rank {}", rank), "end");
  text += bar(Picture::kLeft, y, p.width - Picture::kLeft - 20, "#f0f0f0") + "\n";
  for (const PipelineTiming::Span& span : spans) {
    const double x = Picture::kLeft + span.begin * p.unit, width = (span.end - span.begin) * p.unit;
    const Action& a = span.action;
    text += fmt::format(R"(<g><title>{} of micro-batch {}{}: {:g} to {:g}</title>)", letter(a.kind), a.micro_batch,
                        s.chunks > 1 ? fmt::format(", chunk {}", a.chunk) : "", span.begin, span.end);
    text += bar(x, y, std::max(width - 0.7, 0.3), fill(a.kind, a.chunk, s.chunks));
    const std::string number = std::to_string(a.micro_batch);
    if (width >= 6.5 * static_cast<double>(number.size()) + 1)
      text += label(x + width / 2, middle, number, "middle", 10);
    text += "</g>\n";
  }
  return text;
}

std::string draw_legend(const PipelineSchedule& s, const Picture& p) {
  const std::vector<std::pair<ActionKind, const char*>> joined = {{ActionKind::kForward, "F forward"},
                                                                  {ActionKind::kBackward, "B backward"}};
  const std::vector<std::pair<ActionKind, const char*>> split = {{ActionKind::kForward, "F forward"},
                                                                 {ActionKind::kBackwardInput, "I input backward"},
                                                                 {ActionKind::kBackwardWeight, "W weight backward"}};
  const double y = p.height - Picture::kFoot + 16;
  double x = Picture::kLeft;
  std::string text;
  for (const auto& [kind, name] : s.split ? split : joined) {
    for (int chunk = 0; chunk < s.chunks; ++chunk, x += 20) text += bar(x, y, 18, fill(kind, chunk, s.chunks)) + "\n";
    text += label(x + 4, y + 16, name, "start");
    x += 24 + 7.5 * static_cast<double>(std::string(name).size());
  }
  if (s.chunks > 1)
    text += label(x, y + 16, s.chunks == 2 ? "paler: chunk 1" : fmt::format("paler: chunks 1 to {}", s.chunks - 1),
                  "start");
  return text;
}

std::string headline(const PipelineSchedule& s, const StageTimes& times, double bubble) {
  const std::vector<int64_t> peaks = peak_in_flight(s);
  const double least = bubble_bound({s.name, s.pp, s.chunks, s.micro_batches, s.together}, times);
  return fmt::format("{}: {} rank{}, {} micro-batch{}, bubble {:.1f} % (at least {:.1f} %), at most {} in flight{}",
                     s.name, s.pp, s.pp == 1 ? "" : "s", s.micro_batches, s.micro_batches == 1 ? "" : "es",
                     100 * bubble, 100 * least, *std::max_element(peaks.begin(), peaks.end()),
                     s.chunks > 1 ? fmt::format(", each of one of {} chunks", s.chunks) : "");
}

}  // namespace

std::string pipeline_svg(const PipelineSchedule& s, const StageTimes& times) {
  const PipelineTiming timing = time_pipeline(s, times);
  Picture p;
  p.unit = std::clamp(1100 / std::max(timing.length, 1.0), 4.0, 24.0);
  p.width = std::max(Picture::kLeft + timing.length * p.unit + 20, 760.0);
  p.height = Picture::kTop + Picture::kRow * s.pp + Picture::kFoot;
  std::string text = fmt::format(
      R"(<svg xmlns="http://www.w3.org/2000/svg" width="{0:.0f}" height="{1:.0f}" viewBox="0 0 {0:.0f} {1:.0f}" )"
      R"(font-family="Helvetica, Arial, sans-serif" fill="#202020">)",
      p.width, p.height);
  text += "\n<rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n";
  text += label(Picture::kLeft, 28, headline(s, times, timing.bubble), "start", 15);
  for (int rank = 0; rank < s.pp; ++rank) text += draw_rank(s, timing.ranks[rank], rank, p);
  return text + draw_legend(s, p) + "</svg>\n";
}

}  // namespace concerto

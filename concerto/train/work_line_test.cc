#include "concerto/train/work_line.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <stdexcept>
#include <string>

namespace concerto {
namespace {

// What a line on a pipe shows while `work` runs, which may wait for a text to appear.
template <class F>
std::string shown(WorkLineOptions options, F&& work) {
  int ends[2];
  EXPECT_EQ(::pipe(ends), 0);
  options.fd = ends[1];
  std::string text;
  const auto read_until = [&](const std::string& until) {
    char c;
    while (text.find(until) == std::string::npos && ::read(ends[0], &c, 1) == 1) text += c;
  };
  try {
    WorkLine line("verifying models/mine", "tensors", options);
    work(line, read_until);
  } catch (const std::runtime_error&) {
  }
  ::close(ends[1]);
  for (char c; ::read(ends[0], &c, 1) == 1;) text += c;
  ::close(ends[0]);
  return text;
}

TEST(WorkLine, QuickWorkShowsNothing) {
  for (const bool live : {false, true})
    EXPECT_EQ(shown({.live = live, .first_live = 60, .first_plain = 60}, [](WorkLine& w, auto&&) { w.set(1, 2); }), "");
}

TEST(WorkLine, PlainLinesNowAndThenAndAnEnd) {
  const std::string text = shown({.first_plain = 0.01}, [](WorkLine& w, auto&& read_until) {
    read_until("models/mine: 0.");  // work that has not counted yet
    w.set(12, 340);
    read_until("verifying models/mine: 12 of 340 tensors, 0.");
  });
  EXPECT_TRUE(text.ends_with(" s\n")) << text;
  EXPECT_NE(text.find("\nverifying models/mine: done in "), std::string::npos) << text;
  EXPECT_EQ(text.find('\r'), std::string::npos) << text;
  EXPECT_LE(std::count(text.begin(), text.end(), '\n'), 12) << "lines must get rarer:\n" << text;
}

TEST(WorkLine, AnErrorIsNoEnd) {
  const std::string text = shown({.first_plain = 0.01}, [](WorkLine&, auto&& read_until) {
    read_until(" s\n");
    throw std::runtime_error("damaged");
  });
  EXPECT_EQ(text.find("done"), std::string::npos) << text;
}

TEST(WorkLine, TheLiveLineFitsTheTerminalAndIsCleared) {
  const std::string text = shown({.live = true, .first_live = 0.01, .width = 30}, [](WorkLine& w, auto&& read_until) {
    w.set(12, 340);
    read_until("12 of 340 tensors, ");
  });
  EXPECT_TRUE(text.ends_with("\r\x1b[K")) << text;
  EXPECT_EQ(text.find('\n'), std::string::npos) << text;
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find('\r', at), text.size());
    EXPECT_LE(end - at, 29u + 3) << text.substr(at, end - at);  // and the 3 bytes that clear the rest
    at = end + 1;
  }
}

}  // namespace
}  // namespace concerto

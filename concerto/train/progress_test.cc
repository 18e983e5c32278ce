#include "concerto/train/progress.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <cstdlib>

#include "concerto/train/human_units.h"

namespace concerto {
namespace {

double test_time = 0;
double test_clock() { return test_time; }

// A pipe whose reading end is emptied on demand.
class Pipe {
 public:
  Pipe() {
    EXPECT_EQ(::pipe(fds_), 0);
    ::fcntl(fds_[0], F_SETFL, O_NONBLOCK);
  }
  ~Pipe() {
    ::close(fds_[0]);
    ::close(fds_[1]);
  }
  int fd() const { return fds_[1]; }
  std::string take() {
    std::string text(1 << 16, '\0');
    const ssize_t n = ::read(fds_[0], text.data(), text.size());
    text.resize(n > 0 ? static_cast<size_t>(n) : 0);
    return text;
  }

 private:
  int fds_[2];
};

StepReport report_of(int64_t step) {
  StepReport r;
  r.step = step;
  r.steps = 200;
  r.loss = 3.14159;
  r.lr = 3e-4;
  r.grad_norm = 1.5;
  r.tokens_per_s = 12345;
  r.moe_layers = {1};
  r.tokens_per_expert = {{2, 1}};
  summarize_loads(r);
  return r;
}

// What a person sees of one redraw: without "\r", colours and the clearing of the rest of the line.
std::string visible(std::string text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '\x1b') {
      while (i < text.size() && !std::isalpha(static_cast<unsigned char>(text[i]))) ++i;
    } else if (text[i] != '\r') {
      out.push_back(text[i]);
    }
  }
  return out;
}

ProgressOptions live_options(int fd, int width) {
  test_time = 0;
  return {.fd = fd,
          .style = {.live = true, .color = true, .unicode = true},
          .log_every_steps = 1,
          .clock = test_clock,
          .width = width};
}

TEST(Progress, PlainLinesWithoutATerminal) {
  Pipe pipe;
  test_time = 0;
  Progress progress({.fd = pipe.fd(), .style = detect_terminal(pipe.fd()), .log_every_steps = 50, .clock = test_clock});
  for (int64_t step = 1; step <= 200; ++step) {
    test_time += 0.5;
    progress.step(report_of(step));
  }
  progress.eval({.step = 200, .valid_loss = 2.0, .valid_tokens = 4096, .seconds = 1.25});
  progress.finish();
  EXPECT_EQ(pipe.take(),
            "step 1/200  loss 3.1416  lr 0.0003  grad_norm 1.500  12.3k tokens/s  experts 1.33x  1m40s left\n"
            "step 50/200  loss 3.1416  lr 0.0003  grad_norm 1.500  12.3k tokens/s  experts 1.33x  1m15s left\n"
            "step 100/200  loss 3.1416  lr 0.0003  grad_norm 1.500  12.3k tokens/s  experts 1.33x  50 s left\n"
            "step 150/200  loss 3.1416  lr 0.0003  grad_norm 1.500  12.3k tokens/s  experts 1.33x  25 s left\n"
            "step 200/200  loss 3.1416  lr 0.0003  grad_norm 1.500  12.3k tokens/s  experts 1.33x\n"
            "step 200  valid loss 2.0000  perplexity 7.39  (4.10k tokens, 1.2 s)\n");
}

TEST(Progress, IdleExpertsHaveAWord) {
  StepReport r = report_of(100);
  r.tokens_per_expert = {{2, 1, 0, 1}};
  summarize_loads(r);
  Pipe plain;
  Progress({.fd = plain.fd(), .style = {}}).step(r);
  EXPECT_NE(plain.take().find("tokens/s  experts 2.00x 25.0% idle  "), std::string::npos);
  Pipe pipe;
  Progress live(live_options(pipe.fd(), 120));
  test_time = 1;
  live.step(r);
  EXPECT_NE(visible(pipe.take()).find(" · experts 2.00x 25.0% idle"), std::string::npos);
}

TEST(Progress, SkippedStepsAlwaysHaveTheirLine) {
  Pipe pipe;
  Progress progress({.fd = pipe.fd(), .style = {}, .log_every_steps = 50});
  progress.step(report_of(1));
  pipe.take();
  progress.step(report_of(2));
  EXPECT_EQ(pipe.take(), "");
  StepReport bad = report_of(3);
  bad.skipped = true;
  progress.step(bad);
  EXPECT_NE(pipe.take().find("skipped: bad loss"), std::string::npos);
}

TEST(Progress, LiveLineShowsWhatFitsTheWidth) {
  for (const int width : {1, 2, 5, 10, 20, 30, 40, 60, 80, 100, 200}) {
    Pipe pipe;
    Progress progress(live_options(pipe.fd(), width));
    test_time = 1;
    progress.step(report_of(100));
    const std::string text = visible(pipe.take());
    EXPECT_LT(display_width(text), width) << text;
    EXPECT_EQ(text.find("loss 3.1416") != std::string::npos, width >= 30) << width << ": " << text;
    if (width >= 80) {
      EXPECT_NE(text.find("━━━━━━━━"), std::string::npos) << text;
      EXPECT_NE(text.find("experts 1.33x"), std::string::npos) << text;
    }
    if (width >= 100) {
      EXPECT_EQ(text, "100/200 ━━━━━━━━━━━━━━━━━━━━━━━━ · loss 3.1416 · 12.3k tok/s · 1m40s left · experts 1.33x");
    }
  }
}

TEST(Progress, ValidationLossIsShownIfTheBarKeepsItsRoom) {
  for (const int width : {80, 100}) {
    Pipe pipe;
    Progress progress(live_options(pipe.fd(), width));
    progress.step(report_of(100));
    progress.eval({.step = 100, .valid_loss = 2.5, .valid_tokens = 1, .seconds = 1});
    const std::string text = visible(pipe.take());
    EXPECT_NE(text.find("step 100  valid loss 2.5000"), std::string::npos);
    EXPECT_EQ(text.find("· valid 2.5000") != std::string::npos, width == 100) << text;
    EXPECT_NE(text.find("━"), std::string::npos);
  }
}

TEST(Progress, PlainCharactersWithoutUnicode) {
  Pipe pipe;
  auto options = live_options(pipe.fd(), 100);
  options.style.color = options.style.unicode = false;  // NO_COLOR in the C locale
  Progress progress(options);
  test_time = 1;
  progress.step(report_of(50));
  EXPECT_EQ(pipe.take(),
            "\r50/200 ######.................. | loss 3.1416 | 12.3k tok/s | 2m30s left | experts 1.33x\x1b[K");
}

TEST(Progress, RedrawsAtMostTenTimesASecond) {
  Pipe pipe;
  Progress progress(live_options(pipe.fd(), 80));
  int64_t draws = 0;
  for (int64_t step = 1; step < 200; ++step) {
    test_time += 0.01;
    progress.step(report_of(step));
    draws += !pipe.take().empty();
  }
  EXPECT_GE(draws, 15);
  EXPECT_LE(draws, 20);
  progress.step(report_of(200));  // the last one always
  EXPECT_NE(pipe.take().find("200/200"), std::string::npos);
}

TEST(Progress, LogLinesReplaceTheLiveLine) {
  Pipe pipe;
  Progress progress(live_options(pipe.fd(), 80));
  test_time = 1;
  progress.step(report_of(3));
  pipe.take();
  progress.log("a message");
  const std::string text = pipe.take();
  EXPECT_TRUE(text.starts_with("\r\x1b[Ka message\n\r")) << text;
  EXPECT_NE(text.find("3/200"), std::string::npos);
  progress.status("saving checkpoint 3");
  EXPECT_NE(pipe.take().find("saving checkpoint 3"), std::string::npos);
  progress.finish();
  EXPECT_TRUE(pipe.take().ends_with("\x1b[K\n"));
  progress.log("after");
  EXPECT_TRUE(pipe.take().starts_with("after\n"));
}

TEST(Progress, DestructorLeavesAnEmptyLine) {
  Pipe pipe;
  {
    Progress progress(live_options(pipe.fd(), 80));
    progress.status("loading");
    EXPECT_EQ(visible(pipe.take()), "loading");
  }
  EXPECT_EQ(pipe.take(), "\r\x1b[K");
}

class Environment {  // sets a variable for one test
 public:
  Environment(const char* name, const char* value) : name_(name) {
    if (const char* old = std::getenv(name)) old_ = old;
    value == nullptr ? ::unsetenv(name) : ::setenv(name, value, 1);
  }
  ~Environment() { old_ ? ::setenv(name_, old_->c_str(), 1) : ::unsetenv(name_); }

 private:
  const char* name_;
  std::optional<std::string> old_;
};

TEST(DetectTerminal, FollowsTheTerminalAndItsVariables) {
  const int main = ::posix_openpt(O_RDWR | O_NOCTTY);
  ASSERT_GE(main, 0);
  ASSERT_EQ(::grantpt(main), 0);
  ASSERT_EQ(::unlockpt(main), 0);
  const int side = ::open(::ptsname(main), O_RDWR | O_NOCTTY);
  ASSERT_GE(side, 0);
  const Environment no_color("NO_COLOR", nullptr), all("LC_ALL", nullptr), type("LC_CTYPE", nullptr), lang("LANG", "C");
  {
    const Environment term("TERM", "xterm");
    EXPECT_TRUE(detect_terminal(side).live);
    EXPECT_TRUE(detect_terminal(side).color);
    EXPECT_FALSE(detect_terminal(side).unicode);
    const Environment quiet("NO_COLOR", "1"), utf8("LC_ALL", "en_US.UTF-8");
    EXPECT_TRUE(detect_terminal(side).live);
    EXPECT_FALSE(detect_terminal(side).color);
    EXPECT_TRUE(detect_terminal(side).unicode);
    Pipe pipe;
    EXPECT_FALSE(detect_terminal(pipe.fd()).live);
  }
  {
    const Environment term("TERM", "dumb");
    EXPECT_FALSE(detect_terminal(side).live);
  }
  winsize size{};
  size.ws_col = 57;
  ASSERT_EQ(::ioctl(side, TIOCSWINSZ, &size), 0);
  EXPECT_EQ(terminal_width(side), 57);
  Pipe pipe;
  const Environment columns("COLUMNS", "44");
  EXPECT_EQ(terminal_width(pipe.fd()), 44);
  const Environment none("COLUMNS", nullptr);
  EXPECT_EQ(terminal_width(pipe.fd()), 80);
  ::close(side);
  ::close(main);
}

}  // namespace
}  // namespace concerto

#include "concerto/train/work_line.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <exception>
#include <utility>

#include "concerto/base/clock.h"
#include "concerto/train/human_units.h"
#include "concerto/train/progress.h"

namespace concerto {
namespace {

void write_all(int fd, std::string_view text) {
  while (!text.empty()) {
    const ssize_t n = ::write(fd, text.data(), text.size());
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return;  // nobody reads; the work goes on
    text.remove_prefix(static_cast<size_t>(n));
  }
}

}  // namespace

WorkLine::WorkLine(std::string what, std::string unit)
    : WorkLine(std::move(what), std::move(unit), {.live = detect_terminal(STDERR_FILENO).live}) {}

WorkLine::WorkLine(std::string what, std::string unit, const WorkLineOptions& options)
    : what_(std::move(what)),
      unit_(std::move(unit)),
      options_(options),
      start_(steady_seconds()),
      exceptions_(std::uncaught_exceptions()),
      thread_([this] { show(); }) {}

WorkLine::~WorkLine() {
  {
    std::lock_guard lock(mutex_);
    ended_ = true;
  }
  end_.notify_all();
  thread_.join();
  if (!drawn_) return;
  if (options_.live)
    write_all(options_.fd, "\r\x1b[K");
  else if (std::uncaught_exceptions() == exceptions_)
    write_all(options_.fd, fmt::format("{}: done in {}\n", what_, format_duration(seconds())));
}

double WorkLine::seconds() const { return steady_seconds() - start_; }

void WorkLine::show() {
  double wait = options_.live ? options_.first_live : options_.first_plain;
  std::unique_lock lock(mutex_);
  for (;;) {
    if (end_.wait_for(lock, std::chrono::duration<double>(wait), [this] { return ended_; })) return;
    draw();
    if (!options_.live) wait = std::min(2 * wait, 60.0);
  }
}

void WorkLine::draw() {
  const int64_t done = done_.load(std::memory_order_relaxed), total = total_.load(std::memory_order_relaxed);
  std::string text = what_ + ":";
  if (total > 0) text += fmt::format(" {} of {}{}{},", done, total, unit_.empty() ? "" : " ", unit_);
  text += " " + format_duration(seconds());
  if (options_.live) {
    // Bytes count as columns: a name outside ASCII is cut earlier than it need be, never later.
    const int width = options_.width > 0 ? options_.width : terminal_width(options_.fd);
    const size_t room = static_cast<size_t>(std::max(width - 1, 1));
    if (text.size() > room) {  // the numbers matter more than the beginning of a long path
      size_t cut = text.size() - room;
      while (cut < text.size() && (static_cast<unsigned char>(text[cut]) & 0xc0) == 0x80) ++cut;
      text.erase(0, cut);
    }
    write_all(options_.fd, "\r" + text + "\x1b[K");
  } else {
    write_all(options_.fd, text + "\n");
  }
  drawn_ = true;
}

}  // namespace concerto

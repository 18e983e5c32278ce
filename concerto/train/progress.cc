#include "concerto/train/progress.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <iterator>

#include "concerto/base/clock.h"
#include "concerto/train/human_units.h"

namespace concerto {
namespace {

constexpr double kRedrawSeconds = 0.1;
constexpr int64_t kBarColumns = 24, kShortestBar = 8;

std::string_view variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? std::string_view() : value;
}

template <class... A>
void add(fmt::memory_buffer& out, fmt::format_string<A...> format, A&&... a) {
  fmt::format_to(std::back_inserter(out), format, std::forward<A>(a)...);
}

std::string_view text_of(const fmt::memory_buffer& b) { return {b.data(), b.size()}; }

// A piece of the live line, in memory of its own: drawing allocates nothing. Bytes count as columns, so that a name
// outside ASCII makes a line shorter, never longer, than the terminal.
struct LinePart {
  char text[96];
  int64_t columns = 0;
  int64_t room_after = 0;  // columns that must stay free if this is shown
  bool bold = false;

  template <class... A>
  void set(fmt::format_string<A...> format, A&&... a) {
    columns = static_cast<int64_t>(
        std::min(fmt::format_to_n(text, sizeof(text), format, std::forward<A>(a)...).size, sizeof(text)));
  }
  std::string_view view() const { return {text, static_cast<size_t>(columns)}; }
};

}  // namespace

TerminalStyle detect_terminal(int fd) {
  TerminalStyle style;
  const std::string_view terminal = variable("TERM");
  style.live = ::isatty(fd) == 1 && !terminal.empty() && terminal != "dumb";
  style.color = style.live && variable("NO_COLOR").empty();
  std::string_view locale = variable("LC_ALL");
  if (locale.empty()) locale = variable("LC_CTYPE");
  if (locale.empty()) locale = variable("LANG");
  for (const std::string_view name : {"UTF-8", "utf-8", "UTF8", "utf8"}) {
    if (locale.find(name) != std::string_view::npos) style.unicode = true;
  }
  return style;
}

int terminal_width(int fd) {
  winsize size{};
  if (::ioctl(fd, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) return size.ws_col;
  const std::string_view columns = variable("COLUMNS");
  int width = 0;
  std::from_chars(columns.data(), columns.data() + columns.size(), width);
  return width > 0 ? width : 80;
}

Progress::Progress(const ProgressOptions& options) : options_(options) {
  if (options_.clock == nullptr) options_.clock = steady_seconds;
  options_.log_every_steps = std::max<int64_t>(options_.log_every_steps, 1);
  last_step_time_ = options_.clock();
}

Progress::~Progress() { clear(); }

double Progress::seconds_left() const {
  return step_seconds_ * static_cast<double>(std::max<int64_t>(last_.steps - last_.step, 0));
}

void Progress::step(const StepReport& r) {
  const double now = options_.clock(), seconds = now - last_step_time_;
  last_step_time_ = now;
  // The first step pays for warming up; it counts for little as soon as others are known.
  const double share = !any_step_ ? 1.0 : step_seconds_ > 4 * seconds ? 0.5 : 0.1;
  step_seconds_ += share * (seconds - step_seconds_);
  const bool first = !any_step_;
  any_step_ = true;
  last_.step = r.step;
  last_.steps = r.steps;
  last_.loss = r.loss;
  last_.lr = r.lr;
  last_.grad_norm = r.grad_norm;
  last_.tokens_per_s = r.tokens_per_s;
  last_.expert_max_over_mean = r.expert_max_over_mean;
  last_.expert_idle_share = r.expert_idle_share;
  last_.skipped = r.skipped;
  const bool has_experts = !r.moe_layers.empty();
  if (has_experts != !last_.moe_layers.empty()) last_.moe_layers.assign(has_experts ? 1 : 0, 0);
  status_.clear();

  if (options_.style.live) {
    if (r.step >= r.steps || now - last_draw_ >= kRedrawSeconds) draw();
    return;
  }
  if (!first && r.step < r.steps && r.step % options_.log_every_steps != 0 && !r.skipped) return;
  line_.clear();
  add(line_, "step {}/{}  loss {:.4f}  lr {:.3g}  grad_norm {:.3f}  {} tokens/s", r.step, r.steps, r.loss, r.lr,
      r.grad_norm, format_count(r.tokens_per_s));
  if (has_experts) add(line_, "  experts {:.2f}x", r.expert_max_over_mean);
  if (r.expert_idle_share > 0) add(line_, " {:.1f}% idle", 100 * r.expert_idle_share);
  if (r.skipped) add(line_, "  skipped: bad loss");
  if (r.step < r.steps) add(line_, "  {} left", format_duration(seconds_left()));
  line_.push_back('\n');
  send();
}

void Progress::eval(const EvalReport& r) {
  valid_loss_ = r.valid_loss;
  line_.clear();
  fmt::memory_buffer text;
  add(text, "step {}  valid loss {:.4f}  perplexity {:.2f}  ({} tokens, {})", r.step, r.valid_loss,
      std::exp(r.valid_loss), format_count(static_cast<double>(r.valid_tokens)), format_duration(r.seconds));
  log(text_of(text));
}

void Progress::status(std::string_view text) {
  if (!options_.style.live) return log(text);
  status_.clear();
  status_.append(text.data(), text.data() + text.size());
  draw();
}

void Progress::log(std::string_view text) {
  clear();
  line_.clear();
  line_.append(text.data(), text.data() + text.size());
  line_.push_back('\n');
  send();
  if (options_.style.live && any_step_) draw();
}

void Progress::finish() {
  if (!options_.style.live || !any_step_) return;
  status_.clear();
  draw();
  line_.clear();
  line_.push_back('\n');
  send();
  drawn_ = false;
}

void Progress::clear() {
  if (!drawn_) return;
  line_.clear();
  add(line_, "\r\x1b[K");
  send();
  drawn_ = false;
}

void Progress::send() {
  for (size_t done = 0; done < line_.size();) {
    const ssize_t n = ::write(options_.fd, line_.data() + done, line_.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return;  // nobody reads any more; training goes on
    done += static_cast<size_t>(n);
  }
}

void Progress::add_bar(int64_t columns, double share) {
  const bool unicode = options_.style.unicode, color = options_.style.color;
  const int64_t full = static_cast<int64_t>(std::clamp(share, 0.0, 1.0) * static_cast<double>(columns) + 0.5);
  if (color) add(line_, "\x1b[32m");
  for (int64_t i = 0; i < full; ++i) add(line_, "{}", unicode ? "━" : "#");
  if (color) add(line_, "\x1b[90m");
  for (int64_t i = full; i < columns; ++i) add(line_, "{}", unicode ? (color ? "━" : "─") : ".");
  if (color) add(line_, "\x1b[0m");
}

// "42/2000 ━━━━──── · loss 5.1234 · 12.3k tok/s · 3m07s left · experts 1.32x · valid 5.2001", from the right cut to
// what fits; the bar takes the room that is left, up to kBarColumns.
void Progress::draw() {
  last_draw_ = options_.clock();
  drawn_ = true;
  // The last column stays free: some terminals wrap when it is written.
  const int64_t width = std::max((options_.width > 0 ? options_.width : terminal_width(options_.fd)) - 1, 0);
  LinePart head;
  if (any_step_) head.set("{}/{}", last_.step, last_.steps);  // before the first step there is only the status
  head.columns = std::min(head.columns, width);
  LinePart parts[5];
  int count = 0;
  if (status_.size() > 0) {
    parts[count++].set("{}", text_of(status_));
  } else {
    parts[count].bold = true;
    parts[count++].set("loss {:.4f}{}", last_.loss, last_.skipped ? " skipped" : "");
    parts[count++].set("{} tok/s", format_count(last_.tokens_per_s));
    if (last_.step < last_.steps) parts[count++].set("{} left", format_duration(seconds_left()));
    if (last_.expert_idle_share > 0)
      parts[count++].set("experts {:.2f}x {:.1f}% idle", last_.expert_max_over_mean, 100 * last_.expert_idle_share);
    else if (!last_.moe_layers.empty())
      parts[count++].set("experts {:.2f}x", last_.expert_max_over_mean);
    if (valid_loss_) {
      parts[count].room_after = 1 + kShortestBar;  // rather the bar than this one
      parts[count++].set("valid {:.4f}", *valid_loss_);
    }
  }
  int64_t used = head.columns;
  int shown = 0;
  while (shown < count && used + 3 + parts[shown].columns + parts[shown].room_after <= width)
    used += 3 + parts[shown++].columns;
  const int64_t bar = any_step_ ? std::min(width - used - 1, kBarColumns) : 0;

  line_.clear();
  add(line_, "\r{}", head.view());
  if (bar >= kShortestBar) {
    line_.push_back(' ');
    add_bar(bar, static_cast<double>(last_.step) / static_cast<double>(std::max<int64_t>(last_.steps, 1)));
  }
  for (int i = 0; i < shown; ++i) {
    if (i > 0 || any_step_) add(line_, "{}", options_.style.unicode ? " · " : " | ");
    const bool bold = parts[i].bold && options_.style.color;
    add(line_, "{}{}{}", bold ? "\x1b[1m" : "", parts[i].view(), bold ? "\x1b[0m" : "");
  }
  add(line_, "\x1b[K");
  send();
}

}  // namespace concerto

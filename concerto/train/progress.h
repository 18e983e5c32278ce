// What a person sees while training runs: one live line on a terminal, plain lines in a log file or pipe.
#pragma once

#include <fmt/format.h>

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "concerto/train/metrics.h"

namespace concerto {

// What an output can show. `live`: it is a terminal that can rewrite its line (not TERM=dumb). `color` honours
// NO_COLOR. `unicode` follows the locale.
struct TerminalStyle {
  bool live = false;
  bool color = false;
  bool unicode = false;
};
TerminalStyle detect_terminal(int fd);
int terminal_width(int fd);  // columns now; else $COLUMNS; else 80

struct ProgressOptions {
  int fd = 1;
  TerminalStyle style;
  int64_t log_every_steps = 1;  // plain lines: every so many steps, and always the first and last
  // For tests: the time in seconds, and the width; by default the steady clock and the terminal's own.
  double (*clock)() = nullptr;
  int width = 0;
};

// Not thread-safe: called by the thread that runs the steps. A steady step allocates nothing.
class Progress {
 public:
  explicit Progress(const ProgressOptions& options);
  ~Progress();  // leaves the cursor at the start of an empty line
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void step(const StepReport& report);
  void eval(const EvalReport& report);
  // Shows what is going on while no step ends ("saving checkpoint 500"), until the next step.
  void status(std::string_view text);
  // A whole line that stays; the live line continues below it. Use it for every message while training runs.
  void log(std::string_view line);
  // Ends the live line, keeping its last state on the screen.
  void finish();

 private:
  void draw();
  void clear();
  void send();
  void add_bar(int64_t columns, double share);
  double seconds_left() const;

  ProgressOptions options_;
  StepReport last_;  // its scalars only
  bool any_step_ = false, drawn_ = false;
  double last_draw_ = 0, last_step_time_ = 0;
  double step_seconds_ = 0;  // running mean of wall time a step, evaluations and checkpoints included
  std::optional<double> valid_loss_;
  fmt::memory_buffer line_, status_;
};

}  // namespace concerto

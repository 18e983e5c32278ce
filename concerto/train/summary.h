// What is printed when a run ends: the numbers that matter and where to look next.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "concerto/train/loss_plot.h"
#include "concerto/train/memory_report.h"

namespace concerto {

struct RunSummary {
  std::string run_dir;
  int64_t first_step = 1, step = 0, steps = 0;  // this process ran first_step..step of `steps`
  std::string stopped_by;                       // "SIGTERM", "Ctrl-C"; empty: ran to its end
  double final_loss = 0;                        // training loss of the last step
  std::optional<double> best_valid_loss;
  int64_t best_valid_step = 0;
  int64_t tokens = 0;        // of this process
  double seconds = 0;        // of this process, start-up included
  double train_seconds = 0;  // of them in training steps: what tokens/s divides by
  int64_t skipped_steps = 0;
  std::string unsaved;  // why the last checkpoint or the model could not be written; empty: both were
  MemoryReport memory;
  struct Output {
    std::string path;  // in run_dir
    std::string hint;  // how to open it
  };
  std::vector<Output> outputs;
};

// Those of the files that `train` leaves which exist in run_dir: metrics.jsonl, loss.svg, event files, trace.json, the
// latest checkpoint, model/.
std::vector<RunSummary::Output> find_outputs(const std::string& run_dir);

// A block of lines for the terminal, with a chart of the loss if there are curves and room.
std::string format_summary(const RunSummary& summary, const LossCurves& curves, int64_t columns, bool unicode);

}  // namespace concerto

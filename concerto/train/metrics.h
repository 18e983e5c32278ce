// What a run says about itself: one report a step, shared by metrics.jsonl, TensorBoard and the progress line.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "concerto/train/record_file.h"

namespace concerto {

// One training step, over all ranks. Reuse one object: then a steady step allocates nothing.
struct StepReport {
  int64_t step = 0;                // 1 is the first
  int64_t steps = 0;               // of the whole run
  double loss = 0;                 // language-model loss, mean over this step's valid tokens
  double total_loss = 0;           // what was differentiated: loss + auxiliary + MTP terms
  double aux_loss = 0;             // router balance loss, before its coefficient
  double z_loss = 0;               // router z loss, before its coefficient; 0 without one
  double orthogonal_loss = 0;      // of the router weights, before its coefficient; 0 without one
  std::vector<double> mtp_losses;  // [MTP blocks], before the scaling factor
  double lr = 0;
  double grad_norm = 0;  // before clipping
  int64_t tokens = 0;    // valid tokens of this step
  double tokens_per_s = 0;
  double seconds = 0;
  double expert_max_over_mean = 1;                      // worst layer; 1 for a dense model
  std::vector<int64_t> moe_layers;                      // [MoE layers] their layer numbers
  std::vector<std::vector<int64_t>> tokens_per_expert;  // [MoE layers][experts]
  int64_t peak_bytes = 0;                               // highest resident memory so far; 0: not measured
  bool skipped = false;                                 // a bad loss; no weight was changed
};

struct EvalReport {
  int64_t step = 0;  // training steps done before it
  double valid_loss = 0;
  int64_t valid_tokens = 0;
  double seconds = 0;
};

// Busiest expert over the mean: 1 is balanced, the number of experts is all tokens to one. 1 without tokens.
double max_over_mean(std::span<const int64_t> tokens_per_expert);
// Fills report.expert_max_over_mean with the worst of report.tokens_per_expert.
void set_expert_max_over_mean(StepReport& report);

// RUNDIR/metrics.jsonl. A training row: {step, loss, total_loss, lr, grad_norm, tokens, tokens_per_s,
// expert_max_over_mean, aux_loss, z_loss and orthogonal_loss (if not 0), mtp_losses (if any), expert_load {layer: max
// over mean} (if MoE), seconds, peak_bytes (if measured), skipped (if so)}. An evaluation row: {step, valid_loss,
// valid_tokens, seconds}; only training rows have `loss`. Numbers have 17 significant digits; NaN and infinity are
// null. `tokens_per_s`, `seconds` and `peak_bytes` depend on the machine, every other field is a function of the run's
// settings.
class MetricsWriter {
 public:
  // Continues after step `resume_step`: rows of later steps, broken lines and a torn last line are removed first, by
  // writing a new file and renaming it. 0 starts an empty file. Error(kIo) if the file cannot be read or written.
  MetricsWriter(const std::string& path, int64_t resume_step, Warn warn = warn_on_stderr);
  void write(const StepReport& report);
  void write(const EvalReport& report);
  // Call before a checkpoint is sealed, and write the rows of a step before its checkpoint: resume keeps rows up to
  // that step only.
  void sync() { file_.sync(); }

 private:
  fmt::memory_buffer row_;
  RecordFile file_;
};

}  // namespace concerto

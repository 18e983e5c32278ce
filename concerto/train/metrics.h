// What a run says about itself: one report a step, shared by metrics.jsonl, TensorBoard and the progress line.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "concerto/train/expert_load.h"
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
  int64_t tokens = 0;    // that went through the model in this step, masked prompts included
  double tokens_per_s = 0;
  double seconds = 0;

  // What the routers did, counted over all micro-batches and ranks. Whoever steps fills these four, then calls
  // summarize_loads.
  std::vector<int64_t> moe_layers;                       // [MoE layers] their layer numbers
  std::vector<std::vector<int64_t>> tokens_per_expert;   // [MoE layers][experts] choices, before any is dropped
  std::vector<std::vector<int64_t>> dropped_per_expert;  // the same shape: those dropped; empty: nothing ever is
  std::vector<std::vector<double>> correction_bias;      // the same shape, after the step; empty: routers without
  // By summarize_loads.
  std::vector<LayerLoad> layer_loads;  // [MoE layers]
  double expert_max_over_mean = 1;     // worst layer; 1 for a dense model
  double expert_idle_share = 0;        // of all experts of all layers; 0 for a dense model

  int64_t peak_bytes = 0;  // highest resident memory so far; 0: not measured
  bool skipped = false;    // a bad loss; no weight was changed
};

struct EvalReport {
  int64_t step = 0;  // training steps done before it
  double valid_loss = 0;
  int64_t valid_tokens = 0;
  double seconds = 0;
};

// Fills what StepReport says it fills; a bug if the counts do not fit each other.
void summarize_loads(StepReport& report);

// RUNDIR/metrics.jsonl. A training row: {step, loss, total_loss, lr, grad_norm, tokens, tokens_per_s,
// expert_max_over_mean, aux_loss, z_loss and orthogonal_loss (if not 0), mtp_losses (if any), seconds, peak_bytes (if measured), skipped (if so)}; of a MoE
// model also expert_idle_share and, each {layer: number}, expert_load (max over mean), expert_idle (share),
// expert_entropy, expert_dropped (share, if routers drop) and expert_bias ([lowest, highest], if routers have one). An
// evaluation row: {step, valid_loss, valid_tokens, seconds}; only training rows have `loss`. Numbers have 17
// significant digits; NaN and infinity are null. `tokens_per_s`, `seconds` and `peak_bytes` depend on the machine,
// every other field is a function of the run's settings.
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

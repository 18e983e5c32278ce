// Compares this program with a recorded reference (tests/golden/README.md): activations, logits, losses, every
// gradient, optimizer steps and greedy text, through the very segments, store, executor and optimizer that `train`
// runs.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "concerto/base/thread_pool.h"
#include "concerto/config/run_config.h"
#include "concerto/ops/backend.h"

namespace concerto {

struct GoldenOptions {
  std::string model_dir;   // config.json and safetensors
  std::string golden_dir;  // golden.safetensors and case.json
  std::string schedule = "1f1b";
  Recompute recompute = Recompute::kNone;
  int64_t micro_batches =
      1;  // 1, or one a row: the losses and gradients must not change (no aux loss in the loss then)
  std::function<void(int64_t done, int64_t total)> progress;  // of passes over the model; may be empty
};

struct GoldenLine {
  std::string name;
  double max = 0, l2 = 0;  // max|a-b| / max|b| and |a-b| / |b|; absolute where b is all zero
  double tolerance_max = 0, tolerance_l2 = 0;
  bool ok() const { return max <= tolerance_max && l2 <= tolerance_l2; }  // NaN is not
};

struct GoldenReport {
  std::vector<GoldenLine> lines;
  std::vector<std::string> fed;     // tensors that went in
  std::vector<std::string> unused;  // tensors of the file that were neither fed nor compared: a failure
  int64_t total = 0;                // tensors of the file
  bool ok() const;
};

GoldenReport verify_golden(const GoldenOptions& options, const Backend& backend, ThreadPool& pool);

}  // namespace concerto

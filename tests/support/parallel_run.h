// A few training steps of a small model in any layout, ranks as threads, and what they came to: gathered from the
// ranks' shards, so that layouts can be compared tensor by tensor.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "concerto/comm/local/local_world.h"
#include "concerto/train/step_engine.h"
#include "tests/support/tiny_model.h"

namespace concerto::test {

struct Layout {
  MeshSizes mesh;
  int vpp = 1;
  int zero = 1;
  std::string schedule = "1f1b";
  Recompute recompute = Recompute::kNone;
  LocalOptions local;
  std::string name() const;  // "tp2 pp2 dp2 ep4 zero1 1f1b"
};

// What a step came to, the same on every rank.
struct StepTrace {
  double loss = 0, total_loss = 0, grad_norm = 0, aux_loss = 0, z_loss = 0, orthogonal_loss = 0;
  std::vector<double> mtp_losses;
  int64_t tokens = 0;
  std::vector<std::vector<int64_t>> tokens_per_expert, dropped_per_expert;
  std::vector<std::vector<double>> correction_bias;
};

struct RunTrace {
  std::vector<StepTrace> steps;
  Tensors first_gradients;        // of the first step, unclipped
  Tensors weights;                // after the last
  Tensors moments;                // "1.NAME" and "2.NAME"
  bool played_as_planned = true;  // every rank's executed actions are its list
};

// A config for `model` whose steps are `micro_batches` of `rows` sequences of at most `seq` tokens.
RunConfig parallel_config(const ModelConfig& model, const std::string& dtype, int64_t micro_batches, int64_t rows,
                          int64_t seq);

// `steps[s]`: the micro-batches of a step. Weights are fill_random's; arenas are poisoned.
RunTrace run_layout(const RunConfig& config, const std::vector<std::vector<MicroBatch>>& steps, const Layout& layout,
                    const Backend& backend);
// On one rank, without groups.
RunTrace run_alone(const RunConfig& config, const std::vector<std::vector<MicroBatch>>& steps, const Backend& backend,
                   Recompute recompute = Recompute::kNone);

}  // namespace concerto::test

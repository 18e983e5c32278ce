// A few training steps of a small model in any layout, ranks as threads, and what they came to: gathered from the
// ranks' shards, so that layouts can be compared tensor by tensor.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "concerto/comm/local/local_world.h"
#include "concerto/train/step_engine.h"
#include "tests/support/rank_cost.h"
#include "tests/support/tiny_model.h"

namespace concerto::test {

struct Layout {
  MeshSizes mesh;
  int vpp = 1;
  int zero = 1;
  std::string schedule = "1f1b";
  Recompute recompute = Recompute::kNone;
  LocalOptions local = {};
  std::vector<int> rank_of_expert = {};  // empty: contiguous blocks
  uint64_t shuffle = 0;                  // seed of a valid permutation of the action lists; 0: as they are built
  std::string name() const;              // "tp2 pp2 dp2 ep4 zero1 1f1b"
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
  int64_t swaps = 0;              // by which the lists differ from the builder's
  Choices choices;                // on one rank: of the first step
  std::vector<RankCost> costs;    // [world] of the first step
};

using Weights = std::map<std::string, std::vector<float>>;  // whole tensors, by name

struct Job {
  RunConfig config;
  std::vector<std::vector<MicroBatch>> steps;  // the micro-batches of each step
  Weights start = {};                          // empty: fill_random's
};

// A config for `model` whose steps are `micro_batches` of `rows` sequences of at most `seq` tokens.
RunConfig parallel_config(const ModelConfig& model, const std::string& dtype, int64_t micro_batches, int64_t rows,
                          int64_t seq);
// The same for a layout.
RunConfig config_of(const RunConfig& config, const Layout& layout);

// Arenas are poisoned.
RunTrace run_layout(const Job& job, const Layout& layout, const Backend& backend);
// On one rank, without groups.
RunTrace run_alone(const Job& job, const Backend& backend, Recompute recompute = Recompute::kNone);

// Another order of the same actions that gives the same bits: neighbours that neither add to the same sums nor wait for
// each other change places at random. How many did: `swaps`.
PipelineSchedule shuffled(const PipelineSchedule& schedule, uint64_t seed, int64_t& swaps);

}  // namespace concerto::test

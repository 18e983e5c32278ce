// Small models with random weights, batches for them, and a step that a test can take apart.
#pragma once

#include <map>
#include <span>
#include <string>
#include <vector>

#include "concerto/config/run_config.h"
#include "concerto/optim/optimizer.h"
#include "concerto/train/executor.h"

namespace concerto::test {

ModelConfig tiny_dense();  // tied head, 2 layers, grouped heads
ModelConfig tiny_moe();    // untied head, 3 layers: dense, MoE, MoE; 8 experts top-3, shared experts, aux loss

// Every tensor random, norms around one, biases and correction bias not zero; the same f32 values in every dtype.
void fill_random(ParameterStore& store, uint64_t seed);

// Rows of documents: {{3, 5}, {4}} is a row with two documents and a row with one. Some targets are left out.
using Rows = std::vector<std::vector<int>>;
MicroBatch random_batch(const ModelConfig& config, const Rows& rows, uint64_t seed);
MicroBatch joined(std::span<const MicroBatch> parts);

struct Plan {
  std::string schedule = "1f1b";
  Recompute recompute = Recompute::kNone;
  LossAverage loss_average = LossAverage::kTokens;
  int64_t token_balance_seqlen = 0;
  RoutingOptions routing;
  int64_t slots = 1;
  int64_t max_tokens = 64;
  bool poison = true;
};

using Tensors = std::map<std::string, std::vector<double>>;

// Model, store and executor in one.
class TinyRun {
 public:
  TinyRun(const ModelConfig& config, const Backend& backend, ThreadPool& pool, DType dtype, const Plan& plan = {});

  // Zeroes the gradients and plays the plan's schedule, or the given one.
  const StepOutput& step(std::span<const MicroBatch> batches);
  const StepOutput& step(const PipelineSchedule& schedule, std::span<const MicroBatch> batches);
  Tensors gradients() const;
  // What was differentiated.
  double total_loss() const;

  ModelConfig config;
  ParameterStore store;
  Stage stage;
  Executor executor;
  StepOutput output;

 private:
  ThreadPool& pool_;
  std::string schedule_;
  RoutingOptions routing_;
};

// |a - b| / |b| over all elements of a tensor (absolute where b is zero); the worst tensor and its name.
struct Distance {
  double value = 0;
  std::string name;
};
Distance distance(const Tensors& a, const Tensors& b);
double distance(const std::vector<double>& a, const std::vector<double>& b);

}  // namespace concerto::test

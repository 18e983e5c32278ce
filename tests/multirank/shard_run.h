// A small model on some tensor parallel ranks (threads), without executor and optimizer: one micro-batch forward and
// backward, and what all ranks have together.
#pragma once

#include "concerto/comm/communicator.h"
#include "concerto/model/stage.h"
#include "tests/support/tiny_model.h"

namespace concerto::test {

struct ShardSetup {
  ModelConfig config;
  const Backend* backend = nullptr;
  DType dtype = DType::kF64;
  Recompute recompute = Recompute::kNone;
  RoutingUnit unit = RoutingUnit::kMicroBatch;
  int threads = 1;
};

struct ShardResult {
  Tensors shown;                  // what an observer of rank 0 was shown
  Tensors gradients;              // of the whole model: the ranks' shards, those of the same elements added
  std::vector<double> loss_sums;  // of rank 0
  double eval_loss_sum = 0;
  std::vector<int64_t> counts;  // of every layer and unit: as chosen, bare, kept, claims
  std::vector<double> sums;     // probabilities, z
};

// Checks on the way: all ranks agree in every bit on losses, counts and sums; the memory is what a dry run has measured;
// unused memory is NaN; backward_weight exchanges nothing.
ShardResult run_shards(const ShardSetup& setup, const MicroBatch& batch, int tp);

// |a - b| at most `tolerance` times |b|, tensor by tensor, |b| at least `floor` times the largest: some gradients are
// zero but for rounding.
void expect_close(const Tensors& got, const Tensors& want, double tolerance, double floor = 1e-5);

}  // namespace concerto::test
